//! [`State`]: the state of one counter, as the bytes that every store keeps.

use std::fmt;

use smallvec::SmallVec;

/// The bytes of a counter's state; a new counter has none. Numbers are unsigned, little-endian and as short as
/// possible.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct State(SmallVec<[u8; State::INLINE]>);

impl State {
    /// Maximum number of bytes that are stored inline, without an allocation.
    pub const INLINE: usize = 20;

    /// Creates a state from the bytes of a store.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Self {
        Self(SmallVec::from_slice(bytes))
    }

    /// Creates a state from bytes on the heap, without a copy.
    #[must_use]
    pub fn from_long(long: Vec<u8>) -> Self {
        Self(SmallVec::from_vec(long))
    }

    /// Returns the bytes as a vector, without a copy if they are on the heap.
    #[must_use]
    pub fn into_long(self) -> Vec<u8> {
        self.0.into_vec()
    }

    /// Returns the bytes that a store keeps.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns whether the state is that of a new counter.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the number in the `N` bytes at `offset`; `None` beyond the end.
    pub(super) fn number<const N: usize>(&self, offset: usize) -> Option<u64> {
        let bytes = self.0.get(offset..)?.first_chunk::<N>()?;
        let mut wide = [0; 8];
        wide[..N].copy_from_slice(bytes);
        Some(u64::from_le_bytes(wide))
    }

    /// Appends the lowest `N` bytes of `number`.
    pub(super) fn push<const N: usize>(&mut self, number: u64) {
        self.append(&number.to_le_bytes()[..N]);
    }

    /// Appends `bytes`.
    pub(super) fn append(&mut self, bytes: &[u8]) {
        if self.0.capacity() < self.0.len() + bytes.len() {
            // The capacity grows by a quarter instead of doubling: there may be a million states.
            self.0.reserve_exact(bytes.len() + self.0.len() / 4);
        }
        self.0.extend_from_slice(bytes);
    }

    /// Replaces all bytes but keeps an allocated buffer.
    pub(super) fn replace(&mut self, bytes: &[u8]) {
        if self.0.spilled() {
            self.clear();
            self.append(bytes);
        } else {
            *self = Self::from_bytes(bytes);
        }
    }

    /// Removes all bytes but keeps an allocated buffer.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Removes `bytes` bytes at the front.
    pub(super) fn cut_front(&mut self, bytes: usize) {
        self.cut(0, bytes);
    }

    /// Removes `bytes` bytes at `offset`.
    pub(super) fn cut(&mut self, offset: usize, bytes: usize) {
        let len = self.0.len();
        self.0.drain(offset.min(len)..offset.saturating_add(bytes).min(len));
    }

    /// Removes `bytes` bytes at the end.
    pub(super) fn cut_back(&mut self, bytes: usize) {
        self.0.truncate(self.0.len().saturating_sub(bytes));
    }
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("State").field(&self.as_bytes()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_has_the_same_bytes_inline_or_on_the_heap() {
        let mut state = State::default();
        let mut expected = Vec::new();
        for number in 0..10_u64 {
            state.push::<7>(number);
            expected.extend_from_slice(&number.to_le_bytes()[..7]);
            assert_eq!(state.as_bytes(), expected);
            assert_eq!(state.number::<7>(7 * number as usize), Some(number));
            assert_eq!(state.number::<7>(7 * number as usize + 1), None);
            assert_eq!(state, State::from_bytes(&expected));
        }
        state.cut_front(14);
        assert_eq!(state.as_bytes(), &expected[14..]);
        state.cut_back(42);
        assert_eq!(state.as_bytes(), &expected[14..28]);
        state.push::<7>(8);
        state.cut(7, 7);
        assert_eq!(state.as_bytes(), [&expected[14..21], &expected[56..63]].concat());
        state.cut(7, 70);
        assert_eq!(state.as_bytes(), &expected[14..21]);
        state.push::<7>(3);
        assert_eq!(state.as_bytes(), &expected[14..28]);
        state.cut_front(7);
        state.push::<4>(9);
        assert_eq!(state.as_bytes(), [&expected[21..28], &[9, 0, 0, 0]].concat());
        state.replace(&expected);
        assert_eq!(state.as_bytes(), expected);
        state.replace(&expected[..3]);
        assert_eq!(state.as_bytes(), &expected[..3]);
        state.clear();
        assert!(state.is_empty());
        state.replace(&expected[..16]);
        assert_eq!(state.as_bytes(), &expected[..16]);
    }

    #[test]
    fn a_growing_state_rarely_reallocates_and_reserves_at_most_a_quarter() {
        let mut state = State::default();
        let mut reallocations = 0;
        for number in 0..1_000 {
            let capacity = state.0.capacity();
            state.push::<7>(number);
            reallocations += usize::from(state.0.capacity() != capacity);
            let len = state.as_bytes().len();
            assert!(state.0.capacity() <= State::INLINE.max(len + len / 4), "{} for {len}", state.0.capacity());
        }
        assert!(reallocations < 50, "{reallocations}");
    }
}
