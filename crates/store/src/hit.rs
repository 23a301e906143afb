//! [`Hit`]: an operation on one [`Counter`], and the decision about it.

use std::{borrow::Borrow, num::NonZeroU32};

use sluicegate_algorithm::{Action, Consistency, Decision, Micros, Operation, Program, State};
use smallvec::SmallVec;

use super::StoreError;

/// Time by which a hit can count in advance.
pub const AHEAD: Micros = Micros::new(50_000);

/// A counter in a store: its name, and the program that counts.
#[derive(Clone, Debug)]
pub struct Counter {
    /// Name of the counter, from the engine's module `key`: unambiguous, printable, and of bounded length. In Redis, the
    /// key is this name after `redis.key_prefix`.
    pub name: Vec<u8>,
    /// Program that counts: the algorithm of a limit, with its numbers, or another program.
    pub program: Program,
    /// Whether the limit has the unit second. Such limits can have a separate store.
    pub per_second: bool,
    /// Consistency of the counter among instances.
    pub consistency: Consistency,
}

impl Counter {
    /// Creates a counter with exact consistency in the main store.
    #[must_use]
    pub fn new(name: impl Into<Vec<u8>>, program: impl Into<Program>) -> Self {
        Self { name: name.into(), program: program.into(), per_second: false, consistency: Consistency::Exact }
    }

    /// Returns a take of `cost` hits that blocks on a denial or an error, without demand.
    #[must_use]
    pub const fn take(&self, cost: u64) -> Hit<&Self> {
        Hit::take(self, cost)
    }
}

/// An operation on one counter, which the hit owns or borrows.
#[derive(Clone, Copy, Debug)]
pub struct Hit<C = Counter> {
    /// The counter.
    pub counter: C,
    /// Action to perform.
    pub action: Action,
    /// Number of hits. Readers of requests bound it ([`bound_hits`](sluicegate_algorithm::bound_hits)).
    pub cost: u64,
    /// When the hit prevents every take of the request, under [`Charge::All`].
    pub blocks: Blocks,
    /// Hits that the caller could admit without a check.
    pub demand: u64,
    /// Whether a take counts as if it arrived [`AHEAD`] later, so that it can be the first one of a window.
    pub is_ahead: bool,
}

/// When a hit prevents every take of its request, under [`Charge::All`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocks {
    /// The hit prevents nothing: its limit does not deny requests.
    Never,
    /// A denial prevents them.
    OnDenial,
    /// A denial prevents them, and so does an error of the store.
    OnDenialOrError,
}

impl Blocks {
    /// Returns whether a denial of the hit prevents every take.
    #[must_use]
    pub fn on_denial(self) -> bool {
        self != Self::Never
    }

    /// Returns whether an error of the store prevents every take.
    #[must_use]
    pub fn on_error(self) -> bool {
        self == Self::OnDenialOrError
    }

    /// Returns whether an answer to the hit prevents every take. `is_allowed` returns whether the answer allows it.
    #[must_use]
    pub fn prevents<T>(self, answer: &Result<T, StoreError>, is_allowed: impl FnOnce(&T) -> bool) -> bool {
        match answer {
            Ok(answer) => self.on_denial() && !is_allowed(answer),
            Err(_) => self.on_error(),
        }
    }
}

/// Whether a request's hits are charged if one of them is denied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Charge {
    /// Each allowed hit is charged.
    #[default]
    Each,
    /// No hit is charged unless all blocking hits are allowed. The hits must name different counters.
    All,
}

impl<C> Hit<C> {
    /// Creates a take of `cost` hits that blocks on a denial or an error, without demand.
    #[must_use]
    pub const fn take(counter: C, cost: u64) -> Self {
        Self { counter, action: Action::Take, cost, blocks: Blocks::OnDenialOrError, demand: 0, is_ahead: false }
    }

    /// Returns the same hit with a take replaced by a peek.
    #[must_use]
    pub fn peek(self) -> Self {
        let action = if self.action == Action::Take { Action::Peek } else { self.action };
        Self { action, ..self }
    }

    /// Returns `true` if this decision about the hit prevents every take of the request under [`Charge::All`].
    #[must_use]
    pub fn is_denied_by(&self, answer: &Result<HitDecision, StoreError>) -> bool {
        self.blocks.prevents(answer, |answer| answer.decision.allowed)
    }
}

impl<C: Borrow<Counter>> Hit<C> {
    /// Returns the same hit, which borrows the counter.
    #[must_use]
    pub fn borrowed(&self) -> Hit<&Counter> {
        Hit {
            counter: self.counter.borrow(),
            action: self.action,
            cost: self.cost,
            blocks: self.blocks,
            demand: self.demand,
            is_ahead: self.is_ahead,
        }
    }

    /// Returns the operation of the program at a time.
    #[must_use]
    pub fn operation(&self, now: Micros) -> Operation {
        let now = if self.is_ahead && self.action == Action::Take { now + AHEAD } else { now };
        Operation { action: self.action, cost: self.cost, now }
    }
}

impl Hit<&Counter> {
    /// Returns the same hit with its own copy of the counter, which can outlive the request.
    #[must_use]
    pub fn to_owned(&self) -> Hit {
        Hit {
            counter: self.counter.clone(),
            action: self.action,
            cost: self.cost,
            blocks: self.blocks,
            demand: self.demand,
            is_ahead: self.is_ahead,
        }
    }
}

/// Decisions in the order of the hits. If the counters are on several servers, some can be errors.
pub type HitDecisions = SmallVec<[Result<HitDecision, StoreError>; 1]>;

/// Decision about one hit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HitDecision {
    /// The decision.
    pub decision: Decision,
    /// Source of the decision.
    pub decider: Decider,
    /// Hits that the caller may admit without a check.
    pub grant: Option<Grant>,
}

/// A part of this instance's lease that a caller may use without a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Number of granted hits.
    pub hits: NonZeroU32,
    /// Lifetime of the grant, from the moment at which the caller sent its check.
    pub ttl: Micros,
    /// Identifier with which the caller reports the used hits.
    pub id: u64,
}

/// The part of the service that has decided a hit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Decider {
    /// The counter in the store.
    #[default]
    Store,
    /// The deny cache: an earlier denial by the counter that is still valid.
    DenyCache,
    /// This instance's lease on the counter.
    Lease,
    /// This instance's eventual counter: the last known state of the counter, and the hits counted here since.
    Eventual,
    /// The rule's `on_error` policy, because the counter was unavailable.
    Fallback,
}

impl From<Decision> for HitDecision {
    fn from(decision: Decision) -> Self {
        Self { decision, decider: Decider::Store, grant: None }
    }
}

/// Step outcomes in the order of the hits.
pub type StepOutcomes = SmallVec<[Result<StepOutcome, StoreError>; 1]>;

/// The outcome of one step: the decision and the counter's new state.
#[derive(Clone, Debug)]
pub struct StepOutcome {
    /// Whether the hit is allowed.
    pub allowed: bool,
    /// The action performed. Under [`Charge::All`] a requested take can have become a peek.
    pub action: Action,
    /// Time of the step by the store's clock.
    pub at: Micros,
    /// State of the counter after the step.
    pub state: State,
}

impl StepOutcome {
    /// Computes the decision for the caller from the state after the step.
    #[must_use]
    pub fn explain<C: Borrow<Counter>>(&self, hit: &Hit<C>) -> Decision {
        let operation = Operation { action: self.action, ..hit.operation(self.at) };
        hit.counter.borrow().program.explain(&self.state, operation, self.allowed)
    }
}

/// Takes the next answer of a store, which has one for each hit.
///
/// # Errors
///
/// Returns the error of this answer, or [`StoreError::Missing`] if there is none.
pub fn next_answer<T>(answers: &mut impl Iterator<Item = Result<T, StoreError>>) -> Result<T, StoreError> {
    answers.next().unwrap_or_else(|| Err(StoreError::missing()))
}

/// Returns the answer about the only hit of a call.
///
/// # Errors
///
/// Returns the error of the answer, or [`StoreError::Missing`] if there is none.
pub fn only_answer<T>(answers: SmallVec<[Result<T, StoreError>; 1]>) -> Result<T, StoreError> {
    next_answer(&mut answers.into_iter())
}

#[cfg(test)]
mod tests {
    use sluicegate_algorithm::{MaxHits, fixed_window::FixedWindow, leaky_bucket::LeakyBucket};

    use super::*;

    /// Under `Charge::All`, a take that is not charged because another hit was denied has the outcome of a peek.
    #[test]
    fn an_uncharged_take_is_explained_as_a_peek() {
        let bucket = LeakyBucket::new(1, Micros::from_secs(1), MaxHits::hard(3), 1, false).unwrap();
        let counter = Counter::new(b"k", bucket);
        let (hit, at, mut state) = (counter.take(1), Micros::from_secs(9), State::default());
        assert!(counter.program.step(&mut state, hit.operation(at)));
        let delay = |action| StepOutcome { allowed: true, action, at, state: state.clone() }.explain(&hit).delay;
        assert_eq!((delay(Action::Take), delay(Action::Peek)), (Micros::ZERO, Micros::from_secs(1)));
    }

    #[test]
    fn a_peek_replaces_only_a_take() {
        let counter = Counter::new(b"k", FixedWindow::DENY_ALL);
        let roll_back = Action::RollBack(Micros::from_secs(1));
        for (action, peek) in [
            (Action::Take, Action::Peek),
            (Action::Peek, Action::Peek),
            (Action::Refund, Action::Refund),
            (roll_back, roll_back),
        ] {
            assert_eq!(Hit { action, ..counter.take(1) }.peek().action, peek);
        }
    }

    #[test]
    fn denials_and_errors_block_a_request_as_its_hits_say() {
        let counter = Counter::new(b"k", FixedWindow::DENY_ALL);
        let decision = |allowed| Ok(HitDecision::from(Decision { allowed, ..Decision::default() }));
        let answers = [decision(true), decision(false), Err(StoreError::Timeout)];
        for (blocks, on_denial, on_error) in
            [(Blocks::Never, false, false), (Blocks::OnDenial, true, false), (Blocks::OnDenialOrError, true, true)]
        {
            let hit = Hit { blocks, ..counter.take(1) };
            let is_denied = answers.map(|answer| hit.is_denied_by(&answer));
            assert_eq!(is_denied, [false, on_denial, on_error]);
        }
    }
}
