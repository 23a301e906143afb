//! [`Endpoint`]: one instance of the service, with its connections and its circuit breaker.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use prost::Message;
use sluicegate_deadline::within;
use sluicegate_proto::envoy::service::ratelimit::v3::RateLimitResponse;
use sluicegate_wire::Writer;
use tokio::time::Instant;
use tonic::{Code, Status, client::Grpc, codegen::http::uri::PathAndQuery, metadata::MetadataMap, transport::Channel};

use crate::{
    breaker::Breaker,
    check_request::CheckRequest,
    raw::Raw,
    stream_connection::{CheckResult, StreamConnection, StreamError},
    telemetry,
    verdict::{Failure, Verdict, full_message},
};

const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

/// Response metadata: lifetimes of the grants in microseconds, starting when the call was sent. One per descriptor,
/// separated by commas, empty for descriptors without a grant.
const GRANT_TTLS: &str = "sluicegate-grant-ttl-us";

/// Response metadata: present if the request was denied because of overload.
const SHED: &str = "sluicegate-shed";

/// Request metadata: feedback about grants and slots.
const FEEDBACK: &str = "sluicegate-feedback";

/// One instance of the service.
pub(crate) struct Endpoint {
    /// Address (`host:port`), from which routing computes which checks the endpoint receives.
    pub(crate) name: Arc<str>,
    channel: Channel,
    headers: MetadataMap,
    stream: Option<StreamConnection>,
    pub(crate) breaker: Breaker,
    in_flight: AtomicUsize,
}

/// Start and deadline of a check. The deadline is a time of tokio's clock; the start is relative to the client's start.
pub(crate) struct CallTimes {
    pub(crate) client_started_at: Instant,
    pub(crate) started: Duration,
    pub(crate) deadline: Instant,
    pub(crate) timeout: Duration,
}

impl CallTimes {
    pub(crate) fn now(&self) -> Duration {
        self.client_started_at.elapsed()
    }
}

impl Endpoint {
    pub(crate) fn new(name: Arc<str>, channel: Channel, headers: MetadataMap, batching: bool) -> Self {
        let stream = if batching { Some(StreamConnection::start(channel.clone(), headers.clone())) } else { None };
        Self { name, channel, headers, stream, breaker: Breaker::default(), in_flight: AtomicUsize::new(0) }
    }

    /// Returns the number of checks in progress.
    pub(crate) fn load(&self) -> usize {
        self.in_flight.load(Relaxed)
    }

    #[cfg(test)]
    pub(crate) fn add_load(&self, checks: usize) {
        self.in_flight.fetch_add(checks, Relaxed);
    }

    /// Sends a check and records in the breaker whether the endpoint answered.
    pub(crate) async fn check(&self, request: &CheckRequest<'_>, times: &CallTimes) -> CheckResult {
        let _in_flight = InFlightGuard::new(&self.in_flight);
        let remaining = times.deadline.saturating_duration_since(Instant::now());
        let result = within(remaining, self.send(request)).await;
        let result = result.unwrap_or_else(|_| Err(StreamError::MaybeExecuted(Failure::Timeout(times.timeout))));
        match &result {
            Ok(_) | Err(StreamError::Rejected(_)) => {
                if self.breaker.record_success() {
                    telemetry::log_breaker_change(&self.name, false);
                }
            }
            // These are no failures of the endpoint.
            Err(StreamError::StreamEnded | StreamError::NotExecuted(Failure::Overloaded)) => {}
            Err(StreamError::NotExecuted(_) | StreamError::MaybeExecuted(_) | StreamError::Unsupported) => {
                if self.breaker.record_failure(times.now()) {
                    telemetry::log_breaker_change(&self.name, true);
                }
            }
        }
        result
    }

    async fn send(&self, request: &CheckRequest<'_>) -> CheckResult {
        if let Some(stream) = &self.stream
            && !stream.is_unsupported()
        {
            match stream.check(request).await {
                Err(StreamError::Unsupported) => {}
                result => return result,
            }
        }
        Box::pin(self.unary(request)).await
    }

    /// Returns the channel and a request with the headers of every call.
    pub(crate) fn call<T>(&self, message: T) -> (Channel, tonic::Request<T>) {
        let mut request = tonic::Request::new(message);
        *request.metadata_mut() = self.headers.clone();
        (self.channel.clone(), request)
    }

    /// Sends a check as a unary call of Envoy's protocol.
    async fn unary(&self, check: &CheckRequest<'_>) -> CheckResult {
        let mut message = Vec::with_capacity(128);
        check.write(&mut Writer(&mut message));
        let (channel, mut request) = self.call(message);
        if let Some(traceparent) = check.traceparent.as_ref().and_then(|trace| trace.parse().ok()) {
            request.metadata_mut().insert("traceparent", traceparent);
        }
        if let Some(feedback) = check.feedback_metadata().and_then(|feedback| feedback.parse().ok()) {
            request.metadata_mut().insert(FEEDBACK, feedback);
        }
        let mut grpc = Grpc::new(channel);
        grpc.ready().await.map_err(|error| classify_status(&Status::from_error(error.into())))?;
        let path = PathAndQuery::from_static(SHOULD_RATE_LIMIT);
        let response = grpc.unary(request, path, Raw).await.map_err(|status| classify_status(&status))?;
        let (metadata, message, _): (_, Bytes, _) = response.into_parts();
        let grant_ttls = metadata.get(GRANT_TTLS).and_then(|ttls| ttls.to_str().ok());
        match RateLimitResponse::decode(message) {
            Ok(response) => Ok(Box::new(Verdict::from_envoy(response, grant_ttls, metadata.contains_key(SHED)))),
            Err(error) => {
                Err(StreamError::MaybeExecuted(Failure::Connection(format!("invalid RateLimitResponse: {error}"))))
            }
        }
    }
}

/// Converts a gRPC status to an error that contains whether the check may have been executed.
fn classify_status(status: &Status) -> StreamError {
    if is_connect_error(status) {
        return StreamError::NotExecuted(Failure::Connection(full_message(status)));
    }
    // A status that the service sent has no source, a status made by the transport has one.
    if std::error::Error::source(status).is_some() {
        return StreamError::MaybeExecuted(Failure::Connection(full_message(status)));
    }
    let failure = Failure::Service { code: status.code(), message: status.message().to_owned() };
    match status.code() {
        Code::InvalidArgument | Code::ResourceExhausted | Code::PermissionDenied | Code::Unauthenticated => {
            StreamError::Rejected(failure)
        }
        _ => StreamError::MaybeExecuted(failure),
    }
}

fn is_connect_error(status: &Status) -> bool {
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        if error.is::<tonic::ConnectError>() {
            return true;
        }
        cause = error.source();
    }
    false
}

/// Guard that counts a check as in progress until the guard is dropped, also if the check is cancelled.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_is_in_flight_until_it_is_dropped() {
        let count = AtomicUsize::new(0);
        let guards = [InFlightGuard::new(&count), InFlightGuard::new(&count)];
        assert_eq!(count.load(Relaxed), 2);
        drop(guards);
        assert_eq!(count.load(Relaxed), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_of_a_call_is_relative_to_the_start_of_the_client() {
        let start = Instant::now();
        let times =
            CallTimes { client_started_at: start, started: Duration::ZERO, deadline: start, timeout: Duration::ZERO };
        tokio::time::advance(Duration::from_secs(3)).await;
        assert_eq!(times.now(), Duration::from_secs(3));
    }
}
