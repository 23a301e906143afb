//! Counters in Redis, through [`Redis`]: one round trip per request and server for any number and mix of hits.
//!
//! ```text
//! Redis                   one worker's access: sends each hit to its server and combines the answers (multi_node)
//!   Pool                  its connections to all servers of a topology; selects the server of a key
//!     Batcher             its calls to one server; requests that are ready at the same moment share a call
//!       ResponseBatching  delays answers briefly so that the answers of several servers are delivered together
//!       Node              its connection to that server, with health checks, a deadline and a breaker
//! Topology                discovers the servers once for all workers (single, sentinel, cluster, ring)
//! Login                   credentials from a file or a command, which change while the service runs
//! CombinedScript          the scripts of all counter programs in one, the format of its calls and of its replies
//! Health                  the state of the servers, for readiness, metrics and the log
//! ```
//!
//! `Redis` has no state of its own: what changes is in the pools and in `Health`. Its methods on counters are in
//! `multi_node`, those on overrides in `overrides`, and those on the activity of instances in `activity`.
//!
//! Steps use the server's clock, so instances of the service with different clocks agree. Redis expires the keys.

mod activity;
mod batch;
mod combined_script;
#[cfg(any(test, feature = "testing"))]
pub mod controlled;
mod failure;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod login;
mod multi_node;
mod node;
mod overrides;
mod pool;
mod redact;
mod response_batching;
mod settings;
mod tls_mismatch;
pub mod topology;

pub use activity::SharedActivity;
pub use redact::redact;
pub use settings::{RingNode, SentinelSettings, Settings};
pub use sluicegate_store::TlsSettings;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::{FutureExt, future::join_all};
use sluicegate_algorithm::Micros;
use sluicegate_metrics::WorkerId;
use sluicegate_store::{
    Charge, Counter, CounterStore, Hit, ServerMetrics, Servers, StepOutcomes, StoreError, TimeSource, health,
};

use self::{combined_script::CombinedScript, failure::Failure, pool::Pool, topology::Topology};

/// The state of the Redis servers.
pub type Health = health::Health<Failure>;
/// Metrics of the calls to Redis and of the state of its servers.
pub type Metrics = ServerMetrics<Failure>;

/// Error returned when a Redis store cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// An invalid address, or invalid settings that belong to it.
    #[error("invalid Redis store address {url}")]
    Address {
        /// Address without its password.
        url: String,
        /// Reason for the rejection.
        source: ::redis::RedisError,
    },
    /// A certificate or key that cannot be read.
    #[error("cannot read the TLS certificate or key {path}")]
    Certificate {
        /// Path of the file.
        path: String,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// A file with a password that cannot be read or is empty.
    #[error("cannot read the password of Redis from {path}")]
    PasswordFile {
        /// Path of the file.
        path: String,
        /// Error of the operating system, or the reason.
        source: std::io::Error,
    },
}

/// The servers of one address, and the state that the workers' connections to them share.
struct Deployment {
    settings: Settings,
    script: CombinedScript,
    topology: Arc<Topology>,
    health: Arc<Health>,
}

impl Deployment {
    fn new(
        url: &str,
        settings: &Settings,
        time_source: TimeSource,
        metrics: &Metrics,
    ) -> Result<Arc<Self>, SetupError> {
        let topology = Arc::new(Topology::new(url, settings)?);
        let script = CombinedScript::new(settings, time_source);
        let health = Arc::clone(metrics.health());
        Ok(Arc::new(Self { settings: settings.clone(), script, topology, health }))
    }
}

/// Settings and state that the workers' connections share.
pub struct Setup {
    main: Arc<Deployment>,
    /// Separate servers for limits of unit second, if configured.
    per_second: Option<Arc<Deployment>>,
    metrics: Arc<Metrics>,
}

impl Setup {
    /// Parses the address, and reads the certificates and the password. Does not connect yet.
    ///
    /// # Errors
    /// Returns an error if the address is invalid, or a certificate or the password cannot be read.
    pub fn new(
        url: &str,
        settings: &Settings,
        time_source: TimeSource,
        metrics: Arc<Metrics>,
    ) -> Result<Self, SetupError> {
        Ok(Self { main: Deployment::new(url, settings, time_source, &metrics)?, per_second: None, metrics })
    }

    /// Adds separate servers for limits of unit second.
    ///
    /// # Errors
    /// Returns an error if the address is invalid, or a certificate or the password cannot be read.
    pub fn with_per_second(self, url: &str, settings: &Settings, time_source: TimeSource) -> Result<Self, SetupError> {
        let per_second = Deployment::new(url, settings, time_source, &self.metrics)?;
        Ok(Self { per_second: Some(per_second), ..self })
    }

    /// Returns a future that keeps the list of servers and the credentials up to date. It ends only if neither can
    /// change. Until it is polled, the servers of a cluster or behind sentinels and the output of `password_command`
    /// are unknown.
    pub fn follow(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut tasks = Vec::new();
        for deployment in std::iter::once(&self.main).chain(&self.per_second) {
            for login in deployment.topology.logins() {
                tasks.push(Arc::clone(login).follow(Arc::clone(&deployment.health)).boxed());
            }
            tasks.push(Arc::clone(&deployment.topology).follow(Arc::clone(&deployment.health)).boxed());
        }
        join_all(tasks).map(drop)
    }

    /// Creates the store of one worker. Background tasks keep it connected until the current runtime ends.
    #[must_use]
    pub fn connect(&self, worker: WorkerId) -> Redis {
        Redis {
            main: Pool::start(Arc::clone(&self.main), worker),
            per_second: self.per_second.as_ref().map(|deployment| Pool::start(Arc::clone(deployment), worker)),
            metrics: Arc::clone(&self.metrics),
            worker,
        }
    }
}

/// One worker's access to counters in Redis. Cheap to clone; clones share the connections.
#[derive(Clone)]
pub struct Redis {
    main: Arc<Pool>,
    per_second: Option<Arc<Pool>>,
    metrics: Arc<Metrics>,
    worker: WorkerId,
}

impl Redis {
    /// Waits until every server is connected, at most for `max_wait`, and returns whether that succeeded.
    pub async fn wait_until_up(&self, max_wait: Duration) -> bool {
        let started = Instant::now();
        for pool in self.pools() {
            if !pool.wait_until_up(max_wait.saturating_sub(started.elapsed())).await {
                return false;
            }
        }
        true
    }

    fn pools(&self) -> impl Iterator<Item = &Arc<Pool>> {
        std::iter::once(&self.main).chain(&self.per_second)
    }

    fn pool(&self, hit: &Hit<&Counter>) -> &Arc<Pool> {
        self.pool_of(hit.counter.per_second)
    }

    fn pool_of(&self, per_second: bool) -> &Arc<Pool> {
        match &self.per_second {
            Some(pool) if per_second => pool,
            _ => &self.main,
        }
    }
}

impl Servers for Redis {
    fn software(&self) -> &'static str {
        "redis"
    }

    fn topology(&self) -> &'static str {
        self.main.topology()
    }

    fn servers(&self) -> Vec<(Arc<str>, bool)> {
        self.metrics.health().servers()
    }

    fn key_prefix(&self) -> &str {
        self.main.key_prefix()
    }

    fn server_of(&self, name: &[u8], per_second: bool) -> Option<Arc<str>> {
        let target = self.pool_of(per_second).target(name)?;
        Some(Arc::clone(target.batcher.node().name()))
    }

    fn hash_slot_of(&self, name: &[u8], per_second: bool) -> Option<u16> {
        let pool = self.pool_of(per_second);
        if pool.is_cluster() { Some(pool.slot(name)) } else { None }
    }
}

impl CounterStore for Redis {
    /// Runs the steps in one round trip, or in one per server if the counters are on several servers.
    async fn step(&self, hits: &[Hit<&Counter>], charge: Charge, now: Micros) -> StepOutcomes {
        let started = Instant::now();
        let outcomes = self.apply_multi_node(hits, charge, now).await;
        match outcomes.iter().find_map(|outcome| outcome.as_ref().err()) {
            None => self.metrics.calls().record_latency(self.worker, started.elapsed()),
            Some(error) => self.metrics.calls().count_error(self.worker, *error),
        }
        outcomes
    }

    async fn delete(&self, name: &[u8], per_second: bool) -> Result<bool, StoreError> {
        let pool = self.pool_of(per_second);
        let target = pool.target(name).ok_or(StoreError::Unavailable)?;
        let mut delete = ::redis::cmd("DEL");
        delete.arg([pool.key_prefix().as_bytes(), name].concat());
        let reply = pool.command(target.batcher, &delete).await?;
        ::redis::from_redis_value::<u64>(reply).map(|keys| keys > 0).map_err(|_| StoreError::Rejected)
    }
}
