//! The way of hits that are counted here first, and told to the store later.

use smallvec::SmallVec;

use super::{CallTime, Local, eventual_counters::EventualCounters, store_call::StoreCall};
use crate::{
    algorithm::{Action, Consistency, Decision, Micros},
    store::{Charge, CounterStore, Decider, Hit, HitDecision, HitDecisions, StepOutcome, StoreError},
};

impl<S: CounterStore + Clone + Send + Sync + 'static> Local<S> {
    /// Asks the store for counters that are not known here. Charged together, hits are looked at before any takes.
    pub(super) async fn apply_eventual(
        &self,
        replicas: &EventualCounters,
        hits: &[Hit<'_>],
        charge: Charge,
        asked: CallTime,
    ) -> HitDecisions {
        if charge == Charge::All {
            return Box::pin(self.apply_together(replicas, hits, asked)).await;
        }
        let decide = |hit: &Hit<'_>| replicas.decide(self.shared.identity(hit), hit, asked.here);
        let decisions: SmallVec<[Option<Decision>; 2]> = hits.iter().map(decide).collect();
        self.shared.metrics.decided_by_replica(self.worker, decisions.iter().flatten().count() as u64);
        match decisions.iter().map(|decision| decision.map(from_eventual)).collect() {
            Some(all) => all,
            None => Box::pin(self.fetch_unknown(replicas, hits, decisions, asked)).await,
        }
    }

    async fn fetch_unknown(
        &self,
        replicas: &EventualCounters,
        hits: &[Hit<'_>],
        decisions: SmallVec<[Option<Decision>; 2]>,
        asked: CallTime,
    ) -> HitDecisions {
        let is_unknown = |(hit, decision): &(&Hit<'_>, &Option<Decision>)| {
            decision.is_none() && hit.consistency == Consistency::Eventual
        };
        let unknown: SmallVec<[Hit<'_>; 2]> =
            hits.iter().zip(&decisions).filter(is_unknown).map(|(hit, _)| *hit).collect();
        let others: SmallVec<[Hit<'_>; 2]> =
            hits.iter().filter(|hit| hit.consistency != Consistency::Eventual).copied().collect();
        let (learned, answers) = tokio::join!(self.learn(replicas, &unknown, asked), async {
            if others.is_empty() { HitDecisions::new() } else { self.apply_cached(&others, Charge::Each, asked).await }
        });
        let (mut learned, mut answers) = (learned.into_iter(), answers.into_iter());
        let answer = |(hit, decision): (&Hit<'_>, Option<Decision>)| match decision {
            Some(decision) => from_eventual(decision),
            None if hit.consistency == Consistency::Eventual => learned.next().unwrap_or(Err(StoreError::Rejected)),
            None => answers.next().unwrap_or(Err(StoreError::Rejected)),
        };
        hits.iter().zip(decisions).map(answer).collect()
    }

    /// Asks the counters themselves, which are known from then on.
    async fn learn(&self, replicas: &EventualCounters, hits: &[Hit<'_>], asked: CallTime) -> HitDecisions {
        if hits.is_empty() {
            return HitDecisions::new();
        }
        let counts = self.store.step(hits, Charge::Each, asked.now).await;
        let here = self.shared.clock.now(asked.now);
        let learn = |(hit, counted): (&Hit<'_>, Result<StepOutcome, StoreError>)| {
            let counted = counted?;
            replicas.merge(self.shared.identity(hit), hit, &counted, asked.here, here);
            Ok(counted.explain(hit).into())
        };
        hits.iter().zip(counts).map(learn).collect()
    }

    /// Nobody takes unless all pass: what is known here is looked at, then the others are asked, and then what is known
    /// here is taken.
    async fn apply_together(&self, replicas: &EventualCounters, hits: &[Hit<'_>], asked: CallTime) -> HitDecisions {
        let (own, others): (SmallVec<[Hit<'_>; 2]>, SmallVec<[Hit<'_>; 2]>) =
            hits.iter().copied().partition(|hit| hit.consistency == Consistency::Eventual);
        let looks: SmallVec<[Hit<'_>; 2]> = own.iter().map(Hit::peek).collect();
        let looked = Box::pin(self.apply_eventual(replicas, &looks, Charge::Each, asked)).await;
        let refuses = |(hit, answer): (&Hit<'_>, &Result<HitDecision, StoreError>)| hit.is_denied_by(answer);
        let refused = own.iter().zip(&looked).any(refuses);
        let answers = match (others.is_empty(), refused) {
            (true, _) => HitDecisions::new(),
            (false, false) => self.apply_cached(&others, Charge::All, asked).await,
            (false, true) => {
                let looks: SmallVec<[Hit<'_>; 2]> = others.iter().map(Hit::peek).collect();
                self.apply_cached(&looks, Charge::Each, asked).await
            }
        };
        let passed = !refused && !others.iter().zip(&answers).any(refuses);
        let take = |(hit, looked): (&Hit<'_>, Result<HitDecision, StoreError>)| {
            let takes = passed && hit.action == Action::Take && looked.is_ok();
            let taken = takes.then(|| replicas.decide(self.shared.identity(hit), hit, asked.here)).flatten();
            taken.map_or(looked, from_eventual)
        };
        let taken: HitDecisions = own.iter().zip(looked).map(take).collect();
        let (mut taken, mut answers) = (taken.into_iter(), answers.into_iter());
        let answer = |hit: &Hit<'_>| {
            let mine = if hit.consistency == Consistency::Eventual { &mut taken } else { &mut answers };
            mine.next().unwrap_or(Err(StoreError::Rejected))
        };
        hits.iter().map(answer).collect()
    }

    /// Tells what has passed.
    pub(super) async fn report_admitted(&self, replicas: &EventualCounters, errand: StoreCall, now: Micros) {
        let asked = self.shared.clock.now(now);
        let answer = self.store.step(&[errand.hit()], Charge::Each, now).await.pop();
        let answer = answer.unwrap_or(Err(StoreError::Rejected));
        self.shared.metrics.reported_eventually(self.worker, errand.hits, answer.is_ok());
        let lost = replicas.report_result(&errand, answer, asked, self.shared.clock.now(now));
        self.shared.metrics.lost(self.worker, lost);
    }
}

fn from_eventual(decision: Decision) -> Result<HitDecision, StoreError> {
    Ok(HitDecision { decision, decider: Decider::Eventual, grant: None })
}
