//! The store phase: the counters, in memory or in Redis.

use std::sync::Arc;

use super::tasks::{self, Tasks};
use crate::{
    metrics::{Meter, Registrar, WorkerId},
    service::Clock,
    settings::Settings,
    store::{self, AnyStore, Local, Memory, TimeSource, local, redis::SetupError},
};

/// The store that the settings select: one for all workers, or a connection to Redis for each.
pub(super) enum StoreSetup {
    Memory(Arc<Memory>),
    Redis(Box<store::redis::Setup>, Arc<local::LocalState>),
}

impl StoreSetup {
    /// Reads the store's address. Nothing is connected yet.
    pub(super) fn new(settings: &Settings, metrics: &Arc<store::Metrics>) -> Result<Self, SetupError> {
        if settings.store == "memory" {
            let has_peers = settings.cluster.has_peers();
            let create = if has_peers { Memory::exchanged } else { Memory::new };
            return Ok(Self::Memory(Arc::new(create(&settings.memory))));
        }
        let calls = Arc::clone(&metrics.redis);
        let setup = store::redis::Setup::new(&settings.store, &settings.redis, TimeSource::Own, calls)?;
        let setup = match &settings.per_second.store {
            Some(store) => setup.with_per_second(store, &settings.per_second.redis, TimeSource::Own)?,
            None => setup,
        };
        let metrics = Arc::clone(&metrics.local);
        let shared =
            local::LocalState::new(&settings.deny_cache, &settings.lease, &settings.eventual, TimeSource::Own, metrics);
        Ok(Self::Redis(Box::new(setup), shared))
    }

    /// Returns the store for one worker, and starts to connect it.
    pub(super) fn connect(&self, worker: WorkerId) -> AnyStore {
        match self {
            Self::Memory(memory) => AnyStore::Memory(Arc::clone(memory)),
            Self::Redis(setup, shared) => {
                AnyStore::Redis(Local::new(setup.connect(worker), Arc::clone(shared), worker))
            }
        }
    }

    /// Starts the tasks of the store: the topology of Redis, and the memory of expired counters.
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
        };
        tasks.spawn(&tasks::RECLAIM, tasks::reclaim(Arc::clone(memory), clock.clone()));
    }

    /// Registers the metrics of the store.
    pub(super) fn observe(&self, metrics: &Arc<store::Metrics>, meter: &dyn Meter) {
        let Self::Memory(memory) = self else {
            return metrics.observe(meter);
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
