//! Penalties over the wire, with counters in memory and in every topology of Redis.

use std::time::Duration;

use crate::support::{
    RedisCluster, RedisServer, descriptor,
    operator::Operator,
    raw_client::{Client, Request},
    request_for, ring, rules, wait_for_async,
};

const RULES: &str = "
domain: d
descriptors:
- key: login
  rate_limits:
  - { unit: year, requests_per_unit: 100, name: yearly }
  - { unit: hour, requests_per_unit: 3, name: hourly, algorithm: gcra, burst: 3, penalty: 2h }
- key: short
  rate_limit: { unit: second, requests_per_unit: 1000, algorithm: gcra, burst: 1, penalty: 1s, penalty_max: 1h }
";

fn start(store: &str) -> Operator {
    let folder = rules(&[("d.yaml", RULES)]);
    Operator::start(folder.path(), store)
}

/// Requests a login, and returns whether it is allowed, with the seconds until a retry.
async fn login(client: &Client, user: &str) -> (bool, Option<u64>) {
    let answer = client.check(request_for("d", &[("login", user)])).await.unwrap();
    (answer.allowed(), answer.retry_after().map(|wait| wait.as_secs().div_ceil(600)))
}

#[tokio::test]
async fn a_penalty_is_in_force_on_all_instances_until_an_operator_lifts_it() {
    let redis = RedisServer::start();
    let (_nodes, ring) = ring(3);
    let cluster = RedisCluster::start();
    for store in ["memory", &redis.url(), &ring, &cluster.url()] {
        let operator = start(store);
        let other = if store == "memory" { None } else { Some(start(store)) };
        let client = operator.server.client().await;
        let elsewhere = match &other {
            Some(other) => other.server.client().await,
            None => operator.server.client().await,
        };
        for _ in 0..3 {
            assert_eq!(login(&client, "a").await, (true, None), "{store}");
        }
        // The limit alone would deny for 20 minutes.
        assert_eq!(login(&client, "a").await, (false, Some(12)), "{store}");
        for client in [&elsewhere, &client] {
            assert_eq!(login(client, "a").await, (false, Some(12)), "{store}");
        }
        assert_eq!(login(&elsewhere, "b").await, (true, None), "{store}");
        let shown = operator.ctl(&["inspect", "d", "login=a"]);
        assert!(shown.contains("3 per hour, gcra, then a penalty of 2h"), "{shown}");
        assert!(shown.contains("penalty: every request is denied for another 1h 59m"), "{shown}");
        assert!(shown.contains("used 3, remaining 97"), "denied hits have not been counted: {shown}");
        operator.ctl(&["reset", "d", "login=a"]);
        assert_eq!(login(&client, "a").await, (true, None), "{store}");
        wait_for_async("the deny cache of the other instance to forget", async || {
            login(&elsewhere, "a").await.0.then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn a_penalty_ends_and_the_next_one_is_longer() {
    let redis = RedisServer::start();
    for store in ["memory", &redis.url()] {
        let operator = start(store);
        let client = operator.server.client().await;
        let two = || Request::new("d").descriptor(descriptor(&[("short", "a")]).hits(2));
        let wait = async || client.check(two()).await.unwrap().retry_after().unwrap();
        assert_eq!(wait().await, Duration::from_secs(1), "{store}");
        let longer = wait_for_async("a penalty of two seconds", async || {
            let wait = wait().await;
            (wait > Duration::from_secs(1)).then_some(wait)
        });
        assert_eq!(longer.await, Duration::from_secs(2), "{store}");
    }
}

#[tokio::test]
async fn a_penalty_survives_the_death_of_its_master() {
    let mut cluster = RedisCluster::with(3, 1, &[]);
    let operator = start(&cluster.url());
    let client = operator.server.client().await;
    let users: Vec<String> = (0..30).map(|number| format!("u{number}")).collect();
    for user in &users {
        for _ in 0..4 {
            login(&client, user).await;
        }
    }
    for user in &users {
        assert!(!login(&client, user).await.0, "the replicas receive the penalties meanwhile");
    }
    cluster.nodes[0].kill();
    for user in &users {
        let denied = wait_for_async("an answer after the failover", async || {
            let answer = client.check(request_for("d", &[("login", user)])).await.ok()?;
            Some(!answer.allowed())
        });
        assert!(denied.await, "{user}");
    }
}
