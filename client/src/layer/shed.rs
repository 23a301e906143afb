//! What is least important is turned away first.

use std::{
    hash::{BuildHasher, RandomState},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use tower_layer::Layer;
use tower_service::Service;

use super::{
    ClassRules, LimitedBody,
    answer::{Reason, is_grpc},
};
use crate::shed::LoadShedder;

/// Soon, but not at once: what is shed comes back slowly.
const WAIT: Duration = Duration::from_secs(10);

/// Turns requests away while the box is too busy, the least important first: [`Shedding`] has the law, [`ClassRules`] says which
/// is which. They get 503.
///
/// ```
/// use sluicegate_client::{layer::{ClassRules, ShedLayer}, shed::{Shedding, Signal}};
///
/// let classes = ClassRules::new().rule("critical", None, "/payments").rule("test", None, "/test/");
/// let layer = ShedLayer::new(Shedding::new(Signal::Busy(64)), classes);
/// # let _ = layer;
/// ```
#[derive(Clone)]
pub struct ShedLayer {
    shared: Arc<Shared>,
}

struct Shared {
    shedding: LoadShedder,
    classes: ClassRules,
    key: Option<&'static str>,
    hasher: RandomState,
}

impl ShedLayer {
    /// A class that the law has not is its last.
    #[must_use]
    pub fn new(shedding: LoadShedder, classes: ClassRules) -> Self {
        Self { shared: Arc::new(Shared { shedding, classes, key: None, hasher: RandomState::new() }) }
    }

    /// Requests with the same value of this header are treated alike, for instance those of one user; without it each is drawn
    /// by itself.
    #[must_use]
    pub fn alike_by(mut self, header: &'static str) -> Self {
        // Before it is used nobody shares it.
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            shared.key = Some(header);
        }
        self
    }
}

impl Shared {
    fn key<B>(&self, request: &Request<B>) -> u64 {
        let value = self.key.and_then(|header| request.headers().get(header));
        value.map_or_else(rand::random, |value| self.hasher.hash_one(value.as_bytes()))
    }
}

impl<S> Layer<S> for ShedLayer {
    type Service = ShedService<S>;

    fn layer(&self, inner: S) -> ShedService<S> {
        ShedService { inner, shared: Arc::clone(&self.shared) }
    }
}

/// What [`ShedLayer`] makes of a service.
#[derive(Clone)]
pub struct ShedService<S> {
    inner: S,
    shared: Arc<Shared>,
}

impl<S, B, R> Service<Request<B>> for ShedService<S>
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
        let class = self.shared.classes.class(request.method(), request.uri().path());
        let class = self.shared.shedding.class(class);
        let Some(in_flight) = self.shared.shedding.admit(class, self.shared.key(&request)) else {
            let grpc = is_grpc(request.headers());
            return Box::pin(async move { Ok(Reason::SHED.refuse(grpc, Some(WAIT), "")) });
        };
        let responding = self.inner.call(request);
        Box::pin(async move { Ok(responding.await?.map(|body| LimitedBody::holding(body, in_flight))) })
    }
}
