//! `sluicegate.v1`: frames of several checks, on a stream and in one call, on both stores.

use std::collections::BTreeMap;

use sluicegate_proto::{
    envoy::service::ratelimit::v3::RateLimitRequest,
    sluicegate::v1::{
        Check, CheckFrame, CheckResponse, Decider, Verdict, check_response::Outcome,
        decision_service_client::DecisionServiceClient,
    },
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming, transport::Channel};

use crate::support::{DEADLINE, RedisServer, Server, request_for, ring, rules, wait_for_async};

const RULES: &str = "
domain: d
descriptors:
- key: few
  rate_limit: {unit: year, requests_per_unit: 3, name: few}
- key: soft
  rate_limit: {unit: year, requests_per_unit: 1, soft: 100%}
- key: queue
  rate_limit: {unit: second, requests_per_unit: 10, algorithm: leaky_bucket, burst: 1, queue: 5}
- key: eager
  rate_limit: {unit: day, requests_per_unit: 1, algorithm: gcra, count_denied: true}
- key: open
  rate_limit: {unit: year, requests_per_unit: 3, on_error: allow}
";

async fn connect(server: &Server) -> DecisionServiceClient<Channel> {
    DecisionServiceClient::connect(format!("http://{}", server.grpc)).await.unwrap()
}

fn check(id: u64, key: &str, value: &str) -> Check {
    let request = request_for("d", &[(key, value)]).into();
    Check { id, request: Some(request), ..Check::default() }
}

/// The client side of a stream.
struct Caller {
    frames: mpsc::Sender<CheckFrame>,
    answers: Streaming<sluicegate_proto::sluicegate::v1::ResponseFrame>,
}

impl Caller {
    async fn start(server: &Server) -> Self {
        let (frames, receiver) = mpsc::channel(16);
        let answers = connect(server).await.stream(ReceiverStream::new(receiver)).await.unwrap().into_inner();
        Self { frames, answers }
    }

    async fn send(&self, checks: impl IntoIterator<Item = Check>) {
        self.frames.send(CheckFrame { checks: checks.into_iter().collect() }).await.unwrap();
    }

    /// Receives `count` responses, in the order of their arrival.
    async fn answers(&mut self, count: usize) -> Vec<CheckResponse> {
        let mut answers = Vec::new();
        while answers.len() < count {
            let frame =
                tokio::time::timeout(DEADLINE, self.answers.message()).await.expect("no response before the deadline");
            answers.extend(frame.unwrap().expect("the stream has ended").responses);
        }
        assert_eq!(answers.len(), count);
        answers
    }

    /// Waits for the end of the stream and returns its status. Panics if there is another response.
    async fn end(mut self) -> Result<(), Status> {
        let end = tokio::time::timeout(DEADLINE, self.answers.message())
            .await
            .expect("the stream did not end before the deadline");
        end.map(|frame| assert_eq!(frame, None))
    }
}

fn verdict(answer: &CheckResponse) -> &Verdict {
    match &answer.outcome {
        Some(Outcome::Verdict(verdict)) => verdict,
        other => panic!("expected a verdict: {other:?}"),
    }
}

fn by_id(answers: Vec<CheckResponse>) -> BTreeMap<u64, CheckResponse> {
    answers.into_iter().map(|answer| (answer.id, answer)).collect()
}

async fn on_both(case: impl AsyncFn(&str, &Server)) {
    let redis = RedisServer::start();
    let folder = rules(&[("d.yaml", RULES)]);
    for store in ["memory".to_owned(), redis.url()] {
        let server = Server::builder().rules(folder.path()).store(&store).start();
        case(&store, &server).await;
    }
}

#[tokio::test]
async fn every_check_of_a_frame_has_its_own_response() {
    on_both(async |store, server| {
        let mut caller = Caller::start(server).await;
        let frame: Vec<_> = (0..500).map(|id| check(id, "few", &format!("user{}", id % 100))).collect();
        caller.send(frame).await;
        let answers = by_id(caller.answers(500).await);
        assert_eq!(answers.len(), 500, "{store}: every id occurs once");
        for user in 0..100 {
            let of_user: Vec<_> = (0..5).map(|turn| verdict(&answers[&(user + turn * 100)])).collect();
            let allowed = of_user.iter().filter(|verdict| verdict.allowed).count();
            assert_eq!(allowed, 3, "{store}: user {user}");
            let limit = of_user[0].statuses[0].limit.as_ref().unwrap();
            assert_eq!((limit.requests_per_unit, limit.name.as_str()), (3, "few"));
        }
    })
    .await;
}

#[tokio::test]
async fn a_status_contains_fields_that_envoys_status_lacks() {
    on_both(async |store, server| {
        let mut caller = Caller::start(server).await;
        let frame = [
            check(1, "soft", "a"),
            check(2, "soft", "a"),
            check(3, "queue", "a"),
            check(4, "queue", "a"),
            check(5, "eager", "a"),
            check(6, "eager", "a"),
            check(7, "few", "a"),
        ];
        caller.send(frame).await;
        let answers = by_id(caller.answers(7).await);
        let status = |id| &verdict(&answers[&id]).statuses[0];
        assert_eq!((status(1).soft, status(2).soft), (false, true), "{store}");
        let delay = status(4).delay_us;
        assert!(status(3).delay_us == 0 && (1..=100_000).contains(&delay), "{store}: {delay}");
        assert!(status(5).allowed && !status(6).allowed && status(6).denial_counts, "{store}");
        let wait = status(6).retry_after_us.unwrap();
        assert!(wait > 86_000_000_000, "{store}: {wait}");
        assert!(!status(7).denial_counts && status(7).remaining == 2 && status(7).reset_us.unwrap() > 0, "{store}");
        assert_eq!(status(7).decider(), Decider::Store);
    })
    .await;
}

#[tokio::test]
async fn a_verdict_has_headers_if_they_are_enabled() {
    let folder = rules(&[("d.yaml", RULES)]);
    let server = Server::builder().rules(folder.path()).store("memory").set("response.headers", "true").start();
    let mut caller = Caller::start(&server).await;
    caller.send([check(1, "few", "a")]).await;
    let answers = caller.answers(1).await;
    let headers = &verdict(&answers[0]).response_headers_to_add;
    assert!(headers.iter().any(|header| header.name == "RateLimit-Remaining" && header.value == "2"), "{headers:?}");
}

#[tokio::test]
async fn an_error_of_one_check_does_not_affect_the_others() {
    on_both(async |store, server| {
        let mut caller = Caller::start(server).await;
        let no_domain = Check { id: 2, request: Some(RateLimitRequest::default()), ..Check::default() };
        let nothing = Check { id: 3, ..Check::default() };
        let mut many = check(4, "few", "a");
        many.request = many.request.map(|mut request| {
            request.descriptors = vec![request.descriptors[0].clone(); 129];
            request
        });
        caller.send([check(1, "few", "a"), no_domain, nothing, many, check(1, "few", "a")]).await;
        let answers = caller.answers(5).await;
        let mut errors = BTreeMap::new();
        for answer in &answers {
            match &answer.outcome {
                Some(Outcome::Error(error)) => {
                    errors.insert(answer.id, (error.code, error.message.clone()));
                }
                Some(Outcome::Verdict(verdict)) => assert!(answer.id == 1 && verdict.allowed, "{store}: {answer:?}"),
                None => panic!("{answer:?}"),
            }
        }
        let texts: Vec<_> = errors.values().map(|(_, text)| text.as_str()).collect();
        assert_eq!(errors.values().map(|(code, _)| *code).collect::<Vec<_>>(), [3, 3, 3], "{store}: {texts:?}");
        assert!(texts[0].contains("domain must not be empty") && texts[2].contains("129 descriptors"), "{texts:?}");
        // The stream is still open.
        caller.send([check(9, "few", "a")]).await;
        assert_eq!(verdict(&caller.answers(1).await[0]).statuses[0].remaining, 0, "{store}");
    })
    .await;
}

#[tokio::test]
async fn a_batch_is_a_frame_in_one_call() {
    on_both(async |store, server| {
        let mut client = connect(server).await;
        let checks = (0..2_000).map(|id| check(id, "few", &format!("user{}", id % 400))).collect();
        let answers = client.batch(CheckFrame { checks }).await.unwrap().into_inner().responses;
        let allowed = answers.iter().filter(|answer| verdict(answer).allowed).count();
        assert_eq!((answers.len(), allowed), (2_000, 1_200), "{store}");
        let none = client.batch(CheckFrame::default()).await.unwrap().into_inner();
        assert_eq!(none.responses, []);
        let large = CheckFrame { checks: vec![check(1, "few", &"x".repeat(4 << 20))] };
        assert_eq!(client.batch(large).await.unwrap_err().code(), Code::ResourceExhausted);
    })
    .await;
}

/// The checks of a frame are combined into a few calls to Redis.
#[tokio::test]
async fn the_checks_of_a_frame_share_calls_to_redis() {
    let redis = RedisServer::start();
    let folder = rules(&[("d.yaml", RULES)]);
    let server = Server::start(folder.path(), &redis.url());
    let mut caller = Caller::start(&server).await;
    caller.send([check(0, "few", "first")]).await;
    caller.answers(1).await;
    redis.cli(&["config", "resetstat"]);
    caller.send((0..640).map(|id| check(id, "few", &format!("user{id}")))).await;
    caller.answers(640).await;
    let statistics = redis.cli(&["info", "commandstats"]);
    let calls = statistics.split_once("cmdstat_evalsha:calls=").unwrap().1;
    let calls: usize = calls.split(',').next().unwrap().parse().unwrap();
    assert!((10..=12).contains(&calls), "{calls} calls for 640 checks, of which 64 share one call");
}

/// One of two Redis servers is frozen. Only its checks wait; the others of the same frame are answered.
#[tokio::test]
async fn a_slow_check_does_not_delay_others() {
    let (servers, store) = ring(2);
    let folder = rules(&[("d.yaml", RULES)]);
    let server = Server::builder().rules(folder.path()).store(&store).set("redis.timeout", "3s").start();
    let mut caller = Caller::start(&server).await;
    let users = || (0..100).map(|id| check(id, "open", &format!("user{id}")));
    caller.send(users()).await;
    caller.answers(100).await;
    let on_first = servers[0].cli(&["dbsize"]).parse::<usize>().unwrap();
    assert!((20..=80).contains(&on_first), "{on_first}");
    servers[0].freeze();
    let start = std::time::Instant::now();
    caller.send(users()).await;
    for answer in caller.answers(100 - on_first).await {
        let status = &verdict(&answer).statuses[0];
        assert_eq!((status.decider(), status.remaining), (Decider::Store, 1));
    }
    assert!(start.elapsed().as_secs() < 3, "checks waited for the frozen server");
    for answer in caller.answers(on_first).await {
        let status = &verdict(&answer).statuses[0];
        assert!(status.allowed && status.decider() == Decider::Fallback, "{status:?}");
    }
    servers[0].thaw();
}

/// The service stops reading from a caller that does not read responses, so that its memory does not grow.
#[tokio::test]
async fn a_caller_that_does_not_read_is_throttled() {
    let folder = rules(&[("d.yaml", RULES)]);
    let server = Server::start(folder.path(), "memory");
    let mut caller = Caller::start(&server).await;
    caller.send([check(0, "few", "a")]).await;
    caller.answers(1).await;
    let before = server.resident_memory();
    let flood = async {
        for round in 0.. {
            caller.send((0..1_000).map(|id| check(round * 1_000 + id, "few", "a"))).await;
        }
    };
    // The loop ends only by the timeout, because the service stops reading frames.
    assert!(tokio::time::timeout(std::time::Duration::from_secs(3), flood).await.is_err());
    let grown = server.resident_memory().saturating_sub(before);
    assert!(grown < 64 << 20, "memory grew by {grown} bytes");
    // Other callers are served, and so is this one as soon as it reads.
    assert!(server.client().await.check(request_for("d", &[("few", "other")])).await.unwrap().allowed());
    caller.answers(1_000).await;
}

/// While Redis is frozen, checks are started up to a maximum, on a stream and in a batch. All are answered when Redis
/// responds again.
#[tokio::test]
async fn the_number_of_checks_in_flight_is_limited() {
    const MAX_IN_FLIGHT: f64 = 4096.0;
    let redis = RedisServer::start();
    let folder = rules(&[("d.yaml", RULES)]);
    let server = Server::builder().rules(folder.path()).store(&redis.url()).start();
    let started = || server.metric("ratelimit_service_rate_limit_total_hits{domain=\"d\",key1=\"few\"}");
    let mut caller = Caller::start(&server).await;
    caller.send([check(0, "few", "x")]).await;
    caller.answers(1).await;
    assert_eq!(started(), 1.0);
    let checks = || (0..5_000).map(|id| check(id, "few", &format!("user{id}")));
    redis.freeze();
    caller.send(checks().take(2_000)).await;
    caller.send(checks().skip(2_000).take(2_500)).await;
    caller.send(checks().skip(4_500)).await;
    wait_for_async("the maximum", async || (started() >= 1.0 + MAX_IN_FLIGHT).then_some(())).await;
    // No further check is started.
    for _ in 0..20 {
        tokio::task::yield_now().await;
        assert_eq!(started(), 1.0 + MAX_IN_FLIGHT);
    }
    redis.thaw();
    assert_eq!(by_id(caller.answers(5_000).await).len(), 5_000);
    redis.freeze();
    let mut client = connect(&server).await;
    let (before, checks) = (started(), checks().collect());
    let batch = tokio::spawn(async move { client.batch(CheckFrame { checks }).await });
    wait_for_async("the maximum", async || (started() >= before + MAX_IN_FLIGHT).then_some(())).await;
    assert_eq!(started(), before + MAX_IN_FLIGHT);
    redis.thaw();
    assert_eq!(batch.await.unwrap().unwrap().into_inner().responses.len(), 5_000);
}

#[tokio::test]
async fn a_stream_ends_with_the_right_status() {
    let folder = rules(&[("d.yaml", RULES)]);
    let builder = Server::builder().rules(folder.path()).store("memory");
    let server = builder.set("grpc.limits.max_frame_bytes", "1000").start();
    // The caller closes its side: the stream ends without an error.
    let mut caller = Caller::start(&server).await;
    caller.send([check(1, "few", "a")]).await;
    let (closed, _) = mpsc::channel(1);
    drop(std::mem::replace(&mut caller.frames, closed));
    caller.answers(1).await;
    caller.end().await.unwrap();
    // The caller sends a frame that is too large: only its stream ends with an error.
    let caller = Caller::start(&server).await;
    let large = CheckFrame { checks: vec![check(1, "few", &"x".repeat(1_000))] };
    caller.frames.send(large).await.unwrap();
    assert_eq!(caller.end().await.unwrap_err().code(), Code::ResourceExhausted);
    // The service shuts down: earlier checks are answered, and the stream ends without an error.
    let mut caller = Caller::start(&server).await;
    caller.send([check(1, "few", "b")]).await;
    caller.answers(1).await;
    server.signal("TERM");
    caller.end().await.unwrap();
    assert!(server.wait().await.success());
}

/// An open stream does not keep a connection open after its maximum age.
#[tokio::test]
async fn a_stream_ends_with_its_connection() {
    let folder = rules(&[("d.yaml", RULES)]);
    let server = Server::builder().rules(folder.path()).set("grpc.max_connection_age", "1s").start();
    Caller::start(&server).await.end().await.unwrap();
    wait_for_async("the connection to be closed", async || {
        (server.metric("sluicegate_grpc_connections") == 0.0).then_some(())
    })
    .await;
}
