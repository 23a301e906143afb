//! May it pass: pure arithmetic on a few bytes of state. No I/O, no clock; integers only.
//!
//! Every algorithm is a folder with the same files: `mod.rs` (the rule and its arithmetic), `script.lua` (the state's
//! transition again, for Redis; three of the bucket family share `bucket`'s) and `tests.rs`. `list` names them all;
//! nothing else has to. The formulas with their units, sources and bounds are in docs/algorithms.md.
//!
//! An algorithm comes in two halves. [`Rule::step`] moves the state and is what has to be atomic: a store runs it
//! where the counter is locked, and the script is its twin. [`Rule::explain`] reads the state that a step left and
//! says what to tell the caller; it exists once, in Rust, for every store.

pub mod adaptive;
mod bucket;
mod classes;
pub mod concurrency;
mod consistency;
mod drain_state;
mod drain_time;
pub mod fixed_window;
pub mod gcra;
#[cfg(test)]
mod laws;
pub mod leaky_bucket;
pub mod leased_bucket;
mod limit_spec;
mod list;
mod max_hits;
mod micros;
mod proportion;
mod rate;
pub mod reports;
pub mod shares;
pub mod sliding_log;
pub mod sliding_window;
mod state;
pub mod token_bucket;
pub mod warm_up;

pub use classes::{Classes, InvalidClasses};
pub use consistency::Consistency;
pub use limit_spec::{AlgorithmKind, InvalidLimit, LimitSpec};
pub use list::Algorithm;
pub use max_hits::MaxHits;
pub use micros::Micros;
pub use state::State;

use smallvec::SmallVec;

/// The largest count and the longest span that every store can hold: Lua's numbers are doubles, exact up to 2⁵³.
pub const MAX: u64 = (1 << 53) - 1;

/// A stored instant may lie so far ahead of the clock and is still believed: clocks step back by seconds, and what
/// was counted stays counted. Further ahead, the clock was wrong when it was stored, and nobody waits until then.
pub const CLOCK_SLACK: Micros = Micros::from_secs(60);

/// No fixed window is longer, in seconds: 100 years of 365 days. Nor does a bucket take longer to drain.
pub const MAX_PERIOD: Micros = Micros::from_secs(100 * 31_536_000);

/// What begins every program of scripts: helpers that several of them call.
pub const PRELUDE: &str = include_str!("prelude.lua");

/// What is asked of a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Take the cost if the algorithm allows it.
    Take,
    /// Say what taking the cost would do; take nothing.
    Peek,
    /// Give the cost back, never above full.
    Refund,
    /// Take back what this cost took at that instant, of this same counter and limit: as if it had never come, or a
    /// little less, never more. Where a window has ended since, there is nothing to take back from it; of a bucket it
    /// is what the time since has not brought back anyway. Meant for right afterwards: a warm-up holds to this for as
    /// long as a hit takes, and is a little warmer later on.
    RollBack(Micros),
}

impl Action {
    /// Whether the counter has more afterwards, if anything.
    #[must_use]
    pub const fn releases(self) -> bool {
        matches!(self, Self::Refund | Self::RollBack(_))
    }
}

/// One question to one counter.
#[derive(Clone, Copy, Debug)]
pub struct Operation {
    /// What to do.
    pub action: Action,
    /// How many hits; above [`MAX`] it counts as [`MAX`].
    pub cost: u64,
    /// The instant of the question.
    pub now: Micros,
}

impl Operation {
    /// Whether a cost that passes does so only because the limit is soft; `used` is what counts after the step.
    fn is_soft(self, used: u64, quota: MaxHits) -> bool {
        match self.action {
            Action::Take => used > quota.limit(),
            Action::Peek => used.saturating_add(self.cost) > quota.limit(),
            Action::Refund | Action::RollBack(_) => false,
        }
    }
}

/// Who asks, for counters to which that matters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestContext {
    /// Whose the slots are that are taken and given back; 0 is nobody in particular.
    pub holder: u64,
    /// The place of its class among those that share the counter.
    pub class: u8,
    /// Of what held the slots that are given back.
    pub sample: Option<Sample>,
}

/// How long something took that held a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// So long.
    pub latency: Micros,
    /// It took too long, or the upstream refused it for overload.
    pub dropped: bool,
}

/// What to tell the caller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// Whether the cost passes.
    pub allowed: bool,
    /// It passes only because the limit is soft.
    pub soft: bool,
    /// It is refused for what others do: the caller is within what it may have.
    pub shed: bool,
    /// The limit as it stands for this caller now, where that is not the rule's.
    pub limit: Option<u32>,
    /// Hits that would still pass now within the limit.
    pub remaining: u64,
    /// Hits that count against the limit now; above it where denied hits count too, or the limit is soft.
    pub used: u64,
    /// Until everything is restored, if nobody else asks.
    pub reset: Micros,
    /// Until more remains than now, if nobody else asks; nothing when nothing is used.
    pub next: Micros,
    /// When denied: until this same cost would pass, if nobody else asks; `None` when it never will.
    pub retry_after: Option<Micros>,
    /// When allowed: how long the caller is to wait before it goes on.
    pub delay: Micros,
}

/// The numbers that a script gets for one question, in the order of [`Rule::ARGUMENTS`].
pub type Arguments = SmallVec<[u64; 12]>;

/// What every algorithm offers. Implementors are small values, checked when they were made: nothing here can fail.
pub trait Limiter: Copy + Into<Algorithm> {
    /// The algorithm's word in rule files; several words for what another algorithm becomes by one of its `WORDS`.
    const NAME: &'static str;

    /// The words that a rule may add for it, beside those that belong to all.
    const KEYWORDS: &'static [&'static str];

    /// A few letters that stand for the algorithm in a key: counters of different algorithms never meet.
    const TAG: &'static str;

    /// The Lua twin of [`Rule::step`]: the body of a function that returns `allowed` (1 or 0) and the state after.
    ///
    /// It sees `key`; `action` (`TAKE`, `PEEK` or `RETURN`); `now` in microseconds; `keep`, the milliseconds that a key
    /// outlives its use; the [`Rule::ARGUMENTS`] by their names, and where in `records` further ones begin (`more`); and
    /// what `prelude.lua` defines. The state is a string
    /// of the same bytes as [`State`], or an integer, which stands for its eight bytes.
    const SCRIPT: &'static str;

    /// The script's names for the first of [`Rule::arguments`].
    const ARGUMENTS: &'static [&'static str];

    /// The algorithm with the numbers of a limit, which has at least one hit per window.
    fn build(shape: &LimitSpec) -> Result<Algorithm, InvalidLimit>;

    /// The numbers for one question.
    fn arguments(&self, ask: Operation) -> Arguments;

    /// A part of the key that separates counters of one descriptor, where the state cannot tell them apart.
    fn scope(&self) -> Option<u64> {
        None
    }

    /// The same for one caller, where it matters who asks.
    #[must_use]
    fn with_context(self, _asker: RequestContext) -> Self {
        self
    }

    /// Moves the state and says whether the cost passes. A peek takes nothing.
    fn step(&self, state: &mut State, ask: Operation) -> bool;

    /// Reads the state that a step left.
    fn explain(&self, state: &State, ask: Operation, allowed: bool) -> Decision;

    /// Whether a take that is refused counts all the same.
    fn counts_denied(&self) -> bool {
        false
    }

    /// Whether a refusal by this state is not to be remembered: it changes what later hits get, or may be over at any moment.
    fn denial_counts(&self, _state: &State, _now: Micros) -> bool {
        self.counts_denied()
    }

    /// How a part of the quota is taken in advance, of the same counter: as a take that refuses rather than being soft, and
    /// that does not count when it is refused. `None` where what is spent later could add up to more than the limit.
    fn leasing(&self) -> Option<Algorithm> {
        None
    }

    /// Of such an algorithm: the instant until which hits may be spent that were counted at another one.
    fn lease_ends(&self, counted: Micros) -> Micros {
        counted
    }

    /// The least time from one to the other, if that is always the same.
    fn lease_lifetime(&self) -> Micros {
        MAX_PERIOD
    }

    /// The same counter for hits that have passed elsewhere: a take counts, whatever it says. A bucket goes into debt.
    fn counting(&self) -> Algorithm {
        (*self).into()
    }

    /// Whether hits that were counted at one instant count for nothing at a later one, whatever else is counted.
    fn is_over(&self, _counted: Micros, _now: Micros) -> bool {
        false
    }

    /// The instant from which the state says no more than a new one would.
    fn expires(&self, state: &State, now: Micros) -> Micros;
}
