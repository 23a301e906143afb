//! [`Hash`]: the identity of a counter within the store.

/// The 88 bits of the hash that identify a counter.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Hash(pub(super) [u8; 11]);

impl Hash {
    pub(super) fn new(hash: u128) -> Self {
        let mut bytes = [0; 11];
        bytes.copy_from_slice(&hash.to_le_bytes()[..11]);
        Self(bytes)
    }

    /// Returns the low 64 bits, which the index uses as the hash of a slot number.
    pub(super) fn low(bytes: [u8; 11]) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = bytes;
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }
}
