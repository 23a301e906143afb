//! One counter as this instance knows it: what it was when the store was last heard of, and what has been counted here
//! since. No I/O; the time is passed in.
//!
//! Hits are decided by the algorithm's own arithmetic on that, and told to the store a little later, together. Until then
//! others do not know of them, nor is known here what others have counted; so too much can pass, for as long as that
//! takes. What is told counts whether it fits or not, and the answer replaces what was known. What may have arrived, or
//! not, is never told again; what surely has not, is.

use std::time::Duration;

use crate::{
    algorithm::{Action, Algorithm, Decision, Micros, Operation, State},
    store::{Hit, StepOutcome, StoreError},
};

/// Answers overtake each other by less than this.
const OVERTAKEN: Micros = Micros::from_secs(1);

/// What is known of a counter.
#[derive(Default)]
pub(super) struct EventualCounter {
    state: State,
    /// How the store's clock stood when it said so, and when it was asked here.
    at: Micros,
    merged_at: Duration,
    /// Hits that passed here and that nobody has been told of; the first of them came then, by the store's clock.
    pending: u64,
    since: Micros,
    /// Of those that are on their way to the store.
    told: Option<u64>,
    reported_at: Duration,
    asked_for: Duration,
}

impl EventualCounter {
    /// As the store has just described it, when asked at this instant.
    pub(super) fn new(counted: &StepOutcome, asked: Duration) -> Self {
        let (state, at) = (counted.state.clone(), counted.at);
        Self { state, at, merged_at: asked, reported_at: asked, asked_for: asked, ..Self::default() }
    }

    /// Decides a hit. What has been heard `outage` ago says nothing any more.
    pub(super) fn decide(
        &mut self,
        algorithm: &Algorithm,
        hit: &Hit<'_>,
        now: Duration,
        outage: Duration,
    ) -> Option<Decision> {
        if now.saturating_sub(self.merged_at) > outage {
            return None;
        }
        self.asked_for = now;
        let ask = Operation { action: hit.action, cost: hit.cost, now: self.store_time(now) };
        let allowed = algorithm.step(&mut self.state, ask);
        if hit.action == Action::Take && (allowed || algorithm.counts_denied()) {
            if self.pending == 0 {
                self.since = ask.now;
            }
            self.pending = self.pending.saturating_add(hit.cost);
        }
        Some(algorithm.explain(&self.state, ask, allowed))
    }

    /// What to tell the store by now: how many hits, or none, to hear what others have counted; or nothing, when nobody has
    /// asked since.
    pub(super) fn report(&mut self, algorithm: &Algorithm, now: Duration) -> Option<u64> {
        if self.told.is_some() || (self.pending == 0 && self.asked_for <= self.reported_at) {
            return None;
        }
        self.reported_at = now;
        let hits = std::mem::take(&mut self.pending);
        // Of a window that has ended since nobody needs to know.
        let hits = if algorithm.is_over(self.since, self.store_time(now)) { 0 } else { hits };
        self.told = Some(hits);
        Some(hits)
    }

    /// All that nobody has been told of, at the end.
    pub(super) fn unreported(&mut self, algorithm: &Algorithm, now: Duration) -> Option<u64> {
        let hits = std::mem::take(&mut self.pending);
        (hits > 0 && !algorithm.is_over(self.since, self.store_time(now))).then_some(hits)
    }

    /// What became of that; how many hits were perhaps not counted.
    pub(super) fn reported(
        &mut self,
        algorithm: &Algorithm,
        answer: Result<StepOutcome, StoreError>,
        asked: Duration,
        now: Duration,
    ) -> u64 {
        let told = self.told.take().unwrap_or_default();
        match answer {
            Ok(counted) => {
                self.merge(algorithm, &counted, asked, now);
                0
            }
            Err(StoreError::Unavailable) => {
                // It was not even asked.
                self.pending = self.pending.saturating_add(told);
                0
            }
            Err(StoreError::Timeout | StoreError::Rejected | StoreError::Broken) => told,
        }
    }

    /// The store has said what the counter is. What has passed here since counts on.
    pub(super) fn merge(&mut self, algorithm: &Algorithm, counted: &StepOutcome, asked: Duration, now: Duration) {
        // A later answer has overtaken this one; much later it cannot be, but of a clock that was set back.
        if counted.at < self.at && self.at - counted.at < OVERTAKEN {
            return;
        }
        (self.state, self.at, self.merged_at) = (counted.state.clone(), counted.at, asked);
        if self.pending > 0 {
            let ask = Operation { action: Action::Take, cost: self.pending, now: self.store_time(now) };
            algorithm.counting().step(&mut self.state, ask);
        }
    }

    /// Nothing is untold, nothing on its way, and nobody has asked for so long: there is nothing to know.
    pub(super) fn is_idle(&self, since: Duration) -> bool {
        self.pending == 0 && self.told.is_none() && self.asked_for < since
    }

    /// What the store's clock shows, about.
    fn store_time(&self, now: Duration) -> Micros {
        let age = now.saturating_sub(self.merged_at).as_micros();
        self.at + Micros::new(u64::try_from(age).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::{MaxHits, fixed_window::FixedWindow, token_bucket::TokenBucket};

    const OUTAGE: Duration = Duration::from_secs(60);
    /// Of the store's clock: a minute's start.
    const START: u64 = 1_763_672_400_000_000;

    const fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// A counter in the store, which others use as well.
    struct Store {
        algorithm: Algorithm,
        state: State,
    }

    impl Store {
        fn count(&mut self, algorithm: &Algorithm, action: Action, cost: u64, now: Duration) -> StepOutcome {
            let at = Micros::new(START + now.as_micros() as u64);
            let allowed = algorithm.step(&mut self.state, Operation { action, cost, now: at });
            StepOutcome { allowed, action, at, state: self.state.clone() }
        }

        fn known(algorithm: Algorithm, used: u64) -> (Self, EventualCounter) {
            let mut store = Self { algorithm, state: State::default() };
            let counted = store.count(&algorithm, Action::Take, used, at(0));
            (store, EventualCounter::new(&counted, at(0)))
        }

        fn told(&mut self, replica: &mut EventualCounter, hits: u64, now: Duration) {
            let action = if hits > 0 { Action::Take } else { Action::Peek };
            let counted = self.count(&self.algorithm.counting(), action, hits, now);
            assert_eq!(replica.reported(&self.algorithm, Ok(counted), now, now), 0);
        }
    }

    fn window() -> Algorithm {
        FixedWindow::new(MaxHits::hard(100), Micros::from_secs(60), false).unwrap().into()
    }

    fn bucket() -> Algorithm {
        TokenBucket::new(100, Micros::from_secs(1), MaxHits::hard(100), false).unwrap().into()
    }

    fn take(replica: &mut EventualCounter, algorithm: &Algorithm, cost: u64, now: Duration) -> Option<(bool, u64)> {
        let decision = replica.decide(algorithm, &Hit::take(b"k", algorithm, cost), now, OUTAGE)?;
        Some((decision.allowed, decision.remaining))
    }

    #[test]
    fn hits_are_decided_here_and_told_together() {
        let rule = window();
        let (mut store, mut replica) = Store::known(rule, 10);
        assert_eq!(take(&mut replica, &rule, 20, at(1)), Some((true, 70)));
        assert_eq!(take(&mut replica, &rule, 80, at(1)), Some((false, 70)));
        store.count(&rule, Action::Take, 30, at(199));
        assert_eq!(replica.report(&rule, at(200)), Some(20));
        assert_eq!(replica.report(&rule, at(500)), None, "there is no answer yet");
        assert_eq!(take(&mut replica, &rule, 5, at(201)), Some((true, 65)));
        store.told(&mut replica, 20, at(202));
        assert_eq!(
            take(&mut replica, &rule, 0, at(203)),
            Some((true, 35)),
            "what others took, and what came meanwhile"
        );
        assert_eq!(replica.report(&rule, at(402)), Some(5));
        store.told(&mut replica, 5, at(402));
        assert_eq!(replica.report(&rule, at(700)), None, "nobody has asked since");
        take(&mut replica, &rule, 100, at(701));
        assert_eq!(replica.report(&rule, at(702)), Some(0), "to hear what others do");
    }

    #[test]
    fn what_has_passed_counts_whether_it_fits_or_not_and_a_bucket_pays_it_back() {
        let rule = bucket();
        let (mut store, mut replica) = Store::known(rule, 10);
        assert_eq!(take(&mut replica, &rule, 90, at(0)), Some((true, 0)));
        // Meanwhile another instance has let as many through.
        store.count(&rule, Action::Take, 90, at(0));
        let hits = replica.report(&rule, at(200)).unwrap();
        store.told(&mut replica, hits, at(200));
        // 190 hits of 100, less 20 that have drained: nothing passes until the debt is paid.
        let refused = replica.decide(&rule, &Hit::take(b"k", &rule, 1), at(200), OUTAGE).unwrap();
        assert_eq!((refused.allowed, refused.retry_after), (false, Some(Micros::new(710_000))));
        assert_eq!(take(&mut replica, &rule, 1, at(909)), Some((false, 0)));
        assert_eq!(take(&mut replica, &rule, 1, at(910)), Some((true, 0)));
    }

    #[test]
    fn without_the_store_it_goes_on_for_a_while_and_tells_once() {
        let rule = window();
        let (mut store, mut replica) = Store::known(rule, 0);
        take(&mut replica, &rule, 10, at(1));
        assert_eq!(replica.report(&rule, at(200)), Some(10));
        assert_eq!(replica.reported(&rule, Err(StoreError::Unavailable), at(200), at(201)), 0, "it was not asked");
        take(&mut replica, &rule, 5, at(300));
        assert_eq!(replica.report(&rule, at(400)), Some(15));
        assert_eq!(replica.reported(&rule, Err(StoreError::Timeout), at(400), at(420)), 15, "perhaps it was counted");
        assert_eq!(take(&mut replica, &rule, 1, at(500)), Some((true, 84)));
        assert_eq!(replica.report(&rule, at(600)), Some(1));
        store.told(&mut replica, 1, at(600));
        assert_eq!(take(&mut replica, &rule, 0, at(601)), Some((true, 99)), "what the store says holds");
        let heard = at(600);
        assert!(take(&mut replica, &rule, 1, heard + OUTAGE).is_some());
        assert_eq!(take(&mut replica, &rule, 1, heard + OUTAGE + at(1)), None);
    }

    #[test]
    fn an_answer_that_was_overtaken_says_nothing() {
        let rule = window();
        let (mut store, mut replica) = Store::known(rule, 0);
        let early = store.count(&rule, Action::Take, 1, at(2_000));
        let late = store.count(&rule, Action::Take, 1, at(2_001));
        replica.merge(&rule, &late, at(2_000), at(2_002));
        replica.merge(&rule, &early, at(2_000), at(2_002));
        assert_eq!(take(&mut replica, &rule, 0, at(2_002)), Some((true, 98)));
        let set_back = store.count(&rule, Action::Take, 1, at(1_001));
        replica.merge(&rule, &set_back, at(2_002), at(2_003));
        assert_eq!(take(&mut replica, &rule, 0, at(2_003)), Some((true, 97)));
    }

    #[test]
    fn of_a_window_that_has_ended_nobody_is_told() {
        let rule = window();
        let (_, mut replica) = Store::known(rule, 0);
        take(&mut replica, &rule, 10, at(59_900));
        assert_eq!(replica.report(&rule, at(60_001)), Some(0));
        let (_, mut replica) = Store::known(rule, 0);
        take(&mut replica, &rule, 10, at(59_900));
        assert_eq!(replica.unreported(&rule, at(60_001)), None);
        let (_, mut replica) = Store::known(rule, 0);
        take(&mut replica, &rule, 10, at(100));
        assert!(!replica.is_idle(at(101)), "it is to be told");
        assert_eq!(
            (replica.unreported(&rule, at(200)), replica.is_idle(at(100)), replica.is_idle(at(101))),
            (Some(10), false, true)
        );
    }
}
