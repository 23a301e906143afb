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
pub struct Put {
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
    pub head: String,
    /// What became of what.
    pub parts: Vec<Part>,
}

/// What a change did to one thing.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Part {
    /// What it is about.
    pub target: String,
    /// The text before.
    pub before: Option<String>,
    /// The text after.
    pub after: Option<String>,
}

/// The last change that somebody knows. A file's is its version: nobody but one instance writes it.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Mark {
    /// Drawn when the first thing was kept.
    pub epoch: String,
    /// The change's version.
    pub version: u64,
    /// The change's id.
    pub id: String,
}

/// What became of a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Written {
    /// It is kept.
    Done(Mark, Change),
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
pub enum News {
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
pub type Kept = (String, u64, String);

/// Where directives are kept.
#[derive(Clone)]
pub enum DirectiveStore {
    /// With this instance.
    Journal(Arc<Mutex<Journal>>),
    /// In Redis, for all instances.
    Redis(Redis),
}

impl DirectiveStore {
    /// Where the counters are, or beside the instance that has them in memory.
    #[must_use]
    pub fn beside(counters: &AnyStore, journal: Journal) -> Self {
        match counters {
            AnyStore::Memory(_) => Self::Journal(Arc::new(Mutex::new(journal))),
            AnyStore::Redis(local) => Self::Redis(local.store().clone()),
        }
    }

    /// Keeps a large text under its digest.
    pub async fn put_set(&self, digest: &str, text: &str) -> Result<(), KeepError> {
        match self {
            Self::Journal(journal) => Ok(lock(journal).put_set(digest, text)?),
            Self::Redis(redis) => Ok(redis.put_directive_set(digest, text).await?),
        }
    }

    /// The text of a digest, if it is kept.
    pub async fn get_set(&self, digest: &str) -> Result<Option<String>, KeepError> {
        match self {
            Self::Journal(journal) => Ok(lock(journal).get_set(digest)?),
            Self::Redis(redis) => Ok(redis.get_directive_set(digest).await?),
        }
    }

    /// Forgets the text of a digest.
    pub async fn drop_set(&self, digest: &str) -> Result<(), KeepError> {
        match self {
            Self::Journal(journal) => {
                lock(journal).drop_set(digest);
                Ok(())
            }
            Self::Redis(redis) => Ok(redis.drop_directive_set(digest).await?),
        }
    }

    /// Whether others may write to it.
    #[must_use]
    pub const fn is_shared(&self) -> bool {
        matches!(self, Self::Redis(_))
    }
}

/// What one call carries at most: Redis does nothing else while it runs.
pub const MOST_PARTS: usize = 100;

fn lock(journal: &Mutex<Journal>) -> MutexGuard<'_, Journal> {
    journal.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The store cannot be asked, or not written to.
#[derive(Debug, thiserror::Error)]
pub enum KeepError {
    /// Redis.
    #[error("what operators say is kept in Redis")]
    Redis(#[from] StoreError),
    /// The file.
    #[error(transparent)]
    Journal(#[from] JournalError),
}
