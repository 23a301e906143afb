use std::collections::BTreeMap;

use serde_json::Value as Json;

use super::*;
use crate::metrics::{Histogram, WorkerId};

/// What statsd_exporter 0.31 makes of names that were thrown together, by mappings that were as well. (None of them has a
/// match twice, or one that an earlier match begins with: there these are not found, or too late. Nor is one found by
/// `glob_disable_ordering` for which the search has to go back.)
#[test]
fn names_become_what_statsd_exporter_makes_of_them() {
    let cases: Vec<Json> = serde_json::from_str(include_str!("vectors.json")).unwrap();
    let mut tried = 0;
    for case in &cases {
        let text = case["mapping"].to_string();
        let mapping = Mapping::parse(&text).unwrap();
        for name in case["names"].as_array().unwrap() {
            let kind = if name["type"] == "counter" { MetricType::Counter } else { MetricType::Observer };
            let mapped = mapping.map(name["name"].as_str().unwrap(), kind);
            let mapped = mapped.map(|it| {
                let labels: BTreeMap<_, _> = it.labels.into_iter().collect();
                serde_json::json!({"name": it.name, "labels": labels, "scale": it.scale})
            });
            let expected = name["becomes"].as_object().map(|it| {
                let scale = it["scale"].as_f64().unwrap();
                serde_json::json!({"name": it["name"], "labels": it["labels"], "scale": scale})
            });
            assert_eq!(mapped, expected, "{text}\n{name}");
            tried += 1;
        }
    }
    assert!(tried > 100, "{tried}");
}

const EXAMPLE: &str = r#"
mappings:
  - match: "service.*.*.hits"
    name: "hits"
    timer_type: "histogram"
    labels: { domain: "$1", key1: "$2" }
  - match: 'service\.([^.]*)\.([^.]*)(\..*)?\.hits'
    match_type: regex
    name: "hits"
    labels: { domain: "$1", key1: "$2" }
  - match: "ratelimit_server.*.response_time"
    name: "time"
    timer_type: histogram
    scale: 0.001
    buckets: [1, 2]
    labels: { method: "$1" }
"#;

fn took(micros: u64) -> Distribution {
    let histogram = Histogram::new("x", "", 1);
    histogram.record(WorkerId(0), std::time::Duration::from_micros(micros));
    histogram.distribution()
}

fn totals(all: &[(&str, u64)]) -> Totals {
    all.iter().map(|(name, total)| ((*name).to_owned(), *total)).collect()
}

#[test]
fn what_has_the_same_name_and_labels_is_added_up() {
    let mapping = Mapping::parse(EXAMPLE).unwrap();
    let totals = totals(&[("service.a.b.hits", 1), ("service.a.b.c.hits", 2), ("service.a.x.hits", 4), ("x.y-z", 8)]);
    let families = mapping.families(&totals, took(1_500));
    let names: Vec<_> = families.iter().map(|family| (&*family.name, family.kind)).collect();
    assert_eq!(names, [("hits", Kind::Counter), ("time", Kind::Histogram), ("x_y_z", Kind::Counter)]);
    let hits: Vec<_> = families[0].samples.iter().map(|it| (&*it.labels[1].1, &it.value)).collect();
    assert_eq!(hits, [("b", &Value::Number(3.0)), ("x", &Value::Number(4.0))]);
    // In seconds it is what was measured, native buckets included.
    assert_eq!(families[1].samples[0].value, Value::Distribution(took(1_500)));
}

#[test]
fn the_response_time_is_in_milliseconds_unless_it_is_scaled() {
    let mapping = Mapping::parse(&EXAMPLE.replace("scale: 0.001", "scale: 1").replace("timer_type: histogram", ""));
    let mapping = mapping.unwrap();
    let families = mapping.families(&Totals::new(), took(1_500));
    let Value::Distribution(all) = &families[0].samples[0].value else {
        panic!("{families:?}");
    };
    assert_eq!((families[0].kind, all.sum, all.buckets[0].0, &all.native), (Kind::Summary, 1.5, 0.001, &None));
    let by_default = Mapping::parse("defaults: {observer_type: histogram}").unwrap();
    assert_eq!(by_default.families(&Totals::new(), took(1))[0].kind, Kind::Histogram);
}

#[test]
fn what_has_no_name_left_or_another_kind_is_not_shown() {
    let text = "mappings: [{match: a.*, name: '$2'}, {match: b, name: x}, \
                {match: 'ratelimit_server.*.response_time', name: x, labels: {method: $1}}]";
    let mapping = Mapping::parse(text).unwrap();
    let families = mapping.families(&totals(&[("a.b", 1), ("b", 2)]), took(1));
    let shown: Vec<_> = families.iter().map(|family| (&*family.name, family.kind, family.samples.len())).collect();
    assert_eq!(shown, [("x", Kind::Counter, 1)]);
}

#[test]
fn the_first_that_fits_has_the_say_or_the_most_specific_one() {
    let mappings = "mappings: [{match: '*.b', name: any}, {match: a.b, name: one}]";
    for (defaults, name) in [("", "any"), ("defaults: {glob_disable_ordering: true}\n", "one")] {
        let mapping = Mapping::parse(&format!("{defaults}{mappings}")).unwrap();
        assert_eq!(mapping.map("a.b", MetricType::Counter).unwrap().name, name);
    }
}

#[test]
fn files_that_make_no_sense_are_refused() {
    for text in [
        "mappings: 7",
        "mapings: []",
        "mappings: [{match: a.b}]",
        "mappings: [{match: a.b, name: ''}]",
        "mappings: [{match: a.b*, name: x}]",
        "mappings: [{match: a..b, name: x}]",
        "mappings: [{match: '(', match_type: regex, name: x}]",
        "mappings: [{match: a, name: x, lables: {}}]",
        "mappings: [{match: a, name: x, labels: {'1a': x}}]",
        "mappings: [{match: a, name: x, action: keep}]",
    ] {
        assert!(Mapping::parse(text).is_err(), "{text}");
    }
    assert!(Mapping::read(Path::new("/nowhere/at/all.yaml")).unwrap().is_none());
}
