//! A caller over its limit that shapes its values: long ones, bytes that are not UTF-8, and many of them. Envoy lets a
//! request pass if the service answers with an error, so each gets the decision that its other descriptors require.

use std::{
    io::{Read, Write},
    net::TcpStream,
    sync::Arc,
};

use proptest::{
    prelude::*,
    strategy::ValueTree,
    test_runner::{Config, TestRunner},
};
use prost::Message;
use serde_json::json;
use sluicegate_proto::{
    envoy::{
        service::{
            rate_limit_quota::v3::{RateLimitQuotaResponse, rate_limit_quota_response::bucket_action::BucketAction},
            ratelimit::v3::RateLimitResponse,
        },
        r#type::v3::rate_limit_strategy::{BlanketRule, Strategy as QuotaStrategy},
    },
    sluicegate::v1::{ResponseFrame, check_response::Outcome},
};

use super::envoy::upstream;
use crate::support::{
    Operator, Server,
    envoy::Envoy,
    operator::{OPERATE, READ},
    raw_grpc::{BATCH, METHOD, QUOTAS, Raw, STREAM, field, frame},
    rules,
    server::post,
    wait_for,
};

/// Nobody may be `user=over`. Every other value has a limit that is never reached, in each way that a rule can match.
const RULES: &str = "
domain: api
descriptors:
- {key: user, value: over, rate_limit: {unit: year, requests_per_unit: 0}}
- {key: user, rate_limit: {unit: year, requests_per_unit: 4000000000}}
- {key: path, value: /v1/*, detailed_metric: true, rate_limit: {unit: year, requests_per_unit: 4000000000}}
- {key: path, rate_limit: {unit: year, requests_per_unit: 4000000000, algorithm: gcra}}
- {key: address, ip_prefix: {v4: 24, v6: 64}, rate_limit: {unit: year, requests_per_unit: 4000000000}}
- {key: shared, value: '*', share_threshold: true, rate_limit: {unit: year, requests_per_unit: 4000000000}}
- {key: metric, value_to_metric: true, rate_limit: {unit: year, requests_per_unit: 4000000000}}
";

/// A key and a value of any bytes.
type RawEntry = (&'static str, Vec<u8>);

/// Returns values of every kind that a caller could choose.
fn value() -> BoxedStrategy<Vec<u8>> {
    let pieces = prop::sample::select(vec![
        &b"\xff"[..],
        b"\\xff",
        b"\\",
        b"\x00",
        b"\r\n",
        b"*",
        b"|",
        b"~",
        b"%2F",
        b"/v1/",
        b"10.0.0.1",
        b"over",
        b"\"",
        b"\xed\xa0\x80",
        "é".as_bytes(),
        "\u{10FE41}".as_bytes(),
    ]);
    let odd = prop::collection::vec(pieces, 0..6).prop_map(|pieces| pieces.concat());
    let random = prop::collection::vec(any::<u8>(), 0..200);
    let length = prop_oneof![0..2_000_usize, 0..70_000_usize];
    let long = (odd.clone(), any::<u8>(), length).prop_map(|(mut bytes, byte, length)| {
        bytes.resize(bytes.len() + length, byte);
        bytes
    });
    prop_oneof![odd, random, long].boxed()
}

fn noise() -> impl Strategy<Value = Vec<Vec<RawEntry>>> {
    let key = prop::sample::select(vec!["path", "address", "shared", "metric", "user", "no_rule"]);
    let descriptor = prop::collection::vec((key, value()), 1..3);
    prop::collection::vec(descriptor, 0..4)
}

fn entry((key, value): &RawEntry) -> Vec<u8> {
    field(1, &[field(1, key.as_bytes()), field(2, value)].concat())
}

/// Returns an encoded `RateLimitRequest`.
fn request(descriptors: &[Vec<RawEntry>]) -> Vec<u8> {
    let mut message = field(1, b"api");
    for entries in descriptors {
        message.extend(field(2, &entries.iter().flat_map(entry).collect::<Vec<_>>()));
    }
    message
}

fn over() -> Vec<RawEntry> {
    vec![("user", b"over".to_vec())]
}

/// Returns the overall code of the answer: 1 if the request is allowed, and 2 if it is denied.
async fn decide(raw: &mut Raw, message: &[u8]) -> i32 {
    let (status, text, answer) = raw.send(METHOD, frame(message)).await;
    assert_eq!(status, "0", "{text}");
    RateLimitResponse::decode(&answer[5..]).unwrap().overall_code
}

/// Decides the request as the second of three checks of a frame.
async fn decide_frame(raw: &mut Raw, path: &str, message: &[u8]) -> i32 {
    let check = |id: u8, request: &[u8]| field(1, &[vec![8, id], field(2, request)].concat());
    let other = request(&[vec![("user", b"x".to_vec())]]);
    let frames = frame(&[check(1, &other), check(2, message), check(3, &other)].concat());
    let (status, text, answer) = raw.send(path, frames).await;
    assert_eq!(status, "0", "{text}");
    let mut rest = &answer[..];
    while let [_, a, b, c, d, tail @ ..] = rest {
        let (message, tail) = tail.split_at(u32::from_be_bytes([*a, *b, *c, *d]) as usize);
        rest = tail;
        for response in ResponseFrame::decode(message).unwrap().responses {
            if let (2, Some(Outcome::Verdict(verdict))) = (response.id, response.outcome) {
                return if verdict.allowed { 1 } else { 2 };
            }
        }
    }
    panic!("the check has no verdict")
}

/// Returns the request as JSON, with its bytes in the strings.
fn json_request(descriptors: &[Vec<RawEntry>]) -> Vec<u8> {
    let mut body = br#"{"domain":"api","descriptors":["#.to_vec();
    for (index, entries) in descriptors.iter().enumerate() {
        body.extend_from_slice(if index > 0 { b",{\"entries\":[" } else { b"{\"entries\":[" });
        for (index, (key, value)) in entries.iter().enumerate() {
            let separator = if index > 0 { "," } else { "" };
            body.extend_from_slice(format!("{separator}{{\"key\":\"{key}\",\"value\":\"").as_bytes());
            for byte in value {
                if matches!(byte, b'"' | b'\\') {
                    body.push(b'\\');
                }
                body.push(*byte);
            }
            body.extend_from_slice(b"\"}");
        }
        body.extend_from_slice(b"]}");
    }
    body.extend_from_slice(b"]}");
    body
}

/// Returns whether the bucket `user=over` is denied on a stream that also reports buckets with this noise.
async fn denies_quota(raw: &mut Raw, noise: &[Vec<RawEntry>]) -> bool {
    let usage = |entries: &[RawEntry]| {
        let id = entries.iter().flat_map(entry).collect::<Vec<_>>();
        field(2, &[field(1, &id), vec![3 << 3, 1]].concat())
    };
    let mut message = field(1, b"api");
    for entries in noise {
        message.extend(usage(entries));
    }
    message.extend(usage(&over()));
    let (status, text, answer) = raw.send(QUOTAS, frame(&message)).await;
    assert_eq!(status, "0", "{text}");
    let mut rest = &answer[..];
    let mut is_denied = false;
    while let [_, a, b, c, d, tail @ ..] = rest {
        let (message, tail) = tail.split_at(u32::from_be_bytes([*a, *b, *c, *d]) as usize);
        rest = tail;
        // Envoy ends the stream if a name in it is not UTF-8.
        for action in RateLimitQuotaResponse::decode(message).unwrap().bucket_action {
            let id = action.bucket_id.unwrap().bucket;
            let strategy = match action.bucket_action.unwrap() {
                BucketAction::QuotaAssignmentAction(assignment) => assignment.rate_limit_strategy.unwrap().strategy,
                BucketAction::AbandonAction(_) => None,
            };
            let is_over = id.len() == 1 && id.get("user").is_some_and(|user| user == "over");
            is_denied |= is_over && strategy == Some(QuotaStrategy::BlanketRule(BlanketRule::DenyAll.into()));
        }
    }
    is_denied
}

/// Whatever the other descriptors contain, a request with `user=over` is denied, and one without is allowed.
#[tokio::test]
async fn no_bytes_in_a_value_change_the_decision() {
    let folder = rules(&[("api.yaml", RULES)]);
    let server = Server::builder().rules(folder.path()).set("response.dynamic_metadata", "true").start();
    let mut raw = Raw::connect(&server).await;
    let mut runner = TestRunner::new(Config::default());
    for round in 0..150 {
        let mut descriptors = noise().new_tree(&mut runner).unwrap().current();
        descriptors.retain(|entries| entries[0] != over()[0]);
        let denied = round % 2 == 0 || descriptors.is_empty();
        assert!(denies_quota(&mut raw, &descriptors).await, "{descriptors:?}");
        if denied {
            let position = round / 2 % (descriptors.len() + 1);
            descriptors.insert(position, over());
        }
        let (message, expected) = (request(&descriptors), if denied { 2 } else { 1 });
        assert_eq!(decide(&mut raw, &message).await, expected, "{descriptors:?}");
        for path in [STREAM, BATCH] {
            assert_eq!(decide_frame(&mut raw, path, &message).await, expected, "{descriptors:?}");
        }
        let (code, text) = post(&server.url("/json"), &json_request(&descriptors));
        assert_eq!(code, if denied { 429 } else { 200 }, "{text:.200} {descriptors:?}");
    }
    assert!(!server.log().contains("panicked"));
    assert_eq!(server.metric("sluicegate_caller_errors_total{kind=\"malformed\"}"), 0.0);
    assert!(server.metric("sluicegate_unusual_values_total{kind=\"long\"}") > 0.0);
    assert!(server.metric("sluicegate_unusual_values_total{kind=\"escaped\"}") > 0.0);
}

/// The largest message is decided, and one byte more is an error.
#[tokio::test]
async fn a_message_of_the_maximum_size_is_decided() {
    let folder = rules(&[("api.yaml", RULES)]);
    let server = Server::builder().rules(folder.path()).start();
    let mut raw = Raw::connect(&server).await;
    for (byte, key) in [(b'x', "path"), (0xff, "path"), (b'\\', "shared"), (0xff, "no_rule")] {
        let with = |length: usize| request(&[vec![(key, vec![byte; length])], over()]);
        let length = (4 << 20) - with(3 << 20).len() + (3 << 20);
        assert_eq!(with(length).len(), 4 << 20);
        assert_eq!(decide(&mut raw, &with(length)).await, 2);
        let (status, text, _) = raw.send(METHOD, frame(&with(length + 1))).await;
        assert!(status == "8" && text.contains("maximum of 4194304"), "{status} {text}");
    }
}

/// Long values and odd bytes have a counter each, and no two of them share one.
#[tokio::test]
async fn values_that_look_alike_have_counters_of_their_own() {
    let text = "domain: api\ndescriptors:\n- key: user\n  rate_limit: { unit: year, requests_per_unit: 1 }\n";
    let folder = rules(&[("api.yaml", text)]);
    let server = Server::builder().rules(folder.path()).start();
    let mut raw = Raw::connect(&server).await;
    let (long, other) = ([b'x'; 2_000], [[b'x'; 1_999].as_slice(), b"y"].concat());
    let values: [&[u8]; 10] = [
        b"\xff",
        b"\\xff",
        b"\\\\xff",
        b"\xfe",
        b"\xff\xff",
        "\u{fffd}".as_bytes(),
        b"",
        &long,
        &other,
        &[0xff; 2_000],
    ];
    for value in values {
        let message = request(&[vec![("user", value.to_vec())]]);
        let codes = [decide(&mut raw, &message).await, decide(&mut raw, &message).await];
        assert_eq!(codes, [1, 2], "{value:?}");
    }
}

/// Operators see and use one form of a long value.
#[tokio::test]
async fn operators_see_and_use_the_bounded_form_of_a_long_value() {
    let folder = rules(&[("api.yaml", RULES)]);
    let operator = Operator::start(folder.path(), "memory");
    let server = &operator.server;
    let mut raw = Raw::connect(server).await;
    let path = [b"/v1/".to_vec(), vec![b'x'; 3_000]].concat();
    let message = request(&[vec![("path", path.clone())]]);
    assert_eq!(decide(&mut raw, &message).await, 1);
    let top = wait_for("the entity to be listed", || {
        let (_, answer) = operator.call(READ, "ListTopEntities", r#"{"rankBy": "RANK_BY_REQUESTED"}"#);
        let entities = answer["entities"].as_array()?.clone();
        let entity = entities.into_iter().find(|entity| entity["descriptor"]["entries"][0]["key"] == "path")?;
        Some(entity["descriptor"].clone())
    });
    let form = top["entries"][0]["value"].as_str().unwrap();
    assert_eq!((form.len(), &form[..130]), (170, &*format!("/v1/{}\\~", "x".repeat(124))));
    assert!(server.get("/metrics").contains(&form.replace('\\', "\\\\")), "the label of the rule with detailed_metric");
    // The form and the value itself name the same counter and the same override.
    let inspect = |value: &str| {
        let body = json!({ "descriptor": { "domain": "api", "entries": [{ "key": "path", "value": value }] } });
        operator.call(READ, "Inspect", &body.to_string()).1
    };
    let raw_value = String::from_utf8(path).unwrap();
    assert_eq!(inspect(form)["counters"], inspect(&raw_value)["counters"]);
    for value in [form, &raw_value] {
        let limit = |text: &str| {
            let target = json!({ "limit": { "domain": "api", "entries": [{ "key": "path", "value": value }] } });
            json!({ "changes": [{ "target": target, "value": text }], "reason": "test" }).to_string()
        };
        let (code, answer) = operator.call(OPERATE, "PutOverrides", &limit("blocked"));
        assert_eq!(code, 200, "{answer}");
        assert_eq!(decide(&mut raw, &message).await, 2);
        assert_eq!(operator.call(OPERATE, "PutOverrides", &limit("")).0, 200);
        assert_eq!(decide(&mut raw, &message).await, 1);
    }
}

/// Sends a request with these bytes through Envoy, and returns the status code; 0 if Envoy closes the connection.
fn send(envoy: &Envoy, head: &[u8]) -> u16 {
    let mut stream = TcpStream::connect(envoy.address()).unwrap();
    stream.set_read_timeout(Some(crate::support::DEADLINE)).unwrap();
    // Envoy may answer and close before it has read everything.
    let _ = stream.write_all(head);
    let mut answer = Vec::new();
    let mut buffer = [0; 1_024];
    while !answer.windows(2).any(|two| two == b"\r\n") {
        match stream.read(&mut buffer) {
            Ok(0) | Err(_) => return 0,
            Ok(read) => answer.extend_from_slice(&buffer[..read]),
        }
    }
    String::from_utf8_lossy(&answer[9..12]).parse().unwrap()
}

/// A caller over its limit has nothing but bytes. Envoy allows requests if the service answers with an error.
#[test]
fn no_bytes_get_a_caller_past_its_limit_behind_envoy() {
    let text = "domain: envoy\ndescriptors:\n- key: user\n  rate_limit: { unit: year, requests_per_unit: 1 }\n\
        - key: path\n  rate_limit: { unit: year, requests_per_unit: 4000000 }\n";
    let folder = rules(&[("envoy.yaml", text)]);
    let server = Server::builder().rules(folder.path()).set("response.dynamic_metadata", "true").start();
    let (upstream, _) = upstream();
    let user =
        "                    - request_headers: { header_name: x-user, descriptor_key: user }\n          http_filters";
    let all = "                    - request_headers: { header_name: x-user, descriptor_key: user }\n\
        \x20                 - actions:\n\
        \x20                   - request_headers: { header_name: ':path', descriptor_key: path }\n\
        \x20                   - request_headers: { header_name: x-odd, descriptor_key: odd, skip_if_absent: true }\n\
        \x20                 - actions:\n\
        \x20                   - request_headers: { header_name: x-odd, descriptor_key: odd }\n          http_filters";
    let changes = [("timeout: 0.1s", "timeout: 5s"), (user, all)];
    let envoy = Envoy::start_changed("deploy/envoy/envoy.yaml", server.grpc, upstream, &changes);
    let envoy = Arc::new(envoy);
    let head = |path: &str, headers: &[u8]| {
        [format!("GET {path} HTTP/1.1\r\nhost: x\r\nx-user: eve\r\n").as_bytes(), headers, b"\r\n"].concat()
    };
    assert_eq!(send(&envoy, &head("/", b"")), 200);
    assert_eq!(send(&envoy, &head("/", b"")), 429);
    let mut denied = 0;
    let mut attempts = Vec::new();
    for length in [1_000, 1_100, 5_000, 20_000, 50_000] {
        attempts.push(head(&format!("/?{}", "q".repeat(length)), b""));
        attempts.push(head("/", format!("x-odd: {}\r\n", "v".repeat(length)).as_bytes()));
        attempts.push(head("/", &[b"x-odd: ".to_vec(), vec![0xff; length], b"\r\n".to_vec()].concat()));
        attempts.push(head("/", &[b"x-odd: ".to_vec(), vec![b'\\'; length], b"\r\n".to_vec()].concat()));
    }
    for odd in
        [&b"\xff"[..], b"\xc3", b"\xed\xa0\x80", b"\\xff", b"\\~", b"\t", b"\x80\x80", b"a\xf0\x9f\x98", b"%00", b"\""]
    {
        attempts.push(head("/", &[b"x-odd: ", odd, b"\r\n"].concat()));
    }
    for count in [10, 90] {
        let many: String = (0..count).map(|number| format!("x-h{number}: {}\r\n", "v".repeat(500))).collect();
        attempts.push(head("/", many.as_bytes()));
        attempts.push(head("/", "x-odd: a\r\n".repeat(count).as_bytes()));
    }
    attempts.push(head("/\\xff%ff%c3", b""));
    for attempt in &attempts {
        let code = send(&envoy, attempt);
        let shown = String::from_utf8_lossy(&attempt[..attempt.len().min(80)]);
        assert!(code == 429 || code == 431 || code == 400 || code == 0, "{code} for {shown:?}");
        denied += usize::from(code == 429);
    }
    assert!(denied > attempts.len() / 2, "most requests reach the service: {denied} of {}", attempts.len());
}
