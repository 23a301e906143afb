//! Decides the hits of one request on any number of servers: sends one call per server, all concurrently, follows
//! redirects, and combines the answers.
//!
//! No hit is counted twice: a call is only resent if the server reported that it did nothing.
//!
//! ## All or none ([`Charge::All`])
//! If one call reaches all hits, the script charges all of them or none. Otherwise each part is taken separately, and
//! as soon as one part is denied, the hits that the others have taken are rolled back. Until the rollback arrives,
//! after one round trip, other callers can see too few remaining hits, but never too many. The parts run in a separate
//! task, so that a caller that disconnects has no effect.

use std::sync::Arc;

use futures_util::future::join_all;
use sluicegate_algorithm::{Action, Micros};
use sluicegate_deadline::within;
use sluicegate_store::{Charge, Counter, Hit, StepOutcome, StepOutcomes, StoreError};
use smallvec::SmallVec;
use tokio::sync::watch;

use super::{
    Redis,
    batch::{Batcher, RequestSteps},
    combined_script::{Outcome, Step},
    node::{CallError, Redirect},
    pool::{MAX_REDIRECTS, Pool, Target},
};

/// The outcome of one hit, or the reason why there is none.
type HitResult = Result<StepOutcome, StoreError>;

impl Redis {
    /// Runs the steps of the hits. Futures of rare cases are boxed, to keep the future of a pending decision small.
    pub(super) async fn apply_multi_node(&self, hits: &[Hit<&Counter>], charge: Charge, now: Micros) -> StepOutcomes {
        let target = self.common_target(hits);
        if charge == Charge::All {
            return Box::pin(self.step_all_or_none(target, hits, now)).await;
        }
        match &target {
            Some(target) => self.step_part(target, hits, now).await,
            None => Box::pin(self.step_each(hits, now)).await,
        }
    }

    /// Runs the steps so that all hits take or none does. `target` is set if one call reaches all hits.
    async fn step_all_or_none(&self, target: Option<Target>, hits: &[Hit<&Counter>], now: Micros) -> StepOutcomes {
        if let Some(target) = target {
            match target.batcher.steps(hits, Charge::All, now, target.slot).await {
                Ok(RequestSteps { at, steps }) if steps.iter().all(Step::is_final) => {
                    return to_group_results(hits, steps, at);
                }
                Err(CallError::Failed(error)) => return hits.iter().map(|_| Err(error)).collect(),
                Ok(_) | Err(CallError::Redirected(_)) => {}
            }
        }
        let owned = hits.iter().map(Hit::to_owned).collect();
        let task = tokio::spawn(self.clone().take_all_or_none(owned, now));
        task.await.unwrap_or_else(|_| hits.iter().map(|_| Err(StoreError::Unavailable)).collect())
    }

    /// Returns the target that the hits have in common if one call reaches all of them.
    fn common_target(&self, hits: &[Hit<&Counter>]) -> Option<Target> {
        let (first, others) = hits.split_first()?;
        let target = self.target(first)?;
        for hit in others {
            if !self.target(hit)?.shares_call_with(&target) {
                return None;
            }
        }
        Some(target)
    }

    fn target(&self, hit: &Hit<&Counter>) -> Option<Target> {
        self.pool(hit).target(&hit.counter.name)
    }

    /// Runs the step of each hit independently, with one call per server.
    async fn step_each(&self, hits: &[Hit<&Counter>], now: Micros) -> StepOutcomes {
        let parts = self.parts(hits, Granularity::Server);
        let calls = parts.iter().map(async |part| self.step_part(&part.target, &part.hits_of(hits), now).await);
        let answers = join_all(calls).await;
        combine_parts(hits.len(), &parts, answers)
    }

    /// Runs the steps of hits of one server, each independently.
    async fn step_part(&self, target: &Target, hits: &[Hit<&Counter>], now: Micros) -> StepOutcomes {
        // The steps are moved into the boxed future, to keep the future of a pending decision small.
        let redirected = match target.batcher.steps(hits, Charge::Each, now, target.slot).await {
            Ok(RequestSteps { at, steps }) if steps.iter().all(Step::is_final) => {
                return hits.iter().zip(steps).map(|(hit, step)| to_result(step, at, hit.action)).collect();
            }
            result => Box::pin(self.resend_redirected(target, hits, now, result)),
        };
        redirected.await
    }

    /// Resends the hits that the server did not execute, and combines their results with those of the others.
    async fn resend_redirected(
        &self,
        target: &Target,
        hits: &[Hit<&Counter>],
        now: Micros,
        result: Result<RequestSteps, CallError>,
    ) -> StepOutcomes {
        let (RequestSteps { at, steps }, redirect) = match result {
            Ok(steps) => (steps, None),
            Err(CallError::Redirected(to)) => (RequestSteps { at: now, steps: SmallVec::new() }, Some(to)),
            Err(CallError::Failed(error)) => return hits.iter().map(|_| Err(error)).collect(),
        };
        let batcher = &target.batcher;
        let redirect = redirect.as_ref();
        // There are no steps after a redirect.
        let mut steps = steps.into_iter();
        let mut answers = Vec::with_capacity(hits.len());
        for hit in hits {
            let step = steps.next();
            answers.push(async move {
                match step {
                    Some(step) if step.is_final() => to_result(step, at, hit.action),
                    _ => self.resend_one(hit, now, batcher, redirect).await,
                }
            });
        }
        join_all(answers).await.into()
    }

    async fn resend_one(
        &self,
        hit: &Hit<&Counter>,
        now: Micros,
        from: &Arc<Batcher>,
        redirect: Option<&Redirect>,
    ) -> HitResult {
        let one = std::slice::from_ref(hit);
        let pool = self.pool(hit);
        match self.follow_redirects(pool, one, Charge::Each, now, Arc::clone(from), redirect.cloned()).await {
            Ok(RequestSteps { at, mut steps }) => {
                let step = steps.pop().ok_or_else(StoreError::missing)?;
                to_result(step, at, hit.action)
            }
            Err(CallError::Failed(error)) => Err(error),
            // Only several hits can be split.
            Err(CallError::Redirected(_)) => Err(StoreError::missing()),
        }
    }

    /// Runs the steps of hits of one slot in one call to `batcher`, after `redirect` if it is set, and follows redirects.
    /// Fails with [`Redirect::Split`] if no single server has all of them.
    async fn follow_redirects(
        &self,
        pool: &Arc<Pool>,
        hits: &[Hit<&Counter>],
        charge: Charge,
        now: Micros,
        mut batcher: Arc<Batcher>,
        mut redirect: Option<Redirect>,
    ) -> Result<RequestSteps, CallError> {
        let follow = async {
            for _ in 0..MAX_REDIRECTS {
                let asking = matches!(redirect, Some(Redirect::Ask(..)));
                match redirect.take() {
                    Some(Redirect::Moved(host, port) | Redirect::Ask(host, port)) => {
                        batcher = pool.batcher_at(&host, port).ok_or(StoreError::Unavailable)?;
                        // The connection to this server may still be opening.
                        batcher.node().wait_until_up().await;
                    }
                    Some(Redirect::Split) if hits.len() > 1 => return Err(CallError::Redirected(Redirect::Split)),
                    Some(Redirect::Split | Redirect::DeclareKeys) | None => {}
                }
                match batcher.steps_unbatched(hits, charge, now, asking).await {
                    Err(CallError::Redirected(to)) => redirect = Some(to),
                    result => return result,
                }
            }
            Err(StoreError::Rejected.into())
        };
        within(pool.deadline(), follow).await.unwrap_or(Err(StoreError::Timeout.into()))
    }

    /// Takes all hits or none, with one call per part. If a part is not on the expected server, starts again with
    /// smaller parts.
    async fn take_all_or_none(self, hits: Vec<Hit>, now: Micros) -> StepOutcomes {
        let hits: Vec<Hit<&Counter>> = hits.iter().map(Hit::borrowed).collect();
        for granularity in [Granularity::Server, Granularity::Slot, Granularity::Hit] {
            let parts = self.parts(&hits, granularity);
            let denied = is_denied_without_server(&hits, &parts);
            let outcome = watch::Sender::new(ChargeOutcome { pending_parts: parts.len(), denied, misplaced: false });
            let takes = parts.iter().map(|part| self.take_part(part, &hits, now, granularity, &outcome));
            let answers = join_all(takes).await;
            if !outcome.borrow().misplaced {
                return combine_parts(hits.len(), &parts, answers);
            }
        }
        hits.iter().map(|_| Err(StoreError::Rejected)).collect()
    }

    /// Takes the hits of one part, waits for the outcome of the other parts, and rolls back if one of them was denied.
    async fn take_part(
        &self,
        part: &CallPart,
        hits: &[Hit<&Counter>],
        now: Micros,
        granularity: Granularity,
        outcome: &watch::Sender<ChargeOutcome>,
    ) -> StepOutcomes {
        let part_hits = part.hits_of(hits);
        let Target { batcher, slot } = &part.target;
        let result = match granularity {
            Granularity::Server => batcher.steps(&part_hits, Charge::All, now, *slot).await,
            Granularity::Slot | Granularity::Hit => {
                let pool = self.pool(&part_hits[0]);
                self.follow_redirects(pool, &part_hits, Charge::All, now, Arc::clone(batcher), None).await
            }
        };
        let mut answers = StepOutcomes::new();
        let mut misplaced = false;
        let mut taken_at = None;
        match result {
            Ok(RequestSteps { at, steps }) if steps.iter().all(Step::is_final) => {
                answers = to_group_results(&part_hits, steps, at);
                taken_at = Some(at);
            }
            Ok(_) | Err(CallError::Redirected(_)) => misplaced = true,
            Err(CallError::Failed(error)) => answers = part_hits.iter().map(|_| Err(error)).collect(),
        }
        let denied =
            part_hits.iter().zip(&answers).any(|(hit, answer)| hit.blocks.prevents(answer, |step| step.allowed));
        outcome.send_modify(|outcome| {
            outcome.pending_parts -= 1;
            outcome.denied |= denied || misplaced;
            outcome.misplaced |= misplaced;
        });
        let mut others = outcome.subscribe();
        let passed = others
            .wait_for(|outcome| outcome.denied || outcome.pending_parts == 0)
            .await
            .is_ok_and(|outcome| !outcome.denied);
        match taken_at {
            Some(at) if !passed && !denied => self.roll_back(&part_hits, answers, at, now).await,
            _ => answers,
        }
    }

    /// Rolls back the takes of `hits` at `taken_at`. The answers become those of a peek.
    async fn roll_back(
        &self,
        hits: &[Hit<&Counter>],
        mut answers: StepOutcomes,
        taken_at: Micros,
        now: Micros,
    ) -> StepOutcomes {
        let mut indices: SmallVec<[usize; 4]> = SmallVec::new();
        let mut rollbacks: SmallVec<[Hit<&Counter>; 4]> = SmallVec::new();
        for (index, hit) in hits.iter().enumerate() {
            let Ok(step) = &answers[index] else {
                continue;
            };
            let is_counted = step.allowed || hit.counter.program.counts_denied();
            if hit.action == Action::Take && is_counted {
                indices.push(index);
                rollbacks.push(Hit { action: Action::RollBack(taken_at), ..*hit });
            }
        }
        let results = self.step_each(&rollbacks, now).await;
        for (index, result) in indices.into_iter().zip(results) {
            match result {
                Ok(step) => answers[index] = Ok(step),
                Err(_) => self.metrics.health().rollback_failed(self.worker),
            }
        }
        answers
    }

    /// Groups the hits by target. Hits with an unknown server are in no part.
    fn parts(&self, hits: &[Hit<&Counter>], granularity: Granularity) -> Vec<CallPart> {
        let mut parts: Vec<CallPart> = Vec::new();
        for (index, hit) in hits.iter().enumerate() {
            let Some(mut target) = self.target(hit) else {
                continue;
            };
            if granularity == Granularity::Slot {
                target.slot = Some(self.pool(hit).slot(&hit.counter.name));
            }
            match parts.iter_mut().find(|part| granularity != Granularity::Hit && part.target.shares_call_with(&target))
            {
                Some(part) => part.indices.push(index),
                None => parts.push(CallPart { target, indices: SmallVec::from_slice(&[index]) }),
            }
        }
        parts
    }
}

/// How the hits of a request are divided into calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Granularity {
    /// One call for all hits of one server.
    Server,
    /// One call for all hits of one slot.
    Slot,
    /// One call per hit, because its slot is migrating and the keys of the slot are on two servers.
    Hit,
}

/// The hits of a request that one call decides, by their indices in the request.
struct CallPart {
    target: Target,
    indices: SmallVec<[usize; 4]>,
}

impl CallPart {
    /// Returns the hits of the part. `hits` are those of the request.
    fn hits_of<'h>(&self, hits: &[Hit<&'h Counter>]) -> SmallVec<[Hit<&'h Counter>; 4]> {
        self.indices.iter().map(|index| hits[*index]).collect()
    }
}

/// The combined outcome of the parts that have completed.
struct ChargeOutcome {
    pending_parts: usize,
    /// Whether a part was denied or misplaced, so that the others must be rolled back.
    denied: bool,
    /// Whether a part was not on the expected server, and took nothing.
    misplaced: bool,
}

impl Step {
    /// Returns whether the outcome is final, so that the hit need not be resent.
    fn is_final(&self) -> bool {
        !matches!(self.outcome, Outcome::NonLocal | Outcome::Undeclared)
    }
}

/// Combines the answers of parts in the order of the request's hits. A hit that is in no part is unavailable.
fn combine_parts(hit_count: usize, parts: &[CallPart], part_answers: Vec<StepOutcomes>) -> StepOutcomes {
    let mut combined: StepOutcomes = (0..hit_count).map(|_| Err(StoreError::Unavailable)).collect();
    for (part, answers) in parts.iter().zip(part_answers) {
        for (index, answer) in part.indices.iter().zip(answers) {
            combined[*index] = answer;
        }
    }
    combined
}

/// Returns whether a hit prevents the request because its server is unknown, so that it cannot be decided.
fn is_denied_without_server(hits: &[Hit<&Counter>], parts: &[CallPart]) -> bool {
    for (index, hit) in hits.iter().enumerate() {
        let has_server = parts.iter().any(|part| part.indices.contains(&index));
        if hit.blocks.on_error() && !has_server {
            return true;
        }
    }
    false
}

/// Converts the step of a hit with this action. A step without a decision is an error.
fn to_result(step: Step, at: Micros, action: Action) -> HitResult {
    let allowed = match step.outcome {
        Outcome::Allowed => true,
        Outcome::Denied => false,
        Outcome::InvalidState | Outcome::NonLocal | Outcome::Undeclared => return Err(StoreError::Rejected),
    };
    Ok(StepOutcome { allowed, action, at, state: step.state })
}

/// Converts the steps of hits that were charged together. If a blocking hit was denied, the others are peeks.
fn to_group_results(hits: &[Hit<&Counter>], steps: SmallVec<[Step; 1]>, at: Micros) -> StepOutcomes {
    let denied = hits.iter().zip(&steps).any(|(hit, step)| hit.blocks.on_denial() && step.outcome == Outcome::Denied);
    let mut results = StepOutcomes::with_capacity(hits.len());
    for (hit, step) in hits.iter().zip(steps) {
        let action = if denied && hit.action == Action::Take { Action::Peek } else { hit.action };
        results.push(to_result(step, at, action));
    }
    results
}

#[cfg(test)]
mod tests {
    use sluicegate_algorithm::{State, fixed_window::FixedWindow};
    use sluicegate_store::Blocks;

    use super::*;

    #[test]
    fn takes_of_a_denied_group_become_peeks() {
        let counter = Counter::new(b"k", FixedWindow::DENY_ALL);
        let actions = |blocks: Blocks, outcome: Outcome| {
            let take = Hit { blocks, ..counter.take(1) };
            let hits = [take, Hit { action: Action::Refund, ..take }];
            let steps = [outcome, Outcome::Allowed].map(|outcome| Step {
                outcome,
                is_repaired: false,
                state: State::default(),
            });
            let results = to_group_results(&hits, steps.into_iter().collect(), Micros::ZERO);
            results.into_iter().map(|result| result.unwrap().action).collect::<Vec<_>>()
        };
        assert_eq!(actions(Blocks::OnDenial, Outcome::Allowed), [Action::Take, Action::Refund]);
        assert_eq!(actions(Blocks::OnDenial, Outcome::Denied), [Action::Peek, Action::Refund]);
        assert_eq!(actions(Blocks::Never, Outcome::Denied), [Action::Take, Action::Refund]);
    }
}
