//! What a bucket of tokens promises beyond what all algorithms do (`laws.rs`) and the vectors (`tests/golden`).

use proptest::prelude::*;

use super::*;
use crate::algorithm::Action;

fn take(rule: &TokenBucket, state: &mut State, cost: u64, now: u64) -> bool {
    rule.step(state, Operation { action: Action::Take, cost, now: Micros::new(now) })
}

fn per_second(requests: u32, burst: u64) -> TokenBucket {
    TokenBucket::new(requests, Micros::from_secs(1), MaxHits::hard(burst), false).unwrap()
}

/// <https://github.com/lazureykis/throttlecrab> admits 17 of 10: it lets an idle key's instant lie in the past.
#[test]
fn an_idle_bucket_lets_its_burst_through_and_no_more() {
    let rule = per_second(1, 10);
    for idle in [0, 1, 500_000, 9_000_000, 86_400_000_000] {
        let (mut state, start) = (State::default(), 1_763_672_400_000_000);
        assert!(take(&rule, &mut state, 10, start));
        let later = start + 10_000_000 + idle;
        let passed = (0..30).filter(|_| take(&rule, &mut state, 1, later)).count();
        assert_eq!(passed, 10, "after {idle} µs of idleness");
    }
}

/// Seven a second are 142 857 and 1/7 µs apart: after seven of them the state is what it was, a second later. So it is
/// after any number, and each passes at its microsecond and not before.
#[test]
fn nothing_drifts() {
    let rule = per_second(7, 7);
    let mut state = State::default();
    assert!(take(&rule, &mut state, 7, 60_000_000));
    let mut second = |start: u64| {
        for hit in 1..=7_u64 {
            let due = start + (hit * 1_000_000).div_ceil(7);
            assert!(!take(&rule, &mut state, 1, due - 1), "hit {hit} before its time in the second at {start}");
            assert!(take(&rule, &mut state, 1, due), "hit {hit} of the second at {start}");
        }
        let look = Operation { action: Action::Peek, cost: 0, now: Micros::new(start + 1_000_000) };
        rule.explain(&state, look, true).reset
    };
    assert!((60..200_000).all(|number| second(number * 1_000_000) == Micros::from_secs(1)));
}

#[test]
fn a_changed_limit_takes_effect_on_what_is_there() {
    let (old, new) = (per_second(10, 10), per_second(100, 100));
    let now = 1_763_672_400_000_000;
    let look = |rule: &TokenBucket, state: &State, now: u64| {
        let ask = Operation { action: Action::Peek, cost: 1, now: Micros::new(now) };
        let mut state = state.clone();
        let allowed = rule.step(&mut state, ask);
        rule.explain(&state, ask, allowed)
    };
    // Half of it is half of the other, both ways.
    let mut state = State::default();
    take(&old, &mut state, 5, now);
    assert_eq!((look(&old, &state, now).remaining, look(&new, &state, now).remaining), (5, 50));
    // Empty is empty: no fresh quota. But the wait is the new limit's, not the old one's.
    take(&old, &mut state, 5, now);
    assert_eq!(look(&old, &state, now).retry_after, Some(Micros::new(100_000)));
    assert_eq!(
        (look(&new, &state, now).remaining, look(&new, &state, now).retry_after),
        (0, Some(Micros::new(10_000)))
    );
    // The same when the time to fill changes with it.
    let slow = TokenBucket::new(1_000, Micros::from_secs(3_600), MaxHits::hard(100), false).unwrap();
    let slower = TokenBucket::new(10, Micros::from_secs(3_600), MaxHits::hard(100), false).unwrap();
    let mut state = State::default();
    take(&slower, &mut state, 100, now);
    assert_eq!(look(&slower, &state, now).retry_after, Some(Micros::from_secs(360)));
    assert_eq!(look(&slow, &state, now).retry_after, Some(Micros::new(3_600_000)));
}

#[test]
fn refuses_to_be_built_from_numbers_that_make_no_sense() {
    let (window, year) = (Micros::from_secs(1), Micros::from_secs(31_536_000));
    assert_eq!(TokenBucket::new(0, window, MaxHits::hard(1), false), None);
    assert_eq!(TokenBucket::new(1, Micros::ZERO, MaxHits::hard(1), false), None);
    assert_eq!(TokenBucket::new(1, window, MaxHits::hard(0), false), None);
    assert_eq!(TokenBucket::new(1, year, MaxHits::hard(101), false), None, "a burst that takes 101 years to come back");
    assert!(TokenBucket::new(1, year, MaxHits::hard(100), false).is_some());
}

proptest! {
    #[test]
    fn never_more_than_the_burst_and_the_rate_in_any_time(
        requests in 1_u32..20, burst in 1_u64..20,
        hits in prop::collection::vec((1_u64..4, 0_u64..400_000), 1..60),
    ) {
        let rule = per_second(requests, burst);
        let (mut state, mut now, mut passed) = (State::default(), 1_763_672_400_000_000, Vec::new());
        for (cost, later) in hits {
            now += later;
            if take(&rule, &mut state, cost, now) {
                passed.push((now, cost));
            }
        }
        for (first, (start, _)) in passed.iter().enumerate() {
            let mut sum = 0;
            for (at, cost) in &passed[first..] {
                sum += cost;
                // Σ ≤ b + r·t, in hits per 10⁶ seconds.
                prop_assert!(sum * 1_000_000 <= burst * 1_000_000 + u64::from(requests) * (at - start));
            }
        }
    }
}
