//! [`Source`]: where rules come from, and the files that it contains.

use std::{
    fs,
    io::{self, BufReader},
    path::{Path, PathBuf},
    time::SystemTime,
};

use flate2::{Compression, read::DeflateDecoder, write::DeflateEncoder};

use crate::{
    files,
    rules::{Diagnostic, SourceFile},
};

/// Maximum size of a rule file, in bytes.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// Error returned when rules cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The directory or one of its files cannot be read.
    #[error("cannot read the rules in {path}")]
    Read {
        /// The directory or file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The files are invalid. Contains all errors and warnings.
    #[error("{}", join_lines(.0))]
    Invalid(Vec<Diagnostic>),
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
    /// Calls of [`Reloader::push`](super::reload::Reloader::push). There are no rules before the first call.
    Pushed,
}

/// Selects the rule files of a directory. Files whose names begin with a dot are always ignored.
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
        match self {
            Self::BuiltIn(files) => Ok(files.clone()),
            Self::Pushed => Ok(Vec::new()),
            Self::Directory(directory, filter) => {
                let read = |path: PathBuf| match files::read_to_string(&path, MAX_FILE_BYTES) {
                    Ok(text) => Ok(SourceFile { name: path.display().to_string(), text }),
                    Err(source) => Err(LoadError::Read { path, source }),
                };
                let error = |source| LoadError::Read { path: directory.clone(), source };
                files(directory, *filter).map_err(error)?.into_iter().map(read).collect()
            }
        }
    }
}

/// Returns the paths of the rule files in a directory, in order.
fn files(directory: &Path, filter: FileFilter) -> io::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let hidden = entry.file_name().to_string_lossy().starts_with('.');
        let path = entry.path();
        let is_rule_file = filter == FileFilter::All
            || path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml");
        if !is_rule_file || hidden {
            continue;
        }
        match fs::metadata(&path) {
            Ok(metadata) if metadata.is_file() => paths.push(path),
            Ok(_) => {}
            // A link to a file that does not exist.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            // Without this file, its rules would be gone.
            Err(error) => return Err(error),
        }
    }
    paths.sort();
    Ok(paths)
}

/// Metadata that changes whenever the files of a directory change: path, path behind symlinks, size, modification time.
///
/// The value is an error if the directory cannot be read, because its removal and its return are changes, too.
pub(super) type Fingerprint = Result<Vec<(PathBuf, PathBuf, u64, Option<SystemTime>)>, io::ErrorKind>;

pub(super) fn fingerprint(directory: &Path, filter: FileFilter) -> Fingerprint {
    let describe = |path: PathBuf| {
        let metadata = fs::metadata(&path)?;
        let real = fs::canonicalize(&path)?;
        Ok((path, real, metadata.len(), metadata.modified().ok()))
    };
    let all = files(directory, filter).and_then(|paths| paths.into_iter().map(describe).collect());
    all.map_err(|error| error.kind())
}

/// Compressed copy of rule files, to compare them with new ones and to load them again. It has a tenth of their size.
#[derive(PartialEq, Eq)]
pub(super) struct CompressedFiles(Vec<u8>);

impl CompressedFiles {
    /// Compresses `files`. Returns `None` if that fails, which is not expected.
    pub(super) fn new(files: &[SourceFile]) -> Option<Self> {
        let files: Vec<_> = files.iter().map(|file| (&file.name, &file.text)).collect();
        let mut encoder = DeflateEncoder::new(Vec::new(), Compression::fast());
        serde_json::to_writer(&mut encoder, &files).ok()?;
        encoder.finish().ok().map(Self)
    }

    /// Returns the decompressed files.
    pub(super) fn files(&self) -> Option<Vec<SourceFile>> {
        let files: Vec<(String, String)> =
            serde_json::from_reader(BufReader::new(DeflateDecoder::new(&*self.0))).ok()?;
        Some(files.into_iter().map(|(name, text)| SourceFile { name, text }).collect())
    }
}
