//! A real Envoy with the configuration in `deploy/envoy`: its rate limit filter calls the service, in front of an
//! upstream.

use std::{
    collections::HashSet,
    io::Write,
    net::{SocketAddr, TcpStream},
    process::Command,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use axum::{Router, body::Body, http::HeaderMap};
use tokio_stream::StreamExt;

use crate::support::{
    RedisServer, Server,
    envoy::Envoy,
    repository, rules,
    server::{agent, command, post},
    tool, wait_for,
};

/// The requests in the upstream, and their maximum number so far.
#[derive(Default)]
pub(crate) struct InFlight {
    current: Mutex<HashSet<u64>>,
    /// Requests that their callers have broken off. The upstream learns of this late.
    broken_off: Mutex<HashSet<u64>>,
    max: AtomicUsize,
}

impl InFlight {
    fn current(&self) -> usize {
        self.current.lock().unwrap().len()
    }

    fn begin(&self, id: u64) {
        let mut current = self.current.lock().unwrap();
        if !self.broken_off.lock().unwrap().contains(&id) {
            current.insert(id);
            self.max.fetch_max(current.len(), Relaxed);
        }
    }

    fn end(&self, id: u64) {
        self.current.lock().unwrap().remove(&id);
    }

    fn break_off(&self, id: u64) {
        let mut current = self.current.lock().unwrap();
        self.broken_off.lock().unwrap().insert(id);
        current.remove(&id);
    }
}

/// One request in the upstream; it ends when dropped.
struct InFlightRequest(Arc<InFlight>, u64);

impl InFlightRequest {
    /// Begins the request with the id in `x-id`, or with a new one.
    fn new(in_flight: Arc<InFlight>, headers: &HeaderMap) -> Self {
        let id = headers.get("x-id").map_or_else(rand::random, |id| id.to_str().unwrap().parse().unwrap());
        in_flight.begin(id);
        Self(in_flight, id)
    }
}

impl Drop for InFlightRequest {
    fn drop(&mut self) {
        self.0.end(self.1);
    }
}

/// Starts an upstream that answers every request with status 200, and returns its address and its requests in flight.
///
/// Headers of the request control the response: `x-tokens` is copied to the response, `x-work` is a delay in
/// milliseconds, `x-break` breaks the response off, and `x-id` is the id of the request.
pub(crate) fn upstream() -> (SocketAddr, Arc<InFlight>) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let (address, in_flight) = (listener.local_addr().unwrap(), Arc::new(InFlight::default()));
    let in_upstream = Arc::clone(&in_flight);
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let answer = async move |headers: HeaderMap| {
                let request = InFlightRequest::new(in_upstream, &headers);
                let tokens = headers.get("x-tokens").cloned().unwrap_or_else(|| "0".parse().unwrap());
                let work = headers.get("x-work").map_or(0, |work| work.to_str().unwrap().parse().unwrap());
                tokio::time::sleep(Duration::from_millis(work)).await;
                let broken = headers.contains_key("x-break").then(|| Err(std::io::Error::other("broken off")));
                let pieces = [Ok("ok")].into_iter().chain(broken);
                let pieces = tokio_stream::iter(pieces).map(move |piece: Result<&str, std::io::Error>| {
                    let _until_the_body_ends = &request;
                    piece
                });
                ([("x-tokens", tokens)], Body::from_stream(pieces))
            };
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            axum::serve(listener, Router::new().fallback(answer)).await.unwrap();
        });
    });
    (address, in_flight)
}

fn start(store: &str, failure_mode_deny: bool) -> (Server, Envoy) {
    let server = Server::start(&repository("deploy/envoy/rules"), store);
    let envoy = Envoy::start(server.grpc, upstream().0, failure_mode_deny);
    (server, envoy)
}

fn header<'h>(headers: &'h HeaderMap, name: &str) -> &'h str {
    headers.get(name).map_or("", |value| value.to_str().unwrap())
}

#[test]
fn each_user_has_a_separate_limit() {
    let (_server, envoy) = start("memory", false);
    for (code, remaining) in [(200, "2"), (200, "1"), (200, "0"), (429, "0"), (429, "0")] {
        let (got, headers) = envoy.get("/", &[("x-user", "alice")]);
        assert_eq!((got, header(&headers, "x-ratelimit-remaining")), (code, remaining));
        assert_eq!(header(&headers, "x-ratelimit-limit"), "3, 3;w=3600");
        let reset: u32 = header(&headers, "x-ratelimit-reset").parse().unwrap();
        assert!((1..=3_600).contains(&reset));
        assert_eq!(header(&headers, "x-envoy-ratelimited"), if code == 429 { "true" } else { "" });
    }
    assert_eq!(envoy.get("/", &[("x-user", "bob")]).0, 200);
    let (code, headers) = envoy.get("/", &[]);
    assert_eq!((code, header(&headers, "x-ratelimit-limit")), (200, ""), "a request without a user has no descriptor");
}

/// Envoy sends the message and the headers of the rule that denies a request, and headers about all of its limits.
#[test]
fn a_denial_by_one_of_several_limits_says_what_its_rule_says() {
    let text = "
domain: envoy
descriptors:
- key: user
  rate_limits:
  - { unit: hour, requests_per_unit: 5, algorithm: gcra, burst: 5 }
  - unit: month
    requests_per_unit: 2
    name: monthly
    window: calendar
    denial:
      message: '{\"limit\": \"{limit}\", \"name\": \"{name}\", \"wait\": {wait}}'
      content_type: application/problem+json
      headers: { X-Upgrade: 'https://example.com/?limit={name}' }
      status: 402
";
    let folder = rules(&[("envoy.yaml", text)]);
    let server = Server::builder().rules(folder.path()).store("memory").set("response.headers", "true");
    let server = server.set("response.header_style", "both").start();
    let envoy = Envoy::start(server.grpc, upstream().0, false);
    for _ in 0..2 {
        let (code, headers) = envoy.get("/", &[("x-user", "alice")]);
        assert_eq!((code, header(&headers, "x-upgrade")), (200, ""));
        let policy = header(&headers, "ratelimit-policy");
        assert!(policy.contains("\"monthly\";q=2;w=2592000") && policy.contains("q=5;"), "{policy}");
    }
    let url = format!("http://{}/", envoy.address());
    let mut response = agent().get(url).header("x-user", "alice").call().unwrap();
    assert_eq!(response.status().as_u16(), 429, "Envoy's configuration has the status");
    assert_eq!(header(response.headers(), "content-type"), "application/problem+json");
    assert_eq!(header(response.headers(), "x-upgrade"), "https://example.com/?limit=monthly");
    let wait: u64 = header(response.headers(), "retry-after").parse().unwrap();
    let body: serde_json::Value = serde_json::from_str(&response.body_mut().read_to_string().unwrap()).unwrap();
    assert_eq!((&body["limit"], &body["name"]), (&"2 per month".into(), &"monthly".into()));
    assert!(body["wait"].as_u64().unwrap().abs_diff(wait) <= 1 && wait > 3_600 / 5, "{body} {wait}");
    // The other limit was not charged by the denial, and /json has the status of the rule.
    let entries = serde_json::json!([{"entries": [{"key": "user", "value": "alice"}]}]);
    let request = serde_json::json!({"domain": "envoy", "descriptors": entries});
    let (code, body) = post(&server.url("/json"), request.to_string().as_bytes());
    assert_eq!(code, 402);
    assert!(body.contains("rawBody"), "{body}");
}

#[test]
fn hits_of_a_descriptor_are_its_cost() {
    let (_server, envoy) = start("memory", false);
    for (cost, code, remaining) in [("4", 200, "6"), ("6", 200, "0"), ("1", 429, "0")] {
        let (got, headers) = envoy.get("/batch", &[("x-user", "alice"), ("x-cost", cost)]);
        assert_eq!((got, header(&headers, "x-ratelimit-remaining")), (code, remaining));
    }
    assert_eq!(envoy.get("/batch", &[("x-user", "bob"), ("x-cost", "11")]).0, 429);
}

/// A shed request gets 503 with `Retry-After`; a denial by the caller's own limit stays 429.
#[test]
fn a_shed_request_gets_503() {
    let server = Server::builder().rules(&repository("deploy/envoy/rules")).store("memory");
    let server = server.set("response.headers", "true").set("response.dynamic_metadata", "true").start();
    let envoy = Envoy::start(server.grpc, upstream().0, false);
    let slot = |id: usize, hits: u64| {
        let entry = |(key, value): (&str, String)| serde_json::json!({"key": key, "value": value});
        let entries = [("fleet", "shop".to_owned()), ("priority", "get".to_owned()), ("request_id", id.to_string())];
        let body = serde_json::json!({"domain": "envoy", "descriptors": [
            {"entries": entries.map(entry), "hitsAddend": hits.to_string()}
        ]});
        post(&server.url("/json"), body.to_string().as_bytes()).0
    };
    assert_eq!([0, 1, 2].map(|id| slot(id, 1)), [200; 3]);
    for priority in [&[("x-priority", "get")][..], &[("x-priority", "post")], &[]] {
        let (code, headers) = envoy.get("/shop", priority);
        assert_eq!((code, header(&headers, "x-envoy-ratelimited")), (503, "true"), "{priority:?}");
        let wait: u64 = header(&headers, "retry-after").parse().unwrap();
        assert!((1..=60).contains(&wait), "{wait}");
    }
    // The slot is released each time; otherwise two requests would fill the limit.
    for _ in 0..5 {
        wait_for("the slot to be released", || {
            (envoy.get("/shop", &[("x-priority", "critical")]).0 == 200).then_some(())
        });
    }
    let codes: Vec<_> = (0..4).map(|_| envoy.get("/", &[("x-user", "alice")]).0).collect();
    assert_eq!(codes, [200, 200, 200, 429]);
}

/// Envoy sends the cost after the response, so the test waits for it before the next request.
#[test]
fn hits_are_taken_after_the_response() {
    let (server, envoy) = start("memory", false);
    let wait_until_charged = |total: f64| {
        wait_for(&format!("{total} tokens to be charged"), || {
            let series = "ratelimit_service_rate_limit_total_hits{domain=\"envoy\",key1=\"tokens_user\"}";
            (server.metric(series) == total).then_some(())
        });
    };
    for (tokens, remaining, total) in [("40", "100", 40.0), ("50", "60", 90.0), ("30", "10", 120.0)] {
        let (code, headers) = envoy.get("/tokens", &[("x-user", "alice"), ("x-tokens", tokens)]);
        assert_eq!((code, header(&headers, "x-ratelimit-remaining")), (200, remaining));
        wait_until_charged(total);
    }
    assert_eq!(envoy.get("/tokens", &[("x-user", "alice")]).0, 429);
}

/// Sends a request and closes the connection after `after`, without reading the response.
fn send_and_disconnect(envoy: &Envoy, in_flight: &InFlight, headers: &str, after: Duration) {
    let (mut connection, id) = (TcpStream::connect(envoy.address()).unwrap(), rand::random());
    write!(connection, "GET /slow HTTP/1.1\r\nhost: x\r\nx-user: alice\r\nx-id: {id}\r\n{headers}\r\n").unwrap();
    // Envoy ends a request after the route's timeout of 5 s.
    let in_upstream = after.min(Duration::from_millis(4_900));
    std::thread::sleep(in_upstream);
    in_flight.break_off(id);
    std::thread::sleep(after - in_upstream);
}

/// Requests are finished, denied, broken off by the upstream, reset by the client, or timed out. Never more than two
/// are in the upstream at the same time, and finally both slots are free.
#[test]
fn slots_are_released_however_a_request_ends() {
    let redis = RedisServer::start();
    for store in ["memory", &redis.url()] {
        let server = Server::start(&repository("deploy/envoy/rules"), store);
        let (upstream, in_flight) = upstream();
        let envoy = Envoy::start(server.grpc, upstream, false);
        let allowed = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for caller in 0..8_u64 {
                let (envoy, in_flight, allowed) = (&envoy, &*in_flight, &allowed);
                scope.spawn(move || {
                    for number in 0..40 {
                        match (caller + number) % 8 {
                            0..4 => {
                                let (code, _) = envoy.get("/slow", &[("x-user", "alice"), ("x-work", "3")]);
                                assert!(code == 200 || code == 429, "{code}");
                                allowed.fetch_add(usize::from(code == 200), Relaxed);
                            }
                            4 => send_and_disconnect(envoy, in_flight, "x-break: 1\r\n", Duration::from_millis(20)),
                            5 => send_and_disconnect(
                                envoy,
                                in_flight,
                                "x-work: 30\r\n",
                                Duration::from_millis(number % 20),
                            ),
                            // Only once, because this request waits for the route's timeout of 5 s.
                            6 if number == 6 => {
                                send_and_disconnect(envoy, in_flight, "x-work: 7000\r\n", Duration::from_millis(5_500));
                            }
                            _ => send_and_disconnect(envoy, in_flight, "", Duration::ZERO),
                        }
                    }
                });
            }
        });
        wait_for("both slots to be free", || {
            let (code, headers) = envoy.get("/slow", &[("x-user", "alice")]);
            (code == 200 && header(&headers, "x-ratelimit-remaining") == "1").then_some(())
        });
        let (max, allowed) = (in_flight.max.load(Relaxed), allowed.into_inner());
        assert!(max <= 2 && allowed > 20, "{max} in flight at the same time, {allowed} allowed");
    }
}

/// A slot can end before its request. The slot is free then, and the later release by the request has no effect.
#[test]
fn a_request_that_outlives_its_slot_releases_no_other_slot() {
    let text = "domain: envoy\ndescriptors:\n- key: slow_user\n  rate_limit: {algorithm: concurrency, limit: 1, hold: 2s, holder: request_id}\n";
    let folder = rules(&[("envoy.yaml", text)]);
    let server = Server::start(folder.path(), "memory");
    let (upstream, in_flight) = upstream();
    let envoy = Envoy::start(server.grpc, upstream, false);
    let get = |work: &str| envoy.get("/slow", &[("x-user", "alice"), ("x-work", work)]).0;
    std::thread::scope(|scope| {
        let long = scope.spawn(|| get("4000"));
        wait_for("the request to reach the upstream", || (in_flight.current() == 1).then_some(()));
        assert_eq!(get("0"), 429);
        // A client cannot share a slot by sending equal request ids, because Envoy replaces them.
        let named = || envoy.get("/slow", &[("x-user", "bob"), ("x-request-id", "me"), ("x-work", "500")]).0;
        let both = [scope.spawn(named), scope.spawn(named)].map(|request| request.join().unwrap());
        assert!(both.contains(&200) && both.contains(&429), "{both:?}");
        let start = Instant::now();
        // The second request gets the slot when it ends, and holds it while the first request ends.
        wait_for("the slot to end", || (get("3000") == 200).then_some(()));
        assert_eq!(long.join().unwrap(), 200);
        assert!(start.elapsed() > Duration::from_secs(3), "the second request must end last");
    });
}

#[test]
fn envoys_failure_mode_decides_without_redis() {
    for (deny, without_redis) in [(false, 200), (true, 500)] {
        let mut redis = RedisServer::start();
        let (_server, envoy) = start(&redis.url(), deny);
        let get = || envoy.get("/", &[("x-user", "alice")]);
        for code in [200, 200, 200, 429] {
            assert_eq!(get().0, code);
        }
        redis.kill();
        wait_for("Envoy's failure mode", || (get().0 == without_redis).then_some(()));
        redis.restart();
        wait_for("the limit to be enforced again", || (get().0 == 429).then_some(()));
    }
}

/// The containers cannot run in this test, but their configuration can be validated.
#[test]
fn envoy_and_the_service_accept_the_compose_example() {
    let config = repository("deploy/compose/envoy.yaml");
    let envoy = Command::new(tool("envoy")).args(["--mode", "validate", "-l", "error", "-c"]).arg(config).output();
    let envoy = envoy.unwrap();
    assert!(envoy.status.success(), "{}", String::from_utf8_lossy(&envoy.stderr));
    let mut check = command();
    check.arg("check").arg(repository("deploy/compose/rules"));
    check.args(["--explain", "compose", "user=alice", "path=/"]);
    let output = String::from_utf8(check.output().unwrap().stdout).unwrap();
    assert!(output.contains("sharded by user") && output.contains("5 per minute, sliding_window"), "{output}");
}

/// Envoy's access log is enough to simulate rules.
#[test]
fn rules_are_simulated_from_an_access_log() {
    let server = Server::start(&repository("deploy/envoy/rules"), "memory");
    let envoy = Envoy::start(server.grpc, upstream().0, false);
    for (user, requests) in [("bob", 5), ("eve", 2)] {
        for number in 0..requests {
            envoy.get(&format!("/free?number={number}"), &[("x-user", user)]);
        }
    }
    let logged = || std::fs::read_to_string(envoy.access_log()).unwrap_or_default().lines().count();
    wait_for("seven lines in the access log", || (logged() == 7).then_some(()));
    let folder = rules(&[
        ("rules.yaml", "domain: shop\ndescriptors: [{key: user, rate_limit: {unit: year, requests_per_unit: 3}}]\n"),
        (
            "mapping",
            "domain: shop\ntime: start_time\ndescriptors:\n- [{key: user, field: x_user}]\n\
             - [{key: path, field: path, cut: query}]\n- [{key: address, field: downstream_remote_address, cut: port}]\n",
        ),
    ]);
    let output = command()
        .args(["simulate", "--json", "--rules"])
        .arg(folder.path())
        .arg("--mapping")
        .arg(folder.path().join("mapping"))
        .arg("--traffic")
        .arg(envoy.access_log())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let result: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&result["requests"], &result["denied"]), (&7.into(), &2.into()), "{result}");
    let rules = result["rules"].as_array().unwrap();
    assert_eq!(rules[0]["most_denied"][0]["entity"], "user=bob", "{result}");
    // The descriptors without a rule are one path and one address.
    assert_eq!((&rules[1]["rule"], &rules[1]["entities"]), (&"(no rule)".into(), &2.into()), "{result}");
}
