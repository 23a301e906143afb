//! How the store does: time per call, and calls that failed.

use std::{sync::Arc, time::Duration};

use opentelemetry::{KeyValue, metrics::Meter};

use super::{StoreError, local, redis::Health};
use crate::metrics::{Counter, Histogram, WorkerId};

/// Counts of a store that is asked over the network.
pub struct Metrics {
    latency: Arc<Histogram>,
    errors: [Counter; StoreError::ALL.len()],
    redis: Arc<Health>,
    local: Arc<local::Metrics>,
}

impl Metrics {
    /// Nothing counted yet.
    #[must_use]
    pub fn new(workers: usize) -> Arc<Self> {
        let errors = std::array::from_fn(|_| Counter::new(workers));
        let (redis, local) = (Health::new(workers), local::Metrics::new(workers));
        let latency = Histogram::new("sluicegate_store_seconds", "Time of store calls that were answered", workers);
        Arc::new(Self { latency: Arc::new(latency), errors, redis, local })
    }

    /// Of what is decided before a store is asked.
    #[must_use]
    pub const fn local(&self) -> &Arc<local::Metrics> {
        &self.local
    }

    pub(super) fn redis(&self) -> &Arc<Health> {
        &self.redis
    }

    pub(super) fn answered(&self, worker: WorkerId, took: Duration) {
        self.latency.record(worker, took);
    }

    pub(super) fn failed(&self, worker: WorkerId, error: StoreError) {
        self.errors[error as usize].add(worker, 1);
    }

    /// How long calls took.
    #[must_use]
    pub const fn latency(&self) -> &Arc<Histogram> {
        &self.latency
    }

    /// Shows everything else to the meter.
    pub fn observe(self: &Arc<Self>, meter: &Meter) {
        self.redis.observe(meter);
        self.local.observe(meter);
        let this = Arc::clone(self);
        let errors =
            meter.u64_observable_counter("sluicegate_store_errors_total").with_description("Store calls that failed");
        errors
            .with_callback(move |observer| {
                for error in StoreError::ALL {
                    observer.observe(this.errors[error as usize].get(), &[KeyValue::new("kind", error.kind())]);
                }
            })
            .build();
    }
}
