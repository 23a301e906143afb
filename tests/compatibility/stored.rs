//! Stored data: names of counters, overrides in Redis and in a journal, and recordings.

use std::{collections::BTreeSet, fs};

use super::{assert_keeps, released};
use crate::support::{Operator, RedisServer, Server, repository, request_for, rules, server::command, wait_for};

/// One request for each limit in `fuzz/rules.yaml`, which has each kind of limit.
const DESCRIPTORS: &[&[(&str, &str)]] = &[
    &[("user", "bob")],
    &[("user", "acme")],
    &[("fixed", "a b|c{d}")],
    &[("fixed", "x"), ("path", "/v1/charges")],
    &[("window", "x")],
    &[("log", "日本")],
    &[("warm", "x")],
    &[("gcra", "x")],
    &[("queue", "x")],
    &[("slots", "x"), ("request_id", "7")],
    &[("adaptive", "x"), ("request_id", "7")],
    &[("fleet", "x"), ("priority", "critical"), ("request_id", "7")],
    &[("upstream", "x"), ("tenant", "gold")],
    &[("report", "x")],
    &[("address", "2001:db8::1")],
    &[("address", "10.1.2.3")],
    &[("shadow", "")],
    &[("quota", "a value that is much longer than the others, so that the name of its counter would be too long")],
];

/// A counter with another name would start again after an upgrade.
#[tokio::test]
async fn counters_keep_their_names_in_redis() {
    let redis = RedisServer::start();
    let text = fs::read_to_string(repository("fuzz/rules.yaml")).unwrap();
    // A counter that is empty again after a few seconds might expire before its name is read.
    let text = text.replace("unit: second", "unit: hour").replace("/s\n", "/m\n");
    let text = text.replace("requests_per_unit: 10, algorithm", "requests_per_unit: 1, algorithm");
    let mut names = BTreeSet::new();
    for text in [text.replace("domain: api", "domain: plain").replace("shard_by: [user]\n", ""), text] {
        let folder = rules(&[("rules.yaml", &text)]);
        let server = Server::start(folder.path(), &redis.url());
        let domain = if text.contains("domain: plain") { "plain" } else { "api" };
        let client = server.client().await;
        for descriptor in DESCRIPTORS {
            client.check(request_for(domain, descriptor)).await.unwrap();
        }
        names.extend(redis.cli(&["keys", "*"]).lines().map(str::to_owned));
    }
    assert!(names.len() > 30, "{names:?}");
    assert_keeps("counters.txt", &names);
}

/// Replaces times and random ids, which differ in each run, by `#`.
fn masked(text: &str) -> String {
    let mut masked = String::new();
    let is_word = |letter: char| letter.is_ascii_alphanumeric();
    for word in text.split_inclusive(|letter: char| !is_word(letter)) {
        let (letters, end) = word.split_at(word.trim_end_matches(|letter| !is_word(letter)).len());
        let is_random = letters.len() >= 13 && letters.chars().all(|letter| letter.is_ascii_hexdigit());
        masked += if is_random { "#" } else { letters };
        masked += end;
    }
    masked
}

/// An instance of another version reads overrides from Redis and continues their history.
#[test]
fn overrides_keep_their_format_in_redis() {
    let redis = RedisServer::start();
    let folder = rules(&[("rules.yaml", &fs::read_to_string(repository("fuzz/rules.yaml")).unwrap())]);
    let operator = Operator::start(folder.path(), &redis.url());
    for arguments in [
        &["limit", "set", "api", "fixed=bob", "20/minute", "--reason", "asked for it"][..],
        &["limit", "set", "api", "window=bob", "{ unit: day, requests_per_unit: 7, algorithm: sliding_window }"],
        &["plan", "assign", "api", "user=carol", "pro"],
        &["switch", "shadow", "domain", "api"],
        &["limit", "set", "api", "fixed=bob", "blocked", "--if-version", "1"],
        &["plan", "unassign", "api", "user=carol"],
    ] {
        operator.ctl(arguments);
    }
    let mut lines = BTreeSet::new();
    for hash in ["texts", "head"] {
        let reply = masked(&redis.cli(&["hgetall", &format!("sluicegate:{{directives}}{hash}")]));
        let fields: Vec<_> = reply.lines().collect();
        lines.extend(fields.chunks(2).map(|field| format!("{hash}: {}", field.join(" "))));
    }
    let log = masked(&redis.cli(&["xrange", "sluicegate:{directives}log", "-", "+"]));
    lines.insert(format!("log: {}", log.replace('\n', " ")));
    lines.extend(redis.cli(&["keys", "*directives*"]).lines().map(|key| format!("key: {key}")));
    assert_keeps("overrides.txt", &lines);
}

/// A journal that the last release wrote is read, and the overrides in it are in force.
#[tokio::test]
async fn the_journal_of_the_last_release_is_read() {
    let journal = tempfile::NamedTempFile::new().unwrap();
    fs::copy(released("overrides.journal"), journal.path()).unwrap();
    let folder = rules(&[("rules.yaml", &fs::read_to_string(repository("fuzz/rules.yaml")).unwrap())]);
    let path = journal.path().display().to_string();
    let operator = Operator::with(Server::builder().rules(folder.path()).set("overrides.file", &path));
    let listed =
        operator.ctl(&["limit", "list"]) + &operator.ctl(&["plan", "list"]) + &operator.ctl(&["switch", "list"]);
    for expected in ["fixed=bob", "blocked", "window=bob", "user=carol", "pro", "shadow"] {
        assert!(listed.contains(expected), "{expected} is missing in {listed}");
    }
    let client = operator.server.client().await;
    let blocked = client.check(request_for("api", &[("fixed", "bob")])).await.unwrap();
    assert_eq!(blocked.0.statuses[0].current_limit.as_ref().map(|limit| limit.requests_per_unit), Some(0));
    operator.ctl(&["limit", "set", "api", "fixed=dave", "3/hour"]);
    wait_for("the change to be written", || {
        fs::read_to_string(journal.path()).unwrap().contains("fixed=dave").then_some(())
    });
}

/// Recordings of the last release can be simulated.
#[test]
fn recordings_of_the_last_release_are_read() {
    let folder = rules(&[("rules.yaml", &fs::read_to_string(repository("fuzz/rules.yaml")).unwrap())]);
    let simulated = command()
        .args(["simulate", "--json", "--rules"])
        .arg(folder.path())
        .arg("--traffic")
        .arg(released("traffic.gz"))
        .output()
        .unwrap();
    assert!(simulated.status.success(), "{}", String::from_utf8_lossy(&simulated.stderr));
    let outcome: serde_json::Value = serde_json::from_slice(&simulated.stdout).unwrap();
    assert_eq!(outcome["requests"], 40, "{outcome}");
}
