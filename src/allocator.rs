//! [`release_memory`], the only unsafe code of the service.

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
