//! [`Histogram`]: a lock-free distribution of durations in fixed buckets.

use std::{
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use super::{Striped, WorkerId};
use parking_lot::Mutex;

/// Upper bounds of the classic buckets in microseconds. Normal responses are in the first half, those during an outage
/// of the store in the second.
const BOUNDS: [u64; 16] = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000];

/// Schema of Prometheus' native histograms: the upper bound of each bucket is 2^(2^-3) times that of the previous one,
/// about 9% more.
pub const SCHEMA: i32 = 3;
/// Powers of two, in seconds, at which the native buckets begin and end: 60 ns and 16 s.
const EXPONENTS: [i32; 2] = [-24, 4];
const NATIVE_BUCKETS: usize = ((EXPONENTS[1] - EXPONENTS[0]) as usize) << SCHEMA;
/// Duration in seconds up to which native histograms count a duration as zero.
pub const ZERO_THRESHOLD: f64 = 1.0 / (1 << -EXPONENTS[0]) as f64;

/// Upper bounds of the cells in nanoseconds. Both kinds of buckets are sums of the same cells, so that each duration is
/// counted in only one place: where a cell ends, a bucket of at least one kind ends.
static CELLS: LazyLock<Vec<u64>> = LazyLock::new(|| {
    let classic = BOUNDS.iter().map(|micros| micros * 1_000);
    let mut cells: Vec<u64> = classic.chain((0..=NATIVE_BUCKETS).map(native_bound)).collect();
    cells.sort_unstable();
    cells
});

/// Returns the upper bound of a native bucket in nanoseconds; bucket 0 contains durations that count as zero.
fn native_bound(bucket: usize) -> u64 {
    let buckets_per_power = f64::from(1 << SCHEMA);
    ((f64::from(EXPONENTS[0]) + bucket as f64 / buckets_per_power).exp2() * 1e9) as u64
}

struct Stripe {
    /// Counts of the cells; the last one contains durations above every bound.
    cells: Vec<AtomicU64>,
    nanos: AtomicU64,
}

impl Default for Stripe {
    fn default() -> Self {
        Self { cells: (0..=CELLS.len()).map(|_| AtomicU64::new(0)).collect(), nanos: AtomicU64::new(0) }
    }
}

/// An example of a duration with its trace (an OpenMetrics exemplar).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Exemplar {
    /// Trace of the request.
    pub trace: TraceId,
    /// Duration in seconds.
    pub seconds: f64,
    /// Time of the measurement since the Unix epoch.
    pub at: Duration,
}

/// A W3C trace ID of 16 bytes, as a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceId(pub u128);

/// A histogram of durations with one stripe per worker.
pub struct Histogram {
    /// Name of the metric.
    pub name: &'static str,
    /// Description of the metric.
    pub description: &'static str,
    /// Labels of the metric.
    pub labels: &'static [(&'static str, &'static str)],
    /// Second name, under which the histogram is exported without labels and always in seconds.
    pub seconds_name: Option<&'static str>,
    stripes: Striped<Stripe>,
    /// Latest exemplar of each classic bucket.
    exemplars: [Mutex<Option<Exemplar>>; BOUNDS.len() + 1],
}

/// The contents of a histogram at one time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Distribution {
    /// Number of durations.
    pub count: u64,
    /// Sum of the durations in seconds.
    pub sum: f64,
    /// Classic buckets: upper bound in seconds, number of durations up to it, and an exemplar from the bucket. The last
    /// bucket has an infinite bound.
    pub buckets: Vec<(f64, u64, Option<Exemplar>)>,
    /// Native buckets; only if the unit is the second.
    pub native: Option<NativeBuckets>,
}

/// The buckets of a histogram in the form of Prometheus' native histograms ([`SCHEMA`]).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NativeBuckets {
    /// Number of durations up to [`ZERO_THRESHOLD`].
    pub zero: u64,
    /// Index and count of each non-empty bucket.
    pub buckets: Vec<(i32, u64)>,
}

/// The number of durations in each cell of a histogram. Cells are the intervals between the bounds of all its buckets.
/// The quantiles of a time are computed from the difference of two such values ([`Cells::since`]).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cells(Vec<u64>);

impl Cells {
    /// Returns the counts that were recorded after `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let mut counts = Vec::with_capacity(self.0.len());
        for (cell, count) in self.0.iter().enumerate() {
            let before = earlier.0.get(cell).copied().unwrap_or_default();
            counts.push(count.saturating_sub(before));
        }
        Self(counts)
    }

    /// Returns the duration that a share `quantile` of the recorded durations does not exceed, rounded up to the bound
    /// of a cell (about 9%). Returns zero if nothing was recorded.
    #[must_use]
    pub fn quantile(&self, quantile: f64) -> Duration {
        let total: u64 = self.0.iter().sum();
        if total == 0 {
            return Duration::ZERO;
        }
        let rank = (total as f64 * quantile).ceil().max(1.0) as u64;
        let mut count = 0;
        for (cell, in_cell) in self.0.iter().enumerate() {
            count += in_cell;
            if count >= rank {
                let bound = CELLS.get(cell).or(CELLS.last());
                return Duration::from_nanos(bound.copied().unwrap_or_default());
            }
        }
        Duration::ZERO
    }
}

impl Distribution {
    /// Converts the distribution to another unit, with `units` per second. Native buckets are removed.
    #[must_use]
    pub fn scaled(mut self, units: f64) -> Self {
        self.sum *= units;
        for (bound, _, exemplar) in &mut self.buckets {
            *bound *= units;
            if let Some(exemplar) = exemplar {
                exemplar.seconds *= units;
            }
        }
        self.native = None;
        self
    }
}

impl Histogram {
    /// Creates an empty histogram for `workers` workers.
    #[must_use]
    pub fn new(name: &'static str, description: &'static str, workers: usize) -> Self {
        let exemplars = [const { Mutex::new(None) }; BOUNDS.len() + 1];
        Self { name, description, labels: &[], seconds_name: None, stripes: Striped::new(workers), exemplars }
    }

    /// Sets the labels.
    #[must_use]
    pub fn with_labels(self, labels: &'static [(&'static str, &'static str)]) -> Self {
        Self { labels, ..self }
    }

    /// Exports the histogram under a second name, too: without labels, and in seconds even if settings change the unit
    /// of the first name.
    #[must_use]
    pub fn with_seconds_name(self, name: &'static str) -> Self {
        Self { seconds_name: Some(name), ..self }
    }

    /// Records a duration in the worker's stripe.
    pub fn record(&self, worker: WorkerId, took: Duration) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let stripe = self.stripes.of(worker);
        stripe.cells[CELLS.partition_point(|end| *end < nanos)].fetch_add(1, Relaxed);
        stripe.nanos.fetch_add(nanos, Relaxed);
    }

    /// Stores the duration as the exemplar of its bucket; only for the few traced requests. `at` is the time since the
    /// Unix epoch.
    pub fn record_exemplar(&self, took: Duration, trace: TraceId, at: Duration) {
        let exemplar = Exemplar { trace, seconds: took.as_secs_f64(), at };
        let bucket = BOUNDS.partition_point(|bound| u128::from(*bound) * 1_000 < took.as_nanos());
        *self.exemplars[bucket].lock() = Some(exemplar);
    }

    /// Returns the number of recorded durations.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.stripes.iter().flat_map(|stripe| &stripe.cells).map(|cell| cell.load(Relaxed)).sum()
    }

    /// Returns the current counts of the cells.
    #[must_use]
    pub fn cells(&self) -> Cells {
        Cells((0..=CELLS.len()).map(|cell| self.count_of(cell)).collect())
    }

    /// Returns the count of one cell in all stripes.
    fn count_of(&self, cell: usize) -> u64 {
        self.stripes.iter().map(|stripe| stripe.cells[cell].load(Relaxed)).sum()
    }

    /// Returns the midpoint and the count of each classic bucket. The last bucket has no upper bound, so its lower
    /// bound is returned as its midpoint.
    pub fn buckets(&self) -> impl Iterator<Item = (Duration, u64)> {
        let mut previous_bound = 0.0;
        let mut previous_count = 0;
        self.distribution().buckets.into_iter().map(move |(bound, count, _)| {
            let middle = if bound.is_finite() { f64::midpoint(previous_bound, bound) } else { previous_bound };
            let in_bucket = count - previous_count;
            previous_bound = bound;
            previous_count = count;
            (Duration::from_nanos((middle * 1e9).round() as u64), in_bucket)
        })
    }

    /// Returns the current contents.
    #[must_use]
    pub fn distribution(&self) -> Distribution {
        let mut distribution = Distribution::default();
        let mut native = 0;
        let mut native_buckets = NativeBuckets::default();
        for cell in 0..=CELLS.len() {
            let count = self.count_of(cell);
            distribution.count += count;
            if native == 0 {
                native_buckets.zero += count;
            } else if count > 0 {
                // The index of a native bucket is that of its upper bound. Durations above the last one are in the
                // next.
                let index = (EXPONENTS[0] << SCHEMA) + native as i32;
                match native_buckets.buckets.last_mut() {
                    Some((last, sum)) if *last == index => *sum += count,
                    _ => native_buckets.buckets.push((index, count)),
                }
            }
            let classic = distribution.buckets.len();
            let end = CELLS.get(cell).copied();
            let bound = BOUNDS.get(classic).map(|micros| micros * 1_000);
            if end == bound {
                let bound = match bound {
                    Some(nanos) => nanos as f64 / 1e9,
                    None => f64::INFINITY,
                };
                let exemplar = *self.exemplars[classic].lock();
                distribution.buckets.push((bound, distribution.count, exemplar));
            }
            if native <= NATIVE_BUCKETS && end == Some(native_bound(native)) {
                native += 1;
            }
        }
        distribution.native = Some(native_buckets);
        distribution.sum = self.stripes.iter().map(|stripe| stripe.nanos.load(Relaxed)).sum::<u64>() as f64 / 1e9;
        distribution
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn buckets_are_cumulative_and_include_their_upper_bound() {
        let histogram = Histogram::new("x", "", 2);
        for (worker, micros) in [(0, 1), (1, 2), (0, 3)] {
            histogram.record(WorkerId(worker), Duration::from_micros(micros));
        }
        histogram.record(WorkerId(1), Duration::from_secs(1));
        histogram.record_exemplar(Duration::from_secs(1), TraceId(7), Duration::ZERO);
        let Distribution { count, sum, buckets, .. } = histogram.distribution();
        let counts: Vec<_> = buckets.iter().map(|(_, count, _)| *count).collect();
        assert_eq!(counts[..4], [1, 2, 3, 3]);
        assert_eq!(counts[BOUNDS.len() - 1..], [3, 4]);
        assert_eq!((count, histogram.count(), buckets[1].0), (4, 4, 2e-6));
        assert!((sum - 1.000_006).abs() < 1e-9);
        let (last, _, exemplar) = buckets[BOUNDS.len()];
        assert_eq!(
            (last, exemplar.map(|exemplar| (exemplar.trace, exemplar.seconds))),
            (f64::INFINITY, Some((TraceId(7), 1.0)))
        );
        assert!(buckets[..BOUNDS.len()].iter().all(|(_, _, exemplar)| exemplar.is_none()));
        let recorded: Vec<_> = histogram.buckets().filter(|(_, count)| *count > 0).collect();
        let nanos = |nanos| Duration::from_nanos(nanos);
        assert_eq!(recorded, [(nanos(500), 1), (nanos(1_500), 1), (nanos(3_500), 1), (nanos(100_000_000), 1)]);
    }

    #[test]
    fn quantiles_are_those_of_the_period() {
        let histogram = Histogram::new("x", "", 2);
        assert_eq!(histogram.cells().quantile(0.5), Duration::ZERO);
        histogram.record(WorkerId(0), Duration::from_secs(1));
        let before = histogram.cells();
        (0..98).for_each(|_| histogram.record(WorkerId(1), Duration::from_micros(2)));
        histogram.record(WorkerId(0), Duration::from_millis(5));
        histogram.record(WorkerId(0), Duration::from_secs(100));
        let period = histogram.cells().since(&before);
        let micros = |quantile| period.quantile(quantile).as_micros();
        assert_eq!((micros(0.5), micros(0.98), micros(0.99)), (2, 2, 5_000));
        // Durations above the last bound count as the last bound.
        assert_eq!(period.quantile(1.0), Duration::from_nanos(CELLS[CELLS.len() - 1]));
        assert_eq!(Cells::default().since(&before), Cells::default());
    }

    #[test]
    fn cells_are_in_order() {
        assert!(CELLS.is_sorted_by(|a, b| a < b));
        assert_eq!((native_bound(0), native_bound(NATIVE_BUCKETS)), (59, 16_000_000_000));
    }

    proptest! {
        /// Prometheus defines that bucket `i` contains values above 2^((i-1)/8) up to 2^(i/8).
        #[test]
        fn native_buckets_are_those_of_prometheus(nanos in 60..16_000_000_000_u64) {
            let histogram = Histogram::new("x", "", 1);
            histogram.record(WorkerId(0), Duration::from_nanos(nanos));
            let native = histogram.distribution().native;
            let index = ((nanos as f64 / 1e9).log2() * 8.0).ceil() as i32;
            prop_assert_eq!(native, Some(NativeBuckets { zero: 0, buckets: vec![(index, 1)] }));
        }
    }

    #[test]
    fn durations_outside_of_the_native_buckets_are_counted() {
        let histogram = Histogram::new("x", "", 1);
        for nanos in [0, 59, u64::MAX] {
            histogram.record(WorkerId(0), Duration::from_nanos(nanos));
        }
        let Distribution { native, count, .. } = histogram.distribution();
        assert_eq!((native, count), (Some(NativeBuckets { zero: 2, buckets: vec![(33, 1)] }), 3));
    }

    /// A native bucket that contains the bound of a classic one consists of two cells.
    #[test]
    fn cells_of_one_native_bucket_are_added_up() {
        let histogram = Histogram::new("x", "", 1);
        for micros in [990, 1_010, 1_020, 3_000] {
            histogram.record(WorkerId(0), Duration::from_micros(micros));
        }
        let native = histogram.distribution().native.unwrap();
        assert_eq!(native.buckets, [(-79, 3), (-67, 1)]);
    }

    #[test]
    fn an_exemplar_is_in_the_bucket_of_its_duration_and_has_its_unit() {
        let histogram = Histogram::new("x", "", 1);
        let bucket = |took| {
            histogram.record_exemplar(took, TraceId(7), Duration::ZERO);
            let Distribution { buckets, .. } = histogram.distribution().scaled(1_000.0);
            let of = |seconds: f64| {
                let is_exemplar = |exemplar: &Exemplar| (exemplar.seconds - seconds * 1_000.0).abs() < 1e-9;
                buckets.iter().find(|(_, _, exemplar)| exemplar.as_ref().is_some_and(is_exemplar))
            };
            of(took.as_secs_f64()).map(|(bound, _, _)| *bound)
        };
        let bounds = [1_500, 2_000, 2_001].map(|nanos| bucket(Duration::from_nanos(nanos)));
        assert_eq!(bounds, [Some(0.002), Some(0.002), Some(0.005)]);
    }
}
