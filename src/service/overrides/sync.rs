//! Synchronisation with the store: polls for updates, applies and publishes them, resends changes that the store does
//! not have, and removes expired overrides.

use std::{iter, path::Path, time::Instant};

use super::{
    ChangeInfo, ChangeRequest, MAX_RECENT_CHANGES, OverrideSync, SyncState, all_versioned, format, lock, peer_limits,
    switch_file,
};
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
    /// Polls the store once and applies its update. Resends changes if the store is behind or has another history.
    pub(super) async fn poll_store(&self, state: &mut SyncState) -> Result<(), StoreError> {
        let OverrideStore::Redis(redis) = &self.store else {
            return Ok(());
        };
        loop {
            match redis.overrides_since(&state.cursor).await? {
                Update::Unchanged => return Ok(()),
                Update::Changes(changes) => {
                    let more = changes.len() == MAX_CHANGES;
                    for change in changes {
                        self.apply(state, &change);
                        (state.cursor.version, state.cursor.id) = (change.version, change.id);
                    }
                    self.publish(state);
                    if !more {
                        return Ok(());
                    }
                }
                Update::Empty if state.cursor.version == 0 => return Ok(()),
                Update::Empty => {
                    let (author, reason) = ("sluicegate".into(), "restored after the store was emptied".into());
                    let info = ChangeInfo { author, reason, at: self.clock.now().get() };
                    let info_json = serde_json::to_string(&info).unwrap_or_default();
                    if redis.restore_overrides(&state.cursor, &info_json, &all_versioned(&state.overrides)).await? {
                        let [limits, plans, switches] = state.overrides.counts();
                        tracing::warn!(
                            limits,
                            plans,
                            switches,
                            "the store had been emptied; restored the overrides of this instance"
                        );
                    }
                    return Ok(());
                }
                Update::Behind => {
                    if self.resend(state).await? {
                        self.reload(state).await?;
                    }
                    return Ok(());
                }
                Update::Diverged => {
                    self.resend(state).await?;
                    return self.reload(state).await;
                }
            }
        }
    }

    /// Resends the changes that this instance has applied and the store does not have.
    ///
    /// The store is behind this instance's cursor (after a failover), or other changes were written to it since. Its
    /// audit log contains the last change that both have, and everything after that is resent. Without a common change
    /// in the log, the store has another history and nothing is resent. Resent changes keep their ids. They also keep
    /// their versions unless another change was written since. In that case they get new versions, and targets that
    /// the other change concerns are skipped, so the newer change stays in force.
    ///
    /// Returns `true` if the store has changes that this instance does not have.
    async fn resend(&self, state: &SyncState) -> Result<bool, StoreError> {
        let OverrideStore::Redis(redis) = &self.store else {
            return Ok(false);
        };
        let log = redis.override_log(u64::MAX, MAX_RECENT_CHANGES).await?;
        let is_common =
            |(version, id): &(u64, &String)| log.iter().any(|entry| entry.version == *version && entry.id == **id);
        let recent = state.recent.iter().map(|change| (change.version, &change.id));
        let mut known = iter::once((state.before_recent.version, &state.before_recent.id)).chain(recent);
        let (Some((common, _)), Some(first)) = (known.rfind(is_common), log.first()) else {
            return Ok(true);
        };
        let missing: Vec<Change> = state.recent.iter().filter(|change| change.version > common).cloned().collect();
        let newer = || log.iter().filter(|entry| entry.version > common);
        let untouched = |change: &OverrideChange| {
            !newer().any(|entry| entry.changes.iter().any(|newer| newer.target == change.target))
        };
        if !missing.is_empty() {
            tracing::warn!(
                changes = missing.len(),
                "the store does not have the latest override changes; resending them"
            );
        }
        let mut cursor = Cursor { version: first.version, id: first.id.clone(), ..state.cursor.clone() };
        for Change { id, info, changes, .. } in missing {
            let changes = changes.into_iter().filter(|change| untouched(change));
            let writes: Vec<_> =
                changes.map(|change| Write { target: change.target, text: change.after, expected: None }).collect();
            let max_entries = self.settings.audit_log_entries;
            let outcome = redis.put_overrides((&id, &info), &writes, &cursor, max_entries).await?;
            // If another instance has written meanwhile, that instance resends the remaining changes.
            let Some(WriteOutcome::Done(next, _)) = outcome else {
                break;
            };
            cursor = next;
        }
        Ok(newer().next().is_some())
    }

    async fn reload(&self, state: &mut SyncState) -> Result<(), StoreError> {
        if state.cursor.version > 0 {
            tracing::info!(
                version = state.cursor.version,
                "the store has other overrides than this instance; loading all of them again"
            );
        }
        self.load(state).await?;
        self.publish(state);
        Ok(())
    }

    /// Loads all overrides from Redis, and then the changes that were made during the load.
    pub(super) async fn load(&self, state: &mut SyncState) -> Result<(), StoreError> {
        let OverrideStore::Redis(redis) = &self.store else {
            return Ok(());
        };
        let mut overrides = state.overrides.without_stored();
        let cursor = redis.overrides(|versioned| self.insert_all(&mut overrides, versioned)).await?;
        state.recent.clear();
        state.recent_bytes = 0;
        (state.overrides, state.cursor) = (overrides, cursor.unwrap_or_default());
        state.before_recent = state.cursor.clone();
        match redis.overrides_since(&state.cursor).await? {
            Update::Changes(changes) => {
                for change in changes {
                    self.apply(state, &change);
                    (state.cursor.version, state.cursor.id) = (change.version, change.id);
                }
            }
            // The next poll handles these cases.
            Update::Unchanged | Update::Diverged | Update::Behind | Update::Empty => {}
        }
        Ok(())
    }

    fn insert_all(&self, overrides: &mut Overrides, versioned: Vec<Versioned>) {
        for (target, version, text) in versioned {
            self.insert(overrides, &target, version, &text);
        }
    }

    /// Inserts an override of the store or of another instance, and returns whether it could be read. If not, it is
    /// counted, logged and ignored.
    pub(super) fn insert(&self, overrides: &mut Overrides, target: &str, version: u64, text: &str) -> bool {
        let result = match format::read(target, version, text) {
            Some(entry) => overrides.put(entry, self.options).map_err(|error| error.to_string()),
            None => Err("too long, or of an unknown format, possibly of another version of the service".to_owned()),
        };
        match result {
            Ok(()) => true,
            Err(error) => {
                self.note_unreadable(target, &error);
                false
            }
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

    pub(super) fn apply(&self, state: &mut SyncState, change: &Change) {
        for OverrideChange { target, after, .. } in &change.changes {
            self.replace(state, target, change.version, after.as_deref());
        }
        if state.recent.len() >= MAX_RECENT_CHANGES
            && let Some(oldest) = state.recent.pop_front()
        {
            state.recent_bytes -= peer_limits::change_bytes(&oldest);
            state.before_recent = Cursor { version: oldest.version, id: oldest.id, ..state.cursor.clone() };
        }
        state.recent_bytes += peer_limits::change_bytes(change);
        state.recent.push_back(change.clone());
    }

    /// Inserts an override, or removes it if there is no text, and counts its bytes.
    pub(super) fn replace(&self, state: &mut SyncState, target: &str, version: u64, text: Option<&str>) {
        state.override_bytes = state.override_bytes.saturating_sub(bytes_of(&state.overrides, target));
        match text {
            Some(text) => drop(self.insert(&mut state.overrides, target, version, text)),
            None => remove(&mut state.overrides, target),
        }
        state.override_bytes += bytes_of(&state.overrides, target);
    }

    /// Removes expired overrides from the store, and publishes a new snapshot when a switch expires.
    pub(super) async fn remove_expired(&self, state: &mut SyncState) {
        let now = self.clock.now();
        let requests: Vec<ChangeRequest> = state
            .overrides
            .expired(now, MAX_CHANGES)
            .map(|entry| ChangeRequest {
                target: entry.target,
                value: None,
                until: None,
                expected: Some(entry.version),
            })
            .collect();
        let in_force = state.overrides.switches_in_force(now);
        if !self.reloader.rules().load().modes().in_force().iter().eq(&in_force) {
            self.publish(state);
        }
        if !requests.is_empty() && !self.status().is_read_only {
            let info = ChangeInfo { author: "sluicegate".into(), reason: "expired".into(), at: now.get() };
            // If several instances try, one succeeds, and the others receive its change.
            if self.write(state, &requests, &info).await.is_ok() {
                self.publish(state);
            }
        }
    }

    /// Reads the switch file. If the file is invalid, the previous switches stay in force.
    pub(super) fn read_switches(&self, path: &Path, state: &mut SyncState) {
        match switch_file::read(path) {
            Ok(switches) => {
                tracing::info!(path = %path.display(), switches = switches.len(), "switch file loaded");
                state.overrides.set_switches(&switches, Origin::File);
            }
            // A missing file has no switches: deleting the file ends them. A file that cannot be read ends none.
            Err(_) if path.try_exists().is_ok_and(|exists| !exists) => state.overrides.set_switches(&[], Origin::File),
            Err(error) => tracing::error!(error, "cannot read the switch file; the previous switches stay in force"),
        }
    }

    pub(super) fn note_sync(&self, state: &SyncState, result: Result<(), StoreError>) {
        let mut status = lock(&self.status);
        status.version = state.cursor.version;
        match result {
            Ok(()) => {
                if status.error.take().is_some() {
                    tracing::info!(version = status.version, "override sync restored");
                }
                status.last_sync = Some(Instant::now());
            }
            Err(error) => {
                if self.log_unreachable.should_log() {
                    tracing::warn!(
                        kind = error.kind(),
                        version = status.version,
                        "override sync failed; the last known overrides stay in force"
                    );
                }
                status.error = Some(error.to_string());
            }
        }
    }

    pub(super) fn publish(&self, state: &SyncState) {
        self.reloader.set_overrides(state.overrides.clone());
        let position = self.position().unwrap_or_default();
        self.position.send_if_modified(|latest| std::mem::replace(latest, position) != position);
    }
}

/// Removes the override of a target. A target that cannot be parsed has none.
/// Returns the bytes of the override of a target, or 0 if there is none.
fn bytes_of(overrides: &Overrides, target: &str) -> usize {
    let entry = Target::parse(target).ok().and_then(|target| overrides.get(&target));
    entry.map_or(0, |entry| peer_limits::override_bytes(&entry))
}

pub(super) fn remove(overrides: &mut Overrides, target: &str) {
    if let Ok(target) = Target::parse(target) {
        overrides.remove(&target);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex, atomic::Ordering::Relaxed};

    use super::{
        super::merge::tests::{member, member_of},
        *,
    };
    use crate::{
        algorithm::Micros,
        engine::overrides::Scope,
        service::Clock,
        store::{TimeSource, overrides::Journal, redis},
    };

    fn info() -> ChangeInfo {
        ChangeInfo { author: "alice".into(), ..ChangeInfo::default() }
    }

    #[test]
    fn the_change_before_the_recent_ones_is_known() {
        let (member, mut state) = (member(), SyncState::default());
        for version in 1..=MAX_RECENT_CHANGES as u64 + 2 {
            let id = version.to_string();
            member.apply(&mut state, &Change { version, id, ..Change::default() });
        }
        let Cursor { version, id, .. } = &state.before_recent;
        assert_eq!((state.recent.len(), *version, &**id), (MAX_RECENT_CHANGES, 2, "2"));
        assert_eq!(state.recent[0].version, 3);
    }

    #[tokio::test]
    async fn overrides_are_loaded_again_after_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("overrides");
        let start = async || {
            let journal = Journal::new(Some(path.clone()));
            let member = member_of(OverrideStore::Journal(Arc::new(Mutex::new(journal))));
            member.start().await.unwrap();
            member
        };
        let target = Target::Switch(Scope::Everything);
        let request = ChangeRequest { target, value: Some("off".into()), until: None, expected: None };
        start().await.change(&[request], info()).await.unwrap();
        let restarted = start().await;
        assert_eq!(restarted.status().version, 1);
        assert_eq!(restarted.reloader.rules().load().modes().in_force().len(), 1);
    }

    #[tokio::test]
    async fn only_changes_after_a_version_are_returned() {
        let settings = redis::Settings::default();
        let setup = redis::Setup::new("redis://127.0.0.1:1", &settings, TimeSource::Own, redis::Metrics::new(1));
        let in_redis = member_of(OverrideStore::Redis(setup.unwrap().connect(WorkerId(0))));
        let in_journal = member();
        for version in 1..=3 {
            in_journal.record_action(info()).await.unwrap();
            let change = Change { version, id: version.to_string(), ..Change::default() };
            in_redis.apply(&mut *in_redis.state.lock().await, &change);
        }
        for member in [in_journal, in_redis] {
            let versions = |after| {
                let changes = member.changes_after(after).unwrap();
                changes.iter().map(|change| change.version).collect::<Vec<_>>()
            };
            assert_eq!((versions(0), versions(1), versions(3)), (vec![1, 2, 3], vec![2, 3], vec![]));
        }
    }

    #[tokio::test]
    async fn only_expired_overrides_are_removed() {
        let (member, mut state) = (member(), SyncState::default());
        for (user, until) in [("bob", r#","u":1000000"#), ("eve", "")] {
            let text = format!(r#"{{"w":"1/year","a":"alice","t":1{until}}}"#);
            member.insert(&mut state.overrides, &format!("limit|api|user={user}"), 1, &text);
        }
        state.cursor.version = 1;
        assert_eq!(state.overrides.iter().count(), 2);
        member.remove_expired(&mut state).await;
        let left: Vec<String> = state.overrides.iter().map(|entry| entry.target.to_string()).collect();
        assert_eq!((left, state.cursor.version), (vec!["limit|api|user=eve".to_owned()], 2));
    }

    #[tokio::test]
    async fn a_snapshot_is_published_when_a_switch_expires() {
        let member = member();
        let Clock::Manual(micros) = &member.clock else { panic!("the clock is set by hand") };
        let until = Micros::new(micros.load(Relaxed) + 1_000_000);
        member.switch_this_instance(&Scope::Everything, Some("off"), Some(until), info()).await.unwrap();
        let snapshot = member.reloader.rules().load_full();
        assert_eq!(snapshot.modes().in_force().len(), 1);
        member.remove_expired(&mut *member.state.lock().await).await;
        assert!(Arc::ptr_eq(&snapshot, &member.reloader.rules().load_full()));
        micros.fetch_add(2_000_000, Relaxed);
        member.remove_expired(&mut *member.state.lock().await).await;
        assert!(member.reloader.rules().load().modes().in_force().is_empty());
    }
}
