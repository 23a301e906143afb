//! What operators have said, kept: texts by what they are about, and a log of every change.
//!
//! The texts are opaque here. Each change has a version, one more than the one before, and an id that nobody else draws: a
//! reader who knows both of the last change that it has seen learns what came since, and notices when the store has gone
//! back behind it (a failover to a replica that had not heard of it) or has been emptied.

mod journal;

pub use journal::{Journal, JournalError};

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{AnyStore, StoreError, redis::Redis};

/// What is to be kept of one thing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// What it is about.
    pub target: String,
    /// The text; `None` takes it away.
    pub text: Option<String>,
    /// The change that must have been the last to it; 0: there must be none. `None`: whatever it was.
    pub expected: Option<u64>,
}

/// A change, as the log has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Change {
    /// One more than the change before.
    pub version: u64,
    /// Nobody else's.
    pub id: String,
    /// Who, when and why.
    pub info: String,
    /// What became of what.
    pub changes: Vec<OverrideChange>,
}

/// What a change did to one thing.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct OverrideChange {
    /// What it is about.
    pub target: String,
    /// The text before.
    pub before: Option<String>,
    /// The text after.
    pub after: Option<String>,
}

/// The last change that somebody knows. A file's is its version: nobody but one instance writes it.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Cursor {
    /// Drawn when the first thing was kept.
    pub epoch: String,
    /// The change's version.
    pub version: u64,
    /// The change's id.
    pub id: String,
}

/// What became of a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WriteOutcome {
    /// It is kept.
    Done(Cursor, Change),
    /// This is not what it was thought to be: nothing has changed.
    Conflict {
        /// What it is about.
        target: String,
        /// The change that was the last to it; 0: there is none.
        version: u64,
    },
}

/// What somebody has not heard yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Update {
    /// Nothing.
    Nothing,
    /// These changes, in their order; there may be more.
    Changes(Vec<Change>),
    /// Too much, or something else than what was known: all is to be read anew.
    Other,
    /// The store has forgotten the latest of what was known.
    Behind,
    /// The store has nothing.
    Empty,
}

/// A text, and the version of the change that was the last to it.
pub type Versioned = (String, u64, String);

/// Where overrides are kept.
#[derive(Clone)]
pub enum OverrideStore {
    /// With this instance.
    Journal(Arc<Mutex<Journal>>),
    /// In Redis, for all instances.
    Redis(Redis),
}

impl OverrideStore {
    /// Where the counters are, or beside the instance that has them in memory.
    #[must_use]
    pub fn beside(counters: &AnyStore, journal: Journal) -> Self {
        match counters {
            AnyStore::Memory(_) => Self::Journal(Arc::new(Mutex::new(journal))),
            AnyStore::Redis(local) => Self::Redis(local.store().clone()),
        }
    }

    /// Keeps a large text under its digest.
    pub async fn put_rule_set(&self, digest: &str, text: &str) -> Result<(), OverrideStoreError> {
        match self {
            Self::Journal(journal) => Ok(lock(journal).put_rule_set(digest, text)?),
            Self::Redis(redis) => Ok(redis.put_rule_set(digest, text).await?),
        }
    }

    /// The text of a digest, if it is kept.
    pub async fn get_rule_set(&self, digest: &str) -> Result<Option<String>, OverrideStoreError> {
        match self {
            Self::Journal(journal) => Ok(lock(journal).get_rule_set(digest)?),
            Self::Redis(redis) => Ok(redis.get_rule_set(digest).await?),
        }
    }

    /// Forgets the text of a digest.
    pub async fn delete_rule_set(&self, digest: &str) -> Result<(), OverrideStoreError> {
        match self {
            Self::Journal(journal) => {
                lock(journal).delete_rule_set(digest);
                Ok(())
            }
            Self::Redis(redis) => Ok(redis.delete_rule_set(digest).await?),
        }
    }

    /// Whether others may write to it.
    #[must_use]
    pub const fn is_shared(&self) -> bool {
        matches!(self, Self::Redis(_))
    }
}

/// What one call carries at most: Redis does nothing else while it runs.
pub const MAX_CHANGES: usize = 100;

fn lock(journal: &Mutex<Journal>) -> MutexGuard<'_, Journal> {
    journal.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The store cannot be asked, or not written to.
#[derive(Debug, thiserror::Error)]
pub enum OverrideStoreError {
    /// Redis.
    #[error("what operators say is kept in Redis")]
    Redis(#[from] StoreError),
    /// The file.
    #[error(transparent)]
    Journal(#[from] JournalError),
}
