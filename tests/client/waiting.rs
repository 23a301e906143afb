//! Callers that wait until they are allowed, with a real service.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use opentelemetry::metrics::MeterProvider as _;
use sluicegate_client::{Client, DecidedBy, Verdict, descriptor};

use crate::support::{DEADLINE, RedisServer, Server, rules, wait_for_async};

const RULES: &str = "
domain: d
descriptors:
- { key: fixed, rate_limit: { unit: second, requests_per_unit: 3 } }
- { key: first, rate_limit: { unit: second, requests_per_unit: 3, window: first_request } }
- { key: window, rate_limit: { unit: second, requests_per_unit: 3, algorithm: sliding_window } }
- { key: log, rate_limit: { unit: second, requests_per_unit: 3, algorithm: sliding_log } }
- { key: bucket, rate_limit: { unit: second, requests_per_unit: 3, algorithm: token_bucket, burst: 2 } }
- { key: debt, rate_limit: { unit: second, requests_per_unit: 3, algorithm: token_bucket, burst: 1, debt: 1 } }
- { key: large, rate_limit: { unit: hour, requests_per_unit: 18_000_000_000, burst: 2_000_000, algorithm: token_bucket,
    cost_per_hit: 1_000_000 } }
- { key: paced, rate_limit: { unit: second, requests_per_unit: 10, algorithm: gcra, burst: 1 } }
- { key: queued, rate_limit: { unit: second, requests_per_unit: 5, algorithm: leaky_bucket, burst: 1, queue: 1 } }
- key: several
  rate_limits:
  - { unit: second, requests_per_unit: 10, algorithm: gcra, burst: 1 }
  - { unit: second, requests_per_unit: 3, name: per_second }
- { key: slots, rate_limit: { algorithm: concurrency, limit: 2, hold: 1h, holder: holder } }
- { key: hourly, rate_limit: { unit: hour, requests_per_unit: 1, algorithm: token_bucket } }
";

fn start(store: &str) -> Server {
    let folder = rules(&[("d.yaml", RULES)]);
    Server::builder().rules(folder.path()).store(store).start()
}

fn client(server: &Server) -> Client {
    Client::builder(format!("http://{}", server.grpc)).domain("d").timeout(DEADLINE).connect_lazy().unwrap()
}

/// Starts this number of waiters in order. Returns their verdicts in the order of their completion, with their numbers.
async fn wait_together(client: &Client, key: &str, waiters: usize) -> Vec<(usize, Verdict)> {
    let done = Mutex::new(Vec::new());
    join_all((0..waiters).map(|waiter| {
        let done = &done;
        async move {
            let verdict = client.check([descriptor! { key => "bob" }]).max_wait(DEADLINE).await;
            done.lock().unwrap().push((waiter, verdict));
        }
    }))
    .await;
    done.into_inner().unwrap()
}

#[tokio::test]
async fn every_algorithm_lets_all_waiters_pass_in_time() {
    let redis = RedisServer::start();
    for store in ["memory", &redis.url()] {
        let server = start(store);
        let client = &client(&server);
        let keys = ["fixed", "first", "window", "log", "bucket", "debt", "large", "paced", "queued", "several"];
        join_all(keys.map(|key| async move {
            let began = Instant::now();
            let verdicts = wait_together(client, key, 7).await;
            assert!(verdicts.iter().all(|(_, verdict)| verdict.allowed()), "{key} with {store}: {verdicts:?}");
            let by_service = verdicts.iter().all(|(_, verdict)| verdict.decided_by() == DecidedBy::Server);
            assert!(by_service, "{key} with {store}: {verdicts:?}");
            // The seventh hit is at least in the third window of three hits, or the fifth after a burst of two.
            let shortest = Duration::from_millis(if key == "paced" { 600 } else { 990 });
            assert!(began.elapsed() >= shortest, "{key} with {store}: {:?}", began.elapsed());
        }))
        .await;
    }
}

#[tokio::test]
async fn waiters_are_allowed_in_the_order_of_their_arrival() {
    let server = start("memory");
    let client = client(&server);
    let order: Vec<usize> = wait_together(&client, "paced", 8).await.into_iter().map(|(waiter, _)| waiter).collect();
    assert_eq!(order, [0, 1, 2, 3, 4, 5, 6, 7]);
}

#[tokio::test]
async fn a_turn_that_comes_too_late_is_denied_at_once() {
    let server = start("memory");
    let client = client(&server);
    let hourly = async || client.check([descriptor! { "hourly" => "bob" }]).max_wait(DEADLINE).await;
    assert!(hourly().await.allowed());
    let began = Instant::now();
    let denied = hourly().await;
    assert!(!denied.allowed() && denied.retry_after().unwrap() > DEADLINE);
    assert!(began.elapsed() < DEADLINE);
}

/// Two slots, and a waiter for each slot that another process or the same one releases.
#[tokio::test]
async fn waiters_for_slots_get_those_that_any_process_releases() {
    let server = start("memory");
    let other = client(&server);
    let client = client(&server);
    let held = client.acquire([descriptor! { "slots" => "x" }]).await.unwrap();
    let elsewhere = other.acquire([descriptor! { "slots" => "x" }]).await.unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let waiter = |number: usize| {
        let client = client.clone();
        let order = Arc::clone(&order);
        tokio::spawn(async move {
            let permit = client.acquire([descriptor! { "slots" => "x" }]).max_wait(DEADLINE).await.unwrap();
            order.lock().unwrap().push(number);
            permit
        })
    };
    let [first, second, third] = [1, 2, 3].map(waiter);
    // Until the first denial, the waiters check at the same time, and a later one could get the released slot.
    wait_for_async("the waiters to be denied", async || {
        let denied = server.metric("ratelimit_service_rate_limit_over_limit{domain=\"d\",key1=\"slots\"}");
        (denied >= 3.0).then_some(())
    })
    .await;
    drop(elsewhere);
    let first = first.await.unwrap();
    drop(held);
    let second = second.await.unwrap();
    drop((first, second));
    drop(third.await.unwrap());
    assert_eq!(*order.lock().unwrap(), [1, 2, 3]);
}

#[tokio::test]
async fn a_waiter_does_not_wait_for_a_service_that_is_gone() {
    let server = start("memory");
    let client = Client::builder(format!("http://{}", server.grpc)).domain("d").connect_lazy().unwrap();
    let _held = [
        client.acquire([descriptor! { "slots" => "x" }]).await.unwrap(),
        client.acquire([descriptor! { "slots" => "x" }]).await.unwrap(),
    ];
    let waiting = tokio::spawn({
        let client = client.clone();
        async move { client.acquire([descriptor! { "slots" => "x" }]).max_wait(Duration::from_secs(3_600)).await }
    });
    wait_for_async("the waiter to ask", async || {
        let denied = server.metric("ratelimit_service_rate_limit_over_limit{domain=\"d\",key1=\"slots\"}");
        (denied >= 1.0).then_some(())
    })
    .await;
    drop(server);
    let permit = tokio::time::timeout(DEADLINE, waiting).await.expect("the waiter still waits").unwrap().unwrap();
    assert_eq!(permit.verdict().decided_by(), DecidedBy::Fallback);
}

#[tokio::test]
async fn metrics_have_the_number_of_waiters_and_their_waits() {
    let server = start("memory");
    let registry = prometheus::Registry::new();
    let exporter = opentelemetry_prometheus::exporter().with_registry(registry.clone()).build().unwrap();
    let provider = opentelemetry_sdk::metrics::SdkMeterProvider::builder().with_reader(exporter).build();
    let builder = Client::builder(format!("http://{}", server.grpc)).domain("d").timeout(DEADLINE);
    let client = builder.meter(provider.meter("gateway")).connect_lazy().unwrap();
    let metric = |prefix: &str| {
        let page = prometheus::TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
        let line = page.lines().find(|line| line.starts_with(prefix)).map(str::to_owned);
        line.and_then(|line| line.split(' ').next_back()?.parse::<f64>().ok())
    };
    let held = client.acquire([descriptor! { "slots" => "x" }]).await.unwrap();
    let also_held = client.acquire([descriptor! { "slots" => "x" }]).await.unwrap();
    assert_eq!(metric("sluicegate_client_waiters"), None, "nobody has waited");
    let waiter = |client: Client| {
        tokio::spawn(async move { client.acquire([descriptor! { "slots" => "x" }]).max_wait(DEADLINE).await })
    };
    let cancelled = waiter(client.clone());
    let waiting = waiter(client.clone());
    let waiters = async |number: f64| {
        let reached = async || (metric("sluicegate_client_waiters") == Some(number)).then_some(());
        wait_for_async("the number of waiters", reached).await;
    };
    waiters(2.0).await;
    cancelled.abort();
    waiters(1.0).await;
    drop(held);
    drop(waiting.await.unwrap().unwrap());
    waiters(0.0).await;
    drop(also_held);
    assert!(client.check([descriptor! { "hourly" => "x" }]).max_wait(DEADLINE).await.allowed());
    assert!(!client.check([descriptor! { "hourly" => "x" }]).max_wait(DEADLINE).await.allowed());
    let waits = |allowed: bool| metric(&format!("sluicegate_client_wait_seconds_count{{allowed=\"{allowed}\""));
    assert_eq!((waits(true), waits(false)), (Some(2.0), Some(1.0)));
    waiters(0.0).await;
}
