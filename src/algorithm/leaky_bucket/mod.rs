//! Leaky bucket: as a meter it polices (what overflows is refused), with a queue it shapes.
//!
//! With a queue, up to `queue` hits more than the burst pass, each with the delay after which it may go on, so that
//! what leaves conforms to the limit's pace. With `burst: 1` hits leave one by one, `window / requests` apart.

use super::{
    Algorithm, Arguments, Decision, InvalidLimit, LimitSpec, Limiter, MaxHits, Micros, Operation, State,
    bucket::Bucket, leased_bucket::LeasedBucket,
};

/// A bucket that leaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeakyBucket(Bucket);

impl LeakyBucket {
    /// `requests` leak per window; of the `room`, `at_once` hits go on without waiting and the rest is told to wait.
    /// `None` when there are no requests or no room, or a window, or the time to drain, is longer than
    /// [`super::LONGEST`].
    #[must_use]
    pub fn new(requests: u32, window: Micros, room: MaxHits, at_once: u64, count_denied: bool) -> Option<Self> {
        Bucket::new(requests, window, room, at_once, count_denied).map(Self)
    }
}

impl Limiter for LeakyBucket {
    const NAME: &'static str = "leaky_bucket";
    const KEYWORDS: &'static [&'static str] = &["burst", "queue"];
    const TAG: &'static str = "lb";
    const SCRIPT: &'static str = Bucket::SCRIPT;
    const ARGUMENTS: &'static [&'static str] = Bucket::ARGUMENTS;

    fn build(shape: &LimitSpec) -> Result<Algorithm, InvalidLimit> {
        let (burst, queue) = (u64::from(shape.burst()?), u64::from(shape.queue.unwrap_or_default()));
        let room = shape.max_hits(burst + queue);
        // Without a queue nobody waits, not even above a soft limit.
        let at_once = if queue > 0 { burst } else { room.ceiling() };
        let rule = Self::new(shape.requests, shape.window, room, at_once, shape.counts_denied());
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
