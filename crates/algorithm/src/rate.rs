//! [`Rate`]: the exact time between two hits of a steady stream. 7 hits a second are 142 857 and 1/7 µs apart, and a
//! bucket that rounded this time would drift.

use super::{Action, Micros, Operation, proportion::narrow};

/// A duration of whole microseconds and a fraction, in units of 1/[`Rate::parts`] microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ExactDuration {
    pub(super) micros: u64,
    pub(super) fraction: u64,
}

impl ExactDuration {
    pub(super) fn ceil(self) -> Micros {
        Micros::new(self.micros.saturating_add(u64::from(self.fraction > 0)))
    }
}

/// A rate: `parts` hits every `interval` microseconds, reduced to lowest terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rate {
    interval: u64,
    parts: u64,
}

impl Rate {
    /// Creates a rate; `None` if there are no hits or no time.
    pub(super) fn new(hits: u64, per: Micros) -> Option<Self> {
        let micros = per.get();
        if hits == 0 || micros == 0 {
            return None;
        }
        let divisor = greatest_common_divisor(micros, hits);
        Some(Self { interval: micros / divisor, parts: hits / divisor })
    }

    /// Returns the hits and the time from which [`Self::new`] makes the same rate.
    pub(super) fn hits_per_interval(self) -> (u64, Micros) {
        (self.parts, Micros::new(self.interval))
    }

    /// Returns the number of parts into which a microsecond is divided.
    pub(super) const fn parts(self) -> u64 {
        self.parts
    }

    /// Returns a stored duration. A fraction that this rate cannot have is one of another rate and is rounded up.
    pub(super) fn duration(self, micros: u64, fraction: u64) -> ExactDuration {
        if fraction < self.parts {
            ExactDuration { micros, fraction }
        } else {
            ExactDuration { micros: micros.saturating_add(1), fraction: 0 }
        }
    }

    /// Returns a stored duration, rounded up to whole microseconds unless it is one of this rate.
    pub(super) fn stored_duration(self, micros: u64, fraction: u64, is_same: bool) -> ExactDuration {
        if is_same {
            self.duration(micros, fraction)
        } else {
            ExactDuration { micros: micros.saturating_add(fraction.min(1)), fraction: 0 }
        }
    }

    /// Returns the time in which `hits` drain.
    pub(super) fn duration_of(self, hits: u64) -> ExactDuration {
        if let Some(total) = hits.checked_mul(self.interval) {
            return ExactDuration { micros: total / self.parts, fraction: total % self.parts };
        }
        let total = u128::from(hits) * u128::from(self.interval);
        let parts = u128::from(self.parts);
        ExactDuration { micros: narrow(total / parts), fraction: narrow(total % parts) }
    }

    /// Returns the whole hits that drain in this time.
    pub(super) fn hits(self, span: ExactDuration) -> u64 {
        let total = self.total_parts(span);
        match u64::try_from(total) {
            Ok(total) => total / self.interval,
            Err(_) => narrow(total / u128::from(self.interval)),
        }
    }

    /// Returns the hits that drain at least in part in this time.
    pub(super) fn hits_started(self, span: ExactDuration) -> u64 {
        let total = self.total_parts(span);
        match u64::try_from(total) {
            Ok(total) => total.div_ceil(self.interval),
            Err(_) => narrow(total.div_ceil(self.interval.into())),
        }
    }

    fn total_parts(self, span: ExactDuration) -> u128 {
        u128::from(span.micros) * u128::from(self.parts) + u128::from(span.fraction)
    }

    pub(super) fn add(self, a: ExactDuration, b: ExactDuration) -> ExactDuration {
        let fraction = a.fraction + b.fraction;
        let carry = u64::from(fraction >= self.parts);
        ExactDuration {
            micros: a.micros.saturating_add(b.micros).saturating_add(carry),
            fraction: fraction - carry * self.parts,
        }
    }

    /// Returns the part of a charge that a refund or rollback returns. A rollback returns only the part that has not
    /// drained since the take.
    ///
    /// After a rollback, the bucket can be fuller than without the take, by at most the part that has drained.
    pub(super) fn refundable(self, charge: ExactDuration, operation: Operation) -> ExactDuration {
        match operation.action {
            Action::RollBack(taken) => {
                self.subtract(charge, ExactDuration { micros: (operation.now - taken).get(), fraction: 0 })
            }
            Action::Take | Action::Peek | Action::Refund => charge,
        }
    }

    /// Returns the difference, or zero if it would be negative.
    pub(super) fn subtract(self, a: ExactDuration, b: ExactDuration) -> ExactDuration {
        if a <= b {
            return ExactDuration::default();
        }
        let borrow = u64::from(a.fraction < b.fraction);
        ExactDuration { micros: a.micros - b.micros - borrow, fraction: a.fraction + borrow * self.parts - b.fraction }
    }
}

fn greatest_common_divisor(mut a: u64, mut b: u64) -> u64 {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_lost_to_rounding() {
        let rate = Rate::new(7, Micros::from_secs(1)).unwrap();
        let one = rate.duration_of(1);
        assert_eq!(one, ExactDuration { micros: 142_857, fraction: 1 });
        let sum = (0..7).fold(ExactDuration::default(), |sum, _| rate.add(sum, one));
        assert_eq!(sum, ExactDuration { micros: 1_000_000, fraction: 0 });
        assert_eq!(rate.subtract(sum, one), rate.duration_of(6));
        assert_eq!(rate.subtract(one, sum), ExactDuration::default());
        assert_eq!((rate.hits(rate.duration_of(6)), rate.hits_started(rate.duration_of(6))), (6, 6));
        assert_eq!((rate.hits(ExactDuration { micros: 142_857, fraction: 0 }), rate.hits_started(one)), (0, 1));
    }

    #[test]
    fn the_largest_numbers_are_exact_too() {
        // The number of hits is a prime, so that the fraction cannot be reduced.
        let rate = Rate::new(4_294_967_291, Micros::from_secs(100 * 31_536_000)).unwrap();
        assert_eq!(rate.duration_of(4_294_967_291), ExactDuration { micros: 3_153_600_000_000_000, fraction: 0 });
        assert_eq!(rate.hits(rate.duration_of(4_999_999_998)), 4_999_999_998);
    }

    #[test]
    fn a_rate_needs_hits_and_time() {
        assert_eq!(Rate::new(0, Micros::from_secs(1)), None);
        assert_eq!(Rate::new(1, Micros::ZERO), None);
    }

    #[test]
    fn a_stored_fraction_that_a_rate_cannot_have_is_rounded_up() {
        let rate = Rate::new(7, Micros::from_secs(1)).unwrap();
        assert_eq!(rate.duration(10, 6), ExactDuration { micros: 10, fraction: 6 });
        for fraction in [7, 8, u64::MAX] {
            assert_eq!(rate.duration(10, fraction), ExactDuration { micros: 11, fraction: 0 });
        }
    }

    #[test]
    fn a_rate_is_reduced_to_lowest_terms() {
        let rate = Rate::new(14, Micros::from_secs(2)).unwrap();
        assert_eq!(Some(rate), Rate::new(7, Micros::from_secs(1)));
        assert_eq!(rate.hits_per_interval(), (7, Micros::from_secs(1)));
    }
}
