//! Export of metrics and traces to an OpenTelemetry collector (OTLP).

mod certificates;
mod collector;
mod http_client;
mod metrics;
mod settings;
mod traces;

pub(super) use metrics::MetricExport;
pub(super) use traces::Exporter as SpanExporter;

pub use settings::{OtlpCompression, OtlpProtocol, OtlpSettings, OtlpTlsSettings};
