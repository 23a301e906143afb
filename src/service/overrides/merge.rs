//! Exchange of overrides between instances without a shared store. Each instance keeps all overrides in its journal.
//!
//! An instance reads the changes of another one after a position in its journal, or everything if it has no position
//! ([`OverrideSync::changes_for_peer`]), and merges them page by page ([`OverrideSync::merge_page`]). Of two values of
//! one target, the one with the higher version is in force on all instances, and of the same version the greater text.
//! A version is one more than the highest that the instance knew, so a change replaces everything that its author could
//! see. Versions that are too high for the clock are not merged: they would leave no higher ones (`peer_limits`).
//!
//! Two operators who change one target at the same time on different instances cannot see each other's change. The audit
//! log then notes in the reason of the change which of them is in force.

use std::collections::BTreeSet;

use tokio::sync::watch;

use super::{
    ChangeError, ChangeInfo, MAX_REASON_BYTES, OverrideSync, SyncState, all_versioned, format, lock,
    peer_limits::{self, ValidVersions, Validity},
    rule_sets::{self, PeerRuleSets},
};
use crate::{
    engine::overrides::{RuleSetSlot, Target},
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

/// The result of merging the changes of another instance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Merged {
    /// Values that are never merged.
    pub ignored: Ignored,
    /// Whether values can only be merged later, because their versions are too high for the clock of this instance, or
    /// because a rule set is missing.
    pub is_deferred: bool,
}

/// Numbers of values that were not merged, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ignored {
    /// Changes and overrides with too high a version.
    pub versions: u64,
    /// Rule sets that do not have their digest.
    pub rule_sets: u64,
    /// Changes and overrides that no operator could have made.
    pub overrides: u64,
    /// Changes and overrides above the maximum number of bytes.
    pub over_budget: u64,
}

impl Merged {
    /// Adds the values of another page.
    pub fn add(&mut self, other: Self) {
        self.is_deferred |= other.is_deferred;
        let Ignored { versions, rule_sets, overrides, over_budget } = other.ignored;
        self.ignored.versions += versions;
        self.ignored.rule_sets += rule_sets;
        self.ignored.overrides += overrides;
        self.ignored.over_budget += over_budget;
    }
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
        let mut overrides = if recent.is_some() { Vec::new() } else { all_versioned(&state.overrides) };
        let mut changes = recent.unwrap_or_else(|| journal.recent_changes());
        // Other instances would not merge versions that are never valid.
        let versions = ValidVersions::at(self.clock.now());
        for change in &mut changes {
            change.version = versions.repair(change.version);
        }
        for (_, version, _) in &mut overrides {
            *version = versions.repair(*version);
        }
        let named = named_rule_sets(&state);
        let mut digests = BTreeSet::new();
        for change in changes.iter().flat_map(|change| &change.changes) {
            if let Some(text) = &change.after {
                digests.extend(rule_set_digest(&change.target, text));
            }
        }
        for (target, _, text) in &overrides {
            digests.extend(rule_set_digest(target, text));
        }
        let mut rule_sets = Vec::new();
        for digest in digests.intersection(&named) {
            if let Ok(Some(text)) = journal.get_rule_set(digest) {
                rule_sets.push((digest.clone(), text));
            }
        }
        PeerOverrides { position: journal.position(), changes, overrides, rule_sets }
    }

    /// Merges all changes of another instance, and puts the newer values in force.
    ///
    /// # Errors
    ///
    /// Returns an error if the journal cannot be written. Merging the same changes again is safe.
    pub async fn merge(&self, peer: PeerOverrides) -> Result<Merged, OverrideStoreError> {
        let mut rule_sets = PeerRuleSets::default();
        let mut merged = self.merge_page(peer, &mut rule_sets).await?;
        merged.add(self.end_merge(&mut rule_sets).await?);
        Ok(merged)
    }

    /// Merges a part of the changes of another instance. They come into force with [`end_merge`](Self::end_merge), which
    /// must be called after the last part, also after an error.
    ///
    /// # Errors
    ///
    /// Returns an error if the journal cannot be written. Merging the same changes again is safe.
    pub async fn merge_page(
        &self,
        page: PeerOverrides,
        rule_sets: &mut PeerRuleSets,
    ) -> Result<Merged, OverrideStoreError> {
        let mut merged = Merged::default();
        if self.store.is_shared() {
            return Ok(merged);
        }
        merged.ignored.rule_sets = rule_sets.add(page.rule_sets).await;
        let versions = ValidVersions::at(self.clock.now());
        for change in page.changes {
            match versions.validity(change.version) {
                Validity::Valid => self.merge_change(change, versions, rule_sets, &mut merged).await?,
                Validity::Later => merged.is_deferred = true,
                Validity::Never => merged.ignored.versions += 1,
            }
            // Decisions and operators must not wait for many changes.
            tokio::task::yield_now().await;
        }
        let mut overrides = Vec::new();
        for entry in page.overrides {
            match versions.validity(entry.1) {
                Validity::Valid => overrides.push(entry),
                Validity::Later => merged.is_deferred = true,
                Validity::Never => merged.ignored.versions += 1,
            }
        }
        self.merge_overrides(overrides, versions, rule_sets, &mut merged).await?;
        Ok(merged)
    }

    async fn merge_change(
        &self,
        change: Change,
        versions: ValidVersions,
        rule_sets: &mut PeerRuleSets,
        merged: &mut Merged,
    ) -> Result<(), OverrideStoreError> {
        let OverrideStore::Journal(journal) = &self.store else {
            return Ok(());
        };
        let mut state = self.state.lock().await;
        if !peer_limits::is_valid_change(&change, &state.overrides, self.options) {
            merged.ignored.overrides += 1;
            return Ok(());
        }
        // The lock must not be held while the journal is written.
        let resolved = newer_part(&lock(journal), &state, versions, change);
        let Some(change) = resolved else {
            return Ok(());
        };
        if !peer_limits::has_room(&change, state.override_bytes, state.recent_bytes) {
            merged.ignored.over_budget += 1;
            merged.is_deferred = true;
            return Ok(());
        }
        for OverrideChange { target, after, .. } in &change.changes {
            if let Some(text) = after {
                self.store_rule_set(&state, target, text, rule_sets).await?;
            }
        }
        let (_, change) = self.write_journal(journal, &state, change).await.map_err(|error| match error {
            ChangeError::Journal(error) => OverrideStoreError::Journal(error),
            _ => OverrideStoreError::Redis(StoreError::missing()),
        })?;
        self.apply(&mut state, &change);
        state.cursor.version = state.cursor.version.max(change.version);
        Ok(())
    }

    async fn merge_overrides(
        &self,
        overrides: Vec<Versioned>,
        versions: ValidVersions,
        rule_sets: &mut PeerRuleSets,
        merged: &mut Merged,
    ) -> Result<(), OverrideStoreError> {
        let OverrideStore::Journal(journal) = &self.store else {
            return Ok(());
        };
        let mut state = self.state.lock().await;
        let mut newer = Vec::new();
        for (target, version, text) in overrides {
            let known = current(&lock(journal), &state, versions, &target);
            if !is_newer(&lock(journal), (version, Some(&text)), &known) {
                continue;
            }
            if !peer_limits::is_valid_override(&target, &text, &state.overrides, self.options) {
                merged.ignored.overrides += 1;
            } else if !peer_limits::has_room_for_override(&text, state.override_bytes) {
                merged.ignored.over_budget += 1;
                merged.is_deferred = true;
            } else {
                self.store_rule_set(&state, &target, &text, rule_sets).await?;
                newer.push((target, version, text));
            }
        }
        if newer.is_empty() {
            return Ok(());
        }
        self.write_journal_overrides(journal, &state, newer.clone()).await?;
        for (target, version, text) in &newer {
            self.replace(&mut state, target, *version, Some(text));
            state.cursor.version = state.cursor.version.max(*version);
        }
        Ok(())
    }

    /// Puts the merged values in force, and deletes rule sets that they no longer name.
    ///
    /// # Errors
    ///
    /// Returns an error if a rule set cannot be stored.
    pub async fn end_merge(&self, rule_sets: &mut PeerRuleSets) -> Result<Merged, OverrideStoreError> {
        let mut merged = Merged::default();
        if self.store.is_shared() {
            return Ok(merged);
        }
        let state = self.state.lock().await;
        let named = named_rule_sets(&state);
        let mut missing = BTreeSet::new();
        for digest in &named {
            if self.store.get_rule_set(digest).await?.is_some() {
                continue;
            }
            match rule_sets.get(digest) {
                Some(text) => self.store.put_rule_set(digest, text).await?,
                None => drop(missing.insert(digest.clone())),
            }
        }
        for digest in rule_sets.obsolete.difference(&named) {
            // If the deletion fails, an unused rule set stays, which does no harm.
            let _ = self.store.delete_rule_set(digest).await;
        }
        merged.is_deferred = !missing.is_empty();
        rule_sets.end_exchange(missing);
        self.note_sync(&state, Ok(()));
        self.publish(&state);
        Ok(merged)
    }

    /// Stores the rule set that an override names, before the override comes into force.
    async fn store_rule_set(
        &self,
        state: &SyncState,
        target: &str,
        text: &str,
        rule_sets: &mut PeerRuleSets,
    ) -> Result<(), OverrideStoreError> {
        if !target.starts_with(RULES) {
            return Ok(());
        }
        rule_sets.obsolete.extend(named_rule_sets(state));
        let Some(digest) = rule_set_digest(target, text) else {
            return Ok(());
        };
        if self.store.get_rule_set(&digest).await?.is_none()
            && let Some(text) = rule_sets.get(&digest)
        {
            self.store.put_rule_set(&digest, text).await?;
            rule_sets.obsolete.insert(digest);
        }
        Ok(())
    }
}

/// Returns the part of a change that is newer than the values of this instance; `None` if there is none.
fn newer_part(journal: &Journal, state: &SyncState, versions: ValidVersions, change: Change) -> Option<Change> {
    if journal.contains(&change.id) {
        return None;
    }
    let (mut kept, mut conflicts) = (Vec::new(), Vec::new());
    // The log may have contained such a change already.
    let is_older_than_log = change.version < journal.oldest_version();
    let is_action = change.changes.is_empty() && !is_older_than_log;
    for OverrideChange { target, before, after } in change.changes {
        let known = current(journal, state, versions, &target);
        let is_newer = is_newer(journal, (change.version, after.as_ref()), &known);
        let (version, text) = known;
        // The author has not seen the value of this instance, or the other way round.
        let is_conflict = text != before && text != after && version > 0 && !is_older_than_log;
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

/// Returns the value of a target on this instance.
fn current(journal: &Journal, state: &SyncState, versions: ValidVersions, target: &str) -> Current {
    let entry = Target::parse(target).ok().and_then(|target| state.overrides.get(&target));
    match entry {
        Some(entry) => (versions.repair(entry.version), Some(format::write(&entry))),
        None => (versions.repair(journal.removed_at(target)), None),
    }
}

/// Returns whether a value of another instance is newer than that of this one.
fn is_newer(journal: &Journal, (version, text): (u64, Option<&String>), known: &Current) -> bool {
    match known {
        // A value that is older than all recent changes and does not exist here was removed before them.
        (0, None) => version >= journal.oldest_version(),
        (known_version, known_text) => (version, text) > (*known_version, known_text.as_ref()),
    }
}

/// Adds a note to the reason of a change, as far as it fits.
fn with_conflicts(info: &str, conflicts: &[String]) -> String {
    let mut info: ChangeInfo = serde_json::from_str(info).unwrap_or_default();
    let separator = if info.reason.is_empty() { "" } else { " " };
    let note = format!("{separator}[{}]", conflicts.join("; "));
    let end = (0..=note.len().min(MAX_REASON_BYTES)).rev().find(|end| note.is_char_boundary(*end)).unwrap_or_default();
    info.reason.push_str(&note[..end]);
    serde_json::to_string(&info).unwrap_or_default()
}

/// Beginning of the targets of overrides that name rule sets.
const RULES: &str = "rules|";

/// Returns the digest of the rule set that an override names.
fn rule_set_digest(target: &str, text: &str) -> Option<String> {
    let is_rules = target.starts_with(RULES);
    let entry = is_rules.then(|| format::read(target, 0, text)).flatten()?;
    rule_sets::digest_in(&entry.value).map(str::to_owned)
}

/// Returns the digests of the rule sets that the overrides name.
fn named_rule_sets(state: &SyncState) -> BTreeSet<String> {
    let mut named = BTreeSet::new();
    for slot in RuleSetSlot::ALL {
        if let Some(entry) = state.overrides.rules(slot) {
            named.extend(rule_sets::digest_in(&entry.value).map(str::to_owned));
        }
    }
    named
}

#[cfg(test)]
pub(super) mod tests;
