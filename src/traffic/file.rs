//! Files of recorded requests.

use std::{
    fs::{self, File},
    io::{self, BufReader, Read, Write},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

/// What is waiting is compressed and written when it is so much …
const PIECE: usize = 256 * 1_024;
/// … or so old: then it can be read, whatever becomes of this process.
const AGE: Duration = Duration::from_secs(1);
/// No request is longer.
const LONGEST: usize = 16 << 20;

/// A file that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot use {path} as recorded traffic")]
pub struct TrafficError {
    path: PathBuf,
    source: io::Error,
}

/// Writes files into a directory: each up to a size, and the oldest go when all are too large.
pub struct Writer {
    directory: PathBuf,
    file_bytes: u64,
    max_bytes: u64,
    file: Option<(File, u64)>,
    waiting: Vec<u8>,
    since: Instant,
    number: u64,
}

impl Writer {
    /// `started`: tells the files of this process from those of others.
    #[must_use]
    pub fn new(directory: PathBuf, file_bytes: u64, max_bytes: u64, started: u64) -> Self {
        let (waiting, since) = (Vec::new(), Instant::now());
        Self { directory, file_bytes, max_bytes, file: None, waiting, since, number: started }
    }

    /// Adds a message.
    pub fn add(&mut self, message: &[u8]) -> io::Result<()> {
        if self.waiting.is_empty() {
            self.since = Instant::now();
        }
        let mut length = message.len() as u64;
        while length >= 0x80 {
            self.waiting.push(length as u8 | 0x80);
            length >>= 7;
        }
        self.waiting.push(length as u8);
        self.waiting.extend_from_slice(message);
        if self.waiting.len() >= PIECE || self.since.elapsed() >= AGE { self.flush() } else { Ok(()) }
    }

    /// Writes what waits.
    pub fn flush(&mut self) -> io::Result<()> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        let piece = zstd::bulk::compress(&self.waiting, 3)?;
        self.waiting.clear();
        let (file, written) = match &mut self.file {
            Some(open) if open.1 < self.file_bytes => open,
            _ => {
                fs::create_dir_all(&self.directory)?;
                let path = self.directory.join(format!("traffic-{:020}.zst", self.number));
                self.number += 1;
                // Another one's file is not written to.
                self.file.insert((File::create_new(path)?, 0))
            }
        };
        file.write_all(&piece)?;
        *written += piece.len() as u64;
        self.tidy()
    }

    /// Removes the oldest files, until the rest is small enough.
    fn tidy(&self) -> io::Result<()> {
        let mut files = files(&self.directory)?;
        let mut sizes = Vec::new();
        for path in &files {
            sizes.push(fs::metadata(path)?.len());
        }
        let mut all: u64 = sizes.iter().sum();
        // The last is the one that is written.
        files.pop();
        for (path, size) in files.iter().zip(sizes) {
            if all <= self.max_bytes {
                break;
            }
            fs::remove_file(path)?;
            all -= size;
        }
        Ok(())
    }
}

fn files(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.extension().is_some_and(|end| end == "zst") {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// Reads files, one after the other.
pub struct Reader {
    paths: Vec<PathBuf>,
    place: usize,
    open: Option<Box<dyn Read + Send>>,
    /// Compressed bytes of all.
    bytes: u64,
    read: Arc<AtomicU64>,
}

/// Counts what is read of a file.
struct Counting(File, Arc<AtomicU64>);

impl Read for Counting {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.0.read(bytes)?;
        self.1.fetch_add(read as u64, Relaxed);
        Ok(read)
    }
}

impl Reader {
    /// Of these files; of a directory, all of its.
    pub fn new(paths: &[PathBuf]) -> Result<Self, TrafficError> {
        let mut all = Vec::new();
        for path in paths {
            let failed = |source| TrafficError { path: path.clone(), source };
            if path.is_dir() { all.extend(files(path).map_err(failed)?) } else { all.push(path.clone()) }
        }
        let mut bytes = 0;
        for path in &all {
            bytes += fs::metadata(path).map_err(|source| TrafficError { path: path.clone(), source })?.len();
        }
        Ok(Self { paths: all, place: 0, open: None, bytes, read: Arc::default() })
    }

    /// How much of all has been read, of 1.
    #[must_use]
    pub fn progress(&self) -> f64 {
        self.read.load(Relaxed) as f64 / self.bytes.max(1) as f64
    }

    /// The next message, into `message`; false at the end. A file that ends in the middle of one, as that of a process that was
    /// killed, ends before it.
    pub fn next(&mut self, message: &mut Vec<u8>) -> Result<bool, TrafficError> {
        loop {
            if self.open.is_none() && !self.open_next()? {
                return Ok(false);
            }
            let path = self.paths[self.place - 1].clone();
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
        let Some(path) = self.paths.get(self.place) else {
            return Ok(false);
        };
        self.place += 1;
        let open = || -> io::Result<Box<dyn Read + Send>> {
            let decoder = zstd::Decoder::new(Counting(File::open(path)?, Arc::clone(&self.read)))?;
            Ok(Box::new(BufReader::with_capacity(PIECE, decoder)))
        };
        self.open = Some(open().map_err(|source| TrafficError { path: path.clone(), source })?);
        Ok(true)
    }
}

/// False where there is none.
fn read(from: &mut dyn Read, message: &mut Vec<u8>) -> io::Result<bool> {
    let (mut length, mut shift, mut byte) = (0_u64, 0, [0]);
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
            return Err(io::Error::other("this is not recorded traffic"));
        }
    }
    if length as usize > LONGEST {
        return Err(io::Error::other("this is not recorded traffic"));
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

    /// Something that does not compress.
    fn noise(number: u64) -> Vec<u8> {
        let mut state = number + 1;
        let byte = |_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        };
        (0..5_000).map(byte).collect()
    }

    #[test]
    fn files_are_bounded_and_the_oldest_go() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = Writer::new(folder.path().to_owned(), 300_000, 1_000_000, 7);
        for number in 0..500 {
            writer.add(&noise(number)).unwrap();
        }
        writer.flush().unwrap();
        let sizes: u64 = files(folder.path()).unwrap().iter().map(|path| fs::metadata(path).unwrap().len()).sum();
        assert!((600_000..1_600_000).contains(&sizes), "{sizes}");
        let messages = all(folder.path()).unwrap();
        // The latest, all of them from one on.
        let first = 500 - messages.len() as u64;
        assert!(first > 100 && messages.iter().zip(first..).all(|(message, number)| *message == noise(number)));
    }

    #[test]
    fn a_file_that_was_cut_off_ends_earlier_and_another_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = Writer::new(folder.path().to_owned(), u64::MAX, u64::MAX, 0);
        for number in 0..200 {
            writer.add(&noise(number)).unwrap();
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
}
