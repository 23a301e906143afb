//! The Helm chart and the plain manifests, tested without a cluster. Each is validated by its own tool, and the processes
//! that it defines are started.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use serde_json::{Value, json};

use super::manifests::{document, documents, start, start_in, to_yaml, validate};
use crate::{
    support::{
        RedisServer,
        envoy::Envoy,
        operator::{OPERATE, admin_addr},
        repository, request_for,
        server::command,
        tool, wait_for,
    },
    wire::envoy::upstream,
};

const EVERYTHING: &str = r#"
image: { repository: registry.example.com/sluicegate, tag: v1 }
imagePullSecrets: [{ name: pull }]
store: { existingSecret: redis, passwordSecret: redis-password }
settings:
  grpc: { max_connections: 100 }
  redis: { timeout: 30ms }
  telemetry: { log: { format: logstash } }
admin: { existingSecret: admin-tokens }
rules: { files: { example.yaml: null, a.yaml: "domain: a\ndescriptors: []\n", b.yaml: "domain: b\n" } }
tls: { existingSecret: certs }
peers: { enabled: true, port: 9083, sync: 50ms, existingSecret: peer-certs }
extraEnv: [{ name: SLUICEGATE__WORKERS, value: "2" }]
extraVolumes: [{ name: x, emptyDir: {} }]
extraVolumeMounts: [{ name: x, mountPath: /x }]
autoscaling: { enabled: true }
networkPolicy: { enabled: true, from: [{ namespaceSelector: { matchLabels: { gateway: "yes" } } }] }
serviceMonitor: { enabled: true, labels: { release: prometheus } }
prometheusRule: { enabled: true, labels: { release: prometheus } }
dashboard: { enabled: true, annotations: { folder: Edge } }
serviceAccount: { annotations: { a: b } }
service: { annotations: { a: b } }
podAnnotations: { a: b }
podLabels: { team: edge }
nodeSelector: { disk: ssd }
tolerations: [{ key: edge, operator: Exists }]
affinity: { nodeAffinity: { preferredDuringSchedulingIgnoredDuringExecution: [] } }
priorityClassName: high
"#;
const BY_XDS: &str = "settings: { rules: { xds: { server: 'http://127.0.0.1:1', start_without_rules: true } } }\n";

const PEERS: &str = "replicas: 3\npeers: { enabled: true, allowPlaintext: true }\n";

/// Runs Helm on the chart with these values.
fn run_helm(args: &[&str], values: &str) -> Output {
    run_helm_on(&repository("deploy/helm/sluicegate"), args, values)
}

/// Runs Helm on the chart in this folder with these values.
fn run_helm_on(chart: &Path, args: &[&str], values: &str) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("values.yaml");
    fs::write(&file, values).unwrap();
    Command::new(tool("helm"))
        .args(args)
        .arg(chart)
        .args(["--kube-version", "1.33.0", "--values"])
        .arg(&file)
        .output()
        .unwrap()
}

/// Runs Helm on the chart with these values and returns its output.
fn helm(args: &[&str], values: &str) -> String {
    let output = run_helm(args, values);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

#[tokio::test]
async fn helm_and_kubernetes_accept_the_chart() {
    let redis = RedisServer::start();
    for (values, count) in [
        ("", 7),
        (EVERYTHING, 13),
        (BY_XDS, 6),
        (PEERS, 8),
        ("rules: { existingConfigMap: mine }\n", 6),
        ("podDisruptionBudget: { enabled: false }\nserviceAccount: { create: false }\n", 5),
    ] {
        helm(&["lint", "--strict"], values);
        let manifests = helm(&["template", "rate"], values);
        assert_eq!(documents(&manifests).len(), count, "{manifests}");
        validate(&manifests);
        if !values.contains("existingConfigMap") {
            drop(start(&manifests, &redis).await);
        }
    }
}

#[tokio::test]
async fn a_password_of_redis_is_mounted_from_a_secret() {
    let redis = RedisServer::with(&["--requirepass", "secret"]);
    let values = "store: { existingSecret: redis, passwordSecret: redis-password }\n";
    let folder = tempfile::tempdir().unwrap();
    let server = start_in(folder.path(), &helm(&["template", "rate"], values), &redis).await;
    wait_for("a connection", || server.get("/readyz").contains("redis, up").then_some(()));
}

/// The name of the headless service is the one that pods resolve and that certificates must contain.
#[test]
fn pods_with_peers_find_each_other_by_the_headless_service() {
    let manifests = helm(&["template", "rate"], EVERYTHING);
    let service = document(&manifests, "Service", "rate-sluicegate-peers");
    assert_eq!(
        (&service["spec"]["clusterIP"], &service["spec"]["publishNotReadyAddresses"]),
        (&json!("None"), &json!(true))
    );
    let pod = document(&manifests, "Deployment", "rate-sluicegate")["spec"]["template"]["spec"].clone();
    let container = &pod["containers"][0];
    let variables = container["env"].as_array().unwrap();
    let value = |name: &str| variables.iter().find(|variable| variable["name"] == name).unwrap()["value"].clone();
    assert_eq!(value("SLUICEGATE__CLUSTER__PEERS"), "rate-sluicegate-peers.default.svc:9083");
    assert_eq!(value("SLUICEGATE__CLUSTER__ADDR"), "0.0.0.0:9083");
    assert_eq!(value("SLUICEGATE__CLUSTER__SYNC"), "50ms");
    assert_eq!(value("SLUICEGATE__CLUSTER__TLS__SERVER_NAME"), "rate-sluicegate-peers.default.svc");
    assert!(container["ports"].as_array().unwrap().contains(&json!({ "name": "peers", "containerPort": 9083 })));
    let secret = json!({ "name": "peer-certs", "secret": { "secretName": "peer-certs" } });
    assert!(pod["volumes"].as_array().unwrap().contains(&secret), "{pod}");
    // Only the pods themselves may connect to the port.
    let policy = document(&manifests, "NetworkPolicy", "rate-sluicegate");
    let rule = &policy["spec"]["ingress"][1];
    assert_eq!(
        (&rule["from"][0]["podSelector"], &rule["ports"]),
        (&policy["spec"]["podSelector"], &json!([{ "port": "peers" }]))
    );
}

#[test]
fn peers_without_certificates_must_be_allowed() {
    let output = run_helm(&["template", "rate"], "peers: { enabled: true }\n");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("peers.enabled needs peers.existingSecret"), "{error}");
}

/// With the store in memory, each pod would allow the whole limit.
#[test]
fn several_pods_need_a_shared_store_or_peers() {
    for values in [
        "replicas: 2\n",
        "autoscaling: { enabled: true }\n",
        "replicas: 2\nstore: { url: '' }\n",
        "replicas: 2\nextraEnv: [{ name: SLUICEGATE__WORKERS, value: '2' }]\n",
    ] {
        let output = run_helm(&["template", "rate"], values);
        let error = String::from_utf8_lossy(&output.stderr);
        for setting in ["store.url", "store.existingSecret", "peers.enabled=true", "replicas=1"] {
            assert!(!output.status.success() && error.contains(setting), "{values}: {setting}: {error}");
        }
    }
    for values in [
        "",
        "autoscaling: { enabled: true, minReplicas: 1, maxReplicas: 1 }\n",
        "replicas: 2\nstore: { url: 'redis://redis:6379' }\n",
        "replicas: 2\nstore: { existingSecret: redis }\n",
        "replicas: 2\nstore: { allowSeparateCounters: true }\n",
        "replicas: 2\nextraEnv: [{ name: SLUICEGATE__STORE, value: 'redis://redis:6379' }]\n",
        "replicas: 2\nsettings: { cluster: { peers: [a, b], allow_plaintext: true } }\n",
        PEERS,
    ] {
        helm(&["template", "rate"], values);
    }
}

/// The variable of the chart has precedence over the settings file, so this address would be ignored.
#[test]
fn a_store_among_the_settings_is_an_error() {
    let output = run_helm(&["template", "rate"], "settings: { store: 'redis://redis:6379' }\n");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("settings.store has no effect: set store.url"), "{error}");
}

#[test]
fn pods_know_how_many_share_the_store() {
    let instances = |values: &str| {
        let manifests = helm(&["template", "rate"], &format!("store: {{ url: 'redis://redis:6379' }}\n{values}"));
        let settings = document(&manifests, "ConfigMap", "rate-sluicegate")["data"]["settings.yaml"].clone();
        documents(settings.as_str().unwrap())[0]["cluster"]["instances"].clone()
    };
    assert_eq!(instances("replicas: 3\n"), 3);
    assert_eq!(instances("autoscaling: { enabled: true, maxReplicas: 7 }\n"), 7);
    assert_eq!(instances("replicas: 3\nsettings: { cluster: { instances: 2 } }\n"), 2);
    assert_eq!(instances("replicas: 1\n"), Value::Null);
}

/// Envoy's `STRICT_DNS` and gRPC clients resolve the service to the pods, and connect to the port of the container.
#[test]
fn the_headless_service_for_grpc_has_the_port_of_the_container() {
    let manifests = helm(&["template", "rate"], "service: { grpcPort: 80 }\n");
    let service = document(&manifests, "Service", "rate-sluicegate-headless");
    let all_pods = document(&manifests, "Service", "rate-sluicegate");
    assert_eq!(service["spec"]["clusterIP"], "None");
    assert_eq!(service["spec"]["selector"], all_pods["spec"]["selector"]);
    assert_eq!(
        service["spec"]["publishNotReadyAddresses"],
        Value::Null,
        "callers must not reach pods that are not ready"
    );
    let deployment = document(&manifests, "Deployment", "rate-sluicegate");
    let port = &deployment["spec"]["template"]["spec"]["containers"][0]["ports"][0];
    let service_port = &service["spec"]["ports"][0];
    assert_eq!((&service_port["port"], &service_port["targetPort"]), (&port["containerPort"], &port["name"]));
}

/// The chart contains the alerts and the dashboard. `UPDATE_MANIFESTS=1` copies them.
#[test]
fn the_chart_has_the_alerts_and_the_dashboard_of_the_repository() {
    for (source, copy) in [
        ("deploy/prometheus/alerts.yaml", "deploy/helm/sluicegate/files/alerts.yaml"),
        ("deploy/grafana/sluicegate.json", "deploy/helm/sluicegate/files/sluicegate.json"),
    ] {
        let text = fs::read_to_string(repository(source)).unwrap();
        if std::env::var_os("UPDATE_MANIFESTS").is_some() {
            fs::write(repository(copy), &text).unwrap();
        }
        assert!(
            fs::read_to_string(repository(copy)).unwrap() == text,
            "{copy} is not {source}: set UPDATE_MANIFESTS=1"
        );
    }
    let manifests = helm(&["template", "rate"], EVERYTHING);
    let rule = document(&manifests, "PrometheusRule", "rate-sluicegate");
    let alerts = documents(&fs::read_to_string(repository("deploy/prometheus/alerts.yaml")).unwrap()).remove(0);
    assert_eq!((&rule["spec"], &rule["metadata"]["labels"]["release"]), (&alerts, &json!("prometheus")));
    let dashboard = document(&manifests, "ConfigMap", "rate-sluicegate-dashboard");
    let text = fs::read_to_string(repository("deploy/grafana/sluicegate.json")).unwrap();
    let expected: Value = serde_json::from_str(&text).unwrap();
    let got: Value = serde_json::from_str(dashboard["data"]["sluicegate.json"].as_str().unwrap()).unwrap();
    assert_eq!((got, &dashboard["metadata"]["labels"]["grafana_dashboard"]), (expected, &json!("1")));
}

/// `kubectl exec` runs `ctl` with the variables and files of the container.
#[tokio::test]
async fn ctl_in_the_container_has_a_token() {
    let redis = RedisServer::start();
    let manifests = helm(&["template", "rate"], "admin: { existingSecret: admin-tokens }\n");
    let container =
        document(&manifests, "Deployment", "rate-sluicegate")["spec"]["template"]["spec"]["containers"][0].clone();
    let variables = container["env"].as_array().unwrap();
    let value = |name: &str| variables.iter().find(|variable| variable["name"] == name).unwrap()["value"].clone();
    assert_eq!(value("SLUICEGATE__ADMIN__ADDR"), "127.0.0.1:8082");
    assert_eq!(value("SLUICEGATE_TOKEN_FILE"), "/admin/token");
    let folder = tempfile::tempdir().unwrap();
    let server = start_in(folder.path(), &manifests, &redis).await;
    let mut ctl = command();
    ctl.args(["ctl", "limit", "set", "example", "user=bob", "unlimited"]);
    ctl.env("SLUICEGATE_ADMIN", format!("http://{}", admin_addr(&server)));
    ctl.env("SLUICEGATE_TOKEN_FILE", folder.path().join("admin/token"));
    let output = ctl.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("limit|example|user=bob: unlimited"), "{text}");
    assert!(!server.log().contains("SLUICEGATE_TOKEN_FILE") && !server.log().contains(OPERATE), "{}", server.log());
}

/// Returns what Helm prints after an installation with these values. `helm template` prints no notes, so a copy of the
/// chart has them in a manifest.
fn notes(values: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let chart = folder.path().join("sluicegate");
    let copied = Command::new("cp").arg("-r").arg(repository("deploy/helm/sluicegate")).arg(&chart).status().unwrap();
    assert!(copied.success());
    fs::rename(chart.join("templates/NOTES.txt"), chart.join("files/notes")).unwrap();
    fs::write(chart.join("templates/notes.yaml"), "notes: {{ tpl (.Files.Get \"files/notes\") . | quote }}\n").unwrap();
    let output = run_helm_on(&chart, &["template", "rate", "--show-only", "templates/notes.yaml"], values);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    documents(&String::from_utf8(output.stdout).unwrap()).remove(0)["notes"].as_str().unwrap().to_owned()
}

#[test]
fn the_notes_name_the_next_steps_and_what_is_missing() {
    let warnings = |notes: &str| notes.matches("WARNING").count();
    let by_default = notes("");
    for text in [
        "port-forward deployment/rate-sluicegate 8080:8080",
        "curl -s localhost:8080/rlconfig",
        "rate-sluicegate-headless.default.svc:8081",
        "The admin API is off",
        "The counters are in the memory of one pod",
        "the chart's example",
    ] {
        assert!(by_default.contains(text), "{text}: {by_default}");
    }
    assert_eq!(warnings(&by_default), 3, "{by_default}");
    let complete = notes(EVERYTHING);
    assert_eq!(warnings(&complete), 0, "{complete}");
    assert!(complete.contains("exec deployment/rate-sluicegate -- /bin/sluicegate ctl top"), "{complete}");
    assert!(complete.contains("counters  in Redis"), "{complete}");
    assert!(notes(PEERS).contains("exchange hits without TLS"));
    let separate = notes("replicas: 3\nstore: { allowSeparateCounters: true }\n");
    assert!(separate.contains("3 pods allow up to 3 times each limit"), "{separate}");
}

/// The plain manifests are the chart rendered with its default values. `UPDATE_MANIFESTS=1` rewrites them.
#[test]
fn the_plain_manifests_are_equal_to_the_chart() {
    let path = repository("deploy/kubernetes/sluicegate.yaml");
    let added_by_helm = ["# Source:", "helm.sh/chart:", "app.kubernetes.io/managed-by:", "app.kubernetes.io/instance:"];
    let head = "# One instance with counters in its memory. Several share them by SLUICEGATE__STORE, the address of a Redis.\n\
                #\n#   kubectl apply -f deploy/kubernetes/sluicegate.yaml\n";
    let manifests = helm(&["template", "sluicegate"], "");
    let lines = manifests.lines().filter(|line| !added_by_helm.iter().any(|prefix| line.trim().starts_with(prefix)));
    // Selectors on one line must not name the label either, because the pods do not have it.
    let lines = lines.map(|line| line.replace(", app.kubernetes.io/instance: sluicegate", "") + "\n");
    let manifests: String = std::iter::once(head.to_owned()).chain(lines).collect();
    if std::env::var_os("UPDATE_MANIFESTS").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, &manifests).unwrap();
    }
    assert_eq!(fs::read_to_string(path).unwrap(), manifests);
    validate(&manifests);
}

/// An Envoy gets the content of the `EnvoyFilter`, as Istio would insert it into the gateway's configuration.
#[tokio::test]
async fn istios_gateway_enforces_limits() {
    let manifests = fs::read_to_string(repository("deploy/istio/sluicegate.yaml")).unwrap();
    validate(&manifests);
    let redis = RedisServer::start();
    let server = start(&manifests, &redis).await;
    let filter = documents(&fs::read_to_string(repository("deploy/istio/gateway.yaml")).unwrap()).remove(0);
    let value = |kind: &str| {
        let patches = filter["spec"]["configPatches"].as_array().unwrap();
        patches.iter().find(|patch| patch["applyTo"] == kind).unwrap()["patch"]["value"].clone()
    };
    let (filter, host) = (value("HTTP_FILTER"), value("VIRTUAL_HOST"));
    let service_name = &filter["typed_config"]["rate_limit_service"]["grpc_service"]["envoy_grpc"]["cluster_name"];
    let cluster = |name: &Value, port: u16| {
        json!({
            "name": name, "type": "STATIC",
            "load_assignment": { "cluster_name": name, "endpoints": [{ "lb_endpoints": [{ "endpoint": {
                "address": { "socket_address": { "address": "127.0.0.1", "port_value": port } },
            } }] }] },
        })
    };
    let mut service = cluster(service_name, 8081);
    service["typed_extension_protocol_options"] = json!({ "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
        "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": { "http2_protocol_options": {} },
    } });
    let manager = json!({
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "access_log": [{ "name": "file", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog", "path": "/dev/stdout",
        } }],
        "http_filters": [filter, { "name": "envoy.filters.http.router", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router",
        } }],
        "route_config": { "virtual_hosts": [{
            "name": "all", "domains": ["*"], "rate_limits": host["rate_limits"],
            "routes": [{ "match": { "prefix": "/" }, "route": { "cluster": "upstream" } }],
        }] },
    });
    let config = json!({
        "admin": { "address": { "socket_address": { "address": "127.0.0.1", "port_value": 9901 } } },
        "static_resources": {
            "listeners": [{
                "name": "gateway",
                "address": { "socket_address": { "address": "127.0.0.1", "port_value": 10_000 } },
                "filter_chains": [{ "filters": [{
                    "name": "envoy.filters.network.http_connection_manager", "typed_config": manager,
                }] }],
            }],
            "clusters": [cluster(&"upstream".into(), 9_000), service],
        },
    });
    let file = tempfile::Builder::new().suffix(".yaml").tempfile().unwrap();
    fs::write(&file, to_yaml(&config)).unwrap();
    let envoy = Envoy::start_with(file.path().to_str().unwrap(), server.grpc, upstream().0, false);
    let codes: Vec<u16> = (0..62).map(|_| envoy.send("GET", "/", &[("x-user", "ann")]).0).collect();
    assert_eq!(codes.iter().filter(|code| **code == 200).count(), 60, "{codes:?}");
    assert_eq!((codes[61], envoy.send("GET", "/", &[("x-user", "bob")]).0), (429, 200));
}

#[tokio::test]
async fn contours_descriptors_are_limited() {
    let manifests = fs::read_to_string(repository("deploy/contour/sluicegate.yaml")).unwrap();
    validate(&manifests);
    let redis = RedisServer::start();
    let server = start(&manifests, &redis).await;
    let client = server.client().await;
    let request = |address| request_for("contour", &[("generic_key", "orders"), ("remote_address", address)]);
    assert_eq!(client.check(request("10.0.0.1")).await.unwrap().remaining(), Some(59));
    assert_eq!(client.check(request("2001:db8::1")).await.unwrap().remaining(), Some(59));
    assert_eq!(client.check(request("2001:db8::2")).await.unwrap().remaining(), Some(58));
    // The entries of the route match the levels of the rules.
    let all = documents(&manifests);
    let proxy = all.iter().find(|document| document["kind"] == "HTTPProxy").unwrap();
    let entries = &proxy["spec"]["routes"][0]["rateLimitPolicy"]["global"]["descriptors"][0]["entries"];
    assert_eq!(entries, &json!([{ "genericKey": { "value": "orders" } }, { "remoteAddress": {} }]));
}
