//! The Helm chart, the plain manifests and the Compose files, tested without a cluster or a container runtime. Each
//! file is validated by its own tool, and the processes that it defines are started.

use std::{
    fs,
    io::Write,
    path::Path,
    process::{Command, Output, Stdio},
};

use serde_json::{Value, json};

use crate::{
    support::{
        RedisServer, Server,
        envoy::Envoy,
        repository, request_for,
        server::{command, get},
        tool,
    },
    wire::envoy::upstream,
};

/// The oldest and the newest version of Kubernetes against which manifests are validated.
const KUBERNETES: [&str; 2] = ["1.30", "1.37"];
const EVERYTHING: &str = r#"
image: { repository: registry.example.com/sluicegate, tag: v1 }
imagePullSecrets: [{ name: pull }]
store: { existingSecret: redis }
settings:
  grpc: { max_connections: 100 }
  redis: { timeout: 30ms }
  telemetry: { log: { format: logstash } }
rules: { files: { a.yaml: "domain: a\ndescriptors: []\n", b.yaml: "domain: b\n" } }
tls: { existingSecret: certs }
peers: { enabled: true, port: 9083, sync: 50ms, existingSecret: peer-certs }
extraEnv: [{ name: SLUICEGATE__WORKERS, value: "2" }]
extraVolumes: [{ name: x, emptyDir: {} }]
extraVolumeMounts: [{ name: x, mountPath: /x }]
autoscaling: { enabled: true }
networkPolicy: { enabled: true, from: [{ namespaceSelector: { matchLabels: { gateway: "yes" } } }] }
serviceMonitor: { enabled: true, labels: { release: prometheus } }
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

const PEERS: &str = "peers: { enabled: true, allowPlaintext: true }\n";

/// Returns all documents of a YAML file, parsed by `PyYAML`.
fn documents(text: &str) -> Vec<Value> {
    let script = "import json, sys, yaml; print(json.dumps([d for d in yaml.safe_load_all(sys.stdin) if d]))";
    let mut python = Command::new(tool("python3"));
    let mut python = python.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    python.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = python.wait_with_output().unwrap();
    assert!(output.status.success(), "{text}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Runs Helm on the chart with these values.
fn run_helm(args: &[&str], values: &str) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("values.yaml");
    fs::write(&file, values).unwrap();
    Command::new(tool("helm"))
        .args(args)
        .arg(repository("deploy/helm/sluicegate"))
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

/// Validates manifests strictly against the schemas of Kubernetes.
fn validate(manifests: &str) {
    let folder = tempfile::tempdir().unwrap();
    // Kubernetes has no schemas of custom resources.
    let custom =
        ["ServiceMonitor", "EnvoyFilter", "ExtensionService", "HTTPProxy"].map(|kind| format!("\nkind: {kind}\n"));
    let built_in = manifests.split("\n---\n").filter(|text| !custom.iter().any(|kind| text.contains(kind)));
    let file = folder.path().join("all.yaml");
    fs::write(&file, built_in.collect::<Vec<_>>().join("\n---\n")).unwrap();
    for version in KUBERNETES {
        let output = Command::new(tool("kubernetes-validate")).args(["--strict", "-k", version]).arg(&file).output();
        let output = output.unwrap();
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains("passed"), "{version}: {text}");
    }
}

/// Starts the container of the deployment as a process, with its files and variables, and checks its probes.
async fn start(manifests: &str, redis: &RedisServer) -> Server {
    let all = documents(manifests);
    let of_kind = |kind: &str| all.iter().filter(|document| document["kind"] == kind).cloned().collect::<Vec<_>>();
    let pod = of_kind("Deployment").remove(0)["spec"]["template"]["spec"].clone();
    let container = &pod["containers"][0];
    let folder = tempfile::tempdir().unwrap();
    let local_path = |path: &str| {
        let mut mounts = container["volumeMounts"].as_array().unwrap().iter();
        let mount = mounts.find(|mount| path.starts_with(mount["mountPath"].as_str().unwrap())).unwrap();
        let volume = pod["volumes"].as_array().unwrap().iter().find(|volume| volume["name"] == mount["name"]).unwrap();
        let mounted = folder.path().join(mount["name"].as_str().unwrap());
        fs::create_dir_all(&mounted).unwrap();
        let map_name = &volume["configMap"]["name"];
        let config_map = of_kind("ConfigMap").into_iter().find(|map| map["metadata"]["name"] == *map_name);
        for (name, text) in config_map.iter().flat_map(|map| map["data"].as_object().unwrap()) {
            fs::write(mounted.join(name), text.as_str().unwrap()).unwrap();
        }
        path.replace(mount["mountPath"].as_str().unwrap(), mounted.to_str().unwrap())
    };
    let mut command = command();
    for argument in container["args"].as_array().unwrap() {
        let argument = argument.as_str().unwrap();
        command.arg(match argument {
            "redis://redis:6379" => redis.url(),
            path if path.starts_with('/') => local_path(path),
            other => other.to_owned(),
        });
    }
    let mut tls = false;
    for variable in container["env"].as_array().unwrap() {
        let name = variable["name"].as_str().unwrap();
        tls |= name.contains("TLS");
        match &variable["value"] {
            // The test has no Secret with certificates.
            _ if name.contains("TLS") => {}
            Value::String(value) => drop(command.env(name, value)),
            _ => {
                assert_eq!(variable["valueFrom"]["secretKeyRef"]["name"], "redis");
                command.env(name, redis.url());
            }
        }
    }
    assert_eq!(tls, manifests.contains("/certs"));
    let server = Server::from_command(command)
        .set("grpc.addr", "127.0.0.1:0")
        .set("http.addr", "127.0.0.1:0")
        // With peers, whose host name does not exist here and whose certificates are missing as well.
        .set("cluster.addr", "127.0.0.1:0")
        .set("cluster.allow_plaintext", "true")
        .set("telemetry.log.format", "json")
        .start();
    for probe in ["startupProbe", "readinessProbe"] {
        let path = container[probe]["httpGet"]["path"].as_str().unwrap();
        assert_eq!(get(&server.url(path)).0, 200, "{probe}");
    }
    assert_eq!(container["livenessProbe"]["tcpSocket"]["port"], "grpc");
    std::net::TcpStream::connect(server.grpc).unwrap();
    // The service has read the rules, so the temporary files can be removed.
    server
}

#[tokio::test]
async fn helm_and_kubernetes_accept_the_chart() {
    let redis = RedisServer::start();
    for (values, count) in [
        ("", 6),
        (EVERYTHING, 10),
        (BY_XDS, 5),
        (PEERS, 7),
        ("rules: { existingConfigMap: mine }\n", 5),
        ("podDisruptionBudget: { enabled: false }\nserviceAccount: { create: false }\n", 4),
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

/// Returns the document of this kind and name.
fn document(manifests: &str, kind: &str, name: &str) -> Value {
    let all = documents(manifests);
    let found = all.into_iter().find(|found| found["kind"] == kind && found["metadata"]["name"] == name);
    found.unwrap_or_else(|| panic!("no {kind} {name} in {manifests}"))
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

/// The plain manifests are the chart rendered with its default values. `UPDATE_MANIFESTS=1` rewrites them.
#[test]
fn the_plain_manifests_are_equal_to_the_chart() {
    let path = repository("deploy/kubernetes/sluicegate.yaml");
    let added_by_helm = ["# Source:", "helm.sh/chart:", "app.kubernetes.io/managed-by:", "app.kubernetes.io/instance:"];
    let head = "# Two instances, each with counters in its own memory. To share them, set SLUICEGATE__STORE to a Redis address.\n\
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

/// Returns the value as YAML in block style, which `Envoy::start_with` can edit.
fn to_yaml(value: &Value) -> String {
    let mut python = Command::new(tool("python3"));
    let script = "import json, sys, yaml; yaml.safe_dump(json.load(sys.stdin), sys.stdout)";
    let python = python.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut python = python.spawn().unwrap();
    python.stdin.take().unwrap().write_all(value.to_string().as_bytes()).unwrap();
    String::from_utf8(python.wait_with_output().unwrap().stdout).unwrap()
}

/// The test has no containers; it starts the programs of the services with the same arguments.
#[test]
fn programs_accept_the_commands_of_the_compose_files() {
    let folder = repository("deploy/compose");
    for file in ["compose.yaml", "single.yaml", "peers.yaml", "monitoring/compose.yaml"] {
        let compose = documents(&fs::read_to_string(folder.join(file)).unwrap()).remove(0);
        let services = compose["services"].as_object().unwrap();
        assert!(services.len() > 1, "{services:?}");
        for (name, service) in services {
            for volume in service["volumes"].as_array().into_iter().flatten() {
                let source = volume.as_str().unwrap().split(':').next().unwrap();
                assert!(folder.join(source).exists(), "{file}: {name} mounts {source}");
            }
            let others = match &service["depends_on"] {
                Value::Object(others) => others.keys().map(String::as_str).collect(),
                Value::Array(others) => others.iter().filter_map(Value::as_str).collect(),
                _ => Vec::new(),
            };
            assert!(others.iter().all(|other| services.contains_key(*other)), "{file}: {name} waits for {others:?}");
            run(&folder, name, service);
        }
    }
}

/// Runs the command of a service without a container network, and checks that its program accepts it.
fn run(folder: &Path, name: &str, service: &Value) {
    let args: Vec<String> = match &service["command"] {
        Value::String(line) => line.replace("\"\"", "").split_whitespace().map(str::to_owned).collect(),
        Value::Array(args) => args.iter().map(|arg| arg.as_str().unwrap().to_owned()).collect(),
        _ => Vec::new(),
    };
    // Paths in the container are replaced by the mounted files.
    let local_path = |arg: &String| {
        let volumes =
            service["volumes"].as_array().into_iter().flatten().map(|volume| volume.as_str().unwrap().split(':'));
        let mut pairs = volumes.map(|mut parts| (parts.next().unwrap(), parts.next().unwrap()));
        let mounted = pairs.find(|(_, target)| arg == target).map(|(source, _)| folder.join(source));
        mounted.map_or_else(|| arg.clone(), |path| path.to_str().unwrap().to_owned())
    };
    let args: Vec<String> = args.iter().map(local_path).collect();
    let image = service["image"].as_str().unwrap_or_default();
    let mut program = match image.split([':', '/']).next().unwrap() {
        "" => {
            let mut program = command();
            for (name, value) in service["environment"].as_object().into_iter().flatten() {
                program.env(name, value.as_str().map_or_else(|| value.to_string(), str::to_owned));
            }
            program.args(&args).arg("--print-settings");
            program
        }
        "redis" if args[0] == "redis-server" => {
            let mut program = Command::new("redis-server");
            // The invalid socket path ends the server as soon as it has read its arguments.
            program.args(&args[1..]).args(["--port", "0", "--unixsocket", "/nowhere/at/all"]);
            let output = program.output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(text.contains("Failed opening Unix socket") && !text.contains("FATAL CONFIG"), "{name}: {text}");
            return;
        }
        // The redis service without a server creates a cluster, which the tests of topologies cover.
        "redis" | "python" | "grafana" => return,
        "envoyproxy" => {
            let mut program = Command::new(tool("envoy"));
            program.args(["--mode", "validate", "-l", "error"]).args(&args[1..]);
            program
        }
        "prom" => {
            let mut program = Command::new(tool("promtool"));
            let rules = repository("deploy/prometheus/alerts.yaml");
            let config = fs::read_to_string(folder.join("monitoring/prometheus.yaml")).unwrap();
            let file = tempfile::NamedTempFile::new().unwrap();
            fs::write(&file, config.replace("/etc/prometheus/alerts.yaml", rules.to_str().unwrap())).unwrap();
            let output = program.args(["check", "config"]).arg(file.path()).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            return;
        }
        other => panic!("{name} runs {other}, which this test does not support"),
    };
    let output = program.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {text}");
}
