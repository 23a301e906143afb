//! [`run_on_compile_thread`]: runs long work, such as compiling rules, without delaying the workers.

use std::{io, thread};

use tokio::sync::oneshot;

/// Nice value of the compile thread. A worker on the same core gets about ten times as much CPU time.
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
        // On Linux this sets the priority of the thread. If it cannot be set, the thread keeps the default priority.
        let _ = rustix::process::setpriority_process(None, NICENESS);
        let result = work();
        crate::allocator::release_memory();
        let _ = sender.send(result);
    })?;
    receiver.await.map_err(io::Error::other)
}
