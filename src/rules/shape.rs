//! How a limit is counted, as a rule words it, and the algorithm that this makes of its numbers.

use super::limit::LimitError;
use crate::algorithm::{
    Algorithm, LONGEST, Micros, Quota,
    fixed_window::FixedWindow,
    gcra::Gcra,
    leaky_bucket::LeakyBucket,
    sliding_log::SlidingLog,
    sliding_window::{Edge, SlidingWindow},
    token_bucket::TokenBucket,
    warm_up::WarmUp,
};

/// The algorithms that a rule can name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    /// See [`FixedWindow`].
    #[default]
    FixedWindow,
    /// See [`SlidingWindow`].
    SlidingWindow,
    /// See [`SlidingLog`].
    SlidingLog,
    /// See [`TokenBucket`], and [`WarmUp`] when there is a `warm_up`.
    TokenBucket,
    /// See [`LeakyBucket`].
    LeakyBucket,
    /// See [`Gcra`].
    Gcra,
}

impl Kind {
    /// Every algorithm.
    pub const ALL: [Self; 6] =
        [Self::FixedWindow, Self::SlidingWindow, Self::SlidingLog, Self::TokenBucket, Self::LeakyBucket, Self::Gcra];

    /// The word in a rule file.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::FixedWindow => "fixed_window",
            Self::SlidingWindow => "sliding_window",
            Self::SlidingLog => "sliding_log",
            Self::TokenBucket => "token_bucket",
            Self::LeakyBucket => "leaky_bucket",
            Self::Gcra => "gcra",
        }
    }
}

/// The words that belong to some algorithms only, and to which. `count_denied` and `soft` belong to all.
pub(super) const BELONGS: [(&str, &[Kind]); 6] = [
    ("buckets", &[Kind::SlidingWindow]),
    ("edge", &[Kind::SlidingWindow]),
    ("burst", &[Kind::TokenBucket, Kind::LeakyBucket, Kind::Gcra]),
    ("queue", &[Kind::LeakyBucket]),
    ("warm_up", &[Kind::TokenBucket]),
    ("min_interval", &[Kind::SlidingLog]),
];

/// What a rule says of its counting; what it does not say has the algorithm's default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// How to count.
    pub kind: Kind,
    /// Counters per window; 1.
    pub buckets: Option<u32>,
    /// How the oldest of them counts; weighted.
    pub edge: Option<Edge>,
    /// Hits at once; the requests per unit, and 1 with a warm-up.
    pub burst: Option<u32>,
    /// Hits that may wait; none.
    pub queue: Option<u32>,
    /// From cold to warm; no warm-up.
    pub warm_up: Option<Micros>,
    /// Denied hits count too; true for fixed windows, false elsewhere.
    pub count_denied: Option<bool>,
    /// Between two passes at least; nothing.
    pub min_interval: Option<Micros>,
    /// Percent that the limit lets through above itself; none.
    pub soft: Option<u32>,
}

impl Shape {
    /// The algorithm of so many requests per window.
    pub(super) fn algorithm(&self, requests: u32, window: Micros) -> Result<Algorithm, LimitError> {
        let percent = self.soft.unwrap_or_default();
        let quota = |hits: u64| Quota::soft(hits, percent);
        let count_denied = self.count_denied.unwrap_or(self.kind == Kind::FixedWindow);
        if self.kind == Kind::FixedWindow || requests == 0 {
            // A limit of nothing refuses everything, however it counts.
            let window = FixedWindow::new(quota(requests.into()), window, count_denied);
            return Ok(window.ok_or(LimitError::NoLength)?.into());
        }
        let burst = self.burst.unwrap_or(requests);
        if burst == 0 {
            return Err(LimitError::NoBurst);
        }
        match self.kind {
            Kind::FixedWindow | Kind::SlidingWindow => {
                let buckets = self.buckets.unwrap_or(1);
                if !(1..=SlidingWindow::MOST_BUCKETS).contains(&buckets) {
                    return Err(LimitError::Buckets);
                }
                let edge = self.edge.unwrap_or_default();
                let rule = SlidingWindow::new(quota(requests.into()), window, buckets, edge, count_denied);
                Ok(rule.ok_or(LimitError::LongWindow)?.into())
            }
            Kind::SlidingLog => {
                let interval = self.min_interval.unwrap_or_default();
                if interval > window {
                    return Err(LimitError::LongInterval);
                }
                let quota = quota(requests.into());
                if quota.ceiling() > SlidingLog::MOST {
                    return Err(LimitError::LargeLog);
                }
                let rule = SlidingLog::new(quota, window, interval, count_denied);
                Ok(rule.ok_or(LimitError::LongWindow)?.into())
            }
            Kind::TokenBucket => match self.warm_up {
                Some(period) if period == Micros::ZERO || period > WarmUp::LONGEST_PERIOD => {
                    Err(LimitError::WarmUpPeriod)
                }
                Some(_) if percent > 0 => Err(LimitError::SoftWarmUp),
                Some(period) => {
                    let rule = WarmUp::new(requests, window, self.burst.unwrap_or(1), period, count_denied);
                    Ok(rule.ok_or(LimitError::SlowBurst)?.into())
                }
                None => {
                    let rule = TokenBucket::new(requests, window, quota(burst.into()), count_denied);
                    Ok(rule.ok_or(LimitError::SlowBurst)?.into())
                }
            },
            Kind::LeakyBucket => {
                let queue = self.queue.unwrap_or_default();
                let room = quota(u64::from(burst) + u64::from(queue));
                let at_once = if queue > 0 { burst.into() } else { room.ceiling() };
                let rule = LeakyBucket::new(requests, window, room, at_once, count_denied);
                Ok(rule.ok_or(LimitError::SlowBurst)?.into())
            }
            Kind::Gcra => {
                let rule = Gcra::new(requests, window, quota(burst.into()), count_denied);
                Ok(rule.ok_or(LimitError::SlowBurst)?.into())
            }
        }
    }

    /// Whether the part of a refused request that was below the limit counts as within it, as the peer has it.
    #[must_use]
    pub fn splits_refused(&self) -> bool {
        self.kind == Kind::FixedWindow && self.count_denied != Some(false)
    }

    /// How much passes at once, and in how much time that comes back: a policy's `q` and `w`.
    pub(super) fn policy(&self, requests: u32, window: Micros) -> (u64, Micros) {
        let bursts = matches!(self.kind, Kind::TokenBucket | Kind::LeakyBucket | Kind::Gcra) && requests > 0;
        let Some(burst) = self.burst.filter(|_| bursts) else {
            return (requests.into(), window);
        };
        let micros = u128::from(window.get()) * u128::from(burst) / u128::from(requests);
        let window = Micros::new(u64::try_from(micros).unwrap_or(u64::MAX)).min(LONGEST);
        (burst.into(), window)
    }
}
