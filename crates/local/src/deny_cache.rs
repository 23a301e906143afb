//! [`DenyCache`]: denials that are still valid and are answered from memory.
//!
//! A counter that has denied a hit keeps denying it until hits drain or the window ends, because other instances can
//! only add hits. The store need not be called until then.
//!
//! An entry stores the counter's state after the denial and the time of the store's clock, not the decision. The next
//! hit is decided from that state by the algorithm's own arithmetic. Larger and smaller costs are therefore decided
//! correctly, with the numbers that the store would return. The cache answers denials only: the store is called if the
//! hit would be allowed, if the hit belongs to another limit, or if the limit has changed.
//!
//! - A denial is not cached if a denied hit changes the counter (`count_denied`).
//! - An override changes the limit, so the entry is not used any more. A reset of the counter has the effect of a refund.
//! - A refund by this instance invalidates the counter's entry immediately. A refund by another instance takes effect
//!   after `max_age`.
//! - Callers must refund only hits that were allowed: a hit that was denied from the cache has never been counted.
//! - Hits that count ahead of their time neither use nor fill the cache.
//! - The age of an entry starts when the store call was sent, before the store's clock was read. An entry therefore
//!   expires slightly early, never late.

use std::{
    sync::atomic::{AtomicU32, Ordering::Relaxed},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use sluicegate_algorithm::{Action, Consistency, Decision, Micros, Operation, Program, State};
use sluicegate_cache::{Expiring, SetAssociativeCache};
use sluicegate_store::{Counter, Hit, StepOutcome};
use smallvec::SmallVec;

/// Number of refund counts. Each counter maps to one of them, and a refund invalidates all counters that share it.
const REFUND_SLOTS: usize = 256;

/// Maximum age of a denial by a leased counter, because other instances may return leased hits soon.
const LEASED_MAX_AGE: Duration = Duration::from_millis(50);

/// Settings of the deny cache.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Settings {
    /// Maximum number of cached denials, of about 360 bytes each. If 0, the cache is off and every hit calls the store.
    pub max_entries: usize,
    /// Maximum age of a cached denial. A refund by another instance can go unnoticed for this time.
    #[serde(with = "sluicegate_duration::Text")]
    pub max_age: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self { max_entries: 65_536, max_age: Duration::from_secs(1) }
    }
}

/// A hit of a request with several hits, and its cached denial.
pub(super) struct CachedDenial<'a> {
    pub(super) hit: Hit<&'a Counter>,
    pub(super) lookup: Lookup,
    /// The denial; `None` if the store must be called.
    pub(super) denial: Option<Decision>,
}

/// Cached denials of a request's hits, in their order.
pub(super) type CachedDenials<'a> = SmallVec<[CachedDenial<'a>; 2]>;

/// Lookups of a request's hits, in their order.
pub(super) type Lookups = SmallVec<[Lookup; 2]>;

/// The key of a cache entry: the counter's identity, and its refund count before the store was called.
#[derive(Clone, Copy)]
pub(super) struct Lookup {
    identity: u128,
    refunds: u32,
}

/// A cached denial. It is valid while `refunds` equals the counter's refund count.
struct Denial {
    program: Program,
    refunds: u32,
    /// Time of the store call, by this instance's clock.
    called_at: Duration,
    expires_at: Duration,
    /// Time of the denial, by the store's clock.
    decided_at: Micros,
    state: State,
}

impl Expiring for Denial {
    fn expires_at(&self) -> Duration {
        self.expires_at
    }

    fn heap_bytes(&self) -> usize {
        self.state.as_bytes().len()
    }
}

/// A cache of denials, shared by all workers of the instance.
pub(super) struct DenyCache {
    denials: SetAssociativeCache<Denial>,
    refunds: [AtomicU32; REFUND_SLOTS],
    max_age: Duration,
}

impl DenyCache {
    /// Creates a cache. Returns `None` if the settings turn it off.
    pub(super) fn new(settings: &Settings) -> Option<Self> {
        if settings.max_entries == 0 || settings.max_age.is_zero() {
            return None;
        }
        Some(Self {
            denials: SetAssociativeCache::new(settings.max_entries),
            refunds: [const { AtomicU32::new(0) }; REFUND_SLOTS],
            max_age: settings.max_age,
        })
    }

    /// Prepares a hit's lookup. Must be called before [`Self::get`] and before the store call.
    ///
    /// A refund or rollback invalidates the counter's entry from now on.
    pub(super) fn lookup(&self, hit: &Hit<&Counter>, identity: u128) -> Lookup {
        if hit.action.releases() {
            self.invalidate(identity);
        }
        Lookup { identity, refunds: self.refunds_of(identity).load(Relaxed) }
    }

    /// Invalidates the counter's entry, because hits have been returned to the counter.
    pub(super) fn invalidate(&self, identity: u128) {
        self.refunds_of(identity).fetch_add(1, Relaxed);
    }

    /// Returns the valid denials of a request's hits.
    pub(super) fn cached<'a>(&self, hits: &[Hit<&'a Counter>], lookups: Lookups, now: Duration) -> CachedDenials<'a> {
        let mut cached = CachedDenials::new();
        for (hit, lookup) in hits.iter().zip(lookups) {
            // An earlier hit of this request that calls the store may change the counter.
            let may_have_changed =
                cached.iter().any(|earlier| earlier.lookup.identity == lookup.identity && earlier.denial.is_none());
            let denial = if may_have_changed { None } else { self.get(hit, &lookup, now) };
            cached.push(CachedDenial { hit: *hit, lookup, denial });
        }
        cached
    }

    /// Returns the denial of one hit, if the cache has a valid entry that denies it.
    pub(super) fn get(&self, hit: &Hit<&Counter>, lookup: &Lookup, now: Duration) -> Option<Decision> {
        if hit.action.releases() || hit.is_ahead {
            return None;
        }
        self.denials.lookup(lookup.identity, |denial| {
            let holds = now >= denial.called_at && now < denial.expires_at && denial.refunds == lookup.refunds;
            if !holds || denial.program != hit.counter.program {
                return None;
            }
            let age = (now - denial.called_at).as_micros();
            let at = denial.decided_at + Micros::new(u64::try_from(age).unwrap_or(u64::MAX));
            let state = &mut denial.state;
            let operation = hit.operation(at);
            let passes = hit.counter.program.step(state, Operation { action: Action::Peek, ..operation });
            // In the meantime, a window may have ended, so that denied hits count again.
            if passes || hit.counter.program.denial_counts(state, at) {
                return None;
            }
            Some(hit.counter.program.explain(state, operation, false))
        })
    }

    /// Updates the cache with the outcome of a store call that was sent at `called_at`, and returns its decision.
    pub(super) fn learn(
        &self,
        hit: &Hit<&Counter>,
        lookup: Lookup,
        outcome: StepOutcome,
        called_at: Duration,
    ) -> Decision {
        let decision = outcome.explain(hit);
        if hit.action.releases() {
            // A denial that was cached while this call was under way is invalid as well.
            self.invalidate(lookup.identity);
        } else if outcome.allowed || hit.is_ahead || hit.counter.program.denial_counts(&outcome.state, outcome.at) {
            // The counter has changed since the cached denial.
            self.denials.remove(lookup.identity);
        } else {
            // Other instances may return leased hits soon.
            let is_leased = hit.counter.consistency == Consistency::Leased;
            let max_age = if is_leased { self.max_age.min(LEASED_MAX_AGE) } else { self.max_age };
            let denial = Denial {
                program: hit.counter.program,
                refunds: lookup.refunds,
                called_at,
                expires_at: called_at.saturating_add(max_age),
                decided_at: outcome.at,
                state: outcome.state,
            };
            self.denials.put(lookup.identity, denial);
        }
        decision
    }

    fn refunds_of(&self, identity: u128) -> &AtomicU32 {
        &self.refunds[identity as usize % REFUND_SLOTS]
    }
}

#[cfg(test)]
mod tests {
    use sluicegate_algorithm::{MaxHits, fixed_window::FixedWindow, gcra::Gcra, sliding_log::SlidingLog};

    use super::*;

    const fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn cache(max_age: Duration) -> DenyCache {
        DenyCache::new(&Settings { max_entries: 8, max_age }).unwrap()
    }

    /// Returns a denial of 10 hits after `used` hits, 30 s into a window by the store's clock.
    fn denial(counter: &Counter, used: u64) -> StepOutcome {
        let program = &counter.program;
        let (mut state, now) = (State::default(), Micros::from_secs(30));
        let taken = program.step(&mut state, Operation { action: Action::Take, cost: used, now });
        assert!(taken);
        let allowed = program.step(&mut state, Operation { action: Action::Take, cost: 10, now });
        StepOutcome { allowed, action: Action::Take, at: now, state }
    }

    fn cached(cache: &DenyCache, hits: &[Hit<&Counter>], now: Duration) -> Vec<Option<u64>> {
        let lookups = hits.iter().map(|hit| cache.lookup(hit, 7)).collect();
        let remaining = |cached: &CachedDenial<'_>| cached.denial.map(|denial| denial.remaining);
        cache.cached(hits, lookups, now).iter().map(remaining).collect()
    }

    fn learn(cache: &DenyCache, hit: &Hit<&Counter>, outcome: StepOutcome) {
        let lookup = cache.lookup(hit, 7);
        cache.learn(hit, lookup, outcome, Duration::ZERO);
    }

    fn minute(limit: u64, count_denied: bool) -> Counter {
        Counter::new(b"k", FixedWindow::new(MaxHits::hard(limit), Micros::from_secs(60), count_denied).unwrap())
    }

    #[test]
    fn a_denial_is_cached_until_max_age_or_until_the_counter_would_allow_the_hit() {
        let rule = minute(10, false);
        let hit = |cost| rule.take(cost);
        for (max_age, expires_at) in [(at(50), at(50)), (Duration::MAX, at(30_000))] {
            let cache = cache(max_age);
            learn(&cache, &hit(10), denial(&rule, 4));
            assert_eq!(cached(&cache, &[hit(7)], at(0)), [Some(6)]);
            assert_eq!(cached(&cache, &[hit(6)], at(0)), [None], "this hit would be allowed");
            let last = expires_at - Duration::from_micros(1);
            assert_eq!(
                (cached(&cache, &[hit(7)], last), cached(&cache, &[hit(7)], expires_at)),
                (vec![Some(6)], vec![None])
            );
        }
        // The store's time is extrapolated by the elapsed local time, independently of the local clock's origin.
        let cache = cache(at(60_000));
        let (called_at, hit) = (at(3_600_000), hit(10));
        cache.learn(&hit, cache.lookup(&hit, 7), denial(&rule, 4), called_at);
        let is_cached = |now| cached(&cache, &[hit], now) != [None];
        assert!(is_cached(called_at + at(29_999)) && !is_cached(called_at + at(30_000)), "the next window has begun");
        learn(&cache, &hit, denial(&rule, 4));
        let other = minute(11, false);
        assert_eq!(cached(&cache, &[other.take(8)], at(1)), [None], "another limit");
    }

    #[test]
    fn a_refund_invalidates_the_cache_before_its_call_and_after_its_answer() {
        let (rule, cache) = (minute(10, false), cache(at(50)));
        let hit = rule.take(10);
        let refund = Hit { action: Action::Refund, ..hit };
        learn(&cache, &hit, denial(&rule, 4));
        let lookup = cache.lookup(&refund, 7);
        assert_eq!(cached(&cache, &[hit], at(1)), [None]);
        learn(&cache, &hit, denial(&rule, 4));
        assert_eq!(cached(&cache, &[hit, refund], at(1)), [Some(6), None]);
        learn(&cache, &hit, denial(&rule, 4));
        cache.learn(&refund, lookup, denial(&rule, 4), at(1));
        assert_eq!(cached(&cache, &[hit], at(1)), [None]);
        // A refund that is sent between a hit's lookup and its answer.
        let lookup = cache.lookup(&hit, 7);
        cache.invalidate(7);
        cache.learn(&hit, lookup, denial(&rule, 4), at(0));
        assert_eq!(cached(&cache, &[hit], at(1)), [None]);
    }

    #[test]
    fn an_uncached_hit_disables_the_cache_for_later_hits_of_its_counter() {
        let (rule, cache) = (minute(10, false), cache(at(50)));
        let hit = |cost| rule.take(cost);
        learn(&cache, &hit(10), denial(&rule, 4));
        assert_eq!(cached(&cache, &[hit(7), hit(1), hit(9)], at(1)), [Some(6), None, None]);
        assert_eq!(cached(&cache, &[hit(7), hit(9)], at(1)), [Some(6), Some(6)]);
    }

    #[test]
    fn a_denial_that_changes_the_counter_is_not_cached() {
        let window = minute(10, true);
        let cache = cache(at(50));
        let (hit, peek) = (window.take(10), window.take(7).peek());
        // The denied hit was counted, so the window is over its limit and denies every further hit until it ends.
        learn(&cache, &hit, denial(&window, 4));
        assert_eq!(cached(&cache, &[window.take(1), peek], at(1)), [Some(0), Some(0)]);
        let gcra = Counter::new(b"k", Gcra::new(10, Micros::from_secs(60), MaxHits::hard(10), true).unwrap());
        learn(&cache, &gcra.take(10), denial(&gcra, 4));
        assert_eq!(cached(&cache, &[gcra.take(10)], at(1)), [None]);
        assert_eq!(cached(&cache, &[hit], at(1)), [None], "the earlier entry is removed");
    }

    #[test]
    fn a_hit_that_counts_ahead_neither_uses_nor_fills_the_cache() {
        let (rule, cache) = (minute(10, false), cache(at(50)));
        let hit = rule.take(10);
        let ahead = Hit { is_ahead: true, ..hit };
        learn(&cache, &hit, denial(&rule, 4));
        assert_eq!(cached(&cache, &[ahead], at(0)), [None]);
        assert_eq!(cached(&cache, &[hit], at(0)), [Some(6)]);
        learn(&cache, &ahead, denial(&rule, 4));
        assert_eq!(cached(&cache, &[hit], at(0)), [None]);
    }

    #[test]
    fn a_size_or_age_of_zero_disables_the_cache() {
        let settings = |max_entries, max_age| Settings { max_entries, max_age };
        assert!(DenyCache::new(&settings(0, at(50))).is_none() && DenyCache::new(&settings(8, at(0))).is_none());
    }

    #[test]
    fn denials_of_leased_counters_expire_sooner() {
        let cache = cache(at(1_000));
        for (consistency, millis) in [(Consistency::Exact, 1_000), (Consistency::Leased, 50)] {
            let counter = Counter { consistency, ..minute(5, false) };
            let hit = counter.take(1);
            let lookup = cache.lookup(&hit, 1);
            cache.learn(&hit, lookup, denial(&counter, 5), at(0));
            assert!(cache.get(&hit, &lookup, at(millis - 1)).is_some());
            assert!(cache.get(&hit, &lookup, at(millis)).is_none(), "{consistency:?}");
        }
    }

    /// A set of the cache has memory for one log of many hits and a few smaller ones.
    #[test]
    fn states_that_exceed_the_memory_of_the_cache_evict_the_denial_that_expires_first() {
        let (log, cache) = (sliding_log(60), cache(at(50)));
        let hit = log.take(10);
        let lookups = [1, 3, 5].map(|identity| cache.lookup(&hit, identity));
        for (lookup, called_at) in lookups.into_iter().zip([10, 0, 20]) {
            cache.learn(&hit, lookup, denial(&log, 60), at(called_at));
        }
        let is_cached = lookups.map(|lookup| cache.get(&hit, &lookup, at(20)).is_some());
        assert_eq!(is_cached, [true, false, true], "each log has 420 bytes, and a set has 1,024");
    }

    fn sliding_log(limit: u64) -> Counter {
        Counter::new(b"k", SlidingLog::new(MaxHits::hard(limit), Micros::from_secs(60), Micros::ZERO, false).unwrap())
    }
}
