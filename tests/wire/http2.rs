//! HTTP/2 at its edges: keep-alive, limits on headers, calls and resets, floods, flow control, cancelled calls, and
//! callers that use HTTP/1.

use std::time::Instant;

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::{
    DEADLINE, RedisServer, Server,
    http2_frames::{
        ACK, CONTINUATION, DATA, END_HEADERS, END_STREAM, Frames, GOAWAY, HEADERS, PING, RST_STREAM, SETTINGS,
        call_headers, frame,
    },
    request_for, wait_for, wait_for_async,
};

const METHOD: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
const HEALTH: &str = "/grpc.health.v1.Health/Check";
const WATCH: &str = "/grpc.health.v1.Health/Watch";
/// A message with its prefix: the descriptor `user=x` in the domain `example`.
const MESSAGE: &[u8] = b"\0\0\0\0\x16\x0a\x07example\x12\x0b\x0a\x09\x0a\x04user\x12\x01x";
/// An empty message with its prefix.
const EMPTY: &[u8] = b"\0\0\0\0\0";

// Error codes (RFC 9113, section 7).
const REFUSED_STREAM: u32 = 7;
const CANCEL: u32 = 8;
const ENHANCE_YOUR_CALM: u32 = 11;

/// Waits until the response to a call has ended.
async fn wait_for_end(frames: &mut Frames, stream: u32) {
    let end = frames.next_with(|frame| frame.stream == stream && frame.flags & END_STREAM != 0).await;
    assert_eq!(end.kind, HEADERS, "the trailers end a response: {end:?}");
}

/// Waits until the response to a call has ended. Returns whether it has a message, as every decision has.
async fn is_decided(frames: &mut Frames, stream: u32) -> bool {
    let mut has_message = false;
    loop {
        let next = frames.next_with(|frame| frame.stream == stream).await;
        if next.kind == RST_STREAM || next.flags & END_STREAM != 0 {
            return has_message;
        }
        has_message |= next.kind == DATA;
    }
}

/// Encodes headers in frames of at most 16,000 bytes.
fn header_frames(stream: u32, block: &[u8]) -> Vec<u8> {
    let (first, rest) = block.split_at(block.len().min(16_000));
    let mut frames = frame(HEADERS, 0, stream, first);
    for part in rest.chunks(16_000) {
        frames.extend(frame(CONTINUATION, 0, stream, part));
    }
    frames.extend(frame(CONTINUATION, END_HEADERS, stream, &[]));
    frames
}

/// Waits until the service has read all frames that were sent.
async fn wait_until_read(frames: &mut Frames) {
    assert!(frames.send(&frame(PING, 0, 0, &[0; 8])).await);
    frames.next_with(|frame| frame.kind == PING && frame.flags & ACK != 0).await;
}

async fn is_served(server: &Server) -> bool {
    server.client().await.check(request_for("example", &[("user", "y")])).await.is_ok()
}

#[tokio::test]
async fn calls_of_different_services_share_a_connection() {
    let server = Server::builder().start();
    let mut frames = Frames::connect(&server).await;
    for stream in (1..20).step_by(2) {
        let (path, message) = if stream % 4 == 1 { (METHOD, MESSAGE) } else { (HEALTH, EMPTY) };
        frames.send_call(stream, path, message).await;
    }
    let mut open: Vec<u32> = (1..20).step_by(2).collect();
    while !open.is_empty() {
        let end = frames.next_with(|frame| frame.kind != SETTINGS && frame.flags & END_STREAM != 0).await;
        assert_eq!(end.kind, HEADERS, "{end:?}");
        open.retain(|stream| *stream != end.stream);
    }
}

/// Calls that arrive in one piece, more than the service accepts before it answers, on both stores.
#[tokio::test]
async fn many_calls_at_once_are_all_answered() {
    const CALLS: u32 = 300;
    let redis = RedisServer::start();
    for store in ["memory", &redis.url()] {
        let server = Server::builder().store(store).start();
        let mut frames = Frames::connect(&server).await;
        let calls = (0..CALLS).map(|number| {
            let stream = 2 * number + 1;
            let headers = frame(HEADERS, END_HEADERS, stream, &call_headers(METHOD));
            [headers, frame(DATA, END_STREAM, stream, MESSAGE)].concat()
        });
        assert!(frames.send(&calls.collect::<Vec<_>>().concat()).await);
        for _ in 0..CALLS {
            let end = frames.next_with(|frame| frame.kind != SETTINGS && frame.flags & END_STREAM != 0).await;
            assert_eq!(end.kind, HEADERS, "{end:?}");
        }
    }
}

#[tokio::test]
async fn only_callers_that_answer_pings_keep_their_connection() {
    let settings = [("grpc.keepalive_interval", "100ms"), ("grpc.keepalive_timeout", "400ms")];
    let server = settings.into_iter().fold(Server::builder(), |builder, (key, value)| builder.set(key, value)).start();
    let mut answering = Frames::connect(&server).await;
    for _ in 0..8 {
        let ping = answering.next_with(|frame| frame.kind == PING && frame.flags & ACK == 0).await;
        assert!(answering.send(&frame(PING, ACK, 0, &ping.payload)).await);
    }
    answering.send_call(1, METHOD, MESSAGE).await;
    wait_for_end(&mut answering, 1).await;

    let mut silent = Frames::connect(&server).await;
    let received = silent.rest().await;
    assert_eq!(received.iter().filter(|frame| frame.kind == PING).count(), 1, "{received:?}");
    assert!(received.iter().any(|frame| frame.kind == GOAWAY && frame.error_code() == 0), "{received:?}");
}

#[tokio::test]
async fn a_call_that_outlives_the_grace_of_an_old_connection_is_ended() {
    let redis = RedisServer::start();
    let server = Server::builder()
        .store(&redis.url())
        .set("grpc.max_connection_age", "200ms")
        .set("grpc.max_connection_age_grace", "300ms")
        .start();
    redis.freeze();
    let mut frames = Frames::connect(&server).await;
    frames.send_call(1, METHOD, MESSAGE).await;
    let received = frames.rest().await;
    assert!(received.iter().any(|frame| frame.kind == GOAWAY && frame.error_code() == 0), "{received:?}");
    assert!(!received.iter().any(|frame| frame.stream == 1), "the call has no response: {received:?}");
    redis.thaw();
}

#[tokio::test]
async fn calls_above_the_maximum_are_refused_and_cancelled_calls_make_room() {
    let redis = RedisServer::start();
    let server = Server::builder().store(&redis.url()).set("grpc.max_concurrent_streams", "2").start();
    redis.freeze();
    let mut frames = Frames::connect(&server).await;
    for stream in [1, 3] {
        frames.send_call(stream, METHOD, MESSAGE).await;
    }
    assert!(frames.send(&frame(HEADERS, END_HEADERS | END_STREAM, 5, &call_headers(METHOD))).await);
    let refused = frames.next_with(|frame| frame.kind == RST_STREAM).await;
    assert_eq!((refused.stream, refused.error_code()), (5, REFUSED_STREAM));
    for stream in [1, 3] {
        assert!(frames.send(&frame(RST_STREAM, 0, stream, &CANCEL.to_be_bytes())).await);
    }
    for stream in [7, 9] {
        frames.send_call(stream, METHOD, MESSAGE).await;
    }
    wait_until_read(&mut frames).await;
    redis.thaw();
    let mut answered = [7, 9].to_vec();
    while !answered.is_empty() {
        let next = frames.next_with(|frame| frame.stream != 0).await;
        assert!([7, 9].contains(&next.stream) && next.kind != RST_STREAM, "{next:?}");
        if next.flags & END_STREAM != 0 {
            answered.retain(|stream| *stream != next.stream);
        }
    }
}

/// Calls that the caller cancels while Redis does not answer leave nothing behind.
#[tokio::test]
async fn cancelled_calls_do_not_leak_memory() {
    let redis = RedisServer::start();
    let server = Server::builder().store(&redis.url()).start();
    redis.freeze();
    let mut frames = Frames::connect(&server).await;
    let mut first = 0;
    for round in 0_u32..40 {
        // Fewer resets in a row than the service takes for a flood.
        for number in 0..500 {
            let stream = 2 * (round * 500 + number) + 1;
            frames.send_call(stream, METHOD, MESSAGE).await;
            if number % 10 == 9 {
                wait_until_read(&mut frames).await;
                for stream in (stream - 18..=stream).step_by(2) {
                    assert!(frames.send(&frame(RST_STREAM, 0, stream, &CANCEL.to_be_bytes())).await);
                }
            }
        }
        if round == 9 {
            first = server.resident_memory();
        }
    }
    let grown = server.resident_memory().saturating_sub(first);
    assert!(grown < 8 << 20, "memory grew by {grown} bytes during 15,000 cancelled calls");
    redis.thaw();
    frames.send_call(40_001, METHOD, MESSAGE).await;
    wait_for_end(&mut frames, 40_001).await;
}

#[tokio::test]
async fn a_call_is_decided_when_its_last_part_has_arrived() {
    let server = Server::builder().start();
    let mut frames = Frames::connect(&server).await;
    assert!(frames.send(&frame(HEADERS, END_HEADERS, 1, &call_headers(METHOD))).await);
    for byte in MESSAGE {
        assert!(frames.send(&frame(DATA, 0, 1, &[*byte])).await);
    }
    // A call that is complete does not wait for one that is not.
    frames.send_call(3, METHOD, MESSAGE).await;
    let next = frames.next_with(|frame| frame.stream != 0).await;
    assert_eq!(next.stream, 3, "{next:?}");
    wait_for_end(&mut frames, 3).await;
    assert!(frames.send(&frame(DATA, END_STREAM, 1, b"")).await);
    wait_for_end(&mut frames, 1).await;
}

/// The last bytes of a message never arrive.
#[tokio::test]
async fn a_message_that_is_not_finished_ends_its_call() {
    let server = Server::builder().start();
    let stream = tokio::net::TcpStream::connect(server.grpc).await.unwrap();
    let (mut client, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    let request = http::Request::post(format!("http://x{METHOD}")).header("content-type", "application/grpc");
    let started = Instant::now();
    let (response, mut body) = client.send_request(request.body(()).unwrap(), false).unwrap();
    body.send_data(Bytes::from_static(&MESSAGE[..10]), false).unwrap();
    let response = tokio::time::timeout(DEADLINE, response).await.expect("a response").unwrap();
    assert_eq!(response.headers()["grpc-status"], "4", "{response:?}");
    let seconds = started.elapsed().as_secs();
    assert!((9..25).contains(&seconds), "{seconds} s");
    assert_eq!(server.metric("sluicegate_caller_errors_total{kind=\"stalled\"}"), 1.0);
    wait_for("the memory to be free", || (server.metric("sluicegate_input_bytes") == 0.0).then_some(()));
    assert!(is_served(&server).await);
}

#[tokio::test]
async fn headers_above_the_maximum_are_rejected_and_endless_headers_close_the_connection() {
    let server = Server::builder().start();
    let mut frames = Frames::connect(&server).await;
    // A literal header field without indexing, with a name of one byte and a value of 10,000 bytes.
    let header = [&b"\0\x01x\x7f\x91\x4d"[..], &[b'v'; 10_000]].concat();
    // The maximum is 80 KiB. Each header counts 33 bytes more than its value.
    for (stream, headers, accepted) in [(1, 7, true), (3, 9, false), (5, 0, true)] {
        let block = [call_headers(METHOD), header.repeat(headers)].concat();
        let call = [header_frames(stream, &block), frame(DATA, END_STREAM, stream, MESSAGE)].concat();
        assert!(frames.send(&call).await);
        assert_eq!(is_decided(&mut frames, stream).await, accepted, "{headers} headers of 10,000 bytes");
    }
    assert_eq!(server.metric("sluicegate_grpc_protocol_errors_total"), 0.0);

    assert!(frames.send(&frame(HEADERS, 0, 7, &call_headers(METHOD))).await);
    let endless = frame(CONTINUATION, 0, 7, &header);
    let (mut reader, mut writer) = frames.split();
    let closed = tokio::spawn(async move {
        let _ = reader.read_to_end(&mut Vec::new()).await;
    });
    let mut sent = 0;
    while sent < 10_000 && !closed.is_finished() && writer.write_all(&endless).await.is_ok() {
        sent += 1;
    }
    tokio::time::timeout(DEADLINE, closed).await.expect("the connection to be closed").unwrap();
    wait_for("the flood to be counted", || {
        (server.metric("sluicegate_grpc_protocol_errors_total") == 1.0).then_some(())
    });
    assert!(is_served(&server).await);
}

/// A caller that sends frames with replies, and reads none of the replies, does not make the service store them.
#[tokio::test]
async fn floods_of_frames_with_replies_do_not_use_memory() {
    let server = Server::builder().start();
    assert!(is_served(&server).await);
    let before = server.resident_memory();
    for flood in [frame(PING, 0, 0, &[0; 8]), frame(SETTINGS, 0, 0, &[])] {
        let (_reader, mut writer) = Frames::connect(&server).await.split();
        let many = flood.repeat(1_000);
        // The service stops reading when its replies cannot be sent.
        for _ in 0..5_000 {
            let written = tokio::time::timeout(std::time::Duration::from_secs(1), writer.write_all(&many)).await;
            if !written.is_ok_and(|written| written.is_ok()) {
                break;
            }
        }
        assert!(is_served(&server).await);
    }
    let grown = server.resident_memory().saturating_sub(before);
    assert!(grown < 8 << 20, "memory grew by {grown} bytes");
}

/// A window that is open, but smaller than the response.
#[tokio::test]
async fn a_response_that_is_read_in_part_is_dropped() {
    let server = Server::builder().set("grpc.send_timeout", "300ms").start();
    // A response that has nothing to send does not wait for its caller.
    let mut idle = Frames::connect(&server).await;
    idle.send_call(1, WATCH, EMPTY).await;
    idle.next_with(|frame| frame.kind == DATA).await;
    let mut frames = Frames::connect(&server).await;
    // SETTINGS_INITIAL_WINDOW_SIZE is 3 bytes.
    assert!(frames.send(&frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 3])).await);
    frames.next_with(|frame| frame.kind == SETTINGS && frame.flags & ACK != 0).await;
    for (stream, path, message) in [(1, METHOD, MESSAGE), (3, HEALTH, EMPTY)] {
        frames.send_call(stream, path, message).await;
        let data = frames.next_with(|frame| frame.kind == DATA).await;
        assert_eq!((data.stream, data.payload.len()), (stream, 3));
        let reset = frames.next_with(|frame| frame.kind == RST_STREAM).await;
        assert_eq!((reset.stream, reset.error_code()), (stream, CANCEL));
    }
    assert_eq!(server.metric("sluicegate_grpc_unread_responses_total"), 2.0);
}

#[tokio::test]
async fn a_response_continues_when_the_window_opens() {
    const WINDOW_UPDATE: u8 = 8;
    let server = Server::builder().start();
    let mut frames = Frames::connect(&server).await;
    assert!(frames.send(&frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 0])).await);
    frames.next_with(|frame| frame.kind == SETTINGS && frame.flags & ACK != 0).await;
    frames.send_call(1, METHOD, MESSAGE).await;
    let mut received = Vec::new();
    loop {
        assert!(frames.send(&frame(WINDOW_UPDATE, 0, 1, &4_u32.to_be_bytes())).await);
        let next = frames.next_with(|frame| frame.stream == 1 && frame.payload.first() != Some(&0x88)).await;
        if next.kind == HEADERS {
            break;
        }
        assert!(next.payload.len() <= 4, "{next:?}");
        received.extend(next.payload);
    }
    let size = u32::from_be_bytes(received[1..5].try_into().unwrap()) as usize;
    assert_eq!(received.len(), 5 + size, "{received:?}");
}

#[tokio::test]
async fn resets_above_the_maximum_close_the_connection_with_a_reason() {
    let server = Server::builder().start();
    let mut frames = Frames::connect(&server).await;
    // Resets this number of calls in one write.
    let resets = |first: u32, calls: u32| -> Vec<u8> {
        let streams = (first..first + 2 * calls).step_by(2);
        let reset = |stream| {
            let call = frame(HEADERS, END_HEADERS, stream, &call_headers(METHOD));
            [call, frame(RST_STREAM, 0, stream, &CANCEL.to_be_bytes())].concat()
        };
        streams.flat_map(reset).collect()
    };
    assert!(frames.send(&resets(1, 20)).await);
    frames.send_call(41, METHOD, MESSAGE).await;
    wait_for_end(&mut frames, 41).await;
    for first in (1_001..5_001).step_by(1_000) {
        if !frames.send(&resets(first, 500)).await {
            break;
        }
    }
    let received = frames.rest().await;
    let is_reason = |code| received.iter().any(|frame| frame.kind == GOAWAY && frame.error_code() == code);
    assert!(is_reason(ENHANCE_YOUR_CALM), "{received:?}");
    assert!(is_served(&server).await);
}

#[tokio::test]
async fn headers_that_are_not_finished_end_the_connection() {
    let server = Server::builder().start();
    let first = frame(HEADERS, 0, 1, &call_headers(METHOD));
    // The last frame, without its payload.
    let last = &frame(CONTINUATION, END_HEADERS, 1, &[0; 100])[..9];
    let started = Instant::now();
    let mut without_last = Frames::connect(&server).await;
    assert!(without_last.send(&first).await);
    let mut without_end = Frames::connect(&server).await;
    assert!(without_end.send(&[&first, last].concat()).await);
    wait_for("the headers to be counted", || (server.metric("sluicegate_input_bytes") > 40_000.0).then_some(()));
    // 400 KiB are only for larger headers.
    assert!(server.metric("sluicegate_input_bytes") < 100_000.0);
    without_last.rest().await;
    without_end.rest().await;
    let seconds = started.elapsed().as_secs();
    assert!((9..=30).contains(&seconds), "{seconds} s");
    assert_eq!(server.metric("sluicegate_caller_errors_total{kind=\"stalled\"}"), 2.0);
    wait_for("the memory to be free", || (server.metric("sluicegate_input_bytes") == 0.0).then_some(()));
    assert!(is_served(&server).await);
}

#[tokio::test]
async fn callers_with_http_1_receive_an_error_that_names_the_reason() {
    let server = Server::builder().start();
    for request in ["GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n", "POST /json HTTP/1.1\r\ncontent-length: 9\r\n\r\n{"] {
        let mut stream = tokio::net::TcpStream::connect(server.grpc).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut response = String::new();
        tokio::time::timeout(DEADLINE, stream.read_to_string(&mut response)).await.unwrap().unwrap();
        assert!(response.starts_with("HTTP/1.1 505 "), "{response}");
        let (head, body) = response.split_once("\r\n\r\n").unwrap();
        assert!(body.contains("HTTP/1 and JSON are served on `http.addr`"), "{body}");
        assert!(head.contains(&format!("content-length: {}\r\n", body.len())), "{head}");
    }
    wait_for_async("the connections to be closed", async || {
        (server.metric("sluicegate_grpc_connections") == 0.0).then_some(())
    })
    .await;
}

/// Only errors for which the service closes a connection are counted.
#[tokio::test]
async fn a_caller_that_closes_its_connection_with_an_error_violates_nothing() {
    const INTERNAL_ERROR: u32 = 2;
    let server = Server::builder().start();
    let mut frames = Frames::connect(&server).await;
    frames.send_call(1, METHOD, MESSAGE).await;
    wait_for_end(&mut frames, 1).await;
    let (mut reader, mut writer) = frames.split();
    let payload = [[0; 4], INTERNAL_ERROR.to_be_bytes()].concat();
    writer.write_all(&frame(GOAWAY, 0, 0, &payload)).await.unwrap();
    writer.shutdown().await.unwrap();
    let mut rest = Vec::new();
    let _ = tokio::time::timeout(DEADLINE, reader.read_to_end(&mut rest)).await.expect("the connection to be closed");
    wait_for("the end of the connection", || (server.metric("sluicegate_grpc_connections") == 0.0).then_some(()));
    assert_eq!(server.metric("sluicegate_grpc_protocol_errors_total"), 0.0);
}
