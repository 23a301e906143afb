//! What operators say while the service runs: over what the rules say, in force on every instance within a second, and
//! never lost.

use std::{
    fs,
    path::Path,
    sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed},
    time::{Duration, Instant},
};

use crate::support::{
    Operator, RedisCluster, RedisServer, Sentinels, Server, descriptor,
    operator::OPERATE,
    plain::{Answer, Request},
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

async fn given_back(server: &Server, entries: &[(&str, &str)]) -> bool {
    let request = Request::new("api").descriptor(descriptor(entries).hits(1).refund());
    server.client().await.check(request).await.unwrap().allowed()
}

/// The limit that is shown, and what remains.
async fn limit(server: &Server, entries: &[(&str, &str)]) -> Option<(u32, u32)> {
    let answer = answer(server, entries).await;
    let status = &answer.0.statuses[0];
    Some((status.current_limit.as_ref()?.requests_per_unit, status.limit_remaining))
}

#[tokio::test]
async fn a_customer_has_a_limit_of_its_own_from_now_on() {
    let folder = folder();
    let operator = Operator::start(folder.path(), "memory");
    let server = &operator.server;
    for _ in 0..2 {
        assert!(allowed(server, &[("user", "bob")]).await);
    }
    assert!(!allowed(server, &[("user", "bob")]).await);
    let said = operator.ctl(&["limit", "set", "api", "user=bob", "10/year", "--reason", "ticket 4711"]);
    assert!(said.starts_with("limit|api|user=bob: 10/year\n"), "{said}");
    // What was counted stays counted.
    assert_eq!(limit(server, &[("user", "bob")]).await, Some((10, 6)));
    assert_eq!(limit(server, &[("user", "eve")]).await, Some((2, 1)));
    // It holds for whatever begins so, each on its own counter; the longer one wins, and elsewhere nothing has changed.
    assert_eq!(limit(server, &[("user", "bob"), ("path", "/x")]).await, Some((10, 9)));
    operator.ctl(&["limit", "set", "api", "user=bob", "path=/y", "20/year"]);
    assert_eq!(limit(server, &[("user", "bob"), ("path", "/y")]).await, Some((20, 19)));
    assert_eq!(limit(server, &[("user", "eve"), ("path", "/y")]).await, Some((3, 2)));
    // Where no rule is it holds for itself alone.
    operator.ctl(&["limit", "set", "api", "tenant=a", "1/year"]);
    assert_eq!(limit(server, &[("tenant", "a")]).await, Some((1, 0)));
    assert_eq!(limit(server, &[("tenant", "a"), ("path", "/")]).await, None);
    assert!(!allowed(server, &[("tenant", "a")]).await);

    operator.ctl(&["limit", "set", "api", "user=mallory", "blocked"]);
    let refused = answer(server, &[("user", "mallory"), ("path", "/x")]).await;
    assert!(!refused.allowed() && refused.remaining() == Some(0), "{refused:?}");
    assert!(refused.0.statuses[0].duration_until_reset.is_none(), "nobody knows for how long: {refused:?}");
    // What a caller gives back is taken from whoever it is.
    assert!(given_back(server, &[("user", "mallory")]).await);
    operator.ctl(&["limit", "set", "api", "user=mallory", "unlimited"]);
    for _ in 0..5 {
        assert!(allowed(server, &[("user", "mallory")]).await);
    }
    let list = operator.ctl(&["limit", "list", "api", "user=bob"]);
    let names: Vec<_> = list.lines().skip(1).filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(names, ["limit|api|user=bob", "limit|api|user=bob|path=/y"], "{list}");
    assert!(operator.ctl(&["limit", "get", "api", "user=bob"]).contains("ticket 4711"));
    operator.ctl(&["limit", "unset", "api", "user=bob"]);
    assert_eq!(limit(server, &[("user", "bob")]).await, Some((2, 0)));
    assert!(operator.try_ctl(&["limit", "get", "api", "user=bob"]).unwrap_err().contains("no limit is set for"));
}

#[tokio::test]
async fn what_was_said_survives_a_restart_and_ends_in_time() {
    let folder = folder();
    let kept = tempfile::tempdir().unwrap();
    let file = kept.path().join("overrides").display().to_string();
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
    wait_for_async("the end of a limit", async || {
        (limit(&operator.server, &[("user", "eve")]).await?.0 == 2).then_some(())
    })
    .await;
    wait_for_async("the end of a switch", async || limit(&operator.server, &[("user", "x"), ("path", "/x")]).await)
        .await;
    let audit = wait_for("both to be taken back", || {
        Some(operator.ctl(&["audit"])).filter(|audit| {
            audit.matches("expired").count() >= 1
                && audit.contains("user=eve: removed")
                && audit.contains("per_path: removed")
        })
    });
    assert!(audit.contains("alice") && audit.contains("limit|api|user=bob: 10/year"), "{audit}");
    assert_eq!(operator.ctl(&["export"]), "limit|api|user=bob,10/year,\n");
}

/// A change that the disk takes only half of has not been made, and spoils none that comes after it.
#[test]
fn a_full_disk_refuses_a_change_and_keeps_the_others() {
    let folder = folder();
    let kept = tempfile::tempdir().unwrap();
    let file = kept.path().join("overrides").display().to_string();
    let builder = || Server::builder().rules(folder.path()).store("memory").set("overrides.file", &file);
    let operator = Operator::with(builder().max_file_blocks(4));
    let set = |user: &str, reason: &str| operator.try_ctl(&["limit", "set", "api", user, "9/year", "--reason", reason]);
    set("user=a", &"x".repeat(600)).unwrap();
    let error = set("user=b", &"x".repeat(900)).unwrap_err();
    assert!(error.contains("overrides cannot be stored"), "{error}");
    set("user=c", "short").unwrap();
    drop(operator);
    let operator = Operator::with(builder());
    let known = operator.ctl(&["export", "limit"]);
    assert_eq!(known, "limit|api|user=a,9/year,\nlimit|api|user=c,9/year,\n");
}

#[tokio::test]
async fn a_plan_is_assigned() {
    let folder = folder();
    let operator = Operator::start(folder.path(), "memory");
    let server = &operator.server;
    assert_eq!(limit(server, &[("planned", "a")]).await, Some((1, 0)));
    operator.ctl(&["plan", "assign", "api", "planned=a", "pro"]);
    assert_eq!(limit(server, &[("planned", "a")]).await, Some((50, 48)));
    assert_eq!(limit(server, &[("planned", "b")]).await, Some((1, 0)));
    // An entity's limit stands over its plan.
    operator.ctl(&["limit", "set", "api", "planned=a", "70/year"]);
    assert_eq!(limit(server, &[("planned", "a")]).await, Some((70, 67)));
    // Whatever the request says of itself.
    assert_eq!(limit(server, &[("planned", "c"), ("plan", "pro")]).await, Some((50, 49)));
    operator.ctl(&["plan", "assign", "api", "planned=c", "free"]);
    assert_eq!(limit(server, &[("planned", "c"), ("plan", "pro")]).await, Some((1, 0)));
    // A plan that no rule knows changes nothing.
    operator.ctl(&["plan", "assign", "api", "planned=d", "gold"]);
    assert_eq!(limit(server, &[("planned", "d")]).await, Some((1, 0)));
    let csv = kept("a,free\nb,pro\n");
    operator.ctl(&["plan", "import", "api", "planned", csv.path().to_str().unwrap()]);
    operator.ctl(&["plan", "unassign", "api", "planned=d"]);
    assert_eq!(limit(server, &[("planned", "b")]).await, Some((50, 48)));
    let list = operator.ctl(&["plan", "list", "api"]);
    assert!(list.contains("plan|api|planned=a") && !list.contains("planned=d"), "{list}");
}

fn kept(text: &str) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), text).unwrap();
    file
}

#[tokio::test]
async fn a_switch_does_what_it_says_and_shows() {
    let folder = folder();
    let builder = Server::builder().rules(folder.path()).store("memory").set("response.dynamic_metadata", "true");
    let operator = Operator::with(builder);
    let server = &operator.server;
    let entry = |answer: &Answer| format!("{:?}", answer.0.dynamic_metadata).contains("\"override\"");
    let user = [("user", "a"), ("path", "/x")];
    let switch = |mode: &str, scope: &[&str]| operator.ctl(&[&["switch", mode], scope].concat());

    operator.ctl(&["limit", "set", "api", "user=z", "unlimited"]);
    let unlimited = answer(server, &[("user", "z")]).await;
    assert!(unlimited.allowed() && entry(&unlimited), "{unlimited:?}");
    switch("off", &["rule", "api", "user.path"]);
    let off = answer(server, &user).await;
    assert!(off.allowed() && off.0.statuses[0].current_limit.is_none() && entry(&off), "{off:?}");
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
    // The nearer one still decides.
    assert!(allowed(server, &user).await);
    assert!(!allowed(server, &[("user", "b")]).await);
    assert!(!allowed(server, &[("free", "b")]).await);
    assert!(!allowed(server, &[("shadow", "b")]).await);
    assert!(given_back(server, &[("user", "b")]).await);
    // Nothing was counted of what was off.
    switch("clear", &["rule", "api", "user.path"]);
    switch("clear", &["domain", "api"]);
    let back = answer(server, &user).await;
    assert!(back.remaining() == Some(2) && !entry(&back), "{back:?}");

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
async fn a_switch_refuses_all_that_is_charged_together() {
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
    // Nothing had been taken of the other.
    let answer = client.check(both()).await.unwrap();
    assert_eq!(answer.0.statuses.iter().map(|status| status.limit_remaining).collect::<Vec<_>>(), [8, 8]);
    // A refusal that refuses nobody keeps nothing from being taken.
    let builder = Server::builder().rules(folder.path()).store("memory").set("decisions.shadow_mode", "true");
    let operator = Operator::with(builder);
    operator.ctl(&["switch", "deny", "rule", "api", "b"]);
    let answer = operator.server.client().await.check(both()).await.unwrap();
    assert!(answer.allowed() && answer.0.statuses[0].limit_remaining == 8, "{answer:?}");
    // Unless everything is to be enforced.
    operator.ctl(&["switch", "enforce", "everything"]);
    assert!(!operator.server.client().await.check(both()).await.unwrap().allowed());
}

/// One instance is told, and the other hears of it within a second, on every topology.
async fn heard_everywhere(store: &str) {
    let folder = folder();
    let (one, other) = (Operator::start(folder.path(), store), Operator::start(folder.path(), store));
    let started = Instant::now();
    one.ctl(&["limit", "set", "api", "user=bob", "10/year"]);
    one.ctl(&["switch", "deny", "rule", "api", "bucket"]);
    let mut asked = 0;
    wait_for_async("the other to know both", async || {
        let knows = limit(&other.server, &[("user", "bob")]).await?.0 == 10;
        // Another one each time: none is exhausted by the asking.
        asked += 1;
        (knows && !allowed(&other.server, &[("bucket", &asked.to_string())]).await).then_some(())
    })
    .await;
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    // The other way round, and whoever comes later knows it all.
    other.ctl(&["switch", "clear", "rule", "api", "bucket"]);
    let late = Operator::start(folder.path(), store);
    assert_eq!(limit(&late.server, &[("user", "bob")]).await.map(|limit| limit.0), Some(10));
    assert!(allowed(&late.server, &[("bucket", "a")]).await);
    // Two of them speak at nearly the same time: neither misses what the other said.
    one.ctl(&["limit", "set", "api", "user=x", "20/year"]);
    other.ctl(&["limit", "set", "api", "user=y", "30/year"]);
    for operator in [&one, &other] {
        wait_for_async("both to be known", async || {
            let known = (
                limit(&operator.server, &[("user", "x")]).await?.0,
                limit(&operator.server, &[("user", "y")]).await?.0,
            );
            (known == (20, 30)).then_some(())
        })
        .await;
    }
    wait_for_async("all to have one version", async || {
        let version = |it: &Operator| it.server.metric("sluicegate_overrides_version");
        [&one, &other, &late].into_iter().all(|it| version(it) == 5.0).then_some(())
    })
    .await;
    assert_eq!(one.ctl(&["audit"]).lines().filter(|line| line.contains("alice")).count(), 5);
}

#[tokio::test]
async fn all_instances_of_one_redis_hear_of_it() {
    let redis = RedisServer::start();
    heard_everywhere(&redis.url()).await;
}

#[tokio::test]
async fn all_instances_of_a_cluster_hear_of_it() {
    let cluster = RedisCluster::start();
    heard_everywhere(&cluster.url()).await;
}

#[tokio::test]
async fn all_instances_of_a_ring_hear_of_it() {
    let (_servers, url) = ring(3);
    heard_everywhere(&url).await;
}

#[tokio::test]
async fn all_instances_behind_sentinels_hear_of_it_and_a_failover_loses_nothing() {
    let sentinels = Sentinels::start(None, None);
    heard_everywhere(&sentinels.url()).await;
    let folder = folder();
    let operator = Operator::start(folder.path(), &sentinels.url());
    sentinels.fail_over();
    wait_for("a change after the failover", || operator.try_ctl(&["limit", "set", "api", "user=bob", "11/year"]).ok());
    let late = Operator::start(folder.path(), &sentinels.url());
    wait_for_async("the change elsewhere", async || {
        (limit(&late.server, &[("user", "bob")]).await?.0 == 11).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_switch_for_one_instance_needs_no_store() {
    let folder = folder();
    let mut redis = RedisServer::start();
    let switches = tempfile::tempdir().unwrap();
    let file = switches.path().join("switches");
    let start = |file: &Path| {
        let builder = Server::builder().rules(folder.path()).store(&redis.url());
        let builder = builder.set("cluster.instances", "5").set("decisions.on_error", "deny");
        Operator::with(builder.set("overrides.switch_file", file.to_str().unwrap()))
    };
    let operator = start(&file);
    for (user, on_error) in [("user=eve", "allow"), ("user=max", "local")] {
        let word = format!("{{unit: year, requests_per_unit: 10, on_error: {on_error}}}");
        operator.ctl(&["limit", "set", "api", user, &word]);
    }
    operator.ctl(&["limit", "set", "api", "user=bob", "10/year"]);
    assert!(allowed(&operator.server, &[("user", "bob")]).await);
    // An entity's own consistency, too.
    operator.ctl(&["limit", "set", "api", "user=ann", "{unit: year, requests_per_unit: 20000, consistency: leased}"]);
    wait_for_async("quota in advance", async || {
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
    // An entity's own counts, with this instance's part of its own limit.
    for max in [true, true, false] {
        assert_eq!(allowed(&operator.server, &[("user", "max")]).await, max);
        assert!(allowed(&operator.server, &[("user", "eve")]).await);
    }
    // Told by itself it lets everything pass, and so does a file.
    operator.ctl(&["switch", "off", "everything", "--here"]);
    assert!(allowed(&operator.server, &[("user", "bob")]).await);
    operator.ctl(&["switch", "clear", "everything", "--here"]);
    assert!(!allowed(&operator.server, &[("user", "bob")]).await);
    operator.ctl(&["switch", "off", "everything", "--here", "--for", "1s"]);
    assert!(allowed(&operator.server, &[("user", "bob")]).await);
    wait_for_async("its end", async || (!allowed(&operator.server, &[("user", "bob")]).await).then_some(())).await;
    fs::write(&file, "off domain api # incident 42\n").unwrap();
    wait_for_async("the file's switch", async || allowed(&operator.server, &[("user", "bob")]).await.then_some(()))
        .await;
    assert!(
        operator
            .ctl(&["switch", "list"])
            .contains("switch domain|api off, from the file of this instance (by file: incident 42)")
    );
    fs::write(&file, "offf domain api\n").unwrap();
    wait_for("the complaint", || operator.server.log().contains("is not a mode").then_some(()));
    assert!(allowed(&operator.server, &[("user", "bob")]).await);
    assert!(operator.server.get("/readyz").contains("sync failed"), "{}", operator.server.get("/readyz"));
    fs::remove_file(&file).unwrap();
    wait_for_async("the switch to end with its file", async || {
        (!allowed(&operator.server, &[("user", "bob")]).await).then_some(())
    })
    .await;
    redis.thaw();
    wait_for_async("the limit from before", async || {
        (limit(&operator.server, &[("user", "bob")]).await?.0 == 10).then_some(())
    })
    .await;
    redis.kill();
}

#[tokio::test]
async fn a_store_that_loses_what_was_said_is_told_again() {
    let folder = folder();
    let redis = RedisServer::start();
    let (one, other) = (Operator::start(folder.path(), &redis.url()), Operator::start(folder.path(), &redis.url()));
    one.ctl(&["limit", "set", "api", "user=a", "10/year"]);
    let keys = ["texts", "log", "head"].map(|name| format!("sluicegate:{{directives}}{name}"));
    let dump = |key: &str| redis.cli(&["--no-raw", "COPY", key, &format!("{key}.copy")]);
    assert!(keys.iter().all(|key| dump(key).contains('1')));
    for (user, limit) in [("user=b", "11/year"), ("user=b", "12/year"), ("user=d", "13/year")] {
        one.ctl(&["limit", "set", "api", user, limit]);
    }
    wait_for_async("the other to know", async || (limit(&other.server, &[("user", "d")]).await?.0 == 13).then_some(()))
        .await;
    one.ctl(&["switch", "shadow", "algorithm", "gcra", "--here"]);
    // As a failover to a replica that had not heard the last three.
    let script = "for _, key in ipairs(KEYS) do redis.call('COPY', key .. '.copy', key, 'REPLACE') end";
    redis.cli(&["EVAL", script, "3", &keys[0], &keys[1], &keys[2]]);
    wait_for("the last three to be there again", || {
        redis.cli(&["HGET", &keys[0], "limit|api|user=d"]).contains("13/year").then_some(())
    });
    assert!(redis.cli(&["HGET", &keys[0], "limit|api|user=b"]).contains("12/year"));
    assert_eq!(redis.cli(&["HGET", &keys[2], "version"]), "4");
    // The same, and somebody who knows nothing of them says something else before they are said again.
    for operator in [&one, &other] {
        operator.server.signal("STOP");
    }
    redis.cli(&["EVAL", script, "3", &keys[0], &keys[1], &keys[2]]);
    let stranger = Operator::start(folder.path(), &redis.url());
    stranger.ctl(&["limit", "set", "api", "user=c", "30/year"]);
    // Also of what was lost: that is later than what is said again.
    stranger.ctl(&["limit", "set", "api", "user=d", "31/year"]);
    for operator in [&one, &other] {
        operator.server.signal("CONT");
    }
    for operator in [&one, &other, &stranger] {
        wait_for_async("all of it to be known", async || {
            let known = (
                limit(&operator.server, &[("user", "b")]).await?.0,
                limit(&operator.server, &[("user", "c")]).await?.0,
                limit(&operator.server, &[("user", "d")]).await?.0,
            );
            (known == (12, 30, 31)).then_some(())
        })
        .await;
    }
    stranger.ctl(&["limit", "unset", "api", "user=d"]);
    stranger.ctl(&["limit", "unset", "api", "user=c"]);
    wait_for_async("that to be known, too", async || {
        (limit(&one.server, &[("user", "c")]).await?.0 == 2).then_some(())
    })
    .await;
    // And as a server that was emptied.
    redis.cli(&["FLUSHALL"]);
    wait_for("all to be there again", || (redis.cli(&["HLEN", &keys[0]]) == "2").then_some(()));
    // Or one that threw a part away to have room.
    redis.cli(&["HDEL", &keys[0], "limit|api|user=b"]);
    wait_for("all to be there once more", || (redis.cli(&["HLEN", &keys[0]]) == "2").then_some(()));
    assert_eq!(redis.cli(&["TTL", &keys[0]]), "-1");
    let late = Operator::start(folder.path(), &redis.url());
    assert_eq!(limit(&late.server, &[("user", "b")]).await.map(|limit| limit.0), Some(12));
    one.ctl(&["limit", "unset", "api", "user=b"]);
    wait_for_async("the next change", async || (limit(&other.server, &[("user", "b")]).await?.0 == 2).then_some(()))
        .await;
    // Two that have parted: what the store says holds.
    let script = "redis.call('HSET', KEYS[1], 'limit|api|user=a', '1|{\"w\":\"7/year\",\"a\":\"x\",\"t\":1}') \
                  redis.call('HSET', KEYS[2], 'id', 'another')";
    redis.cli(&["EVAL", script, "2", &keys[0], &keys[2]]);
    wait_for_async("the store's own", async || (limit(&one.server, &[("user", "a")]).await?.0 == 7).then_some(()))
        .await;
    // What one instance was told by itself is none of the store's.
    assert!(
        one.ctl(&["switch", "list"]).contains("gcra shadow, on this instance only"),
        "{}",
        one.ctl(&["switch", "list"])
    );
}

#[test]
fn the_second_of_two_operators_learns_that_something_changed() {
    conflicts("memory");
    let redis = RedisServer::start();
    conflicts(&redis.url());
}

fn conflicts(store: &str) {
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
async fn an_exhausted_customer_breathes_at_once() {
    for store in ["memory".to_owned(), "redis".to_owned()] {
        let redis = (store == "redis").then(RedisServer::start);
        let store = redis.as_ref().map_or(store, RedisServer::url);
        let folder = folder();
        let operator = Operator::start(folder.path(), &store);
        let bucket = [("bucket", "a")];
        while allowed(&operator.server, &bucket).await {}
        // A bucket that is empty stays empty when it grows, unless one says otherwise.
        operator.ctl(&[
            "limit",
            "set",
            "api",
            "bucket=a",
            "{unit: year, requests_per_unit: 10, algorithm: token_bucket}",
        ]);
        assert!(!allowed(&operator.server, &bucket).await);
        let more = "{unit: year, requests_per_unit: 15, algorithm: token_bucket}";
        let said = operator.ctl(&["limit", "set", "api", "bucket=a", more, "--additive"]);
        assert!(said.contains("5 hits refunded"), "{said}");
        let mut passed = 0;
        wait_for_async("the difference to be had", async || {
            passed += u32::from(allowed(&operator.server, &bucket).await);
            (passed == 5).then_some(())
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

/// While one instance is told something all the time, the master dies and an instance is restarted. What was said and
/// answered is there in the end, on all, and never a half of it.
#[tokio::test]
async fn nothing_is_lost_when_redis_fails_over_while_it_is_said() {
    let mut sentinels = Sentinels::start(None, None);
    let folder = folder();
    let (one, other) =
        (Operator::start(folder.path(), &sentinels.url()), Operator::start(folder.path(), &sentinels.url()));
    let (said, stop) = (AtomicU32::new(0), AtomicBool::new(false));
    let late = std::thread::scope(|scope| {
        // Also if an assertion fails: the scope waits for its threads, and the test would hang.
        let _stop = SetOnDrop(&stop);
        scope.spawn(|| {
            while !stop.load(Relaxed) {
                let number = said.load(Relaxed);
                let request = |key: &str| {
                    let entries = serde_json::json!([{ "key": key, "value": number.to_string() }]);
                    let target = serde_json::json!({ "limit": { "domain": "api", "entries": entries } });
                    serde_json::json!({ "target": target, "value": format!("{number}/year") })
                };
                let body = serde_json::json!({ "changes": [request("user"), request("bucket")] }).to_string();
                // What was not answered is said again.
                if one.call(OPERATE, "PutOverrides", &body).0 == 200 {
                    said.fetch_add(1, Relaxed);
                }
            }
        });
        let more = |many: u32| {
            let before = said.load(Relaxed);
            wait_for("more to be said", || (said.load(Relaxed) >= before + many).then_some(()));
        };
        more(20);
        let master = sentinels.master();
        sentinels.servers.iter_mut().find(|server| server.port == master).unwrap().kill();
        more(20);
        drop(other);
        let late = Operator::start(folder.path(), &sentinels.url());
        more(20);
        late
    });
    let said = said.load(Relaxed);
    let export = |operator: &Operator| operator.ctl(&["export", "limit"]);
    wait_for("both to know the same", || (export(&one) == export(&late)).then_some(()));
    let known = export(&late);
    for number in 0..said {
        for key in ["user", "bucket"] {
            assert!(
                known.contains(&format!("limit|api|{key}={number},{number}/year,\n")),
                "{key} {number} of {said}: {known}"
            );
        }
    }
    // One may have been said and not been answered; then all of it is there, or nothing.
    assert!([2 * said, 2 * said + 2].contains(&(known.lines().count() as u32)), "{said}: {known}");
}
