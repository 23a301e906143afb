//! The items in memcached and their lifetime, and limits that many callers in two processes share exactly.
//! `histories.rs` checks that memory and memcached return the same decisions.

use std::time::Duration;

use sluicegate::{
    algorithm::{Algorithm, MaxHits, Micros, fixed_window::FixedWindow, sliding_log::SlidingLog},
    metrics::WorkerId,
    store::{Charge, Counter, Local, Memcached, Store, StoreError, TimeSource, local, memcached},
};

use crate::support::{
    DEADLINE, MemcachedServer, Operator, Server,
    certificates::{Authority, Files},
    descriptor,
    raw_client::Request,
    request_for, rules, unwrap_decisions, wait_for,
};

/// Connects without a deny cache, so that every hit is sent to memcached.
pub(crate) async fn connect(url: &str) -> Local<Memcached> {
    connect_with(url, 0).await
}

/// Connects with a deny cache that uses denials as long as they are valid.
pub(crate) async fn connect_with_deny_cache(url: &str) -> Local<Memcached> {
    connect_with(url, 10_000).await
}

async fn connect_with(url: &str, max_denials: usize) -> Local<Memcached> {
    let settings = memcached::Settings { timeout: DEADLINE, ..memcached::Settings::default() };
    let memcached = memcached::Setup::new(url, &settings, memcached::Metrics::new(1)).unwrap().connect(WorkerId(0));
    assert!(memcached.wait_until_up(DEADLINE).await);
    let deny_cache = local::DenyCacheSettings { max_entries: max_denials, max_age: Duration::MAX };
    let (leases, eventual) = (local::LeaseSettings::default(), local::EventualSettings::default());
    let metrics = local::Metrics::new(1);
    let state = local::LocalState::new(&deny_cache, &leases, &eventual, TimeSource::Caller, metrics);
    Local::new(memcached, state, WorkerId(0))
}

fn window(limit: u64, seconds: u64) -> Algorithm {
    FixedWindow::new(MaxHits::hard(limit), Micros::from_secs(seconds), true).unwrap().into()
}

#[tokio::test]
async fn items_have_readable_keys_and_expire_by_themselves() {
    let server = MemcachedServer::start();
    let memcached = connect(&server.url()).await;
    // 30 s into a window.
    let now = Micros::from_secs(1_763_672_430);
    let counter = Counter::new(b"{api|user=alice}fw:60", window(10, 60));
    for _ in 0..3 {
        unwrap_decisions(memcached.apply(&[counter.take(2)], Charge::Each, now).await);
    }
    // The window's number modulo 900,000, plus one; then ten digits of the count. The window ends in 30 s, and the item
    // a minute later.
    let reply = server.command("mg sluicegate:{api|user=alice}fw:60 v t");
    let number = 1_763_672_400 / 60 % 900_000 + 1;
    let (head, value) = reply.split_once("\r\n").unwrap();
    assert_eq!(value, format!("{number}0000000006"));
    let ttl: u64 = head.rsplit_once('t').unwrap().1.parse().unwrap();
    assert!((80..=90).contains(&ttl), "{reply}");
    assert_eq!(server.statistic("incr_hits"), 2, "one command for each request after the first one");
    assert_eq!(server.statistic("cmd_set"), 0);
    let peek = Counter::new(b"{api|user=bob}fw:60", window(10, 60));
    unwrap_decisions(memcached.apply(&[peek.take(0).peek()], Charge::Each, now).await);
    assert_eq!(server.statistic("curr_items"), 1, "a peek stores nothing");
}

/// Lifetimes of more than 30 days are times since 1970 in the protocol.
#[tokio::test]
async fn a_counter_of_a_year_lives_for_a_year() {
    let server = MemcachedServer::start();
    let memcached = connect(&server.url()).await;
    let now = Micros::from_secs(server.statistic("time"));
    let year = Micros::from_secs(31_536_000);
    let log = SlidingLog::new(MaxHits::hard(10), year, Micros::ZERO, false).unwrap();
    unwrap_decisions(memcached.apply(&[Counter::new(b"log", log).take(1)], Charge::Each, now).await);
    let reply = server.command("mg sluicegate:log t");
    let ttl: u64 = reply.rsplit_once('t').unwrap().1.parse().unwrap();
    assert!((31_535_900..=31_536_061).contains(&ttl), "{reply}");
}

#[tokio::test]
async fn a_name_that_is_no_key_is_counted_and_deleted_by_its_digest() {
    let server = MemcachedServer::start();
    let memcached = connect(&server.url()).await;
    let now = Micros::from_secs(1_763_672_430);
    for name in [vec![b'x'; 1_000], b"two words\r\nmd x".to_vec(), "ä".into()] {
        let counter = Counter::new(name.clone(), window(10, 60));
        for used in 1..=2 {
            let decisions = unwrap_decisions(memcached.apply(&[counter.take(1)], Charge::Each, now).await);
            assert_eq!(decisions[0].used, used);
        }
        assert_eq!(memcached.delete(&name, false).await, Ok(true));
        assert_eq!(memcached.delete(&name, false).await, Ok(false));
    }
}

/// A state that is larger than the server's largest item.
#[tokio::test]
async fn a_state_that_does_not_fit_into_an_item_is_an_error() {
    let server = MemcachedServer::with(&["-I", "1k", "-o", "slab_chunk_max=512"], None);
    let memcached = connect(&server.url()).await;
    let now = Micros::from_secs(1_763_672_430);
    let log = SlidingLog::new(MaxHits::hard(1_000), Micros::from_secs(60), Micros::ZERO, false).unwrap();
    let counter = Counter::new(b"log", log);
    let mut passed = 0;
    let error = loop {
        match memcached.apply(&[counter.take(10)], Charge::Each, now).await.pop().unwrap() {
            Ok(_) => passed += 10,
            Err(error) => break error,
        }
        assert!(passed < 1_000);
    };
    assert_eq!(error, StoreError::Rejected);
    let small = Counter::new(b"w", window(10, 60));
    unwrap_decisions(memcached.apply(&[small.take(1)], Charge::Each, now).await);
}

const ALGORITHMS: [(&str, &str); 8] = [
    ("window", "{unit: year, requests_per_unit: 1000}"),
    ("uncounted", "{unit: year, requests_per_unit: 1000, count_denied: false}"),
    ("calendar", "{unit: year, requests_per_unit: 1000, window: calendar}"),
    ("sliding", "{unit: year, requests_per_unit: 1000, algorithm: sliding_window}"),
    ("log", "{unit: year, requests_per_unit: 1000, algorithm: sliding_log}"),
    ("bucket", "{unit: year, requests_per_unit: 1000, algorithm: token_bucket}"),
    ("gcra", "{unit: year, requests_per_unit: 1000, algorithm: gcra}"),
    ("leased", "{unit: year, requests_per_unit: 1000, algorithm: token_bucket, consistency: leased}"),
];

/// Two instances of the service, one memcached, 10,000 concurrent requests on one key with a limit of 1,000.
#[tokio::test]
async fn two_instances_share_every_limit_exactly() {
    let memcached = MemcachedServer::start();
    let mut text = "domain: d\ndescriptors:\n".to_owned();
    for (key, limit) in ALGORITHMS {
        text += &format!("- {{key: {key}, rate_limit: {limit}}}\n");
    }
    let rules = rules(&[("d.yaml", &text)]);
    let start = || {
        let builder = Server::builder().rules(rules.path()).store(&memcached.url());
        // With a shorter time, a busy machine decides some requests by `on_error`.
        builder.set("memcached.timeout", "30s").start()
    };
    let servers = [start(), start()];
    for (key, _) in ALGORITHMS {
        let mut calls = tokio::task::JoinSet::new();
        for server in &servers {
            for _ in 0..5 {
                let client = server.client().await;
                for _ in 0..1_000 {
                    let client = client.clone();
                    calls
                        .spawn(async move { client.check(request_for("d", &[(key, "hot")])).await.unwrap().allowed() });
                }
            }
        }
        let answers = calls.join_all().await;
        assert_eq!(answers.len(), 10_000);
        let passed = answers.into_iter().filter(|allowed| *allowed).count();
        // A lease that its instance has not used up is missing in the other one.
        let is_exact = if key == "leased" { (900..=1_000).contains(&passed) } else { passed == 1_000 };
        assert!(is_exact, "{key}: {passed}");
    }
    let errors: f64 =
        servers.iter().map(|server| server.metric("sluicegate_store_errors_total{kind=\"timeout\"}")).sum();
    assert_eq!(errors, 0.0);
}

const SEVERAL: &str = "
domain: d
descriptors:
- key: user
  rate_limits:
  - { unit: year, requests_per_unit: 5, name: window }
  - { unit: year, requests_per_unit: 8, name: bucket, algorithm: token_bucket }
  - { unit: year, requests_per_unit: 20, name: calendar, window: calendar }
";

/// The limits of a user are on one server, because they have the same shard key.
#[tokio::test]
async fn a_request_is_charged_to_all_limits_of_its_rule_or_to_none() {
    let nodes = [MemcachedServer::start(), MemcachedServer::start(), MemcachedServer::start()];
    let ports = nodes.each_ref().map(|node| format!("127.0.0.1:{}", node.port));
    let rules = rules(&[("d.yaml", SEVERAL)]);
    let store = format!("memcached://{}", ports.join(","));
    let start = || {
        let builder = Server::builder().rules(rules.path()).store(&store).set("memcached.timeout", "30s");
        builder.set("response.dynamic_metadata", "true").start()
    };
    let servers = [start(), start()];
    let mut calls = tokio::task::JoinSet::new();
    for server in &servers {
        let client = server.client().await;
        for number in 0..1_400 {
            let client = client.clone();
            let user = format!("u{}", number % 200);
            calls.spawn(async move { client.check(request_for("d", &[("user", &user)])).await.unwrap().allowed() });
        }
    }
    let passed = calls.join_all().await.into_iter().filter(|allowed| *allowed).count();
    assert_eq!(passed, 200 * 5);
    let client = servers[0].client().await;
    for user in 0..200 {
        let user = format!("u{user}");
        let peek = Request::new("d").descriptor(descriptor(&[("user", &user)]).hits(0));
        let status = client.check(peek).await.unwrap().exact().remove(0);
        let mut remaining: Vec<_> = status.others.iter().map(|other| other.remaining.unwrap()).collect();
        remaining.push(status.remaining.unwrap());
        remaining.sort_unstable();
        assert_eq!(remaining, [0, 3, 15], "{user}");
    }
    assert!(nodes.iter().all(|node| node.statistic("curr_items") > 100), "all servers have counters");
}

const CHARGE_ALL: &str = "
domain: d
descriptors:
- {key: user, rate_limit: {unit: year, requests_per_unit: 5}}
- {key: address, rate_limit: {unit: year, requests_per_unit: 3, algorithm: gcra}}
";

/// Descriptors have their own shard keys, so a request can have counters on several servers.
#[tokio::test]
async fn hits_on_several_servers_are_rolled_back_if_one_is_denied() {
    let nodes = [MemcachedServer::start(), MemcachedServer::start(), MemcachedServer::start()];
    let ports = nodes.each_ref().map(|node| format!("127.0.0.1:{}", node.port));
    let rules = rules(&[("d.yaml", CHARGE_ALL)]);
    let builder = Server::builder().rules(rules.path()).store(&format!("memcached://{}", ports.join(",")));
    let server = builder.set("rules.charge_all", "true").set("memcached.timeout", "30s").start();
    let client = server.client().await;
    for number in 0..40 {
        let value = number.to_string();
        let check = async || {
            let request = Request::new("d").descriptor(descriptor(&[("user", &value)]));
            client.check(request.descriptor(descriptor(&[("address", &value)]))).await.unwrap()
        };
        for _ in 0..3 {
            assert!(check().await.allowed());
        }
        for _ in 0..3 {
            assert!(!check().await.allowed());
        }
        let user = client.check(request_for("d", &[("user", &value)])).await.unwrap();
        assert_eq!(user.remaining(), Some(1), "{number}: three were taken, and this one");
    }
    assert_eq!(server.metric("sluicegate_memcached_rollback_failures_total"), 0.0);
}

#[tokio::test]
async fn operators_see_and_reset_counters_in_memcached() {
    let memcached = MemcachedServer::start();
    let rules =
        rules(&[("d.yaml", "domain: d\ndescriptors: [{key: k, rate_limit: {unit: year, requests_per_unit: 5}}]")]);
    let operator = Operator::start(rules.path(), &memcached.url());
    let client = operator.server.client().await;
    for _ in 0..3 {
        client.check(request_for("d", &[("k", "v")])).await.unwrap();
    }
    let output = operator.ctl(&["inspect", "d", "k=v"]);
    assert!(output.contains(&format!("127.0.0.1:{}", memcached.port)) && output.contains('3'), "{output}");
    operator.ctl(&["reset", "d", "k=v", "--reason", "test"]);
    assert_eq!(client.check(request_for("d", &[("k", "v")])).await.unwrap().remaining(), Some(4));
    let ready = operator.server.get("/readyz");
    assert!(ready.contains("memcached, up") && ready.contains(": up"), "{ready}");
}

#[test]
fn connections_with_tls_trust_the_configured_authority_and_name() {
    let authority = Authority::new("memcached");
    let files = Files::new();
    let (certificate, key) = authority.sign_for(&["127.0.0.1", "memcached"]);
    let certificate = files.write("cert", &certificate);
    let key = files.write("key", &key);
    let ca = files.write("ca", &authority.pem);
    let other = files.write("other", &Authority::new("other").pem);
    let options = format!("ssl_chain_cert={certificate},ssl_key={key},ssl_ca_cert={ca},ssl_verify_mode=2");
    let memcached = MemcachedServer::with(&["-Z", "-o", &options], None);
    let rules =
        rules(&[("d.yaml", "domain: d\ndescriptors: [{key: k, rate_limit: {unit: year, requests_per_unit: 5}}]")]);
    let start = |scheme: &str, ca: &str, settings: &[(&str, &str)]| {
        let store = format!("{scheme}://127.0.0.1:{}", memcached.port);
        let mut builder = Server::builder().rules(rules.path()).store(&store);
        if scheme == "memcacheds" {
            let tls = [("ca_file", ca), ("cert_file", &certificate), ("key_file", &key)];
            for (name, value) in tls {
                builder = builder.set(&format!("memcached.tls.{name}"), value);
            }
        }
        for (name, value) in settings {
            builder = builder.set(name, value);
        }
        builder.start()
    };
    for settings in [&[][..], &[("memcached.tls.server_name", "memcached")], &[("memcached.tls.verify_name", "false")]]
    {
        let server = start("memcacheds", &ca, settings);
        wait_for("the connection", || server.get("/readyz").contains("memcached, up").then_some(()));
    }
    for (scheme, ca, settings) in [
        ("memcacheds", &other, &[][..]),
        ("memcacheds", &other, &[("memcached.tls.verify_name", "false")]),
        ("memcacheds", &ca, &[("memcached.tls.server_name", "another.host")]),
    ] {
        let server = start(scheme, ca, settings);
        wait_for("the reason", || server.log().contains("\"kind\":\"tls\"").then_some(()));
    }
    let server = start("memcached", &ca, &[]);
    wait_for("the reason", || server.log().contains("memcached server is unavailable").then_some(()));
}
