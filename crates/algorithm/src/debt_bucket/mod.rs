//! [`DebtBucket`]: a token bucket that may go into debt, for hits whose number is known only afterwards.
//!
//! A request is allowed if no hits are owed before it, and at most `debt` hits after it. Nothing is allowed until they
//! are paid back. Guava's smooth bursty limiter does this without a maximum debt. In any time *t*, at most
//! `burst + debt + rate × t` hits are allowed.
//!
//! The state is that of a `bucket` which holds `burst + debt` hits, with a fraction of seven bytes.

use super::{
    Algorithm, Arguments, CounterProgram, Decision, InvalidLimit, LimitSpec, Limiter, MaxHits, Micros, Operation,
    State, bucket::Bucket, drain_state,
};

/// A token bucket with a maximum debt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DebtBucket(Bucket);

impl DebtBucket {
    /// Creates a bucket that allows `requests` per window in the long run, with bursts of `burst` hits and a debt of up to
    /// `debt` hits.
    ///
    /// Returns `None` if one of the numbers is 0, if burst and debt together exceed [`MaxHits::MAX`], or if the window
    /// or the time to restore both exceeds [`super::MAX_PERIOD`].
    #[must_use]
    pub fn new(requests: u64, window: Micros, burst: u64, debt: u64) -> Option<Self> {
        if burst == 0 || debt == 0 {
            return None;
        }
        let all = burst.checked_add(debt).filter(|all| *all <= MaxHits::MAX)?;
        let bucket = Bucket::large(requests, window, MaxHits::hard(all), false)?;
        Some(Self(bucket.with_debt(burst)))
    }
}

impl CounterProgram for DebtBucket {
    const TAG: &'static str = "debt";
    const SCRIPT: &'static str = Bucket::DEBT_SCRIPT;
    const ARGUMENTS: &'static [&'static str] = Bucket::DEBT_ARGUMENTS;

    fn arguments(&self, operation: Operation) -> Arguments {
        self.0.arguments(operation)
    }

    fn step(&self, state: &mut State, operation: Operation) -> bool {
        self.0.step(state, operation)
    }

    fn explain(&self, state: &State, operation: Operation, allowed: bool) -> Decision {
        self.0.explain(state, operation, allowed)
    }

    fn counts_denied(&self) -> bool {
        self.0.counts_denied()
    }

    fn expires(&self, state: &State, now: Micros) -> Micros {
        self.0.expires(state, now)
    }
}

impl Limiter for DebtBucket {
    const NAME: &'static str = "token_bucket with debt";
    const KEYWORDS: &'static [&'static str] = &["burst", "debt"];

    fn build(spec: &LimitSpec) -> Result<Algorithm, InvalidLimit> {
        let error = |reason| Err(InvalidLimit { keyword: "debt", reason });
        let debt = match spec.debt {
            Some(debt) if debt > 0 => debt,
            _ => return error("debt must be at least 1"),
        };
        if spec.warm_up.is_some() || spec.soft.is_some() || spec.counts_denied() {
            return error("debt cannot be combined with warm_up, soft or count_denied: true");
        }
        let limiter = Self::new(spec.requests, spec.window, spec.burst()?, debt);
        Ok(limiter.ok_or(InvalidLimit::BURST)?.into())
    }

    fn spec(&self) -> Option<LimitSpec> {
        let spec = self.0.spec()?;
        let burst = self.0.free_hits()?;
        Some(LimitSpec { burst: Some(burst), debt: Some(spec.burst? - burst), ..spec })
    }

    fn recording(&self) -> Algorithm {
        Self(self.0.recording()).into()
    }

    fn is_ahead(&self, state: &State, now: Micros) -> bool {
        drain_state::is_ahead(state, now)
    }
}

#[cfg(test)]
mod tests;
