//! A real Envoy with its quota filter, against the laws of `docs/guides/envoy-quotas.md`, and its behaviour on which
//! these are based.

use std::{
    fs,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use sluicegate_proto::envoy::{
    service::rate_limit_quota::v3::{
        BucketId, RateLimitQuotaResponse, RateLimitQuotaUsageReports,
        rate_limit_quota_response::{
            BucketAction,
            bucket_action::{BucketAction as Action, QuotaAssignmentAction},
        },
        rate_limit_quota_service_server::{RateLimitQuotaService, RateLimitQuotaServiceServer},
    },
    r#type::v3::{
        RateLimitStrategy, TokenBucket,
        rate_limit_strategy::{BlanketRule, Strategy},
    },
};
use tokio::{
    net::TcpListener,
    sync::mpsc::{UnboundedSender, unbounded_channel},
};
use tokio_stream::{
    Stream,
    wrappers::{TcpListenerStream, UnboundedReceiverStream},
};
use tonic::{Request, Response, Status, Streaming, transport};

use super::envoy::upstream;
use crate::support::{
    RedisServer, Server, envoy::Envoy, raw_client::Client, repository, request_for, rules, wait_for, wait_for_async,
};

const FILE: &str = "deploy/envoy/rlqs.yaml";

fn text_of(requests_per_second: u32, algorithm: &str) -> String {
    let limit = format!("unit: second, requests_per_unit: {requests_per_second}, algorithm: {algorithm}");
    format!("domain: envoy\ndescriptors: [{{key: quota_user, rate_limit: {{{limit}}}}}]")
}

/// Rules with one limit for each user.
fn limit_of(requests_per_second: u32, algorithm: &str) -> tempfile::TempDir {
    rules(&[("envoy.yaml", &text_of(requests_per_second, algorithm))])
}

fn send(envoy: &Envoy) -> bool {
    send_as(envoy, "alice")
}

fn send_as(envoy: &Envoy, user: &str) -> bool {
    envoy.get("/", &[("x-user", user)]).0 == 200
}

/// Sends requests without a pause, and returns how many were admitted and the time in seconds.
fn flood(envoy: &Envoy, time: Duration) -> (u32, f64) {
    let (began, mut admitted) = (Instant::now(), 0);
    while began.elapsed() < time {
        admitted += u32::from(send(envoy));
    }
    (admitted, began.elapsed().as_secs_f64())
}

/// Floods Envoy until it admits this number of requests per second, in a time of two seconds. After a pause, also Envoy's
/// burst can pass in that time.
fn flood_until(what: &str, envoy: &Envoy, expected: std::ops::Range<f64>) {
    wait_for(what, || {
        let (admitted, seconds) = flood(envoy, Duration::from_secs(2));
        expected.contains(&(f64::from(admitted) / seconds)).then_some(())
    });
}

/// Envoy admits the requests of its quota without a call, and each request is counted once.
#[test]
fn envoy_limits_requests_by_itself() {
    let server = Server::start(&repository("deploy/envoy/rules"), "memory");
    let envoy = Envoy::start_changed(FILE, server.grpc, upstream().0, &[]);
    let send = || envoy.get("/", &[("x-user", "alice")]).0;
    let mut sent = 0;
    wait_for("the first quota", || {
        sent += 1;
        (send() == 429).then_some(())
    });
    // The first quota is an eighth of the limit and a quarter of that: it allows 33 requests in this time.
    let (began, mut allowed) = (Instant::now(), 0_u32);
    while allowed < 60 && began.elapsed() < Duration::from_secs(20) {
        sent += 1;
        allowed += u32::from(send() == 200);
    }
    assert_eq!(allowed, 60, "the quota follows the demand");
    // The rate, and the burst of each quota.
    let law = 10.0 * (began.elapsed().as_secs_f64() + 2.0);
    assert!(f64::from(allowed) <= law, "{allowed} requests instead of {law}");
    assert_eq!(envoy.get("/", &[]).0, 200, "a request without a user has no bucket");
    let total = "ratelimit_service_rate_limit_total_hits{domain=\"envoy\",key1=\"quota_user\",protocol=\"rlqs\"}";
    wait_for("all requests to be reported", || (server.metric(total) == f64::from(sent)).then_some(()));
}

/// Envoy enforces its quota while the service restarts, and then reports to the new process.
#[test]
fn envoy_limits_requests_while_the_service_restarts() {
    let (redis, folder) = (RedisServer::start(), repository("deploy/envoy/rules"));
    let server = Server::start(&folder, &redis.url());
    let at = server.grpc;
    let envoy = Envoy::start_changed(FILE, at, upstream().0, &[]);
    let send = || envoy.get("/", &[("x-user", "alice")]).0 == 200;
    wait_for("the first quota", || (!send()).then_some(()));
    drop(server);
    // The first quota is 1.56 requests per second with a burst of two, and it lasts for 15 seconds.
    let (began, mut allowed) = (Instant::now(), 0_u32);
    while began.elapsed() < Duration::from_secs(3) {
        allowed += u32::from(send());
    }
    let law = 1.56 * began.elapsed().as_secs_f64() + 2.0;
    assert!(f64::from(allowed) <= law, "{allowed} requests instead of {law}");
    let server = Server::builder_at(at).rules(&folder).store(&redis.url()).start();
    let total = "ratelimit_service_rate_limit_total_hits{domain=\"envoy\",key1=\"quota_user\",protocol=\"rlqs\"}";
    wait_for("a report to the new process", || (server.metric(total) > 0.0).then_some(()));
    let (began, mut allowed) = (Instant::now(), 0_u32);
    while allowed < 60 && began.elapsed() < Duration::from_secs(30) {
        allowed += u32::from(send());
    }
    assert_eq!(allowed, 60, "the quota follows the demand again");
    let law = 10.0 * (began.elapsed().as_secs_f64() + 2.0);
    assert!(f64::from(allowed) <= law, "{allowed} requests instead of {law}");
}

/// The requests that were admitted by an Envoy and by an instance of the service in the same time.
struct Admitted {
    by_envoy: u32,
    by_service: u32,
    seconds: f64,
}

impl Admitted {
    /// Checks the law of a limit per second: its burst, the burst of the quota, and the hits of a second, which are
    /// counted in advance.
    fn assert_law(&self, limit: f64, what: &str) {
        let Self { by_envoy, by_service, seconds } = self;
        let law = limit * (seconds + 3.0);
        assert!(f64::from(by_envoy + by_service) <= law, "{what}: {by_envoy} and {by_service} instead of {law}");
    }
}

/// Floods Envoy and an instance of the service, in which failed calls count as denied.
async fn flood_both(envoy: &Arc<Envoy>, client: &Client, time: Duration) -> Admitted {
    let (began, request, envoy) = (Instant::now(), request_for("envoy", &[("quota_user", "alice")]), Arc::clone(envoy));
    let flooding = tokio::task::spawn_blocking(move || flood(&envoy, time).0);
    let mut by_service = 0;
    while !flooding.is_finished() {
        by_service += u32::from(client.check(request.clone()).await.is_ok_and(|response| response.allowed()));
    }
    Admitted { by_envoy: flooding.await.unwrap(), by_service, seconds: began.elapsed().as_secs_f64() }
}

/// Envoy has a part of the limit, and its requests are counted for other callers before it can admit them. All of them
/// send without a pause.
#[tokio::test(flavor = "multi_thread")]
async fn envoy_and_other_callers_together_keep_the_limit() {
    for algorithm in ["fixed_window", "token_bucket", "sliding_window"] {
        let (redis, folder) = (RedisServer::start(), limit_of(40, algorithm));
        let [of_envoy, of_others] = [0, 1].map(|_| Server::start(folder.path(), &redis.url()));
        let envoy = Arc::new(Envoy::start_changed(FILE, of_envoy.grpc, upstream().0, &[]));
        // Before the second report, the share is small.
        tokio::task::block_in_place(|| flood(&envoy, Duration::from_secs(11)));
        let admitted = flood_both(&envoy, &of_others.client().await, Duration::from_secs(6)).await;
        admitted.assert_law(40.0, algorithm);
        assert!(admitted.by_envoy >= 150, "{algorithm}: {}", admitted.by_envoy);
    }
}

/// Envoy enforces its quota while its instance is gone, and has its share again at another instance, as it has a name.
#[tokio::test(flavor = "multi_thread")]
async fn envoy_keeps_its_share_when_its_instance_is_killed() {
    let (redis, folder) = (RedisServer::start(), limit_of(20, "token_bucket"));
    let servers = [0, 1].map(|_| Server::start(folder.path(), &redis.url()));
    let endpoint = |server: &Server| {
        let port = server.grpc.port();
        format!("- endpoint: {{ address: {{ socket_address: {{ address: 127.0.0.1, port_value: {port} }} }} }}")
    };
    let [one, both] = [endpoint(&servers[0]), format!("{}\n        {}", endpoint(&servers[0]), endpoint(&servers[1]))];
    let changes = [(&*one, &*both), ("# initial_metadata", "initial_metadata")];
    let envoy = Arc::new(Envoy::start_changed(FILE, servers[0].grpc, upstream().0, &changes));
    tokio::task::block_in_place(|| flood_until("the whole limit", &envoy, 17.0..30.0));
    let has_stream = |server: &Server| server.metric("sluicegate_quota_streams") == 1.0;
    let [first, second] = servers;
    let (killed, other) = if has_stream(&first) { (first, second) } else { (second, first) };
    assert!(has_stream(&killed) && !has_stream(&other));
    drop(killed);
    let (began, mut admitted) = (Instant::now(), 0);
    tokio::task::block_in_place(|| {
        wait_for("a stream to the other instance", || {
            admitted += flood(&envoy, Duration::from_secs(1)).0;
            has_stream(&other).then_some(())
        });
    });
    let alone = Admitted { by_envoy: admitted, by_service: 0, seconds: began.elapsed().as_secs_f64() };
    alone.assert_law(20.0, "without an instance");
    let admitted = flood_both(&envoy, &other.client().await, Duration::from_secs(6)).await;
    admitted.assert_law(20.0, "with the other instance");
    assert!(admitted.by_envoy >= 75, "{}", admitted.by_envoy);
}

/// Envoy enforces its quota while Redis is gone, and all callers keep the limit when it is there again.
#[tokio::test(flavor = "multi_thread")]
async fn envoy_keeps_its_quota_while_redis_is_unavailable() {
    let (mut redis, folder) = (RedisServer::start(), limit_of(20, "token_bucket"));
    let server = Server::start(folder.path(), &redis.url());
    let envoy = Arc::new(Envoy::start_changed(FILE, server.grpc, upstream().0, &[]));
    tokio::task::block_in_place(|| flood_until("the whole limit", &envoy, 17.0..30.0));
    let client = server.client().await;
    redis.kill();
    // Longer than the lifetime of a quota.
    let without = flood_both(&envoy, &client, Duration::from_secs(20)).await;
    without.assert_law(20.0, "without Redis");
    assert!(without.by_envoy >= 300, "{}", without.by_envoy);
    redis.restart();
    wait_for_async("an answer", async || client.check(request_for("envoy", &[("quota_user", "bob")])).await.ok()).await;
    // Redis has lost the counter, which begins with a burst again.
    let with = flood_both(&envoy, &client, Duration::from_secs(6)).await;
    with.assert_law(20.0, "with Redis");
}

#[test]
fn a_changed_limit_reaches_envoy_within_seconds() {
    let folder = limit_of(10, "fixed_window");
    let server = Server::start(folder.path(), "memory");
    let envoy = Envoy::start_changed(FILE, server.grpc, upstream().0, &[]);
    flood_until("the first limit", &envoy, 8.0..12.0);
    // A busy machine cannot send many more requests per second than these.
    for (limit, expected) in [(30, 25.0..33.0), (5, 4.0..6.5), (0, 0.0..0.1), (20, 17.0..23.0)] {
        fs::write(folder.path().join("envoy.yaml"), text_of(limit, "fixed_window")).unwrap();
        let changed = Instant::now();
        flood_until(&format!("a limit of {limit}"), &envoy, expected);
        assert!(changed.elapsed() < Duration::from_secs(10), "{:?}", changed.elapsed());
    }
}

/// Ends a thread also if the test fails.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// The share of an Envoy that is killed goes to the other one when its quota has ended.
#[test]
fn a_killed_envoy_leaves_its_share_to_others() {
    let folder = limit_of(20, "fixed_window");
    let server = Server::builder().rules(folder.path()).set("quotas.ttl", "10s").start();
    let upstream = upstream().0;
    let [first, second] = [0, 1].map(|_| Envoy::start_changed(FILE, server.grpc, upstream, &[]));
    let (stop, admitted_by_first) = (AtomicBool::new(false), AtomicU32::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Relaxed) {
                admitted_by_first.fetch_add(u32::from(send(&first)), Relaxed);
            }
        });
        let _stop = StopOnDrop(&stop);
        flood_until("half of the limit", &second, 8.5..11.5);
        wait_for("both to use the limit", || {
            admitted_by_first.store(0, Relaxed);
            let (admitted, seconds) = flood(&second, Duration::from_secs(4));
            let both = f64::from(admitted + admitted_by_first.load(Relaxed));
            let law = 20.0 * (seconds + 1.0) + 2.0;
            assert!(both <= law, "{both} requests instead of {law}");
            (17.0..22.0).contains(&(both / seconds)).then_some(())
        });
    });
    drop(first);
    let killed = Instant::now();
    flood_until("the whole limit", &second, 18.0..22.0);
    assert!(killed.elapsed() < Duration::from_secs(30), "{:?}", killed.elapsed());
}

type Answer = Result<RateLimitQuotaResponse, Status>;

/// A quota service that sends the assignments of a test.
#[derive(Clone, Default)]
struct FakeService(Arc<Mutex<Option<UnboundedSender<Answer>>>>);

#[tonic::async_trait]
impl RateLimitQuotaService for FakeService {
    type StreamRateLimitQuotasStream = Pin<Box<dyn Stream<Item = Answer> + Send>>;

    async fn stream_rate_limit_quotas(
        &self,
        request: Request<Streaming<RateLimitQuotaUsageReports>>,
    ) -> Result<Response<Self::StreamRateLimitQuotasStream>, Status> {
        let (sender, receiver) = unbounded_channel();
        let mut reports = request.into_inner();
        tokio::spawn(async move { while let Ok(Some(_)) = reports.message().await {} });
        *self.0.lock().unwrap() = Some(sender);
        Ok(Response::new(Box::pin(UnboundedReceiverStream::new(receiver))))
    }
}

impl FakeService {
    /// Serves on a free port.
    fn start(&self) -> std::net::SocketAddr {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let (address, service) = (listener.local_addr().unwrap(), RateLimitQuotaServiceServer::new(self.clone()));
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let incoming = TcpListenerStream::new(TcpListener::from_std(listener).unwrap());
                transport::Server::builder().add_service(service).serve_with_incoming(incoming).await.unwrap();
            });
        });
        address
    }

    fn assign(&self, user: &str, strategy: Strategy) {
        let assignment = QuotaAssignmentAction {
            assignment_time_to_live: Some(prost_types::Duration { seconds: 300, nanos: 0 }),
            rate_limit_strategy: Some(RateLimitStrategy { strategy: Some(strategy) }),
        };
        let action = BucketAction {
            bucket_id: Some(BucketId { bucket: [("quota_user".into(), user.into())].into() }),
            bucket_action: Some(Action::QuotaAssignmentAction(assignment)),
        };
        let sender = wait_for("a stream", || self.0.lock().unwrap().clone());
        sender.send(Ok(RateLimitQuotaResponse { bucket_action: vec![action] })).unwrap();
    }
}

/// The service knows from this how many requests an Envoy can admit after its quota has changed.
#[test]
fn envoy_keeps_the_part_of_the_tokens_when_a_bucket_is_replaced() {
    let service = FakeService::default();
    let envoy = Envoy::start_changed(FILE, service.start(), upstream().0, &[]);
    assert!(send(&envoy), "no_assignment_behavior");
    let deny = Strategy::BlanketRule(BlanketRule::DenyAll.into());
    // Tokens are added once in 1,000 seconds, so that only those of the beginning count.
    let bucket = |max_tokens, tokens| {
        let fill_interval = Some(prost_types::Duration { seconds: 1_000, nanos: 0 });
        Strategy::TokenBucket(TokenBucket { max_tokens, tokens_per_fill: Some(tokens), fill_interval })
    };
    let admitted = |most: usize| (0..most).filter(|_| send(&envoy)).count();
    assert!(send_as(&envoy, "bob"));
    let mut bob_is_denied = false;
    for (what, strategies, sent, expected) in [
        ("a bucket after a denial is full", vec![deny, bucket(40, 1)], 10, 10),
        ("an equal bucket changes nothing", vec![bucket(40, 1)], 10, 10),
        ("a larger bucket keeps the half of its tokens", vec![bucket(80, 1)], 100, 40),
        ("an empty bucket stays empty", vec![bucket(100, 2)], 100, 0),
        ("a bucket after a denial is full again", vec![deny, bucket(60, 1)], 0, 0),
        ("a smaller bucket is full as well", vec![bucket(6, 1)], 100, 6),
    ] {
        strategies.into_iter().for_each(|strategy| service.assign("alice", strategy));
        // Envoy reads the assignments in their order.
        bob_is_denied = !bob_is_denied;
        let rule = if bob_is_denied { BlanketRule::DenyAll } else { BlanketRule::AllowAll };
        service.assign("bob", Strategy::BlanketRule(rule.into()));
        wait_for("the last assignment", || (send_as(&envoy, "bob") != bob_is_denied).then_some(()));
        assert_eq!(admitted(sent), expected, "{what}");
    }
}
