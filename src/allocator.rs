//! Giving memory back to the system.

/// Gives back what this thread has freed. mimalloc does so by itself only while it is used, and an idle service is not: after a
/// load of a hundred thousand rules it had kept 600 MB for good.
///
/// The only unsafe code of the service. Sound: the function takes no pointers, may be called from any thread at any time, and
/// frees nothing that is in use, also when another allocator is the process' own.
#[allow(unsafe_code, reason = "there is no safe binding")]
pub(crate) fn give_back() {
    unsafe { libmimalloc_sys::mi_collect(true) }
}
