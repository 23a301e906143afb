//! The time between two hits of a steady stream, exactly: 7 hits a second are 142 857 and 1/7 µs apart, and a bucket
//! that rounded this would drift.

use super::{Action, Micros, Operation};

/// A span of whole microseconds and a fraction: `part` of [`Pace::parts`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ExactDuration {
    pub(super) micros: u64,
    pub(super) fraction: u64,
}

impl ExactDuration {
    pub(super) fn ceil(self) -> Micros {
        Micros::new(self.micros + u64::from(self.fraction > 0))
    }
}

/// So many hits in so much time, in lowest terms: `parts` hits every `interval` µs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rate {
    interval: u64,
    parts: u64,
}

impl Rate {
    /// `None` for no hits or no time.
    pub(super) fn new(hits: u32, per: Micros) -> Option<Self> {
        let (hits, micros) = (u64::from(hits), per.get());
        let divisor = greatest_common_divisor(micros, hits);
        (hits > 0 && micros > 0).then(|| Self { interval: micros / divisor, parts: hits / divisor })
    }

    /// Into how many parts a microsecond is divided.
    pub(super) const fn parts(self) -> u64 {
        self.parts
    }

    /// A span as it was stored; a fraction that is none here was one of another pace, and becomes a microsecond.
    pub(super) fn duration(self, micros: u64, part: u64) -> ExactDuration {
        if part < self.parts {
            ExactDuration { micros, fraction: part }
        } else {
            ExactDuration { micros: micros + 1, fraction: 0 }
        }
    }

    /// The same of a span that may be of another pace: then in whole microseconds.
    pub(super) fn stored_duration(self, micros: u64, part: u64, is_same: bool) -> ExactDuration {
        if is_same { self.duration(micros, part) } else { ExactDuration { micros: micros + part.min(1), fraction: 0 } }
    }

    /// How long it takes for so many hits to become free again.
    pub(super) fn duration_of(self, hits: u64) -> ExactDuration {
        match hits.checked_mul(self.interval) {
            Some(total) => ExactDuration { micros: total / self.parts, fraction: total % self.parts },
            None => {
                let total = u128::from(hits) * u128::from(self.interval);
                let (micros, part) = (total / u128::from(self.parts), total % u128::from(self.parts));
                ExactDuration { micros: u64::try_from(micros).unwrap_or(u64::MAX), fraction: part as u64 }
            }
        }
    }

    /// Whole hits that become free in this time.
    pub(super) fn hits(self, span: ExactDuration) -> u64 {
        self.divide(span, u64::div_euclid, u128::div_euclid)
    }

    /// Hits that have at least begun to become free in this time.
    pub(super) fn hits_started(self, span: ExactDuration) -> u64 {
        self.divide(span, u64::div_ceil, u128::div_ceil)
    }

    fn divide(self, span: ExactDuration, narrow: fn(u64, u64) -> u64, wide: fn(u128, u128) -> u128) -> u64 {
        let total = span.micros.checked_mul(self.parts).and_then(|total| total.checked_add(span.fraction));
        match total {
            Some(total) => narrow(total, self.interval),
            None => {
                let total = u128::from(span.micros) * u128::from(self.parts) + u128::from(span.fraction);
                u64::try_from(wide(total, self.interval.into())).unwrap_or(u64::MAX)
            }
        }
    }

    pub(super) fn add(self, a: ExactDuration, b: ExactDuration) -> ExactDuration {
        let part = a.fraction + b.fraction;
        let carry = u64::from(part >= self.parts);
        ExactDuration {
            micros: a.micros.saturating_add(b.micros).saturating_add(carry),
            fraction: part - carry * self.parts,
        }
    }

    /// What of a charge is to be given back: of one that is undone, what the time since has not brought back anyway.
    /// Somebody who came in between may have found the bucket fuller for it, by that much at most.
    pub(super) fn not_drained(self, charge: ExactDuration, ask: Operation) -> ExactDuration {
        match ask.action {
            Action::RollBack(taken) => {
                self.subtract(charge, ExactDuration { micros: (ask.now - taken).get(), fraction: 0 })
            }
            Action::Take | Action::Peek | Action::Refund => charge,
        }
    }

    /// What is left, or nothing.
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
        let pace = Rate::new(7, Micros::from_secs(1)).unwrap();
        let one = pace.duration_of(1);
        assert_eq!(one, ExactDuration { micros: 142_857, fraction: 1 });
        let sum = (0..7).fold(ExactDuration::default(), |sum, _| pace.add(sum, one));
        assert_eq!(sum, ExactDuration { micros: 1_000_000, fraction: 0 });
        assert_eq!(pace.subtract(sum, one), pace.duration_of(6));
        assert_eq!(pace.subtract(one, sum), ExactDuration::default());
        assert_eq!((pace.hits(pace.duration_of(6)), pace.hits_started(pace.duration_of(6))), (6, 6));
        assert_eq!((pace.hits(ExactDuration { micros: 142_857, fraction: 0 }), pace.hits_started(one)), (0, 1));
    }

    #[test]
    fn the_largest_numbers_are_exact_too() {
        // A prime number of hits: no divisor shortens anything.
        let pace = Rate::new(4_294_967_291, Micros::from_secs(100 * 31_536_000)).unwrap();
        assert_eq!(pace.duration_of(4_294_967_291), ExactDuration { micros: 3_153_600_000_000_000, fraction: 0 });
        assert_eq!(pace.hits(pace.duration_of(4_999_999_998)), 4_999_999_998);
    }

    #[test]
    fn no_hits_and_no_time_have_no_pace() {
        assert_eq!(Rate::new(0, Micros::from_secs(1)), None);
        assert_eq!(Rate::new(1, Micros::ZERO), None);
    }
}
