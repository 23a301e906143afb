//! Model of the exchange: two or three members with different clocks. Messages are delayed, dropped, duplicated and
//! reordered, and a member crashes and joins again, in every order of events.
//!
//! Each hit has a cost that no sum of others has, so the count of a member shows which hits it contains.
//!
//! - **Invariant**: a member counts each of its own hits and no hit twice.
//! - **Liveness**: when all messages have arrived, each member counts all hits of the members that are alive.

use std::collections::{BTreeMap, BTreeSet};

use sluicegate_testing::model_checker::{self, Model, explore, hash, pairs};

use super::*;

/// The limit, which no search reaches.
const LIMIT: u64 = 1_000;
/// Hit `n` costs `4^n`.
const MAX_HITS: u32 = 4;

/// A fault that is planted in a model. Each must be found.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// A batch is applied again, as if it began at the receiver's position.
    AppliedTwice,
    /// A restarted member continues its former epoch.
    EpochIgnored,
    /// Times are not converted between the clocks of two members.
    ClockIgnored,
    /// The position moves past increments that are not applied.
    BatchSkipped,
}

#[derive(Clone, Copy)]
struct Setup {
    name: &'static str,
    members: usize,
    hits: u32,
    /// Maximum number of messages that are dropped or duplicated, and of calls that are sent although one is in transit.
    failures: u32,
    crashes: u32,
    /// Difference of the members' clocks in milliseconds.
    clock_difference: u64,
    fault: Fault,
    /// Whether the search begins after one exchanged hit.
    begins_late: bool,
}

#[derive(Clone, Copy, Debug)]
enum Event {
    /// A member counts a hit.
    Take(usize),
    Publish(usize),
    /// The first member calls the second one.
    Call(usize, usize),
    Deliver(usize),
    Drop(usize),
    /// A message arrives, and once more later.
    Duplicate(usize),
    /// A member is replaced by one without counters, which has to join.
    Crash(usize),
}

/// A message between two members. `started` identifies the start of the member that sent the call.
#[derive(Clone)]
struct Message {
    from: usize,
    to: usize,
    started: u64,
    content: Content,
}

#[derive(Clone)]
enum Content {
    Pull {
        origin: u64,
        after: u64,
    },
    /// Another start of the member was called.
    Hello {
        origin: u64,
        is_joined: bool,
    },
    Batch(Batch),
    Nothing,
    CopyNeeded {
        origin: u64,
    },
    /// `after` is the position of the caller in the origin, and `None` while it joins.
    Copy {
        origin: u64,
        after: Option<u64>,
    },
    Copied {
        origin: u64,
        after: Option<u64>,
        positions: Vec<(u64, u64)>,
        counters: Vec<CounterCopy>,
    },
}

struct Member {
    instance: Instance,
    /// The start of each other member that it follows, once that has responded.
    origins: BTreeMap<usize, u64>,
    /// The members that have responded completely. After all others have, it joins.
    contacted: BTreeSet<usize>,
    is_joined: bool,
    has_copied: bool,
    /// Its hits: all, and those that are not published.
    hits: BTreeSet<u32>,
    unpublished: Vec<u32>,
    published: Vec<Vec<u32>>,
}

impl Member {
    fn new(epoch: u64, is_joined: bool) -> Self {
        Self {
            instance: Instance::with_max_counters(epoch, 1),
            origins: BTreeMap::new(),
            contacted: BTreeSet::new(),
            is_joined,
            has_copied: is_joined,
            hits: BTreeSet::new(),
            unpublished: Vec::new(),
            published: Vec::new(),
        }
    }
}

struct PeerModel {
    setup: Setup,
    limit: Algorithm,
    members: Vec<Member>,
    messages: BTreeMap<usize, Message>,
    next_message: usize,
    next_epoch: u64,
    hits: u32,
    failures: u32,
    crashes: u32,
}

impl PeerModel {
    fn new(setup: Setup) -> Self {
        let mut model = Self {
            setup,
            limit: sliding_log(LIMIT, 60),
            members: (0..setup.members).map(|member| Member::new(member as u64 + 1, true)).collect(),
            messages: BTreeMap::new(),
            next_message: 0,
            next_epoch: setup.members as u64 + 1,
            hits: 0,
            failures: setup.failures,
            crashes: setup.crashes,
        };
        for (member, other) in pairs(model.members.len()) {
            let epoch = model.members[other].instance.peers.epoch();
            model.members[member].origins.insert(other, epoch);
        }
        if setup.begins_late {
            model.take(0);
            model.exchange_all();
        }
        model
    }

    /// Returns the time by a member's clock.
    fn clock(&self, member: usize) -> Micros {
        at(self.setup.clock_difference * member as u64)
    }

    fn take(&mut self, member: usize) {
        let (hit, now) = (self.hits, self.clock(member));
        self.hits += 1;
        let Member { instance, hits, unpublished, .. } = &mut self.members[member];
        assert!(instance.take(&self.limit, 4_u64.pow(hit), now));
        hits.insert(hit);
        unpublished.push(hit);
    }

    fn publish(&mut self, member: usize) {
        let now = self.clock(member);
        let Member { instance, unpublished, published, .. } = &mut self.members[member];
        instance.peers.publish(now);
        if !unpublished.is_empty() {
            published.push(std::mem::take(unpublished));
        }
    }

    fn send(&mut self, from: usize, to: usize, started: u64, content: Content) {
        self.messages.insert(self.next_message, Message { from, to, started, content });
        self.next_message += 1;
    }

    fn call(&mut self, from: usize, to: usize) {
        let member = &self.members[from];
        let origin = member.origins.get(&to).copied().unwrap_or_default();
        let after = member.instance.peers.position(origin);
        self.send(from, to, member.instance.peers.epoch(), Content::Pull { origin, after });
    }

    /// Returns whether a call between two members or its response is in transit.
    fn is_waiting(&self, from: usize, to: usize) -> bool {
        let ends = [(from, to), (to, from)];
        self.messages.values().any(|message| ends.contains(&(message.from, message.to)))
    }

    /// Returns the hits that a member counts.
    fn counted(&self, member: usize) -> Result<BTreeSet<u32>, String> {
        let mut used = self.members[member].instance.used(&self.limit, self.clock(member));
        let mut counted = BTreeSet::new();
        for hit in 0..MAX_HITS {
            match used % 4 {
                0 => {}
                1 => drop(counted.insert(hit)),
                times => return Err(format!("member {member} counts hit {hit} {times} times")),
            }
            used /= 4;
        }
        Ok(counted)
    }

    fn check(&self) -> Result<(), String> {
        for (index, member) in self.members.iter().enumerate() {
            let counted = self.counted(index)?;
            if !member.hits.is_subset(&counted) || counted.iter().any(|hit| *hit >= self.hits) {
                return Err(format!("member {index} counts {counted:?}, its own hits are {:?}", member.hits));
            }
        }
        Ok(())
    }

    fn receive(&mut self, Message { from, to, started, content }: Message) {
        let now = self.clock(to);
        let receiver = &mut self.members[to];
        let peers = Arc::clone(&receiver.instance.peers);
        match content {
            Content::Pull { origin, after } => {
                let content = if origin == peers.epoch() {
                    match peers.pull(started, after, now) {
                        Pull::Batch(batch) => Content::Batch(batch),
                        Pull::Nothing => Content::Nothing,
                        Pull::Copy => Content::CopyNeeded { origin },
                    }
                } else {
                    Content::Hello { origin: peers.epoch(), is_joined: receiver.is_joined }
                };
                self.send(to, from, started, content);
            }
            Content::Copy { origin, after } => {
                if origin == peers.epoch() {
                    let positions = peers.copy_positions(now);
                    self.publish(to);
                    let counters = (0..).map_while(|part| peers.copy_part(part)).flatten().collect();
                    self.send(to, from, started, Content::Copied { origin, after, positions, counters });
                }
            }
            // The caller has crashed.
            _ if started != peers.epoch() => {}
            Content::Hello { origin, is_joined } => {
                let is_late = receiver.origins.get(&from).is_some_and(|known| *known > origin);
                if !is_late {
                    receiver.origins.insert(from, origin);
                    if !receiver.is_joined && is_joined && !receiver.has_copied {
                        self.send(to, from, started, Content::Copy { origin, after: None });
                    } else {
                        self.contacted(to, from);
                    }
                }
            }
            Content::CopyNeeded { origin } => {
                let after = Some(peers.position(origin));
                self.send(to, from, started, Content::Copy { origin, after });
            }
            Content::Copied { origin, after, positions, counters } => {
                let is_needed = after.map_or(!receiver.has_copied, |after| peers.position(origin) == after);
                if is_needed {
                    receiver.has_copied = true;
                    peers.insert_copies(counters, now);
                    peers.continue_from(origin, &positions, now);
                }
                self.contacted(to, from);
            }
            Content::Batch(batch) => {
                // No increment is applied before the member has joined.
                if receiver.is_joined {
                    self.apply_batch(to, batch);
                }
            }
            Content::Nothing => {}
        }
    }

    /// Lets a member count and apply hits as soon as all others have responded.
    fn contacted(&mut self, member: usize, other: usize) {
        let others = self.members.len() - 1;
        let member = &mut self.members[member];
        member.contacted.insert(other);
        member.is_joined |= member.contacted.len() == others;
    }

    /// Lets a member connect again. The first call of a connection asks for the start of the other member.
    fn connect(&mut self, from: usize, to: usize) {
        self.members[from].origins.remove(&to);
    }

    fn apply_batch(&self, to: usize, mut batch: Batch) {
        let (peers, now) = (&self.members[to].instance.peers, self.clock(to));
        match self.setup.fault {
            Fault::ClockIgnored => batch.now = now,
            Fault::BatchSkipped => batch.increments.clear(),
            Fault::None | Fault::AppliedTwice | Fault::EpochIgnored => {}
        }
        peers.apply(&batch, now);
        if self.setup.fault == Fault::AppliedTwice {
            let after = peers.position(batch.origin);
            (batch.after, batch.until) = (after, after + 1);
            peers.apply(&batch, now);
        }
    }

    fn crash(&mut self, member: usize) {
        let epoch = match self.setup.fault {
            Fault::EpochIgnored => self.members[member].instance.peers.epoch(),
            _ => self.next_epoch,
        };
        self.next_epoch += 1;
        self.members[member] = Member::new(epoch, false);
    }

    /// Delivers all messages and exchanges all hits.
    fn exchange_all(&mut self) {
        for _ in 0..8 {
            (0..self.members.len()).for_each(|member| self.publish(member));
            pairs(self.members.len()).iter().for_each(|(from, to)| self.call(*from, *to));
            while let Some((_, message)) = self.messages.pop_first() {
                self.receive(message);
            }
        }
    }

    fn hash_message(&self, message: &Message) -> u64 {
        let content = match &message.content {
            Content::Pull { origin, after } => (0, *origin, *after, 0),
            Content::Hello { origin, is_joined } => (1, *origin, u64::from(*is_joined), 0),
            Content::Batch(batch) => (2, batch.origin, batch.after, batch.until),
            Content::Nothing => (3, 0, 0, 0),
            Content::CopyNeeded { origin } => (4, *origin, 0, 0),
            Content::Copy { origin, after } => (5, *origin, hash(after), 0),
            Content::Copied { origin, after, positions, counters } => {
                let mut positions = positions.clone();
                positions.sort_unstable();
                (
                    6,
                    *origin,
                    hash((after, positions)),
                    hash(counters.iter().map(|copy| &copy.state).collect::<Vec<_>>()),
                )
            }
        };
        hash((message.from, message.to, message.started, content))
    }

    fn hash_member(&self, member: &Member) -> u64 {
        let Member { instance, origins, contacted, is_joined, has_copied, hits, unpublished, published } = member;
        let (mut positions, mut subscribers) = (Vec::new(), Vec::new());
        let outgoing = instance.peers.outgoing.lock();
        for epoch in 1..self.next_epoch {
            positions.push(instance.peers.position(epoch));
            let subscriber = outgoing.subscribers.get(&epoch);
            subscribers.push(subscriber.map(|subscriber| (subscriber.position(), subscriber.sent_until())));
        }
        let state = instance.memory.state(KEY.as_bytes());
        let flags = (is_joined, has_copied, instance.peers.epoch());
        hash((state, origins, contacted, flags, hits, unpublished, published, positions, subscribers))
    }
}

impl Model for PeerModel {
    type Event = Event;

    fn events(&self) -> Vec<Event> {
        let mut events = Vec::new();
        for (index, member) in self.members.iter().enumerate() {
            events.extend((member.is_joined && self.hits < self.setup.hits).then_some(Event::Take(index)));
            events.extend((!member.unpublished.is_empty()).then_some(Event::Publish(index)));
            events.extend((self.crashes > 0).then_some(Event::Crash(index)));
        }
        for (from, to) in pairs(self.members.len()) {
            let is_waiting = self.is_waiting(from, to);
            events.extend((!is_waiting || self.failures > 0).then_some(Event::Call(from, to)));
        }
        for message in self.messages.keys() {
            events.push(Event::Deliver(*message));
            events.extend((self.failures > 0).then_some(Event::Drop(*message)));
            events.extend((self.failures > 0).then_some(Event::Duplicate(*message)));
        }
        events
    }

    fn apply(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::Take(member) => self.take(member),
            Event::Publish(member) => self.publish(member),
            Event::Call(from, to) => {
                if self.is_waiting(from, to) {
                    self.failures -= 1;
                    self.connect(from, to);
                }
                self.call(from, to);
            }
            Event::Deliver(message) => {
                let message = self.messages.remove(&message);
                message.into_iter().for_each(|message| self.receive(message));
            }
            Event::Drop(message) => {
                self.failures -= 1;
                if let Some(Message { from, to, content, .. }) = self.messages.remove(&message) {
                    let is_call = matches!(content, Content::Pull { .. } | Content::Copy { .. });
                    let (from, to) = if is_call { (from, to) } else { (to, from) };
                    self.connect(from, to);
                }
            }
            Event::Duplicate(message) => {
                self.failures -= 1;
                self.receive(self.messages[&message].clone());
            }
            Event::Crash(member) => {
                self.crashes -= 1;
                self.crash(member);
            }
        }
        self.check()
    }

    fn fingerprint(&self) -> u64 {
        let members: Vec<_> = self.members.iter().map(|member| self.hash_member(member)).collect();
        let messages = model_checker::hash_unordered(self.messages.values().map(|message| self.hash_message(message)));
        hash((members, messages, self.hits, self.failures, self.crashes, self.next_epoch))
    }

    fn settle(mut self) -> Result<(), String> {
        self.exchange_all();
        self.check()?;
        let alive: BTreeSet<u32> = self.members.iter().flat_map(|member| member.hits.iter().copied()).collect();
        for index in 0..self.members.len() {
            let counted = self.counted(index)?;
            if !self.members[index].is_joined || !alive.is_subset(&counted) {
                return Err(format!("member {index} counts {counted:?} instead of {alive:?}"));
            }
        }
        Ok(())
    }
}

const TWO_MEMBERS: Setup = Setup {
    name: "exchange of two members",
    members: 2,
    hits: 2,
    failures: 1,
    crashes: 1,
    clock_difference: 0,
    fault: Fault::None,
    begins_late: false,
};
const LATER: Setup = Setup { name: "exchange of two members, later", begins_late: true, hits: 3, ..TWO_MEMBERS };
/// No copies, because members copy only from those with about the same time. The clocks differ by more than a window.
const OTHER_CLOCKS: Setup = Setup {
    name: "exchange of two members with different clocks",
    crashes: 0,
    clock_difference: 200_000,
    ..TWO_MEMBERS
};
const THREE_MEMBERS: Setup = Setup { name: "exchange of three members", members: 3, hits: 3, ..LATER };

#[test]
fn no_hit_is_counted_twice_or_lost() {
    let is_large = model_checker::is_large();
    for (setup, depth) in
        [(TWO_MEMBERS, [9, 100]), (LATER, [9, 100]), (OTHER_CLOCKS, [21, 100]), (THREE_MEMBERS, [5, 7])]
    {
        let explored = explore(|| PeerModel::new(setup), depth[usize::from(is_large)]);
        println!("{}: {}", setup.name, explored.unwrap_or_else(|violation| panic!("{violation}")));
    }
}

#[test]
fn planted_faults_are_found() {
    for (fault, setup) in [
        (Fault::AppliedTwice, TWO_MEMBERS),
        (Fault::ClockIgnored, OTHER_CLOCKS),
        (Fault::BatchSkipped, TWO_MEMBERS),
        (Fault::EpochIgnored, LATER),
    ] {
        let setup = Setup { fault, ..setup };
        let violation = explore(|| PeerModel::new(setup), 9).expect_err(&format!("{fault:?} is found"));
        println!("{fault:?}: {violation}");
    }
}
