//! The engine phase: the parts with which each worker decides requests.

use std::{sync::Arc, time::Duration};

use super::{AppError, rules::Rules, store::StoreSetup, telemetry::Telemetry};
use crate::{
    engine::{Engine, Settings as DecisionSettings, Statistics, TopEntities, ValueHash},
    metrics::WorkerId,
    service::{Clock, Decisions, Recorder, decisions, read_hash_key, reload::RulesInForce},
    settings::Settings,
    store::{AnyStore, Memory},
    transport::HeaderStyle,
};

/// Maximum time for which the start waits for the first connection to the store. The service also starts without one.
const FIRST_CONNECTION_TIMEOUT: Duration = Duration::from_secs(1);

/// Factory of the workers' engines, which share everything but their connections to the store.
#[derive(Clone)]
pub(super) struct EngineFactory {
    pub(super) store: Arc<StoreSetup>,
    /// The counters of `on_error: local`, used while the store is unavailable; with the store `memory`, its counters.
    pub(super) local: Arc<Memory>,
    pub(super) recorder: Option<Arc<Recorder>>,
    pub(super) clock: Clock,
    statistics: Arc<Statistics>,
    top: Arc<TopEntities>,
    in_force: Arc<RulesInForce>,
    decisions: Arc<DecisionSettings>,
    metrics: Arc<decisions::Metrics>,
}

impl EngineFactory {
    /// Creates the state that all engines share.
    pub(super) fn new(
        settings: &Settings,
        telemetry: &Telemetry,
        rules: &Rules,
        store: StoreSetup,
    ) -> Result<Self, AppError> {
        let recorders = telemetry.workers + 1;
        let clock = telemetry.clock.clone();
        let response = &settings.response;
        let hash_key = settings.decisions.hash_key_file.as_deref();
        let hash_key = hash_key.map(read_hash_key).transpose().map_err(AppError::HashKey)?;
        let decisions = DecisionSettings {
            value_hash: hash_key.map(|key| ValueHash::new(&key)),
            instances: settings.cluster.divisor(),
            metadata: response.dynamic_metadata,
            policies: response.headers && response.header_style != HeaderStyle::Separate,
            ..settings.decisions.clone()
        };
        let local = match (&store, settings.cluster.has_peers()) {
            (StoreSetup::Memory(memory), _) => Arc::clone(memory),
            (StoreSetup::Redis(..) | StoreSetup::Memcached(..), true) => Arc::new(Memory::exchanged(&settings.memory)),
            (StoreSetup::Redis(..) | StoreSetup::Memcached(..), false) => Arc::new(Memory::new(&settings.memory)),
        };
        let recorder = Recorder::start(&settings.record, recorders, clock.now()).map_err(AppError::Record)?;
        Ok(Self {
            store: Arc::new(store),
            local,
            recorder,
            clock,
            statistics: Arc::clone(&telemetry.statistics),
            top: TopEntities::new(recorders),
            in_force: Arc::clone(&rules.in_force),
            decisions: Arc::new(decisions),
            metrics: Arc::clone(&telemetry.decision_metrics),
        })
    }

    /// Returns the counts of the top entities, which all workers share.
    pub(super) fn top(&self) -> Arc<TopEntities> {
        Arc::clone(&self.top)
    }

    /// Returns the hash that replaces values in names of counters and in the log; `None` without
    /// `decisions.hash_key_file`.
    pub(super) fn value_hash(&self) -> Option<ValueHash> {
        self.decisions.value_hash.clone()
    }

    /// Creates one worker's engine. Its connection to the store belongs to the current runtime.
    pub(super) fn decisions(&self, worker: WorkerId) -> Decisions {
        let engine = Engine {
            worker,
            scope: "",
            store: self.store.connect(worker),
            local: Arc::clone(&self.local),
            rules: Arc::clone(self.in_force.snapshot()),
            statistics: Arc::clone(&self.statistics),
            top: Some(Arc::clone(&self.top)),
            settings: Arc::clone(&self.decisions),
        };
        Decisions {
            engine,
            clock: self.clock.clone(),
            metrics: Arc::clone(&self.metrics),
            recorder: self.recorder.clone(),
        }
    }
}

/// Waits for the first connection to the store, for at most [`FIRST_CONNECTION_TIMEOUT`].
pub(super) async fn wait_until_up(store: &AnyStore) {
    store.wait_until_up(FIRST_CONNECTION_TIMEOUT).await;
}
