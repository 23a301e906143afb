//! Properties of the adaptive limit. The slots are tested in `concurrency`, and the formulas in `sluicegate_overload`.

use super::*;

const START: u64 = 1_763_672_400_000_000;

fn limiter() -> Adaptive {
    let bounds = Bounds { floor: 2, ceiling: 100, initial: 10, timeout: 1_000_000 };
    Adaptive::new(Method::Vegas, bounds, Micros::from_secs(60)).unwrap()
}

fn apply(state: &mut State, holder: u64, action: Action, sample: Option<(u64, bool)>, millis: u64) -> Decision {
    let sample = sample.map(|(latency, dropped)| Sample { latency: Micros::new(latency), dropped });
    let limiter = limiter().with_context(RequestContext { holder, sample, ..RequestContext::default() });
    let operation = Operation { action, cost: 1, now: Micros::new(START + millis * 1_000) };
    let allowed = limiter.step(state, operation);
    limiter.explain(state, operation, allowed)
}

/// Takes ten slots and releases them with the given latency; returns the last limit.
fn round(state: &mut State, latency: u64, dropped: bool, millis: u64) -> Option<u32> {
    for holder in 1..=10 {
        apply(state, holder, Action::Take, None, millis);
    }
    // The first sample begins a window, and the tenth is after its end.
    let release = |holder| apply(state, holder, Action::Refund, Some((latency, dropped)), millis + 60 * holder).limit;
    (1..=10).filter_map(release).last()
}

#[test]
fn the_limit_follows_the_samples_of_released_slots() {
    let mut state = State::default();
    for holder in 1..=10 {
        assert!(apply(&mut state, holder, Action::Take, None, 0).allowed);
    }
    let denied = apply(&mut state, 11, Action::Take, None, 0);
    assert_eq!((denied.allowed, denied.shed, denied.limit, denied.remaining), (false, true, Some(10), 0));
    // The first windows measure the baseline; without a queue the limit grows by six.
    for second in 1..=3 {
        assert_eq!(round(&mut state, 5_000, false, 1_000 * second), Some(10));
    }
    assert_eq!(round(&mut state, 5_000, false, 4_000), Some(16));
    assert_eq!(round(&mut state, 5_000, true, 5_000), Some(15));
    assert_eq!(round(&mut state, 1_000_001, false, 6_000), Some(14), "above the timeout counts as dropped");
    // A release without a slot or without a sample changes nothing.
    for _ in 0..100 {
        apply(&mut state, 99, Action::Refund, Some((1, true)), 7_000);
        apply(&mut state, 1, Action::Take, None, 7_000);
        apply(&mut state, 1, Action::Refund, None, 7_000);
    }
    let peek = apply(&mut state, 0, Action::Peek, None, 8_000);
    assert_eq!((peek.limit, peek.remaining, peek.used), (Some(14), 14, 0));
}

#[test]
fn an_invalid_learned_state_is_reset() {
    for bytes in [vec![0xFF; LEARNED_BYTES], vec![0xFF; LEARNED_BYTES + 28], vec![0; LEARNED_BYTES], vec![7; 20]] {
        let mut state = State::from_bytes(&bytes);
        for number in 0..100 {
            let decision = apply(&mut state, number, Action::Take, None, number);
            let released = apply(&mut state, number, Action::Refund, Some((u64::MAX, false)), 500 + number);
            let limits = [decision.limit, released.limit].map(Option::unwrap);
            assert!(limits.iter().all(|limit| (2..=100).contains(limit)), "{limits:?}");
        }
    }
}

#[test]
fn rejects_invalid_bounds() {
    let new = |floor, initial, ceiling, timeout| {
        Adaptive::new(Method::Aimd, Bounds { floor, initial, ceiling, timeout }, Micros::from_secs(1)).is_some()
    };
    assert!(new(1, 1, 1, 1) && new(2, 20, 1_000, MAX_LATENCY));
    assert!(!new(0, 1, 1, 1) && !new(3, 2, 5, 1) && !new(1, 6, 5, 1) && !new(1, 1, 1_001, 1));
    assert!(!new(1, 1, 1, 0) && !new(1, 1, 1, MAX_LATENCY + 1));
}

#[test]
fn an_invalid_limit_is_rejected_with_the_keyword_at_fault() {
    let valid = LimitSpec {
        requests: 1_000,
        window: Concurrency::MAX_HOLD,
        floor: Some(20),
        initial: Some(20),
        timeout: Some(Micros::new(MAX_LATENCY)),
        ..LimitSpec::default()
    };
    let fault = |spec: LimitSpec| Adaptive::build(&spec).err().map(|invalid| invalid.keyword);
    assert_eq!(fault(valid), None);
    assert_eq!(fault(LimitSpec { initial: Some(1_000), ..valid }), None);
    for (spec, keyword) in [
        (LimitSpec { soft: Some(1), ..valid }, "soft"),
        (LimitSpec { count_denied: Some(true), ..valid }, "count_denied"),
        (LimitSpec { requests: 1_001, ..valid }, "ceiling"),
        (LimitSpec { timeout: Some(Micros::ZERO), ..valid }, "timeout"),
        (LimitSpec { timeout: Some(Micros::new(MAX_LATENCY + 1)), ..valid }, "timeout"),
        (LimitSpec { floor: Some(0), ..valid }, "floor"),
        (LimitSpec { floor: Some(21), ..valid }, "floor"),
        (LimitSpec { initial: Some(1_001), ..valid }, "floor"),
        (LimitSpec { window: Micros::ZERO, ..valid }, "hold"),
    ] {
        assert_eq!(fault(spec), Some(keyword), "{spec:?}");
    }
}

#[test]
fn held_slots_are_listed_and_the_learned_state_is_kept_for_an_hour() {
    let mut state = State::default();
    apply(&mut state, 1, Action::Take, None, 0);
    apply(&mut state, 2, Action::Take, None, 10_000);
    let now = Micros::new(START + 30_000_000);
    let slot = |millis: u64| {
        let from = Micros::new(START + millis * 1_000);
        CounterPart { from, until: from + Micros::from_secs(60), hits: 1 }
    };
    assert_eq!(limiter().parts(&state, now), [slot(0), slot(10_000)]);
    assert_eq!(limiter().expires(&state, now), now + Micros::from_secs(3_600));
}
