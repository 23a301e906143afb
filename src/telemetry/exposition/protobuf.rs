//! The part of Prometheus' protobuf format (`io.prometheus.client`) that this service writes. It is the only format in
//! which histograms can have native buckets.

use std::time::UNIX_EPOCH;

use prost::Message;
use prost_types::Timestamp;

use super::{Family, Kind, Sample, Value};
use crate::metrics::{self, Distribution, SCHEMA, ZERO_THRESHOLD};

#[derive(Clone, PartialEq, Message)]
pub(super) struct MetricFamily {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "2")]
    pub(super) help: String,
    #[prost(enumeration = "MetricType", optional, tag = "3")]
    pub(super) kind: Option<i32>,
    #[prost(message, repeated, tag = "4")]
    pub(super) metric: Vec<Metric>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
pub(super) enum MetricType {
    Counter = 0,
    Gauge = 1,
    Summary = 2,
    Histogram = 4,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Metric {
    #[prost(message, repeated, tag = "1")]
    pub(super) label: Vec<LabelPair>,
    #[prost(message, optional, tag = "2")]
    pub(super) gauge: Option<Number>,
    #[prost(message, optional, tag = "3")]
    pub(super) counter: Option<Number>,
    #[prost(message, optional, tag = "4")]
    pub(super) summary: Option<Summary>,
    #[prost(message, optional, tag = "7")]
    pub(super) histogram: Option<Histogram>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LabelPair {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "2")]
    pub(super) value: String,
}

/// A `Gauge` or a `Counter`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Number {
    #[prost(double, optional, tag = "1")]
    pub(super) value: Option<f64>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Summary {
    #[prost(uint64, optional, tag = "1")]
    pub(super) sample_count: Option<u64>,
    #[prost(double, optional, tag = "2")]
    pub(super) sample_sum: Option<f64>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Histogram {
    #[prost(uint64, optional, tag = "1")]
    pub(super) sample_count: Option<u64>,
    #[prost(double, optional, tag = "2")]
    pub(super) sample_sum: Option<f64>,
    #[prost(message, repeated, tag = "3")]
    pub(super) bucket: Vec<Bucket>,
    #[prost(sint32, optional, tag = "5")]
    pub(super) schema: Option<i32>,
    #[prost(double, optional, tag = "6")]
    pub(super) zero_threshold: Option<f64>,
    #[prost(uint64, optional, tag = "7")]
    pub(super) zero_count: Option<u64>,
    #[prost(message, repeated, tag = "12")]
    pub(super) positive_span: Vec<BucketSpan>,
    #[prost(sint64, repeated, packed = "false", tag = "13")]
    pub(super) positive_delta: Vec<i64>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Bucket {
    #[prost(uint64, optional, tag = "1")]
    pub(super) cumulative_count: Option<u64>,
    #[prost(double, optional, tag = "2")]
    pub(super) upper_bound: Option<f64>,
    #[prost(message, optional, tag = "3")]
    pub(super) exemplar: Option<Exemplar>,
}

/// Consecutive buckets, and the number of empty buckets between them and the previous span.
#[derive(Clone, PartialEq, Message)]
pub(super) struct BucketSpan {
    #[prost(sint32, tag = "1")]
    pub(super) offset: i32,
    #[prost(uint32, tag = "2")]
    pub(super) length: u32,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Exemplar {
    #[prost(message, repeated, tag = "1")]
    pub(super) label: Vec<LabelPair>,
    #[prost(double, optional, tag = "2")]
    pub(super) value: Option<f64>,
    #[prost(message, optional, tag = "3")]
    pub(super) timestamp: Option<Timestamp>,
}

pub(super) fn write(families: &[Family<'_>]) -> Vec<u8> {
    families.iter().flat_map(|family| MetricFamily::from(family).encode_length_delimited_to_vec()).collect()
}

impl From<&Family<'_>> for MetricFamily {
    fn from(family: &Family<'_>) -> Self {
        let kind = match family.kind {
            Kind::Counter => MetricType::Counter,
            Kind::Gauge => MetricType::Gauge,
            Kind::Histogram => MetricType::Histogram,
            Kind::Summary => MetricType::Summary,
        };
        Self {
            name: family.name.to_string(),
            help: family.help.to_string(),
            kind: Some(kind.into()),
            metric: family.samples.iter().map(|sample| metric(family.kind, sample)).collect(),
        }
    }
}

fn metric(kind: Kind, sample: &Sample<'_>) -> Metric {
    let labels = sample.labels.iter();
    let label = labels.map(|(name, value)| LabelPair { name: name.to_string(), value: value.to_string() });
    let mut metric = Metric { label: label.collect(), ..Metric::default() };
    match (&sample.value, kind) {
        (Value::Number(number), Kind::Counter) => metric.counter = Some(Number { value: Some(*number) }),
        (Value::Number(number), _) => metric.gauge = Some(Number { value: Some(*number) }),
        (Value::Distribution(distribution), Kind::Summary) => {
            metric.summary =
                Some(Summary { sample_count: Some(distribution.count), sample_sum: Some(distribution.sum) });
        }
        (Value::Distribution(distribution), _) => metric.histogram = Some(distribution.into()),
    }
    metric
}

impl From<&Distribution> for Histogram {
    fn from(distribution: &Distribution) -> Self {
        let mut histogram =
            Self { sample_count: Some(distribution.count), sample_sum: Some(distribution.sum), ..Self::default() };
        for (bound, count, exemplar) in &distribution.buckets {
            histogram.bucket.push(Bucket {
                cumulative_count: Some(*count),
                upper_bound: Some(*bound),
                exemplar: exemplar.as_ref().map(Exemplar::from),
            });
        }
        let Some(native) = &distribution.native else {
            return histogram;
        };
        histogram.schema = Some(SCHEMA);
        histogram.zero_threshold = Some(ZERO_THRESHOLD);
        histogram.zero_count = Some(native.zero);
        let mut next = 0;
        let mut previous = 0;
        for (index, count) in &native.buckets {
            match histogram.positive_span.last_mut() {
                Some(span) if *index == next => span.length += 1,
                _ => histogram.positive_span.push(BucketSpan { offset: index - next, length: 1 }),
            }
            next = index + 1;
            histogram.positive_delta.push(count.cast_signed() - previous);
            previous = count.cast_signed();
        }
        histogram
    }
}

impl From<&metrics::Exemplar> for Exemplar {
    fn from(exemplar: &metrics::Exemplar) -> Self {
        Self {
            label: vec![LabelPair { name: "trace_id".to_owned(), value: format!("{:032x}", exemplar.trace.0) }],
            value: Some(exemplar.seconds),
            timestamp: Some((UNIX_EPOCH + exemplar.at).into()),
        }
    }
}
