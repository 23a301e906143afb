//! Shutdown: health reports it, calls in flight are answered, and the process exits with code 0.

use tonic::transport::{Channel, Endpoint};
use tonic_health::pb::{
    HealthCheckRequest, HealthCheckResponse, health_check_response::ServingStatus, health_client::HealthClient,
};

use crate::support::{RedisServer, Server, request_for, wait_for, wait_for_async};

async fn health(server: &Server) -> HealthClient<Channel> {
    let endpoint = Endpoint::from_shared(format!("http://{}", server.grpc)).unwrap();
    HealthClient::new(endpoint.connect().await.unwrap())
}

fn health_request(service: &str) -> HealthCheckRequest {
    HealthCheckRequest { service: service.into() }
}

/// Waits until a request has reached the store.
async fn wait_until_requested(server: &Server) {
    let series = "ratelimit_service_rate_limit_total_hits{domain=\"example\",key1=\"user\"}";
    wait_for_async("the request to be counted", async || (server.metric(series) == 1.0).then_some(())).await;
}

#[tokio::test]
async fn health_reports_not_serving_while_calls_are_still_answered() {
    let server = Server::builder().set("shutdown.delay", "1h").start();
    let (client, mut health) = (server.client().await, health(&server).await);
    let service = "envoy.service.ratelimit.v3.RateLimitService";
    for name in ["", service] {
        assert_eq!(health.check(health_request(name)).await.unwrap().into_inner().status(), ServingStatus::Serving);
    }
    server.signal("TERM");
    wait_for_async("the status NOT_SERVING", async || {
        let status = health.check(health_request(service)).await.unwrap().into_inner().status();
        (status == ServingStatus::NotServing).then_some(())
    })
    .await;
    assert!(client.check(request_for("example", &[("user", "x")])).await.unwrap().allowed());
    assert!(server.get("/readyz").contains("shutting down"));
    server.signal("TERM");
    assert!(server.wait().await.success(), "a second signal ends the process immediately");
}

/// A call waits for a frozen Redis when the service receives the signal, and is answered before the process exits.
#[tokio::test]
async fn calls_in_flight_are_finished() {
    let redis = RedisServer::start();
    let server = Server::builder().store(&redis.url()).set("redis.timeout", "20s").start();
    let client = server.client().await;
    redis.freeze();
    let call = tokio::spawn(async move { client.check(request_for("example", &[("user", "x")])).await });
    wait_until_requested(&server).await;
    server.signal("TERM");
    wait_for("the port to close", || std::net::TcpStream::connect(server.grpc).err());
    redis.thaw();
    assert!(call.await.unwrap().is_ok());
    assert!(server.wait().await.success());
}

/// Neither a client that watches the health nor a call that never ends keeps the process running.
#[tokio::test]
async fn watchers_and_endless_calls_do_not_delay_the_shutdown() {
    let server = Server::builder().set("shutdown.grace", "20s").start();
    let mut watch = health(&server).await.watch(health_request("")).await.unwrap().into_inner();
    let status = |response: Option<HealthCheckResponse>| response.map(|response| response.status());
    assert_eq!(status(watch.message().await.unwrap()), Some(ServingStatus::Serving));
    server.signal("TERM");
    assert_eq!(status(watch.message().await.unwrap()), Some(ServingStatus::NotServing));
    assert!(server.wait().await.success());

    let redis = RedisServer::start();
    let server =
        Server::builder().store(&redis.url()).set("redis.timeout", "1h").set("shutdown.grace", "100ms").start();
    let client = server.client().await;
    redis.freeze();
    let call = tokio::spawn(async move { client.check(request_for("example", &[("user", "x")])).await });
    wait_until_requested(&server).await;
    server.signal("INT");
    assert!(server.wait().await.success());
    assert!(call.await.unwrap().is_err());
}
