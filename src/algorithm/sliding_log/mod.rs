//! Sliding log: the instant of every hit that passed, so the count of any window is exact.
//!
//! Seven bytes a hit, oldest first, and a hit lies in the window for exactly the window's length. The price is memory
//! that grows with the limit, which is therefore bounded. With `min_interval`, passes also keep that distance; with
//! `count_denied`, refused hits are logged as well (the newest that fill the limit), and whoever keeps asking stays out.
//!
//! Hits that are taken in advance are logged as if they came at the end of their lease. Whenever they come before, they
//! were in the log; and they leave it no sooner than hits of that instant would.

use smallvec::smallvec;

use super::{
    Action, Algorithm, Arguments, CLOCK_SLACK, Decision, InvalidLimit, LimitSpec, Limiter, MaxHits, Micros, Operation,
    State, leased_bucket::MAX_LEASE_LIFETIME,
};

/// At most `limit` hits in any window, exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlidingLog {
    max_hits: MaxHits,
    window: Micros,
    min_interval: Micros,
    count_denied: bool,
    /// For those who take in advance: the grid of time on which leases end, after two steps at most.
    lease_grid: Micros,
}

/// Of a window: hits count two of them longer at most, and those that come meanwhile do, too.
const STEPS_OF_WINDOW: u64 = 20;
/// An instant further ahead was written by a clock that was wrong.
const LATEST: Micros = Micros::new(CLOCK_SLACK.get() + MAX_LEASE_LIFETIME.get());

/// Bytes of an instant.
const ENTRY: usize = 7;

impl SlidingLog {
    /// The largest limit, soft part included: 7 kB for each counter.
    pub const MAX_ENTRIES: u64 = 1_000;
    /// The longest window: ten years.
    pub const MAX_WINDOW: Micros = Micros::from_secs(10 * 31_536_000);

    /// `None` for a quota above [`Self::MOST`], a window of no length or longer than [`Self::LONGEST`], or an interval
    /// longer than the window.
    #[must_use]
    pub fn new(quota: MaxHits, window: Micros, min_interval: Micros, count_denied: bool) -> Option<Self> {
        let fits = window > Micros::ZERO && window <= Self::MAX_WINDOW && min_interval <= window;
        (fits && quota.ceiling() <= Self::MAX_ENTRIES).then_some(Self {
            max_hits: quota,
            window,
            min_interval,
            count_denied,
            lease_grid: Micros::ZERO,
        })
    }

    /// The log's instant at a place from the oldest.
    fn entry(state: &State, place: usize) -> u64 {
        state.number::<ENTRY>(ENTRY * place).unwrap_or_default()
    }

    fn len(state: &State) -> usize {
        state.as_bytes().len() / ENTRY
    }

    fn newest(state: &State) -> Option<u64> {
        Self::len(state).checked_sub(1).map(|last| Self::entry(state, last))
    }

    /// How many of the oldest hits have left the window.
    fn gone(&self, state: &State, now: Micros) -> usize {
        let (mut low, mut high) = (0, Self::len(state));
        while low < high {
            let middle = usize::midpoint(low, high);
            let left = Self::entry(state, middle) + self.window.get() <= now.get();
            if left { low = middle + 1 } else { high = middle }
        }
        low
    }

    /// A log from a clock that was far ahead: its hits become hits of now.
    fn believe(state: &mut State, now: Micros) {
        if Self::newest(state).is_none_or(|newest| newest <= now.get() + LATEST.get()) {
            return;
        }
        let entries: Vec<_> = (0..Self::len(state)).map(|place| Self::entry(state, place).min(now.get())).collect();
        state.clear();
        entries.into_iter().for_each(|entry| state.push::<ENTRY>(entry));
    }

    /// Takes out so many hits of one instant, of those that are left in the window.
    fn forget(state: &mut State, gone: usize, instant: u64, cost: u64) {
        let entries: Vec<_> = (gone..Self::len(state)).map(|place| Self::entry(state, place)).collect();
        if !entries.contains(&instant) {
            return;
        }
        let mut left = cost;
        state.clear();
        for entry in entries {
            if entry == instant && left > 0 {
                left -= 1;
            } else {
                state.push::<ENTRY>(entry);
            }
        }
    }

    fn is_spaced(&self, state: &State, ask: Operation) -> bool {
        let newest = Self::newest(state).filter(|_| ask.cost > 0 && self.min_interval > Micros::ZERO);
        newest.is_none_or(|newest| newest + self.min_interval.get() <= ask.now.get())
    }
}

impl Limiter for SlidingLog {
    const NAME: &'static str = "sliding_log";
    const KEYWORDS: &'static [&'static str] = &["min_interval"];
    const TAG: &'static str = "sl";
    const SCRIPT: &'static str = include_str!("script.lua");
    const ARGUMENTS: &'static [&'static str] =
        &["cost", "ceiling", "window", "interval", "slack", "count_denied", "grid"];

    fn build(shape: &LimitSpec) -> Result<Algorithm, InvalidLimit> {
        let (quota, interval) = (shape.max_hits(shape.requests.into()), shape.min_interval.unwrap_or_default());
        if interval > shape.window {
            return Err(InvalidLimit {
                keyword: "min_interval",
                reason: "min_interval must not be longer than the window",
            });
        }
        if quota.ceiling() > Self::MAX_ENTRIES {
            let why = "a sliding_log keeps every hit and takes 1000 at most, its soft part included; sliding_window has \
                       no such bound";
            return Err(InvalidLimit { keyword: "requests_per_unit", reason: why });
        }
        let rule = Self::new(quota, shape.window, interval, shape.counts_denied());
        Ok(rule.ok_or(InvalidLimit::WINDOW)?.into())
    }

    fn arguments(&self, ask: Operation) -> Arguments {
        let (cost, ceiling) = (ask.cost.min(Self::MAX_ENTRIES + 1), self.max_hits.ceiling());
        let (window, interval) = (self.window.get(), self.min_interval.get());
        smallvec![cost, ceiling, window, interval, LATEST.get(), self.count_denied.into(), self.lease_grid.get()]
    }

    fn step(&self, state: &mut State, ask: Operation) -> bool {
        Self::believe(state, ask.now);
        let cost = ask.cost.min(Self::MAX_ENTRIES + 1);
        let gone = self.gone(state, ask.now);
        let held = (Self::len(state) - gone) as u64;
        if let Action::RollBack(taken) = ask.action {
            Self::forget(state, gone, self.lease_ends(taken).get(), cost);
            return true;
        }
        if ask.action == Action::Refund {
            let given = cost.min(held) as usize;
            if given > 0 {
                state.cut_back(ENTRY * given);
                state.cut_front(ENTRY * gone);
            }
            return true;
        }
        let allowed = held + cost <= self.max_hits.ceiling() && self.is_spaced(state, ask);
        if ask.action == Action::Take && (allowed || self.count_denied) {
            let at = Self::newest(state).unwrap_or_default().max(self.lease_ends(ask.now).get());
            // Refused hits push the oldest out: only the newest that fill the limit can matter. No more of them than come,
            // whatever the limit is: it may have been a larger one a moment ago, and be again.
            let added = cost.min(self.max_hits.ceiling());
            let pushed_out = (held + added).saturating_sub(self.max_hits.ceiling()).min(added) as usize;
            state.cut_front(ENTRY * (gone + pushed_out));
            (0..added).for_each(|_| state.push::<ENTRY>(at));
        }
        allowed
    }

    fn explain(&self, state: &State, ask: Operation, allowed: bool) -> Decision {
        let gone = self.gone(state, ask.now);
        let used = (Self::len(state) - gone) as u64;
        // Until so many of the hits in the window have left it.
        let until_left = |hits: u64| match hits {
            0 => Micros::ZERO,
            hits => Micros::new(Self::entry(state, gone + hits as usize - 1)) + self.window - ask.now,
        };
        let limit = self.max_hits.limit();
        let retry = || {
            let room = self.max_hits.ceiling().checked_sub(ask.cost)?;
            let spaced = Self::newest(state).filter(|_| ask.cost > 0).unwrap_or_default();
            Some(until_left(used.saturating_sub(room)).max(Micros::new(spaced) + self.min_interval - ask.now))
        };
        Decision {
            allowed,
            soft: allowed && ask.is_soft(used, self.max_hits),
            remaining: self.max_hits.remaining(used),
            used,
            reset: until_left(used),
            next: if limit > 0 { until_left(used.min(used.saturating_sub(limit) + 1)) } else { Micros::ZERO },
            retry_after: if allowed { None } else { retry() },
            ..Decision::default()
        }
    }

    fn counts_denied(&self) -> bool {
        self.count_denied
    }

    /// Where hits keep a distance, nobody knows when those of a lease come.
    fn leasing(&self) -> Option<Algorithm> {
        let grid = Micros::new((self.window.get() / STEPS_OF_WINDOW).min(MAX_LEASE_LIFETIME.get() / 2));
        let quota = MaxHits::hard(self.max_hits.limit());
        let leasing = Self { max_hits: quota, count_denied: false, lease_grid: grid, ..*self };
        (self.min_interval == Micros::ZERO && grid > Micros::ZERO).then(|| leasing.into())
    }

    /// And when a hit is logged that is taken at this instant.
    fn lease_ends(&self, counted: Micros) -> Micros {
        if self.lease_grid == Micros::ZERO {
            counted
        } else {
            counted - counted % self.lease_grid + self.lease_grid + self.lease_grid
        }
    }

    fn lease_lifetime(&self) -> Micros {
        self.lease_grid
    }

    fn counting(&self) -> Algorithm {
        Self { count_denied: true, ..*self }.into()
    }

    fn expires(&self, state: &State, now: Micros) -> Micros {
        Self::newest(state).map_or(now, Micros::new) + self.window
    }
}

#[cfg(test)]
mod tests;
