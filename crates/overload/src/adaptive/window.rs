//! [`Window`]: combines the samples of an interval into one, because single latencies vary widely even without
//! overload.

use super::Sample;

/// The samples since the last update of the limit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Window {
    /// Earliest time at which the window is complete, in microseconds.
    pub end: u64,
    /// Sum of all latencies, in microseconds.
    pub sum: f64,
    /// Number of samples.
    pub count: u32,
    /// Maximum number of requests in flight.
    pub in_flight: u32,
    /// Number of dropped requests.
    pub dropped: u32,
}

impl Window {
    /// Minimum length of a window, in microseconds.
    pub const MIN_SPAN: u64 = 500_000;
    /// Minimum number of samples of a window.
    pub const MIN_SAMPLES: u32 = 10;
    /// Number of samples for which one dropped request is tolerated, because a few requests take long under any load.
    pub const SAMPLES_PER_TOLERATED_DROP: u32 = 20;

    /// Adds a sample. If the window is complete, returns the combined sample and starts a new window.
    ///
    /// `now` is the time in microseconds, of any clock.
    pub fn add(&mut self, sample: Sample, now: u64) -> Option<Sample> {
        if self.count == 0 {
            self.end = now + Self::MIN_SPAN;
        }
        self.sum += sample.latency;
        self.count = self.count.saturating_add(1);
        self.in_flight = self.in_flight.max(sample.in_flight);
        self.dropped = self.dropped.saturating_add(sample.dropped.into());
        // The end can only be that far away if the clock was set back. Then the window ends now.
        let clock_set_back = self.end > now + Self::MIN_SPAN;
        if (now < self.end && !clock_set_back) || self.count < Self::MIN_SAMPLES {
            return None;
        }
        let Self { sum, count, in_flight, dropped, .. } = std::mem::take(self);
        let dropped = u64::from(dropped) * u64::from(Self::SAMPLES_PER_TOLERATED_DROP) > u64::from(count);
        Some(Sample { latency: sum / f64::from(count), in_flight, dropped })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_complete_after_its_span_and_enough_samples() {
        let mut window = Window::default();
        let sample = |latency, in_flight, dropped| Sample { latency, in_flight, dropped };
        for number in 0..9 {
            assert_eq!(window.add(sample(100.0, number, number == 4), 1_000_000), None);
        }
        assert_eq!(window.add(sample(200.0, 3, false), 1_500_000), Some(sample(110.0, 8, true)));
        // Of twenty-one samples, one is dropped in the first round and two in the second.
        for dropped in [1, 2] {
            for number in 0..20 {
                assert_eq!(window.add(sample(100.0, 1, number < dropped), 2_000_000), None);
            }
            assert_eq!(window.add(sample(100.0, 1, false), 2_500_000), Some(sample(100.0, 1, dropped == 2)));
        }
        assert_eq!(window.add(sample(100.0, 1, false), 3_000_000), None);
        assert_eq!(window.add(sample(100.0, 1, false), 9_000_000), None, "too few samples");
        // The window ends if the clock is set back.
        for _ in 0..7 {
            assert_eq!(window.add(sample(100.0, 1, false), 9_000_000), None);
        }
        assert!(window.add(sample(100.0, 1, false), 1_000_000).is_some());
    }

    #[test]
    fn one_dropped_request_of_twenty_is_tolerated() {
        for (samples, dropped) in [(20, false), (19, true)] {
            let mut window = Window::default();
            let add = |number| {
                let sample = Sample { latency: 100.0, in_flight: 1, dropped: number == 1 };
                window.add(sample, if number == samples { Window::MIN_SPAN } else { 0 })
            };
            let combined = (1..=samples).find_map(add);
            assert_eq!(combined.map(|sample| sample.dropped), Some(dropped), "{samples}");
        }
    }
}
