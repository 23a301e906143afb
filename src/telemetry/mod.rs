//! Setup of logs, metrics and traces. The metrics themselves are defined in the modules that they describe.

mod caller_span;
mod exposition;
mod http_client;
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
pub use prometheus::{MetricsPage, PrometheusSettings};
pub use statsd::{NameMapping, Statsd, StatsdProtocol, StatsdSettings};
pub use traces::{Span, Traces};

use std::time::{Duration, SystemTime};

use opentelemetry::KeyValue;
use opentelemetry_sdk::Resource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Name of the response time in statsd, where it is in milliseconds.
const RESPONSE_TIME: &str = "ratelimit_server.ShouldRateLimit.response_time";

/// Settings of logs, metrics and traces.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Settings of the log on standard error.
    pub log: LogSettings,
    /// Maximum number of metric series that contain values of callers (`detailed_metric`, `value_to_metric`,
    /// overrides): nine for each combination of values. Further hits are counted in the series `other`.
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

/// Protocol of the OpenTelemetry collector.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OtlpProtocol {
    /// gRPC.
    #[default]
    Grpc,
    /// HTTP with protobuf.
    Http,
}

/// Settings of an OpenTelemetry collector (OTLP).
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct OtlpSettings {
    /// Address: `http://host:4317`, or for HTTP `http://host:4318`, to which `/v1/traces` and `/v1/metrics` are added.
    pub endpoint: String,
    /// Protocol: `grpc` or `http`.
    pub protocol: OtlpProtocol,
    /// Name of the service (`service.name`).
    pub service_name: String,
    /// Namespace of the service (`service.namespace`).
    pub service_namespace: Option<String>,
    /// Identifier of this instance (`service.instance.id`).
    pub service_instance_id: Option<String>,
    /// Whether to send metrics. `/metrics` is available in any case.
    pub metrics: bool,
    /// Interval at which metrics are sent.
    #[serde(with = "crate::duration")]
    #[schemars(schema_with = "crate::duration::schema")]
    pub interval: Duration,
    /// Whether to send traces.
    pub traces: bool,
    /// Proportion of requests that start a trace. A sampling decision of the caller takes precedence.
    pub sample_ratio: f64,
}

impl Default for OtlpSettings {
    fn default() -> Self {
        Self {
            endpoint: "http://127.0.0.1:4317".into(),
            protocol: OtlpProtocol::default(),
            service_name: "sluicegate".into(),
            service_namespace: None,
            service_instance_id: None,
            metrics: false,
            interval: Duration::from_secs(10),
            traces: false,
            sample_ratio: 0.01,
        }
    }
}

/// Error returned when telemetry cannot be set up.
#[derive(Debug, thiserror::Error)]
#[error("cannot set up telemetry: {0}")]
pub struct TelemetryError(pub(crate) String);

impl OtlpSettings {
    fn resource(&self) -> Resource {
        let optional =
            [("service.namespace", &self.service_namespace), ("service.instance.id", &self.service_instance_id)];
        let named = optional.into_iter().filter_map(|(name, value)| Some(KeyValue::new(name, value.clone()?)));
        Resource::builder().with_service_name(self.service_name.clone()).with_attributes(named).build()
    }

    /// Returns the URL of the collector with this path, such as `/v1/traces`.
    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.endpoint.trim_end_matches('/'))
    }
}

/// Returns the current time for logs and metrics. It does not influence decisions.
#[expect(clippy::disallowed_methods, reason = "log lines and data points contain the time at which they were written")]
fn wall_clock() -> SystemTime {
    SystemTime::now()
}
