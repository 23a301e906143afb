//! Shortening of a file that cannot be replaced, because it is a mount of its own or its folder is read-only.
//!
//! | step | on the disk afterwards | a reader uses |
//! | --- | --- | --- |
//! | 1. append the line `copy` and the new lines, sync | old lines, an incomplete copy | the old lines: a copy without an end is ignored |
//! | 2. append the line `copy_end`, sync | old lines, a complete copy | the copy |
//! | 3. write the new lines over the old ones, sync | garbage, a complete copy | the copy, which does not overlap with the new lines |
//! | 4. truncate the file behind the new lines | the new lines | the new lines |
//!
//! After a crash or an error in step 3 or 4, both are repeated before the next write.

use std::io::{self, BufWriter, Write};

use super::{
    disk::{self, WriterAt},
    file::{OpenFile, WriteLines},
    line::{CopyRange, Line, encode},
};

/// Number of bytes that are moved at a time.
const CHUNK_BYTES: usize = 64 * 1_024;

impl OpenFile {
    /// Replaces the lines of the file by others that need fewer bytes.
    pub(super) fn shorten_in_place(&mut self, write_lines: &WriteLines<'_>) -> io::Result<()> {
        match self.append_copy(write_lines) {
            Ok(copy) => self.copy = Some(copy),
            Err(error) => {
                self.must_truncate = true;
                let _ = self.repair();
                return Err(error);
            }
        }
        self.finish_copy()
    }

    /// Writes lines to a file that has none.
    pub(super) fn fill(&mut self, write_lines: &WriteLines<'_>) -> io::Result<()> {
        // Until all lines are written, none of them is valid.
        self.length = 0;
        self.must_truncate = true;
        let mut writer = BufWriter::new(WriterAt { file: &self.file, offset: 0 });
        write_lines(&mut writer)?;
        let length = writer.into_inner().map_err(io::IntoInnerError::into_error)?.offset;
        disk::sync_data(&self.file)?;
        self.length = length;
        self.must_truncate = false;
        Ok(())
    }

    /// Appends a complete copy: steps 1 and 2.
    fn append_copy(&self, write_lines: &WriteLines<'_>) -> io::Result<CopyRange> {
        let start = encode(&Line::CopyStart);
        let mut writer = BufWriter::new(WriterAt { file: &self.file, offset: self.length });
        writer.write_all(&start)?;
        write_lines(&mut writer)?;
        let end = writer.into_inner().map_err(io::IntoInnerError::into_error)?.offset;
        let from = self.length + start.len() as u64;
        let copy = CopyRange { from, bytes: end - from };
        if copy.bytes > self.length {
            return Err(io::Error::other("the file is as short as possible"));
        }
        disk::sync_data(&self.file)?;
        disk::write_at(&self.file, &encode(&Line::CopyEnd(copy)), end)?;
        disk::sync_data(&self.file)?;
        Ok(copy)
    }

    /// Moves a complete copy to the beginning of the file, and truncates the file behind it: steps 3 and 4.
    pub(super) fn finish_copy(&mut self) -> io::Result<()> {
        let Some(copy) = self.copy else {
            return Ok(());
        };
        let mut chunk = vec![0; CHUNK_BYTES];
        let mut moved = 0;
        while moved < copy.bytes {
            let rest = usize::try_from(copy.bytes - moved).unwrap_or(usize::MAX);
            let part = &mut chunk[..rest.min(CHUNK_BYTES)];
            sluicegate_files::read_exact_at(&self.file, part, copy.from + moved)?;
            disk::write_at(&self.file, part, moved)?;
            moved += part.len() as u64;
        }
        disk::sync_data(&self.file)?;
        disk::set_len(&self.file, copy.bytes)?;
        self.length = copy.bytes;
        self.copy = None;
        self.must_truncate = false;
        Ok(())
    }
}
