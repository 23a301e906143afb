//! Logs, metrics and traces: set-up only. What is counted stands beside what counts it.

mod exposition;
mod logs;
mod mapping;
mod meters;
mod otlp;
mod prometheus;
mod statsd;
mod traces;

pub use exposition::Exposition;
pub use logs::{LogFormat, LogSettings};
pub use meters::Meters;
pub use prometheus::{MetricsPage, PrometheusSettings};
pub use statsd::{NameMapping, Statsd, StatsdProtocol, StatsdSettings};
pub use traces::{Span, Traces};

use std::time::{Duration, SystemTime};

use opentelemetry::KeyValue;
use opentelemetry_sdk::Resource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The response time's name in statsd; it is in milliseconds there.
const RESPONSE_TIME: &str = "ratelimit_server.ShouldRateLimit.response_time";

/// What to tell, and whom.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Logs, on standard error.
    pub log: LogSettings,
    /// Series that callers' values can make (`detailed_metric`, `value_to_metric`, overrides).
    pub max_dynamic_series: usize,
    /// OpenTelemetry collector to send to.
    pub otlp: OtlpSettings,
    /// What Prometheus reads.
    pub prometheus: PrometheusSettings,
    /// Statsd to send to.
    pub statsd: StatsdSettings,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            log: LogSettings::default(),
            max_dynamic_series: 10_000,
            otlp: OtlpSettings::default(),
            prometheus: PrometheusSettings::default(),
            statsd: StatsdSettings::default(),
        }
    }
}

/// How a collector is spoken to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OtlpProtocol {
    /// Over gRPC.
    #[default]
    Grpc,
    /// Over HTTP, in protobuf.
    Http,
}

/// An OpenTelemetry collector, spoken to in OTLP.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct OtlpSettings {
    /// `http://host:4317`; over HTTP `http://host:4318`, to which `/v1/traces` and `/v1/metrics` are added.
    pub endpoint: String,
    /// How.
    pub protocol: OtlpProtocol,
    /// What the service calls itself.
    pub service_name: String,
    /// And the name of what it is a part of.
    pub service_namespace: Option<String>,
    /// And what this instance is called.
    pub service_instance_id: Option<String>,
    /// Send metrics, too; `/metrics` is there in any case.
    pub metrics: bool,
    /// Between two sendings of metrics.
    #[serde(with = "crate::duration")]
    #[schemars(schema_with = "crate::duration::schema")]
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

/// Telemetry cannot be set up.
#[derive(Debug, thiserror::Error)]
#[error("telemetry cannot be set up: {0}")]
pub struct TelemetryError(pub(crate) String);

impl OtlpSettings {
    fn resource(&self) -> Resource {
        let optional =
            [("service.namespace", &self.service_namespace), ("service.instance.id", &self.service_instance_id)];
        let named = optional.into_iter().filter_map(|(name, value)| Some(KeyValue::new(name, value.clone()?)));
        Resource::builder().with_service_name(self.service_name.clone()).with_attributes(named).build()
    }

    /// Where one kind of data goes over HTTP.
    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.endpoint.trim_end_matches('/'))
    }
}

/// What stands beside what is told: it decides nothing.
#[expect(clippy::disallowed_methods, reason = "log lines and data points say when they were written")]
fn wall_clock() -> SystemTime {
    SystemTime::now()
}
