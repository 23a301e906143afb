//! Overrides: they take precedence over rules, are in force on every instance within a second, and are never lost.

use std::{
    fs,
    path::Path,
    sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed},
    time::{Duration, Instant},
};

use crate::support::{
    Operator, RedisCluster, RedisServer, Sentinels, Server, descriptor,
    operator::OPERATE,
    raw_client::{Answer, Request},
    request_for, ring, rules, wait_for, wait_for_async,
};

const RULES: &str = "\
domain: api
plans:
  default: free
  limits:
    free: { calls: { unit: year, requests_per_unit: 1 } }
    pro: { calls: { unit: year, requests_per_unit: 50 } }
descriptors:
- key: user
  rate_limit: { unit: year, requests_per_unit: 2 }
  descriptors:
  - key: path
    rate_limit: { unit: year, requests_per_unit: 3, name: per_path }
- key: shadow
  shadow_mode: true
  rate_limit: { unit: year, requests_per_unit: 0 }
- key: bucket
  rate_limit: { unit: year, requests_per_unit: 4, algorithm: token_bucket }
- key: free
  rate_limit: { unlimited: true }
- key: planned
  rate_limit: { by_plan: calls }
";

fn folder() -> tempfile::TempDir {
    rules(&[("api.yaml", RULES)])
}

async fn answer(server: &Server, entries: &[(&str, &str)]) -> Answer {
    server.client().await.check(request_for("api", entries)).await.unwrap()
}

async fn allowed(server: &Server, entries: &[(&str, &str)]) -> bool {
    answer(server, entries).await.allowed()
}

async fn refund(server: &Server, entries: &[(&str, &str)]) -> bool {
    let request = Request::new("api").descriptor(descriptor(entries).hits(1).refund());
    server.client().await.check(request).await.unwrap().allowed()
}

/// Returns the limit in the response and the remaining hits.
async fn limit(server: &Server, entries: &[(&str, &str)]) -> Option<(u32, u32)> {
    let answer = answer(server, entries).await;
    let status = &answer.0.statuses[0];
    Some((status.current_limit.as_ref()?.requests_per_unit, status.limit_remaining))
}

#[tokio::test]
async fn an_entity_gets_its_own_limit_at_runtime() {
    let folder = folder();
    let operator = Operator::start(folder.path(), "memory");
    let server = &operator.server;
    for _ in 0..2 {
        assert!(allowed(server, &[("user", "bob")]).await);
    }
    assert!(!allowed(server, &[("user", "bob")]).await);
    let output = operator.ctl(&["limit", "set", "api", "user=bob", "10/year", "--reason", "ticket 4711"]);
    assert!(output.starts_with("limit|api|user=bob: 10/year\n"), "{output}");
    // Hits that were counted remain counted.
    assert_eq!(limit(server, &[("user", "bob")]).await, Some((10, 6)));
    assert_eq!(limit(server, &[("user", "eve")]).await, Some((2, 1)));
    // It applies to all descriptors with this prefix, each with its own counter. An override with a longer prefix takes
    // precedence, and other descriptors are unchanged.
    assert_eq!(limit(server, &[("user", "bob"), ("path", "/x")]).await, Some((10, 9)));
    operator.ctl(&["limit", "set", "api", "user=bob", "path=/y", "20/year"]);
    assert_eq!(limit(server, &[("user", "bob"), ("path", "/y")]).await, Some((20, 19)));
    assert_eq!(limit(server, &[("user", "eve"), ("path", "/y")]).await, Some((3, 2)));
    // Without a rule it applies to exactly this descriptor.
    operator.ctl(&["limit", "set", "api", "tenant=a", "1/year", "--allow-unknown"]);
    assert_eq!(limit(server, &[("tenant", "a")]).await, Some((1, 0)));
    assert_eq!(limit(server, &[("tenant", "a"), ("path", "/")]).await, None);
    assert!(!allowed(server, &[("tenant", "a")]).await);

    operator.ctl(&["limit", "set", "api", "user=mallory", "blocked"]);
    let denied = answer(server, &[("user", "mallory"), ("path", "/x")]).await;
    assert!(!denied.allowed() && denied.remaining() == Some(0), "{denied:?}");
    assert!(denied.0.statuses[0].duration_until_reset.is_none(), "a blocked entity has no reset: {denied:?}");
    // Refunds of blocked entities are accepted.
    assert!(refund(server, &[("user", "mallory")]).await);
    operator.ctl(&["limit", "set", "api", "user=mallory", "unlimited"]);
    for _ in 0..5 {
        assert!(allowed(server, &[("user", "mallory")]).await);
    }
    let list = operator.ctl(&["limit", "list", "api", "user=bob"]);
    let names: Vec<_> = list.lines().skip(1).filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(names, ["limit|api|user=bob", "limit|api|user=bob|path=/y"], "{list}");
    assert!(operator.ctl(&["limit", "get", "api", "user=bob"]).contains("ticket 4711"));
    assert!(operator.try_ctl(&["limit", "unset", "api", "user=bob", "--for", "2h"]).unwrap_err().contains("--for"));
    operator.ctl(&["limit", "unset", "api", "user=bob"]);
    assert_eq!(limit(server, &[("user", "bob")]).await, Some((2, 0)));
    assert!(operator.try_ctl(&["limit", "get", "api", "user=bob"]).unwrap_err().contains("no limit is set for"));
}

#[tokio::test]
async fn overrides_survive_a_restart_and_expire() {
    let folder = folder();
    let journal = tempfile::tempdir().unwrap();
    let file = journal.path().join("overrides").display().to_string();
    let start = || Operator::with(Server::builder().rules(folder.path()).store("memory").set("overrides.file", &file));
    let operator = start();
    operator.ctl(&["limit", "set", "api", "user=bob", "10/year"]);
    operator.ctl(&["limit", "set", "api", "user=eve", "10/year", "--for", "2s"]);
    operator.ctl(&["switch", "off", "rule", "api", "per_path", "--for", "2s"]);
    assert_eq!(limit(&operator.server, &[("user", "eve")]).await, Some((10, 9)));
    assert_eq!(limit(&operator.server, &[("user", "x"), ("path", "/x")]).await, None);
    drop(operator);
    let operator = start();
    assert_eq!(limit(&operator.server, &[("user", "bob")]).await, Some((10, 9)));
    wait_for_async("the limit to expire", async || {
        (limit(&operator.server, &[("user", "eve")]).await?.0 == 2).then_some(())
    })
    .await;
    wait_for_async("the switch to expire", async || limit(&operator.server, &[("user", "x"), ("path", "/x")]).await)
        .await;
    let audit = wait_for("both to be removed", || {
        Some(operator.ctl(&["audit"])).filter(|audit| {
            audit.matches("expired").count() >= 1
                && audit.contains("user=eve: removed")
                && audit.contains("per_path: removed")
        })
    });
    assert!(audit.contains("alice") && audit.contains("limit|api|user=bob: 10/year"), "{audit}");
    assert_eq!(operator.ctl(&["export"]), "limit|api|user=bob,10/year,\n");
}

/// A change that could be written only in part is not applied, and does not damage later changes.
#[test]
fn a_change_fails_on_a_full_disk_and_the_others_are_kept() {
    let folder = folder();
    let journal = tempfile::tempdir().unwrap();
    let file = journal.path().join("overrides").display().to_string();
    let builder = || Server::builder().rules(folder.path()).store("memory").set("overrides.file", &file);
    let operator = Operator::with(builder().max_file_blocks(4));
    let set = |user: &str, reason: &str| operator.try_ctl(&["limit", "set", "api", user, "9/year", "--reason", reason]);
    set("user=a", &"x".repeat(600)).unwrap();
    let error = set("user=b", &"x".repeat(900)).unwrap_err();
    assert!(error.contains("overrides cannot be stored"), "{error}");
    set("user=c", "short").unwrap();
    drop(operator);
    let operator = Operator::with(builder());
    let exported = operator.ctl(&["export", "limit"]);
    assert_eq!(exported, "limit|api|user=a,9/year,\nlimit|api|user=c,9/year,\n");
}

#[tokio::test]
async fn plans_are_assigned_to_entities() {
    let folder = folder();
    let operator = Operator::start(folder.path(), "memory");
    let server = &operator.server;
    assert_eq!(limit(server, &[("planned", "a")]).await, Some((1, 0)));
    operator.ctl(&["plan", "assign", "api", "planned=a", "pro"]);
    assert_eq!(limit(server, &[("planned", "a")]).await, Some((50, 48)));
    assert_eq!(limit(server, &[("planned", "b")]).await, Some((1, 0)));
    // The limit of an entity takes precedence over its plan.
    operator.ctl(&["limit", "set", "api", "planned=a", "70/year"]);
    assert_eq!(limit(server, &[("planned", "a")]).await, Some((70, 67)));
    // An assigned plan takes precedence over the plan in the request.
    assert_eq!(limit(server, &[("planned", "c"), ("plan", "pro")]).await, Some((50, 49)));
    operator.ctl(&["plan", "assign", "api", "planned=c", "free"]);
    assert_eq!(limit(server, &[("planned", "c"), ("plan", "pro")]).await, Some((1, 0)));
    // An unknown plan has no effect.
    operator.ctl(&["plan", "assign", "api", "planned=d", "gold", "--allow-unknown"]);
    assert_eq!(limit(server, &[("planned", "d")]).await, Some((1, 0)));
    let csv = temporary_file("a,free\nb,pro\n");
    operator.ctl(&["plan", "import", "api", "planned", csv.path().to_str().unwrap()]);
    operator.ctl(&["plan", "unassign", "api", "planned=d"]);
    assert_eq!(limit(server, &[("planned", "b")]).await, Some((50, 48)));
    let list = operator.ctl(&["plan", "list", "api"]);
    assert!(list.contains("plan|api|planned=a") && !list.contains("planned=d"), "{list}");
}

fn temporary_file(text: &str) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), text).unwrap();
    file
}

#[tokio::test]
async fn a_switch_takes_effect_and_is_visible() {
    let folder = folder();
    let builder = Server::builder().rules(folder.path()).store("memory").set("response.dynamic_metadata", "true");
    let operator = Operator::with(builder);
    let server = &operator.server;
    let is_overridden = |answer: &Answer| format!("{:?}", answer.0.dynamic_metadata).contains("\"override\"");
    let user = [("user", "a"), ("path", "/x")];
    let switch = |mode: &str, scope: &[&str]| operator.ctl(&[&["switch", mode], scope].concat());

    operator.ctl(&["limit", "set", "api", "user=z", "unlimited"]);
    let unlimited = answer(server, &[("user", "z")]).await;
    assert!(unlimited.allowed() && is_overridden(&unlimited), "{unlimited:?}");
    switch("off", &["rule", "api", "user.path"]);
    let off = answer(server, &user).await;
    assert!(off.allowed() && off.0.statuses[0].current_limit.is_none() && is_overridden(&off), "{off:?}");
    let page = server.get("/rlconfig");
    assert!(page.contains("# switch|rule|api|user.path off, origin: store\n"), "{page}");
    assert!(
        page.contains(
            "api.user.path: unit=YEAR requests_per_unit=3, shadow_mode: false, quota_mode: false, switched: off\n"
        ),
        "{page}"
    );
    assert_eq!(server.metric("sluicegate_switch{mode=\"off\",origin=\"store\",scope=\"rule|api|user.path\"}"), 1.0);
    switch("deny", &["domain", "api"]);
    // The switch with the narrower scope takes precedence.
    assert!(allowed(server, &user).await);
    assert!(!allowed(server, &[("user", "b")]).await);
    assert!(!allowed(server, &[("free", "b")]).await);
    assert!(!allowed(server, &[("shadow", "b")]).await);
    assert!(refund(server, &[("user", "b")]).await);
    // A rule that was off counted nothing.
    switch("clear", &["rule", "api", "user.path"]);
    switch("clear", &["domain", "api"]);
    let cleared = answer(server, &user).await;
    assert!(cleared.remaining() == Some(2) && !is_overridden(&cleared), "{cleared:?}");

    switch("shadow", &["algorithm", "fixed_window"]);
    for _ in 0..5 {
        assert!(allowed(server, &user).await);
    }
    switch("clear", &["algorithm", "fixed_window"]);
    assert!(!allowed(server, &user).await);

    assert!(allowed(server, &[("shadow", "a")]).await);
    switch("enforce", &["everything"]);
    assert!(!allowed(server, &[("shadow", "a")]).await);
    let list = operator.ctl(&["switch", "list"]);
    assert!(list.contains("switch everything enforce (by alice)"), "{list}");
}

#[tokio::test]
async fn a_denying_switch_takes_nothing_with_charge_all() {
    let text = "domain: api\ncharge: all\ndescriptors:\n- {key: a, rate_limit: {unit: year, requests_per_unit: 9}}\n\
                - {key: b, rate_limit: {unit: year, requests_per_unit: 9}}\n";
    let folder = rules(&[("api.yaml", text)]);
    let operator = Operator::start(folder.path(), "memory");
    let both = || request_for("api", &[("a", "1")]).descriptor(descriptor(&[("b", "1")]));
    let client = operator.server.client().await;
    operator.ctl(&["switch", "deny", "rule", "api", "b"]);
    for _ in 0..3 {
        assert!(!client.check(both()).await.unwrap().allowed());
    }
    operator.ctl(&["switch", "clear", "rule", "api", "b"]);
    // The other limit was not charged.
    let answer = client.check(both()).await.unwrap();
    assert_eq!(answer.0.statuses.iter().map(|status| status.limit_remaining).collect::<Vec<_>>(), [8, 8]);
    // In the global shadow mode the switch denies nothing, so the other limit is charged.
    let builder = Server::builder().rules(folder.path()).store("memory").set("decisions.shadow_mode", "true");
    let operator = Operator::with(builder);
    operator.ctl(&["switch", "deny", "rule", "api", "b"]);
    let answer = operator.server.client().await.check(both()).await.unwrap();
    assert!(answer.allowed() && answer.0.statuses[0].limit_remaining == 8, "{answer:?}");
    // A switch that enforces everything overrides the global shadow mode.
    operator.ctl(&["switch", "enforce", "everything"]);
    assert!(!operator.server.client().await.check(both()).await.unwrap().allowed());
}

/// Overrides set at one instance reach the other instances of this store.
async fn overrides_reach_every_instance(store: &str) {
    let folder = folder();
    let (one, other) = (Operator::start(folder.path(), store), Operator::start(folder.path(), store));
    let start = Instant::now();
    one.ctl(&["limit", "set", "api", "user=bob", "10/year"]);
    one.ctl(&["switch", "deny", "rule", "api", "bucket"]);
    let mut value = 0;
    wait_for_async("both overrides at the other instance", async || {
        let has_limit = limit(&other.server, &[("user", "bob")]).await?.0 == 10;
        // Each check has a new value, so that no limit is exhausted.
        value += 1;
        (has_limit && !allowed(&other.server, &[("bucket", &value.to_string())]).await).then_some(())
    })
    .await;
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    // The other direction; and an instance that starts later has all overrides.
    other.ctl(&["switch", "clear", "rule", "api", "bucket"]);
    let late = Operator::start(folder.path(), store);
    assert_eq!(limit(&late.server, &[("user", "bob")]).await.map(|limit| limit.0), Some(10));
    assert!(allowed(&late.server, &[("bucket", "a")]).await);
    // Nearly simultaneous changes at two instances reach both.
    one.ctl(&["limit", "set", "api", "user=x", "20/year"]);
    other.ctl(&["limit", "set", "api", "user=y", "30/year"]);
    for operator in [&one, &other] {
        wait_for_async("both limits", async || {
            let limits = (
                limit(&operator.server, &[("user", "x")]).await?.0,
                limit(&operator.server, &[("user", "y")]).await?.0,
            );
            (limits == (20, 30)).then_some(())
        })
        .await;
    }
    wait_for_async("the same version at all instances", async || {
        let version = |operator: &Operator| operator.server.metric("sluicegate_overrides_version");
        [&one, &other, &late].into_iter().all(|operator| version(operator) == 5.0).then_some(())
    })
    .await;
    assert_eq!(one.ctl(&["audit"]).lines().filter(|line| line.contains("alice")).count(), 5);
}

#[tokio::test]
async fn overrides_reach_every_instance_by_a_single_redis() {
    let redis = RedisServer::start();
    overrides_reach_every_instance(&redis.url()).await;
}

#[tokio::test]
async fn overrides_reach_every_instance_by_a_cluster() {
    let cluster = RedisCluster::start();
    overrides_reach_every_instance(&cluster.url()).await;
}

#[tokio::test]
async fn overrides_reach_every_instance_by_a_ring() {
    let (_servers, url) = ring(3);
    overrides_reach_every_instance(&url).await;
}

#[tokio::test]
async fn overrides_reach_every_instance_by_sentinels_and_survive_a_failover() {
    let sentinels = Sentinels::start(None, None);
    overrides_reach_every_instance(&sentinels.url()).await;
    let folder = folder();
    let operator = Operator::start(folder.path(), &sentinels.url());
    sentinels.fail_over();
    wait_for("a change after the failover", || operator.try_ctl(&["limit", "set", "api", "user=bob", "11/year"]).ok());
    let late = Operator::start(folder.path(), &sentinels.url());
    wait_for_async("the change at another instance", async || {
        (limit(&late.server, &[("user", "bob")]).await?.0 == 11).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_switch_for_one_instance_works_without_the_store() {
    let folder = folder();
    let mut redis = RedisServer::start();
    let switches = tempfile::tempdir().unwrap();
    let file = switches.path().join("switches");
    let start = |file: &Path| {
        let builder = Server::builder().rules(folder.path()).store(&redis.url()).set("redis.timeout", "20ms");
        let builder = builder.set("cluster.instances", "5").set("decisions.on_error", "deny");
        Operator::with(builder.set("overrides.switch_file", file.to_str().unwrap()))
    };
    let operator = start(&file);
    for (user, on_error) in [("user=eve", "allow"), ("user=max", "local")] {
        let limit = format!("{{unit: year, requests_per_unit: 10, on_error: {on_error}}}");
        operator.ctl(&["limit", "set", "api", user, &limit]);
    }
    operator.ctl(&["limit", "set", "api", "user=bob", "10/year"]);
    assert!(allowed(&operator.server, &[("user", "bob")]).await);
    // The limit of an entity may have its own consistency.
    operator.ctl(&["limit", "set", "api", "user=ann", "{unit: year, requests_per_unit: 20000, consistency: leased}"]);
    wait_for_async("a lease", async || {
        assert!(allowed(&operator.server, &[("user", "ann")]).await);
        (operator.server.metric("sluicegate_lease_decisions_total") > 0.0).then_some(())
    })
    .await;
    redis.freeze();
    let error = operator.try_ctl(&["switch", "off", "everything"]).unwrap_err();
    assert!(error.contains("Unavailable"), "{error}");
    wait_for_async("the rule's on_error", async || {
        (!allowed(&operator.server, &[("user", "bob")]).await).then_some(())
    })
    .await;
    // The entity's own `on_error` applies: `local` with this instance's share of its limit, and `allow`.
    for expected in [true, true, false] {
        assert_eq!(allowed(&operator.server, &[("user", "max")]).await, expected);
        assert!(allowed(&operator.server, &[("user", "eve")]).await);
    }
    // A switch for this instance only, or a switch file, takes effect without the store.
    operator.ctl(&["switch", "off", "everything", "--here"]);
    assert!(allowed(&operator.server, &[("user", "bob")]).await);
    operator.ctl(&["switch", "clear", "everything", "--here"]);
    assert!(!allowed(&operator.server, &[("user", "bob")]).await);
    operator.ctl(&["switch", "off", "everything", "--here", "--for", "1s"]);
    assert!(allowed(&operator.server, &[("user", "bob")]).await);
    wait_for_async("the switch to expire", async || {
        (!allowed(&operator.server, &[("user", "bob")]).await).then_some(())
    })
    .await;
    fs::write(&file, "off domain api # incident 42\n").unwrap();
    wait_for_async("the switch of the file", async || {
        allowed(&operator.server, &[("user", "bob")]).await.then_some(())
    })
    .await;
    assert!(
        operator
            .ctl(&["switch", "list"])
            .contains("switch domain|api off, from the file of this instance (by file: incident 42)")
    );
    fs::write(&file, "offf domain api\n").unwrap();
    wait_for("the warning", || operator.server.log().contains("is not a mode").then_some(()));
    assert!(allowed(&operator.server, &[("user", "bob")]).await);
    assert!(operator.server.get("/readyz").contains("sync failed"), "{}", operator.server.get("/readyz"));
    fs::remove_file(&file).unwrap();
    wait_for_async("the switch to end with its file", async || {
        (!allowed(&operator.server, &[("user", "bob")]).await).then_some(())
    })
    .await;
    redis.thaw();
    wait_for_async("the limit in the store", async || {
        (limit(&operator.server, &[("user", "bob")]).await?.0 == 10).then_some(())
    })
    .await;
    redis.kill();
}

#[tokio::test]
async fn overrides_that_the_store_lost_are_restored() {
    let folder = folder();
    let redis = RedisServer::start();
    let (one, other) = (Operator::start(folder.path(), &redis.url()), Operator::start(folder.path(), &redis.url()));
    one.ctl(&["limit", "set", "api", "user=a", "10/year"]);
    let keys = ["texts", "log", "head"].map(|name| format!("sluicegate:{{directives}}{name}"));
    let copy = |key: &str| redis.cli(&["--no-raw", "COPY", key, &format!("{key}.copy")]);
    assert!(keys.iter().all(|key| copy(key).contains('1')));
    for (user, limit) in [("user=b", "11/year"), ("user=b", "12/year"), ("user=d", "13/year")] {
        one.ctl(&["limit", "set", "api", user, limit]);
    }
    wait_for_async("the limit at the other instance", async || {
        (limit(&other.server, &[("user", "d")]).await?.0 == 13).then_some(())
    })
    .await;
    one.ctl(&["switch", "shadow", "algorithm", "gcra", "--here"]);
    // The script has the effect of a failover to a replica that has not received the last three changes.
    let script = "for _, key in ipairs(KEYS) do redis.call('COPY', key .. '.copy', key, 'REPLACE') end";
    redis.cli(&["EVAL", script, "3", &keys[0], &keys[1], &keys[2]]);
    wait_for("the last three changes in the store", || {
        redis.cli(&["HGET", &keys[0], "limit|api|user=d"]).contains("13/year").then_some(())
    });
    assert!(redis.cli(&["HGET", &keys[0], "limit|api|user=b"]).contains("12/year"));
    assert_eq!(redis.cli(&["HGET", &keys[2], "version"]), "4");
    // The same failover again. A new instance, which does not know the lost changes, makes others before they are
    // restored.
    for operator in [&one, &other] {
        operator.server.signal("STOP");
    }
    redis.cli(&["EVAL", script, "3", &keys[0], &keys[1], &keys[2]]);
    let newcomer = Operator::start(folder.path(), &redis.url());
    newcomer.ctl(&["limit", "set", "api", "user=c", "30/year"]);
    // This target is also among the lost changes. The new change is later, so it wins.
    newcomer.ctl(&["limit", "set", "api", "user=d", "31/year"]);
    for operator in [&one, &other] {
        operator.server.signal("CONT");
    }
    for operator in [&one, &other, &newcomer] {
        wait_for_async("all changes at every instance", async || {
            let limits = (
                limit(&operator.server, &[("user", "b")]).await?.0,
                limit(&operator.server, &[("user", "c")]).await?.0,
                limit(&operator.server, &[("user", "d")]).await?.0,
            );
            (limits == (12, 30, 31)).then_some(())
        })
        .await;
    }
    newcomer.ctl(&["limit", "unset", "api", "user=d"]);
    newcomer.ctl(&["limit", "unset", "api", "user=c"]);
    wait_for_async("the removal at another instance", async || {
        (limit(&one.server, &[("user", "c")]).await?.0 == 2).then_some(())
    })
    .await;
    // All keys are removed.
    redis.cli(&["FLUSHALL"]);
    wait_for("all overrides in the store", || (redis.cli(&["HLEN", &keys[0]]) == "2").then_some(()));
    // One field is removed, as by an eviction.
    redis.cli(&["HDEL", &keys[0], "limit|api|user=b"]);
    wait_for("the lost override in the store", || (redis.cli(&["HLEN", &keys[0]]) == "2").then_some(()));
    assert_eq!(redis.cli(&["TTL", &keys[0]]), "-1");
    let late = Operator::start(folder.path(), &redis.url());
    assert_eq!(limit(&late.server, &[("user", "b")]).await.map(|limit| limit.0), Some(12));
    one.ctl(&["limit", "unset", "api", "user=b"]);
    wait_for_async("the next change at the other instance", async || {
        (limit(&other.server, &[("user", "b")]).await?.0 == 2).then_some(())
    })
    .await;
    // The store has another id and another limit, as a store with its own history: its content wins.
    let script = "redis.call('HSET', KEYS[1], 'limit|api|user=a', '1|{\"w\":\"7/year\",\"a\":\"x\",\"t\":1}') \
                  redis.call('HSET', KEYS[2], 'id', 'another')";
    redis.cli(&["EVAL", script, "2", &keys[0], &keys[2]]);
    wait_for_async("the limit of the store", async || {
        (limit(&one.server, &[("user", "a")]).await?.0 == 7).then_some(())
    })
    .await;
    // A switch for one instance only does not depend on the store.
    assert!(
        one.ctl(&["switch", "list"]).contains("gcra shadow, on this instance only"),
        "{}",
        one.ctl(&["switch", "list"])
    );
}

#[test]
fn a_change_with_an_outdated_version_is_rejected() {
    outdated_versions_are_rejected("memory");
    let redis = RedisServer::start();
    outdated_versions_are_rejected(&redis.url());
}

fn outdated_versions_are_rejected(store: &str) {
    let folder = folder();
    let operator = Operator::start(folder.path(), store);
    let set = |limit: &str, version: &str| {
        operator.try_ctl(&["limit", "set", "api", "user=bob", limit, "--if-version", version])
    };
    set("10/year", "0").unwrap();
    let error = set("20/year", "0").unwrap_err();
    assert!(error.contains("was changed by another call: it has version 1") && error.contains("Aborted"), "{error}");
    set("20/year", "1").unwrap();
    assert!(set("30/year", "1").is_err());
    let unset = operator.try_ctl(&["limit", "unset", "api", "user=bob", "--if-version", "1"]);
    assert!(unset.unwrap_err().contains("it has version 2"));
    assert!(operator.ctl(&["limit", "list", "api"]).contains("20/year"));
}

#[tokio::test]
async fn an_additive_limit_helps_an_exhausted_entity_immediately() {
    for store in ["memory".to_owned(), "redis".to_owned()] {
        let redis = (store == "redis").then(RedisServer::start);
        let store = redis.as_ref().map_or(store, RedisServer::url);
        let folder = folder();
        let operator = Operator::start(folder.path(), &store);
        let bucket = [("bucket", "a")];
        while allowed(&operator.server, &bucket).await {}
        // An empty bucket stays empty when its limit grows, except with `--additive`.
        operator.ctl(&[
            "limit",
            "set",
            "api",
            "bucket=a",
            "{unit: year, requests_per_unit: 10, algorithm: token_bucket}",
        ]);
        assert!(!allowed(&operator.server, &bucket).await);
        let larger = "{unit: year, requests_per_unit: 15, algorithm: token_bucket}";
        let output = operator.ctl(&["limit", "set", "api", "bucket=a", larger, "--additive"]);
        assert!(output.contains("5 hits refunded"), "{output}");
        let mut hits = 0;
        wait_for_async("the additional hits", async || {
            hits += u32::from(allowed(&operator.server, &bucket).await);
            (hits == 5).then_some(())
        })
        .await;
        assert!(!allowed(&operator.server, &bucket).await);
    }
}

/// Sets a flag when it is dropped.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Overrides are set continuously while the Redis master fails and an instance is restarted. Finally every instance has
/// all acknowledged changes, and no request is applied only in part.
#[tokio::test]
async fn acknowledged_changes_survive_a_failover() {
    let mut sentinels = Sentinels::start(None, None);
    let folder = folder();
    let (one, other) =
        (Operator::start(folder.path(), &sentinels.url()), Operator::start(folder.path(), &sentinels.url()));
    let (acknowledged, stop) = (AtomicU32::new(0), AtomicBool::new(false));
    let late = std::thread::scope(|scope| {
        // Stops the thread even if an assertion fails; otherwise the scope would wait for it forever.
        let _stop = SetOnDrop(&stop);
        scope.spawn(|| {
            while !stop.load(Relaxed) {
                let number = acknowledged.load(Relaxed);
                let request = |key: &str| {
                    let entries = serde_json::json!([{ "key": key, "value": number.to_string() }]);
                    let target = serde_json::json!({ "limit": { "domain": "api", "entries": entries } });
                    serde_json::json!({ "target": target, "value": format!("{number}/year") })
                };
                let body = serde_json::json!({ "changes": [request("user"), request("bucket")] }).to_string();
                // A change without an acknowledgement is sent again.
                if one.call(OPERATE, "PutOverrides", &body).0 == 200 {
                    acknowledged.fetch_add(1, Relaxed);
                }
            }
        });
        let wait_for_changes = |count: u32| {
            let before = acknowledged.load(Relaxed);
            wait_for("more changes", || (acknowledged.load(Relaxed) >= before + count).then_some(()));
        };
        wait_for_changes(20);
        let master = sentinels.master();
        sentinels.servers.iter_mut().find(|server| server.port == master).unwrap().kill();
        wait_for_changes(20);
        drop(other);
        let late = Operator::start(folder.path(), &sentinels.url());
        wait_for_changes(20);
        late
    });
    let acknowledged = acknowledged.load(Relaxed);
    let export = |operator: &Operator| operator.ctl(&["export", "limit"]);
    wait_for("the same overrides at both instances", || (export(&one) == export(&late)).then_some(()));
    let exported = export(&late);
    for number in 0..acknowledged {
        for key in ["user", "bucket"] {
            assert!(
                exported.contains(&format!("limit|api|{key}={number},{number}/year,\n")),
                "{key}={number} of {acknowledged} changes is missing: {exported}"
            );
        }
    }
    // The last request may have been applied without an acknowledgement, but then completely.
    let lines = exported.lines().count() as u32;
    assert!([2 * acknowledged, 2 * acknowledged + 2].contains(&lines), "{acknowledged}: {exported}");
}

/// An empty store has not lost overrides that no instance has had.
#[tokio::test]
async fn an_empty_store_is_no_failure() {
    let (folder, redis) = (folder(), RedisServer::start());
    let (one, other) = (Operator::start(folder.path(), &redis.url()), Operator::start(folder.path(), &redis.url()));
    other.ctl(&["limit", "set", "api", "user=bob", "10/year"]);
    wait_for_async("the limit at the other instance", async || {
        (limit(&one.server, &[("user", "bob")]).await?.0 == 10).then_some(())
    })
    .await;
    let log = one.server.log();
    assert!(!log.contains("override sync failed"), "{log}");
}
