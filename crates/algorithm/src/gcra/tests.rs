//! GCRA compared with its definition in ITU-T I.371. `tests/algorithms/other_implementations.rs` compares it with
//! governor.

use proptest::prelude::*;

use super::*;
use crate::Action;

proptest! {
    /// Virtual scheduling of ITU-T I.371, in whole emission intervals of 1 s: TAT = max(now, TAT) + T, and a cell
    /// conforms if it arrives no earlier than TAT − τ.
    #[test]
    fn decides_like_virtual_scheduling(burst in 1_u64..8, hits in prop::collection::vec(0_u64..3, 1..60)) {
        let limiter = Gcra::new(1, Micros::from_secs(1), MaxHits::hard(burst), false).unwrap();
        let (mut state, mut now, mut tat) = (State::default(), 1_000_000, 0);
        for later in hits {
            now += later;
            let conforms = now + (burst - 1) >= tat;
            if conforms {
                tat = tat.max(now) + 1;
            }
            let operation = Operation { action: Action::Take, cost: 1, now: Micros::from_secs(now) };
            prop_assert_eq!(limiter.step(&mut state, operation), conforms);
        }
    }
}
