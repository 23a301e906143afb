//! Decisions from eventual counters, before leases, the deny cache and the store.

use sluicegate_algorithm::{Action, Consistency, Decision, Micros};
use sluicegate_store::{
    Charge, Counter, CounterStore, Decider, Hit, HitDecision, HitDecisions, StepOutcome, StoreError, next_answer,
    only_answer,
};
use smallvec::SmallVec;

use super::{CallTime, Local, eventual_counters::EventualCounters, store_call::StoreCall};

impl<S: CounterStore + Clone + Send + Sync + 'static> Local<S> {
    /// Decides all hits of a request with at least one eventual hit.
    ///
    /// Hits of unknown eventual counters and of other counters are decided by the store. Under [`Charge::All`], all
    /// hits are peeked before one is taken.
    pub(super) async fn apply_eventual(
        &self,
        counters: &EventualCounters,
        hits: &[Hit<&Counter>],
        charge: Charge,
        time: CallTime,
    ) -> HitDecisions {
        if charge == Charge::All {
            return Box::pin(self.apply_together(counters, hits, time)).await;
        }
        let decide = |hit: &Hit<&Counter>| counters.decide(self.shared.identity(hit), hit, time.local);
        let decisions: SmallVec<[Option<Decision>; 2]> = hits.iter().map(decide).collect();
        self.shared.metrics.add_eventual_decisions(self.worker, decisions.iter().flatten().count() as u64);
        match decisions.iter().map(|decision| decision.map(from_eventual)).collect() {
            Some(all) => all,
            None => Box::pin(self.fetch_unknown(counters, hits, decisions, time)).await,
        }
    }

    /// Decides the remaining hits: eventual ones in the store, others from leases, the deny cache or the store.
    async fn fetch_unknown(
        &self,
        counters: &EventualCounters,
        hits: &[Hit<&Counter>],
        decisions: SmallVec<[Option<Decision>; 2]>,
        time: CallTime,
    ) -> HitDecisions {
        let is_unknown = |(hit, decision): &(&Hit<&Counter>, &Option<Decision>)| {
            decision.is_none() && hit.counter.consistency == Consistency::Eventual
        };
        let unknown: SmallVec<[Hit<&Counter>; 2]> =
            hits.iter().zip(&decisions).filter(is_unknown).map(|(hit, _)| *hit).collect();
        let remaining: SmallVec<[Hit<&Counter>; 2]> =
            hits.iter().filter(|hit| hit.counter.consistency != Consistency::Eventual).copied().collect();
        let (fetched, remaining_decisions) = tokio::join!(self.fetch(counters, &unknown, time), async {
            if remaining.is_empty() {
                HitDecisions::new()
            } else {
                self.apply_leased(&remaining, Charge::Each, time).await
            }
        });
        let (mut fetched, mut remaining_decisions) = (fetched.into_iter(), remaining_decisions.into_iter());
        let decide = |(hit, decision): (&Hit<&Counter>, Option<Decision>)| match decision {
            Some(decision) => from_eventual(decision),
            None if hit.counter.consistency == Consistency::Eventual => next_answer(&mut fetched),
            None => next_answer(&mut remaining_decisions),
        };
        hits.iter().zip(decisions).map(decide).collect()
    }

    /// Decides hits in the store, and merges their states into the eventual counters.
    async fn fetch(&self, counters: &EventualCounters, hits: &[Hit<&Counter>], time: CallTime) -> HitDecisions {
        if hits.is_empty() {
            return HitDecisions::new();
        }
        let outcomes = self.store.step(hits, Charge::Each, time.now).await;
        let answered_at = self.shared.time(time.now);
        let merge = |(hit, outcome): (&Hit<&Counter>, Result<StepOutcome, StoreError>)| {
            let outcome = outcome?;
            counters.merge(self.shared.identity(hit), hit, &outcome, time.local, answered_at);
            Ok(outcome.explain(hit).into())
        };
        hits.iter().zip(outcomes).map(merge).collect()
    }

    /// Decides hits under [`Charge::All`].
    ///
    /// Eventual hits are peeked first, then the remaining hits are decided together. The eventual hits are taken if no
    /// binding hit was denied; otherwise no hit is taken.
    async fn apply_together(
        &self,
        counters: &EventualCounters,
        hits: &[Hit<&Counter>],
        time: CallTime,
    ) -> HitDecisions {
        let mut eventual = SmallVec::<[Hit<&Counter>; 2]>::new();
        let mut remaining = SmallVec::<[Hit<&Counter>; 2]>::new();
        for hit in hits {
            let is_eventual = hit.counter.consistency == Consistency::Eventual;
            if is_eventual { eventual.push(*hit) } else { remaining.push(*hit) }
        }
        let peeks: SmallVec<[Hit<&Counter>; 2]> = eventual.iter().map(|hit| hit.peek()).collect();
        let peeked = Box::pin(self.apply_eventual(counters, &peeks, Charge::Each, time)).await;
        let is_denied = |(hit, answer): (&Hit<&Counter>, &Result<HitDecision, StoreError>)| hit.is_denied_by(answer);
        let is_blocked = eventual.iter().zip(&peeked).any(is_denied);
        let remaining_decisions = match (remaining.is_empty(), is_blocked) {
            (true, _) => HitDecisions::new(),
            (false, false) => self.apply_leased(&remaining, Charge::All, time).await,
            (false, true) => {
                let peeks: SmallVec<[Hit<&Counter>; 2]> = remaining.iter().map(|hit| hit.peek()).collect();
                self.apply_leased(&peeks, Charge::Each, time).await
            }
        };
        let all_allowed = !is_blocked && !remaining.iter().zip(&remaining_decisions).any(is_denied);
        let take = |(hit, peeked): (&Hit<&Counter>, Result<HitDecision, StoreError>)| {
            let is_charged = all_allowed && hit.action == Action::Take && peeked.is_ok();
            let taken = is_charged.then(|| counters.decide(self.shared.identity(hit), hit, time.local)).flatten();
            taken.map_or(peeked, from_eventual)
        };
        let taken: HitDecisions = eventual.iter().zip(peeked).map(take).collect();
        let (mut taken, mut remaining_decisions) = (taken.into_iter(), remaining_decisions.into_iter());
        let decision = |hit: &Hit<&Counter>| {
            let is_eventual = hit.counter.consistency == Consistency::Eventual;
            next_answer(if is_eventual { &mut taken } else { &mut remaining_decisions })
        };
        hits.iter().map(decision).collect()
    }

    /// Sends a report and merges the answer.
    pub(super) async fn run_report(&self, counters: &EventualCounters, call: StoreCall, now: Micros) {
        let called_at = self.shared.time(now);
        let answer = only_answer(self.store.step(&[call.hit.borrowed()], Charge::Each, now).await);
        self.shared.metrics.add_eventual_report(self.worker, call.hit.cost, answer.is_ok());
        let lost = counters.finish_report(&call, answer, called_at, self.shared.time(now));
        self.shared.metrics.add_lost_eventual_hits(self.worker, lost);
    }
}

fn from_eventual(decision: Decision) -> Result<HitDecision, StoreError> {
    Ok(HitDecision { decision, decider: Decider::Eventual, grant: None })
}
