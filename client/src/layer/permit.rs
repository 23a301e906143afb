//! A slot of a concurrency limit for each request, until its response has ended.

use std::{
    borrow::Cow,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{Request, Response, request::Parts};
use http_body::Body;
use tower_layer::Layer;
use tower_service::Service;

use super::{LimitedBody, answer, outcome};
use crate::{Client, Descriptor, permit::HOLDER};

/// Holds a slot of limits that say how much may be in flight at once, from before a request until the body of its response has
/// ended, or its connection has: [`Client::acquire`] says how.
#[derive(Clone)]
pub struct PermitLayer<F> {
    shared: Arc<Shared<F>>,
}

struct Shared<F> {
    client: Client,
    descriptors: F,
    holder: Cow<'static, str>,
}

impl<F> PermitLayer<F>
where
    F: Fn(&Parts) -> Vec<Descriptor<'static>>,
{
    /// Of which limits is the closure's word; a request of none is not held up.
    pub fn new(client: Client, descriptors: F) -> Self {
        Self { shared: Arc::new(Shared { client, descriptors, holder: HOLDER.into() }) }
    }

    /// The key of the entry that names who has the slot, as the rule's `holder` has it; `holder` by default.
    #[must_use]
    pub fn holder(mut self, key: impl Into<Cow<'static, str>>) -> Self {
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            shared.holder = key.into();
        }
        self
    }
}

impl<S, F> Layer<S> for PermitLayer<F> {
    type Service = PermitService<S, F>;

    fn layer(&self, inner: S) -> PermitService<S, F> {
        PermitService { inner, shared: Arc::clone(&self.shared) }
    }
}

/// What [`PermitLayer`] makes of a service.
pub struct PermitService<S, F> {
    inner: S,
    shared: Arc<Shared<F>>,
}

impl<S: Clone, F> Clone for PermitService<S, F> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), shared: Arc::clone(&self.shared) }
    }
}

impl<S, F, B, R> Service<Request<B>> for PermitService<S, F>
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
            let (head, body) = request.into_parts();
            let descriptors = (shared.descriptors)(&head);
            if descriptors.is_empty() {
                return Ok(inner.call(Request::from_parts(head, body)).await?.map(LimitedBody::inner));
            }
            let grpc = answer::is_grpc(&head.headers);
            let acquired = shared.client.acquire(descriptors).holder(&*shared.holder).await;
            let mut permit = match acquired {
                Ok(permit) => permit,
                Err(verdict) => return Ok(answer::refuse(&verdict, grpc)),
            };
            let response = inner.call(Request::from_parts(head, body)).await;
            permit.answered();
            permit.ended(outcome(&response));
            Ok(response?.map(|body| LimitedBody::holding(body, permit)))
        })
    }
}
