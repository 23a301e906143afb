//! [`PermitLayer`]: holds a slot of a concurrency limit for each request until its response has ended.

use std::{
    borrow::Cow,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response, request::Parts};
use http_body::Body;
use tower_layer::Layer;
use tower_service::Service;

use super::{LimitedBody, outcome, response};
use crate::{Client, Descriptor, permit::DEFAULT_HOLDER_KEY};

/// Layer that holds a slot of concurrency limits for each request, until the body of its response has ended or its
/// connection is closed.
///
/// Slots are acquired with [`Client::acquire`]. Denied requests get the responses described in the [module](super)
/// documentation. Adaptive limits learn from the latency and the status of the responses.
///
/// # Examples
///
/// ```
/// use http::request::Parts;
/// use sluicegate_client::{Client, descriptor, layer::PermitLayer};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), sluicegate_client::BuildError> {
/// let client = Client::builder("http://127.0.0.1:8081").domain("api").connect_lazy()?;
/// let layer = PermitLayer::new(client, |request: &Parts| match request.uri.path() {
///     "/export" => vec![descriptor! { "exports" => "all" }],
///     // Other requests need no slot.
///     _ => Vec::new(),
/// })
/// .holder_key("request_id");
/// let app: axum::Router = axum::Router::new().layer(layer);
/// # let _ = app;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct PermitLayer<F> {
    shared: Arc<Shared<F>>,
}

struct Shared<F> {
    client: Client,
    descriptors: F,
    holder_key: Cow<'static, str>,
    max_wait: Duration,
}

impl<F> PermitLayer<F>
where
    F: Fn(&Parts) -> Vec<Descriptor<'static>>,
{
    /// Creates a layer. The closure returns the descriptors of a request; a request without descriptors needs no slot.
    pub fn new(client: Client, descriptors: F) -> Self {
        let holder_key = DEFAULT_HOLDER_KEY.into();
        Self { shared: Arc::new(Shared { client, descriptors, holder_key, max_wait: Duration::ZERO }) }
    }

    /// Sets the key of the entry that identifies the holder, as in the rule's `holder`; `holder` by default.
    ///
    /// This has no effect after the layer has been cloned.
    #[must_use]
    pub fn holder_key(mut self, key: impl Into<Cow<'static, str>>) -> Self {
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            shared.holder_key = key.into();
        }
        self
    }

    /// Sets the maximum time that a request waits for a free slot, instead of being denied immediately
    /// ([`Acquire::max_wait`](crate::Acquire::max_wait)). Zero, the default, does not wait.
    ///
    /// This has no effect after the layer has been cloned.
    #[must_use]
    pub fn max_wait(mut self, max_wait: Duration) -> Self {
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            shared.max_wait = max_wait;
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

/// Service returned by [`PermitLayer`].
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
        // `poll_ready` made this instance ready, so this instance is called, and its clone takes its place.
        let clone = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, clone);
        let shared = Arc::clone(&self.shared);
        Box::pin(async move {
            let (head, body) = request.into_parts();
            let descriptors = (shared.descriptors)(&head);
            if descriptors.is_empty() {
                return Ok(inner.call(Request::from_parts(head, body)).await?.map(LimitedBody::new));
            }
            let grpc = response::is_grpc(&head.headers);
            let acquired = shared
                .client
                .acquire(descriptors.iter().map(Descriptor::borrowed))
                .holder_key(&*shared.holder_key)
                .max_wait(shared.max_wait)
                .await;
            let mut permit = match acquired {
                Ok(permit) => permit,
                Err(verdict) => return Ok(response::denied_response(&verdict, &descriptors, grpc)),
            };
            let response = inner.call(Request::from_parts(head, body)).await;
            permit.record_latency();
            permit.set_outcome(outcome(&response));
            Ok(response?.map(|body| LimitedBody::with_guard(body, permit)))
        })
    }
}
