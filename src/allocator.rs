//! What is said to the system of memory: the only unsafe code of the service.

use std::mem::MaybeUninit;

/// On x86-64, and on ARM where a small page has 4 KiB.
pub(crate) const LARGE_PAGE: usize = 2 << 20;

/// Gives back what this thread has freed. mimalloc does so by itself only while a thread uses it, and one that has loaded rules does
/// not: after a hundred thousand of them it kept 600 MB until the next load.
///
/// Sound: the function takes no pointers, may be called from any thread at any time, and frees nothing that is in use, also when
/// another allocator is the process' own.
#[allow(unsafe_code, reason = "there is no safe binding")]
pub(crate) fn release_memory() {
    unsafe { libmimalloc_sys::mi_collect(true) }
}

/// Asks for large pages, as far as whole ones are in this memory, which has not been written to. Where the system has none the pages
/// are small.
///
/// Sound: the range is memory of the caller's own, and advice to the system changes nothing that can be read.
#[cfg_attr(not(target_os = "linux"), expect(unused_variables, reason = "there is no such advice"))]
#[allow(unsafe_code, reason = "there is no safe binding")]
pub(crate) fn use_large_pages<T>(memory: &mut [MaybeUninit<T>]) {
    #[cfg(target_os = "linux")]
    {
        let start = memory.as_mut_ptr().cast::<u8>();
        let skipped = start.align_offset(LARGE_PAGE);
        let length = size_of_val(memory).saturating_sub(skipped) / LARGE_PAGE * LARGE_PAGE;
        // A refusal is no harm.
        let _ = unsafe {
            rustix::mm::madvise(start.wrapping_add(skipped).cast(), length, rustix::mm::Advice::LinuxHugepage)
        };
    }
}
