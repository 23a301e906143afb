//! Mistakes on the command line: each message names the correction. Everything that a command prints, others accept.

use std::{
    fs,
    net::SocketAddr,
    process::{Command, Output},
};

use crate::support::{
    Operator, Server, certificates::Files, operator::OPERATE, repository, request_for, rules, server::command,
};

const RULES: &str = "domain: shop\ndescriptors:\n\
                     - key: user\n  rate_limit: { name: per_user, unit: year, requests_per_unit: 2 }\n  \
                     descriptors: [{ key: path, rate_limit: { unit: year, requests_per_unit: 1 } }]\n\
                     - key: bucket\n  rate_limit: { unit: hour, requests_per_unit: 50, algorithm: token_bucket }\n\
                     - key: job\n  rate_limit: { algorithm: concurrency, limit: 5, hold: 90s }\n\
                     - key: free\n";

fn run(command: &mut Command) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

fn start() -> (tempfile::TempDir, Operator) {
    let folder = rules(&[("shop.yaml", RULES)]);
    let operator = Operator::start(folder.path(), "memory");
    (folder, operator)
}

#[test]
fn ctl_names_the_admin_port_if_another_port_answers() {
    let (_folder, operator) = start();
    for port in [operator.server.http, operator.server.grpc] {
        let addr = format!("http://{port}");
        let (code, _, error) = run(command().args(["ctl", "--addr", &addr, "--token", OPERATE, "rules"]));
        let expected = format!("{addr}: this is not the admin address (default port 8082;");
        assert!(code == Some(1) && error.contains(&expected), "{error}");
    }
    // The scheme can be left out.
    let addr = operator.addr.trim_start_matches("http://");
    let (code, text, error) = run(command().args(["ctl", "--addr", addr, "--token", OPERATE, "health"]));
    assert!(code == Some(0) && text.starts_with(&operator.addr), "{error}");
}

#[test]
fn ctl_and_request_say_what_may_be_missing_at_an_address() {
    let (_folder, operator) = start();
    // Nothing listens at port 1.
    let closed = "http://127.0.0.1:1";
    let https = |address: SocketAddr| format!("https://{address}");
    let (grpc, admin) = (https(operator.server.grpc), operator.addr.replace("http:", "https:"));
    for (words, expected) in [
        (&["ctl", "--addr", closed, "--token", OPERATE, "health"][..], "only if admin.addr is set"),
        (&["request", "--addr", closed, "shop", "user=bob"], "nothing listens at this address; the gRPC port"),
        (&["ctl", "--addr", &admin, "--token", OPERATE, "health"], "so use http:// in place of https://"),
        (&["request", "--addr", &grpc, "shop", "user=bob"], "so use http:// in place of https://"),
    ] {
        let (_, _, error) = run(command().args(words));
        assert!(error.contains(expected), "{words:?}: {error}");
    }
}

/// A variable can be set in the profile of a shell.
#[test]
fn a_token_of_the_command_line_takes_precedence_over_variables() {
    let (_folder, operator) = start();
    let files = Files::new();
    let (token, other) = (files.write("token", OPERATE), files.write("other", "another-token"));
    let missing = format!("{other}.missing");
    let empty = files.write("empty", "\n");
    let none: &[(&str, &str)] = &[];
    for (arguments, variables, expected) in [
        (&["--token", OPERATE][..], &[("SLUICEGATE_TOKEN_FILE", other.as_str())][..], Ok(())),
        (&["--token-file", &token], &[("SLUICEGATE_TOKEN", "another-token")], Ok(())),
        (&[], &[("SLUICEGATE_TOKEN", OPERATE), ("SLUICEGATE_TOKEN_FILE", "")], Ok(())),
        (&[], &[("SLUICEGATE_TOKEN_FILE", &token)], Ok(())),
        (&[], &[("SLUICEGATE_TOKEN_FILE", &missing)], Err("cannot read")),
        (&["--token-file", &empty], none, Err("the token file")),
        (&["--token-file", &token, "--token", OPERATE], none, Err("cannot be used with")),
    ] {
        let ctl = ["ctl", "--addr", &operator.addr, "rules"];
        let (code, _, error) = run(command().args(ctl).args(arguments).envs(variables.iter().copied()));
        match expected {
            Ok(()) => assert_eq!(code, Some(0), "{arguments:?} {variables:?}: {error}"),
            Err(expected) => assert!(code != Some(0) && error.contains(expected), "{arguments:?}: {error}"),
        }
    }
}

#[test]
fn removing_what_is_not_set_is_an_error() {
    let (_folder, operator) = start();
    for words in [
        &["limit", "unset", "shop", "user=bob"][..],
        &["limit", "unset", "shop", "user=bob", "--json"],
        &["switch", "clear", "rule", "shop", "per_user"],
        &["switch", "clear", "everything", "--here"],
    ] {
        let error = operator.try_ctl(words).unwrap_err();
        assert!(error.contains("nothing was removed"), "{words:?}: {error}");
    }
    let here = ["switch", "clear", "everything", "--here"];
    operator.ctl(&["switch", "shadow", "everything", "--here"]);
    assert!(operator.ctl(&here).ends_with("in force on this instance until it restarts\n"));
}

#[test]
fn an_end_is_printed_alike_by_all_commands() {
    let (_folder, operator) = start();
    let set = operator.ctl(&["limit", "set", "shop", "user=bob", "5/day", "--for", "1h"]);
    let end = set.split(" until ").nth(1).unwrap().split('\n').next().unwrap();
    assert!(operator.ctl(&["limit", "list"]).contains(end), "{set}");
    assert!(operator.ctl(&["inspect", "shop", "user=bob"]).contains(end), "{set}");
}

#[test]
fn a_cost_that_never_fits_is_named() {
    let (folder, operator) = start();
    let text = operator.ctl(&["inspect", "shop", "user=bob", "--hits", "2"]);
    assert!(text.contains("a request would be allowed") && !text.contains("never"), "{text}");
    let text = operator.ctl(&["inspect", "shop", "user=bob", "--hits", "3"]);
    assert!(text.contains("denied by the rule\nnever: the limit allows at most 2 hits in one request\n"), "{text}");
    let server = Server::builder().rules(folder.path()).set("response.headers", "true").start();
    let address = server.grpc.to_string();
    let request =
        |hits: &str| run(command().args(["request", "--addr", &address, "shop", "user=bob", "--hits", hits])).1;
    assert!(request("3").contains("never: the limit allows at most 2 hits in one request"));
    assert!(!request("2").contains("never"));
}

#[test]
fn the_token_file_of_the_service_is_not_a_token() {
    let (_folder, operator) = start();
    let files = Files::new();
    let one_line = files.write("tokens", &format!("operate {OPERATE} alice\n"));
    for path in [&operator.token_file().display().to_string(), &one_line] {
        let (code, _, error) = run(command().args(["ctl", "--addr", &operator.addr, "--token-file", path, "health"]));
        let expected = format!("the token file {path} must contain the token alone, not `operate TOKEN NAME`");
        assert!(code == Some(1) && error.contains(&expected), "{error}");
        assert!(!error.contains(OPERATE), "{error}");
    }
    let path = files.write("token", &format!("{OPERATE}\n"));
    let (code, ..) = run(command().args(["ctl", "--addr", &operator.addr, "--token-file", &path, "health"]));
    assert_eq!(code, Some(0));
}

#[test]
fn other_words_for_a_command_lead_to_its_name() {
    for (words, expected) in [
        (&["ctl", "switch", "disable", "rule", "shop", "per_user"][..], "'off'"),
        (&["ctl", "switch", "enable", "rule", "shop", "per_user"], "'enforce', 'clear'"),
        (&["ctl", "limit", "remove", "shop", "user=bob"], "'unset'"),
        (&["validate", "rules"], "'check'"),
        (&["start"], "'serve'"),
    ] {
        let (code, _, error) = run(command().args(words));
        assert!(code == Some(2) && error.contains("tip:") && error.contains(expected), "{words:?}: {error}");
    }
    let (_, _, error) = run(command().args(["ctl", "limit", "disable"]));
    assert!(!error.contains("'off'"), "limits are not switched: {error}");
}

#[test]
fn a_limit_can_be_set_as_it_is_printed() {
    let (_folder, operator) = start();
    for (words, stored) in [
        (&["500", "per", "minute"][..], "500/minute"),
        (&["1,000 per hour"], "1000/hour"),
        (&["5 per 15 minutes"], "{unit: minute, unit_multiplier: 15, requests_per_unit: 5, algorithm: fixed_window}"),
        (&["{unit:", "day,", "requests_per_unit:", "3}"], "{unit: day, requests_per_unit: 3}"),
        (&["blocked"], "blocked"),
    ] {
        let output = operator.ctl(&[&["limit", "set", "shop", "user=bob"], words].concat());
        assert!(output.starts_with(&format!("limit|shop|user=bob: {stored}")), "{output}");
    }
    // The limits that rules and counters print are limits of overrides, also in JSON.
    let listed = operator.ctl(&["rules", "shop", "--json"]);
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    let limits: Vec<&str> =
        listed["rules"].as_array().unwrap().iter().map(|rule| rule["limit"].as_str().unwrap()).collect();
    assert_eq!(
        limits,
        ["2 per year", "1 per year", "50 per hour, token_bucket", "5 in flight, each for at most 1m 30s, concurrency"]
    );
    for limit in limits {
        let target = r#"{"limit": {"domain": "shop", "entries": [{"key": "user", "value": "eve"}]}}"#;
        let body = format!(r#"{{"changes": [{{"target": {target}, "value": "{limit}"}}]}}"#);
        let (code, answer) = operator.call(OPERATE, "PutOverrides", &body);
        assert_eq!(code, 200, "{limit}: {answer}");
        let inspected = operator.ctl(&["inspect", "shop", "user=eve"]);
        assert!(inspected.contains(&format!("limit {limit};")), "{limit}: {inspected}");
    }
    let error = operator.try_ctl(&["limit", "set", "shop", "user=bob", "500/min"]).unwrap_err();
    assert_eq!(error.matches("is not a limit").count(), 1, "{error}");
    let error = operator.try_ctl(&["limit", "set", "shop", "user", "path=/a", "5/day"]).unwrap_err();
    assert!(error.contains("\"user\" is not KEY=VALUE"), "{error}");
    let error = operator.try_ctl(&["limit", "set", "shop", "user=bob"]).unwrap_err();
    assert!(error.contains("the limit is missing"), "{error}");
}

#[tokio::test]
async fn what_top_and_the_lists_print_is_accepted() {
    let (folder, operator) = start();
    let client = operator.server.client().await;
    for _ in 0..3 {
        client.check(request_for("shop", &[("user", "a|b=c%")])).await.unwrap();
    }
    let top = operator.ctl(&["top"]);
    let entity = top.lines().nth(2).unwrap().split_whitespace().nth(2).unwrap();
    assert_eq!(entity, "shop|user=a%7Cb%3Dc%25");
    let inspected = operator.ctl(&["inspect", entity]);
    // The times until the reset are different.
    let steps = |text: &str| text.split("  reset in ").next().unwrap().to_owned();
    assert_eq!(steps(&inspected), steps(&operator.ctl(&["inspect", "shop", "user=a|b=c%"])));
    assert!(inspected.contains("used 3, remaining 0"), "{inspected}");
    assert!(operator.ctl(&["refund", entity]).contains("used 2"));
    assert!(operator.ctl(&["reset", entity]).contains(": reset"));
    operator.ctl(&["limit", "set", entity, "7/day"]);
    let list = operator.ctl(&["limit", "list"]);
    let name = list.lines().nth(1).unwrap().split_whitespace().next().unwrap();
    assert_eq!(name, format!("limit|{entity}"));
    assert!(operator.ctl(&["limit", "get", name]).contains("7/day"));
    assert!(operator.ctl(&["limit", "list", name]).contains("7/day"));
    assert!(operator.ctl(&["limit", "unset", name]).contains("removed"));
    let check = |words: &[&str]| run(command().arg("check").arg(folder.path()).arg("--explain").args(words)).1;
    assert_eq!(check(&[entity]), check(&["shop", "user=a|b=c%"]));
    // The filter of `top` accepts each name of a rule.
    for rule in ["per_user", "user", "shop.user", "shop|user", "shop|per_user"] {
        assert!(operator.ctl(&["top", "--rule", rule]).contains(entity), "{rule}");
    }
    // So do switches.
    for scope in [
        &["rule", "shop", "per_user"][..],
        &["rule", "shop", "shop.user"],
        &["rule", "shop.user"],
        &["rule", "shop|per_user"],
        &["rule|shop|per_user"],
        &["switch|rule|shop|user"],
    ] {
        operator.ctl(&[&["switch", "shadow"], scope].concat());
        assert!(operator.ctl(&["rules", "shop"]).contains("switch shadow"), "{scope:?}");
        assert!(operator.ctl(&[&["switch", "clear"], scope].concat()).contains("removed"), "{scope:?}");
    }
    assert!(operator.ctl(&["switch", "list"]).contains("no switch is set"));
}

#[test]
fn filters_with_unknown_names_are_errors() {
    let (_folder, operator) = start();
    for (words, expected) in [
        (&["rules", "shopp"][..], "there is no domain \"shopp\" with rules; did you mean \"shop\"?"),
        (&["top", "--domain", "shopp"], "there is no domain \"shopp\" with rules; did you mean \"shop\"?"),
        (&["top", "--last", "2d"], "entities are kept for one hour"),
        (&["top", "--last", "500ms"], "from 1s to 1h"),
        (&["inspect", "shop", "user=bob", "--hits", "0"], "0 is not in 1.."),
        (&["limit", "set", "shop", "user=*", "5/day"], "a star is no wildcard in an override"),
        (&["top", "--rule", "peruser"], "no domain has a rule \"peruser\"; did you mean \"per_user\"?"),
        (&["top", "--domain", "shop", "--rule", "usr"], "domain \"shop\" has no rule \"usr\"; did you mean \"user\"?"),
        (&["switch", "off", "rule", "shop.usr"], "no rule has the path \"shop.usr\""),
    ] {
        let error = operator.try_ctl(words).unwrap_err();
        assert!(error.contains(expected), "{words:?}: {error}");
    }
    // A rule without entities is no mistake.
    assert_eq!(operator.ctl(&["top", "--rule", "shop.user"]).lines().count(), 2);
}

#[test]
fn inspect_says_that_no_rule_applies() {
    let (_folder, operator) = start();
    operator.ctl(&["limit", "set", "shop", "user=bob", "5/day"]);
    for (words, lines) in [
        (
            &["inspect", "shop", "usr=bob"][..],
            &["so nothing is limited (other branches are not tried); did you mean \"user\"?"][..],
        ),
        (&["inspect", "shopp", "user=bob"], &["nothing is limited; did you mean \"shop\"?"]),
        (
            &["inspect", "shop", "path=/a", "user=bob"],
            &["in another order a rule applies to these entries: user, path"],
        ),
        (
            &["inspect", "shop", "user=bob", "path=/a", "method=GET"],
            &["override without effect, because no rule applies: limit|shop|user=bob 5/day"],
        ),
    ] {
        let text = operator.ctl(words);
        for line in lines {
            assert!(text.contains(line), "{words:?}: {text}");
        }
        assert!(text.ends_with("now: no rule applies, so a request is allowed without being counted\n"), "{text}");
    }
    // An override of exactly this descriptor applies without a rule.
    operator.ctl(&["limit", "set", "shop", "other=1", "5/day", "--allow-unknown"]);
    let text = operator.ctl(&["inspect", "shop", "other=1"]);
    assert!(text.contains("override: limit|shop|other=1 5/day") && text.contains("allowed by an override"), "{text}");
}

#[test]
fn check_reads_one_file() {
    let folder = rules(&[("a.yaml", RULES), ("b.yaml", "domain: b\nextra: 1\n")]);
    let file = |name: &str| folder.path().join(name);
    let (code, text, _) = run(command().arg("check").arg(file("a.yaml")));
    let (note, summary) = text.split_once('\n').unwrap();
    assert!(note.contains("a.yaml:4:39: note: a window of the unit year has 365 days"), "{text}");
    assert_eq!((code, summary), (Some(0), "1 files, 1 domains, 4 limits: no errors\n"));
    let (code, text, _) = run(command().arg("check").arg(file("b.yaml")));
    assert!(code == Some(1) && text.contains("b.yaml:2:1: unknown key \"extra\""), "{text}");
    let (code, _, error) = run(command().arg("check").arg(file("c.yaml")));
    assert!(code == Some(1) && error.contains("c.yaml: No such file"), "{error}");
}

#[test]
fn explain_can_require_a_limit() {
    let folder = rules(&[("a.yaml", RULES)]);
    for (descriptor, required) in [
        (&["shop", "user=bob"][..], Some(0)),
        (&["shop|user=bob"], Some(0)),
        (&["shop", "free=1"], Some(1)),
        (&["shop", "usr=bob"], Some(1)),
        (&["shopp", "user=bob"], Some(1)),
        (&["shop"], Some(1)),
    ] {
        let explain = |option: Option<&str>| {
            run(command().arg("check").arg(folder.path()).args(option).arg("--explain").args(descriptor))
        };
        let (code, text, _) = explain(None);
        assert_eq!(code, Some(0), "the exit code of 0.1.0: {text}");
        let (code, same, _) = explain(Some("--require-limit"));
        assert_eq!((code, same), (required, text), "{descriptor:?}");
    }
    let (_, text, _) = run(command().arg("check").arg(folder.path()).args(["--explain", "shop"]));
    assert!(text.contains("a descriptor has an entry KEY=VALUE for each level of a rule"), "{text}");
    let (code, ..) = run(command().arg("check").arg(folder.path()).arg("--require-limit"));
    assert_eq!(code, Some(2), "there is no descriptor");
}

#[test]
fn simulate_fails_if_it_can_read_nothing() {
    let (folder, files) = (rules(&[("a.yaml", RULES)]), Files::new());
    let json = files.write("access.json", "{\"at\": 1700000000, \"user\": \"a\"}\n");
    let nginx = files.write("access.log", "192.0.2.1 - - [27/Nov/2026:02:00:00 +0000] \"GET / HTTP/1.1\" 200 5\n");
    let mapping = files.write("map.yaml", "domain: shop\ntime: at\ndescriptors:\n- [{ key: user, field: user }]\n");
    let empty = tempfile::tempdir().unwrap();
    let empty = empty.path().to_str().unwrap();
    let simulate = |arguments: &[&str]| run(command().args(["simulate", "--rules"]).arg(folder.path()).args(arguments));
    for (arguments, expected) in [
        (&["--traffic", &json][..], "an access log in JSON needs --mapping FILE"),
        (&["--traffic", empty], "the traffic contains no request"),
        (&["--traffic", &nginx, "--mapping", &mapping], "no line is a JSON object with the fields that"),
        (&["--traffic", &nginx, "--mapping", &mapping, "--json"], "no line is a JSON object with the fields that"),
    ] {
        let (code, text, error) = simulate(arguments);
        assert!(code == Some(1) && text.is_empty() && error.contains(expected), "{arguments:?}: {text}{error}");
    }
    assert_eq!(simulate(&["--traffic", &json, "--mapping", &mapping]).0, Some(0));
    let other = files.write("other.yaml", "domain: shopp\ntime: at\ndescriptors:\n- [{ key: user, field: user }]\n");
    let (code, text, error) = simulate(&["--traffic", &json, "--mapping", &other]);
    assert!(code == Some(1) && text.contains("1 requests"), "the result is printed: {text}");
    assert!(error.contains("no rule matches a request of the traffic"), "{error}");
}

#[test]
fn a_closed_pipe_ends_a_command_quietly() {
    let (folder, operator) = start();
    let files = Files::new();
    let json = files.write("access.json", "{\"at\": 1700000000, \"user\": \"a\"}\n");
    let mapping = files.write("map.yaml", "domain: shop\ntime: at\ndescriptors:\n- [{ key: user, field: user }]\n");
    operator.ctl(&["limit", "set", "shop", "user=bob", "5/day"]);
    let rules = folder.path().to_str().unwrap();
    let grpc = operator.server.grpc.to_string();
    let http = operator.server.http.to_string();
    let ctl = ["ctl", "--addr", &operator.addr, "--token", OPERATE];
    let simulate = ["simulate", "--traffic", &json, "--mapping", &mapping];
    for arguments in [
        &["completions", "bash"][..],
        &["completions", "zsh"],
        &["man"],
        &["man", "ctl"],
        &["--help"],
        &["schema", "rules"],
        &["schema", "settings"],
        &["--print-settings"],
        &["migrate", "--from-env"],
        &["check", rules],
        &["check", rules, "--format", "json"],
        &["check", rules, "--explain", "shop", "user=bob"],
        &["shard", "shop", "user=bob", "--rules", rules, "--store", "redis+ring://a", "--nodes", "a,b"],
        &[&simulate[..], &["--rules", rules]].concat(),
        &[&simulate[..], &["--suggest"]].concat(),
        &["request", "--addr", &grpc, "shop", "free=1"],
        &["request", "--addr", &grpc, "shop", "free=1", "--json"],
        &["health", "--http-addr", &http],
        &[&ctl[..], &["rules"]].concat(),
        &[&ctl[..], &["rules", "--json"]].concat(),
        &[&ctl[..], &["top"]].concat(),
        &[&ctl[..], &["health"]].concat(),
        &[&ctl[..], &["inspect", "shop", "user=bob"]].concat(),
        &[&ctl[..], &["limit", "list"]].concat(),
        &[&ctl[..], &["export"]].concat(),
        &[&ctl[..], &["audit"]].concat(),
        &[&ctl[..], &["audit", "--follow"]].concat(),
        &[&ctl[..], &["watch"]].concat(),
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = command().args(arguments).stdout(writer).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!error.contains("panicked") && !error.contains("Broken pipe"), "{arguments:?}: {error}");
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {error}");
    }
}

/// A full disk is an error, unlike a reader that has ended.
#[test]
fn output_that_cannot_be_written_is_an_error() {
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = command().arg("check").arg(repository("deploy/examples")).stdout(full).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && error.contains("No space left on device"), "{error}");
}

#[test]
fn a_folder_of_time_zones_that_cannot_be_read_is_a_warning() {
    let rule = "rate_limit: { unit: day, requests_per_unit: 1, window: calendar, zone: Europe/Berlin }";
    let folder = rules(&[("d.yaml", &format!("domain: d\ndescriptors: [{{ key: k, {rule} }}]"))]);
    let empty = tempfile::tempdir().unwrap();
    let start = || Server::builder().rules(folder.path()).store("memory");
    let has_warning = |server: &Server| server.log().contains("cannot read the time zones in the folder of TZDIR");
    for zones in ["/does/not/exist", empty.path().to_str().unwrap()] {
        assert!(has_warning(&start().env("TZDIR", zones).start()), "{zones}");
    }
    assert!(!has_warning(&start().start()), "the variable is not set");
}
