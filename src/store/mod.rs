//! Stores, which change counters atomically: [`Memory`] in this process, [`Redis`] and [`Memcached`] for several
//! instances, and [`Local`] for decisions that an instance makes without a call to a server. [`AnyStore`] is the store
//! that the settings select.
//!
//! A store runs the algorithm's step while the counter is locked, and does not depend on the algorithm.

mod metrics;
pub mod overrides;

pub use metrics::Metrics;
pub use sluicegate_local::{self as local, Local};
pub use sluicegate_memcached::{self as memcached, Memcached};
pub use sluicegate_peers::{self as peers, Peers};
pub use sluicegate_redis::{self as redis, Redis, SharedActivity, redact};
pub use sluicegate_store::{
    AHEAD, Blocks, CallMetrics, Charge, Counter, CounterStore, Decider, Grant, Hit, HitDecision, HitDecisions, Memory,
    Servers, StepOutcome, StepOutcomes, Store, StoreError, TimeSource, identity, memory, next_answer, only_answer,
    pending,
};

use std::{sync::Arc, time::Duration};

use crate::algorithm::{Micros, State};

/// The store selected by the settings.
#[derive(Clone)]
pub enum AnyStore {
    /// Counters in this process.
    Memory(Arc<Memory>),
    /// Counters in Redis, on one server or several.
    Redis(Local<Redis>),
    /// Counters in memcached, on one server or several.
    Memcached(Local<Memcached>),
}

impl AnyStore {
    /// Returns the store if its counters are in memory, so that decisions need not wait.
    #[must_use]
    pub fn memory(&self) -> Option<&Memory> {
        match self {
            Self::Memory(memory) => Some(memory),
            Self::Redis(_) | Self::Memcached(_) => None,
        }
    }

    /// Returns the Redis that has the counters; `None` if they are elsewhere.
    #[must_use]
    pub fn redis(&self) -> Option<&Redis> {
        match self {
            Self::Redis(local) => Some(local.store()),
            Self::Memory(_) | Self::Memcached(_) => None,
        }
    }

    /// Returns the servers that have the counters; `None` if they are in memory.
    #[must_use]
    pub fn remote(&self) -> Option<&dyn Servers> {
        match self {
            Self::Memory(_) => None,
            Self::Redis(local) => Some(local.store()),
            Self::Memcached(local) => Some(local.store()),
        }
    }

    /// Waits until every server is connected, at most for `max_wait`.
    pub async fn wait_until_up(&self, max_wait: Duration) {
        match self {
            Self::Memory(_) => {}
            Self::Redis(local) => drop(local.store().wait_until_up(max_wait).await),
            Self::Memcached(local) => drop(local.store().wait_until_up(max_wait).await),
        }
    }

    /// Returns idle leases to the store and reports the hits of eventual counters. Must be called periodically.
    pub async fn sweep(&self, now: Micros) {
        match self {
            Self::Memory(_) => {}
            Self::Redis(local) => local.sweep(now).await,
            Self::Memcached(local) => local.sweep(now).await,
        }
    }

    /// Returns all leases to the store and reports all hits of eventual counters. To be called at shutdown.
    pub async fn return_all(&self, now: Micros) {
        match self {
            Self::Memory(_) => {}
            Self::Redis(local) => local.return_all(now).await,
            Self::Memcached(local) => local.return_all(now).await,
        }
    }

    /// Returns the numbers of operations decided from a lease, from an eventual counter and from the deny cache.
    #[must_use]
    pub fn local_decisions(&self) -> [u64; 3] {
        match self {
            Self::Memory(_) => [0; 3],
            Self::Redis(local) => local.metrics().decisions(),
            Self::Memcached(local) => local.metrics().decisions(),
        }
    }

    /// Returns the prefix of all keys on the servers; empty if the counters are in memory.
    #[must_use]
    pub fn key_prefix(&self) -> &str {
        self.remote().map(Servers::key_prefix).unwrap_or_default()
    }

    /// Returns the server of a counter. Returns `None` if the counter is in memory or its server is unknown.
    #[must_use]
    pub fn server_of(&self, key: &[u8], per_second: bool) -> Option<Arc<str>> {
        self.remote()?.server_of(key, per_second)
    }

    /// Returns the hash slot of a counter in Redis Cluster; `None` in other stores.
    #[must_use]
    pub fn hash_slot_of(&self, key: &[u8], per_second: bool) -> Option<u16> {
        self.remote()?.hash_slot_of(key, per_second)
    }

    /// Returns the name of the topology: `memory`, `memcached`, or for Redis `server`, `sentinel`, `cluster` or `ring`.
    #[must_use]
    pub fn topology(&self) -> &'static str {
        match self.remote() {
            Some(servers) => servers.topology(),
            None => "memory",
        }
    }

    /// Returns the name of each server and whether all workers are connected to it. The list is empty in memory.
    #[must_use]
    pub fn servers(&self) -> Vec<(Arc<str>, bool)> {
        self.remote().map(Servers::servers).unwrap_or_default()
    }
}

impl Store for AnyStore {
    async fn apply(&self, hits: &[Hit<&Counter>], charge: Charge, now: Micros) -> HitDecisions {
        match self {
            Self::Memory(memory) => memory.decide_all(hits, charge, now),
            Self::Redis(redis) => redis.apply(hits, charge, now).await,
            Self::Memcached(memcached) => memcached.apply(hits, charge, now).await,
        }
    }

    async fn read(&self, counter: &Counter, now: Micros) -> Result<(State, Micros), StoreError> {
        match self {
            Self::Memory(memory) => memory.read(counter, now).await,
            Self::Redis(redis) => redis.read(counter, now).await,
            Self::Memcached(memcached) => memcached.read(counter, now).await,
        }
    }

    async fn delete(&self, name: &[u8], per_second: bool) -> Result<bool, StoreError> {
        match self {
            Self::Memory(memory) => Store::delete(&**memory, name, per_second).await,
            Self::Redis(redis) => redis.delete(name, per_second).await,
            Self::Memcached(memcached) => memcached.delete(name, per_second).await,
        }
    }

    fn report(&self, counter: &Counter, id: u64, used: u64, now: Micros) -> u64 {
        match self {
            Self::Memory(memory) => memory.report(counter, id, used, now),
            Self::Redis(redis) => redis.report(counter, id, used, now),
            Self::Memcached(memcached) => memcached.report(counter, id, used, now),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        algorithm::{MaxHits, fixed_window::FixedWindow},
        metrics::WorkerId,
    };

    #[tokio::test]
    async fn counters_in_memory_have_a_state_and_no_server() {
        let store = AnyStore::Memory(Arc::new(Memory::new(&memory::Settings::default())));
        let window = FixedWindow::new(MaxHits::hard(5), Micros::from_secs(60), false).unwrap();
        let counter = Counter::new(b"{d|k=v}", window);
        let (hit, now) = (counter.take(2), Micros::from_secs(60));
        assert!(store.apply(&[hit], Charge::Each, now).await[0].unwrap().decision.allowed);
        let (state, at) = store.read(&counter, now).await.unwrap();
        assert_eq!((counter.program.explain(&state, hit.peek().operation(at), true).used, at), (2, now));
        assert_eq!(
            [store.delete(b"{d|k=v}", false).await, store.delete(b"{d|k=v}", false).await],
            [Ok(true), Ok(false)]
        );
        assert_eq!((store.report(&counter, 1, 1, now), store.local_decisions()), (0, [0; 3]));
        assert_eq!((store.topology(), store.key_prefix(), store.servers()), ("memory", "", Vec::new()));
        assert_eq!((store.server_of(b"{d|k=v}", false), store.hash_slot_of(b"{d|k=v}", false)), (None, None));
    }

    /// The servers are unreachable.
    #[tokio::test]
    async fn counters_in_redis_have_a_server_or_a_hash_slot() {
        let start = |url: &str| {
            let (metrics, worker, settings) = (Metrics::new(1), WorkerId(0), redis::Settings::default());
            let (deny_cache, leases, eventual) = Default::default();
            let local = Arc::clone(&metrics.local);
            let shared = local::LocalState::new(&deny_cache, &leases, &eventual, TimeSource::Caller, local);
            let setup = redis::Setup::new(url, &settings, TimeSource::Caller, Arc::clone(&metrics.redis)).unwrap();
            AnyStore::Redis(Local::new(setup.connect(worker), shared, worker))
        };
        let location = |store: &AnyStore| (store.server_of(b"{foo}x", false), store.hash_slot_of(b"{foo}x", false));
        let (server, cluster) = (start("redis://127.0.0.1:1"), start("redis+cluster://127.0.0.1:1"));
        assert_eq!((server.topology(), server.key_prefix()), ("server", "sluicegate:"));
        assert_eq!(server.servers(), [(Arc::from("127.0.0.1:1"), false)]);
        assert_eq!(location(&server), (Some("127.0.0.1:1".into()), None));
        assert_eq!(cluster.topology(), "cluster");
        assert_eq!(location(&cluster), (None, Some(12_182)), "`CLUSTER KEYSLOT foo`");
    }
}
