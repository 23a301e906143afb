//! [`ShedLayer`]: sheds the least important requests while the host is overloaded.

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
    response::{DenialReason, is_grpc},
};
use crate::shed::LoadShedder;

/// Retry-after of shed requests. Shed classes are restored slowly, so an immediate retry is useless.
const RETRY_AFTER: Duration = Duration::from_secs(10);

/// Layer that sheds the least important requests while the host is overloaded. Shed requests get status 503.
///
/// [`ClassRules`] determine the class of a request, and a [`LoadShedder`] decides which classes are shed.
///
/// # Examples
///
/// ```
/// use sluicegate_client::{
///     layer::{ClassRules, ShedLayer},
///     shed::{LoadShedder, Signal},
/// };
///
/// let classes = ClassRules::new().rule("critical", None, "/payments").rule("test", None, "/test/");
/// let shedder = LoadShedder::new(Signal::WorkerUtilization(64));
/// let app: axum::Router = axum::Router::new().layer(ShedLayer::new(shedder, classes).key_by("x-user"));
/// # let _ = app;
/// ```
#[derive(Clone)]
pub struct ShedLayer {
    shared: Arc<Shared>,
}

struct Shared {
    shedder: LoadShedder,
    classes: ClassRules,
    key_header: Option<&'static str>,
    hasher: RandomState,
}

impl ShedLayer {
    /// Creates a layer. A class that the shedder does not have counts as its last class.
    #[must_use]
    pub fn new(shedder: LoadShedder, classes: ClassRules) -> Self {
        Self { shared: Arc::new(Shared { shedder, classes, key_header: None, hasher: RandomState::new() }) }
    }

    /// Treats requests with the same value of this header alike, for instance those of one user. By default, and for
    /// requests without the header, each request is admitted or shed at random.
    ///
    /// This has no effect after the layer has been cloned.
    #[must_use]
    pub fn key_by(mut self, header: &'static str) -> Self {
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            shared.key_header = Some(header);
        }
        self
    }
}

impl Shared {
    /// Returns the hash of the key header, or a random key if the request does not have it.
    fn key<B>(&self, request: &Request<B>) -> u64 {
        let value = self.key_header.and_then(|header| request.headers().get(header));
        match value {
            Some(value) => self.hasher.hash_one(value.as_bytes()),
            None => rand::random(),
        }
    }
}

impl<S> Layer<S> for ShedLayer {
    type Service = ShedService<S>;

    fn layer(&self, inner: S) -> ShedService<S> {
        ShedService { inner, shared: Arc::clone(&self.shared) }
    }
}

/// Service returned by [`ShedLayer`].
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
        let class = self.shared.classes.class_for(request.method(), request.uri().path());
        let class = self.shared.shedder.class_index(class);
        let Some(in_flight) = self.shared.shedder.admit(class, self.shared.key(&request)) else {
            let grpc = is_grpc(request.headers());
            return Box::pin(async move { Ok(DenialReason::OVERLOADED.response(grpc, Some(RETRY_AFTER), "")) });
        };
        let response = self.inner.call(request);
        Box::pin(async move { Ok(response.await?.map(|body| LimitedBody::with_guard(body, in_flight))) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shed::Signal;

    #[test]
    fn requests_with_the_same_value_of_the_header_have_the_same_key() {
        let shedder = LoadShedder::new(Signal::WorkerUtilization(1));
        let layer = ShedLayer::new(shedder, ClassRules::new()).key_by("x-user");
        let key = |user: &str| layer.shared.key(&Request::builder().header("x-user", user).body(()).unwrap());
        assert_eq!(key("alice"), key("alice"));
        assert_ne!(key("alice"), key("bob"));
    }
}
