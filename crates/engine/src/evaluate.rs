//! Evaluates the candidate rules for requests that the rules in force have decided: immediately with counters in memory,
//! later in batches with a store that waits.

use std::sync::Arc;

use futures_util::future::join_all;
use sluicegate_algorithm::Micros;
use sluicegate_store::{Memory, Store};

use super::{Candidate, DecideError, Engine, Request, Verdict};

/// Prefix of the counters' names of candidate rules. No other name begins with it, because `~` is escaped in domains.
const CANDIDATE_SCOPE: &str = "~trial~";

impl<S> Engine<S> {
    /// Decides one request with counters in memory, in place of the engine's store. Also evaluates the candidate rules.
    ///
    /// # Errors
    ///
    /// Returns an error if no rules are loaded.
    pub fn decide_in(&self, memory: &Memory, request: &Request<'_>, now: Micros) -> Result<Verdict, DecideError> {
        let snapshot = &*self.rules.load();
        let verdict = self.decide_by(snapshot, memory, request, now)?;
        if let Some(candidate) = &snapshot.candidate {
            self.evaluate_in(candidate, memory, request, &verdict, now);
        }
        Ok(verdict)
    }

    /// Evaluates the candidate rules for a request that the rules in force have decided.
    fn evaluate_in(
        &self,
        candidate: &Candidate,
        memory: &Memory,
        request: &Request<'_>,
        verdict: &Verdict,
        now: Micros,
    ) {
        let sampled = candidate.sample_descriptors(request, verdict);
        if sampled.is_empty() {
            return;
        }
        let descriptors = sampled.iter().map(|sampled| request.descriptors[sampled.index].clone()).collect();
        let request = Request { domain: request.domain, descriptors, feedback: Vec::new() };
        let engine = self.with_candidate(candidate, ());
        // A failure of the store is no outcome of the rules.
        if let Ok(verdict) = engine.decide_by(&candidate.rules.load(), memory, &request, now) {
            candidate.record_verdict(self.worker, &request, &verdict, &sampled, now);
        }
    }

    /// Returns an engine that decides by the candidate rules.
    fn with_candidate<T>(&self, candidate: &Candidate, store: T) -> Engine<T> {
        Engine {
            scope: CANDIDATE_SCOPE,
            rules: Arc::clone(&candidate.rules),
            statistics: Arc::clone(&candidate.statistics),
            top: None,
            ..self.with_store(store)
        }
    }
}

impl<S: Store + Clone> Engine<S> {
    /// Evaluates the candidate rules for the requests that this engine's worker has [queued](Candidate::queue).
    pub async fn evaluate_queued(&self, candidate: &Candidate) {
        let engine = self.with_candidate(candidate, self.store.clone());
        let requests = candidate.take_queued(self.worker);
        let snapshot = candidate.rules.load_full();
        join_all(requests.iter().map(async |queued| {
            let request = queued.request();
            if let Ok(verdict) = engine.decide(&snapshot, &request, queued.at).await {
                candidate.record_verdict(self.worker, &request, &verdict, &queued.sampled, queued.at);
            }
        }))
        .await;
        candidate.forget_queued(requests.len());
    }
}
