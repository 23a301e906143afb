//! [`State`]: the state of one counter, as the bytes that every store keeps.

use std::fmt;

/// The bytes of a counter's state; a new counter has none. Numbers are unsigned, little-endian and as short as
/// possible.
///
/// A short state is stored inline. A `SmallVec` was rejected: with it, `make bench` spent a tenth of a decision on
/// copying a number of bytes that the compiler did not know.
#[derive(Clone, Default)]
pub struct State {
    short: [u8; State::INLINE],
    len: u8,
    /// All bytes of a state that does not fit inline; otherwise empty.
    long: Vec<u8>,
}

impl State {
    /// Maximum number of bytes that are stored inline, without an allocation.
    pub const INLINE: usize = 20;

    /// Creates a state from the bytes of a store.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let mut state = Self::default();
        match state.short.get_mut(..bytes.len()) {
            Some(short) => {
                short.copy_from_slice(bytes);
                state.len = bytes.len() as u8;
            }
            None => state.long = bytes.to_vec(),
        }
        state
    }

    /// Creates a state from the first `len` bytes of `short`.
    #[must_use]
    pub fn from_short(short: [u8; Self::INLINE], len: u8) -> Self {
        Self { short, len: len.min(Self::INLINE as u8), long: Vec::new() }
    }

    /// Creates a state from bytes on the heap, without a copy.
    #[must_use]
    pub fn from_long(long: Vec<u8>) -> Self {
        Self { long, ..Self::default() }
    }

    /// Returns the inline buffer and its length; `None` if the bytes are on the heap.
    #[must_use]
    pub fn as_short(&self) -> Option<([u8; Self::INLINE], u8)> {
        self.long.is_empty().then_some((self.short, self.len))
    }

    /// Returns the bytes of a state on the heap, without a copy; empty for an inline state.
    #[must_use]
    pub fn into_long(self) -> Vec<u8> {
        self.long
    }

    /// Returns the bytes that a store keeps.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        if self.long.is_empty() { &self.short[..self.len.into()] } else { &self.long }
    }

    /// Returns whether the state is that of a new counter.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.as_bytes().is_empty()
    }

    /// Returns the number in the `N` bytes at `offset`; `None` beyond the end.
    pub(super) fn number<const N: usize>(&self, offset: usize) -> Option<u64> {
        let bytes = self.as_bytes().get(offset..)?.first_chunk::<N>()?;
        let mut wide = [0; 8];
        wide[..N].copy_from_slice(bytes);
        Some(u64::from_le_bytes(wide))
    }

    /// Appends the lowest `N` bytes of `number`.
    pub(super) fn push<const N: usize>(&mut self, number: u64) {
        let mut bytes = [0; N];
        bytes.copy_from_slice(&number.to_le_bytes()[..N]);
        self.append(&bytes);
    }

    /// Appends `bytes`.
    #[inline]
    pub(super) fn append(&mut self, bytes: &[u8]) {
        let len = usize::from(self.len);
        match self.short.get_mut(len..len + bytes.len()).filter(|_| self.long.is_empty()) {
            Some(free) => {
                free.copy_from_slice(bytes);
                self.len += bytes.len() as u8;
            }
            None => {
                if self.long.is_empty() {
                    self.long.extend_from_slice(&self.short[..len]);
                }
                if self.long.capacity() < self.long.len() + bytes.len() {
                    // The capacity grows by a quarter instead of doubling: there may be a million states.
                    self.long.reserve_exact(bytes.len() + self.long.len() / 4);
                }
                self.long.extend_from_slice(bytes);
            }
        }
    }

    /// Removes all bytes but keeps an allocated buffer.
    pub(super) fn clear(&mut self) {
        self.len = 0;
        self.long.clear();
    }

    /// Removes `bytes` bytes at the front.
    pub(super) fn cut_front(&mut self, bytes: usize) {
        self.cut(0, bytes);
    }

    /// Removes `bytes` bytes at `offset`.
    pub(super) fn cut(&mut self, offset: usize, bytes: usize) {
        if self.long.is_empty() {
            let len = usize::from(self.len);
            let (start, end) = (offset.min(len), offset.saturating_add(bytes).min(len));
            self.short.copy_within(end..len, start);
            self.len -= (end - start) as u8;
        } else {
            let len = self.long.len();
            self.long.drain(offset.min(len)..offset.saturating_add(bytes).min(len));
            self.shorten();
        }
    }

    /// Removes `bytes` bytes at the end.
    pub(super) fn cut_back(&mut self, bytes: usize) {
        if self.long.is_empty() {
            self.len -= bytes.min(self.len.into()) as u8;
        } else {
            self.long.truncate(self.long.len().saturating_sub(bytes));
            self.shorten();
        }
    }

    /// Moves the bytes inline if they fit.
    fn shorten(&mut self) {
        if let Some(short) = self.short.get_mut(..self.long.len()) {
            short.copy_from_slice(&self.long);
            self.len = self.long.len() as u8;
            self.long.clear();
        }
    }
}

impl PartialEq for State {
    fn eq(&self, other: &Self) -> bool {
        self.as_bytes() == other.as_bytes()
    }
}

impl Eq for State {}

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
        state.clear();
        assert!(state.is_empty());
    }
}
