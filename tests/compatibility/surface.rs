//! Interfaces: protocols, settings, rule files, the command line and metrics.

use std::{collections::BTreeSet, process::Output};

use prost_reflect::{DescriptorPool, MessageDescriptor};
use serde_json::Value;
use sluicegate_proto::FILE_DESCRIPTOR_SET;

use super::assert_keeps;
use crate::support::{Operator, RedisServer, Server, request_for, rules, server::command};

/// As `buf breaking` does: services, methods, messages, fields and enums keep their names, numbers and types.
#[test]
fn the_protocols_keep_every_field() {
    let pool = DescriptorPool::decode(FILE_DESCRIPTOR_SET).unwrap();
    let mut lines = BTreeSet::new();
    for service in pool.services() {
        for method in service.methods() {
            let stream = |is_stream: bool| if is_stream { "stream " } else { "" };
            lines.insert(format!(
                "method {} ({}{}) returns ({}{})",
                method.full_name(),
                stream(method.is_client_streaming()),
                method.input().full_name(),
                stream(method.is_server_streaming()),
                method.output().full_name(),
            ));
        }
    }
    for message in pool.all_messages() {
        add_fields(&message, &mut lines);
    }
    for value in pool.all_enums().flat_map(|r#enum| r#enum.values().collect::<Vec<_>>()) {
        lines.insert(format!("value {} = {}", value.full_name(), value.number()));
    }
    lines.retain(|line| !line.contains("google.protobuf."));
    assert_keeps("protocols.txt", &lines);
}

fn add_fields(message: &MessageDescriptor, lines: &mut BTreeSet<String>) {
    for field in message.fields() {
        let (name, number, kind) = (field.full_name(), field.number(), field.kind());
        let cardinality = format!("{:?}", field.cardinality()).to_lowercase();
        let presence = if field.supports_presence() { " with presence" } else { "" };
        lines.insert(format!(
            "field {name} = {number}: {cardinality} {kind:?}{presence}, in JSON {}",
            field.json_name()
        ));
    }
}

/// Lists the paths of all properties in a JSON Schema, with their defaults and fixed values.
struct Properties {
    definitions: Value,
    /// The definitions that contain the present one. A definition that contains itself is listed once.
    outer: Vec<String>,
    lines: BTreeSet<String>,
}

impl Properties {
    fn of(schema: &str) -> BTreeSet<String> {
        let schema: Value = serde_json::from_str(schema).unwrap();
        let definitions = schema["$defs"].clone();
        let mut properties = Self { definitions, outer: Vec::new(), lines: BTreeSet::new() };
        properties.add(&schema, "");
        properties.lines
    }

    fn add(&mut self, schema: &Value, path: &str) {
        match schema {
            Value::Object(fields) => fields.iter().for_each(|(name, value)| self.add_field(name, value, path)),
            Value::Array(values) => values.iter().for_each(|schema| self.add(schema, path)),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }

    fn add_field(&mut self, name: &str, value: &Value, path: &str) {
        match (name, value) {
            ("properties" | "patternProperties", Value::Object(properties)) => {
                for (property, schema) in properties {
                    let path = format!("{path}.{property}");
                    self.lines.insert(path.clone());
                    self.add(schema, &path);
                }
            }
            ("$ref", Value::String(reference)) => {
                let name = reference.rsplit('/').next().unwrap_or_default().to_owned();
                if !self.outer.contains(&name) {
                    let definition = self.definitions[&name].clone();
                    self.outer.push(name);
                    self.add(&definition, path);
                    self.outer.pop();
                }
            }
            ("const", value) => drop(self.lines.insert(format!("{path} = {value}"))),
            ("enum", Value::Array(values)) => {
                self.lines.extend(values.iter().map(|value| format!("{path} = {value}")));
            }
            ("$defs" | "description" | "default" | "required" | "examples", _) => {}
            (_, value) => self.add(value, path),
        }
    }
}

fn output(args: &[&str]) -> String {
    let Output { status, stdout, stderr } = command().args(args).output().unwrap();
    assert!(status.success(), "{args:?}: {}", String::from_utf8_lossy(&stderr));
    String::from_utf8(stdout).unwrap()
}

/// Defaults of the last release that this version changes, as CHANGELOG.md says.
const CHANGED_DEFAULTS: [&str; 3] = [
    "grpc.limits.max_frame_bytes = 262144",
    "grpc.limits.max_message_bytes = 65536",
    "telemetry.max_dynamic_series = 10000",
];

#[test]
fn settings_keep_their_names_and_values() {
    assert_keeps("settings.txt", &Properties::of(&output(&["schema", "settings"])));
    let printed: toml::Table = output(&["--print-settings"]).parse().unwrap();
    let mut defaults = BTreeSet::new();
    add_defaults(&printed, "", &mut defaults);
    defaults.extend(CHANGED_DEFAULTS.map(str::to_owned));
    assert_keeps("defaults.txt", &defaults);
}

fn add_defaults(table: &toml::Table, path: &str, lines: &mut BTreeSet<String>) {
    for (name, value) in table {
        match value {
            toml::Value::Table(table) => add_defaults(table, &format!("{path}{name}."), lines),
            value => drop(lines.insert(format!("{path}{name} = {value}"))),
        }
    }
}

#[test]
fn rule_files_keep_their_keywords() {
    assert_keeps("keywords.txt", &Properties::of(&output(&["schema", "rules"])));
}

#[test]
fn the_command_line_keeps_its_commands_and_flags() {
    let mut lines = BTreeSet::new();
    add_commands(&[], &mut lines);
    assert_keeps("commands.txt", &lines);
}

/// Adds the flags of a command and those of its subcommands, as `--help` lists them.
fn add_commands(path: &[&str], lines: &mut BTreeSet<String>) {
    let help = output(&[path, &["--help"]].concat());
    let (mut section, title) = ("", ["sluicegate"].iter().chain(path).copied().collect::<Vec<_>>().join(" "));
    for line in help.lines() {
        if let Some(name) = line.strip_suffix(':').filter(|line| !line.starts_with(' ')) {
            section = name;
            continue;
        }
        let (words, name) = (line.trim_start(), line.split_whitespace().next().unwrap_or_default());
        match section {
            "Commands" if line.starts_with("  ") && !line.starts_with("   ") && name != "help" => {
                lines.insert(format!("{title} {name}"));
                add_commands(&[path, &[name]].concat(), lines);
            }
            "Options" | "Connection" if words.starts_with("--") || words.starts_with('-') && words.contains(", --") => {
                let flag = words.split("  ").next().unwrap_or_default();
                lines.insert(format!("{title}: {flag}"));
            }
            "Arguments" if words.starts_with(['<', '[']) => {
                lines.insert(format!("{title}: {name}"));
                // An argument that is no longer required accepts the same command lines.
                if name.starts_with('[') {
                    lines.insert(format!("{title}: {}", name.replacen('[', "<", 1).replacen(']', ">", 1)));
                }
            }
            _ => {}
        }
    }
}

const RULES: &str = "
domain: d
descriptors:
- key: user
  detailed_metric: true
  rate_limit: { unit: hour, requests_per_unit: 5 }
- key: leased
  rate_limit: { unit: hour, requests_per_unit: 500, consistency: leased }
- key: eventual
  rate_limit: { unit: hour, requests_per_unit: 500, consistency: eventual }
- key: class
  rate_limit: { capacity: 100/m, class: plan, shares: { gold: { min: 50 } } }
- key: elastic
  rate_limit: { unit: hour, requests_per_unit: 5, elastic: { resource: db, up_to: 200% } }
";

/// Lists the name, the type and the labels of each metric, with the memory store, with Redis, and with peers.
#[tokio::test]
async fn metrics_keep_their_names_types_and_labels() {
    let (redis, folder) = (RedisServer::start(), rules(&[("d.yaml", RULES)]));
    let builder = || Server::builder().rules(folder.path());
    let peer = builder().set("cluster.peers", "127.0.0.1:1").set("cluster.addr", "127.0.0.1:0");
    let peer = peer.set("cluster.allow_plaintext", "true").set("cluster.join_timeout", "1ms");
    let mut lines = BTreeSet::new();
    for server in [Operator::with(builder()).server, builder().store(&redis.url()).start(), peer.start()] {
        for key in ["user", "leased", "eventual", "class", "elastic"] {
            server.client().await.check(request_for("d", &[(key, "x"), ("plan", "gold")])).await.unwrap();
            server.client().await.check(request_for("d", &[(key, "x")])).await.unwrap();
        }
        add_metrics(&server.get("/metrics"), &mut lines);
    }
    assert_keeps("metrics.txt", &lines);
}

fn add_metrics(page: &str, lines: &mut BTreeSet<String>) {
    for line in page.lines() {
        if let Some(kind) = line.strip_prefix("# TYPE ") {
            lines.insert(format!("type {kind}"));
        } else if !line.starts_with('#') {
            let series = line.rsplit_once(' ').map_or(line, |(series, _)| series);
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            let names = labels.split("\",").filter_map(|label| label.split_once('=')).map(|(name, _)| name);
            lines.insert(format!("series {name} {}", names.collect::<Vec<_>>().join(" ")).trim_end().to_owned());
        }
    }
}
