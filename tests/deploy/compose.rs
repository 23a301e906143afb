//! The Compose files, tested without a container runtime: each file is validated by its own tool, and the programs that it
//! starts get their arguments.

use std::{fs, path::Path, process::Command};

use serde_json::Value;

use super::manifests::documents;
use crate::support::{repository, server::command, tool};

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
