//! [`MemberExchange`]: exchange of overrides between instances without a shared store. Each instance keeps all overrides
//! in its journal.
//!
//! An instance reads the changes of another one after a position in its journal, or everything if it has no position
//! ([`MemberExchange::changes_for_peer`]), and merges them page by page ([`MemberExchange::merge_page`]). Of two values of
//! one target, the one with the higher version is in force on all instances, and of the same version the greater text.
//! A version is one more than the highest that the instance knew, so a change replaces everything that its author could
//! see. Versions that are too high for the clock are not merged: they would leave no higher ones (`peer_limits`).
//!
//! Two operators who change one target at the same time on different instances cannot see each other's change. The audit
//! log then notes in the reason of the change which of them is in force.

use std::{collections::BTreeSet, sync::Arc};

use parking_lot::MutexGuard;
use tokio::sync::watch;

use super::{
    ChangeInfo, MAX_REASON_BYTES,
    change::{NewValue, all_versioned},
    format,
    journal::{JournalReplication, State},
    peer_limits::{self, ReceivedChange, ReceivedOverride, ReceivedValue, ValidVersions, Validity},
    rule_sets::{self, PeerRuleSets},
};
use crate::{
    engine::{
        Override,
        overrides::{RuleSetSlot, Target},
    },
    store::overrides::{Change, Journal, OverrideChange, OverrideStore, OverrideStoreError, Versioned},
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
    /// Digest and text of each rule set that the changes and overrides name and the other instance still uses.
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

/// The value of a target on this instance.
struct Known {
    /// The version of the override, or of its removal; 0 if there was none.
    version: u64,
    /// The text, or `None` if there is no override.
    text: Option<String>,
}

/// The exchange of the overrides in the journal with other instances.
#[derive(Clone)]
pub struct MemberExchange {
    replication: Arc<JournalReplication>,
    /// The journal as the store of rule sets.
    store: OverrideStore,
}

impl MemberExchange {
    pub(super) fn new(replication: Arc<JournalReplication>) -> Self {
        let store = OverrideStore::Journal(Arc::clone(&replication.journal));
        Self { replication, store }
    }

    /// Returns the position in the journal: the number of changes that this process has read or written.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.journal().position()
    }

    /// Returns a receiver of the position, which changes with every change of the overrides.
    #[must_use]
    pub fn positions(&self) -> watch::Receiver<u64> {
        self.replication.position.subscribe()
    }

    fn journal(&self) -> MutexGuard<'_, Journal> {
        self.replication.journal.lock()
    }

    fn versions(&self) -> ValidVersions {
        ValidVersions::at(self.replication.context.clock.now())
    }

    /// Returns the changes after a position. Without a position, or if the journal does not have all changes after it,
    /// returns all overrides and the recent changes.
    pub async fn changes_for_peer(&self, after: Option<u64>) -> PeerOverrides {
        let state = self.replication.state.lock().await;
        let journal = self.journal();
        let recent = after.and_then(|after| journal.changes_after(after));
        let mut overrides = if recent.is_some() { Vec::new() } else { all_versioned(&state.overrides) };
        let mut changes = recent.unwrap_or_else(|| journal.recent_changes());
        // Other instances would not merge versions that are never valid.
        let versions = self.versions();
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
                digests.extend(stored_rule_set(&change.target, text));
            }
        }
        for (target, _, text) in &overrides {
            digests.extend(stored_rule_set(target, text));
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
        merged.ignored.rule_sets = rule_sets.add(page.rule_sets).await;
        let versions = self.versions();
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
        let replication = &self.replication;
        let mut state = replication.state.lock().await;
        let Some(received) = peer_limits::read_change(change, &state.overrides, replication.context.options) else {
            merged.ignored.overrides += 1;
            return Ok(());
        };
        // The lock must not be held while the journal is written.
        let newer = newer_part(&self.journal(), &state, versions, received);
        let Some(received) = newer else {
            return Ok(());
        };
        let change = write_change(&received);
        if !peer_limits::has_room(&change, state.override_bytes, state.recent_bytes) {
            merged.ignored.over_budget += 1;
            merged.is_deferred = true;
            return Ok(());
        }
        for received in &received.overrides {
            if let Some(value) = &received.after {
                self.store_rule_set(&state, &value.entry, rule_sets).await?;
            }
        }
        replication.append(&state, &change).await?;
        for received in received.overrides {
            let value = match received.after {
                Some(value) => NewValue::Set(value.entry),
                None => NewValue::Removed,
            };
            replication.replace(&mut state, &received.target, &value);
        }
        state.add_recent(&change);
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
        let replication = &self.replication;
        let mut state = replication.state.lock().await;
        let mut newer = Vec::new();
        for (target, version, text) in overrides {
            let Some(target) = peer_limits::read_target(&target) else {
                merged.ignored.overrides += 1;
                continue;
            };
            let known = known(&self.journal(), &state, versions, &target);
            if !is_newer(&self.journal(), version, Some(&text), &known) {
                continue;
            }
            let options = replication.context.options;
            let Some(value) = peer_limits::read_value(&target, version, text, &state.overrides, options) else {
                merged.ignored.overrides += 1;
                continue;
            };
            if !peer_limits::has_room_for_override(&value.text, state.override_bytes) {
                merged.ignored.over_budget += 1;
                merged.is_deferred = true;
                continue;
            }
            self.store_rule_set(&state, &value.entry, rule_sets).await?;
            newer.push(value);
        }
        if newer.is_empty() {
            return Ok(());
        }
        let mut lines = Vec::new();
        for ReceivedValue { text, entry } in &newer {
            lines.push((entry.target.to_string(), entry.version, text.clone()));
        }
        replication.append_overrides(&state, lines).await?;
        for ReceivedValue { entry, .. } in newer {
            let target = entry.target.clone();
            let version = entry.version;
            replication.replace(&mut state, &target, &NewValue::Set(entry));
            state.cursor.version = state.cursor.version.max(version);
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
        let state = self.replication.state.lock().await;
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
        self.replication.context.note_sync(state.cursor.version, Ok(()));
        self.replication.publish(&state);
        Ok(merged)
    }

    /// Stores the rule set that an override names, before the override comes into force.
    async fn store_rule_set(
        &self,
        state: &State,
        entry: &Override,
        rule_sets: &mut PeerRuleSets,
    ) -> Result<(), OverrideStoreError> {
        if !matches!(entry.target, Target::Rules(_)) {
            return Ok(());
        }
        rule_sets.obsolete.extend(named_rule_sets(state));
        let Some(digest) = rule_sets::digest_in(&entry.value) else {
            return Ok(());
        };
        if self.store.get_rule_set(digest).await?.is_none()
            && let Some(text) = rule_sets.get(digest)
        {
            self.store.put_rule_set(digest, text).await?;
            rule_sets.obsolete.insert(digest.to_owned());
        }
        Ok(())
    }
}

/// Returns the part of a change that is newer than the values of this instance; `None` if there is none.
fn newer_part(
    journal: &Journal,
    state: &State,
    versions: ValidVersions,
    change: ReceivedChange,
) -> Option<ReceivedChange> {
    if journal.contains(&change.id) {
        return None;
    }
    let mut kept = Vec::new();
    let mut conflicts = Vec::new();
    // The log may have contained such a change already.
    let is_older_than_log = change.version < journal.oldest_version();
    let is_action = change.overrides.is_empty() && !is_older_than_log;
    for ReceivedOverride { target, before, after } in change.overrides {
        let known = known(journal, state, versions, &target);
        let text = after.as_ref().map(|value| &value.text);
        let is_newer = is_newer(journal, change.version, text, &known);
        // The author has not seen the value of this instance, or the other way round.
        let is_conflict =
            known.text != before && known.text.as_ref() != text && known.version > 0 && !is_older_than_log;
        if is_conflict {
            let outcome = if is_newer { "replaced" } else { "is not in force because of" };
            let version = known.version;
            conflicts.push(format!("{outcome} change {version} of {target}, made at the same time"));
        }
        if is_newer {
            kept.push(ReceivedOverride { target, before: known.text, after });
        }
    }
    if kept.is_empty() && conflicts.is_empty() && !is_action {
        return None;
    }
    let info = if conflicts.is_empty() { change.info } else { with_conflicts(&change.info, &conflicts) };
    Some(ReceivedChange { overrides: kept, info, ..change })
}

/// Returns a received change as the journal has it.
fn write_change(received: &ReceivedChange) -> Change {
    let mut changes = Vec::new();
    for ReceivedOverride { target, before, after } in &received.overrides {
        let after = after.as_ref().map(|value| value.text.clone());
        changes.push(OverrideChange { target: target.to_string(), before: before.clone(), after });
    }
    Change { version: received.version, id: received.id.clone(), info: received.info.clone(), changes }
}

/// Returns the value of a target on this instance.
fn known(journal: &Journal, state: &State, versions: ValidVersions, target: &Target) -> Known {
    match state.overrides.get(target) {
        Some(entry) => Known { version: versions.repair(entry.version), text: Some(format::write(&entry)) },
        None => Known { version: versions.repair(journal.removed_at(&target.to_string())), text: None },
    }
}

/// Returns whether a value of another instance is newer than that of this one.
fn is_newer(journal: &Journal, version: u64, text: Option<&String>, known: &Known) -> bool {
    if known.version == 0 && known.text.is_none() {
        // A value that is older than all recent changes and does not exist here was removed before them.
        return version >= journal.oldest_version();
    }
    (version, text) > (known.version, known.text.as_ref())
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

/// Returns the digest of the rule set that a stored override names.
fn stored_rule_set(target: &str, text: &str) -> Option<String> {
    if !target.starts_with(RULES) {
        return None;
    }
    let entry = format::read(target, 0, text)?;
    rule_sets::digest_in(&entry.value).map(str::to_owned)
}

/// Beginning of the targets of overrides that name rule sets.
const RULES: &str = "rules|";

/// Returns the digests of the rule sets that the overrides name.
fn named_rule_sets(state: &State) -> BTreeSet<String> {
    let mut named = BTreeSet::new();
    for slot in RuleSetSlot::ALL {
        if let Some(entry) = state.overrides.rules(slot) {
            named.extend(rule_sets::digest_in(&entry.value).map(str::to_owned));
        }
    }
    named
}

#[cfg(test)]
mod tests;
