//! [`OverrideSync`]: carries overrides from the admin API to the store, from there to every instance, and into the
//! snapshot that decisions read.
//!
//! 1. The admin API calls [`OverrideSync::change`] with [`ChangeRequest`]s (`change`). They are checked and written to
//!    the store in one step, all or none. The store gives the change the next version and appends it to the audit log.
//! 2. The store is Redis (`redis`) or, with counters in memory, a journal (`journal`). Every instance polls Redis four
//!    times a second. Instances without Redis exchange the contents of their journals (`merge`), of which `peer_limits`
//!    accepts only what operators can set.
//! 3. An instance applies a change to its [`Overrides`] and passes them to the [`RulesInForce`], which swaps in a new
//!    snapshot. A change is therefore in force on all instances within a second.
//!
//! An override with a beginning in the future is stored under a target of its own until then (`planned`).
//!
//! An instance that cannot reach the store keeps the overrides that it has.
//!
//! Redis can have fewer changes than an instance: after a failover to a replica that had not received the latest
//! changes, or after the server was emptied. The instance detects this by its cursor and resends the missing changes
//! under the versions that they had. A change is therefore gone only if every instance that received it is gone, too.

mod change;
mod context;
mod format;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod journal;
mod merge;
mod metrics;
#[cfg(test)]
mod model;
mod peer_limits;
mod planned;
mod redis;
#[cfg(test)]
mod redis_model;
pub(super) mod rule_sets;
mod switch_file;
#[cfg(test)]
mod testing;
mod without_effect;

pub use change::{AppliedChange, ChangeRequest, ChangedOverride};
pub use format::ChangeInfo;
pub use merge::{Ignored, MemberExchange, Merged, PeerOverrides};
pub use rule_sets::PeerRuleSets;
pub(crate) use without_effect::COUNT_INTERVAL;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use sluicegate_files::FileVersion;
use tokio::time::{interval, sleep};

use self::{context::Context, journal::JournalReplication, redis::RedisReplication, without_effect::WithoutEffect};
use super::{Clock, reload::RulesInForce};
use crate::{
    algorithm::Micros,
    allocator,
    debounce::Debounce,
    engine::{
        Override, Overrides, ValueHash,
        overrides::{Origin, OverrideError, Scope, Target},
    },
    rules::Options,
    store::{
        StoreError,
        overrides::{JournalError, MAX_CHANGES, OverrideStore, OverrideStoreError},
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
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
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
    #[error("overrides cannot be stored in Redis; look whether the change was made before you repeat it")]
    Store(#[from] StoreError),
    /// The journal cannot be written.
    #[error("overrides cannot be stored in the journal, so the change is not in force")]
    Journal(#[from] JournalError),
}

impl From<OverrideStoreError> for ChangeError {
    fn from(error: OverrideStoreError) -> Self {
        match error {
            OverrideStoreError::Redis(error) => Self::Store(error),
            OverrideStoreError::Journal(error) => Self::Journal(error),
        }
    }
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
    context: Arc<Context>,
    replication: Replication,
    /// The store of rule sets.
    store: OverrideStore,
    switch_file: Option<PathBuf>,
    /// Version of the switch file that was read at the start.
    first_switch_file: Mutex<Option<FileVersion>>,
    /// Numbers of overrides without effect.
    without_effect: WithoutEffect,
}

/// The source that the overrides of this instance follow: Redis, or the journal of this instance.
enum Replication {
    Redis(Box<RedisReplication>),
    Journal(Arc<JournalReplication>),
}

impl OverrideSync {
    /// Creates the component, without overrides. [`start`](Self::start) loads them.
    #[must_use]
    pub fn new(
        store: OverrideStore,
        settings: Settings,
        options: Options,
        clock: Clock,
        in_force: Arc<RulesInForce>,
        value_hash: Option<ValueHash>,
    ) -> Arc<Self> {
        let context = Context::new(options, clock, in_force, value_hash);
        let replication = match &store {
            OverrideStore::Redis(redis) => {
                let entries = settings.audit_log_entries;
                let redis = RedisReplication::new(Arc::clone(&context), redis.clone(), entries);
                Replication::Redis(Box::new(redis))
            }
            OverrideStore::Journal(journal) => {
                let journal = Arc::clone(journal);
                Replication::Journal(JournalReplication::new(Arc::clone(&context), journal, settings.file))
            }
        };
        Arc::new(Self {
            context,
            replication,
            store,
            switch_file: settings.switch_file,
            first_switch_file: Mutex::default(),
            without_effect: WithoutEffect::default(),
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
        match &self.replication {
            Replication::Redis(redis) => redis.start().await,
            Replication::Journal(journal) => journal.start().await?,
        }
        if let Some(path) = &self.switch_file {
            *self.first_switch_file.lock() = FileVersion::of(path);
            self.read_switches(path).await;
        }
        let (counts, planned) = self.edit(|overrides| (overrides.counts(), overrides.planned_count())).await;
        let [limits, plans, switches] = counts;
        if limits + plans + switches + planned > 0 {
            let version = self.status().version;
            tracing::info!(limits, plans, switches, planned, version, took = ?started.elapsed(), "overrides loaded");
        }
        allocator::release_memory();
        Ok(())
    }

    /// Polls the store and the switch file, puts planned overrides in force at their beginning, and removes expired ones.
    /// Never returns.
    pub async fn follow(self: Arc<Self>) {
        tokio::join!(self.follow_store(), self.follow_beginnings());
    }

    /// Puts planned overrides in force, also while a poll waits for the store. Never returns.
    async fn follow_beginnings(&self) {
        loop {
            self.context.publish_beginnings();
            sleep(self.context.until_next_beginning()).await;
        }
    }

    async fn follow_store(&self) {
        let mut debounce = Debounce::new(self.first_switch_file.lock().take());
        let mut tick = interval(POLL_INTERVAL);
        loop {
            tick.tick().await;
            if let Some(path) = &self.switch_file
                && debounce.poll(FileVersion::of(path))
            {
                self.read_switches(path).await;
            }
            match &self.replication {
                Replication::Redis(redis) => redis.poll().await,
                Replication::Journal(journal) => journal.poll().await,
            }
        }
    }

    /// Changes the overrides that are not in the store, and publishes them.
    async fn edit<T>(&self, edit: impl FnOnce(&mut Overrides) -> T) -> T {
        match &self.replication {
            Replication::Redis(redis) => redis.edit(edit).await,
            Replication::Journal(journal) => journal.edit(edit).await,
        }
    }

    /// Reads the switch file. If the file is invalid, the previous switches stay in force.
    async fn read_switches(&self, path: &Path) {
        let switches = match switch_file::read(path) {
            Ok(switches) => {
                tracing::info!(path = %path.display(), switches = switches.len(), "switch file loaded");
                switches
            }
            // A missing file has no switches: deleting the file ends them. A file that cannot be read ends none.
            Err(_) if path.try_exists().is_ok_and(|exists| !exists) => Vec::new(),
            Err(error) => {
                return tracing::error!(error, "cannot read the switch file; the previous switches stay in force");
            }
        };
        self.edit(|overrides| overrides.set_switches(&switches, Origin::File)).await;
    }

    /// Checks everything about the requests that does not depend on the current overrides.
    ///
    /// # Errors
    ///
    /// Returns an error if a target, a value, an end, the author or the reason is invalid, if there are no requests or
    /// too many, or if a target occurs twice.
    pub fn check(&self, requests: &[ChangeRequest], info: &ChangeInfo) -> Result<(), ChangeError> {
        change::check(requests, info, self.context.options, self.context.clock.now())
    }

    /// Makes all of the requested changes or none of them, and puts them in force on this instance.
    ///
    /// # Errors
    ///
    /// Returns an error if a request is invalid, if an override does not have the expected version, or if the store
    /// cannot be written.
    pub async fn change(&self, requests: &[ChangeRequest], info: ChangeInfo) -> Result<AppliedChange, ChangeError> {
        let info = ChangeInfo { at: self.context.clock.now().get(), ..info };
        self.check(requests, &info)?;
        let applied = self.write(requests, &info).await.inspect_err(|error| {
            let error = self.context.logged_error(error);
            tracing::warn!(author = info.author, error, "an override change has failed");
        })?;
        for ChangedOverride { target, before, after, .. } in &applied.changes {
            self.log_change(applied.version, &info, target, before.as_ref(), after.as_ref());
        }
        Ok(applied)
    }

    async fn write(&self, requests: &[ChangeRequest], info: &ChangeInfo) -> Result<AppliedChange, ChangeError> {
        match &self.replication {
            Replication::Redis(redis) => redis.change(requests, info).await,
            Replication::Journal(journal) => journal.change(requests, info).await,
        }
    }

    fn log_change(
        &self,
        version: u64,
        info: &ChangeInfo,
        target: &Target,
        before: Option<&Override>,
        after: Option<&Override>,
    ) {
        let target = target.to_string();
        tracing::info!(
            target: "sluicegate::audit",
            version,
            author = info.author,
            reason = info.reason,
            override_target = %self.context.logged(&target),
            before = logged_text(before),
            after = logged_text(after),
            "override changed"
        );
    }

    /// Records an action in the audit log that changes no override, such as the reset of a counter.
    ///
    /// # Errors
    ///
    /// Returns an error if the store cannot be written.
    pub async fn record_action(&self, info: ChangeInfo) -> Result<(), ChangeError> {
        let info = ChangeInfo { at: self.context.clock.now().get(), ..info };
        let version = self.write(&[], &info).await?.version;
        let ChangeInfo { author, reason, .. } = info;
        tracing::info!(target: "sluicegate::audit", version, author, reason, "operator action");
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
        let request = ChangeRequest {
            target: Target::Switch(scope.clone()),
            value: value.map(str::to_owned),
            until,
            expected: None,
        };
        self.check(std::slice::from_ref(&request), &info)?;
        let after = request.entry(&info, self.context.clock.now());
        let edited = self.edit(|overrides| {
            let before = overrides.switches(Origin::Instance).find(|switch| switch.target == request.target).cloned();
            match &after {
                Some(switch) => overrides.set_switch(switch, Origin::Instance),
                None => drop(overrides.clear_switch(scope, Origin::Instance)),
            }
            before
        });
        let before = edited.await;
        tracing::info!(
            target: "sluicegate::audit",
            author = info.author,
            reason = info.reason,
            override_target = %self.context.logged(&request.target.to_string()),
            after = value,
            "override of this instance changed"
        );
        let changes = vec![ChangedOverride { target: request.target, before, after, refunded_hits: 0 }];
        Ok(AppliedChange { version: 0, info, changes })
    }

    /// Returns the override that a change would set now, without setting it; `None` if it removes an override.
    #[must_use]
    pub fn new_override(&self, request: &ChangeRequest) -> Option<Override> {
        request.entry(&ChangeInfo::default(), self.context.clock.now())
    }

    /// Returns at most `max_changes` changes with versions below `before`, the most recent first.
    ///
    /// # Errors
    ///
    /// Returns an error if Redis cannot be reached.
    pub async fn audit_log(&self, before: u64, max_changes: usize) -> Result<Vec<AppliedChange>, StoreError> {
        let changes = match &self.replication {
            Replication::Redis(redis) => redis.audit_log(before, max_changes).await?,
            Replication::Journal(journal) => journal.audit_log(before, max_changes),
        };
        Ok(changes.iter().map(AppliedChange::read).collect())
    }

    /// Returns the changes after `version` that this instance has applied recently, the oldest first.
    ///
    /// Returns `None` while a synchronisation is in progress, which may wait for Redis.
    #[must_use]
    pub fn changes_after(&self, version: u64) -> Option<Vec<AppliedChange>> {
        let changes = match &self.replication {
            Replication::Redis(redis) => redis.changes_after(version)?,
            Replication::Journal(journal) => journal.changes_after(version)?,
        };
        Some(changes.iter().map(AppliedChange::read).collect())
    }

    /// Returns the exchange of overrides with other instances; `None` if they share a Redis.
    #[must_use]
    pub fn member_exchange(&self) -> Option<MemberExchange> {
        match &self.replication {
            Replication::Redis(_) => None,
            Replication::Journal(journal) => Some(MemberExchange::new(Arc::clone(journal))),
        }
    }

    /// Returns the store of rule sets.
    pub(super) const fn store(&self) -> &OverrideStore {
        &self.store
    }

    /// Returns the state of the synchronisation with the store.
    #[must_use]
    pub fn status(&self) -> Status {
        self.context.status()
    }
}

/// Returns the text of an override for the log.
fn logged_text(entry: Option<&Override>) -> String {
    match entry {
        Some(entry) => format::write(entry),
        None => "-".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::{
        testing::{advance, by_alice, journal, member},
        *,
    };

    #[tokio::test]
    async fn a_snapshot_is_published_when_a_switch_expires() {
        let member = member();
        let until = member.context.clock.now() + Micros::from_secs(1);
        member.switch_this_instance(&Scope::Everything, Some("off"), Some(until), by_alice()).await.unwrap();
        let snapshot = member.context.in_force.snapshot().load_full();
        assert_eq!(snapshot.modes().in_force().len(), 1);
        journal(&member).poll().await;
        assert!(Arc::ptr_eq(&snapshot, &member.context.in_force.snapshot().load_full()));
        advance(&member, 2_000_000);
        journal(&member).poll().await;
        assert!(member.context.in_force.snapshot().load().modes().in_force().is_empty());
    }
}
