//! [`Cluster`]: calls between instances that exchange counted hits. `store::peers` contains the exchange itself.
//!
//! Every instance has a `Follower` for each address of another one, which pulls its increments over one connection. A
//! hung or slow instance delays only its own follower. The calls are gRPC with mutual TLS, on a listener of their own.

mod activity;
mod answers;
mod calendar;
mod callers;
mod calls;
mod context;
mod copy;
mod error;
mod follower;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod members;
mod message;
mod overrides;
mod pace;
mod received;
mod service;
mod settings;
mod violation;
mod wire;

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::SocketAddr,
    sync::Arc,
    time::Duration,
};

use axum::Router;
use sluicegate_proto::sluicegate::cluster::v1::cluster_service_server::ClusterServiceServer;
use tokio::{
    net::lookup_host,
    sync::{Mutex, watch},
    task::{AbortHandle, JoinSet},
    time::{Instant, sleep, sleep_until, timeout},
};
use tonic::service::Routes;

pub use self::settings::{Settings, TlsSettings};
use self::{
    answers::Answers,
    callers::Callers,
    context::Context,
    follower::Follower,
    members::{MemberState, Members},
    service::{CallerAddress, Service},
    violation::Violations,
};
use super::{
    TlsError,
    http_server::{Connection, HttpServer},
    tls::Tls,
    tls::TlsSettings as ListenerTlsSettings,
};
use crate::{
    budget::{Budget, Victim},
    metrics::{Instrument, Label, LogThrottle, Meter, Registrar},
    service::{Activity, Clock, overrides::MemberExchange},
    store::peers::Peers,
};

/// Version of the exchange between instances.
const PROTOCOL: u32 = 1;
/// Maximum size of a response of another instance.
const MAX_MESSAGE_BYTES: usize = 16 << 20;
/// Maximum total size of incomplete calls of members and of answers that they have not read, in bytes.
const MAX_INPUT_BYTES: usize = 128 << 20;
/// Maximum size of a request of another instance. A request has numbers only.
const MAX_REQUEST_BYTES: usize = 4 << 10;
/// Maximum number of connections of other instances.
const MAX_CONNECTIONS: usize = 1_024;
/// Interval at which DNS names are resolved.
const RESOLVE_INTERVAL: Duration = Duration::from_secs(2);
/// Maximum time for which the shutdown waits until other instances have pulled the last hits.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum age of the last pull of an instance that the shutdown waits for.
const ACTIVE_TIME: Duration = Duration::from_secs(2);

/// Error returned when the exchange cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// The address cannot be bound.
    #[error("cannot listen on {addr} for other instances")]
    Listen {
        /// The address.
        addr: SocketAddr,
        /// The error of the operating system.
        source: io::Error,
    },
    /// TLS cannot be configured.
    #[error("cannot configure TLS for other instances")]
    Tls(#[from] TlsError),
}

/// The exchange of one instance with all others, over the network.
pub struct Cluster {
    context: Arc<Context>,
    settings: Settings,
    addr: SocketAddr,
    /// Stops the listener.
    stop: watch::Sender<bool>,
    phase: watch::Sender<Phase>,
    log_unresolved: LogThrottle,
}

/// Phase of an instance in the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Other instances are contacted for the first time, and the counters of one are copied.
    Joining,
    /// The increments of all instances are applied.
    Following,
}

impl Cluster {
    /// Opens the listener and answers the calls of other instances.
    ///
    /// # Errors
    ///
    /// Returns an error if the address cannot be bound or a certificate is invalid.
    pub async fn bind(
        settings: &Settings,
        peers: Arc<Peers>,
        overrides: Option<MemberExchange>,
        activity: Arc<Activity>,
        clock: Clock,
    ) -> Result<Self, ClusterError> {
        let files = &settings.tls;
        let listener_tls = ListenerTlsSettings {
            cert_file: files.cert_file.clone(),
            key_file: files.key_file.clone(),
            client_ca_file: files.ca_file.clone(),
            client_name: files.server_name.clone(),
        };
        let tls = Tls::new(&listener_tls, &[b"h2"])?;
        let addr = settings.addr;
        let input = Budget::new("members", MAX_INPUT_BYTES, Victim::Oldest);
        let http = HttpServer::bind(addr, tls, MAX_CONNECTIONS, "cluster", &input).await;
        let http = http.map_err(|source| ClusterError::Listen { addr, source })?;
        let addr = http.local_addr().map_err(|source| ClusterError::Listen { addr, source })?;
        let (stop, stopping) = watch::channel(false);
        let (phase, in_phase) = watch::channel(Phase::Joining);
        let members = Members::new();
        let violations = Violations::new();
        let service = Service {
            peers: Arc::clone(&peers),
            members: Arc::clone(&members),
            clock: clock.clone(),
            phase: in_phase.clone(),
            overrides: overrides.clone(),
            activity: Arc::clone(&activity),
            callers: Callers::default(),
            answers: Answers::new(&input),
            violations: Arc::clone(&violations),
            log_ignored_address: LogThrottle::default(),
        };
        let grpc = ClusterServiceServer::new(service).max_decoding_message_size(MAX_REQUEST_BYTES);
        let router = Routes::new(grpc).prepare().into_axum_router();
        tokio::spawn(http.run(move |connection| router_for(connection, &router), stopping));
        let tls = if files.cert_file.is_some() { Some(files.clone()) } else { None };
        let (leaving, _) = watch::channel(false);
        let default_host = settings.peers.first().map(|peer| split_host(peer, addr.port()).0);
        let context = Context {
            peers,
            members,
            clock,
            overrides,
            activity,
            violations,
            read_budget: Arc::default(),
            decoding: Mutex::default(),
            tls,
            default_host,
            port: addr.port(),
            has_copied: Mutex::new(false),
            phase: in_phase,
            leaving,
        };
        Ok(Self {
            context: Arc::new(context),
            settings: settings.clone(),
            addr,
            stop,
            phase,
            log_unresolved: LogThrottle::default(),
        })
    }

    /// Returns the address with the actual port.
    #[must_use]
    pub const fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Publishes the counted hits at the interval. Never returns.
    pub async fn publish(self: Arc<Self>) {
        loop {
            sleep(self.settings.sync.mul_f64(rand::random_range(0.9..=1.1))).await;
            self.context.peers.publish(self.context.clock.now());
        }
    }

    /// Resolves the DNS names at an interval, and follows all instances. Never returns.
    pub async fn follow(self: Arc<Self>) {
        let mut followers: BTreeMap<SocketAddr, AbortHandle> = BTreeMap::new();
        let mut tasks = JoinSet::new();
        let members = &self.context.members;
        // Changes must not postpone it.
        let mut resolve_at = Instant::now() + RESOLVE_INTERVAL;
        loop {
            let changed = members.changed();
            let addresses: BTreeSet<SocketAddr> = members.addresses().into_iter().map(|(address, _)| address).collect();
            followers.retain(|address, follower| {
                let is_known = addresses.contains(address);
                if !is_known {
                    follower.abort();
                }
                is_known
            });
            for address in addresses {
                followers
                    .entry(address)
                    .or_insert_with(|| tasks.spawn(Follower::new(Arc::clone(&self.context), address).run()));
            }
            tokio::select! {
                () = changed => {}
                () = sleep_until(resolve_at) => {
                    members.set_resolved(&self.resolve().await);
                    resolve_at = Instant::now() + RESOLVE_INTERVAL;
                }
            }
            while tasks.try_join_next().is_some() {}
        }
    }

    /// Contacts all other instances and copies the counters of one of them, at most for `cluster.join_timeout`.
    ///
    /// If the time is not enough, the join continues in the background.
    pub async fn join(self: &Arc<Self>) {
        let this = Arc::clone(self);
        let joining = tokio::spawn(async move {
            this.context.members.set_resolved(&this.resolve().await);
            this.context.members.settled().await;
            this.phase.send_replace(Phase::Following);
            this.context.members.count(MemberState::Contacted)
        });
        match timeout(self.settings.join_timeout, joining).await {
            Ok(peers) => {
                tracing::info!(cluster = %self.addr, peers = peers.unwrap_or_default(), "exchanging hits with peers");
            }
            Err(_) => tracing::warn!(
                timeout = ?self.settings.join_timeout,
                "the join did not end within cluster.join_timeout, because a peer has not responded or the copy of its \
                 counters is incomplete; serving without the hits of peers until it ends"
            ),
        }
    }

    /// Publishes the last hits and waits until the other instances have pulled them.
    pub async fn leave(&self) {
        let Context { peers, clock, leaving, .. } = &*self.context;
        let now = clock.now();
        let since = now - crate::algorithm::Micros::new(ACTIVE_TIME.as_micros() as u64);
        peers.publish(now);
        let delivered = async {
            while !peers.is_delivered(since) {
                sleep(Duration::from_millis(5)).await;
            }
        };
        if timeout(LEAVE_TIMEOUT, delivered).await.is_err() {
            tracing::warn!("a peer did not receive the last hits of this instance");
        }
        leaving.send_replace(true);
        // Followers end with their last call.
        let _ = timeout(LEAVE_TIMEOUT, leaving.closed()).await;
        self.stop.send_replace(true);
    }

    /// Registers the metrics of the exchange.
    pub fn observe(&self, meter: &dyn Meter) {
        self.context.peers.metrics().observe(meter);
        self.context.violations.observe(meter);
        let members = Arc::clone(&self.context.members);
        meter.register(Instrument::f64_gauge(
            "sluicegate_cluster_peer_lag_seconds",
            "Seconds since the last response of each peer",
            move |observer| {
                for (address, lag) in members.lags() {
                    observer.observe(lag.as_secs_f64(), [Label::new("peer", address.to_string())]);
                }
            },
        ));
        let description = "Number of peers whose hits are counted here";
        Registrar { meter, source: &self.context.members }
            .gauge("sluicegate_cluster_peers", description, |members| members.count(MemberState::Connected) as u64);
        let description = "Number of merged changes that wait for peers that do not pull";
        Registrar { meter, source: &self.context.peers }.gauge(
            "sluicegate_cluster_backlog_changes",
            description,
            |peers| peers.subscribers().1 as u64,
        );
    }

    /// Returns each address of the settings with its host. A name that cannot be resolved keeps its addresses.
    async fn resolve(&self) -> BTreeMap<SocketAddr, String> {
        let mut resolved = BTreeMap::new();
        let known = self.context.members.addresses();
        for peer in self.settings.peers.iter().collect::<BTreeSet<_>>() {
            let (host, port) = split_host(peer, self.addr.port());
            match lookup_host((host.as_str(), port)).await {
                Ok(addresses) => resolved.extend(addresses.map(|address| (address, host.clone()))),
                Err(error) => {
                    if self.log_unresolved.should_log() {
                        tracing::warn!(peer, %error, "cannot resolve a peer; its last known addresses are used");
                    }
                    let of_host = known.iter().filter(|(_, known)| known.as_ref() == Some(&host));
                    resolved.extend(of_host.map(|(address, _)| (*address, host.clone())));
                }
            }
        }
        resolved
    }
}

/// Returns the routes for a connection, with the address of its caller.
fn router_for(connection: &Connection<'_>, router: &Router) -> Router {
    router.clone().layer(axum::Extension(CallerAddress(connection.peer)))
}

/// Returns the host and the port of an address in the settings: `host`, `host:port`, `[IPv6]:port` or an IPv6 address.
fn split_host(peer: &str, default_port: u16) -> (String, u16) {
    let is_bare_v6 = peer.parse::<std::net::Ipv6Addr>().is_ok();
    let mut host = peer;
    let mut port = default_port;
    if !is_bare_v6
        && let Some((before, after)) = peer.rsplit_once(':')
        && let Ok(number) = after.parse()
    {
        host = before;
        port = number;
    }
    (host.trim_start_matches('[').trim_end_matches(']').to_owned(), port)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_may_have_a_port() {
        for (peer, host, port) in [
            ("peers", "peers", 8083),
            ("peers:1", "peers", 1),
            ("10.0.0.1", "10.0.0.1", 8083),
            ("10.0.0.1:2", "10.0.0.1", 2),
            ("::1", "::1", 8083),
            ("[::1]", "::1", 8083),
            ("[::1]:3", "::1", 3),
        ] {
            assert_eq!(split_host(peer, 8083), (host.to_owned(), port), "{peer}");
        }
    }
}
