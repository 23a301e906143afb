//! What is least important is turned away first.

use std::{
    hash::{BuildHasher, RandomState},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{Method, Request, Response};
use http_body::Body;
use tower_layer::Layer;
use tower_service::Service;

use super::{
    LimitedBody,
    answer::{Reason, is_grpc},
};
use crate::shed::Shedding;

/// Soon, but not at once: what is shed comes back slowly.
const WAIT: Duration = Duration::from_secs(10);

/// Turns requests away while the box is too busy, the least important first: [`Shedding`] has the law. They get 503.
///
/// A request's class comes from rules over method and path, the first that fits; without one from its method: what reads is
/// `get`, all else `post`.
///
/// ```
/// use sluicegate_client::{layer::ShedLayer, shed::{Shedding, Signal}};
///
/// let layer = ShedLayer::new(Shedding::new(Signal::Busy(64)))
///     .rule("critical", None, "/payments")
///     .rule("test", None, "/test/");
/// # let _ = layer;
/// ```
#[derive(Clone)]
pub struct ShedLayer {
    shared: Arc<Shared>,
}

struct Shared {
    shedding: Shedding,
    rules: Vec<Rule>,
    reading: usize,
    writing: usize,
    key: Option<&'static str>,
    hasher: RandomState,
}

struct Rule {
    class: usize,
    method: Option<Method>,
    path: String,
}

impl ShedLayer {
    /// By this law.
    #[must_use]
    pub fn new(shedding: Shedding) -> Self {
        let (reading, writing) = (shedding.class("get"), shedding.class("post"));
        let hasher = RandomState::new();
        Self { shared: Arc::new(Shared { shedding, rules: Vec::new(), reading, writing, key: None, hasher }) }
    }

    /// Requests with this method, or any, whose path begins like this are of this class.
    #[must_use]
    pub fn rule(self, class: &str, method: Option<Method>, path: impl Into<String>) -> Self {
        let class = self.shared.shedding.class(class);
        self.with(|shared| shared.rules.push(Rule { class, method, path: path.into() }))
    }

    /// Requests with the same value of this header are treated alike, for instance those of one user; without it each is drawn
    /// by itself.
    #[must_use]
    pub fn alike_by(self, header: &'static str) -> Self {
        self.with(|shared| shared.key = Some(header))
    }

    /// Before it is used nobody shares it.
    fn with(mut self, change: impl FnOnce(&mut Shared)) -> Self {
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            change(shared);
        }
        self
    }
}

impl Shared {
    fn class(&self, method: &Method, path: &str) -> usize {
        let fits =
            |rule: &&Rule| rule.method.as_ref().is_none_or(|wanted| wanted == method) && path.starts_with(&rule.path);
        self.rules
            .iter()
            .find(fits)
            .map_or(if method.is_safe() { self.reading } else { self.writing }, |rule| rule.class)
    }

    fn key<B>(&self, request: &Request<B>) -> u64 {
        let value = self.key.and_then(|header| request.headers().get(header));
        value.map_or_else(rand::random, |value| self.hasher.hash_one(value.as_bytes()))
    }
}

impl<S> Layer<S> for ShedLayer {
    type Service = Shed<S>;

    fn layer(&self, inner: S) -> Shed<S> {
        Shed { inner, shared: Arc::clone(&self.shared) }
    }
}

/// What [`ShedLayer`] makes of a service.
#[derive(Clone)]
pub struct Shed<S> {
    inner: S,
    shared: Arc<Shared>,
}

impl<S, B, R> Service<Request<B>> for Shed<S>
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
        let class = self.shared.class(request.method(), request.uri().path());
        let Some(in_flight) = self.shared.shedding.admit(class, self.shared.key(&request)) else {
            let grpc = is_grpc(request.headers());
            return Box::pin(async move { Ok(Reason::SHED.refuse(grpc, Some(WAIT), "")) });
        };
        let responding = self.inner.call(request);
        Box::pin(async move { Ok(responding.await?.map(|body| LimitedBody::holding(body, in_flight))) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shed::Signal;

    #[test]
    fn the_first_rule_that_fits_names_the_class() {
        let layer = ShedLayer::new(Shedding::new(Signal::Busy(1)))
            .rule("critical", Some(Method::POST), "/payments")
            .rule("get", None, "/payments")
            .rule("test", None, "/test/");
        let class = |method: Method, path: &str| layer.shared.class(&method, path);
        assert_eq!(class(Method::POST, "/payments/7"), 0);
        assert_eq!(class(Method::DELETE, "/payments/7"), 2);
        assert_eq!(class(Method::GET, "/test/payments"), 3);
        assert_eq!([Method::PUT, Method::GET, Method::HEAD].map(|method| class(method, "/")), [1, 2, 2]);
    }
}
