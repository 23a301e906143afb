//! Converts the messages of a control plane into rule files, one file per resource. Rules from files and from control
//! planes therefore have the same parser and the same diagnostics.
//!
//! Each descriptor is written on a line of its own. The line of a diagnostic therefore identifies the descriptor in the
//! message, and the NACK names the descriptor instead of a line that the sender has never seen.

use prost_types::{Struct, Value, value::Kind};
use serde_json::{Map, Number, Value as Json};
use sluicegate_proto::ratelimit::config::ratelimit::v3::{
    RateLimitConfig, RateLimitDescriptor, RateLimitPolicy, RateLimitUnit,
};

use crate::rules::{Diagnostic, Location, SourceFile};

/// Key in a descriptor's `metadata` for keywords that the message of envoyproxy/ratelimit does not have. It is not part
/// of the metadata that callers receive.
const METADATA_KEY: &str = "sluicegate";
/// Maximum number of diagnostics in a NACK.
const MAX_DIAGNOSTICS: usize = 20;
/// Number of lines before the first descriptor.
const HEADER_LINES: usize = 1;

/// Converts a resource into a rule file in YAML's flow style.
///
/// A keyword that is set twice, in the message and in its `sluicegate` fields, is written twice, and the rule parser
/// rejects it.
pub(super) fn file(config: &RateLimitConfig) -> SourceFile {
    let mut text = String::from("{");
    write_pair(&mut text, "domain", &Json::from(config.domain.as_str()));
    for (keyword, value) in config.sluicegate.iter().flat_map(|extension| &extension.fields) {
        write_pair(&mut text, keyword, &json(value));
    }
    write_descriptors(&mut text, &config.descriptors);
    text.push_str("}\n");
    SourceFile { name: name(config).to_owned(), text }
}

/// Returns the name of a resource: its domain if it has no name, as in envoyproxy/ratelimit.
fn name(config: &RateLimitConfig) -> &str {
    if config.name.is_empty() { &config.domain } else { &config.name }
}

/// Replaces the lines in diagnostics by the resources and descriptors.
///
/// Only the first [`MAX_DIAGNOSTICS`] diagnostics remain, because a hundred thousand descriptors can have a hundred
/// thousand errors.
pub(super) fn locate(diagnostics: &mut Vec<Diagnostic>, configs: &[RateLimitConfig]) {
    let more = diagnostics.len().saturating_sub(MAX_DIAGNOSTICS);
    diagnostics.truncate(MAX_DIAGNOSTICS);
    for diagnostic in diagnostics.iter_mut() {
        locate_one(diagnostic, configs);
    }
    if more > 0
        && let Some(last) = diagnostics.last_mut()
    {
        last.message += &format!("; and {more} more");
    }
}

fn locate_one(diagnostic: &mut Diagnostic, configs: &[RateLimitConfig]) {
    let Some(config) = configs.iter().find(|config| name(config) == diagnostic.file) else {
        return;
    };
    if let Some(index) = diagnostic.location.line.checked_sub(HEADER_LINES + 1) {
        let path = path(&config.descriptors, &mut { index });
        diagnostic.file = format!("{}, {}", diagnostic.file, path.join(" > "));
    }
    diagnostic.location = Location::default();
}

/// Returns the path to the descriptor with this index, counted in the order of the lines.
fn path(list: &[RateLimitDescriptor], index: &mut usize) -> Vec<String> {
    for descriptor in list {
        let level = match descriptor.value.as_str() {
            "" => descriptor.key.clone(),
            value => format!("{}={value}", descriptor.key),
        };
        let Some(remaining) = index.checked_sub(1) else {
            return vec![level];
        };
        *index = remaining;
        let lower_levels = path(&descriptor.descriptors, index);
        if !lower_levels.is_empty() {
            return [vec![level], lower_levels].concat();
        }
    }
    Vec::new()
}

/// Writes a list of descriptors, each on a line of its own.
fn write_descriptors(text: &mut String, list: &[RateLimitDescriptor]) {
    if list.is_empty() {
        return;
    }
    separate(text);
    text.push_str("\"descriptors\": [");
    for (index, descriptor) in list.iter().enumerate() {
        text.push_str(if index == 0 { "\n{" } else { ",\n{" });
        write_descriptor(text, descriptor);
        write_descriptors(text, &descriptor.descriptors);
        text.push('}');
    }
    text.push(']');
}

fn write_descriptor(text: &mut String, descriptor: &RateLimitDescriptor) {
    write_pair(text, "key", &Json::from(descriptor.key.as_str()));
    if !descriptor.value.is_empty() {
        write_pair(text, "value", &Json::from(descriptor.value.as_str()));
    }
    for (keyword, is_set) in [
        ("shadow_mode", descriptor.shadow_mode),
        ("quota_mode", descriptor.quota_mode),
        ("detailed_metric", descriptor.detailed_metric),
    ] {
        if is_set {
            write_pair(text, keyword, &Json::Bool(true));
        }
    }
    let mut limit_extensions = Vec::new();
    let mut metadata = Map::new();
    for (key, value) in descriptor.metadata.iter().flat_map(|metadata| &metadata.fields) {
        match (key.as_str(), &value.kind) {
            (METADATA_KEY, Some(Kind::StructValue(extension))) => {
                for (keyword, value) in &extension.fields {
                    match (keyword.as_str(), &value.kind) {
                        ("rate_limit", Some(Kind::StructValue(keywords))) => limit_extensions.push(keywords),
                        _ => write_pair(text, keyword, &json(value)),
                    }
                }
            }
            // The value is not a map. It is written as it is, and the rule parser reports the unknown key.
            (METADATA_KEY, _) => write_pair(text, METADATA_KEY, &json(value)),
            _ => {
                metadata.insert(key.clone(), json(value));
            }
        }
    }
    if !metadata.is_empty() {
        write_pair(text, "metadata", &Json::Object(metadata));
    }
    if descriptor.rate_limit.is_some() || !limit_extensions.is_empty() {
        separate(text);
        text.push_str("\"rate_limit\": {");
        if let Some(policy) = &descriptor.rate_limit {
            write_rate_limit(text, policy, !limit_extensions.is_empty());
        }
        for (keyword, value) in limit_extensions.into_iter().flat_map(|keywords| &keywords.fields) {
            write_pair(text, keyword, &json(value));
        }
        text.push('}');
    }
}

/// Writes the keywords of a limit. With `has_extensions`, other keywords define the limit, and a unit is not required.
fn write_rate_limit(text: &mut String, policy: &RateLimitPolicy, has_extensions: bool) {
    let unit = RateLimitUnit::try_from(policy.unit);
    let has_unit = unit != Ok(RateLimitUnit::Unknown);
    if has_unit || !(policy.unlimited || has_extensions) {
        let name = match unit {
            Ok(unit) => unit.as_str_name().to_owned(),
            Err(_) => policy.unit.to_string(),
        };
        write_pair(text, "unit", &Json::from(name));
    }
    if has_unit || policy.requests_per_unit > 0 {
        write_pair(text, "requests_per_unit", &Json::from(policy.requests_per_unit));
    }
    if policy.unlimited {
        write_pair(text, "unlimited", &Json::Bool(true));
    }
    if !policy.name.is_empty() {
        write_pair(text, "name", &Json::from(policy.name.as_str()));
    }
    if !policy.replaces.is_empty() {
        let replaces = policy.replaces.iter().map(|replaced| Json::from_iter([("name", replaced.name.as_str())]));
        write_pair(text, "replaces", &Json::Array(replaces.collect()));
    }
}

fn write_pair(text: &mut String, key: &str, value: &Json) {
    separate(text);
    *text += &format!("{}: {value}", Json::from(key));
}

fn separate(text: &mut String) {
    if !text.ends_with('{') {
        text.push_str(", ");
    }
}

fn json(value: &Value) -> Json {
    match &value.kind {
        None | Some(Kind::NullValue(_)) => Json::Null,
        Some(Kind::BoolValue(flag)) => Json::Bool(*flag),
        Some(Kind::StringValue(text)) => Json::from(text.as_str()),
        Some(Kind::NumberValue(number)) => json_number(*number),
        Some(Kind::ListValue(list)) => Json::Array(list.values.iter().map(json).collect()),
        Some(Kind::StructValue(Struct { fields })) => {
            Json::Object(fields.iter().map(|(key, value)| (key.clone(), json(value))).collect())
        }
    }
}

/// Converts a number. Whole numbers are written without a fraction, because some keywords accept only integers.
fn json_number(number: f64) -> Json {
    let whole = number as i64;
    if whole as f64 == number {
        return Json::from(whole);
    }
    match Number::from_f64(number) {
        Some(number) => Json::Number(number),
        None => Json::from(number.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use sluicegate_proto::ratelimit::config::ratelimit::v3::RateLimitReplace;

    use super::*;
    use crate::rules::{Entry, Options, compile};

    fn value(json: &Json) -> Value {
        let kind = match json {
            Json::Null => Kind::NullValue(0),
            Json::Bool(flag) => Kind::BoolValue(*flag),
            Json::Number(number) => Kind::NumberValue(number.as_f64().unwrap()),
            Json::String(text) => Kind::StringValue(text.clone()),
            Json::Array(list) => Kind::ListValue(prost_types::ListValue { values: list.iter().map(value).collect() }),
            Json::Object(map) => Kind::StructValue(fields(map)),
        };
        Value { kind: Some(kind) }
    }

    fn fields(map: &Map<String, Json>) -> Struct {
        Struct { fields: map.iter().map(|(key, json)| (key.clone(), value(json))).collect() }
    }

    fn metadata(json: &Json) -> Option<Struct> {
        json.as_object().map(fields)
    }

    fn level(key: &str, value: &str, descriptors: Vec<RateLimitDescriptor>) -> RateLimitDescriptor {
        RateLimitDescriptor { key: key.into(), value: value.into(), descriptors, ..RateLimitDescriptor::default() }
    }

    fn policy(unit: RateLimitUnit, requests_per_unit: u32) -> Option<RateLimitPolicy> {
        Some(RateLimitPolicy { unit: unit.into(), requests_per_unit, ..RateLimitPolicy::default() })
    }

    fn config(descriptors: Vec<RateLimitDescriptor>) -> RateLimitConfig {
        RateLimitConfig { name: "resource".into(), domain: "d\"\n#".into(), descriptors, sluicegate: None }
    }

    fn errors(config: RateLimitConfig) -> Vec<String> {
        let mut diagnostics = compile(&[file(&config)], Options::default()).err().unwrap_or_default();
        locate(&mut diagnostics, &[config]);
        diagnostics.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_message_has_the_same_meaning_as_a_file() {
        let limited = RateLimitDescriptor {
            rate_limit: Some(RateLimitPolicy { name: "own".into(), ..policy(RateLimitUnit::Week, 7).unwrap() }),
            shadow_mode: true,
            quota_mode: true,
            detailed_metric: true,
            metadata: metadata(&serde_json::json!({"team": "a", "cost": 2.5})),
            ..level("b", "x: y, {z}", Vec::new())
        };
        let unlimited = RateLimitDescriptor {
            rate_limit: Some(RateLimitPolicy { unlimited: true, ..RateLimitPolicy::default() }),
            ..level("free", "", Vec::new())
        };
        let denied = RateLimitDescriptor { rate_limit: policy(RateLimitUnit::Second, 0), ..level("none", "", vec![]) };
        let config = config(vec![level("a", "", vec![limited]), unlimited, denied]);
        let (set, warnings) = compile(&[file(&config)], Options::default()).unwrap();
        assert_eq!(warnings, []);
        let entry = |key, value| Entry { key, value };
        let rule = set.rule_for("d\"\n#", &[entry("a", "any"), entry("b", "x: y, {z}")]).unwrap();
        assert_eq!(rule.limit.as_ref().unwrap().requests(), 7);
        assert!(rule.shadow_mode && rule.quota_mode && rule.detailed_metric);
        assert_eq!(rule.name.as_deref(), Some("own"));
        assert_eq!(
            format!("{:?}", rule.metadata.as_ref().unwrap()),
            r#"Map({"cost": Number(2.5), "team": Text("a")})"#
        );
        assert!(set.rule_for("d\"\n#", &[entry("free", "x")]).unwrap().limit.is_none());
        assert_eq!(set.rule_for("d\"\n#", &[entry("none", "x")]).unwrap().limit.as_ref().unwrap().requests(), 0);
    }

    #[test]
    fn extension_keywords_add_to_those_of_the_message() {
        let bucket = RateLimitDescriptor {
            rate_limit: policy(RateLimitUnit::Minute, 60),
            metadata: metadata(&serde_json::json!({
                "kept": true,
                "sluicegate": {"ip_prefix": {"v4": 24}, "rate_limit": {"algorithm": "token_bucket", "burst": 5}},
            })),
            ..level("address", "", Vec::new())
        };
        let in_flight = RateLimitDescriptor {
            metadata: metadata(
                &serde_json::json!({"sluicegate": {"rate_limit": {"algorithm": "concurrency", "limit": 3}}}),
            ),
            ..level("in_flight", "", Vec::new())
        };
        let mut config = config(vec![bucket, in_flight]);
        config.sluicegate = metadata(&serde_json::json!({"charge": "all", "shard_by": ["address"]}));
        let (set, _) = compile(&[file(&config)], Options::default()).unwrap();
        assert!(set.settings_of(&config.domain).unwrap().charge_all);
        let entry = |key| Entry { key, value: "x" };
        let rule = set.rule_for(&config.domain, &[entry("address")]).unwrap();
        assert_eq!(rule.limit.as_ref().unwrap().algorithm().name(), "token_bucket");
        assert_eq!(format!("{:?}", rule.metadata.as_ref().unwrap()), r#"Map({"kept": Bool(true)})"#);
        let rule = set.rule_for(&config.domain, &[entry("in_flight")]).unwrap();
        assert_eq!(rule.limit.as_ref().unwrap().requests(), 3);
    }

    #[test]
    fn an_error_names_the_descriptor() {
        let unknown_unit =
            RateLimitDescriptor { rate_limit: policy(RateLimitUnit::Unknown, 1), ..level("b", "2", Vec::new()) };
        let newer = RateLimitDescriptor {
            rate_limit: Some(RateLimitPolicy { unit: 99, ..RateLimitPolicy::default() }),
            ..level("newer", "", Vec::new())
        };
        let both = RateLimitDescriptor {
            rate_limit: policy(RateLimitUnit::Second, 1),
            metadata: metadata(&serde_json::json!({"sluicegate": {"rate_limit": {"unit": "hour"}}})),
            ..level("both", "", Vec::new())
        };
        let text = RateLimitDescriptor {
            metadata: metadata(&serde_json::json!({"sluicegate": 1})),
            ..level("text", "", vec![])
        };
        let all = vec![
            level("a", "", vec![level("b", "1", Vec::new()), unknown_unit]),
            newer,
            both,
            text,
            level("", "", vec![]),
        ];
        let errors = errors(config(all));
        let expected = [
            "resource, a > b=2: unit \"UNKNOWN\" is not one of second",
            "resource, newer: unit \"99\" is not one of second",
            "resource, both: duplicate key \"unit\"",
            "resource, text: unknown key \"sluicegate\"",
            "resource, : a descriptor requires a non-empty key",
        ];
        assert_eq!(errors.len(), expected.len(), "{errors:#?}");
        for (error, expected) in errors.iter().zip(expected) {
            assert!(error.starts_with(expected), "{error}");
        }
        let many = (0..50).map(|number| RateLimitDescriptor {
            rate_limit: policy(RateLimitUnit::Unknown, 1),
            ..level(&number.to_string(), "", Vec::new())
        });
        let errors = self::errors(config(many.collect()));
        assert_eq!(errors.len(), MAX_DIAGNOSTICS);
        assert!(errors[MAX_DIAGNOSTICS - 1].ends_with("; and 30 more"), "{errors:#?}");
        let nameless = RateLimitConfig { name: String::new(), domain: String::new(), ..config(Vec::new()) };
        assert_eq!(self::errors(nameless), [": the file has no domain, or the domain is empty"]);
    }

    #[test]
    fn a_limit_without_a_unit_adds_no_rate_to_extension_keywords() {
        let in_flight = RateLimitDescriptor {
            rate_limit: Some(RateLimitPolicy { name: "slots".into(), ..RateLimitPolicy::default() }),
            metadata: metadata(
                &serde_json::json!({"sluicegate": {"rate_limit": {"algorithm": "concurrency", "limit": 3}}}),
            ),
            ..level("in_flight", "", Vec::new())
        };
        let text = file(&config(vec![in_flight])).text;
        assert!(text.contains(r#""rate_limit": {"name": "slots", "#), "{text}");
        assert!(!text.contains("requests_per_unit") && !text.contains("unlimited"), "{text}");
    }

    #[test]
    fn replaced_limits_are_written_with_their_names() {
        let replaces = vec![RateLimitReplace { name: "shared".into() }];
        let own = RateLimitPolicy { name: "own".into(), replaces, ..policy(RateLimitUnit::Hour, 2).unwrap() };
        let replacing = RateLimitDescriptor { rate_limit: Some(own), ..level("a", "", Vec::new()) };
        let plain = RateLimitDescriptor { rate_limit: policy(RateLimitUnit::Hour, 5), ..level("b", "", Vec::new()) };
        let text = file(&config(vec![replacing, plain])).text;
        assert!(text.contains(r#""replaces": [{"name":"shared"}]"#), "{text}");
        assert_eq!(text.matches("replaces").count(), 1, "{text}");
    }
}
