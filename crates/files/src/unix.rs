//! Access to files on Linux, macOS and other systems with POSIX functions.

use std::{
    fs::{File, Metadata, OpenOptions},
    io,
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
};

use rustix::fs::OFlags;

use super::FileId;

/// Returns options with which opening a pipe does not wait for its other end.
pub(super) fn open_options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.custom_flags(OFlags::NONBLOCK.bits().cast_signed());
    options
}

/// Returns the device and inode of a file.
///
/// # Errors
///
/// Returns an error only on Windows.
pub fn file_id(metadata: &Metadata) -> io::Result<FileId> {
    Ok((metadata.dev(), metadata.ino()))
}

/// Returns the time of the last change of content or metadata, which programs cannot set, in seconds and nanoseconds.
pub(super) fn change_time(metadata: &Metadata) -> Option<(i64, i64)> {
    Some((metadata.ctime(), metadata.ctime_nsec()))
}

/// Reads bytes at an offset, and returns their number.
///
/// # Errors
///
/// Returns the error of the operating system.
pub fn read_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
    file.read_at(bytes, offset)
}

/// Fills `bytes` with those at an offset.
///
/// # Errors
///
/// Returns the error of the operating system.
pub fn read_exact_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    file.read_exact_at(bytes, offset)
}

/// Writes all bytes at an offset.
///
/// # Errors
///
/// Returns the error of the operating system.
pub fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    file.write_all_at(bytes, offset)
}
