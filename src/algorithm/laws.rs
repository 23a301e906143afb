//! Laws that every algorithm keeps, whatever its numbers: held against random rules and random histories.

use proptest::{prelude::*, sample::select};

use super::{adaptive::Adaptive, sliding_window::WindowEdge, *};

const START: u64 = 1_763_672_400_000_000;

/// A limit with every word that belongs to its algorithm.
#[derive(Clone, Debug)]
struct Numbers {
    kind: AlgorithmKind,
    shape: LimitSpec,
}

/// Mostly small ones, where histories meet every edge. `min_interval` is left out: what remains does not show it.
fn numbers() -> impl Strategy<Value = Numbers> {
    let requests = prop_oneof![20 => 1_u32..12, 1 => Just(1_000_003), 1 => Just(4_294_967_291 / 8)];
    let window = select(vec![1_000_000_u64, 7_000_000, 60_000_000]);
    let percent = select(vec![None, Some(50), Some(100)]);
    let numbers = (select(Algorithm::KINDS), requests, window, percent, any::<bool>(), 1_u32..8);
    numbers.prop_filter_map("the numbers do not fit", |(kind, requests, window, percent, count_denied, other)| {
        let word = |word: &str| kind.keywords.contains(&word);
        let shape = LimitSpec {
            requests,
            window: Micros::new(window),
            buckets: word("buckets").then_some(other),
            edge: (word("edge") && other % 2 == 0).then_some(WindowEdge::Strict),
            burst: word("burst").then_some(other),
            queue: (word("queue") && other > 3).then_some(other * 2),
            warm_up: kind.name.contains("warm_up").then_some(Micros::new(window * 3 + 1)),
            count_denied: Some(count_denied),
            min_interval: None,
            soft: percent,
            classes: (word("shares") && other > 3).then(|| classes(requests)).flatten(),
            ..LimitSpec::default()
        };
        // What learns is not the same limit for long.
        let stays = kind.name != Adaptive::NAME;
        (stays && (kind.build)(&shape).is_ok()).then_some(Numbers { kind, shape })
    })
}

/// One class that asks, with some that is always there for it and a ceiling, and one for which the rest is kept.
fn classes(requests: u32) -> Option<Classes> {
    Classes::new(&[(requests / 3, requests.div_ceil(2).max(requests / 3)), (requests / 4, requests)], requests).ok()
}

impl Numbers {
    /// With so many times the requests, and the burst; `None` where that is too much.
    fn times(&self, factor: u32) -> Option<Algorithm> {
        let times = |number: u32| number * factor;
        let LimitSpec { requests, burst, queue, .. } = self.shape;
        let classes = self.shape.classes.map(|classes| classes.times(factor));
        let (burst, queue) = (burst.map(times), queue.map(times));
        let shape = LimitSpec { requests: times(requests), burst, queue, classes, ..self.shape };
        (self.kind.build)(&shape).ok()
    }
}

fn any_action() -> impl Strategy<Value = Action> {
    prop_oneof![
        select(vec![Action::Take, Action::Peek, Action::Refund]),
        any::<u64>().prop_map(|taken| Action::RollBack(Micros::new(taken % MAX))),
    ]
}

fn algorithm() -> impl Strategy<Value = Algorithm> {
    numbers().prop_filter_map("the numbers do not fit", |numbers| numbers.times(1))
}

/// Steps through time in quarters of the window and single microseconds.
fn history() -> impl Strategy<Value = Vec<(Action, u64, u64)>> {
    let action = prop_oneof![6 => Just(Action::Take), 1 => Just(Action::Peek), 1 => Just(Action::Refund)];
    let ahead = prop_oneof![Just(0_u64), Just(1), 1..30_000_000_u64, Just(15_000_000), Just(60_000_000)];
    prop::collection::vec((action, 0_u64..5, ahead), 0..20)
}

/// Replays a history; returns the state and the instant after it.
fn replay(algorithm: &Algorithm, history: &[(Action, u64, u64)]) -> (State, u64) {
    let (mut state, mut now) = (State::default(), START);
    for (action, cost, ahead) in history {
        now += ahead;
        algorithm.apply(&mut state, Operation { action: *action, cost: *cost, now: Micros::new(now) });
    }
    (state, now)
}

/// What an algorithm would say, without changing the state.
fn peek(algorithm: &Algorithm, state: &State, cost: u64, now: u64) -> Decision {
    algorithm.apply(&mut state.clone(), Operation { action: Action::Peek, cost, now: Micros::new(now) })
}

/// So many are not counted one by one.
const MANY: u64 = 100;

/// How many single hits pass at one instant.
fn greedy(algorithm: &Algorithm, state: &State, now: u64) -> u64 {
    let mut state = state.clone();
    let take = Operation { action: Action::Take, cost: 1, now: Micros::new(now) };
    (0..MANY).take_while(|_| algorithm.apply(&mut state, take).allowed).count() as u64
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn a_refusal_says_exactly_when_the_same_cost_passes(
        algorithm in algorithm(), history in history(), cost in 0_u64..14,
    ) {
        let (state, now) = replay(&algorithm, &history);
        let refusal = peek(&algorithm, &state, cost, now);
        prop_assert_eq!(refusal.retry_after.is_some() && refusal.allowed, false);
        if refusal.allowed {
            return Ok(());
        }
        match refusal.retry_after {
            Some(wait) => {
                prop_assert!(wait > Micros::ZERO);
                prop_assert!(peek(&algorithm, &state, cost, now + wait.get()).allowed, "{:?}", refusal);
                prop_assert!(!peek(&algorithm, &state, cost, now + wait.get() - 1).allowed, "{:?}", refusal);
            }
            None => prop_assert!(!peek(&algorithm, &State::default(), cost, now).allowed, "a fresh counter refuses it too"),
        }
    }

    #[test]
    fn what_remains_passes_and_no_more(algorithm in algorithm(), history in history()) {
        let (state, now) = replay(&algorithm, &history);
        let look = peek(&algorithm, &state, 0, now);
        if look.remaining > 0 {
            let last = peek(&algorithm, &state, look.remaining, now);
            prop_assert!(last.allowed && !last.soft, "{:?}", look);
        }
        let more = peek(&algorithm, &state, look.remaining + 1, now);
        prop_assert!(!more.allowed || more.soft, "{:?} {:?}", look, more);
    }

    #[test]
    fn more_remains_exactly_when_it_is_said(algorithm in algorithm(), history in history()) {
        let (state, now) = replay(&algorithm, &history);
        let look = peek(&algorithm, &state, 0, now);
        if look.next > Micros::ZERO {
            let then = now + look.next.get();
            prop_assert!(peek(&algorithm, &state, 0, then).remaining > look.remaining);
            prop_assert_eq!(peek(&algorithm, &state, 0, then - 1).remaining, look.remaining);
        } else {
            prop_assert_eq!(look.remaining, peek(&algorithm, &State::default(), 0, now).remaining);
        }
    }

    #[test]
    fn all_is_restored_exactly_when_it_is_said(algorithm in algorithm(), history in history()) {
        let (state, now) = replay(&algorithm, &history);
        let look = peek(&algorithm, &state, 0, now);
        let full = peek(&algorithm, &State::default(), 0, now).remaining;
        let later = peek(&algorithm, &state, 0, now + look.reset.get());
        prop_assert_eq!((later.remaining, later.used), (full, 0));
        if look.used > 0 {
            prop_assert!(peek(&algorithm, &state, 0, now + look.reset.get() - 1).used > 0, "{:?}", look);
        }
    }

    #[test]
    fn a_peek_takes_nothing_and_foretells_the_take(
        algorithm in algorithm(), history in history(), cost in 1_u64..14,
    ) {
        let (state, now) = replay(&algorithm, &history);
        let mut after = state.clone();
        let look = Operation { action: Action::Peek, cost, now: Micros::new(now) };
        let foretold = algorithm.apply(&mut after, look);
        prop_assert_eq!(&after, &state);
        let take = algorithm.apply(&mut after, Operation { action: Action::Take, ..look });
        prop_assert_eq!((foretold.allowed, foretold.soft, foretold.delay), (take.allowed, take.soft, take.delay));
    }

    #[test]
    fn more_time_never_turns_a_pass_into_a_refusal(
        algorithm in algorithm(), history in history(), cost in 0_u64..6, later in 0..100_000_000_u64,
    ) {
        let (state, now) = replay(&algorithm, &history);
        if peek(&algorithm, &state, cost, now).allowed {
            prop_assert!(peek(&algorithm, &state, cost, now + later).allowed);
        }
    }

    #[test]
    fn what_is_given_back_can_be_taken_again(algorithm in algorithm(), history in history(), cost in 1_u64..6) {
        let (mut state, now) = replay(&algorithm, &history);
        let ask = |action| Operation { action, cost, now: Micros::new(now) };
        let before = peek(&algorithm, &state, 0, now).remaining;
        algorithm.apply(&mut state, ask(Action::Refund));
        let given = peek(&algorithm, &state, 0, now).remaining;
        prop_assert!(given >= before && given <= peek(&algorithm, &State::default(), 0, now).remaining);
    }

    /// What was taken and undone may at worst leave a little less than if it had never come: whatever passed meanwhile.
    #[test]
    fn what_is_undone_was_never_there_and_grants_nothing(
        numbers in numbers(), before in history(), cost in 1_u64..5, meanwhile in history(), later in 0..70_000_000_u64,
    ) {
        // Where takes are undone (`charge: all`), only fixed windows count denied hits.
        let count_denied = Some(numbers.kind == Algorithm::DEFAULT);
        let Ok(algorithm) = (numbers.kind.build)(&LimitSpec { count_denied, ..numbers.shape }) else {
            return Ok(());
        };
        let (mut state, taken) = replay(&algorithm, &before);
        let mut without = state.clone();
        if !algorithm.step(&mut state, Operation { action: Action::Take, cost, now: Micros::new(taken) }) {
            return Ok(());
        }
        let mut now = taken;
        // Refunds of what was never taken aside: they stop at nothing, and here there is a hit more to stop at.
        for (action, cost, ahead) in meanwhile.into_iter().filter(|(action, ..)| *action != Action::Refund).take(4) {
            // What was undone has warmed the bucket up meanwhile, and a warm-up forgets that within a hit's time only.
            now += if algorithm.name().contains("warm_up") { ahead.min(1_000) } else { ahead / 8 };
            let ask = Operation { action, cost, now: Micros::new(now) };
            if algorithm.step(&mut state, ask) {
                algorithm.step(&mut without, ask);
            }
        }
        let undo = Operation { action: Action::RollBack(Micros::new(taken)), cost, now: Micros::new(now) };
        prop_assert!(algorithm.apply(&mut state, undo).allowed);
        for now in [now, now + later] {
            let (here, there) = (greedy(&algorithm, &state, now), greedy(&algorithm, &without, now));
            prop_assert!(here <= there, "{} instead of {}", here, there);
        }
    }

    #[test]
    fn what_is_undone_at_once_is_back(algorithm in algorithm(), history in history(), cost in 1_u64..5) {
        let (mut state, now) = replay(&algorithm, &history);
        let before = peek(&algorithm, &state, 0, now).remaining;
        let ask = |action| Operation { action, cost, now: Micros::new(now) };
        if algorithm.apply(&mut state, ask(Action::Take)).allowed && !algorithm.name().contains("warm_up") {
            algorithm.apply(&mut state, ask(Action::RollBack(Micros::new(now))));
            prop_assert_eq!(peek(&algorithm, &state, 0, now).remaining, before);
        }
    }

    #[test]
    fn a_clock_that_steps_back_grants_nothing_and_locks_nobody_out(
        algorithm in algorithm(), history in history(), back in 1..60_000_000_u64, cost in 0_u64..3,
    ) {
        let (mut state, now) = replay(&algorithm, &history);
        // Somebody has seen the later time.
        algorithm.apply(&mut state, Operation { action: Action::Take, cost: 1, now: Micros::new(now) });
        let here = greedy(&algorithm, &state, now);
        if here == MANY {
            return Ok(());
        }
        prop_assert!(greedy(&algorithm, &state, now - back) <= here);
        // Nor by asking while the clock is behind, and then at the old time.
        let mut asked = state.clone();
        let take = Operation { action: Action::Take, cost, now: Micros::new(now - back) };
        let passed = algorithm.apply(&mut asked, take);
        let gained = if passed.allowed { cost } else { 0 };
        prop_assert!(greedy(&algorithm, &asked, now) + gained <= here.max(cost));
        // Whoever would be served again after some time is, at most the step later.
        let reset = peek(&algorithm, &state, 0, now).reset;
        prop_assert!(peek(&algorithm, &state, 0, now - back).reset.get() <= reset.get() + back);
    }

    #[test]
    fn a_clock_that_was_wrong_by_years_locks_nobody_out(algorithm in algorithm(), history in history()) {
        let (mut state, now) = replay(&algorithm, &history);
        let now = now - 5 * 31_536_000_000_000;
        let look = algorithm.apply(&mut state, Operation { action: Action::Take, cost: 1, now: Micros::new(now) });
        // For about as long as by a limiter that was just used up, and not for years.
        let mut used_up = State::default();
        for _ in 0..100 {
            algorithm.apply(&mut used_up, Operation { action: Action::Take, cost: 1, now: Micros::new(now) });
        }
        let longest = peek(&algorithm, &used_up, 0, now).reset + CLOCK_SLACK;
        prop_assert!(look.reset.get() <= 10 * longest.get(), "{:?}, {:?}", look, longest);
    }

    /// Let's Encrypt's boulder 8785 and redis-cell 54: a raised limit kept refusing until the old one would have passed.
    #[test]
    fn a_raised_limit_never_waits_longer_and_no_change_is_a_fresh_quota(
        numbers in numbers(), factor in 2_u32..6, history in history(),
    ) {
        let (Some(low), Some(high)) = (numbers.times(1), numbers.times(factor)) else {
            return Ok(());
        };
        let wait = |decision: Decision| decision.retry_after.unwrap_or_default();
        let ceiling = |algorithm: &Algorithm| peek(algorithm, &State::default(), 0, START).remaining;

        let (state, now) = replay(&low, &history);
        let (before, after) = (peek(&low, &state, 1, now), peek(&high, &state, 1, now));
        prop_assert!(wait(after) <= wait(before) + Micros::new(1), "{:?}, {:?}", before, after);
        // As much of the limit is used, or as many hits: whichever the algorithm goes by, rounded to whole hits.
        let most = |used: u64| ((before.remaining + 1) * u64::from(factor)).max(ceiling(&high).saturating_sub(used));
        prop_assert!(after.remaining <= most(before.used), "{:?}, {:?}", before, after);

        let (state, now) = replay(&high, &history);
        let (before, after) = (peek(&high, &state, 1, now), peek(&low, &state, 1, now));
        let most = (before.remaining / u64::from(factor) + 1).max(ceiling(&low).saturating_sub(before.used));
        prop_assert!(after.remaining <= most, "{:?}, {:?}", before, after);
    }

    /// Somebody else's bytes under a counter's key, and any clock.
    #[test]
    fn whatever_a_store_holds_is_answered(
        algorithm in algorithm(), bytes in prop::collection::vec(any::<u8>(), 0..64), now in 0..MAX,
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
    fn a_state_that_expired_says_no_more_than_none(
        algorithm in algorithm(), history in history(), cost in 0_u64..14, later in 0..100_000_000_u64,
    ) {
        let (state, now) = replay(&algorithm, &history);
        let expired = algorithm.expires(&state, Micros::new(now)).get().max(now) + later;
        prop_assert_eq!(peek(&algorithm, &state, cost, expired), peek(&algorithm, &State::default(), cost, expired));
    }
}
