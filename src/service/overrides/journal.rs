//! [`JournalReplication`]: overrides in the [`Journal`] of an instance without a shared store. It reads, follows and
//! writes the journal. [`MemberExchange`](super::MemberExchange) merges the overrides of other instances into it.

use std::{collections::VecDeque, path::PathBuf, sync::Arc};

use parking_lot::Mutex;
use tokio::sync::{Mutex as AsyncMutex, watch};

use super::{
    ChangeError, ChangeInfo, ChangeRequest, MAX_RECENT_CHANGES,
    change::{AppliedChange, ChangeHead, CheckedWrite, NewValue, NewWrite, all_versioned, check_values},
    context::Context,
    format,
    peer_limits::{self, ValidVersions},
    planned::Beginnings,
};
use crate::{
    engine::{Overrides, overrides::Target},
    metrics::chain,
    store::{
        StoreError,
        overrides::{Change, Cursor, Journal, JournalError, OverrideChange, OverrideStoreError, Versioned},
    },
};

/// Maximum number of attempts to read a journal while another process rewrites it.
const MAX_READS: u32 = 5;

/// Overrides in the journal of this instance.
pub(super) struct JournalReplication {
    pub(super) context: Arc<Context>,
    pub(super) journal: Arc<Mutex<Journal>>,
    /// The file of the journal, for the log.
    file: Option<PathBuf>,
    /// Locked while the journal is written.
    pub(super) state: AsyncMutex<State>,
    /// Position in the journal, for instances that exchange overrides.
    pub(super) position: watch::Sender<u64>,
}

/// The overrides of this instance, and the last change in the journal.
#[derive(Default)]
pub(super) struct State {
    pub(super) overrides: Overrides,
    pub(super) cursor: Cursor,
    /// Approximate bytes of the targets and texts of the overrides.
    pub(super) override_bytes: usize,
    /// Bytes of the most recent changes, oldest first, and their sum.
    recent: VecDeque<usize>,
    pub(super) recent_bytes: usize,
}

/// A journal that was read, with the overrides in it.
struct LoadedJournal {
    journal: Journal,
    overrides: Overrides,
    /// Bytes of the targets and texts of the overrides.
    override_bytes: usize,
    cursor: Cursor,
}

impl JournalReplication {
    pub(super) fn new(context: Arc<Context>, journal: Arc<Mutex<Journal>>, file: Option<PathBuf>) -> Arc<Self> {
        let (position, _) = watch::channel(0);
        Arc::new(Self { context, journal, file, state: AsyncMutex::default(), position })
    }

    /// Reads the journal for the first time.
    pub(super) async fn start(&self) -> Result<(), JournalError> {
        let mut state = self.state.lock().await;
        let unloaded = self.journal.lock().unloaded();
        let loaded = self.load(&unloaded, &state.overrides)?;
        *self.journal.lock() = loaded.journal;
        state.overrides = loaded.overrides;
        state.cursor = loaded.cursor;
        state.override_bytes = loaded.override_bytes;
        self.note_access();
        self.context.note_sync(state.cursor.version, Ok(()));
        Ok(())
    }

    /// Changes the overrides that are not in the journal, and publishes them.
    pub(super) async fn edit<T>(&self, edit: impl FnOnce(&mut Overrides) -> T) -> T {
        let mut state = self.state.lock().await;
        let edited = edit(&mut state.overrides);
        self.publish(&state);
        edited
    }

    /// Reads the journal again if another process has changed it, writes planned overrides that have begun, and removes
    /// expired ones.
    pub(super) async fn poll(self: &Arc<Self>) {
        let mut state = self.state.lock().await;
        self.follow(&mut state).await;
        self.context.publish_expired_switches(&state.overrides);
        if self.context.status().is_read_only {
            return;
        }
        // If the journal cannot be written, the next poll tries it again.
        let beginnings = self.context.beginnings(&state.overrides, None);
        let _ = self.begin(&mut state, beginnings).await;
        let expired = self.context.expired(&state.overrides);
        if !expired.is_empty() {
            let _ = self.write(&mut state, expired, &self.context.expiry_info()).await;
        }
    }

    /// Writes planned overrides that have begun.
    ///
    /// They are set and removed by two changes: a member of an earlier version does not merge a change with a target that
    /// it cannot read. If the second one is missing, it is written again.
    async fn begin(&self, state: &mut State, beginnings: Beginnings) -> Result<(), ChangeError> {
        let info = self.context.beginning_info();
        for writes in [beginnings.set, beginnings.remove] {
            if !writes.is_empty() {
                // They need no room, because the planned overrides are removed.
                let change = self.next_change(state, writes, &info)?;
                self.commit(state, &change).await?;
            }
        }
        Ok(())
    }

    /// Makes all of the requested changes or none of them, and puts them in force.
    pub(super) async fn change(
        &self,
        requests: &[ChangeRequest],
        info: &ChangeInfo,
    ) -> Result<AppliedChange, ChangeError> {
        let mut state = self.state.lock().await;
        loop {
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
    pub(super) fn audit_log(&self, before: u64, max_changes: usize) -> Vec<Change> {
        self.journal.lock().changes(before, max_changes)
    }

    /// Returns the recent changes after a version, the oldest first; `None` while the journal is written.
    pub(super) fn changes_after(&self, version: u64) -> Option<Vec<Change>> {
        if self.state.try_lock().ok()?.cursor.version <= version {
            return Some(Vec::new());
        }
        let mut changes = self.audit_log(u64::MAX, MAX_RECENT_CHANGES);
        changes.retain(|change| change.version > version);
        changes.reverse();
        Some(changes)
    }

    /// Returns the length of the journal in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.journal.lock().bytes()
    }

    /// Puts the overrides in force, and announces the position in the journal.
    pub(super) fn publish(&self, state: &State) {
        self.context.publish(&state.overrides);
        let position = self.journal.lock().position();
        self.position.send_if_modified(|latest| std::mem::replace(latest, position) != position);
    }

    /// Reads the journal again if another process has changed it or released its lock.
    async fn follow(self: &Arc<Self>, state: &mut State) {
        if !self.journal.lock().is_behind() {
            return;
        }
        let this = Arc::clone(self);
        let unloaded = self.journal.lock().unloaded();
        let overrides = state.overrides.clone();
        match tokio::task::spawn_blocking(move || this.load(&unloaded, &overrides)).await {
            Ok(Ok(loaded)) => {
                if self.journal.lock().continue_with(loaded.journal) {
                    state.overrides = loaded.overrides;
                    state.cursor = loaded.cursor;
                    state.override_bytes = loaded.override_bytes;
                    self.context.note_sync(state.cursor.version, Ok(()));
                    self.publish(state);
                }
            }
            Ok(Err(error)) => {
                if self.context.log_unreachable.should_log() {
                    tracing::warn!(
                        error = chain(&error),
                        "cannot read the override journal again; the last known overrides stay in force"
                    );
                }
            }
            // The task has panicked, which was logged.
            Err(_) => {}
        }
        self.note_access();
    }

    /// Reads a journal. The result includes the overrides in `before` that are not from the journal.
    fn load(&self, unloaded: &Journal, before: &Overrides) -> Result<LoadedJournal, JournalError> {
        let mut attempts = 0;
        loop {
            attempts += 1;
            let mut journal = unloaded.unloaded();
            let mut overrides = before.without_stored();
            let versions = ValidVersions::at(self.context.clock.now());
            let loaded = journal.load(|target, version, text| {
                let Some(text) = text else {
                    if let Ok(target) = Target::parse(target) {
                        overrides.remove(&target);
                    }
                    return;
                };
                let stored = (target.to_owned(), versions.repair(version), text.to_owned());
                self.context.insert_stored(&mut overrides, &stored);
            });
            match loaded {
                Ok(mut cursor) => {
                    cursor.version = versions.repair(cursor.version);
                    let override_bytes = overrides.iter().map(|entry| peer_limits::override_bytes(&entry)).sum();
                    return Ok(LoadedJournal { journal, overrides, override_bytes, cursor });
                }
                Err(JournalError::Changed { .. }) if attempts < MAX_READS => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Notes in the status and in the log whether another process holds the journal.
    fn note_access(&self) {
        let is_read_only = self.journal.lock().is_read_only();
        let was_read_only = self.context.set_read_only(is_read_only);
        if is_read_only && !was_read_only {
            tracing::warn!(
                path = self.file.as_ref().map(|file| file.display().to_string()),
                "another process holds the override journal: the overrides in it are in force, and cannot be changed \
                 until that process ends"
            );
        }
        if was_read_only && !is_read_only {
            tracing::info!("the override journal is free: overrides can be changed");
        }
    }

    /// Writes a change, all of it or nothing, and puts it in force.
    async fn write(
        &self,
        state: &mut State,
        writes: Vec<NewWrite>,
        info: &ChangeInfo,
    ) -> Result<AppliedChange, ChangeError> {
        let change = self.next_change(state, writes, info)?;
        if !peer_limits::may_be_made(&change, state.override_bytes) {
            return Err(ChangeError::Full);
        }
        self.commit(state, &change).await
    }

    /// Checks writes, and returns the change that makes all of them.
    fn next_change(&self, state: &State, writes: Vec<NewWrite>, info: &ChangeInfo) -> Result<Change, ChangeError> {
        let checked = check_values(writes, &state.overrides, self.context.options)?;
        next_change(state, ChangeHead::new(info), checked)
    }

    /// Writes a change to the journal, and puts it in force.
    async fn commit(&self, state: &mut State, change: &Change) -> Result<AppliedChange, ChangeError> {
        self.append(state, change).await?;
        let mut applied = AppliedChange::without_overrides(change);
        for one in &change.changes {
            let Some(read) = self.context.read(one, change.version) else {
                continue;
            };
            self.replace(state, &read.target, &read.after);
            applied.changes.push(read.into_changed());
        }
        state.add_recent(change);
        state.cursor.version = change.version;
        self.context.note_sync(state.cursor.version, Ok(()));
        if !change.changes.is_empty() {
            self.publish(state);
        }
        Ok(applied)
    }

    /// Writes a change to the journal. After an error, the change must not come into force, because it may not have
    /// been written.
    pub(super) async fn append(&self, state: &State, change: &Change) -> Result<(), OverrideStoreError> {
        let change = change.clone();
        self.write_journal(state, move |journal, count, before| journal.write(&change, count, before)).await
    }

    /// Writes overrides of another instance to the journal.
    pub(super) async fn append_overrides(
        &self,
        state: &State,
        newer: Vec<Versioned>,
    ) -> Result<(), OverrideStoreError> {
        self.write_journal(state, move |journal, count, before| journal.write_overrides(&newer, count, before)).await
    }

    /// Writes the journal on another thread. `write` receives the number of overrides, and a function that returns all
    /// of them.
    async fn write_journal(
        &self,
        state: &State,
        write: impl FnOnce(&mut Journal, usize, BeforeWrite) -> Result<(), JournalError> + Send + 'static,
    ) -> Result<(), OverrideStoreError> {
        let journal = Arc::clone(&self.journal);
        let overrides = state.overrides.clone();
        let cursor = state.cursor.clone();
        let written = tokio::task::spawn_blocking(move || {
            let count = overrides.counts().iter().sum::<usize>() + overrides.planned_count();
            write(&mut journal.lock(), count, Box::new(move || (cursor, all_versioned(&overrides))))
        });
        written.await.map_err(|_| StoreError::Missing)??;
        Ok(())
    }

    /// Gives a target its new value, and counts its bytes.
    pub(super) fn replace(&self, state: &mut State, target: &Target, value: &NewValue) {
        state.override_bytes = state.override_bytes.saturating_sub(bytes_of(&state.overrides, target));
        self.context.put(&mut state.overrides, target, value);
        state.override_bytes += bytes_of(&state.overrides, target);
    }
}

/// A function that returns the cursor and all overrides before a write, to rewrite the file of the journal.
type BeforeWrite = Box<dyn FnOnce() -> (Cursor, Vec<Versioned>)>;

impl State {
    /// Counts the bytes of a change among those of the recent ones.
    pub(super) fn add_recent(&mut self, change: &Change) {
        if self.recent.len() >= MAX_RECENT_CHANGES {
            self.recent_bytes -= self.recent.pop_front().unwrap_or_default();
        }
        let bytes = peer_limits::change_bytes(change);
        self.recent_bytes += bytes;
        self.recent.push_back(bytes);
    }
}

/// Builds the next change, with the same checks and fields as `overrides.lua` for Redis.
fn next_change(state: &State, head: ChangeHead, writes: Vec<CheckedWrite>) -> Result<Change, ChangeError> {
    let version = state.cursor.version + 1;
    let mut change = Change { version, id: head.id, info: head.info, changes: Vec::new() };
    for CheckedWrite { target, text, expected } in writes {
        let before = state.overrides.get(&target);
        let target = target.to_string();
        let version = match &before {
            Some(before) => before.version,
            None => 0,
        };
        if expected.is_some_and(|expected| expected != version) {
            return Err(ChangeError::Conflict { target, version });
        }
        change.changes.push(OverrideChange { target, before: before.as_ref().map(format::write), after: text });
    }
    Ok(change)
}

/// Returns the bytes of the override of a target, or 0 if there is none.
fn bytes_of(overrides: &Overrides, target: &Target) -> usize {
    match overrides.get(target) {
        Some(entry) => peer_limits::override_bytes(&entry),
        None => 0,
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use sluicegate_testing::test_log::TestLog;

    use super::{
        super::{
            OverrideSync,
            testing::{by_alice, journal as replication, member, member_with},
        },
        *,
    };
    use crate::engine::overrides::Scope;

    async fn start(path: &Path) -> Arc<OverrideSync> {
        let member = member_with(Journal::new(Some(path.to_owned())));
        member.start().await.unwrap();
        member
    }

    async fn set(member: &OverrideSync, mode: &str) -> Result<(), ChangeError> {
        let target = Target::Switch(Scope::Everything);
        let request = ChangeRequest { target, value: Some(mode.into()), until: None, expected: None };
        member.change(&[request], by_alice()).await.map(drop)
    }

    async fn follow(member: &OverrideSync) {
        replication(member).poll().await;
    }

    fn mode(member: &OverrideSync) -> Option<&'static str> {
        member.context.in_force.snapshot().load().modes().in_force().first().map(|(_, mode, _)| mode.name())
    }

    /// An earlier release has written it.
    #[tokio::test]
    async fn an_override_of_the_file_that_cannot_be_read_is_ignored_at_the_start() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("overrides");
        let text = |value: &str| serde_json::json!({"w": value, "a": "alice", "t": 1}).to_string();
        let huge = format!("{{a: &a [{}], b: [{}]}}", "x".repeat(1_000), vec!["*a"; 120_000].join(", "));
        let mut journal = Journal::new(Some(path.clone()));
        journal.load(|_, _, _| {}).unwrap();
        let kept =
            [("limit|api|user=huge".to_owned(), 1, text(&huge)), ("limit|api|user=one".to_owned(), 2, text("1/year"))];
        journal.write_overrides(&kept, 0, Default::default).unwrap();
        drop(journal);
        let member = start(&path).await;
        let state = replication(&member).state.lock().await;
        let targets: Vec<String> = state.overrides.iter().map(|entry| entry.target.to_string()).collect();
        assert_eq!((targets, member.context.unreadable.get()), (vec!["limit|api|user=one".to_owned()], 1));
        assert_eq!(state.override_bytes, "limit|api|user=one".len() + text("1/year").len());
    }

    #[tokio::test]
    async fn an_instance_follows_the_file_of_another_one_and_takes_it_over() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("overrides");
        let first = start(&path).await;
        set(&first, "off").await.unwrap();
        let log = TestLog::start();
        let second = start(&path).await;
        assert_eq!((mode(&second), second.status().is_read_only), (Some("off"), true));
        for _ in 0..3 {
            assert!(matches!(set(&second, "deny").await, Err(ChangeError::Journal(JournalError::Locked { .. }))));
            follow(&second).await;
        }
        assert_eq!(mode(&second), Some("off"));
        set(&first, "shadow").await.unwrap();
        follow(&second).await;
        assert_eq!((mode(&second), second.status().version), (Some("shadow"), 2));
        drop(first);
        follow(&second).await;
        assert!(!second.status().is_read_only);
        set(&second, "deny").await.unwrap();
        let log = log.text();
        assert_eq!(log.matches("another process holds the override journal").count(), 1, "{log}");
        assert_eq!(log.matches("the override journal is free").count(), 1, "{log}");
        drop(second);
        assert_eq!(mode(&*start(&path).await), Some("deny"));
    }

    #[tokio::test]
    async fn a_removed_file_changes_nothing_and_is_written_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("overrides");
        let member = start(&path).await;
        set(&member, "off").await.unwrap();
        fs::remove_file(&path).unwrap();
        follow(&member).await;
        assert_eq!(mode(&member), Some("off"));
        member.record_action(by_alice()).await.unwrap();
        drop(member);
        let restarted = start(&path).await;
        assert_eq!((mode(&restarted), restarted.status().version), (Some("off"), 2));
    }

    #[tokio::test]
    async fn overrides_are_loaded_again_after_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("overrides");
        set(&*start(&path).await, "off").await.unwrap();
        let restarted = start(&path).await;
        assert_eq!(restarted.status().version, 1);
        assert_eq!(restarted.context.in_force.snapshot().load().modes().in_force().len(), 1);
    }

    #[tokio::test]
    async fn only_expired_overrides_are_removed() {
        let member = member();
        let journal = replication(&member);
        let mut state = journal.state.lock().await;
        for (user, until) in [("bob", r#","u":1000000"#), ("eve", "")] {
            let text = format!(r#"{{"w":"1/year","a":"alice","t":1{until}}}"#);
            member.context.insert_stored(&mut state.overrides, &(format!("limit|api|user={user}"), 1, text));
        }
        state.cursor.version = 1;
        assert_eq!(state.overrides.iter().count(), 2);
        drop(state);
        journal.poll().await;
        let state = journal.state.lock().await;
        let left: Vec<String> = state.overrides.iter().map(|entry| entry.target.to_string()).collect();
        assert_eq!((left, state.cursor.version), (vec!["limit|api|user=eve".to_owned()], 2));
    }
}
