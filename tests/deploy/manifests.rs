//! Manifests of Kubernetes: reading, validating, and starting the process that they define.

use std::{
    fs,
    io::Write,
    path::Path,
    process::{Command, Stdio},
};

use serde_json::Value;

use crate::support::{
    RedisServer, Server,
    operator::OPERATE,
    server::{command, get},
    tool,
};

/// The oldest and the newest version of Kubernetes against which manifests are validated.
const KUBERNETES: [&str; 2] = ["1.30", "1.37"];
/// Returns all documents of a YAML file, parsed by `PyYAML`.
pub(super) fn documents(text: &str) -> Vec<Value> {
    let script = "import json, sys, yaml; print(json.dumps([d for d in yaml.safe_load_all(sys.stdin) if d]))";
    let mut python = Command::new(tool("python3"));
    let mut python = python.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    python.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = python.wait_with_output().unwrap();
    assert!(output.status.success(), "{text}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Returns the document of this kind and name.
pub(super) fn document(manifests: &str, kind: &str, name: &str) -> Value {
    let all = documents(manifests);
    let found = all.into_iter().find(|found| found["kind"] == kind && found["metadata"]["name"] == name);
    found.unwrap_or_else(|| panic!("no {kind} {name} in {manifests}"))
}

/// Returns the value as YAML in block style, which `Envoy::start_with` can edit.
pub(super) fn to_yaml(value: &Value) -> String {
    let mut python = Command::new(tool("python3"));
    let script = "import json, sys, yaml; yaml.safe_dump(json.load(sys.stdin), sys.stdout)";
    let python = python.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut python = python.spawn().unwrap();
    python.stdin.take().unwrap().write_all(value.to_string().as_bytes()).unwrap();
    String::from_utf8(python.wait_with_output().unwrap().stdout).unwrap()
}

/// Validates manifests strictly against the schemas of Kubernetes.
pub(super) fn validate(manifests: &str) {
    let folder = tempfile::tempdir().unwrap();
    // Kubernetes has no schemas of custom resources.
    let custom = ["ServiceMonitor", "PrometheusRule", "EnvoyFilter", "ExtensionService", "HTTPProxy"];
    let custom = custom.map(|kind| format!("\nkind: {kind}\n"));
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
pub(super) async fn start(manifests: &str, redis: &RedisServer) -> Server {
    let folder = tempfile::tempdir().unwrap();
    // The service has read its files when this function returns, so they can be removed.
    start_in(folder.path(), manifests, redis).await
}

/// Like [`start`], with the files of the container in `folder`, one folder for each volume.
pub(super) async fn start_in(folder: &Path, manifests: &str, redis: &RedisServer) -> Server {
    let all = documents(manifests);
    let of_kind = |kind: &str| all.iter().filter(|document| document["kind"] == kind).cloned().collect::<Vec<_>>();
    let pod = of_kind("Deployment").remove(0)["spec"]["template"]["spec"].clone();
    let container = &pod["containers"][0];
    let local_path = |path: &str| {
        let mut mounts = container["volumeMounts"].as_array().unwrap().iter();
        let mount = mounts.find(|mount| path.starts_with(mount["mountPath"].as_str().unwrap())).unwrap();
        let volume = pod["volumes"].as_array().unwrap().iter().find(|volume| volume["name"] == mount["name"]).unwrap();
        let mounted = folder.join(mount["name"].as_str().unwrap());
        fs::create_dir_all(&mounted).unwrap();
        let map_name = &volume["configMap"]["name"];
        let config_map = of_kind("ConfigMap").into_iter().find(|map| map["metadata"]["name"] == *map_name);
        for (name, text) in config_map.iter().flat_map(|map| map["data"].as_object().unwrap()) {
            fs::write(mounted.join(name), text.as_str().unwrap()).unwrap();
        }
        if volume["secret"]["secretName"] == "admin-tokens" {
            fs::write(mounted.join("tokens"), format!("operate {OPERATE} ctl\n")).unwrap();
            fs::write(mounted.join("token"), OPERATE).unwrap();
        }
        if volume["secret"]["secretName"] == "redis-password" {
            fs::write(mounted.join("password"), "secret").unwrap();
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
            Value::String(_) if name == "SLUICEGATE__ADMIN__ADDR" => drop(command.env(name, "127.0.0.1:0")),
            Value::String(value) if value.starts_with('/') => drop(command.env(name, local_path(value))),
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
    server
}
