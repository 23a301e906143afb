//! Exchange of overrides between instances without a shared store. Each instance keeps all overrides in its journal.
//!
//! An instance reads the changes of another one after a position in its journal, or everything if it has no position
//! ([`OverrideSync::changes_for_peer`]), and merges them ([`OverrideSync::merge`]). Of two values of one target, the one
//! with the higher version is in force on all instances, and of the same version the greater text. A version is one more
//! than the highest that the instance knew, so a change replaces everything that its author could see.
//!
//! Two operators who change one target at the same time on different instances cannot see each other's change. The audit
//! log then says in the reason of the change which of them is in force.

use tokio::sync::watch;

use super::{ChangeError, ChangeInfo, OverrideSync, SyncState, all_versioned, format, lock};
use crate::{
    engine::overrides::Target,
    store::{
        StoreError,
        overrides::{Change, Journal, OverrideChange, OverrideStore, OverrideStoreError, Versioned},
    },
};

/// Changes of another instance.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerOverrides {
    /// Position of the other instance after these changes.
    pub position: u64,
    /// The changes, the oldest first.
    pub changes: Vec<Change>,
    /// All overrides, if the reader had no position.
    pub overrides: Vec<Versioned>,
    /// Digest and text of each rule set that the changes and overrides name.
    pub rule_sets: Vec<(String, String)>,
}

/// The value of a target on this instance: its version, and its text unless it was removed.
type Current = (u64, Option<String>);

impl OverrideSync {
    /// Returns the position in the journal: the number of changes that this process has read or written.
    ///
    /// Returns `None` if the overrides are shared through Redis.
    #[must_use]
    pub fn position(&self) -> Option<u64> {
        match &self.store {
            OverrideStore::Journal(journal) => Some(lock(journal).position()),
            OverrideStore::Redis(_) => None,
        }
    }

    /// Returns a receiver of the position, which changes with every change of the overrides.
    #[must_use]
    pub fn positions(&self) -> watch::Receiver<u64> {
        self.position.subscribe()
    }

    /// Returns the changes after a position, or all overrides and the recent changes without one.
    pub async fn changes_for_peer(&self, after: Option<u64>) -> PeerOverrides {
        let OverrideStore::Journal(journal) = &self.store else {
            return PeerOverrides::default();
        };
        let state = self.state.lock().await;
        let journal = lock(journal);
        let recent = after.and_then(|after| journal.changes_after(after));
        let overrides = if recent.is_some() { Vec::new() } else { all_versioned(&state.overrides) };
        let changes = recent.unwrap_or_else(|| journal.recent_changes());
        let texts = changes.iter().flat_map(|change| &change.changes);
        let texts = texts.filter_map(|change| Some((change.target.as_str(), change.after.as_deref()?)));
        let texts = texts.chain(overrides.iter().map(|(target, _, text)| (target.as_str(), text.as_str())));
        let mut digests: Vec<String> = texts.filter_map(|(target, text)| rule_set_digest(target, text)).collect();
        digests.sort_unstable();
        digests.dedup();
        let rule_set = |digest: String| {
            let text = journal.get_rule_set(&digest).ok()??;
            Some((digest, text))
        };
        let rule_sets = digests.into_iter().filter_map(rule_set).collect();
        PeerOverrides { position: journal.position(), changes, overrides, rule_sets }
    }

    /// Merges the changes of another instance, and puts the newer values in force.
    ///
    /// # Errors
    ///
    /// Returns an error if the journal cannot be written. Merging the same changes again is safe.
    pub async fn merge(&self, peer: PeerOverrides) -> Result<(), OverrideStoreError> {
        let OverrideStore::Journal(journal) = &self.store else {
            return Ok(());
        };
        for (digest, text) in &peer.rule_sets {
            if self.store.get_rule_set(digest).await?.is_none() {
                self.store.put_rule_set(digest, text).await?;
            }
        }
        let mut state = self.state.lock().await;
        let mut is_changed = false;
        for change in peer.changes {
            // The lock must not be held while the journal is written.
            let resolved = self.resolve(&lock(journal), &state, change);
            if let Some(change) = resolved {
                let (_, change) = self.write_journal(journal, &state, change).await.map_err(|error| match error {
                    ChangeError::Journal(error) => OverrideStoreError::Journal(error),
                    _ => OverrideStoreError::Redis(StoreError::Rejected),
                })?;
                self.apply(&mut state, &change);
                state.cursor.version = state.cursor.version.max(change.version);
                is_changed = true;
            }
        }
        let newer = newer_overrides(&lock(journal), &state, peer.overrides);
        if !newer.is_empty() {
            lock(journal).write_overrides(&newer)?;
            for (target, version, text) in &newer {
                self.insert(&mut state.overrides, target, *version, text);
                state.cursor.version = state.cursor.version.max(*version);
            }
            is_changed = true;
        }
        if is_changed {
            self.note_sync(&state, Ok(()));
            self.publish(&state);
        }
        Ok(())
    }

    /// Returns the part of a change that is newer than the values of this instance; `None` if nothing is.
    fn resolve(&self, journal: &Journal, state: &SyncState, change: Change) -> Option<Change> {
        if journal.contains(&change.id) {
            return None;
        }
        let (mut kept, mut conflicts) = (Vec::new(), Vec::new());
        let is_action = change.changes.is_empty();
        for OverrideChange { target, before, after } in change.changes {
            let (version, text) = current(journal, state, &target);
            let is_newer = (change.version, &after) > (version, &text);
            // The author has not seen the value of this instance, or the other way round.
            let is_conflict = text != before && text != after && version > 0;
            if is_conflict {
                let outcome = if is_newer { "replaced" } else { "is not in force because of" };
                conflicts.push(format!("{outcome} change {version} of {target}, made at the same time"));
            }
            if is_newer {
                kept.push(OverrideChange { target, before: text, after });
            }
        }
        if kept.is_empty() && conflicts.is_empty() && !is_action {
            return None;
        }
        let info = if conflicts.is_empty() { change.info } else { with_conflicts(&change.info, &conflicts) };
        Some(Change { changes: kept, info, ..change })
    }
}

/// Returns the value of a target on this instance.
fn current(journal: &Journal, state: &SyncState, target: &str) -> Current {
    let entry = Target::parse(target).ok().and_then(|target| state.overrides.get(&target));
    match entry {
        Some(entry) => (entry.version, Some(format::write(&entry))),
        None => (journal.removed_at(target), None),
    }
}

/// Returns the overrides of another instance that are newer than those of this one.
fn newer_overrides(journal: &Journal, state: &SyncState, overrides: Vec<Versioned>) -> Vec<Versioned> {
    // An override that is older than all recent changes and does not exist here was removed before them.
    let oldest = journal.oldest_version();
    let is_newer = |(target, version, text): &Versioned| match current(journal, state, target) {
        (0, None) => *version >= oldest,
        (known, known_text) => (*version, Some(text)) > (known, known_text.as_ref()),
    };
    overrides.into_iter().filter(is_newer).collect()
}

/// Adds a note to the reason of a change.
fn with_conflicts(info: &str, conflicts: &[String]) -> String {
    let mut info: ChangeInfo = serde_json::from_str(info).unwrap_or_default();
    let separator = if info.reason.is_empty() { "" } else { " " };
    info.reason = format!("{}{separator}[{}]", info.reason, conflicts.join("; "));
    serde_json::to_string(&info).unwrap_or_default()
}

/// Returns the digest of the rule set that an override names.
fn rule_set_digest(target: &str, text: &str) -> Option<String> {
    let is_rules = target.starts_with("rules|");
    let entry = is_rules.then(|| format::read(target, 0, text)).flatten()?;
    entry.value.split(' ').next().map(str::to_owned)
}
