//! What sliding windows promise beyond what all algorithms do (`laws.rs`) and the vectors (`tests/golden`).

use proptest::prelude::*;

use super::*;

const START: u64 = 1_763_672_400_000_000;

fn minute(limit: u64, buckets: u32, edge: WindowEdge) -> SlidingWindow {
    SlidingWindow::new(MaxHits::hard(limit), Micros::from_secs(60), buckets, edge, false).unwrap()
}

fn ask(rule: &SlidingWindow, state: &mut State, action: Action, cost: u64, now: u64) -> Decision {
    let ask = Operation { action, cost, now: Micros::new(now) };
    let allowed = rule.step(state, ask);
    rule.explain(state, ask, allowed)
}

/// Cloudflare's example: 42 in the minute before, 18 in this one, and 15 s into it make 49.5.
#[test]
fn the_oldest_counter_counts_by_its_overlap() {
    let rule = minute(50, 1, WindowEdge::Weighted);
    let mut state = State::default();
    assert!(ask(&rule, &mut state, Action::Take, 42, START).allowed);
    // Taken when 42 · 45/60 = 31.5 are left of them.
    assert!(ask(&rule, &mut state, Action::Take, 18, START + 75_000_000).allowed);
    let look = ask(&rule, &mut state, Action::Peek, 1, START + 75_000_000);
    assert_eq!((look.used, look.remaining, look.allowed), (50, 0, false));
    // 0.5 of the 42 have left after 60 s · 0.5/42, and one more hit fits.
    assert_eq!(look.retry_after, Some(Micros::new(714_286)));
}

#[test]
fn a_changed_window_keeps_what_was_counted() {
    let (minute, hour) = (minute(10, 1, WindowEdge::Weighted), Micros::from_secs(3_600));
    let hour = SlidingWindow::new(MaxHits::hard(100), hour, 6, WindowEdge::Weighted, false).unwrap();
    let mut state = State::default();
    ask(&minute, &mut state, Action::Take, 10, START);
    assert_eq!(ask(&hour, &mut state, Action::Take, 1, START + 1).remaining, 89);
    // And back: as much as the limit, not all that the longer window had counted.
    ask(&hour, &mut state, Action::Take, 60, START + 2);
    let back = ask(&minute, &mut state, Action::Take, 1, START + 3);
    assert_eq!((back.allowed, back.used), (false, 10));
    assert!(ask(&minute, &mut state, Action::Take, 1, START + 120_000_000).allowed);
}

proptest! {
    /// Strict: whatever an adversary does, no window of the length holds more than the limit.
    #[test]
    fn a_strict_window_is_never_above_the_limit(
        limit in 1_u64..12, buckets in 1_u32..8,
        hits in prop::collection::vec((1_u64..5, 0_u64..20_000_000), 1..80),
    ) {
        let rule = minute(limit, buckets, WindowEdge::Strict);
        let (mut state, mut now, mut passed) = (State::default(), START, Vec::new());
        for (cost, later) in hits {
            now += later;
            if ask(&rule, &mut state, Action::Take, cost, now).allowed {
                passed.push((now, cost));
            }
            let inside = passed.iter().filter(|(at, _)| *at > now - 60_000_000).map(|(_, cost)| cost).sum::<u64>();
            prop_assert!(inside <= limit);
        }
    }

    /// Weighted: the estimate errs by no more than what the oldest counter holds.
    #[test]
    fn an_estimate_errs_by_the_oldest_counter_at_most(
        buckets in 1_u32..8, hits in prop::collection::vec(0_u64..8_000_000, 1..80),
    ) {
        let rule = minute(1_000_000, buckets, WindowEdge::Weighted);
        let width = 60_000_000_u64.div_ceil(u64::from(buckets));
        let (mut state, mut now, mut passed) = (State::default(), START, Vec::new());
        for later in hits {
            now += later;
            let used = ask(&rule, &mut state, Action::Take, 1, now).used;
            passed.push(now);
            let exact = passed.iter().filter(|at| **at > now - width * u64::from(buckets)).count() as u64;
            let oldest = now / width - u64::from(buckets);
            let in_oldest = passed.iter().filter(|at| **at / width == oldest).count() as u64;
            prop_assert!(used.abs_diff(exact) <= in_oldest, "{used} for {exact}, {in_oldest} in the oldest");
        }
    }
}
