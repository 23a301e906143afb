//! [`LargeBucket`]: a token bucket whose limit or burst exceeds 32 bits, such as a budget in millionths of a currency.
//!
//! It decides as a [`TokenBucket`](super::token_bucket::TokenBucket). Its rate can divide a microsecond into more than
//! 2³² parts, so the fraction in its state has seven bytes instead of four, 19 in all. Leases do not support it.

use super::{
    Algorithm, Arguments, CounterProgram, Decision, InvalidLimit, LimitSpec, Limiter, MaxHits, Micros, Operation,
    State, bucket::Bucket, drain_state,
};

/// A token bucket of any size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LargeBucket(Bucket);

impl LargeBucket {
    /// Creates a bucket that allows `requests` per window in the long run, with bursts of `burst` hits.
    ///
    /// Returns `None` if either is 0, if there are more requests than [`super::MAX_NUMBER`], or if the window or the time to
    /// restore a burst exceeds [`super::MAX_PERIOD`].
    #[must_use]
    pub fn new(requests: u64, window: Micros, burst: MaxHits, count_denied: bool) -> Option<Self> {
        Bucket::large(requests, window, burst, count_denied).map(Self)
    }

    /// Returns whether a limit is too large for other buckets.
    pub(super) fn is_required(spec: &LimitSpec) -> bool {
        let max = u64::from(u32::MAX);
        spec.requests > max || spec.burst.is_some_and(|burst| burst > max)
    }
}

impl CounterProgram for LargeBucket {
    const TAG: &'static str = "tbl";
    const SCRIPT: &'static str = Bucket::LONG_SCRIPT;
    const ARGUMENTS: &'static [&'static str] = Bucket::ARGUMENTS;

    fn arguments(&self, operation: Operation) -> Arguments {
        self.0.arguments(operation)
    }

    fn step(&self, state: &mut State, operation: Operation) -> bool {
        self.0.step(state, operation)
    }

    fn explain(&self, state: &State, operation: Operation, allowed: bool) -> Decision {
        self.0.explain(state, operation, allowed)
    }

    fn counts_denied(&self) -> bool {
        self.0.counts_denied()
    }

    fn expires(&self, state: &State, now: Micros) -> Micros {
        self.0.expires(state, now)
    }
}

impl Limiter for LargeBucket {
    const NAME: &'static str = "token_bucket with a large limit";
    const KEYWORDS: &'static [&'static str] = &["burst"];

    fn build(spec: &LimitSpec) -> Result<Algorithm, InvalidLimit> {
        let burst = spec.max_hits(spec.burst()?);
        let limiter = Self::new(spec.requests, spec.window, burst, spec.counts_denied());
        Ok(limiter.ok_or(InvalidLimit::BURST)?.into())
    }

    fn spec(&self) -> Option<LimitSpec> {
        self.0.spec()
    }

    fn recording(&self) -> Algorithm {
        Self(self.0.recording()).into()
    }

    fn is_ahead(&self, state: &State, now: Micros) -> bool {
        drain_state::is_ahead(state, now)
    }
}

#[cfg(test)]
mod tests;
