//! Windows, on which the service serves on TCP, without the functions that need POSIX.

use std::{
    fs::{File, Metadata, OpenOptions},
    io,
    time::Duration,
};

use tokio::signal::windows::{CtrlBreak, CtrlC, ctrl_break, ctrl_c};

use super::FileId;

/// A stream of Ctrl-Break, which programs send to end another one.
pub(crate) type Terminate = CtrlBreak;
/// A stream of Ctrl-C.
pub(crate) type Interrupt = CtrlC;

/// Registers a handler of Ctrl-Break.
pub(crate) fn terminate() -> io::Result<Terminate> {
    ctrl_break()
}

/// Registers a handler of Ctrl-C.
pub(crate) fn interrupt() -> io::Result<Interrupt> {
    ctrl_c()
}

/// Returns options to open a file. Folders have no pipes on Windows, so no option is needed.
pub(crate) fn open_options() -> OpenOptions {
    OpenOptions::new()
}

/// Fails, because the standard library has no stable function for the ID of a file on Windows.
pub(crate) fn file_id(_: &Metadata) -> io::Result<FileId> {
    Err(unsupported())
}

/// Returns `None`, because the metadata of the standard library has no change time on Windows.
pub(crate) fn change_time(_: &Metadata) -> Option<(i64, i64)> {
    None
}

/// Fails: only the override journal needs it, which needs a [`file_id`], too.
pub(crate) fn read_at(_: &File, _: &mut [u8], _: u64) -> io::Result<usize> {
    Err(unsupported())
}

/// Fails like [`read_at`].
pub(crate) fn read_exact_at(_: &File, _: &mut [u8], _: u64) -> io::Result<()> {
    Err(unsupported())
}

/// Fails like [`read_at`].
pub(crate) fn write_all_at(_: &File, _: &[u8], _: u64) -> io::Result<()> {
    Err(unsupported())
}

fn unsupported() -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, "not supported on Windows")
}

/// Returns `None`, because the standard library has no function for it.
pub(crate) fn process_cpu_time() -> Option<Duration> {
    None
}

/// Does nothing: nice values do not exist on Windows.
pub(crate) fn lower_thread_priority(_: i32) {}
