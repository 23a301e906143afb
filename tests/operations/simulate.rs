//! `sluicegate simulate`: recorded traffic, replayed against other rules.

use std::{fs, path::Path, process::Output};

use crate::support::{Server, descriptor, raw_client::Unit, request_for, rules, server::command, wait_for};

fn simulate(args: &[&str]) -> Output {
    command().arg("simulate").args(args).output().unwrap()
}

/// Runs a simulation and returns its standard output. Panics if it fails.
fn output(args: &[&str]) -> String {
    let output = simulate(args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn json(args: &[&str]) -> serde_json::Value {
    serde_json::from_str(&output(&[args, &["--json"]].concat())).unwrap()
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

const RULES: &str = "\
domain: api
descriptors:
- key: user
  rate_limit: { unit: minute, requests_per_unit: 5 }
- key: bucket
  rate_limit: { unit: second, requests_per_unit: 3, algorithm: token_bucket, burst: 6 }
- key: both
  rate_limit: { unit: hour, requests_per_unit: 8, algorithm: sliding_window }
";

/// Replayed against the rules that were in force, every request has its original decision. Stricter rules deny more,
/// and the report lists the entities.
#[tokio::test]
async fn a_simulation_repeats_the_decisions_of_the_service() {
    let (in_force, traffic) = (rules(&[("api.yaml", RULES)]), tempfile::tempdir().unwrap());
    let builder = Server::builder().rules(in_force.path()).store("memory");
    let server = builder.set("record.dir", path(traffic.path())).set("record.share", "1").start();
    let client = server.client().await;
    let (mut denied, mut requests) = (0, 0);
    for round in 0..40 {
        for user in ["a", "b", "c"] {
            let both = request_for("api", &[("user", user)]).descriptor(descriptor(&[("both", user)]));
            let own = request_for("api", &[]).descriptor(descriptor(&[("own", user)]).limit(2, Unit::Hour, None));
            let request = match round % 4 {
                0 => request_for("api", &[("user", user)]).hits(round % 3 + 1),
                1 => request_for("api", &[("bucket", user)]),
                2 => both,
                _ => own,
            };
            if let Ok(answer) = client.check(request).await {
                denied += u64::from(!answer.allowed());
                requests += 1;
            }
        }
    }
    assert!((20..110).contains(&denied), "{denied} of {requests} denied");
    wait_for("all requests to be recorded", || {
        (server.metric("sluicegate_recorded_requests_total") >= requests as f64).then_some(())
    });
    server.signal("TERM");
    assert!(server.wait().await.success());
    let (rules_dir, traffic_dir) = (path(in_force.path()), path(traffic.path()));
    let same = json(&["--rules", rules_dir, "--traffic", traffic_dir]);
    assert_eq!(
        (&same["requests"], &same["denied"], &same["denied_before"]),
        (&requests.into(), &denied.into(), &denied.into())
    );
    for rule in same["rules"].as_array().unwrap() {
        assert_eq!((&rule["hits"]["newly_denied"], &rule["hits"]["newly_allowed"]), (&0.into(), &0.into()), "{rule}");
    }
    // Compared with themselves the rules change nothing. A lower limit denies more.
    let against = json(&["--rules", rules_dir, "--against", rules_dir, "--traffic", traffic_dir]);
    assert_eq!(against["denied"], against["denied_before"]);
    let strict = rules(&[("api.yaml", &RULES.replace("requests_per_unit: 5", "requests_per_unit: 1"))]);
    let html = traffic.path().join("page.html");
    let text = output(&["--rules", path(strict.path()), "--traffic", traffic_dir, "--html", path(&html)]);
    assert!(text.contains("api.user: 1 per minute") && text.contains("user=a: "), "{text}");
    let page = fs::read_to_string(&html).unwrap();
    assert!(
        page.contains("<svg")
            && page.contains("allowed")
            && page.contains("hits per second")
            && !page.contains("http://sl"),
        "{page}"
    );
    assert!(!page.contains("<script") && !page.contains("src="), "the page loads external resources");
}

/// All requests of a share of the entities are recorded. With a hash key, names are not readable.
#[tokio::test]
async fn all_requests_of_sampled_entities_are_recorded_and_names_are_hashed() {
    let (in_force, traffic) = (rules(&[("api.yaml", RULES)]), tempfile::tempdir().unwrap());
    let key = traffic.path().join("key");
    fs::write(&key, "a secret of some bytes").unwrap();
    let builder = Server::builder().rules(in_force.path()).store("memory").set("record.dir", path(traffic.path()));
    let server = builder.set("record.share", "0.25").set("record.hash_key_file", path(&key)).start();
    let client = server.client().await;
    for user in 0..200 {
        for _ in 0..3 {
            client.check(request_for("api", &[("user", &format!("person-{user}"))])).await.unwrap();
        }
    }
    server.signal("TERM");
    assert!(server.wait().await.success());
    let result = json(&["--rules", path(in_force.path()), "--traffic", path(traffic.path())]);
    let rule = &result["rules"][0];
    let (hits, entities) = (rule["hits"]["requested"].as_u64().unwrap(), rule["entities"].as_u64().unwrap());
    assert_eq!(hits, entities * 3);
    assert!((25..80).contains(&entities), "{entities}");
    // The report lists the denied entities by their hashes.
    let strict = rules(&[("api.yaml", &RULES.replace("requests_per_unit: 5", "requests_per_unit: 1"))]);
    let text = output(&["--rules", path(strict.path()), "--traffic", path(traffic.path())]);
    assert!(text.contains("user=") && !text.contains("person"), "{text}");
}

#[test]
fn limits_are_suggested_from_an_access_log() {
    let folder = tempfile::tempdir().unwrap();
    let (log, mapping) = (folder.path().join("access.log"), folder.path().join("mapping.yaml"));
    let mut text = String::new();
    for second in 0..600_u32 {
        for user in 0..20 {
            // Each user sends a request every other second, and one user sends ten per second.
            let requests = if user == 7 { 10 } else { u32::from((second + user) % 2 == 0) };
            for _ in 0..requests {
                text += &format!(
                    "{{\"start_time\": {}, \"x_user\": \"u{user}\", \"path\": \"/a?b\"}}\n",
                    1_700_000_000 + second
                );
            }
        }
    }
    text += "not json\n\n";
    fs::write(&log, &text).unwrap();
    fs::write(&mapping, "domain: api\ntime: start_time\ndescriptors:\n- [{ key: user, field: x_user }]\n").unwrap();
    let output = simulate(&["--suggest", "--traffic", path(&log), "--mapping", path(&mapping)]);
    let (text, warnings) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert!(warnings.contains("1 line skipped: not an access log entry"), "{warnings}");
    assert!(text.contains("api user: 20 entities"), "{text}");
    assert!(text.contains("per minute: p50 30, p90 30, p99 600"), "{text}");
    let rules = rules(&[(
        "api.yaml",
        "domain: api\ndescriptors: [{key: user, rate_limit: {unit: minute, requests_per_unit: 36}}]\n",
    )]);
    let result = json(&["--rules", path(rules.path()), "--traffic", path(&log), "--mapping", path(&mapping)]);
    assert_eq!((&result["requests"], &result["rules"][0]["entities_denied"]), (&11_700.into(), &1.into()));
    assert_eq!(result["rules"][0]["most_denied"][0]["entity"], "user=u7");
    assert_eq!(result["unknown_before"], 11_700);
}

#[test]
fn times_and_addresses_of_access_logs_have_many_forms_and_other_lines_are_counted_by_reason() {
    let folder = tempfile::tempdir().unwrap();
    let (log, mapping) = (folder.path().join("access.log"), folder.path().join("mapping.yaml"));
    let times = ["\"2026-11-27T02:00:00+02:00\"", "\"1795737600\"", "1795737600.5", "\"1795737600250\""];
    let addresses = ["2001:db8::1", "[2001:db8::1]:443", "[2001:db8::1]", "2001:db8::2", "192.0.2.1:443", "192.0.2.1"];
    let mut text = Vec::new();
    for time in times {
        for address in addresses {
            text.extend_from_slice(format!("{{\"t\": {time}, \"a\": \"{address}\"}}\n").as_bytes());
        }
    }
    text.extend_from_slice(b"not json\n{\"a\": \"192.0.2.1\"}\n{\"t\": \"noon\"}\n{\"t\": \"then\"}\n\xff\n");
    fs::write(&log, text).unwrap();
    fs::write(&mapping, "domain: api\ntime: t\ndescriptors:\n- [{ key: ip, field: a, cut: port }]\n").unwrap();
    let limit = "domain: api\ndescriptors: [{key: ip, rate_limit: {unit: minute, requests_per_unit: 4}}]\n";
    let rules = rules(&[("api.yaml", limit)]);
    let args = ["--rules", path(rules.path()), "--traffic", path(&log), "--mapping", path(&mapping)];
    // Of three addresses with 12, 4 and 8 requests in one minute, 8 and 4 requests are denied.
    let result = json(&args);
    assert_eq!((&result["requests"], &result["denied"]), (&24.into(), &12.into()), "{result}");
    assert_eq!(result["rules"][0]["entities"], 3);
    let warnings = String::from_utf8(simulate(&args).stderr).unwrap();
    for expected in [
        "1 line skipped: not UTF-8\n",
        "1 line skipped: not an access log entry in JSON\n",
        "1 line skipped: the field that `time` of the mapping names is missing\n",
        "2 lines skipped: the time is neither RFC 3339 nor",
    ] {
        assert!(warnings.contains(expected), "{expected}: {warnings}");
    }
}

#[test]
fn invalid_arguments_are_errors() {
    let folder = rules(&[("api.yaml", RULES), ("bad.yml", "domain: x\ndescriptors: [{}]\n")]);
    let good = rules(&[("api.yaml", RULES)]);
    let file = folder.path().join("traffic.gz");
    fs::write(&file, "no traffic").unwrap();
    let empty = folder.path().join("empty.gz");
    fs::write(&empty, "").unwrap();
    for (args, expected) in [
        (vec!["--rules", path(good.path())], "--traffic"),
        (vec!["--traffic", path(&file)], "--rules"),
        (vec!["--rules", path(folder.path()), "--traffic", path(&empty)], "bad.yml:2"),
        (vec!["--rules", path(good.path()), "--traffic", path(&file)], "cannot use"),
        (vec!["--rules", path(good.path()), "--traffic", "/nowhere"], "cannot use /nowhere"),
        (
            vec!["--rules", path(good.path()), "--traffic", path(&file), "--mapping", path(&file)],
            "the mapping cannot be read",
        ),
    ] {
        let output = simulate(&args);
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && error.contains(expected), "{args:?}: {error}");
    }
}

#[test]
fn rules_are_listed_by_the_number_of_changed_decisions() {
    let folder = tempfile::tempdir().unwrap();
    let (log, mapping) = (folder.path().join("access.log"), folder.path().join("mapping.yaml"));
    // The number of hits of each key in the first and in the second of two minutes of one hour.
    let hits = [("denied", 5, 0), ("some", 3, 1), ("most", 4, 2)];
    let mut text = String::new();
    for (minute, second) in [(0, 1_700_000_000), (1, 1_700_000_060)] {
        for (key, first, later) in hits {
            for _ in 0..if minute == 0 { first } else { later } {
                text += &format!("{{\"at\": {second}, \"{key}\": \"x\"}}\n");
            }
        }
    }
    fs::write(&log, text).unwrap();
    let keys = hits.map(|(key, ..)| format!("- [{{ key: {key}, field: {key} }}]\n")).concat();
    fs::write(&mapping, format!("domain: api\ntime: at\ndescriptors:\n{keys}")).unwrap();
    let files = |limits: [(&str, &str, u32); 3]| {
        let file = |(key, unit, limit): (&str, &str, u32)| {
            format!(
                "domain: api\ndescriptors: [{{key: {key}, rate_limit: {{unit: {unit}, requests_per_unit: {limit}}}}}]\n"
            )
        };
        let [one, two, three] = limits.map(file);
        rules(&[("one.yaml", &one), ("two.yaml", &two), ("three.yaml", &three)])
    };
    let new = files([("denied", "minute", 2), ("some", "minute", 2), ("most", "minute", 2)]);
    let old = files([("denied", "hour", 5), ("some", "hour", 3), ("most", "hour", 4)]);
    let rules = ["--merge-domains", "--rules", path(new.path()), "--against", path(old.path())];
    let args = [&rules[..], &["--traffic", path(&log), "--mapping", path(&mapping)]].concat();
    let result = json(&args);
    let changed: Vec<_> = result["rules"]
        .as_array()
        .unwrap()
        .iter()
        .map(|rule| {
            let count = |name: &str| rule["hits"][name].as_u64().unwrap();
            (rule["rule"].as_str().unwrap(), count("newly_denied"), count("newly_allowed"))
        })
        .collect();
    assert_eq!(
        changed,
        [("api.most: 2 per minute", 2, 2), ("api.denied: 2 per minute", 3, 0), ("api.some: 2 per minute", 1, 1)]
    );

    let output = simulate(&args);
    let (text, messages) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert!(!text.contains("unknown") && !messages.contains("skipped"), "{text}{messages}");
    let text = self::output(&[
        "--rules",
        path(new.path()),
        "--merge-domains",
        "--traffic",
        path(&log),
        "--mapping",
        path(&mapping),
    ]);
    assert!(text.contains("the earlier decision of 15 requests is unknown; they count as allowed"), "{text}");

    // A terminal shows the progress.
    let words = [&["simulate"], &args[..]].concat().join(" ");
    let program = crate::support::server::binary();
    let line = format!("{} {words}", program.display());
    let output = std::process::Command::new("script").args(["-qec", &line, "/dev/null"]).output().unwrap();
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(shown.contains(&format!("\r[{}] 100%", "#".repeat(40))), "{shown}");
}
