//! Decisions from eventual counters, before leases, the deny cache and the store.

mod counter;
mod counters;

use sluicegate_algorithm::{Action, Consistency, Decision, Micros};
use sluicegate_store::{
    Charge, Counter, CounterStore, Decider, Hit, HitDecision, HitDecisions, StoreError, next_answer, only_answer,
};
use smallvec::SmallVec;

pub(crate) use self::counters::EventualCounters;
pub use self::counters::Settings;
use super::{CallTime, Local, any_denied, store_call::StoreCall};

impl<S: CounterStore + Clone + Send + Sync + 'static> Local<S> {
    /// Decides all hits of a request with at least one eventual hit.
    ///
    /// Hits of unknown eventual counters are decided by the store, and hits of other counters from leases, the deny
    /// cache or the store. Under [`Charge::All`], all eventual hits are peeked before one is taken.
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
        let decisions: SmallVec<[Option<Decision>; 2]> =
            hits.iter().map(|hit| counters.decide(self.state.identity(hit), hit, time.local)).collect();
        self.state.metrics.eventual_decisions.add(self.worker, decisions.iter().flatten().count() as u64);
        match decisions.iter().map(|decision| decision.map(from_eventual)).collect() {
            Some(all) => all,
            None => Box::pin(self.fetch_unknown(counters, hits, decisions, time)).await,
        }
    }

    /// Decides the hits that have no decision yet: eventual ones in the store, others from leases, the deny cache or
    /// the store.
    async fn fetch_unknown(
        &self,
        counters: &EventualCounters,
        hits: &[Hit<&Counter>],
        decisions: SmallVec<[Option<Decision>; 2]>,
        time: CallTime,
    ) -> HitDecisions {
        let mut unknown = SmallVec::<[Hit<&Counter>; 2]>::new();
        let mut remaining = SmallVec::<[Hit<&Counter>; 2]>::new();
        for (hit, decision) in hits.iter().zip(&decisions) {
            if hit.counter.consistency != Consistency::Eventual {
                remaining.push(*hit);
            } else if decision.is_none() {
                unknown.push(*hit);
            }
        }
        let (fetched, remaining_decisions) = tokio::join!(self.fetch(counters, &unknown, time), async {
            if remaining.is_empty() {
                HitDecisions::new()
            } else {
                self.apply_leased(&remaining, Charge::Each, time).await
            }
        });
        let mut fetched = fetched.into_iter();
        let mut remaining_decisions = remaining_decisions.into_iter();
        let mut all = HitDecisions::with_capacity(hits.len());
        for (hit, decision) in hits.iter().zip(decisions) {
            all.push(match decision {
                Some(decision) => from_eventual(decision),
                None if hit.counter.consistency == Consistency::Eventual => next_answer(&mut fetched),
                None => next_answer(&mut remaining_decisions),
            });
        }
        all
    }

    /// Decides hits in the store, and merges their states into the eventual counters.
    async fn fetch(&self, counters: &EventualCounters, hits: &[Hit<&Counter>], time: CallTime) -> HitDecisions {
        if hits.is_empty() {
            return HitDecisions::new();
        }
        let outcomes = self.store.step(hits, Charge::Each, time.now).await;
        let answered_at = self.state.time(time.now);
        let mut decisions = HitDecisions::with_capacity(hits.len());
        for (hit, outcome) in hits.iter().zip(outcomes) {
            if let Ok(outcome) = &outcome {
                counters.merge(self.state.identity(hit), hit, outcome, time.local, answered_at);
            }
            decisions.push(outcome.map(|outcome| outcome.explain(hit).into()));
        }
        decisions
    }

    /// Decides hits under [`Charge::All`].
    ///
    /// Eventual hits are peeked first, then the remaining hits are decided together. The eventual hits are taken if no
    /// blocking hit was denied; otherwise no hit is taken.
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
        let is_blocked = any_denied(&eventual, &peeked);
        let remaining_decisions = if remaining.is_empty() {
            HitDecisions::new()
        } else if is_blocked {
            let peeks: SmallVec<[Hit<&Counter>; 2]> = remaining.iter().map(|hit| hit.peek()).collect();
            self.apply_leased(&peeks, Charge::Each, time).await
        } else {
            self.apply_leased(&remaining, Charge::All, time).await
        };
        let all_allowed = !is_blocked && !any_denied(&remaining, &remaining_decisions);
        let mut eventual_decisions = peeked;
        if all_allowed {
            for (hit, decision) in eventual.iter().zip(&mut eventual_decisions) {
                if hit.action == Action::Take
                    && decision.is_ok()
                    && let Some(taken) = counters.decide(self.state.identity(hit), hit, time.local)
                {
                    *decision = from_eventual(taken);
                }
            }
        }
        let mut eventual_decisions = eventual_decisions.into_iter();
        let mut remaining_decisions = remaining_decisions.into_iter();
        let mut all = HitDecisions::with_capacity(hits.len());
        for hit in hits {
            let is_eventual = hit.counter.consistency == Consistency::Eventual;
            let decisions = if is_eventual { &mut eventual_decisions } else { &mut remaining_decisions };
            all.push(next_answer(decisions));
        }
        all
    }

    /// Sends a report and merges the answer.
    pub(super) async fn run_report(&self, counters: &EventualCounters, call: StoreCall, now: Micros) {
        let called_at = self.state.time(now);
        let answer = only_answer(self.store.step(&[call.hit.borrowed()], Charge::Each, now).await);
        if answer.is_ok() {
            self.state.metrics.eventual_reported_hits.add(self.worker, call.hit.cost);
        }
        let lost = counters.finish_report(&call, answer, called_at, self.state.time(now));
        self.state.metrics.eventual_lost_hits.add(self.worker, lost);
    }
}

fn from_eventual(decision: Decision) -> Result<HitDecision, StoreError> {
    Ok(HitDecision { decision, decider: Decider::Eventual, grant: None })
}
