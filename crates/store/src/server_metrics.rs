//! [`ServerMetrics`]: calls to the servers of a store, and the state of the servers.

use std::sync::Arc;

use sluicegate_metrics::Meter;

use super::{
    CallMetrics,
    health::{FailureKind, Health},
};

/// Metrics of the calls to the servers of a store, whose failures have the kinds `F`, and of the state of the servers.
pub struct ServerMetrics<F> {
    calls: Arc<CallMetrics>,
    health: Arc<Health<F>>,
}

impl<F: FailureKind> ServerMetrics<F> {
    /// Creates metrics at zero for `workers` workers.
    #[must_use]
    pub fn new(workers: usize) -> Arc<Self> {
        Self::with_calls(CallMetrics::new(workers), workers)
    }

    /// Creates metrics that record calls in `calls`, and that are otherwise at zero for `workers` workers.
    #[must_use]
    pub fn with_calls(calls: Arc<CallMetrics>, workers: usize) -> Arc<Self> {
        Arc::new(Self { calls, health: Health::new(workers) })
    }

    /// Returns the metrics of the calls.
    #[must_use]
    pub fn calls(&self) -> &CallMetrics {
        &self.calls
    }

    /// Returns the state of the servers.
    #[must_use]
    pub fn health(&self) -> &Arc<Health<F>> {
        &self.health
    }

    /// Registers the metrics of the servers with the meter, without those of the calls.
    pub fn observe(&self, meter: &dyn Meter) {
        self.health.observe(meter);
    }
}
