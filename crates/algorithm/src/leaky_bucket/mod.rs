//! [`LeakyBucket`]: without a queue it polices (hits that overflow are denied), with a queue it shapes traffic.
//!
//! With a queue, up to `queue` hits more than the burst are allowed. Each has a delay after which it may continue, so
//! that the outgoing traffic conforms to the limit's rate. With `burst: 1`, hits leave one by one, `window / requests`
//! apart.

use super::{
    Algorithm, Arguments, CounterProgram, Decision, InvalidLimit, LimitSpec, Limiter, MaxHits, Micros, Operation,
    Program, State, bucket::Bucket, drain_state, leased_bucket::LeasedBucket,
};

/// A leaky bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeakyBucket(Bucket);

impl LeakyBucket {
    /// Creates a bucket from which `requests` leak per window. `immediate` hits of its capacity are not delayed.
    ///
    /// Returns `None` if there are no requests, if the capacity is 0, or if the window or the drain time exceeds
    /// [`super::MAX_PERIOD`].
    #[must_use]
    pub fn new(requests: u32, window: Micros, capacity: MaxHits, immediate: u64, count_denied: bool) -> Option<Self> {
        Bucket::new(requests, window, capacity, immediate, count_denied).map(Self)
    }
}

impl CounterProgram for LeakyBucket {
    const TAG: &'static str = "lb";
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

impl Limiter for LeakyBucket {
    const NAME: &'static str = "leaky_bucket";
    const KEYWORDS: &'static [&'static str] = &["burst", "queue"];

    fn build(spec: &LimitSpec) -> Result<Algorithm, InvalidLimit> {
        let burst = u64::from(spec.short_burst()?);
        let queue = u64::from(spec.queue.unwrap_or_default());
        let capacity = spec.max_hits(burst + queue).short();
        // Without a queue no hit is delayed, not even above a soft limit.
        let immediate = if queue > 0 { burst } else { capacity.ceiling() };
        let limiter = Self::new(spec.short_requests()?, spec.window, capacity, immediate, spec.counts_denied());
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
