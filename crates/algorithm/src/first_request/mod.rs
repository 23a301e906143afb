//! [`FirstRequestWindow`]: a fixed window that begins with an entity's first hit and ends one window later.
//!
//! Hits are counted as in a [`FixedWindow`](super::fixed_window::FixedWindow): by default, denied hits count, too. The next
//! window begins with the first hit after the end, so the limits of entities do not all reset at the same moment. Around the
//! end of a window, up to twice the limit may be allowed within the length of a window.
//!
//! A lease takes many hits at the same time, so a window can begin with hits that are returned later.
//!
//! The state is the start of the window (7 bytes, microseconds since the Unix epoch) and the count (7 bytes). A counter
//! without hits has no window, and no state.

use smallvec::smallvec;

use super::{
    Action, Algorithm, Arguments, CLOCK_SLACK, CounterPart, CounterProgram, Decision, InvalidLimit, LimitSpec, Limiter,
    MAX_NUMBER, MAX_PERIOD, MaxHits, Micros, Operation, Program, State, WindowStart,
};

/// A limiter that allows `limit` hits in each window of an entity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FirstRequestWindow {
    max_hits: MaxHits,
    window: Micros,
    count_denied: bool,
    /// Whether the hits are taken for leases. A returned lease does not move the window, in which others have counted hits.
    is_lease: bool,
}

/// The window of an entity, and its count.
#[derive(Clone, Copy)]
struct EntityWindow {
    start: Micros,
    hits: u64,
}

impl EntityWindow {
    fn read(state: &State) -> Option<Self> {
        let start = Micros::new(state.number::<7>(0)?);
        let hits = state.number::<7>(7)?;
        Some(Self { start, hits })
    }

    fn write(self, state: &mut State) {
        state.clear();
        if self.hits > 0 {
            state.push::<7>(self.start.get());
            state.push::<7>(self.hits);
        }
    }
}

impl FirstRequestWindow {
    /// Creates a limiter; `None` if the window is zero or longer than [`MAX_PERIOD`].
    #[must_use]
    pub fn new(max_hits: MaxHits, window: Micros, count_denied: bool) -> Option<Self> {
        if window == Micros::ZERO || window > MAX_PERIOD {
            return None;
        }
        Some(Self { max_hits, window, count_denied, is_lease: false })
    }

    /// Returns the window in which hits count now, which begins now if there is none.
    ///
    /// If the clock steps back by up to [`CLOCK_SLACK`], hits continue to count in the stored window, so that no caller
    /// gains hits. A window that begins later than that was written by a wrong clock and is ignored, so that no caller is
    /// blocked by it.
    fn current(&self, state: &State, now: Micros) -> EntityWindow {
        match EntityWindow::read(state) {
            Some(stored) if now < stored.start + self.window && stored.start <= now + CLOCK_SLACK => stored,
            _ => EntityWindow { start: now, hits: 0 },
        }
    }

    fn fits(&self, hits: u64, cost: u64) -> bool {
        let ceiling = self.max_hits.ceiling();
        hits <= ceiling && cost <= ceiling - hits
    }

    fn contains(&self, window: EntityWindow, at: Micros) -> bool {
        window.start <= at && at < window.start + self.window
    }
}

impl CounterProgram for FirstRequestWindow {
    const TAG: &'static str = "fr";
    const SCRIPT: &'static str = include_str!("script.lua");
    const ARGUMENTS: &'static [&'static str] = &["cost", "ceiling", "window", "slack", "count_denied", "is_lease"];

    fn arguments(&self, operation: Operation) -> Arguments {
        smallvec![
            operation.cost.min(MAX_NUMBER),
            self.max_hits.ceiling(),
            self.window.get(),
            CLOCK_SLACK.get(),
            self.count_denied.into(),
            self.is_lease.into()
        ]
    }

    fn step(&self, state: &mut State, operation: Operation) -> bool {
        let current = self.current(state, operation.now);
        let cost = operation.cost.min(MAX_NUMBER);
        let fits = self.fits(current.hits, cost);
        let hits = match operation.action {
            Action::Take if fits || self.count_denied => current.hits.saturating_add(cost).min(MAX_NUMBER),
            Action::Refund => current.hits.saturating_sub(cost),
            // A take in another window than the counted one is not rolled back.
            Action::RollBack(taken) if self.contains(current, taken) => current.hits.saturating_sub(cost),
            Action::Take | Action::Peek | Action::RollBack(_) => current.hits,
        };
        if hits != current.hits {
            // Without the first take, the window had begun with a later one, at the latest now.
            let is_first = !self.is_lease && operation.action == Action::RollBack(current.start);
            let start = if is_first { current.start.max(operation.now) } else { current.start };
            EntityWindow { start, hits }.write(state);
        }
        fits || operation.action.releases()
    }

    fn explain(&self, state: &State, operation: Operation, allowed: bool) -> Decision {
        let EntityWindow { start, hits: used } = self.current(state, operation.now);
        let reset = if used > 0 { start + self.window - operation.now } else { Micros::ZERO };
        let can_ever_fit = operation.cost <= self.max_hits.ceiling();
        Decision {
            allowed,
            soft: allowed && operation.is_soft(used, self.max_hits),
            remaining: self.max_hits.remaining(used),
            used,
            reset,
            next: reset,
            retry_after: (!allowed && can_ever_fit).then_some(reset),
            ..Decision::default()
        }
    }

    fn counts_denied(&self) -> bool {
        self.count_denied
    }

    /// Returns whether a denied take still changes later decisions. Once the count is above the limit, all hits are
    /// denied until the window ends, regardless of the count.
    fn denial_counts(&self, state: &State, now: Micros) -> bool {
        self.count_denied && self.current(state, now).hits <= self.max_hits.ceiling()
    }

    fn lease_ends(&self, state: &State, counted: Micros) -> Micros {
        match EntityWindow::read(state) {
            Some(window) if self.contains(window, counted) => window.start + self.window,
            _ => counted,
        }
    }

    fn expires(&self, state: &State, now: Micros) -> Micros {
        let current = self.current(state, now);
        if current.hits > 0 { current.start + self.window } else { now }
    }
}

impl Limiter for FirstRequestWindow {
    const NAME: &'static str = "fixed_window from the first request";
    const KEYWORDS: &'static [&'static str] = &["window"];

    fn build(spec: &LimitSpec) -> Result<Algorithm, InvalidLimit> {
        if spec.phase.is_some() {
            let reason = "phase cannot be combined with window, which says when windows begin";
            return Err(InvalidLimit { keyword: "phase", reason });
        }
        // The default is that of other fixed windows.
        let count_denied = spec.count_denied.unwrap_or(true);
        let limiter = Self::new(spec.max_hits(spec.requests), spec.window, count_denied);
        Ok(limiter.ok_or(InvalidLimit::FIXED_WINDOW)?.into())
    }

    fn spec(&self) -> Option<LimitSpec> {
        Some(LimitSpec {
            requests: self.max_hits.limit(),
            window: self.window,
            window_start: Some(WindowStart::FirstRequest),
            soft: self.max_hits.percent(),
            count_denied: Some(self.count_denied),
            ..LimitSpec::default()
        })
    }

    fn parts(&self, state: &State, now: Micros) -> Vec<CounterPart> {
        let EntityWindow { start, hits } = self.current(state, now);
        if hits == 0 {
            return Vec::new();
        }
        vec![CounterPart { from: start, until: start + self.window, hits }]
    }

    fn leasing(&self) -> Option<Program> {
        let max_hits = MaxHits::hard(self.max_hits.limit());
        Some(Self { max_hits, count_denied: false, is_lease: true, ..*self }.into())
    }

    fn recording(&self) -> Algorithm {
        Self { count_denied: true, ..*self }.into()
    }

    /// Returns whether a window that begins with the hit has ended. The hit's own window begins no later, unless its
    /// first take was rolled back or the clock was set back.
    fn has_expired(&self, counted: Micros, now: Micros) -> bool {
        counted + self.window <= now
    }

    fn is_ahead(&self, state: &State, now: Micros) -> bool {
        self.current(state, now).start > now
    }
}

#[cfg(test)]
mod tests;
