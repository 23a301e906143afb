//! How many hits, and how many more a soft limit lets through.

/// A number of hits with the room above it that a soft limit has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaxHits {
    limit: u64,
    ceiling: u64,
}

impl MaxHits {
    /// No quota is larger, room for a soft limit included: what a counter can still tell from more.
    pub const MAX: u64 = 4_999_999_998;

    /// So many hits and none more.
    #[must_use]
    pub const fn hard(limit: u64) -> Self {
        Self::soft(limit, 0)
    }

    /// So many hits, and this percentage more (rounded down), marked as over the soft limit.
    #[must_use]
    pub const fn soft(limit: u64, percent: u32) -> Self {
        let limit = if limit < Self::MAX { limit } else { Self::MAX };
        let ceiling = limit + limit / 100 * percent as u64 + limit % 100 * percent as u64 / 100;
        Self { limit, ceiling: if ceiling < Self::MAX { ceiling } else { Self::MAX } }
    }

    /// The limit that callers are told.
    #[must_use]
    pub const fn limit(self) -> u64 {
        self.limit
    }

    /// The most that passes.
    #[must_use]
    pub const fn ceiling(self) -> u64 {
        self.ceiling
    }

    /// What of the limit is left.
    #[must_use]
    pub const fn remaining(self, used: u64) -> u64 {
        self.limit.saturating_sub(used)
    }
}
