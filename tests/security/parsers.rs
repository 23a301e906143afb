//! Texts that callers send to be parsed: they cannot stop the process, or make it use much memory.

use serde_json::json;

use crate::support::{Server, server::post};

const RULES: &str = "domain: api\ndescriptors:\n- key: user\n  rate_limit: { unit: year, requests_per_unit: 2 }\n";
/// Growth of the resident memory in bytes that is not exceeded by any text of a megabyte.
const MAX_GROWTH: u64 = 150 << 20;

/// Returns lists of ten aliases each to the list before: ten to the power of 16 values in 400 bytes.
pub(super) fn nested_aliases() -> String {
    let mut text = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for level in 1..16 {
        text += &format!("a{level}: &a{level} [{}]\n", format!("*a{}, ", level - 1).repeat(10));
    }
    text
}

/// Returns a list of aliases to one long text.
pub(super) fn long_aliases() -> String {
    format!("a: &a {}\nb: [{}]\n", "x".repeat(20_000), "*a, ".repeat(10_000))
}

/// Posts a text, which must be rejected, and checks that the service is well.
fn reject(server: &Server, method: &str, body: &serde_json::Value) {
    let before = server.resident_memory();
    let (code, answer) = post(&server.url(&format!("/v1/{method}")), body.to_string().as_bytes());
    assert_eq!(code, 400, "{answer}");
    let growth = server.resident_memory().saturating_sub(before);
    assert!(growth < MAX_GROWTH, "{method} took {growth} bytes: {answer}");
    assert_eq!(server.get("/healthcheck"), "OK");
}

/// The method needs no token, whatever `console.entities` is.
#[test]
fn no_mapping_of_a_stranger_stops_the_process_or_fills_its_memory() {
    let server = Server::builder().set("console.entities", "token").start();
    for mapping in [
        "- ".repeat(10_000),
        "[".repeat(50_000),
        "{a: ".repeat(12_000),
        "? ".repeat(25_000),
        nested_aliases(),
        long_aliases(),
        format!("domain: d\ntime: t\ndescriptors:\n{}", "- [{ key: a, value: b }]\n".repeat(2_000)),
    ] {
        reject(&server, "ReadDescriptors", &json!({ "text": "{\"t\": 1}", "mapping": mapping }));
    }
}

#[test]
fn no_text_of_a_simulation_stops_the_process_or_fills_its_memory() {
    let server = Server::builder().start();
    let line = r#"{"t": 1, "user": "bob"}"#;
    for text in ["- ".repeat(10_000), nested_aliases(), long_aliases()] {
        let simulation = json!({ "accessLog": line, "mapping": text });
        reject(&server, "Simulate", &simulation);
        let file = json!({ "name": "a.yaml", "text": format!("{RULES}{text}") });
        reject(&server, "Simulate", &json!({ "accessLog": line, "mapping": "{}", "files": [file] }));
        let change = json!({ "target": { "plan": { "domain": "d", "key": "k", "value": "v" } }, "value": text });
        reject(&server, "Simulate", &json!({ "accessLog": line, "mapping": "{}", "changes": [change] }));
    }
}

/// Each line becomes a request with all constants of the mapping.
#[test]
fn a_simulation_of_many_lines_with_many_constants_uses_little_memory() {
    let server = Server::builder().start();
    let constants = format!("- [{}]\n", "{ key: a, value: some-longer-constant }, ".repeat(32)).repeat(40);
    let mapping = format!("domain: example\ntime: t\ndescriptors:\n{constants}");
    let log = "{\"t\": 1}\n".repeat(20_000);
    let before = server.resident_memory();
    let body = json!({ "accessLog": log, "mapping": mapping }).to_string();
    let (code, answer) = post(&server.url("/v1/Simulate"), body.as_bytes());
    assert_eq!(code, 200, "{answer}");
    let growth = server.resident_memory().saturating_sub(before);
    assert!(growth < MAX_GROWTH, "{growth} bytes");
}
