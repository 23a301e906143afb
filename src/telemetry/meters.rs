//! OpenTelemetry metrics: a registry that Prometheus reads, and a collector that gets them if it is wanted.

use std::sync::Arc;

use opentelemetry::metrics::{Meter, MeterProvider};
use opentelemetry_sdk::metrics::{Instrument, PeriodicReader, SdkMeterProvider, Stream};
use prometheus::{IntGauge, Opts, Registry, process_collector::ProcessCollector};

use super::{MetricsPage, OtlpSettings, PrometheusSettings, TelemetryError, otlp::Exporter};
use crate::metrics::{Histogram, Totals};

/// OpenTelemetry folds what is above 2,000 series of an instrument into one; statistics per rule may have more. Not
/// for every instrument: room for so many is set aside at once.
const SERIES_PER_RULE_STATISTIC: usize = 200_000;
const RULE_STATISTICS: &str = "ratelimit_service_rate_limit_";

/// All metrics of the process.
pub struct Meters {
    provider: SdkMeterProvider,
    registry: Registry,
    histograms: Vec<Arc<Histogram>>,
}

impl Meters {
    /// Sets the provider up. Inside a tokio runtime, for the collector's connection.
    pub fn start(settings: &OtlpSettings, histograms: Vec<Arc<Histogram>>) -> Result<Self, TelemetryError> {
        let error = |error: String| TelemetryError(error);
        let registry = Registry::new();
        let build = Opts::new("sluicegate_build_info", "The version that runs; always 1")
            .const_label("version", env!("CARGO_PKG_VERSION"));
        let build = IntGauge::with_opts(build).map_err(|cause| error(cause.to_string()))?;
        build.set(1);
        for collector in [Box::new(build) as _, Box::new(ProcessCollector::for_self()) as _] {
            registry.register(collector).map_err(|cause| error(cause.to_string()))?;
        }
        // The peer's names have no suffixes.
        let prometheus = opentelemetry_prometheus::exporter()
            .with_registry(registry.clone())
            .without_counter_suffixes()
            .without_units()
            .scope_info_enabled(false)
            .without_target_info()
            .build()
            .map_err(|cause| error(cause.to_string()))?;
        let wide = |instrument: &Instrument| {
            let stream = Stream::builder().with_cardinality_limit(SERIES_PER_RULE_STATISTIC);
            instrument.name().starts_with(RULE_STATISTICS).then(|| stream.build().ok()).flatten()
        };
        let mut provider =
            SdkMeterProvider::builder().with_resource(settings.resource()).with_reader(prometheus).with_view(wide);
        if settings.metrics {
            let exporter = Exporter::new(settings, histograms.clone())?;
            provider = provider.with_reader(PeriodicReader::builder(exporter).with_interval(settings.interval).build());
        }
        Ok(Self { provider: provider.build(), registry, histograms })
    }

    /// Where instruments are made.
    #[must_use]
    pub fn meter(&self) -> Meter {
        self.provider.meter("sluicegate")
    }

    /// What Prometheus reads of it. `totals`: what is counted, by its names in statsd.
    pub fn page(
        &self,
        settings: &PrometheusSettings,
        totals: impl Fn() -> Totals + Send + Sync + 'static,
    ) -> Result<MetricsPage, TelemetryError> {
        MetricsPage::new(self.registry.clone(), self.histograms.clone(), settings, totals)
    }

    /// Sends what was not sent yet.
    pub fn stop(&self) {
        if let Err(error) = self.provider.shutdown() {
            tracing::debug!(%error, "the last metrics were not sent");
        }
    }
}
