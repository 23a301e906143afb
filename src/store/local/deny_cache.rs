//! Refusals that still hold: what a counter has refused, it refuses until something drains or its window ends, and
//! others can only add to it. So nobody needs to be asked.
//!
//! What is remembered is the counter itself, as the refusal left it, and how the store's clock stood. The next hit is
//! held against it by the same arithmetic as in the store: larger costs and smaller ones are decided rightly, and the
//! numbers of the answer are those that the store would give. Only a refusal is answered; what would pass asks the store,
//! and so does another limit, and one that has changed.
//!
//! Nothing is remembered where a refused hit would change something (`count_denied`). Where something is given back by
//! this instance, what is known of that counter ends; where another one gives back, after `max_age`. Give back only what
//! has passed: a hit that was refused from here has never been counted.
//!
//! A refusal ages from when it was asked for, which is before the store's clock was read: it ends a moment early, never
//! late.

use std::{
    sync::atomic::{AtomicU32, Ordering::Relaxed},
    time::Duration,
};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sluicegate_common::{Expiring, SetAssociativeCache};
use smallvec::SmallVec;

use crate::{
    algorithm::{Action, Algorithm, Consistency, Decision, Micros, Operation, State},
    store::{Hit, StepOutcome},
};

/// Counters are told apart by so many kinds where something is given back to them.
const REFUNDS: usize = 256;

/// A counter that is taken from in advance is asked again after so long.
const LEASED: Duration = Duration::from_millis(50);

/// How much is remembered.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Refusals at most, about 250 bytes each; 0: none, every hit asks the store.
    pub max_entries: usize,
    /// For so long at most: until then a refund by another instance goes unnoticed.
    #[serde(with = "crate::duration")]
    #[schemars(schema_with = "crate::duration::schema")]
    pub max_age: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self { max_entries: 65_536, max_age: Duration::from_secs(1) }
    }
}

/// What is known of the hits of a request.
pub(super) type CachedDenials = SmallVec<[Option<Decision>; 2]>;

/// What it takes to learn from their answers.
pub(super) type Lookups = SmallVec<[Lookup; 2]>;

/// What tells a counter from all others, and how often something was given back to its kind before it was asked.
#[derive(Clone, Copy)]
pub(super) struct Lookup {
    identity: u128,
    refunds: u32,
}

struct Denial {
    algorithm: Algorithm,
    refunds: u32,
    /// When it was asked for, here.
    asked: Duration,
    ends: Duration,
    /// When it was decided, by the store's clock.
    at: Micros,
    state: State,
}

impl Expiring for Denial {
    fn ends(&self) -> Duration {
        self.ends
    }

    fn bytes(&self) -> usize {
        self.state.as_bytes().len()
    }
}

pub(super) struct DenyCache {
    denials: SetAssociativeCache<Denial>,
    refunds: [AtomicU32; REFUNDS],
    max_age: Duration,
}

impl DenyCache {
    /// `None` where nothing is to be remembered.
    pub(super) fn new(settings: &Settings) -> Option<Self> {
        let remembers = settings.max_entries > 0 && !settings.max_age.is_zero();
        remembers.then(|| Self {
            denials: SetAssociativeCache::new(settings.max_entries),
            refunds: [const { AtomicU32::new(0) }; REFUNDS],
            max_age: settings.max_age,
        })
    }

    /// To be asked before anything is looked up. A hit that gives back ends what is known of its counter, from now on.
    pub(super) fn lookup(&self, hit: &Hit<'_>, identity: u128) -> Lookup {
        if hit.action.releases() {
            self.refunded(identity);
        }
        Lookup { identity, refunds: self.refunds_of(identity).load(Relaxed) }
    }

    /// Something has been given back: what was known of the counter does not hold any more.
    pub(super) fn refunded(&self, identity: u128) {
        self.refunds_of(identity).fetch_add(1, Relaxed);
    }

    /// The refusals that still hold.
    pub(super) fn cached(&self, hits: &[Hit<'_>], questions: &Lookups, now: Duration) -> CachedDenials {
        let mut known = CachedDenials::new();
        for (hit, question) in hits.iter().zip(questions) {
            // A hit before it in this request may change the counter.
            let changes =
                |(before, known): (&Lookup, &Option<Decision>)| before.identity == question.identity && known.is_none();
            let may_change = questions.iter().zip(&known).any(changes);
            known.push(self.get(hit, question, now).filter(|_| !may_change));
        }
        known
    }

    /// The refusal of one hit that still holds.
    pub(super) fn get(&self, hit: &Hit<'_>, question: &Lookup, now: Duration) -> Option<Decision> {
        if hit.action.releases() {
            return None;
        }
        self.denials.look(question.identity, |refusal| {
            let holds = now >= refusal.asked && now < refusal.ends && refusal.refunds == question.refunds;
            if !holds || refusal.algorithm != *hit.algorithm {
                return None;
            }
            let age = (now - refusal.asked).as_micros();
            let at = refusal.at + Micros::new(u64::try_from(age).unwrap_or(u64::MAX));
            let state = &mut refusal.state;
            let passes = hit.algorithm.step(state, Operation { action: Action::Peek, cost: hit.cost, now: at });
            (!passes).then(|| hit.algorithm.explain(state, hit.operation(at), false))
        })
    }

    /// Remembers what the store has refused; the answer to the hit. `asked`: when the store was asked.
    pub(super) fn learn(&self, hit: &Hit<'_>, question: Lookup, counted: StepOutcome, asked: Duration) -> Decision {
        let decision = counted.explain(hit);
        if hit.action.releases() {
            // A refusal that overtook it does not hold either.
            self.refunded(question.identity);
        } else if counted.allowed || hit.algorithm.denial_counts(&counted.state, counted.at) {
            // The counter is not what it was when it refused something else.
            self.denials.remove(question.identity);
        } else {
            let (StepOutcome { at, state, .. }, Lookup { identity, refunds }) = (counted, question);
            // What others have taken in advance may be back soon.
            let age = if hit.consistency == Consistency::Leased { self.max_age.min(LEASED) } else { self.max_age };
            let ends = asked.saturating_add(age);
            self.denials.put(identity, Denial { algorithm: *hit.algorithm, refunds, asked, ends, at, state });
        }
        decision
    }

    fn refunds_of(&self, identity: u128) -> &AtomicU32 {
        &self.refunds[identity as usize % REFUNDS]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::{MaxHits, fixed_window::FixedWindow, gcra::Gcra};

    const fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn cache(max_age: Duration) -> DenyCache {
        DenyCache::new(&Settings { max_entries: 8, max_age }).unwrap()
    }

    /// A refusal that was asked for at 0, when the store's clock showed half a minute into its window.
    fn refused(algorithm: &Algorithm, used: u64) -> StepOutcome {
        let (mut state, now) = (State::default(), Micros::from_secs(30));
        let taken = algorithm.step(&mut state, Operation { action: Action::Take, cost: used, now });
        assert!(taken);
        let allowed = algorithm.step(&mut state, Operation { action: Action::Take, cost: 10, now });
        StepOutcome { allowed, action: Action::Take, at: now, state }
    }

    fn known(cache: &DenyCache, hits: &[Hit<'_>], now: Duration) -> Vec<Option<u64>> {
        let questions = hits.iter().map(|hit| cache.lookup(hit, 7)).collect();
        cache.cached(hits, &questions, now).iter().map(|decision| decision.map(|decision| decision.remaining)).collect()
    }

    fn learn(cache: &DenyCache, hit: &Hit<'_>, counted: StepOutcome) {
        let question = cache.lookup(hit, 7);
        cache.learn(hit, question, counted, Duration::ZERO);
    }

    fn minute(limit: u64, count_denied: bool) -> Algorithm {
        FixedWindow::new(MaxHits::hard(limit), Micros::from_secs(60), count_denied).unwrap().into()
    }

    #[test]
    fn a_refusal_holds_until_it_is_old_or_the_counter_lets_something_through() {
        let rule = minute(10, false);
        let hit = |cost| Hit::take(b"k", &rule, cost);
        for (max_age, ends) in [(at(50), at(50)), (Duration::MAX, at(30_000))] {
            let cache = cache(max_age);
            learn(&cache, &hit(10), refused(&rule, 4));
            assert_eq!(known(&cache, &[hit(7)], at(0)), [Some(6)]);
            assert_eq!(known(&cache, &[hit(6)], at(0)), [None], "that would pass");
            let just = ends - Duration::from_micros(1);
            assert_eq!((known(&cache, &[hit(7)], just), known(&cache, &[hit(7)], ends)), (vec![Some(6)], vec![None]));
        }
        // The store's clock is as far on as ours since then, whatever ours shows.
        let cache = cache(at(60_000));
        let (asked, hit) = (at(3_600_000), hit(10));
        cache.learn(&hit, cache.lookup(&hit, 7), refused(&rule, 4), asked);
        let knows = |now| known(&cache, &[hit], now) != [None];
        assert!(knows(asked + at(29_999)) && !knows(asked + at(30_000)), "the next window has begun");
        learn(&cache, &hit, refused(&rule, 4));
        let other = minute(11, false);
        assert_eq!(known(&cache, &[Hit::take(b"k", &other, 8)], at(1)), [None], "another limit");
    }

    #[test]
    fn what_gives_back_ends_it_before_it_is_sent_and_when_it_has_arrived() {
        let (rule, cache) = (minute(10, false), cache(at(50)));
        let hit = Hit::take(b"k", &rule, 10);
        let back = Hit { action: Action::Refund, ..hit };
        learn(&cache, &hit, refused(&rule, 4));
        let question = cache.lookup(&back, 7);
        assert_eq!(known(&cache, &[hit], at(1)), [None]);
        learn(&cache, &hit, refused(&rule, 4));
        assert_eq!(known(&cache, &[hit, back], at(1)), [Some(6), None]);
        learn(&cache, &hit, refused(&rule, 4));
        cache.learn(&back, question, refused(&rule, 4), at(1));
        assert_eq!(known(&cache, &[hit], at(1)), [None]);
        // One that overtakes a refusal.
        let question = cache.lookup(&hit, 7);
        cache.refunded(7);
        cache.learn(&hit, question, refused(&rule, 4), at(0));
        assert_eq!(known(&cache, &[hit], at(1)), [None]);
    }

    #[test]
    fn of_one_counter_nothing_is_known_behind_what_is_asked() {
        let (rule, cache) = (minute(10, false), cache(at(50)));
        let hit = |cost| Hit::take(b"k", &rule, cost);
        learn(&cache, &hit(10), refused(&rule, 4));
        assert_eq!(known(&cache, &[hit(7), hit(1), hit(9)], at(1)), [Some(6), None, None]);
        assert_eq!(known(&cache, &[hit(7), hit(9)], at(1)), [Some(6), Some(6)]);
    }

    #[test]
    fn refusals_that_count_are_not_remembered_but_looks_are_answered() {
        let window = minute(10, true);
        let cache = cache(at(50));
        let (hit, look) = (Hit::take(b"k", &window, 10), Hit { action: Action::Peek, ..Hit::take(b"k", &window, 7) });
        // The refused hit was counted: from now on nothing passes.
        learn(&cache, &hit, refused(&window, 4));
        assert_eq!(known(&cache, &[Hit::take(b"k", &window, 1), look], at(1)), [Some(0), Some(0)]);
        let gcra: Algorithm = Gcra::new(10, Micros::from_secs(60), MaxHits::hard(10), true).unwrap().into();
        learn(&cache, &Hit::take(b"k", &gcra, 10), refused(&gcra, 4));
        assert_eq!(known(&cache, &[Hit::take(b"k", &gcra, 10)], at(1)), [None]);
        assert_eq!(known(&cache, &[hit], at(1)), [None], "nor is what was known before");
    }

    #[test]
    fn nothing_is_remembered_where_nothing_is_to_be() {
        let settings = |max_counters, max_age| Settings { max_entries: max_counters, max_age };
        assert!(DenyCache::new(&settings(0, at(50))).is_none() && DenyCache::new(&settings(8, at(0))).is_none());
    }

    #[test]
    fn what_is_leased_is_asked_for_again_soon() {
        let algorithm: Algorithm = FixedWindow::new(MaxHits::hard(5), Micros::from_secs(60), false).unwrap().into();
        let cache = cache(at(1_000));
        for (consistency, lasts) in [(Consistency::Exact, 1_000), (Consistency::Leased, 50)] {
            let hit = Hit { consistency, ..Hit::take(b"k", &algorithm, 1) };
            let question = cache.lookup(&hit, 1);
            cache.learn(&hit, question, refused(&algorithm, 5), at(0));
            assert!(cache.get(&hit, &question, at(lasts - 1)).is_some());
            assert!(cache.get(&hit, &question, at(lasts)).is_none(), "{consistency:?}");
        }
    }
}
