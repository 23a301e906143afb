//! [`Services`]: passes the calls of connections to `ShouldRateLimit`, to the streams of quotas, to the methods of
//! `sluicegate.v1`, or to tonic.
//!
//! Calls that decide do not use tonic's router and codec. All other services (health, reflection, resources) do.

use std::{
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use futures_util::{FutureExt, TryFutureExt};
use http::{HeaderValue, Request, header::CONTENT_TYPE, request};
use sluicegate_proto::{
    FILE_DESCRIPTOR_SET,
    envoy::service::{rate_limit_quota::v3::rate_limit_quota_service_server, ratelimit::v3::rate_limit_service_server},
    sluicegate::v1::{
        decision_service_server,
        resource_service_server::{self, ResourceServiceServer},
    },
};
use tokio::sync::watch;
use tonic::service::Routes;
use tonic_health::{
    pb::health_server,
    server::{HealthReporter, HealthService},
};
use tonic_reflection::server::Builder;
use tower_service::Service;

use super::{
    CallerErrors, QuotaService, ResourceService, ResponseSettings,
    decisions::{MessageDecider, ResponseStream, batch, feedback},
    errors::RequestError,
    grpc::{
        Answer, Input, Limits, Methods, RequestBody, Response, TONIC_MESSAGE_BYTES, TonicBody,
        message::{self, Messages},
    },
};
use crate::{service::Decisions, telemetry::Traces};

/// Path of `ShouldRateLimit`, which does not use tonic: it receives a hundred thousand calls per second.
const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
/// Path of `Stream`, which does not use tonic.
const STREAM: &str = "/sluicegate.v1.DecisionService/Stream";
/// Path of `Batch`, which does not use tonic.
const BATCH: &str = "/sluicegate.v1.DecisionService/Batch";
/// Path of `StreamRateLimitQuotas`, which does not use tonic.
const STREAM_QUOTAS: &str = "/envoy.service.rate_limit_quota.v3.RateLimitQuotaService/StreamRateLimitQuotas";

/// Beginnings of the paths of older versions of `ShouldRateLimit`, which are not served.
const OLD_SERVICES: [&str; 2] =
    ["/envoy.service.ratelimit.v2.RateLimitService/", "/pb.lyft.ratelimit.RateLimitService/"];

/// The headers that tonic reads.
const TONIC_HEADERS: [&str; 5] = ["content-type", "te", "grpc-encoding", "grpc-accept-encoding", "grpc-timeout"];
/// Maximum size of a header for tonic, in bytes.
const MAX_TONIC_HEADER_BYTES: usize = 256;

/// A method that does not use tonic.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Method {
    ShouldRateLimit,
    Stream,
    Batch,
    StreamQuotas,
}

/// The services of one worker.
pub struct Services {
    decider: Arc<MessageDecider>,
    quotas: QuotaService,
    tonic_services: Routes,
}

impl Methods for Services {
    fn call(
        &self,
        request: Request<RequestBody>,
        context: &mut Context<'_>,
        leaving: &watch::Sender<bool>,
        input: &Arc<Input>,
    ) -> Answer {
        let method = match request.uri().path() {
            SHOULD_RATE_LIMIT => Method::ShouldRateLimit,
            STREAM => Method::Stream,
            BATCH => Method::Batch,
            STREAM_QUOTAS => Method::StreamQuotas,
            _ => return self.call_other(request, input),
        };
        if let Err(error) = check_head(&request) {
            return Answer::Now(Response::Error(error));
        }
        match method {
            Method::ShouldRateLimit => self.should_rate_limit(request, context, input),
            Method::Stream => {
                let frames = Messages::new(request.into_body(), Arc::clone(input));
                let stream = ResponseStream::new(Arc::clone(&self.decider), frames, leaving.subscribe());
                Answer::Now(Response::Frames(Box::new(stream)))
            }
            Method::Batch => {
                let frame = batch(Arc::clone(&self.decider), request.into_body(), Arc::clone(input));
                let response = frame.map_ok(|data| Response::Message { data, metadata: None });
                Answer::Later(Box::pin(response.map(into_response)))
            }
            Method::StreamQuotas => {
                let messages = self.quotas.start(request, leaving.subscribe(), Arc::clone(input));
                Answer::Now(Response::Messages(messages))
            }
        }
    }
}

impl Services {
    /// Creates the services.
    #[must_use]
    pub fn new(
        decisions: Decisions,
        limits: Limits,
        response: ResponseSettings,
        traces: Traces,
        quotas: QuotaService,
        tonic_services: Routes,
        errors: Arc<CallerErrors>,
    ) -> Arc<Self> {
        let decider = Arc::new(MessageDecider::new(decisions, limits, response, traces, errors));
        Arc::new(Self { decider, quotas, tonic_services })
    }

    /// Decides one request of Envoy's protocol.
    ///
    /// A call that waits has its future in a box: hundreds of futures wait while Redis decides, and each should still be
    /// in the processor's caches when its reply arrives.
    fn should_rate_limit(
        &self,
        request: Request<RequestBody>,
        context: &mut Context<'_>,
        input: &Arc<Input>,
    ) -> Answer {
        let span = self.decider.span_of(request.headers());
        let feedback = match feedback::read_metadata(request.headers()) {
            Ok(feedback) => feedback,
            Err(error) => return Answer::Now(Response::Error(error)),
        };
        let mut body = request.into_body();
        // The first data is nearly always the whole message.
        let received = match body.poll_data(context) {
            Poll::Ready(Some(Ok(data))) => data,
            Poll::Ready(Some(Err(error))) => return Answer::Now(Response::Error(message::failed_to_read(&error))),
            Poll::Ready(None) | Poll::Pending => Bytes::new(),
        };
        let max = self.decider.limits().max_message_bytes;
        if body.is_complete() {
            body.release(received.len());
        }
        if let Some(memory) = self.decider.memory()
            && body.is_complete()
        {
            let response = message::unframe(&received, max)
                .and_then(|message| self.decider.respond_in(memory, &message, feedback, span));
            return Answer::Now(into_response(response));
        }
        let decider = Arc::clone(&self.decider);
        let input = Arc::clone(input);
        Answer::Later(Box::pin(async move {
            let response = async {
                let received = message::receive(received, &mut body, max, &input).await?;
                decider.respond(&received.message, feedback, span).await
            };
            into_response(response.await)
        }))
    }

    fn call_other(&self, request: Request<RequestBody>, input: &Arc<Input>) -> Answer {
        let path = request.uri().path();
        if let Some(old) = OLD_SERVICES.into_iter().find(|old| path.starts_with(old)) {
            let reason = format!(
                "{} is not served: this service serves envoy.service.ratelimit.v3.RateLimitService; in Envoy set \
                 transport_api_version: V3",
                old.trim_matches('/')
            );
            return Answer::Now(Response::Error(RequestError::unsupported(reason)));
        }
        let mut tonic_services = self.tonic_services.clone();
        let (head, body) = request.into_parts();
        let body = tonic::body::Body::new(TonicBody::new(body, input.message()));
        let request = head_for_tonic(head).map(|()| body);
        Answer::ByTonic(Box::pin(async move {
            match tonic_services.call(request).await {
                Ok(response) => Response::Tonic(Box::new(response)),
                Err(never) => match never {},
            }
        }))
    }
}

/// Returns a request with copies of its path and of the headers that tonic reads. All else, and the frames of the headers,
/// would occupy memory while the call waits.
fn head_for_tonic(head: request::Parts) -> Request<()> {
    let mut read = Request::new(());
    *read.method_mut() = head.method;
    *read.version_mut() = head.version;
    // A path is always valid without its query.
    *read.uri_mut() = head.uri.path().parse().unwrap_or_default();
    for name in TONIC_HEADERS {
        let value = head.headers.get(name).filter(|value| value.len() <= MAX_TONIC_HEADER_BYTES);
        if let Some(Ok(copy)) = value.map(|value| HeaderValue::from_bytes(value.as_bytes())) {
            read.headers_mut().insert(name, copy);
        }
    }
    read
}

/// Checks the method and the content type of a call.
fn check_head(request: &Request<RequestBody>) -> Result<(), RequestError> {
    let is_grpc = request.headers().get(CONTENT_TYPE).is_some_and(|kind| {
        let kind = kind.as_bytes();
        kind == b"application/grpc" || kind == b"application/grpc+proto" || kind.starts_with(b"application/grpc;")
    });
    if !is_grpc || request.method() != http::Method::POST {
        return Err(RequestError::invalid("a gRPC method requires POST with content-type application/grpc"));
    }
    Ok(())
}

fn into_response(result: Result<Response, RequestError>) -> Response {
    result.unwrap_or_else(Response::Error)
}

/// Builds the services that use tonic: health (for the server and for the service by its names), reflection
/// and resources. All workers share them.
pub async fn build_tonic_services(resources: ResourceService) -> (HealthReporter, Routes) {
    let reporter = HealthReporter::new();
    for name in HEALTH_NAMES {
        reporter.set_service_status(name, tonic_health::ServingStatus::Serving).await;
    }
    let health = HealthService::from_health_reporter(reporter.clone());
    let health = health_server::HealthServer::new(health).max_decoding_message_size(TONIC_MESSAGE_BYTES);
    let resources = ResourceServiceServer::new(resources).max_decoding_message_size(TONIC_MESSAGE_BYTES);
    let mut routes = Routes::new(health).add_service(resources);
    // Building cannot fail, because the descriptor sets are embedded in the program. A test calls both versions.
    if let (Ok(v1), Ok(v1alpha)) = (reflection().build_v1(), reflection().build_v1alpha()) {
        routes = routes
            .add_service(v1.max_decoding_message_size(TONIC_MESSAGE_BYTES))
            .add_service(v1alpha.max_decoding_message_size(TONIC_MESSAGE_BYTES));
    }
    (reporter, routes.prepare())
}

/// Returns a builder of the reflection of this port.
fn reflection() -> Builder<'static> {
    let mut builder = Builder::configure()
        .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET);
    // The descriptor sets also contain the services of the admin port and of control planes, which this port does not
    // serve.
    for name in REFLECTED_SERVICES {
        builder = builder.with_service_name(name);
    }
    builder
}

/// The services that reflection lists on this port.
const REFLECTED_SERVICES: [&str; 7] = [
    rate_limit_service_server::SERVICE_NAME,
    rate_limit_quota_service_server::SERVICE_NAME,
    decision_service_server::SERVICE_NAME,
    resource_service_server::SERVICE_NAME,
    health_server::SERVICE_NAME,
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
];

/// The names in the health service: `""` is the server, and envoyproxy/ratelimit uses the name `ratelimit`.
pub(crate) const HEALTH_NAMES: [&str; 3] = ["", "ratelimit", rate_limit_service_server::SERVICE_NAME];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_to_tonic_keep_only_what_tonic_reads() {
        let query = "x".repeat(10_000);
        let request = Request::post(format!("http://x/grpc.health.v1.Health/Watch?{query}"))
            .header("content-type", "application/grpc")
            .header("grpc-timeout", "1".repeat(MAX_TONIC_HEADER_BYTES + 1))
            .header("x-other", "1");
        let head = head_for_tonic(request.body(()).unwrap().into_parts().0);
        assert_eq!(
            (head.method(), head.uri().to_string()),
            (&http::Method::POST, "/grpc.health.v1.Health/Watch".into())
        );
        let headers: Vec<_> = head.headers().iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
        assert_eq!(headers, [("content-type", &b"application/grpc"[..])]);
    }
}
