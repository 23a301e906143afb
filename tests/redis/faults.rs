//! Every kind of failure of a network and a Redis server: each has an outcome, a metric with its kind, one line in the
//! log, and a recovery.

use std::time::{Duration, Instant};

use crate::support::{
    DEADLINE, Fault, Proxy, RedisCluster, RedisServer, Server, descriptor,
    raw_client::{Client, Request},
    request_for, ring, rules, wait_for, wait_for_async,
};

const RULES: &str = "
domain: d
descriptors:
- key: k
  rate_limit: {unit: year, requests_per_unit: 1000000, on_error: allow}
- key: local
  rate_limit: {unit: year, requests_per_unit: 10, on_error: local}
- key: bucket
  rate_limit: {unit: year, requests_per_unit: 9, algorithm: token_bucket, burst: 5, on_error: local}
";

fn start(store: &str) -> Server {
    let folder = rules(&[("d.yaml", RULES)]);
    Server::builder()
        .rules(folder.path())
        .store(store)
        .set("decisions.on_error", "local")
        .set("cluster.instances", "4")
        .set("redis.timeout", "20ms")
        .start()
}

/// Every fault of a server, and the kind that is counted for it.
const FAULTS: [(Fault, &str); 17] = [
    (Fault::Cut, "io"),
    (Fault::Swallow, "timeout"),
    (Fault::Delay(Duration::from_millis(200)), "timeout"),
    (Fault::Replace(b"?nonsense\r\n"), "invalid_reply"),
    (Fault::Replace(b"+OK\r\n"), "invalid_reply"),
    (Fault::Replace(b"-LOADING Redis is loading the dataset in memory\r\n"), "loading"),
    (Fault::Replace(b"-READONLY You can't write against a read only replica.\r\n"), "readonly"),
    (Fault::Replace(b"-MASTERDOWN Link with MASTER is down\r\n"), "masterdown"),
    (Fault::Replace(b"-NOAUTH Authentication required.\r\n"), "noauth"),
    (Fault::Replace(b"-NOPERM this user has no permissions to run the 'evalsha' command\r\n"), "noperm"),
    (Fault::Replace(b"-CLUSTERDOWN Hash slot not served\r\n"), "clusterdown"),
    (Fault::Replace(b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"), "oom"),
    (Fault::Replace(b"-BUSY Redis is busy running a script.\r\n"), "busy"),
    (Fault::Replace(b"-MISCONF Errors writing to the AOF file\r\n"), "misconf"),
    (Fault::Replace(b"-NOREPLICAS Not enough good replicas to write.\r\n"), "noreplicas"),
    (Fault::Replace(b"-TRYAGAIN Multiple keys request during rehashing of slot\r\n"), "tryagain"),
    (Fault::Replace(b"-MOVED 1 127.0.0.1:1\r\n"), "moved"),
];

/// Returns whether Redis decided the request.
async fn is_decided_by_redis(client: &Client) -> bool {
    let answer = client.check(request_for("d", &[("k", "v")])).await.unwrap();
    assert!(answer.allowed());
    // Redis remembers earlier hits. Without Redis, remaining is the limit less this request, as for an unused counter.
    answer.remaining() != Some(999_999)
}

#[tokio::test]
async fn every_fault_has_an_outcome_a_metric_one_log_line_and_a_recovery() {
    let redis = RedisServer::start();
    let proxy = Proxy::start(redis.port);
    let server = start(&proxy.url());
    let client = server.client().await;
    for _ in 0..2 {
        client.check(request_for("d", &[("k", "v")])).await.unwrap();
    }
    assert!(is_decided_by_redis(&client).await);
    let (mut before, started) = (None, Instant::now());
    for (fault, kind) in FAULTS {
        let series = format!("sluicegate_redis_failures_total{{kind=\"{kind}\"}}");
        let count = server.metric(&series);
        wait_for_async(&format!("{fault:?} to be counted as {kind}"), async || {
            proxy.set(fault);
            let sent = Instant::now();
            is_decided_by_redis(&client).await;
            assert!(sent.elapsed() < Duration::from_secs(5), "{fault:?}");
            if server.metric(&series) > count {
                return Some(());
            }
            // The connection broke before the request was sent, and cannot be opened again with the fault.
            proxy.set(Fault::None);
            wait_for_async("Redis to decide again", async || is_decided_by_redis(&client).await.then_some(())).await;
            None
        })
        .await;
        proxy.set(Fault::None);
        wait_for_async(&format!("the recovery from {fault:?}"), async || {
            is_decided_by_redis(&client).await.then_some(())
        })
        .await;
        wait_for("all connections to be up", || server.get("/readyz").contains("redis, up").then_some(()));
        // The first rounds allocate permanent resources: buffers and threads for name resolution.
        let now = (server.open_file_descriptors(), server.resident_memory());
        let (descriptors, resident) = *before.get_or_insert(now);
        assert!(now.0 <= descriptors + 8, "{fault:?}: {} descriptors instead of {descriptors}", now.0);
        assert!(now.1 <= resident + (32 << 20), "{fault:?}: {} bytes instead of {resident}", now.1);
    }
    // Seventeen outages within seconds are an unstable server, which is logged every ten seconds. Each kind of error
    // reply has a line.
    let log = server.log();
    let logged = log.matches("Redis server is unavailable").count() as u64;
    assert!((1..=1 + started.elapsed().as_secs() / 10).contains(&logged), "{log}");
    for kind in ["moved", "noperm", "clusterdown", "oom", "busy", "misconf", "noreplicas"] {
        assert_eq!(log.matches(&format!("\"kind\":\"{kind}\"")).count(), 1, "{kind}: {log}");
    }
}

/// Timeouts that are not consecutive are not an outage.
#[tokio::test]
async fn occasional_timeouts_are_not_an_outage() {
    let redis = RedisServer::start();
    let server = start(&redis.url());
    let client = server.client().await;
    let timeouts = || server.metric("sluicegate_store_errors_total{kind=\"timeout\"}");
    for round in 1..=4 {
        assert!(client.check(request_for("d", &[("k", "v")])).await.unwrap().allowed());
        redis.freeze();
        // One call times out. The server answers again before the next call.
        client.check(request_for("d", &[("k", "v")])).await.unwrap();
        redis.thaw();
        assert!(timeouts() >= f64::from(round));
        wait_for_async("Redis to decide again", async || is_decided_by_redis(&client).await.then_some(())).await;
    }
    assert!(!server.log().contains("Redis server is unavailable"), "{}", server.log());
}

/// If a host name changes its address, the next connection uses the new address.
#[tokio::test]
async fn a_changed_address_of_a_host_name_is_followed() {
    let mut first = RedisServer::with(&["--bind", "127.0.0.2"]);
    let port = first.port.to_string();
    let second = RedisServer::with(&["--bind", "127.0.0.3", "--port", &port]);
    let names = rules(&[("hosts", "127.0.0.2 counters.test")]);
    let folder = rules(&[("d.yaml", RULES)]);
    let server = Server::builder()
        .rules(folder.path())
        .store(&format!("redis://counters.test:{port}"))
        .hosts(&names.path().join("hosts"))
        .start();
    let client = server.client().await;
    client.check(request_for("d", &[("k", "v")])).await.unwrap();
    assert_eq!((first.cli(&["dbsize"]), second.cli(&["dbsize"])), ("1".into(), "0".into()));
    // The file is overwritten in place, because this inode is mounted over /etc/hosts.
    std::fs::write(names.path().join("hosts"), "127.0.0.3 counters.test").unwrap();
    first.kill();
    wait_for_async("the new server to decide", async || is_decided_by_redis(&client).await.then_some(())).await;
    assert_eq!(second.cli(&["dbsize"]), "1");
}

/// If one of three nodes is frozen, requests of its users do not wait, and other requests are not affected.
#[tokio::test]
async fn a_frozen_node_does_not_affect_the_requests_of_other_nodes() {
    let (nodes, url) = ring(3);
    let server = start(&url);
    let client = server.client().await;
    let users: Vec<_> = (0..30).map(|number| format!("user{number}")).collect();
    let remaining = async |user: &str| client.check(request_for("d", &[("k", user)])).await.unwrap().remaining();
    for user in &users {
        assert_eq!(remaining(user).await, Some(999_999));
    }
    nodes[0].freeze();
    wait_for_async("the frozen node to be unavailable", async || {
        for user in &users {
            remaining(user).await;
        }
        server.get("/readyz").contains("1 of 3").then_some(())
    })
    .await;
    let timeouts = server.metric("sluicegate_store_errors_total{kind=\"timeout\"}");
    let mut decided = 0;
    for user in &users {
        decided += usize::from(remaining(user).await != Some(999_999));
    }
    // Redis decides about two thirds of them, depending on the ports. One in a million runs has fewer than 8, or all
    // 30.
    assert!((8..30).contains(&decided), "{decided}");
    assert_eq!(server.metric("sluicegate_store_errors_total{kind=\"timeout\"}"), timeouts);
    nodes[0].thaw();
    wait_for("the node to be back", || server.get("/readyz").contains("redis, up").then_some(()));
    for user in &users {
        assert_ne!(remaining(user).await, Some(999_999), "{user}");
    }
}

/// Without Redis, each instance decides with its share of the limit. These hits are not sent to Redis afterwards.
#[tokio::test]
async fn without_redis_an_instance_decides_with_its_share_of_the_limit() {
    let mut redis = RedisServer::start();
    let server = start(&redis.url());
    let client = server.client().await;
    let passed = async |request: Request| {
        let mut passed = 0;
        while client.check(request.clone()).await.unwrap().allowed() {
            passed += 1;
            assert!(passed < 100);
        }
        passed
    };
    assert!(client.check(request_for("d", &[("local", "a")])).await.unwrap().allowed());
    redis.kill();
    wait_for("the outage to be detected", || server.get("/readyz").contains("unavailable").then_some(()));
    // The limits of 10, 5 (burst) and 6 are divided by four instances and rounded up.
    assert_eq!(passed(request_for("d", &[("local", "a")])).await, 3);
    assert_eq!(passed(request_for("d", &[("bucket", "a")])).await, 2);
    let own = descriptor(&[("k", "own")]).limit(6, sluicegate_proto::envoy::r#type::v3::RateLimitUnit::Year, None);
    assert_eq!(passed(Request::new("d").descriptor(own)).await, 2);
    assert!(server.metric("sluicegate_on_error_total{policy=\"local\"}") >= 10.0);
    // The statistics count local decisions like all others.
    let over = "ratelimit_service_rate_limit_over_limit{domain=\"d\",key1=\"local\"}";
    assert_eq!(server.metric(over), 1.0);
    redis.restart();
    wait_for("Redis to be back", || server.get("/readyz").contains("redis, up").then_some(()));
    assert_eq!(passed(request_for("d", &[("local", "a")])).await, 10, "a new Redis is empty");
}

/// The service starts without any Redis server, reports this, and connects without help when the servers start.
#[tokio::test]
async fn the_service_starts_without_any_redis_server() {
    let (mut nodes, ring) = ring(2);
    nodes.iter_mut().for_each(RedisServer::kill);
    let closed_ports = "127.0.0.1:1,127.0.0.1:2";
    for (url, expected) in [
        (ring, "redis, unavailable"),
        (format!("redis+cluster://{closed_ports}"), "topology unknown"),
        (format!("redis+sentinel://{closed_ports}/main"), "topology unknown"),
    ] {
        let server = start(&url);
        let client = server.client().await;
        assert!(client.check(request_for("d", &[("k", "v")])).await.unwrap().allowed());
        assert!(server.get("/readyz").contains(expected), "{}", server.get("/readyz"));
        if expected.contains("unavailable") {
            nodes.iter_mut().for_each(RedisServer::restart);
            wait_for("the ring to be up", || server.get("/readyz").contains("redis, up").then_some(()));
        }
        let sent = Instant::now();
        assert!(client.check(request_for("d", &[("local", "v")])).await.unwrap().allowed());
        assert!(sent.elapsed() < DEADLINE);
        let message = if expected.contains("unavailable") {
            "Redis server is unavailable"
        } else {
            "cannot read the Redis topology"
        };
        let lines = server.log().lines().filter(|line| line.contains(message)).count();
        assert_eq!(lines, if expected.contains("unavailable") { 2 } else { 1 }, "{}", server.log());
    }
}

/// The only node of a cluster dies twice, and each time one line in the log reports an unknown topology.
#[tokio::test]
async fn an_unknown_topology_is_logged_once_per_outage() {
    let mut node = RedisCluster::start_node(&[]);
    assert_eq!(node.cli(&["cluster", "addslotsrange", "0", "16383"]), "OK");
    wait_for("the cluster to be ready", || node.cli(&["cluster", "info"]).contains("cluster_state:ok").then_some(()));
    let server = start(&format!("redis+cluster://127.0.0.1:{}", node.port));
    let log_lines = || server.log().lines().filter(|line| line.contains("cannot read the Redis topology")).count();
    for outage in 1..=2 {
        wait_for("the server to be up", || server.get("/readyz").contains("redis, up").then_some(()));
        node.kill();
        wait_for("the outage to be logged", || (log_lines() == outage).then_some(()));
        node.restart();
    }
    wait_for("the server to be up", || server.get("/readyz").contains("redis, up").then_some(()));
    assert_eq!(log_lines(), 2);
}
