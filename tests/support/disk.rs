//! [`Disk`]: a small file system in memory, which a test can fill.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::Command,
};

/// A file system with a few pages; unmounted when dropped.
pub(crate) struct Disk {
    folder: tempfile::TempDir,
}

impl Disk {
    /// Creates a file system of this size. Needs the rights of root.
    pub(crate) fn new(kibibytes: u32) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let size = format!("size={kibibytes}k");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(folder.path()).status();
        assert!(mounted.unwrap().success(), "cannot mount a file system: the tests need root");
        Self { folder }
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    fn filler(&self) -> PathBuf {
        self.path().join("filler")
    }

    /// Uses up all free space.
    pub(crate) fn fill(&self) {
        let mut file = fs::OpenOptions::new().create(true).append(true).open(self.filler()).unwrap();
        let error = loop {
            match io::Write::write(&mut file, &[0; 4_096]) {
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    }

    /// Frees the space that [`fill`](Self::fill) has used.
    pub(crate) fn free(&self) {
        fs::remove_file(self.filler()).unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // A process that a failed test has left may still use it.
        let _ = Command::new("umount").arg("--lazy").arg(self.path()).status();
    }
}
