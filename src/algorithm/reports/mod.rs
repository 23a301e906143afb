//! What reporters say of a resource, each for a while: how much of it is in use.
//!
//! No limit: it is kept as counters are, so that every store keeps it and all instances see the same. The state is 15 bytes a
//! reporter: until when it holds (7), who says it (6), and ten thousandths of the resource (2).

use smallvec::smallvec;

use super::{
    Action, Algorithm, Arguments, CLOCK_SLACK, Decision, InvalidLimit, LimitSpec, Limiter, Micros, Operation,
    RequestContext, State,
};

/// A report that holds for so long; it replaces what the same reporter said before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UtilizationReports {
    ttl: Micros,
    reporter: u64,
}

/// What all of them say.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Utilization {
    /// The highest of all, from 0 to 1.
    pub worst: f64,
    /// The mean of all.
    pub mean: f64,
    /// How many say something.
    pub reporters: u32,
}

const END: usize = 7;
const NAME: usize = 6;
const PART: usize = 2;
const ENTRY: usize = END + NAME + PART;

impl UtilizationReports {
    /// All of a resource, as costs say it.
    pub const WHOLE: u64 = 10_000;
    /// The longest life of a report: an hour.
    pub const MAX_TTL: Micros = Micros::from_secs(3_600);
    /// So many reporters at most; further ones are refused.
    pub const MAX_REPORTERS: usize = 1_000;

    /// Of nobody in particular; a life that is longer than [`Self::LONGEST`] is as long.
    #[must_use]
    pub fn new(life: Micros) -> Self {
        Self { ttl: life.min(Self::MAX_TTL), reporter: 0 }
    }

    /// What a decision of this algorithm says.
    #[must_use]
    pub fn read(decision: &Decision) -> Option<Utilization> {
        let part = |number: u64| number as f64 / Self::WHOLE as f64;
        let reporters = decision.limit.filter(|reporters| *reporters > 0)?;
        Some(Utilization { worst: part(decision.used), mean: part(decision.remaining), reporters })
    }

    /// Those that hold: until when, who, and what.
    fn held(state: &State, now: Micros) -> impl Iterator<Item = (u64, u64, u64)> {
        let entry = move |place: usize| {
            let at = ENTRY * place;
            Some((state.number::<END>(at)?, state.number::<NAME>(at + END)?, state.number::<PART>(at + END + NAME)?))
        };
        let latest = (now + Self::MAX_TTL + CLOCK_SLACK).get();
        let entries = (0..state.as_bytes().len() / ENTRY).filter_map(entry);
        entries.filter(move |(end, ..)| *end > now.get() && *end <= latest)
    }
}

impl Limiter for UtilizationReports {
    const NAME: &'static str = "reports of a resource";
    const KEYWORDS: &'static [&'static str] = &[];
    const TAG: &'static str = "rp";
    const SCRIPT: &'static str = include_str!("script.lua");
    const ARGUMENTS: &'static [&'static str] = &["part", "life", "longest", "most", "reporter"];

    fn build(_shape: &LimitSpec) -> Result<Algorithm, InvalidLimit> {
        Err(InvalidLimit { keyword: "algorithm", reason: "reports are no limit" })
    }

    fn arguments(&self, ask: Operation) -> Arguments {
        let longest = (Self::MAX_TTL + CLOCK_SLACK).get();
        smallvec![ask.cost.min(Self::WHOLE), self.ttl.get(), longest, Self::MAX_REPORTERS as u64, self.reporter]
    }

    /// The reporter is the holder of what he says.
    fn with_context(self, asker: RequestContext) -> Self {
        Self { reporter: asker.holder & ((1 << (8 * NAME)) - 1), ..self }
    }

    fn step(&self, state: &mut State, ask: Operation) -> bool {
        if ask.action == Action::Peek {
            return true;
        }
        let mut held: Vec<_> = Self::held(state, ask.now).collect();
        held.retain(|(_, reporter, _)| *reporter != self.reporter);
        let allowed = ask.action.releases() || held.len() < Self::MAX_REPORTERS;
        if allowed && !ask.action.releases() {
            held.push(((ask.now + self.ttl).get(), self.reporter, ask.cost.min(Self::WHOLE)));
        }
        state.clear();
        for (end, reporter, part) in held {
            state.push::<END>(end);
            state.push::<NAME>(reporter);
            state.push::<PART>(part);
        }
        allowed
    }

    /// Its `used` is the highest report, its `remaining` the mean, and its `limit` the number of reporters: see
    /// [`Reports::read`].
    fn explain(&self, state: &State, ask: Operation, allowed: bool) -> Decision {
        let (mut worst, mut sum, mut reporters, mut last) = (0, 0, 0, 0);
        for (end, _, part) in Self::held(state, ask.now) {
            (worst, sum, reporters, last) = (part.max(worst), sum + part, reporters + 1, end.max(last));
        }
        Decision {
            allowed,
            used: worst,
            remaining: sum / u64::from(reporters.max(1)),
            limit: Some(reporters),
            reset: Micros::new(last) - ask.now,
            ..Decision::default()
        }
    }

    /// Others come and go.
    fn denial_counts(&self, _state: &State, _now: Micros) -> bool {
        true
    }

    fn expires(&self, state: &State, now: Micros) -> Micros {
        Micros::new(Self::held(state, now).map(|(end, ..)| end).max().unwrap_or(now.get()))
    }
}

#[cfg(test)]
mod tests;
