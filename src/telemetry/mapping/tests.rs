use std::collections::BTreeMap;

use serde_json::Value as Json;

use super::*;
use crate::metrics::{Histogram, WorkerId};

/// The vectors contain random names with random mappings, and the results of `statsd_exporter` 0.31.
///
/// They avoid two deviations of `statsd_exporter`. It does not find, or finds too late, a match that occurs twice or
/// begins with an earlier match. With `glob_disable_ordering` it does not find matches for which the search has to
/// backtrack.
#[test]
fn maps_names_like_statsd_exporter() {
    let cases: Vec<Json> = serde_json::from_str(include_str!("vectors.json")).unwrap();
    let mut checked = 0;
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
            checked += 1;
        }
    }
    assert!(checked > 100, "{checked}");
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

fn response_time(micros: u64) -> Distribution {
    let histogram = Histogram::new("x", "", 1);
    histogram.record(WorkerId(0), std::time::Duration::from_micros(micros));
    histogram.distribution()
}

fn totals(all: &[(&str, u64)]) -> Totals {
    all.iter().map(|(name, total)| ((*name).to_owned(), *total)).collect()
}

#[test]
fn values_with_the_same_name_and_labels_are_added() {
    let mapping = Mapping::parse(EXAMPLE).unwrap();
    let totals = totals(&[("service.a.b.hits", 1), ("service.a.b.c.hits", 2), ("service.a.x.hits", 4), ("x.y-z", 8)]);
    let families = mapping.families(&totals, response_time(1_500));
    let names: Vec<_> = families.iter().map(|family| (&*family.name, family.kind)).collect();
    assert_eq!(names, [("hits", Kind::Counter), ("time", Kind::Histogram), ("x_y_z", Kind::Counter)]);
    let hits: Vec<_> = families[0].samples.iter().map(|it| (&*it.labels[1].1, &it.value)).collect();
    assert_eq!(hits, [("b", &Value::Number(3.0)), ("x", &Value::Number(4.0))]);
    // In seconds it is the measured distribution, including native buckets.
    assert_eq!(families[1].samples[0].value, Value::Distribution(response_time(1_500)));
}

#[test]
fn the_response_time_is_in_milliseconds_unless_scaled() {
    let mapping = Mapping::parse(&EXAMPLE.replace("scale: 0.001", "scale: 1").replace("timer_type: histogram", ""));
    let mapping = mapping.unwrap();
    let families = mapping.families(&Totals::new(), response_time(1_500));
    let Value::Distribution(distribution) = &families[0].samples[0].value else {
        panic!("{families:?}");
    };
    assert_eq!(
        (families[0].kind, distribution.sum, distribution.buckets[0].0, &distribution.native),
        (Kind::Summary, 1.5, 0.001, &None)
    );
    let by_default = Mapping::parse("defaults: {observer_type: histogram}").unwrap();
    assert_eq!(by_default.families(&Totals::new(), response_time(1))[0].kind, Kind::Histogram);
}

#[test]
fn values_without_a_name_or_of_another_kind_are_omitted() {
    let text = "mappings: [{match: a.*, name: '$2'}, {match: b, name: x}, \
                {match: 'ratelimit_server.*.response_time', name: x, labels: {method: $1}}]";
    let mapping = Mapping::parse(text).unwrap();
    let families = mapping.families(&totals(&[("a.b", 1), ("b", 2)]), response_time(1));
    let shown: Vec<_> = families.iter().map(|family| (&*family.name, family.kind, family.samples.len())).collect();
    assert_eq!(shown, [("x", Kind::Counter, 1)]);
}

#[test]
fn the_first_or_the_most_specific_match_applies() {
    let mappings = "mappings: [{match: '*.b', name: any}, {match: a.b, name: one}]";
    for (defaults, name) in [("", "any"), ("defaults: {glob_disable_ordering: true}\n", "one")] {
        let mapping = Mapping::parse(&format!("{defaults}{mappings}")).unwrap();
        assert_eq!(mapping.map("a.b", MetricType::Counter).unwrap().name, name);
    }
}

#[test]
fn rejects_invalid_files() {
    for text in [
        "mappings: 7",
        "mapings: []",
        "mappings[0]: {match: a.b, name: x}",
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

/// As in Go; but `\p{…}`, which Go supports, is an error.
#[test]
fn classes_of_regular_expressions_are_ascii() {
    let parse =
        |pattern: &str| Mapping::parse(&format!("mappings: [{{match: '{pattern}', match_type: regex, name: x}}]"));
    for (pattern, name, matches) in
        [(r"^\d$", "4", true), (r"^\d$", "٤", false), (r"^\w$", "ü", false), ("^.$", "ü", true)]
    {
        let mapping = parse(pattern).unwrap();
        let mapped = mapping.map(name, MetricType::Counter).unwrap();
        assert_eq!(mapped.name == "x", matches, "{pattern} {name}");
    }
    let error = parse(r"^\p{L}$").unwrap_err();
    assert!(error.starts_with(r#"invalid match "^\\p{L}$": "#), "{error}");
}

#[test]
fn counters_are_multiplied_by_their_scale() {
    let mapping = Mapping::parse("mappings: [{match: a, name: x, scale: 4}]").unwrap();
    let families = mapping.families(&totals(&[("a", 3)]), response_time(1));
    let counter = families.iter().find(|family| family.name == "x").unwrap();
    assert_eq!(counter.samples[0].value, Value::Number(12.0));
}

#[test]
fn a_reference_extends_over_letters_digits_underscores_and_dollars() {
    assert_eq!(fill("$1_x-$1$2-${1}_x-$0", "name", &["a", "b"]), "--a_x-name");
}

#[test]
fn a_file_that_exists_but_cannot_be_read_is_an_error() {
    assert!(Mapping::read(&std::env::temp_dir()).is_err());
}
