//! A control plane's message as a rule file: one text for each resource, so that there is one reader of rules, with one set of
//! complaints, wherever they come from.
//!
//! Each descriptor has a line of its own. So the line of a problem leads back to the descriptor in the message, and its
//! author is told that instead of a line that he has never seen.

use prost_types::{Struct, Value, value::Kind};
use serde_json::{Map, Number, Value as Json};
use sluicegate_proto::ratelimit::config::ratelimit::v3::{
    RateLimitConfig, RateLimitDescriptor, RateLimitPolicy, RateLimitUnit,
};

use crate::rules::{Diagnostic, Location, SourceFile};

/// In a descriptor's `metadata`: what this service knows beyond the peer's message. Not shown to callers.
const OURS: &str = "sluicegate";
/// So many problems are told.
const MOST: usize = 20;
/// The lines before the first descriptor's.
const HEAD: usize = 1;

/// The resource as a rule file in YAML's flow style. A word that is given twice, in the message and in what is ours, is
/// written twice, and refused by the reader.
pub(super) fn file(config: &RateLimitConfig) -> SourceFile {
    let mut text = String::from("{");
    pair(&mut text, "domain", &Json::from(config.domain.as_str()));
    for (word, value) in config.sluicegate.iter().flat_map(|ours| &ours.fields) {
        pair(&mut text, word, &json(value));
    }
    descriptors(&mut text, &config.descriptors);
    text.push_str("}\n");
    SourceFile { name: name(config).to_owned(), text }
}

/// What the resource is called; as in the peer's files, what has no name goes by its domain.
fn name(config: &RateLimitConfig) -> &str {
    if config.name.is_empty() { &config.domain } else { &config.name }
}

/// Says in place of lines which descriptors of which resources they are. No more than the first: who sends a hundred thousand
/// descriptors may have a hundred thousand mistakes in them.
pub(super) fn locate(problems: &mut Vec<Diagnostic>, configs: &[RateLimitConfig]) {
    let more = problems.len().saturating_sub(MOST);
    problems.truncate(MOST);
    problems.iter_mut().for_each(|problem| locate_one(problem, configs));
    if let Some(last) = problems.last_mut().filter(|_| more > 0) {
        last.message += &format!("; and {more} more");
    }
}

fn locate_one(problem: &mut Diagnostic, configs: &[RateLimitConfig]) {
    let Some(config) = configs.iter().find(|config| name(config) == problem.file) else {
        return;
    };
    if let Some(index) = problem.place.line.checked_sub(HEAD + 1) {
        let path = path(&config.descriptors, &mut { index });
        problem.file = format!("{}, {}", problem.file, path.join(" > "));
    }
    problem.place = Location::default();
}

/// The descriptors on the way to the one with this number, in the order of their lines.
fn path(list: &[RateLimitDescriptor], index: &mut usize) -> Vec<String> {
    for descriptor in list {
        let own = match descriptor.value.as_str() {
            "" => descriptor.key.clone(),
            value => format!("{}={value}", descriptor.key),
        };
        let Some(rest) = index.checked_sub(1) else {
            return vec![own];
        };
        *index = rest;
        let below = path(&descriptor.descriptors, index);
        if !below.is_empty() {
            return [vec![own], below].concat();
        }
    }
    Vec::new()
}

fn descriptors(text: &mut String, list: &[RateLimitDescriptor]) {
    if list.is_empty() {
        return;
    }
    separate(text);
    text.push_str("\"descriptors\": [");
    for (index, it) in list.iter().enumerate() {
        text.push_str(if index == 0 { "\n{" } else { ",\n{" });
        descriptor(text, it);
        descriptors(text, &it.descriptors);
        text.push('}');
    }
    text.push(']');
}

fn descriptor(text: &mut String, it: &RateLimitDescriptor) {
    pair(text, "key", &Json::from(it.key.as_str()));
    if !it.value.is_empty() {
        pair(text, "value", &Json::from(it.value.as_str()));
    }
    for (word, is_set) in
        [("shadow_mode", it.shadow_mode), ("quota_mode", it.quota_mode), ("detailed_metric", it.detailed_metric)]
    {
        if is_set {
            pair(text, word, &Json::Bool(true));
        }
    }
    let mut limit = Vec::new();
    let mut metadata = Map::new();
    for (word, value) in it.metadata.iter().flat_map(|metadata| &metadata.fields) {
        match (word.as_str(), &value.kind) {
            (OURS, Some(Kind::StructValue(ours))) => {
                for (word, value) in &ours.fields {
                    match (word.as_str(), &value.kind) {
                        ("rate_limit", Some(Kind::StructValue(words))) => limit.push(words),
                        _ => pair(text, word, &json(value)),
                    }
                }
            }
            // Nothing that could be read: the reader says so.
            (OURS, _) => pair(text, OURS, &json(value)),
            _ => {
                metadata.insert(word.clone(), json(value));
            }
        }
    }
    if !metadata.is_empty() {
        pair(text, "metadata", &Json::Object(metadata));
    }
    if it.rate_limit.is_some() || !limit.is_empty() {
        separate(text);
        text.push_str("\"rate_limit\": {");
        if let Some(policy) = &it.rate_limit {
            rate_limit(text, policy, !limit.is_empty());
        }
        for (word, value) in limit.into_iter().flat_map(|words| &words.fields) {
            pair(text, word, &json(value));
        }
        text.push('}');
    }
}

/// `has_more`: other words say how it is counted, and may do so without a unit.
fn rate_limit(text: &mut String, policy: &RateLimitPolicy, has_more: bool) {
    let unit = RateLimitUnit::try_from(policy.unit);
    let is_given = unit != Ok(RateLimitUnit::Unknown);
    if is_given || !(policy.unlimited || has_more) {
        let name = unit.map_or_else(|_| policy.unit.to_string(), |unit| unit.as_str_name().to_owned());
        pair(text, "unit", &Json::from(name));
    }
    if is_given || policy.requests_per_unit > 0 {
        pair(text, "requests_per_unit", &Json::from(policy.requests_per_unit));
    }
    if policy.unlimited {
        pair(text, "unlimited", &Json::Bool(true));
    }
    if !policy.name.is_empty() {
        pair(text, "name", &Json::from(policy.name.as_str()));
    }
    if !policy.replaces.is_empty() {
        let replaces = policy.replaces.iter().map(|it| Json::from_iter([("name", it.name.as_str())]));
        pair(text, "replaces", &Json::Array(replaces.collect()));
    }
}

fn pair(text: &mut String, word: &str, value: &Json) {
    separate(text);
    *text += &format!("{}: {value}", Json::from(word));
}

fn separate(text: &mut String) {
    if !text.ends_with('{') {
        text.push_str(", ");
    }
}

fn json(value: &Value) -> Json {
    match &value.kind {
        None | Some(Kind::NullValue(_)) => Json::Null,
        Some(Kind::BoolValue(it)) => Json::Bool(*it),
        Some(Kind::StringValue(text)) => Json::from(text.as_str()),
        Some(Kind::NumberValue(number)) => number_of(*number),
        Some(Kind::ListValue(list)) => Json::Array(list.values.iter().map(json).collect()),
        Some(Kind::StructValue(Struct { fields })) => {
            Json::Object(fields.iter().map(|(word, value)| (word.clone(), json(value))).collect())
        }
    }
}

/// Whole numbers without a fraction: the words that want one take no other.
fn number_of(number: f64) -> Json {
    let whole = number as i64;
    if whole as f64 == number {
        return Json::from(whole);
    }
    Number::from_f64(number).map_or_else(|| Json::from(number.to_string()), Json::Number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::{Entry, Options, compile};

    fn value(json: &Json) -> Value {
        let kind = match json {
            Json::Null => Kind::NullValue(0),
            Json::Bool(it) => Kind::BoolValue(*it),
            Json::Number(number) => Kind::NumberValue(number.as_f64().unwrap()),
            Json::String(text) => Kind::StringValue(text.clone()),
            Json::Array(list) => Kind::ListValue(prost_types::ListValue { values: list.iter().map(value).collect() }),
            Json::Object(map) => Kind::StructValue(fields(map)),
        };
        Value { kind: Some(kind) }
    }

    fn fields(map: &Map<String, Json>) -> Struct {
        Struct { fields: map.iter().map(|(word, it)| (word.clone(), value(it))).collect() }
    }

    fn some(json: &Json) -> Option<Struct> {
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

    fn complaints(config: RateLimitConfig) -> Vec<String> {
        let mut problems = compile(&[file(&config)], Options::default()).err().unwrap_or_default();
        locate(&mut problems, &[config]);
        problems.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_message_means_what_a_file_means() {
        let limited = RateLimitDescriptor {
            rate_limit: Some(RateLimitPolicy { name: "own".into(), ..policy(RateLimitUnit::Week, 7).unwrap() }),
            shadow_mode: true,
            quota_mode: true,
            detailed_metric: true,
            metadata: some(&serde_json::json!({"team": "a", "cost": 2.5})),
            ..level("b", "x: y, {z}", Vec::new())
        };
        let unlimited = RateLimitDescriptor {
            rate_limit: Some(RateLimitPolicy { unlimited: true, ..RateLimitPolicy::default() }),
            ..level("free", "", Vec::new())
        };
        let nothing = RateLimitDescriptor { rate_limit: policy(RateLimitUnit::Second, 0), ..level("none", "", vec![]) };
        let config = config(vec![level("a", "", vec![limited]), unlimited, nothing]);
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
    fn words_of_our_own_stand_beside_the_messages() {
        let bucket = RateLimitDescriptor {
            rate_limit: policy(RateLimitUnit::Minute, 60),
            metadata: some(&serde_json::json!({
                "kept": true,
                "sluicegate": {"ip_prefix": {"v4": 24}, "rate_limit": {"algorithm": "token_bucket", "burst": 5}},
            })),
            ..level("address", "", Vec::new())
        };
        let at_once = RateLimitDescriptor {
            metadata: some(
                &serde_json::json!({"sluicegate": {"rate_limit": {"algorithm": "concurrency", "limit": 3}}}),
            ),
            ..level("at_once", "", Vec::new())
        };
        let mut config = config(vec![bucket, at_once]);
        config.sluicegate = some(&serde_json::json!({"charge": "all", "shard_by": ["address"]}));
        let (set, _) = compile(&[file(&config)], Options::default()).unwrap();
        assert!(set.settings_of(&config.domain).unwrap().charge_all);
        let entry = |key| Entry { key, value: "x" };
        let rule = set.rule_for(&config.domain, &[entry("address")]).unwrap();
        assert_eq!(rule.limit.as_ref().unwrap().algorithm().name(), "token_bucket");
        assert_eq!(format!("{:?}", rule.metadata.as_ref().unwrap()), r#"Map({"kept": Bool(true)})"#);
        let rule = set.rule_for(&config.domain, &[entry("at_once")]).unwrap();
        assert_eq!(rule.limit.as_ref().unwrap().requests(), 3);
    }

    #[test]
    fn a_problem_names_the_descriptor() {
        let bad = RateLimitDescriptor { rate_limit: policy(RateLimitUnit::Unknown, 1), ..level("b", "2", Vec::new()) };
        let newer = RateLimitDescriptor {
            rate_limit: Some(RateLimitPolicy { unit: 99, ..RateLimitPolicy::default() }),
            ..level("newer", "", Vec::new())
        };
        let both = RateLimitDescriptor {
            rate_limit: policy(RateLimitUnit::Second, 1),
            metadata: some(&serde_json::json!({"sluicegate": {"rate_limit": {"unit": "hour"}}})),
            ..level("both", "", Vec::new())
        };
        let text =
            RateLimitDescriptor { metadata: some(&serde_json::json!({"sluicegate": 1})), ..level("text", "", vec![]) };
        let all =
            vec![level("a", "", vec![level("b", "1", Vec::new()), bad]), newer, both, text, level("", "", vec![])];
        let complaints = complaints(config(all));
        let expected = [
            "resource, a > b=2: unit \"UNKNOWN\" is not one of second",
            "resource, newer: unit \"99\" is not one of second",
            "resource, both: unit is given twice",
            "resource, text: unknown key \"sluicegate\"",
            "resource, : a descriptor needs a key",
        ];
        assert_eq!(complaints.len(), expected.len(), "{complaints:#?}");
        for (complaint, expected) in complaints.iter().zip(expected) {
            assert!(complaint.starts_with(expected), "{complaint}");
        }
        let many = (0..50).map(|number| RateLimitDescriptor {
            rate_limit: policy(RateLimitUnit::Unknown, 1),
            ..level(&number.to_string(), "", Vec::new())
        });
        let complaints = self::complaints(config(many.collect()));
        assert_eq!(complaints.len(), MOST);
        assert!(complaints[MOST - 1].ends_with("; and 30 more"), "{complaints:#?}");
        let nameless = RateLimitConfig { name: String::new(), domain: String::new(), ..config(Vec::new()) };
        assert_eq!(self::complaints(nameless), [": the file has no domain, or an empty one"]);
    }
}
