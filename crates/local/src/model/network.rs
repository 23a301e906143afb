//! The store of the model, and the calls on their way to it.

use std::{collections::BTreeMap, sync::Arc};

use parking_lot::Mutex;
use sluicegate_algorithm::{Action, Micros, Operation, Program, State};
use sluicegate_store::{Charge, Counter, CounterStore, Hit, StepOutcome, StepOutcomes, StoreError};
use tokio::sync::oneshot;

use super::{
    KEYS,
    setup::{Fault, LIMIT, token_bucket},
};

/// A call to the store.
pub(super) struct Call {
    /// The instance that waits for the answer; `None` if it has crashed.
    pub(super) instance: Option<usize>,
    /// Request that waits for it; `None` for calls in the background.
    pub(super) request: Option<usize>,
    pub(super) hits: Vec<CallHit>,
    pub(super) charge: Charge,
    pub(super) called_at: Micros,
    pub(super) outcomes: Option<StepOutcomes>,
    pub(super) reply: Option<oneshot::Sender<StepOutcomes>>,
}

pub(super) struct CallHit {
    pub(super) counter: usize,
    pub(super) program: Program,
    pub(super) action: Action,
    pub(super) cost: u64,
}

/// The store and the calls on their way to it. Instances share it with the model.
pub(super) struct Network {
    pub(super) now: Micros,
    pub(super) fault: Fault,
    pub(super) states: [State; 2],
    /// Calls by their number.
    pub(super) calls: BTreeMap<usize, Call>,
    pub(super) next_call: usize,
    /// Hits that the store has taken for each request, by counter: when, and how many.
    pub(super) taken: BTreeMap<(usize, usize), (Micros, u64)>,
}

tokio::task_local! {
    /// The request that the current task decides.
    pub(super) static REQUEST: usize;
}

/// The store as one instance calls it.
#[derive(Clone)]
pub(super) struct Remote {
    pub(super) instance: usize,
    pub(super) network: Arc<Mutex<Network>>,
}

impl CounterStore for Remote {
    async fn step(&self, hits: &[Hit<&Counter>], charge: Charge, _: Micros) -> StepOutcomes {
        let answer = {
            let mut network = self.network.lock();
            let (reply, answer) = oneshot::channel();
            let counter = |key: &[u8]| KEYS.iter().position(|known| *known == key).unwrap();
            let copy = |hit: &Hit<&Counter>| CallHit {
                counter: counter(&hit.counter.name),
                program: hit.counter.program,
                action: hit.action,
                cost: hit.cost,
            };
            let call = Call {
                instance: Some(self.instance),
                request: REQUEST.try_with(|request| *request).ok(),
                hits: hits.iter().map(copy).collect(),
                charge,
                called_at: network.now,
                outcomes: None,
                reply: Some(reply),
            };
            let number = network.next_call;
            network.next_call += 1;
            network.calls.insert(number, call);
            answer
        };
        answer.await.unwrap_or_else(|_| hits.iter().map(|_| Err(StoreError::Broken)).collect())
    }

    /// The model deletes no counters.
    async fn delete(&self, _: &[u8], _: bool) -> Result<bool, StoreError> {
        Err(StoreError::Rejected)
    }
}

impl Network {
    /// Executes a call in the store.
    pub(super) fn execute(&mut self, number: usize) {
        let Some(call) = self.calls.get_mut(&number) else { return };
        let (now, fault) = (self.now, self.fault);
        let step = |state: &mut State, hit: &CallHit, action: Action| {
            let (mut program, mut cost) = (hit.program, hit.cost);
            let is_lease = call.request.is_none() && action == Action::Take;
            if fault == Fault::NoEscrow && matches!(program, Program::LeasedBucket(_)) {
                program = token_bucket(LIMIT).into();
            }
            if fault == Fault::DoubleGrant && is_lease {
                cost /= 2;
            }
            if fault == Fault::DoubleReturn && action.releases() {
                cost *= 2;
            }
            let allowed = program.step(state, Operation { action, cost, now });
            StepOutcome { allowed, action, at: now, state: state.clone() }
        };
        let mut preview = self.states.clone();
        let is_denied = call.charge == Charge::All
            && fault != Fault::ChargedSeparately
            && call.hits.iter().any(|hit| !step(&mut preview[hit.counter], hit, hit.action).allowed);
        let mut outcomes = StepOutcomes::new();
        for hit in &call.hits {
            let action = if is_denied && hit.action == Action::Take { Action::Peek } else { hit.action };
            let outcome = step(&mut self.states[hit.counter], hit, action);
            if let Some(request) = call.request.filter(|_| outcome.allowed && action == Action::Take) {
                self.taken.insert((request, hit.counter), (now, hit.cost));
            }
            outcomes.push(Ok(outcome));
        }
        call.outcomes = Some(outcomes);
    }
}
