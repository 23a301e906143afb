//! [`schema`]: a JSON Schema (draft 2020-12) of rule files for editors, generated from the reader's keywords.
//!
//! The schema accepts more than the reader, which also checks how keywords may be combined. It accepts
//! less in one case: it rejects known keywords where they have no effect, and the reader only warns about them.

use serde_json::{Value, json};
use sluicegate_algorithm::{Algorithm, AlgorithmKind, MAX_NUMBER};

use super::spec::keywords::{Keyword, MAPS, MapSchema, ROOT, ValueSchema};

/// Returns the JSON Schema of rule files.
#[must_use]
pub fn schema() -> Value {
    let maps: serde_json::Map<String, Value> = MAPS.iter().map(|map| (map.name.to_owned(), map_schema(map))).collect();
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Rules of Sluicegate",
        "$ref": reference(&ROOT),
        "$defs": maps,
    })
}

fn reference(map: &MapSchema) -> String {
    format!("#/$defs/{}", map.name)
}

fn map_schema(map: &MapSchema) -> Value {
    let keywords: serde_json::Map<String, Value> =
        map.keywords.iter().map(|keyword| (keyword.name.to_owned(), keyword_schema(keyword))).collect();
    let algorithms = keywords.contains_key("algorithm").then(algorithm_conditions).unwrap_or_default();
    // `<<` is YAML's merge key.
    let mut schema = json!({
        "type": ["object", "null"],
        "properties": keywords,
        "patternProperties": { "^<<$": true },
        "additionalProperties": false,
    });
    if !map.required.is_empty() {
        // A merged map may contain the required keys; the schema does not check its content.
        schema["anyOf"] = json!([{ "required": map.required }, { "required": ["<<"] }]);
    }
    if !algorithms.is_empty() {
        schema["allOf"] = algorithms.into();
    }
    schema
}

/// Returns a condition per algorithm that rejects the keywords that only other algorithms support.
fn algorithm_conditions() -> Vec<Value> {
    Algorithm::named().map(algorithm_condition).collect()
}

fn algorithm_condition(kind: AlgorithmKind) -> Value {
    let mut rejected = serde_json::Map::new();
    for keyword in Algorithm::named().flat_map(|other| other.keywords) {
        if !kind.keywords.contains(keyword) {
            let description = format!("Only supported by {}.", algorithms_with(keyword).join(", "));
            rejected.insert((*keyword).to_owned(), json!({ "not": {}, "description": description }));
        }
    }
    json!({
        "if": {
            "properties": { "algorithm": { "const": kind.name } },
            "required": ["algorithm"],
            "not": { "required": ["capacity"] },
        },
        "then": { "properties": rejected },
    })
}

/// Returns the names of the algorithms that support a keyword.
fn algorithms_with(keyword: &str) -> Vec<&'static str> {
    Algorithm::named().filter(|kind| kind.keywords.contains(&keyword)).map(|kind| kind.name).collect()
}

fn keyword_schema(keyword: &Keyword) -> Value {
    let mut schema = value_schema(&keyword.value);
    schema["description"] = keyword.description.into();
    schema
}

fn value_schema(value: &ValueSchema) -> Value {
    match value {
        ValueSchema::Text => json!({ "type": ["string", "number", "boolean", "null"] }),
        // YAML 1.1 has more spellings of booleans than JSON.
        ValueSchema::Boolean => {
            let spellings = ["true", "yes", "on", "y", "false", "no", "off", "n"];
            json!({ "anyOf": [{ "type": ["boolean", "null"] }, pattern_schema(&case_insensitive_pattern(&spellings))] })
        }
        ValueSchema::Number => number_schema(u32::MAX.into()),
        ValueSchema::LargeNumber => number_schema(MAX_NUMBER),
        ValueSchema::UpTo(max) => {
            let mut schema = number_schema((*max).into());
            schema["anyOf"][0]["minimum"] = 1.into();
            schema
        }
        ValueSchema::Percent(min, max) => {
            let mut schema = pattern_schema(r"^[0-9]+\s*%$");
            schema["examples"] = json!([format!("{min}%"), format!("{max}%")]);
            schema
        }
        ValueSchema::Duration => {
            let mut schema = pattern_schema(r"^\s*([0-9]+\s*[a-zA-Zµ]+\s*)+$");
            schema["examples"] = json!(["200ms", "30s", "5m"]);
            json!({ "anyOf": [schema, { "const": 0 }] })
        }
        ValueSchema::Amount => json!({ "anyOf": [number_schema(u32::MAX.into()), pattern_schema(r"^[0-9]+\s*%$")] }),
        ValueSchema::Capacity => {
            let mut schema = pattern_schema(r"^\s*[0-9_]+\s*(/\s*[a-zA-Z]+\s*)?$");
            schema["examples"] = json!(["100", "1000/s"]);
            json!({ "anyOf": [schema, { "type": "integer", "minimum": 0 }] })
        }
        ValueSchema::Choice(choices) => json!({ "enum": choices() }),
        ValueSchema::CaseInsensitiveChoice(choices) => {
            json!({ "anyOf": [{ "enum": choices() }, pattern_schema(&case_insensitive_pattern(&choices()))] })
        }
        ValueSchema::Anything => json!({ "type": ["object", "null"] }),
        ValueSchema::List(items) => json!({ "type": ["array", "null"], "items": value_schema(items) }),
        ValueSchema::Map(map) => json!({ "$ref": reference(map) }),
        ValueSchema::MapOrList(map) => {
            let item = json!({ "$ref": reference(map) });
            json!({ "anyOf": [item, { "type": "array", "items": item }] })
        }
        ValueSchema::NumberOrMap(map) => {
            json!({ "anyOf": [number_schema(MAX_NUMBER), { "$ref": reference(map) }] })
        }
        ValueSchema::TextOrMap(map) => {
            json!({ "anyOf": [value_schema(&ValueSchema::Text), { "$ref": reference(map) }] })
        }
        ValueSchema::Named(values) => {
            let values = value_schema(values);
            json!({ "type": "object", "patternProperties": { "^<<$": true }, "additionalProperties": values })
        }
    }
}

/// Returns the schema of a text that matches a regular expression.
fn pattern_schema(pattern: &str) -> Value {
    json!({ "type": "string", "pattern": pattern })
}

fn number_schema(max: u64) -> Value {
    json!({ "anyOf": [
        { "type": ["integer", "null"], "minimum": 0, "maximum": max },
        { "type": "string", "pattern": "^(0x[0-9a-fA-F_]+|[0-9_]+)$" },
    ] })
}

/// Returns a pattern that matches the choices in any case. JSON Schema has no flag to ignore case.
fn case_insensitive_pattern(choices: &[&str]) -> String {
    let mut patterns = Vec::new();
    for choice in choices {
        let mut pattern = String::new();
        for letter in choice.chars() {
            pattern += &format!("[{letter}{}]", letter.to_ascii_uppercase());
        }
        patterns.push(pattern);
    }
    format!("^({})$", patterns.join("|"))
}

#[cfg(test)]
mod tests;
