//! Unit tests of the exchange of overrides.

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

use super::{
    super::{
        ChangeError, ChangeRequest, OverrideSync,
        testing::{advance, exchange, journal, member, member_with},
    },
    *,
};
use crate::algorithm::MAX_NUMBER;

/// Sets the limit of a user; 0 to remove it.
async fn set(member: &OverrideSync, user: &str, limit: u32) {
    let target = Target::parse(&format!("limit|api|user={user}")).unwrap();
    let value = (limit > 0).then(|| format!("{limit}/year"));
    let info = ChangeInfo { author: "alice".into(), reason: format!("to {limit}"), at: 0 };
    member.change(&[ChangeRequest { target, value, until: None, expected: None }], info).await.unwrap();
}

/// Sends everything that one member has to another one.
async fn send_all(from: &OverrideSync, to: &OverrideSync) {
    exchange(to).merge(exchange(from).changes_for_peer(None).await).await.unwrap();
}

/// Returns the limit of each user.
async fn limits(member: &OverrideSync) -> Vec<(String, u32)> {
    let overrides = exchange(member).changes_for_peer(None).await.overrides;
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
    let old = exchange(&one).changes_for_peer(None).await;
    send_all(&one, &other).await;
    set(&other, "bob", 2).await;
    send_all(&other, &one).await;
    assert_eq!(limits(&one).await, of("bob", 2));
    // The older value arrives again, and the newer one twice.
    exchange(&other).merge(old.clone()).await.unwrap();
    exchange(&other).merge(PeerOverrides { changes: Vec::new(), ..old }).await.unwrap();
    send_all(&one, &other).await;
    send_all(&other, &one).await;
    for member in [&one, &other] {
        assert_eq!(limits(member).await, of("bob", 2));
        assert_eq!(reasons(member).await, ["to 2", "to 1"]);
    }
    // Without the audit log, the value alone is sufficient.
    let late = member();
    exchange(&late)
        .merge(PeerOverrides { changes: Vec::new(), ..exchange(&one).changes_for_peer(None).await })
        .await
        .unwrap();
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
    exchange(&late).merge(PeerOverrides { overrides: stale, ..PeerOverrides::default() }).await.unwrap();
    assert_eq!(limits(&late).await, []);
}

#[tokio::test]
async fn changes_at_the_same_time_are_noted_at_both_members() {
    let (one, other) = (member(), member());
    set(&one, "bob", 1).await;
    set(&other, "bob", 2).await;
    let (first, second) = (exchange(&one).changes_for_peer(None).await, exchange(&other).changes_for_peer(None).await);
    exchange(&one).merge(second).await.unwrap();
    exchange(&other).merge(first).await.unwrap();
    assert_eq!(limits(&one).await, limits(&other).await);
    for member in [&one, &other] {
        let reasons = reasons(member).await;
        let noted = reasons.iter().filter(|reason| reason.contains("made at the same time")).count();
        assert_eq!((reasons.len(), noted), (2, 1), "{reasons:?}");
    }
}

/// Two equal changes, or a change without its predecessor, are not a conflict.
#[tokio::test]
async fn a_conflict_is_noted_only_between_different_values() {
    let (one, other, late) = (member(), member(), member());
    set(&one, "bob", 1).await;
    set(&other, "bob", 1).await;
    send_all(&one, &other).await;
    set(&one, "bob", 2).await;
    let all = exchange(&one).changes_for_peer(None).await;
    exchange(&late)
        .merge(PeerOverrides { changes: all.changes[1..].to_vec(), ..PeerOverrides::default() })
        .await
        .unwrap();
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
    exchange(&one).merge(action("first", 1)).await.unwrap();
    send_all(&one, &other).await;
    assert_eq!(reasons(&other).await, ["reset"]);
    for limit in 1..=1_000 {
        set(&other, "eve", limit).await;
    }
    let log = reasons(&other).await;
    exchange(&other).merge(action("second", 1)).await.unwrap();
    assert_eq!(reasons(&other).await, log);
}

/// A higher version could never be replaced.
#[tokio::test]
async fn values_with_an_invalid_version_are_ignored() {
    let (one, other) = (member(), member());
    set(&one, "bob", 1).await;
    let valid = exchange(&one).changes_for_peer(None).await;
    let with_version = |version| {
        let mut changes = valid.clone();
        changes.changes[0].version = version;
        changes.overrides[0].1 = version;
        changes
    };
    let highest = ValidVersions::at(one.context.clock.now()).highest();
    for version in [u64::MAX, MAX_NUMBER + 1, MAX_NUMBER, MAX_NUMBER / 2, highest + 100_000_000] {
        let merged = exchange(&other).merge(with_version(version)).await.unwrap();
        assert_eq!((merged.ignored.versions, merged.is_deferred), (2, false), "{version}");
        assert_eq!((limits(&other).await, reasons(&other).await.len()), (Vec::new(), 0));
    }
    assert_eq!(exchange(&other).merge(valid).await.unwrap(), Merged::default());
    assert_eq!(limits(&other).await, of("bob", 1));
}

/// A member with a clock that is ahead has merged the highest version of a lying member. An operator there changes the
/// same override: the change is merged as soon as the clock of the other member permits it.
#[tokio::test]
async fn a_change_after_the_highest_version_reaches_members_whose_clocks_are_behind() {
    let (ahead, behind) = (member(), member());
    advance(&ahead, 3_600_000_000);
    let highest = ValidVersions::at(ahead.context.clock.now()).highest();
    let text = r#"{"w":"6/year","a":"eve","t":1}"#.to_owned();
    let lie = vec![("limit|api|user=bob".to_owned(), highest, text)];
    exchange(&ahead).merge(PeerOverrides { overrides: lie, ..PeerOverrides::default() }).await.unwrap();
    assert_eq!(limits(&ahead).await, of("bob", 6));
    set(&ahead, "bob", 1).await;
    let all = exchange(&ahead).changes_for_peer(None).await;
    assert!(exchange(&behind).merge(all.clone()).await.unwrap().is_deferred);
    assert_eq!(limits(&behind).await, []);
    advance(&behind, 3_600_001_000);
    advance(&ahead, 1_000);
    assert_eq!(
        exchange(&behind).merge(exchange(&ahead).changes_for_peer(None).await).await.unwrap(),
        Merged::default()
    );
    assert_eq!((limits(&behind).await, limits(&ahead).await), (of("bob", 1), of("bob", 1)));
    // The next change of the other member is the latest one.
    set(&behind, "bob", 2).await;
    advance(&ahead, 1_000);
    send_all(&behind, &ahead).await;
    assert_eq!(limits(&ahead).await, of("bob", 2));
}

/// Version 0.1.0 stored the highest numbers, and removals with them.
#[tokio::test]
async fn a_journal_with_an_invalid_version_is_repaired() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("overrides");
    let stored = r#"{"w":"6/year","a":"eve","t":1}"#;
    let kept = serde_json::json!({ "kept": ["limit|api|user=bob", MAX_NUMBER, stored] });
    let change = |id: &str, user: &str, after: Option<&str>| {
        let changes =
            [serde_json::json!({ "target": format!("limit|api|user={user}"), "before": null, "after": after })];
        serde_json::json!({ "change": { "version": MAX_NUMBER, "id": id, "info": "{}", "changes": changes } })
    };
    let lines = [kept, change("x", "eve", Some(stored)), change("y", "joe", None)];
    std::fs::write(&path, lines.map(|line| format!("{line}\n")).concat()).unwrap();
    let repaired = member_with(Journal::new(Some(path)));
    repaired.start().await.unwrap();
    let other = member();
    let expected = [("bob".to_owned(), 6), ("eve".to_owned(), 6)];
    assert_eq!(
        exchange(&other).merge(exchange(&repaired).changes_for_peer(None).await).await.unwrap(),
        Merged::default()
    );
    assert_eq!((limits(&repaired).await, limits(&other).await), (expected.to_vec(), expected.to_vec()));
    for member in [&repaired, &other] {
        advance(member, 10_000);
    }
    for (number, user) in [(1, "bob"), (2, "eve"), (3, "joe")] {
        set(&other, user, number).await;
        send_all(&other, &repaired).await;
        set(&repaired, user, number + 10).await;
        send_all(&repaired, &other).await;
    }
    let expected = [("bob".to_owned(), 11), ("eve".to_owned(), 12), ("joe".to_owned(), 13)];
    assert_eq!((limits(&repaired).await, limits(&other).await), (expected.to_vec(), expected.to_vec()));
}

/// Unreadable overrides are not written to the journal.
#[tokio::test]
async fn overrides_that_no_operator_could_set_are_not_stored() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("overrides");
    let one = member_with(Journal::new(Some(path.clone())));
    one.start().await.unwrap();
    let long = format!(r#"{{"w":"{}","a":"eve","t":1}}"#, "[".repeat(490_000));
    for (target, text) in [
        ("limit|api|user=bob", long.as_str()),
        ("limit|api|user=bob", "{"),
        ("switch|everything", r#"{"w":"?","a":"eve","t":1}"#),
        ("rules|in_force", r#"{"w":"new","a":"eve","t":1}"#),
        ("?", r#"{"w":"deny","a":"eve","t":1}"#),
    ] {
        let change = OverrideChange { target: target.to_owned(), before: None, after: Some(text.to_owned()) };
        let changes = vec![Change { version: 1, id: "x".into(), info: "{}".into(), changes: vec![change] }];
        let overrides = vec![(target.to_owned(), 1, text.to_owned())];
        let merged =
            exchange(&one).merge(PeerOverrides { changes, overrides, ..PeerOverrides::default() }).await.unwrap();
        assert_eq!(merged.ignored.overrides, 2, "{target} {text:.99}");
    }
    assert_eq!((std::fs::read_to_string(&path).unwrap(), limits(&one).await), (String::new(), Vec::new()));
}

fn rules_change(version: u64, digest: &str) -> PeerOverrides {
    let text = format!(r#"{{"w":"{digest}","a":"eve","t":1}}"#);
    let change = OverrideChange { target: "rules|in_force".into(), before: None, after: Some(text) };
    let changes = vec![Change { version, id: format!("rules {version}"), info: "{}".into(), changes: vec![change] }];
    PeerOverrides { changes, ..PeerOverrides::default() }
}

#[tokio::test]
async fn only_the_rule_sets_that_overrides_name_are_stored_and_only_with_their_digests() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("overrides");
    let one = member_with(Journal::new(Some(path)));
    one.start().await.unwrap();
    let set = |text: &str| (rule_sets::digest_of(text), text.to_owned());
    let files = || std::fs::read_dir(folder.path()).unwrap().count();
    let (first, second) = (set("first"), set("second"));
    let unnamed = (0..3_000).map(|number: u32| set(&number.to_string())).collect();
    exchange(&one).merge(PeerOverrides { rule_sets: unnamed, ..rules_change(1, "directory") }).await.unwrap();
    assert_eq!(files(), 1);
    // A rule set under the digest of another one.
    let lie = vec![(first.0.clone(), "lie".to_owned())];
    let merged = exchange(&one).merge(PeerOverrides { rule_sets: lie, ..rules_change(2, &first.0) }).await.unwrap();
    assert_eq!((merged.ignored.rule_sets, merged.is_deferred, files()), (1, true, 1));
    // The text arrives later.
    let rule_sets = vec![first.clone()];
    let merged = exchange(&one).merge(PeerOverrides { rule_sets, ..rules_change(2, &first.0) }).await.unwrap();
    assert_eq!((merged, files()), (Merged::default(), 2));
    assert_eq!(one.store.get_rule_set(&first.0).await.unwrap().as_deref(), Some("first"));
    // The next one replaces it.
    exchange(&one)
        .merge(PeerOverrides { rule_sets: vec![second.clone()], ..rules_change(3, &second.0) })
        .await
        .unwrap();
    assert_eq!((files(), one.store.get_rule_set(&first.0).await.unwrap()), (2, None));
    let sent = exchange(&one).changes_for_peer(Some(0)).await.rule_sets;
    assert_eq!(sent, [second], "others are not needed any more");
}

#[tokio::test]
async fn a_peer_with_a_position_receives_only_the_changes_after_it() {
    let one = member();
    set(&one, "bob", 1).await;
    let position = exchange(&one).changes_for_peer(None).await.position;
    set(&one, "eve", 2).await;
    let next = exchange(&one).changes_for_peer(Some(position)).await;
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
    let journal = journal(&one);
    for id in [1, 2] {
        let mut state = journal.state.lock().await;
        journal.append(&state, &change(id)).await.unwrap();
        let target = Target::Rules(RuleSetSlot::Candidate);
        let entry = format::read_value(&target, id, &text).unwrap();
        journal.replace(&mut state, &target, &NewValue::Set(entry));
    }
    let sent = exchange(&one).changes_for_peer(None).await;
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

/// Makes changes at random members. Some changes reach other members, in any order.
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
                    let changes = exchange(&members[from]).changes_for_peer(positions[from][to]).await;
                    positions[from][to] = Some(changes.position);
                    exchange(&members[to]).merge(changes).await.unwrap();
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
    let mut positions = exchange(&one).positions();
    assert_eq!(exchange(&one).position(), 0);
    for (limit, position) in [(7, 1), (8, 2)] {
        set(&one, "bob", limit).await;
        assert!(positions.has_changed().unwrap());
        assert_eq!((exchange(&one).position(), *positions.borrow_and_update()), (position, position));
    }
    one.edit(|_| ()).await;
    assert!(!positions.has_changed().unwrap());
}

#[tokio::test]
async fn changes_that_cannot_be_written_to_the_journal_are_not_merged() {
    let folder = tempfile::tempdir().unwrap();
    let journal = Journal::new(Some(folder.path().join("missing/overrides")));
    let (one, other) = (member(), member_with(journal));
    set(&one, "bob", 1).await;
    let error = exchange(&other).merge(exchange(&one).changes_for_peer(None).await).await.unwrap_err();
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
    exchange(&one).merge(PeerOverrides { changes, ..PeerOverrides::default() }).await.unwrap();
    assert_eq!(reasons(&one).await[0], "reset");
}

/// A member fills the maximum with overrides that an operator could have set. The change of an operator is
/// rejected, or it waits until there is room.
#[tokio::test]
async fn a_full_table_rejects_changes_or_lets_them_wait() {
    let (full, other) = (member(), member());
    let mut number = 0;
    let mut ignored = 0;
    while ignored == 0 {
        number += 1;
        let target = format!("limit|api|user={}{number}", "x".repeat(1_000));
        let after = serde_json::json!({"w": "1/year", "a": "mallory", "r": "x".repeat(1_000), "t": 1}).to_string();
        let changes = vec![OverrideChange { target, before: None, after: Some(after) }];
        let change = Change { version: number, id: number.to_string(), info: "{}".into(), changes };
        let merged =
            exchange(&full).merge(PeerOverrides { changes: vec![change], ..PeerOverrides::default() }).await.unwrap();
        ignored = merged.ignored.over_budget;
    }
    assert!(number > 200, "{number}");
    let request = |user: &str, value: Option<&str>| ChangeRequest {
        target: Target::parse(&format!("limit|api|user={user}")).unwrap(),
        value: value.map(str::to_owned),
        until: None,
        expected: None,
    };
    let info = || ChangeInfo { author: "alice".into(), reason: "y".repeat(1_000), at: 0 };
    let rejected = full.change(&[request("bob", Some("1/year"))], info()).await;
    assert!(matches!(rejected, Err(ChangeError::Full)), "{rejected:?}");
    let long = "y".repeat(1_010);
    other.change(&[request(&long, Some("5/year"))], info()).await.unwrap();
    let from_other = exchange(&other).changes_for_peer(None).await;
    let changes = PeerOverrides { overrides: Vec::new(), ..from_other.clone() };
    let overrides = PeerOverrides { changes: Vec::new(), ..from_other.clone() };
    for part in [changes, overrides] {
        let merged = exchange(&full).merge(part).await.unwrap();
        assert!(merged.is_deferred && merged.ignored.over_budget > 0, "{merged:?}");
    }
    let removed = [1, 2].map(|number| request(&format!("{}{number}", "x".repeat(1_000)), None));
    full.change(&removed, info()).await.unwrap();
    assert!(!exchange(&full).merge(from_other).await.unwrap().is_deferred);
    assert!(limits(&full).await.contains(&(long, 5)));
}
