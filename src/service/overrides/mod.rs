//! [`OverrideSync`]: carries overrides from the admin API to the store, from there to every instance, and into the
//! snapshot that decisions read.
//!
//! 1. The admin API calls [`OverrideSync::change`] with [`ChangeRequest`]s. They are validated and written to the store
//!    in one step, all or none (`write`). The store is Redis, or the journal if counters are in memory. It gives the
//!    change the next version and appends the change to the audit log.
//! 2. Every instance polls Redis four times a second and sends its [`Cursor`], the last change that it has applied
//!    (`sync`). Redis replies with an [`Update`](crate::store::overrides::Update), usually the changes since then.
//! 3. The instance applies these changes to its [`Overrides`] and passes the overrides to the [`Reloader`], which swaps
//!    in a new snapshot. A change is therefore in force on all instances within a second.
//!
//! An instance that cannot reach the store keeps the overrides that it has.
//!
//! Redis can have fewer changes than an instance: after a failover to a replica that had not received the latest
//! changes, or after the server was emptied. The instance detects this by its cursor and resends the missing changes
//! under the versions that they had. A change is therefore gone only if every instance that received it is gone, too.

mod format;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod journal;
mod merge;
mod metrics;
#[cfg(test)]
mod model;
mod peer_limits;
#[cfg(test)]
mod redis_model;
pub(super) mod rule_sets;
mod switch_file;
mod sync;
mod without_effect;
mod write;

pub use format::ChangeInfo;
pub use merge::{Ignored, Merged, PeerOverrides};
pub use rule_sets::PeerRuleSets;
pub(crate) use without_effect::COUNT_INTERVAL;

use std::{
    borrow::Cow,
    collections::VecDeque,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sluicegate_files::FileVersion;
use tokio::{
    sync::{Mutex as AsyncMutex, watch},
    time::interval,
};

use self::without_effect::WithoutEffect;
use super::{Clock, reload::Reloader};
use crate::{
    algorithm::Micros,
    allocator,
    debounce::Debounce,
    engine::{
        Override, Overrides, ValueHash,
        overrides::{Origin, OverrideError, Scope, Target},
    },
    metrics::{Counter, LogThrottle},
    rules::Options,
    store::{
        StoreError,
        overrides::{Change, Cursor, JournalError, MAX_CHANGES, OverrideChange, OverrideStore, Versioned},
    },
};

/// Interval between two polls of the store and of the switch file.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Maximum number of recent changes that an instance holds in memory to resend them to the store.
const MAX_RECENT_CHANGES: usize = 256;
/// Maximum length of an author's name.
const MAX_AUTHOR_BYTES: usize = 256;
/// Maximum length of the reason for a change.
const MAX_REASON_BYTES: usize = 1_024;
/// Maximum length of an override's value. The longest values are limits.
const MAX_VALUE_BYTES: usize = 4_096;

/// Settings for overrides.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// The file that persists overrides if the store is `memory`. Without it, overrides are lost when the process ends.
    pub file: Option<PathBuf>,
    /// A file with switches for this instance only, reloaded when it changes.
    pub switch_file: Option<PathBuf>,
    /// Approximate number of changes that the audit log in Redis holds.
    pub audit_log_entries: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { file: None, switch_file: None, audit_log_entries: 10_000 }
    }
}

/// A request to set or remove one override.
#[derive(Clone, Debug)]
pub struct ChangeRequest {
    /// The entity or rules that the override applies to.
    pub target: Target,
    /// The new value. `None` removes the override.
    pub value: Option<String>,
    /// The time at which the override expires; `None` if it does not expire.
    pub until: Option<Micros>,
    /// The version that the override must have now, or 0 if it must not exist. `None`: no condition.
    pub expected: Option<u64>,
}

/// Error returned when overrides cannot be changed. None of the requested changes has been made.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    /// The target or the value is invalid.
    #[error("{target}: {reason}")]
    Invalid {
        /// The target of the invalid request.
        target: Target,
        /// The reason.
        reason: OverrideError,
    },
    /// The author, the reason or a value has an invalid length.
    #[error(
        "the author must have 1 to {MAX_AUTHOR_BYTES} bytes, the reason at most {MAX_REASON_BYTES}, \
         each value at most {MAX_VALUE_BYTES}"
    )]
    Info,
    /// The list of requests is empty, too long, or contains a target twice.
    #[error("a call must change 1 to {MAX_CHANGES} overrides, each target once")]
    Count,
    /// An override does not have the expected version.
    #[error("{target} was changed by another call: it has version {version}")]
    Conflict {
        /// The target of the override.
        target: String,
        /// The version of the override, or 0 if it does not exist.
        version: u64,
    },
    /// The journal has no room for more overrides.
    #[error("the overrides have reached their maximum of 128 MiB; remove some, or use Redis as the store")]
    Full,
    /// Redis cannot be reached, or it rejected the change.
    #[error("overrides cannot be stored")]
    Store(#[from] StoreError),
    /// The journal cannot be written.
    #[error("overrides cannot be stored")]
    Journal(#[from] JournalError),
}

/// A change that was accepted.
#[derive(Clone, Debug)]
pub struct AppliedChange {
    /// The version of the change; 0 if it applies to this instance only.
    pub version: u64,
    /// The author, time and reason.
    pub info: ChangeInfo,
    /// Each target with its override before and after the change.
    pub changes: Vec<(Target, Option<Override>, Option<Override>)>,
}

/// State of the synchronisation with the store.
#[derive(Clone, Debug, Default)]
pub struct Status {
    /// Version of the last change that this instance has applied.
    pub version: u64,
    /// Time of the last successful synchronisation, or `None` before the first.
    pub last_sync: Option<Instant>,
    /// The error of the last synchronisation, or `None` if it succeeded.
    pub error: Option<String>,
    /// Whether overrides cannot be changed, because another process holds the journal.
    pub is_read_only: bool,
}

/// Synchronises this instance's overrides with the store.
pub struct OverrideSync {
    store: OverrideStore,
    settings: Settings,
    options: Options,
    clock: Clock,
    reloader: Arc<Reloader>,
    /// Replaces values of entities in the log, if they are hashed.
    value_hash: Option<ValueHash>,
    state: AsyncMutex<SyncState>,
    status: Mutex<Status>,
    unreadable: Counter,
    /// Numbers of overrides that match nothing.
    without_effect: WithoutEffect,
    log_unreadable: LogThrottle,
    log_unreachable: LogThrottle,
    /// Position in the journal, for instances that exchange overrides.
    position: watch::Sender<u64>,
}

/// The overrides of this instance, and how far they follow the store.
#[derive(Default)]
struct SyncState {
    overrides: Overrides,
    cursor: Cursor,
    /// The most recent changes, oldest first.
    recent: VecDeque<Change>,
    /// The last change before `recent`.
    before_recent: Cursor,
    /// Approximate bytes of the targets and texts of the overrides in the journal.
    override_bytes: usize,
    /// Bytes of the changes in `recent`.
    recent_bytes: usize,
    /// Version of the switch file that was read at the start.
    first_switch_file: Option<FileVersion>,
}

impl OverrideSync {
    /// Creates an instance without overrides. [`start`](Self::start) loads them.
    #[must_use]
    pub fn new(
        store: OverrideStore,
        settings: Settings,
        options: Options,
        clock: Clock,
        reloader: Arc<Reloader>,
        value_hash: Option<ValueHash>,
    ) -> Arc<Self> {
        Arc::new(Self {
            store,
            settings,
            options,
            clock,
            reloader,
            value_hash,
            state: AsyncMutex::default(),
            status: Mutex::default(),
            unreadable: Counter::new(1),
            without_effect: WithoutEffect::default(),
            log_unreadable: LogThrottle::default(),
            log_unreachable: LogThrottle::default(),
            position: watch::channel(0).0,
        })
    }

    /// Loads the overrides from the store and the switches from the switch file.
    ///
    /// If Redis cannot be reached, this function succeeds, and [`follow`](Self::follow) tries again.
    ///
    /// # Errors
    ///
    /// Returns an error if the journal cannot be read.
    pub async fn start(&self) -> Result<(), JournalError> {
        let started = Instant::now();
        let mut state = self.state.lock().await;
        if let Some(path) = &self.settings.switch_file {
            state.first_switch_file = FileVersion::of(path);
            self.read_switches(path, &mut state);
        }
        if let OverrideStore::Journal(journal) = &self.store {
            self.start_journal(journal, &mut state)?;
            self.note_sync(&state, Ok(()));
        } else {
            let result = self.load(&mut state).await;
            self.note_sync(&state, result);
        }
        let [limits, plans, switches] = state.overrides.counts();
        if limits + plans + switches > 0 {
            let took = started.elapsed();
            tracing::info!(limits, plans, switches, version = state.cursor.version, ?took, "overrides loaded");
        }
        allocator::release_memory();
        self.publish(&state);
        Ok(())
    }

    /// Polls the store and the switch file, and removes expired overrides. Never returns.
    pub async fn follow(self: Arc<Self>) {
        let version = || FileVersion::of(self.settings.switch_file.as_ref()?);
        let mut debounce = Debounce::new(self.state.lock().await.first_switch_file.take());
        let mut tick = interval(POLL_INTERVAL);
        loop {
            tick.tick().await;
            let mut state = self.state.lock().await;
            if let Some(path) = self.settings.switch_file.as_ref().filter(|_| debounce.poll(version())) {
                self.read_switches(path, &mut state);
                self.publish(&state);
            }
            if let OverrideStore::Journal(journal) = &self.store {
                self.follow_journal(journal, &mut state).await;
            } else {
                let result = self.poll_store(&mut state).await;
                self.note_sync(&state, result);
            }
            self.remove_expired(&mut state).await;
        }
    }

    /// Makes all of the requested changes or none of them, and puts them in force on this instance.
    ///
    /// # Errors
    ///
    /// Returns an error if a request is invalid, if an override does not have the expected version, or if the store
    /// cannot be written.
    pub async fn change(&self, requests: &[ChangeRequest], info: ChangeInfo) -> Result<AppliedChange, ChangeError> {
        let info = ChangeInfo { at: self.clock.now().get(), ..info };
        self.check(requests, &info)?;
        let mut state = self.state.lock().await;
        let change = self.write(&mut state, requests, &info).await;
        let change = change.inspect_err(|error| {
            tracing::warn!(author = info.author, error = self.logged_error(error), "an override change was rejected");
        })?;
        self.publish(&state);
        for OverrideChange { target, before, after } in &change.changes {
            let (before, after) = (before.as_deref().unwrap_or("-"), after.as_deref().unwrap_or("-"));
            let (target, ChangeInfo { author, reason, .. }) = (self.logged(target), &info);
            tracing::info!(target: "sluicegate::audit", version = change.version, author, reason, override_target = %target, before, after, "override changed");
        }
        Ok(applied_change(change))
    }

    /// Returns a target as the log contains it.
    fn logged<'t>(&self, target: &'t str) -> Cow<'t, str> {
        match &self.value_hash {
            None => target.into(),
            Some(hash) => Target::parse(target).map_or("-".into(), |target| hash.mask(&target).to_string().into()),
        }
    }

    /// Returns the text of an error as the log contains it.
    fn logged_error(&self, error: &ChangeError) -> String {
        let Some(hash) = &self.value_hash else {
            return crate::metrics::chain(error);
        };
        match error {
            ChangeError::Conflict { target, version } => {
                let target = self.logged(target).into_owned();
                ChangeError::Conflict { target, version: *version }.to_string()
            }
            ChangeError::Invalid { target, reason } => {
                format!("{}: {}", hash.mask(target), crate::metrics::chain(reason))
            }
            _ => crate::metrics::chain(error),
        }
    }

    /// Records an action in the audit log that changes no override, such as the reset of a counter.
    ///
    /// # Errors
    ///
    /// Returns an error if the store cannot be written.
    pub async fn record_action(&self, info: ChangeInfo) -> Result<(), ChangeError> {
        let info = ChangeInfo { at: self.clock.now().get(), ..info };
        let mut state = self.state.lock().await;
        self.write(&mut state, &[], &info).await?;
        let ChangeInfo { author, reason, .. } = info;
        tracing::info!(target: "sluicegate::audit", version = state.cursor.version, author, reason, "operator action");
        Ok(())
    }

    /// Sets a switch that applies to this instance only, or removes it if `value` is `None`. It ends with the process.
    ///
    /// # Errors
    ///
    /// Returns an error if the scope, the mode, the author or the reason is invalid.
    pub async fn switch_this_instance(
        &self,
        scope: &Scope,
        value: Option<&str>,
        until: Option<Micros>,
        info: ChangeInfo,
    ) -> Result<AppliedChange, ChangeError> {
        let at = self.clock.now();
        let request = ChangeRequest {
            target: Target::Switch(scope.clone()),
            value: value.map(str::to_owned),
            until,
            expected: None,
        };
        self.check(std::slice::from_ref(&request), &info)?;
        let mut state = self.state.lock().await;
        let before = state.overrides.switches(Origin::Instance).find(|switch| switch.target == request.target).cloned();
        let after = value.map(|value| new_override(&request, value, &info, at));
        match &after {
            Some(switch) => state.overrides.set_switch(switch, Origin::Instance),
            None => drop(state.overrides.clear_switch(scope, Origin::Instance)),
        }
        let ChangeInfo { author, reason, .. } = &info;
        tracing::info!(target: "sluicegate::audit", author, reason, override_target = %self.logged(&request.target.to_string()), after = value, "override of this instance changed");
        self.publish(&state);
        Ok(AppliedChange { version: 0, info, changes: vec![(request.target, before, after)] })
    }

    /// Returns the override that a change would set now, without setting it; `None` if it removes an override.
    #[must_use]
    pub fn new_override(&self, request: &ChangeRequest) -> Option<Override> {
        let value = request.value.as_deref()?;
        Some(new_override(request, value, &ChangeInfo::default(), self.clock.now()))
    }

    /// Returns at most `max_changes` changes with versions below `before`, the most recent first.
    ///
    /// # Errors
    ///
    /// Returns an error if Redis cannot be reached.
    pub async fn audit_log(&self, before: u64, max_changes: usize) -> Result<Vec<AppliedChange>, StoreError> {
        let changes = match &self.store {
            OverrideStore::Journal(journal) => lock(journal).changes(before, max_changes),
            OverrideStore::Redis(redis) => redis.override_log(before, max_changes).await?,
        };
        Ok(changes.into_iter().map(applied_change).collect())
    }

    /// Returns the changes after `version` that this instance has applied recently, the oldest first.
    ///
    /// Returns `None` while a synchronisation is in progress, which may wait for Redis.
    #[must_use]
    pub fn changes_after(&self, version: u64) -> Option<Vec<AppliedChange>> {
        let state = self.state.try_lock().ok()?;
        let changes: Vec<Change> = match &self.store {
            OverrideStore::Journal(_) if state.cursor.version <= version => Vec::new(),
            OverrideStore::Journal(journal) => {
                let mut changes = lock(journal).changes(u64::MAX, MAX_RECENT_CHANGES);
                changes.retain(|change| change.version > version);
                changes.reverse();
                changes
            }
            OverrideStore::Redis(_) => state.recent.iter().filter(|change| change.version > version).cloned().collect(),
        };
        Some(changes.into_iter().map(applied_change).collect())
    }

    /// Returns the store of the overrides.
    pub(super) const fn store(&self) -> &OverrideStore {
        &self.store
    }

    /// Returns the state of the synchronisation with the store.
    #[must_use]
    pub fn status(&self) -> Status {
        lock(&self.status).clone()
    }
}

fn new_override(request: &ChangeRequest, value: &str, info: &ChangeInfo, at: Micros) -> Override {
    Override {
        target: request.target.clone(),
        value: value.into(),
        until: request.until,
        author: info.author.as_str().into(),
        reason: info.reason.as_str().into(),
        at,
        version: 0,
    }
}

fn all_versioned(overrides: &Overrides) -> Vec<Versioned> {
    let versioned = |entry: Override| (entry.target.to_string(), entry.version, format::write(&entry));
    overrides.iter().map(versioned).collect()
}

fn applied_change(change: Change) -> AppliedChange {
    let version = change.version;
    let changes = change.changes.into_iter().filter_map(|OverrideChange { target, before, after }| {
        let read = |text: Option<String>, version| text.and_then(|text| format::read(&target, version, &text));
        Some((Target::parse(&target).ok()?, read(before, 0), read(after, version)))
    });
    AppliedChange { version, changes: changes.collect(), info: serde_json::from_str(&change.info).unwrap_or_default() }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
