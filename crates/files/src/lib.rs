//! [`read`] and [`read_to_string`]: read regular files of a bounded size, and never wait.
//!
//! A pipe in place of a file that the service follows would otherwise stop a thread until another process writes to it.

use std::{
    fs::{self, Metadata},
    io::{self, Read},
    path::Path,
    time::SystemTime,
};

#[cfg(feature = "pem")]
pub use pem::{read_authorities, read_certificates, read_key};
use system::{change_time, open_options};
pub use system::{file_id, read_at, read_exact_at, write_all_at};

#[cfg(feature = "pem")]
mod pem;
#[cfg_attr(unix, path = "unix.rs")]
#[cfg_attr(windows, path = "windows.rs")]
mod system;

/// Device and inode of a file, which stay the same if the file is renamed.
pub type FileId = (u64, u64);

/// Maximum size of a file with certificates, tokens, a key or switches, in bytes.
pub const MAX_BYTES: u64 = 1 << 20;

/// Version of a file, which differs after every change, except on Windows if the size and the modification time stay
/// the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileVersion {
    id: Option<FileId>,
    size: u64,
    modified: Option<SystemTime>,
    /// Time of the last change of content or metadata, which programs cannot set, in seconds and nanoseconds.
    changed: Option<(i64, i64)>,
}

impl FileVersion {
    /// Returns the version of the file at `path`, or `None` if there is none. To be called before the file is read, so that
    /// a change in between is noticed.
    #[must_use]
    pub fn of(path: &Path) -> Option<Self> {
        fs::metadata(path).ok().as_ref().map(Self::new)
    }

    /// Returns the version of a file with this metadata.
    #[must_use]
    pub fn new(metadata: &Metadata) -> Self {
        Self {
            id: file_id(metadata).ok(),
            size: metadata.len(),
            modified: metadata.modified().ok(),
            changed: change_time(metadata),
        }
    }
}

/// Reads a file of at most `max_bytes`.
///
/// # Errors
///
/// Returns an error if the file cannot be read, is no regular file, or is larger.
pub fn read(path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    let file = open_options().read(true).open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    let mut bytes = Vec::new();
    // The file can grow while it is read.
    file.take(max_bytes + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max_bytes {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("the file is larger than {max_bytes} bytes")));
    }
    Ok(bytes)
}

/// Reads a text file of at most `max_bytes`.
///
/// # Errors
///
/// Returns an error if the file cannot be read, is no regular file, is larger, or is not UTF-8.
pub fn read_to_string(path: &Path, max_bytes: u64) -> io::Result<String> {
    String::from_utf8(read(path, max_bytes)?)
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "the file is not valid UTF-8"))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn files_are_read_up_to_their_maximum_size() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "12345").unwrap();
        assert_eq!(read_to_string(&path, 5).unwrap(), "12345");
        assert_eq!(read(&path, 4).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        fs::write(&path, b"\xff").unwrap();
        assert_eq!(read(&path, 5).unwrap(), b"\xff");
        assert_eq!(read_to_string(&path, 5).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert_eq!(read(&folder.path().join("none"), 5).unwrap_err().kind(), io::ErrorKind::NotFound);
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert_eq!(read(&link, 5).unwrap(), b"\xff");
    }

    #[test]
    fn a_version_differs_after_a_change_that_keeps_size_and_modification_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let write = |path: &Path, text: &str| {
            fs::write(path, text).unwrap();
            let file = fs::File::options().write(true).open(path).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        };
        let version = || FileVersion::of(&path).unwrap();
        write(&path, "1");
        let first = version();
        assert_eq!(version(), first);
        write(&folder.path().join("new"), "2");
        fs::rename(folder.path().join("new"), &path).unwrap();
        assert_ne!(version(), first, "replaced by another file");
        let second = version();
        // The clock of the file system has a resolution of some milliseconds.
        wait_for_change(|| {
            write(&path, "3");
            version() != second
        });
    }

    fn wait_for_change(mut is_changed: impl FnMut() -> bool) {
        let start = std::time::Instant::now();
        while !is_changed() {
            assert!(start.elapsed().as_secs() < 10, "written in place");
        }
    }

    #[test]
    fn pipes_devices_and_folders_are_rejected_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        for path in [pipe.as_path(), Path::new("/dev/zero"), folder.path()] {
            let error = read(path, 5).unwrap_err();
            assert_eq!(error.to_string(), "not a regular file", "{}", path.display());
        }
    }
}
