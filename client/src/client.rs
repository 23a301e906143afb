//! The way of a check: deny cache, an endpoint or two, and in any case an answer.

use std::{
    borrow::Cow,
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, PoisonError, RwLock, Weak},
    task::{Context, Poll},
    time::Duration,
};

use tokio::time::Instant;
use tonic::{
    metadata::{MetadataMap, MetadataValue},
    transport,
};

use crate::{
    ask::{Ask, Descriptor},
    deny_cache::{DenyCache, Known, Question},
    endpoint::{Clock, Endpoint},
    grants::Grants,
    lane::Lost,
    routing::{Endpoints, Routing},
    telemetry::Telemetry,
    verdict::{Failure, Verdict},
};

/// What a request gets that the service does not decide.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnError {
    /// It passes: an outage of the limiter is not one of the gateway.
    #[default]
    Allow,
    /// It is refused.
    Deny,
}

/// What cannot be a client.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// The address of an endpoint, or what belongs to it.
    #[error("{address:?} cannot be the address of a rate limit service")]
    Address {
        /// As it was given.
        address: String,
        /// What is wrong with it.
        source: transport::Error,
    },
    /// The bearer token has letters that a header cannot have.
    #[error("this cannot be a bearer token")]
    Token,
}

type Configure = dyn Fn(transport::Endpoint) -> Result<transport::Endpoint, transport::Error> + Send + Sync;

/// How to make a [`Client`].
#[derive(Clone)]
#[must_use]
pub struct Builder {
    addresses: Vec<String>,
    domain: String,
    deadline: Duration,
    on_error: OnError,
    routing: Routing,
    denials: usize,
    coalesces: bool,
    resolves: Option<Duration>,
    token: Option<String>,
    #[cfg(feature = "opentelemetry")]
    meter: Option<opentelemetry::metrics::Meter>,
    configure: Arc<Configure>,
}

impl Builder {
    fn new(address: String) -> Self {
        Self {
            addresses: vec![address],
            domain: String::new(),
            deadline: Duration::from_millis(20),
            on_error: OnError::Allow,
            routing: Routing::default(),
            denials: 10_000,
            coalesces: true,
            resolves: None,
            token: None,
            #[cfg(feature = "opentelemetry")]
            meter: None,
            configure: Arc::new(Ok),
        }
    }

    /// One more instance of the service.
    pub fn endpoint(mut self, address: impl Into<String>) -> Self {
        self.addresses.push(address.into());
        self
    }

    /// Every address that the endpoints' names have is an instance, and so often it is looked whether they are still the
    /// same.
    pub fn resolve_every(mut self, pause: Duration) -> Self {
        self.resolves = Some(pause.max(Duration::from_millis(10)));
        self
    }

    /// The rules that are asked when a check does not say.
    pub fn domain(mut self, domain: impl Into<String>) -> Self {
        self.domain = domain.into();
        self
    }

    /// A check has an answer after so long, whatever happens; 20 ms by default.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// What becomes of requests that the service does not decide; they pass by default.
    pub fn on_error(mut self, on_error: OnError) -> Self {
        self.on_error = on_error;
        self
    }

    /// How checks are spread over several instances; by their descriptors by default.
    pub fn routing(mut self, routing: Routing) -> Self {
        self.routing = routing;
        self
    }

    /// Refusals that are remembered at most; 10,000 by default, and none with 0.
    pub fn deny_cache(mut self, refusals: usize) -> Self {
        self.denials = refusals;
        self
    }

    /// Whether checks that are ready at the same moment travel together, where the service can do that; they do by default.
    pub fn coalesce(mut self, coalesces: bool) -> Self {
        self.coalesces = coalesces;
        self
    }

    /// A token that goes with every call, as `authorization: Bearer …`.
    pub fn bearer_token(mut self, token: impl Into<String>) -> Self {
        self.token = Some(token.into());
        self
    }

    /// Counts checks by who answered them (`sluicegate.client.checks`), and measures them (`sluicegate.client.duration`).
    #[cfg(feature = "opentelemetry")]
    pub fn meter(mut self, meter: opentelemetry::metrics::Meter) -> Self {
        self.meter = Some(meter);
        self
    }

    /// What else belongs to the connections: its own time-outs, or TLS, with the feature `tls` and an `https://` address.
    ///
    /// ```
    /// # #[cfg(feature = "tls")]
    /// # fn example(ca: &str, certificate: &str, key: &str) -> sluicegate_client::Builder {
    /// use sluicegate_client::{
    ///     Client,
    ///     tonic::transport::{Certificate, ClientTlsConfig, Identity},
    /// };
    ///
    /// let tls = ClientTlsConfig::new()
    ///     .ca_certificate(Certificate::from_pem(ca))
    ///     .identity(Identity::from_pem(certificate, key));
    /// Client::builder("https://ratelimit.internal:8081").configure(move |endpoint| endpoint.tls_config(tls.clone()))
    /// # }
    /// ```
    pub fn configure(
        mut self,
        configure: impl Fn(transport::Endpoint) -> Result<transport::Endpoint, transport::Error> + Send + Sync + 'static,
    ) -> Self {
        self.configure = Arc::new(configure);
        self
    }

    /// The client. It connects when it is asked, in the background, and again whenever it has to.
    ///
    /// # Errors
    /// When an address or the token cannot be one.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn connect_lazy(self) -> Result<Client, BuildError> {
        let mut headers = MetadataMap::new();
        if let Some(token) = &self.token {
            let mut value = MetadataValue::try_from(format!("Bearer {token}")).map_err(|_| BuildError::Token)?;
            value.set_sensitive(true);
            headers.insert("authorization", value);
        }
        let dialer = Dialer { configure: self.configure, headers, coalesces: self.coalesces };
        let all = self.addresses.iter().map(|address| dialer.dial(address, None)).collect::<Result<Vec<_>, _>>()?;
        let inner = Arc::new(Inner {
            domain: self.domain,
            deadline: self.deadline,
            on_error: self.on_error,
            routing: self.routing,
            grants: Grants::default(),
            denials: (self.denials > 0).then(|| DenyCache::new(self.denials)),
            began: Instant::now(),
            #[cfg(feature = "opentelemetry")]
            telemetry: Telemetry::new(self.meter.as_ref()),
            #[cfg(not(feature = "opentelemetry"))]
            telemetry: Telemetry::default(),
            endpoints: RwLock::new(Arc::new(Endpoints::new(all))),
        });
        if let Some(pause) = self.resolves {
            tokio::spawn(resolve(Arc::downgrade(&inner), dialer, self.addresses, pause));
        }
        Ok(Client { inner })
    }
}

/// How instances are connected to.
struct Dialer {
    configure: Arc<Configure>,
    headers: MetadataMap,
    coalesces: bool,
}

impl Dialer {
    /// `at`: one of the addresses that the name has.
    fn dial(&self, address: &str, at: Option<SocketAddr>) -> Result<Arc<Endpoint>, BuildError> {
        let named = |source| BuildError::Address { address: address.to_owned(), source };
        let mut endpoint = transport::Endpoint::from_shared(address.to_owned()).map_err(named)?;
        let name = match at {
            Some(at) => {
                // The name stays what certificates and proxies are told.
                let origin = endpoint.uri().clone();
                let scheme = origin.scheme_str().unwrap_or("http");
                endpoint = transport::Endpoint::from_shared(format!("{scheme}://{at}")).map_err(named)?.origin(origin);
                at.to_string()
            }
            None => endpoint.uri().authority().map_or_else(String::new, ToString::to_string),
        };
        // A connection that nobody answers on is found out by a question, and not by a caller's loss.
        let endpoint = endpoint
            .tcp_nodelay(true)
            .connect_timeout(Duration::from_secs(1))
            .http2_keep_alive_interval(Duration::from_secs(5))
            .keep_alive_timeout(Duration::from_secs(2));
        let channel = (self.configure)(endpoint).map_err(named)?.connect_lazy();
        Ok(Arc::new(Endpoint::new(name.into(), channel, self.headers.clone(), self.coalesces)))
    }
}

/// Looks from time to time which addresses the names have, for as long as the client lives.
async fn resolve(inner: Weak<Inner>, dialer: Dialer, addresses: Vec<String>, pause: Duration) {
    while inner.strong_count() > 0 {
        let mut found = Vec::new();
        for address in &addresses {
            let Ok(endpoint) = transport::Endpoint::from_shared(address.clone()) else {
                continue;
            };
            let uri = endpoint.uri();
            let port = uri.port_u16().unwrap_or(if uri.scheme_str() == Some("https") { 443 } else { 80 });
            let host = uri.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
            if let Ok(all) = tokio::net::lookup_host((host, port)).await {
                found.extend(all.map(|at| (address.as_str(), at)));
            }
        }
        let Some(client) = inner.upgrade() else {
            return;
        };
        // Of a name that nobody knows just now the old addresses are still the best guess.
        if !found.is_empty() {
            found.sort_unstable_by_key(|(_, at)| *at);
            found.dedup_by_key(|(_, at)| *at);
            let known = client.endpoints();
            let one = |(address, at): (&str, SocketAddr)| {
                let name = at.to_string();
                let same = known.all().iter().find(|endpoint| *endpoint.name == *name);
                same.map_or_else(|| dialer.dial(address, Some(at)), |same| Ok(Arc::clone(same))).ok()
            };
            let all: Vec<_> = found.into_iter().filter_map(one).collect();
            let is_known = |endpoint: &Arc<Endpoint>| known.all().iter().any(|other| Arc::ptr_eq(endpoint, other));
            if all.len() != known.all().len() || !all.iter().all(is_known) {
                *client.endpoints.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(Endpoints::new(all));
            }
        }
        drop(client);
        tokio::time::sleep(pause).await;
    }
}

/// Asks the rate limit service. Cheap to clone; all clones share connections and caches.
#[derive(Clone)]
pub struct Client {
    inner: Arc<Inner>,
}

struct Inner {
    domain: String,
    deadline: Duration,
    on_error: OnError,
    routing: Routing,
    denials: Option<DenyCache>,
    grants: Grants,
    began: Instant,
    telemetry: Telemetry,
    endpoints: RwLock<Arc<Endpoints>>,
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
    pub fn check<'c>(&'c self, descriptors: impl IntoIterator<Item = Descriptor<'c>>) -> Check<'c> {
        let domain = Cow::Borrowed(self.inner.domain.as_str());
        let descriptors = descriptors.into_iter().collect();
        let ask = Ask { domain, descriptors, hits: 0, traceparent: None };
        Check { inner: &self.inner, ask, deadline: self.inner.deadline }
    }

    /// Gives back what is left of hits that the service has granted in advance, for instance before the process ends. Without
    /// it they are lost to others until their life is over.
    pub async fn give_back_grants(&self) {
        for (domain, descriptor, hits) in self.inner.grants.take_all(self.inner.began.elapsed()) {
            let _ = self.check([descriptor.borrowed().hits(hits).give_back()]).domain(domain).await;
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
    ask: Ask<'c>,
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
    type IntoFuture = Checking<'c>;

    fn into_future(self) -> Checking<'c> {
        let now = self.inner.began.elapsed();
        let (ask, inner) = (self.ask, self.inner);
        let question = match inner.known(&ask, now) {
            Known::Answer(verdict) => {
                inner.telemetry.answered(&verdict, || Duration::ZERO);
                return Checking(Step::Known(verdict));
            }
            Known::Nothing(question) => question,
        };
        Checking(Step::Asking(Box::pin(inner.ask(ask, now, self.deadline, question))))
    }
}

/// The answer to a [`Check`] in the making.
#[must_use = "nothing is asked before it is awaited"]
pub struct Checking<'c>(Step<'c>);

#[allow(clippy::large_enum_variant, reason = "an answer from the cache is to need no allocation")]
enum Step<'c> {
    Known(Verdict),
    Asking(Pin<Box<dyn Future<Output = Verdict> + Send + 'c>>),
    Done,
}

impl Future for Checking<'_> {
    type Output = Verdict;

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
    fn endpoints(&self) -> Arc<Endpoints> {
        Arc::clone(&self.endpoints.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// What needs no call.
    fn known(&self, ask: &Ask<'_>, now: Duration) -> Known {
        if self.denials.is_none() && self.grants.is_empty() {
            return Known::Nothing(Question::default());
        }
        let identities = ask.identities().collect();
        if !self.grants.is_empty()
            && let Some(verdict) = self.grants.spend(ask, &identities, now)
        {
            return Known::Answer(verdict);
        }
        let denials = self.denials.as_ref();
        denials.map_or(Known::Nothing(Question::default()), |denials| denials.get(ask, &identities, now))
    }

    async fn ask(&self, ask: Ask<'_>, now: Duration, deadline: Duration, question: Question) -> Verdict {
        let asked = self.began + now;
        // For ever is a day.
        let end = asked.checked_add(deadline).unwrap_or(asked + Duration::from_secs(86_400));
        let clock = Clock { began: self.began, asked: now, deadline: end, allowed: deadline };
        let answer = self.ask_someone(&ask, clock).await;
        // Also when it is not known whether it came about.
        if let Some(denials) = self.denials.as_ref().filter(|_| ask.gives_back()) {
            denials.refunded(&ask);
        }
        if let Ok(verdict) = &answer {
            if let Some(denials) = &self.denials {
                denials.put(&ask, verdict, question, now);
            }
            self.grants.keep(&ask, verdict, now);
        }
        let verdict = answer.unwrap_or_else(|failure| Verdict::fallback(self.on_error == OnError::Allow, failure));
        self.telemetry.answered(&verdict, || self.began.elapsed().saturating_sub(now));
        verdict
    }

    /// It is asked a second time only if it surely did not run: at another endpoint, or on another connection.
    async fn ask_someone(&self, ask: &Ask<'_>, clock: Clock) -> Result<Verdict, Failure> {
        let endpoints = self.endpoints();
        let choose = |but, now| endpoints.choose(&self.routing, ask, now, but);
        let first = choose(None, clock.asked).ok_or(Failure::Unreachable)?;
        let (failure, but) = match first.ask(ask, clock).await {
            Ok(verdict) => return Ok(verdict),
            // The same one has other connections.
            Err(Lost::Ended) => (Failure::Unreachable, None),
            Err(Lost::NotRun(failure)) => (failure, Some(first)),
            Err(Lost::NoStream) => (Failure::Unreachable, Some(first)),
            Err(Lost::Perhaps(failure) | Lost::Refused(failure)) => return Err(failure),
        };
        let second = choose(but, clock.now());
        // Boxed, as all that is rare: a check that waits is to be small.
        match Box::pin(second.ok_or(failure)?.ask(ask, clock)).await {
            Ok(verdict) => Ok(verdict),
            Err(Lost::NoStream | Lost::Ended) => Err(Failure::Unreachable),
            Err(Lost::NotRun(failure) | Lost::Perhaps(failure) | Lost::Refused(failure)) => Err(failure),
        }
    }
}

impl std::fmt::Debug for Check<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Check")
            .field("domain", &self.ask.domain)
            .field("descriptors", &self.ask.descriptors.as_slice())
            .finish()
    }
}
