//! Linux, macOS and other systems with POSIX functions.

use std::{
    fs::{File, Metadata, OpenOptions},
    io,
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    time::Duration,
};

use rustix::{
    fs::OFlags,
    time::{ClockId, clock_gettime},
};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::FileId;

/// A stream of SIGTERM.
pub(crate) type Terminate = Signal;
/// A stream of SIGINT.
pub(crate) type Interrupt = Signal;

/// Registers a handler of SIGTERM.
pub(crate) fn terminate() -> io::Result<Terminate> {
    signal(SignalKind::terminate())
}

/// Registers a handler of SIGINT.
pub(crate) fn interrupt() -> io::Result<Interrupt> {
    signal(SignalKind::interrupt())
}

/// Returns options with which opening a pipe does not wait for its other end.
pub(crate) fn open_options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.custom_flags(OFlags::NONBLOCK.bits().cast_signed());
    options
}

/// Returns the device and inode of a file. Fails on systems without inodes.
pub(crate) fn file_id(metadata: &Metadata) -> io::Result<FileId> {
    Ok((metadata.dev(), metadata.ino()))
}

/// Returns the time of the last change of content or metadata, which programs cannot set, in seconds and nanoseconds.
pub(crate) fn change_time(metadata: &Metadata) -> Option<(i64, i64)> {
    Some((metadata.ctime(), metadata.ctime_nsec()))
}

/// Reads bytes at an offset, and returns their number.
pub(crate) fn read_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
    file.read_at(bytes, offset)
}

/// Fills `bytes` with those at an offset.
pub(crate) fn read_exact_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    file.read_exact_at(bytes, offset)
}

/// Writes all bytes at an offset.
pub(crate) fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    file.write_all_at(bytes, offset)
}

/// Returns the CPU time that all threads of the process have used.
pub(crate) fn process_cpu_time() -> Option<Duration> {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Some(Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
}

/// Sets the nice value of this thread. If that is not possible, the thread keeps its priority.
///
/// Does nothing except on Linux: elsewhere the call would apply to the whole process.
pub(crate) fn lower_thread_priority(niceness: i32) {
    if cfg!(target_os = "linux") {
        let _ = rustix::process::setpriority_process(None, niceness);
    }
}
