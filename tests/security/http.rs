//! Attacks on the HTTP listeners: bodies that are not finished, responses that are not read, and heads.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
};

use tokio::io::AsyncWriteExt;

use crate::support::{
    DEADLINE, Operator, Server,
    http2_frames::{
        ACK, END_HEADERS, END_STREAM, Frames, GREETING_WITHOUT_WINDOW, HEADERS, SETTINGS, frame, get_headers,
    },
    operator::{OPERATE, READ},
    rules,
    server::{get, post},
    wait_for, wait_for_async,
};

const REQUEST: &str = r#"{"domain":"nowhere","descriptors":[{"entries":[{"key":"user","value":"x"}]}]}"#;
/// The whole budget for input; each HTTP listener has a quarter.
const MAX_INPUT: &str = "4194304";

fn rejected(server: &Server, listener: &str, reason: &str) -> f64 {
    server.metric(&format!("sluicegate_http_rejected_requests_total{{listener=\"{listener}\",reason=\"{reason}\"}}"))
}

/// Sends a head, and a part of the body that it announces.
fn begin(addr: SocketAddr, head: &str, length: usize, sent: usize) -> TcpStream {
    let mut stream = TcpStream::connect(addr).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    write!(stream, "{head} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n").unwrap();
    // The service may have rejected the request by now.
    let _ = stream.write_all(&vec![b' '; sent]);
    stream
}

/// Reads the head of a response. Returns an empty text if the connection was closed.
fn response_head(stream: &mut TcpStream) -> String {
    let mut text = Vec::new();
    let mut byte = [0];
    while !text.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap_or(0) > 0 {
        text.push(byte[0]);
    }
    String::from_utf8(text).unwrap()
}

/// Bodies that are not finished have a budget for the listener. The oldest ones end, and complete ones are handled.
#[test]
fn unfinished_bodies_share_a_budget_and_complete_ones_are_handled() {
    let server = Server::builder().set("input.max_bytes", MAX_INPUT).start();
    let large_request = format!("{REQUEST}{}", " ".repeat(48 * 1024));
    let mut unfinished = Vec::new();
    for number in 0..100 {
        unfinished.push(begin(server.http, "POST /json", 60_000, 50_000 + number));
        if number % 10 == 0 {
            assert_eq!(post(&server.url("/json"), large_request.as_bytes()).0, 200);
            assert_eq!(server.get("/healthcheck"), "OK");
        }
    }
    let head = response_head(&mut unfinished[0]);
    assert!(head.starts_with("HTTP/1.1 503"), "{head}");
    // Ten bodies fit into the quarter of the listener, because each needs its size twice.
    wait_for("the rejected bodies to be counted", || (rejected(&server, "http", "no_memory") >= 90.0).then_some(()));
    let lines = server.log().matches("rejecting requests").count();
    assert_eq!(lines, 1, "{}", server.log());
    assert_eq!(rejected(&server, "http", "too_slow"), 0.0);
}

/// The response to a request that is not permitted does not wait for its body.
#[test]
fn bodies_are_read_only_after_the_role_and_the_method_were_checked() {
    let operator = Operator::with(Server::builder());
    let (http, admin) = (operator.server.http, operator.addr.trim_start_matches("http://").parse().unwrap());
    let elsewhere = "HTTP/1.1\r\nx-forwarded-for: 192.0.2.1\r\nx:";
    let read = format!("HTTP/1.1\r\nauthorization: Bearer {READ}\r\nx:");
    let operate = format!("HTTP/1.1\r\nauthorization: Bearer {OPERATE}\r\nx:");
    for (addr, path, headers, code) in [
        (http, "/v1/PutOverrides", elsewhere, 403),
        (http, "/v1/Inspect", elsewhere, 403),
        (http, "/v1/Nothing", elsewhere, 404),
        (http, "/v1/ReadDescriptors", elsewhere, 413),
        (http, "/v1/PutOverrides", read.as_str(), 403),
        (http, "/nowhere", elsewhere, 404),
        (http, "/metrics", elsewhere, 405),
        (http, "/json", "HTTP/1.1\r\nsec-fetch-site: cross-site\r\nx:", 403),
        (admin, "/v1/PutOverrides", elsewhere, 401),
        (admin, "/v1/PutOverrides", read.as_str(), 403),
        (admin, "/v1/Inspect", operate.as_str(), 413),
        (admin, "/sluicegate.admin.v1.AdminService/PutOverrides", elsewhere, 401),
    ] {
        let length = if path == "/v1/Inspect" { (1 << 20) + 1 } else { 64 * 1024 + 1 };
        let mut stream = begin(addr, &format!("POST {path} {headers}"), length, 0);
        let head = response_head(&mut stream);
        assert!(head.starts_with(&format!("HTTP/1.1 {code}")), "{path} {headers}: {head}");
        assert!(head.contains("x-content-type-options: nosniff"), "{path}: {head}");
    }
}

#[test]
fn each_kind_of_body_has_a_maximum_size() {
    let operator = Operator::with(Server::builder().set("grpc.limits.max_message_bytes", "100000"));
    let server = &operator.server;
    for (path, max) in [("/json", 100_000), ("/resources/db", 64 * 1024), ("/v1/GetSession", 1 << 20)] {
        let body = |bytes: usize| format!("{{}}{}", " ".repeat(bytes - 2));
        assert_ne!(post(&server.url(path), body(max).as_bytes()).0, 413, "{path}");
        let before = rejected(server, "http", "too_large");
        // The size of a call of the admin API is rejected before its body is read.
        let sent = if path.starts_with("/v1/") { 0 } else { max + 1 };
        let mut stream = begin(server.http, &format!("POST {path}"), max + 1, sent);
        let head = response_head(&mut stream);
        assert!(head.starts_with("HTTP/1.1 413"), "{path}: {head}");
        assert_eq!(rejected(server, "http", "too_large"), before + 1.0, "{path}");
    }
}

#[test]
fn heads_have_a_maximum_size() {
    let server = Server::builder().start();
    for (bytes, code) in [(15_000, 200), (17_500, 431)] {
        let start = "GET /healthcheck HTTP/1.1\r\nhost: x\r\na: ";
        let value = "x".repeat(bytes - start.len() - "\r\n\r\n".len());
        let mut stream = TcpStream::connect(server.http).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        // The service may have rejected the request by now.
        let _ = stream.write_all(format!("{start}{value}\r\n\r\n").as_bytes());
        let head = response_head(&mut stream);
        assert!(head.starts_with(&format!("HTTP/1.1 {code}")), "{bytes} bytes: {head}");
    }
}

#[tokio::test]
async fn a_connection_has_a_maximum_of_concurrent_requests() {
    let server = Server::builder().start();
    let mut frames = Frames::connect_to(server.http).await;
    let settings = frames.next_with(|frame| frame.kind == SETTINGS && frame.flags & ACK == 0).await;
    // SETTINGS_MAX_CONCURRENT_STREAMS is 32.
    assert!(settings.payload.chunks(6).any(|setting| setting == [0, 3, 0, 0, 0, 32]), "{settings:?}");
}

/// Begins HTTP/2 requests whose responses have no window, so that the service cannot send them.
pub(super) async fn request_without_window(addr: SocketAddr, path: &str, requests: u32) -> tokio::net::TcpStream {
    let mut stream = tokio::net::TcpStream::connect(addr).await.unwrap();
    let mut bytes = GREETING_WITHOUT_WINDOW.to_vec();
    for request in 0..requests {
        bytes.extend(frame(HEADERS, END_HEADERS | END_STREAM, 2 * request + 1, &get_headers(path)));
    }
    // The service may have closed the connection by now.
    let _ = stream.write_all(&bytes).await;
    stream
}

/// Responses that are not read have the same budget. The connection with the oldest one is closed.
#[tokio::test]
async fn responses_that_are_not_read_share_a_budget() {
    let server = Server::builder().set("input.max_bytes", MAX_INPUT).start();
    let page = "/console/vendor/uplot.js";
    let size = server.get(page).len();
    assert!(size > 20_000, "{size}");
    let before = server.resident_memory();
    let mut unread = Vec::new();
    for _ in 0..40 {
        unread.push(request_without_window(server.http, page, 30).await);
        assert_eq!(server.get(page).len(), size);
    }
    assert!(rejected(&server, "http", "unread") > 10.0, "{}", server.get("/metrics"));
    let grown = server.resident_memory().saturating_sub(before);
    assert!(grown < 40 * 30 * size as u64 / 2, "the responses use {grown} bytes");
    assert_eq!(server.log().matches("rejecting requests").count(), 1, "{}", server.log());
}

/// A large page is built once for many callers, and callers that do not read it keep at most two versions of it.
#[tokio::test]
async fn large_pages_that_are_not_read_are_shared() {
    use std::fmt::Write as _;
    let mut text = "domain: many\ndescriptors:\n".to_owned();
    for rule in 0..20_000 {
        let _ = writeln!(text, "- {{ key: k{rule}, rate_limit: {{ unit: hour, requests_per_unit: 1 }} }}");
    }
    let folder = rules(&[("many.yaml", &text)]);
    let server = Server::start(folder.path(), "memory");
    let size = server.get("/rlconfig").len() as u64;
    assert!(size > 1_000_000, "{size}");
    let before = server.resident_memory();
    let mut unread = Vec::new();
    for _ in 0..60 {
        unread.push(request_without_window(server.http, "/rlconfig", 30).await);
    }
    for _ in 0..3 {
        assert_eq!(server.get("/rlconfig").len() as u64, size, "an honest caller reads the page");
    }
    let grown = server.resident_memory().saturating_sub(before);
    // Without sharing, there would be 1,800 pages.
    assert!(grown < 60 * size, "{grown} bytes for pages of {size}");
    assert_eq!(server.get("/healthcheck"), "OK");
}

/// Unfinished requests of all kinds on every HTTP listener keep no one from its answers.
#[tokio::test]
async fn health_is_answered_while_callers_hold_unfinished_requests() {
    let server = Server::builder().set("http.metrics_addr", "127.0.0.1:0").start();
    let mut held = Vec::new();
    for _ in 0..20 {
        held.push(request_without_window(server.http, "/metrics", 30).await);
    }
    let bodies: Vec<_> = (0..100).map(|_| begin(server.http, "POST /json", 60_000, 10_000)).collect();
    wait_for_async("health", async || (get(&server.url("/healthcheck")) == (200, "OK".into())).then_some(())).await;
    assert!(get(&server.url("/readyz")).1.starts_with("ready"));
    drop((held, bodies));
}

/// Each thread that serves callers has a watchdog.
#[test]
fn the_stalls_of_all_threads_are_measured() {
    let server = Server::builder().set("workers", "2").start();
    let page = server.get("/metrics");
    for thread in ["control", "http", "worker-0", "worker-1"] {
        let series = format!("sluicegate_thread_stall_seconds{{thread=\"{thread}\"}} ");
        assert!(page.contains(&series), "{thread}: {page}");
    }
}
