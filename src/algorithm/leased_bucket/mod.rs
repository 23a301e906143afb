//! Buckets on lease: a token bucket, a leaky bucket or a GCRA of which a part is taken in advance, to be spent until later.
//!
//! A bucket that drained while a lease is out would let more than `burst + rate × t` pass: the hits of the lease come when
//! the room that they had taken is free again. So what is out counts against the burst, and does not drain: it is in
//! escrow. At the lease's end it is poured into the bucket as if all of it had been spent just then; what comes back before
//! is taken out. So at every instant the bucket and the escrow together are at least as full as a bucket would be into
//! which each hit was poured when it was spent, and that one never overflows.
//!
//! Leases end on a grid of time, so that those of all instances make two entries at most: the end follows from the
//! instant at which a lease was taken, and is between one and two steps of the grid away.

mod leased_parts;

pub(super) use leased_parts::LeasedParts;

use super::{
    Algorithm, Arguments, Decision, InvalidLimit, LimitSpec, Limiter, Micros, Operation, State, bucket::Bucket,
    token_bucket::TokenBucket,
};

/// No lease lives longer, of buckets and logs.
pub(super) const MAX_LEASE_LIFETIME: Micros = Micros::from_secs(1);

/// A bucket, seen by those who take in advance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeasedBucket(pub(super) Bucket);

impl Limiter for LeasedBucket {
    const NAME: &'static str = "token_bucket on lease";
    const KEYWORDS: &'static [&'static str] = &["burst"];
    const TAG: &'static str = "esc";
    const SCRIPT: &'static str = Bucket::LEASE_SCRIPT;
    const ARGUMENTS: &'static [&'static str] = Bucket::LEASE_ARGUMENTS;

    fn build(shape: &LimitSpec) -> Result<Algorithm, InvalidLimit> {
        TokenBucket::build(shape)?
            .leasing()
            .ok_or(InvalidLimit { keyword: "burst", reason: "a lease of it would end at once" })
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

    fn lease_ends(&self, counted: Micros) -> Micros {
        self.0.lease_ends(counted)
    }

    fn lease_lifetime(&self) -> Micros {
        self.0.lease_lifetime()
    }

    /// Nothing is on lease that has passed.
    fn expires(&self, state: &State, now: Micros) -> Micros {
        self.0.expires(state, now)
    }
}

#[cfg(test)]
mod tests;
