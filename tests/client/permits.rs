//! Permits: slots that the client takes, renews and releases, and the samples from which adaptive limits learn.

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
    raw_client::{self, Request as PlainRequest},
    rules, wait_for_async,
};

const RULES: &str = "
domain: d
descriptors:
- key: user
  rate_limit: {algorithm: concurrency, limit: 2, hold: 1h, holder: holder}
- key: brief
  rate_limit: {algorithm: concurrency, limit: 1, hold: 3s, holder: request_id}
- key: many
  rate_limit: {algorithm: concurrency, limit: 20, hold: 1h, holder: holder}
- key: learns
  rate_limit: {algorithm: adaptive, method: aimd, ceiling: 100, initial: 10, hold: 1h, holder: holder}
";

fn start(store: &str) -> Server {
    let folder = rules(&[("d.yaml", RULES)]);
    Server::builder().rules(folder.path()).store(store).start()
}

fn client(server: &Server) -> Client {
    Client::builder(format!("http://{}", server.grpc)).domain("d").timeout(DEADLINE).connect_lazy().unwrap()
}

/// Returns the number of free slots.
async fn free_slots(plain: &raw_client::Client, key: &str) -> u32 {
    let peek = PlainRequest::new("d").descriptor(entries(&[(key, "x"), ("holder", "nobody")]).hits(0));
    plain.check(peek).await.unwrap().remaining().unwrap()
}

async fn wait_for_free_slots(plain: &raw_client::Client, key: &str, slots: u32) {
    wait_for_async("slots to be free", async || (free_slots(plain, key).await == slots).then_some(())).await;
}

#[tokio::test]
async fn a_permit_is_released_however_its_holder_ends() {
    let redis = RedisServer::start();
    for (store, batching) in [("memory", true), (&*redis.url(), true), ("memory", false)] {
        let server = start(store);
        let plain = server.client().await;
        let address = format!("http://{}", server.grpc);
        let client = Client::builder(address).domain("d").timeout(DEADLINE).batching(batching);
        let client = client.connect_lazy().unwrap();
        let acquire = || client.acquire([descriptor! { "user" => "x" }]);
        let (one, two) = (acquire().await.unwrap(), acquire().await.unwrap());
        let denied = acquire().await.unwrap_err();
        assert!(denied.retry_after() > Some(Duration::from_secs(3_500)) && !denied.shed());
        one.release().await;
        assert_eq!(free_slots(&plain, "user").await, 1, "release waits for the service");
        let two = tokio::spawn(async move {
            let _two = two;
            panic!("intended");
        });
        assert!(two.await.is_err());
        wait_for_free_slots(&plain, "user", 2).await;
        // Tasks are cancelled while they hold a permit, and while they acquire one.
        let (task_client, acquired) = (client.clone(), Arc::new(Semaphore::new(0)));
        let signal = Arc::clone(&acquired);
        let holder = tokio::spawn(async move {
            let _permit = task_client.acquire([descriptor! { "user" => "x" }]).await.unwrap();
            signal.add_permits(1);
            std::future::pending::<()>().await;
        });
        acquired.acquire().await.unwrap().forget();
        assert_eq!(free_slots(&plain, "user").await, 1);
        holder.abort();
        wait_for_free_slots(&plain, "user", 2).await;
        for _ in 0..50 {
            let task_client = client.clone();
            let acquiring =
                tokio::spawn(async move { task_client.acquire([descriptor! { "user" => "x" }]).await.map(drop) });
            tokio::task::yield_now().await;
            acquiring.abort();
            let _ = acquiring.await;
        }
        wait_for_free_slots(&plain, "user", 2).await;
    }
}

#[tokio::test]
async fn a_permit_keeps_its_slot_beyond_the_hold() {
    /// That of the rule. A busy machine may renew the permit late.
    const HOLD: Duration = Duration::from_secs(3);
    let server = start("memory");
    let client = client(&server);
    let acquire = || client.acquire([descriptor! { "brief" => "x" }]).holder_key("request_id");
    let permit = acquire().await.unwrap();
    let start = Instant::now();
    wait_for_async("twice the hold", async || {
        assert!(acquire().await.is_err() && !permit.is_lost());
        (start.elapsed() > 2 * HOLD).then_some(())
    })
    .await;
    drop(permit);
    wait_for_async("the slot to be free", async || acquire().await.ok()).await.release().await;
}

/// If an instance fails while the client holds permits, their slots are released at another instance.
#[tokio::test]
async fn slots_are_released_after_the_failure_of_an_instance() {
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
    // SIGKILL stops one instance while all slots are held. The client releases them at the other.
    drop(one);
    drop(permits);
    wait_for_free_slots(&plain, "many", 20).await;
}

/// The service takes a slot, but its response is late. The client denies the request by its fallback, and releases the
/// slot.
#[tokio::test]
async fn a_slot_is_released_if_the_response_was_lost() {
    let server = start("memory");
    let plain = server.client().await;
    let builder = Client::builder(format!("http://{}", server.grpc)).domain("d").on_error(OnError::Deny);
    let client = builder.timeout(Duration::from_millis(500)).connect_lazy().unwrap();
    client.acquire([descriptor! { "user" => "x" }]).await.unwrap().release().await;
    let requested_hits = || server.metric("ratelimit_service_rate_limit_total_hits{domain=\"d\",key1=\"user\"}");
    let before = requested_hits();
    server.signal("STOP");
    let denied = client.acquire([descriptor! { "user" => "x" }]).await.unwrap_err();
    server.signal("CONT");
    assert_eq!(denied.decided_by(), DecidedBy::Fallback);
    wait_for_async("the slot to be taken", async || (requested_hits() > before).then_some(())).await;
    wait_for_free_slots(&plain, "user", 2).await;
}

/// The callers themselves count the permits that are held at the same time.
#[tokio::test]
async fn there_are_never_more_permits_than_slots() {
    let redis = RedisServer::start();
    let servers = [start(&redis.url()), start(&redis.url())];
    let (held, max_held) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut callers = JoinSet::new();
    for caller in 0..64 {
        let client = client(&servers[caller % 2]);
        let (held, max_held) = (Arc::clone(&held), Arc::clone(&max_held));
        callers.spawn(async move {
            let mut acquired = 0;
            for _ in 0..50 {
                if let Ok(permit) = client.acquire([descriptor! { "many" => "x" }]).await {
                    max_held.fetch_max(held.fetch_add(1, Relaxed) + 1, Relaxed);
                    tokio::task::yield_now().await;
                    held.fetch_sub(1, Relaxed);
                    acquired += 1;
                    drop(permit);
                }
            }
            acquired
        });
    }
    let acquired: usize = callers.join_all().await.into_iter().sum();
    assert!(max_held.load(Relaxed) <= 20 && acquired > 64, "{max_held:?} held at the same time, {acquired} acquired");
    wait_for_free_slots(&servers[0].client().await, "many", 20).await;
}

#[tokio::test]
async fn a_request_waits_in_the_layer_until_a_slot_is_free() {
    let server = start("memory");
    let layer = PermitLayer::new(client(&server), |_: &http::request::Parts| vec![descriptor! { "user" => "x" }]);
    let mut service = layer.max_wait(DEADLINE).layer(Router::new().route("/", get(async || "served")));
    let mut send = || service.call(Request::get("/").body(Body::empty()).unwrap());
    // A slot is held until the body of the response is dropped.
    let one = send().await.unwrap();
    let _two = send().await.unwrap();
    let waiting = tokio::spawn(send());
    wait_for_async("the third request to be denied once", async || {
        let denied = server.metric("ratelimit_service_rate_limit_over_limit{domain=\"d\",key1=\"user\"}");
        (denied >= 1.0).then_some(())
    })
    .await;
    assert!(!waiting.is_finished());
    drop(one);
    assert_eq!(waiting.await.unwrap().unwrap().status(), StatusCode::OK);
}

#[tokio::test]
async fn the_layer_holds_a_permit_until_the_body_ends() {
    let server = start("memory");
    let plain = server.client().await;
    let layer = PermitLayer::new(client(&server), |head: &http::request::Parts| match head.uri.path() {
        "/free" => Vec::new(),
        _ => vec![descriptor! { "user" => "x" }],
    });
    let body = |ends: bool| {
        let pieces = [Ok::<_, std::io::Error>(http_body::Frame::data(Bytes::from_static(b"piece")))];
        let endless = tokio_stream::StreamExt::chain(tokio_stream::iter(pieces), tokio_stream::pending());
        if ends { Body::from("piece") } else { Body::new(StreamBody::new(endless)) }
    };
    let router = Router::new()
        .route("/short", get(async move || body(true)))
        .route("/endless", get(async move || body(false)))
        .route("/free", get(async || "free"))
        .route("/fails", get(async || StatusCode::INTERNAL_SERVER_ERROR));
    let mut service = layer.layer(router);
    let mut send = async |path: &str| {
        let ready = |context: &mut std::task::Context<'_>| Service::<Request<Body>>::poll_ready(&mut service, context);
        std::future::poll_fn(ready).await.unwrap();
        service.call(Request::get(path).body(Body::empty()).unwrap()).await.unwrap()
    };
    let one = send("/short").await;
    assert_eq!(free_slots(&plain, "user").await, 1, "the slot is held until the body is read");
    let mut two = send("/endless").await;
    assert_eq!(two.body_mut().frame().await.unwrap().unwrap().into_data().unwrap(), "piece");
    let denied = send("/short").await;
    assert_eq!(
        (denied.status(), denied.headers()["ratelimit-policy"].to_str().unwrap()),
        (StatusCode::TOO_MANY_REQUESTS, "\"user\";q=2;qu=\"concurrent-requests\"")
    );
    assert_eq!(send("/free").await.status(), StatusCode::OK);
    // The first body is read to its end, while the response still exists. The second is dropped before its end.
    let mut one = one.into_body();
    while one.frame().await.is_some() {}
    wait_for_free_slots(&plain, "user", 1).await;
    drop(two);
    wait_for_free_slots(&plain, "user", 2).await;
    assert_eq!(send("/fails").await.status(), StatusCode::INTERNAL_SERVER_ERROR);
    wait_for_free_slots(&plain, "user", 2).await;
    drop(one);
}

/// Two instances share a limit that learns from the samples of every caller, on streams and by calls of Envoy's
/// protocol.
#[tokio::test]
async fn a_dropped_permit_reports_its_outcome() {
    let redis = RedisServer::start();
    let server = start(&redis.url());
    let client = client(&server);
    let mut permits = Vec::new();
    while let Ok(permit) = client.acquire([descriptor! { "learns" => "x" }]).await {
        permits.push(permit);
    }
    let limit = permits.len();
    for mut permit in permits {
        permit.set_outcome(Outcome::Dropped);
    }
    wait_for_async("the limit to fall", async || {
        let permit = client.acquire([descriptor! { "learns" => "x" }]).await.ok()?;
        let now = permit.verdict().statuses()[0].limit.as_ref()?.requests_per_unit;
        permit.release().await;
        ((now as usize) < limit).then_some(())
    })
    .await;
}

#[tokio::test]
async fn an_adaptive_limit_learns_from_the_samples_of_all_callers() {
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
                Err(denied) => {
                    assert!(denied.shed());
                    assert_eq!(limit(&denied) as usize, number);
                    break;
                }
            }
        }
        let acquired = permits.len();
        for mut permit in permits {
            permit.set_outcome(outcome);
            permit.release().await;
        }
        acquired
    };
    assert_eq!(round(Outcome::Success).await, 10);
    let increased =
        wait_for_async("the limit to rise", async || Some(round(Outcome::Success).await).filter(|count| *count > 10))
            .await;
    let decreased = async || Some(round(Outcome::Dropped).await).filter(|count| *count < increased);
    wait_for_async("the limit to fall", decreased).await;
}
