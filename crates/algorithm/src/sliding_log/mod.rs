//! [`SlidingLog`]: the instant of every allowed hit, so that the count of any window is exact.
//!
//! Each hit has seven bytes, the oldest hit first, and counts for exactly the length of the window. The memory grows
//! with the limit, which is therefore bounded. With `min_interval`, allowed hits are also at least that far apart. With
//! `count_denied`, denied hits are logged as well (the newest that fill the limit), and a caller that retries stays
//! denied.
//!
//! Hits of a lease are logged as if they arrived at the end of the lease. Whenever they arrive before, the log already
//! contains them, and they expire no earlier than hits of that instant would.

use smallvec::smallvec;

use super::{
    Action, Algorithm, Arguments, CLOCK_SLACK, CounterPart, CounterProgram, Decision, InvalidLimit, LimitSpec, Limiter,
    MaxHits, Micros, Operation, Program, State, bucket::MAX_LEASE_LIFETIME,
};

/// A limiter that allows at most `limit` hits in any window, exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlidingLog {
    max_hits: MaxHits,
    window: Micros,
    min_interval: Micros,
    count_denied: bool,
    /// Step of the time grid on which leases end, for limiters that take leases; otherwise zero.
    lease_grid: Micros,
}

/// Number of steps of the lease grid per window. Leased hits count for up to two steps longer than the window, and so
/// do hits that are logged after them.
const GRID_STEPS_PER_WINDOW: u64 = 20;
/// Maximum time by which a logged instant may be ahead of the clock. Later instants were written by a wrong clock.
const MAX_AHEAD: Micros = Micros::new(CLOCK_SLACK.get() + MAX_LEASE_LIFETIME.get());

/// Length of one entry, an instant, in bytes.
const ENTRY_BYTES: usize = 7;

impl SlidingLog {
    /// Maximum limit including its soft part: 7 kB for each counter.
    pub const MAX_ENTRIES: u64 = 1_000;
    /// Maximum length of the window: ten years.
    pub const MAX_WINDOW: Micros = Micros::from_secs(10 * 31_536_000);

    /// Creates a limiter.
    ///
    /// Returns `None` if the limit exceeds [`Self::MAX_ENTRIES`], if the window is zero or exceeds
    /// [`Self::MAX_WINDOW`], or if the interval is longer than the window.
    #[must_use]
    pub fn new(max_hits: MaxHits, window: Micros, min_interval: Micros, count_denied: bool) -> Option<Self> {
        let fits = window > Micros::ZERO && window <= Self::MAX_WINDOW && min_interval <= window;
        (fits && max_hits.ceiling() <= Self::MAX_ENTRIES).then_some(Self {
            max_hits,
            window,
            min_interval,
            count_denied,
            lease_grid: Micros::ZERO,
        })
    }

    /// Returns the instant of an entry; the oldest has index 0.
    fn entry(state: &State, index: usize) -> u64 {
        state.number::<ENTRY_BYTES>(ENTRY_BYTES * index).unwrap_or_default()
    }

    fn len(state: &State) -> usize {
        state.as_bytes().len() / ENTRY_BYTES
    }

    fn newest(state: &State) -> Option<u64> {
        Self::len(state).checked_sub(1).map(|last| Self::entry(state, last))
    }

    /// Returns the number of hits that have expired.
    fn expired(&self, state: &State, now: Micros) -> usize {
        let mut low = 0;
        let mut high = Self::len(state);
        while low < high {
            let middle = usize::midpoint(low, high);
            let has_expired = Self::entry(state, middle) + self.window.get() <= now.get();
            if has_expired { low = middle + 1 } else { high = middle }
        }
        low
    }

    /// Replaces instants after `now` by `now` if the newest is more than [`MAX_AHEAD`] later: it was written by a wrong
    /// clock.
    fn clamp_future(state: &mut State, now: Micros) {
        if Self::newest(state).is_none_or(|newest| newest <= now.get() + MAX_AHEAD.get()) {
            return;
        }
        let entries: Vec<_> = (0..Self::len(state)).map(|index| Self::entry(state, index).min(now.get())).collect();
        state.clear();
        for entry in entries {
            state.push::<ENTRY_BYTES>(entry);
        }
    }

    /// Removes up to `cost` hits of one instant, and the expired ones. Without a hit of this instant, nothing is
    /// removed.
    fn remove(state: &mut State, expired: usize, instant: u64, cost: u64) {
        let entries: Vec<_> = (expired..Self::len(state)).map(|index| Self::entry(state, index)).collect();
        if !entries.contains(&instant) {
            return;
        }
        let mut remaining = cost;
        state.clear();
        for entry in entries {
            if entry == instant && remaining > 0 {
                remaining -= 1;
            } else {
                state.push::<ENTRY_BYTES>(entry);
            }
        }
    }

    fn is_spaced(&self, state: &State, operation: Operation) -> bool {
        if operation.cost == 0 || self.min_interval == Micros::ZERO {
            return true;
        }
        Self::newest(state).is_none_or(|newest| newest + self.min_interval.get() <= operation.now.get())
    }

    /// Returns the time from `now` until `span` after the instant `at`. It is capped, because a later time is that of a
    /// broken state.
    fn wait(at: u64, span: Micros, now: Micros) -> Micros {
        (Micros::new(at) + span - now).min(span + MAX_AHEAD)
    }

    /// Returns the time until the next `hits` hits have expired, in addition to the `expired` ones.
    fn time_until_expired(&self, state: &State, expired: usize, hits: u64, now: Micros) -> Micros {
        if hits == 0 {
            return Micros::ZERO;
        }
        Self::wait(Self::entry(state, expired + hits as usize - 1), self.window, now)
    }

    /// Returns the time until a denied cost is allowed; `None` if it exceeds the limit.
    fn retry_after(&self, state: &State, expired: usize, operation: Operation) -> Option<Micros> {
        let room = self.max_hits.ceiling().checked_sub(operation.cost)?;
        let used = (Self::len(state) - expired) as u64;
        let until_room = self.time_until_expired(state, expired, used.saturating_sub(room), operation.now);
        let newest = if operation.cost > 0 { Self::newest(state).unwrap_or_default() } else { 0 };
        Some(until_room.max(Self::wait(newest, self.min_interval, operation.now)))
    }

    /// Returns the instant at which hits of a lease that was taken at `counted` count in the log.
    fn lease_end(&self, counted: Micros) -> Micros {
        if self.lease_grid == Micros::ZERO {
            counted
        } else {
            counted - counted % self.lease_grid + self.lease_grid + self.lease_grid
        }
    }
}

impl CounterProgram for SlidingLog {
    const TAG: &'static str = "sl";
    const SCRIPT: &'static str = include_str!("script.lua");
    const ARGUMENTS: &'static [&'static str] =
        &["cost", "ceiling", "window", "interval", "slack", "count_denied", "grid"];

    fn arguments(&self, operation: Operation) -> Arguments {
        smallvec![
            operation.cost.min(Self::MAX_ENTRIES + 1),
            self.max_hits.ceiling(),
            self.window.get(),
            self.min_interval.get(),
            MAX_AHEAD.get(),
            self.count_denied.into(),
            self.lease_grid.get()
        ]
    }

    fn step(&self, state: &mut State, operation: Operation) -> bool {
        Self::clamp_future(state, operation.now);
        let cost = operation.cost.min(Self::MAX_ENTRIES + 1);
        let expired = self.expired(state, operation.now);
        let used = (Self::len(state) - expired) as u64;
        if let Action::RollBack(taken) = operation.action {
            Self::remove(state, expired, self.lease_end(taken).get(), cost);
            return true;
        }
        if operation.action == Action::Refund {
            let refunded = cost.min(used) as usize;
            if refunded > 0 {
                state.cut_back(ENTRY_BYTES * refunded);
                state.cut_front(ENTRY_BYTES * expired);
            }
            return true;
        }
        let allowed = used + cost <= self.max_hits.ceiling() && self.is_spaced(state, operation);
        if operation.action == Action::Take && (allowed || self.count_denied) {
            let at = Self::newest(state).unwrap_or_default().max(self.lease_end(operation.now).get());
            // Denied hits push out the oldest ones: only the newest that fill the limit matter. They push out no more
            // hits than they add, even if the log is longer: the limit may have been higher before, and may be higher
            // again.
            let added = cost.min(self.max_hits.ceiling());
            let pushed_out = (used + added).saturating_sub(self.max_hits.ceiling()).min(added) as usize;
            state.cut_front(ENTRY_BYTES * (expired + pushed_out));
            for _ in 0..added {
                state.push::<ENTRY_BYTES>(at);
            }
        }
        allowed
    }

    fn explain(&self, state: &State, operation: Operation, allowed: bool) -> Decision {
        let expired = self.expired(state, operation.now);
        let used = (Self::len(state) - expired) as u64;
        let limit = self.max_hits.limit();
        let next = if limit > 0 {
            let hits = used.min(used.saturating_sub(limit) + 1);
            self.time_until_expired(state, expired, hits, operation.now)
        } else {
            Micros::ZERO
        };
        Decision {
            allowed,
            soft: allowed && operation.is_soft(used, self.max_hits),
            remaining: self.max_hits.remaining(used),
            used,
            reset: self.time_until_expired(state, expired, used, operation.now),
            next,
            retry_after: if allowed { None } else { self.retry_after(state, expired, operation) },
            ..Decision::default()
        }
    }

    fn counts_denied(&self) -> bool {
        self.count_denied
    }

    /// Returns the end of a lease, which is also the instant with which the hits of the lease are logged.
    fn lease_ends(&self, _state: &State, counted: Micros) -> Micros {
        self.lease_end(counted)
    }

    fn lease_lifetime(&self) -> Micros {
        self.lease_grid
    }

    fn expires(&self, state: &State, now: Micros) -> Micros {
        let newest = match Self::newest(state) {
            // A broken state must expire, too.
            Some(newest) => Micros::new(newest).min(now + MAX_AHEAD),
            None => now,
        };
        newest + self.window
    }
}

impl Limiter for SlidingLog {
    const NAME: &'static str = "sliding_log";
    const KEYWORDS: &'static [&'static str] = &["min_interval"];

    fn build(spec: &LimitSpec) -> Result<Algorithm, InvalidLimit> {
        let max_hits = spec.max_hits(spec.requests);
        let interval = spec.min_interval.unwrap_or_default();
        if interval > spec.window {
            return Err(InvalidLimit {
                keyword: "min_interval",
                reason: "min_interval must not be longer than the window",
            });
        }
        if max_hits.ceiling() > Self::MAX_ENTRIES {
            let reason = "sliding_log stores every hit: requests_per_unit must be at most 1000, including its soft part; \
                          sliding_window has no such bound";
            return Err(InvalidLimit { keyword: "requests_per_unit", reason });
        }
        let limiter = Self::new(max_hits, spec.window, interval, spec.counts_denied());
        Ok(limiter.ok_or(InvalidLimit::WINDOW)?.into())
    }

    fn spec(&self) -> Option<LimitSpec> {
        Some(LimitSpec {
            requests: self.max_hits.limit(),
            window: self.window,
            min_interval: Some(self.min_interval),
            soft: self.max_hits.percent(),
            count_denied: Some(self.count_denied),
            ..LimitSpec::default()
        })
    }

    fn parts(&self, state: &State, now: Micros) -> Vec<CounterPart> {
        let mut parts = Vec::new();
        for index in self.expired(state, now)..Self::len(state) {
            let from = Micros::new(Self::entry(state, index));
            parts.push(CounterPart { from, until: from + self.window, hits: 1 });
        }
        parts
    }

    /// Returns `None` if there is a minimum interval, because it is unknown when the hits of a lease arrive.
    fn leasing(&self) -> Option<Program> {
        let grid = Micros::new((self.window.get() / GRID_STEPS_PER_WINDOW).min(MAX_LEASE_LIFETIME.get() / 2));
        if self.min_interval > Micros::ZERO || grid == Micros::ZERO {
            return None;
        }
        let max_hits = MaxHits::hard(self.max_hits.limit());
        Some(Self { max_hits, count_denied: false, lease_grid: grid, ..*self }.into())
    }

    fn recording(&self) -> Algorithm {
        Self { count_denied: true, ..*self }.into()
    }

    fn has_expired(&self, counted: Micros, now: Micros) -> bool {
        counted + self.window <= now
    }

    fn is_ahead(&self, state: &State, now: Micros) -> bool {
        Self::newest(state).is_some_and(|newest| newest > now.get())
    }
}

#[cfg(test)]
mod tests;
