//! [`Engine`]: the rules, the counters and the statistics by which a worker decides.
//!
//! No method changes an engine: the snapshot of the rules is replaced as a whole, and the counters and statistics are
//! updated atomically. The methods are in the files of their subjects: `decide` (decisions), `matching` (limits of a
//! descriptor), `evaluate` (candidate rules), `quotas`, `inspect`, and `utilization` (reports about resources).

use std::sync::Arc;

use arc_swap::ArcSwap;
use sluicegate_metrics::WorkerId;
use sluicegate_rules::RuleSet;
use sluicegate_store::{Memory, memory};

use super::{Resources, Settings, Snapshot, Statistics, TopEntities};

/// The rules, the counters in a store `S` and the statistics by which one worker decides requests.
#[derive(Clone)]
pub struct Engine<S> {
    /// The worker that uses this engine.
    pub worker: WorkerId,
    /// Prefix of the counters' names; empty except for candidate rules.
    pub scope: &'static str,
    /// The store that has the counters.
    pub store: S,
    /// Local counters for the failure policy `local`.
    pub local: Arc<Memory>,
    /// The rules in force and the overrides.
    pub rules: Arc<ArcSwap<Snapshot>>,
    /// Statistics per rule.
    pub statistics: Arc<Statistics>,
    /// The entities with the most hits and the most denied hits; `None` for candidate rules and in a replay.
    pub top: Option<Arc<TopEntities>>,
    /// Settings that apply to all rules.
    pub settings: Arc<Settings>,
}

impl Engine<Arc<Memory>> {
    /// Creates an engine with its counters in memory, for one worker.
    #[must_use]
    pub fn in_memory(rules: RuleSet, statistics: Arc<Statistics>, settings: &memory::Settings) -> Self {
        let snapshot = Snapshot::new(rules, &statistics, &Resources::default());
        Self {
            worker: WorkerId(0),
            scope: "",
            store: Arc::new(Memory::new(settings)),
            local: Arc::new(Memory::new(settings)),
            rules: Arc::new(ArcSwap::from_pointee(snapshot)),
            statistics,
            top: None,
            settings: Arc::default(),
        }
    }
}

impl<S> Engine<S> {
    /// Returns the same engine with another store.
    #[must_use]
    pub fn with_store<T>(&self, store: T) -> Engine<T> {
        Engine {
            worker: self.worker,
            scope: self.scope,
            store,
            local: Arc::clone(&self.local),
            rules: Arc::clone(&self.rules),
            statistics: Arc::clone(&self.statistics),
            top: self.top.clone(),
            settings: Arc::clone(&self.settings),
        }
    }
}
