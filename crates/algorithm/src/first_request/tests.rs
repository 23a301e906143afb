//! Decisions of windows that begin with the first request, and their promises beyond the laws.

use proptest::prelude::*;

use super::*;

const START: u64 = 1_763_672_400;

fn minute(limit: u64, count_denied: bool) -> FirstRequestWindow {
    FirstRequestWindow::new(MaxHits::hard(limit), Micros::from_secs(60), count_denied).unwrap()
}

fn operation(action: Action, cost: u64, second: u64) -> Operation {
    Operation { action, cost, now: Micros::from_secs(START + second) }
}

fn apply(limiter: FirstRequestWindow, state: &mut State, operation: Operation) -> Decision {
    let allowed = limiter.step(state, operation);
    limiter.explain(state, operation, allowed)
}

#[test]
fn a_window_begins_with_the_first_hit_and_ends_a_window_later() {
    use Action::{Peek, Refund, Take};
    let limiter = minute(10, true);
    let mut state = State::default();
    // (action, cost, second) → (allowed, remaining, used, reset in seconds)
    for (action, cost, second, expected) in [
        (Peek, 1, 0, (true, 10, 0, 0)), // no window begins without a hit
        (Take, 0, 5, (true, 10, 0, 0)),
        (Take, 8, 17, (true, 2, 8, 60)),
        (Take, 5, 27, (false, 0, 13, 50)), // a denied cost stays counted
        (Refund, 4, 30, (true, 1, 9, 47)),
        (Take, 1, 76, (true, 0, 10, 1)), // the last second of the window
        (Take, 1, 77, (true, 9, 1, 60)), // a new window
        (Peek, 9, 200, (true, 10, 0, 0)),
        (Take, 10, 201, (true, 0, 10, 60)),
        (Refund, 10, 202, (true, 10, 0, 0)), // without hits there is no window
        (Take, 1, 203, (true, 9, 1, 60)),
        (Take, u64::MAX, 204, (false, 0, MAX_NUMBER, 59)),
        (Take, u64::MAX, 204, (false, 0, MAX_NUMBER, 59)),
    ] {
        let got = apply(limiter, &mut state, operation(action, cost, second));
        let got = (got.allowed, got.remaining, got.used, got.reset.floor_secs());
        assert_eq!(got, expected, "{action:?} {cost} at {second}");
    }
}

#[test]
fn a_denied_hit_changes_nothing_without_count_denied() {
    let limiter = minute(2, false);
    let mut state = State::default();
    assert!(!apply(limiter, &mut state, operation(Action::Take, 3, 0)).allowed);
    assert!(state.is_empty(), "a denied hit begins no window");
    assert!(apply(limiter, &mut state, operation(Action::Take, 2, 10)).allowed);
    let denied = apply(limiter, &mut state, operation(Action::Take, 1, 20));
    assert_eq!((denied.allowed, denied.used, denied.retry_after), (false, 2, Some(Micros::from_secs(50))));
}

#[test]
fn a_take_is_rolled_back_only_in_its_window() {
    let limiter = minute(9, false);
    let mut state = State::default();
    apply(limiter, &mut state, operation(Action::Take, 4, 0));
    let roll_back = |taken, second| operation(Action::RollBack(Micros::from_secs(START + taken)), 4, second);
    apply(limiter, &mut state, operation(Action::Take, 4, 61));
    assert_eq!(apply(limiter, &mut state, roll_back(0, 62)).used, 4, "the window of the take is over");
    apply(limiter, &mut state, operation(Action::Take, 1, 62));
    let rolled_back = apply(limiter, &mut state, roll_back(61, 70));
    assert_eq!((rolled_back.used, rolled_back.reset), (1, Micros::from_secs(60)), "the window begins again");
    apply(limiter, &mut state, operation(Action::Refund, 1, 71));
    assert!(state.is_empty());
}

#[test]
fn clocks_that_are_wrong_give_no_hits_and_block_nobody() {
    let limiter = minute(3, true);
    let mut state = State::default();
    apply(limiter, &mut state, operation(Action::Take, 3, 100));
    assert!(!apply(limiter, &mut state, operation(Action::Take, 1, 40)).allowed, "the clock steps back by a minute");
    assert!(apply(limiter, &mut state, operation(Action::Take, 1, 10)).allowed, "a later window is ignored");
}

#[test]
fn a_lease_ends_with_the_window_that_counts_it() {
    let limiter = minute(100, false);
    let leasing = limiter.leasing().unwrap();
    let mut state = State::default();
    let at = |second| Micros::from_secs(START + second);
    limiter.step(&mut state, operation(Action::Take, 1, 7));
    leasing.step(&mut state, operation(Action::Take, 40, 30));
    assert_eq!(leasing.lease_ends(&state, at(30)), at(67));
    assert_eq!(leasing.lease_ends(&state, at(6)), at(6), "hits of another window are not counted in this one");
    assert_eq!(leasing.lease_ends(&state, at(67)), at(67));
}

#[test]
fn a_returned_lease_does_not_move_the_window() {
    let limiter = minute(100, false);
    let leasing = limiter.leasing().unwrap();
    let mut state = State::default();
    let return_of = |taken, second| operation(Action::RollBack(Micros::from_secs(START + taken)), 30, second);
    for (action, hits, second) in [(Action::Take, 40, 0), (Action::Take, 30, 20)] {
        assert!(leasing.step(&mut state, operation(action, hits, second)));
    }
    leasing.step(&mut state, return_of(0, 50));
    let returned = apply(limiter, &mut state, operation(Action::Peek, 1, 50));
    assert_eq!((returned.used, returned.reset), (40, Micros::from_secs(10)));
    // So the other lease can still return its hits.
    leasing.step(&mut state, return_of(20, 51));
    assert_eq!(apply(limiter, &mut state, operation(Action::Peek, 1, 51)).used, 10);
}

proptest! {
    /// No window of an entity has more allowed hits than the limit, and windows do not overlap.
    #[test]
    fn each_window_allows_the_limit(limit in 1_u64..20, hits in prop::collection::vec((0_u64..40, 1_u64..6), 1..60)) {
        let limiter = minute(limit, false);
        let mut state = State::default();
        let mut second = 0;
        let mut window_end = 0;
        let mut allowed = 0;
        for (pause, cost) in hits {
            second += pause;
            if second >= window_end {
                allowed = 0;
            }
            let decision = apply(limiter, &mut state, operation(Action::Take, cost, second));
            prop_assert_eq!(decision.allowed, allowed + cost <= limit);
            if decision.allowed {
                if allowed == 0 {
                    window_end = second + 60;
                }
                allowed += cost;
                prop_assert_eq!(decision.reset.floor_secs(), window_end - second);
            }
        }
    }
}
