//! [`CounterPart`] and [`forecast`]: what a counter stores, and how its remaining hits will rise. For people who look at
//! one counter; decisions use neither.

use super::{Action, Algorithm, Decision, Micros, Operation, State};

/// Maximum number of points of a forecast.
const MAX_POINTS: usize = 64;

/// Hits that a counter stores together, and the time for which they count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterPart {
    /// Instant from which the hits count.
    pub from: Micros,
    /// Instant at which they stop counting.
    pub until: Micros,
    /// Number of hits.
    pub hits: u64,
}

/// Returns the remaining hits from `now` until the full limit is available again, if no other requests arrive.
///
/// Each point is a time after `now` with the hits that remain from then on. The first point is `now` itself. If the hits
/// rise in more than 64 steps, some steps are merged.
#[must_use]
pub fn forecast(algorithm: &Algorithm, state: &State, now: Micros) -> Vec<(Micros, u64)> {
    let mut decision = peek(algorithm, state, now);
    let end = now + decision.reset;
    let min_step = Micros::new(decision.reset.get().div_ceil(MAX_POINTS as u64 - 2));
    let mut points = vec![(Micros::ZERO, decision.remaining)];
    let mut at = now;
    while at < end && points.len() < MAX_POINTS {
        let next = if decision.next > Micros::ZERO { decision.next } else { end - at };
        at = (at + next.max(min_step)).min(end);
        decision = peek(algorithm, state, at);
        points.push((at - now, decision.remaining));
    }
    points.dedup_by_key(|(_, remaining)| *remaining);
    points
}

/// Returns the decision for one hit at an instant, without changing the state.
fn peek(algorithm: &Algorithm, state: &State, now: Micros) -> Decision {
    algorithm.apply(&mut state.clone(), Operation { action: Action::Peek, cost: 1, now })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        MaxHits,
        concurrency::Concurrency,
        fixed_window::FixedWindow,
        sliding_log::SlidingLog,
        sliding_window::{SlidingWindow, WindowEdge},
        token_bucket::TokenBucket,
    };

    const NOW: Micros = Micros::from_secs(1_000_000_020);

    fn after(algorithm: &Algorithm, takes: &[u64]) -> State {
        let mut state = State::default();
        for second in takes {
            let now = Micros::from_secs(1_000_000_000 + second);
            assert!(algorithm.step(&mut state, Operation { action: Action::Take, cost: 1, now }));
        }
        state
    }

    fn seconds(points: &[(Micros, u64)]) -> Vec<(u64, u64)> {
        points.iter().map(|(after, remaining)| (after.floor_secs(), *remaining)).collect()
    }

    fn parts(algorithm: &Algorithm, state: &State) -> Vec<(u64, u64, u64)> {
        let start = 1_000_000_000;
        let part = |part: CounterPart| (part.from.floor_secs() - start, part.until.floor_secs() - start, part.hits);
        algorithm.parts(state, NOW).into_iter().map(part).collect()
    }

    #[test]
    fn a_window_becomes_free_at_its_end() {
        let limit: Algorithm = FixedWindow::new(MaxHits::hard(3), Micros::from_secs(40), true).unwrap().into();
        let state = after(&limit, &[0, 10]);
        assert_eq!(parts(&limit, &state), [(0, 40, 2)]);
        assert_eq!(seconds(&forecast(&limit, &state, NOW)), [(0, 1), (20, 3)]);
        assert_eq!(forecast(&limit, &State::default(), NOW), [(Micros::ZERO, 3)]);
        assert_eq!(limit.parts(&State::default(), NOW), []);
    }

    #[test]
    fn entries_of_a_log_expire_one_after_the_other() {
        let limit: Algorithm =
            SlidingLog::new(MaxHits::hard(3), Micros::from_secs(40), Micros::ZERO, false).unwrap().into();
        let state = after(&limit, &[0, 10, 15]);
        assert_eq!(parts(&limit, &state), [(0, 40, 1), (10, 50, 1), (15, 55, 1)]);
        assert_eq!(seconds(&forecast(&limit, &state, NOW)), [(0, 0), (20, 1), (30, 2), (35, 3)]);
    }

    #[test]
    fn counters_of_a_sliding_window_are_listed_with_their_times() {
        let window = SlidingWindow::new(MaxHits::hard(5), Micros::from_secs(40), 2, WindowEdge::Strict, false);
        let limit: Algorithm = window.unwrap().into();
        let state = after(&limit, &[1, 2, 20]);
        assert_eq!(parts(&limit, &state), [(0, 60, 2), (20, 80, 1)]);
        assert_eq!(seconds(&forecast(&limit, &state, NOW)), [(0, 2), (40, 4), (60, 5)]);
    }

    #[test]
    fn slots_are_free_when_their_holds_end() {
        let limit: Algorithm = Concurrency::new(MaxHits::hard(2), Micros::from_secs(30)).unwrap().into();
        let state = after(&limit, &[0, 12]);
        assert_eq!(parts(&limit, &state), [(0, 30, 1), (12, 42, 1)]);
        assert_eq!(seconds(&forecast(&limit, &state, NOW)), [(0, 0), (10, 1), (22, 2)]);
    }

    #[test]
    fn a_bucket_rises_hit_by_hit_and_a_large_one_in_merged_steps() {
        let bucket = |requests, burst| -> Algorithm {
            TokenBucket::new(requests, Micros::from_secs(60), MaxHits::hard(burst), false).unwrap().into()
        };
        let small = bucket(6, 3);
        let state = after(&small, &[20, 20, 20]);
        assert_eq!(seconds(&forecast(&small, &state, NOW)), [(0, 0), (10, 1), (20, 2), (30, 3)]);
        assert_eq!(small.parts(&state, NOW), []);
        let large = bucket(60_000, 60_000);
        let mut state = State::default();
        assert!(large.step(&mut state, Operation { action: Action::Take, cost: 60_000, now: NOW }));
        let points = forecast(&large, &state, NOW);
        assert!(points.len() <= MAX_POINTS && points.len() > MAX_POINTS / 2, "{}", points.len());
        assert!(points.is_sorted_by(|one, other| one.0 < other.0 && one.1 < other.1), "{points:?}");
        assert_eq!(points.last(), Some(&(Micros::from_secs(60), 60_000)));
    }

    #[test]
    fn a_forecast_uses_nearly_all_points_before_it_merges_steps() {
        let bucket = TokenBucket::new(60_000, Micros::from_secs(60), MaxHits::hard(60_000), false);
        let bucket: Algorithm = bucket.unwrap().into();
        let mut state = State::default();
        assert!(bucket.step(&mut state, Operation { action: Action::Take, cost: 60_000, now: NOW }));
        assert_eq!(forecast(&bucket, &state, NOW).len(), MAX_POINTS - 1);
    }
}
