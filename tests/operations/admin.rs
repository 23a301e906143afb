//! The admin API: authentication, roles, methods, and invalid input.

use std::fs;

use crate::support::{
    DEADLINE, Operator, RedisServer, Server,
    operator::{OPERATE, READ, admin_addr},
    request_for, rules,
    server::{agent, command, get},
    wait_for,
};

const RULES: &str = "domain: api\ndescriptors:\n- key: user\n  rate_limit: { unit: year, requests_per_unit: 2 }\n\
                     - key: dark\n  shadow_mode: true\n  rate_limit: { unit: year, requests_per_unit: 1 }\n\
                     - key: job\n  rate_limit: { algorithm: concurrency, limit: 5, hold: 60s, holder: id }\n";

fn folder() -> tempfile::TempDir {
    rules(&[("api.yaml", RULES)])
}

#[test]
fn only_authenticated_operators_have_access_according_to_their_role() {
    let folder = folder();
    let operator = Operator::start(folder.path(), "memory");
    let status = |token: &str, method: &str| operator.call(token, method, "{}").0;
    for token in ["", "operate", "read-0123456789abcdeF", "operate-0123456789abcdef0"] {
        assert_eq!(status(token, "GetHealth"), 401, "{token}");
    }
    assert_eq!(get(&format!("{}/openapi.json", operator.addr)).0, 401);
    assert_eq!(get(&format!("{}/v1/GetHealth", operator.addr)).0, 401);
    // An operator with the role `read` cannot change the service, neither by HTTP nor by gRPC.
    assert_eq!(status(READ, "GetHealth"), 200);
    for method in ["PutOverrides", "ResetCounter", "Refund", "UploadCandidate", "PromoteCandidate", "RollbackRules"] {
        let (code, answer) = operator.call(READ, method, "{}");
        assert_eq!((code, answer["code"].as_str()), (403, Some("PERMISSION_DENIED")), "{answer}");
    }
    // A percent-encoded name does not bypass the role.
    let off = r#"{"changes": [{"target": {"switch": {"everything": true}}, "value": "off"}]}"#;
    assert_eq!(operator.call(READ, "%50utOverrides", off).0, 403);
    assert_eq!(operator.call(READ, "GetHealth", "{}").1["overridesVersion"], serde_json::Value::Null);
    let ctl = |token: &str, args: &[&str]| {
        let output = command().args(["ctl", "--addr", &operator.addr, "--token", token]).args(args).output().unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    assert!(ctl(READ, &["health"]).0);
    let (done, error) = ctl(READ, &["switch", "off", "everything"]);
    assert!(!done && error.contains("eve has the role read") && error.contains("PermissionDenied"), "{error}");
    let (done, error) = ctl("somebody-else-0123", &["health"]);
    assert!(!done && error.contains("authentication requires a token"), "{error}");
    // Tokens are never logged.
    assert!(!operator.server.log().contains("0123456789abcdef"), "{}", operator.server.log());
}

#[test]
fn the_token_file_is_reloaded_and_an_invalid_one_is_ignored() {
    let folder = folder();
    let tokens = tempfile::NamedTempFile::new().unwrap();
    fs::write(tokens.path(), "operate first-0123456789 alice\n").unwrap();
    let builder = Server::builder().rules(folder.path()).store("memory").set("admin.addr", "127.0.0.1:0");
    let server = builder.set("admin.token_file", tokens.path().to_str().unwrap()).start();
    let url = format!("http://{}/v1/GetHealth", admin_addr(&server));
    let code = |token: &str| {
        let request = agent().post(&url).header("authorization", format!("Bearer {token}"));
        request.send(&b"{}"[..]).unwrap().status().as_u16()
    };
    assert_eq!(code("first-0123456789"), 200);
    fs::write(tokens.path(), "operate second-0123456789 alice\n").unwrap();
    wait_for("the new token", || (code("second-0123456789") == 200).then_some(()));
    assert_eq!(code("first-0123456789"), 401);
    fs::write(tokens.path(), "operate short alice\n").unwrap();
    wait_for("the warning", || server.log().contains("cannot use the changed token file").then_some(()));
    assert_eq!(code("second-0123456789"), 200);
}

#[test]
fn the_admin_api_requires_authentication_and_is_off_by_default() {
    let folder = folder();
    let output = command()
        .args(["serve", "--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0", "--rules"])
        .arg(folder.path())
        .env("SLUICEGATE__ADMIN__ADDR", "127.0.0.1:0")
        .output()
        .unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && error.contains("admin.addr needs admin.token_file"), "{error}");
    let server = Server::start(folder.path(), "memory");
    assert!(!server.log().contains("serving the admin API"));
}

#[tokio::test]
async fn inspect_explains_the_decision_about_a_descriptor() {
    let folder = folder();
    let redis = RedisServer::start();
    let operator = Operator::start(folder.path(), &redis.url());
    let client = operator.server.client().await;
    for _ in 0..3 {
        client.check(request_for("api", &[("user", "bob")])).await.unwrap();
    }
    let text = operator.ctl(&["inspect", "api", "user=bob"]);
    for expected in [
        "user=bob: no rule has this value; matches the rule for any user (line 3)",
        "limit: 2 per year",
        "counter: sluicegate:{api|user=bob}fw:31536000 on 127.0.0.1:",
        "limit 2 per year; used 3, remaining 0",
        "retry after ",
        "now: a request would be denied by the rule",
        "first denied at 20",
    ] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    // Inspecting takes no hits.
    assert!(operator.ctl(&["inspect", "api", "user=bob"]).contains("used 3"));
    // A rule in shadow mode denies nothing.
    for _ in 0..2 {
        client.check(request_for("api", &[("dark", "x")])).await.unwrap();
    }
    let text = operator.ctl(&["inspect", "api", "dark=x"]);
    assert!(text.contains("a request would be allowed") && text.contains("remaining 0"), "{text}");
    // The holder is not part of the counter's name.
    let text = operator.ctl(&["inspect", "api", "job=nightly", "id=7"]);
    assert!(text.contains("counter: sluicegate:{api|job=nightly}"), "{text}");
    operator.ctl(&["refund", "api", "user=bob", "--hits", "2", "--reason", "sorry"]);
    assert!(client.check(request_for("api", &[("user", "bob")])).await.unwrap().allowed());
    assert!(!client.check(request_for("api", &[("user", "bob")])).await.unwrap().allowed());
    let reset = operator.ctl(&["reset", "api", "user=bob"]);
    assert!(reset.contains("{api|user=bob}fw:31536000: reset"), "{reset}");
    assert_eq!(redis.cli(&["EXISTS", "sluicegate:{api|user=bob}fw:31536000"]), "0");
    assert!(client.check(request_for("api", &[("user", "bob")])).await.unwrap().allowed());
    assert!(operator.ctl(&["reset", "api", "user=nobody"]).contains("the counter did not exist"));
    assert!(operator.try_ctl(&["reset", "api", "path=x"]).unwrap_err().contains("has no counter"));
    let audit = operator.ctl(&["audit"]);
    assert!(
        audit.contains("refunded 2 to {api|user=bob}fw:31536000: sorry") && audit.contains("reset {api|user=bob}"),
        "{audit}"
    );
    operator.ctl(&["limit", "set", "api", "user=bob", "blocked", "--reason", "fraud"]);
    let (_, log) = operator.call(OPERATE, "ListAuditLog", "{}");
    let changes = log["entries"].as_array().unwrap();
    let dated = |change: &serde_json::Value| change["at"].as_str().is_some_and(|at| at.starts_with("20"));
    assert!(changes.len() >= 3 && changes.iter().all(dated), "each entry has a time: {log}");
    let text = operator.ctl(&["inspect", "api", "user=bob", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&json["decidedBy"], &json["overrides"][0]["reason"]), (&"limit".into(), &"fraud".into()), "{json}");
    assert_eq!(json["rule"]["name"], "user");
    assert!(json["allowed"].is_null() && json["counter"].is_null(), "{json}");
    let rules = operator.ctl(&["rules", "api"]);
    assert!(rules.contains("2 per year") && rules.contains("api.yaml:3"), "{rules}");
    let health = operator.ctl(&["health"]);
    assert!(health.contains(": up") && health.contains("overrides version 4"), "{health}");
}

#[tokio::test]
async fn top_lists_the_entities_with_the_most_denials_and_requests() {
    let folder = folder();
    let operator = Operator::start(folder.path(), "memory");
    let client = operator.server.client().await;
    for (user, requests) in [("few", 1), ("many", 30), ("more", 50)] {
        for _ in 0..requests {
            client.check(request_for("api", &[("user", user)])).await.unwrap();
        }
    }
    let top = operator.ctl(&["top"]);
    let lines: Vec<Vec<&str>> = top.lines().skip(2).map(|line| line.split_whitespace().take(4).collect()).collect();
    assert_eq!(lines, [["48", "48", "api|user=more", "user"], ["28", "28", "api|user=many", "user"]], "{top}");
    let requested = operator.ctl(&["top", "--requested", "-n", "1"]);
    assert!(
        requested.contains("50") && requested.contains("user=more") && !requested.contains("user=many"),
        "{requested}"
    );
    // The API itself has an empty list for a domain or a rule that does not exist.
    for filter in [r#"{"domain": "other"}"#, r#"{"rule": "path"}"#] {
        let (code, answer) = operator.call(READ, "ListTopEntities", filter);
        assert!(code == 200 && answer["entities"].is_null(), "{answer}");
    }
    assert_eq!(operator.ctl(&["top", "--rule", "job"]).lines().count(), 2);
    // The numbers of several instances are added up.
    let both = format!("{0},{0}", operator.addr);
    let output = command().args(["ctl", "--addr", &both, "--token", OPERATE, "top", "-n", "1"]).output().unwrap();
    let top = String::from_utf8(output.stdout).unwrap();
    assert!(top.contains("\n96 "), "{top}");
}

#[test]
fn an_import_can_continue_after_an_error() {
    let folder = folder();
    let operator = Operator::start(folder.path(), "memory");
    let mut text: String = (0..250).map(|user| format!("limit|api|user=u{user},{}/minute\n", user + 1)).collect();
    text += "limit|api|user=bad,lots\n# a comment\nswitch|domain|web,shadow,2040-01-01T00:00:00Z\n";
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), &text).unwrap();
    let path = file.path().to_str().unwrap();
    let error = operator.try_ctl(&["import", path]).unwrap_err();
    assert!(
        error.contains("is not a limit") && error.contains("200 overrides set, continue with --from 201"),
        "{error}"
    );
    assert_eq!(operator.ctl(&["limit", "list"]).lines().count(), 201);
    fs::write(file.path(), text.replace("lots", "5/minute")).unwrap();
    assert_eq!(operator.ctl(&["import", path, "--from", "201"]), "52 overrides set\n");
    let exported = operator.ctl(&["export"]);
    assert_eq!(exported.lines().count(), 252);
    assert!(exported.contains("switch|domain|web,shadow,2040-01-01T00:00:00Z\n"), "{exported}");
    // An export can be imported.
    fs::write(file.path(), &exported).unwrap();
    assert_eq!(operator.ctl(&["import", path]), "252 overrides set\n");
    assert_eq!(operator.ctl(&["export"]), exported);
    for bad in ["limit|api,5/minute\n", "limit|api|a=b,5/minute,soon\n", "limit|api|a=b,5/minute,,more\n"] {
        fs::write(file.path(), bad).unwrap();
        assert!(operator.try_ctl(&["import", path]).unwrap_err().contains("line 1 of"), "{bad}");
    }
}

/// A change for names that the rules do not have has no effect. `ctl` rejects it; other callers get a warning.
#[test]
fn a_change_with_an_unknown_name_is_rejected_by_ctl_and_a_warning_for_other_callers() {
    let text = "domain: shop\nplans:\n  default: free\n  limits:\n    free: { calls: { unit: day, requests_per_unit: 3 } }\n\
                \x20   pro: { calls: { unit: day, requests_per_unit: 9 } }\ndescriptors:\n\
                - { key: tenant, rate_limit: { by_plan: calls } }\n\
                - { key: user, rate_limit: { name: per_user, unit: day, requests_per_unit: 3 } }\n";
    let folder = rules(&[("shop.yaml", text)]);
    let operator = Operator::start(folder.path(), "memory");
    let plans = tempfile::NamedTempFile::new().unwrap();
    fs::write(plans.path(), "acme,pro\nhooli,prro\n").unwrap();
    let plans = plans.path().to_str().unwrap();
    for (args, expected) in [
        (&["limit", "set", "shopp", "user=bob", "5/day"][..], "no domain \"shopp\"; did you mean \"shop\"?"),
        (&["limit", "set", "shop", "usr=bob", "5/day"], "begins with \"usr\"; did you mean \"user\"?"),
        (&["plan", "assign", "shop", "tenant=acme", "gold"], "no plan \"gold\"; the nearest is \"free\""),
        (&["plan", "assign", "shop", "user=bob", "pro"], "no rule with plans and the key \"user\""),
        (&["plan", "import", "shop", "tenant", plans], "no plan \"prro\"; did you mean \"pro\"?"),
        (&["switch", "off", "rule", "shop", "peruser"], "no rule \"peruser\"; did you mean \"per_user\"?"),
        (&["switch", "off", "domain", "elsewhere"], "no domain \"elsewhere\"; the nearest is \"shop\""),
        (&["switch", "off", "algorithm", "gcrs"], "no algorithm \"gcrs\"; did you mean \"gcra\"?"),
        (&["switch", "off", "rule", "shop", "peruser", "--here"], "no rule \"peruser\""),
    ] {
        let error = operator.try_ctl(args).unwrap_err();
        assert!(error.contains(expected), "{args:?}: {error}");
        assert_eq!(operator.ctl(&["export"]), "", "{args:?}");
    }
    // A rule with plans has a switch for all of them, under each name that is printed.
    for scope in [&["shop", "tenant"][..], &["shop.tenant"], &["shop", "shop.tenant"], &["shop.tenant.plan_pro"]] {
        operator.ctl(&[&["switch", "shadow", "rule"], scope].concat());
        let listed = operator.ctl(&["rules", "shop"]);
        let shadowed = if scope == ["shop.tenant.plan_pro"] { 1 } else { 2 };
        assert_eq!(listed.matches("switch shadow").count(), shadowed, "{scope:?}: {listed}");
        operator.ctl(&[&["switch", "clear", "rule"], scope].concat());
    }
    assert_eq!(operator.ctl(&["top", "--rule", "tenant"]).lines().count(), 2);
    operator.ctl(&["plan", "assign", "shop", "tenant=acme", "gold", "--allow-unknown"]);
    // The tenant gets the default plan, which a metric and an inspection show.
    let body = r#"{"domain": "shop", "descriptors": [{"entries": [{"key": "tenant", "value": "acme"}]}]}"#;
    agent().post(operator.server.url("/json")).send(body.as_bytes()).unwrap();
    assert!(operator.server.get("/metrics").contains("\nsluicegate_plan_not_found_total 1\n"));
    let inspected = operator.ctl(&["inspect", "shop", "tenant=acme"]);
    assert!(inspected.contains("  it matches nothing: domain \"shop\" has no plan \"gold\""), "{inspected}");
    assert!(inspected.contains("limit 3 per day"), "{inspected}");
    operator.ctl(&["plan", "import", "shop", "tenant", plans, "--allow-unknown"]);
    // An override with any name can be removed.
    operator.ctl(&["limit", "set", "gone", "user=bob", "5/day", "--allow-unknown"]);
    operator.ctl(&["limit", "unset", "gone", "user=bob"]);
    assert_eq!(operator.ctl(&["export"]), "plan|shop|tenant=acme,pro,\nplan|shop|tenant=hooli,prro,\n");
    // A copy of the overrides can be restored after a rule was removed.
    let copy = tempfile::NamedTempFile::new().unwrap();
    fs::write(copy.path(), "switch|rule|shop|removed,shadow,\nlimit|shop|user=bob,5/day,\n").unwrap();
    assert_eq!(operator.ctl(&["import", copy.path().to_str().unwrap()]), "2 overrides set\n");

    let put = |rule: &str, options: &str| {
        let target = format!("{{\"switch\": {{\"rule\": {{\"domain\": \"shop\", \"rule\": \"{rule}\"}}}}}}");
        let body = format!("{{\"changes\": [{{\"target\": {target}, \"value\": \"shadow\"}}]{options}}}");
        operator.call(OPERATE, "PutOverrides", &body)
    };
    let (code, answer) = put("peruser", "");
    let warning = "switch|rule|shop|peruser: domain \"shop\" has no rule \"peruser\"; did you mean \"per_user\"?";
    assert_eq!((code, &answer["warnings"][0]), (200, &warning.into()), "{answer}");
    assert_eq!(put("per_user", "").1["warnings"].as_array().map_or(0, Vec::len), 0);
    // A check changes nothing, and has the warnings of the change.
    let before = operator.ctl(&["export"]);
    let (code, answer) = put("renamed", ", \"validateOnly\": true");
    assert_eq!(
        (code, answer["warnings"].as_array().map(Vec::len), &answer["version"]),
        (200, Some(1), &serde_json::Value::Null)
    );
    assert_eq!(put("renamed", ", \"validateOnly\": true, \"rejectUnknownNames\": true").0, 400);
    assert_eq!(operator.ctl(&["export"]), before);
    let (code, answer) = put("peruser", ", \"rejectUnknownNames\": true");
    assert_eq!((code, answer["code"].as_str()), (400, Some("FAILED_PRECONDITION")), "{answer}");
}

#[test]
fn an_end_must_be_in_the_future_and_have_a_date_that_can_be_stored() {
    let folder = folder();
    let operator = Operator::start(folder.path(), "memory");
    let set = |end: &[&str]| operator.try_ctl(&[&["limit", "set", "api", "user=bob", "5/day"], end].concat());
    for (end, expected) in [
        (["--until", "2020-01-01T00:00:00Z"], "the end of the override has passed"),
        (["--until", "2020-01-01T00:00:00+02:00"], "the end of the override has passed"),
        (["--for", "0s"], "the end of the override has passed"),
        (["--until", "2106-02-07T06:28:16Z"], "is after 2106-02-07T06:28:15Z"),
        (["--until", "9999-12-31T23:59:59Z"], "is after 2106-02-07T06:28:15Z"),
        (["--for", "1000y"], "is after 2106-02-07T06:28:15Z"),
        (["--until", "2040-01-01T00:00:00+25:00"], "is not a time such as"),
    ] {
        let error = set(&end).unwrap_err();
        assert!(error.contains(expected), "{end:?}: {error}");
    }
    let error = operator.try_ctl(&["switch", "off", "everything", "--here", "--until", "2020-01-01T00:00:00Z"]);
    assert!(error.unwrap_err().contains("have not accepted the change"));
    let changes = r#"{"changes": [{"target": {"switch": {"everything": true}}, "value": "off", "until": "2020-01-01T00:00:00Z"}]}"#;
    assert_eq!(operator.call(OPERATE, "PutOverrides", changes).1["code"], "INVALID_ARGUMENT");
    assert_eq!(operator.ctl(&["export"]), "");
    assert!(set(&["--until", "2106-02-07T06:28:15Z"]).unwrap().contains("until 2106-02-07T06:28:15Z"));
    assert!(set(&["--until", "2040-01-01T00:00:00+02:00"]).unwrap().contains("until 2039-12-31T22:00:00Z"));
    // Overrides of a copy that have ended since are skipped.
    let copy = tempfile::NamedTempFile::new().unwrap();
    fs::write(copy.path(), "limit|api|user=a,5/day,2020-01-01T00:00:00Z\nlimit|api|user=b,5/day,\n").unwrap();
    assert_eq!(operator.ctl(&["import", copy.path().to_str().unwrap()]), "1 overrides set\n");
}

/// Every invalid call is answered with a message that describes the error.
#[test]
fn invalid_calls_are_rejected_with_a_message() {
    let folder = folder();
    let operator = Operator::start(folder.path(), "memory");
    let long = "x".repeat(5_000);
    let limit = |domain: &str, key: &str, value: &str, limit: &str| {
        let target = serde_json::json!({ "limit": { "domain": domain, "entries": [{ "key": key, "value": value }] } });
        serde_json::json!({ "changes": [{ "target": target, "value": limit }] }).to_string()
    };
    let twice = r#"{"changes": [{"target": {"plan": {"domain": "d", "key": "k"}}, "value": "a"},
                              {"target": {"plan": {"domain": "d", "key": "k"}}, "value": "b"}]}"#;
    for (body, expected) in [
        ("", "1 to 100 overrides"),
        ("{", "not a valid PutOverridesRequest in JSON"),
        ("[]", "not a valid PutOverridesRequest in JSON"),
        (r#"{"request": []}"#, "not a valid PutOverridesRequest in JSON"),
        (r#"{"changes": [{}]}"#, "a target needs"),
        (r#"{"changes": [{"target": {"switch": {}}, "value": "off"}]}"#, "a scope"),
        (r#"{"changes": [{"target": {"switch": {"everything": false}}, "value": "off"}]}"#, "a scope"),
        (r#"{"changes": [{"target": {"switch": {"everything": true}}, "value": "maybe"}]}"#, "is not a mode"),
        (r#"{"changes": [{"target": {"limit": {"domain": "d"}}, "value": "1/second"}]}"#, "has no entries"),
        (
            r#"{"changes": [{"target": {"plan": {"domain": "d", "key": "k"}}, "value": "p", "until": "1901-01-01T00:00:00Z"}]}"#,
            "after 1970",
        ),
        (
            r#"{"thisInstance": true, "changes": [{"target": {"plan": {"domain": "d", "key": "k"}}, "value": "p"}]}"#,
            "only available for switches",
        ),
        (twice, "each target once"),
        (&limit("", "k", "v", "1/second"), "its domain, a key or another name is empty"),
        (&limit("d", "", "v", "1/second"), "its domain, a key or another name is empty"),
        (&limit("d", &long, "v", "1/second"), "4096 bytes"),
        (&limit("d", "k", "v", "{unit: second, requests_per_unti: 1}"), "did you mean requests_per_unit?"),
        (&limit("d", "k", "v", "{unit: second, requests_per_unit: 1, unit_multiplier: 0}"), "at least 1"),
        (&limit("d", "k", "v", &format!("{{unit: {}}}", "[".repeat(3_000))), "limit|d|k=v"),
        (&limit("d", "k", "v", &"9".repeat(5_000)), "4096"),
    ] {
        let (code, answer) = operator.call(OPERATE, "PutOverrides", body);
        let message = answer["message"].as_str().unwrap_or_default();
        assert!(code == 400 && message.contains(expected), "{body}: {code} {answer}");
    }
    // A reason that is too long for the audit log is rejected.
    let descriptor = r#"{"domain": "api", "entries": [{"key": "user", "value": "bob"}]}"#;
    let body = format!(r#"{{"descriptor": {descriptor}, "hits": "1", "reason": "{long}"}}"#);
    for (method, body) in [("Refund", body.clone()), ("ResetCounter", body.replace(r#""hits": "1", "#, ""))] {
        let (code, answer) = operator.call(OPERATE, method, &body);
        assert!(
            code == 400 && answer["message"].as_str().unwrap().contains("the reason at most 1024"),
            "{method}: {answer}"
        );
    }
    let (code, answer) = operator.call(OPERATE, "Nonsense", "{}");
    assert!(code == 404 && answer["message"].as_str().unwrap().contains("unknown method"), "{answer}");
    let huge = format!(r#"{{"prefix": "{}"}}"#, "x".repeat(2 << 20));
    let request = agent().post(format!("{}/v1/ListOverrides", operator.addr));
    let response = request.header("authorization", format!("Bearer {OPERATE}")).send(huge.as_bytes());
    assert!(response.map_or(true, |answer| answer.status().as_u16() == 413));
    // Names may contain any character.
    let name = "a|b=c{}*~% \n\u{0}é";
    assert_eq!(operator.call(OPERATE, "PutOverrides", &limit(name, name, name, "1/second")).0, 200);
    let (_, list) = operator.call(READ, "ListOverrides", "{}");
    assert_eq!(list["overrides"][0]["target"]["limit"]["entries"][0]["value"], name, "{list}");
    let (code, health) = operator.call(READ, "GetHealth", "");
    assert!(code == 200 && health["overridesVersion"] == "1", "{health}");
}

#[test]
fn the_openapi_description_contains_every_method_and_message() {
    let folder = folder();
    let operator = Operator::start(folder.path(), "memory");
    let request = agent().get(format!("{}/openapi.json", operator.addr));
    let mut response = request.header("authorization", format!("Bearer {READ}")).call().unwrap();
    let text = response.body_mut().read_to_string().unwrap();
    let description: serde_json::Value = serde_json::from_str(&text).unwrap();
    let put = &description["paths"]["/v1/PutOverrides"]["post"];
    assert!(put["summary"].as_str().unwrap().starts_with("Sets or removes overrides"), "{put}");
    let schemas = description["components"]["schemas"].as_object().unwrap();
    for (start, _) in text.match_indices("#/components/schemas/") {
        let name = text[start + "#/components/schemas/".len()..].split('"').next().unwrap();
        assert!(schemas[name].is_object(), "{name} has no schema");
    }
    assert_eq!(schemas["Override"]["properties"]["until"]["format"], "date-time");
    assert_eq!(description["paths"].as_object().unwrap().len(), 21);
}

#[tokio::test]
async fn watch_refreshes_its_output() {
    use std::{
        io::{BufRead, BufReader},
        process::Stdio,
    };
    let folder = folder();
    let operator = Operator::start(folder.path(), "memory");
    let mut child = command()
        .args(["ctl", "--addr", &operator.addr, "--token", OPERATE, "watch"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let client = operator.server.client().await;
    for _ in 0..5 {
        client.check(request_for("api", &[("user", "bob")])).await.unwrap();
    }
    let find = move || lines.map_while(Result::ok).find(|line| line.contains("user=bob"));
    let found = tokio::time::timeout(DEADLINE, tokio::task::spawn_blocking(find)).await;
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(found.is_ok_and(|line| line.unwrap().is_some()), "no refreshed output has the entity");
}

#[test]
fn overrides_are_listed_in_pages() {
    let folder = folder();
    let operator = Operator::start(folder.path(), "memory");
    let text: String = (0..4).map(|user| format!("limit|api|user=u{user},5/minute\n")).collect();
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), text).unwrap();
    assert_eq!(operator.ctl(&["import", file.path().to_str().unwrap()]), "4 overrides set\n");
    let page = |size: u32, token: &str| {
        let request = serde_json::json!({ "pageSize": size, "pageToken": token });
        let (_, list) = operator.call(READ, "ListOverrides", &request.to_string());
        let listed = list["overrides"].as_array().into_iter().flatten();
        let users: Vec<&str> =
            listed.map(|entry| entry["target"]["limit"]["entries"][0]["value"].as_str().unwrap()).collect();
        (users.join(" "), list["nextPageToken"].as_str().unwrap_or_default().to_owned())
    };
    let (users, token) = page(2, "");
    assert_eq!(users, "u0 u1");
    assert_eq!(page(2, &token), ("u2 u3".to_owned(), String::new()));
    let (users, token) = page(3, "");
    assert_eq!(users, "u0 u1 u2");
    assert_eq!(page(3, &token), ("u3".to_owned(), String::new()));
    let ready = operator.server.get("/readyz");
    assert!(ready.contains("\noverrides: version "), "{ready}");
}

#[test]
fn a_session_describes_the_caller_and_the_instance() {
    let folder = folder();
    let operator = Operator::start(folder.path(), "memory");
    let (_, session) = operator.call(READ, "GetSession", "{}");
    assert_eq!((session["role"].as_str(), session["caller"].as_str()), (Some("read"), Some("eve")), "{session}");
    assert_eq!(session["acceptsTokens"], true, "{session}");
    let port = format!(":{}", operator.server.grpc.port());
    assert!(session["instance"].as_str().unwrap().ends_with(&port), "{session}");
    // The answer to a change of this instance contains the targets.
    let target = serde_json::json!({ "switch": { "everything": true } });
    let changes = serde_json::json!([{ "target": target, "value": "shadow" }]);
    let request = serde_json::json!({ "changes": changes, "thisInstance": true });
    let (code, answer) = operator.call(OPERATE, "PutOverrides", &request.to_string());
    assert_eq!((code, &answer["changes"][0]["target"]), (200, &target), "{answer}");
}

#[test]
fn lists_of_rules_have_totals_and_the_last_error() {
    let invalid = "domain: api\ndescriptors: [{key: user, rate_limit: {unit: eon}}]\n";
    let (in_force, candidate) = (folder(), rules(&[("api.yaml", invalid)]));
    let builder = Server::builder().rules(in_force.path()).store("memory");
    let operator = Operator::with(builder.set("rules.candidate_dir", candidate.path().to_str().unwrap()));
    let list = || operator.call(READ, "ListRuleActivity", "{}").1;
    let first = list();
    for total in ["totalRows", "totalRules", "allRules"] {
        assert!(first[total].as_u64() >= Some(3), "{total}: {first}");
    }
    assert!(first["loadedAt"].as_str().is_some_and(|at| at.starts_with("20")), "{first}");
    let is_reported = |answer: &serde_json::Value, field: &str| {
        answer[field].as_str().is_some_and(|error| error.contains("eon")).then_some(())
    };
    wait_for("the error of the candidate", || is_reported(&operator.call(READ, "GetCandidate", "{}").1, "error"));
    fs::write(candidate.path().join("api.yaml"), RULES).unwrap();
    wait_for("the candidate to be evaluated", || (list()["hasCandidate"] == true).then_some(()));
    fs::write(in_force.path().join("api.yaml"), invalid).unwrap();
    wait_for("the error of the rules", || is_reported(&list(), "lastError"));
}

#[tokio::test]
async fn the_report_of_a_candidate_begins_with_the_most_changed_rule() {
    let text = |limit: u32| {
        let line = |key: &str, limit| {
            format!("- {{ key: {key}, rate_limit: {{ unit: year, requests_per_unit: {limit} }} }}\n")
        };
        format!("domain: api\ndescriptors:\n{}{}", line("same", 1), line("changed", limit))
    };
    let (in_force, candidate) = (rules(&[("api.yaml", &text(1))]), rules(&[("api.yaml", &text(100))]));
    let builder = Server::builder().rules(in_force.path()).store("memory");
    let builder = builder.set("rules.candidate_dir", candidate.path().to_str().unwrap());
    let operator = Operator::with(builder.set("rules.candidate_share", "1"));
    let report = || operator.call(READ, "GetCandidate", "{}").1;
    wait_for("the candidate to be evaluated", || (report()["active"] == true).then_some(()));
    let client = operator.server.client().await;
    for key in ["same", "changed", "changed", "changed"] {
        client.check(request_for("api", &[(key, "x")])).await.unwrap();
    }
    let report = wait_for("all hits to be counted", || {
        let report = report();
        let listed = report["rules"].as_array()?;
        let is_counted = listed.iter().any(|rule| rule["outcomes"]["newlyAllowed"] == "2");
        (listed.len() == 2 && is_counted).then(|| report.clone())
    });
    assert_eq!(report["rules"][0]["rule"]["name"], "changed", "{report}");
}
