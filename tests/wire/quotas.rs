//! Envoy's quota protocol: callers that limit requests by themselves, with quotas from the service.

use std::time::Duration;

use sluicegate_proto::envoy::{
    service::rate_limit_quota::v3::{
        BucketId, RateLimitQuotaResponse, RateLimitQuotaUsageReports,
        rate_limit_quota_response::{self, bucket_action::BucketAction},
        rate_limit_quota_service_client::RateLimitQuotaServiceClient,
        rate_limit_quota_usage_reports::BucketQuotaUsage,
    },
    r#type::v3::{
        TokenBucket,
        rate_limit_strategy::{BlanketRule, Strategy},
    },
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Status, Streaming};

use crate::support::{
    DEADLINE, Fault, Operator, Proxy, RedisServer, Server, request_for, rules, wait_for, wait_for_async,
};

const RULES: &str = "
domain: d
descriptors:
- {key: user, rate_limit: {unit: second, requests_per_unit: 100, algorithm: token_bucket}}
- {key: hourly, rate_limit: {unit: hour, requests_per_unit: 50}}
- {key: slots, rate_limit: {algorithm: concurrency, limit: 3, hold: 1s, on_error: deny}}
";

/// One stream of the protocol.
pub(crate) struct Caller {
    reports: mpsc::Sender<RateLimitQuotaUsageReports>,
    responses: Streaming<RateLimitQuotaResponse>,
}

impl Caller {
    pub(crate) async fn connect(server: &Server) -> Self {
        Self::connect_as(server, "").await
    }

    async fn connect_as(server: &Server, name: &str) -> Self {
        let mut client = RateLimitQuotaServiceClient::connect(format!("http://{}", server.grpc)).await.unwrap();
        let (reports, receiver) = mpsc::channel(8);
        let mut request = Request::new(ReceiverStream::new(receiver));
        request.metadata_mut().insert("sluicegate-caller", name.parse().unwrap());
        let responses = client.stream_rate_limit_quotas(request).await.unwrap().into_inner();
        Self { reports, responses }
    }

    async fn send(&self, domain: &str, usages: &[(&str, &str, u64, u64)]) {
        let usage = |(key, value, allowed, denied): &(&str, &str, u64, u64)| BucketQuotaUsage {
            bucket_id: Some(BucketId { bucket: [((*key).into(), (*value).into())].into() }),
            time_elapsed: None,
            num_requests_allowed: *allowed,
            num_requests_denied: *denied,
        };
        let bucket_quota_usages = usages.iter().map(usage).collect();
        self.reports.send(RateLimitQuotaUsageReports { domain: domain.into(), bucket_quota_usages }).await.unwrap();
    }

    /// Receives the next response, and returns the strategy of each bucket in it.
    async fn receive(&mut self) -> Result<Vec<Strategy>, Status> {
        let response = tokio::time::timeout(DEADLINE, self.responses.message()).await.unwrap()?.unwrap();
        let strategy = |action: rate_limit_quota_response::BucketAction| {
            let Some(BucketAction::QuotaAssignmentAction(assignment)) = action.bucket_action else {
                panic!("{action:?} is no assignment")
            };
            assert_eq!(assignment.assignment_time_to_live.unwrap().seconds, 15);
            assignment.rate_limit_strategy.unwrap().strategy.unwrap()
        };
        Ok(response.bucket_action.into_iter().map(strategy).collect())
    }

    pub(crate) async fn report(&mut self, domain: &str, key: &str, value: &str, allowed: u64, denied: u64) -> Strategy {
        self.send(domain, &[(key, value, allowed, denied)]).await;
        self.receive().await.unwrap().pop().unwrap()
    }
}

fn rate(strategy: &Strategy) -> f64 {
    match strategy {
        Strategy::TokenBucket(TokenBucket { tokens_per_fill, fill_interval, .. }) => {
            f64::from(tokens_per_fill.unwrap()) / fill_interval.unwrap().seconds as f64
        }
        Strategy::BlanketRule(_) => 0.0,
    }
}

/// Callers of two instances divide one limit, which is in Redis. All shares together are at most the limit.
#[tokio::test]
async fn callers_of_several_instances_share_a_limit() {
    let (redis, folder) = (RedisServer::start(), rules(&[("d.yaml", RULES)]));
    let servers = [0, 1].map(|_| Server::start(folder.path(), &redis.url()));
    let mut callers = Vec::new();
    for index in 0..10 {
        callers.push(Caller::connect(&servers[index % 2]).await);
    }
    let mut rates = Vec::new();
    for caller in &mut callers {
        rates.push(rate(&caller.report("d", "user", "a", 1, 0).await));
    }
    // Each caller demands an eighth, until nothing is left.
    assert!(rates[..6].iter().all(|rate| *rate >= 12.5), "{rates:?}");
    assert!((95.0..=100.0).contains(&rates.iter().sum()), "{rates:?}");
}

/// The requests that a quota allows are counted before the caller admits them.
#[tokio::test]
async fn callers_of_both_protocols_use_one_counter() {
    let folder = rules(&[("d.yaml", RULES)]);
    let operator = Operator::start(folder.path(), "memory");
    let server = &operator.server;
    let mut caller = Caller::connect(server).await;
    let Strategy::TokenBucket(quota) = caller.report("d", "hourly", "a", 1, 0).await else { panic!("no token bucket") };
    let client = server.client().await;
    let request = request_for("d", &[("hourly", "a")]);
    let mut checked = 0;
    while client.check(request.clone()).await.unwrap().allowed() {
        checked += 1;
    }
    assert_eq!(1 + quota.max_tokens + checked, 50);
    let inspected = operator.ctl(&["inspect", "d", "hourly=a"]);
    assert!(
        inspected.contains("quotas: 15.6% of the limit, for Envoys that limit requests by themselves (1)"),
        "{inspected}"
    );
    let strategy = caller.report("d", "hourly", "a", quota.max_tokens.into(), 3).await;
    assert_eq!(strategy, Strategy::BlanketRule(BlanketRule::DenyAll.into()));
    let series = |protocol: &str| {
        let labels = format!("domain=\"d\",key1=\"hourly\"{protocol}");
        let metric = |name| server.metric(&format!("ratelimit_service_rate_limit_{name}{{{labels}}}"));
        ["total_hits", "within_limit", "over_limit"].map(metric)
    };
    assert_eq!(series(""), [f64::from(checked) + 1.0, checked.into(), 1.0]);
    let reported = f64::from(1 + quota.max_tokens);
    assert_eq!(series(",protocol=\"rlqs\""), [reported + 3.0, reported, 3.0]);
    assert_eq!(server.metric("sluicegate_quota_streams"), 1.0);
    assert_eq!(server.metric("sluicegate_quota_buckets"), 1.0);
    // This limit cannot be divided, but no store has failed.
    let strategy = caller.report("d", "slots", "a", 1, 0).await;
    assert_eq!(strategy, Strategy::BlanketRule(BlanketRule::DenyAll.into()));
    assert_eq!(server.metric("sluicegate_on_error_total{policy=\"deny\"}"), 0.0);
}

/// With a name, a caller keeps its share when it connects to another instance, or again before the service knows that
/// the former connection is broken.
#[tokio::test]
async fn a_caller_with_a_name_keeps_its_share() {
    let (redis, folder) = (RedisServer::start(), rules(&[("d.yaml", RULES)]));
    let operator = Operator::start(folder.path(), &redis.url());
    let other = Server::start(folder.path(), &redis.url());
    let callers = |number: u32| {
        let inspected = operator.ctl(&["inspect", "d", "user=a"]);
        assert!(inspected.contains(&format!("by themselves ({number})")), "{inspected}");
    };
    let mut first = Caller::connect_as(&other, "envoy-1").await;
    let before = first.report("d", "user", "a", 1, 0).await;
    let mut second = Caller::connect_as(&operator.server, "envoy-1").await;
    assert_eq!(second.report("d", "user", "a", 1, 0).await, before);
    let mut third = Caller::connect_as(&operator.server, "envoy-1").await;
    assert_eq!(third.report("d", "user", "a", 1, 0).await, before);
    callers(1);
    assert!(operator.server.log().contains("two open streams have the same name in sluicegate-caller"));
    second.report("d", "user", "a", 1, 0).await;
    callers(2);
}

#[tokio::test]
async fn a_stream_with_invalid_reports_ends_with_a_status() {
    let folder = rules(&[("d.yaml", RULES)]);
    let server = Server::start(folder.path(), "memory");
    let long = "x".repeat(1_025);
    for (domain, usages, text) in [("", vec![("user", "a", 1, 0)], "domain"), (&*long, vec![], "max_text_bytes (1024)")]
    {
        let mut caller = Caller::connect(&server).await;
        caller.send(domain, &usages).await;
        let status = caller.receive().await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
        assert!(status.message().contains(text), "{status:?}");
    }
    wait_for("the streams to end", || (server.metric("sluicegate_quota_streams") == 0.0).then_some(()));
    assert_eq!(server.metric("sluicegate_caller_errors_total{kind=\"invalid\"}"), 2.0);
}

/// An attacker that reports endless buckets gets no more than its share, and takes no quota of an honest caller.
#[tokio::test]
async fn one_stream_cannot_take_the_buckets_of_others() {
    let folder = rules(&[("d.yaml", RULES)]);
    let server = Server::builder().rules(folder.path()).set("quotas.max_buckets", "100").start();
    let mut honest = Caller::connect(&server).await;
    honest.send("d", &[("user", "alice", 1, 0)]).await;
    let alice = honest.receive().await.unwrap();
    let mut attacker = Caller::connect(&server).await;
    for round in 0..3 {
        let users: Vec<String> = (0..500).map(|number| format!("{round}-{number}")).collect();
        let long = "x".repeat(20_000);
        let mut usages: Vec<_> = users.iter().map(|user| ("user", &**user, 1, 0)).collect();
        usages.push(("user", &long, 1, 0));
        attacker.send("d", &usages).await;
        let mut denied = 0;
        let mut answered = 0;
        while answered < usages.len() {
            let strategies = attacker.receive().await.unwrap();
            answered += strategies.len();
            denied += strategies
                .iter()
                .filter(|strategy| **strategy == Strategy::BlanketRule(BlanketRule::DenyAll.into()))
                .count();
        }
        assert!(denied >= if round == 0 { 450 } else { 501 }, "{denied}");
    }
    assert!(server.metric("sluicegate_quota_buckets") < 60.0);
    assert!(server.metric("sluicegate_quota_rejected_buckets_total") > 1_400.0);
    honest.send("d", &[("user", "alice", 1, 0), ("user", "bob", 1, 0)]).await;
    let both = honest.receive().await.unwrap();
    assert!(both.iter().all(|strategy| matches!(strategy, Strategy::TokenBucket(_))), "{alice:?} {both:?}");
    let mut newcomer = Caller::connect(&server).await;
    newcomer.send("d", &[("user", "carol", 1, 0)]).await;
    assert!(matches!(newcomer.receive().await.unwrap()[..], [Strategy::TokenBucket(_)]));
}

/// A misspelled domain or key makes the requests of a bucket unlimited.
#[tokio::test]
async fn buckets_without_a_rule_are_counted() {
    let folder = rules(&[("d.yaml", RULES)]);
    let server = Server::start(folder.path(), "memory");
    let mut caller = Caller::connect(&server).await;
    let allow_all = Strategy::BlanketRule(BlanketRule::AllowAll.into());
    assert_eq!(caller.report("dd", "user", "a", 1, 0).await, allow_all);
    assert_eq!(server.metric("sluicegate_domain_not_found_total"), 1.0);
    let mut caller = Caller::connect(&server).await;
    assert_eq!(caller.report("d", "usr", "a", 1, 0).await, allow_all);
    assert_eq!(server.metric("sluicegate_rule_not_found_total{domain=\"d\"}"), 1.0);
}

#[tokio::test]
async fn many_buckets_are_answered_in_several_messages() {
    let folder = rules(&[("d.yaml", RULES)]);
    let server = Server::start(folder.path(), "memory");
    let mut caller = Caller::connect(&server).await;
    let users: Vec<String> = (0..4).map(|number| number.to_string().repeat(30_000)).collect();
    let usages: Vec<_> = users.iter().map(|user| ("user", &**user, 1, 0)).collect();
    caller.send("d", &usages).await;
    let answered = [caller.receive().await.unwrap().len(), caller.receive().await.unwrap().len()];
    // A message is sent when it has 64 KiB.
    assert_eq!(answered, [3, 1]);
}

/// Streams end when the service stops, so that callers connect to another instance.
#[tokio::test]
async fn streams_end_at_shutdown() {
    let folder = rules(&[("d.yaml", RULES)]);
    let server = Server::start(folder.path(), "memory");
    let mut caller = Caller::connect(&server).await;
    caller.report("d", "user", "a", 1, 0).await;
    server.signal("TERM");
    let end = tokio::time::timeout(DEADLINE, caller.responses.message()).await.unwrap();
    assert!(matches!(end, Ok(None)), "{end:?}");
    assert!(server.wait().await.success());
}

/// An open stream does not keep a connection open after its maximum age.
#[tokio::test]
async fn streams_end_with_their_connection() {
    let folder = rules(&[("d.yaml", RULES)]);
    let server = Server::builder().rules(folder.path()).set("grpc.max_connection_age", "1s").start();
    let mut caller = Caller::connect(&server).await;
    caller.report("d", "hourly", "a", 1, 0).await;
    let end = tokio::time::timeout(DEADLINE, caller.responses.message()).await.unwrap();
    assert!(matches!(end, Ok(None)), "{end:?}");
    // Its unused hits are returned later, when its quota has ended.
    assert_eq!(server.metric("sluicegate_quota_buckets"), 1.0);
}

/// Requests that a caller admits while Redis is unavailable are part of the limit when it is available again.
#[tokio::test]
async fn requests_while_redis_is_unavailable_are_counted_afterwards() {
    let (redis, folder) = (RedisServer::start(), rules(&[("d.yaml", RULES)]));
    let proxy = Proxy::start(redis.port);
    let server = Server::builder().rules(folder.path()).store(&proxy.url()).set("redis.timeout", "2s").start();
    let mut caller = Caller::connect(&server).await;
    let Strategy::TokenBucket(quota) = caller.report("d", "hourly", "a", 1, 0).await else { panic!("no token bucket") };
    let (client, request) = (server.client().await, request_for("d", &[("hourly", "a")]));
    let check_other = async || client.check(request_for("d", &[("user", "b")])).await;
    proxy.set(Fault::Cut);
    wait_for_async("calls to fail", async || check_other().await.err()).await;
    let renewed = caller.report("d", "hourly", "a", quota.max_tokens.into(), 0).await;
    assert_eq!(renewed, Strategy::TokenBucket(quota));
    proxy.set(Fault::None);
    // Workers and quota streams connect again independently. A new bucket has a quota only if its counter is available.
    wait_for_async("calls to succeed", async || check_other().await.ok()).await;
    let next = wait_for_async("a new quota", async || {
        caller.send("d", &[("user", "new", 1, 0), ("hourly", "a", 0, 0)]).await;
        let quotas = caller.receive().await.unwrap();
        if let [_, Strategy::TokenBucket(next)] = quotas[..] { Some(next) } else { None }
    })
    .await;
    let mut checked = 0;
    while client.check(request.clone()).await.unwrap().allowed() {
        checked += 1;
    }
    assert_eq!(1 + quota.max_tokens + next.max_tokens + checked, 50);
}

/// Each caller keeps at most its share, so none gets those of others that report later.
#[tokio::test]
async fn callers_keep_their_shares_when_redis_is_emptied() {
    let (redis, folder) = (RedisServer::start(), rules(&[("d.yaml", RULES)]));
    let servers = [0, 1].map(|_| Server::start(folder.path(), &redis.url()));
    let mut callers = Vec::new();
    for index in 0..4 {
        callers.push(Caller::connect(&servers[index % 2]).await);
    }
    let mut rates = Vec::new();
    for caller in &mut callers {
        rates.push(rate(&caller.report("d", "user", "a", 1, 0).await));
    }
    // A rate is computed from at least half a second.
    tokio::time::sleep(Duration::from_millis(500)).await;
    rates[0] = rate(&callers[0].report("d", "user", "a", 1, 1_000).await);
    assert!((99.0..=100.0).contains(&rates.iter().sum()), "{rates:?}");
    redis.cli(&["flushall"]);
    for (caller, before) in callers.iter_mut().zip(rates) {
        let after = rate(&caller.report("d", "user", "a", 1, 1_000).await);
        assert!((0.99 * before..=before).contains(&after), "{after} instead of {before}");
    }
}

/// While Redis is unavailable, callers keep their quotas. A new bucket gets none, as the failure policy is `error`.
#[tokio::test]
async fn quotas_are_renewed_while_redis_is_unavailable() {
    let (mut redis, folder) = (RedisServer::start(), rules(&[("d.yaml", RULES)]));
    let server = Server::builder().rules(folder.path()).store(&redis.url()).set("redis.timeout", "2s").start();
    let mut caller = Caller::connect(&server).await;
    let before = caller.report("d", "user", "a", 1, 0).await;
    assert_eq!(rate(&before), 15.625);
    redis.kill();
    caller.send("d", &[("user", "new", 1, 0)]).await;
    assert_eq!(caller.report("d", "user", "a", 1, 0).await, before);
    redis.restart();
    wait_for_async("a quota for the new bucket", async || {
        caller.send("d", &[("user", "a", 1, 0), ("user", "new", 1, 0)]).await;
        (caller.receive().await.unwrap().len() == 2).then_some(())
    })
    .await;
}
