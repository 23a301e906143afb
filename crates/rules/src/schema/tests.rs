use std::{fs, path::Path};

use jsonschema::Validator;
use serde_json::Number;

use super::*;
use crate::{
    Options, SourceFile, compile,
    yaml::{self, Document, Kind, Yaml},
};

/// Converts a document to JSON as an editor does: by YAML 1.2.
fn json(yaml: &Yaml) -> Value {
    match &yaml.kind {
        Kind::Null => Value::Null,
        Kind::Scalar { text, plain: true } => match text.as_str() {
            "true" => true.into(),
            "false" => false.into(),
            text => text.parse::<Number>().map_or_else(|_| text.into(), Value::Number),
        },
        Kind::Scalar { text, plain: false } => text.as_str().into(),
        Kind::List(items) => items.iter().map(json).collect(),
        Kind::Map(pairs) => {
            pairs.iter().map(|(key, value)| (key.scalar().unwrap().0.to_owned(), json(value))).collect()
        }
    }
}

fn violations(validator: &Validator, text: &str) -> Vec<String> {
    let Ok(Document { root: Some(yaml), .. }) = yaml::parse(text) else {
        return vec!["invalid YAML".to_owned()];
    };
    validator.iter_errors(&json(&yaml)).map(|error| format!("{}: {error}", error.instance_path())).collect()
}

fn validator() -> Validator {
    let schema = schema();
    jsonschema::meta::validate(&schema).unwrap_or_else(|error| panic!("{error}"));
    jsonschema::validator_for(&schema).unwrap()
}

fn rule_files(folder: &Path, found: &mut Vec<(String, String)>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            rule_files(&path, found);
        } else if path.extension().is_some_and(|end| end == "yaml") {
            let text = fs::read_to_string(&path).unwrap();
            if text.starts_with("domain:") || text.contains("\ndomain:") {
                found.push((path.display().to_string(), text));
            }
        }
    }
}

#[test]
fn every_example_is_valid() {
    let mut files = Vec::new();
    for folder in ["deploy", "tests"] {
        rule_files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(folder), &mut files);
    }
    assert!(files.len() > 8, "{files:?}");
    let validator = validator();
    for (name, text) in files {
        assert_eq!(violations(&validator, &text), Vec::<String>::new(), "{name}");
    }
}

/// Values of every type.
const VALUES: &[&str] = &[
    "a",
    "first_request",
    "calendar",
    "Europe/Berlin",
    "sunday",
    "entity",
    "06:00",
    "429",
    "{a: {b: a}}",
    "{a: {b: {plan: a, day: 31}}}",
    "{a: {b: {unit: day, requests_per_unit: 1}}}",
    "x",
    "''",
    "~",
    "0",
    "1",
    "7",
    "-1",
    "1.5",
    "1_000",
    "0x1f",
    "5000000000",
    "true",
    "False",
    "yes",
    "NO",
    "[]",
    "[a]",
    "[a, b]",
    "{}",
    "{a: b}",
    "{a: 5}",
    "{a: 5%}",
    "{a: {min: 5%}}",
    "{a: {max: x}}",
    "[{unit: day, requests_per_unit: 1}]",
    "[{name: a}]",
    "[{name: a, b: c}]",
    "5%",
    "95%",
    "0%",
    "150 %",
    "5000%",
    "10s",
    "1m 30s",
    "soon",
    "100/s",
    "100 / minute",
    "100/x",
    "MINUTE",
    "second",
    "weighted",
    "strict",
    "all",
    "each",
    "leased",
    "exact",
    "allow",
    "local",
    "vegas",
    "aimd",
    "gcra",
    "{v4: 24}",
    "{v6: 0}",
    "{v4: 40}",
    "{resource: cpu, up_to: 200%}",
    "{resource: cpu, up_to: 200%, idle: 10%, busy: 95%}",
    "{up_to: 200%}",
    "[{key: b}]",
    "[{key: b, rate_limit: {unit: day}}]",
    "[{value: b}]",
    "{default: a, limits: {a: {b: {unit: day, requests_per_unit: 1}}}}",
    "{limits: {a: {b: {unit: day}}}}",
    "{unit: day, requests_per_unit: 3}",
    "{unlimited: true}",
];

/// Returns rule files that contain a keyword with a value, together with the keywords that it may require.
fn files(map: &str, keyword: &str, value: &str) -> Vec<String> {
    let descriptor = |inner: &str| format!("{{domain: d, descriptors: [{{key: k, {inner}}}]}}");
    match map {
        "rate_limit" if keyword == "by_plan" => {
            let plans = "plans: {default: a, limits: {a: {x: {unit: day, requests_per_unit: 1}}}}";
            vec![format!("{{domain: d, {plans}, descriptors: [{{key: k, rate_limit: {{by_plan: {value}}}}}]}}")]
        }
        "file" if keyword == "domain" => vec![format!("{{domain: {value}}}")],
        "file" => vec![format!("{{domain: d, {keyword}: {value}}}")],
        "descriptor" if keyword == "key" => vec![format!("{{domain: d, descriptors: [{{key: {value}}}]}}")],
        "descriptor" => {
            vec![descriptor(&format!("{keyword}: {value}")), descriptor(&format!("value: a*, {keyword}: {value}"))]
        }
        "rate_limit" => {
            let mut bases = vec![
                "",
                "unit: hour, requests_per_unit: 9, ",
                "unit: week, requests_per_unit: 9, window: calendar, ",
                "unit: month, unit_multiplier: 3, requests_per_unit: 9, window: calendar, ",
                "unit: hour, requests_per_unit: 9, penalty: 1s, ",
                "unit: hour, ",
                "requests_per_unit: 9, ",
                "algorithm: concurrency, limit: 5, ",
                "algorithm: concurrency, ",
                "algorithm: adaptive, ceiling: 50, ",
                "algorithm: adaptive, ",
                "capacity: 100/s, ",
                "capacity: 100, class: c, reserve: {a: 5%}, ",
                "capacity: 100/s, class: c, shares: {a: {min: 5}}, ",
                "capacity: 100/s, class: c, ",
                "capacity: 100/s, reserve: {a: 5%}, ",
                "shares: {a: {min: 5}}, class: c, ",
                "reserve: {a: 5%}, class: c, ",
            ]
            .into_iter()
            .map(str::to_owned)
            .collect::<Vec<_>>();
            let named =
                Algorithm::named().map(|kind| format!("unit: hour, requests_per_unit: 9, algorithm: {}, ", kind.name));
            bases.extend(named);
            bases.retain(|base| base.split(", ").all(|pair| pair.split(':').next() != Some(keyword)));
            bases.iter().map(|base| descriptor(&format!("rate_limit: {{{base}{keyword}: {value}}}"))).collect()
        }
        "ip_prefix" => vec![descriptor(&format!(
            "ip_prefix: {{{keyword}: {value}}}, rate_limit: {{unit: day, requests_per_unit: 1}}"
        ))],
        "replaces" => {
            let limit = "unit: day, requests_per_unit: 1";
            let replaced = format!("{{key: b, rate_limit: {{{limit}, name: {value}}}}}");
            let rule = format!("{{key: a, rate_limit: {{{limit}, replaces: [{{{keyword}: {value}}}]}}}}");
            vec![format!("{{domain: d, descriptors: [{rule}, {replaced}]}}")]
        }
        "elastic" => ["resource: r", "up_to: 200%", "idle: 50%", "busy: 90%"]
            .map(|context| if context.starts_with(keyword) { "idle: 40%" } else { context })
            .iter()
            .map(|context| {
                let other_keywords = ["resource: r", "up_to: 200%"]
                    .into_iter()
                    .filter(|other| !other.starts_with(keyword) && other != context);
                let other_keywords: String = other_keywords.map(|other| format!("{other}, ")).collect();
                descriptor(&format!(
                    "rate_limit: {{unit: day, requests_per_unit: 10, elastic: {{{other_keywords}{keyword}: {value}}}}}"
                ))
            })
            .collect(),
        "share" => {
            vec![descriptor(&format!("rate_limit: {{capacity: 100, class: c, shares: {{a: {{{keyword}: {value}}}}}}}"))]
        }
        "plans" => {
            let others = ["default: a", "limits: {a: {b: {unit: day, requests_per_unit: 1}}}"];
            let others: Vec<_> = others.into_iter().filter(|other| !other.starts_with(keyword)).collect();
            vec![format!("{{domain: d, plans: {{{}, {keyword}: {value}}}}}", others.join(", "))]
        }
        "cost_per_hit" => {
            let others = ["key: m", "values: {a: 5}", "default: 5"];
            let others: Vec<_> = others.into_iter().filter(|other| !other.starts_with(keyword)).collect();
            let cost = format!("cost_per_hit: {{{}, {keyword}: {value}}}", others.join(", "));
            vec![descriptor(&format!("rate_limit: {{unit: day, requests_per_unit: 1, {cost}}}"))]
        }
        "currency" => {
            let code = if keyword == "code" { "" } else { "code: USD, " };
            let currency = format!("currency: {{{code}{keyword}: {value}}}");
            vec![descriptor(&format!("rate_limit: {{unit: day, requests_per_unit: 1, {currency}}}"))]
        }
        "denial" => {
            let message = if keyword == "message" { "" } else { "message: x, " };
            let denial = format!("denial: {{{message}{keyword}: {value}}}");
            vec![descriptor(&format!("rate_limit: {{unit: day, requests_per_unit: 1, {denial}}}"))]
        }
        "assignment" => {
            let plan = if keyword == "plan" { "" } else { "plan: a, " };
            let entities = format!("{{x: {{y: {{{plan}{keyword}: {value}}}}}}}");
            let limits = "{a: {b: {unit: day, requests_per_unit: 1}}}";
            vec![format!("{{domain: d, plans: {{default: a, limits: {limits}, entities: {entities}}}}}")]
        }
        other => panic!("no files for {other}"),
    }
}

/// The schema accepts everything that the reader accepts without a warning, and both reject values of a wrong type.
#[test]
fn the_schema_agrees_with_the_reader() {
    let validator = validator();
    let (mut accepted_count, mut rejected_count) = (0, 0);
    for map in MAPS {
        for keyword in map.keywords {
            let mut accepted = 0;
            for value in VALUES.iter().copied().chain(["[[a]]", "{[a]: b}"]).filter(|value| !value.contains("{[")) {
                for text in files(map.name, keyword.name, value) {
                    let files = [SourceFile { name: "f".into(), text: text.clone() }];
                    let violations_found = violations(&validator, &text);
                    match compile(&files, Options::default()) {
                        Ok((_, warnings)) if warnings.is_empty() => {
                            assert_eq!(violations_found, Vec::<String>::new(), "{text}");
                            (accepted_count, accepted) = (accepted_count + 1, accepted + 1);
                        }
                        _ if violations_found.is_empty() => {}
                        _ => rejected_count += 1,
                    }
                }
            }
            assert!(accepted > 0, "{}.{} was never accepted", map.name, keyword.name);
            for text in files(map.name, keyword.name, "[[a]]") {
                assert!(!violations(&validator, &text).is_empty(), "{text}");
            }
        }
    }
    assert!(accepted_count > 300 && rejected_count > 2_000, "{accepted_count} accepted, {rejected_count} rejected");
    for text in ["{domain: d, descriptorz: []}", "{descriptors: []}", "{domain: d, descriptors: [{kay: k}]}"] {
        assert!(!violations(&validator, text).is_empty(), "{text}");
    }
}

#[test]
fn accepts_merge_keys_and_rejects_keywords_of_another_algorithm() {
    let validator = validator();
    let merged = "{domain: d, descriptors: [{<<: {key: k}, rate_limit: {<<: {unit: day}, requests_per_unit: 1}}]}";
    assert_eq!(violations(&validator, merged), Vec::<String>::new());
    for (limit, is_valid) in [
        ("{unit: day, requests_per_unit: 1, algorithm: gcra, burst: 3}", true),
        ("{unit: day, requests_per_unit: 1, algorithm: gcra, queue: 3}", false),
        ("{unit: day, requests_per_unit: 1, algorithm: leaky_bucket, queue: 3}", true),
        ("{capacity: 10/s, class: c, reserve: {a: 5%}}", true),
    ] {
        let text = format!("{{domain: d, descriptors: [{{key: k, rate_limit: {limit}}}]}}");
        assert_eq!(violations(&validator, &text).is_empty(), is_valid, "{text}");
    }
    for (bits, is_valid) in [(0, false), (1, true), (32, true), (33, false)] {
        let text = format!("{{domain: d, descriptors: [{{key: k, ip_prefix: {{v4: {bits}}}}}]}}");
        assert_eq!(violations(&validator, &text).is_empty(), is_valid, "{text}");
    }
}

#[test]
fn units_and_booleans_are_accepted_in_any_case_but_no_other_text() {
    let validator = validator();
    for (keyword, is_valid) in [
        ("unit: minute", true),
        ("unit: MINUTE", true),
        ("unit: Minute", true),
        ("unit: minutes", false),
        ("unit: a minute", false),
        ("unlimited: Yes", true),
        ("unlimited: OFF", true),
        ("unlimited: maybe", false),
    ] {
        let text = format!("{{domain: d, descriptors: [{{key: k, rate_limit: {{{keyword}}}}}]}}");
        assert_eq!(violations(&validator, &text).is_empty(), is_valid, "{text}");
    }
}
