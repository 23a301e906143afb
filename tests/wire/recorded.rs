//! Replays of recordings from envoyproxy/ratelimit: rules, requests with the second of their arrival, and responses.
//! Empty counters and a manual clock must produce exactly the recorded responses.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use serde::Deserialize;
use sluicegate::{
    algorithm::Micros,
    engine::{self, Code, Descriptor, Engine, Request, Statistics, StatisticsSettings},
    metrics::WorkerId,
    rules::{Entry, Limit, Measure, Options, SourceFile, Unit, source::Source},
    service::{Clock, Decisions, decisions, reload::RulesInForce},
    store::{AnyStore, Memory, memory},
};

use crate::{
    redis::stores::connect,
    support::{RedisCluster, RedisServer, Sentinels, repository, ring},
};

#[derive(Deserialize)]
struct Recording {
    rules: std::collections::BTreeMap<String, String>,
    requests: Vec<Recorded>,
}

#[derive(Deserialize)]
struct Recorded {
    at: u64,
    domain: String,
    hits_addend: u64,
    descriptors: Vec<RecordedDescriptor>,
    overall: String,
    statuses: Vec<RecordedStatus>,
}

#[derive(Deserialize)]
struct RecordedDescriptor {
    entries: Vec<(String, String)>,
    hits_addend: Option<u64>,
    limit: Option<(u32, String)>,
}

#[derive(Debug, Deserialize, PartialEq)]
struct RecordedStatus {
    code: String,
    current_limit: Option<(u32, u32, String)>,
    limit_remaining: u32,
    reset_seconds: Option<u64>,
}

fn service(recording: &Recording, store: AnyStore, now: &Arc<AtomicU64>) -> Decisions {
    let files = recording.rules.iter().map(|(name, text)| SourceFile { name: name.clone(), text: text.clone() });
    let clock = Clock::Manual(Arc::clone(now));
    let settings = StatisticsSettings { max_dynamic_series: 700, near_limit_ratio: 0.8 };
    let statistics = Statistics::new(1, settings);
    let source = Source::BuiltIn(files.collect());
    let in_force =
        RulesInForce::start(source, Options::default(), clock.clone(), Arc::clone(&statistics), Arc::default())
            .unwrap();
    let rules = Arc::clone(in_force.snapshot());
    let local = Arc::new(Memory::new(&memory::Settings::default()));
    let engine =
        Engine { worker: WorkerId(0), scope: "", store, local, rules, statistics, top: None, settings: Arc::default() };
    Decisions { engine, clock, metrics: decisions::Metrics::new(1), recorder: None }
}

fn request(recorded: &Recorded) -> Request<'_> {
    let hits = recorded.hits_addend.max(1);
    let descriptors = recorded.descriptors.iter().map(|recorded| descriptor(recorded, hits)).collect();
    Request { domain: &recorded.domain, descriptors, feedback: Vec::new() }
}

fn descriptor(recorded: &RecordedDescriptor, hits: u64) -> Descriptor<'_> {
    let limit =
        |(requests, unit): &(u32, String)| Limit::new((*requests).into(), Unit::from_name(unit).unwrap(), 1).unwrap();
    Descriptor {
        entries: recorded.entries.iter().map(|(key, value)| Entry { key, value }).collect(),
        hits: recorded.hits_addend.unwrap_or(hits),
        refund: false,
        requested_limit: recorded.limit.as_ref().map(|recorded_limit| Box::new(limit(recorded_limit))),
    }
}

/// Returns the number of a unit in Envoy's protocol.
fn unit_number(measure: Measure) -> u32 {
    let Measure::Rate { unit, .. } = measure else {
        return 0;
    };
    match unit {
        Unit::Second => 1,
        Unit::Minute => 2,
        Unit::Hour => 3,
        Unit::Day => 4,
        Unit::Month => 5,
        Unit::Year => 6,
        Unit::Week => 7,
    }
}

fn code_name(code: Code) -> String {
    if code == Code::OverLimit { "OVER_LIMIT".into() } else { "OK".into() }
}

fn status(status: &engine::Status) -> RecordedStatus {
    let limit = status.limit.as_ref().map(|limit| {
        (limit.requests as u32, unit_number(limit.measure), limit.name.as_deref().unwrap_or_default().to_owned())
    });
    RecordedStatus {
        code: code_name(status.code),
        current_limit: limit,
        limit_remaining: status.remaining as u32,
        reset_seconds: status.reset_seconds(),
    }
}

async fn replay(name: &str, store: AnyStore) {
    let text = std::fs::read_to_string(repository("tests/vectors").join(name)).unwrap();
    let recording: Recording = serde_json::from_str(&text).unwrap();
    let now = Arc::new(AtomicU64::new(0));
    let service = service(&recording, store, &now);
    for (number, recorded) in recording.requests.iter().enumerate() {
        now.store(Micros::from_secs(recorded.at).get(), Relaxed);
        let verdict = service.decide(&request(recorded)).await.unwrap();
        let statuses: Vec<_> = verdict.statuses.iter().map(status).collect();
        assert_eq!(
            (code_name(verdict.overall), statuses.as_slice()),
            (recorded.overall.clone(), &recorded.statuses[..]),
            "{name}, request {number}"
        );
    }
}

const JITTER: Duration = Duration::from_secs(300);
const RECORDINGS: [&str; 3] = ["ratelimit-101.json", "ratelimit-102.json", "ratelimit-103.json"];

#[tokio::test]
async fn the_memory_store_answers_as_recorded() {
    for name in RECORDINGS {
        replay(name, AnyStore::Memory(Arc::new(Memory::new(&memory::Settings::default())))).await;
    }
}

#[tokio::test]
async fn a_single_redis_answers_as_recorded() {
    for name in RECORDINGS {
        let server = RedisServer::start();
        replay(name, AnyStore::Redis(connect(&server.url(), JITTER).await)).await;
    }
}

#[tokio::test]
async fn every_redis_topology_answers_as_recorded() {
    for name in RECORDINGS {
        let (cluster, sentinels, (_nodes, ring)) = (RedisCluster::start(), Sentinels::start(None, None), ring(3));
        for url in [cluster.url(), sentinels.url(), ring] {
            replay(name, AnyStore::Redis(connect(&url, JITTER).await)).await;
        }
    }
}
