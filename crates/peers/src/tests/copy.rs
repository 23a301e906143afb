//! Tests of copies of counters.

use super::*;

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

/// A rule can get another algorithm, and keep its counters' names.
#[test]
fn a_counter_of_slots_that_a_peer_counts_as_a_window_is_copied() {
    let [a, b, c] = [1, 2, 3].map(Instance::new);
    let slots: Algorithm = Concurrency::new(MaxHits::hard(5), Micros::from_secs(60)).unwrap().into();
    a.take(&slots, 1, at(0));
    b.take(&fixed_window(10, 60), 3, at(0));
    b.peers.publish(at(0));
    a.follow(&b, at(0));
    c.copy(&a, at(0));
    assert_eq!(c.peers.metrics().copied.get(), 1);
}

#[test]
fn an_empty_state_is_not_copied() {
    let b = Instance::new(2);
    let counter = Digests::digest(KEY.as_bytes());
    b.peers.insert_copies(vec![CounterCopy { counter, state: State::default(), expires: u32::MAX }], at(0));
    assert_eq!((b.peers.metrics().copied.get(), b.memory.usage().counters), (0, 0));
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
    assert_eq!((c.used(&limit, at(60)), c.peers.position(2), c.peers.position(1)), (12, 2, 1));
    assert_eq!(c.peers.metrics().copied.get(), 0);
    c.take(&limit, 1, at(70));
    c.peers.publish(at(70));
    a.follow(&c, at(70));
    c.copy(&a, at(70));
    assert_eq!((a.peers.position(3), c.peers.position(3)), (1, 0), "an instance has no position of itself");
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
    // Counters that are not exchanged take its slot.
    let slots: Algorithm = Concurrency::new(MaxHits::hard(5), Micros::from_secs(60)).unwrap().into();
    for user in 0..1_000 {
        a.decide(&user.to_string(), &slots, (Action::Take, 1), at(0));
    }
    b.copy(&a, at(10));
    assert_eq!((b.peers.metrics().copied.get(), b.used(&limit, at(10))), (0, 0));
}

#[test]
fn a_copy_contains_no_position_of_an_instance_that_has_published_nothing() {
    let b = Instance::new(2);
    b.peers.continue_from(1, &[(1, 0), (7, 0), (8, 5)], at(0));
    let mut positions = b.peers.copy_positions(at(0));
    positions.sort_unstable();
    assert_eq!(positions, [(2, 0), (8, 5)]);
}
