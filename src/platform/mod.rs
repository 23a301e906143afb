//! Functions that operating systems provide in different ways, so that the other modules need no `cfg` for them.
//!
//! `unix.rs` and `windows.rs` have the same functions. The service is built for Linux, where all of them have their
//! effect. On macOS the compile thread keeps its priority. On Windows, `overrides.file` is not supported, pauses of the
//! process are not measured, and files have no change time.

#[cfg_attr(unix, path = "unix.rs")]
#[cfg_attr(windows, path = "windows.rs")]
mod system;

pub(crate) use system::{
    Interrupt, Terminate, change_time, file_id, interrupt, lower_thread_priority, open_options, process_cpu_time,
    read_at, read_exact_at, terminate, write_all_at,
};

/// Device and inode of a file, which stay the same if the file is renamed.
pub(crate) type FileId = (u64, u64);
