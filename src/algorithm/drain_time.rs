//! A span of time in the few bytes that a state has for it, by which a changed limit is noticed and what was used
//! of the old one is scaled.

use super::Micros;

/// A span in five bytes: 32 bits and an exponent of two, rounded down. Two spans that differ by less than 2⁻³¹ of
/// their length look the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DrainTime {
    pub(super) mantissa: u32,
    pub(super) exponent: u8,
}

impl DrainTime {
    pub(super) fn new(span: Micros) -> Self {
        let micros = span.get().max(1);
        let exponent = 32_u32.saturating_sub(micros.leading_zeros());
        Self { mantissa: (micros >> exponent) as u32, exponent: exponent as u8 }
    }

    /// The span, about.
    pub(super) fn micros(self) -> u64 {
        u64::from(self.mantissa).checked_shl(self.exponent.into()).unwrap_or(u64::MAX)
    }

    fn ratio(self) -> f64 {
        f64::from(self.mantissa.max(1)) * 2_f64.powi(self.exponent.into())
    }

    /// A part of a span that had this tempo, as large a part of one that has the other. The one place with fractions:
    /// doubles, which Lua has too, and the same operations give the same result.
    pub(super) fn scale(self, part: Micros, to: Self) -> Micros {
        Micros::new((part.get() as f64 * to.ratio() / self.ratio()).ceil() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::MAX_PERIOD;

    #[test]
    fn scales_a_part_to_as_large_a_part() {
        let (minute, hour) = (DrainTime::new(Micros::from_secs(60)), DrainTime::new(Micros::from_secs(3_600)));
        assert_eq!(minute.scale(Micros::from_secs(30), hour), Micros::from_secs(1_800));
        assert_eq!(hour.scale(Micros::from_secs(1_800), minute), Micros::from_secs(30));
        assert_eq!(hour.scale(Micros::new(1), minute), Micros::new(1), "rounded up: never for free");
    }

    #[test]
    fn holds_every_span_to_31_bits() {
        for span in [1, 1_000, u64::from(u32::MAX), u64::from(u32::MAX) + 1, MAX_PERIOD.get()] {
            let kept = DrainTime::new(Micros::new(span)).micros();
            assert!(kept <= span && span - kept <= span >> 31, "{span} became {kept}");
        }
        assert_eq!(DrainTime::new(Micros::ZERO), DrainTime::new(Micros::new(1)));
    }
}
