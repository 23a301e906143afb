//! SECURITY.md names a test for each bound, and the test exists.

use std::{collections::BTreeSet, fs};

use crate::support::{repository, rust_sources};

/// Returns the rows of the table with these columns.
fn rows(text: &str, header: &str) -> Vec<Vec<String>> {
    let table = text.split_once(header).unwrap_or_else(|| panic!("no table with the columns {header}")).1;
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    rows.map(|row| row.trim_matches('|').split(" | ").map(|cell| cell.trim().to_owned()).collect()).collect()
}

/// Returns the names in backquotes.
fn quoted(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

/// Each row names at least one test as `path: function, function`, and each function has the attribute of a test.
#[test]
fn every_bound_in_the_threat_model_has_a_test() {
    let text = fs::read_to_string(repository("SECURITY.md")).unwrap();
    let rows = rows(&text, "| attack | bound | test |");
    assert!(rows.len() >= 20, "only {} rows", rows.len());
    let mut missing = Vec::new();
    for row in &rows {
        let [attack, _bound, tests] = &row[..] else { panic!("not three columns: {row:?}") };
        let names = quoted(tests);
        assert!(!names.is_empty(), "{attack} has no test");
        for name in names {
            let (file, functions) = name.split_once(": ").unwrap_or_else(|| panic!("not `path: function`: {name}"));
            let source = fs::read_to_string(repository(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
            let missing_functions = functions.split(", ").filter(|function| !has_test(&source, function));
            missing.extend(missing_functions.map(|function| format!("{attack}: {file}: {function}")));
        }
    }
    assert!(missing.is_empty(), "tests that do not exist:\n{}", missing.join("\n"));
}

/// Returns whether a source contains a test function with this name: with an attribute, or in `proptest!`.
fn has_test(source: &str, function: &str) -> bool {
    let Some((before, _)) = source.split_once(&format!("fn {function}(")) else { return false };
    let attribute = before.rsplit("\n\n").next().unwrap_or_default();
    let attribute = attribute.rsplit("}\n").next().unwrap_or_default();
    attribute.contains("#[test]") || attribute.contains("test]\n") || attribute.contains("test(")
}

/// A test of this module that no row names would not be found by readers of the threat model.
#[test]
fn every_test_of_this_module_is_in_the_table() {
    let text = fs::read_to_string(repository("SECURITY.md")).unwrap();
    let rows = rows(&text, "| attack | bound | test |");
    let named: BTreeSet<String> = rows
        .iter()
        .flat_map(|row| quoted(&row[2]))
        .flat_map(|name| name.split([':', ',']).map(|part| part.trim().to_owned()))
        .collect();
    for (file, source) in rust_sources("tests/security").into_iter().filter(|(file, _)| !file.ends_with("table.rs")) {
        for (index, line) in source.lines().enumerate() {
            let is_test = line.trim() == "#[test]" || line.trim().starts_with("#[tokio::test");
            let function =
                is_test.then(|| source.lines().skip(index + 1).find_map(|next| next.split_once("fn "))).flatten();
            let name = function.map(|(_, rest)| rest.split('(').next().unwrap_or_default());
            assert!(name.is_none_or(|name| named.contains(name)), "{file}: {name:?} is not in SECURITY.md");
        }
    }
}
