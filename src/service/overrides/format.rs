//! A override as the store keeps it.

use serde::{Deserialize, Serialize};

use super::{ChangeError, MAX_AUTHOR_BYTES, MAX_REASON_BYTES};
use crate::{
    algorithm::Micros,
    engine::{Override, overrides::Target},
};

/// What is said of a target; the version is the store's.
#[derive(Serialize, Deserialize)]
pub(super) struct StoredOverride {
    #[serde(rename = "w")]
    value: String,
    #[serde(rename = "a")]
    author: String,
    #[serde(rename = "r", default, skip_serializing_if = "String::is_empty")]
    reason: String,
    /// Microseconds since the epoch.
    #[serde(rename = "t")]
    at: u64,
    #[serde(rename = "u", default, skip_serializing_if = "Option::is_none")]
    until: Option<u64>,
}

/// Who changes something, and why.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangeInfo {
    /// Who.
    pub author: String,
    /// Why.
    pub reason: String,
    /// When, in microseconds since the epoch.
    #[serde(default)]
    pub at: u64,
}

impl ChangeInfo {
    /// Whether it has an author, and is no longer than the log will have it.
    pub(in crate::service) fn check(&self) -> Result<(), ChangeError> {
        let fits = (1..=MAX_AUTHOR_BYTES).contains(&self.author.len()) && self.reason.len() <= MAX_REASON_BYTES;
        if fits { Ok(()) } else { Err(ChangeError::Info) }
    }
}

pub(super) fn write(entry: &Override) -> String {
    let said = StoredOverride {
        value: entry.value.to_string(),
        author: entry.author.to_string(),
        reason: entry.reason.to_string(),
        at: entry.at.get(),
        until: entry.until.map(Micros::get),
    };
    serde_json::to_string(&said).unwrap_or_default()
}

/// `None`: this version of the service does not understand it.
pub(super) fn read(target: &str, version: u64, text: &str) -> Option<Override> {
    let said: StoredOverride = serde_json::from_str(text).ok()?;
    Some(Override {
        target: Target::parse(target).ok()?,
        value: said.value.into(),
        until: said.until.map(Micros::new),
        author: said.author.into(),
        reason: said.reason.into(),
        at: Micros::new(said.at),
        version,
    })
}
