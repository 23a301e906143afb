//! Tests with planted violations, which must be reported.

use std::time::Duration;

use crate::{
    features::{FEATURES, Feature, IN_FLIGHT, WINDOW},
    law::{Apart, Disturbance, Ledger, Loss, bound},
    observer::{Failure, Observer, Span, Via},
    report::{growth, trends},
    samples::{Process, Sample, Trend},
    schedule::{KINDS, Schedule},
};

/// The begin of a window, in milliseconds since 1970.
const BEGIN: u64 = 1_000 * WINDOW;

/// Returns the violations after `hits` admissions of a fixed window.
fn violations_of(hits: u64, prepare: impl FnOnce(&Observer)) -> Vec<String> {
    let observer = Observer::new(true);
    prepare(&observer);
    let sent = observer.epoch / WINDOW * WINDOW;
    for _ in 0..hits {
        observer.admit(Feature::index("fixed"), 0, Span { sent, received: sent + 1 });
    }
    observer.finish().violations
}

#[test]
fn a_counter_that_admits_too_much_is_reported() {
    let limit = FEATURES[Feature::index("fixed")].bound;
    assert!(violations_of(limit, |_| {}).is_empty());
    let violations = violations_of(limit + 1, |_| {});
    assert!(violations.len() == 1 && violations[0].contains("251 hits of fixed 0"), "{violations:?}");
}

#[test]
fn lost_counters_allow_one_more_limit_and_no_more() {
    let limit = FEATURES[Feature::index("fixed")].bound;
    let lose = |observer: &Observer| {
        observer.disturb(Loss::Counters, Apart::RedisInstances);
    };
    assert!(violations_of(2 * limit, lose).is_empty());
    assert_eq!(violations_of(2 * limit + 1, lose).len(), 1);
}

#[test]
fn each_sharing_has_its_own_bound() {
    let at = |key: &str, disturbances: &[Disturbance]| bound(&FEATURES[Feature::index(key)], BEGIN, disturbances);
    let fault = |from, until, loss, apart| [Disturbance { from, until: Some(until), loss, apart }];
    let apart = |apart| fault(BEGIN + 1, BEGIN + 2, Loss::None, apart);
    assert_eq!(["fixed", "eventual", "peer_log"].map(|key| at(key, &[])), [250, 420, 190]);
    assert_eq!(["fixed", "eventual", "peer_log"].map(|key| at(key, &apart(Apart::RedisInstances))), [250, 900, 190]);
    assert_eq!(["fixed", "eventual", "peer_log"].map(|key| at(key, &apart(Apart::Peers))), [250, 420, 300]);
    let failover = fault(BEGIN - 1, BEGIN + 1, Loss::RecentHits, Apart::RedisInstances);
    assert_eq!(at("fixed", &failover), 250 + 80);
    // A fault of another window does not count.
    let earlier = fault(BEGIN - 20_000, BEGIN - 10_000, Loss::Counters, Apart::RedisInstances);
    assert_eq!(at("fixed", &earlier), 250);
}

#[test]
fn a_hit_at_the_end_of_a_window_counts_in_none() {
    let mut ledger = Ledger::default();
    ledger.admit(0, 0, BEGIN - 1, BEGIN);
    ledger.admit(0, 0, BEGIN, BEGIN + 1);
    assert!(ledger.close(BEGIN + WINDOW - 1).is_empty());
    let closed = ledger.close(BEGIN + WINDOW);
    assert!(closed.len() == 1 && closed[0].admitted == 1, "{closed:?}");
}

#[test]
fn an_unanswered_call_is_reported_unless_the_instance_is_silent() {
    let unanswered = |prepare: &dyn Fn(&Observer), via| {
        let observer = Observer::new(true);
        prepare(&observer);
        let span = Span { sent: observer.now(), received: observer.now() + 3_000 };
        observer.record(via, "fixed", span, Duration::from_secs(3), Some(&Failure::Unanswered));
        observer.finish().violations.len()
    };
    assert_eq!(unanswered(&|_| {}, Via::Connection(1)), 1);
    assert_eq!(unanswered(&|observer| observer.silence(Via::Connection(1)), Via::Connection(1)), 0);
    assert_eq!(unanswered(&|observer| observer.silence(Via::Connection(1)), Via::NewConnection(1)), 0);
    assert_eq!(unanswered(&|observer| observer.silence(Via::Connection(2)), Via::Connection(1)), 1);
    assert_eq!(unanswered(&|observer| observer.silence(Via::NewConnection(1)), Via::Connection(1)), 1);
}

#[test]
fn too_many_slots_are_reported() {
    let observer = Observer::new(true);
    (0..IN_FLIGHT[0].bound).for_each(|_| observer.acquire(0));
    observer.release(0);
    observer.acquire(0);
    observer.acquire(0);
    let record = observer.finish();
    assert_eq!((record.violations.len(), record.highest_in_flight[0]), (1, IN_FLIGHT[0].bound + 1));
}

#[test]
fn a_late_override_is_reported_unless_a_fault_explains_it() {
    let late = |prepare: &dyn Fn(&Observer)| {
        let observer = Observer::new(true);
        prepare(&observer);
        observer.in_force_after(Duration::from_secs(3), Duration::from_secs(2));
        observer.finish().violations.len()
    };
    assert_eq!(late(&|_| {}), 1);
    let disturb = |observer: &Observer| {
        observer.disturb(Loss::None, Apart::Nobody);
    };
    assert_eq!(late(&disturb), 0);
}

/// Returns the samples of an hour in which the memory of `redis-1` grows from 60 MB.
fn hour(per_hour: f64) -> Vec<Sample> {
    let sample = |index: u32| {
        let second = f64::from(index) * 5.0;
        let memory = 60.0 + per_hour * second / 3_600.0 + f64::from(index % 7) / 7.0;
        let mut sample = Sample { second, keys: Some(100.0 + f64::from(index % 11)), ..Sample::default() };
        sample.processes[0] = Process { memory: Some(memory), descriptors: Some(50.0), ..Process::default() };
        sample
    };
    (0..720).map(sample).collect()
}

#[test]
fn a_late_recovery_is_reported() {
    let observer = Observer::new(true);
    let stated = Duration::from_secs(10);
    let end = observer.now();
    observer.recovered_after("a fault", end, Some(stated), stated);
    observer.recovered_after("a fault", end, Some(stated * 2), stated);
    observer.recovered_after("a fault", end, None, stated);
    observer.stalled(end);
    observer.recovered_after("a fault", end, None, stated);
    assert_eq!(observer.finish().violations.len(), 2);
}

#[test]
fn growing_memory_is_reported() {
    let growth_of = |per_hour| growth(&trends(&hour(per_hour))).collect::<Vec<_>>();
    assert!(growth_of(0.0).is_empty());
    let growing = growth_of(20.0);
    assert!(
        growing.len() == 1 && growing[0].starts_with("memory of redis-1, MB grows by 20.0 per hour"),
        "{growing:?}"
    );
}

#[test]
fn a_trend_is_that_of_the_second_half() {
    let points: Vec<_> = (0..100).map(|index| (f64::from(index), f64::from(index.min(49)))).collect();
    let trend = Trend::of(&points, 0.0).unwrap();
    assert!(trend.rise == 0.0 && trend.mean == 49.0, "{trend:?}");
}

#[test]
fn a_seed_always_gives_the_same_faults_and_each_kind_as_often() {
    let faults = |seed| Schedule::new(seed).take(3 * KINDS.len()).collect::<Vec<_>>();
    assert_eq!(faults(1), faults(1));
    assert_ne!(faults(1), faults(2));
    for (kind, _) in KINDS {
        assert_eq!(faults(1).iter().filter(|fault| fault.kind == kind).count(), 3, "{kind:?}");
    }
}
