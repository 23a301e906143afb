//! What this instance knows, before anybody is asked. It stands before a store that others share, and each part can be
//! taken out:
//!
//! ```text
//! Local            one worker's way in
//!   Replicas       counters that are told later what has passed (`consistency: eventual`)
//!   Leases         quota that was taken in advance, of rules that want it (`consistency: leased`)
//!   DenyCache      refusals that still hold
//!   Counters       the shared store
//! ```

mod deny_cache;
mod entities;
mod eventual;
mod eventual_counter;
mod eventual_counters;
mod hot_counters;
mod lease;
mod leases;
mod metrics;
mod store_call;

pub use deny_cache::Settings as DenyCacheSettings;
pub use eventual_counters::Settings as EventualSettings;
pub use leases::Settings as LeaseSettings;
pub use metrics::Metrics;

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use smallvec::SmallVec;
use tokio::time::Instant;

use self::{
    deny_cache::{CachedDenials, DenyCache, Lookup, Lookups},
    eventual_counters::EventualCounters,
    leases::{LeaseDecision, LeasePayment, LeasePayments, Leases},
    store_call::StoreCall,
};
use super::{
    Charge, CounterStore, Decider, Hit, HitDecision, HitDecisions, StepOutcome, Store, StoreError, identity::Secret,
};
use crate::{
    algorithm::{Consistency, Decision, Micros},
    metrics::WorkerId,
};

/// Which clock tells how old something known is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// The machine's monotonic one, always but in tests.
    Monotonic(Instant),
    /// The `now` of the call: a clock set by hand.
    Caller,
}

impl Clock {
    /// The machine's, from now on.
    #[must_use]
    pub fn start() -> Self {
        Self::Monotonic(Instant::now())
    }

    fn now(self, now: Micros) -> Duration {
        match self {
            Self::Monotonic(start) => start.elapsed(),
            Self::Caller => Duration::from_micros(now.get()),
        }
    }
}

/// What all workers of this instance know.
pub struct Shared {
    deny_cache: Option<DenyCache>,
    leases: Option<Leases>,
    replicas: Option<EventualCounters>,
    secret: Secret,
    clock: Clock,
    metrics: Arc<Metrics>,
}

impl Shared {
    /// Nothing known yet.
    #[must_use]
    pub fn new(
        deny_cache: &DenyCacheSettings,
        leases: &LeaseSettings,
        eventual: &EventualSettings,
        clock: Clock,
        metrics: Arc<Metrics>,
    ) -> Arc<Self> {
        let (deny_cache, leases) = (DenyCache::new(deny_cache), Leases::new(leases));
        Arc::new(Self {
            deny_cache,
            leases,
            replicas: EventualCounters::new(eventual),
            secret: Secret::new(),
            clock,
            metrics,
        })
    }

    fn identity(&self, hit: &Hit<'_>) -> u128 {
        self.identity_of(hit.key, hit.per_second)
    }

    /// One name may stand for a counter in each of two stores.
    fn identity_of(&self, key: &[u8], per_second: bool) -> u128 {
        self.secret.identity(key) ^ u128::from(per_second)
    }
}

/// One worker's way to a store that others share, and past it.
#[derive(Clone)]
pub struct Local<S> {
    store: S,
    shared: Arc<Shared>,
    worker: WorkerId,
}

impl<S> Local<S> {
    /// Before this store.
    pub fn new(store: S, shared: Arc<Shared>, worker: WorkerId) -> Self {
        Self { store, shared, worker }
    }

    /// The store behind.
    pub fn store(&self) -> &S {
        &self.store
    }
}

impl Local<super::Redis> {
    /// Forgets a counter, and what is known of it here.
    pub(super) async fn forget(&self, key: &[u8], per_second: bool) -> Result<bool, StoreError> {
        let existed = self.store.forget(key, per_second).await?;
        if let Some(deny_cache) = &self.shared.deny_cache {
            deny_cache.refunded(self.shared.identity_of(key, per_second));
        }
        Ok(existed)
    }
}

/// When something is asked: by the service's clock, and by this instance's own.
#[derive(Clone, Copy)]
struct CallTime {
    now: Micros,
    here: Duration,
}

impl<S: CounterStore + Clone + Send + Sync + 'static> Store for Local<S> {
    async fn apply(&self, hits: &[Hit<'_>], charge: Charge, now: Micros) -> HitDecisions {
        let asked = CallTime { now, here: self.shared.clock.now(now) };
        match &self.shared.replicas {
            Some(replicas) if hits.iter().any(|hit| hit.consistency == Consistency::Eventual) => {
                self.apply_eventual(replicas, hits, charge, asked).await
            }
            _ => self.apply_cached(hits, charge, asked).await,
        }
    }
}

impl<S: CounterStore + Clone + Send + Sync + 'static> Local<S> {
    /// With what was taken in advance, and what is known to be refused.
    async fn apply_cached(&self, hits: &[Hit<'_>], charge: Charge, asked: CallTime) -> HitDecisions {
        match &self.shared.leases {
            Some(leases) if hits.iter().any(|hit| hit.consistency == Consistency::Leased) => {
                let shares = self.spend(leases, hits, asked);
                if let Some(all) = shares.iter().map(|share| share.decision.map(from_lease)).collect() {
                    return all;
                }
                Box::pin(self.top_up(leases, hits, shares, charge, asked)).await
            }
            _ => self.ask(hits, charge, asked).await,
        }
    }

    /// Spends what there is, and sends for more where it runs short.
    fn spend(&self, leases: &Leases, hits: &[Hit<'_>], asked: CallTime) -> SmallVec<[LeasePayment; 2]> {
        let identities: SmallVec<[u128; 2]> = hits.iter().map(|hit| self.shared.identity(hit)).collect();
        let LeasePayments { payments: shares, calls: errands } = leases.spend(hits, &identities, asked.here);
        errands.into_iter().for_each(|errand| self.send(errand, asked.now));
        let answers = || shares.iter().filter_map(|share| share.decision);
        self.shared.metrics.decided_by_lease(self.worker, answers().count() as u64);
        let granted = answers().filter_map(|spend| spend.grant);
        self.shared.metrics.granted(self.worker, granted.map(|grant| u64::from(grant.hits.get())).sum());
        shares
    }

    /// Asks for what leases could not pay, and learns from that what to lease. What they have paid goes back where the rest
    /// could not be had: of that hit, or, charged together, of any that all depend on.
    async fn top_up(
        &self,
        leases: &Leases,
        hits: &[Hit<'_>],
        shares: SmallVec<[LeasePayment; 2]>,
        charge: Charge,
        asked: CallTime,
    ) -> HitDecisions {
        let unpaid = hits.iter().zip(&shares).filter(|(_, share)| share.decision.is_none());
        let rest: SmallVec<[Hit<'_>; 2]> =
            unpaid.map(|(hit, share)| Hit { cost: hit.cost - share.hits, ..*hit }).collect();
        let answers = self.ask(&rest, charge, asked).await;
        let refuses = |(hit, answer): (&Hit<'_>, &Result<HitDecision, StoreError>)| hit.is_denied_by(answer);
        let refused = charge == Charge::All && rest.iter().zip(&answers).any(refuses);
        let mut answers = answers.into_iter();
        let answer = |(hit, share): (&Hit<'_>, LeasePayment)| {
            let identity = self.shared.identity(hit);
            let answer = match share.decision {
                Some(spend) if refused => from_lease(spend.unspent(share.hits)),
                Some(spend) => from_lease(spend),
                None => answers.next().unwrap_or(Err(StoreError::Rejected)),
            };
            if refused || !answer.is_ok_and(|answer| answer.decision.allowed) {
                let back = leases.put_back(identity, hit.algorithm, &share);
                back.into_iter().for_each(|errand| self.send(errand, asked.now));
            }
            if share.decision.is_none() && hit.consistency == Consistency::Leased {
                let errand = answer.ok().and_then(|answer| leases.consider_lease(identity, hit, &answer.decision));
                errand.into_iter().for_each(|errand| self.send(errand, asked.now));
            }
            answer
        };
        hits.iter().zip(shares).map(answer).collect()
    }

    /// Runs an errand whether whoever caused it waits or not. It shares a call with what is asked just now.
    fn send(&self, errand: StoreCall, now: Micros) {
        let this = self.clone();
        tokio::spawn(async move { this.run(errand, now).await });
    }

    async fn run(&self, errand: StoreCall, now: Micros) {
        let Some(leases) = &self.shared.leases else {
            return;
        };
        let asked = self.shared.clock.now(now);
        let counted = self.step_one(&errand, now).await;
        if !errand.action.releases()
            && let Some(back) = leases.complete(&errand, counted.as_ref(), asked)
        {
            self.step_one(&back, now).await;
        }
    }

    async fn step_one(&self, errand: &StoreCall, now: Micros) -> Option<StepOutcome> {
        let counted = self.store.step(&[errand.hit()], Charge::Each, now).await.pop().and_then(Result::ok);
        self.shared.metrics.ran(self.worker, errand, counted.as_ref());
        if let Some(deny_cache) = self.shared.deny_cache.as_ref().filter(|_| errand.action.releases()) {
            deny_cache.refunded(errand.identity);
        }
        counted
    }

    /// A caller has done with a grant of the counter that this hit asks: so many hits were admitted of it.
    pub fn report(&self, hit: &Hit<'_>, id: u64, spent: u64, now: Micros) -> u64 {
        let here = self.shared.clock.now(now);
        let leases = self.shared.leases.as_ref();
        let reported = leases.and_then(|leases| leases.report(self.shared.identity(hit), id, spent, here));
        let (spent, returned, back) = reported.unwrap_or_default();
        self.shared.metrics.reported(self.worker, spent, returned);
        back.into_iter().for_each(|errand| self.send(errand, now));
        spent
    }

    /// Gives back what nobody asks for any more, and tells what has passed. To be called now and then.
    pub async fn sweep(&self, now: Micros) {
        let here = self.shared.clock.now(now);
        let leases = self.shared.leases.as_ref().map(|leases| leases.sweep(here)).unwrap_or_default();
        self.shared.metrics.unreported(self.worker, leases.unreported);
        let replicas = self.shared.replicas.as_ref().map(|replicas| replicas.sweep(here)).unwrap_or_default();
        self.run_calls(leases.calls, replicas, now).await;
    }

    /// Gives back all that was taken in advance, and tells all that has passed, at the end.
    pub async fn return_all(&self, now: Micros) {
        let here = self.shared.clock.now(now);
        let leases = self.shared.leases.as_ref().map(|leases| leases.drain(here)).unwrap_or_default();
        let replicas = self.shared.replicas.as_ref().map(|replicas| replicas.drain(here)).unwrap_or_default();
        self.run_calls(leases, replicas, now).await;
    }

    /// All at once, so that they share calls.
    async fn run_calls(&self, back: Vec<StoreCall>, told: Vec<StoreCall>, now: Micros) {
        let back = join_all(back.into_iter().map(|errand| self.run(errand, now)));
        let told = self
            .shared
            .replicas
            .as_ref()
            .map(|replicas| join_all(told.into_iter().map(|errand| self.report_admitted(replicas, errand, now))));
        tokio::join!(back, async {
            if let Some(told) = told {
                told.await;
            }
        });
    }

    /// Asks the store for what is not known to be refused.
    async fn ask(&self, hits: &[Hit<'_>], charge: Charge, asked: CallTime) -> HitDecisions {
        let Some(deny_cache) = &self.shared.deny_cache else {
            let counts = self.store.step(hits, charge, asked.now).await;
            return hits.iter().zip(counts).map(|(hit, counted)| Ok(counted?.explain(hit).into())).collect();
        };
        // Most requests have one hit. What waits for its answer is to be small, and abusers are to cost nothing.
        if let [hit] = hits {
            let question = deny_cache.lookup(hit, self.shared.identity(hit));
            if let Some(decision) = deny_cache.get(hit, &question, asked.here) {
                self.shared.metrics.refused(self.worker, 1);
                return std::iter::once(refused(decision)).collect();
            }
            let counted = self.store.step(hits, charge, asked.now).await.pop();
            let answer = counted.unwrap_or(Err(StoreError::Rejected));
            let answer = answer.map(|counted| deny_cache.learn(hit, question, counted, asked.here).into());
            return std::iter::once(answer).collect();
        }
        Box::pin(self.ask_several(deny_cache, hits, charge, asked)).await
    }

    async fn ask_several(
        &self,
        deny_cache: &DenyCache,
        hits: &[Hit<'_>],
        charge: Charge,
        asked: CallTime,
    ) -> HitDecisions {
        let questions: Lookups = hits.iter().map(|hit| deny_cache.lookup(hit, self.shared.identity(hit))).collect();
        let known = deny_cache.cached(hits, &questions, asked.here);
        self.shared.metrics.refused(self.worker, known.iter().flatten().count() as u64);
        if let Some(all) = known.iter().map(|decision| decision.map(refused)).collect() {
            return all;
        }
        self.ask_others(deny_cache, hits, (questions, known), charge, asked).await
    }

    /// Where something known refuses all, nothing is taken, and the others only look.
    async fn ask_others(
        &self,
        deny_cache: &DenyCache,
        hits: &[Hit<'_>],
        (questions, known): (Lookups, CachedDenials),
        charge: Charge,
        asked: CallTime,
    ) -> HitDecisions {
        let binding = hits.iter().zip(&known).any(|(hit, known)| hit.binding && known.is_some());
        let looks = charge == Charge::All && binding;
        let mut others: SmallVec<[Hit<'_>; 2]> =
            hits.iter().zip(&known).filter(|(_, known)| known.is_none()).map(|(hit, _)| *hit).collect();
        for hit in others.iter_mut().filter(|_| looks) {
            *hit = hit.peek();
        }
        let charge = if looks { Charge::Each } else { charge };
        let mut counts = self.store.step(&others, charge, asked.now).await.into_iter();
        let answer = |((hit, question), known): ((&Hit<'_>, Lookup), Option<Decision>)| match known {
            Some(decision) => refused(decision),
            None => {
                let counted = counts.next().unwrap_or(Err(StoreError::Rejected))?;
                Ok(deny_cache.learn(hit, question, counted, asked.here).into())
            }
        };
        hits.iter().zip(questions).zip(known).map(answer).collect()
    }
}

fn from_lease(LeaseDecision { decision, grant }: LeaseDecision) -> Result<HitDecision, StoreError> {
    Ok(HitDecision { decision, decider: Decider::Lease, grant })
}

fn refused(decision: Decision) -> Result<HitDecision, StoreError> {
    Ok(HitDecision { decision, decider: Decider::DenyCache, grant: None })
}
