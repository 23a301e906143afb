//! [`Journal`]: a file with the overrides of an instance that shares no store, one JSON line per change. Without a
//! path, nothing is written.
//!
//! A line is written and synced before its change takes effect. Only the last line can be incomplete, after a crash or
//! on a full disk, and it is removed at the next start. When there are 1,000 more obsolete lines than overrides, the
//! journal is rewritten: a new file is renamed over the old one ([`mod@file`]). A file that cannot be replaced, such as a
//! mount of its own, is shortened in place ([`in_place`]).
//!
//! One process at a time holds the lock of the file. Another process reads the file and follows it
//! ([`Journal::is_behind`]), but can change nothing until the lock is free.

mod contents;
mod disk;
mod file;
mod in_place;
mod line;
mod recent;
#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

use sluicegate_files as files;

use self::{
    file::{JournalFile, open_folder},
    line::{Line, encode},
    recent::{MAX_RECENT_CHANGES, RecentChanges},
};
use super::{Change, Cursor, Versioned};

/// Number of obsolete lines, besides one per override and the recent changes, above which the file is rewritten.
const REWRITE_SLACK: usize = 1_000;

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
    /// The file is not a journal.
    #[error("invalid entry in override journal {path}:{line}")]
    Line {
        /// Path of the file.
        path: PathBuf,
        /// Number of the first invalid line, from 1.
        line: usize,
    },
    /// Another process holds the lock of the file.
    #[error("another process holds override journal {path}: overrides are read-only until that process ends")]
    Locked {
        /// Path of the file.
        path: PathBuf,
    },
    /// Another process has changed or replaced the file since it was read.
    #[error("another process has changed override journal {path}, which is now read again: repeat the call")]
    Changed {
        /// Path of the file.
        path: PathBuf,
    },
}

impl JournalError {
    /// Creates the error for a file that cannot be read or written.
    fn file(path: &Path, source: io::Error) -> Self {
        Self::File { path: path.to_owned(), source }
    }
}

/// A file with all overrides, and the recent changes in memory.
pub struct Journal {
    file: Option<JournalFile>,
    /// Number of lines in the file.
    line_count: usize,
    /// Number of lines by which the next rewrite is postponed, because the last one failed.
    postponed: usize,
    /// Whether the file does not contain the overrides, because another program has removed or emptied it.
    must_rewrite: bool,
    recent: RecentChanges,
    /// Rule sets by digest, if there is no path for their files.
    rule_sets: HashMap<String, String>,
}

impl Journal {
    /// Creates a journal for this path, or one that writes no files.
    #[must_use]
    pub fn new(path: Option<PathBuf>) -> Self {
        Self {
            file: path.map(JournalFile::new),
            line_count: 0,
            postponed: 0,
            must_rewrite: false,
            recent: RecentChanges::default(),
            rule_sets: HashMap::new(),
        }
    }

    /// Returns a journal for the same path that has not been loaded.
    #[must_use]
    pub fn unloaded(&self) -> Self {
        Self::new(self.file.as_ref().map(|file| file.path().to_owned()))
    }

    /// Reads the file, and returns a cursor at the last change. Opens the file for changes unless another process holds
    /// its lock ([`is_read_only`](Self::is_read_only)).
    ///
    /// `on_override` receives the target, version and text of each override, or no text if the override was removed.
    /// The last call for a target applies.
    ///
    /// # Errors
    ///
    /// Returns an error if the file cannot be read, or is not a journal. The error is [`JournalError::Changed`] if
    /// another process has rewritten the file meanwhile: it must be loaded again.
    pub fn load(&mut self, mut on_override: impl FnMut(&str, u64, Option<&str>)) -> Result<Cursor, JournalError> {
        let Some(file) = &mut self.file else {
            return Ok(Cursor::default());
        };
        let contents = file.load(&mut on_override)?;
        self.line_count = contents.lines;
        self.recent = contents.recent;
        Ok(contents.cursor)
    }

    /// Returns whether another process holds the lock of the file, so that nothing can be changed.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.file.as_ref().is_some_and(JournalFile::is_read_only)
    }

    /// Returns whether the file must be loaded again: another process has changed it or released its lock.
    pub fn is_behind(&mut self) -> bool {
        self.file.as_mut().is_some_and(JournalFile::is_behind)
    }

    /// Continues with a journal that has been loaded again. Returns `false` if its file is empty.
    ///
    /// An empty file replaces a removed one. It changes no override, and the next change writes all of them.
    pub fn continue_with(&mut self, next: Self) -> bool {
        self.file = next.file;
        self.line_count = next.line_count;
        if next.line_count == 0 {
            self.must_rewrite = true;
            return false;
        }
        self.recent.replace(next.recent);
        true
    }

    /// Returns the length of the file in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        match &self.file {
            Some(file) => file.length(),
            None => 0,
        }
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
        self.append(&[Line::Change(change.clone())], count, overrides)?;
        self.recent.push(change.clone());
        Ok(())
    }

    /// Writes and syncs overrides that another instance has made, without changes for the audit log.
    ///
    /// `count` and `before` are the overrides before, as for [`write`](Self::write).
    ///
    /// # Errors
    ///
    /// Returns an error if the file cannot be written. The overrides must then not take effect.
    pub fn write_overrides(
        &mut self,
        overrides: &[Versioned],
        count: usize,
        before: impl FnOnce() -> (Cursor, Vec<Versioned>),
    ) -> Result<(), JournalError> {
        let lines: Vec<Line> = overrides.iter().cloned().map(Line::Override).collect();
        self.append(&lines, count, before)
    }

    /// Writes and syncs lines, after the file was rewritten if it has become too long.
    fn append(
        &mut self,
        lines: &[Line],
        count: usize,
        overrides: impl FnOnce() -> (Cursor, Vec<Versioned>),
    ) -> Result<(), JournalError> {
        let Some(file) = &mut self.file else {
            return Ok(());
        };
        file.check_writable()?;
        self.must_rewrite |= file.is_lost();
        let is_long = self.line_count > 2 * count + MAX_RECENT_CHANGES + REWRITE_SLACK + self.postponed;
        if is_long || self.must_rewrite {
            self.rewrite(&overrides())?;
        }
        let bytes: Vec<u8> = lines.iter().flat_map(encode).collect();
        if let Some(file) = &mut self.file {
            file.append(&bytes)?;
            self.line_count += lines.len();
        }
        Ok(())
    }

    /// Replaces the lines of the file by one for each override and each recent change. If they cannot be written, for
    /// example because the disk is full, the longer file stays in use.
    fn rewrite(&mut self, (cursor, overrides): &(Cursor, Vec<Versioned>)) -> Result<(), JournalError> {
        let Some(file) = &mut self.file else {
            return Ok(());
        };
        let recent = &self.recent;
        match file.rewrite(&|to| write_lines(to, cursor, overrides, recent)) {
            Ok(()) => {
                self.line_count = overrides.len() + 1 + self.recent.iter().count();
                self.postponed = 0;
                self.must_rewrite = false;
                Ok(())
            }
            Err(source) if self.must_rewrite => Err(JournalError::file(file.path(), source)),
            Err(error) => {
                let path = file.path().display();
                tracing::warn!(%path, %error, "cannot shorten the override journal, which grows until that is possible");
                self.postponed += REWRITE_SLACK;
                Ok(())
            }
        }
    }

    /// Returns up to `max_changes` recent changes before version `before`, in descending order.
    pub fn changes(&self, before: u64, max_changes: usize) -> Vec<Change> {
        let older = self.recent.iter().rev().filter(|change| change.version < before);
        older.take(max_changes).cloned().collect()
    }

    /// Returns the position: the number of changes that this process has read or written.
    #[must_use]
    pub const fn position(&self) -> u64 {
        self.recent.position()
    }

    /// Returns the changes after a position, the oldest first. Returns `None` if they are no longer available.
    #[must_use]
    pub fn changes_after(&self, position: u64) -> Option<Vec<Change>> {
        Some(self.recent.after(position)?.cloned().collect())
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
        let mut version = 0;
        for change in self.recent.iter() {
            if change.changes.iter().any(|changed| changed.target == target && changed.after.is_none()) {
                version = version.max(change.version);
            }
        }
        version
    }

    /// Returns the version of the oldest recent change; 0 if no change has been removed from the recent ones.
    #[must_use]
    pub fn oldest_version(&self) -> u64 {
        self.recent.oldest_version()
    }

    /// Stores a rule set atomically, in a separate file next to the journal.
    pub(super) fn put_rule_set(&mut self, digest: &str, text: &str) -> Result<(), JournalError> {
        let Some(file) = &self.file else {
            self.rule_sets.insert(digest.to_owned(), text.to_owned());
            return Ok(());
        };
        file.check_writable()?;
        let path = rule_set_path(file.path(), digest);
        write_rule_set(&path, text).map_err(|source| JournalError::File { path, source })
    }

    /// Returns a rule set, or `None` if there is none with this digest.
    ///
    /// # Errors
    ///
    /// Returns an error if its file cannot be read.
    pub fn get_rule_set(&self, digest: &str) -> Result<Option<String>, JournalError> {
        let Some(file) = &self.file else {
            return Ok(self.rule_sets.get(digest).cloned());
        };
        let path = rule_set_path(file.path(), digest);
        match files::read_to_string(&path, files::MAX_BYTES) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(JournalError::File { path, source }),
        }
    }

    pub(super) fn delete_rule_set(&mut self, digest: &str) {
        match &self.file {
            Some(file) => drop(fs::remove_file(rule_set_path(file.path(), digest))),
            None => drop(self.rule_sets.remove(digest)),
        }
    }
}

/// Writes a line for each override and each recent change, and one for the cursor.
fn write_lines(to: &mut dyn Write, cursor: &Cursor, overrides: &[Versioned], recent: &RecentChanges) -> io::Result<()> {
    for entry in overrides {
        to.write_all(&encode(&Line::Override(entry.clone())))?;
    }
    to.write_all(&encode(&Line::Cursor(cursor.clone())))?;
    for change in recent.iter() {
        to.write_all(&encode(&Line::LoggedChange(change.clone())))?;
    }
    Ok(())
}

/// Returns the path of a rule set next to the journal.
fn rule_set_path(journal: &Path, digest: &str) -> PathBuf {
    // Characters with a meaning in paths are removed, although no digest contains them.
    let digest: String = digest.chars().filter(char::is_ascii_alphanumeric).collect();
    let mut path = journal.as_os_str().to_owned();
    path.push(format!(".{digest}"));
    path.into()
}

/// Writes a rule set to a temporary file and renames it.
fn write_rule_set(path: &Path, text: &str) -> io::Result<()> {
    let temporary = path.with_extension("new");
    if let Err(error) = write_and_rename(&temporary, path, text) {
        // An incomplete file would keep the disk full.
        let _ = fs::remove_file(&temporary);
        return Err(error);
    }
    disk::sync(&open_folder(path)?)
}

fn write_and_rename(temporary: &Path, path: &Path, text: &str) -> io::Result<()> {
    let file = disk::create(temporary)?;
    disk::write_at(&file, text.as_bytes(), 0)?;
    disk::sync(&file)?;
    disk::rename(temporary, path)
}
