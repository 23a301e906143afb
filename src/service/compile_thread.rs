//! [`run_on_compile_thread`]: runs long work, such as compiling rules, without delaying the workers.

use std::{io, thread};

use tokio::sync::oneshot;

use crate::{allocator, platform};

/// Nice value of the compile thread on Linux. A worker on the same core gets about ten times as much CPU time.
const NICENESS: i32 = 10;

/// Runs `work` on a new thread with a low priority.
///
/// Compiling a rule set needs many times the memory of the finished rule set. The thread returns the freed memory to
/// the operating system before it ends.
///
/// # Errors
///
/// Returns an error if the thread cannot be started or `work` panics.
pub async fn run_on_compile_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    let (sender, receiver) = oneshot::channel();
    thread::Builder::new().name("compile".into()).spawn(move || {
        platform::lower_thread_priority(NICENESS);
        let result = work();
        allocator::release_memory();
        let _ = sender.send(result);
    })?;
    receiver.await.map_err(io::Error::other)
}
