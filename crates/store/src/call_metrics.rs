//! [`CallMetrics`]: latency and errors of the calls to the servers of a store.

use std::{sync::Arc, time::Duration};

use sluicegate_metrics::{Counter, Histogram, Instrument, Label, Meter, WorkerId};

use super::StoreError;

/// Latency and errors of the calls to the servers of a store.
pub struct CallMetrics {
    latency: Arc<Histogram>,
    errors: [Counter; StoreError::ALL.len()],
}

impl CallMetrics {
    /// Creates metrics at zero for `workers` workers.
    #[must_use]
    pub fn new(workers: usize) -> Arc<Self> {
        let latency =
            Histogram::new("sluicegate_store_seconds", "Time in seconds until a store call was answered", workers);
        Arc::new(Self { latency: Arc::new(latency), errors: std::array::from_fn(|_| Counter::new(workers)) })
    }

    /// Records the time after which a call was answered.
    pub fn record_latency(&self, worker: WorkerId, elapsed: Duration) {
        self.latency.record(worker, elapsed);
    }

    /// Counts a call that failed.
    pub fn count_error(&self, worker: WorkerId, error: StoreError) {
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
        let metrics = CallMetrics::new(1);
        for error in StoreError::ALL {
            metrics.count_error(WorkerId(0), error);
        }
        assert_eq!(metrics.errors(), StoreError::ALL.len() as u64);
    }
}
