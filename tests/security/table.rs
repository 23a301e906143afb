//! SECURITY.md names a test for each bound, and the test exists. Its numbers are those of the code.

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
            // `make test` does not run ignored ones.
            let is_test =
                is_test && !source.lines().nth(index + 1).is_some_and(|next| next.trim().starts_with("#[ignore"));
            let function =
                is_test.then(|| source.lines().skip(index + 1).find_map(|next| next.split_once("fn "))).flatten();
            let name = function.map(|(_, rest)| rest.split('(').next().unwrap_or_default());
            assert!(name.is_none_or(|name| named.contains(name)), "{file}: {name:?} is not in SECURITY.md");
        }
    }
}

/// Files, lines in them, and the texts of SECURITY.md that state the numbers in these lines.
const NUMBERS: &[(&str, &str, &str)] = &[
    ("src/transport/cluster/mod.rs", "const MAX_REQUEST_BYTES: usize = 4 << 10;", "4 KiB a request"),
    ("src/transport/cluster/mod.rs", "const MAX_MESSAGE_BYTES: usize = 16 << 20;", "16 MiB a response"),
    ("src/transport/cluster/mod.rs", "const MAX_CONNECTIONS: usize = 1_024;", "half of 1,024"),
    (
        "src/transport/cluster/received.rs",
        "const MAX_BYTES: usize = 64 << 20;",
        "unfinished responses of all members have 64 MiB",
    ),
    (
        "src/transport/cluster/received.rs",
        "const ALWAYS_ALLOWED_BYTES: usize = 4 << 20;",
        "4 MiB for each member in any case",
    ),
    (
        "src/transport/cluster/copy.rs",
        "const COPY_TIMEOUT: Duration = Duration::from_secs(10);",
        "A copy ends after 10 s",
    ),
    (
        "src/transport/cluster/overrides.rs",
        "const BYTES: (f64, f64) = (33_554_432.0, 4_194_304.0);",
        "4 MiB and 50 changes a second after a burst of 32 MiB and 1,000 changes",
    ),
    (
        "src/transport/cluster/overrides.rs",
        "const CHANGES: (f64, f64) = (1_000.0, 50.0);",
        "4 MiB and 50 changes a second after a burst of 32 MiB and 1,000 changes",
    ),
    ("src/service/overrides/peer_limits.rs", "else { 128 << 20 };", "128 MiB of all overrides"),
    ("src/transport/cluster/members.rs", "const MAX_MEMBERS: usize = 1_000;", "1,000 addresses"),
    ("src/transport/cluster/members.rs", "const MAX_CALLERS_PER_NETWORK: usize = 8;", "8 of them from one network"),
    (
        "src/transport/cluster/members.rs",
        "const FIRST_EXCLUSION: Duration = Duration::from_secs(30);",
        "left alone for 30 s to 10 min",
    ),
    (
        "src/transport/cluster/members.rs",
        "const MAX_EXCLUSION: Duration = Duration::from_secs(600);",
        "left alone for 30 s to 10 min",
    ),
    ("src/transport/grpc/connection.rs", "const MAX_HEADER_BYTES: u32 = 80 * 1024;", "80 KiB of headers"),
    ("src/transport/grpc/connection.rs", "const MAX_PENDING_RESETS: usize = 20;", "more than 20 calls"),
    (
        "src/transport/grpc/input.rs",
        "const STALL_TIMEOUT: Duration = Duration::from_secs(10);",
        "10 s without further bytes",
    ),
    ("src/transport/grpc/backpressure.rs", "const MAX_HEAVY_READ_BYTES: usize = 1024;", "1 KiB is read at a time"),
    ("src/transport/grpc/http2.rs", "const MAX_BATCH: usize = 32;", "At most 64 calls"),
    ("src/transport/grpc/http2.rs", "const MAX_NOT_BEGUN: usize = 2 * MAX_BATCH;", "At most 64 calls"),
    ("src/transport/decisions/frames.rs", "const MAX_IN_FLIGHT: usize = 4096;", "4,096 checks in flight"),
    ("src/transport/http_server/mod.rs", "const MAX_HEAD_BYTES: u32 = 16 * 1024;", "heads 16 KiB"),
    ("src/transport/http_server/mod.rs", "const MAX_CONCURRENT_REQUESTS: u32 = 32;", "32 with HTTP/2"),
    ("src/transport/admin/auth.rs", "const MIN_TOKEN_BYTES: usize = 16;", "Tokens have at least 16 bytes"),
    ("src/transport/input.rs", "max_bytes: 64 << 20", "`input.max_bytes` (64 MiB)"),
    ("src/service/activity/mod.rs", "const MAX_VIEWERS: usize = 64;", "64 viewers"),
    ("crates/rules/src/yaml.rs", "const MAX_DEPTH: usize = 128;", "128 levels"),
    ("crates/rules/src/yaml.rs", "const MAX_COPIED_NODES: usize = 400_000;", "400,000 values"),
    (
        "crates/simulator/src/traffic/access_log.rs",
        "const MAX_MAPPING_BYTES: usize = 64 * 1024;",
        "a mapping has 64 KiB",
    ),
    (
        "crates/simulator/src/traffic/access_log.rs",
        "const MAX_DESCRIPTORS: usize = 128;",
        "128 descriptors and 32 entries each",
    ),
    (
        "crates/simulator/src/traffic/access_log.rs",
        "const MAX_ENTRIES: usize = 32;",
        "128 descriptors and 32 entries each",
    ),
];

/// A number cannot change in the code alone.
#[test]
fn the_numbers_of_the_page_are_those_of_the_code() {
    let page = fs::read_to_string(repository("SECURITY.md")).unwrap();
    let page = page.split_whitespace().collect::<Vec<_>>().join(" ");
    for (file, line, text) in NUMBERS {
        let source = fs::read_to_string(repository(file)).unwrap();
        assert!(source.contains(line), "{file} has no longer {line}");
        assert!(page.contains(text), "SECURITY.md does not state {text:?}, which follows from {line} in {file}");
    }
}
