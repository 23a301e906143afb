//! [`ResponseBatching`]: calls that a worker sends to several servers at the same moment have their answers delivered
//! together.
//!
//! The requests of one caller's connection are distributed over the servers, which answer one after the other. If each
//! answer were delivered on arrival, the worker would wake and write to the caller once per server. Therefore the first
//! answer waits for the others of its group, at most for [`MAX_WAIT`]. No answer waits for a late server: one that took
//! longer than `MAX_WAIT` for its last answer, or that was waited for without success. A server that hangs delays the
//! others only once.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;
use tokio::{
    sync::Notify,
    time::{Duration, Instant, timeout_at},
};

/// Maximum time between the first and the last call of a group. A group has at most one call per server, because
/// answers of one server do not wait for each other.
const GROUP_WINDOW: Duration = Duration::from_micros(50);
/// Maximum time, counted from a group's first call, for which an answer waits for others.
const MAX_WAIT: Duration = Duration::from_millis(1);

/// The most recent group of one worker's calls to all servers.
#[derive(Default)]
pub(super) struct CallGroups {
    latest: Mutex<Option<Arc<CallGroup>>>,
}

/// Calls to different servers that were sent at the same moment.
struct CallGroup {
    started: Instant,
    /// Servers that have not answered yet, each represented by its `is_late` flag.
    pending: Mutex<SmallVec<[Arc<AtomicBool>; 4]>>,
    complete: Notify,
}

/// Delays the answers of one server until the other calls of their group are answered.
pub(super) struct ResponseBatching {
    groups: Arc<CallGroups>,
    /// Whether answers of other servers do not wait for this one.
    is_late: Arc<AtomicBool>,
}

/// A call that was sent and not answered yet.
pub(super) struct SentCall {
    sent_at: Instant,
    /// `None` if the server is late: the answer does not wait, and no other answer waits for it.
    group: Option<Arc<CallGroup>>,
}

impl CallGroups {
    fn join(&self, server: &Arc<AtomicBool>, now: Instant) -> Arc<CallGroup> {
        let mut latest = self.latest.lock();
        let group = match latest.take() {
            Some(group) if now - group.started < GROUP_WINDOW && !group.is_waiting_for(server) => group,
            _ => Arc::new(CallGroup { started: now, pending: Mutex::default(), complete: Notify::new() }),
        };
        group.pending().push(Arc::clone(server));
        *latest = Some(Arc::clone(&group));
        group
    }
}

impl CallGroup {
    fn pending(&self) -> MutexGuard<'_, SmallVec<[Arc<AtomicBool>; 4]>> {
        self.pending.lock()
    }

    fn is_waiting_for(&self, server: &Arc<AtomicBool>) -> bool {
        self.pending().iter().any(|other| Arc::ptr_eq(other, server))
    }

    /// Marks the server as answered and returns whether the group is now complete.
    fn mark_answered(&self, server: &Arc<AtomicBool>) -> bool {
        let mut pending = self.pending();
        if let Some(index) = pending.iter().position(|other| Arc::ptr_eq(other, server)) {
            pending.swap_remove(index);
        }
        pending.is_empty()
    }
}

impl ResponseBatching {
    pub(super) fn new(groups: &Arc<CallGroups>) -> Self {
        Self { groups: Arc::clone(groups), is_late: Arc::default() }
    }

    /// Records that a call to the server was sent.
    pub(super) fn sent(&self) -> SentCall {
        let sent_at = Instant::now();
        let is_late = self.is_late.load(Relaxed);
        let group = if is_late { None } else { Some(self.groups.join(&self.is_late, sent_at)) };
        SentCall { sent_at, group }
    }

    /// Records that the server has answered `call`, and waits until the answer should be delivered.
    pub(super) async fn answered(&self, call: SentCall) {
        self.is_late.store(call.sent_at.elapsed() >= MAX_WAIT, Relaxed);
        let Some(group) = call.group else {
            return;
        };
        let complete = group.complete.notified();
        tokio::pin!(complete);
        complete.as_mut().enable();
        if group.mark_answered(&self.is_late) {
            group.complete.notify_waiters();
        } else if timeout_at(group.started + MAX_WAIT, complete).await.is_err() {
            for server in group.pending().drain(..) {
                server.store(true, Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    fn two_servers() -> (ResponseBatching, ResponseBatching) {
        let groups = Arc::default();
        (ResponseBatching::new(&groups), ResponseBatching::new(&groups))
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_answer_of_a_group_waits_for_the_last() {
        let (a, b) = two_servers();
        let (of_a, of_b) = (a.sent(), b.sent());
        let mut first = Box::pin(a.answered(of_a));
        assert!((&mut first).now_or_never().is_none());
        assert!(b.answered(of_b).now_or_never().is_some());
        assert!(first.now_or_never().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn calls_that_are_sent_later_form_another_group() {
        let (a, b) = two_servers();
        let of_a = a.sent();
        tokio::time::advance(GROUP_WINDOW).await;
        let of_b = b.sent();
        assert!(a.answered(of_a).now_or_never().is_some());
        assert!(b.answered(of_b).now_or_never().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn answers_of_one_server_do_not_wait_for_each_other() {
        let (a, b) = two_servers();
        let (first, second, of_b) = (a.sent(), a.sent(), b.sent());
        assert!(a.answered(first).now_or_never().is_some());
        assert!(a.answered(second).now_or_never().is_none());
        drop(of_b);
    }

    /// A server that hangs delays the others once. They wait for it again after it has answered in time.
    #[tokio::test(start_paused = true)]
    async fn a_late_server_delays_the_others_once_and_briefly() {
        let (punctual, late) = two_servers();
        let (of_punctual, of_late) = (punctual.sent(), late.sent());
        let started = Instant::now();
        punctual.answered(of_punctual).await;
        assert!((MAX_WAIT..MAX_WAIT * 3).contains(&started.elapsed()), "{:?}", started.elapsed());

        let (of_punctual, next_of_late) = (punctual.sent(), late.sent());
        assert!(punctual.answered(of_punctual).now_or_never().is_some());
        // The server has not answered in time yet.
        assert!(late.answered(of_late).now_or_never().is_some());
        assert!(late.is_late.load(Relaxed));
        assert!(late.answered(next_of_late).now_or_never().is_some());

        let (of_punctual, _of_late) = (punctual.sent(), late.sent());
        assert!(punctual.answered(of_punctual).now_or_never().is_none());
    }

    /// No answer waits for a server that takes five milliseconds per answer, even before any wait for it has failed.
    #[tokio::test(start_paused = true)]
    async fn a_slow_server_is_late_after_its_first_answer() {
        let (punctual, slow) = two_servers();
        let call = slow.sent();
        tokio::time::advance(MAX_WAIT * 5).await;
        slow.answered(call).await;
        let (of_punctual, _of_slow) = (punctual.sent(), slow.sent());
        assert!(punctual.answered(of_punctual).now_or_never().is_some());
    }
}
