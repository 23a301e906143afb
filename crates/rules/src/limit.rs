//! [`Limit`]: a maximum number of requests per window or in flight, and the algorithm that counts them.

use sluicegate_algorithm::{
    Algorithm, AlgorithmKind, InvalidLimit, LimitSpec, MAX_PERIOD, Micros, State, WindowStart,
    fixed_window::FixedWindow, penalty::Penalty,
};
use sluicegate_calendar::Period;

/// A unit of time of the rate limit protocol.
///
/// A month has 30 days and a year 365 days, because windows are aligned to the epoch and not to a calendar, unless the
/// limit has the keyword `window: calendar`.
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
    /// Returns the names of all units, separated by commas.
    pub(crate) fn names() -> String {
        Self::ALL.map(Self::name).join(", ")
    }

    /// All units in ascending order.
    pub const ALL: [Self; 7] = [Self::Second, Self::Minute, Self::Hour, Self::Day, Self::Week, Self::Month, Self::Year];

    /// Returns the unit with this name, ignoring case.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|unit| unit.name().eq_ignore_ascii_case(name))
    }

    /// Returns the unit's name in rule files.
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

    /// Returns the unit's length in seconds.
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

/// Decision about a request if the store cannot decide.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum FailurePolicy {
    /// The caller receives an error, so that its own failure mode decides.
    #[default]
    Error,
    /// The request is allowed.
    Allow,
    /// The request is denied.
    Deny,
    /// This instance decides with a counter in its own memory and its share of the limit.
    Local,
}

impl FailurePolicy {
    /// All failure policies.
    pub const ALL: [Self; 4] = [Self::Error, Self::Allow, Self::Deny, Self::Local];

    /// Returns whether this service never allows a request under the policy.
    ///
    /// With [`Self::Error`], the caller decides, and it may allow the request.
    #[must_use]
    pub const fn denies(self) -> bool {
        matches!(self, Self::Error | Self::Deny)
    }

    /// Returns the policy's name in rule files and settings.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Allow => "allow",
            Self::Deny => "deny",
            Self::Local => "local",
        }
    }
}

/// Measure of a limit: requests per window or requests in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// Requests in a window of `multiplier` units.
    Rate {
        /// Unit of the window.
        unit: Unit,
        /// Length of the window in units.
        multiplier: u32,
    },
    /// Requests in flight.
    InFlight {
        /// Maximum time for which a request counts, unless its holder renews it.
        hold: Micros,
    },
}

impl Measure {
    /// Returns the time for which a request counts: the length of the window, or the hold.
    #[must_use]
    pub const fn window(self) -> Micros {
        match self {
            Self::Rate { unit, multiplier } => Micros::from_secs(unit.seconds() * multiplier as u64),
            Self::InFlight { hold } => hold,
        }
    }

    /// Returns the length of the windows of a calendar.
    fn period(self) -> Result<Period, InvalidLimit> {
        let several = InvalidLimit {
            keyword: "unit_multiplier",
            reason: "with window: calendar, unit_multiplier must be 1, or with unit: month a divisor of 12",
        };
        match self {
            Self::Rate { unit: Unit::Month, multiplier } => Period::months(multiplier).ok_or(several),
            Self::Rate { unit: Unit::Hour, multiplier: 1 } => Ok(Period::Hour),
            Self::Rate { unit: Unit::Day, multiplier: 1 } => Ok(Period::Day),
            Self::Rate { unit: Unit::Week, multiplier: 1 } => Ok(Period::Week),
            Self::Rate { unit: Unit::Year, multiplier: 1 } => Ok(Period::Months(12)),
            Self::Rate { unit: Unit::Hour | Unit::Day | Unit::Week | Unit::Year, .. } => Err(several),
            Self::Rate { unit: Unit::Second | Unit::Minute, .. } | Self::InFlight { .. } => {
                let reason = "window: calendar requires the unit hour, day, week, month or year";
                Err(InvalidLimit { keyword: "window", reason })
            }
        }
    }
}

/// A valid limit and the algorithm that counts it, built by [`Limit::new`], [`Limit::from_spec`] or [`Limit::divided`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    requests: u64,
    measure: Measure,
    algorithm: Algorithm,
    /// Maximum burst, and the time in which it becomes available again.
    policy: (u64, Micros),
    /// Whether the hits of a denied request that were below the limit are reported as within it, as
    /// envoyproxy/ratelimit does.
    splits_denied: bool,
    /// Whether a denial delays later requests or may become invalid at any time. In a fixed window, denied requests
    /// wait for the end of the window in any case.
    denial_counts: bool,
    /// The time for which all hits are denied after the limit was exceeded.
    pub(crate) penalty: Option<Penalty>,
}

/// Error returned when a limit is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LimitError {
    /// The window is longer than a counter's state can represent.
    #[error("unit_multiplier must not result in a window of more than 100 years")]
    WindowTooLong,
    /// The window has a length of 0.
    #[error("unit_multiplier must be at least 1")]
    ZeroWindow,
    /// The algorithm does not support these parameters.
    #[error(transparent)]
    Invalid(#[from] InvalidLimit),
}

impl LimitError {
    /// Returns the keyword that caused the error.
    #[must_use]
    pub const fn keyword(self) -> &'static str {
        match self {
            Self::WindowTooLong | Self::ZeroWindow => "unit_multiplier",
            Self::Invalid(error) => error.keyword,
        }
    }
}

impl Limit {
    /// A limit of 0, for descriptors that are denied without a counter.
    pub const DENY_ALL: Self = Self {
        requests: 0,
        measure: Measure::Rate { unit: Unit::Second, multiplier: 1 },
        algorithm: Algorithm::FixedWindow(FixedWindow::DENY_ALL),
        policy: (0, Micros::from_secs(1)),
        splits_denied: true,
        denial_counts: false,
        penalty: None,
    };

    /// Builds a limit of `requests_per_unit` in each fixed window of `unit_multiplier` units.
    ///
    /// Limits requested by callers are counted in this way.
    ///
    /// # Errors
    ///
    /// Returns [`LimitError`] if the window is empty or too long.
    pub fn new(requests_per_unit: u64, unit: Unit, unit_multiplier: u32) -> Result<Self, LimitError> {
        let measure = Measure::Rate { unit, multiplier: unit_multiplier };
        Self::from_spec(requests_per_unit, measure, Algorithm::DEFAULT, LimitSpec::default())
    }

    /// Builds a limit that is counted by the algorithm `kind` with the parameters in `spec`.
    ///
    /// `requests` and the window of `measure` replace those in `spec`.
    ///
    /// # Errors
    ///
    /// Returns [`LimitError`] if the window is empty or too long, or if the algorithm does not support the parameters.
    pub fn from_spec(
        requests: u64,
        measure: Measure,
        kind: AlgorithmKind,
        spec: LimitSpec,
    ) -> Result<Self, LimitError> {
        let window = measure.window();
        if let Measure::Rate { .. } = measure {
            if window > MAX_PERIOD {
                return Err(LimitError::WindowTooLong);
            }
            if window == Micros::ZERO {
                return Err(LimitError::ZeroWindow);
            }
        }
        let period = match spec.window_start {
            Some(WindowStart::Calendar) => Some(measure.period()?),
            _ => None,
        };
        let spec = LimitSpec { requests, window, period, ..spec };
        // A limit of 0 denies everything with every algorithm.
        let kind = if requests == 0 { Algorithm::DEFAULT } else { kind };
        let algorithm = (kind.build)(&spec)?;
        let policy = match spec.burst {
            Some(burst) if requests > 0 => {
                let micros = u128::from(window.get()) * u128::from(burst) / u128::from(requests);
                (burst, Micros::new(u64::try_from(micros).unwrap_or(u64::MAX)))
            }
            Some(_) | None => (requests, window),
        };
        let splits_denied = kind == Algorithm::DEFAULT && spec.count_denied != Some(false);
        let denial_counts = kind != Algorithm::DEFAULT && algorithm.denial_counts(&State::default(), Micros::ZERO);
        Ok(Self { requests, measure, algorithm, policy, splits_denied, denial_counts, penalty: None })
    }

    /// Builds one instance's share of a limit that is divided among `instances`, rounded up.
    ///
    /// # Errors
    ///
    /// Returns [`LimitError`] under the same conditions as [`Limit::from_spec`].
    pub fn divided(
        requests: u64,
        measure: Measure,
        kind: AlgorithmKind,
        spec: LimitSpec,
        instances: u32,
    ) -> Result<Self, LimitError> {
        let spec = LimitSpec { requests, ..spec }.divided(instances);
        Self::from_spec(spec.requests, measure, kind, spec)
    }

    /// Returns the maximum number of requests in one window, or in flight.
    #[must_use]
    pub const fn requests(&self) -> u64 {
        self.requests
    }

    /// Returns whether requests are limited per window or in flight.
    #[must_use]
    pub const fn measure(&self) -> Measure {
        self.measure
    }

    /// Returns the algorithm that counts the limit.
    #[must_use]
    pub const fn algorithm(&self) -> &Algorithm {
        &self.algorithm
    }

    /// Returns whether the algorithm is the default of rules without the keyword `algorithm`.
    #[must_use]
    pub fn is_default(&self) -> bool {
        self.algorithm.name() == Algorithm::DEFAULT.name
    }

    /// Returns the maximum burst, and the time in which that number of hits is allowed in the long run.
    #[must_use]
    pub const fn policy(&self) -> (u64, Micros) {
        self.policy
    }

    /// Returns the time for which all hits are denied after the limit was exceeded.
    #[must_use]
    pub const fn penalty(&self) -> Option<Penalty> {
        self.penalty
    }

    /// Returns whether the limit's unit is a second, with any multiplier. Such limits use the store of per-second limits if
    /// there is one, as in envoyproxy/ratelimit.
    #[must_use]
    pub const fn is_per_second(&self) -> bool {
        matches!(self.measure, Measure::Rate { unit: Unit::Second, .. })
    }

    /// Returns whether denials must not be cached, because they delay later requests or may become invalid at any time.
    #[must_use]
    pub const fn denial_counts(&self) -> bool {
        self.denial_counts
    }

    /// Returns whether the hits of a denied request that were below the limit are reported as within it, as
    /// envoyproxy/ratelimit does.
    #[must_use]
    pub const fn splits_denied(&self) -> bool {
        self.splits_denied
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_windows_that_are_empty_or_longer_than_100_years() {
        assert!(Limit::new(1, Unit::Year, 100).is_ok());
        assert_eq!(Limit::new(1, Unit::Year, 101), Err(LimitError::WindowTooLong));
        assert_eq!(Limit::new(1, Unit::Year, u32::MAX), Err(LimitError::WindowTooLong));
        assert_eq!(Limit::new(1, Unit::Second, 0), Err(LimitError::ZeroWindow));
    }

    #[test]
    fn the_policy_is_the_burst_and_the_time_in_which_it_is_restored() {
        let bucket = Algorithm::kind("token_bucket").unwrap();
        for (kind, burst, expected) in [
            (Algorithm::DEFAULT, None, (100, 60)),
            (bucket, None, (100, 60)),
            (bucket, Some(20), (20, 12)),
            (bucket, Some(500), (500, 300)),
        ] {
            let spec = LimitSpec { burst, ..LimitSpec::default() };
            let minute = Measure::Rate { unit: Unit::Minute, multiplier: 1 };
            let (hits, window) = Limit::from_spec(100, minute, kind, spec).unwrap().policy();
            assert_eq!((hits, window.get()), (expected.0, expected.1 * 1_000_000), "{spec:?}");
        }
    }

    #[test]
    fn a_limit_of_0_with_a_burst_denies_everything() {
        let bucket = Algorithm::kind("token_bucket").unwrap();
        let minute = Measure::Rate { unit: Unit::Minute, multiplier: 1 };
        let spec = LimitSpec { burst: Some(20), ..LimitSpec::default() };
        let limit = Limit::from_spec(0, minute, bucket, spec).unwrap();
        assert_eq!((limit.policy(), limit.is_default()), ((0, Micros::from_secs(60)), true));
    }

    #[test]
    fn count_denied_determines_how_denied_hits_are_reported_and_whether_denials_are_cached() {
        let bucket = Algorithm::kind("token_bucket").unwrap();
        let minute = Measure::Rate { unit: Unit::Minute, multiplier: 1 };
        for (kind, count_denied, expected) in [
            (Algorithm::DEFAULT, None, (true, false)),
            (Algorithm::DEFAULT, Some(true), (true, false)),
            (Algorithm::DEFAULT, Some(false), (false, false)),
            (bucket, None, (false, false)),
            (bucket, Some(true), (false, true)),
            (bucket, Some(false), (false, false)),
        ] {
            let spec = LimitSpec { count_denied, ..LimitSpec::default() };
            let limit = Limit::from_spec(10, minute, kind, spec).unwrap();
            assert_eq!((limit.splits_denied(), limit.denial_counts()), expected, "{} {count_denied:?}", kind.name);
        }
    }
}
