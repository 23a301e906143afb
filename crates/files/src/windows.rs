//! Access to files on Windows. Functions that need POSIX return an error.

use std::{
    fs::{File, Metadata, OpenOptions},
    io,
};

use super::FileId;

/// Returns options to open a file. Folders have no pipes on Windows, so no option is needed.
pub(super) fn open_options() -> OpenOptions {
    OpenOptions::new()
}

/// Fails, because the standard library has no stable function for the ID of a file on Windows.
///
/// # Errors
///
/// Always returns an error of the kind `Unsupported`.
pub fn file_id(_: &Metadata) -> io::Result<FileId> {
    Err(unsupported())
}

/// Returns `None`, because the metadata of the standard library has no change time on Windows.
pub(super) fn change_time(_: &Metadata) -> Option<(i64, i64)> {
    None
}

/// Fails. Only the override journal reads in this way, and it does not work on Windows, because it needs a [`file_id`].
///
/// # Errors
///
/// Always returns an error of the kind `Unsupported`.
pub fn read_at(_: &File, _: &mut [u8], _: u64) -> io::Result<usize> {
    Err(unsupported())
}

/// Fails like [`read_at`].
///
/// # Errors
///
/// Always returns an error of the kind `Unsupported`.
pub fn read_exact_at(_: &File, _: &mut [u8], _: u64) -> io::Result<()> {
    Err(unsupported())
}

/// Fails like [`read_at`].
///
/// # Errors
///
/// Always returns an error of the kind `Unsupported`.
pub fn write_all_at(_: &File, _: &[u8], _: u64) -> io::Result<()> {
    Err(unsupported())
}

fn unsupported() -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, "not supported on Windows")
}
