//! What the store has to say: heard of, applied, and put in force; and said again where the store has lost it.

use std::{path::Path, time::Instant};

use super::{ChangeInfo, ChangeRequest, MAX_RECENT_CHANGES, OverrideSync, SyncState, all, format, lock, switch_file};
use crate::{
    engine::{
        Overrides,
        overrides::{Origin, Target},
    },
    metrics::WorkerId,
    store::{
        StoreError,
        overrides::{
            Change, Cursor, MAX_CHANGES, OverrideChange, OverrideStore, Update, Versioned, Write, WriteOutcome,
        },
    },
};

impl OverrideSync {
    /// Looks at the store once.
    pub(super) async fn poll_store(&self, known: &mut SyncState) -> Result<(), StoreError> {
        let OverrideStore::Redis(redis) = &self.store else {
            return Ok(());
        };
        loop {
            match redis.overrides_since(&known.cursor).await? {
                Update::Nothing => return Ok(()),
                Update::Changes(changes) => {
                    let more = changes.len() == MAX_CHANGES;
                    for change in changes {
                        self.apply(known, &change);
                        (known.cursor.version, known.cursor.id) = (change.version, change.id);
                    }
                    self.publish(known);
                    if !more {
                        return Ok(());
                    }
                }
                Update::Empty if known.cursor.version == 0 => return Ok(()),
                Update::Empty => {
                    let (author, reason) = ("sluicegate".into(), "the store was empty".into());
                    let head = ChangeInfo { author, reason, at: self.clock.now().get() };
                    let head = serde_json::to_string(&head).unwrap_or_default();
                    if redis.restore_overrides(&known.cursor, &head, &all(&known.overrides)).await? {
                        let [limits, plans, switches] = known.overrides.counts();
                        tracing::warn!(limits, plans, switches, "the store had lost all overrides, and has them again");
                    }
                    return Ok(());
                }
                Update::Behind => {
                    if self.resend(known).await? {
                        self.reload(known).await?;
                    }
                    return Ok(());
                }
                Update::Other => {
                    self.resend(known).await?;
                    return self.reload(known).await;
                }
            }
        }
    }

    /// The store has gone back behind what this instance knows, or has gone another way since: what it does not have is said
    /// again. Where the two last agreed its log says; of another beginning it says nothing. What others have said since
    /// stays. True when the store has something that this instance has not.
    async fn resend(&self, known: &SyncState) -> Result<bool, StoreError> {
        let OverrideStore::Redis(redis) = &self.store else {
            return Ok(false);
        };
        let log = redis.override_log(u64::MAX, MAX_RECENT_CHANGES).await?;
        let is_common = |change: &Change| log.iter().any(|it| it.version == change.version && it.id == change.id);
        let (Some(last), Some(first)) = (known.recent.iter().rposition(is_common), log.first()) else {
            return Ok(true);
        };
        let common = known.recent[last].version;
        let lost: Vec<Change> = known.recent.iter().skip(last + 1).cloned().collect();
        let newer = || log.iter().filter(|it| it.version > common);
        let untouched =
            |part: &OverrideChange| !newer().any(|it| it.changes.iter().any(|newer| newer.target == part.target));
        if !lost.is_empty() {
            tracing::warn!(
                changes = lost.len(),
                "the store had lost the latest changes of overrides, and is told again"
            );
        }
        let mut mark = Cursor { version: first.version, id: first.id.clone(), ..known.cursor.clone() };
        for Change { id, info: head, changes: parts, .. } in lost {
            let parts = parts.into_iter().filter(|part| untouched(part));
            let parts: Vec<_> =
                parts.map(|part| Write { target: part.target, text: part.after, expected: None }).collect();
            let longest = self.settings.audit_log_entries;
            // Where somebody is faster, the rest is his.
            let said = redis.put_overrides((&id, &head), &parts, (&mark, true), longest).await?;
            let Some(WriteOutcome::Done(now, _)) = said else {
                break;
            };
            mark = now;
        }
        Ok(newer().next().is_some())
    }

    async fn reload(&self, known: &mut SyncState) -> Result<(), StoreError> {
        if known.cursor.version > 0 {
            tracing::info!(
                version = known.cursor.version,
                "the store has other overrides than this instance; all are read anew"
            );
        }
        self.load(known).await?;
        self.publish(known);
        Ok(())
    }

    /// Reads all of it, and what changed meanwhile.
    pub(super) async fn load(&self, known: &mut SyncState) -> Result<(), StoreError> {
        let OverrideStore::Redis(redis) = &self.store else {
            return Ok(());
        };
        let mut overrides = known.overrides.without_stored();
        let mark = redis.overrides(|kept| self.insert_all(&mut overrides, kept)).await?;
        known.recent.clear();
        (known.overrides, known.cursor) = (overrides, mark.unwrap_or_default());
        match redis.overrides_since(&known.cursor).await? {
            Update::Changes(changes) => {
                for change in changes {
                    self.apply(known, &change);
                    (known.cursor.version, known.cursor.id) = (change.version, change.id);
                }
            }
            // The next look will see to it.
            Update::Nothing | Update::Other | Update::Behind | Update::Empty => {}
        }
        Ok(())
    }

    fn insert_all(&self, overrides: &mut Overrides, kept: Vec<Versioned>) {
        for (target, version, text) in kept {
            self.insert(overrides, &target, version, &text);
        }
    }

    pub(super) fn insert(&self, overrides: &mut Overrides, target: &str, version: u64, text: &str) {
        let put = match format::read(target, version, text) {
            Some(entry) => overrides.put(entry, self.options).map_err(|error| error.to_string()),
            None => Err("of another version of the service".to_owned()),
        };
        if let Err(error) = put {
            self.unreadable.add(WorkerId(0), 1);
            if self.log_unreadable.should_log() {
                tracing::warn!(target, error, "a override in the store is not understood, and ignored");
            }
        }
    }

    pub(super) fn apply(&self, known: &mut SyncState, change: &Change) {
        for OverrideChange { target, after, .. } in &change.changes {
            match after {
                Some(text) => self.insert(&mut known.overrides, target, change.version, text),
                None => remove(&mut known.overrides, target),
            }
        }
        if known.recent.len() >= MAX_RECENT_CHANGES {
            known.recent.pop_front();
        }
        known.recent.push_back(change.clone());
    }

    /// Takes back what is over, and puts switches out of force whose time has passed.
    pub(super) async fn remove_expired(&self, known: &mut SyncState) {
        let now = self.clock.now();
        let requests: Vec<ChangeRequest> = known
            .overrides
            .over(now, MAX_CHANGES)
            .map(|over| ChangeRequest { target: over.target, value: None, until: None, expected: Some(over.version) })
            .collect();
        let in_force = known.overrides.switches_in_force(now);
        if !self.reloader.rules().load().modes().in_force().iter().eq(&in_force) {
            self.publish(known);
        }
        if !requests.is_empty() {
            let info = ChangeInfo { author: "sluicegate".into(), reason: "its time is over".into(), at: now.get() };
            // Where several instances try, one succeeds, and the others hear of it.
            if self.write(known, &requests, &info).await.is_ok() {
                self.publish(known);
            }
        }
    }

    pub(super) fn read_switches(&self, path: &Path, known: &mut SyncState) {
        match switch_file::read(path) {
            Ok(switches) => {
                tracing::info!(path = %path.display(), switches = switches.len(), "switches read");
                known.overrides.set_switches(&switches, Origin::File);
            }
            // A file that is not there has no switches: taking it away is how they end.
            Err(_) if !path.exists() => known.overrides.set_switches(&[], Origin::File),
            Err(error) => tracing::error!(error, "the switches cannot be read; those before stay in force"),
        }
    }

    pub(super) fn note_sync(&self, known: &SyncState, heard: Result<(), StoreError>) {
        let mut status = lock(&self.status);
        status.version = known.cursor.version;
        match heard {
            Ok(()) => {
                if status.error.take().is_some() {
                    tracing::info!(version = status.version, "what operators say is heard of again");
                }
                status.last_sync = Some(Instant::now());
            }
            Err(error) => {
                if self.log_unreachable.should_log() {
                    tracing::warn!(
                        kind = error.kind(),
                        version = status.version,
                        "what operators say is not heard of; the last that was known holds"
                    );
                }
                status.error = Some(error.to_string());
            }
        }
    }

    pub(super) fn publish(&self, known: &SyncState) {
        self.reloader.set_overrides(known.overrides.clone());
    }
}

pub(super) fn remove(overrides: &mut Overrides, target: &str) {
    if let Ok(target) = Target::parse(target) {
        overrides.remove(&target);
    }
}
