//! Properties of every algorithm with any limit, tested with random limits and random histories.

use proptest::{prelude::*, sample::select};

use sluicegate_calendar::Period;

use super::{
    adaptive::Adaptive, debt_bucket::DebtBucket, fixed_window::FixedWindow, large_bucket::LargeBucket,
    scheduled_window::ScheduledWindow, sliding_window::WindowEdge, *,
};

const START: u64 = 1_763_672_400_000_000;

/// A limit with all keywords that its algorithm supports.
#[derive(Clone, Debug)]
struct TestLimit {
    kind: AlgorithmKind,
    spec: LimitSpec,
}

/// Generates mostly small limits, with which histories reach every edge case. `min_interval` is excluded, because
/// `remaining` does not take it into account.
fn test_limits() -> impl Strategy<Value = TestLimit> {
    let large = prop_oneof![Just(1_000_003_u64), Just(4_294_967_291 / 8), Just(1_000_000_000_000_037)];
    let requests = prop_oneof![20 => 1_u64..12, 2 => large];
    let window = select(vec![1_000_000_u64, 7_000_000, 60_000_000]);
    let percent = select(vec![None, Some(50), Some(100)]);
    let parameters = (select(Algorithm::KINDS), requests, window, percent, any::<bool>(), 1_u32..8);
    parameters.prop_filter_map(
        "no algorithm has these parameters",
        |(kind, requests, window, percent, count_denied, other)| {
            let accepts = |keyword: &str| kind.keywords.contains(&keyword);
            let spec = LimitSpec {
                requests,
                window: Micros::new(window),
                buckets: accepts("buckets").then_some(other),
                edge: (accepts("edge") && other % 2 == 0).then_some(WindowEdge::Strict),
                burst: accepts("burst").then_some(other.into()),
                queue: (accepts("queue") && other > 3).then_some(other * 2),
                warm_up: kind.name.contains("warm_up").then_some(Micros::new(window * 3 + 1)),
                count_denied: Some(count_denied),
                min_interval: None,
                soft: percent,
                debt: (kind.name == DebtBucket::NAME).then_some(u64::from(other) % 4 + 1),
                phase: (kind.name == ScheduledWindow::NAME && other < 5)
                    .then(|| Micros::new(u64::from(other) * 777_777)),
                period: (kind.name == ScheduledWindow::NAME && other >= 5).then_some(Period::Hour),
                classes: (accepts("shares") && other > 3).then(|| classes(requests)).flatten(),
                ..LimitSpec::default()
            };
            // The limit of an adaptive algorithm does not stay the same.
            let is_constant = kind.name != Adaptive::NAME;
            (is_constant && (kind.build)(&spec).is_ok()).then_some(TestLimit { kind, spec })
        },
    )
}

/// Returns the caller's class, with a minimum and a maximum, and one class with a minimum that nothing uses.
fn classes(requests: u64) -> Option<Classes> {
    let requests = u32::try_from(requests).ok()?;
    Classes::new(&[(requests / 3, requests.div_ceil(2).max(requests / 3)), (requests / 4, requests)], requests).ok()
}

impl TestLimit {
    /// Builds the algorithm with `factor` times the requests and the burst; `None` if that is too much.
    fn times(&self, factor: u32) -> Option<Algorithm> {
        let times = |number: u32| number * factor;
        let times_wide = |number: u64| number * u64::from(factor);
        let LimitSpec { requests, burst, debt, queue, .. } = self.spec;
        let classes = self.spec.classes.map(|classes| classes.times(factor));
        let (burst, debt, queue) = (burst.map(times_wide), debt.map(times_wide), queue.map(times));
        let spec = LimitSpec { requests: times_wide(requests), burst, debt, queue, classes, ..self.spec };
        (self.kind.build)(&spec).ok()
    }
}

fn any_action() -> impl Strategy<Value = Action> {
    prop_oneof![
        select(vec![Action::Take, Action::Peek, Action::Refund]),
        any::<u64>().prop_map(|taken| Action::RollBack(Micros::new(taken % MAX_NUMBER))),
    ]
}

fn algorithm() -> impl Strategy<Value = Algorithm> {
    test_limits().prop_filter_map("no algorithm has these parameters", |limit| limit.times(1))
}

/// Generates operations that are apart by quarters of a minute, single microseconds or random times.
fn history() -> impl Strategy<Value = Vec<(Action, u64, u64)>> {
    let action = prop_oneof![6 => Just(Action::Take), 1 => Just(Action::Peek), 1 => Just(Action::Refund)];
    let ahead = prop_oneof![Just(0_u64), Just(1), 1..30_000_000_u64, Just(15_000_000), Just(60_000_000)];
    prop::collection::vec((action, 0_u64..5, ahead), 0..20)
}

/// Replays a history and returns the state and the instant after it.
fn replay(algorithm: &Algorithm, history: &[(Action, u64, u64)]) -> (State, u64) {
    let (mut state, mut now) = (State::default(), START);
    for (action, cost, ahead) in history {
        now += ahead;
        algorithm.apply(&mut state, Operation { action: *action, cost: *cost, now: Micros::new(now) });
    }
    (state, now)
}

/// Computes a decision without changing the state.
fn peek(algorithm: &Algorithm, state: &State, cost: u64, now: u64) -> Decision {
    algorithm.apply(&mut state.clone(), Operation { action: Action::Peek, cost, now: Micros::new(now) })
}

/// Number up to which single hits are counted.
const MANY: u64 = 100;

/// Returns how many single hits are allowed at one instant.
fn greedy(algorithm: &Algorithm, state: &State, now: u64) -> u64 {
    let mut state = state.clone();
    let take = Operation { action: Action::Take, cost: 1, now: Micros::new(now) };
    (0..MANY).take_while(|_| algorithm.apply(&mut state, take).allowed).count() as u64
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn retry_after_is_exactly_when_the_same_cost_is_allowed(
        algorithm in algorithm(), history in history(), cost in 0_u64..14,
    ) {
        let (state, now) = replay(&algorithm, &history);
        let denied = peek(&algorithm, &state, cost, now);
        prop_assert_eq!(denied.retry_after.is_some() && denied.allowed, false);
        if denied.allowed {
            return Ok(());
        }
        match denied.retry_after {
            Some(wait) => {
                prop_assert!(wait > Micros::ZERO);
                prop_assert!(peek(&algorithm, &state, cost, now + wait.get()).allowed, "{:?}", denied);
                prop_assert!(!peek(&algorithm, &state, cost, now + wait.get() - 1).allowed, "{:?}", denied);
            }
            None => prop_assert!(!peek(&algorithm, &State::default(), cost, now).allowed, "a new counter denies it too"),
        }
    }

    /// A peer builds the algorithm of another instance's counter from these parameters.
    #[test]
    fn the_parameters_of_an_algorithm_build_the_same_algorithm(limit in test_limits(), factor in 1_u32..4) {
        let algorithm = limit.times(factor);
        if let Some((algorithm, spec)) = algorithm.and_then(|algorithm| Some((algorithm, algorithm.spec()?))) {
            prop_assert_eq!((limit.kind.build)(&spec), Ok(algorithm), "{:?}", spec);
        }
    }

    #[test]
    fn hits_that_have_expired_change_no_decision(
        algorithm in algorithm(), history in history(), cost in 1_u64..5, later in 0_u64..200_000_000,
    ) {
        let (mut state, now) = replay(&algorithm, &history);
        let later = Micros::new(now + later);
        if algorithm.has_expired(Micros::new(now), later) {
            let take = Operation { action: Action::Take, cost, now: Micros::new(now) };
            algorithm.recording().step(&mut state, take);
            let new = peek(&algorithm, &State::default(), cost, later.get());
            prop_assert_eq!(peek(&algorithm, &state, cost, later.get()), new);
        }
    }

    #[test]
    fn exactly_the_remaining_hits_are_allowed(algorithm in algorithm(), history in history()) {
        let (state, now) = replay(&algorithm, &history);
        let current = peek(&algorithm, &state, 0, now);
        if current.remaining > 0 {
            let last = peek(&algorithm, &state, current.remaining, now);
            prop_assert!(last.allowed && !last.soft, "{:?}", current);
        }
        let more = peek(&algorithm, &state, current.remaining + 1, now);
        prop_assert!(!more.allowed || more.soft, "{:?} {:?}", current, more);
    }

    #[test]
    fn next_is_exactly_when_more_hits_remain(algorithm in algorithm(), history in history()) {
        let (state, now) = replay(&algorithm, &history);
        let current = peek(&algorithm, &state, 0, now);
        if current.next > Micros::ZERO {
            let then = now + current.next.get();
            prop_assert!(peek(&algorithm, &state, 0, then).remaining > current.remaining);
            prop_assert_eq!(peek(&algorithm, &state, 0, then - 1).remaining, current.remaining);
        } else {
            prop_assert_eq!(current.remaining, peek(&algorithm, &State::default(), 0, now).remaining);
        }
    }

    #[test]
    fn reset_is_exactly_when_the_full_limit_is_available(algorithm in algorithm(), history in history()) {
        let (state, now) = replay(&algorithm, &history);
        let current = peek(&algorithm, &state, 0, now);
        let full = peek(&algorithm, &State::default(), 0, now).remaining;
        let later = peek(&algorithm, &state, 0, now + current.reset.get());
        prop_assert_eq!((later.remaining, later.used), (full, 0));
        if current.used > 0 {
            prop_assert!(peek(&algorithm, &state, 0, now + current.reset.get() - 1).used > 0, "{:?}", current);
        }
    }

    #[test]
    fn a_peek_takes_nothing_and_predicts_the_take(
        algorithm in algorithm(), history in history(), cost in 1_u64..14,
    ) {
        let (state, now) = replay(&algorithm, &history);
        let mut after = state.clone();
        let operation = Operation { action: Action::Peek, cost, now: Micros::new(now) };
        let predicted = algorithm.apply(&mut after, operation);
        prop_assert_eq!(&after, &state);
        let take = algorithm.apply(&mut after, Operation { action: Action::Take, ..operation });
        prop_assert_eq!((predicted.allowed, predicted.soft, predicted.delay), (take.allowed, take.soft, take.delay));
    }

    #[test]
    fn an_allowed_cost_stays_allowed_later(
        algorithm in algorithm(), history in history(), cost in 0_u64..6, later in 0..100_000_000_u64,
    ) {
        let (state, now) = replay(&algorithm, &history);
        if peek(&algorithm, &state, cost, now).allowed {
            prop_assert!(peek(&algorithm, &state, cost, now + later).allowed);
        }
    }

    #[test]
    fn a_refund_makes_hits_available_up_to_the_limit(algorithm in algorithm(), history in history(), cost in 1_u64..6) {
        let (mut state, now) = replay(&algorithm, &history);
        let operation = |action| Operation { action, cost, now: Micros::new(now) };
        let before = peek(&algorithm, &state, 0, now).remaining;
        algorithm.apply(&mut state, operation(Action::Refund));
        let after = peek(&algorithm, &state, 0, now).remaining;
        prop_assert!(after >= before && after <= peek(&algorithm, &State::default(), 0, now).remaining);
    }

    /// A rolled back take may leave slightly less than if it had not happened, regardless of other hits meanwhile.
    #[test]
    fn a_rolled_back_take_leaves_no_more_than_if_it_had_not_happened(
        limit in test_limits(), before in history(), cost in 1_u64..5, meanwhile in history(), later in 0..70_000_000_u64,
    ) {
        // Takes are rolled back with `charge: all`, which supports counting denied hits only for fixed windows.
        let is_first_request = limit.kind.name == first_request::FirstRequestWindow::NAME;
        let count_denied = Some(limit.kind == Algorithm::DEFAULT || is_first_request);
        let Ok(algorithm) = (limit.kind.build)(&LimitSpec { count_denied, ..limit.spec }) else {
            return Ok(());
        };
        let (mut state, taken) = replay(&algorithm, &before);
        let mut without = state.clone();
        if !algorithm.step(&mut state, Operation { action: Action::Take, cost, now: Micros::new(taken) }) {
            return Ok(());
        }
        let mut now = taken;
        // Refunds without a take are excluded: they stop at an empty counter, which differs by the rolled back hits.
        for (action, cost, ahead) in meanwhile.into_iter().filter(|(action, ..)| *action != Action::Refund).take(4) {
            // The rolled back take has warmed up the bucket meanwhile, and a warm-up reverts that only within the time
            // of one hit. A window from the first request reverts it until that window ends.
            let max = if algorithm.name().contains("warm_up") { 1_000 } else { limit.spec.window.get() / 5 };
            let is_short = algorithm.name().contains("warm_up") || is_first_request;
            now += if is_short { ahead.min(max) } else { ahead / 8 };
            let operation = Operation { action, cost, now: Micros::new(now) };
            if algorithm.step(&mut state, operation) {
                algorithm.step(&mut without, operation);
            }
        }
        let roll_back = Operation { action: Action::RollBack(Micros::new(taken)), cost, now: Micros::new(now) };
        prop_assert!(algorithm.apply(&mut state, roll_back).allowed);
        for now in [now, now + later] {
            let (rolled_back, expected) = (greedy(&algorithm, &state, now), greedy(&algorithm, &without, now));
            prop_assert!(rolled_back <= expected, "{} instead of {}", rolled_back, expected);
        }
    }

    #[test]
    fn an_immediate_rollback_restores_the_remaining_hits(algorithm in algorithm(), history in history(), cost in 1_u64..5) {
        let (mut state, now) = replay(&algorithm, &history);
        let before = peek(&algorithm, &state, 0, now).remaining;
        let operation = |action| Operation { action, cost, now: Micros::new(now) };
        if algorithm.apply(&mut state, operation(Action::Take)).allowed && !algorithm.name().contains("warm_up") {
            algorithm.apply(&mut state, operation(Action::RollBack(Micros::new(now))));
            prop_assert_eq!(peek(&algorithm, &state, 0, now).remaining, before);
        }
    }

    #[test]
    fn a_backward_clock_step_neither_grants_hits_nor_blocks_callers(
        algorithm in algorithm(), history in history(), step_back in 1..60_000_000_u64, cost in 0_u64..3,
    ) {
        let (mut state, now) = replay(&algorithm, &history);
        // An operation at the later time.
        algorithm.apply(&mut state, Operation { action: Action::Take, cost: 1, now: Micros::new(now) });
        let allowed = greedy(&algorithm, &state, now);
        if allowed == MANY {
            return Ok(());
        }
        prop_assert!(greedy(&algorithm, &state, now - step_back) <= allowed);
        // A take while the clock is behind does not grant more hits at the former time either.
        let mut stepped_back = state.clone();
        let take = Operation { action: Action::Take, cost, now: Micros::new(now - step_back) };
        let passed = algorithm.apply(&mut stepped_back, take);
        let gained = if passed.allowed { cost } else { 0 };
        prop_assert!(greedy(&algorithm, &stepped_back, now) + gained <= allowed.max(cost));
        // The reset is at most as much later as the clock stepped back.
        let reset = peek(&algorithm, &state, 0, now).reset;
        prop_assert!(peek(&algorithm, &state, 0, now - step_back).reset.get() <= reset.get() + step_back);
    }

    #[test]
    fn a_state_written_years_ahead_does_not_block_callers(algorithm in algorithm(), history in history()) {
        let (mut state, now) = replay(&algorithm, &history);
        let now = now - 5 * 31_536_000_000_000;
        let decision = algorithm.apply(&mut state, Operation { action: Action::Take, cost: 1, now: Micros::new(now) });
        // The wait is similar to that of a limiter that was just used up, not years.
        let mut used_up = State::default();
        for _ in 0..100 {
            algorithm.apply(&mut used_up, Operation { action: Action::Take, cost: 1, now: Micros::new(now) });
        }
        let max_wait = peek(&algorithm, &used_up, 0, now).reset + CLOCK_SLACK;
        prop_assert!(decision.reset.get() <= 10 * max_wait.get(), "{:?}, {:?}", decision, max_wait);
    }

    /// Let's Encrypt's boulder 8785 and redis-cell 54: after a limit was raised, hits were denied until the former
    /// limit would have allowed them.
    #[test]
    fn a_raised_limit_never_waits_longer_and_no_change_restores_the_full_limit(
        limit in test_limits(), factor in 2_u32..6, history in history(),
    ) {
        let (Some(low), Some(high)) = (limit.times(1), limit.times(factor)) else {
            return Ok(());
        };
        // A fixed window above the largest count of its integer has another state, so such a change begins a new counter.
        if low.tag() != high.tag() {
            return Ok(());
        }
        let wait = |decision: Decision| decision.retry_after.unwrap_or_default();
        let ceiling = |algorithm: &Algorithm| peek(algorithm, &State::default(), 0, START).remaining;

        let (state, now) = replay(&low, &history);
        let (before, after) = (peek(&low, &state, 1, now), peek(&high, &state, 1, now));
        prop_assert!(wait(after) <= wait(before) + Micros::new(1), "{:?}, {:?}", before, after);
        // The algorithm keeps either the used proportion of the limit or the number of used hits, rounded to whole
        // hits.
        let max_remaining = |used: u64| ((before.remaining + 1) * u64::from(factor)).max(ceiling(&high).saturating_sub(used));
        prop_assert!(after.remaining <= max_remaining(before.used), "{:?}, {:?}", before, after);

        let (state, now) = replay(&high, &history);
        let (before, after) = (peek(&high, &state, 1, now), peek(&low, &state, 1, now));
        let max_remaining = (before.remaining / u64::from(factor) + 1).max(ceiling(&low).saturating_sub(before.used));
        prop_assert!(after.remaining <= max_remaining, "{:?}, {:?}", before, after);
    }

    /// Bytes that another program wrote to the key of a counter, and any clock.
    #[test]
    fn arbitrary_bytes_as_a_state_yield_a_decision(
        algorithm in algorithm(), bytes in prop::collection::vec(any::<u8>(), 0..64), now in 0..MAX_NUMBER,
        hits in prop::collection::vec((any_action(), any::<u64>()), 1..4),
    ) {
        let mut state = State::from_bytes(&bytes);
        for (action, cost) in hits {
            let decision = algorithm.apply(&mut state, Operation { action, cost, now: Micros::new(now) });
            prop_assert!(decision.allowed || !action.releases());
            let _expires = algorithm.expires(&state, Micros::new(now));
        }
    }

    #[test]
    fn an_expired_state_decides_like_a_new_one(
        algorithm in algorithm(), history in history(), cost in 0_u64..14, later in 0..100_000_000_u64,
    ) {
        let (state, now) = replay(&algorithm, &history);
        let expired = algorithm.expires(&state, Micros::new(now)).get().max(now) + later;
        prop_assert_eq!(peek(&algorithm, &state, cost, expired), peek(&algorithm, &State::default(), cost, expired));
    }
}

/// Builds a limit of 100 hits a minute with each algorithm that supports the other parameters.
fn limits_of_100(spec: LimitSpec) -> Vec<Algorithm> {
    let spec = LimitSpec { requests: 100, window: Micros::from_secs(60), ..spec };
    let mut limits = Vec::new();
    for kind in Algorithm::KINDS {
        let phase = (kind.name == ScheduledWindow::NAME).then_some(Micros::from_secs(7));
        let debt = (kind.name == DebtBucket::NAME).then_some(50);
        limits.extend((kind.build)(&LimitSpec { phase, debt, ..spec }));
    }
    limits
}

/// Parameters with one class, without which there are no shares.
fn one_class() -> LimitSpec {
    LimitSpec { classes: Classes::new(&[(0, 100)], 100).ok(), ..LimitSpec::default() }
}

const COUNTS_DENIED: [&str; 9] = [
    "fixed_window",
    first_request::FirstRequestWindow::NAME,
    ScheduledWindow::NAME,
    "sliding_window",
    "sliding_log",
    "token_bucket",
    LargeBucket::NAME,
    "leaky_bucket",
    "gcra",
];

#[test]
fn denied_hits_count_if_the_rule_says_so() {
    let counting = |count_denied, warm_up| -> Vec<_> {
        let limits = limits_of_100(LimitSpec { count_denied, warm_up, ..LimitSpec::default() });
        limits.iter().filter(|limit| limit.counts_denied()).map(Algorithm::name).collect()
    };
    assert_eq!(counting(None, None), COUNTS_DENIED[..3]);
    assert_eq!(counting(Some(true), None), COUNTS_DENIED);
    for warm_up in [None, Some(Micros::from_secs(60))] {
        assert_eq!(counting(Some(false), warm_up), [""; 0]);
    }
    assert!(counting(Some(true), Some(Micros::from_secs(60))).contains(&"token_bucket with warm_up"));
}

#[test]
fn a_denial_may_be_cached_if_it_does_not_count_and_ends_at_a_known_time() {
    let not_cached = |count_denied, cost| -> Vec<_> {
        let not_cached = |limit: &Algorithm| {
            let (mut state, now) = (State::default(), Micros::new(START));
            limit.step(&mut state, Operation { action: Action::Take, cost, now });
            limit.denial_counts(&state, now)
        };
        let limits = limits_of_100(LimitSpec { count_denied: Some(count_denied), ..one_class() });
        limits.iter().filter(|limit| not_cached(limit)).map(Algorithm::name).collect()
    };
    assert_eq!(not_cached(false, 100), ["concurrency", "shares", "adaptive"]);
    assert_eq!(not_cached(true, 100), COUNTS_DENIED);
    assert_eq!(not_cached(true, 101), COUNTS_DENIED[3..], "above the limit, the count of a fixed window has no effect");
    let reports = reports::UtilizationReports::new(Micros::from_secs(60));
    assert!(reports.denial_counts(&State::default(), Micros::new(START)));
}

#[test]
fn the_key_contains_the_window_if_the_state_does_not() {
    let scopes = limits_of_100(one_class()).into_iter().filter_map(|limit| Some((limit.name(), limit.scope()?)));
    assert_eq!(scopes.collect::<Vec<_>>(), [("fixed_window", 60), ("shares", 60)]);
}

#[test]
fn a_lease_takes_at_most_the_limit_and_its_denials_do_not_count() {
    let mut names = Vec::new();
    for limit in limits_of_100(LimitSpec { soft: Some(50), count_denied: Some(true), ..LimitSpec::default() }) {
        if let Some(leasing) = limit.leasing() {
            let mut state = State::default();
            let take =
                |cost| leasing.step(&mut state, Operation { action: Action::Take, cost, now: Micros::new(START) });
            assert_eq!([101, 100, 1].map(take), [false, true, false], "{leasing:?}");
            names.push(limit.name());
        }
    }
    let expected: Vec<_> = COUNTS_DENIED.into_iter().filter(|name| *name != LargeBucket::NAME).collect();
    assert_eq!(names, expected);
}

#[test]
fn a_counter_has_no_state_after_its_only_take_was_rolled_back() {
    let has_state = |limit: &Algorithm| {
        let (mut state, now) = (State::default(), Micros::new(START));
        for action in [Action::Take, Action::RollBack(now)] {
            assert!(limit.step(&mut state, Operation { action, cost: 20, now }), "{limit:?}");
        }
        !state.is_empty()
    };
    let limits = limits_of_100(one_class());
    let names: Vec<_> = limits.iter().filter(|limit| has_state(limit)).map(Algorithm::name).collect();
    assert_eq!(names, ["fixed_window"], "Redis decrements the integer of a fixed window");
}

#[test]
fn every_window_and_bucket_can_be_built_from_its_parameters() {
    let (warm_up, min_interval) = (Some(Micros::from_secs(60)), Some(Micros::from_secs(1)));
    let limits = limits_of_100(LimitSpec { warm_up, min_interval, ..LimitSpec::default() });
    let limits = limits.into_iter().chain(limits_of_100(LimitSpec::default()));
    let mut names: Vec<_> = limits
        .filter_map(|limit| {
            let built = (Algorithm::KINDS[limit.index()].build)(&limit.spec()?);
            assert_eq!(built, Ok(limit));
            Some(limit.name())
        })
        .collect();
    names.sort_unstable();
    names.dedup();
    let mut expected = [COUNTS_DENIED.as_slice(), &["token_bucket with warm_up", "token_bucket with debt"]].concat();
    expected.sort_unstable();
    assert_eq!(names, expected);
}

/// Builds a limit of these hits a minute with each algorithm that counts hits in numbers or entries.
fn limits_of(hits: [u64; 4]) -> [Algorithm; 4] {
    let (window, [fixed, sliding, log, slots]) = (Micros::from_secs(60), hits.map(MaxHits::hard));
    [
        FixedWindow::new(fixed, window, false).unwrap().into(),
        sliding_window::SlidingWindow::new(sliding, window, 1, WindowEdge::Weighted, false).unwrap().into(),
        sliding_log::SlidingLog::new(log, window, Micros::ZERO, false).unwrap().into(),
        concurrency::Concurrency::new(slots, window).unwrap().into(),
    ]
}

#[test]
fn a_limit_of_zero_never_has_more_hits() {
    for (before, zero) in limits_of([2; 4]).into_iter().zip(limits_of([0; 4])).skip(1) {
        let mut state = State::default();
        assert!(before.step(&mut state, Operation { action: Action::Take, cost: 2, now: Micros::new(START) }));
        let decision = peek(&zero, &state, 1, START);
        assert_eq!((decision.allowed, decision.used, decision.remaining), (false, 2, 0), "{zero:?}");
        assert_eq!((decision.next, decision.retry_after), (Micros::ZERO, None), "{zero:?}");
    }
}

#[test]
fn a_cost_above_the_largest_limit_is_denied_and_stays_above_it_in_scripts() {
    let (max_entries, max_slots) = (sliding_log::SlidingLog::MAX_ENTRIES, concurrency::Concurrency::MAX_SLOTS);
    for limit in limits_of([FixedWindow::MAX_HITS, MaxHits::MAX_SHORT, max_entries, max_slots]) {
        let take = Operation { action: Action::Take, cost: u64::MAX, now: Micros::new(START) };
        assert!(!limit.step(&mut State::default(), take), "{limit:?}");
        let names = Algorithm::SCRIPTS[limit.index()].arguments;
        let argument = |name| limit.arguments(take)[names.iter().position(|other| *other == name).unwrap()];
        assert!(argument("cost") > argument("ceiling"), "{limit:?}");
    }
}
