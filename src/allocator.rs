//! Giving memory back to the system.

/// Gives back what this thread has freed. mimalloc does so by itself only while a thread uses it, and one that has loaded rules does
/// not: after a hundred thousand of them it kept 600 MB until the next load.
///
/// The only unsafe code of the service. Sound: the function takes no pointers, may be called from any thread at any time, and
/// frees nothing that is in use, also when another allocator is the process' own.
#[allow(unsafe_code, reason = "there is no safe binding")]
pub(crate) fn give_back() {
    unsafe { libmimalloc_sys::mi_collect(true) }
}
