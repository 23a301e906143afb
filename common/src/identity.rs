//! A number for a descriptor.

use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher13};

/// What distinguishes a descriptor from all others: 128 bits, in which nobody meets another by chance.
pub struct Identity(SipHasher13);

impl Identity {
    /// Of a descriptor without entries yet.
    #[must_use]
    pub fn new(domain: &str) -> Self {
        let mut identity = Self(SipHasher13::new());
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
        self.0.write_u64(number);
    }

    /// The number.
    #[must_use]
    pub fn finish(&self) -> u128 {
        self.0.finish128().as_u128()
    }

    /// Its length goes first: no two lists of texts are one text.
    fn add_text(&mut self, text: &str) {
        self.0.write_u64(text.len() as u64);
        self.0.write(text.as_bytes());
    }
}
