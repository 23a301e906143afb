//! Counters in Redis: one round trip per request, whatever the number and the mix of its hits.
//!
//! Every worker has a connection of its own, on which calls are pipelined; requests that are ready at the same moment
//! share a call (`batch`). The time is the server's, so
//! instances of the service with different clocks agree. Keys expire by themselves.

mod batch;
mod node;
mod program;
mod settings;

pub use settings::{Settings, TlsSettings};

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use self::{
    batch::Batcher,
    node::Node,
    program::{Program, Step},
};
use super::{Charge, Decisions, Hit, Metrics, StoreError};
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
    #[error("{url} cannot be used as the address of a Redis server")]
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

/// Everything that the workers' connections have in common.
pub struct Setup {
    client: ::redis::Client,
    settings: Settings,
    program: Arc<Program>,
    metrics: Arc<Metrics>,
}

impl Setup {
    /// Reads the address and the certificates; connects nowhere yet.
    pub fn new(url: &str, settings: &Settings, time: Time, metrics: Arc<Metrics>) -> Result<Self, SetupError> {
        let program = Arc::new(Program::new(settings, time));
        Ok(Self { client: node::client(url, settings)?, settings: settings.clone(), program, metrics })
    }

    /// Begins to connect in the background, and goes on for as long as the current runtime lives.
    #[must_use]
    pub fn connect(&self, worker: WorkerId) -> Redis {
        let node = Node::start(self.client.clone(), &self.settings, Arc::clone(&self.program));
        let batcher = Batcher::start(node, Arc::clone(&self.program));
        Redis { batcher, metrics: Arc::clone(&self.metrics), worker }
    }
}

/// One worker's way to Redis. Cheap to clone; the connection is shared.
#[derive(Clone)]
pub struct Redis {
    batcher: Arc<Batcher>,
    metrics: Arc<Metrics>,
    worker: WorkerId,
}

impl Redis {
    /// Decides all hits in one round trip.
    pub async fn apply(&self, hits: &[Hit<'_>], charge: Charge, now: Micros) -> Result<Decisions, StoreError> {
        let asked = Instant::now();
        let steps = self.batcher.steps(hits, charge, now).await;
        let decisions = steps.and_then(|(now, steps)| {
            let decide = |(hit, step): (&Hit<'_>, Step)| {
                let allowed = step.allowed.ok_or(StoreError::Refused)?;
                Ok(hit.algorithm.explain(&step.state, hit.ask(now), allowed))
            };
            hits.iter().zip(steps).map(decide).collect()
        });
        match &decisions {
            Ok(_) => self.metrics.answered(self.worker, asked.elapsed()),
            Err(error) => self.metrics.failed(self.worker, *error),
        }
        decisions
    }

    /// Whether Redis can be asked now.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.batcher.node().is_up()
    }

    /// Waits until Redis can be asked, but no longer than this.
    pub async fn wait_until_up(&self, at_most: Duration) -> bool {
        tokio::time::timeout(at_most, self.batcher.node().up()).await.is_ok()
    }
}
