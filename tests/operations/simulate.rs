//! Recorded traffic, asked again of other rules.

use std::{fs, path::Path, process::Output};

use crate::support::{Server, descriptor, plain::Unit, request_for, rules, server::command, wait_for};

fn simulate(args: &[&str]) -> Output {
    command().arg("simulate").args(args).output().unwrap()
}

/// What it says on standard output, when nothing is wrong.
fn said(args: &[&str]) -> String {
    let output = simulate(args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn json(args: &[&str]) -> serde_json::Value {
    serde_json::from_str(&said(&[args, &["--json"]].concat())).unwrap()
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

/// Asked again of the rules that were in force, every request has the answer that it had; and of stricter ones it is told
/// whom they would refuse.
#[tokio::test]
async fn a_simulation_says_what_the_service_said() {
    let (in_force, traffic) = (rules(&[("api.yaml", RULES)]), tempfile::tempdir().unwrap());
    let builder = Server::builder().rules(in_force.path()).store("memory");
    let server = builder.set("record.dir", path(traffic.path())).set("record.share", "1").start();
    let client = server.client().await;
    let (mut refused, mut requests) = (0, 0);
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
                refused += u64::from(!answer.allowed());
                requests += 1;
            }
        }
    }
    assert!((20..110).contains(&refused), "{refused} of {requests}");
    wait_for("all to be recorded", || {
        (server.metric("sluicegate_recorded_requests_total") >= requests as f64).then_some(())
    });
    server.signal("TERM");
    assert!(server.wait().await.success());
    let (rules_dir, traffic_dir) = (path(in_force.path()), path(traffic.path()));
    let same = json(&["--rules", rules_dir, "--traffic", traffic_dir]);
    assert_eq!(
        (&same["requests"], &same["denied"], &same["denied_before"]),
        (&requests.into(), &refused.into(), &refused.into())
    );
    for rule in same["rules"].as_array().unwrap() {
        assert_eq!((&rule["hits"]["newly_denied"], &rule["hits"]["newly_allowed"]), (&0.into(), &0.into()), "{rule}");
    }
    // Against itself nothing changes, and with less more is refused.
    let against = json(&["--rules", rules_dir, "--against", rules_dir, "--traffic", traffic_dir]);
    assert_eq!(against["denied"], against["denied_before"]);
    let strict = rules(&[("api.yaml", &RULES.replace("requests_per_unit: 5", "requests_per_unit: 1"))]);
    let html = traffic.path().join("page.html");
    let text = said(&["--rules", path(strict.path()), "--traffic", traffic_dir, "--html", path(&html)]);
    assert!(text.contains("api.user: 1 per minute") && text.contains("user=a: "), "{text}");
    let page = fs::read_to_string(&html).unwrap();
    assert!(
        page.contains("<svg")
            && page.contains("allowed")
            && page.contains("hits per second")
            && !page.contains("http://sl"),
        "{page}"
    );
    assert!(!page.contains("<script") && !page.contains("src="), "it needs a network");
}

/// Of a share of all entities every request is there, and no name can be read where a key hides them.
#[tokio::test]
async fn whole_entities_are_recorded_and_names_can_be_hidden() {
    let (in_force, traffic) = (rules(&[("api.yaml", RULES)]), tempfile::tempdir().unwrap());
    let key = traffic.path().join("key");
    fs::write(&key, "a secret").unwrap();
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
    let (asked, entities) = (rule["hits"]["requested"].as_u64().unwrap(), rule["entities"].as_u64().unwrap());
    assert_eq!(asked, entities * 3);
    assert!((25..80).contains(&entities), "{entities}");
    // Those who would be refused are listed.
    let strict = rules(&[("api.yaml", &RULES.replace("requests_per_unit: 5", "requests_per_unit: 1"))]);
    let text = said(&["--rules", path(strict.path()), "--traffic", path(traffic.path())]);
    assert!(text.contains("user=") && !text.contains("person"), "{text}");
}

#[test]
fn limits_are_suggested_from_an_access_log() {
    let folder = tempfile::tempdir().unwrap();
    let (log, mapping) = (folder.path().join("access.log"), folder.path().join("mapping.yaml"));
    let mut text = String::new();
    for second in 0..600_u32 {
        for user in 0..20 {
            // Each a request every other second, and one of them ten.
            let times = if user == 7 { 10 } else { u32::from((second + user) % 2 == 0) };
            for _ in 0..times {
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
    let (said_out, complained) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert!(complained.contains("1 lines skipped: not an access log entry"), "{complained}");
    assert!(said_out.contains("api user: 20 entities"), "{said_out}");
    assert!(said_out.contains("per minute: p50 30, p90 30, p99 600"), "{said_out}");
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
fn what_cannot_be_simulated_says_why() {
    let folder = rules(&[("api.yaml", RULES), ("bad.yml", "domain: x\ndescriptors: [{}]\n")]);
    let good = rules(&[("api.yaml", RULES)]);
    let file = folder.path().join("traffic.zst");
    fs::write(&file, "no traffic").unwrap();
    for (args, expected) in [
        (vec!["--rules", path(good.path())], "--traffic"),
        (vec!["--traffic", path(&file)], "--rules"),
        (vec!["--rules", path(folder.path()), "--traffic", path(&file)], "bad.yml:2"),
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
