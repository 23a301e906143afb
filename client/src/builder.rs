//! How a client is made, and how it finds the instances of the service.

use std::{
    net::SocketAddr,
    sync::{Arc, PoisonError, RwLock, Weak},
    time::Duration,
};

use tokio::time::Instant;
use tonic::{
    metadata::{MetadataMap, MetadataValue},
    transport,
};

use crate::{
    client::{Client, Inner},
    deny_cache::DenyCache,
    endpoint::Endpoint,
    grants::Grants,
    routing::{Endpoints, Routing},
    telemetry::Telemetry,
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
    holds_grants: bool,
    resolves: Option<Duration>,
    token: Option<String>,
    #[cfg(feature = "opentelemetry")]
    meter: Option<opentelemetry::metrics::Meter>,
    configure: Arc<Configure>,
}

impl Builder {
    pub(crate) fn new(address: String) -> Self {
        Self {
            addresses: vec![address],
            domain: String::new(),
            deadline: Duration::from_millis(20),
            on_error: OnError::Allow,
            routing: Routing::default(),
            denials: 10_000,
            coalesces: true,
            holds_grants: false,
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

    /// Whether the service is asked to hand hits out in advance, where rules say `consistency: leased`; it is not by
    /// default. Then a descriptor that is asked for often is decided here most of the time, without a call.
    pub fn hold_grants(mut self, holds: bool) -> Self {
        self.holds_grants = holds;
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
            grants: Grants::new(self.holds_grants),
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
            let (uri, port) = (endpoint.uri(), port_of(endpoint.uri()));
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

fn port_of(uri: &transport::Uri) -> u16 {
    uri.port_u16().unwrap_or(if uri.scheme_str() == Some("https") { 443 } else { 80 })
}

#[cfg(test)]
mod tests {
    use super::port_of;

    #[test]
    fn a_port_that_is_not_given_is_that_of_the_scheme() {
        for (uri, port) in [("http://a", 80), ("https://a", 443), ("https://a:8081", 8081)] {
            assert_eq!(port_of(&uri.parse::<super::transport::Uri>().unwrap()), port, "{uri}");
        }
    }
}
