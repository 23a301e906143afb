//! Memory that callers hold: unfinished messages, and responses that they do not read.

use std::{convert::Infallible, net::SocketAddr};

use bytes::Bytes;
use http::Request;
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody, combinators::UnsyncBoxBody};
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message;
use tokio::{
    io::AsyncWriteExt,
    net::{TcpSocket, TcpStream},
    task::JoinSet,
};
use tokio_stream::StreamExt;

use crate::support::{
    Server,
    http2_frames::{call_headers, frame as http2_frame},
    raw_grpc::{BATCH, METHOD, QUOTAS, STREAM, frame},
    request_for, wait_for,
};

/// The setting `input.max_bytes` in these tests, and the growth of the process that it must not exceed: allocators
/// round sizes up, and hold what was freed for a while.
const MAX_BYTES: u64 = 32 << 20;
const MAX_GROWTH: u64 = 3 * MAX_BYTES;

pub(super) type Body = UnsyncBoxBody<Bytes, Infallible>;

pub(super) async fn connect(addr: SocketAddr) -> SendRequest<Body> {
    let stream = TcpStream::connect(addr).await.unwrap();
    stream.set_nodelay(true).unwrap();
    let handshake = Builder::new(TokioExecutor::new()).handshake(TokioIo::new(stream));
    let (sender, connection) = handshake.await.unwrap();
    tokio::spawn(connection);
    sender
}

/// Returns a call that announces a message of `size` bytes and sends all but the last one.
pub(super) fn unfinished(path: &str, size: usize) -> Request<Body> {
    let mut head = vec![0];
    head.extend_from_slice(&u32::try_from(size).unwrap().to_be_bytes());
    let rest = vec![0; size - 1];
    let parts = [Bytes::from(head)].into_iter().chain(rest.chunks(16 * 1024).map(Bytes::copy_from_slice));
    let parts: Vec<_> = parts.map(|part| Ok(Frame::data(part))).collect();
    let body = StreamBody::new(tokio_stream::iter(parts).chain(tokio_stream::pending())).boxed_unsync();
    Request::post(format!("http://x{path}")).header("content-type", "application/grpc").body(body).unwrap()
}

/// Calls are decided while other callers hold as much as they can.
async fn assert_is_well(server: &Server, checks: usize) {
    let client = server.client().await;
    for number in 0..checks {
        let request = request_for("example", &[("path", &*number.to_string())]);
        client.check(request).await.unwrap();
    }
    assert_eq!(server.get("/healthcheck"), "OK");
}

/// Several connections send hundreds of messages without their last bytes, to every method with large messages.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unfinished_messages_have_a_maximum_and_keep_nobody_out() {
    let server = Server::builder().set("input.max_bytes", &MAX_BYTES.to_string()).start();
    assert_is_well(&server, 100).await;
    let before = server.resident_memory();
    for path in [METHOD, STREAM, BATCH, QUOTAS] {
        let evicted = || server.metric("sluicegate_input_evictions_total");
        let former = evicted();
        let mut attack = JoinSet::new();
        for _ in 0..3 {
            let sender = connect(server.grpc).await;
            for _ in 0..60 {
                let mut sender = sender.clone();
                attack.spawn(async move {
                    let _ = sender.send_request(unfinished(path, 2 << 20)).await;
                });
            }
        }
        wait_for("the budget to be used up", || (evicted() > former + 50.0).then_some(()));
        assert_is_well(&server, 200).await;
        let growth = server.resident_memory().saturating_sub(before);
        assert!(growth < MAX_GROWTH, "{path}: {growth} bytes");
        attack.abort_all();
        while attack.join_next().await.is_some() {}
        wait_for("the memory to be returned", || (server.metric("sluicegate_input_bytes") == 0.0).then_some(()));
    }
    let log = server.log();
    assert!(log.contains("is exhausted; dropping the oldest"), "{log}");
    assert!(log.lines().count() < 100, "an attack is logged once");
}

/// Callers send calls, and never read their sockets.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn responses_that_nobody_reads_have_a_maximum() {
    let server = Server::builder().set("input.max_bytes", &MAX_BYTES.to_string()).start();
    let before = server.resident_memory();
    let silent: Vec<_> = (0..50).map(|_| tokio::spawn(call_without_reading(server.grpc))).collect();
    let decided = || server.metric("ratelimit_service_total_requests{grpc_method=\"ShouldRateLimit\"}");
    wait_for("calls of all connections to be decided", || (decided() > 5_000.0).then_some(()));
    assert_is_well(&server, 200).await;
    let growth = server.resident_memory().saturating_sub(before);
    assert!(growth < MAX_GROWTH, "{growth} bytes");
    drop(silent);
}

/// Sends calls on one connection until the service does not read any more, and never reads.
pub(super) async fn call_without_reading(addr: SocketAddr) {
    let message = frame(&request_for("example", &[("user", "x")]).into_message().encode_to_vec());
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4_096).unwrap();
    let mut stream = socket.connect(addr).await.unwrap();
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    // Windows of the maximum size.
    bytes.extend(http2_frame(4, 0, 0, &[0, 4, 0x7f, 0xff, 0xff, 0xff]));
    bytes.extend(http2_frame(8, 0, 0, &0x7fff_0000_u32.to_be_bytes()));
    for number in 0..900 {
        let id = 2 * number + 1;
        bytes.extend(http2_frame(1, 4, id, &call_headers(METHOD)));
        bytes.extend(http2_frame(0, 1, id, &message));
    }
    // The service may close the connection.
    let _ = stream.write_all(&bytes).await;
    std::future::pending::<()>().await;
}
