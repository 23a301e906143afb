//! Envoy Gateway, tested without a cluster. A real control plane sends every rule set that the tests of its translator
//! expect, and a real Envoy has the configuration that it generates.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;

use crate::{
    support::{
        Server,
        control_plane::ControlPlane,
        descriptor,
        envoy::Envoy,
        raw_client::Request,
        repository, request_for,
        server::{Builder, command},
        wait_for_async,
    },
    wire::envoy::upstream,
};

/// Returns a builder for a service with rules from this control plane.
fn builder(plane: &ControlPlane) -> Builder {
    Server::builder()
        .set("rules.xds.server", &format!("http://{}", plane.address()))
        .set("rules.xds.start_without_rules", "true")
}

/// Waits until the service has accepted this version of the rules.
async fn wait_until_accepted(plane: &ControlPlane, version: &str) {
    let is_answer = |request: &Value| request["version"] == version || request["error"] != "";
    let request = plane.wait_for_request("an ACK or NACK", is_answer).await;
    assert_eq!((&request["version"], &request["error"]), (&version.into(), &"".into()));
}

/// Collects all limits in these rules, each with the entries of a descriptor that matches it.
fn collect_limits(rules: &Value, parents: &[(String, String)], limits: &mut Vec<(Vec<(String, String)>, Value)>) {
    for descriptor in rules.as_array().into_iter().flatten() {
        let text = |name: &str| descriptor[name].as_str().unwrap_or_default().to_owned();
        let value = match text("value") {
            value if value.is_empty() => "anything".to_owned(),
            value => value,
        };
        let entries = [parents, &[(text("key"), value)]].concat();
        if !descriptor["rate_limit"].is_null() {
            limits.push((entries.clone(), descriptor["rate_limit"].clone()));
        }
        collect_limits(&descriptor["descriptors"], &entries, limits);
    }
}

#[tokio::test]
async fn rules_of_its_translator_are_enforced() {
    let folder = repository("target/test-tools/gateway/internal/xds/translator/testdata/out/ratelimit-config");
    let files = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{error}: run tests/setup.sh"));
    let mut files: Vec<PathBuf> = files.map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| !path.to_str().unwrap().ends_with(".routes.yaml"));
    assert!(files.len() > 20, "{files:?}");
    let mut plane = ControlPlane::start();
    let server = builder(&plane).start();
    let client = server.client().await;
    let mut limits = 0;
    for file in files {
        let version = file.file_name().unwrap().to_str().unwrap();
        let configs = plane.set_files(version, std::slice::from_ref(&file));
        wait_until_accepted(&plane, version).await;
        for config in configs {
            let mut expected_limits = Vec::new();
            collect_limits(&config["descriptors"], &[], &mut expected_limits);
            for (entries, expected) in expected_limits {
                let entries: Vec<_> = entries.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
                let answer = client.check(request_for(config["domain"].as_str().unwrap(), &entries)).await.unwrap();
                let limit = answer.0.statuses[0].current_limit.clone().unwrap();
                let got = (limit.requests_per_unit, limit.unit().as_str_name());
                let (requests, unit) = (&expected["requests_per_unit"], expected["unit"].as_str().unwrap());
                assert_eq!(got, (requests.as_u64().unwrap() as u32, unit), "{}: {entries:?}", file.display());
                limits += 1;
            }
        }
    }
    assert!(limits > 40, "only {limits} limits");
}

/// The rules that Envoy Gateway sends for the Envoy of `deploy/envoy-gateway/envoy.yaml`.
const RULES: &str = "deploy/envoy-gateway/rules";

/// Returns the lines of the rules in force, in alphabetical order.
fn rules_in_force(server: &Server) -> Vec<String> {
    let page = server.get("/rlconfig");
    let lines = page.lines().filter(|line| !line.starts_with('#'));
    let mut lines: Vec<_> = lines.map(str::to_owned).collect();
    lines.sort();
    lines
}

#[tokio::test]
async fn an_envoy_with_its_configuration_is_limited() {
    let files = ["first-listener.yaml", "shared.yaml"].map(|name| repository(RULES).join(name));
    let mut plane = ControlPlane::start();
    let server = builder(&plane).start();
    plane.set_files("1", &files);
    wait_until_accepted(&plane, "1").await;
    // Without a control plane, the same files are a directory of rules.
    let without_plane = Server::builder().rules(&repository(RULES)).start();
    assert_eq!(rules_in_force(&without_plane), rules_in_force(&server));
    assert_eq!(rules_in_force(&server).len(), 10);
    let (upstream, _) = upstream();
    let envoy = Envoy::start_with("deploy/envoy-gateway/envoy.yaml", server.grpc, upstream, false);
    let codes = |method: &str, path: &str, headers: &[(&str, &str)]| -> Vec<u16> {
        (0..3).map(|_| envoy.send(method, path, headers).0).collect()
    };
    let from = |address| [("x-forwarded-for", address)];

    assert_eq!(codes("GET", "/matches", &[("x-user-id", "one")]), [200, 200, 429]);
    assert_eq!(codes("GET", "/matches", &[("x-user-id", "two")]), [200, 200, 200]);
    assert_eq!(codes("GET", "/matches", &[("x-org-id", "a")]), [200, 429, 429]);
    assert_eq!(codes("GET", "/matches", &[("x-org-id", "b")]), [200, 429, 429]);
    assert_eq!(codes("DELETE", "/matches", &[]), [200, 429, 429]);
    assert_eq!(codes("GET", "/matches/login", &[]), [200, 429, 429]);

    assert_eq!(codes("GET", "/networks", &from("192.168.1.1")), [200, 200, 429]);
    assert_eq!(codes("GET", "/networks", &from("192.168.99.1"))[0], 429);
    assert_eq!(codes("GET", "/networks", &from("10.0.0.1")), [200, 429, 429]);
    assert_eq!(codes("GET", "/networks", &from("192.0.2.1")), [200, 429, 429]);
    assert_eq!(codes("GET", "/networks", &from("192.0.2.2")), [200, 429, 429]);
    assert_eq!(codes("GET", "/networks", &from("192.1.1.1")), [200, 200, 200]);

    assert_eq!(codes("GET", "/shared/one", &[])[..2], [200, 200]);
    assert_eq!(codes("GET", "/shared/two", &[])[0], 429);

    // A request costs 4 of 10 hits. The third costs more than the remaining hits and is charged; the next one is
    // denied.
    let remaining_header =
        || envoy.get("/costs", &[("x-cost", "4")]).1["x-ratelimit-remaining"].to_str().unwrap().to_owned();
    for remaining in ["10", "6", "2", "0"] {
        wait_for_async(remaining, async || (remaining_costs(&server).await == remaining).then_some(())).await;
        assert_eq!(remaining_header(), remaining);
    }
    assert_eq!(codes("GET", "/costs", &[("x-cost", "1")])[0], 429);

    let (_, headers) = envoy.get("/tenants", &[("x-tenant", "a")]);
    assert_eq!(
        (&headers["x-ratelimit-limit"], &headers["x-ratelimit-remaining"]),
        (&"2, 2;w=3600".parse().unwrap(), &"1".parse().unwrap())
    );
    assert_eq!(codes("GET", "/tenants", &[("x-tenant", "a")]), [200, 429, 429]);

    // Envoy Gateway's end-to-end tests check these series.
    let metrics = server.get("/metrics");
    for value in ["masked_remote_address_192_168_0_0/16", "masked_remote_address_invert_192_0_0_0/8"] {
        let series =
            "ratelimit_service_rate_limit_over_limit{domain=\"first-listener\",key1=\"networks_networks\",key2=";
        assert!(metrics.contains(&format!("{series}\"{value}\"}}")), "{value}: {metrics}");
    }
}

/// Returns the remaining hits of the limit `costs`, without taking any.
async fn remaining_costs(server: &Server) -> String {
    let costs = descriptor(&[("costs", "costs"), ("rule-0-match--1", "rule-0-match--1")]).hits(0);
    let peek = Request::new("first-listener").descriptor(costs);
    server.client().await.check(peek).await.unwrap().remaining().unwrap().to_string()
}

/// The mapping file that Envoy Gateway mounts defines the names of metrics, and response times in milliseconds.
#[tokio::test]
async fn metrics_have_the_names_of_its_mapping_file() {
    let data = "target/test-tools/gateway/internal/infrastructure/kubernetes/ratelimit/testdata/envoy-ratelimit-configmap.yaml";
    let text = fs::read_to_string(repository(data)).unwrap_or_else(|error| panic!("{error}: run tests/setup.sh"));
    let lines = text.lines().skip_while(|line| *line != "  conf.yaml: |").skip(1);
    let lines = lines.take_while(|line| line.starts_with("    ") || line.is_empty()).map(str::trim_end);
    let folder = tempfile::tempdir().unwrap();
    let (mapping, config) = (folder.path().join("conf.yaml"), folder.path().join("config"));
    let text: String = lines.map(|line| format!("{}\n", line.strip_prefix("    ").unwrap_or_default())).collect();
    fs::write(&mapping, text).unwrap();
    fs::create_dir(&config).unwrap();
    fs::write(config.join("rules.yaml"), "{domain: d, descriptors: [{key: route, value: r, descriptors: [{key: masked_remote_address, value: 0.0.0.0/0, descriptors: [{key: remote_address, rate_limit: {unit: hour, requests_per_unit: 1}}]}]}]}").unwrap();
    let start = |mapping: &Path, milliseconds: &str| {
        Server::builder()
            .rules(&config)
            .set("telemetry.prometheus.mapping_file", mapping.to_str().unwrap())
            .set("telemetry.prometheus.milliseconds", milliseconds)
            .start()
    };
    let server = start(&mapping, "false");
    let client = server.client().await;
    let entries = [("route", "r"), ("masked_remote_address", "0.0.0.0/0"), ("remote_address", "10.0.0.1")];
    for _ in 0..3 {
        client.check(request_for("d", &entries)).await.unwrap();
    }
    let text = server.get("/metrics");
    let labels = "{domain=\"d\",key1=\"route_r\",key2=\"masked_remote_address_0_0_0_0/0\"}";
    for line in [
        &format!("ratelimit_service_rate_limit_over_limit{labels} 2"),
        &format!("ratelimit_service_rate_limit_total_hits{labels} 3"),
        "# TYPE ratelimit_service_response_time_seconds histogram",
        "ratelimit_service_response_time_seconds_bucket{grpc_method=\"ShouldRateLimit\",le=\"100\"} 3",
        "sluicegate_decision_seconds_count 3",
        "ratelimit_service_total_requests{grpc_method=\"ShouldRateLimit\"} 3",
        "ratelimit_service_config_load_success 1",
        // A metric without a mapping has its name from statsd.
        "ratelimit_service_global_shadow_mode 0",
        "sluicegate_workers 2",
    ] {
        assert!(text.contains(&format!("\n{line}\n")), "{line}: {text}");
    }
    // Each rule has hits now, and none of them is a metric: the file does not have our own count.
    let own = text.lines().find(|line| line.contains("soft_limit") && !line.starts_with('#')).unwrap_or_default();
    assert_eq!(own, format!("ratelimit_service_rate_limit_soft_limit{labels} 0"), "{text}");
    // The file cannot change this name and its unit, which the alert for slow decisions needs.
    let in_seconds = "\nsluicegate_decision_seconds_bucket{le=\"0.1\"} ";
    assert!(text.contains(in_seconds), "{text}");
    // The file is missing, which is allowed: the names are built in, and the unit is the configured one.
    let server = start(&folder.path().join("none.yaml"), "true");
    server.client().await.check(request_for("d", &entries)).await.unwrap();
    let text = server.get("/metrics");
    for line in [
        &format!("ratelimit_service_rate_limit_total_hits{labels} 1"),
        "ratelimit_service_response_time_seconds_bucket{grpc_method=\"ShouldRateLimit\",le=\"100\"} 1",
        "sluicegate_decision_seconds_count 1",
    ] {
        assert!(text.contains(&format!("\n{line}\n")), "{line}: {text}");
    }
    assert!(text.contains(in_seconds), "{text}");
    assert!(server.log().contains("mapping_file not found"), "{}", server.log());
    fs::write(&mapping, "mappings: [{match: a, nam: x}]").unwrap();
    let failed = command()
        .args(["--grpc-addr=127.0.0.1:0", "--http-addr=127.0.0.1:0"])
        .env("SLUICEGATE__TELEMETRY__PROMETHEUS__MAPPING_FILE", &mapping)
        .output()
        .unwrap();
    let error = String::from_utf8(failed.stderr).unwrap();
    assert!(failed.status.code() == Some(1) && error.contains("conf.yaml") && error.contains("nam"), "{error}");
}
