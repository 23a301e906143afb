//! [`RedisReplication`]: overrides in Redis, which all instances follow. It polls for updates, applies and publishes
//! them, and resends changes that Redis does not have.

use std::{collections::VecDeque, sync::Arc};

use tokio::sync::Mutex;

use super::{
    ChangeError, ChangeInfo, ChangeRequest, MAX_RECENT_CHANGES,
    change::{AppliedChange, ChangeHead, NewWrite, all_versioned, check_values},
    context::Context,
    planned::Beginnings,
};
use crate::{
    engine::Overrides,
    store::{
        Redis, StoreError,
        overrides::{Change, Cursor, MAX_CHANGES, Update, Write, WriteOutcome},
    },
};

/// Maximum number of attempts to write a change while other instances write.
const MAX_ATTEMPTS: u32 = 10;

/// Overrides in Redis, as this instance has received them.
pub(super) struct RedisReplication {
    context: Arc<Context>,
    redis: Redis,
    /// Approximate number of changes that the audit log holds.
    audit_log_entries: usize,
    /// Locked during a synchronisation, which may wait for Redis.
    pub(super) state: Mutex<State>,
}

/// The overrides of this instance, and the last change in Redis that it has applied.
#[derive(Default)]
pub(super) struct State {
    pub(super) overrides: Overrides,
    pub(super) cursor: Cursor,
    /// The most recent changes, oldest first, to resend them.
    pub(super) recent: VecDeque<Change>,
    /// The last change before `recent`.
    pub(super) before_recent: Cursor,
}

impl State {
    /// Moves the cursor to a change that was applied.
    fn advance(&mut self, change: Change) {
        self.cursor.version = change.version;
        self.cursor.id = change.id;
    }
}

impl RedisReplication {
    pub(super) fn new(context: Arc<Context>, redis: Redis, audit_log_entries: usize) -> Self {
        Self { context, redis, audit_log_entries, state: Mutex::default() }
    }

    /// Loads the overrides. If Redis cannot be reached, [`poll`](Self::poll) tries again.
    pub(super) async fn start(&self) {
        let mut state = self.state.lock().await;
        let result = self.load(&mut state).await;
        self.context.note_sync(state.cursor.version, result);
    }

    /// Changes the overrides that are not in Redis, and publishes them.
    pub(super) async fn edit<T>(&self, edit: impl FnOnce(&mut Overrides) -> T) -> T {
        let mut state = self.state.lock().await;
        let edited = edit(&mut state.overrides);
        self.context.publish(&state.overrides);
        edited
    }

    /// Applies the changes since the last poll, writes planned overrides that have begun, and removes expired ones.
    pub(super) async fn poll(&self) {
        let mut state = self.state.lock().await;
        let result = self.synchronise(&mut state).await;
        self.context.note_sync(state.cursor.version, result);
        self.context.publish_expired_switches(&state.overrides);
        // If several instances try, one succeeds, and the others receive its change.
        let beginnings = self.context.beginnings(&state.overrides, None);
        let _ = self.begin(&mut state, beginnings).await;
        let expired = self.context.expired(&state.overrides);
        if !expired.is_empty() {
            let _ = self.write(&mut state, expired, &self.context.expiry_info()).await;
        }
    }

    /// Writes planned overrides that have begun, unless another instance has done so.
    async fn begin(&self, state: &mut State, beginnings: Beginnings) -> Result<(), ChangeError> {
        if beginnings.is_empty() {
            return Ok(());
        }
        let mut writes = beginnings.set;
        writes.extend(beginnings.remove);
        match self.write(state, writes, &self.context.beginning_info()).await {
            Ok(_) | Err(ChangeError::Conflict { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Makes all of the requested changes or none of them, and puts them in force on this instance.
    pub(super) async fn change(
        &self,
        requests: &[ChangeRequest],
        info: &ChangeInfo,
    ) -> Result<AppliedChange, ChangeError> {
        let mut state = self.state.lock().await;
        for _ in 0..MAX_ATTEMPTS {
            let beginnings = self.context.beginnings(&state.overrides, Some(requests));
            if beginnings.is_empty() {
                break;
            }
            self.begin(&mut state, beginnings).await?;
        }
        let writes = requests.iter().map(|request| request.to_write(info)).collect();
        self.write(&mut state, writes, info).await
    }

    /// Returns at most `max_changes` changes with versions below `before`, the most recent first.
    pub(super) async fn audit_log(&self, before: u64, max_changes: usize) -> Result<Vec<Change>, StoreError> {
        self.redis.override_log(before, max_changes).await
    }

    /// Returns the recent changes after a version, the oldest first; `None` during a synchronisation.
    pub(super) fn changes_after(&self, version: u64) -> Option<Vec<Change>> {
        let state = self.state.try_lock().ok()?;
        Some(state.recent.iter().filter(|change| change.version > version).cloned().collect())
    }

    /// Polls Redis once and applies its update. Resends changes if Redis is behind or has another history.
    pub(super) async fn synchronise(&self, state: &mut State) -> Result<(), StoreError> {
        loop {
            match self.redis.overrides_since(&state.cursor).await? {
                Update::Unchanged => return Ok(()),
                Update::Changes(changes) => {
                    let more = changes.len() == MAX_CHANGES;
                    for change in changes {
                        self.apply(state, &change);
                        state.advance(change);
                    }
                    self.context.publish(&state.overrides);
                    if !more {
                        return Ok(());
                    }
                }
                Update::Empty if state.cursor.version == 0 => return Ok(()),
                Update::Empty => return self.restore(state).await,
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

    /// Writes the overrides of this instance to a Redis that was emptied.
    async fn restore(&self, state: &State) -> Result<(), StoreError> {
        let info = ChangeInfo {
            author: "sluicegate".into(),
            reason: "restored after the store was emptied".into(),
            at: self.context.clock.now().get(),
        };
        let info = serde_json::to_string(&info).unwrap_or_default();
        if self.redis.restore_overrides(&state.cursor, &info, &all_versioned(&state.overrides)).await? {
            let [limits, plans, switches] = state.overrides.counts();
            tracing::warn!(
                limits,
                plans,
                switches,
                "the store had been emptied; restored the overrides of this instance"
            );
        }
        Ok(())
    }

    /// Resends the changes that this instance has applied and Redis does not have.
    ///
    /// Redis is behind this instance's cursor (after a failover), or other changes were written to it since. Its audit
    /// log contains the last change that both have, and everything after that is resent. Without a common change in the
    /// log, Redis has another history and nothing is resent. Resent changes keep their ids. They also keep their versions
    /// unless another change was written since. In that case they get new versions, and targets that the other change
    /// concerns are skipped, so the newer change stays in force.
    ///
    /// Returns `true` if Redis has changes that this instance does not have.
    async fn resend(&self, state: &State) -> Result<bool, StoreError> {
        let log = self.redis.override_log(u64::MAX, MAX_RECENT_CHANGES).await?;
        let Some(first) = log.first() else {
            return Ok(true);
        };
        let Some(common) = last_common_version(state, &log) else {
            return Ok(true);
        };
        let missing: Vec<Change> = state.recent.iter().filter(|change| change.version > common).cloned().collect();
        let newer: Vec<&Change> = log.iter().filter(|entry| entry.version > common).collect();
        if !missing.is_empty() {
            tracing::warn!(
                changes = missing.len(),
                "the store does not have the latest override changes; resending them"
            );
        }
        let mut cursor = Cursor { version: first.version, id: first.id.clone(), ..state.cursor.clone() };
        for Change { id, info, changes, .. } in missing {
            let mut writes = Vec::new();
            for change in changes {
                if !newer.iter().any(|entry| concerns(entry, &change.target)) {
                    writes.push(Write { target: change.target, text: change.after, expected: None });
                }
            }
            let outcome = self.redis.put_overrides((&id, &info), &writes, &cursor, self.audit_log_entries).await?;
            // If another instance has written meanwhile, that instance resends the remaining changes.
            let Some(WriteOutcome::Done(next, _)) = outcome else {
                break;
            };
            cursor = next;
        }
        Ok(!newer.is_empty())
    }

    async fn reload(&self, state: &mut State) -> Result<(), StoreError> {
        if state.cursor.version > 0 {
            tracing::info!(
                version = state.cursor.version,
                "the store has other overrides than this instance; loading all of them again"
            );
        }
        self.load(state).await?;
        self.context.publish(&state.overrides);
        Ok(())
    }

    /// Loads all overrides, and then the changes that were made during the load.
    async fn load(&self, state: &mut State) -> Result<(), StoreError> {
        let mut overrides = state.overrides.without_stored();
        let loaded = self.redis.overrides(|page| {
            for stored in &page {
                self.context.insert_stored(&mut overrides, stored);
            }
        });
        let cursor = loaded.await?;
        state.recent.clear();
        state.overrides = overrides;
        state.cursor = cursor.unwrap_or_default();
        state.before_recent = state.cursor.clone();
        match self.redis.overrides_since(&state.cursor).await? {
            Update::Changes(changes) => {
                for change in changes {
                    self.apply(state, &change);
                    state.advance(change);
                }
            }
            // The next poll handles these cases.
            Update::Unchanged | Update::Diverged | Update::Behind | Update::Empty => {}
        }
        Ok(())
    }

    /// Applies a change to the overrides of this instance, and keeps it to resend it.
    pub(super) fn apply(&self, state: &mut State, change: &Change) -> AppliedChange {
        let mut applied = AppliedChange::without_overrides(change);
        for one in &change.changes {
            let Some(read) = self.context.read(one, change.version) else {
                continue;
            };
            self.context.put(&mut state.overrides, &read.target, &read.after);
            applied.changes.push(read.into_changed());
        }
        if state.recent.len() >= MAX_RECENT_CHANGES
            && let Some(oldest) = state.recent.pop_front()
        {
            state.before_recent = Cursor { version: oldest.version, id: oldest.id, ..state.cursor.clone() };
        }
        state.recent.push_back(change.clone());
        applied
    }

    /// Writes a change, all of it or nothing, and puts it in force. `state` may also receive changes of other instances.
    async fn write(
        &self,
        state: &mut State,
        new_writes: Vec<NewWrite>,
        info: &ChangeInfo,
    ) -> Result<AppliedChange, ChangeError> {
        let mut writes = Vec::new();
        for checked in check_values(new_writes, &state.overrides, self.context.options)? {
            writes.push(Write { target: checked.target.to_string(), text: checked.text, expected: checked.expected });
        }
        let ChangeHead { id, info } = ChangeHead::new(info);
        for _ in 0..MAX_ATTEMPTS {
            match self.redis.put_overrides((&id, &info), &writes, &state.cursor, self.audit_log_entries).await? {
                Some(WriteOutcome::Done(cursor, change)) => {
                    let applied = self.apply(state, &change);
                    state.cursor = cursor;
                    self.context.note_sync(state.cursor.version, Ok(()));
                    if !writes.is_empty() {
                        self.context.publish(&state.overrides);
                    }
                    return Ok(applied);
                }
                Some(WriteOutcome::Conflict { target, version }) => {
                    return Err(ChangeError::Conflict { target, version });
                }
                // Redis has changes that this instance lacks, or lacks changes that this instance has.
                None => self.synchronise(state).await?,
            }
        }
        Err(StoreError::Rejected.into())
    }
}

/// Returns the version of the last change that both this instance and the log of the store contain.
fn last_common_version(state: &State, log: &[Change]) -> Option<u64> {
    for change in state.recent.iter().rev() {
        if contains(log, change.version, &change.id) {
            return Some(change.version);
        }
    }
    let before = &state.before_recent;
    if contains(log, before.version, &before.id) { Some(before.version) } else { None }
}

fn contains(log: &[Change], version: u64, id: &str) -> bool {
    log.iter().any(|entry| entry.version == version && entry.id == id)
}

fn concerns(change: &Change, target: &str) -> bool {
    change.changes.iter().any(|changed| changed.target == target)
}

#[cfg(test)]
mod tests {
    use super::{
        super::testing::{by_alice, member, member_of, redis as replication},
        *,
    };
    use crate::{
        metrics::WorkerId,
        store::{TimeSource, overrides::OverrideStore, redis},
    };

    fn instance() -> Arc<super::super::OverrideSync> {
        let settings = redis::Settings::default();
        let setup = redis::Setup::new("redis://127.0.0.1:1", &settings, TimeSource::Own, redis::Metrics::new(1));
        member_of(OverrideStore::Redis(setup.unwrap().connect(WorkerId(0))))
    }

    #[tokio::test]
    async fn the_change_before_the_recent_ones_is_known() {
        let (instance, mut state) = (instance(), State::default());
        for version in 1..=MAX_RECENT_CHANGES as u64 + 2 {
            let id = version.to_string();
            replication(&instance).apply(&mut state, &Change { version, id, ..Change::default() });
        }
        let Cursor { version, id, .. } = &state.before_recent;
        assert_eq!((state.recent.len(), *version, &**id), (MAX_RECENT_CHANGES, 2, "2"));
        assert_eq!(state.recent[0].version, 3);
    }

    #[tokio::test]
    async fn only_changes_after_a_version_are_returned() {
        let in_redis = instance();
        let in_journal = member();
        for version in 1..=3 {
            in_journal.record_action(by_alice()).await.unwrap();
            let change = Change { version, id: version.to_string(), ..Change::default() };
            let redis = replication(&in_redis);
            redis.apply(&mut *redis.state.lock().await, &change);
        }
        for member in [in_journal, in_redis] {
            let versions = |after| {
                let changes = member.changes_after(after).unwrap();
                changes.iter().map(|change| change.version).collect::<Vec<_>>()
            };
            assert_eq!((versions(0), versions(1), versions(3)), (vec![1, 2, 3], vec![2, 3], vec![]));
        }
    }
}
