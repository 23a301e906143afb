//! Rate limiting algorithms: pure integer arithmetic on a few bytes of state, without I/O and without a clock.
//!
//! A store runs a [`CounterProgram`] on the state of a counter. A program has two halves. [`CounterProgram::step`]
//! changes the state and has to be atomic: a store runs it while it holds the lock of the counter, and the Lua script is
//! its equivalent for Redis. [`CounterProgram::explain`] computes the [`Decision`] from the state after a step. It exists
//! only once, in Rust, for every store.
//!
//! Algorithms are the programs of limits: they implement [`Limiter`], too, which builds them from the parameters of a rule
//! and says how their hits can be leased or counted elsewhere. Four programs are no limits: the bucket from which leases are
//! taken ([`leased_bucket`]), the time for which all hits are denied ([`penalty`]), and what callers report ([`reports`],
//! [`assignments`]).
//!
//! Every program has a folder: `mod.rs` (the type and its arithmetic), `script.lua` (the same state transition for Redis) and
//! `tests.rs`. All kinds of buckets share `bucket/script.lua`, and adaptive limits add `learn.lua` to that of concurrency. The
//! modules `list` and `program` name all algorithms and programs; other code names only those that it treats
//! differently.
//! docs/reference/algorithms.md contains the formulas with their units, sources and bounds.

pub mod adaptive;
pub mod assignments;
mod bucket;
mod classes;
pub mod concurrency;
mod consistency;
pub mod debt_bucket;
mod drain_state;
mod drain_time;
pub mod first_request;
pub mod fixed_window;
mod forecast;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
pub mod gcra;
pub mod large_bucket;
#[cfg(test)]
mod laws;
pub mod leaky_bucket;
pub mod leased_bucket;
mod limit_spec;
mod list;
mod max_hits;
mod micros;
pub mod penalty;
mod program;
mod proportion;
mod rate;
pub mod reports;
pub mod scheduled_window;
pub mod shares;
pub mod sliding_log;
pub mod sliding_window;
mod state;
pub mod token_bucket;
pub mod warm_up;

use sluicegate_calendar::Anchor;

pub use classes::{Classes, InvalidClasses};
pub use consistency::Consistency;
pub use forecast::{CounterPart, forecast};
pub use limit_spec::{AlgorithmKind, InvalidLimit, LimitSpec, WindowStart};
pub use list::Algorithm;
pub use max_hits::MaxHits;
pub use micros::Micros;
pub use program::{Arguments, CounterProgram, Program, Script};
pub use state::State;

/// Largest count, and longest duration in microseconds, that every store can hold: numbers in Lua are doubles, exact up
/// to 2⁵³.
pub const MAX_NUMBER: u64 = (1 << 53) - 1;

/// Returns a number of hits that every store can hold: at most [`MAX_NUMBER`].
///
/// Readers of requests, admin calls and files call it. Programs bound the cost as well ([`Operation::cost`]), because
/// hits of peers are added up on the way.
#[must_use]
pub fn bound_hits(hits: u64) -> u64 {
    hits.min(MAX_NUMBER)
}

/// Maximum time by which a stored instant may be ahead of the clock.
///
/// Clocks step back by seconds, and counted hits stay counted then. An instant further ahead was written while a clock
/// was wrong, so it is corrected and callers do not have to wait for it.
pub const CLOCK_SLACK: Micros = Micros::from_secs(60);

/// Maximum length of a fixed window and maximum drain time of a bucket: 100 years of 365 days.
pub const MAX_PERIOD: Micros = Micros::from_secs(100 * 31_536_000);

/// Beginning of the combined Redis script: Lua helpers that several scripts call.
pub const PRELUDE: &str = include_str!("prelude.lua");

/// The effect of an [`Operation`] on a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Takes the cost if the algorithm allows it.
    Take,
    /// Computes the decision for a take without changing the counter.
    Peek,
    /// Returns the cost to the counter, up to its full capacity.
    Refund,
    /// Undoes a take of this cost at the given instant, of the same counter and limit.
    ///
    /// Afterwards the counter is as if the take had not happened, or has slightly less remaining, never more. If the
    /// window of the take has ended, nothing is returned; a bucket regains only the part that has not drained since.
    /// The action is meant for immediately after the take: a warm-up keeps this promise only for the duration of one
    /// hit, and is slightly warmer after that. A window from the first request keeps it until the window of the take ends.
    RollBack(Micros),
}

impl Action {
    /// Returns whether the action can only increase the remaining hits.
    #[must_use]
    pub const fn releases(self) -> bool {
        matches!(self, Self::Refund | Self::RollBack(_))
    }
}

/// One operation on one counter.
#[derive(Clone, Copy, Debug)]
pub struct Operation {
    /// Action to perform.
    pub action: Action,
    /// Cost in hits; values above [`MAX_NUMBER`] count as [`MAX_NUMBER`].
    pub cost: u64,
    /// Time of the operation.
    pub now: Micros,
}

impl Operation {
    /// Returns whether an allowed cost exceeds the limit proper of a soft limit; `used` is the count after the step.
    fn is_soft(self, used: u64, max_hits: MaxHits) -> bool {
        match self.action {
            Action::Take => used > max_hits.limit(),
            Action::Peek => used.saturating_add(self.cost) > max_hits.limit(),
            Action::Refund | Action::RollBack(_) => false,
        }
    }
}

/// The caller of an operation, for algorithms that distinguish callers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestContext {
    /// Holder of the slots that are taken or released; 0 for slots without a holder.
    pub holder: u64,
    /// Number of the entity, the same on all instances, for limits whose windows differ from entity to entity.
    pub entity: u64,
    /// When the calendar windows of this entity begin, where that differs from the limit.
    pub anchor: Anchor,
    /// Index of the caller's class among the classes that share the counter.
    pub class: u8,
    /// Latency and outcome of the request that held the released slots.
    pub sample: Option<Sample>,
}

/// The latency and outcome of one request that held a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Time for which the request held the slot.
    pub latency: Micros,
    /// Whether the request timed out or the upstream rejected it because of overload.
    pub dropped: bool,
}

/// The result of an operation, as reported to the caller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// Whether the cost is allowed.
    pub allowed: bool,
    /// Whether the cost is allowed only because the limit is soft.
    pub soft: bool,
    /// Whether the cost is denied because of other callers, although the caller is within its own share.
    pub shed: bool,
    /// Limit that currently applies to this caller, if it can differ from the rule's.
    pub limit: Option<u32>,
    /// Hits that would still be allowed now within the limit.
    pub remaining: u64,
    /// Hits that currently count against the limit; above the limit if denied hits count too or the limit is soft.
    pub used: u64,
    /// Time until the full limit is available again, if no other requests arrive.
    pub reset: Micros,
    /// Time until more hits remain than now, if no other requests arrive; zero if nothing is used.
    pub next: Micros,
    /// If denied: time until the same cost would be allowed, if no other requests arrive; `None` if it never will be.
    pub retry_after: Option<Micros>,
    /// If allowed: time for which the caller must wait before it continues.
    pub delay: Micros,
}

/// The interface of every algorithm: a program that counts for a limit. Implementors are small values that are validated
/// on creation, so only [`Limiter::build`] can fail.
pub trait Limiter: CounterProgram + Into<Algorithm> {
    /// Name of the algorithm in rule files. Variants that a rule selects by a keyword of another algorithm have names
    /// with spaces.
    const NAME: &'static str;

    /// Keywords that a rule may add for this algorithm, besides those that all algorithms accept.
    const KEYWORDS: &'static [&'static str];

    /// Builds the algorithm with the parameters of a limit. A limit of 0 is only built as a [`fixed_window`].
    ///
    /// # Errors
    ///
    /// Returns an error with the keyword at fault if the parameters are out of range or not supported.
    fn build(spec: &LimitSpec) -> Result<Algorithm, InvalidLimit>;

    /// Returns parameters from which [`Self::build`] builds the same algorithm.
    ///
    /// Returns `None` if hits that another instance counted cannot be added to a counter of this algorithm.
    fn spec(&self) -> Option<LimitSpec> {
        None
    }

    /// Returns the parameter on which the meaning of a state depends, although the state does not contain it. It
    /// becomes a part of the counter's key.
    fn scope(&self) -> Option<u64> {
        None
    }

    /// Returns whether windows of different entities begin at different times.
    fn depends_on_entity(&self) -> bool {
        false
    }

    /// Returns the same algorithm for one caller, if it distinguishes callers.
    #[must_use]
    fn with_context(self, _context: RequestContext) -> Self {
        self
    }

    /// Returns the program that takes leases from the same counter: it denies takes that are only allowed by a soft
    /// limit, and its denials do not count. Returns `None` if hits that are spent later could add up to more than the
    /// limit.
    fn leasing(&self) -> Option<Program> {
        None
    }

    /// Returns the algorithm that counts hits which were allowed elsewhere: a take counts even if it is denied, and a
    /// bucket goes into debt.
    fn recording(&self) -> Algorithm {
        (*self).into()
    }

    /// Returns whether hits counted at `counted` no longer count at `now`, regardless of other hits.
    fn has_expired(&self, _counted: Micros, _now: Micros) -> bool {
        false
    }

    /// Returns whether the state contains hits of times after `now`, because the clock has stepped back. A bucket is
    /// ahead until it has drained.
    ///
    /// A step with a time before `now` could treat such a state as one that a wrong clock has written.
    fn is_ahead(&self, _state: &State, _now: Micros) -> bool {
        false
    }

    /// Returns the hits that the state contains, with the times for which they count, the oldest first. Empty for
    /// buckets, whose state is only a level.
    fn parts(&self, _state: &State, _now: Micros) -> Vec<CounterPart> {
        Vec::new()
    }
}
