//! What reporters say of a resource, each for a while: how much of it is in use.
//!
//! No limit: it is kept as counters are, so that every store keeps it and all instances see the same. The state is 15 bytes a
//! reporter: until when it holds (7), who says it (6), and ten thousandths of the resource (2).

use smallvec::smallvec;

use super::{Action, Algorithm, Arguments, Ask, Asker, CLOCK_SLACK, Decision, Micros, Rule, Shape, State, Unfit};

/// A report that holds for so long; it replaces what the same reporter said before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reports {
    life: Micros,
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

impl Reports {
    /// All of a resource, as costs say it.
    pub const WHOLE: u64 = 10_000;
    /// The longest life of a report: an hour.
    pub const LONGEST: Micros = Micros::from_secs(3_600);
    /// So many reporters at most; further ones are refused.
    pub const MOST: usize = 1_000;

    /// Of nobody in particular; a life that is longer than [`Self::LONGEST`] is as long.
    #[must_use]
    pub fn new(life: Micros) -> Self {
        Self { life: life.min(Self::LONGEST), reporter: 0 }
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
        let latest = (now + Self::LONGEST + CLOCK_SLACK).get();
        let entries = (0..state.as_bytes().len() / ENTRY).filter_map(entry);
        entries.filter(move |(end, ..)| *end > now.get() && *end <= latest)
    }
}

impl Rule for Reports {
    const NAME: &'static str = "reports of a resource";
    const WORDS: &'static [&'static str] = &[];
    const TAG: &'static str = "rp";
    const SCRIPT: &'static str = include_str!("script.lua");
    const ARGUMENTS: &'static [&'static str] = &["part", "life", "longest", "most", "reporter"];

    fn build(_shape: &Shape) -> Result<Algorithm, Unfit> {
        Err(Unfit { word: "algorithm", why: "reports are no limit" })
    }

    fn arguments(&self, ask: Ask) -> Arguments {
        let longest = (Self::LONGEST + CLOCK_SLACK).get();
        smallvec![ask.cost.min(Self::WHOLE), self.life.get(), longest, Self::MOST as u64, self.reporter]
    }

    /// The reporter is the holder of what he says.
    fn asked_by(self, asker: Asker) -> Self {
        Self { reporter: asker.holder & ((1 << (8 * NAME)) - 1), ..self }
    }

    fn step(&self, state: &mut State, ask: Ask) -> bool {
        if ask.action == Action::Peek {
            return true;
        }
        let mut held: Vec<_> = Self::held(state, ask.now).collect();
        held.retain(|(_, reporter, _)| *reporter != self.reporter);
        let allowed = ask.action.gives() || held.len() < Self::MOST;
        if allowed && !ask.action.gives() {
            held.push(((ask.now + self.life).get(), self.reporter, ask.cost.min(Self::WHOLE)));
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
    fn explain(&self, state: &State, ask: Ask, allowed: bool) -> Decision {
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
    fn refusal_counts(&self, _state: &State, _now: Micros) -> bool {
        true
    }

    fn expires(&self, state: &State, now: Micros) -> Micros {
        Micros::new(Self::held(state, now).map(|(end, ..)| end).max().unwrap_or(now.get()))
    }
}

#[cfg(test)]
mod tests;
