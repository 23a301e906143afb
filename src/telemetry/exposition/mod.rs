//! What Prometheus reads: in its text format, in OpenMetrics, or in its protobuf format.

mod protobuf;
mod text;

use std::borrow::Cow;

use prometheus::proto::{MetricFamily, MetricType};

use crate::metrics::Distribution;

/// How metrics are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exposition {
    /// Prometheus' text format 0.0.4.
    Text,
    /// OpenMetrics 1.0, in which histograms have exemplars.
    OpenMetrics,
    /// Prometheus' protobuf format, in which they have native buckets as well.
    Protobuf,
}

impl Exposition {
    /// The one that whoever asks likes best, by the `Accept` of his request; the text format where he likes none.
    #[must_use]
    pub fn accepted(accept: &str) -> Self {
        let mut best = (0.0, Self::Text);
        for range in accept.split(',') {
            let mut words = range.split(';').map(str::trim);
            let kind = words.next().unwrap_or_default();
            let parameter = |name| words.clone().find_map(|word: &str| word.strip_prefix(name));
            let quality = parameter("q=").and_then(|quality| quality.parse().ok()).unwrap_or(1.0);
            let exposition = match kind {
                "application/vnd.google.protobuf"
                    if parameter("proto=").is_none_or(|it| it == "io.prometheus.client.MetricFamily")
                        && parameter("encoding=") == Some("delimited") =>
                {
                    Self::Protobuf
                }
                "application/openmetrics-text" => Self::OpenMetrics,
                "text/plain" => Self::Text,
                _ => continue,
            };
            if quality > best.0 {
                best = (quality, exposition);
            }
        }
        best.1
    }

    /// Its media type.
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

/// All that has one name.
#[derive(Debug, PartialEq)]
pub(super) struct Family<'f> {
    pub(super) name: Cow<'f, str>,
    pub(super) help: Cow<'f, str>,
    pub(super) kind: Kind,
    pub(super) samples: Vec<Sample<'f>>,
}

/// What it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Counter,
    Gauge,
    Histogram,
    Summary,
}

/// One value of it.
#[derive(Debug, PartialEq)]
pub(super) struct Sample<'f> {
    pub(super) labels: Vec<(Cow<'f, str>, Cow<'f, str>)>,
    pub(super) value: Value,
}

#[derive(Debug, PartialEq)]
pub(super) enum Value {
    Number(f64),
    /// Of a histogram all of it, of a summary its count and its sum.
    Distribution(Distribution),
}

impl<'f> Family<'f> {
    /// The numbers of a registry; it has no others.
    pub(super) fn of(family: &'f MetricFamily) -> Self {
        let is_counter = family.get_field_type() == MetricType::COUNTER;
        let samples = family.get_metric().iter().map(|metric| Sample {
            labels: metric.get_label().iter().map(|label| (label.name().into(), label.value().into())).collect(),
            value: Value::Number(match is_counter {
                true => metric.get_counter().get_value(),
                false => metric.get_gauge().get_value(),
            }),
        });
        Self {
            name: family.name().into(),
            help: family.help().into(),
            kind: if is_counter { Kind::Counter } else { Kind::Gauge },
            samples: samples.collect(),
        }
    }
}

#[cfg(test)]
mod tests;
