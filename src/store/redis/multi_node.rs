//! The hits of one request, wherever they live: each server's in one call, all servers at the same time, redirects
//! followed, and the answers put together.
//!
//! Nothing is counted twice: a call is only made again when a server said that it did nothing.
//!
//! ## Charged for all or none
//! Where one call reaches all hits, the program sees to it. Where it does not, each part is taken by itself, and as soon
//! as one refuses, what the others have taken is given back. Until that has arrived (one round trip) other callers
//! may see too little, never too much. It happens in a task of its own: a caller who hangs up meanwhile changes nothing.

use futures_util::future::join_all;
use smallvec::SmallVec;
use tokio::{sync::watch, time::timeout};

use std::sync::Arc;

use super::{
    Redis,
    batch::{Batcher, Steps},
    node::{CallError, Redirect},
    pool::{Pool, REDIRECTS, Target},
    program::{Outcome, Step},
};
use crate::{
    algorithm::{Action, Algorithm, Consistency, Micros},
    store::{Charge, Hit, StepOutcome, StepOutcomes, StoreError},
};

/// What became of one hit.
type Done = Result<StepOutcome, StoreError>;

impl Redis {
    /// What is rare is boxed: a decision that waits is to be small.
    pub(super) async fn apply_multi_node(&self, hits: &[Hit<'_>], charge: Charge, now: Micros) -> StepOutcomes {
        let target = self.common_target(hits);
        if charge == Charge::All {
            return Box::pin(self.together(target, hits, now)).await;
        }
        match &target {
            Some(target) => self.part(target, hits, now).await,
            None => Box::pin(self.each(hits, now)).await,
        }
    }

    /// All hits take, or none does. `target`: where one call reaches them all.
    async fn together(&self, target: Option<Target>, hits: &[Hit<'_>], now: Micros) -> StepOutcomes {
        if let Some(target) = target {
            match target.batcher.steps(hits, Charge::All, now, target.slot).await {
                Ok((now, steps)) if steps.iter().all(Step::is_here) => return read_all(hits, steps, now),
                Err(CallError::Failed(error)) => return hits.iter().map(|_| Err(error)).collect(),
                Ok(_) | Err(CallError::Elsewhere(_)) => {}
            }
        }
        let owned = hits.iter().map(OwnedHit::new).collect();
        let all = tokio::spawn(self.clone().all(owned, now));
        all.await.unwrap_or_else(|_| hits.iter().map(|_| Err(StoreError::Unavailable)).collect())
    }

    /// Where one call reaches all hits, that is.
    fn common_target(&self, hits: &[Hit<'_>]) -> Option<Target> {
        let (first, others) = hits.split_first()?;
        let target = self.target(first)?;
        let same = |hit: &Hit<'_>| self.target(hit).is_some_and(|other| other.is(&target));
        others.iter().all(same).then_some(target)
    }

    fn target(&self, hit: &Hit<'_>) -> Option<Target> {
        self.pool(hit).target(hit.key)
    }

    /// Each hit takes its own, on whatever servers.
    async fn each(&self, hits: &[Hit<'_>], now: Micros) -> StepOutcomes {
        let mut answers: StepOutcomes = hits.iter().map(|_| Err(StoreError::Unavailable)).collect();
        let parts = self.parts(hits, Granularity::Server).into_iter().map(async |part| {
            let own: SmallVec<[Hit<'_>; 4]> = part.places.iter().map(|place| hits[*place]).collect();
            (self.part(&part.target, &own, now).await, part.places)
        });
        for (own, places) in join_all(parts).await {
            for (answer, place) in own.into_iter().zip(places) {
                answers[place] = answer;
            }
        }
        answers
    }

    /// Hits of one server, each for itself.
    async fn part(&self, target: &Target, hits: &[Hit<'_>], now: Micros) -> StepOutcomes {
        // The steps are not kept while the others are sent on: a decision that waits is to be small.
        let follow = match target.batcher.steps(hits, Charge::Each, now, target.slot).await {
            Ok((at, steps)) if steps.iter().all(Step::is_here) => {
                return hits.iter().zip(steps).map(|(hit, step)| read(step, at, hit.action)).collect();
            }
            otherwise => Box::pin(self.follow_some(target, hits, now, otherwise)),
        };
        follow.await
    }

    /// The answers of those that were there, and the others sent on.
    async fn follow_some(
        &self,
        target: &Target,
        hits: &[Hit<'_>],
        now: Micros,
        result: Result<Steps, CallError>,
    ) -> StepOutcomes {
        let (at, steps, redirect) = match result {
            Ok((at, steps)) => (at, steps, None),
            Err(CallError::Elsewhere(to)) => (now, SmallVec::new(), Some(to)),
            Err(CallError::Failed(error)) => return hits.iter().map(|_| Err(error)).collect(),
        };
        let steps = steps.into_iter().map(Some).chain(std::iter::repeat(None));
        let answers = hits.iter().zip(steps).map(async |(hit, step)| match step {
            Some(step) if step.is_here() => read(step, at, hit.action),
            _ => self.follow_one(hit, now, &target.batcher, redirect.as_ref()).await,
        });
        join_all(answers).await.into()
    }

    async fn follow_one(&self, hit: &Hit<'_>, now: Micros, from: &Arc<Batcher>, redirect: Option<&Redirect>) -> Done {
        let one = std::slice::from_ref(hit);
        let from = (Arc::clone(from), redirect.cloned());
        match self.follow(self.pool(hit), one, Charge::Each, now, from).await {
            Ok((now, mut steps)) => steps.pop().map_or(Err(StoreError::Rejected), |step| read(step, now, hit.action)),
            Err(CallError::Failed(error)) => Err(error),
            Err(CallError::Elsewhere(_)) => Err(StoreError::Rejected),
        }
    }

    /// Hits of one slot in one call, wherever the slot is. [`Redirect::Apart`] when they are on no one server.
    async fn follow(
        &self,
        pool: &Arc<Pool>,
        hits: &[Hit<'_>],
        charge: Charge,
        now: Micros,
        (mut batcher, mut redirect): (Arc<Batcher>, Option<Redirect>),
    ) -> Result<Steps, CallError> {
        let follow = async {
            for _ in 0..REDIRECTS {
                let asking = matches!(redirect, Some(Redirect::Ask(..)));
                match redirect.take() {
                    Some(Redirect::Moved(host, port) | Redirect::Ask(host, port)) => {
                        batcher = pool.server(&host, port).ok_or(StoreError::Unavailable)?;
                        // Perhaps nobody has spoken to it yet.
                        batcher.node().up().await;
                    }
                    Some(Redirect::Apart) if hits.len() > 1 => return Err(CallError::Elsewhere(Redirect::Apart)),
                    Some(Redirect::Apart | Redirect::Declared) | None => {}
                }
                match batcher.alone(hits, charge, now, asking).await {
                    Err(CallError::Elsewhere(to)) => redirect = Some(to),
                    result => return result,
                }
            }
            Err(StoreError::Rejected.into())
        };
        timeout(pool.deadline(), follow).await.unwrap_or(Err(StoreError::Timeout.into()))
    }

    /// All hits take, or none does, on whatever servers. When a part turns out not to be where it was thought to be,
    /// all begins anew in smaller parts.
    async fn all(self, hits: Vec<OwnedHit>, now: Micros) -> StepOutcomes {
        let hits: Vec<Hit<'_>> = hits.iter().map(OwnedHit::hit).collect();
        for grain in [Granularity::Server, Granularity::Slot, Granularity::Hit] {
            let parts = self.parts(&hits, grain);
            // A hit of which nobody knows where it lives cannot be decided.
            let is_placed = |place: usize| parts.iter().any(|part| part.places.contains(&place));
            let refused = (0..hits.len()).any(|place| hits[place].needed && !is_placed(place));
            let verdict = watch::Sender::new(ChargeOutcome { waiting: parts.len(), refused, scattered: false });
            let taken = join_all(parts.iter().map(|part| self.take(part, &hits, now, grain, &verdict))).await;
            if verdict.borrow().scattered {
                continue;
            }
            let mut answers: StepOutcomes = hits.iter().map(|_| Err(StoreError::Unavailable)).collect();
            for (part, own) in parts.iter().zip(taken) {
                for (place, answer) in part.places.iter().zip(own) {
                    answers[*place] = answer;
                }
            }
            return answers;
        }
        hits.iter().map(|_| Err(StoreError::Rejected)).collect()
    }

    /// Takes one part, waits for what becomes of the others, and gives back if that is no.
    async fn take(
        &self,
        part: &CallPart,
        hits: &[Hit<'_>],
        now: Micros,
        grain: Granularity,
        verdict: &watch::Sender<ChargeOutcome>,
    ) -> StepOutcomes {
        let own: SmallVec<[Hit<'_>; 4]> = part.places.iter().map(|place| hits[*place]).collect();
        let Target { batcher, slot } = &part.target;
        let result = match grain {
            Granularity::Server => batcher.steps(&own, Charge::All, now, *slot).await,
            Granularity::Slot | Granularity::Hit => {
                let from = (Arc::clone(batcher), None);
                self.follow(self.pool(&own[0]), &own, Charge::All, now, from).await
            }
        };
        let (answers, scattered, took) = match result {
            Ok((_, steps)) if !steps.iter().all(Step::is_here) => (StepOutcomes::new(), true, None),
            Err(CallError::Elsewhere(_)) => (StepOutcomes::new(), true, None),
            Err(CallError::Failed(error)) => (own.iter().map(|_| Err(error)).collect(), false, None),
            Ok((at, steps)) => (read_all(&own, steps, at), false, Some(at)),
        };
        let refuses = |(hit, answer): (&Hit<'_>, &Done)| match answer {
            Ok(step) => hit.binding && !step.allowed,
            Err(_) => hit.needed,
        };
        let refused = own.iter().zip(&answers).any(refuses);
        verdict.send_modify(|verdict| {
            verdict.waiting -= 1;
            verdict.refused |= refused || scattered;
            verdict.scattered |= scattered;
        });
        let mut others = verdict.subscribe();
        let passed =
            others.wait_for(|verdict| verdict.refused || verdict.waiting == 0).await.is_ok_and(|it| !it.refused);
        match took {
            Some(at) if !passed && !refused => self.roll_back(&own, answers, at, now).await,
            _ => answers,
        }
    }

    /// Undoes what these hits took at that instant; their answers are then those of a look.
    async fn roll_back(&self, hits: &[Hit<'_>], mut answers: StepOutcomes, taken: Micros, now: Micros) -> StepOutcomes {
        let counts = |hit: &Hit<'_>, step: &StepOutcome| step.allowed || hit.algorithm.counts_denied();
        let took = |place: &usize| {
            let hit = &hits[*place];
            hit.action == Action::Take && answers[*place].as_ref().is_ok_and(|step| counts(hit, step))
        };
        let places: SmallVec<[usize; 4]> = (0..hits.len()).filter(took).collect();
        let undo = |place: &usize| Hit { action: Action::RollBack(taken), ..hits[*place] };
        let undone: SmallVec<[Hit<'_>; 4]> = places.iter().map(undo).collect();
        for (place, undone) in places.into_iter().zip(self.each(&undone, now).await) {
            match undone {
                Ok(step) => answers[place] = Ok(step),
                Err(_) => self.metrics.redis().rollback_failed(self.worker),
            }
        }
        answers
    }

    /// The hits by where they live; those of which nobody knows are in no part.
    fn parts(&self, hits: &[Hit<'_>], grain: Granularity) -> Vec<CallPart> {
        let mut parts: Vec<CallPart> = Vec::new();
        for (place, hit) in hits.iter().enumerate() {
            let Some(mut target) = self.target(hit) else {
                continue;
            };
            if grain == Granularity::Slot {
                target.slot = Some(self.pool(hit).slot(hit.key));
            }
            match parts.iter_mut().find(|part| grain != Granularity::Hit && part.target.is(&target)) {
                Some(part) => part.places.push(place),
                None => parts.push(CallPart { target, places: SmallVec::from_slice(&[place]) }),
            }
        }
        parts
    }
}

/// What is decided in one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Granularity {
    /// All that one server has.
    Server,
    /// All that is in one slot, wherever that is.
    Slot,
    /// One hit: its slot is on the move, some keys here and some there.
    Hit,
}

/// Hits that live together, by their places in the request.
struct CallPart {
    target: Target,
    places: SmallVec<[usize; 4]>,
}

/// What is known of all parts together.
struct ChargeOutcome {
    waiting: usize,
    refused: bool,
    /// A part was not where it was thought to be, and took nothing.
    scattered: bool,
}

/// A hit that outlives its request.
struct OwnedHit {
    key: Vec<u8>,
    algorithm: Algorithm,
    action: Action,
    cost: u64,
    binding: bool,
    needed: bool,
    per_second: bool,
    consistency: Consistency,
}

impl OwnedHit {
    fn new(hit: &Hit<'_>) -> Self {
        let Hit { key, algorithm, action, cost, binding, needed, per_second, consistency, demand: _ } = *hit;
        Self { key: key.to_vec(), algorithm: *algorithm, action, cost, binding, needed, per_second, consistency }
    }

    fn hit(&self) -> Hit<'_> {
        let Self { key, algorithm, action, cost, binding, needed, per_second, consistency } = self;
        Hit {
            key,
            algorithm,
            action: *action,
            cost: *cost,
            binding: *binding,
            needed: *needed,
            per_second: *per_second,
            consistency: *consistency,
            demand: 0,
        }
    }
}

impl Step {
    fn is_here(&self) -> bool {
        !matches!(self.outcome, Outcome::Elsewhere | Outcome::Undeclared)
    }
}

fn read(step: Step, at: Micros, action: Action) -> Done {
    let allowed = match step.outcome {
        Outcome::Allowed => true,
        Outcome::Refused => false,
        Outcome::Spoiled | Outcome::Elsewhere | Outcome::Undeclared => return Err(StoreError::Rejected),
    };
    Ok(StepOutcome { allowed, action, at, state: step.state })
}

/// Hits of one call that were charged together: when one that is binding refused, the others only looked.
fn read_all(hits: &[Hit<'_>], steps: SmallVec<[Step; 1]>, at: Micros) -> StepOutcomes {
    let refuses = |(hit, step): (&Hit<'_>, &Step)| hit.binding && step.outcome == Outcome::Refused;
    let refused = hits.iter().zip(&steps).any(refuses);
    let action = |hit: &Hit<'_>| match hit.action {
        Action::Take if refused => Action::Peek,
        action => action,
    };
    hits.iter().zip(steps).map(|(hit, step)| read(step, at, action(hit))).collect()
}
