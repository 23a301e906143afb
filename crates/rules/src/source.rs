//! [`Source`]: where rules come from, and the files that it contains.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use sluicegate_files::{self as files, FileVersion};

use crate::{Diagnostic, Location, Options, RuleSet, Severity, SourceFile};

/// Maximum size of a rule file, in bytes.
const MAX_FILE_BYTES: u64 = 64 << 20;
/// Maximum number of names in the message about a directory without rule files.
const MAX_NAMES: usize = 3;

/// Error returned when rules cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The directory cannot be read.
    #[error("cannot read the rules in {path}{}", file_hint(path))]
    Read {
        /// The directory.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The files are invalid. Contains all errors and warnings.
    #[error("{}", join_lines(.0))]
    Invalid(Vec<Diagnostic>),
}

/// Returns the end of a message about a path that is not a directory.
fn file_hint(path: &Path) -> &'static str {
    if path.is_file() { ", which must be a directory of rule files, not a file" } else { "" }
}

fn join_lines(diagnostics: &[Diagnostic]) -> String {
    diagnostics.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

/// The source of the rules.
#[derive(Clone, Debug)]
pub enum Source {
    /// The files of a directory that the filter accepts.
    Directory(PathBuf, FileFilter),
    /// Files that are embedded in the program.
    BuiltIn(Vec<SourceFile>),
    /// A control plane that pushes rules. There are no rules before it does.
    Pushed,
}

/// A filter for the rule files of a directory. Files whose names begin with a dot are always ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileFilter {
    /// Files named `*.yaml` or `*.yml`.
    Yaml,
    /// All files, whatever their extension, as in envoyproxy/ratelimit.
    All,
}

impl Source {
    /// Returns a source for the YAML files of a directory.
    #[must_use]
    pub const fn directory(path: PathBuf) -> Self {
        Self::Directory(path, FileFilter::Yaml)
    }

    /// Reads the files, ordered by path.
    ///
    /// # Errors
    ///
    /// Returns an error if the directory or one of its files cannot be read.
    pub fn read(&self) -> Result<Vec<SourceFile>, LoadError> {
        let Contents { files, diagnostics } = self.read_contents()?;
        if diagnostics.iter().any(|diagnostic| diagnostic.severity == Severity::Error) {
            return Err(LoadError::Invalid(diagnostics));
        }
        Ok(files)
    }

    /// Reads the files that can be read, ordered by path, and describes the others.
    ///
    /// # Errors
    ///
    /// Returns an error if the directory cannot be read.
    pub fn read_contents(&self) -> Result<Contents, LoadError> {
        let (directory, filter) = match self {
            Self::BuiltIn(files) => return Ok(Contents { files: files.clone(), diagnostics: Vec::new() }),
            Self::Pushed => return Ok(Contents::default()),
            Self::Directory(directory, filter) => (directory, *filter),
        };
        let paths = files(directory, filter).map_err(|source| LoadError::Read { path: directory.clone(), source })?;
        let mut contents = Contents::default();
        if paths.is_empty() {
            let others = other_names(directory);
            let message = match filter {
                FileFilter::Yaml => {
                    format!("the directory contains no *.yaml file and no *.yml file, so there are no limits{others}")
                }
                FileFilter::All => format!("the directory contains no file, so there are no limits{others}"),
            };
            contents.report(directory, Location::default(), Severity::Warning, message);
        } else if filter == FileFilter::Yaml {
            for (path, message) in overlooked(directory) {
                contents.report(&path, Location::default(), Severity::Warning, message.to_owned());
            }
        }
        for path in paths {
            contents.add_file(&path);
        }
        Ok(contents)
    }
}

/// The files of a source that could be read, and the errors of the others.
#[derive(Debug, Default)]
pub struct Contents {
    /// The files, ordered by path.
    pub files: Vec<SourceFile>,
    /// An error for each file that could not be read, and warnings that there is no file, or that one is probably
    /// overlooked.
    pub diagnostics: Vec<Diagnostic>,
}

impl Contents {
    /// Reads one file, with any name.
    #[must_use]
    pub fn of_file(path: &Path) -> Self {
        let mut contents = Self::default();
        contents.add_file(path);
        contents
    }

    /// Reads a file and adds its text, or an error.
    fn add_file(&mut self, path: &Path) {
        let text = files::read(path, MAX_FILE_BYTES)
            .map_err(|error| (Location::default(), format!("cannot read the file: {error}")))
            .and_then(decode);
        match text {
            Ok(text) => self.files.push(SourceFile { name: path.display().to_string(), text }),
            Err((location, message)) => self.report(path, location, Severity::Error, message),
        }
    }

    fn report(&mut self, path: &Path, location: Location, severity: Severity, message: String) {
        self.diagnostics.push(Diagnostic { file: path.display().to_string(), location, severity, message });
    }

    /// Compiles the files and returns the rules with the warnings.
    ///
    /// # Errors
    ///
    /// Returns every error and warning of every file if there is at least one error, such as a file that could not be
    /// read.
    pub fn compile(self, options: Options) -> Result<(RuleSet, Vec<Diagnostic>), Vec<Diagnostic>> {
        let has_error = self.diagnostics.iter().any(|diagnostic| diagnostic.severity == Severity::Error);
        let (set, mut diagnostics) = match crate::compile(&self.files, options) {
            Ok((set, warnings)) => (Some(set), warnings),
            Err(diagnostics) => (None, diagnostics),
        };
        diagnostics.extend(self.diagnostics);
        diagnostics.sort_by(|a, b| a.file.cmp(&b.file));
        match set {
            Some(set) if !has_error => Ok((set, diagnostics)),
            _ => Err(diagnostics),
        }
    }
}

/// Decodes UTF-8, or UTF-16 with a byte order mark, as envoyproxy/ratelimit does. An error contains its location.
fn decode(bytes: Vec<u8>) -> Result<String, (Location, String)> {
    let text = match bytes.as_slice() {
        [0xff, 0xfe, rest @ ..] => decode_utf16(rest, u16::from_le_bytes)?,
        [0xfe, 0xff, rest @ ..] => decode_utf16(rest, u16::from_be_bytes)?,
        [0xef, 0xbb, 0xbf, rest @ ..] => decode_utf8(rest.to_vec())?,
        _ => decode_utf8(bytes)?,
    };
    if let Some((before, _)) = text.split_once('\0') {
        let message = "the file contains a NUL character: it must be UTF-8, or UTF-16 with a byte order mark";
        return Err((end_of(before), message.to_owned()));
    }
    Ok(text)
}

fn decode_utf8(bytes: Vec<u8>) -> Result<String, (Location, String)> {
    String::from_utf8(bytes).map_err(|error| {
        let (before, after) = error.as_bytes().split_at(error.utf8_error().valid_up_to());
        let byte = after.first().copied().unwrap_or_default();
        let message = format!("the byte 0x{byte:02x} is not valid UTF-8; save the file as UTF-8");
        (end_of(&String::from_utf8_lossy(before)), message)
    })
}

fn decode_utf16(bytes: &[u8], unit: fn([u8; 2]) -> u16) -> Result<String, (Location, String)> {
    let (pairs, rest) = bytes.as_chunks::<2>();
    let mut text = String::new();
    for character in char::decode_utf16(pairs.iter().map(|pair| unit(*pair))) {
        match character {
            Ok(character) => text.push(character),
            Err(error) => {
                let message =
                    format!("0x{:04x} is not valid UTF-16; save the file as UTF-8", error.unpaired_surrogate());
                return Err((end_of(&text), message));
            }
        }
    }
    if !rest.is_empty() {
        return Err((end_of(&text), "the file ends within a UTF-16 character; save the file as UTF-8".to_owned()));
    }
    Ok(text)
}

/// Returns the location of the character after `text`.
fn end_of(text: &str) -> Location {
    let last_line = text.rsplit('\n').next().unwrap_or_default();
    Location { line: text.matches('\n').count() + 1, column: last_line.chars().count() + 1 }
}

/// Returns whether the extension is that of a rule file.
fn is_yaml(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml")
}

fn is_hidden(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'))
}

fn is_directory(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.is_dir())
}

/// Returns the paths of the rule files in a directory, in order.
fn files(directory: &Path, filter: FileFilter) -> io::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let is_rule_file = filter == FileFilter::All || is_yaml(&path);
        if !is_rule_file || is_hidden(&path) {
            continue;
        }
        // A dangling link or an unreadable file is an error of its own: without the file, its rules would be gone.
        if !is_directory(&path) {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// Returns the paths in a directory that are not hidden, in order; none if it cannot be read.
fn visible_paths(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| !is_hidden(path)).collect();
    paths.sort();
    paths
}

/// Returns the end of the message about a directory without rule files: the names of its contents.
fn other_names(directory: &Path) -> String {
    let mut names = Vec::new();
    for path in visible_paths(directory).iter().take(MAX_NAMES) {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        names.push(if is_directory(path) {
            format!("the folder {name:?}, which is not read")
        } else {
            format!("{name:?}")
        });
    }
    if names.is_empty() { String::new() } else { format!("; it contains {}", names.join(", ")) }
}

/// Returns the paths that are probably meant as rule files but are not read, each with the reason.
fn overlooked(directory: &Path) -> Vec<(PathBuf, &'static str)> {
    let mut all = Vec::new();
    for path in visible_paths(directory) {
        if is_directory(&path) {
            if visible_paths(&path).iter().any(|inner| is_yaml(inner)) {
                all.push((path, "the rule files in this folder are not read; move them into the directory of rules"));
            }
            continue;
        }
        let extension = path.extension().unwrap_or_default().to_ascii_lowercase();
        let is_similar = extension == "yaml" || extension == "yml" || extension == "yam" || extension == "ymal";
        if is_similar && !is_yaml(&path) {
            all.push((path, "the file is not read; the name of a rule file ends with .yaml or .yml"));
        }
    }
    all
}

/// Metadata that changes whenever the files of a directory change: path, path behind symlinks, and version.
///
/// The value is an error if the directory or a file cannot be read, because its removal and its return are changes, too.
pub type Fingerprint = Result<Vec<(PathBuf, Result<(PathBuf, FileVersion), io::ErrorKind>)>, io::ErrorKind>;

/// Returns the metadata of the rule files in a directory.
///
/// # Errors
///
/// Returns the kind of the error with which the directory cannot be read.
pub fn fingerprint(directory: &Path, filter: FileFilter) -> Fingerprint {
    let mut all = Vec::new();
    for path in files(directory, filter).map_err(|error| error.kind())? {
        let described = path_and_version(&path).map_err(|error| error.kind());
        all.push((path, described));
    }
    Ok(all)
}

/// Returns the path of a file behind symlinks, and the version of the file.
fn path_and_version(path: &Path) -> io::Result<(PathBuf, FileVersion)> {
    Ok((fs::canonicalize(path)?, FileVersion::new(&fs::metadata(path)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn utf16(text: &str, order: fn(u16) -> [u8; 2]) -> Vec<u8> {
        format!("\u{feff}{text}").encode_utf16().flat_map(order).collect()
    }

    /// Returns the diagnostics of a directory with these files, with paths below the directory.
    fn diagnostics(names: &[&str], filter: FileFilter) -> Vec<String> {
        let directory = tempfile::tempdir().unwrap();
        for name in names {
            let path = directory.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "domain: d\n").unwrap();
        }
        let contents = Source::Directory(directory.path().to_owned(), filter).read_contents().unwrap();
        let prefix = directory.path().display().to_string();
        contents.diagnostics.iter().map(|diagnostic| diagnostic.to_string().replace(&prefix, "")).collect()
    }

    #[test]
    fn a_directory_without_rule_files_names_what_it_contains() {
        let problem = ": warning: the directory contains no *.yaml file and no *.yml file, so there are no limits";
        for (names, expected) in [
            (&[][..], ""),
            (&[".hidden.yaml"], ""),
            (&["a.yam"], "; it contains \"a.yam\""),
            (&["sub/a.yaml", "rules.json"], "; it contains \"rules.json\", the folder \"sub\", which is not read"),
            (&["a", "b", "c", "d"], "; it contains \"a\", \"b\", \"c\""),
        ] {
            assert_eq!(diagnostics(names, FileFilter::Yaml), [format!("{problem}{expected}")], "{names:?}");
        }
    }

    #[test]
    fn an_overlooked_file_has_a_warning() {
        let folder = "/sub: warning: the rule files in this folder are not read; move them into the directory of rules";
        let name = |name: &str| {
            format!("/{name}: warning: the file is not read; the name of a rule file ends with .yaml or .yml")
        };
        for (other, expected) in [
            ("sub/b.yaml", Some(folder.to_owned())),
            ("b.YAML", Some(name("b.YAML"))),
            ("b.yam", Some(name("b.yam"))),
            ("b.yml", None),
            ("b.yaml.bak", None),
            ("rules.schema.json", None),
            ("sub/README.md", None),
            (".hidden/b.yaml", None),
        ] {
            let warnings = diagnostics(&["a.yaml", other], FileFilter::Yaml);
            assert_eq!(warnings, Vec::from_iter(expected), "{other}");
            assert_eq!(diagnostics(&["a.yaml", other], FileFilter::All), [""; 0], "{other}");
        }
    }

    #[test]
    fn a_file_is_utf8_or_utf16_with_a_byte_order_mark() {
        let text = "domain: é😀\n";
        for bytes in [
            text.as_bytes().to_vec(),
            format!("\u{feff}{text}").into_bytes(),
            utf16(text, u16::to_le_bytes),
            utf16(text, u16::to_be_bytes),
        ] {
            assert_eq!(decode(bytes.clone()).as_deref(), Ok(text), "{bytes:x?}");
        }
    }

    #[test]
    fn bytes_that_are_no_text_have_a_location() {
        let mut half = utf16("a\nb", u16::to_le_bytes);
        half.push(0);
        for (bytes, line, column, expected) in [
            (b"a: \xff".to_vec(), 1, 4, "the byte 0xff is not valid UTF-8"),
            ("é\néé".bytes().chain([0xc3]).collect(), 2, 3, "the byte 0xc3 is not valid UTF-8"),
            (half, 2, 2, "the file ends within a UTF-16 character"),
            (vec![0xfe, 0xff, 0, b'a', 0xd8, 0], 1, 2, "0xd800 is not valid UTF-16"),
            (b"a\0".to_vec(), 1, 2, "the file contains a NUL character"),
            (vec![0xff, 0xfe, 0, 0, b'a', 0, 0, 0], 1, 1, "the file contains a NUL character"),
        ] {
            let (location, message) = decode(bytes.clone()).unwrap_err();
            assert_eq!(location, Location { line, column }, "{bytes:x?}");
            assert!(message.starts_with(expected), "{message}");
        }
    }
}
