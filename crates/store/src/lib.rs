#![doc = include_str!("../README.md")]

mod call_metrics;
pub mod health;
mod hit;
pub mod identity;
pub mod memory;
pub mod overrides;
pub mod pending;
mod server_metrics;
mod time_source;
mod tls;

pub use call_metrics::CallMetrics;
pub use hit::{
    AHEAD, Blocks, Charge, Counter, Decider, Grant, Hit, HitDecision, HitDecisions, StepOutcome, StepOutcomes,
    next_answer, only_answer,
};
pub use memory::Memory;
pub use server_metrics::ServerMetrics;
pub use time_source::TimeSource;
pub use tls::TlsSettings;

use std::sync::Arc;

use sluicegate_algorithm::{Micros, State};

/// Error returned when the store could not decide a hit. A denial is never an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The store is known to be unavailable. The call was not sent.
    #[error("store is unavailable")]
    Unavailable,
    /// The store did not answer within the deadline. The hits may or may not have been counted.
    #[error("store did not answer within the deadline")]
    Timeout,
    /// The store answered with an error instead of decisions.
    #[error("store rejected the call")]
    Rejected,
    /// The connection broke. The hits may or may not have been counted.
    #[error("connection to the store failed")]
    Broken,
    /// The service has no answer of the store: an impossible state. The hits may or may not have been counted.
    #[error("the answer of the store is missing, which is a bug of the service")]
    Missing,
}

impl StoreError {
    /// All errors.
    pub const ALL: [Self; 5] = [Self::Unavailable, Self::Timeout, Self::Rejected, Self::Broken, Self::Missing];

    /// Returns the error for an answer that must be there and is not. Panics in debug builds.
    #[must_use]
    #[track_caller]
    pub fn missing() -> Self {
        debug_assert!(false, "an answer of the store is missing");
        Self::Missing
    }

    /// Returns the error's label value in metrics.
    #[must_use]
    pub const fn kind(self) -> &'static str {
        match self {
            Self::Unavailable => "unavailable",
            Self::Timeout => "timeout",
            Self::Rejected => "rejected",
            Self::Broken => "broken",
            Self::Missing => "missing",
        }
    }
}

/// A store of counters.
///
/// A store guarantees, for any number of callers in any number of processes:
///
/// - The hits of one call are decided in order, and each one atomically. Under [`Charge::All`] they are decided
///   atomically together.
/// - One call is one round trip to each server that has one of its counters.
/// - A call ends within the store's deadline.
///
/// Under [`Charge::All`], hits on several servers are taken on each server separately, and rolled back if one is
/// denied. `docs/guides/redis.md` describes the effect on other callers.
pub trait Store {
    /// Decides all hits of one request. `now` is the service's time; a store with its own clock may use that instead.
    fn apply(&self, hits: &[Hit<&Counter>], charge: Charge, now: Micros) -> impl Future<Output = HitDecisions> + Send;

    /// Returns the shared state of a counter, and its time by the store's clock. Nothing is taken.
    ///
    /// # Errors
    ///
    /// Returns an error if the store is unavailable, does not answer within the deadline, or rejects the call.
    fn read(&self, counter: &Counter, now: Micros) -> impl Future<Output = Result<(State, Micros), StoreError>> + Send;

    /// Deletes a counter and returns whether it existed. Leases on the counter remain valid until they end.
    ///
    /// # Errors
    ///
    /// Returns an error if the store is unavailable, does not answer within the deadline, or rejects the call.
    fn delete(&self, name: &[u8], per_second: bool) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Finishes grant `id` of a counter and returns the unused hits to the lease.
    ///
    /// `used` is the number of hits that the caller reports as admitted. Returns the number of them that the grant
    /// covered, which is 0 for an unknown grant and in a store without grants.
    fn report(&self, counter: &Counter, id: u64, used: u64, now: Micros) -> u64;
}

impl<S: Store + Send + Sync> Store for Arc<S> {
    async fn apply(&self, hits: &[Hit<&Counter>], charge: Charge, now: Micros) -> HitDecisions {
        (**self).apply(hits, charge, now).await
    }

    async fn read(&self, counter: &Counter, now: Micros) -> Result<(State, Micros), StoreError> {
        (**self).read(counter, now).await
    }

    async fn delete(&self, name: &[u8], per_second: bool) -> Result<bool, StoreError> {
        (**self).delete(name, per_second).await
    }

    fn report(&self, counter: &Counter, id: u64, used: u64, now: Micros) -> u64 {
        (**self).report(counter, id, used, now)
    }
}

/// The servers of a store, for operators.
pub trait Servers {
    /// Returns the name of the servers' software in lower case, such as `redis`.
    fn software(&self) -> &'static str;

    /// Returns the name of the topology, such as `cluster`.
    fn topology(&self) -> &'static str;

    /// Returns the name of each server and whether every worker is connected to it.
    fn servers(&self) -> Vec<(Arc<str>, bool)>;

    /// Returns the prefix of the keys.
    fn key_prefix(&self) -> &str;

    /// Returns the name of the server that has a counter, if it is known.
    fn server_of(&self, name: &[u8], per_second: bool) -> Option<Arc<str>>;

    /// Returns the hash slot of a counter, if the servers form a cluster.
    fn hash_slot_of(&self, _name: &[u8], _per_second: bool) -> Option<u16> {
        None
    }
}

/// A store that returns the state of its counters, for a store in front of it that computes further decisions.
pub trait CounterStore {
    /// Decides all hits as [`Store::apply`] does, and returns the counters' new states.
    fn step(&self, hits: &[Hit<&Counter>], charge: Charge, now: Micros) -> impl Future<Output = StepOutcomes> + Send;

    /// Deletes a counter and returns whether it existed, as [`Store::delete`] does.
    fn delete(&self, name: &[u8], per_second: bool) -> impl Future<Output = Result<bool, StoreError>> + Send;
}
