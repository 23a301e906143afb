//! The features that the load uses: their rules, their load, and the most that they may admit.

use std::fmt::Write as _;

use prost_types::{ListValue, Struct, Value, value::Kind};
use sluicegate_proto::ratelimit::config::ratelimit::v3::{RateLimitConfig, RateLimitDescriptor};

/// Domain of the rules.
pub(crate) const DOMAIN: &str = "soak";
/// Length in milliseconds of the windows in which admissions are counted, aligned like fixed windows.
pub(crate) const WINDOW: u64 = 10_000;

/// Where the counters of a feature are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// In Redis: the bound holds at any time.
    Exact,
    /// In Redis and on each instance, which may not know the hits of the others of the last `staleness` milliseconds.
    Eventual { staleness: u64 },
    /// On each peer, with the same meaning.
    Peers { staleness: u64 },
}

/// A rule with its load and its bound.
#[derive(Debug)]
pub(crate) struct Feature {
    pub(crate) key: &'static str,
    pub(crate) entities: u64,
    /// Checks per second, the sum over the entities.
    pub(crate) rate: u64,
    /// The keywords of `rate_limit`, as JSON.
    pub(crate) limit: &'static str,
    /// Hits of an entity that may be admitted within a [`WINDOW`].
    pub(crate) bound: u64,
    pub(crate) sharing: Sharing,
}

/// A limit of requests in flight.
#[derive(Debug)]
pub(crate) struct InFlight {
    pub(crate) key: &'static str,
    pub(crate) limit: &'static str,
    pub(crate) bound: u64,
}

/// `eventual.sync`, a round trip, and the time in which a busy machine runs the task that synchronises.
const EVENTUAL: Sharing = Sharing::Eventual { staleness: 1_000 };
/// `cluster.sync`, a trip, and the same time.
const PEERS: Sharing = Sharing::Peers { staleness: 1_000 };

/// Entities of the features that create counters all the time.
pub(crate) const ALWAYS_NEW: u64 = u64::MAX;

/// Rules with a bound on the admissions in each window. That of a bucket is `burst + rate × window`. Where instances may
/// have to decide without each other's hits, callers request more than the limits of all instances together.
pub(crate) const FEATURES: [Feature; 21] = [
    redis("fixed", 6, 240, r#"{"unit": "second", "unit_multiplier": 10, "requests_per_unit": 250}"#, 250),
    redis(
        "sliding",
        2,
        50,
        r#"{"algorithm": "sliding_window", "edge": "strict", "buckets": 5, "unit": "second", "unit_multiplier": 10, "requests_per_unit": 150}"#,
        150,
    ),
    redis(
        "log",
        2,
        40,
        r#"{"algorithm": "sliding_log", "unit": "second", "unit_multiplier": 10, "requests_per_unit": 120}"#,
        120,
    ),
    redis(
        "token",
        2,
        60,
        r#"{"algorithm": "token_bucket", "unit": "second", "requests_per_unit": 10, "burst": 50}"#,
        150,
    ),
    redis("gcra", 2, 60, r#"{"algorithm": "gcra", "unit": "second", "requests_per_unit": 10, "burst": 50}"#, 150),
    redis(
        "leaky",
        2,
        60,
        r#"{"algorithm": "leaky_bucket", "unit": "second", "requests_per_unit": 10, "burst": 50}"#,
        150,
    ),
    redis(
        "leased",
        1,
        360,
        r#"{"unit": "second", "unit_multiplier": 10, "requests_per_unit": 2500, "consistency": "leased"}"#,
        2_500,
    ),
    redis(
        "leased_bucket",
        1,
        240,
        r#"{"algorithm": "token_bucket", "unit": "second", "requests_per_unit": 150, "burst": 300, "consistency": "leased"}"#,
        1_800,
    ),
    redis(
        "shares",
        1,
        60,
        r#"{"capacity": "30/s", "class": "tenant", "shares": {"gold": {"min": 12}, "free": {"max": 15}}}"#,
        330,
    ),
    redis(
        "elastic",
        1,
        30,
        r#"{"unit": "second", "unit_multiplier": 10, "requests_per_unit": 100, "elastic": {"resource": "db", "up_to": "200%"}}"#,
        200,
    ),
    redis("overridden", 1, 40, r#"{"unit": "second", "unit_multiplier": 10, "requests_per_unit": 200}"#, 200),
    redis("candidate", 1, 30, r#"{"unit": "second", "unit_multiplier": 10, "requests_per_unit": 100}"#, 100),
    redis("stream", 2, 100, r#"{"unit": "second", "unit_multiplier": 10, "requests_per_unit": 300}"#, 300),
    redis("json", 1, 20, r#"{"unit": "second", "unit_multiplier": 10, "requests_per_unit": 120}"#, 120),
    redis("new", ALWAYS_NEW, 100, r#"{"unit": "second", "unit_multiplier": 10, "requests_per_unit": 5}"#, 5),
    Feature {
        sharing: PEERS,
        ..redis("peer_new", ALWAYS_NEW, 60, r#"{"unit": "second", "unit_multiplier": 10, "requests_per_unit": 5}"#, 5)
    },
    Feature {
        sharing: EVENTUAL,
        ..redis(
            "eventual",
            1,
            120,
            r#"{"unit": "second", "unit_multiplier": 10, "requests_per_unit": 300, "consistency": "eventual"}"#,
            300,
        )
    },
    Feature {
        sharing: EVENTUAL,
        ..redis(
            "eventual_bucket",
            1,
            60,
            r#"{"algorithm": "token_bucket", "unit": "second", "requests_per_unit": 10, "burst": 20, "consistency": "eventual"}"#,
            120,
        )
    },
    Feature {
        sharing: PEERS,
        ..redis("peer_window", 2, 120, r#"{"unit": "second", "unit_multiplier": 10, "requests_per_unit": 250}"#, 250)
    },
    Feature {
        sharing: PEERS,
        ..redis(
            "peer_bucket",
            1,
            60,
            r#"{"algorithm": "gcra", "unit": "second", "requests_per_unit": 20, "burst": 40}"#,
            240,
        )
    },
    Feature {
        sharing: PEERS,
        ..redis(
            "peer_log",
            1,
            40,
            r#"{"algorithm": "sliding_log", "unit": "second", "unit_multiplier": 10, "requests_per_unit": 150}"#,
            150,
        )
    },
];

/// Limits of requests in flight. Callers hold a slot for at most [`MAX_HELD`](crate::load::slots::MAX_HELD), which is
/// shorter than `hold`, so a slot never expires while it is held.
pub(crate) const IN_FLIGHT: [InFlight; 3] = [
    InFlight {
        key: "slots",
        limit: r#"{"algorithm": "concurrency", "limit": 10, "hold": "30s", "holder": "holder"}"#,
        bound: 10,
    },
    InFlight {
        key: "permits",
        limit: r#"{"algorithm": "concurrency", "limit": 8, "hold": "30s", "holder": "holder"}"#,
        bound: 8,
    },
    InFlight {
        key: "adaptive",
        limit: r#"{"algorithm": "adaptive", "ceiling": 12, "initial": 8, "hold": "30s", "holder": "holder"}"#,
        bound: 12,
    },
];

const fn redis(key: &'static str, entities: u64, rate: u64, limit: &'static str, bound: u64) -> Feature {
    Feature { key, entities, rate, limit, bound, sharing: Sharing::Exact }
}

impl Feature {
    /// Returns the index in [`FEATURES`] of the feature with this key.
    pub(crate) fn index(key: &str) -> usize {
        FEATURES.iter().position(|feature| feature.key == key).unwrap()
    }

    /// Returns the hits of one entity in this number of milliseconds.
    pub(crate) fn offered(&self, millis: u64) -> u64 {
        (self.rate * millis).div_ceil(self.entities.saturating_mul(1_000))
    }
}

/// Returns all keys with their limits.
fn limits() -> impl Iterator<Item = (&'static str, &'static str)> {
    let features = FEATURES.iter().map(|feature| (feature.key, feature.limit));
    features.chain(IN_FLIGHT.iter().map(|slots| (slots.key, slots.limit)))
}

/// Returns the rule file. JSON is YAML, so the limits are used unchanged.
pub(crate) fn rule_file() -> String {
    limits().fold(format!("domain: {DOMAIN}\ndescriptors:\n"), |mut text, (key, limit)| {
        let _ = writeln!(text, "- {{key: {key}, rate_limit: {limit}}}");
        text
    })
}

/// Returns the same rules for a control plane.
pub(crate) fn rule_resource() -> RateLimitConfig {
    let descriptor = |(key, limit): (&str, &str)| {
        let keywords = serde_json::json!({"sluicegate": {"rate_limit": serde_json::from_str::<serde_json::Value>(limit).unwrap()}});
        let Some(Kind::StructValue(metadata)) = value(&keywords).kind else { unreachable!() };
        RateLimitDescriptor { key: key.to_owned(), metadata: Some(metadata), ..RateLimitDescriptor::default() }
    };
    let descriptors = limits().map(descriptor).collect();
    RateLimitConfig { name: DOMAIN.into(), domain: DOMAIN.into(), descriptors, sluicegate: None }
}

fn value(json: &serde_json::Value) -> Value {
    let kind = match json {
        serde_json::Value::Null => Kind::NullValue(0),
        serde_json::Value::Bool(bool) => Kind::BoolValue(*bool),
        serde_json::Value::Number(number) => Kind::NumberValue(number.as_f64().unwrap()),
        serde_json::Value::String(text) => Kind::StringValue(text.clone()),
        serde_json::Value::Array(all) => Kind::ListValue(ListValue { values: all.iter().map(value).collect() }),
        serde_json::Value::Object(all) => {
            Kind::StructValue(Struct { fields: all.iter().map(|(key, json)| (key.clone(), value(json))).collect() })
        }
    };
    Value { kind: Some(kind) }
}
