//! Rules with `consistency: eventual`: instances count locally and send the hits to Redis later.

use crate::{
    redis::leases_and_deny_cache::{check, single_request, spend, start, stored_count},
    support::{RedisServer, descriptor, raw_client::Request, wait_for, wait_for_async},
};

const EVENTUAL: &str = "
domain: d
descriptors:
- key: window
  rate_limit: {unit: year, requests_per_unit: 5000, consistency: eventual}
- key: bucket
  rate_limit: {unit: hour, requests_per_unit: 5000, algorithm: gcra, consistency: eventual, on_error: deny}
- key: exact
  rate_limit: {unit: year, requests_per_unit: 3}
";

/// Two instances count locally. Each receives the other's hits a little later, not much more than the limit is allowed,
/// and there are only occasional calls to Redis.
#[tokio::test]
async fn local_hits_reach_other_instances_later() {
    let redis = RedisServer::start();
    let servers = [start(&redis, EVENTUAL, &[]), start(&redis, EVENTUAL, &[])];
    for key in ["window", "bucket"] {
        let clients = [servers[0].client().await, servers[1].client().await];
        assert!(check(&clients[0], single_request(key, 1)).await.allowed());
        assert!(check(&clients[1], single_request(key, 1)).await.allowed());
        redis.cli(&["config", "resetstat"]);
        assert_eq!(spend(&clients[0], key, 100).await, 1_600);
        let remaining = async || check(&clients[1], single_request(key, 0)).await.remaining().unwrap();
        wait_for_async("the other instance to receive the hits", async || {
            ((3_398..3_410).contains(&remaining().await)).then_some(())
        })
        .await;
        let stats = redis.cli(&["info", "commandstats"]);
        let calls = stats.split_once("cmdstat_evalsha:calls=").unwrap().1.split(',').next().unwrap();
        assert!(calls.parse::<u64>().unwrap() < 200, "{key}: {calls} calls for 1,600 decisions");
        // Together the instances allow more than the limit, and then nothing.
        let (first, second) = tokio::join!(spend(&clients[0], key, u64::MAX), spend(&clients[1], key, u64::MAX));
        let passed = 1_602 + first + second;
        assert!((5_000..=2 * 5_000).contains(&passed), "{key}: {passed}");
        wait_for_async("both instances to deny", async || {
            let is_denied = async |client| !check(client, single_request(key, 1)).await.allowed();
            (is_denied(&clients[0]).await && is_denied(&clients[1]).await).then_some(())
        })
        .await;
    }
    assert!(servers[0].metric("sluicegate_eventual_decisions_total") > 3_000.0);
    assert_eq!(servers[0].metric("sluicegate_eventual_lost_hits_total"), 0.0);
}

/// Decisions continue while Redis is down. It receives the missing hits once after it has returned, and all remaining
/// hits at shutdown.
#[tokio::test]
async fn redis_receives_missing_hits_after_an_outage() {
    let mut redis = RedisServer::start();
    let server = start(&redis, EVENTUAL, &[("redis.timeout", "100ms")]);
    let client = server.client().await;
    assert!(check(&client, single_request("window", 1)).await.allowed());
    wait_for_async("Redis to receive the hits", async || (stored_count(&redis) == 1).then_some(())).await;
    redis.kill();
    wait_for("the outage to be detected", || server.get("/readyz").contains("unavailable").then_some(()));
    assert_eq!(spend(&client, "window", 20).await, 320);
    let unknown = check(&client, single_request("bucket", 1)).await;
    assert!(
        !unknown.allowed() && unknown.0.statuses[0].limit_remaining == 0,
        "without a known state, on_error decides: {unknown:?}"
    );
    redis.restart();
    wait_for_async("Redis to receive the hits", async || {
        let key = redis.cli(&["keys", "*window*"]);
        (!key.is_empty() && stored_count(&redis) == 320).then_some(())
    })
    .await;
    assert_eq!(spend(&client, "window", 1).await, 16);
    wait_for_async("Redis to receive the hits", async || (stored_count(&redis) == 336).then_some(())).await;
    // A refund is counted immediately.
    let refund = Request::new("d").descriptor(descriptor(&[("window", "x")]).hits(6).refund());
    check(&client, refund).await;
    assert_eq!(stored_count(&redis), 330);
    assert_eq!(spend(&client, "window", 1).await, 16);
    server.signal("TERM");
    server.wait().await;
    assert_eq!(stored_count(&redis), 346);
}

/// A client does not close its connection within the grace: its runtime is blocked.
#[tokio::test]
async fn the_last_hits_are_reported_at_shutdown() {
    let redis = RedisServer::start();
    let server = start(&redis, EVENTUAL, &[("eventual.sync", "30s"), ("shutdown.grace", "500ms")]);
    let client = server.client().await;
    assert!(check(&client, single_request("window", 1)).await.allowed());
    let spent = spend(&client, "window", 20).await;
    assert_eq!(stored_count(&redis), 1, "the hits are not reported yet");
    server.signal("TERM");
    wait_for("the shutdown", || server.log().contains("shutdown complete").then_some(()));
    assert!(server.log().contains("some calls did not finish within shutdown.grace"), "{}", server.log());
    assert_eq!(stored_count(&redis), 1 + spent);
}

/// Each descriptor has its own answer, whichever counters of the request are known locally.
#[tokio::test]
async fn each_descriptor_has_its_own_answer() {
    for charge in ["each", "all"] {
        let redis = RedisServer::start();
        let text = EVENTUAL.replace("domain: d", &format!("domain: d\ncharge: {charge}"));
        let server = start(&redis, &text.replace("5000, alg", "700, alg"), &[]);
        let client = server.client().await;
        // The rounds know none, some and all of the eventual counters locally.
        for round in 1..=3 {
            let bucket = if round == 2 { "new" } else { "x" };
            let request = [("window", "x"), ("exact", "x"), ("bucket", bucket)]
                .into_iter()
                .fold(Request::new("d"), |request, entry| request.descriptor(descriptor(&[entry]).hits(0)));
            let answer = check(&client, request).await;
            let remaining: Vec<_> = answer.0.statuses.iter().map(|status| status.limit_remaining).collect();
            assert_eq!(remaining, [5_000, 3, 700], "charge: {charge}, {round}");
        }
    }
}

/// With `charge: all`, eventual counters and counters in Redis are all charged, or none of them is.
#[tokio::test]
async fn eventual_counters_and_counters_in_redis_are_charged_together() {
    let redis = RedisServer::start();
    let server = start(&redis, &EVENTUAL.replace("domain: d", "domain: d\ncharge: all"), &[]);
    let client = server.client().await;
    let both = || single_request("window", 1).descriptor(descriptor(&[("exact", "v")]).hits(1));
    for passed in 1..=5 {
        assert_eq!(check(&client, both()).await.allowed(), passed <= 3, "{passed}");
    }
    let peek = |key| check(&client, single_request(key, 0));
    assert_eq!(peek("window").await.remaining(), Some(4_997), "the two denied requests were not charged");
    assert!(check(&client, single_request("window", 4_997)).await.allowed());
    redis.cli(&["del", &redis.cli(&["keys", "*exact*"])]);
    assert!(!check(&client, both()).await.allowed());
    assert_eq!(peek("exact").await.remaining(), Some(3), "a local denial takes nothing in Redis");
}
