//! GCRA against the textbook's form of it. That governor and redis-cell give the same answers is `tests/peers.rs`.

use proptest::prelude::*;

use super::*;
use crate::algorithm::Action;

proptest! {
    /// ITU-T I.371's virtual scheduling, in whole emission intervals of 1 s: TAT = max(now, TAT) + T, and a cell
    /// conforms when it comes no earlier than TAT − τ.
    #[test]
    fn is_virtual_scheduling(burst in 1_u64..8, hits in prop::collection::vec(0_u64..3, 1..60)) {
        let rule = Gcra::new(1, Micros::from_secs(1), MaxHits::hard(burst), false).unwrap();
        let (mut state, mut now, mut tat) = (State::default(), 1_000_000, 0);
        for later in hits {
            now += later;
            let conforms = now + (burst - 1) >= tat;
            if conforms {
                tat = tat.max(now) + 1;
            }
            let ask = Operation { action: Action::Take, cost: 1, now: Micros::from_secs(now) };
            prop_assert_eq!(rule.step(&mut state, ask), conforms);
        }
    }
}
