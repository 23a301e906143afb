//! Fuzz targets: replies of Redis, and addresses of Redis servers.
#![allow(clippy::missing_panics_doc, reason = "every target panics if a promise is broken")]

use percent_encoding::percent_decode_str;
use redis::{IntoConnectionInfo, Value};
use sluicegate_algorithm::{Action, Algorithm, LimitSpec, Micros, Operation};

use super::{Settings, combined_script, overrides, topology};
use crate::redact;

/// Parses bytes that a server might send as the reply to each of the service's commands, and explains the states in it.
pub fn redis_reply(input: &[u8]) {
    let Ok(reply) = redis::parse_redis_value(input) else {
        return;
    };
    read_steps(&reply);
    topology::read_any(&reply);
    overrides::read_any(&reply);
}

fn read_steps(reply: &Value) {
    let Some((now, mut steps)) = combined_script::parse_reply(reply) else {
        return;
    };
    let spec = LimitSpec { requests: 10, window: Micros::from_secs(60), ..LimitSpec::default() };
    let algorithms: Vec<Algorithm> = Algorithm::KINDS.iter().filter_map(|kind| (kind.build)(&spec).ok()).collect();
    while let Some(taken) = steps.take(1) {
        for step in taken {
            for algorithm in &algorithms {
                let operation = Operation { action: Action::Take, cost: 1, now };
                let _ = algorithm.explain(&step.state, operation, step.outcome == combined_script::Outcome::Allowed);
            }
        }
    }
}

/// Parses the address of a store. Log messages with the address must not contain its password.
pub fn redis_address(input: &[u8]) {
    let url = String::from_utf8_lossy(input);
    topology::read_address(&url, &Settings::default());
    let Ok(info) = url.as_ref().into_connection_info() else {
        return;
    };
    let Some(password) = info.redis_settings().password() else {
        return;
    };
    // Another part of the address may contain the same text, which is not a secret then. The password can be encoded.
    let decoded = url.replace('+', " ");
    let texts = [url.replace(['\t', '\n', '\r'], ""), percent_decode_str(&decoded).decode_utf8_lossy().into_owned()];
    if texts.iter().all(|text| text.matches(password).count() == 1) {
        let redacted = redact(&url).replacen("***", "\n", 1);
        assert!(!redacted.contains(password), "{redacted}");
    }
}
