//! [`ValueHash`]: replaces the values of entries by hashes, so that names of counters and the log contain no personal data.

use std::{
    fmt::{self, Write},
    hash::Hasher,
};

use sha2::{Digest, Sha256};
use siphasher::sip128::{Hasher128, SipHasher24};

use super::overrides::Target;

/// The keyed hash of a value: 32 hexadecimal digits of SipHash-2-4 with 128 bits (Aumasson and Bernstein: *SipHash: a fast
/// short-input PRF*, 2012). Its key is the beginning of the SHA-256 of a secret.
#[derive(Clone)]
pub struct ValueHash(SipHasher24);

impl ValueHash {
    /// Creates the hash with a secret key, of at least 16 bytes: with a shorter one, the values could be found by trying all
    /// keys.
    #[must_use]
    pub fn new(secret: &[u8]) -> Self {
        let mut key = [0; 16];
        key.copy_from_slice(&Sha256::digest(secret)[..16]);
        Self(SipHasher24::new_with_key(&key))
    }

    /// Returns the hash of a value.
    #[must_use]
    pub fn of(&self, value: &str) -> String {
        self.hash(&[], value)
    }

    /// Returns the hash of a network of addresses, which differs from the hash of any value.
    pub(super) fn of_network(&self, network: &str) -> String {
        // No text contains this byte.
        self.hash(&[0xFF], network)
    }

    fn hash(&self, prefix: &[u8], text: &str) -> String {
        let mut hasher = self.0;
        hasher.write(prefix);
        hasher.write(text.as_bytes());
        let mut text = String::with_capacity(32);
        // Writing to a string cannot fail.
        let _ = write!(text, "{:032x}", hasher.finish128().as_u128());
        text
    }

    /// Returns the target with hashes instead of the values of entries.
    #[must_use]
    pub fn mask(&self, target: &Target) -> Target {
        match target {
            Target::Limit { domain, entries } => {
                let entries = entries.iter().map(|(key, value)| (key.clone(), self.of(value)));
                Target::Limit { domain: domain.clone(), entries: entries.collect() }
            }
            Target::Plan { domain, key, value } => {
                Target::Plan { domain: domain.clone(), key: key.clone(), value: self.of(value) }
            }
            Target::Switch(_) | Target::Rules(_) => target.clone(),
            Target::Planned { from_seconds, target } => {
                Target::Planned { from_seconds: *from_seconds, target: Box::new(self.mask(target)) }
            }
        }
    }
}

impl fmt::Debug for ValueHash {
    /// Writes the name of the type, without the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ValueHash")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_depend_on_the_secret_and_the_value_and_stay_the_same() {
        let (one, other) = (ValueHash::new(b"a secret of 16 b"), ValueHash::new(b"another of 16 by"));
        // Counters would start again if the hash changed.
        assert_eq!(one.of("bob"), "6ba2874b0346485ae9e0362c8977ba45");
        assert_ne!(one.of("bob"), other.of("bob"));
        assert_ne!(one.of("bob"), one.of("alice"));
        assert_eq!(format!("{one:?}"), "ValueHash");
    }

    #[test]
    fn only_values_of_entities_are_masked() {
        let hash = ValueHash::new(b"a secret of 16 b");
        let bob = hash.of("bob");
        for (target, masked) in [
            ("limit|api|user=bob|path=bob", format!("limit|api|user={bob}|path={bob}")),
            ("plan|bob|bob=bob", format!("plan|bob|bob={bob}")),
            ("switch|domain|bob", "switch|domain|bob".to_owned()),
            ("rules|candidate", "rules|candidate".to_owned()),
        ] {
            assert_eq!(hash.mask(&Target::parse(target).unwrap()).to_string(), masked);
        }
    }
}
