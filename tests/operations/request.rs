//! `sluicegate request`: one rate limit request from the shell.

use std::process::{Command, Output};

use crate::support::{
    Operator, Server,
    certificates::{Authority, Files},
    rules,
    server::{command, post},
};

const RULES: &str = "domain: shop\ndescriptors:\n\
                     - key: user\n  rate_limit: { name: per_user, unit: year, requests_per_unit: 2 }\n\
                     - key: slow\n  rate_limit: { unit: day, unit_multiplier: 7, requests_per_unit: 5 }\n\
                     - key: free\n";

fn run(command: &mut Command) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

fn request(addr: &str, args: &[&str]) -> (Option<i32>, String, String) {
    run(command().args(["request", "--addr", addr]).args(args))
}

fn start() -> (tempfile::TempDir, Server, String) {
    let folder = rules(&[("shop.yaml", RULES)]);
    let server = Server::start(folder.path(), "memory");
    let addr = format!("http://{}", server.grpc);
    (folder, server, addr)
}

#[test]
fn the_decision_is_printed_and_is_the_exit_code() {
    let (_folder, server, addr) = start();
    // Asking does not take hits.
    for _ in 0..3 {
        let (code, text, error) = request(&addr, &["shop", "user=bob", "--hits", "0"]);
        assert_eq!(code, Some(0), "{error}");
        let (first, rest) = text.split_once('\n').unwrap();
        assert_eq!(first, "OK: the request is allowed");
        let expected = "user=bob: OK, limit 2 per year named \"per_user\", remaining 2, reset in ";
        assert!(rest.starts_with(expected), "{text}");
    }
    for (arguments, expected, remaining) in [
        (&["shop", "user=bob", "--hits", "2"][..], 0, "user=bob: OK, limit 2 per year named \"per_user\", remaining 0"),
        (&["shop", "user=bob"], 1, "user=bob: OVER_LIMIT, limit 2 per year named \"per_user\", remaining 0"),
        (&["limit|shop|user=bob"], 1, "user=bob: OVER_LIMIT"),
        (&["shop", "slow=a", "--hits", "3"], 0, "slow=a: OK, limit 5 per 7 days, remaining 2"),
        (&["shop", "usr=bob"], 0, "usr=bob: OK, no rule matched"),
        (&["shop", "free=1"], 0, "free=1: OK, no rule matched, or its rule is unlimited"),
        (&["shop", "user=eve", "--limit", "7 per hour"], 0, "user=eve: OK, limit 7 per hour, remaining 6"),
    ] {
        let (code, text, error) = request(&addr, arguments);
        assert!(code == Some(expected) && text.contains(remaining), "{arguments:?}: {text}{error}");
    }
    // The address can come from the environment, and needs no scheme.
    let mut command = command();
    let (code, text, _) =
        run(command.args(["request", "shop", "user=bob"]).env("SLUICEGATE_GRPC", server.grpc.to_string()));
    assert!(code == Some(1) && text.starts_with("OVER_LIMIT: the request is denied\n"), "{text}");
}

#[test]
fn a_request_has_several_descriptors_after_a_plus() {
    let (_folder, _server, addr) = start();
    let (code, text, _) = request(&addr, &["shop", "user=ann", "+", "slow=a", "+", "free=1", "x=2"]);
    let names: Vec<&str> = text.lines().skip(1).map(|line| line.split(':').next().unwrap()).collect();
    assert_eq!((code, names), (Some(0), vec!["user=ann", "slow=a", "free=1 x=2"]), "{text}");
}

#[test]
fn json_is_that_of_the_http_listener() {
    let (_folder, server, addr) = start();
    let (code, text, _) = request(&addr, &["shop", "user=ann", "+", "free=1", "--hits", "0", "--json"]);
    let body = r#"{"domain": "shop", "descriptors": [
        {"entries": [{"key": "user", "value": "ann"}], "hitsAddend": 0},
        {"entries": [{"key": "free", "value": "1"}], "hitsAddend": 0}]}"#;
    let (_, expected) = post(&format!("http://{}/json", server.http), body.as_bytes());
    let read = |text: &str| {
        let mut json: serde_json::Value = serde_json::from_str(text).unwrap();
        // It is counted down between the two requests.
        assert!(json["statuses"][0]["durationUntilReset"].take().is_string(), "{text}");
        json
    };
    assert_eq!((code, read(&text)), (Some(0), read(&expected)));
}

#[test]
fn tls_uses_the_given_authority() {
    let authority = Authority::new("ours");
    let files = Files::new();
    let (certificate, key) = authority.sign();
    let server = Server::builder()
        .set("grpc.tls.cert_file", &files.write("cert.pem", &certificate))
        .set("grpc.tls.key_file", &files.write("key.pem", &key))
        .start();
    let addr = format!("https://{}", server.grpc);
    let (trusted, other) = (files.write("ca.pem", &authority.pem), Authority::new("other").pem);
    let other = files.write("other.pem", &other);
    let (code, text, error) = request(&addr, &["example", "user=x", "--ca", &trusted]);
    assert!(code == Some(0) && text.starts_with("OK"), "{text}{error}");
    let (code, _, error) = request(&addr, &["example", "user=x", "--ca", &other]);
    assert!(code == Some(2) && error.contains("certificate"), "{error}");
    let (code, _, error) = request(&format!("http://{}", server.grpc), &["example", "user=x", "--ca", &trusted]);
    assert!(code == Some(2) && error.contains("--ca and --cert require an https:// address"), "{error}");
}

/// Exit code 1 is a denial, so that every error must have another one.
#[test]
fn an_error_has_exit_code_2_and_names_the_wrong_port() {
    let folder = rules(&[("shop.yaml", RULES)]);
    let operator = Operator::start(folder.path(), "memory");
    let http = format!("http://{}", operator.server.http);
    let grpc = format!("http://{}", operator.server.grpc);
    let unused = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    for (addr, arguments, expected) in [
        (&http, &["shop", "user=bob"][..], "this is not the gRPC address of a rate limit service (default port 8081"),
        (&operator.addr, &["shop", "user=bob"], "default port 8081"),
        (&unused, &["shop", "user=bob"], &unused),
        (&grpc, &["shop"], "\"shop\" has no entries: add KEY=VALUE"),
        (&grpc, &["shop", "user=bob", "+"], "a descriptor must follow the +"),
        (&grpc, &["", "user=bob"], "domain"),
        (&grpc, &["shop", "user=bob", "--limit", "blocked"], "cannot be requested: use a number per unit"),
        (&grpc, &["shop", "user=bob", "--hits", "many"], "invalid value 'many'"),
        (&"ftp://a:1".to_owned(), &["shop", "user=bob"], "is not an address such as http://127.0.0.1"),
    ] {
        let (code, text, error) = request(addr, arguments);
        assert!(
            code == Some(2) && text.is_empty() && error.contains(expected),
            "{arguments:?} {code:?}: {text}{error}"
        );
    }
}
