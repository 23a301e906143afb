//! [`Journal`]: a file with the overrides of an instance that shares no store, one JSON line per change. Without a
//! path, nothing is written.
//!
//! A line is written and synced before its change takes effect. Only the last line can be incomplete, after a crash or
//! on a full disk, and it is removed at the next start. When most lines are obsolete, a new file is written and renamed
//! over the old one.

use std::{
    collections::{HashMap, VecDeque},
    fs::{self, File, OpenOptions},
    io::{self, BufRead, BufReader, BufWriter, Write},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::{Change, Cursor, OverrideChange, Versioned};

/// Number of obsolete lines, besides one per override and the recent changes, above which the file is rewritten.
const REWRITE_SLACK: usize = 1_000;
/// Number of recent changes that are available for the audit log.
const MAX_RECENT_CHANGES: usize = 1_000;

/// Error returned when the journal cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The file cannot be read or written.
    #[error("cannot read or write override journal {path}")]
    File {
        /// Path of the file.
        path: PathBuf,
        /// The underlying error.
        source: io::Error,
    },
    /// A line of the file is not a journal entry.
    #[error("invalid entry in override journal {path}:{line}")]
    Line {
        /// Path of the file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
    },
}

/// A line of the file.
#[derive(Serialize, Deserialize)]
enum Line {
    /// An override that was in force when the file was rewritten.
    #[serde(rename = "kept")]
    Override(Versioned),
    /// A change from before the rewrite, for the audit log only.
    #[serde(rename = "past")]
    LoggedChange(Change),
    /// A change since the rewrite.
    #[serde(rename = "change")]
    Change(Change),
    /// The last change that the [`Line::Override`] lines contain.
    #[serde(rename = "mark")]
    Cursor(Cursor),
}

/// A file with all overrides, and the recent changes in memory.
pub struct Journal {
    path: Option<PathBuf>,
    file: Option<File>,
    /// Number of lines in the file.
    line_count: usize,
    /// Number of lines by which the next rewrite is postponed, because the last one failed.
    postponed: usize,
    recent: VecDeque<Change>,
    /// Number of changes that were ever in `recent`.
    position: u64,
    /// Rule sets by digest, if there is no path for their files.
    rule_sets: HashMap<String, String>,
}

impl Journal {
    /// Creates a journal for this path, or one that writes no files.
    #[must_use]
    pub fn new(path: Option<PathBuf>) -> Self {
        Self {
            path,
            file: None,
            line_count: 0,
            postponed: 0,
            recent: VecDeque::new(),
            position: 0,
            rule_sets: HashMap::new(),
        }
    }

    /// Reads the file, opens it for further changes, and returns a cursor at the last change.
    ///
    /// `on_override` receives the target, version and text of each override, or no text if the override was removed.
    /// The last call for a target applies.
    ///
    /// # Errors
    ///
    /// Returns an error if the file cannot be read or written, or has an invalid line.
    pub fn load(&mut self, mut on_override: impl FnMut(&str, u64, Option<&str>)) -> Result<Cursor, JournalError> {
        let mut cursor = Cursor::default();
        let Some(path) = self.path.clone() else {
            return Ok(cursor);
        };
        let file_error = |source| JournalError::File { path: path.clone(), source };
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(&path).map_err(file_error)?;
        let (mut valid_bytes, mut number) = (0_u64, 0);
        let mut reader = BufReader::new(&mut file);
        let mut text = Vec::new();
        loop {
            text.clear();
            let read = reader.read_until(b'\n', &mut text).map_err(file_error)?;
            if read == 0 || text.last() != Some(&b'\n') {
                break;
            }
            number += 1;
            let line = serde_json::from_slice(&text);
            let line = line.map_err(|_| JournalError::Line { path: path.clone(), line: number })?;
            match line {
                Line::Override((target, version, text)) => {
                    cursor.version = cursor.version.max(version);
                    on_override(&target, version, Some(&text));
                }
                Line::Cursor(last) => cursor = last,
                Line::LoggedChange(change) => self.push_recent(change),
                Line::Change(change) => {
                    for OverrideChange { target, after, .. } in &change.changes {
                        on_override(target, change.version, after.as_deref());
                    }
                    cursor.version = cursor.version.max(change.version);
                    self.push_recent(change);
                }
            }
            valid_bytes += read as u64;
        }
        drop(reader);
        if file.metadata().map_err(file_error)?.len() > valid_bytes {
            tracing::warn!(path = %path.display(), "removed an incomplete last line from the override journal");
            file.set_len(valid_bytes).map_err(file_error)?;
        }
        (self.file, self.line_count) = (Some(file), number);
        Ok(cursor)
    }

    /// Writes and syncs a change.
    ///
    /// `count` is the number of overrides. `overrides` returns those before the change, with the cursor, and is called
    /// only to rewrite the file.
    ///
    /// # Errors
    ///
    /// Returns an error if the file cannot be written. The change must then not take effect.
    pub fn write(
        &mut self,
        change: &Change,
        count: usize,
        overrides: impl FnOnce() -> (Cursor, Vec<Versioned>),
    ) -> Result<(), JournalError> {
        if let Some(path) = self.path.clone() {
            let file_error = |source| JournalError::File { path: path.clone(), source };
            if self.line_count > 2 * count + MAX_RECENT_CHANGES + REWRITE_SLACK + self.postponed {
                self.rewrite(overrides()).map_err(file_error)?;
            }
            let file = match &mut self.file {
                Some(file) => file,
                None => self.file.insert(OpenOptions::new().append(true).create(true).open(&path).map_err(file_error)?),
            };
            let old_length = file.metadata().map_err(file_error)?.len();
            let line = encode(&Line::Change(change.clone()));
            if let Err(source) = file.write_all(&line).and_then(|()| file.sync_data()) {
                // An incomplete line would make the next line invalid.
                let _ = file.set_len(old_length);
                return Err(file_error(source));
            }
            self.line_count += 1;
        }
        self.push_recent(change.clone());
        Ok(())
    }

    /// Returns up to `max_changes` recent changes before version `before`, in descending order.
    pub fn changes(&self, before: u64, max_changes: usize) -> Vec<Change> {
        let older = self.recent.iter().rev().filter(|change| change.version < before);
        older.take(max_changes).cloned().collect()
    }

    /// Writes and syncs overrides that another instance has made, without changes for the audit log.
    ///
    /// # Errors
    ///
    /// Returns an error if the file cannot be written. The overrides must then not take effect.
    pub fn write_overrides(&mut self, overrides: &[Versioned]) -> Result<(), JournalError> {
        let Some(path) = self.path.clone() else {
            return Ok(());
        };
        let file_error = |source| JournalError::File { path: path.clone(), source };
        let lines: Vec<u8> = overrides.iter().flat_map(|entry| encode(&Line::Override(entry.clone()))).collect();
        if let Some(file) = &mut self.file {
            let old_length = file.metadata().map_err(file_error)?.len();
            if let Err(source) = file.write_all(&lines).and_then(|()| file.sync_data()) {
                let _ = file.set_len(old_length);
                return Err(file_error(source));
            }
            self.line_count += overrides.len();
        }
        Ok(())
    }

    /// Returns the position: the number of changes that this process has read or written.
    #[must_use]
    pub const fn position(&self) -> u64 {
        self.position
    }

    /// Returns the changes after a position, the oldest first. Returns `None` if they are no longer available.
    #[must_use]
    pub fn changes_after(&self, position: u64) -> Option<Vec<Change>> {
        let missing = usize::try_from(self.position.checked_sub(position)?).ok()?;
        let skipped = self.recent.len().checked_sub(missing)?;
        Some(self.recent.iter().skip(skipped).cloned().collect())
    }

    /// Returns all recent changes, the oldest first.
    #[must_use]
    pub fn recent_changes(&self) -> Vec<Change> {
        self.recent.iter().cloned().collect()
    }

    /// Returns whether the recent changes contain the change with this id.
    #[must_use]
    pub fn contains(&self, id: &str) -> bool {
        self.recent.iter().any(|change| change.id == id)
    }

    /// Returns the version of the recent change that removed a target last, or 0 if there is none.
    #[must_use]
    pub fn removed_at(&self, target: &str) -> u64 {
        let removes =
            |change: &&Change| change.changes.iter().any(|changed| changed.target == target && changed.after.is_none());
        self.recent.iter().filter(removes).map(|change| change.version).max().unwrap_or_default()
    }

    /// Returns the version of the oldest recent change; 0 if no change has been removed from the recent ones.
    #[must_use]
    pub fn oldest_version(&self) -> u64 {
        let is_complete = self.recent.len() < MAX_RECENT_CHANGES;
        if is_complete { 0 } else { self.recent.iter().map(|change| change.version).min().unwrap_or_default() }
    }

    /// Stores a rule set atomically, in a separate file next to the journal.
    pub(super) fn put_rule_set(&mut self, digest: &str, text: &str) -> Result<(), JournalError> {
        let Some(path) = self.rule_set_path(digest) else {
            self.rule_sets.insert(digest.to_owned(), text.to_owned());
            return Ok(());
        };
        let temporary = path.with_extension("new");
        let write = || {
            let mut file = File::create(&temporary)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            replace_file(&temporary, &path)
        };
        write().map_err(|source| JournalError::File { path: path.clone(), source })
    }

    /// Returns a rule set, or `None` if there is none with this digest.
    ///
    /// # Errors
    ///
    /// Returns an error if its file cannot be read.
    pub fn get_rule_set(&self, digest: &str) -> Result<Option<String>, JournalError> {
        let Some(path) = self.rule_set_path(digest) else {
            return Ok(self.rule_sets.get(digest).cloned());
        };
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(JournalError::File { path, source }),
        }
    }

    pub(super) fn delete_rule_set(&mut self, digest: &str) {
        match self.rule_set_path(digest) {
            Some(path) => drop(fs::remove_file(path)),
            None => drop(self.rule_sets.remove(digest)),
        }
    }

    fn rule_set_path(&self, digest: &str) -> Option<PathBuf> {
        // Characters with a meaning in paths are removed, although no digest contains them.
        let digest: String = digest.chars().filter(char::is_ascii_alphanumeric).collect();
        let mut path = self.path.clone()?.into_os_string();
        path.push(format!(".{digest}"));
        Some(path.into())
    }

    fn push_recent(&mut self, change: Change) {
        if self.recent.len() >= MAX_RECENT_CHANGES {
            self.recent.pop_front();
        }
        self.recent.push_back(change);
        self.position += 1;
    }

    /// Replaces the file by a shorter one. If it cannot be written, for example because the disk is full, the longer file
    /// stays in use.
    fn rewrite(&mut self, contents: (Cursor, Vec<Versioned>)) -> io::Result<()> {
        let Some(path) = self.path.clone() else {
            return Ok(());
        };
        let temporary = path.with_extension("new");
        let lines = match self.write_all(&temporary, contents) {
            Ok(lines) => lines,
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "cannot shorten the override journal, which grows until that is possible");
                self.postponed += REWRITE_SLACK;
                // An incomplete file would keep the disk full.
                let _ = fs::remove_file(&temporary);
                return Ok(());
            }
        };
        // If the new name may not survive a crash, the next change must not go to the old file.
        self.file = None;
        replace_file(&temporary, &path)?;
        let file = OpenOptions::new().append(true).open(&path)?;
        (self.file, self.line_count, self.postponed) = (Some(file), lines, 0);
        Ok(())
    }

    /// Writes all overrides and the recent changes to another file, and returns the number of its lines.
    fn write_all(&self, path: &Path, (cursor, overrides): (Cursor, Vec<Versioned>)) -> io::Result<usize> {
        let mut file = BufWriter::new(File::create(path)?);
        let mut lines = 0;
        let logged = self.recent.iter().cloned().map(Line::LoggedChange);
        for line in overrides.into_iter().map(Line::Override).chain([Line::Cursor(cursor)]).chain(logged) {
            file.write_all(&encode(&line))?;
            lines += 1;
        }
        file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
        Ok(lines)
    }
}

/// Renames a file so that the new name survives a crash, for which the directory must be synced as well.
fn replace_file(temporary: &Path, path: &Path) -> io::Result<()> {
    fs::rename(temporary, path)?;
    let directory = path.parent().filter(|directory| !directory.as_os_str().is_empty());
    File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
}

fn encode(line: &Line) -> Vec<u8> {
    let mut bytes = serde_json::to_vec(line).unwrap_or_default();
    bytes.push(b'\n');
    bytes
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::test_log::TestLog;

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

    /// A folder in place of the temporary file stands for a full disk.
    #[test]
    fn a_file_that_cannot_be_rewritten_grows_until_it_can() {
        let directory = tempfile::tempdir().unwrap();
        let (path, obstacle) = (directory.path().join("overrides"), directory.path().join("overrides.new"));
        let (mut journal, ..) = load(&path);
        fs::create_dir(&obstacle).unwrap();
        let mut write = |version: u64| {
            let cursor = Cursor { version: version - 1, ..Cursor::default() };
            let overrides = || (cursor, vec![("a".to_owned(), version - 1, (version - 1).to_string())]);
            journal.write(&change(version, "a", Some(&version.to_string())), 1, overrides).unwrap();
        };
        let many = (MAX_RECENT_CHANGES + REWRITE_SLACK + 10) as u64;
        (1..=many).for_each(&mut write);
        let (_, cursor, overrides) = load(&path);
        assert_eq!((cursor.version, overrides), (many, vec![("a".to_owned(), many, many.to_string())]));
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count() as u64, many);
        fs::remove_dir(&obstacle).unwrap();
        let more = many + REWRITE_SLACK as u64;
        (many + 1..=more).for_each(&mut write);
        let (journal, cursor, overrides) = load(&path);
        assert_eq!((cursor.version, overrides), (more, vec![("a".to_owned(), more, more.to_string())]));
        assert!(journal.line_count < MAX_RECENT_CHANGES + REWRITE_SLACK, "{} lines", journal.line_count);
        assert!(!obstacle.exists());
    }

    #[test]
    fn a_file_with_many_obsolete_lines_is_rewritten() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("overrides");
        let (mut journal, ..) = load(&path);
        let change_count = MAX_RECENT_CHANGES + REWRITE_SLACK + 10;
        for version in 1..=change_count as u64 {
            let cursor = Cursor { version: version - 1, ..Cursor::default() };
            let overrides = || (cursor, vec![("a".to_owned(), version - 1, (version - 1).to_string())]);
            journal.write(&change(version, "a", Some(&version.to_string())), 1, overrides).unwrap();
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
            journal
                .write(&change(version, "a", Some("one")), count, || panic!("half of the lines are in use"))
                .unwrap();
        }
        journal.write(&change(count as u64 + 1, "a", None), 1, nothing).unwrap();
        assert!(journal.line_count < count, "{}", journal.line_count);
    }

    #[test]
    fn a_rule_set_exists_until_it_is_deleted() {
        let directory = tempfile::tempdir().unwrap();
        for path in [None, Some(directory.path().join("overrides"))] {
            let mut journal = Journal::new(path.clone());
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
        journal.write_overrides(&overrides).unwrap();
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
    fn a_file_in_the_working_directory_can_be_replaced() {
        let file = tempfile::NamedTempFile::new_in(".").unwrap();
        let name = Path::new(file.path().file_name().unwrap());
        replace_file(name, name).unwrap();
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
}
