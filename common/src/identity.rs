//! A number for a descriptor.

use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher13};

/// What distinguishes a descriptor from all others: 128 bits, in which nobody meets another by chance.
pub struct Identity {
    hasher: SipHasher13,
    /// What the hasher has not seen yet: short pieces cost it more than they cost to be put together first.
    gathered: [u8; GATHER],
    len: usize,
}

/// More than most descriptors have.
const GATHER: usize = 64;

impl Identity {
    /// Of a descriptor without entries yet.
    #[must_use]
    #[inline]
    pub fn new(domain: &str) -> Self {
        Self::with_hasher(SipHasher13::new(), domain)
    }

    /// The same, which nobody can compute who does not know the secret.
    #[must_use]
    #[inline]
    pub fn keyed(secret: &[u8; 16], domain: &str) -> Self {
        Self::with_hasher(SipHasher13::new_with_key(secret), domain)
    }

    #[inline]
    fn with_hasher(hasher: SipHasher13, domain: &str) -> Self {
        let mut identity = Self { hasher, gathered: [0; GATHER], len: 0 };
        identity.add_text(domain);
        identity
    }

    /// Adds an entry.
    pub fn add(&mut self, key: &str, value: &str) {
        self.add_text(key);
        self.add_text(value);
    }

    /// Adds something else that makes a difference.
    pub fn add_number(&mut self, number: u64) {
        self.add_bytes(&number.to_le_bytes());
    }

    /// The number. Nothing is to be added afterwards.
    #[must_use]
    pub fn finish(&mut self) -> u128 {
        self.hasher.write(&self.gathered[..self.len]);
        self.hasher.finish128().as_u128()
    }

    /// Its length goes first: no two lists of texts are one text.
    fn add_text(&mut self, text: &str) {
        self.add_number(text.len() as u64);
        self.add_bytes(text.as_bytes());
    }

    fn add_bytes(&mut self, bytes: &[u8]) {
        if self.len + bytes.len() > GATHER {
            self.hasher.write(&self.gathered[..self.len]);
            self.len = 0;
        }
        match self.gathered.get_mut(self.len..self.len + bytes.len()) {
            Some(place) => {
                place.copy_from_slice(bytes);
                self.len += bytes.len();
            }
            None => self.hasher.write(bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_it_is_gathered_makes_no_difference() {
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
}
