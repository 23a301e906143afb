//! How many connections there may be, and for how long.

use std::io::{Read, Write};

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};

use crate::support::{DEADLINE, Operator, RedisServer, Server, request_for, server::command, wait_for, wait_for_async};

#[tokio::test]
async fn an_old_connection_is_asked_to_go_after_its_calls() {
    let redis = RedisServer::start();
    let server = Server::builder()
        .store(&redis.url())
        .set("redis.timeout", "20s")
        .set("grpc.max_connection_age", "200ms")
        .set("telemetry.log.level", "info,sluicegate::transport=debug")
        .start();
    let stream = tokio::net::TcpStream::connect(server.grpc).await.unwrap();
    let handshake = http2::handshake::<_, _, Full<Bytes>>(TokioExecutor::new(), TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.unwrap();
    let connection = tokio::spawn(connection);
    redis.freeze();
    let call = tokio::spawn(sender.send_request(request()));
    wait_for_async("the connection to be asked to go", async || {
        server.log().contains("closing connection gracefully").then_some(())
    })
    .await;
    redis.thaw();
    assert_eq!(call.await.unwrap().unwrap().status(), 200, "a call under way is answered");
    assert!(connection.await.unwrap().is_ok());
}

/// In place of a port; one that a crash has left behind is no obstacle, and an orderly end leaves none.
#[tokio::test]
async fn a_unix_socket_is_served() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("grpc.sock");
    let start = || Server::builder().set("grpc.uds", path.to_str().unwrap()).start();
    drop(start());
    assert!(path.exists(), "it was killed");
    let server = start();
    let stream = tokio::net::UnixStream::connect(&path).await.unwrap();
    let handshake = http2::handshake::<_, _, Full<Bytes>>(TokioExecutor::new(), TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.unwrap();
    tokio::spawn(connection);
    let response = sender.send_request(request()).await.unwrap();
    let body = response.into_body().collect().await.unwrap();
    assert_eq!(body.trailers().unwrap()["grpc-status"], "0");
    // Somebody else's socket is left alone.
    let output = command().args(["serve", "--http-addr", "127.0.0.1:0"]).env("SLUICEGATE__GRPC__UDS", &path).output();
    let complaint = String::from_utf8(output.unwrap().stderr).unwrap();
    assert!(complaint.contains("cannot listen on") && complaint.contains("grpc.sock for gRPC"), "{complaint}");
    drop(sender);
    server.signal("TERM");
    assert!(server.wait().await.success());
    assert!(!path.exists());
}

/// user=x of the domain example.
fn request() -> Request<Full<Bytes>> {
    let message = b"\0\0\0\0\x16\x0a\x07example\x12\x0b\x0a\x09\x0a\x04user\x12\x01x";
    Request::post("http://x/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit")
        .header("content-type", "application/grpc")
        .body(Full::from(&message[..]))
        .unwrap()
}

#[tokio::test]
async fn a_connection_too_many_is_closed() {
    let server = Server::builder().set("grpc.max_connections", "2").start();
    let clients = [server.client().await, server.client().await];
    wait_for("both to count", || (server.metric("sluicegate_grpc_connections") == 2.0).then_some(()));
    let mut third = std::net::TcpStream::connect(server.grpc).unwrap();
    third.set_read_timeout(Some(DEADLINE)).unwrap();
    assert_eq!(third.read(&mut [0; 16]).unwrap(), 0, "closed without a word");
    for client in clients {
        assert!(client.check(request_for("nowhere", &[("k", "v")])).await.unwrap().allowed());
    }
    wait_for_async("room for another", async || (server.metric("sluicegate_grpc_connections") == 0.0).then_some(()))
        .await;
    assert!(server.client().await.check(request_for("nowhere", &[("k", "v")])).await.unwrap().allowed());
}

/// A handful of connections is spread over the workers evenly, not by chance.
#[tokio::test]
async fn every_worker_gets_its_share() {
    let server = Server::builder().set("workers", "4").start();
    let mut clients = Vec::new();
    for _ in 0..8 {
        clients.push(server.client().await);
    }
    wait_for("all to count", || (server.metric("sluicegate_grpc_connections") == 8.0).then_some(()));
    for worker in 0..4 {
        let series = format!("sluicegate_grpc_worker_connections{{worker=\"{worker}\"}}");
        assert_eq!(server.metric(&series), 2.0, "{}", server.get("/metrics"));
    }
}

/// Whoever was answered last goes last.
#[tokio::test]
async fn the_one_that_was_answered_least_lately_gives_way() {
    let server = Server::builder().set("http.max_connections", "3").start();
    let connect = || {
        let stream = std::net::TcpStream::connect(server.http).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream
    };
    let ask = |stream: &mut std::net::TcpStream| {
        stream.write_all(b"GET /healthcheck HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
        let mut answer = [0; 512];
        let length = stream.read(&mut answer).unwrap();
        String::from_utf8_lossy(&answer[..length]).into_owned()
    };
    let mut asking = connect();
    assert!(ask(&mut asking).contains("200 OK"));
    let before = server.open_file_descriptors();
    let mut silent = [connect(), connect()];
    wait_for("both to be there", || (server.open_file_descriptors() == before + 2).then_some(()));
    assert!(ask(&mut asking).contains("200 OK"));
    let mut last = connect();
    // It was there first, and has been answered since the first of the silent ones came.
    assert_eq!(silent[0].read(&mut [0; 16]).unwrap_or(0), 0, "closed");
    assert!(ask(&mut asking).contains("200 OK") && ask(&mut last).contains("200 OK"));
}

/// With few descriptors and many callers that say nothing, or take their time, on every port: whoever asks is answered.
#[tokio::test]
async fn whoever_says_nothing_shuts_nobody_out() {
    let redis = RedisServer::start();
    let builder = Server::builder().store(&redis.url()).set("admin.addr", "127.0.0.1:0").max_open_files(256);
    let operator = Operator::with(builder);
    let server = &operator.server;
    assert!(server.log().contains("the limit of open files has no room for grpc.max_connections"), "{}", server.log());
    let admin = operator.addr.trim_start_matches("http://").parse().unwrap();
    let mut callers = Vec::new();
    for addr in [server.http, admin, server.grpc] {
        for number in 0..200 {
            let mut stream = std::net::TcpStream::connect(addr).unwrap();
            let _ = stream.write_all(
                [&b""[..], b"GET /metrics HT", b"POST /json HTTP/1.1\r\ncontent-length: 9\r\n\r\n{"][number % 3],
            );
            callers.push(stream);
        }
        assert_eq!(server.get("/healthcheck"), "OK");
    }
    // Those that gave way are closed, and not only forgotten.
    wait_for("few to be open", || (server.open_file_descriptors() < 220).then_some(()));
    assert!(operator.ctl(&["health"]).contains("up"));
    let times = server.log().matches("closing the one with the oldest last response").count();
    assert_eq!(times, 2, "a line for each listener: {}", server.log());
    assert!(server.log().matches("cannot accept connections").count() <= 3, "{}", server.log());
    // Redis is reached anew.
    redis.cli(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    drop(callers.drain(400..));
    wait_for_async("a decision", async || {
        let answer = server.client().await.check(request_for("example", &[("user", "y")])).await.ok()?;
        answer.remaining().map(drop)
    })
    .await;
}
