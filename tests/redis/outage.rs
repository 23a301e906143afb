//! Redis stopped, killed, frozen and flushed: the service still answers immediately, and recovers when Redis is back.

use crate::support::{
    RedisServer, Server,
    raw_client::{Answer, Client, Error},
    request_for, rules, wait_for, wait_for_async,
};

const RULES: &str = "
domain: d
descriptors:
- key: default
  rate_limit: {unit: year, requests_per_unit: 5}
- key: open
  rate_limit: {unit: year, requests_per_unit: 5, on_error: allow}
- key: closed
  rate_limit: {unit: year, requests_per_unit: 5, on_error: deny}
";

fn start(redis: &RedisServer) -> Server {
    let folder = rules(&[("d.yaml", RULES)]);
    Server::builder().rules(folder.path()).store(&redis.url()).set("redis.timeout", "20ms").start()
}

async fn check(client: &Client, key: &str) -> Result<Answer, Error> {
    client.check(request_for("d", &[(key, "x")])).await
}

/// Sends requests until the store is known to be unavailable, after which no request waits.
async fn wait_until_down(server: &Server, client: &Client) {
    wait_for_async("the breaker to open", async || {
        let _ = check(client, "default").await;
        (server.metric("sluicegate_store_errors_total{kind=\"unavailable\"}") > 0.0).then_some(())
    })
    .await;
}

async fn wait_until_up(client: &Client) -> Answer {
    wait_for_async("Redis to decide again", async || check(client, "default").await.ok()).await
}

/// Checks that no call waits for a timeout.
async fn assert_answers_immediately(server: &Server, client: &Client) {
    let timeouts = server.metric("sluicegate_store_errors_total{kind=\"timeout\"}");
    for _ in 0..200 {
        let error = check(client, "default").await.unwrap_err();
        assert_eq!(error.code(), Some(tonic::Code::Unavailable), "{error}");
        let open = check(client, "open").await.unwrap();
        assert!(open.allowed() && open.0.statuses[0].current_limit.is_some());
        let closed = check(client, "closed").await.unwrap();
        assert!(!closed.allowed() && closed.remaining() == Some(0) && closed.retry_after().is_some());
    }
    assert_eq!(server.metric("sluicegate_store_errors_total{kind=\"timeout\"}"), timeouts);
    let undecided = "ratelimit_service_should_rate_limit_error{err_type=\"redis_error\"}";
    assert!(server.metric(undecided) >= 200.0);
}

#[tokio::test]
async fn the_death_and_the_return_of_redis_are_detected() {
    let mut redis = RedisServer::start();
    let server = start(&redis);
    let client = server.client().await;
    assert!(check(&client, "default").await.unwrap().allowed());
    redis.kill();
    wait_until_down(&server, &client).await;
    assert_answers_immediately(&server, &client).await;
    wait_for("/readyz to report the outage", || server.get("/readyz").contains("redis, unavailable").then_some(()));
    redis.restart();
    assert_eq!(wait_until_up(&client).await.remaining(), Some(4), "the new Redis is empty");
    assert!(check(&client, "closed").await.unwrap().allowed());
    wait_for("/readyz to report the recovery", || server.get("/readyz").contains("redis, up").then_some(()));
    assert_eq!(server.log().matches("Redis server is unavailable").count(), 1, "once per outage:\n{}", server.log());
}

#[tokio::test]
async fn a_frozen_redis_causes_only_a_few_timeouts() {
    let redis = RedisServer::start();
    let server = start(&redis);
    let client = server.client().await;
    assert!(check(&client, "default").await.unwrap().allowed());
    redis.freeze();
    wait_until_down(&server, &client).await;
    assert_answers_immediately(&server, &client).await;
    assert!(server.metric("sluicegate_store_errors_total{kind=\"timeout\"}") <= 6.0);
    redis.thaw();
    assert!(wait_until_up(&client).await.allowed());
}

#[tokio::test]
async fn a_service_can_start_before_its_redis() {
    let mut redis = RedisServer::start();
    redis.kill();
    let server = start(&redis);
    let client = server.client().await;
    assert!(check(&client, "default").await.is_err());
    assert!(check(&client, "open").await.unwrap().allowed());
    redis.restart();
    assert!(wait_until_up(&client).await.allowed());
}

#[tokio::test]
async fn a_flush_of_scripts_does_not_affect_decisions() {
    let redis = RedisServer::start();
    let folder = rules(&[("d.yaml", RULES)]);
    let server = Server::builder().rules(folder.path()).store(&redis.url()).start();
    let client = server.client().await;
    for expected in [4, 3] {
        redis.cli(&["script", "flush"]);
        assert_eq!(check(&client, "default").await.unwrap().remaining(), Some(expected));
    }
    assert_eq!(server.metric("sluicegate_redis_failures_total{kind=\"noscript\"}"), 2.0);
}

#[tokio::test]
async fn a_foreign_value_of_a_counter_is_replaced_and_is_no_outage() {
    let redis = RedisServer::start();
    let server = start(&redis);
    let client = server.client().await;
    assert!(check(&client, "default").await.unwrap().allowed());
    let key = redis.cli(&["keys", "*default*"]);
    redis.cli(&["del", &key]);
    redis.cli(&["lpush", &key, "not a number"]);
    // Requests may share a call to Redis: the foreign value affects none of them.
    let mut calls = tokio::task::JoinSet::new();
    for number in 0..200 {
        let (client, value) = (client.clone(), format!("x{number}"));
        calls.spawn(async move {
            let entry = if number == 100 { ("default", "x") } else { ("open", &*value) };
            client.check(request_for("d", &[entry])).await
        });
    }
    for answer in calls.join_all().await {
        assert_eq!(answer.unwrap().remaining(), Some(4));
    }
    assert_eq!(server.metric("sluicegate_store_errors_total{kind=\"rejected\"}"), 0.0);
    assert_eq!(server.metric("sluicegate_redis_failures_total{kind=\"wrongtype\"}"), 1.0);
    assert_eq!(server.log().matches("\"kind\":\"wrongtype\"").count(), 1, "{}", server.log());
    assert!(check(&client, "default").await.unwrap().allowed());
    assert_eq!(server.metric("sluicegate_redis_failures_total{kind=\"wrongtype\"}"), 1.0);
}

/// As after a failover, the server answers but no longer accepts writes.
#[tokio::test]
async fn a_redis_that_became_a_replica_is_unavailable() {
    let redis = RedisServer::start();
    let server = start(&redis);
    let client = server.client().await;
    assert!(check(&client, "default").await.unwrap().allowed());
    redis.cli(&["replicaof", "127.0.0.1", "1"]);
    wait_until_down(&server, &client).await;
    redis.cli(&["config", "resetstat"]);
    assert_answers_immediately(&server, &client).await;
    assert!(!redis.cli(&["info", "commandstats"]).contains("cmdstat_evalsha"), "no request is sent to the replica");
    assert_eq!(server.log().matches("Redis server is unavailable").count(), 1, "{}", server.log());
    redis.cli(&["replicaof", "no", "one"]);
    assert!(wait_until_up(&client).await.allowed());
}

/// Password, ACL user, database number, key prefix, unix socket.
#[tokio::test]
async fn every_kind_of_redis_url_works() {
    let open = RedisServer::start();
    let locked = RedisServer::with(&["--requirepass", "p@ss", "--user", "app", "on", ">s3cret", "~app:*", "+@all"]);
    let port = locked.port;
    for (store, server) in [
        (format!("{}/3", open.url()), &open),
        (format!("redis+unix://{}?db=2", open.socket()), &open),
        (format!("redis://:p%40ss@127.0.0.1:{port}"), &locked),
        (format!("redis://app:s3cret@127.0.0.1:{port}"), &locked),
    ] {
        let folder = rules(&[("d.yaml", RULES)]);
        let service = Server::builder().rules(folder.path()).store(&store).set("redis.key_prefix", "app:").start();
        let answer = check(&service.client().await, "default").await;
        assert!(answer.unwrap_or_else(|error| panic!("{store}: {error}\n{}", service.log())).allowed());
        assert!(!service.log().contains("s3cret") && !service.log().contains("p%40ss"), "{}", service.log());
        drop(service);
        server.cli(&["flushall"]);
    }
    assert_eq!(open.cli(&["info", "keyspace"]), "# Keyspace");
    let service = Server::start(rules(&[("d.yaml", RULES)]).path(), &format!("redis://:wrong@127.0.0.1:{port}"));
    wait_for("the authentication error to be logged", || service.log().contains("\"kind\":\"noauth\"").then_some(()));
    assert!(!service.log().contains("wrong@"), "{}", service.log());
}
