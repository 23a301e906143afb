//! [`Exporter`]: sends metrics to an OpenTelemetry collector.
//!
//! OpenTelemetry's own exporter sends only the values of its instruments, and the histograms of this service are not
//! instruments. OpenTelemetry's histograms take a lock for every value, and it has no observable histogram that is read
//! when metrics are collected. So this exporter adds the histograms to the other metrics before it sends them.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use opentelemetry_proto::tonic::{
    collector::metrics::v1::ExportMetricsServiceRequest,
    common::v1::{AnyValue, KeyValue, any_value},
    metrics::v1::{self, AggregationTemporality, HistogramDataPoint, metric::Data},
};
use opentelemetry_sdk::{
    error::{OTelSdkError, OTelSdkResult},
    metrics::{Temporality, data::ResourceMetrics, exporter::PushMetricExporter},
};

use super::{
    OtlpSettings,
    collector::{Batch, Collector},
    settings::Signal,
};
use crate::{
    metrics::{Distribution, Exemplar, Histogram, LogThrottle},
    telemetry::{TelemetryError, wall_clock},
};

/// An exporter of metrics, including histograms.
pub(in crate::telemetry) struct Exporter {
    collector: Collector,
    histograms: Vec<Arc<Histogram>>,
    started: SystemTime,
    log_throttle: LogThrottle,
}

impl Exporter {
    /// Creates an exporter, which connects when it first sends. Must be called inside a tokio runtime.
    pub(in crate::telemetry) fn new(
        settings: &OtlpSettings,
        histograms: Vec<Arc<Histogram>>,
    ) -> Result<Self, TelemetryError> {
        Ok(Self {
            collector: Collector::new(settings, Signal::Metrics)?,
            histograms,
            started: wall_clock(),
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

impl PushMetricExporter for Exporter {
    async fn export(&self, metrics: &ResourceMetrics) -> OTelSdkResult {
        let Err(error) = self.collector.send(Batch::Metrics(self.request(metrics))).await else {
            return Ok(());
        };
        let error = error.to_string();
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

/// Returns the histogram as a metric with this name and these labels.
fn metric(histogram: &Histogram, name: &str, labels: &[(&str, &str)], started: SystemTime) -> v1::Metric {
    let Distribution { count, sum, buckets, .. } = histogram.distribution();
    let mut point = HistogramDataPoint {
        attributes: labels.iter().map(|(name, value)| attribute(name, value)).collect(),
        start_time_unix_nano: nanos(started),
        time_unix_nano: nanos(wall_clock()),
        count,
        sum: Some(sum),
        ..HistogramDataPoint::default()
    };
    let mut previous = 0;
    for (bound, cumulative_count, bucket_exemplar) in &buckets {
        point.bucket_counts.push(cumulative_count - previous);
        previous = *cumulative_count;
        if bound.is_finite() {
            point.explicit_bounds.push(*bound);
        }
        if let Some(bucket_exemplar) = bucket_exemplar {
            point.exemplars.push(exemplar(bucket_exemplar));
        }
    }
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

fn attribute(name: &str, value: &str) -> KeyValue {
    KeyValue {
        key: name.to_owned(),
        value: Some(AnyValue { value: Some(any_value::Value::StringValue(value.to_owned())) }),
        ..KeyValue::default()
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
    match at.duration_since(UNIX_EPOCH) {
        Ok(since) => u64::try_from(since.as_nanos()).unwrap_or(u64::MAX),
        Err(_) => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
