//! Functions that operating systems provide in different ways, so that the other modules need no `cfg` for them.
//!
//! `unix.rs` and `windows.rs` have the same functions. The service is built for Linux, where all of them have their
//! effect. On macOS the compile thread keeps its priority. On Windows, pauses of the process are not measured. Functions for
//! files are in the crate `files`: on Windows, `overrides.file` is not supported, and files have no change time.

#[cfg_attr(unix, path = "unix.rs")]
#[cfg_attr(windows, path = "windows.rs")]
mod system;

pub(crate) use system::{
    Interrupt, Terminate, interrupt, lower_thread_priority, max_open_files, process_cpu_time, terminate,
};
