//! Decisions of buckets in debt, and their bound.

use proptest::prelude::*;

use super::*;
use crate::Action;

const START: u64 = 1_763_672_400;

/// Ten hits a minute: one every six seconds.
fn bucket(burst: u64, debt: u64) -> DebtBucket {
    DebtBucket::new(10, Micros::from_secs(60), burst, debt).unwrap()
}

fn apply(bucket: DebtBucket, state: &mut State, action: Action, cost: u64, second: u64) -> Decision {
    let operation = Operation { action, cost, now: Micros::from_secs(START + second) };
    let allowed = bucket.step(state, operation);
    bucket.explain(state, operation, allowed)
}

#[test]
fn nothing_passes_until_the_debt_is_paid_back() {
    use Action::{Peek, Refund, Take};
    let limiter = bucket(3, 5);
    let mut state = State::default();
    // (action, cost, second) → (allowed, remaining, used, next, retry_after)
    for (action, cost, second, expected) in [
        (Peek, 8, 0, (true, 8, 0, 0, None)),
        (Peek, 9, 0, (false, 8, 0, 0, None)), // more than burst and debt
        (Take, 2, 0, (true, 6, 2, 6, None)),
        (Take, 5, 0, (true, 0, 7, 24, None)), // four are owed
        (Take, 1, 0, (false, 0, 7, 24, Some(24))),
        (Peek, 0, 0, (false, 0, 7, 24, Some(24))), // not even a request without a cost
        (Take, 1, 23, (false, 0, 4, 1, Some(1))),
        (Take, 1, 24, (true, 0, 4, 6, None)), // everything was paid back, and one is owed
        (Refund, 1, 24, (true, 5, 3, 6, None)),
        (Take, 6, 24, (false, 5, 3, 6, Some(6))), // would owe six
        (Take, 6, 30, (true, 0, 8, 30, None)),
        (Take, 1, 59, (false, 0, 4, 1, Some(1))),
        (Take, 1, 78, (true, 7, 1, 6, None)),
    ] {
        let got = apply(limiter, &mut state, action, cost, second);
        let retry_after = got.retry_after.map(Micros::floor_secs);
        let got = (got.allowed, got.remaining, got.used, got.next.floor_secs(), retry_after);
        assert_eq!(got, expected, "{action:?} {cost} at {second}");
    }
}

#[test]
fn keywords_that_contradict_a_debt_are_rejected() {
    let spec = LimitSpec { requests: 10, window: Micros::from_secs(60), debt: Some(5), ..LimitSpec::default() };
    let keyword = |spec: LimitSpec| DebtBucket::build(&spec).err().map(|error| error.keyword);
    assert_eq!(keyword(spec), None);
    assert_eq!(keyword(LimitSpec { count_denied: Some(false), ..spec }), None);
    for spec in [
        LimitSpec { debt: Some(0), ..spec },
        LimitSpec { debt: None, ..spec },
        LimitSpec { soft: Some(5), ..spec },
        LimitSpec { count_denied: Some(true), ..spec },
        LimitSpec { warm_up: Some(Micros::from_secs(5)), ..spec },
    ] {
        assert_eq!(keyword(spec), Some("debt"), "{spec:?}");
    }
    assert_eq!(keyword(LimitSpec { burst: Some(0), ..spec }), Some("burst"));
    assert_eq!(keyword(LimitSpec { window: crate::MAX_PERIOD, debt: Some(u32::MAX.into()), ..spec }), Some("burst"));
    assert_eq!(keyword(LimitSpec { debt: Some(crate::MAX_NUMBER), ..spec }), Some("burst"));
}

#[test]
fn hits_that_were_allowed_elsewhere_always_count() {
    let limiter = bucket(3, 5);
    let recording = limiter.recording();
    assert!(recording.counts_denied() && !limiter.counts_denied());
    let mut state = State::default();
    for cost in [8, 7] {
        recording.step(&mut state, Operation { action: Action::Take, cost, now: Micros::from_secs(START) });
    }
    let denied = apply(limiter, &mut state, Action::Take, 1, 0);
    assert_eq!((denied.used, denied.retry_after), (15, Some(Micros::from_secs(72))));
}

proptest! {
    /// In any interval of *t*, at most burst + debt + rate × t hits are allowed, and a request passes only if nothing is owed.
    #[test]
    fn the_bound_holds(
        burst in 1_u64..6, debt in 1_u64..6, hits in prop::collection::vec((0_u64..20, 1_u64..12), 1..60),
    ) {
        let limiter = bucket(burst, debt);
        let mut state = State::default();
        let mut second = 0;
        let mut allowed: Vec<(u64, u64)> = Vec::new();
        // Tokens in sixths.
        let mut tokens = burst as i64 * 6;
        for (pause, cost) in hits {
            second += pause;
            tokens = (tokens + pause as i64).min(burst as i64 * 6);
            let decision = apply(limiter, &mut state, Action::Take, cost, second);
            let owed_after = cost as i64 * 6 - tokens;
            prop_assert_eq!(decision.allowed, tokens >= 0 && owed_after <= debt as i64 * 6);
            if decision.allowed {
                tokens -= cost as i64 * 6;
                allowed.push((second, cost));
            }
        }
        for (index, (from, _)) in allowed.iter().enumerate() {
            let mut sum = 0;
            for (at, cost) in &allowed[index..] {
                sum += cost;
                prop_assert!(sum * 6 <= (burst + debt) * 6 + (at - from), "from {} to {}", from, at);
            }
        }
    }
}
