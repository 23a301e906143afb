//! `VegasLimit`.

use super::{Estimate, Sample};

/// After about so many times the limit the baseline is measured anew.
const PROBE: f64 = 30.0;

pub(super) fn update(estimate: &mut Estimate, sample: Sample, chance: f64) {
    estimate.count = estimate.count.saturating_add(1);
    // From half of it on: limits that began together do not all measure together.
    if (0.5 + chance / 2.0) * PROBE * estimate.limit <= f64::from(estimate.count) {
        estimate.probe();
        return;
    }
    if estimate.baseline == 0.0 || sample.latency < estimate.baseline {
        estimate.baseline = sample.latency;
        return;
    }
    let limit = estimate.limit;
    let queue = (limit * (1.0 - estimate.baseline / sample.latency)).ceil();
    let step = f64::from(log10(limit));
    estimate.limit = if sample.dropped {
        limit - step
    } else if f64::from(sample.in_flight) * 2.0 < limit {
        // A limit that is not used says nothing.
        limit
    } else if queue <= step {
        limit + 6.0 * step
    } else if queue < 3.0 * step {
        limit + step
    } else if queue > 6.0 * step {
        limit - step
    } else {
        limit
    };
}

/// Of the whole part, rounded down, and never 0.
fn log10(limit: f64) -> u32 {
    (limit as u32).checked_ilog10().unwrap_or_default().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adaptive::{Bounds, Method};

    /// The first sample is the baseline; then these, in milliseconds and in flight.
    fn after(initial: u32, ceiling: u32, samples: &[(f64, u32, bool)]) -> u32 {
        let bounds = Bounds { initial, ceiling, timeout: u64::MAX, ..Bounds::default() };
        let mut estimate = Estimate::new(&bounds);
        for (millis, in_flight, dropped) in samples {
            let sample = Sample { latency: millis * 1_000.0, in_flight: *in_flight, dropped: *dropped };
            estimate.update(Method::Vegas, &bounds, sample, 0.5);
        }
        estimate.limit(&bounds)
    }

    /// `VegasLimitTest` of concurrency-limits.
    #[test]
    fn follows_netflix_test_cases() {
        assert_eq!(after(10_000, 20_000, &[(10_000.0, 5_000, false)]), 10_000);
        assert_eq!(after(10_000, 20_000, &[(10_000.0, 5_000, false), (10_000.0, 6_000, false)]), 10_024);
        assert_eq!(after(10, 20, &[(10.0, 10, false), (10.0, 11, false)]), 16);
        assert_eq!(after(10, 20, &[(10.0, 10, false), (50.0, 11, false)]), 9);
        assert_eq!(after(10, 20, &[(10.0, 10, false), (14.0, 14, false)]), 10);
    }

    #[test]
    fn what_is_dropped_or_not_in_use() {
        assert_eq!(after(10, 20, &[(10.0, 10, false), (10.0, 11, true)]), 9);
        assert_eq!(after(10, 20, &[(10.0, 10, false), (10.0, 4, false)]), 10);
        assert_eq!(after(10, 20, &[(10.0, 10, false), (12.0, 9, false)]), 11, "a queue of two");
        assert_eq!(after(18, 20, &[(10.0, 18, false), (10.0, 18, false)]), 20);
        assert_eq!([9.0, 99.0, 100.0, 1_000.0, 1.0].map(log10), [1, 1, 2, 3, 1]);
    }

    #[test]
    fn the_baseline_is_measured_anew_with_little_in_flight() {
        let bounds = Bounds { initial: 10, floor: 2, ..Bounds::default() };
        let mut estimate = Estimate::new(&bounds);
        let mut step = |latency| {
            estimate.update(Method::Vegas, &bounds, Sample { latency, in_flight: 1, dropped: false }, 0.0);
            (estimate.limit(&bounds), estimate.baseline)
        };
        // Half of thirty times the limit.
        for _ in 1..150 {
            assert_eq!(step(1_000.0), (10, 1_000.0));
        }
        assert_eq!(step(1_500.0), (5, 1_000.0), "it begins");
        assert_eq!(step(1_500.0), (5, 1_000.0), "what was in flight is done");
        assert_eq!(step(1_200.0), (10, 1_200.0));
        assert_eq!(step(1_200.0), (10, 1_200.0));
    }
}
