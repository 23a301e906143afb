//! [`Exposition`]: the formats in which Prometheus reads metrics: text, OpenMetrics and protobuf.

mod protobuf;
mod text;

use std::borrow::Cow;

use crate::metrics::{Distribution, InstrumentKind, LabelValue, Metric, Series};

/// A format of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exposition {
    /// Prometheus text format 0.0.4.
    Text,
    /// OpenMetrics 1.0, in which histograms have exemplars.
    OpenMetrics,
    /// Prometheus protobuf format, in which histograms also have native buckets.
    Protobuf,
}

impl Exposition {
    /// Returns the format with the highest quality in an `Accept` header; the text format if it names no format.
    #[must_use]
    pub fn accepted(accept: &str) -> Self {
        let mut best = Self::Text;
        let mut best_quality = 0.0;
        for range in accept.split(',') {
            let mut parts = range.split(';').map(str::trim);
            let media_type = parts.next().unwrap_or_default();
            let quality = parameter(parts.clone(), "q=").and_then(|quality| quality.parse().ok()).unwrap_or(1.0);
            let message = parameter(parts.clone(), "proto=");
            let encoding = parameter(parts, "encoding=");
            let exposition = match media_type {
                "application/vnd.google.protobuf"
                    if message.is_none_or(|message| message == "io.prometheus.client.MetricFamily")
                        && encoding == Some("delimited") =>
                {
                    Self::Protobuf
                }
                "application/openmetrics-text" => Self::OpenMetrics,
                "text/plain" => Self::Text,
                _ => continue,
            };
            if quality > best_quality {
                best = exposition;
                best_quality = quality;
            }
        }
        best
    }

    /// Returns the media type.
    #[must_use]
    pub const fn media_type(self) -> &'static str {
        match self {
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Protobuf => {
                "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"
            }
        }
    }

    pub(super) fn write(self, families: &[Family<'_>]) -> Vec<u8> {
        match self {
            Self::Text | Self::OpenMetrics => text::write(families, self == Self::OpenMetrics).into_bytes(),
            Self::Protobuf => protobuf::write(families),
        }
    }
}

/// All samples of one metric name.
#[derive(Debug, PartialEq)]
pub(super) struct Family<'f> {
    pub(super) name: Cow<'f, str>,
    pub(super) help: Cow<'f, str>,
    pub(super) kind: Kind,
    pub(super) samples: Vec<Sample<'f>>,
}

/// The type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Counter,
    Gauge,
    Histogram,
    Summary,
}

/// One value of a metric with its labels.
#[derive(Debug, PartialEq)]
pub(super) struct Sample<'f> {
    pub(super) labels: Vec<(Cow<'f, str>, Cow<'f, str>)>,
    pub(super) value: Value,
}

#[derive(Debug, PartialEq)]
pub(super) enum Value {
    Number(f64),
    /// Distribution of a histogram; for a summary only its count and its sum are written.
    Distribution(Distribution),
}

impl From<Metric> for Family<'static> {
    fn from(Metric { name, description, kind, series }: Metric) -> Self {
        let samples = series.into_iter().map(|Series { labels, value }| Sample {
            labels: labels.into_iter().map(|label| (label.name.into(), text(label.value))).collect(),
            value: Value::Number(value.as_f64()),
        });
        Self {
            name,
            help: description.into(),
            kind: match kind {
                InstrumentKind::Counter => Kind::Counter,
                InstrumentKind::Gauge => Kind::Gauge,
            },
            samples: samples.collect(),
        }
    }
}

fn text(value: LabelValue) -> Cow<'static, str> {
    match value {
        LabelValue::Static(value) => value.into(),
        LabelValue::Shared(value) => value.to_string().into(),
    }
}

/// Returns the value of the parameter that begins with `prefix`, such as `q=`.
fn parameter<'p>(mut parameters: impl Iterator<Item = &'p str>, prefix: &str) -> Option<&'p str> {
    parameters.find_map(|parameter| parameter.strip_prefix(prefix))
}

#[cfg(test)]
mod tests;
