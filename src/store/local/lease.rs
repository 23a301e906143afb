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
//!   ([`Algorithm::lease_ends`]) by the store's clock. That clock is read after the call was sent, but the lifetime
//!   here starts with the call, so a lease ends slightly early here, never late.
//! - **Restore** ([`Lease::restore`]): a denied request returns its hits to the lease.
//! - **Grant** ([`Lease::grant`], then [`Lease::report`], [`Lease::revoke`] or [`Lease::expire_grants`]): a caller gets
//!   a part of the held hits to use without checks, until the lease ends at the latest. Granted hits count as used.
//!   Hits that the caller reports as unused are restored.
//! - **Return** ([`Lease::return_excess`], [`Lease::return_idle`]): unused hits go back to the store, as a rollback of
//!   the take, when demand falls, when the lease ends, and when the process ends.

use std::{num::NonZeroU32, time::Duration};

use smallvec::SmallVec;

use crate::{
    algorithm::{Action, Algorithm, Decision, Micros, Operation, State},
    store::{Grant, Hit, StepOutcome},
};

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
pub(super) struct Lease {
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
pub(super) struct GrantReport {
    pub(super) used: u64,
    /// Unused hits that still count in the store.
    pub(super) returned: u64,
    /// Unused hits that the lease no longer holds and that must be returned to the store.
    pub(super) unused: Option<Return>,
}

/// Hits to return to the store, as a rollback of the take at store time `taken_at`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Return {
    pub(super) hits: u64,
    pub(super) taken_at: Micros,
}

impl Lease {
    /// Grants up to `demand` hits to a caller, but no more than half of the held hits, for `max_ttl` at most.
    ///
    /// Returns `None` if fewer than 4 hits can be granted, if the lease has ended, or if there are too many grants.
    pub(super) fn grant(
        &mut self,
        algorithm: &Algorithm,
        demand: u64,
        id: u64,
        now: Duration,
        max_ttl: Duration,
    ) -> Option<Grant> {
        let held = self.held.as_mut()?;
        let hits = demand.min(held.remaining / 2);
        let ttl = held.ends_at.saturating_sub(now).min(max_ttl);
        let is_possible = hits >= MIN_GRANT && self.grants.len() < MAX_GRANTS && !ttl.is_zero();
        let hits = NonZeroU32::new(u32::try_from(hits).ok()?).filter(|_| is_possible)?;
        held.remaining -= u64::from(hits.get());
        let (taken_at, counts_until) = (held.taken_at, held.counts_until(algorithm));
        self.grants.push(ActiveGrant { id, hits: hits.get().into(), ends_at: now + ttl, taken_at, counts_until });
        Some(Grant { hits, ttl: Micros::new(u64::try_from(ttl.as_micros()).ok()?), id })
    }

    /// Finishes a grant with `used` hits. Returns `None` if the grant is unknown.
    ///
    /// Unused hits are restored to the lease or returned to the store, unless they no longer count there.
    pub(super) fn report(&mut self, algorithm: &Algorithm, id: u64, used: u64, now: Duration) -> Option<GrantReport> {
        let ActiveGrant { hits, taken_at, counts_until, .. } = self.remove_grant(id)?;
        let used = used.min(hits);
        let returned = if now < counts_until { hits - used } else { 0 };
        let unused = if returned > 0 { self.restore(algorithm, returned, taken_at) } else { None };
        Some(GrantReport { used, returned, unused })
    }

    fn remove_grant(&mut self, id: u64) -> Option<ActiveGrant> {
        let index = self.grants.iter().position(|grant| grant.id == id)?;
        Some(self.grants.swap_remove(index))
    }

    /// Removes a grant that was not delivered to its caller, and returns its number of hits.
    pub(super) fn revoke(&mut self, id: u64) -> u64 {
        self.remove_grant(id).map_or(0, |grant| grant.hits)
    }

    /// Removes the unreported grants that ended before `before`, and returns their number of hits.
    pub(super) fn expire_grants(&mut self, before: Duration) -> u64 {
        let mut hits = 0;
        self.grants.retain(|grant| {
            let is_expired = grant.ends_at < before;
            hits += if is_expired { grant.hits } else { 0 };
            !is_expired
        });
        hits
    }

    /// Decides a hit from the held hits, and takes it unless it is a peek.
    ///
    /// Also returns the number of hits to acquire now. Returns `None` if the lease has ended or has too few hits.
    pub(super) fn decide(&mut self, hit: &Hit<'_>, now: Duration, interval: Duration) -> Option<(Decision, u64)> {
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
        let mut decision = held.explain(hit.algorithm, now);
        let to_acquire = if is_take { self.begin_acquire(decision.remaining) } else { 0 };
        decision.remaining = decision.remaining.saturating_add(held_hits);
        decision.used = decision.used.saturating_sub(held_hits);
        Some((decision, to_acquire))
    }

    /// Takes all held hits, for a hit that costs more, and returns their number.
    pub(super) fn take_all(&mut self, now: Duration) -> u64 {
        self.held.as_mut().filter(|held| now < held.ends_at).map_or(0, |held| std::mem::take(&mut held.remaining))
    }

    /// Returns the store time at which the held hits were taken, which identifies the lease of a hit.
    pub(super) fn taken_at(&self) -> Option<Micros> {
        self.held.as_ref().map(|held| held.taken_at)
    }

    /// Returns hits that were taken at store time `taken_at` to the lease, because their request was denied.
    ///
    /// Returns the hits for a rollback in the store if the lease holds no hits of the same window or grid step.
    pub(super) fn restore(&mut self, algorithm: &Algorithm, hits: u64, taken_at: Micros) -> Option<Return> {
        let ends_at = algorithm.lease_ends(taken_at);
        match self.held.as_mut().filter(|held| algorithm.lease_ends(held.taken_at) == ends_at) {
            Some(held) => {
                held.remaining = held.remaining.saturating_add(hits);
                None
            }
            None => Some(Return { hits, taken_at }),
        }
    }

    /// Returns the number of hits to acquire, when `remaining` hits are free in the store, or 0 for none.
    ///
    /// Otherwise the caller must call [`Self::acquired`] or [`Self::acquire_failed`] afterwards. Until then no other
    /// acquisition begins.
    pub(super) fn begin_acquire(&mut self, remaining: u64) -> u64 {
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
    /// Hits of an earlier lease are added if they were taken in the same window or grid step. Otherwise they are
    /// returned for a rollback.
    pub(super) fn acquired(
        &mut self,
        algorithm: &Algorithm,
        hits: u64,
        outcome: StepOutcome,
        called_at: Duration,
    ) -> Option<Return> {
        self.acquiring = false;
        if !outcome.allowed {
            return None;
        }
        let StepOutcome { at: taken_at, state, .. } = outcome;
        let lease_end = algorithm.lease_ends(taken_at);
        let ends_at = called_at + Duration::from_micros((lease_end - taken_at).get());
        let mut held = HeldHits { remaining: hits, ends_at, requested_at: called_at, taken_at, state };
        match self.held.take() {
            Some(old) if algorithm.lease_ends(old.taken_at) == lease_end => {
                held.remaining += old.remaining;
                held.ends_at = held.ends_at.min(old.ends_at);
                self.held = Some(held);
                None
            }
            old => {
                self.held = Some(held);
                old.and_then(|old| old.into_return(algorithm, called_at))
            }
        }
    }

    /// Completes an acquisition after its store call failed.
    pub(super) fn acquire_failed(&mut self) {
        self.acquiring = false;
    }

    /// Removes and returns the hits above the expected demand, if the lease holds more than twice the demand plus 32.
    pub(super) fn return_excess(&mut self, now: Duration, interval: Duration) -> Option<Return> {
        self.rate.record(0, now, interval);
        let demand = self.expected_demand();
        let held = self.held.as_mut().filter(|held| now < held.ends_at && held.remaining > 2 * demand + MIN_LEASE)?;
        let hits = held.remaining - demand;
        held.remaining = demand;
        Some(Return { hits, taken_at: held.taken_at })
    }

    /// Removes and returns the held hits, if the lease has ended or has had no take since `idle_since`.
    pub(super) fn return_idle(&mut self, algorithm: &Algorithm, now: Duration, idle_since: Duration) -> Option<Return> {
        let is_due = self.held.as_ref().is_some_and(|held| now >= held.ends_at || self.last_take < idle_since);
        self.held.take_if(|_| is_due)?.into_return(algorithm, now)
    }

    /// Returns `true` if the lease has no hits, no grants and no call in progress, and has had no take since `since`.
    pub(super) fn is_idle(&self, since: Duration) -> bool {
        self.held.is_none() && !self.acquiring && self.grants.is_empty() && self.last_take < since
    }

    fn expected_demand(&self) -> u64 {
        self.rate.per_interval().saturating_mul(LEASE_INTERVALS)
    }

    fn held_hits(&self) -> u64 {
        self.held.as_ref().map_or(0, |held| held.remaining)
    }
}

impl HeldHits {
    /// Returns the remaining hits, or `None` if there are none or they no longer count in the store.
    fn into_return(self, algorithm: &Algorithm, now: Duration) -> Option<Return> {
        let still_counts = now < self.counts_until(algorithm);
        (self.remaining > 0 && still_counts).then_some(Return { hits: self.remaining, taken_at: self.taken_at })
    }

    /// Returns the local time from which the taken hits no longer count in the store.
    fn counts_until(&self, algorithm: &Algorithm) -> Duration {
        self.requested_at + Duration::from_micros((algorithm.expires(&self.state, self.taken_at) - self.taken_at).get())
    }

    /// Computes the counter's present values with the whole lease counted, without later changes by other instances.
    fn explain(&self, algorithm: &Algorithm, now: Duration) -> Decision {
        algorithm.explain(&self.state, Operation { action: Action::Peek, cost: 0, now: self.store_time(now) }, true)
    }

    /// Returns the latest time that the store's clock can show.
    fn store_time(&self, now: Duration) -> Micros {
        let age = now.saturating_sub(self.requested_at).as_micros();
        self.taken_at + Micros::new(u64::try_from(age).unwrap_or(u64::MAX))
    }
}

/// Hits per interval: the current interval's hits or the exponentially smoothed average of earlier ones, if higher.
#[derive(Default)]
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
            (self.interval, self.hits) = (number, 0);
        }
        self.hits = self.hits.saturating_add(hits);
    }

    fn per_interval(&self) -> u64 {
        self.hits.max(self.average_x16 / 16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::{
        MaxHits,
        fixed_window::FixedWindow,
        sliding_window::{SlidingWindow, WindowEdge},
    };

    const INTERVAL: Duration = Duration::from_millis(125);
    /// Milliseconds from the first take until the end of its window of one minute.
    const WINDOW_END: u64 = 10_000;

    const fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn fixed() -> Algorithm {
        FixedWindow::new(MaxHits::hard(1_000), Micros::from_secs(60), true).unwrap().into()
    }

    fn sliding() -> Algorithm {
        SlidingWindow::new(MaxHits::hard(1_000), Micros::from_secs(120), 2, WindowEdge::Strict, false).unwrap().into()
    }

    /// Returns the outcome of a take of `hits` from a new counter, `millis` milliseconds after the first take.
    fn outcome(algorithm: &Algorithm, hits: u64, millis: u64) -> StepOutcome {
        let (mut state, now) = (State::default(), Micros::new((60_000_000 - WINDOW_END * 1_000) + millis * 1_000));
        let allowed = algorithm.step(&mut state, Operation { action: Action::Take, cost: hits, now });
        StepOutcome { allowed, action: Action::Take, at: now, state }
    }

    fn lease_with(algorithm: &Algorithm, hits: u64) -> Lease {
        let mut lease = Lease::default();
        assert_eq!(lease.acquired(algorithm, hits, outcome(algorithm, hits, 0), Duration::ZERO), None);
        lease
    }

    fn take(lease: &mut Lease, algorithm: &Algorithm, cost: u64, now: Duration) -> Option<(u64, u64)> {
        let decision = lease.decide(&Hit::take(b"k", algorithm, cost), now, INTERVAL)?.0;
        assert!(decision.allowed && !decision.soft && decision.retry_after.is_none());
        Some((decision.remaining, decision.used))
    }

    #[test]
    fn hits_can_be_used_up_to_the_last_one_until_the_lease_ends() {
        let rule = fixed();
        let mut lease = lease_with(&rule, 10);
        assert_eq!(take(&mut lease, &rule, 4, at(1)), Some((996, 4)));
        assert_eq!(take(&mut lease, &rule, 7, at(1)), None, "6 hits remain");
        let peek = Hit { action: Action::Peek, ..Hit::take(b"k", &rule, 6) };
        assert_eq!(
            lease.decide(&peek, at(1), INTERVAL).map(|(decision, to_acquire)| (decision.remaining, to_acquire)),
            Some((996, 0))
        );
        let just_before = at(WINDOW_END) - Duration::from_micros(1);
        assert_eq!(take(&mut lease, &rule, 5, just_before), Some((991, 9)));
        assert_eq!(take(&mut lease, &rule, 1, at(WINDOW_END)), None, "the window may have ended");
        assert_eq!(
            (lease.take_all(at(WINDOW_END)), lease.take_all(just_before), lease.take_all(just_before)),
            (0, 1, 0)
        );
    }

    #[test]
    fn hits_of_a_denied_request_are_restored_only_to_the_lease_they_came_from() {
        let rule = fixed();
        let mut lease = lease_with(&rule, 10);
        let first = lease.taken_at().unwrap();
        assert_eq!(lease.take_all(at(1)), 10);
        // Meanwhile the lease has acquired hits of the same window.
        assert_eq!(lease.acquired(&rule, 7, outcome(&rule, 17, 5), at(5)), None);
        assert_eq!(lease.restore(&rule, 10, first), None);
        assert_eq!(take(&mut lease, &rule, 17, at(6)).map(|(_, used)| used), Some(17));
        // Then it acquires hits of the next window.
        assert_eq!(lease.acquired(&rule, 7, outcome(&rule, 7, WINDOW_END + 1), at(WINDOW_END + 1)), None);
        assert_eq!(lease.restore(&rule, 10, first), Some(Return { hits: 10, taken_at: first }));
        assert_eq!(lease.take_all(at(WINDOW_END + 1)), 7);
        assert_eq!(Lease::default().restore(&rule, 10, first), Some(Return { hits: 10, taken_at: first }));
    }

    #[test]
    fn an_acquisition_follows_the_demand_and_the_free_hits() {
        let rule = fixed();
        let mut lease = Lease::default();
        assert_eq!(lease.begin_acquire(1_000), 0, "there is no demand");
        for _ in 0..8 {
            assert_eq!(take(&mut lease, &rule, 1, at(0)), None);
        }
        assert_eq!(lease.begin_acquire(4 * MIN_LEASE - 1), 0, "too few hits are free");
        assert_eq!(lease.begin_acquire(1_000), 8 * LEASE_INTERVALS);
        assert_eq!(lease.begin_acquire(1_000), 0, "a call is in progress");
        lease.acquire_failed();
        assert_eq!(lease.begin_acquire(130), 32, "a quarter of the free hits");
        assert_eq!(lease.acquired(&rule, 32, outcome(&rule, 2_000, 0), at(0)), None);
        assert_eq!(take(&mut lease, &rule, 1, at(0)), None, "the store denied the take");
        // In the following intervals the demand is the smoothed average.
        take(&mut lease, &rule, 20, at(125));
        assert_eq!(lease.begin_acquire(1_000), 20 * LEASE_INTERVALS);
        lease.acquire_failed();
        take(&mut lease, &rule, 1, at(250));
        assert_eq!(lease.begin_acquire(1_000), (20 + 4) / 2 * LEASE_INTERVALS);
        lease.acquire_failed();
        take(&mut lease, &rule, 1, at(2_000));
        assert_eq!(lease.begin_acquire(1_000), 0, "the demand has decayed");
        // Repeated acquisitions hold a quarter of all free hits at most.
        let mut lease = lease_with(&rule, 100);
        take(&mut lease, &rule, 60, at(0));
        lease.acquire_failed();
        assert_eq!((lease.begin_acquire(240), lease.begin_acquire(320)), (0, (320 + 40) / 4 - 40), "40 hits are held");
    }

    #[test]
    fn acquires_more_when_half_of_the_target_is_used() {
        let rule = fixed();
        let mut lease = lease_with(&rule, 100);
        let mut to_acquire =
            |cost| lease.decide(&Hit::take(b"k", &rule, cost), at(0), INTERVAL).map(|(_, to_acquire)| to_acquire);
        assert_eq!(
            (to_acquire(20), to_acquire(13)),
            (Some(0), Some(0)),
            "33 in this interval, a target of 132, and 67 held"
        );
        assert_eq!(to_acquire(1), Some(136 - 66));
        assert_eq!(to_acquire(1), Some(0));
    }

    fn grant(lease: &mut Lease, rule: &Algorithm, demand: u64, id: u64, now: Duration) -> Option<(u32, u64)> {
        let grant = lease.grant(rule, demand, id, now, Duration::from_secs(1))?;
        Some((grant.hits.get(), grant.ttl.get() / 1_000))
    }

    fn report(lease: &mut Lease, rule: &Algorithm, id: u64, used: u64, now: Duration) -> Option<(u64, u64)> {
        lease.report(rule, id, used, now).map(|report| {
            assert_eq!(report.unused, None);
            (report.used, report.returned)
        })
    }

    #[test]
    fn granted_hits_count_as_used_and_are_returned_once() {
        let rule = fixed();
        let mut lease = lease_with(&rule, 100);
        assert_eq!(grant(&mut lease, &rule, MIN_GRANT - 1, 1, at(0)), None, "below the minimum");
        assert_eq!(grant(&mut lease, &rule, 20, 1, at(0)), Some((20, 1_000)));
        assert_eq!(grant(&mut lease, &rule, 1_000, 2, at(0)), Some((40, 1_000)), "half of the held hits at most");
        assert_eq!(report(&mut lease, &rule, 1, 15, at(1)), Some((15, 5)));
        assert_eq!(report(&mut lease, &rule, 1, 0, at(1)), None, "a grant is reported once");
        assert_eq!(report(&mut lease, &rule, 2, 1_000, at(1)), Some((40, 0)), "no more than the granted hits");
        assert_eq!(take(&mut lease, &rule, 45, at(1)).map(|(_, used)| used), Some(100), "all hits are used");
        assert_eq!(take(&mut lease, &rule, 1, at(1)), None);
        assert!(grant(&mut lease_with(&rule, 100), &rule, 20, 7, at(0)).is_some());
        let mut lease = lease_with(&rule, 1_000);
        let grants = (0..100).filter(|id| grant(&mut lease, &rule, 10, *id, at(0)).is_some()).count();
        assert_eq!((grants, lease.revoke(0), lease.revoke(0)), (MAX_GRANTS, 10, 0));
    }

    #[test]
    fn a_grant_ends_with_its_lease_and_awaits_its_report() {
        let rule = fixed();
        let mut lease = lease_with(&rule, 100);
        assert_eq!(grant(&mut lease, &rule, 8, 1, at(0)), Some((8, 1_000)));
        assert_eq!(grant(&mut lease, &rule, 8, 2, at(WINDOW_END - 300)), Some((8, 300)));
        assert_eq!(grant(&mut lease, &rule, 8, 3, at(WINDOW_END)), None);
        assert_eq!(report(&mut lease, &rule, 2, 0, at(WINDOW_END)), Some((0, 0)), "the window has ended");
        assert!(!lease.is_idle(Duration::MAX), "the first grant may still be reported");
        assert_eq!(
            (lease.expire_grants(at(1_000)), lease.expire_grants(at(1_001)), lease.expire_grants(at(2_000))),
            (0, 8, 0)
        );
    }

    /// In a sliding window, taken hits continue to count after the lease has ended.
    #[test]
    fn unused_hits_of_a_grant_are_returned_after_the_lease_has_ended() {
        let rule = sliding();
        let mut lease = lease_with(&rule, 100);
        let taken_at = lease.taken_at().unwrap();
        for id in 1..=3 {
            assert!(grant(&mut lease, &rule, 8, id, at(0)).is_some());
        }
        assert_eq!(report(&mut lease, &rule, 1, 2, at(WINDOW_END + 1)), Some((2, 6)));
        let unused = lease.return_idle(&rule, at(WINDOW_END + 1), at(0));
        assert_eq!(unused, Some(Return { hits: 76 + 6, taken_at }));
        let unused = Some(Return { hits: 8, taken_at });
        assert_eq!(lease.report(&rule, 2, 0, at(WINDOW_END + 2)), Some(GrantReport { used: 0, returned: 8, unused }));
        assert_eq!(report(&mut lease, &rule, 3, 0, at(WINDOW_END + 200_000)), Some((0, 0)), "the hits no longer count");
    }

    #[test]
    fn hits_above_the_demand_are_returned() {
        let rule = fixed();
        let mut lease = lease_with(&rule, 500);
        take(&mut lease, &rule, 50, at(0));
        assert_eq!(lease.return_excess(at(1), INTERVAL), Some(Return { hits: 250, taken_at: Micros::from_secs(50) }));
        assert_eq!(lease.return_excess(at(1), INTERVAL), None, "a demand of 200, and 200 held");
        // The average halves from interval to interval.
        take(&mut lease, &rule, 1, at(125));
        assert_eq!(lease.return_excess(at(126), INTERVAL), None);
        take(&mut lease, &rule, 1, at(250));
        take(&mut lease, &rule, 1, at(375));
        assert_eq!(
            lease.return_excess(at(376), INTERVAL).map(|unused| unused.hits),
            Some(197 - 4 * 7),
            "7 per interval now"
        );
        assert_eq!(lease_with(&rule, 500).return_excess(at(WINDOW_END), INTERVAL), None, "the lease has ended");
    }

    #[test]
    fn acquisitions_in_one_window_are_merged() {
        let rule = fixed();
        let mut lease = lease_with(&rule, 10);
        // The call was sent at 5 ms and counted at 3 ms by the store's clock, which may run up to 2 ms ahead of this.
        assert_eq!(lease.acquired(&rule, 10, outcome(&rule, 10, 3), at(5)), None);
        assert_eq!(take(&mut lease, &rule, 20, at(WINDOW_END)), None, "the earlier of both ends applies");
        assert!(take(&mut lease, &rule, 20, at(WINDOW_END) - Duration::from_micros(1)).is_some());
        for (rule, expected) in
            [(fixed(), None), (sliding(), Some(Return { hits: 10, taken_at: Micros::from_secs(50) }))]
        {
            let mut lease = lease_with(&rule, 10);
            let next = outcome(&rule, 7, WINDOW_END + 1);
            assert_eq!(
                lease.acquired(&rule, 7, next, at(WINDOW_END + 1)),
                expected,
                "hits of an ended window are dropped"
            );
            assert_eq!(take(&mut lease, &rule, 8, at(WINDOW_END + 1)), None);
            assert!(take(&mut lease, &rule, 7, at(WINDOW_END + 1)).is_some());
        }
    }

    #[test]
    fn an_idle_lease_is_returned_once() {
        let rule = fixed();
        let mut lease = lease_with(&rule, 10);
        take(&mut lease, &rule, 3, at(100));
        assert_eq!(lease.return_idle(&rule, at(150), at(100)), None);
        assert!(!lease.is_idle(at(101)), "hits are held");
        let unused = Some(Return { hits: 7, taken_at: Micros::from_secs(50) });
        assert_eq!(lease.return_idle(&rule, at(151), at(101)), unused);
        assert_eq!((lease.return_idle(&rule, at(151), at(101)), take(&mut lease, &rule, 1, at(151))), (None, None));
        assert!(lease.is_idle(at(152)) && !lease.is_idle(at(151)));
        assert_eq!(lease_with(&rule, 10).return_idle(&rule, at(WINDOW_END), at(0)), None, "the window has ended");
        let mut lease = lease_with(&sliding(), 10);
        take(&mut lease, &sliding(), 10, at(0));
        assert_eq!(lease.return_idle(&sliding(), at(WINDOW_END), at(0)), None, "all hits were used");
        let unused = Some(Return { hits: 10, taken_at: Micros::from_secs(50) });
        assert_eq!(
            lease_with(&sliding(), 10).return_idle(&sliding(), at(WINDOW_END), at(0)),
            unused,
            "the hits still count"
        );
        lease.begin_acquire(1_000);
        assert!(!lease.is_idle(at(WINDOW_END)), "a call is in progress");
    }
}
