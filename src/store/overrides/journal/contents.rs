//! [`Contents`]: the contents of a journal file, and their reader.
//!
//! The reader changes nothing, so that a process can also read a file that another one writes.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Read},
    path::Path,
};

use super::{
    JournalError,
    line::{CopyRange, Line, MAX_LINE_BYTES},
    recent::RecentChanges,
};
use crate::store::overrides::{Cursor, OverrideChange};

/// Number of unusable lines that are logged one by one.
const MAX_LOGGED_LINES: usize = 10;
/// Maximum length of the last line of a file with a complete copy.
const MAX_COPY_END_BYTES: u64 = 256;

/// The contents of a journal file, besides the overrides.
#[derive(Default)]
pub(super) struct Contents {
    /// The last change.
    pub(super) cursor: Cursor,
    /// The last changes.
    pub(super) recent: RecentChanges,
    /// Number of lines.
    pub(super) lines: usize,
    /// Length of the lines in bytes. Further bytes are an incomplete line or an incomplete copy.
    pub(super) length: u64,
    /// A complete copy at the end of the file, which the lines were read from.
    pub(super) copy: Option<CopyRange>,
}

impl Contents {
    /// Reads a file and passes the target, version and text of each override to `on_override`, or no text if the
    /// override was removed.
    ///
    /// Lines that are too long or are no journal entries are logged and skipped.
    ///
    /// # Errors
    ///
    /// Returns an error if the file cannot be read, or if it has lines but none of a journal.
    pub(super) fn read(
        file: &File,
        path: &Path,
        on_override: &mut dyn FnMut(&str, u64, Option<&str>),
    ) -> Result<Self, JournalError> {
        let size = file.metadata().map_err(|error| JournalError::file(path, error))?.len();
        let copy = find_copy(file, size).map_err(|error| JournalError::file(path, error))?;
        let section = match copy {
            Some(copy) => Section { file, at: copy.from, end: copy.end() },
            None => Section { file, at: 0, end: size },
        };
        let mut contents = Self { copy, ..Self::default() };
        let mut lines = Lines::new(section);
        let mut skipped = 0;
        let mut first_skipped = None;
        while lines.read_next().map_err(|error| JournalError::file(path, error))? {
            let line = if lines.is_too_long { None } else { serde_json::from_slice(&lines.text).ok() };
            match line {
                Some(Line::CopyStart) => break,
                Some(line) => contents.add(line, on_override),
                None => {
                    first_skipped.get_or_insert(contents.lines + 1);
                    skipped += 1;
                    if skipped <= MAX_LOGGED_LINES {
                        let place = format!("{}:{}", path.display(), contents.lines + 1);
                        let reason = if lines.is_too_long { "the line is too long" } else { "not a journal entry" };
                        tracing::error!(place, reason, "skipped a line of the override journal");
                    }
                }
            }
            contents.lines += 1;
            contents.length += lines.bytes;
        }
        match first_skipped {
            Some(line) if skipped == contents.lines => Err(JournalError::Line { path: path.to_owned(), line }),
            Some(_) => {
                tracing::error!(path = %path.display(), lines = skipped, "skipped lines of the override journal");
                Ok(contents)
            }
            None => Ok(contents),
        }
    }

    fn add(&mut self, line: Line, on_override: &mut dyn FnMut(&str, u64, Option<&str>)) {
        match line {
            Line::Override((target, version, text)) => {
                self.cursor.version = self.cursor.version.max(version);
                on_override(&target, version, Some(&text));
            }
            Line::Cursor(last) => self.cursor = last,
            Line::LoggedChange(change) => self.recent.push(change),
            Line::Change(change) => {
                for OverrideChange { target, after, .. } in &change.changes {
                    on_override(target, change.version, after.as_deref());
                }
                self.cursor.version = self.cursor.version.max(change.version);
                self.recent.push(change);
            }
            Line::CopyStart | Line::CopyEnd(_) => {}
        }
    }
}

/// Returns the complete copy at the end of a file of this size, or `None` if there is none.
pub(super) fn find_copy(file: &File, size: u64) -> io::Result<Option<CopyRange>> {
    let from = size.saturating_sub(MAX_COPY_END_BYTES);
    let mut end = Vec::new();
    Section { file, at: from, end: size }.read_to_end(&mut end)?;
    let Some((b'\n', before)) = end.split_last() else {
        return Ok(None);
    };
    let start = match before.iter().rposition(|byte| *byte == b'\n') {
        Some(line_break) => line_break + 1,
        None => 0,
    };
    let Ok(Line::CopyEnd(copy)) = serde_json::from_slice(&before[start..]) else {
        return Ok(None);
    };
    let is_complete = copy.end() == from + start as u64 && copy.bytes <= copy.from;
    Ok(is_complete.then_some(copy))
}

/// Reader of a part of a file, which does not move the position of the file.
struct Section<'f> {
    file: &'f File,
    at: u64,
    end: u64,
}

impl Read for Section<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let rest = usize::try_from(self.end.saturating_sub(self.at)).unwrap_or(usize::MAX);
        let wanted = bytes.len().min(rest);
        let read = sluicegate_files::read_at(self.file, &mut bytes[..wanted], self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

/// Reader of lines of limited length.
struct Lines<'f> {
    reader: BufReader<Section<'f>>,
    /// The current line, cut off if it is too long.
    text: Vec<u8>,
    /// Length of the current line, with the line break.
    bytes: u64,
    is_too_long: bool,
}

impl<'f> Lines<'f> {
    fn new(section: Section<'f>) -> Self {
        Self { reader: BufReader::new(section), text: Vec::new(), bytes: 0, is_too_long: false }
    }

    /// Reads the next line. Returns `false` at the end, also before an incomplete last line.
    fn read_next(&mut self) -> io::Result<bool> {
        self.text.clear();
        self.bytes = 0;
        self.is_too_long = false;
        loop {
            let buffer = self.reader.fill_buf()?;
            if buffer.is_empty() {
                return Ok(false);
            }
            let end = buffer.iter().position(|byte| *byte == b'\n');
            let part = match end {
                Some(end) => &buffer[..=end],
                None => buffer,
            };
            self.is_too_long |= self.text.len() + part.len() > MAX_LINE_BYTES;
            if !self.is_too_long {
                self.text.extend_from_slice(part);
            }
            let read = part.len();
            self.bytes += read as u64;
            self.reader.consume(read);
            if end.is_some() {
                return Ok(true);
            }
        }
    }
}
