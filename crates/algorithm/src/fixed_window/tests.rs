//! Decisions of the fixed window in a table, and its properties. `tests/redis/stores.rs` compares it with Redis.

use proptest::prelude::*;

use super::*;

fn minute(limit: u64) -> FixedWindow {
    FixedWindow::new(MaxHits::hard(limit), Micros::from_secs(60), true).unwrap()
}

fn operation(action: Action, cost: u64, seconds: u64) -> Operation {
    Operation { action, cost, now: Micros::from_secs(seconds) }
}

fn apply(limiter: FixedWindow, state: &mut State, operation: Operation) -> Decision {
    let allowed = limiter.step(state, operation);
    limiter.explain(state, operation, allowed)
}

#[test]
fn counts_like_envoyproxy_ratelimit() {
    use Action::{Peek, Refund, Take};
    let limiter = minute(10);
    let mut state = State::default();
    // (action, cost, at) → (allowed, remaining, used, reset in seconds)
    for (action, cost, at, expected) in [
        (Peek, 0, 600, (true, 10, 0, 60)),
        (Take, 8, 601, (true, 2, 8, 59)),
        (Take, 5, 602, (false, 0, 13, 58)), // a denied cost stays counted
        (Take, 1, 603, (false, 0, 14, 57)),
        (Refund, 4, 604, (true, 0, 10, 56)),
        (Peek, 0, 605, (true, 0, 10, 55)),    // a peek exactly at the limit is allowed
        (Refund, 99, 606, (true, 10, 0, 54)), // a refund never exceeds the full limit
        (Take, 10, 659, (true, 0, 10, 1)),
        (Take, 1, 660, (true, 9, 1, 60)), // a new window
        (Take, u64::MAX, 661, (false, 0, MAX_COUNT, 59)),
        (Take, u64::MAX, 661, (false, 0, MAX_COUNT, 59)),
    ] {
        let got = apply(limiter, &mut state, operation(action, cost, at));
        let got = (got.allowed, got.remaining, got.used, got.reset.floor_secs());
        assert_eq!(got, expected, "{action:?} {cost} at {at}");
    }
}

#[test]
fn a_backward_clock_step_neither_grants_hits_nor_blocks_callers() {
    let limiter = minute(1);
    let mut state = State::default();
    assert!(apply(limiter, &mut state, operation(Action::Take, 1, 600)).allowed);
    assert!(!apply(limiter, &mut state, operation(Action::Take, 1, 599)).allowed);
    assert!(!apply(limiter, &mut state, operation(Action::Take, 1, 601)).allowed);
    let mut ahead = State::default();
    assert!(apply(limiter, &mut ahead, operation(Action::Take, 1, 86_400)).allowed);
    assert!(apply(limiter, &mut ahead, operation(Action::Take, 1, 600)).allowed);
}

/// An hour, half an hour after it began. A clock that was ahead has counted in a later hour.
#[test]
fn hits_of_a_clock_that_was_ahead_deny_nothing_after_the_correction() {
    let limiter = FixedWindow::new(MaxHits::hard(1), Micros::from_secs(3_600), true).unwrap();
    let now = 7_200 + 1_800;
    for ahead in [1_801, 3_600, 5_399, 5_400, 6_840, 86_400] {
        let mut state = State::default();
        assert!(apply(limiter, &mut state, operation(Action::Take, 1, now + ahead)).allowed);
        let corrected = apply(limiter, &mut state, operation(Action::Take, 1, now));
        assert_eq!((corrected.allowed, corrected.reset), (true, Micros::from_secs(1_800)), "{ahead} s ahead");
    }
}

/// Within a minute before the stored window begins, its hits can be those of a clock that has stepped back a little.
#[test]
fn a_stored_window_counts_from_a_minute_before_it_begins() {
    let limiter = FixedWindow::new(MaxHits::hard(1), Micros::from_secs(3_600), true).unwrap();
    for (now, is_counted) in [(7_139_999_999, false), (7_140_000_000, true), (7_199_999_999, true)] {
        let mut state = State::default();
        assert!(apply(limiter, &mut state, operation(Action::Take, 1, 7_200)).allowed);
        let take = Operation { action: Action::Take, cost: 1, now: Micros::new(now) };
        let decision = apply(limiter, &mut state, take);
        assert_eq!(decision.allowed, !is_counted, "{now}");
        assert!(decision.reset <= Micros::from_secs(3_660), "{now}: {decision:?}");
    }
}

#[test]
fn rejects_invalid_windows() {
    assert_eq!(FixedWindow::new(MaxHits::hard(1), Micros::ZERO, true), None);
    assert_eq!(FixedWindow::new(MaxHits::hard(1), MAX_PERIOD + Micros::new(1), true), None);
}

proptest! {
    #[test]
    fn no_window_allows_more_than_the_limit(
        limit in 0_u64..20,
        hits in prop::collection::vec((0_u64..5, 0_u64..240), 1..100),
    ) {
        let limiter = minute(limit);
        let mut state = State::default();
        let mut sorted: Vec<_> = hits;
        sorted.sort_by_key(|(_, second)| *second);
        let mut passed = std::collections::HashMap::<u64, u64>::new();
        for (cost, second) in sorted {
            if apply(limiter, &mut state, operation(Action::Take, cost, second)).allowed {
                *passed.entry(second / 60).or_default() += cost;
            }
        }
        prop_assert!(passed.values().all(|hits| *hits <= limit));
    }
}

#[test]
fn hits_count_in_the_last_window_before_the_tags_restart() {
    for number in [WINDOW_TAGS - 2, WINDOW_TAGS - 1, WINDOW_TAGS] {
        let mut state = State::default();
        let take = |second| apply(minute(1), &mut state, operation(Action::Take, 1, second)).allowed;
        let decisions = [60 * number, 60 * number + 59, 60 * (number + 1)].map(take);
        assert_eq!(decisions, [true, false, true], "window {number}");
    }
}

#[test]
fn a_window_of_microseconds_ends() {
    let limiter = FixedWindow::new(MaxHits::hard(1), Micros::new(50), true).unwrap();
    let mut state = State::default();
    let take = |now| limiter.step(&mut state, Operation { action: Action::Take, cost: 1, now: Micros::new(now) });
    assert_eq!([1_000_000, 1_000_049, 1_000_050].map(take), [true, false, true]);
}
