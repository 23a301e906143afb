//! Model of leases, grants and roll backs: two instances, up to two clients, and a store with one or two counters.
//! Messages are delayed, dropped and duplicated, an instance or a client crashes, and time passes, in every order.
//!
//! - **Invariant**: callers are never allowed more hits than the limit's guarantee.
//! - **Liveness**: when all messages have arrived and all leases are returned, the counter contains no other hits than
//!   callers were allowed, unless a message was dropped or delayed. A fixed window always contains all of these. Later
//!   the full limit is available in any case.

mod client;
mod fingerprint;
mod guarantee;
mod network;
mod setup;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use sluicegate_algorithm::{Action, Algorithm, Operation};
use sluicegate_client::simulation::GrantFeedback;
use sluicegate_testing::model_checker::{self, Model, explore};
use tokio::{runtime::Runtime, task::JoinHandle};

use self::{
    client::{Check, Client, Stage},
    guarantee::{Guarantee, PHASE, WINDOW},
    network::{Call, Network, REQUEST, Remote},
    setup::{Fault, Setup},
};
use super::*;

const KEYS: [&[u8]; 2] = [b"{d|k=v}", b"{d|k=w}"];
const INSTANCES: usize = 2;
/// Hits of a small request. After one, an instance takes a lease of about a quarter of the limit.
const SMALL: u64 = 40;
/// Hits of a client's check: few, so that it gets a grant of the same size, or more than that grant.
const CHECKS: [u32; 2] = [10, 25];

#[derive(Clone, Copy, Debug)]
enum Event {
    /// A caller sends a request to an instance.
    Request(usize, Size),
    /// The store executes a call, and its answer arrives.
    Call(usize),
    /// The store executes a call, or the call is dropped.
    Execute(usize),
    DropCall(usize),
    /// The store's answer arrives, or it is dropped.
    Answer(usize),
    DropAnswer(usize),
    Sweep(usize),
    /// An instance is replaced by a new one.
    Crash(usize),
    /// A client admits hits with a grant, or else sends a check of this cost.
    Check(usize, u32),
    /// A check arrives, or it is dropped.
    Deliver(usize),
    DropCheck(usize),
    /// The reports about grants in a check that has arrived arrive again.
    Repeat(usize),
    /// A verdict arrives, or it is dropped.
    Verdict(usize),
    DropVerdict(usize),
    CrashClient(usize),
    Tick,
}

/// The cost of a request.
#[derive(Clone, Copy, Debug)]
enum Size {
    Small,
    /// All hits that the counters have at this time.
    Rest,
}

/// A request that an instance has not answered yet.
struct Request {
    instance: usize,
    cost: u64,
    sent_at: Micros,
    /// Hash of the instance when the request arrived: the hits that it took from leases follow from it.
    instance_before: u64,
    /// The check of the client that it belongs to.
    check: Option<usize>,
    answer: JoinHandle<HitDecisions>,
}

struct LeaseModel {
    setup: Setup,
    algorithms: Vec<Algorithm>,
    runtime: Runtime,
    network: Arc<Mutex<Network>>,
    instances: Vec<Local<Remote>>,
    requests: BTreeMap<usize, Request>,
    checks: BTreeMap<usize, Check>,
    next_request: usize,
    clients: Vec<Client>,
    /// Grants of each instance in the order in which they were made. Their ids are random.
    grants: [Vec<u64>; INSTANCES],
    /// Hits that callers were allowed, by counter and time.
    passed: BTreeMap<(usize, Micros), u64>,
    /// Number of ticks so far.
    ticks: usize,
    failures: u32,
    crashes: u32,
    /// Whether a message was delayed. An instance measures the age of a lease from the call that took it, and does not
    /// return hits that may have expired.
    is_late: bool,
}

impl LeaseModel {
    fn new(setup: Setup) -> Self {
        let network = Arc::new(Mutex::new(Network {
            now: setup.start,
            fault: setup.fault,
            states: Default::default(),
            calls: BTreeMap::new(),
            next_call: 0,
            taken: BTreeMap::new(),
        }));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let instances = runtime.block_on(async { (0..INSTANCES).map(|index| new_instance(index, &network)).collect() });
        let mut model = Self {
            setup,
            algorithms: setup.limits.iter().map(|limit| (setup.algorithm)(*limit)).collect(),
            instances,
            runtime,
            network,
            requests: BTreeMap::new(),
            checks: BTreeMap::new(),
            next_request: 0,
            clients: (0..setup.clients).map(|_| Client::new()).collect(),
            grants: Default::default(),
            passed: BTreeMap::new(),
            ticks: 0,
            failures: setup.failures,
            crashes: setup.crashes,
            is_late: false,
        };
        // The search begins when the first instance has a lease and the first client has a grant, which takes many events.
        model.request(0, SMALL, None);
        model.run();
        model.deliver_all();
        if setup.clients > 0 {
            model.send_check(0, CHECKS[0]);
            model.deliver_all();
        }
        model
    }

    fn now(&self) -> Micros {
        self.network.lock().now
    }

    /// Returns the time by the clock of the instances.
    fn local_now(&self) -> Micros {
        if self.setup.fault == Fault::WallClock { self.setup.start } else { self.now() }
    }

    /// Returns the store's decision about a counter now, without a hit.
    fn peek(&self, counter: usize) -> Decision {
        let peek = Operation { action: Action::Peek, cost: 0, now: self.now() };
        self.algorithms[counter].apply(&mut self.network.lock().states[counter].clone(), peek)
    }

    fn request(&mut self, instance: usize, cost: u64, check: Option<usize>) {
        let number = self.next_request;
        self.next_request += 1;
        let feedback = check.map(|check| self.checks[&check].feedback.clone()).unwrap_or_default();
        if check.is_some() {
            self.report(instance, &feedback);
        }
        let instance_before = self.hash_instance(instance);
        let (local, algorithms) = (self.instances[instance].clone(), self.algorithms.clone());
        let charge = if algorithms.len() > 1 { Charge::All } else { Charge::Each };
        let now = self.local_now();
        let decide = async move {
            let mut hits = Vec::new();
            for (index, (algorithm, key)) in algorithms.iter().zip(KEYS).enumerate() {
                let counter = Counter { consistency: Consistency::Leased, ..Counter::new(key, *algorithm) };
                let demand = feedback.get(index).map_or(0, |feedback: &GrantFeedback| feedback.0);
                hits.push(Hit { demand, ..Hit::take(counter, cost) });
            }
            let hits: Vec<_> = hits.iter().map(Hit::borrowed).collect();
            local.apply(&hits, charge, now).await
        };
        let answer = self.runtime.spawn(REQUEST.scope(number, decide));
        let sent_at = self.now();
        self.requests.insert(number, Request { instance, cost, sent_at, instance_before, check, answer });
    }

    fn advance(&self, time: Micros) {
        let now = self.now() + time;
        self.network.lock().now = now;
        self.runtime.block_on(tokio::time::advance(Duration::from_micros(time.get())));
    }

    /// Runs all tasks until each of them waits for the store, and records the answers to requests.
    fn run(&mut self) {
        self.runtime.block_on(async {
            for _ in 0..6 {
                tokio::task::yield_now().await;
            }
        });
        let finished: Vec<_> =
            self.requests.iter().filter(|(_, request)| request.answer.is_finished()).map(|(key, _)| *key).collect();
        for number in finished {
            let Some(request) = self.requests.remove(&number) else { continue };
            let decisions = self.runtime.block_on(request.answer).unwrap();
            let is_allowed = decisions.iter().all(|decision| decision.is_ok_and(|decision| decision.decision.allowed));
            for counter in 0..self.algorithms.len() {
                let taken = self.network.lock().taken.remove(&(number, counter));
                if is_allowed {
                    let (at, from_store) = taken.unwrap_or_default();
                    self.pass(counter, at, from_store);
                    self.pass(counter, request.sent_at, request.cost - from_store);
                }
            }
            let grants = decisions.iter().map(|decision| decision.ok()?.grant);
            let grants: Vec<_> = grants
                .map(|grant| {
                    grant.map(|grant| (grant.hits.get().into(), Duration::from_micros(grant.ttl.get()), grant.id))
                })
                .collect();
            self.grants[request.instance].extend(grants.iter().flatten().map(|grant| grant.2));
            let Some(number) = request.check else { continue };
            if self.checks.get(&number).is_some_and(|check| check.is_orphaned) {
                self.checks.remove(&number);
            } else if let Some(check) = self.checks.get_mut(&number) {
                check.stage = Stage::Answered(grants);
            }
        }
    }

    fn pass(&mut self, counter: usize, at: Micros, hits: u64) {
        if hits > 0 {
            *self.passed.entry((counter, at)).or_default() += hits;
        }
    }

    /// Returns an error if callers were allowed more than the guarantee.
    fn check_limits(&self) -> Result<(), String> {
        for (counter, limit) in self.setup.limits.iter().copied().enumerate() {
            let passed = self.passed.range((counter, Micros::ZERO)..(counter + 1, Micros::ZERO));
            let passed: Vec<_> = passed.map(|((_, at), hits)| (at.get(), *hits)).collect();
            let max = self.setup.guarantee.max(&passed, limit);
            if max > limit {
                return Err(format!("{max} hits were allowed instead of {limit}"));
            }
        }
        Ok(())
    }

    /// Delivers all messages.
    fn deliver_all(&mut self) {
        for _ in 0..20 {
            let checks: Vec<_> = self.checks.keys().copied().collect();
            for check in checks {
                self.deliver(check);
                self.run();
                self.receive_verdict(check);
            }
            let calls: Vec<_> = self.network.lock().calls.keys().copied().collect();
            for call in calls {
                self.execute(call);
                self.answer(call);
                self.run();
            }
        }
    }

    fn execute(&self, call: usize) {
        let mut network = self.network.lock();
        if network.calls.get(&call).is_some_and(|call| call.outcomes.is_none()) {
            network.execute(call);
        }
    }

    fn answer(&self, call: usize) {
        let call = self.network.lock().calls.remove(&call);
        if let Some(Call { reply: Some(reply), outcomes: Some(outcomes), .. }) = call {
            let _ = reply.send(outcomes);
        }
    }

    fn sweep(&self, instance: usize) {
        let (local, now) = (self.instances[instance].clone(), self.local_now());
        drop(self.runtime.spawn(async move { local.sweep(now).await }));
    }

    fn crash(&mut self, instance: usize) {
        self.instances[instance] = self.runtime.block_on(async { new_instance(instance, &self.network) });
        for request in self.requests.extract_if(.., |_, request| request.instance == instance) {
            request.1.answer.abort();
            request.1.check.and_then(|check| self.checks.remove(&check));
        }
        // Its calls can still reach the store, but the answers are dropped.
        let mut network = self.network.lock();
        for call in network.calls.values_mut().filter(|call| call.instance == Some(instance)) {
            (call.instance, call.reply) = (None, None);
        }
        network.calls.retain(|_, call| call.instance.is_some() || call.outcomes.is_none());
    }

    /// Returns the number of hits in a counter that callers were allowed, at most.
    fn counted(&self, counter: usize) -> u64 {
        let (now, window) = (self.now().get(), WINDOW.get());
        let since = match self.setup.guarantee {
            Guarantee::Windows => now - now % window,
            Guarantee::WindowsWithPhase => now - (now + PHASE.get()) % window,
            Guarantee::AnyWindow | Guarantee::TwiceInAnyWindow | Guarantee::Envelope => now - window - window / 4,
        };
        let passed = self.passed.range((counter, Micros::new(since))..(counter + 1, Micros::ZERO));
        passed.map(|(_, hits)| hits).sum()
    }

    fn has_failed(&self) -> bool {
        self.is_late || self.failures < self.setup.failures || self.crashes < self.setup.crashes
    }

    fn fail(&mut self) {
        self.failures -= 1;
    }
}

impl Model for LeaseModel {
    type Event = Event;

    fn events(&self) -> Vec<Event> {
        let mut events = Vec::new();
        for instance in 0..INSTANCES {
            events.extend([Event::Request(instance, Size::Small), Event::Request(instance, Size::Rest)]);
            events.push(Event::Sweep(instance));
            events.extend((self.crashes > 0).then_some(Event::Crash(instance)));
        }
        for (number, call) in &self.network.lock().calls {
            let (next, lost) = match call.outcomes {
                None => {
                    events.push(Event::Call(*number));
                    (Event::Execute(*number), Event::DropCall(*number))
                }
                Some(_) => (Event::Answer(*number), Event::DropAnswer(*number)),
            };
            events.push(next);
            events.extend((self.failures > 0).then_some(lost));
        }
        for (number, check) in &self.checks {
            let has_reports = check.feedback.iter().any(|(_, report)| report.is_some());
            match check.stage {
                Stage::Sent => {
                    events.push(Event::Deliver(*number));
                    events.extend((self.failures > 0).then_some(Event::DropCheck(*number)));
                }
                Stage::Arrived => events.extend((has_reports && self.failures > 0).then_some(Event::Repeat(*number))),
                Stage::Answered(_) => {
                    events.push(Event::Verdict(*number));
                    events.extend((self.failures > 0).then_some(Event::DropVerdict(*number)));
                }
            }
        }
        for client in 0..self.clients.len() {
            events.extend(CHECKS.map(|cost| Event::Check(client, cost)));
            events.extend((self.crashes > 0).then_some(Event::CrashClient(client)));
        }
        events.extend((self.ticks < self.setup.ticks.len()).then_some(Event::Tick));
        events
    }

    fn apply(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::Request(instance, size) => {
                let cost = match size {
                    Size::Small => SMALL,
                    Size::Rest => {
                        (0..self.algorithms.len()).map(|counter| self.peek(counter).remaining).min().unwrap().max(1)
                    }
                };
                self.request(instance, cost, None);
            }
            Event::Call(call) => {
                self.execute(call);
                self.answer(call);
            }
            Event::Execute(call) => {
                self.execute(call);
                self.network.lock().calls.retain(|_, call| call.instance.is_some() || call.outcomes.is_none());
            }
            Event::Answer(call) => self.answer(call),
            Event::DropCall(call) | Event::DropAnswer(call) => {
                self.fail();
                // Without a sender, the call fails as after a timeout.
                self.network.lock().calls.remove(&call);
            }
            Event::Sweep(instance) => self.sweep(instance),
            Event::Crash(instance) => {
                self.crashes -= 1;
                self.crash(instance);
            }
            Event::Check(client, cost) => self.send_check(client, cost),
            Event::Deliver(check) => self.deliver(check),
            Event::DropCheck(check) | Event::DropVerdict(check) => {
                self.fail();
                self.checks.remove(&check);
            }
            Event::Repeat(check) => {
                self.fail();
                let Check { client, feedback, .. } = &self.checks[&check];
                self.report(*client, feedback);
            }
            Event::Verdict(check) => self.receive_verdict(check),
            Event::CrashClient(client) => {
                self.crashes -= 1;
                self.crash_client(client);
            }
            Event::Tick => {
                let tick = Micros::new(1_000 * self.setup.ticks[self.ticks]);
                self.ticks += 1;
                self.is_late |= !self.network.lock().calls.is_empty() || !self.checks.is_empty();
                self.advance(tick);
            }
        }
        self.run();
        self.check_limits()
    }

    fn fingerprint(&self) -> u64 {
        self.hash()
    }

    fn settle(mut self) -> Result<(), String> {
        self.deliver_all();
        self.check_limits()?;
        for instance in &self.instances {
            let leases = instance.state.leases.as_ref().unwrap();
            if leases.is_acquiring() {
                return Err("a lease waits for a call that has ended".into());
            }
        }
        self.return_grants();
        for instance in &self.instances {
            let (local, now) = (instance.clone(), self.local_now());
            drop(self.runtime.spawn(async move { local.return_all(now).await }));
        }
        self.run();
        self.deliver_all();
        for counter in 0..self.algorithms.len() {
            let (used, counted) = (self.peek(counter).used, self.counted(counter));
            let is_exact = matches!(self.setup.guarantee, Guarantee::Windows | Guarantee::WindowsWithPhase);
            let is_too_low = is_exact && used < counted;
            let is_too_high = !self.has_failed() && used > counted;
            if self.setup.hits_must_remain && (is_too_low || is_too_high) {
                return Err(format!("{used} hits count, but callers were allowed {counted}"));
            }
        }
        self.advance(WINDOW + WINDOW + WINDOW);
        for counter in 0..self.algorithms.len() {
            let remaining = self.peek(counter).remaining;
            if remaining != self.setup.limits[counter] {
                return Err(format!("only {remaining} hits are available in the end"));
            }
        }
        Ok(())
    }
}

fn new_instance(instance: usize, network: &Arc<Mutex<Network>>) -> Local<Remote> {
    let deny_cache = DenyCacheSettings { max_entries: 0, ..DenyCacheSettings::default() };
    let leases = LeaseSettings { max_counters: 8, ..LeaseSettings::default() };
    let time_source = if network.lock().fault == Fault::WallClock { TimeSource::Caller } else { TimeSource::Own };
    let state = LocalState::new(&deny_cache, &leases, &EventualSettings::default(), time_source, Metrics::new(1));
    Local::new(Remote { instance, network: Arc::clone(network) }, state, WorkerId(0))
}

#[test]
fn leases_never_exceed_a_limit_and_lose_no_hits() {
    for setup in setup::ALL {
        let depth = match setup.clients {
            _ if !model_checker::is_large() => 5,
            0 => 7,
            _ => 6,
        };
        let explored = explore(|| LeaseModel::new(setup), depth);
        println!("{}: {}", setup.name, explored.unwrap_or_else(|violation| panic!("{violation}")));
    }
}

#[test]
fn planted_faults_are_found() {
    for setup in setup::FAULTS {
        let fault = setup.fault;
        let violation = explore(|| LeaseModel::new(setup), 8).expect_err(&format!("{fault:?} is found"));
        println!("{fault:?}: {violation}");
    }
}
