//! [`Meters`]: OpenTelemetry metrics, read by Prometheus and optionally sent to a collector.

use std::sync::Arc;

use opentelemetry::metrics::{Meter, MeterProvider};
use opentelemetry_sdk::metrics::{Instrument, PeriodicReader, SdkMeterProvider, Stream};
use prometheus::{IntGauge, Opts, Registry};

use super::{MetricsPage, OtlpSettings, PrometheusSettings, TelemetryError, otlp::MetricExporter};
use crate::metrics::{Histogram, Totals};

/// Maximum number of series of a statistic per rule.
///
/// OpenTelemetry merges series above 2,000 per instrument into one. The higher limit does not apply to all instruments,
/// because memory for this number of series is allocated immediately.
const SERIES_PER_RULE_STATISTIC: usize = 200_000;
const RULE_STATISTICS: &str = "ratelimit_service_rate_limit_";

/// All metrics of the process.
pub struct Meters {
    provider: SdkMeterProvider,
    registry: Registry,
    histograms: Vec<Arc<Histogram>>,
}

impl Meters {
    /// Creates the provider. Must be called inside a tokio runtime, for the connection to the collector.
    ///
    /// # Errors
    ///
    /// Returns an error if a collector cannot be registered or if the settings of OTLP are invalid.
    pub fn start(settings: &OtlpSettings, histograms: Vec<Arc<Histogram>>) -> Result<Self, TelemetryError> {
        let error = |error: String| TelemetryError(error);
        let registry = Registry::new();
        let build = Opts::new("sluicegate_build_info", "Version of the running service; always 1")
            .const_label("version", env!("CARGO_PKG_VERSION"));
        let build = IntGauge::with_opts(build).map_err(|cause| error(cause.to_string()))?;
        build.set(1);
        registry.register(Box::new(build)).map_err(|cause| error(cause.to_string()))?;
        // The metrics `process_*` are read from `/proc`, which other systems do not have.
        #[cfg(target_os = "linux")]
        registry
            .register(Box::new(prometheus::process_collector::ProcessCollector::for_self()))
            .map_err(|cause| error(cause.to_string()))?;
        // Metric names of envoyproxy/ratelimit have no suffixes.
        let prometheus = opentelemetry_prometheus::exporter()
            .with_registry(registry.clone())
            .without_counter_suffixes()
            .without_units()
            .scope_info_enabled(false)
            .without_target_info()
            .build()
            .map_err(|cause| error(cause.to_string()))?;
        let more_series = |instrument: &Instrument| {
            let stream = Stream::builder().with_cardinality_limit(SERIES_PER_RULE_STATISTIC);
            instrument.name().starts_with(RULE_STATISTICS).then(|| stream.build().ok()).flatten()
        };
        let mut provider = SdkMeterProvider::builder()
            .with_resource(settings.resource())
            .with_reader(prometheus)
            .with_view(more_series);
        if settings.exports_metrics() {
            let exporter = MetricExporter::new(settings, histograms.clone())?;
            provider = provider.with_reader(PeriodicReader::builder(exporter).with_interval(settings.interval).build());
        }
        Ok(Self { provider: provider.build(), registry, histograms })
    }

    /// Returns the meter with which instruments are created.
    #[must_use]
    pub fn meter(&self) -> Meter {
        self.provider.meter("sluicegate")
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_exported_after_the_export_was_stopped() {
        let meters = Meters::start(&OtlpSettings::default(), Vec::new()).unwrap();
        assert!(meters.provider.force_flush().is_ok());
        meters.stop();
        assert!(meters.provider.force_flush().is_err());
    }
}
