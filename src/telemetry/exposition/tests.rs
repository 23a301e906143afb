use std::time::Duration;

use prost::Message;

use super::{
    protobuf::{MetricFamily, MetricType},
    *,
};
use crate::metrics::{Exemplar, NativeBuckets, TraceId};

fn family(name: &'static str, kind: Kind, labels: &[(&'static str, &'static str)], value: Value) -> Family<'static> {
    let labels = labels.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
    Family { name: name.into(), help: "what\n\"it\" is".into(), kind, samples: vec![Sample { labels, value }] }
}

fn distribution() -> Distribution {
    let exemplar = Exemplar { trace: TraceId(0x2a), seconds: 0.5, at: Duration::from_millis(1_500_000_000_250) };
    Distribution {
        count: 3,
        sum: 20.5,
        buckets: vec![(0.000_001, 1, None), (10.0, 2, Some(exemplar)), (f64::INFINITY, 3, None)],
        native: Some(NativeBuckets { zero: 1, buckets: vec![(-8, 4), (-7, 1), (0, 2)] }),
    }
}

fn families() -> Vec<Family<'static>> {
    vec![
        family("a_total", Kind::Counter, &[("x", "\"\\\n")], Value::Number(1.0)),
        family("b", Kind::Histogram, &[("y", "z")], Value::Distribution(distribution())),
        family("c", Kind::Counter, &[], Value::Number(2.0)),
        family("d", Kind::Gauge, &[], Value::Number(0.25)),
        family("e", Kind::Summary, &[], Value::Distribution(distribution())),
    ]
}

#[test]
fn writes_the_text_format() {
    let text = String::from_utf8(Exposition::Text.write(&families())).unwrap();
    let expected = "# HELP a_total what\\n\"it\" is\n# TYPE a_total counter\na_total{x=\"\\\"\\\\\\n\"} 1\n\
                    # HELP b what\\n\"it\" is\n# TYPE b histogram\nb_bucket{y=\"z\",le=\"0.000001\"} 1\n\
                    b_bucket{y=\"z\",le=\"10\"} 2\nb_bucket{y=\"z\",le=\"+Inf\"} 3\nb_sum{y=\"z\"} 20.5\nb_count{y=\"z\"} 3\n\
                    # HELP c what\\n\"it\" is\n# TYPE c counter\nc 2\n\
                    # HELP d what\\n\"it\" is\n# TYPE d gauge\nd 0.25\n\
                    # HELP e what\\n\"it\" is\n# TYPE e summary\ne_sum 20.5\ne_count 3\n";
    assert_eq!(text, expected);
}

#[test]
fn openmetrics_keeps_the_names_and_adds_exemplars() {
    let text = String::from_utf8(Exposition::OpenMetrics.write(&families())).unwrap();
    let expected = "# HELP a what\\n\\\"it\\\" is\n# TYPE a counter\na_total{x=\"\\\"\\\\\\n\"} 1\n\
                    # HELP b what\\n\\\"it\\\" is\n# TYPE b histogram\nb_bucket{y=\"z\",le=\"1e-6\"} 1\n\
                    b_bucket{y=\"z\",le=\"10.0\"} 2 # {trace_id=\"0000000000000000000000000000002a\"} 0.5 1500000000.250\n\
                    b_bucket{y=\"z\",le=\"+Inf\"} 3\nb_sum{y=\"z\"} 20.5\nb_count{y=\"z\"} 3\n\
                    # HELP c what\\n\\\"it\\\" is\n# TYPE c unknown\nc 2\n\
                    # HELP d what\\n\\\"it\\\" is\n# TYPE d gauge\nd 0.25\n\
                    # HELP e what\\n\\\"it\\\" is\n# TYPE e summary\ne_sum 20.5\ne_count 3\n# EOF\n";
    assert_eq!(text, expected);
}

#[test]
fn protobuf_has_native_buckets() {
    let page = Exposition::Protobuf.write(&families());
    let mut remaining = page.as_slice();
    let mut families = Vec::new();
    while !remaining.is_empty() {
        families.push(MetricFamily::decode_length_delimited(&mut remaining).unwrap());
    }
    let [a, b, c, d, e] = families.as_slice() else {
        panic!("{families:?}");
    };
    assert_eq!((a.name.as_str(), a.kind(), &*a.metric[0].label[0].value), ("a_total", MetricType::Counter, "\"\\\n"));
    assert_eq!(c.metric[0].counter.as_ref().unwrap().value, Some(2.0));
    assert_eq!((d.kind(), d.metric[0].gauge.as_ref().unwrap().value), (MetricType::Gauge, Some(0.25)));
    assert_eq!(e.metric[0].summary.as_ref().unwrap().sample_count, Some(3));
    let histogram = b.metric[0].histogram.as_ref().unwrap();
    assert_eq!((histogram.sample_count, histogram.sample_sum, histogram.schema), (Some(3), Some(20.5), Some(3)));
    assert_eq!((histogram.zero_count, histogram.zero_threshold), (Some(1), Some(2_f64.powi(-24))));
    let spans: Vec<_> = histogram.positive_span.iter().map(|span| (span.offset, span.length)).collect();
    assert_eq!((spans, &*histogram.positive_delta), (vec![(-8, 2), (6, 1)], &[4, -3, 1][..]));
    let buckets: Vec<_> = histogram.bucket.iter().map(|it| (it.upper_bound(), it.cumulative_count())).collect();
    assert_eq!(buckets, [(0.000_001, 1), (10.0, 2), (f64::INFINITY, 3)]);
    let exemplar = histogram.bucket[1].exemplar.as_ref().unwrap();
    let timestamp = exemplar.timestamp.as_ref().unwrap();
    assert_eq!((exemplar.value(), timestamp.seconds, timestamp.nanos), (0.5, 1_500_000_000, 250_000_000));
    assert_eq!(exemplar.label[0].value, format!("{:032x}", 0x2a));
    // A distribution in another unit has no native buckets.
    let scaled = family("b", Kind::Histogram, &[], Value::Distribution(distribution().scaled(1e3)));
    let page = Exposition::Protobuf.write(&[scaled]);
    let scaled = MetricFamily::decode_length_delimited(page.as_slice()).unwrap();
    let histogram = scaled.metric[0].histogram.as_ref().unwrap();
    assert_eq!((histogram.schema, histogram.bucket[1].upper_bound()), (None, 10_000.0));
}

#[test]
fn accept_selects_the_format() {
    let protobuf = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited";
    let open = "application/openmetrics-text;version=1.0.0";
    for (accept, expected) in [
        ("", Exposition::Text),
        ("*/*", Exposition::Text),
        ("text/html, nonsense;;q=x", Exposition::Text),
        (&format!("{open};q=0.5,text/plain;version=0.0.4;q=0.3"), Exposition::OpenMetrics),
        (&format!("{open};q=0.3,text/plain;version=0.0.4;q=0.5"), Exposition::Text),
        (&format!("{protobuf};q=0.6, {open};q=0.5,*/*;q=0.2"), Exposition::Protobuf),
        (&format!("{protobuf};q=0.1,{open}"), Exposition::OpenMetrics),
        ("application/vnd.google.protobuf;proto=x.Y;encoding=delimited", Exposition::Text),
        ("application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=text", Exposition::Text),
    ] {
        assert_eq!(Exposition::accepted(accept), expected, "{accept}");
    }
}

#[test]
fn of_two_formats_with_the_same_quality_the_first_is_selected() {
    let open = "application/openmetrics-text";
    assert_eq!(Exposition::accepted(&format!("{open},text/plain")), Exposition::OpenMetrics);
    assert_eq!(Exposition::accepted(&format!("text/plain,{open}")), Exposition::Text);
    assert_eq!(Exposition::accepted(&format!("{open};q=0")), Exposition::Text, "0 means not acceptable");
}
