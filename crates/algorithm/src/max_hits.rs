//! [`MaxHits`]: a limit in hits, with the hits that a soft limit allows in addition. The hits of one request are bounded by
//! [`bound_hits`](super::bound_hits).

/// A limit in hits, and the ceiling up to which a soft limit allows more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaxHits {
    limit: u64,
    ceiling: u64,
}

impl MaxHits {
    /// Largest limit, including the part above a soft limit: the largest number that a counter can distinguish from
    /// more.
    pub const MAX: u64 = 4_999_999_998;

    /// Creates a limit that allows exactly `limit` hits.
    #[must_use]
    pub const fn hard(limit: u64) -> Self {
        Self::soft(limit, 0)
    }

    /// Creates a limit that allows `percent` percent more (rounded down), which are marked as above the soft limit.
    #[must_use]
    pub const fn soft(limit: u64, percent: u32) -> Self {
        let limit = if limit < Self::MAX { limit } else { Self::MAX };
        let ceiling = limit + limit / 100 * percent as u64 + limit % 100 * percent as u64 / 100;
        Self { limit, ceiling: if ceiling < Self::MAX { ceiling } else { Self::MAX } }
    }

    /// Returns a percentage with which [`Self::soft`] makes the same ceiling; `None` if the limit is hard.
    #[must_use]
    pub const fn percent(self) -> Option<u32> {
        let extra = self.ceiling - self.limit;
        if extra == 0 { None } else { Some((extra * 100).div_ceil(self.limit) as u32) }
    }

    /// Returns the limit that is reported to callers.
    #[must_use]
    pub const fn limit(self) -> u64 {
        self.limit
    }

    /// Returns the maximum number of allowed hits.
    #[must_use]
    pub const fn ceiling(self) -> u64 {
        self.ceiling
    }

    /// Returns the hits that remain of the limit.
    #[must_use]
    pub const fn remaining(self, used: u64) -> u64 {
        self.limit.saturating_sub(used)
    }
}
