//! What a counter is found by where its name is not kept.

use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher13};

/// Drawn when it is made: nobody else can make two names meet on purpose.
pub(super) struct Secret([u8; 16]);

impl Secret {
    pub(super) fn new() -> Self {
        Self(rand::random())
    }

    pub(super) fn identity(&self, key: &[u8]) -> u128 {
        let mut hasher = SipHasher13::new_with_key(&self.0);
        hasher.write(key);
        hasher.finish128().as_u128()
    }
}
