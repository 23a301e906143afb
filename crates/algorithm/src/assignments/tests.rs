//! Properties of assignments.

use std::collections::HashMap;

use proptest::{collection::vec, prelude::*};

use super::*;

const START: u64 = 1_763_672_400_000_000;
const TTL: u64 = 10;

fn at(second: u64) -> Micros {
    Micros::new(START) + Micros::from_secs(second)
}

fn apply_for(ttl: u64, state: &mut State, caller: u64, action: Action, demand: u64, second: u64) -> Option<Share> {
    let assignments = Assignments::new(Micros::from_secs(ttl)).with_caller(caller);
    let operation = Operation { action, cost: demand, now: at(second) };
    let allowed = assignments.step(state, operation);
    let decision = assignments.explain(state, operation, allowed);
    allowed.then(|| Assignments::read(&decision))
}

fn apply(state: &mut State, caller: u64, action: Action, demand: u64, second: u64) -> Option<u64> {
    apply_for(TTL, state, caller, action, demand, second).map(|share| share.millionths)
}

/// Renews the assignments of all callers every five seconds, and returns the shares at the end.
fn settle(demands: &[u64], seconds: u64) -> Vec<u64> {
    let mut state = State::default();
    let mut renew = |second| {
        let callers = (1..).zip(demands);
        callers.map(|(caller, demand)| apply(&mut state, caller, Action::Take, *demand, second).unwrap()).collect()
    };
    (0..seconds / 5).fold(Vec::new(), |_, step| renew(5 * step))
}

#[test]
fn each_caller_gets_its_demand_or_as_much_as_the_others() {
    assert_eq!(settle(&[100_000, 200_000], 5), [125_000, 250_000], "a quarter more than the demand");
    assert_eq!(settle(&[1_000_000], 5), [1_000_000]);
    // The first caller had everything, until the others arrived.
    assert_eq!(settle(&[1_000_000, 1_000_000, 100_000], 5), [1_000_000, 0, 0]);
    assert_eq!(settle(&[1_000_000, 1_000_000, 100_000], 30), [450_000, 450_000, 100_000]);
    assert_eq!(settle(&[1_000_000; 4], 40), [250_000; 4]);
    assert_eq!(settle(&[5_000_000], 5), [1_000_000], "a higher demand counts as the whole limit");
    assert_eq!(settle(&[480_000, 480_000], 40), [500_000; 2], "what nobody demands is divided");
}

#[test]
fn callers_without_requests_leave_the_limit_to_others() {
    let mut demands = [0; 100];
    demands[0] = 1_000_000;
    let shares = settle(&demands, 60);
    assert!(shares[0] >= 980_000, "{shares:?}");
    assert!(shares[1..].iter().all(|share| *share > 0), "{shares:?}");
}

#[test]
fn a_reduced_share_is_free_when_the_former_assignment_has_ended() {
    let mut state = State::default();
    let mut take = |caller, demand, second| apply(&mut state, caller, Action::Take, demand, second);
    assert_eq!(take(1, 1_000_000, 0), Some(1_000_000));
    assert_eq!(take(2, 700_000, 1), Some(0));
    assert_eq!(take(1, 300_000, 5), Some(1_000_000));
    assert_eq!(take(1, 300_000, 6), Some(300_000));
    // The first caller may not have received this, and its former assignment ends at 10.
    assert_eq!(take(2, 700_000, 9), Some(0));
    assert_eq!(take(2, 700_000, 10), Some(700_000));
    assert_eq!(take(3, 500_000, 11), Some(0));
}

/// If the store was emptied, no caller gets more than it had before, until the others have renewed their assignments.
#[test]
fn a_lost_assignment_is_restored() {
    let mut state = State::default();
    let mut take = |caller, held, demand, second| {
        let assignments = Assignments::new(Micros::from_secs(TTL)).with_held(held).with_caller(caller);
        let operation = Operation { action: Action::Take, cost: demand, now: at(second) };
        assert!(assignments.step(&mut state, operation));
        Assignments::read(&assignments.explain(&state, operation, true)).millionths
    };
    assert_eq!(take(1, 400_000, 900_000, 0), 400_000);
    assert_eq!(take(2, 300_000, 100_000, 1), 100_000, "its demand");
    assert_eq!(take(4, 0, 500_000, 1), 300_000, "the rest");
    // A new caller has a part of its share now, until the former share of the second one ends.
    assert_eq!(take(3, 250_000, 250_000, 2), 0);
    // Together they have more than the limit, so shares are reduced immediately.
    assert_eq!(take(4, 0, 500_000, 3), 50_000);
    // The state has the assignment, so the former share is not used.
    assert_eq!(take(1, 10_000, 900_000, 7), 150_000);
    assert_eq!(take(5, 9_000_000, 1_000_000, 30), 1_000_000);
}

#[test]
fn a_share_is_kept_for_a_while_and_tells_when_more_is_free() {
    let mut state = State::default();
    let mut take = |caller, demand, second| {
        let assignments = Assignments::new(Micros::from_secs(TTL)).with_caller(caller);
        let operation = Operation { action: Action::Take, cost: demand, now: at(second) };
        assert!(assignments.step(&mut state, operation));
        let share = Assignments::read(&assignments.explain(&state, operation, true));
        (share.millionths, share.lifetime.floor_secs(), share.more_in.map(Micros::floor_secs))
    };
    assert_eq!(take(1, 600_000, 0), (750_000, 10, None));
    assert_eq!(take(2, 250_000, 1), (250_000, 10, None), "it has its demand");
    assert_eq!(take(3, 200_000, 2), (0, 10, Some(8)), "the first caller could be gone");
    assert_eq!(take(1, 300_000, 5), (750_000, 5, None), "the share is kept");
    assert_eq!(take(3, 200_000, 5), (0, 10, Some(5)));
    assert_eq!(take(1, 300_000, 6), (375_000, 10, None));
    assert_eq!(take(3, 200_000, 6), (0, 10, Some(4)));
    assert_eq!(take(2, 100_000, 7), (125_000, 10, None));
    assert_eq!(take(3, 200_000, 8), (0, 10, Some(2)), "the first former share that ends");
    assert_eq!(take(3, 200_000, 10), (250_000, 10, None));
    assert_eq!(take(1, 600_000, 12), (625_000, 10, None));
    assert_eq!(take(1, 600_000, 14), (625_000, 10, None), "it is extended");
}

/// In memory, a state of up to [`State::INLINE`] bytes needs no memory of its own.
#[test]
fn a_former_share_stays_assigned_until_its_end() {
    const { assert!(ENTRY_BYTES <= State::INLINE) }
    let mut state = State::default();
    // The lifetime is so short that shares are reduced immediately.
    let mut assigned_for = |ttl, demand, second, asked: [u64; 3]| {
        apply_for(ttl, &mut state, 1, Action::Take, demand, second).unwrap();
        assert_eq!(state.as_bytes().len(), ENTRY_BYTES);
        asked.map(|second| Assignments::assigned(&state, at(second)).map(|(_, millionths)| millionths))
    };
    let mut assigned = |demand, second, asked| assigned_for(4, demand, second, asked);
    assert_eq!(assigned(800_000, 0, [0, 3, 4]), [Some(1_000_000), Some(1_000_000), None]);
    assert_eq!(assigned(400_000, 1, [3, 4, 5]), [Some(1_000_000), Some(500_000), None]);
    assert_eq!(assigned(300_000, 2, [4, 5, 6]), [Some(1_000_000), Some(375_000), None]);
    assert_eq!(assigned(900_000, 3, [5, 6, 7]), [Some(1_000_000), Some(1_000_000), None]);
    assert_eq!(assigned(300_000, 4, [6, 7, 8]), [Some(1_000_000), Some(375_000), None]);
    assert_eq!(assigned(300_000, 5, [6, 7, 9]), [Some(1_000_000), Some(375_000), None]);
    // By a shorter lifetime, or another clock that is behind.
    assert_eq!(assigned_for(2, 100_000, 5, [6, 8, 9]), [Some(1_000_000), Some(1_000_000), None]);
}

/// Times are stored in hundredths of a second, and an assignment never ends too early.
#[test]
fn an_end_is_rounded_up() {
    let assignments = Assignments::new(Micros::from_secs(TTL));
    let mut state = State::default();
    let now = at(0) + Micros::new(1);
    assert!(assignments.step(&mut state, Operation { action: Action::Take, cost: 1, now }));
    assert_eq!(assignments.expires(&state, now), at(TTL) + Micros::new(10_000));
}

#[test]
fn the_share_of_a_caller_that_is_gone_is_free_after_its_end() {
    let mut state = State::default();
    assert_eq!(apply(&mut state, 1, Action::Refund, 0, 0), Some(0), "it has no share yet");
    assert!(state.is_empty());
    assert_eq!(apply(&mut state, 1, Action::Take, 600_000, 0), Some(750_000));
    assert_eq!(apply(&mut state, 1, Action::Refund, 0, 3), Some(0));
    assert_eq!(apply(&mut state, 2, Action::Take, 600_000, 4), Some(250_000), "the caller may still use its share");
    assert_eq!(apply(&mut state, 2, Action::Take, 600_000, 10), Some(750_000));
    assert_eq!(apply(&mut state, 3, Action::Peek, 0, 20), Some(0));
    let assignments = Assignments::new(Micros::from_secs(TTL));
    assert_eq!(assignments.expires(&state, at(11)), at(20));
    assert_eq!(assignments.expires(&State::default(), at(11)), at(11));
    assert!(assignments.denial_counts(&state, at(11)));
}

#[test]
fn small_changes_leave_a_share_as_it_is() {
    for (demand, fair, spare, current, free, share) in [
        // A caller with an unmet demand follows the fair share.
        (1_000_000, 100_700, 0, 100_000, 1_000_000, 100_000),
        (1_000_000, 100_900, 0, 100_000, 1_000_000, 100_900),
        (1_000_000, 99_300, 0, 100_000, 1_000_000, 100_000),
        (1_000_000, 99_100, 0, 100_000, 1_000_000, 99_100),
        // Another one keeps a share that is slightly too large.
        (80_000, 1_000_000, 20_000, 112_000, 1_000_000, 112_000),
        (80_000, 1_000_000, 20_000, 113_000, 1_000_000, 100_000),
        (80_000, 1_000_000, 20_000, 99_300, 1_000_000, 99_300),
        (80_000, 1_000_000, 20_000, 99_100, 1_000_000, 100_000),
        (80_000, 1_000_000, 5_000, 0, 1_000_000, 85_000),
        // The rest is assigned to others.
        (80_000, 1_000_000, 20_000, 100_000, 99_000, 99_000),
    ] {
        assert_eq!(Assignments::share(demand, fair, spare, current, free), share, "{demand} {fair} {current} {free}");
    }
}

#[test]
fn the_number_of_callers_is_bounded_and_assignments_of_wrong_clocks_are_ignored() {
    let mut state = State::default();
    for caller in 1..=Assignments::MAX_CALLERS as u64 {
        assert!(apply(&mut state, caller, Action::Take, 1, 0).is_some());
    }
    assert_eq!(apply(&mut state, 5_000, Action::Take, 1, 0), None);
    assert!(apply(&mut state, 7, Action::Take, 1, 0).is_some(), "this caller has an assignment already");
    assert_eq!(Assignments::assigned(&state, at(0)).unwrap().0, Assignments::MAX_CALLERS as u32);
    assert_eq!(Assignments::valid(&state, Micros::new(START / 2)).count(), 0);
}

proptest! {
    /// Simulates callers that may use a share until the end of its assignment, even after it was reduced.
    #[test]
    fn callers_never_have_more_than_the_limit_together(
        steps in vec((1_u64..6, 0_u64..1_200_000, 0_u64..4, 0_u64..10), 1..200),
    ) {
        let (mut state, mut second) = (State::default(), 0);
        let mut usable: HashMap<u64, Vec<(u64, u64)>> = HashMap::new();
        for (caller, demand, elapsed, kind) in steps {
            second += elapsed;
            let action = if kind == 0 { Action::Refund } else { Action::Take };
            let share = apply_for(TTL, &mut state, caller, action, demand, second).unwrap();
            usable.entry(caller).or_default().push((second + share.lifetime.floor_secs(), share.millionths));
            let most = |shares: &Vec<(u64, u64)>| shares.iter().filter(|(end, _)| *end > second).map(|(_, share)| *share).max();
            let sum: u64 = usable.values().filter_map(most).sum();
            prop_assert!(sum <= Assignments::WHOLE, "{sum} at {second}");
        }
    }
}
