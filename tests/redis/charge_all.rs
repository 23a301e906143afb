//! `charge: all` for requests with limits on several servers.

use std::{path::Path, time::Duration};

use tokio::task::JoinSet;

use crate::support::{
    Fault, Proxy, RedisCluster, RedisServer, Server, descriptor, raw_client::Request, request_for, ring, rules, server,
    wait_for, wait_for_async,
};

/// Returns the server of the counter for a descriptor with one entry under these rules.
fn node_of(store: &str, folder: &Path, entry: &str) -> String {
    let mut command = server::command();
    command.args(["shard", "d", entry, "--store", store, "--rules"]).arg(folder);
    let text = String::from_utf8(command.output().unwrap().stdout).unwrap();
    text.lines().find_map(|line| line.strip_prefix("node")).unwrap().trim().to_owned()
}

/// Two instances and 64 callers share limits on two or more shards: exactly the smallest limit is allowed, and denied
/// requests take nothing from the larger limits.
#[tokio::test]
async fn charge_all_is_exact_across_shards() {
    let text = "
domain: d
charge: all
descriptors:
- {key: user, rate_limit: {unit: year, requests_per_unit: 100000}}
- {key: api, rate_limit: {unit: year, requests_per_unit: 300, algorithm: token_bucket}}
- {key: tenant, rate_limit: {unit: year, requests_per_unit: 100000, algorithm: sliding_window, buckets: 6}}
";
    let (cluster, (_nodes, ring)) = (RedisCluster::start(), ring(3));
    let folder = rules(&[("d.yaml", text)]);
    for url in [cluster.url(), ring] {
        let start = || Server::builder().rules(folder.path()).store(&url).start();
        let servers = [start(), start()];
        let request = Request::new("d")
            .descriptor(descriptor(&[("user", "u")]))
            .descriptor(descriptor(&[("tenant", "t")]))
            .descriptor(descriptor(&[("api", "a")]));
        let mut callers = JoinSet::new();
        for number in 0..64 {
            let (client, request) = (servers[number % 2].client().await, request.clone());
            callers.spawn(async move {
                let mut passed = 0;
                for _ in 0..16 {
                    passed += u32::from(client.check(request.clone()).await.unwrap().allowed());
                }
                passed
            });
        }
        let passed: u32 = callers.join_all().await.into_iter().sum();
        assert!(passed <= 300, "{url}: {passed}");
        let client = servers[0].client().await;
        // Hits that are being rolled back may have caused denials of other callers. They are still available now.
        let mut passed_later = 0;
        while client.check(request.clone()).await.unwrap().allowed() {
            passed_later += 1;
        }
        assert_eq!(passed + passed_later, 300, "{url}");
        for entry in [("user", "u"), ("tenant", "t")] {
            let peek = Request::new("d").descriptor(descriptor(&[entry]).hits(0));
            assert_eq!(client.check(peek).await.unwrap().remaining(), Some(100_000 - 300), "{url}: {entry:?}");
        }
        assert_eq!(servers[0].metric("sluicegate_redis_rollback_failures_total"), 0.0);
    }
}

/// If the shard of one limit is dead, the takes of the other limits are rolled back, unless the dead limit's failure
/// policy allows requests.
#[tokio::test]
async fn takes_are_rolled_back_if_the_shard_of_another_limit_is_dead() {
    let text = "
domain: d
charge: all
descriptors:
- {key: user, rate_limit: {unit: year, requests_per_unit: 10}}
- {key: closed, rate_limit: {unit: year, requests_per_unit: 10, on_error: deny}}
- {key: open, rate_limit: {unit: year, requests_per_unit: 10, on_error: allow}}
";
    let (mut nodes, url) = ring(3);
    let folder = rules(&[("d.yaml", text)]);
    let server = Server::builder().rules(folder.path()).store(&url).start();
    let client = server.client().await;
    let node = |entry: &str| node_of(&url, folder.path(), entry);
    let dead = format!("127.0.0.1:{}", nodes[0].port);
    let user = (0..).map(|n| format!("u{n}")).find(|user| node(&format!("user={user}")) != dead).unwrap();
    let on_dead_node = (0..)
        .map(|n| format!("o{n}"))
        .find(|value| node(&format!("open={value}")) == dead && node(&format!("closed={value}")) == dead);
    let on_dead_node = on_dead_node.unwrap();
    nodes[0].kill();
    wait_for("the dead node to be detected", || server.get("/readyz").contains("1 of 3").then_some(()));
    let both = |key: &str| {
        Request::new("d").descriptor(descriptor(&[("user", &user)])).descriptor(descriptor(&[(key, &on_dead_node)]))
    };
    let remaining = async || {
        let peek = Request::new("d").descriptor(descriptor(&[("user", &user)]).hits(0));
        client.check(peek).await.unwrap().remaining()
    };
    assert!(!client.check(both("closed")).await.unwrap().allowed());
    assert_eq!(remaining().await, Some(10));
    assert!(client.check(both("open")).await.unwrap().allowed());
    assert_eq!(remaining().await, Some(9));
    assert_eq!(server.metric("sluicegate_on_error_total{policy=\"allow\"}"), 1.0);
    assert_eq!(server.metric("sluicegate_on_error_total{policy=\"deny\"}"), 1.0);
}

/// A request exceeds a limit in shadow mode and is denied by another limit. The first limit's hits are rolled back if
/// it counts denials, and otherwise it has nothing to roll back.
#[tokio::test]
async fn only_counted_hits_are_rolled_back() {
    let text = "
domain: d
charge: all
descriptors:
- {key: counts, shadow_mode: true, rate_limit: {unit: year, requests_per_unit: 2}}
- {key: does_not, shadow_mode: true, rate_limit: {unit: year, requests_per_unit: 2, count_denied: false}}
- {key: none, rate_limit: {unit: year, requests_per_unit: 0}}
";
    let (nodes, url) = ring(2);
    let folder = rules(&[("d.yaml", text)]);
    let server = Server::builder().rules(folder.path()).store(&url).set("redis.timeout", "5s").start();
    let client = server.client().await;
    let first = format!("127.0.0.1:{}", nodes[0].port);
    let value = |key: &str, is_first| {
        let is_on_node =
            |value: &String| (node_of(&url, folder.path(), &format!("{key}={value}")) == first) == is_first;
        (0..).map(|n| format!("{key}{n}")).find(is_on_node).unwrap()
    };
    let none = value("none", false);
    for key in ["counts", "does_not"] {
        let shadowed = value(key, true);
        let stored_state = || nodes[0].cli(&["eval", "return redis.call('get', redis.call('keys', '*')[1])", "0"]);
        assert!(client.check(request_for("d", &[(key, &shadowed)]).hits(2)).await.unwrap().allowed());
        let before = stored_state();
        assert!(before.ends_with("0000000002"), "{before}");
        let both = request_for("d", &[(key, &shadowed)]).descriptor(descriptor(&[("none", &none)]));
        assert!(!client.check(both).await.unwrap().allowed());
        assert_eq!(stored_state(), before, "{key}");
        nodes[0].cli(&["flushall"]);
    }
}

/// A server dies after its take and before the denial of another server: the failed roll back is counted and logged.
#[tokio::test]
async fn a_failed_roll_back_is_counted() {
    let text = "
domain: d
charge: all
descriptors:
- {key: user, rate_limit: {unit: year, requests_per_unit: 10}}
- {key: none, rate_limit: {unit: year, requests_per_unit: 0}}
";
    let (mut first_node, delayed_node) = (RedisServer::start(), RedisServer::start());
    let proxy = Proxy::start(delayed_node.port);
    let url = format!("redis+ring://127.0.0.1:{},{}", first_node.port, proxy.address);
    let folder = rules(&[("d.yaml", text)]);
    let server = Server::builder().rules(folder.path()).store(&url).set("redis.timeout", "5s").start();
    let client = server.client().await;
    let is_on_first = |entry: &str| node_of(&url, folder.path(), entry).ends_with(&format!(":{}", first_node.port));
    let value = |key: &str, first| {
        (0..).map(|n| format!("{key}{n}")).find(|value| is_on_first(&format!("{key}={value}")) == first).unwrap()
    };
    let (user, none) = (value("user", true), value("none", false));
    let request =
        Request::new("d").descriptor(descriptor(&[("user", &user)])).descriptor(descriptor(&[("none", &none)]));
    proxy.set(Fault::Delay(Duration::from_secs(1)));
    let pending = tokio::spawn(async move { client.check(request).await });
    wait_for_async("the take to be stored", async || (first_node.cli(&["dbsize"]) == "1").then_some(())).await;
    first_node.kill();
    assert!(!pending.await.unwrap().unwrap().allowed());
    assert_eq!(server.metric("sluicegate_redis_rollback_failures_total"), 1.0);
    assert!(server.log().contains("could not be rolled back"), "{}", server.log());
}
