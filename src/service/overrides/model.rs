//! Model of overrides without a shared store: members that write to their journals and merge the changes of others, and
//! two operators that write on the condition that nothing has changed since they read. Messages are delayed, dropped
//! and duplicated, a member loses its journal, and a lying member sends the override with versions up to the highest
//! number, in every order of events.
//!
//! - **Invariant**: a conditional write succeeds exactly if the override has the expected version on its member. The
//!   value of a member is never replaced by an older one.
//! - **Liveness**: when all messages have arrived, all members have the latest change that was not lost with a journal.
//!   A later change of an operator reaches all members, independently of earlier messages.

use std::collections::BTreeMap;

use tokio::runtime::{Builder, Runtime};

use sluicegate_testing::model_checker::{self, Model, explore, hash, hash_unordered, pairs};

use super::{
    peer_limits::ValidVersions,
    testing::{advance, exchange, member},
    *,
};
use crate::algorithm::MAX_NUMBER;
use crate::store::overrides::{Change, OverrideChange};

const TARGET: &str = "limit|api|user=bob";

/// A fault that is planted in a model. Each must be found.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// The condition of a write is ignored.
    IgnoredCondition,
    /// A position moves past changes that are not merged.
    SkippedChanges,
    /// A merged change gets a new version.
    Renumbered,
}

#[derive(Clone, Copy)]
struct Setup {
    members: usize,
    writes: u32,
    /// Maximum numbers of messages that are dropped or duplicated, and of journals that are lost.
    failures: u32,
    crashes: u32,
    lies: u32,
    fault: Fault,
}

#[derive(Clone, Copy, Debug)]
enum Event {
    /// An operator reads the override on a member.
    Read {
        operator: usize,
        member: usize,
    },
    /// An operator sets the override on a member if it has the version that the operator has read.
    SetIf {
        operator: usize,
        member: usize,
    },
    Set(usize),
    Remove(usize),
    /// A member sends another one the changes after its position, or everything.
    Send {
        from: usize,
        to: usize,
        all: bool,
    },
    Deliver(usize),
    Drop(usize),
    /// A message arrives, and once more later.
    Duplicate(usize),
    Crash(usize),
    /// A lying member sends a value with this version.
    Lie {
        to: usize,
        version: u64,
    },
}

struct Message {
    from: usize,
    to: usize,
    changes: PeerOverrides,
}

/// The version and the text of the override; no text if it was removed.
type Value = (u64, Option<String>);

struct OverrideModel {
    setup: Setup,
    runtime: Runtime,
    members: Vec<Arc<OverrideSync>>,
    /// Position of each member in the journals of others.
    positions: BTreeMap<(usize, usize), u64>,
    /// The version that each operator has read.
    read: [Option<u64>; 2],
    messages: BTreeMap<usize, Message>,
    next_message: usize,
    /// The latest value that each member has had.
    latest: Vec<Value>,
    writes: u32,
    failures: u32,
    crashes: u32,
    lies: u32,
}

impl OverrideModel {
    fn new(setup: Setup) -> Self {
        Self {
            setup,
            runtime: Builder::new_current_thread().enable_time().start_paused(true).build().unwrap(),
            members: (0..setup.members).map(|_| member()).collect(),
            positions: BTreeMap::new(),
            read: [None; 2],
            messages: BTreeMap::new(),
            next_message: 0,
            latest: vec![(0, None); setup.members],
            writes: setup.writes,
            failures: setup.failures,
            crashes: setup.crashes,
            lies: setup.lies,
        }
    }

    /// Moves the clock of each member.
    fn advance(&self) {
        for member in &self.members {
            advance(member, 1_000_000);
        }
    }

    /// Sends a value that no operator has set.
    fn lie(&mut self, to: usize, version: u64) {
        self.lies -= 1;
        let number = 1_000 + self.setup.lies - self.lies;
        let text = format!(r#"{{"w":"{number}/year","a":"eve","t":1}}"#);
        let change = OverrideChange { target: TARGET.into(), before: None, after: Some(text.clone()) };
        let info = format!(r#"{{"author":"eve","reason":"{number}"}}"#);
        let changes = vec![Change { version, id: format!("lie {number}"), info, changes: vec![change] }];
        let overrides = vec![(TARGET.to_owned(), version, text)];
        let lie = PeerOverrides { changes, overrides, ..PeerOverrides::default() };
        self.runtime.block_on(exchange(&self.members[to]).merge(lie)).unwrap();
    }

    /// Sends everything from each member to each other one, twice.
    fn exchange_all(&mut self) -> Result<(), String> {
        for _ in 0..2 {
            for (from, to) in pairs(self.members.len()) {
                self.advance();
                self.send(from, to, false);
                while let Some((_, message)) = self.messages.pop_first() {
                    self.merge(&message);
                    self.check()?;
                }
            }
        }
        Ok(())
    }

    fn check_converged(&self, expected: &Value) -> Result<(), String> {
        for member in 0..self.members.len() {
            let value = self.value(member);
            if value != *expected {
                return Err(format!("member {member} has {value:?} instead of {expected:?}"));
            }
        }
        Ok(())
    }

    fn all(&self, member: usize) -> PeerOverrides {
        self.runtime.block_on(exchange(&self.members[member]).changes_for_peer(None))
    }

    /// Returns the value of a member. A removed override has the version of its removal.
    fn value(&self, member: usize) -> Value {
        let PeerOverrides { changes, overrides, .. } = self.all(member);
        if let Some((_, version, text)) = overrides.into_iter().next() {
            return (version, Some(text));
        }
        let removals = changes.iter().filter(|change| change.changes.iter().any(|change| change.after.is_none()));
        (removals.map(|change| change.version).max().unwrap_or_default(), None)
    }

    fn version(&self, member: usize) -> u64 {
        self.all(member).overrides.first().map_or(0, |(_, version, _)| *version)
    }

    /// Writes a value that no other write has.
    fn write(&mut self, member: usize, is_set: bool, expected: Option<u64>) -> Result<(), String> {
        self.writes -= 1;
        let number = self.setup.writes - self.writes;
        let current = self.version(member);
        let is_current = expected.is_none_or(|expected| expected == current);
        let known = self.all(member).changes.iter().map(|change| change.version).max().unwrap_or_default();
        let request = ChangeRequest {
            target: Target::parse(TARGET).unwrap(),
            value: is_set.then(|| format!("{number}/year")),
            until: None,
            expected: expected.filter(|_| self.setup.fault != Fault::IgnoredCondition),
        };
        let info = ChangeInfo { author: "alice".into(), reason: number.to_string(), at: 0 };
        match self.runtime.block_on(self.members[member].change(&[request], info)) {
            Ok(change) if is_current && change.version > known => Ok(()),
            Err(ChangeError::Conflict { .. }) if !is_current => Ok(()),
            outcome => Err(format!(
                "the override has version {current} and the latest change {known}, but a write with the condition \
                 {expected:?} has the outcome {outcome:?}"
            )),
        }
    }

    fn send(&mut self, from: usize, to: usize, all: bool) {
        let after = self.positions.get(&(from, to)).copied().filter(|_| !all);
        let changes = self.runtime.block_on(exchange(&self.members[from]).changes_for_peer(after));
        self.messages.insert(self.next_message, Message { from, to, changes });
        self.next_message += 1;
    }

    fn merge(&mut self, Message { from, to, changes }: &Message) {
        let mut changes = changes.clone();
        let position = changes.position;
        match self.setup.fault {
            Fault::SkippedChanges => {
                self.positions.insert((*from, *to), position);
                return;
            }
            Fault::Renumbered => {
                let version = self.value(*to).0 + 1;
                changes.changes.iter_mut().for_each(|change| change.version = version);
                changes.overrides.iter_mut().for_each(|(_, other, _)| *other = version);
            }
            Fault::None | Fault::IgnoredCondition => {}
        }
        let merged = self.runtime.block_on(exchange(&self.members[*to]).merge(changes)).unwrap();
        if !merged.is_deferred {
            self.positions.insert((*from, *to), position);
        }
    }

    fn crash(&mut self, member: usize) {
        self.members[member] = testing::member();
        self.latest[member] = (0, None);
        // The others connect again.
        self.positions.retain(|(from, to), _| *from != member && *to != member);
        self.messages.retain(|_, message| message.from != member && message.to != member);
    }

    fn check(&mut self) -> Result<(), String> {
        for member in 0..self.members.len() {
            let value = self.value(member);
            let previous = std::mem::replace(&mut self.latest[member], value.clone());
            if value < previous {
                return Err(format!("member {member} has {value:?} after {previous:?}"));
            }
        }
        Ok(())
    }

    fn hash_changes(PeerOverrides { position, changes, overrides, .. }: &PeerOverrides) -> u64 {
        // The ids of changes are random, but each change has its number as the reason.
        let changes: Vec<_> = changes
            .iter()
            .map(|change| {
                let targets: Vec<_> = change.changes.iter().map(|one| (&one.target, &one.before, &one.after)).collect();
                hash((change.version, &change.info, targets))
            })
            .collect();
        hash((position, changes, overrides))
    }
}

impl Model for OverrideModel {
    type Event = Event;

    fn events(&self) -> Vec<Event> {
        let mut events = Vec::new();
        for member in 0..self.members.len() {
            for operator in 0..self.read.len() {
                events.push(Event::Read { operator, member });
                if self.writes > 0 && self.read[operator].is_some() {
                    events.push(Event::SetIf { operator, member });
                }
            }
            if self.writes > 0 {
                events.extend([Event::Set(member), Event::Remove(member)]);
            }
            events.extend((self.crashes > 0).then_some(Event::Crash(member)));
            if self.lies > 0 {
                let versions = ValidVersions::at(self.members[member].context.clock.now());
                let highest = versions.highest();
                events.extend([1, highest, highest + 1, MAX_NUMBER].map(|version| Event::Lie { to: member, version }));
            }
        }
        for (from, to) in pairs(self.members.len()) {
            events.extend([Event::Send { from, to, all: false }, Event::Send { from, to, all: true }]);
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
            Event::Read { operator, member } => self.read[operator] = Some(self.version(member)),
            Event::SetIf { operator, member } => {
                let expected = self.read[operator].take();
                self.write(member, true, expected)?;
            }
            Event::Set(member) => self.write(member, true, None)?,
            Event::Remove(member) => self.write(member, false, None)?,
            Event::Send { from, to, all } => self.send(from, to, all),
            Event::Deliver(message) => {
                let message = self.messages.remove(&message);
                message.iter().for_each(|message| self.merge(message));
            }
            Event::Drop(message) => {
                self.failures -= 1;
                self.messages.remove(&message);
            }
            Event::Duplicate(message) => {
                self.failures -= 1;
                if let Some(duplicate) = self.messages.remove(&message) {
                    self.merge(&duplicate);
                    self.messages.insert(message, duplicate);
                }
            }
            Event::Crash(member) => {
                self.crashes -= 1;
                self.crash(member);
            }
            Event::Lie { to, version } => self.lie(to, version),
        }
        self.check()
    }

    fn fingerprint(&self) -> u64 {
        let members: Vec<_> = (0..self.members.len()).map(|member| Self::hash_changes(&self.all(member))).collect();
        let messages =
            self.messages.values().map(|Message { from, to, changes }| hash((from, to, Self::hash_changes(changes))));
        let operators = hash_unordered(self.read.iter().map(hash));
        let budgets = (self.writes, self.failures, self.crashes, self.lies);
        hash((members, &self.positions, hash_unordered(messages), operators, budgets))
    }

    fn settle(mut self) -> Result<(), String> {
        while let Some((_, message)) = self.messages.pop_first() {
            self.merge(&message);
            self.check()?;
        }
        self.lies = 0;
        let latest = (0..self.members.len()).map(|member| self.value(member)).max().unwrap_or_default();
        self.exchange_all()?;
        self.check_converged(&latest)?;
        if self.setup.lies == 0 {
            return Ok(());
        }
        self.writes = 1;
        self.write(0, true, None)?;
        let written = self.value(0);
        self.exchange_all()?;
        self.check_converged(&written)
    }
}

const TWO_MEMBERS: Setup = Setup { members: 2, writes: 3, failures: 1, crashes: 1, lies: 0, fault: Fault::None };

#[test]
fn all_members_get_the_latest_change_and_no_older_one() {
    let is_large = model_checker::is_large();
    for (members, depth) in [(2, [5, 7]), (3, [3, 5])] {
        let setup = Setup { members, ..TWO_MEMBERS };
        let explored = explore(|| OverrideModel::new(setup), depth[usize::from(is_large)]);
        println!("overrides of {members} members: {}", explored.unwrap_or_else(|violation| panic!("{violation}")));
    }
}

#[test]
fn the_changes_of_operators_reach_all_members_whatever_one_lying_member_sends() {
    let is_large = model_checker::is_large();
    for (members, depth) in [(2, [4, 7]), (3, [3, 5])] {
        let setup = Setup { members, writes: 2, failures: 0, crashes: 0, lies: 2, fault: Fault::None };
        let explored = explore(|| OverrideModel::new(setup), depth[usize::from(is_large)]);
        println!("overrides of {members} members and a liar: {}", explored.unwrap_or_else(|broken| panic!("{broken}")));
    }
}

#[test]
fn planted_faults_are_found() {
    for fault in [Fault::IgnoredCondition, Fault::SkippedChanges, Fault::Renumbered] {
        let setup = Setup { fault, ..TWO_MEMBERS };
        let violation = explore(|| OverrideModel::new(setup), 6).expect_err(&format!("{fault:?} is found"));
        println!("{fault:?}: {violation}");
    }
}
