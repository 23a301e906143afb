//! What a queue promises beyond what all algorithms do (`laws.rs`) and the vectors (`tests/golden`).

use proptest::prelude::*;

use super::*;
use crate::algorithm::Action;

proptest! {
    /// Whoever waits as told leaves the bucket at the limit's pace: never more than `at_once` and the rate in any time.
    #[test]
    fn what_leaves_the_queue_conforms(
        requests in 1_u32..20, at_once in 1_u64..5, queue in 0_u64..20,
        hits in prop::collection::vec(0_u64..300_000, 1..60),
    ) {
        let rule = LeakyBucket::new(requests, Micros::from_secs(1), MaxHits::hard(at_once + queue), at_once, false).unwrap();
        let (mut state, mut now, mut left) = (State::default(), 1_763_672_400_000_000, Vec::new());
        for later in hits {
            now += later;
            let ask = Operation { action: Action::Take, cost: 1, now: Micros::new(now) };
            let allowed = rule.step(&mut state, ask);
            let decision = rule.explain(&state, ask, allowed);
            if allowed {
                left.push(now + decision.delay.get());
                // Nobody waits for longer than the queue is.
                prop_assert!(decision.delay.get() * u64::from(requests) < queue * 1_000_000 + u64::from(requests));
            }
        }
        prop_assert!(left.is_sorted());
        for (first, start) in left.iter().enumerate() {
            for (more, at) in left[first..].iter().enumerate() {
                // Rounded up to a microsecond each.
                let room = at_once * 1_000_000 + u64::from(requests) * (at - start + 1);
                prop_assert!((more as u64 + 1) * 1_000_000 <= room);
            }
        }
    }
}

#[test]
fn without_a_queue_nobody_waits() {
    let rule = LeakyBucket::new(1, Micros::from_secs(1), MaxHits::soft(2, 50), 3, false).unwrap();
    let (mut state, now) = (State::default(), Micros::from_secs(1_000));
    let answers: Vec<_> = (0..4)
        .map(|_| {
            let ask = Operation { action: Action::Take, cost: 1, now };
            let allowed = rule.step(&mut state, ask);
            let decision = rule.explain(&state, ask, allowed);
            (decision.allowed, decision.soft, decision.delay.get())
        })
        .collect();
    assert_eq!(answers, [(true, false, 0), (true, false, 0), (true, true, 0), (false, false, 0)]);
}
