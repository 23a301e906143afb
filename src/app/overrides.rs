//! The overrides phase: what operators have set, and candidate rules.

use std::sync::Arc;

use opentelemetry::metrics::Meter;

use super::{AppError, rules::Rules, telemetry::Telemetry};
use crate::{
    service::{Candidates, OverrideSync},
    settings::Settings,
    store::{
        AnyStore,
        overrides::{Journal, OverrideStore},
    },
};

/// The components that apply the changes of operators: overrides and candidate rules.
pub(super) struct Operations {
    pub(super) overrides: Arc<OverrideSync>,
    pub(super) candidates: Arc<Candidates>,
}

impl Operations {
    /// Loads the overrides and the promoted rules, so that they apply from the first decision on.
    pub(super) async fn start(
        settings: &Settings,
        telemetry: &Telemetry,
        rules: &Rules,
        store: &AnyStore,
    ) -> Result<Self, AppError> {
        let (clock, reloader) = (telemetry.clock.clone(), Arc::clone(&rules.reloader));
        let override_store = OverrideStore::for_counters(store, Journal::new(settings.overrides.file.clone()));
        let overrides = OverrideSync::new(
            override_store,
            settings.overrides.clone(),
            rules.options,
            clock.clone(),
            Arc::clone(&reloader),
        );
        overrides.start().await?;
        let directory = (settings.rules.candidate_dir.clone(), settings.rules.candidate_share);
        let recorders = telemetry.workers + 1;
        let candidates =
            Candidates::new(Arc::clone(&overrides), reloader, rules.resources(), clock, recorders, directory);
        candidates.poll(false).await;
        Ok(Self { overrides, candidates })
    }

    /// Registers the metrics of overrides and candidate rules.
    pub(super) fn observe(&self, meter: &Meter) {
        self.overrides.observe(meter);
        self.candidates.observe(meter);
    }
}
