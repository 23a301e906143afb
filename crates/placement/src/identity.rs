//! [`Identity`]: a 128-bit hash that identifies a descriptor.

use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher13};

/// Hasher for the 128-bit identity of a descriptor. Accidental collisions are practically impossible.
pub struct Identity {
    hasher: SipHasher13,
    /// Input not yet hashed. Hashing many short pieces costs more than collecting them first.
    buffer: [u8; BUFFER_BYTES],
    buffered: usize,
}

/// Size of the buffer, larger than most descriptors.
const BUFFER_BYTES: usize = 64;

impl Identity {
    /// Creates the identity of a descriptor without entries.
    #[must_use]
    #[inline]
    pub fn new(domain: &str) -> Self {
        Self::with_hasher(SipHasher13::new(), domain)
    }

    /// Creates an identity that cannot be computed without knowing `secret`.
    #[must_use]
    #[inline]
    pub fn keyed(secret: &[u8; 16], domain: &str) -> Self {
        Self::with_hasher(SipHasher13::new_with_key(secret), domain)
    }

    #[inline]
    fn with_hasher(hasher: SipHasher13, domain: &str) -> Self {
        let mut identity = Self { hasher, buffer: [0; BUFFER_BYTES], buffered: 0 };
        identity.add_text(domain);
        identity
    }

    /// Adds an entry.
    pub fn add(&mut self, key: &str, value: &str) {
        self.add_text(key);
        self.add_text(value);
    }

    /// Adds a number.
    pub fn add_number(&mut self, number: u64) {
        self.add_bytes(&number.to_le_bytes());
    }

    /// Returns the identity. Nothing may be added afterwards.
    #[must_use]
    pub fn finish(&mut self) -> u128 {
        self.hasher.write(&self.buffer[..self.buffered]);
        self.hasher.finish128().as_u128()
    }

    /// Adds the length and the text, so that different lists of texts have different inputs.
    fn add_text(&mut self, text: &str) {
        self.add_number(text.len() as u64);
        self.add_bytes(text.as_bytes());
    }

    fn add_bytes(&mut self, bytes: &[u8]) {
        if self.buffered + bytes.len() > BUFFER_BYTES {
            self.hasher.write(&self.buffer[..self.buffered]);
            self.buffered = 0;
        }
        match self.buffer.get_mut(self.buffered..self.buffered + bytes.len()) {
            Some(target) => {
                target.copy_from_slice(bytes);
                self.buffered += bytes.len();
            }
            None => self.hasher.write(bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffering_does_not_change_the_hash() {
        assert_ne!(Identity::new("domain").finish(), Identity::keyed(&[1; 16], "domain").finish());
        for size in [0, 1, 7, 20, 39, 40, 41, 63, 64, 65, 200] {
            let (key, value) = ("k".repeat(size), "v".repeat(size / 2));
            let mut identity = Identity::new("domain");
            identity.add(&key, &value);
            identity.add_number(7);
            let mut whole = Vec::new();
            for text in ["domain", &key, &value] {
                whole.extend_from_slice(&(text.len() as u64).to_le_bytes());
                whole.extend_from_slice(text.as_bytes());
            }
            whole.extend_from_slice(&7_u64.to_le_bytes());
            assert_eq!(identity.finish(), SipHasher13::new().hash(&whole).as_u128(), "{size}");
        }
    }

    /// The domain and the length of the key fill the buffer exactly.
    #[test]
    fn a_short_text_after_a_full_buffer_is_hashed_in_its_order() {
        let domain = "d".repeat(BUFFER_BYTES - 16);
        let mut identity = Identity::new(&domain);
        identity.add("k", "");
        let lengths = [domain.len() as u64, 1, 0].map(u64::to_le_bytes);
        let whole = [&lengths[0][..], domain.as_bytes(), &lengths[1], b"k", &lengths[2]].concat();
        assert_eq!(identity.finish(), SipHasher13::new().hash(&whole).as_u128());
    }
}
