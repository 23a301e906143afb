//! [`Diagnostic`]: an error, a warning or a note about a rule file, with its [`Location`].

use std::fmt;

/// A position in a file. Lines and columns count from 1; a line of 0 means that only the file is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Location {
    /// Line number, from 1; 0 if unknown.
    pub line: usize,
    /// Column number in characters, from 1; 0 if unknown.
    pub column: usize,
}

/// Effect of a diagnostic on the rule set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// The rule set is rejected.
    Error,
    /// The rule set is used, but the author should check the file.
    Warning,
    /// The rule set is used. The file is valid, but may not mean what its author expects.
    Note,
}

/// An error, a warning or a note about a rule file, displayed as
/// `rules/api.yaml:14:11: unit "fortnight" is not one of …`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// Name of the file, as it was passed to the compiler.
    pub file: String,
    /// Position in the file.
    pub location: Location,
    /// Effect of this diagnostic on the rule set.
    pub severity: Severity,
    /// Description of the mistake and of a correct form.
    pub message: String,
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, location, severity, message } = self;
        let kind = match severity {
            Severity::Error => "",
            Severity::Warning => "warning: ",
            Severity::Note => "note: ",
        };
        match location {
            Location { line: 0, .. } => write!(f, "{file}: {kind}{message}"),
            Location { line, column } => write!(f, "{file}:{line}:{column}: {kind}{message}"),
        }
    }
}

/// Maximum number of diagnostics of one file; one more is kept if it is an error, so that the file is rejected. A file
/// of a megabyte could have a million.
pub(super) const MAX_DIAGNOSTICS: usize = 1_000;

/// Collector for the diagnostics of one file.
pub(super) struct Diagnostics<'a> {
    file: &'a str,
    list: &'a mut Vec<Diagnostic>,
    /// Index in `list` of this file's first diagnostic.
    start: usize,
}

impl<'a> Diagnostics<'a> {
    pub(super) fn new(file: &'a str, list: &'a mut Vec<Diagnostic>) -> Self {
        let start = list.len();
        Self { file, list, start }
    }

    pub(super) fn error(&mut self, location: Location, message: impl Into<String>) {
        self.push(location, Severity::Error, message.into());
    }

    pub(super) fn warning(&mut self, location: Location, message: impl Into<String>) {
        self.push(location, Severity::Warning, message.into());
    }

    pub(super) fn note(&mut self, location: Location, message: impl Into<String>) {
        self.push(location, Severity::Note, message.into());
    }

    /// Sorts this file's diagnostics by their location.
    pub(super) fn sort(&mut self) {
        self.list[self.start..].sort_by_key(|diagnostic| diagnostic.location);
    }

    fn push(&mut self, location: Location, severity: Severity, message: String) {
        let count = self.list.len() - self.start;
        if count > MAX_DIAGNOSTICS || count == MAX_DIAGNOSTICS && severity != Severity::Error {
            return;
        }
        self.list.push(Diagnostic { file: self.file.to_owned(), location, severity, message });
    }
}
