//! [`WaitQueues`]: queues of the callers of this process that wait for the same descriptors.
//!
//! A queue belongs to one domain and one list of descriptors, and exists while it has waiters. Every waiter checks
//! with a call of its own, so a verdict and its hits always belong to the waiter that receives it.
//!
//! - While no limit has denied, the first [`MAX_CHECKING`] waiters check immediately.
//! - A denial closes the queue: only the first waiter checks again, when the denial ends. All others wait, because a
//!   waiter that checks earlier could overtake it.
//! - The verdict of an allowed check contains the number of remaining hits. The next waiters for which these hits are
//!   enough check immediately, so that a queue is not limited to one waiter per round trip.
//!
//! A denial of a concurrency limit can end at any time. The first waiter checks again after a pause that doubles, or when
//! this client has released a slot.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use smallvec::SmallVec;
use tokio::{
    sync::Notify,
    time::{Instant, sleep, timeout_at},
};

use crate::{
    check_request::Identities,
    lock::lock,
    verdict::{DecidedBy, Verdict},
};

/// Maximum number of waiters of one queue that check at the same time.
const MAX_CHECKING: usize = 64;
/// Minimum pause before a waiter checks again.
const MIN_PAUSE: Duration = Duration::from_millis(1);
/// First pause before the next check of a concurrency limit. Each further pause is twice as long. Each is reduced by a
/// random part of up to a half.
const FIRST_POLL: Duration = Duration::from_millis(20);
/// Maximum pause before the next check of a concurrency limit.
const MAX_POLL: Duration = Duration::from_secs(1);
/// Wait that replaces a longer one that the clock cannot represent.
const LONGEST_WAIT: Duration = Duration::from_secs(86_400 * 365);

/// Costs of the descriptors of a request, in the same order.
pub(crate) type Costs = SmallVec<[u64; 2]>;

/// All queues of a client.
pub(crate) struct WaitQueues {
    max_waiters: usize,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    queues: BTreeMap<QueueKey, Queue>,
    /// Number of waiters in all queues.
    waiters: usize,
    next_ticket: u64,
}

/// Identity of a queue.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct QueueKey {
    /// Identities of the descriptors, without the holder of a slot.
    pub(crate) identities: Identities,
    /// Whether the waiters wait for a [`Permit`](crate::Permit).
    pub(crate) is_permit: bool,
}

/// Waiters for the same descriptors, by their ticket: in the order of their arrival.
#[derive(Default)]
struct Queue {
    waiters: BTreeMap<u64, Waiter>,
    /// Whether a limit has denied, so that a new waiter must not check before its turn.
    is_closed: bool,
    /// The last denial.
    denial: Option<Denial>,
    /// Whether hits or slots have become available since the first waiter began to check.
    is_woken: bool,
    /// Latest pause between checks of a concurrency limit, without its random reduction; zero after an allowed check.
    poll: Duration,
    /// Lower bound of the deadlines of all waiters.
    earliest_deadline: Option<Instant>,
}

struct Waiter {
    costs: Costs,
    deadline: Instant,
    /// Whether this waiter may check before it is the first: no limit has denied, or the remaining hits are enough for
    /// it and all before it.
    may_check: bool,
    wakeup: Arc<Notify>,
}

struct Denial {
    verdict: Verdict,
    costs: Costs,
    received_at: Instant,
    /// Time at which the first waiter checks again.
    check_at: Instant,
    /// Time before which the request is certainly denied.
    not_before: Instant,
    /// Whether the denial applies to the first waiter. `false` after a refund or a release by this client, or an
    /// allowed check, or if the first waiter costs less than the denied one.
    is_current: bool,
}

/// Place of one waiter in its queue. Dropping it removes the waiter; hits of a check in progress may stay taken.
pub(crate) struct Place<'q> {
    queues: &'q WaitQueues,
    key: QueueKey,
    ticket: u64,
    deadline: Instant,
    wakeup: Arc<Notify>,
}

/// The step of a waiter after its check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Returns the verdict. The waiter has left its queue.
    Return,
    /// Waits for its next turn.
    Wait,
}

/// The current step of a waiter.
enum Step {
    Ask,
    GiveUp(Option<Box<Verdict>>),
    SleepUntil(Instant),
}

/// Times after which a denied request can be allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Retry {
    /// Time for which the request is certainly denied.
    certain: Duration,
    /// Time until a slot ends, if a concurrency limit denies. Slots can be released before.
    slot_ends: Option<Duration>,
}

impl WaitQueues {
    /// Creates queues for at most `max_waiters` waiters together.
    pub(crate) fn new(max_waiters: usize) -> Self {
        Self { max_waiters, table: Mutex::default() }
    }

    /// Joins the end of a queue. Returns `None` if the maximum wait is zero, or if there are too many waiters.
    pub(crate) fn join(&self, key: QueueKey, costs: Costs, max_wait: Duration) -> Option<Place<'_>> {
        if max_wait.is_zero() {
            return None;
        }
        let now = Instant::now();
        let deadline = now.checked_add(max_wait).unwrap_or(now + LONGEST_WAIT);
        let wakeup = Arc::new(Notify::new());
        let mut table = self.table();
        if table.waiters >= self.max_waiters {
            return None;
        }
        let ticket = table.next_ticket;
        table.next_ticket += 1;
        table.waiters += 1;
        let queue = table.queues.entry(key.clone()).or_default();
        let may_check = !queue.is_closed && queue.waiters.len() < MAX_CHECKING;
        queue.waiters.insert(ticket, Waiter { costs, deadline, may_check, wakeup: Arc::clone(&wakeup) });
        queue.expect_deadline(deadline);
        drop(table);
        Some(Place { queues: self, key, ticket, deadline, wakeup })
    }

    /// Wakes the waiter that has waited longest for any of the descriptors, because this client has returned hits of
    /// them, or released a slot.
    ///
    /// Only one waiter is woken: there are usually no hits for a second one. It would notice them at its next turn.
    pub(crate) fn wake_first(&self, identities: &Identities) {
        let mut table = self.table();
        let mut longest: Option<(u64, &mut Queue)> = None;
        for (key, queue) in &mut table.queues {
            if !key.identities.iter().any(|identity| identities.contains(identity)) {
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
            queue.is_woken = true;
            queue.invalidate_denial();
            queue.notify_first();
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        lock(&self.table)
    }
}

impl Table {
    /// Removes a waiter, and lets the next ones check. `hits` is the number of hits that remain if the waiter's request
    /// was allowed, otherwise `None`.
    fn remove(&mut self, key: &QueueKey, ticket: u64, hits: Option<u64>) {
        let Some(queue) = self.queues.get_mut(key) else {
            return;
        };
        let was_first = queue.first_ticket() == Some(ticket);
        if queue.waiters.remove(&ticket).is_none() {
            return;
        }
        self.waiters -= 1;
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

    fn notify_first(&self) {
        if let Some(first) = self.waiters.values().next() {
            first.wakeup.notify_one();
        }
    }

    /// Wakes the waiter that has become the first one. A denial of a larger request does not apply to it.
    fn promote_first(&mut self) {
        let Some(first) = self.waiters.values().next() else {
            return;
        };
        first.wakeup.notify_one();
        if let Some(denial) = &mut self.denial
            && !denial.applies_to(&first.costs)
        {
            denial.is_current = false;
        }
    }

    fn expect_deadline(&mut self, deadline: Instant) {
        let earliest = self.earliest_deadline.unwrap_or(deadline);
        self.earliest_deadline = Some(earliest.min(deadline));
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
    fn step(&mut self, ticket: u64, now: Instant) -> Step {
        let is_first = self.first_ticket() == Some(ticket);
        let Some(waiter) = self.waiters.get(&ticket) else {
            return Step::Ask;
        };
        let deadline = waiter.deadline;
        let Some(denial) = self.current_denial() else {
            if is_first || waiter.may_check {
                self.is_woken &= !is_first;
                return Step::Ask;
            }
            return self.wait_until(deadline, now);
        };
        if is_first && denial.check_at <= now {
            self.is_woken = false;
            return Step::Ask;
        }
        if denial.not_before > deadline {
            return Step::GiveUp(Some(denial.verdict_at(now)));
        }
        let until = if is_first { denial.check_at.min(deadline) } else { deadline };
        self.wait_until(until, now)
    }

    fn wait_until(&self, until: Instant, now: Instant) -> Step {
        if until > now {
            return Step::SleepUntil(until);
        }
        Step::GiveUp(self.denial.as_ref().map(|denial| denial.verdict_at(now)))
    }

    /// Lets the first waiter check, and those behind it for which `hits` are enough.
    fn admit(&mut self, hits: u64) {
        self.invalidate_denial();
        self.poll = Duration::ZERO;
        let mut hits = hits;
        let mut admitted = 0;
        for waiter in self.waiters.values_mut().take(MAX_CHECKING) {
            let cost = waiter.cost();
            if admitted > 0 && cost > hits {
                break;
            }
            hits = hits.saturating_sub(cost);
            admitted += 1;
            if !waiter.may_check {
                waiter.may_check = true;
                waiter.wakeup.notify_one();
            }
        }
        self.notify_first();
        self.is_closed = admitted < self.waiters.len() || hits == 0;
    }

    /// Records a denial of the waiter with this ticket, and returns its next step.
    fn deny(&mut self, ticket: u64, verdict: &Verdict, is_permit: bool, now: Instant) -> Next {
        let Some(retry) = Retry::of(verdict, is_permit) else {
            return Next::Return;
        };
        let is_first = self.first_ticket() == Some(ticket);
        let Some(waiter) = self.waiters.get(&ticket) else {
            return Next::Return;
        };
        let deadline = waiter.deadline;
        let costs = waiter.costs.clone();
        let remaining = deadline.saturating_duration_since(now);
        let next = if remaining.is_zero() || retry.certain > remaining { Next::Return } else { Next::Wait };
        self.is_closed = true;
        for other in self.waiters.values_mut().take(MAX_CHECKING) {
            other.may_check = false;
        }
        // The first waiter has checked as well, or checks now.
        if !is_first {
            return next;
        }
        let not_before = now.checked_add(retry.certain).unwrap_or(now + LONGEST_WAIT);
        let pause = self.pause(retry);
        let mut check_at = now.checked_add(pause).unwrap_or(not_before);
        if retry.slot_ends.is_some() && next == Next::Wait {
            check_at = check_at.min(deadline);
        }
        // The service may have decided before the hits or slots became available.
        let is_current = !std::mem::take(&mut self.is_woken);
        self.denial =
            Some(Denial { verdict: verdict.clone(), costs, received_at: now, check_at, not_before, is_current });
        self.notify_hopeless(not_before);
        next
    }

    /// Returns the pause before the first waiter checks again.
    fn pause(&mut self, retry: Retry) -> Duration {
        let Some(slot_ends) = retry.slot_ends else {
            return retry.certain.max(MIN_PAUSE);
        };
        self.poll = (self.poll * 2).clamp(FIRST_POLL, MAX_POLL);
        let poll = self.poll.mul_f64(rand::random_range(0.5..=1.0));
        poll.min(slot_ends).max(retry.certain).max(MIN_PAUSE)
    }

    /// Wakes the waiters with a deadline before `not_before`, the time until which every request is denied.
    fn notify_hopeless(&mut self, not_before: Instant) {
        if self.earliest_deadline.is_none_or(|earliest| earliest >= not_before) {
            return;
        }
        self.earliest_deadline = None;
        let mut earliest: Option<Instant> = None;
        for waiter in self.waiters.values() {
            if waiter.deadline < not_before {
                waiter.wakeup.notify_one();
                continue;
            }
            earliest = Some(earliest.unwrap_or(waiter.deadline).min(waiter.deadline));
        }
        self.earliest_deadline = earliest;
    }
}

impl Waiter {
    /// Returns the largest cost of its descriptors.
    fn cost(&self) -> u64 {
        self.costs.iter().copied().max().unwrap_or_default()
    }
}

impl Denial {
    /// Returns `true` if a request with these costs is denied for the same time or longer.
    fn applies_to(&self, costs: &Costs) -> bool {
        costs.iter().zip(&self.costs).all(|(cost, denied)| cost >= denied)
    }

    /// Returns the verdict with its times reduced by the age of the denial.
    fn verdict_at(&self, now: Instant) -> Box<Verdict> {
        let age = now.saturating_duration_since(self.received_at);
        let mut verdict = Verdict::empty(false, DecidedBy::DenyCache);
        verdict.statuses.clone_from(&self.verdict.statuses);
        for status in &mut verdict.statuses {
            status.reduce_times(age);
        }
        Box::new(verdict)
    }
}

impl Retry {
    /// Computes the times from a denial. Returns `None` if the request will never be allowed, or if no time is known.
    ///
    /// A limit with a window of zero is a concurrency limit. If the service did not send the limit, it is taken for a
    /// concurrency limit if the waiters wait for a permit.
    fn of(verdict: &Verdict, is_permit: bool) -> Option<Self> {
        let mut retry = Self { certain: Duration::ZERO, slot_ends: None };
        let mut is_denied = false;
        for status in &verdict.statuses {
            if status.allowed {
                continue;
            }
            is_denied = true;
            let time = status.retry_after?;
            let is_slot = match &status.limit {
                Some(limit) => limit.window.is_zero(),
                None => is_permit,
            };
            if is_slot {
                retry.slot_ends = Some(retry.slot_ends.unwrap_or_default().max(time));
            } else {
                retry.certain = retry.certain.max(time);
            }
        }
        if is_denied { Some(retry) } else { None }
    }
}

impl Place<'_> {
    /// Returns the time until which the waiter waits at most.
    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Waits for this waiter's turn to check, and then returns `None`. Returns a denial if the turn cannot come before
    /// the deadline.
    pub(crate) async fn turn(&self) -> Option<Box<Verdict>> {
        loop {
            let until = match self.step() {
                Step::Ask => return None,
                // Without a denial, the waiters before this one have not been answered yet. It checks a last time.
                Step::GiveUp(denial) => return denial,
                Step::SleepUntil(until) => until,
            };
            let _ = timeout_at(until, self.wakeup.notified()).await;
        }
    }

    fn step(&self) -> Step {
        let now = Instant::now();
        match self.queues.table().queues.get_mut(&self.key) {
            Some(queue) => queue.step(self.ticket, now),
            None => Step::Ask,
        }
    }

    /// Records the verdict of this waiter's check, and returns the waiter's next step.
    pub(crate) fn record(&self, verdict: &Verdict) -> Next {
        let now = Instant::now();
        let mut table = self.queues.table();
        if !verdict.allowed() {
            let Some(queue) = table.queues.get_mut(&self.key) else {
                return Next::Return;
            };
            let next = queue.deny(self.ticket, verdict, self.key.is_permit, now);
            if next == Next::Return {
                table.remove(&self.key, self.ticket, None);
            }
            return next;
        }
        let hits = match verdict.failure() {
            // Each waiter checks whether the service answers again.
            Some(_) => 0,
            None => verdict.remaining().unwrap_or(u64::MAX),
        };
        table.remove(&self.key, self.ticket, Some(hits));
        Next::Return
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.queues.table().remove(&self.key, self.ticket, None);
    }
}

/// Waits for the delay of an allowed request if it ends before the deadline, and removes it from the verdict.
///
/// A longer delay stays in the verdict, and is not waited for.
pub(crate) async fn wait_for_delay(verdict: &mut Verdict, deadline: Instant) {
    let delay = verdict.delay();
    if delay.is_zero() || delay > deadline.saturating_duration_since(Instant::now()) {
        return;
    }
    sleep(delay).await;
    for status in &mut verdict.statuses {
        status.delay = Duration::ZERO;
    }
}

#[cfg(all(test, feature = "test-util"))]
mod tests;
