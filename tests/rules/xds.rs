//! Rules by xDS from a control plane that is built on go-control-plane. Valid snapshots take effect, invalid ones are
//! rejected with a message, and rules stay in force while the control plane is away.

use std::{fs, process::Command};

use prost_types::{Struct, Value, value::Kind};
use sluicegate_proto::ratelimit::config::ratelimit::v3::{
    RateLimitConfig, RateLimitDescriptor, RateLimitPolicy, RateLimitUnit as Unit,
};
use tonic::{Code, transport::Endpoint};
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};

use crate::support::{
    Operator, Server,
    certificates::{Authority, Files},
    control_plane::{Certificates, ControlPlane},
    request_for, rules,
    server::{Builder, command, get},
    wait_for_async,
};

const TYPE: &str = "type.googleapis.com/ratelimit.config.ratelimit.v3.RateLimitConfig";

/// Builds a config that limits `k` to `limit` requests per year.
fn config(domain: &str, limit: u32) -> RateLimitConfig {
    limited(domain, policy(Unit::Year, limit))
}

fn policy(unit: Unit, requests_per_unit: u32) -> RateLimitPolicy {
    RateLimitPolicy { unit: unit.into(), requests_per_unit, ..RateLimitPolicy::default() }
}

fn limited(domain: &str, policy: RateLimitPolicy) -> RateLimitConfig {
    let descriptor =
        RateLimitDescriptor { key: "k".into(), rate_limit: Some(policy), ..RateLimitDescriptor::default() };
    RateLimitConfig { name: domain.into(), domain: domain.into(), descriptors: vec![descriptor], sluicegate: None }
}

/// Builds an invalid config: its limit has no unit.
fn invalid(domain: &str) -> RateLimitConfig {
    limited(domain, policy(Unit::Unknown, 1))
}

/// Returns a builder for a service with rules from the control plane at this address.
fn server_of(address: &str) -> Builder {
    Server::builder()
        .set("rules.xds.server", &format!("http://{address}"))
        .set("rules.xds.start_without_rules", "true")
        .set("rules.xds.retry_min", "10ms")
        .set("rules.xds.retry_max", "50ms")
}

/// Returns the limit in force, or `None` if the domain is unknown or there are no rules.
async fn limit(server: &Server, domain: &str) -> Option<u32> {
    let answer = server.client().await.check(request_for(domain, &[("k", "v")])).await.ok()?;
    answer.0.statuses[0].current_limit.as_ref().map(|limit| limit.requests_per_unit)
}

async fn wait_for_limit(server: &Server, domain: &str, expected: Option<u32>) {
    let condition = format!("{domain} to have the limit {expected:?}");
    wait_for_async(&condition, async || (limit(server, domain).await == expected).then_some(())).await;
}

#[tokio::test]
async fn snapshots_are_accepted_or_rejected_regardless_of_their_versions() {
    let mut plane = ControlPlane::start();
    let server = server_of(plane.address()).start();
    let first = plane.wait_for_request("the first request", |_| true).await;
    assert_eq!(
        (&first["type"], &first["node"], &first["version"], &first["nonce"], &first["names"]),
        (&TYPE.into(), &"default".into(), &"".into(), &"".into(), &serde_json::Value::Null)
    );
    // The service is connected but has not received rules.
    let error = server.client().await.check(request_for("a", &[("k", "v")])).await.unwrap_err();
    assert_eq!(error.code(), Some(Code::Unavailable));
    assert!(error.to_string().contains("no rate limit configuration loaded"), "{error}");
    assert!(server.get("/rlconfig").starts_with("# no rules loaded yet\n"));
    assert_eq!(server.metric("sluicegate_xds_connected"), 1.0);

    plane.set("one", &[config("a", 1), config("b", 2)]);
    wait_for_limit(&server, "a", Some(1)).await;
    assert_eq!(limit(&server, "b").await, Some(2));
    let accepted = plane.wait_for_request("the first to be accepted", |request| request["version"] == "one").await;
    assert!(accepted["nonce"] != "" && accepted["error"] == "", "{accepted}");

    // The control plane sends the resources in any order, and repeatedly.
    let others = ["c", "d", "e", "f", "g"].map(|domain| config(domain, 5));
    plane.set("two", &[&[config("a", 5), invalid("b")], &others[..]].concat());
    let rejected = plane.wait_for_request("the second to be rejected", |request| request["error"] != "").await;
    assert_eq!(rejected["version"], "one");
    let message = "b, k: unit \"UNKNOWN\" is not one of second, minute, hour, day, week, month, year";
    assert_eq!(rejected["error"], message);
    assert!(server.get("/rlconfig").contains(&format!("# last error: {message}\n")));
    assert_eq!((limit(&server, "a").await, limit(&server, "b").await), (Some(1), Some(2)));

    // Two resources with the same domain are rejected, as with files.
    plane.set("three", &[config("a", 5), RateLimitConfig { name: "other".into(), ..config("a", 6) }]);
    plane
        .wait_for_request("the third to be rejected", |request| {
            request["error"].as_str().is_some_and(|error| error.contains("domain \"a\" is already defined in a"))
        })
        .await;

    // A snapshot with the rules in force is accepted and clears the error.
    plane.set("four", &[config("b", 2), config("a", 1)]);
    plane.wait_for_request("the fourth to be accepted", |request| request["version"] == "four").await;
    assert!(!server.get("/rlconfig").contains("last error"));

    // Versions have no order.
    for (version, limit) in [("-7", 3), ("one", 4), ("", 5), ("1", 6)] {
        plane.set(version, &[config("a", limit)]);
        wait_for_limit(&server, "a", Some(limit)).await;
    }
    assert_eq!(limit(&server, "b").await, None);
    plane.set("none", &[]);
    wait_for_limit(&server, "a", None).await;
    // An empty snapshot is valid: nothing is limited, and nothing fails.
    assert!(server.client().await.check(request_for("a", &[("k", "v")])).await.unwrap().allowed());
    assert_eq!(server.metric("sluicegate_xds_updates_rejected_total"), 2.0);
    assert_eq!(server.metric("ratelimit_service_config_load_error"), 2.0);
    assert_eq!(server.metric("ratelimit_service_config_load_success"), 7.0);
}

/// A restarted control plane counts from 1 again, and may have different rules under the same version.
#[tokio::test]
async fn a_control_plane_may_restart() {
    let mut plane = ControlPlane::start();
    let address = plane.address().to_owned();
    let server = server_of(&address).start();
    for limit_value in 1..=3 {
        plane.set("1", &[config("a", limit_value)]);
        wait_for_limit(&server, "a", Some(limit_value)).await;
        drop(plane);
        wait_for_async("the loss of the connection to be detected", async || {
            (server.metric("sluicegate_xds_connected") == 0.0).then_some(())
        })
        .await;
        assert_eq!(limit(&server, "a").await, Some(limit_value));
        plane = ControlPlane::start_at(&address, "default", None);
        // The service is connected but has received nothing yet: the rules stay.
        plane.wait_for_request("the next request", |request| request["version"] == "").await;
        assert_eq!(limit(&server, "a").await, Some(limit_value));
    }
    // Unchanged rules are not loaded again.
    let loads = server.metric("ratelimit_service_config_load_success");
    plane.set("1", &[config("a", 3)]);
    plane.wait_for_request("the snapshot to be accepted", |request| request["version"] == "1").await;
    assert_eq!(server.metric("ratelimit_service_config_load_success"), loads);
    let log = server.log();
    let lines = |text: &str| log.lines().filter(|line| line.contains(text)).count();
    // Each outage logs the end of the stream, and possibly that the connection was refused.
    assert!((3..=6).contains(&lines("control plane unavailable")), "{log}");
    assert_eq!(lines("receiving rules from the control plane"), 4, "{log}");
}

#[tokio::test]
async fn the_service_waits_for_the_first_rules_by_default() {
    let mut plane = ControlPlane::start();
    let builder = server_of(plane.address()).set("rules.xds.start_without_rules", "false");
    let starting = tokio::task::spawn_blocking(move || builder.start());
    plane.wait_for_request("the first request", |_| true).await;
    plane.set("bad", &[invalid("a")]);
    plane.wait_for_request("the first rules to be rejected", |request| request["error"] != "").await;
    assert!(!starting.is_finished());
    plane.set("good", &[config("a", 1)]);
    assert_eq!(limit(&starting.await.unwrap(), "a").await, Some(1));
}

/// A service that waits for its first rules can be stopped.
#[tokio::test]
async fn a_waiting_service_can_be_stopped() {
    let plane = ControlPlane::start();
    let mut command = command();
    command.args(["--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0"]);
    command.env("SLUICEGATE__RULES__XDS__SERVER", format!("http://{}", plane.address()));
    let mut child = command.spawn().unwrap();
    plane.wait_for_request("the first request", |_| true).await;
    crate::support::server::signal(child.id(), "TERM");
    let ended = wait_for_async("the service to exit", async || child.try_wait().unwrap()).await;
    assert!(ended.success());
}

#[tokio::test]
async fn requests_contain_the_configured_node_and_headers() {
    let mut plane = ControlPlane::start_at("127.0.0.1:0", "me", None);
    let file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
    let text = "[rules.xds]\nnode_id = 'me'\nnode_metadata = ['zone=a', 'owner=b=c']\nheaders = ['x-key=s e=cret']\n";
    fs::write(&file, text).unwrap();
    let server = server_of(plane.address()).args(["--config".as_ref(), file.path().as_os_str()]).start();
    let first = plane.wait_for_request("the first request", |_| true).await;
    assert_eq!((&first["node"], &first["metadata"]), (&"me".into(), &serde_json::json!({"zone": "a", "owner": "b=c"})));
    assert_eq!(plane.events("open")[0]["headers"]["x-key"], serde_json::json!(["s e=cret"]));
    plane.set("1", &[config("a", 1)]);
    wait_for_limit(&server, "a", Some(1)).await;
}

/// A message above the maximum ends the stream and changes nothing. A smaller one is accepted.
#[tokio::test]
async fn a_message_that_is_too_large_is_rejected() {
    let mut plane = ControlPlane::start();
    let server = server_of(plane.address()).set("rules.xds.max_message_bytes", "2000").start();
    plane.set("1", &[config("a", 1)]);
    wait_for_limit(&server, "a", Some(1)).await;
    let many: Vec<_> = (0..100).map(|number| config(&format!("domain-{number}"), 1)).collect();
    plane.set("2", &many);
    wait_for_async("the error to be logged", async || {
        server.log().contains("decoded message length too large").then_some(())
    })
    .await;
    assert_eq!(limit(&server, "a").await, Some(1));
    plane.set("3", &[config("a", 3)]);
    wait_for_limit(&server, "a", Some(3)).await;
}

/// Promoted rules take precedence. Rules that the control plane sends in the meantime are in force after a rollback.
#[tokio::test]
async fn promoted_rules_take_precedence() {
    let mut plane = ControlPlane::start();
    let operator = Operator::with(server_of(plane.address()));
    let server = &operator.server;
    plane.set("1", &[config("a", 1)]);
    wait_for_limit(server, "a", Some(1)).await;
    let text = "domain: a\ndescriptors: [{key: k, rate_limit: {unit: year, requests_per_unit: 50}}]\n";
    let folder = rules(&[("a.yaml", text)]);
    operator.ctl(&["candidate", "upload", folder.path().to_str().unwrap()]);
    operator.ctl(&["candidate", "promote"]);
    wait_for_limit(server, "a", Some(50)).await;
    plane.set("bad", &[invalid("a")]);
    plane.wait_for_request("the first to be rejected", |request| request["error"] != "").await;
    assert!(server.get("/rlconfig").contains("# last error"));
    plane.set("2", &[config("a", 2)]);
    plane.wait_for_request("the second to be accepted", |request| request["version"] == "2").await;
    assert!(!server.get("/rlconfig").contains("# last error"));
    assert_eq!(limit(server, "a").await, Some(50));
    operator.ctl(&["candidate", "rollback"]);
    wait_for_limit(server, "a", Some(2)).await;
}

/// The control plane accepts connections and sends nothing.
#[tokio::test]
async fn a_handshake_has_a_timeout() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("https://{}", silent.local_addr().unwrap());
    let server = server_of("unused").set("rules.xds.server", &address).set("rules.xds.connect_timeout", "50ms").start();
    wait_for_async("the error to be logged", async || server.log().contains("no connection within 50ms").then_some(()))
        .await;
    // The service retries, and one line in the log covers all attempts.
    wait_for_async("more attempts", async || {
        (server.metric("sluicegate_xds_connection_attempts_total") > 3.0).then_some(())
    })
    .await;
    assert_eq!(server.log().matches("control plane unavailable").count(), 1, "{}", server.log());
}

#[tokio::test]
async fn health_can_depend_on_rules() {
    let mut plane = ControlPlane::start();
    let server = server_of(plane.address()).set("rules.required_for_health", "true").start();
    let endpoint = Endpoint::from_shared(format!("http://{}", server.grpc)).unwrap();
    let mut health = HealthClient::new(endpoint.connect().await.unwrap());
    let mut wait_for_health = async |code: u16, status: ServingStatus| {
        wait_for_async("health to change", async || (get(&server.url("/healthcheck")).0 == code).then_some(())).await;
        wait_for_async("health over gRPC to change", async || {
            let response = health.check(HealthCheckRequest { service: "ratelimit".into() }).await.unwrap().into_inner();
            (response.status() == status).then_some(())
        })
        .await;
    };
    wait_for_health(500, ServingStatus::NotServing).await;
    plane.set("1", &[config("a", 1)]);
    wait_for_health(200, ServingStatus::Serving).await;
    // A rejected snapshot changes nothing.
    plane.set("2", &[invalid("a")]);
    plane.wait_for_request("the second to be rejected", |request| request["error"] != "").await;
    wait_for_health(200, ServingStatus::Serving).await;
    plane.set("3", &[]);
    wait_for_health(500, ServingStatus::NotServing).await;
}

/// Of many snapshots in quick succession, the last is in force in the end.
#[tokio::test]
async fn the_last_of_many_snapshots_wins() {
    let mut plane = ControlPlane::start();
    let server = server_of(plane.address()).start();
    for number in 1..=200 {
        let is_invalid = number % 7 == 0;
        plane.set(&number.to_string(), &[if is_invalid { invalid("a") } else { config("a", number) }]);
    }
    wait_for_limit(&server, "a", Some(200)).await;
}

#[tokio::test]
async fn the_delta_protocol_applies_changes() {
    let mut plane = ControlPlane::start();
    let address = plane.address().to_owned();
    let server = server_of(&address).set("rules.xds.protocol", "delta").start();
    let first = plane.wait_for_request("the first request", |_| true).await;
    assert_eq!((&first["type"], &first["node"]), (&TYPE.into(), &"default".into()));
    plane.set("1", &[config("a", 1), config("b", 1), config("c", 1)]);
    wait_for_limit(&server, "c", Some(1)).await;
    plane.set("2", &[config("a", 1), config("b", 2)]);
    wait_for_limit(&server, "b", Some(2)).await;
    assert_eq!((limit(&server, "a").await, limit(&server, "c").await), (Some(1), None));
    plane.set("3", &[config("a", 1), invalid("b")]);
    let rejected = plane.wait_for_request("the third to be rejected", |request| request["error"] != "").await;
    assert!(rejected["error"].as_str().unwrap().starts_with("b, k: unit \"UNKNOWN\""), "{rejected}");
    assert!(rejected["type"] == TYPE && rejected["nonce"] != "", "{rejected}");
    assert_eq!((limit(&server, "a").await, limit(&server, "b").await), (Some(1), Some(2)));
    plane.set("4", &[config("a", 4), config("b", 2)]);
    wait_for_limit(&server, "a", Some(4)).await;

    // A restarted control plane does not list the resources that it no longer has.
    drop(plane);
    let mut plane = ControlPlane::start_at(&address, "default", None);
    plane.wait_for_request("the next request", |_| true).await;
    assert_eq!((limit(&server, "a").await, limit(&server, "b").await), (Some(4), Some(2)));
    plane.set("1", &[config("b", 3)]);
    wait_for_limit(&server, "b", Some(3)).await;
    wait_for_limit(&server, "a", None).await;
    assert_eq!(limit(&server, "b").await, Some(3));
    drop(plane);
    let mut plane = ControlPlane::start_at(&address, "default", None);
    plane.set("1", &[]);
    wait_for_limit(&server, "b", None).await;
}

/// Keywords without a field in envoyproxy/ratelimit's message are sent in the descriptor's metadata and in a separate
/// field.
#[tokio::test]
async fn a_control_plane_can_send_every_keyword_of_rule_files() {
    let text = |text: &str| Value { kind: Some(Kind::StringValue(text.into())) };
    let number = |number: f64| Value { kind: Some(Kind::NumberValue(number)) };
    let map = |pairs: Vec<(&str, Value)>| Struct {
        fields: pairs.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
    };
    let nested = |fields: Struct| Value { kind: Some(Kind::StructValue(fields)) };
    let bucket = map(vec![("algorithm", text("token_bucket")), ("burst", number(2.0))]);
    let mut config = limited("a", policy(Unit::Hour, 60));
    config.sluicegate = Some(map(vec![("charge", text("all"))]));
    let metadata = map(vec![("sluicegate", nested(map(vec![("rate_limit", nested(bucket))])))]);
    config.descriptors[0].metadata = Some(metadata);
    let mut plane = ControlPlane::start();
    let server = server_of(plane.address()).start();
    plane.set("1", &[config]);
    wait_for_limit(&server, "a", Some(60)).await;
    assert!(server.get("/rlconfig").contains("a.k: unit=HOUR algorithm=token_bucket requests_per_unit=60"));
    let client = server.client().await;
    let mut passed = 0;
    while client.check(request_for("a", &[("k", "other")])).await.unwrap().allowed() {
        passed += 1;
    }
    assert_eq!(passed, 2);
}

/// The service is started as by Envoy Gateway, except for the ports: by environment variables alone, and with
/// certificates on both sides that are replaced later.
#[tokio::test]
async fn the_environment_of_envoy_gateway_is_sufficient() {
    let (first, second) = (Authority::new("first"), Authority::new("second"));
    let (service_files, plane_files) = (Files::new(), Files::new());
    let write = |authority: &Authority| {
        for (files, name) in [(&service_files, "envoy-ratelimit"), (&plane_files, "envoy-gateway")] {
            let (certificate, key) = authority.sign_for(&[name]);
            files.write("tls.crt", &certificate);
            files.write("tls.key", &key);
            files.write("ca.crt", &authority.pem);
        }
    };
    write(&first);
    let (cert, key, ca) = (plane_files.path("tls.crt"), plane_files.path("tls.key"), plane_files.path("ca.crt"));
    let certificates = Certificates { cert: &cert, key: &key, ca: &ca };
    // The address and the certificate have different names.
    let mut plane = ControlPlane::start_at("127.0.0.1:0", "envoy-ratelimit", Some(&certificates));
    let port = plane.address().rsplit_once(':').unwrap().1.to_owned();
    let link = service_files.path("ratelimit");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_sluicegate"), &link).unwrap();
    let mut command = Command::new(link);
    command.env_clear().envs([
        ("RUNTIME_ROOT", "/data"),
        ("RUNTIME_SUBDIRECTORY", "ratelimit"),
        ("RUNTIME_IGNOREDOTFILES", "true"),
        ("RUNTIME_WATCH_ROOT", "false"),
        ("LOG_LEVEL", "info"),
        ("USE_STATSD", "false"),
        ("CONFIG_TYPE", "GRPC_XDS_SOTW"),
        ("CONFIG_GRPC_XDS_SERVER_URL", &format!("localhost:{port}")),
        ("CONFIG_GRPC_XDS_NODE_ID", "envoy-ratelimit"),
        ("GRPC_SERVER_USE_TLS", "true"),
        ("GRPC_SERVER_TLS_CERT", service_files.path("tls.crt").to_str().unwrap()),
        ("GRPC_SERVER_TLS_KEY", service_files.path("tls.key").to_str().unwrap()),
        ("GRPC_SERVER_TLS_CA_CERT", service_files.path("ca.crt").to_str().unwrap()),
        ("CONFIG_GRPC_XDS_SERVER_USE_TLS", "true"),
        ("CONFIG_GRPC_XDS_CLIENT_TLS_CERT", service_files.path("tls.crt").to_str().unwrap()),
        ("CONFIG_GRPC_XDS_CLIENT_TLS_KEY", service_files.path("tls.key").to_str().unwrap()),
        ("CONFIG_GRPC_XDS_SERVER_TLS_CACERT", service_files.path("ca.crt").to_str().unwrap()),
        ("CONFIG_GRPC_XDS_SERVER_TLS_SAN", "envoy-gateway"),
        ("FORCE_START_WITHOUT_INITIAL_CONFIG", "true"),
        ("REDIS_SOCKET_TYPE", "tcp"),
        ("REDIS_URL", "127.0.0.1:1"),
        ("USE_PROMETHEUS", "true"),
        ("PROMETHEUS_ADDR", "127.0.0.1:0"),
        ("PROMETHEUS_MAPPER_YAML", "/etc/statsd-exporter/conf.yaml"),
        ("HOST", "127.0.0.1"),
        ("PORT", "0"),
        ("GRPC_PORT", "0"),
        ("DEBUG_PORT", "0"),
        ("XDS_CLIENT_BACKOFF_INITIAL_INTERVAL", "10ms"),
        ("XDS_CLIENT_BACKOFF_MAX_INTERVAL", "50ms"),
    ]);
    let server = Server::from_command(command).start();
    assert_eq!(server.get("/healthcheck"), "OK");
    let in_force = async |limit: u32| {
        let line = format!("first-listener.k: unit=YEAR requests_per_unit={limit},");
        wait_for_async("the rules to be in force", async || server.get("/rlconfig").contains(&line).then_some(()))
            .await;
    };
    plane.set("1", &[config("first-listener", 1)]);
    in_force(1).await;
    // All certificates are replaced by another authority's, and the control plane restarts with the same version.
    write(&second);
    drop(plane);
    let mut plane = ControlPlane::start_at(&format!("127.0.0.1:{port}"), "envoy-ratelimit", Some(&certificates));
    plane.set("1", &[config("first-listener", 2)]);
    in_force(2).await;
    // A certificate of another authority is not trusted.
    let stranger = Authority::new("stranger");
    service_files.write("ca.crt", &stranger.pem);
    drop(plane);
    let plane = ControlPlane::start_at(&format!("127.0.0.1:{port}"), "envoy-ratelimit", Some(&certificates));
    wait_for_async("the error to be logged", async || server.log().contains("invalid peer certificate").then_some(()))
        .await;
    assert_eq!(plane.events("open").len(), 0);
    in_force(2).await;
}

/// Builds 100,000 limits as Envoy Gateway would send them: routes with 10 rules each.
fn many(limit: u32) -> RateLimitConfig {
    let rule = |number: u32| RateLimitDescriptor {
        key: format!("rule-{number}-match-0"),
        value: format!("rule-{number}-match-0"),
        rate_limit: Some(policy(Unit::Minute, limit)),
        ..RateLimitDescriptor::default()
    };
    let route = |number: u32| {
        let name = format!("httproute/default/httproute-{number}/rule/0/match/0/example_com");
        let descriptors = (0..10).map(rule).collect();
        RateLimitDescriptor { key: name.clone(), value: name, descriptors, ..RateLimitDescriptor::default() }
    };
    RateLimitConfig { descriptors: (0..10_000).map(route).collect(), ..config("gateway", 1) }
}

/// The bound also holds after all limits have been replaced.
#[tokio::test]
async fn a_hundred_thousand_limits_take_a_kilobyte_each() {
    let mut plane = ControlPlane::start();
    let server = server_of(plane.address()).start();
    plane.set("small", &[config("a", 1)]);
    wait_for_limit(&server, "a", Some(1)).await;
    let before = server.resident_memory();
    let route = "httproute/default/httproute-9999/rule/0/match/0/example_com";
    let client = server.client().await;
    for limit in [5, 6] {
        plane.set(&limit.to_string(), &[many(limit)]);
        wait_for_async("the limits to be in force", async || {
            let request = request_for("gateway", &[(route, route), ("rule-9-match-0", "rule-9-match-0")]);
            let answer = client.check(request).await.unwrap();
            (answer.0.statuses[0].current_limit.as_ref()?.requests_per_unit == limit).then_some(())
        })
        .await;
        wait_for_async("the memory used for loading to be released", async || {
            (server.resident_memory() < before + 100_000 * 1_024).then_some(())
        })
        .await;
    }
}
