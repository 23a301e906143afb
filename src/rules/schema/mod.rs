//! A JSON Schema (draft 2020-12) of rule files, for editors: made from the words that the reader knows.
//!
//! It refuses less than the reader, which also knows what goes together; and of words that do nothing where they stand,
//! which the reader takes with a warning, it says that they do not belong there.

use serde_json::{Value, json};

use super::spec::keywords::{Keyword, MAPS, MapSchema, ROOT, ValueSchema};
use crate::algorithm::Algorithm;

/// The schema.
#[must_use]
pub fn schema() -> Value {
    let maps: serde_json::Map<String, Value> = MAPS.iter().map(|map| (map.name.to_owned(), of_map(map))).collect();
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

fn of_map(map: &MapSchema) -> Value {
    let words: serde_json::Map<String, Value> =
        map.keywords.iter().map(|word| (word.name.to_owned(), of_word(word))).collect();
    let algorithms = words.contains_key("algorithm").then(algorithms).unwrap_or_default();
    // YAML's merge key.
    let mut schema = json!({
        "type": ["object", "null"],
        "properties": words,
        "patternProperties": { "^<<$": true },
        "additionalProperties": false,
    });
    if !map.required.is_empty() {
        // What is merged is not looked into.
        schema["anyOf"] = json!([{ "required": map.required }, { "required": ["<<"] }]);
    }
    if !algorithms.is_empty() {
        schema["allOf"] = algorithms.into();
    }
    schema
}

/// For each algorithm the words of others, which have no meaning for it.
fn algorithms() -> Vec<Value> {
    let all: Vec<_> = Algorithm::named().collect();
    let of =
        |name: &str| all.iter().filter(|kind| kind.keywords.contains(&name)).map(|kind| kind.name).collect::<Vec<_>>();
    let rule = |kind: &crate::algorithm::AlgorithmKind| {
        let words = all.iter().flat_map(|other| other.keywords).filter(|word| !kind.keywords.contains(word));
        let strays: serde_json::Map<String, Value> = words
            .map(|word| {
                ((*word).to_owned(), json!({ "not": {}, "description": format!("Of {}.", of(word).join(", ")) }))
            })
            .collect();
        json!({
            "if": {
                "properties": { "algorithm": { "const": kind.name } },
                "required": ["algorithm"],
                "not": { "required": ["capacity"] },
            },
            "then": { "properties": strays },
        })
    };
    all.iter().map(rule).collect()
}

fn of_word(word: &Keyword) -> Value {
    let mut schema = of(&word.value);
    schema["description"] = word.description.into();
    schema
}

fn of(takes: &ValueSchema) -> Value {
    let text = |pattern: &str| json!({ "type": "string", "pattern": pattern });
    match takes {
        ValueSchema::Text => json!({ "type": ["string", "number", "boolean", "null"] }),
        // YAML 1.1 has more words for it than JSON.
        ValueSchema::Boolean => {
            json!({ "anyOf": [{ "type": ["boolean", "null"] }, text(&any_case(&["true", "yes", "on", "y", "false", "no", "off", "n"]))] })
        }
        ValueSchema::Number => number(u32::MAX),
        ValueSchema::UpTo(most) => {
            let mut schema = number(*most);
            schema["anyOf"][0]["minimum"] = 1.into();
            schema
        }
        ValueSchema::Percent(least, most) => {
            let mut schema = text(r"^[0-9]+\s*%$");
            schema["examples"] = json!([format!("{least}%"), format!("{most}%")]);
            schema
        }
        ValueSchema::Duration => {
            let mut schema = text(r"^\s*([0-9]+\s*[a-zA-Zµ]+\s*)+$");
            schema["examples"] = json!(["200ms", "30s", "5m"]);
            json!({ "anyOf": [schema, { "const": 0 }] })
        }
        ValueSchema::Amount => json!({ "anyOf": [number(u32::MAX), text(r"^[0-9]+\s*%$")] }),
        ValueSchema::Capacity => {
            let mut schema = text(r"^\s*[0-9_]+\s*(/\s*[a-zA-Z]+\s*)?$");
            schema["examples"] = json!(["100", "1000/s"]);
            json!({ "anyOf": [schema, { "type": "integer", "minimum": 0 }] })
        }
        ValueSchema::Word(words) => json!({ "enum": words() }),
        ValueSchema::Unit(words) => json!({ "anyOf": [{ "enum": words() }, text(&any_case(&words()))] }),
        ValueSchema::Anything => json!({ "type": ["object", "null"] }),
        ValueSchema::List(items) => json!({ "type": ["array", "null"], "items": of(items) }),
        ValueSchema::Map(map) => json!({ "$ref": reference(map) }),
        ValueSchema::Named(values) => {
            json!({ "type": "object", "patternProperties": { "^<<$": true }, "additionalProperties": of(values) })
        }
    }
}

fn number(most: u32) -> Value {
    json!({ "anyOf": [
        { "type": ["integer", "null"], "minimum": 0, "maximum": most },
        { "type": "string", "pattern": "^(0x[0-9a-fA-F_]+|[0-9_]+)$" },
    ] })
}

/// A pattern for these words, in capitals or not; JSON Schema has no flag for that.
fn any_case(words: &[&str]) -> String {
    let letter = |letter: char| format!("[{letter}{}]", letter.to_ascii_uppercase());
    let words: Vec<String> = words.iter().map(|word| word.chars().map(letter).collect()).collect();
    format!("^({})$", words.join("|"))
}

#[cfg(test)]
mod tests;
