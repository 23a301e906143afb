//! What a limit says of its counting, before an algorithm has been made of it.

use sluicegate_common::adaptive::Method;

use super::{Algorithm, Classes, MaxHits, Micros, sliding_window::WindowEdge};

/// The numbers of a limit. What is not given has the algorithm's default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LimitSpec {
    /// Hits per window.
    pub requests: u32,
    /// The window's length.
    pub window: Micros,
    /// Counters per window.
    pub buckets: Option<u32>,
    /// How the oldest of them counts.
    pub edge: Option<WindowEdge>,
    /// Hits at once.
    pub burst: Option<u32>,
    /// Hits that may wait.
    pub queue: Option<u32>,
    /// From cold to warm.
    pub warm_up: Option<Micros>,
    /// Denied hits count too.
    pub count_denied: Option<bool>,
    /// Between two passes at least.
    pub min_interval: Option<Micros>,
    /// Percent that the limit lets through above itself.
    pub soft: Option<u32>,
    /// Who has what of it.
    pub classes: Option<Classes>,
    /// What a limit of requests at once follows, and from where on.
    pub method: Option<Method>,
    /// Never fewer at once.
    pub floor: Option<u32>,
    /// Where it begins.
    pub initial: Option<u32>,
    /// What takes longer has been dropped.
    pub timeout: Option<Micros>,
}

impl LimitSpec {
    /// So many hits, and the soft part above.
    #[must_use]
    pub fn max_hits(&self, hits: u64) -> MaxHits {
        MaxHits::soft(hits, self.soft.unwrap_or_default())
    }

    /// One of so many equal parts, rounded up: together they may be a little more than the whole, and none is nothing.
    #[must_use]
    pub fn divided(&self, parts: u32) -> Self {
        let part = |number: u32| number.div_ceil(parts.max(1));
        Self {
            requests: part(self.requests),
            burst: self.burst.map(part),
            queue: self.queue.map(part),
            floor: self.floor.map(part),
            initial: self.initial.map(part),
            classes: self.classes.map(|classes| classes.divided(parts)),
            ..*self
        }
    }

    /// Whether denied hits count; not by default.
    #[must_use]
    pub fn counts_denied(&self) -> bool {
        self.count_denied.unwrap_or(false)
    }

    /// The burst, by default the hits of a window.
    pub(super) fn burst(&self) -> Result<u32, InvalidLimit> {
        match self.burst.unwrap_or(self.requests) {
            0 => Err(InvalidLimit { keyword: "burst", reason: "burst must be at least 1" }),
            burst => Ok(burst),
        }
    }
}

/// Why no algorithm can be made of a shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct InvalidLimit {
    /// The word of the rule that is to blame.
    pub keyword: &'static str,
    /// A sentence.
    pub reason: &'static str,
}

impl InvalidLimit {
    pub(super) const WINDOW: Self =
        Self { keyword: "unit_multiplier", reason: "a sliding window can be ten years long at most" };
    pub(super) const BURST: Self =
        Self { keyword: "burst", reason: "a burst that large takes more than 100 years to come back" };
}

/// An algorithm as the list has it: what is to be known before there is one.
#[derive(Clone, Copy, Debug)]
pub struct AlgorithmKind {
    /// See [`super::Rule::NAME`].
    pub name: &'static str,
    /// See [`super::Rule::WORDS`].
    pub keywords: &'static [&'static str],
    /// See [`super::Rule::build`].
    pub build: fn(&LimitSpec) -> Result<Algorithm, InvalidLimit>,
}

impl PartialEq for AlgorithmKind {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for AlgorithmKind {}
