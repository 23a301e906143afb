//! Prevents core dumps, because the memory of the process contains tokens, passwords, and names of entities.

use std::io;

/// Prevents core dumps of this process, and that other processes of the same user read its memory.
///
/// The limit of the size of core files is not sufficient, because the kernel ignores it if a program receives the dump.
#[cfg(target_os = "linux")]
pub(super) fn forbid() -> io::Result<()> {
    use rustix::process::{DumpableBehavior, set_dumpable_behavior};
    Ok(set_dumpable_behavior(DumpableBehavior::NotDumpable)?)
}

/// Does nothing, because only Linux has this setting.
#[cfg(not(target_os = "linux"))]
pub(super) fn forbid() -> io::Result<()> {
    Ok(())
}
