//! [`Round`]: the steps of the waiting requests, in one exchange of reads and one of writes with a server.
//!
//! memcached cannot run a program where the counters are, as Redis can. A round therefore reads the counters of its
//! requests, runs the steps here one after the other, and writes each changed counter if it has not been changed by
//! another instance meanwhile (compare-and-swap). Hits on a counter that was changed are decided again in the next
//! round. All hits of a round on one counter share one write, so that workers conflict with each other, but requests of
//! one worker do not.
//!
//! A fixed window that counts denied hits, the default, needs no second exchange: the server adds the costs to the
//! number in the item, and the steps are computed from the sum. Only if the window has ended is the number written.
//!
//! ## All or none ([`Charge::All`])
//! No counter of the request is written if one of its limits denies it. If a counter was changed by another instance, the
//! others may be written already. The hit on that counter is then decided again, and if it is denied, the written hits
//! are rolled back. Until then, other callers can see too few remaining hits, but never too many.

use std::collections::HashMap;

use sluicegate_algorithm::{Action, Algorithm, CLOCK_SLACK, Micros, Operation, Program, State};
use sluicegate_store::{Charge, Hit, StepOutcome, StepOutcomes, StoreError};
use tokio::sync::oneshot;

use super::{
    key::key_of,
    protocol::{Commands, Reply, Ttl},
};

/// Maximum cost that one round adds to the number of a fixed window without reading it first. The largest count has half of
/// its digits' range, which is 5,000 times as large, so that additions of many workers at the same time do not exceed it.
const MAX_INCREMENT: u64 = 1_000_000;
/// Maximum number of rounds for rolling back the hits of a denied request.
const MAX_ROLLBACK_ROUNDS: u32 = 100;

/// A request that waits for the decisions on its hits.
pub(crate) struct Request {
    hits: Vec<PendingHit>,
    charge: Charge,
    now: Micros,
    /// Whether the takes of the request are prevented, so that those that were written must be rolled back.
    is_denied: bool,
    /// Number of rounds since the request was denied.
    rollback_rounds: u32,
    answer: oneshot::Sender<StepOutcomes>,
}

/// A hit of a request, with its outcome as soon as there is one.
struct PendingHit {
    hit: Hit,
    /// Index of the counter in the round.
    counter: usize,
    /// The action to perform: that of the hit, or a peek or a rollback if the request is denied.
    action: Action,
    /// The outcome in this round. It is final if the counter is written.
    computed: Option<Result<StepOutcome, StoreError>>,
    /// The final outcome.
    outcome: Option<Result<StepOutcome, StoreError>>,
}

impl Request {
    /// Returns the number of hits.
    pub(crate) fn hits(&self) -> usize {
        self.hits.len()
    }

    pub(crate) fn new(hits: Vec<Hit>, charge: Charge, now: Micros, answer: oneshot::Sender<StepOutcomes>) -> Self {
        let hits = hits
            .into_iter()
            .map(|hit| PendingHit { action: hit.action, hit, counter: 0, computed: None, outcome: None })
            .collect();
        Self { hits, charge, now, is_denied: false, rollback_rounds: 0, answer }
    }

    /// Answers all hits with an error, except those that have an outcome.
    pub(crate) fn fail(self, error: StoreError) {
        let outcomes = self.hits.into_iter().map(|pending| pending.outcome.unwrap_or(Err(error))).collect();
        // The caller may be gone.
        let _ = self.answer.send(outcomes);
    }

    /// Prevents the takes of the request.
    fn deny(&mut self) {
        self.is_denied = true;
        for pending in &mut self.hits {
            if pending.outcome.is_none() && pending.action == Action::Take {
                pending.action = Action::Peek;
            }
        }
    }

    /// Computes the outcomes of the hits that have none, and changes the counters.
    fn decide(&mut self, counters: &mut [CounterItem]) {
        if self.charge == Charge::All && !self.is_denied && self.is_prevented(counters) {
            self.deny();
        }
        for pending in &mut self.hits {
            if pending.outcome.is_none() {
                pending.computed = Some(counters[pending.counter].step(&pending.hit, pending.action, self.now));
            }
        }
    }

    /// Returns whether a hit without an outcome prevents the takes of the request.
    fn is_prevented(&self, counters: &[CounterItem]) -> bool {
        for pending in &self.hits {
            if pending.outcome.is_some() {
                continue;
            }
            let answer = counters[pending.counter].peek(&pending.hit, self.now);
            if pending.hit.blocks.prevents(&answer, |is_allowed| *is_allowed) {
                return true;
            }
        }
        false
    }

    /// Accepts the outcomes on counters that were written, and returns the request if it needs another round.
    fn settle(mut self, counters: &[CounterItem], failed_rollbacks: &mut u64) -> Option<Self> {
        for pending in &mut self.hits {
            let Some(computed) = pending.computed.take() else {
                continue;
            };
            pending.outcome = match counters[pending.counter].write {
                Write::None | Write::Done => Some(computed),
                Write::Pending | Write::Conflict => None,
                Write::Failed(error) => Some(Err(error)),
            };
            if let Some(Err(_)) = pending.outcome
                && pending.hit.blocks.on_error()
            {
                self.is_denied |= self.charge == Charge::All;
            }
        }
        if self.is_unfinished() && self.answer.is_closed() {
            // The caller does not wait any more: it has the answer that the time is up.
            if self.charge == Charge::Each {
                return None;
            }
            self.is_denied = true;
        }
        if self.is_denied {
            self.deny();
            self.start_rollbacks(failed_rollbacks);
        }
        if self.is_unfinished() {
            return Some(self);
        }
        let outcomes =
            self.hits.into_iter().map(|pending| pending.outcome.unwrap_or(Err(StoreError::Missing))).collect();
        // The caller may be gone.
        let _ = self.answer.send(outcomes);
        None
    }

    fn is_unfinished(&self) -> bool {
        self.hits.iter().any(|pending| pending.outcome.is_none())
    }

    /// Starts the rollback of the takes that were written, and gives up those that have failed too often.
    fn start_rollbacks(&mut self, failed_rollbacks: &mut u64) {
        self.rollback_rounds += 1;
        let gives_up = self.rollback_rounds > MAX_ROLLBACK_ROUNDS;
        for pending in &mut self.hits {
            match &pending.outcome {
                None if gives_up => {
                    *failed_rollbacks += u64::from(matches!(pending.action, Action::RollBack(_)));
                    pending.outcome = Some(Err(StoreError::Rejected));
                }
                Some(Ok(step))
                    if step.action == Action::Take && (step.allowed || pending.hit.counter.program.counts_denied()) =>
                {
                    pending.action = Action::RollBack(step.at);
                    pending.outcome = None;
                }
                _ => {}
            }
        }
    }
}

/// The state of a counter's write at the end of the round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Write {
    /// The counter has not changed.
    None,
    /// The new state is not written yet.
    Pending,
    /// The new state was written.
    Done,
    /// The counter was changed by another instance meanwhile.
    Conflict,
    /// The server has rejected the command.
    Failed(StoreError),
}

/// A counter during a round.
struct CounterItem {
    key: String,
    /// Whether the item is a decimal number, which the server can add to.
    is_number: bool,
    /// Costs that the server adds before it returns the number.
    increment: Option<Increment>,
    /// Version of the item; `None` if there is none.
    version: Option<u64>,
    /// Whether the item contains other data than a counter.
    is_invalid: bool,
    state: State,
    /// Time from which the state has the same meaning as a new one.
    expires: Micros,
    /// Time of the last step.
    stepped_at: Micros,
    write: Write,
}

/// An addition to the number of a fixed window.
#[derive(Clone, Copy)]
struct Increment {
    cost: u64,
    /// The number if there is none yet.
    initial: u64,
    /// Lifetime of the number if there is none yet.
    ttl: Ttl,
    /// The number afterwards, which the server has returned.
    sum: u64,
}

impl Increment {
    /// Returns the addition of the cost of one hit.
    fn of(hit: &Hit, now: Micros) -> Self {
        let program = &hit.counter.program;
        let mut state = State::default();
        program.step(&mut state, hit.operation(now));
        Self { cost: hit.cost, initial: number_of(&state), ttl: ttl(program.expires(&state, now), now), sum: 0 }
    }

    /// Returns both additions in one, or `None` if they are of different windows or more than [`MAX_INCREMENT`].
    fn plus(self, other: Self) -> Option<Self> {
        let is_same_window = self.initial - self.cost == other.initial - other.cost;
        let cost = self.cost + other.cost;
        if !is_same_window || cost > MAX_INCREMENT {
            return None;
        }
        Some(Self { cost, initial: self.initial + other.cost, ..self })
    }
}

impl CounterItem {
    fn new(key: String, is_number: bool) -> Self {
        Self {
            key,
            is_number,
            increment: None,
            version: None,
            is_invalid: false,
            state: State::default(),
            expires: Micros::ZERO,
            stepped_at: Micros::ZERO,
            write: Write::None,
        }
    }

    /// Sets the state to that of the reply to a read.
    fn read(&mut self, reply: Reply) {
        match reply {
            Reply::Value { value, version } => {
                self.version = Some(version);
                match self.state_of(&value) {
                    Some(state) => self.state = state,
                    None => {
                        self.is_invalid = true;
                        self.write = Write::Failed(StoreError::Rejected);
                    }
                }
            }
            Reply::Missing => {}
            Reply::Done | Reply::Conflict | Reply::Rejected(_) => self.write = Write::Failed(StoreError::Rejected),
        }
    }

    /// Returns the state in an item, before the increment. Returns `None` if the item contains no state.
    fn state_of(&mut self, value: &[u8]) -> Option<State> {
        if !self.is_number {
            return Some(State::from_bytes(value));
        }
        let mut number: u64 = str::from_utf8(value).ok()?.parse().ok()?;
        if let Some(increment) = &mut self.increment {
            increment.sum = number;
            number = number.checked_sub(increment.cost)?;
        }
        Some(State::from_bytes(&number.to_le_bytes()))
    }

    /// Compares the number that the server has computed with that of the steps. They differ if the window has ended or the
    /// count is at its maximum; then the number of the steps is written.
    fn compare_with_sum(&mut self) {
        let Some(increment) = self.increment else {
            return;
        };
        if self.error().is_none() {
            let is_equal = increment.sum == number_of(&self.state);
            self.write = if is_equal { Write::Done } else { Write::Pending };
        }
    }

    /// Returns the bytes of the item for the current state.
    fn value(&self) -> Vec<u8> {
        if self.is_number { number_of(&self.state).to_string().into_bytes() } else { self.state.as_bytes().to_vec() }
    }

    fn error(&self) -> Option<StoreError> {
        if let Write::Failed(error) = self.write { Some(error) } else { None }
    }

    /// Returns whether the hit would be allowed.
    fn peek(&self, hit: &Hit, now: Micros) -> Result<bool, StoreError> {
        if let Some(error) = self.error() {
            return Err(error);
        }
        let peek = Operation { action: Action::Peek, ..hit.operation(now) };
        Ok(hit.counter.program.step(&mut self.state.clone(), peek))
    }

    /// Performs the action for the hit.
    fn step(&mut self, hit: &Hit, action: Action, now: Micros) -> Result<StepOutcome, StoreError> {
        if let Some(error) = self.error() {
            return Err(error);
        }
        let program = &hit.counter.program;
        let before = self.state.clone();
        let allowed = program.step(&mut self.state, Operation { action, ..hit.operation(now) });
        if self.state != before {
            self.write = Write::Pending;
        }
        self.expires = program.expires(&self.state, now);
        self.stepped_at = now;
        Ok(StepOutcome { allowed, action, at: now, state: self.state.clone() })
    }
}

/// The steps of requests, between the reading and the writing of their counters.
pub(crate) struct Round {
    requests: Vec<Request>,
    counters: Vec<CounterItem>,
}

impl Round {
    /// Collects the counters of the requests. Every key begins with `prefix`.
    pub(crate) fn new(mut requests: Vec<Request>, prefix: &str) -> Self {
        let mut counters: Vec<CounterItem> = Vec::new();
        let mut indexes = HashMap::new();
        // Counters with other hits than increments.
        let mut is_read = Vec::new();
        for request in &mut requests {
            let charge = request.charge;
            for pending in &mut request.hits {
                if pending.outcome.is_some() {
                    continue;
                }
                let counter = &pending.hit.counter;
                let index = *indexes.entry(counter.name.clone()).or_insert_with(|| {
                    counters.push(CounterItem::new(key_of(prefix, &counter.name), is_window(&counter.program)));
                    is_read.push(false);
                    counters.len() - 1
                });
                pending.counter = index;
                is_read[index] |= charge == Charge::All || !is_increment(&pending.hit);
            }
        }
        let mut round = Self { requests, counters };
        round.prepare_increments(is_read);
        round
    }

    /// Adds up the costs of the counters that are not read first.
    fn prepare_increments(&mut self, mut is_read: Vec<bool>) {
        for request in &self.requests {
            for pending in &request.hits {
                if pending.outcome.is_some() || is_read[pending.counter] {
                    continue;
                }
                let item = &mut self.counters[pending.counter];
                let next = Increment::of(&pending.hit, request.now);
                item.increment = match item.increment {
                    None => Some(next),
                    Some(former) => former.plus(next),
                };
                // These hits cannot be added up.
                is_read[pending.counter] = item.increment.is_none();
            }
        }
    }

    /// Returns the commands that read the counters, in their order.
    pub(crate) fn reads(&self) -> Commands {
        let mut commands = Commands::default();
        for counter in &self.counters {
            match counter.increment {
                Some(Increment { cost, initial, ttl, .. }) => {
                    commands.add_increment(&counter.key, cost, initial, ttl);
                }
                None => commands.add_get(&counter.key),
            }
        }
        commands
    }

    /// Runs the steps of the requests on the counters that were read. Returns the commands that write the changed ones.
    pub(crate) fn decide(&mut self, replies: Vec<Reply>) -> Commands {
        for (counter, reply) in self.counters.iter_mut().zip(replies) {
            counter.read(reply);
        }
        for request in &mut self.requests {
            request.decide(&mut self.counters);
        }
        let mut commands = Commands::default();
        for counter in &mut self.counters {
            counter.compare_with_sum();
            if counter.write == Write::Pending {
                let ttl = ttl(counter.expires, counter.stepped_at);
                commands.add_store(&counter.key, &counter.value(), counter.version, ttl);
            }
        }
        commands
    }

    /// Returns whether an item that was read contains other data than a counter.
    pub(crate) fn has_invalid_item(&self) -> bool {
        self.counters.iter().any(|counter| counter.is_invalid)
    }

    /// Returns the requests that need another round after the replies to the writes, and answers the others.
    ///
    /// `failed_rollbacks` is increased by the number of takes that could not be rolled back.
    pub(crate) fn finish(mut self, replies: Vec<Reply>, failed_rollbacks: &mut u64) -> Vec<Request> {
        let pending = self.counters.iter_mut().filter(|counter| counter.write == Write::Pending);
        for (counter, reply) in pending.zip(replies) {
            counter.write = match reply {
                Reply::Done => Write::Done,
                Reply::Conflict | Reply::Missing => Write::Conflict,
                Reply::Value { .. } | Reply::Rejected(_) => Write::Failed(StoreError::Rejected),
            };
        }
        let mut unfinished = Vec::new();
        for request in self.requests {
            if let Some(request) = request.settle(&self.counters, failed_rollbacks) {
                unfinished.push(request);
            }
        }
        unfinished
    }

    /// Answers all hits without an outcome with an error.
    pub(crate) fn fail(self, error: StoreError) {
        for request in self.requests {
            request.fail(error);
        }
    }
}

/// Returns whether the cost of a hit can be added to a number before the number is read.
fn is_increment(hit: &Hit) -> bool {
    let program = &hit.counter.program;
    let is_counted = hit.action == Action::Take && program.counts_denied();
    is_counted && is_window(program) && hit.cost <= MAX_INCREMENT
}

/// Returns whether the state of the program is a number that the server can add to.
fn is_window(program: &Program) -> bool {
    matches!(program, Program::Limit(Algorithm::FixedWindow(_)))
}

/// Returns the number in the state of a fixed window.
fn number_of(state: &State) -> u64 {
    state.as_bytes().first_chunk().map(|bytes| u64::from_le_bytes(*bytes)).unwrap_or_default()
}

/// Returns the lifetime of an item with a state that has no meaning from `expires`.
///
/// The item lives longer by the difference that clocks may have, because the state still has its meaning for an instance
/// with a late clock.
fn ttl(expires: Micros, now: Micros) -> Ttl {
    let lifetime = expires - now + CLOCK_SLACK;
    Ttl { secs: lifetime.ceil_secs(), now_secs: now.floor_secs() }
}

#[cfg(test)]
mod tests;
