//! [`tower`](https://docs.rs/tower) layers for axum, hyper and tonic servers. [`RateLimitLayer`] checks every request
//! with the rate limit service.
//!
//! ```
//! use http::Request;
//! use sluicegate_client::{Client, descriptor, layer::RateLimitLayer};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), sluicegate_client::BuildError> {
//! let client = Client::builder("http://127.0.0.1:8081").domain("api").connect_lazy()?;
//! let layer = RateLimitLayer::new(client, |request: &http::request::Parts| {
//!     let user = request.headers.get("x-user").and_then(|user| user.to_str().ok()).unwrap_or("anonymous");
//!     vec![descriptor! { "user" => user.to_owned() }]
//! });
//! # let _ = layer; Ok(()) }
//! ```
//!
//! [`PermitLayer`] holds a slot of a concurrency limit for each request until its response has ended. Two layers need
//! no rate limit service: [`AdaptiveLayer`] limits concurrent requests by their latency, and [`ShedLayer`] sheds the
//! least important requests while the host is overloaded.
//!
//! A denied HTTP request gets status 429, with `Retry-After` and a problem description as body (RFC 9457). The status
//! is 503 if the request was denied because of overload, or because the rate limit service did not answer. A status or
//! a message that the rule has for denials ([`Verdict::denial`]) replaces the status or the body. A denied gRPC call
//! gets `RESOURCE_EXHAUSTED` or `UNAVAILABLE` with `google.rpc.RetryInfo`. [`RateLimitLayer`] adds the headers that
//! the service sent to every response, or else `RateLimit-Policy` and `RateLimit`
//! (draft-ietf-httpapi-ratelimit-headers-11). In these headers, a limit without a name has the keys of its descriptor,
//! separated by dots.

mod adaptive;
mod class;
mod permit;
mod response;
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
    class::ClassRules,
    permit::{PermitLayer, PermitService},
    response::LimitedBody,
    shed::{ShedLayer, ShedService},
};
use crate::{Client, Descriptor, Outcome, Verdict};

/// Layer that checks every request with the rate limit service before the request reaches the inner service.
///
/// Allowed requests continue, after the delay that a traffic-shaping limit may demand. Denied requests get the
/// responses described in the [module](self) documentation. The W3C trace context (`traceparent`) of a request is
/// passed on, and a `grpc-timeout` shortens the timeout of the check.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
///
/// use http::request::Parts;
/// use sluicegate_client::{Client, descriptor, layer::RateLimitLayer};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), sluicegate_client::BuildError> {
/// let client = Client::builder("http://127.0.0.1:8081").domain("api").connect_lazy()?;
/// let layer = RateLimitLayer::new(client, |request: &Parts| match request.headers.get("x-user") {
///     Some(user) => vec![descriptor! { "user" => String::from_utf8_lossy(user.as_bytes()).into_owned() }],
///     // Requests without a user are not limited.
///     None => Vec::new(),
/// })
/// .max_delay(Duration::from_millis(500));
/// let app: axum::Router = axum::Router::new().layer(layer);
/// # let _ = app;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct RateLimitLayer<F> {
    shared: Arc<Shared<F>>,
}

struct Shared<F> {
    client: Client,
    descriptors: F,
    hits: u32,
    max_delay: Duration,
    max_wait: Duration,
    headers: bool,
}

impl<F> RateLimitLayer<F>
where
    F: Fn(&Parts) -> Vec<Descriptor<'static>>,
{
    /// Creates a layer. The closure returns the descriptors of a request; a request without descriptors is not checked.
    pub fn new(client: Client, descriptors: F) -> Self {
        let shared = Shared {
            client,
            descriptors,
            hits: 1,
            max_delay: Duration::from_secs(1),
            max_wait: Duration::ZERO,
            headers: true,
        };
        Self { shared: Arc::new(shared) }
    }

    /// Sets the cost of a request, or the hits to reserve until its cost is known ([`Reservation`]); 1 by default.
    #[must_use]
    pub fn hits(self, hits: u32) -> Self {
        self.with(|shared| shared.hits = hits)
    }

    /// Sets the maximum time that a request waits for a limit that shapes traffic; 1 s by default.
    #[must_use]
    pub fn max_delay(self, delay: Duration) -> Self {
        self.with(|shared| shared.max_delay = delay)
    }

    /// Sets the maximum time that a request waits until it is allowed, instead of being denied immediately
    /// ([`Check::max_wait`](crate::Check::max_wait)). Zero, the default, does not wait. A shorter `grpc-timeout` of the
    /// request replaces the maximum.
    #[must_use]
    pub fn max_wait(self, max_wait: Duration) -> Self {
        self.with(|shared| shared.max_wait = max_wait)
    }

    /// Sets whether rate limit headers are added to the responses of allowed requests; enabled by default.
    #[must_use]
    pub fn headers(self, headers: bool) -> Self {
        self.with(|shared| shared.headers = headers)
    }

    /// Changes a setting. This has no effect after the layer has been cloned or used.
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

/// Service returned by [`RateLimitLayer`].
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
        // `poll_ready` made this instance ready, so this instance is called, and its clone takes its place.
        let clone = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, clone);
        let shared = Arc::clone(&self.shared);
        Box::pin(async move {
            let (mut head, body) = request.into_parts();
            let descriptors = (shared.descriptors)(&head);
            if descriptors.is_empty() {
                return Ok(inner.call(Request::from_parts(head, body)).await?.map(LimitedBody::new));
            }
            let verdict = shared.check(&head.headers, &descriptors).await;
            if !verdict.allowed() {
                return Ok(response::denied_response(&verdict, &descriptors, response::is_grpc(&head.headers)));
            }
            let delay = verdict.delay().min(shared.max_delay);
            if !delay.is_zero() {
                tokio::time::sleep(delay).await;
            }
            let descriptors: Arc<[_]> = descriptors.into();
            let reservation = Reservation {
                client: shared.client.clone(),
                descriptors: Arc::clone(&descriptors),
                hits: shared.hits.into(),
            };
            head.extensions.insert(reservation.clone());
            let mut response = inner.call(Request::from_parts(head, body)).await?;
            if let Some(Cost(cost)) = response.extensions_mut().remove() {
                tokio::spawn(reservation.settle(cost));
            }
            if shared.headers {
                response::add_headers(response.headers_mut(), &verdict, &descriptors);
            }
            Ok(response.map(LimitedBody::new))
        })
    }
}

impl<F> Shared<F> {
    async fn check(&self, headers: &HeaderMap, descriptors: &[Descriptor<'static>]) -> Verdict {
        let mut check = self.client.check(descriptors.iter().map(Descriptor::borrowed)).hits(self.hits);
        let mut max_wait = self.max_wait;
        if let Some(traceparent) = header_text(headers, "traceparent") {
            check = check.traceparent(traceparent);
        }
        if let Some(timeout) = header_text(headers, "grpc-timeout").and_then(response::grpc_timeout) {
            check = check.timeout(timeout);
            max_wait = max_wait.min(timeout);
        }
        check.max_wait(max_wait).await
    }
}

/// Returns the value of a header, or `None` if it is not text.
fn header_text<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name)?.to_str().ok()
}

/// Returns the outcome of a response for adaptive limits. Status 429 and 503 mean that the upstream is overloaded.
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

/// Response extension with the actual cost of the request. [`RateLimitLayer`] takes or refunds the difference to the
/// hits already taken.
///
/// # Examples
///
/// ```
/// use axum::{Extension, response::IntoResponse};
/// use sluicegate_client::layer::Cost;
///
/// async fn handler() -> impl IntoResponse {
///     (Extension(Cost(17)), "a response that cost 17 hits")
/// }
/// # let _ = handler;
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost(pub u64);

/// Request extension with the hits that [`RateLimitLayer`] took, for costs that are known only after the response has
/// begun, for instance at the end of a stream.
///
/// If the reservation is not settled, the request costs the hits that were taken.
///
/// # Examples
///
/// ```
/// use axum::Extension;
/// use sluicegate_client::layer::Reservation;
///
/// async fn handler(Extension(reservation): Extension<Reservation>) -> &'static str {
///     let used = 17;
///     tokio::spawn(reservation.settle(used));
///     "done"
/// }
/// # let _ = handler;
/// ```
#[derive(Clone)]
pub struct Reservation {
    client: Client,
    descriptors: Arc<[Descriptor<'static>]>,
    hits: u64,
}

impl Reservation {
    /// Returns the number of hits that were taken for each descriptor without its own [`Descriptor::hits`].
    #[must_use]
    pub fn hits(&self) -> u64 {
        self.hits
    }

    /// Refunds unused hits, or takes the hits beyond the reservation from each limit that allows them. Descriptors with
    /// their own [`Descriptor::hits`] keep these.
    pub async fn settle(self, cost: u64) {
        if cost == self.hits {
            return;
        }
        let mut settled = Vec::new();
        for descriptor in self.descriptors.iter().filter(|descriptor| !descriptor.has_own_hits()) {
            let descriptor = descriptor.borrowed();
            settled.push(if cost > self.hits {
                descriptor.hits(cost - self.hits)
            } else {
                descriptor.hits(self.hits - cost).refund()
            });
        }
        if !settled.is_empty() {
            let _ = self.client.check(settled).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        convert::Infallible,
        future::{Pending, pending},
        task::Waker,
    };

    use super::*;
    use crate::{
        adaptive::{AdaptiveLimit, Bounds, Method},
        shed::{LoadShedder, Signal},
    };

    /// A service that is never ready.
    #[derive(Clone)]
    struct Busy;

    impl Service<Request<()>> for Busy {
        type Response = Response<axum::body::Body>;
        type Error = Infallible;
        type Future = Pending<Result<Self::Response, Infallible>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Pending
        }

        fn call(&mut self, _: Request<()>) -> Self::Future {
            pending()
        }
    }

    fn is_ready<S: Service<Request<()>>>(mut service: S) -> bool {
        service.poll_ready(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    #[tokio::test]
    async fn a_layer_is_not_ready_before_its_inner_service() {
        let client = Client::builder("http://127.0.0.1:1").connect_lazy().unwrap();
        let limit = AdaptiveLimit::new(Method::Vegas, Bounds::default());
        let shedder = LoadShedder::new(Signal::WorkerUtilization(1));
        let ready = [
            is_ready(RateLimitLayer::new(client.clone(), |_: &Parts| Vec::new()).layer(Busy)),
            is_ready(PermitLayer::new(client, |_: &Parts| Vec::new()).layer(Busy)),
            is_ready(AdaptiveLayer::new(limit).layer(Busy)),
            is_ready(ShedLayer::new(shedder, ClassRules::new()).layer(Busy)),
        ];
        assert_eq!(ready, [false; 4]);
    }

    #[test]
    fn the_status_of_a_response_determines_the_outcome() {
        for (status, expected) in [
            (200_u16, Outcome::Success),
            (404, Outcome::Success),
            (429, Outcome::Dropped),
            (500, Outcome::Failed),
            (503, Outcome::Dropped),
            (504, Outcome::TimedOut),
        ] {
            assert_eq!(outcome(&Response::builder().status(status).body(())), expected, "{status}");
        }
        assert_eq!(outcome::<(), ()>(&Err(())), Outcome::Failed);
    }
}
