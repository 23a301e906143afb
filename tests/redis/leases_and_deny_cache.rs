//! What an instance decides without asking the store that it shares with others.

use crate::support::{
    RedisServer, Server, descriptor,
    plain::{Answer, Client, Request},
    rules, until_async,
};

const RULES: &str = "
domain: d
descriptors:
- key: window
  rate_limit: {unit: year, requests_per_unit: 5}
- key: log
  rate_limit: {unit: year, requests_per_unit: 5, algorithm: sliding_log}
- key: gcra
  rate_limit: {unit: year, requests_per_unit: 5, algorithm: gcra}
- key: dark
  shadow_mode: true
  rate_limit: {unit: year, requests_per_unit: 5}
";

const STUBBORN: &str = "
- key: stubborn
  rate_limit: {unit: year, requests_per_unit: 5, algorithm: gcra, count_denied: true}
";

pub(crate) fn start(redis: &RedisServer, text: &str, settings: &[(&str, &str)]) -> Server {
    let folder = rules(&[("d.yaml", text)]);
    let builder = Server::builder().rules(folder.path()).store(&redis.url()).set("redis.timeout", "20s");
    settings.iter().fold(builder, |builder, (name, value)| builder.set(name, value)).start()
}

pub(crate) fn one(key: &str, hits: u64) -> Request {
    Request::new("d").descriptor(descriptor(&[(key, "x")]).hits(hits))
}

fn back(key: &str, hits: u64) -> Request {
    Request::new("d").descriptor(descriptor(&[(key, "x")]).hits(hits).give_back())
}

pub(crate) async fn check(client: &Client, request: Request) -> Answer {
    client.check(request).await.unwrap()
}

/// Calls that this has cost.
async fn calls(redis: &RedisServer, what: impl AsyncFnOnce()) -> u64 {
    redis.cli(&["config", "resetstat"]);
    what().await;
    let stats = redis.cli(&["info", "commandstats"]);
    let calls = stats.split_once("cmdstat_evalsha:calls=").map(|(_, rest)| rest.split(',').next().unwrap_or_default());
    calls.map_or(0, |calls| calls.parse().unwrap())
}

#[tokio::test]
async fn what_is_refused_costs_redis_nothing_until_it_may_have_changed() {
    let redis = RedisServer::start();
    let long = [("deny_cache.max_age", "1h"), ("response.dynamic_metadata", "true")];
    let (server, other) = (start(&redis, RULES, &long), start(&redis, RULES, &[]));
    let (client, elsewhere) = (server.client().await, other.client().await);
    for key in ["window", "log", "gcra"] {
        // A larger cost than passes, and then one that does.
        assert!(check(&client, one(key, 4)).await.allowed());
        if key != "window" {
            assert!(!check(&client, one(key, 3)).await.allowed(), "{key}");
        }
        assert!(check(&client, one(key, 1)).await.allowed(), "{key}: what would pass is asked");
        let refused = check(&client, one(key, 1)).await;
        let asked = calls(&redis, async || {
            for cost in [1, 2, 9].into_iter().cycle().take(300) {
                let known = check(&client, one(key, cost)).await;
                assert_eq!((known.allowed(), known.remaining()), (false, refused.remaining()), "{key}: {cost}");
                let (first, now) = (&refused.exact()[0], &known.exact()[0]);
                assert!(
                    now.reset <= first.reset && (cost > 1 || now.retry_after <= first.retry_after),
                    "{key}: {now:?}"
                );
                assert_eq!(now.retry_after.is_some(), cost <= 5, "{key}: {cost}");
            }
        })
        .await;
        assert_eq!(asked, 0, "{key}");
        let metric =
            |name: &str| server.metric(&format!("ratelimit_service_rate_limit_{name}{{domain=\"d\",key1=\"{key}\"}}"));
        assert_eq!(metric("over_limit_with_local_cache"), 1_200.0, "{key}");
        let before = if key == "window" { 1.0 } else { 4.0 };
        assert_eq!((metric("over_limit"), metric("within_limit")), (1_200.0 + before, 5.0), "{key}");
        // Where another instance gives back it is not noticed, here it is.
        check(&elsewhere, back(key, 2)).await;
        assert!(!check(&client, one(key, 1)).await.allowed(), "{key}");
        check(&client, back(key, 1)).await;
        assert!(check(&client, one(key, 1)).await.allowed(), "{key}");
    }
    assert_eq!(server.metric("sluicegate_deny_cache_denials_total"), 903.0);
}

#[tokio::test]
async fn a_refusal_is_asked_for_again_when_it_is_old() {
    let redis = RedisServer::start();
    let server = start(&redis, RULES, &[("deny_cache.max_age", "50ms")]);
    let other = start(&redis, RULES, &[]);
    let (client, elsewhere) = (server.client().await, other.client().await);
    check(&client, one("gcra", 5)).await;
    assert!(!check(&client, one("gcra", 1)).await.allowed());
    check(&elsewhere, back("gcra", 5)).await;
    until_async("the refund to be noticed", async || check(&client, one("gcra", 1)).await.allowed().then_some(()))
        .await;
}

/// Where a refused hit makes the wait longer, each has to be counted; and where nothing is to be remembered, nothing is.
#[tokio::test]
async fn refusals_that_count_are_asked_every_time() {
    let redis = RedisServer::start();
    let remembering = start(&redis, &[RULES, STUBBORN].concat(), &[]);
    let forgetful = start(&redis, RULES, &[("deny_cache.max_entries", "0")]);
    for (server, key) in [(&remembering, "stubborn"), (&forgetful, "gcra")] {
        let client = server.client().await;
        check(&client, one(key, 5)).await;
        let asked = calls(&redis, async || {
            for _ in 0..20 {
                assert!(!check(&client, one(key, 1)).await.allowed());
            }
        });
        assert_eq!(asked.await, 20, "{key}");
        assert_eq!(server.metric("sluicegate_deny_cache_denials_total"), 0.0, "{key}");
    }
}

#[tokio::test]
async fn of_several_limits_only_those_are_asked_that_may_pass() {
    let redis = RedisServer::start();
    for charge in ["each", "all"] {
        let text = RULES.replace("domain: d", &format!("domain: d\ncharge: {charge}"));
        let server = start(&redis, &text, &[("deny_cache.max_age", "1h")]);
        let client = server.client().await;
        check(&client, one("gcra", 5)).await;
        assert!(!check(&client, one("gcra", 1)).await.allowed());
        let both = |keys: [&str; 2]| {
            keys.iter().fold(Request::new("d"), |request, key| request.descriptor(descriptor(&[(*key, "x")])))
        };
        let asked = calls(&redis, async || {
            for hit in 1..=3 {
                let answer = check(&client, both(["log", "gcra"])).await;
                // Charged for all, the other only looks.
                let left = if charge == "all" { 5 } else { 5 - hit };
                assert_eq!((answer.allowed(), answer.0.statuses[0].limit_remaining), (false, left), "{charge}");
            }
        });
        assert_eq!(asked.await, 3, "{charge}");
        // A refusal that holds nobody back keeps nobody from paying.
        check(&client, one("dark", 5)).await;
        check(&client, one("dark", 1)).await;
        let answer = check(&client, both(["dark", "log"])).await;
        let left = if charge == "all" { 4 } else { 1 };
        assert_eq!((answer.allowed(), answer.0.statuses[1].limit_remaining), (true, left), "{charge}");
        redis.cli(&["flushall"]);
    }
}

pub(crate) const LEASED: &str = "
domain: d
descriptors:
- key: window
  rate_limit: {unit: year, requests_per_unit: 20000, consistency: leased}
- key: sliding
  rate_limit: {unit: year, requests_per_unit: 20000, algorithm: sliding_window, buckets: 12, consistency: leased}
- key: bucket
  rate_limit: {unit: year, requests_per_unit: 20000, algorithm: token_bucket, consistency: leased}
- key: other
  rate_limit: {unit: year, requests_per_unit: 1000000}
";

/// How many of so many requests pass, asked by several callers at once until one of them is refused.
pub(crate) async fn spend(client: &Client, key: &'static str, each: u64) -> u64 {
    let mut callers = tokio::task::JoinSet::new();
    for _ in 0..16 {
        let client = client.clone();
        callers.spawn(async move {
            let mut passed = 0;
            while passed < each && check(&client, one(key, 1)).await.allowed() {
                passed += 1;
            }
            passed
        });
    }
    callers.join_all().await.into_iter().sum()
}

/// Three instances that take quota in advance let exactly the limit through, at a call for many decisions.
#[tokio::test]
async fn leases_add_up_to_the_limit_and_no_more() {
    let redis = RedisServer::start();
    let servers: Vec<_> = (0..3).map(|_| start(&redis, LEASED, &[])).collect();
    for key in ["window", "sliding", "bucket"] {
        // What comes back to a bucket after its lease has ended has drained for a moment, and is a little less than a hit.
        let all = if key == "bucket" { 19_980..=20_000 } else { 20_000..=20_000 };
        redis.cli(&["config", "resetstat"]);
        let mut passed = 0;
        // One has most of the traffic.
        for (server, each) in servers.iter().zip([400, 100, 50]) {
            passed += spend(&server.client().await, key, each).await;
        }
        assert_eq!(passed, 16 * 550, "{key}: below half the limit nobody is refused");
        let stats = redis.cli(&["info", "commandstats"]);
        let calls = stats.split_once("cmdstat_evalsha:calls=").unwrap().1.split(',').next().unwrap();
        let calls: u64 = calls.parse().unwrap();
        assert!(calls < passed / 10, "{key}: {calls} calls for {passed} decisions");
        assert!(servers[0].metric("sluicegate_lease_decisions_total") > 5_000.0, "{}", servers[0].get("/metrics"));
        // What others hold comes back, and the rest can be had to the last hit.
        until_async("the whole limit to be spent", async || {
            for server in &servers {
                passed += spend(&server.client().await, key, u64::MAX).await;
            }
            assert!(passed <= 20_000, "{key}: {passed}");
            all.contains(&passed).then_some(())
        })
        .await;
        let within: f64 = servers
            .iter()
            .map(|server| {
                server.metric(&format!("ratelimit_service_rate_limit_within_limit{{domain=\"d\",key1=\"{key}\"}}"))
            })
            .sum();
        assert_eq!(within, passed as f64, "{key}: each hit is counted once");
    }
}

/// Only what may be taken in advance is, whatever it is asked for with.
#[tokio::test]
async fn a_counter_beside_a_leased_one_stays_exact() {
    let redis = RedisServer::start();
    let server = start(&redis, LEASED, &[]);
    let client = server.client().await;
    let mut callers = tokio::task::JoinSet::new();
    for _ in 0..16 {
        let client = client.clone();
        callers.spawn(async move {
            for _ in 0..100 {
                let both = one("window", 1).descriptor(descriptor(&[("other", "x")]).hits(1));
                assert!(check(&client, both).await.allowed());
            }
        });
    }
    callers.join_all().await;
    assert!(server.metric("sluicegate_lease_decisions_total") > 0.0);
    assert_eq!(check(&client, one("other", 0)).await.remaining(), Some(1_000_000 - 1_600));
}

/// What is paid from a lease comes back when another limit of the same request refuses, and the answer says so.
#[tokio::test]
async fn a_lease_pays_nothing_for_what_is_refused() {
    let redis = RedisServer::start();
    let server = start(&redis, &LEASED.replace("domain: d", "domain: d\ncharge: all"), &[]);
    let client = server.client().await;
    until_async("an answer of a lease", async || {
        spend(&client, "window", 60).await;
        let before = server.metric("sluicegate_lease_decisions_total");
        let left = check(&client, one("window", 0)).await.remaining();
        let refused = one("window", 5).descriptor(descriptor(&[("other", "x")]).hits(2_000_000));
        let refused = check(&client, refused).await;
        assert!(!refused.allowed());
        (server.metric("sluicegate_lease_decisions_total") >= before + 2.0).then_some(())?;
        assert_eq!(Some(refused.0.statuses[0].limit_remaining), left);
        Some(())
    })
    .await;
}

/// What a counter in Redis stands at: of a fixed window, its last ten digits.
pub(crate) fn counted(redis: &RedisServer) -> u64 {
    let key = redis.cli(&["keys", "*window*"]);
    redis.cli(&["get", &key]).parse::<u64>().unwrap() % 10_000_000_000
}

#[tokio::test]
async fn what_was_not_spent_is_given_back() {
    let redis = RedisServer::start();
    for orderly in [true, false] {
        let server = start(&redis, LEASED, &[]);
        let passed = spend(&server.client().await, "window", 60).await;
        assert!(server.metric("sluicegate_lease_decisions_total") > 0.0 && counted(&redis) > passed);
        if orderly {
            server.signal("TERM");
            server.wait().await;
            assert_eq!(counted(&redis), passed, "at the end of the process");
        } else {
            let mut spent = passed;
            until_async("it to come back by itself", async || (counted(&redis) == passed).then_some(())).await;
            spent += spend(&server.client().await, "window", 1).await;
            until_async("no more than that", async || (counted(&redis) == spent).then_some(())).await;
            assert!(server.metric("sluicegate_lease_returned_hits_total") > 0.0);
        }
        redis.cli(&["flushall"]);
    }
}

/// What this instance holds is no reason to refuse: a cost that is larger takes it along, also with another limit beside.
#[tokio::test]
async fn a_large_cost_is_paid_by_the_lease_and_the_store_together() {
    let redis = RedisServer::start();
    for charge in ["each", "all"] {
        let text = LEASED.replace("domain: d", &format!("domain: d\ncharge: {charge}"));
        let server = start(&redis, &text, &[]);
        let client = server.client().await;
        let beside = |hits: u64| {
            let hits = u32::try_from(hits).unwrap();
            let other = Request::new("d").descriptor(descriptor(&[("other", "x")]));
            other.descriptor(descriptor(&[("window", "x")])).hits(hits)
        };
        let mut passed = 0;
        until_async("something to be held", async || {
            passed += spend(&client, "window", 4).await;
            (counted(&redis) > passed).then_some(())
        })
        .await;
        if charge == "all" {
            // More than there is takes nothing, and what is held is still there.
            assert!(!check(&client, beside(20_001 - passed)).await.allowed());
        }
        assert!(check(&client, beside(20_000 - passed)).await.allowed(), "{charge}");
        assert!(!check(&client, one("window", 1)).await.allowed(), "{charge}");
        redis.cli(&["flushall"]);
    }
}

/// Three instances, of which one is killed and one stands still for a while: what they held is lost until the window
/// ends, and nobody gets more for it.
#[tokio::test]
async fn instances_that_die_take_their_leases_with_them() {
    let redis = RedisServer::start();
    let servers: Vec<_> = (0..3).map(|_| start(&redis, LEASED, &[])).collect();
    let mut callers = tokio::task::JoinSet::new();
    for server in &servers {
        for _ in 0..8 {
            let client = server.client().await;
            callers.spawn(async move {
                let mut passed = 0;
                while let Ok(answer) = client.check(one("window", 1)).await
                    && answer.allowed()
                {
                    passed += 1;
                }
                passed
            });
        }
    }
    until_async("leases", async || (servers[0].metric("sluicegate_lease_decisions_total") > 100.0).then_some(())).await;
    servers[0].signal("KILL");
    servers[1].signal("STOP");
    let held = counted(&redis);
    until_async("the third to go on", async || (counted(&redis) > held + 1_000).then_some(())).await;
    servers[1].signal("CONT");
    let passed: u64 = callers.join_all().await.into_iter().sum();
    let client = servers[2].client().await;
    let rest = spend(&client, "window", u64::MAX).await;
    assert!(passed + rest <= 20_000, "{passed} + {rest}");
    assert!(passed + rest > 15_000, "{passed} + {rest}");
}

/// Redis is gone: leases are spent, and then `on_error` decides.
#[tokio::test]
async fn a_lease_outlives_its_redis() {
    let mut redis = RedisServer::start();
    let server = start(&redis, LEASED, &[("redis.timeout", "100ms")]);
    let client = server.client().await;
    let refill = async || {
        spend(&client, "window", 60).await;
        let before = server.metric("sluicegate_lease_decisions_total");
        check(&client, one("window", 1)).await;
        (server.metric("sluicegate_lease_decisions_total") > before).then_some(())
    };
    until_async("a lease", refill).await;
    redis.kill();
    let mut passed = 0;
    while client.check(one("window", 1)).await.is_ok_and(|answer| answer.allowed()) {
        passed += 1;
        assert!(passed <= 20_000 / 4, "a quarter of what remains at most");
    }
    assert!(passed > 0);
    assert!(client.check(one("window", 1)).await.is_err());
}
