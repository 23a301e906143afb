//! The time between two hits of a steady stream, exactly: 7 hits a second are 142 857 and 1/7 µs apart, and a bucket
//! that rounded this would drift.

use super::{Action, Ask, Micros};

/// A span of whole microseconds and a fraction: `part` of [`Pace::parts`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Span {
    pub(super) micros: u64,
    pub(super) part: u64,
}

impl Span {
    pub(super) fn ceil(self) -> Micros {
        Micros::new(self.micros + u64::from(self.part > 0))
    }
}

/// So many hits in so much time, in lowest terms: `parts` hits every `interval` µs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pace {
    interval: u64,
    parts: u64,
}

impl Pace {
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
    pub(super) fn fraction(self, micros: u64, part: u64) -> Span {
        if part < self.parts { Span { micros, part } } else { Span { micros: micros + 1, part: 0 } }
    }

    /// The same of a span that may be of another pace: then in whole microseconds.
    pub(super) fn stored(self, micros: u64, part: u64, is_same: bool) -> Span {
        if is_same { self.fraction(micros, part) } else { Span { micros: micros + part.min(1), part: 0 } }
    }

    /// How long it takes for so many hits to become free again.
    pub(super) fn span(self, hits: u64) -> Span {
        match hits.checked_mul(self.interval) {
            Some(total) => Span { micros: total / self.parts, part: total % self.parts },
            None => {
                let total = u128::from(hits) * u128::from(self.interval);
                let (micros, part) = (total / u128::from(self.parts), total % u128::from(self.parts));
                Span { micros: u64::try_from(micros).unwrap_or(u64::MAX), part: part as u64 }
            }
        }
    }

    /// Whole hits that become free in this time.
    pub(super) fn hits(self, span: Span) -> u64 {
        self.divide(span, u64::div_euclid, u128::div_euclid)
    }

    /// Hits that have at least begun to become free in this time.
    pub(super) fn hits_begun(self, span: Span) -> u64 {
        self.divide(span, u64::div_ceil, u128::div_ceil)
    }

    fn divide(self, span: Span, narrow: fn(u64, u64) -> u64, wide: fn(u128, u128) -> u128) -> u64 {
        let total = span.micros.checked_mul(self.parts).and_then(|total| total.checked_add(span.part));
        match total {
            Some(total) => narrow(total, self.interval),
            None => {
                let total = u128::from(span.micros) * u128::from(self.parts) + u128::from(span.part);
                u64::try_from(wide(total, self.interval.into())).unwrap_or(u64::MAX)
            }
        }
    }

    pub(super) fn add(self, a: Span, b: Span) -> Span {
        let part = a.part + b.part;
        let carry = u64::from(part >= self.parts);
        Span { micros: a.micros.saturating_add(b.micros).saturating_add(carry), part: part - carry * self.parts }
    }

    /// What of a charge is to be given back: of one that is undone, what the time since has not brought back anyway.
    /// Somebody who came in between may have found the bucket fuller for it, by that much at most.
    pub(super) fn not_drained(self, charge: Span, ask: Ask) -> Span {
        match ask.action {
            Action::Undo(taken) => self.subtract(charge, Span { micros: (ask.now - taken).get(), part: 0 }),
            Action::Take | Action::Peek | Action::Return => charge,
        }
    }

    /// What is left, or nothing.
    pub(super) fn subtract(self, a: Span, b: Span) -> Span {
        if a <= b {
            return Span::default();
        }
        let borrow = u64::from(a.part < b.part);
        Span { micros: a.micros - b.micros - borrow, part: a.part + borrow * self.parts - b.part }
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
        let pace = Pace::new(7, Micros::from_secs(1)).unwrap();
        let one = pace.span(1);
        assert_eq!(one, Span { micros: 142_857, part: 1 });
        let sum = (0..7).fold(Span::default(), |sum, _| pace.add(sum, one));
        assert_eq!(sum, Span { micros: 1_000_000, part: 0 });
        assert_eq!(pace.subtract(sum, one), pace.span(6));
        assert_eq!(pace.subtract(one, sum), Span::default());
        assert_eq!((pace.hits(pace.span(6)), pace.hits_begun(pace.span(6))), (6, 6));
        assert_eq!((pace.hits(Span { micros: 142_857, part: 0 }), pace.hits_begun(one)), (0, 1));
    }

    #[test]
    fn the_largest_numbers_are_exact_too() {
        // A prime number of hits: no divisor shortens anything.
        let pace = Pace::new(4_294_967_291, Micros::from_secs(100 * 31_536_000)).unwrap();
        assert_eq!(pace.span(4_294_967_291), Span { micros: 3_153_600_000_000_000, part: 0 });
        assert_eq!(pace.hits(pace.span(4_999_999_998)), 4_999_999_998);
    }

    #[test]
    fn no_hits_and_no_time_have_no_pace() {
        assert_eq!(Pace::new(0, Micros::from_secs(1)), None);
        assert_eq!(Pace::new(1, Micros::ZERO), None);
    }
}
