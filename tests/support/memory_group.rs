//! [`MemoryGroup`]: a limit on the memory of a process, by a control group of Linux.

use std::{fs, path::PathBuf};

/// A control group with a maximum of memory. The kernel ends a process that exceeds it.
pub(crate) struct MemoryGroup(PathBuf);

impl MemoryGroup {
    /// Creates a group. Returns `None` where only a service manager may do so, such as in most containers.
    pub(crate) fn new(max_bytes: u64) -> Option<Self> {
        let name = format!("sluicegate-test-{}", std::process::id());
        // Version 1 and version 2 of the interface.
        for (parent, limit) in [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")] {
            let group = Self(PathBuf::from(parent).join(&name));
            if fs::create_dir(&group.0).is_ok()
                && group.0.join("cgroup.procs").exists()
                && fs::write(group.0.join(limit), max_bytes.to_string()).is_ok()
            {
                return Some(group);
            }
        }
        eprintln!("no control group with a limit can be created; only the peak is checked");
        None
    }

    /// Moves a process into the group.
    pub(crate) fn add(&self, pid: u32) {
        fs::write(self.0.join("cgroup.procs"), pid.to_string()).unwrap();
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}
