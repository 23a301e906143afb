//! [`read`] and [`read_to_string`]: read regular files of a bounded size, and never wait.
//!
//! A pipe in place of a file that the service follows would otherwise stop a thread until another process writes to it.

use std::{
    fs::OpenOptions,
    io::{self, Read},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use rustix::fs::OFlags;

/// Maximum size of a file with certificates, tokens, a key or switches, in bytes.
pub(crate) const MAX_BYTES: u64 = 1 << 20;

/// Reads a file of at most `max_bytes`.
///
/// # Errors
///
/// Returns an error if the file cannot be read, is no regular file, or is larger.
pub(crate) fn read(path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
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
pub(crate) fn read_to_string(path: &Path, max_bytes: u64) -> io::Result<String> {
    String::from_utf8(read(path, max_bytes)?)
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "the file is not valid UTF-8"))
}

#[cfg(test)]
mod tests {
    use std::{fs, process::Command};

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
