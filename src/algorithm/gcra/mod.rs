//! GCRA, the generic cell rate algorithm of ITU-T I.371: a token bucket by another name, kept as one instant.
//!
//! `burst` is the most that passes at once, as governor and throttlecrab count it; redis-cell's `max_burst` is one less.

use super::{
    Algorithm, Arguments, Decision, InvalidLimit, LimitSpec, Limiter, MaxHits, Micros, Operation, State,
    bucket::Bucket, leased_bucket::LeasedBucket,
};

/// Cells that conform.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gcra(Bucket);

impl Gcra {
    /// `requests` per window in the long run, and `burst` at once. `None` when either is 0 or a window, or the time to
    /// regain a burst, is longer than [`super::LONGEST`].
    #[must_use]
    pub fn new(requests: u32, window: Micros, burst: MaxHits, count_denied: bool) -> Option<Self> {
        Bucket::new(requests, window, burst, burst.ceiling(), count_denied).map(Self)
    }
}

impl Limiter for Gcra {
    const NAME: &'static str = "gcra";
    const KEYWORDS: &'static [&'static str] = &["burst"];
    const TAG: &'static str = "gcra";
    const SCRIPT: &'static str = Bucket::SCRIPT;
    const ARGUMENTS: &'static [&'static str] = Bucket::ARGUMENTS;

    fn build(shape: &LimitSpec) -> Result<Algorithm, InvalidLimit> {
        let rule =
            Self::new(shape.requests, shape.window, shape.max_hits(shape.burst()?.into()), shape.counts_denied());
        Ok(rule.ok_or(InvalidLimit::BURST)?.into())
    }

    fn arguments(&self, ask: Operation) -> Arguments {
        self.0.arguments(ask)
    }

    fn step(&self, state: &mut State, ask: Operation) -> bool {
        self.0.step(state, ask)
    }

    fn explain(&self, state: &State, ask: Operation, allowed: bool) -> Decision {
        self.0.explain(state, ask, allowed)
    }

    fn counts_denied(&self) -> bool {
        self.0.counts_denied()
    }

    fn leasing(&self) -> Option<Algorithm> {
        self.0.leasing().map(|bucket| LeasedBucket(bucket).into())
    }

    fn counting(&self) -> Algorithm {
        Self(self.0.counting()).into()
    }

    fn expires(&self, state: &State, now: Micros) -> Micros {
        self.0.expires(state, now)
    }
}

#[cfg(test)]
mod tests;
