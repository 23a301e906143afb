//! Rules that are tried out on a share of the traffic, promoted and rolled back.

use std::{fs, path::Path};

use crate::support::{
    Operator, RedisServer, Server, descriptor,
    operator::OPERATE,
    plain::{Request, Unit},
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

/// What the candidate would have done: asked, refused, newly refused, newly passed.
fn outcomes(operator: &Operator) -> [u64; 4] {
    let report = operator.ctl(&["candidate", "report", "--json"]);
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    let number = |name: &str| {
        let number =
            |rule: &serde_json::Value| rule["outcomes"][name].as_str().map_or(0, |it| it.parse::<u64>().unwrap());
        report["rules"].as_array().map_or(0, |rules| rules.iter().map(number).sum())
    };
    ["requested", "denied", "newlyDenied", "newlyAllowed"].map(number)
}

async fn limit(operator: &Operator, user: &str) -> u32 {
    let answer = operator.server.client().await.check(request_for("api", &[("user", user)])).await.unwrap();
    answer.0.statuses[0].current_limit.as_ref().unwrap().requests_per_unit
}

async fn tried(store: &str) {
    let (in_force, candidate) = (folder(4), folder(2));
    let operator = Operator::start(in_force.path(), store);
    assert!(operator.ctl(&["candidate", "report"]).contains("no candidate rules"));
    upload(&operator, candidate.path(), "100%");
    let client = operator.server.client().await;
    for (user, hits) in [("bob", 5), ("eve", 3), ("mia", 1)] {
        for hit in 1..=hits {
            let answer = client.check(request_for("api", &[("user", user)])).await.unwrap();
            // Nobody notices.
            assert_eq!((answer.allowed(), answer.remaining()), (hit <= 4, Some(4_u32.saturating_sub(hit))));
        }
    }
    // Of 9 hits it would refuse 3 of bob's, of which one is refused now, and one of eve's.
    wait_for("all to be counted", || (outcomes(&operator) == [9, 4, 3, 0]).then_some(()));
    let report = operator.ctl(&["candidate", "report"]);
    for expected in ["api of_user: 2 per year", "api|user=bob", "api|user=eve", "100% of all counters"] {
        assert!(report.contains(expected), "{expected}: {report}");
    }
    assert!(!report.contains("user=mia"), "{report}");
    // Nor is it counted as if it were in force.
    let asked = operator.ctl(&["top", "--requested", "-n", "1"]);
    assert!(asked.lines().nth(2).is_some_and(|line| line.starts_with("5 ")), "{asked}");
    let metric = "sluicegate_candidate_hits{domain=\"api\",key1=\"user\",outcome=\"newly_denied\"}";
    assert_eq!(operator.server.metric(metric), 3.0);
    // What an operator gave a customer holds for the candidate, too.
    operator.ctl(&["limit", "set", "api", "user=max", "50/year"]);
    for _ in 0..5 {
        client.check(request_for("api", &[("user", "max")])).await.unwrap();
    }
    wait_for("max to be counted", || (outcomes(&operator) == [14, 4, 3, 0]).then_some(()));
    // And what a caller said of itself, which is counted once.
    let own = Request::new("api").descriptor(descriptor(&[("user", "own")]).limit(7, Unit::Year, None));
    client.check(own).await.unwrap();
    wait_for("own to be counted", || (outcomes(&operator) == [15, 4, 3, 0]).then_some(()));
    let series = "ratelimit_service_rate_limit_total_hits{domain=\"api\",key1=\"user_own\"}";
    assert_eq!(operator.server.metric(series), 1.0);
    // And what is refused now would pass with more.
    upload(&operator, folder(100).path(), "100%");
    client.check(request_for("api", &[("user", "bob")])).await.unwrap();
    wait_for("bob to pass", || (outcomes(&operator) == [1, 0, 0, 1]).then_some(()));
    // Where it has no rule any more, so does what is refused now.
    upload(&operator, rules(&[("api.yaml", "domain: api\ndescriptors: [{key: other}]\n")]).path(), "100%");
    client.check(request_for("api", &[("user", "bob")])).await.unwrap();
    client.check(request_for("api", &[("user", "mia")])).await.unwrap();
    wait_for("bob to pass again", || (outcomes(&operator) == [1, 0, 0, 1]).then_some(()));
    operator.ctl(&["candidate", "drop"]);
    wait_for("nothing to be tried", || {
        operator.ctl(&["candidate", "report"]).contains("no candidate rules").then_some(())
    });
    assert!(operator.try_ctl(&["candidate", "promote"]).unwrap_err().contains("no candidate rules"));
}

#[tokio::test]
async fn what_rules_would_do_is_known_before_they_do_it() {
    tried("memory").await;
    let redis = RedisServer::start();
    tried(&redis.url()).await;
}

/// What waits for others to share a call with is told all the same, and makes room for those that come later.
#[tokio::test]
async fn of_many_at_once_none_is_left_out() {
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
    let refused = CALLERS * (EACH - 30);
    wait_for("all to be counted", || (outcomes(&operator) == [CALLERS * EACH, refused, refused, 0]).then_some(()));
}

/// A counter is in the share with all its hits, or with none.
#[tokio::test]
async fn a_share_is_one_of_whole_counters() {
    let (in_force, candidate) = (folder(100), folder(3));
    let operator = Operator::start(in_force.path(), "memory");
    upload(&operator, candidate.path(), "0.25");
    let client = operator.server.client().await;
    for user in 0..400 {
        for _ in 0..4 {
            client.check(request_for("api", &[("user", &format!("u{user}"))])).await.unwrap();
        }
    }
    let [asked, refused, newly, _] = outcomes(&operator);
    assert_eq!((asked % 4, refused, newly), (0, asked / 4, asked / 4));
    assert!((60..140).contains(&(asked / 4)), "{asked}");
}

#[tokio::test]
async fn a_candidate_is_promoted_everywhere_and_rolled_back() {
    let redis = RedisServer::start();
    let (in_force, candidate) = (folder(4), folder(2));
    let start = || Operator::start(in_force.path(), &redis.url());
    let (one, other) = (start(), start());
    // What nobody tries any more is not kept, by nobody.
    let sets = || redis.cli(&["KEYS", "sluicegate:{directives}set:*"]).lines().filter(|key| !key.is_empty()).count();
    upload(&one, folder(3).path(), "10%");
    wait_for("the other to try it", || {
        other.ctl(&["candidate", "report"]).contains("10% of all counters").then_some(())
    });
    assert_eq!(sets(), 1);
    other.ctl(&["candidate", "drop"]);
    assert_eq!(sets(), 0);
    wait_for("one to drop it", || one.ctl(&["candidate", "report"]).contains("no candidate rules").then_some(()));
    upload(&one, candidate.path(), "10%");
    wait_for("the other to try it", || {
        other.ctl(&["candidate", "report"]).contains("10% of all counters").then_some(())
    });
    one.ctl(&["candidate", "promote", "--reason", "as tried"]);
    let changed = async |to: u32| {
        wait_for_async("both to change over", async || {
            (limit(&one, "a").await == to && limit(&other, "a").await == to).then_some(())
        })
        .await;
    };
    changed(2).await;
    let audit = one.ctl(&["audit"]);
    assert!(audit.contains("as tried") && audit.contains("rules|in_force"), "{audit}");
    // A set that was promoted survives a restart, a change of the directory, and a store that forgets.
    fs::write(in_force.path().join("api.yaml"), text(7)).unwrap();
    redis.cli(&["FLUSHALL"]);
    wait_for("the set to be there again", || {
        let keys = redis.cli(&["KEYS", "sluicegate:{directives}*"]);
        (keys.contains("set:") && keys.contains("texts")).then_some(())
    });
    assert_eq!(sets(), 1);
    let late = start();
    assert_eq!(limit(&late, "a").await, 2);
    other.ctl(&["candidate", "rollback"]);
    changed(7).await;
    // And forth again.
    other.ctl(&["candidate", "rollback"]);
    changed(2).await;
}

#[tokio::test]
async fn a_directory_of_candidates_is_followed() {
    let (in_force, candidate) = (folder(4), folder(2));
    let builder = Server::builder().rules(in_force.path()).store("memory");
    let builder = builder.set("rules.candidate_dir", candidate.path().to_str().unwrap());
    let operator = Operator::with(builder.set("rules.candidate_share", "1"));
    wait_for("it to be tried", || {
        operator.ctl(&["candidate", "report"]).contains("100% of all counters").then_some(())
    });
    for _ in 0..3 {
        limit(&operator, "a").await;
    }
    assert_eq!(outcomes(&operator), [3, 1, 1, 0]);
    // What comes back, or is only looked at, is no hit.
    let client = operator.server.client().await;
    let hits = |hits| descriptor(&[("user", "a")]).hits(hits);
    client.check(Request::new("api").descriptor(hits(1).refund())).await.unwrap();
    client.check(Request::new("api").descriptor(hits(0))).await.unwrap();
    client.check(Request::new("api").descriptor(hits(1))).await.unwrap();
    wait_for("the last", || (outcomes(&operator)[0] > 3).then_some(()));
    assert_eq!(outcomes(&operator), [4, 2, 2, 0]);
    fs::write(candidate.path().join("api.yaml"), "domain: api\ndescriptors: [{key: user, rate_limit: {unit: eon}}]\n")
        .unwrap();
    wait_for("the mistake to be told", || {
        operator.ctl(&["candidate", "report"]).contains("unit \"eon\" is not one of").then_some(())
    });
    fs::write(candidate.path().join("api.yaml"), text(3)).unwrap();
    wait_for("the new ones", || (outcomes(&operator) == [0; 4]).then_some(()));
    // Rules that did not change go on with what they have counted.
    let log = operator.server.log();
    assert_eq!(log.matches("evaluating candidate rules").count(), 2, "{log}");
    assert_eq!(log.matches("cannot use the candidate or promoted rules").count(), 1, "{log}");
    operator.ctl(&["candidate", "promote"]);
    wait_for_async("them to be in force", async || (limit(&operator, "b").await == 3).then_some(())).await;
}

#[test]
fn what_cannot_be_tried_is_refused_with_every_mistake() {
    let operator = Operator::start(folder(4).path(), "memory");
    let bad = rules(&[("a.yaml", "domain: a\ndescriptors: [{key: k, rate_limit: {unit: eon}}, {value: v}]\n")]);
    let error = operator.try_ctl(&["candidate", "upload", bad.path().to_str().unwrap()]).unwrap_err();
    assert!(error.contains("a.yaml:2:") && error.contains("eon") && error.contains("needs a key"), "{error}");
    let path = folder(2);
    let path = path.path().to_str().unwrap();
    for share in ["0", "2", "x"] {
        assert!(operator.try_ctl(&["candidate", "upload", path, "--share", share]).is_err());
    }
    // The API checks it as well as `ctl` does.
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
