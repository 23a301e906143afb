//! Memory hints for the allocator and the operating system. This module has the only unsafe code of the service.

use std::mem::MaybeUninit;

/// Size of a large page in bytes, on x86-64 and on ARM with small pages of 4 KiB.
pub(crate) const LARGE_PAGE: usize = 2 << 20;

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

/// Requests large pages for every whole large page within `memory`, which must not have been written to yet.
///
/// The pages stay small if the system has no large ones.
///
/// The call is sound: the range belongs to the caller, and `madvise` with this advice does not change its contents.
#[cfg_attr(not(target_os = "linux"), expect(unused_variables, reason = "there is no such advice"))]
#[allow(unsafe_code, reason = "there is no safe binding")]
pub(crate) fn use_large_pages<T>(memory: &mut [MaybeUninit<T>]) {
    #[cfg(target_os = "linux")]
    {
        let start = memory.as_mut_ptr().cast::<u8>();
        let skipped = start.align_offset(LARGE_PAGE);
        let length = size_of_val(memory).saturating_sub(skipped) / LARGE_PAGE * LARGE_PAGE;
        // The result is ignored because small pages work as well.
        let _ = unsafe {
            rustix::mm::madvise(start.wrapping_add(skipped).cast(), length, rustix::mm::Advice::LinuxHugepage)
        };
    }
}
