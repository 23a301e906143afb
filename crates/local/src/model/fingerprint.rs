//! The hash that identifies a state of the model.

use sluicegate_algorithm::State;
use sluicegate_store::{Charge, StepOutcome, StoreError};
use sluicegate_testing::model_checker::{hash, hash_unordered};

use super::{
    INSTANCES, LeaseModel, Request,
    client::{Check, Stage},
    network::CallHit,
};

impl LeaseModel {
    /// Returns a hash of the state that is the same if the instances are exchanged.
    pub(super) fn hash(&self) -> u64 {
        let instances = (0..INSTANCES).map(|instance| {
            let checks = self.checks.values().filter(|check| check.client == instance);
            let checks = hash_unordered(checks.map(|check| self.hash_check(check)));
            let client = self.clients.get(instance).map(|client| &client.history);
            hash((self.hash_with_messages(Some(instance)), checks, client))
        });
        let instances = hash_unordered(instances);
        let orphans = self.hash_with_messages(None);
        let passed: Vec<_> = self.passed.iter().collect();
        let network = self.network.lock();
        let states: Vec<_> = network.states.iter().map(State::as_bytes).collect();
        let budgets = (self.ticks, self.failures, self.crashes, self.is_late);
        hash((instances, orphans, passed, states, network.now, budgets))
    }

    /// Returns the position of a grant among those of an instance.
    pub(super) fn grant_number(&self, instance: usize, id: u64) -> usize {
        self.grants[instance].iter().position(|known| *known == id).unwrap_or(usize::MAX)
    }

    /// Returns a hash of the leases of an instance.
    pub(super) fn hash_instance(&self, instance: usize) -> u64 {
        let leases = self.instances[instance].state.leases.as_ref().unwrap();
        hash_unordered(leases.hashes(|id| self.grant_number(instance, id)))
    }

    /// Returns a hash of an instance with its calls and requests, or of the calls of crashed instances.
    fn hash_with_messages(&self, instance: Option<usize>) -> u64 {
        let network = self.network.lock();
        let calls = network.calls.values().filter(|call| call.instance == instance).map(|call| {
            let hit = |hit: &CallHit| (hit.counter, hit.program.tag(), format!("{:?}", hit.action), hit.cost);
            let outcome = |outcome: &Result<StepOutcome, StoreError>| {
                outcome.as_ref().ok().map(|outcome| (outcome.allowed, outcome.at, hash(outcome.state.as_bytes())))
            };
            let hits: Vec<_> = call.hits.iter().map(hit).collect();
            let outcomes: Option<Vec<_>> = call.outcomes.as_ref().map(|all| all.iter().map(outcome).collect());
            let request = call.request.and_then(|request| self.requests.get(&request)).map(hash_request);
            hash((hits, call.called_at, outcomes, request, call.charge == Charge::All))
        });
        let calls = hash_unordered(calls);
        drop(network);
        let requests = self.requests.values().filter(|request| Some(request.instance) == instance).map(hash_request);
        hash((instance.map(|instance| self.hash_instance(instance)), calls, hash_unordered(requests)))
    }

    fn hash_check(&self, check: &Check) -> u64 {
        let number = |id| self.grant_number(check.client, id);
        let stage = match &check.stage {
            Stage::Sent => (0, Vec::new()),
            Stage::Arrived => (1, Vec::new()),
            Stage::Answered(grants) => (2, grants.iter().map(|grant| grant.map(|grant| number(grant.2))).collect()),
        };
        let report = |report: Option<(u64, u64)>| report.map(|(id, used)| (number(id), used));
        let feedback = check.feedback.iter().map(|(demand, used)| (*demand, report(*used)));
        hash((check.sent_at, check.cost, stage, feedback.collect::<Vec<_>>(), check.is_orphaned))
    }
}

fn hash_request(request: &Request) -> u64 {
    hash((request.cost, request.sent_at, request.instance_before, request.check.is_some()))
}
