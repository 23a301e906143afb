//! What a limit that learns promises: the slots are `concurrency`'s, and the formulas have tests of their own.

use super::*;

const START: u64 = 1_763_672_400_000_000;

fn rule() -> Adaptive {
    let bounds = Bounds { floor: 2, ceiling: 100, initial: 10, timeout: 1_000_000 };
    Adaptive::new(Method::Vegas, bounds, Micros::from_secs(60)).unwrap()
}

fn ask(state: &mut State, holder: u64, action: Action, sample: Option<(u64, bool)>, millis: u64) -> Decision {
    let sample = sample.map(|(latency, dropped)| Sample { latency: Micros::new(latency), dropped });
    let rule = rule().with_context(RequestContext { holder, sample, ..RequestContext::default() });
    let ask = Operation { action, cost: 1, now: Micros::new(START + millis * 1_000) };
    let allowed = rule.step(state, ask);
    rule.explain(state, ask, allowed)
}

/// Takes ten slots and gives them back after so long.
fn round(state: &mut State, latency: u64, dropped: bool, millis: u64) -> Option<u32> {
    for holder in 1..=10 {
        ask(state, holder, Action::Take, None, millis);
    }
    // The first sample begins a window, and the tenth is after its end.
    let back = |holder| ask(state, holder, Action::Refund, Some((latency, dropped)), millis + 60 * holder).limit;
    (1..=10).filter_map(back).last()
}

#[test]
fn the_limit_moves_with_what_those_say_who_give_back() {
    let mut state = State::default();
    for holder in 1..=10 {
        assert!(ask(&mut state, holder, Action::Take, None, 0).allowed);
    }
    let refused = ask(&mut state, 11, Action::Take, None, 0);
    assert_eq!((refused.allowed, refused.shed, refused.limit, refused.remaining), (false, true, Some(10), 0));
    // The first windows are the baseline; without a queue it grows by six.
    for second in 1..=3 {
        assert_eq!(round(&mut state, 5_000, false, 1_000 * second), Some(10));
    }
    assert_eq!(round(&mut state, 5_000, false, 4_000), Some(16));
    assert_eq!(round(&mut state, 5_000, true, 5_000), Some(15));
    assert_eq!(round(&mut state, 1_000_001, false, 6_000), Some(14), "too long is dropped");
    // Who gives back what he has not, or says nothing, teaches nothing.
    for _ in 0..100 {
        ask(&mut state, 99, Action::Refund, Some((1, true)), 7_000);
        ask(&mut state, 1, Action::Take, None, 7_000);
        ask(&mut state, 1, Action::Refund, None, 7_000);
    }
    let look = ask(&mut state, 0, Action::Peek, None, 8_000);
    assert_eq!((look.limit, look.remaining, look.used), (Some(14), 14, 0));
}

#[test]
fn what_makes_no_sense_begins_anew() {
    for bytes in [vec![0xFF; TAIL], vec![0xFF; TAIL + 28], vec![0; TAIL], vec![7; 20]] {
        let mut state = State::from_bytes(&bytes);
        for number in 0..100 {
            let decision = ask(&mut state, number, Action::Take, None, number);
            let back = ask(&mut state, number, Action::Refund, Some((u64::MAX, false)), 500 + number);
            let limits = [decision.limit, back.limit].map(Option::unwrap);
            assert!(limits.iter().all(|limit| (2..=100).contains(limit)), "{limits:?}");
        }
    }
}

#[test]
fn refuses_bounds_that_make_no_sense() {
    let new = |floor, initial, ceiling, timeout| {
        Adaptive::new(Method::Aimd, Bounds { floor, initial, ceiling, timeout }, Micros::from_secs(1)).is_some()
    };
    assert!(new(1, 1, 1, 1) && new(2, 20, 1_000, LONGEST));
    assert!(!new(0, 1, 1, 1) && !new(3, 2, 5, 1) && !new(1, 6, 5, 1) && !new(1, 1, 1_001, 1));
    assert!(!new(1, 1, 1, 0) && !new(1, 1, 1, LONGEST + 1));
}
