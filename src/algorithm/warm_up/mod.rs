//! Token bucket with warm-up, after Guava's `SmoothWarmingUp` (cold factor 3): after idleness a hit costs three times
//! the time it costs in a steady stream, and the more have passed, the less, until it is warm.
//!
//! Guava counts stored permits. Here they are the time that they are worth in a steady stream, `cold`, so that they
//! grow by a microsecond per idle microsecond up to the warm-up period `P`, and a hit of the pace's span `y` takes `y`
//! of them. Those above `P/2` cost extra, by the area under Guava's slope: of `a = cold − P/2`, the first
//! `k = min(a, y)` cost `2k(2a − k)/P` more. So a cold limiter takes `P` to warm up, and then `P/2` worth of hits more
//! at the stable pace to use up what idleness had stored.
//!
//! Like Guava's it lets a request pass and makes the next one wait: only debt refuses. With a `burst`, hits may run
//! that far into debt.

use smallvec::smallvec;

use super::{
    Action, Algorithm, Arguments, CLOCK_SLACK, Decision, InvalidLimit, LimitSpec, Limiter, MAX_PERIOD, Micros,
    Operation, State,
    drain_state::DrainState,
    drain_time::DrainTime,
    proportion,
    rate::{ExactDuration, Rate},
};

/// A token bucket whose pace ramps up after idleness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WarmUp {
    rate: Rate,
    /// Hits that may come before the debt of the first is worked off.
    burst: u64,
    /// The most that one request may cost.
    largest: u64,
    period: Micros,
    count_denied: bool,
    /// The deepest debt that a request can leave behind.
    deepest: Micros,
    drain_time: DrainTime,
}

/// What is owed, and how cold it is.
#[derive(Clone, Copy, Debug)]
struct WarmUpState {
    /// When the debt is worked off.
    at: ExactDuration,
    cold: u64,
    changed: bool,
}

impl WarmUp {
    /// The longest period: one hour.
    pub const MAX_WARM_UP: Micros = Micros::from_secs(3_600);

    /// `requests` per window once warm. `None` when there are none, the burst is 0, or a span is too long.
    #[must_use]
    pub fn new(requests: u32, window: Micros, burst: u32, period: Micros, count_denied: bool) -> Option<Self> {
        let pace = Rate::new(requests, window)?;
        let (burst, largest) = (u64::from(burst), u64::from(burst.max(requests)));
        // The burst, and one request of the largest cost at the coldest pace.
        let deepest = pace.duration_of(burst + 3 * largest).ceil();
        let fits = burst > 0 && period > Micros::ZERO && period <= Self::MAX_WARM_UP && deepest <= MAX_PERIOD;
        fits.then(|| Self {
            rate: pace,
            burst,
            largest,
            period,
            count_denied,
            deepest,
            drain_time: DrainTime::new(deepest),
        })
    }

    fn charge(&self, cost: u64) -> ExactDuration {
        self.rate.duration_of(cost.min(self.largest + 1))
    }

    /// The debt at which so large a cost still passes.
    fn room(&self, cost: u64) -> Option<ExactDuration> {
        (cost <= self.largest).then(|| self.rate.duration_of(self.burst.saturating_sub(cost)))
    }

    fn state(&self, state: &State, now: Micros) -> WarmUpState {
        let (empty, deepest) = (
            ExactDuration { micros: now.get(), fraction: 0 },
            ExactDuration { micros: self.deepest.get(), fraction: 0 },
        );
        let debt = DrainState::read(state, now, self.rate, deepest, self.drain_time);
        let Some((debt, cold)) = debt.zip(state.number::<4>(16)) else {
            return WarmUpState { at: empty, cold: self.period.get(), changed: false };
        };
        WarmUpState { at: debt.at, cold: (cold + debt.idle.get()).min(self.period.get()), changed: debt.changed }
    }
}

impl Limiter for WarmUp {
    const NAME: &'static str = "token_bucket with warm_up";
    const KEYWORDS: &'static [&'static str] = &["burst", "warm_up"];
    const TAG: &'static str = "tbw";
    const SCRIPT: &'static str = include_str!("script.lua");
    const ARGUMENTS: &'static [&'static str] = &[
        "charge",
        "charge_part",
        "parts",
        "possible",
        "room",
        "room_part",
        "period",
        "deepest",
        "slack",
        "mantissa",
        "exponent",
        "count_denied",
    ];

    fn build(shape: &LimitSpec) -> Result<Algorithm, InvalidLimit> {
        let period = shape.warm_up.unwrap_or_default();
        if period == Micros::ZERO || period > Self::MAX_WARM_UP {
            return Err(InvalidLimit {
                keyword: "warm_up",
                reason: "warm_up must be more than nothing and at most an hour",
            });
        }
        if shape.soft.is_some() {
            return Err(InvalidLimit { keyword: "soft", reason: "soft does not go with warm_up" });
        }
        // By default each hit waits for the one before, as Guava's do.
        let burst = shape.burst.map_or(Ok(1), |_| shape.burst())?;
        let rule = Self::new(shape.requests, shape.window, burst, period, shape.counts_denied());
        Ok(rule.ok_or(InvalidLimit::BURST)?.into())
    }

    fn arguments(&self, ask: Operation) -> Arguments {
        let (charge, room) = (self.charge(ask.cost), self.room(ask.cost));
        let DrainTime { mantissa, exponent } = self.drain_time;
        let (possible, room) = (room.is_some().into(), room.unwrap_or_default());
        let (period, deepest, slack) = (self.period.get(), self.deepest.get(), CLOCK_SLACK.get());
        smallvec![
            charge.micros,
            charge.fraction,
            self.rate.parts(),
            possible,
            room.micros,
            room.fraction,
            period,
            deepest,
            slack,
            mantissa.into(),
            exponent.into(),
            self.count_denied.into()
        ]
    }

    fn step(&self, state: &mut State, ask: Operation) -> bool {
        let WarmUpState { mut at, mut cold, mut changed } = self.state(state, ask.now);
        let now = ExactDuration { micros: ask.now.get(), fraction: 0 };
        let charge = self.charge(ask.cost);
        let warmth = charge.ceil().get();
        let mut allowed = true;
        if ask.action.releases() {
            if at > now || cold < self.period.get() {
                let given = self.rate.not_drained(charge, ask);
                // What is undone has also kept it from idling: for three times the charge where it was coldest.
                let warmth = if ask.action == Action::Refund { warmth } else { 4 * warmth };
                (at, cold, changed) = (self.rate.subtract(at, given).max(now), cold + warmth, true);
            }
        } else {
            let debt = self.rate.subtract(at, now);
            allowed = self.room(ask.cost).is_some_and(|room| debt <= room);
            if ask.action == Action::Take && allowed {
                let half = self.period.get() / 2;
                let above = cold.saturating_sub(half);
                let dear = above.min(charge.micros);
                let extra = proportion::ceil(2 * dear, 2 * above - dear, self.period.get());
                at = self.rate.add(at, self.rate.add(charge, ExactDuration { micros: extra, fraction: 0 }));
                (cold, changed) = (cold.saturating_sub(warmth), true);
            } else if ask.action == Action::Take && self.count_denied {
                let deepest = ExactDuration { micros: ask.now.get() + self.deepest.get(), fraction: 0 };
                (at, changed) = (self.rate.add(at, charge).min(deepest).max(at), true);
            }
        }
        cold = cold.min(self.period.get());
        if changed && (at > now || cold < self.period.get()) {
            DrainState::write(at, self.drain_time, state);
            state.push::<4>(cold);
        } else if changed {
            state.clear();
        }
        allowed
    }

    fn explain(&self, state: &State, ask: Operation, allowed: bool) -> Decision {
        let now = ExactDuration { micros: ask.now.get(), fraction: 0 };
        let debt = self.rate.subtract(self.state(state, ask.now).at, now);
        let in_debt = debt > ExactDuration::default();
        let burst = self.rate.duration_of(self.burst);
        let remaining = if in_debt { self.rate.hits(self.rate.subtract(burst, debt)) } else { self.largest };
        let until = |room: ExactDuration| self.rate.subtract(debt, room).ceil();
        Decision {
            allowed,
            soft: false,
            remaining,
            used: self.largest - remaining,
            reset: debt.ceil(),
            next: self.room(remaining + 1).map(until).unwrap_or_default(),
            retry_after: if allowed { None } else { self.room(ask.cost).map(until) },
            ..Decision::default()
        }
    }

    fn counts_denied(&self) -> bool {
        self.count_denied
    }

    fn counting(&self) -> Algorithm {
        Self { count_denied: true, ..*self }.into()
    }

    fn expires(&self, state: &State, now: Micros) -> Micros {
        let heat = self.state(state, now);
        heat.at.ceil() + (self.period - Micros::new(heat.cold))
    }
}

#[cfg(test)]
mod tests;
