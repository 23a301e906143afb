//! [`Limit`]: a random limit of any algorithm, with the numbers from which the models are computed.

use rand::{RngExt, rngs::StdRng};
use sluicegate::algorithm::{
    Algorithm, CLOCK_SLACK, MaxHits, Micros,
    fixed_window::FixedWindow,
    gcra::Gcra,
    leaky_bucket::LeakyBucket,
    sliding_log::SlidingLog,
    sliding_window::{SlidingWindow, WindowEdge},
    token_bucket::TokenBucket,
    warm_up::WarmUp,
};

/// The definition by which the models count hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Model {
    FixedWindow,
    SlidingWindow {
        width: u64,
        buckets: u64,
        is_strict: bool,
    },
    Log,
    /// A bucket that drains `requests` hits per window.
    Bucket,
    /// A bucket whose hits cost up to three times as much when it is cold.
    WarmUp,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit {
    pub(crate) algorithm: Algorithm,
    pub(crate) model: Model,
    /// Length of the window in microseconds.
    pub(crate) window: u64,
    pub(crate) requests: u64,
    /// Number of hits that are allowed, including those above a soft limit.
    pub(crate) ceiling: u64,
    pub(crate) count_denied: bool,
}

impl Limit {
    /// Generates a limit whose window has `seconds`.
    pub(crate) fn random(random: &mut StdRng, seconds: u64) -> Self {
        let (window, micros) = (Micros::from_secs(seconds), seconds * 1_000_000);
        let requests = random.random_range(5..100_u32);
        let soft = if random.random_range(0..4) == 0 { 50 } else { 0 };
        let count_denied = random.random_range(0..3) == 0;
        let limit = MaxHits::soft(requests.into(), soft);
        let burst = random.random_range(1..=requests);
        let burst_hits = MaxHits::soft(burst.into(), soft);
        let sliding = |buckets: u32, edge| {
            let algorithm = SlidingWindow::new(limit, window, buckets, edge, count_denied).unwrap().into();
            let (width, is_strict) = (micros.div_ceil(buckets.into()), edge == WindowEdge::Strict);
            (algorithm, Model::SlidingWindow { width, buckets: buckets.into(), is_strict }, limit)
        };
        let (algorithm, model, hits): (Algorithm, _, _) = match random.random_range(0..9) {
            0 => (FixedWindow::new(limit, window, count_denied).unwrap().into(), Model::FixedWindow, limit),
            1 => sliding(1, WindowEdge::Weighted),
            2 => sliding(6, WindowEdge::Weighted),
            3 => sliding(6, WindowEdge::Strict),
            4 => (SlidingLog::new(limit, window, Micros::ZERO, count_denied).unwrap().into(), Model::Log, limit),
            5 => (
                TokenBucket::new(requests, window, burst_hits, count_denied).unwrap().into(),
                Model::Bucket,
                burst_hits,
            ),
            6 => (Gcra::new(requests, window, burst_hits, count_denied).unwrap().into(), Model::Bucket, burst_hits),
            7 => {
                let queue = MaxHits::soft(u64::from(burst) + 5, soft);
                let leaky = LeakyBucket::new(requests, window, queue, burst.into(), count_denied).unwrap();
                (leaky.into(), Model::Bucket, queue)
            }
            _ => {
                let burst = burst.div_ceil(2);
                let warm_up = WarmUp::new(requests, window, burst, Micros::from_secs(3), count_denied).unwrap();
                (warm_up.into(), Model::WarmUp, MaxHits::hard(burst.into()))
            }
        };
        Self { algorithm, model, window: micros, requests: requests.into(), ceiling: hits.ceiling(), count_denied }
    }

    pub(crate) fn is_bucket(&self) -> bool {
        matches!(self.model, Model::Bucket | Model::WarmUp)
    }

    /// Returns the size of one hit: a bucket is measured in units of which `requests` drain per microsecond.
    pub(crate) fn hit_size(&self) -> u64 {
        if self.is_bucket() { self.window } else { 1 }
    }

    /// Returns the time after which a hit has no effect, whatever other hits there were.
    pub(crate) fn horizon(&self) -> u64 {
        match self.model {
            Model::FixedWindow | Model::Log => self.window,
            Model::SlidingWindow { width, buckets, .. } => width * (buckets + 1),
            Model::Bucket => self.ceiling * self.window / self.requests + CLOCK_SLACK.get(),
            Model::WarmUp => (self.ceiling + 3 * self.ceiling.max(self.requests)) * self.window / self.requests,
        }
    }

    /// Returns the level at which no hit adds to a bucket.
    pub(crate) fn max_level(&self) -> u64 {
        self.horizon() * self.requests
    }
}
