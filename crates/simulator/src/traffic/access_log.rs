//! [`Mapping`]: converts Envoy's access log in JSON into the requests that a rate limit filter would have sent.
//!
//! ```yaml
//! domain: api
//! time: start_time                          # RFC 3339, or seconds or milliseconds since 1970
//! hits: cost                                # optional
//! descriptors:
//! - [{ key: user, field: x_user }]
//! - [{ key: path, field: path, cut: query }, { key: method, field: method }]
//! - [{ key: remote_address, field: downstream_remote_address, cut: port }]
//! - [{ key: generic_key, value: shop }]
//! ```
//!
//! A descriptor is omitted if one of its fields is missing in a line, empty or `-`, as Envoy does for actions without a
//! value.

use std::borrow::Cow;

use serde::Deserialize;
use sluicegate_duration::timestamp;
use sluicegate_engine::{Descriptor, Micros, Request, bound_hits};
use sluicegate_rules::{self as rules, Entry, SmallYamlError};

use super::encode;

/// Maximum size of a mapping in bytes.
const MAX_MAPPING_BYTES: usize = 64 * 1024;
/// Maximum number of descriptors of a mapping.
const MAX_DESCRIPTORS: usize = 128;
/// Maximum number of entries of a descriptor.
const MAX_ENTRIES: usize = 32;
/// Maximum size of the values of one request in bytes. Several entries can have the same field.
const MAX_VALUE_BYTES: usize = 1 << 20;

/// Description of how the fields of a log line become descriptors.
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
    /// The port of an address, and the brackets around an IPv6 address.
    Port,
}

/// Error returned for an invalid mapping.
#[derive(Debug, thiserror::Error)]
pub enum MappingError {
    /// The YAML cannot be read.
    #[error("the mapping cannot be read")]
    Yaml(#[from] SmallYamlError),
    /// The YAML does not have the keys and values of a mapping.
    #[error("the mapping cannot be read")]
    Keys(#[from] serde_json::Error),
    /// The mapping is inconsistent.
    #[error("{0}")]
    Invalid(String),
}

/// Reason why a line of an access log is skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LineError {
    /// The line is not text in UTF-8.
    #[error("not UTF-8")]
    NotUtf8,
    /// The line is not a JSON object.
    #[error("not an access log entry in JSON")]
    NotJson,
    /// The line does not have the field of the time.
    #[error("the field that `time` of the mapping names is missing")]
    NoTime,
    /// The time is neither RFC 3339 nor a number, or before 1970.
    #[error("the time is neither RFC 3339 nor seconds or milliseconds since 1970")]
    InvalidTime,
    /// The values of the descriptors are too long.
    #[error("the values have more than {MAX_VALUE_BYTES} bytes")]
    TooLong,
}

/// Number of skipped lines by reason.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SkippedLines([u64; LineError::ALL.len()]);

impl LineError {
    /// All reasons, in the order of the variants.
    const ALL: [Self; 5] = [Self::NotUtf8, Self::NotJson, Self::NoTime, Self::InvalidTime, Self::TooLong];
}

impl SkippedLines {
    /// Counts a line.
    pub fn add(&mut self, error: LineError) {
        self.0[error as usize] += 1;
    }

    /// Adds the numbers of `other`.
    pub fn merge(&mut self, other: &Self) {
        for error in LineError::ALL {
            self.0[error as usize] += other.0[error as usize];
        }
    }

    /// Returns the number of lines with each reason that occurred.
    pub fn by_reason(&self) -> impl Iterator<Item = (LineError, u64)> {
        LineError::ALL.into_iter().map(|error| (error, self.0[error as usize])).filter(|(_, count)| *count > 0)
    }
}

impl Mapping {
    /// Reads a mapping in YAML.
    ///
    /// # Errors
    ///
    /// Returns an error if the YAML or the mapping is invalid.
    pub fn read(text: &str) -> Result<Self, MappingError> {
        let mapping: Self = serde_json::from_value(rules::read_small(text, MAX_MAPPING_BYTES)?)?;
        if mapping.domain.is_empty() || mapping.descriptors.is_empty() {
            return Err(MappingError::Invalid("the mapping needs a domain and descriptors".to_owned()));
        }
        let has_long_descriptor = mapping.descriptors.iter().any(|descriptor| descriptor.len() > MAX_ENTRIES);
        if mapping.descriptors.len() > MAX_DESCRIPTORS || has_long_descriptor {
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
            return Err(MappingError::Invalid("a descriptor of the mapping has no entry".to_owned()));
        }
        Ok(mapping)
    }

    /// Appends the encoded request of a log line to `bytes`.
    ///
    /// Returns whether the line has descriptors; nothing is appended if it has none.
    ///
    /// # Errors
    ///
    /// Returns an error if the line is not a valid log line or its values are too long.
    pub fn encode(&self, line: &str, bytes: &mut Vec<u8>) -> Result<bool, LineError> {
        let fields: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(line).map_err(|_| LineError::NotJson)?;
        let at = match fields.get(&self.time) {
            None | Some(serde_json::Value::Null) => return Err(LineError::NoTime),
            Some(value) => time(value).ok_or(LineError::InvalidTime)?,
        };
        let hits = self.hits.as_ref().and_then(|name| number(fields.get(name)?)).unwrap_or(1);
        let hits = bound_hits(hits);
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
                    return Err(LineError::TooLong);
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
            return Ok(false);
        }
        encode(at, &request, None, |_| None, bytes);
        Ok(true)
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
            Self::Port => rules::without_port(text),
        }
    }
}

/// Reads a time in RFC 3339, or a number, which may be in quotes: Envoy writes `%START_TIME(%s)%` so.
fn time(value: &serde_json::Value) -> Option<Micros> {
    if let Some(number) = value.as_f64() {
        return time_of_number(number);
    }
    let text = value.as_str()?.trim();
    if text.starts_with(|letter: char| letter.is_ascii_digit())
        && let Ok(number) = text.parse()
    {
        return time_of_number(number);
    }
    let since_epoch = timestamp::parse(text)?.duration_since(std::time::UNIX_EPOCH).ok()?;
    Some(Micros::new(u64::try_from(since_epoch.as_micros()).ok()?))
}

/// Converts the time since 1970 in seconds, milliseconds, microseconds or nanoseconds. Each unit covers the years from
/// 1973 to 5138, so the number of digits shows the unit.
fn time_of_number(number: f64) -> Option<Micros> {
    let micros_per_unit = match number {
        0.0..1e11 => 1e6,
        1e11..1e14 => 1e3,
        1e14..1e17 => 1.0,
        1e17..1e20 => 1e-3,
        _ => return None,
    };
    Some(Micros::new((number * micros_per_unit).round() as u64))
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
    fn read(line: &str) -> Result<(Vec<String>, u64, u64), LineError> {
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
        Ok((recorded.request.descriptors.iter().map(name).collect(), recorded.at.get(), hits))
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
    }

    #[test]
    fn a_line_that_cannot_be_read_has_a_reason() {
        for (line, expected) in [
            ("", LineError::NotJson),
            ("[]", LineError::NotJson),
            ("plain text", LineError::NotJson),
            ("{}", LineError::NoTime),
            (r#"{"start_time": null}"#, LineError::NoTime),
            (r#"{"start_time": "noon"}"#, LineError::InvalidTime),
            (r#"{"start_time": "-"}"#, LineError::InvalidTime),
            (r#"{"start_time": true}"#, LineError::InvalidTime),
            (r#"{"start_time": -1}"#, LineError::InvalidTime),
            (r#"{"start_time": "-1"}"#, LineError::InvalidTime),
            (r#"{"start_time": 1e20}"#, LineError::InvalidTime),
            (r#"{"start_time": "inf"}"#, LineError::InvalidTime),
            (r#"{"start_time": "2026-11-22T04:00:00+25:00"}"#, LineError::InvalidTime),
        ] {
            assert_eq!(read(line), Err(expected), "{line}");
        }
        for (index, error) in LineError::ALL.into_iter().enumerate() {
            assert_eq!(error as usize, index, "{error:?}");
        }
    }

    #[test]
    fn a_time_has_any_form_that_envoy_writes() {
        for (time, expected) in [
            (r#""2026-11-27T00:00:00Z""#, 1_795_737_600_000_000),
            (r#""2026-11-27T02:00:00.25+02:00""#, 1_795_737_600_250_000),
            (r#""2026-11-26T19:00:00-0500""#, 1_795_737_600_000_000),
            ("1795737600", 1_795_737_600_000_000),
            ("1795737600.123457", 1_795_737_600_123_457),
            (r#""1795737600""#, 1_795_737_600_000_000),
            (r#"" 1795737600.25 ""#, 1_795_737_600_250_000),
            ("1795737600250", 1_795_737_600_250_000),
            (r#""1795737600250""#, 1_795_737_600_250_000),
            (r#""1795737600250.5""#, 1_795_737_600_250_500),
            ("1795737600250001", 1_795_737_600_250_001),
            (r#""1795737600250001000""#, 1_795_737_600_250_001),
            ("0", 0),
        ] {
            let at = read(&format!(r#"{{"start_time": {time}}}"#)).map(|(_, at, _)| at);
            assert_eq!(at, Ok(expected), "{time}");
        }
    }

    #[test]
    fn only_a_port_is_cut_from_an_address() {
        for (peer, expected) in [
            ("10.0.0.1:9", "10.0.0.1"),
            ("[2001:db8::1]:9", "2001:db8::1"),
            ("[2001:db8::1]", "2001:db8::1"),
            ("2001:db8::1", "2001:db8::1"),
        ] {
            let (descriptors, ..) = read(&format!(r#"{{"start_time": 1, "peer": "{peer}"}}"#)).unwrap();
            assert_eq!(descriptors[0], format!("remote_address={expected}"), "{peer}");
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
        assert_eq!([1_024, 1_025, 1_000_000].map(encode), [Ok(true), Err(LineError::TooLong), Err(LineError::TooLong)]);
        // Descriptors that are omitted because of their last entry cost as much.
        let incomplete = descriptors.replace("{ key: user, field: user }, ]", "{ key: user, field: none }]");
        let mapping = Mapping::read(&format!("domain: api\ntime: at\ndescriptors:\n{incomplete}")).unwrap();
        let encode = |length: usize| {
            let mut bytes = Vec::new();
            mapping.encode(&format!(r#"{{"at": 1, "user": "{}"}}"#, "x".repeat(length)), &mut bytes)
        };
        assert_eq!([1_024, 1_100].map(encode), [Ok(false), Err(LineError::TooLong)]);
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
            assert!(sluicegate_metrics::chain(&error).contains(expected), "{error:?}");
        }
    }
}
