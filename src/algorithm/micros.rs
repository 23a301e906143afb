//! The one unit of time of every algorithm: whole microseconds, exact in Rust and in Lua's doubles until 2255.

use std::ops::{Add, Rem, Sub};

/// Microseconds: an instant since the Unix epoch, or a span between two. Arithmetic saturates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Micros(u64);

impl Micros {
    /// No time at all.
    pub const ZERO: Self = Self(0);

    /// This many microseconds.
    #[must_use]
    pub const fn new(micros: u64) -> Self {
        Self(micros)
    }

    /// This many whole seconds.
    #[must_use]
    pub const fn from_secs(seconds: u64) -> Self {
        Self(seconds.saturating_mul(1_000_000))
    }

    /// The number of microseconds.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Whole seconds, rounded up: what a caller is told to wait.
    #[must_use]
    pub const fn ceil_secs(self) -> u64 {
        self.0.div_ceil(1_000_000)
    }

    /// Whole seconds, rounded down.
    #[must_use]
    pub const fn floor_secs(self) -> u64 {
        self.0 / 1_000_000
    }

    /// Whole milliseconds, rounded up: what Redis is told to keep.
    #[must_use]
    pub const fn ceil_millis(self) -> u64 {
        self.0.div_ceil(1_000)
    }
}

impl Add for Micros {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl Sub for Micros {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl Rem for Micros {
    type Output = Self;

    /// What is left of a whole number of spans; nothing is left of spans of no length.
    fn rem(self, span: Self) -> Self {
        Self(self.0.checked_rem(span.0).unwrap_or(0))
    }
}
