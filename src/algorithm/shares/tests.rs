//! What shares promise beyond what all algorithms do (`laws.rs`).

use proptest::prelude::*;

use super::*;

const START: u64 = 1_763_672_400_000_000;
const SECOND: u64 = 1_000_000;

fn shares(capacity: u32, shares: &[(u32, u32)]) -> Shares {
    Shares::new(capacity, Micros::from_secs(1), Classes::new(shares, capacity).unwrap()).unwrap()
}

fn ask(rule: Shares, state: &mut State, class: u8, cost: u64, at: u64) -> Decision {
    let rule = rule.with_context(RequestContext { class, ..RequestContext::default() });
    let ask = Operation { action: Action::Take, cost, now: Micros::new(START + at) };
    let allowed = rule.step(state, ask);
    rule.explain(state, ask, allowed)
}

#[test]
fn a_class_borrows_what_others_leave_and_never_what_is_theirs() {
    // Of 1000 a second gold has 400 at least and free 100, which may have 300; 500 are nobody's.
    let rule = shares(1_000, &[(100, 300), (400, 1_000), (0, 500)]);
    let mut state = State::default();
    let free = ask(rule, &mut state, 0, 300, 0);
    assert_eq!((free.allowed, free.remaining, free.limit), (true, 0, Some(300)));
    let above = ask(rule, &mut state, 0, 1, 0);
    assert_eq!((above.allowed, above.shed, above.retry_after), (false, false, Some(Micros::new(3_334))), "its ceiling");
    // 400 of its own, and 300 that the free ones have left of the 500.
    let gold = ask(rule, &mut state, 1, 700, 0);
    assert_eq!((gold.allowed, gold.remaining), (true, 0));
    let more = ask(rule, &mut state, 1, 1, 0);
    assert_eq!((more.allowed, more.shed), (false, true), "it is within its ceiling: others are to blame");
    // What is nobody's and its own both flow to gold.
    assert_eq!(more.retry_after, Some(Micros::new(1_112)));
    assert!(ask(rule, &mut state, 1, 1, 1_112).allowed);
    // Free has used up its own; a tenth of a second brings ten, and thirty of its ceiling.
    assert_eq!(ask(rule, &mut state, 0, 0, SECOND / 10).remaining, 30);
}

#[test]
fn what_a_class_does_not_use_runs_over_to_the_others() {
    let rule = shares(100, &[(60, 100), (40, 100)]);
    let mut state = State::default();
    assert!(!ask(rule, &mut state, 0, 61, 0).allowed, "what is kept for the other is not there to borrow at once");
    assert!(ask(rule, &mut state, 0, 60, 0).allowed);
    // The other's bucket is full, and all that flows is 100 a second.
    assert!(!ask(rule, &mut state, 0, 1, 9_999).allowed);
    assert!(ask(rule, &mut state, 0, 1, 16_667).allowed);
}

#[test]
fn a_raised_capacity_brings_no_more_of_the_past() {
    let mut state = State::default();
    let before = shares(10, &[(0, 10)]);
    assert_eq!(ask(before, &mut state, 0, 10, 0).remaining, 0);
    // Half a second has brought five. From now on it is forty a second, and thirty more at once.
    let raised = shares(40, &[(0, 40)]);
    assert_eq!(ask(before, &mut state.clone(), 0, 0, SECOND / 2).remaining, 5);
    assert_eq!(ask(raised, &mut state, 0, 0, SECOND / 2).remaining, 35);
    assert!(ask(raised, &mut state, 0, 35, SECOND / 2).allowed);
    assert_eq!(ask(raised, &mut state, 0, 0, SECOND / 2 + 100_000).remaining, 4);
}

#[test]
fn refuses_what_cannot_be_counted() {
    let day = Micros::from_secs(86_400);
    let all = |capacity| Classes::new(&[(0, capacity)], capacity).unwrap();
    assert!(Shares::new(50_000, day, all(50_000)).is_some());
    assert_eq!(Shares::new(60_000_000, day, all(60_000_000)), None);
    assert_eq!(Shares::new(1, Micros::ZERO, all(1)), None);
    assert_eq!(Shares::new(1, day, all(2)).map(|_| ()), Some(()), "a ceiling above the capacity is never reached");
}

/// Who asks, for how much, and how long after the one before.
fn requests() -> impl Strategy<Value = Vec<(u8, u64, u64)>> {
    let later = prop_oneof![3 => 0_u64..1_000, 3 => 0_u64..100_000, 1 => 0_u64..2_000_000];
    prop::collection::vec((0_u8..3, 1_u64..8, later), 1..200)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    /// Whatever the others do, a class passes whenever a token bucket of its minimum would let it.
    #[test]
    fn whoever_stays_within_its_minimum_is_never_refused(requests in requests(), least in (1_u32..20, 0_u32..20)) {
        let rule = shares(40, &[(least.0, 40), (least.1, 40), (0, 40)]);
        let least = u64::from(least.0);
        let (mut state, mut now, mut left, mut seen) = (State::default(), 0, least * SECOND, 0);
        for (class, cost, later) in requests {
            now += later;
            left = (left + (now - seen) * least).min(least * SECOND);
            seen = now;
            let within = class == 0 && cost * SECOND <= left;
            // It stays within: what would not be is not asked.
            if class == 0 && !within {
                continue;
            }
            let decision = ask(rule, &mut state, class, cost, now);
            if within {
                prop_assert!(decision.allowed, "{:?} at {}", decision, now);
                left -= cost * SECOND;
            }
        }
    }

    /// All together keep to a token bucket of the capacity, and each class to one of its maximum.
    #[test]
    fn nobody_has_more_than_there_is(requests in requests(), numbers in (0_u32..20, 1_u32..40, 0_u32..20)) {
        let (least, most, other) = numbers;
        let rule = shares(40, &[(least.min(most), most), (other, 40), (0, 40)]);
        let most = u64::from(most);
        let (mut state, mut now, mut passed) = (State::default(), 0, Vec::new());
        for (class, cost, later) in requests {
            now += later;
            if ask(rule, &mut state, class, cost, now).allowed {
                passed.push((class, cost, now));
            }
        }
        for (first, (_, _, from)) in passed.iter().enumerate() {
            for until in passed[first..].iter().map(|(_, _, until)| *until) {
                let within = |class: Option<u8>| -> u64 {
                    let later = passed[first..].iter().filter(|it| it.2 <= until && class.is_none_or(|class| class == it.0));
                    later.map(|it| it.1).sum()
                };
                let span = until - from;
                prop_assert!(within(None) * SECOND <= 40 * (SECOND + span));
                prop_assert!(within(Some(0)) * SECOND <= most * (SECOND + span));
            }
        }
    }
}
