//! [`read_hash_key`]: reads the secret key of [`ValueHash`](crate::engine::ValueHash).

use std::{io, path::Path};

use sluicegate_files as files;

/// Minimum length of a hash key. With a shorter one, the values could be found by trying all keys.
const MIN_KEY_BYTES: usize = 16;

/// Reads the secret key of a hash from a file.
///
/// # Errors
///
/// Returns an error if the file cannot be read or has less than 16 bytes.
pub fn read_hash_key(file: &Path) -> io::Result<Vec<u8>> {
    let key = files::read(file, files::MAX_BYTES)?;
    if key.len() < MIN_KEY_BYTES {
        let reason = format!("the key has less than {MIN_KEY_BYTES} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
    }
    Ok(key)
}
