//! [`Mapping`]: converts Envoy's access log in JSON into the requests that a rate limit filter would have sent.
//!
//! ```yaml
//! domain: api
//! time: start_time                          # RFC 3339, or seconds since the epoch
//! hits: cost                                # optional
//! descriptors:
//! - [{ key: user, field: x_user }]
//! - [{ key: path, field: path, cut: query }, { key: method, field: method }]
//! - [{ key: remote_address, field: downstream_remote_address, cut: port }]
//! - [{ key: generic_key, value: shop }]
//! ```
//!
//! A descriptor is omitted if one of its fields is missing in a line or `-`, as Envoy does for actions without a value.

use std::borrow::Cow;

use serde::Deserialize;

use super::encode;
use crate::{
    engine::{Descriptor, Micros, Request},
    rules::{self, Entry, SmallYamlError},
};

/// Maximum size of a mapping in bytes.
const MAX_MAPPING_BYTES: usize = 64 * 1024;
/// Maximum number of descriptors of a mapping.
const MAX_DESCRIPTORS: usize = 128;
/// Maximum number of entries of a descriptor.
const MAX_ENTRIES: usize = 32;
/// Maximum size of the values of one request in bytes. Several entries can have the same field.
const MAX_VALUE_BYTES: usize = 1 << 20;

/// Describes how the fields of a log line become descriptors.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mapping {
    domain: String,
    time: String,
    hits: Option<String>,
    descriptors: Vec<Vec<EntryMapping>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct EntryMapping {
    key: String,
    field: Option<String>,
    value: Option<String>,
    cut: Option<Cut>,
}

/// The part of a value that is removed.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Cut {
    /// The query of a path: everything from the first question mark.
    Query,
    /// The port of an address: everything from the last colon, and the brackets around an IPv6 address.
    Port,
}

/// Error returned for an invalid mapping.
#[derive(Debug, thiserror::Error)]
pub enum MappingError {
    /// The YAML cannot be read.
    #[error("the mapping cannot be read")]
    Yaml(#[from] SmallYamlError),
    /// The YAML is no mapping.
    #[error("the mapping cannot be read")]
    Keys(#[from] serde_json::Error),
    /// The mapping is inconsistent.
    #[error("{0}")]
    Invalid(String),
}

impl Mapping {
    /// Reads a mapping in YAML.
    ///
    /// # Errors
    ///
    /// Returns an error if the YAML or the mapping is invalid.
    pub fn read(text: &str) -> Result<Self, MappingError> {
        let mapping: Self = serde_json::from_value(rules::read_small(text, MAX_MAPPING_BYTES)?)?;
        let invalid = |why: &str| Err(MappingError::Invalid(why.to_owned()));
        if mapping.domain.is_empty() || mapping.descriptors.is_empty() {
            return invalid("the mapping needs a domain and descriptors");
        }
        let is_long = |descriptor: &Vec<EntryMapping>| descriptor.len() > MAX_ENTRIES;
        if mapping.descriptors.len() > MAX_DESCRIPTORS || mapping.descriptors.iter().any(is_long) {
            return Err(MappingError::Invalid(format!(
                "the mapping has more than {MAX_DESCRIPTORS} descriptors, or a descriptor with more than {MAX_ENTRIES} entries"
            )));
        }
        for entry in mapping.descriptors.iter().flatten() {
            if entry.field.is_some() == entry.value.is_some() {
                return Err(MappingError::Invalid(format!(
                    "entry {:?} of the mapping needs either a field or a value",
                    entry.key
                )));
            }
        }
        if mapping.descriptors.iter().any(Vec::is_empty) {
            invalid("a descriptor of the mapping has no entry")
        } else {
            Ok(mapping)
        }
    }

    /// Appends the encoded request of a log line to `bytes`.
    ///
    /// Returns `Some(false)` if the line has no descriptors, and `None` if it is not a valid log line or its values are too
    /// long.
    #[must_use]
    pub fn encode(&self, line: &str, bytes: &mut Vec<u8>) -> Option<bool> {
        let fields: serde_json::Map<String, serde_json::Value> = serde_json::from_str(line).ok()?;
        let at = time(fields.get(&self.time)?)?;
        let hits = self.hits.as_ref().and_then(|name| number(fields.get(name)?)).unwrap_or(1);
        let mut values = Vec::new();
        let mut value_bytes = 0;
        for descriptor in &self.descriptors {
            let mut entries = Vec::new();
            for entry in descriptor {
                let Some((key, value)) = entry.read(&fields) else {
                    break;
                };
                // Those of omitted descriptors count, too, because reading them takes time.
                value_bytes += value.len();
                if value_bytes > MAX_VALUE_BYTES {
                    return None;
                }
                entries.push((key, value));
            }
            if entries.len() == descriptor.len() {
                values.push(entries);
            }
        }
        let descriptors = values.iter().map(|entries| Descriptor {
            entries: entries.iter().map(|(key, value)| Entry { key, value }).collect(),
            hits,
            refund: false,
            requested_limit: None,
        });
        let request = Request { domain: &self.domain, descriptors: descriptors.collect(), feedback: Vec::new() };
        if request.descriptors.is_empty() {
            return Some(false);
        }
        encode(at, &request, None, |_| None, bytes);
        Some(true)
    }
}

impl EntryMapping {
    fn read<'a>(&'a self, fields: &'a serde_json::Map<String, serde_json::Value>) -> Option<(&'a str, Cow<'a, str>)> {
        if let Some(value) = &self.value {
            return Some((&self.key, value.into()));
        }
        let text: Cow<'_, str> = match fields.get(self.field.as_ref()?)? {
            serde_json::Value::String(text) => text.into(),
            serde_json::Value::Null => return None,
            other => other.to_string().into(),
        };
        if text.is_empty() || text == "-" {
            return None;
        }
        match (self.cut, text) {
            (None, text) => Some((&self.key, text)),
            (Some(cut), Cow::Borrowed(text)) => Some((&self.key, cut.apply(text).into())),
            (Some(cut), Cow::Owned(text)) => Some((&self.key, cut.apply(&text).to_owned().into())),
        }
    }
}

impl Cut {
    fn apply(self, text: &str) -> &str {
        match self {
            Self::Query => text.split('?').next().unwrap_or_default(),
            Self::Port => {
                let address = text.rsplit_once(':').map_or(text, |(address, _)| address);
                address.trim_matches(['[', ']'])
            }
        }
    }
}

fn time(value: &serde_json::Value) -> Option<Micros> {
    if let Some(seconds) = value.as_f64() {
        return (seconds >= 0.0).then(|| Micros::new((seconds * 1e6) as u64));
    }
    let time = humantime::parse_rfc3339_weak(value.as_str()?).ok()?;
    let since = time.duration_since(std::time::UNIX_EPOCH).ok()?;
    Some(Micros::new(u64::try_from(since.as_micros()).ok()?))
}

fn number(value: &serde_json::Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_str()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::traffic::decode;

    const MAPPING: &str = "\
domain: api
time: start_time
hits: cost
descriptors:
- [{ key: user, field: x_user }]
- [{ key: path, field: path, cut: query }, { key: method, field: method }]
- [{ key: remote_address, field: peer, cut: port }]
- [{ key: generic_key, value: shop }]
";

    /// Returns the descriptors of a line, its time in microseconds, and its hits.
    fn read(line: &str) -> Option<(Vec<String>, u64, u64)> {
        let mut bytes = Vec::new();
        assert!(Mapping::read(MAPPING).unwrap().encode(line, &mut bytes)?);
        let recorded = decode(&bytes).unwrap();
        let name = |descriptor: &Descriptor<'_>| {
            descriptor
                .entries
                .iter()
                .map(|descriptor| format!("{}={}", descriptor.key, descriptor.value))
                .collect::<Vec<_>>()
                .join("|")
        };
        let hits = recorded.request.descriptors[0].hits;
        Some((recorded.request.descriptors.iter().map(name).collect(), recorded.at.get(), hits))
    }

    #[test]
    fn a_line_becomes_the_request_of_the_rate_limit_filter() {
        let line = r#"{"start_time": "2026-11-22T04:00:00.250Z", "x_user": "bob", "path": "/x?y=1", "method": "GET",
                      "peer": "[::1]:4711", "cost": "3", "bytes": 12}"#;
        let (descriptors, at, hits) = read(line).unwrap();
        assert_eq!(descriptors, ["user=bob", "path=/x|method=GET", "remote_address=::1", "generic_key=shop"]);
        assert_eq!((at, hits), (1_795_320_000_250_000, 3));
        let line = r#"{"start_time": 1.5, "x_user": "-", "path": null, "method": "GET", "peer": "10.0.0.1:9"}"#;
        assert_eq!(
            read(line).unwrap(),
            (vec!["remote_address=10.0.0.1".into(), "generic_key=shop".into()], 1_500_000, 1)
        );
        for line in ["", "[]", "{}", r#"{"start_time": "noon"}"#, "plain text"] {
            assert_eq!(read(line), None, "{line}");
        }
    }

    /// A line with one long field becomes a request in which every entry has it.
    #[test]
    fn the_values_of_a_line_are_bounded() {
        let entry = "{ key: user, field: user }, ".repeat(MAX_ENTRIES);
        let descriptors = format!("- [{entry}]\n").repeat(32);
        let mapping = Mapping::read(&format!("domain: api\ntime: at\ndescriptors:\n{descriptors}")).unwrap();
        let encode = |length: usize| {
            let mut bytes = Vec::new();
            mapping.encode(&format!(r#"{{"at": 1, "user": "{}"}}"#, "x".repeat(length)), &mut bytes)
        };
        assert_eq!([1_024, 1_025, 1_000_000].map(encode), [Some(true), None, None]);
        // Descriptors that are omitted because of their last entry cost as much.
        let incomplete = descriptors.replace("{ key: user, field: user }, ]", "{ key: user, field: none }]");
        let mapping = Mapping::read(&format!("domain: api\ntime: at\ndescriptors:\n{incomplete}")).unwrap();
        let encode = |length: usize| {
            let mut bytes = Vec::new();
            mapping.encode(&format!(r#"{{"at": 1, "user": "{}"}}"#, "x".repeat(length)), &mut bytes)
        };
        assert_eq!([1_024, 1_100].map(encode), [Some(false), None]);
    }

    #[test]
    fn rejects_an_invalid_mapping_with_the_reason() {
        for (from, to, expected) in [
            ("domain: api", "domain: ''", "needs a domain"),
            ("field: x_user", "field: x_user, value: y", "either a field or a value"),
            ("{ key: user, field: x_user }", "", "has no entry"),
            ("cut: query", "cut: half", "half"),
            ("hits: cost", "hit: cost", "hit"),
            ("descriptors:\n", &format!("descriptors:\n{}", "- [{ key: a, value: b }]\n".repeat(125)), "more than 128"),
            ("- [{ key: user, ", &format!("- [{}{{ key: user, ", "{ key: a, value: b }, ".repeat(32)), "more than 32"),
            ("domain: api", &format!("domain: {}", "x".repeat(70_000)), "more than 65536 bytes"),
            ("descriptors:\n", &format!("descriptors:\n{}", "- ".repeat(10_000)), "nesting is deeper"),
        ] {
            let error = Mapping::read(&MAPPING.replace(from, to)).unwrap_err();
            assert!(crate::errors::chain(&error).contains(expected), "{error:?}");
        }
    }
}
