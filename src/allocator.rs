//! The settings of the allocator mimalloc, and [`release_memory`]: the only unsafe code of the service.

use std::ffi::{c_int, c_long};

/// Time after which freed pages return to the operating system, in milliseconds.
///
/// With mimalloc's default of a second, callers whose unfinished large messages are evicted make the process hold three
/// times the memory that is in use.
const PURGE_DELAY_MILLIS: c_long = 10;
/// Number of mimalloc's option for this time. The bindings do not name it; in `mimalloc.h` it precedes
/// `mi_option_use_numa_nodes`.
const PURGE_DELAY: c_int = libmimalloc_sys::mi_option_use_numa_nodes - 1;

/// Makes mimalloc return freed pages after [`PURGE_DELAY_MILLIS`]. To be called before other threads start.
///
/// The call is sound: `mi_option_set` stores a number, and ignores options that it does not know. It is not to be called
/// by two threads at the same time.
#[allow(unsafe_code, reason = "there is no safe binding")]
pub(crate) fn configure() {
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, PURGE_DELAY_MILLIS) }
}

/// Returns the memory that this thread has freed to the operating system.
///
/// mimalloc does this unprompted only while a thread allocates, and a thread that has loaded rules is idle afterwards:
/// after 100,000 rules such a thread retained 600 MB until the next load.
///
/// The call is sound: `mi_collect` takes no pointers, may be called from any thread at any time, and frees no memory in
/// use, even if the process uses another allocator.
#[allow(unsafe_code, reason = "there is no safe binding")]
pub(crate) fn release_memory() {
    unsafe { libmimalloc_sys::mi_collect(true) }
}
