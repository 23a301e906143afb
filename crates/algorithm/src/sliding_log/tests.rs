//! Properties of the sliding log in addition to the common ones (`laws.rs`) and the vectors (`tests/golden`).

use proptest::prelude::*;

use super::*;

const START: u64 = 1_763_672_400_000_000;

fn take(limiter: &SlidingLog, state: &mut State, cost: u64, now: u64) -> Decision {
    let operation = Operation { action: Action::Take, cost, now: Micros::new(now) };
    let allowed = limiter.step(state, operation);
    limiter.explain(state, operation, allowed)
}

/// rolling-rate-limiter once returned the shorter of the two waits:
/// <https://github.com/classdojo/rolling-rate-limiter>.
#[test]
fn retry_after_respects_both_the_window_and_the_interval() {
    let (window, interval) = (Micros::from_secs(60), Micros::from_secs(5));
    let limiter = SlidingLog::new(MaxHits::hard(2), window, interval, false).unwrap();
    let mut state = State::default();
    assert!(take(&limiter, &mut state, 1, START).allowed);
    let wait = |decision: Decision| decision.retry_after.map(Micros::floor_secs);
    assert_eq!(wait(take(&limiter, &mut state, 1, START + 1_000_000)), Some(4));
    assert!(take(&limiter, &mut state, 1, START + 57_000_000).allowed);
    // The first hit expires in 2 s, the interval ends in 4 s.
    assert_eq!(wait(take(&limiter, &mut state, 1, START + 58_000_000)), Some(4));
}

#[test]
fn a_caller_that_retries_stays_denied_if_denied_hits_count() {
    let limiter = SlidingLog::new(MaxHits::hard(3), Micros::from_secs(60), Micros::ZERO, true).unwrap();
    let mut state = State::default();
    for second in 0..200 {
        let decision = take(&limiter, &mut state, 1, START + second * 1_000_000);
        assert_eq!(decision.allowed, second < 3, "second {second}");
        assert!(state.as_bytes().len() <= 3 * ENTRY_BYTES, "the log does not grow above the limit");
    }
    // The newest three hits count. The oldest of them is of second 197 and expires at 257.
    assert_eq!(
        take(&limiter, &mut state, 1, START + 256_000_000).retry_after,
        Some(Micros::from_secs(2 + 60 - 58 - 2))
    );
}

#[test]
fn rejects_invalid_parameters() {
    let (minute, zero) = (Micros::from_secs(60), Micros::ZERO);
    assert_eq!(SlidingLog::new(MaxHits::hard(1_001), minute, zero, false), None);
    assert_eq!(SlidingLog::new(MaxHits::soft(1_000, 1), minute, zero, false), None);
    assert_eq!(SlidingLog::new(MaxHits::hard(1), zero, zero, false), None);
    assert_eq!(SlidingLog::new(MaxHits::hard(1), minute, minute + Micros::new(1), false), None);
}

proptest! {
    #[test]
    fn a_decision_depends_on_exactly_the_hits_in_the_window(limit in 1_u64..12, hits in prop::collection::vec((1_u64..5, 0_u64..20_000_000), 1..80)) {
        let limiter = SlidingLog::new(MaxHits::hard(limit), Micros::from_secs(60), Micros::ZERO, false).unwrap();
        let (mut state, mut now, mut passed) = (State::default(), START, Vec::new());
        for (cost, later) in hits {
            now += later;
            let inside = passed.iter().filter(|(at, _)| *at > now - 60_000_000).map(|(_, cost)| cost).sum::<u64>();
            let decision = take(&limiter, &mut state, cost, now);
            prop_assert_eq!(decision.allowed, inside + cost <= limit);
            if decision.allowed {
                passed.push((now, cost));
            }
        }
    }
}

#[test]
fn an_invalid_limit_is_rejected_with_the_keyword_at_fault() {
    let window = Micros::from_secs(60);
    let valid = LimitSpec { requests: 1_000, window, min_interval: Some(window), ..LimitSpec::default() };
    let fault = |spec: LimitSpec| SlidingLog::build(&spec).err().map(|invalid| invalid.keyword);
    assert_eq!(fault(valid), None);
    for (spec, keyword) in [
        (LimitSpec { min_interval: Some(window + Micros::new(1)), ..valid }, "min_interval"),
        (LimitSpec { requests: 1_001, ..valid }, "requests_per_unit"),
        (LimitSpec { soft: Some(1), ..valid }, "requests_per_unit"),
        (LimitSpec { window: Micros::ZERO, min_interval: None, ..valid }, "unit_multiplier"),
    ] {
        assert_eq!(fault(spec), Some(keyword), "{spec:?}");
    }
}

#[test]
fn only_hits_with_a_minimum_interval_are_spaced() {
    let log = |interval| SlidingLog::new(MaxHits::hard(3), Micros::from_secs(60), interval, false).unwrap();
    let (spaced, dense) = (log(Micros::from_secs(5)), log(Micros::ZERO));
    let mut state = State::default();
    assert!(take(&spaced, &mut state, 1, START).allowed);
    assert!(take(&spaced, &mut state, 0, START + 1).allowed, "a cost of 0 is no hit");
    assert!(!take(&spaced, &mut state, 1, START + 4_999_999).allowed);
    assert!(take(&dense, &mut state, 1, START - 1_000_000).allowed, "the clock stepped back");
}

#[test]
fn a_cost_of_zero_does_not_wait_for_the_interval() {
    let log = |limit| {
        let (window, interval) = (Micros::from_secs(60), Micros::from_secs(20));
        SlidingLog::new(MaxHits::hard(limit), window, interval, false).unwrap()
    };
    let mut state = State::default();
    for second in [0, 20, 45] {
        assert!(take(&log(3), &mut state, 1, START + second * 1_000_000).allowed);
    }
    let denied = take(&log(2), &mut state, 0, START + 50_000_000);
    assert_eq!((denied.allowed, denied.retry_after), (false, Some(Micros::from_secs(10))));
}

#[test]
fn hits_of_a_clock_that_was_ahead_count_from_now() {
    let limiter = SlidingLog::new(MaxHits::hard(2), Micros::from_secs(60), Micros::ZERO, false).unwrap();
    let mut state = State::default();
    assert!(take(&limiter, &mut state, 2, START + 31_536_000_000_000).allowed);
    let denied = take(&limiter, &mut state, 1, START);
    assert_eq!((denied.allowed, denied.retry_after), (false, Some(Micros::from_secs(60))));
    assert!(!take(&limiter, &mut state, 1, START + 59_999_999).allowed);
    assert!(take(&limiter, &mut state, 1, START + 60_000_000).allowed);
}

#[test]
fn a_lease_ends_one_to_two_steps_of_the_grid_later() {
    let leasing = |window, interval| {
        SlidingLog::new(MaxHits::hard(100), Micros::new(window), Micros::new(interval), false).unwrap().leasing()
    };
    let step = |window| leasing(window, 0).map(|leasing| leasing.lease_lifetime().get());
    // A step is a twentieth of the window, and at most half a second.
    assert_eq!([19, 1_000_000, 60_000_000].map(step), [None, Some(50_000), Some(500_000)]);
    assert_eq!(leasing(60_000_000, 1), None, "it is unknown when the hits of a lease arrive");
    let minute = leasing(60_000_000, 0).unwrap();
    for (taken, end) in [(0, 1_000_000), (499_999, 1_000_000), (500_000, 1_500_000), (700_000, 1_500_000)] {
        assert_eq!(
            minute.lease_ends(&State::default(), Micros::new(START + taken)),
            Micros::new(START + end),
            "taken after {taken} µs"
        );
    }
}
