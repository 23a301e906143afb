//! A limit as a rule or a caller states it: so many requests in so many units.

use super::shape::Shape;
use crate::algorithm::{Algorithm, LONGEST, Micros, sliding_log::SlidingLog, sliding_window::SlidingWindow};

/// The units of the protocol. Months have 30 days and years 365: windows are aligned to the epoch, not to a calendar.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unit {
    /// 1 s.
    Second,
    /// 60 s.
    Minute,
    /// 3 600 s.
    Hour,
    /// 86 400 s.
    Day,
    /// 604 800 s.
    Week,
    /// 2 592 000 s.
    Month,
    /// 31 536 000 s.
    Year,
}

impl Unit {
    /// Every unit, the shortest first.
    pub const ALL: [Self; 7] = [Self::Second, Self::Minute, Self::Hour, Self::Day, Self::Week, Self::Month, Self::Year];

    /// The unit's name, whatever the case of its letters.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|unit| unit.name().eq_ignore_ascii_case(name))
    }

    /// The word that a rule file uses.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Second => "second",
            Self::Minute => "minute",
            Self::Hour => "hour",
            Self::Day => "day",
            Self::Week => "week",
            Self::Month => "month",
            Self::Year => "year",
        }
    }

    /// The length in seconds.
    #[must_use]
    pub const fn seconds(self) -> u64 {
        match self {
            Self::Second => 1,
            Self::Minute => 60,
            Self::Hour => 3_600,
            Self::Day => 86_400,
            Self::Week => 604_800,
            Self::Month => 2_592_000,
            Self::Year => 31_536_000,
        }
    }
}

/// What becomes of a request whose counter could not be asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FailurePolicy {
    /// The caller gets an error, so that its own failure mode decides.
    #[default]
    Error,
    /// The request passes.
    Allow,
    /// The request is refused.
    Deny,
}

impl FailurePolicy {
    /// Every policy.
    pub const ALL: [Self; 3] = [Self::Error, Self::Allow, Self::Deny];

    /// The word that files and settings use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Allow => "allow",
            Self::Deny => "deny",
        }
    }
}

/// A limit that can be counted. Made by [`Limit::new`] and [`Limit::shaped`] only, so its numbers make sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    requests_per_unit: u32,
    unit: Unit,
    unit_multiplier: u32,
    shape: Shape,
    algorithm: Algorithm,
}

/// Why a limit cannot be counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LimitError {
    /// The window is longer than a counter can say.
    #[error("unit_multiplier makes a window of more than 100 years")]
    TooLong,
    /// A window of no length.
    #[error("unit_multiplier must be at least 1")]
    NoLength,
    /// Longer than sliding algorithms can count.
    #[error("a sliding window can be ten years long at most")]
    LongWindow,
    /// Nothing could ever pass.
    #[error("burst must be at least 1")]
    NoBurst,
    /// A burst that would not come back.
    #[error("a burst that large takes more than 100 years to come back")]
    SlowBurst,
    /// No counters, or too many.
    #[error("buckets must be from 1 to {}", SlidingWindow::MOST_BUCKETS)]
    Buckets,
    /// A log keeps every hit.
    #[error(
        "a sliding_log keeps every hit and takes {} at most, its soft part included; sliding_window has no such bound",
        SlidingLog::MOST
    )]
    LargeLog,
    /// The log would not know when the last pass was.
    #[error("min_interval must not be longer than the window")]
    LongInterval,
    /// No time to warm up, or too much.
    #[error("warm_up must be more than nothing and at most an hour")]
    WarmUpPeriod,
    /// There is no limit to be above of while the pace changes.
    #[error("soft does not go with warm_up")]
    SoftWarmUp,
}

impl LimitError {
    /// The word of the rule that is to blame.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::TooLong | Self::NoLength | Self::LongWindow => "unit_multiplier",
            Self::NoBurst | Self::SlowBurst => "burst",
            Self::Buckets => "buckets",
            Self::LargeLog => "requests_per_unit",
            Self::LongInterval => "min_interval",
            Self::WarmUpPeriod => "warm_up",
            Self::SoftWarmUp => "soft",
        }
    }
}

impl Limit {
    /// Fixed windows, as callers' own limits are counted: `requests_per_unit` in each window of `unit_multiplier` units.
    pub fn new(requests_per_unit: u32, unit: Unit, unit_multiplier: u32) -> Result<Self, LimitError> {
        Self::shaped(requests_per_unit, unit, unit_multiplier, Shape::default())
    }

    /// Counted as the shape says.
    pub fn shaped(requests_per_unit: u32, unit: Unit, unit_multiplier: u32, shape: Shape) -> Result<Self, LimitError> {
        let window = Micros::from_secs(unit.seconds() * u64::from(unit_multiplier));
        if window > LONGEST {
            return Err(LimitError::TooLong);
        }
        if window == Micros::ZERO {
            return Err(LimitError::NoLength);
        }
        let algorithm = shape.algorithm(requests_per_unit, window)?;
        Ok(Self { requests_per_unit, unit, unit_multiplier, shape, algorithm })
    }

    /// How many requests pass in one window.
    #[must_use]
    pub const fn requests_per_unit(&self) -> u32 {
        self.requests_per_unit
    }

    /// The unit.
    #[must_use]
    pub const fn unit(&self) -> Unit {
        self.unit
    }

    /// How many units make a window.
    #[must_use]
    pub const fn unit_multiplier(&self) -> u32 {
        self.unit_multiplier
    }

    /// How it is counted, in the rule's words.
    #[must_use]
    pub const fn shape(&self) -> &Shape {
        &self.shape
    }

    /// How it is counted.
    #[must_use]
    pub const fn algorithm(&self) -> &Algorithm {
        &self.algorithm
    }

    /// How many hits pass at once, and the time in which so many pass in the long run.
    #[must_use]
    pub fn policy(&self) -> (u64, Micros) {
        let window = Micros::from_secs(self.unit.seconds() * u64::from(self.unit_multiplier));
        self.shape.policy(self.requests_per_unit, window)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::Kind;

    #[test]
    fn windows_have_a_length_and_an_end() {
        assert!(Limit::new(1, Unit::Year, 100).is_ok());
        assert_eq!(Limit::new(1, Unit::Year, 101), Err(LimitError::TooLong));
        assert_eq!(Limit::new(1, Unit::Year, u32::MAX), Err(LimitError::TooLong));
        assert_eq!(Limit::new(1, Unit::Second, 0), Err(LimitError::NoLength));
    }

    #[test]
    fn a_policy_is_what_passes_at_once_and_the_time_it_takes_to_come_back() {
        let bucket = |burst| Shape { kind: Kind::TokenBucket, burst, ..Shape::default() };
        for (shape, expected) in [
            (Shape::default(), (100, 60)),
            (bucket(None), (100, 60)),
            (bucket(Some(20)), (20, 12)),
            (bucket(Some(500)), (500, 300)),
        ] {
            let (hits, window) = Limit::shaped(100, Unit::Minute, 1, shape).unwrap().policy();
            assert_eq!((hits, window.get()), (expected.0, expected.1 * 1_000_000), "{shape:?}");
        }
    }
}
