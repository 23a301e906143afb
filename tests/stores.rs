//! Memory and Redis are one: the same questions at the same instants, the same answers. And many callers of one
//! counter, in one process or in two, share its limit exactly.

use std::{sync::Arc, time::Duration};

use proptest::{
    prelude::*,
    strategy::ValueTree,
    test_runner::{Config, TestRunner},
};
use sluicegate::{
    algorithm::{Action, Algorithm, MAX, Micros, fixed_window::FixedWindow},
    metrics::WorkerId,
    store::{self, AnyStore, Decisions, Hit, Memory, Redis, Store, memory, redis},
};

use super::support::{DEADLINE, RedisServer, Server, ask, rules};

async fn stores() -> (RedisServer, [AnyStore; 2]) {
    let server = RedisServer::start();
    let redis = connect(&server, redis::Settings::default().expiry_jitter).await;
    let memory = Arc::new(Memory::new(&memory::Settings::default()));
    (server, [AnyStore::Memory(memory), AnyStore::Redis(redis)])
}

async fn connect(server: &RedisServer, expiry_jitter: Duration) -> Redis {
    let settings = redis::Settings { timeout: DEADLINE, expiry_jitter, ..redis::Settings::default() };
    let setup = redis::Setup::new(&server.url(), &settings, redis::Time::Caller, store::Metrics::new(1)).unwrap();
    let redis = setup.connect(WorkerId(0));
    assert!(redis.wait_until_up(DEADLINE).await);
    redis
}

fn window(limit: u64, seconds: u64) -> Algorithm {
    FixedWindow::new(limit, Micros::from_secs(seconds)).unwrap().into()
}

/// One request of a history: hits on a few counters, at an instant.
#[derive(Clone, Debug)]
struct Step {
    at: u64,
    hits: Vec<(usize, Action, u64)>,
}

/// Few counters and few instants, most of them on a window's edge or beside it: where off-by-ones live.
fn step() -> impl Strategy<Value = Step> {
    let action = prop_oneof![3 => Just(Action::Take), 1 => Just(Action::Peek), 1 => Just(Action::Return)];
    let cost = prop_oneof![8 => 0_u64..6, 1 => Just(MAX), 1 => Just(u64::MAX)];
    let hits = prop::collection::vec((0_usize..4, action, cost), 1..4);
    let at = (0_u64..6, prop_oneof![Just(0_u64), Just(1), Just(500_000), Just(999_999)]);
    (at, hits).prop_map(|((window, micros), hits)| Step { at: window * 60_000_000 + micros, hits })
}

async fn decide(store: &AnyStore, step: &Step, history: usize) -> Decisions {
    let algorithms = [window(0, 60), window(3, 60), window(10, 120), window(u64::from(u32::MAX), 60)];
    let keys: Vec<_> = (0..4).map(|counter| format!("{{history{history}|counter={counter}}}fw").into_bytes()).collect();
    let hits: Vec<_> = step
        .hits
        .iter()
        .map(|(counter, action, cost)| Hit {
            key: &keys[*counter],
            algorithm: &algorithms[*counter],
            action: *action,
            cost: if *action == Action::Peek { 0 } else { *cost },
        })
        .collect();
    let epoch = 1_763_672_400_000_000;
    store.apply(&hits, Micros::new(epoch + step.at)).await.unwrap()
}

#[tokio::test]
async fn memory_and_redis_agree_on_random_histories() {
    let (_server, [memory, redis]) = stores().await;
    let mut runner = TestRunner::new(Config::default());
    let strategy = prop::collection::vec(step(), 1..12);
    for history in 0..1_500 {
        // Windows come in order: what a store does with a clock that steps back is the algorithm's own test.
        let mut steps = strategy.new_tree(&mut runner).unwrap().current();
        steps.sort_by_key(|step| step.at);
        for (number, step) in steps.iter().enumerate() {
            let (one, other) = (decide(&memory, step, history).await, decide(&redis, step, history).await);
            assert_eq!(one, other, "history {history}, step {number} of {steps:#?}");
        }
    }
}

#[tokio::test]
async fn redis_keys_expire_by_themselves_and_can_be_read() {
    let server = RedisServer::start();
    let redis = connect(&server, Duration::from_millis(1)).await;
    let rule = window(10, 60);
    // 30 s into a window.
    let now = Micros::from_secs(1_763_672_430);
    for _ in 0..3 {
        let hit = Hit { key: b"{api|user=alice}fw:60", algorithm: &rule, action: Action::Take, cost: 2 };
        redis.apply(&[hit], now).await.unwrap();
    }
    let key = "sluicegate:{api|user=alice}fw:60:1763672400";
    assert_eq!(server.cli(&["keys", "*"]), key);
    assert_eq!(server.cli(&["get", key]), "6");
    let ttl = |server: &RedisServer, key: &str| server.cli(&["pttl", key]).parse::<u64>().unwrap();
    assert!((10_000..=30_001).contains(&ttl(&server, key)), "{}", ttl(&server, key));
    let look = Hit { key: b"{api|user=bob}fw:60", algorithm: &rule, action: Action::Peek, cost: 0 };
    redis.apply(&[look], now).await.unwrap();
    assert_eq!(server.cli(&["dbsize"]), "1", "a look leaves nothing behind");

    // With jitter, keys of one window go one after the other.
    let redis = connect(&server, Duration::from_secs(300)).await;
    let mut ttls = Vec::new();
    for user in 0..20 {
        let name = format!("{{api|user={user}}}fw:60");
        let hit = Hit { key: name.as_bytes(), algorithm: &rule, action: Action::Take, cost: 1 };
        redis.apply(&[hit], now).await.unwrap();
        ttls.push(ttl(&server, &format!("sluicegate:{name}:1763672400")));
    }
    assert!(ttls.iter().all(|ttl| (10_000..=330_001).contains(ttl)), "{ttls:?}");
    assert!(ttls.iter().max().unwrap() - ttls.iter().min().unwrap() > 100_000, "{ttls:?}");
}

#[tokio::test]
async fn a_request_with_many_descriptors_is_one_round_trip() {
    let (server, [_, redis]) = stores().await;
    let rule = window(10, 60);
    let keys: Vec<_> = (0..128).map(|number| format!("{{key{number}}}fw")).collect();
    let hits: Vec<_> =
        keys.iter().map(|key| Hit { key: key.as_bytes(), algorithm: &rule, action: Action::Take, cost: 1 }).collect();
    server.cli(&["config", "resetstat"]);
    assert_eq!(redis.apply(&hits, Micros::from_secs(60)).await.unwrap().len(), 128);
    let stats = server.cli(&["info", "commandstats"]);
    assert!(stats.contains("cmdstat_evalsha:calls=1,"), "{stats}");
    assert!(!stats.contains("cmdstat_get:"), "{stats}");
}

/// Two instances of the service, one Redis, 10,000 concurrent requests on one key with a limit of 1,000.
#[tokio::test]
async fn two_instances_share_a_limit_exactly() {
    let redis = RedisServer::start();
    let text = "domain: d\ndescriptors: [{key: hot, rate_limit: {unit: year, requests_per_unit: 1000}}]";
    let rules = rules(&[("d.yaml", text)]);
    let start = || Server::builder().rules(rules.path()).store(&redis.url()).set("redis.timeout", "20s").start();
    let servers = [start(), start()];
    let mut calls = tokio::task::JoinSet::new();
    for server in &servers {
        for _ in 0..5 {
            let client = server.client().await;
            for _ in 0..1_000 {
                let client = client.clone();
                calls.spawn(async move { client.check(ask("d", &[("hot", "key")])).await.unwrap().allowed() });
            }
        }
    }
    let answers = calls.join_all().await;
    assert_eq!(answers.len(), 10_000);
    assert_eq!(answers.into_iter().filter(|allowed| *allowed).count(), 1_000);
}
