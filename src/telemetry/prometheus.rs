//! The page that Prometheus reads: every number there is, under the names that are wanted.

use std::{path::PathBuf, sync::Arc};

use prometheus::{Registry, proto::MetricFamily};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    TelemetryError,
    exposition::{Exposition, Family, Kind, Sample, Value},
    mapping::Mapping,
};
use crate::metrics::{Histogram, Totals};

/// What the peer's exporter shows has this in front.
const PEER: &str = "ratelimit_service_";

/// Under which names Prometheus reads what envoyproxy/ratelimit counts as well.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct PrometheusSettings {
    /// A mapping file of statsd_exporter; where there is none the names are those of the built-in one.
    pub mapping_file: Option<PathBuf>,
    /// The response time is in milliseconds, whatever its name says.
    pub milliseconds: bool,
}

/// Everything that Prometheus can read.
pub struct MetricsPage {
    registry: Registry,
    histograms: Vec<Arc<Histogram>>,
    milliseconds: bool,
    mapping: Option<Mapping>,
    totals: Box<dyn Fn() -> Totals + Send + Sync>,
}

impl MetricsPage {
    pub(super) fn new(
        registry: Registry,
        histograms: Vec<Arc<Histogram>>,
        settings: &PrometheusSettings,
        totals: impl Fn() -> Totals + Send + Sync + 'static,
    ) -> Result<Self, TelemetryError> {
        let mapping = match &settings.mapping_file {
            Some(path) => {
                let mapping = Mapping::read(path)?;
                if mapping.is_none() {
                    tracing::warn!(path = %path.display(), "there is no mapping file; the built-in names are shown");
                }
                mapping
            }
            None => None,
        };
        Ok(Self { registry, histograms, milliseconds: settings.milliseconds, mapping, totals: Box::new(totals) })
    }

    /// All of it, as whoever asks wants it.
    #[must_use]
    pub fn write(&self, exposition: Exposition) -> Vec<u8> {
        let gathered: Vec<MetricFamily> = self.registry.gather();
        let mut families: Vec<_> = gathered.iter().map(Family::of).collect();
        families.extend(self.histograms.iter().map(|histogram| self.histogram(histogram)));
        if let Some(mapping) = &self.mapping {
            let is_peers = |histogram: &&Arc<Histogram>| histogram.name.starts_with(PEER);
            let latency = self.histograms.iter().find(is_peers);
            families.retain(|family| !family.name.starts_with(PEER));
            let mapped = mapping.families(&(self.totals)(), latency.map(|it| it.distribution()).unwrap_or_default());
            // A name of our own stays ours.
            families.extend(mapped);
        }
        families.sort_by(|one, other| one.name.cmp(&other.name));
        families.dedup_by(|later, earlier| later.name == earlier.name);
        exposition.write(&families)
    }

    fn histogram(&self, histogram: &Histogram) -> Family<'static> {
        let distribution = histogram.distribution();
        let in_milliseconds = self.milliseconds && histogram.name.starts_with(PEER);
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
