//! What Prometheus reads, in its text format or in OpenMetrics.

use std::{collections::BTreeMap, fmt::Write};

use prometheus::{
    Encoder, TextEncoder,
    proto::{Bucket, Histogram, LabelPair, Metric, MetricFamily, MetricType},
};

use super::TelemetryError;

/// How metrics are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exposition {
    /// Prometheus' text format 0.0.4.
    Text,
    /// OpenMetrics 1.0.
    OpenMetrics,
}

impl Exposition {
    /// The one that whoever asks wants, by the `Accept` of his request: OpenMetrics if it is named.
    #[must_use]
    pub fn accepted(accept: &str) -> Self {
        if accept.contains("application/openmetrics-text") { Self::OpenMetrics } else { Self::Text }
    }

    /// Its media type.
    #[must_use]
    pub const fn media_type(self) -> &'static str {
        match self {
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }

    pub(super) fn write(self, families: Vec<MetricFamily>) -> Result<String, TelemetryError> {
        let families = with_histograms(families);
        match self {
            Self::Text => {
                let mut text = Vec::new();
                let encoded = TextEncoder::new().encode(&families, &mut text);
                encoded.map_err(|error| TelemetryError(error.to_string()))?;
                String::from_utf8(text).map_err(|error| TelemetryError(error.to_string()))
            }
            Self::OpenMetrics => {
                let mut text = String::new();
                for family in &families {
                    // Writing to a text does not fail.
                    let _ = open_metrics(&mut text, family);
                }
                Ok(text + "# EOF\n")
            }
        }
    }
}

/// The ends of the names under which the parts of a histogram are counted, as OpenTelemetry's instruments.
const PARTS: [&str; 3] = ["_bucket", "_count", "_sum"];

/// Makes histograms of counters that are the parts of one.
fn with_histograms(families: Vec<MetricFamily>) -> Vec<MetricFamily> {
    let mut by_name: BTreeMap<String, MetricFamily> =
        families.into_iter().map(|family| (family.name().to_owned(), family)).collect();
    let is_whole = |name: &&str| PARTS.iter().all(|part| by_name.contains_key(&format!("{name}{part}")));
    let names: Vec<String> =
        by_name.keys().filter_map(|name| name.strip_suffix(PARTS[0])).filter(is_whole).map(str::to_owned).collect();
    for name in names {
        let [buckets, counts, sums] = PARTS.map(|part| by_name.remove(&format!("{name}{part}")).unwrap_or_default());
        let mut family = MetricFamily::default();
        family.set_name(name.clone());
        family.set_help(buckets.help().to_owned());
        family.set_field_type(MetricType::HISTOGRAM);
        family.set_metric(counts.get_metric().iter().map(|count| histogram(count, &buckets, &sums)).collect());
        by_name.insert(name, family);
    }
    by_name.into_values().collect()
}

/// The one with this count's labels.
fn histogram(count: &Metric, buckets: &MetricFamily, sums: &MetricFamily) -> Metric {
    let labels = count.get_label();
    let value = |metric: &Metric| metric.get_counter().get_value();
    let mut bounds: Vec<(f64, u64)> = Vec::new();
    for metric in buckets.get_metric() {
        let (le, others): (Vec<_>, Vec<_>) = metric.get_label().iter().partition(|label| label.name() == "le");
        let bound = le.first().and_then(|label| label.value().parse().ok());
        // The last one is the count, and is written as such.
        if let Some(bound) = bound.filter(|bound: &f64| bound.is_finite() && others.into_iter().eq(labels)) {
            bounds.push((bound, value(metric) as u64));
        }
    }
    bounds.sort_by(|one, other| one.0.total_cmp(&other.0));
    let mut histogram = Histogram::default();
    histogram.set_sample_count(value(count) as u64);
    let sum = sums.get_metric().iter().find(|sum| sum.get_label() == labels);
    histogram.set_sample_sum(sum.map(value).unwrap_or_default());
    let bucket = |(bound, count)| {
        let mut bucket = Bucket::default();
        bucket.set_upper_bound(bound);
        bucket.set_cumulative_count(count);
        bucket
    };
    histogram.set_bucket(bounds.into_iter().map(bucket).collect());
    let mut metric = Metric::default();
    metric.set_label(labels.to_vec());
    metric.set_histogram(histogram);
    metric
}

/// Names stay what they are in the text format, or dashboards would have to know which one was asked for: a counter that
/// does not end in `_total` is of unknown type here, since that is what OpenMetrics wants of counters.
fn open_metrics(text: &mut String, family: &MetricFamily) -> std::fmt::Result {
    let name = family.name();
    let (base, kind) = match family.get_field_type() {
        MetricType::COUNTER => match name.strip_suffix("_total") {
            Some(base) => (base, "counter"),
            None => (name, "unknown"),
        },
        MetricType::GAUGE => (name, "gauge"),
        MetricType::HISTOGRAM => (name, "histogram"),
        MetricType::SUMMARY | MetricType::UNTYPED => (name, "unknown"),
    };
    writeln!(text, "# TYPE {base} {kind}")?;
    writeln!(text, "# HELP {base} {}", escape(family.help()))?;
    for metric in family.get_metric() {
        let labels = metric.get_label();
        match family.get_field_type() {
            MetricType::HISTOGRAM => {
                let histogram = metric.get_histogram();
                let count = histogram.get_sample_count();
                let bounds = histogram.get_bucket().iter();
                let bounds = bounds.map(|it| (format!("{:?}", it.upper_bound()), it.cumulative_count()));
                for (bound, below) in bounds.chain([("+Inf".to_owned(), count)]) {
                    writeln!(text, "{name}_bucket{} {below}", set(labels, Some(("le", &bound))))?;
                }
                writeln!(text, "{name}_count{} {count}", set(labels, None))?;
                writeln!(text, "{name}_sum{} {}", set(labels, None), histogram.get_sample_sum())?;
            }
            MetricType::GAUGE => writeln!(text, "{name}{} {}", set(labels, None), metric.get_gauge().get_value())?,
            MetricType::COUNTER | MetricType::SUMMARY | MetricType::UNTYPED => {
                writeln!(text, "{name}{} {}", set(labels, None), metric.get_counter().get_value())?;
            }
        }
    }
    Ok(())
}

/// `{name="value",…}`.
fn set(labels: &[LabelPair], more: Option<(&str, &str)>) -> String {
    let labels = labels.iter().map(|label| (label.name(), label.value())).chain(more);
    let pairs: Vec<_> = labels.map(|(name, value)| format!("{name}=\"{}\"", escape(value))).collect();
    if pairs.is_empty() { String::new() } else { format!("{{{}}}", pairs.join(",")) }
}

fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn family(name: &str, kind: MetricType, values: &[(&[(&str, &str)], f64)]) -> MetricFamily {
        let metric = |(labels, value): &(&[(&str, &str)], f64)| {
            let pair = |(name, value): &(&str, &str)| {
                let mut pair = LabelPair::default();
                pair.set_name((*name).to_owned());
                pair.set_value((*value).to_owned());
                pair
            };
            let mut metric = Metric::default();
            metric.set_label(labels.iter().map(pair).collect());
            let mut counter = prometheus::proto::Counter::default();
            counter.set_value(*value);
            let mut gauge = prometheus::proto::Gauge::default();
            gauge.set_value(*value);
            if kind == MetricType::GAUGE {
                metric.set_gauge(gauge);
            } else {
                metric.set_counter(counter);
            }
            metric
        };
        let mut family = MetricFamily::default();
        family.set_name(name.to_owned());
        family.set_help("what it\nis".to_owned());
        family.set_field_type(kind);
        family.set_metric(values.iter().map(metric).collect());
        family
    }

    fn families() -> Vec<MetricFamily> {
        let counter = MetricType::COUNTER;
        vec![
            family(
                "b_bucket",
                counter,
                &[(&[("le", "+Inf")], 3.0), (&[("le", "10")], 2.0), (&[("le", "0.000001")], 1.0)],
            ),
            family("b_count", counter, &[(&[], 3.0)]),
            family("b_sum", counter, &[(&[], 20.5)]),
            family("a_total", counter, &[(&[("x", "\"\\\n")], 1.0)]),
            family("c", counter, &[(&[], 2.0)]),
            family("d_bucket", MetricType::GAUGE, &[(&[], 4.0)]),
        ]
    }

    #[test]
    fn parts_become_histograms_with_sorted_buckets() {
        let text = Exposition::Text.write(families()).unwrap();
        let expected = "# HELP a_total what it\\nis\n# TYPE a_total counter\na_total{x=\"\\\"\\\\\\n\"} 1\n\
                        # HELP b what it\\nis\n# TYPE b histogram\nb_bucket{le=\"0.000001\"} 1\nb_bucket{le=\"10\"} 2\n\
                        b_bucket{le=\"+Inf\"} 3\nb_sum 20.5\nb_count 3\n\
                        # HELP c what it\\nis\n# TYPE c counter\nc 2\n\
                        # HELP d_bucket what it\\nis\n# TYPE d_bucket gauge\nd_bucket 4\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn open_metrics_keeps_the_names() {
        let text = Exposition::OpenMetrics.write(families()).unwrap();
        let expected = "# TYPE a counter\n# HELP a what it\\nis\na_total{x=\"\\\"\\\\\\n\"} 1\n\
                        # TYPE b histogram\n# HELP b what it\\nis\nb_bucket{le=\"1e-6\"} 1\nb_bucket{le=\"10.0\"} 2\n\
                        b_bucket{le=\"+Inf\"} 3\nb_count 3\nb_sum 20.5\n\
                        # TYPE c unknown\n# HELP c what it\\nis\nc 2\n\
                        # TYPE d_bucket gauge\n# HELP d_bucket what it\\nis\nd_bucket 4\n# EOF\n";
        assert_eq!(text, expected);
        let prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3";
        assert_eq!(Exposition::accepted(prometheus), Exposition::OpenMetrics);
        assert_eq!(Exposition::accepted("*/*"), Exposition::Text);
    }
}
