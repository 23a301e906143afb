//! With `decisions.hash_key_file`, neither Redis nor the log contains the values of entries. Decisions are not logged.

use std::{fs, path::Path};

use crate::support::{
    Operator, RedisServer, Server, request_for, rules,
    server::{command, post},
    wait_for, wait_for_async,
};

const RULES: &str = "
domain: api
shard_by: [tenant]
descriptors:
- key: user
  rate_limit: { unit: year, requests_per_unit: 2 }
- key: tenant
  descriptors:
  - key: user
    rate_limit: { unit: year, requests_per_unit: 2 }
- key: address
  ip_prefix: { v4: 16, v6: 64 }
  rate_limit: { unit: year, requests_per_unit: 2 }
";
/// No time of day contains the beginning of the address.
const NAMES: [&str; 4] = ["carol", "bob", "acme", "203.0"];

fn start(folder: &Path, redis: &RedisServer, key: &str) -> Operator {
    Operator::with(Server::builder().rules(folder).store(&redis.url()).set("decisions.hash_key_file", key))
}

#[tokio::test]
async fn names_in_redis_and_in_the_log_are_hashes() {
    let (redis, folder, keys) = (RedisServer::start(), rules(&[("api.yaml", RULES)]), tempfile::tempdir().unwrap());
    let key = |name: &str, text: &str| {
        fs::write(keys.path().join(name), text).unwrap();
        keys.path().join(name).display().to_string()
    };
    let (first, second) = (key("first", "a secret of 16 b"), key("second", "another of 16 by"));
    let operator = start(folder.path(), &redis, &first);
    let client = operator.server.client().await;
    let descriptors: [&[(&str, &str)]; 4] = [
        &[("user", "carol")],
        &[("user", "bob")],
        &[("tenant", "acme"), ("user", "carol")],
        &[("address", "203.0.2.3")],
    ];
    for descriptor in descriptors {
        assert_eq!(client.check(request_for("api", descriptor)).await.unwrap().remaining(), Some(1), "{descriptor:?}");
    }
    // Two addresses of one network share a counter.
    assert_eq!(client.check(request_for("api", &[("address", "203.0.9.9")])).await.unwrap().remaining(), Some(0));
    let counters = redis.cli(&["KEYS", "*"]);
    assert_eq!(counters.lines().count(), descriptors.len(), "{counters}");
    operator.ctl(&["limit", "set", "api", "user=carol", "9/year"]);
    operator.ctl(&["reset", "api", "user=bob"]);
    let conflict = operator.try_ctl(&["limit", "set", "api", "user=carol", "9/year", "--if-version", "7"]).unwrap_err();
    assert!(conflict.contains("was changed by another call"), "{conflict}");
    // Operators find the counter of an entity by its name.
    let inspected = operator.ctl(&["inspect", "api", "user=carol"]);
    let shard = command()
        .args(["shard", "--store", &redis.url(), "--rules", folder.path().to_str().unwrap(), "api", "user=carol"])
        .env("SLUICEGATE__DECISIONS__HASH_KEY_FILE", &first)
        .output()
        .unwrap();
    let shard = String::from_utf8(shard.stdout).unwrap();
    let name = shard.lines().find_map(|line| line.strip_prefix("key   ")).unwrap().to_owned();
    assert!(counters.lines().any(|counter| counter == name), "{name}: {counters}");
    let name = name.trim_start_matches("sluicegate:");
    assert!(inspected.contains(name), "{name}: {inspected}");
    // The response to invalid JSON quotes the value.
    let invalid = r#"{"domain":"api","descriptors":[{"entries":[{"key":"user","value":"bob"}]}],"hitsAddend":"carol"}"#;
    assert_eq!(post(&operator.server.url("/json"), invalid.as_bytes()).0, 400);
    wait_for("the last event", || operator.server.log().contains("a call has no decision").then_some(()));
    let log = operator.server.log();
    assert!(log.contains("override changed") && log.contains("operator action"), "{log}");
    assert!(log.contains("\"override_target\":\"limit|api|user="), "{log}");
    let rejected = log.lines().find(|line| line.contains("an override change has failed"));
    assert!(rejected.is_some_and(|line| line.contains("limit|api|user=")), "{log}");
    for text in [&counters, &log] {
        assert!(NAMES.iter().all(|name| !text.contains(name)), "{text}");
    }
    // Another instance with the same key counts on the same counters, and one with another key does not.
    let user = [("user", "carol")];
    for (key, remaining) in [(&first, 7), (&second, 8)] {
        let other = start(folder.path(), &redis, key);
        let answer = other.server.client().await.check(request_for("api", &user)).await.unwrap();
        assert_eq!(answer.remaining(), Some(remaining), "{key}");
    }
}

#[tokio::test]
async fn decisions_are_not_logged() {
    let folder = rules(&[("api.yaml", RULES)]);
    let server = Server::builder().rules(folder.path()).set("telemetry.log.level", "debug").start();
    let client = server.client().await;
    for allowed in [true, true, false] {
        assert_eq!(client.check(request_for("api", &[("user", "carol")])).await.unwrap().allowed(), allowed);
    }
    server.signal("TERM");
    wait_for_async("the last event", async || server.log().contains("shutdown complete").then_some(())).await;
    let log = server.log();
    assert!(log.contains("\"DEBUG\"") && !log.contains("carol"), "{log}");
}

#[test]
fn a_short_key_is_rejected() {
    let key = tempfile::NamedTempFile::new().unwrap();
    fs::write(key.path(), "fifteen bytes !").unwrap();
    let output = command()
        .args(["--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0"])
        .env("SLUICEGATE__DECISIONS__HASH_KEY_FILE", key.path())
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && error.contains("decisions.hash_key_file") && error.contains("16 bytes"),
        "{error}"
    );
}
