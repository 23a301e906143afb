//! Two journals of one file: one holds the lock, and the other follows.

use super::*;

/// Loads the file again, as an instance does that is behind.
fn follow(journal: &mut Journal) -> Vec<Versioned> {
    assert!(journal.is_behind());
    let path = journal.file.as_ref().unwrap().path().to_owned();
    let (next, _, overrides) = load(&path);
    assert!(journal.continue_with(next));
    overrides
}

fn entry(version: u64) -> Vec<Versioned> {
    vec![("a".to_owned(), version, version.to_string())]
}

#[test]
fn the_second_process_reads_and_follows_the_file_and_takes_over() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("overrides");
    let (mut first, ..) = load(&path);
    write_version(&mut first, 1).unwrap();
    let (mut second, _, overrides) = load(&path);
    assert_eq!((overrides, second.is_read_only(), first.is_read_only()), (entry(1), true, false));
    let error = write_version(&mut second, 2).unwrap_err();
    assert!(matches!(&error, JournalError::Locked { path: named } if *named == path), "{error:?}");
    assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
    let error = second.write_overrides(&entry(2), 1, nothing).unwrap_err();
    assert!(matches!(error, JournalError::Locked { .. }), "{error:?}");
    assert!(matches!(second.put_rule_set("d1", "rules"), Err(JournalError::Locked { .. })));
    assert!(!second.is_behind());
    // Not even an incomplete line is touched, because the other process may be writing it.
    write_version(&mut first, 2).unwrap();
    OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{").unwrap();
    let length = fs::metadata(&path).unwrap().len();
    assert_eq!(follow(&mut second), entry(2));
    assert_eq!(fs::metadata(&path).unwrap().len(), length);
    assert!(second.is_read_only() && !second.is_behind());
    drop(first);
    assert_eq!(follow(&mut second), entry(2));
    assert!(!second.is_read_only() && !second.is_behind());
    write_version(&mut second, 3).unwrap();
    drop(second);
    assert_eq!(load(&path).2, entry(3));
}

#[test]
fn the_lock_and_the_reader_survive_rewrites() {
    for can_be_replaced in [true, false] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("overrides");
        if !can_be_replaced {
            fs::create_dir(path.with_extension("new")).unwrap();
        }
        let mut first = prefilled(&path);
        let (mut second, ..) = load(&path);
        let many = REWRITE_AT + 3;
        for version in REWRITE_AT..=many {
            first.line_count = REWRITE_AT as usize;
            write_version(&mut first, version).unwrap();
            assert!(first.line_count < REWRITE_AT as usize, "the file was not rewritten");
            assert_eq!(follow(&mut second), entry(version));
            assert!(second.is_read_only(), "the new file is not locked");
        }
        drop(first);
        assert_eq!(follow(&mut second), entry(many));
        assert!(!second.is_read_only());
    }
}

/// A process of an earlier release writes without a lock, or an operator edits the file.
#[test]
fn a_change_by_another_program_is_read_before_the_next_one_is_written() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("overrides");
    let (mut journal, ..) = load(&path);
    write_version(&mut journal, 1).unwrap();
    let foreign = encode(&Line::Change(change(2, "a", Some("2"))));
    OpenOptions::new().append(true).open(&path).unwrap().write_all(&foreign).unwrap();
    assert!(matches!(write_version(&mut journal, 2), Err(JournalError::Changed { .. })));
    assert!(matches!(write_version(&mut journal, 2), Err(JournalError::Locked { .. })));
    assert_eq!(follow(&mut journal), entry(2));
    write_version(&mut journal, 3).unwrap();
    // Another file under the name.
    fs::write(path.with_extension("other"), encode(&Line::Change(change(9, "a", Some("9"))))).unwrap();
    fs::rename(path.with_extension("other"), &path).unwrap();
    assert_eq!(follow(&mut journal), entry(9));
    write_version(&mut journal, 10).unwrap();
    drop(journal);
    assert_eq!(load(&path).2, entry(10));
}

#[test]
fn a_file_that_the_other_process_removed_is_written_anew() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("overrides");
    let (mut first, ..) = load(&path);
    write_version(&mut first, 1).unwrap();
    let (mut second, ..) = load(&path);
    fs::remove_file(&path).unwrap();
    drop(first);
    assert!(second.is_behind());
    let next = load(&path).0;
    assert!(!second.continue_with(next), "the overrides stay in force");
    write_version(&mut second, 2).unwrap();
    drop(second);
    let (journal, _, overrides) = load(&path);
    assert_eq!((overrides, journal.recent_changes().len()), (entry(2), 2));
}

/// Peers that have read this journal must not miss changes that were read again.
#[test]
fn positions_from_before_a_reload_are_not_available() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("overrides");
    let (mut first, ..) = load(&path);
    write_version(&mut first, 1).unwrap();
    let (mut second, ..) = load(&path);
    let before = second.position();
    write_version(&mut first, 2).unwrap();
    follow(&mut second);
    assert!(second.position() > before);
    assert_eq!(second.changes_after(before).map(|changes| changes.len()), None);
    assert_eq!(second.changes_after(second.position()).map(|changes| changes.len()), Some(0));
}
