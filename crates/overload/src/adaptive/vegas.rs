//! The algorithm of `VegasLimit` in Netflix's concurrency-limits: estimates the queue from the latency, with the same
//! thresholds and steps.
//!
//! It differs from the original where noise demands it. Latencies vary widely, and the lowest of many means is far
//! below the mean.
//!
//! - The baseline (the latency without load) is measured with half of the limit in flight, for a second or two every 40
//!   s, and not taken from arbitrary samples. With a permanent queue, Netflix's baseline grows with every measurement.
//!   Envoy's filter measures in the same way.
//! - All processes that share an upstream measure at the same time, by the wall clock. Otherwise, each of them would
//!   take the queue of the others for the latency without load.
//! - A measurement keeps a quarter of the previous baseline. The very first window is ignored, because requests that
//!   take long have not completed by then.
//! - An excess queue (above six steps) is halved in one step.

use super::{Estimate, Sample};

/// Period of wall-clock time in microseconds. The baseline is measured once, at the start of each period.
const PERIOD: u64 = 40_000_000;
/// Number of windows in which the queue drains before a measurement.
const DRAIN: u8 = 1;
/// Number of windows of a measurement.
const MEASURE: u8 = 2;
pub(super) const PROBING: u8 = DRAIN + MEASURE;
/// Weight of the previous baseline in a new one.
const PREVIOUS_WEIGHT: f64 = 0.25;
/// Fraction of the baseline. A lower latency cannot be chance, so the baseline is measured immediately.
const REMEASURE_BELOW: f64 = 0.75;

pub(super) fn update(estimate: &mut Estimate, sample: Sample, now: u64) {
    let period = (now / PERIOD) as u32;
    if estimate.probing_steps > 0 {
        estimate.count = period;
        return measure(estimate, sample);
    }
    if estimate.count != period || sample.latency < estimate.baseline * REMEASURE_BELOW {
        estimate.probing_steps = PROBING;
        return;
    }
    estimate.limit = next(estimate.limit, estimate.baseline, sample);
}

fn measure(estimate: &mut Estimate, sample: Sample) {
    estimate.probing_steps = (estimate.probing_steps - 1).min(PROBING);
    if estimate.probing_steps >= MEASURE {
        return;
    }
    estimate.measured += (sample.latency - estimate.measured) / f64::from(MEASURE - estimate.probing_steps);
    if estimate.probing_steps == 0 {
        let measured = std::mem::take(&mut estimate.measured);
        let weight = if estimate.baseline > 0.0 { PREVIOUS_WEIGHT } else { 0.0 };
        estimate.baseline = estimate.baseline * weight + measured * (1.0 - weight);
    }
}

/// Returns the limit after a window.
fn next(limit: f64, baseline: f64, sample: Sample) -> f64 {
    let step = f64::from(log10(limit));
    let queue = (limit * (1.0 - baseline / sample.latency)).ceil();
    if sample.dropped {
        limit - step
    } else if f64::from(sample.in_flight) * 2.0 < limit {
        // A limit that is less than half in use cannot be evaluated.
        limit
    } else if queue <= step {
        limit + 6.0 * step
    } else if queue < 3.0 * step {
        limit + step
    } else if queue > 6.0 * step {
        limit - ((queue - 6.0 * step) * 0.5).floor().max(step)
    } else {
        limit
    }
}

/// Returns the logarithm of the integer part, rounded down, at least 1.
fn log10(limit: f64) -> u32 {
    (limit as u32).checked_ilog10().unwrap_or_default().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adaptive::{Bounds, Method};

    fn after(limit: f64, baseline: f64, latency: f64, in_flight: u32) -> f64 {
        next(limit, baseline, Sample { latency, in_flight, dropped: false })
    }

    /// From `VegasLimitTest` of concurrency-limits, where the first sample is the baseline.
    #[test]
    fn follows_netflix_test_cases() {
        assert_eq!(after(10_000.0, 10_000.0, 10_000.0, 6_000), 10_024.0);
        assert_eq!(after(10.0, 10.0, 10.0, 11), 16.0);
        assert_eq!(after(10.0, 10.0, 50.0, 11), 9.0);
        assert_eq!(after(10.0, 10.0, 14.0, 14), 10.0);
    }

    #[test]
    fn a_drop_lowers_the_limit_and_an_unused_limit_does_not_change() {
        assert_eq!(next(10.0, 10.0, Sample { latency: 10.0, in_flight: 11, dropped: true }), 9.0);
        assert_eq!(after(10.0, 10.0, 10.0, 4), 10.0);
        assert_eq!(after(10.0, 10.0, 12.0, 9), 11.0, "a queue of two");
        assert_eq!(after(100.0, 10.0, 20.0, 99), 81.0, "half of the 38 requests above 12");
        assert_eq!([9.0, 99.0, 100.0, 1_000.0, 1.0].map(log10), [1, 1, 2, 3, 1]);
    }

    #[test]
    fn the_baseline_is_measured_at_half_of_the_limit() {
        let bounds = Bounds { initial: 10, floor: 2, ..Bounds::default() };
        let mut estimate = Estimate::new(Method::Vegas, &bounds);
        let mut step = |latency, period: u64| {
            let sample = Sample { latency, in_flight: 1, dropped: false };
            estimate.update(Method::Vegas, &bounds, sample, period * PERIOD + 1);
            (estimate.limit(&bounds), estimate.baseline)
        };
        assert_eq!(step(10.0, 7), (10, 0.0), "the first window is ignored");
        assert_eq!((step(900.0, 7), step(1_100.0, 7)), ((10, 0.0), (10, 1_000.0)), "the mean of two");
        for _ in 1..50 {
            assert_eq!(step(1_150.0, 7), (10, 1_000.0));
        }
        assert_eq!(step(1_500.0, 8), (5, 1_000.0), "a measurement begins");
        assert_eq!(step(1_500.0, 8), (5, 1_000.0), "the queue has drained");
        assert_eq!(step(1_300.0, 8), (5, 1_000.0));
        assert_eq!(step(1_100.0, 8), (10, 1_150.0), "three quarters of 1200 and a quarter of the previous 1000");
        assert_eq!(step(870.0, 8), (10, 1_150.0));
        assert_eq!(step(860.0, 8), (5, 1_150.0), "the upstream has become faster");
    }

    #[test]
    fn the_thresholds_are_multiples_of_the_step() {
        assert_eq!(after(10.0, 10.0, 10.0, 5), 16.0, "half of the limit is in use");
        // With a limit of 100, a step is 2.
        assert_eq!(after(100.0, 10.0, 10.4, 99), 102.0, "a queue of 4");
        assert_eq!(after(100.0, 10.0, 11.1, 99), 100.0, "a queue of 10");
        assert_eq!(after(10.0, 10.0, 24.9, 9), 10.0, "a queue of 6 with a step of 1");
    }

    #[test]
    fn a_latency_of_three_quarters_of_the_baseline_starts_no_measurement() {
        let estimate = Estimate::new(Method::Vegas, &Bounds::default());
        let mut estimate = Estimate { baseline: 1_000.0, probing_steps: 0, ..estimate };
        let mut probing_steps = |latency| {
            update(&mut estimate, Sample { latency, in_flight: 1, dropped: false }, 1);
            estimate.probing_steps
        };
        assert_eq!((probing_steps(750.0), probing_steps(749.0)), (0, PROBING));
    }
}
