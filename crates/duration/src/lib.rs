//! Serialisation of durations in settings, such as `20ms` or `1m 30s`, for `#[serde(with = "sluicegate_duration")]`.

pub mod timestamp;

use std::time::Duration;

use schemars::{Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serializer, de::Error};

/// Writes a duration as a text.
///
/// # Errors
///
/// Returns the error of the serializer.
pub fn serialize<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&humantime::format_duration(*duration))
}

/// Reads a duration from a text.
///
/// # Errors
///
/// Returns an error if the text is not a duration.
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(deserializer)?;
    humantime::parse_duration(&text).map_err(|error| {
        D::Error::custom(format!("invalid duration {text:?} (expected a value like 20ms or 1m): {error}"))
    })
}

/// Returns the JSON Schema of a duration as a text.
pub fn schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "pattern": r"^\s*([0-9]+\s*[a-zA-Zµ]+\s*)+$|^0$", "examples": ["20ms", "1m 30s"] })
}
