//! [`EventualCounter`]: a counter that is decided locally, from its last state in the store and the hits counted here
//! since. The module does no I/O, and the time is a parameter.
//!
//! Until the next report, other instances do not count this instance's hits, and this instance does not count theirs.
//! Together they can admit more than the limit in that time.
//!
//! # Transitions
//!
//! - **Count** ([`EventualCounter::decide`]): the algorithm decides a hit from the local state. Counted hits are
//!   pending.
//! - **Report** ([`EventualCounter::begin_report`]): the pending hits are sent to the store together. The store counts
//!   them even above the limit.
//! - **Complete** ([`EventualCounter::finish_report`]): if the store answered, its state is merged. If the call was not
//!   sent, the hits are pending again. If the store may have counted the hits, they are never reported again.
//! - **Merge** ([`EventualCounter::merge`]): the store's state replaces the local one, and the pending hits are added.
//! - **Drain** ([`EventualCounter::drain`]): the pending hits are taken for a last report at shutdown.

use std::time::Duration;

use sluicegate_algorithm::{Algorithm, Decision, Micros, Operation, State};
use sluicegate_store::{
    Counter, Hit, StepOutcome, StoreError,
    pending::{PendingHits, add_hits},
};

/// Maximum time by which one answer can overtake another.
const MAX_REORDERING: Micros = Micros::from_secs(1);

/// The local copy of a counter.
#[derive(Default)]
pub(crate) struct EventualCounter {
    state: State,
    /// Time of the state by the store's clock, and the local time at which the store was called for it.
    step_time: Micros,
    called_at: Duration,
    /// Hits counted here but not reported. Their time is by the store's clock.
    pending: PendingHits,
    /// Hits of the report in progress.
    in_flight: Option<PendingHits>,
    reported_at: Duration,
    last_used: Duration,
}

impl EventualCounter {
    /// Creates a copy from the outcome of a store call that was sent at `called_at`.
    pub(crate) fn new(outcome: &StepOutcome, called_at: Duration) -> Self {
        Self {
            state: outcome.state.clone(),
            step_time: outcome.at,
            called_at,
            reported_at: called_at,
            last_used: called_at,
            ..Self::default()
        }
    }

    /// Decides a hit. Returns `None` if the state is older than `max_staleness`.
    pub(crate) fn decide(
        &mut self,
        algorithm: &Algorithm,
        hit: &Hit<&Counter>,
        now: Duration,
        max_staleness: Duration,
    ) -> Option<Decision> {
        if now.saturating_sub(self.called_at) > max_staleness {
            return None;
        }
        self.last_used = now;
        let operation = Operation { action: hit.action, cost: hit.cost, now: self.store_time(now) };
        let allowed = algorithm.step(&mut self.state, operation);
        self.pending.count(algorithm, operation, allowed);
        Some(algorithm.explain(&self.state, operation, allowed))
    }

    /// Begins a report and returns its number of hits; 0 only reads the state, for the hits of other instances.
    ///
    /// Returns `None` if a report is in progress, or if the counter has not been used since the last one.
    pub(crate) fn begin_report(&mut self, algorithm: &Algorithm, now: Duration) -> Option<u64> {
        if self.in_flight.is_some() || (self.pending.hits == 0 && self.last_used <= self.reported_at) {
            return None;
        }
        self.reported_at = now;
        let reported = self.pending.take(algorithm, self.store_time(now));
        self.in_flight = Some(reported);
        Some(reported.hits.unsigned_abs())
    }

    /// Takes the pending hits for a last report. Returns `None` if there are none or their window has ended.
    pub(crate) fn drain(&mut self, algorithm: &Algorithm, now: Duration) -> Option<u64> {
        let hits = self.pending.take(algorithm, self.store_time(now)).hits.unsigned_abs();
        (hits > 0).then_some(hits)
    }

    /// Completes a report and returns the number of its hits that may not have been counted.
    pub(crate) fn finish_report(
        &mut self,
        algorithm: &Algorithm,
        answer: Result<StepOutcome, StoreError>,
        called_at: Duration,
        now: Duration,
    ) -> u64 {
        let reported = self.in_flight.take().unwrap_or_default();
        match answer {
            Ok(outcome) => {
                self.merge(algorithm, &outcome, called_at, now);
                0
            }
            Err(StoreError::Unavailable) => {
                // The call was not sent.
                let later = std::mem::replace(&mut self.pending, reported);
                if later.hits != 0 {
                    self.pending.add(algorithm, later);
                }
                0
            }
            Err(StoreError::Timeout | StoreError::Rejected | StoreError::Broken | StoreError::Missing) => {
                reported.hits.unsigned_abs()
            }
        }
    }

    /// Replaces the state with the store's, and adds the pending hits. Ignores an outcome that a later one has
    /// overtaken.
    pub(crate) fn merge(&mut self, algorithm: &Algorithm, outcome: &StepOutcome, called_at: Duration, now: Duration) {
        // A slightly older outcome was overtaken by a later one. A much older one means that the clock was set back.
        if outcome.at < self.step_time && self.step_time - outcome.at < MAX_REORDERING {
            return;
        }
        self.state = outcome.state.clone();
        self.step_time = outcome.at;
        self.called_at = called_at;
        let now = self.store_time(now);
        add_hits(algorithm, &mut self.state, self.pending, now);
    }

    /// Returns `true` if no hits are pending or in flight, and no hit was decided since `since`.
    pub(crate) fn is_idle(&self, since: Duration) -> bool {
        self.pending.hits == 0 && self.in_flight.is_none() && self.last_used < since
    }

    /// Returns the approximate time of the store's clock.
    fn store_time(&self, now: Duration) -> Micros {
        let age = now.saturating_sub(self.called_at).as_micros();
        self.step_time + Micros::new(u64::try_from(age).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use sluicegate_algorithm::{Action, MaxHits, fixed_window::FixedWindow, token_bucket::TokenBucket};

    use super::*;

    const MAX_STALENESS: Duration = Duration::from_secs(60);
    /// Time of the store's clock at the start, in microseconds: the beginning of a minute.
    const START: u64 = 1_763_672_400_000_000;

    const fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// A counter in the store, shared with other instances.
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

        fn with_counter(algorithm: Algorithm, used: u64) -> (Self, EventualCounter) {
            let mut store = Self { algorithm, state: State::default() };
            let outcome = store.count(&algorithm, Action::Take, used, at(0));
            (store, EventualCounter::new(&outcome, at(0)))
        }

        fn report(&mut self, counter: &mut EventualCounter, hits: u64, now: Duration) {
            let action = if hits > 0 { Action::Take } else { Action::Peek };
            let outcome = self.count(&self.algorithm.recording(), action, hits, now);
            assert_eq!(counter.finish_report(&self.algorithm, Ok(outcome), now, now), 0);
        }
    }

    fn window() -> Algorithm {
        FixedWindow::new(MaxHits::hard(100), Micros::from_secs(60), false).unwrap().into()
    }

    fn bucket() -> Algorithm {
        TokenBucket::new(100, Micros::from_secs(1), MaxHits::hard(100), false).unwrap().into()
    }

    fn take(counter: &mut EventualCounter, algorithm: &Algorithm, cost: u64, now: Duration) -> Option<(bool, u64)> {
        let decision = counter.decide(algorithm, &Counter::new(b"k", *algorithm).take(cost), now, MAX_STALENESS)?;
        Some((decision.allowed, decision.remaining))
    }

    #[test]
    fn hits_are_decided_locally_and_reported_together() {
        let rule = window();
        let (mut store, mut counter) = Store::with_counter(rule, 10);
        assert_eq!(take(&mut counter, &rule, 20, at(1)), Some((true, 70)));
        assert_eq!(take(&mut counter, &rule, 80, at(1)), Some((false, 70)));
        store.count(&rule, Action::Take, 30, at(199));
        assert_eq!(counter.begin_report(&rule, at(200)), Some(20));
        assert_eq!(counter.begin_report(&rule, at(500)), None, "a report is in progress");
        assert_eq!(take(&mut counter, &rule, 5, at(201)), Some((true, 65)));
        store.report(&mut counter, 20, at(202));
        assert_eq!(
            take(&mut counter, &rule, 0, at(203)),
            Some((true, 35)),
            "hits of other instances, and hits during the report"
        );
        assert_eq!(counter.begin_report(&rule, at(402)), Some(5));
        store.report(&mut counter, 5, at(402));
        assert_eq!(counter.begin_report(&rule, at(700)), None, "the counter has not been used since");
        take(&mut counter, &rule, 100, at(701));
        assert_eq!(counter.begin_report(&rule, at(702)), Some(0), "a peek for the hits of other instances");
    }

    #[test]
    fn reported_hits_count_above_the_limit_and_a_bucket_goes_into_debt() {
        let rule = bucket();
        let (mut store, mut counter) = Store::with_counter(rule, 10);
        assert_eq!(take(&mut counter, &rule, 90, at(0)), Some((true, 0)));
        // Meanwhile another instance has admitted 90 hits as well.
        store.count(&rule, Action::Take, 90, at(0));
        let hits = counter.begin_report(&rule, at(200)).unwrap();
        store.report(&mut counter, hits, at(200));
        // 190 hits of 100, less 20 that have drained: all hits are denied until the debt has drained.
        let denial = counter.decide(&rule, &Counter::new(b"k", rule).take(1), at(200), MAX_STALENESS).unwrap();
        assert_eq!((denial.allowed, denial.retry_after), (false, Some(Micros::new(710_000))));
        assert_eq!(take(&mut counter, &rule, 1, at(909)), Some((false, 0)));
        assert_eq!(take(&mut counter, &rule, 1, at(910)), Some((true, 0)));
    }

    #[test]
    fn without_the_store_decisions_continue_until_max_staleness() {
        let rule = window();
        let (mut store, mut counter) = Store::with_counter(rule, 0);
        take(&mut counter, &rule, 10, at(1));
        assert_eq!(counter.begin_report(&rule, at(200)), Some(10));
        assert_eq!(
            counter.finish_report(&rule, Err(StoreError::Unavailable), at(200), at(201)),
            0,
            "the call was not sent"
        );
        take(&mut counter, &rule, 5, at(300));
        assert_eq!(counter.begin_report(&rule, at(400)), Some(15));
        assert_eq!(
            counter.finish_report(&rule, Err(StoreError::Timeout), at(400), at(420)),
            15,
            "the hits may have been counted"
        );
        assert_eq!(take(&mut counter, &rule, 1, at(500)), Some((true, 84)));
        assert_eq!(counter.begin_report(&rule, at(600)), Some(1));
        store.report(&mut counter, 1, at(600));
        assert_eq!(take(&mut counter, &rule, 0, at(601)), Some((true, 99)), "the store's state applies");
        let last_sync = at(600);
        assert!(take(&mut counter, &rule, 1, last_sync + MAX_STALENESS).is_some());
        assert_eq!(take(&mut counter, &rule, 1, last_sync + MAX_STALENESS + at(1)), None);
    }

    #[test]
    fn an_overtaken_answer_is_ignored() {
        let rule = window();
        let (mut store, mut counter) = Store::with_counter(rule, 0);
        let early = store.count(&rule, Action::Take, 1, at(2_000));
        let late = store.count(&rule, Action::Take, 1, at(2_001));
        counter.merge(&rule, &late, at(2_000), at(2_002));
        counter.merge(&rule, &early, at(2_000), at(2_002));
        assert_eq!(take(&mut counter, &rule, 0, at(2_002)), Some((true, 98)));
        let set_back = store.count(&rule, Action::Take, 1, at(1_001));
        counter.merge(&rule, &set_back, at(2_002), at(2_003));
        assert_eq!(take(&mut counter, &rule, 0, at(2_003)), Some((true, 97)));
    }

    #[test]
    fn hits_of_an_ended_window_are_not_reported() {
        let rule = window();
        let (_, mut counter) = Store::with_counter(rule, 0);
        take(&mut counter, &rule, 10, at(59_900));
        assert_eq!(counter.begin_report(&rule, at(60_001)), Some(0));
        let (_, mut counter) = Store::with_counter(rule, 0);
        take(&mut counter, &rule, 10, at(59_900));
        take(&mut counter, &rule, 3, at(60_000));
        assert_eq!(counter.begin_report(&rule, at(60_001)), Some(3), "the hits of the new window still count");
        counter.finish_report(&rule, Err(StoreError::Unavailable), at(60_001), at(60_002));
        let later = Counter::new(b"k", rule);
        assert!(counter.decide(&rule, &later.take(2), at(120_000), 2 * MAX_STALENESS).is_some());
        assert_eq!(counter.begin_report(&rule, at(120_001)), Some(2), "the call was not sent in time");
        let (_, mut counter) = Store::with_counter(rule, 0);
        take(&mut counter, &rule, 10, at(59_900));
        assert_eq!(counter.drain(&rule, at(60_001)), None);
        let (_, mut counter) = Store::with_counter(rule, 0);
        take(&mut counter, &rule, 10, at(100));
        assert!(!counter.is_idle(at(101)), "10 hits are pending");
        assert_eq!(
            (counter.drain(&rule, at(200)), counter.is_idle(at(100)), counter.is_idle(at(101))),
            (Some(10), false, true)
        );
    }

    #[test]
    fn the_last_of_two_answers_of_the_same_time_applies() {
        let rule = window();
        let (mut store, mut counter) = Store::with_counter(rule, 0);
        for _ in 0..2 {
            let outcome = store.count(&rule, Action::Take, 1, at(1));
            counter.merge(&rule, &outcome, at(1), at(2));
        }
        assert_eq!(take(&mut counter, &rule, 0, at(2)), Some((true, 98)));
    }
}
