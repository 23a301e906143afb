//! Properties of the queue in addition to the common ones (`laws.rs`) and the vectors (`tests/golden`).

use proptest::prelude::*;

use super::*;
use crate::Action;

proptest! {
    /// Callers that wait for their delay leave at the limit's rate: no interval has more hits than `immediate` plus the
    /// rate.
    #[test]
    fn hits_leave_the_queue_at_the_configured_rate(
        requests in 1_u32..20, immediate in 1_u64..5, queue in 0_u64..20,
        hits in prop::collection::vec(0_u64..300_000, 1..60),
    ) {
        let limiter = LeakyBucket::new(requests, Micros::from_secs(1), MaxHits::hard(immediate + queue), immediate, false).unwrap();
        let (mut state, mut now, mut departures) = (State::default(), 1_763_672_400_000_000, Vec::new());
        for later in hits {
            now += later;
            let operation = Operation { action: Action::Take, cost: 1, now: Micros::new(now) };
            let allowed = limiter.step(&mut state, operation);
            let decision = limiter.explain(&state, operation, allowed);
            if allowed {
                departures.push(now + decision.delay.get());
                // No delay exceeds the drain time of the queue.
                prop_assert!(decision.delay.get() * u64::from(requests) < queue * 1_000_000 + u64::from(requests));
            }
        }
        prop_assert!(departures.is_sorted());
        for (first, start) in departures.iter().enumerate() {
            for (more, at) in departures[first..].iter().enumerate() {
                // Each delay is rounded up to a microsecond.
                let max = immediate * 1_000_000 + u64::from(requests) * (at - start + 1);
                prop_assert!((more as u64 + 1) * 1_000_000 <= max);
            }
        }
    }
}

#[test]
fn without_a_queue_no_hit_is_delayed() {
    let limiter = LeakyBucket::new(1, Micros::from_secs(1), MaxHits::soft(2, 50), 3, false).unwrap();
    let (mut state, now) = (State::default(), Micros::from_secs(1_000));
    let answers: Vec<_> = (0..4)
        .map(|_| {
            let operation = Operation { action: Action::Take, cost: 1, now };
            let allowed = limiter.step(&mut state, operation);
            let decision = limiter.explain(&state, operation, allowed);
            (decision.allowed, decision.soft, decision.delay.get())
        })
        .collect();
    assert_eq!(answers, [(true, false, 0), (true, false, 0), (true, true, 0), (false, false, 0)]);
}

#[test]
fn a_soft_limit_delays_hits_only_with_a_queue() {
    let spec = LimitSpec { requests: 2, window: Micros::from_secs(1), soft: Some(50), ..LimitSpec::default() };
    let take = |spec: LimitSpec| {
        let operation = Operation { action: Action::Take, cost: 3, now: Micros::from_secs(1_000) };
        let decision = LeakyBucket::build(&spec).unwrap().apply(&mut State::default(), operation);
        (decision.allowed, decision.soft, decision.delay.get())
    };
    assert_eq!(take(spec), (true, true, 0));
    assert_eq!(take(LimitSpec { queue: Some(2), ..spec }), (true, false, 500_000));
}
