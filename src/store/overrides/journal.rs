//! The overrides of an instance that shares no store: in a file, one JSON line for each change, or nowhere.
//!
//! A line is written and synced before the change is in force. One that is torn, by a crash or a full disk, is the last;
//! it is cut off at the next start. When most lines are of no more use, the file is written anew beside itself
//! and renamed.

use std::{
    collections::{HashMap, VecDeque},
    fs::{self, File, OpenOptions},
    io::{self, BufRead, BufReader, BufWriter, Write},
    path::PathBuf,
};

use serde::{Deserialize, Serialize};

use super::{Change, Cursor, OverrideChange, Versioned};

/// The file is written anew when it has so many lines more than there are things to keep …
const SLACK: usize = 1_000;
/// … and so many changes stay for whoever asks what happened.
const REMEMBERED: usize = 1_000;

/// A file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// It cannot be read or written.
    #[error("cannot use {path} for overrides")]
    File {
        /// The file.
        path: PathBuf,
        /// What went wrong.
        source: io::Error,
    },
    /// It is something else.
    #[error("{path}:{line} is no line of overrides")]
    Line {
        /// The file.
        path: PathBuf,
        /// The line.
        line: usize,
    },
}

/// A line.
#[derive(Serialize, Deserialize)]
enum Line {
    /// Something that is kept, from before the changes that follow.
    #[serde(rename = "kept")]
    Kept(Versioned),
    /// A change that is in what is kept already.
    #[serde(rename = "past")]
    Past(Change),
    /// A change.
    #[serde(rename = "change")]
    Change(Change),
    /// The version that what is kept has.
    #[serde(rename = "mark")]
    Mark(Cursor),
}

/// The file, and the latest changes.
pub struct Journal {
    path: Option<PathBuf>,
    file: Option<File>,
    /// Lines in the file, and those that it cannot do without.
    lines: usize,
    recent: VecDeque<Change>,
    /// Large texts by their digests, where there is no file beside which they could be.
    sets: HashMap<String, String>,
}

impl Journal {
    /// In this file, or nowhere.
    #[must_use]
    pub fn new(path: Option<PathBuf>) -> Self {
        Self { path, file: None, lines: 0, recent: VecDeque::new(), sets: HashMap::new() }
    }

    /// Reads what there is, and opens the file to go on. `each`: the target, the version, and the text, or none any more; of
    /// several for one target the last holds.
    pub fn load(&mut self, mut each: impl FnMut(&str, u64, Option<&str>)) -> Result<Cursor, JournalError> {
        let mut mark = Cursor::default();
        let Some(path) = self.path.clone() else {
            return Ok(mark);
        };
        let failed = |source| JournalError::File { path: path.clone(), source };
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(&path).map_err(failed)?;
        let (mut whole, mut number) = (0_u64, 0);
        let mut reader = BufReader::new(&mut file);
        let mut text = Vec::new();
        loop {
            text.clear();
            let read = reader.read_until(b'\n', &mut text).map_err(failed)?;
            if read == 0 || text.last() != Some(&b'\n') {
                break;
            }
            number += 1;
            let line = serde_json::from_slice(&text);
            let line = line.map_err(|_| JournalError::Line { path: path.clone(), line: number })?;
            match line {
                Line::Kept((target, version, text)) => each(&target, version, Some(&text)),
                Line::Mark(last) => mark = last,
                Line::Past(change) => self.remember(change),
                Line::Change(change) => {
                    for OverrideChange { target, after, .. } in &change.changes {
                        each(target, change.version, after.as_deref());
                    }
                    mark.version = change.version;
                    self.remember(change);
                }
            }
            whole += read as u64;
        }
        drop(reader);
        if file.metadata().map_err(failed)?.len() > whole {
            tracing::warn!(path = %path.display(), "the last line of the overrides is torn, and cut off");
            file.set_len(whole).map_err(failed)?;
        }
        (self.file, self.lines) = (Some(file), number);
        Ok(mark)
    }

    /// Keeps a change. `kept`: all there is, without it; for a file that is to be written anew.
    pub fn write(
        &mut self,
        change: &Change,
        count: usize,
        kept: impl FnOnce() -> (Cursor, Vec<Versioned>),
    ) -> Result<(), JournalError> {
        if let Some(path) = self.path.clone() {
            let failed = |source| JournalError::File { path: path.clone(), source };
            if self.lines > 2 * count + REMEMBERED + SLACK {
                self.write_anew(kept()).map_err(failed)?;
            }
            let file = match &mut self.file {
                Some(file) => file,
                None => self.file.insert(OpenOptions::new().append(true).create(true).open(&path).map_err(failed)?),
            };
            let before = file.metadata().map_err(failed)?.len();
            let line = line(&Line::Change(change.clone()));
            if let Err(source) = file.write_all(&line).and_then(|()| file.sync_data()) {
                // Half a line would spoil the next one.
                let _ = file.set_len(before);
                return Err(failed(source));
            }
            self.lines += 1;
        }
        self.remember(change.clone());
        Ok(())
    }

    /// The latest changes before this version, the last first.
    pub fn changes(&self, before: u64, most: usize) -> Vec<Change> {
        let older = self.recent.iter().rev().filter(|change| change.version < before);
        older.take(most).cloned().collect()
    }

    /// Keeps a large text, in a file of its own beside this one: whole or not at all.
    pub(super) fn put_rule_set(&mut self, digest: &str, text: &str) -> Result<(), JournalError> {
        let Some(path) = self.set_path(digest) else {
            self.sets.insert(digest.to_owned(), text.to_owned());
            return Ok(());
        };
        let beside = path.with_extension("new");
        let write = || {
            let mut file = File::create(&beside)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            fs::rename(&beside, &path)
        };
        write().map_err(|source| JournalError::File { path: path.clone(), source })
    }

    pub(super) fn get_rule_set(&self, digest: &str) -> Result<Option<String>, JournalError> {
        let Some(path) = self.set_path(digest) else {
            return Ok(self.sets.get(digest).cloned());
        };
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(JournalError::File { path, source }),
        }
    }

    pub(super) fn delete_rule_set(&mut self, digest: &str) {
        match self.set_path(digest) {
            Some(path) => drop(fs::remove_file(path)),
            None => drop(self.sets.remove(digest)),
        }
    }

    fn set_path(&self, digest: &str) -> Option<PathBuf> {
        // A digest has no letters that mean something in a path.
        let digest: String = digest.chars().filter(char::is_ascii_alphanumeric).collect();
        let mut path = self.path.clone()?.into_os_string();
        path.push(format!(".{digest}"));
        Some(path.into())
    }

    fn remember(&mut self, change: Change) {
        if self.recent.len() >= REMEMBERED {
            self.recent.pop_front();
        }
        self.recent.push_back(change);
    }

    fn write_anew(&mut self, (mark, kept): (Cursor, Vec<Versioned>)) -> io::Result<()> {
        let Some(path) = &self.path else {
            return Ok(());
        };
        let beside = path.with_extension("new");
        let mut file = BufWriter::new(File::create(&beside)?);
        let mut lines = 0;
        let past = self.recent.iter().cloned().map(Line::Past);
        for part in kept.into_iter().map(Line::Kept).chain([Line::Mark(mark)]).chain(past) {
            file.write_all(&line(&part))?;
            lines += 1;
        }
        let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.sync_all()?;
        fs::rename(&beside, path)?;
        // The rename is there after a crash only when the folder has been synced as well.
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            File::open(folder)?.sync_all()?;
        }
        (self.file, self.lines) = (Some(OpenOptions::new().append(true).open(path)?), lines);
        Ok(())
    }
}

fn line(line: &Line) -> Vec<u8> {
    let mut bytes = serde_json::to_vec(line).unwrap_or_default();
    bytes.push(b'\n');
    bytes
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn change(version: u64, target: &str, after: Option<&str>) -> Change {
        let part = OverrideChange { target: target.into(), before: None, after: after.map(str::to_owned) };
        Change { version, id: format!("id{version}"), info: "head".into(), changes: vec![part] }
    }

    fn load(path: &std::path::Path) -> (Journal, Cursor, Vec<Versioned>) {
        let mut journal = Journal::new(Some(path.to_owned()));
        let mut kept = BTreeMap::new();
        let each = |target: &str, version: u64, text: Option<&str>| match text {
            Some(text) => drop(kept.insert(target.to_owned(), (version, text.to_owned()))),
            None => drop(kept.remove(target)),
        };
        let mark = journal.load(each).unwrap();
        (journal, mark, kept.into_iter().map(|(target, (version, text))| (target, version, text)).collect())
    }

    fn nothing() -> (Cursor, Vec<Versioned>) {
        Default::default()
    }

    #[test]
    fn what_was_written_is_there_after_a_restart_and_a_torn_line_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("overrides");
        let (mut journal, mark, kept) = load(&path);
        assert_eq!((mark.version, kept.len()), (0, 0));
        journal.write(&change(1, "a", Some("one")), 0, nothing).unwrap();
        journal.write(&change(2, "b", Some("two")), 1, nothing).unwrap();
        journal.write(&change(3, "a", None), 2, nothing).unwrap();
        drop(journal);
        let whole = fs::metadata(&path).unwrap().len();
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"change\":{\"versi").unwrap();
        for _ in 0..2 {
            let (journal, mark, kept) = load(&path);
            assert_eq!(mark.version, 3);
            assert_eq!(kept, [("b".to_owned(), 2, "two".to_owned())]);
            let versions: Vec<_> = journal.changes(3, 5).iter().map(|change| change.version).collect();
            assert_eq!(versions, [2, 1]);
            assert_eq!(fs::metadata(&path).unwrap().len(), whole);
        }
        fs::write(&path, "something else\n").unwrap();
        let error = Journal::new(Some(path)).load(|_, _, _| {}).unwrap_err().to_string();
        assert!(error.contains(":1 is no line of overrides"), "{error}");
    }

    #[test]
    fn a_file_of_old_lines_is_written_anew() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("overrides");
        let (mut journal, ..) = load(&path);
        let most = REMEMBERED + SLACK + 10;
        for version in 1..=most as u64 {
            let mark = Cursor { version: version - 1, ..Cursor::default() };
            let kept = || (mark, vec![("a".to_owned(), version - 1, (version - 1).to_string())]);
            journal.write(&change(version, "a", Some(&version.to_string())), 1, kept).unwrap();
        }
        let lines = fs::read_to_string(&path).unwrap().lines().count();
        assert!(lines < most && lines == journal.lines, "{lines} {}", journal.lines);
        let (journal, mark, kept) = load(&path);
        assert_eq!(kept, [("a".to_owned(), most as u64, most.to_string())]);
        assert_eq!(mark.version, most as u64);
        assert_eq!(journal.changes(u64::MAX, 2_000).len(), REMEMBERED);
    }

    /// However many more there are than it takes.
    #[test]
    fn a_file_is_written_anew_as_well_when_most_is_gone_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let (mut journal, ..) = load(&folder.path().join("overrides"));
        let many = 2 * (REMEMBERED + SLACK);
        for version in 1..=many as u64 {
            journal.write(&change(version, "a", Some("one")), many, || panic!("half of them are kept")).unwrap();
        }
        journal.write(&change(many as u64 + 1, "a", None), 1, nothing).unwrap();
        assert!(journal.lines < many, "{}", journal.lines);
    }

    #[test]
    fn a_set_of_rules_is_there_until_it_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        for path in [None, Some(folder.path().join("overrides"))] {
            let mut journal = Journal::new(path.clone());
            assert_eq!(journal.get_rule_set("d1").unwrap(), None);
            journal.put_rule_set("d1", "rules").unwrap();
            assert_eq!(journal.get_rule_set("d1").unwrap().as_deref(), Some("rules"));
            let after_a_restart = Journal::new(path.clone()).get_rule_set("d1").unwrap();
            assert_eq!(after_a_restart.is_some(), path.is_some());
            journal.delete_rule_set("d1");
            assert_eq!(journal.get_rule_set("d1").unwrap(), None);
        }
    }

    #[test]
    fn without_a_file_the_latest_changes_are_remembered() {
        let mut journal = Journal::new(None);
        journal.load(|_, _, _| panic!()).unwrap();
        journal.write(&change(1, "a", Some("one")), 0, nothing).unwrap();
        assert_eq!(journal.changes(u64::MAX, 9).len(), 1);
    }
}
