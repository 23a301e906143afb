//! Vectors derived by definition (`tests/golden/derive.py`), held against the Rust functions, the memory store and
//! Redis. The limits are written as in a rule file.

use std::{collections::BTreeSet, fs, sync::Arc, time::Duration};

use serde::Deserialize;
use sluicegate::{
    algorithm::{Action, Algorithm, Decision, Micros, Operation, RequestContext, State},
    rules::{Entry, Limit, Lookup, Options, SourceFile, compile},
    store::{AnyStore, Charge, Hit, Memory, Store, memory},
};

use crate::{
    redis::stores::connect,
    support::{RedisCluster, RedisServer, Sentinels, all, repository, ring},
};

#[derive(Deserialize)]
struct Vector {
    rate_limit: serde_json::Value,
    steps: Vec<Step>,
}

#[derive(Debug, Deserialize)]
struct Step {
    /// Since [`START`].
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
    /// Whose request it is, where several share the limit.
    #[serde(default)]
    class: u8,
}

const START: u64 = 1_763_672_400_000_000;

impl Step {
    fn ask(&self) -> Operation {
        let action = match self.action.as_str() {
            "take" => Action::Take,
            "peek" => Action::Peek,
            "return" => Action::Refund,
            other => panic!("{other} is no action"),
        };
        Operation { action, cost: self.cost, now: Micros::new(START + self.at_us) }
    }

    /// As whoever asks has it.
    fn algorithm(&self, limit: &Limit) -> Algorithm {
        limit.algorithm().with_context(RequestContext { class: self.class, ..RequestContext::default() })
    }

    /// What the vector has of a decision.
    fn expected(&self) -> [Option<u64>; 6] {
        let (allowed, soft) = (self.allowed.into(), self.soft.into());
        [Some(allowed), Some(soft), Some(self.remaining), Some(self.reset_us), self.retry_after_us, Some(self.delay_us)]
    }
}

fn given(decision: &Decision) -> [Option<u64>; 6] {
    let (allowed, soft) = (decision.allowed.into(), decision.soft.into());
    let (reset, delay) = (decision.reset.get(), decision.delay.get());
    let retry_after = decision.retry_after.map(Micros::get);
    [Some(allowed), Some(soft), Some(decision.remaining), Some(reset), retry_after, Some(delay)]
}

fn vectors() -> Vec<(String, Vector)> {
    let files = fs::read_dir(repository("tests/golden")).unwrap().map(|entry| entry.unwrap().path());
    let files = files.filter(|path| path.extension().is_some_and(|end| end == "json"));
    let read = |path: std::path::PathBuf| {
        let vector = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        (path.file_stem().unwrap().to_str().unwrap().to_owned(), vector)
    };
    files.map(read).collect()
}

/// JSON is YAML: the vector's limit is the rule's.
fn limit(rate_limit: &serde_json::Value) -> Limit {
    let text = format!("domain: d\ndescriptors: [{{key: k, rate_limit: {rate_limit}}}]");
    let file = SourceFile { name: "golden.yaml".into(), text };
    let (rules, _) = compile(&[file], Options::default()).unwrap();
    let entry = |key| Entry { key, value: "" };
    let class = rate_limit.get("class").and_then(serde_json::Value::as_str).map(entry);
    let Lookup::Rule(rule, _) = rules.find("d", std::iter::once(entry("k")).chain(class)) else {
        panic!("the rule is not found");
    };
    **rule.limit.as_ref().unwrap()
}

async fn replay(store: &AnyStore) {
    for (name, vector) in vectors() {
        let limit = limit(&vector.rate_limit);
        for (number, step) in vector.steps.iter().enumerate() {
            let Operation { action, cost, now } = step.ask();
            let algorithm = step.algorithm(&limit);
            let hit = Hit { action, ..Hit::take(name.as_bytes(), &algorithm, cost) };
            let decisions = all(store.apply(&[hit], Charge::Each, now).await);
            assert_eq!(given(&decisions[0]), step.expected(), "{name} #{number}: {step:#?}");
        }
    }
}

#[test]
fn the_functions_answer_as_derived() {
    let mut covered = BTreeSet::new();
    for (name, vector) in vectors() {
        let limit = limit(&vector.rate_limit);
        covered.insert(limit.algorithm().name());
        let mut state = State::default();
        for (number, step) in vector.steps.iter().enumerate() {
            let decision = step.algorithm(&limit).apply(&mut state, step.ask());
            assert_eq!(given(&decision), step.expected(), "{name} #{number}: {step:#?}");
        }
    }
    // Reports are no limit, and what a limit learns has vectors of Netflix' own (common/src/adaptive).
    let without = ["reports of a resource", "adaptive"];
    let names = Algorithm::KINDS.iter().map(|kind| kind.name);
    let all = names.filter(|name| !name.ends_with("on lease") && !without.contains(name));
    assert_eq!(covered, all.collect(), "every algorithm of a rule has vectors");
}

#[tokio::test]
async fn memory_answers_as_derived() {
    replay(&AnyStore::Memory(Arc::new(Memory::new(&memory::Settings::default())))).await;
}

#[tokio::test]
async fn redis_answers_as_derived() {
    let server = RedisServer::start();
    replay(&AnyStore::Redis(connect(&server.url(), Duration::from_secs(3_600)).await)).await;
}

#[tokio::test]
async fn every_topology_answers_as_derived() {
    let (cluster, sentinels, (_nodes, ring)) = (RedisCluster::start(), Sentinels::start(None, None), ring(3));
    for url in [cluster.url(), sentinels.url(), ring] {
        replay(&AnyStore::Redis(connect(&url, Duration::from_secs(3_600)).await)).await;
    }
}
