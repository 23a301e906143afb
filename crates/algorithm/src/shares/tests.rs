//! Properties of shares in addition to the common ones (`laws.rs`).

use proptest::prelude::*;

use super::*;

const START: u64 = 1_763_672_400_000_000;
const SECOND: u64 = 1_000_000;

fn shares(capacity: u32, shares: &[(u32, u32)]) -> Shares {
    Shares::new(capacity, Micros::from_secs(1), Classes::new(shares, capacity).unwrap()).unwrap()
}

fn take(limiter: Shares, state: &mut State, class: u8, cost: u64, at: u64) -> Decision {
    let limiter = limiter.with_context(RequestContext { class, ..RequestContext::default() });
    let operation = Operation { action: Action::Take, cost, now: Micros::new(START + at) };
    let allowed = limiter.step(state, operation);
    limiter.explain(state, operation, allowed)
}

#[test]
fn a_class_borrows_unused_capacity_but_no_guaranteed_share() {
    // Of 1000 a second, at least 400 belong to class gold and 100 to class free, which may have 300; 500 are common.
    let limiter = shares(1_000, &[(100, 300), (400, 1_000), (0, 500)]);
    let mut state = State::default();
    let free = take(limiter, &mut state, 0, 300, 0);
    assert_eq!((free.allowed, free.remaining, free.limit), (true, 0, Some(300)));
    let above = take(limiter, &mut state, 0, 1, 0);
    assert_eq!(
        (above.allowed, above.shed, above.retry_after),
        (false, false, Some(Micros::new(3_334))),
        "above the maximum of its class"
    );
    // 400 of its own bucket, and 300 of the 500 common hits, of which class free has taken 200.
    let gold = take(limiter, &mut state, 1, 700, 0);
    assert_eq!((gold.allowed, gold.remaining), (true, 0));
    let more = take(limiter, &mut state, 1, 1, 0);
    assert_eq!((more.allowed, more.shed), (false, true), "denied because of other classes");
    // Both the common inflow and that of its own bucket are available to gold.
    assert_eq!(more.retry_after, Some(Micros::new(1_112)));
    assert!(take(limiter, &mut state, 1, 1, 1_112).allowed);
    // Class free has used up its own bucket. A tenth of a second refills ten hits of it, and thirty of its maximum.
    assert_eq!(take(limiter, &mut state, 0, 0, SECOND / 10).remaining, 30);
}

#[test]
fn unused_inflow_of_a_class_flows_to_the_others() {
    let limiter = shares(100, &[(60, 100), (40, 100)]);
    let mut state = State::default();
    assert!(!take(limiter, &mut state, 0, 61, 0).allowed, "the minimum of the other class cannot be borrowed");
    assert!(take(limiter, &mut state, 0, 60, 0).allowed);
    // The bucket of the other class is full, so the entire inflow of 100 a second is available.
    assert!(!take(limiter, &mut state, 0, 1, 9_999).allowed);
    assert!(take(limiter, &mut state, 0, 1, 16_667).allowed);
}

#[test]
fn a_raised_capacity_does_not_apply_to_past_time() {
    let mut state = State::default();
    let before = shares(10, &[(0, 10)]);
    assert_eq!(take(before, &mut state, 0, 10, 0).remaining, 0);
    // Half a second has refilled five hits. From now on 40 a second flow in, and 30 more are allowed at once.
    let raised = shares(40, &[(0, 40)]);
    assert_eq!(take(before, &mut state.clone(), 0, 0, SECOND / 2).remaining, 5);
    assert_eq!(take(raised, &mut state, 0, 0, SECOND / 2).remaining, 35);
    assert!(take(raised, &mut state, 0, 35, SECOND / 2).allowed);
    assert_eq!(take(raised, &mut state, 0, 0, SECOND / 2 + 100_000).remaining, 4);
}

#[test]
fn rejects_a_capacity_that_cannot_be_counted() {
    let day = Micros::from_secs(86_400);
    let all = |capacity| Classes::new(&[(0, capacity)], capacity).unwrap();
    assert!(Shares::new(50_000, day, all(50_000)).is_some());
    assert_eq!(Shares::new(60_000_000, day, all(60_000_000)), None);
    assert_eq!(Shares::new(1, Micros::ZERO, all(1)), None);
    assert_eq!(Shares::new(1, day, all(2)).map(|_| ()), Some(()), "a maximum above the capacity is accepted");
}

/// Class, cost, and time since the previous request.
fn requests() -> impl Strategy<Value = Vec<(u8, u64, u64)>> {
    let later = prop_oneof![3 => 0_u64..1_000, 3 => 0_u64..100_000, 1 => 0_u64..2_000_000];
    prop::collection::vec((0_u8..3, 1_u64..8, later), 1..200)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    /// Regardless of other classes, a hit is allowed whenever a token bucket of the class's minimum allows it.
    #[test]
    fn a_class_within_its_minimum_is_never_denied(requests in requests(), minimums in (1_u32..20, 0_u32..20)) {
        let limiter = shares(40, &[(minimums.0, 40), (minimums.1, 40), (0, 40)]);
        let min = u64::from(minimums.0);
        let (mut state, mut now, mut tokens, mut last_seen) = (State::default(), 0, min * SECOND, 0);
        for (class, cost, later) in requests {
            now += later;
            tokens = (tokens + (now - last_seen) * min).min(min * SECOND);
            last_seen = now;
            let within = class == 0 && cost * SECOND <= tokens;
            // The first class stays within its minimum: requests that would exceed it are skipped.
            if class == 0 && !within {
                continue;
            }
            let decision = take(limiter, &mut state, class, cost, now);
            if within {
                prop_assert!(decision.allowed, "{:?} at {}", decision, now);
                tokens -= cost * SECOND;
            }
        }
    }

    /// All hits conform to a token bucket of the capacity, and those of a class to one of its maximum.
    #[test]
    fn the_capacity_and_the_maximum_of_a_class_are_never_exceeded(requests in requests(), numbers in (0_u32..20, 1_u32..40, 0_u32..20)) {
        let (min, max, other_min) = numbers;
        let limiter = shares(40, &[(min.min(max), max), (other_min, 40), (0, 40)]);
        let max = u64::from(max);
        let (mut state, mut now, mut passed) = (State::default(), 0, Vec::new());
        for (class, cost, later) in requests {
            now += later;
            if take(limiter, &mut state, class, cost, now).allowed {
                passed.push((class, cost, now));
            }
        }
        for (first, (_, _, from)) in passed.iter().enumerate() {
            for until in passed[first..].iter().map(|(_, _, until)| *until) {
                let within = |class: Option<u8>| -> u64 {
                    let later = passed[first..].iter().filter(|(of, _, at)| *at <= until && class.is_none_or(|class| class == *of));
                    later.map(|(_, cost, _)| cost).sum()
                };
                let span = until - from;
                prop_assert!(within(None) * SECOND <= 40 * (SECOND + span));
                prop_assert!(within(Some(0)) * SECOND <= max * (SECOND + span));
            }
        }
    }
}

#[test]
fn a_refund_returns_borrowed_hits_before_guaranteed_ones() {
    let limiter = shares(1_000, &[(100, 1_000), (400, 1_000)]);
    let mut state = State::default();
    let first = take(limiter, &mut state, 0, 300, 0);
    assert_eq!((first.allowed, first.used, first.remaining), (true, 300, 300));
    assert!(take(limiter, &mut state, 1, 700, 0).allowed, "400 of its own and 300 of the common hits");
    let second = limiter.with_context(RequestContext { class: 1, ..RequestContext::default() });
    second.step(&mut state, Operation { action: Action::Refund, cost: 400, now: Micros::new(START) });
    // 300 common hits are available again, and 100 of the 400 of the second class.
    assert_eq!([0, 1].map(|class| take(limiter, &mut state.clone(), class, 0, 0).remaining), [300, 400]);
}

#[test]
fn a_class_above_the_highest_counts_as_the_highest() {
    let limiter = shares(1_000, &[(100, 300), (400, 1_000), (0, 500)]);
    assert_eq!(take(limiter, &mut State::default(), 200, 1, 0).limit, Some(500));
}

#[test]
fn an_instant_up_to_a_minute_ahead_is_kept() {
    let limiter = shares(100, &[(0, 100)]);
    let mut state = State::default();
    assert!(take(limiter, &mut state, 0, 100, 0).allowed);
    let reset = |behind: u64| {
        let operation = Operation { action: Action::Peek, cost: 0, now: Micros::new(START - behind) };
        limiter.explain(&state, operation, true).reset.get()
    };
    assert_eq!([0, 60 * SECOND, 60 * SECOND + 1].map(reset), [SECOND, 61 * SECOND, SECOND]);
    assert_eq!(limiter.expires(&state, Micros::new(START - 30 * SECOND)), Micros::new(START + SECOND));
}

#[test]
fn a_denied_take_stores_the_corrected_clock_and_capacity() {
    let (slow, fast) = (shares(10, &[(0, 10)]), shares(40, &[(0, 40)]));
    let wait = |denied: Decision| {
        assert!(!denied.allowed);
        denied.retry_after.unwrap().get()
    };
    let (mut state, year) = (State::default(), 31_536_000 * SECOND);
    assert!(take(slow, &mut state, 0, 10, year).allowed);
    assert_eq!(wait(take(slow, &mut state, 0, 1, 0)), SECOND / 10);
    assert!(take(slow, &mut state, 0, 1, SECOND / 10).allowed);

    let mut state = State::default();
    assert!(take(slow, &mut state, 0, 10, 0).allowed);
    assert_eq!(wait(take(fast, &mut state, 0, 40, 0)), SECOND / 4);
    assert!(take(fast, &mut state, 0, 40, SECOND / 4).allowed);
}
