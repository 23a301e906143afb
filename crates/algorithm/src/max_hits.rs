//! [`MaxHits`]: a limit in hits, with the hits that a soft limit allows in addition. The hits of one request are bounded by
//! [`bound_hits`](super::bound_hits).

use super::MAX_NUMBER;

/// A limit in hits, and the ceiling up to which a soft limit allows more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaxHits {
    limit: u64,
    ceiling: u64,
}

impl MaxHits {
    /// Largest limit, including the part above a soft limit.
    pub const MAX: u64 = MAX_NUMBER;
    /// Largest limit of algorithms whose states have short counts or fractions, including the part above a soft limit.
    pub const MAX_SHORT: u64 = 4_999_999_998;

    /// Creates a limit that allows exactly `limit` hits.
    #[must_use]
    pub const fn hard(limit: u64) -> Self {
        Self::soft(limit, 0)
    }

    /// Creates a limit that allows `percent` percent more hits (rounded down), which are marked as above the soft
    /// limit.
    #[must_use]
    pub const fn soft(limit: u64, percent: u32) -> Self {
        let limit = if limit < Self::MAX { limit } else { Self::MAX };
        let percent = percent as u64;
        let extra = (limit / 100).saturating_mul(percent).saturating_add(limit % 100 * percent / 100);
        let ceiling = limit.saturating_add(extra);
        Self { limit, ceiling: if ceiling < Self::MAX { ceiling } else { Self::MAX } }
    }

    /// Returns the same limit if an algorithm with short counts can hold it, or else the largest one that it can hold.
    #[must_use]
    pub(super) fn short(self) -> Self {
        self.at_most(Self::MAX_SHORT)
    }

    /// Returns the same limit with both numbers reduced to `max`, if they are larger.
    #[must_use]
    pub(super) fn at_most(self, max: u64) -> Self {
        Self { limit: self.limit.min(max), ceiling: self.ceiling.min(max) }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_soft_part_is_exact_up_to_the_largest_number() {
        for (limit, percent, expected) in [
            (10, 25, 12),
            (4_999_999_998, 1, 5_049_999_997),
            (8_000_000_000_000_000, 10, 8_800_000_000_000_000),
            (8_000_000_000_000_000, 20, MAX_NUMBER),
            (MAX_NUMBER, u32::MAX, MAX_NUMBER),
            (u64::MAX, 0, MAX_NUMBER),
        ] {
            let max_hits = MaxHits::soft(limit, percent);
            assert_eq!(
                (max_hits.limit(), max_hits.ceiling()),
                (limit.min(MAX_NUMBER), expected),
                "{limit} + {percent}%"
            );
            let same = MaxHits::soft(limit, max_hits.percent().unwrap_or_default());
            assert_eq!(same, max_hits);
        }
    }
}
