//! Several Redis servers: locations of counters, migrations of slots, and failovers.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use tokio::task::JoinSet;
use tonic::transport::Endpoint;

use crate::support::{
    DEADLINE, Operator, RedisCluster, RedisServer, Sentinels, Server, descriptor,
    raw_client::{Client, Request},
    request_for, ring, rules, wait_for, wait_for_async,
};

const RULES: &str = "
domain: d
shard_by: [user]
descriptors:
- key: user
  rate_limit: {unit: year, requests_per_unit: 1000000}
  descriptors:
  - {key: path, rate_limit: {unit: year, requests_per_unit: 1000000}}
- key: few
  rate_limit: {unit: year, requests_per_unit: 2, algorithm: gcra}
- key: allow
  rate_limit: {unit: year, requests_per_unit: 2, on_error: allow}
- key: second
  rate_limit: {unit: second, requests_per_unit: 1000000}
- key: slots
  rate_limit: {algorithm: concurrency, limit: 9, holder: id}
";

/// Returns the value that `sluicegate shard` prints after a label.
fn shard(label: &str, store: &str, args: &[&str]) -> String {
    let folder = rules(&[("d.yaml", RULES)]);
    let mut command = crate::support::server::command();
    command.arg("shard").args(args).args(["--store", store, "--rules"]).arg(folder.path());
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(label));
    line.unwrap_or_else(|| panic!("{text}{}", String::from_utf8_lossy(&output.stderr))).trim().to_owned()
}

/// Starts the service with a Redis timeout that is long enough for a machine which runs all tests at once.
fn start(store: &str) -> Server {
    Server::builder().rules(rules(&[("d.yaml", RULES)]).path()).store(store).set("redis.timeout", "1s").start()
}

/// Callers for a list of users on a separate thread, which send requests until they are stopped.
struct Load {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<Vec<(String, u64, u64)>>,
}

impl Load {
    fn start(server: &Server, users: &[String]) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (address, users, stopped) = (server.grpc, users.to_vec(), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
                let client = Client::connect(endpoint.timeout(DEADLINE)).await.unwrap();
                let callers = users.iter().cycle().take(4 * users.len());
                let callers: JoinSet<_> =
                    callers.map(|user| call(client.clone(), user.clone(), Arc::clone(&stopped))).collect();
                sum(callers.join_all().await)
            })
        });
        Self { stop, thread }
    }

    /// Stops the callers and returns how many requests of each user were decided, and how many failed.
    fn stop(self) -> Vec<(String, u64, u64)> {
        self.stop.store(true, Relaxed);
        self.thread.join().unwrap()
    }
}

async fn call(client: Client, user: String, stop: Arc<AtomicBool>) -> (String, u64, u64) {
    let (mut decided, mut failed) = (0, 0);
    while !stop.load(Relaxed) {
        let request = request_for("d", &[("user", &user)]).descriptor(descriptor(&[("user", &user), ("path", "/")]));
        match client.check(request).await {
            Ok(answer) => {
                assert!(answer.allowed());
                decided += 1;
            }
            Err(_) => failed += 1,
        }
    }
    (user, decided, failed)
}

fn sum(callers: Vec<(String, u64, u64)>) -> Vec<(String, u64, u64)> {
    let mut users: Vec<(String, u64, u64)> = Vec::new();
    for (user, decided, failed) in callers {
        match users.iter_mut().find(|(known, ..)| *known == user) {
            Some(known) => (known.1, known.2) = (known.1 + decided, known.2 + failed),
            None => users.push((user, decided, failed)),
        }
    }
    users
}

/// Waits until `requests` more requests have been decided.
fn wait_for_requests(server: &Server, requests: f64) {
    let decided = || server.metric("ratelimit_service_total_requests{grpc_method=\"ShouldRateLimit\"}");
    let before = decided();
    wait_for("more requests to be decided", || (decided() > before + requests).then_some(()));
}

/// Returns the remaining hits of a user's two limits.
async fn remaining(client: &Client, user: &str) -> Vec<u32> {
    let peek = |entries| descriptor(entries).hits(0);
    let path = [("user", user), ("path", "/")];
    let request = Request::new("d").descriptor(peek(&[("user", user)])).descriptor(peek(&path));
    let answer = wait_for_async("an answer", async || client.check(request.clone()).await.ok()).await;
    answer.0.statuses.iter().map(|status| status.limit_remaining).collect()
}

async fn has_counted(client: &Client, user: &str, decided: u64) {
    let expected = 1_000_000 - u32::try_from(decided).unwrap();
    assert_eq!(remaining(client, user).await, [expected, expected], "{user}: {decided} decided");
}

fn users() -> Vec<String> {
    (0..8).map(|number| format!("user{number}")).collect()
}

#[tokio::test]
async fn the_shard_command_reports_the_location_of_a_key() {
    let (nodes, ring) = ring(3);
    let cluster = RedisCluster::start();
    let (on_ring, in_cluster) = (start(&ring), start(&cluster.url()));
    for user in users() {
        let args = ["d", &format!("user={user}"), "path=/"];
        for server in [&on_ring, &in_cluster] {
            let request = request_for("d", &[("user", &user), ("path", "/")]);
            assert!(server.client().await.check(request).await.unwrap().allowed());
        }
        let key = shard("key", &ring, &args);
        let port: u16 = shard("node", &ring, &args).rsplit_once(':').unwrap().1.parse().unwrap();
        let holders: Vec<_> = nodes.iter().filter(|node| node.cli(&["exists", &key]) == "1").collect();
        assert_eq!(holders.iter().map(|node| node.port).collect::<Vec<_>>(), [port], "{key}");
        let slot = shard("slot", &cluster.url(), &args);
        assert_eq!(cluster.nodes[0].cli(&["cluster", "keyslot", &key]), slot);
        assert_eq!(cluster.nodes[cluster.owner(&key)].cli(&["exists", &key]), "1");
    }
    // The holder of a slot is not part of the key.
    let slot = request_for("d", &[("slots", "x"), ("id", "1")]);
    assert!(in_cluster.client().await.check(slot).await.unwrap().allowed());
    let key = shard("key", &cluster.url(), &["d", "slots=x", "id=2"]);
    assert_eq!(cluster.nodes[cluster.owner(&key)].cli(&["exists", &key]), "1", "{key}");
    let moved = shard("after", &ring, &["d", "user=a", "--nodes", "x,y"]);
    assert!(moved.starts_with("moves from 127.0.0.1:"), "{moved}");
    // With the names and weights of the settings file, no key moves.
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("settings.toml");
    let node =
        |name: &str, weight| format!("[[redis.ring]]\nname = \"{name}\"\nurl = \"redis://h\"\nweight = {weight}\n");
    std::fs::write(&config, [node("a", 1), node("b", 5)].concat()).unwrap();
    for user in users() {
        let args = ["d", &format!("user={user}"), "--config", config.to_str().unwrap(), "--nodes", "a,b*5"];
        let then = shard("after", "redis+ring://", &args);
        assert!(then.starts_with("stays on "), "{user}: {then}");
    }
}

/// All limits of a user are stored on one node and decided by one call.
#[tokio::test]
async fn limits_of_one_user_are_decided_in_one_call() {
    let cluster = RedisCluster::start();
    let server = start(&cluster.url());
    let client = server.client().await;
    let request = request_for("d", &[("user", "u")]).descriptor(descriptor(&[("user", "u"), ("path", "/")]));
    assert!(client.check(request.clone()).await.unwrap().allowed());
    cluster.nodes.iter().for_each(|node| drop(node.cli(&["config", "resetstat"])));
    assert!(client.check(request).await.unwrap().allowed());
    let stats = |node: &RedisServer| node.cli(&["info", "commandstats"]);
    let calls: Vec<_> = cluster.nodes.iter().map(stats).filter(|stats| stats.contains("cmdstat_evalsha")).collect();
    assert_eq!(calls.len(), 1);
    assert!(calls[0].contains("cmdstat_evalsha:calls=1,"), "{}", calls[0]);
}

/// Slots are migrated key by key under load: every request is decided, and counted once.
#[tokio::test]
async fn a_migration_under_load_neither_loses_nor_doubles_hits() {
    let cluster = RedisCluster::start();
    let server = start(&cluster.url());
    let client = server.client().await;
    let users = users();
    let keys: Vec<_> = users.iter().map(|user| shard("key", &cluster.url(), &["d", &format!("user={user}")])).collect();
    let load = Load::start(&server, &users);
    for key in &keys[..3] {
        let slot = cluster.nodes[0].cli(&["cluster", "keyslot", key]).parse().unwrap();
        let from = cluster.owner(key);
        let to = (from + 1) % 3;
        cluster.begin_slot_migration(slot, from, to);
        // One of the user's two counters is on the target, the other still on the source.
        cluster.move_key(key, from, to);
        let before = server.metric("sluicegate_redis_failures_total{kind=\"ask\"}");
        wait_for("requests to be redirected", || {
            (server.metric("sluicegate_redis_failures_total{kind=\"ask\"}") > before).then_some(())
        });
        cluster.finish_slot_migration(slot, from, to);
        wait_for_requests(&server, 200.0);
    }
    for (user, decided, failed) in load.stop() {
        assert_eq!(failed, 0, "{user}: {}", server.log());
        has_counted(&client, &user, decided).await;
    }
}

/// During a migration, two counters of one request are on different nodes, so that no call can decide both. One take
/// follows the other and is rolled back if the other is denied. After the migration, one call is enough again.
#[tokio::test]
async fn a_request_split_by_a_migration_is_charged_for_all_limits_or_none() {
    let text = "
domain: d
charge: all
shard_by: [user]
descriptors:
- key: user
  rate_limit: {unit: year, requests_per_unit: 100}
  descriptors:
  - {key: path, rate_limit: {unit: year, requests_per_unit: 3, algorithm: gcra}}
";
    let cluster = RedisCluster::start();
    let folder = rules(&[("d.yaml", text)]);
    for (user, moved) in [("u", "|user|fw"), ("v", "|path=/|gcra")] {
        let server = Server::builder()
            .rules(folder.path())
            .store(&cluster.url())
            .set("redis.timeout", "5s")
            .set("deny_cache.max_entries", "0")
            .start();
        let client = server.client().await;
        let request = request_for("d", &[("user", user)]).descriptor(descriptor(&[("user", user), ("path", "/")]));
        let slot = format!("{{d|user={user}}}");
        let slot: u16 = cluster.nodes[0].cli(&["cluster", "keyslot", &slot]).parse().unwrap();
        let from = cluster.owner(&format!("{{d|user={user}}}"));
        let to = (from + 1) % 3;
        let check = async || {
            let answer =
                client.check(request.clone()).await.unwrap_or_else(|error| panic!("{error}\n{}", server.log()));
            let remaining: Vec<_> = answer.0.statuses.iter().map(|status| status.limit_remaining).collect();
            (answer.allowed(), remaining)
        };
        assert_eq!(check().await, (true, vec![99, 2]), "{user}");
        cluster.begin_slot_migration(slot, from, to);
        let keys = cluster.nodes[from].cli(&["cluster", "getkeysinslot", &slot.to_string(), "10"]);
        let key = keys.lines().find(|key| key.contains(moved)).unwrap_or_else(|| panic!("{moved} in {keys}"));
        cluster.move_key(key, from, to);
        for remaining in [1, 0] {
            assert_eq!(check().await, (true, vec![97 + remaining, remaining]), "{user}");
        }
        for _ in 0..3 {
            assert_eq!(check().await, (false, vec![97, 0]), "{user}: nothing is taken");
        }
        cluster.finish_slot_migration(slot, from, to);
        assert_eq!(check().await, (false, vec![97, 0]), "{user}");
        let refund = Request::new("d").descriptor(descriptor(&[("user", user), ("path", "/")]).hits(1).refund());
        assert!(client.check(refund).await.unwrap().allowed());
        assert_eq!(check().await, (true, vec![96, 0]), "{user}");
        assert_eq!(server.metric("sluicegate_redis_rollback_failures_total"), 0.0);
    }
}

/// An unknown node takes over a slot: the redirect is enough to find it.
#[tokio::test]
async fn a_redirect_to_a_new_node_is_followed_immediately() {
    let mut cluster = RedisCluster::start();
    let server = start(&cluster.url());
    let client = server.client().await;
    let users = users();
    for user in &users {
        assert_eq!(remaining(&client, user).await, [1_000_000, 1_000_000]);
    }
    cluster.nodes.push(RedisCluster::start_node(&[]));
    let known = cluster.nodes[0].cli(&["cluster", "nodes"]);
    let address = known.lines().find(|line| line.contains("myself")).unwrap().split(' ').nth(1).unwrap();
    let (port, bus) = address.split([',', ' ']).next().unwrap().rsplit_once(':').unwrap().1.split_once('@').unwrap();
    assert_eq!(cluster.nodes[3].cli(&["cluster", "meet", "127.0.0.1", port, bus]), "OK");
    wait_for("all nodes to know the new one", || {
        let info: Vec<_> = cluster.nodes.iter().map(|node| node.cli(&["cluster", "info"])).collect();
        let known = |info: &String| info.contains("cluster_state:ok") && info.contains("cluster_known_nodes:4");
        info.iter().all(known).then_some(())
    });
    for user in &users {
        let key = shard("key", &cluster.url(), &["d", &format!("user={user}")]);
        let slot = cluster.nodes[0].cli(&["cluster", "keyslot", &key]).parse().unwrap();
        let from = cluster.owner(&key);
        cluster.begin_slot_migration(slot, from, 3);
        cluster.finish_slot_migration(slot, from, 3);
        let request = request_for("d", &[("user", user)]).descriptor(descriptor(&[("user", user), ("path", "/")]));
        assert!(client.check(request).await.unwrap().allowed(), "{user}");
        has_counted(&client, user, 1).await;
    }
}

#[tokio::test]
async fn a_requested_failover_counts_no_hit_twice() {
    let cluster = RedisCluster::with(3, 1, &[]);
    let server = start(&cluster.url());
    let client = server.client().await;
    let users = users();
    let load = Load::start(&server, &users);
    for master in 0..3 {
        let replica = cluster.replica_of(master);
        assert_eq!(cluster.nodes[replica].cli(&["cluster", "failover"]), "OK");
        wait_for("the replica to be the master", || {
            cluster.nodes[replica].cli(&["role"]).starts_with("master").then_some(())
        });
    }
    wait_for_requests(&server, 500.0);
    // The old master does not answer for a moment: requests that timed out may be counted, but only once.
    for (user, decided, failed) in load.stop() {
        for remaining in remaining(&client, &user).await {
            let counted = u64::from(1_000_000 - remaining);
            assert!((decided..=decided + failed).contains(&counted), "{user}: {decided}, {failed}, {counted}");
        }
        assert!(failed < decided, "{user}: {decided}, {failed}: {}", server.log());
    }
}

/// A demoted master rejects writes without naming the new one. It redirects only calls that declare their keys.
#[tokio::test]
async fn a_request_to_a_demoted_master_is_redirected() {
    let cluster = RedisCluster::with(3, 1, &[]);
    let server = start(&cluster.url());
    let client = server.client().await;
    let key = shard("key", &cluster.url(), &["d", "user=user0"]);
    let mut counted = 0;
    // The service polls the topology at intervals. A request before the next poll is answered by the replica.
    let is_redirected_after_failover = async || {
        let master = cluster.owner(&key);
        let replica = cluster.nodes.iter().position(|node| {
            let nodes = node.cli(&["cluster", "nodes"]);
            nodes.lines().any(|line| line.contains("myself,slave") && line.contains(&cluster.id(master)))
        })?;
        let mut requested_at = None;
        wait_for("the two nodes to exchange roles", || {
            // Redis gives up a failover after 5 s, for example if the other masters do not vote in time.
            if requested_at.is_none_or(|at: Instant| at.elapsed() > Duration::from_secs(6)) {
                cluster.nodes[replica].cli(&["cluster", "failover"]);
                requested_at = Some(Instant::now());
            }
            let has_role = |node: usize, role| cluster.nodes[node].cli(&["role"]).starts_with(role);
            (has_role(replica, "master") && has_role(master, "slave")).then_some(())
        });
        let redirects = || server.metric("sluicegate_redis_failures_total{kind=\"readonly\"}");
        let before = redirects();
        let request =
            request_for("d", &[("user", "user0")]).descriptor(descriptor(&[("user", "user0"), ("path", "/")]));
        let passed = client.check(request).await.is_ok_and(|answer| answer.allowed());
        counted += u64::from(passed);
        (passed && redirects() > before).then_some(())
    };
    wait_for_async("a request to be redirected", is_redirected_after_failover).await;
    has_counted(&client, "user0", counted).await;
}

/// Users of other masters are not affected, and users of the dead master are served again after its replica has taken
/// over.
#[tokio::test]
async fn a_dead_master_affects_only_its_own_users() {
    let mut cluster = RedisCluster::with(3, 1, &[]);
    let server = start(&cluster.url());
    let client = server.client().await;
    let users = users();
    let key = shard("key", &cluster.url(), &["d", "user=user0"]);
    let dead = cluster.owner(&key);
    let replica = cluster.replica_of(dead);
    let other_users: Vec<_> = users
        .iter()
        .filter(|user| cluster.owner(&shard("key", &cluster.url(), &["d", &format!("user={user}")])) != dead)
        .cloned()
        .collect();
    let load = Load::start(&server, &other_users);
    assert_eq!(remaining(&client, "user0").await, [1_000_000, 1_000_000]);
    cluster.nodes[dead].kill();
    wait_for("the dead master to be detected", || {
        server.get("/readyz").contains("1 of 3 servers unavailable").then_some(())
    });
    let is_up =
        |node: &RedisServer| server.metric(&format!("sluicegate_redis_up{{server=\"127.0.0.1:{}\"}}", node.port));
    assert_eq!(cluster.nodes[..3].iter().map(is_up).sum::<f64>(), 2.0, "{}", server.get("/metrics"));
    wait_for("the replica to take over", || cluster.nodes[replica].cli(&["role"]).starts_with("master").then_some(()));
    let promoted = Instant::now();
    remaining(&client, "user0").await;
    assert!(promoted.elapsed() < Duration::from_secs(10), "{:?}", promoted.elapsed());
    for (user, decided, failed) in load.stop() {
        assert_eq!(failed, 0, "{user}: {}", server.log());
        has_counted(&client, &user, decided).await;
    }
    wait_for("all servers to be up", || server.get("/readyz").contains("redis, up").then_some(()));
}

#[tokio::test]
async fn the_service_follows_the_master_reported_by_sentinels() {
    let mut sentinels = Sentinels::start(None, None);
    let server = start(&sentinels.url());
    let client = server.client().await;
    assert_eq!(remaining(&client, "a").await, [1_000_000, 1_000_000]);
    let first = sentinels.master();
    sentinels.fail_over();
    wait_for("another master", || (sentinels.master() != first).then_some(()));
    wait_for("the service to follow", || {
        server.get("/readyz").contains(&format!("127.0.0.1:{}: up", sentinels.master())).then_some(())
    });
    assert!(client.check(request_for("d", &[("user", "a")])).await.unwrap().allowed());
    assert!(!server.get("/readyz").contains(&format!(":{first}")), "the service has no connection to the replica");
    let second = sentinels.master();
    let killed = sentinels.servers.iter_mut().find(|server| server.port == second).unwrap();
    killed.kill();
    wait_for("a third master", || (sentinels.master() != second).then_some(()));
    remaining(&client, "a").await;
}

#[tokio::test]
async fn sentinels_and_servers_have_separate_passwords() {
    let sentinels = Sentinels::start(Some("m@ster"), Some("s@ntinel"));
    let url = format!("redis+sentinel://:m%40ster@{}/main", sentinels.hosts());
    let server = Server::builder()
        .rules(rules(&[("d.yaml", RULES)]).path())
        .store(&url)
        .set("redis.sentinel.password", "s@ntinel")
        .set("redis.timeout", "1s")
        .start();
    assert_eq!(remaining(&server.client().await, "a").await, [1_000_000, 1_000_000]);
    assert!(!server.log().contains("m%40ster"), "{}", server.log());
}

/// The permissions in docs/guides/redis.md are enough.
#[tokio::test]
async fn the_documented_permissions_are_enough_in_a_cluster() {
    let (_cluster, url) = RedisCluster::with_documented_user(3);
    let server = start(&url);
    let client = server.client().await;
    for kind in ["fixed_window", "sliding_window", "sliding_log", "token_bucket", "leaky_bucket", "gcra"] {
        let text = format!(
            "domain: {kind}\ndescriptors: [{{key: k, rate_limit: {{unit: year, requests_per_unit: 3, algorithm: {kind}}}}}]"
        );
        let server =
            Server::builder().rules(rules(&[("d.yaml", &text)]).path()).store(&url).set("redis.timeout", "1s").start();
        let client = server.client().await;
        for (hits, is_refund) in [(1, false), (3, true), (3, false)] {
            let one = descriptor(&[("k", "v")]).hits(hits);
            let one = if is_refund { one.refund() } else { one };
            let answer = client.check(Request::new(kind).descriptor(one)).await;
            assert!(answer.is_ok_and(|answer| answer.allowed()), "{kind}: {}", server.log());
        }
    }
    assert_eq!(remaining(&client, "a").await, [1_000_000, 1_000_000]);
    // Overrides of operators need no other permissions either.
    let operator = Operator::with(Server::builder().store(&url));
    wait_for("an override to be set", || operator.try_ctl(&["switch", "shadow", "everything"]).ok());
    operator.ctl(&["switch", "clear", "everything"]);
    assert_eq!(operator.ctl(&["audit"]).matches("alice").count(), 2);
}

#[tokio::test]
async fn a_cluster_may_announce_host_names_or_no_addresses() {
    for announced in [
        &["--cluster-announce-hostname", "localhost", "--cluster-preferred-endpoint-type", "hostname"][..],
        &["--cluster-preferred-endpoint-type", "unknown-endpoint"],
    ] {
        let cluster = RedisCluster::with(3, 0, announced);
        let server = start(&cluster.url());
        let client = server.client().await;
        for user in users() {
            assert_eq!(remaining(&client, &user).await, [1_000_000, 1_000_000], "{announced:?}: {}", server.log());
        }
    }
}

#[tokio::test]
async fn limits_per_second_can_have_a_separate_store() {
    let (main, short) = (RedisServer::start(), RedisCluster::start());
    let folder = rules(&[("d.yaml", RULES)]);
    let builder = Server::builder()
        .rules(folder.path())
        .store(&main.url())
        .set("per_second.store", &short.url())
        .set("per_second.redis.timeout", "1s")
        .set("redis.timeout", "1s");
    let operator = Operator::with(builder);
    let client = operator.server.client().await;
    let request = request_for("d", &[("user", "u")]).descriptor(descriptor(&[("second", "s")]));
    assert!(client.check(request).await.unwrap().allowed());
    assert_eq!(main.cli(&["keys", "*"]), "sluicegate:{d|user=u}|user|fw:31536000");
    // The key expires after its second.
    let keys = wait_for_async("the key of the limit per second", async || {
        client.check(request_for("d", &[("second", "s")])).await.unwrap();
        let keys = short.nodes.iter().map(|node| node.cli(&["keys", "*"]));
        Some(keys.filter(|keys| !keys.is_empty()).collect::<Vec<_>>()).filter(|keys| !keys.is_empty())
    })
    .await;
    assert_eq!(keys, ["sluicegate:{d|second=s}fw:1"]);
    // `ctl inspect` reads the counter from its own store, within its second.
    wait_for_async("the counter to be inspected", async || {
        client.check(request_for("d", &[("second", "s")])).await.unwrap();
        operator.ctl(&["inspect", "d", "second=s"]).contains("used 1,").then_some(())
    })
    .await;
    let metrics = operator.server.get("/metrics");
    let calls = metrics.lines().find(|line| line.starts_with("sluicegate_store_seconds_count"));
    assert!(calls.is_some_and(|calls| !calls.ends_with(" 0")), "{calls:?}");
}

/// A request with limits in several slots is one call to each node.
#[tokio::test]
async fn limits_of_several_users_are_decided_in_one_call_per_node() {
    let cluster = RedisCluster::start();
    let server = start(&cluster.url());
    let client = server.client().await;
    let request =
        || users().iter().fold(Request::new("d"), |request, user| request.descriptor(descriptor(&[("user", user)])));
    assert!(client.check(request()).await.unwrap().allowed());
    cluster.nodes.iter().for_each(|node| drop(node.cli(&["config", "resetstat"])));
    assert!(client.check(request()).await.unwrap().allowed());
    let stats = |node: &RedisServer| node.cli(&["info", "commandstats"]);
    let calls: Vec<_> = cluster.nodes.iter().map(stats).filter(|stats| stats.contains("cmdstat_evalsha")).collect();
    assert!(!calls.is_empty() && calls.iter().all(|stats| stats.contains("cmdstat_evalsha:calls=1,")), "{calls:?}");
}

/// The log explains why calls fail if the address of one node is used without `+cluster`.
#[tokio::test]
async fn a_node_of_a_cluster_cannot_be_used_as_a_single_server() {
    let cluster = RedisCluster::start();
    let server = start(&cluster.nodes[0].url());
    let client = server.client().await;
    for user in users() {
        let _ = client.check(request_for("d", &[("user", &user)])).await;
    }
    wait_for("the message", || server.log().contains("\"kind\":\"moved\"").then_some(()));
}
