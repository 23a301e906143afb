//! Tests of the exchange. `tests/virtual_time/peers.rs` tests it with failures of the network and of instances.

use proptest::{prelude::*, sample::select};

use super::*;
use crate::{
    algorithm::{
        Action, Algorithm, CLOCK_SLACK, MaxHits, concurrency::Concurrency, fixed_window::FixedWindow, gcra::Gcra,
        leaky_bucket::LeakyBucket, sliding_log::SlidingLog, sliding_window::SlidingWindow, sliding_window::WindowEdge,
        token_bucket::TokenBucket,
    },
    store::{Charge, Hit, identity::Digests, memory::Settings},
};

/// The beginning of a minute.
const START: u64 = 1_763_672_400;
const KEY: &str = "{d|k=v}";

fn at(millis: u64) -> Micros {
    Micros::new(START * 1_000_000 + millis * 1_000)
}

fn fixed_window(limit: u64, seconds: u64) -> Algorithm {
    FixedWindow::new(MaxHits::hard(limit), Micros::from_secs(seconds), false).unwrap().into()
}

fn sliding_window(limit: u64, seconds: u64, buckets: u32) -> Algorithm {
    let window = Micros::from_secs(seconds);
    SlidingWindow::new(MaxHits::hard(limit), window, buckets, WindowEdge::Strict, false).unwrap().into()
}

fn sliding_log(limit: u64, seconds: u64) -> Algorithm {
    SlidingLog::new(MaxHits::hard(limit), Micros::from_secs(seconds), Micros::ZERO, false).unwrap().into()
}

fn token_bucket(requests: u32, seconds: u64, burst: u64) -> Algorithm {
    TokenBucket::new(requests, Micros::from_secs(seconds), MaxHits::hard(burst), false).unwrap().into()
}

/// Returns a limit of `limit` hits a second of each rate algorithm.
fn all_algorithms(limit: u32) -> Vec<Algorithm> {
    let (hits, second) = (MaxHits::hard(limit.into()), Micros::from_secs(1));
    vec![
        fixed_window(limit.into(), 1),
        sliding_window(limit.into(), 1, 1),
        sliding_window(limit.into(), 1, 6),
        sliding_log(limit.into(), 1),
        token_bucket(limit, 1, limit.into()),
        Gcra::new(limit, second, hits, false).unwrap().into(),
        LeakyBucket::new(limit, second, hits, limit.into(), false).unwrap().into(),
    ]
}

/// An instance with its store.
struct Instance {
    memory: Arc<Memory>,
    peers: Arc<Peers>,
}

impl Instance {
    fn new(epoch: u64) -> Self {
        Self::with_max_counters(epoch, 1_000_000)
    }

    fn with_max_counters(epoch: u64, max_counters: usize) -> Self {
        let memory = Arc::new(Memory::exchanged(&Settings { max_counters }));
        Self { peers: Peers::with_epoch(Arc::clone(&memory), Metrics::new(), epoch), memory }
    }

    fn decide(&self, key: &str, limit: &Algorithm, (action, cost): (Action, u64), now: Micros) -> bool {
        let hit = Hit { action, ..Hit::take(key.as_bytes(), limit, cost) };
        self.memory.apply(&[hit], Charge::Each, now)[0].unwrap().decision.allowed
    }

    fn take(&self, limit: &Algorithm, cost: u64, now: Micros) -> bool {
        self.decide(KEY, limit, (Action::Take, cost), now)
    }

    fn refund(&self, limit: &Algorithm, cost: u64, now: Micros) {
        self.decide(KEY, limit, (Action::Refund, cost), now);
    }

    fn used_by(&self, key: &str, limit: &Algorithm, now: Micros) -> u64 {
        let hit = Hit { action: Action::Peek, ..Hit::take(key.as_bytes(), limit, 0) };
        self.memory.apply(&[hit], Charge::Each, now)[0].unwrap().decision.used
    }

    fn used(&self, limit: &Algorithm, now: Micros) -> u64 {
        self.used_by(KEY, limit, now)
    }

    /// Pulls once.
    fn pull(&self, origin: &Self, now: Micros) -> Pull {
        origin.peers.pull(self.peers.epoch(), self.peers.position(origin.peers.epoch()), now)
    }

    /// Pulls a batch that must exist.
    fn batch(&self, origin: &Self, now: Micros) -> Batch {
        match self.pull(origin, now) {
            Pull::Batch(batch) => batch,
            other => panic!("{other:?} instead of a batch"),
        }
    }

    /// Pulls and applies everything, and returns the number of batches.
    fn follow(&self, origin: &Self, now: Micros) -> usize {
        let mut batches = 0;
        while let Pull::Batch(batch) = self.pull(origin, now) {
            assert!(self.peers.apply(&batch, now));
            batches += 1;
        }
        assert!(matches!(self.pull(origin, now), Pull::Nothing));
        batches
    }

    /// Joins by a copy of another instance.
    fn copy(&self, source: &Self, now: Micros) {
        let positions = source.peers.copy_positions(now);
        (0..).map_while(|part| source.peers.copy_part(part)).for_each(|copies| self.peers.insert_copies(copies, now));
        self.peers.continue_from(source.peers.epoch(), &positions, now);
    }
}

fn description(pull: &Pull) -> String {
    match pull {
        Pull::Batch(Batch { after, until, .. }) => format!("{after} to {until}"),
        Pull::Nothing => "nothing".to_owned(),
        Pull::Copy => "copy".to_owned(),
    }
}

fn increment(limits: Vec<Algorithm>, changes: Vec<Change>) -> Batch {
    let increments = vec![Arc::new(Increment::new(1, at(0), limits, changes))];
    Batch { origin: 9, after: 0, until: 1, now: at(0), increments }
}

#[test]
fn counted_hits_reach_a_peer() {
    let (a, b, limit) = (Instance::new(1), Instance::new(2), fixed_window(10, 60));
    let published = a.peers.published();
    assert!(a.take(&limit, 7, at(0)) && a.take(&limit, 1, at(1)));
    a.peers.publish(at(50));
    assert_eq!(*published.borrow(), 1);
    assert_eq!(b.follow(&a, at(60)), 1);
    assert_eq!((b.used(&limit, at(60)), b.peers.position(1)), (8, Some(1)));
    assert!(!b.take(&limit, 3, at(60)) && b.take(&limit, 2, at(60)));
    b.peers.publish(at(100));
    a.follow(&b, at(110));
    assert!(!a.take(&limit, 1, at(110)), "both count ten hits");
    assert_eq!((a.used(&limit, at(110)), b.used(&limit, at(110))), (10, 10));
}

#[test]
fn hits_of_a_peer_are_not_passed_on() {
    let (a, b, limit) = (Instance::new(1), Instance::new(2), fixed_window(10, 60));
    a.take(&limit, 3, at(0));
    a.peers.publish(at(50));
    b.follow(&a, at(60));
    b.peers.publish(at(70));
    assert!(matches!(a.pull(&b, at(80)), Pull::Nothing));
}

#[test]
fn operations_without_hits_publish_nothing() {
    let (a, limit) = (Instance::new(1), fixed_window(10, 60));
    a.decide(KEY, &limit, (Action::Peek, 3), at(0));
    a.take(&limit, 0, at(0));
    a.take(&limit, 11, at(0));
    a.take(&limit, 2, at(1));
    a.refund(&limit, 2, at(2));
    a.peers.publish(at(50));
    assert_eq!(*a.peers.published().borrow(), 0);
}

#[test]
fn a_batch_is_applied_exactly_once() {
    let (a, b, limit) = (Instance::new(1), Instance::new(2), fixed_window(100, 60));
    a.take(&limit, 3, at(0));
    a.peers.publish(at(50));
    let first = b.batch(&a, at(60));
    assert!(b.peers.apply(&first, at(60)));
    assert!(!b.peers.apply(&first, at(61)), "duplicate");
    a.take(&limit, 4, at(70));
    a.peers.publish(at(100));
    let second = b.batch(&a, at(110));
    assert!(b.peers.apply(&second, at(110)));
    assert!(!b.peers.apply(&first, at(120)) && !b.peers.apply(&second, at(120)), "late");
    assert_eq!(b.used(&limit, at(120)), 7);
    // A batch that overtakes another one is ignored.
    let c = Instance::new(3);
    assert!(!c.peers.apply(&second, at(120)) && c.peers.apply(&first, at(120)) && c.peers.apply(&second, at(120)));
    assert_eq!(c.used(&limit, at(120)), 7);
}

#[test]
fn a_lost_batch_is_resent_unchanged() {
    let (a, b, limit) = (Instance::new(1), Instance::new(2), fixed_window(100, 60));
    a.take(&limit, 3, at(0));
    a.peers.publish(at(50));
    let lost = b.batch(&a, at(60));
    a.take(&limit, 4, at(70));
    a.peers.publish(at(100));
    let resent = b.batch(&a, at(110));
    assert_eq!((lost.after, lost.until), (resent.after, resent.until));
    assert!(Arc::ptr_eq(&lost.increments[0], &resent.increments[0]) && resent.increments.len() == 1);
    assert_eq!((lost.now, resent.now), (at(60), at(110)), "only the time differs");
    assert!(b.peers.apply(&resent, at(110)) && !b.peers.apply(&lost, at(120)));
    assert_eq!(b.follow(&a, at(130)), 1);
    assert_eq!(b.used(&limit, at(130)), 7);
}

#[test]
fn an_instance_ignores_its_own_batch_and_one_without_progress() {
    let (a, b, limit) = (Instance::new(1), Instance::new(2), fixed_window(100, 60));
    a.take(&limit, 3, at(0));
    a.peers.publish(at(50));
    let batch = b.batch(&a, at(60));
    assert!(!a.peers.apply(&batch, at(60)));
    assert!(!b.peers.apply(&Batch { until: 0, ..batch.clone() }, at(60)));
    assert_eq!((a.used(&limit, at(60)), b.used(&limit, at(60))), (3, 0));
}

#[test]
fn missing_increments_require_a_copy() {
    let (a, limit) = (Instance::new(1), fixed_window(1_000, 3_600));
    for second in 0..100 {
        a.take(&limit, 1, at(second * 1_000));
        a.peers.publish(at(second * 1_000));
    }
    let pull = |subscriber, after| description(&a.peers.pull(subscriber, after, at(100_000)));
    assert_eq!(pull(2, None), "copy", "the first increments are no longer kept");
    assert_eq!(pull(3, Some(38)), "copy");
    assert_eq!(pull(4, Some(39)), "39 to 100", "increments are kept for a minute");
    assert_eq!(pull(5, Some(100)), "nothing");
    assert_eq!(pull(6, Some(101)), "copy", "the position is beyond the sequence");
    assert_eq!(pull(7, Some(u64::MAX)), "copy");
}

#[test]
fn a_new_instance_of_a_young_one_needs_no_copy() {
    let (a, b, limit) = (Instance::new(1), Instance::new(2), fixed_window(1_000, 3_600));
    assert!(matches!(b.pull(&a, at(0)), Pull::Nothing));
    for second in 0..50 {
        a.take(&limit, 1, at(second * 1_000));
        a.peers.publish(at(second * 1_000));
    }
    assert_eq!(Instance::new(3).follow(&a, at(50_000)), 1);
}

#[test]
fn a_restarted_instance_begins_again() {
    let (a, b, limit) = (Instance::new(1), Instance::new(2), fixed_window(100, 60));
    for round in 0..3 {
        a.take(&limit, 3, at(round * 100));
        a.peers.publish(at(round * 100 + 50));
        b.follow(&a, at(round * 100 + 60));
    }
    let restarted = Instance::new(11);
    restarted.take(&limit, 2, at(1_000));
    restarted.peers.publish(at(1_050));
    assert_eq!(b.peers.position(11), None);
    b.follow(&restarted, at(1_060));
    assert_eq!((b.used(&limit, at(1_060)), b.peers.position(1), b.peers.position(11)), (11, Some(3), Some(1)));
}

/// Counts a hit each second for five minutes, which a peer pulls only in the end.
fn absent_for_minutes(limit: &Algorithm) -> [Instance; 2] {
    let (a, b) = (Instance::new(1), Instance::new(2));
    assert!(matches!(b.pull(&a, at(0)), Pull::Nothing));
    for second in 1..=300 {
        assert!(a.take(limit, 1, at(second * 1_000)));
        a.peers.publish(at(second * 1_000));
    }
    let (subscribers, merged) = a.peers.subscribers();
    assert!(subscribers == 1 && (24..=32).contains(&merged), "{merged} merged changes");
    b.follow(&a, at(300_000));
    [a, b]
}

#[test]
fn an_absent_peer_receives_the_hits_that_still_count() {
    for (limit, most) in [
        (fixed_window(1_000, 60), 1),
        (fixed_window(1_000, 600), 300),
        (sliding_window(1_000, 60, 6), 71),
        (sliding_log(1_000, 60), 61),
    ] {
        let [a, b] = absent_for_minutes(&limit);
        let (exact, merged) = (a.used(&limit, at(300_000)), b.used(&limit, at(300_000)));
        assert!(merged >= exact && merged <= most, "{merged} instead of {exact} hits: {limit:?}");
        let later = at(300_000 + 60_000 + 10_000);
        let has_ended = limit.has_expired(at(300_000), later);
        assert_eq!(b.used(&limit, later) == 0, has_ended, "late hits count no longer than others: {limit:?}");
    }
}

#[test]
fn an_absent_peer_receives_the_hits_that_a_bucket_has_not_drained() {
    // 0.5 hits a second drain, so 150 of 300 remain.
    let slow = token_bucket(30, 60, 1_000);
    let [a, b] = absent_for_minutes(&slow);
    let (exact, merged) = (a.used(&slow, at(300_000)), b.used(&slow, at(300_000)));
    assert_eq!(exact, 151);
    // Hits that are more than half a minute old count from then on.
    assert!((151..=286).contains(&merged), "{merged} hits");
    // All hits drain within 0.1 s.
    let fast = token_bucket(1_000, 1, 100);
    let [_, b] = absent_for_minutes(&fast);
    assert!(b.used(&fast, at(300_000)) <= 61);
    assert_eq!(b.used(&fast, at(301_000)), 0);
}

#[test]
fn a_full_backlog_drops_the_oldest_hits_and_counts_them() {
    let (a, b, limit) = (Instance::new(1), Instance::new(2), fixed_window(10, 3_600));
    assert!(matches!(b.pull(&a, at(0)), Pull::Nothing));
    let seconds = 200;
    for second in 0..seconds {
        for user in 0..100 {
            a.decide(&format!("{second}/{user}"), &limit, (Action::Take, 1), at(second * 1_000));
        }
        a.peers.publish(at(second * 1_000));
        assert!(a.peers.subscribers().1 <= MAX_BACKLOG_CHANGES);
    }
    let dropped = a.peers.metrics().dropped.get();
    assert!(dropped > 0);
    b.follow(&a, at(seconds * 1_000));
    let now = at(seconds * 1_000);
    let known = (0..seconds).filter(|second| b.used_by(&format!("{second}/0"), &limit, now) == 1);
    let known: Vec<_> = known.collect();
    assert_eq!(known, (dropped / 100..seconds).collect::<Vec<_>>());
    assert_eq!(b.peers.metrics().applied.get() + dropped, a.peers.metrics().published.get());
}

#[test]
fn too_many_recent_changes_are_merged_early() {
    let (a, b, limit) = (Instance::new(1), Instance::new(2), fixed_window(1_000, 3_600));
    assert!(matches!(b.pull(&a, at(0)), Pull::Nothing));
    for round in 0..20 {
        for user in 0..MAX_INCREMENT_CHANGES {
            a.decide(&user.to_string(), &limit, (Action::Take, 1), at(round));
        }
        a.peers.publish(at(round));
    }
    assert_eq!(a.peers.subscribers(), (1, MAX_INCREMENT_CHANGES), "one number for each counter");
    assert_eq!(description(&a.peers.pull(3, Some(9), at(20))), "copy");
    b.follow(&a, at(20));
    assert!((0..MAX_INCREMENT_CHANGES).all(|user| b.used_by(&user.to_string(), &limit, at(20)) == 20));
}

#[test]
fn a_large_increment_is_split_and_sent_in_several_batches() {
    let (a, b, limit) = (Instance::new(1), Instance::new(2), fixed_window(1_000, 3_600));
    let users = 2 * MAX_BATCH_CHANGES + 1;
    for user in 0..users {
        a.decide(&user.to_string(), &limit, (Action::Take, 1), at(0));
    }
    a.peers.publish(at(0));
    assert_eq!(*a.peers.published().borrow(), 5);
    let batch = b.batch(&a, at(10));
    assert_eq!((batch.until, batch.increments.len()), (2, MAX_BATCH_CHANGES / MAX_INCREMENT_CHANGES));
    assert_eq!(b.follow(&a, at(10)), 3);
    assert!((0..users).all(|user| b.used_by(&user.to_string(), &limit, at(20)) == 1));
}

/// A pull that arrives late, or twice, has a former position.
#[test]
fn a_late_pull_does_not_discard_the_backlog() {
    let (a, b, limit) = (Instance::new(1), Instance::new(2), fixed_window(1_000, 3_600));
    a.take(&limit, 1, at(0));
    a.peers.publish(at(0));
    b.follow(&a, at(10));
    for second in 1..=100 {
        a.take(&limit, 1, at(second * 1_000));
        a.peers.publish(at(second * 1_000));
    }
    assert_eq!(description(&a.peers.pull(2, Some(0), at(100_000))), "copy");
    assert_eq!(description(&a.peers.pull(2, None, at(100_000))), "copy");
    assert_eq!(description(&a.peers.pull(2, Some(102), at(100_000))), "copy");
    b.follow(&a, at(100_000));
    assert_eq!(b.used(&limit, at(100_000)), 101);
}

#[test]
fn hits_are_delivered_when_all_recent_subscribers_have_confirmed_them() {
    let (a, b, c, limit) = (Instance::new(1), Instance::new(2), Instance::new(3), fixed_window(100, 60));
    assert!(a.peers.is_delivered(at(0)), "there is no subscriber");
    for peer in [&b, &c] {
        assert!(matches!(peer.pull(&a, at(0)), Pull::Nothing));
    }
    a.take(&limit, 1, at(10));
    a.peers.publish(at(50));
    assert!(!a.peers.is_delivered(at(0)));
    b.follow(&a, at(60));
    assert!(!a.peers.is_delivered(at(0)), "c has not pulled again");
    assert!(a.peers.is_delivered(at(1)), "c is not waited for");
    let batch = c.batch(&a, at(70));
    assert!(c.peers.apply(&batch, at(70)));
    assert!(!a.peers.is_delivered(at(0)), "applied, but not confirmed");
    c.follow(&a, at(80));
    assert!(a.peers.is_delivered(at(0)));
    a.take(&limit, 1, at(90));
    a.peers.publish(at(100));
    a.peers.forget(3);
    b.follow(&a, at(110));
    assert!(a.peers.is_delivered(at(0)));
    assert_eq!(a.peers.subscribers(), (1, 0));
}

#[test]
fn silent_instances_are_forgotten() {
    let (a, b, limit) = (Instance::new(1), Instance::new(2), fixed_window(100, 3_600));
    a.take(&limit, 1, at(0));
    a.peers.publish(at(0));
    b.follow(&a, at(0));
    let last = FORGET_AFTER.get() / 1_000 - 1;
    a.peers.publish(at(last));
    assert_eq!((a.peers.subscribers().0, b.peers.position(1)), (1, Some(1)));
    a.peers.publish(at(last + 1));
    assert_eq!((a.peers.subscribers().0, b.peers.position(1)), (0, Some(1)));
    assert!(matches!(b.pull(&a, at(last + 1)), Pull::Nothing), "nothing was missed");
    a.take(&limit, 1, at(last + 2));
    for time in [last + 2, 2 * last + 3] {
        a.peers.publish(at(time));
    }
    assert!(matches!(b.pull(&a, at(2 * last + 3)), Pull::Copy));
}

#[test]
fn the_instance_that_was_silent_for_the_longest_time_is_forgotten_first() {
    let (a, limit) = (Instance::new(1), fixed_window(1_000, 60));
    a.take(&limit, 1, at(0));
    a.peers.publish(at(0));
    let batch = Instance::new(2).batch(&a, at(0));
    let count = MAX_INSTANCES as u64;
    for number in 0..count {
        let _ = a.peers.pull(100 + number, Some(1), at(number));
        a.peers.apply(&Batch { origin: 100 + number, ..batch.clone() }, at(number));
    }
    // The first one is heard of again, so the second one is the oldest.
    let _ = a.peers.pull(100, Some(1), at(count));
    a.peers.apply(&Batch { origin: 100, ..batch.clone() }, at(count));
    let _ = a.peers.pull(99, Some(1), at(count));
    a.peers.apply(&Batch { origin: 99, ..batch.clone() }, at(count));
    assert_eq!(a.peers.subscribers().0, MAX_INSTANCES);
    let positions: Vec<_> = [99, 100, 101, 102].map(|origin| a.peers.position(origin)).to_vec();
    assert_eq!(positions, [Some(1), Some(1), None, Some(1)]);
    a.peers.continue_from(99, &(0..2 * count).map(|number| (1_000 + number, 7)).collect::<Vec<_>>(), at(count));
    assert_eq!((0..2 * count).filter(|number| a.peers.position(1_000 + number).is_some()).count(), 0);
}

#[test]
fn refunds_reach_a_peer() {
    for limit in all_algorithms(100) {
        let (a, b) = (Instance::new(1), Instance::new(2));
        a.take(&limit, 9, at(100));
        a.refund(&limit, 2, at(100));
        a.peers.publish(at(100));
        b.follow(&a, at(100));
        assert_eq!(b.used(&limit, at(100)), 7, "{limit:?}");
        a.refund(&limit, 3, at(100));
        a.take(&limit, 1, at(100));
        a.peers.publish(at(100));
        b.follow(&a, at(100));
        assert_eq!((a.used(&limit, at(100)), b.used(&limit, at(100))), (5, 5), "{limit:?}");
    }
}

#[test]
fn denied_hits_reach_a_peer_if_they_count() {
    let counts_denied = FixedWindow::new(MaxHits::hard(5), Micros::from_secs(60), true).unwrap().into();
    for (limit, expected) in [(counts_denied, 13), (fixed_window(5, 60), 4)] {
        let (a, b) = (Instance::new(1), Instance::new(2));
        assert!(a.take(&limit, 4, at(0)) && !a.take(&limit, 9, at(1)));
        a.peers.publish(at(50));
        b.follow(&a, at(60));
        assert_eq!((a.used(&limit, at(60)), b.used(&limit, at(60))), (expected, expected));
    }
}

#[test]
fn hits_above_the_limit_count() {
    for limit in all_algorithms(10) {
        let (a, b) = (Instance::new(1), Instance::new(2));
        assert!(a.take(&limit, 8, at(100)) && b.take(&limit, 9, at(100)));
        a.peers.publish(at(100));
        b.follow(&a, at(100));
        let most = if matches!(limit, Algorithm::SlidingLog(_)) { 10 } else { 17 };
        assert_eq!(b.used(&limit, at(100)), most, "{limit:?}");
        assert!(!b.take(&limit, 1, at(100)));
    }
}

/// Hits that one bucket allowed while it drained do not all fit into another one.
#[test]
fn the_hits_of_a_bucket_that_has_drained_meanwhile_all_count() {
    let (a, b, limit) = (Instance::new(1), Instance::new(2), token_bucket(100, 1, 5));
    let allowed = (0..=500).filter(|millis| a.take(&limit, 1, at(*millis))).count();
    assert_eq!(allowed, 55);
    a.peers.publish(at(500));
    b.follow(&a, at(500));
    assert_eq!(b.used(&limit, at(500)), 55);
}

#[test]
fn a_limit_that_changes_in_an_interval_is_counted_by_both_limits() {
    let (a, b) = (Instance::new(1), Instance::new(2));
    let (former, new) = (fixed_window(10, 3_600), fixed_window(20, 3_600));
    assert!(a.take(&former, 6, at(0)) && a.take(&new, 9, at(1)));
    a.peers.publish(at(50));
    let batch = b.batch(&a, at(60));
    assert_eq!((batch.increments[0].limits.clone(), batch.increments[0].changes.len()), (vec![former, new], 2));
    b.follow(&a, at(60));
    assert_eq!((b.used(&new, at(60)), b.used(&former, at(60))), (15, 15));
    // Merged for an absent peer.
    for (second, limit) in [(1, &new), (2, &new)] {
        a.take(limit, 1, at(second * 1_000));
        a.peers.publish(at(second * 1_000));
    }
    for second in 4..70 {
        a.peers.publish(at(second * 1_000));
    }
    assert_eq!(a.peers.subscribers(), (1, 1), "one number for the counter and limit");
    b.follow(&a, at(70_000));
    assert_eq!(b.used(&new, at(70_000)), 17);
}

#[test]
fn many_limits_are_exchanged() {
    let (a, b) = (Instance::new(1), Instance::new(2));
    let limits: Vec<_> = (1..=200).map(|limit| fixed_window(limit, 60)).collect();
    for (user, limit) in limits.iter().enumerate() {
        a.decide(&user.to_string(), limit, (Action::Take, 1), at(0));
        a.decide(&(user % 7).to_string(), limit, (Action::Take, 1), at(0));
    }
    a.peers.publish(at(0));
    b.follow(&a, at(10));
    for (user, limit) in limits.iter().enumerate() {
        let key = user.to_string();
        assert_eq!(b.used_by(&key, limit, at(10)), a.used_by(&key, limit, at(10)));
    }
}

#[test]
fn slots_of_a_concurrency_limit_are_neither_exchanged_nor_copied() {
    let (a, b) = (Instance::new(1), Instance::new(2));
    let slots: Algorithm = Concurrency::new(MaxHits::hard(5), Micros::from_secs(60)).unwrap().into();
    assert!(a.decide("slots", &slots, (Action::Take, 3), at(0)));
    a.peers.publish(at(50));
    assert_eq!(*a.peers.published().borrow(), 0);
    b.copy(&a, at(60));
    assert_eq!((a.used_by("slots", &slots, at(60)), b.used_by("slots", &slots, at(60))), (3, 0));
    assert_eq!(b.peers.metrics().copied.get(), 0);
}

#[test]
fn a_copy_contains_each_hit_once() {
    for limit in all_algorithms(100) {
        let [a, b, c] = [1, 2, 3].map(Instance::new);
        a.take(&limit, 3, at(100));
        a.peers.publish(at(100));
        b.take(&limit, 5, at(100));
        b.peers.publish(at(100));
        a.follow(&b, at(100));
        // These are not published before the copy, or not applied at its source.
        a.take(&limit, 7, at(100));
        b.take(&limit, 11, at(100));
        b.peers.publish(at(100));
        c.copy(&a, at(100));
        assert_eq!(c.used(&limit, at(100)), 15, "{limit:?}");
        for _ in 0..2 {
            c.follow(&a, at(100));
            c.follow(&b, at(100));
            a.follow(&b, at(100));
            b.follow(&a, at(100));
        }
        assert_eq!([&a, &b, &c].map(|instance| instance.used(&limit, at(100))), [26; 3], "{limit:?}");
        c.take(&limit, 13, at(100));
        c.peers.publish(at(100));
        a.follow(&c, at(100));
        assert_eq!((a.used(&limit, at(100)), c.used(&limit, at(100))), (39, 39));
    }
}

#[test]
fn hits_during_a_copy_are_counted_twice_and_not_forgotten() {
    let (a, c, limit) = (Instance::new(1), Instance::new(3), fixed_window(100, 60));
    a.take(&limit, 3, at(0));
    let positions = a.peers.copy_positions(at(10));
    a.take(&limit, 5, at(20));
    let copies: Vec<_> = (0..).map_while(|part| a.peers.copy_part(part)).flatten().collect();
    c.peers.insert_copies(copies, at(30));
    c.peers.continue_from(1, &positions, at(30));
    a.peers.publish(at(40));
    c.follow(&a, at(50));
    assert_eq!((a.used(&limit, at(50)), c.used(&limit, at(50))), (8, 13));
}

#[test]
fn a_copy_replaces_no_counter_and_no_position_of_another_origin() {
    let [a, b, c] = [1, 2, 3].map(Instance::new);
    let limit = fixed_window(100, 60);
    a.take(&limit, 3, at(0));
    b.take(&limit, 5, at(0));
    [&a, &b].iter().for_each(|instance| instance.peers.publish(at(10)));
    a.follow(&b, at(20));
    b.take(&limit, 7, at(30));
    b.peers.publish(at(40));
    c.follow(&b, at(50));
    c.copy(&a, at(60));
    assert_eq!((c.used(&limit, at(60)), c.peers.position(2), c.peers.position(1)), (12, Some(2), Some(1)));
    assert_eq!(c.peers.metrics().copied.get(), 0);
    assert_eq!(c.peers.position(3), None, "an instance has no position of itself");
}

#[test]
fn an_evicted_counter_starts_again_and_its_hits_are_still_published() {
    let (a, b) = (Instance::with_max_counters(1, 1), Instance::new(2));
    let limit = fixed_window(10, 60);
    for user in 0..500 {
        a.decide(&user.to_string(), &limit, (Action::Take, 1), at(0));
    }
    assert!(a.memory.usage().evicted > 400);
    // Counters that return after their eviction have several changes.
    for user in 0..500 {
        a.decide(&user.to_string(), &limit, (Action::Take, 1), at(1));
    }
    a.peers.publish(at(50));
    b.follow(&a, at(60));
    assert!((0..500).all(|user| b.used_by(&user.to_string(), &limit, at(60)) == 2));
    // A slot that was reused belongs to its new counter only.
    a.decide("last", &limit, (Action::Take, 1), at(70));
    a.peers.publish(at(80));
    assert_eq!(b.batch(&a, at(90)).increments[0].changes.len(), 1);
    let c = Instance::new(3);
    c.copy(&a, at(90));
    assert_eq!(c.peers.metrics().copied.get(), a.memory.usage().counters);
    b.follow(&Instance::new(4), at(90));
}

#[test]
fn a_deleted_counter_is_not_copied() {
    let (a, b, limit) = (Instance::new(1), Instance::new(2), fixed_window(10, 60));
    a.take(&limit, 1, at(0));
    a.memory.delete(KEY.as_bytes());
    b.copy(&a, at(10));
    assert_eq!((b.peers.metrics().copied.get(), b.used(&limit, at(10))), (0, 0));
}

#[test]
fn a_malformed_batch_does_no_harm() {
    for limit in all_algorithms(10) {
        for counted_at in [0, 1, u64::MAX] {
            for (hits, index) in [(1, 7), (1, u32::MAX), (1, 0), (i64::MIN, 0), (i64::MAX, 0), (0, 0)] {
                for sent_at in [Micros::ZERO, at(100), Micros::new(u64::MAX)] {
                    let b = Instance::new(2);
                    b.take(&limit, 2, at(100));
                    let counter = Digests::digest(KEY.as_bytes());
                    let change = Change { counter, limit: index, hits, counted_at: Micros::new(counted_at) };
                    let batch = Batch { now: sent_at, ..increment(vec![limit], vec![change]) };
                    assert!(b.peers.apply(&batch, at(100)));
                    let used = b.used(&limit, at(100));
                    match (hits, index) {
                        (i64::MIN, 0) => assert!(used <= 2),
                        (_, 0) => assert!(used >= 2),
                        _ => assert_eq!(used, 2),
                    }
                    // Even the largest number is gone after the longest debt.
                    let later = at(3_000) + CLOCK_SLACK;
                    assert!(b.take(&limit, 10, later), "{limit:?} {change:?}");
                }
            }
        }
    }
    let b = Instance::new(2);
    assert!(b.peers.apply(&Batch { until: u64::MAX, ..increment(Vec::new(), Vec::new()) }, at(0)));
    let origin = Instance::new(9);
    assert!(matches!(b.pull(&origin, at(0)), Pull::Copy));
}

#[test]
fn ages_are_independent_of_the_difference_of_the_clocks() {
    let hour = 3_600_000;
    for clock in [0, 5 * hour, 10 * hour] {
        let (a, b, limit) = (Instance::new(1), Instance::new(2), token_bucket(10, 1, 10));
        let (ours, theirs) = (|millis: u64| at(5 * hour + millis), |millis: u64| at(clock + millis));
        a.take(&limit, 8, ours(0));
        a.peers.publish(ours(100));
        let batch = b.batch(&a, ours(300));
        assert!(b.peers.apply(&batch, theirs(300)));
        assert_eq!(b.used(&limit, theirs(300)), 5, "three of eight hits have drained");
    }
}

/// One operation of an origin: the number of the origin, a cost, and whether the origin publishes afterwards.
type Step = (usize, u64, bool);

/// What happens to the next batch of an origin: it is lost, delivered, delivered twice, or a former one arrives again.
#[derive(Clone, Copy, Debug)]
enum Delivery {
    Lost,
    Once,
    Twice,
    Former(usize),
}

fn deliveries() -> impl Strategy<Value = Vec<(usize, Delivery)>> {
    let delivery = prop_oneof![
        Just(Delivery::Lost),
        Just(Delivery::Once),
        Just(Delivery::Twice),
        (0_usize..20).prop_map(Delivery::Former)
    ];
    prop::collection::vec((0_usize..3, delivery), 0..40)
}

/// Returns the time of a step. Hits of windows are apart within one window, hits of buckets are not, because they drain.
fn time_of(limit: &Algorithm, step: usize) -> Micros {
    let is_window = matches!(limit, Algorithm::FixedWindow(_) | Algorithm::SlidingWindow(_) | Algorithm::SlidingLog(_));
    at(if is_window { 400 + step as u64 } else { 450 })
}

/// Executes all steps on three origins, and returns the origins and the number of allowed hits.
fn count(limit: &Algorithm, steps: &[Step], publishes: impl Fn(bool) -> bool) -> (Vec<Instance>, u64) {
    let origins: Vec<_> = (1..=3).map(Instance::new).collect();
    let mut allowed = 0;
    for (number, (origin, cost, published)) in steps.iter().enumerate() {
        allowed += if origins[*origin].take(limit, *cost, time_of(limit, number)) { *cost } else { 0 };
        if publishes(*published) {
            origins[*origin].peers.publish(at(450));
        }
    }
    origins.iter().for_each(|origin| origin.peers.publish(at(450)));
    (origins, allowed)
}

fn receive(receiver: &Instance, origins: &[Instance], deliveries: &[(usize, Delivery)]) {
    let mut former: Vec<Batch> = Vec::new();
    for (origin, delivery) in deliveries {
        let Pull::Batch(batch) = receiver.pull(&origins[*origin], at(450)) else {
            continue;
        };
        match *delivery {
            Delivery::Lost => {}
            Delivery::Once => assert!(receiver.peers.apply(&batch, at(450))),
            Delivery::Twice => {
                assert!(receiver.peers.apply(&batch, at(450)) && !receiver.peers.apply(&batch, at(450)));
            }
            Delivery::Former(index) => {
                // The former batch is the next one if it was lost.
                if let Some(batch) = former.get(index) {
                    let position = receiver.peers.position(batch.origin).unwrap_or_default();
                    assert_eq!(receiver.peers.apply(batch, at(450)), batch.after == position);
                }
            }
        }
        former.push(batch);
    }
    for origin in origins {
        receiver.follow(origin, at(450));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Merging is commutative over origins, associative over increments, and idempotent over deliveries.
    #[test]
    fn the_order_of_deliveries_does_not_matter_and_no_hit_is_forgotten(
        limit in select(all_algorithms(12)),
        steps in prop::collection::vec((0_usize..3, 1_u64..6, any::<bool>()), 0..40),
        deliveries in [deliveries(), deliveries()],
        own in 0_u64..12,
    ) {
        let receivers = [4, 5, 6].map(Instance::new);
        receivers.iter().for_each(|receiver| assert!(receiver.take(&limit, own, time_of(&limit, 0))));
        let (origins, allowed) = count(&limit, &steps, |published| published);
        receive(&receivers[0], &origins, &deliveries[0]);
        receive(&receivers[1], &origins, &deliveries[1]);
        let (unsplit, _) = count(&limit, &steps, |_| false);
        receive(&receivers[2], &unsplit, &[]);
        let most = if matches!(limit, Algorithm::SlidingLog(_)) { 12 } else { u64::MAX };
        for receiver in &receivers {
            prop_assert_eq!(receiver.used(&limit, at(450)), (allowed + own).min(most), "{:?}", limit);
        }
    }

    /// All instances agree when each has received the increments of all others.
    #[test]
    fn instances_agree_when_nothing_is_in_transit(
        limit in select(all_algorithms(12)),
        steps in prop::collection::vec((0_usize..3, 1_u64..4, any::<bool>()), 0..40),
        copied_after in 0_usize..40,
    ) {
        let mut instances: Vec<_> = (1..=3).map(Instance::new).collect();
        let follow_all = |instances: &[Instance]| {
            instances.iter().for_each(|instance| instance.peers.publish(at(450)));
            for receiver in instances {
                let others = instances.iter().filter(|origin| origin.peers.epoch() != receiver.peers.epoch());
                for origin in others {
                    receiver.follow(origin, at(450));
                }
            }
        };
        for (number, (instance, cost, exchanged)) in steps.iter().enumerate() {
            instances[*instance].take(&limit, *cost, at(450));
            if *exchanged {
                follow_all(&instances);
            }
            if number == copied_after {
                let joined = Instance::new(4);
                joined.copy(&instances[*instance], at(450));
                instances.push(joined);
            }
        }
        follow_all(&instances);
        let used = instances[0].used(&limit, at(450));
        for instance in &instances {
            prop_assert_eq!(instance.used(&limit, at(450)), used, "{:?}", limit);
        }
    }
}

/// The time of the trip is not part of an age.
#[test]
fn hits_that_arrive_after_their_window_do_not_count_in_the_next_one() {
    for (clock_difference, expected) in [(0, 0), (3_600_000, 5)] {
        let (a, b, limit) = (Instance::new(1), Instance::new(2), fixed_window(100, 1));
        a.take(&limit, 5, at(59_999));
        a.peers.publish(at(59_999));
        let Pull::Batch(batch) = b.pull(&a, at(59_999)) else {
            panic!("there is an increment");
        };
        assert!(b.peers.apply(&batch, at(60_001 + clock_difference)));
        assert_eq!(b.used_by(KEY, &limit, at(60_001 + clock_difference)), expected);
    }
}

/// A reset reaches present and absent peers. Hits that it has removed do not return.
#[test]
fn a_reset_counter_starts_again_everywhere() {
    let (a, b, c, limit) = (Instance::new(1), Instance::new(2), Instance::new(3), fixed_window(100, 3_600));
    for subscriber in [&b, &c] {
        assert!(matches!(subscriber.pull(&a, at(0)), Pull::Nothing));
        assert!(matches!(a.pull(subscriber, at(0)), Pull::Nothing));
    }
    a.take(&limit, 5, at(0));
    a.peers.publish(at(0));
    b.follow(&a, at(0));
    c.follow(&a, at(0));
    b.take(&limit, 2, at(1));
    a.take(&limit, 3, at(1));
    assert!(a.memory.delete(KEY.as_bytes()));
    a.take(&limit, 1, at(2));
    a.peers.publish(at(3));
    b.follow(&a, at(3));
    b.peers.publish(at(4));
    a.follow(&b, at(4));
    assert_eq!([&a, &b].map(|instance| instance.used_by(KEY, &limit, at(4))), [1, 1], "the unpublished hits are gone");
    // An absent peer receives merged increments.
    let late = RECENT_TIME.get() / 1_000 + 10_000;
    a.peers.publish(at(late));
    c.follow(&a, at(late));
    assert_eq!(c.used_by(KEY, &limit, at(late)), 1);
}
