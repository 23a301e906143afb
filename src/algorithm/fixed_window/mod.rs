//! Fixed window: one counter per window, windows aligned to the Unix epoch, as envoyproxy/ratelimit counts.
//!
//! The counter takes every cost, also of a request it refuses, and the verdict is read afterwards:
//! `over = count > limit`. So a refused caller that keeps asking stays refused until the window ends, and a look of
//! cost 0 at a counter that stands exactly at the limit is still allowed. With `count_denied: false` a refused cost
//! is not counted. Known flaw of the algorithm: up to twice the limit may pass around a window's edge.
//!
//! The state is one integer, so that Redis can count with INCRBY: its last ten digits are the count, and those before
//! tell the window, as its number modulo 900 000 plus one. In memory it is the same integer.

use smallvec::smallvec;

use super::{
    Action, Algorithm, Arguments, CLOCK_SLACK, Decision, InvalidLimit, LimitSpec, Limiter, MAX_PERIOD, MaxHits, Micros,
    Operation, State,
};

/// `limit` hits in each window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FixedWindow {
    max_hits: MaxHits,
    window: Micros,
    count_denied: bool,
}

/// Ten digits for the count …
const COUNTS: u64 = 10_000_000_000;
/// … which it fills by half at most, so that a count and a cost never reach the window's digits.
const MOST: u64 = COUNTS / 2 - 1;
/// Windows that are told apart: an idle key is long gone before they come around, at one a second after ten days.
const TAGS: u64 = 900_000;

impl FixedWindow {
    /// Nothing in any second.
    pub const NOTHING: Self = Self { max_hits: MaxHits::hard(0), window: Micros::from_secs(1), count_denied: true };

    /// `None` for a window of no length, or a longer one than [`LONGEST`].
    #[must_use]
    pub fn new(quota: MaxHits, window: Micros, count_denied: bool) -> Option<Self> {
        (window > Micros::ZERO && window <= MAX_PERIOD).then_some(Self { max_hits: quota, window, count_denied })
    }

    /// The number of the window that is counted, and the count.
    ///
    /// A clock that steps back into an earlier window goes on counting in the later one: nobody gains quota. One that
    /// was far ahead is not believed, so that nobody is locked out.
    fn current(&self, state: &State, now: Micros) -> (u64, u64) {
        let number = now.get() / self.window.get();
        let value = state.number::<8>(0).unwrap_or_default();
        let (tag, count) = (value / COUNTS, value % COUNTS);
        if tag == 0 || tag > TAGS {
            return (number, 0);
        }
        let ahead = (tag - 1 + TAGS - number % TAGS) % TAGS;
        if ahead <= self.believed() { (number + ahead, count) } else { (number, 0) }
    }

    /// Windows that the stored one may be ahead of the clock's.
    fn believed(&self) -> u64 {
        CLOCK_SLACK.get().div_ceil(self.window.get()).min(TAGS / 2)
    }
}

impl Limiter for FixedWindow {
    const NAME: &'static str = "fixed_window";
    const KEYWORDS: &'static [&'static str] = &[];
    const TAG: &'static str = "fw";
    const SCRIPT: &'static str = include_str!("script.lua");
    const ARGUMENTS: &'static [&'static str] = &["cost", "ceiling", "window", "believed", "count_denied"];

    fn build(shape: &LimitSpec) -> Result<Algorithm, InvalidLimit> {
        // As the peer does it, unless the rule says otherwise.
        let count_denied = shape.count_denied.unwrap_or(true);
        let rule = Self::new(shape.max_hits(shape.requests.into()), shape.window, count_denied);
        let why = "a window must have a length, of at most 100 years";
        Ok(rule.ok_or(InvalidLimit { keyword: "unit_multiplier", reason: why })?.into())
    }

    fn arguments(&self, ask: Operation) -> Arguments {
        let (ceiling, denied) = (self.max_hits.ceiling(), self.count_denied.into());
        smallvec![ask.cost.min(MOST), ceiling, self.window.get(), self.believed(), denied]
    }

    /// Another window is another counter: which one is in the state cannot be told from its integer.
    fn scope(&self) -> Option<u64> {
        Some(self.window.floor_secs())
    }

    fn step(&self, state: &mut State, ask: Operation) -> bool {
        let (number, count) = self.current(state, ask.now);
        let cost = ask.cost.min(MOST);
        let fits = count + cost <= self.max_hits.ceiling();
        let after = match ask.action {
            Action::Take if fits || self.count_denied => (count + cost).min(MOST),
            Action::Refund => count.saturating_sub(cost),
            // Of another window than the one that took it nothing is given back.
            Action::RollBack(taken) if taken.get() / self.window.get() == number => count.saturating_sub(cost),
            Action::RollBack(_) => count,
            Action::Take | Action::Peek => return fits,
        };
        if ask.action == Action::Take || after != count {
            state.clear();
            state.push::<8>((number % TAGS + 1) * COUNTS + after);
        }
        fits || ask.action.releases()
    }

    fn explain(&self, state: &State, ask: Operation, allowed: bool) -> Decision {
        let (number, used) = self.current(state, ask.now);
        let reset = Micros::new((number + 1) * self.window.get()) - ask.now;
        let possible = ask.cost <= self.max_hits.ceiling();
        Decision {
            allowed,
            soft: allowed && ask.is_soft(used, self.max_hits),
            remaining: self.max_hits.remaining(used),
            used,
            reset,
            next: if used > 0 { reset } else { Micros::ZERO },
            retry_after: (!allowed && possible).then_some(reset),
            ..Decision::default()
        }
    }

    fn counts_denied(&self) -> bool {
        self.count_denied
    }

    /// Once the count is above the limit nothing passes until the window ends, however far above it is.
    fn denial_counts(&self, state: &State, now: Micros) -> bool {
        self.count_denied && self.current(state, now).1 <= self.max_hits.ceiling()
    }

    fn leasing(&self) -> Option<Algorithm> {
        Some(Self { max_hits: MaxHits::hard(self.max_hits.limit()), count_denied: false, ..*self }.into())
    }

    fn lease_ends(&self, counted: Micros) -> Micros {
        counted - counted % self.window + self.window
    }

    fn counting(&self) -> Algorithm {
        Self { count_denied: true, ..*self }.into()
    }

    fn is_over(&self, counted: Micros, now: Micros) -> bool {
        self.lease_ends(counted) <= now
    }

    fn expires(&self, state: &State, now: Micros) -> Micros {
        let (number, _) = self.current(state, now);
        Micros::new((number + 1) * self.window.get())
    }
}

#[cfg(test)]
mod tests;
