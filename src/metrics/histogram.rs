//! How long things take: fixed buckets, no lock.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use super::{Striped, WorkerId};

/// Upper bounds in microseconds: the service's answers are found in the first half, a store's outages in the second.
const BOUNDS: [u64; 16] = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000];

/// Of Prometheus' native histograms: each bucket ends 2^(2^-3), about 9%, above the one before.
pub const SCHEMA: i32 = 3;
/// And the eight of them in a power of two.
const STEPS: [f64; 1 << SCHEMA] = [
    1.0,
    1.090_507_732_665_257_7,
    1.189_207_115_002_721,
    1.296_839_554_651_009_6,
    std::f64::consts::SQRT_2,
    1.542_210_825_407_940_7,
    1.681_792_830_507_429,
    1.834_008_086_409_342_4,
];
/// The powers of two, of a second, at which they begin and end: 60 ns and 16 s.
const POWERS: [i32; 2] = [-24, 4];
const NATIVE: usize = ((POWERS[1] - POWERS[0]) as usize) << SCHEMA;
/// What is no longer than this counts as nothing in a native histogram, in seconds.
pub const ZERO: f64 = 1.0 / (1 << -POWERS[0]) as f64;

/// Both kinds of buckets are sums of the same cells, so that a duration is counted in one place: where a cell ends, a
/// bucket of one kind or of the other ends. In nanoseconds.
static CELLS: [u64; BOUNDS.len() + NATIVE + 1] = cells();

/// Where the native bucket of this number ends, in nanoseconds; the first one is the nothing.
const fn native_bound(bucket: usize) -> u64 {
    let mut bound = STEPS[bucket % STEPS.len()] * 1e9;
    let mut power = POWERS[0] + (bucket >> SCHEMA) as i32;
    while power < 0 {
        (bound, power) = (bound / 2.0, power + 1);
    }
    while power > 0 {
        (bound, power) = (bound * 2.0, power - 1);
    }
    bound as u64
}

const fn cells() -> [u64; BOUNDS.len() + NATIVE + 1] {
    let mut cells = [0; BOUNDS.len() + NATIVE + 1];
    let (mut classic, mut native) = (0, 0);
    while classic + native < cells.len() {
        let nanos = if native <= NATIVE { native_bound(native) } else { u64::MAX };
        let cell = &mut cells[classic + native];
        if classic < BOUNDS.len() && BOUNDS[classic] * 1_000 < nanos {
            (*cell, classic) = (BOUNDS[classic] * 1_000, classic + 1);
        } else {
            (*cell, native) = (nanos, native + 1);
        }
    }
    cells
}

struct Stripe {
    /// The last one is for what is above every bound.
    cells: [AtomicU64; CELLS.len() + 1],
    nanos: AtomicU64,
}

impl Default for Stripe {
    fn default() -> Self {
        Self { cells: [const { AtomicU64::new(0) }; CELLS.len() + 1], nanos: AtomicU64::new(0) }
    }
}

/// The trace that one duration belongs to (OpenMetrics' exemplar).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Exemplar {
    /// Whose.
    pub trace: TraceId,
    /// How long it took.
    pub seconds: f64,
    /// When that was, since the Unix epoch.
    pub at: Duration,
}

/// W3C's 16 bytes, as a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceId(pub u128);

/// A distribution of durations.
pub struct Histogram {
    /// What it is shown as.
    pub name: &'static str,
    /// What it says.
    pub description: &'static str,
    /// What is the same of all its durations.
    pub labels: &'static [(&'static str, &'static str)],
    stripes: Striped<Stripe>,
    /// The latest of each classic bucket.
    exemplars: [Mutex<Option<Exemplar>>; BOUNDS.len() + 1],
}

/// What a histogram holds at some time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Distribution {
    /// How many durations there are.
    pub count: u64,
    /// How long they are together, in seconds.
    pub sum: f64,
    /// By classic bucket: its upper bound in seconds, how many are not above it, and one of those in it. What is above
    /// every bound is in one more, which ends nowhere.
    pub buckets: Vec<(f64, u64, Option<Exemplar>)>,
    /// The same by native bucket, where the unit is the second.
    pub native: Option<Native>,
}

/// What is in native buckets.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Native {
    /// How many durations are no longer than [`ZERO`].
    pub zero: u64,
    /// Of the buckets that have any: the index, and how many are in it.
    pub buckets: Vec<(i32, u64)>,
}

impl Distribution {
    /// The same in another unit, of which so many are a second.
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
    /// Empty, for so many workers.
    #[must_use]
    pub fn new(name: &'static str, description: &'static str, workers: usize) -> Self {
        let exemplars = [const { Mutex::new(None) }; BOUNDS.len() + 1];
        Self { name, description, labels: &[], stripes: Striped::new(workers), exemplars }
    }

    /// The same, with these labels.
    #[must_use]
    pub fn with_labels(self, labels: &'static [(&'static str, &'static str)]) -> Self {
        Self { labels, ..self }
    }

    /// Notes one duration on the worker's stripe.
    pub fn record(&self, worker: WorkerId, took: Duration) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let stripe = self.stripes.of(worker);
        stripe.cells[CELLS.partition_point(|end| *end < nanos)].fetch_add(1, Relaxed);
        stripe.nanos.fetch_add(nanos, Relaxed);
    }

    /// Keeps it as the one that its bucket shows: for the few durations that are traced. `at`: since the Unix epoch.
    pub fn exemplify(&self, took: Duration, trace: TraceId, at: Duration) {
        let exemplar = Exemplar { trace, seconds: took.as_secs_f64(), at };
        let bucket = BOUNDS.partition_point(|bound| u128::from(*bound) * 1_000 < took.as_nanos());
        *self.exemplars[bucket].lock().unwrap_or_else(PoisonError::into_inner) = Some(exemplar);
    }

    /// How many durations were noted.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.stripes.iter().flat_map(|stripe| &stripe.cells).map(|cell| cell.load(Relaxed)).sum()
    }

    /// How many durations were noted, by classic bucket, each with a time in the middle of it.
    pub fn buckets(&self) -> impl Iterator<Item = (Duration, u64)> {
        let mut before = (0.0, 0);
        self.distribution().buckets.into_iter().map(move |(bound, count, _)| {
            let middle = if bound.is_finite() { f64::midpoint(before.0, bound) } else { before.0 };
            let among = count - before.1;
            before = (bound, count);
            (Duration::from_nanos((middle * 1e9).round() as u64), among)
        })
    }

    /// All of it.
    #[must_use]
    pub fn distribution(&self) -> Distribution {
        let mut distribution = Distribution::default();
        let (mut native, mut filled) = (0, Native::default());
        for cell in 0..=CELLS.len() {
            let count: u64 = self.stripes.iter().map(|stripe| stripe.cells[cell].load(Relaxed)).sum();
            distribution.count += count;
            if native == 0 {
                filled.zero += count;
            } else if count > 0 {
                // A native bucket's index is that of its upper bound; what is above the last one is in the next.
                let index = (POWERS[0] << SCHEMA) + native as i32;
                match filled.buckets.last_mut() {
                    Some((last, sum)) if *last == index => *sum += count,
                    _ => filled.buckets.push((index, count)),
                }
            }
            let classic = distribution.buckets.len();
            let end = CELLS.get(cell).copied();
            let bound = BOUNDS.get(classic).map(|micros| micros * 1_000);
            if end == bound {
                let bound = bound.map_or(f64::INFINITY, |nanos| nanos as f64 / 1e9);
                let exemplar = *self.exemplars[classic].lock().unwrap_or_else(PoisonError::into_inner);
                distribution.buckets.push((bound, distribution.count, exemplar));
            }
            if native <= NATIVE && end == Some(native_bound(native)) {
                native += 1;
            }
        }
        distribution.native = Some(filled);
        distribution.sum = self.stripes.iter().map(|stripe| stripe.nanos.load(Relaxed)).sum::<u64>() as f64 / 1e9;
        distribution
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn buckets_are_cumulative_and_inclusive_above() {
        let histogram = Histogram::new("x", "", 2);
        for (worker, micros) in [(0, 1), (1, 2), (0, 3)] {
            histogram.record(WorkerId(worker), Duration::from_micros(micros));
        }
        histogram.record(WorkerId(1), Duration::from_secs(1));
        histogram.exemplify(Duration::from_secs(1), TraceId(7), Duration::ZERO);
        let Distribution { count, sum, buckets, .. } = histogram.distribution();
        let counts: Vec<_> = buckets.iter().map(|(_, count, _)| *count).collect();
        assert_eq!(counts[..4], [1, 2, 3, 3]);
        assert_eq!(counts[BOUNDS.len() - 1..], [3, 4]);
        assert_eq!((count, histogram.count(), buckets[1].0), (4, 4, 2e-6));
        assert!((sum - 1.000_006).abs() < 1e-9);
        let (last, _, exemplar) = buckets[BOUNDS.len()];
        assert_eq!((last, exemplar.map(|it| (it.trace, it.seconds))), (f64::INFINITY, Some((TraceId(7), 1.0))));
        assert!(buckets[..BOUNDS.len()].iter().all(|(_, _, exemplar)| exemplar.is_none()));
        let noted: Vec<_> = histogram.buckets().filter(|(_, count)| *count > 0).collect();
        let nanos = |nanos| Duration::from_nanos(nanos);
        assert_eq!(noted, [(nanos(500), 1), (nanos(1_500), 1), (nanos(3_500), 1), (nanos(100_000_000), 1)]);
    }

    #[test]
    fn cells_are_in_order() {
        assert!(CELLS.is_sorted_by(|a, b| a < b));
        assert_eq!((native_bound(0), native_bound(NATIVE)), (59, 16_000_000_000));
    }

    proptest! {
        /// Prometheus: bucket `i` has what is above 2^((i-1)/8) and not above 2^(i/8).
        #[test]
        fn a_native_bucket_is_the_one_of_the_definition(nanos in 60..16_000_000_000_u64) {
            let histogram = Histogram::new("x", "", 1);
            histogram.record(WorkerId(0), Duration::from_nanos(nanos));
            let native = histogram.distribution().native;
            let index = ((nanos as f64 / 1e9).log2() * 8.0).ceil() as i32;
            prop_assert_eq!(native, Some(Native { zero: 0, buckets: vec![(index, 1)] }));
        }
    }

    #[test]
    fn what_is_outside_of_the_native_buckets_is_counted_too() {
        let histogram = Histogram::new("x", "", 1);
        for nanos in [0, 59, u64::MAX] {
            histogram.record(WorkerId(0), Duration::from_nanos(nanos));
        }
        let Distribution { native, count, .. } = histogram.distribution();
        assert_eq!((native, count), (Some(Native { zero: 2, buckets: vec![(33, 1)] }), 3));
    }
}
