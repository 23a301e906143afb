//! [`Meters`]: OpenTelemetry metrics, read by Prometheus and optionally sent to a collector.

use std::sync::Arc;

use opentelemetry::{
    KeyValue,
    metrics::{AsyncInstrument, MeterProvider},
};
use opentelemetry_sdk::metrics::{self as sdk, PeriodicReader, SdkMeterProvider, Stream};
use prometheus::{IntGauge, Opts, Registry};

use super::{MetricsPage, OtlpSettings, PrometheusSettings, TelemetryError, otlp::MetricExporter};
use crate::metrics::{
    Callback, Histogram, Instrument, InstrumentKind, Label, LabelValue, Meter, Observer, ReadSeries, Totals,
};

/// Maximum number of series of an instrument that has series for each rule.
///
/// OpenTelemetry merges series above 2,000 per instrument into one. The higher limit does not apply to all instruments,
/// because memory for this number of series is allocated immediately.
const SERIES_PER_RULE_STATISTIC: usize = 200_000;
const RULE_STATISTICS: &str = "ratelimit_service_rate_limit_";

/// All metrics of the process.
pub struct Meters {
    provider: SdkMeterProvider,
    /// Creates the instruments.
    meter: opentelemetry::metrics::Meter,
    registry: Registry,
    histograms: Vec<Arc<Histogram>>,
}

impl Meters {
    /// Creates OpenTelemetry's provider of metrics. Must be called inside a tokio runtime, for the connection to the
    /// OpenTelemetry collector.
    ///
    /// # Errors
    ///
    /// Returns an error if a metric cannot be registered or if the settings of OTLP are invalid.
    pub fn start(settings: &OtlpSettings, histograms: Vec<Arc<Histogram>>) -> Result<Self, TelemetryError> {
        let registry = Registry::new();
        let build = Opts::new("sluicegate_build_info", "Version of the running service; always 1")
            .const_label("version", env!("CARGO_PKG_VERSION"));
        let build = IntGauge::with_opts(build).map_err(|error| TelemetryError(error.to_string()))?;
        build.set(1);
        registry.register(Box::new(build)).map_err(|error| TelemetryError(error.to_string()))?;
        // The metrics `process_*` are read from `/proc`, which other systems do not have.
        #[cfg(target_os = "linux")]
        registry
            .register(Box::new(prometheus::process_collector::ProcessCollector::for_self()))
            .map_err(|error| TelemetryError(error.to_string()))?;
        // Metric names of envoyproxy/ratelimit have no suffixes.
        let prometheus = opentelemetry_prometheus::exporter()
            .with_registry(registry.clone())
            .without_counter_suffixes()
            .without_units()
            .scope_info_enabled(false)
            .without_target_info()
            .build()
            .map_err(|error| TelemetryError(error.to_string()))?;
        let mut provider = SdkMeterProvider::builder()
            .with_resource(settings.resource())
            .with_reader(prometheus)
            .with_view(rule_statistic);
        if settings.exports_metrics() {
            let exporter = MetricExporter::new(settings, histograms.clone())?;
            provider = provider.with_reader(PeriodicReader::builder(exporter).with_interval(settings.interval).build());
        }
        let provider = provider.build();
        let meter = provider.meter("sluicegate");
        Ok(Self { provider, meter, registry, histograms })
    }

    /// Creates the page that Prometheus reads. `totals` returns all counters by their names in statsd.
    ///
    /// # Errors
    ///
    /// Returns an error if the mapping file is invalid.
    pub fn page(
        &self,
        settings: &PrometheusSettings,
        totals: impl Fn() -> Totals + Send + Sync + 'static,
    ) -> Result<MetricsPage, TelemetryError> {
        MetricsPage::new(self.registry.clone(), self.histograms.clone(), settings, totals)
    }

    /// Sends the metrics that were not sent yet.
    pub fn stop(&self) {
        if let Err(error) = self.provider.shutdown() {
            tracing::debug!(%error, "cannot send the last metrics to the OpenTelemetry collector");
        }
    }
}

/// Returns the settings of an instrument that has series for each rule, or `None` for other instruments.
fn rule_statistic(instrument: &sdk::Instrument) -> Option<Stream> {
    if !instrument.name().starts_with(RULE_STATISTICS) {
        return None;
    }
    Stream::builder().with_cardinality_limit(SERIES_PER_RULE_STATISTIC).build().ok()
}

impl Meter for Meters {
    fn register(&self, instrument: Instrument) {
        let Instrument { name, description, kind, callback } = instrument;
        match (kind, callback) {
            (InstrumentKind::Counter, Callback::U64(read)) => {
                let counter = self.meter.u64_observable_counter(name).with_description(description);
                counter.with_callback(observe_with(read)).build();
            }
            (InstrumentKind::Counter, Callback::F64(read)) => {
                let counter = self.meter.f64_observable_counter(name).with_description(description);
                counter.with_callback(observe_with(read)).build();
            }
            (InstrumentKind::Gauge, Callback::U64(read)) => {
                let gauge = self.meter.u64_observable_gauge(name).with_description(description);
                gauge.with_callback(observe_with(read)).build();
            }
            (InstrumentKind::Gauge, Callback::F64(read)) => {
                let gauge = self.meter.f64_observable_gauge(name).with_description(description);
                gauge.with_callback(observe_with(read)).build();
            }
        }
    }
}

/// Returns a callback of OpenTelemetry that observes each series that `read` reads.
fn observe_with<T: 'static>(read: ReadSeries<T>) -> impl Fn(&dyn AsyncInstrument<T>) + Send + Sync + 'static {
    move |instrument| {
        let mut attributes = Vec::new();
        read(&mut Observer::new(&mut |value, labels| {
            attributes.clear();
            attributes.extend(labels.map(attribute));
            instrument.observe(value, &attributes);
        }));
    }
}

fn attribute(label: Label) -> KeyValue {
    match label.value {
        LabelValue::Static(value) => KeyValue::new(label.name, value),
        LabelValue::Shared(value) => KeyValue::new(label.name, value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::Exposition;

    #[test]
    fn nothing_is_exported_after_the_export_was_stopped() {
        let meters = Meters::start(&OtlpSettings::default(), Vec::new()).unwrap();
        assert!(meters.provider.force_flush().is_ok());
        meters.stop();
        assert!(meters.provider.force_flush().is_err());
    }

    #[test]
    fn instruments_are_exported_with_their_types_labels_and_values() {
        let meters = Meters::start(&OtlpSettings::default(), Vec::new()).unwrap();
        meters.register(Instrument::counter("test_hits_total", "Number of hits", |observer| {
            observer.observe(3, [Label::new("kind", "a"), Label::new("rule", Arc::<str>::from("x"))]);
            observer.observe(4, [Label::new("kind", "b".to_owned())]);
            observer.observe(5, []);
        }));
        meters.register(Instrument::gauge("test_workers", "Number of workers", |observer| observer.observe(2, [])));
        meters.register(Instrument::f64_counter("test_seconds_total", "Seconds", |observer| observer.observe(0.5, [])));
        meters.register(Instrument::f64_gauge("test_share", "Share", |observer| observer.observe(0.25, [])));
        let page = meters.page(&PrometheusSettings::default(), Totals::new).unwrap();
        let page = String::from_utf8(page.write(Exposition::Text)).unwrap();
        for lines in [
            "# HELP test_hits_total Number of hits\n# TYPE test_hits_total counter\n",
            "\ntest_hits_total{kind=\"a\",rule=\"x\"} 3\n",
            "\ntest_hits_total{kind=\"b\"} 4\n",
            "\ntest_hits_total 5\n",
            "# HELP test_workers Number of workers\n# TYPE test_workers gauge\ntest_workers 2\n",
            "# HELP test_seconds_total Seconds\n# TYPE test_seconds_total counter\ntest_seconds_total 0.5\n",
            "# HELP test_share Share\n# TYPE test_share gauge\ntest_share 0.25\n",
        ] {
            assert!(page.contains(lines), "{lines} is not in {page}");
        }
    }
}
