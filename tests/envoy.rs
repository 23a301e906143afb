//! A real Envoy in front of an upstream, with the service behind its rate limit filter: `deploy/envoy`, as it is.

use std::{net::SocketAddr, process::Command};

use axum::{Router, http::HeaderMap};

use super::support::{RedisServer, Server, envoy::Envoy, repository, server::command, tool, until};

/// Answers 200 to everything, with the `x-tokens` that the request wants to have used.
fn upstream() -> SocketAddr {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let answer = async |headers: HeaderMap| {
                let tokens = headers.get("x-tokens").cloned().unwrap_or_else(|| "0".parse().unwrap());
                ([("x-tokens", tokens)], "ok")
            };
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            axum::serve(listener, Router::new().fallback(answer)).await.unwrap();
        });
    });
    address
}

fn start(store: &str, failure_mode_deny: bool) -> (Server, Envoy) {
    let server = Server::start(&repository("deploy/envoy/rules"), store);
    let envoy = Envoy::start(server.grpc, upstream(), failure_mode_deny);
    (server, envoy)
}

fn header<'h>(headers: &'h HeaderMap, name: &str) -> &'h str {
    headers.get(name).map_or("", |value| value.to_str().unwrap())
}

#[test]
fn requests_pass_until_the_limit_each_user_for_itself() {
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
    assert_eq!((code, header(&headers, "x-ratelimit-limit")), (200, ""), "nothing to ask without a user");
}

#[test]
fn a_descriptors_own_hits_count() {
    let (_server, envoy) = start("memory", false);
    for (cost, code, remaining) in [("4", 200, "6"), ("6", 200, "0"), ("1", 429, "0")] {
        let (got, headers) = envoy.get("/batch", &[("x-user", "alice"), ("x-cost", cost)]);
        assert_eq!((got, header(&headers, "x-ratelimit-remaining")), (code, remaining));
    }
    assert_eq!(envoy.get("/batch", &[("x-user", "bob"), ("x-cost", "11")]).0, 429);
}

/// What a request cost is charged when it is done; Envoy does that after the answer, so the next look waits for it.
#[test]
fn hits_are_taken_when_the_stream_is_done() {
    let (server, envoy) = start("memory", false);
    let charged = |total: f64| {
        until(&format!("{total} tokens to be charged"), || {
            let series = "ratelimit_service_rate_limit_total_hits{domain=\"envoy\",key1=\"tokens_user\"}";
            (server.metric(series) == total).then_some(())
        });
    };
    for (tokens, remaining, total) in [("40", "100", 40.0), ("50", "60", 90.0), ("30", "10", 120.0)] {
        let (code, headers) = envoy.get("/tokens", &[("x-user", "alice"), ("x-tokens", tokens)]);
        assert_eq!((code, header(&headers, "x-ratelimit-remaining")), (200, remaining));
        charged(total);
    }
    assert_eq!(envoy.get("/tokens", &[("x-user", "alice")]).0, 429);
}

#[test]
fn hits_are_given_back() {
    let (_server, envoy) = start("memory", false);
    for round in 0..10 {
        // 2 at once are allowed, and each gives its own back when it is done: that is soon, but not at once.
        until(&format!("round {round} to find room"), || {
            let (code, headers) = envoy.get("/slow", &[("x-user", "alice")]);
            (code == 200 && header(&headers, "x-ratelimit-remaining") == "1").then_some(())
        });
    }
}

#[test]
fn a_stopped_redis_leaves_it_to_envoys_failure_mode() {
    for (deny, without_redis) in [(false, 200), (true, 500)] {
        let mut redis = RedisServer::start();
        let (_server, envoy) = start(&redis.url(), deny);
        let ask = || envoy.get("/", &[("x-user", "alice")]);
        for code in [200, 200, 200, 429] {
            assert_eq!(ask().0, code);
        }
        redis.kill();
        until("Envoy's failure mode", || (ask().0 == without_redis).then_some(()));
        redis.restart();
        until("the limit to hold again", || (ask().0 == 429).then_some(()));
    }
}

/// The containers cannot be run here; what they are given can be checked.
#[test]
fn the_compose_example_is_one_that_envoy_and_the_service_take() {
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
