//! Model of permits: clients that take, renew and release slots of one limit. Their messages are delayed, dropped and
//! duplicated, and a client crashes, in every order of events.
//!
//! A client behaves as `client/src/permit.rs`: it has a new name for each permit, one call at a time, and releases a
//! permit until the release is confirmed.
//!
//! - **Invariant**: at most `limit` clients have a slot at the same time, and each can renew it. A client has its slot
//!   from the answer until it releases it, or until the hold after it sent the latest call that was allowed.
//! - **Liveness**: when all messages have arrived, no slot is held for a client that has released it, unless a call to
//!   take it was delayed or duplicated. After the hold, all slots are free.

use std::collections::BTreeMap;

use sluicegate_testing::model_checker::{self, Model, explore, hash, hash_unordered};

use super::*;

const HOLD: Micros = Micros::from_secs(3);
const TICK: Micros = Micros::from_secs(1);
const START: Micros = Micros::from_secs(1_763_672_400);

/// A fault that is planted in a model. Each must be found.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// A release frees the slot that ends first, of any holder.
    AnySlot,
    /// A renewal takes another slot.
    NewSlot,
    /// A client measures the hold from the answer.
    LateHold,
}

#[derive(Clone, Copy)]
struct Setup {
    limit: u64,
    clients: usize,
    /// Maximum numbers of ticks, of messages that are dropped, delayed or duplicated, and of crashes.
    ticks: u32,
    failures: u32,
    crashes: u32,
    fault: Fault,
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Acquire(usize),
    Renew(usize),
    Release(usize),
    /// A message arrives.
    Deliver(usize),
    Drop(usize),
    /// A message arrives, and once more later.
    Duplicate(usize),
    /// A client no longer waits for an answer.
    TimeOut(usize),
    Crash(usize),
    Tick,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Call {
    Acquire,
    Renew,
    Release,
}

/// A message between a client and the service, which executes a call when it arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Message {
    client: usize,
    call: Call,
    sent_at: Micros,
    /// `None` before the service has executed the call.
    allowed: Option<bool>,
    /// Number of the call among those of the client.
    number: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Client {
    stage: Stage,
    /// The time until which it has a slot.
    until: Micros,
    /// Number of the call that it waits for.
    waits_for: Option<u32>,
    calls: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Stage {
    #[default]
    Idle,
    Acquiring,
    Holding,
    Releasing,
    Done,
}

struct PermitModel {
    setup: Setup,
    limiter: Concurrency,
    state: State,
    now: Micros,
    clients: Vec<Client>,
    messages: BTreeMap<usize, Message>,
    next_message: usize,
    ticks: u32,
    failures: u32,
    crashes: u32,
    /// Whether a call to take a slot was delayed or duplicated: it can arrive after the release.
    is_late: bool,
}

impl PermitModel {
    fn new(setup: Setup) -> Self {
        Self {
            setup,
            limiter: Concurrency::new(MaxHits::hard(setup.limit), HOLD).unwrap(),
            state: State::default(),
            now: START,
            clients: vec![Client::default(); setup.clients],
            messages: BTreeMap::new(),
            next_message: 0,
            ticks: setup.ticks,
            failures: setup.failures,
            crashes: setup.crashes,
            is_late: false,
        }
    }

    fn send(&mut self, client: usize, call: Call) {
        let sender = &mut self.clients[client];
        sender.calls += 1;
        sender.waits_for = Some(sender.calls);
        let message = Message { client, call, sent_at: self.now, allowed: None, number: sender.calls };
        self.messages.insert(self.next_message, message);
        self.next_message += 1;
    }

    fn receive(&mut self, message: Message) -> Result<(), String> {
        match message.allowed {
            None => {
                let allowed = self.execute(message);
                if message.call == Call::Renew && !allowed && self.clients[message.client].until > self.now {
                    return Err("a client cannot renew its slot".into());
                }
                self.messages.insert(self.next_message, Message { allowed: Some(allowed), ..message });
                self.next_message += 1;
            }
            Some(allowed) => self.answer(message, allowed),
        }
        Ok(())
    }

    fn execute(&mut self, Message { client, call, .. }: Message) -> bool {
        let holder = match (self.setup.fault, call) {
            (Fault::AnySlot, Call::Release) => 0,
            (Fault::NewSlot, Call::Renew) => 100 + client as u64,
            _ => 1 + client as u64,
        };
        let limiter = self.limiter.with_context(RequestContext { holder, ..RequestContext::default() });
        let action = if call == Call::Release { Action::Refund } else { Action::Take };
        limiter.step(&mut self.state, Operation { action, cost: 1, now: self.now })
    }

    fn answer(&mut self, Message { client, call, sent_at, number, .. }: Message, allowed: bool) {
        let since = if self.setup.fault == Fault::LateHold { self.now } else { sent_at };
        let receiver = &mut self.clients[client];
        if receiver.waits_for != Some(number) {
            return;
        }
        receiver.waits_for = None;
        match call {
            Call::Acquire | Call::Renew if allowed => (receiver.stage, receiver.until) = (Stage::Holding, since + HOLD),
            Call::Acquire | Call::Release => receiver.stage = Stage::Done,
            Call::Renew => receiver.until = Micros::ZERO,
        }
    }

    /// Lets a client go on without an answer. After a call to take a slot, it releases the slot that it may have.
    fn time_out(&mut self, client: usize) {
        let client = &mut self.clients[client];
        client.waits_for = None;
        if client.stage == Stage::Acquiring {
            client.stage = Stage::Releasing;
        }
    }

    fn release(&mut self, client: usize) {
        (self.clients[client].stage, self.clients[client].until) = (Stage::Releasing, Micros::ZERO);
        self.send(client, Call::Release);
    }

    fn check(&self) -> Result<(), String> {
        let held = self.clients.iter().filter(|client| client.until > self.now).count() as u64;
        if held > self.setup.limit { Err(format!("{held} clients have a slot")) } else { Ok(()) }
    }

    fn remaining(&self) -> u64 {
        let peek = Operation { action: Action::Peek, cost: 1, now: self.now };
        self.limiter.explain(&self.state, peek, true).remaining
    }
}

impl Model for PermitModel {
    type Event = Event;

    fn events(&self) -> Vec<Event> {
        let mut events = Vec::new();
        for (index, client) in self.clients.iter().enumerate() {
            match client.stage {
                _ if client.waits_for.is_some() => {
                    events.extend((self.failures > 0).then_some(Event::TimeOut(index)));
                }
                Stage::Idle => events.push(Event::Acquire(index)),
                Stage::Holding => events.extend([Event::Renew(index), Event::Release(index)]),
                Stage::Releasing => events.push(Event::Release(index)),
                Stage::Acquiring | Stage::Done => {}
            }
            let can_crash = self.crashes > 0 && !matches!(client.stage, Stage::Idle | Stage::Done);
            events.extend(can_crash.then_some(Event::Crash(index)));
        }
        for message in self.messages.keys() {
            events.push(Event::Deliver(*message));
            events.extend((self.failures > 0).then_some(Event::Drop(*message)));
            events.extend((self.failures > 0).then_some(Event::Duplicate(*message)));
        }
        events.extend((self.ticks > 0).then_some(Event::Tick));
        events
    }

    fn apply(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::Acquire(client) => {
                self.clients[client].stage = Stage::Acquiring;
                self.send(client, Call::Acquire);
            }
            Event::Renew(client) => self.send(client, Call::Renew),
            Event::Release(client) => self.release(client),
            Event::Deliver(message) => {
                if let Some(message) = self.messages.remove(&message) {
                    self.receive(message)?;
                }
            }
            Event::Drop(message) => {
                self.failures -= 1;
                if let Some(Message { client, number, .. }) = self.messages.remove(&message)
                    && self.clients[client].waits_for == Some(number)
                {
                    self.time_out(client);
                }
            }
            Event::Duplicate(message) => {
                self.failures -= 1;
                let message = self.messages[&message];
                self.is_late |= message.call != Call::Release;
                self.receive(message)?;
            }
            Event::TimeOut(client) => {
                self.failures -= 1;
                self.is_late = true;
                self.time_out(client);
            }
            Event::Crash(client) => {
                self.crashes -= 1;
                self.clients[client] = Client { stage: Stage::Done, ..Client::default() };
            }
            Event::Tick => {
                self.ticks -= 1;
                self.now = self.now + TICK;
            }
        }
        self.check()
    }

    fn fingerprint(&self) -> u64 {
        // Clients differ only in their names, which are in the messages and in the slots.
        let slots = self.slots_by_client();
        let clients = self.clients.iter().enumerate().map(|(index, client)| {
            let messages = self.messages.values().filter(|message| message.client == index);
            let messages = hash_unordered(messages.map(|message| hash(Message { client: 0, ..*message })));
            let slots: Vec<_> = slots.iter().filter(|(holder, ..)| *holder == index).collect();
            let slots: Vec<_> = slots.iter().map(|(_, end, position)| (end, position)).collect();
            hash((client, messages, slots))
        });
        let budgets = (self.ticks, self.failures, self.crashes, self.is_late);
        hash((hash_unordered(clients), self.now, budgets))
    }

    fn settle(mut self) -> Result<(), String> {
        for _ in 0..4 {
            while let Some((_, message)) = self.messages.pop_first() {
                self.receive(message)?;
                self.check()?;
            }
            for client in 0..self.clients.len() {
                if matches!(self.clients[client].stage, Stage::Holding | Stage::Releasing) {
                    self.release(client);
                }
            }
        }
        if !self.is_late && self.crashes == self.setup.crashes && self.remaining() < self.setup.limit {
            return Err("a slot is held by nobody".into());
        }
        self.now = self.now + HOLD;
        if self.remaining() < self.setup.limit { Err("a slot is held after the hold".into()) } else { Ok(()) }
    }
}

impl PermitModel {
    /// Returns the client, the end and the position of each slot.
    fn slots_by_client(&self) -> Vec<(usize, u64, usize)> {
        let client = |[_, _, _, _, _, _, _, holder, ..]: &[u8; SLOT_BYTES]| usize::from(*holder % 100) - 1;
        let slots = Concurrency::slots(&self.state).iter().enumerate();
        slots.map(|(position, slot)| (client(slot), Concurrency::end(slot), position)).collect()
    }
}

const SETUP: Setup = Setup { limit: 1, clients: 3, ticks: 4, failures: 2, crashes: 1, fault: Fault::None };

#[test]
fn no_more_clients_than_the_limit_have_a_slot() {
    let depth = if model_checker::is_large() { 13 } else { 10 };
    for limit in [1, 2] {
        let explored = explore(|| PermitModel::new(Setup { limit, ..SETUP }), depth);
        println!("permits, limit {limit}: {}", explored.unwrap_or_else(|violation| panic!("{violation}")));
    }
}

#[test]
fn planted_faults_are_found() {
    for fault in [Fault::AnySlot, Fault::NewSlot, Fault::LateHold] {
        let setup = Setup { fault, ..SETUP };
        let violation = explore(|| PermitModel::new(setup), 11).expect_err(&format!("{fault:?} is found"));
        println!("{fault:?}: {violation}");
    }
}
