//! The functions of `platform` on Linux, macOS and other systems with POSIX functions.

use std::{io, time::Duration};

use rustix::{
    process::{Resource, getrlimit},
    time::{ClockId, clock_gettime},
};
use tokio::signal::unix::{Signal, SignalKind, signal};

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

/// Returns the CPU time that all threads of the process have used.
pub(crate) fn process_cpu_time() -> Option<Duration> {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Some(Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
}

/// Returns the maximum number of open file descriptors, or `None` if there is none.
pub(crate) fn max_open_files() -> Option<u64> {
    getrlimit(Resource::Nofile).current
}

/// Sets the nice value of this thread. If that is not possible, the thread keeps its priority.
///
/// Does nothing except on Linux: elsewhere the call would apply to the whole process.
pub(crate) fn lower_thread_priority(niceness: i32) {
    if cfg!(target_os = "linux") {
        let _ = rustix::process::setpriority_process(None, niceness);
    }
}
