//! [`MetricsPage`]: the page that Prometheus reads, with all metrics under the configured names.

use std::{path::PathBuf, sync::Arc};

use serde::{Deserialize, Serialize};

use super::{
    TelemetryError,
    exposition::{Exposition, Family, Kind, Sample, Value},
    mapping::Mapping,
};
use crate::metrics::{Histogram, Registry, Totals};

/// Prefix of the metrics that the Prometheus exporter of envoyproxy/ratelimit provides.
const ENVOYPROXY_PREFIX: &str = "ratelimit_service_";

/// Metrics per rule that mapping files for envoyproxy/ratelimit do not have: the first does not exist there, and the second
/// is newer than most files. Each with the end of its names in statsd.
const NEW_METRICS: [(&str, &str); 2] = [
    ("ratelimit_service_rate_limit_soft_limit", ".soft_limit"),
    ("ratelimit_service_rate_limit_total_negative_hits", ".total_negative_hits"),
];

/// Settings of the metrics for Prometheus that envoyproxy/ratelimit has as well.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct PrometheusSettings {
    /// Mapping file of `statsd_exporter` for the names of these metrics. If it is not set or does not exist, the
    /// metrics have the built-in names.
    pub mapping_file: Option<PathBuf>,
    /// Whether `ratelimit_service_response_time_seconds` is in milliseconds, despite its name.
    pub milliseconds: bool,
}

/// The page of all metrics.
pub struct MetricsPage {
    registry: Arc<Registry>,
    histograms: Vec<Arc<Histogram>>,
    milliseconds: bool,
    mapping: Option<Mapping>,
    totals: Box<dyn Fn() -> Totals + Send + Sync>,
}

impl MetricsPage {
    pub(super) fn new(
        registry: Arc<Registry>,
        histograms: Vec<Arc<Histogram>>,
        settings: &PrometheusSettings,
        totals: impl Fn() -> Totals + Send + Sync + 'static,
    ) -> Result<Self, TelemetryError> {
        let mapping = match &settings.mapping_file {
            Some(path) => {
                let mapping = Mapping::read(path)?;
                if mapping.is_none() {
                    tracing::warn!(path = %path.display(), "telemetry.prometheus.mapping_file not found; using the built-in metric names");
                }
                mapping
            }
            None => None,
        };
        Ok(Self { registry, histograms, milliseconds: settings.milliseconds, mapping, totals: Box::new(totals) })
    }

    /// Returns all metrics in the given format.
    #[must_use]
    pub fn write(&self, exposition: Exposition) -> Vec<u8> {
        let mut families: Vec<_> = self.registry.collect().into_iter().map(Family::from).collect();
        for histogram in &self.histograms {
            families.push(self.histogram(histogram));
            families.extend(in_seconds(histogram));
        }
        if let Some(mapping) = &self.mapping {
            let latency = self.histograms.iter().find(|histogram| histogram.name.starts_with(ENVOYPROXY_PREFIX));
            let mut totals = (self.totals)();
            // Without an entry, each rule would have a metric of its own.
            let mut kept = Vec::new();
            for (name, suffix) in NEW_METRICS {
                if !totals.keys().any(|total| total.ends_with(suffix) && mapping.has_entry(total)) {
                    totals.retain(|total, _| !total.ends_with(suffix));
                    kept.push(name);
                }
            }
            families.retain(|family| !family.name.starts_with(ENVOYPROXY_PREFIX) || kept.contains(&&*family.name));
            let mapped =
                mapping.families(&totals, latency.map(|histogram| histogram.distribution()).unwrap_or_default());
            // Mapped metrics come last, so that a metric of the service with the same name takes precedence.
            families.extend(mapped);
        }
        families.sort_by(|one, other| one.name.cmp(&other.name));
        families.dedup_by(|later, earlier| later.name == earlier.name);
        exposition.write(&families)
    }

    fn histogram(&self, histogram: &Histogram) -> Family<'static> {
        let distribution = histogram.distribution();
        let in_milliseconds = self.milliseconds && histogram.name.starts_with(ENVOYPROXY_PREFIX);
        let value = if in_milliseconds { distribution.scaled(1e3) } else { distribution };
        let labels = histogram.labels.iter().map(|(name, value)| ((*name).into(), (*value).into()));
        Family {
            name: histogram.name.into(),
            help: histogram.description.into(),
            kind: Kind::Histogram,
            samples: vec![Sample { labels: labels.collect(), value: Value::Distribution(value) }],
        }
    }
}

/// Returns the histogram under its second name, which no mapping and no setting of the unit changes.
fn in_seconds(histogram: &Histogram) -> Option<Family<'static>> {
    let name = histogram.seconds_name?;
    Some(Family {
        name: name.into(),
        help: histogram.description.into(),
        kind: Kind::Histogram,
        samples: vec![Sample { labels: Vec::new(), value: Value::Distribution(histogram.distribution()) }],
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::metrics::WorkerId;

    #[test]
    fn only_the_response_time_can_be_in_milliseconds() {
        let sums = |milliseconds| {
            let histograms = ["ratelimit_service_x_seconds", "sluicegate_x_seconds"].map(|name| {
                let histogram = Histogram::new(name, "", 1);
                histogram.record(WorkerId(0), Duration::from_micros(1_500));
                Arc::new(histogram)
            });
            let settings = PrometheusSettings { milliseconds, ..PrometheusSettings::default() };
            let page = MetricsPage::new(Arc::default(), histograms.to_vec(), &settings, Totals::new).unwrap();
            let text = String::from_utf8(page.write(Exposition::Text)).unwrap();
            text.lines().filter(|line| line.contains("_sum ")).map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(sums(false), ["ratelimit_service_x_seconds_sum 0.0015", "sluicegate_x_seconds_sum 0.0015"]);
        assert_eq!(sums(true), ["ratelimit_service_x_seconds_sum 1.5", "sluicegate_x_seconds_sum 0.0015"]);
    }

    #[test]
    fn the_second_name_is_always_in_seconds_and_without_labels() {
        let histogram = Histogram::new("ratelimit_service_x_seconds", "", 1).with_labels(&[("method", "Check")]);
        let histogram = histogram.with_seconds_name("sluicegate_y_seconds");
        histogram.record(WorkerId(0), Duration::from_micros(1_500));
        let histograms = vec![Arc::new(histogram)];
        for milliseconds in [false, true] {
            let settings = PrometheusSettings { milliseconds, ..PrometheusSettings::default() };
            let page = MetricsPage::new(Arc::default(), histograms.clone(), &settings, Totals::new).unwrap();
            let text = String::from_utf8(page.write(Exposition::Text)).unwrap();
            assert!(text.contains("\nsluicegate_y_seconds_sum 0.0015\n"), "{text}");
        }
    }
}
