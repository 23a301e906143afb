//! Contents of a journal after changes and restarts. `faults.rs` tests crashes and failed steps, `lock.rs` two
//! processes.

mod faults;
mod lock;

use std::{collections::BTreeMap, fs::OpenOptions};

use sluicegate_testing::test_log::TestLog;

use super::{line::MAX_LINE_BYTES, *};
use crate::store::overrides::OverrideChange;

fn change(version: u64, target: &str, after: Option<&str>) -> Change {
    let changed = OverrideChange { target: target.into(), before: None, after: after.map(str::to_owned) };
    Change { version, id: format!("id{version}"), info: "head".into(), changes: vec![changed] }
}

fn load(path: &Path) -> (Journal, Cursor, Vec<Versioned>) {
    let mut journal = Journal::new(Some(path.to_owned()));
    let mut overrides = BTreeMap::new();
    let on_override = |target: &str, version: u64, text: Option<&str>| match text {
        Some(text) => drop(overrides.insert(target.to_owned(), (version, text.to_owned()))),
        None => drop(overrides.remove(target)),
    };
    let cursor = journal.load(on_override).unwrap();
    (journal, cursor, overrides.into_iter().map(|(target, (version, text))| (target, version, text)).collect())
}

fn nothing() -> (Cursor, Vec<Versioned>) {
    Default::default()
}

/// Sets the override of one target to the number of its version.
fn write_version(journal: &mut Journal, version: u64) -> Result<(), JournalError> {
    let cursor = Cursor { version: version - 1, ..Cursor::default() };
    let overrides = || (cursor, vec![("a".to_owned(), version - 1, (version - 1).to_string())]);
    journal.write(&change(version, "a", Some(&version.to_string())), 1, overrides)
}

/// Number of the change before which a file of [`prefilled`] is rewritten.
const REWRITE_AT: u64 = (MAX_RECENT_CHANGES + REWRITE_SLACK + 4) as u64;

/// Returns a journal with a file that has a change per version below [`REWRITE_AT`].
fn prefilled(path: &Path) -> Journal {
    let line = |version: u64| encode(&Line::Change(change(version, "a", Some(&version.to_string()))));
    fs::write(path, (1..REWRITE_AT).flat_map(line).collect::<Vec<u8>>()).unwrap();
    load(path).0
}

#[test]
fn a_restart_keeps_whole_lines_and_discards_a_torn_one() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("overrides");
    let (mut journal, cursor, overrides) = load(&path);
    assert_eq!((cursor.version, overrides.len()), (0, 0));
    journal.write(&change(1, "a", Some("one")), 0, nothing).unwrap();
    journal.write(&change(2, "b", Some("two")), 1, nothing).unwrap();
    journal.write(&change(3, "a", None), 2, nothing).unwrap();
    drop(journal);
    let valid_bytes = fs::metadata(&path).unwrap().len();
    OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"change\":{\"versi").unwrap();
    for _ in 0..2 {
        let (journal, cursor, overrides) = load(&path);
        assert_eq!(cursor.version, 3);
        assert_eq!(overrides, [("b".to_owned(), 2, "two".to_owned())]);
        let versions: Vec<_> = journal.changes(3, 5).iter().map(|change| change.version).collect();
        assert_eq!(versions, [2, 1]);
        assert_eq!(fs::metadata(&path).unwrap().len(), valid_bytes);
    }
    fs::write(&path, "something else\n").unwrap();
    let error = Journal::new(Some(path)).load(|_, _, _| {}).unwrap_err().to_string();
    assert!(error.starts_with("invalid entry in override journal") && error.ends_with(":1"), "{error}");
}

/// A folder in place of the temporary file stands for a folder that is read-only.
#[test]
fn a_file_that_cannot_be_replaced_is_shortened_in_place() {
    let directory = tempfile::tempdir().unwrap();
    let (path, obstacle) = (directory.path().join("overrides"), directory.path().join("overrides.new"));
    fs::create_dir(&obstacle).unwrap();
    let mut journal = prefilled(&path);
    let many = REWRITE_AT + 2_500;
    let mut longest = 0;
    for version in REWRITE_AT..=many {
        write_version(&mut journal, version).unwrap();
        longest = longest.max(journal.line_count);
    }
    assert!(obstacle.exists() && longest <= MAX_RECENT_CHANGES + REWRITE_SLACK + 4, "{longest} lines");
    assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), journal.line_count);
    drop(journal);
    let (journal, cursor, overrides) = load(&path);
    assert_eq!((cursor.version, overrides), (many, vec![("a".to_owned(), many, many.to_string())]));
    assert_eq!(journal.changes(u64::MAX, 2_000).len(), MAX_RECENT_CHANGES);
}

#[test]
fn a_file_with_many_obsolete_lines_is_rewritten() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("overrides");
    let (mut journal, ..) = load(&path);
    let change_count = MAX_RECENT_CHANGES + REWRITE_SLACK + 10;
    for version in 1..=change_count as u64 {
        write_version(&mut journal, version).unwrap();
    }
    let lines = fs::read_to_string(&path).unwrap().lines().count();
    assert!(lines < change_count && lines == journal.line_count, "{lines} {}", journal.line_count);
    let (journal, cursor, overrides) = load(&path);
    assert_eq!(overrides, [("a".to_owned(), change_count as u64, change_count.to_string())]);
    assert_eq!(cursor.version, change_count as u64);
    assert_eq!(journal.changes(u64::MAX, 2_000).len(), MAX_RECENT_CHANGES);
}

/// The threshold depends on the number of overrides that remain, not on the number of earlier ones.
#[test]
fn a_file_is_rewritten_when_most_overrides_are_removed_together() {
    let directory = tempfile::tempdir().unwrap();
    let (mut journal, ..) = load(&directory.path().join("overrides"));
    let count = 2 * (MAX_RECENT_CHANGES + REWRITE_SLACK);
    for version in 1..=count as u64 {
        journal.write(&change(version, "a", Some("one")), count, || panic!("half of the lines are in use")).unwrap();
    }
    journal.write(&change(count as u64 + 1, "a", None), 1, nothing).unwrap();
    assert!(journal.line_count < count, "{}", journal.line_count);
}

#[test]
fn a_rule_set_exists_until_it_is_deleted() {
    let directory = tempfile::tempdir().unwrap();
    for path in [None, Some(directory.path().join("overrides"))] {
        let mut journal = Journal::new(path.clone());
        journal.load(|_, _, _| {}).unwrap();
        assert_eq!(journal.get_rule_set("d1").unwrap(), None);
        journal.put_rule_set("d1", "rules").unwrap();
        assert_eq!(journal.get_rule_set("d1").unwrap().as_deref(), Some("rules"));
        let reloaded = Journal::new(path.clone()).get_rule_set("d1").unwrap();
        assert_eq!(reloaded.is_some(), path.is_some());
        journal.delete_rule_set("d1");
        assert_eq!(journal.get_rule_set("d1").unwrap(), None);
    }
}

#[test]
fn without_a_file_recent_changes_are_available() {
    let mut journal = Journal::new(None);
    journal.load(|_, _, _| panic!()).unwrap();
    journal.write(&change(1, "a", Some("one")), 0, nothing).unwrap();
    assert_eq!(journal.changes(u64::MAX, 9).len(), 1);
}

#[test]
fn a_file_is_rewritten_when_it_has_more_lines_than_the_threshold() {
    let directory = tempfile::tempdir().unwrap();
    let (mut journal, ..) = load(&directory.path().join("overrides"));
    let (count, mut rewrites) = (10, 0);
    let threshold = 2 * count + MAX_RECENT_CHANGES + REWRITE_SLACK;
    for (lines, expected) in [(threshold, 0), (threshold + 1, 1)] {
        journal.line_count = lines;
        let overrides = || {
            rewrites += 1;
            nothing()
        };
        journal.write(&change(1, "a", Some("one")), count, overrides).unwrap();
        assert_eq!(rewrites, expected, "{lines} lines");
    }
}

#[test]
fn overrides_of_another_instance_survive_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("overrides");
    let (mut journal, ..) = load(&path);
    let overrides = [("a".to_owned(), 7, "one".to_owned()), ("b".to_owned(), 9, "two".to_owned())];
    journal.write_overrides(&overrides, 0, nothing).unwrap();
    assert_eq!(journal.line_count, 2);
    let (journal, cursor, loaded) = load(&path);
    assert_eq!((cursor.version, loaded.as_slice()), (9, overrides.as_slice()));
    assert!(journal.recent_changes().is_empty(), "they are not in the audit log");
}

#[test]
fn changes_after_a_position_are_available_while_they_are_recent() {
    let mut journal = Journal::new(None);
    let last = MAX_RECENT_CHANGES as u64;
    for version in 1..=last {
        assert_eq!(journal.oldest_version(), 0, "no change has been removed");
        journal.write(&change(version, "a", Some("one")), 1, nothing).unwrap();
    }
    let versions = |journal: &Journal, position| {
        let changes = journal.changes_after(position)?;
        Some(changes.iter().map(|change| change.version).collect::<Vec<_>>())
    };
    assert_eq!(versions(&journal, last - 2), Some(vec![last - 1, last]));
    assert_eq!((versions(&journal, last), versions(&journal, last + 1)), (Some(Vec::new()), None));
    journal.write(&change(last + 1, "a", Some("one")), 1, nothing).unwrap();
    assert_eq!(journal.oldest_version(), 2);
    assert_eq!((versions(&journal, 0), versions(&journal, 1)), (None, Some((2..=last + 1).collect())));
}

#[test]
fn a_target_is_removed_by_its_last_removal() {
    let mut journal = Journal::new(None);
    for change in [change(1, "a", None), change(2, "a", None), change(3, "a", Some("one")), change(4, "b", None)] {
        journal.write(&change, 1, nothing).unwrap();
    }
    assert_eq!(["a", "b", "c"].map(|target| journal.removed_at(target)), [2, 4, 0]);
}

#[test]
fn a_rule_set_that_cannot_be_read_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    fs::create_dir(directory.path().join("overrides.d1")).unwrap();
    let journal = Journal::new(Some(directory.path().join("overrides")));
    assert!(matches!(journal.get_rule_set("d1"), Err(JournalError::File { .. })));
}

#[test]
fn the_folder_of_a_file_in_the_working_directory_can_be_opened() {
    open_folder(Path::new("overrides")).unwrap();
}

/// Overrides of other instances make the file longer, too.
#[test]
fn overrides_of_another_instance_do_not_make_the_file_grow_without_bound() {
    let directory = tempfile::tempdir().unwrap();
    let (mut journal, ..) = load(&directory.path().join("overrides"));
    for version in 1..=2 * REWRITE_AT {
        let entry = ("a".to_owned(), version, version.to_string());
        journal.write_overrides(std::slice::from_ref(&entry), 1, || (Cursor::default(), vec![entry.clone()])).unwrap();
        assert!(journal.line_count <= MAX_RECENT_CHANGES + REWRITE_SLACK + 4, "{} lines", journal.line_count);
    }
}

#[test]
fn a_link_is_followed_and_the_permissions_stay() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    let (link, real) = (directory.path().join("link"), directory.path().join("data/overrides"));
    fs::create_dir(directory.path().join("data")).unwrap();
    std::os::unix::fs::symlink(&real, &link).unwrap();
    let mut journal = prefilled(&link);
    fs::set_permissions(&real, fs::Permissions::from_mode(0o640)).unwrap();
    write_version(&mut journal, REWRITE_AT).unwrap();
    assert!(journal.line_count < REWRITE_AT as usize, "the file was not rewritten");
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink(), "the link was replaced");
    assert_eq!(fs::metadata(&real).unwrap().permissions().mode() & 0o777, 0o640);
    assert_eq!(load(&real).1.version, REWRITE_AT);
}

#[test]
fn a_line_that_cannot_be_read_is_skipped_and_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("overrides");
    let (mut journal, ..) = load(&path);
    journal.write(&change(1, "a", Some("one")), 0, nothing).unwrap();
    drop(journal);
    let mut text = fs::read(&path).unwrap();
    text.extend_from_slice(b"nonsense\n");
    text.extend_from_slice(&vec![b'x'; MAX_LINE_BYTES + 1]);
    text.push(b'\n');
    fs::write(&path, text).unwrap();
    let log = TestLog::start();
    let (mut journal, cursor, _) = load(&path);
    let log = log.text();
    assert_eq!(cursor.version, 1);
    for expected in ["overrides:2", "not a journal entry", "overrides:3", "the line is too long"] {
        assert!(log.contains(expected), "{expected}: {log}");
    }
    journal.write(&change(2, "b", Some("two")), 1, nothing).unwrap();
    assert_eq!(load(&path).1.version, 2);
}

#[test]
fn something_else_than_a_file_is_no_journal() {
    let directory = tempfile::tempdir().unwrap();
    let error = Journal::new(Some(directory.path().to_owned())).load(|_, _, _| {}).unwrap_err();
    assert!(matches!(error, JournalError::File { .. }), "{error:?}");
    let pipe = directory.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let error = Journal::new(Some(pipe)).load(|_, _, _| {}).unwrap_err();
    assert!(crate::metrics::chain(&error).contains("not a regular file"), "{error:?}");
}

#[test]
fn only_an_incomplete_line_is_logged_at_the_start() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("overrides");
    let logged = || {
        let log = TestLog::start();
        drop(load(&path));
        log.text()
    };
    load(&path).0.write(&change(1, "a", Some("one")), 0, nothing).unwrap();
    assert_eq!(logged(), "");
    OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{").unwrap();
    assert!(logged().contains("removed an incomplete last line"));
    assert_eq!(logged(), "");
}
