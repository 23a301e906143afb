//! Rules by xDS, from a control plane on go-control-plane: what it sends is in force, what cannot be used is refused with a
//! sentence, and what is there stays while it is away.

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

/// `k` of the domain may come so often a year.
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

/// What cannot be used: a limit without a unit.
fn bad(domain: &str) -> RateLimitConfig {
    limited(domain, policy(Unit::Unknown, 1))
}

fn served_by(address: &str) -> Builder {
    Server::builder()
        .set("rules.xds.server", &format!("http://{address}"))
        .set("rules.xds.start_without_rules", "true")
        .set("rules.xds.retry_min", "10ms")
        .set("rules.xds.retry_max", "50ms")
}

/// The limit in force; `None`: there is no such domain, or no rules at all.
async fn limit(server: &Server, domain: &str) -> Option<u32> {
    let answer = server.client().await.check(request_for(domain, &[("k", "v")])).await.ok()?;
    answer.0.statuses[0].current_limit.as_ref().map(|limit| limit.requests_per_unit)
}

async fn until_limit(server: &Server, domain: &str, expected: Option<u32>) {
    let what = format!("{domain} to have the limit {expected:?}");
    wait_for_async(&what, async || (limit(server, domain).await == expected).then_some(())).await;
}

#[tokio::test]
async fn snapshots_are_taken_or_refused_whatever_their_versions() {
    let mut plane = ControlPlane::start();
    let server = served_by(plane.address()).start();
    let first = plane.wait_for_request("the first request", |_| true).await;
    assert_eq!(
        (&first["type"], &first["node"], &first["version"], &first["nonce"], &first["names"]),
        (&TYPE.into(), &"default".into(), &"".into(), &"".into(), &serde_json::Value::Null)
    );
    // There is a connection, and nothing has come.
    let error = server.client().await.check(request_for("a", &[("k", "v")])).await.unwrap_err();
    assert_eq!(error.code(), Some(Code::Unavailable));
    assert!(error.to_string().contains("no rate limit configuration loaded"), "{error}");
    assert!(server.get("/rlconfig").starts_with("# no rules loaded yet\n"));
    assert_eq!(server.metric("sluicegate_xds_connected"), 1.0);

    plane.set("one", &[config("a", 1), config("b", 2)]);
    until_limit(&server, "a", Some(1)).await;
    assert_eq!(limit(&server, "b").await, Some(2));
    let taken = plane.wait_for_request("the first to be taken", |request| request["version"] == "one").await;
    assert!(taken["nonce"] != "" && taken["error"] == "", "{taken}");

    // Which comes in any order, again and again.
    let others = ["c", "d", "e", "f", "g"].map(|domain| config(domain, 5));
    plane.set("two", &[&[config("a", 5), bad("b")], &others[..]].concat());
    let refused = plane.wait_for_request("the second to be refused", |request| request["error"] != "").await;
    assert_eq!(refused["version"], "one");
    let sentence = "b, k: unit \"UNKNOWN\" is not one of second, minute, hour, day, week, month, year";
    assert_eq!(refused["error"], sentence);
    assert!(server.get("/rlconfig").contains(&format!("# last error: {sentence}\n")));
    assert_eq!((limit(&server, "a").await, limit(&server, "b").await), (Some(1), Some(2)));

    // Two resources with one domain are one too many, as with files.
    plane.set("three", &[config("a", 5), RateLimitConfig { name: "other".into(), ..config("a", 6) }]);
    plane
        .wait_for_request("the third to be refused", |request| {
            request["error"].as_str().is_some_and(|error| error.contains("domain \"a\" is already defined in a"))
        })
        .await;

    // What was in force is good again, and there is nothing to complain about any more.
    plane.set("four", &[config("b", 2), config("a", 1)]);
    plane.wait_for_request("the fourth to be taken", |request| request["version"] == "four").await;
    assert!(!server.get("/rlconfig").contains("last error"));

    // No version is newer than another.
    for (version, limit) in [("-7", 3), ("one", 4), ("", 5), ("1", 6)] {
        plane.set(version, &[config("a", limit)]);
        until_limit(&server, "a", Some(limit)).await;
    }
    assert_eq!(limit(&server, "b").await, None);
    plane.set("none", &[]);
    until_limit(&server, "a", None).await;
    // That is a state as well: nothing is limited, and nothing fails.
    assert!(server.client().await.check(request_for("a", &[("k", "v")])).await.unwrap().allowed());
    assert_eq!(server.metric("sluicegate_xds_updates_rejected_total"), 2.0);
    assert_eq!(server.metric("ratelimit_service_config_load_error"), 2.0);
    assert_eq!(server.metric("ratelimit_service_config_load_success"), 7.0);
}

/// A control plane that begins anew counts from 1 again, and what it has may be another state under the same version.
#[tokio::test]
async fn a_control_plane_dies_and_comes_back() {
    let mut plane = ControlPlane::start();
    let address = plane.address().to_owned();
    let server = served_by(&address).start();
    for life in 1..=3 {
        plane.set("1", &[config("a", life)]);
        until_limit(&server, "a", Some(life)).await;
        drop(plane);
        wait_for_async("the loss to be noticed", async || {
            (server.metric("sluicegate_xds_connected") == 0.0).then_some(())
        })
        .await;
        assert_eq!(limit(&server, "a").await, Some(life));
        plane = ControlPlane::start_at(&address, "default", None);
        // Connected, and not told anything yet: the rules stay.
        plane.wait_for_request("the next request", |request| request["version"] == "").await;
        assert_eq!(limit(&server, "a").await, Some(life));
    }
    // What has not changed is not loaded again.
    let loads = server.metric("ratelimit_service_config_load_success");
    plane.set("1", &[config("a", 3)]);
    plane.wait_for_request("it to be taken", |request| request["version"] == "1").await;
    assert_eq!(server.metric("ratelimit_service_config_load_success"), loads);
    let log = server.log();
    let lines = |text: &str| log.lines().filter(|line| line.contains(text)).count();
    // That the stream has ended, and that nobody listens then.
    assert!((3..=6).contains(&lines("control plane unavailable")), "{log}");
    assert_eq!(lines("receiving rules from the control plane"), 4, "{log}");
}

#[tokio::test]
async fn it_waits_for_the_first_rules_unless_it_is_told_not_to() {
    let mut plane = ControlPlane::start();
    let builder = served_by(plane.address()).set("rules.xds.start_without_rules", "false");
    let starting = tokio::task::spawn_blocking(move || builder.start());
    plane.wait_for_request("the first request", |_| true).await;
    plane.set("bad", &[bad("a")]);
    plane.wait_for_request("the first rules to be refused", |request| request["error"] != "").await;
    assert!(!starting.is_finished());
    plane.set("good", &[config("a", 1)]);
    assert_eq!(limit(&starting.await.unwrap(), "a").await, Some(1));
}

/// Whoever waits can be told to stop.
#[tokio::test]
async fn it_ends_while_it_waits() {
    let plane = ControlPlane::start();
    let mut command = command();
    command.args(["--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0"]);
    command.env("SLUICEGATE__RULES__XDS__SERVER", format!("http://{}", plane.address()));
    let mut child = command.spawn().unwrap();
    plane.wait_for_request("the first request", |_| true).await;
    crate::support::server::signal(child.id(), "TERM");
    let ended = wait_for_async("the end", async || child.try_wait().unwrap()).await;
    assert!(ended.success());
}

#[tokio::test]
async fn it_says_who_asks() {
    let mut plane = ControlPlane::start_at("127.0.0.1:0", "me", None);
    let file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
    let text = "[rules.xds]\nnode_id = 'me'\nnode_metadata = ['zone=a', 'owner=b=c']\nheaders = ['x-key=s e=cret']\n";
    fs::write(&file, text).unwrap();
    let server = served_by(plane.address()).args(["--config".as_ref(), file.path().as_os_str()]).start();
    let first = plane.wait_for_request("the first request", |_| true).await;
    assert_eq!((&first["node"], &first["metadata"]), (&"me".into(), &serde_json::json!({"zone": "a", "owner": "b=c"})));
    assert_eq!(plane.events("open")[0]["headers"]["x-key"], serde_json::json!(["s e=cret"]));
    plane.set("1", &[config("a", 1)]);
    until_limit(&server, "a", Some(1)).await;
}

/// A message above what is taken ends the stream, and harms nothing; a smaller one is taken.
#[tokio::test]
async fn a_message_that_is_too_large_is_not_taken() {
    let mut plane = ControlPlane::start();
    let server = served_by(plane.address()).set("rules.xds.max_message_bytes", "2000").start();
    plane.set("1", &[config("a", 1)]);
    until_limit(&server, "a", Some(1)).await;
    let many: Vec<_> = (0..100).map(|number| config(&format!("domain-{number}"), 1)).collect();
    plane.set("2", &many);
    wait_for_async("the complaint", async || server.log().contains("decoded message length too large").then_some(()))
        .await;
    assert_eq!(limit(&server, "a").await, Some(1));
    plane.set("3", &[config("a", 3)]);
    until_limit(&server, "a", Some(3)).await;
}

/// What an operator has promoted goes first; what the control plane sends meanwhile is in force afterwards.
#[tokio::test]
async fn what_is_promoted_goes_first() {
    let mut plane = ControlPlane::start();
    let operator = Operator::with(served_by(plane.address()));
    let server = &operator.server;
    plane.set("1", &[config("a", 1)]);
    until_limit(server, "a", Some(1)).await;
    let text = "domain: a\ndescriptors: [{key: k, rate_limit: {unit: year, requests_per_unit: 50}}]\n";
    let folder = rules(&[("a.yaml", text)]);
    operator.ctl(&["candidate", "upload", folder.path().to_str().unwrap()]);
    operator.ctl(&["candidate", "promote"]);
    until_limit(server, "a", Some(50)).await;
    plane.set("bad", &[bad("a")]);
    plane.wait_for_request("the first to be refused", |request| request["error"] != "").await;
    assert!(server.get("/rlconfig").contains("# last error"));
    plane.set("2", &[config("a", 2)]);
    plane.wait_for_request("the second to be taken", |request| request["version"] == "2").await;
    assert!(!server.get("/rlconfig").contains("# last error"));
    assert_eq!(limit(server, "a").await, Some(50));
    operator.ctl(&["candidate", "rollback"]);
    until_limit(server, "a", Some(2)).await;
}

/// A server that takes connections and says nothing.
#[tokio::test]
async fn a_handshake_has_its_time() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("https://{}", silent.local_addr().unwrap());
    let server = served_by("unused").set("rules.xds.server", &address).set("rules.xds.connect_timeout", "50ms").start();
    wait_for_async("the complaint", async || server.log().contains("no connection within 50ms").then_some(())).await;
    // Again and again, and one line for all.
    wait_for_async("more attempts", async || {
        (server.metric("sluicegate_xds_connection_attempts_total") > 3.0).then_some(())
    })
    .await;
    assert_eq!(server.log().matches("control plane unavailable").count(), 1, "{}", server.log());
}

#[tokio::test]
async fn health_can_depend_on_rules() {
    let mut plane = ControlPlane::start();
    let server = served_by(plane.address()).set("rules.required_for_health", "true").start();
    let endpoint = Endpoint::from_shared(format!("http://{}", server.grpc)).unwrap();
    let mut health = HealthClient::new(endpoint.connect().await.unwrap());
    let mut says = async |code: u16, status: ServingStatus| {
        wait_for_async("health to change", async || (get(&server.url("/healthcheck")).0 == code).then_some(())).await;
        wait_for_async("health over gRPC to change", async || {
            let told = health.check(HealthCheckRequest { service: "ratelimit".into() }).await.unwrap().into_inner();
            (told.status() == status).then_some(())
        })
        .await;
    };
    says(500, ServingStatus::NotServing).await;
    plane.set("1", &[config("a", 1)]);
    says(200, ServingStatus::Serving).await;
    // What is refused changes nothing.
    plane.set("2", &[bad("a")]);
    plane.wait_for_request("the second to be refused", |request| request["error"] != "").await;
    says(200, ServingStatus::Serving).await;
    plane.set("3", &[]);
    says(500, ServingStatus::NotServing).await;
}

/// States that follow each other at once: the last is in force in the end.
#[tokio::test]
async fn the_last_of_many_snapshots_wins() {
    let mut plane = ControlPlane::start();
    let server = served_by(plane.address()).start();
    for number in 1..=200 {
        let broken = number % 7 == 0;
        plane.set(&number.to_string(), &[if broken { bad("a") } else { config("a", number) }]);
    }
    until_limit(&server, "a", Some(200)).await;
}

#[tokio::test]
async fn changes_alone_are_enough() {
    let mut plane = ControlPlane::start();
    let address = plane.address().to_owned();
    let server = served_by(&address).set("rules.xds.protocol", "delta").start();
    let first = plane.wait_for_request("the first request", |_| true).await;
    assert_eq!((&first["type"], &first["node"]), (&TYPE.into(), &"default".into()));
    plane.set("1", &[config("a", 1), config("b", 1), config("c", 1)]);
    until_limit(&server, "c", Some(1)).await;
    plane.set("2", &[config("a", 1), config("b", 2)]);
    until_limit(&server, "b", Some(2)).await;
    assert_eq!((limit(&server, "a").await, limit(&server, "c").await), (Some(1), None));
    plane.set("3", &[config("a", 1), bad("b")]);
    let refused = plane.wait_for_request("the third to be refused", |request| request["error"] != "").await;
    assert!(refused["error"].as_str().unwrap().starts_with("b, k: unit \"UNKNOWN\""), "{refused}");
    assert_eq!((limit(&server, "a").await, limit(&server, "b").await), (Some(1), Some(2)));
    plane.set("4", &[config("a", 4), config("b", 2)]);
    until_limit(&server, "a", Some(4)).await;

    // What is gone when the control plane comes back is not named by anybody.
    drop(plane);
    let mut plane = ControlPlane::start_at(&address, "default", None);
    plane.wait_for_request("the next request", |_| true).await;
    assert_eq!((limit(&server, "a").await, limit(&server, "b").await), (Some(4), Some(2)));
    plane.set("1", &[config("b", 3)]);
    until_limit(&server, "b", Some(3)).await;
    until_limit(&server, "a", None).await;
    assert_eq!(limit(&server, "b").await, Some(3));
    drop(plane);
    let mut plane = ControlPlane::start_at(&address, "default", None);
    plane.set("1", &[]);
    until_limit(&server, "b", None).await;
}

/// Words that the peer's message has not: in the descriptor's metadata, and in a field of our own.
#[tokio::test]
async fn a_control_plane_can_say_all_that_files_can() {
    let text = |text: &str| Value { kind: Some(Kind::StringValue(text.into())) };
    let number = |number: f64| Value { kind: Some(Kind::NumberValue(number)) };
    let map = |pairs: Vec<(&str, Value)>| Struct {
        fields: pairs.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
    };
    let nested = |fields: Struct| Value { kind: Some(Kind::StructValue(fields)) };
    let bucket = map(vec![("algorithm", text("token_bucket")), ("burst", number(2.0))]);
    let mut config = limited("a", policy(Unit::Hour, 60));
    config.sluicegate = Some(map(vec![("charge", text("all"))]));
    let ours = map(vec![("sluicegate", nested(map(vec![("rate_limit", nested(bucket))])))]);
    config.descriptors[0].metadata = Some(ours);
    let mut plane = ControlPlane::start();
    let server = served_by(plane.address()).start();
    plane.set("1", &[config]);
    until_limit(&server, "a", Some(60)).await;
    assert!(server.get("/rlconfig").contains("a.k: unit=HOUR algorithm=token_bucket requests_per_unit=60"));
    let client = server.client().await;
    let mut passed = 0;
    while client.check(request_for("a", &[("k", "other")])).await.unwrap().allowed() {
        passed += 1;
    }
    assert_eq!(passed, 2);
}

/// As Envoy Gateway starts it, but for the ports: by environment alone, with certificates on both sides, of which there are
/// new ones later.
#[tokio::test]
async fn envoy_gateways_environment_is_enough() {
    let (first, second) = (Authority::new("first"), Authority::new("second"));
    let (own, theirs) = (Files::new(), Files::new());
    let write = |authority: &Authority| {
        for (files, name) in [(&own, "envoy-ratelimit"), (&theirs, "envoy-gateway")] {
            let (certificate, key) = authority.sign_for(&[name]);
            files.write("tls.crt", &certificate);
            files.write("tls.key", &key);
            files.write("ca.crt", &authority.pem);
        }
    };
    write(&first);
    let (cert, key, ca) = (theirs.path("tls.crt"), theirs.path("tls.key"), theirs.path("ca.crt"));
    let certificates = Certificates { cert: &cert, key: &key, ca: &ca };
    // The address has another name than the certificate.
    let mut plane = ControlPlane::start_at("127.0.0.1:0", "envoy-ratelimit", Some(&certificates));
    let port = plane.address().rsplit_once(':').unwrap().1.to_owned();
    let link = own.path("ratelimit");
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
        ("GRPC_SERVER_TLS_CERT", own.path("tls.crt").to_str().unwrap()),
        ("GRPC_SERVER_TLS_KEY", own.path("tls.key").to_str().unwrap()),
        ("GRPC_SERVER_TLS_CA_CERT", own.path("ca.crt").to_str().unwrap()),
        ("CONFIG_GRPC_XDS_SERVER_USE_TLS", "true"),
        ("CONFIG_GRPC_XDS_CLIENT_TLS_CERT", own.path("tls.crt").to_str().unwrap()),
        ("CONFIG_GRPC_XDS_CLIENT_TLS_KEY", own.path("tls.key").to_str().unwrap()),
        ("CONFIG_GRPC_XDS_SERVER_TLS_CACERT", own.path("ca.crt").to_str().unwrap()),
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
        wait_for_async("the rules", async || server.get("/rlconfig").contains(&line).then_some(())).await;
    };
    plane.set("1", &[config("first-listener", 1)]);
    in_force(1).await;
    // All certificates are another authority's; the control plane is started anew and has the same version.
    write(&second);
    drop(plane);
    let mut plane = ControlPlane::start_at(&format!("127.0.0.1:{port}"), "envoy-ratelimit", Some(&certificates));
    plane.set("1", &[config("first-listener", 2)]);
    in_force(2).await;
    // Whoever has another authority's certificate is nobody.
    let stranger = Authority::new("stranger");
    own.write("ca.crt", &stranger.pem);
    drop(plane);
    let plane = ControlPlane::start_at(&format!("127.0.0.1:{port}"), "envoy-ratelimit", Some(&certificates));
    wait_for_async("the complaint", async || server.log().contains("invalid peer certificate").then_some(())).await;
    assert_eq!(plane.events("open").len(), 0);
    in_force(2).await;
}

/// 100,000 limits as Envoy Gateway would send them: routes, each with rules.
fn many(changed: u32) -> RateLimitConfig {
    let rule = |number: u32| RateLimitDescriptor {
        key: format!("rule-{number}-match-0"),
        value: format!("rule-{number}-match-0"),
        rate_limit: Some(policy(Unit::Minute, changed)),
        ..RateLimitDescriptor::default()
    };
    let route = |number: u32| {
        let name = format!("httproute/default/httproute-{number}/rule/0/match/0/example_com");
        let descriptors = (0..10).map(rule).collect();
        RateLimitDescriptor { key: name.clone(), value: name, descriptors, ..RateLimitDescriptor::default() }
    };
    RateLimitConfig { descriptors: (0..10_000).map(route).collect(), ..config("gateway", 1) }
}

/// Also when they have taken the place of as many.
#[tokio::test]
async fn a_hundred_thousand_limits_take_a_kilobyte_each() {
    let mut plane = ControlPlane::start();
    let server = served_by(plane.address()).start();
    plane.set("small", &[config("a", 1)]);
    until_limit(&server, "a", Some(1)).await;
    let before = server.resident_memory();
    let route = "httproute/default/httproute-9999/rule/0/match/0/example_com";
    let client = server.client().await;
    for limit in [5, 6] {
        plane.set(&limit.to_string(), &[many(limit)]);
        wait_for_async("the limits to be in force", async || {
            let question = request_for("gateway", &[(route, route), ("rule-9-match-0", "rule-9-match-0")]);
            let answer = client.check(question).await.unwrap();
            (answer.0.statuses[0].current_limit.as_ref()?.requests_per_unit == limit).then_some(())
        })
        .await;
        wait_for_async("the memory to be given back that they took to be made", async || {
            (server.resident_memory() < before + 100_000 * 1_024).then_some(())
        })
        .await;
    }
}
