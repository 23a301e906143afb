//! What this instance knows, before anybody is asked. It stands before a store that others share, and each part can be
//! taken out:
//!
//! ```text
//! Local            one worker's way in
//!   DenyCache      refusals that still hold
//!   Counters       the shared store
//! ```

mod deny_cache;
mod metrics;

pub use deny_cache::Settings as DenyCacheSettings;
pub use metrics::Metrics;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use smallvec::SmallVec;

use self::deny_cache::{DenyCache, Known, Question, Questions};
use super::{Answer, Answers, Charge, Counted, Counters, Decider, Hit, Store, StoreError};
use crate::{
    algorithm::{Action, Decision, Micros},
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
    clock: Clock,
    metrics: Arc<Metrics>,
}

impl Shared {
    /// Nothing known yet.
    #[must_use]
    pub fn new(deny_cache: &DenyCacheSettings, clock: Clock, metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Self { deny_cache: DenyCache::new(deny_cache), clock, metrics })
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

impl<S: Counters + Sync> Store for Local<S> {
    async fn apply(&self, hits: &[Hit<'_>], charge: Charge, now: Micros) -> Answers {
        let Some(deny_cache) = &self.shared.deny_cache else {
            let counts = self.store.count(hits, charge, now).await;
            return hits.iter().zip(counts).map(|(hit, counted)| Ok(counted?.explain(hit).into())).collect();
        };
        let asked = self.shared.clock.now(now);
        let questions = deny_cache.questions(hits);
        if let Some(known) = deny_cache.known(hits, &questions, asked) {
            self.shared.metrics.refused(self.worker, known.iter().flatten().count() as u64);
            if let Some(all) = known.iter().map(|decision| decision.map(refused)).collect() {
                return all;
            }
            return Box::pin(self.ask_others(deny_cache, hits, (questions, known), charge, (now, asked))).await;
        }
        let counts = self.store.count(hits, charge, now).await;
        let answer = |((hit, question), counted): ((&Hit<'_>, Question), Result<Counted, StoreError>)| {
            Ok(deny_cache.learn(hit, question, counted?, asked).into())
        };
        hits.iter().zip(questions).zip(counts).map(answer).collect()
    }
}

impl<S: Counters + Sync> Local<S> {
    /// Asks for what is not known. Where something known refuses all, nothing is taken, and the others only look.
    async fn ask_others(
        &self,
        deny_cache: &DenyCache,
        hits: &[Hit<'_>],
        (questions, known): (Questions, Known),
        charge: Charge,
        (now, asked): (Micros, Duration),
    ) -> Answers {
        let binding = hits.iter().zip(&known).any(|(hit, known)| hit.binding && known.is_some());
        let looks = charge == Charge::All && binding;
        let mut others: SmallVec<[Hit<'_>; 2]> =
            hits.iter().zip(&known).filter(|(_, known)| known.is_none()).map(|(hit, _)| *hit).collect();
        for hit in others.iter_mut().filter(|hit| looks && hit.action == Action::Take) {
            hit.action = Action::Peek;
        }
        let charge = if looks { Charge::Each } else { charge };
        let mut counts = self.store.count(&others, charge, now).await.into_iter();
        let answer = |((hit, question), known): ((&Hit<'_>, Question), Option<Decision>)| match known {
            Some(decision) => refused(decision),
            None => {
                let counted = counts.next().unwrap_or(Err(StoreError::Refused))?;
                Ok(deny_cache.learn(hit, question, counted, asked).into())
            }
        };
        hits.iter().zip(questions).zip(known).map(answer).collect()
    }
}

fn refused(decision: Decision) -> Result<Answer, StoreError> {
    Ok(Answer { decision, decider: Decider::DenyCache })
}
