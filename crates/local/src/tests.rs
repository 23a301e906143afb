//! Tests of the decisions of one instance, with a store that answers immediately.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard},
};

use sluicegate_algorithm::{Action, Algorithm, MaxHits, Operation, State, fixed_window::FixedWindow};
use sluicegate_metrics::TestMeter;
use sluicegate_store::StepOutcomes;

use super::*;

/// The beginning of an hour.
const START: u64 = 1_763_672_400;

fn at(millis: u64) -> Micros {
    Micros::new(START * 1_000_000 + millis * 1_000)
}

fn hourly(limit: u64) -> Algorithm {
    FixedWindow::new(MaxHits::hard(limit), Micros::from_secs(3_600), false).unwrap().into()
}

fn exact(key: &[u8], limit: &Algorithm, cost: u64) -> Hit {
    Hit::take(Counter::new(key, *limit), cost)
}

fn eventual(key: &[u8], limit: &Algorithm, cost: u64) -> Hit {
    Hit::take(Counter { consistency: Consistency::Eventual, ..Counter::new(key, *limit) }, cost)
}

fn leased(key: &[u8], limit: &Algorithm, cost: u64) -> Hit {
    Hit::take(Counter { consistency: Consistency::Leased, ..Counter::new(key, *limit) }, cost)
}

/// A store whose clock is that of the caller.
#[derive(Clone, Default)]
struct Remote(Arc<Mutex<Contents>>);

type States = HashMap<(Vec<u8>, bool), State>;

#[derive(Default)]
struct Contents {
    states: States,
    calls: Vec<String>,
    /// Error with which all calls fail.
    failure: Option<StoreError>,
}

impl Remote {
    fn lock(&self) -> MutexGuard<'_, Contents> {
        self.0.lock().unwrap()
    }

    /// Returns the calls since the last call of this function, in alphabetical order.
    fn calls(&self) -> Vec<String> {
        let mut calls = std::mem::take(&mut self.lock().calls);
        calls.sort();
        calls
    }

    fn used(&self, key: &[u8], limit: &Algorithm, millis: u64) -> u64 {
        let peek = Operation { action: Action::Peek, cost: 0, now: at(millis) };
        limit.explain(&self.lock().states[&(key.to_vec(), false)], peek, true).used
    }
}

fn describe(hit: &Hit<&Counter>) -> String {
    let action = match hit.action {
        Action::Take => "take",
        Action::Peek => "peek",
        Action::Refund => "refund",
        Action::RollBack(_) => "roll back",
    };
    format!("{action} {} of {}", hit.cost, String::from_utf8_lossy(&hit.counter.name))
}

impl CounterStore for Remote {
    async fn step(&self, hits: &[Hit<&Counter>], charge: Charge, now: Micros) -> StepOutcomes {
        let mut contents = self.lock();
        contents.calls.push(hits.iter().map(describe).collect::<Vec<_>>().join(", "));
        if let Some(error) = contents.failure {
            return hits.iter().map(|_| Err(error)).collect();
        }
        let step = |states: &mut States, hit: &Hit<&Counter>, action: Action| {
            let state = states.entry((hit.counter.name.clone(), hit.counter.per_second)).or_default();
            let allowed = hit.counter.program.step(state, Operation { action, cost: hit.cost, now });
            StepOutcome { allowed, action, at: now, state: state.clone() }
        };
        let mut preview = contents.states.clone();
        let is_denied = charge == Charge::All
            && hits.iter().any(|hit| hit.blocks.on_denial() && !step(&mut preview, hit, hit.action).allowed);
        let action = |hit: &Hit<&Counter>| match hit.action {
            Action::Take if is_denied => Action::Peek,
            action => action,
        };
        hits.iter().map(|hit| Ok(step(&mut contents.states, hit, action(hit)))).collect()
    }

    async fn delete(&self, name: &[u8], per_second: bool) -> Result<bool, StoreError> {
        Ok(self.lock().states.remove(&(name.to_vec(), per_second)).is_some())
    }
}

/// An instance with its store.
struct Instance {
    local: Local<Remote>,
    store: Remote,
}

/// The source of a decision, whether it allows the hit, and the remaining and used hits.
type Summary = (Decider, bool, [u64; 2]);

impl Instance {
    fn new() -> Self {
        let (deny_cache, leases, eventual) = Default::default();
        let state = LocalState::new(&deny_cache, &leases, &eventual, TimeSource::Caller, Metrics::new(1));
        let store = Remote::default();
        Self { local: Local::new(store.clone(), state, WorkerId(0)), store }
    }

    /// Decides hits, and lets the calls in the background end.
    async fn apply(&self, hits: &[Hit], charge: Charge, millis: u64) -> Vec<Summary> {
        let hits: Vec<_> = hits.iter().map(Hit::borrowed).collect();
        let decisions = self.local.apply(&hits, charge, at(millis)).await;
        finish_background_calls().await;
        let summary = |HitDecision { decision, decider, .. }: HitDecision| {
            (decider, decision.allowed, [decision.remaining, decision.used])
        };
        decisions.into_iter().map(|decision| summary(decision.unwrap())).collect()
    }

    async fn apply_one(&self, hit: Hit, millis: u64) -> Summary {
        self.apply(&[hit], Charge::Each, millis).await[0]
    }

    /// Takes hits that make the counter hot, and returns with a lease of 32 hits.
    async fn lease(&self, key: &[u8], limit: &Algorithm) {
        self.apply_one(leased(key, limit, 8), 0).await;
        let key = String::from_utf8_lossy(key);
        assert_eq!(self.store.calls(), [format!("take 32 of {key}"), format!("take 8 of {key}")]);
    }

    /// Returns the metrics that are not 0, by their exported names without prefix and suffix.
    fn metrics(&self) -> Vec<(String, u64)> {
        let meter = TestMeter::default();
        self.local.state.metrics.observe(&meter);
        let name = |name: &str| Some(name.strip_prefix("sluicegate_")?.strip_suffix("_total")?.to_owned());
        let counters = meter.counters().into_iter().filter(|(_, value)| *value > 0);
        counters.filter_map(|(full_name, value)| Some((name(&full_name)?, value))).collect()
    }
}

async fn finish_background_calls() {
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
}

fn named<const N: usize>(metrics: [(&str, u64); N]) -> Vec<(String, u64)> {
    metrics.map(|(name, value)| (name.to_owned(), value)).to_vec()
}

#[tokio::test]
async fn eventual_hits_are_decided_locally_and_reported_by_the_sweep() {
    let (instance, limit) = (Instance::new(), hourly(100));
    let hit = |cost| eventual(b"a", &limit, cost);
    assert_eq!(instance.apply_one(hit(3), 0).await, (Decider::Store, true, [97, 3]));
    assert_eq!(instance.store.calls(), ["take 3 of a"]);
    assert_eq!(instance.apply_one(hit(4), 1).await, (Decider::Eventual, true, [93, 7]));
    assert_eq!(instance.apply_one(hit(94), 1).await, (Decider::Eventual, false, [93, 7]));
    assert!(instance.store.calls().is_empty());
    instance.local.sweep(at(200)).await;
    assert_eq!(instance.store.calls(), ["take 4 of a"]);
    // Hits whose report may not have been counted are never reported again.
    assert_eq!(instance.apply_one(hit(5), 201).await, (Decider::Eventual, true, [88, 12]));
    instance.store.lock().failure = Some(StoreError::Timeout);
    instance.local.sweep(at(400)).await;
    instance.store.lock().failure = None;
    assert_eq!(instance.store.calls(), ["take 5 of a"]);
    assert_eq!(instance.apply_one(hit(1), 401).await, (Decider::Eventual, true, [87, 13]));
    instance.local.return_all(at(402)).await;
    assert_eq!(instance.store.calls(), ["take 1 of a"]);
    assert_eq!(instance.store.used(b"a", &limit, 402), 8);
    let metrics = [("eventual_decisions", 4), ("eventual_lost_hits", 5), ("eventual_reported_hits", 5)];
    assert_eq!(instance.metrics(), named(metrics));
    assert_eq!(instance.local.metrics().decisions(), [0, 4, 0]);
}

#[tokio::test]
async fn each_hit_of_a_request_has_the_decision_of_its_own_counter() {
    let (instance, limits) = (Instance::new(), [hourly(50), hourly(100), hourly(30)]);
    instance.apply_one(eventual(b"known", &limits[1], 10), 0).await;
    instance.store.calls();
    let hits = [exact(b"exact", &limits[0], 1), eventual(b"known", &limits[1], 2), eventual(b"unknown", &limits[2], 3)];
    let decisions = instance.apply(&hits, Charge::Each, 1).await;
    assert_eq!(
        decisions,
        [(Decider::Store, true, [49, 1]), (Decider::Eventual, true, [88, 12]), (Decider::Store, true, [27, 3])]
    );
    assert_eq!(instance.store.calls(), ["take 1 of exact", "take 3 of unknown"]);
}

#[tokio::test]
async fn eventual_and_exact_hits_are_charged_together_or_not_at_all() {
    let (instance, limits) = (Instance::new(), [hourly(3), hourly(10)]);
    let hits = |taken, cost| [exact(b"exact", &limits[0], taken), eventual(b"local", &limits[1], cost)];
    let apply = async |taken, cost| instance.apply(&hits(taken, cost), Charge::All, 0).await;
    let (store, local) = (Decider::Store, Decider::Eventual);
    assert_eq!(apply(1, 4).await, [(store, true, [2, 1]), (local, true, [6, 4])]);
    assert_eq!(instance.store.calls(), ["peek 4 of local", "take 1 of exact"]);
    assert_eq!(apply(3, 1).await, [(store, false, [2, 1]), (local, true, [6, 4])], "the exact counter denies");
    instance.store.calls();
    assert_eq!(apply(1, 7).await, [(store, true, [2, 1]), (local, false, [6, 4])], "the eventual counter denies");
    assert_eq!(instance.store.calls(), ["peek 1 of exact"]);
    assert_eq!(apply(2, 6).await, [(store, true, [0, 3]), (local, true, [0, 10])], "nothing was charged before");
}

#[tokio::test]
async fn a_hot_counter_is_decided_from_its_lease() {
    let (instance, limit) = (Instance::new(), hourly(1_000));
    instance.apply_one(leased(b"cold", &limit, 7), 0).await;
    assert_eq!(instance.store.calls(), ["take 7 of cold"]);
    instance.lease(b"hot", &limit).await;
    instance.local.sweep(at(1)).await;
    assert_eq!(instance.apply_one(leased(b"hot", &limit, 4), 1).await, (Decider::Lease, true, [988, 12]));
    assert!(instance.store.calls().is_empty(), "the lease is in use");
    // The lease pays 28 of 30 hits, and the higher demand leads to a larger lease.
    assert_eq!(instance.apply_one(leased(b"hot", &limit, 30), 2).await, (Decider::Store, true, [958, 42]));
    assert_eq!(instance.store.calls(), ["take 168 of hot", "take 2 of hot"]);
    let refund = Hit { action: Action::Refund, ..leased(b"hot", &limit, 5) };
    instance.apply_one(refund, 3).await;
    assert_eq!(instance.store.calls(), ["refund 5 of hot"]);
    instance.local.sweep(at(100)).await;
    assert_eq!(instance.store.calls(), ["roll back 168 of hot"], "the lease is idle");
    assert_eq!(instance.store.used(b"hot", &limit, 100), 8 + 4 + 30 - 5);
    assert_eq!(instance.metrics(), named([("lease_decisions", 1), ("lease_hits", 200), ("lease_returned_hits", 168)]));
    assert_eq!(instance.local.metrics().decisions(), [1, 0, 0]);
}

#[tokio::test]
async fn leases_are_returned_at_shutdown() {
    let (instance, limit) = (Instance::new(), hourly(1_000));
    instance.lease(b"hot", &limit).await;
    instance.local.return_all(at(1)).await;
    assert_eq!(instance.store.calls(), ["roll back 32 of hot"]);
    assert_eq!(instance.store.used(b"hot", &limit, 1), 8);
}

#[tokio::test]
async fn every_granted_hit_is_counted_as_reported_returned_or_unreported() {
    let (instance, limit) = (Instance::new(), hourly(1_000));
    instance.lease(b"hot", &limit).await;
    let hit = Hit { demand: 8, ..leased(b"hot", &limit, 1) };
    let grant = async |hit: Hit, millis| {
        let decision = instance.local.apply(&[hit.borrowed()], Charge::Each, at(millis)).await[0].unwrap();
        assert_eq!(decision.decider, Decider::Lease);
        decision.grant
    };
    assert_eq!(grant(hit.clone().peek(), 1).await, None, "a peek receives no grant");
    let first = grant(hit.clone(), 1).await.unwrap();
    assert_eq!(first.hits.get(), 8);
    let report = |used| instance.local.report(&hit.counter, first.id, used, at(2));
    assert_eq!((report(5), report(5)), (5, 0), "a grant is reported once");
    let second = grant(hit.clone(), 3).await.unwrap();
    assert_eq!((second.hits.get(), second.ttl), (8, Micros::from_secs(1)));
    instance.local.sweep(at(2_003)).await;
    instance.local.sweep(at(2_004)).await;
    let metrics = [
        ("grant_hits", 16),
        ("grant_reported_hits", 5),
        ("grant_returned_hits", 3),
        ("grant_unreported_hits", 8),
        ("lease_decisions", 3),
        ("lease_hits", 32),
        ("lease_returned_hits", 32 - 1 - 5 - 1 - 8),
    ];
    assert_eq!(instance.metrics(), named(metrics));
}

#[tokio::test]
async fn a_denied_request_takes_nothing_from_a_lease() {
    let (instance, limits) = (Instance::new(), [hourly(1_000), hourly(5)]);
    instance.lease(b"hot", &limits[0]).await;
    let hits = |cost, taken| [leased(b"hot", &limits[0], cost), exact(b"exact", &limits[1], taken)];
    let (store, lease) = (Decider::Store, Decider::Lease);
    let decisions = instance.apply(&hits(2, 1), Charge::All, 1).await;
    assert_eq!(decisions, [(lease, true, [990, 10]), (store, true, [4, 1])]);
    let decisions = instance.apply(&hits(3, 5), Charge::All, 1).await;
    assert_eq!(decisions, [(lease, true, [990, 10]), (store, false, [4, 1])]);
    instance.store.calls();
    assert_eq!(instance.apply_one(leased(b"hot", &limits[0], 30), 1).await, (lease, true, [960, 40]));
    // Each hit is charged on its own otherwise.
    let decisions = instance.apply(&hits(1, 5), Charge::Each, 1).await;
    assert_eq!(decisions, [(lease, true, [959, 41]), (Decider::DenyCache, false, [4, 1])]);
}

#[tokio::test]
async fn an_exact_hit_acquires_no_lease_for_its_counter() {
    let (instance, limit) = (Instance::new(), hourly(1_000));
    let _ = instance.local.apply(&[leased(b"a", &limit, 8).borrowed()], Charge::Each, at(0)).await;
    instance.store.lock().failure = Some(StoreError::Timeout);
    finish_background_calls().await;
    instance.store.lock().failure = None;
    assert_eq!(instance.store.calls(), ["take 32 of a", "take 8 of a"]);
    instance.apply(&[exact(b"a", &limit, 1), leased(b"b", &limit, 1)], Charge::Each, 1).await;
    assert_eq!(instance.store.calls(), ["take 1 of a, take 1 of b"]);
    instance.apply_one(leased(b"a", &limit, 1), 1).await;
    assert_eq!(instance.store.calls(), ["take 1 of a", "take 36 of a"]);
}

#[tokio::test]
async fn a_denial_is_answered_from_memory_until_its_maximum_age() {
    let (instance, limit) = (Instance::new(), hourly(5));
    let take = |key, cost| exact(key, &limit, cost);
    let (store, deny_cache) = (Decider::Store, Decider::DenyCache);
    assert_eq!(instance.apply_one(take(b"full", 5), 0).await, (store, true, [0, 5]));
    assert_eq!(instance.apply_one(take(b"full", 1), 1).await, (store, false, [0, 5]));
    instance.store.calls();
    assert_eq!(instance.apply_one(take(b"full", 1), 2).await, (deny_cache, false, [0, 5]));
    assert!(instance.store.calls().is_empty());
    let both = [take(b"full", 1), take(b"free", 2)];
    let decisions = instance.apply(&both, Charge::Each, 3).await;
    assert_eq!(decisions, [(deny_cache, false, [0, 5]), (store, true, [3, 2])]);
    assert_eq!(instance.store.calls(), ["take 2 of free"]);
    let decisions = instance.apply(&both, Charge::All, 4).await;
    assert_eq!(decisions, [(deny_cache, false, [0, 5]), (store, true, [3, 2])]);
    assert_eq!(instance.store.calls(), ["peek 2 of free"]);
    let decisions = instance.apply(&[take(b"free", 1), take(b"other", 1)], Charge::All, 5).await;
    assert_eq!(decisions, [(store, true, [2, 3]), (store, true, [4, 1])]);
    assert_eq!(instance.store.calls(), ["take 1 of free, take 1 of other"]);
    assert_eq!(instance.local.metrics().decisions(), [0, 0, 3]);
    assert_eq!(instance.metrics(), named([("deny_cache_denials", 3)]));
    assert_eq!(instance.apply_one(take(b"full", 1), 1_001).await, (store, false, [0, 5]), "a second after the denial");
}

/// Limits of unit second can have a separate store, in which the same name is another counter.
#[tokio::test]
async fn counters_of_other_names_and_of_the_other_store_are_not_denied() {
    let (instance, limit) = (Instance::new(), hourly(1));
    for name in 0..64 {
        let key = format!("user{name}").into_bytes();
        for per_second in [false, true] {
            let hit = Hit::take(Counter { per_second, ..Counter::new(&*key, limit) }, 1);
            assert_eq!(instance.apply_one(hit.clone(), 0).await, (Decider::Store, true, [0, 1]), "{name} {per_second}");
            assert_eq!(instance.apply_one(hit, 0).await, (Decider::Store, false, [0, 1]), "{name} {per_second}");
        }
    }
}
