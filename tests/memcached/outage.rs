//! memcached killed, frozen and empty: the service still answers immediately, and recovers when memcached is back.

use crate::support::{
    MemcachedServer, Server,
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
  rate_limit: {unit: year, requests_per_unit: 5, on_error: deny, algorithm: gcra}
- key: local
  rate_limit: {unit: year, requests_per_unit: 5, on_error: local}
";

fn start(memcached: &MemcachedServer) -> Server {
    let folder = rules(&[("d.yaml", RULES)]);
    Server::builder().rules(folder.path()).store(&memcached.url()).set("memcached.timeout", "20ms").start()
}

async fn check(client: &Client, key: &str) -> Result<Answer, Error> {
    client.check(request_for("d", &[(key, "x")])).await
}

/// Sends requests until memcached is known to be unavailable, after which no request waits.
async fn wait_until_down(server: &Server, client: &Client) {
    wait_for_async("memcached to be unavailable", async || {
        let _ = check(client, "default").await;
        (server.metric("sluicegate_store_errors_total{kind=\"unavailable\"}") > 0.0).then_some(())
    })
    .await;
}

async fn wait_until_up(client: &Client) -> Answer {
    wait_for_async("memcached to decide again", async || check(client, "default").await.ok()).await
}

/// Checks that no call waits for a timeout, and that each policy decides.
async fn assert_answers_immediately(server: &Server, client: &Client) {
    let timeouts = server.metric("sluicegate_store_errors_total{kind=\"timeout\"}");
    for _ in 0..200 {
        let error = check(client, "default").await.unwrap_err();
        assert_eq!(error.code(), Some(tonic::Code::Unavailable), "{error}");
        assert!(check(client, "open").await.unwrap().allowed());
        assert!(!check(client, "closed").await.unwrap().allowed());
    }
    let mut passed = 0;
    for _ in 0..10 {
        passed += usize::from(check(client, "local").await.unwrap().allowed());
    }
    assert_eq!(passed, 5);
    assert_eq!(server.metric("sluicegate_store_errors_total{kind=\"timeout\"}"), timeouts);
    assert!(server.get("/readyz").contains("memcached, unavailable"), "{}", server.get("/readyz"));
}

#[tokio::test]
async fn the_death_and_the_return_of_memcached_are_detected() {
    let mut memcached = MemcachedServer::start();
    let server = start(&memcached);
    let client = server.client().await;
    assert_eq!(check(&client, "default").await.unwrap().remaining(), Some(4));
    memcached.kill();
    wait_until_down(&server, &client).await;
    assert_answers_immediately(&server, &client).await;
    memcached.restart();
    assert_eq!(wait_until_up(&client).await.remaining(), Some(4), "the counters are lost");
    wait_for("the log", || server.log().contains("memcached server is available again").then_some(()));
    assert_eq!(server.log().matches("memcached server is unavailable").count(), 1, "{}", server.log());
    let up = format!("sluicegate_memcached_up{{server=\"127.0.0.1:{}\"}}", memcached.port);
    assert_eq!(server.metric(&up), 1.0);
}

#[tokio::test]
async fn a_frozen_memcached_is_unavailable_until_it_answers() {
    let memcached = MemcachedServer::start();
    let server = start(&memcached);
    let client = server.client().await;
    assert_eq!(check(&client, "default").await.unwrap().remaining(), Some(4));
    memcached.freeze();
    wait_until_down(&server, &client).await;
    assert_answers_immediately(&server, &client).await;
    memcached.thaw();
    let remaining = wait_until_up(&client).await.remaining();
    assert!(remaining.is_some_and(|remaining| remaining <= 3), "the counters are still there: {remaining:?}");
}

#[tokio::test]
async fn the_service_starts_without_memcached() {
    let mut memcached = MemcachedServer::start();
    memcached.kill();
    let server = start(&memcached);
    let client = server.client().await;
    assert!(check(&client, "open").await.unwrap().allowed());
    memcached.restart();
    wait_until_up(&client).await;
}

/// Another server fails: the counters on this one are still decided.
#[tokio::test]
async fn the_death_of_one_server_affects_only_its_counters() {
    let mut nodes = [MemcachedServer::start(), MemcachedServer::start()];
    let folder = rules(&[("d.yaml", RULES)]);
    let store = format!("memcached://127.0.0.1:{},127.0.0.1:{}", nodes[0].port, nodes[1].port);
    let server = Server::builder().rules(folder.path()).store(&store).start();
    let client = server.client().await;
    nodes[0].kill();
    wait_for("the first server to be unavailable", || {
        server.get("/readyz").contains("memcached, 1 of 2 servers unavailable").then_some(())
    });
    let mut decided = 0;
    for number in 0..200 {
        let answer = client.check(request_for("d", &[("default", &number.to_string())])).await;
        decided += usize::from(answer.is_ok());
    }
    assert!((50..150).contains(&decided), "{decided}");
}

/// Another program has written to the key of a counter, and a server that is no memcached answers.
#[tokio::test]
async fn foreign_items_and_servers_are_errors_that_the_log_names() {
    let memcached = MemcachedServer::start();
    let server = start(&memcached);
    let client = server.client().await;
    assert!(check(&client, "default").await.unwrap().allowed());
    let key = "sluicegate:{d|default=x}fw:31536000";
    assert!(memcached.command(&format!("mg {key} v")).starts_with("VA "));
    assert_eq!(memcached.command(&format!("ms {key} 3\r\nabc")), "HD");
    assert!(check(&client, "default").await.is_err());
    assert!(check(&client, "closed").await.unwrap().allowed(), "other counters are decided");
    assert_eq!(server.metric("sluicegate_store_errors_total{kind=\"rejected\"}"), 1.0);
    assert_eq!(server.log().matches("memcached server rejects calls").count(), 1, "{}", server.log());

    let redis = crate::support::RedisServer::start();
    let folder = rules(&[("d.yaml", RULES)]);
    let store = format!("memcached://127.0.0.1:{}", redis.port);
    let server = Server::builder().rules(folder.path()).store(&store).start();
    wait_for("the log", || server.log().contains("is not one of the meta protocol of memcached 1.6").then_some(()));
    assert!(!check(&server.client().await, "closed").await.unwrap().allowed());
}
