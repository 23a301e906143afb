//! Vectors derived from the definitions of the algorithms (`tests/golden/derive.py`), compared with the Rust functions,
//! the memory store and Redis. The limits are written as in a rule file.

use std::{collections::BTreeSet, fs, sync::Arc, time::Duration};

use serde::Deserialize;
use sluicegate::{
    algorithm::{Action, Algorithm, Decision, Micros, Operation, RequestContext, State},
    rules::{Entry, Limit, Lookup, Options, SourceFile, compile},
    store::{AnyStore, Charge, Counter, Hit, Memory, Store, memory},
};

use crate::{
    memcached,
    redis::stores::connect,
    support::{MemcachedServer, RedisCluster, RedisServer, Sentinels, repository, ring, unwrap_decisions},
};

#[derive(Deserialize)]
struct Vector {
    rate_limit: serde_json::Value,
    steps: Vec<Step>,
}

#[derive(Debug, Deserialize)]
struct Step {
    /// Microseconds since [`START`].
    at_us: u64,
    action: String,
    cost: u64,
    allowed: bool,
    remaining: u64,
    reset_us: u64,
    retry_after_us: Option<u64>,
    #[serde(default)]
    delay_us: u64,
    #[serde(default)]
    soft: bool,
    /// Index of the request's class, if several classes share the limit.
    #[serde(default)]
    class: u8,
}

const START: u64 = 1_763_672_400_000_000;

impl Step {
    fn operation(&self) -> Operation {
        let action = match self.action.as_str() {
            "take" => Action::Take,
            "peek" => Action::Peek,
            "return" => Action::Refund,
            other => panic!("unknown action {other}"),
        };
        Operation { action, cost: self.cost, now: Micros::new(START + self.at_us) }
    }

    /// Returns the algorithm of the limit for the class of this step.
    fn algorithm(&self, limit: &Limit) -> Algorithm {
        limit.algorithm().with_context(RequestContext { class: self.class, ..RequestContext::default() })
    }

    /// Returns the decision that the vector expects, in the form of [`decision_fields`].
    fn expected(&self) -> [Option<u64>; 6] {
        let (allowed, soft) = (self.allowed.into(), self.soft.into());
        [Some(allowed), Some(soft), Some(self.remaining), Some(self.reset_us), self.retry_after_us, Some(self.delay_us)]
    }
}

fn decision_fields(decision: &Decision) -> [Option<u64>; 6] {
    let (allowed, soft) = (decision.allowed.into(), decision.soft.into());
    let (reset, delay) = (decision.reset.get(), decision.delay.get());
    let retry_after = decision.retry_after.map(Micros::get);
    [Some(allowed), Some(soft), Some(decision.remaining), Some(reset), retry_after, Some(delay)]
}

fn vectors() -> Vec<(String, Vector)> {
    let files = fs::read_dir(repository("tests/golden")).unwrap().map(|entry| entry.unwrap().path());
    let files = files.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
    let read = |path: std::path::PathBuf| {
        let vector = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        (path.file_stem().unwrap().to_str().unwrap().to_owned(), vector)
    };
    files.map(read).collect()
}

/// Compiles the limit of a vector, which is valid in a rule file because JSON is YAML.
pub(super) fn limit(rate_limit: &serde_json::Value) -> Limit {
    let text = format!("domain: d\ndescriptors: [{{key: k, rate_limit: {rate_limit}}}]");
    let file = SourceFile { name: "golden.yaml".into(), text };
    let (rules, _) = compile(&[file], Options::default()).unwrap();
    let entry = |key| Entry { key, value: "" };
    let class = rate_limit.get("class").and_then(serde_json::Value::as_str).map(entry);
    let Lookup::Rule(rule, _) = rules.find("d", std::iter::once(entry("k")).chain(class)) else {
        panic!("the rule was not found");
    };
    **rule.limit.as_ref().unwrap()
}

async fn replay(store: &AnyStore) {
    for (name, vector) in vectors() {
        let limit = limit(&vector.rate_limit);
        for (number, step) in vector.steps.iter().enumerate() {
            let Operation { action, cost, now } = step.operation();
            let algorithm = step.algorithm(&limit);
            let counter = Counter::new(&*name, algorithm);
            let hit = Hit { action, ..counter.take(cost) };
            let decisions = unwrap_decisions(store.apply(&[hit], Charge::Each, now).await);
            assert_eq!(decision_fields(&decisions[0]), step.expected(), "{name} #{number}: {step:#?}");
        }
    }
}

#[test]
fn the_rust_functions_match_the_vectors() {
    let mut covered = BTreeSet::new();
    for (name, vector) in vectors() {
        let limit = limit(&vector.rate_limit);
        covered.insert(limit.algorithm().name());
        let mut state = State::default();
        for (number, step) in vector.steps.iter().enumerate() {
            let decision = step.algorithm(&limit).apply(&mut state, step.operation());
            assert_eq!(decision_fields(&decision), step.expected(), "{name} #{number}: {step:#?}");
        }
    }
    // Utilization reports and assignments are not limits, and adaptive limits are compared with Netflix's own vectors
    // (crates/overload/src/adaptive).
    let not_covered = ["reports of a resource", "adaptive", "assignments of a limit"];
    let names = Algorithm::KINDS.iter().map(|kind| kind.name);
    let expected = names.filter(|name| !name.ends_with("on lease") && !not_covered.contains(name));
    assert_eq!(covered, expected.collect(), "every algorithm of a rule has vectors");
}

#[tokio::test]
async fn memory_matches_the_vectors() {
    replay(&AnyStore::Memory(Arc::new(Memory::new(&memory::Settings::default())))).await;
}

#[tokio::test]
async fn redis_matches_the_vectors() {
    let server = RedisServer::start();
    replay(&AnyStore::Redis(connect(&server.url(), Duration::from_secs(3_600)).await)).await;
}

/// Buckets expire at multiples of a sixteenth of their drain time. A hit that drains within a microsecond has no lifetime
/// left there, which Redis would reject.
#[tokio::test]
async fn a_hit_that_drains_within_a_microsecond_is_stored_in_redis() {
    let server = RedisServer::start();
    let store = AnyStore::Redis(connect(&server.url(), Duration::ZERO).await);
    for algorithm in ["gcra", "token_bucket", "leaky_bucket"] {
        let text = format!(r#"{{"algorithm": "{algorithm}", "unit": "second", "requests_per_unit": 4000000000}}"#);
        let limit = limit(&serde_json::from_str(&text).unwrap());
        let counter = Counter::new(algorithm, *limit.algorithm());
        for cost in 1..4 {
            let decisions =
                unwrap_decisions(store.apply(&[counter.take(cost)], Charge::Each, Micros::new(START)).await);
            assert!(decisions[0].allowed, "{algorithm}");
        }
    }
}

#[tokio::test]
async fn memcached_matches_the_vectors() {
    let server = MemcachedServer::at(START);
    replay(&AnyStore::Memcached(memcached::stores::connect(&server.url()).await)).await;
}

#[tokio::test]
async fn every_topology_matches_the_vectors() {
    let (cluster, sentinels, (_nodes, ring)) = (RedisCluster::start(), Sentinels::start(None, None), ring(3));
    for url in [cluster.url(), sentinels.url(), ring] {
        replay(&AnyStore::Redis(connect(&url, Duration::from_secs(3_600)).await)).await;
    }
}
