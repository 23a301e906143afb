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
