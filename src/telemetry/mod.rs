//! Logs, metrics and traces: set-up only. What is counted stands beside what counts it.

mod logs;
mod meters;
mod traces;

pub use logs::{LogFormat, LogSettings};
pub use meters::Meters;
pub use traces::{Span, Traces};

use std::time::Duration;

use opentelemetry_sdk::Resource;
use serde::{Deserialize, Serialize};

/// What to tell, and whom.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// Logs, on standard error.
    pub log: LogSettings,
    /// Series that callers' values can make (`detailed_metric`, `value_to_metric`, overrides).
    pub max_dynamic_series: usize,
    /// OpenTelemetry collector to send to.
    pub otlp: OtlpSettings,
}

impl Default for Settings {
    fn default() -> Self {
        Self { log: LogSettings::default(), max_dynamic_series: 10_000, otlp: OtlpSettings::default() }
    }
}

/// An OpenTelemetry collector, spoken to in OTLP over gRPC.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default)]
pub struct OtlpSettings {
    /// `http://host:4317`.
    pub endpoint: String,
    /// Send metrics, too; `/metrics` is there in any case.
    pub metrics: bool,
    /// Between two sendings of metrics.
    #[serde(with = "crate::duration")]
    pub interval: Duration,
    /// Send traces.
    pub traces: bool,
    /// Share of the requests that start a trace; a caller's own sampling decision is followed.
    pub sample_ratio: f64,
}

impl Default for OtlpSettings {
    fn default() -> Self {
        Self {
            endpoint: "http://127.0.0.1:4317".into(),
            metrics: false,
            interval: Duration::from_secs(10),
            traces: false,
            sample_ratio: 0.01,
        }
    }
}

/// Telemetry cannot be set up.
#[derive(Debug, thiserror::Error)]
#[error("telemetry cannot be set up: {0}")]
pub struct TelemetryError(pub(crate) String);

fn resource() -> Resource {
    Resource::builder().with_service_name("sluicegate").build()
}
