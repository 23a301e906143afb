//! Properties of the sliding window in addition to the common ones (`laws.rs`) and the vectors (`tests/golden`).

use proptest::prelude::*;

use super::*;

const START: u64 = 1_763_672_400_000_000;

fn minute(limit: u64, buckets: u32, edge: WindowEdge) -> SlidingWindow {
    SlidingWindow::new(MaxHits::hard(limit), Micros::from_secs(60), buckets, edge, false).unwrap()
}

fn apply(limiter: &SlidingWindow, state: &mut State, action: Action, cost: u64, now: u64) -> Decision {
    let operation = Operation { action, cost, now: Micros::new(now) };
    let allowed = limiter.step(state, operation);
    limiter.explain(state, operation, allowed)
}

/// Cloudflare's example: 42 hits in the previous minute and 18 in the current one make 49.5 after 15 s.
#[test]
fn the_oldest_bucket_is_weighted_by_its_overlap() {
    let limiter = minute(50, 1, WindowEdge::Weighted);
    let mut state = State::default();
    assert!(apply(&limiter, &mut state, Action::Take, 42, START).allowed);
    // At this instant, 42 · 45/60 = 31.5 of the 42 hits still count.
    assert!(apply(&limiter, &mut state, Action::Take, 18, START + 75_000_000).allowed);
    let peek = apply(&limiter, &mut state, Action::Peek, 1, START + 75_000_000);
    assert_eq!((peek.used, peek.remaining, peek.allowed), (50, 0, false));
    // After 60 s · 0.5/42, another 0.5 of the 42 hits no longer count, and one more hit fits.
    assert_eq!(peek.retry_after, Some(Micros::new(714_286)));
}

#[test]
fn a_changed_window_keeps_the_counted_hits() {
    let (minute, hour) = (minute(10, 1, WindowEdge::Weighted), Micros::from_secs(3_600));
    let hour = SlidingWindow::new(MaxHits::hard(100), hour, 6, WindowEdge::Weighted, false).unwrap();
    let mut state = State::default();
    apply(&minute, &mut state, Action::Take, 10, START);
    assert_eq!(apply(&hour, &mut state, Action::Take, 1, START + 1).remaining, 89);
    // In the other direction, only the limit counts, not all hits that the longer window had counted.
    apply(&hour, &mut state, Action::Take, 60, START + 2);
    let restored = apply(&minute, &mut state, Action::Take, 1, START + 3);
    assert_eq!((restored.allowed, restored.used), (false, 10));
    assert!(apply(&minute, &mut state, Action::Take, 1, START + 120_000_000).allowed);
}

proptest! {
    /// With a strict edge, no window of that length exceeds the limit.
    #[test]
    fn a_strict_window_never_exceeds_the_limit(
        limit in 1_u64..12, buckets in 1_u32..8,
        hits in prop::collection::vec((1_u64..5, 0_u64..20_000_000), 1..80),
    ) {
        let limiter = minute(limit, buckets, WindowEdge::Strict);
        let (mut state, mut now, mut passed) = (State::default(), START, Vec::new());
        for (cost, later) in hits {
            now += later;
            if apply(&limiter, &mut state, Action::Take, cost, now).allowed {
                passed.push((now, cost));
            }
            let inside = passed.iter().filter(|(at, _)| *at > now - 60_000_000).map(|(_, cost)| cost).sum::<u64>();
            prop_assert!(inside <= limit);
        }
    }

    /// With a weighted edge, the error of the estimate is at most the count of the oldest bucket.
    #[test]
    fn the_error_of_the_estimate_is_at_most_the_oldest_bucket(
        buckets in 1_u32..8, hits in prop::collection::vec(0_u64..8_000_000, 1..80),
    ) {
        let limiter = minute(1_000_000, buckets, WindowEdge::Weighted);
        let width = 60_000_000_u64.div_ceil(u64::from(buckets));
        let (mut state, mut now, mut passed) = (State::default(), START, Vec::new());
        for later in hits {
            now += later;
            let used = apply(&limiter, &mut state, Action::Take, 1, now).used;
            passed.push(now);
            let exact = passed.iter().filter(|at| **at > now - width * u64::from(buckets)).count() as u64;
            let oldest = now / width - u64::from(buckets);
            let in_oldest = passed.iter().filter(|at| **at / width == oldest).count() as u64;
            prop_assert!(used.abs_diff(exact) <= in_oldest, "{used} instead of {exact}, with {in_oldest} in the oldest bucket");
        }
    }
}

#[test]
fn a_changed_window_drops_hits_that_had_expired() {
    let hour = Micros::from_secs(3_600);
    let hour = SlidingWindow::new(MaxHits::hard(100), hour, 1, WindowEdge::Weighted, false).unwrap();
    let mut state = State::default();
    apply(&minute(10, 1, WindowEdge::Weighted), &mut state, Action::Take, 10, START);
    let remaining =
        |second: u64| apply(&hour, &mut state.clone(), Action::Peek, 0, START + second * 1_000_000).remaining;
    assert_eq!([119, 120].map(remaining), [90, 100]);
}

#[test]
fn hits_expire_together_with_their_bucket() {
    let limiter = minute(10, 1, WindowEdge::Weighted);
    let has_expired = |now| limiter.has_expired(Micros::new(START + 30_000_000), Micros::new(START + now));
    assert_eq!([119_999_999, 120_000_000].map(has_expired), [false, true]);
}

/// A bucket has 32 bits. A ceiling above its maximum would never be reached.
#[test]
fn a_soft_limit_is_at_most_the_maximum_of_a_bucket() {
    let minute = Micros::from_secs(60);
    let limiter = SlidingWindow::new(MaxHits::soft(4_000_000_000, 10), minute, 1, WindowEdge::Strict, false).unwrap();
    let mut state = State::default();
    assert!(apply(&limiter, &mut state, Action::Take, MAX_COUNT, START).allowed);
    assert!(!apply(&limiter, &mut state, Action::Take, 1, START).allowed);
    let spec = LimitSpec { requests: 4_000_000_000, window: minute, soft: Some(10), ..LimitSpec::default() };
    assert_eq!(SlidingWindow::build(&spec).unwrap_err().keyword, "soft");
    assert!(SlidingWindow::build(&LimitSpec { soft: Some(7), ..spec }).is_ok());
}
