//! `Gradient2Limit`.

use super::{Estimate, Sample};

/// How much the long run's latency may be exceeded before the limit falls.
const TOLERANCE: f64 = 1.5;
/// So many may queue.
const QUEUE: f64 = 4.0;
/// The part of each step that counts.
const SMOOTHING: f64 = 0.2;
/// Samples of the long run, and those at the beginning that count alike.
const WINDOW: f64 = 600.0;
const WARM_UP: u32 = 10;
/// When latency has fallen to less than half, the long run is hurried along.
const HURRY: f64 = 0.95;

pub(super) fn update(estimate: &mut Estimate, sample: Sample) {
    let long = average(estimate, sample.latency);
    if long / sample.latency > 2.0 {
        estimate.baseline = long * HURRY;
    }
    // A limit that is not used says nothing.
    if f64::from(sample.in_flight) < estimate.limit / 2.0 {
        return;
    }
    let gradient = (TOLERANCE * long / sample.latency).clamp(0.5, 1.0);
    estimate.limit = estimate.limit * (1.0 - SMOOTHING) + (estimate.limit * gradient + QUEUE) * SMOOTHING;
}

/// `ExpAvgMeasurement`: the mean of the first few, then moved by a part.
fn average(estimate: &mut Estimate, latency: f64) -> f64 {
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

    /// `ExpAvgMeasurementTest` of concurrency-limits has a window of 100; the first ten are the same.
    #[test]
    fn averages_as_netflix_test_cases_do() {
        let mut estimate = Estimate::new(Method::Gradient2, &Bounds::default());
        for (place, expected) in [10.0, 10.5, 11.0, 11.5, 12.0, 12.5, 13.0, 13.5, 14.0, 14.5].into_iter().enumerate() {
            assert!((average(&mut estimate, 10.0 + place as f64) - expected).abs() < 0.01);
        }
        let next = average(&mut estimate, 100.0);
        assert!((next - (14.5 + (100.0 - 14.5) * 2.0 / 601.0)).abs() < 1e-9, "{next}");
    }

    #[test]
    fn grows_by_the_queue_and_falls_with_the_gradient() {
        let bounds = Bounds { floor: 20, ceiling: 200, initial: 100, ..Bounds::default() };
        let mut estimate = Estimate::new(Method::Gradient2, &bounds);
        let mut sample = |latency, in_flight| {
            estimate.update(Method::Gradient2, &bounds, Sample { latency, in_flight, dropped: false }, 0);
            (estimate.limit * 1_000.0).round() / 1_000.0
        };
        assert_eq!(sample(1_000.0, 100), 100.8);
        assert_eq!(sample(1_000.0, 50), 100.8, "half of it is not in use");
        // Three times the latency: the mean of three is 1666.7, the gradient 0.8333.
        assert_eq!(sample(3_000.0, 101), 98.24);
        // Never more than by half.
        assert_eq!(sample(100_000.0, 99), 89.216);
    }
}
