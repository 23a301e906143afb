//! The command line: its output and its errors.

use std::{
    fs,
    io::{BufRead, BufReader},
    process::{Child, Command, Output, Stdio},
    sync::mpsc,
    thread,
};

use crate::support::{
    DEADLINE, Operator, Server, descriptor, operator::OPERATE, raw_client::Request, repository, request_for, rules,
    server::command, wait_for,
};

fn run(command: &mut Command) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

#[tokio::test]
async fn without_arguments_it_serves_the_example_rules() {
    let builder = Server::builder();
    let server = builder.start();
    let client = server.client().await;
    let answers = [0; 4].map(|_| client.check(request_for("example", &[("user", "bob")])));
    let mut allowed = Vec::new();
    for answer in answers {
        allowed.push(answer.await.unwrap().allowed());
    }
    assert_eq!(allowed, [true, true, true, false]);
}

#[test]
fn check_prints_every_error_of_every_file() {
    let folder = rules(&[
        (
            "a.yaml",
            "domain: a\ndescriptors:\n- key: k\n  rate_limit: {unit: fortnight, requests_per_unit: -1}\n- value: v\n",
        ),
        ("b.yaml", "domain: a\nextra: 1\n"),
        ("c.yaml", "domain: [\n"),
        ("ignored.txt", "nothing"),
    ]);
    let (code, out, _) = run(command().arg("check").arg(folder.path()));
    assert_eq!(code, Some(1));
    let out = out.replace(&format!("{}/", folder.path().display()), "");
    let lines: Vec<_> = out.lines().collect();
    assert!(lines[0].starts_with("a.yaml:4:22: unit \"fortnight\" is not one of second, minute"), "{out}");
    assert!(lines[1].starts_with("a.yaml:4:52: requests_per_unit must be a whole number"), "{out}");
    assert!(lines[2].starts_with("a.yaml:5:3: a descriptor requires a non-empty key"), "{out}");
    assert!(lines[3].starts_with("b.yaml:1:1: domain \"a\" is already defined in a.yaml"), "{out}");
    assert!(lines[4].starts_with("b.yaml:2:1: unknown key \"extra\""), "{out}");
    assert!(lines[5].starts_with("c.yaml:"), "{out}");
    assert_eq!(lines.len(), 6, "{out}");
}

#[test]
fn check_reports_files_that_cannot_be_read_with_the_mistakes_of_the_others() {
    let folder = rules(&[("c.yaml", "domain: c\nfoo: 1\n")]);
    fs::write(folder.path().join("a.yaml"), b"domain: a\n# caf\xe9\n").unwrap();
    std::os::unix::fs::symlink("nowhere", folder.path().join("b.yaml")).unwrap();
    fs::write(folder.path().join("d.yaml"), b"\xff\xfe{\0}\0").unwrap();
    fs::write(folder.path().join("e.yaml"), b"d\0:\0").unwrap();
    let expected = [
        ("a.yaml", Some((2, 6)), "the byte 0xe9 is not valid UTF-8; save the file as UTF-8"),
        ("b.yaml", None, "cannot read the file: No such file or directory (os error 2)"),
        ("c.yaml", Some((2, 1)), "unknown key \"foo\""),
        ("d.yaml", Some((1, 1)), "the file has no domain, or the domain is empty"),
        ("e.yaml", Some((1, 2)), "the file contains a NUL character: it must be UTF-8"),
    ];
    let (code, text, _) = run(command().arg("check").arg(folder.path()));
    assert_eq!((code, text.lines().count()), (Some(1), expected.len()), "{text}");
    let (code, json, _) = run(command().args(["check", "--format", "json"]).arg(folder.path()));
    let list: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((code, list.as_array().unwrap().len()), (Some(1), expected.len()), "{json}");
    for (index, (file, location, message)) in expected.into_iter().enumerate() {
        let place = location.map(|(line, column)| format!(":{line}:{column}")).unwrap_or_default();
        let line = text.lines().nth(index).unwrap();
        assert!(line.contains(&format!("/{file}{place}: {message}")), "{line}");
        let item = &list[index];
        assert!(item["file"].as_str().unwrap().ends_with(file), "{item}");
        assert!(item["message"].as_str().unwrap().contains(message), "{item}");
        let read = item["line"].as_u64().zip(item["column"].as_u64());
        assert_eq!(read, location, "{item}");
    }
    let empty = tempfile::tempdir().unwrap();
    let (code, json, _) = run(command().args(["check", "--format", "json"]).arg(empty.path()));
    assert!(code == Some(1) && json.contains("contains no *.yaml file"), "{json}");
}

/// A warning changes no exit code, also about a file that is not read.
#[test]
fn check_succeeds_with_warnings() {
    let folder = rules(&[("a.yaml", "domain: 'a '\n")]);
    fs::create_dir(folder.path().join("sub")).unwrap();
    fs::write(folder.path().join("sub/b.yaml"), "domain: b\n").unwrap();
    let (code, out, err) = run(command().arg("check").arg(folder.path()));
    assert_eq!(code, Some(0), "{out}{err}");
    assert!(out.contains("sub: warning: the rule files in this folder are not read"), "{out}");
    assert!(out.contains("a.yaml:1:9: warning: the domain \"a \" begins or ends with a space"), "{out}");
}

#[test]
fn check_explains_which_rule_matches_a_descriptor() {
    let examples = repository("deploy/examples");
    let (code, out, _) = run(command().arg("check").arg(&examples));
    assert_eq!(code, Some(0), "{out}");
    let explain = |descriptor: &[&str]| run(command().arg("check").arg(&examples).arg("--explain").args(descriptor)).1;
    let alice = explain(&["example", "user=alice"]);
    assert!(alice.contains("exactly this value") && alice.contains("5 per minute, named \"alice\""), "{alice}");
    let path = explain(&["example", "path=/login/x"]);
    assert!(path.contains("/login/*, with one counter for all values") && path.contains("10 per 5 minutes"), "{path}");
    assert!(explain(&["example", "api=other", "user=x"]).contains("none matches this value"));
    assert!(explain(&["nowhere", "a=b"]).contains("not defined in any rule file"));
    // The explanation names modifier entries: the class, the holder and the plan.
    let shared = explain(&["shedding", "fleet=api", "priority=critical", "request_id=7"]);
    assert!(shared.contains("priority=critical, the request's class (line "), "{shared}");
    assert!(shared.contains("request_id=7, the holder of the request's slots (line "), "{shared}");
    let limit = "limit: 100 in flight, each for at most 1m, concurrency, shared by the classes critical and \"other\" \
                 (all other requests), named \"fleet\", denials are reported as overload";
    assert!(shared.contains(limit), "{shared}");
    assert!(
        explain(&["shedding", "report=x"]).contains("60 per minute, elastic up to 120 while \"db\" has spare capacity")
    );
    for (descriptor, limit) in [
        (&["plans", "user=acme"][..], "limit: 1000 per second, token_bucket, plan \"pro\""),
        (&["plans", "user=bob"], "limit: 50 per second, token_bucket, plan \"free\""),
        (&["plans", "user=bob", "plan=standard"], "limit: 500 per second, token_bucket, plan \"standard\""),
    ] {
        assert!(explain(descriptor).contains(limit), "{}", explain(descriptor));
    }
}

/// Diagnostics are also available in machine-readable formats, with the same exit code.
#[test]
fn check_prints_json_and_sarif() {
    let folder = rules(&[("a b.yaml", "domain: a\nextra: 1\n"), ("b.yaml", "domain: b\nkey: x\n")]);
    let check = |format: &str| run(command().arg("check").arg(folder.path()).args(["--format", format]));
    let (code, text, _) = check("json");
    let diagnostics: serde_json::Value = serde_json::from_str(&text).unwrap();
    let list = diagnostics.as_array().unwrap();
    assert_eq!((code, list.len()), (Some(1), 2), "{text}");
    assert!(list[0]["file"].as_str().unwrap().ends_with("a b.yaml"), "{text}");
    assert_eq!((&list[0]["line"], &list[0]["column"], &list[0]["severity"]), (&2.into(), &1.into(), &"error".into()));
    assert!(list[0]["message"].as_str().unwrap().contains("unknown key \"extra\""), "{text}");
    assert_eq!(list[1]["severity"], "warning");
    let (code, text, _) = check("sarif");
    let sarif: serde_json::Value = serde_json::from_str(&text).unwrap();
    let result = &sarif["runs"][0]["results"][0];
    assert_eq!((code, &sarif["version"], &result["level"]), (Some(1), &"2.1.0".into(), &"error".into()), "{text}");
    let location = &result["locations"][0]["physicalLocation"];
    assert!(location["artifactLocation"]["uri"].as_str().unwrap().ends_with("/a%20b.yaml"), "{location}");
    assert_eq!(location["region"], serde_json::json!({"startLine": 2, "startColumn": 1}));
    let (code, text, _) = run(command().args(["check", "--format", "json"]).arg(repository("deploy/examples")));
    assert_eq!((code, text.as_str()), (Some(0), "[]\n"));
    let (code, ..) = run(command().args(["check", "--format", "json", "--explain", "a"]).arg(folder.path()));
    assert_eq!(code, Some(2), "--explain has no other format");
}

/// The schemas are for editors, and the manual is for users.
#[test]
fn schemas_and_the_manual_are_printed() {
    for (files, expected) in [("rules", "requests_per_unit"), ("settings", "near_limit_ratio")] {
        let (code, text, _) = run(command().args(["schema", files]));
        assert!(code == Some(0) && text.contains(expected), "{text}");
        let schema: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(schema["$schema"], "https://json-schema.org/draft/2020-12/schema");
    }
    let (code, text, _) = run(command().arg("man"));
    assert!(code == Some(0) && text.starts_with(".ie") && text.contains(".TH") && text.contains("simulate"), "{text}");
    let (code, text, _) = run(command().args(["man", "check"]));
    assert!(code == Some(0) && text.contains("sarif"), "{text}");
    let (code, _, error) = run(command().args(["man", "nothing"]));
    assert!(code == Some(1) && error.contains("unknown command \"nothing\""), "{error}");
}

#[test]
fn settings_are_layered_and_printed_without_secrets() {
    let mut command = command();
    command.args(["serve", "--print-settings", "--store", "redis://:hunter2@host:1"]);
    let (code, out, _) = run(command.env("SLUICEGATE__REDIS__TIMEOUT", "7ms"));
    assert_eq!(code, Some(0));
    assert!(
        out.contains("timeout = \"7ms\"") && out.contains("redis://:***@host:1") && !out.contains("hunter2"),
        "{out}"
    );
    // The last line is the largest memory that callers can make the process hold.
    assert!(out.lines().last().is_some_and(|line| line.ends_with(" in total")), "{out}");
}

#[test]
fn errors_at_the_start_are_understandable_messages() {
    let server = Server::builder().start();
    let busy = server.grpc.to_string();
    let invalid = rules(&[("a.yaml", "domain: a\nextra: 1\n")]);
    let invalid = invalid.path().to_str().unwrap();
    let free = ["--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0"];
    let file = format!("{invalid}/a.yaml");
    let cases: [(&[&str], &str); 12] = [
        (&["--grpc-addr", &busy, "--http-addr", "127.0.0.1:0"], "for gRPC: Address already in use"),
        (&["--grpc-addr", "127.0.0.1:0", "--http-addr", &busy], "for HTTP: Address already in use"),
        (&["--rules", "/nowhere"], "cannot read the rules in /nowhere: No such file"),
        (&["--rules", invalid], "a.yaml:2:1: unknown key \"extra\""),
        (&["--rules", &file], "a.yaml, which must be a directory of rule files, not a file: Not a directory"),
        (&["--store", "redis://"], "invalid Redis store address redis://"),
        (
            &["--store", "http://a"],
            "invalid Redis store address http://a: the scheme is none of redis, redis+cluster, ",
        ),
        (&["--store", "redis://a,b"], "several servers need redis+cluster://, redis+sentinel:// or redis+ring://"),
        (&["--store", "redis:6379"], "did you mean redis://redis:6379?"),
        (&["--store", "redis-cluster://a"], "did you mean redis+cluster://…?"),
        (&["--store", "disk"], "store must be memory or an address"),
        (&["--config", "/nowhere.toml"], "cannot read the settings: configuration file \"/nowhere.toml\" not found"),
    ];
    for (args, expected) in cases {
        let mut command = command();
        command.arg("serve").args(args);
        if !args.contains(&"--grpc-addr") {
            command.args(free);
        }
        let (code, _, err) = run(&mut command);
        assert_eq!(code, Some(1), "{args:?}: {err}");
        assert!(err.contains(expected) && !err.contains("panicked"), "{args:?}: {err}");
    }
    let (code, _, err) = run(command().args(["--grpc-addr", ":8081"]));
    assert_eq!(code, Some(2), "{err}");
    assert!(err.contains("it must be an IP address and a port; did you mean 0.0.0.0:8081?"), "{err}");
    let (code, _, err) = run(command().arg("--print-settings").env("SLUICEGATE__GRPC__ADR", "x"));
    assert_eq!(code, Some(1));
    assert!(err.contains("unknown setting \"grpc.adr\"") && err.contains("did you mean \"grpc.addr\"?"), "{err}");
}

/// Settings without a default.
const UNSET: [&str; 28] = [
    "memcached.tls.server_name",
    "console.grafana_url",
    "rules.xds.server",
    "rules.xds.node_metadata",
    "rules.xds.headers",
    "rules.xds.tls.server_name",
    "telemetry.statsd.addr",
    "admin.tls.client_name",
    "grpc.tls.client_name",
    "grpc.uds",
    "http.debug_addr",
    "http.metrics_addr",
    "telemetry.otlp.metrics_endpoint",
    "telemetry.otlp.service_instance_id",
    "telemetry.otlp.service_namespace",
    "telemetry.otlp.traces_endpoint",
    "admin.addr",
    "overrides.file",
    "record.dir",
    "rules.candidate_dir",
    "rules.dir",
    "cluster.tls.server_name",
    "per_second.store",
    "redis.password_command",
    "redis.tls.server_name",
    "redis.sentinel.username",
    "redis.sentinel.password",
    "redis.sentinel.tls",
];

/// docs/reference/settings.md contains every setting with its default, and no others.
#[test]
fn the_table_of_settings_is_complete() {
    let table = fs::read_to_string(repository("docs/reference/settings.md")).unwrap();
    let mut documented: Vec<_> = table.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
    let (_, printed, _) = run(command().arg("--print-settings"));
    let mut section = String::new();
    // One row of the table stands for all settings of `per_second.redis`.
    documented.retain(|name| *name != "per_second.redis.*");
    for line in printed.lines() {
        if let Some(name) = line.strip_prefix('[') {
            section = format!("{}.", name.trim_end_matches(']'));
        } else if let Some((key, value)) = line.split_once(" = ") {
            let name = format!("{section}{key}");
            if name.starts_with("per_second.redis.") {
                continue;
            }
            assert!(documented.contains(&name.as_str()), "{name} is not in docs/reference/settings.md");
            let row = table.lines().find(|line| line.starts_with(&format!("| `{name}` |"))).unwrap();
            let default = row.split('|').nth(2).unwrap().trim().trim_matches('`');
            assert_eq!(default, value.trim_matches('"'), "the default of {name}");
            documented.retain(|documented| *documented != name);
        }
    }
    // Settings that are not set are not printed.
    documented.retain(|name| !name.ends_with("_file") && !UNSET.contains(name));
    assert_eq!(documented, Vec::<&str>::new(), "documented settings that do not exist");
}

#[test]
fn health_reports_the_state_of_the_local_service() {
    let server = Server::builder().start();
    let health = |address: &str| run(command().args(["health", "--http-addr", address]));
    assert_eq!(health(&server.http.to_string()), (Some(0), "200 OK\n".into(), String::new()));
    // The address comes from the settings, where 0.0.0.0 includes localhost, or from envoyproxy/ratelimit's
    // environment.
    let port = server.http.port().to_string();
    let (code, text, _) = run(command().arg("health").env("SLUICEGATE__HTTP__ADDR", format!("0.0.0.0:{port}")));
    assert_eq!((code, text.as_str()), (Some(0), "200 OK\n"));
    let (code, text, _) = run(command().args(["health", "--compat", "envoyproxy"]).env("PORT", &port));
    assert_eq!((code, text.as_str()), (Some(0), "200 OK\n"));
    let unused = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let (code, text, error) = health(&unused);
    assert!(code == Some(1) && text.is_empty() && error.contains(&format!("no response from {unused}")), "{error}");
    // The gRPC port does not answer HTTP health checks.
    assert_eq!(health(&server.grpc.to_string()).0, Some(1));
}

#[test]
fn shell_completions_are_printed() {
    for shell in ["bash", "zsh", "fish"] {
        let (code, text, _) = run(command().args(["completions", shell]));
        assert!(code == Some(0) && text.contains("candidate") && text.contains("simulate"), "{shell}: {text}");
    }
}

/// Two files that define one domain.
const ONE_DOMAIN: [(&str, &str); 2] = [
    ("a.yaml", "domain: d\ndescriptors: [{key: user, rate_limit: {unit: year, requests_per_unit: 9}}]\n"),
    ("b.yaml", "domain: d\ndescriptors: [{key: short, rate_limit: {unit: second, requests_per_unit: 9}}]\n"),
];

#[test]
fn check_accepts_a_domain_in_several_files_if_they_are_merged() {
    let folder = rules(&ONE_DOMAIN);
    let (code, text, _) = run(command().arg("check").arg(folder.path()));
    assert!(code == Some(1) && text.contains("is already defined in"), "{text}");
    let (code, text, _) = run(command().args(["check", "--merge-domains"]).arg(folder.path()));
    assert!(code == Some(0) && text.contains("2 files, 1 domains, 2 limits: no errors"), "{text}");
}

#[test]
fn shard_uses_the_store_and_the_domains_of_the_settings() {
    let folder = rules(&ONE_DOMAIN);
    let settings = tempfile::tempdir().unwrap();
    let config = settings.path().join("settings.toml");
    let text = "store = \"redis://main:1\"\n[per_second]\nstore = \"redis://short:2\"\n[rules]\nmerge_domains = true\n";
    fs::write(&config, text).unwrap();
    for (entry, node) in [("user=a", "node  main:1"), ("short=a", "node  short:2")] {
        let mut command = command();
        command.args(["shard", "d", entry, "--config"]).arg(&config).arg("--rules").arg(folder.path());
        let (code, text, error) = run(&mut command);
        assert!(code == Some(0) && text.lines().any(|line| line == node), "{text}{error}");
    }
}

#[test]
fn shard_prints_the_shares_before_and_after_a_change_of_the_ring() {
    let folder = rules(&ONE_DOMAIN[..1]);
    let shard = |nodes: &str| {
        let mut command = command();
        command.args(["shard", "d", "user=a", "--store", "redis+ring://a", "--nodes", nodes, "--rules"]);
        run(command.arg(folder.path()))
    };
    let (code, text, error) = shard("b");
    assert_eq!(code, Some(0), "{error}");
    let change = "after moves from a:6379 to b\n100.0% of all shards move\n  a:6379: 100.0% before, 0.0% after\n  \
                  b: 0.0% before, 100.0% after\n";
    assert!(text.ends_with(change), "{text}");
    let (code, text, _) = shard("a:6379");
    let same = "after stays on a:6379\n0.0% of all shards move\n  a:6379: 100.0% before, 100.0% after\n";
    assert!(code == Some(0) && text.ends_with(same), "{text}");
    let (code, _, error) = shard("b*0");
    assert!(code == Some(1) && error.contains("is not NAME or NAME*WEIGHT"), "{error}");
}

#[test]
fn ctl_prints_changes_lists_and_health() {
    let folder = rules(&ONE_DOMAIN[..1]);
    let operator = Operator::start(folder.path(), "memory");
    let output = operator.ctl(&["limit", "set", "d", "user=a", "10/year"]);
    assert_eq!(output, "limit|d|user=a: 10/year\nversion 1, in force on all instances within 1 s\n");
    operator.ctl(&["limit", "set", "d2", "user=a", "10/year", "--allow-unknown"]);
    let list = operator.ctl(&["limit", "list", "d"]);
    assert!(list.contains("limit|d|user=a") && !list.contains("limit|d2|"), "{list}");

    assert_eq!(operator.ctl(&["switch", "list"]), format!("{}: no switch is set\n", operator.addr));
    operator.ctl(&["switch", "shadow", "domain", "d"]);
    let json = |args: &[&str]| serde_json::from_str::<serde_json::Value>(&operator.ctl(args)).unwrap();
    assert_eq!(json(&["switch", "list", "--json"])["value"], "shadow");
    assert_eq!(json(&["health", "--json"])["overridesVersion"], "3");
    wait_for("an uptime of whole seconds", || {
        let health = operator.ctl(&["health"]);
        assert!(!health.contains("not synchronised"), "{health}");
        let uptime: u64 = health.split_once(", up for ")?.1.split_once("s, ")?.0.parse().ok()?;
        (uptime >= 2).then_some(())
    });
}

#[test]
fn the_reason_of_an_import_is_in_the_audit_log() {
    let folder = rules(&ONE_DOMAIN[..1]);
    let operator = Operator::start(folder.path(), "memory");
    let file = folder.path().join("overrides.csv");
    fs::write(&file, "limit|d|user=a,5/minute\n").unwrap();
    operator.ctl(&["import", file.to_str().unwrap(), "--reason", "ticket 4711"]);
    let audit = operator.ctl(&["audit"]);
    assert!(audit.contains("alice: ticket 4711"), "{audit}");
}

#[test]
fn a_switch_that_not_all_instances_accept_is_an_error() {
    let folder = rules(&ONE_DOMAIN[..1]);
    let operator = Operator::start(folder.path(), "memory");
    let both = format!("http://127.0.0.1:1,{}", operator.addr);
    let ctl = ["ctl", "--addr", &both, "--token", OPERATE];
    let (code, text, error) = run(command().args(ctl).args(["switch", "off", "everything", "--here"]));
    assert!(code == Some(1) && error.contains("1 of 2 instances have not accepted the change"), "{error}");
    assert_eq!(text, format!("{}: in force on this instance until it restarts\n", operator.addr));
}

/// Starts `sluicegate ctl`, and returns the lines that it prints until none follows within the deadline.
fn start_ctl(operator: &Operator, args: &[&str]) -> (Child, impl Iterator<Item = String> + use<>) {
    let mut command = command();
    command.args(["ctl", "--addr", &operator.addr, "--token", OPERATE]).args(args);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || lines.for_each(|line| drop(sender.send(line))));
    (child, std::iter::from_fn(move || receiver.recv_timeout(DEADLINE).ok()))
}

#[test]
fn audit_follows_new_changes_and_prints_each_once() {
    let folder = rules(&ONE_DOMAIN[..1]);
    let operator = Operator::start(folder.path(), "memory");
    operator.ctl(&["limit", "set", "d", "user=a", "1/year"]);
    let (mut child, lines) = start_ctl(&operator, &["audit", "--follow"]);
    let mut changes = lines.filter(|line| line.starts_with("  "));
    let first = changes.next();
    operator.ctl(&["limit", "set", "d", "user=b", "2/year"]);
    let second = changes.next();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(first.as_deref(), Some("  limit|d|user=a: 1/year"));
    assert_eq!(second.as_deref(), Some("  limit|d|user=b: 2/year"));
}

#[test]
fn watch_does_not_clear_a_file() {
    let folder = rules(&ONE_DOMAIN[..1]);
    let operator = Operator::start(folder.path(), "memory");
    let (mut child, mut lines) = start_ctl(&operator, &["watch"]);
    let first = lines.next();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(first.is_some_and(|line| line.starts_with(&operator.addr)));
}

/// Runs `sluicegate ctl top` for several instances.
fn top(addrs: &[&str], args: &[&str]) -> String {
    let mut command = command();
    command.args(["ctl", "--addr", &addrs.join(","), "--token", OPERATE, "top", "--requested"]).args(args);
    let (code, text, error) = run(&mut command);
    assert_eq!(code, Some(0), "{error}");
    text
}

#[tokio::test]
async fn top_prints_the_earliest_time_of_all_instances() {
    let folder = rules(&ONE_DOMAIN[..1]);
    let [early, late] = [(), ()].map(|()| Operator::start(folder.path(), "memory"));
    for operator in [&early, &late] {
        operator.server.client().await.check(request_for("d", &[("user", "a")])).await.unwrap();
    }
    let since = |addrs: &[&str]| {
        let ranking: serde_json::Value = serde_json::from_str(&top(addrs, &["--json"])).unwrap();
        ranking["entities"][0]["since"].as_str().unwrap().to_owned()
    };
    let expected = since(&[&early.addr]);
    assert_ne!(expected, since(&[&late.addr]));
    assert_eq!(since(&[&early.addr, &late.addr]), expected);
    assert_eq!(since(&[&late.addr, &early.addr]), expected);
}

/// More entities than an instance counts separately have inexact counts.
#[tokio::test]
async fn top_adds_up_the_errors_of_all_instances() {
    let folder = rules(&ONE_DOMAIN[..1]);
    let builder = Server::builder().rules(folder.path()).store("memory");
    let operator = Operator::with(builder.set("workers", "1"));
    let client = operator.server.client().await;
    for request in 0..12 {
        let names: Vec<String> = (0..100).map(|number| format!("{request}-{number}")).collect();
        let entities = names.iter().map(|name| descriptor(&[("user", name.as_str())]));
        client.check(entities.fold(Request::new("d"), Request::descriptor)).await.unwrap();
    }
    let hits = |addrs: &[&str]| {
        let text = top(addrs, &["-n", "1"]);
        let row = text.lines().nth(2).unwrap_or_default();
        let words: Vec<&str> = row.split_whitespace().collect();
        assert_eq!(words[1], "to", "{text}");
        (words[0].parse::<u64>().unwrap(), words[2].parse::<u64>().unwrap())
    };
    let (min, max) = hits(&[&operator.addr]);
    assert!(0 < min && min < max, "{min} to {max}");
    assert_eq!(hits(&[&operator.addr, &operator.addr]), (2 * min, 2 * max));
}
