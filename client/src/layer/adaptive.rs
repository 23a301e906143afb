//! As many at once as latency allows.

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
    LimitedBody,
    answer::{Reason, is_grpc},
    outcome,
};
use crate::adaptive::AdaptiveLimit;

/// A queue that is too long is shorter soon.
const WAIT: Duration = Duration::from_secs(1);

/// Lets as many requests in at once as an [`AdaptiveLimit`] has room for; all others get 503. A response with 429 or 503, or
/// a 504, makes the limit fall. What counts is the time until the response begins; the slot is held until its body ends.
#[derive(Clone, Debug)]
pub struct AdaptiveLayer {
    limit: AdaptiveLimit,
}

impl AdaptiveLayer {
    /// By this limit, which others may have a part in.
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

/// What [`AdaptiveLayer`] makes of a service.
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
            return Box::pin(async move { Ok(Reason::SHED.refuse(grpc, Some(WAIT), "")) });
        };
        let responding = self.inner.call(request);
        Box::pin(async move {
            let response = responding.await;
            slot.answered();
            slot.ended(outcome(&response));
            Ok(response?.map(|body| LimitedBody::holding(body, slot)))
        })
    }
}
