//! The client crate against real servers: the content of verdicts, the deny cache, grants, and metrics.

use std::{
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant, SystemTime},
};

use opentelemetry::metrics::MeterProvider;
use prost_types::Timestamp;

use sluicegate_client::{Builder, Client, DecidedBy, Descriptor, Failure, descriptor};
use sluicegate_proto::{
    envoy::service::ratelimit::v3::{
        RateLimitRequest, RateLimitResponse,
        rate_limit_response::{Code, DescriptorStatus, Quota, quota::ExpirationSpecifier},
        rate_limit_service_server::{RateLimitService, RateLimitServiceServer},
    },
    sluicegate::v1::{
        self,
        decision_service_server::{DecisionService, DecisionServiceServer},
    },
};
use tokio::{net::TcpListener, sync::Notify, task::JoinSet};
use tokio_stream::{StreamExt, wrappers::TcpListenerStream};
use tonic::{Request, Response, Status};

use crate::support::{DEADLINE, Server, rules, wait_for_async};

pub(super) const RULES: &str = "
domain: d
descriptors:
- key: few
  rate_limit: {unit: year, requests_per_unit: 3, name: few}
- key: many
  rate_limit: {unit: year, requests_per_unit: 1000000}
- key: brief
  rate_limit: {unit: second, requests_per_unit: 2, algorithm: gcra, burst: 1}
";

pub(super) fn start() -> Server {
    let folder = rules(&[("d.yaml", RULES)]);
    Server::start(folder.path(), "memory")
}

/// Returns a builder for a client with a timeout that no test exceeds by chance.
pub(super) fn client(server: &Server) -> Builder {
    Client::builder(format!("http://{}", server.grpc)).domain("d").timeout(DEADLINE)
}

pub(super) fn few(user: &str) -> Descriptor<'_> {
    descriptor! { "few" => user }
}

/// A service with Envoy's protocol only, as other implementations have it. It allows the first two calls.
#[derive(Clone, Default)]
struct EnvoyOnly {
    calls: Arc<AtomicUsize>,
    streams: Arc<AtomicUsize>,
}

#[tonic::async_trait]
impl RateLimitService for EnvoyOnly {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        if request.metadata().get("authorization").is_none_or(|token| token != "Bearer open sesame") {
            return Err(Status::unauthenticated("missing bearer token"));
        }
        let request = request.into_inner();
        if request.domain == "broken" {
            return Err(Status::internal("broken"));
        }
        let calls = self.calls.fetch_add(1, Relaxed);
        let code = if calls < 2 { Code::Ok } else { Code::OverLimit };
        let duration_until_reset = Some(prost_types::Duration { seconds: 100, nanos: 0 });
        let status = DescriptorStatus { code: code.into(), duration_until_reset, ..DescriptorStatus::default() };
        let statuses = vec![status; request.descriptors.len()];
        Ok(Response::new(RateLimitResponse { overall_code: code.into(), statuses, ..RateLimitResponse::default() }))
    }
}

/// Rejects streams and batches, and counts the attempts to open a stream.
#[tonic::async_trait]
impl DecisionService for EnvoyOnly {
    type StreamStream = tokio_stream::Empty<Result<v1::ResponseFrame, Status>>;

    async fn stream(
        &self,
        _: Request<tonic::Streaming<v1::CheckFrame>>,
    ) -> Result<Response<Self::StreamStream>, Status> {
        self.streams.fetch_add(1, Relaxed);
        Err(Status::unimplemented("no streams"))
    }

    async fn batch(&self, _: Request<v1::CheckFrame>) -> Result<Response<v1::ResponseFrame>, Status> {
        Err(Status::unimplemented("no batches"))
    }
}

/// Starts an [`EnvoyOnly`] and returns it with its address.
async fn start_envoy_only() -> (EnvoyOnly, String) {
    let (service, listener) = (EnvoyOnly::default(), TcpListener::bind("127.0.0.1:0").await.unwrap());
    let url = format!("http://{}", listener.local_addr().unwrap());
    let server = tonic::transport::Server::builder().add_service(RateLimitServiceServer::new(service.clone()));
    let server = server.add_service(DecisionServiceServer::new(service.clone()));
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    (service, url)
}

#[tokio::test]
async fn a_verdict_contains_every_field_of_the_response() {
    let server = start();
    for batching in [true, false] {
        let limiter = client(&server).batching(batching).deny_cache(0).connect_lazy().unwrap();
        let user = format!("alice{batching}");
        let first = limiter.check([few(&user), descriptor! { "many" => &*user }.hits(5)]).hits(2).await;
        assert_eq!(
            (first.allowed(), first.decided_by(), first.remaining()),
            (true, DecidedBy::Server, Some(1)),
            "{first:?}"
        );
        assert_eq!(first.statuses()[1].remaining, 999_995);
        let limit = first.tightest().unwrap().limit.clone().unwrap();
        let year = Duration::from_secs(365 * 86_400);
        assert_eq!((limit.requests_per_unit, limit.window, limit.name.as_deref()), (3, year, Some("few")));
        let second = limiter.check([few(&user)]).hits(2).await;
        assert!(!second.allowed() && second.retry_after().unwrap() > Duration::from_secs(1), "{second:?}");
        assert_eq!(second.failure(), None);
        let allowed = limiter.check([descriptor! { "brief" => &*user }]).await.allowed().then_some(());
        assert_eq!(allowed, Some(()));
        let wait = limiter.check([descriptor! { "brief" => &*user }]).await.retry_after().unwrap();
        assert!(wait <= Duration::from_secs(1), "{wait:?}");
        assert_eq!(wait.subsec_micros() != 0, batching, "in microseconds on a stream, otherwise in seconds: {wait:?}");
        let failure = limiter.check([]).without_fallback().await.unwrap_err();
        let Failure::Service { code, message } = failure else { panic!("{failure:?}") };
        assert_eq!(
            (code, message.as_str()),
            (tonic::Code::InvalidArgument, "rate limit descriptor list must not be empty")
        );
    }
}

#[tokio::test]
async fn a_service_with_envoys_protocol_only_is_supported() {
    let (service, url) = start_envoy_only().await;
    let builder = || Client::builder(&url).domain("d").timeout(DEADLINE);
    let failure = builder().connect_lazy().unwrap().check([few("x")]).without_fallback().await.unwrap_err();
    assert!(matches!(failure, Failure::Service { code: tonic::Code::Unauthenticated, .. }), "{failure}");
    let limiter = builder().bearer_token("open sesame").connect_lazy().unwrap();
    // All checks start before the client knows that streams are unsupported. Each is sent once.
    let mut checks = JoinSet::new();
    for number in 0..50 {
        let limiter = limiter.clone();
        checks.spawn(async move { limiter.check([few(&number.to_string())]).without_fallback().await.unwrap() });
    }
    let verdicts = checks.join_all().await;
    assert_eq!((service.calls.load(Relaxed), verdicts.iter().filter(|verdict| verdict.allowed()).count()), (50, 2));
    limiter.check([few("x")]).without_fallback().await.unwrap();
    assert_eq!(service.streams.load(Relaxed), 2, "each client tries to open a stream once");
    let broken = limiter.check([few("x")]).domain("broken").await;
    assert!(broken.allowed() && broken.decided_by() == DecidedBy::Fallback, "{broken:?}");
    assert!(matches!(broken.failure(), Some(Failure::Service { code: tonic::Code::Internal, .. })), "{broken:?}");
}

#[tokio::test]
async fn denials_are_cached_until_a_refund() {
    let server = start();
    let limiter = client(&server).connect_lazy().unwrap();
    let requests = || server.metric("ratelimit_service_total_requests{grpc_method=\"ShouldRateLimit\"}");
    assert!(limiter.check([few("alice")]).hits(3).await.allowed());
    let deciders: Vec<_> = [
        limiter.check([few("alice")]).await,
        limiter.check([few("alice")]).await,
        limiter.check([few("alice")]).hits(2).await,
    ]
    .iter()
    .map(|verdict| (verdict.allowed(), verdict.decided_by()))
    .collect();
    assert_eq!(deciders, [(false, DecidedBy::Server), (false, DecidedBy::DenyCache), (false, DecidedBy::DenyCache)]);
    assert_eq!(requests(), 2.0);
    limiter.check([few("alice").hits(2).refund()]).await;
    assert!(limiter.check([few("alice")]).await.allowed());
    let without_cache = client(&server).deny_cache(0).connect_lazy().unwrap();
    for _ in 0..2 {
        assert_eq!(without_cache.check([few("alice")]).hits(9).await.decided_by(), DecidedBy::Server);
    }
    // A cached denial expires after its retry-after, and not before.
    let brief = || limiter.check([descriptor! { "brief" => "x" }]);
    assert!(brief().await.allowed());
    let denied = brief().await;
    let (wait, start) = (denied.retry_after().unwrap(), Instant::now());
    wait_for_async("the denial to expire", async || brief().await.allowed().then_some(())).await;
    assert!(start.elapsed() + Duration::from_millis(100) > wait, "{:?} of {wait:?}", start.elapsed());
}

/// The client's metrics count checks by decider and decision.
#[tokio::test]
async fn checks_are_counted_by_decider() {
    let server = start();
    let registry = prometheus::Registry::new();
    let exporter = opentelemetry_prometheus::exporter().with_registry(registry.clone()).build().unwrap();
    let provider = opentelemetry_sdk::metrics::SdkMeterProvider::builder().with_reader(exporter).build();
    let limiter = client(&server).meter(provider.meter("gateway")).connect_lazy().unwrap();
    for _ in 0..6 {
        limiter.check([few("alice")]).await;
    }
    limiter.check([]).await;
    let page = prometheus::TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
    let count = |name: &str, allowed: &str, by: &str| {
        let (allowed, by) = (format!("allowed=\"{allowed}\""), format!("decided_by=\"{by}\""));
        let matches = |line: &&str| line.starts_with(name) && line.contains(&allowed) && line.contains(&by);
        page.lines().find(matches).and_then(|line| line.split(' ').next_back()?.parse::<f64>().ok())
    };
    for (allowed, by, checks) in
        [("true", "server", 3.0), ("false", "server", 1.0), ("false", "deny_cache", 2.0), ("true", "fallback", 1.0)]
    {
        assert_eq!(count("sluicegate_client_checks", allowed, by), Some(checks), "allowed={allowed}, by={by}: {page}");
    }
    let timed = page.lines().find(|line| line.starts_with("sluicegate_client_duration_seconds_count"));
    assert!(timed.is_some(), "{page}");
    assert!(!page.contains("duration_seconds_count{decided_by=\"deny_cache\""), "{page}");
}

/// A service that grants ten hits with every response, in both protocols, and records its requests.
#[derive(Clone, Default)]
struct Granting {
    requests: Arc<Mutex<Vec<RateLimitRequest>>>,
    /// TTL of a grant in the metadata of a response.
    ttl: Option<&'static str>,
    /// End of a quota in the response, in seconds of wall-clock time from now.
    valid_for: Option<i64>,
}

impl Granting {
    /// Returns the number of requests.
    fn requests(&self) -> usize {
        self.requests.lock().unwrap().len()
    }
}

#[tonic::async_trait]
impl RateLimitService for Granting {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        self.requests.lock().unwrap().push(request.into_inner());
        #[allow(clippy::disallowed_methods, reason = "the end of a quota is a wall-clock time")]
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs().cast_signed();
        let until = |seconds| ExpirationSpecifier::ValidUntil(Timestamp { seconds: now + seconds, nanos: 0 });
        let quota = Quota { requests: 10, expiration_specifier: self.valid_for.map(until), id: "1".into() };
        let status = DescriptorStatus { code: Code::Ok.into(), quota: Some(quota), ..DescriptorStatus::default() };
        let statuses = vec![status];
        let answer = RateLimitResponse { overall_code: Code::Ok.into(), statuses, ..RateLimitResponse::default() };
        let mut response = Response::new(answer);
        if let Some(ttl) = self.ttl {
            response.metadata_mut().insert("sluicegate-grant-ttl-us", ttl.parse().unwrap());
        }
        Ok(response)
    }
}

#[tonic::async_trait]
impl DecisionService for Granting {
    type StreamStream = Pin<Box<dyn tokio_stream::Stream<Item = Result<v1::ResponseFrame, Status>> + Send>>;

    async fn stream(
        &self,
        frames: Request<tonic::Streaming<v1::CheckFrame>>,
    ) -> Result<Response<Self::StreamStream>, Status> {
        let requests = Arc::clone(&self.requests);
        let answers = frames.into_inner().map(move |frame| {
            let answers = frame?.checks.into_iter().map(|check| {
                requests.lock().unwrap().push(check.request.unwrap());
                let grant = Some(v1::Grant { hits: 10, ttl_us: 60_000_000, id: "1".into() });
                let statuses = vec![v1::Status { allowed: true, grant, ..v1::Status::default() }];
                let verdict = v1::Verdict { allowed: true, statuses, ..v1::Verdict::default() };
                v1::CheckResponse { id: check.id, outcome: Some(v1::check_response::Outcome::Verdict(verdict)) }
            });
            Ok(v1::ResponseFrame { responses: answers.collect() })
        });
        Ok(Response::new(Box::pin(answers)))
    }

    async fn batch(&self, _: Request<v1::CheckFrame>) -> Result<Response<v1::ResponseFrame>, Status> {
        Err(Status::unimplemented("batch"))
    }
}

/// Starts the service, with or without streams, and returns it with a client.
async fn start_granting(granting: Granting, streams: bool) -> (Granting, Client) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let mut services = tonic::service::Routes::new(RateLimitServiceServer::new(granting.clone()));
    if streams {
        services = services.add_service(DecisionServiceServer::new(granting.clone()));
    }
    let server = tonic::transport::Server::builder().add_routes(services);
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    (granting, Client::builder(url).domain("d").timeout(DEADLINE).connect_lazy().unwrap())
}

#[tokio::test]
async fn granted_hits_are_spent_without_a_call() {
    let relative = Granting { ttl: Some("60000000"), ..Granting::default() };
    let absolute = Granting { valid_for: Some(60), ..Granting::default() };
    for (service, streams) in [(Granting::default(), true), (relative, false), (absolute, false)] {
        let (service, limiter) = start_granting(service, streams).await;
        let check = async |hits| limiter.check([few("alice")]).hits(hits).without_fallback().await.unwrap();
        assert_eq!(check(1).await.decided_by(), DecidedBy::Server);
        for remaining in [7, 4, 1] {
            let verdict = check(3).await;
            assert_eq!(
                (verdict.decided_by(), verdict.allowed(), verdict.statuses()[0].remaining),
                (DecidedBy::Grant, true, remaining)
            );
        }
        assert_eq!((service.requests(), check(3).await.decided_by(), service.requests()), (1, DecidedBy::Server, 2));
        limiter.return_grants().await;
        let requests = service.requests.lock().unwrap().clone();
        let descriptors = requests.iter().map(|request| &request.descriptors[0]);
        let refunds = descriptors.filter(|descriptor| descriptor.is_negative_hits);
        let hits: Vec<_> = refunds.filter_map(|descriptor| descriptor.hits_addend).collect();
        assert_eq!(hits, [1, 10], "the unused hits of the first and the second grant");
        limiter.return_grants().await;
        assert_eq!(check(1).await.decided_by(), DecidedBy::Server, "returned grants cannot be spent");
    }
    // Grants with an unknown, near or past end are not used.
    for (ttl, valid_for) in
        [(None, None), (None, Some(1)), (None, Some(-5)), (Some(""), Some(60)), (Some("x"), Some(60))]
    {
        let (service, limiter) = start_granting(Granting { ttl, valid_for, ..Granting::default() }, false).await;
        for _ in 0..2 {
            assert_eq!(
                limiter.check([few("alice")]).await.decided_by(),
                DecidedBy::Server,
                "ttl {ttl:?}, valid for {valid_for:?}"
            );
        }
        assert_eq!(service.requests(), 2);
    }
}

/// A thousand tasks share one client. The limits are exact, and each check has its own verdict.
#[tokio::test]
async fn a_thousand_tasks_can_share_a_client() {
    let server = start();
    let limiter = client(&server).connect_lazy().unwrap();
    let mut tasks = JoinSet::new();
    for task in 0..1_000 {
        let limiter = limiter.clone();
        tasks.spawn(async move {
            let user = format!("user{}", task % 100);
            let mut allowed = 0;
            for _ in 0..5 {
                allowed += usize::from(limiter.check([few(&user)]).without_fallback().await.unwrap().allowed());
            }
            allowed
        });
    }
    assert_eq!(tasks.join_all().await.iter().sum::<usize>(), 300);
}

/// Checks that exceed the size of a frame are sent in several frames. Checks that exceed the queue fail immediately.
#[tokio::test]
async fn many_checks_are_sent_in_several_frames() {
    let server = start();
    let limiter = client(&server).connect_lazy().unwrap();
    let start_checks = |size: usize| {
        let mut tasks = JoinSet::new();
        for task in 0..size {
            let limiter = limiter.clone();
            tasks.spawn(async move {
                let name = format!("{task:0>900}");
                limiter.check([descriptor! { "many" => name }]).timeout(Duration::from_secs(5)).without_fallback().await
            });
        }
        tasks
    };
    let verdicts = start_checks(5_000).join_all().await;
    assert!(verdicts.iter().all(Result::is_ok), "{:?}", verdicts.iter().find(|verdict| verdict.is_err()));
    server.signal("STOP");
    let mut checks = start_checks(17_000);
    let first = checks.join_next().await.unwrap().unwrap();
    assert_eq!(first.unwrap_err(), Failure::Overloaded);
    server.signal("CONT");
    let verdicts = checks.join_all().await;
    let rejected = verdicts.iter().filter(|verdict| **verdict == Err(Failure::Overloaded)).count();
    assert!((100..=17_000 - 16_384).contains(&rejected), "{rejected} checks rejected");
}

#[tokio::test]
async fn a_check_can_shorten_the_timeout_but_not_extend_it() {
    let server = start();
    server.signal("STOP");
    let limiter = client(&server).timeout(Duration::from_millis(200)).connect_lazy().unwrap();
    for (requested, effective) in [(50, 50), (10_000, 200)] {
        let (start, requested) = (Instant::now(), Duration::from_millis(requested));
        let failure = limiter.check([few("alice")]).timeout(requested).without_fallback().await.unwrap_err();
        assert_eq!(failure, Failure::Timeout(Duration::from_millis(effective)));
        assert!(
            start.elapsed() >= Duration::from_millis(effective) * 9 / 10 && start.elapsed() < Duration::from_secs(5)
        );
    }
    server.signal("CONT");
    let patient = client(&server).timeout(Duration::MAX).connect_lazy().unwrap();
    assert!(patient.check([few("alice")]).without_fallback().await.unwrap().allowed());
}

/// A service that delays responses to refunds, and denies all other requests.
#[derive(Clone, Default)]
struct SlowRefunds {
    answer_refund: Arc<Notify>,
    refunds: Arc<AtomicUsize>,
}

#[tonic::async_trait]
impl RateLimitService for SlowRefunds {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        let is_refund = request.into_inner().descriptors[0].is_negative_hits;
        if is_refund {
            self.refunds.fetch_add(1, Relaxed);
            self.answer_refund.notified().await;
        }
        let code = if is_refund { Code::Ok } else { Code::OverLimit };
        let duration_until_reset = Some(prost_types::Duration { seconds: 100, nanos: 0 });
        let status = DescriptorStatus { code: code.into(), duration_until_reset, ..DescriptorStatus::default() };
        let statuses = vec![status];
        Ok(Response::new(RateLimitResponse { overall_code: code.into(), statuses, ..RateLimitResponse::default() }))
    }
}

/// A denial that arrives between a refund and its response may be older than the refund.
#[tokio::test]
async fn a_cached_denial_does_not_survive_a_refund() {
    let (service, listener) = (SlowRefunds::default(), TcpListener::bind("127.0.0.1:0").await.unwrap());
    let url = format!("http://{}", listener.local_addr().unwrap());
    let server = tonic::transport::Server::builder().add_service(RateLimitServiceServer::new(service.clone()));
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    let limiter = Client::builder(url).domain("d").timeout(DEADLINE).connect_lazy().unwrap();
    let check = async || limiter.check([few("alice")]).await.decided_by();
    let refunding = limiter.clone();
    let refund = tokio::spawn(async move { refunding.check([few("alice").refund()]).await });
    wait_for_async("the refund to reach the service", async || (service.refunds.load(Relaxed) == 1).then_some(()))
        .await;
    assert_eq!((check().await, check().await), (DecidedBy::Server, DecidedBy::DenyCache));
    service.answer_refund.notify_one();
    assert!(refund.await.unwrap().allowed());
    assert_eq!(check().await, DecidedBy::Server);
}
