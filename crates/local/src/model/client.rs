//! The clients of the model: their grants, and the checks between them and the instances.

use std::time::Duration;

use sluicegate_algorithm::Micros;
use sluicegate_client::simulation::{GrantCache, GrantFeedback};
use sluicegate_store::{Counter, Store};
use sluicegate_testing::model_checker::hash;

use super::{KEYS, LeaseModel, setup::Fault};

/// The names of the same counters in clients.
const NAMES: [&str; 2] = ["v", "w"];

/// A client with its grants.
pub(super) struct Client {
    pub(super) grants: GrantCache,
    /// Hashes of everything that happened to it. Its state follows from them.
    pub(super) history: Vec<u64>,
}

/// A check of a client that has not been answered.
pub(super) struct Check {
    pub(super) client: usize,
    pub(super) cost: u32,
    pub(super) feedback: Vec<GrantFeedback>,
    pub(super) sent_at: Micros,
    pub(super) stage: Stage,
    /// Whether the client has crashed since.
    pub(super) is_orphaned: bool,
}

#[derive(PartialEq)]
pub(super) enum Stage {
    Sent,
    Arrived,
    /// The grants in the verdict.
    Answered(Vec<Option<(u64, Duration, u64)>>),
}

impl Client {
    pub(super) fn new() -> Self {
        Self { grants: GrantCache::default(), history: Vec::new() }
    }
}

impl LeaseModel {
    /// Returns a time by the clock of clients, which has another origin.
    fn client_time(&self, time: Micros) -> Duration {
        Duration::from_secs(1_000) + Duration::from_micros((time - self.setup.start).get())
    }

    fn names(&self) -> &'static [&'static str] {
        &NAMES[..self.algorithms.len()]
    }

    /// Lets a client admit hits with a grant, or else sends a check.
    pub(super) fn send_check(&mut self, client: usize, cost: u32) {
        let (now, names) = (self.now(), self.names());
        let sent = self.client_time(now);
        let Client { grants, history } = &mut self.clients[client];
        let is_granted = grants.spend(names, cost, sent);
        history.push(hash((now, cost, is_granted)));
        if is_granted {
            (0..self.algorithms.len()).for_each(|counter| self.pass(counter, now, cost.into()));
            return;
        }
        let feedback = grants.feedback(names, cost, sent);
        let check = Check { client, cost, feedback, sent_at: now, stage: Stage::Sent, is_orphaned: false };
        self.checks.insert(self.next_request, check);
        self.next_request += 1;
    }

    /// Delivers a check to its instance.
    pub(super) fn deliver(&mut self, check: usize) {
        if let Some(arrived) = self.checks.get_mut(&check).filter(|check| check.stage == Stage::Sent) {
            arrived.stage = Stage::Arrived;
            let (instance, cost) = (arrived.client, arrived.cost);
            self.request(instance, cost.into(), Some(check));
        }
    }

    /// Delivers a verdict to its client.
    pub(super) fn receive_verdict(&mut self, check: usize) {
        if !self.checks.get(&check).is_some_and(|check| matches!(check.stage, Stage::Answered(_))) {
            return;
        }
        let Some(Check { client, feedback, sent_at, stage: Stage::Answered(mut grants), .. }) =
            self.checks.remove(&check)
        else {
            return;
        };
        if self.setup.fault == Fault::EndlessGrant {
            grants.iter_mut().flatten().for_each(|grant| grant.1 += Duration::from_secs(2));
        }
        let received = grants.iter().flatten().map(|(hits, ttl, id)| (*hits, *ttl, self.grant_number(client, *id)));
        let received = hash((sent_at, self.now(), received.collect::<Vec<_>>()));
        self.clients[client].history.push(received);
        self.clients[client].grants.store(self.names(), &feedback, &grants, self.client_time(sent_at));
    }

    /// Reports the grants that a client has finished.
    pub(super) fn report(&self, instance: usize, feedback: &[GrantFeedback]) {
        let _runtime = self.runtime.enter();
        for ((algorithm, key), (_, report)) in self.algorithms.iter().zip(KEYS).zip(feedback) {
            if let Some((id, used)) = report {
                self.instances[instance].report(&Counter::new(key, *algorithm), *id, *used, self.local_now());
            }
        }
    }

    /// Lets all clients report their grants.
    pub(super) fn return_grants(&mut self) {
        for client in 0..self.clients.len() {
            for (name, id, used) in self.clients[client].grants.return_all(self.client_time(self.now())) {
                let index = self.names().iter().position(|known| *known == name).unwrap();
                let mut feedback = vec![(0, None); self.algorithms.len()];
                feedback[index].1 = Some((id, used));
                self.report(client, &feedback);
            }
        }
    }

    pub(super) fn crash_client(&mut self, client: usize) {
        self.clients[client] = Client::new();
        self.checks.retain(|_, check| check.client != client || check.stage == Stage::Arrived);
        self.checks.values_mut().filter(|check| check.client == client).for_each(|check| check.is_orphaned = true);
    }
}
