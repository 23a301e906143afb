//! Fixed window: one counter per window, windows aligned to the Unix epoch, as envoyproxy/ratelimit counts.
//!
//! The counter takes every cost, also of a request it refuses, and the verdict is read afterwards:
//! `over = count > limit`. So a refused caller that keeps asking stays refused until the window ends, and a look of
//! cost 0 at a counter that stands exactly at the limit is still allowed.
//! Known flaw of the algorithm: up to twice the limit may pass around a window's edge.

use super::{Action, Ask, Decision, MAX, Micros, Rule, State};

/// `limit` hits in each window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FixedWindow {
    limit: u64,
    window: Micros,
}

impl FixedWindow {
    /// `None` for a window of no length, or a number above [`MAX`].
    #[must_use]
    pub fn new(limit: u64, window: Micros) -> Option<Self> {
        let fits = window > Micros::ZERO && window.get() <= MAX && limit <= MAX;
        fits.then_some(Self { limit, window })
    }

    fn start(&self, now: Micros) -> Micros {
        now - now % self.window
    }

    /// The state's words: the start of the window that is counted, and the count.
    ///
    /// A clock that steps back into the window before goes on counting in the later one: nobody gains quota. One that
    /// was further ahead than that is not believed, so that nobody is locked out.
    fn current(&self, state: State, now: Micros) -> (Micros, u64) {
        let [start, count] = state.0;
        let (stored, current) = (Micros::new(start), self.start(now));
        if stored >= current && stored <= current + self.window { (stored, count) } else { (current, 0) }
    }
}

impl Rule for FixedWindow {
    const TAG: &'static str = "fw";
    const SCRIPT: &'static str = include_str!("script.lua");

    fn parameters(&self) -> [u64; 2] {
        [self.limit, self.window.get()]
    }

    fn scope(&self) -> u64 {
        self.window.floor_secs()
    }

    fn step(&self, state: &mut State, ask: Ask) -> bool {
        let (start, count) = self.current(*state, ask.now);
        let cost = ask.cost.min(MAX);
        let after = match ask.action {
            Action::Take => (count + cost).min(MAX),
            Action::Return => count.saturating_sub(cost),
            Action::Peek => return count + cost <= self.limit,
        };
        *state = State([start.get(), after]);
        ask.action == Action::Return || after <= self.limit
    }

    fn explain(&self, state: State, ask: Ask, allowed: bool) -> Decision {
        let (start, used) = self.current(state, ask.now);
        let reset = start + self.window - ask.now;
        let possible = ask.cost <= self.limit && self.limit > 0;
        Decision {
            allowed,
            remaining: self.limit.saturating_sub(used),
            used,
            reset,
            retry_after: (!allowed && possible).then_some(reset),
        }
    }

    fn expires(&self, state: State) -> Micros {
        Micros::new(state.0[0]) + self.window
    }
}

#[cfg(test)]
mod tests;
