//! [`MetricExport`]: sends metrics to an OpenTelemetry collector at an interval.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use opentelemetry_proto::{
    tonic::{
        collector::metrics::v1::ExportMetricsServiceRequest,
        common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value},
        metrics::v1::{
            self, AggregationTemporality, Gauge, HistogramDataPoint, NumberDataPoint, ResourceMetrics, ScopeMetrics,
            Sum, metric::Data, number_data_point,
        },
        resource::v1::Resource,
    },
    transform::common::tonic::ResourceAttributesWithSchema,
};
use tokio::{
    task::{JoinHandle, spawn_blocking},
    time::{MissedTickBehavior, interval},
};

use super::{
    OtlpSettings,
    collector::{Batch, Collector},
    settings::Signal,
};
use crate::{
    metrics::{Distribution, Exemplar, Histogram, InstrumentKind, LogThrottle, Metric, Number, Registry, Series},
    telemetry::{TelemetryError, wall_clock},
};

/// The running export of metrics.
pub(in crate::telemetry) struct MetricExport {
    exporter: Arc<Exporter>,
    task: JoinHandle<()>,
}

impl MetricExport {
    /// Starts the export, which connects when it first sends. Must be called inside a tokio runtime.
    pub(in crate::telemetry) fn start(
        settings: &OtlpSettings,
        registry: Arc<Registry>,
        histograms: Vec<Arc<Histogram>>,
    ) -> Result<Self, TelemetryError> {
        let resource = ResourceAttributesWithSchema::from(&settings.resource());
        let exporter = Arc::new(Exporter {
            collector: Collector::new(settings, Signal::Metrics)?,
            registry,
            histograms,
            resource: Resource { attributes: resource.attributes.0, ..Resource::default() },
            schema_url: resource.schema_url.unwrap_or_default(),
            started: wall_clock(),
            log_throttle: LogThrottle::default(),
        });
        let task = tokio::spawn(Arc::clone(&exporter).run(settings.interval));
        Ok(Self { exporter, task })
    }

    /// Sends the metrics a last time.
    pub(in crate::telemetry) async fn stop(self) {
        self.task.abort();
        self.exporter.export().await;
    }
}

struct Exporter {
    collector: Collector,
    registry: Arc<Registry>,
    histograms: Vec<Arc<Histogram>>,
    resource: Resource,
    schema_url: String,
    started: SystemTime,
    log_throttle: LogThrottle,
}

impl Exporter {
    async fn run(self: Arc<Self>, period: Duration) {
        let mut ticks = interval(period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The first tick is immediate, before the metrics are registered.
        ticks.tick().await;
        loop {
            ticks.tick().await;
            self.export().await;
        }
    }

    async fn export(self: &Arc<Self>) {
        // With many rules, reading the series would delay the other tasks of this thread.
        let exporter = Arc::clone(self);
        let Ok(request) = spawn_blocking(move || exporter.request()).await else {
            return;
        };
        let Err(error) = self.collector.send(Batch::Metrics(request)).await else {
            return;
        };
        // No counts are lost, because the next export contains the totals.
        if self.log_throttle.should_log() {
            tracing::warn!(%error, "cannot send metrics to the OpenTelemetry collector; retrying at the next interval");
        }
    }

    fn request(&self) -> ExportMetricsServiceRequest {
        let mut metrics: Vec<_> =
            self.registry.collect().into_iter().map(|metric| numbers(metric, self.started)).collect();
        for histogram in &self.histograms {
            metrics.push(distribution(histogram, histogram.name, histogram.labels, self.started));
            if let Some(name) = histogram.seconds_name {
                metrics.push(distribution(histogram, name, &[], self.started));
            }
        }
        let scope = InstrumentationScope { name: "sluicegate".to_owned(), ..InstrumentationScope::default() };
        ExportMetricsServiceRequest {
            resource_metrics: vec![ResourceMetrics {
                resource: Some(self.resource.clone()),
                scope_metrics: vec![ScopeMetrics { scope: Some(scope), metrics, ..ScopeMetrics::default() }],
                schema_url: self.schema_url.clone(),
            }],
        }
    }
}

/// Returns a metric of numbers in the format of OTLP.
fn numbers(Metric { name, description, kind, series }: Metric, started: SystemTime) -> v1::Metric {
    let now = nanos(wall_clock());
    let data_points = series.into_iter().map(|Series { labels, value }| NumberDataPoint {
        attributes: labels.iter().map(|label| attribute(label.name, label.value.as_str())).collect(),
        start_time_unix_nano: if kind == InstrumentKind::Counter { nanos(started) } else { 0 },
        time_unix_nano: now,
        value: Some(match value {
            Number::U64(value) => number_data_point::Value::AsInt(i64::try_from(value).unwrap_or(i64::MAX)),
            Number::F64(value) => number_data_point::Value::AsDouble(value),
        }),
        ..NumberDataPoint::default()
    });
    let data_points = data_points.collect();
    v1::Metric {
        name: name.into_owned(),
        description: description.to_owned(),
        data: Some(match kind {
            InstrumentKind::Counter => Data::Sum(Sum {
                data_points,
                aggregation_temporality: AggregationTemporality::Cumulative.into(),
                is_monotonic: true,
            }),
            InstrumentKind::Gauge => Data::Gauge(Gauge { data_points }),
        }),
        ..v1::Metric::default()
    }
}

/// Returns a histogram in the format of OTLP, with this name and these labels.
fn distribution(histogram: &Histogram, name: &str, labels: &[(&str, &str)], started: SystemTime) -> v1::Metric {
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
    use crate::metrics::Label;

    #[test]
    fn numbers_have_the_types_of_their_instruments() {
        let metric = |kind, value| Metric {
            name: "x".into(),
            description: "what it is",
            kind,
            series: vec![Series { labels: vec![Label::new("rule", "a".to_owned())], value }],
        };
        let started = UNIX_EPOCH + Duration::from_nanos(5);
        let counter = numbers(metric(InstrumentKind::Counter, Number::U64(u64::MAX)), started);
        assert_eq!((counter.name.as_str(), counter.description.as_str()), ("x", "what it is"));
        let Some(Data::Sum(sum)) = counter.data else { panic!("not a sum") };
        assert!(sum.is_monotonic && sum.aggregation_temporality == AggregationTemporality::Cumulative as i32);
        let point = &sum.data_points[0];
        assert_eq!(point.attributes, [attribute("rule", "a")]);
        assert_eq!(point.value, Some(number_data_point::Value::AsInt(i64::MAX)));
        assert_eq!(point.start_time_unix_nano, 5);
        assert!(point.time_unix_nano > 5);

        let gauge = numbers(metric(InstrumentKind::Gauge, Number::F64(0.5)), started);
        let Some(Data::Gauge(gauge)) = gauge.data else { panic!("not a gauge") };
        let point = &gauge.data_points[0];
        assert_eq!((point.start_time_unix_nano, point.value), (0, Some(number_data_point::Value::AsDouble(0.5))));
    }

    #[test]
    fn a_histogram_has_its_description_and_the_names_of_its_labels() {
        let histogram = Histogram::new("x_seconds", "what it is", 1).with_labels(&[("method", "Check")]);
        let metric = distribution(&histogram, histogram.name, histogram.labels, UNIX_EPOCH);
        assert_eq!((metric.name.as_str(), metric.description.as_str()), ("x_seconds", "what it is"));
        let Some(Data::Histogram(data)) = &metric.data else { panic!("{metric:?}") };
        let keys: Vec<_> = data.data_points[0].attributes.iter().map(|attribute| attribute.key.as_str()).collect();
        assert_eq!(keys, ["method"]);
    }
}
