//! What an algorithm remembers of one counter, as the bytes that every store keeps.

use smallvec::SmallVec;

/// The bytes; none is a counter never used. Numbers in them are unsigned, little endian and as short as they can be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State(SmallVec<[u8; State::INLINE]>);

impl State {
    /// A state of so many bytes needs no memory of its own.
    pub const INLINE: usize = 20;

    /// A state that a store kept.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Self {
        Self(SmallVec::from_slice(bytes))
    }

    /// The same without a copy, for the long ones.
    #[must_use]
    pub fn from_vec(bytes: Vec<u8>) -> Self {
        Self(SmallVec::from_vec(bytes))
    }

    /// The long ones without a copy.
    #[must_use]
    pub fn into_vec(self) -> Vec<u8> {
        self.0.into_vec()
    }

    /// What a store keeps.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Nothing is remembered.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The number in the `N` bytes from this place; `None` beyond the end.
    pub(super) fn number<const N: usize>(&self, at: usize) -> Option<u64> {
        let bytes = self.0.get(at..)?.first_chunk::<N>()?;
        let mut wide = [0; 8];
        wide[..N].copy_from_slice(bytes);
        Some(u64::from_le_bytes(wide))
    }

    /// Appends the number's lowest `N` bytes.
    pub(super) fn push<const N: usize>(&mut self, number: u64) {
        self.0.extend_from_slice(&number.to_le_bytes()[..N]);
    }

    /// Bytes set aside for it.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.0.capacity()
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Forgets bytes at the front.
    pub(super) fn cut_front(&mut self, bytes: usize) {
        self.0.drain(..bytes);
    }

    /// Forgets bytes at the end.
    pub(super) fn cut_back(&mut self, bytes: usize) {
        self.0.truncate(self.0.len().saturating_sub(bytes));
    }
}
