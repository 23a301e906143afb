//! Eventual counting: an instance decides a hit from its own copy of a counter and passes the counted hits on later.
//!
//! [`PendingHits`] are the hits that this instance has counted and not passed on yet. [`add_hits`] adds hits that were
//! counted elsewhere to a copy. Eventual counters use both to synchronise with Redis (crate `local`), and the memory
//! store uses both to exchange hits with peers (crate `peers`).

use sluicegate_algorithm::{Action, Algorithm, Micros, Operation, State};

/// Maximum time by which hits are added before the present. A state appears to be written by a wrong clock if it is
/// ahead by more than [`CLOCK_SLACK`](sluicegate_algorithm::CLOCK_SLACK), and this is well below.
const MAX_AGE: Micros = Micros::from_secs(30);

/// Hits of one counter that this instance has counted and not passed on yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PendingHits {
    /// Number of hits; negative if more hits were refunded than taken.
    pub hits: i64,
    /// Time of the last hit.
    pub counted_at: Micros,
}

impl PendingHits {
    /// Adds the hits of an operation. Returns `false` if the algorithm has not counted them.
    pub fn count(&mut self, algorithm: &Algorithm, operation: Operation, allowed: bool) -> bool {
        let cost = i64::try_from(operation.cost).unwrap_or(i64::MAX);
        let hits = match operation.action {
            Action::Take if allowed || algorithm.counts_denied() => cost,
            Action::Refund | Action::RollBack(_) => -cost,
            Action::Take | Action::Peek => return false,
        };
        self.add(algorithm, Self { hits, counted_at: operation.now });
        hits != 0
    }

    /// Adds later hits. The earlier ones are dropped if they no longer count.
    pub fn add(&mut self, algorithm: &Algorithm, later: Self) {
        if self.hits != 0 && algorithm.has_expired(self.counted_at, later.counted_at) {
            self.hits = 0;
        }
        self.hits = self.hits.saturating_add(later.hits);
        self.counted_at = later.counted_at;
    }

    /// Takes the hits that still count.
    pub fn take(&mut self, algorithm: &Algorithm, now: Micros) -> Self {
        let taken = std::mem::take(self);
        if algorithm.has_expired(taken.counted_at, now) { Self { hits: 0, ..taken } } else { taken }
    }
}

/// Adds hits that were counted elsewhere, even above the limit. Negative hits are refunded.
///
/// Hits that no longer count are ignored. Returns whether the state may have changed.
pub fn add_hits(algorithm: &Algorithm, state: &mut State, pending: PendingHits, now: Micros) -> bool {
    let PendingHits { hits, counted_at } = pending;
    if hits == 0 || algorithm.has_expired(counted_at, now) {
        return false;
    }
    let mut at = counted_at.clamp(now - MAX_AGE, now);
    if at < now && algorithm.is_ahead(state, now) {
        // Seen from the earlier time, the state could be too far ahead. For a bucket, both times have the same result,
        // but its maximum debt would be that of the earlier time.
        at = now;
    }
    let action = if hits > 0 { Action::Take } else { Action::Refund };
    algorithm.recording().step(state, Operation { action, cost: hits.unsigned_abs(), now: at });
    true
}

#[cfg(test)]
mod tests {
    use sluicegate_algorithm::{
        MaxHits,
        fixed_window::FixedWindow,
        sliding_log::SlidingLog,
        sliding_window::{SlidingWindow, WindowEdge},
        token_bucket::TokenBucket,
    };

    use super::*;

    /// The beginning of a minute.
    const START: u64 = 1_763_672_400;

    fn at(millis: u64) -> Micros {
        Micros::new(START * 1_000_000 + millis * 1_000)
    }

    fn pending(hits: i64, millis: u64) -> PendingHits {
        PendingHits { hits, counted_at: at(millis) }
    }

    fn window() -> Algorithm {
        FixedWindow::new(MaxHits::hard(10), Micros::from_secs(1), false).unwrap().into()
    }

    fn bucket() -> Algorithm {
        TokenBucket::new(10, Micros::from_secs(1), MaxHits::hard(10), false).unwrap().into()
    }

    fn used(algorithm: &Algorithm, state: &State, millis: u64) -> u64 {
        algorithm.explain(state, Operation { action: Action::Peek, cost: 0, now: at(millis) }, true).used
    }

    #[test]
    fn only_counted_hits_are_pending() {
        let operation = |action, cost, millis| Operation { action, cost, now: at(millis) };
        let mut hits = PendingHits::default();
        assert!(hits.count(&window(), operation(Action::Take, 3, 0), true));
        assert!(!hits.count(&window(), operation(Action::Take, 8, 1), false), "a denied take is not counted");
        assert!(!hits.count(&window(), operation(Action::Peek, 1, 2), true));
        assert!(!hits.count(&window(), operation(Action::Take, 0, 2), true));
        assert!(hits.count(&window(), operation(Action::Refund, 1, 3), true));
        assert_eq!(hits, pending(2, 3));
        let counts_denied = FixedWindow::new(MaxHits::hard(1), Micros::from_secs(1), true).unwrap().into();
        assert!(hits.count(&counts_denied, operation(Action::Take, 8, 4), false));
        assert_eq!(hits.take(&window(), at(999)), pending(10, 4));
        assert_eq!(hits, PendingHits::default());
    }

    #[test]
    fn hits_of_an_ended_window_are_dropped_and_later_ones_kept() {
        let mut hits = pending(3, 990);
        hits.add(&window(), pending(2, 1_010));
        assert_eq!(hits, pending(2, 1_010));
        assert_eq!(hits.take(&window(), at(2_000)).hits, 0);
    }

    #[test]
    fn hits_count_at_the_time_at_which_they_were_counted() {
        let mut state = State::default();
        assert!(add_hits(&bucket(), &mut state, pending(5, 0), at(300)));
        assert_eq!(used(&bucket(), &state, 300), 2, "three of five have drained");
        let mut state = State::default();
        assert!(!add_hits(&window(), &mut state, pending(5, 900), at(1_000)), "their window has ended");
        assert!(add_hits(&window(), &mut state, pending(15, 1_000), at(1_900)));
        assert!(add_hits(&window(), &mut state, pending(-1, 1_000), at(1_900)));
        assert!(!add_hits(&window(), &mut state, pending(0, 1_000), at(1_900)));
        assert_eq!(used(&window(), &state, 1_950), 14, "hits count above the limit, and refunds subtract");
    }

    /// A bucket drains while an instance counts, so it can allow more hits in an interval than the bucket holds.
    #[test]
    fn more_hits_than_a_bucket_holds_all_count() {
        let mut state = State::default();
        assert!(add_hits(&bucket(), &mut state, pending(25, 0), at(0)));
        assert_eq!((used(&bucket(), &state, 0), used(&bucket(), &state, 1_000)), (25, 15));
        assert!(add_hits(&bucket(), &mut state, pending(-12, 1_000), at(1_000)));
        assert_eq!(used(&bucket(), &state, 1_000), 3);
        assert!(add_hits(&bucket(), &mut state, pending(i64::MAX, 1_000), at(1_000)));
        assert_eq!(used(&bucket(), &state, 1_000), 610, "the maximum debt drains in a minute more than a full bucket");
    }

    /// Of two peers that were absent for a minute, the hits of the second one found a bucket deep in debt.
    #[test]
    fn old_hits_count_up_to_the_maximum_debt_of_the_present() {
        let bucket: Algorithm = TokenBucket::new(1, Micros::from_secs(6), MaxHits::hard(14), false).unwrap().into();
        let mut state = State::default();
        assert!(add_hits(&bucket, &mut state, pending(13, 75_000), at(75_000)));
        assert!(add_hits(&bucket, &mut state, pending(8, 0), at(75_000)));
        assert_eq!(used(&bucket, &state, 75_000), 21);
    }

    #[test]
    fn old_hits_do_not_erase_those_of_a_clock_that_has_stepped_back() {
        let log = SlidingLog::new(MaxHits::hard(10), Micros::from_secs(10), Micros::ZERO, false).unwrap().into();
        let sliding = SlidingWindow::new(MaxHits::hard(10), Micros::from_secs(10), 10, WindowEdge::Strict, false);
        for algorithm in [log, sliding.unwrap().into()] {
            let mut state = State::default();
            assert!(add_hits(&algorithm, &mut state, pending(2, 69_000), at(69_000)));
            assert!(add_hits(&algorithm, &mut state, pending(1, 1_000), at(10_000)));
            assert_eq!(used(&algorithm, &state, 12_000), 3, "{algorithm:?}");
        }
    }

    #[test]
    fn a_time_far_away_is_clamped_and_erases_nothing() {
        for algorithm in [window(), bucket()] {
            for (hits, wrong) in [(4, 0), (4, u64::MAX), (-1, 0), (0, 0)] {
                let mut state = State::default();
                // A bucket with the maximum debt is the state furthest ahead of the clock.
                add_hits(&algorithm, &mut state, pending(1_000, 90_000), at(90_000));
                let before = used(&algorithm, &state, 90_000);
                let wrong = PendingHits { hits, counted_at: Micros::new(wrong) };
                add_hits(&algorithm, &mut state, wrong, at(90_000));
                let after = used(&algorithm, &state, 90_000);
                assert!(after + 1 >= before && after <= before + 4, "{algorithm:?} {wrong:?}: {before}, {after}");
            }
        }
        let mut state = State::default();
        add_hits(&bucket(), &mut state, PendingHits { hits: 4, counted_at: Micros::new(u64::MAX) }, at(0));
        assert_eq!(used(&bucket(), &state, 0), 4);
    }
}
