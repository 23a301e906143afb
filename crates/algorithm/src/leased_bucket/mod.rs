//! [`LeasedBucket`]: a token bucket, leaky bucket or GCRA from which leases are taken, parts that are spent later.
//!
//! If a leased part drained while it is leased, more than `burst + rate × t` could be allowed: its hits arrive after
//! their capacity has become free again. So a leased part counts against the burst and does not drain. At the end of
//! the lease it is poured into the bucket as if all of it had been spent at that moment; hits that are returned before
//! are subtracted from the lease. Compare a second bucket into which each hit is poured when it is spent: this bucket
//! and its leased parts together are always at least as full, so the second bucket never overflows.
//!
//! Leases end on a time grid, so that the leases of all instances need at most two entries. The end follows from the
//! instant at which the lease was taken, and is between one and two steps of the grid later.

use super::{Arguments, CounterProgram, Decision, Micros, Operation, State, bucket::Bucket};

/// A bucket from which leases are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeasedBucket(pub(super) Bucket);

impl CounterProgram for LeasedBucket {
    const TAG: &'static str = "esc";
    const SCRIPT: &'static str = Bucket::LEASE_SCRIPT;
    const ARGUMENTS: &'static [&'static str] = Bucket::LEASE_ARGUMENTS;

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

    fn lease_ends(&self, _state: &State, counted: Micros) -> Micros {
        self.0.lease_ends(counted)
    }

    fn lease_lifetime(&self) -> Micros {
        self.0.lease_lifetime()
    }

    /// Returns the instant at which the bucket will have drained, including its leased parts.
    fn expires(&self, state: &State, now: Micros) -> Micros {
        self.0.expires(state, now)
    }
}

#[cfg(test)]
mod tests;
