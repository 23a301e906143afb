//! Tests of the hits that are exchanged.

use super::*;

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
fn a_limit_that_is_used_again_is_listed_once() {
    let a = Instance::new(1);
    let limits: Vec<_> = (101..=120).map(|limit| fixed_window(limit, 60)).collect();
    limits.iter().chain(&limits[17..]).for_each(|limit| assert!(a.take(limit, 1, at(0))));
    a.peers.publish(at(0));
    let increment = Arc::clone(&Instance::new(2).batch(&a, at(0)).increments[0]);
    assert_eq!(increment.limits, limits);
    let hits_of = |index: usize| increment.changes.iter().filter(move |change| change.limit as usize == index);
    let hits: Vec<i64> = (0..20).map(|index| hits_of(index).map(|change| change.hits).sum()).collect();
    assert_eq!(hits, [vec![1; 17], vec![2; 3]].concat());
}

#[test]
fn counters_keep_their_own_hits_in_the_next_interval() {
    let (a, b, limit) = (Instance::new(1), Instance::new(2), fixed_window(1_000, 3_600));
    let keys: Vec<_> = (0..1_000).map(|user| user.to_string()).collect();
    for key in &keys {
        a.decide(key, &limit, (Action::Take, 1), at(0));
    }
    a.peers.publish(at(0));
    for (cost, key) in keys.iter().rev().enumerate() {
        a.decide(key, &limit, (Action::Take, cost as u64), at(1));
    }
    a.peers.publish(at(1));
    b.follow(&a, at(1));
    for (cost, key) in keys.iter().rev().enumerate() {
        assert_eq!(b.used_by(key, &limit, at(1)), cost as u64 + 1);
    }
}

#[test]
fn hits_of_a_peer_between_own_ones_do_not_split_the_change() {
    let (a, b, limit) = (Instance::new(1), Instance::new(2), fixed_window(10, 60));
    a.take(&limit, 1, at(0));
    a.peers.publish(at(0));
    b.take(&limit, 2, at(0));
    b.follow(&a, at(0));
    b.take(&limit, 3, at(0));
    b.peers.publish(at(0));
    let changes = &a.batch(&b, at(0)).increments[0].changes;
    assert_eq!(changes.iter().map(|change| change.hits).collect::<Vec<_>>(), [5]);
}

#[test]
fn a_refund_creates_no_counter() {
    let (a, b, limit) = (Instance::new(1), Instance::new(2), fixed_window(10, 60));
    a.take(&limit, 3, at(0));
    a.peers.publish(at(0));
    a.refund(&limit, 2, at(1));
    a.peers.publish(at(1));
    b.peers.continue_from(1, &[(1, 1)], at(1));
    b.follow(&a, at(1));
    assert_eq!(b.memory.usage().counters, 0);
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

/// The time of the trip is not part of an age.
#[test]
fn hits_that_arrive_after_their_window_do_not_count_in_the_next_one() {
    for (clock_difference, expected, expired) in [(0, 0, 1), (3_600_000, 5, 0)] {
        let (a, b, limit) = (Instance::new(1), Instance::new(2), fixed_window(100, 1));
        a.take(&limit, 5, at(59_999));
        a.peers.publish(at(59_999));
        let Pull::Batch(batch) = b.pull(&a, at(59_999)) else {
            panic!("there is an increment");
        };
        assert!(b.peers.apply(&batch, at(60_001 + clock_difference)));
        assert_eq!(b.used_by(KEY, &limit, at(60_001 + clock_difference)), expected);
        assert_eq!(b.peers.metrics().expired.get(), expired);
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
    a.take(&limit, 4, at(1));
    a.peers.publish(at(1));
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

/// A reset that is published without hits has a sequence number of its own.
#[test]
fn a_reset_reaches_a_peer_that_has_applied_all_hits() {
    let (a, b, limit) = (Instance::new(1), Instance::new(2), fixed_window(100, 3_600));
    a.take(&limit, 5, at(0));
    a.peers.publish(at(0));
    b.follow(&a, at(0));
    let published = a.peers.published();
    a.peers.publish(at(1));
    assert!(!published.has_changed().unwrap(), "there is nothing new");
    assert!(a.memory.delete(KEY.as_bytes()));
    a.peers.publish(at(2));
    assert!(published.has_changed().unwrap() && *published.borrow() == 2);
    assert_eq!(b.follow(&a, at(2)), 1);
    assert_eq!(b.used(&limit, at(2)), 0);
}
