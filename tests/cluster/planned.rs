//! Planned overrides reach all members without Redis, and begin on each by its own clock.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::{
    cluster::members::Group,
    support::{Operator, Server, descriptor, raw_client::Request, wait_for, wait_for_async},
};

const RULES: &str = "\
domain: api
descriptors:
- key: user
  rate_limit: { unit: year, requests_per_unit: 2000 }
";

/// Returns the limit in the answer to a request that takes nothing.
async fn limit(server: &Server, user: &str) -> u32 {
    let request = Request::new("api").descriptor(descriptor(&[("user", user)]).hits(0));
    let answer = server.client().await.check(request).await.unwrap();
    answer.0.statuses[0].current_limit.as_ref().unwrap().requests_per_unit
}

async fn wait_for_limit(members: &[Operator], user: &str, expected: u32) {
    for member in members {
        let what = format!("the limit {expected} of {user}");
        wait_for_async(&what, async || (limit(&member.server, user).await == expected).then_some(())).await;
    }
}

/// Returns the text of a full second in the future.
fn in_seconds(seconds: u64) -> String {
    #[allow(clippy::disallowed_methods, reason = "overrides begin by the wall clock")]
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(now + seconds + 1)).to_string()
}

fn wait_for_planned(members: &[Operator], expected: f64) {
    for member in members {
        wait_for("the planned overrides", || {
            let planned = member.server.metric("sluicegate_overrides{kind=\"planned\"}");
            (planned == expected).then_some(())
        });
    }
}

#[tokio::test]
async fn a_planned_override_begins_on_all_members_and_a_later_change_replaces_it() {
    let group = Group::new(3, RULES);
    let members: Vec<_> = (0..3).map(|member| Operator::with(group.builder(member))).collect();
    for member in &members {
        wait_for("all members", || (member.server.metric("sluicegate_cluster_peers") == 2.0).then_some(()));
    }
    let [one, other, third] = &members[..] else { unreachable!() };
    let from = in_seconds(3);
    one.ctl(&["limit", "set", "api", "user=bob", "10/year", "--from", &from, "--reason", "sale"]);
    one.ctl(&["limit", "set", "api", "user=eve", "11/year", "--from", &from, "--for", "3s"]);
    one.ctl(&["limit", "set", "api", "user=max", "12/year", "--from", &from]);
    wait_for_planned(&members, 3.0);
    other.ctl(&["limit", "unset", "api", "user=max", "--from", &from]);
    wait_for_planned(&members, 2.0);
    wait_for_limit(&members, "bob", 10).await;
    wait_for_limit(&members, "eve", 11).await;
    assert_eq!(limit(&one.server, "max").await, 2_000);
    third.ctl(&["limit", "set", "api", "user=bob", "20/year"]);
    wait_for_limit(&members, "bob", 20).await;
    wait_for_limit(&members, "eve", 2_000).await;
    for member in &members {
        wait_for("only the later change", || {
            (member.ctl(&["export"]) == "limit|api|user=bob,20/year,\n").then_some(())
        });
        let audit = member.ctl(&["audit"]);
        assert!(audit.contains("began as planned") && audit.contains("sale"), "{audit}");
    }
    // An override in force stays in force, also on a member that starts later.
    let group = Group::at([&group.addresses[..], &[super::members::free_address()]].concat(), RULES);
    let late = Operator::with(group.builder(3));
    assert_eq!((limit(&late.server, "bob").await, limit(&late.server, "eve").await), (20, 2_000));
    assert_eq!(late.ctl(&["export"]), "limit|api|user=bob,20/year,\n");
}
