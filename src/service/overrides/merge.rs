//! Exchange of overrides between instances without a shared store. Each instance keeps all overrides in its journal.
//!
//! An instance reads the changes of another one after a position in its journal, or everything if it has no position
//! ([`OverrideSync::changes_for_peer`]), and merges them ([`OverrideSync::merge`]). Of two values of one target, the one
//! with the higher version is in force on all instances, and of the same version the greater text. A version is one more
//! than the highest that the instance knew, so a change replaces everything that its author could see. Versions above
//! [`MAX_NUMBER`] are invalid: they would leave no higher ones.
//!
//! Two operators who change one target at the same time on different instances cannot see each other's change. The audit
//! log then notes in the reason of the change which of them is in force.

use tokio::sync::watch;

use super::{ChangeError, ChangeInfo, OverrideSync, SyncState, all_versioned, format, lock};
use crate::{
    algorithm::MAX_NUMBER,
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
        for change in peer.changes.into_iter().filter(|change| change.version <= MAX_NUMBER) {
            // The lock must not be held while the journal is written.
            let readable = self.readable_part(&state, change);
            let resolved = readable.and_then(|change| newer_part(&lock(journal), &state, change));
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
        let overrides = peer.overrides.into_iter().filter(|(_, version, _)| *version <= MAX_NUMBER).collect();
        let newer = newer_overrides(&lock(journal), &state, overrides);
        let mut overrides = state.overrides.clone();
        let newer = self.put_readable(&mut overrides, newer);
        if let Some(version) = newer.iter().map(|(_, version, _)| *version).max() {
            self.write_journal_overrides(journal, &state, newer).await?;
            state.overrides = overrides;
            state.cursor.version = state.cursor.version.max(version);
            is_changed = true;
        }
        if is_changed {
            self.note_sync(&state, Ok(()));
            self.publish(&state);
        }
        Ok(())
    }
}

/// Returns the part of a change that is newer than the values of this instance; `None` if there is none.
fn newer_part(journal: &Journal, state: &SyncState, change: Change) -> Option<Change> {
    if journal.contains(&change.id) {
        return None;
    }
    let (mut kept, mut conflicts) = (Vec::new(), Vec::new());
    // The log may have contained such a change already.
    let is_older_than_log = change.version < journal.oldest_version();
    let is_action = change.changes.is_empty() && !is_older_than_log;
    for OverrideChange { target, before, after } in change.changes {
        let known = current(journal, state, &target);
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
fn current(journal: &Journal, state: &SyncState, target: &str) -> Current {
    let entry = Target::parse(target).ok().and_then(|target| state.overrides.get(&target));
    match entry {
        Some(entry) => (entry.version, Some(format::write(&entry))),
        None => (journal.removed_at(target), None),
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

/// Returns the overrides of another instance that are newer than those of this one.
fn newer_overrides(journal: &Journal, state: &SyncState, overrides: Vec<Versioned>) -> Vec<Versioned> {
    let is_newer = |(target, version, text): &Versioned| {
        is_newer(journal, (*version, Some(text)), &current(journal, state, target))
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

#[cfg(test)]
pub(super) mod tests {
    use std::sync::{Arc, Mutex, atomic::AtomicU64};

    use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

    use super::*;
    use crate::{
        engine::{Statistics, StatisticsSettings},
        rules::Options,
        service::{
            Clock,
            overrides::{ChangeRequest, Settings},
            reload::Reloader,
            source::Source,
        },
    };

    pub(in crate::service::overrides) fn member() -> Arc<OverrideSync> {
        member_of(OverrideStore::Journal(Arc::new(Mutex::new(Journal::new(None)))))
    }

    pub(in crate::service::overrides) fn member_of(store: OverrideStore) -> Arc<OverrideSync> {
        let clock = Clock::Manual(Arc::new(AtomicU64::new(1_763_672_400_000_000)));
        let statistics = Statistics::new(1, StatisticsSettings { max_dynamic_series: 10, near_limit_ratio: 0.8 });
        let options = Options::default();
        let source = Source::BuiltIn(Vec::new());
        let reloader = Reloader::start(source, options, clock.clone(), statistics, Arc::default()).unwrap();
        OverrideSync::new(store, Settings::default(), options, clock, reloader, None)
    }

    /// Sets the limit of a user; 0 to remove it.
    async fn set(member: &OverrideSync, user: &str, limit: u32) {
        let target = Target::parse(&format!("limit|api|user={user}")).unwrap();
        let value = (limit > 0).then(|| format!("{limit}/year"));
        let info = ChangeInfo { author: "alice".into(), reason: format!("to {limit}"), at: 0 };
        member.change(&[ChangeRequest { target, value, until: None, expected: None }], info).await.unwrap();
    }

    /// Sends everything that one member has to another one.
    async fn send_all(from: &OverrideSync, to: &OverrideSync) {
        to.merge(from.changes_for_peer(None).await).await.unwrap();
    }

    /// Returns the limits of all users.
    async fn limits(member: &OverrideSync) -> Vec<(String, u32)> {
        let overrides = member.changes_for_peer(None).await.overrides;
        let read = |(target, version, text): Versioned| {
            let entry = format::read(&target, version, &text).unwrap();
            let limit = entry.value.split('/').next().unwrap().parse().unwrap();
            (target.rsplit('=').next().unwrap().to_owned(), limit)
        };
        let mut limits: Vec<_> = overrides.into_iter().map(read).collect();
        limits.sort_unstable();
        limits
    }

    async fn reasons(member: &OverrideSync) -> Vec<String> {
        let log = member.audit_log(u64::MAX, 100).await.unwrap();
        log.into_iter().map(|change| change.info.reason).collect()
    }

    fn of(user: &str, limit: u32) -> Vec<(String, u32)> {
        vec![(user.to_owned(), limit)]
    }

    #[tokio::test]
    async fn the_higher_version_is_in_force_in_any_order() {
        let (one, other) = (member(), member());
        set(&one, "bob", 1).await;
        let old = one.changes_for_peer(None).await;
        send_all(&one, &other).await;
        set(&other, "bob", 2).await;
        send_all(&other, &one).await;
        assert_eq!(limits(&one).await, of("bob", 2));
        // The older value arrives again, and the newer one twice.
        other.merge(old.clone()).await.unwrap();
        other.merge(PeerOverrides { changes: Vec::new(), ..old }).await.unwrap();
        send_all(&one, &other).await;
        send_all(&other, &one).await;
        for member in [&one, &other] {
            assert_eq!(limits(member).await, of("bob", 2));
            assert_eq!(reasons(member).await, ["to 2", "to 1"]);
        }
        // Without the audit log, the value alone is sufficient.
        let late = member();
        late.merge(PeerOverrides { changes: Vec::new(), ..one.changes_for_peer(None).await }).await.unwrap();
        assert_eq!(limits(&late).await, of("bob", 2));
        // The next change of any member replaces the value.
        set(&late, "bob", 3).await;
        send_all(&late, &one).await;
        assert_eq!(limits(&one).await, of("bob", 3));
    }

    #[tokio::test]
    async fn a_removed_override_does_not_return() {
        let (one, other) = (member(), member());
        set(&one, "bob", 1).await;
        send_all(&one, &other).await;
        set(&one, "bob", 0).await;
        send_all(&other, &one).await;
        assert_eq!(limits(&one).await, []);
        send_all(&one, &other).await;
        assert_eq!(limits(&other).await, []);
        // The removal is known to a member that has never had the override.
        let late = member();
        send_all(&one, &late).await;
        let stale = vec![("limit|api|user=bob".to_owned(), 1, r#"{"w":"1/year","a":"alice","t":1}"#.to_owned())];
        late.merge(PeerOverrides { overrides: stale, ..PeerOverrides::default() }).await.unwrap();
        assert_eq!(limits(&late).await, []);
    }

    #[tokio::test]
    async fn changes_at_the_same_time_are_noted_at_both_members() {
        let (one, other) = (member(), member());
        set(&one, "bob", 1).await;
        set(&other, "bob", 2).await;
        let (first, second) = (one.changes_for_peer(None).await, other.changes_for_peer(None).await);
        one.merge(second).await.unwrap();
        other.merge(first).await.unwrap();
        assert_eq!(limits(&one).await, limits(&other).await);
        for member in [&one, &other] {
            let reasons = reasons(member).await;
            let noted = reasons.iter().filter(|reason| reason.contains("made at the same time")).count();
            assert_eq!((reasons.len(), noted), (2, 1), "{reasons:?}");
        }
    }

    /// Two equal changes, or a change whose predecessor was not received.
    #[tokio::test]
    async fn a_conflict_is_noted_only_between_different_values() {
        let (one, other, late) = (member(), member(), member());
        set(&one, "bob", 1).await;
        set(&other, "bob", 1).await;
        send_all(&one, &other).await;
        set(&one, "bob", 2).await;
        let all = one.changes_for_peer(None).await;
        late.merge(PeerOverrides { changes: all.changes[1..].to_vec(), ..PeerOverrides::default() }).await.unwrap();
        assert_eq!(reasons(&other).await, ["to 1"]);
        assert_eq!(reasons(&late).await, ["to 2"]);
    }

    #[tokio::test]
    async fn an_action_without_overrides_enters_the_audit_log_unless_it_is_older() {
        let (one, other) = (member(), member());
        let action = |id: &str, version| {
            let info = r#"{"author":"alice","reason":"reset"}"#.to_owned();
            let changes = vec![Change { version, id: id.to_owned(), info, changes: Vec::new() }];
            PeerOverrides { changes, ..PeerOverrides::default() }
        };
        one.merge(action("first", 1)).await.unwrap();
        send_all(&one, &other).await;
        assert_eq!(reasons(&other).await, ["reset"]);
        for limit in 1..=1_000 {
            set(&other, "eve", limit).await;
        }
        let log = reasons(&other).await;
        other.merge(action("second", 1)).await.unwrap();
        assert_eq!(reasons(&other).await, log);
    }

    /// A higher version could never be replaced.
    #[tokio::test]
    async fn values_with_an_invalid_version_are_ignored() {
        let (one, other) = (member(), member());
        set(&one, "bob", 1).await;
        let valid = one.changes_for_peer(None).await;
        let mut invalid = valid.clone();
        invalid.changes[0].version = MAX_NUMBER + 1;
        invalid.overrides[0].1 = MAX_NUMBER + 1;
        other.merge(invalid).await.unwrap();
        assert_eq!((limits(&other).await, reasons(&other).await.len()), (Vec::new(), 0));
        other.merge(valid).await.unwrap();
        assert_eq!(limits(&other).await, of("bob", 1));
    }

    #[tokio::test]
    async fn a_peer_with_a_position_receives_only_the_changes_after_it() {
        let one = member();
        set(&one, "bob", 1).await;
        let position = one.changes_for_peer(None).await.position;
        set(&one, "eve", 2).await;
        let next = one.changes_for_peer(Some(position)).await;
        assert_eq!((next.changes.len(), next.overrides.len()), (1, 0));
    }

    #[tokio::test]
    async fn a_rule_set_is_sent_once() {
        let one = member();
        let digest = "ab".repeat(32);
        one.store.put_rule_set(&digest, "domain: api").await.unwrap();
        let text = format!(r#"{{"w":"{digest} 10%","a":"alice","t":1}}"#);
        let change = |id: u64| Change {
            version: id,
            id: id.to_string(),
            info: "{}".to_owned(),
            changes: vec![OverrideChange { target: "rules|candidate".into(), before: None, after: Some(text.clone()) }],
        };
        let OverrideStore::Journal(journal) = &one.store else { panic!("a member has a journal") };
        for id in [1, 2] {
            one.write_journal(journal, &*one.state.lock().await, change(id)).await.unwrap();
        }
        let sent = one.changes_for_peer(None).await;
        assert_eq!((sent.changes.len(), sent.rule_sets), (2, vec![(digest, "domain: api".to_owned())]));
    }

    #[tokio::test]
    async fn an_override_older_than_the_audit_log_does_not_return() {
        let (one, absent) = (member(), member());
        set(&one, "bob", 1).await;
        send_all(&one, &absent).await;
        set(&one, "bob", 0).await;
        for limit in 1..=1_000 {
            set(&one, "eve", limit).await;
        }
        let log = reasons(&one).await;
        send_all(&absent, &one).await;
        assert_eq!(limits(&one).await, of("eve", 1_000));
        assert_eq!(reasons(&one).await, log);
        // A later change of the absent member is accepted.
        send_all(&one, &absent).await;
        set(&absent, "max", 7).await;
        send_all(&absent, &one).await;
        assert!(limits(&one).await.contains(&("max".to_owned(), 7)));
    }

    /// Changes at random members, some of which reach other members, in any order.
    #[tokio::test]
    async fn all_members_agree_in_the_end() {
        for seed in 0..30 {
            let mut random = StdRng::seed_from_u64(seed);
            let members: Vec<_> = (0..3).map(|_| member()).collect();
            let mut positions = [[None; 3]; 3];
            for _ in 0..40 {
                let (from, to) = (random.random_range(0..3), random.random_range(0..3));
                match random.random_range(0..3) {
                    0 => set(&members[to], ["bob", "eve"][random.random_range(0..2)], random.random_range(0..4)).await,
                    1 => {
                        let changes = members[from].changes_for_peer(positions[from][to]).await;
                        positions[from][to] = Some(changes.position);
                        members[to].merge(changes).await.unwrap();
                    }
                    _ => send_all(&members[from], &members[to]).await,
                }
            }
            // Twice, because a member may receive a change only through another one.
            for _ in 0..2 {
                for (from, to) in [(0, 1), (1, 2), (2, 0), (1, 0), (2, 1), (0, 2)] {
                    send_all(&members[from], &members[to]).await;
                }
            }
            let expected = limits(&members[0]).await;
            for member in &members[1..] {
                assert_eq!(limits(member).await, expected, "seed {seed}");
            }
        }
    }

    #[tokio::test]
    async fn every_change_moves_the_position_and_is_announced() {
        let one = member();
        let mut positions = one.positions();
        assert_eq!(one.position(), Some(0));
        for (limit, position) in [(7, 1), (8, 2)] {
            set(&one, "bob", limit).await;
            assert!(positions.has_changed().unwrap());
            assert_eq!((one.position(), *positions.borrow_and_update()), (Some(position), position));
        }
        one.publish(&*one.state.lock().await);
        assert!(!positions.has_changed().unwrap());
    }

    #[tokio::test]
    async fn changes_that_cannot_be_written_to_the_journal_are_not_merged() {
        let folder = tempfile::tempdir().unwrap();
        let journal = Journal::new(Some(folder.path().join("missing/overrides")));
        let (one, other) = (member(), member_of(OverrideStore::Journal(Arc::new(Mutex::new(journal)))));
        set(&one, "bob", 1).await;
        let error = other.merge(one.changes_for_peer(None).await).await.unwrap_err();
        assert!(matches!(error, OverrideStoreError::Journal(_)), "{error:?}");
        assert_eq!(limits(&other).await, []);
    }

    #[tokio::test]
    async fn an_action_as_old_as_the_oldest_logged_change_enters_the_audit_log() {
        let one = member();
        for limit in 1..=1_000 {
            set(&one, "eve", limit).await;
        }
        let info = r#"{"author":"alice","reason":"reset"}"#.to_owned();
        let changes = vec![Change { version: 1, id: "reset".to_owned(), info, changes: Vec::new() }];
        one.merge(PeerOverrides { changes, ..PeerOverrides::default() }).await.unwrap();
        assert_eq!(reasons(&one).await[0], "reset");
    }
}
