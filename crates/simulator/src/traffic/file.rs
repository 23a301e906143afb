//! [`Writer`] and [`Reader`] for files of recorded requests.

use std::{
    fs::{self, File},
    io::{self, BufReader, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use flate2::{Compression, bufread::MultiGzDecoder, write::GzEncoder};

/// Number of buffered bytes at which the buffer is compressed and written.
const BLOCK_BYTES: usize = 256 * 1_024;
/// Maximum age of buffered messages. Written messages can be read even if this process is killed.
const MAX_AGE: Duration = Duration::from_secs(1);
/// Maximum length of a message in bytes.
const MAX_MESSAGE_BYTES: usize = 16 << 20;

/// Error returned when a file of recorded requests cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot use {path} as recorded traffic")]
pub struct TrafficError {
    path: PathBuf,
    source: io::Error,
}

impl TrafficError {
    fn new(path: &Path, source: io::Error) -> Self {
        Self { path: path.to_owned(), source }
    }
}

/// Writer of messages into files of limited size in a directory. Removes the oldest files if their total size exceeds
/// the maximum.
pub struct Writer {
    directory: PathBuf,
    file_bytes: u64,
    max_bytes: u64,
    file: Option<(File, u64)>,
    buffer: Vec<u8>,
    since: Instant,
    number: u64,
}

/// A file of a writer, and its size.
struct WrittenFile {
    path: PathBuf,
    bytes: u64,
}

impl Writer {
    /// Creates a writer. `started` is the number of the first file, which must differ from those of other processes.
    #[must_use]
    pub fn new(directory: PathBuf, file_bytes: u64, max_bytes: u64, started: u64) -> Self {
        Self {
            directory,
            file_bytes,
            max_bytes,
            file: None,
            buffer: Vec::new(),
            since: Instant::now(),
            number: started,
        }
    }

    /// Adds a message, and writes the buffer if it is large or old enough.
    ///
    /// # Errors
    ///
    /// Returns an error if writing fails.
    pub fn add(&mut self, message: &[u8]) -> io::Result<()> {
        if self.buffer.is_empty() {
            self.since = Instant::now();
        }
        let mut length = message.len() as u64;
        while length >= 0x80 {
            self.buffer.push(length as u8 | 0x80);
            length >>= 7;
        }
        self.buffer.push(length as u8);
        self.buffer.extend_from_slice(message);
        if self.buffer.len() >= BLOCK_BYTES || self.since.elapsed() >= MAX_AGE { self.flush() } else { Ok(()) }
    }

    /// Removes the oldest files above the maximum size, and writes the buffered messages. If either fails, they are lost.
    ///
    /// # Errors
    ///
    /// Returns an error if files cannot be listed or removed, or writing fails.
    pub fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        // Each block is a gzip member of its own, so a killed process leaves at most one incomplete block.
        let mut block = GzEncoder::new(Vec::new(), Compression::fast());
        block.write_all(&self.buffer)?;
        let block = block.finish()?;
        self.buffer.clear();
        let (file, written) = match &mut self.file {
            Some(open) if open.1 < self.file_bytes => open,
            _ => {
                fs::create_dir_all(&self.directory)?;
                let path = self.directory.join(format!("traffic-{:020}.gz", self.number));
                self.number += 1;
                // `create_new` fails if another process has created the file.
                self.file.insert((File::create_new(path)?, 0))
            }
        };
        remove_oldest_files(&self.directory, self.max_bytes.saturating_sub(block.len() as u64))?;
        if let Err(error) = file.write_all(&block) {
            // A reader ignores an incomplete block only at the end of a file. If it cannot be removed, the next block
            // begins another file. Otherwise a full disk would get an empty file with every block.
            let is_removed = file.set_len(*written).and_then(|()| file.seek(SeekFrom::End(0))).is_ok();
            if !is_removed {
                self.file = None;
            }
            return Err(error);
        }
        *written += block.len() as u64;
        Ok(())
    }

    /// Returns whether messages are buffered. A failed write discards the buffered messages.
    #[must_use]
    pub fn has_buffered(&self) -> bool {
        !self.buffer.is_empty()
    }
}

/// Removes the oldest files until the total size is at most `max_bytes`.
fn remove_oldest_files(directory: &Path, max_bytes: u64) -> io::Result<()> {
    let mut written = Vec::new();
    let mut total = 0;
    for path in files(directory)? {
        let bytes = fs::metadata(&path)?.len();
        total += bytes;
        written.push(WrittenFile { path, bytes });
    }
    // The last file is being written, so it is not removed.
    written.pop();
    for file in written {
        if total <= max_bytes {
            break;
        }
        fs::remove_file(file.path)?;
        total -= file.bytes;
    }
    Ok(())
}

fn files(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.extension().is_some_and(|end| end == "gz") {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// Reader of messages from files, one file after the other.
pub struct Reader {
    paths: Vec<PathBuf>,
    next_path: usize,
    open: Option<Box<dyn Read + Send>>,
    /// Total compressed size of the files in bytes.
    bytes: u64,
    read: Arc<AtomicU64>,
}

/// A file that adds the number of bytes read from it to a counter.
struct CountingFile {
    file: File,
    total: Arc<AtomicU64>,
}

impl Read for CountingFile {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(bytes)?;
        self.total.fetch_add(read as u64, Relaxed);
        Ok(read)
    }
}

impl Reader {
    /// Creates a reader of files. A directory stands for all its files.
    ///
    /// # Errors
    ///
    /// Returns an error if a path does not exist or cannot be read.
    pub fn new(paths: &[PathBuf]) -> Result<Self, TrafficError> {
        let mut all = Vec::new();
        for path in paths {
            if path.is_dir() {
                all.extend(files(path).map_err(|error| TrafficError::new(path, error))?);
            } else {
                all.push(path.clone());
            }
        }
        let mut bytes = 0;
        for path in &all {
            bytes += fs::metadata(path).map_err(|error| TrafficError::new(path, error))?.len();
        }
        Ok(Self { paths: all, next_path: 0, open: None, bytes, read: Arc::default() })
    }

    /// Returns the share of the bytes that has been read, from 0 to 1.
    #[must_use]
    pub fn progress(&self) -> f64 {
        self.read.load(Relaxed) as f64 / self.bytes.max(1) as f64
    }

    /// Reads the next message into `message`. Returns `false` at the end of the last file.
    ///
    /// An incomplete message at the end of a file, from a killed process, is ignored.
    ///
    /// # Errors
    ///
    /// Returns an error if a file cannot be read or does not contain recorded requests.
    pub fn next(&mut self, message: &mut Vec<u8>) -> Result<bool, TrafficError> {
        loop {
            if self.open.is_none() && !self.open_next()? {
                return Ok(false);
            }
            let path = self.paths[self.next_path - 1].clone();
            let Some(open) = &mut self.open else { continue };
            match read(open, message) {
                Ok(true) => return Ok(true),
                Ok(false) => self.open = None,
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => self.open = None,
                Err(source) => return Err(TrafficError { path, source }),
            }
        }
    }

    fn open_next(&mut self) -> Result<bool, TrafficError> {
        let Some(path) = self.paths.get(self.next_path) else {
            return Ok(false);
        };
        self.next_path += 1;
        let file = File::open(path).map_err(|error| TrafficError::new(path, error))?;
        let file = CountingFile { file, total: Arc::clone(&self.read) };
        let decoder = MultiGzDecoder::new(BufReader::new(file));
        self.open = Some(Box::new(BufReader::with_capacity(BLOCK_BYTES, decoder)));
        Ok(true)
    }
}

/// Reads one message. Returns `false` at the end of the file.
pub(super) fn read(from: &mut dyn Read, message: &mut Vec<u8>) -> io::Result<bool> {
    let mut length = 0_u64;
    let mut shift = 0;
    let mut byte = [0];
    loop {
        if from.read(&mut byte)? == 0 {
            return if shift == 0 { Ok(false) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
        }
        length |= u64::from(byte[0] & 0x7F) << shift;
        shift += 7;
        if byte[0] < 0x80 {
            break;
        }
        if shift > 28 {
            return Err(io::Error::other("not recorded traffic: invalid message length"));
        }
    }
    if length as usize > MAX_MESSAGE_BYTES {
        return Err(io::Error::other("not recorded traffic: message too long"));
    }
    message.resize(length as usize, 0);
    from.read_exact(message)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(path: &Path) -> Result<Vec<Vec<u8>>, TrafficError> {
        let mut reader = Reader::new(&[path.to_owned()])?;
        let (mut messages, mut message) = (Vec::new(), Vec::new());
        while reader.next(&mut message)? {
            messages.push(message.clone());
        }
        Ok(messages)
    }

    /// Returns pseudorandom bytes, which do not compress.
    fn incompressible(number: u64) -> Vec<u8> {
        let mut state = number + 1;
        let byte = |_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        };
        (0..5_000).map(byte).collect()
    }

    #[test]
    fn the_size_of_all_files_is_bounded_and_the_oldest_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = Writer::new(folder.path().to_owned(), 300_000, 1_000_000, 7);
        for number in 0..500 {
            writer.add(&incompressible(number)).unwrap();
        }
        writer.flush().unwrap();
        let sizes: u64 = files(folder.path()).unwrap().iter().map(|path| fs::metadata(path).unwrap().len()).sum();
        assert!((600_000..1_600_000).contains(&sizes), "{sizes}");
        let messages = all(folder.path()).unwrap();
        // The messages are the latest ones, without a gap.
        let first = 500 - messages.len() as u64;
        assert!(
            first > 100 && messages.iter().zip(first..).all(|(message, number)| *message == incompressible(number))
        );
    }

    #[test]
    fn a_truncated_file_ends_early_and_an_invalid_file_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = Writer::new(folder.path().to_owned(), u64::MAX, u64::MAX, 0);
        for number in 0..200 {
            writer.add(&incompressible(number)).unwrap();
        }
        writer.flush().unwrap();
        let path = files(folder.path()).unwrap().remove(0);
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() - 1_000]).unwrap();
        let messages = all(&path).unwrap();
        assert!((50..200).contains(&messages.len()), "{}", messages.len());
        fs::write(&path, "something else").unwrap();
        assert!(all(&path).is_err());
        assert!(all(&folder.path().join("none")).is_err());
    }

    #[test]
    fn messages_are_written_once_they_are_many_or_old() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = Writer::new(folder.path().to_owned(), 1, u64::MAX, 0);
        let future = Instant::now() + Duration::from_secs(3_600);
        // Adds to one buffered message, and returns the number of files.
        let mut add = |since: Instant, message: &[u8]| {
            (writer.buffer, writer.since) = (vec![1, b'a'], since);
            writer.add(message).unwrap();
            files(folder.path()).unwrap().len()
        };
        assert_eq!(add(future, &[b'b'; 100]), 0);
        assert_eq!(add(future, &[b'b'; BLOCK_BYTES]), 1);
        assert_eq!(add(Instant::now() - MAX_AGE, &[b'b'; 100]), 2);
        assert_eq!(all(folder.path()).unwrap().len(), 4);
    }

    /// Writes blocks of equal size, and returns the sizes of all files in the directory.
    fn write_blocks(blocks: usize, mut writer: Writer) -> Vec<u64> {
        for _ in 0..blocks {
            writer.add(b"message").unwrap();
            writer.flush().unwrap();
        }
        files(&writer.directory).unwrap().iter().map(|path| fs::metadata(path).unwrap().len()).collect()
    }

    #[test]
    fn a_file_is_continued_until_it_has_its_size() {
        let sizes = |blocks, file_bytes| {
            let folder = tempfile::tempdir().unwrap();
            write_blocks(blocks, Writer::new(folder.path().to_owned(), file_bytes, u64::MAX, 0))
        };
        let block = sizes(1, 1)[0];
        assert_eq!(sizes(2, block), [block, block]);
        assert_eq!(sizes(3, block + 1), [2 * block, block]);
    }

    #[test]
    fn only_as_many_files_are_removed_as_necessary() {
        let folder = tempfile::tempdir().unwrap();
        let writer = |max_bytes, started| Writer::new(folder.path().to_owned(), 1, max_bytes, started);
        let sizes = write_blocks(5, writer(u64::MAX, 0));
        assert_eq!(sizes.len(), 5);
        assert_eq!(write_blocks(1, writer(3 * sizes[0], 5)), sizes[..3]);
        let oldest = files(folder.path()).unwrap().remove(0);
        assert!(oldest.ends_with("traffic-00000000000000000003.gz"), "{}", oldest.display());
    }

    /// What cannot be removed is a directory here.
    #[test]
    fn nothing_is_written_if_old_files_cannot_be_removed() {
        let folder = tempfile::tempdir().unwrap();
        let obstacle = folder.path().join("traffic-0.gz");
        fs::create_dir(&obstacle).unwrap();
        let mut writer = Writer::new(folder.path().to_owned(), u64::MAX, 1, 1);
        for _ in 0..3 {
            writer.add(b"message").unwrap();
            assert!(writer.flush().is_err() && !writer.has_buffered());
        }
        fs::remove_dir(obstacle).unwrap();
        assert_eq!(all(folder.path()).unwrap(), Vec::<Vec<u8>>::new());
        writer.add(b"message").unwrap();
        writer.flush().unwrap();
        assert_eq!(all(folder.path()).unwrap().len(), 1);
    }

    #[test]
    fn messages_of_any_length_are_read_and_the_progress_ends_at_one() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = Writer::new(folder.path().to_owned(), u64::MAX, u64::MAX, 0);
        let lengths = [0, 1, 127, 128, 129, 16_383, 16_384, 2_097_152];
        lengths.iter().for_each(|length| writer.add(&vec![b'a'; *length]).unwrap());
        writer.flush().unwrap();
        let (mut reader, mut message) = (Reader::new(&[folder.path().to_owned()]).unwrap(), Vec::new());
        assert_eq!(reader.progress(), 0.0);
        for length in lengths {
            assert!(reader.next(&mut message).unwrap());
            assert_eq!(message.len(), length);
        }
        assert!(!reader.next(&mut message).unwrap());
        assert_eq!(reader.progress(), 1.0);
    }

    #[test]
    fn a_length_has_up_to_five_bytes_and_is_at_most_the_maximum() {
        let read_all = |mut bytes: &[u8]| {
            let mut message = Vec::new();
            read(&mut bytes, &mut message).map(|_| message).map_err(|error| error.kind())
        };
        assert_eq!(read_all(&[0x81, 0x80, 0x80, 0x80, 0x00, b'a']), Ok(vec![b'a']));
        assert_eq!(read_all(&[0x81, 0x80, 0x80, 0x80, 0x80, 0x00, b'a']), Err(io::ErrorKind::Other));
        // 16 MiB are allowed, so the message is incomplete. One byte more is too long.
        assert_eq!(read_all(&[0x80, 0x80, 0x80, 0x08]), Err(io::ErrorKind::UnexpectedEof));
        assert_eq!(read_all(&[0x81, 0x80, 0x80, 0x08]), Err(io::ErrorKind::Other));
    }

    #[test]
    fn after_a_failed_write_the_next_block_is_in_a_new_file() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = Writer::new(folder.path().to_owned(), u64::MAX, u64::MAX, 0);
        let mut write = |message: &[u8], is_writable: bool| {
            if !is_writable {
                writer.file = Some((File::open(files(folder.path()).unwrap().remove(0)).unwrap(), 0));
            }
            writer.add(message).unwrap();
            writer.flush()
        };
        write(b"first", true).unwrap();
        assert!(write(b"lost", false).is_err());
        write(b"second", true).unwrap();
        assert_eq!(files(folder.path()).unwrap().len(), 2);
        assert_eq!(all(folder.path()).unwrap(), [b"first".to_vec(), b"second".to_vec()]);
    }
}
