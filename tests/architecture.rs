//! Rules of the structure that the compiler cannot check: dependencies that a crate may not get, directly or through
//! another crate, and the order of the service's modules. docs/design/architecture.md has the same tables.

use std::{collections::BTreeMap, process::Command};

use super::support::{repository, rust_sources};

/// Crates, and the crates that they may not depend on, directly or through another crate.
const MAY_NOT_DEPEND: &[(&str, &[&str])] = &[
    ("algorithm", &["opentelemetry", "redis", "tokio", "tonic", "tracing"]),
    ("metrics", &["opentelemetry", "redis", "tokio", "tonic", "sluicegate-algorithm"]),
    ("rules", &["opentelemetry", "redis", "rustls", "tokio", "tonic", "sluicegate-store"]),
    ("store", &["opentelemetry", "redis", "rustls", "tokio", "tonic", "sluicegate-rules"]),
    ("engine", &["opentelemetry", "redis", "rustls", "tokio", "tonic"]),
    ("local", &["opentelemetry", "redis", "tonic", "sluicegate-engine"]),
    ("peers", &["opentelemetry", "redis", "tonic", "sluicegate-engine"]),
    ("redis", &["opentelemetry", "tonic", "sluicegate-engine", "sluicegate-local"]),
    ("memcached", &["opentelemetry", "redis", "tonic", "sluicegate-engine", "sluicegate-local"]),
    ("simulator", &["opentelemetry", "redis", "tokio", "tonic"]),
    ("ctl", &["opentelemetry", "redis", "sluicegate", "sluicegate-local"]),
];

/// The modules that each module of the service may use.
const MAY_USE: &[(&str, &[&str])] = &[
    ("main", &["cli"]),
    ("cli", &["app", "service", "settings", "store"]),
    ("app", &["process", "service", "settings", "store", "telemetry", "transport"]),
    ("settings", &["service", "store", "telemetry", "transport"]),
    ("transport", &["service", "store", "telemetry"]),
    ("service", &["store"]),
    ("store", &[]),
    ("telemetry", &[]),
    ("process", &[]),
    ("fuzz", &["app", "service", "settings", "store", "telemetry", "transport"]),
    ("allocator", &[]),
    ("budget", &[]),
    ("debounce", &[]),
    ("platform", &[]),
    ("yaml", &[]),
];

/// Small modules, and crates of the workspace under the names of `src/lib.rs`, that any module may use.
const FOR_ALL: [&str; 11] = [
    "algorithm",
    "allocator",
    "budget",
    "debounce",
    "engine",
    "metrics",
    "platform",
    "replay",
    "rules",
    "traffic",
    "yaml",
];

/// Crates and the only modules of the service that may use them.
const CONFINED: &[(&str, &str)] = &[
    ("axum", "transport"),
    ("clap", "cli"),
    ("config", "settings, telemetry/mapping, yaml"),
    ("h2", "transport"),
    ("hyper", "transport"),
    ("opentelemetry", "telemetry"),
    ("opentelemetry_http", "telemetry/otlp"),
    ("opentelemetry_proto", "telemetry/otlp"),
    ("opentelemetry_sdk", "telemetry"),
    ("prost", "transport, telemetry/exposition, telemetry/otlp"),
    ("prost_types", "transport, telemetry/exposition"),
    ("sluicegate_proto", "transport"),
    ("tonic", "transport, telemetry/otlp"),
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
fn modules_of_the_service_use_only_lower_layers() {
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
            let permitted = other == module || FOR_ALL.contains(&other.as_str()) || allowed.contains(&other.as_str());
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
    assert!(seen.contains(&("service".into(), "store".into())), "the use of store by service was not found: {seen:?}");
}

#[test]
fn crates_do_not_depend_on_what_they_must_work_without() {
    for (name, forbidden) in MAY_NOT_DEPEND {
        let package = format!("sluicegate-{name}");
        let mut tree = Command::new(env!("CARGO"));
        tree.args(["tree", "--offline", "--locked", "-e", "normal", "--prefix", "none", "-f", "{p}", "-p", &package]);
        let output = tree.current_dir(repository("")).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let dependencies: Vec<_> = text.lines().filter_map(|line| line.split(' ').next()).collect();
        assert!(dependencies.contains(&"smallvec") || *name == "metrics" || *name == "ctl", "{name}: {text}");
        for other in *forbidden {
            assert!(!dependencies.contains(other), "{package} depends on {other}: cargo tree -p {package} -i {other}");
        }
    }
}

/// A crate is found, understood and tested alone.
#[test]
fn each_crate_has_a_description_and_a_short_readme() {
    let folders = std::fs::read_dir(repository("crates")).unwrap();
    let names: Vec<_> = folders.map(|folder| folder.unwrap().file_name().into_string().unwrap()).collect();
    assert!(names.len() > 15, "{names:?}");
    for name in names {
        let manifest = std::fs::read_to_string(repository(&format!("crates/{name}/Cargo.toml"))).unwrap();
        let manifest: toml::Table = toml::from_str(&manifest).unwrap();
        let package = &manifest["package"];
        assert!(package["description"].as_str().is_some_and(|text| text.ends_with('.')), "{name}");
        let readme = std::fs::read_to_string(repository(&format!("crates/{name}/README.md"))).unwrap();
        assert!(readme.starts_with(&format!("# sluicegate-{name}\n")), "{name}");
        // The engine is embedded by its README alone.
        assert!((4..=25).contains(&readme.lines().count()) || name == "engine", "{name}");
    }
}
