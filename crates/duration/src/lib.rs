//! [`Text`]: durations as texts in settings, such as `20ms` or `1m 30s`.

pub mod timestamp;

use std::time::Duration;

use serde::{Deserialize, Deserializer, Serializer, de::Error};

/// Durations as texts, for `#[serde(with = "sluicegate_duration::Text")]`. With the feature `schema`, it is also the type
/// of such a field for `schemars`.
pub struct Text;

impl Text {
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
}

#[cfg(feature = "schema")]
impl schemars::JsonSchema for Text {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Duration".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "type": "string",
            "pattern": r"^\s*([0-9]+\s*[a-zA-Zµ]+\s*)+$|^0$",
            "examples": ["20ms", "1m 30s"]
        })
    }
}
