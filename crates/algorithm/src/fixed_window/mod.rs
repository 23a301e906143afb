//! [`FixedWindow`]: one counter per window, with windows aligned to the Unix epoch, as envoyproxy/ratelimit counts.
//!
//! The counter takes every cost, even that of a denied request, and is compared with the limit afterwards:
//! `over = count > limit`. A denied caller that retries therefore stays denied until the window ends, and a peek of cost
//! 0 is still allowed if the counter is exactly at the limit. With `count_denied: false`, denied costs do not count.
//! Known flaw of the algorithm: up to twice the limit may be allowed around the edge of a window.
//!
//! The state is one integer, so that Redis can count with INCRBY: its last ten digits are the count, and the digits
//! before identify the window by its number modulo 900 000, plus one. In memory the state is the same integer. Limits above
//! [`FixedWindow::MAX_HITS`], which this count cannot hold, are counted by a [`ScheduledWindow`] with the same windows.

use smallvec::smallvec;

use super::{
    Action, Algorithm, Arguments, CLOCK_SLACK, CounterPart, CounterProgram, Decision, InvalidLimit, LimitSpec, Limiter,
    MAX_PERIOD, MaxHits, Micros, Operation, Program, State, WindowStart, first_request::FirstRequestWindow,
    scheduled_window::ScheduledWindow,
};

/// A limiter that allows `limit` hits in each window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FixedWindow {
    max_hits: MaxHits,
    window: Micros,
    count_denied: bool,
}

/// Factor of the window's tag in the state: the count has ten digits.
const COUNT_RANGE: u64 = 10_000_000_000;
/// Maximum count. It is half of the range, so that adding a cost never reaches the digits of the window.
const MAX_COUNT: u64 = COUNT_RANGE / 2 - 1;
/// Number of different tags of a window. A tag is the number of the window modulo this, plus one. With windows of one
/// second a tag repeats after ten days, long after an idle key has expired.
const WINDOW_TAGS: u64 = 900_000;

/// The count of one window.
#[derive(Clone, Copy)]
struct WindowCount {
    /// Number of the window since the Unix epoch.
    window: u64,
    hits: u64,
}

impl FixedWindow {
    /// A limiter that denies everything.
    pub const DENY_ALL: Self = Self { max_hits: MaxHits::hard(0), window: Micros::from_secs(1), count_denied: true };

    /// Largest limit, including the part above a soft limit. It is below the maximum count, so that a count can exceed
    /// it.
    pub const MAX_HITS: u64 = MAX_COUNT - 1;

    /// Creates a limiter; `None` if the limit is larger than [`Self::MAX_HITS`], or if the window is zero or longer than
    /// [`MAX_PERIOD`].
    #[must_use]
    pub fn new(max_hits: MaxHits, window: Micros, count_denied: bool) -> Option<Self> {
        if max_hits.ceiling() > Self::MAX_HITS || window == Micros::ZERO || window > MAX_PERIOD {
            return None;
        }
        Some(Self { max_hits, window, count_denied })
    }

    /// Returns the window in which hits count now, and its count.
    ///
    /// If the clock steps back by up to [`CLOCK_SLACK`] into an earlier window, hits continue to count in the later one,
    /// so that no caller gains hits. A window that begins later than that was written by a wrong clock and is ignored, so
    /// that no caller is blocked by it.
    fn current(&self, state: &State, now: Micros) -> WindowCount {
        let number = now.get() / self.window.get();
        let elapsed = now.get() - number * self.window.get();
        let value = state.number::<8>(0).unwrap_or_default();
        let tag = value / COUNT_RANGE;
        let hits = value % COUNT_RANGE;
        if tag == 0 || tag > WINDOW_TAGS {
            return WindowCount { window: number, hits: 0 };
        }
        let ahead = (tag - 1 + WINDOW_TAGS - number % WINDOW_TAGS) % WINDOW_TAGS;
        let begins_soon = ahead.saturating_mul(self.window.get()) <= self.slack() + elapsed;
        if begins_soon { WindowCount { window: number + ahead, hits } } else { WindowCount { window: number, hits: 0 } }
    }

    /// Returns the end of the window that contains this time.
    fn window_end(&self, at: Micros) -> Micros {
        at - at % self.window + self.window
    }

    /// Returns the time in microseconds within which a stored window that is ahead of the clock must begin.
    fn slack(&self) -> u64 {
        CLOCK_SLACK.get().min(self.window.get().saturating_mul(WINDOW_TAGS / 2))
    }
}

impl CounterProgram for FixedWindow {
    const TAG: &'static str = "fw";
    const SCRIPT: &'static str = include_str!("script.lua");
    const ARGUMENTS: &'static [&'static str] = &["cost", "ceiling", "window", "slack", "count_denied"];

    fn arguments(&self, operation: Operation) -> Arguments {
        smallvec![
            operation.cost.min(MAX_COUNT),
            self.max_hits.ceiling(),
            self.window.get(),
            self.slack(),
            self.count_denied.into()
        ]
    }

    fn step(&self, state: &mut State, operation: Operation) -> bool {
        let WindowCount { window, hits } = self.current(state, operation.now);
        let cost = operation.cost.min(MAX_COUNT);
        let fits = hits + cost <= self.max_hits.ceiling();
        let after = match operation.action {
            Action::Take if fits || self.count_denied => (hits + cost).min(MAX_COUNT),
            Action::Refund => hits.saturating_sub(cost),
            // A take in another window than the counted one is not rolled back.
            Action::RollBack(taken) if taken.get() / self.window.get() == window => hits.saturating_sub(cost),
            Action::RollBack(_) => hits,
            Action::Take | Action::Peek => return fits,
        };
        if operation.action == Action::Take || after != hits {
            state.clear();
            state.push::<8>((window % WINDOW_TAGS + 1) * COUNT_RANGE + after);
        }
        fits || operation.action.releases()
    }

    fn explain(&self, state: &State, operation: Operation, allowed: bool) -> Decision {
        let WindowCount { window, hits: used } = self.current(state, operation.now);
        let reset = Micros::new((window + 1) * self.window.get()) - operation.now;
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
        self.window_end(counted)
    }

    fn expires(&self, state: &State, now: Micros) -> Micros {
        Micros::new((self.current(state, now).window + 1) * self.window.get())
    }
}

impl Limiter for FixedWindow {
    const NAME: &'static str = "fixed_window";
    const KEYWORDS: &'static [&'static str] = ScheduledWindow::KEYWORDS;

    fn build(spec: &LimitSpec) -> Result<Algorithm, InvalidLimit> {
        if let Some(keyword) = spec.anchor.first_field().filter(|_| spec.window_start != Some(WindowStart::Calendar)) {
            return Err(InvalidLimit {
                keyword,
                reason: "zone, week_starts, day, month and at require window: calendar",
            });
        }
        match spec.window_start {
            Some(WindowStart::FirstRequest) => return FirstRequestWindow::build(spec),
            Some(WindowStart::Calendar) => return ScheduledWindow::build(spec),
            Some(WindowStart::Epoch) | None if spec.phase.is_some() => return ScheduledWindow::build(spec),
            Some(WindowStart::Epoch) | None => {}
        }
        let max_hits = spec.max_hits(spec.requests);
        if max_hits.ceiling() > Self::MAX_HITS {
            return ScheduledWindow::build(&LimitSpec { window_start: Some(WindowStart::Epoch), ..*spec });
        }
        // The default is that of envoyproxy/ratelimit.
        let count_denied = spec.count_denied.unwrap_or(true);
        let limiter = Self::new(max_hits, spec.window, count_denied);
        Ok(limiter.ok_or(InvalidLimit::FIXED_WINDOW)?.into())
    }

    fn spec(&self) -> Option<LimitSpec> {
        Some(LimitSpec {
            requests: self.max_hits.limit(),
            window: self.window,
            soft: self.max_hits.percent(),
            count_denied: Some(self.count_denied),
            ..LimitSpec::default()
        })
    }

    /// Returns the length of the window in seconds, because the integer in the state does not contain it.
    fn scope(&self) -> Option<u64> {
        Some(self.window.floor_secs())
    }

    fn parts(&self, state: &State, now: Micros) -> Vec<CounterPart> {
        let WindowCount { window, hits } = self.current(state, now);
        let from = Micros::new(window * self.window.get());
        if hits > 0 { vec![CounterPart { from, until: from + self.window, hits }] } else { Vec::new() }
    }

    fn leasing(&self) -> Option<Program> {
        Some(Self { max_hits: MaxHits::hard(self.max_hits.limit()), count_denied: false, ..*self }.into())
    }

    fn recording(&self) -> Algorithm {
        Self { count_denied: true, ..*self }.into()
    }

    fn has_expired(&self, counted: Micros, now: Micros) -> bool {
        self.window_end(counted) <= now
    }

    fn is_ahead(&self, state: &State, now: Micros) -> bool {
        self.current(state, now).window > now.get() / self.window.get()
    }
}

#[cfg(test)]
mod tests;
