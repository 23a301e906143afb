//! Rules with `consistency: eventual`: counted here, and told a little later.

use crate::{
    redis::leases_and_deny_cache::{check, counted, one, spend, start},
    support::{RedisServer, descriptor, plain::Request, until, until_async},
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

/// Two instances count by themselves: each knows a little later what the other has let through, and not much more than
/// the limit passes, at a call to Redis now and then.
#[tokio::test]
async fn what_is_counted_here_is_told_a_little_later() {
    let redis = RedisServer::start();
    let servers = [start(&redis, EVENTUAL, &[]), start(&redis, EVENTUAL, &[])];
    for key in ["window", "bucket"] {
        let clients = [servers[0].client().await, servers[1].client().await];
        assert!(check(&clients[0], one(key, 1)).await.allowed());
        assert!(check(&clients[1], one(key, 1)).await.allowed());
        redis.cli(&["config", "resetstat"]);
        assert_eq!(spend(&clients[0], key, 100).await, 1_600);
        let left = async || check(&clients[1], one(key, 0)).await.remaining().unwrap();
        until_async("the other to hear of it", async || ((3_398..3_410).contains(&left().await)).then_some(())).await;
        let stats = redis.cli(&["info", "commandstats"]);
        let calls = stats.split_once("cmdstat_evalsha:calls=").unwrap().1.split(',').next().unwrap();
        assert!(calls.parse::<u64>().unwrap() < 200, "{key}: {calls} calls for 1,600 decisions");
        // Together they let too much through, and then nothing.
        let (here, there) = tokio::join!(spend(&clients[0], key, u64::MAX), spend(&clients[1], key, u64::MAX));
        let passed = 1_602 + here + there;
        assert!((5_000..=2 * 5_000).contains(&passed), "{key}: {passed}");
        until_async("both to know", async || {
            let refused = async |client| !check(client, one(key, 1)).await.allowed();
            (refused(&clients[0]).await && refused(&clients[1]).await).then_some(())
        })
        .await;
    }
    assert!(servers[0].metric("sluicegate_eventual_decisions_total") > 3_000.0);
    assert_eq!(servers[0].metric("sluicegate_eventual_lost_hits_total"), 0.0);
}

/// Redis is gone: decisions go on; when it is back it is told, once. At the end of the process all is told.
#[tokio::test]
async fn what_redis_was_not_told_it_is_told_afterwards() {
    let mut redis = RedisServer::start();
    let server = start(&redis, EVENTUAL, &[("redis.timeout", "100ms")]);
    let client = server.client().await;
    assert!(check(&client, one("window", 1)).await.allowed());
    until_async("it to be told", async || (counted(&redis) == 1).then_some(())).await;
    redis.kill();
    until("somebody to notice", || server.get("/readyz").contains("out of reach").then_some(()));
    assert_eq!(spend(&client, "window", 20).await, 320);
    let unknown = check(&client, one("bucket", 1)).await;
    assert!(!unknown.allowed() && unknown.0.statuses[0].limit_remaining == 0, "nothing is known: on_error {unknown:?}");
    redis.restart();
    until_async("it to be told", async || {
        let key = redis.cli(&["keys", "*window*"]);
        (!key.is_empty() && counted(&redis) == 320).then_some(())
    })
    .await;
    assert_eq!(spend(&client, "window", 1).await, 16);
    until_async("it to be told", async || (counted(&redis) == 336).then_some(())).await;
    // What comes back is counted at once.
    let back = Request::new("d").descriptor(descriptor(&[("window", "x")]).hits(6).give_back());
    check(&client, back).await;
    assert_eq!(counted(&redis), 330);
    assert_eq!(spend(&client, "window", 1).await, 16);
    server.signal("TERM");
    server.wait().await;
    assert_eq!(counted(&redis), 346);
}

/// Whatever of a request is known here, and whatever else it asks for: each descriptor has the answer to itself.
#[tokio::test]
async fn each_descriptor_has_its_own_answer() {
    for charge in ["each", "all"] {
        let redis = RedisServer::start();
        let text = EVENTUAL.replace("domain: d", &format!("domain: d\ncharge: {charge}"));
        let server = start(&redis, &text.replace("5000, alg", "700, alg"), &[]);
        let client = server.client().await;
        // None is known here, some are, and all.
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

/// Charged together with a limit that is decided in Redis: all are charged or none is.
#[tokio::test]
async fn counters_here_and_in_redis_are_charged_together() {
    let redis = RedisServer::start();
    let server = start(&redis, &EVENTUAL.replace("domain: d", "domain: d\ncharge: all"), &[]);
    let client = server.client().await;
    let both = || one("window", 1).descriptor(descriptor(&[("exact", "v")]).hits(1));
    for passed in 1..=5 {
        assert_eq!(check(&client, both()).await.allowed(), passed <= 3, "{passed}");
    }
    let left = |key| check(&client, one(key, 0));
    assert_eq!(left("window").await.remaining(), Some(4_997), "two were refused, and charged for nothing");
    assert!(check(&client, one("window", 4_997)).await.allowed());
    redis.cli(&["del", &redis.cli(&["keys", "*exact*"])]);
    assert!(!check(&client, both()).await.allowed());
    assert_eq!(left("exact").await.remaining(), Some(3), "what is full here takes nothing there");
}
