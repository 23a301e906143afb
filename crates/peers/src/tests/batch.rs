//! Tests of batches: delivery exactly once, and what a receiver ignores.

use sluicegate_metrics::{TestMeter, WorkerId};

use super::*;

#[test]
fn counted_hits_reach_a_peer() {
    let (a, b, limit) = (Instance::new(1), Instance::new(2), fixed_window(10, 60));
    let published = a.peers.published();
    assert!(a.take(&limit, 7, at(0)) && a.take(&limit, 1, at(1)));
    a.peers.publish(at(50));
    assert_eq!(*published.borrow(), 1);
    assert_eq!(b.follow(&a, at(60)), 1);
    assert_eq!((b.used(&limit, at(60)), b.peers.position(1)), (8, 1));
    assert!(!b.take(&limit, 3, at(60)) && b.take(&limit, 2, at(60)));
    b.peers.publish(at(100));
    a.follow(&b, at(110));
    assert!(!a.take(&limit, 1, at(110)), "both count ten hits");
    assert_eq!((a.used(&limit, at(110)), b.used(&limit, at(110))), (10, 10));
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
    assert_eq!(b.peers.position(11), 0);
    b.follow(&restarted, at(1_060));
    assert_eq!((b.used(&limit, at(1_060)), b.peers.position(1), b.peers.position(11)), (11, 3, 1));
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
fn an_increment_is_encoded_once() {
    let increment = Increment::new(1, at(0), Vec::new(), Vec::new());
    let encoded = increment.encoded(|increment| increment.sequence.to_string().into());
    assert_eq!(encoded, "1");
    assert_eq!(increment.encoded(|_| panic!("it is encoded already")), "1");
}

#[test]
fn every_change_is_counted_in_its_metric() {
    let meter = TestMeter::default();
    let (metrics, instance) = (Metrics::new(), Instance::new(1));
    metrics.observe(&meter);
    let limit = fixed_window(10, 1);
    let peers = Peers::with_epoch(Arc::clone(&instance.memory), Arc::clone(&metrics), 1);
    for user in 0..7 {
        instance.decide(&user.to_string(), &limit, (Action::Take, 1), at(0));
    }
    peers.publish(at(0));
    let counter = Digests::digest(KEY.as_bytes());
    let change = |counted_at| Change { counter, limit: 0, hits: 1, counted_at };
    assert!(
        peers.apply(&increment(vec![limit], vec![change(at(0)), change(at(0)), change(at(0) - CLOCK_SLACK)]), at(0))
    );
    let copy = CounterCopy { counter, state: instance.memory.state(KEY.as_bytes()), expires: u32::MAX };
    let copies = (0..4).map(|number| CounterCopy { counter: [number; 11], ..copy.clone() });
    peers.insert_copies(copies.collect(), at(0));
    metrics.add_sent_bytes(100);
    metrics.dropped.add(WorkerId(0), 6);
    let counters = meter.counters();
    let values = counters.iter().filter_map(|(name, value)| {
        let name = name.strip_prefix("sluicegate_cluster_")?.strip_suffix("_total")?;
        Some((name, *value))
    });
    assert_eq!(
        values.collect::<Vec<_>>(),
        [
            ("changes_applied", 3),
            ("changes_dropped", 6),
            ("changes_expired", 1),
            ("changes_published", 7),
            ("counters_copied", 4),
            ("sent_bytes", 100)
        ]
    );
}
