//! [`VARIABLES`]: the variables of OpenTelemetry that concern this service or envoyproxy/ratelimit, and their effects.
//!
//! envoyproxy/ratelimit (main of July 2026) uses the exporters and the SDK of opentelemetry-go 1.43, which read variables
//! themselves. envoyproxy/ratelimit then sets the name of the service and the sampler, and selects the exporter and the
//! propagators.

use super::values::{self, Parser};

/// A variable of OpenTelemetry.
pub struct Variable {
    /// Name of the variable.
    pub name: &'static str,
    /// Effect of the variable on this service.
    pub effect: Effect,
    /// Whether the variable has an effect in envoyproxy/ratelimit.
    pub is_read_there: bool,
    /// The reason for which the variable has no effect together with those of envoyproxy/ratelimit.
    pub overridden: Option<&'static str>,
}

/// Effect of a variable on this service.
#[derive(Clone, Copy)]
pub enum Effect {
    /// The variable is one setting. The parser converts its value.
    Setting(&'static str, Parser),
    /// The variable determines this setting together with another variable.
    Combined(&'static str),
    /// The OpenTelemetry library of this service reads the variable itself.
    Sdk,
    /// The variable has no effect, for this reason.
    Ignored(&'static str),
}

use Effect::{Combined, Ignored, Sdk, Setting};

const CA_FILE: &str = "telemetry.otlp.tls.ca_file";
const CERT_FILE: &str = "telemetry.otlp.tls.cert_file";
const KEY_FILE: &str = "telemetry.otlp.tls.key_file";
const COMPRESSION: &str = "telemetry.otlp.compression";
const TIMEOUT: &str = "telemetry.otlp.timeout";
const PROTOCOL: &str = "telemetry.otlp.protocol";

const SHARED: &str = "traces and metrics differ in addresses and headers only";
const SCHEME: &str = "the scheme of the address decides, http:// or https://";
const NO_EVENTS: &str = "spans have neither events nor links";
const BOUNDED: &str = "spans have two attributes, whose size is bounded by grpc.limits.max_text_bytes";
const BY_NAME: &str = "TRACING_SERVICE_NAME or its default has precedence";
const BY_RATE: &str = "TRACING_SAMPLING_RATE or its default has precedence";
const BY_PROTOCOL: &str = "TRACING_EXPORTER_PROTOCOL or its default has precedence";

/// Creates a variable that has an effect in envoyproxy/ratelimit.
const fn read_there(name: &'static str, effect: Effect) -> Variable {
    Variable { name, effect, is_read_there: true, overridden: None }
}

/// Creates a variable that has no effect in envoyproxy/ratelimit.
const fn unread_there(name: &'static str, effect: Effect) -> Variable {
    Variable { name, effect, is_read_there: false, overridden: None }
}

/// Creates a variable that a variable of envoyproxy/ratelimit overrides.
const fn overridden(name: &'static str, effect: Effect, reason: &'static str) -> Variable {
    Variable { name, effect, is_read_there: false, overridden: Some(reason) }
}

/// All variables. Where two have the same setting, the later one has precedence.
pub const VARIABLES: &[Variable] = &[
    unread_there("OTEL_SDK_DISABLED", Setting("telemetry.otlp.enabled", values::enabled)),
    read_there("OTEL_EXPORTER_OTLP_ENDPOINT", Setting("telemetry.otlp.endpoint", values::url)),
    read_there("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", Setting("telemetry.otlp.traces_endpoint", values::url)),
    unread_there("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", Setting("telemetry.otlp.metrics_endpoint", values::url)),
    read_there("OTEL_EXPORTER_OTLP_HEADERS", Setting("telemetry.otlp.headers", values::headers)),
    read_there("OTEL_EXPORTER_OTLP_TRACES_HEADERS", Setting("telemetry.otlp.traces_headers", values::headers)),
    unread_there("OTEL_EXPORTER_OTLP_METRICS_HEADERS", Setting("telemetry.otlp.metrics_headers", values::headers)),
    read_there("OTEL_EXPORTER_OTLP_CERTIFICATE", Setting(CA_FILE, values::text)),
    read_there("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", Setting(CA_FILE, values::text)),
    unread_there("OTEL_EXPORTER_OTLP_METRICS_CERTIFICATE", Ignored(SHARED)),
    read_there("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", Setting(CERT_FILE, values::text)),
    read_there("OTEL_EXPORTER_OTLP_TRACES_CLIENT_CERTIFICATE", Setting(CERT_FILE, values::text)),
    unread_there("OTEL_EXPORTER_OTLP_METRICS_CLIENT_CERTIFICATE", Ignored(SHARED)),
    read_there("OTEL_EXPORTER_OTLP_CLIENT_KEY", Setting(KEY_FILE, values::text)),
    read_there("OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY", Setting(KEY_FILE, values::text)),
    unread_there("OTEL_EXPORTER_OTLP_METRICS_CLIENT_KEY", Ignored(SHARED)),
    read_there("OTEL_EXPORTER_OTLP_COMPRESSION", Setting(COMPRESSION, values::compression)),
    read_there("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", Setting(COMPRESSION, values::compression)),
    unread_there("OTEL_EXPORTER_OTLP_METRICS_COMPRESSION", Ignored(SHARED)),
    read_there("OTEL_EXPORTER_OTLP_TIMEOUT", Setting(TIMEOUT, values::milliseconds)),
    read_there("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", Setting(TIMEOUT, values::milliseconds)),
    unread_there("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", Ignored(SHARED)),
    read_there("OTEL_EXPORTER_OTLP_INSECURE", Ignored(SCHEME)),
    read_there("OTEL_EXPORTER_OTLP_TRACES_INSECURE", Ignored(SCHEME)),
    unread_there("OTEL_EXPORTER_OTLP_METRICS_INSECURE", Ignored(SCHEME)),
    overridden("OTEL_EXPORTER_OTLP_PROTOCOL", Setting(PROTOCOL, values::protocol), BY_PROTOCOL),
    overridden("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", Setting(PROTOCOL, values::protocol), BY_PROTOCOL),
    unread_there("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", Ignored(SHARED)),
    read_there("OTEL_RESOURCE_ATTRIBUTES", Setting("telemetry.otlp.resource_attributes", values::attributes)),
    overridden("OTEL_SERVICE_NAME", Combined("telemetry.otlp.service_name"), BY_NAME),
    overridden("OTEL_TRACES_SAMPLER", Combined("telemetry.otlp.sample_ratio"), BY_RATE),
    overridden("OTEL_TRACES_SAMPLER_ARG", Combined("telemetry.otlp.sample_ratio"), BY_RATE),
    unread_there("OTEL_METRIC_EXPORT_INTERVAL", Setting("telemetry.otlp.interval", values::milliseconds)),
    unread_there("OTEL_METRIC_EXPORT_TIMEOUT", Ignored("telemetry.otlp.timeout is the timeout of all exports")),
    read_there("OTEL_BSP_SCHEDULE_DELAY", Sdk),
    read_there("OTEL_BSP_MAX_QUEUE_SIZE", Sdk),
    read_there("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", Sdk),
    read_there("OTEL_BSP_EXPORT_TIMEOUT", Ignored("telemetry.otlp.timeout is the timeout of all exports")),
    read_there("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", Sdk),
    read_there("OTEL_ATTRIBUTE_COUNT_LIMIT", Ignored(BOUNDED)),
    read_there("OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", Ignored(BOUNDED)),
    read_there("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", Ignored(BOUNDED)),
    read_there("OTEL_SPAN_EVENT_COUNT_LIMIT", Ignored(NO_EVENTS)),
    read_there("OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT", Ignored(NO_EVENTS)),
    read_there("OTEL_SPAN_LINK_COUNT_LIMIT", Ignored(NO_EVENTS)),
    read_there("OTEL_LINK_ATTRIBUTE_COUNT_LIMIT", Ignored(NO_EVENTS)),
    unread_there("OTEL_PROPAGATORS", Ignored("headers of W3C and of B3 are always read")),
    unread_there("OTEL_TRACES_EXPORTER", Ignored("telemetry.otlp.traces enables the export, by OTLP")),
    unread_there("OTEL_METRICS_EXPORTER", Ignored("telemetry.otlp.metrics enables the export, by OTLP")),
    unread_there("OTEL_METRICS_EXEMPLAR_FILTER", Ignored("only the response time has exemplars, of sampled traces")),
    unread_there(
        "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE",
        Ignored("counters and histograms are always cumulative"),
    ),
    unread_there("OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION", Ignored("histograms have fixed buckets")),
    unread_there("OTEL_LOG_LEVEL", Ignored("telemetry.log.level is the level of the log")),
];
