//! [`Metrics`]: latency and errors of calls to Redis.

use std::{sync::Arc, time::Duration};

use sluicegate_metrics::{Counter, Histogram, Instrument, Label, Meter, WorkerId};
use sluicegate_store::StoreError;

use super::Health;

/// Metrics of the calls to Redis and of the state of its servers.
pub struct Metrics {
    latency: Arc<Histogram>,
    errors: [Counter; StoreError::ALL.len()],
    health: Arc<Health>,
}

impl Metrics {
    /// Creates metrics at zero for `workers` workers.
    #[must_use]
    pub fn new(workers: usize) -> Arc<Self> {
        let errors = std::array::from_fn(|_| Counter::new(workers));
        let health = Health::new(workers);
        let latency =
            Histogram::new("sluicegate_store_seconds", "Time in seconds until a store call was answered", workers);
        Arc::new(Self { latency: Arc::new(latency), errors, health })
    }

    pub(super) fn health(&self) -> &Arc<Health> {
        &self.health
    }

    pub(super) fn record_latency(&self, worker: WorkerId, elapsed: Duration) {
        self.latency.record(worker, elapsed);
    }

    pub(super) fn count_error(&self, worker: WorkerId, error: StoreError) {
        self.errors[error as usize].add(worker, 1);
    }

    /// Returns the histogram of call latencies.
    #[must_use]
    pub const fn latency(&self) -> &Arc<Histogram> {
        &self.latency
    }

    /// Returns the number of failed calls.
    #[must_use]
    pub fn errors(&self) -> u64 {
        self.errors.iter().map(Counter::get).sum()
    }

    /// Registers all metrics except the latency histogram with the meter.
    pub fn observe(self: &Arc<Self>, meter: &dyn Meter) {
        self.health.observe(meter);
        let this = Arc::clone(self);
        meter.register(Instrument::counter(
            "sluicegate_store_errors_total",
            "Number of failed store calls",
            move |observer| {
                for error in StoreError::ALL {
                    observer.observe(this.errors[error as usize].get(), [Label::new("kind", error.kind())]);
                }
            },
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_all_kinds_are_counted() {
        let metrics = Metrics::new(1);
        for error in StoreError::ALL {
            metrics.count_error(WorkerId(0), error);
        }
        assert_eq!(metrics.errors(), StoreError::ALL.len() as u64);
    }
}
