//! [`CompressedFiles`]: a small copy of rule files.

use std::io::BufReader;

use flate2::{Compression, read::DeflateDecoder, write::DeflateEncoder};

use crate::rules::SourceFile;

/// Compressed copy of rule files, to compare them with new ones and to load them again. It has a tenth of their size.
#[derive(PartialEq, Eq)]
pub(super) struct CompressedFiles(Vec<u8>);

impl CompressedFiles {
    /// Compresses `files`. Returns `None` if that fails, which is not expected.
    pub(super) fn new(files: &[SourceFile]) -> Option<Self> {
        let files: Vec<_> = files.iter().map(|file| (&file.name, &file.text)).collect();
        let mut encoder = DeflateEncoder::new(Vec::new(), Compression::fast());
        serde_json::to_writer(&mut encoder, &files).ok()?;
        encoder.finish().ok().map(Self)
    }

    /// Returns the decompressed files.
    pub(super) fn files(&self) -> Option<Vec<SourceFile>> {
        let files: Vec<(String, String)> =
            serde_json::from_reader(BufReader::new(DeflateDecoder::new(&*self.0))).ok()?;
        Some(files.into_iter().map(|(name, text)| SourceFile { name, text }).collect())
    }
}
