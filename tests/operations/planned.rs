//! Planned overrides: in force at their second on every instance, also without the store, and replaced by later changes.

use std::{
    fs,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use crate::support::{
    Operator, RedisServer, Server, descriptor,
    operator::{OPERATE, READ},
    raw_client::Request,
    request_for, rules, wait_for, wait_for_async,
};

const RULES: &str = "\
domain: api
plans:
  default: free
  limits:
    free: { calls: { unit: year, requests_per_unit: 1000 } }
    pro: { calls: { unit: year, requests_per_unit: 5000 } }
descriptors:
- key: user
  rate_limit: { unit: year, requests_per_unit: 2000 }
- key: tenant
  rate_limit: { by_plan: calls }
- key: bucket
  rate_limit: { unit: year, requests_per_unit: 3000, algorithm: token_bucket }
";

fn folder() -> tempfile::TempDir {
    rules(&[("api.yaml", RULES)])
}

/// Returns the time since the Unix epoch.
fn now() -> Duration {
    #[allow(clippy::disallowed_methods, reason = "overrides begin by the wall clock")]
    let now = SystemTime::now();
    now.duration_since(UNIX_EPOCH).unwrap()
}

/// A full second in the future.
#[derive(Clone, Copy)]
struct Beginning(u64);

impl Beginning {
    /// Returns the first full second after this number of seconds.
    fn after(seconds: u64) -> Self {
        Self(now().as_secs() + seconds + 1)
    }

    fn text(self) -> String {
        humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(self.0)).to_string()
    }

    /// Returns whether the time is before the beginning.
    fn is_ahead(self) -> bool {
        now() < Duration::from_secs(self.0)
    }
}

/// Returns the limit in the answer to a request that takes nothing.
async fn limit(server: &Server, entry: (&str, &str)) -> Option<u32> {
    let request = Request::new("api").descriptor(descriptor(&[entry]).hits(0));
    let answer = server.client().await.check(request).await.unwrap();
    Some(answer.0.statuses[0].current_limit.as_ref()?.requests_per_unit)
}

async fn is_allowed(server: &Server, entry: (&str, &str)) -> bool {
    server.client().await.check(request_for("api", &[entry])).await.unwrap().allowed()
}

async fn wait_for_limit(server: &Server, entry: (&str, &str), expected: u32) {
    let what = format!("the limit {expected} of {entry:?}");
    wait_for_async(&what, async || (limit(server, entry).await == Some(expected)).then_some(())).await;
}

/// Waits until an instance knows a number of planned overrides.
fn wait_for_planned(operator: &Operator, expected: f64) {
    wait_for("the planned overrides", || {
        let planned = operator.server.metric("sluicegate_overrides{kind=\"planned\"}");
        (planned == expected).then_some(())
    });
}

/// Returns the limit of bob that is in force on an instance, without a call to the store.
fn in_force(operator: &Operator) -> Option<String> {
    let (_, listed) = operator.call(READ, "ListOverrides", r#"{"prefix":"limit|api|user=bob"}"#);
    let overrides = listed["overrides"].as_array().cloned().unwrap_or_default();
    let limit = overrides.into_iter().find(|entry| entry["target"]["limit"].is_object())?;
    Some(limit["value"].as_str().unwrap().to_owned())
}

/// Checks that the limit of bob changes from one value to another at the beginning, and not before it.
fn check_beginning(operators: &[&Operator], beginning: Beginning, before: Option<&str>, after: &str) {
    for operator in operators {
        wait_for("the beginning", || {
            let found = in_force(operator);
            if beginning.is_ahead() {
                assert_eq!(found.as_deref(), before, "before the beginning");
            }
            (found.as_deref() == Some(after)).then_some(())
        });
    }
    assert!(!beginning.is_ahead());
}

#[tokio::test]
async fn a_planned_override_begins_at_its_second_on_every_instance() {
    let (folder, redis) = (folder(), RedisServer::start());
    let start = || Operator::start(folder.path(), &redis.url());
    let (one, other) = (start(), start());
    let beginning = Beginning::after(4);
    let from = beginning.text();
    one.ctl(&["limit", "set", "api", "user=bob", "9/year"]);
    let output = one.ctl(&["limit", "set", "api", "user=bob", "10/year", "--from", &from, "--reason", "sale"]);
    assert_eq!(
        output,
        format!("planned|{from}|limit|api|user=bob: 10/year\nversion 2, known to all instances within 1 s\n")
    );
    one.ctl(&["plan", "assign", "api", "tenant=acme", "pro", "--from", &from]);
    one.ctl(&["switch", "deny", "rule", "api", "bucket", "--from", &from]);
    wait_for_planned(&other, 3.0);
    let list = other.ctl(&["limit", "list", "api", "user=bob"]);
    assert!(list.contains(&format!("planned|{from}|limit|api|user=bob")) && list.contains("10/year"), "{list}");
    let switches = other.ctl(&["switch", "list"]);
    assert!(switches.contains(&format!("planned switch {from}|rule|api|bucket deny")), "{switches}");
    let exported = other.ctl(&["export"]);
    assert!(exported.contains(&format!("planned|{from}|plan|api|tenant=acme,pro,\n")), "{exported}");
    let inspected = other.ctl(&["inspect", "api", "user=bob"]);
    assert!(inspected.contains(&format!("planned override: planned|{from}|limit|api|user=bob 10/year")), "{inspected}");
    // The store is unavailable at the beginning.
    assert!(beginning.is_ahead(), "the machine is too slow");
    redis.freeze();
    check_beginning(&[&one, &other], beginning, Some("9/year"), "10/year");
    redis.thaw();
    for operator in [&one, &other] {
        wait_for_limit(&operator.server, ("user", "bob"), 10).await;
        wait_for_limit(&operator.server, ("tenant", "acme"), 5_000).await;
        wait_for_async("the switch", async || (!is_allowed(&operator.server, ("bucket", "x")).await).then_some(()))
            .await;
        wait_for_planned(operator, 0.0);
    }
    // One instance writes the overrides that have begun to the store.
    let audit = wait_for("the beginning in the audit log", || {
        Some(one.ctl(&["audit"])).filter(|audit| audit.contains("began as planned"))
    });
    assert_eq!(audit.matches("began as planned").count(), 1, "{audit}");
    let in_store = "limit|api|user=bob,10/year,\nplan|api|tenant=acme,pro,\nswitch|rule|api|bucket,deny,\n";
    wait_for("the same overrides at both instances", || {
        (one.ctl(&["export"]) == in_store && other.ctl(&["export"]) == in_store).then_some(())
    });
    let begun = one.ctl(&["limit", "get", "api", "user=bob"]);
    assert!(begun.contains("alice") && begun.contains("sale"), "{begun}");
    assert_eq!(limit(&start().server, ("user", "bob")).await, Some(10));
}

/// Every instance is down at the beginning.
#[tokio::test]
async fn a_planned_override_begins_at_a_later_start() {
    let (folder, redis, journal) = (folder(), RedisServer::start(), tempfile::tempdir().unwrap());
    let file = journal.path().join("overrides").display().to_string();
    let in_redis = || Operator::start(folder.path(), &redis.url());
    let in_file =
        || Operator::with(Server::builder().rules(folder.path()).store("memory").set("overrides.file", &file));
    let starts: [&dyn Fn() -> Operator; 2] = [&in_redis, &in_file];
    for start in starts {
        let operator = start();
        let beginning = Beginning::after(6);
        operator.ctl(&["limit", "set", "api", "user=bob", "10/year", "--from", &beginning.text()]);
        assert_eq!(limit(&operator.server, ("user", "bob")).await, Some(2_000));
        // A restart before the beginning.
        drop(operator);
        let operator = start();
        wait_for_planned(&operator, 1.0);
        drop(operator);
        wait_for("the beginning", || (!beginning.is_ahead()).then_some(()));
        let operator = start();
        assert_eq!(limit(&operator.server, ("user", "bob")).await, Some(10));
        wait_for("the override under its own target", || {
            (operator.ctl(&["export"]) == "limit|api|user=bob,10/year,\n").then_some(())
        });
        drop(operator);
        let operator = start();
        assert_eq!(limit(&operator.server, ("user", "bob")).await, Some(10));
        assert_eq!(operator.ctl(&["export"]), "limit|api|user=bob,10/year,\n");
    }
}

#[tokio::test]
async fn a_planned_override_is_removed_before_it_begins_or_expires_afterwards() {
    let folder = folder();
    let operator = Operator::start(folder.path(), "memory");
    let server = &operator.server;
    let [first, second, third] = [4, 7, 9].map(Beginning::after);
    operator.ctl(&["limit", "set", "api", "user=bob", "9/year"]);
    for (beginning, value) in [(first, "10/year"), (second, "11/year")] {
        let until = third.text();
        operator.ctl(&["limit", "set", "api", "user=bob", value, "--from", &beginning.text(), "--until", &until]);
    }
    // Only the one with this beginning is removed, and not the override in force.
    let unset = |from: &str| operator.try_ctl(&["limit", "unset", "api", "user=bob", "--from", from]);
    let error = unset(&third.text()).unwrap_err();
    assert!(error.contains("nothing was removed; --from TIME removes a planned override"), "{error}");
    let output = unset(&first.text()).unwrap();
    assert!(output.starts_with(&format!("planned|{}|limit|api|user=bob: removed", first.text())), "{output}");
    assert!(output.contains(&format!("still planned: planned|{}|limit|api|user=bob", second.text())), "{output}");
    unset(&first.text()).unwrap_err();
    check_beginning(&[&operator], second, Some("9/year"), "11/year");
    wait_for_limit(server, ("user", "bob"), 11).await;
    // The replaced override does not return.
    wait_for_limit(server, ("user", "bob"), 2_000).await;
    assert!(!third.is_ahead());
    wait_for("no overrides", || operator.ctl(&["export"]).is_empty().then_some(()));
    assert!(operator.ctl(&["audit"]).contains("user=bob: removed"));
    unset(&second.text()).unwrap_err();
}

/// The changes follow the beginning immediately, so that they usually come before the override is written to the store.
#[tokio::test]
async fn a_later_change_replaces_a_planned_override_that_has_begun() {
    let (folder, redis) = (folder(), RedisServer::start());
    let start = || Operator::start(folder.path(), &redis.url());
    let (one, other) = (start(), start());
    let beginning = Beginning::after(2);
    let from = beginning.text();
    for user in ["user=bob", "user=eve"] {
        one.ctl(&["limit", "set", "api", user, "10/year", "--from", &from]);
    }
    wait_for_planned(&other, 2.0);
    check_beginning(&[&other], beginning, None, "10/year");
    other.ctl(&["limit", "unset", "api", "user=bob"]);
    other.ctl(&["limit", "set", "api", "user=eve", "12/year"]);
    for operator in [&one, &other] {
        wait_for("only the later change", || {
            (operator.ctl(&["export"]) == "limit|api|user=eve,12/year,\n").then_some(())
        });
        wait_for_limit(&operator.server, ("user", "bob"), 2_000).await;
        wait_for_limit(&operator.server, ("user", "eve"), 12).await;
    }
    assert!(one.try_ctl(&["limit", "unset", "api", "user=bob", "--from", &from]).is_err());
    let late = start();
    assert_eq!(late.ctl(&["export"]), "limit|api|user=eve,12/year,\n");
}

#[test]
fn a_planned_override_that_makes_no_sense_is_rejected() {
    let folder = folder();
    let operator = Operator::start(folder.path(), "memory");
    let from = Beginning::after(1_000).text();
    let from = from.as_str();
    let set = |options: &[&str]| {
        let command = ["limit", "set", "api", "user=bob", "10/year", "--from"];
        operator.try_ctl(&[&command[..], options].concat())
    };
    for (options, expected) in [
        (&["2026-11-22T04:00:00Z"][..], "the beginning of the override has passed; leave it out to set"),
        (&[from, "--until", from], "the end of the override must be after its beginning"),
        (&[from, "--until", "2026-11-22T04:00:00Z"], "the end of the override"),
        (&["tomorrow"], "the beginning is invalid"),
        (&["2106-02-07T06:28:16Z"], "from must be at most 2106-02-07T06:28:15Z"),
        (&[from, "--additive"], "cannot be used with"),
        (&[from, "--if-version", "1"], "has version 0"),
    ] {
        let error = set(options).unwrap_err();
        assert!(error.contains(expected), "{options:?}: {error}");
    }
    let here = operator.try_ctl(&["switch", "off", "everything", "--from", from, "--here"]).unwrap_err();
    assert!(here.contains("cannot be used with"), "{here}");
    assert_eq!(operator.ctl(&["export"]), "");
    set(&[from, "--if-version", "0"]).unwrap();
    // The calls of other clients are checked, too.
    let planned = |rest: &str| {
        let target = format!(r#"{{"planned":{{"from":"{from}","switch":{{"everything":true}}}}}}"#);
        format!(r#"{{"changes":[{{"target":{target},"value":"off"}}]{rest}}}"#)
    };
    for (body, expected) in [
        (planned(r#","additive":true"#), "additive is not available for overrides that begin later"),
        (planned(r#","thisInstance":true"#), "this_instance is only available for switches that apply at once"),
    ] {
        let (status, answer) = operator.call(OPERATE, "PutOverrides", &body);
        assert!(status == 400 && answer.to_string().contains(expected), "{answer}");
    }
    assert_eq!(operator.call(OPERATE, "PutOverrides", &planned("")).0, 200);
    let (_, listed) = operator.call(READ, "ListOverrides", r#"{"prefix":"switch|"}"#);
    let target = &listed["overrides"][0]["target"]["planned"];
    assert!(target["from"] == from && target["switch"]["everything"] == true && listed["planned"] == "2", "{listed}");
    let (_, health) = operator.call(READ, "GetHealth", "{}");
    assert_eq!(health["plannedSwitches"][0]["target"]["planned"]["from"], from, "{health}");
}

#[test]
fn planned_overrides_are_exported_and_imported() {
    let folder = folder();
    let operator = Operator::start(folder.path(), "memory");
    let from = Beginning::after(1_000).text();
    let file = tempfile::NamedTempFile::new().unwrap();
    let past = "2026-11-22T04:00:00Z";
    let text = format!(
        "limit|api|user=bob,1/year,\nplanned|{past}|limit|api|user=bob,2/year,\n\
         planned|{past}|switch|everything,shadow,\nplanned|{from}|limit|api|user=bob,3/year,2099-01-01T00:00:00Z\n\
         switch|everything,off,\n"
    );
    fs::write(file.path(), text).unwrap();
    // Those that should have begun replace the overrides of their targets.
    assert_eq!(operator.ctl(&["import", file.path().to_str().unwrap()]), "5 overrides set\n");
    let expected = format!(
        "limit|api|user=bob,2/year,\nplanned|{from}|limit|api|user=bob,3/year,2099-01-01T00:00:00Z\n\
         switch|everything,shadow,\n"
    );
    assert_eq!(operator.ctl(&["export"]), expected);
    fs::write(file.path(), &expected).unwrap();
    operator.ctl(&["import", file.path().to_str().unwrap()]);
    assert_eq!(operator.ctl(&["export"]), expected);
}
