//! Memory and Redis are one: the same questions at the same instants get the same answers, for every algorithm,
//! whatever it is asked: costs, looks, refunds, idle times, limits that change, clocks that jump.

use std::sync::Arc;

use proptest::{
    prelude::*,
    sample::select,
    strategy::{BoxedStrategy, ValueTree},
    test_runner::{Config, TestRunner},
};
use sluicegate::{
    algorithm::{
        Action, Algorithm, AlgorithmKind, Classes, LimitSpec, Limiter, MAX, Micros, RequestContext, Sample, State,
        reports::UtilizationReports, sliding_window::WindowEdge,
    },
    store::{AnyStore, Charge, Hit, Local, Memory, Redis, Store, memory},
};
use sluicegate_common::adaptive::Method;
use tokio::task::JoinSet;

use crate::{
    redis::stores::{connect, connect_remembering},
    support::{RedisCluster, RedisServer, Sentinels, all, ring},
};

/// Histories per algorithm.
const HISTORIES: usize = 10_000;
/// Histories under way at once: calls to Redis are pipelined.
const AT_ONCE: usize = 100;
/// A whole number of minutes and of hours.
const START: u64 = 1_763_672_400_000_000;
/// A minute before the tags of a fixed window of one minute begin anew.
const WRAP: u64 = 33 * 900_000 * 60_000_000 - 60_000_000;

/// One request: several hits on one counter, so long after the one before; negative when the clock stepped back.
#[derive(Clone, Debug)]
struct Step {
    later: i64,
    /// Which of the history's two limits applies: they change while it runs.
    changed: bool,
    /// What to do, how many hits, and who asks, where that matters.
    hits: Vec<(Action, u64, RequestContext)>,
}

/// An undo is of a take so long before the step that it stands in.
const UNDONE: [u64; 5] = [0, 1, 1_000_000, 30_000_000, 60_000_000];

#[derive(Clone, Debug)]
struct History {
    start: u64,
    limits: [Algorithm; 2],
    steps: Vec<Step>,
}

/// Few distinct spans, most of them a window's edge or a microsecond beside it: where off-by-ones live.
fn later() -> impl Strategy<Value = i64> {
    let spans = [0_i64, 1, 1_000_000, 7_500_000, 15_000_000, 30_000_000, 59_999_999, 60_000_000, 120_000_000];
    prop_oneof![
        6 => Just(0_i64),
        12 => (select(spans.to_vec()), -1_i64..2).prop_map(|(span, beside)| (span + beside).max(0)),
        3 => 0_i64..200_000_000,
        1 => select(vec![-1_i64, -999_999, -5_000_000, -30_000_000, -60_000_000, -61_000_000, -200_000_000]),
        1 => select(vec![3_600_000_000_i64, 86_400_000_000, 31_536_000_000_000, -86_400_000_000]),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let undo = select(UNDONE.to_vec()).prop_map(|before| Action::RollBack(Micros::new(before)));
    let action = prop_oneof![6 => Just(Action::Take), 1 => Just(Action::Peek), 1 => Just(Action::Refund), 1 => undo];
    let cost = prop_oneof![12 => 0_u64..6, 1 => 6_u64..200, 1 => Just(MAX), 1 => Just(u64::MAX)];
    // Names that a search for one another's bytes could find where none begins.
    let asker = (select(vec![0_u64, 1, 256, 65_536]), 0_u8..4).prop_map(|(holder, class)| RequestContext {
        holder,
        class,
        sample: None,
    });
    let hits = prop::collection::vec((action, cost, asker), 1..3);
    (later(), prop::bool::weighted(0.2), hits).prop_map(|(later, changed, hits)| Step { later, changed, hits })
}

fn histories(limit: &BoxedStrategy<Algorithm>) -> impl Strategy<Value = History> {
    let limits = (limit.clone(), limit.clone()).prop_map(|(one, other)| [one, other]);
    let start = prop_oneof![9 => Just(START), 1 => Just(WRAP)];
    (start, limits, prop::collection::vec(step(), 1..16)).prop_map(|(start, limits, steps)| History {
        start,
        limits,
        steps,
    })
}

/// Limits of one kind, with every word that belongs to it.
fn limits(kind: AlgorithmKind) -> BoxedStrategy<Algorithm> {
    if kind.name == UtilizationReports::NAME {
        return select(vec![1_u64, 10, 3_600])
            .prop_map(|life| UtilizationReports::new(Micros::from_secs(life)).into())
            .boxed();
    }
    let requests =
        prop_oneof![8 => 1_u32..12, 1 => Just(100), 1 => Just(600), 1 => Just(1_000_003), 1 => Just(u32::MAX)];
    let window = select(vec![1_u64, 15, 60, 60, 60, 3_600, 31_536_000]);
    let percent = select(vec![None, None, None, Some(10), Some(50)]);
    let numbers = (requests, window, percent, any::<bool>(), 0_u32..9, 0_u32..9);
    let limits =
        numbers.prop_filter_map("the numbers do not fit", move |(requests, window, soft, denied, one, other)| {
            let given = |word: &str, chosen: bool| chosen && kind.keywords.contains(&word);
            let shape = LimitSpec {
                requests,
                window: Micros::from_secs(window),
                buckets: given("buckets", one > 4).then_some(other + 1),
                edge: given("edge", one % 2 == 0).then_some(WindowEdge::Strict),
                burst: given("burst", one > 2).then_some(other + 1),
                queue: given("queue", other > 2).then_some(one),
                warm_up: kind.name.contains("warm_up").then_some(Micros::new(1 + u64::from(other) * 30_000_001)),
                count_denied: Some(denied),
                min_interval: given("min_interval", one > 4).then_some(Micros::new(u64::from(other) * 100_000)),
                soft: soft.filter(|_| !kind.name.contains("warm_up")),
                method: given("method", true).then(|| Method::ALL[other as usize % 3]),
                floor: given("floor", one > 2).then_some(one % 3),
                timeout: given("timeout", one > 4).then_some(Micros::new(1_500_000)),
                ..LimitSpec::default()
            };
            let shape =
                if given("shares", one > 3 || kind.name == "shares") { shared(shape, one, other)? } else { shape };
            let learns = kind.keywords.contains(&"method");
            let shape = if learns { LimitSpec { soft: None, count_denied: None, ..shape } } else { shape };
            (kind.build)(&shape).ok()
        });
    // One and the same counter is asked, taken from in advance, and told what has passed elsewhere.
    let used = (limits, 0_u32..10).prop_map(|(limit, way)| match way {
        0..3 => limit.leasing().unwrap_or(limit),
        3 => limit.counting(),
        _ => limit,
    });
    used.boxed()
}

/// Three classes or four, with more or less that is kept for each.
fn shared(shape: LimitSpec, one: u32, other: u32) -> Option<LimitSpec> {
    let capacity = shape.requests;
    let part = |part: u32| (u64::from(capacity) * u64::from(part) / 20) as u32;
    let mut shares = vec![(part(one), part(one) + 1), (part(other), capacity), (0, part(10).max(1))];
    if one.is_multiple_of(2) {
        shares.push((part(1), capacity));
    }
    let classes = Classes::new(&shares, capacity).ok()?;
    Some(LimitSpec { classes: Some(classes), soft: None, count_denied: None, ..shape })
}

async fn decide(store: &AnyStore, key: &str, algorithm: &Algorithm, step: &Step, now: u64) -> Vec<String> {
    let algorithms: Vec<_> = step.hits.iter().map(|(_, _, asker)| algorithm.with_context(*asker)).collect();
    let hit = |((action, cost, _), algorithm): (&(Action, u64, RequestContext), _)| {
        let action = match action {
            Action::RollBack(before) => Action::RollBack(Micros::new(now) - *before),
            action => *action,
        };
        Hit { action, ..Hit::take(key.as_bytes(), algorithm, *cost) }
    };
    let hits: Vec<_> = step.hits.iter().zip(&algorithms).map(hit).collect();
    let decisions = all(store.apply(&hits, Charge::Each, Micros::new(now)).await);
    decisions.iter().map(|decision| format!("{decision:?}")).collect()
}

/// Runs one history against both; an error shows the first answer that differs.
async fn compare(redis: Local<Redis>, key: String, history: History) -> Result<(), String> {
    let (memory, redis) =
        (AnyStore::Memory(Arc::new(Memory::new(&memory::Settings::default()))), AnyStore::Redis(redis));
    let mut now = history.start;
    for (number, step) in history.steps.iter().enumerate() {
        now = now.saturating_add_signed(step.later);
        let algorithm = &history.limits[usize::from(step.changed)];
        let one = decide(&memory, &key, algorithm, step, now).await;
        let other = decide(&redis, &key, algorithm, step, now).await;
        if one != other {
            return Err(format!("memory {one:#?}\nredis {other:#?}\nat step {number} of {history:#?}"));
        }
    }
    Ok(())
}

/// A fixed window may count what it refuses. What is refused without asking it has not counted, and histories give back
/// what was never taken.
fn counts_refusals(history: &History) -> bool {
    let counts = |limit: &Algorithm| limit.denial_counts(&State::default(), Micros::new(history.start));
    history.limits.iter().any(|limit| limit.name() == "fixed_window" && counts(limit))
}

async fn agree(limit: BoxedStrategy<Algorithm>, url: &str, histories_each: usize) {
    // Redis' own clock goes on between two steps at one instant: what is over in microseconds must not expire meanwhile.
    let jitter = std::time::Duration::from_secs(86_400);
    let (asking, remembering) = (connect(url, jitter).await, connect_remembering(url, jitter).await);
    let strategy = histories(&limit);
    let mut runner = TestRunner::new(Config::default());
    let mut under_way = JoinSet::new();
    for number in 0..histories_each {
        let history = strategy.new_tree(&mut runner).unwrap().current();
        let redis = if counts_refusals(&history) { &asking } else { &remembering };
        under_way.spawn(compare(redis.clone(), format!("history{number}"), history));
        while under_way.len() >= AT_ONCE {
            under_way.join_next().await.unwrap().unwrap().unwrap_or_else(|difference| panic!("{difference}"));
        }
    }
    for outcome in under_way.join_all().await {
        outcome.unwrap_or_else(|difference| panic!("{difference}"));
    }
}

#[tokio::test]
async fn memory_and_redis_agree_on_random_histories_of_every_algorithm() {
    for kind in Algorithm::KINDS {
        let server = RedisServer::start();
        agree(limits(*kind), &server.url(), HISTORIES).await;
    }
}

/// Requests that come and go in batches, each with a latency: enough of them for many steps of a limit that learns.
fn batches(kind: AlgorithmKind) -> impl Strategy<Value = History> {
    let batch = (1_usize..40, 1_u64..700_000, prop::bool::weighted(0.1), 0_i64..2_500_000);
    let limits = (limits(kind), limits(kind)).prop_map(|(one, other)| [one, other]);
    (limits, prop::collection::vec(batch, 20..60)).prop_map(|(limits, batches)| {
        let steps = batches.into_iter().enumerate().flat_map(|(number, (size, latency, dropped, later))| {
            let hits = move |action, latency: u64| {
                let holders = 1..=size as u64;
                let sample = move |holder| Some(Sample { latency: Micros::new(latency + holder), dropped });
                holders
                    .map(move |holder| (action, 1, RequestContext { holder, class: 0, sample: sample(holder) }))
                    .collect()
            };
            let changed = number % 7 == 6;
            let come = Step { later, changed, hits: hits(Action::Take, latency) };
            [come, Step { later: latency as i64, changed, hits: hits(Action::Refund, latency) }]
        });
        History { start: START, limits, steps: steps.collect() }
    })
}

#[tokio::test]
async fn what_is_learned_is_the_same_in_memory_and_in_redis() {
    let server = RedisServer::start();
    let kind = Algorithm::kind("adaptive").unwrap();
    let redis = connect(&server.url(), std::time::Duration::from_secs(3_600)).await;
    let mut runner = TestRunner::new(Config::default());
    let mut under_way = JoinSet::new();
    for number in 0..200 {
        let history = batches(kind).new_tree(&mut runner).unwrap().current();
        under_way.spawn(compare(redis.clone(), format!("batches{number}"), history));
    }
    for outcome in under_way.join_all().await {
        outcome.unwrap_or_else(|difference| panic!("{}", &difference[..difference.len().min(3_000)]));
    }
}

#[tokio::test]
async fn memory_and_every_topology_agree_on_random_histories() {
    let (cluster, sentinels, (nodes, ring)) = (RedisCluster::start(), Sentinels::start(None, None), ring(3));
    for kind in Algorithm::KINDS {
        for url in [cluster.url(), sentinels.url(), ring.clone()] {
            agree(limits(*kind), &url, HISTORIES / 10).await;
        }
        let servers = cluster.nodes.iter().chain(&nodes).chain(&sentinels.servers[..1]);
        servers.for_each(|server| assert_eq!(server.cli(&["flushall"]), "OK"));
    }
}
