//! [`TokenBucket`]: tokens arrive at the limit's rate up to `burst`, and every hit takes one.
//!
//! The state does not count tokens. It is the instant at which the bucket will be full again: 16 bytes (`drain_state`), and
//! leased parts (`bucket`).

use super::{
    Algorithm, Arguments, CounterProgram, Decision, InvalidLimit, LimitSpec, Limiter, MaxHits, Micros, Operation,
    Program, State, bucket::Bucket, debt_bucket::DebtBucket, drain_state, large_bucket::LargeBucket,
    leased_bucket::LeasedBucket, warm_up::WarmUp,
};

/// A token bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenBucket(Bucket);

impl TokenBucket {
    /// Creates a bucket that allows `requests` per window in the long run, with bursts of `burst` hits.
    ///
    /// Returns `None` if either is 0, or if the window or the time to restore a burst exceeds [`super::MAX_PERIOD`].
    #[must_use]
    pub fn new(requests: u32, window: Micros, burst: MaxHits, count_denied: bool) -> Option<Self> {
        let burst = burst.short();
        Bucket::new(requests, window, burst, burst.ceiling(), count_denied).map(Self)
    }
}

impl CounterProgram for TokenBucket {
    const TAG: &'static str = "tb";
    const SCRIPT: &'static str = Bucket::SCRIPT;
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

impl Limiter for TokenBucket {
    const NAME: &'static str = "token_bucket";
    const KEYWORDS: &'static [&'static str] = &["burst", "warm_up", "debt"];

    fn build(spec: &LimitSpec) -> Result<Algorithm, InvalidLimit> {
        if spec.debt.is_some() {
            return DebtBucket::build(spec);
        }
        if spec.warm_up.is_some() {
            return WarmUp::build(spec);
        }
        if LargeBucket::is_required(spec) {
            return LargeBucket::build(spec);
        }
        let burst = spec.max_hits(spec.short_burst()?.into());
        let limiter = Self::new(spec.short_requests()?, spec.window, burst, spec.counts_denied());
        Ok(limiter.ok_or(InvalidLimit::BURST)?.into())
    }

    fn spec(&self) -> Option<LimitSpec> {
        self.0.spec()
    }

    fn leasing(&self) -> Option<Program> {
        self.0.leasing().map(|bucket| LeasedBucket(bucket).into())
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
