//! Reading, following and writing the [`Journal`], which holds the overrides of an instance without a shared store.

use std::sync::{Arc, Mutex};

use super::{
    ChangeError, OverrideSync, SyncState, all_versioned, lock,
    peer_limits::{self, ValidVersions},
    sync,
};
use crate::{
    engine::Overrides,
    store::{
        StoreError,
        overrides::{Change, Cursor, Journal, JournalError, OverrideStore, OverrideStoreError, Versioned},
    },
};

/// Maximum number of attempts to read a journal while another process rewrites it.
const MAX_READS: u32 = 5;

/// A journal that was read, with the overrides in it.
pub(super) struct LoadedJournal {
    journal: Journal,
    overrides: Overrides,
    /// Bytes of the targets and texts of the overrides.
    override_bytes: usize,
    cursor: Cursor,
}

impl OverrideSync {
    /// Reads the journal for the first time.
    pub(super) fn start_journal(&self, journal: &Mutex<Journal>, state: &mut SyncState) -> Result<(), JournalError> {
        let unloaded = lock(journal).unloaded();
        let loaded = self.load_journal(&unloaded, &state.overrides)?;
        *lock(journal) = loaded.journal;
        (state.overrides, state.cursor) = (loaded.overrides, loaded.cursor);
        state.override_bytes = loaded.override_bytes;
        self.note_access(journal);
        Ok(())
    }

    /// Reads the journal again if another process has changed it or released its lock.
    pub(super) async fn follow_journal(self: &Arc<Self>, journal: &Arc<Mutex<Journal>>, state: &mut SyncState) {
        if !lock(journal).is_behind() {
            return;
        }
        let (this, unloaded, overrides) = (Arc::clone(self), lock(journal).unloaded(), state.overrides.clone());
        let loaded = tokio::task::spawn_blocking(move || this.load_journal(&unloaded, &overrides)).await;
        match loaded {
            Ok(Ok(loaded)) => {
                if lock(journal).continue_with(loaded.journal) {
                    (state.overrides, state.cursor) = (loaded.overrides, loaded.cursor);
                    state.override_bytes = loaded.override_bytes;
                    self.note_sync(state, Ok(()));
                    self.publish(state);
                }
            }
            Ok(Err(error)) => {
                if self.log_unreachable.should_log() {
                    let error = crate::metrics::chain(&error);
                    tracing::warn!(
                        error,
                        "cannot read the override journal again; the last known overrides stay in force"
                    );
                }
            }
            // The task has panicked, which was logged.
            Err(_) => {}
        }
        self.note_access(journal);
    }

    /// Reads a journal. The result includes the overrides in `before` that are not from the store.
    fn load_journal(&self, unloaded: &Journal, before: &Overrides) -> Result<LoadedJournal, JournalError> {
        let mut attempts = 0;
        loop {
            attempts += 1;
            let (mut journal, mut overrides) = (unloaded.unloaded(), before.without_stored());
            let versions = ValidVersions::at(self.clock.now());
            let loaded = journal.load(|target, version, text| match text {
                Some(text) => drop(self.insert(&mut overrides, target, versions.repair(version), text)),
                None => sync::remove(&mut overrides, target),
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
    fn note_access(&self, journal: &Mutex<Journal>) {
        let is_read_only = lock(journal).is_read_only();
        let was_read_only = std::mem::replace(&mut lock(&self.status).is_read_only, is_read_only);
        if is_read_only && !was_read_only {
            tracing::warn!(
                path = self.settings.file.as_ref().map(|file| file.display().to_string()),
                "another process holds the override journal: its overrides are in force, and read-only until it ends"
            );
        }
        if was_read_only && !is_read_only {
            tracing::info!("the override journal is free: overrides can be changed");
        }
    }

    /// Writes a change to the journal.
    pub(super) async fn write_journal(
        &self,
        journal: &Arc<Mutex<Journal>>,
        state: &SyncState,
        change: Change,
    ) -> Result<(Cursor, Change), ChangeError> {
        let (journal, line) = (Arc::clone(journal), change.clone());
        let (overrides, cursor) = (state.overrides.clone(), state.cursor.clone());
        let count = overrides.counts().iter().sum();
        let written = tokio::task::spawn_blocking(move || {
            lock(&journal).write(&line, count, || (cursor, all_versioned(&overrides)))
        });
        // A change that may not have been written must not come into force.
        written.await.map_err(|_| StoreError::Missing)??;
        Ok((Cursor { version: change.version, ..state.cursor.clone() }, change))
    }

    /// Writes overrides of another instance to the journal.
    pub(super) async fn write_journal_overrides(
        &self,
        journal: &Arc<Mutex<Journal>>,
        state: &SyncState,
        newer: Vec<Versioned>,
    ) -> Result<(), OverrideStoreError> {
        let journal = Arc::clone(journal);
        let (overrides, cursor) = (state.overrides.clone(), state.cursor.clone());
        let count = overrides.counts().iter().sum();
        let written = tokio::task::spawn_blocking(move || {
            lock(&journal).write_overrides(&newer, count, || (cursor, all_versioned(&overrides)))
        });
        written.await.map_err(|_| StoreError::Missing)??;
        Ok(())
    }

    /// Returns the length of the journal in bytes; 0 without one.
    pub(super) fn journal_bytes(&self) -> u64 {
        match &self.store {
            OverrideStore::Journal(journal) => lock(journal).bytes(),
            OverrideStore::Redis(_) => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use sluicegate_testing::test_log::TestLog;

    use super::{
        super::{ChangeInfo, ChangeRequest, merge::tests::member_of},
        *,
    };
    use crate::engine::overrides::{Scope, Target};

    async fn start(path: &Path) -> Arc<OverrideSync> {
        let journal = Journal::new(Some(path.to_owned()));
        let member = member_of(OverrideStore::Journal(Arc::new(Mutex::new(journal))));
        member.start().await.unwrap();
        member
    }

    async fn set(member: &OverrideSync, mode: &str) -> Result<(), ChangeError> {
        let target = Target::Switch(Scope::Everything);
        let request = ChangeRequest { target, value: Some(mode.into()), until: None, expected: None };
        let info = ChangeInfo { author: "alice".into(), ..ChangeInfo::default() };
        member.change(&[request], info).await.map(drop)
    }

    /// One poll.
    async fn follow(member: &Arc<OverrideSync>) {
        let OverrideStore::Journal(journal) = &member.store else { panic!("it has a journal") };
        let mut state = member.state.lock().await;
        member.follow_journal(journal, &mut state).await;
    }

    fn mode(member: &OverrideSync) -> Option<&'static str> {
        member.reloader.rules().load().modes().in_force().first().map(|(_, mode, _)| mode.name())
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
        let state = member.state.lock().await;
        let targets: Vec<String> = state.overrides.iter().map(|entry| entry.target.to_string()).collect();
        assert_eq!((targets, member.unreadable.get()), (vec!["limit|api|user=one".to_owned()], 1));
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
        member.record_action(ChangeInfo { author: "alice".into(), ..ChangeInfo::default() }).await.unwrap();
        drop(member);
        let restarted = start(&path).await;
        assert_eq!((mode(&restarted), restarted.status().version), (Some("off"), 2));
    }
}
