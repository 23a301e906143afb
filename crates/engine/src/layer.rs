//! [`RateLimitLayer`]: a [`tower`](https://docs.rs/tower) layer for axum, hyper and tonic servers, with decisions by a
//! [`RateLimiter`] in the same process.
//!
//! The crate `sluicegate-client` has a layer of the same name that calls the rate limit service.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, request::Parts};
use smallvec::SmallVec;
use tower_layer::Layer;
use tower_service::Service;

use super::{RateLimiter, Verdict, headers};

/// A layer that checks every request with a [`RateLimiter`] before it reaches the inner service.
///
/// A denied request gets status 429 or that of its rule, [all headers](headers::all) about the verdict, and an empty body.
/// The responses to allowed requests get the headers of [their limits](headers::limits).
///
/// The layer waits for nothing, so the delay of a limit that shapes traffic is not awaited, and a slot of a concurrency
/// limit is not released at the end of the request.
///
/// # Examples
///
/// ```
/// use http::request::Parts;
/// use sluicegate_engine::{RateLimiter, layer::RateLimitLayer};
///
/// let limiter = RateLimiter::from_rules(
///     "domain: api
/// descriptors:
/// - key: user
///   rate_limit: {unit: minute, requests_per_unit: 2}",
/// )?;
/// let layer = RateLimitLayer::new(limiter, |request: &Parts| {
///     // Requests without a user are not limited.
///     let user = request.headers.get("x-user")?.to_str().ok()?;
///     Some(("api", vec![("user", user.to_owned())]))
/// });
/// let app: axum::Router = axum::Router::new().layer(layer);
/// # let _ = app;
/// # Ok::<(), sluicegate_engine::LoadError>(())
/// ```
#[derive(Clone)]
pub struct RateLimitLayer<F> {
    shared: Arc<Shared<F>>,
}

struct Shared<F> {
    limiter: RateLimiter,
    descriptor: F,
}

impl<F> RateLimitLayer<F>
where
    F: Fn(&Parts) -> Option<(&'static str, Vec<(&'static str, String)>)>,
{
    /// Creates a layer. The closure returns the domain and the entries of a request; without them, the request is not
    /// checked.
    pub fn new(limiter: RateLimiter, descriptor: F) -> Self {
        Self { shared: Arc::new(Shared { limiter, descriptor }) }
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
    S: Service<Request<B>, Response = Response<R>>,
    S::Future: Send + 'static,
    F: Fn(&Parts) -> Option<(&'static str, Vec<(&'static str, String)>)>,
    R: Default,
{
    type Response = Response<R>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<R>, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (head, body) = request.into_parts();
        let verdict = self.shared.check(&head);
        if let Some(verdict) = &verdict
            && verdict.is_denied()
        {
            let status = denied_status(verdict);
            let denied_headers = denied_headers(verdict);
            return Box::pin(async move {
                let mut response = Response::new(R::default());
                *response.status_mut() = status;
                *response.headers_mut() = denied_headers;
                Ok(response)
            });
        }
        let response = self.inner.call(Request::from_parts(head, body));
        let Some(verdict) = verdict else {
            return Box::pin(response);
        };
        let limits = headers::limits(&verdict);
        Box::pin(async move {
            let mut response = response.await?;
            add_headers(response.headers_mut(), limits);
            Ok(response)
        })
    }
}

impl<F> Shared<F>
where
    F: Fn(&Parts) -> Option<(&'static str, Vec<(&'static str, String)>)>,
{
    /// Decides a request; returns `None` if it is not to be checked.
    fn check(&self, head: &Parts) -> Option<Verdict> {
        let (domain, entries) = (self.descriptor)(head)?;
        let entries: SmallVec<[(&str, &str); 3]> = entries.iter().map(|(key, value)| (*key, value.as_str())).collect();
        Some(self.limiter.check(domain, &entries))
    }
}

/// Returns the status of the response to a denied request: that of the rule that denies it, or 429.
fn denied_status(verdict: &Verdict) -> StatusCode {
    let status = verdict.denial_response().and_then(|denial| denial.status);
    status.and_then(|status| StatusCode::from_u16(status).ok()).unwrap_or(StatusCode::TOO_MANY_REQUESTS)
}

/// Returns the headers of the response to a denied request, with those of the rule that denies it.
fn denied_headers(verdict: &Verdict) -> HeaderMap {
    let mut all = HeaderMap::new();
    add_headers(&mut all, headers::all(verdict));
    if let Some(denial) = verdict.denial_response() {
        add_headers(&mut all, denial.headers);
    }
    all
}

fn add_headers<N: AsRef<str>>(headers: &mut HeaderMap, new: Vec<(N, String)>) {
    for (name, value) in new {
        if let (Ok(name), Ok(value)) = (HeaderName::try_from(name.as_ref()), HeaderValue::try_from(value)) {
            headers.insert(name, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        convert::Infallible,
        future::{Ready, ready},
        sync::atomic::{AtomicU64, Ordering::Relaxed},
    };

    use futures_util::FutureExt as _;

    use super::*;
    use crate::Clock;

    const RULES: &str = "domain: api\ndescriptors:\n- key: user\n  rate_limit: {unit: minute, requests_per_unit: 2}\n";
    const HEADERS: [&str; 3] = ["ratelimit-policy", "ratelimit", "retry-after"];

    /// A service that counts its calls and responds with the path of the request. It is not ready if `busy` is set.
    #[derive(Clone, Default)]
    struct Echo {
        calls: Arc<AtomicU64>,
        busy: bool,
    }

    impl Service<Request<&'static str>> for Echo {
        type Response = Response<String>;
        type Error = Infallible;
        type Future = Ready<Result<Response<String>, Infallible>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            if self.busy { Poll::Pending } else { Poll::Ready(Ok(())) }
        }

        fn call(&mut self, request: Request<&'static str>) -> Self::Future {
            self.calls.fetch_add(1, Relaxed);
            ready(Ok(Response::new(format!("{} {}", request.uri().path(), request.body()))))
        }
    }

    fn descriptor(head: &Parts) -> Option<(&'static str, Vec<(&'static str, String)>)> {
        let user = head.headers.get("x-user")?.to_str().ok()?;
        Some(("api", vec![("user", user.to_owned())]))
    }

    fn request(user: Option<&str>) -> Request<&'static str> {
        let request = Request::post("/orders");
        let request = if let Some(user) = user { request.header("x-user", user) } else { request };
        request.body("tea").unwrap()
    }

    /// Returns the status, the rate limit headers and the body of a response, which must be there at once.
    fn call(
        service: &mut impl Service<Request<&'static str>, Response = Response<String>, Error = Infallible>,
        user: Option<&str>,
    ) -> (u16, [Option<String>; 3], String) {
        let Ok(response) = service.call(request(user)).now_or_never().unwrap();
        let header = |name| Some(response.headers().get(name)?.to_str().unwrap().to_owned());
        (response.status().as_u16(), HEADERS.map(header), response.into_body())
    }

    #[test]
    fn allowed_responses_get_the_limits_and_denied_requests_do_not_reach_the_service() {
        let time = Arc::new(AtomicU64::new(60_000_000 * 1_000_000 + 15_000_000));
        let limiter = RateLimiter::builder().clock(Clock::Manual(Arc::clone(&time))).rules(RULES).unwrap();
        let echo = Echo::default();
        let mut service = RateLimitLayer::new(limiter, descriptor).layer(echo.clone());
        let mut respond = |user| call(&mut service, user);
        let headers = |values: [&str; 3]| values.map(|value| Some(value.to_owned()).filter(|value| !value.is_empty()));
        let policy = "\"user\";q=2;w=60";
        let allowed = |limit| (200, headers([policy, limit, ""]), "/orders tea".to_owned());

        assert_eq!(respond(Some("bob")), allowed("\"user\";r=1;t=45"));
        assert_eq!(respond(Some("bob")), allowed("\"user\";r=0;t=45"));
        let denied = (429, headers([policy, "\"user\";r=0;t=45", "45"]), String::new());
        assert_eq!(respond(Some("bob")), denied);
        assert_eq!(echo.calls.load(Relaxed), 2);
        assert_eq!(respond(Some("eve")), allowed("\"user\";r=1;t=45"));
        time.fetch_add(45_000_000, Relaxed);
        assert_eq!(respond(Some("bob")), allowed("\"user\";r=1;t=60"));
    }

    #[test]
    fn requests_without_a_descriptor_or_a_rule_pass_without_headers() {
        let limiter = RateLimiter::from_rules(RULES).unwrap();
        let mut service = RateLimitLayer::new(limiter.clone(), descriptor).layer(Echo::default());
        let passed = (200, [None, None, None], "/orders tea".to_owned());
        for _ in 0..3 {
            assert_eq!(call(&mut service, None), passed);
        }
        assert_eq!(limiter.usage().counters, 0);
        let by_path = |head: &Parts| Some(("api", vec![("path", head.uri.path().to_owned())]));
        assert_eq!(call(&mut RateLimitLayer::new(limiter, by_path).layer(Echo::default()), Some("bob")), passed);
    }

    #[test]
    fn clones_of_a_service_share_the_limit() {
        let layer = RateLimitLayer::new(RateLimiter::from_rules(&RULES.replace("minute", "year")).unwrap(), descriptor);
        let mut services = [layer.layer(Echo::default()), layer.clone().layer(Echo::default())];
        let statuses = [0, 1, 0].map(|service: usize| call(&mut services[service].clone(), Some("bob")).0);
        assert_eq!(statuses, [200, 200, 429]);
        assert_eq!(call(&mut services[1], Some("bob")).0, 429);
    }

    #[test]
    fn a_service_is_ready_when_its_inner_service_is() {
        let layer = RateLimitLayer::new(RateLimiter::from_rules(RULES).unwrap(), descriptor);
        let is_ready = |busy| {
            layer
                .layer(Echo { busy, ..Echo::default() })
                .poll_ready(&mut Context::from_waker(std::task::Waker::noop()))
                .is_ready()
        };
        assert_eq!([false, true].map(is_ready), [true, false]);
    }
}
