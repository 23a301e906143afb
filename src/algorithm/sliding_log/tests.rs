//! What the log promises beyond what all algorithms do (`laws.rs`) and the vectors (`tests/golden`).

use proptest::prelude::*;

use super::*;

const START: u64 = 1_763_672_400_000_000;

fn ask(rule: &SlidingLog, state: &mut State, cost: u64, now: u64) -> Decision {
    let ask = Operation { action: Action::Take, cost, now: Micros::new(now) };
    let allowed = rule.step(state, ask);
    rule.explain(state, ask, allowed)
}

/// rolling-rate-limiter once took the earlier of the two waits: <https://github.com/classdojo/rolling-rate-limiter>.
#[test]
fn both_the_window_and_the_interval_have_to_be_waited_for() {
    let (window, interval) = (Micros::from_secs(60), Micros::from_secs(5));
    let rule = SlidingLog::new(MaxHits::hard(2), window, interval, false).unwrap();
    let mut state = State::default();
    assert!(ask(&rule, &mut state, 1, START).allowed);
    let wait = |decision: Decision| decision.retry_after.map(Micros::floor_secs);
    assert_eq!(wait(ask(&rule, &mut state, 1, START + 1_000_000)), Some(4));
    assert!(ask(&rule, &mut state, 1, START + 57_000_000).allowed);
    // The first hit leaves in 2 s, the interval ends in 4.
    assert_eq!(wait(ask(&rule, &mut state, 1, START + 58_000_000)), Some(4));
}

#[test]
fn whoever_keeps_asking_stays_out_when_denied_hits_count() {
    let rule = SlidingLog::new(MaxHits::hard(3), Micros::from_secs(60), Micros::ZERO, true).unwrap();
    let mut state = State::default();
    for second in 0..200 {
        let decision = ask(&rule, &mut state, 1, START + second * 1_000_000);
        assert_eq!(decision.allowed, second < 3, "second {second}");
        assert!(state.as_bytes().len() <= 3 * ENTRY, "the log does not grow above the limit");
    }
    // The newest three are what counts: of them the first, at second 197, leaves at 257.
    assert_eq!(ask(&rule, &mut state, 1, START + 256_000_000).retry_after, Some(Micros::from_secs(2 + 60 - 58 - 2)));
}

#[test]
fn refuses_to_be_built_from_numbers_that_make_no_sense() {
    let (minute, nothing) = (Micros::from_secs(60), Micros::ZERO);
    assert_eq!(SlidingLog::new(MaxHits::hard(1_001), minute, nothing, false), None);
    assert_eq!(SlidingLog::new(MaxHits::soft(1_000, 1), minute, nothing, false), None);
    assert_eq!(SlidingLog::new(MaxHits::hard(1), nothing, nothing, false), None);
    assert_eq!(SlidingLog::new(MaxHits::hard(1), minute, minute + Micros::new(1), false), None);
}

proptest! {
    #[test]
    fn is_exact(limit in 1_u64..12, hits in prop::collection::vec((1_u64..5, 0_u64..20_000_000), 1..80)) {
        let rule = SlidingLog::new(MaxHits::hard(limit), Micros::from_secs(60), Micros::ZERO, false).unwrap();
        let (mut state, mut now, mut passed) = (State::default(), START, Vec::new());
        for (cost, later) in hits {
            now += later;
            let inside = passed.iter().filter(|(at, _)| *at > now - 60_000_000).map(|(_, cost)| cost).sum::<u64>();
            let decision = ask(&rule, &mut state, cost, now);
            prop_assert_eq!(decision.allowed, inside + cost <= limit);
            if decision.allowed {
                passed.push((now, cost));
            }
        }
    }
}
