//! [`Client`] and [`Check`]: a check is answered from grants, from the deny cache, by an endpoint (of which at most two
//! are called), or by the fallback.

use std::{
    borrow::Cow,
    pin::Pin,
    sync::{Arc, PoisonError, RwLock},
    task::{Context, Poll},
    time::Duration,
};

use smallvec::SmallVec;
use tokio::time::Instant;

use crate::{
    check_request::{CheckRequest, Descriptor, Feedback, Sample},
    deny_cache::{Cached, DenyCache, Lookup},
    endpoint::CallTimes,
    grants::{Grants, UnspentGrant},
    on_error::OnError,
    routing::{Endpoints, Routing},
    stream_connection::StreamError,
    telemetry::Telemetry,
    verdict::{Failure, Verdict},
    wait_queue::{Costs, Next, QueueKey, WaitQueues, wait_for_delay},
};

/// Client of a rate limit service.
///
/// A client is cheap to clone. All clones share connections, the deny cache, grants and circuit breakers.
///
/// # Examples
///
/// ```no_run
/// use std::time::Duration;
///
/// use sluicegate_client::{Client, OnError, descriptor};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), sluicegate_client::BuildError> {
/// let client = Client::builder("http://ratelimit.internal:8081")
///     .domain("api")
///     .timeout(Duration::from_millis(10))
///     .on_error(OnError::Allow)
///     .connect_lazy()?;
///
/// let verdict = client.check([descriptor! { "user" => "alice" }]).await;
/// println!("allowed: {}, decided by {:?}", verdict.allowed(), verdict.decided_by());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Client {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) domain: String,
    pub(crate) timeout: Duration,
    pub(crate) on_error: OnError,
    pub(crate) routing: Routing,
    pub(crate) deny_cache: Option<DenyCache>,
    pub(crate) grants: Grants,
    pub(crate) wait_queues: WaitQueues,
    pub(crate) started_at: Instant,
    pub(crate) telemetry: Telemetry,
    pub(crate) endpoints: RwLock<Arc<Endpoints>>,
    /// Answers all checks instead of the endpoints.
    #[cfg(feature = "test-util")]
    pub(crate) fake: Option<crate::testing::FakeService>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let endpoints: Vec<_> =
            self.inner.endpoints().all().iter().map(|endpoint| Arc::clone(&endpoint.name)).collect();
        f.debug_struct("Client").field("domain", &self.inner.domain).field("endpoints", &endpoints).finish()
    }
}

impl Client {
    /// Checks a request against the limits of `descriptors`, and takes its hits from each limit that allows it. In
    /// domains with `charge: all`, takes no hits if any limit denies the request.
    ///
    /// Nothing is sent until the returned [`Check`] is awaited. The result is always a [`Verdict`]: if no endpoint
    /// answers within [`Builder::timeout`](crate::Builder::timeout), [`Builder::on_error`](crate::Builder::on_error)
    /// decides and [`Verdict::failure`] contains the reason.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use sluicegate_client::{Client, descriptor};
    ///
    /// # async fn example(client: Client) {
    /// let verdict = client.check([descriptor! { "user" => "alice", "api" => "/v1/charges" }]).hits(3).await;
    /// if !verdict.allowed() {
    ///     println!("retry after {:?}", verdict.retry_after());
    /// }
    /// # }
    /// ```
    #[inline]
    pub fn check<'c>(&'c self, descriptors: impl IntoIterator<Item = Descriptor<'c>>) -> Check<'c> {
        let domain = Cow::Borrowed(self.inner.domain.as_str());
        let request =
            CheckRequest { domain, descriptors: SmallVec::new(), hits: 0, traceparent: None, feedback: Vec::new() };
        let mut check = Check { inner: &self.inner, request, timeout: self.inner.timeout, max_wait: Duration::ZERO };
        // Descriptors are written in place, because a check is large and moving it costs time.
        descriptors.into_iter().for_each(|descriptor| check.request.descriptors.push(descriptor));
        check
    }

    /// Returns all unused granted hits to the service, for instance before the process exits.
    ///
    /// Without this call, unused hits are unavailable to other callers until their grants expire. See
    /// [`Builder::request_grants`](crate::Builder::request_grants).
    pub async fn return_grants(&self) {
        let unspent = self.inner.grants.take_all(self.inner.started_at.elapsed());
        for UnspentGrant { domain, descriptor, remaining, feedback } in unspent {
            let descriptor = descriptor.borrowed();
            let reports_usage = self.inner.grants.reports_usage();
            let descriptor = if reports_usage { descriptor.hits(0) } else { descriptor.hits(remaining).refund() };
            let mut check = self.check([descriptor]).domain(domain);
            if reports_usage {
                check.request.feedback.push(feedback);
            }
            let _ = check.await;
        }
    }

    /// Returns the addresses (`host:port`) of the endpoints currently in use.
    #[must_use]
    pub fn endpoints(&self) -> Vec<Arc<str>> {
        self.inner.endpoints().all().iter().map(|endpoint| Arc::clone(&endpoint.name)).collect()
    }
}

/// A check that is sent when it is awaited. Created by [`Client::check`].
///
/// A `Check` that is dropped without being awaited has no effect.
#[must_use = "a check does nothing unless awaited"]
pub struct Check<'c> {
    inner: &'c Inner,
    request: CheckRequest<'c>,
    timeout: Duration,
    /// Zero if the caller does not wait.
    max_wait: Duration,
}

impl<'c> Check<'c> {
    /// Sets the cost of the request for descriptors without their own [`Descriptor::hits`]; 1 by default.
    pub fn hits(mut self, hits: u32) -> Self {
        self.request.hits = hits;
        self
    }

    /// Sets the domain of this check, instead of [`Builder::domain`](crate::Builder::domain).
    pub fn domain(mut self, domain: impl Into<Cow<'c, str>>) -> Self {
        self.request.domain = domain.into();
        self
    }

    /// Sets a shorter timeout for this check. A timeout longer than [`Builder::timeout`](crate::Builder::timeout) has
    /// no effect.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = self.timeout.min(timeout);
        self
    }

    /// Waits at most `max_wait` until the request is allowed, instead of returning a denial immediately. Zero, the default,
    /// does not wait.
    ///
    /// - **When**: a denied request is checked again when its retry-after has passed. A denial is returned immediately if
    ///   its retry-after ends after the maximum wait, or if the request can never be allowed. A concurrency limit is
    ///   checked repeatedly, at intervals from 10 ms to 1 s, because slots can be released at any time.
    /// - **Order**: the waiters of one client (with its clones) for the same domain and descriptors are served in the
    ///   order of their arrival, also if their costs differ: a small request waits behind a large one. Only as many of
    ///   them call the service as have a chance; usually that is the first one. Waiters of other processes, and checks
    ///   that do not wait, can overtake them.
    /// - **Delay**: the [`Verdict::delay`] of an allowed request is awaited, too, and is zero afterwards. If it ends after
    ///   the maximum wait, the verdict is returned immediately, and contains the delay.
    /// - **Refunds** by this client wake the first waiter of the same descriptors.
    /// - **Failures** of the service are not waited for: [`Builder::on_error`](crate::Builder::on_error) decides.
    /// - **Too many waiters**: above [`Builder::max_waiters`](crate::Builder::max_waiters), a request does not wait.
    ///
    /// The last call is sent within the maximum wait and can take its own [`timeout`](Self::timeout). A future that is
    /// dropped leaves the queue. If its call is in progress then, its hits may be taken, as for every check; if it awaits
    /// its delay, they are taken.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use std::time::Duration;
    ///
    /// use sluicegate_client::{Client, descriptor};
    ///
    /// # async fn example(client: Client) {
    /// let verdict = client.check([descriptor! { "mail_host" => "example.com" }]).max_wait(Duration::from_secs(5)).await;
    /// if verdict.allowed() {
    ///     // Send the mail.
    /// }
    /// # }
    /// ```
    pub fn max_wait(mut self, max_wait: Duration) -> Self {
        self.max_wait = max_wait;
        self
    }

    /// Returns the key of the wait queue of the descriptors.
    pub(crate) fn queue_key(&self, is_permit: bool) -> QueueKey {
        QueueKey { identities: self.request.identities().collect(), is_permit }
    }

    /// Returns the costs of the descriptors.
    pub(crate) fn costs(&self) -> Costs {
        self.request.costs().collect()
    }

    /// Checks until the request is allowed, or waiting has no purpose.
    async fn wait(self) -> Verdict {
        let joined = self.inner.wait_queues.join(self.queue_key(false), self.costs(), self.max_wait);
        let Some(place) = joined else {
            return self.once().await;
        };
        let waiter = self.inner.telemetry.waiter();
        let verdict = loop {
            if let Some(denial) = place.turn().await {
                self.inner.telemetry.record_check(&denial, || Duration::ZERO);
                break *denial;
            }
            let mut verdict = self.once().await;
            if place.record(&verdict) == Next::Wait {
                continue;
            }
            wait_for_delay(&mut verdict, place.deadline()).await;
            break verdict;
        };
        waiter.finish(verdict.allowed());
        verdict
    }

    /// Returns the same check without waiting.
    fn once(&self) -> Check<'c> {
        Check { inner: self.inner, request: self.request.clone(), timeout: self.timeout, max_wait: Duration::ZERO }
    }

    /// Sets the W3C trace context of the request. The service's span becomes part of that trace.
    pub fn traceparent(mut self, traceparent: impl Into<Cow<'c, str>>) -> Self {
        self.request.traceparent = Some(traceparent.into());
        self
    }

    /// Reports `sample` for the slot of each descriptor, which this check releases.
    pub(crate) fn sample(mut self, sample: Option<Sample>) -> Self {
        if let Some(sample) = sample {
            let feedback = Feedback { sample: Some(sample), ..Feedback::default() };
            self.request.feedback = self.request.descriptors.iter().map(|_| feedback.clone()).collect();
        }
        self
    }

    /// Sends the check and returns an error if the service did not decide, instead of a fallback verdict.
    ///
    /// # Errors
    ///
    /// Returns the [`Failure`] if no endpoint decided the check within the timeout.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use sluicegate_client::{Client, Failure, descriptor};
    ///
    /// # async fn example(client: Client) -> Result<(), Failure> {
    /// let verdict = client.check([descriptor! { "user" => "alice" }]).without_fallback().await?;
    /// println!("remaining: {:?}", verdict.remaining());
    /// # Ok(())
    /// # }
    /// ```
    pub async fn without_fallback(self) -> Result<Verdict, Failure> {
        let verdict = self.await;
        match verdict.failure {
            Some(failure) => Err(*failure),
            None => Ok(verdict),
        }
    }
}

impl<'c> IntoFuture for Check<'c> {
    type Output = Verdict;
    type IntoFuture = CheckFuture<'c>;

    #[inline]
    fn into_future(mut self) -> CheckFuture<'c> {
        if !self.max_wait.is_zero() {
            return CheckFuture(State::Calling(Box::pin(async move { Box::new(self.wait().await) })));
        }
        let now = self.inner.started_at.elapsed();
        // The request is borrowed, because moving a check that needs no call would cost time.
        let lookup = match self.inner.answer_locally(&self.request, now) {
            Cached::Hit(verdict) => {
                self.inner.telemetry.record_check(&verdict, || Duration::ZERO);
                return CheckFuture(State::Ready(verdict));
            }
            Cached::Miss(lookup) => lookup,
        };
        let grants = &self.inner.grants;
        if !grants.is_empty() && self.request.feedback.is_empty() {
            self.request.feedback = grants.feedback(&self.request, now);
        }
        let call = async move { self.inner.check(&self.request, now, self.timeout, lookup).await };
        CheckFuture(State::Calling(Box::pin(call)))
    }
}

/// Future of a [`Check`]'s verdict.
#[must_use = "futures do nothing unless awaited"]
pub struct CheckFuture<'c>(State<'c>);

#[allow(clippy::large_enum_variant, reason = "a cached verdict must not need an allocation")]
enum State<'c> {
    Ready(Verdict),
    Calling(Pin<Box<dyn Future<Output = Box<Verdict>> + Send + 'c>>),
    Done,
}

impl Future for CheckFuture<'_> {
    type Output = Verdict;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Verdict> {
        if let State::Calling(call) = &mut self.0 {
            return call.as_mut().poll(context).map(|verdict| *verdict);
        }
        match std::mem::replace(&mut self.0, State::Done) {
            State::Ready(verdict) => Poll::Ready(verdict),
            // The future was polled after completion, for which any result is permitted.
            State::Calling(_) | State::Done => Poll::Pending,
        }
    }
}

impl Inner {
    pub(crate) fn endpoints(&self) -> Arc<Endpoints> {
        Arc::clone(&self.endpoints.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Answers the request from grants or the deny cache, without a call to the service.
    fn answer_locally(&self, request: &CheckRequest<'_>, now: Duration) -> Cached {
        if self.deny_cache.is_none() && self.grants.is_empty() {
            return Cached::Miss(Lookup::default());
        }
        let identities = request.identities().collect();
        if !self.grants.is_empty()
            && let Some(verdict) = self.grants.spend(request, &identities, now)
        {
            return Cached::Hit(verdict);
        }
        match &self.deny_cache {
            Some(cache) => cache.get(request, &identities, now),
            None => Cached::Miss(Lookup::default()),
        }
    }

    async fn check(
        &self,
        request: &CheckRequest<'_>,
        now: Duration,
        timeout: Duration,
        lookup: Lookup,
    ) -> Box<Verdict> {
        let started = self.started_at + now;
        // A timeout that the clock cannot represent counts as one day.
        let deadline =
            started.checked_add(timeout - timer_margin(timeout)).unwrap_or(started + Duration::from_secs(86_400));
        let times = CallTimes { client_started_at: self.started_at, started: now, deadline, timeout };
        let result = self.call_endpoints(request, &times).await;
        // A failed call may have executed its refund, so it invalidates cached denials too.
        if request.has_refund() {
            if let Some(deny_cache) = &self.deny_cache {
                deny_cache.record_refund(request);
            }
            self.wait_queues.wake_first(&request.identities().collect());
        }
        match &result {
            Ok(verdict) => {
                self.telemetry.log_unmatched(request, verdict);
                if let Some(deny_cache) = &self.deny_cache {
                    deny_cache.insert(request, verdict, lookup, now);
                }
                self.grants.store(request, verdict, now);
            }
            Err(_) => self.grants.request_finished(request),
        }
        let verdict = match result {
            Ok(verdict) => verdict,
            Err(failure) => Box::new(Verdict::fallback(self.on_error == OnError::Allow, failure)),
        };
        self.telemetry.record_check(&verdict, || self.started_at.elapsed().saturating_sub(now));
        verdict
    }

    /// Calls an endpoint, and a second time only if the first call certainly did not execute the check: another
    /// endpoint, or the same one on another connection.
    async fn call_endpoints(&self, request: &CheckRequest<'_>, times: &CallTimes) -> Result<Box<Verdict>, Failure> {
        #[cfg(feature = "test-util")]
        if let Some(fake) = &self.fake {
            return fake.check(request).await;
        }
        let endpoints = self.endpoints();
        let first = endpoints.choose(&self.routing, request, times.started, None).ok_or(Failure::Unreachable)?;
        let (failure, excluded) = match first.check(request, times).await {
            Ok(verdict) => return Ok(verdict),
            // The endpoint closed only this connection in order, so it is not excluded.
            Err(StreamError::StreamEnded) => (Failure::Unreachable, None),
            Err(StreamError::NotExecuted(failure)) => (failure, Some(first)),
            Err(StreamError::Unsupported) => (Failure::Unreachable, Some(first)),
            Err(StreamError::MaybeExecuted(failure) | StreamError::Rejected(failure)) => return Err(failure),
        };
        let second = endpoints.choose(&self.routing, request, times.now(), excluded).ok_or(failure)?;
        // The second call is rare, so it is boxed: a waiting check must stay small.
        match Box::pin(second.check(request, times)).await {
            Ok(verdict) => Ok(verdict),
            Err(StreamError::Unsupported | StreamError::StreamEnded) => Err(Failure::Unreachable),
            Err(
                StreamError::NotExecuted(failure)
                | StreamError::MaybeExecuted(failure)
                | StreamError::Rejected(failure),
            ) => Err(failure),
        }
    }
}

/// Returns how much earlier than the timeout the timer is set: a tenth of it, at most 1 ms.
///
/// Tokio's timers have a resolution of 1 ms and fire late rather than early.
fn timer_margin(timeout: Duration) -> Duration {
    (timeout / 10).min(Duration::from_millis(1))
}

impl std::fmt::Debug for Check<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Check")
            .field("domain", &self.request.domain)
            .field("descriptors", &self.request.descriptors.as_slice())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::descriptor;

    #[test]
    fn the_timer_is_set_a_tenth_of_the_timeout_early_and_at_most_a_millisecond() {
        for (timeout, expected) in [(0, 0), (100, 10), (5_000, 500), (10_000, 1_000), (60_000_000, 1_000)] {
            assert_eq!(timer_margin(Duration::from_micros(timeout)), Duration::from_micros(expected));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_check_without_a_response_ends_within_its_timeout() {
        // The listener never accepts the connection.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let timeout = Duration::from_millis(100);
        let client = Client::builder(address).timeout(timeout).connect_lazy().unwrap();
        let start = Instant::now();
        let verdict = client.check([descriptor! { "user" => "alice" }]).await;
        assert_eq!(verdict.failure(), Some(&Failure::Timeout(timeout)));
        assert!(start.elapsed() <= timeout, "{:?}", start.elapsed());
    }

    #[tokio::test]
    async fn debug_output_contains_the_domain_the_endpoints_and_the_descriptors() {
        let client = Client::builder("http://127.0.0.1:1").domain("api").connect_lazy().unwrap();
        assert_eq!(format!("{client:?}"), r#"Client { domain: "api", endpoints: ["127.0.0.1:1"] }"#);
        let check = format!("{:?}", client.check([descriptor! { "user" => "alice" }]));
        assert!(check.starts_with(r#"Check { domain: "api", descriptors: ["#) && check.contains("alice"), "{check}");
    }
}
