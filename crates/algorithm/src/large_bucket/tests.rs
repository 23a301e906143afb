//! Exactness of large buckets, and the bounds of their parameters. `laws.rs` has the common properties.

use super::*;
use crate::{Action, MAX_NUMBER, MAX_PERIOD, token_bucket::TokenBucket};

const START: u64 = 1_763_672_400_000_000;

fn apply(limiter: &Algorithm, state: &mut State, action: Action, cost: u64, now: u64) -> Decision {
    limiter.apply(state, Operation { action, cost, now: Micros::new(now) })
}

/// A prime number of hits a minute, more than ten million of them in a microsecond.
#[test]
fn every_hit_counts_at_the_largest_rates() {
    let requests = 999_999_999_999_989;
    let limiter = LargeBucket::new(requests, Micros::from_secs(60), MaxHits::hard(requests), false).unwrap().into();
    let mut state = State::default();
    for taken in 1..=100 {
        let decision = apply(&limiter, &mut state, Action::Take, 1, START);
        assert_eq!((decision.allowed, decision.used, decision.remaining), (true, taken, requests - taken));
    }
    let rest = apply(&limiter, &mut state, Action::Take, requests - 100, START);
    assert_eq!((rest.allowed, rest.remaining, rest.reset), (true, 0, Micros::from_secs(60)));
    assert!(!apply(&limiter, &mut state, Action::Take, 1, START).allowed);
    // After a microsecond 16,666,666.66666648 hits have arrived.
    assert!(!apply(&limiter, &mut state, Action::Take, 16_666_667, START + 1).allowed);
    let all = apply(&limiter, &mut state, Action::Take, 16_666_666, START + 1);
    assert_eq!((all.allowed, all.remaining), (true, 0));
    // Two thirds of a hit remain, so that three microseconds have brought 49,999,999.99999945 hits.
    assert!(!apply(&limiter, &mut state, Action::Take, 33_333_334, START + 3).allowed);
    assert!(apply(&limiter, &mut state, Action::Take, 33_333_333, START + 3).allowed);
    let undone = apply(&limiter, &mut state, Action::Refund, 33_333_333, START + 3);
    assert_eq!(undone.remaining, 33_333_333);
}

#[test]
fn decides_as_a_token_bucket_where_both_can() {
    let minute = Micros::from_secs(60);
    let small: Algorithm = TokenBucket::new(7, minute, MaxHits::soft(10, 20), true).unwrap().into();
    let large = LargeBucket::new(7, minute, MaxHits::soft(10, 20), true).unwrap().into();
    let (mut states, mut now) = ([State::default(), State::default()], START);
    for step in 0..1_000_u64 {
        now += step * step % 40_000_007;
        let action = if step % 5 == 0 { Action::Refund } else { Action::Take };
        let decisions = [(&small, 0), (&large, 1)]
            .map(|(limiter, index): (&Algorithm, usize)| apply(limiter, &mut states[index], action, step % 4, now));
        assert_eq!(decisions[0], decisions[1], "step {step}");
    }
    assert_eq!((states[0].as_bytes().len(), states[1].as_bytes().len()), (16, 19));
}

#[test]
fn the_size_of_the_limit_selects_the_bucket() {
    let spec = LimitSpec { requests: 4_294_967_295, window: Micros::from_secs(86_400), ..LimitSpec::default() };
    for kind in ["token_bucket", "gcra"] {
        let tag = |spec: &LimitSpec| (Algorithm::kind(kind).unwrap().build)(spec).unwrap().tag();
        let small = tag(&spec);
        assert_ne!(small, LargeBucket::TAG);
        assert_eq!(tag(&LimitSpec { requests: spec.requests + 1, ..spec }), LargeBucket::TAG);
        assert_eq!(tag(&LimitSpec { burst: Some(spec.requests + 1), ..spec }), LargeBucket::TAG);
        assert_eq!(tag(&LimitSpec { burst: Some(spec.requests), ..spec }), small);
        assert_eq!(tag(&LimitSpec { requests: MAX_NUMBER, ..spec }), LargeBucket::TAG);
    }
}

#[test]
fn rejects_invalid_parameters() {
    let day = Micros::from_secs(86_400);
    let new = |requests, window, burst| LargeBucket::new(requests, window, MaxHits::hard(burst), false);
    assert_eq!(new(0, day, 1), None);
    assert_eq!(new(1, Micros::ZERO, 1), None);
    assert_eq!(new(1, day, 0), None);
    assert_eq!(new(1, day, MAX_NUMBER), None, "restoring the burst takes longer than 100 years");
    assert!(new(MAX_NUMBER, MAX_PERIOD, MAX_NUMBER).is_some());
    assert_eq!(new(MAX_NUMBER + 1, MAX_PERIOD, MAX_NUMBER), None, "a peer can send more");
    assert_eq!(new(5_000_000_000, day, 5_000_000_000).unwrap().leasing(), None);
}
