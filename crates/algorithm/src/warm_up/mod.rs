//! [`WarmUp`]: a token bucket with warm-up, after Guava's `SmoothWarmingUp` (cold factor 3): after idleness a hit costs
//! three times its time in a steady stream, and the cost falls with every hit until the limiter is warm.
//!
//! Guava counts stored permits. This implementation stores the time that they are worth in a steady stream, `cold`. It
//! grows by one microsecond per idle microsecond up to the warm-up period `P`, and a hit that takes `y` at the steady
//! rate uses `y` of it. The part above `P/2` costs extra, by the area under Guava's slope: of `a = cold − P/2`, the
//! first `k = min(a, y)` cost `2k(2a − k)/P` more. A cold limiter therefore takes `P` to warm up, and then `P/2` worth
//! of hits at the steady rate to use up what idleness had stored.
//!
//! As in Guava, a request is allowed and the next one waits: only debt leads to a denial. With a `burst`, hits may go
//! that far into debt.

use smallvec::smallvec;

use super::{
    Action, Algorithm, Arguments, CounterProgram, Decision, InvalidLimit, LimitSpec, Limiter, MAX_PERIOD, Micros,
    Operation, State,
    drain_state::{self, DrainState, Precision},
    drain_time::DrainTime,
    proportion,
    rate::{ExactDuration, Rate},
};

/// A token bucket with a rate that rises after idleness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WarmUp {
    rate: Rate,
    /// Hits that are allowed before the debt of the first is paid.
    burst: u64,
    /// Maximum cost of one request.
    max_cost: u64,
    period: Micros,
    count_denied: bool,
    /// Maximum debt that a request can leave.
    max_debt: Micros,
    drain_time: DrainTime,
}

/// The debt at an instant, and the idle time that is stored (`cold`, in microseconds).
#[derive(Clone, Copy, Debug)]
struct WarmUpState {
    /// Instant at which the debt is paid.
    paid_at: ExactDuration,
    cold: u64,
    changed: bool,
}

impl WarmUp {
    /// Maximum warm-up period: one hour.
    pub const MAX_WARM_UP: Micros = Micros::from_secs(3_600);

    /// Creates a limiter that allows `requests` per window when warm.
    ///
    /// Returns `None` if there are no requests, if the window or the burst is 0, if the warm-up period is 0 or exceeds
    /// [`Self::MAX_WARM_UP`], or if the maximum debt takes longer than [`MAX_PERIOD`] to drain.
    #[must_use]
    pub fn new(requests: u32, window: Micros, burst: u32, period: Micros, count_denied: bool) -> Option<Self> {
        let rate = Rate::new(requests.into(), window)?;
        let max_cost = u64::from(burst.max(requests));
        let burst = u64::from(burst);
        // The maximum debt is a burst plus one request of the maximum cost at the slowest rate.
        let max_debt = rate.duration_of(burst + 3 * max_cost).ceil();
        let fits = burst > 0 && period > Micros::ZERO && period <= Self::MAX_WARM_UP && max_debt <= MAX_PERIOD;
        if !fits {
            return None;
        }
        Some(Self { rate, burst, max_cost, period, count_denied, max_debt, drain_time: DrainTime::new(max_debt) })
    }

    fn charge(&self, cost: u64) -> ExactDuration {
        self.rate.duration_of(cost.min(self.max_cost + 1))
    }

    /// Returns the maximum debt at which a request of this cost is still allowed; `None` if it never is.
    fn allowed_debt(&self, cost: u64) -> Option<ExactDuration> {
        if cost > self.max_cost {
            return None;
        }
        Some(self.rate.duration_of(self.burst.saturating_sub(cost)))
    }

    /// Returns the debt of a full burst. It replaces a debt that a wrong clock has stored, so that the next hit is allowed
    /// after its time in a steady stream.
    fn full_debt(&self) -> Micros {
        self.rate.duration_of(self.burst).ceil()
    }

    /// Returns the time in which a debt falls to `allowed_debt`, if no other requests arrive.
    fn time_until(&self, debt: ExactDuration, allowed_debt: ExactDuration) -> Micros {
        self.rate.subtract(debt, allowed_debt).ceil()
    }

    fn read(&self, state: &State, now: Micros) -> WarmUpState {
        let paid_now = ExactDuration { micros: now.get(), fraction: 0 };
        let new = WarmUpState { paid_at: paid_now, cold: self.period.get(), changed: false };
        let Some(cold) = state.number::<4>(16) else {
            return new;
        };
        let max_debt = ExactDuration { micros: self.max_debt.get(), fraction: 0 };
        let Some(debt) = DrainState::read(state, now, self.rate, max_debt, self.drain_time) else {
            return new;
        };
        let is_of_wrong_clock = debt.changed && debt.drained_at.micros - now.get() >= self.max_debt.get();
        let used_up = ExactDuration { micros: (now + self.full_debt()).get(), fraction: 0 };
        let paid_at = if is_of_wrong_clock { used_up } else { debt.drained_at };
        WarmUpState { paid_at, cold: (cold + debt.idle.get()).min(self.period.get()), changed: debt.changed }
    }
}

impl CounterProgram for WarmUp {
    const TAG: &'static str = "tbw";
    const SCRIPT: &'static str = include_str!("script.lua");
    const ARGUMENTS: &'static [&'static str] = &[
        "charge",
        "charge_part",
        "parts",
        "possible",
        "allowed_debt",
        "allowed_debt_part",
        "period",
        "full",
        "max_debt",
        "mantissa",
        "exponent",
        "count_denied",
    ];

    fn arguments(&self, operation: Operation) -> Arguments {
        let charge = self.charge(operation.cost);
        let allowed_debt = self.allowed_debt(operation.cost);
        let possible = allowed_debt.is_some();
        let allowed_debt = allowed_debt.unwrap_or_default();
        let DrainTime { mantissa, exponent } = self.drain_time;
        smallvec![
            charge.micros,
            charge.fraction,
            self.rate.parts(),
            possible.into(),
            allowed_debt.micros,
            allowed_debt.fraction,
            self.period.get(),
            self.full_debt().get(),
            self.max_debt.get(),
            mantissa.into(),
            exponent.into(),
            self.count_denied.into()
        ]
    }

    fn step(&self, state: &mut State, operation: Operation) -> bool {
        let WarmUpState { paid_at: mut at, mut cold, mut changed } = self.read(state, operation.now);
        let now = ExactDuration { micros: operation.now.get(), fraction: 0 };
        let charge = self.charge(operation.cost);
        let warmth = charge.ceil().get();
        let mut allowed = true;
        if operation.action.releases() {
            if at > now || cold < self.period.get() {
                let refunded = self.rate.refundable(charge, operation);
                // The rolled back take has also prevented idleness: for up to three times its charge when cold.
                let warmth = if operation.action == Action::Refund { warmth } else { 4 * warmth };
                at = self.rate.subtract(at, refunded).max(now);
                cold += warmth;
                changed = true;
            }
        } else {
            let debt = self.rate.subtract(at, now);
            allowed = self.allowed_debt(operation.cost).is_some_and(|allowed_debt| debt <= allowed_debt);
            if operation.action == Action::Take && allowed {
                let half = self.period.get() / 2;
                let above = cold.saturating_sub(half);
                let surcharged = above.min(charge.micros);
                let extra = proportion::ceil(2 * surcharged, 2 * above - surcharged, self.period.get());
                at = self.rate.add(at, self.rate.add(charge, ExactDuration { micros: extra, fraction: 0 }));
                cold = cold.saturating_sub(warmth);
                changed = true;
            } else if operation.action == Action::Take && self.count_denied {
                let max_debt = ExactDuration { micros: operation.now.get() + self.max_debt.get(), fraction: 0 };
                at = self.rate.add(at, charge).min(max_debt).max(at);
                changed = true;
            }
        }
        cold = cold.min(self.period.get());
        if changed && (at > now || cold < self.period.get()) {
            DrainState::write(at, self.drain_time, Precision::Short, state);
            state.push::<4>(cold);
        } else if changed {
            state.clear();
        }
        allowed
    }

    fn explain(&self, state: &State, operation: Operation, allowed: bool) -> Decision {
        let now = ExactDuration { micros: operation.now.get(), fraction: 0 };
        let debt = self.rate.subtract(self.read(state, operation.now).paid_at, now);
        let in_debt = debt > ExactDuration::default();
        let burst = self.rate.duration_of(self.burst);
        let remaining = if in_debt { self.rate.hits(self.rate.subtract(burst, debt)) } else { self.max_cost };
        let next = match self.allowed_debt(remaining + 1) {
            Some(allowed_debt) => self.time_until(debt, allowed_debt),
            None => Micros::ZERO,
        };
        let retry_after = match self.allowed_debt(operation.cost) {
            Some(allowed_debt) if !allowed => Some(self.time_until(debt, allowed_debt)),
            Some(_) | None => None,
        };
        Decision {
            allowed,
            soft: false,
            remaining,
            used: self.max_cost - remaining,
            reset: debt.ceil(),
            next,
            retry_after,
            ..Decision::default()
        }
    }

    fn counts_denied(&self) -> bool {
        self.count_denied
    }

    fn expires(&self, state: &State, now: Micros) -> Micros {
        let state = self.read(state, now);
        state.paid_at.ceil() + (self.period - Micros::new(state.cold))
    }
}

impl Limiter for WarmUp {
    const NAME: &'static str = "token_bucket with warm_up";
    const KEYWORDS: &'static [&'static str] = &["burst", "warm_up"];

    fn build(spec: &LimitSpec) -> Result<Algorithm, InvalidLimit> {
        let period = spec.warm_up.unwrap_or_default();
        if period == Micros::ZERO || period > Self::MAX_WARM_UP {
            return Err(InvalidLimit {
                keyword: "warm_up",
                reason: "warm_up must be greater than 0 and at most 1 hour",
            });
        }
        if spec.soft.is_some() {
            return Err(InvalidLimit { keyword: "soft", reason: "soft is not supported with warm_up" });
        }
        // By default each hit waits for the previous one, as in Guava.
        let burst = if spec.burst.is_some() { spec.short_burst()? } else { 1 };
        let limiter = Self::new(spec.short_requests()?, spec.window, burst, period, spec.counts_denied());
        Ok(limiter.ok_or(InvalidLimit::BURST)?.into())
    }

    fn spec(&self) -> Option<LimitSpec> {
        let (mut requests, mut window) = self.rate.hits_per_interval();
        if self.max_cost > self.burst {
            // The maximum cost is the number of requests before the rate was reduced to lowest terms.
            let factor = self.max_cost / requests;
            requests = self.max_cost;
            window = Micros::new(window.get() * factor);
        }
        Some(LimitSpec {
            requests,
            window,
            burst: Some(self.burst),
            warm_up: Some(self.period),
            count_denied: Some(self.count_denied),
            ..LimitSpec::default()
        })
    }

    fn recording(&self) -> Algorithm {
        Self { count_denied: true, ..*self }.into()
    }

    fn is_ahead(&self, state: &State, now: Micros) -> bool {
        drain_state::is_ahead(state, now)
    }
}

#[cfg(test)]
mod tests;
