//! [`Handler`]: dispatches the calls of connections to `ShouldRateLimit`, to the methods of `sluicegate.v1`, or to
//! tonic.

use std::{convert::Infallible, pin::Pin, sync::Arc};

use futures_util::{FutureExt, future::ready};
use http::{HeaderName, HeaderValue, Request, Response, header::CONTENT_TYPE, request};
use hyper::body::Incoming;
use sluicegate_proto::{
    FILE_DESCRIPTOR_SET,
    envoy::service::ratelimit::v3::rate_limit_service_server,
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
    Limits, RequestError, ResourceService, ResponseSettings,
    body::{ResponseBody, error_response, message_response, stream_response, unary_response},
    checker::Checker,
    encode, feedback, message,
    stream::{self, ResponseStream},
};
use crate::{
    engine::Feedback,
    service::Check,
    telemetry::{Span, Traces},
};

/// Path of the method that receives a hundred thousand calls per second.
const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
/// Path of `Stream`, which does not use tonic either.
const STREAM: &str = "/sluicegate.v1.DecisionService/Stream";
/// Path of `Batch`, which does not use tonic either.
const BATCH: &str = "/sluicegate.v1.DecisionService/Batch";

/// Metadata of a response to a shed request. Envoy's protocol has no field for this.
const SHED_HEADER: HeaderName = HeaderName::from_static("sluicegate-shed");

/// A method that does not use tonic.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Method {
    ShouldRateLimit,
    Stream,
    Batch,
}

type ResponseFuture = Pin<Box<dyn Future<Output = Result<Response<ResponseBody>, Infallible>> + Send>>;

/// The services of one worker.
pub struct Handler {
    checker: Arc<Checker>,
    tonic_services: Routes,
}

impl Handler {
    /// Creates a handler.
    #[must_use]
    pub fn new(
        check: Check,
        limits: Limits,
        response: ResponseSettings,
        traces: Traces,
        tonic_services: Routes,
    ) -> Arc<Self> {
        let checker = Arc::new(Checker::new(check, limits, response, traces));
        Arc::new(Self { checker, tonic_services })
    }

    /// Handles one call.
    ///
    /// Hyper moves the future of a response several times, and a boxed future is cheaper to move (`make bench`: 1.13 ×
    /// the no-op server without the box, 1.01 × with it). The future is small: hundreds of futures wait while Redis
    /// decides, and each should still be in the processor's caches when its reply arrives.
    ///
    /// `leaving` becomes true when the connection is to be closed. Streams, which would keep it open, then end.
    pub(super) fn call(&self, request: Request<Incoming>, leaving: &watch::Receiver<bool>) -> ResponseFuture {
        let method = match request.uri().path() {
            SHOULD_RATE_LIMIT => Method::ShouldRateLimit,
            STREAM => Method::Stream,
            BATCH => Method::Batch,
            _ => return self.call_other(request),
        };
        let (head, body) = request.into_parts();
        let started = self.start(&head, method).and_then(|span| Ok((span, feedback::read_metadata(&head.headers)?)));
        drop(head);
        let checker = Arc::clone(&self.checker);
        match (started, method) {
            (Err(error), _) => Box::pin(ready(into_response(Err(error)))),
            (Ok((span, feedback)), Method::ShouldRateLimit) => {
                Box::pin(should_rate_limit(checker, span, feedback, body).map(into_response))
            }
            (Ok(_), Method::Stream) => {
                Box::pin(ready(Ok(stream_response(ResponseStream::new(checker, body, leaving.clone())))))
            }
            (Ok(_), Method::Batch) => {
                Box::pin(stream::batch(checker, body).map(|frame| into_response(frame.map(unary_response))))
            }
        }
    }

    fn call_other(&self, request: Request<Incoming>) -> ResponseFuture {
        let mut tonic_services = self.tonic_services.clone();
        Box::pin(async move {
            match tonic_services.call(request.map(tonic::body::Body::new)).await {
                Ok(response) => Ok(response.map(ResponseBody::Tonic)),
                Err(never) => match never {},
            }
        })
    }

    /// Checks the head of a call, and starts a span if the call is traced.
    fn start(&self, head: &request::Parts, method: Method) -> Result<Option<Span>, RequestError> {
        let is_grpc = head.headers.get(CONTENT_TYPE).is_some_and(|kind| {
            let kind = kind.as_bytes();
            kind == b"application/grpc" || kind == b"application/grpc+proto" || kind.starts_with(b"application/grpc;")
        });
        if !is_grpc || head.method != http::Method::POST {
            return Err(RequestError::invalid("a gRPC method requires POST with content-type application/grpc"));
        }
        // Each check of a frame has its own span.
        Ok(if method == Method::ShouldRateLimit { self.checker.span_of(&head.headers) } else { None })
    }
}

/// Decides one request of Envoy's protocol.
async fn should_rate_limit(
    checker: Arc<Checker>,
    span: Option<Span>,
    feedback: Vec<Feedback>,
    body: Incoming,
) -> Result<Response<ResponseBody>, RequestError> {
    let message = message::receive(body, checker.limits().max_message_bytes).await?;
    let verdict = checker.check(&message, feedback, span).await?;
    let mut response = message_response(&encode(&verdict, &message, checker.response()));
    feedback::write_ttls(&verdict, response.headers_mut());
    if verdict.is_shed() {
        response.headers_mut().insert(SHED_HEADER, HeaderValue::from_static("true"));
    }
    Ok(response)
}

fn into_response(result: Result<Response<ResponseBody>, RequestError>) -> Result<Response<ResponseBody>, Infallible> {
    Ok(result.unwrap_or_else(|error| error_response(&error)))
}

/// Builds the services that use tonic: health (for the server and for the service by its names), reflection and
/// resources. All workers share them.
pub async fn build_tonic_services(resources: ResourceService) -> (HealthReporter, Routes) {
    let reporter = HealthReporter::new();
    for name in HEALTH_NAMES {
        reporter.set_service_status(name, tonic_health::ServingStatus::Serving).await;
    }
    let health = HealthService::from_health_reporter(reporter.clone());
    let reflection = || {
        Builder::configure()
            .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    // The descriptor sets also contain the services of the admin port and of control planes, which this port does not
    // serve.
    let reflection = || REFLECTED_SERVICES.into_iter().fold(reflection(), Builder::with_service_name);
    let mut routes =
        Routes::new(health_server::HealthServer::new(health)).add_service(ResourceServiceServer::new(resources));
    // Building cannot fail, because the descriptor sets are embedded in the program. A test calls both versions.
    if let (Ok(v1), Ok(v1alpha)) = (reflection().build_v1(), reflection().build_v1alpha()) {
        routes = routes.add_service(v1).add_service(v1alpha);
    }
    (reporter, routes.prepare())
}

/// The services that reflection lists on this port.
const REFLECTED_SERVICES: [&str; 6] = [
    rate_limit_service_server::SERVICE_NAME,
    decision_service_server::SERVICE_NAME,
    resource_service_server::SERVICE_NAME,
    health_server::SERVICE_NAME,
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
];

/// The names in the health service: `""` is the server, and envoyproxy/ratelimit uses the name `ratelimit`.
pub(crate) const HEALTH_NAMES: [&str; 3] = ["", "ratelimit", rate_limit_service_server::SERVICE_NAME];
