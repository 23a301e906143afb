//! Metrics for the hot path: relaxed atomics with one stripe per worker, so that two workers never write to the same
//! cache line. Collecting adds up the stripes, in the callbacks of the [instruments](Instrument) of a [`Meter`].

mod histogram;
mod instrument;
mod log;
mod registry;
#[cfg(any(test, feature = "testing"))]
mod test_meter;

pub use histogram::{Cells, Distribution, Exemplar, Histogram, NativeBuckets, SCHEMA, TraceId, ZERO_THRESHOLD};
pub use instrument::{Callback, Instrument, InstrumentKind, Label, LabelValue, Meter, Observer, ReadSeries, Registrar};
pub use log::{LogThrottle, chain};
pub use registry::{Metric, Number, Registry, Series};
#[cfg(any(test, feature = "testing"))]
pub use test_meter::TestMeter;

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

/// Current values of all counters by their names in statsd.
pub type Totals = BTreeMap<String, u64>;

/// Index of a worker, which selects its stripe.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerId(pub usize);

/// One value per worker, each on its own cache lines.
pub struct Striped<T>(Box<[CacheLine<T>]>);

/// A value on cache lines of its own, so that threads that use its neighbours do not wait for it.
#[repr(align(64))]
#[derive(Default)]
pub struct CacheLine<T>(pub T);

impl<T: Default> Striped<T> {
    /// Creates one stripe for each of `workers` workers.
    #[must_use]
    pub fn new(workers: usize) -> Self {
        Self((0..workers.max(1)).map(|_| CacheLine::default()).collect())
    }

    /// Returns the stripe of a worker.
    #[must_use]
    pub fn of(&self, worker: WorkerId) -> &T {
        &self.0[worker.0 % self.0.len()].0
    }

    /// Returns all stripes.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|line| &line.0)
    }
}

/// A counter with one stripe per worker.
pub struct Counter(Striped<AtomicU64>);

impl Counter {
    /// Creates a counter at 0 for `workers` workers.
    #[must_use]
    pub fn new(workers: usize) -> Self {
        Self(Striped::new(workers))
    }

    /// Adds `count` to the worker's stripe.
    pub fn add(&self, worker: WorkerId, count: u64) {
        self.0.of(worker).fetch_add(count, Relaxed);
    }

    /// Returns the sum of the stripes.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.iter().map(|stripe| stripe.load(Relaxed)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_worker_has_its_own_stripe() {
        let counts = Striped::<AtomicU64>::new(3);
        for worker in 0..7 {
            counts.of(WorkerId(worker)).fetch_add(1 << worker, Relaxed);
        }
        let stripes: Vec<_> = counts.iter().map(|count| count.load(Relaxed)).collect();
        assert_eq!(stripes, [0b100_1001, 0b1_0010, 0b10_0100]);
    }
}
