//! [`Metrics`]: latency and errors of calls to Redis, and the state of its servers.

use std::sync::Arc;

use sluicegate_metrics::Meter;
use sluicegate_store::CallMetrics;

use super::Health;

/// Metrics of the calls to Redis and of the state of its servers.
pub struct Metrics {
    calls: Arc<CallMetrics>,
    health: Arc<Health>,
}

impl Metrics {
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

    pub(super) fn calls(&self) -> &CallMetrics {
        &self.calls
    }

    pub(super) fn health(&self) -> &Arc<Health> {
        &self.health
    }

    /// Registers the metrics of the servers with the meter.
    pub fn observe(&self, meter: &dyn Meter) {
        self.health.observe(meter);
    }
}
