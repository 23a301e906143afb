//! A [`tower`](https://docs.rs/tower) layer: every request of an axum, hyper or tonic server is checked before it goes on.
//!
//! ```
//! use http::Request;
//! use sluicegate_client::{Client, descriptor, layer::RateLimitLayer};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), sluicegate_client::BuildError> {
//! let limiter = Client::builder("http://127.0.0.1:8081").domain("api").connect_lazy()?;
//! let layer = RateLimitLayer::new(limiter, |request: &http::request::Parts| {
//!     let user = request.headers.get("x-user").and_then(|user| user.to_str().ok()).unwrap_or("nobody");
//!     vec![descriptor! { "user" => user.to_owned() }]
//! });
//! # let _ = layer; Ok(()) }
//! ```
//!
//! [`PermitLayer`] holds a slot of a concurrency limit for each request until its response has ended. [`AdaptiveLayer`] and
//! [`ShedLayer`] need no service: one lets as many in at once as latency allows, the other turns away what is least important
//! when the box is too busy.
//!
//! A refused request gets 429, or 503 when it was refused for overload or because the limiter could not be asked, with a body that says why
//! (RFC 9457) and `Retry-After`; a gRPC call gets RESOURCE_EXHAUSTED, or UNAVAILABLE, with `google.rpc.RetryInfo`. Every
//! response carries what the service wants on it, or else `RateLimit-Policy` and `RateLimit`
//! (draft-ietf-httpapi-ratelimit-headers-11).

mod adaptive;
mod answer;
mod class;
mod permit;
mod shed;

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode, request::Parts};
use http_body::Body;
use tower_layer::Layer;
use tower_service::Service;

pub use self::{
    adaptive::{AdaptiveLayer, AdaptiveService},
    answer::LimitedBody,
    class::ClassRules,
    permit::{PermitLayer, PermitService},
    shed::{ShedLayer, ShedService},
};
use crate::{Client, Descriptor, Outcome, Verdict};

/// Checks requests before they go on.
#[derive(Clone)]
pub struct RateLimitLayer<F> {
    shared: Arc<Shared<F>>,
}

struct Shared<F> {
    client: Client,
    descriptors: F,
    hits: u32,
    longest_delay: Duration,
    headers: bool,
}

impl<F> RateLimitLayer<F>
where
    F: Fn(&Parts) -> Vec<Descriptor<'static>>,
{
    /// What a request counts as is the closure's word; a request that counts as nothing is not checked.
    pub fn new(client: Client, descriptors: F) -> Self {
        Self {
            shared: Arc::new(Shared {
                client,
                descriptors,
                hits: 1,
                longest_delay: Duration::from_secs(1),
                headers: true,
            }),
        }
    }

    /// What a request costs, or reserves until its cost is known ([`Reservation`]); 1 by default.
    #[must_use]
    pub fn hits(self, hits: u32) -> Self {
        self.with(|shared| shared.hits = hits)
    }

    /// A request that a limit shapes waits so long at most before it goes on; 1 s by default.
    #[must_use]
    pub fn longest_delay(self, delay: Duration) -> Self {
        self.with(|shared| shared.longest_delay = delay)
    }

    /// Whether responses carry the headers; they do by default.
    #[must_use]
    pub fn headers(self, headers: bool) -> Self {
        self.with(|shared| shared.headers = headers)
    }

    /// Before it is used nobody shares it.
    fn with(mut self, change: impl FnOnce(&mut Shared<F>)) -> Self {
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            change(shared);
        }
        self
    }
}

impl<S, F> Layer<S> for RateLimitLayer<F> {
    type Service = RateLimitService<S, F>;

    fn layer(&self, inner: S) -> RateLimitService<S, F> {
        RateLimitService { inner, shared: Arc::clone(&self.shared) }
    }
}

/// What [`RateLimitLayer`] makes of a service.
pub struct RateLimitService<S, F> {
    inner: S,
    shared: Arc<Shared<F>>,
}

impl<S: Clone, F> Clone for RateLimitService<S, F> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), shared: Arc::clone(&self.shared) }
    }
}

impl<S, F, B, R> Service<Request<B>> for RateLimitService<S, F>
where
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    F: Fn(&Parts) -> Vec<Descriptor<'static>> + Send + Sync + 'static,
    B: Send + 'static,
    R: Body<Data = Bytes>,
{
    type Response = Response<LimitedBody<R>>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // The one that is ready is the one that was asked.
        let waiting = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, waiting);
        let shared = Arc::clone(&self.shared);
        Box::pin(async move {
            let (mut head, body) = request.into_parts();
            let descriptors = (shared.descriptors)(&head);
            if descriptors.is_empty() {
                return Ok(inner.call(Request::from_parts(head, body)).await?.map(LimitedBody::inner));
            }
            let verdict = shared.check(&head.headers, &descriptors).await;
            if !verdict.allowed() {
                return Ok(answer::refuse(&verdict, answer::is_grpc(&head.headers)));
            }
            let delay = verdict.delay().min(shared.longest_delay);
            if !delay.is_zero() {
                tokio::time::sleep(delay).await;
            }
            let reservation = Reservation {
                client: shared.client.clone(),
                descriptors: descriptors.into(),
                hits: shared.hits.into(),
            };
            head.extensions.insert(reservation.clone());
            let mut response = inner.call(Request::from_parts(head, body)).await?;
            if let Some(Cost(cost)) = response.extensions_mut().remove() {
                tokio::spawn(reservation.settle(cost));
            }
            if shared.headers {
                answer::add_headers(response.headers_mut(), &verdict);
            }
            Ok(response.map(LimitedBody::inner))
        })
    }
}

impl<F> Shared<F> {
    async fn check(&self, headers: &HeaderMap, descriptors: &[Descriptor<'static>]) -> Verdict {
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
        let mut check = self.client.check(descriptors.iter().map(Descriptor::borrowed)).hits(self.hits);
        if let Some(traceparent) = text("traceparent") {
            check = check.traceparent(traceparent);
        }
        if let Some(timeout) = text("grpc-timeout").and_then(answer::grpc_timeout) {
            check = check.within(timeout);
        }
        check.await
    }
}

/// How a response ended, for what learns from it: an upstream that says that it has too much to do is believed.
fn outcome<R, E>(response: &Result<Response<R>, E>) -> Outcome {
    match response {
        Ok(response) => match response.status() {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => Outcome::Dropped,
            StatusCode::GATEWAY_TIMEOUT => Outcome::TimedOut,
            status if status.is_server_error() => Outcome::Failed,
            _ => Outcome::Success,
        },
        Err(_) => Outcome::Failed,
    }
}

/// As an extension of a response: what the request has cost. The difference to what was taken is taken or given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost(pub u64);

/// As an extension of a request: what it has taken, for a cost that is known later than the response, as at the end of a
/// stream. Forgotten, the request has cost what was taken.
#[derive(Clone)]
pub struct Reservation {
    client: Client,
    descriptors: Arc<[Descriptor<'static>]>,
    hits: u64,
}

impl Reservation {
    /// What was taken of each descriptor that did not say otherwise.
    #[must_use]
    pub fn hits(&self) -> u64 {
        self.hits
    }

    /// Gives back what was not used, or takes what was used beyond it, as far as the limits have it: more than there is
    /// cannot be taken.
    pub async fn settle(self, cost: u64) {
        let (more, less) = (cost.saturating_sub(self.hits), self.hits.saturating_sub(cost));
        if more == less {
            return;
        }
        let settled = self.descriptors.iter().map(Descriptor::borrowed).map(|descriptor| match less {
            0 => descriptor.hits(more),
            less => descriptor.hits(less).refund(),
        });
        let _ = self.client.check(settled).await;
    }
}
