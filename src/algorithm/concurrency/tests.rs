//! What slots promise beyond what all algorithms do (`laws.rs`).

use proptest::{prelude::*, sample::select};

use super::*;

const START: u64 = 1_763_672_400_000_000;
const MINUTE: Micros = Micros::from_secs(60);

fn rule(limit: u64) -> Concurrency {
    Concurrency::new(MaxHits::hard(limit), MINUTE).unwrap()
}

fn ask(rule: Concurrency, state: &mut State, holder: u64, action: Action, cost: u64, second: u64) -> Decision {
    let rule = rule.with_context(RequestContext { holder, ..RequestContext::default() });
    let ask = Operation { action, cost, now: Micros::new(START + second * 1_000_000) };
    let allowed = rule.step(state, ask);
    rule.explain(state, ask, allowed)
}

#[test]
fn a_slot_is_freed_by_its_holder_or_by_time() {
    let mut state = State::default();
    let take = |state: &mut State, holder, second| ask(rule(2), state, holder, Action::Take, 1, second);
    assert_eq!(take(&mut state, 1, 0).remaining, 1);
    assert_eq!(take(&mut state, 2, 10).remaining, 0);
    let refused = take(&mut state, 3, 20);
    assert_eq!((refused.allowed, refused.used, refused.retry_after), (false, 2, Some(Micros::from_secs(40))));
    assert_eq!((refused.reset, refused.next), (Micros::from_secs(50), Micros::from_secs(40)));
    // Whoever was refused, or never came, frees nothing.
    for stranger in [3, 4] {
        assert_eq!(ask(rule(2), &mut state, stranger, Action::Refund, 1, 21).used, 2);
    }
    assert_eq!(ask(rule(2), &mut state, 1, Action::Refund, 1, 22).used, 1);
    assert!(take(&mut state, 3, 23).allowed);
    assert_eq!(ask(rule(2), &mut state, 1, Action::Refund, 1, 24).used, 2, "twice");
    assert!(!take(&mut state, 1, 69).allowed);
    assert!(take(&mut state, 1, 70).allowed, "the second's has ended");
    assert_eq!(ask(rule(2), &mut state, 2, Action::Refund, 1, 71).used, 2, "too late");
}

#[test]
fn whoever_asks_again_keeps_what_it_has_for_as_long_again() {
    let mut state = State::default();
    assert!(ask(rule(3), &mut state, 7, Action::Take, 2, 0).allowed);
    let kept = ask(rule(3), &mut state, 7, Action::Take, 1, 50);
    assert_eq!((kept.allowed, kept.used, kept.reset), (true, 2, MINUTE));
    assert!(ask(rule(2), &mut state, 7, Action::Take, 1, 51).allowed, "under a limit that is full");
    assert!(ask(rule(2), &mut state, 7, Action::Peek, 9, 52).allowed);
    assert_eq!(ask(rule(3), &mut state, 0, Action::Peek, 0, 110).used, 2);
    assert_eq!(ask(rule(3), &mut state, 0, Action::Peek, 0, 111).used, 0);
}

#[test]
fn of_slots_without_a_name_the_one_that_ends_first_is_freed() {
    let mut state = State::default();
    for second in [0, 30] {
        assert!(ask(rule(2), &mut state, 0, Action::Take, 1, second).allowed);
    }
    assert_eq!(ask(rule(2), &mut state, 0, Action::Refund, 1, 31).reset, Micros::from_secs(59));
}

#[test]
fn refuses_to_be_built_from_numbers_that_make_no_sense() {
    assert_eq!(Concurrency::new(MaxHits::hard(1_001), MINUTE), None);
    assert_eq!(Concurrency::new(MaxHits::soft(1_000, 1), MINUTE), None);
    assert_eq!(Concurrency::new(MaxHits::hard(1), Micros::ZERO), None);
    assert_eq!(Concurrency::new(MaxHits::hard(1), Concurrency::MAX_HOLD + Micros::new(1)), None);
}

proptest! {
    /// Beside a list of who holds what until when.
    #[test]
    fn is_exact(
        limit in 1_u64..8,
        steps in prop::collection::vec((0_u64..5, select(vec![Action::Take, Action::Take, Action::Refund]), 1_u64..4, 0_u64..30), 1..80),
    ) {
        let (mut state, mut second, mut slots) = (State::default(), 0, Vec::<(u64, u64)>::new());
        for (holder, action, cost, later) in steps {
            second += later;
            slots.retain(|(_, end)| *end > second);
            let decision = ask(rule(limit), &mut state, holder, action, cost, second);
            let mine = slots.iter().filter(|(other, _)| holder > 0 && *other == holder).count() as u64;
            let passes = action == Action::Refund || mine > 0 || slots.len() as u64 + cost <= limit;
            prop_assert_eq!(decision.allowed, passes);
            match action {
                Action::Refund if holder == 0 => drop(slots.drain(..slots.len().min(cost as usize))),
                Action::Refund => slots.retain(|(other, _)| *other != holder),
                _ if passes => {
                    slots.retain(|(other, _)| holder == 0 || *other != holder);
                    let count = if mine > 0 { mine } else { cost };
                    slots.extend((0..count).map(|_| (holder, second + 60)));
                }
                _ => {}
            }
            prop_assert_eq!(decision.used, slots.len() as u64);
        }
    }
}

/// Of 10 slots 3 are kept for one class, 2 for another, and a third, which may have 6, has what is free.
#[test]
fn classes_find_what_is_kept_for_them() {
    let classes = Classes::new(&[(3, 10), (2, 4), (0, 6)], 10).unwrap();
    let rule = Concurrency { classes: Some(classes), ..rule(10) };
    let mut state = State::default();
    let mut holder = 0;
    let mut take = |class, cost, second: u64| {
        holder += 1;
        let (rule, now) = (
            rule.with_context(RequestContext { holder, class, sample: None }),
            Micros::new(START + second * 1_000_000),
        );
        rule_decision(rule, &mut state, Operation { action: Action::Take, cost, now })
    };
    let third = take(2, 5, 0);
    assert_eq!((third.allowed, third.remaining, third.limit, third.used), (true, 0, Some(6), 5));
    let full = take(2, 1, 1);
    assert_eq!((full.allowed, full.shed, full.retry_after), (false, true, Some(Micros::from_secs(59))));
    let own = take(2, 2, 1);
    assert_eq!((own.allowed, own.shed), (false, false), "above its own ceiling");
    assert_eq!(take(1, 2, 2).remaining, 0);
    assert!(!take(1, 1, 3).allowed, "the rest is the first class'");
    let first = take(0, 3, 4);
    assert_eq!((first.allowed, first.remaining), (true, 0));
    assert_eq!(take(0, 1, 5).retry_after, Some(Micros::from_secs(55)), "as soon as the third class' slots end");
    assert_eq!((take(0, 4, 61).allowed, take(0, 1, 61).remaining), (true, 0));
}

fn rule_decision(rule: Concurrency, state: &mut State, ask: Operation) -> Decision {
    let allowed = rule.step(state, ask);
    rule.explain(state, ask, allowed)
}
