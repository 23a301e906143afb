//! The phase for operators: overrides, candidate rules, the activity of the last hour, and simulations.

use std::sync::Arc;

use super::{AppError, engine::EngineFactory, rules::Rules, telemetry::Telemetry};
use crate::{
    metrics::Meter,
    service::{
        Activity, Candidates, OverrideSync, Simulator,
        activity::{self, Sources},
    },
    settings::Settings,
    store::{
        AnyStore,
        overrides::{Journal, OverrideStore},
    },
};

/// The components for operators: overrides, candidate rules, the activity of the last hour, and simulations.
pub(super) struct OperatorServices {
    pub(super) overrides: Arc<OverrideSync>,
    pub(super) candidates: Arc<Candidates>,
    pub(super) activity: Arc<Activity>,
    pub(super) simulator: Arc<Simulator>,
}

impl OperatorServices {
    /// Creates the components, and loads the overrides and the promoted rules, so that both apply from the first
    /// decision on.
    pub(super) async fn start(
        settings: &Settings,
        telemetry: &Telemetry,
        rules: &Rules,
        store: &AnyStore,
        grpc_port: Option<u16>,
        engines: &EngineFactory,
    ) -> Result<Self, AppError> {
        let clock = telemetry.clock.clone();
        let in_force = Arc::clone(&rules.in_force);
        let override_store = OverrideStore::for_counters(store, Journal::new(settings.overrides.file.clone()));
        let overrides = OverrideSync::new(
            override_store,
            settings.overrides.clone(),
            rules.options,
            clock.clone(),
            Arc::clone(&in_force),
            engines.value_hash(),
        );
        overrides.start().await?;
        let directory = (settings.rules.candidate_dir.clone(), settings.rules.candidate_share);
        let recorders = telemetry.workers + 1;
        let candidates = Candidates::new(
            Arc::clone(&overrides),
            Arc::clone(&in_force),
            rules.resources(),
            clock.clone(),
            recorders,
            directory,
        );
        candidates.poll(false).await;
        let sources = Sources {
            decision_metrics: Arc::clone(&telemetry.decision_metrics),
            store_metrics: Arc::clone(&telemetry.store_metrics),
            statistics: Arc::clone(&telemetry.statistics),
            top: engines.top(),
            store: store.clone(),
            overrides: Arc::clone(&overrides),
            in_force: Arc::clone(&in_force),
            clock: clock.clone(),
        };
        let activity = Activity::new(sources, &activity::instance_name(grpc_port));
        let recorded = settings.record.dir.clone();
        let simulator = Simulator::new(in_force, Arc::clone(&overrides), clock, rules.options, recorded);
        Ok(Self { overrides, candidates, activity, simulator })
    }

    /// Registers the metrics of overrides and candidate rules.
    pub(super) fn observe(&self, meter: &dyn Meter) {
        self.overrides.observe(meter);
        self.candidates.observe(meter);
    }
}
