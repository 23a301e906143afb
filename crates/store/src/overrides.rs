//! Changes of overrides, as a store writes and reads them.
//!
//! The texts of overrides are opaque to a store. Each change has a version, which increases by one, and a unique id. A
//! reader that has both for the last change it applied (a [`Cursor`]) can read the later changes. It also detects that the
//! store was emptied or is behind it, for example after a failover to a Redis replica without the last changes.

/// Maximum number of changes in one call, because Redis runs no other command during the call.
pub const MAX_CHANGES: usize = 100;

/// A requested change of one override.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// Target of the override.
    pub target: String,
    /// New text, or `None` to remove the override.
    pub text: Option<String>,
    /// Version that the override must have, or 0 if there must be none. `None` accepts any version.
    pub expected: Option<u64>,
}

/// An entry of the audit log.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Change {
    /// Version of the change, one more than that of the previous change.
    pub version: u64,
    /// Unique id of the change.
    pub id: String,
    /// Author, time and reason of the change, as an opaque text.
    pub info: String,
    /// The changed overrides.
    pub changes: Vec<OverrideChange>,
}

/// The change of one override.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct OverrideChange {
    /// Target of the override.
    pub target: String,
    /// Text before the change, or `None` if there was no override.
    pub before: Option<String>,
    /// Text after the change, or `None` if the override was removed.
    pub after: Option<String>,
}

/// Position of a reader in the audit log: the last change that it has applied.
///
/// A journal uses only the version, because only one instance writes the journal.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Cursor {
    /// Random identifier of the store's history, generated with its first override.
    pub epoch: String,
    /// Version of the change.
    pub version: u64,
    /// Id of the change.
    pub id: String,
}

/// Outcome of a write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WriteOutcome {
    /// The change was written.
    Done(Cursor, Change),
    /// An override does not have the expected version. The change was not written.
    Conflict {
        /// Target of the override.
        target: String,
        /// Version of the override, or 0 if there is none.
        version: u64,
    },
}

/// Changes in the store since a cursor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Update {
    /// There are no later changes.
    Unchanged,
    /// Later changes, in ascending order. There may be more.
    Changes(Vec<Change>),
    /// The log does not contain the cursor, because it was trimmed or has another history. All overrides must be
    /// reloaded.
    Diverged,
    /// The store does not have the latest changes before the cursor.
    Behind,
    /// The store is empty.
    Empty,
}

/// An override with its version: target, version of the last change, and text.
pub type Versioned = (String, u64, String);
