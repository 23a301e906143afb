//! Checks on a stream, against a service that answers, stays silent, or ends the stream.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use sluicegate_client::{Client, DecidedBy, Failure, OnError, descriptor};
use sluicegate_proto::sluicegate::v1::{
    self,
    decision_service_server::{DecisionService, DecisionServiceServer},
};
use tokio_stream::{StreamExt, wrappers::TcpListenerStream};
use tonic::{Request, Response, Status};

/// Answers with the length of the user's name as `remaining`, so that each check recognises its own response. Does not
/// answer the user `silent`, and ends the stream with an error at the user `broken`.
#[derive(Clone, Default)]
struct Service {
    checks: Arc<AtomicUsize>,
    samples: Arc<AtomicUsize>,
}

/// Time after which a test fails instead of waiting any longer.
const DEADLINE: Duration = Duration::from_secs(20);

type Responses = Pin<Box<dyn tokio_stream::Stream<Item = Result<v1::ResponseFrame, Status>> + Send>>;

#[tonic::async_trait]
impl DecisionService for Service {
    type StreamStream = Responses;

    async fn stream(&self, frames: Request<tonic::Streaming<v1::CheckFrame>>) -> Result<Response<Responses>, Status> {
        let service = self.clone();
        let answers = frames.into_inner().map(move |frame| {
            let mut responses = Vec::new();
            for check in frame?.checks {
                service.checks.fetch_add(1, Relaxed);
                let samples = check.feedback.iter().filter(|feedback| feedback.sample.is_some()).count();
                service.samples.fetch_add(samples, Relaxed);
                let user = check.request.unwrap_or_default().descriptors[0].entries[0].value.clone();
                let status = v1::Status { allowed: true, remaining: user.len() as u64, ..v1::Status::default() };
                let verdict = v1::Verdict { allowed: true, statuses: vec![status], ..v1::Verdict::default() };
                let outcome = Some(v1::check_response::Outcome::Verdict(verdict));
                match user.as_str() {
                    "silent" => {}
                    "broken" => return Err(Status::internal("broken")),
                    _ => responses.push(v1::CheckResponse { id: check.id, outcome }),
                }
            }
            // Responses may arrive in any order.
            responses.reverse();
            Ok(v1::ResponseFrame { responses })
        });
        Ok(Response::new(Box::pin(answers)))
    }

    async fn batch(&self, _: Request<v1::CheckFrame>) -> Result<Response<v1::ResponseFrame>, Status> {
        Err(Status::unimplemented("batch"))
    }
}

/// Starts the service. The client requests grants, which this service never grants.
async fn start(timeout: Duration) -> (Service, Client) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let service = Service::default();
    let server = tonic::transport::Server::builder().add_service(DecisionServiceServer::new(service.clone()));
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    let client = Client::builder(url).domain("d").timeout(timeout).on_error(OnError::Deny).request_grants(true);
    (service, client.connect_lazy().unwrap())
}

#[tokio::test]
async fn each_check_receives_its_own_response() {
    let (service, client) = start(Duration::from_secs(10)).await;
    // Each check after the first has to wake the sending task.
    for round in 1..=3 {
        let mut tasks = tokio::task::JoinSet::new();
        for size in 1..=100 {
            let client = client.clone();
            tasks.spawn(async move {
                let verdict = client.check([descriptor! { "user" => "u".repeat(size) }]).await;
                assert_eq!(verdict.decided_by(), DecidedBy::Server, "{:?}", verdict.failure());
                assert_eq!(verdict.statuses()[0].remaining, size as u64);
            });
        }
        tasks.join_all().await;
        assert_eq!(service.checks.load(Relaxed), round * 100);
    }
}

#[tokio::test]
async fn a_check_without_a_response_times_out_alone() {
    let timeout = Duration::from_millis(500);
    let (_, client) = start(timeout).await;
    assert!(client.check([descriptor! { "user" => "alice" }]).await.allowed());
    let check = |user| client.check([descriptor! { "user" => user }]).into_future();
    let both = async { tokio::join!(check("silent"), check("alice")) };
    let (silent, alice) = tokio::time::timeout(DEADLINE, both).await.unwrap();
    assert_eq!(silent.failure(), Some(&Failure::Timeout(timeout)));
    assert!(!silent.allowed() && alice.decided_by() == DecidedBy::Server);
    let shorter = Duration::from_millis(50);
    let short = client.check([descriptor! { "user" => "silent" }]).timeout(shorter);
    let short = tokio::time::timeout(DEADLINE, short.into_future()).await.unwrap();
    assert_eq!(short.failure(), Some(&Failure::Timeout(shorter)));
}

#[tokio::test]
async fn a_broken_stream_fails_its_checks_and_the_next_check_opens_another() {
    let (_, client) = start(Duration::from_secs(10)).await;
    assert!(client.check([descriptor! { "user" => "alice" }]).await.allowed());
    let check = |user| client.check([descriptor! { "user" => user }]).into_future();
    let (silent, broken) = tokio::join!(check("silent"), check("broken"));
    for verdict in [silent, broken] {
        assert!(matches!(verdict.failure(), Some(Failure::Connection(_) | Failure::Service { .. })), "{verdict:?}");
    }
    assert_eq!(client.check([descriptor! { "user" => "bob" }]).await.decided_by(), DecidedBy::Server);
}

/// The sample of a released slot is feedback, and so is the demand for grants.
#[tokio::test]
async fn a_client_that_requests_grants_reports_the_sample_of_a_slot() {
    let (service, client) = start(Duration::from_secs(10)).await;
    let permit = client.acquire([descriptor! { "user" => "alice" }]).await.unwrap();
    assert_eq!(service.samples.load(Relaxed), 0);
    drop(permit);
    let sampled = async {
        while service.samples.load(Relaxed) == 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(DEADLINE, sampled).await.unwrap();
}
