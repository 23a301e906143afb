//! [`OverrideStore`]: all overrides by target, and an audit log with every change.
//!
//! The texts of overrides are opaque to the store. Each change has a version, which increases by one, and a unique id.
//! A reader that has both for the last change it applied (a [`Cursor`]) can read the later changes. It also detects
//! that the store was emptied or is behind it, for example after a failover to a Redis replica without the last
//! changes.

mod journal;

pub use journal::{Journal, JournalError};

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{AnyStore, StoreError, redis::Redis};

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

/// The store of overrides.
#[derive(Clone)]
pub enum OverrideStore {
    /// A file of this instance, or only its memory.
    Journal(Arc<Mutex<Journal>>),
    /// Redis, shared by all instances.
    Redis(Redis),
}

impl OverrideStore {
    /// Returns the Redis of the counters, or the journal if the counters are in memory.
    #[must_use]
    pub fn for_counters(counters: &AnyStore, journal: Journal) -> Self {
        match counters {
            AnyStore::Memory(_) => Self::Journal(Arc::new(Mutex::new(journal))),
            AnyStore::Redis(local) => Self::Redis(local.store().clone()),
        }
    }

    /// Stores a rule set under its digest.
    ///
    /// # Errors
    ///
    /// Returns an error if Redis fails or the file cannot be written.
    pub async fn put_rule_set(&self, digest: &str, text: &str) -> Result<(), OverrideStoreError> {
        match self {
            Self::Journal(journal) => {
                let (journal, digest, text) = (Arc::clone(journal), digest.to_owned(), text.to_owned());
                in_background(move || lock(&journal).put_rule_set(&digest, &text)).await
            }
            Self::Redis(redis) => Ok(redis.put_rule_set(digest, text).await?),
        }
    }

    /// Returns the rule set with this digest, or `None` if there is none.
    ///
    /// # Errors
    ///
    /// Returns an error if Redis fails or the file cannot be read.
    pub async fn get_rule_set(&self, digest: &str) -> Result<Option<String>, OverrideStoreError> {
        match self {
            Self::Journal(journal) => {
                let (journal, digest) = (Arc::clone(journal), digest.to_owned());
                in_background(move || lock(&journal).get_rule_set(&digest)).await
            }
            Self::Redis(redis) => Ok(redis.get_rule_set(digest).await?),
        }
    }

    /// Deletes the rule set with this digest.
    ///
    /// # Errors
    ///
    /// Returns an error if Redis fails.
    pub async fn delete_rule_set(&self, digest: &str) -> Result<(), OverrideStoreError> {
        match self {
            Self::Journal(journal) => {
                lock(journal).delete_rule_set(digest);
                Ok(())
            }
            Self::Redis(redis) => Ok(redis.delete_rule_set(digest).await?),
        }
    }

    /// Returns `true` if other instances can write to the store.
    #[must_use]
    pub const fn is_shared(&self) -> bool {
        matches!(self, Self::Redis(_))
    }
}

/// Maximum number of changes in one call, because Redis runs no other command during the call.
pub const MAX_CHANGES: usize = 100;

/// Runs work with files on another thread, because a disk can be slow.
async fn in_background<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, JournalError> + Send + 'static,
) -> Result<T, OverrideStoreError> {
    let done = tokio::task::spawn_blocking(work).await;
    Ok(done.map_err(|_| OverrideStoreError::Redis(StoreError::Lost))??)
}

fn lock(journal: &Mutex<Journal>) -> MutexGuard<'_, Journal> {
    journal.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Error returned when the override store cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum OverrideStoreError {
    /// Redis failed.
    #[error("cannot access overrides in Redis")]
    Redis(#[from] StoreError),
    /// The journal cannot be read or written.
    #[error(transparent)]
    Journal(#[from] JournalError),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Memory, memory};

    #[tokio::test]
    async fn a_rule_set_is_stored_under_its_digest_until_it_is_deleted() {
        let counters = AnyStore::Memory(Arc::new(Memory::new(&memory::Settings::default())));
        let store = OverrideStore::for_counters(&counters, Journal::new(None));
        assert!(!store.is_shared());
        store.put_rule_set("d1", "rules").await.unwrap();
        assert_eq!(store.get_rule_set("d1").await.unwrap().as_deref(), Some("rules"));
        assert_eq!(store.get_rule_set("d2").await.unwrap(), None);
        store.delete_rule_set("d1").await.unwrap();
        assert_eq!(store.get_rule_set("d1").await.unwrap(), None);
    }
}
