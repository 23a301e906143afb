//! The JSON text of an override in the store, and the [`ChangeInfo`] of a change.

use serde::{Deserialize, Serialize};

use super::{ChangeError, MAX_AUTHOR_BYTES, MAX_REASON_BYTES, MAX_VALUE_BYTES};
use crate::{
    algorithm::Micros,
    engine::{Override, overrides::Target},
};

/// Maximum length of an override's text. In JSON, a byte can need six.
pub(super) const MAX_TEXT_BYTES: usize = 6 * (MAX_VALUE_BYTES + MAX_AUTHOR_BYTES + MAX_REASON_BYTES) + 256;

/// JSON format of an override. The store holds the target and the version beside this text.
#[derive(Serialize, Deserialize)]
pub(super) struct StoredOverride {
    #[serde(rename = "w")]
    value: String,
    #[serde(rename = "a")]
    author: String,
    #[serde(rename = "r", default, skip_serializing_if = "String::is_empty")]
    reason: String,
    /// The time of the change in microseconds since the Unix epoch.
    #[serde(rename = "t")]
    at: u64,
    #[serde(rename = "u", default, skip_serializing_if = "Option::is_none")]
    until: Option<u64>,
}

/// Author, reason and time of a change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangeInfo {
    /// The name of the operator.
    pub author: String,
    /// The reason, as the operator entered it. May be empty.
    pub reason: String,
    /// The time in microseconds since the Unix epoch.
    #[serde(default)]
    pub at: u64,
}

impl ChangeInfo {
    /// Checks that the author is present and that the author and the reason fit into the audit log.
    pub(in crate::service) fn check(&self) -> Result<(), ChangeError> {
        let fits = (1..=MAX_AUTHOR_BYTES).contains(&self.author.len()) && self.reason.len() <= MAX_REASON_BYTES;
        if fits { Ok(()) } else { Err(ChangeError::Info) }
    }
}

pub(super) fn write(entry: &Override) -> String {
    let stored = StoredOverride {
        value: entry.value.to_string(),
        author: entry.author.to_string(),
        reason: entry.reason.to_string(),
        at: entry.at.get(),
        until: entry.until.map(Micros::get),
    };
    serde_json::to_string(&stored).unwrap_or_default()
}

/// Reads an override of a store. Returns `None` if this version of the service does not know the format or the target, or
/// if the text is longer than that of an operator's override can be.
pub(super) fn read(target: &str, version: u64, text: &str) -> Option<Override> {
    let target = Target::parse(target).ok()?;
    read_value(&target, version, text)
}

/// Reads the text of the override of a target, like [`read`].
pub(super) fn read_value(target: &Target, version: u64, text: &str) -> Option<Override> {
    if text.len() > MAX_TEXT_BYTES {
        return None;
    }
    let stored: StoredOverride = serde_json::from_str(text).ok()?;
    let fits = stored.value.len() <= MAX_VALUE_BYTES
        && stored.author.len() <= MAX_AUTHOR_BYTES
        && stored.reason.len() <= MAX_REASON_BYTES;
    if !fits {
        return None;
    }
    Some(Override {
        target: target.clone(),
        value: stored.value.into(),
        until: stored.until.map(Micros::new),
        author: stored.author.into(),
        reason: stored.reason.into(),
        at: Micros::new(stored.at),
        version,
    })
}
