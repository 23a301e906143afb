//! Remember it, atomically: counters in this process ([`Memory`]) or in Redis ([`Redis`]), and before those what this
//! instance need not ask ([`Local`]).
//!
//! A store runs the algorithm's step where the counter is locked. It never asks which algorithm it is.

mod identity;
pub mod local;
pub mod memory;
mod metrics;
pub mod overrides;
pub mod redis;

pub use local::Local;
pub use memory::Memory;
pub use metrics::Metrics;
pub use redis::Redis;

use std::num::NonZeroU32;

use smallvec::SmallVec;

use crate::algorithm::{Action, Algorithm, Consistency, Decision, Micros, Operation, State};

/// One question to one counter, under its name.
#[derive(Clone, Copy, Debug)]
pub struct Hit<'a> {
    /// The counter's name: unambiguous, printable, bounded.
    pub key: &'a [u8],
    /// How it counts.
    pub algorithm: &'a Algorithm,
    /// What to do.
    pub action: Action,
    /// How many hits.
    pub cost: u64,
    /// Under [`Charge::All`]: when it does not pass, no hit takes anything.
    pub binding: bool,
    /// Under [`Charge::All`]: the same when nobody can decide it.
    pub needed: bool,
    /// Of a limit of unit second, which may have a store of its own.
    pub per_second: bool,
    /// What may be decided without asking.
    pub consistency: Consistency,
    /// So many hits the caller could admit by itself.
    pub demand: u64,
}

/// Who pays when the hits of one call do not all pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Charge {
    /// Each hit takes its own.
    #[default]
    Each,
    /// None takes anything unless all that are binding pass. No counter is named twice.
    All,
}

impl<'a> Hit<'a> {
    /// A take on whose refusal all depends.
    #[must_use]
    pub const fn take(key: &'a [u8], algorithm: &'a Algorithm, cost: u64) -> Self {
        Self {
            key,
            algorithm,
            action: Action::Take,
            cost,
            binding: true,
            needed: true,
            per_second: false,
            consistency: Consistency::Exact,
            demand: 0,
        }
    }

    /// The same without taking anything.
    #[must_use]
    pub fn peek(&self) -> Self {
        let action = if self.action == Action::Take { Action::Peek } else { self.action };
        Self { action, ..*self }
    }

    /// Whether nothing may be taken when this is the answer, if all are charged together.
    #[must_use]
    pub fn is_denied_by(&self, answer: &Result<HitDecision, StoreError>) -> bool {
        match answer {
            Ok(answer) => self.binding && !answer.decision.allowed,
            Err(_) => self.needed,
        }
    }

    fn operation(&self, now: Micros) -> Operation {
        Operation { action: self.action, cost: self.cost, now }
    }
}

/// The answers, in the order of the hits. Hits that live on several servers can have different fates.
pub type HitDecisions = SmallVec<[Result<HitDecision, StoreError>; 1]>;

/// The answer to one hit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HitDecision {
    /// What it says.
    pub decision: Decision,
    /// Whose it is.
    pub decider: Decider,
    /// Hits that the caller may admit by itself.
    pub grant: Option<Grant>,
}

/// Hits that a caller may admit by itself, of those that this instance has taken in advance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// How many.
    pub hits: NonZeroU32,
    /// For how long, from the moment at which the caller asked.
    pub ttl: Micros,
    /// By which the caller says what has become of it.
    pub id: u64,
}

/// Who decided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Decider {
    /// The counter.
    #[default]
    Store,
    /// A refusal of the counter's that still holds.
    DenyCache,
    /// What this instance has taken of the counter in advance.
    Lease,
    /// What this instance has heard of the counter, and counted since.
    Eventual,
    /// The rule's `on_error`: the counter was out of reach.
    Fallback,
}

impl From<Decision> for HitDecision {
    fn from(decision: Decision) -> Self {
        Self { decision, decider: Decider::Store, grant: None }
    }
}

/// What counters have become, in the order of the hits.
pub type StepOutcomes = SmallVec<[Result<StepOutcome, StoreError>; 1]>;

/// What a step did to one counter, and what it left.
#[derive(Clone, Debug)]
pub struct StepOutcome {
    /// Whether the hit passes.
    pub allowed: bool,
    /// What was done: under [`Charge::All`] not always what was asked.
    pub action: Action,
    /// When, by the store's clock.
    pub at: Micros,
    /// The counter afterwards.
    pub state: State,
}

impl StepOutcome {
    /// What to tell the caller.
    #[must_use]
    pub fn explain(&self, hit: &Hit<'_>) -> Decision {
        let ask = Operation { action: self.action, ..hit.operation(self.at) };
        hit.algorithm.explain(&self.state, ask, self.allowed)
    }
}

/// Nobody could decide. That a caller is over its limit is never an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The store is known to be out of reach; it was not asked.
    #[error("the store is out of reach")]
    Unavailable,
    /// The store did not answer within the deadline. The hits may or may not have been counted.
    #[error("the store did not answer in time")]
    Timeout,
    /// The store answered something else than decisions.
    #[error("the store refused the call")]
    Rejected,
    /// The connection broke. The hits may or may not have been counted.
    #[error("the connection to the store broke")]
    Broken,
}

impl StoreError {
    /// Every error.
    pub const ALL: [Self; 4] = [Self::Unavailable, Self::Timeout, Self::Rejected, Self::Broken];

    /// A word for metrics.
    #[must_use]
    pub const fn kind(self) -> &'static str {
        match self {
            Self::Unavailable => "unavailable",
            Self::Timeout => "timeout",
            Self::Rejected => "refused",
            Self::Broken => "broken",
        }
    }
}

/// What a store must guarantee: the hits of one call are decided in order and each atomically (under [`Charge::All`]
/// all together), however many callers there are in however many processes; one call is one round trip to each server
/// that has a part in it; it ends within the store's deadline.
///
/// Under [`Charge::All`] hits on several servers are taken apart, and given back where one does not pass: what that
/// means for others is in docs/operations.md.
pub trait Store {
    /// Decides all hits of one request. `now` is the service's clock; a store with a clock of its own may use that.
    fn apply(&self, hits: &[Hit<'_>], charge: Charge, now: Micros) -> impl Future<Output = HitDecisions> + Send;
}

/// A store that says what its counters have become, so that others can go on from there.
pub trait CounterStore {
    /// As [`Store::apply`].
    fn step(&self, hits: &[Hit<'_>], charge: Charge, now: Micros) -> impl Future<Output = StepOutcomes> + Send;
}

/// The stores there are, as one type.
#[derive(Clone)]
pub enum AnyStore {
    /// In this process.
    Memory(std::sync::Arc<Memory>),
    /// In Redis, on one server or on many.
    Redis(Local<Redis>),
}

impl AnyStore {
    /// Gives back what was taken in advance and nobody asks for any more, and tells what was counted here. To be called now
    /// and then.
    pub async fn sweep(&self, now: Micros) {
        if let Self::Redis(local) = self {
            local.sweep(now).await;
        }
    }

    /// A caller has done with a grant of the counter that this hit asks, and has admitted so many hits of it: so many of
    /// them were his.
    pub fn report(&self, hit: &Hit<'_>, id: u64, spent: u64, now: Micros) -> u64 {
        match self {
            Self::Memory(_) => 0,
            Self::Redis(local) => local.report(hit, id, spent, now),
        }
    }

    /// Forgets a counter; whether there was one. What instances have taken of it in advance stays theirs until it ends.
    pub async fn forget(&self, key: &[u8], per_second: bool) -> Result<bool, StoreError> {
        match self {
            Self::Memory(memory) => Ok(memory.forget(key)),
            Self::Redis(local) => local.forget(key, per_second).await,
        }
    }

    /// What stands before a counter's name.
    #[must_use]
    pub fn key_prefix(&self) -> &str {
        match self {
            Self::Memory(_) => "",
            Self::Redis(local) => local.store().key_prefix(),
        }
    }

    /// The server that has a counter, as far as is known; `None` in memory.
    #[must_use]
    pub fn server_of(&self, key: &[u8], per_second: bool) -> Option<std::sync::Arc<str>> {
        match self {
            Self::Memory(_) => None,
            Self::Redis(local) => local.store().server_of(key, per_second),
        }
    }

    /// The servers by name, and whether every worker can ask them; none in memory.
    #[must_use]
    pub fn servers(&self) -> Vec<(std::sync::Arc<str>, bool)> {
        match self {
            Self::Memory(_) => Vec::new(),
            Self::Redis(local) => local.store().servers(),
        }
    }

    /// Gives back all that was taken in advance, and tells all that was counted here, at the end.
    pub async fn return_all(&self, now: Micros) {
        if let Self::Redis(local) = self {
            local.return_all(now).await;
        }
    }
}

impl Store for AnyStore {
    async fn apply(&self, hits: &[Hit<'_>], charge: Charge, now: Micros) -> HitDecisions {
        match self {
            Self::Memory(memory) => memory.apply(hits, charge, now),
            Self::Redis(redis) => redis.apply(hits, charge, now).await,
        }
    }
}

/// The address without its password, for logs and `--print-settings`.
#[must_use]
pub fn redact(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else {
        return url.to_owned();
    };
    // A password may hold an @ or a / that is not escaped: everything up to the last @ is secret.
    let Some(credentials) = rest.rfind('@').map(|end| &rest[..end]) else {
        return url.to_owned();
    };
    let user = credentials.split(':').next().filter(|_| credentials.contains(':')).unwrap_or_default();
    format!("{scheme}://{user}:***{}", &rest[credentials.len()..])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::{MaxHits, leaky_bucket::LeakyBucket};

    /// Charged together with one that was refused, a hit was not taken, whatever was asked.
    #[test]
    fn what_was_only_looked_at_is_told_as_a_look() {
        let rule: Algorithm = LeakyBucket::new(1, Micros::from_secs(1), MaxHits::hard(3), 1, false).unwrap().into();
        let (hit, at, mut state) = (Hit::take(b"k", &rule, 1), Micros::from_secs(9), State::default());
        assert!(rule.step(&mut state, Operation { action: Action::Take, cost: 1, now: at }));
        let delay = |action| StepOutcome { allowed: true, action, at, state: state.clone() }.explain(&hit).delay;
        assert_eq!((delay(Action::Take), delay(Action::Peek)), (Micros::ZERO, Micros::from_secs(1)));
    }

    #[test]
    fn a_password_is_never_shown() {
        for (url, shown) in [
            ("memory", "memory"),
            ("redis://localhost:6379/1", "redis://localhost:6379/1"),
            ("redis://:secret@localhost", "redis://:***@localhost"),
            ("rediss://app:s3cr@t@host:1/2", "rediss://app:***@host:1/2"),
            ("redis://secret@host", "redis://:***@host"),
            ("redis://:a/b@host/1", "redis://:***@host/1"),
        ] {
            assert_eq!(redact(url), shown);
        }
    }
}
