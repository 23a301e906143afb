//! Malformed and oversized input of every kind ends in an error, never in a panic or growing memory.

use std::{convert::Infallible, io::Write};

use bytes::Bytes;
use http::{Method, Request};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use proptest::{
    prelude::*,
    strategy::ValueTree,
    test_runner::{Config, TestRunner},
};
use prost::Message;
use sluicegate::rules::{Options, SourceFile, compile};
use sluicegate_proto::{
    envoy::{
        extensions::common::ratelimit::v3::{
            RateLimitDescriptor,
            rate_limit_descriptor::{Entry, RateLimitOverride},
        },
        service::{
            rate_limit_quota::v3::{
                BucketId, RateLimitQuotaUsageReports, rate_limit_quota_usage_reports::BucketQuotaUsage,
            },
            ratelimit::v3::{RateLimitRequest, RateLimitResponse},
        },
    },
    sluicegate::v1::{Check, CheckFrame, ResponseFrame},
};
use tokio::time::timeout;

use crate::support::{
    DEADLINE, RedisServer, Server,
    raw_grpc::{BATCH, METHOD, QUOTAS, Raw, STREAM, field, frame},
    request_for,
    server::post,
    wait_for, wait_for_async,
};

fn request(descriptors: Vec<RateLimitDescriptor>) -> RateLimitRequest {
    RateLimitRequest { domain: "example".into(), descriptors, hits_addend: 0 }
}

fn descriptor(entries: usize, value: &str) -> RateLimitDescriptor {
    let entry = Entry { key: "user".into(), value: value.into() };
    RateLimitDescriptor { entries: vec![entry; entries], ..RateLimitDescriptor::default() }
}

fn with_limit(unit: i32, unit_multiplier: Option<u32>) -> RateLimitRequest {
    let limit = RateLimitOverride { requests_per_unit: 1, unit, unit_multiplier };
    request(vec![RateLimitDescriptor { limit: Some(limit), ..descriptor(1, "x") }])
}

#[tokio::test]
async fn input_above_a_limit_is_rejected_with_a_message() {
    const INVALID: &str = "3";
    const EXHAUSTED: &str = "8";
    let server = Server::builder().start();
    let mut raw = Raw::connect(&server).await;
    let long = "x".repeat(1_025);
    for (message, code, expected) in [
        (
            request(vec![descriptor(1, "x"); 129]),
            INVALID,
            "129 descriptors, more than grpc.limits.max_descriptors (128)",
        ),
        (RateLimitRequest::default(), INVALID, "domain must not be empty"),
        (request(vec![]), INVALID, "descriptor list must not be empty"),
        (request(vec![descriptor(33, "x")]), INVALID, "33 entries, more than grpc.limits.max_entries (32)"),
        (RateLimitRequest { domain: long.clone(), ..request(vec![descriptor(1, "x")]) }, INVALID, "a domain of 1025"),
        (request(vec![descriptor(1, &"x".repeat(4 << 20))]), EXHAUSTED, "maximum of 4194304"),
        (with_limit(0, None), INVALID, "needs a unit from SECOND to YEAR"),
        (with_limit(99, None), INVALID, "needs a unit from SECOND to YEAR"),
        (with_limit(1, Some(0)), INVALID, "must be at least 1"),
        (with_limit(6, Some(u32::MAX)), INVALID, "more than 100 years"),
    ] {
        let (status, text, _) = raw.send(METHOD, frame(&message.encode_to_vec())).await;
        assert_eq!(status, code, "{text}");
        assert!(text.contains(expected), "{text}");
    }
    let largest = request(vec![descriptor(32, "x"); 128]);
    assert_eq!(raw.send(METHOD, frame(&largest.encode_to_vec())).await.0, "0", "the largest valid request");
    // All are counted, and the first of each kind is logged with its domain.
    assert_eq!(server.metric("sluicegate_caller_errors_total{kind=\"invalid\"}"), 9.0);
    let log = server.log();
    let is_invalid = |line: &&str| line.contains("a call has no decision") && line.contains("\"kind\":\"invalid\"");
    let logged: Vec<_> = log.lines().filter(is_invalid).collect();
    assert!(logged.len() == 1 && logged[0].contains("\"domain\":\"example\""), "{log}");
}

#[tokio::test]
async fn malformed_frames_are_rejected() {
    let server = Server::builder().start();
    let mut raw = Raw::connect(&server).await;
    let valid = request(vec![descriptor(1, "x")]).encode_to_vec();
    let mut flagged_as_compressed = frame(&valid);
    flagged_as_compressed[0] = 1;
    let mut longer = frame(&valid);
    longer.push(0);
    let mut huge = frame(&valid);
    huge[1..5].copy_from_slice(&u32::MAX.to_be_bytes());
    for (body, status) in [
        (vec![], "3"),
        (vec![0, 0, 0], "3"),
        (flagged_as_compressed, "12"),
        (frame(&valid)[..10].to_vec(), "3"),
        (longer, "3"),
        // The bytes after the message would form a valid field.
        ([frame(&valid), vec![0x18, 5]].concat(), "3"),
        (huge, "8"),
        (vec![0; 5_000_000], "8"),
        (frame(b"\xff\xff\xff"), "3"),
    ] {
        let (got, text, _) = raw.send(METHOD, body.clone()).await;
        assert_eq!(got, status, "{text} for {:?}", &body[..body.len().min(20)]);
        assert!(!text.is_empty());
    }
    assert_eq!(raw.request(Method::GET, METHOD, "application/grpc", vec![]).await.0, "3");
    assert_eq!(raw.request(Method::POST, METHOD, "application/json", frame(&valid)).await.0, "3");
    assert_eq!(raw.send("/envoy.service.ratelimit.v3.RateLimitService/Other", frame(&valid)).await.0, "12");
    assert_eq!(raw.send("/nothing/at.all", frame(&valid)).await.0, "12");
    for old in ["envoy.service.ratelimit.v2.RateLimitService", "pb.lyft.ratelimit.RateLimitService"] {
        let (status, text, _) = raw.send(&format!("/{old}/ShouldRateLimit"), frame(&valid)).await;
        let names_new = text.contains("ratelimit.v3.RateLimitService") && text.contains("transport_api_version: V3");
        assert!(status == "12" && text.starts_with(old) && names_new, "{status} {text}");
    }
    assert_eq!(raw.send(METHOD, frame(&valid)).await.0, "0");
}

/// A message compressed with gzip has the same result as an uncompressed one, if its decompressed size is within the
/// limit.
#[tokio::test]
async fn compressed_messages_are_accepted_up_to_the_maximum_size() {
    let server = Server::builder().start();
    let mut raw = Raw::connect(&server).await;
    let gzip = |message: &[u8]| {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        encoder.write_all(message).unwrap();
        encoder.finish().unwrap()
    };
    let compressed = |bytes: &[u8]| [&[1], &frame(bytes)[1..]].concat();
    let valid = request(vec![descriptor(20, "x")]).encode_to_vec();
    let (status, _, plain) = raw.send(METHOD, frame(&valid)).await;
    assert_eq!(status, "0");
    assert_eq!(raw.send(METHOD, compressed(&gzip(&valid))).await, ("0".into(), String::new(), plain));
    let zlib = {
        let mut encoder = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::default());
        encoder.write_all(&valid).unwrap();
        encoder.finish().unwrap()
    };
    // The last bytes are those of the size.
    let truncated = gzip(&valid)[..20].to_vec();
    let mut wrong_size = gzip(&valid);
    *wrong_size.iter_mut().rev().nth(3).unwrap() -= 1;
    let short = gzip(&valid)[..17].to_vec();
    let unpadded = request(vec![descriptor(1, "x")]).encode_to_vec();
    let padded = |size: usize| {
        // An unknown field pads the message. Its length has four bytes.
        let mut message = unpadded.clone();
        prost::encoding::encode_key(9, prost::encoding::WireType::LengthDelimited, &mut message);
        let padding = size - message.len() - 4;
        prost::encoding::encode_varint(padding as u64, &mut message);
        message.resize(size, 0);
        message
    };
    for (bytes, status, expected) in [
        (gzip(&padded(4 << 20)), "0", ""),
        (gzip(&padded((4 << 20) + 1)), "8", "maximum of 4194304"),
        (gzip(&vec![0; 100_000_000]), "8", "maximum of 4194304"),
        (truncated, "8", "maximum of 4194304"),
        (wrong_size, "3", "its size is not the announced one"),
        (short, "3", "it is truncated"),
        (zlib, "12", "grpc-encoding gzip"),
        (vec![], "12", "grpc-encoding gzip"),
    ] {
        let (got, text, _) = raw.send(METHOD, compressed(&bytes)).await;
        assert!(got == status && text.contains(expected), "{got} {text}");
    }
    // The first byte of a frame must be 0 or 1.
    let (status, text, _) = raw.send(METHOD, [&[2], &frame(&gzip(&valid))[1..]].concat()).await;
    assert!(status == "12" && text.contains("grpc-encoding gzip"), "{status} {text}");
    let check = Check { id: 7, request: Some(request(vec![descriptor(1, "x")])), ..Check::default() };
    let frames = CheckFrame { checks: vec![check] }.encode_to_vec();
    for path in [STREAM, BATCH] {
        let (status, text, answer) = raw.send(path, compressed(&gzip(&frames))).await;
        assert!(status == "0" && response_ids(&answer) == [7], "{path}: {text}");
    }
}

/// The pieces have several bytes: h2 closes a connection that sends many single bytes.
#[tokio::test]
async fn a_message_in_pieces_is_reassembled() {
    let server = Server::builder().start();
    let stream = tokio::net::TcpStream::connect(server.grpc).await.unwrap();
    stream.set_nodelay(true).unwrap();
    let handshake = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream));
    let (mut sender, connection) = handshake.await.unwrap();
    tokio::spawn(connection);
    let mut send = async |method: &str, bytes: &[u8], size| {
        let pieces: Vec<_> = bytes.chunks(size).map(Bytes::copy_from_slice).collect();
        assert!(pieces.len() > 30);
        let pieces = pieces.into_iter().map(|piece| Ok::<_, Infallible>(http_body::Frame::data(piece)));
        let body = http_body_util::StreamBody::new(tokio_stream::iter(pieces));
        let request = Request::post(format!("http://x{method}")).header("content-type", "application/grpc").body(body);
        let response = sender.send_request(request.unwrap()).await.unwrap();
        let answer = response.into_body().collect().await.unwrap();
        assert_eq!(answer.trailers().unwrap()["grpc-status"], "0");
        answer.to_bytes()
    };
    let large = frame(&request(vec![descriptor(20, "some value"); 100]).encode_to_vec());
    let answer = send(METHOD, &large, 100).await;
    assert_eq!(RateLimitResponse::decode(&answer[5..]).unwrap().statuses.len(), 100);
    let frames = [check_frame(&[1, 2]), frame(&[]), check_frame(&[3])].concat();
    for size in 1..5 {
        assert_eq!(response_ids(&send(STREAM, &frames, size).await), [1, 2, 3]);
    }
}

/// Returns a frame with checks that have these ids, and with unknown fields.
fn check_frame(ids: &[u64]) -> Vec<u8> {
    let request = Some(request(vec![descriptor(1, "odd")]));
    let checks = ids.iter().map(|id| Check { id: *id, request: request.clone(), ..Check::default() }).collect();
    let mut bytes = CheckFrame { checks }.encode_to_vec();
    // Field 15, four times: a varint, a string, 8 bytes and 4 bytes.
    bytes.extend([15 << 3, 7, 15 << 3 | 2, 1, 0, 15 << 3 | 1, 0, 0, 0, 0, 0, 0, 0, 0, 15 << 3 | 5, 0, 0, 0, 0]);
    frame(&bytes)
}

/// Returns the ids of the responses in the bytes of a stream.
fn response_ids(mut bytes: &[u8]) -> Vec<u64> {
    let mut ids = Vec::new();
    while let [_, a, b, c, d, rest @ ..] = bytes {
        let (message, rest) = rest.split_at(u32::from_be_bytes([*a, *b, *c, *d]) as usize);
        ids.extend(ResponseFrame::decode(message).unwrap().responses.iter().map(|answer| answer.id));
        bytes = rest;
    }
    ids
}

#[tokio::test]
async fn unusual_frames_are_answered_or_rejected() {
    let server = Server::builder().start();
    let mut raw = Raw::connect(&server).await;
    let three = [check_frame(&[5, 5, u64::MAX]), frame(&[]), check_frame(&[0])].concat();
    let truncated = three[..three.len() - 3].to_vec();
    let compressed = [&check_frame(&[1])[..], &[1, 0, 0, 0, 0]].concat();
    let oversized = [&check_frame(&[1])[..], &[0, 255, 255, 255, 255]].concat();
    let invalid_frame = [&check_frame(&[1])[..], &frame(b"\x0a\x05nonse")[..]].concat();
    let invalid_check = [&check_frame(&[1])[..], &frame(b"\x0a\x02\x08\xff")[..]].concat();
    for (body, status, expected, ids) in [
        (vec![], "0", "", &[][..]),
        (three, "0", "", &[5, 5, u64::MAX, 0]),
        (truncated, "3", "bytes into a message", &[5, 5, u64::MAX]),
        (compressed, "12", "compressed", &[1]),
        (oversized, "8", "maximum of 4194304", &[1]),
        (invalid_frame, "3", "invalid CheckFrame", &[1]),
        (invalid_check, "3", "invalid CheckFrame", &[1]),
    ] {
        let (code, text, bytes) = raw.send(STREAM, body).await;
        assert_eq!((code.as_str(), response_ids(&bytes)), (status, ids.to_vec()), "{text}");
        assert!(text.contains(expected), "{text}");
    }
    let (code, _, bytes) = raw.send(BATCH, check_frame(&[3, 3])).await;
    assert_eq!((code.as_str(), response_ids(&bytes)), ("0", vec![3, 3]));
    assert_eq!(raw.send(BATCH, check_frame(&[3])[..9].to_vec()).await.0, "3");
    assert_eq!(raw.request(Method::GET, STREAM, "application/grpc", vec![]).await.0, "3");
    assert_eq!(raw.request(Method::POST, STREAM, "text/html", vec![]).await.0, "3");
    assert!(!server.log().contains("panicked"));
}

#[tokio::test]
async fn the_frame_of_a_batch_has_a_maximum_size() {
    let server = Server::builder().set("grpc.limits.max_frame_bytes", "1000").start();
    let mut raw = Raw::connect(&server).await;
    for (bytes, status, expected, ids) in [(900, "0", "", &[7][..]), (2_000, "8", "maximum of 1000", &[])] {
        let mut message = check_frame(&[7]).split_off(5);
        // An unknown field pads the message. Its number and its length have three bytes.
        message.extend(field(14, &vec![0; bytes - message.len() - 3]));
        assert_eq!(message.len(), bytes);
        let (code, text, answer) = raw.send(BATCH, frame(&message)).await;
        assert_eq!((code.as_str(), response_ids(&answer)), (status, ids.to_vec()), "{text}");
        assert!(text.contains(expected), "{text}");
    }
}

#[tokio::test]
async fn random_bytes_on_a_stream_end_in_a_status() {
    let server = Server::builder().start();
    let mut raw = Raw::connect(&server).await;
    let mut runner = TestRunner::new(Config::default());
    let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4);
    let usage = |user: &str| BucketQuotaUsage {
        bucket_id: Some(BucketId { bucket: [("user".into(), user.into())].into() }),
        time_elapsed: Some(prost_types::Duration { seconds: 5, nanos: 0 }),
        num_requests_allowed: 1,
        num_requests_denied: 2,
    };
    let reports = |users: &[&str]| {
        let bucket_quota_usages = users.iter().map(|user| usage(user)).collect();
        frame(&RateLimitQuotaUsageReports { domain: "d".into(), bucket_quota_usages }.encode_to_vec())
    };
    for (path, valid) in [
        (STREAM, [check_frame(&[1, 2, 3]), check_frame(&[4])].concat()),
        (QUOTAS, [reports(&["a", "b"]), reports(&["a"])].concat()),
    ] {
        for _ in 0..2_000 {
            let mut body = valid.clone();
            for (index, byte) in changes.new_tree(&mut runner).unwrap().current() {
                let index = index.index(body.len());
                body[index] = byte;
            }
            let (status, text, bytes) = raw.send(path, body).await;
            assert!(matches!(status.as_str(), "0" | "3" | "8" | "12"), "{status}: {text}");
            assert!(path != STREAM || response_ids(&bytes).len() <= 12);
        }
    }
    wait_for("the streams of quotas to end", || (server.metric("sluicegate_quota_streams") == 0.0).then_some(()));
    assert!(!server.log().contains("panicked"));
}

/// Random bytes, and valid requests with some random bytes, are answered with a status on both stores.
#[tokio::test]
async fn random_bytes_end_in_a_status_and_do_not_leak_memory() {
    let redis = RedisServer::start();
    let send_random = |server: Server| async move {
        let mut raw = Raw::connect(&server).await;
        let mut runner = TestRunner::new(Config::default());
        let random = prop::collection::vec(any::<u8>(), 0..400);
        let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6);
        let mut valid = request(vec![descriptor(3, "some value"), with_limit(2, Some(3)).descriptors.remove(0)]);
        valid.descriptors[0].hits_addend = Some(u64::MAX);
        let valid = valid.encode_to_vec();
        let mut resident = 0;
        for round in 0..6_000 {
            let body = if round % 2 == 0 {
                random.new_tree(&mut runner).unwrap().current()
            } else {
                let mut body = frame(&valid);
                for (index, byte) in changes.new_tree(&mut runner).unwrap().current() {
                    let index = index.index(body.len());
                    body[index] = byte;
                }
                body
            };
            let (status, text, answer) = raw.send(METHOD, body).await;
            match status.as_str() {
                "0" => assert!(RateLimitResponse::decode(&answer[5..]).is_ok()),
                "3" | "8" | "12" => assert!(!text.is_empty()),
                other => panic!("status {other}: {text}"),
            }
            if round == 2_000 {
                resident = server.resident_memory();
            }
        }
        let grown = server.resident_memory().saturating_sub(resident);
        assert!(grown < 8 << 20, "memory grew by {grown} bytes during 4,000 requests");
        assert!(!server.log().contains("panicked"), "{}", server.log());
        assert!(server.client().await.check(request_for("example", &[("user", "y")])).await.unwrap().allowed());
    };
    send_random(Server::builder().start()).await;
    send_random(Server::builder().store(&redis.url()).start()).await;
}

#[tokio::test]
async fn invalid_json_is_rejected_with_a_message() {
    let server = Server::builder().start();
    let url = server.url("/json");
    let deep = format!("{}{}", "[".repeat(10_000), "]".repeat(10_000));
    // Slightly too large: the server does not read a much larger body to its end, and the client would see a broken
    // pipe.
    let wide = format!("{{\"domain\":\"{}\"}}", "x".repeat(4 << 20));
    for body in [
        "",
        "{",
        "[]",
        "null",
        "\"x\"",
        "{\"domain\":1}",
        "{\"unknown\":1}",
        "{\"domain\":\"example\"}",
        &deep,
        "{} {}",
    ] {
        let (code, text) = post(&url, body.as_bytes());
        assert_eq!(code, 400, "{body:.40}: {text}");
        assert!(text.ends_with('\n') && text.len() > 10, "{text}");
    }
    assert_eq!(post(&url, wide.as_bytes()).0, 413);
    let limit_without_unit = r#"{"domain":"example","descriptors":[{"entries":[],"limit":{"requestsPerUnit":1}}]}"#;
    assert_eq!(post(&url, limit_without_unit.as_bytes()).0, 400);
    let mut runner = TestRunner::new(Config::default());
    let random = prop::collection::vec(any::<u8>(), 0..100);
    for _ in 0..300 {
        let body = random.new_tree(&mut runner).unwrap().current();
        assert_eq!(post(&url, &body).0, 400);
    }
    assert!(!server.log().contains("panicked"));
}

#[tokio::test]
async fn responses_that_the_caller_does_not_read_are_dropped() {
    let server = Server::builder().set("grpc.send_timeout", "300ms").start();
    let unread = || server.metric("sluicegate_grpc_unread_responses_total");
    let descriptors = vec![descriptor(1, "y")];
    let decision = (METHOD, frame(&request(descriptors).encode_to_vec()));
    let health = ("/grpc.health.v1.Health/Check", frame(b""));
    let mut closed = Raw::with_window(&server, 0).await;
    for (number, (path, body)) in [decision.clone(), health, decision.clone()].into_iter().enumerate() {
        let request = Request::builder().method(Method::POST).uri(format!("http://x{path}"));
        let request = request.header("content-type", "application/grpc");
        let response = closed.0.send_request(request.body(Full::new(Bytes::from(body))).unwrap()).await.unwrap();
        assert_eq!(response.status(), 200);
        let error = timeout(DEADLINE, response.into_body().collect()).await.unwrap().unwrap_err();
        assert!(format!("{error:?}").contains("CANCEL"), "{error:?}");
        assert_eq!(unread(), (number + 1) as f64);
    }
    assert_eq!(server.log().matches("does not read responses").count(), 1, "{}", server.log());
    // Callers that read are not affected, even if they read slowly.
    let mut slow = Raw::with_window(&server, 7).await;
    assert_eq!(slow.send(decision.0, decision.1).await.0, "0");
    assert_eq!(unread(), 3.0);
}

/// Sends requests and resets each of them at once, until the service closes the connection.
async fn flood_with_resets(server: &Server) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    const HEADERS: u8 = 1;
    const RST_STREAM: u8 = 3;
    let frame = |kind: u8, flags: u8, stream: u32, payload: &[u8]| {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
    };
    let (mut reader, mut writer) = tokio::net::TcpStream::connect(server.grpc).await.unwrap().into_split();
    let closed = tokio::spawn(async move {
        let mut received = Vec::new();
        let _ = reader.read_to_end(&mut received).await;
    });
    writer.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
    // POST / over http, by the static table of HPACK (RFC 7541, appendix A); end of the headers.
    let request = |stream| frame(HEADERS, 4, stream, &[0x83, 0x84, 0x86]);
    let reset = |stream| frame(RST_STREAM, 0, stream, &8_u32.to_be_bytes());
    for first in (1..1_000_000).step_by(1_000) {
        let flood: Vec<u8> =
            (first..first + 1_000).step_by(2).flat_map(|id| [request(id), reset(id)].concat()).collect();
        if writer.write_all(&flood).await.is_err() || closed.is_finished() {
            break;
        }
    }
    timeout(DEADLINE, closed).await.expect("the connection to be closed").unwrap();
}

#[tokio::test]
async fn floods_of_resets_are_counted_and_logged_once() {
    let server = Server::builder().start();
    let healthy = server.client().await;
    for _ in 0..5 {
        flood_with_resets(&server).await;
    }
    let errors = || server.metric("sluicegate_grpc_protocol_errors_total");
    wait_for_async("the floods to be counted", async || (errors() == 5.0).then_some(())).await;
    let log = server.log();
    assert_eq!(log.matches("closing connections that violate HTTP/2").count(), 1, "{log}");
    assert!(!log.contains("remotely-reset"), "{log}");
    assert!(healthy.check(request_for("example", &[("user", "y")])).await.unwrap().allowed());
}

/// Connections with another protocol, and connections that stop in the middle of the preface, do not affect others.
#[tokio::test]
async fn connections_without_http2_are_closed() -> Result<(), Infallible> {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let server = Server::builder().start();
    let mut silent = Vec::new();
    for greeting in ["GET / HTTP/1.1\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "\0\0\0\0", "PRI *", ""] {
        let mut stream = tokio::net::TcpStream::connect(server.grpc).await.unwrap();
        stream.write_all(greeting.as_bytes()).await.unwrap();
        if greeting.starts_with(['G', '\0']) {
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer).await;
            assert!(!answer.is_empty(), "no response to {greeting:?}");
        }
        silent.push(stream);
    }
    assert!(server.client().await.check(request_for("example", &[("user", "y")])).await.unwrap().allowed());
    // Connections without a complete preface are closed soon. One with a preface gets a keep-alive ping, much later.
    wait_for_async("the two connections without a complete preface to be closed", async || {
        (server.metric("sluicegate_grpc_connections") == 1.0).then_some(())
    })
    .await;
    Ok(())
}

proptest! {
    #[test]
    fn random_rule_files_are_compiled_or_rejected(
        text in "(domain: [a-c*{}\\[\\]&!|>'\"%@`-]{0,4}\n)?(descriptors:\n)?([ ]{0,6}(- )?(key|value|rate_limit|unit|descriptors|unlimited|<<|[a-z]{1,3}): ?[a-z0-9*&{}\\[\\]:,'\"|>!-]{0,8}\n){0,12}",
    ) {
        let file = SourceFile { name: "random.yaml".into(), text };
        if let Err(errors) = compile(&[file], Options::default()) {
            prop_assert!(!errors.is_empty());
            prop_assert!(errors.iter().all(|error| error.location.line >= 1 && !error.message.is_empty()));
        }
    }

    #[test]
    fn random_bytes_do_not_panic_the_compiler(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let _ = compile(&[SourceFile { name: "random.yaml".into(), text }], Options::default());
    }
}
