//! [`Secret`]: the key of the hash that identifies a counter in memory, where counter names are not stored.

use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher13};

/// A random hash key, so that callers cannot construct two counter names with the same hash.
pub(super) struct Secret([u8; 16]);

impl Secret {
    /// Generates a random secret.
    pub(super) fn new() -> Self {
        Self(rand::random())
    }

    /// Returns the 128-bit keyed SipHash-1-3 of a counter's name.
    pub(super) fn identity(&self, key: &[u8]) -> u128 {
        let mut hasher = SipHasher13::new_with_key(&self.0);
        hasher.write(key);
        hasher.finish128().as_u128()
    }
}
