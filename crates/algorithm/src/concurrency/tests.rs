//! Properties of concurrency limits in addition to the common ones (`laws.rs`).

use proptest::{prelude::*, sample::select};

use super::*;

const START: u64 = 1_763_672_400_000_000;
const MINUTE: Micros = Micros::from_secs(60);

fn limiter(limit: u64) -> Concurrency {
    Concurrency::new(MaxHits::hard(limit), MINUTE).unwrap()
}

fn apply(limiter: Concurrency, state: &mut State, holder: u64, action: Action, cost: u64, second: u64) -> Decision {
    let limiter = limiter.with_context(RequestContext { holder, ..RequestContext::default() });
    let operation = Operation { action, cost, now: Micros::new(START + second * 1_000_000) };
    let allowed = limiter.step(state, operation);
    limiter.explain(state, operation, allowed)
}

#[test]
fn a_slot_is_freed_by_its_holder_or_when_it_ends() {
    let mut state = State::default();
    let take = |state: &mut State, holder, second| apply(limiter(2), state, holder, Action::Take, 1, second);
    assert_eq!(take(&mut state, 1, 0).remaining, 1);
    assert_eq!(take(&mut state, 2, 10).remaining, 0);
    let denied = take(&mut state, 3, 20);
    assert_eq!((denied.allowed, denied.used, denied.retry_after), (false, 2, Some(Micros::from_secs(40))));
    assert_eq!((denied.reset, denied.next), (Micros::from_secs(50), Micros::from_secs(40)));
    // A caller that was denied or has never called frees nothing.
    for other_holder in [3, 4] {
        assert_eq!(apply(limiter(2), &mut state, other_holder, Action::Refund, 1, 21).used, 2);
    }
    assert_eq!(apply(limiter(2), &mut state, 1, Action::Refund, 1, 22).used, 1);
    assert!(take(&mut state, 3, 23).allowed);
    assert_eq!(apply(limiter(2), &mut state, 1, Action::Refund, 1, 24).used, 2, "a repeated release frees nothing");
    assert!(!take(&mut state, 1, 69).allowed);
    assert!(take(&mut state, 1, 70).allowed, "the slot of the second holder has ended");
    assert_eq!(apply(limiter(2), &mut state, 2, Action::Refund, 1, 71).used, 2, "a late release frees nothing");
}

#[test]
fn another_take_of_a_holder_renews_its_slots() {
    let mut state = State::default();
    assert!(apply(limiter(3), &mut state, 7, Action::Take, 2, 0).allowed);
    let renewed = apply(limiter(3), &mut state, 7, Action::Take, 1, 50);
    assert_eq!((renewed.allowed, renewed.used, renewed.reset), (true, 2, MINUTE));
    assert!(apply(limiter(2), &mut state, 7, Action::Take, 1, 51).allowed, "a renewal needs no free slot");
    assert!(apply(limiter(2), &mut state, 7, Action::Peek, 9, 52).allowed);
    assert_eq!(apply(limiter(3), &mut state, 0, Action::Peek, 0, 110).used, 2);
    assert_eq!(apply(limiter(3), &mut state, 0, Action::Peek, 0, 111).used, 0);
}

#[test]
fn without_a_holder_the_slot_that_ends_first_is_freed() {
    let mut state = State::default();
    for second in [0, 30] {
        assert!(apply(limiter(2), &mut state, 0, Action::Take, 1, second).allowed);
    }
    assert_eq!(apply(limiter(2), &mut state, 0, Action::Refund, 1, 31).reset, Micros::from_secs(59));
}

#[test]
fn rejects_invalid_parameters() {
    assert_eq!(Concurrency::new(MaxHits::hard(1_001), MINUTE), None);
    assert_eq!(Concurrency::new(MaxHits::soft(1_000, 1), MINUTE), None);
    assert_eq!(Concurrency::new(MaxHits::hard(1), Micros::ZERO), None);
    assert_eq!(Concurrency::new(MaxHits::hard(1), Concurrency::MAX_HOLD + Micros::new(1)), None);
}

proptest! {
    /// Compares each decision with a list of holders and ends.
    #[test]
    fn decides_like_a_list_of_slots(
        limit in 1_u64..8,
        steps in prop::collection::vec((0_u64..5, select(vec![Action::Take, Action::Take, Action::Refund]), 1_u64..4, 0_u64..30), 1..80),
    ) {
        let (mut state, mut second, mut slots) = (State::default(), 0, Vec::<(u64, u64)>::new());
        for (holder, action, cost, later) in steps {
            second += later;
            slots.retain(|(_, end)| *end > second);
            let decision = apply(limiter(limit), &mut state, holder, action, cost, second);
            let own_slots = slots.iter().filter(|(other, _)| holder > 0 && *other == holder).count() as u64;
            let passes = action == Action::Refund || own_slots > 0 || slots.len() as u64 + cost <= limit;
            prop_assert_eq!(decision.allowed, passes);
            match action {
                Action::Refund if holder == 0 => drop(slots.drain(..slots.len().min(cost as usize))),
                Action::Refund => slots.retain(|(other, _)| *other != holder),
                _ if passes => {
                    slots.retain(|(other, _)| holder == 0 || *other != holder);
                    let count = if own_slots > 0 { own_slots } else { cost };
                    slots.extend((0..count).map(|_| (holder, second + 60)));
                }
                _ => {}
            }
            prop_assert_eq!(decision.used, slots.len() as u64);
        }
    }
}

/// Of 10 slots, 3 are guaranteed to one class and 2 to another; a third class may have up to 6 of the free ones.
#[test]
fn classes_get_their_guaranteed_slots() {
    let classes = Classes::new(&[(3, 10), (2, 4), (0, 6)], 10).unwrap();
    let limiter = Concurrency { classes: Some(classes), ..limiter(10) };
    let mut state = State::default();
    let mut holder = 0;
    let mut take = |class, cost, second: u64| {
        holder += 1;
        let (limiter, now) = (
            limiter.with_context(RequestContext { holder, class, ..RequestContext::default() }),
            Micros::new(START + second * 1_000_000),
        );
        decide(limiter, &mut state, Operation { action: Action::Take, cost, now })
    };
    let third = take(2, 5, 0);
    assert_eq!((third.allowed, third.remaining, third.limit, third.used), (true, 0, Some(6), 5));
    let full = take(2, 1, 1);
    assert_eq!((full.allowed, full.shed, full.retry_after), (false, true, Some(Micros::from_secs(59))));
    let excess = take(2, 2, 1);
    assert_eq!((excess.allowed, excess.shed), (false, false), "above the maximum of its class");
    assert_eq!(take(1, 2, 2).remaining, 0);
    assert!(!take(1, 1, 3).allowed, "the remaining slots are guaranteed to the first class");
    let first = take(0, 3, 4);
    assert_eq!((first.allowed, first.remaining), (true, 0));
    assert_eq!(take(0, 1, 5).retry_after, Some(Micros::from_secs(55)), "when the slots of the third class end");
    assert_eq!((take(0, 4, 61).allowed, take(0, 1, 61).remaining), (true, 0));
}

fn decide(limiter: Concurrency, state: &mut State, operation: Operation) -> Decision {
    let allowed = limiter.step(state, operation);
    limiter.explain(state, operation, allowed)
}

#[test]
fn an_invalid_limit_is_rejected_with_the_keyword_at_fault() {
    let valid = LimitSpec { requests: 1_000, window: Concurrency::MAX_HOLD, ..LimitSpec::default() };
    let fault = |spec: LimitSpec| Concurrency::build(&spec).err().map(|invalid| invalid.keyword);
    assert_eq!(fault(valid), None);
    for (spec, keyword) in [
        (LimitSpec { count_denied: Some(true), ..valid }, "count_denied"),
        (LimitSpec { requests: 1_001, ..valid }, "limit"),
        (LimitSpec { soft: Some(1), ..valid }, "limit"),
        (LimitSpec { window: Micros::ZERO, ..valid }, "hold"),
    ] {
        assert_eq!(fault(spec), Some(keyword), "{spec:?}");
    }
}

#[test]
fn a_holder_or_class_above_the_highest_counts_as_the_highest() {
    let classes = Classes::new(&[(3, 10), (2, 4), (0, 6)], 10).unwrap();
    let spec = LimitSpec { requests: 10, window: MINUTE, classes: Some(classes), ..LimitSpec::default() };
    let limit = Concurrency::build(&spec).unwrap();
    let highest = RequestContext { holder: u64::MAX, class: 200, ..RequestContext::default() };
    let mut state = State::default();
    for attempt in ["a take", "a renewal"] {
        let take = Operation { action: Action::Take, cost: 1, now: Micros::new(START) };
        let decision = limit.with_context(highest).apply(&mut state, take);
        assert_eq!((decision.allowed, decision.limit, decision.used), (true, Some(6), 1), "{attempt}");
    }
}

#[test]
fn without_a_holder_a_class_releases_its_slots_that_end_first() {
    let classes = Classes::new(&[(0, 10), (0, 10)], 10).unwrap();
    let limiter = Concurrency { classes: Some(classes), ..limiter(10) };
    let apply = |state: &mut State, class, action, cost, second: u64| {
        let limiter = limiter.with_context(RequestContext { class, ..RequestContext::default() });
        limiter.step(state, Operation { action, cost, now: Micros::new(START + second * 1_000_000) })
    };
    // Takes a slot for each class and second.
    let held = |slots: &[(u8, u64)]| {
        let mut state = State::default();
        assert!(slots.iter().all(|(class, second)| apply(&mut state, *class, Action::Take, 1, *second)));
        state
    };
    let slots = [(1, 0), (0, 1), (1, 2), (0, 3), (1, 4), (0, 5)];
    let mut state = held(&slots);
    apply(&mut state, 0, Action::Refund, 1, 6);
    assert_eq!(state, held(&[(1, 0), (1, 2), (0, 3), (1, 4), (0, 5)]));
    let mut state = held(&slots);
    apply(&mut state, 0, Action::Refund, 2, 6);
    assert_eq!(state, held(&[(1, 0), (1, 2), (1, 4), (0, 5)]));
    apply(&mut state, 1, Action::Refund, 2, 6);
    assert_eq!(state, held(&[(1, 4), (0, 5)]));
}

/// Of 10 slots, 3 are guaranteed to the first class and 2 to the second, so the third can have 5.
#[test]
fn a_class_waits_for_slots_that_are_not_guaranteed_to_others() {
    let classes = Classes::new(&[(3, 10), (2, 4), (0, 6)], 10).unwrap();
    let limiter = Concurrency { classes: Some(classes), ..limiter(10) };
    let mut state = State::default();
    let mut apply = |class, action, cost, second: u64| {
        let limiter = limiter.with_context(RequestContext { class, ..RequestContext::default() });
        let now = Micros::new(START + second * 1_000_000);
        decide(limiter, &mut state, Operation { action, cost, now })
    };
    assert!(apply(0, Action::Take, 1, 0).allowed);
    assert!(apply(2, Action::Take, 5, 10).allowed);
    let denied = apply(2, Action::Peek, 5, 20);
    assert_eq!((denied.allowed, denied.next), (false, Micros::from_secs(50)), "the slot that ends first is guaranteed");
    assert_eq!(denied.retry_after, Some(Micros::from_secs(50)));
    assert_eq!(apply(2, Action::Peek, 6, 20).retry_after, None);
}

#[test]
fn slots_of_a_clock_that_was_ahead_end_one_hold_from_now() {
    let mut state = State::default();
    assert!(apply(limiter(2), &mut state, 1, Action::Take, 2, 86_400).allowed);
    let denied = apply(limiter(2), &mut state, 2, Action::Take, 1, 0);
    assert_eq!((denied.allowed, denied.used, denied.reset), (false, 2, MINUTE));
    assert!(!apply(limiter(2), &mut state, 2, Action::Take, 1, 59).allowed);
    assert!(apply(limiter(2), &mut state, 2, Action::Take, 1, 60).allowed);
}

#[test]
fn a_slot_that_has_ended_is_not_in_flight() {
    let mut state = State::default();
    for second in [0, 30] {
        assert!(apply(limiter(2), &mut state, 0, Action::Take, 1, second).allowed);
    }
    let in_flight = |second: u64| Concurrency::in_flight(&state, Micros::new(START + second * 1_000_000));
    assert_eq!([59, 60, 89, 90].map(in_flight), [2, 1, 1, 0]);
}
