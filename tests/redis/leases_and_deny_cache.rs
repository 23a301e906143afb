//! Decisions that an instance makes without a call to the shared store: the deny cache and leases.

use crate::support::{
    RedisServer, Server, descriptor,
    raw_client::{Answer, Client, Request},
    rules, wait_for_async,
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

const COUNTS_DENIALS: &str = "
- key: stubborn
  rate_limit: {unit: year, requests_per_unit: 5, algorithm: gcra, count_denied: true}
";

pub(crate) fn start(redis: &RedisServer, text: &str, settings: &[(&str, &str)]) -> Server {
    let folder = rules(&[("d.yaml", text)]);
    let builder = Server::builder().rules(folder.path()).store(&redis.url());
    settings.iter().fold(builder, |builder, (name, value)| builder.set(name, value)).start()
}

/// Builds a request for one counter.
pub(crate) fn single_request(key: &str, hits: u64) -> Request {
    Request::new("d").descriptor(descriptor(&[(key, "x")]).hits(hits))
}

/// Builds a refund for one counter.
fn refund(key: &str, hits: u64) -> Request {
    Request::new("d").descriptor(descriptor(&[(key, "x")]).hits(hits).refund())
}

pub(crate) async fn check(client: &Client, request: Request) -> Answer {
    client.check(request).await.unwrap()
}

/// Returns the number of script calls that Redis receives during an action.
async fn calls(redis: &RedisServer, action: impl AsyncFnOnce()) -> u64 {
    redis.cli(&["config", "resetstat"]);
    action().await;
    let stats = redis.cli(&["info", "commandstats"]);
    let calls = stats.split_once("cmdstat_evalsha:calls=").map(|(_, rest)| rest.split(',').next().unwrap_or_default());
    calls.map_or(0, |calls| calls.parse().unwrap())
}

#[tokio::test]
async fn a_denial_causes_no_calls_until_the_counter_may_have_changed() {
    let redis = RedisServer::start();
    let long = [("deny_cache.max_age", "1h"), ("response.dynamic_metadata", "true")];
    let (server, other) = (start(&redis, RULES, &long), start(&redis, RULES, &[]));
    let (client, other_client) = (server.client().await, other.client().await);
    for key in ["window", "log", "gcra"] {
        // A cost that is too large is denied, and then a smaller one is allowed.
        assert!(check(&client, single_request(key, 4)).await.allowed());
        if key != "window" {
            assert!(!check(&client, single_request(key, 3)).await.allowed(), "{key}");
        }
        assert!(
            check(&client, single_request(key, 1)).await.allowed(),
            "{key}: a cost that may be allowed is sent to Redis"
        );
        let denied = check(&client, single_request(key, 1)).await;
        let call_count = calls(&redis, async || {
            for cost in [1, 2, 9].into_iter().cycle().take(300) {
                let cached = check(&client, single_request(key, cost)).await;
                assert_eq!((cached.allowed(), cached.remaining()), (false, denied.remaining()), "{key}: {cost}");
                let (original, current) = (&denied.exact()[0], &cached.exact()[0]);
                assert!(
                    current.reset <= original.reset && (cost > 1 || current.retry_after <= original.retry_after),
                    "{key}: {current:?}"
                );
                assert_eq!(current.retry_after.is_some(), cost <= 5, "{key}: {cost}");
            }
        })
        .await;
        assert_eq!(call_count, 0, "{key}");
        let metric =
            |name: &str| server.metric(&format!("ratelimit_service_rate_limit_{name}{{domain=\"d\",key1=\"{key}\"}}"));
        assert_eq!(metric("over_limit_with_local_cache"), 1_200.0, "{key}");
        let before = if key == "window" { 1.0 } else { 4.0 };
        assert_eq!((metric("over_limit"), metric("within_limit")), (1_200.0 + before, 5.0), "{key}");
        // A refund by another instance is not noticed, a refund by this instance is.
        check(&other_client, refund(key, 2)).await;
        assert!(!check(&client, single_request(key, 1)).await.allowed(), "{key}");
        check(&client, refund(key, 1)).await;
        assert!(check(&client, single_request(key, 1)).await.allowed(), "{key}");
    }
    assert_eq!(server.metric("sluicegate_deny_cache_denials_total"), 903.0);
}

#[tokio::test]
async fn an_old_denial_is_checked_again() {
    let redis = RedisServer::start();
    let server = start(&redis, RULES, &[("deny_cache.max_age", "50ms")]);
    let other = start(&redis, RULES, &[]);
    let (client, other_client) = (server.client().await, other.client().await);
    check(&client, single_request("gcra", 5)).await;
    assert!(!check(&client, single_request("gcra", 1)).await.allowed());
    check(&other_client, refund("gcra", 5)).await;
    wait_for_async("the refund to be noticed", async || {
        check(&client, single_request("gcra", 1)).await.allowed().then_some(())
    })
    .await;
}

/// If denied hits make the wait longer, Redis must count each of them. Without entries in the deny cache, all denials
/// are sent to Redis as well.
#[tokio::test]
async fn denials_that_count_are_sent_to_redis_every_time() {
    let redis = RedisServer::start();
    let with_cache = start(&redis, &[RULES, COUNTS_DENIALS].concat(), &[]);
    let without_cache = start(&redis, RULES, &[("deny_cache.max_entries", "0")]);
    for (server, key) in [(&with_cache, "stubborn"), (&without_cache, "gcra")] {
        let client = server.client().await;
        check(&client, single_request(key, 5)).await;
        let call_count = calls(&redis, async || {
            for _ in 0..20 {
                assert!(!check(&client, single_request(key, 1)).await.allowed());
            }
        });
        assert_eq!(call_count.await, 20, "{key}");
        assert_eq!(server.metric("sluicegate_deny_cache_denials_total"), 0.0, "{key}");
    }
}

#[tokio::test]
async fn only_limits_that_may_allow_are_sent_to_redis() {
    let redis = RedisServer::start();
    for charge in ["each", "all"] {
        let text = RULES.replace("domain: d", &format!("domain: d\ncharge: {charge}"));
        let server = start(&redis, &text, &[("deny_cache.max_age", "1h")]);
        let client = server.client().await;
        check(&client, single_request("gcra", 5)).await;
        assert!(!check(&client, single_request("gcra", 1)).await.allowed());
        let both = |keys: [&str; 2]| {
            keys.iter().fold(Request::new("d"), |request, key| request.descriptor(descriptor(&[(*key, "x")])))
        };
        let call_count = calls(&redis, async || {
            for hit in 1..=3 {
                let answer = check(&client, both(["log", "gcra"])).await;
                // With `charge: all`, the other limit is only peeked.
                let remaining = if charge == "all" { 5 } else { 5 - hit };
                assert_eq!((answer.allowed(), answer.0.statuses[0].limit_remaining), (false, remaining), "{charge}");
            }
        });
        assert_eq!(call_count.await, 3, "{charge}");
        // A denial in shadow mode does not keep the other limit from being charged.
        check(&client, single_request("dark", 5)).await;
        check(&client, single_request("dark", 1)).await;
        let answer = check(&client, both(["dark", "log"])).await;
        let remaining = if charge == "all" { 4 } else { 1 };
        assert_eq!((answer.allowed(), answer.0.statuses[1].limit_remaining), (true, remaining), "{charge}");
        redis.cli(&["flushall"]);
    }
}

pub(crate) const LEASED: &str = "
domain: d
descriptors:
- key: window
  rate_limit: {unit: year, requests_per_unit: 20000, consistency: leased}
- key: first
  rate_limit: {unit: year, requests_per_unit: 20000, window: first_request, consistency: leased}
- key: sliding
  rate_limit: {unit: year, requests_per_unit: 20000, algorithm: sliding_window, buckets: 12, consistency: leased}
- key: bucket
  rate_limit: {unit: year, requests_per_unit: 20000, algorithm: token_bucket, consistency: leased}
- key: other
  rate_limit: {unit: year, requests_per_unit: 1000000}
";

/// Sends requests from 16 concurrent callers and returns how many were allowed. Each caller stops after `each` allowed
/// requests or at its first denial.
pub(crate) async fn spend(client: &Client, key: &'static str, each: u64) -> u64 {
    let mut callers = tokio::task::JoinSet::new();
    for _ in 0..16 {
        let client = client.clone();
        callers.spawn(async move {
            let mut passed = 0;
            while passed < each && check(&client, single_request(key, 1)).await.allowed() {
                passed += 1;
            }
            passed
        });
    }
    callers.join_all().await.into_iter().sum()
}

/// Three instances with leases allow exactly the limit, with one call to Redis for many decisions.
#[tokio::test]
async fn leases_add_up_to_exactly_the_limit() {
    let redis = RedisServer::start();
    let servers: Vec<_> = (0..3).map(|_| start(&redis, LEASED, &[])).collect();
    for key in ["window", "first", "sliding", "bucket"] {
        // Hits that return to a bucket after the end of their lease have drained a little, and are slightly less than
        // whole hits.
        let expected = if key == "bucket" { 19_980..=20_000 } else { 20_000..=20_000 };
        redis.cli(&["config", "resetstat"]);
        let mut passed = 0;
        // The first instance has most of the traffic.
        for (server, each) in servers.iter().zip([400, 100, 50]) {
            passed += spend(&server.client().await, key, each).await;
        }
        assert_eq!(passed, 16 * 550, "{key}: below half of the limit no request is denied");
        let stats = redis.cli(&["info", "commandstats"]);
        let calls = stats.split_once("cmdstat_evalsha:calls=").unwrap().1.split(',').next().unwrap();
        let calls: u64 = calls.parse().unwrap();
        assert!(calls < passed / 10, "{key}: {calls} calls for {passed} decisions");
        assert!(servers[0].metric("sluicegate_lease_decisions_total") > 5_000.0, "{}", servers[0].get("/metrics"));
        // Leases of the other instances are returned, and all remaining hits can be taken.
        wait_for_async("the whole limit to be spent", async || {
            for server in &servers {
                passed += spend(&server.client().await, key, u64::MAX).await;
            }
            assert!(passed <= 20_000, "{key}: {passed}");
            expected.contains(&passed).then_some(())
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

/// Only counters with `consistency: leased` are leased, even if a request uses them with other counters.
#[tokio::test]
async fn an_exact_counter_stays_exact_in_a_request_with_a_leased_one() {
    let redis = RedisServer::start();
    let server = start(&redis, LEASED, &[]);
    let client = server.client().await;
    let mut callers = tokio::task::JoinSet::new();
    for _ in 0..16 {
        let client = client.clone();
        callers.spawn(async move {
            for _ in 0..100 {
                let both = single_request("window", 1).descriptor(descriptor(&[("other", "x")]).hits(1));
                assert!(check(&client, both).await.allowed());
            }
        });
    }
    callers.join_all().await;
    assert!(server.metric("sluicegate_lease_decisions_total") > 0.0);
    assert_eq!(check(&client, single_request("other", 0)).await.remaining(), Some(1_000_000 - 1_600));
}

/// Hits from a lease are returned to it if another limit of the same request denies, and the answer's remaining
/// includes them.
#[tokio::test]
async fn a_lease_pays_nothing_for_denied_requests() {
    let redis = RedisServer::start();
    let server = start(&redis, &LEASED.replace("domain: d", "domain: d\ncharge: all"), &[]);
    let client = server.client().await;
    wait_for_async("decisions by a lease", async || {
        spend(&client, "window", 60).await;
        let before = server.metric("sluicegate_lease_decisions_total");
        let remaining = check(&client, single_request("window", 0)).await.remaining();
        let denied = single_request("window", 5).descriptor(descriptor(&[("other", "x")]).hits(2_000_000));
        let denied = check(&client, denied).await;
        assert!(!denied.allowed());
        (server.metric("sluicegate_lease_decisions_total") >= before + 2.0).then_some(())?;
        assert_eq!(Some(denied.0.statuses[0].limit_remaining), remaining);
        Some(())
    })
    .await;
}

/// Returns the count of the fixed window in Redis, which is the last ten digits of its state.
pub(crate) fn stored_count(redis: &RedisServer) -> u64 {
    let key = redis.cli(&["keys", "*window*"]);
    redis.cli(&["get", &key]).parse::<u64>().unwrap() % 10_000_000_000
}

#[tokio::test]
async fn unspent_hits_of_leases_are_returned() {
    let redis = RedisServer::start();
    // A busy machine may return the rest of a lease before the test can see it, and needs more attempts.
    let rules = LEASED.replace("20000", "1000000000");
    for shut_down in [true, false] {
        let server = start(&redis, &rules, &[]);
        let (client, mut passed) = (server.client().await, 0);
        wait_for_async("a lease with unspent hits", async || {
            passed += spend(&client, "window", 60).await;
            (stored_count(&redis) > passed).then_some(())
        })
        .await;
        assert!(server.metric("sluicegate_lease_decisions_total") > 0.0);
        if shut_down {
            server.signal("TERM");
            server.wait().await;
            assert_eq!(stored_count(&redis), passed, "after the shutdown");
        } else {
            let mut spent = passed;
            wait_for_async("the idle lease to be returned", async || (stored_count(&redis) == passed).then_some(()))
                .await;
            spent += spend(&server.client().await, "window", 1).await;
            wait_for_async("the count to equal the spent hits", async || (stored_count(&redis) == spent).then_some(()))
                .await;
            assert!(server.metric("sluicegate_lease_returned_hits_total") > 0.0);
        }
        redis.cli(&["flushall"]);
    }
}

/// Hits held on a lease are not a reason to deny: a cost above the lease uses the lease as well, also in a request with
/// another limit.
#[tokio::test]
async fn a_large_cost_is_paid_by_the_lease_and_the_store_together() {
    let redis = RedisServer::start();
    for charge in ["each", "all"] {
        let text = LEASED.replace("domain: d", &format!("domain: d\ncharge: {charge}"));
        let server = start(&redis, &text, &[]);
        let client = server.client().await;
        let with_other = |hits: u64| {
            let hits = u32::try_from(hits).unwrap();
            let other = Request::new("d").descriptor(descriptor(&[("other", "x")]));
            other.descriptor(descriptor(&[("window", "x")])).hits(hits)
        };
        let mut passed = 0;
        wait_for_async("a lease to hold hits", async || {
            passed += spend(&client, "window", 4).await;
            (stored_count(&redis) > passed).then_some(())
        })
        .await;
        if charge == "all" {
            // A cost above all remaining hits takes nothing, and the lease still holds its hits.
            assert!(!check(&client, with_other(20_001 - passed)).await.allowed());
        }
        assert!(check(&client, with_other(20_000 - passed)).await.allowed(), "{charge}");
        assert!(!check(&client, single_request("window", 1)).await.allowed(), "{charge}");
        redis.cli(&["flushall"]);
    }
}

/// Of three instances, one is killed and one is suspended for a while. Hits of their leases are lost until the window
/// ends, and the limit is not exceeded.
#[tokio::test]
async fn leases_of_dead_instances_are_lost_until_the_window_ends() {
    let redis = RedisServer::start();
    let servers: Vec<_> = (0..3).map(|_| start(&redis, LEASED, &[])).collect();
    let mut callers = tokio::task::JoinSet::new();
    for server in &servers {
        for _ in 0..8 {
            let client = server.client().await;
            callers.spawn(async move {
                let mut passed = 0;
                while let Ok(answer) = client.check(single_request("window", 1)).await
                    && answer.allowed()
                {
                    passed += 1;
                }
                passed
            });
        }
    }
    wait_for_async("leases to be used", async || {
        (servers[0].metric("sluicegate_lease_decisions_total") > 100.0).then_some(())
    })
    .await;
    servers[0].signal("KILL");
    servers[1].signal("STOP");
    let count_before = stored_count(&redis);
    wait_for_async("the third instance to continue", async || {
        (stored_count(&redis) > count_before + 1_000).then_some(())
    })
    .await;
    servers[1].signal("CONT");
    let passed: u64 = callers.join_all().await.into_iter().sum();
    let client = servers[2].client().await;
    let passed_later = spend(&client, "window", u64::MAX).await;
    assert!(passed + passed_later <= 20_000, "{passed} + {passed_later}");
    assert!(passed + passed_later > 15_000, "{passed} + {passed_later}");
}

/// Without Redis, leases are spent first, and then `on_error` decides.
#[tokio::test]
async fn leases_are_spent_after_redis_has_failed() {
    let mut redis = RedisServer::start();
    let server = start(&redis, LEASED, &[("redis.timeout", "100ms")]);
    let client = server.client().await;
    let refill = async || {
        spend(&client, "window", 60).await;
        let before = server.metric("sluicegate_lease_decisions_total");
        check(&client, single_request("window", 1)).await;
        (server.metric("sluicegate_lease_decisions_total") > before).then_some(())
    };
    wait_for_async("a lease to decide", refill).await;
    redis.kill();
    let mut passed = 0;
    while client.check(single_request("window", 1)).await.is_ok_and(|answer| answer.allowed()) {
        passed += 1;
        assert!(passed <= 20_000 / 4, "a lease is at most a quarter of the remaining hits");
    }
    assert!(passed > 0);
    assert!(client.check(single_request("window", 1)).await.is_err());
}
