//! Model of overrides in Redis: two instances that poll a real Redis server, and operators who write through both. Calls
//! to Redis are delayed and dropped in every order of events. An instance is restarted, or Redis fails over to a replica
//! that lacks the latest changes, or it is emptied.
//!
//! - **Invariant**: a conditional write is executed exactly if the override has the expected version in Redis. Without a
//!   failover, it replaces the value that the operator has seen.
//! - **Liveness**: in the end, both instances have the overrides in Redis. Each has the last acknowledged value, or a later
//!   one without an acknowledgement.

use std::{collections::BTreeMap, rc::Rc};

use tokio::{
    runtime::{Builder, Runtime},
    task::JoinHandle,
};

use sluicegate_testing::model_checker::{self, Model, explore, hash};

use super::{
    change::all_versioned,
    testing::{member_of, redis as replication},
    *,
};
use crate::store::{
    Redis,
    redis::controlled::{ControlledRedis, WaitingCall, arguments, with_arguments},
};

const INSTANCES: usize = 2;
const TARGETS: [&str; 2] = ["limit|api|user=bob", "limit|api|user=eve"];

/// A fault that is planted in the model. Each must be found.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// The condition of a write is ignored.
    IgnoredCondition,
    /// An instance does not remember the changes that it would resend.
    NoResend,
    /// An instance moves its cursor past changes that it has not applied.
    SkippedChanges,
    /// A write does not check that the instance knows the last change.
    UncheckedCursor,
}

#[derive(Clone, Copy)]
struct Setup {
    targets: usize,
    writes: u32,
    /// Maximum number of calls that fail, before or after they are executed.
    failures: u32,
    /// Maximum number of restarts of instances, failovers and losses of everything in Redis.
    crashes: u32,
    fault: Fault,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Set,
    Remove,
    /// Sets the override if it has the version that the operator has seen on this instance.
    SetIf(usize),
}

#[derive(Clone, Copy, Debug)]
enum Event {
    /// An instance polls Redis.
    Poll(usize),
    /// An operator changes an override through an instance.
    Write {
        instance: usize,
        target: usize,
        kind: Kind,
    },
    /// Redis executes the waiting call of an instance, and the answer arrives.
    Call(usize),
    /// Redis executes the waiting call of an instance.
    Execute(usize),
    /// The answer to an executed call arrives.
    Answer(usize),
    /// The call of an instance fails. If it was not executed, it still waits in the network.
    Fail(usize),
    /// Redis executes a call that its instance no longer waits for.
    ExecuteLate(usize),
    Restart(usize),
    /// The replica receives all changes of the master.
    Replicate,
    /// The replica becomes the master.
    Failover,
    /// Redis loses everything.
    Empty,
}

/// The server and the clients. All models of a search share them.
struct Environment {
    runtime: Runtime,
    redis: ControlledRedis,
    clients: Vec<Redis>,
}

impl Environment {
    fn start() -> Rc<Self> {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let redis = ControlledRedis::start();
        let clients = (0..INSTANCES).map(|instance| redis.client(instance, &runtime)).collect();
        Rc::new(Self { runtime, redis, clients })
    }
}

/// A poll or a write in progress.
struct Task {
    write: Option<Write>,
    /// The state of the instance when the task began, and all replies since then. The task continues as they determine.
    history: Vec<u8>,
    result: JoinHandle<Result<(), ChangeError>>,
}

#[derive(Clone, Copy)]
struct Write {
    number: u32,
    target: usize,
    is_set: bool,
    expected: Option<Version>,
}

/// A version of an override, 0 if there is none, and the number of the write that set it.
type Version = (u64, u32);

struct Instance {
    sync: Arc<OverrideSync>,
    task: Option<Task>,
    /// The reply of the waiting call, if it was executed.
    reply: Option<Vec<u8>>,
}

struct RedisModel {
    environment: Rc<Environment>,
    setup: Setup,
    instances: Vec<Instance>,
    /// Calls that no instance waits for.
    late: Vec<(Option<Write>, Vec<u8>)>,
    replica: [Vec<u8>; 3],
    /// The writes that were executed, in this order, with the number of the write and whether it was acknowledged.
    executed: Vec<(Write, bool)>,
    was_replaced: bool,
    writes: u32,
    failures: u32,
    crashes: u32,
}

impl RedisModel {
    fn new(environment: &Rc<Environment>, setup: Setup) -> Self {
        environment.redis.set_contents(&Default::default());
        let mut model = Self {
            environment: Rc::clone(environment),
            setup,
            instances: environment.clients.iter().map(|client| Instance::new(client.clone())).collect(),
            late: Vec::new(),
            replica: Default::default(),
            executed: Vec::new(),
            was_replaced: false,
            writes: setup.writes,
            failures: setup.failures,
            crashes: setup.crashes,
        };
        // The search begins when the instances and the replica have a change.
        model.write(0, 0, Kind::Set);
        model.call(0).unwrap();
        model.poll(1);
        model.call(1).unwrap();
        model.replica = environment.redis.contents();
        model
    }

    /// Starts a task of an instance, and runs it to its first call.
    fn start(
        &mut self,
        instance: usize,
        write: Option<Write>,
        description: &str,
        task: impl Future<Output = Result<(), ChangeError>> + Send + 'static,
    ) {
        let mut history = description.as_bytes().to_vec();
        history.extend_from_slice(self.instances[instance].state().as_bytes());
        let result = self.environment.redis.spawn(&self.environment.runtime, task);
        self.instances[instance].task = Some(Task { write, history, result });
        self.run();
    }

    fn poll(&mut self, instance: usize) {
        let sync = Arc::clone(&self.instances[instance].sync);
        let fault = self.setup.fault;
        self.start(instance, None, "poll", async move {
            let replication = replication(&sync);
            let mut state = replication.state.lock().await;
            match fault {
                Fault::NoResend => state.recent.clear(),
                Fault::SkippedChanges => {
                    let OverrideStore::Redis(redis) = sync.store() else { unreachable!() };
                    state.cursor = redis.overrides_cursor().await?.unwrap_or_default();
                }
                _ => {}
            }
            let result = replication.synchronise(&mut state).await;
            sync.context.note_sync(state.cursor.version, result);
            Ok(())
        });
    }

    /// Writes a value that no other write has.
    fn write(&mut self, instance: usize, target: usize, kind: Kind) {
        self.writes -= 1;
        let number = self.setup.writes - self.writes;
        let expected = match kind {
            Kind::SetIf(seen_on) => Some(self.instances[seen_on].version(target)),
            Kind::Set | Kind::Remove => None,
        };
        let write = Write { number, target, is_set: kind != Kind::Remove, expected };
        let request = ChangeRequest {
            target: Target::parse(TARGETS[target]).unwrap(),
            value: write.is_set.then(|| format!("{number}/year")),
            until: None,
            expected: expected.map(|(version, _)| version).filter(|_| self.setup.fault != Fault::IgnoredCondition),
        };
        let info = ChangeInfo { author: "alice".into(), reason: number.to_string(), at: 0 };
        let sync = Arc::clone(&self.instances[instance].sync);
        let description = format!("{target} {expected:?} {request:?}");
        self.start(instance, Some(write), &description, async move { sync.change(&[request], info).await.map(drop) });
    }

    /// Runs all tasks until each of them has ended or waits for Redis.
    fn run(&mut self) {
        let Environment { runtime, redis, .. } = &*self.environment;
        redis.wait_until(runtime, || {
            let calls = redis.calls();
            let is_waiting = |index| calls.iter().any(|call: &WaitingCall| call.client == index);
            let is_idle = |instance: &Instance| instance.task.as_ref().is_none_or(|task| task.result.is_finished());
            self.instances.iter().enumerate().all(|(index, instance)| is_idle(instance) || is_waiting(index))
        });
        for instance in &mut self.instances {
            let Some(task) = instance.task.take_if(|task| task.result.is_finished()) else { continue };
            let result = runtime.block_on(task.result).unwrap();
            if let (Some(write), Ok(())) = (task.write, &result) {
                let executed = self.executed.iter_mut().find(|(other, _)| other.number == write.number);
                executed.expect("an acknowledged write was executed").1 = true;
            }
        }
    }

    /// Returns the call that an instance waits for.
    fn waiting(&self, instance: usize) -> Option<usize> {
        self.environment.redis.calls().iter().position(|call| call.client == instance)
    }

    fn take_call(&self, instance: usize) -> WaitingCall {
        let position = self.waiting(instance).unwrap();
        self.environment.redis.calls().remove(position)
    }

    /// Executes a command and checks the condition of its write.
    fn execute(&mut self, write: Option<Write>, command: &[u8]) -> Result<Vec<u8>, String> {
        let redis = &self.environment.redis;
        let write = write.filter(|write| is_write(&arguments(command), write.number));
        let before = write.map_or((0, 0), |write| stored_version(redis, write.target));
        let reply = redis.execute(command);
        let Some(write) = write else { return Ok(reply) };
        let is_done = reply.windows(4).any(|part| part == b"done");
        let is_conflict = reply.windows(8).any(|part| part == b"conflict");
        if let Some(expected) = write.expected
            && ((is_done && expected.0 != before.0) || (is_conflict && expected.0 == before.0))
        {
            let outcome = if is_done { "executed" } else { "a conflict" };
            return Err(format!(
                "the write with the condition {expected:?} is {outcome}, although {before:?} is in Redis"
            ));
        }
        if let Some(expected) = write.expected
            && is_done
            && expected.1 != before.1
            && !self.was_replaced
        {
            return Err(format!("an operator who has seen {expected:?} replaces {before:?}"));
        }
        if is_done && self.executed.iter().all(|(other, _)| other.number != write.number) {
            self.executed.push((write, false));
        }
        Ok(reply)
    }

    fn execute_waiting(&mut self, instance: usize) -> Result<(), String> {
        let position = self.waiting(instance).unwrap();
        let mut command = self.environment.redis.calls()[position].command().to_vec();
        if self.setup.fault == Fault::UncheckedCursor && arguments(&command)[0] == b"write" {
            command = with_arguments(&command, 5, self.environment.redis.last_change());
        }
        let write = self.instances[instance].task.as_ref().and_then(|task| task.write);
        self.instances[instance].reply = Some(self.execute(write, &command)?);
        Ok(())
    }

    fn answer(&mut self, instance: usize) {
        let reply = self.instances[instance].reply.take().unwrap();
        self.instances[instance].note_reply(&reply);
        self.take_call(instance).answer(reply);
        self.run();
    }

    /// Executes and answers all calls of an instance until its task ends.
    fn call(&mut self, instance: usize) -> Result<(), String> {
        while self.instances[instance].task.is_some() {
            if self.instances[instance].reply.is_none() {
                self.execute_waiting(instance)?;
            }
            self.answer(instance);
        }
        Ok(())
    }

    /// Lets the call of an instance fail. If it was not executed, it can still be.
    fn fail_call(&mut self, instance: usize) {
        let call = self.take_call(instance);
        if self.instances[instance].reply.take().is_none() {
            let write = self.instances[instance].task.as_ref().and_then(|task| task.write);
            self.late.push((write, call.command().to_vec()));
        }
        self.instances[instance].note_reply(b"failed");
        call.fail();
    }

    fn restart(&mut self, instance: usize) {
        if let Some(task) = &self.instances[instance].task {
            task.result.abort();
            self.fail_call(instance);
        }
        if let Some(task) = self.instances[instance].task.take() {
            let _ = self.environment.runtime.block_on(task.result);
        }
        self.instances[instance] = Instance::new(self.environment.clients[instance].clone());
        let sync = Arc::clone(&self.instances[instance].sync);
        self.start(instance, None, "start", async move {
            sync.start().await.unwrap();
            Ok(())
        });
    }

    fn replace_contents(&mut self, contents: &[Vec<u8>; 3]) {
        self.crashes -= 1;
        self.was_replaced = true;
        self.environment.redis.set_contents(contents);
    }

    /// Returns the state of the model with the instances in this order. Random ids are replaced by their position.
    fn describe(&self, order: &[usize]) -> Vec<u8> {
        let mut text = Vec::new();
        let calls = self.environment.redis.calls();
        for index in order {
            let instance = &self.instances[*index];
            match &instance.task {
                None => text.extend(instance.state().into_bytes()),
                Some(task) => {
                    text.extend_from_slice(&task.history);
                    let call = calls.iter().find(|call| call.client == *index).unwrap();
                    text.extend(arguments(call.command()).concat());
                    text.extend_from_slice(instance.reply.as_deref().unwrap_or(b"not executed"));
                }
            }
        }
        for dump in self.environment.redis.contents().iter().chain(&self.replica) {
            // The last ten bytes are a checksum.
            text.extend_from_slice(&dump[..dump.len().saturating_sub(10)]);
        }
        self.late.iter().for_each(|(_, command)| text.extend_from_slice(command));
        let executed: Vec<_> =
            self.executed.iter().map(|(write, is_acknowledged)| (write.number, *is_acknowledged)).collect();
        let rest = (executed, self.was_replaced, self.writes, self.failures, self.crashes);
        text.extend(format!("{rest:?}").into_bytes());
        without_ids(&text)
    }

    /// Checks that both instances have the overrides in Redis.
    fn check_equal(&self) -> Result<(), String> {
        let stored: Vec<Version> =
            (0..self.setup.targets).map(|target| stored_version(&self.environment.redis, target)).collect();
        for (index, instance) in self.instances.iter().enumerate() {
            let values: Vec<Version> = (0..self.setup.targets).map(|target| instance.version(target)).collect();
            if values != stored {
                return Err(format!("instance {index} has {values:?} instead of {stored:?}"));
            }
        }
        Ok(())
    }

    /// Checks that Redis has the last acknowledged value of each override, or a later one.
    fn check_latest(&self) -> Result<(), String> {
        for target in 0..self.setup.targets {
            let writes: Vec<_> = self.executed.iter().filter(|(write, _)| write.target == target).collect();
            let last = writes.iter().rposition(|(_, is_acknowledged)| *is_acknowledged);
            let number = |write: &Write| if write.is_set { write.number } else { 0 };
            let mut possible: Vec<u32> = writes[last.unwrap_or(0)..].iter().map(|(write, _)| number(write)).collect();
            possible.extend(last.is_none().then_some(0));
            let (_, value) = stored_version(&self.environment.redis, target);
            if !possible.contains(&value) {
                return Err(format!("override {target} has the value of write {value} instead of {possible:?}"));
            }
        }
        Ok(())
    }
}

impl Instance {
    fn new(redis: Redis) -> Self {
        Self { sync: member_of(OverrideStore::Redis(redis)), task: None, reply: None }
    }

    /// Adds a reply to the history of the task.
    fn note_reply(&mut self, reply: &[u8]) {
        self.task.iter_mut().for_each(|task| task.history.extend_from_slice(reply));
    }

    /// Describes the state, while no task holds it.
    fn state(&self) -> String {
        let state = replication(&self.sync).state.try_lock().unwrap();
        let mut overrides = all_versioned(&state.overrides);
        overrides.sort();
        format!("{:?} {overrides:?} {:?} {:?}", state.cursor, state.recent, state.before_recent)
    }

    fn version(&self, target: usize) -> Version {
        // While a task changes the state, operators see the published overrides.
        let rules = self.sync.context.in_force.snapshot().load();
        let entry = rules.overrides().get(&Target::parse(TARGETS[target]).unwrap());
        entry.map_or((0, 0), |entry| (entry.version, entry.reason.parse().unwrap()))
    }
}

impl Drop for RedisModel {
    fn drop(&mut self) {
        for instance in &mut self.instances {
            if let Some(task) = instance.task.take() {
                task.result.abort();
                let _ = self.environment.runtime.block_on(task.result);
            }
        }
        let calls = std::mem::take(&mut *self.environment.redis.calls());
        calls.into_iter().for_each(WaitingCall::fail);
    }
}

/// Returns whether a call with these arguments writes the change with this number.
fn is_write(arguments: &[Vec<u8>], number: u32) -> bool {
    let reason = |info: &[u8]| serde_json::from_slice::<ChangeInfo>(info).unwrap().reason;
    arguments[0] == b"write" && reason(&arguments[2]) == number.to_string()
}

/// Returns the version of an override in Redis.
fn stored_version(redis: &ControlledRedis, target: usize) -> Version {
    redis.text(TARGETS[target]).map_or((0, 0), |text| {
        let (version, text) = text.split_once('|').unwrap();
        let version = version.parse().unwrap();
        (version, format::read(TARGETS[target], version, text).unwrap().reason.parse().unwrap())
    })
}

/// Replaces each random id, 16 hexadecimal digits, by the number of ids before its first occurrence.
fn without_ids(text: &[u8]) -> Vec<u8> {
    let (mut ids, mut result, mut at) = (BTreeMap::new(), Vec::new(), 0);
    while at < text.len() {
        let digits = text[at..].iter().take_while(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(byte)).count();
        if digits == 16 {
            let known = ids.len() as u8;
            result.push(*ids.entry(&text[at..at + 16]).or_insert(known));
            at += 16;
        } else {
            result.extend_from_slice(&text[at..at + digits.max(1)]);
            at += digits.max(1);
        }
    }
    result
}

impl Model for RedisModel {
    type Event = Event;

    fn events(&self) -> Vec<Event> {
        let mut events = Vec::new();
        for (index, instance) in self.instances.iter().enumerate() {
            if instance.task.is_some() {
                match instance.reply {
                    None => events.extend([Event::Call(index), Event::Execute(index)]),
                    Some(_) => events.push(Event::Answer(index)),
                }
                events.extend((self.failures > 0).then_some(Event::Fail(index)));
            } else {
                events.push(Event::Poll(index));
                let kinds = [Kind::Set, Kind::Remove, Kind::SetIf(0), Kind::SetIf(1)];
                let writes = (0..self.setup.targets).flat_map(|target| kinds.map(|kind| (target, kind)));
                let writes = writes.map(|(target, kind)| Event::Write { instance: index, target, kind });
                events.extend(writes.take(if self.writes > 0 { usize::MAX } else { 0 }));
            }
            events.extend((self.crashes > 0).then_some(Event::Restart(index)));
        }
        events.extend((0..self.late.len()).map(Event::ExecuteLate));
        if self.crashes > 0 {
            events.extend([Event::Replicate, Event::Failover, Event::Empty]);
        }
        events
    }

    fn apply(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::Poll(instance) => self.poll(instance),
            Event::Write { instance, target, kind } => self.write(instance, target, kind),
            Event::Call(instance) => {
                self.execute_waiting(instance)?;
                self.answer(instance);
            }
            Event::Execute(instance) => self.execute_waiting(instance)?,
            Event::Answer(instance) => self.answer(instance),
            Event::Fail(instance) => {
                self.failures -= 1;
                self.fail_call(instance);
                self.run();
            }
            Event::ExecuteLate(call) => {
                let (write, command) = self.late.remove(call);
                self.execute(write, &command)?;
            }
            Event::Restart(instance) => {
                self.crashes -= 1;
                self.restart(instance);
            }
            Event::Replicate => self.replica = self.environment.redis.contents(),
            Event::Failover => self.replace_contents(&self.replica.clone()),
            Event::Empty => self.replace_contents(&Default::default()),
        }
        Ok(())
    }

    fn fingerprint(&self) -> u64 {
        let orders = [[0, 1], [1, 0]];
        hash(orders.map(|order| self.describe(&order)).iter().min())
    }

    fn settle(mut self) -> Result<(), String> {
        for instance in 0..INSTANCES {
            self.call(instance)?;
        }
        for _ in 0..3 {
            for instance in 0..INSTANCES {
                self.poll(instance);
                self.call(instance)?;
            }
        }
        self.check_equal()?;
        self.check_latest()
    }
}

const ONE_TARGET: Setup = Setup { targets: 1, writes: 3, failures: 1, crashes: 1, fault: Fault::None };

#[test]
fn no_acknowledged_change_is_lost_and_conditions_hold() {
    let environment = Environment::start();
    let is_large = model_checker::is_large();
    for (name, targets, depth) in [("one override in Redis", 1, [3, 5]), ("two overrides in Redis", 2, [2, 4])] {
        let setup = Setup { targets, ..ONE_TARGET };
        let explored = explore(|| RedisModel::new(&environment, setup), depth[usize::from(is_large)]);
        println!("{name}: {}", explored.unwrap_or_else(|violation| panic!("{violation}")));
    }
}

#[test]
fn planted_faults_are_found() {
    let environment = Environment::start();
    // A skipped change is only visible if the next one has another target.
    let two_targets = Setup { targets: 2, failures: 0, crashes: 0, ..ONE_TARGET };
    for (fault, setup) in [
        (Fault::IgnoredCondition, ONE_TARGET),
        (Fault::NoResend, ONE_TARGET),
        (Fault::SkippedChanges, ONE_TARGET),
        (Fault::UncheckedCursor, two_targets),
    ] {
        let setup = Setup { fault, ..setup };
        let violation = explore(|| RedisModel::new(&environment, setup), 4).expect_err(&format!("{fault:?} is found"));
        println!("{fault:?}: {violation}");
    }
}
