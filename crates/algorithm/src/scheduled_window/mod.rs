//! [`ScheduledWindow`]: a fixed window whose boundaries follow a calendar, or differ from entity to entity, or whose limit is
//! larger than that of a [`FixedWindow`](super::fixed_window::FixedWindow).
//!
//! Hits are counted as in a [`FixedWindow`](super::fixed_window::FixedWindow): by default, denied hits count, too, and around
//! the end of a window up to twice the limit may be allowed within the length of a window.
//!
//! The state is the time of the latest counted hit (7 bytes, microseconds since the Unix epoch) and the count (7 bytes). The
//! count is that of the window in which the latest hit is. So it lasts until the next boundary if the calendar changes, and
//! no window of the new calendar has more hits than the limit. A counter without hits has no state.

use std::fmt;

use sluicegate_calendar::{Boundaries, Calendar, Period};
use smallvec::smallvec;

use super::{
    Action, Algorithm, Arguments, CLOCK_SLACK, CounterPart, CounterProgram, Decision, InvalidLimit, LimitSpec, Limiter,
    MAX_NUMBER, MAX_PERIOD, MaxHits, Micros, Operation, Program, RequestContext, State, WindowStart,
};

/// A limiter that allows `limit` hits in each window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScheduledWindow {
    max_hits: MaxHits,
    schedule: Schedule,
    count_denied: bool,
}

/// The beginnings of a limit's fixed windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// At the boundaries of a calendar.
    Calendar(Calendar),
    /// At multiples of their length since the Unix epoch, for all entities together.
    Epoch {
        /// Length of the window.
        window: Micros,
    },
    /// At multiples of their length since the Unix epoch, earlier by a phase that each entity has for itself.
    Phase {
        /// Length of the window.
        window: Micros,
        /// Time by which windows begin earlier, less than the length.
        phase: Micros,
    },
}

/// An interval of time.
#[derive(Clone, Copy)]
struct Window {
    start: Micros,
    /// The first instant after the window.
    end: Micros,
}

impl Window {
    fn contains(self, at: Micros) -> bool {
        self.start <= at && at < self.end
    }
}

impl Schedule {
    fn window_at(&self, at: Micros) -> Window {
        match self {
            Self::Calendar(calendar) => {
                let window = calendar.window_at(at.get());
                Window { start: Micros::new(window.start), end: Micros::new(window.end) }
            }
            Self::Epoch { window } => Self::window_with_phase(at, *window, Micros::ZERO),
            Self::Phase { window, phase } => Self::window_with_phase(at, *window, *phase),
        }
    }

    fn window_with_phase(at: Micros, window: Micros, phase: Micros) -> Window {
        let elapsed = (at + phase) % window;
        Window { start: at - elapsed, end: at + (window - elapsed) }
    }

    /// Returns the boundaries of the window that contains an instant and of its neighbours.
    fn boundaries_at(&self, at: Micros) -> Boundaries {
        match self {
            Self::Calendar(calendar) => calendar.boundaries_at(at.get()),
            Self::Epoch { window } | Self::Phase { window, .. } => {
                let Window { start, end } = self.window_at(at);
                let before = (start - *window).get();
                let after = (end + *window).get();
                Boundaries { before, start: start.get(), end: end.get(), after }
            }
        }
    }

    /// Returns the length of the windows; that of a month is 30 days, and that of a year 365 days.
    fn length(&self) -> Micros {
        let days = |days| Micros::from_secs(days * 86_400);
        match self {
            Self::Epoch { window } | Self::Phase { window, .. } => *window,
            Self::Calendar(calendar) => match calendar.period() {
                Period::Hour => Micros::from_secs(3_600),
                Period::Day => days(1),
                Period::Week => days(7),
                Period::Months(12) => days(365),
                Period::Months(number) => days(30 * u64::from(number)),
            },
        }
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Calendar(calendar) => calendar.fmt(f),
            Self::Epoch { .. } => f.write_str("multiples of its length since 1970"),
            Self::Phase { .. } => f.write_str("each entity with its own phase"),
        }
    }
}

/// The hits of a window.
#[derive(Clone, Copy)]
struct Count {
    window: Window,
    latest: Micros,
    hits: u64,
}

impl ScheduledWindow {
    /// Creates a limiter.
    #[must_use]
    pub const fn new(max_hits: MaxHits, schedule: Schedule, count_denied: bool) -> Self {
        Self { max_hits, schedule, count_denied }
    }

    /// Returns when windows begin.
    #[must_use]
    pub const fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Returns the window in which hits count now, and its count.
    ///
    /// If the clock steps back by up to [`CLOCK_SLACK`] into an earlier window, hits continue to count in the later one,
    /// so that no caller gains hits. A state of a later time was written by a wrong clock and is ignored, so that no caller
    /// is blocked by it.
    fn current(&self, state: &State, now: Micros) -> Count {
        let window = self.schedule.window_at(now);
        let unused = Count { window, latest: now, hits: 0 };
        let (Some(latest), Some(hits)) = (state.number::<7>(0), state.number::<7>(7)) else {
            return unused;
        };
        let latest = Micros::new(latest);
        if latest < window.start || latest > now + CLOCK_SLACK {
            return unused;
        }
        let window = if latest < window.end { window } else { self.schedule.window_at(latest) };
        Count { window, latest, hits }
    }

    fn fits(&self, hits: u64, cost: u64) -> bool {
        let ceiling = self.max_hits.ceiling();
        hits <= ceiling && cost <= ceiling - hits
    }
}

impl CounterProgram for ScheduledWindow {
    const TAG: &'static str = "sc";
    const SCRIPT: &'static str = include_str!("script.lua");
    const ARGUMENTS: &'static [&'static str] =
        &["cost", "ceiling", "before", "from", "to", "after", "slack", "count_denied"];

    fn arguments(&self, operation: Operation) -> Arguments {
        let Boundaries { before, start, end, after } = self.schedule.boundaries_at(operation.now);
        smallvec![
            operation.cost.min(MAX_NUMBER),
            self.max_hits.ceiling(),
            before,
            start,
            end,
            after,
            CLOCK_SLACK.get(),
            self.count_denied.into()
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
            Action::RollBack(taken) if self.is_counted(current, taken, operation.now) => {
                current.hits.saturating_sub(cost)
            }
            Action::Take | Action::Peek | Action::RollBack(_) => current.hits,
        };
        if hits != current.hits {
            state.clear();
            if hits > 0 {
                let latest =
                    if operation.action == Action::Take { current.latest.max(operation.now) } else { current.latest };
                state.push::<7>(latest.get());
                state.push::<7>(hits);
            }
        }
        fits || operation.action.releases()
    }

    fn explain(&self, state: &State, operation: Operation, allowed: bool) -> Decision {
        let Count { window, hits: used, .. } = self.current(state, operation.now);
        let reset = window.end - operation.now;
        let can_ever_fit = operation.cost <= self.max_hits.ceiling();
        Decision {
            allowed,
            soft: allowed && operation.is_soft(used, self.max_hits),
            remaining: self.max_hits.remaining(used),
            used,
            reset,
            next: if used > 0 { reset } else { Micros::ZERO },
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

    fn lease_ends(&self, _state: &State, counted: Micros) -> Micros {
        self.schedule.window_at(counted).end
    }

    fn expires(&self, state: &State, now: Micros) -> Micros {
        let current = self.current(state, now);
        if current.hits > 0 { current.window.end } else { now }
    }
}

impl ScheduledWindow {
    /// Returns whether a take is in the window that is counted.
    fn is_counted(&self, current: Count, taken: Micros, now: Micros) -> bool {
        let window = self.schedule.window_at(now);
        let is_later = current.latest >= window.end;
        window.contains(taken) || is_later && taken >= window.end
    }
}

impl Limiter for ScheduledWindow {
    const NAME: &'static str = "fixed_window with a schedule";
    const KEYWORDS: &'static [&'static str] = &["window", "zone", "week_starts", "day", "month", "at", "phase"];

    fn build(spec: &LimitSpec) -> Result<Algorithm, InvalidLimit> {
        if spec.window == Micros::ZERO || spec.window > MAX_PERIOD {
            return Err(InvalidLimit::FIXED_WINDOW);
        }
        let schedule = match (spec.period, spec.phase) {
            (Some(period), None) => Schedule::Calendar(Calendar::new(period, spec.anchor)?),
            (None, Some(phase)) => Schedule::Phase { window: spec.window, phase: phase % spec.window },
            (Some(_), Some(_)) => {
                let reason = "phase cannot be combined with window, which says when windows begin";
                return Err(InvalidLimit { keyword: "phase", reason });
            }
            (None, None) if spec.window_start == Some(WindowStart::Epoch) => Schedule::Epoch { window: spec.window },
            (None, None) => {
                return Err(InvalidLimit { keyword: "window", reason: "a schedule requires a calendar or a phase" });
            }
        };
        // The default is that of other fixed windows.
        let count_denied = spec.count_denied.unwrap_or(true);
        Ok(Self::new(spec.max_hits(spec.requests), schedule, count_denied).into())
    }

    fn spec(&self) -> Option<LimitSpec> {
        let spec = LimitSpec {
            requests: self.max_hits.limit(),
            window: self.schedule.length(),
            soft: self.max_hits.percent(),
            count_denied: Some(self.count_denied),
            ..LimitSpec::default()
        };
        Some(match self.schedule {
            Schedule::Calendar(calendar) => LimitSpec {
                window_start: Some(WindowStart::Calendar),
                period: Some(calendar.period()),
                anchor: calendar.anchor(),
                ..spec
            },
            Schedule::Epoch { .. } => LimitSpec { window_start: Some(WindowStart::Epoch), ..spec },
            Schedule::Phase { phase, .. } => LimitSpec { phase: Some(phase), ..spec },
        })
    }

    fn depends_on_entity(&self) -> bool {
        matches!(self.schedule, Schedule::Phase { .. })
    }

    fn with_context(self, context: RequestContext) -> Self {
        let schedule = match self.schedule {
            Schedule::Calendar(calendar) => Schedule::Calendar(calendar.anchored(context.anchor)),
            Schedule::Epoch { .. } => self.schedule,
            Schedule::Phase { window, .. } => {
                Schedule::Phase { window, phase: Micros::new(context.entity % window.get()) }
            }
        };
        Self { schedule, ..self }
    }

    fn parts(&self, state: &State, now: Micros) -> Vec<CounterPart> {
        let Count { window, hits, .. } = self.current(state, now);
        if hits == 0 {
            return Vec::new();
        }
        vec![CounterPart { from: window.start, until: window.end, hits }]
    }

    fn leasing(&self) -> Option<Program> {
        Some(Self { max_hits: MaxHits::hard(self.max_hits.limit()), count_denied: false, ..*self }.into())
    }

    fn recording(&self) -> Algorithm {
        Self { count_denied: true, ..*self }.into()
    }

    fn has_expired(&self, counted: Micros, now: Micros) -> bool {
        self.schedule.window_at(counted).end <= now
    }

    fn is_ahead(&self, state: &State, now: Micros) -> bool {
        let current = self.current(state, now);
        current.hits > 0 && current.window.start > now
    }
}

impl From<sluicegate_calendar::InvalidAnchor> for InvalidLimit {
    fn from(error: sluicegate_calendar::InvalidAnchor) -> Self {
        Self { keyword: error.field, reason: error.reason }
    }
}

#[cfg(test)]
mod tests;
