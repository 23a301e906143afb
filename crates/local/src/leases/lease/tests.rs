use sluicegate_algorithm::{
    MaxHits,
    fixed_window::FixedWindow,
    sliding_window::{SlidingWindow, WindowEdge},
};

use super::*;

const INTERVAL: Duration = Duration::from_millis(125);
/// Milliseconds from the first take until the end of its window of one minute.
const WINDOW_END: u64 = 10_000;

const fn at(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn fixed() -> Program {
    FixedWindow::new(MaxHits::hard(1_000), Micros::from_secs(60), true).unwrap().into()
}

fn sliding() -> Program {
    SlidingWindow::new(MaxHits::hard(1_000), Micros::from_secs(120), 2, WindowEdge::Strict, false).unwrap().into()
}

/// Returns the outcome of a take of `hits` from a new counter, `millis` milliseconds after the first take.
fn outcome(algorithm: &Program, hits: u64, millis: u64) -> StepOutcome {
    let (mut state, now) = (State::default(), Micros::new((60_000_000 - WINDOW_END * 1_000) + millis * 1_000));
    let allowed = algorithm.step(&mut state, Operation { action: Action::Take, cost: hits, now });
    StepOutcome { allowed, action: Action::Take, at: now, state }
}

fn lease_with(algorithm: &Program, hits: u64) -> Lease {
    let mut lease = Lease::default();
    assert_eq!(lease.acquired(algorithm, hits, outcome(algorithm, hits, 0), Duration::ZERO), None);
    lease
}

fn take(lease: &mut Lease, algorithm: &Program, cost: u64, now: Duration) -> Option<(u64, u64)> {
    let decision = lease.decide(&Counter::new(b"k", *algorithm).take(cost), now, INTERVAL)?.0;
    assert!(decision.allowed && !decision.soft && decision.retry_after.is_none());
    Some((decision.remaining, decision.used))
}

#[test]
fn hits_can_be_used_up_to_the_last_one_until_the_lease_ends() {
    let rule = fixed();
    let mut lease = lease_with(&rule, 10);
    assert_eq!(take(&mut lease, &rule, 4, at(1)), Some((996, 4)));
    assert_eq!(take(&mut lease, &rule, 7, at(1)), None, "6 hits remain");
    let counter = Counter::new(b"k", rule);
    let peek = counter.take(6).peek();
    assert_eq!(
        lease.decide(&peek, at(1), INTERVAL).map(|(decision, to_acquire)| (decision.remaining, to_acquire)),
        Some((996, 0))
    );
    let just_before = at(WINDOW_END) - Duration::from_micros(1);
    assert_eq!(take(&mut lease, &rule, 5, just_before), Some((991, 9)));
    assert_eq!(take(&mut lease, &rule, 1, at(WINDOW_END)), None, "the window may have ended");
    assert_eq!((lease.take_all(at(WINDOW_END)), lease.take_all(just_before), lease.take_all(just_before)), (0, 1, 0));
}

#[test]
fn hits_of_a_denied_request_are_restored_only_to_the_lease_they_came_from() {
    let rule = fixed();
    let mut lease = lease_with(&rule, 10);
    let first = lease.taken_at().unwrap();
    assert_eq!(lease.take_all(at(1)), 10);
    // Meanwhile the lease has acquired hits of the same window.
    assert_eq!(lease.acquired(&rule, 7, outcome(&rule, 17, 5), at(5)), None);
    assert_eq!(lease.restore(&rule, 10, first), None);
    assert_eq!(take(&mut lease, &rule, 17, at(6)).map(|(_, used)| used), Some(17));
    // Then it acquires hits of the next window.
    assert_eq!(lease.acquired(&rule, 7, outcome(&rule, 7, WINDOW_END + 1), at(WINDOW_END + 1)), None);
    assert_eq!(lease.restore(&rule, 10, first), Some(Return { hits: 10, taken_at: first }));
    assert_eq!(lease.take_all(at(WINDOW_END + 1)), 7);
    assert_eq!(Lease::default().restore(&rule, 10, first), Some(Return { hits: 10, taken_at: first }));
}

#[test]
fn an_acquisition_follows_the_demand_and_the_free_hits() {
    let rule = fixed();
    let mut lease = Lease::default();
    assert_eq!(lease.begin_acquire(1_000), 0, "there is no demand");
    for _ in 0..8 {
        assert_eq!(take(&mut lease, &rule, 1, at(0)), None);
    }
    assert_eq!(lease.begin_acquire(4 * MIN_LEASE - 1), 0, "too few hits are free");
    assert_eq!(lease.begin_acquire(1_000), 8 * LEASE_INTERVALS);
    assert_eq!(lease.begin_acquire(1_000), 0, "a call is in progress");
    lease.acquire_failed();
    assert_eq!(lease.begin_acquire(130), 32, "a quarter of the free hits");
    assert_eq!(lease.acquired(&rule, 32, outcome(&rule, 2_000, 0), at(0)), None);
    assert_eq!(take(&mut lease, &rule, 1, at(0)), None, "the store denied the take");
    // In the following intervals the demand is the smoothed average.
    take(&mut lease, &rule, 20, at(125));
    assert_eq!(lease.begin_acquire(1_000), 20 * LEASE_INTERVALS);
    lease.acquire_failed();
    take(&mut lease, &rule, 1, at(250));
    assert_eq!(lease.begin_acquire(1_000), (20 + 4) / 2 * LEASE_INTERVALS);
    lease.acquire_failed();
    take(&mut lease, &rule, 1, at(2_000));
    assert_eq!(lease.begin_acquire(1_000), 0, "the demand has decayed");
    // Repeated acquisitions hold a quarter of all free hits at most.
    let mut lease = lease_with(&rule, 100);
    take(&mut lease, &rule, 60, at(0));
    lease.acquire_failed();
    assert_eq!((lease.begin_acquire(240), lease.begin_acquire(320)), (0, (320 + 40) / 4 - 40), "40 hits are held");
}

#[test]
fn acquires_more_when_half_of_the_target_is_used() {
    let rule = fixed();
    let mut lease = lease_with(&rule, 100);
    let mut to_acquire =
        |cost| lease.decide(&Counter::new(b"k", rule).take(cost), at(0), INTERVAL).map(|(_, to_acquire)| to_acquire);
    assert_eq!(
        (to_acquire(20), to_acquire(13)),
        (Some(0), Some(0)),
        "33 in this interval, a target of 132, and 67 held"
    );
    assert_eq!(to_acquire(1), Some(136 - 66));
    assert_eq!(to_acquire(1), Some(0));
}

fn grant(lease: &mut Lease, rule: &Program, demand: u64, id: u64, now: Duration) -> Option<(u32, u64)> {
    let grant = lease.grant(rule, demand, id, now, Duration::from_secs(1))?;
    Some((grant.hits.get(), grant.ttl.get() / 1_000))
}

fn report(lease: &mut Lease, rule: &Program, id: u64, used: u64, now: Duration) -> Option<(u64, u64)> {
    lease.report(rule, id, used, now).map(|report| {
        assert_eq!(report.unused, None);
        (report.used, report.returned)
    })
}

#[test]
fn granted_hits_count_as_used_and_are_returned_once() {
    let rule = fixed();
    let mut lease = lease_with(&rule, 100);
    assert_eq!(grant(&mut lease, &rule, MIN_GRANT - 1, 1, at(0)), None, "below the minimum");
    assert_eq!(grant(&mut lease, &rule, 20, 1, at(0)), Some((20, 1_000)));
    assert_eq!(grant(&mut lease, &rule, 1_000, 2, at(0)), Some((40, 1_000)), "half of the held hits at most");
    assert_eq!(report(&mut lease, &rule, 1, 15, at(1)), Some((15, 5)));
    assert_eq!(report(&mut lease, &rule, 1, 0, at(1)), None, "a grant is reported once");
    assert_eq!(report(&mut lease, &rule, 2, 1_000, at(1)), Some((40, 0)), "no more than the granted hits");
    assert_eq!(take(&mut lease, &rule, 45, at(1)).map(|(_, used)| used), Some(100), "all hits are used");
    assert_eq!(take(&mut lease, &rule, 1, at(1)), None);
    assert!(grant(&mut lease_with(&rule, 100), &rule, 20, 7, at(0)).is_some());
    let mut lease = lease_with(&rule, 1_000);
    let grants = (0..100).filter(|id| grant(&mut lease, &rule, 10, *id, at(0)).is_some()).count();
    assert_eq!((grants, lease.revoke(0), lease.revoke(0)), (MAX_GRANTS, 10, 0));
}

#[test]
fn a_grant_ends_with_its_lease_and_awaits_its_report() {
    let rule = fixed();
    let mut lease = lease_with(&rule, 100);
    assert_eq!(grant(&mut lease, &rule, 8, 1, at(0)), Some((8, 1_000)));
    assert_eq!(grant(&mut lease, &rule, 8, 2, at(WINDOW_END - 300)), Some((8, 300)));
    assert_eq!(grant(&mut lease, &rule, 8, 3, at(WINDOW_END)), None);
    assert_eq!(report(&mut lease, &rule, 2, 0, at(WINDOW_END)), Some((0, 0)), "the window has ended");
    assert!(!lease.is_idle(Duration::MAX), "the first grant may still be reported");
    assert_eq!(
        (lease.expire_grants(at(1_000)), lease.expire_grants(at(1_001)), lease.expire_grants(at(2_000))),
        (0, 8, 0)
    );
}

/// In a sliding window, taken hits continue to count after the lease has ended.
#[test]
fn unused_hits_of_a_grant_are_returned_after_the_lease_has_ended() {
    let rule = sliding();
    let mut lease = lease_with(&rule, 100);
    let taken_at = lease.taken_at().unwrap();
    for id in 1..=3 {
        assert!(grant(&mut lease, &rule, 8, id, at(0)).is_some());
    }
    assert_eq!(report(&mut lease, &rule, 1, 2, at(WINDOW_END + 1)), Some((2, 6)));
    let unused = lease.return_idle(&rule, at(WINDOW_END + 1), at(0));
    assert_eq!(unused, Some(Return { hits: 76 + 6, taken_at }));
    let unused = Some(Return { hits: 8, taken_at });
    assert_eq!(lease.report(&rule, 2, 0, at(WINDOW_END + 2)), Some(GrantReport { used: 0, returned: 8, unused }));
    assert_eq!(report(&mut lease, &rule, 3, 0, at(WINDOW_END + 200_000)), Some((0, 0)), "the hits no longer count");
}

#[test]
fn hits_above_the_demand_are_returned() {
    let rule = fixed();
    let mut lease = lease_with(&rule, 500);
    take(&mut lease, &rule, 50, at(0));
    assert_eq!(lease.return_excess(at(1), INTERVAL), Some(Return { hits: 250, taken_at: Micros::from_secs(50) }));
    assert_eq!(lease.return_excess(at(1), INTERVAL), None, "a demand of 200, and 200 held");
    // The average halves from interval to interval.
    take(&mut lease, &rule, 1, at(125));
    assert_eq!(lease.return_excess(at(126), INTERVAL), None);
    take(&mut lease, &rule, 1, at(250));
    take(&mut lease, &rule, 1, at(375));
    assert_eq!(
        lease.return_excess(at(376), INTERVAL).map(|unused| unused.hits),
        Some(197 - 4 * 7),
        "7 per interval now"
    );
    assert_eq!(lease_with(&rule, 500).return_excess(at(WINDOW_END), INTERVAL), None, "the lease has ended");
}

#[test]
fn acquisitions_in_one_window_are_merged() {
    let rule = fixed();
    let mut lease = lease_with(&rule, 10);
    // The call was sent at 5 ms and counted at 3 ms by the store's clock, which may run up to 2 ms ahead of this.
    assert_eq!(lease.acquired(&rule, 10, outcome(&rule, 10, 3), at(5)), None);
    assert_eq!(take(&mut lease, &rule, 20, at(WINDOW_END)), None, "the earlier of both ends applies");
    assert!(take(&mut lease, &rule, 20, at(WINDOW_END) - Duration::from_micros(1)).is_some());
    for (rule, expected) in [(fixed(), None), (sliding(), Some(Return { hits: 10, taken_at: Micros::from_secs(50) }))] {
        let mut lease = lease_with(&rule, 10);
        let next = outcome(&rule, 7, WINDOW_END + 1);
        assert_eq!(lease.acquired(&rule, 7, next, at(WINDOW_END + 1)), expected, "hits of an ended window are dropped");
        assert_eq!(take(&mut lease, &rule, 8, at(WINDOW_END + 1)), None);
        assert!(take(&mut lease, &rule, 7, at(WINDOW_END + 1)).is_some());
    }
}

#[test]
fn an_idle_lease_is_returned_once() {
    let rule = fixed();
    let mut lease = lease_with(&rule, 10);
    take(&mut lease, &rule, 3, at(100));
    assert_eq!(lease.return_idle(&rule, at(150), at(100)), None);
    assert!(!lease.is_idle(at(101)), "hits are held");
    let unused = Some(Return { hits: 7, taken_at: Micros::from_secs(50) });
    assert_eq!(lease.return_idle(&rule, at(151), at(101)), unused);
    assert_eq!((lease.return_idle(&rule, at(151), at(101)), take(&mut lease, &rule, 1, at(151))), (None, None));
    assert!(lease.is_idle(at(152)) && !lease.is_idle(at(151)));
    assert_eq!(lease_with(&rule, 10).return_idle(&rule, at(WINDOW_END), at(0)), None, "the window has ended");
    let mut lease = lease_with(&sliding(), 10);
    take(&mut lease, &sliding(), 10, at(0));
    assert_eq!(lease.return_idle(&sliding(), at(WINDOW_END), at(0)), None, "all hits were used");
    let unused = Some(Return { hits: 10, taken_at: Micros::from_secs(50) });
    assert_eq!(
        lease_with(&sliding(), 10).return_idle(&sliding(), at(WINDOW_END), at(0)),
        unused,
        "the hits still count"
    );
    lease.begin_acquire(1_000);
    assert!(!lease.is_idle(at(WINDOW_END)), "a call is in progress");
}

#[test]
fn a_decision_counts_the_time_since_the_acquisition() {
    let rule = fixed();
    let mut lease = lease_with(&rule, 10);
    for (millis, seconds) in [(0, 10), (4_000, 6)] {
        let (decision, _) = lease.decide(&Counter::new(b"k", rule).take(1), at(millis), INTERVAL).unwrap();
        assert_eq!(decision.reset, Micros::from_secs(seconds));
    }
}

#[test]
fn exactly_half_of_the_target_is_acquired_again_and_twice_the_demand_is_kept() {
    let rule = fixed();
    let mut lease = lease_with(&rule, 99);
    let mut to_acquire =
        |cost| lease.decide(&Counter::new(b"k", rule).take(cost), at(0), INTERVAL).map(|(_, to_acquire)| to_acquire);
    assert_eq!((to_acquire(32), to_acquire(1)), (Some(0), Some(66)), "a target of 132, and 66 held");
    for (held, excess) in [(2 * 200 + MIN_LEASE, None), (2 * 200 + MIN_LEASE + 1, Some(200 + MIN_LEASE + 1))] {
        let mut lease = lease_with(&rule, held + 50);
        take(&mut lease, &rule, 50, at(0));
        assert_eq!(lease.return_excess(at(1), INTERVAL).map(|unused| unused.hits), excess);
    }
}
