use proptest::prelude::*;

use super::*;
use crate::algorithm::Action;

const START: u64 = 1_763_672_400_000_000;

fn at(millis: u64) -> Micros {
    Micros::new(START + millis * 1_000)
}

/// So many a second, and as many at once.
fn bucket(requests: u32) -> (Algorithm, Algorithm) {
    let shape = LimitSpec { requests, window: Micros::from_secs(1), ..LimitSpec::default() };
    let rule = TokenBucket::build(&shape).unwrap();
    (rule, rule.leasing().unwrap())
}

fn ask(algorithm: &Algorithm, state: &mut State, action: Action, cost: u64, now: Micros) -> Decision {
    algorithm.apply(state, Operation { action, cost, now })
}

#[test]
fn what_is_out_counts_and_does_not_drain_until_it_ends() {
    let (rule, leasing) = bucket(1_000);
    let mut state = State::default();
    let end = leasing.lease_ends(at(0));
    // A full bucket drains in a second, so the grid has steps of an eighth.
    assert_eq!((end, leasing.lease_lifetime()), (at(250), Micros::new(125_000)));
    assert!(ask(&leasing, &mut state, Action::Take, 400, at(0)).allowed);
    let look = |state: &State, millis| ask(&rule, &mut state.clone(), Action::Peek, 1, at(millis));
    assert_eq!((look(&state, 0).remaining, look(&state, 249).remaining), (600, 600));
    assert_eq!((look(&state, 250).remaining, look(&state, 260).remaining), (600, 610));
    assert_eq!((look(&state, 0).reset, look(&state, 0).used), (at(650) - at(0), 400));
    // What is asked for itself drains meanwhile; what would not fit beside the lease is refused until it has ended.
    assert!(ask(&rule, &mut state, Action::Take, 500, at(100)).allowed);
    let refused = ask(&rule, &mut state, Action::Take, 650, at(100));
    assert_eq!((refused.allowed, refused.remaining, refused.retry_after), (false, 100, Some(at(650) - at(100))));
    assert_eq!(look(&state, 249).remaining, 100 + 149);
    assert_eq!(refused.reset, at(250 + 350 + 400) - at(100));
}

#[test]
fn what_comes_back_was_never_out() {
    let (rule, leasing) = bucket(1_000);
    let mut state = State::default();
    let remaining = |state: &State, millis| ask(&rule, &mut state.clone(), Action::Peek, 1, at(millis)).remaining;
    let undo =
        |state: &mut State, taken, cost, millis| ask(&leasing, state, Action::RollBack(at(taken)), cost, at(millis));
    ask(&leasing, &mut state, Action::Take, 300, at(0));
    ask(&leasing, &mut state, Action::Take, 300, at(130));
    undo(&mut state, 0, 100, 140);
    assert_eq!((remaining(&state, 140), remaining(&state, 260)), (500, 510), "200 of the first are poured at 250");
    undo(&mut state, 130, 300, 260);
    assert_eq!(remaining(&state, 260), 810);
    undo(&mut state, 0, 100, 260);
    assert_eq!(remaining(&state, 260), 900, "late, it is worth less: 10 ms of it have drained");
    ask(&leasing, &mut state, Action::Take, 100, at(300));
    undo(&mut state, 130, 100, 300);
    assert_eq!(remaining(&state, 300), 840, "of another lease nothing is taken");
}

#[test]
fn only_the_limit_is_leased_and_only_of_what_lasts() {
    let shape = LimitSpec { requests: 100, window: Micros::from_secs(1), soft: Some(50), ..LimitSpec::default() };
    let leasing = TokenBucket::build(&shape).unwrap().leasing().unwrap();
    let look = |cost| ask(&leasing, &mut State::default(), Action::Peek, cost, at(0));
    assert!(look(100).allowed && !look(100).soft && !look(101).allowed);
    let fast = LimitSpec { burst: Some(7), requests: 2_000, ..shape };
    assert_eq!(TokenBucket::build(&fast).unwrap().leasing(), None, "it drains in 5 ms");
    let waits = Algorithm::kind("leaky_bucket").unwrap();
    let queue = LimitSpec { queue: Some(1), soft: None, ..shape };
    assert_eq!((waits.build)(&queue).unwrap().leasing(), None, "nobody knows how long to wait");
    assert!((waits.build)(&LimitSpec { queue: None, ..queue }).unwrap().leasing().is_some());
}

#[test]
fn leases_of_limits_before_make_few_entries() {
    let mut state = State::default();
    let granted = (1..=20).filter(|hundreds| {
        let (_, leasing) = bucket(100 * hundreds + 1);
        let shape = LimitSpec {
            requests: 1_000,
            burst: Some(200 + hundreds * 10),
            window: Micros::from_secs(1),
            ..LimitSpec::default()
        };
        let other = TokenBucket::build(&shape).unwrap().leasing().unwrap();
        [leasing, other].iter().filter(|it| ask(it, &mut state, Action::Take, 1, at(7)).allowed).count() == 2
    });
    assert!(granted.count() < 20);
    assert!(state.as_bytes().len() <= 16 + 4 * 18, "{state:?}");
}

/// What an instance does with leases: when, and how much.
#[derive(Clone, Debug)]
enum Event {
    Direct(u64),
    Lease(u64),
    /// Of the hits of a lease so many, as late as may be or at once.
    Spend(usize, u64, bool),
    GiveBack(usize),
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
        any::<prop::sample::Index>().prop_map(|lease| Event::GiveBack(lease.index(8))),
    ];
    prop::collection::vec((0_u64..60_000, event), 1..120)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    /// Whoever pours each hit into a bucket of his own when it is spent sees it never overflow.
    #[test]
    fn what_is_spent_never_overflows(requests in 50_u32..200, events in events()) {
        let (rule, leasing) = bucket(requests);
        let (mut state, mut now) = (State::default(), START);
        let mut leases: Vec<(Micros, u64)> = Vec::new();
        let mut spent: Vec<(u64, u64)> = Vec::new();
        for (later, event) in events {
            now += later;
            let instant = Micros::new(now);
            match event {
                Event::Direct(hits) if ask(&rule, &mut state, Action::Take, hits, instant).allowed => spent.push((now, hits)),
                Event::Lease(hits) if ask(&leasing, &mut state, Action::Take, hits, instant).allowed => leases.push((instant, hits)),
                Event::Direct(_) | Event::Lease(_) => {}
                Event::Spend(lease, hits, late) => {
                    let count = leases.len().max(1);
                    if let Some((taken, left)) = leases.get_mut(lease % count) {
                        let end = leasing.lease_ends(*taken).get();
                        let hits = hits.min(*left);
                        if now < end {
                            *left -= hits;
                            spent.push((if late { end - 1 } else { now }, hits));
                        }
                    }
                }
                Event::GiveBack(lease) if !leases.is_empty() => {
                    let (taken, left) = leases.swap_remove(lease % leases.len());
                    ask(&leasing, &mut state, Action::RollBack(taken), left, instant);
                }
                Event::GiveBack(_) => {}
            }
        }
        spent.sort_unstable();
        let mut own = State::default();
        for (when, hits) in spent {
            let passed = ask(&rule, &mut own, Action::Take, hits, Micros::new(when)).allowed;
            prop_assert!(passed, "{} hits at {}", hits, when - START);
        }
    }
}
