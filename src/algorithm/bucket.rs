//! The arithmetic of token bucket, leaky bucket and GCRA, which are one: a bucket drains at the limit's pace, every
//! hit pours a drop in, and what would overflow is refused. What is remembered is when the bucket will have drained
//! (GCRA's theoretical arrival time), so nothing has to run while nobody asks.
//!
//! The instant is exact: whole microseconds and a fraction in parts of the limit's own ([`Pace`]). The time that a
//! full bucket takes to drain stands beside it, so that a changed limit is noticed and the level scaled: a bucket
//! that was half full is half full.

use smallvec::smallvec;

use super::{
    Action, Arguments, Ask, CLOCK_SLACK, Decision, LONGEST, Micros, Quota, State,
    drain::Drain,
    pace::{Pace, Span},
    tempo::Tempo,
};

/// A bucket with its pace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bucket {
    pace: Pace,
    quota: Quota,
    /// Hits that need not wait.
    at_once: u64,
    count_denied: bool,
    /// Until a full bucket has drained.
    full: Span,
    /// The same as it stands in the state.
    tempo: Tempo,
}

impl Bucket {
    pub(super) const ARGUMENTS: &'static [&'static str] =
        &["charge", "charge_part", "full", "full_part", "parts", "slack", "mantissa", "exponent", "count_denied"];
    pub(super) const SCRIPT: &'static str = include_str!("bucket.lua");

    /// `requests` hits per window drain, `quota` hits fit in, and those above `at_once` are told to wait. `None` for no
    /// requests, no room, or a bucket that takes longer than [`LONGEST`] to drain.
    pub(super) fn new(requests: u32, window: Micros, quota: Quota, at_once: u64, count_denied: bool) -> Option<Self> {
        let pace = Pace::new(requests, window)?;
        let full = pace.span(quota.ceiling());
        let fits = quota.limit() > 0 && full.ceil() <= LONGEST && window <= LONGEST;
        fits.then(|| Self { pace, quota, at_once, count_denied, full, tempo: Tempo::new(full.ceil()) })
    }

    /// More than fits in is refused whatever it is, so it need not be known exactly.
    fn charge(&self, cost: u64) -> Span {
        self.pace.span(cost.min(self.quota.ceiling() + 1))
    }

    pub(super) fn arguments(&self, ask: Ask) -> Arguments {
        let (charge, full, parts) = (self.charge(ask.cost), self.full, self.pace.parts());
        let Tempo { mantissa, exponent } = self.tempo;
        let (slack, denied) = (CLOCK_SLACK.get(), self.count_denied.into());
        smallvec![
            charge.micros,
            charge.part,
            full.micros,
            full.part,
            parts,
            slack,
            mantissa.into(),
            exponent.into(),
            denied
        ]
    }

    fn level(&self, state: &State, now: Micros) -> Drain {
        let empty = Drain { at: Span { micros: now.get(), part: 0 }, idle: Micros::ZERO, changed: false };
        Drain::read(state, now, self.pace, self.full, self.tempo).unwrap_or(empty)
    }

    pub(super) fn step(&self, state: &mut State, ask: Ask) -> bool {
        let now = Span { micros: ask.now.get(), part: 0 };
        let Drain { mut at, mut changed, .. } = self.level(state, ask.now);
        let charge = self.charge(ask.cost);
        let mut allowed = true;
        if ask.action.gives() {
            if at > now {
                at = self.pace.subtract(at, self.pace.not_drained(charge, ask));
                changed = true;
            }
        } else {
            let full = self.pace.add(now, self.full);
            let mut after = self.pace.add(at, charge);
            allowed = after <= full;
            if !allowed {
                after = full.max(at);
            }
            if ask.action == Action::Take && (allowed || self.count_denied) {
                (at, changed) = (after, true);
            }
        }
        if changed && at > now {
            Drain::write(at, self.tempo, state);
        } else if changed {
            state.clear();
        }
        allowed
    }

    pub(super) fn explain(&self, state: &State, ask: Ask, allowed: bool) -> Decision {
        let now = Span { micros: ask.now.get(), part: 0 };
        let level = self.pace.subtract(self.level(state, ask.now).at, now);
        let charge = self.charge(ask.cost);
        // What a look asks about is not poured in.
        let after = if ask.action == Action::Peek { self.pace.add(level, charge) } else { level };
        let limit = self.pace.span(self.quota.limit());
        let remaining = self.pace.hits(self.pace.subtract(limit, level));
        let until = |level: Span, room: Span| self.pace.subtract(level, room).ceil();
        let more = self.pace.subtract(limit, self.pace.span(remaining + 1));
        let possible = ask.cost <= self.quota.ceiling();
        Decision {
            allowed,
            soft: allowed && !ask.action.gives() && after > limit,
            remaining,
            used: self.pace.hits_begun(level),
            reset: level.ceil(),
            next: if remaining < self.quota.limit() { until(level, more) } else { Micros::ZERO },
            retry_after: (!allowed && possible).then(|| until(level, self.pace.subtract(self.full, charge))),
            delay: if allowed && !ask.action.gives() {
                until(after, self.pace.span(self.at_once))
            } else {
                Micros::ZERO
            },
        }
    }

    pub(super) const fn counts_denied(&self) -> bool {
        self.count_denied
    }

    pub(super) fn expires(&self, state: &State, now: Micros) -> Micros {
        self.level(state, now).at.ceil()
    }
}
