//! [`DrainTime`]: the drain time of a full bucket in a few bytes of the state. If it differs from that of the limit,
//! the limit was changed, and the level is scaled in proportion.

use super::Micros;

/// A drain time in microseconds, in five bytes: 32 bits and an exponent of two, rounded down. Drain times that differ
/// by less than 2⁻³¹ of their length can be equal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DrainTime {
    pub(super) mantissa: u32,
    pub(super) exponent: u8,
}

impl DrainTime {
    pub(super) fn new(duration: Micros) -> Self {
        let micros = duration.get().max(1);
        let exponent = 32_u32.saturating_sub(micros.leading_zeros());
        Self { mantissa: (micros >> exponent) as u32, exponent: exponent as u8 }
    }

    /// Returns the approximate drain time in microseconds.
    pub(super) fn micros(self) -> u64 {
        u64::from(self.mantissa).checked_shl(self.exponent.into()).unwrap_or(u64::MAX)
    }

    fn ratio(self) -> f64 {
        f64::from(self.mantissa.max(1)) * 2_f64.powi(self.exponent.into())
    }

    /// Scales a duration in proportion to the change from this drain time to `to`.
    ///
    /// The arithmetic uses doubles, which Lua has too, and the same operations give the same result.
    pub(super) fn scale(self, duration: Micros, to: Self) -> Micros {
        Micros::new((duration.get() as f64 * to.ratio() / self.ratio()).ceil() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MAX_PERIOD;

    #[test]
    fn scales_a_duration_to_the_same_proportion() {
        let (minute, hour) = (DrainTime::new(Micros::from_secs(60)), DrainTime::new(Micros::from_secs(3_600)));
        assert_eq!(minute.scale(Micros::from_secs(30), hour), Micros::from_secs(1_800));
        assert_eq!(hour.scale(Micros::from_secs(1_800), minute), Micros::from_secs(30));
        assert_eq!(hour.scale(Micros::new(1), minute), Micros::new(1), "rounded up");
    }

    #[test]
    fn a_drain_time_is_precise_to_31_bits() {
        for span in [1, 1_000, u64::from(u32::MAX), u64::from(u32::MAX) + 1, MAX_PERIOD.get()] {
            let stored = DrainTime::new(Micros::new(span)).micros();
            assert!(stored <= span && span - stored <= span >> 31, "{span} became {stored}");
        }
        assert_eq!(DrainTime::new(Micros::ZERO), DrainTime::new(Micros::new(1)));
    }
}
