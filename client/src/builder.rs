//! [`Builder`] of a [`Client`], and the periodic DNS lookup of its endpoints.

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
    on_error::OnError,
    routing::{Endpoints, Routing},
    telemetry::Telemetry,
    wait_queue::WaitQueues,
};

/// Error returned when a [`Client`] cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// Invalid endpoint address, or an error returned by the closure of [`Builder::configure`].
    #[error("invalid address or connection settings of endpoint {address:?}")]
    Address {
        /// The address as it was passed to the builder.
        address: String,
        /// The cause.
        source: transport::Error,
    },
    /// Bearer token with characters that are not allowed in a header value.
    #[error("bearer token contains characters that are not allowed in a header")]
    Token,
}

type Configure = dyn Fn(transport::Endpoint) -> Result<transport::Endpoint, transport::Error> + Send + Sync;

/// Builder for [`Client`]. Created by [`Client::builder`].
#[derive(Clone)]
#[must_use]
pub struct Builder {
    addresses: Vec<String>,
    domain: String,
    timeout: Duration,
    on_error: OnError,
    routing: Routing,
    deny_cache_entries: usize,
    max_waiters: usize,
    batching_enabled: bool,
    grants_enabled: bool,
    resolve_interval: Option<Duration>,
    bearer_token: Option<String>,
    #[cfg(feature = "opentelemetry")]
    meter: Option<opentelemetry::metrics::Meter>,
    configure: Arc<Configure>,
}

impl Client {
    /// Creates a [`Builder`] for a client of the service at `address`: `http://host:port`, or `https://host:port` with
    /// the feature `tls`.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use sluicegate_client::Client;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), sluicegate_client::BuildError> {
    /// let client = Client::builder("http://127.0.0.1:8081")
    ///     .endpoint("http://127.0.0.1:8082")
    ///     .domain("api")
    ///     .timeout(Duration::from_millis(10))
    ///     .connect_lazy()?;
    ///
    /// assert_eq!(client.endpoints().len(), 2);
    /// # Ok(())
    /// # }
    /// ```
    pub fn builder(address: impl Into<String>) -> Builder {
        Builder::new(address.into())
    }
}

impl Builder {
    pub(crate) fn new(address: String) -> Self {
        Self {
            addresses: vec![address],
            domain: String::new(),
            timeout: Duration::from_millis(20),
            on_error: OnError::Allow,
            routing: Routing::default(),
            deny_cache_entries: 10_000,
            max_waiters: 10_000,
            batching_enabled: true,
            grants_enabled: false,
            resolve_interval: None,
            bearer_token: None,
            #[cfg(feature = "opentelemetry")]
            meter: None,
            configure: Arc::new(Ok),
        }
    }

    /// Adds the address of another instance of the service.
    pub fn endpoint(mut self, address: impl Into<String>) -> Self {
        self.addresses.push(address.into());
        self
    }

    /// Uses every address that the endpoints' host names resolve to as an endpoint, and resolves the names again at
    /// this interval (at least 10 ms).
    ///
    /// By default, each configured address is one endpoint.
    pub fn resolve_every(mut self, interval: Duration) -> Self {
        self.resolve_interval = Some(interval.max(Duration::from_millis(10)));
        self
    }

    /// Sets the domain of checks that do not set their own: the namespace of the rules that apply. Empty by default.
    pub fn domain(mut self, domain: impl Into<String>) -> Self {
        self.domain = domain.into();
        self
    }

    /// Sets the time after which a check returns a verdict even if the service has not answered; 20 ms by default. A pause
    /// of this process, for example by a CPU quota, does not count.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets the verdict about requests that the service did not decide in time; [`OnError::Allow`] by default.
    pub fn on_error(mut self, on_error: OnError) -> Self {
        self.on_error = on_error;
        self
    }

    /// Sets how checks are distributed among several endpoints; [`Routing::ByDescriptor`] by default.
    pub fn routing(mut self, routing: Routing) -> Self {
        self.routing = routing;
        self
    }

    /// Sets the maximum number of cached denials; 10,000 by default. 0 disables the cache.
    pub fn deny_cache(mut self, max_entries: usize) -> Self {
        self.deny_cache_entries = max_entries;
        self
    }

    /// Sets the maximum number of callers that wait at the same time, with [`Check::max_wait`](crate::Check::max_wait) or
    /// [`Acquire::max_wait`](crate::Acquire::max_wait); 10,000 by default. Further callers do not wait. 0 disables
    /// waiting.
    pub fn max_waiters(mut self, max_waiters: usize) -> Self {
        self.max_waiters = max_waiters;
        self
    }

    /// Sets whether checks that are ready at the same time are sent in one frame of a shared stream; enabled by
    /// default.
    ///
    /// Each check is still decided separately. A service without `sluicegate.v1` is detected, and then each check is a
    /// unary call of Envoy's protocol.
    pub fn batching(mut self, enabled: bool) -> Self {
        self.batching_enabled = enabled;
        self
    }

    /// Sets whether the client requests grants (hits in advance) for rules with `consistency: leased`; disabled by
    /// default.
    ///
    /// With grants, most checks of a frequently used descriptor need no call. See [`Client::return_grants`].
    pub fn request_grants(mut self, enabled: bool) -> Self {
        self.grants_enabled = enabled;
        self
    }

    /// Sets a token that is sent with every call, as `authorization: Bearer <token>`.
    pub fn bearer_token(mut self, token: impl Into<String>) -> Self {
        self.bearer_token = Some(token.into());
        self
    }

    /// Records metrics with `meter`: `sluicegate.client.checks` (number of checks by decider and decision),
    /// `sluicegate.client.duration` (duration in seconds of checks that were sent), `sluicegate.client.waiters` (number of
    /// waiters) and `sluicegate.client.wait` (seconds until the verdict of a waiter).
    #[cfg(feature = "opentelemetry")]
    pub fn meter(mut self, meter: opentelemetry::metrics::Meter) -> Self {
        self.meter = Some(meter);
        self
    }

    /// Configures the connections, for instance their keep-alive or TLS. TLS needs the feature `tls` and an `https://`
    /// address.
    ///
    /// # Examples
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

    /// Builds the client without connecting. The first checks open connections in the background, and lost connections
    /// are opened again.
    ///
    /// # Errors
    ///
    /// Returns [`BuildError`] if an address or the bearer token is invalid, or if the closure of [`Builder::configure`]
    /// returns an error.
    ///
    /// # Panics
    ///
    /// Panics if called outside of a tokio runtime.
    pub fn connect_lazy(self) -> Result<Client, BuildError> {
        let mut headers = MetadataMap::new();
        if let Some(token) = &self.bearer_token {
            let mut value = MetadataValue::try_from(format!("Bearer {token}")).map_err(|_| BuildError::Token)?;
            value.set_sensitive(true);
            headers.insert("authorization", value);
        }
        let connector = Connector { configure: Arc::clone(&self.configure), headers, batching: self.batching_enabled };
        let all =
            self.addresses.iter().map(|address| connector.connect(address, None)).collect::<Result<Vec<_>, _>>()?;
        let resolved = self.resolve_interval.map(|interval| (interval, self.addresses.clone()));
        let inner = Arc::new(self.into_inner(all));
        if let Some((interval, addresses)) = resolved {
            tokio::spawn(refresh_endpoints(Arc::downgrade(&inner), connector, addresses, interval));
        }
        Ok(Client { inner })
    }

    /// Builds a client whose checks are answered by `service`, without a network. Addresses and connection settings
    /// have no effect. The deny cache and grants are disabled, so that `service` receives every check.
    ///
    /// [`Client::report_utilization`] and [`Client::utilization`] return [`Failure::Unreachable`](crate::Failure).
    #[cfg(feature = "test-util")]
    #[must_use]
    pub fn connect_fake(mut self, service: &crate::testing::FakeService) -> Client {
        self.deny_cache_entries = 0;
        self.grants_enabled = false;
        let mut inner = self.into_inner(Vec::new());
        inner.fake = Some(service.clone());
        Client { inner: Arc::new(inner) }
    }

    fn into_inner(self, endpoints: Vec<Arc<Endpoint>>) -> Inner {
        let deny_cache = if self.deny_cache_entries > 0 { Some(DenyCache::new(self.deny_cache_entries)) } else { None };
        Inner {
            domain: self.domain,
            timeout: self.timeout,
            on_error: self.on_error,
            routing: self.routing,
            grants: Grants::new(self.grants_enabled),
            deny_cache,
            wait_queues: WaitQueues::new(self.max_waiters),
            started_at: Instant::now(),
            #[cfg(feature = "opentelemetry")]
            telemetry: Telemetry::new(self.meter.as_ref()),
            #[cfg(not(feature = "opentelemetry"))]
            telemetry: Telemetry::default(),
            endpoints: RwLock::new(Arc::new(Endpoints::new(endpoints))),
            #[cfg(feature = "test-util")]
            fake: None,
        }
    }
}

/// Creates endpoints with the builder's connection settings.
struct Connector {
    configure: Arc<Configure>,
    headers: MetadataMap,
    batching: bool,
}

impl Connector {
    /// Creates the endpoint of `address`, or of `resolved`, one of the socket addresses that its host name resolves to.
    fn connect(&self, address: &str, resolved: Option<SocketAddr>) -> Result<Arc<Endpoint>, BuildError> {
        self.try_connect(address, resolved)
            .map_err(|source| BuildError::Address { address: address.to_owned(), source })
    }

    fn try_connect(&self, address: &str, resolved: Option<SocketAddr>) -> Result<Arc<Endpoint>, transport::Error> {
        let mut endpoint = transport::Endpoint::from_shared(address.to_owned())?;
        let name = match resolved {
            Some(resolved) => {
                // Certificates are verified against the host name, and proxies receive it as the authority.
                let origin = endpoint.uri().clone();
                let scheme = origin.scheme_str().unwrap_or("http");
                endpoint = transport::Endpoint::from_shared(format!("{scheme}://{resolved}"))?.origin(origin);
                resolved.to_string()
            }
            None => endpoint.uri().authority().map(ToString::to_string).unwrap_or_default(),
        };
        // Keep-alive pings detect a dead connection before a check has to time out on it.
        let endpoint = endpoint
            .tcp_nodelay(true)
            .connect_timeout(Duration::from_secs(1))
            .http2_keep_alive_interval(Duration::from_secs(5))
            .keep_alive_timeout(Duration::from_secs(2));
        let channel = (self.configure)(endpoint)?.connect_lazy();
        Ok(Arc::new(Endpoint::new(name.into(), channel, self.headers.clone(), self.batching)))
    }
}

/// Resolves the host names every `interval` until the client is dropped, and replaces the endpoints if they changed.
async fn refresh_endpoints(inner: Weak<Inner>, connector: Connector, addresses: Vec<String>, interval: Duration) {
    while inner.strong_count() > 0 {
        let mut found = Vec::new();
        for address in &addresses {
            let Ok(endpoint) = transport::Endpoint::from_shared(address.clone()) else {
                continue;
            };
            let uri = endpoint.uri();
            let port = port_of(uri);
            let host = uri.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
            if let Ok(all) = tokio::net::lookup_host((host, port)).await {
                found.extend(all.map(|resolved| (address.as_str(), resolved)));
            }
        }
        let Some(client) = inner.upgrade() else {
            return;
        };
        // If no name can be resolved at the moment, the previous addresses remain in use.
        if !found.is_empty() {
            found.sort_unstable_by_key(|(_, resolved)| *resolved);
            found.dedup_by_key(|(_, resolved)| *resolved);
            let current = client.endpoints();
            let mut all = Vec::with_capacity(found.len());
            for (address, resolved) in found {
                let name = resolved.to_string();
                if let Some(existing) = current.all().iter().find(|endpoint| *endpoint.name == *name) {
                    all.push(Arc::clone(existing));
                } else if let Ok(endpoint) = connector.connect(address, Some(resolved)) {
                    all.push(endpoint);
                }
            }
            if all.len() != current.all().len() || !all.iter().all(|endpoint| current.contains(endpoint)) {
                *client.endpoints.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(Endpoints::new(all));
            }
        }
        drop(client);
        tokio::time::sleep(interval).await;
    }
}

fn port_of(uri: &transport::Uri) -> u16 {
    uri.port_u16().unwrap_or(if uri.scheme_str() == Some("https") { 443 } else { 80 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_port_depends_on_the_scheme() {
        for (uri, port) in [("http://a", 80), ("https://a", 443), ("https://a:8081", 8081)] {
            assert_eq!(port_of(&uri.parse::<transport::Uri>().unwrap()), port, "{uri}");
        }
    }

    #[tokio::test]
    async fn a_deny_cache_without_entries_is_disabled() {
        let client = |entries| Client::builder("http://127.0.0.1:1").deny_cache(entries).connect_lazy().unwrap();
        assert!(client(0).inner.deny_cache.is_none() && client(1).inner.deny_cache.is_some());
    }

    #[tokio::test]
    async fn an_endpoint_that_is_no_longer_found_is_removed() {
        // Both addresses resolve to the same endpoint.
        let builder = Client::builder("http://127.0.0.1:1").endpoint("http://127.0.0.1:1");
        let client = builder.resolve_every(Duration::from_secs(1)).connect_lazy().unwrap();
        assert_eq!(client.endpoints().len(), 2);
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        assert_eq!(client.endpoints().len(), 1);
    }
}
