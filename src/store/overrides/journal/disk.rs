//! The operations that change files on the disk. Tests make each of them fail, and check the disk before each.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::Path,
};

#[cfg(not(test))]
const fn check_point(_operation: Operation) -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
use self::planted::check_point;

/// A kind of operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    Write,
    SetLength,
    Sync,
    Create,
    Rename,
}

/// Writes all bytes at an offset.
pub(super) fn write_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    check_point(Operation::Write)?;
    // In tests a write can end in the middle.
    let (first, rest) = bytes.split_at(if cfg!(test) { bytes.len() / 2 } else { 0 });
    if !first.is_empty() {
        sluicegate_files::write_all_at(file, first, offset)?;
        check_point(Operation::Write)?;
    }
    sluicegate_files::write_all_at(file, rest, offset + first.len() as u64)
}

/// Truncates or extends a file.
pub(super) fn set_len(file: &File, length: u64) -> io::Result<()> {
    check_point(Operation::SetLength)?;
    file.set_len(length)
}

/// Waits until the contents of a file, or the names in a directory, survive a crash of the machine.
pub(super) fn sync(file: &File) -> io::Result<()> {
    check_point(Operation::Sync)?;
    file.sync_all()
}

/// Waits until the contents of a file survive a crash of the machine.
pub(super) fn sync_data(file: &File) -> io::Result<()> {
    check_point(Operation::Sync)?;
    file.sync_data()
}

/// Creates an empty file, or empties it.
pub(super) fn create(path: &Path) -> io::Result<File> {
    check_point(Operation::Create)?;
    File::create(path)
}

/// Gives a file another name, which can be that of an existing file.
pub(super) fn rename(from: &Path, to: &Path) -> io::Result<()> {
    check_point(Operation::Rename)?;
    fs::rename(from, to)
}

/// Writer to a file from an offset on.
pub(super) struct WriterAt<'f> {
    pub(super) file: &'f File,
    pub(super) offset: u64,
}

impl Write for WriterAt<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        write_at(self.file, bytes, self.offset)?;
        self.offset += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Faults that a test plants in its thread.
#[cfg(test)]
pub(super) mod planted {
    use std::{cell::RefCell, io};

    use super::Operation;

    /// Called before each operation with its number; an error makes the operation fail.
    type Plan = Box<dyn FnMut(usize, Operation) -> io::Result<()>>;

    thread_local! {
        static PLAN: RefCell<Option<(usize, Plan)>> = const { RefCell::new(None) };
    }

    /// Runs `action` with a plan, and returns its result and the number of operations.
    pub(crate) fn run<R>(
        plan: impl FnMut(usize, Operation) -> io::Result<()> + 'static,
        action: impl FnOnce() -> R,
    ) -> (R, usize) {
        PLAN.with(|current| *current.borrow_mut() = Some((0, Box::new(plan))));
        let result = action();
        let operations = PLAN.with(|current| current.borrow_mut().take().map_or(0, |(number, _)| number));
        (result, operations)
    }

    pub(super) fn check_point(operation: Operation) -> io::Result<()> {
        PLAN.with(|current| match &mut *current.borrow_mut() {
            Some((number, plan)) => {
                *number += 1;
                plan(*number - 1, operation)
            }
            None => Ok(()),
        })
    }
}
