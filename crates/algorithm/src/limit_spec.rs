//! [`LimitSpec`]: the parameters of a limit, from which an algorithm is built.

use sluicegate_calendar::{Anchor, Period};
use sluicegate_overload::adaptive::Method;

use super::{Algorithm, Classes, MaxHits, Micros, sliding_window::WindowEdge};

/// The parameters of a limit. Parameters that are `None` have the default of the algorithm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LimitSpec {
    /// Hits per window.
    pub requests: u64,
    /// Length of the window.
    pub window: Micros,
    /// When a fixed window begins.
    pub window_start: Option<WindowStart>,
    /// Length of the windows of a calendar.
    pub period: Option<Period>,
    /// When the windows of a calendar begin.
    pub anchor: Anchor,
    /// Time by which windows begin earlier than at multiples of their length since the Unix epoch.
    pub phase: Option<Micros>,
    /// Number of counters per window.
    pub buckets: Option<u32>,
    /// Weight of the oldest counter of a sliding window.
    pub edge: Option<WindowEdge>,
    /// Hits that a bucket allows in one burst.
    pub burst: Option<u64>,
    /// Hits that a bucket may owe.
    pub debt: Option<u64>,
    /// Hits that a leaky bucket may delay.
    pub queue: Option<u32>,
    /// Time in which the rate rises from a third to the full rate.
    pub warm_up: Option<Micros>,
    /// Whether denied hits count too.
    pub count_denied: Option<bool>,
    /// Minimum time between two allowed hits.
    pub min_interval: Option<Micros>,
    /// Percentage above the limit that a soft limit allows.
    pub soft: Option<u32>,
    /// Classes that share the limit.
    pub classes: Option<Classes>,
    /// Method by which an adaptive limit follows latency.
    pub method: Option<Method>,
    /// Minimum of an adaptive limit.
    pub floor: Option<u32>,
    /// Initial value of an adaptive limit.
    pub initial: Option<u32>,
    /// Latency above which a request counts as dropped.
    pub timeout: Option<Micros>,
}

/// The beginning of a fixed window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WindowStart {
    /// At multiples of its length since the Unix epoch, for all entities together.
    #[default]
    Epoch,
    /// With the first hit of each entity.
    FirstRequest,
    /// At the boundaries of a calendar.
    Calendar,
}

impl WindowStart {
    /// All values.
    pub const ALL: [Self; 3] = [Self::Epoch, Self::FirstRequest, Self::Calendar];

    /// Returns the name in rule files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Epoch => "epoch",
            Self::FirstRequest => "first_request",
            Self::Calendar => "calendar",
        }
    }
}

impl LimitSpec {
    /// Returns `hits` with the percentage that a soft limit allows in addition.
    #[must_use]
    pub fn max_hits(&self, hits: u64) -> MaxHits {
        MaxHits::soft(hits, self.soft.unwrap_or_default())
    }

    /// Returns the parameters divided by `parts`, rounded up. The parts may add up to slightly more than the whole, and
    /// no part is zero.
    #[must_use]
    pub fn divided(&self, parts: u32) -> Self {
        let parts = parts.max(1);
        Self {
            requests: self.requests.div_ceil(parts.into()),
            burst: self.burst.map(|burst| burst.div_ceil(parts.into())),
            debt: self.debt.map(|debt| debt.div_ceil(parts.into())),
            queue: self.queue.map(|queue| queue.div_ceil(parts)),
            floor: self.floor.map(|floor| floor.div_ceil(parts)),
            initial: self.initial.map(|initial| initial.div_ceil(parts)),
            classes: self.classes.map(|classes| classes.divided(parts)),
            ..*self
        }
    }

    /// Returns whether denied hits count; by default they do not.
    #[must_use]
    pub fn counts_denied(&self) -> bool {
        self.count_denied.unwrap_or(false)
    }

    /// Returns the burst, by default the hits per window.
    pub(super) fn burst(&self) -> Result<u64, InvalidLimit> {
        match self.burst.unwrap_or(self.requests) {
            0 => Err(InvalidLimit { keyword: "burst", reason: "burst must be at least 1" }),
            burst => Ok(burst),
        }
    }

    /// Returns the hits per window for an algorithm that cannot hold more than 32 bits.
    pub(super) fn short_requests(&self) -> Result<u32, InvalidLimit> {
        u32::try_from(self.requests).map_err(|_| InvalidLimit {
            keyword: "requests_per_unit",
            reason: "limits above 4294967295 are only possible with fixed_window, token_bucket and gcra",
        })
    }

    /// Returns the burst for an algorithm that cannot hold more than 32 bits.
    pub(super) fn short_burst(&self) -> Result<u32, InvalidLimit> {
        self.short_requests()?;
        u32::try_from(self.burst()?)
            .map_err(|_| InvalidLimit { keyword: "burst", reason: "burst must be at most 4294967295" })
    }
}

/// Error returned when no algorithm can be built from a [`LimitSpec`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct InvalidLimit {
    /// Keyword of the rule that is at fault.
    pub keyword: &'static str,
    /// Error message.
    pub reason: &'static str,
}

impl InvalidLimit {
    pub(super) const FIXED_WINDOW: Self =
        Self { keyword: "unit_multiplier", reason: "the window must be longer than 0 and at most 100 years" };
    pub(super) const WINDOW: Self =
        Self { keyword: "unit_multiplier", reason: "the window of a sliding window or log must be at most 10 years" };
    pub(super) const BURST: Self = Self { keyword: "burst", reason: "burst must refill within 100 years" };
}

/// A kind of algorithm: its name, its keywords and its constructor.
#[derive(Clone, Copy, Debug)]
pub struct AlgorithmKind {
    /// See [`super::Limiter::NAME`].
    pub name: &'static str,
    /// See [`super::Limiter::KEYWORDS`].
    pub keywords: &'static [&'static str],
    /// See [`super::Limiter::build`].
    pub build: fn(&LimitSpec) -> Result<Algorithm, InvalidLimit>,
}

impl PartialEq for AlgorithmKind {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for AlgorithmKind {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_of_hits_is_divided_and_rounded_up() {
        let classes = Classes::new(&[(5, 10), (0, 1)], 10).unwrap();
        let spec = LimitSpec {
            requests: 10,
            window: Micros::from_secs(60),
            burst: Some(7),
            debt: Some(8),
            queue: Some(5),
            soft: Some(10),
            classes: Some(classes),
            floor: Some(3),
            initial: Some(4),
            ..LimitSpec::default()
        };
        let part = LimitSpec {
            requests: 4,
            burst: Some(3),
            debt: Some(3),
            queue: Some(2),
            classes: Some(classes.divided(3)),
            floor: Some(1),
            initial: Some(2),
            ..spec
        };
        assert_eq!(spec.divided(3), part);
        assert_eq!(spec.divided(1), spec);
    }

    #[test]
    fn kinds_are_equal_if_their_names_are_equal() {
        assert_eq!(Algorithm::kind("fixed_window"), Some(Algorithm::DEFAULT));
        assert_ne!(Algorithm::kind("gcra"), Some(Algorithm::DEFAULT));
    }
}
