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

mod arrears;
mod deny_cache;
mod entities;
mod errand;
mod heat;
mod lease;
mod leases;
mod metrics;
mod replica;
mod replicas;

pub use deny_cache::Settings as DenyCacheSettings;
pub use leases::Settings as LeaseSettings;
pub use metrics::Metrics;
pub use replicas::Settings as EventualSettings;

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use smallvec::SmallVec;
use tokio::time::Instant;

use self::{
    deny_cache::{DenyCache, Known, Question, Questions},
    errand::Errand,
    leases::{Leases, Share, Spend, Spent},
    replicas::Replicas,
};
use super::{Answer, Answers, Charge, Counted, Counters, Decider, Hit, Store, StoreError, identity::Secret};
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
    replicas: Option<Replicas>,
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
        Arc::new(Self { deny_cache, leases, replicas: Replicas::new(eventual), secret: Secret::new(), clock, metrics })
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
struct Asked {
    now: Micros,
    here: Duration,
}

impl<S: Counters + Clone + Send + Sync + 'static> Store for Local<S> {
    async fn apply(&self, hits: &[Hit<'_>], charge: Charge, now: Micros) -> Answers {
        let asked = Asked { now, here: self.shared.clock.now(now) };
        match &self.shared.replicas {
            Some(replicas) if hits.iter().any(|hit| hit.consistency == Consistency::Eventual) => {
                self.apply_to_replicas(replicas, hits, charge, asked).await
            }
            _ => self.apply_ahead(hits, charge, asked).await,
        }
    }
}

impl<S: Counters + Clone + Send + Sync + 'static> Local<S> {
    /// With what was taken in advance, and what is known to be refused.
    async fn apply_ahead(&self, hits: &[Hit<'_>], charge: Charge, asked: Asked) -> Answers {
        match &self.shared.leases {
            Some(leases) if hits.iter().any(|hit| hit.consistency == Consistency::Leased) => {
                let shares = self.spend(leases, hits, asked);
                if let Some(all) = shares.iter().map(|share| share.answer.map(from_lease)).collect() {
                    return all;
                }
                Box::pin(self.ask_for_rest(leases, hits, shares, charge, asked)).await
            }
            _ => self.ask(hits, charge, asked).await,
        }
    }

    /// Spends what there is, and sends for more where it runs short.
    fn spend(&self, leases: &Leases, hits: &[Hit<'_>], asked: Asked) -> SmallVec<[Share; 2]> {
        let identities: SmallVec<[u128; 2]> = hits.iter().map(|hit| self.shared.identity(hit)).collect();
        let Spent { shares, errands } = leases.spend(hits, &identities, asked.here);
        errands.into_iter().for_each(|errand| self.send(errand, asked.now));
        let answers = || shares.iter().filter_map(|share| share.answer);
        self.shared.metrics.decided_by_lease(self.worker, answers().count() as u64);
        let granted = answers().filter_map(|spend| spend.grant);
        self.shared.metrics.granted(self.worker, granted.map(|grant| u64::from(grant.hits.get())).sum());
        shares
    }

    /// Asks for what leases could not pay, and learns from that what to lease. What they have paid goes back where the rest
    /// could not be had: of that hit, or, charged together, of any that all depend on.
    async fn ask_for_rest(
        &self,
        leases: &Leases,
        hits: &[Hit<'_>],
        shares: SmallVec<[Share; 2]>,
        charge: Charge,
        asked: Asked,
    ) -> Answers {
        let unpaid = hits.iter().zip(&shares).filter(|(_, share)| share.answer.is_none());
        let rest: SmallVec<[Hit<'_>; 2]> =
            unpaid.map(|(hit, share)| Hit { cost: hit.cost - share.paid, ..*hit }).collect();
        let answers = self.ask(&rest, charge, asked).await;
        let refuses = |(hit, answer): (&Hit<'_>, &Result<Answer, StoreError>)| hit.is_refused_by(answer);
        let refused = charge == Charge::All && rest.iter().zip(&answers).any(refuses);
        let mut answers = answers.into_iter();
        let answer = |(hit, share): (&Hit<'_>, Share)| {
            let identity = self.shared.identity(hit);
            let answer = match share.answer {
                Some(spend) if refused => from_lease(spend.unspent(share.paid)),
                Some(spend) => from_lease(spend),
                None => answers.next().unwrap_or(Err(StoreError::Refused)),
            };
            if refused || !answer.is_ok_and(|answer| answer.decision.allowed) {
                let back = leases.unspend(identity, hit.algorithm, &share);
                back.into_iter().for_each(|errand| self.send(errand, asked.now));
            }
            if share.answer.is_none() && hit.consistency == Consistency::Leased {
                let errand = answer.ok().and_then(|answer| leases.learn(identity, hit, &answer.decision));
                errand.into_iter().for_each(|errand| self.send(errand, asked.now));
            }
            answer
        };
        hits.iter().zip(shares).map(answer).collect()
    }

    /// Runs an errand whether whoever caused it waits or not. It shares a call with what is asked just now.
    fn send(&self, errand: Errand, now: Micros) {
        let this = self.clone();
        tokio::spawn(async move { this.run(errand, now).await });
    }

    async fn run(&self, errand: Errand, now: Micros) {
        let Some(leases) = &self.shared.leases else {
            return;
        };
        let asked = self.shared.clock.now(now);
        let counted = self.count_one(&errand, now).await;
        if !errand.action.gives()
            && let Some(back) = leases.answered(&errand, counted.as_ref(), asked)
        {
            self.count_one(&back, now).await;
        }
    }

    async fn count_one(&self, errand: &Errand, now: Micros) -> Option<Counted> {
        let counted = self.store.count(&[errand.hit()], Charge::Each, now).await.pop().and_then(Result::ok);
        self.shared.metrics.ran(self.worker, errand, counted.as_ref());
        if let Some(deny_cache) = self.shared.deny_cache.as_ref().filter(|_| errand.action.gives()) {
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
        self.run_all(leases.errands, replicas, now).await;
    }

    /// Gives back all that was taken in advance, and tells all that has passed, at the end.
    pub async fn settle(&self, now: Micros) {
        let here = self.shared.clock.now(now);
        let leases = self.shared.leases.as_ref().map(|leases| leases.take_all(here)).unwrap_or_default();
        let replicas = self.shared.replicas.as_ref().map(|replicas| replicas.take_all(here)).unwrap_or_default();
        self.run_all(leases, replicas, now).await;
    }

    /// All at once, so that they share calls.
    async fn run_all(&self, back: Vec<Errand>, told: Vec<Errand>, now: Micros) {
        let back = join_all(back.into_iter().map(|errand| self.run(errand, now)));
        let told = self
            .shared
            .replicas
            .as_ref()
            .map(|replicas| join_all(told.into_iter().map(|errand| self.tell(replicas, errand, now))));
        tokio::join!(back, async {
            if let Some(told) = told {
                told.await;
            }
        });
    }

    /// Asks the store for what is not known to be refused.
    async fn ask(&self, hits: &[Hit<'_>], charge: Charge, asked: Asked) -> Answers {
        let Some(deny_cache) = &self.shared.deny_cache else {
            let counts = self.store.count(hits, charge, asked.now).await;
            return hits.iter().zip(counts).map(|(hit, counted)| Ok(counted?.explain(hit).into())).collect();
        };
        // Most requests have one hit. What waits for its answer is to be small, and abusers are to cost nothing.
        if let [hit] = hits {
            let question = deny_cache.question(hit, self.shared.identity(hit));
            if let Some(decision) = deny_cache.get(hit, &question, asked.here) {
                self.shared.metrics.refused(self.worker, 1);
                return std::iter::once(refused(decision)).collect();
            }
            let counted = self.store.count(hits, charge, asked.now).await.pop();
            let answer = counted.unwrap_or(Err(StoreError::Refused));
            let answer = answer.map(|counted| deny_cache.learn(hit, question, counted, asked.here).into());
            return std::iter::once(answer).collect();
        }
        Box::pin(self.ask_several(deny_cache, hits, charge, asked)).await
    }

    async fn ask_several(&self, deny_cache: &DenyCache, hits: &[Hit<'_>], charge: Charge, asked: Asked) -> Answers {
        let questions: Questions = hits.iter().map(|hit| deny_cache.question(hit, self.shared.identity(hit))).collect();
        let known = deny_cache.known(hits, &questions, asked.here);
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
        (questions, known): (Questions, Known),
        charge: Charge,
        asked: Asked,
    ) -> Answers {
        let binding = hits.iter().zip(&known).any(|(hit, known)| hit.binding && known.is_some());
        let looks = charge == Charge::All && binding;
        let mut others: SmallVec<[Hit<'_>; 2]> =
            hits.iter().zip(&known).filter(|(_, known)| known.is_none()).map(|(hit, _)| *hit).collect();
        for hit in others.iter_mut().filter(|_| looks) {
            *hit = hit.look();
        }
        let charge = if looks { Charge::Each } else { charge };
        let mut counts = self.store.count(&others, charge, asked.now).await.into_iter();
        let answer = |((hit, question), known): ((&Hit<'_>, Question), Option<Decision>)| match known {
            Some(decision) => refused(decision),
            None => {
                let counted = counts.next().unwrap_or(Err(StoreError::Refused))?;
                Ok(deny_cache.learn(hit, question, counted, asked.here).into())
            }
        };
        hits.iter().zip(questions).zip(known).map(answer).collect()
    }
}

fn from_lease(Spend { decision, grant }: Spend) -> Result<Answer, StoreError> {
    Ok(Answer { decision, decider: Decider::Lease, grant })
}

fn refused(decision: Decision) -> Result<Answer, StoreError> {
    Ok(Answer { decision, decider: Decider::DenyCache, grant: None })
}
