//! [`Metrics`]: calls to the servers of a store, and decisions that are made without them.

use std::sync::Arc;

use super::{CallMetrics, local, memcached, redis};
use crate::metrics::Meter;

/// Metrics of the store of an instance.
pub struct Metrics {
    /// Latency and errors of the calls.
    pub calls: Arc<CallMetrics>,
    /// State of the servers of Redis.
    pub redis: Arc<redis::Metrics>,
    /// State of the servers of memcached.
    pub memcached: Arc<memcached::Metrics>,
    /// Decisions that are made without a call.
    pub local: Arc<local::Metrics>,
}

impl Metrics {
    /// Creates metrics at zero for `workers` workers.
    #[must_use]
    pub fn new(workers: usize) -> Arc<Self> {
        let calls = CallMetrics::new(workers);
        Arc::new(Self {
            redis: redis::Metrics::with_calls(Arc::clone(&calls), workers),
            memcached: memcached::Metrics::with_calls(Arc::clone(&calls), workers),
            local: local::Metrics::new(workers),
            calls,
        })
    }

    /// Registers the metrics that all stores with servers have, except the latency histogram, with the meter.
    pub fn observe(&self, meter: &dyn Meter) {
        self.calls.observe(meter);
        self.local.observe(meter);
    }
}
