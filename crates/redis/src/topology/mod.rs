//! The topology of Redis: which servers there are, and which of them has a key.
//!
//! `Topology` publishes both as a `View`. The view of a single server or of a ring never changes. Sentinels and cluster
//! nodes are queried at intervals, and earlier if the view may be outdated: a server is unavailable, or has sent a
//! redirect. All workers share the view; each has its own connections.

mod address;
mod query;
mod server;
pub mod slots;

use std::{sync::Arc, time::Duration};

use sluicegate_placement::{Ring, hash_tag};
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep_until, timeout},
};

#[cfg(any(test, feature = "fuzz"))]
pub(super) use self::query::read_any;
pub(super) use self::server::{Connected, Server};
use sluicegate_metrics::WorkerId;
use sluicegate_store::health::{FailureKind, jittered};

use self::{
    address::{Address, Source},
    query::TopologyAnswer,
};
use super::{Health, Settings, SetupError, login::Login};

/// Interval at which a healthy cluster or the sentinels are queried.
pub const REFRESH_INTERVAL: Duration = Duration::from_secs(2);
/// Minimum interval between two queries when a refresh is requested.
const MIN_REFRESH_INTERVAL: Duration = Duration::from_millis(50);

/// The servers that store counters, and which of them has which shard.
pub(super) struct View {
    pub(super) servers: Vec<Server>,
    placement: Placement,
}

/// The assignment of shards to servers.
enum Placement {
    One,
    Ring(Ring),
    /// Index of the server of each slot.
    Slots(Box<[u16]>),
}

impl View {
    fn one(server: Server) -> Self {
        Self { servers: vec![server], placement: Placement::One }
    }

    /// Returns the index of the server of a shard, or `None` if it is unknown.
    pub(super) fn index_of<S: AsRef<[u8]>>(&self, shard: impl FnOnce() -> S) -> Option<usize> {
        let index = match &self.placement {
            Placement::One => 0,
            Placement::Ring(ring) => ring.node_of(shard().as_ref())?,
            Placement::Slots(owners) => (*owners.get(usize::from(slots::slot(shard().as_ref())))?).into(),
        };
        if index < self.servers.len() { Some(index) } else { None }
    }
}

/// Location of a key, as far as the address and the settings determine it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyLocation {
    /// The server with this name.
    Server(String),
    /// The cluster node that currently has this slot.
    Slot(u16),
    /// The master that the sentinels know by this name.
    Master(String),
}

/// Returns the location of a key, without connecting to Redis.
///
/// # Errors
/// Returns an error if the address is invalid, or a certificate or the password cannot be read.
pub fn locate(url: &str, settings: &Settings, key: &str) -> Result<KeyLocation, SetupError> {
    let Address { source, view, .. } = address::parse(url, settings)?;
    let shard = hash_tag(key.as_bytes()).unwrap_or(key.as_bytes());
    Ok(match source {
        Source::Cluster { .. } => KeyLocation::Slot(slots::slot(shard)),
        Source::Sentinel { master, .. } => KeyLocation::Master(master),
        Source::Fixed => {
            let server = view.index_of(|| shard).and_then(|index| view.servers.get(index));
            KeyLocation::Server(server.map(|server| server.name.to_string()).unwrap_or_default())
        }
    })
}

/// Returns the names and weights of the nodes of a ring, or an empty list for another topology.
///
/// # Errors
/// Returns an error if the address is invalid, or a certificate or the password cannot be read.
pub fn ring_nodes(url: &str, settings: &Settings) -> Result<Vec<(String, u32)>, SetupError> {
    let view = address::parse(url, settings)?.view;
    let mut nodes = Vec::new();
    if !matches!(view.placement, Placement::Ring(_)) {
        return Ok(nodes);
    }
    for server in &view.servers {
        let weight = match settings.ring.iter().find(|node| node.name == *server.name) {
            Some(node) => node.weight,
            None => 1,
        };
        nodes.push((server.name.to_string(), weight));
    }
    Ok(nodes)
}

/// Discovers the servers of an address and publishes the current [`View`].
pub(super) struct Topology {
    source: Source,
    logins: Vec<Arc<Login>>,
    connect_timeout: Duration,
    view: watch::Sender<Arc<View>>,
    refresh_requested: Notify,
}

impl Topology {
    /// Parses the address, and reads the certificates and the password. Does not connect yet.
    pub(super) fn new(url: &str, settings: &Settings) -> Result<Self, SetupError> {
        let Address { source, view, logins } = address::parse(url, settings)?;
        let view = watch::Sender::new(Arc::new(view));
        let connect_timeout = settings.connect_timeout;
        Ok(Self { source, logins, connect_timeout, view, refresh_requested: Notify::new() })
    }

    /// Returns the credentials that can change. [`Login::follow`] keeps them up to date.
    pub(super) fn logins(&self) -> &[Arc<Login>] {
        &self.logins
    }

    /// Returns the current view and a notification of its changes.
    pub(super) fn view(&self) -> watch::Receiver<Arc<View>> {
        self.view.subscribe()
    }

    /// Returns the name of the topology: `server`, `sentinel`, `cluster` or `ring`.
    pub(super) fn name(&self) -> &'static str {
        match &self.source {
            Source::Cluster { .. } => "cluster",
            Source::Sentinel { .. } => "sentinel",
            Source::Fixed if matches!(self.view.borrow().placement, Placement::Ring(_)) => "ring",
            Source::Fixed => "server",
        }
    }

    /// Returns whether the servers form a cluster, so that keys have slots.
    pub(super) fn is_cluster(&self) -> bool {
        matches!(self.source, Source::Cluster { .. })
    }

    /// Requests a query soon, when the view may be outdated.
    pub(super) fn request_refresh(&self) {
        self.refresh_requested.notify_one();
    }

    /// Returns a server that a redirect has named. Returns `None` outside of a cluster.
    pub(super) fn server(&self, host: &str, port: u16) -> Option<Server> {
        match &self.source {
            Source::Cluster { connector, .. } => connector.server(host, port).ok(),
            Source::Fixed | Source::Sentinel { .. } => None,
        }
    }

    /// Keeps the view up to date until the current runtime ends, and counts failures in `health`. Returns immediately if
    /// the view never changes.
    pub(super) async fn follow(self: Arc<Self>, health: Arc<Health>) {
        let mut last_answer = TopologyAnswer::default();
        let mut logged_failure = None;
        let mut offset = rand::random::<u32>() as usize;
        loop {
            let started = Instant::now();
            offset = offset.wrapping_add(1);
            let servers = self.view.borrow().servers.clone();
            match self.source.query(&servers, &last_answer, offset, self.connect_timeout).await {
                Ok(None) => return,
                Ok(Some(report)) => {
                    logged_failure = None;
                    if report.map != last_answer.map
                        && let Some(view) = self.source.view(&report)
                    {
                        self.view.send_replace(Arc::new(view));
                    }
                    last_answer = report;
                }
                Err(error) => {
                    health.count_failure(WorkerId(0), error.failure);
                    let is_new =
                        logged_failure.is_none_or(|logged| error.failure.needs_operator() && error.failure != logged);
                    if is_new {
                        logged_failure = Some(error.failure);
                        tracing::warn!(
                            kind = error.failure.kind(),
                            error = error.description,
                            "cannot read the Redis topology; keeping the last known one and retrying"
                        );
                    }
                    self.request_refresh();
                }
            }
            let _ = timeout(jittered(REFRESH_INTERVAL), self.refresh_requested.notified()).await;
            sleep_until(started + jittered(MIN_REFRESH_INTERVAL)).await;
        }
    }
}

/// Parses the address of a store, for a fuzz target.
#[cfg(any(test, feature = "fuzz"))]
pub(super) fn read_address(url: &str, settings: &Settings) {
    if let Ok(Address { source, view, .. }) = address::parse(url, settings) {
        assert_eq!(view.servers.is_empty(), !matches!(source, Source::Fixed), "{url}");
    }
}
