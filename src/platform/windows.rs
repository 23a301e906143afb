//! The functions of `platform` on Windows. Those that need POSIX do nothing or return `None`.

use std::{io, time::Duration};

use tokio::signal::windows::{CtrlBreak, CtrlC, ctrl_break, ctrl_c};

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

/// Returns `None`, because the standard library has no function for the CPU time of a process.
pub(crate) fn process_cpu_time() -> Option<Duration> {
    None
}

/// Returns `None`: the metric exists on Linux only.
pub(crate) fn max_open_files() -> Option<u64> {
    None
}

/// Does nothing: nice values do not exist on Windows.
pub(crate) fn lower_thread_priority(_: i32) {}
