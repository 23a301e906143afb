//! A limit as a rule or a caller states it: so many requests in so many units.

use crate::algorithm::{
    Algorithm, AlgorithmKind, InvalidLimit, LimitSpec, MAX_PERIOD, Micros, State, fixed_window::FixedWindow,
};

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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum FailurePolicy {
    /// The caller gets an error, so that its own failure mode decides.
    #[default]
    Error,
    /// The request passes.
    Allow,
    /// The request is refused.
    Deny,
    /// This instance decides by itself, with its part of the limit.
    Local,
}

impl FailurePolicy {
    /// Every policy.
    pub const ALL: [Self; 4] = [Self::Error, Self::Allow, Self::Deny, Self::Local];

    /// Whether it lets nothing pass, as far as this service is asked.
    #[must_use]
    pub const fn denies(self) -> bool {
        matches!(self, Self::Error | Self::Deny)
    }

    /// The word that files and settings use.
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

/// What a limit's number is a number of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// Requests in a window of so many units.
    Rate {
        /// The unit.
        unit: Unit,
        /// How many of them.
        multiplier: u32,
    },
    /// Requests at once.
    InFlight {
        /// None of them counts for longer, unless its holder says that it does.
        hold: Micros,
    },
}

impl Measure {
    /// How long a request counts.
    #[must_use]
    pub const fn window(self) -> Micros {
        match self {
            Self::Rate { unit, multiplier } => Micros::from_secs(unit.seconds() * multiplier as u64),
            Self::InFlight { hold } => hold,
        }
    }
}

/// A limit that can be counted. Made by [`Limit::new`] and [`Limit::shaped`] only, so its numbers make sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    requests: u32,
    measure: Measure,
    algorithm: Algorithm,
    /// How many hits pass at once, and the time in which so many come back.
    policy: (u64, Micros),
    /// The part of a refused request that was below the limit counts as within it, as the peer has it.
    splits_refused: bool,
    /// A refusal makes the next ones wait longer, or may be over at any moment. In a fixed window they wait for its end in
    /// any case.
    refusal_counts: bool,
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
    /// The algorithm cannot count with these numbers.
    #[error(transparent)]
    Invalid(#[from] InvalidLimit),
}

impl LimitError {
    /// The word of the rule that is to blame.
    #[must_use]
    pub const fn keyword(self) -> &'static str {
        match self {
            Self::TooLong | Self::NoLength => "unit_multiplier",
            Self::Invalid(unfit) => unfit.keyword,
        }
    }
}

impl Limit {
    /// For what refuses everything without being counted.
    pub const NOTHING: Self = Self {
        requests: 0,
        measure: Measure::Rate { unit: Unit::Second, multiplier: 1 },
        algorithm: Algorithm::FixedWindow(FixedWindow::NOTHING),
        policy: (0, Micros::from_secs(1)),
        splits_refused: true,
        refusal_counts: false,
    };

    /// Fixed windows, as callers' own limits are counted: `requests_per_unit` in each window of `unit_multiplier` units.
    pub fn new(requests_per_unit: u32, unit: Unit, unit_multiplier: u32) -> Result<Self, LimitError> {
        let measure = Measure::Rate { unit, multiplier: unit_multiplier };
        Self::shaped(requests_per_unit, measure, Algorithm::DEFAULT, LimitSpec::default())
    }

    /// Counted by this algorithm, as the shape says; its requests and its window are what the other numbers make them.
    pub fn shaped(requests: u32, measure: Measure, kind: AlgorithmKind, shape: LimitSpec) -> Result<Self, LimitError> {
        let window = measure.window();
        if let Measure::Rate { .. } = measure {
            if window > MAX_PERIOD {
                return Err(LimitError::TooLong);
            }
            if window == Micros::ZERO {
                return Err(LimitError::NoLength);
            }
        }
        let shape = LimitSpec { requests, window, ..shape };
        // A limit of nothing refuses everything, however it counts.
        let kind = if requests == 0 { Algorithm::DEFAULT } else { kind };
        let algorithm = (kind.build)(&shape)?;
        let policy = match shape.burst.filter(|_| requests > 0) {
            Some(burst) => {
                let micros = u128::from(window.get()) * u128::from(burst) / u128::from(requests);
                (burst.into(), Micros::new(u64::try_from(micros).unwrap_or(u64::MAX)))
            }
            None => (requests.into(), window),
        };
        let splits_refused = kind == Algorithm::DEFAULT && shape.count_denied != Some(false);
        let refusal_counts = kind != Algorithm::DEFAULT && algorithm.denial_counts(&State::default(), Micros::ZERO);
        Ok(Self { requests, measure, algorithm, policy, splits_refused, refusal_counts })
    }

    /// One of so many instances' part of the same, rounded up.
    pub fn divided(
        requests: u32,
        measure: Measure,
        kind: AlgorithmKind,
        shape: LimitSpec,
        instances: u32,
    ) -> Result<Self, LimitError> {
        let shape = LimitSpec { requests, ..shape }.divided(instances);
        Self::shaped(shape.requests, measure, kind, shape)
    }

    /// How many requests pass in one window, or at once.
    #[must_use]
    pub const fn requests(&self) -> u32 {
        self.requests
    }

    /// And which of these.
    #[must_use]
    pub const fn measure(&self) -> Measure {
        self.measure
    }

    /// How it is counted.
    #[must_use]
    pub const fn algorithm(&self) -> &Algorithm {
        &self.algorithm
    }

    /// Whether it is counted as a rule that does not say how.
    #[must_use]
    pub fn is_default(&self) -> bool {
        self.algorithm.name() == Algorithm::DEFAULT.name
    }

    /// How many hits pass at once, and the time in which so many pass in the long run.
    #[must_use]
    pub const fn policy(&self) -> (u64, Micros) {
        self.policy
    }

    /// Whether it is counted where limits of unit second are, if they have a store of their own: as at the peer.
    #[must_use]
    pub const fn is_per_second(&self) -> bool {
        matches!(self.measure, Measure::Rate { unit: Unit::Second, .. })
    }

    /// Whether a refusal is not to be remembered: it makes the next ones wait longer, or may be over at any moment.
    #[must_use]
    pub const fn denial_counts(&self) -> bool {
        self.refusal_counts
    }

    /// Whether the part of a refused request that was below the limit counts as within it, as the peer has it.
    #[must_use]
    pub const fn splits_denied(&self) -> bool {
        self.splits_refused
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_have_a_length_and_an_end() {
        assert!(Limit::new(1, Unit::Year, 100).is_ok());
        assert_eq!(Limit::new(1, Unit::Year, 101), Err(LimitError::TooLong));
        assert_eq!(Limit::new(1, Unit::Year, u32::MAX), Err(LimitError::TooLong));
        assert_eq!(Limit::new(1, Unit::Second, 0), Err(LimitError::NoLength));
    }

    #[test]
    fn a_policy_is_what_passes_at_once_and_the_time_it_takes_to_come_back() {
        let bucket = Algorithm::kind("token_bucket").unwrap();
        for (kind, burst, expected) in [
            (Algorithm::DEFAULT, None, (100, 60)),
            (bucket, None, (100, 60)),
            (bucket, Some(20), (20, 12)),
            (bucket, Some(500), (500, 300)),
        ] {
            let shape = LimitSpec { burst, ..LimitSpec::default() };
            let minute = Measure::Rate { unit: Unit::Minute, multiplier: 1 };
            let (hits, window) = Limit::shaped(100, minute, kind, shape).unwrap().policy();
            assert_eq!((hits, window.get()), (expected.0, expected.1 * 1_000_000), "{shape:?}");
        }
    }
}
