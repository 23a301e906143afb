//! [`Lease`]: hits that this instance took from one counter in advance and uses without a store call. The module does
//! no I/O, and the time is a parameter.
//!
//! The store counts leased hits when they are taken. All instances together therefore never admit more than the limit.
//!
//! # Transitions
//!
//! - **Acquire** ([`Lease::begin_acquire`], then [`Lease::acquired`] or [`Lease::acquire_failed`]): a store call takes
//!   hits. A lease covers the expected demand, and at most a quarter of the counter's free hits, so that the last hits
//!   of a limit are decided one by one. There is no lease below 32 hits. A call is never repeated: if its answer does
//!   not arrive, the hits that it took stay unused.
//! - **Use** ([`Lease::decide`], [`Lease::take_all`]): a hit takes held hits. Hits can be used until the lease ends
//!   ([`lease_ends`](sluicegate_algorithm::Algorithm::lease_ends)) by the store's clock. That clock is read after the
//!   call was sent, but the lifetime here starts with the call, so a lease ends slightly early here, never late.
//! - **Restore** ([`Lease::restore`]): a denied request returns its hits to the lease.
//! - **Grant** ([`Lease::grant`], then [`Lease::report`], [`Lease::revoke`] or [`Lease::expire_grants`]): a caller gets
//!   a part of the held hits to use without checks, until the lease ends at the latest. Granted hits count as used.
//!   Hits that the caller reports as unused are restored.
//! - **Return** ([`Lease::return_excess`], [`Lease::return_idle`]): unused hits go back to the store, as a rollback of
//!   the take, when demand falls, when the lease ends, and when the process stops.
//! - **Crash**: the hits of an instance that dies are unavailable to others until the lease ends, and in windows until the
//!   counter ends.

use std::{num::NonZeroU32, time::Duration};

use sluicegate_algorithm::{Action, Decision, Micros, Operation, Program, State};
use sluicegate_store::{Counter, Grant, Hit, StepOutcome};
#[cfg(test)]
use sluicegate_testing::model_checker::hash;
use smallvec::SmallVec;

/// Number of measurement intervals whose demand a lease covers.
const LEASE_INTERVALS: u64 = 4;
/// Minimum size of an acquisition in hits. Fewer hits save too few calls.
const MIN_LEASE: u64 = 32;
/// Divisor of the free hits: a lease holds at most a quarter of them.
const MAX_SHARE_DIVISOR: u64 = 4;
/// Minimum number of hits in a grant. Fewer hits save too few checks.
const MIN_GRANT: u64 = 4;
/// Maximum number of active grants of a lease.
const MAX_GRANTS: usize = 64;

/// The lease of one counter, with its grants and its demand.
#[derive(Default)]
pub(crate) struct Lease {
    rate: DemandRate,
    held: Option<HeldHits>,
    /// Whether a store call that takes hits is in progress.
    acquiring: bool,
    last_take: Duration,
    grants: SmallVec<[ActiveGrant; 0]>,
}

/// A grant that its caller has not reported yet.
struct ActiveGrant {
    id: u64,
    hits: u64,
    ends_at: Duration,
    /// Store time at which the hits were taken, and the local time until which they count in the store.
    taken_at: Micros,
    counts_until: Duration,
}

/// The hits that a lease holds.
#[cfg_attr(test, derive(Hash))]
struct HeldHits {
    remaining: u64,
    /// Local time from which the hits must not be used.
    ends_at: Duration,
    /// Local time of the call, store time of the take, and the counter's state afterwards.
    requested_at: Duration,
    taken_at: Micros,
    state: State,
}

/// Result of a finished grant.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct GrantReport {
    pub(crate) used: u64,
    /// Unused hits that still count in the store.
    pub(crate) returned: u64,
    /// Unused hits that the lease no longer holds and that must be returned to the store.
    pub(crate) unused: Option<Return>,
}

/// Hits to return to the store, as a rollback of the take at store time `taken_at`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Return {
    pub(crate) hits: u64,
    pub(crate) taken_at: Micros,
}

impl Lease {
    /// Grants up to `demand` hits to a caller, but no more than half of the held hits, for `max_ttl` at most.
    ///
    /// Returns `None` if fewer than 4 hits can be granted, if the lease has ended, or if there are too many grants.
    pub(crate) fn grant(
        &mut self,
        program: &Program,
        demand: u64,
        id: u64,
        now: Duration,
        max_ttl: Duration,
    ) -> Option<Grant> {
        let held = self.held.as_mut()?;
        let hits = demand.min(held.remaining / 2);
        let ttl = held.ends_at.saturating_sub(now).min(max_ttl);
        if hits < MIN_GRANT || self.grants.len() >= MAX_GRANTS || ttl.is_zero() {
            return None;
        }
        let hits = NonZeroU32::new(u32::try_from(hits).ok()?)?;
        held.remaining -= u64::from(hits.get());
        self.grants.push(ActiveGrant {
            id,
            hits: hits.get().into(),
            ends_at: now + ttl,
            taken_at: held.taken_at,
            counts_until: held.counts_until(program),
        });
        Some(Grant { hits, ttl: Micros::new(u64::try_from(ttl.as_micros()).ok()?), id })
    }

    /// Finishes a grant with `used` hits. Returns `None` if the grant is unknown.
    ///
    /// Unused hits are restored to the lease or returned to the store, unless they no longer count there.
    pub(crate) fn report(&mut self, program: &Program, id: u64, used: u64, now: Duration) -> Option<GrantReport> {
        let ActiveGrant { hits, taken_at, counts_until, .. } = self.remove_grant(id)?;
        let used = used.min(hits);
        let returned = if now < counts_until { hits - used } else { 0 };
        let unused = if returned > 0 { self.restore(program, returned, taken_at) } else { None };
        Some(GrantReport { used, returned, unused })
    }

    fn remove_grant(&mut self, id: u64) -> Option<ActiveGrant> {
        let index = self.grants.iter().position(|grant| grant.id == id)?;
        Some(self.grants.swap_remove(index))
    }

    /// Removes a grant that was not delivered to its caller, and returns its number of hits.
    pub(crate) fn revoke(&mut self, id: u64) -> u64 {
        match self.remove_grant(id) {
            Some(grant) => grant.hits,
            None => 0,
        }
    }

    /// Removes the unreported grants that ended before `before`, and returns their number of hits.
    pub(crate) fn expire_grants(&mut self, before: Duration) -> u64 {
        let mut hits = 0;
        self.grants.retain(|grant| {
            let is_expired = grant.ends_at < before;
            if is_expired {
                hits += grant.hits;
            }
            !is_expired
        });
        hits
    }

    /// Decides a hit from the held hits, and takes it unless it is a peek.
    ///
    /// Also returns the number of hits to acquire now. Returns `None` if the lease has ended or has too few hits.
    pub(crate) fn decide(&mut self, hit: &Hit<&Counter>, now: Duration, interval: Duration) -> Option<(Decision, u64)> {
        let is_take = hit.action == Action::Take;
        if is_take {
            self.rate.record(hit.cost, now, interval);
            self.last_take = now;
        }
        let held = self.held.as_mut().filter(|held| now < held.ends_at && held.remaining >= hit.cost)?;
        if is_take {
            held.remaining -= hit.cost;
        }
        let held_hits = held.remaining;
        let mut decision = held.explain(&hit.counter.program, now);
        let to_acquire = if is_take { self.begin_acquire(decision.remaining) } else { 0 };
        decision.remaining = decision.remaining.saturating_add(held_hits);
        decision.used = decision.used.saturating_sub(held_hits);
        Some((decision, to_acquire))
    }

    /// Takes all held hits, for a hit that costs more, and returns their number.
    pub(crate) fn take_all(&mut self, now: Duration) -> u64 {
        match &mut self.held {
            Some(held) if now < held.ends_at => std::mem::take(&mut held.remaining),
            _ => 0,
        }
    }

    /// Returns the store time at which the held hits were taken, which identifies the lease of a hit.
    pub(crate) fn taken_at(&self) -> Option<Micros> {
        self.held.as_ref().map(|held| held.taken_at)
    }

    /// Adds unused hits to the held ones: hits of a denied request or of a grant, which were taken at store time
    /// `taken_at`.
    ///
    /// Returns the hits for a rollback in the store unless the lease holds hits that end at the same store time.
    pub(crate) fn restore(&mut self, program: &Program, hits: u64, taken_at: Micros) -> Option<Return> {
        match &mut self.held {
            Some(held) if held.end(program, taken_at) == held.end(program, held.taken_at) => {
                held.remaining = held.remaining.saturating_add(hits);
                None
            }
            _ => Some(Return { hits, taken_at }),
        }
    }

    /// Returns the number of hits to acquire, when `remaining` hits are free in the store, or 0 for none.
    ///
    /// If it is not 0, the caller must acquire them and then call [`Self::acquired`] or [`Self::acquire_failed`]. Until
    /// then no other acquisition begins.
    pub(crate) fn begin_acquire(&mut self, remaining: u64) -> u64 {
        let held = self.held_hits();
        // The share includes the free hits here, so repeated acquisitions do not exceed it.
        let target = self.expected_demand().min(remaining.saturating_add(held) / MAX_SHARE_DIVISOR);
        if self.acquiring || held > target / 2 {
            return 0;
        }
        let hits = target - held;
        self.acquiring = hits >= MIN_LEASE;
        if self.acquiring { hits } else { 0 }
    }

    /// Completes an acquisition with the outcome of the store call that was sent at `called_at`.
    ///
    /// Hits of an earlier lease are added if they end at the same store time. Otherwise they are returned for a
    /// rollback if they still count.
    pub(crate) fn acquired(
        &mut self,
        program: &Program,
        hits: u64,
        outcome: StepOutcome,
        called_at: Duration,
    ) -> Option<Return> {
        self.acquiring = false;
        if !outcome.allowed {
            return None;
        }
        let StepOutcome { at: taken_at, state, .. } = outcome;
        let lease_end = program.lease_ends(&state, taken_at);
        let ends_at = called_at + Duration::from_micros((lease_end - taken_at).get());
        let mut held = HeldHits { remaining: hits, ends_at, requested_at: called_at, taken_at, state };
        match self.held.take() {
            Some(old) if old.end(program, old.taken_at) == lease_end => {
                held.remaining += old.remaining;
                held.ends_at = held.ends_at.min(old.ends_at);
                self.held = Some(held);
                None
            }
            old => {
                self.held = Some(held);
                old.and_then(|old| old.into_return(program, called_at))
            }
        }
    }

    /// Completes an acquisition after its store call failed.
    pub(crate) fn acquire_failed(&mut self) {
        self.acquiring = false;
    }

    /// Removes and returns the hits above the expected demand, if the lease holds more than twice the demand plus 32.
    pub(crate) fn return_excess(&mut self, now: Duration, interval: Duration) -> Option<Return> {
        self.rate.record(0, now, interval);
        let demand = self.expected_demand();
        let held = self.held.as_mut().filter(|held| now < held.ends_at && held.remaining > 2 * demand + MIN_LEASE)?;
        let hits = held.remaining - demand;
        held.remaining = demand;
        Some(Return { hits, taken_at: held.taken_at })
    }

    /// Removes and returns the held hits, if the lease has ended or has had no take since `idle_since`.
    pub(crate) fn return_idle(&mut self, program: &Program, now: Duration, idle_since: Duration) -> Option<Return> {
        let held = self.held.as_ref()?;
        if now < held.ends_at && self.last_take >= idle_since {
            return None;
        }
        self.held.take()?.into_return(program, now)
    }

    /// Returns `true` if the lease has no hits, no grants and no call in progress, and has had no take since `since`.
    pub(crate) fn is_idle(&self, since: Duration) -> bool {
        self.held.is_none() && !self.acquiring && self.grants.is_empty() && self.last_take < since
    }

    /// Returns a hash of the lease. `number` replaces the ids of grants.
    #[cfg(test)]
    pub(crate) fn fingerprint(&self, number: impl Fn(u64) -> usize) -> u64 {
        let grant = |grant: &ActiveGrant| {
            let ActiveGrant { id, hits, ends_at, taken_at, counts_until } = *grant;
            (number(id), hits, ends_at, taken_at, counts_until)
        };
        let grants: Vec<_> = self.grants.iter().map(grant).collect();
        hash((&self.rate, &self.held, self.acquiring, self.last_take, grants))
    }

    /// Returns whether a store call that takes hits is in progress.
    #[cfg(test)]
    pub(crate) fn is_acquiring(&self) -> bool {
        self.acquiring
    }

    fn expected_demand(&self) -> u64 {
        self.rate.per_interval().saturating_mul(LEASE_INTERVALS)
    }

    fn held_hits(&self) -> u64 {
        match &self.held {
            Some(held) => held.remaining,
            None => 0,
        }
    }
}

impl HeldHits {
    /// Returns the remaining hits, or `None` if there are none or they no longer count in the store.
    fn into_return(self, program: &Program, now: Duration) -> Option<Return> {
        let still_counts = now < self.counts_until(program);
        (self.remaining > 0 && still_counts).then_some(Return { hits: self.remaining, taken_at: self.taken_at })
    }

    /// Returns the end of the lease of hits that were taken at this store time, by the state of these hits.
    fn end(&self, program: &Program, taken_at: Micros) -> Micros {
        program.lease_ends(&self.state, taken_at)
    }

    /// Returns the local time from which the taken hits no longer count in the store.
    fn counts_until(&self, program: &Program) -> Duration {
        self.requested_at + Duration::from_micros((program.expires(&self.state, self.taken_at) - self.taken_at).get())
    }

    /// Computes the counter's present values with the whole lease counted, without later changes by other instances.
    fn explain(&self, program: &Program, now: Duration) -> Decision {
        program.explain(&self.state, Operation { action: Action::Peek, cost: 0, now: self.store_time(now) }, true)
    }

    /// Returns the latest time that the store's clock can show at local time `now`.
    fn store_time(&self, now: Duration) -> Micros {
        let age = now.saturating_sub(self.requested_at).as_micros();
        self.taken_at + Micros::new(u64::try_from(age).unwrap_or(u64::MAX))
    }
}

/// Hits per interval: the current interval's hits or the exponentially smoothed average of earlier ones, if higher.
#[derive(Default)]
#[cfg_attr(test, derive(Hash))]
struct DemandRate {
    interval: u64,
    hits: u64,
    /// Smoothed hits per interval before this one, in sixteenths.
    average_x16: u64,
}

impl DemandRate {
    fn record(&mut self, hits: u64, now: Duration, interval: Duration) {
        let number = (now.as_micros() / interval.as_micros().max(1)) as u64;
        let elapsed = number.saturating_sub(self.interval);
        if elapsed > 0 {
            self.average_x16 = (self.average_x16 + self.hits.saturating_mul(16)) / 2;
            self.average_x16 =
                self.average_x16.checked_shr(u32::try_from(elapsed - 1).unwrap_or(u32::MAX)).unwrap_or(0);
            self.interval = number;
            self.hits = 0;
        }
        self.hits = self.hits.saturating_add(hits);
    }

    fn per_interval(&self) -> u64 {
        self.hits.max(self.average_x16 / 16)
    }
}

#[cfg(test)]
mod tests;
