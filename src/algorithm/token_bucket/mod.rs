//! Token bucket: tokens come at the limit's pace up to `burst`, and every hit takes one.
//!
//! Tokens are not counted; what is missing of a full bucket is, as the time until it is full again (`bucket.rs`).

use super::{
    Algorithm, Arguments, Decision, InvalidLimit, LimitSpec, Limiter, MaxHits, Micros, Operation, State,
    bucket::Bucket, leased_bucket::LeasedBucket, warm_up::WarmUp,
};

/// A bucket of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenBucket(Bucket);

impl TokenBucket {
    /// `requests` per window in the long run, and `burst` at once. `None` when either is 0 or a window, or the time to
    /// regain a burst, is longer than [`super::LONGEST`].
    #[must_use]
    pub fn new(requests: u32, window: Micros, burst: MaxHits, count_denied: bool) -> Option<Self> {
        Bucket::new(requests, window, burst, burst.ceiling(), count_denied).map(Self)
    }
}

impl Limiter for TokenBucket {
    const NAME: &'static str = "token_bucket";
    const KEYWORDS: &'static [&'static str] = &["burst", "warm_up"];
    const TAG: &'static str = "tb";
    const SCRIPT: &'static str = Bucket::SCRIPT;
    const ARGUMENTS: &'static [&'static str] = Bucket::ARGUMENTS;

    fn build(shape: &LimitSpec) -> Result<Algorithm, InvalidLimit> {
        if shape.warm_up.is_some() {
            return WarmUp::build(shape);
        }
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
