//! Candidate rules: evaluation on a share of the traffic, promotion and rollback.

use std::{fs, path::Path};

use crate::support::{
    Operator, RedisServer, Server, descriptor,
    operator::OPERATE,
    raw_client::{Request, Unit},
    request_for, rules, wait_for, wait_for_async,
};

fn text(limit: u32) -> String {
    format!(
        "domain: api\ndescriptors:\n- key: user\n  rate_limit: {{ unit: year, requests_per_unit: {limit}, name: of_user }}\n"
    )
}

fn folder(limit: u32) -> tempfile::TempDir {
    rules(&[("api.yaml", &text(limit))])
}

fn upload(operator: &Operator, folder: &Path, share: &str) {
    operator.ctl(&["candidate", "upload", folder.to_str().unwrap(), "--share", share]);
}

/// Returns the outcomes of the candidate rules: hits requested, denied, newly denied and newly allowed.
fn outcomes(operator: &Operator) -> [u64; 4] {
    let report = operator.ctl(&["candidate", "report", "--json"]);
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    let number = |name: &str| {
        let number =
            |rule: &serde_json::Value| rule["outcomes"][name].as_str().map_or(0, |text| text.parse::<u64>().unwrap());
        report["rules"].as_array().map_or(0, |rules| rules.iter().map(number).sum())
    };
    ["requested", "denied", "newlyDenied", "newlyAllowed"].map(number)
}

async fn limit(operator: &Operator, user: &str) -> u32 {
    let answer = operator.server.client().await.check(request_for("api", &[("user", user)])).await.unwrap();
    answer.0.statuses[0].current_limit.as_ref().unwrap().requests_per_unit
}

async fn evaluate_a_candidate(store: &str) {
    let (in_force, candidate) = (folder(4), folder(2));
    let operator = Operator::start(in_force.path(), store);
    assert!(operator.ctl(&["candidate", "report"]).contains("no candidate rules"));
    upload(&operator, candidate.path(), "100%");
    let client = operator.server.client().await;
    for (user, hits) in [("bob", 5), ("eve", 3), ("mia", 1)] {
        for hit in 1..=hits {
            let answer = client.check(request_for("api", &[("user", user)])).await.unwrap();
            // Answers do not change.
            assert_eq!((answer.allowed(), answer.remaining()), (hit <= 4, Some(4_u32.saturating_sub(hit))));
        }
    }
    // Of 9 hits, the candidate denies 3 of bob's and one of eve's. The rules in force deny one of bob's as well.
    wait_for("all hits to be counted", || (outcomes(&operator) == [9, 4, 3, 0]).then_some(()));
    let report = operator.ctl(&["candidate", "report"]);
    for expected in ["api of_user: 2 per year", "api|user=bob", "api|user=eve", "100% of all counters"] {
        assert!(report.contains(expected), "{expected}: {report}");
    }
    assert!(!report.contains("user=mia"), "{report}");
    // The statistics do not count the candidate's hits.
    let top = operator.ctl(&["top", "--requested", "-n", "1"]);
    assert!(top.lines().nth(2).is_some_and(|line| line.starts_with("5 ")), "{top}");
    let metric = "sluicegate_candidate_hits{domain=\"api\",key1=\"user\",outcome=\"newly_denied\"}";
    assert_eq!(operator.server.metric(metric), 3.0);
    // Overrides apply to the candidate, too.
    operator.ctl(&["limit", "set", "api", "user=max", "50/year"]);
    for _ in 0..5 {
        client.check(request_for("api", &[("user", "max")])).await.unwrap();
    }
    wait_for("max's hits to be counted", || (outcomes(&operator) == [14, 4, 3, 0]).then_some(()));
    // So do requested limits, and their hits are counted once.
    let own = Request::new("api").descriptor(descriptor(&[("user", "own")]).limit(7, Unit::Year, None));
    client.check(own).await.unwrap();
    wait_for("the hit of own to be counted", || (outcomes(&operator) == [15, 4, 3, 0]).then_some(()));
    let series = "ratelimit_service_rate_limit_total_hits{domain=\"api\",key1=\"user_own\"}";
    assert_eq!(operator.server.metric(series), 1.0);
    // A candidate with a higher limit allows hits that the rules in force deny.
    upload(&operator, folder(100).path(), "100%");
    client.check(request_for("api", &[("user", "bob")])).await.unwrap();
    wait_for("the hit of bob to be newly allowed", || (outcomes(&operator) == [1, 0, 0, 1]).then_some(()));
    // A candidate without a rule for the descriptor allows them, too.
    upload(&operator, rules(&[("api.yaml", "domain: api\ndescriptors: [{key: other}]\n")]).path(), "100%");
    client.check(request_for("api", &[("user", "bob")])).await.unwrap();
    client.check(request_for("api", &[("user", "mia")])).await.unwrap();
    wait_for("the hit of bob to be newly allowed again", || (outcomes(&operator) == [1, 0, 0, 1]).then_some(()));
    operator.ctl(&["candidate", "drop"]);
    wait_for("the candidate to be dropped", || {
        operator.ctl(&["candidate", "report"]).contains("no candidate rules").then_some(())
    });
    assert!(operator.try_ctl(&["candidate", "promote"]).unwrap_err().contains("no candidate rules"));
}

#[tokio::test]
async fn candidate_rules_are_evaluated_but_not_enforced() {
    evaluate_a_candidate("memory").await;
    let redis = RedisServer::start();
    evaluate_a_candidate(&redis.url()).await;
}

/// Hits that wait to share a call are evaluated as well, and make room for later ones.
#[tokio::test]
async fn all_of_many_concurrent_hits_are_evaluated() {
    const CALLERS: u64 = 40;
    const EACH: u64 = 40;
    let (in_force, candidate, redis) = (folder(100), folder(30), RedisServer::start());
    let operator = Operator::start(in_force.path(), &redis.url());
    upload(&operator, candidate.path(), "100%");
    let client = operator.server.client().await;
    let mut callers = tokio::task::JoinSet::new();
    for caller in 0..CALLERS {
        let client = client.clone();
        callers.spawn(async move {
            for _ in 0..EACH {
                client.check(request_for("api", &[("user", &format!("u{caller}"))])).await.unwrap();
            }
        });
    }
    callers.join_all().await;
    let denied = CALLERS * (EACH - 30);
    wait_for("all hits to be counted", || (outcomes(&operator) == [CALLERS * EACH, denied, denied, 0]).then_some(()));
}

/// Either all hits of a counter are in the share, or none.
#[tokio::test]
async fn a_share_selects_whole_counters() {
    let (in_force, candidate) = (folder(100), folder(3));
    let operator = Operator::start(in_force.path(), "memory");
    upload(&operator, candidate.path(), "0.25");
    let client = operator.server.client().await;
    for user in 0..400 {
        for _ in 0..4 {
            client.check(request_for("api", &[("user", &format!("u{user}"))])).await.unwrap();
        }
    }
    let [requested, denied, newly_denied, _] = outcomes(&operator);
    assert_eq!((requested % 4, denied, newly_denied), (0, requested / 4, requested / 4));
    assert!((60..140).contains(&(requested / 4)), "{requested}");
}

#[tokio::test]
async fn a_candidate_is_promoted_on_all_instances_and_rolled_back() {
    let redis = RedisServer::start();
    let (in_force, candidate) = (folder(4), folder(2));
    let start = || Operator::start(in_force.path(), &redis.url());
    let (first, other) = (start(), start());
    // A dropped candidate is deleted from Redis, and no instance evaluates it any longer.
    let stored_sets =
        || redis.cli(&["KEYS", "sluicegate:{directives}set:*"]).lines().filter(|key| !key.is_empty()).count();
    upload(&first, folder(3).path(), "10%");
    wait_for("the other instance to evaluate the candidate", || {
        other.ctl(&["candidate", "report"]).contains("10% of all counters").then_some(())
    });
    assert_eq!(stored_sets(), 1);
    other.ctl(&["candidate", "drop"]);
    assert_eq!(stored_sets(), 0);
    wait_for("the first instance to drop the candidate", || {
        first.ctl(&["candidate", "report"]).contains("no candidate rules").then_some(())
    });
    upload(&first, candidate.path(), "10%");
    wait_for("the other instance to evaluate the candidate", || {
        other.ctl(&["candidate", "report"]).contains("10% of all counters").then_some(())
    });
    first.ctl(&["candidate", "promote", "--reason", "as evaluated"]);
    let wait_for_limit_on_both = async |expected: u32| {
        wait_for_async("both instances to enforce the new rules", async || {
            (limit(&first, "a").await == expected && limit(&other, "a").await == expected).then_some(())
        })
        .await;
    };
    wait_for_limit_on_both(2).await;
    let audit = first.ctl(&["audit"]);
    assert!(audit.contains("as evaluated") && audit.contains("rules|in_force"), "{audit}");
    // Promoted rules survive a restart, a change of the directory, and a loss of the store's data.
    fs::write(in_force.path().join("api.yaml"), text(7)).unwrap();
    redis.cli(&["FLUSHALL"]);
    wait_for("the promoted rules to be restored", || {
        let keys = redis.cli(&["KEYS", "sluicegate:{directives}*"]);
        (keys.contains("set:") && keys.contains("texts")).then_some(())
    });
    assert_eq!(stored_sets(), 1);
    let restarted = start();
    assert_eq!(limit(&restarted, "a").await, 2);
    other.ctl(&["candidate", "rollback"]);
    wait_for_limit_on_both(7).await;
    // A second rollback restores the promoted rules.
    other.ctl(&["candidate", "rollback"]);
    wait_for_limit_on_both(2).await;
}

#[tokio::test]
async fn a_directory_of_candidate_rules_is_watched() {
    let (in_force, candidate) = (folder(4), folder(2));
    let builder = Server::builder().rules(in_force.path()).store("memory");
    let builder = builder.set("rules.candidate_dir", candidate.path().to_str().unwrap());
    let operator = Operator::with(builder.set("rules.candidate_share", "1"));
    wait_for("the candidate to be evaluated", || {
        operator.ctl(&["candidate", "report"]).contains("100% of all counters").then_some(())
    });
    for _ in 0..3 {
        limit(&operator, "a").await;
    }
    assert_eq!(outcomes(&operator), [3, 1, 1, 0]);
    // Refunds and peeks are not hits.
    let client = operator.server.client().await;
    let hits = |hits| descriptor(&[("user", "a")]).hits(hits);
    client.check(Request::new("api").descriptor(hits(1).refund())).await.unwrap();
    client.check(Request::new("api").descriptor(hits(0))).await.unwrap();
    client.check(Request::new("api").descriptor(hits(1))).await.unwrap();
    wait_for("the last hit to be counted", || (outcomes(&operator)[0] > 3).then_some(()));
    assert_eq!(outcomes(&operator), [4, 2, 2, 0]);
    fs::write(candidate.path().join("api.yaml"), "domain: api\ndescriptors: [{key: user, rate_limit: {unit: eon}}]\n")
        .unwrap();
    wait_for("the error to be reported", || {
        operator.ctl(&["candidate", "report"]).contains("unit \"eon\" is not one of").then_some(())
    });
    fs::write(candidate.path().join("api.yaml"), text(3)).unwrap();
    wait_for("the new candidate to be evaluated", || (outcomes(&operator) == [0; 4]).then_some(()));
    // An unchanged candidate is not evaluated again from the start.
    let log = operator.server.log();
    assert_eq!(log.matches("evaluating candidate rules").count(), 2, "{log}");
    assert_eq!(log.matches("cannot use the candidate or promoted rules").count(), 1, "{log}");
    operator.ctl(&["candidate", "promote"]);
    wait_for_async("the promoted rules to be in force", async || (limit(&operator, "b").await == 3).then_some(()))
        .await;
}

#[test]
fn an_invalid_candidate_is_rejected_with_all_errors() {
    let operator = Operator::start(folder(4).path(), "memory");
    let invalid = rules(&[("a.yaml", "domain: a\ndescriptors: [{key: k, rate_limit: {unit: eon}}, {value: v}]\n")]);
    let error = operator.try_ctl(&["candidate", "upload", invalid.path().to_str().unwrap()]).unwrap_err();
    assert!(
        error.contains("a.yaml:2:") && error.contains("eon") && error.contains("requires a non-empty key"),
        "{error}"
    );
    let path = folder(2);
    let path = path.path().to_str().unwrap();
    for share in ["0", "2", "x"] {
        assert!(operator.try_ctl(&["candidate", "upload", path, "--share", share]).is_err());
    }
    // The API checks the share, too, not only `ctl`.
    for share in ["1.5", "-1"] {
        let files = serde_json::json!([{"name": "a.yaml", "text": text(2)}]);
        let body = format!(r#"{{"files": {files}, "share": {share}, "reason": "x"}}"#);
        let (code, answer) = operator.call(OPERATE, "UploadCandidate", &body);
        assert!(code == 400 && answer["message"].as_str().unwrap().contains("share"), "{share}: {answer}");
    }
    let large = rules(&[("a.yaml", &format!("domain: a\n{}", "# padding\n".repeat(60_000)))]);
    let error = operator.try_ctl(&["candidate", "upload", large.path().to_str().unwrap()]).unwrap_err();
    assert!(error.contains("at most 524288 bytes"), "{error}");
    let empty = tempfile::tempdir().unwrap();
    assert!(operator.try_ctl(&["candidate", "upload", empty.path().to_str().unwrap()]).is_err());
    assert!(operator.try_ctl(&["candidate", "rollback"]).unwrap_err().contains("no previous rules"));
}
