//! Decisions that an instance makes without a call to the shared store. [`Local`] wraps the store of one worker.
//!
//! A hit passes the parts in this order, until one of them decides it. Settings can turn off eventual counters, leases
//! and the deny cache.
//!
//! ```text
//! Local                 entry point of one worker
//!   EventualCounters    counters that are decided locally and synchronised at an interval (`consistency: eventual`)
//!   Leases              hits that were taken from the store in advance (`consistency: leased`)
//!   DenyCache           denials that are still valid
//!   CounterStore        the shared store
//! ```

mod counter_map;
mod deny_cache;
mod eventual;
mod hot_counters;
mod leases;
mod metrics;
#[cfg(test)]
mod model;
mod store_call;

pub use deny_cache::Settings as DenyCacheSettings;
pub use eventual::Settings as EventualSettings;
pub use leases::Settings as LeaseSettings;
pub use metrics::Metrics;

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use sluicegate_algorithm::{Consistency, Decision, Micros, State};
use sluicegate_metrics::WorkerId;
use sluicegate_store::{
    Charge, Counter, CounterStore, Decider, Hit, HitDecision, HitDecisions, StepOutcome, Store, StoreError, TimeSource,
    identity::Secret, next_answer, only_answer,
};
use smallvec::SmallVec;
use tokio::time::Instant;

use self::{
    deny_cache::{CachedDenial, CachedDenials, DenyCache, Lookups},
    eventual::EventualCounters,
    leases::{LeaseDecision, LeasePayment, LeasePayments, Leases},
    store_call::StoreCall,
};

/// The state that all workers of an instance share: deny cache, leases and eventual counters.
pub struct LocalState {
    deny_cache: Option<DenyCache>,
    leases: Option<Leases>,
    eventual_counters: Option<EventualCounters>,
    secret: Secret,
    /// Source of the time that measures ages and lifetimes.
    time_source: TimeSource,
    started: Instant,
    metrics: Arc<Metrics>,
}

impl LocalState {
    /// Creates an empty state.
    #[must_use]
    pub fn new(
        deny_cache: &DenyCacheSettings,
        leases: &LeaseSettings,
        eventual: &EventualSettings,
        time_source: TimeSource,
        metrics: Arc<Metrics>,
    ) -> Arc<Self> {
        Arc::new(Self {
            deny_cache: DenyCache::new(deny_cache),
            leases: Leases::new(leases),
            eventual_counters: EventualCounters::new(eventual),
            secret: Secret::random(),
            time_source,
            started: Instant::now(),
            metrics,
        })
    }

    /// Returns the time for ages and lifetimes, for a call at `now`.
    fn time(&self, now: Micros) -> Duration {
        match self.time_source {
            TimeSource::Own => self.started.elapsed(),
            TimeSource::Caller => Duration::from_micros(now.get()),
        }
    }

    fn identity(&self, hit: &Hit<&Counter>) -> u128 {
        self.identity_of(&hit.counter.name, hit.counter.per_second)
    }

    /// Returns the hash of a counter's name. `per_second` separates counters of the same name in the main store and in
    /// the store for limits of unit second.
    fn identity_of(&self, key: &[u8], per_second: bool) -> u128 {
        self.secret.identity(key) ^ u128::from(per_second)
    }
}

/// A store that decides hits from the instance's shared state where possible, and otherwise in the store that it wraps.
#[derive(Clone)]
pub struct Local<S> {
    store: S,
    state: Arc<LocalState>,
    worker: WorkerId,
}

impl<S> Local<S> {
    /// Wraps the store of one worker.
    pub fn new(store: S, state: Arc<LocalState>, worker: WorkerId) -> Self {
        Self { store, state, worker }
    }

    /// Returns the wrapped store.
    pub fn store(&self) -> &S {
        &self.store
    }

    /// Returns the metrics that all workers share.
    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        &self.state.metrics
    }
}

/// Time of a call by the service's clock (`now`), and for ages and lifetimes in this instance (`local`).
#[derive(Clone, Copy)]
struct CallTime {
    now: Micros,
    local: Duration,
}

impl<S: CounterStore + Clone + Send + Sync + 'static> Store for Local<S> {
    async fn apply(&self, hits: &[Hit<&Counter>], charge: Charge, now: Micros) -> HitDecisions {
        let time = CallTime { now, local: self.state.time(now) };
        match &self.state.eventual_counters {
            Some(counters) if hits.iter().any(|hit| hit.counter.consistency == Consistency::Eventual) => {
                self.apply_eventual(counters, hits, charge, time).await
            }
            _ => self.apply_leased(hits, charge, time).await,
        }
    }

    /// Reads the shared counter, not this instance's cache, lease or eventual counter.
    async fn read(&self, counter: &Counter, now: Micros) -> Result<(State, Micros), StoreError> {
        let outcome = only_answer(self.store.step(&[counter.take(1).peek()], Charge::Each, now).await)?;
        Ok((outcome.state, outcome.at))
    }

    /// Deletes a counter in the store and in the deny cache, and returns whether it existed in the store.
    async fn delete(&self, name: &[u8], per_second: bool) -> Result<bool, StoreError> {
        let existed = self.store.delete(name, per_second).await?;
        if let Some(deny_cache) = &self.state.deny_cache {
            deny_cache.invalidate(self.state.identity_of(name, per_second));
        }
        Ok(existed)
    }

    fn report(&self, counter: &Counter, id: u64, used: u64, now: Micros) -> u64 {
        let Some(leases) = &self.state.leases else {
            return 0;
        };
        let identity = self.state.identity_of(&counter.name, counter.per_second);
        let Some(grant) = leases.report(identity, id, used, self.state.time(now)) else {
            return 0;
        };
        self.state.metrics.add_grant_report(self.worker, grant.used, grant.returned);
        if let Some(rollback) = grant.rollback {
            self.spawn_call(rollback, now);
        }
        grant.used
    }
}

impl<S: CounterStore + Clone + Send + Sync + 'static> Local<S> {
    /// Decides hits from leases, the deny cache or the store.
    async fn apply_leased(&self, hits: &[Hit<&Counter>], charge: Charge, time: CallTime) -> HitDecisions {
        match &self.state.leases {
            Some(leases) if hits.iter().any(|hit| hit.counter.consistency == Consistency::Leased) => {
                let payments = self.take_from_leases(leases, hits, time);
                if let Some(all) = payments.iter().map(|payment| payment.decision.map(from_lease)).collect() {
                    return all;
                }
                Box::pin(self.apply_unpaid(leases, hits, payments, charge, time)).await
            }
            _ => self.apply_with_deny_cache(hits, charge, time).await,
        }
    }

    /// Takes hits from leases as far as the leases cover the costs, and starts the calls that refill the leases.
    fn take_from_leases(&self, leases: &Leases, hits: &[Hit<&Counter>], time: CallTime) -> SmallVec<[LeasePayment; 2]> {
        let identities: SmallVec<[u128; 2]> = hits.iter().map(|hit| self.state.identity(hit)).collect();
        let LeasePayments { payments, calls } = leases.take(hits, &identities, time.local);
        for call in calls {
            self.spawn_call(call, time.now);
        }
        let mut decisions = 0;
        let mut granted_hits = 0;
        for payment in &payments {
            let Some(decision) = payment.decision else {
                continue;
            };
            decisions += 1;
            if let Some(grant) = decision.grant {
                granted_hits += u64::from(grant.hits.get());
            }
        }
        self.state.metrics.lease_decisions.add(self.worker, decisions);
        self.state.metrics.granted_hits.add(self.worker, granted_hits);
        payments
    }

    /// Decides the costs that leases did not cover, and acquires leases for the counters concerned.
    ///
    /// A denied hit returns its [`LeasePayment`] to the lease. Under [`Charge::All`], a denied blocking hit returns all
    /// payments.
    async fn apply_unpaid(
        &self,
        leases: &Leases,
        hits: &[Hit<&Counter>],
        payments: SmallVec<[LeasePayment; 2]>,
        charge: Charge,
        time: CallTime,
    ) -> HitDecisions {
        let mut unpaid = SmallVec::<[Hit<&Counter>; 2]>::new();
        for (hit, payment) in hits.iter().zip(&payments) {
            if payment.decision.is_none() {
                unpaid.push(Hit { cost: hit.cost - payment.hits, ..*hit });
            }
        }
        let answers = self.apply_with_deny_cache(&unpaid, charge, time).await;
        let is_blocked = charge == Charge::All && any_denied(&unpaid, &answers);
        let mut answers = answers.into_iter();
        let mut decisions = HitDecisions::with_capacity(hits.len());
        for (hit, payment) in hits.iter().zip(payments) {
            let identity = self.state.identity(hit);
            let decision = match payment.decision {
                Some(decision) if is_blocked => from_lease(decision.rolled_back(payment.hits)),
                Some(decision) => from_lease(decision),
                None => next_answer(&mut answers),
            };
            let is_allowed = decision.is_ok_and(|hit| hit.decision.allowed);
            if (is_blocked || !is_allowed)
                && let Some(rollback) = leases.restore(identity, &hit.counter.program, &payment)
            {
                self.spawn_call(rollback, time.now);
            }
            if payment.decision.is_none()
                && hit.counter.consistency == Consistency::Leased
                && let Ok(decided) = &decision
                && let Some(call) = leases.consider_lease(identity, hit, &decided.decision)
            {
                self.spawn_call(call, time.now);
            }
            decisions.push(decision);
        }
        decisions
    }

    /// Runs a store call in a separate task, which continues if the caller cancels its request.
    ///
    /// The call shares a batch with calls that are sent at the same moment.
    fn spawn_call(&self, call: StoreCall, now: Micros) {
        let this = self.clone();
        tokio::spawn(async move { this.run_call(call, now).await });
    }

    /// Makes a store call for a lease, and rolls back hits that the lease cannot use.
    async fn run_call(&self, call: StoreCall, now: Micros) {
        let Some(leases) = &self.state.leases else {
            return;
        };
        let called_at = self.state.time(now);
        let outcome = self.execute(&call, now).await;
        if !call.hit.action.releases()
            && let Some(rollback) = leases.complete(&call, outcome.as_ref(), called_at)
        {
            self.execute(&rollback, now).await;
        }
    }

    async fn execute(&self, call: &StoreCall, now: Micros) -> Option<StepOutcome> {
        let outcome = only_answer(self.store.step(&[call.hit.borrowed()], Charge::Each, now).await).ok();
        self.state.metrics.add_store_call(self.worker, call, outcome.as_ref());
        if call.hit.action.releases()
            && let Some(deny_cache) = &self.state.deny_cache
        {
            deny_cache.invalidate(call.identity);
        }
        outcome
    }

    /// Returns idle leases to the store, and reports the hits of eventual counters. Must be called periodically.
    pub async fn sweep(&self, now: Micros) {
        let local_now = self.state.time(now);
        let leases = self.state.leases.as_ref().map(|leases| leases.sweep(local_now)).unwrap_or_default();
        self.state.metrics.grant_unreported_hits.add(self.worker, leases.unreported);
        let counters = self.state.eventual_counters.as_ref();
        let reports = counters.map(|counters| counters.sweep(local_now)).unwrap_or_default();
        self.run_calls(leases.calls, reports, now).await;
    }

    /// Returns all leases to the store, and reports all hits of eventual counters. To be called at shutdown.
    pub async fn return_all(&self, now: Micros) {
        let local_now = self.state.time(now);
        let returns = self.state.leases.as_ref().map(|leases| leases.drain(local_now)).unwrap_or_default();
        let counters = self.state.eventual_counters.as_ref();
        let reports = counters.map(|counters| counters.drain(local_now)).unwrap_or_default();
        self.run_calls(returns, reports, now).await;
    }

    /// Makes all store calls concurrently, so that they share batches.
    async fn run_calls(&self, lease_calls: Vec<StoreCall>, reports: Vec<StoreCall>, now: Micros) {
        let run_lease_calls = join_all(lease_calls.into_iter().map(|call| self.run_call(call, now)));
        let run_reports = async {
            if let Some(counters) = &self.state.eventual_counters {
                join_all(reports.into_iter().map(|call| self.run_report(counters, call, now))).await;
            }
        };
        tokio::join!(run_lease_calls, run_reports);
    }

    /// Decides hits from the deny cache or in the store.
    async fn apply_with_deny_cache(&self, hits: &[Hit<&Counter>], charge: Charge, time: CallTime) -> HitDecisions {
        let Some(deny_cache) = &self.state.deny_cache else {
            let outcomes = self.store.step(hits, charge, time.now).await;
            let mut decisions = HitDecisions::with_capacity(hits.len());
            for (hit, outcome) in hits.iter().zip(outcomes) {
                decisions.push(outcome.map(|outcome| outcome.explain(hit).into()));
            }
            return decisions;
        };
        // Most requests have one hit. This branch makes their future small while it waits, and denials from the cache
        // cheap.
        if let [hit] = hits {
            let lookup = deny_cache.lookup(hit, self.state.identity(hit));
            if let Some(decision) = deny_cache.get(hit, &lookup, time.local) {
                self.state.metrics.deny_cache_denials.add(self.worker, 1);
                return std::iter::once(from_deny_cache(decision)).collect();
            }
            let outcome = only_answer(self.store.step(hits, charge, time.now).await);
            let decision = outcome.map(|outcome| deny_cache.learn(hit, lookup, outcome, time.local).into());
            return std::iter::once(decision).collect();
        }
        Box::pin(self.apply_several(deny_cache, hits, charge, time)).await
    }

    /// Decides several hits from the deny cache or in the store.
    async fn apply_several(
        &self,
        deny_cache: &DenyCache,
        hits: &[Hit<&Counter>],
        charge: Charge,
        time: CallTime,
    ) -> HitDecisions {
        let lookups: Lookups = hits.iter().map(|hit| deny_cache.lookup(hit, self.state.identity(hit))).collect();
        let cached = deny_cache.cached(hits, lookups, time.local);
        let denials = cached.iter().filter(|cached| cached.denial.is_some()).count();
        self.state.metrics.deny_cache_denials.add(self.worker, denials as u64);
        if let Some(all) = cached.iter().map(|cached| cached.denial.map(from_deny_cache)).collect() {
            return all;
        }
        self.apply_uncached(deny_cache, cached, charge, time).await
    }

    /// Decides the hits without a cached denial in the store.
    ///
    /// Under [`Charge::All`], these hits are only peeked if a blocking hit has a cached denial.
    async fn apply_uncached(
        &self,
        deny_cache: &DenyCache,
        cached: CachedDenials<'_>,
        charge: Charge,
        time: CallTime,
    ) -> HitDecisions {
        let is_blocked = cached.iter().any(|cached| cached.hit.blocks.on_denial() && cached.denial.is_some());
        let peek_only = charge == Charge::All && is_blocked;
        let charge = if peek_only { Charge::Each } else { charge };
        let mut uncached = SmallVec::<[Hit<&Counter>; 2]>::new();
        for CachedDenial { hit, denial, .. } in &cached {
            if denial.is_none() {
                uncached.push(if peek_only { hit.peek() } else { *hit });
            }
        }
        let mut outcomes = self.store.step(&uncached, charge, time.now).await.into_iter();
        let mut decisions = HitDecisions::new();
        for CachedDenial { hit, lookup, denial } in cached {
            decisions.push(match denial {
                Some(decision) => from_deny_cache(decision),
                None => {
                    next_answer(&mut outcomes).map(|outcome| deny_cache.learn(&hit, lookup, outcome, time.local).into())
                }
            });
        }
        decisions
    }
}

/// Returns `true` if one of these hits prevents every take of its request under [`Charge::All`].
fn any_denied(hits: &[Hit<&Counter>], answers: &[Result<HitDecision, StoreError>]) -> bool {
    hits.iter().zip(answers).any(|(hit, answer)| hit.is_denied_by(answer))
}

fn from_lease(LeaseDecision { decision, grant }: LeaseDecision) -> Result<HitDecision, StoreError> {
    Ok(HitDecision { decision, decider: Decider::Lease, grant })
}

fn from_deny_cache(decision: Decision) -> Result<HitDecision, StoreError> {
    Ok(HitDecision { decision, decider: Decider::DenyCache, grant: None })
}

#[cfg(test)]
mod tests;
