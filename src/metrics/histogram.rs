//! How long things take: fixed buckets, no lock.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use opentelemetry::{KeyValue, metrics::Meter};

use super::{Striped, WorkerId};

/// Upper bounds in microseconds: the service's answers are found in the first half, a store's outages in the second.
const BOUNDS: [u64; 16] = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000];

#[derive(Default)]
struct Stripe {
    /// The last one is for what is above every bound.
    buckets: [AtomicU64; BOUNDS.len() + 1],
    nanos: AtomicU64,
}

/// A distribution of durations.
pub struct Histogram(Striped<Stripe>);

impl Histogram {
    /// Empty, for so many workers.
    #[must_use]
    pub fn new(workers: usize) -> Self {
        Self(Striped::new(workers))
    }

    /// Notes one duration on the worker's stripe.
    pub fn record(&self, worker: WorkerId, took: Duration) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let bucket = BOUNDS.partition_point(|bound| bound * 1_000 < nanos);
        let stripe = self.0.of(worker);
        stripe.buckets[bucket].fetch_add(1, Relaxed);
        stripe.nanos.fetch_add(nanos, Relaxed);
    }

    /// How many durations were noted.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.cumulated()[BOUNDS.len()]
    }

    /// How many durations were noted, by bucket, each with a time in the middle of it.
    pub fn buckets(&self) -> impl Iterator<Item = (Duration, u64)> {
        let counts = self.cumulated();
        (0..=BOUNDS.len()).map(move |bucket| {
            let (below, above) = (bucket.checked_sub(1).map_or(0, |before| BOUNDS[before]), BOUNDS.get(bucket));
            let middle = above.map_or(below * 1_000, |above| (below + above) * 500);
            (Duration::from_nanos(middle), counts[bucket] - bucket.checked_sub(1).map_or(0, |before| counts[before]))
        })
    }

    fn cumulated(&self) -> [u64; BOUNDS.len() + 1] {
        let mut sum = 0;
        std::array::from_fn(|bucket| {
            sum += self.0.iter().map(|stripe| stripe.buckets[bucket].load(Relaxed)).sum::<u64>();
            sum
        })
    }

    fn seconds(&self) -> f64 {
        self.0.iter().map(|stripe| stripe.nanos.load(Relaxed)).sum::<u64>() as f64 / 1e9
    }

    /// Shows it as Prometheus' `<name>_bucket{le}`, `<name>_count` and `<name>_sum`.
    ///
    /// As counters: OpenTelemetry has no histogram that is read when someone collects, and its own one takes a lock
    /// for every value. To `histogram_quantile` they are the same.
    pub fn observe(self: &Arc<Self>, meter: &Meter, name: &'static str, description: &'static str) {
        let bounds: Vec<[KeyValue; 1]> = BOUNDS
            .iter()
            .map(|micros| (*micros as f64 / 1e6).to_string())
            .chain(["+Inf".to_owned()])
            .map(|bound| [KeyValue::new("le", bound)])
            .collect();
        let this = Arc::clone(self);
        let buckets = meter.u64_observable_counter(format!("{name}_bucket")).with_description(description);
        buckets
            .with_callback(move |observer| {
                for (count, bound) in this.cumulated().into_iter().zip(&bounds) {
                    observer.observe(count, bound);
                }
            })
            .build();
        let this = Arc::clone(self);
        let count = meter.u64_observable_counter(format!("{name}_count")).with_description(description);
        count.with_callback(move |observer| observer.observe(this.count(), &[])).build();
        let this = Arc::clone(self);
        let sum = meter.f64_observable_counter(format!("{name}_sum")).with_description(description);
        sum.with_callback(move |observer| observer.observe(this.seconds(), &[])).build();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_cumulative_and_inclusive_above() {
        let histogram = Histogram::new(2);
        for (worker, micros) in [(0, 1), (1, 2), (0, 3), (1, 1_000_000)] {
            histogram.record(WorkerId(worker), Duration::from_micros(micros));
        }
        let counts = histogram.cumulated();
        assert_eq!(counts[..4], [1, 2, 3, 3]);
        assert_eq!(counts[BOUNDS.len() - 1..], [3, 4]);
        assert!((histogram.seconds() - 1.000_006).abs() < 1e-9);
        let noted: Vec<_> = histogram.buckets().filter(|(_, count)| *count > 0).collect();
        let nanos = |nanos| Duration::from_nanos(nanos);
        assert_eq!(noted, [(nanos(500), 1), (nanos(1_500), 1), (nanos(3_500), 1), (nanos(100_000_000), 1)]);
    }
}
