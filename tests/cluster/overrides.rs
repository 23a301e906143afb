//! Overrides and candidate rules reach all members without Redis.

use std::{fs, path::Path, process::Command};

use crate::{
    cluster::members::Group,
    support::{
        Operator, Server, descriptor, raw_client::Request, request_for, rules, server::Builder, wait_for,
        wait_for_async,
    },
};

const RULES: &str = "
domain: api
plans:
  default: free
  limits:
    free: { calls: { unit: year, requests_per_unit: 1000 } }
    pro: { calls: { unit: year, requests_per_unit: 5000 } }
descriptors:
- key: user
  rate_limit: { unit: year, requests_per_unit: 2000 }
- key: planned
  rate_limit: { by_plan: calls }
- key: bucket
  rate_limit: { unit: year, requests_per_unit: 3000, algorithm: token_bucket }
";

/// Members with an admin API.
struct Operators {
    group: Group,
    all: Vec<Operator>,
}

impl Operators {
    fn start(count: usize) -> Self {
        let group = Group::new(count, RULES);
        let all = (0..count).map(|member| Operator::with(group.builder(member))).collect();
        let this = Self { group, all };
        this.wait_until_connected();
        this
    }

    fn wait_until_connected(&self) {
        for member in &self.all {
            wait_for("all members to be connected", || {
                (member.server.metric("sluicegate_cluster_peers") == (self.all.len() - 1) as f64).then_some(())
            });
        }
    }

    /// Waits until every member has this limit for a descriptor.
    async fn wait_for_limit(&self, entry: (&str, &str), expected: u32) {
        for member in &self.all {
            wait_for_limit(&member.server, entry, expected).await;
        }
    }

    /// Waits until every member has the same overrides, and returns them.
    fn wait_until_equal(&self) -> String {
        wait_for("the same overrides at all members", || {
            let exported: Vec<_> = self.all.iter().map(|member| member.ctl(&["export"])).collect();
            exported.windows(2).all(|pair| pair[0] == pair[1]).then(|| exported[0].clone())
        })
    }
}

/// Returns the limit in the answer to a request.
async fn limit(server: &Server, entry: (&str, &str)) -> Option<u32> {
    let answer = server.client().await.check(request_for("api", &[entry])).await.unwrap();
    Some(answer.0.statuses[0].current_limit.as_ref()?.requests_per_unit)
}

async fn wait_for_limit(server: &Server, entry: (&str, &str), expected: u32) {
    let what = format!("the limit {expected} of {entry:?}");
    wait_for_async(&what, async || (limit(server, entry).await == Some(expected)).then_some(())).await;
}

async fn is_allowed(server: &Server, entry: (&str, &str)) -> bool {
    server.client().await.check(request_for("api", &[entry])).await.unwrap().allowed()
}

/// A member with a full disk still counts the hits of the others, and gets their overrides when there is room.
#[tokio::test]
async fn hits_are_exchanged_while_overrides_cannot_be_stored() {
    let (group, folder) = (Group::new(2, RULES), tempfile::tempdir().unwrap());
    let file = folder.path().join("overrides").display().to_string();
    let full = group.builder(1).set("overrides.file", &file).max_file_blocks(2);
    let all = vec![Operator::with(group.builder(0)), Operator::with(full)];
    let members = Operators { group, all };
    members.wait_until_connected();
    let (one, full) = (&members.all[0], &members.all[1].server);
    one.ctl(&["limit", "set", "api", "user=bob", "10/year", "--reason", &"x".repeat(900)]);
    let message = "cannot store the overrides of a peer";
    wait_for("the failure", || full.log().contains(message).then_some(()));
    let entry = [("user", "alice")];
    let request = |hits: u64| Request::new("api").descriptor(descriptor(&entry).hits(hits));
    for taken in (100..=500).step_by(100) {
        assert!(one.server.client().await.check(request(100)).await.unwrap().allowed());
        wait_for_async("the hits to arrive", async || {
            let remaining = full.client().await.check(request(0)).await.unwrap().remaining();
            (remaining == Some(2_000 - taken)).then_some(())
        })
        .await;
    }
    assert_eq!(full.log().matches(message).count(), 1, "{}", full.log());
    assert!(!full.log().contains("peer unavailable"), "{}", full.log());
    let unlimited = ["--pid", &full.pid().to_string(), "--fsize=unlimited:"];
    assert!(Command::new("prlimit").args(unlimited).status().unwrap().success());
    wait_for_limit(full, ("user", "bob"), 10).await;
}

#[tokio::test]
async fn overrides_of_one_member_are_in_force_on_all() {
    let members = Operators::start(3);
    members.all[0].ctl(&["limit", "set", "api", "user=bob", "10/year", "--reason", "ticket 4711"]);
    members.all[1].ctl(&["plan", "assign", "api", "planned=a", "pro"]);
    members.all[2].ctl(&["switch", "deny", "rule", "api", "bucket"]);
    members.wait_for_limit(("user", "bob"), 10).await;
    members.wait_for_limit(("planned", "a"), 5_000).await;
    for member in &members.all {
        wait_for_async("the switch", async || (!is_allowed(&member.server, ("bucket", "x")).await).then_some(())).await;
        let audit = member.ctl(&["audit"]);
        assert!(audit.contains("ticket 4711") && audit.matches("alice").count() == 3, "{audit}");
    }
    // A member that starts later has everything before it serves.
    let group = Group::at([&members.group.addresses[..], &[super::members::free_address()]].concat(), RULES);
    let late = Operator::with(group.builder(3));
    assert_eq!(limit(&late.server, ("user", "bob")).await, Some(10));
    assert_eq!(limit(&late.server, ("planned", "a")).await, Some(5_000));
    assert!(!is_allowed(&late.server, ("bucket", "x")).await);
    assert!(late.ctl(&["audit"]).contains("ticket 4711"));
    // Each is removed at another member than the one that has set it.
    late.ctl(&["limit", "unset", "api", "user=bob"]);
    members.all[0].ctl(&["plan", "unassign", "api", "planned=a"]);
    members.all[1].ctl(&["switch", "clear", "rule", "api", "bucket"]);
    members.wait_for_limit(("user", "bob"), 2_000).await;
    members.wait_for_limit(("planned", "a"), 1_000).await;
    wait_for_limit(&late.server, ("planned", "a"), 1_000).await;
    for member in members.all.iter().chain([&late]) {
        wait_for_async("the switch to be cleared", async || {
            is_allowed(&member.server, ("bucket", "x")).await.then_some(())
        })
        .await;
        wait_for("no overrides", || member.ctl(&["export"]).is_empty().then_some(()));
    }
}

/// A member was down while an override was removed, and another one was set.
#[tokio::test]
async fn a_removed_override_does_not_return_with_an_old_file() {
    let (group, folder) = (Group::new(3, RULES), tempfile::tempdir().unwrap());
    let file = |member: usize| folder.path().join(member.to_string()).display().to_string();
    let start = |member| Operator::with(group.builder(member).set("overrides.file", &file(member)));
    let mut members: Vec<_> = (0..3).map(start).collect();
    members[0].ctl(&["limit", "set", "api", "user=bob", "10/year"]);
    members[0].ctl(&["limit", "set", "api", "user=eve", "20/year"]);
    for member in &members {
        wait_for_limit(&member.server, ("user", "eve"), 20).await;
    }
    drop(members.remove(2));
    members[1].ctl(&["limit", "unset", "api", "user=bob"]);
    members[1].ctl(&["limit", "set", "api", "user=eve", "21/year"]);
    let restarted = start(2);
    assert_eq!(limit(&restarted.server, ("user", "bob")).await, Some(2_000));
    assert_eq!(limit(&restarted.server, ("user", "eve")).await, Some(21));
    members.push(restarted);
    // The next change reaches all members after everything that the restarted member could have sent.
    members[2].ctl(&["limit", "set", "api", "user=next", "30/year"]);
    for member in &members {
        wait_for_limit(&member.server, ("user", "next"), 30).await;
        assert_eq!(member.ctl(&["export"]), "limit|api|user=eve,21/year,\nlimit|api|user=next,30/year,\n");
    }
    // All members are down, and start again from their files.
    drop(members);
    let members: Vec<_> = (0..3).map(start).collect();
    for member in &members {
        assert_eq!(member.ctl(&["export"]), "limit|api|user=eve,21/year,\nlimit|api|user=next,30/year,\n");
    }
}

#[tokio::test]
async fn an_override_expires_on_all_members() {
    let members = Operators::start(3);
    members.all[0].ctl(&["limit", "set", "api", "user=bob", "10/year", "--for", "4s"]);
    members.wait_for_limit(("user", "bob"), 10).await;
    members.wait_for_limit(("user", "bob"), 2_000).await;
    wait_for("the removal in the audit log of all members", || {
        let is_removed = |member: &Operator| member.ctl(&["audit"]).contains("user=bob: removed");
        members.all.iter().all(is_removed).then_some(())
    });
    assert_eq!(members.wait_until_equal(), "");
    // A later change is in force on all members.
    members.all[2].ctl(&["limit", "set", "api", "user=bob", "11/year"]);
    members.wait_for_limit(("user", "bob"), 11).await;
    for member in &members.all {
        let audit = member.ctl(&["audit"]);
        assert!(!audit.contains("at the same time"), "{audit}");
    }
}

/// Two members receive changes of the same targets while neither sees the other's.
#[tokio::test]
async fn changes_at_the_same_time_have_the_same_outcome_everywhere() {
    let members = Operators::start(3);
    let [one, other, third] = &members.all[..] else { unreachable!() };
    one.ctl(&["limit", "set", "api", "user=eve", "5/year"]);
    members.wait_for_limit(("user", "eve"), 5).await;
    other.server.signal("STOP");
    one.ctl(&["limit", "set", "api", "user=bob", "10/year", "--reason", "first"]);
    one.ctl(&["limit", "unset", "api", "user=eve"]);
    wait_for_limit(&third.server, ("user", "bob"), 10).await;
    wait_for_limit(&third.server, ("user", "eve"), 2_000).await;
    one.server.signal("STOP");
    third.server.signal("STOP");
    other.server.signal("CONT");
    other.ctl(&["limit", "set", "api", "user=bob", "20/year", "--reason", "second"]);
    other.ctl(&["limit", "set", "api", "user=eve", "6/year"]);
    one.server.signal("CONT");
    third.server.signal("CONT");
    members.wait_until_connected();
    let in_force = wait_for("the same overrides at all members", || {
        let exported: Vec<_> = members.all.iter().map(|member| member.ctl(&["export"])).collect();
        let audits: Vec<_> = members.all.iter().map(|member| member.ctl(&["audit"])).collect();
        let is_equal = exported.iter().all(|other| *other == exported[0]);
        let has_noticed = audits.iter().all(|audit| audit.matches("made at the same time").count() >= 2);
        println!("{exported:?} {audits:?}");
        (is_equal && has_noticed).then(|| exported[0].clone())
    });
    let bob = in_force.lines().find(|line| line.contains("user=bob")).unwrap();
    let bob = if bob.contains("20/year") { 20 } else { 10 };
    members.wait_for_limit(("user", "bob"), bob).await;
    for member in &members.all {
        let audit = member.ctl(&["audit"]);
        assert!(audit.contains("first") && audit.contains("second"), "both changes are in the log: {audit}");
    }
    // The next change replaces both.
    third.ctl(&["limit", "set", "api", "user=bob", "30/year"]);
    members.wait_for_limit(("user", "bob"), 30).await;
}

fn candidate_folder(limit: u32) -> tempfile::TempDir {
    rules(&[("d.yaml", &RULES.replace("2000", &limit.to_string()))])
}

fn upload(member: &Operator, folder: &Path, share: &str) {
    member.ctl(&["candidate", "upload", folder.to_str().unwrap(), "--share", share]);
}

fn report_contains(member: &Operator, text: &str) -> bool {
    member.ctl(&["candidate", "report"]).contains(text)
}

#[tokio::test]
async fn candidate_rules_of_one_member_are_evaluated_and_promoted_on_all() {
    let members = Operators::start(3);
    upload(&members.all[0], candidate_folder(1).path(), "100%");
    for member in &members.all {
        wait_for("the candidate to be evaluated", || report_contains(member, "100% of all counters").then_some(()));
        for _ in 0..2 {
            assert!(is_allowed(&member.server, ("user", "bob")).await);
        }
        wait_for("newly denied hits", || report_contains(member, "api|user=bob").then_some(()));
    }
    members.all[1].ctl(&["candidate", "drop"]);
    for member in &members.all {
        wait_for("the candidate to be dropped", || report_contains(member, "no candidate rules").then_some(()));
    }
    upload(&members.all[2], candidate_folder(500).path(), "10%");
    wait_for("the candidate to be evaluated", || report_contains(&members.all[0], "10% of all").then_some(()));
    members.all[0].ctl(&["candidate", "promote", "--reason", "as evaluated"]);
    members.wait_for_limit(("user", "bob"), 500).await;
    // A member that starts later has the promoted rules, whatever its files contain.
    let group = Group::at([&members.group.addresses[..], &[super::members::free_address()]].concat(), RULES);
    let late = Operator::with(group.builder(3));
    assert_eq!(limit(&late.server, ("user", "bob")).await, Some(500));
    late.ctl(&["candidate", "rollback"]);
    members.wait_for_limit(("user", "bob"), 2_000).await;
    assert!(members.all[1].ctl(&["audit"]).contains("as evaluated"));
}

/// Promoted rules are kept by members with a file while others restart without one.
#[tokio::test]
async fn promoted_rules_survive_a_restart_of_each_member() {
    let (group, folder) = (Group::new(2, RULES), tempfile::tempdir().unwrap());
    let file = folder.path().join("overrides").display().to_string();
    let builder = |member: usize| -> Builder {
        let builder = group.builder(member);
        if member == 0 { builder.set("overrides.file", &file) } else { builder }
    };
    let mut members: Vec<_> = (0..2).map(|member| Operator::with(builder(member))).collect();
    upload(&members[1], candidate_folder(700).path(), "10%");
    members[1].ctl(&["candidate", "promote"]);
    for member in &members {
        wait_for_limit(&member.server, ("user", "bob"), 700).await;
    }
    assert!(fs::read_dir(folder.path()).unwrap().count() > 1, "the rule set is stored next to the journal");
    members.clear();
    for member in 0..2 {
        members.push(Operator::with(builder(member)));
        wait_for_limit(&members[member].server, ("user", "bob"), 700).await;
    }
}

/// The reset of a counter on one member deletes it on all of them.
#[tokio::test]
async fn a_reset_reaches_all_members() {
    let operators = Operators::start(3);
    let remaining = async |member: usize, hits: u64| {
        let client = operators.all[member].server.client().await;
        let request = Request::new("api").descriptor(descriptor(&[("user", "bob")]).hits(hits));
        client.check(request).await.unwrap().remaining()
    };
    let wait_for_remaining = async |expected: u32| {
        for member in 0..3 {
            let what = format!("{expected} remaining hits at member {member}");
            wait_for_async(&what, async || (remaining(member, 0).await == Some(expected)).then_some(())).await;
        }
    };
    remaining(0, 30).await;
    remaining(1, 40).await;
    wait_for_remaining(1_930).await;
    operators.all[2].ctl(&["reset", "api", "user=bob"]);
    wait_for_remaining(2_000).await;
    remaining(0, 1).await;
    wait_for_remaining(1_999).await;
}
