//! [`OtlpSettings`]: settings of the export to an OpenTelemetry collector.

use std::{path::PathBuf, time::Duration};

use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::KeyValue;
use opentelemetry_sdk::{Resource, resource::TelemetryResourceDetector};
use serde::{Deserialize, Serialize};

use super::super::TelemetryError;

/// Protocol of the OpenTelemetry collector.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum OtlpProtocol {
    /// gRPC.
    #[default]
    Grpc,
    /// HTTP with protobuf.
    Http,
}

/// Compression of the messages to the OpenTelemetry collector.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum OtlpCompression {
    /// No compression.
    #[default]
    None,
    /// gzip.
    Gzip,
}

/// The kind of data that is sent to a collector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Signal {
    Metrics,
    Traces,
}

/// Settings of an OpenTelemetry collector (OTLP).
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct OtlpSettings {
    /// Whether `metrics` and `traces` apply. If `false`, nothing is exported.
    pub enabled: bool,
    /// Address: `http://host:4317`, or for HTTP `http://host:4318`, to which `/v1/traces` and `/v1/metrics` are added.
    /// With `https://`, the connection uses TLS.
    pub endpoint: String,
    /// Address for traces in place of `endpoint`. Over HTTP, nothing is added to it.
    pub traces_endpoint: Option<String>,
    /// Address for metrics in place of `endpoint`. Over HTTP, nothing is added to it.
    pub metrics_endpoint: Option<String>,
    /// Protocol: `grpc` or `http`.
    pub protocol: OtlpProtocol,
    /// Headers of each export, as `name=value`.
    pub headers: Vec<String>,
    /// Headers of each export of traces in place of `headers`.
    pub traces_headers: Vec<String>,
    /// Headers of each export of metrics in place of `headers`.
    pub metrics_headers: Vec<String>,
    /// Compression of each export: `none` or `gzip`.
    pub compression: OtlpCompression,
    /// Timeout for one export.
    #[serde(with = "sluicegate_duration::Text")]
    pub timeout: Duration,
    /// TLS settings for an `https://` address.
    pub tls: OtlpTlsSettings,
    /// Name of the service (`service.name`).
    pub service_name: String,
    /// Namespace of the service (`service.namespace`).
    pub service_namespace: Option<String>,
    /// Identifier of this instance (`service.instance.id`).
    pub service_instance_id: Option<String>,
    /// Further resource attributes, as `name=value`.
    pub resource_attributes: Vec<String>,
    /// Whether to send metrics. `/metrics` is available in any case.
    pub metrics: bool,
    /// Interval at which metrics are sent.
    #[serde(with = "sluicegate_duration::Text")]
    pub interval: Duration,
    /// Whether to send traces.
    pub traces: bool,
    /// Proportion of requests that start a trace, from 0 to 1. A sampling decision of the caller takes precedence.
    pub sample_ratio: f64,
}

impl Default for OtlpSettings {
    fn default() -> Self {
        Self {
            enabled: true,
            endpoint: "http://127.0.0.1:4317".into(),
            traces_endpoint: None,
            metrics_endpoint: None,
            protocol: OtlpProtocol::default(),
            headers: Vec::new(),
            traces_headers: Vec::new(),
            metrics_headers: Vec::new(),
            compression: OtlpCompression::default(),
            timeout: Duration::from_secs(10),
            tls: OtlpTlsSettings::default(),
            service_name: "sluicegate".into(),
            service_namespace: None,
            service_instance_id: None,
            resource_attributes: Vec::new(),
            metrics: false,
            interval: Duration::from_secs(10),
            traces: false,
            sample_ratio: 0.01,
        }
    }
}

/// Certificates for the connection to the collector, read at the start.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct OtlpTlsSettings {
    /// PEM file with the CA certificates for the collector's certificate. Without it, the system's CA certificates are
    /// used.
    pub ca_file: Option<PathBuf>,
    /// PEM file with the client certificate and its chain.
    pub cert_file: Option<PathBuf>,
    /// PEM file with the key of the client certificate.
    pub key_file: Option<PathBuf>,
}

impl OtlpSettings {
    /// Returns a problem of the settings, or `None` if they are valid.
    #[must_use]
    pub fn problem(&self) -> Option<&'static str> {
        if !(0.0..=1.0).contains(&self.sample_ratio) {
            return Some("telemetry.otlp.sample_ratio must be between 0 and 1");
        }
        if self.timeout.is_zero() || self.interval.is_zero() {
            return Some("telemetry.otlp.timeout and telemetry.otlp.interval must be greater than 0");
        }
        None
    }

    /// Returns whether metrics are exported.
    #[must_use]
    pub const fn exports_metrics(&self) -> bool {
        self.enabled && self.metrics
    }

    /// Returns whether traces are exported.
    #[must_use]
    pub const fn exports_traces(&self) -> bool {
        self.enabled && self.traces
    }

    /// Returns all addresses.
    pub fn endpoints(&self) -> impl Iterator<Item = &str> {
        let of_signals = [&self.traces_endpoint, &self.metrics_endpoint];
        of_signals.into_iter().flatten().chain([&self.endpoint]).map(String::as_str)
    }

    /// Returns the settings without the values of headers, for printing.
    #[must_use]
    pub fn masked(&self) -> Self {
        Self {
            headers: mask(&self.headers),
            traces_headers: mask(&self.traces_headers),
            metrics_headers: mask(&self.metrics_headers),
            ..self.clone()
        }
    }

    /// Returns the attributes of all exports.
    pub(in crate::telemetry) fn resource(&self) -> Resource {
        let mut attributes = Vec::new();
        for attribute in &self.resource_attributes {
            if let Some((name, value)) = attribute.split_once('=') {
                attributes.push(KeyValue::new(name.to_owned(), value.to_owned()));
            }
        }
        attributes.push(KeyValue::new("service.name", self.service_name.clone()));
        if let Some(namespace) = &self.service_namespace {
            attributes.push(KeyValue::new("service.namespace", namespace.clone()));
        }
        if let Some(id) = &self.service_instance_id {
            attributes.push(KeyValue::new("service.instance.id", id.clone()));
        }
        // The other detectors read variables, which the settings already contain.
        let resource = Resource::builder_empty().with_detector(Box::new(TelemetryResourceDetector));
        resource.with_attributes(attributes).build()
    }

    /// Returns the URL to which the signal is sent.
    pub(super) fn url(&self, signal: Signal) -> String {
        let (own, path) = match signal {
            Signal::Metrics => (&self.metrics_endpoint, "/v1/metrics"),
            Signal::Traces => (&self.traces_endpoint, "/v1/traces"),
        };
        if let Some(own) = own {
            return own.clone();
        }
        match self.protocol {
            OtlpProtocol::Grpc => self.endpoint.clone(),
            OtlpProtocol::Http => format!("{}{path}", self.endpoint.trim_end_matches('/')),
        }
    }

    /// Returns the headers of the signal.
    ///
    /// # Errors
    ///
    /// Returns an error without the value if a header is invalid.
    pub(super) fn headers(&self, signal: Signal) -> Result<HeaderMap, TelemetryError> {
        let own = match signal {
            Signal::Metrics => &self.metrics_headers,
            Signal::Traces => &self.traces_headers,
        };
        let list = if own.is_empty() { &self.headers } else { own };
        let mut headers = HeaderMap::new();
        for header in list {
            let Some((name, value)) = parse_header(header) else {
                let message = "telemetry.otlp.headers, traces_headers and metrics_headers must contain headers such as \
                               name=value, without names that end in -bin";
                return Err(TelemetryError(message.to_owned()));
            };
            headers.insert(name, value);
        }
        Ok(headers)
    }
}

/// Parses `name=value`. Names that end in `-bin` have values in another encoding in gRPC, so they are rejected.
fn parse_header(text: &str) -> Option<(HeaderName, HeaderValue)> {
    let (name, value) = text.split_once('=')?;
    let name = HeaderName::try_from(name).ok()?;
    if name.as_str().ends_with("-bin") {
        return None;
    }
    let mut value = HeaderValue::try_from(value).ok()?;
    value.set_sensitive(true);
    Some((name, value))
}

/// Returns headers without their values.
fn mask(headers: &[String]) -> Vec<String> {
    let mut masked = Vec::new();
    for header in headers {
        let name = match header.split_once('=') {
            Some((name, _)) => name,
            None => "",
        };
        masked.push(format!("{name}=***"));
    }
    masked
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_signal_can_have_an_address_and_headers_of_its_own() {
        let mut settings = OtlpSettings {
            endpoint: "http://a:4318/base/".into(),
            protocol: OtlpProtocol::Http,
            headers: vec!["api-key=a=b".into()],
            ..OtlpSettings::default()
        };
        assert_eq!(settings.url(Signal::Traces), "http://a:4318/base/v1/traces");
        assert_eq!(settings.url(Signal::Metrics), "http://a:4318/base/v1/metrics");
        assert_eq!(settings.headers(Signal::Traces).unwrap()["api-key"], "a=b");
        settings.traces_endpoint = Some("http://b/x".into());
        settings.traces_headers = vec!["api-key=c".into()];
        assert_eq!(settings.url(Signal::Traces), "http://b/x");
        assert_eq!(settings.url(Signal::Metrics), "http://a:4318/base/v1/metrics");
        assert_eq!(settings.headers(Signal::Traces).unwrap()["api-key"], "c");
        assert_eq!(settings.headers(Signal::Metrics).unwrap()["api-key"], "a=b");
        settings.protocol = OtlpProtocol::Grpc;
        assert_eq!(settings.url(Signal::Metrics), "http://a:4318/base/");
        assert_eq!(settings.endpoints().count(), 2);
    }

    #[test]
    fn an_invalid_header_is_an_error_without_its_value() {
        for header in ["hunter2", "a b=hunter2", "=hunter2", "a=hunter2\n", "a-bin=hunter2"] {
            let settings = OtlpSettings { headers: vec![header.into()], ..OtlpSettings::default() };
            let error = settings.headers(Signal::Metrics).unwrap_err().to_string();
            assert!(error.contains("name=value") && !error.contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn settings_of_the_service_have_precedence_over_other_attributes() {
        let settings = OtlpSettings {
            service_instance_id: Some("pod-7".into()),
            resource_attributes: vec!["service.name=x".into(), "zone=a=b".into(), "service.namespace=shop".into()],
            ..OtlpSettings::default()
        };
        let resource = settings.resource();
        let value = |name: &'static str| resource.get(&name.into()).map(|value| value.to_string());
        assert_eq!(value("service.name").as_deref(), Some("sluicegate"));
        assert_eq!(value("service.namespace").as_deref(), Some("shop"));
        assert_eq!(value("service.instance.id").as_deref(), Some("pod-7"));
        assert_eq!(value("zone").as_deref(), Some("a=b"));
        assert_eq!(value("telemetry.sdk.language").as_deref(), Some("rust"));
    }
}
