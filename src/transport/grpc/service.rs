//! What a connection's calls reach: the hot method, and tonic's services for all the rest.

use std::{convert::Infallible, pin::Pin, sync::Arc};

use bytes::Bytes;
use futures_util::{FutureExt, future::ready};
use http::{HeaderName, HeaderValue, Request, Response, header::CONTENT_TYPE, request};
use hyper::body::Incoming;
use sluicegate_proto::{
    FILE_DESCRIPTOR_SET, envoy::service::ratelimit::v3::rate_limit_service_server,
    sluicegate::v1::resource_service_server::ResourceServiceServer,
};
use tokio::sync::watch;
use tonic::service::Routes;
use tonic_health::server::{HealthReporter, HealthService};
use tower_service::Service;

use super::{
    Limits, RequestError, ResourceService, ResponseSettings, decode, encode, feedback, stream,
    unary::{self, ResponseBody},
};
use crate::{
    engine::{self, Code, Feedback, Verdict},
    service::Check,
    telemetry::{Span, Traces},
};

/// The method that is asked a hundred thousand times a second.
const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
/// Those of ours, which are framed by hand as well.
const STREAM: &str = "/sluicegate.v1.DecisionService/Stream";
const BATCH: &str = "/sluicegate.v1.DecisionService/Batch";

/// In the metadata of an answer: the refusal is for overload. Envoy's protocol has no word for it.
const SHED: HeaderName = HeaderName::from_static("sluicegate-shed");

/// What is framed by hand.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Method {
    ShouldRateLimit,
    Stream,
    Batch,
}

/// An answer in the making.
type Answer = Pin<Box<dyn Future<Output = Result<Response<ResponseBody>, Infallible>> + Send>>;

/// One worker's services.
pub struct Handler {
    check: Check,
    limits: Limits,
    response: ResponseSettings,
    traces: Traces,
    tonic_services: Routes,
}

impl Handler {
    /// Joins the services.
    #[must_use]
    pub fn new(
        check: Check,
        limits: Limits,
        response: ResponseSettings,
        traces: Traces,
        tonic_services: Routes,
    ) -> Arc<Self> {
        Arc::new(Self { check, limits, response, traces, tonic_services })
    }

    /// Answers one call. Hyper moves the future of an answer several times, and a box is moved for less (`make bench`:
    /// 1.13 × the no-op server without it, 1.01 × with it). What it holds on to is kept small: while Redis decides,
    /// hundreds of them wait, and each is to be found in the processor's caches when its answer comes.
    ///
    /// `leaving`: the connection is to end, and what would keep it open for ever has to.
    pub(super) fn call(self: Arc<Self>, request: Request<Incoming>, leaving: &watch::Receiver<bool>) -> Answer {
        let method = match request.uri().path() {
            SHOULD_RATE_LIMIT => Method::ShouldRateLimit,
            STREAM => Method::Stream,
            BATCH => Method::Batch,
            _ => return self.call_other(request),
        };
        let (head, body) = request.into_parts();
        let begun = self.begin(&head, method).and_then(|span| Ok((span, feedback::of_metadata(&head.headers)?)));
        drop(head);
        match (begun, method) {
            (Err(refusal), _) => Box::pin(ready(answer_all(Err(refusal)))),
            (Ok((span, holds)), Method::ShouldRateLimit) => {
                Box::pin(self.should_rate_limit(span, holds, body).map(answer_all))
            }
            (Ok(_), Method::Stream) => Box::pin(ready(Ok(stream::stream(self, body, leaving.clone())))),
            (Ok(_), Method::Batch) => Box::pin(stream::batch(self, body).map(answer_all)),
        }
    }

    fn call_other(&self, request: Request<Incoming>) -> Answer {
        let mut tonic_services = self.tonic_services.clone();
        Box::pin(async move {
            match tonic_services.call(request.map(tonic::body::Body::new)).await {
                Ok(response) => Ok(response.map(ResponseBody::Tonic)),
                Err(never) => match never {},
            }
        })
    }

    /// What can be said of a call without its message.
    fn begin(&self, head: &request::Parts, method: Method) -> Result<Option<Span>, RequestError> {
        let is_grpc = head.headers.get(CONTENT_TYPE).is_some_and(|kind| {
            let kind = kind.as_bytes();
            kind == b"application/grpc" || kind == b"application/grpc+proto" || kind.starts_with(b"application/grpc;")
        });
        if !is_grpc || head.method != http::Method::POST {
            return Err(RequestError::invalid("this is a gRPC method: POST with content-type application/grpc"));
        }
        // The checks of a frame have spans of their own.
        Ok(if method == Method::ShouldRateLimit { self.traces.start(&head.headers) } else { None })
    }

    async fn should_rate_limit(
        self: Arc<Self>,
        span: Option<Span>,
        holds: Vec<Feedback>,
        body: Incoming,
    ) -> Result<Response<ResponseBody>, RequestError> {
        let message = unary::receive(body, self.limits.max_message_bytes).await?;
        let verdict = self.check(&message, holds, span).await?;
        let mut answer = unary::answer(&encode(&verdict, &message, &self.response));
        feedback::write_ttls(&verdict, answer.headers_mut());
        if verdict.is_shed() {
            answer.headers_mut().insert(SHED, HeaderValue::from_static("true"));
        }
        Ok(answer)
    }

    /// Decides one check of many.
    pub(super) async fn decide(
        &self,
        request: Bytes,
        holds: Vec<Feedback>,
        span: Option<Span>,
    ) -> Result<Verdict, RequestError> {
        unary::check_size(request.len(), self.limits.max_message_bytes)?;
        self.check(&request, holds, span).await
    }

    async fn check(
        &self,
        message: &[u8],
        holds: Vec<Feedback>,
        mut span: Option<Span>,
    ) -> Result<Verdict, RequestError> {
        let asked = engine::Request { feedback: holds, ..decode(message, &self.limits)? };
        if let Some(span) = &mut span {
            span.ask();
        }
        let verdict = self.check.check(&asked).await;
        if let Some(span) = span {
            // What is invalid was not timed.
            if verdict.is_ok() {
                let (took, trace) = span.asked();
                self.check.exemplify(took, trace);
            }
            let outcome = match &verdict {
                Ok(Verdict { overall: Code::Ok, .. }) => "ok",
                Ok(Verdict { overall: Code::OverLimit, .. }) => "over_limit",
                Err(_) => "error",
            };
            span.end(asked.domain, outcome);
        }
        Ok(verdict?)
    }

    /// A span for one check of many.
    pub(super) fn span(&self, traceparent: &str) -> Option<Span> {
        self.traces.start_from(traceparent)
    }

    pub(super) fn limits(&self) -> &Limits {
        &self.limits
    }

    pub(super) fn response(&self) -> &ResponseSettings {
        &self.response
    }
}

/// A refusal is an answer, too.
fn answer_all(answer: Result<Response<ResponseBody>, RequestError>) -> Result<Response<ResponseBody>, Infallible> {
    Ok(answer.unwrap_or_else(|refusal| unary::refuse(&refusal)))
}

/// Health (for the whole server and for the service by its names), reflection and resources, shared by all workers.
pub async fn build_tonic_services(resources: ResourceService) -> (HealthReporter, Routes) {
    let reporter = HealthReporter::new();
    for name in HEALTH_NAMES {
        reporter.set_service_status(name, tonic_health::ServingStatus::Serving).await;
    }
    let health = HealthService::from_health_reporter(reporter.clone());
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let mut routes = Routes::new(tonic_health::pb::health_server::HealthServer::new(health))
        .add_service(ResourceServiceServer::new(resources));
    // The descriptor sets are part of the program; a test calls both versions.
    if let (Ok(v1), Ok(v1alpha)) = (reflection().build_v1(), reflection().build_v1alpha()) {
        routes = routes.add_service(v1).add_service(v1alpha);
    }
    (reporter, routes.prepare())
}

/// `""` stands for the server; `ratelimit` is the peer's name for the service.
pub(crate) const HEALTH_NAMES: [&str; 3] = ["", "ratelimit", rate_limit_service_server::SERVICE_NAME];
