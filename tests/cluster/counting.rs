//! Hits of one member count at all members, and limits hold for all members together.

use std::time::{Duration, Instant};

use crate::{
    cluster::members::{Members, hits_of},
    support::{
        Server, descriptor,
        raw_client::{Request, Unit},
        rules, wait_for_async,
    },
};

/// At most one hit of these limits drains in three days.
const ALGORITHMS: &str = "
domain: d
descriptors:
- key: fixed_window
  rate_limit: {unit: year, requests_per_unit: 100}
- key: first_request
  rate_limit: {unit: year, requests_per_unit: 100, window: first_request}
- key: sliding_window
  rate_limit: {unit: year, requests_per_unit: 100, algorithm: sliding_window}
- key: buckets
  rate_limit: {unit: year, requests_per_unit: 100, algorithm: sliding_window, buckets: 12, edge: strict}
- key: sliding_log
  rate_limit: {unit: year, requests_per_unit: 100, algorithm: sliding_log}
- key: token_bucket
  rate_limit: {unit: year, requests_per_unit: 100, algorithm: token_bucket}
- key: gcra
  rate_limit: {unit: year, requests_per_unit: 100, algorithm: gcra}
- key: leaky_bucket
  rate_limit: {unit: year, requests_per_unit: 100, algorithm: leaky_bucket}
- key: queue
  rate_limit: {unit: year, requests_per_unit: 100, algorithm: leaky_bucket, burst: 60, queue: 40}
- key: soft
  rate_limit: {unit: year, requests_per_unit: 10, algorithm: token_bucket, soft: 20%}
- key: warm_up
  rate_limit: {unit: hour, requests_per_unit: 5, algorithm: token_bucket, warm_up: 1h}
- key: in_flight
  rate_limit: {algorithm: concurrency, limit: 2}
";
/// The limits of 100 hits.
const KEYS: [&str; 9] = [
    "fixed_window",
    "first_request",
    "sliding_window",
    "buckets",
    "sliding_log",
    "token_bucket",
    "gcra",
    "leaky_bucket",
    "queue",
];
/// Maximum time after which every member has received a hit: the interval of the exchange, and ample time to run.
const MAX_DELAY: Duration = Duration::from_secs(4);

#[tokio::test]
async fn hits_of_all_members_count_everywhere() {
    let members = Members::start(3, ALGORITHMS).await;
    let [one, other, third] = &members.all[..] else { unreachable!() };
    let mut expected = Vec::new();
    for key in KEYS {
        let full = third.remaining(key).await;
        assert!(full >= 60, "{key}: {full}");
        one.take(key, 30).await;
        for _ in 0..20 {
            other.take(key, 1).await;
        }
        members.wait_for_remaining(key, full - 50).await;
        expected.push((key, full - 50));
    }
    // Nothing was counted twice.
    for (key, remaining) in expected {
        for member in &members.all {
            assert_eq!(member.remaining(key).await, remaining, "{key}");
        }
    }
    // A hit is denied until the previous one is paid for.
    assert!(third.remaining("warm_up").await > 0);
    one.take("warm_up", 1).await;
    members.wait_for_remaining("warm_up", 0).await;
    assert!(!third.is_allowed("warm_up", 1).await);
}

#[tokio::test]
async fn refunds_at_another_member_count_everywhere() {
    let members = Members::start(3, ALGORITHMS).await;
    let [one, other, _] = &members.all[..] else { unreachable!() };
    for key in KEYS {
        let full = one.remaining(key).await;
        one.take(key, 30).await;
        other.wait_for_remaining(key, full - 30).await;
        let refund = Request::new("d").descriptor(descriptor(&[(key, "x")]).hits(20).refund());
        assert!(other.check(refund).await.allowed());
        members.wait_for_remaining(key, full - 10).await;
    }
}

#[tokio::test]
async fn limits_that_are_charged_together_are_exchanged_together() {
    let text = "domain: d\ncharge: all\ndescriptors:\n- {key: a, rate_limit: {unit: year, requests_per_unit: 100}}\n\
                - {key: b, rate_limit: {unit: year, requests_per_unit: 3}}\n";
    let members = Members::start(2, text).await;
    let both = || hits_of("a", 1).descriptor(descriptor(&[("b", "x")]).hits(1));
    for hit in 1..=5 {
        assert_eq!(members.all[0].check(both()).await.allowed(), hit <= 3, "{hit}");
    }
    members.wait_for_remaining("b", 0).await;
    members.wait_for_remaining("a", 97).await;
    assert!(!members.all[1].check(both()).await.allowed());
    members.wait_for_remaining("a", 97).await;
}

#[tokio::test]
async fn soft_and_requested_limits_count_everywhere() {
    let members = Members::start(3, ALGORITHMS).await;
    let [one, other, third] = &members.all[..] else { unreachable!() };
    one.take("soft", 6).await;
    other.take("soft", 4).await;
    third.wait_for_remaining("soft", 0).await;
    assert_eq!(third.exhaust("soft").await, 2, "20% above the limit are allowed");
    wait_for_async("the soft limit to be used up everywhere", async || {
        (!one.is_allowed("soft", 1).await).then_some(())
    })
    .await;

    let requested = |hits| {
        Request::new("d").descriptor(descriptor(&[("fixed_window", "own")]).hits(hits).limit(500, Unit::Year, None))
    };
    assert!(one.check(requested(200)).await.allowed());
    assert!(other.check(requested(100)).await.allowed());
    for member in &members.all {
        wait_for_async("the hits of a requested limit", async || {
            (member.check(requested(0)).await.remaining() == Some(200)).then_some(())
        })
        .await;
    }
}

/// A slot is held at one member. Other members do not count it.
#[tokio::test]
async fn limits_of_requests_in_flight_hold_per_member() {
    let members = Members::start(2, ALGORITHMS).await;
    let warns = |server: &Server| server.log().contains("its counters are not exchanged with peers");
    for member in &members.all {
        assert_eq!(member.exhaust("in_flight").await, 2);
        assert!(warns(&member.server), "{}", member.server.log());
    }
    let folder = rules(&[("d.yaml", ALGORITHMS)]);
    assert!(!warns(&Server::start(folder.path(), "memory")), "an instance without peers");
    let published = |member: usize| members.all[member].server.metric("sluicegate_cluster_changes_published_total");
    assert_eq!((published(0), published(1)), (0.0, 0.0));
    // The next change of another limit is the first.
    members.all[0].take("gcra", 1).await;
    members.wait_for_remaining("gcra", 99).await;
    assert_eq!((published(0), published(1)), (1.0, 0.0));
    assert_eq!(members.all[1].server.metric("sluicegate_cluster_changes_applied_total"), 1.0);
}

/// A hit that a member has allowed.
struct Admission {
    member: usize,
    sent: Instant,
    answered: Instant,
}

/// Sends hits to all members, each with several callers, until `is_over` is true for an answer. Returns the allowed hits.
async fn load(members: &Members, key: &'static str, is_over: fn(Instant, bool) -> bool) -> Vec<Admission> {
    let started = Instant::now();
    let mut callers = tokio::task::JoinSet::new();
    for member in (0..members.all.len()).cycle().take(4 * members.all.len()) {
        let client = members.all[member].client.clone();
        callers.spawn(async move {
            let mut admissions = Vec::new();
            loop {
                let sent = Instant::now();
                let is_allowed = client.check(hits_of(key, 1)).await.unwrap().allowed();
                if is_allowed {
                    admissions.push(Admission { member, sent, answered: Instant::now() });
                }
                if is_over(started, is_allowed) {
                    return admissions;
                }
                // Limits the rate of the load.
                tokio::time::sleep(Duration::from_millis(30)).await;
            }
        });
    }
    callers.join_all().await.into_iter().flatten().collect()
}

/// Asserts that whenever a member allowed a hit, those that it had allowed before and those that others had allowed
/// [`MAX_DELAY`] before were within the limit.
fn assert_law(admissions: &[Admission], limit: impl Fn(Instant) -> f64) {
    for admission in admissions {
        let is_known = |other: &&Admission| {
            let delay = if other.member == admission.member { Duration::ZERO } else { MAX_DELAY };
            other.answered + delay < admission.sent
        };
        let known = admissions.iter().filter(is_known).count();
        assert!((known as f64) < limit(admission.answered), "{known} hits were allowed before this one");
    }
}

#[tokio::test]
async fn a_limit_holds_across_members_under_load() {
    let text = "domain: d\ndescriptors:\n- {key: window, rate_limit: {unit: year, requests_per_unit: 2500}}\n";
    let members = Members::start(3, text).await;
    let admissions = load(&members, "window", |_, is_allowed| !is_allowed).await;
    assert!(admissions.len() >= 2_500, "{}", admissions.len());
    assert!(admissions.len() < 2 * 2_500, "{} hits are as many as without an exchange", admissions.len());
    assert_law(&admissions, |_| 2_500.0);
    for member in &members.all {
        assert!(!member.is_allowed("window", 1).await);
    }
}

/// Members that allowed too much at first allow less until the bucket has paid it back.
#[tokio::test]
async fn the_long_run_rate_of_a_bucket_holds_across_members() {
    const RATE: f64 = 60.0;
    let text = "domain: d\ndescriptors:\n\
                - {key: bucket, rate_limit: {unit: second, requests_per_unit: 60, algorithm: token_bucket}}\n";
    let members = Members::start(3, text).await;
    let started = Instant::now();
    let admissions = load(&members, "bucket", |started, _| started.elapsed() > 3 * MAX_DELAY).await;
    let elapsed = |now: Instant| now.duration_since(started).as_secs_f64();
    assert_law(&admissions, |now| RATE + RATE * elapsed(now));
    let total = admissions.len() as f64;
    assert!(total > RATE * elapsed(Instant::now()) / 4.0, "{total}");
}
