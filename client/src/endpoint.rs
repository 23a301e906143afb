//! One instance of the service: how it is asked, and whether it is worth asking.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use prost::Message;
use sluicegate_common::wire::Writer;
use sluicegate_proto::envoy::service::ratelimit::v3::RateLimitResponse;
use tokio::time::{Instant, timeout_at};
use tonic::{Code, Status, client::Grpc, codegen::http::uri::PathAndQuery, metadata::MetadataMap, transport::Channel};

use crate::{
    breaker::Breaker,
    check_request::CheckRequest,
    raw::Raw,
    stream_connection::{StreamConnection, StreamError},
    telemetry,
    verdict::{Failure, Verdict, text},
};

const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

/// In the metadata of an answer: the lives of its quotas in microseconds, from the moment the call was sent; one for each
/// descriptor, with commas between, and nothing where there is none.
const GRANT_LIVES: &str = "sluicegate-grant-life-us";

/// In the metadata of an answer: it refuses for overload.
const SHED: &str = "sluicegate-shed";

/// In the metadata of a question: what is said of grants.
const HOLD: &str = "sluicegate-feedback";

pub(crate) struct Endpoint {
    /// Its address: the name by which checks are placed.
    pub(crate) name: Arc<str>,
    channel: Channel,
    headers: MetadataMap,
    lane: Option<StreamConnection>,
    pub(crate) breaker: Breaker,
    in_flight: AtomicUsize,
}

/// When something has to be over: on tokio's clock, and on the client's own.
pub(crate) struct CallTimes {
    pub(crate) began: Instant,
    pub(crate) asked: Duration,
    pub(crate) deadline: Instant,
    pub(crate) allowed: Duration,
}

impl CallTimes {
    pub(crate) fn now(&self) -> Duration {
        self.began.elapsed()
    }
}

impl Endpoint {
    pub(crate) fn new(name: Arc<str>, channel: Channel, headers: MetadataMap, coalesces: bool) -> Self {
        let lane = coalesces.then(|| StreamConnection::start(channel.clone(), headers.clone()));
        Self { name, channel, headers, lane, breaker: Breaker::default(), in_flight: AtomicUsize::new(0) }
    }

    /// Checks under way.
    pub(crate) fn load(&self) -> usize {
        self.in_flight.load(Relaxed)
    }

    #[cfg(test)]
    pub(crate) fn burden(&self, checks: usize) {
        self.in_flight.fetch_add(checks, Relaxed);
    }

    /// Asks, and learns from the outcome whether to go on asking.
    pub(crate) async fn ask(&self, ask: &CheckRequest<'_>, clock: &CallTimes) -> Result<Verdict, StreamError> {
        let _under_way = InFlightGuard::new(&self.in_flight);
        let answer = timeout_at(clock.deadline, self.send(ask)).await;
        let answer = answer.unwrap_or_else(|_| Err(StreamError::Perhaps(Failure::Deadline(clock.allowed))));
        match &answer {
            Ok(_) | Err(StreamError::Refused(_)) => {
                if self.breaker.succeeded() {
                    telemetry::breaker(&self.name, false);
                }
            }
            // No fault of the service's.
            Err(StreamError::Ended | StreamError::NotRun(Failure::Overloaded)) => {}
            Err(StreamError::NotRun(_) | StreamError::Perhaps(_) | StreamError::NoStream) => {
                if self.breaker.failed(clock.now()) {
                    telemetry::breaker(&self.name, true);
                }
            }
        }
        answer
    }

    async fn send(&self, ask: &CheckRequest<'_>) -> Result<Verdict, StreamError> {
        if let Some(lane) = self.lane.as_ref().filter(|lane| !lane.is_without()) {
            match lane.ask(ask).await {
                Err(StreamError::NoStream) => {}
                answer => return answer,
            }
        }
        Box::pin(self.unary(ask)).await
    }

    /// A call of its own, with what belongs to every call.
    pub(crate) fn call<T>(&self, message: T) -> (Channel, tonic::Request<T>) {
        let mut request = tonic::Request::new(message);
        *request.metadata_mut() = self.headers.clone();
        (self.channel.clone(), request)
    }

    async fn unary(&self, ask: &CheckRequest<'_>) -> Result<Verdict, StreamError> {
        let mut message = Vec::with_capacity(128);
        ask.write(&mut Writer(&mut message));
        let (channel, mut request) = self.call(message);
        if let Some(traceparent) = ask.traceparent.as_ref().and_then(|trace| trace.parse().ok()) {
            request.metadata_mut().insert("traceparent", traceparent);
        }
        if let Some(holds) = ask.holds_text().and_then(|holds| holds.parse().ok()) {
            request.metadata_mut().insert(HOLD, holds);
        }
        let mut grpc = Grpc::new(channel);
        grpc.ready().await.map_err(|error| lost(&Status::from_error(error.into())))?;
        let path = PathAndQuery::from_static(SHOULD_RATE_LIMIT);
        let response = grpc.unary(request, path, Raw).await.map_err(|status| lost(&status))?;
        let (metadata, message, _): (_, Bytes, _) = response.into_parts();
        let lives = metadata.get(GRANT_LIVES).and_then(|lives| lives.to_str().ok());
        match RateLimitResponse::decode(message) {
            Ok(response) => Ok(Verdict::from_envoy(response, lives, metadata.contains_key(SHED))),
            Err(error) => {
                Err(StreamError::Perhaps(Failure::Connection(format!("this is no RateLimitResponse: {error}"))))
            }
        }
    }
}

/// What a status says of the check: whether it ran, and whether the service is to blame.
fn lost(status: &Status) -> StreamError {
    if has_not_connected(status) {
        return StreamError::NotRun(Failure::Connection(text(status)));
    }
    // Statuses of the service itself have no source; those of the transport have.
    if std::error::Error::source(status).is_some() {
        return StreamError::Perhaps(Failure::Connection(text(status)));
    }
    let failure = Failure::Service { code: status.code(), message: status.message().to_owned() };
    match status.code() {
        Code::InvalidArgument | Code::ResourceExhausted | Code::PermissionDenied | Code::Unauthenticated => {
            StreamError::Refused(failure)
        }
        _ => StreamError::Perhaps(failure),
    }
}

fn has_not_connected(status: &Status) -> bool {
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        if error.is::<tonic::ConnectError>() {
            return true;
        }
        cause = error.source();
    }
    false
}

/// Counts a check for as long as it lives, however it ends.
struct InFlightGuard<'e>(&'e AtomicUsize);

impl<'e> InFlightGuard<'e> {
    fn new(count: &'e AtomicUsize) -> Self {
        count.fetch_add(1, Relaxed);
        Self(count)
    }
}

impl Drop for InFlightGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}
