//! [`Metrics`]: calls to Redis, and decisions that are made without them.

use std::sync::Arc;

use super::{local, redis};
use crate::metrics::Meter;

/// Metrics of the store of an instance.
pub struct Metrics {
    /// Calls to Redis and the state of its servers.
    pub redis: Arc<redis::Metrics>,
    /// Decisions that are made without a call.
    pub local: Arc<local::Metrics>,
}

impl Metrics {
    /// Creates metrics at zero for `workers` workers.
    #[must_use]
    pub fn new(workers: usize) -> Arc<Self> {
        Arc::new(Self { redis: redis::Metrics::new(workers), local: local::Metrics::new(workers) })
    }

    /// Registers all metrics except the latency histogram with the meter.
    pub fn observe(&self, meter: &dyn Meter) {
        self.redis.observe(meter);
        self.local.observe(meter);
    }
}
