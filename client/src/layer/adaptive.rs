//! [`AdaptiveLayer`]: limits the number of concurrent requests by their latency.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use tower_layer::Layer;
use tower_service::Service;

use super::{
    LimitedBody, outcome,
    response::{DenialReason, is_grpc},
};
use crate::adaptive::AdaptiveLimit;

/// Retry-after of shed requests. A queue of excess requests drains quickly.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Layer that limits the number of concurrent requests with an [`AdaptiveLimit`]. Excess requests get status 503.
///
/// Responses with status 429, 503 or 504 reduce the limit. The latency is the time until the response begins; the slot
/// is held until the response body ends. Needs no rate limit service.
///
/// # Examples
///
/// ```
/// use sluicegate_client::{
///     adaptive::{AdaptiveLimit, Bounds, Method},
///     layer::AdaptiveLayer,
/// };
///
/// let limit = AdaptiveLimit::new(Method::Vegas, Bounds { floor: 5, ..Bounds::default() });
/// let app: axum::Router = axum::Router::new().layer(AdaptiveLayer::new(limit.clone()));
/// println!("{} of {} requests in flight", limit.in_flight(), limit.limit());
/// # let _ = app;
/// ```
#[derive(Clone, Debug)]
pub struct AdaptiveLayer {
    limit: AdaptiveLimit,
}

impl AdaptiveLayer {
    /// Creates a layer with a limit. Layers with clones of the same limit share it.
    #[must_use]
    pub fn new(limit: AdaptiveLimit) -> Self {
        Self { limit }
    }
}

impl<S> Layer<S> for AdaptiveLayer {
    type Service = AdaptiveService<S>;

    fn layer(&self, inner: S) -> AdaptiveService<S> {
        AdaptiveService { inner, limit: self.limit.clone() }
    }
}

/// Service returned by [`AdaptiveLayer`].
#[derive(Clone, Debug)]
pub struct AdaptiveService<S> {
    inner: S,
    limit: AdaptiveLimit,
}

impl<S, B, R> Service<Request<B>> for AdaptiveService<S>
where
    S: Service<Request<B>, Response = Response<R>>,
    S::Future: Send + 'static,
    R: Body<Data = Bytes>,
{
    type Response = Response<LimitedBody<R>>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let Some(mut slot) = self.limit.try_acquire() else {
            let grpc = is_grpc(request.headers());
            return Box::pin(async move { Ok(DenialReason::OVERLOADED.response(grpc, Some(RETRY_AFTER), "")) });
        };
        let response = self.inner.call(request);
        Box::pin(async move {
            let response = response.await;
            slot.record_latency();
            slot.set_outcome(outcome(&response));
            Ok(response?.map(|body| LimitedBody::with_guard(body, slot)))
        })
    }
}
