//! Counters in Redis: one round trip per request and server, whatever the number and the mix of its hits.
//!
//! ```text
//! Redis            one worker's way in: which servers a request's hits are on, and the answers put together (spread)
//!   Pool           its connections to all servers of a topology, and the way from a key to one of them
//!     Batcher      its calls to one server: requests that are ready at the same moment share one
//!       Gather     which of its answers wait for those of other servers
//!       Node       its connection to that server: kept alive, with a deadline and a breaker of its own
//! Topology         which servers there are, found out once for all workers (single, sentinel, cluster, ring)
//! Program          the scripts of all algorithms as one, how it is called and what it answers
//! Health           how the servers are, for people
//! ```
//!
//! The time is the server's, so instances of the service with different clocks agree. Keys expire by themselves.

mod batch;
mod failure;
mod health;
mod multi_node;
mod node;
mod overrides;
mod pool;
mod program;
mod response_batching;
mod settings;
pub mod topology;

pub use health::Health;
pub use settings::{RingNode, SentinelSettings, Settings, TlsSettings};

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use self::{pool::Pool, program::Program, topology::Topology};
use super::{Charge, CounterStore, Hit, Metrics, StepOutcomes, StoreError};
use crate::{algorithm::Micros, metrics::WorkerId};

/// Whose clock counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Time {
    /// Redis' own, always but in tests.
    Server,
    /// The `now` of the call: a clock set by hand.
    Caller,
}

/// What cannot be a Redis store.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// The address, or what belongs to it.
    #[error("{url} cannot be used as the address of a Redis store")]
    Address {
        /// The address without its password.
        url: String,
        /// What is wrong with it.
        source: ::redis::RedisError,
    },
    /// A certificate or key that cannot be read.
    #[error("cannot read {path}")]
    Certificate {
        /// The file.
        path: String,
        /// What went wrong.
        source: std::io::Error,
    },
}

/// What the workers' connections to one topology have in common.
struct Shared {
    settings: Settings,
    program: Program,
    topology: Arc<Topology>,
    health: Arc<Health>,
}

impl Shared {
    fn new(url: &str, settings: &Settings, time: Time, metrics: &Metrics) -> Result<Arc<Self>, SetupError> {
        let topology = Arc::new(Topology::new(url, settings)?);
        let (settings, program) = (settings.clone(), Program::new(settings, time));
        Ok(Arc::new(Self { settings, program, topology, health: Arc::clone(metrics.redis()) }))
    }
}

/// Everything that the workers' connections have in common.
pub struct Setup {
    main: Arc<Shared>,
    /// For limits of unit second, if they have servers of their own.
    per_second: Option<Arc<Shared>>,
    metrics: Arc<Metrics>,
}

impl Setup {
    /// Reads the address and the certificates; connects nowhere yet.
    pub fn new(url: &str, settings: &Settings, time: Time, metrics: Arc<Metrics>) -> Result<Self, SetupError> {
        Ok(Self { main: Shared::new(url, settings, time, &metrics)?, per_second: None, metrics })
    }

    /// The same with other servers for limits of unit second.
    pub fn with_per_second(self, url: &str, settings: &Settings, time: Time) -> Result<Self, SetupError> {
        let per_second = Shared::new(url, settings, time, &self.metrics)?;
        Ok(Self { per_second: Some(per_second), ..self })
    }

    /// Finds out which servers there are, and goes on for as long as the current runtime lives. To be called once.
    pub fn follow(&self) {
        for shared in std::iter::once(&self.main).chain(&self.per_second) {
            tokio::spawn(Arc::clone(&shared.topology).follow());
        }
    }

    /// Begins to connect in the background, and goes on for as long as the current runtime lives.
    #[must_use]
    pub fn connect(&self, worker: WorkerId) -> Redis {
        Redis {
            main: Pool::start(Arc::clone(&self.main), worker),
            per_second: self.per_second.as_ref().map(|shared| Pool::start(Arc::clone(shared), worker)),
            metrics: Arc::clone(&self.metrics),
            worker,
        }
    }
}

/// One worker's way to Redis. Cheap to clone; the connections are shared.
#[derive(Clone)]
pub struct Redis {
    main: Arc<Pool>,
    per_second: Option<Arc<Pool>>,
    metrics: Arc<Metrics>,
    worker: WorkerId,
}

impl Redis {
    /// Waits until every server can be asked, but no longer than this.
    pub async fn wait_until_up(&self, at_most: Duration) -> bool {
        let started = Instant::now();
        for pool in self.pools() {
            if !pool.wait_until_up(at_most.saturating_sub(started.elapsed())).await {
                return false;
            }
        }
        true
    }

    /// The servers by name, and whether every worker can ask them.
    #[must_use]
    pub fn servers(&self) -> Vec<(Arc<str>, bool)> {
        self.metrics.redis().servers()
    }

    pub(super) fn key_prefix(&self) -> &str {
        self.main.key_prefix()
    }

    /// The server that has a counter, as far as is known.
    pub(super) fn server_of(&self, key: &[u8], per_second: bool) -> Option<Arc<str>> {
        let target = self.pool_of(per_second).target(key)?;
        Some(Arc::clone(target.batcher.node().name()))
    }

    /// Forgets a counter; whether there was one.
    pub(super) async fn forget(&self, key: &[u8], per_second: bool) -> Result<bool, StoreError> {
        let pool = self.pool_of(per_second);
        let target = pool.target(key).ok_or(StoreError::Unavailable)?;
        let mut delete = ::redis::cmd("DEL");
        delete.arg([pool.key_prefix().as_bytes(), key].concat());
        let reply = pool.command(target.batcher, &delete).await?;
        ::redis::from_redis_value::<u64>(reply).map(|keys| keys > 0).map_err(|_| StoreError::Rejected)
    }

    fn pools(&self) -> impl Iterator<Item = &Arc<Pool>> {
        std::iter::once(&self.main).chain(&self.per_second)
    }

    fn pool(&self, hit: &Hit<'_>) -> &Arc<Pool> {
        self.pool_of(hit.per_second)
    }

    fn pool_of(&self, per_second: bool) -> &Arc<Pool> {
        self.per_second.as_ref().filter(|_| per_second).unwrap_or(&self.main)
    }
}

impl CounterStore for Redis {
    /// In one round trip, unless the hits live on servers that have to be asked apart.
    async fn step(&self, hits: &[Hit<'_>], charge: Charge, now: Micros) -> StepOutcomes {
        let asked = Instant::now();
        let counts = self.apply_multi_node(hits, charge, now).await;
        match counts.iter().find_map(|count| count.as_ref().err()) {
            None => self.metrics.answered(self.worker, asked.elapsed()),
            Some(error) => self.metrics.failed(self.worker, *error),
        }
        counts
    }
}
