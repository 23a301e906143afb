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

#[test]
fn rejects_invalid_parameters() {
    let (second, hour) = (Micros::from_secs(1), Micros::from_secs(3_600));
    assert_eq!(WarmUp::new(0, second, 1, second, false), None);
    assert_eq!(WarmUp::new(1, second, 0, second, false), None);
    assert_eq!(WarmUp::new(1, second, 1, Micros::ZERO, false), None);
    assert_eq!(WarmUp::new(1, second, 1, hour + Micros::new(1), false), None);
}
