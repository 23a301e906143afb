//! `charge: all` where the limits of a request live on several servers.

use std::{path::Path, time::Duration};

use tokio::task::JoinSet;

use crate::support::{
    Fault, Proxy, RedisCluster, RedisServer, Server, ask, descriptor, plain::Request, ring, rules, server, until,
    until_async,
};

/// The server that has the counter of a descriptor of one entry, by these rules.
fn node_of(store: &str, folder: &Path, entry: &str) -> String {
    let mut command = server::command();
    command.args(["shard", "d", entry, "--store", store, "--rules"]).arg(folder);
    let text = String::from_utf8(command.output().unwrap().stdout).unwrap();
    text.lines().find_map(|line| line.strip_prefix("node")).unwrap().trim().to_owned()
}

/// `charge: all` over two instances and two shards: 64 callers, exactly the smaller limit; and what is refused takes
/// nothing of the larger one.
#[tokio::test]
async fn charged_for_all_or_none_across_shards_is_exact() {
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
        let start = || Server::builder().rules(folder.path()).store(&url).set("redis.timeout", "20s").start();
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
        // While some gave back, others may have seen too little: what is left can still be had.
        let mut rest = 0;
        while client.check(request.clone()).await.unwrap().allowed() {
            rest += 1;
        }
        assert_eq!(passed + rest, 300, "{url}");
        for entry in [("user", "u"), ("tenant", "t")] {
            let look = Request::new("d").descriptor(descriptor(&[entry]).hits(0));
            assert_eq!(client.check(look).await.unwrap().remaining(), Some(100_000 - 300), "{url}: {entry:?}");
        }
        assert_eq!(servers[0].metric("sluicegate_redis_rollback_failures_total"), 0.0);
    }
}

/// One limit's shard is dead: what the others took is given back, unless that limit lets requests pass without it.
#[tokio::test]
async fn what_was_taken_beside_a_dead_shard_is_given_back() {
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
    let place = |entry: &str| node_of(&url, folder.path(), entry);
    let dead = format!("127.0.0.1:{}", nodes[0].port);
    let user = (0..).map(|n| format!("u{n}")).find(|user| place(&format!("user={user}")) != dead).unwrap();
    let other = (0..)
        .map(|n| format!("o{n}"))
        .find(|value| place(&format!("open={value}")) == dead && place(&format!("closed={value}")) == dead);
    let other = other.unwrap();
    nodes[0].kill();
    until("somebody to notice", || server.get("/readyz").contains("1 of 3").then_some(()));
    let both = |key: &str| {
        Request::new("d").descriptor(descriptor(&[("user", &user)])).descriptor(descriptor(&[(key, &other)]))
    };
    let left = async || {
        let look = Request::new("d").descriptor(descriptor(&[("user", &user)]).hits(0));
        client.check(look).await.unwrap().remaining()
    };
    assert!(!client.check(both("closed")).await.unwrap().allowed());
    assert_eq!(left().await, Some(10));
    assert!(client.check(both("open")).await.unwrap().allowed());
    assert_eq!(left().await, Some(9));
    assert_eq!(server.metric("sluicegate_on_error_total{policy=\"allow\"}"), 1.0);
    assert_eq!(server.metric("sluicegate_on_error_total{policy=\"deny\"}"), 1.0);
}

/// What a limit in shadow mode refuses beside one that refuses indeed: what counted is given back, and what did not is
/// not.
#[tokio::test]
async fn what_is_given_back_is_what_was_counted() {
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
        let is_there = |value: &String| (node_of(&url, folder.path(), &format!("{key}={value}")) == first) == is_first;
        (0..).map(|n| format!("{key}{n}")).find(is_there).unwrap()
    };
    let none = value("none", false);
    for key in ["counts", "does_not"] {
        let dark = value(key, true);
        let counted = || nodes[0].cli(&["eval", "return redis.call('get', redis.call('keys', '*')[1])", "0"]);
        assert!(client.check(ask("d", &[(key, &dark)]).hits(2)).await.unwrap().allowed());
        let before = counted();
        assert!(before.ends_with("0000000002"), "{before}");
        let both = ask("d", &[(key, &dark)]).descriptor(descriptor(&[("none", &none)]));
        assert!(!client.check(both).await.unwrap().allowed());
        assert_eq!(counted(), before, "{key}");
        nodes[0].cli(&["flushall"]);
    }
}

/// A server dies between the take and the refusal of another: what cannot be given back is told.
#[tokio::test]
async fn what_cannot_be_given_back_is_counted() {
    let text = "
domain: d
charge: all
descriptors:
- {key: user, rate_limit: {unit: year, requests_per_unit: 10}}
- {key: none, rate_limit: {unit: year, requests_per_unit: 0}}
";
    let (mut taken, late) = (RedisServer::start(), RedisServer::start());
    let proxy = Proxy::start(late.port);
    let url = format!("redis+ring://127.0.0.1:{},{}", taken.port, proxy.address);
    let folder = rules(&[("d.yaml", text)]);
    let server = Server::builder().rules(folder.path()).store(&url).set("redis.timeout", "5s").start();
    let client = server.client().await;
    let place = |entry: &str| node_of(&url, folder.path(), entry).ends_with(&format!(":{}", taken.port));
    let value = |key: &str, first| {
        (0..).map(|n| format!("{key}{n}")).find(|value| place(&format!("{key}={value}")) == first).unwrap()
    };
    let (user, none) = (value("user", true), value("none", false));
    let request =
        Request::new("d").descriptor(descriptor(&[("user", &user)])).descriptor(descriptor(&[("none", &none)]));
    proxy.set(Fault::Delay(Duration::from_secs(1)));
    let asked = tokio::spawn(async move { client.check(request).await });
    until_async("the take", async || (taken.cli(&["dbsize"]) == "1").then_some(())).await;
    taken.kill();
    assert!(!asked.await.unwrap().unwrap().allowed());
    assert_eq!(server.metric("sluicegate_redis_rollback_failures_total"), 1.0);
    assert!(server.log().contains("could not be given back"), "{}", server.log());
}
