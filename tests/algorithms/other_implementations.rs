//! The GCRA family compared with governor, which stores the same state in nanoseconds.

use std::{num::NonZeroU32, time::Duration};

use governor::{Quota as GovernorQuota, RateLimiter, clock::FakeRelativeClock};
use proptest::prelude::*;
use sluicegate::algorithm::{
    Action, Algorithm, MaxHits, Micros, Operation, State, gcra::Gcra, token_bucket::TokenBucket,
};

const START: u64 = 1_763_672_400_000_000;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// The intervals are whole nanoseconds, since governor has no smaller unit: 8 hits per second are 125 ms apart.
    #[test]
    fn governor_makes_the_same_decisions(
        requests in prop::sample::select(vec![1_u32, 2, 5, 8, 10, 16, 1_000]),
        burst in 1_u32..12,
        hits in prop::collection::vec((1_u32..5, prop_oneof![Just(0_u64), Just(125_000), 0_u64..2_000_000]), 1..40),
    ) {
        let second = Micros::from_secs(1);
        let algorithms: [Algorithm; 2] = [
            Gcra::new(requests, second, MaxHits::hard(burst.into()), false).unwrap().into(),
            TokenBucket::new(requests, second, MaxHits::hard(burst.into()), false).unwrap().into(),
        ];
        let mut states = [State::default(), State::default()];
        let number = |number: u32| NonZeroU32::new(number).unwrap();
        let clock = FakeRelativeClock::default();
        let quota = GovernorQuota::with_period(Duration::from_secs(1) / requests).unwrap().allow_burst(number(burst));
        let reference = RateLimiter::direct_with_clock(quota, clock.clone());
        let mut now = START;
        for (cost, elapsed) in hits {
            now += elapsed;
            clock.advance(Duration::from_micros(elapsed));
            // The inner result is governor's decision. The outer one is an error if the cost exceeds the burst.
            let expected = reference.check_n(number(cost));
            for (algorithm, state) in algorithms.iter().zip(&mut states) {
                let decision = algorithm.apply(state, Operation { action: Action::Take, cost: cost.into(), now: Micros::new(now) });
                let wait = decision.retry_after.map(|wait| Duration::from_micros(wait.get()));
                match &expected {
                    Ok(Ok(())) => prop_assert!(decision.allowed),
                    Ok(Err(not_until)) => {
                        prop_assert!(!decision.allowed);
                        let reference_wait = not_until.wait_time_from(governor::clock::Clock::now(&clock));
                        prop_assert_eq!(wait, Some(reference_wait));
                    }
                    Err(_) => prop_assert_eq!((decision.allowed, wait), (false, None)),
                }
            }
        }
    }
}
