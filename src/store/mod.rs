//! Stores, which change counters atomically: [`Memory`] in this process, [`Redis`] for several instances, and [`Local`]
//! for decisions that an instance makes without a call to Redis. [`AnyStore`] is the store that the settings select.
//!
//! A store runs the algorithm's step while the counter is locked, and does not depend on the algorithm.

mod identity;
pub mod local;
pub mod memory;
mod metrics;
pub mod overrides;
pub mod peers;
mod pending;
pub mod redis;

pub use local::Local;
pub use memory::Memory;
pub use metrics::Metrics;
pub use peers::Peers;
pub use redis::Redis;

use std::num::NonZeroU32;

use smallvec::SmallVec;

use crate::algorithm::{Action, Algorithm, Consistency, Decision, Micros, Operation, State};

/// An operation on one named counter.
#[derive(Clone, Copy, Debug)]
pub struct Hit<'a> {
    /// Name of the counter: unambiguous, printable, and of bounded length.
    pub key: &'a [u8],
    /// Algorithm of the counter, with its numbers.
    pub algorithm: &'a Algorithm,
    /// Action to perform.
    pub action: Action,
    /// Number of hits.
    pub cost: u64,
    /// Whether a denial of this hit prevents every take of the request, under [`Charge::All`].
    pub blocks_on_denial: bool,
    /// Whether a store error for this hit prevents every take of the request, under [`Charge::All`].
    pub blocks_on_error: bool,
    /// Whether the limit has the unit second. Such limits can have a separate store.
    pub per_second: bool,
    /// Consistency of the counter among instances.
    pub consistency: Consistency,
    /// Hits that the caller could admit without a check.
    pub demand: u64,
    /// Whether a take counts as if it arrived [`Hit::AHEAD`] later, so that it can be the first one of a window.
    pub is_ahead: bool,
}

/// Whether a request's hits are charged if one of them is denied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Charge {
    /// Each allowed hit is charged.
    #[default]
    Each,
    /// No hit is charged unless all binding hits are allowed. The hits must name different counters.
    All,
}

impl<'a> Hit<'a> {
    /// Time by which a hit can count in advance.
    pub const AHEAD: Micros = Micros::new(50_000);

    /// Creates a binding and needed take of `cost` hits, with exact consistency and without demand.
    #[must_use]
    pub const fn take(key: &'a [u8], algorithm: &'a Algorithm, cost: u64) -> Self {
        Self {
            key,
            algorithm,
            action: Action::Take,
            cost,
            blocks_on_denial: true,
            blocks_on_error: true,
            per_second: false,
            consistency: Consistency::Exact,
            demand: 0,
            is_ahead: false,
        }
    }

    /// Returns the same hit with a take replaced by a peek.
    #[must_use]
    pub fn peek(&self) -> Self {
        let action = if self.action == Action::Take { Action::Peek } else { self.action };
        Self { action, ..*self }
    }

    /// Returns `true` if this decision about the hit prevents every take of the request under [`Charge::All`].
    #[must_use]
    pub fn is_denied_by(&self, answer: &Result<HitDecision, StoreError>) -> bool {
        match answer {
            Ok(answer) => self.blocks_on_denial && !answer.decision.allowed,
            Err(_) => self.blocks_on_error,
        }
    }

    fn operation(&self, now: Micros) -> Operation {
        let now = if self.is_ahead && self.action == Action::Take { now + Self::AHEAD } else { now };
        Operation { action: self.action, cost: self.cost, now }
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

/// Source of a decision.
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
    pub fn explain(&self, hit: &Hit<'_>) -> Decision {
        let operation = Operation { action: self.action, ..hit.operation(self.at) };
        hit.algorithm.explain(&self.state, operation, self.allowed)
    }
}

/// The reports of instances about their activity.
#[derive(Clone, Debug, Default)]
pub struct ActivityReports {
    /// Whether any instance reads reports at the moment.
    pub is_read: bool,
    /// The report of each instance, by its name. Empty unless the caller reads them.
    pub reports: Vec<(String, Vec<u8>)>,
}

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
}

impl StoreError {
    /// All errors.
    pub const ALL: [Self; 4] = [Self::Unavailable, Self::Timeout, Self::Rejected, Self::Broken];

    /// Returns the error's label value in metrics.
    #[must_use]
    pub const fn kind(self) -> &'static str {
        match self {
            Self::Unavailable => "unavailable",
            Self::Timeout => "timeout",
            Self::Rejected => "rejected",
            Self::Broken => "broken",
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
    fn apply(&self, hits: &[Hit<'_>], charge: Charge, now: Micros) -> impl Future<Output = HitDecisions> + Send;
}

/// A store that returns the state of its counters, from which [`Local`] can compute further decisions.
pub trait CounterStore {
    /// Decides all hits as [`Store::apply`] does, and returns the counters' new states.
    fn step(&self, hits: &[Hit<'_>], charge: Charge, now: Micros) -> impl Future<Output = StepOutcomes> + Send;
}

/// The store selected by the settings.
#[derive(Clone)]
pub enum AnyStore {
    /// Counters in this process.
    Memory(std::sync::Arc<Memory>),
    /// Counters in Redis, on one server or several.
    Redis(Local<Redis>),
}

impl AnyStore {
    /// Returns whether [`Store::apply`] never waits.
    #[must_use]
    pub const fn never_waits(&self) -> bool {
        matches!(self, Self::Memory(_))
    }

    /// Returns idle leases to the store and reports the hits of eventual counters. Must be called periodically.
    pub async fn sweep(&self, now: Micros) {
        if let Self::Redis(local) = self {
            local.sweep(now).await;
        }
    }

    /// Finishes grant `id` of the hit's counter and returns the unused hits to the lease.
    ///
    /// `used` is the number of hits that the caller reports as admitted. Returns the number of them that the grant
    /// covered, which is 0 for an unknown grant.
    pub fn report(&self, hit: &Hit<'_>, id: u64, used: u64, now: Micros) -> u64 {
        match self {
            Self::Memory(_) => 0,
            Self::Redis(local) => local.report(hit, id, used, now),
        }
    }

    /// Returns the shared state of the hit's counter, and its time by the store's clock. Nothing is taken.
    ///
    /// # Errors
    ///
    /// Returns an error if Redis is unavailable, does not answer within the deadline, or rejects the call.
    pub async fn read(&self, hit: &Hit<'_>, now: Micros) -> Result<(State, Micros), StoreError> {
        match self {
            Self::Memory(memory) => Ok((memory.state(hit.key), now)),
            Self::Redis(local) => {
                let outcome = local.store().step(&[hit.peek()], Charge::Each, now).await.pop();
                outcome.unwrap_or(Err(StoreError::Rejected)).map(|outcome| (outcome.state, outcome.at))
            }
        }
    }

    /// Returns the numbers of operations decided from a lease, from an eventual counter and from the deny cache.
    #[must_use]
    pub fn local_decisions(&self) -> [u64; 3] {
        match self {
            Self::Memory(_) => [0; 3],
            Self::Redis(local) => local.metrics().decisions(),
        }
    }

    /// Deletes a counter and returns whether it existed. Leases on the counter remain valid until they end.
    ///
    /// # Errors
    ///
    /// Returns an error if Redis is unavailable, does not answer within the deadline, or rejects the call.
    pub async fn delete(&self, key: &[u8], per_second: bool) -> Result<bool, StoreError> {
        match self {
            Self::Memory(memory) => Ok(memory.delete(key)),
            Self::Redis(local) => local.delete(key, per_second).await,
        }
    }

    /// Returns the prefix of all counter names in the store.
    #[must_use]
    pub fn key_prefix(&self) -> &str {
        match self {
            Self::Memory(_) => "",
            Self::Redis(local) => local.store().key_prefix(),
        }
    }

    /// Returns the server of a counter. Returns `None` if the counter is in memory or its server is unknown.
    #[must_use]
    pub fn server_of(&self, key: &[u8], per_second: bool) -> Option<std::sync::Arc<str>> {
        match self {
            Self::Memory(_) => None,
            Self::Redis(local) => local.store().server_of(key, per_second),
        }
    }

    /// Returns the hash slot of a counter in Redis Cluster; `None` in other stores.
    #[must_use]
    pub fn hash_slot_of(&self, key: &[u8], per_second: bool) -> Option<u16> {
        match self {
            Self::Memory(_) => None,
            Self::Redis(local) => local.store().hash_slot_of(key, per_second),
        }
    }

    /// Returns the name of the topology: `memory`, `server`, `sentinel`, `cluster` or `ring`.
    #[must_use]
    pub fn topology(&self) -> &'static str {
        match self {
            Self::Memory(_) => "memory",
            Self::Redis(local) => local.store().topology(),
        }
    }

    /// Returns the name of each server and whether all workers are connected to it. The list is empty in memory.
    #[must_use]
    pub fn servers(&self) -> Vec<(std::sync::Arc<str>, bool)> {
        match self {
            Self::Memory(_) => Vec::new(),
            Self::Redis(local) => local.store().servers(),
        }
    }

    /// Returns all leases to the store and reports all hits of eventual counters. To be called at shutdown.
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

/// Returns the address with its password replaced by `***`, for logs and `--print-settings`.
#[must_use]
pub fn redact(url: &str) -> String {
    // Parsers of URLs ignore tabs and line breaks.
    let url = url.replace(['\t', '\n', '\r'], "");
    let Some((scheme, rest)) = url.split_once(':') else {
        return url;
    };
    // The address of a Unix socket (`unix:/path`, `unix:///path`) contains the password as a parameter.
    let is_socket = rest.strip_prefix("//").unwrap_or(rest).starts_with('/');
    if let Some((path, query)) = rest.split_once('?').filter(|_| is_socket) {
        let mask = |parameter: &str| match parameter.split_once('=') {
            Some((name, _)) if !matches!(name, "db" | "user" | "protocol") => format!("{name}=***"),
            _ => parameter.to_owned(),
        };
        let parameters: Vec<_> = query.split('&').map(mask).collect();
        return format!("{scheme}:{path}?{}", parameters.join("&"));
    }
    let Some(rest) = rest.strip_prefix("//") else {
        return url;
    };
    // A password can contain an unescaped @ or /, so everything up to the last @ is treated as secret.
    let Some(credentials) = rest.rfind('@').map(|end| &rest[..end]) else {
        return url;
    };
    let user = credentials.split(':').next().filter(|_| credentials.contains(':')).unwrap_or_default();
    format!("{scheme}://{user}:***{}", &rest[credentials.len()..])
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{
        algorithm::{MaxHits, fixed_window::FixedWindow, leaky_bucket::LeakyBucket},
        metrics::WorkerId,
    };

    /// Under `Charge::All`, a take that is not charged because another hit was denied has the outcome of a peek.
    #[test]
    fn an_uncharged_take_is_explained_as_a_peek() {
        let rule: Algorithm = LeakyBucket::new(1, Micros::from_secs(1), MaxHits::hard(3), 1, false).unwrap().into();
        let (hit, at, mut state) = (Hit::take(b"k", &rule, 1), Micros::from_secs(9), State::default());
        assert!(rule.step(&mut state, Operation { action: Action::Take, cost: 1, now: at }));
        let delay = |action| StepOutcome { allowed: true, action, at, state: state.clone() }.explain(&hit).delay;
        assert_eq!((delay(Action::Take), delay(Action::Peek)), (Micros::ZERO, Micros::from_secs(1)));
    }

    #[test]
    fn redacts_every_password() {
        for (url, redacted) in [
            ("memory", "memory"),
            ("redis://localhost:6379/1", "redis://localhost:6379/1"),
            ("redis://:secret@localhost", "redis://:***@localhost"),
            ("rediss://app:s3cr@t@host:1/2", "rediss://app:***@host:1/2"),
            ("redis://secret@host", "redis://:***@host"),
            ("redis://:a/b@host/1", "redis://:***@host/1"),
            ("redis://:a?b@host", "redis://:***@host"),
            ("redis:\t//:sec\nret@host", "redis://:***@host"),
            ("unix:/s?pass=secret", "unix:/s?pass=***"),
            ("redis+unix:///run/redis?db=1", "redis+unix:///run/redis?db=1"),
            ("redis+unix:///run/redis?user=app&pass=s@cret&db=1", "redis+unix:///run/redis?user=app&pass=***&db=1"),
            ("redis+unix:///run/redis?p%61ss=secret", "redis+unix:///run/redis?p%61ss=***"),
        ] {
            assert_eq!(redact(url), redacted);
        }
    }

    #[test]
    fn a_peek_replaces_only_a_take() {
        let rule: Algorithm = FixedWindow::DENY_ALL.into();
        let roll_back = Action::RollBack(Micros::from_secs(1));
        for (action, peek) in [
            (Action::Take, Action::Peek),
            (Action::Peek, Action::Peek),
            (Action::Refund, Action::Refund),
            (roll_back, roll_back),
        ] {
            assert_eq!(Hit { action, ..Hit::take(b"k", &rule, 1) }.peek().action, peek);
        }
    }

    #[test]
    fn denials_of_binding_hits_and_errors_of_needed_hits_block_a_request() {
        let rule: Algorithm = FixedWindow::DENY_ALL.into();
        let decision = |allowed| Ok(HitDecision::from(Decision { allowed, ..Decision::default() }));
        let answers = [decision(true), decision(false), Err(StoreError::Timeout)];
        for (blocks_on_denial, blocks_on_error) in [(true, true), (true, false), (false, true), (false, false)] {
            let hit = Hit { blocks_on_denial, blocks_on_error, ..Hit::take(b"k", &rule, 1) };
            let is_denied = answers.map(|answer| hit.is_denied_by(&answer));
            assert_eq!(is_denied, [false, blocks_on_denial, blocks_on_error]);
        }
    }

    #[tokio::test]
    async fn counters_in_memory_have_a_state_and_no_server() {
        let store = AnyStore::Memory(Arc::new(Memory::new(&memory::Settings::default())));
        let rule: Algorithm = FixedWindow::new(MaxHits::hard(5), Micros::from_secs(60), false).unwrap().into();
        let (hit, now) = (Hit::take(b"{d|k=v}", &rule, 2), Micros::from_secs(60));
        assert!(store.apply(&[hit], Charge::Each, now).await[0].unwrap().decision.allowed);
        let (state, at) = store.read(&hit, now).await.unwrap();
        assert_eq!((rule.explain(&state, hit.peek().operation(at), true).used, at), (2, now));
        assert_eq!([store.delete(hit.key, false).await, store.delete(hit.key, false).await], [Ok(true), Ok(false)]);
        assert_eq!((store.report(&hit, 1, 1, now), store.local_decisions()), (0, [0; 3]));
        assert_eq!((store.topology(), store.key_prefix(), store.servers()), ("memory", "", Vec::new()));
        assert_eq!((store.server_of(hit.key, false), store.hash_slot_of(hit.key, false)), (None, None));
    }

    /// The servers are unreachable.
    #[tokio::test]
    async fn counters_in_redis_have_a_server_or_a_hash_slot() {
        let start = |url: &str| {
            let (metrics, worker, settings) = (Metrics::new(1), WorkerId(0), redis::Settings::default());
            let (deny_cache, leases, eventual) = Default::default();
            let local = Arc::clone(metrics.local());
            let shared = local::Shared::new(&deny_cache, &leases, &eventual, local::Clock::Caller, local);
            let setup = redis::Setup::new(url, &settings, redis::Time::Caller, metrics).unwrap();
            AnyStore::Redis(Local::new(setup.connect(worker), shared, worker))
        };
        let location = |store: &AnyStore| (store.server_of(b"{foo}x", false), store.hash_slot_of(b"{foo}x", false));
        let (server, cluster) = (start("redis://127.0.0.1:1"), start("redis+cluster://127.0.0.1:1"));
        assert_eq!((server.topology(), server.key_prefix()), ("server", "sluicegate:"));
        assert_eq!(server.servers(), [(Arc::from("127.0.0.1:1"), false)]);
        assert_eq!(location(&server), (Some("127.0.0.1:1".into()), None));
        assert_eq!(cluster.topology(), "cluster");
        assert_eq!(location(&cluster), (None, Some(12_182)), "`CLUSTER KEYSLOT foo`");
    }
}
