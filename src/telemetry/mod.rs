//! Setup of logs, metrics and traces. The metrics themselves are defined in the modules that they describe.

mod caller_span;
mod exposition;
mod logs;
mod mapping;
mod meters;
mod one_line;
mod otlp;
mod prometheus;
mod statsd;
mod traces;

pub use exposition::Exposition;
pub use logs::{LogFormat, LogSettings};
#[cfg(any(test, fuzzing))]
pub use mapping::fuzz;
pub use meters::Meters;
pub use otlp::{OtlpCompression, OtlpProtocol, OtlpSettings, OtlpTlsSettings};
pub use prometheus::{MetricsPage, PrometheusSettings};
pub use statsd::{NameMapping, Statsd, StatsdProtocol, StatsdSettings};
pub use traces::{Span, Traces};

use std::time::SystemTime;

use serde::{Deserialize, Serialize};

/// Name of the response time in statsd, where it is in milliseconds.
const RESPONSE_TIME: &str = "ratelimit_server.ShouldRateLimit.response_time";

/// Settings of logs, metrics and traces.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Settings {
    /// Settings of the log on standard error.
    pub log: LogSettings,
    /// Maximum number of metric series that contain values of callers (`detailed_metric`, `value_to_metric`,
    /// overrides): ten for each combination of values. Further hits are counted in the series `other`.
    pub max_dynamic_series: usize,
    /// Settings of the OpenTelemetry collector.
    pub otlp: OtlpSettings,
    /// Settings of the metrics that Prometheus reads.
    pub prometheus: PrometheusSettings,
    /// Settings of the statsd server.
    pub statsd: StatsdSettings,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            log: LogSettings::default(),
            max_dynamic_series: 100_000,
            otlp: OtlpSettings::default(),
            prometheus: PrometheusSettings::default(),
            statsd: StatsdSettings::default(),
        }
    }
}

impl Settings {
    /// Returns a problem of the settings, or `None` if they are valid.
    #[must_use]
    pub fn problem(&self) -> Option<&'static str> {
        self.log.problem().or_else(|| self.otlp.problem()).or_else(|| self.statsd.problem())
    }
}

/// Error returned when telemetry cannot be set up.
#[derive(Debug, thiserror::Error)]
#[error("cannot set up telemetry: {0}")]
pub struct TelemetryError(pub(crate) String);

/// Returns the current time for logs and metrics. It does not influence decisions.
#[expect(clippy::disallowed_methods, reason = "log lines and data points contain the time at which they were written")]
fn wall_clock() -> SystemTime {
    SystemTime::now()
}

/// Expands a template with the groups of a regular expression.
fn expand(groups: &regex_lite::Captures<'_>, template: &str) -> String {
    let mut text = String::new();
    groups.expand(template, &mut text);
    text
}
