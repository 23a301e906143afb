//! Facts as a table, laws as properties. That Redis agrees is proven in `tests/stores.rs`.

use proptest::prelude::*;

use super::*;

fn minute(limit: u64) -> FixedWindow {
    FixedWindow::new(MaxHits::hard(limit), Micros::from_secs(60), true).unwrap()
}

fn ask(action: Action, cost: u64, seconds: u64) -> Operation {
    Operation { action, cost, now: Micros::from_secs(seconds) }
}

fn apply(rule: FixedWindow, state: &mut State, ask: Operation) -> Decision {
    let allowed = rule.step(state, ask);
    rule.explain(state, ask, allowed)
}

#[test]
fn counts_as_the_peer_does() {
    use Action::{Peek, Refund, Take};
    let rule = minute(10);
    let mut state = State::default();
    // (action, cost, at) → (allowed, remaining, used, reset in seconds)
    for (action, cost, at, expected) in [
        (Peek, 0, 600, (true, 10, 0, 60)),
        (Take, 8, 601, (true, 2, 8, 59)),
        (Take, 5, 602, (false, 0, 13, 58)), // a refused cost stays counted
        (Take, 1, 603, (false, 0, 14, 57)),
        (Refund, 4, 604, (true, 0, 10, 56)),
        (Peek, 0, 605, (true, 0, 10, 55)),    // exactly at the limit a look is allowed
        (Refund, 99, 606, (true, 10, 0, 54)), // never above full
        (Take, 10, 659, (true, 0, 10, 1)),
        (Take, 1, 660, (true, 9, 1, 60)), // a new window
        (Take, u64::MAX, 661, (false, 0, MOST, 59)),
        (Take, u64::MAX, 661, (false, 0, MOST, 59)),
    ] {
        let got = apply(rule, &mut state, ask(action, cost, at));
        let got = (got.allowed, got.remaining, got.used, got.reset.floor_secs());
        assert_eq!(got, expected, "{action:?} {cost} at {at}");
    }
}

#[test]
fn a_clock_that_steps_back_grants_nothing_and_locks_nobody_out() {
    let rule = minute(1);
    let mut state = State::default();
    assert!(apply(rule, &mut state, ask(Action::Take, 1, 600)).allowed);
    assert!(!apply(rule, &mut state, ask(Action::Take, 1, 599)).allowed);
    assert!(!apply(rule, &mut state, ask(Action::Take, 1, 601)).allowed);
    let mut ahead = State::default();
    assert!(apply(rule, &mut ahead, ask(Action::Take, 1, 86_400)).allowed);
    assert!(apply(rule, &mut ahead, ask(Action::Take, 1, 600)).allowed);
}

#[test]
fn refuses_to_be_built_from_numbers_that_make_no_sense() {
    assert_eq!(FixedWindow::new(MaxHits::hard(1), Micros::ZERO, true), None);
    assert_eq!(FixedWindow::new(MaxHits::hard(1), MAX_PERIOD + Micros::new(1), true), None);
}

proptest! {
    #[test]
    fn no_window_lets_more_than_the_limit_pass(
        limit in 0_u64..20,
        asks in prop::collection::vec((0_u64..5, 0_u64..240), 1..100),
    ) {
        let rule = minute(limit);
        let mut state = State::default();
        let mut at: Vec<_> = asks;
        at.sort_by_key(|(_, second)| *second);
        let mut passed = std::collections::HashMap::<u64, u64>::new();
        for (cost, second) in at {
            if apply(rule, &mut state, ask(Action::Take, cost, second)).allowed {
                *passed.entry(second / 60).or_default() += cost;
            }
        }
        prop_assert!(passed.values().all(|hits| *hits <= limit));
    }

    #[test]
    fn a_peek_changes_nothing_and_foretells_the_take(
        limit in 0_u64..20, taken in 0_u64..20, cost in 0_u64..20, second in 0_u64..120,
    ) {
        let rule = minute(limit);
        let mut state = State::default();
        apply(rule, &mut state, ask(Action::Take, taken, 0));
        let before = state.clone();
        let peek = apply(rule, &mut state, ask(Action::Peek, cost, second));
        prop_assert_eq!(&state, &before);
        prop_assert_eq!(peek.allowed, apply(rule, &mut state, ask(Action::Take, cost, second)).allowed);
    }
}
