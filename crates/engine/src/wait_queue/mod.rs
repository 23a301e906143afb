//! [`WaitQueues`]: queues of the threads that wait for the same counters.
//!
//! A queue belongs to the counters of a request, and exists while it has waiters. As long as none of them is denied, all
//! decide without waiting. A denial closes the queue: only the first thread decides again, when the denial ends, or when hits
//! are refunded. The others are parked, in the order of their arrival. The queue opens when enough hits remain for all.

use std::{
    collections::BTreeMap,
    thread::{self, Thread},
    time::{Duration, Instant},
};

use parking_lot::{Mutex, MutexGuard};
use sluicegate_algorithm::Micros;
use sluicegate_placement::Identity;
use sluicegate_rules::{Measure, RuleSet};
use smallvec::SmallVec;

use super::{Clock, Request, Status, Verdict, counter};

/// Interval in which a waiting thread reads a clock that is set by hand.
const MANUAL_CLOCK_INTERVAL: Duration = Duration::from_millis(1);

/// Identities of the counters of a request, in the order of its descriptors.
pub(super) type QueueKey = SmallVec<[u128; 2]>;

/// Costs of the descriptors of a request, in the same order.
type Costs = SmallVec<[u64; 2]>;

/// All queues of a rate limiter.
pub(super) struct WaitQueues {
    clock: Clock,
    started_at: Instant,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    queues: BTreeMap<QueueKey, Queue>,
    next_ticket: u64,
}

/// Waiters for the same counters, by their ticket: in the order of their arrival.
#[derive(Default)]
struct Queue {
    waiters: BTreeMap<u64, Waiter>,
    /// Whether only the first waiter may decide.
    is_closed: bool,
    /// Whether hits have been refunded since the first waiter began to decide.
    is_woken: bool,
    /// The last denial.
    denial: Option<Denial>,
}

struct Waiter {
    costs: Costs,
    deadline: Duration,
    thread: Thread,
}

struct Denial {
    verdict: Verdict,
    costs: Costs,
    denied_at: Duration,
    /// Time at which the first waiter decides again.
    decide_at: Duration,
    /// Time before which the request is denied, unless hits are refunded.
    not_before: Duration,
    /// Whether no hits have been refunded, and nothing was allowed, since this denial.
    is_current: bool,
}

/// Place of one thread in its queue. Dropping it leaves the queue.
struct Place<'q> {
    queues: &'q WaitQueues,
    key: QueueKey,
    ticket: u64,
}

/// The next step of a waiting thread.
enum Turn {
    Decide,
    GiveUp(Option<Box<Verdict>>),
    ParkUntil(Duration),
}

/// Whether a thread waits after a denial.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Next {
    Return,
    Wait,
}

/// Time after which a denied request is decided again.
#[derive(Clone, Copy)]
struct Retry {
    /// Time in which the request is denied, unless hits are refunded.
    certain: Duration,
    /// Time until slots end, if a concurrency limit denies. They are usually released before.
    slot_ends: Option<Duration>,
}

impl WaitQueues {
    pub(super) fn new(clock: Clock) -> Self {
        Self { clock, started_at: Instant::now(), table: Mutex::default() }
    }

    /// Decides a request until it is allowed, or waiting has no purpose.
    pub(super) fn wait(
        &self,
        request: &Request<'_>,
        key: QueueKey,
        max_wait: Duration,
        decide: impl Fn() -> Verdict,
    ) -> Verdict {
        let deadline = self.now().saturating_add(max_wait);
        let place = self.join(request, key, deadline);
        loop {
            if let Some(denial) = place.turn() {
                return denial;
            }
            // The time is read before, so that a clock that is set during the decision does not prolong the wait.
            let decided_at = self.now();
            let mut verdict = decide();
            if !verdict.is_denied() {
                place.leave(remaining(&verdict));
                self.wait_for_delay(&mut verdict, decided_at, deadline);
                return verdict;
            }
            if place.deny(&verdict, decided_at) == Next::Return {
                return verdict;
            }
        }
    }

    /// Wakes the thread that has waited longest for any of the counters, because their hits have been refunded.
    ///
    /// The counters are computed only if there are waiters.
    pub(super) fn wake_first(&self, counters: impl FnOnce() -> QueueKey) {
        let mut table = self.table();
        if table.queues.is_empty() {
            return;
        }
        let counters = counters();
        let mut longest: Option<(u64, &mut Queue)> = None;
        for (key, queue) in &mut table.queues {
            if !key.iter().any(|counter| counters.contains(counter)) {
                continue;
            }
            let Some(ticket) = queue.first_ticket() else {
                continue;
            };
            if longest.as_ref().is_none_or(|(earlier, _)| ticket < *earlier) {
                longest = Some((ticket, queue));
            }
        }
        if let Some((_, queue)) = longest {
            queue.wake_first();
        }
    }

    /// Wakes the first thread of each queue, because the rules have changed.
    pub(super) fn wake_all(&self) {
        for queue in self.table().queues.values_mut() {
            queue.wake_first();
        }
    }

    /// Returns the number of waiters.
    #[cfg(test)]
    pub(super) fn waiters(&self) -> usize {
        self.table().queues.values().map(|queue| queue.waiters.len()).sum()
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock()
    }

    /// Returns the time that waiting is measured with. It does not change if the wall clock is set.
    fn now(&self) -> Duration {
        match &self.clock {
            Clock::System => self.started_at.elapsed(),
            Clock::Manual(_) => self.clock.now().duration(),
        }
    }

    /// Adds this thread to the end of a queue, until the result is dropped. `deadline` is a time of [`Self::now`].
    fn join(&self, request: &Request<'_>, key: QueueKey, deadline: Duration) -> Place<'_> {
        let costs = request.descriptors.iter().map(|descriptor| descriptor.hits).collect();
        let waiter = Waiter { costs, deadline, thread: thread::current() };
        let mut table = self.table();
        let ticket = table.next_ticket;
        table.next_ticket += 1;
        table.queues.entry(key.clone()).or_default().waiters.insert(ticket, waiter);
        Place { queues: self, key, ticket }
    }

    /// Blocks the thread until a time, or until it is woken.
    fn park_until(&self, until: Duration) {
        match self.clock {
            Clock::System => thread::park_timeout(until.saturating_sub(self.now())),
            Clock::Manual(_) => thread::park_timeout(MANUAL_CLOCK_INTERVAL),
        }
    }

    /// Waits for the delay of an allowed request if it ends before the deadline, and removes it from the verdict.
    ///
    /// A longer delay stays in the verdict, and is not waited for.
    fn wait_for_delay(&self, verdict: &mut Verdict, decided_at: Duration, deadline: Duration) {
        let delay = verdict.statuses.iter().map(|status| status.delay).max().unwrap_or_default();
        let end = decided_at.saturating_add(delay.duration());
        if end > deadline {
            return;
        }
        while self.now() < end {
            self.park_until(end);
        }
        for status in &mut verdict.statuses {
            status.delay = Micros::ZERO;
        }
    }
}

impl Table {
    /// Removes a waiter. If its request was allowed and `hits` remain, the next waiters decide. If `hits` is `None`,
    /// only a waiter that becomes the first one decides.
    fn remove(&mut self, key: &QueueKey, ticket: u64, hits: Option<u64>) {
        let Some(queue) = self.queues.get_mut(key) else {
            return;
        };
        let was_first = queue.first_ticket() == Some(ticket);
        if queue.waiters.remove(&ticket).is_none() {
            return;
        }
        if queue.waiters.is_empty() {
            self.queues.remove(key);
        } else if let Some(hits) = hits {
            queue.admit(hits);
        } else if was_first {
            queue.promote_first();
        }
    }
}

impl Queue {
    fn first_ticket(&self) -> Option<u64> {
        self.waiters.keys().next().copied()
    }

    fn unpark_first(&self) {
        if let Some(first) = self.waiters.values().next() {
            first.thread.unpark();
        }
    }

    /// Wakes the waiter that has become the first one. A denial of a larger request does not apply to it.
    fn promote_first(&mut self) {
        let Some(first) = self.waiters.values().next() else {
            return;
        };
        first.thread.unpark();
        if let Some(denial) = &mut self.denial
            && !denial.applies_to(&first.costs)
        {
            denial.is_current = false;
        }
    }

    fn wake_first(&mut self) {
        self.is_woken = true;
        self.invalidate_denial();
        self.unpark_first();
    }

    fn invalidate_denial(&mut self) {
        if let Some(denial) = &mut self.denial {
            denial.is_current = false;
        }
    }

    /// Returns the last denial if it is still valid.
    fn current_denial(&self) -> Option<&Denial> {
        self.denial.as_ref().filter(|denial| denial.is_current)
    }

    /// Returns the current step of the waiter with this ticket.
    fn next_turn(&mut self, ticket: u64, now: Duration) -> Turn {
        let is_first = self.first_ticket() == Some(ticket);
        let Some(waiter) = self.waiters.get(&ticket) else {
            return Turn::Decide;
        };
        let deadline = waiter.deadline;
        let Some(denial) = self.current_denial() else {
            if is_first {
                self.is_woken = false;
                return Turn::Decide;
            }
            return if self.is_closed { self.wait_until(deadline, now) } else { Turn::Decide };
        };
        if is_first && denial.decide_at <= now {
            self.is_woken = false;
            return Turn::Decide;
        }
        if denial.not_before > deadline {
            return Turn::GiveUp(Some(Box::new(denial.verdict_at(now))));
        }
        let until = if is_first { denial.decide_at.min(deadline) } else { deadline };
        self.wait_until(until, now)
    }

    fn wait_until(&self, until: Duration, now: Duration) -> Turn {
        if until > now {
            return Turn::ParkUntil(until);
        }
        Turn::GiveUp(self.denial.as_ref().map(|denial| Box::new(denial.verdict_at(now))))
    }

    /// Records a denial of the waiter with this ticket, and returns its next step.
    fn deny(&mut self, ticket: u64, verdict: &Verdict, now: Duration) -> Next {
        let Some(retry) = Retry::of(verdict) else {
            return Next::Return;
        };
        let is_first = self.first_ticket() == Some(ticket);
        let Some(waiter) = self.waiters.get(&ticket) else {
            return Next::Return;
        };
        let deadline = waiter.deadline;
        let costs = waiter.costs.clone();
        let not_before = now.saturating_add(retry.certain);
        let next = if now >= deadline || not_before > deadline { Next::Return } else { Next::Wait };
        self.is_closed = true;
        // The first waiter has decided as well, or decides now.
        if !is_first {
            return next;
        }
        let mut decide_at = not_before;
        if let Some(slot_ends) = retry.slot_ends {
            decide_at = decide_at.max(now.saturating_add(slot_ends));
        }
        // The decision may have been made before the refund.
        let is_current = !std::mem::take(&mut self.is_woken);
        self.denial =
            Some(Denial { verdict: verdict.clone(), costs, denied_at: now, decide_at, not_before, is_current });
        // These waiters give up.
        for waiter in self.waiters.values() {
            if waiter.deadline < not_before {
                waiter.thread.unpark();
            }
        }
        next
    }

    /// Lets the next waiters decide, after one was allowed and `hits` remain.
    fn admit(&mut self, hits: u64) {
        if !self.is_closed {
            return;
        }
        self.invalidate_denial();
        let mut wanted = 0_u64;
        for waiter in self.waiters.values() {
            wanted = wanted.saturating_add(waiter.costs.iter().copied().max().unwrap_or_default());
        }
        if wanted > hits {
            self.unpark_first();
            return;
        }
        self.is_closed = false;
        for waiter in self.waiters.values() {
            waiter.thread.unpark();
        }
    }
}

impl Denial {
    /// Returns `true` if a request with these costs is denied for the same time or longer.
    fn applies_to(&self, costs: &Costs) -> bool {
        costs.iter().zip(&self.costs).all(|(cost, denied)| cost >= denied)
    }

    /// Returns the verdict with its times reduced by the age of the denial.
    fn verdict_at(&self, now: Duration) -> Verdict {
        let age = now.saturating_sub(self.denied_at);
        let age = Micros::new(u64::try_from(age.as_micros()).unwrap_or(u64::MAX));
        let mut verdict = self.verdict.clone();
        for status in &mut verdict.statuses {
            status.next = status.next - age;
            status.reset = status.reset.map(|time| time - age);
            status.retry_after = status.retry_after.map(|time| time - age);
        }
        verdict
    }
}

impl Retry {
    /// Computes the times from a denial. Returns `None` if the request will never be allowed, or if no time is known.
    fn of(verdict: &Verdict) -> Option<Self> {
        let wait = verdict.retry_after()?.duration();
        let mut has_slot = false;
        let mut certain = Micros::ZERO;
        for status in &verdict.statuses {
            if !status.is_over() {
                continue;
            }
            if is_slot(status) {
                has_slot = true;
            } else {
                certain = certain.max(status.retry_after.unwrap_or_default());
            }
        }
        if has_slot {
            return Some(Self { certain: certain.duration().min(wait), slot_ends: Some(wait) });
        }
        Some(Self { certain: wait, slot_ends: None })
    }
}

/// Returns whether a limit of a status is a concurrency limit. A hidden limit counts as one if its denials can end at
/// any time.
fn is_slot(status: &Status) -> bool {
    match &status.limit {
        Some(limit) => matches!(limit.measure, Measure::InFlight { .. }),
        None => status.denial_counts,
    }
}

/// Returns the number of hits that remain after an allowed request.
fn remaining(verdict: &Verdict) -> u64 {
    let limited = verdict.statuses.iter().filter(|status| status.limit.is_some());
    limited.map(|status| status.remaining).min().unwrap_or(u64::MAX)
}

/// Returns the key of a request's queue: the identities of its counters, or of descriptors that have none.
pub(super) fn queue_key(request: &Request<'_>, rules: &RuleSet) -> QueueKey {
    let mut key = QueueKey::new();
    for descriptor in &request.descriptors {
        let mut identity = Identity::new(request.domain);
        match counter(rules, request.domain, &descriptor.entries, None) {
            Some((name, _)) => identity.add("", &name),
            None => {
                for entry in &descriptor.entries {
                    identity.add(entry.key, entry.value);
                }
            }
        }
        key.push(identity.finish());
    }
    key
}

impl Place<'_> {
    /// Waits until it is this thread's turn to decide. Returns a denial if its turn does not come before its deadline.
    fn turn(&self) -> Option<Verdict> {
        loop {
            match self.next_turn() {
                Turn::Decide => return None,
                // Without a denial, the thread decides a last time.
                Turn::GiveUp(denial) => return denial.map(|denial| *denial),
                Turn::ParkUntil(until) => self.queues.park_until(until),
            }
        }
    }

    fn next_turn(&self) -> Turn {
        let now = self.queues.now();
        match self.queues.table().queues.get_mut(&self.key) {
            Some(queue) => queue.next_turn(self.ticket, now),
            None => Turn::Decide,
        }
    }

    /// Records a denial of this thread, and returns the next step.
    fn deny(&self, verdict: &Verdict, decided_at: Duration) -> Next {
        let mut table = self.queues.table();
        let Some(queue) = table.queues.get_mut(&self.key) else {
            return Next::Return;
        };
        let next = queue.deny(self.ticket, verdict, decided_at);
        if next == Next::Return {
            table.remove(&self.key, self.ticket, None);
        }
        next
    }

    /// Leaves the queue after a request that was allowed, so that `hits` remain.
    fn leave(&self, hits: u64) {
        self.queues.table().remove(&self.key, self.ticket, Some(hits));
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.queues.table().remove(&self.key, self.ticket, None);
    }
}

#[cfg(test)]
mod tests;
