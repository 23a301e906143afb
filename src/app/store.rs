//! The store phase: the counters, in memory, in Redis or in memcached.

use std::sync::Arc;

use super::tasks::{self, Tasks};
use crate::{
    metrics::{Meter, Registrar, WorkerId},
    service::Clock,
    settings::Settings,
    store::{self, AnyStore, Local, Memory, TimeSource, local, memcached, redis},
};

/// The store that the settings select: one for all workers, or connections to servers for each.
pub(super) enum StoreSetup {
    Memory(Arc<Memory>),
    Redis(Box<redis::Setup>, Arc<local::LocalState>),
    Memcached(memcached::Setup, Arc<local::LocalState>),
}

/// Error returned for settings of a store that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreSetupError {
    /// The settings of Redis are invalid.
    #[error(transparent)]
    Redis(#[from] redis::SetupError),
    /// The address or the certificates of memcached are invalid.
    #[error(transparent)]
    Memcached(#[from] memcached::SetupError),
}

impl StoreSetup {
    /// Reads the store's address. Nothing is connected yet.
    pub(super) fn new(settings: &Settings, metrics: &Arc<store::Metrics>) -> Result<Self, StoreSetupError> {
        if settings.store == "memory" {
            let has_peers = settings.cluster.has_peers();
            let create = if has_peers { Memory::exchanged } else { Memory::new };
            return Ok(Self::Memory(Arc::new(create(&settings.memory))));
        }
        let local_metrics = Arc::clone(&metrics.local);
        let local = local::LocalState::new(
            &settings.deny_cache,
            &settings.lease,
            &settings.eventual,
            TimeSource::Own,
            local_metrics,
        );
        if settings.uses_memcached() {
            let metrics = Arc::clone(&metrics.memcached);
            let setup = memcached::Setup::new(&settings.store, &settings.memcached, metrics)?;
            return Ok(Self::Memcached(setup, local));
        }
        let setup = redis::Setup::new(&settings.store, &settings.redis, TimeSource::Own, Arc::clone(&metrics.redis))?;
        let setup = match &settings.per_second.store {
            Some(store) => setup.with_per_second(store, &settings.per_second.redis, TimeSource::Own)?,
            None => setup,
        };
        Ok(Self::Redis(Box::new(setup), local))
    }

    /// Returns the store for one worker, and starts to connect it.
    pub(super) fn connect(&self, worker: WorkerId) -> AnyStore {
        match self {
            Self::Memory(memory) => AnyStore::Memory(Arc::clone(memory)),
            Self::Redis(setup, local) => AnyStore::Redis(Local::new(setup.connect(worker), Arc::clone(local), worker)),
            Self::Memcached(setup, local) => {
                AnyStore::Memcached(Local::new(setup.connect(worker), Arc::clone(local), worker))
            }
        }
    }

    /// Starts the tasks of the store: one follows the topology of Redis, one reclaims the memory of expired counters.
    ///
    /// Must run before the first connection is awaited, because workers connect to the servers that the topology names.
    /// `local` holds the counters of `on_error: local`.
    pub(super) fn start_tasks(&self, local: &Arc<Memory>, clock: &Clock, tasks: &mut Tasks) {
        let memory = match self {
            Self::Memory(memory) => memory,
            Self::Redis(setup, _) => {
                tasks.spawn(&tasks::TOPOLOGY, setup.follow());
                local
            }
            Self::Memcached(..) => local,
        };
        tasks.spawn(&tasks::RECLAIM, tasks::reclaim(Arc::clone(memory), clock.clone()));
    }

    /// Registers the metrics of the store.
    pub(super) fn observe(&self, metrics: &Arc<store::Metrics>, meter: &dyn Meter) {
        let memory = match self {
            Self::Memory(memory) => memory,
            Self::Redis(..) => {
                metrics.redis.observe(meter);
                return metrics.observe(meter);
            }
            Self::Memcached(..) => {
                metrics.memcached.observe(meter);
                return metrics.observe(meter);
            }
        };
        let registrar = Registrar { meter, source: memory };
        let description = "Number of counters in memory";
        registrar.gauge("sluicegate_memory_counters", description, |store| store.usage().counters);
        let description = "Counters removed before they expired because memory.max_counters was reached";
        registrar.counter("sluicegate_memory_evictions_total", description, |store| store.usage().evicted);
        let description = "Expired counters whose memory was reused";
        registrar.counter("sluicegate_memory_expirations_total", description, |store| store.usage().expired);
    }
}
