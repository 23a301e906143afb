//! Overrides on their way from operators to decisions: kept in the store, heard of by every instance within a second, and in
//! force from then on.
//!
//! Every instance looks at the store four times a second and applies what has changed; one that cannot reach it goes on with
//! what it knows. Nor is anything lost when the store itself loses something: an instance that knows more than the store (a
//! failover to a replica that had not heard the latest, an emptied server) says it again, under the version that it
//! had. So a change is lost only when every instance that had heard of it is gone as well.

mod format;
mod metrics;
mod switch_file;
mod sync;
mod write;

pub use format::ChangeInfo;

use std::{
    collections::VecDeque,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::{sync::Mutex as AsyncMutex, time::interval};

use super::{Clock, reload::Reloader};
use crate::{
    algorithm::Micros,
    allocator,
    debounce::Debounce,
    engine::{
        Override, Overrides,
        overrides::{Origin, OverrideError, Scope, Target},
    },
    metrics::{Counter, LogThrottle},
    rules::Options,
    store::{
        StoreError,
        overrides::{Change, Cursor, JournalError, MAX_CHANGES, OverrideChange, OverrideStore, Versioned},
    },
};

/// Between two looks at the store, and at the file of switches.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Between two moves of all that decisions read. What was there before is held for a while longer, and is large.
const COMPACT_INTERVAL: Duration = Duration::from_secs(10);
/// Changes that an instance remembers for a store that goes back behind them.
const MAX_RECENT_CHANGES: usize = 256;
/// The longest name of an author, and the longest reason, in bytes.
const MAX_AUTHOR_BYTES: usize = 256;
const MAX_REASON_BYTES: usize = 1_024;
/// The longest word of a override: the text of a limit.
const MAX_VALUE_BYTES: usize = 4_096;

/// Where overrides are kept, beside the store.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// With the store `memory`: the file that keeps them. Without one they end with the process.
    pub file: Option<PathBuf>,
    /// A file of switches for this instance alone, followed while running.
    pub switch_file: Option<PathBuf>,
    /// Changes that the log in Redis holds, about.
    pub audit_log_entries: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { file: None, switch_file: None, audit_log_entries: 10_000 }
    }
}

/// What somebody wants to be said.
#[derive(Clone, Debug)]
pub struct ChangeRequest {
    /// Of what.
    pub target: Target,
    /// What; `None` takes it back.
    pub value: Option<String>,
    /// Until when.
    pub until: Option<Micros>,
    /// The version that it must have now; 0: there must be none. `None`: whatever there is.
    pub expected: Option<u64>,
}

/// Why something has not been said.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    /// It makes no sense.
    #[error("{target}: {source}")]
    Invalid {
        /// What it is about.
        target: Target,
        /// What is wrong with it.
        source: OverrideError,
    },
    /// The author or the reason.
    #[error(
        "an author has 1 to {MAX_AUTHOR_BYTES} bytes, a reason {MAX_REASON_BYTES} at most, and a limit {MAX_VALUE_BYTES}"
    )]
    Info,
    /// Too much, too little, or the same twice.
    #[error("1 to {MAX_CHANGES} overrides can be changed at once, each once")]
    Count,
    /// Somebody else has said something.
    #[error("{target} has been changed meanwhile: it has version {version}")]
    Conflict {
        /// Of what.
        target: String,
        /// The version that it has; 0: there is none.
        version: u64,
    },
    /// The store.
    #[error("the overrides cannot be kept now")]
    Store(#[from] StoreError),
    /// The file.
    #[error("the overrides cannot be kept now")]
    Journal(#[from] JournalError),
}

/// A change that has been made.
#[derive(Clone, Debug)]
pub struct AppliedChange {
    /// Its version.
    pub version: u64,
    /// Who, when, and why.
    pub info: ChangeInfo,
    /// What was said before of what, and what is said now.
    pub changes: Vec<(Target, Option<Override>, Option<Override>)>,
}

/// How it stands with the store.
#[derive(Clone, Debug, Default)]
pub struct Status {
    /// The last change that this instance knows.
    pub version: u64,
    /// When it last heard of the store; `None`: never, since it was started.
    pub last_sync: Option<Instant>,
    /// Why it has not heard of it at the last look.
    pub error: Option<String>,
}

/// Keeps the overrides of this instance true.
pub struct OverrideSync {
    store: OverrideStore,
    settings: Settings,
    options: Options,
    clock: Clock,
    reloader: Arc<Reloader>,
    known: AsyncMutex<SyncState>,
    status: Mutex<Status>,
    unreadable: Counter,
    log_unreadable: LogThrottle,
    log_unreachable: LogThrottle,
}

/// What this instance knows.
#[derive(Default)]
struct SyncState {
    overrides: Overrides,
    cursor: Cursor,
    /// The latest changes, the last at the end.
    recent: VecDeque<Change>,
}

impl OverrideSync {
    /// Knows nothing yet.
    #[must_use]
    pub fn new(
        store: OverrideStore,
        settings: Settings,
        options: Options,
        clock: Clock,
        reloader: Arc<Reloader>,
    ) -> Arc<Self> {
        Arc::new(Self {
            store,
            settings,
            options,
            clock,
            reloader,
            known: AsyncMutex::default(),
            status: Mutex::default(),
            unreadable: Counter::new(1),
            log_unreadable: LogThrottle::default(),
            log_unreachable: LogThrottle::default(),
        })
    }

    /// Reads what there is, and the file of switches. An error: the journal cannot be used. A store that is away is one that
    /// will be asked again.
    pub async fn start(&self) -> Result<(), JournalError> {
        let started = Instant::now();
        let mut known = self.known.lock().await;
        if let Some(path) = &self.settings.switch_file {
            self.read_switches(path, &mut known);
        }
        if let OverrideStore::Journal(journal) = &self.store {
            let known = &mut *known;
            known.cursor = lock(journal).load(|target, version, text| match text {
                Some(text) => self.insert(&mut known.overrides, target, version, text),
                None => sync::remove(&mut known.overrides, target),
            })?;
            self.note_sync(known, Ok(()));
        } else {
            let heard = self.load(&mut known).await;
            self.note_sync(&known, heard);
        }
        let [limits, plans, switches] = known.overrides.counts();
        if limits + plans + switches > 0 {
            let took = started.elapsed();
            tracing::info!(limits, plans, switches, version = known.cursor.version, ?took, "overrides loaded");
        }
        if known.overrides.gather() {
            allocator::release_memory();
        }
        self.publish(&known);
        Ok(())
    }

    /// Follows the store, the file of switches, and the clock, for ever.
    pub async fn follow(self: Arc<Self>) {
        let fingerprint = || {
            let metadata = std::fs::metadata(self.settings.switch_file.as_ref()?).ok()?;
            Some((metadata.len(), metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH)))
        };
        let mut settled = Debounce::new(fingerprint());
        let (mut tick, mut gathered) = (interval(POLL_INTERVAL), Instant::now());
        loop {
            tick.tick().await;
            let mut known = self.known.lock().await;
            if let Some(path) = self.settings.switch_file.as_ref().filter(|_| settled.poll(fingerprint())) {
                self.read_switches(path, &mut known);
                self.publish(&known);
            }
            if self.store.is_shared() {
                let heard = self.poll_store(&mut known).await;
                self.note_sync(&known, heard);
            }
            self.remove_expired(&mut known).await;
            if gathered.elapsed() > COMPACT_INTERVAL && known.overrides.gather() {
                gathered = Instant::now();
                self.publish(&known);
            }
        }
    }

    /// Says all of it, or nothing.
    pub async fn change(&self, requests: &[ChangeRequest], info: ChangeInfo) -> Result<AppliedChange, ChangeError> {
        let info = ChangeInfo { at: self.clock.now().get(), ..info };
        self.check(requests, &info)?;
        let mut known = self.known.lock().await;
        let change = self.write(&mut known, requests, &info).await;
        let change = change.inspect_err(|error| {
            tracing::warn!(author = info.author, error = crate::errors::chain(error), "a override was refused");
        })?;
        self.publish(&known);
        for OverrideChange { target, before, after } in &change.changes {
            let (before, after) = (before.as_deref().unwrap_or("-"), after.as_deref().unwrap_or("-"));
            let ChangeInfo { author, reason, .. } = &info;
            tracing::info!(target: "sluicegate::audit", version = change.version, author, reason, target, before, after, "override");
        }
        Ok(changed(change))
    }

    /// Puts into the log what has been done otherwise.
    pub async fn record_action(&self, info: ChangeInfo) -> Result<(), ChangeError> {
        let info = ChangeInfo { at: self.clock.now().get(), ..info };
        let mut known = self.known.lock().await;
        self.write(&mut known, &[], &info).await?;
        let ChangeInfo { author, reason, .. } = info;
        tracing::info!(target: "sluicegate::audit", version = known.cursor.version, author, reason, "done");
        Ok(())
    }

    /// Throws or takes back a switch of this instance alone. It ends with the process.
    pub async fn switch_this_instance(
        &self,
        scope: &Scope,
        word: Option<&str>,
        until: Option<Micros>,
        info: ChangeInfo,
    ) -> Result<(), ChangeError> {
        let at = self.clock.now();
        let request = ChangeRequest {
            target: Target::Switch(scope.clone()),
            value: word.map(str::to_owned),
            until,
            expected: None,
        };
        self.check(std::slice::from_ref(&request), &info)?;
        let mut known = self.known.lock().await;
        match word {
            Some(word) => known.overrides.set_switch(&entry(&request, word, &info, at), Origin::Instance),
            None => drop(known.overrides.clear_switch(scope, Origin::Instance)),
        }
        let ChangeInfo { author, reason, .. } = info;
        tracing::info!(target: "sluicegate::audit", author, reason, target = %request.target, after = word, "override for this instance");
        self.publish(&known);
        Ok(())
    }

    /// The latest changes before this version, the last first.
    pub async fn audit_log(&self, before: u64, most: usize) -> Result<Vec<AppliedChange>, StoreError> {
        let changes = match &self.store {
            OverrideStore::Journal(journal) => lock(journal).changes(before, most),
            OverrideStore::Redis(redis) => redis.override_log(before, most).await?,
        };
        Ok(changes.into_iter().map(changed).collect())
    }

    /// Where they are kept.
    pub(super) const fn store(&self) -> &OverrideStore {
        &self.store
    }

    /// How it stands with the store.
    #[must_use]
    pub fn status(&self) -> Status {
        lock(&self.status).clone()
    }
}

fn entry(request: &ChangeRequest, word: &str, info: &ChangeInfo, at: Micros) -> Override {
    Override {
        target: request.target.clone(),
        value: word.into(),
        until: request.until,
        author: info.author.as_str().into(),
        reason: info.reason.as_str().into(),
        at,
        version: 0,
    }
}

fn all(overrides: &Overrides) -> Vec<Versioned> {
    overrides.iter().map(|it| (it.target.to_string(), it.version, format::write(&it))).collect()
}

fn changed(change: Change) -> AppliedChange {
    let version = change.version;
    let parts = change.changes.into_iter().filter_map(|OverrideChange { target, before, after }| {
        let read = |text: Option<String>, version| text.and_then(|text| format::read(&target, version, &text));
        Some((Target::parse(&target).ok()?, read(before, 0), read(after, version)))
    });
    AppliedChange { version, changes: parts.collect(), info: serde_json::from_str(&change.info).unwrap_or_default() }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
