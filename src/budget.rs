//! [`Budget`]: a bound on the memory that callers can make the process hold.
//!
//! Everything that a caller has begun and not finished (a message, a body, a response that it does not read) holds a
//! [`Reservation`]. A budget can have shares, such as one for each connection, and a reservation counts in its share
//! and in the whole. If the budget is exhausted, a reservation waits, and another one of this budget is evicted:
//!
//! - for input that honest callers finish quickly, such as messages, the oldest one. While an attacker holds unfinished
//!   messages, it is never that of an honest caller.
//! - for long-lived holders, such as streams, the oldest one of the share with the most bytes.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker},
};

use futures_util::task::AtomicWaker;
use parking_lot::{Mutex, MutexGuard};

use crate::metrics::LogThrottle;

/// A number of bytes that reservations can hold together.
#[derive(Clone)]
pub(crate) struct Budget(Arc<Inner>);

struct Inner {
    /// Purpose of the budget, in log messages.
    name: &'static str,
    max_bytes: usize,
    victim: Victim,
    whole: Option<Budget>,
    state: Mutex<State>,
    evictions: AtomicU64,
    log_eviction: LogThrottle,
}

/// The rule that selects the reservation to evict.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Victim {
    /// The reservation that began first.
    Oldest,
    /// The reservation that began first in the share with the most reserved bytes.
    OldestOfLargestShare,
}

#[derive(Default)]
struct State {
    used_bytes: usize,
    /// The reservations that can be evicted, by the order in which they began.
    holders: BTreeMap<u64, Arc<Holder>>,
    /// The tasks of the reservations that wait for bytes.
    waiting: BTreeMap<u64, Waker>,
    /// The reservation that was evicted last, until it returns its bytes.
    evicted: Option<u64>,
}

/// The part of a reservation to which its budgets refer.
struct Holder {
    is_evicted: AtomicBool,
    task: AtomicWaker,
    /// The budget of the reservation, which may be a share.
    share: Weak<Inner>,
}

/// Error returned when a reservation was evicted, or asks for more bytes than its budget has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the memory for unfinished input and unread responses is exhausted")]
pub(crate) struct Exhausted;

/// Orders reservations across budgets by their beginning.
static NEXT: AtomicU64 = AtomicU64::new(0);

// === impl Budget ===

impl Budget {
    /// Creates a budget of `max_bytes`. Log messages name it.
    pub(crate) fn new(name: &'static str, max_bytes: usize, victim: Victim) -> Self {
        Self::with_whole(name, max_bytes, victim, None)
    }

    /// Creates a share of this budget: at most `max_bytes`, which count in the share and in this budget.
    pub(crate) fn share(&self, name: &'static str, max_bytes: usize) -> Self {
        Self::with_whole(name, max_bytes, Victim::Oldest, Some(self.clone()))
    }

    fn with_whole(name: &'static str, max_bytes: usize, victim: Victim, whole: Option<Self>) -> Self {
        Self(Arc::new(Inner {
            name,
            max_bytes,
            victim,
            whole,
            state: Mutex::default(),
            evictions: AtomicU64::new(0),
            log_eviction: LogThrottle::default(),
        }))
    }

    /// Returns the maximum of bytes.
    pub(crate) fn max_bytes(&self) -> usize {
        self.0.max_bytes
    }

    /// Returns the number of bytes that are reserved.
    pub(crate) fn used_bytes(&self) -> usize {
        self.state().used_bytes
    }

    /// Returns the number of reservations that were evicted, here and in the shares.
    pub(crate) fn evictions(&self) -> u64 {
        self.0.evictions.load(Relaxed)
    }

    /// Creates a reservation without bytes.
    pub(crate) fn reservation(&self) -> Reservation {
        let order = NEXT.fetch_add(1, Relaxed);
        let share = Arc::downgrade(&self.0);
        let holder = Holder { is_evicted: AtomicBool::new(false), task: AtomicWaker::new(), share };
        Reservation { budget: self.clone(), order, bytes: 0, is_waiting: false, holder: Arc::new(holder) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock()
    }

    /// Returns this budget, then the budget of which it is a share, and so on.
    fn chain(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |budget| budget.0.whole.as_ref())
    }

    /// Takes bytes of this budget for the reservation `order`, and returns whether it had enough. If it had not, evicts
    /// another reservation, and wakes `waker` when bytes are returned.
    fn take(&self, bytes: usize, order: u64, holder: &Arc<Holder>, waker: &Waker) -> bool {
        let mut state = self.state();
        if state.used_bytes + bytes <= self.0.max_bytes {
            state.used_bytes += bytes;
            state.holders.entry(order).or_insert_with(|| Arc::clone(holder));
            state.waiting.remove(&order);
            state.wake_next();
            return true;
        }
        state.waiting.insert(order, waker.clone());
        if state.evicted.is_some() {
            return false;
        }
        let mut others: Vec<_> = Vec::new();
        for (other, holder) in &state.holders {
            if *other == order {
                continue;
            }
            others.push((*other, Arc::clone(holder)));
            if self.0.victim == Victim::Oldest {
                break;
            }
        }
        drop(state);
        // The first one of several with the same share is the oldest.
        let victim = others.iter().rev().max_by_key(|(_, holder)| holder.share_bytes());
        if let Some((order, victim)) = victim {
            self.evict(*order, victim);
        }
        false
    }

    fn evict(&self, order: u64, victim: &Holder) {
        let mut state = self.state();
        if !state.holders.contains_key(&order) {
            // It has returned its bytes in the meantime, and woken the waiting task.
            return;
        }
        state.evicted = Some(order);
        drop(state);
        if !victim.is_evicted.swap(true, Relaxed) {
            self.record_eviction();
            victim.task.wake();
        }
    }

    fn record_eviction(&self) {
        for budget in self.chain() {
            budget.0.evictions.fetch_add(1, Relaxed);
        }
        if self.0.log_eviction.should_log() {
            tracing::warn!(
                budget = self.0.name,
                max_bytes = self.0.max_bytes,
                "the memory for unfinished input and unread responses is exhausted; dropping the oldest, which \
                 sluicegate_input_evictions_total counts"
            );
        }
    }

    /// Returns bytes to this budget, and wakes the oldest reservation that waits. `finished` is a reservation without
    /// remaining bytes.
    fn give_back(&self, bytes: usize, finished: Option<u64>) {
        let mut state = self.state();
        state.used_bytes -= bytes;
        if let Some(order) = finished {
            state.holders.remove(&order);
            if state.evicted == Some(order) {
                state.evicted = None;
            }
        }
        state.wake_next();
    }

    /// Removes a reservation from those that can be evicted. If it is to be evicted, another one takes its place.
    fn keep(&self, order: u64) {
        let mut state = self.state();
        state.holders.remove(&order);
        if state.evicted == Some(order) {
            state.evicted = None;
            state.wake_next();
        }
    }

    /// Removes a dropped reservation from those that wait for bytes. If it was woken already, wakes the next one.
    fn stop_waiting(&self, order: u64) {
        let mut state = self.state();
        if state.waiting.remove(&order).is_none() {
            // It was woken, perhaps for bytes that the next one can have.
            state.wake_next();
        }
    }
}

// === impl State ===

impl State {
    /// Wakes the oldest reservation that waits. If it needs fewer bytes than there are, it wakes the next one.
    fn wake_next(&mut self) {
        if let Some((_, waker)) = self.waiting.pop_first() {
            waker.wake();
        }
    }
}

// === impl Holder ===

impl Holder {
    fn share_bytes(&self) -> usize {
        self.share.upgrade().map_or(0, |share| Budget(share).used_bytes())
    }
}

// === impl Reservation ===

/// Bytes of a budget that are returned when the reservation is dropped.
pub(crate) struct Reservation {
    budget: Budget,
    order: u64,
    bytes: usize,
    is_waiting: bool,
    holder: Arc<Holder>,
}

impl Reservation {
    /// Returns the number of reserved bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Completes when the reservation is evicted. The caller must then free the reserved memory.
    pub(crate) fn poll_evicted(&self, context: &Context<'_>) -> Poll<Exhausted> {
        self.holder.task.register(context.waker());
        if self.holder.is_evicted.load(Relaxed) { Poll::Ready(Exhausted) } else { Poll::Pending }
    }

    /// Reserves further bytes, and waits until they are available.
    ///
    /// # Errors
    ///
    /// Returns an error if the reservation was evicted, or if it would be larger than its budget.
    pub(crate) fn poll_grow(&mut self, bytes: usize, context: &Context<'_>) -> Poll<Result<(), Exhausted>> {
        if let Poll::Ready(error) = self.poll_evicted(context) {
            return Poll::Ready(Err(error));
        }
        if self.budget.chain().any(|budget| self.bytes + bytes > budget.0.max_bytes) {
            return Poll::Ready(Err(Exhausted));
        }
        self.is_waiting = !self.take(bytes, context.waker());
        if self.is_waiting { Poll::Pending } else { Poll::Ready(Ok(())) }
    }

    /// Protects the reservation from eviction until it grows again, because the caller has sent everything and is to be
    /// answered.
    pub(crate) fn keep(&mut self) {
        for budget in self.budget.chain() {
            budget.keep(self.order);
        }
    }

    fn take(&mut self, bytes: usize, waker: &Waker) -> bool {
        for (taken, budget) in self.budget.chain().enumerate() {
            if budget.take(bytes, self.order, &self.holder, waker) {
                continue;
            }
            let finished = (self.bytes == 0).then_some(self.order);
            for former in self.budget.chain().take(taken) {
                former.give_back(bytes, finished);
            }
            return false;
        }
        self.bytes += bytes;
        true
    }

    /// Returns all bytes to the budget.
    pub(crate) fn clear(&mut self) {
        if self.bytes == 0 {
            return;
        }
        for budget in self.budget.chain() {
            budget.give_back(self.bytes, Some(self.order));
        }
        self.bytes = 0;
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.clear();
        if self.is_waiting {
            for budget in self.budget.chain() {
                budget.stop_waiting(self.order);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Context;

    use super::*;

    fn poll_grow(reservation: &mut Reservation, bytes: usize) -> Poll<Result<(), Exhausted>> {
        reservation.poll_grow(bytes, &Context::from_waker(Waker::noop()))
    }

    fn is_evicted(reservation: &Reservation) -> bool {
        reservation.poll_evicted(&Context::from_waker(Waker::noop())).is_ready()
    }

    const GRANTED: Poll<Result<(), Exhausted>> = Poll::Ready(Ok(()));
    const REFUSED: Poll<Result<(), Exhausted>> = Poll::Ready(Err(Exhausted));

    #[test]
    fn dropped_reservations_return_their_bytes() {
        let budget = Budget::new("test", 10, Victim::Oldest);
        let mut one = budget.reservation();
        assert_eq!(poll_grow(&mut one, 4), GRANTED);
        assert_eq!(poll_grow(&mut one, 6), GRANTED);
        assert_eq!((budget.used_bytes(), one.bytes()), (10, 10));
        assert_eq!(poll_grow(&mut one, 1), REFUSED, "more than the whole budget");
        drop(one);
        assert_eq!((budget.used_bytes(), budget.evictions()), (0, 0));
        assert!(budget.state().holders.is_empty());
    }

    #[test]
    fn the_oldest_reservation_is_evicted_and_the_newer_ones_stay() {
        let budget = Budget::new("test", 10, Victim::Oldest);
        let [mut oldest, mut middle, mut newest] = [(); 3].map(|()| budget.reservation());
        // The order of the first bytes does not matter.
        assert_eq!(poll_grow(&mut middle, 5), GRANTED);
        assert_eq!(poll_grow(&mut oldest, 5), GRANTED);
        assert_eq!(poll_grow(&mut newest, 3), Poll::Pending);
        assert_eq!(poll_grow(&mut newest, 3), Poll::Pending);
        assert_eq!([&oldest, &middle, &newest].map(is_evicted), [true, false, false]);
        assert_eq!(budget.evictions(), 1, "an eviction is counted once");
        assert_eq!(poll_grow(&mut oldest, 1), REFUSED);
        drop(oldest);
        assert_eq!(poll_grow(&mut newest, 3), GRANTED);
        assert_eq!(budget.used_bytes(), 8);
    }

    #[test]
    fn a_reservation_never_evicts_itself() {
        let budget = Budget::new("test", 10, Victim::Oldest);
        let [mut old, mut new] = [(); 2].map(|()| budget.reservation());
        assert_eq!(poll_grow(&mut old, 5), GRANTED);
        assert_eq!(poll_grow(&mut new, 5), GRANTED);
        assert_eq!(poll_grow(&mut old, 1), Poll::Pending);
        assert_eq!([&old, &new].map(is_evicted), [false, true]);
    }

    #[test]
    fn a_kept_reservation_is_not_evicted() {
        let whole = Budget::new("whole", 10, Victim::Oldest);
        let budget = whole.share("share", 10);
        let [mut kept, mut old, mut new] = [(); 3].map(|()| budget.reservation());
        assert_eq!(poll_grow(&mut kept, 5), GRANTED);
        assert_eq!(poll_grow(&mut old, 5), GRANTED);
        kept.keep();
        assert_eq!(poll_grow(&mut new, 5), Poll::Pending);
        assert_eq!([&kept, &old].map(is_evicted), [false, true]);
        drop(old);
        assert_eq!(poll_grow(&mut new, 5), GRANTED);
        drop((kept, new));
        assert_eq!((whole.used_bytes(), budget.used_bytes()), (0, 0));
    }

    #[test]
    fn a_share_is_exhausted_alone_and_counts_in_the_whole() {
        let whole = Budget::new("whole", 10, Victim::Oldest);
        let [one, other] = [(); 2].map(|()| whole.share("share", 6));
        let [mut first, mut second, mut third] = [one.reservation(), one.reservation(), other.reservation()];
        assert_eq!(poll_grow(&mut first, 7), REFUSED, "more than its share");
        assert_eq!(poll_grow(&mut first, 4), GRANTED);
        assert_eq!(poll_grow(&mut second, 4), Poll::Pending);
        assert!(is_evicted(&first));
        assert_eq!(poll_grow(&mut third, 6), GRANTED);
        drop(first);
        assert_eq!(poll_grow(&mut second, 4), GRANTED);
        assert_eq!((whole.used_bytes(), one.used_bytes(), other.used_bytes()), (10, 4, 6));
        assert_eq!((whole.evictions(), one.evictions(), other.evictions()), (1, 1, 0));
    }

    #[test]
    fn of_streams_the_oldest_one_of_the_largest_share_is_evicted() {
        let whole = Budget::new("whole", 10, Victim::OldestOfLargestShare);
        let [honest, attacker, newcomer] = [(); 3].map(|()| whole.share("share", 10));
        let mut held = [&honest, &attacker, &attacker, &attacker].map(Budget::reservation);
        for reservation in &mut held {
            assert_eq!(poll_grow(reservation, 2), GRANTED);
        }
        let mut new = newcomer.reservation();
        assert_eq!(poll_grow(&mut new, 3), Poll::Pending);
        assert_eq!(held.each_ref().map(is_evicted), [false, true, false, false]);
        // The victim is chosen once, however often the newcomer asks before it is gone.
        assert_eq!(poll_grow(&mut new, 3), Poll::Pending);
        assert_eq!(whole.evictions(), 1);
        let [_honest, victim, ..] = held;
        drop(victim);
        assert_eq!(poll_grow(&mut new, 3), GRANTED);
    }

    #[test]
    fn a_share_returns_its_bytes_if_the_whole_has_none() {
        let whole = Budget::new("whole", 10, Victim::Oldest);
        let share = whole.share("share", 6);
        let [mut old, mut new] = [whole.reservation(), share.reservation()];
        assert_eq!(poll_grow(&mut old, 8), GRANTED);
        assert_eq!(poll_grow(&mut new, 4), Poll::Pending);
        assert_eq!((share.used_bytes(), share.state().holders.len()), (0, 0));
        assert!(is_evicted(&old));
    }

    #[test]
    fn a_reservation_that_is_dropped_while_it_waits_leaves_nothing_behind() {
        let budget = Budget::new("test", 10, Victim::Oldest);
        let [mut old, mut new] = [(); 2].map(|()| budget.reservation());
        assert_eq!(poll_grow(&mut old, 10), GRANTED);
        assert_eq!(poll_grow(&mut new, 1), Poll::Pending);
        drop(new);
        assert!(budget.state().waiting.is_empty());
    }

    /// One reservation returns bytes for several, and each wakes the next one.
    #[tokio::test]
    async fn all_that_have_room_are_woken() {
        let budget = Budget::new("test", 10, Victim::Oldest);
        let mut old = budget.reservation();
        assert_eq!(poll_grow(&mut old, 10), GRANTED);
        let waiting: Vec<_> = (0..5)
            .map(|_| {
                let mut new = budget.reservation();
                assert_eq!(poll_grow(&mut new, 2), Poll::Pending);
                tokio::spawn(async move {
                    let granted = std::future::poll_fn(|context| new.poll_grow(2, context)).await;
                    (granted, new)
                })
            })
            .collect();
        tokio::task::yield_now().await;
        drop(old);
        for task in waiting {
            assert_eq!(task.await.unwrap().0, Ok(()));
        }
    }

    #[tokio::test]
    async fn tasks_wake_when_they_are_evicted_or_bytes_are_returned() {
        let budget = Budget::new("test", 10, Victim::Oldest);
        let mut old = budget.reservation();
        assert_eq!(poll_grow(&mut old, 10), GRANTED);
        let evicted = tokio::spawn(std::future::poll_fn(move |context| old.poll_evicted(context)));
        let mut new = budget.reservation();
        let grown = tokio::spawn(std::future::poll_fn(move |context| new.poll_grow(10, context)));
        assert_eq!(evicted.await.unwrap(), Exhausted);
        assert_eq!(grown.await.unwrap(), Ok(()));
    }
}
