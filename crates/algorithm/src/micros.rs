//! [`Micros`]: the unit of time of every algorithm, exact in Rust and in Lua's doubles until 2255.

use std::{
    ops::{Add, Rem, Sub},
    time::Duration,
};

/// Whole microseconds: an instant since the Unix epoch, or a duration. Arithmetic saturates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Micros(u64);

impl Micros {
    /// Duration of zero.
    pub const ZERO: Self = Self(0);

    /// Creates a value from microseconds.
    #[must_use]
    pub const fn new(micros: u64) -> Self {
        Self(micros)
    }

    /// Creates a value from whole seconds.
    #[must_use]
    pub const fn from_secs(seconds: u64) -> Self {
        Self(seconds.saturating_mul(1_000_000))
    }

    /// Returns the number of microseconds.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Returns the duration.
    #[must_use]
    pub const fn duration(self) -> Duration {
        Duration::from_micros(self.0)
    }

    /// Returns whole seconds, rounded up, as reported to callers that must wait.
    #[must_use]
    pub const fn ceil_secs(self) -> u64 {
        self.0.div_ceil(1_000_000)
    }

    /// Returns whole seconds, rounded down.
    #[must_use]
    pub const fn floor_secs(self) -> u64 {
        self.0 / 1_000_000
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

    /// Returns the remainder of a division by `span`; zero if `span` is zero.
    fn rem(self, span: Self) -> Self {
        Self(self.0.checked_rem(span.0).unwrap_or(0))
    }
}
