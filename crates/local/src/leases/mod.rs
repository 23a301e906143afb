//! [`Leases`]: all leases of this instance, by the identity of their counters.
//!
//! The file `lease.rs` has the states of one lease and all of its transitions, including a crash of the instance that
//! holds it.

mod lease;

use std::time::Duration;

use serde::{Deserialize, Serialize};
use sluicegate_algorithm::{Action, Consistency, Decision, Micros, Program};
use sluicegate_store::{Counter, Grant, Hit, StepOutcome};
use smallvec::SmallVec;

use self::lease::{GrantReport, Lease, Return};
use super::{counter_map::CounterMap, hot_counters::HotCounters, store_call::StoreCall};
#[cfg(test)]
use sluicegate_testing::model_checker::hash;

/// Time without a take after which held hits are returned to the store.
const IDLE_TIMEOUT: Duration = Duration::from_millis(50);
/// Number of intervals per lease TTL in which demand is measured.
const INTERVALS_PER_TTL: u32 = 8;
/// Number of measurement intervals whose demand a lease covers. A lease lives at least as long, so that its hits are
/// used before it ends.
const INTERVALS_PER_LEASE: u32 = 4;
/// Hits per measurement interval that make a counter hot. With fewer, no lease would reach its minimum size.
const HOT_THRESHOLD: u64 = 8;

/// Settings of leases.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Settings {
    /// Maximum lifetime of a grant. A lease covers the expected hits of half this time, and more hits are taken when
    /// half of them are used.
    #[serde(with = "sluicegate_duration::Text")]
    pub ttl: Duration,
    /// Maximum number of counters with a lease, of about 500 bytes each. If 0, leases are off and every hit calls the
    /// store.
    pub max_counters: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { ttl: Duration::from_secs(1), max_counters: 65_536 }
    }
}

/// The leases of all hot counters, shared by all workers.
pub(super) struct Leases {
    counters: CounterMap<LeasedCounter>,
    hot_counters: HotCounters,
    ttl: Duration,
}

/// A hot counter with its lease.
struct LeasedCounter {
    identity: u128,
    /// The counter, with the algorithm of its rule.
    counter: Counter,
    /// The program that takes leases ([`Algorithm::leasing`](sluicegate_algorithm::Algorithm::leasing)).
    leasing: Program,
    /// Interval in which the counter's demand is measured.
    interval: Duration,
    lease: Lease,
}

/// A decision from a lease, with the grant for the caller.
#[derive(Clone, Copy)]
pub(super) struct LeaseDecision {
    pub(super) decision: Decision,
    pub(super) grant: Option<Grant>,
}

impl LeaseDecision {
    /// Returns the decision as if its `hits` had not been taken, without a grant.
    pub(super) fn rolled_back(self, hits: u64) -> Self {
        let Decision { remaining, used, .. } = self.decision;
        let decision =
            Decision { remaining: remaining.saturating_add(hits), used: used.saturating_sub(hits), ..self.decision };
        Self { decision, grant: None }
    }
}

/// The hits that a lease contributes to one hit of a request.
///
/// If they cover the whole cost, the payment contains the decision. Otherwise the store must decide the remaining cost.
#[derive(Clone, Copy, Default)]
pub(super) struct LeasePayment {
    pub(super) decision: Option<LeaseDecision>,
    pub(super) hits: u64,
    /// Store time at which the lease took its hits; `None` if there is no lease.
    taken_at: Option<Micros>,
}

/// The payments for a request's hits, and the store calls that refill the leases.
#[derive(Default)]
pub(super) struct LeasePayments {
    pub(super) payments: SmallVec<[LeasePayment; 2]>,
    pub(super) calls: SmallVec<[StoreCall; 1]>,
}

/// Result of a finished grant.
pub(super) struct FinishedGrant {
    pub(super) used: u64,
    /// Unused hits that still count in the store.
    pub(super) returned: u64,
    /// The call that returns the unused hits to the store, if the lease no longer holds them.
    pub(super) rollback: Option<StoreCall>,
}

/// Result of [`Leases::sweep`].
#[derive(Default)]
pub(super) struct SweepResult {
    pub(super) calls: Vec<StoreCall>,
    /// Hits of expired grants that were never reported.
    pub(super) unreported: u64,
}

impl Leases {
    /// Creates an empty set of leases. Returns `None` if the settings turn leases off.
    pub(super) fn new(settings: &Settings) -> Option<Self> {
        if settings.max_counters == 0 || settings.ttl.is_zero() {
            return None;
        }
        Some(Self {
            counters: CounterMap::new(settings.max_counters),
            hot_counters: HotCounters::new(settings.ttl / INTERVALS_PER_TTL),
            ttl: settings.ttl,
        })
    }

    /// Takes a request's hits from leases, as far as they are covered.
    pub(super) fn take(&self, hits: &[Hit<&Counter>], identities: &[u128], now: Duration) -> LeasePayments {
        let mut result = LeasePayments::default();
        for (hit, identity) in hits.iter().zip(identities) {
            let is_leased = hit.counter.consistency == Consistency::Leased && !hit.action.releases();
            let payment = if is_leased {
                self.with_counter(*identity, hit, now, |leased| leased.pay(hit, now, self.ttl, &mut result.calls))
            } else {
                None
            };
            result.payments.push(payment.unwrap_or_default());
        }
        result
    }

    /// Restores a payment of a denied request to its lease, and revokes its grant.
    ///
    /// If that lease has ended, returns the call that rolls the hits back. If the counter was removed or its rule has
    /// changed, the hits stay counted in the store.
    pub(super) fn restore(&self, identity: u128, rule: &Program, payment: &LeasePayment) -> Option<StoreCall> {
        if payment.hits == 0 {
            return None;
        }
        self.counters.find(identity, |leased| leased.restore(rule, payment)).flatten()
    }

    /// Returns the call that acquires a lease after the store has allowed a hit, if a lease is worthwhile.
    pub(super) fn consider_lease(&self, identity: u128, hit: &Hit<&Counter>, decision: &Decision) -> Option<StoreCall> {
        if hit.action != Action::Take || !decision.allowed {
            return None;
        }
        let call = self.counters.find(identity, |leased| {
            if leased.counter.program != hit.counter.program {
                return None;
            }
            let hits = leased.lease.begin_acquire(decision.remaining);
            leased.take_call(hits)
        });
        call.flatten()
    }

    /// Finishes a grant. Returns `None` if the grant is unknown.
    pub(super) fn report(&self, identity: u128, id: u64, used: u64, now: Duration) -> Option<FinishedGrant> {
        let finished = self.counters.find(identity, |leased| {
            let GrantReport { used, returned, unused } = leased.lease.report(&leased.leasing, id, used, now)?;
            let rollback = unused.map(|unused| leased.return_call(&unused));
            Some(FinishedGrant { used, returned, rollback })
        });
        finished.flatten()
    }

    /// Completes a call that acquires hits. `outcome` is `None` if it failed.
    ///
    /// Returns the call that rolls back unusable hits: those of an earlier lease, or all if the counter was removed or
    /// its rule has changed.
    pub(super) fn complete(
        &self,
        call: &StoreCall,
        outcome: Option<&StepOutcome>,
        called_at: Duration,
    ) -> Option<StoreCall> {
        let completed = self.counters.find(call.identity, |leased| {
            if leased.leasing != call.hit.counter.program {
                return None;
            }
            Some(leased.complete(call, outcome, called_at))
        });
        if let Some(rollback) = completed.flatten() {
            return rollback;
        }
        // The counter or its rule has changed, so the acquired hits cannot be used.
        let outcome = outcome?;
        if !outcome.allowed {
            return None;
        }
        let hit = Hit { action: Action::RollBack(outcome.at), ..call.hit.clone() };
        Some(StoreCall { identity: call.identity, hit })
    }

    /// Removes idle counters and expired grants, and returns the calls that return unused hits.
    pub(super) fn sweep(&self, now: Duration) -> SweepResult {
        let idle_since = now.saturating_sub(IDLE_TIMEOUT);
        let ttl_ago = now.saturating_sub(self.ttl);
        let mut result = SweepResult::default();
        self.counters.retain(|leased| {
            // The caller has had one more TTL after the grant's end to report it.
            result.unreported += leased.lease.expire_grants(ttl_ago);
            result.calls.extend(leased.return_idle(now, idle_since));
            if let Some(excess) = leased.lease.return_excess(now, leased.interval) {
                result.calls.push(leased.return_call(&excess));
            }
            !leased.lease.is_idle(ttl_ago)
        });
        result
    }

    /// Removes all counters, and returns the calls that return their held hits.
    pub(super) fn drain(&self, now: Duration) -> Vec<StoreCall> {
        let mut calls = Vec::new();
        self.counters.retain(|leased| {
            calls.extend(leased.return_idle(now, Duration::MAX));
            false
        });
        calls
    }

    /// Returns a hash of each counter's lease. `number` replaces the ids of grants, which are random.
    #[cfg(test)]
    pub(super) fn hashes(&self, number: impl Fn(u64) -> usize) -> Vec<u64> {
        let mut hashes = Vec::new();
        self.counters.retain(|leased| {
            hashes.push(hash((&leased.counter.name, leased.lease.fingerprint(&number))));
            true
        });
        hashes
    }

    /// Returns whether a lease waits for hits.
    #[cfg(test)]
    pub(super) fn is_acquiring(&self) -> bool {
        let mut is_acquiring = false;
        self.counters.retain(|leased| {
            is_acquiring |= leased.lease.is_acquiring();
            true
        });
        is_acquiring
    }

    /// Applies `act` to the hit's counter, which is created when it becomes hot.
    ///
    /// Returns `None` if the counter is not hot or cannot be leased, if there are too many counters, and while the
    /// counter has a lease for an earlier version of its rule.
    fn with_counter<R>(
        &self,
        identity: u128,
        hit: &Hit<&Counter>,
        now: Duration,
        act: impl FnOnce(&mut LeasedCounter) -> R,
    ) -> Option<R> {
        let result = self.counters.with_or_insert(
            identity,
            || self.hot_counter(identity, hit, now),
            |leased| {
                // A lease for the old rule is no longer used, so the sweep returns it as idle.
                if leased.counter.program == hit.counter.program { Some(act(leased)) } else { None }
            },
        );
        result.flatten()
    }

    /// Records a hit of a counter without a lease, and returns the counter if it is hot now and can be leased.
    fn hot_counter(&self, identity: u128, hit: &Hit<&Counter>, now: Duration) -> Option<LeasedCounter> {
        if self.hot_counters.record(identity, hit.cost, now) < HOT_THRESHOLD {
            return None;
        }
        let leasing = hit.counter.program.algorithm()?.leasing()?;
        let lifetime = Duration::from_micros(leasing.lease_lifetime().get());
        Some(LeasedCounter {
            identity,
            counter: hit.counter.clone(),
            leasing,
            interval: (self.ttl / INTERVALS_PER_TTL).min(lifetime / INTERVALS_PER_LEASE),
            lease: Lease::default(),
        })
    }
}

impl LeasedCounter {
    /// Takes a hit from the lease as far as it covers the cost. Adds the call that refills the lease to `calls`.
    fn pay(
        &mut self,
        hit: &Hit<&Counter>,
        now: Duration,
        max_ttl: Duration,
        calls: &mut SmallVec<[StoreCall; 1]>,
    ) -> LeasePayment {
        let is_take = hit.action == Action::Take;
        let Some((decision, to_acquire)) = self.lease.decide(hit, now, self.interval) else {
            let hits = if is_take { self.lease.take_all(now) } else { 0 };
            return LeasePayment { decision: None, hits, taken_at: self.lease.taken_at() };
        };
        calls.extend(self.take_call(to_acquire));
        // The identifier is random so that no caller can guess the grant of another one.
        let grant = if is_take && hit.demand > 0 {
            self.lease.grant(&self.leasing, hit.demand, rand::random(), now, max_ttl)
        } else {
            None
        };
        let hits = if is_take { hit.cost } else { 0 };
        LeasePayment { decision: Some(LeaseDecision { decision, grant }), hits, taken_at: self.lease.taken_at() }
    }

    /// Restores a payment and revokes its grant. Returns the call that rolls the hits back if the lease has ended.
    fn restore(&mut self, rule: &Program, payment: &LeasePayment) -> Option<StoreCall> {
        let taken_at = payment.taken_at?;
        if self.counter.program != *rule {
            return None;
        }
        let mut hits = payment.hits;
        if let Some(grant) = payment.decision.and_then(|decision| decision.grant) {
            hits += self.lease.revoke(grant.id);
        }
        let unused = self.lease.restore(&self.leasing, hits, taken_at)?;
        Some(self.return_call(&unused))
    }

    /// Completes a call that acquires hits. Returns the call that rolls back hits of an earlier lease.
    fn complete(&mut self, call: &StoreCall, outcome: Option<&StepOutcome>, called_at: Duration) -> Option<StoreCall> {
        let Some(outcome) = outcome else {
            self.lease.acquire_failed();
            return None;
        };
        let unused = self.lease.acquired(&self.leasing, call.hit.cost, outcome.clone(), called_at)?;
        Some(self.return_call(&unused))
    }

    /// Returns the call that takes `hits` hits for the lease, or `None` for 0.
    fn take_call(&self, hits: u64) -> Option<StoreCall> {
        if hits == 0 {
            return None;
        }
        Some(self.call(Action::Take, hits))
    }

    fn return_idle(&mut self, now: Duration, idle_since: Duration) -> Option<StoreCall> {
        let unused = self.lease.return_idle(&self.counter.program, now, idle_since)?;
        Some(self.return_call(&unused))
    }

    fn return_call(&self, unused: &Return) -> StoreCall {
        self.call(Action::RollBack(unused.taken_at), unused.hits)
    }

    fn call(&self, action: Action, hits: u64) -> StoreCall {
        // The store itself counts exactly.
        let consistency = Consistency::Exact;
        let counter = Counter { program: self.leasing, consistency, ..self.counter.clone() };
        StoreCall { identity: self.identity, hit: Hit { action, ..Hit::take(counter, hits) } }
    }
}

#[cfg(test)]
mod tests {
    use sluicegate_algorithm::{MaxHits, State, fixed_window::FixedWindow, token_bucket::TokenBucket};

    use super::*;

    #[test]
    fn restoring_a_payment_revokes_its_grant() {
        let leases = Leases::new(&Settings::default()).unwrap();
        let counter = leased(FixedWindow::new(MaxHits::hard(1_000), Micros::from_secs(60), true).unwrap());
        let hit = Hit { demand: 5, ..counter.take(10) };
        let take = || leases.take(&[hit], &[1], Duration::from_millis(1)).payments[0];
        assert!(take().decision.is_none(), "nothing is held yet");
        let decision = Decision { allowed: true, remaining: 990, ..Decision::default() };
        let call = leases.consider_lease(1, &hit, &decision).unwrap();
        let (mut state, at) = (State::default(), Micros::from_secs(1));
        let allowed = call.hit.counter.program.step(&mut state, call.hit.operation(at));
        let outcome = StepOutcome { allowed, action: Action::Take, at, state };
        assert!(leases.complete(&call, Some(&outcome), Duration::from_millis(1)).is_none());

        let payment = take();
        let granted = payment.decision.and_then(|decision| decision.grant).map(|grant| grant.hits.get());
        assert_eq!((payment.hits, granted), (10, Some(5)));
        assert!(leases.restore(1, &counter.program, &payment).is_none(), "the lease still exists");
        let returned: Vec<u64> = leases.drain(Duration::from_millis(2)).iter().map(|call| call.hit.cost).collect();
        assert_eq!(returned, [call.hit.cost]);
    }

    #[test]
    fn hits_acquired_for_a_changed_rule_are_rolled_back() {
        let leases = Leases::new(&Settings::default()).unwrap();
        let rule = FixedWindow::new(MaxHits::hard(1_000), Micros::from_secs(60), true).unwrap();
        let counter = Counter { per_second: true, ..Counter::new(b"k", rule) };
        let call = StoreCall { identity: 1, hit: Hit::take(counter, 10) };
        let at = Micros::from_secs(1);
        let outcome = |allowed| StepOutcome { allowed, action: Action::Take, at, state: State::default() };
        let complete = |allowed| leases.complete(&call, Some(&outcome(allowed)), Duration::from_millis(1));
        let rollback = complete(true).unwrap();
        let Hit { action, cost, counter, .. } = rollback.hit;
        assert_eq!(
            (action, cost, &*counter.name, counter.per_second),
            (Action::RollBack(at), 10, b"k".as_slice(), true)
        );
        assert!(complete(false).is_none());
    }

    fn leased(rule: impl Into<Program>) -> Counter {
        Counter { consistency: Consistency::Leased, ..Counter::new(b"k", rule) }
    }

    /// Returns the call that acquires a lease after a hit that no lease covers.
    fn acquire(leases: &Leases, hit: &Hit<&Counter>, allowed: bool, now: Duration) -> Option<StoreCall> {
        assert!(leases.take(&[*hit], &[1], now).payments[0].decision.is_none());
        let decision = Decision { allowed, remaining: 1_000, ..Decision::default() };
        leases.consider_lease(1, hit, &decision)
    }

    #[test]
    fn only_allowed_takes_acquire_a_lease_and_only_if_it_is_needed() {
        let leases = Leases::new(&Settings::default()).unwrap();
        let counter = leased(FixedWindow::new(MaxHits::hard(10_000), Micros::from_secs(60), true).unwrap());
        let (hit, now) = (counter.take(10), Duration::from_millis(1));
        assert!(acquire(&leases, &hit, false, now).is_none());
        assert!(acquire(&leases, &Hit { action: Action::Peek, ..hit }, true, now).is_none());
        let call = acquire(&leases, &hit, true, now).unwrap();
        assert_eq!(call.hit.cost, 80);
        let (mut state, at) = (State::default(), Micros::from_secs(1));
        let allowed = call.hit.counter.program.step(&mut state, call.hit.operation(at));
        let outcome = StepOutcome { allowed, action: Action::Take, at, state };
        assert!(leases.complete(&call, Some(&outcome), now).is_none());
        let paid = leases.take(&[counter.take(1)], &[1], now);
        assert!(paid.payments[0].decision.is_some() && paid.calls.is_empty(), "more than half of the hits are held");
    }

    /// The interval is an eighth of the TTL, or a quarter of the lifetime of a short lease.
    #[test]
    fn a_lease_covers_the_demand_of_several_intervals() {
        let window: Program = FixedWindow::new(MaxHits::hard(1_000), Micros::from_secs(60), true).unwrap().into();
        let bucket: Program =
            TokenBucket::new(1_000, Micros::from_secs(1), MaxHits::hard(1_000), false).unwrap().into();
        for (rule, hits, later) in [(window, 20, 125), (bucket, 40, 63)] {
            let leases = Leases::new(&Settings { ttl: Duration::from_secs(1), ..Settings::default() }).unwrap();
            let counter = leased(rule);
            let acquire =
                |cost, millis| acquire(&leases, &counter.take(cost), true, Duration::from_millis(millis)).unwrap();
            let failed = acquire(hits, 0);
            assert_eq!(failed.hit.cost, 4 * hits);
            assert!(leases.complete(&failed, None, Duration::ZERO).is_none());
            // The average of earlier intervals is 10 hits now, and this one has only one hit.
            assert_eq!(acquire(1, later).hit.cost, 4 * 10, "{rule:?}");
        }
    }
}
