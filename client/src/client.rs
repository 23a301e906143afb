//! The way of a check: deny cache, an endpoint or two, and in any case an answer.

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
    builder::{Builder, OnError},
    check_request::{CheckRequest, Descriptor, Feedback, Sample},
    deny_cache::{Cached, DenyCache, Lookup},
    endpoint::CallTimes,
    grants::{Grants, UnspentGrant},
    routing::{Endpoints, Routing},
    stream_connection::StreamError,
    telemetry::Telemetry,
    verdict::{Failure, Verdict},
};

/// Asks the rate limit service. Cheap to clone; all clones share connections and caches.
#[derive(Clone)]
pub struct Client {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) domain: String,
    pub(crate) deadline: Duration,
    pub(crate) on_error: OnError,
    pub(crate) routing: Routing,
    pub(crate) denials: Option<DenyCache>,
    pub(crate) grants: Grants,
    pub(crate) began: Instant,
    pub(crate) telemetry: Telemetry,
    pub(crate) endpoints: RwLock<Arc<Endpoints>>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let endpoints: Vec<_> =
            self.inner.endpoints().all().iter().map(|endpoint| Arc::clone(&endpoint.name)).collect();
        f.debug_struct("Client").field("domain", &self.inner.domain).field("endpoints", &endpoints).finish()
    }
}

impl Client {
    /// Of the service at `http://host:port`, or `https://host:port`.
    pub fn builder(address: impl Into<String>) -> Builder {
        Builder::new(address.into())
    }

    /// May a request pass that counts as these?
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), sluicegate_client::BuildError> {
    /// use sluicegate_client::{Client, descriptor};
    ///
    /// let limiter = Client::builder("http://127.0.0.1:8081").domain("api").connect_lazy()?;
    /// let verdict = limiter.check([descriptor! { "user" => "alice", "api" => "/v1/charges" }]).hits(3).await;
    /// if !verdict.allowed() {
    ///     println!("come back in {:?}", verdict.retry_after());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[inline]
    pub fn check<'c>(&'c self, descriptors: impl IntoIterator<Item = Descriptor<'c>>) -> Check<'c> {
        let domain = Cow::Borrowed(self.inner.domain.as_str());
        let ask = CheckRequest { domain, descriptors: SmallVec::new(), hits: 0, traceparent: None, holds: Vec::new() };
        let mut check = Check { inner: &self.inner, ask, deadline: self.inner.deadline };
        // Where they stay: a check is large, and is not moved for nothing.
        descriptors.into_iter().for_each(|descriptor| check.ask.descriptors.push(descriptor));
        check
    }

    /// Gives back what is left of hits that the service has granted in advance, for instance before the process ends. Without
    /// it they are lost to others until their life is over.
    pub async fn return_grants(&self) {
        for UnspentGrant { domain, descriptor, left, hold } in self.inner.grants.take_all(self.inner.began.elapsed()) {
            let descriptor = descriptor.borrowed();
            let told = self.inner.grants.are_told();
            let descriptor = if told { descriptor.hits(0) } else { descriptor.hits(left).refund() };
            let mut check = self.check([descriptor]).domain(domain);
            check.ask.holds.extend(told.then_some(hold));
            let _ = check.await;
        }
    }

    /// The addresses that are known now.
    #[must_use]
    pub fn endpoints(&self) -> Vec<Arc<str>> {
        self.inner.endpoints().all().iter().map(|endpoint| Arc::clone(&endpoint.name)).collect()
    }
}

/// A question that is asked when it is awaited. Dropped before, it leaves nothing behind.
#[must_use = "nothing is asked before it is awaited"]
pub struct Check<'c> {
    inner: &'c Inner,
    ask: CheckRequest<'c>,
    deadline: Duration,
}

impl<'c> Check<'c> {
    /// What the request costs, for descriptors that do not say; 1 by default.
    pub fn hits(mut self, hits: u32) -> Self {
        self.ask.hits = hits;
        self
    }

    /// Against other rules than the client's.
    pub fn domain(mut self, domain: impl Into<Cow<'c, str>>) -> Self {
        self.ask.domain = domain.into();
        self
    }

    /// The answer is wanted sooner than the client's deadline. A later time changes nothing.
    pub fn within(mut self, deadline: Duration) -> Self {
        self.deadline = self.deadline.min(deadline);
        self
    }

    /// The W3C trace context of the request: the service's span is part of its trace.
    pub fn traceparent(mut self, traceparent: impl Into<Cow<'c, str>>) -> Self {
        self.ask.traceparent = Some(traceparent.into());
        self
    }

    /// What is said of each descriptor's slot, which is given back.
    pub(crate) fn sample(mut self, sample: Option<Sample>) -> Self {
        if let Some(sample) = sample {
            let hold = Feedback { sample: Some(sample), ..Feedback::default() };
            self.ask.holds = self.ask.descriptors.iter().map(|_| hold.clone()).collect();
        }
        self
    }

    /// The same for callers who decide by themselves what a failure means.
    ///
    /// # Errors
    /// When the service did not answer.
    pub async fn strict(self) -> Result<Verdict, Failure> {
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
    fn into_future(self) -> CheckFuture<'c> {
        let now = self.inner.began.elapsed();
        // Where it is: a check that needs no call is not moved for nothing.
        let question = match self.inner.known(&self.ask, now) {
            Cached::Answer(verdict) => {
                self.inner.telemetry.answered(&verdict, || Duration::ZERO);
                return CheckFuture(Step::Known(verdict));
            }
            Cached::Nothing(question) => question,
        };
        let Check { inner, mut ask, deadline } = self;
        if !inner.grants.is_empty() && ask.holds.is_empty() {
            ask.holds.extend(inner.grants.holds(&ask, now));
        }
        CheckFuture(Step::Asking(Box::pin(async move { inner.ask(&ask, now, deadline, question).await })))
    }
}

/// The answer to a [`Check`] in the making.
#[must_use = "nothing is asked before it is awaited"]
pub struct CheckFuture<'c>(Step<'c>);

#[allow(clippy::large_enum_variant, reason = "an answer from the cache is to need no allocation")]
enum Step<'c> {
    Known(Verdict),
    Asking(Pin<Box<dyn Future<Output = Verdict> + Send + 'c>>),
    Done,
}

impl Future for CheckFuture<'_> {
    type Output = Verdict;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Verdict> {
        if let Step::Asking(asking) = &mut self.0 {
            return asking.as_mut().poll(context);
        }
        match std::mem::replace(&mut self.0, Step::Done) {
            Step::Known(verdict) => Poll::Ready(verdict),
            // As every future that is polled after its end.
            Step::Asking(_) | Step::Done => Poll::Pending,
        }
    }
}

impl Inner {
    pub(crate) fn endpoints(&self) -> Arc<Endpoints> {
        Arc::clone(&self.endpoints.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// What needs no call.
    fn known(&self, ask: &CheckRequest<'_>, now: Duration) -> Cached {
        if self.denials.is_none() && self.grants.is_empty() {
            return Cached::Nothing(Lookup::default());
        }
        let identities = ask.identities().collect();
        if !self.grants.is_empty()
            && let Some(verdict) = self.grants.spend(ask, &identities, now)
        {
            return Cached::Answer(verdict);
        }
        let denials = self.denials.as_ref();
        denials.map_or(Cached::Nothing(Lookup::default()), |denials| denials.get(ask, &identities, now))
    }

    async fn ask(&self, ask: &CheckRequest<'_>, now: Duration, deadline: Duration, question: Lookup) -> Verdict {
        let asked = self.began + now;
        // For ever is a day.
        let end = asked.checked_add(deadline - early(deadline)).unwrap_or(asked + Duration::from_secs(86_400));
        let clock = CallTimes { began: self.began, asked: now, deadline: end, allowed: deadline };
        let answer = self.ask_someone(ask, &clock).await;
        // Also when it is not known whether it came about.
        if let Some(denials) = self.denials.as_ref().filter(|_| ask.gives_back()) {
            denials.refunded(ask);
        }
        match &answer {
            Ok(verdict) => {
                if let Some(denials) = &self.denials {
                    denials.put(ask, verdict, question, now);
                }
                self.grants.keep(ask, verdict, now);
            }
            Err(_) => self.grants.answered(ask),
        }
        let verdict = answer.unwrap_or_else(|failure| Verdict::fallback(self.on_error == OnError::Allow, failure));
        self.telemetry.answered(&verdict, || self.began.elapsed().saturating_sub(now));
        verdict
    }

    /// It is asked a second time only if it surely did not run: at another endpoint, or on another connection.
    async fn ask_someone(&self, ask: &CheckRequest<'_>, clock: &CallTimes) -> Result<Verdict, Failure> {
        let endpoints = self.endpoints();
        let choose = |but, now| endpoints.choose(&self.routing, ask, now, but);
        let first = choose(None, clock.asked).ok_or(Failure::Unreachable)?;
        let (failure, but) = match first.ask(ask, clock).await {
            Ok(verdict) => return Ok(verdict),
            // The same one has other connections.
            Err(StreamError::Ended) => (Failure::Unreachable, None),
            Err(StreamError::NotRun(failure)) => (failure, Some(first)),
            Err(StreamError::NoStream) => (Failure::Unreachable, Some(first)),
            Err(StreamError::Perhaps(failure) | StreamError::Refused(failure)) => return Err(failure),
        };
        let second = choose(but, clock.now());
        // Boxed, as all that is rare: a check that waits is to be small.
        match Box::pin(second.ok_or(failure)?.ask(ask, clock)).await {
            Ok(verdict) => Ok(verdict),
            Err(StreamError::NoStream | StreamError::Ended) => Err(Failure::Unreachable),
            Err(StreamError::NotRun(failure) | StreamError::Perhaps(failure) | StreamError::Refused(failure)) => {
                Err(failure)
            }
        }
    }
}

/// Tokio's timers go off up to two milliseconds late: of a deadline that is long enough one is left for that.
fn early(deadline: Duration) -> Duration {
    (deadline / 10).min(Duration::from_millis(1))
}

impl std::fmt::Debug for Check<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Check")
            .field("domain", &self.ask.domain)
            .field("descriptors", &self.ask.descriptors.as_slice())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_is_kept_by_a_timer_that_is_early() {
        for (deadline, expected) in [(0, 0), (100, 10), (5_000, 500), (10_000, 1_000), (60_000_000, 1_000)] {
            assert_eq!(early(Duration::from_micros(deadline)), Duration::from_micros(expected));
        }
    }
}
