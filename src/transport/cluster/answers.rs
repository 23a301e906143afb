//! [`Answers`]: answers in pages, with a bound on their memory for callers that read slowly or not at all.

use std::{
    collections::HashMap,
    future::poll_fn,
    net::IpAddr,
    pin::Pin,
    sync::{Arc, Weak},
    task::{Context, Poll, Wake, Waker},
};

use foldhash::fast::RandomState;
use futures_util::{Stream, StreamExt, stream};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Mutex as AsyncMutex;
use tonic::Status;

use super::members::network_of;
use crate::budget::{Budget, Exhausted, Reservation};

/// The pages of an answer, or the error that ends it.
pub(super) type PageStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// The pages of a part that are not read yet.
type Pages<T> = Box<dyn Iterator<Item = T> + Send>;

/// Pages that share memory.
pub(super) struct Part<T> {
    /// Memory of the part, in bytes, until the last page is read.
    pub(super) bytes: usize,
    pub(super) pages: Pages<T>,
}

/// The parts of an answer that are not made yet.
type Parts<T> = Pin<Box<dyn Stream<Item = Part<T>> + Send>>;

/// The answers in pages that are in progress.
#[derive(Clone)]
pub(super) struct Answers {
    budget: Budget,
    making: Arc<Making>,
}

/// Locks under which parts are made one after the other, because their size is known only afterwards.
#[derive(Default)]
struct Making {
    all: AsyncMutex<()>,
    /// Only one part of a network waits for `all`, so that a network cannot delay others.
    networks: Mutex<HashMap<IpAddr, Weak<AsyncMutex<()>>, RandomState>>,
}

/// One answer in pages.
struct Answer<T> {
    answers: Answers,
    network: Option<IpAddr>,
    slot: Arc<Slot<T>>,
}

/// The rest of the current part of an answer.
enum Current<T> {
    Nothing,
    Part { pages: Pages<T>, _memory: Reservation },
    Evicted,
}

/// The current part, which an eviction removes.
struct Slot<T>(Mutex<Current<T>>);

// === impl Answers ===

impl Answers {
    /// Creates the answers, which together hold at most half of the budget `members`.
    pub(super) fn new(members: &Budget) -> Self {
        Self { budget: members.share("answers to members", members.max_bytes() / 2), making: Arc::default() }
    }

    /// Returns the pages of the parts. A part is made when the pages of the previous one have been read. If its memory
    /// is not free, the oldest of all answers ends with an error.
    pub(super) fn send<T: Send + 'static>(
        &self,
        caller: Option<IpAddr>,
        parts: impl Stream<Item = Part<T>> + Send + 'static,
    ) -> PageStream<T> {
        let answer = Answer {
            answers: self.clone(),
            network: caller.map(network_of),
            slot: Arc::new(Slot(Mutex::new(Current::Nothing))),
        };
        let parts: Parts<T> = Box::pin(parts);
        Box::pin(stream::unfold(Some((answer, parts)), |state| async {
            let (answer, parts) = state?;
            match answer.next_page(parts).await {
                Ok((Some(page), parts)) => Some((Ok(page), Some((answer, parts)))),
                Ok((None, _)) => None,
                Err(exhausted) => Some((Err(Status::resource_exhausted(exhausted.to_string())), None)),
            }
        }))
    }
}

// === impl Answer ===

impl<T: Send + 'static> Answer<T> {
    /// Returns the next page, or `None` at the end, and the parts after it.
    async fn next_page(&self, mut parts: Parts<T>) -> Result<(Option<T>, Parts<T>), Exhausted> {
        loop {
            if let Some(page) = self.slot.next_page()? {
                return Ok((Some(page), parts));
            }
            // The stream is not polled while its caller has no window, and must not hold a lock then.
            let making = tokio::spawn(self.clone().make_part(parts));
            let made = making.await.unwrap_or(Err(Exhausted))?;
            match made {
                Some(rest) => parts = rest,
                None => return Ok((None, Box::pin(stream::empty()))),
            }
        }
    }

    /// Makes the next part. Returns the parts after it, or `None` if there is none.
    async fn make_part(self, mut parts: Parts<T>) -> Result<Option<Parts<T>>, Exhausted> {
        let Answers { budget, making } = &self.answers;
        let of_network = making.of(self.network);
        let _turn = of_network.lock().await;
        let _all = making.all.lock().await;
        if Arc::strong_count(&self.slot) == 1 {
            // The caller has gone.
            return Ok(None);
        }
        let Some(part) = parts.next().await else {
            return Ok(None);
        };
        let mut memory = budget.reservation();
        let bytes = part.bytes.min(budget.max_bytes());
        poll_fn(|context| memory.poll_grow(bytes, context)).await?;
        self.slot.set(part.pages, memory);
        Ok(Some(parts))
    }
}

impl<T> Clone for Answer<T> {
    fn clone(&self) -> Self {
        Self { answers: self.answers.clone(), network: self.network, slot: Arc::clone(&self.slot) }
    }
}

// === impl Making ===

impl Making {
    /// Returns the lock of a network. Without an address, the lock is new.
    fn of(&self, network: Option<IpAddr>) -> Arc<AsyncMutex<()>> {
        let Some(network) = network else {
            return Arc::default();
        };
        let mut networks = self.networks.lock();
        if let Some(lock) = networks.get(&network).and_then(Weak::upgrade) {
            return lock;
        }
        networks.retain(|_, lock| lock.strong_count() > 0);
        let lock = Arc::default();
        networks.insert(network, Arc::downgrade(&lock));
        lock
    }
}

// === impl Slot ===

impl<T> Slot<T> {
    fn current(&self) -> MutexGuard<'_, Current<T>> {
        self.0.lock()
    }

    /// Returns the next page of the part; `None` if there is none.
    fn next_page(&self) -> Result<Option<T>, Exhausted> {
        let mut current = self.current();
        let page = match &mut *current {
            Current::Nothing => return Ok(None),
            Current::Part { pages, .. } => pages.next(),
            Current::Evicted => return Err(Exhausted),
        };
        if page.is_none() {
            *current = Current::Nothing;
        }
        Ok(page)
    }
}

impl<T: Send + 'static> Slot<T> {
    /// Sets the next part, which an eviction of its memory removes.
    fn set(self: &Arc<Self>, pages: Pages<T>, memory: Reservation) {
        let mut current = self.current();
        let waker = Waker::from(Arc::new(Eviction(Arc::downgrade(self))));
        *current = match memory.poll_evicted(&Context::from_waker(&waker)) {
            Poll::Ready(_) => Current::Evicted,
            Poll::Pending => Current::Part { pages, _memory: memory },
        };
    }
}

/// Waker that frees the part of a slot when its memory is evicted. The slot owns the memory, so the reference is weak.
struct Eviction<T>(Weak<Slot<T>>);

impl<T: Send + 'static> Wake for Eviction<T> {
    fn wake(self: Arc<Self>) {
        if let Some(slot) = self.0.upgrade() {
            let part = std::mem::replace(&mut *slot.current(), Current::Evicted);
            drop(part);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::Victim;

    fn answers() -> Answers {
        Answers::new(&Budget::new("test", 200, Victim::Oldest))
    }

    /// Parts of 50 bytes with two pages each.
    fn parts(count: u32) -> impl Stream<Item = Part<u32>> + Send + 'static {
        stream::iter((0..count).map(|part| Part { bytes: 50, pages: Box::new([2 * part, 2 * part + 1].into_iter()) }))
    }

    #[tokio::test]
    async fn all_pages_are_returned_in_order_and_their_memory_is_freed() {
        let answers = answers();
        let pages: Vec<u32> = answers.send(None, parts(10)).map(Result::unwrap).collect().await;
        assert_eq!(pages, (0..20).collect::<Vec<_>>());
        assert_eq!(answers.budget.used_bytes(), 0);
    }

    #[tokio::test]
    async fn the_oldest_answer_that_is_not_read_ends_for_a_new_one() {
        let answers = answers();
        let mut unread = Vec::new();
        for number in 0..5 {
            let mut pages = answers.send(Some(IpAddr::from([10, 0, 0, number])), parts(2));
            assert_eq!(pages.next().await.unwrap().unwrap(), 0);
            unread.push(pages);
            assert!(answers.budget.used_bytes() <= 100);
        }
        for (number, pages) in unread.iter_mut().enumerate() {
            let next = pages.next().await.unwrap();
            if number < 3 {
                assert_eq!(next.unwrap_err().code(), tonic::Code::ResourceExhausted);
                assert!(pages.next().await.is_none());
            } else {
                assert_eq!(next.unwrap(), 1);
            }
        }
        drop(unread);
        assert_eq!(answers.budget.used_bytes(), 0);
    }

    #[tokio::test]
    async fn a_network_does_not_delay_others() {
        let answers = answers();
        let (one, other) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        let lock = answers.making.of(Some(one));
        let turn = lock.lock().await;
        let mut waiting = answers.send(Some(one), parts(1));
        assert!(futures_util::FutureExt::now_or_never(waiting.next()).is_none());
        assert_eq!(answers.send(Some(other), parts(1)).next().await.unwrap().unwrap(), 0);
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        assert!(futures_util::FutureExt::now_or_never(waiting.next()).is_none());
        assert_eq!(answers.making.networks.lock().len(), 2);
        // An answer that is not read delays no other one, of the same network either.
        drop(turn);
        let next = answers.send(Some(one), parts(1)).next().await;
        assert_eq!(next.unwrap().unwrap(), 0);
        assert_eq!(waiting.next().await.unwrap().unwrap(), 0);
        drop(lock);
        answers.making.of(Some(IpAddr::from([10, 0, 0, 3])));
        assert_eq!(answers.making.networks.lock().len(), 1);
    }
}
