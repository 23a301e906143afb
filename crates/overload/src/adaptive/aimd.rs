//! The algorithm of `AIMDLimit` in Netflix's concurrency-limits: additive increase, multiplicative decrease.

use super::{Estimate, Sample};

/// Factor by which the limit decreases.
const BACKOFF: f64 = 0.9;

pub(super) fn update(estimate: &mut Estimate, sample: Sample) {
    if sample.dropped {
        estimate.limit = (estimate.limit * BACKOFF).floor();
    } else if f64::from(sample.in_flight) * 2.0 >= estimate.limit {
        estimate.limit += 1.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adaptive::{Bounds, Method};

    fn after(initial: u32, bounds: Bounds, sample: Sample) -> u32 {
        let bounds = Bounds { initial, ..bounds };
        let mut estimate = Estimate::new(Method::Aimd, &bounds);
        estimate.update(Method::Aimd, &bounds, sample, 0);
        estimate.limit(&bounds)
    }

    /// `AIMDLimitTest` of concurrency-limits.
    #[test]
    fn follows_netflix_test_cases() {
        let bounds = Bounds { floor: 20, ceiling: 200, ..Bounds::default() };
        let success = Sample { latency: 1_000.0, in_flight: 10, dropped: false };
        assert_eq!(after(20, bounds, success), 21);
        assert_eq!(after(30, bounds, Sample { latency: 0.0, in_flight: 0, dropped: true }), 27);
        assert_eq!(after(21, Bounds { floor: 0, ceiling: 21, ..bounds }, success), 21);
        // The limit rises only if it is at least half in use. A request that takes too long counts as dropped.
        assert_eq!(after(21, bounds, success), 21);
        assert_eq!(after(30, bounds, Sample { latency: 5_000_001.0, ..success }), 27);
        assert_eq!(after(20, bounds, Sample { dropped: true, ..success }), 20);
    }

    #[test]
    fn a_request_that_takes_exactly_the_timeout_is_not_dropped() {
        let bounds = Bounds { timeout: 1_000, ..Bounds::default() };
        let sample = |latency| Sample { latency, in_flight: 20, dropped: false };
        assert_eq!((after(20, bounds, sample(1_000.0)), after(20, bounds, sample(1_001.0))), (21, 18));
    }
}
