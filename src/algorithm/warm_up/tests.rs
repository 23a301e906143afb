//! What a warm-up promises beyond what all algorithms do (`laws.rs`) and the vectors (`tests/golden`).

use super::*;

const START: u64 = 1_763_672_400_000_000;

/// Asks all the time; the instants at which one more passed.
fn passes(rule: &WarmUp, state: &mut State, from: u64, seconds: u64) -> Vec<u64> {
    let mut passed = Vec::new();
    let mut now = from;
    while now < from + seconds * 1_000_000 {
        let ask = Operation { action: Action::Take, cost: 1, now: Micros::new(now) };
        let allowed = rule.step(state, ask);
        if allowed {
            passed.push(now);
        }
        now += rule.explain(state, ask, allowed).retry_after.map_or(0, Micros::get);
    }
    passed
}

fn in_second(passed: &[u64], second: u64) -> usize {
    passed.iter().filter(|at| (**at - START) / 1_000_000 == second).count()
}

/// 100 a second, 10 s from cold to warm. Guava's figures: a third of the rate at first, all of it after the period, and
/// in the period (P/2 + P)/2 worth of stored hits … 500 above the threshold.
#[test]
fn the_pace_ramps_from_a_third_to_the_whole_and_is_cold_again_after_idleness() {
    let rule = WarmUp::new(100, Micros::from_secs(1), 1, Micros::from_secs(10), false).unwrap();
    let mut state = State::default();
    let passed = passes(&rule, &mut state, START, 20);
    assert!((33..=36).contains(&in_second(&passed, 0)), "{}", in_second(&passed, 0));
    assert!((44..=56).contains(&in_second(&passed, 5)), "{}", in_second(&passed, 5));
    assert_eq!(in_second(&passed, 12), 100);
    let warming = passed.iter().filter(|at| **at < START + 10_000_000).count();
    assert!((499..=501).contains(&warming), "{warming}");
    assert!(passed.windows(3).all(|hits| hits[1] - hits[0] + 1 >= hits[2] - hits[1]), "never slower again");

    let later = START + 20_000_000 + 10_000_000;
    let again = passes(&rule, &mut state, later, 1);
    assert!((33..=36).contains(&again.len()), "{}", again.len());
    // Half as long: half as cold, which is warm.
    let mut state = State::default();
    passes(&rule, &mut state, START, 20);
    let again = passes(&rule, &mut state, START + 20_000_000 + 5_000_000, 1);
    assert_eq!(again.len(), 100);
}

#[test]
fn a_large_request_passes_and_the_next_one_waits() {
    let rule = WarmUp::new(10, Micros::from_secs(1), 1, Micros::from_secs(10), false).unwrap();
    let mut state = State::default();
    let mut ask = |cost, now| {
        let ask = Operation { action: Action::Take, cost, now: Micros::new(now) };
        let allowed = rule.step(&mut state, ask);
        rule.explain(&state, ask, allowed)
    };
    assert!(ask(10, START).allowed);
    let refused = ask(1, START);
    // Ten hits of the coldest hundred cost 0.1 s each and 2k(2a − k)/P more: k = 1 s, a = 5 s.
    assert_eq!((refused.allowed, refused.retry_after), (false, Some(Micros::new(1_000_000 + 1_800_000))));
    let never = ask(11, START + 60_000_000);
    assert_eq!((never.allowed, never.retry_after), (false, None));
}

#[test]
fn refuses_to_be_built_from_numbers_that_make_no_sense() {
    let (second, hour) = (Micros::from_secs(1), Micros::from_secs(3_600));
    assert_eq!(WarmUp::new(0, second, 1, second, false), None);
    assert_eq!(WarmUp::new(1, second, 0, second, false), None);
    assert_eq!(WarmUp::new(1, second, 1, Micros::ZERO, false), None);
    assert_eq!(WarmUp::new(1, second, 1, hour + Micros::new(1), false), None);
}
