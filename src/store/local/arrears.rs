//! The way of hits that are counted here first, and told to the store later.

use smallvec::SmallVec;

use super::{Asked, Local, errand::Errand, replicas::Replicas};
use crate::{
    algorithm::{Action, Consistency, Decision, Micros},
    store::{Answer, Answers, Charge, Counted, Counters, Decider, Hit, StoreError},
};

impl<S: Counters + Clone + Send + Sync + 'static> Local<S> {
    /// Asks the store for counters that are not known here. Charged together, hits are looked at before any takes.
    pub(super) async fn apply_to_replicas(
        &self,
        replicas: &Replicas,
        hits: &[Hit<'_>],
        charge: Charge,
        asked: Asked,
    ) -> Answers {
        if charge == Charge::All {
            return Box::pin(self.apply_together(replicas, hits, asked)).await;
        }
        let decide = |hit: &Hit<'_>| replicas.decide(self.shared.identity(hit), hit, asked.here);
        let decisions: SmallVec<[Option<Decision>; 2]> = hits.iter().map(decide).collect();
        self.shared.metrics.decided_by_replica(self.worker, decisions.iter().flatten().count() as u64);
        match decisions.iter().map(|decision| decision.map(from_replica)).collect() {
            Some(all) => all,
            None => Box::pin(self.ask_for_unknown(replicas, hits, decisions, asked)).await,
        }
    }

    async fn ask_for_unknown(
        &self,
        replicas: &Replicas,
        hits: &[Hit<'_>],
        decisions: SmallVec<[Option<Decision>; 2]>,
        asked: Asked,
    ) -> Answers {
        let is_unknown = |(hit, decision): &(&Hit<'_>, &Option<Decision>)| {
            decision.is_none() && hit.consistency == Consistency::Eventual
        };
        let unknown: SmallVec<[Hit<'_>; 2]> =
            hits.iter().zip(&decisions).filter(is_unknown).map(|(hit, _)| *hit).collect();
        let others: SmallVec<[Hit<'_>; 2]> =
            hits.iter().filter(|hit| hit.consistency != Consistency::Eventual).copied().collect();
        let (learned, answers) = tokio::join!(self.learn(replicas, &unknown, asked), async {
            if others.is_empty() { Answers::new() } else { self.apply_ahead(&others, Charge::Each, asked).await }
        });
        let (mut learned, mut answers) = (learned.into_iter(), answers.into_iter());
        let answer = |(hit, decision): (&Hit<'_>, Option<Decision>)| match decision {
            Some(decision) => from_replica(decision),
            None if hit.consistency == Consistency::Eventual => learned.next().unwrap_or(Err(StoreError::Refused)),
            None => answers.next().unwrap_or(Err(StoreError::Refused)),
        };
        hits.iter().zip(decisions).map(answer).collect()
    }

    /// Asks the counters themselves, which are known from then on.
    async fn learn(&self, replicas: &Replicas, hits: &[Hit<'_>], asked: Asked) -> Answers {
        if hits.is_empty() {
            return Answers::new();
        }
        let counts = self.store.count(hits, Charge::Each, asked.now).await;
        let here = self.shared.clock.now(asked.now);
        let learn = |(hit, counted): (&Hit<'_>, Result<Counted, StoreError>)| {
            let counted = counted?;
            replicas.learn(self.shared.identity(hit), hit, &counted, asked.here, here);
            Ok(counted.explain(hit).into())
        };
        hits.iter().zip(counts).map(learn).collect()
    }

    /// Nobody takes unless all pass: what is known here is looked at, then the others are asked, and then what is known
    /// here is taken.
    async fn apply_together(&self, replicas: &Replicas, hits: &[Hit<'_>], asked: Asked) -> Answers {
        let (own, others): (SmallVec<[Hit<'_>; 2]>, SmallVec<[Hit<'_>; 2]>) =
            hits.iter().copied().partition(|hit| hit.consistency == Consistency::Eventual);
        let looks: SmallVec<[Hit<'_>; 2]> = own.iter().map(Hit::look).collect();
        let looked = Box::pin(self.apply_to_replicas(replicas, &looks, Charge::Each, asked)).await;
        let refuses = |(hit, answer): (&Hit<'_>, &Result<Answer, StoreError>)| hit.is_refused_by(answer);
        let refused = own.iter().zip(&looked).any(refuses);
        let answers = match (others.is_empty(), refused) {
            (true, _) => Answers::new(),
            (false, false) => self.apply_ahead(&others, Charge::All, asked).await,
            (false, true) => {
                let looks: SmallVec<[Hit<'_>; 2]> = others.iter().map(Hit::look).collect();
                self.apply_ahead(&looks, Charge::Each, asked).await
            }
        };
        let passed = !refused && !others.iter().zip(&answers).any(refuses);
        let take = |(hit, looked): (&Hit<'_>, Result<Answer, StoreError>)| {
            let takes = passed && hit.action == Action::Take && looked.is_ok();
            let taken = takes.then(|| replicas.decide(self.shared.identity(hit), hit, asked.here)).flatten();
            taken.map_or(looked, from_replica)
        };
        let taken: Answers = own.iter().zip(looked).map(take).collect();
        let (mut taken, mut answers) = (taken.into_iter(), answers.into_iter());
        let answer = |hit: &Hit<'_>| {
            let mine = if hit.consistency == Consistency::Eventual { &mut taken } else { &mut answers };
            mine.next().unwrap_or(Err(StoreError::Refused))
        };
        hits.iter().map(answer).collect()
    }

    /// Tells what has passed.
    pub(super) async fn tell(&self, replicas: &Replicas, errand: Errand, now: Micros) {
        let asked = self.shared.clock.now(now);
        let answer = self.store.count(&[errand.hit()], Charge::Each, now).await.pop();
        let answer = answer.unwrap_or(Err(StoreError::Refused));
        self.shared.metrics.told(self.worker, errand.hits, answer.is_ok());
        let lost = replicas.told(&errand, answer, asked, self.shared.clock.now(now));
        self.shared.metrics.lost(self.worker, lost);
    }
}

fn from_replica(decision: Decision) -> Result<Answer, StoreError> {
    Ok(Answer { decision, decider: Decider::Replica, grant: None })
}
