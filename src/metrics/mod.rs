//! Numbers that the hot path may touch: plain relaxed atomics, one stripe for each worker, so that two workers never
//! write to one cache line. Whoever collects adds the stripes up, through OpenTelemetry's observable instruments.

mod histogram;
mod log_throttle;

pub use histogram::{Distribution, Exemplar, Histogram, Native, SCHEMA, TraceId, ZERO};
pub use log_throttle::LogThrottle;

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use opentelemetry::metrics::Meter;

/// Numbers that only grow, by their names in statsd.
pub type Totals = BTreeMap<String, u64>;

/// Which stripe a thread writes to; every worker has its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerId(pub usize);

/// A value per worker, each on cache lines of its own.
pub struct Striped<T>(Box<[CacheLine<T>]>);

#[repr(align(64))]
#[derive(Default)]
struct CacheLine<T>(T);

impl<T: Default> Striped<T> {
    /// One stripe for each of so many workers.
    #[must_use]
    pub fn new(workers: usize) -> Self {
        Self((0..workers.max(1)).map(|_| CacheLine::default()).collect())
    }

    /// The worker's own.
    #[must_use]
    pub fn of(&self, worker: WorkerId) -> &T {
        &self.0[worker.0 % self.0.len()].0
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|line| &line.0)
    }
}

/// A number that only grows.
pub struct Counter(Striped<AtomicU64>);

impl Counter {
    /// At 0, for so many workers.
    #[must_use]
    pub fn new(workers: usize) -> Self {
        Self(Striped::new(workers))
    }

    /// Adds on the worker's stripe.
    pub fn add(&self, worker: WorkerId, count: u64) {
        self.0.of(worker).fetch_add(count, Relaxed);
    }

    /// The sum.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.iter().map(|stripe| stripe.load(Relaxed)).sum()
    }
}

/// Makes a number that is read when somebody collects into a counter of the meter.
pub fn observe_counter(
    meter: &Meter,
    name: &'static str,
    description: &'static str,
    read: impl Fn() -> u64 + Send + Sync + 'static,
) {
    let counter = meter.u64_observable_counter(name).with_description(description);
    counter.with_callback(move |observer| observer.observe(read(), &[])).build();
}

/// The same for a number that goes up and down.
pub fn observe_gauge(
    meter: &Meter,
    name: &'static str,
    description: &'static str,
    read: impl Fn() -> u64 + Send + Sync + 'static,
) {
    let gauge = meter.u64_observable_gauge(name).with_description(description);
    gauge.with_callback(move |observer| observer.observe(read(), &[])).build();
}
