//! All attacks on the memory together, in the memory that `--print-settings` states, while an honest caller is served.

use std::{
    io::Write,
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use flate2::{Compression, write::GzEncoder};
use prost::Message;
use serde_json::json;
use sluicegate_proto::envoy::service::rate_limit_quota::v3::{
    BucketId, RateLimitQuotaUsageReports, rate_limit_quota_usage_reports::BucketQuotaUsage,
};
use tokio::{io::AsyncWriteExt, net::TcpStream, task::JoinSet};

use super::{
    http::request_without_window,
    memory::{call_without_reading, connect, unfinished},
    parsers::{long_aliases, nested_aliases},
};
use crate::support::{
    Server,
    http2_frames::{
        DATA, END_HEADERS, END_STREAM, GREETING, GREETING_WITHOUT_WINDOW, HEADERS, PING, call_headers, frame,
    },
    memory_group::MemoryGroup,
    raw_grpc::{self, BATCH, METHOD, QUOTAS, STREAM},
    request_for, rules,
    server::{Builder, command, env_name, post},
    wait_for,
};

const RULES: &str = "
domain: example
descriptors:
- key: user
  rate_limit: { unit: hour, requests_per_unit: 1000 }
- key: path
  rate_limit: { unit: hour, requests_per_unit: 1000 }
";
/// Connections and counters are few, so that the attacks exhaust them.
const SETTINGS: [(&str, &str); 6] = [
    ("workers", "2"),
    ("memory.max_counters", "100000"),
    ("quotas.max_buckets", "20000"),
    ("grpc.max_connections", "400"),
    ("grpc.max_concurrent_streams", "190"),
    ("http.max_connections", "200"),
];
const WATCH: &str = "/grpc.health.v1.Health/Watch";

/// Listeners that are attacked.
#[derive(Clone, Copy)]
struct Target {
    grpc: SocketAddr,
    http: SocketAddr,
}

/// Connects, sends bytes, and keeps the connection without reading.
async fn send_and_hold(addr: SocketAddr, bytes: Vec<u8>) {
    let Ok(mut stream) = TcpStream::connect(addr).await else {
        return;
    };
    // The service may close the connection.
    let _ = stream.write_all(&bytes).await;
    std::future::pending::<()>().await;
}

/// Returns headers of a call, and 2,300 small ones, which HPACK compresses to a byte each.
fn many_headers(path: &str) -> Vec<u8> {
    let mut headers = call_headers(path);
    // A literal that enters the dynamic table, and references to it.
    headers.extend([0x40, 1, b'a', 0]);
    headers.extend([0xbe; 2_300]);
    headers
}

async fn hold_unfinished_messages(target: Target, path: &'static str) {
    let sender = connect(target.grpc).await;
    let mut calls = JoinSet::new();
    for _ in 0..40 {
        let mut sender = sender.clone();
        calls.spawn(async move { sender.send_request(unfinished(path, 2 << 20)).await.map(drop) });
    }
    while calls.join_next().await.is_some() {}
}

/// Each message has only its first byte, in a frame of its own.
async fn hold_tiny_messages(target: Target) {
    let mut bytes = GREETING.to_vec();
    for call in 0..900 {
        bytes.extend(frame(HEADERS, END_HEADERS, 2 * call + 1, &many_headers(METHOD)));
        bytes.extend(frame(DATA, 0, 2 * call + 1, &[0]));
    }
    send_and_hold(target.grpc, bytes).await;
}

/// Sends calls without a window for the responses.
async fn call_without_window(target: Target) {
    let message = raw_grpc::frame(&request_for("example", &[("user", "x")]).into_message().encode_to_vec());
    let mut bytes = GREETING_WITHOUT_WINDOW.to_vec();
    for call in 0..900 {
        bytes.extend(frame(HEADERS, END_HEADERS, 2 * call + 1, &call_headers(METHOD)));
        bytes.extend(frame(DATA, END_STREAM, 2 * call + 1, &message));
    }
    send_and_hold(target.grpc, bytes).await;
}

async fn hold_unfinished_heads(target: Target) {
    send_and_hold(target.grpc, [GREETING, &frame(HEADERS, 0, 1, &many_headers(METHOD))].concat()).await;
}

async fn watch_health_with_large_heads(target: Target) {
    let mut bytes = GREETING.to_vec();
    for call in 0..900 {
        bytes.extend(frame(HEADERS, END_HEADERS, 2 * call + 1, &many_headers(WATCH)));
    }
    send_and_hold(target.grpc, bytes).await;
}

async fn flood_with_pings(target: Target) {
    send_and_hold(target.grpc, [GREETING, &frame(PING, 0, 0, &[0; 8]).repeat(100_000)].concat()).await;
}

async fn hold_unfinished_bodies(target: Target) {
    let head = "POST /json HTTP/1.1\r\nhost: x\r\ncontent-length: 4000000\r\n\r\n";
    send_and_hold(target.http, [head.as_bytes(), &vec![b' '; 3_999_999]].concat()).await;
}

async fn hold_unfinished_calls_of_the_console(target: Target) {
    let head = "POST /v1/ReadDescriptors HTTP/1.1\r\nhost: x\r\ncontent-length: 60000\r\n\r\n";
    send_and_hold(target.http, [head.as_bytes(), &[b' '; 59_999]].concat()).await;
}

async fn read_no_pages(target: Target, path: &'static str) {
    let _stream = request_without_window(target.http, path, 30).await;
    std::future::pending::<()>().await;
}

/// Reports of one bucket, or of ever new ones.
fn usage_reports(buckets: impl Iterator<Item = String>) -> RateLimitQuotaUsageReports {
    let usage = |value| BucketQuotaUsage {
        bucket_id: Some(BucketId { bucket: [("user".into(), value)].into() }),
        time_elapsed: None,
        num_requests_allowed: 1,
        num_requests_denied: 0,
    };
    RateLimitQuotaUsageReports { domain: "example".into(), bucket_quota_usages: buckets.map(usage).collect() }
}

/// Sends a compressed message on a stream, and never reads the responses.
async fn report(target: Target, message: &RateLimitQuotaUsageReports) {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(&message.encode_to_vec()).unwrap();
    let mut compressed = raw_grpc::frame(&encoder.finish().unwrap());
    compressed[0] = 1;
    assert!(compressed.len() < 60_000, "more than the window: {}", compressed.len());
    let mut bytes = GREETING_WITHOUT_WINDOW.to_vec();
    bytes.extend(frame(HEADERS, END_HEADERS, 1, &call_headers(QUOTAS)));
    for part in compressed.chunks(16_000) {
        bytes.extend(frame(DATA, 0, 1, part));
    }
    send_and_hold(target.grpc, bytes).await;
}

async fn report_one_bucket_many_times(target: Target) {
    report(target, &usage_reports(std::iter::repeat_n("x".to_owned(), 150_000))).await;
}

async fn report_many_buckets(target: Target, number: usize) {
    report(target, &usage_reports((0..5_000).map(|bucket| format!("{number}-{bucket}-{}", "x".repeat(300))))).await;
}

/// Asks for new values, each nearly as long as it can be without a digest.
async fn invent_values(target: Target, number: usize) {
    let mut sender = connect(target.grpc).await;
    for call in 0.. {
        let value = format!("{number}-{call}-{}", "x".repeat(1_000));
        let message = request_for("example", &[("path", &value)]).into_message().encode_to_vec();
        let body = http_body_util::Full::new(raw_grpc::frame(&message).into());
        let request = http::Request::post(format!("http://x{METHOD}"))
            .header("content-type", "application/grpc")
            .body(http_body_util::BodyExt::boxed_unsync(body))
            .unwrap();
        if sender.send_request(request).await.is_err() {
            return;
        }
    }
}

async fn send_texts_that_expand(target: Target) {
    let constants = format!("- [{}]\n", "{ key: a, value: some-longer-constant }, ".repeat(32)).repeat(40);
    let mapping = format!("domain: example\ntime: t\ndescriptors:\n{constants}");
    let bodies = [
        ("ReadDescriptors", json!({ "text": "{\"t\": 1}", "mapping": nested_aliases() })),
        ("ReadDescriptors", json!({ "text": "{\"t\": 1}", "mapping": "- ".repeat(10_000) })),
        ("Simulate", json!({ "accessLog": "{\"t\": 1}", "mapping": long_aliases() })),
        ("Simulate", json!({ "accessLog": "{\"t\": 1}\n".repeat(5_000), "mapping": mapping })),
    ];
    let attack = move || {
        for (method, body) in &bodies {
            post(&format!("http://{}/v1/{method}", target.http), body.to_string().as_bytes());
        }
    };
    let _ = tokio::task::spawn_blocking(attack).await;
}

/// Starts all attacks. They run until the set is dropped.
fn attack(target: Target) -> JoinSet<()> {
    let mut attacks = JoinSet::new();
    for number in 0..4 {
        for path in [METHOD, STREAM, BATCH, QUOTAS] {
            attacks.spawn(hold_unfinished_messages(target, path));
        }
        attacks.spawn(report_one_bucket_many_times(target));
        attacks.spawn(report_many_buckets(target, number));
        attacks.spawn(invent_values(target, number));
        attacks.spawn(send_texts_that_expand(target));
    }
    for _ in 0..20 {
        attacks.spawn(call_without_reading(target.grpc));
        attacks.spawn(call_without_window(target));
        attacks.spawn(hold_tiny_messages(target));
        attacks.spawn(watch_health_with_large_heads(target));
        attacks.spawn(flood_with_pings(target));
        attacks.spawn(hold_unfinished_bodies(target));
        attacks.spawn(hold_unfinished_calls_of_the_console(target));
        attacks.spawn(read_no_pages(target, "/metrics"));
        attacks.spawn(read_no_pages(target, "/console/vendor/uplot.js"));
    }
    for _ in 0..100 {
        attacks.spawn(hold_unfinished_heads(target));
        attacks.spawn(send_and_hold(target.grpc, Vec::new()));
    }
    attacks
}

/// Returns the memory that `--print-settings` states, in bytes.
fn stated_memory() -> u64 {
    let mut command = command();
    for (name, value) in SETTINGS {
        command.env(env_name(name), value);
    }
    let output = command.arg("--print-settings").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let total = text.lines().find_map(|line| line.strip_prefix('#')?.strip_suffix(" in total"));
    total.unwrap_or_else(|| panic!("{text}")).trim().parse::<u64>().unwrap() * 1_000_000
}

fn with_settings(mut builder: Builder) -> Builder {
    for (name, value) in SETTINGS {
        builder = builder.set(name, value);
    }
    builder
}

/// The process has no more memory than it states. An honest caller is always answered, and the memory is freed afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_attacks_together_take_no_more_memory_than_stated() {
    let folder = rules(&[("example.yaml", RULES)]);
    let stated = stated_memory();
    let group = MemoryGroup::new(stated);
    let server = with_settings(Server::builder().rules(folder.path())).start_by(|command| {
        let child = command.spawn().unwrap();
        if let Some(group) = &group {
            group.add(child.id());
        }
        child
    });
    let client = server.client().await;
    let before = server.resident_memory();
    let mut attacks = attack(Target { grpc: server.grpc, http: server.http });
    for number in 0..120 {
        let request = request_for("example", &[("path", &*number.to_string())]);
        let answer = client.check(request).await;
        assert!(answer.is_ok(), "{answer:?}");
        if number % 30 == 0 {
            assert_eq!(server.get("/healthcheck"), "OK");
        }
    }
    let held = || server.metric("sluicegate_input_bytes");
    wait_for("the callers to hold much", || (held() > 20e6).then_some(()));
    let peak = server.peak_memory();
    assert!(peak < stated, "{peak} of {stated} bytes");
    attacks.abort_all();
    while attacks.join_next().await.is_some() {}
    wait_for("the budget to be free", || (held() == 0.0).then_some(()));
    wait_for("the memory to come back", || (server.resident_memory() < before + (96 << 20)).then_some(()));
    assert_eq!(server.get("/healthcheck"), "OK");
}

/// Calls repeatedly for a time, and returns the sorted latencies.
fn latencies(time: Duration, mut call: impl FnMut()) -> Vec<Duration> {
    let end = Instant::now() + time;
    let mut latencies = Vec::new();
    while Instant::now() < end {
        let start = Instant::now();
        call();
        latencies.push(start.elapsed());
        thread::sleep(Duration::from_millis(1));
    }
    latencies.sort();
    latencies
}

fn print_latencies(server: &Server, when: &str) {
    let time = Duration::from_secs(20);
    let (calls, checks) = thread::scope(|scope| {
        let checks = scope.spawn(|| latencies(time, || assert_eq!(server.get("/healthcheck"), "OK")));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let client = runtime.block_on(server.client());
        let mut number = 0;
        let calls = latencies(time, || {
            number += 1;
            let request = request_for("example", &[("path", &*format!("{when} {}", number % 1_000))]);
            let answer = runtime.block_on(client.check(request));
            assert!(answer.is_ok(), "{answer:?}");
        });
        (calls, checks.join().unwrap())
    });
    for (name, latencies) in [("calls", calls), ("health checks", checks)] {
        let last = latencies.len() - 1;
        let [p50, p99, maximum] = [last / 2, last * 99 / 100, last].map(|index| latencies[index].as_secs_f64() * 1e3);
        println!("| {when} | {name} | {} | {p50:.2} | {p99:.2} | {maximum:.1} |", latencies.len());
    }
}

/// Prints the latencies of an honest caller and of the health check, before and during all attacks, which begin again
/// every two seconds. `make attacks` runs it.
#[test]
#[ignore = "measures latencies, which depend on the machine"]
fn latencies_during_all_attacks() {
    let folder = rules(&[("example.yaml", RULES)]);
    let server = with_settings(Server::builder().rules(folder.path())).start();
    println!("| attacks | of | number | p50, ms | p99, ms | maximum, ms |");
    println!("| --- | --- | --- | --- | --- | --- |");
    print_latencies(&server, "none");
    let target = Target { grpc: server.grpc, http: server.http };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.spawn(async move {
        loop {
            let _attacks = attack(target);
            tokio::time::sleep(Duration::from_secs(2)).await;
        }
    });
    print_latencies(&server, "all");
    runtime.shutdown_background();
}
