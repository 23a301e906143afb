//! Checks that an override can be read before it is stored or put in force: what other instances send, or what another
//! program has written to the store, has the same bounds as the request of an operator.

use super::{ChangeInfo, MAX_AUTHOR_BYTES, MAX_REASON_BYTES, OverrideSync, SyncState};
use crate::{
    engine::{Overrides, overrides::Target},
    store::overrides::{Change, MAX_CHANGES, OverrideChange, Versioned},
};

/// Maximum length of the text about a change: author, reason and notes about changes at the same time.
const MAX_INFO_BYTES: usize = 64 * 1_024;
/// Maximum length of the id of a change.
const MAX_ID_BYTES: usize = 64;

impl OverrideSync {
    /// Puts the overrides of another instance into `overrides`, and returns those that could be read.
    pub(super) fn put_readable(&self, overrides: &mut Overrides, versioned: Vec<Versioned>) -> Vec<Versioned> {
        let mut readable = Vec::new();
        for (target, version, text) in versioned {
            if self.insert(overrides, &target, version, &text) {
                readable.push((target, version, text));
            }
        }
        readable
    }

    /// Returns the part of another instance's change that can be read; `None` if the change itself exceeds a bound.
    pub(super) fn readable_part(&self, state: &SyncState, mut change: Change) -> Option<Change> {
        if change.id.len() > MAX_ID_BYTES || change.changes.len() > MAX_CHANGES {
            self.note_unreadable("-", "a change of another instance has too long an id or too many overrides");
            return None;
        }
        if change.info.len() > MAX_INFO_BYTES {
            change.info = shortened(&change.info);
        }
        let mut overrides = state.overrides.clone();
        let was_action = change.changes.is_empty();
        change.changes.retain(|OverrideChange { target, after, .. }| match after {
            Some(text) => self.insert(&mut overrides, target, change.version, text),
            None => Target::parse(target).is_ok(),
        });
        // A change without overrides is an action of an operator.
        (was_action || !change.changes.is_empty()).then_some(change)
    }
}

/// Shortens the author and the reason of a change to the lengths that an operator's can have.
fn shortened(info: &str) -> String {
    let mut info: ChangeInfo = serde_json::from_str(info).unwrap_or_default();
    truncate(&mut info.author, MAX_AUTHOR_BYTES);
    truncate(&mut info.reason, MAX_REASON_BYTES);
    serde_json::to_string(&info).unwrap_or_default()
}

/// Shortens a text to a number of bytes, or less if a character would be cut.
fn truncate(text: &mut String, bytes: usize) {
    let mut end = bytes.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        path::{Path, PathBuf},
        sync::{Arc, Mutex},
    };

    use super::{
        super::{
            MAX_VALUE_BYTES,
            merge::{PeerOverrides, tests::member_of},
        },
        *,
    };
    use crate::store::overrides::{Journal, OverrideStore};

    /// An instance with a journal in a folder.
    async fn start(folder: &Path) -> Arc<OverrideSync> {
        let journal = Journal::new(Some(journal_path(folder)));
        let member = member_of(OverrideStore::Journal(Arc::new(Mutex::new(journal))));
        member.start().await.unwrap();
        member
    }

    fn journal_path(folder: &Path) -> PathBuf {
        folder.join("overrides")
    }

    /// Returns the text of an override, as members send it.
    fn text(value: &str) -> String {
        serde_json::json!({"w": value, "a": "alice", "t": 1}).to_string()
    }

    fn change(version: u64, user: &str, after: &str) -> Change {
        let changed = OverrideChange { target: target(user), before: None, after: Some(after.to_owned()) };
        Change { version, id: version.to_string(), info: "{}".into(), changes: vec![changed] }
    }

    fn target(user: &str) -> String {
        format!("limit|api|user={user}")
    }

    fn huge() -> String {
        text(&format!("{{a: &a [{}], b: [{}]}}", "x".repeat(1_000), vec!["*a"; 120_000].join(", ")))
    }

    /// Texts that this version cannot read, or that an operator could not have set.
    fn unreadable() -> Vec<String> {
        let author = serde_json::json!({"w": "1/year", "a": "a".repeat(MAX_AUTHOR_BYTES + 1), "t": 1});
        let reason = serde_json::json!({"w": "1/year", "a": "a", "r": "r".repeat(MAX_REASON_BYTES + 1), "t": 1});
        let value = format!("1/year{}", " ".repeat(MAX_VALUE_BYTES));
        vec![
            huge(),
            text("lots"),
            text(&value),
            author.to_string(),
            reason.to_string(),
            "nonsense".into(),
            String::new(),
        ]
    }

    async fn users(member: &OverrideSync) -> Vec<String> {
        let state = member.state.lock().await;
        let mut targets: Vec<String> = state.overrides.iter().map(|entry| entry.target.to_string()).collect();
        targets.sort();
        targets
    }

    #[tokio::test]
    async fn what_cannot_be_read_is_not_written() {
        let folder = tempfile::tempdir().unwrap();
        let member = start(folder.path()).await;
        let (mut changes, mut overrides) = (vec![change(1, "one", &text("1/year"))], Vec::new());
        for (number, text) in unreadable().iter().enumerate() {
            changes.push(change(2, &format!("c{number}"), text));
            overrides.push((target(&format!("o{number}")), 3, text.clone()));
        }
        changes.push(change(4, &"x".repeat(2_000), &text("1/year")));
        overrides.push(("limit|api".into(), 4, text("1/year")));
        overrides.push((target("two"), 5, text("2/year")));
        let expected = [target("one"), target("two")];
        for _ in 0..2 {
            let peer =
                PeerOverrides { changes: changes.clone(), overrides: overrides.clone(), ..PeerOverrides::default() };
            member.merge(peer).await.unwrap();
            assert_eq!(users(&member).await, expected);
            let written = fs::read_to_string(journal_path(folder.path())).unwrap();
            assert_eq!(written.lines().count(), 2, "{written}");
        }
        assert_eq!(member.unreadable.get(), 2 * (2 * unreadable().len() as u64 + 2));
        drop(member);
        let restarted = start(folder.path()).await;
        assert_eq!((users(&restarted).await.as_slice(), restarted.unreadable.get()), (&expected[..], 0));
    }

    #[tokio::test]
    async fn the_readable_part_of_a_change_is_merged() {
        let folder = tempfile::tempdir().unwrap();
        let member = start(folder.path()).await;
        let mut mixed = change(1, "one", &text("1/year"));
        mixed.changes.extend(change(1, "huge", &huge()).changes);
        mixed.info = serde_json::json!({"author": "é".repeat(300), "reason": "r".repeat(100_000)}).to_string();
        member.merge(PeerOverrides { changes: vec![mixed], ..PeerOverrides::default() }).await.unwrap();
        assert_eq!(users(&member).await, [target("one")]);
        let log = member.audit_log(u64::MAX, 9).await.unwrap();
        assert_eq!((log[0].info.author.len(), log[0].info.reason.len()), (MAX_AUTHOR_BYTES, MAX_REASON_BYTES));
        assert!(log[0].info.check().is_ok());
        let mut many = change(2, "two", &text("2/year"));
        many.changes =
            (0..=MAX_CHANGES).flat_map(|user| change(2, &user.to_string(), &text("1/year")).changes).collect();
        let long_id = Change { id: "i".repeat(MAX_ID_BYTES + 1), ..change(3, "three", &text("3/year")) };
        member.merge(PeerOverrides { changes: vec![many, long_id], ..PeerOverrides::default() }).await.unwrap();
        assert_eq!(users(&member).await, [target("one")]);
    }

    /// An earlier release has written it.
    #[tokio::test]
    async fn an_override_of_the_file_that_cannot_be_read_is_ignored_at_the_start() {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = Journal::new(Some(journal_path(folder.path())));
        journal.load(|_, _, _| {}).unwrap();
        let kept = [(target("huge"), 1, huge()), (target("one"), 2, text("1/year"))];
        journal.write_overrides(&kept, 0, Default::default).unwrap();
        drop(journal);
        let member = start(folder.path()).await;
        assert_eq!((users(&member).await, member.unreadable.get()), (vec![target("one")], 1));
    }
}
