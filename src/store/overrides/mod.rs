//! [`OverrideStore`]: all overrides by target, and an audit log with every change.
//!
//! The texts of overrides are opaque to the store. Each change has a version, which increases by one, and a unique id.
//! A reader that has both for the last change it applied (a [`Cursor`]) can read the later changes. It also detects
//! that the store was emptied or is behind it, for example after a failover to a Redis replica without the last
//! changes.

mod journal;

pub use journal::{Journal, JournalError};

use std::sync::Arc;

use parking_lot::Mutex;

pub use sluicegate_store::overrides::{
    Change, Cursor, MAX_CHANGES, OverrideChange, Update, Versioned, Write, WriteOutcome,
};

use super::{AnyStore, StoreError, redis::Redis};

/// The store of overrides: Redis, or this instance's journal.
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
        match counters.redis() {
            None => Self::Journal(Arc::new(Mutex::new(journal))),
            Some(redis) => Self::Redis(redis.clone()),
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
                let journal = Arc::clone(journal);
                let digest = digest.to_owned();
                let text = text.to_owned();
                in_background(move || journal.lock().put_rule_set(&digest, &text)).await
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
                let journal = Arc::clone(journal);
                let digest = digest.to_owned();
                in_background(move || journal.lock().get_rule_set(&digest)).await
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
                journal.lock().delete_rule_set(digest);
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

/// Runs work with files on another thread, because a disk can be slow.
async fn in_background<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, JournalError> + Send + 'static,
) -> Result<T, OverrideStoreError> {
    let done = tokio::task::spawn_blocking(work).await;
    Ok(done.map_err(|_| OverrideStoreError::Redis(StoreError::Missing))??)
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
