//! Work that takes a while, beside what has to be quick.

use std::{io, thread};

use tokio::sync::oneshot;

/// The workers go first: on the same core they get about ten times as much of it.
const NICENESS: i32 = 10;

/// Runs it on a thread of its own that gives way to the workers. A set of rules is made of many times the memory that it takes
/// in the end: the rest is given back to the system before the thread ends.
pub async fn run_on_compile_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    let (done, result) = oneshot::channel();
    thread::Builder::new().name("apart".into()).spawn(move || {
        // On Linux that is the thread's. Where it may not be set, all are equal.
        let _ = rustix::process::setpriority_process(None, NICENESS);
        let result = work();
        crate::allocator::release_memory();
        let _ = done.send(result);
    })?;
    result.await.map_err(io::Error::other)
}
