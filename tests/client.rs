//! The client crate against real servers and against some that misbehave: the caller always has an answer in time.

use std::{
    collections::BTreeSet,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant, SystemTime},
};

use opentelemetry::metrics::MeterProvider;
use prost_types::Timestamp;

use sluicegate_client::{Builder, By, Client, Descriptor, Failure, OnError, Routing, Verdict, descriptor};
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

use super::support::{DEADLINE, Fault, Proxy, Server, rules, until_async};

const RULES: &str = "
domain: d
descriptors:
- key: few
  rate_limit: {unit: year, requests_per_unit: 3, name: few}
- key: many
  rate_limit: {unit: year, requests_per_unit: 1000000}
- key: brief
  rate_limit: {unit: second, requests_per_unit: 2, algorithm: gcra, burst: 1}
";

fn start() -> Server {
    let folder = rules(&[("d.yaml", RULES)]);
    Server::start(folder.path(), "memory")
}

/// With a deadline that no test meets by chance.
fn client(server: &Server) -> Builder {
    Client::builder(format!("http://{}", server.grpc)).domain("d").deadline(DEADLINE)
}

fn few(user: &str) -> Descriptor<'_> {
    descriptor! { "few" => user }
}

/// Envoy's protocol and no other, as others have it. It allows two of each descriptor.
#[derive(Clone, Default)]
struct Plain {
    calls: Arc<AtomicUsize>,
    streams: Arc<AtomicUsize>,
}

#[tonic::async_trait]
impl RateLimitService for Plain {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        if request.metadata().get("authorization").is_none_or(|token| token != "Bearer open sesame") {
            return Err(Status::unauthenticated("who are you?"));
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

/// It says itself that it has no streams, and counts who asks.
#[tonic::async_trait]
impl DecisionService for Plain {
    type StreamStream = tokio_stream::Empty<Result<v1::AnswerFrame, Status>>;

    async fn stream(
        &self,
        _: Request<tonic::Streaming<v1::CheckFrame>>,
    ) -> Result<Response<Self::StreamStream>, Status> {
        self.streams.fetch_add(1, Relaxed);
        Err(Status::unimplemented("no streams"))
    }

    async fn batch(&self, _: Request<v1::CheckFrame>) -> Result<Response<v1::AnswerFrame>, Status> {
        Err(Status::unimplemented("no batches"))
    }
}

async fn plain() -> (Plain, String) {
    let (plain, listener) = (Plain::default(), TcpListener::bind("127.0.0.1:0").await.unwrap());
    let url = format!("http://{}", listener.local_addr().unwrap());
    let service = tonic::transport::Server::builder().add_service(RateLimitServiceServer::new(plain.clone()));
    let service = service.add_service(DecisionServiceServer::new(plain.clone()));
    tokio::spawn(service.serve_with_incoming(TcpListenerStream::new(listener)));
    (plain, url)
}

#[tokio::test]
async fn a_verdict_says_all_that_the_service_does() {
    let server = start();
    for coalesce in [true, false] {
        let limiter = client(&server).coalesce(coalesce).deny_cache(0).connect_lazy().unwrap();
        let user = format!("alice{coalesce}");
        let first = limiter.check([few(&user), descriptor! { "many" => &*user }.hits(5)]).hits(2).await;
        assert_eq!((first.allowed(), first.by(), first.remaining()), (true, By::Server, Some(1)), "{first:?}");
        assert_eq!(first.statuses()[1].remaining, 999_995);
        let limit = first.tightest().unwrap().limit.clone().unwrap();
        let year = Duration::from_secs(365 * 86_400);
        assert_eq!((limit.requests_per_unit, limit.window, limit.name.as_deref()), (3, year, Some("few")));
        let second = limiter.check([few(&user)]).hits(2).await;
        assert!(!second.allowed() && second.retry_after().unwrap() > Duration::from_secs(1), "{second:?}");
        assert_eq!(second.failure(), None);
        let wait = limiter.check([descriptor! { "brief" => &*user }]).await.allowed().then_some(());
        assert_eq!(wait, Some(()));
        let wait = limiter.check([descriptor! { "brief" => &*user }]).await.retry_after().unwrap();
        assert!(wait <= Duration::from_secs(1), "{wait:?}");
        assert_eq!(wait.subsec_micros() != 0, coalesce, "exact on a stream, in seconds without: {wait:?}");
        let refused = limiter.check([]).strict().await.unwrap_err();
        let Failure::Service { code, message } = refused else { panic!("{refused:?}") };
        assert_eq!(
            (code, message.as_str()),
            (tonic::Code::InvalidArgument, "rate limit descriptor list must not be empty")
        );
    }
}

#[tokio::test]
async fn any_service_with_envoys_protocol_will_do() {
    let (plain, url) = plain().await;
    let builder = || Client::builder(&url).domain("d").deadline(DEADLINE);
    let stranger = builder().connect_lazy().unwrap().check([few("x")]).strict().await.unwrap_err();
    assert!(matches!(stranger, Failure::Service { code: tonic::Code::Unauthenticated, .. }), "{stranger}");
    let limiter = builder().bearer_token("open sesame").connect_lazy().unwrap();
    // All at once, before anybody knows that there is no stream: each is asked once.
    let mut checks = JoinSet::new();
    for number in 0..50 {
        let limiter = limiter.clone();
        checks.spawn(async move { limiter.check([few(&number.to_string())]).strict().await.unwrap() });
    }
    let verdicts = checks.join_all().await;
    assert_eq!((plain.calls.load(Relaxed), verdicts.iter().filter(|verdict| verdict.allowed()).count()), (50, 2));
    limiter.check([few("x")]).strict().await.unwrap();
    assert_eq!(plain.streams.load(Relaxed), 2, "found out once by each client");
    let broken = limiter.check([few("x")]).domain("broken").await;
    assert!(broken.allowed() && broken.by() == By::Fallback, "{broken:?}");
    assert!(matches!(broken.failure(), Some(Failure::Service { code: tonic::Code::Internal, .. })), "{broken:?}");
}

#[tokio::test]
async fn a_refusal_is_asked_once_and_a_refund_is_heard() {
    let server = start();
    let limiter = client(&server).connect_lazy().unwrap();
    let asked = || server.metric("ratelimit_service_total_requests{grpc_method=\"ShouldRateLimit\"}");
    assert!(limiter.check([few("alice")]).hits(3).await.allowed());
    let by: Vec<_> = [
        limiter.check([few("alice")]).await,
        limiter.check([few("alice")]).await,
        limiter.check([few("alice")]).hits(2).await,
    ]
    .iter()
    .map(|verdict| (verdict.allowed(), verdict.by()))
    .collect();
    assert_eq!(by, [(false, By::Server), (false, By::DenyCache), (false, By::DenyCache)]);
    assert_eq!(asked(), 2.0);
    limiter.check([few("alice").hits(2).give_back()]).await;
    assert!(limiter.check([few("alice")]).await.allowed());
    let forgetful = client(&server).deny_cache(0).connect_lazy().unwrap();
    for _ in 0..2 {
        assert_eq!(forgetful.check([few("alice")]).hits(9).await.by(), By::Server);
    }
    // It ends when it was said to end, and not before.
    let brief = || limiter.check([descriptor! { "brief" => "x" }]);
    assert!(brief().await.allowed());
    let refused = brief().await;
    let (wait, began) = (refused.retry_after().unwrap(), Instant::now());
    until_async("the refusal to end", async || brief().await.allowed().then_some(())).await;
    assert!(began.elapsed() + Duration::from_millis(100) > wait, "{:?} of {wait:?}", began.elapsed());
}

/// Who answered, in the gateway's own metrics.
#[tokio::test]
async fn checks_are_counted_by_who_answered() {
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
        let (allowed, by) = (format!("allowed=\"{allowed}\""), format!("by=\"{by}\""));
        let is_it = |line: &&str| line.starts_with(name) && line.contains(&allowed) && line.contains(&by);
        page.lines().find(is_it).and_then(|line| line.split(' ').next_back()?.parse::<f64>().ok())
    };
    for (allowed, by, times) in
        [("true", "server", 3.0), ("false", "server", 1.0), ("false", "deny_cache", 2.0), ("true", "fallback", 1.0)]
    {
        assert_eq!(count("sluicegate_client_checks", allowed, by), Some(times), "{allowed} {by}: {page}");
    }
    let timed = page.lines().find(|line| line.starts_with("sluicegate_client_duration_seconds_count"));
    assert!(timed.is_some(), "{page}");
    assert!(!page.contains("duration_seconds_count{by=\"deny_cache\""), "{page}");
}

/// Grants ten hits with every answer, in either protocol, and remembers what it is asked.
#[derive(Clone, Default)]
struct Granting {
    asked: Arc<Mutex<Vec<RateLimitRequest>>>,
    /// What it says of their life: in the metadata, and on the wall's clock from now.
    lives: Option<&'static str>,
    valid_for: Option<i64>,
}

impl Granting {
    fn asked(&self) -> usize {
        self.asked.lock().unwrap().len()
    }
}

#[tonic::async_trait]
impl RateLimitService for Granting {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        self.asked.lock().unwrap().push(request.into_inner());
        #[allow(clippy::disallowed_methods, reason = "the quota's end is a time of the wall's clock")]
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs().cast_signed();
        let until = |seconds| ExpirationSpecifier::ValidUntil(Timestamp { seconds: now + seconds, nanos: 0 });
        let quota = Quota { requests: 10, expiration_specifier: self.valid_for.map(until), id: "1".into() };
        let status = DescriptorStatus { code: Code::Ok.into(), quota: Some(quota), ..DescriptorStatus::default() };
        let statuses = vec![status];
        let answer = RateLimitResponse { overall_code: Code::Ok.into(), statuses, ..RateLimitResponse::default() };
        let mut response = Response::new(answer);
        if let Some(lives) = self.lives {
            response.metadata_mut().insert("sluicegate-grant-life-us", lives.parse().unwrap());
        }
        Ok(response)
    }
}

#[tonic::async_trait]
impl DecisionService for Granting {
    type StreamStream = Pin<Box<dyn tokio_stream::Stream<Item = Result<v1::AnswerFrame, Status>> + Send>>;

    async fn stream(
        &self,
        frames: Request<tonic::Streaming<v1::CheckFrame>>,
    ) -> Result<Response<Self::StreamStream>, Status> {
        let asked = Arc::clone(&self.asked);
        let answers = frames.into_inner().map(move |frame| {
            let answers = frame?.checks.into_iter().map(|check| {
                asked.lock().unwrap().push(check.request.unwrap());
                let grant = Some(v1::Grant { hits: 10, life_us: 60_000_000, id: "1".into() });
                let statuses = vec![v1::Status { allowed: true, grant, ..v1::Status::default() }];
                let verdict = v1::Verdict { allowed: true, statuses, ..v1::Verdict::default() };
                v1::Answer { id: check.id, outcome: Some(v1::answer::Outcome::Verdict(verdict)) }
            });
            Ok(v1::AnswerFrame { answers: answers.collect() })
        });
        Ok(Response::new(Box::pin(answers)))
    }

    async fn batch(&self, _: Request<v1::CheckFrame>) -> Result<Response<v1::AnswerFrame>, Status> {
        Err(Status::unimplemented("batch"))
    }
}

/// With streams, or without.
async fn granting(granting: Granting, streams: bool) -> (Granting, Client) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let mut services = tonic::service::Routes::new(RateLimitServiceServer::new(granting.clone()));
    if streams {
        services = services.add_service(DecisionServiceServer::new(granting.clone()));
    }
    let server = tonic::transport::Server::builder().add_routes(services);
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    (granting, Client::builder(url).domain("d").deadline(DEADLINE).connect_lazy().unwrap())
}

#[tokio::test]
async fn what_was_granted_is_spent_without_asking_and_no_further() {
    let relative = Granting { lives: Some("60000000"), ..Granting::default() };
    let dated = Granting { valid_for: Some(60), ..Granting::default() };
    for (service, streams) in [(Granting::default(), true), (relative, false), (dated, false)] {
        let (service, limiter) = granting(service, streams).await;
        let check = async |hits| limiter.check([few("alice")]).hits(hits).strict().await.unwrap();
        assert_eq!(check(1).await.by(), By::Server);
        for left in [7, 4, 1] {
            let verdict = check(3).await;
            assert_eq!((verdict.by(), verdict.allowed(), verdict.statuses()[0].remaining), (By::Grant, true, left));
        }
        assert_eq!((service.asked(), check(3).await.by(), service.asked()), (1, By::Server, 2));
        limiter.give_back_grants().await;
        let asked = service.asked.lock().unwrap().clone();
        let back = asked.iter().map(|asked| &asked.descriptors[0]).filter(|one| one.is_negative_hits);
        assert_eq!(back.filter_map(|one| one.hits_addend).collect::<Vec<_>>(), [1, 10], "of the first and the second");
        limiter.give_back_grants().await;
        assert_eq!(check(1).await.by(), By::Server, "nothing is left of what was given back");
    }
    // Its end is near, unknown, or over: nobody relies on it.
    for (lives, valid_for) in
        [(None, None), (None, Some(1)), (None, Some(-5)), (Some(""), Some(60)), (Some("x"), Some(60))]
    {
        let (service, limiter) = granting(Granting { lives, valid_for, ..Granting::default() }, false).await;
        for _ in 0..2 {
            assert_eq!(limiter.check([few("alice")]).await.by(), By::Server, "{lives:?} {valid_for:?}");
        }
        assert_eq!(service.asked(), 2);
    }
}

/// A thousand tasks, one client: limits are exact, and each has its own answer.
#[tokio::test]
async fn a_thousand_tasks_share_a_client() {
    let server = start();
    let limiter = client(&server).connect_lazy().unwrap();
    let mut tasks = JoinSet::new();
    for task in 0..1_000 {
        let limiter = limiter.clone();
        tasks.spawn(async move {
            let user = format!("user{}", task % 100);
            let mut allowed = 0;
            for _ in 0..5 {
                allowed += usize::from(limiter.check([few(&user)]).strict().await.unwrap().allowed());
            }
            allowed
        });
    }
    assert_eq!(tasks.join_all().await.iter().sum::<usize>(), 300);
}

/// More than a frame can hold is several frames; more than can wait is turned away at once.
#[tokio::test]
async fn a_crowd_is_taken_in_parts() {
    let server = start();
    let limiter = client(&server).connect_lazy().unwrap();
    let crowd = |size: usize| {
        let mut tasks = JoinSet::new();
        for task in 0..size {
            let limiter = limiter.clone();
            tasks.spawn(async move {
                let name = format!("{task:0>900}");
                limiter.check([descriptor! { "many" => name }]).within(Duration::from_secs(5)).strict().await
            });
        }
        tasks
    };
    let verdicts = crowd(5_000).join_all().await;
    assert!(verdicts.iter().all(Result::is_ok), "{:?}", verdicts.iter().find(|verdict| verdict.is_err()));
    server.signal("STOP");
    let mut crowd = crowd(17_000);
    let first = crowd.join_next().await.unwrap().unwrap();
    assert_eq!(first.unwrap_err(), Failure::Overloaded);
    server.signal("CONT");
    let verdicts = crowd.join_all().await;
    let turned_away = verdicts.iter().filter(|verdict| **verdict == Err(Failure::Overloaded)).count();
    assert!((100..=17_000 - 16_384).contains(&turned_away), "{turned_away}");
}

#[tokio::test]
async fn a_check_can_have_less_time_and_not_more() {
    let server = start();
    server.signal("STOP");
    let limiter = client(&server).deadline(Duration::from_millis(200)).connect_lazy().unwrap();
    for (within, allowed) in [(50, 50), (10_000, 200)] {
        let (began, within) = (Instant::now(), Duration::from_millis(within));
        let failure = limiter.check([few("alice")]).within(within).strict().await.unwrap_err();
        assert_eq!(failure, Failure::Deadline(Duration::from_millis(allowed)));
        assert!(began.elapsed() >= Duration::from_millis(allowed) * 9 / 10 && began.elapsed() < Duration::from_secs(5));
    }
    server.signal("CONT");
    let patient = client(&server).deadline(Duration::MAX).connect_lazy().unwrap();
    assert!(patient.check([few("alice")]).strict().await.unwrap().allowed());
}

/// Nobody listens at one of two addresses: the other one is asked, and no caller notices.
#[tokio::test]
async fn an_instance_that_is_not_there_is_passed_over() {
    let server = start();
    for coalesce in [true, false] {
        let limiter = client(&server).endpoint("http://127.0.0.1:1").routing(Routing::RoundRobin).coalesce(coalesce);
        let limiter = limiter.connect_lazy().unwrap();
        for _ in 0..20 {
            limiter.check([descriptor! { "many" => "x" }]).strict().await.unwrap();
        }
    }
}

/// Whoever does not wait any more is not asked about when the service wakes up.
#[tokio::test]
async fn what_nobody_waits_for_is_not_sent() {
    let server = start();
    server.signal("STOP");
    let limiter = client(&server).connect_lazy().unwrap();
    let mut late = JoinSet::new();
    for _ in 0..100 {
        let limiter = limiter.clone();
        let within = Duration::from_millis(50);
        late.spawn(async move { limiter.check([descriptor! { "many" => "x" }]).within(within).strict().await });
    }
    assert!(late.join_all().await.iter().all(Result::is_err));
    server.signal("CONT");
    until_async("an answer", async || limiter.check([descriptor! { "many" => "x" }]).strict().await.ok()).await;
    assert_eq!(limiter.check([descriptor! { "many" => "x" }]).await.remaining(), Some(999_998));
}

/// Takes its time for refunds, and refuses everything else.
#[derive(Clone, Default)]
struct SlowRefunds {
    refund: Arc<Notify>,
    seen: Arc<AtomicUsize>,
}

#[tonic::async_trait]
impl RateLimitService for SlowRefunds {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        let is_refund = request.into_inner().descriptors[0].is_negative_hits;
        if is_refund {
            self.seen.fetch_add(1, Relaxed);
            self.refund.notified().await;
        }
        let code = if is_refund { Code::Ok } else { Code::OverLimit };
        let duration_until_reset = Some(prost_types::Duration { seconds: 100, nanos: 0 });
        let status = DescriptorStatus { code: code.into(), duration_until_reset, ..DescriptorStatus::default() };
        let statuses = vec![status];
        Ok(Response::new(RateLimitResponse { overall_code: code.into(), statuses, ..RateLimitResponse::default() }))
    }
}

/// A refusal that came between a refund and its answer may be from before it.
#[tokio::test]
async fn a_refusal_does_not_outlive_a_refund() {
    let (service, listener) = (SlowRefunds::default(), TcpListener::bind("127.0.0.1:0").await.unwrap());
    let url = format!("http://{}", listener.local_addr().unwrap());
    let server = tonic::transport::Server::builder().add_service(RateLimitServiceServer::new(service.clone()));
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    let limiter = Client::builder(url).domain("d").deadline(DEADLINE).connect_lazy().unwrap();
    let check = async || limiter.check([few("alice")]).await.by();
    let refunding = limiter.clone();
    let refund = tokio::spawn(async move { refunding.check([few("alice").give_back()]).await });
    until_async("the refund to be on its way", async || (service.seen.load(Relaxed) == 1).then_some(())).await;
    assert_eq!((check().await, check().await), (By::Server, By::DenyCache));
    service.refund.notify_one();
    assert!(refund.await.unwrap().allowed());
    assert_eq!(check().await, By::Server);
}

/// Whatever happens to the service, every caller has an answer by the deadline.
#[tokio::test]
async fn there_is_always_an_answer_in_time() {
    const WITHIN: Duration = Duration::from_millis(50);
    for coalesce in [true, false] {
        let server = start();
        let proxy = Proxy::start(server.grpc.port());
        let limiter = Client::builder(format!("http://{}", proxy.address)).domain("d").deadline(WITHIN);
        let limiter = limiter.coalesce(coalesce).connect_lazy().unwrap();
        let well = async || {
            let verdict = limiter.check([descriptor! { "many" => "x" }]).await;
            (verdict.by() == By::Server).then_some(())
        };
        let faults = [
            Fault::Cut,
            Fault::Swallow,
            Fault::Delay(Duration::from_millis(200)),
            Fault::Say(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
            Fault::Say(b"\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"),
        ];
        for fault in faults {
            until_async("the service to be asked", well).await;
            proxy.set(fault);
            let began = Instant::now();
            let mut slowest = Duration::ZERO;
            let mut failures = 0;
            while began.elapsed() < Duration::from_millis(600) {
                let asked = Instant::now();
                let verdict = limiter.check([descriptor! { "many" => "x" }]).await;
                slowest = slowest.max(asked.elapsed());
                assert!(verdict.allowed());
                failures += usize::from(verdict.by() == By::Fallback);
                assert_eq!(verdict.by() == By::Fallback, verdict.failure().is_some());
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            // Tests beside this one have the processors too.
            assert!(slowest < WITHIN + Duration::from_millis(100), "{fault:?}: {slowest:?}");
            // The breaker is why there are many more than the deadline alone would allow.
            assert!(failures > 40, "{fault:?}, coalesce {coalesce}: {failures}");
            proxy.set(Fault::None);
        }
    }
}

#[tokio::test]
async fn what_an_outage_means_is_the_callers_choice() {
    let nobody = "http://127.0.0.1:1";
    let deny = Client::builder(nobody).domain("d").on_error(OnError::Deny).connect_lazy().unwrap();
    let refused = deny.check([few("alice")]).await;
    assert_eq!((refused.allowed(), refused.by(), refused.statuses().len()), (false, By::Fallback, 0));
    let failure = deny.check([few("alice")]).strict().await.unwrap_err();
    assert!(failure.to_string().contains("refused"), "{failure}");
    // After some of these nobody is asked any more.
    until_async("the breaker to open", async || {
        let failure = deny.check([few("alice")]).strict().await.unwrap_err();
        (failure == Failure::Unreachable).then_some(())
    })
    .await;
    assert!(Client::builder("no address").connect_lazy().is_err());
    assert!(Client::builder(nobody).bearer_token("a\nb").connect_lazy().is_err());
}

/// A service that says what is wrong with a check is well: nobody else has to go without it.
#[tokio::test]
async fn a_check_that_cannot_be_is_no_outage() {
    let server = start();
    for coalesce in [true, false] {
        let limiter = client(&server).coalesce(coalesce).connect_lazy().unwrap();
        for _ in 0..100 {
            let failure = limiter.check((0..200).map(|_| few("alice"))).strict().await.unwrap_err();
            assert!(matches!(failure, Failure::Service { code: tonic::Code::InvalidArgument, .. }), "{failure}");
        }
        assert!(limiter.check([few("alice").hits(0)]).strict().await.is_ok(), "coalesce {coalesce}");
    }
}

/// An outage is one line in the gateway's log, and its end another.
#[tokio::test]
async fn an_outage_is_logged_when_it_begins_and_when_it_ends() {
    let server = start();
    let proxy = Proxy::start(server.grpc.port());
    let log = Arc::new(Mutex::new(Vec::new()));
    let writer = Arc::clone(&log);
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || Log(Arc::clone(&writer)));
    // For the whole process: one of a thread misses events whose place in the code another thread comes to first.
    tracing::subscriber::set_global_default(subscriber.with_env_filter("sluicegate_client").finish()).unwrap();
    let limiter = Client::builder(format!("http://{}", proxy.address)).domain("d").connect_lazy().unwrap();
    for _ in 0..2 {
        proxy.set(Fault::Cut);
        until_async("the breaker to open", async || {
            let failure = limiter.check([few("alice").hits(0)]).strict().await.err()?;
            (failure == Failure::Unreachable).then_some(())
        })
        .await;
        proxy.set(Fault::None);
        until_async("the service to be asked again", async || {
            limiter.check([few("alice").hits(0)]).strict().await.ok()
        })
        .await;
    }
    let log = String::from_utf8(log.lock().unwrap().clone()).unwrap();
    let address = proxy.address.to_string();
    let lines: Vec<_> = log.lines().filter(|line| line.contains(&address)).collect();
    assert_eq!(lines.len(), 4, "{log}");
    for pair in lines.chunks(2) {
        assert!(pair[0].contains("WARN") && pair[0].contains("it is not asked for a while"), "{log}");
        assert!(pair[1].contains("INFO") && pair[1].contains("answers again"), "{log}");
    }
}

/// What a subscriber writes.
struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Instances that come and go under load: no caller notices more than a fallback or two.
#[tokio::test]
async fn three_instances_are_restarted_one_after_the_other() {
    let folder = rules(&[("d.yaml", RULES)]);
    let mut servers: Vec<_> = (0..3).map(|_| Some(Server::start(folder.path(), "memory"))).collect();
    let addresses: Vec<_> = servers.iter().flatten().map(|server| server.grpc).collect();
    let limiter =
        addresses[1..].iter().fold(Client::builder(format!("http://{}", addresses[0])), |builder, address| {
            builder.endpoint(format!("http://{address}"))
        });
    let limiter = limiter.domain("d").deadline(DEADLINE).connect_lazy().unwrap();
    let failures = Arc::new(AtomicUsize::new(0));
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let mut load = JoinSet::new();
    for task in 0..20 {
        let (limiter, failures, stopped) = (limiter.clone(), Arc::clone(&failures), stopped.clone());
        load.spawn(async move {
            let mut count = 0;
            while !*stopped.borrow() {
                let user = format!("user{}", (task * 7 + count) % 100);
                let verdict = limiter.check([descriptor! { "many" => user }]).await;
                failures.fetch_add(usize::from(verdict.failure().is_some()), Relaxed);
                count += 1;
            }
            count
        });
    }
    for (place, address) in addresses.iter().enumerate() {
        let server = servers[place].take().unwrap();
        server.signal("TERM");
        assert!(server.wait().await.success());
        let again = Server::builder_at(*address).rules(folder.path()).start();
        let seen = || again.metric("ratelimit_service_total_requests{grpc_method=\"ShouldRateLimit\"}");
        until_async("the new instance to be asked", async || (seen() > 0.0).then_some(())).await;
        servers[place] = Some(again);
    }
    stop.send_replace(true);
    let checks: usize = load.join_all().await.into_iter().sum();
    assert!(checks > 1_000, "{checks}");
    // Those that were under way when a connection closed.
    assert!(failures.load(Relaxed) <= 60, "{} of {checks}", failures.load(Relaxed));
}

/// Connections that are asked to go take nobody's check with them.
#[tokio::test]
async fn a_connection_that_is_old_costs_no_check() {
    let folder = rules(&[("d.yaml", RULES)]);
    let server = Server::builder().rules(folder.path()).set("grpc.max_connection_age", "300ms").start();
    let limiter = client(&server).connect_lazy().unwrap();
    let mut load = JoinSet::new();
    let began = Instant::now();
    for task in 0..50 {
        let limiter = limiter.clone();
        load.spawn(async move {
            let mut checks = 0_u64;
            while began.elapsed() < Duration::from_secs(2) {
                let user = format!("user{task}");
                limiter.check([descriptor! { "many" => user }]).strict().await.unwrap();
                checks += 1;
            }
            checks
        });
    }
    let checks: u64 = load.join_all().await.into_iter().sum();
    let asked = server.metric("ratelimit_service_total_requests{grpc_method=\"ShouldRateLimit\"}");
    assert!(checks > 1_000 && asked == checks as f64, "each once: {asked} of {checks}");
}

/// The published placement decides who is asked; without the first the others share its users, and keep their own.
#[tokio::test]
async fn checks_go_where_the_placement_says() {
    let folder = rules(&[("d.yaml", RULES)]);
    let mut servers: Vec<_> = (0..3).map(|_| Some(Server::start(folder.path(), "memory"))).collect();
    let addresses: Vec<_> = servers.iter().flatten().map(|server| server.grpc.to_string()).collect();
    let limiter = |routing: Routing| {
        let builder =
            addresses[1..].iter().fold(Client::builder(format!("http://{}", addresses[0])), |builder, name| {
                builder.endpoint(format!("http://{name}"))
            });
        builder.domain("d").deadline(DEADLINE).routing(routing).connect_lazy().unwrap()
    };
    let ring = sluicegate_common::Ring::new(addresses.iter().map(|name| (name.as_str(), 1)));
    let asked = |server: &Option<Server>| {
        let series = "ratelimit_service_total_requests{grpc_method=\"ShouldRateLimit\"}";
        server.as_ref().map_or(0.0, |server| server.metric(series))
    };
    let by_user = limiter(Routing::ByEntries(vec!["many".into()]));
    let mut expected = [0.0; 3];
    for user in 0..60 {
        let user = format!("user{user}");
        expected[ring.node_of(format!("d|many={user}").as_bytes()).unwrap()] += 1.0;
        let verdict = by_user.check([descriptor! { "path" => "/", "many" => &*user }]).strict().await.unwrap();
        assert!(verdict.allowed());
    }
    assert_eq!(servers.iter().map(asked).collect::<Vec<_>>(), expected);
    drop(servers[0].take());
    // A check may be on its way when the connection breaks: that one is not asked twice.
    let on_first = (0..).map(|user| format!("user{user}"));
    let mut on_first = on_first.filter(|user| ring.node_of(format!("d|many={user}").as_bytes()) == Some(0));
    let user = on_first.next().unwrap();
    until_async("somebody else to be asked", async || {
        let verdict = by_user.check([descriptor! { "many" => &*user }]).await;
        (verdict.by() == By::Server).then_some(())
    })
    .await;
    expected[ring.node_among(format!("d|many={user}").as_bytes(), |place| place != 0).unwrap()] += 1.0;
    for user in 0..60 {
        let user = format!("user{user}");
        let place = ring.node_among(format!("d|many={user}").as_bytes(), |place| place != 0).unwrap();
        expected[place] += 1.0;
        by_user.check([descriptor! { "many" => &*user }]).strict().await.unwrap();
    }
    assert_eq!(servers[1..].iter().map(asked).collect::<Vec<_>>(), expected[1..]);
    let in_turn = limiter(Routing::RoundRobin);
    for _ in 0..40 {
        in_turn.check([descriptor! { "many" => "x" }]).strict().await.unwrap();
    }
    let grown: Vec<_> = servers[1..].iter().map(asked).zip(&expected[1..]).map(|(now, before)| now - before).collect();
    assert!(grown.iter().all(|grown| *grown >= 10.0), "{grown:?}");
}

/// A name with one address more: it is found, and its instance asked.
#[tokio::test]
async fn names_are_looked_up_again() {
    let server = start();
    let port = server.grpc.port();
    let limiter = Client::builder(format!("http://localhost:{port}")).domain("d").deadline(DEADLINE);
    let limiter = limiter.resolve_every(Duration::from_millis(20)).connect_lazy().unwrap();
    until_async("the name's addresses", async || {
        let known: BTreeSet<_> = limiter.endpoints().iter().map(ToString::to_string).collect();
        known.contains(&format!("127.0.0.1:{port}")).then_some(())
    })
    .await;
    assert!(limiter.check([few("alice")]).strict().await.unwrap().allowed());
}

/// Checks that are given up leave nothing behind, neither here nor there.
#[tokio::test]
async fn a_check_that_is_given_up_leaves_nothing() {
    let server = start();
    let limiter = client(&server).connect_lazy().unwrap();
    limiter.check([few("x")]).await;
    drop(limiter.check([few("never asked")]));
    for _ in 0..10_000 {
        let check = limiter.check([descriptor! { "many" => "x" }]);
        tokio::select! {
            biased;
            _ = check => {}
            () = std::future::ready(()) => {}
        }
    }
    let verdicts: Vec<Verdict> = vec![limiter.check([few("never asked")]).hits(3).await];
    assert!(verdicts[0].allowed());
    let descriptors = server.descriptors();
    drop(limiter);
    until_async("the connection to end", async || (server.descriptors() < descriptors).then_some(())).await;
}
