//! The algorithm of `Gradient2Limit` in Netflix's concurrency-limits: compares the current latency with a long-term
//! average.

use super::{Estimate, Sample};

/// Factor by which the latency may exceed the long-term average before the limit falls.
const TOLERANCE: f64 = 1.5;
/// Number of requests that may queue.
const QUEUE: f64 = 4.0;
/// Weight of a new limit against the previous one.
const SMOOTHING: f64 = 0.2;
/// Number of samples in the long-term average.
const WINDOW: f64 = 600.0;
/// Number of first samples that have equal weight in the average.
const WARM_UP: u32 = 10;
/// Factor by which the average decreases per sample while the latency is below half of it.
const BASELINE_DECAY: f64 = 0.95;

pub(super) fn update(estimate: &mut Estimate, sample: Sample) {
    let long = update_baseline(estimate, sample.latency);
    if long / sample.latency > 2.0 {
        estimate.baseline = long * BASELINE_DECAY;
    }
    // A limit that is less than half in use cannot be evaluated.
    if f64::from(sample.in_flight) < estimate.limit / 2.0 {
        return;
    }
    let gradient = (TOLERANCE * long / sample.latency).clamp(0.5, 1.0);
    estimate.limit = estimate.limit * (1.0 - SMOOTHING) + (estimate.limit * gradient + QUEUE) * SMOOTHING;
}

/// Updates the long-term average like `ExpAvgMeasurement`: the mean of the first samples, then an exponential moving
/// average.
fn update_baseline(estimate: &mut Estimate, latency: f64) -> f64 {
    if estimate.count < WARM_UP {
        estimate.count += 1;
        estimate.baseline += (latency - estimate.baseline) / f64::from(estimate.count);
    } else {
        let factor = 2.0 / (WINDOW + 1.0);
        estimate.baseline = estimate.baseline * (1.0 - factor) + latency * factor;
    }
    estimate.baseline
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adaptive::{Bounds, Method};

    /// `ExpAvgMeasurementTest` of concurrency-limits has a window of 100. The results of the first ten samples are the
    /// same.
    #[test]
    fn the_average_agrees_with_netflix_test_cases() {
        let mut estimate = Estimate::new(Method::Gradient2, &Bounds::default());
        for (index, expected) in [10.0, 10.5, 11.0, 11.5, 12.0, 12.5, 13.0, 13.5, 14.0, 14.5].into_iter().enumerate() {
            assert!((update_baseline(&mut estimate, 10.0 + index as f64) - expected).abs() < 0.01);
        }
        let next = update_baseline(&mut estimate, 100.0);
        assert!((next - (14.5 + (100.0 - 14.5) * 2.0 / 601.0)).abs() < 1e-9, "{next}");
    }

    #[test]
    fn the_limit_grows_by_the_queue_and_falls_with_the_gradient() {
        let bounds = Bounds { floor: 20, ceiling: 200, initial: 100, ..Bounds::default() };
        let mut estimate = Estimate::new(Method::Gradient2, &bounds);
        let mut sample = |latency, in_flight| {
            estimate.update(Method::Gradient2, &bounds, Sample { latency, in_flight, dropped: false }, 0);
            (estimate.limit * 1_000.0).round() / 1_000.0
        };
        assert_eq!(sample(1_000.0, 100), 100.8);
        assert_eq!(sample(1_000.0, 50), 100.8, "less than half of it is in use");
        // Three times the latency: the mean of three is 1666.7, the gradient 0.8333.
        assert_eq!(sample(3_000.0, 101), 98.24);
        // The gradient is at least one half.
        assert_eq!(sample(100_000.0, 99), 89.216);
    }

    #[test]
    fn the_average_falls_faster_while_the_latency_is_below_half_of_it() {
        let mut estimate = Estimate::new(Method::Gradient2, &Bounds::default());
        let mut baseline = |latency| {
            update(&mut estimate, Sample { latency, in_flight: 0, dropped: false });
            (estimate.baseline * 10.0).round() / 10.0
        };
        assert_eq!((baseline(3_000.0), baseline(1_000.0)), (3_000.0, 2_000.0), "exactly half");
        assert_eq!(baseline(400.0), 1_393.3, "95% of 1466.7");
        assert_eq!(baseline(1_000.0), 1_295.0, "more than half");
    }

    #[test]
    fn a_limit_of_which_half_is_in_use_is_evaluated() {
        let mut estimate = Estimate { limit: 100.0, ..Estimate::new(Method::Gradient2, &Bounds::default()) };
        update(&mut estimate, Sample { latency: 1_000.0, in_flight: 50, dropped: false });
        assert!((estimate.limit - 100.8).abs() < 1e-9, "{}", estimate.limit);
    }
}
