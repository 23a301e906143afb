//! [`Exporter`]: sends metrics to an OpenTelemetry collector.
//!
//! OpenTelemetry's own exporter sends only the values of its instruments, and the histograms of this service are not
//! instruments. OpenTelemetry's histograms take a lock for every value, and it has no observable histogram that is read
//! when metrics are collected. So this exporter adds the histograms to the other metrics before it sends them.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri, header::CONTENT_TYPE, uri::InvalidUri};
use opentelemetry_http::{HttpClient as _, ResponseExt};
use opentelemetry_proto::tonic::{
    collector::metrics::v1::{ExportMetricsServiceRequest, metrics_service_client::MetricsServiceClient},
    common::v1::{AnyValue, KeyValue, any_value},
    metrics::v1::{self, AggregationTemporality, HistogramDataPoint, metric::Data},
};
use opentelemetry_sdk::{
    error::{OTelSdkError, OTelSdkResult},
    metrics::{Temporality, data::ResourceMetrics, exporter::PushMetricExporter},
};
use percent_encoding::percent_decode_str;
use prost::Message;
use tokio::{runtime::Handle, time::timeout};
use tonic::{
    metadata::MetadataMap,
    transport::{Channel, Endpoint},
};

use super::{OtlpProtocol, OtlpSettings, TelemetryError, http_client::HttpClient, wall_clock};
use crate::metrics::{Distribution, Exemplar, Histogram, LogThrottle};

/// Timeout for one export.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(10);
/// Environment variables, from the OpenTelemetry specification, with the headers of every request: `name=value,…`,
/// percent-encoded.
const HEADER_VARIABLES: [&str; 2] = ["OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_METRICS_HEADERS"];

/// An exporter of metrics, including histograms.
pub(super) struct Exporter {
    collector: Collector,
    headers: HeaderMap,
    histograms: Vec<Arc<Histogram>>,
    started: SystemTime,
    /// Runtime of the connection; metrics are collected on another thread.
    runtime: Handle,
    log_throttle: LogThrottle,
}

#[derive(Clone)]
enum Collector {
    Grpc(Channel),
    Http(Box<HttpClient>, Uri),
}

impl Exporter {
    /// Creates an exporter, which connects when it first sends. Must be called inside a tokio runtime.
    pub(super) fn new(settings: &OtlpSettings, histograms: Vec<Arc<Histogram>>) -> Result<Self, TelemetryError> {
        let invalid = |error: &dyn std::error::Error| TelemetryError(format!("telemetry.otlp.endpoint: {error}"));
        let collector = match settings.protocol {
            OtlpProtocol::Grpc => {
                let endpoint = Endpoint::from_shared(settings.endpoint.clone()).map_err(|error| invalid(&error))?;
                Collector::Grpc(endpoint.connect_timeout(EXPORT_TIMEOUT).connect_lazy())
            }
            OtlpProtocol::Http => {
                let uri = settings.url("/v1/metrics").parse().map_err(|error: InvalidUri| invalid(&error))?;
                Collector::Http(Box::new(HttpClient::new(EXPORT_TIMEOUT)), uri)
            }
        };
        let headers = HEADER_VARIABLES.into_iter().filter_map(|name| std::env::var(name).ok());
        let headers = headers.flat_map(|list| parse_headers(&list)).collect();
        Ok(Self {
            collector,
            headers,
            histograms,
            started: wall_clock(),
            runtime: Handle::current(),
            log_throttle: LogThrottle::default(),
        })
    }

    fn request(&self, metrics: &ResourceMetrics) -> ExportMetricsServiceRequest {
        let mut request = ExportMetricsServiceRequest::from(metrics);
        let scope = request.resource_metrics.first_mut().and_then(|resource| resource.scope_metrics.first_mut());
        if let Some(scope) = scope {
            for histogram in &self.histograms {
                scope.metrics.push(metric(histogram, histogram.name, histogram.labels, self.started));
                if let Some(name) = histogram.seconds_name {
                    scope.metrics.push(metric(histogram, name, &[], self.started));
                }
            }
        }
        request
    }
}

/// Returns the valid headers of a list.
fn parse_headers(list: &str) -> Vec<(HeaderName, HeaderValue)> {
    let pair = |pair: &str| {
        let (name, value) = pair.split_once('=')?;
        let value = percent_decode_str(value.trim()).decode_utf8().ok()?;
        Some((name.trim().parse().ok()?, value.parse().ok()?))
    };
    list.split(',').filter_map(pair).collect()
}

impl PushMetricExporter for Exporter {
    async fn export(&self, metrics: &ResourceMetrics) -> OTelSdkResult {
        let (collector, headers, request) = (self.collector.clone(), self.headers.clone(), self.request(metrics));
        let sent = self.runtime.spawn(async move { timeout(EXPORT_TIMEOUT, collector.send(request, headers)).await });
        let error = match sent.await {
            Ok(Ok(Ok(()))) => return Ok(()),
            Ok(Ok(Err(error))) => error,
            Ok(Err(_)) => format!("no reply within {EXPORT_TIMEOUT:?}"),
            Err(error) => error.to_string(),
        };
        // OpenTelemetry does not log the failure. No counts are lost, because the next export contains the totals.
        if self.log_throttle.should_log() {
            tracing::warn!(error, "cannot send metrics to the OpenTelemetry collector; retrying at the next interval");
        }
        Err(OTelSdkError::InternalFailure(error))
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }

    fn temporality(&self) -> Temporality {
        Temporality::Cumulative
    }
}

impl Collector {
    async fn send(self, request: ExportMetricsServiceRequest, headers: HeaderMap) -> Result<(), String> {
        match self {
            Self::Grpc(channel) => {
                let request =
                    tonic::Request::from_parts(MetadataMap::from_headers(headers), Default::default(), request);
                let sent = MetricsServiceClient::new(channel).export(request).await;
                sent.map(drop).map_err(|status| status.to_string())
            }
            Self::Http(client, uri) => {
                let mut post = http::Request::new(request.encode_to_vec().into());
                (*post.method_mut(), *post.uri_mut(), *post.headers_mut()) = (Method::POST, uri, headers);
                post.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
                let sent = client.send_bytes(post).await.and_then(ResponseExt::error_for_status);
                sent.map(drop).map_err(|error| crate::errors::chain(&*error))
            }
        }
    }
}

/// Returns the histogram as a metric with this name and these labels.
fn metric(histogram: &Histogram, name: &str, labels: &[(&str, &str)], started: SystemTime) -> v1::Metric {
    let Distribution { count, sum, buckets, .. } = histogram.distribution();
    let mut previous = 0;
    let in_bucket = |(_, count, _): &(f64, u64, Option<Exemplar>)| count - std::mem::replace(&mut previous, *count);
    let attribute = |(name, value): &(&str, &str)| KeyValue {
        key: (*name).to_owned(),
        value: Some(AnyValue { value: Some(any_value::Value::StringValue((*value).to_owned())) }),
        ..KeyValue::default()
    };
    let point = HistogramDataPoint {
        attributes: labels.iter().map(attribute).collect(),
        start_time_unix_nano: nanos(started),
        time_unix_nano: nanos(wall_clock()),
        count,
        sum: Some(sum),
        bucket_counts: buckets.iter().map(in_bucket).collect(),
        explicit_bounds: buckets.iter().map(|(bound, ..)| *bound).filter(|bound| bound.is_finite()).collect(),
        exemplars: buckets.iter().filter_map(|(.., exemplar)| exemplar.as_ref()).map(exemplar).collect(),
        ..HistogramDataPoint::default()
    };
    v1::Metric {
        name: name.to_owned(),
        description: histogram.description.to_owned(),
        unit: "s".to_owned(),
        data: Some(Data::Histogram(v1::Histogram {
            data_points: vec![point],
            aggregation_temporality: AggregationTemporality::Cumulative.into(),
        })),
        ..v1::Metric::default()
    }
}

fn exemplar(exemplar: &Exemplar) -> v1::Exemplar {
    v1::Exemplar {
        time_unix_nano: nanos(UNIX_EPOCH + exemplar.at),
        trace_id: exemplar.trace.0.to_be_bytes().to_vec(),
        value: Some(v1::exemplar::Value::AsDouble(exemplar.seconds)),
        ..v1::Exemplar::default()
    }
}

fn nanos(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_headers_as_the_specification_defines() {
        let headers = parse_headers("api-key=a%20b, x = y,nothing,bad name=z,=,");
        let headers: Vec<_> = headers.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
        assert_eq!(headers, [("api-key", "a b"), ("x", "y")]);
    }

    #[test]
    fn a_histogram_has_its_description_and_the_names_of_its_labels() {
        let histogram = Histogram::new("x_seconds", "what it is", 1).with_labels(&[("method", "Check")]);
        let metric = metric(&histogram, histogram.name, histogram.labels, UNIX_EPOCH);
        assert_eq!((metric.name.as_str(), metric.description.as_str()), ("x_seconds", "what it is"));
        let Some(Data::Histogram(data)) = &metric.data else { panic!("{metric:?}") };
        let keys: Vec<_> = data.data_points[0].attributes.iter().map(|attribute| attribute.key.as_str()).collect();
        assert_eq!(keys, ["method"]);
    }
}
