//! Slots that the client holds: taken, renewed, given back however their holders end; and what a limit learns from them.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use axum::{Router, body::Body, routing::get};
use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::{BodyExt, StreamBody};
use sluicegate_client::{Client, DecidedBy, OnError, Outcome, descriptor, layer::PermitLayer};
use tokio::{sync::Semaphore, task::JoinSet};
use tower_layer::Layer;
use tower_service::Service;

use crate::support::{
    DEADLINE, RedisServer, Server, descriptor as entries,
    plain::{self, Request as Ask},
    rules, wait_for_async,
};

const RULES: &str = "
domain: d
descriptors:
- key: user
  rate_limit: {algorithm: concurrency, limit: 2, hold: 1h, holder: holder}
- key: brief
  rate_limit: {algorithm: concurrency, limit: 1, hold: 900ms, holder: request_id}
- key: many
  rate_limit: {algorithm: concurrency, limit: 20, hold: 1h, holder: holder}
- key: learns
  rate_limit: {algorithm: adaptive, method: aimd, ceiling: 100, initial: 10, hold: 1h, holder: holder}
";

fn start(store: &str) -> Server {
    let folder = rules(&[("d.yaml", RULES)]);
    Server::builder().rules(folder.path()).store(store).set("redis.timeout", "20s").start()
}

fn client(server: &Server) -> Client {
    Client::builder(format!("http://{}", server.grpc)).domain("d").timeout(DEADLINE).connect_lazy().unwrap()
}

/// How many more could be had.
async fn left(plain: &plain::Client, key: &str) -> u32 {
    let look = Ask::new("d").descriptor(entries(&[(key, "x"), ("holder", "nobody")]).hits(0));
    plain.check(look).await.unwrap().remaining().unwrap()
}

async fn until_left(plain: &plain::Client, key: &str, slots: u32) {
    wait_for_async("slots to be free", async || (left(plain, key).await == slots).then_some(())).await;
}

#[tokio::test]
async fn a_permit_is_given_back_however_its_holder_ends() {
    let redis = RedisServer::start();
    for (store, batching) in [("memory", true), (&*redis.url(), true), ("memory", false)] {
        let server = start(store);
        let plain = server.client().await;
        let address = format!("http://{}", server.grpc);
        let client = Client::builder(address).domain("d").timeout(DEADLINE).batching(batching);
        let client = client.connect_lazy().unwrap();
        let acquire = || client.acquire([descriptor! { "user" => "x" }]);
        let (one, two) = (acquire().await.unwrap(), acquire().await.unwrap());
        let refused = acquire().await.unwrap_err();
        assert!(refused.retry_after() > Some(Duration::from_secs(3_500)) && !refused.shed());
        one.release().await;
        assert_eq!(left(&plain, "user").await, 1, "it waits until the service knows");
        let two = tokio::spawn(async move {
            let _two = two;
            panic!("on purpose");
        });
        assert!(two.await.is_err());
        until_left(&plain, "user", 2).await;
        // A task that is cancelled while it holds one, and one while it asks.
        let (ours, got) = (client.clone(), Arc::new(Semaphore::new(0)));
        let told = Arc::clone(&got);
        let holder = tokio::spawn(async move {
            let _permit = ours.acquire([descriptor! { "user" => "x" }]).await.unwrap();
            told.add_permits(1);
            std::future::pending::<()>().await;
        });
        got.acquire().await.unwrap().forget();
        assert_eq!(left(&plain, "user").await, 1);
        holder.abort();
        until_left(&plain, "user", 2).await;
        for _ in 0..50 {
            let ours = client.clone();
            let asking = tokio::spawn(async move { ours.acquire([descriptor! { "user" => "x" }]).await.map(drop) });
            tokio::task::yield_now().await;
            asking.abort();
            let _ = asking.await;
        }
        until_left(&plain, "user", 2).await;
    }
}

#[tokio::test]
async fn a_permit_that_lives_longer_than_its_hold_keeps_its_slot() {
    let server = start("memory");
    let client = client(&server);
    let acquire = || client.acquire([descriptor! { "brief" => "x" }]).holder_key("request_id");
    let permit = acquire().await.unwrap();
    let began = Instant::now();
    wait_for_async("a while", async || {
        assert!(acquire().await.is_err() && !permit.is_lost());
        (began.elapsed() > Duration::from_secs(3)).then_some(())
    })
    .await;
    drop(permit);
    wait_for_async("the slot to be free", async || acquire().await.ok()).await.release().await;
}

/// Whoever dies gives nothing back: his slots end by themselves, and not before.
#[tokio::test]
async fn a_service_that_goes_away_loses_no_slot_for_ever() {
    let redis = RedisServer::start();
    let (one, other) = (start(&redis.url()), start(&redis.url()));
    let addresses = [&one, &other].map(|server| format!("http://{}", server.grpc));
    let [first, second] = addresses;
    let builder = Client::builder(first).endpoint(second).domain("d").timeout(Duration::from_secs(1));
    let client = builder.connect_lazy().unwrap();
    let plain = other.client().await;
    let mut permits = Vec::new();
    for _ in 0..20 {
        permits.push(client.acquire([descriptor! { "many" => "x" }]).await.unwrap());
    }
    assert!(client.acquire([descriptor! { "many" => "x" }]).await.is_err());
    // kill -9 of an instance while all are held: they are given back to the other.
    drop(one);
    drop(permits);
    until_left(&plain, "many", 20).await;
}

/// A service that takes a slot and is not heard: whoever was refused for that gives back what he may have.
#[tokio::test]
async fn what_may_have_been_taken_is_given_back() {
    let server = start("memory");
    let plain = server.client().await;
    let builder = Client::builder(format!("http://{}", server.grpc)).domain("d").on_error(OnError::Deny);
    let client = builder.timeout(Duration::from_millis(500)).connect_lazy().unwrap();
    client.acquire([descriptor! { "user" => "x" }]).await.unwrap().release().await;
    let asked = || server.metric("ratelimit_service_rate_limit_total_hits{domain=\"d\",key1=\"user\"}");
    let before = asked();
    server.signal("STOP");
    let refused = client.acquire([descriptor! { "user" => "x" }]).await.unwrap_err();
    server.signal("CONT");
    assert_eq!(refused.decided_by(), DecidedBy::Fallback);
    wait_for_async("the slot to be taken", async || (asked() > before).then_some(())).await;
    until_left(&plain, "user", 2).await;
}

/// Counted where the work is done.
#[tokio::test]
async fn never_more_permits_than_slots() {
    let redis = RedisServer::start();
    let servers = [start(&redis.url()), start(&redis.url())];
    let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut callers = JoinSet::new();
    for caller in 0..64 {
        let client = client(&servers[caller % 2]);
        let (now, most) = (Arc::clone(&now), Arc::clone(&most));
        callers.spawn(async move {
            let mut passed = 0;
            for _ in 0..50 {
                if let Ok(permit) = client.acquire([descriptor! { "many" => "x" }]).await {
                    most.fetch_max(now.fetch_add(1, Relaxed) + 1, Relaxed);
                    tokio::task::yield_now().await;
                    now.fetch_sub(1, Relaxed);
                    passed += 1;
                    drop(permit);
                }
            }
            passed
        });
    }
    let passed: usize = callers.join_all().await.into_iter().sum();
    assert!(most.load(Relaxed) <= 20 && passed > 64, "{most:?} at once, {passed} passed");
    until_left(&servers[0].client().await, "many", 20).await;
}

#[tokio::test]
async fn the_layer_holds_its_slot_until_the_body_ends() {
    let server = start("memory");
    let plain = server.client().await;
    let layer = PermitLayer::new(client(&server), |head: &http::request::Parts| match head.uri.path() {
        "/free" => Vec::new(),
        _ => vec![descriptor! { "user" => "x" }],
    });
    let pieces = |last: bool| {
        let pieces = [Ok::<_, std::io::Error>(http_body::Frame::data(Bytes::from_static(b"piece")))];
        let endless = tokio_stream::StreamExt::chain(tokio_stream::iter(pieces), tokio_stream::pending());
        if last { Body::from("piece") } else { Body::new(StreamBody::new(endless)) }
    };
    let router = Router::new()
        .route("/short", get(async move || pieces(true)))
        .route("/endless", get(async move || pieces(false)))
        .route("/free", get(async || "free"))
        .route("/fails", get(async || StatusCode::INTERNAL_SERVER_ERROR));
    let mut service = layer.layer(router);
    let mut ask = async |path: &str| {
        let ready = |context: &mut std::task::Context<'_>| Service::<Request<Body>>::poll_ready(&mut service, context);
        std::future::poll_fn(ready).await.unwrap();
        service.call(Request::get(path).body(Body::empty()).unwrap()).await.unwrap()
    };
    let one = ask("/short").await;
    assert_eq!(left(&plain, "user").await, 1, "the body has not been read");
    let mut two = ask("/endless").await;
    assert_eq!(two.body_mut().frame().await.unwrap().unwrap().into_data().unwrap(), "piece");
    let refused = ask("/short").await;
    assert_eq!(
        (refused.status(), refused.headers()["ratelimit-policy"].to_str().unwrap()),
        (StatusCode::TOO_MANY_REQUESTS, "\"default\";q=2;qu=\"concurrent-requests\"")
    );
    assert_eq!(ask("/free").await.status(), StatusCode::OK);
    // Read to the end, though the response is still there; and dropped in the middle.
    let mut one = one.into_body();
    while one.frame().await.is_some() {}
    until_left(&plain, "user", 1).await;
    drop(two);
    until_left(&plain, "user", 2).await;
    assert_eq!(ask("/fails").await.status(), StatusCode::INTERNAL_SERVER_ERROR);
    until_left(&plain, "user", 2).await;
    drop(one);
}

/// Two services, one limit, learned from what all callers say; `by` calls of Envoy's protocol, too.
#[tokio::test]
async fn a_limit_learns_from_all_who_give_back() {
    let redis = RedisServer::start();
    let (one, other) = (start(&redis.url()), start(&redis.url()));
    let unary = Client::builder(format!("http://{}", other.grpc)).domain("d").timeout(DEADLINE).batching(false);
    let clients = [client(&one), unary.connect_lazy().unwrap()];
    let limit = |verdict: &sluicegate_client::Verdict| {
        verdict.statuses()[0].limit.as_ref().map(|limit| limit.requests_per_unit).unwrap()
    };
    let round = async |outcome: Outcome| {
        let mut permits = Vec::new();
        loop {
            let number = permits.len();
            match clients[number % 2].acquire([descriptor! { "learns" => "x" }]).await {
                Ok(permit) => permits.push(permit),
                Err(refused) => {
                    assert!(refused.shed());
                    assert_eq!(limit(&refused) as usize, number);
                    break;
                }
            }
        }
        let many = permits.len();
        for mut permit in permits {
            permit.set_outcome(outcome);
            permit.release().await;
        }
        many
    };
    assert_eq!(round(Outcome::Success).await, 10);
    let rises =
        wait_for_async("the limit to rise", async || Some(round(Outcome::Success).await).filter(|many| *many > 10))
            .await;
    let falls = async || Some(round(Outcome::Dropped).await).filter(|many| *many < rises);
    wait_for_async("the limit to fall", falls).await;
}
