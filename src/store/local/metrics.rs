//! How much is decided without asking.

use std::sync::Arc;

use opentelemetry::metrics::Meter;

use crate::metrics::{Counter, WorkerId, observe_counter};

/// Counts of what this instance knows.
pub struct Metrics {
    refused: Counter,
}

impl Metrics {
    /// Nothing counted yet.
    #[must_use]
    pub fn new(workers: usize) -> Arc<Self> {
        Arc::new(Self { refused: Counter::new(workers) })
    }

    pub(super) fn refused(&self, worker: WorkerId, hits: u64) {
        self.refused.add(worker, hits);
    }

    /// Shows everything to the meter.
    pub fn observe(self: &Arc<Self>, meter: &Meter) {
        let this = Arc::clone(self);
        let what = "Questions to counters that were refused without asking the store";
        observe_counter(meter, "sluicegate_deny_cache_refusals", what, move || this.refused.get());
    }
}
