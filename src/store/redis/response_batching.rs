//! Calls that leave a worker at the same moment for several servers have their answers handed on at the same moment.
//!
//! What a caller's connection asks at once is spread over the servers, which answer one after the other. Were each
//! answer handed on as it comes, the worker would wake, and write to the caller, once for each server. So the first
//! waits for the others of its group, no longer than [`PATIENCE`], and never for a server whose last answer took longer
//! than that, or has been waited for in vain: one that hangs holds the others up once.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use smallvec::SmallVec;
use tokio::{
    sync::Notify,
    time::{Duration, Instant, timeout_at},
};

/// Calls that leave one after the other within this time are a group, one for each server: a server's answers do not wait for
/// each other.
const SAME_MOMENT: Duration = Duration::from_micros(50);
/// From a group's first call, the longest that an answer waits for others.
const MAX_WAIT: Duration = Duration::from_millis(1);

/// The calls of one worker, whatever server they are for.
#[derive(Default)]
pub(super) struct CallGroups {
    latest: Mutex<Option<Arc<CallGroup>>>,
}

struct CallGroup {
    began: Instant,
    /// The servers that have not answered, each by whether it is late.
    awaited: Mutex<SmallVec<[Arc<AtomicBool>; 4]>>,
    complete: Notify,
}

/// One server's part in the groups of a worker.
pub(super) struct ResponseBatching {
    groups: Arc<CallGroups>,
    is_late: Arc<AtomicBool>,
}

/// A call that has left.
pub(super) struct SentCall {
    at: Instant,
    /// `None`: nobody waits for its answer, and it waits for nobody's.
    group: Option<Arc<CallGroup>>,
}

impl CallGroups {
    fn join(&self, server: &Arc<AtomicBool>, now: Instant) -> Arc<CallGroup> {
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        let open = latest.take().filter(|group| now - group.began < SAME_MOMENT && !group.awaits(server));
        let new = || Arc::new(CallGroup { began: now, awaited: Mutex::default(), complete: Notify::new() });
        let group = latest.insert(open.unwrap_or_else(new));
        group.awaited().push(Arc::clone(server));
        Arc::clone(group)
    }
}

impl CallGroup {
    fn awaited(&self) -> MutexGuard<'_, SmallVec<[Arc<AtomicBool>; 4]>> {
        self.awaited.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn awaits(&self, server: &Arc<AtomicBool>) -> bool {
        self.awaited().iter().any(|other| Arc::ptr_eq(other, server))
    }

    /// Whether it was the last.
    fn has_answered(&self, server: &Arc<AtomicBool>) -> bool {
        let mut awaited = self.awaited();
        if let Some(place) = awaited.iter().position(|other| Arc::ptr_eq(other, server)) {
            awaited.swap_remove(place);
        }
        awaited.is_empty()
    }
}

impl ResponseBatching {
    pub(super) fn new(groups: &Arc<CallGroups>) -> Self {
        Self { groups: Arc::clone(groups), is_late: Arc::default() }
    }

    /// A call leaves for the server.
    pub(super) fn sent(&self) -> SentCall {
        let at = Instant::now();
        SentCall { at, group: (!self.is_late.load(Relaxed)).then(|| self.groups.join(&self.is_late, at)) }
    }

    /// The server has answered. Returns when the answer is to be handed on.
    pub(super) async fn answered(&self, call: SentCall) {
        self.is_late.store(call.at.elapsed() >= MAX_WAIT, Relaxed);
        let Some(group) = call.group else {
            return;
        };
        let complete = group.complete.notified();
        tokio::pin!(complete);
        complete.as_mut().enable();
        if group.has_answered(&self.is_late) {
            group.complete.notify_waiters();
        } else if timeout_at(group.began + MAX_WAIT, complete).await.is_err() {
            group.awaited().drain(..).for_each(|server| server.store(true, Relaxed));
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    fn two() -> (ResponseBatching, ResponseBatching) {
        let groups = Arc::default();
        (ResponseBatching::new(&groups), ResponseBatching::new(&groups))
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_answer_of_a_group_waits_for_the_last() {
        let (a, b) = two();
        let (of_a, of_b) = (a.sent(), b.sent());
        let mut first = Box::pin(a.answered(of_a));
        assert!((&mut first).now_or_never().is_none());
        assert!(b.answered(of_b).now_or_never().is_some());
        assert!(first.now_or_never().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn calls_that_leave_later_are_another_group() {
        let (a, b) = two();
        let of_a = a.sent();
        tokio::time::advance(SAME_MOMENT).await;
        let of_b = b.sent();
        assert!(a.answered(of_a).now_or_never().is_some());
        assert!(b.answered(of_b).now_or_never().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_servers_answers_do_not_wait_for_each_other() {
        let (a, b) = two();
        let (first, second, of_b) = (a.sent(), a.sent(), b.sent());
        assert!(a.answered(first).now_or_never().is_some());
        assert!(a.answered(second).now_or_never().is_none());
        drop(of_b);
    }

    /// One that hangs holds the others up once, and is waited for again when it has answered in time.
    #[tokio::test(start_paused = true)]
    async fn nobody_waits_for_long_and_for_a_late_one_not_twice() {
        let (punctual, late) = two();
        let (of_punctual, of_late) = (punctual.sent(), late.sent());
        let began = Instant::now();
        punctual.answered(of_punctual).await;
        assert!((MAX_WAIT..MAX_WAIT * 3).contains(&began.elapsed()), "{:?}", began.elapsed());

        let (of_punctual, next_of_late) = (punctual.sent(), late.sent());
        assert!(punctual.answered(of_punctual).now_or_never().is_some());
        // It has not been in time yet.
        assert!(late.answered(of_late).now_or_never().is_some());
        assert!(late.is_late.load(Relaxed));
        assert!(late.answered(next_of_late).now_or_never().is_some());

        let (of_punctual, _of_late) = (punctual.sent(), late.sent());
        assert!(punctual.answered(of_punctual).now_or_never().is_none());
    }

    /// One that takes five milliseconds for each answer is never waited for, whether somebody did in vain or not.
    #[tokio::test(start_paused = true)]
    async fn a_slow_server_is_known_by_its_answers() {
        let (punctual, slow) = two();
        let call = slow.sent();
        tokio::time::advance(MAX_WAIT * 5).await;
        slow.answered(call).await;
        let (of_punctual, _of_slow) = (punctual.sent(), slow.sent());
        assert!(punctual.answered(of_punctual).now_or_never().is_some());
    }
}
