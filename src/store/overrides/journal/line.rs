//! [`Line`]: a line of the journal file.

use serde::{Deserialize, Serialize};

use crate::store::overrides::{Change, Cursor, Versioned};

/// Maximum length of a line in bytes. The longest line that the service writes is a change of 100 overrides.
pub(super) const MAX_LINE_BYTES: usize = 16 << 20;

/// A line of the file.
#[derive(Serialize, Deserialize)]
pub(super) enum Line {
    /// An override that was in force when the file was rewritten.
    #[serde(rename = "kept")]
    Override(Versioned),
    /// A change from before the rewrite, for the audit log only.
    #[serde(rename = "past")]
    LoggedChange(Change),
    /// A change since the rewrite.
    #[serde(rename = "change")]
    Change(Change),
    /// The last change that the [`Line::Override`] lines contain.
    #[serde(rename = "mark")]
    Cursor(Cursor),
    /// The beginning of a copy that will replace everything before it (see `in_place.rs`).
    #[serde(rename = "copy")]
    CopyStart,
    /// The line after a complete copy, at the end of the file.
    #[serde(rename = "copy_end")]
    CopyEnd(CopyRange),
}

/// Position of a complete copy of the shortened journal at the end of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CopyRange {
    /// Offset of the first line in bytes.
    pub(super) from: u64,
    /// Total length of the lines in bytes.
    pub(super) bytes: u64,
}

impl CopyRange {
    /// Returns the offset behind the last line.
    pub(super) const fn end(&self) -> u64 {
        self.from.saturating_add(self.bytes)
    }
}

/// Encodes a line with the line break.
pub(super) fn encode(line: &Line) -> Vec<u8> {
    let mut bytes = serde_json::to_vec(line).unwrap_or_default();
    bytes.push(b'\n');
    bytes
}
