//! Properties of the token bucket in addition to the common ones (`laws.rs`) and the vectors (`tests/golden`).

use proptest::prelude::*;

use super::*;
use crate::Action;

fn take(limiter: &TokenBucket, state: &mut State, cost: u64, now: u64) -> bool {
    limiter.step(state, Operation { action: Action::Take, cost, now: Micros::new(now) })
}

fn per_second(requests: u32, burst: u64) -> TokenBucket {
    TokenBucket::new(requests, Micros::from_secs(1), MaxHits::hard(burst), false).unwrap()
}

/// <https://github.com/lazureykis/throttlecrab> allows 17 of 10, because the instant of an idle key may be in the past.
#[test]
fn an_idle_bucket_allows_its_burst_and_no_more() {
    let limiter = per_second(1, 10);
    for idle in [0, 1, 500_000, 9_000_000, 86_400_000_000] {
        let (mut state, start) = (State::default(), 1_763_672_400_000_000);
        assert!(take(&limiter, &mut state, 10, start));
        let later = start + 10_000_000 + idle;
        let passed = (0..30).filter(|_| take(&limiter, &mut state, 1, later)).count();
        assert_eq!(passed, 10, "after {idle} µs of idleness");
    }
}

/// Seven hits a second are 142 857 and 1/7 µs apart: after seven hits the state is the same as before, one second
/// later. The same holds after any number of hits, and each hit is allowed at its exact microsecond and not before.
#[test]
fn the_state_does_not_drift() {
    let limiter = per_second(7, 7);
    let mut state = State::default();
    assert!(take(&limiter, &mut state, 7, 60_000_000));
    let mut second = |start: u64| {
        for hit in 1..=7_u64 {
            let due = start + (hit * 1_000_000).div_ceil(7);
            assert!(!take(&limiter, &mut state, 1, due - 1), "hit {hit} before its time in the second at {start}");
            assert!(take(&limiter, &mut state, 1, due), "hit {hit} of the second at {start}");
        }
        let peek = Operation { action: Action::Peek, cost: 0, now: Micros::new(start + 1_000_000) };
        limiter.explain(&state, peek, true).reset
    };
    assert!((60..200_000).all(|number| second(number * 1_000_000) == Micros::from_secs(1)));
}

#[test]
fn a_changed_limit_scales_the_current_level() {
    let (old, new) = (per_second(10, 10), per_second(100, 100));
    let now = 1_763_672_400_000_000;
    let peek = |limiter: &TokenBucket, state: &State, now: u64| {
        let operation = Operation { action: Action::Peek, cost: 1, now: Micros::new(now) };
        let mut state = state.clone();
        let allowed = limiter.step(&mut state, operation);
        limiter.explain(&state, operation, allowed)
    };
    // Half of one limit becomes half of the other limit, in both directions.
    let mut state = State::default();
    take(&old, &mut state, 5, now);
    assert_eq!((peek(&old, &state, now).remaining, peek(&new, &state, now).remaining), (5, 50));
    // An empty bucket stays empty after a change of the limit, but the wait is that of the new limit.
    take(&old, &mut state, 5, now);
    assert_eq!(peek(&old, &state, now).retry_after, Some(Micros::new(100_000)));
    assert_eq!(
        (peek(&new, &state, now).remaining, peek(&new, &state, now).retry_after),
        (0, Some(Micros::new(10_000)))
    );
    // The same holds if the drain time changes with the limit.
    let slow = TokenBucket::new(1_000, Micros::from_secs(3_600), MaxHits::hard(100), false).unwrap();
    let slower = TokenBucket::new(10, Micros::from_secs(3_600), MaxHits::hard(100), false).unwrap();
    let mut state = State::default();
    take(&slower, &mut state, 100, now);
    assert_eq!(peek(&slower, &state, now).retry_after, Some(Micros::from_secs(360)));
    assert_eq!(peek(&slow, &state, now).retry_after, Some(Micros::new(3_600_000)));
}

#[test]
fn rejects_invalid_parameters() {
    let (window, year) = (Micros::from_secs(1), Micros::from_secs(31_536_000));
    assert_eq!(TokenBucket::new(0, window, MaxHits::hard(1), false), None);
    assert_eq!(TokenBucket::new(1, Micros::ZERO, MaxHits::hard(1), false), None);
    assert_eq!(TokenBucket::new(1, window, MaxHits::hard(0), false), None);
    assert_eq!(TokenBucket::new(1, year, MaxHits::hard(101), false), None, "restoring the burst takes 101 years");
    assert!(TokenBucket::new(1, year, MaxHits::hard(100), false).is_some());
}

proptest! {
    #[test]
    fn no_interval_allows_more_than_burst_plus_rate(
        requests in 1_u32..20, burst in 1_u64..20,
        hits in prop::collection::vec((1_u64..4, 0_u64..400_000), 1..60),
    ) {
        let limiter = per_second(requests, burst);
        let (mut state, mut now, mut passed) = (State::default(), 1_763_672_400_000_000, Vec::new());
        for (cost, later) in hits {
            now += later;
            if take(&limiter, &mut state, cost, now) {
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

#[test]
fn a_denied_hit_is_allowed_after_its_wait_although_the_state_is_corrected() {
    let bucket = |requests| TokenBucket::new(requests, Micros::from_secs(3_600), MaxHits::hard(10), false).unwrap();
    let (slow, fast) = (bucket(10), bucket(100));
    let start = 1_763_672_400_000_000;
    let (mut changed, mut ahead) = (State::default(), State::default());
    assert!(take(&slow, &mut changed, 10, start));
    assert!(take(&fast, &mut ahead, 10, start + 31_536_000_000_000));
    for (mut state, case) in [(changed, "a changed limit"), (ahead, "a clock that was ahead")] {
        let decisions = [0, 35_999_999, 36_000_000].map(|later| take(&fast, &mut state, 1, start + later));
        assert_eq!(decisions, [false, false, true], "{case}");
    }
}
