//! Limits on the number and the age of connections.

use std::{
    io::{Read, Write},
    net::SocketAddr,
};

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
};

use crate::support::{
    DEADLINE, Operator, RedisServer, Server,
    http2_frames::{DATA, END_HEADERS, END_STREAM, GREETING, HEADERS, RST_STREAM, call_headers, frame},
    operator::OPERATE,
    request_for,
    server::command,
    wait_for, wait_for_async,
};

#[tokio::test]
async fn an_old_connection_closes_after_its_calls() {
    let redis = RedisServer::start();
    let server = Server::builder()
        .store(&redis.url())
        .set("grpc.max_connection_age", "200ms")
        .set("telemetry.log.level", "info,sluicegate::transport=debug")
        .start();
    let stream = TcpStream::connect(server.grpc).await.unwrap();
    let handshake = http2::handshake::<_, _, Full<Bytes>>(TokioExecutor::new(), TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.unwrap();
    let connection = tokio::spawn(connection);
    redis.freeze();
    let call = tokio::spawn(sender.send_request(request()));
    wait_for_async("the connection to start closing", async || {
        server.log().contains("closing connection gracefully").then_some(())
    })
    .await;
    redis.thaw();
    assert_eq!(call.await.unwrap().unwrap().status(), 200, "a call in flight is answered");
    assert!(connection.await.unwrap().is_ok());
}

/// The socket file of a crashed process is replaced, and an orderly shutdown removes the file.
#[tokio::test]
async fn a_unix_socket_is_served() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("grpc.sock");
    let start = || Server::builder().set("grpc.uds", path.to_str().unwrap()).start();
    drop(start());
    assert!(path.exists(), "a killed service leaves its socket file");
    let server = start();
    let stream = tokio::net::UnixStream::connect(&path).await.unwrap();
    let handshake = http2::handshake::<_, _, Full<Bytes>>(TokioExecutor::new(), TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.unwrap();
    tokio::spawn(connection);
    let response = sender.send_request(request()).await.unwrap();
    let body = response.into_body().collect().await.unwrap();
    assert_eq!(body.trailers().unwrap()["grpc-status"], "0");
    // The socket of another running process is not replaced.
    let output = command().args(["serve", "--http-addr", "127.0.0.1:0"]).env("SLUICEGATE__GRPC__UDS", &path).output();
    let error = String::from_utf8(output.unwrap().stderr).unwrap();
    assert!(error.contains("cannot listen on") && error.contains("grpc.sock for gRPC"), "{error}");
    drop(sender);
    server.signal("TERM");
    assert!(server.wait().await.success());
    assert!(!path.exists());
}

/// gRPC in Python sends the escaped path.
#[tokio::test]
async fn the_escaped_path_of_a_unix_socket_is_an_authority() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("grpc.sock");
    let server = Server::builder().set("grpc.uds", path.to_str().unwrap()).start();
    let method = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
    let message = b"\0\0\0\0\x16\x0a\x07example\x12\x0b\x0a\x09\x0a\x04user\x12\x01x";
    let escaped = path.to_str().unwrap().replace('/', "%2F");
    let value = [&[u8::try_from(escaped.len()).unwrap()], escaped.as_bytes()].concat();
    for name in [&b"\x41"[..], b"\x01", b"\x40\x0a:authority"] {
        let mut stream = tokio::net::UnixStream::connect(&path).await.unwrap();
        let mut headers = call_headers(method);
        // Before the content type: pseudo-headers come first.
        let content_type = headers.split_off(headers.len() - 19);
        let headers = [&headers, name, &value, &content_type].concat();
        let call = [GREETING.to_vec(), frame(HEADERS, END_HEADERS, 1, &headers), frame(DATA, END_STREAM, 1, message)];
        stream.write_all(&call.concat()).await.unwrap();
        let mut kinds = Vec::new();
        let read = async {
            loop {
                let mut head = [0; 9];
                stream.read_exact(&mut head).await.unwrap();
                let [a, b, c, kind, flags, _, _, _, id] = head;
                let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
                stream.read_exact(&mut payload).await.unwrap();
                if id == 1 {
                    kinds.push(kind);
                }
                if id == 1 && (kind == RST_STREAM || flags & END_STREAM != 0) {
                    return;
                }
            }
        };
        tokio::time::timeout(DEADLINE, read).await.unwrap();
        assert_eq!(kinds, [HEADERS, DATA, HEADERS], "a response with a message, to {name:x?}");
    }
    drop(server);
}

#[test]
fn a_file_in_place_of_a_unix_socket_is_kept() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "precious").unwrap();
    let mut start = command();
    let output = start.args(["serve", "--http-addr", "127.0.0.1:0"]).env("SLUICEGATE__GRPC__UDS", file.path()).output();
    let output = output.unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && error.contains("is not a socket"), "{error}");
    assert_eq!(std::fs::read_to_string(file.path()).unwrap(), "precious");
}

/// Returns a request with the descriptor `user=x` in the domain `example`.
fn request() -> Request<Full<Bytes>> {
    request_in("example")
}

/// Returns a request with the descriptor `user=x` in a domain of seven letters.
fn request_in(domain: &str) -> Request<Full<Bytes>> {
    let descriptor = b"\x12\x0b\x0a\x09\x0a\x04user\x12\x01x";
    let message = [b"\0\0\0\0\x16\x0a\x07", domain.as_bytes(), descriptor].concat();
    Request::post("http://x/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit")
        .header("content-type", "application/grpc")
        .body(Full::from(message))
        .unwrap()
}

/// An HTTP/2 client with one connection from an address of this host. It does not connect again.
struct SingleConnection(http2::SendRequest<Full<Bytes>>);

impl SingleConnection {
    async fn connect(server: &Server, from: [u8; 4]) -> Self {
        let stream = connect_from(server.grpc, from).await;
        let handshake = http2::handshake::<_, _, Full<Bytes>>(TokioExecutor::new(), TokioIo::new(stream)).await;
        let (sender, connection) = handshake.unwrap();
        tokio::spawn(connection);
        let mut this = Self(sender);
        assert!(this.is_answered().await, "a new connection is accepted");
        this
    }

    async fn is_answered(&mut self) -> bool {
        self.is_answered_in("example").await
    }

    /// Returns whether a request in this domain is answered.
    async fn is_answered_in(&mut self, domain: &str) -> bool {
        match self.0.send_request(request_in(domain)).await {
            Ok(response) => response.status() == 200,
            Err(_) => false,
        }
    }
}

/// Connects from an address of this host.
async fn connect_from(to: SocketAddr, from: [u8; 4]) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(SocketAddr::from((from, 0))).unwrap();
    socket.connect(to).await.unwrap()
}

fn evicted(server: &Server, listener: &str) -> f64 {
    server.metric(&format!("sluicegate_evicted_connections_total{{listener=\"{listener}\"}}"))
}

#[tokio::test]
async fn a_connection_above_the_maximum_replaces_one_without_calls() {
    let redis = RedisServer::start();
    let server = Server::builder().store(&redis.url()).set("grpc.max_connections", "2").start();
    let mut busy = SingleConnection::connect(&server, [127, 0, 0, 2]).await;
    redis.freeze();
    // It waits for Redis. When the second call, which needs no counter, is answered, the first one has arrived.
    let call = tokio::spawn(busy.0.send_request(request()));
    assert!(busy.is_answered_in("nowhere").await);
    let mut idle = connect_from(server.grpc, [127, 0, 0, 3]).await;
    wait_for("both connections to be open", || (server.metric("sluicegate_grpc_connections") == 2.0).then_some(()));
    let _third = connect_from(server.grpc, [127, 0, 0, 4]).await;
    let closed = idle.read(&mut [0; 16]).await;
    assert_eq!(closed.unwrap_or(0), 0, "the idle connection is closed");
    redis.thaw();
    assert_eq!(call.await.unwrap().unwrap().status(), 200, "a call in progress is answered");
    assert!(busy.is_answered().await);
    assert_eq!(evicted(&server, "grpc"), 1.0);
}

/// One address opens as many silent connections as it can. Other addresses are always served, on the connections that
/// they have and on new ones.
#[tokio::test]
async fn the_connections_of_one_address_lock_out_no_other() {
    let server = Server::builder().set("grpc.max_connections", "20").set("http.max_connections", "20").start();
    let mut honest = SingleConnection::connect(&server, [127, 0, 0, 1]).await;
    let mut page = connect_from(server.http, [127, 0, 0, 1]).await;
    assert!(is_healthy(&mut page).await);
    let mut flood = Vec::new();
    for _ in 0..60 {
        flood.push(connect_from(server.grpc, [127, 0, 0, 2]).await);
        flood.push(connect_from(server.http, [127, 0, 0, 2]).await);
    }
    // The service has accepted the flood when it has closed most connections above the maximum. Others may have ended by
    // themselves, because they are silent.
    wait_for("the flood to be accepted", || {
        (evicted(&server, "grpc") >= 30.0 && evicted(&server, "http") >= 30.0).then_some(())
    });
    assert!(honest.is_answered().await, "the connection of another address was closed");
    assert!(is_healthy(&mut page).await, "the connection of another address was closed");
    for host in 3..9 {
        SingleConnection::connect(&server, [127, 0, 0, host]).await;
        assert!(is_healthy(&mut connect_from(server.http, [127, 0, 0, host]).await).await);
    }
    let lines = server.log().matches("maximum number of connections reached").count();
    assert_eq!(lines, 2, "expected one line for each listener: {}", server.log());
}

/// Sends a request for `/healthcheck` on a connection, and returns whether it is answered.
async fn is_healthy(stream: &mut TcpStream) -> bool {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    if stream.write_all(b"GET /healthcheck HTTP/1.1\r\nhost: x\r\n\r\n").await.is_err() {
        return false;
    }
    let mut response = Vec::new();
    // The head and the body can arrive one after the other.
    while !response.ends_with(b"\r\n\r\nOK") {
        match stream.read_buf(&mut response).await {
            Ok(0) | Err(_) => return false,
            Ok(_) => {}
        }
    }
    response.starts_with(b"HTTP/1.1 200 OK")
}

/// Connections of callers with a token make room last.
#[tokio::test]
async fn a_flood_does_not_close_the_connection_of_an_operator() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let operator = Operator::with(Server::builder().set("admin.max_connections", "4"));
    let admin = operator.addr.trim_start_matches("http://").parse().unwrap();
    let mut stream = connect_from(admin, [127, 0, 0, 1]).await;
    let head = format!("POST /v1/GetSession HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {OPERATE}\r\n");
    let request = format!("{head}content-length: 2\r\n\r\n{{}}");
    for _ in 0..2 {
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut response = [0; 4_096];
        let length = stream.read(&mut response).await.unwrap();
        assert!(response[..length].starts_with(b"HTTP/1.1 200 OK"), "{}", String::from_utf8_lossy(&response));
        // Addresses with one connection each, so none has more than its share.
        let mut flood = Vec::new();
        for host in 2..20 {
            flood.push(connect_from(admin, [127, 0, 0, host]).await);
        }
        wait_for("the flood to be accepted", || (evicted(&operator.server, "admin") >= 15.0).then_some(()));
    }
}

/// Connections are distributed evenly, not at random: with few connections, chance would leave workers idle.
#[tokio::test]
async fn connections_are_distributed_evenly_over_workers() {
    let server = Server::builder().set("workers", "4").start();
    let mut clients = Vec::new();
    for _ in 0..8 {
        clients.push(server.client().await);
    }
    wait_for("all connections to be counted", || (server.metric("sluicegate_grpc_connections") == 8.0).then_some(()));
    for worker in 0..4 {
        let series = format!("sluicegate_grpc_worker_connections{{worker=\"{worker}\"}}");
        assert_eq!(server.metric(&series), 2.0, "{}", server.get("/metrics"));
    }
}

#[tokio::test]
async fn the_connection_with_the_oldest_last_response_is_closed_first() {
    let server = Server::builder().set("http.max_connections", "3").start();
    let connect = || {
        let stream = std::net::TcpStream::connect(server.http).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream
    };
    let get = |stream: &mut std::net::TcpStream| {
        stream.write_all(b"GET /healthcheck HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
        let mut response = [0; 512];
        let length = stream.read(&mut response).unwrap();
        String::from_utf8_lossy(&response[..length]).into_owned()
    };
    let mut active = connect();
    assert!(get(&mut active).contains("200 OK"));
    let before = server.open_file_descriptors();
    let mut silent = [connect(), connect()];
    wait_for("both silent connections to be open", || (server.open_file_descriptors() == before + 2).then_some(()));
    assert!(get(&mut active).contains("200 OK"));
    let mut last = connect();
    // `active` is older, but its last response is newer than the first silent connection.
    assert_eq!(silent[0].read(&mut [0; 16]).unwrap_or(0), 0, "the first silent connection is closed");
    assert!(get(&mut active).contains("200 OK") && get(&mut last).contains("200 OK"));
}

#[tokio::test]
async fn a_closed_connection_makes_room_for_another() {
    let server = Server::builder().set("http.max_connections", "2").start();
    let mut idle = std::net::TcpStream::connect(server.http).unwrap();
    idle.set_read_timeout(Some(DEADLINE)).unwrap();
    let mut is_answered = || {
        idle.write_all(b"GET /healthcheck HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
        idle.read(&mut [0; 512]).unwrap() > 0
    };
    assert!(is_answered());
    let before = server.open_file_descriptors();
    for _ in 0..3 {
        let other = std::net::TcpStream::connect(server.http).unwrap();
        wait_for("the other connection to be open", || (server.open_file_descriptors() > before).then_some(()));
        drop(other);
        wait_for("the other connection to be closed", || (server.open_file_descriptors() <= before).then_some(()));
    }
    assert!(is_answered(), "the idle connection was closed");
}

/// The process has few file descriptors, and many callers send nothing or only part of a request to every port.
/// Complete requests are answered all the same.
#[tokio::test]
async fn silent_connections_do_not_block_other_callers() {
    let redis = RedisServer::start();
    let builder = Server::builder().store(&redis.url()).set("admin.addr", "127.0.0.1:0").max_open_files(256);
    let operator = Operator::with(builder);
    let server = &operator.server;
    assert!(server.log().contains("grpc.max_connections reduced to fit the limit of open files"), "{}", server.log());
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
    // The service really closes the displaced connections.
    wait_for("few file descriptors to be open", || (server.open_file_descriptors() < 220).then_some(()));
    assert!(operator.ctl(&["health"]).contains("up"));
    let lines = server.log().matches("maximum number of connections reached").count();
    assert_eq!(lines, 3, "expected one line for each listener: {}", server.log());
    assert!(server.log().matches("cannot accept connections").count() <= 3, "{}", server.log());
    // The service can open new connections to Redis.
    redis.cli(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    drop(callers.drain(400..));
    wait_for_async("a decision", async || {
        let response = server.client().await.check(request_for("example", &[("user", "y")])).await.ok()?;
        response.remaining().map(drop)
    })
    .await;
}
