//! Properties of the warm-up in addition to the common ones (`laws.rs`) and the vectors (`tests/golden`).

use super::*;

const START: u64 = 1_763_672_400_000_000;

/// Sends one hit after the other for `seconds` and returns the instants of those that were allowed.
fn passes(limiter: &WarmUp, state: &mut State, from: u64, seconds: u64) -> Vec<u64> {
    let mut passed = Vec::new();
    let mut now = from;
    while now < from + seconds * 1_000_000 {
        let operation = Operation { action: Action::Take, cost: 1, now: Micros::new(now) };
        let allowed = limiter.step(state, operation);
        if allowed {
            passed.push(now);
        }
        now += limiter.explain(state, operation, allowed).retry_after.map_or(0, Micros::get);
    }
    passed
}

fn in_second(passed: &[u64], second: u64) -> usize {
    passed.iter().filter(|at| (**at - START) / 1_000_000 == second).count()
}

/// 100 a second, 10 s from cold to warm. Guava's figures: a third of the rate at first, the full rate after the period,
/// and during the period (P/2 + P)/2 worth of stored hits, of which 500 are above the threshold.
#[test]
fn the_rate_rises_from_a_third_to_the_full_rate_and_falls_again_after_idleness() {
    let limiter = WarmUp::new(100, Micros::from_secs(1), 1, Micros::from_secs(10), false).unwrap();
    let mut state = State::default();
    let passed = passes(&limiter, &mut state, START, 20);
    assert!((33..=36).contains(&in_second(&passed, 0)), "{}", in_second(&passed, 0));
    assert!((44..=56).contains(&in_second(&passed, 5)), "{}", in_second(&passed, 5));
    assert_eq!(in_second(&passed, 12), 100);
    let allowed_while_cold = passed.iter().filter(|at| **at < START + 10_000_000).count();
    assert!((499..=501).contains(&allowed_while_cold), "{allowed_while_cold}");
    assert!(passed.windows(3).all(|hits| hits[1] - hits[0] + 1 >= hits[2] - hits[1]), "the rate never falls");

    let later = START + 20_000_000 + 10_000_000;
    let again = passes(&limiter, &mut state, later, 1);
    assert!((33..=36).contains(&again.len()), "{}", again.len());
    // After half the idleness it is half as cold, which counts as warm.
    let mut state = State::default();
    passes(&limiter, &mut state, START, 20);
    let again = passes(&limiter, &mut state, START + 20_000_000 + 5_000_000, 1);
    assert_eq!(again.len(), 100);
}

#[test]
fn a_large_request_is_allowed_and_the_next_one_waits() {
    let limiter = WarmUp::new(10, Micros::from_secs(1), 1, Micros::from_secs(10), false).unwrap();
    let mut state = State::default();
    let mut take = |cost, now| {
        let operation = Operation { action: Action::Take, cost, now: Micros::new(now) };
        let allowed = limiter.step(&mut state, operation);
        limiter.explain(&state, operation, allowed)
    };
    assert!(take(10, START).allowed);
    let denied = take(1, START);
    // The first ten hits after idleness cost 0.1 s each and 2k(2a − k)/P more: k = 1 s, a = 5 s.
    assert_eq!((denied.allowed, denied.retry_after), (false, Some(Micros::new(1_000_000 + 1_800_000))));
    let never = take(11, START + 60_000_000);
    assert_eq!((never.allowed, never.retry_after), (false, None));
}

/// After the correction, a hit is allowed after its time in a steady stream, here 3 s, for any limit before.
#[test]
fn a_clock_that_was_ahead_denies_for_one_hit_after_the_correction() {
    let twenty_per_minute =
        |burst| WarmUp::new(20, Micros::from_secs(60), burst, Micros::from_secs(30), false).unwrap();
    for (before, after) in [(1, 1), (20, 20), (1, 20), (20, 1)] {
        let (before, after) = (twenty_per_minute(before), twenty_per_minute(after));
        let mut state = State::default();
        for _ in 0..3 {
            apply(before, &mut state, Action::Take, 20, 3_600_000);
        }
        let denied = apply(after, &mut state, Action::Take, 1, 0);
        assert_eq!((denied.allowed, denied.retry_after), (false, Some(Micros::from_secs(3))), "{before:?} {after:?}");
        assert!(apply(after, &mut state, Action::Peek, 1, 6_000).allowed);
    }
}

#[test]
fn rejects_invalid_parameters() {
    let (second, hour) = (Micros::from_secs(1), Micros::from_secs(3_600));
    assert_eq!(WarmUp::new(0, second, 1, second, false), None);
    assert_eq!(WarmUp::new(1, second, 0, second, false), None);
    assert_eq!(WarmUp::new(1, second, 1, Micros::ZERO, false), None);
    assert_eq!(WarmUp::new(1, second, 1, hour + Micros::new(1), false), None);
}

#[test]
fn an_invalid_limit_is_rejected_with_the_keyword_at_fault() {
    let (window, warm_up) = (Micros::from_secs(1), WarmUp::MAX_WARM_UP);
    let valid = LimitSpec { requests: 10, window, warm_up: Some(warm_up), ..LimitSpec::default() };
    let fault = |spec: LimitSpec| WarmUp::build(&spec).err().map(|invalid| invalid.keyword);
    assert_eq!(fault(valid), None);
    for (spec, keyword) in [
        (LimitSpec { warm_up: None, ..valid }, "warm_up"),
        (LimitSpec { warm_up: Some(warm_up + Micros::new(1)), ..valid }, "warm_up"),
        (LimitSpec { soft: Some(1), ..valid }, "soft"),
        (LimitSpec { window: Micros::ZERO, ..valid }, "burst"),
    ] {
        assert_eq!(fault(spec), Some(keyword), "{spec:?}");
    }
}

/// Applies an operation this many milliseconds after [`START`].
fn apply(limiter: impl Into<Algorithm>, state: &mut State, action: Action, cost: u64, millis: u64) -> Decision {
    limiter.into().apply(state, Operation { action, cost, now: Micros::new(START + millis * 1_000) })
}

/// Ten hits a second, and ten seconds from cold to warm.
fn ten_per_second(count_denied: bool) -> WarmUp {
    WarmUp::new(10, Micros::from_secs(1), 1, Micros::from_secs(10), count_denied).unwrap()
}

#[test]
fn a_refund_makes_the_limiter_as_cold_as_before_the_take() {
    let limiter = ten_per_second(false);
    let expires = |state: &State, millis: u64| {
        (limiter.expires(state, Micros::new(START + millis * 1_000)).get() - START) / 1_000
    };
    let mut state = State::default();
    let first = apply(limiter, &mut state, Action::Take, 10, 0);
    assert_eq!((first.allowed, first.used, first.remaining), (true, 10, 0));
    // The debt is paid after 2.8 s, and the limiter is cold again a second later.
    assert_eq!(expires(&state, 0), 3_800);
    let mut refunded = state.clone();
    apply(limiter, &mut refunded, Action::Refund, 10, 2_800);
    assert!(refunded.is_empty(), "a cold limiter without debt is a new one");
    // Another ten hits cost 2.4 s. Refunded without debt, they leave the limiter as cold as the first ten did.
    assert!(apply(limiter, &mut state, Action::Take, 10, 2_800).allowed);
    apply(limiter, &mut state, Action::Refund, 10, 5_200);
    assert_eq!(expires(&state, 5_200), 6_200);
}

#[test]
fn a_rolled_back_take_leaves_the_limiter_cold() {
    let limiter = ten_per_second(false);
    let mut state = State::default();
    assert!(apply(limiter, &mut state, Action::Take, 10, 0).allowed);
    apply(limiter, &mut state, Action::RollBack(Micros::new(START)), 10, 0);
    // Of the cost of 2.8 s, the part that a warm limiter would have charged is returned.
    assert_eq!(limiter.expires(&state, Micros::new(START)), Micros::new(START + 1_800_000));
}

#[test]
fn a_denied_take_is_debt_if_denied_hits_count() {
    let (counting, other) = (Algorithm::from(ten_per_second(true)), Algorithm::from(ten_per_second(false)));
    for (limiter, reset) in [(counting, 1_100), (other.recording(), 1_100), (other, 0)] {
        let mut state = State::default();
        let denied = apply(limiter, &mut state, Action::Take, 11, 0);
        assert_eq!((denied.allowed, denied.reset), (false, Micros::new(reset * 1_000)), "{limiter:?}");
        apply(limiter, &mut state, Action::Refund, 11, 0);
        assert!(state.is_empty(), "{limiter:?}: {state:?}");
    }
}
