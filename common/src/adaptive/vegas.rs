//! `VegasLimit`: its thresholds and steps. What differs is what noise demands: latencies are far apart, and the lowest mean
//! of many is far below the mean.
//!
//! - The baseline is measured with half as many in flight, for a second or two every 40 s, and not taken from whatever moment
//!   it is: where a queue is always there, Netflix' grows with every measurement. Envoy's filter measures in the same way.
//!   All who share an upstream measure at the same time, by the wall's clock, or each would take the queue of the others for none.
//!   A quarter of the measurement before counts, too; the first samples of all count for nothing: what takes long is not among them.
//! - A queue that is far too long is halved at once.

use super::{Estimate, Sample};

/// In microseconds of the wall's clock: in each such span the baseline is measured once, at its beginning.
const PERIOD: u64 = 40_000_000;
/// One window to drain what has queued up, and two to measure.
const DRAIN: u8 = 1;
const MEASURE: u8 = 2;
pub(super) const PROBING: u8 = DRAIN + MEASURE;
/// How much of the baseline before stays in it.
const KEPT: f64 = 0.25;
/// What is below this part of the baseline is no chance: it is measured at once.
const FASTER: f64 = 0.75;

pub(super) fn update(estimate: &mut Estimate, sample: Sample, now: u64) {
    let period = (now / PERIOD) as u32;
    if estimate.probing > 0 {
        estimate.count = period;
        return measure(estimate, sample);
    }
    if estimate.count != period || sample.latency < estimate.baseline * FASTER {
        estimate.probing = PROBING;
        return;
    }
    estimate.limit = next(estimate.limit, estimate.baseline, sample);
}

fn measure(estimate: &mut Estimate, sample: Sample) {
    estimate.probing = (estimate.probing - 1).min(PROBING);
    if estimate.probing >= MEASURE {
        return;
    }
    estimate.measured += (sample.latency - estimate.measured) / f64::from(MEASURE - estimate.probing);
    if estimate.probing == 0 {
        let measured = std::mem::take(&mut estimate.measured);
        let kept = if estimate.baseline > 0.0 { KEPT } else { 0.0 };
        estimate.baseline = estimate.baseline * kept + measured * (1.0 - kept);
    }
}

/// The limit after a window.
fn next(limit: f64, baseline: f64, sample: Sample) -> f64 {
    let step = f64::from(log10(limit));
    let queue = (limit * (1.0 - baseline / sample.latency)).ceil();
    if sample.dropped {
        limit - step
    } else if f64::from(sample.in_flight) * 2.0 < limit {
        // A limit that is not used says nothing.
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

/// Of the whole part, rounded down, and never 0.
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

    /// `VegasLimitTest` of concurrency-limits; the first sample is the baseline there.
    #[test]
    fn follows_netflix_test_cases() {
        assert_eq!(after(10_000.0, 10_000.0, 10_000.0, 6_000), 10_024.0);
        assert_eq!(after(10.0, 10.0, 10.0, 11), 16.0);
        assert_eq!(after(10.0, 10.0, 50.0, 11), 9.0);
        assert_eq!(after(10.0, 10.0, 14.0, 14), 10.0);
    }

    #[test]
    fn what_is_dropped_or_not_in_use_or_far_too_much() {
        assert_eq!(next(10.0, 10.0, Sample { latency: 10.0, in_flight: 11, dropped: true }), 9.0);
        assert_eq!(after(10.0, 10.0, 10.0, 4), 10.0);
        assert_eq!(after(10.0, 10.0, 12.0, 9), 11.0, "a queue of two");
        assert_eq!(after(100.0, 10.0, 20.0, 99), 81.0, "half of the 38 above 12");
        assert_eq!([9.0, 99.0, 100.0, 1_000.0, 1.0].map(log10), [1, 1, 2, 3, 1]);
    }

    #[test]
    fn the_baseline_is_measured_with_little_in_flight() {
        let bounds = Bounds { initial: 10, floor: 2, ..Bounds::default() };
        let mut estimate = Estimate::new(Method::Vegas, &bounds);
        let mut step = |latency, period: u64| {
            let sample = Sample { latency, in_flight: 1, dropped: false };
            estimate.update(Method::Vegas, &bounds, sample, period * PERIOD + 1);
            (estimate.limit(&bounds), estimate.baseline)
        };
        assert_eq!(step(10.0, 7), (10, 0.0), "what takes long is not there yet");
        assert_eq!((step(900.0, 7), step(1_100.0, 7)), ((10, 0.0), (10, 1_000.0)), "the mean of two");
        for _ in 1..50 {
            assert_eq!(step(1_150.0, 7), (10, 1_000.0));
        }
        assert_eq!(step(1_500.0, 8), (5, 1_000.0), "it begins");
        assert_eq!(step(1_500.0, 8), (5, 1_000.0), "what was in flight is done");
        assert_eq!(step(1_300.0, 8), (5, 1_000.0));
        assert_eq!(step(1_100.0, 8), (10, 1_150.0), "1200, and a quarter of the one before");
        assert_eq!(step(870.0, 8), (10, 1_150.0));
        assert_eq!(step(860.0, 8), (5, 1_150.0), "it has become faster");
    }
}
