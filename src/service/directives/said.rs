//! A directive as the store keeps it.

use serde::{Deserialize, Serialize};

use super::{LONGEST_AUTHOR, LONGEST_REASON, PutError};
use crate::{
    algorithm::Micros,
    engine::{Directive, directives::Target},
};

/// What is said of a target; the version is the store's.
#[derive(Serialize, Deserialize)]
pub(super) struct Said {
    #[serde(rename = "w")]
    word: String,
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
pub struct Mandate {
    /// Who.
    pub author: String,
    /// Why.
    pub reason: String,
    /// When, in microseconds since the epoch.
    #[serde(default)]
    pub at: u64,
}

impl Mandate {
    /// Whether it has an author, and is no longer than the log will have it.
    pub(in crate::service) fn check(&self) -> Result<(), PutError> {
        let fits = (1..=LONGEST_AUTHOR).contains(&self.author.len()) && self.reason.len() <= LONGEST_REASON;
        if fits { Ok(()) } else { Err(PutError::Mandate) }
    }
}

pub(super) fn write(directive: &Directive) -> String {
    let said = Said {
        word: directive.word.to_string(),
        author: directive.author.to_string(),
        reason: directive.reason.to_string(),
        at: directive.at.get(),
        until: directive.until.map(Micros::get),
    };
    serde_json::to_string(&said).unwrap_or_default()
}

/// `None`: this version of the service does not understand it.
pub(super) fn read(target: &str, version: u64, text: &str) -> Option<Directive> {
    let said: Said = serde_json::from_str(text).ok()?;
    Some(Directive {
        target: Target::parse(target).ok()?,
        word: said.word.into(),
        until: said.until.map(Micros::new),
        author: said.author.into(),
        reason: said.reason.into(),
        at: Micros::new(said.at),
        version,
    })
}
