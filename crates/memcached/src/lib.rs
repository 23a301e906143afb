//! Counters in memcached, through [`Memcached`].
//!
//! ```text
//! Memcached   one worker's access: sends each hit to its server and combines the answers
//!   Node      its connection to one server, with health checks and a deadline; decides waiting requests in rounds
//!   Round     the steps of the requests, between the reading and the writing of their counters
//!   Commands  the commands of the meta protocol, and Reply
//! Health      the state of the servers, for readiness, metrics and the log
//! ```
//!
//! Steps use the clock of this instance, because memcached has none that a client can read. memcached expires the items.
//! Several servers share the counters by rendezvous hashing ([`Ring`]), as a ring of Redis servers does.

mod address;
mod failure;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod key;
mod node;
mod protocol;
mod round;
mod settings;
mod tls;

pub use address::InvalidAddress;
pub use failure::Failure;
pub use settings::Settings;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use sluicegate_algorithm::{Action, Micros};
use sluicegate_deadline::within;
use sluicegate_metrics::WorkerId;
use sluicegate_placement::{Ring, hash_tag};
use sluicegate_store::{
    Charge, Counter, CounterStore, Hit, ServerMetrics, Servers, StepOutcome, StepOutcomes, StoreError, next_answer,
};

use self::{
    address::Address,
    key::key_of,
    node::{Node, Server},
    tls::Tls,
};

/// Metrics of the calls to memcached and of the state of its servers.
pub type Metrics = ServerMetrics<Failure>;

/// Error returned when a memcached store cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// An invalid address.
    #[error(transparent)]
    Address(#[from] InvalidAddress),
    /// A certificate or key that cannot be read.
    #[error("cannot read the TLS certificate or key {path} of memcached")]
    Certificate {
        /// Path of the file.
        path: String,
        /// Error of the operating system, or the reason.
        source: std::io::Error,
    },
    /// A name that no certificate can have.
    #[error("memcached.tls.server_name {0:?} is not a host name or an IP address")]
    ServerName(String),
    /// Certificates that cannot be used.
    #[error("the TLS certificates of memcached cannot be used")]
    Tls(#[source] rustls::Error),
}

/// Location of a counter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    /// Key of the item.
    pub key: String,
    /// Host and port of the server.
    pub server: String,
}

/// Returns the location of the counter with this name, without connecting to memcached.
///
/// # Errors
///
/// Returns an error if the address is invalid.
pub fn locate(url: &str, settings: &Settings, name: &str) -> Result<Location, InvalidAddress> {
    let Address { servers, .. } = address::parse(url)?;
    let ring = ring(&servers);
    let index = server_index(&ring, name.as_bytes()).unwrap_or_default();
    Ok(Location { key: key_of(&settings.key_prefix, name.as_bytes()), server: servers[index].clone() })
}

fn ring(servers: &[String]) -> Ring {
    Ring::new(servers.iter().map(|name| (name.as_str(), 1)))
}

/// Returns the index of the server that has a counter.
fn server_index(ring: &Ring, name: &[u8]) -> Option<usize> {
    ring.node_of(hash_tag(name).unwrap_or(name))
}

/// Settings and state that the workers' connections share.
pub struct Setup {
    servers: Vec<Arc<Server>>,
    ring: Arc<Ring>,
    metrics: Arc<Metrics>,
}

impl Setup {
    /// Parses the address of the store, and reads the certificates. Does not connect yet.
    ///
    /// # Errors
    ///
    /// Returns an error if the address is invalid, or the certificates cannot be used.
    pub fn new(url: &str, settings: &Settings, metrics: Arc<Metrics>) -> Result<Self, SetupError> {
        let Address { servers: names, has_tls } = address::parse(url)?;
        let tls = if has_tls { Some(Tls::new(&settings.tls)?) } else { None };
        let ring = Arc::new(ring(&names));
        let mut servers = Vec::with_capacity(names.len());
        for name in names {
            let health = Arc::clone(metrics.health());
            servers.push(Arc::new(Server { name: name.into(), tls: tls.clone(), settings: settings.clone(), health }));
        }
        Ok(Self { servers, ring, metrics })
    }

    /// Creates the store of one worker. Background tasks keep it connected until the current runtime ends.
    #[must_use]
    pub fn connect(&self, worker: WorkerId) -> Memcached {
        let nodes = self.servers.iter().map(|server| Node::start(Arc::clone(server), worker)).collect();
        Memcached { nodes, ring: Arc::clone(&self.ring), metrics: Arc::clone(&self.metrics), worker }
    }
}

/// One worker's access to counters in memcached. Cheap to clone; clones share the connections.
#[derive(Clone)]
pub struct Memcached {
    nodes: Arc<[Arc<Node>]>,
    ring: Arc<Ring>,
    metrics: Arc<Metrics>,
    worker: WorkerId,
}

/// The hits of a request on one server.
struct Part {
    node: Arc<Node>,
    hits: Vec<PartHit>,
}

/// A hit of a part, with the answer to it.
struct PartHit {
    /// Index of the hit in the request.
    index: usize,
    hit: Hit,
    answer: Result<StepOutcome, StoreError>,
}

impl Memcached {
    /// Waits until every server is connected, at most for `max_wait`, and returns whether that succeeded.
    pub async fn wait_until_up(&self, max_wait: Duration) -> bool {
        let all_up = join_all(self.nodes.iter().map(|node| node.wait_until_up()));
        within(max_wait, all_up).await.is_ok()
    }

    fn node_of(&self, name: &[u8]) -> Option<&Arc<Node>> {
        self.nodes.get(server_index(&self.ring, name)?)
    }

    /// Divides the hits of a request by server.
    fn parts(&self, hits: &[Hit<&Counter>]) -> Vec<Part> {
        let mut parts: Vec<Part> = Vec::new();
        for (index, hit) in hits.iter().enumerate() {
            let Some(node) = self.node_of(&hit.counter.name) else {
                continue;
            };
            let hit = PartHit { index, hit: hit.to_owned(), answer: Err(StoreError::Unavailable) };
            match parts.iter_mut().find(|part| Arc::ptr_eq(&part.node, node)) {
                Some(part) => part.hits.push(hit),
                None => parts.push(Part { node: Arc::clone(node), hits: vec![hit] }),
            }
        }
        parts
    }

    async fn steps(&self, hits: &[Hit<&Counter>], charge: Charge, now: Micros) -> StepOutcomes {
        let mut parts = self.parts(hits);
        if charge == Charge::All && parts.len() > 1 {
            // A caller that disconnects has no effect on the other parts.
            let task = tokio::spawn(take_all_or_none(parts, now, Arc::clone(&self.metrics), self.worker));
            parts = task.await.unwrap_or_default();
        } else {
            join_all(parts.iter_mut().map(|part| part.run(charge, now))).await;
        }
        combine(parts, hits.len())
    }
}

/// Takes the hits of the parts, and rolls them back if one part is denied.
async fn take_all_or_none(mut parts: Vec<Part>, now: Micros, metrics: Arc<Metrics>, worker: WorkerId) -> Vec<Part> {
    join_all(parts.iter_mut().map(|part| part.run(Charge::All, now))).await;
    if parts.iter().any(Part::is_denied) {
        let taken = parts.iter_mut().filter(|part| !part.is_denied());
        join_all(taken.map(|part| part.roll_back(now, &metrics, worker))).await;
    }
    parts
}

impl Part {
    /// Runs the steps of the hits.
    async fn run(&mut self, charge: Charge, now: Micros) {
        let hits = self.hits.iter().map(|part| part.hit.clone()).collect();
        let mut answers = self.node.steps(hits, charge, now).await.into_iter();
        for hit in &mut self.hits {
            hit.answer = next_answer(&mut answers);
        }
    }

    /// Returns whether an answer prevents the takes of the request.
    fn is_denied(&self) -> bool {
        self.hits.iter().any(|part| part.hit.blocks.prevents(&part.answer, |step| step.allowed))
    }

    /// Rolls back the takes. The answers become those of a peek.
    async fn roll_back(&mut self, now: Micros, metrics: &Metrics, worker: WorkerId) {
        for PartHit { hit, answer, .. } in &mut self.hits {
            let Ok(step) = answer else {
                continue;
            };
            if step.action != Action::Take || !(step.allowed || hit.counter.program.counts_denied()) {
                continue;
            }
            let rollback = Hit { action: Action::RollBack(step.at), ..hit.clone() };
            let mut results = self.node.steps(vec![rollback], Charge::Each, now).await.into_iter();
            match next_answer(&mut results) {
                Ok(step) => *answer = Ok(step),
                Err(_) => metrics.health().rollback_failed(worker),
            }
        }
    }
}

/// Combines the answers of parts in the order of the request's hits. A hit in no part is unavailable.
fn combine(parts: Vec<Part>, hit_count: usize) -> StepOutcomes {
    let mut combined: StepOutcomes = (0..hit_count).map(|_| Err(StoreError::Unavailable)).collect();
    for part in parts {
        for PartHit { index, answer, .. } in part.hits {
            combined[index] = answer;
        }
    }
    combined
}

impl Servers for Memcached {
    fn software(&self) -> &'static str {
        "memcached"
    }

    fn topology(&self) -> &'static str {
        "memcached"
    }

    fn servers(&self) -> Vec<(Arc<str>, bool)> {
        self.metrics.health().servers()
    }

    fn key_prefix(&self) -> &str {
        match self.nodes.first() {
            Some(node) => node.key_prefix(),
            None => "",
        }
    }

    fn server_of(&self, name: &[u8], _: bool) -> Option<Arc<str>> {
        self.node_of(name).map(|node| Arc::clone(node.name()))
    }
}

impl CounterStore for Memcached {
    /// Runs the steps in one exchange with each server if they only count in fixed windows, or else in two.
    async fn step(&self, hits: &[Hit<&Counter>], charge: Charge, now: Micros) -> StepOutcomes {
        let started = Instant::now();
        let outcomes = self.steps(hits, charge, now).await;
        match outcomes.iter().find_map(|outcome| outcome.as_ref().err()) {
            None => self.metrics.calls().record_latency(self.worker, started.elapsed()),
            Some(error) => self.metrics.calls().count_error(self.worker, *error),
        }
        outcomes
    }

    async fn delete(&self, name: &[u8], _: bool) -> Result<bool, StoreError> {
        let node = self.node_of(name).ok_or(StoreError::Unavailable)?;
        node.delete(name).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Otherwise a request with several limits of one entity would need several servers.
    #[test]
    fn counters_with_the_same_hash_tag_are_on_one_server() {
        let server = |name: &str| locate("memcached://a,b,c", &Settings::default(), name).unwrap().server;
        let mut used = std::collections::BTreeSet::new();
        for user in 0..50 {
            let first = server(&format!("{{d|user={user}}}fw:60"));
            assert_eq!(first, server(&format!("{{d|user={user}}}tb")));
            used.insert(first);
        }
        assert_eq!(used.len(), 3);
    }
}
