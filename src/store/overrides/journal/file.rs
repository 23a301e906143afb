//! [`JournalFile`]: the file of a journal, its lock, and the writes to it.
//!
//! One process at a time holds the lock of the file and writes to it. The lock belongs to an inode, so a process that
//! has it checks that the path still names this inode: before it uses a file that it has opened, and before each write.
//!
//! A failed step never leaves the file in an unknown state. The next write first calls [`OpenFile::repair`].

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
    time::SystemTime,
};

use sluicegate_files::{FileId, file_id};

use super::{
    JournalError,
    contents::{Contents, find_copy},
    disk::{self, WriterAt},
    line::CopyRange,
};

/// Function that writes all lines that a shorter file must have.
pub(super) type WriteLines<'l> = dyn Fn(&mut dyn Write) -> io::Result<()> + 'l;

/// The file of a journal.
pub(super) struct JournalFile {
    path: PathBuf,
    /// The file, if this process may write to it.
    open: Option<OpenFile>,
    /// Fingerprint of the contents that were read last; `None` before the first time.
    read: Option<Fingerprint>,
}

/// A file that this process may write to.
pub(super) struct OpenFile {
    pub(super) file: File,
    /// The path without symbolic links.
    real_path: PathBuf,
    /// Length of the valid lines in bytes.
    pub(super) length: u64,
    /// Whether an incomplete write may follow the valid lines.
    pub(super) must_truncate: bool,
    /// Whether the name of the file might not survive a crash of the machine.
    must_sync_name: bool,
    /// A complete copy at the end of the file, which must still be moved to its beginning.
    pub(super) copy: Option<CopyRange>,
}

/// Identifies the contents of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Fingerprint {
    id: FileId,
    length: u64,
    modified: Option<SystemTime>,
}

impl Fingerprint {
    fn of(file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        Ok(Self { id: file_id(&metadata)?, length: metadata.len(), modified: metadata.modified().ok() })
    }
}

/// State of the path of the file that this process writes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Name {
    /// The file is unchanged since the last write of this process.
    Current,
    /// The file was removed.
    Removed,
    /// The file was emptied.
    Emptied,
    /// The path names another file, or another program has written to the file.
    Changed,
}

impl JournalFile {
    pub(super) const fn new(path: PathBuf) -> Self {
        Self { path, open: None, read: None }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns whether another process holds the file.
    pub(super) const fn is_read_only(&self) -> bool {
        self.open.is_none() && self.read.is_some()
    }

    /// Returns the length of the valid lines in bytes.
    pub(super) fn length(&self) -> u64 {
        if let Some(open) = &self.open {
            return open.length;
        }
        match &self.read {
            Some(read) => read.length,
            None => 0,
        }
    }

    /// Reads the file, and opens it for writes unless another process holds its lock.
    pub(super) fn load(
        &mut self,
        on_override: &mut dyn FnMut(&str, u64, Option<&str>),
    ) -> Result<Contents, JournalError> {
        let path = self.path.clone();
        self.open = None;
        let (file, lock) = open_and_lock(&path, true).map_err(|error| JournalError::file(&path, error))?;
        let real_path = fs::canonicalize(&path).map_err(|error| JournalError::file(&path, error))?;
        let fingerprint = Fingerprint::of(&file).map_err(|error| JournalError::file(&path, error))?;
        let contents = Contents::read(&file, &path, on_override)?;
        if lock == Lock::Own {
            let mut open = OpenFile {
                file,
                real_path,
                length: contents.length,
                must_truncate: fingerprint.length > contents.length && contents.copy.is_none(),
                must_sync_name: false,
                copy: contents.copy,
            };
            if open.must_truncate {
                tracing::warn!(path = %path.display(), "removed an incomplete last line from the override journal");
            }
            // A process that ended during a rewrite leaves an incomplete file.
            let _ = fs::remove_file(open.temporary_path());
            if let Err(error) = open.repair() {
                tracing::warn!(path = %path.display(), %error, "cannot repair the end of the override journal; it is tried again before the next change");
            }
            self.open = Some(open);
        } else {
            let size = file.metadata().map_err(|error| JournalError::file(&path, error))?.len();
            if size < fingerprint.length {
                return Err(JournalError::Changed { path });
            }
            let copy = find_copy(&file, size).map_err(|error| JournalError::file(&path, error))?;
            if copy != contents.copy {
                return Err(JournalError::Changed { path });
            }
        }
        self.read = Some(fingerprint);
        Ok(contents)
    }

    /// Returns whether the file must be read again: another process has changed or released it, or another file has its
    /// name. Until then nothing can be written.
    pub(super) fn is_behind(&mut self) -> bool {
        if let Some(open) = &self.open {
            let is_changed = open.name().is_ok_and(|name| name == Name::Changed);
            if is_changed {
                self.open = None;
            }
            return is_changed;
        }
        let Some(read) = &self.read else {
            return false;
        };
        match open_and_lock(&self.path, false) {
            Ok((_, Lock::Own)) => true,
            Ok((file, Lock::Held)) => Fingerprint::of(&file).is_ok_and(|fingerprint| fingerprint != *read),
            // The process that held the file has removed it.
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        }
    }

    /// Returns whether the file was removed or emptied, and must therefore be written again in full.
    pub(super) fn is_lost(&self) -> bool {
        let name = self.open.as_ref().and_then(|open| open.name().ok());
        matches!(name, Some(Name::Removed | Name::Emptied))
    }

    /// Writes and syncs bytes at the end of the file, all of them or nothing.
    ///
    /// # Errors
    ///
    /// Returns an error if the bytes may not be in the file.
    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<(), JournalError> {
        let path = &self.path;
        let Some(open) = &mut self.open else {
            return Err(self.not_writable());
        };
        open.repair().map_err(|error| JournalError::file(path, error))?;
        match open.name().map_err(|error| JournalError::file(path, error))? {
            Name::Current => open.append(bytes).map_err(|error| JournalError::file(path, error)),
            Name::Removed | Name::Emptied => Err(JournalError::file(path, io::ErrorKind::NotFound.into())),
            Name::Changed => {
                self.open = None;
                Err(JournalError::Changed { path: path.clone() })
            }
        }
    }

    /// Returns an error unless this process may write the file.
    pub(super) fn check_writable(&self) -> Result<(), JournalError> {
        if self.open.is_some() { Ok(()) } else { Err(self.not_writable()) }
    }

    fn not_writable(&self) -> JournalError {
        let path = self.path.clone();
        match self.read {
            Some(_) => JournalError::Locked { path },
            None => JournalError::File { path, source: io::Error::other("it has not been read") },
        }
    }

    /// Replaces the lines of the file by others, which survive a crash at every point.
    ///
    /// A new file is renamed over the old one. If that is not possible, because the file is a mount of its own or its
    /// folder is read-only, the file itself is shortened.
    ///
    /// # Errors
    ///
    /// Returns an error if the file still has the old lines.
    pub(super) fn rewrite(&mut self, write_lines: &WriteLines<'_>) -> io::Result<()> {
        let Some(open) = &mut self.open else {
            return Err(io::Error::other("another process holds the file"));
        };
        open.repair()?;
        let Err(error) = open.replace(write_lines) else {
            return Ok(());
        };
        tracing::debug!(path = %self.path.display(), %error, "cannot replace the override journal; rewriting it in place");
        match open.name()? {
            Name::Current if open.length > 0 => open.shorten_in_place(write_lines),
            Name::Current | Name::Emptied => open.fill(write_lines),
            Name::Removed | Name::Changed => Err(error),
        }
    }
}

impl OpenFile {
    /// Returns the path at which a new file is written before it is renamed.
    fn temporary_path(&self) -> PathBuf {
        self.real_path.with_extension("new")
    }

    /// Compares the file that the path names, and its length, with those of the last write of this process.
    fn name(&self) -> io::Result<Name> {
        let named = match fs::metadata(&self.real_path) {
            Ok(named) => named,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Name::Removed),
            Err(error) => return Err(error),
        };
        let own = self.file.metadata()?;
        if file_id(&named)? != file_id(&own)? {
            return Ok(Name::Changed);
        }
        let has_unknown_end = self.must_truncate || self.copy.is_some();
        if has_unknown_end || own.len() == self.length {
            return Ok(Name::Current);
        }
        Ok(if own.len() == 0 { Name::Emptied } else { Name::Changed })
    }

    /// Repairs the effects of earlier failed steps, before the next write.
    pub(super) fn repair(&mut self) -> io::Result<()> {
        self.finish_copy()?;
        if self.must_truncate {
            disk::set_len(&self.file, self.length)?;
            disk::sync_data(&self.file)?;
            self.must_truncate = false;
        }
        if self.must_sync_name {
            disk::sync(&open_folder(&self.real_path)?)?;
            self.must_sync_name = false;
        }
        Ok(())
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let written = disk::write_at(&self.file, bytes, self.length);
        if let Err(error) = written.and_then(|()| disk::sync_data(&self.file)) {
            // An incomplete line would make the next line invalid.
            self.must_truncate = true;
            let _ = self.repair();
            return Err(error);
        }
        self.length += bytes.len() as u64;
        Ok(())
    }

    /// Writes a new file and renames it over this one.
    fn replace(&mut self, write_lines: &WriteLines<'_>) -> io::Result<()> {
        // The name must be synced afterwards, so nothing is replaced in a folder that cannot be opened.
        let folder = open_folder(&self.real_path)?;
        let temporary = self.temporary_path();
        let written = self.write_temporary(&temporary, write_lines);
        let renamed = written.and_then(|new| disk::rename(&temporary, &self.real_path).map(|()| new));
        let (file, length) = renamed.inspect_err(|_| {
            // An incomplete file would keep the disk full.
            let _ = fs::remove_file(&temporary);
        })?;
        self.file = file;
        self.length = length;
        self.must_truncate = false;
        self.copy = None;
        // If the new name may not survive a crash, nothing is written to the new file.
        self.must_sync_name = disk::sync(&folder).is_err();
        Ok(())
    }

    /// Writes a locked file with these lines, and returns it with its length.
    fn write_temporary(&self, temporary: &Path, write_lines: &WriteLines<'_>) -> io::Result<(File, u64)> {
        disk::create(temporary)?;
        let file = OpenOptions::new().read(true).write(true).open(temporary)?;
        if try_lock(&file, temporary)? == Lock::Held {
            return Err(io::Error::other("another process holds the new file"));
        }
        file.set_permissions(self.file.metadata()?.permissions())?;
        let mut writer = BufWriter::new(WriterAt { file: &file, offset: 0 });
        write_lines(&mut writer)?;
        let length = writer.into_inner().map_err(io::IntoInnerError::into_error)?.offset;
        disk::sync(&file)?;
        Ok((file, length))
    }
}

/// The outcome of an attempt to lock a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lock {
    /// This process has the lock.
    Own,
    /// Another process has the lock.
    Held,
}

/// Opens a regular file and tries to lock it. This process may write to it only with its own lock.
fn open_and_lock(path: &Path, create: bool) -> io::Result<(File, Lock)> {
    loop {
        let file = OpenOptions::new().read(true).write(true).create(create).truncate(false).open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(io::Error::other("not a regular file"));
        }
        let id = file_id(&metadata)?;
        if try_lock(&file, path)? == Lock::Held {
            return Ok((file, Lock::Held));
        }
        // The process that held the lock may have renamed another file over this one.
        match fs::metadata(path) {
            Ok(named) if file_id(&named)? == id => return Ok((file, Lock::Own)),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound && create => {}
            Err(error) => return Err(error),
        }
    }
}

/// Tries to lock a file. On a file system without locks, the file is used without one.
fn try_lock(file: &File, path: &Path) -> io::Result<Lock> {
    match file.try_lock() {
        Ok(()) => Ok(Lock::Own),
        Err(TryLockError::WouldBlock) => Ok(Lock::Held),
        Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Interrupted => Ok(Lock::Held),
        Err(TryLockError::Error(error)) => {
            tracing::warn!(path = %path.display(), %error, "cannot lock the override journal; ensure that no other process uses it");
            Ok(Lock::Own)
        }
    }
}

/// Opens the folder of a file, to sync its names.
pub(super) fn open_folder(path: &Path) -> io::Result<File> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))
}
