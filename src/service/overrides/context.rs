//! [`Context`]: the state that `RedisReplication` and `JournalReplication` have in common.

use std::{borrow::Cow, sync::Arc, time::Instant};

use super::{
    ChangeError, ChangeInfo, Status,
    change::{NewValue, NewWrite, ReadOverride},
    format,
};
use crate::{
    algorithm::Micros,
    engine::{Override, Overrides, ValueHash, overrides::Target},
    metrics::{Counter, LogThrottle, WorkerId, chain},
    rules::Options,
    service::{Clock, reload::RulesInForce},
    store::{
        StoreError,
        overrides::{MAX_CHANGES, OverrideChange, Versioned},
    },
};
use parking_lot::Mutex;

/// Options, clock, the rules in force, and the status of the synchronisation, for a replication of overrides.
pub(super) struct Context {
    pub(super) options: Options,
    pub(super) clock: Clock,
    pub(super) in_force: Arc<RulesInForce>,
    /// Replaces values of entities in the log, if they are hashed.
    value_hash: Option<ValueHash>,
    status: Mutex<Status>,
    /// Locked while overrides are published.
    pub(super) published: Mutex<Published>,
    /// Number of overrides that cannot be read.
    pub(super) unreadable: Counter,
    log_unreadable: LogThrottle,
    pub(super) log_unreachable: LogThrottle,
}

/// The overrides of the last snapshot.
#[derive(Default)]
pub(super) struct Published {
    /// The overrides of the store.
    pub(super) stored: Overrides,
    /// Number of planned overrides that had begun.
    pub(super) begun: usize,
}

impl Context {
    pub(super) fn new(
        options: Options,
        clock: Clock,
        in_force: Arc<RulesInForce>,
        value_hash: Option<ValueHash>,
    ) -> Arc<Self> {
        Arc::new(Self {
            options,
            clock,
            in_force,
            value_hash,
            status: Mutex::default(),
            published: Mutex::default(),
            unreadable: Counter::new(1),
            log_unreadable: LogThrottle::default(),
            log_unreachable: LogThrottle::default(),
        })
    }

    /// Returns the state of the replication.
    pub(super) fn status(&self) -> Status {
        self.status.lock().clone()
    }

    /// Changes whether overrides can only be read, and returns whether this was so before.
    pub(super) fn set_read_only(&self, is_read_only: bool) -> bool {
        std::mem::replace(&mut self.status.lock().is_read_only, is_read_only)
    }

    /// Notes the result of a synchronisation. `version` is that of the last change that was applied.
    pub(super) fn note_sync(&self, version: u64, result: Result<(), StoreError>) {
        let mut status = self.status.lock();
        status.version = version;
        match result {
            Ok(()) => {
                if status.error.take().is_some() {
                    tracing::info!(version, "override sync restored");
                }
                status.last_sync = Some(Instant::now());
            }
            Err(error) => {
                if self.log_unreachable.should_log() {
                    tracing::warn!(
                        kind = error.kind(),
                        version,
                        "override sync failed; the last known overrides stay in force"
                    );
                }
                status.error = Some(error.to_string());
            }
        }
    }

    /// Reads an override of a change. Returns `None` if its target cannot be read, so that there is nothing to change.
    pub(super) fn read(&self, change: &OverrideChange, version: u64) -> Option<ReadOverride> {
        let read = ReadOverride::new(change, version);
        let is_readable = read.as_ref().is_some_and(|read| !matches!(read.after, NewValue::Unreadable));
        if !is_readable && change.after.is_some() {
            self.note_unreadable(&change.target, UNREADABLE);
        }
        read
    }

    /// Gives a target its new value. A value that cannot be used is counted and ignored.
    pub(super) fn put(&self, overrides: &mut Overrides, target: &Target, value: &NewValue) {
        match value {
            NewValue::Set(entry) => self.insert(overrides, entry.clone()),
            NewValue::Removed => drop(overrides.remove(target)),
            NewValue::Unreadable => {}
        }
    }

    /// Inserts a stored override. One that cannot be read is counted, logged and ignored.
    pub(super) fn insert_stored(&self, overrides: &mut Overrides, stored: &Versioned) {
        let (target, version, text) = stored;
        match format::read(target, *version, text) {
            Some(entry) => self.insert(overrides, entry),
            None => self.note_unreadable(target, UNREADABLE),
        }
    }

    fn insert(&self, overrides: &mut Overrides, entry: Override) {
        let target = entry.target.clone();
        if let Err(error) = overrides.put(entry, self.options) {
            self.note_unreadable(&target.to_string(), &error.to_string());
        }
    }

    /// Counts an override that cannot be read. An episode of them is logged once.
    pub(super) fn note_unreadable(&self, target: &str, error: &str) {
        self.unreadable.add(WorkerId(0), 1);
        if self.log_unreadable.should_log() {
            let target = self.logged(target);
            tracing::warn!(override_target = %target, error, "ignoring an override in the store that cannot be read");
        }
    }

    /// Returns writes that remove expired overrides.
    pub(super) fn expired(&self, overrides: &Overrides) -> Vec<NewWrite> {
        let mut writes = Vec::new();
        for entry in overrides.expired(self.clock.now(), MAX_CHANGES) {
            writes.push(NewWrite::removal(&entry));
        }
        writes
    }

    /// Returns author, reason and time of a change that removes expired overrides.
    pub(super) fn expiry_info(&self) -> ChangeInfo {
        ChangeInfo { author: "sluicegate".into(), reason: "expired".into(), at: self.clock.now().get() }
    }

    /// Publishes a snapshot if a switch has expired since the last one.
    pub(super) fn publish_expired_switches(&self, overrides: &Overrides) {
        let now = self.clock.now();
        let in_force = in_force_at(overrides, now, self.options).switches_in_force(now);
        if !self.in_force.snapshot().load().modes().in_force().iter().eq(&in_force) {
            self.publish(overrides);
        }
    }

    /// Returns a target as the log contains it.
    pub(super) fn logged<'t>(&self, target: &'t str) -> Cow<'t, str> {
        let Some(hash) = &self.value_hash else {
            return target.into();
        };
        match Target::parse(target) {
            Ok(target) => hash.mask(&target).to_string().into(),
            Err(_) => "-".into(),
        }
    }

    /// Returns the text of an error as the log contains it.
    pub(super) fn logged_error(&self, error: &ChangeError) -> String {
        let Some(hash) = &self.value_hash else {
            return chain(error);
        };
        match error {
            ChangeError::Conflict { target, version } => {
                let target = self.logged(target).into_owned();
                ChangeError::Conflict { target, version: *version }.to_string()
            }
            ChangeError::Invalid { target, reason } => format!("{}: {}", hash.mask(target), chain(reason)),
            _ => chain(error),
        }
    }
}

/// Returns the overrides in force at `now`: those of the store, with planned ones that have begun in place of those of
/// their targets.
pub(super) fn in_force_at(stored: &Overrides, now: Micros, options: Options) -> Overrides {
    let mut in_force = stored.clone();
    in_force.begin_planned(now, options);
    in_force
}

/// The reason in the log for a text that cannot be read.
const UNREADABLE: &str = "too long, or of an unknown format, possibly of another version of the service";
