//! The stream of activity, rules, entities, counters and simulations.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::{Updates, ask, call, number};
use crate::support::{
    Operator, RedisCluster, RedisServer, Server,
    operator::{OPERATE, READ},
    ring, rules,
    server::agent,
    wait_for,
};

const RULES: &str = "domain: api\ndescriptors:\n- key: user\n  rate_limit: { unit: year, requests_per_unit: 2 }\n";

#[test]
fn requests_and_changes_appear_in_the_stream() {
    let folder = rules(&[("api.yaml", RULES)]);
    let operator = Operator::start(folder.path(), "memory");
    let server = &operator.server;
    let updates = Updates::watch(server, "{}", &[]);
    let first = updates.next();
    let texts: Vec<_> = first["events"].as_array().unwrap().iter().map(|event| event["text"].clone()).collect();
    assert!(texts.iter().any(|text| text == "1 rule in 1 domain loaded"), "{texts:?}");
    for expected in [200, 200, 429] {
        assert_eq!(ask(server, "bob"), expected);
    }
    let update = updates.find(|update| number(&update["current"]["requests"]) == 3);
    assert_eq!((number(&update["current"]["requested"]), number(&update["current"]["denied"])), (3, 1), "{update}");
    operator.ctl(&["switch", "shadow", "domain", "api", "--reason", "incident"]);
    let is_switch = |update: &Value| update["events"][0]["kind"] == "EVENT_KIND_SWITCH";
    let event = updates.find(is_switch)["events"][0].clone();
    assert_eq!(event["text"], "switch for domain api set to shadow");
    assert_eq!((&event["author"], &event["reason"]), (&"alice".into(), &"incident".into()));
    // A viewer that connects later first receives the finished periods, and then each period when it ends.
    let later = Updates::watch(server, "{}", &[]);
    let first = later.next();
    let requests = |update: &Value| -> u64 {
        update["periods"].as_array().into_iter().flatten().map(|period| number(&period["requests"])).sum()
    };
    let mut sum = requests(&first);
    while sum < 3 {
        sum += requests(&later.next());
    }
    assert_eq!(sum, 3);
    assert!(first["events"].as_array().unwrap().iter().any(|event| event["kind"] == "EVENT_KIND_SWITCH"));
}

#[test]
fn rules_entities_and_counters_show_denials() {
    let folder = rules(&[("api.yaml", RULES)]);
    let (redis, url) = ring(2);
    let server = Server::start(folder.path(), &url);
    for _ in 0..5 {
        ask(&server, "bob");
    }
    ask(&server, "eve");
    // A worker counts a hit after its answer.
    let list = wait_for("all hits to be counted", || {
        let list = call(&server, "ListRuleActivity", r#"{"rulesOnly": true, "find": "USER"}"#, &[]).1;
        (number(&list["rows"][0]["activity"]["requested"]) == 6).then_some(list)
    });
    let row = &list["rows"][0];
    assert_eq!((&row["path"], &row["rule"]["algorithm"]), (&"api.user".into(), &"fixed_window".into()), "{list}");
    assert_eq!((number(&row["activity"]["requested"]), number(&row["activity"]["denied"])), (6, 3), "{list}");
    assert_eq!(row["entries"], json!([{ "key": "user" }]));
    assert_eq!(call(&server, "ListRuleActivity", r#"{"find": "nothing"}"#, &[]).1["rows"], Value::Null);
    let usage = call(&server, "GetRuleUsage", r#"{"path": "api.user"}"#, &[]).1;
    assert_eq!(usage["entitiesByShare"], json!([0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1]), "{usage}");
    assert_eq!(usage["entities"][0]["descriptor"]["entries"][0]["value"], "bob");
    let top = call(&server, "ListTopEntities", "{}", &[]).1;
    assert_eq!(
        (&top["entities"][0]["rulePath"], number(&top["entities"][0]["hits"])),
        (&"api.user".into(), 3),
        "{top}"
    );
    let text = json!({ "text": "api user=bob" }).to_string();
    let descriptors = call(&server, "ReadDescriptors", &text, &[]).1["descriptors"].clone();
    let inspected = call(&server, "Inspect", &json!({ "descriptor": descriptors[0] }).to_string(), &[]).1;
    let counter = &inspected["counter"];
    let names: Vec<String> = redis.iter().map(|server| format!("127.0.0.1:{}", server.port)).collect();
    assert!(names.iter().any(|name| counter["node"] == name.as_str()), "{counter} {names:?}");
    assert_eq!(
        (number(&counter["parts"][0]["hits"]), counter["forecast"].as_array().unwrap().len()),
        (3, 2),
        "{counter}"
    );
    let (code, answer) = call(&server, "GetRuleUsage", r#"{"path": "api.nobody"}"#, &[]);
    assert_eq!((code, answer["code"].as_str()), (404, Some("NOT_FOUND")));
}

/// A few expensive requests must not hide many cheap ones.
#[test]
fn denied_requests_are_counted_beside_denied_hits() {
    let folder = rules(&[("api.yaml", RULES)]);
    let server = Server::start(folder.path(), "memory");
    for _ in 0..5 {
        ask(&server, "bob");
    }
    let model = json!({ "entries": [{ "key": "user", "value": "model" }], "hitsAddend": 900 });
    let body = json!({ "domain": "api", "descriptors": [model] }).to_string();
    assert_eq!(agent().post(server.url("/json")).send(body.as_bytes()).unwrap().status(), 429);
    let top = call(&server, "ListTopEntities", "{}", &[]).1;
    let ranked: Vec<_> = top["entities"].as_array().unwrap().iter().map(counts_of).collect();
    assert_eq!(ranked, [("bob".to_owned(), 3, 3), ("model".to_owned(), 1, 900)], "{top}");
    assert_eq!((number(&top["totalRequests"]), number(&top["totalHits"])), (4, 903), "{top}");
    let by_hits = call(&server, "ListTopEntities", r#"{"rankBy": "RANK_BY_REQUESTED", "periodSeconds": 3600}"#, &[]).1;
    assert_eq!(counts_of(&by_hits["entities"][0]), ("model".to_owned(), 1, 900), "{by_hits}");
    let activity = &call(&server, "ListRuleActivity", r#"{"rulesOnly": true}"#, &[]).1["rows"][0]["activity"];
    let numbers = ["requests", "deniedRequests", "requested", "denied"].map(|name| number(&activity[name]));
    // Of the request that crosses the limit, the hits below it are within the limit.
    assert_eq!(numbers, [6, 4, 905, 903 - 2], "{activity}");
    let update = Updates::watch(&server, "{}", &[]).find(|update| number(&update["current"]["requests"]) == 6);
    assert_eq!(number(&update["current"]["deniedRequests"]), 4, "{update}");
    let metrics = server.get("/metrics");
    for line in [
        "sluicegate_denied_requests_total 4",
        "sluicegate_rule_requests_total{domain=\"api\",key1=\"user\"} 6",
        "sluicegate_rule_denied_requests_total{domain=\"api\",key1=\"user\"} 4",
    ] {
        assert!(metrics.contains(&format!("\n{line}\n")), "{line}: {metrics}");
    }
}

/// Returns the value of a ranked entity's first entry, its requests and its hits.
fn counts_of(entity: &Value) -> (String, u64, u64) {
    let value = entity["descriptor"]["entries"][0]["value"].as_str().unwrap_or_default();
    (value.to_owned(), number(&entity["requests"]), number(&entity["hits"]))
}

/// A misspelled key makes a caller unlimited, so it must be visible: in the log once, in a metric and in the lists.
#[test]
fn descriptors_without_a_rule_are_visible_by_their_keys() {
    let folder = rules(&[("api.yaml", RULES)]);
    let operator = Operator::start(folder.path(), "memory");
    let server = &operator.server;
    let body = json!({ "domain": "api", "descriptors": [{ "entries": [{ "key": "usr", "value": "secret" }] }] });
    for _ in 0..3 {
        assert_eq!(agent().post(server.url("/json")).send(body.to_string().as_bytes()).unwrap().status(), 200);
    }
    let line = "no rule matches these descriptors, so they have no limit";
    let log = wait_for("a line in the log", || server.log().contains(line).then(|| server.log()));
    assert!(log.contains("\"nearest_rule\":\"api.user\"") && !log.contains("secret"), "{log}");
    let unmatched =
        &call(server, "ListTopEntities", "{}", &[("authorization", &format!("Bearer {READ}"))]).1["unmatched"];
    assert_eq!((&unmatched[0]["keys"], &unmatched[0]["nearestRule"]), (&json!(["usr"]), &"api.user".into()));
    assert_eq!((number(&unmatched[0]["recent"]), number(&unmatched[0]["total"])), (3, 3), "{unmatched}");
    assert!(server.get("/metrics").contains("\nsluicegate_rule_not_found_total{domain=\"api\"} 3\n"));
    let top = operator.ctl(&["top"]);
    assert!(top.contains("api     usr   api.user"), "{top}");
    assert_eq!(server.log().matches(line).count(), 1);
}

/// Requests with a misspelled domain have no limit, too.
#[test]
fn unknown_domains_are_visible_with_the_most_similar_one() {
    let folder = rules(&[("api.yaml", RULES)]);
    let operator = Operator::start(folder.path(), "memory");
    let server = &operator.server;
    for domain in ["apii", "apii", "other-team"] {
        let body = json!({ "domain": domain, "descriptors": [{ "entries": [{ "key": "user", "value": "bob" }] }] });
        assert_eq!(agent().post(server.url("/json")).send(body.to_string().as_bytes()).unwrap().status(), 200);
    }
    let line = "the rules do not have this domain, so its requests have no limit";
    let has_both = || server.log().matches(line).count() == 2;
    wait_for("two lines in the log", || has_both().then_some(()));
    assert!(server.log().contains("\"domain\":\"apii\",\"nearest_domain\":\"api\""), "{}", server.log());
    let unmatched =
        &call(server, "ListTopEntities", "{}", &[("authorization", &format!("Bearer {READ}"))]).1["unmatched"];
    assert_eq!((&unmatched[0]["domain"], &unmatched[0]["nearestDomain"]), (&"apii".into(), &"api".into()));
    assert_eq!((number(&unmatched[0]["total"]), &unmatched[0]["unknownDomain"]), (2, &true.into()));
    assert_eq!((&unmatched[1]["domain"], &unmatched[1]["nearestDomain"]), (&"other-team".into(), &Value::Null));
    let metrics = server.get("/metrics");
    assert!(metrics.contains("\nsluicegate_domain_not_found_total 3\n"), "{metrics}");
    assert!(!metrics.contains("apii"), "{metrics}");
    let top = operator.ctl(&["top"]);
    assert!(top.contains("apii        (unknown domain)  api"), "{top}");
}

/// A customer has an entity in several domains. No request names all of them.
#[test]
fn the_entities_of_a_customer_are_found_by_value() {
    let shop = "domain: shop\ndescriptors:\n- key: tenant\n  descriptors:\n\
                \x20 - { key: path, rate_limit: { unit: year, requests_per_unit: 9 } }\n\
                - { key: user, rate_limit: { unit: year, requests_per_unit: 9 } }\n";
    let folder = rules(&[("api.yaml", RULES), ("shop.yaml", shop)]);
    let operator = Operator::start(folder.path(), "memory");
    let server = &operator.server;
    let post = |domain: &str, entries: &[(&str, &str)]| {
        let entries: Vec<_> = entries.iter().map(|(key, value)| json!({ "key": key, "value": value })).collect();
        let body = json!({ "domain": domain, "descriptors": [{ "entries": entries }] }).to_string();
        agent().post(server.url("/json")).send(body.as_bytes()).unwrap();
    };
    post("api", &[("user", "bob")]);
    post("shop", &[("tenant", "bob"), ("path", "/a")]);
    post("shop", &[("user", "bobby")]);
    operator.ctl(&["limit", "set", "shop", "tenant=bob", "5/day"]);
    let find = |request: &str| {
        let found = call(server, "FindEntities", request, &[("authorization", &format!("Bearer {READ}"))]).1;
        let entities = found["entities"].as_array().cloned().unwrap_or_default();
        let name = |entity: &Value| {
            let descriptor = &entity["descriptor"];
            let entries = descriptor["entries"].as_array().unwrap().iter();
            let entries: Vec<_> = entries.map(|entry| entry["value"].as_str().unwrap()).collect();
            format!(
                "{} {} {}",
                descriptor["domain"].as_str().unwrap(),
                entries.join(","),
                number(&entity["counter"]["used"])
            )
        };
        entities.iter().map(name).collect::<Vec<_>>()
    };
    assert_eq!(find(r#"{"value": "bob"}"#), ["api bob 1", "shop bob 0", "shop bob,/a 0"]);
    assert_eq!(find(r#"{"value": "bob", "prefix": true}"#).last().unwrap(), "shop bobby 1");
    assert_eq!(find(r#"{"value": "carol"}"#), Vec::<String>::new());
    assert_eq!(call(server, "FindEntities", "{}", &[("authorization", &format!("Bearer {READ}"))]).0, 400);
}

/// The tables of the console show what all instances have decided, as its charts do.
#[test]
fn tables_of_instances_that_share_redis_are_summed() {
    let folder = rules(&[("api.yaml", RULES)]);
    let redis = RedisServer::start();
    let servers = [0, 1].map(|_| Server::start(folder.path(), &redis.url()));
    let updates = Updates::watch(&servers[0], r#"{"allInstances": true}"#, &[]);
    for server in &servers {
        for _ in 0..4 {
            ask(server, "bob");
        }
    }
    let text = json!({ "domain": "api", "descriptors": [{ "entries": [{ "key": "usr" }] }] }).to_string();
    agent().post(servers[1].url("/json")).send(text.as_bytes()).unwrap();
    let all = |method: &str| call(&servers[0], method, r#"{"allInstances": true, "rulesOnly": true}"#, &[]).1;
    let top = |request: &str| call(&servers[0], "ListTopEntities", request, &[]).1;
    let sum = wait_for("the entities of both instances", || {
        let sum = top(r#"{"allInstances": true}"#);
        (number(&sum["entities"][0]["requests"]) == 6).then_some(sum)
    });
    assert_eq!(sum["instances"].as_array().unwrap().len(), 2, "{sum}");
    assert_eq!(sum["unmatched"][0]["keys"], json!(["usr"]), "{sum}");
    let hour = top(r#"{"allInstances": true, "periodSeconds": 3600, "rankBy": "RANK_BY_REQUESTED"}"#);
    assert_eq!(counts_of(&hour["entities"][0]), ("bob".to_owned(), 8, 8), "{hour}");
    let own = top("{}");
    assert_eq!(own["instances"].as_array().unwrap().len(), 1, "{own}");
    assert!(number(&own["entities"][0]["requests"]) < 6 && own["unmatched"] == Value::Null, "{own}");
    let rules = wait_for("the rules of both instances", || {
        let rules = all("ListRuleActivity");
        (number(&rules["rows"][0]["activity"]["deniedRequests"]) == 6).then_some(rules)
    });
    assert_eq!(rules["instances"].as_array().unwrap().len(), 2, "{rules}");
    // The events of the other instance have its name; those that both report are sent once.
    let mut names = BTreeSet::new();
    while names.len() < 2 {
        let update = updates.next();
        let events = update["events"].as_array().into_iter().flatten();
        let starts = events.filter(|event| event["kind"] == "EVENT_KIND_START");
        names.extend(starts.map(|event| event["instance"].as_str().unwrap().to_owned()));
    }
}

/// An override for a rule that was renamed stays, and is marked wherever it is listed.
#[test]
fn an_override_that_matches_nothing_is_marked() {
    let folder = rules(&[("api.yaml", RULES)]);
    let operator = Operator::start(folder.path(), "memory");
    operator.ctl(&["switch", "off", "rule", "api", "usr", "--allow-unknown"]);
    operator.ctl(&["limit", "set", "api", "user=bob", "5/day"]);
    let listed = operator.call(READ, "ListOverrides", "{}").1;
    let overrides = listed["overrides"].as_array().unwrap();
    assert_eq!(overrides[0]["matchesNothing"], Value::Null, "{listed}");
    assert_eq!(
        overrides[1]["matchesNothing"], "domain \"api\" has no rule \"usr\"; did you mean \"user\"?",
        "{listed}"
    );
    let health = operator.call(READ, "GetHealth", "{}").1;
    assert!(health["switches"][0]["matchesNothing"].is_string(), "{health}");
    let list = operator.ctl(&["switch", "list"]);
    assert!(list.contains("matches nothing: domain \"api\" has no rule \"usr\""), "{list}");
    wait_for("the metric of overrides without effect", || {
        let metrics = operator.server.get("/metrics");
        metrics.contains("\nsluicegate_overrides_without_effect{kind=\"switch\"} 1\n").then_some(())
    });
}

/// Instances need no other permissions in Redis than those in docs/guides/redis.md.
#[test]
fn instances_that_share_redis_are_summed() {
    let folder = rules(&[("api.yaml", RULES)]);
    let (cluster, url) = RedisCluster::with_documented_user(3);
    let servers = [0, 1].map(|_| Server::start(folder.path(), &url));
    let updates = Updates::watch(&servers[0], r#"{"allInstances": true}"#, &[]);
    updates.find(|update| update["instances"].as_array().is_some_and(|instances| instances.len() == 2));
    for server in &servers {
        (0..4).for_each(|_| assert!(matches!(ask(server, "bob"), 200 | 429)));
    }
    let update = updates.find(|update| number(&update["current"]["requests"]) == 8);
    assert_eq!((number(&update["current"]["requested"]), number(&update["current"]["denied"])), (8, 6), "{update}");
    // The other instance still sees only its own requests.
    let own = Updates::watch(&servers[1], "{}", &[]).find(|update| number(&update["current"]["requests"]) > 0);
    assert_eq!((number(&own["current"]["requests"]), own["instances"].as_array().unwrap().len()), (4, 1), "{own}");
    // Both instances are in every update for as long as they run.
    for _ in 0..6 {
        let update = updates.next();
        assert_eq!(update["instances"].as_array().unwrap().len(), 2, "{update}");
    }
    let [first, second] = servers;
    drop(second);
    updates.find(|update| update["instances"].as_array().is_some_and(|instances| instances.len() == 1));
    let key = "sluicegate:{directives}activity";
    let node = &cluster.nodes[cluster.owner(key)];
    wait_for("the report to be deleted", || (node.cli(&["HLEN", key]) == "1").then_some(()));
    drop(first);
}

#[test]
fn a_redis_server_that_fails_is_an_event() {
    let folder = rules(&[("api.yaml", RULES)]);
    let redis = RedisServer::start();
    let server = Server::start(folder.path(), &redis.url());
    let updates = Updates::watch(&server, "{}", &[]);
    assert_eq!(updates.find(|update| update["servers"][0]["up"] == true)["servers"].as_array().unwrap().len(), 1);
    drop(redis);
    let has = |update: &Value, kind: &str| {
        update["events"].as_array().into_iter().flatten().any(|event| event["kind"] == kind)
    };
    let update = updates.find(|update| has(update, "EVENT_KIND_SERVER_DOWN"));
    assert_eq!(update["servers"][0]["up"], Value::Null, "{update}");
}

#[test]
fn a_change_is_simulated_on_recorded_requests_before_it_is_made() {
    let folder = rules(&[("api.yaml", RULES)]);
    let recorded = tempfile::tempdir().unwrap();
    let builder = Server::builder().rules(folder.path()).store("memory");
    let builder = builder.set("record.dir", recorded.path().to_str().unwrap()).set("record.share", "1");
    let operator = Operator::with(builder);
    let server = &operator.server;
    for _ in 0..5 {
        ask(server, "bob");
    }
    let bob = json!({ "limit": { "domain": "api", "entries": [{ "key": "user", "value": "bob" }] } });
    let change = json!({ "changes": [{ "target": bob, "value": "4/year" }] }).to_string();
    let outcome = wait_for("the recorded requests", || {
        let (code, outcome) = call(server, "Simulate", &change, &[]);
        assert_eq!(code, 200, "{outcome}");
        (number(&outcome["requests"]) == 5).then_some(outcome)
    });
    assert_eq!((number(&outcome["deniedBefore"]), number(&outcome["denied"])), (3, 1), "{outcome}");
    assert_eq!(number(&outcome["rules"][0]["outcomes"]["newlyAllowed"]), 2, "{outcome}");
    // Nothing has changed.
    assert_eq!(operator.call(OPERATE, "ListOverrides", "{}").1["overrides"], Value::Null);
    let rules = "domain: api\ndescriptors:\n- { key: user, rate_limit: { unit: year, requests_per_unit: 1 } }\n";
    let files = json!({ "files": [{ "name": "a.yaml", "text": rules }] }).to_string();
    assert_eq!(number(&call(server, "Simulate", &files, &[]).1["denied"]), 4);
    let invalid = json!({ "files": [{ "name": "a.yaml", "text": "domain: 1: 2" }] }).to_string();
    let (code, answer) = call(server, "Simulate", &invalid, &[]);
    assert!(code == 400 && answer["message"].as_str().unwrap().contains("the rules are invalid"), "{answer}");
}

#[tokio::test]
async fn a_shutdown_ends_the_streams() {
    let folder = rules(&[("api.yaml", RULES)]);
    let server = Server::start(folder.path(), "memory");
    let updates = Updates::watch(&server, "{}", &[]);
    updates.next();
    server.signal("TERM");
    assert!(server.wait().await.success());
    while updates.0.recv().is_ok() {}
}

/// Viewers without a token take at most three quarters of the places, on all listeners together.
#[test]
fn the_number_of_viewers_is_bounded_and_operators_have_places() {
    let folder = rules(&[("api.yaml", RULES)]);
    let operator = Operator::start(folder.path(), "memory");
    let server = &operator.server;
    let viewers: Vec<_> = (0..48).map(|_| Updates::watch(server, "{}", &[])).collect();
    let (code, answer) = call(server, "WatchActivity", "{}", &[]);
    assert_eq!((code, answer["code"].as_str()), (429, Some("RESOURCE_EXHAUSTED")), "{answer}");
    let token = format!("Bearer {READ}");
    let authorization = [("authorization", token.as_str())];
    let operators: Vec<_> = (0..16).map(|_| Updates::watch(server, "{}", &authorization)).collect();
    assert_eq!(call(server, "WatchActivity", "{}", &authorization).0, 429);
    assert_eq!(viewers[47].next()["rulesVersion"], "1");
    assert_eq!(operators[15].next()["rulesVersion"], "1");
}

/// The recorded requests are a pipe, so the first simulation runs until this test closes it.
#[test]
fn one_simulation_runs_at_a_time() {
    let (folder, recorded) = (rules(&[("api.yaml", RULES)]), tempfile::tempdir().unwrap());
    let pipe = recorded.path().join("traffic-0.gz");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let builder = Server::builder().rules(folder.path()).set("record.share", "0");
    let server = builder.set("record.dir", recorded.path().to_str().unwrap()).start();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| call(&server, "Simulate", "{}", &[]));
        // Opening the pipe waits until the simulation reads it.
        let writer = std::fs::OpenOptions::new().write(true).open(&pipe).unwrap();
        let (code, answer) = call(&server, "Simulate", "{}", &[]);
        assert_eq!((code, answer["code"].as_str()), (429, Some("RESOURCE_EXHAUSTED")), "{answer}");
        std::fs::remove_file(&pipe).unwrap();
        drop(writer);
        assert_eq!(first.join().unwrap().0, 200);
    });
    assert_eq!(call(&server, "Simulate", "{}", &[]).0, 200);
}
