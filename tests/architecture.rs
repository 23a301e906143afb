//! The order of layers, held against the `use` lines: docs/architecture.md draws it.

use std::{collections::BTreeMap, fs, path::Path};

use super::support::repository;

/// What each module of `src/` may use of the others. Telemetry's and metrics' handles may be held by anyone above.
const MAY_USE: &[(&str, &[&str])] = &[
    ("main", &["cli"]),
    ("cli", &["app", "engine", "replay", "rules", "service", "settings", "store", "traffic"]),
    ("app", &["engine", "metrics", "rules", "service", "settings", "store", "telemetry", "transport"]),
    ("settings", &["engine", "service", "store", "telemetry", "transport"]),
    ("transport", &["engine", "metrics", "rules", "service", "store", "telemetry"]),
    ("replay", &["engine", "metrics", "rules", "store", "traffic"]),
    ("service", &["algorithm", "engine", "metrics", "rules", "store", "traffic"]),
    ("traffic", &["engine", "rules"]),
    ("engine", &["algorithm", "metrics", "rules", "store"]),
    ("rules", &["algorithm"]),
    ("store", &["algorithm", "metrics"]),
    ("telemetry", &["metrics"]),
    ("metrics", &[]),
    ("algorithm", &[]),
    ("allocator", &[]),
    ("duration", &[]),
    ("errors", &[]),
    ("settled", &[]),
];

/// Small modules that any module may use.
const COMMON: [&str; 4] = ["allocator", "duration", "errors", "settled"];

/// Crates that stay where they belong. `ctl` is a client, and knows nothing of the service but its protocol.
const CONFINED: &[(&str, &str)] = &[
    ("tonic", "transport, cli/ctl, telemetry/otlp"),
    ("prost", "transport, cli/ctl, telemetry/exposition, telemetry/otlp"),
    ("prost_types", "transport, cli/ctl, telemetry/exposition"),
    ("opentelemetry_proto", "telemetry/otlp"),
    ("sluicegate_proto", "transport, cli/ctl"),
    ("hyper", "transport"),
    ("axum", "transport"),
    ("redis", "store/redis"),
    ("saphyr_parser", "rules"),
    ("config", "settings, traffic, telemetry/mapping"),
    ("clap", "cli"),
];

fn sources(folder: &Path, found: &mut Vec<(String, String)>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|end| end == "rs") {
            let name = path.strip_prefix(repository("src")).unwrap().with_extension("");
            found.push((name.to_str().unwrap().to_owned(), fs::read_to_string(&path).unwrap()));
        }
    }
}

/// The words that follow `crate::` in the text, also in braces behind it.
fn used(text: &str) -> Vec<String> {
    let first = |text: &str| {
        text.split(|letter: char| !letter.is_alphanumeric() && letter != '_').next().unwrap_or("").to_owned()
    };
    let mut modules = Vec::new();
    for (at, _) in text.match_indices("crate::") {
        let rest = &text[at + "crate::".len()..];
        let Some(list) = rest.strip_prefix('{') else {
            modules.push(first(rest));
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
fn imports_run_downwards() {
    let allowed: BTreeMap<_, _> = MAY_USE.iter().copied().collect();
    let mut files = Vec::new();
    sources(&repository("src"), &mut files);
    assert!(files.len() > 40, "{files:?}");
    let mut seen = std::collections::BTreeSet::new();
    for (name, text) in &files {
        let module = name.split('/').next().unwrap();
        if module == "lib" {
            continue;
        }
        let allowed = allowed.get(module).unwrap_or_else(|| panic!("{module} is not in the table"));
        for other in used(text) {
            seen.insert((module.to_owned(), other.clone()));
            let fine = other == module || COMMON.contains(&other.as_str()) || allowed.contains(&other.as_str());
            assert!(fine, "src/{name}.rs uses crate::{other}, and {module} may not");
        }
        for (external, home) in CONFINED {
            let uses = text.lines().any(|line| {
                let line = line.trim_start();
                line.starts_with(&format!("use {external}::")) || line.contains(&format!(" ::{external}::"))
            });
            assert!(
                !uses || home.split(", ").any(|home| name.starts_with(home)) || module == "app",
                "src/{name}.rs uses {external}, which stays in {home}"
            );
        }
    }
    assert!(seen.contains(&("engine".into(), "store".into())), "the reader of use lines reads nothing: {seen:?}");
}
