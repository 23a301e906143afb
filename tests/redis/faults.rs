//! A Redis that breaks in every way that a network and a server can: each has an outcome, a metric by its kind, one line
//! in the log, and an end.

use std::time::{Duration, Instant};

use crate::support::{
    DEADLINE, Fault, Proxy, RedisCluster, RedisServer, Server, ask, descriptor,
    plain::{Client, Request},
    ring, rules, until, until_async,
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
        .start()
}

/// Every way in which a server can fail, and the kind that is counted for it.
const FAULTS: [(Fault, &str); 17] = [
    (Fault::Cut, "io"),
    (Fault::Swallow, "timeout"),
    (Fault::Delay(Duration::from_millis(200)), "timeout"),
    (Fault::Say(b"?nonsense\r\n"), "garbage"),
    (Fault::Say(b"+OK\r\n"), "garbage"),
    (Fault::Say(b"-LOADING Redis is loading the dataset in memory\r\n"), "loading"),
    (Fault::Say(b"-READONLY You can't write against a read only replica.\r\n"), "readonly"),
    (Fault::Say(b"-MASTERDOWN Link with MASTER is down\r\n"), "masterdown"),
    (Fault::Say(b"-NOAUTH Authentication required.\r\n"), "noauth"),
    (Fault::Say(b"-NOPERM this user has no permissions to run the 'evalsha' command\r\n"), "noperm"),
    (Fault::Say(b"-CLUSTERDOWN Hash slot not served\r\n"), "clusterdown"),
    (Fault::Say(b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"), "oom"),
    (Fault::Say(b"-BUSY Redis is busy running a script.\r\n"), "busy"),
    (Fault::Say(b"-MISCONF Errors writing to the AOF file\r\n"), "misconf"),
    (Fault::Say(b"-NOREPLICAS Not enough good replicas to write.\r\n"), "noreplicas"),
    (Fault::Say(b"-TRYAGAIN Multiple keys request during rehashing of slot\r\n"), "tryagain"),
    (Fault::Say(b"-MOVED 1 127.0.0.1:1\r\n"), "moved"),
];

async fn is_decided(client: &Client) -> bool {
    let answer = client.check(ask("d", &[("k", "v")])).await.unwrap();
    assert!(answer.allowed());
    // A counter that was asked shows what this request took; one that was not is as if never used, less this request.
    answer.remaining() != Some(999_999)
}

#[tokio::test]
async fn every_fault_has_an_outcome_a_metric_one_line_and_an_end() {
    let redis = RedisServer::start();
    let proxy = Proxy::start(redis.port);
    let server = start(&proxy.url());
    let client = server.client().await;
    for _ in 0..2 {
        client.check(ask("d", &[("k", "v")])).await.unwrap();
    }
    assert!(is_decided(&client).await);
    let (mut before, started) = (None, Instant::now());
    for (fault, kind) in FAULTS {
        let series = format!("sluicegate_redis_failures_total{{kind=\"{kind}\"}}");
        let count = server.metric(&series);
        proxy.set(fault);
        until_async(&format!("{fault:?} to be counted as {kind}"), async || {
            let asked = Instant::now();
            is_decided(&client).await;
            assert!(asked.elapsed() < Duration::from_secs(5), "{fault:?}");
            (server.metric(&series) > count).then_some(())
        })
        .await;
        proxy.set(Fault::None);
        until_async(&format!("the end of {fault:?}"), async || is_decided(&client).await.then_some(())).await;
        until("all connections", || server.get("/readyz").contains("redis, up").then_some(()));
        // The first rounds fill what is kept for good: buffers, threads for names.
        let now = (server.descriptors(), server.resident());
        let (descriptors, resident) = *before.get_or_insert(now);
        assert!(now.0 <= descriptors + 8, "{fault:?}: {} descriptors instead of {descriptors}", now.0);
        assert!(now.1 <= resident + (32 << 20), "{fault:?}: {} bytes instead of {resident}", now.1);
    }
    // Seventeen outages within seconds are a server that comes and goes, told every ten; a refusal of each kind has a line.
    let log = server.log();
    let told = log.matches("out of reach").count() as u64;
    assert!((1..=1 + started.elapsed().as_secs() / 10).contains(&told), "{log}");
    for kind in ["moved", "noperm", "clusterdown", "oom", "busy", "misconf", "noreplicas"] {
        assert_eq!(log.matches(&format!("\"kind\":\"{kind}\"")).count(), 1, "{kind}: {log}");
    }
}

/// Time-outs that are not in a row are no outage.
#[tokio::test]
async fn a_late_answer_now_and_then_takes_nobody_down() {
    let redis = RedisServer::start();
    let server = start(&redis.url());
    let client = server.client().await;
    let timeouts = || server.metric("sluicegate_store_errors_total{kind=\"timeout\"}");
    for round in 1..=4 {
        assert!(client.check(ask("d", &[("k", "v")])).await.unwrap().allowed());
        redis.freeze();
        // One call, one time-out; then the server answers again before the next.
        client.check(ask("d", &[("k", "v")])).await.unwrap();
        redis.thaw();
        assert!(timeouts() >= f64::from(round));
        until_async("an answer", async || is_decided(&client).await.then_some(())).await;
    }
    assert!(!server.log().contains("out of reach"), "{}", server.log());
}

/// Where a name points to another address, the next connection goes there.
#[tokio::test]
async fn a_name_that_changes_its_address_is_followed() {
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
    client.check(ask("d", &[("k", "v")])).await.unwrap();
    assert_eq!((first.cli(&["dbsize"]), second.cli(&["dbsize"])), ("1".into(), "0".into()));
    // In place: what is mounted over /etc/hosts is this very file.
    std::fs::write(names.path().join("hosts"), "127.0.0.3 counters.test").unwrap();
    first.kill();
    until_async("the new server to decide", async || is_decided(&client).await.then_some(())).await;
    assert_eq!(second.cli(&["dbsize"]), "1");
}

/// One of three is frozen: its users wait for nobody, and the others' do not know of it.
#[tokio::test]
async fn a_sick_node_touches_nobody_elses_requests() {
    let (nodes, url) = ring(3);
    let server = start(&url);
    let client = server.client().await;
    let users: Vec<_> = (0..30).map(|number| format!("user{number}")).collect();
    let remaining = async |user: &str| client.check(ask("d", &[("k", user)])).await.unwrap().remaining();
    for user in &users {
        assert_eq!(remaining(user).await, Some(999_999));
    }
    nodes[0].freeze();
    until_async("its node to be given up", async || {
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
    // About two thirds of them, by the chance of the ports; one in a million runs has fewer than these, or all.
    assert!((8..30).contains(&decided), "{decided}");
    assert_eq!(server.metric("sluicegate_store_errors_total{kind=\"timeout\"}"), timeouts);
    nodes[0].thaw();
    until("it to be back", || server.get("/readyz").contains("redis, up").then_some(()));
    for user in &users {
        assert_ne!(remaining(user).await, Some(999_999), "{user}");
    }
}

/// Each instance decides with its part of the limit, and nothing of that is handed on to Redis afterwards.
#[tokio::test]
async fn without_redis_an_instance_decides_with_its_part_of_the_limit() {
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
    assert!(client.check(ask("d", &[("local", "a")])).await.unwrap().allowed());
    redis.kill();
    until("somebody to notice", || server.get("/readyz").contains("out of reach").then_some(()));
    // 10, 5 at once and 6, divided by four instances and rounded up.
    assert_eq!(passed(ask("d", &[("local", "a")])).await, 3);
    assert_eq!(passed(ask("d", &[("bucket", "a")])).await, 2);
    let own = descriptor(&[("k", "own")]).limit(6, sluicegate_proto::envoy::r#type::v3::RateLimitUnit::Year, None);
    assert_eq!(passed(Request::new("d").descriptor(own)).await, 2);
    assert!(server.metric("sluicegate_on_error_total{policy=\"local\"}") >= 10.0);
    // What is decided here is counted like all else.
    let over = "ratelimit_service_rate_limit_over_limit{domain=\"d\",key1=\"local\"}";
    assert_eq!(server.metric(over), 1.0);
    redis.restart();
    until("redis to be back", || server.get("/readyz").contains("redis, up").then_some(()));
    assert_eq!(passed(ask("d", &[("local", "a")])).await, 10, "a new Redis knows of nothing");
}

/// Nothing answers at all: the service starts, says so, and needs nobody when the servers come.
#[tokio::test]
async fn many_servers_may_be_absent_at_the_start() {
    let (mut nodes, ring) = ring(2);
    nodes.iter_mut().for_each(RedisServer::kill);
    let nowhere = "127.0.0.1:1,127.0.0.1:2";
    for (url, said) in [
        (ring, "redis, out of reach"),
        (format!("redis+cluster://{nowhere}"), "nobody has said yet"),
        (format!("redis+sentinel://{nowhere}/main"), "nobody has said yet"),
    ] {
        let server = start(&url);
        let client = server.client().await;
        assert!(client.check(ask("d", &[("k", "v")])).await.unwrap().allowed());
        assert!(server.get("/readyz").contains(said), "{}", server.get("/readyz"));
        if said.contains("out of reach") {
            nodes.iter_mut().for_each(RedisServer::restart);
            until("the ring", || server.get("/readyz").contains("redis, up").then_some(()));
        }
        let asked = Instant::now();
        assert!(client.check(ask("d", &[("local", "v")])).await.unwrap().allowed());
        assert!(asked.elapsed() < DEADLINE);
        let word = if said.contains("out of reach") { "this Redis server is out of reach" } else { "nobody says" };
        let lines = server.log().lines().filter(|line| line.contains(word)).count();
        assert_eq!(lines, if said.contains("out of reach") { 2 } else { 1 }, "{}", server.log());
    }
}

/// Nobody in a cluster of one can say how it is, twice: a line for each time.
#[tokio::test]
async fn whoever_knows_nothing_says_so_once_an_episode() {
    let mut node = RedisCluster::node(&[]);
    assert_eq!(node.cli(&["cluster", "addslotsrange", "0", "16383"]), "OK");
    until("the cluster", || node.cli(&["cluster", "info"]).contains("cluster_state:ok").then_some(()));
    let server = start(&format!("redis+cluster://127.0.0.1:{}", node.port));
    let nobody = || server.log().lines().filter(|line| line.contains("nobody says which Redis servers")).count();
    for episode in 1..=2 {
        until("the server to be up", || server.get("/readyz").contains("redis, up").then_some(()));
        node.kill();
        until("somebody to notice", || (nobody() == episode).then_some(()));
        node.restart();
    }
    until("the server to be up", || server.get("/readyz").contains("redis, up").then_some(()));
    assert_eq!(nobody(), 2);
}
