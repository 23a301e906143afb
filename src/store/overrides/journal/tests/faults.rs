//! Crashes between any two steps, and failures of each step: acknowledged changes are in the file, and failed ones are
//! not.

use std::{
    cell::RefCell,
    io,
    path::{Path, PathBuf},
    rc::Rc,
};

use super::{
    super::disk::{Operation, planted},
    *,
};

/// A journal with a file that the next change rewrites.
struct LongJournal {
    directory: tempfile::TempDir,
    journal: Journal,
}

impl LongJournal {
    fn new(can_be_replaced: bool) -> Self {
        let directory = tempfile::tempdir().unwrap();
        if !can_be_replaced {
            fs::create_dir(directory.path().join("overrides.new")).unwrap();
        }
        let journal = prefilled(&directory.path().join("overrides"));
        Self { directory, journal }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("overrides")
    }
}

/// Returns the version and the override after a restart.
fn restarted(path: &Path) -> (u64, String) {
    let (_, cursor, overrides) = load(path);
    assert_eq!(overrides.len(), 1, "{overrides:?}");
    (cursor.version, overrides[0].2.clone())
}

fn state(version: u64) -> (u64, String) {
    (version, version.to_string())
}

/// Copies all files of a folder, as they would be found after kill -9.
fn copy(from: &Path) -> tempfile::TempDir {
    let to = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let target = to.path().join(entry.file_name());
        if entry.metadata().unwrap().is_dir() {
            fs::create_dir(target).unwrap();
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
    to
}

#[test]
fn a_crash_at_any_point_of_a_rewrite_loses_nothing() {
    for can_be_replaced in [true, false] {
        let mut long = LongJournal::new(can_be_replaced);
        let (copies, folder) = (Rc::new(RefCell::new(Vec::new())), long.directory.path().to_owned());
        let kept = Rc::clone(&copies);
        let plan = move |_, _| {
            kept.borrow_mut().push(copy(&folder));
            Ok(())
        };
        let (written, steps) = planted::run(plan, || write_version(&mut long.journal, REWRITE_AT));
        written.unwrap();
        assert!(steps > 8 && long.journal.line_count < REWRITE_AT as usize, "{steps} steps");
        for (step, copy) in copies.take().iter().enumerate() {
            let path = copy.path().join("overrides");
            let expected = [state(REWRITE_AT - 1), state(REWRITE_AT)];
            // The first start may have repaired the file, and the second one must find the same.
            let first = restarted(&path);
            assert!(expected.contains(&first), "step {step} of {steps}: {first:?}");
            let (mut journal, ..) = load(&path);
            assert_eq!(journal.changes(u64::MAX, 2_000).len(), MAX_RECENT_CHANGES, "step {step}");
            let next = first.0 + 1;
            write_version(&mut journal, next).unwrap();
            drop(journal);
            assert_eq!(restarted(&path), state(next), "step {step} of {steps}");
        }
    }
}

/// The lines of many overrides are elsewhere in the shorter file, so that a half-moved file would lack some.
#[test]
fn a_crash_at_any_point_of_a_rewrite_keeps_all_of_many_overrides() {
    const OVERRIDES: u64 = 1_500;
    let text = "x".repeat(100);
    let set = |version: u64| change(version, &format!("u{version}"), Some(&text));
    let last = 2 * OVERRIDES + REWRITE_AT;
    let kept = |version: u64| (format!("u{version}"), version, text.clone());
    let overrides: Vec<Versioned> = (1..=OVERRIDES).rev().map(kept).collect();
    for can_be_replaced in [true, false] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("overrides");
        if !can_be_replaced {
            fs::create_dir(path.with_extension("new")).unwrap();
        }
        let actions = (OVERRIDES + 1..last).map(|version| Change { changes: Vec::new(), ..set(version) });
        let lines = (1..=OVERRIDES).map(set).chain(actions).map(Line::Change);
        fs::write(&path, lines.flat_map(|line| encode(&line)).collect::<Vec<u8>>()).unwrap();
        let (mut journal, ..) = load(&path);
        let (copies, folder) = (Rc::new(RefCell::new(Vec::new())), directory.path().to_owned());
        let taken = Rc::clone(&copies);
        let plan = move |_, _| {
            taken.borrow_mut().push(copy(&folder));
            Ok(())
        };
        let contents = || (Cursor { version: last - 1, ..Cursor::default() }, overrides.clone());
        let write = || journal.write(&Change { changes: Vec::new(), ..set(last) }, OVERRIDES as usize, contents);
        let (written, steps) = planted::run(plan, write);
        written.unwrap();
        assert!((journal.line_count as u64) < last, "the file was not rewritten");
        for (step, copy) in copies.take().iter().enumerate() {
            let (_, cursor, found) = load(&copy.path().join("overrides"));
            assert!(cursor.version >= last - 1, "step {step} of {steps}: {cursor:?}");
            assert_eq!(found.len() as u64, OVERRIDES, "step {step} of {steps}, replaced: {can_be_replaced}");
        }
    }
}

/// One step fails, or all steps from one on, as on a disk that is full or that was removed.
#[test]
fn a_step_that_fails_forgets_no_acknowledged_change_and_keeps_no_other() {
    for can_be_replaced in [true, false] {
        for is_permanent in [false, true] {
            let mut step = 0;
            loop {
                let mut long = LongJournal::new(can_be_replaced);
                let plan = move |number, _| {
                    let fails = number == step || is_permanent && number > step;
                    if fails { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
                };
                let (written, steps) = planted::run(plan, || write_version(&mut long.journal, REWRITE_AT));
                let what = format!("step {step} of {steps}, replaced: {can_be_replaced}, permanent: {is_permanent}");
                let version = if written.is_ok() { REWRITE_AT } else { REWRITE_AT - 1 };
                // After a crash now, acknowledged changes are found. A line that may be there despite an error of the
                // disk is removed as soon as the disk works again.
                let crashed = copy(long.directory.path());
                let found = restarted(&crashed.path().join("overrides"));
                assert!(found == state(version) || written.is_err() && found == state(REWRITE_AT), "{what}: {found:?}");
                // The same process can write again.
                let next = REWRITE_AT + 7;
                write_version(&mut long.journal, next).unwrap_or_else(|error| panic!("{what}: {error:?}"));
                let path = long.path();
                drop(long.journal);
                assert_eq!(restarted(&path), state(next), "{what}");
                let text = fs::read_to_string(&path).unwrap();
                let failed = format!("\"id{REWRITE_AT}\"");
                assert_eq!(text.contains(&failed), written.is_ok(), "{what}");
                if step >= steps {
                    assert!(written.is_ok(), "{what}");
                    break;
                }
                step += 1;
            }
            assert!(step > 5, "{step} steps");
        }
    }
}

/// Overrides of another instance are in the file, or are rejected.
#[test]
fn overrides_of_another_instance_are_never_acknowledged_without_a_file() {
    let mut long = LongJournal::new(false);
    let entry = ("b".to_owned(), 9_000, "two".to_owned());
    let mut is_acknowledged = false;
    for step in 0..40 {
        let plan = move |number, _| if number >= step { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) };
        let write = || long.journal.write_overrides(std::slice::from_ref(&entry), 1, nothing_but_a);
        is_acknowledged = planted::run(plan, write).0.is_ok();
        if is_acknowledged {
            break;
        }
    }
    assert!(is_acknowledged);
    let path = long.path();
    drop(long.journal);
    assert!(load(&path).2.contains(&entry));
    let mut unloaded = Journal::new(Some(path));
    assert!(unloaded.write_overrides(&[], 1, nothing).is_err(), "a journal without a file writes nothing");
}

fn nothing_but_a() -> (Cursor, Vec<Versioned>) {
    (Cursor { version: REWRITE_AT - 1, ..Cursor::default() }, vec![("a".to_owned(), 1, "one".to_owned())])
}

#[test]
fn a_file_that_cannot_be_shortened_grows_and_is_shortened_later() {
    let mut long = LongJournal::new(true);
    let size = long.journal.bytes();
    let log = TestLog::start();
    // There is room for a change, not for the shorter file in addition to the long one.
    let mut version = REWRITE_AT;
    for _ in 0..REWRITE_SLACK {
        let (path, limit) = (long.path(), long.journal.bytes() + 1_000);
        let plan = move |_, operation| {
            let is_full = fs::metadata(&path).unwrap().len() > limit || path.with_extension("new").exists();
            if operation == Operation::Write && is_full { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
        };
        planted::run(plan, || write_version(&mut long.journal, version)).0.unwrap();
        version += 1;
    }
    let log = log.text();
    assert_eq!(log.matches("cannot shorten the override journal").count(), 1, "{log}");
    assert!(long.journal.bytes() > size);
    for _ in 0..10 {
        write_version(&mut long.journal, version).unwrap();
        version += 1;
    }
    assert!(long.journal.bytes() < size, "{} {size}", long.journal.bytes());
    let path = long.path();
    drop(long.journal);
    assert_eq!(restarted(&path), state(version - 1));
}

/// A file can end anywhere after a crash of the machine.
#[test]
fn a_file_that_ends_anywhere_has_all_whole_lines() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("overrides");
    let (mut journal, ..) = load(&path);
    for version in 1..=3 {
        write_version(&mut journal, version).unwrap();
    }
    drop(journal);
    let all = fs::read(&path).unwrap();
    for length in 0..=all.len() {
        fs::write(&path, &all[..length]).unwrap();
        let (mut journal, cursor, _) = load(&path);
        let lines = all[..length].iter().filter(|byte| **byte == b'\n').count() as u64;
        assert_eq!(cursor.version, lines, "{length} bytes");
        write_version(&mut journal, 4).unwrap();
        drop(journal);
        assert_eq!(restarted(&path), state(4), "{length} bytes");
    }
}

#[test]
fn a_file_that_was_removed_or_emptied_is_written_anew() {
    for is_removed in [true, false] {
        for can_be_replaced in [true, false] {
            if is_removed && !can_be_replaced {
                continue;
            }
            let mut long = LongJournal::new(can_be_replaced);
            let path = long.path();
            if is_removed {
                fs::remove_file(&path).unwrap();
            } else {
                fs::write(&path, "").unwrap();
            }
            assert!(!long.journal.is_behind(), "an empty file changes no override");
            write_version(&mut long.journal, REWRITE_AT).unwrap();
            drop(long.journal);
            assert_eq!(restarted(&path), state(REWRITE_AT), "removed: {is_removed}");
        }
    }
}

#[test]
fn a_rule_set_that_cannot_be_written_leaves_no_file() {
    let directory = tempfile::tempdir().unwrap();
    let (mut journal, ..) = load(&directory.path().join("overrides"));
    let mut step = 0;
    loop {
        let plan = move |number, _| if number == step { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) };
        let (written, steps) = planted::run(plan, || journal.put_rule_set("d1", "rules"));
        assert!(!directory.path().join("overrides.new").exists(), "step {step}");
        if step >= steps {
            written.unwrap();
            break;
        }
        assert!(written.is_err(), "step {step}");
        step += 1;
    }
    assert_eq!(journal.get_rule_set("d1").unwrap().as_deref(), Some("rules"));
}
