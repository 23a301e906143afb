//! Samples of a while, as one: single latencies are far apart also when nothing is wrong.

use super::Sample;

/// What was seen since the last step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Window {
    /// Until when, in microseconds: not before then is there a step.
    pub end: u64,
    /// The sum of all latencies, and how many they are.
    pub sum: f64,
    /// How many.
    pub count: u32,
    /// The most that were in flight.
    pub in_flight: u32,
    /// How many of them were dropped.
    pub dropped: u32,
}

impl Window {
    /// A step is taken after so long at the earliest, in microseconds.
    pub const SPAN: u64 = 500_000;
    /// And of so many samples at least.
    pub const LEAST: u32 = 10;
    /// One of so many may be dropped: some take long whatever is done.
    pub const TAIL: u32 = 20;

    /// Adds one; there is a sample of all when the window is full. `now` in microseconds of any clock.
    pub fn add(&mut self, sample: Sample, now: u64) -> Option<Sample> {
        if self.count == 0 {
            // A clock that steps back begins anew.
            self.end = now + Self::SPAN;
        }
        self.sum += sample.latency;
        self.count = self.count.saturating_add(1);
        self.in_flight = self.in_flight.max(sample.in_flight);
        self.dropped = self.dropped.saturating_add(sample.dropped.into());
        let behind = self.end > now + Self::SPAN;
        if (now < self.end && !behind) || self.count < Self::LEAST {
            return None;
        }
        let Self { sum, count, in_flight, dropped, .. } = std::mem::take(self);
        let dropped = u64::from(dropped) * u64::from(Self::TAIL) > u64::from(count);
        Some(Sample { latency: sum / f64::from(count), in_flight, dropped })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_full_after_a_while_and_enough_samples() {
        let mut window = Window::default();
        let sample = |latency, in_flight, dropped| Sample { latency, in_flight, dropped };
        for number in 0..9 {
            assert_eq!(window.add(sample(100.0, number, number == 4), 1_000_000), None);
        }
        assert_eq!(window.add(sample(200.0, 3, false), 1_500_000), Some(sample(110.0, 8, true)));
        // Of twenty-one, one and then two were dropped.
        for dropped in [1, 2] {
            for number in 0..20 {
                assert_eq!(window.add(sample(100.0, 1, number < dropped), 2_000_000), None);
            }
            assert_eq!(window.add(sample(100.0, 1, false), 2_500_000), Some(sample(100.0, 1, dropped == 2)));
        }
        assert_eq!(window.add(sample(100.0, 1, false), 3_000_000), None);
        assert_eq!(window.add(sample(100.0, 1, false), 9_000_000), None, "too few");
        // The clock goes back by years: the window ends.
        for _ in 0..7 {
            assert_eq!(window.add(sample(100.0, 1, false), 9_000_000), None);
        }
        assert!(window.add(sample(100.0, 1, false), 1_000_000).is_some());
    }
}
