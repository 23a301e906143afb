//! An operator who changes overrides and candidate rules, and a resource that reports its utilization.

use std::time::{Duration, Instant};

use serde_json::json;
use tokio::time::sleep;

use crate::{
    features::{DOMAIN, rule_file},
    load::{Context, Instance, http},
    observer::{Failure, Via},
    support::{descriptor, operator::OPERATE, raw_client::Request},
};

/// Limits of the override, at most the one of the rule.
const LIMITS: [u32; 3] = [50, 120, 180];
/// Stated time after which an override is in force on all instances (docs/design/overrides.md), and as much again
/// because all processes share the machine.
const IN_FORCE: Duration = Duration::from_secs(2);
/// The time after which the operator stops waiting.
const GIVE_UP: Duration = Duration::from_secs(15);

pub(super) fn start(context: &Context) {
    context.repeat(Duration::from_secs(3), override_limit);
    context.every_second(1, override_limit_of_peers);
    context.repeat(Duration::from_secs(10), |_, context| candidate(context));
    context.every_second(1, report_utilization);
}

/// Calls a method of the admin API. A conflict with another change is an answer.
async fn call(context: &Context, instance: &Instance, method: &str, body: serde_json::Value) -> Result<(), Failure> {
    let call = async {
        match http(instance.target.admin, &format!("/v1/{method}"), Some(OPERATE), Some(&body.to_string())).await? {
            (200 | 400 | 409, _) => Ok(()),
            (status, _) => Err(Failure::Status(format!("HTTP {status} {method}"))),
        }
    };
    context.observer.call(Via::NewConnection(instance.target.index), method, call).await.map(|_| ())
}

fn change(key: &str, limit: Option<u32>, reason: &str) -> serde_json::Value {
    let value = limit.map(|limit| format!("{{unit: second, unit_multiplier: 10, requests_per_unit: {limit}}}"));
    let target = json!({"limit": {"domain": DOMAIN, "entries": [{"key": key, "value": "e0"}]}});
    json!({"changes": [{"target": target, "value": value.unwrap_or_default()}], "reason": reason})
}

/// Sets or removes an override, and waits until it is in force on all instances.
async fn override_limit(number: u64, context: Context) {
    let limit = LIMITS.get(number as usize % (LIMITS.len() + 1)).copied();
    if call(&context, &context.redis[0], "PutOverrides", change("overridden", limit, "soak")).await.is_err() {
        return;
    }
    let acknowledged = Instant::now();
    let expected = limit.unwrap_or(200);
    while acknowledged.elapsed() < GIVE_UP {
        let mut current = 0;
        for instance in context.redis.iter() {
            let peek = Request::new(DOMAIN).descriptor(descriptor(&[("overridden", "e0")]).hits(0));
            let answer = tokio::time::timeout(Duration::from_secs(1), instance.client.check(peek)).await;
            let limit = answer.ok().and_then(Result::ok).and_then(|answer| {
                answer.0.statuses.first()?.current_limit.as_ref().map(|limit| limit.requests_per_unit)
            });
            current += usize::from(limit == Some(expected));
        }
        if current == context.redis.len() {
            break;
        }
        sleep(Duration::from_millis(50)).await;
    }
    context.observer.in_force_after(acknowledged.elapsed(), IN_FORCE);
}

/// Changes an override of an entity without load, which a peer writes to its journal. The long reason makes a full disk
/// matter soon.
async fn override_limit_of_peers(number: u64, context: Context) {
    let instance = &context.peers[number as usize % context.peers.len()];
    let limit = LIMITS.get(number as usize % (LIMITS.len() + 1)).copied();
    let _ = call(&context, instance, "PutOverrides", change("peer_unused", limit, &"r".repeat(1_000))).await;
}

/// Uploads candidate rules, promotes them and rolls back.
async fn candidate(context: Context) {
    let text = rule_file();
    let (before, after) = text.split_once("key: candidate").unwrap();
    let text = format!(
        "{before}key: candidate{}",
        after.replacen("\"requests_per_unit\": 100", "\"requests_per_unit\": 60", 1)
    );
    let upload = json!({"files": [{"name": "soak.yaml", "text": text}], "share": 0.5, "reason": "soak"});
    let steps = [
        ("UploadCandidate", upload),
        ("PromoteCandidate", json!({"reason": "soak"})),
        ("RollbackRules", json!({"reason": "soak"})),
        ("DropCandidate", json!({"reason": "soak"})),
    ];
    for (method, body) in steps {
        // A step is repeated, because promoted rules must not stay.
        while call(&context, &context.redis[0], method, body.clone()).await.is_err() {
            sleep(Duration::from_secs(1)).await;
        }
        sleep(Duration::from_secs(5)).await;
    }
}

/// Reports a utilization from 20% to 95%, from which the elastic limit follows.
async fn report_utilization(number: u64, context: Context) {
    let instance = &context.redis[number as usize % context.redis.len()];
    let utilization = 0.2 + 0.75 * (number % 40) as f64 / 40.0;
    let body = json!({"reporter": "db-1", "utilization": utilization, "ttl": "10s"}).to_string();
    let call = async {
        match http(instance.target.http, "/resources/db", None, Some(&body)).await? {
            (200, _) => Ok(()),
            (status, _) => Err(Failure::Status(format!("HTTP {status} report"))),
        }
    };
    let _ = context.observer.call(Via::NewConnection(instance.target.index), "report", call).await;
}
