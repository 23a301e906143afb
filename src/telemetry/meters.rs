//! [`Meters`]: the metrics of the process, read by Prometheus and optionally sent to an OpenTelemetry collector.

use std::sync::Arc;

use super::{MetricsPage, OtlpSettings, PrometheusSettings, TelemetryError, otlp::MetricExport};
use crate::metrics::{Histogram, Instrument, Label, Meter, Registry, Totals};

/// All metrics of the process.
pub struct Meters {
    registry: Arc<Registry>,
    histograms: Vec<Arc<Histogram>>,
    export: Option<MetricExport>,
}

impl Meters {
    /// Starts the export to the OpenTelemetry collector, if the settings turn it on. Must be called inside a tokio
    /// runtime.
    ///
    /// # Errors
    ///
    /// Returns an error if the settings of OTLP are invalid.
    pub fn start(settings: &OtlpSettings, histograms: Vec<Arc<Histogram>>) -> Result<Self, TelemetryError> {
        let registry = Arc::<Registry>::default();
        registry.register(Instrument::gauge(
            "sluicegate_build_info",
            "Version of the running service; always 1",
            |observer| observer.observe(1, [Label::new("version", env!("CARGO_PKG_VERSION"))]),
        ));
        let export = if settings.exports_metrics() {
            Some(MetricExport::start(settings, Arc::clone(&registry), histograms.clone())?)
        } else {
            None
        };
        Ok(Self { registry, histograms, export })
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
        MetricsPage::new(Arc::clone(&self.registry), self.histograms.clone(), settings, totals)
    }

    /// Sends the metrics to the OpenTelemetry collector a last time.
    pub async fn stop(self) {
        if let Some(export) = self.export {
            export.stop().await;
        }
    }
}

impl Meter for Meters {
    fn register(&self, instrument: Instrument) {
        self.registry.register(instrument);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::Exposition;

    #[test]
    fn instruments_are_on_the_page_with_their_types_labels_and_values() {
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
        let version = env!("CARGO_PKG_VERSION");
        let expected = format!(
            "# HELP sluicegate_build_info Version of the running service; always 1\n# TYPE sluicegate_build_info gauge\n\
             sluicegate_build_info{{version=\"{version}\"}} 1\n\
             # HELP test_hits_total Number of hits\n# TYPE test_hits_total counter\ntest_hits_total 5\n\
             test_hits_total{{kind=\"a\",rule=\"x\"}} 3\ntest_hits_total{{kind=\"b\"}} 4\n\
             # HELP test_seconds_total Seconds\n# TYPE test_seconds_total counter\ntest_seconds_total 0.5\n\
             # HELP test_share Share\n# TYPE test_share gauge\ntest_share 0.25\n\
             # HELP test_workers Number of workers\n# TYPE test_workers gauge\ntest_workers 2\n"
        );
        assert_eq!(page, expected);
    }
}
