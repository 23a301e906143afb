use super::*;
use crate::Program;

const SECOND: u64 = 1_000_000;

fn penalty(shortest: u64, longest: u64) -> Penalty {
    Penalty::new(Micros::from_secs(shortest), Micros::from_secs(longest)).unwrap()
}

/// Takes a hit at a second, and returns whether a penalty has begun, and when it ends.
fn take(penalty: Penalty, state: &mut State, second: u64) -> (bool, u64) {
    let now = Micros::from_secs(second);
    let began = penalty.step(state, Operation { action: Action::Take, cost: 1, now });
    (began, (now + Penalty::time_left(state, now)).get() / SECOND)
}

fn peek(penalty: Penalty, state: &State, second: u64) -> Decision {
    let peek = Operation { action: Action::Peek, cost: 1, now: Micros::from_secs(second) };
    Program::from(penalty).apply(&mut state.clone(), peek)
}

#[test]
fn hits_in_a_penalty_are_denied_and_do_not_prolong_it() {
    let penalty = penalty(600, 600);
    let mut state = State::default();
    assert!(peek(penalty, &state, 1_000).allowed);
    assert_eq!(take(penalty, &mut state, 1_000), (true, 1_600));
    assert_eq!(take(penalty, &mut state, 1_599), (false, 1_600));
    let denied = peek(penalty, &state, 1_590);
    assert_eq!((denied.allowed, denied.retry_after), (false, Some(Micros::from_secs(10))));
    assert_eq!(denied.reset, Micros::from_secs(10));
    assert_eq!((denied.used, denied.next), (1, Micros::from_secs(10)));
    assert_eq!(peek(penalty, &state, 1_600).used, 0);
    assert!(peek(penalty, &state, 1_600).allowed);
    assert_eq!(take(penalty, &mut state, 1_600), (true, 2_200), "without penalty_max, all have the same length");
}

#[test]
fn a_penalty_doubles_if_it_begins_within_the_length_of_the_last_one() {
    let penalty = penalty(10, 35);
    let mut state = State::default();
    assert_eq!(take(penalty, &mut state, 1_000), (true, 1_010));
    assert_eq!(take(penalty, &mut state, 1_019), (true, 1_039), "20 s");
    assert_eq!(take(penalty, &mut state, 1_039), (true, 1_074), "35 s, the longest");
    assert_eq!(take(penalty, &mut state, 1_108), (true, 1_143), "35 s again");
    assert_eq!(take(penalty, &mut state, 1_178), (true, 1_188), "the 35 s after its end have passed");
}

#[test]
fn a_changed_length_applies_to_the_next_penalty() {
    let mut state = State::default();
    assert_eq!(take(penalty(10, 100), &mut state, 1_000), (true, 1_010));
    assert_eq!(take(penalty(60, 60), &mut state, 1_005), (false, 1_010));
    assert_eq!(take(penalty(60, 60), &mut state, 1_010), (true, 1_070));
    assert_eq!(take(penalty(10, 10), &mut state, 1_070), (true, 1_080));
}

#[test]
fn a_penalty_of_a_wrong_clock_is_ignored() {
    let penalty = penalty(10, 20);
    let mut state = State::default();
    take(penalty, &mut state, 1_000);
    assert_eq!(take(penalty, &mut state, 940), (false, 1_010), "the clock may step back by a minute");
    assert_eq!(take(penalty, &mut state, 939), (true, 949));
}

#[test]
fn a_state_is_needed_while_it_determines_the_next_length() {
    let mut state = State::default();
    let now = Micros::from_secs(1_000);
    for (longest, expected) in [(10, 1_010), (11, 1_020)] {
        state.clear();
        let penalty = penalty(10, longest);
        assert_eq!(penalty.expires(&state, now), now);
        take(penalty, &mut state, 1_000);
        assert_eq!(penalty.expires(&state, now), Micros::from_secs(expected));
    }
}

#[test]
fn a_rollback_undoes_its_own_penalty() {
    let penalty = penalty(10, 40);
    let mut state = State::default();
    let roll_back = |state: &mut State, taken| {
        let action = Action::RollBack(Micros::from_secs(taken));
        assert!(penalty.step(state, Operation { action, cost: 1, now: Micros::from_secs(taken) }));
    };
    take(penalty, &mut state, 1_000);
    let first = state.clone();
    roll_back(&mut state, 999);
    assert_eq!(state, first, "another take");
    take(penalty, &mut state, 1_010);
    let second = state.clone();
    assert_eq!(take(penalty, &mut state, 1_030), (true, 1_070));
    roll_back(&mut state, 1_030);
    assert_eq!(state, second);
    roll_back(&mut state, 1_010);
    assert_eq!(state, first);
    assert!(peek(penalty, &state, 1_010).allowed);
    roll_back(&mut state, 1_000);
    assert_eq!(state, State::default());
    assert!(penalty.step(&mut state, Operation { action: Action::Refund, cost: 1, now: Micros::from_secs(1_000) }));
    assert_eq!(state, State::default());
}

#[test]
fn lengths_are_above_zero_and_at_most_100_years() {
    let new = |shortest, longest| Penalty::new(Micros::new(shortest), Micros::new(longest)).is_some();
    let max = MAX_PERIOD.get();
    assert!(new(1, 1) && new(1, 2) && new(max, max));
    assert!(!new(0, 1) && !new(2, 1) && !new(1, max + 1));
    let penalty = Penalty::new(Micros::new(max), Micros::new(max)).unwrap();
    let mut state = State::default();
    take(penalty, &mut state, 2_000_000_000);
    assert!(penalty.expires(&state, Micros::ZERO).get() <= crate::MAX_NUMBER, "Lua computes this time, too");
}
