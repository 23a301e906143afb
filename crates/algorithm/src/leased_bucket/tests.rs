use proptest::prelude::*;

use super::*;
use crate::{Action, Algorithm, LimitSpec, Limiter, Program, token_bucket::TokenBucket};

const START: u64 = 1_763_672_400_000_000;

fn at(millis: u64) -> Micros {
    Micros::new(START + millis * 1_000)
}

/// Returns a bucket of `requests` per second with an equal burst, and the same bucket for leases.
fn bucket(requests: u32) -> (Program, Program) {
    let spec = LimitSpec { requests: requests.into(), window: Micros::from_secs(1), ..LimitSpec::default() };
    let direct = TokenBucket::build(&spec).unwrap();
    (direct.into(), direct.leasing().unwrap())
}

fn apply(program: &Program, state: &mut State, action: Action, cost: u64, now: Micros) -> Decision {
    program.apply(state, Operation { action, cost, now })
}

#[test]
fn leased_hits_count_and_do_not_drain_until_the_lease_ends() {
    let (direct, leasing) = bucket(1_000);
    let mut state = State::default();
    let end = leasing.lease_ends(&State::default(), at(0));
    // A full bucket drains in one second, so a step of the grid is an eighth of a second.
    assert_eq!((end, leasing.lease_lifetime()), (at(250), Micros::new(125_000)));
    assert!(apply(&leasing, &mut state, Action::Take, 400, at(0)).allowed);
    let peek = |state: &State, millis| apply(&direct, &mut state.clone(), Action::Peek, 1, at(millis));
    assert_eq!((peek(&state, 0).remaining, peek(&state, 249).remaining), (600, 600));
    assert_eq!((peek(&state, 250).remaining, peek(&state, 260).remaining), (600, 610));
    assert_eq!((peek(&state, 0).reset, peek(&state, 0).used), (at(650) - at(0), 400));
    // Hits that are taken directly drain meanwhile. Hits that do not fit besides the lease are denied until it ends.
    assert!(apply(&direct, &mut state, Action::Take, 500, at(100)).allowed);
    let denied = apply(&direct, &mut state, Action::Take, 650, at(100));
    assert_eq!((denied.allowed, denied.remaining, denied.retry_after), (false, 100, Some(at(650) - at(100))));
    assert_eq!(peek(&state, 249).remaining, 100 + 149);
    assert_eq!(denied.reset, at(250 + 350 + 400) - at(100));
}

#[test]
fn hits_returned_before_the_lease_ends_were_never_taken() {
    let (direct, leasing) = bucket(1_000);
    let mut state = State::default();
    let remaining = |state: &State, millis| apply(&direct, &mut state.clone(), Action::Peek, 1, at(millis)).remaining;
    let roll_back =
        |state: &mut State, taken, cost, millis| apply(&leasing, state, Action::RollBack(at(taken)), cost, at(millis));
    apply(&leasing, &mut state, Action::Take, 300, at(0));
    apply(&leasing, &mut state, Action::Take, 300, at(130));
    roll_back(&mut state, 0, 100, 140);
    assert_eq!(
        (remaining(&state, 140), remaining(&state, 260)),
        (500, 510),
        "200 hits of the first lease are poured in at 250"
    );
    roll_back(&mut state, 130, 300, 260);
    assert_eq!(remaining(&state, 260), 810);
    roll_back(&mut state, 0, 100, 260);
    assert_eq!(remaining(&state, 260), 900, "10 ms of the lease have drained since its end");
    apply(&leasing, &mut state, Action::Take, 100, at(300));
    roll_back(&mut state, 130, 100, 300);
    assert_eq!(remaining(&state, 300), 840, "hits of another lease are not removed");
}

#[test]
fn only_the_limit_of_a_slow_bucket_can_be_leased() {
    let spec = LimitSpec { requests: 100, window: Micros::from_secs(1), soft: Some(50), ..LimitSpec::default() };
    let leasing = TokenBucket::build(&spec).unwrap().leasing().unwrap();
    let peek = |cost| apply(&leasing, &mut State::default(), Action::Peek, cost, at(0));
    assert!(peek(100).allowed && !peek(100).soft && !peek(101).allowed);
    let fast = LimitSpec { burst: Some(7), requests: 2_000, ..spec };
    assert_eq!(TokenBucket::build(&fast).unwrap().leasing(), None, "the bucket drains in 5 ms");
    let leaky = Algorithm::kind("leaky_bucket").unwrap();
    let queue = LimitSpec { queue: Some(1), soft: None, ..spec };
    assert_eq!((leaky.build)(&queue).unwrap().leasing(), None, "the delay of leased hits is unknown");
    assert!((leaky.build)(&LimitSpec { queue: None, ..queue }).unwrap().leasing().is_some());
}

#[test]
fn leases_of_former_limits_use_at_most_four_entries() {
    let mut state = State::default();
    let granted = (1..=20).filter(|hundreds| {
        let (_, leasing) = bucket(100 * hundreds + 1);
        let spec = LimitSpec {
            requests: 1_000,
            burst: Some((200 + hundreds * 10).into()),
            window: Micros::from_secs(1),
            ..LimitSpec::default()
        };
        let other = TokenBucket::build(&spec).unwrap().leasing().unwrap();
        [leasing, other].iter().filter(|limiter| apply(limiter, &mut state, Action::Take, 1, at(7)).allowed).count()
            == 2
    });
    assert!(granted.count() < 20);
    assert!(state.as_bytes().len() <= 16 + 4 * 18, "{state:?}");
}

/// An action of an instance.
#[derive(Clone, Debug)]
enum Event {
    Direct(u64),
    Lease(u64),
    /// Spends hits of a lease: the index of the lease, the hits, and whether at the latest possible time instead of
    /// now.
    Spend(usize, u64, bool),
    Return(usize),
}

fn events() -> impl Strategy<Value = Vec<(u64, Event)>> {
    let event = prop_oneof![
        (1_u64..40).prop_map(Event::Direct),
        (1_u64..60).prop_map(Event::Lease),
        (any::<prop::sample::Index>(), 1_u64..60, any::<bool>()).prop_map(|(lease, hits, late)| Event::Spend(
            lease.index(8),
            hits,
            late
        )),
        any::<prop::sample::Index>().prop_map(|lease| Event::Return(lease.index(8))),
    ];
    prop::collection::vec((0_u64..60_000, event), 1..120)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    /// A reference bucket into which each hit is poured when it is spent.
    #[test]
    fn spent_hits_never_overflow_a_reference_bucket(requests in 50_u32..200, events in events()) {
        let (direct, leasing) = bucket(requests);
        let (mut state, mut now) = (State::default(), START);
        let mut leases: Vec<(Micros, u64)> = Vec::new();
        let mut spent: Vec<(u64, u64)> = Vec::new();
        for (later, event) in events {
            now += later;
            let instant = Micros::new(now);
            match event {
                Event::Direct(hits) if apply(&direct, &mut state, Action::Take, hits, instant).allowed => spent.push((now, hits)),
                Event::Lease(hits) if apply(&leasing, &mut state, Action::Take, hits, instant).allowed => leases.push((instant, hits)),
                Event::Direct(_) | Event::Lease(_) => {}
                Event::Spend(lease, hits, late) => {
                    let count = leases.len().max(1);
                    if let Some((taken, remaining)) = leases.get_mut(lease % count) {
                        let end = leasing.lease_ends(&State::default(), *taken).get();
                        let hits = hits.min(*remaining);
                        if now < end {
                            *remaining -= hits;
                            spent.push((if late { end - 1 } else { now }, hits));
                        }
                    }
                }
                Event::Return(lease) if !leases.is_empty() => {
                    let (taken, remaining) = leases.swap_remove(lease % leases.len());
                    apply(&leasing, &mut state, Action::RollBack(taken), remaining, instant);
                }
                Event::Return(_) => {}
            }
        }
        spent.sort_unstable();
        let mut reference = State::default();
        for (when, hits) in spent {
            let allowed = apply(&direct, &mut reference, Action::Take, hits, Micros::new(when)).allowed;
            prop_assert!(allowed, "{} hits at {}", hits, when - START);
        }
    }
}

#[test]
fn a_lease_ends_one_to_two_steps_of_the_grid_later() {
    let (_, leasing) = bucket(1_000);
    for (taken, end) in [(0, 250), (124, 250), (125, 375), (130, 375)] {
        assert_eq!(leasing.lease_ends(&State::default(), at(taken)), at(end), "taken after {taken} ms");
    }
}

#[test]
fn leased_hits_stay_leased_while_the_clock_is_behind() {
    let (direct, leasing) = bucket(1_000);
    let mut state = State::default();
    assert!(apply(&leasing, &mut state, Action::Take, 400, at(0)).allowed);
    let behind = at(0) - crate::CLOCK_SLACK;
    let peek = apply(&direct, &mut state, Action::Peek, 1, behind);
    assert_eq!(behind + peek.reset, at(250 + 400));
}

#[test]
fn leased_hits_keep_their_proportion_of_a_changed_limit() {
    let (_, leasing) = bucket(1_000);
    let mut state = State::default();
    assert!(apply(&leasing, &mut state, Action::Take, 400, at(0)).allowed);
    let window = Micros::from_secs(1);
    let twice = LimitSpec { requests: 1_000, window, burst: Some(2_000), ..LimitSpec::default() };
    let twice = TokenBucket::build(&twice).unwrap().into();
    assert_eq!(apply(&twice, &mut state, Action::Peek, 1, at(0)).remaining, 1_200);
}
