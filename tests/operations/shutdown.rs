//! Shutdown: health reports it, calls in flight are answered, and the process exits with code 0.

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::Duration,
};

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
    // Long enough for a busy machine to close the port.
    let server = Server::builder().store(&redis.url()).set("redis.timeout", "10s").start();
    let client = server.client().await;
    redis.freeze();
    let call = tokio::spawn(async move { client.check(request_for("example", &[("user", "x")])).await });
    wait_until_requested(&server).await;
    server.signal("TERM");
    wait_for("the port to close", || TcpStream::connect(server.grpc).err());
    redis.thaw();
    assert!(call.await.unwrap().is_ok());
    assert!(server.wait().await.success());
}

/// A request over HTTP whose body is incomplete when the service receives the signal is answered. An idle connection is
/// closed at once.
#[tokio::test]
async fn http_requests_in_flight_are_finished() {
    let server = Server::builder().set("shutdown.grace", "1h").start();
    let connect = || {
        let stream = TcpStream::connect(server.http).unwrap();
        // Shorter than the time after which the service closes silent connections.
        stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        stream
    };
    let read = |stream: &mut TcpStream| {
        let mut response = [0; 1_024];
        let length = stream.read(&mut response).unwrap();
        String::from_utf8_lossy(&response[..length]).into_owned()
    };
    let (mut idle, mut busy) = (connect(), connect());
    idle.write_all(b"GET /healthcheck HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    assert!(read(&mut idle).contains("200 OK"));
    let body = br#"{"domain": "example", "descriptors": [{"entries": [{"key": "user", "value": "bob"}]}]}"#;
    let length = body.len();
    busy.write_all(
        format!("POST /json HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: {length}\r\n\r\n")
            .as_bytes(),
    )
    .unwrap();
    assert!(read(&mut busy).contains("100 Continue"));
    server.signal("TERM");
    assert_eq!(read(&mut idle), "");
    for port in [server.http, server.grpc] {
        wait_for("the port to close", || TcpStream::connect(port).err());
    }
    // A process that does not wait for the request exits within this time.
    for _ in 0..50 {
        assert!(server.open_file_descriptors() > 0);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    busy.write_all(body).unwrap();
    assert!(read(&mut busy).contains("200 OK"));
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
