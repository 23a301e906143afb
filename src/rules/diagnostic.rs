//! What is wrong in a rule file, and where.

use std::fmt;

/// A place in a file; lines and columns count from 1. 0 and 0: the file's name says where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Location {
    /// The line.
    pub line: usize,
    /// The column, in characters.
    pub column: usize,
}

/// Whether the set may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// The set is refused.
    Error,
    /// The set is used; the author should look all the same.
    Warning,
}

/// One mistake: `rules/api.yaml:14:11: unit "fortnight" is not one of …`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// The file, as it was named to the compiler.
    pub file: String,
    /// Where in it.
    pub place: Location,
    /// Whether the set is refused for it.
    pub severity: Severity,
    /// What is wrong and what would be right.
    pub message: String,
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, place, severity, message } = self;
        let kind = if *severity == Severity::Warning { "warning: " } else { "" };
        match place {
            Location { line: 0, .. } => write!(f, "{file}: {kind}{message}"),
            Location { line, column } => write!(f, "{file}:{line}:{column}: {kind}{message}"),
        }
    }
}

/// Problems of one file in the making.
pub(super) struct Diagnostics<'a> {
    file: &'a str,
    list: &'a mut Vec<Diagnostic>,
    /// Where this file's begin.
    start: usize,
}

impl<'a> Diagnostics<'a> {
    pub(super) fn new(file: &'a str, list: &'a mut Vec<Diagnostic>) -> Self {
        let start = list.len();
        Self { file, list, start }
    }

    pub(super) fn error(&mut self, place: Location, message: impl Into<String>) {
        self.push(place, Severity::Error, message.into());
    }

    pub(super) fn warning(&mut self, place: Location, message: impl Into<String>) {
        self.push(place, Severity::Warning, message.into());
    }

    /// As a reader meets them from top to bottom.
    pub(super) fn sort(&mut self) {
        self.list[self.start..].sort_by_key(|problem| problem.place);
    }

    fn push(&mut self, place: Location, severity: Severity, message: String) {
        self.list.push(Diagnostic { file: self.file.to_owned(), place, severity, message });
    }
}
