//! The order of layers, checked against the `use` lines. docs/design/architecture.md has the same table.

use std::collections::BTreeMap;

use super::support::rust_sources;

/// The modules that each module of `src/` may use.
const MAY_USE: &[(&str, &[&str])] = &[
    ("main", &["cli"]),
    ("cli", &["app", "engine", "replay", "rules", "service", "settings", "store", "traffic"]),
    ("app", &["engine", "metrics", "rules", "service", "settings", "store", "telemetry", "transport"]),
    ("settings", &["engine", "service", "store", "telemetry", "transport"]),
    ("transport", &["algorithm", "engine", "metrics", "replay", "rules", "service", "store", "telemetry", "traffic"]),
    ("replay", &["engine", "metrics", "rules", "store", "traffic"]),
    ("service", &["algorithm", "engine", "metrics", "replay", "rules", "store", "traffic"]),
    ("traffic", &["engine", "rules"]),
    ("engine", &["algorithm", "metrics", "rules", "store"]),
    ("rules", &["algorithm"]),
    ("store", &["algorithm", "metrics"]),
    ("telemetry", &["metrics"]),
    ("metrics", &[]),
    ("algorithm", &[]),
    ("model_checker", &[]),
    ("test_log", &[]),
    (
        "fuzz",
        &["algorithm", "app", "engine", "rules", "service", "settings", "store", "telemetry", "traffic", "transport"],
    ),
    ("allocator", &[]),
    ("budget", &["metrics"]),
    ("duration", &[]),
    ("errors", &[]),
    ("files", &[]),
    ("platform", &[]),
    ("timestamp", &[]),
    ("yaml_bounds", &[]),
    ("debounce", &[]),
];

/// Small modules that any module may use.
const COMMON: [&str; 11] = [
    "allocator",
    "budget",
    "debounce",
    "duration",
    "errors",
    "files",
    "model_checker",
    "platform",
    "test_log",
    "timestamp",
    "yaml_bounds",
];

/// Crates and the only modules that may use them. `ctl` and `request` are clients and use nothing of the service but its
/// protocols.
const CONFINED: &[(&str, &str)] = &[
    ("tonic", "transport, cli/ctl, cli/grpc, cli/request, telemetry/otlp"),
    ("prost", "transport, cli/ctl, cli/grpc, telemetry/exposition, telemetry/otlp"),
    ("prost_types", "transport, cli/ctl, telemetry/exposition"),
    ("opentelemetry", "telemetry"),
    ("opentelemetry_sdk", "telemetry"),
    ("opentelemetry_http", "telemetry/otlp"),
    ("opentelemetry_proto", "telemetry/otlp"),
    ("sluicegate_proto", "transport, cli/ctl, cli/grpc, cli/request"),
    ("h2", "transport"),
    ("hyper", "transport"),
    ("axum", "transport"),
    ("redis", "store/redis"),
    ("saphyr_parser", "rules, yaml_bounds"),
    ("config", "settings, telemetry/mapping"),
    ("clap", "cli"),
];

/// Returns the modules that follow `crate::` in the text, also those in braces.
fn used_modules(text: &str) -> Vec<String> {
    let first = |text: &str| {
        text.split(|letter: char| !letter.is_alphanumeric() && letter != '_').next().unwrap_or("").to_owned()
    };
    let mut modules = Vec::new();
    for (position, _) in text.match_indices("crate::") {
        let tail = &text[position + "crate::".len()..];
        let Some(list) = tail.strip_prefix('{') else {
            modules.push(first(tail));
            continue;
        };
        let mut depth = 0;
        let mut item = String::new();
        for letter in list.chars() {
            match letter {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => modules.push(first(std::mem::take(&mut item).trim())),
                other if depth == 0 => item.push(other),
                _ => {}
            }
        }
        modules.push(first(item.trim()));
    }
    modules.retain(|module| module.starts_with(|letter: char| letter.is_lowercase()));
    modules
}

#[test]
fn modules_use_only_lower_layers() {
    let allowed: BTreeMap<_, _> = MAY_USE.iter().copied().collect();
    let files = rust_sources("src");
    assert!(files.len() > 40, "{files:?}");
    let mut seen = std::collections::BTreeSet::new();
    for (path, text) in &files {
        let name = path.trim_start_matches("src/").trim_end_matches(".rs");
        let module = name.split('/').next().unwrap();
        if module == "lib" {
            continue;
        }
        let allowed = allowed.get(module).unwrap_or_else(|| panic!("the module {module} is missing in MAY_USE"));
        for other in used_modules(text) {
            seen.insert((module.to_owned(), other.clone()));
            let permitted = other == module || COMMON.contains(&other.as_str()) || allowed.contains(&other.as_str());
            assert!(permitted, "src/{name}.rs uses crate::{other}, which {module} may not use");
        }
        // `app` wires the components, so it may use any crate.
        for (external, home) in CONFINED {
            let uses = text.lines().any(|line| {
                let line = line.trim_start();
                line.starts_with(&format!("use {external}::")) || line.contains(&format!(" ::{external}::"))
            });
            assert!(
                !uses || home.split(", ").any(|home| name.starts_with(home)) || module == "app",
                "src/{name}.rs uses {external}, which only {home} may use"
            );
        }
    }
    assert!(seen.contains(&("engine".into(), "store".into())), "the use of store by engine was not found: {seen:?}");
}
