//! Tests of slow, absent and forgotten subscribers.

use super::*;

#[test]
fn missing_increments_require_a_copy() {
    let (a, limit) = (Instance::new(1), fixed_window(1_000, 3_600));
    for second in 0..100 {
        a.take(&limit, 1, at(second * 1_000));
        a.peers.publish(at(second * 1_000));
    }
    let pull = |subscriber, after| description(&a.peers.pull(subscriber, after, at(100_000)));
    assert_eq!(pull(2, 0), "copy", "the first increments are no longer kept");
    assert_eq!(pull(3, 38), "copy");
    assert_eq!(pull(4, 39), "39 to 100", "increments are kept for a minute");
    assert_eq!(pull(5, 100), "nothing");
    assert_eq!(pull(6, 101), "copy", "the position is beyond the sequence");
    assert_eq!(pull(7, u64::MAX), "copy");
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
        let has_expired_hits = limit.has_expired(at(60_000), at(300_000));
        assert_eq!(b.peers.metrics().applied.get() < 65, has_expired_hits, "{limit:?}: expired hits are not sent");
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
fn a_full_backlog_drops_hits_of_the_peer_that_misses_most() {
    let (a, b, c, limit) = (Instance::new(1), Instance::new(2), Instance::new(3), fixed_window(10, 3_600));
    assert!(matches!(b.pull(&a, at(0)), Pull::Nothing));
    for second in 0..160 {
        for user in 0..100 {
            a.decide(&format!("{second}/{user}"), &limit, (Action::Take, 1), at(second * 1_000));
        }
        a.peers.publish(at(second * 1_000));
        if second < 100 {
            c.follow(&a, at(second * 1_000));
        }
    }
    assert!(a.peers.metrics().dropped.get() > 0);
    let now = at(160_000);
    c.follow(&a, now);
    assert!((0..160).all(|second| c.used_by(&format!("{second}/0"), &limit, now) == 1));
}

#[test]
fn a_large_backlog_is_sent_in_several_batches() {
    let (a, b, limit) = (Instance::new(1), Instance::new(2), fixed_window(10, 3_600));
    assert!(matches!(b.pull(&a, at(0)), Pull::Nothing));
    for round in 0..3 {
        for user in 0..MAX_BATCH_CHANGES {
            a.decide(&format!("{round}/{user}"), &limit, (Action::Take, 1), at(round * 10_000));
        }
        a.peers.publish(at(round * 10_000));
    }
    let now = at(100_000);
    a.take(&limit, 1, now);
    a.peers.publish(now);
    assert_eq!(a.peers.subscribers(), (1, 3 * MAX_BATCH_CHANGES));
    assert_eq!(b.follow(&a, now), 4);
    assert!(
        (0..3).all(|round| (0..MAX_BATCH_CHANGES).all(|user| b.used_by(&format!("{round}/{user}"), &limit, now) == 1))
    );
}

/// Periods beyond the maximum number are merged, without the hits that have expired meanwhile and those before a reset.
#[test]
fn the_oldest_periods_of_a_long_absence_are_merged() {
    let (a, b) = (Instance::new(1), Instance::new(2));
    let (long, short) = (fixed_window(1_000, 3_600), fixed_window(10, 1));
    assert!(matches!(b.pull(&a, at(0)), Pull::Nothing));
    for period in 0..50 {
        let now = at(period * 10_000);
        if period == 2 {
            a.memory.delete(KEY.as_bytes());
        }
        a.take(&long, 1, now);
        a.decide(&format!("short/{period}"), &short, (Action::Take, 1), now);
        a.peers.publish(now);
    }
    // Two changes in each period. The oldest one has the short counter of its last part.
    assert_eq!(a.peers.subscribers(), (1, 2 * 32));
    let now = at(500_000);
    b.follow(&a, now);
    assert_eq!((b.used(&long, now), a.used(&long, now)), (48, 48));
    assert_eq!(a.peers.subscribers(), (1, 0));
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
    assert_eq!(description(&a.peers.pull(3, 9, at(20))), "copy");
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
    assert_eq!(description(&a.peers.pull(2, 0, at(100_000))), "copy");
    assert_eq!(description(&a.peers.pull(2, 102, at(100_000))), "copy");
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
    assert_eq!((a.peers.subscribers().0, b.peers.position(1)), (1, 1));
    a.peers.publish(at(last + 1));
    assert_eq!((a.peers.subscribers().0, b.peers.position(1)), (0, 1));
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
        let _ = a.peers.pull(100 + number, 1, at(number));
        a.peers.apply(&Batch { origin: 100 + number, ..batch.clone() }, at(number));
    }
    // The first instance reports again, so the second one is the oldest.
    let _ = a.peers.pull(100, 1, at(count));
    a.peers.apply(&Batch { origin: 100, ..batch.clone() }, at(count));
    let _ = a.peers.pull(99, 1, at(count));
    a.peers.apply(&Batch { origin: 99, ..batch.clone() }, at(count));
    assert_eq!(a.peers.subscribers().0, MAX_INSTANCES);
    let positions: Vec<_> = [99, 100, 101, 102].map(|origin| a.peers.position(origin)).to_vec();
    assert_eq!(positions, [1, 1, 0, 1]);
    a.peers.continue_from(99, &(0..2 * count).map(|number| (1_000 + number, 7)).collect::<Vec<_>>(), at(count));
    assert_eq!((0..2 * count).filter(|number| a.peers.position(1_000 + number) > 0).count(), 0);
}

#[test]
fn the_backlog_shrinks_by_the_changes_that_are_sent() {
    let (a, b, limit) = (Instance::new(1), Instance::new(2), fixed_window(10, 3_600));
    assert!(matches!(b.pull(&a, at(0)), Pull::Nothing));
    for round in 0..3 {
        for user in 0..MAX_BATCH_CHANGES {
            a.decide(&user.to_string(), &limit, (Action::Take, 1), at(round * 10_000));
        }
        a.peers.publish(at(round * 10_000));
    }
    let now = at(100_000);
    a.peers.publish(now);
    for remaining in (0..3).rev() {
        let batch = b.batch(&a, now);
        assert_eq!(a.peers.subscribers(), (1, remaining * MAX_BATCH_CHANGES));
        assert!(b.peers.apply(&batch, now));
    }
}

#[test]
fn merged_periods_have_one_change_for_each_counter() {
    let (a, b, limit) = (Instance::new(1), Instance::new(2), fixed_window(1_000, 3_600));
    assert!(matches!(b.pull(&a, at(0)), Pull::Nothing));
    for period in 0..50 {
        for user in 0..3 {
            a.decide(&user.to_string(), &limit, (Action::Take, 1), at(period * 10_000));
        }
        a.peers.publish(at(period * 10_000));
    }
    a.peers.publish(at(560_000));
    assert_eq!(a.peers.subscribers(), (1, 3 * 32));
}

/// Hits of a window are sent until its end.
#[test]
fn hits_are_sent_until_they_expire() {
    for (now, changes) in [(at(119_999), 1), (at(120_000), 0)] {
        let (a, b, limit) = (Instance::new(1), Instance::new(2), fixed_window(10, 120));
        assert!(matches!(b.pull(&a, at(0)), Pull::Nothing));
        a.take(&limit, 1, at(0));
        a.peers.publish(at(0));
        a.peers.publish(at(70_000));
        assert_eq!(a.peers.subscribers(), (1, 1));
        assert_eq!(b.batch(&a, now).increments[0].changes.len(), changes);
    }
}

#[test]
fn as_many_changes_are_recent_as_the_maximum() {
    let (a, limit) = (Instance::new(1), fixed_window(1_000, 3_600));
    let publish = |changes: usize| {
        for user in 0..changes {
            a.decide(&user.to_string(), &limit, (Action::Take, 1), at(0));
        }
        a.peers.publish(at(0));
    };
    let increments = MAX_RECENT_CHANGES / MAX_INCREMENT_CHANGES;
    for _ in 0..increments {
        publish(MAX_INCREMENT_CHANGES);
    }
    assert!(matches!(a.peers.pull(2, 0, at(0)), Pull::Batch(_)), "nothing was merged");
    publish(1);
    assert!(matches!(a.peers.pull(3, 0, at(0)), Pull::Copy));
    assert!(matches!(a.peers.pull(4, 1, at(0)), Pull::Batch(_)));
}

#[test]
fn a_backlog_can_have_as_many_changes_as_the_maximum() {
    let (a, b, limit) = (Instance::new(1), Instance::new(2), fixed_window(10, 3_600));
    assert!(matches!(b.pull(&a, at(0)), Pull::Nothing));
    let publish = |name: &str, changes: usize, millis| {
        for user in 0..changes {
            a.decide(&format!("{name}/{user}"), &limit, (Action::Take, 1), at(millis));
        }
        a.peers.publish(at(millis));
    };
    let parts = MAX_BACKLOG_CHANGES / 400;
    for part in 0..parts {
        publish(&part.to_string(), 400, part as u64 * 1_000);
    }
    a.peers.publish(at(200_000));
    assert_eq!((a.peers.subscribers(), a.peers.metrics().dropped.get()), ((1, MAX_BACKLOG_CHANGES), 0));
    publish("more", 300, 210_000);
    a.peers.publish(at(300_000));
    assert!(a.peers.subscribers().1 <= MAX_BACKLOG_CHANGES && a.peers.metrics().dropped.get() > 0);
}
