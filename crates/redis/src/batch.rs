//! [`Batcher`]: combines the requests of one worker that are ready at the same moment into one call to a server.
//!
//! No request is delayed to fill a batch: the sending task runs after all other tasks that are ready now and sends the
//! requests they have queued. A call has a fixed cost (a command to write and to parse, a script to enter, a reply, a
//! timer), which several requests share under load. With one call per request, `make bench` showed 1.58 × the cost of
//! the no-op server for many users, and 1.32 × with shared calls.
//!
//! The task yields once before it sends a call and once before it delivers the answer. Meanwhile more requests or
//! answers of other servers can arrive, so that all answers for one caller's connection are written together. Answers
//! of calls that were sent together are delivered together ([`ResponseBatching`]).

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use parking_lot::{Mutex, MutexGuard};
use sluicegate_algorithm::Micros;
use sluicegate_metrics::WorkerId;
use sluicegate_store::{Charge, Counter, Hit, StoreError};
use smallvec::SmallVec;
use tokio::{
    sync::{Notify, oneshot},
    task::yield_now,
};

use super::{
    Deployment,
    combined_script::{self, Call, Keys, Outcome, Step},
    node::{CallError, Node, Redirect},
    response_batching::{CallGroups, ResponseBatching},
    topology::Server,
};

/// Maximum number of hits in a shared call. Redis serves nothing else while a call runs.
const MAX_BATCH_HITS: usize = 64;

/// The steps of one request's hits.
pub(super) struct RequestSteps {
    /// Time of the call.
    pub(super) at: Micros,
    /// Steps in the order of the hits.
    pub(super) steps: SmallVec<[Step; 1]>,
}

/// Sends one worker's calls to one server, several requests per call.
pub(super) struct Batcher {
    node: Arc<Node>,
    response_batching: ResponseBatching,
    deployment: Arc<Deployment>,
    pending: Mutex<Pending>,
    ready: Notify,
    /// Whether the server has rejected a call with keys of several slots.
    single_slot: AtomicBool,
}

/// Requests that have not been sent yet.
#[derive(Default)]
struct Pending {
    batches: Vec<Batch>,
    closed: bool,
}

/// A call and the requests that share it.
#[derive(Default)]
struct Batch {
    call: Call,
    /// Slot of the keys, or `None` if they may have several slots.
    slot: Option<u16>,
    waiters: Vec<Waiter>,
}

/// A request that waits for its part of the reply: the next `hits` steps.
struct Waiter {
    hits: usize,
    answer: oneshot::Sender<Result<RequestSteps, CallError>>,
}

impl Batcher {
    /// Starts a batcher that sends calls until it is closed or the current runtime ends.
    pub(super) fn start(
        server: Server,
        deployment: Arc<Deployment>,
        worker: WorkerId,
        groups: &Arc<CallGroups>,
    ) -> Arc<Self> {
        let node = Node::start(server, Arc::clone(&deployment), worker);
        let response_batching = ResponseBatching::new(groups);
        let batcher = Arc::new(Self {
            node,
            response_batching,
            deployment,
            pending: Mutex::default(),
            ready: Notify::new(),
            single_slot: AtomicBool::new(false),
        });
        tokio::spawn(Arc::clone(&batcher).send());
        batcher
    }

    pub(super) fn node(&self) -> &Node {
        &self.node
    }

    /// Stops accepting requests. Calls in flight are still answered.
    pub(super) fn close(&self) {
        self.pending().closed = true;
        self.ready.notify_one();
        self.node.close();
    }

    /// Returns whether all keys of a call must be of the same slot.
    pub(super) fn requires_single_slot(&self) -> bool {
        self.single_slot.load(Relaxed)
    }

    /// Runs the steps of `hits`, in their order, in a call that other requests may share.
    ///
    /// `slot` is the slot of the keys, or `None` if they may have several slots.
    pub(super) async fn steps(
        &self,
        hits: &[Hit<&Counter>],
        charge: Charge,
        now: Micros,
        slot: Option<u16>,
    ) -> Result<RequestSteps, CallError> {
        if !self.node.is_up() && !Box::pin(self.node.wait_for_reconnection()).await {
            return Err(StoreError::Unavailable.into());
        }
        let (sender, answer) = oneshot::channel();
        self.enqueue(hits, charge, now, slot, sender);
        // The sender is dropped unused only if the batcher is closed or its runtime has ended.
        let answer = answer.await.unwrap_or(Err(StoreError::Unavailable.into()));
        let rejected_multi_slot = match &answer {
            Ok(RequestSteps { steps, .. }) => {
                self.report_invalid_states(steps);
                steps.iter().any(|step| step.outcome == Outcome::Undeclared)
            }
            Err(error) => slot.is_none() && *error == CallError::Redirected(Redirect::Split),
        };
        if rejected_multi_slot && !self.single_slot.swap(true, Relaxed) {
            tracing::info!(
                server = %self.node.name(),
                "Redis server rejects calls with keys of several slots; sending one call per slot"
            );
        }
        answer
    }

    /// Runs the steps of `hits` in a call of their own with declared keys, which a cluster can redirect.
    ///
    /// `asking` sends the call with `ASKING`, after an ASK redirect.
    pub(super) async fn steps_unbatched(
        &self,
        hits: &[Hit<&Counter>],
        charge: Charge,
        now: Micros,
        asking: bool,
    ) -> Result<RequestSteps, CallError> {
        let mut call = Call::default();
        self.deployment.script.add(&mut call, hits, charge, now);
        let command = self.deployment.script.command(&call, Keys::Declared);
        let reply = self.node.call(&command, asking).await?;
        let Some((at, mut reply_steps)) = combined_script::parse_reply(&reply) else {
            return Err(self.node.mark_suspect());
        };
        match reply_steps.take(hits.len()) {
            Some(steps) if reply_steps.is_empty() => {
                self.report_invalid_states(&steps);
                Ok(RequestSteps { at, steps })
            }
            _ => Err(self.node.mark_suspect()),
        }
    }

    fn report_invalid_states(&self, steps: &[Step]) {
        if steps.iter().any(|step| step.is_repaired || step.outcome == Outcome::InvalidState) {
            self.node.report_invalid_state();
        }
    }

    fn enqueue(
        &self,
        hits: &[Hit<&Counter>],
        charge: Charge,
        now: Micros,
        slot: Option<u16>,
        answer: oneshot::Sender<Result<RequestSteps, CallError>>,
    ) {
        let can_join = self.deployment.script.can_join_requests();
        let mut pending = self.pending();
        if pending.closed {
            return;
        }
        let joined = pending.batches.iter().rposition(|batch| can_join && batch.has_room(slot, hits.len()));
        let index = match joined {
            Some(index) => index,
            None => {
                pending.batches.push(Batch { slot, ..Batch::default() });
                pending.batches.len() - 1
            }
        };
        let batch = &mut pending.batches[index];
        self.deployment.script.add(&mut batch.call, hits, charge, now);
        batch.waiters.push(Waiter { hits: hits.len(), answer });
        drop(pending);
        self.ready.notify_one();
    }

    async fn send(self: Arc<Self>) {
        loop {
            self.ready.notified().await;
            yield_now().await;
            let Pending { batches, closed } = self.take_pending();
            for batch in batches {
                // Only a cluster has slots; elsewhere all keys can be declared.
                let keys = match batch.slot {
                    None if self.deployment.topology.is_cluster() => Keys::AsArguments,
                    _ => Keys::Declared,
                };
                let this = Arc::clone(&self);
                let command = self.deployment.script.command(&batch.call, keys);
                let call = self.response_batching.sent();
                // A task moves its future several times, which costs more than an allocation.
                tokio::spawn(Box::pin(async move {
                    let reply = this.node.call(&command, false).await;
                    this.response_batching.answered(call).await;
                    yield_now().await;
                    batch.answer(reply, &this.node);
                }));
            }
            if closed {
                return;
            }
        }
    }

    /// Removes the queued requests, and returns them and whether the batcher is closed.
    fn take_pending(&self) -> Pending {
        let mut pending = self.pending();
        Pending { batches: std::mem::take(&mut pending.batches), closed: pending.closed }
    }

    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock()
    }
}

impl Batch {
    /// Returns whether a request with this number of hits can share the call. `slot` is the slot of its keys.
    fn has_room(&self, slot: Option<u16>, hits: usize) -> bool {
        self.slot == slot && self.call.hits() + hits <= MAX_BATCH_HITS
    }

    fn answer(self, reply: Result<redis::Value, CallError>, node: &Node) {
        let reply = match reply {
            Ok(reply) => reply,
            Err(error) => return self.fail(&error),
        };
        let Some((at, mut reply_steps)) = combined_script::parse_reply(&reply) else {
            return self.fail(&node.mark_suspect());
        };
        for waiter in self.waiters {
            let answer = match reply_steps.take(waiter.hits) {
                Some(steps) => Ok(RequestSteps { at, steps }),
                None => Err(node.mark_suspect()),
            };
            // Sending fails if the request was cancelled, but its hits are counted.
            let _ = waiter.answer.send(answer);
        }
    }

    fn fail(self, error: &CallError) {
        for waiter in self.waiters {
            let _ = waiter.answer.send(Err(error.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{Metrics, Settings, TimeSource};

    /// The task that sends calls ends, and so does the connection.
    #[tokio::test(start_paused = true)]
    async fn a_closed_batcher_leaves_its_server() {
        let metrics = Metrics::new(1);
        let deployment =
            Deployment::new("redis://127.0.0.1:1", &Settings::default(), TimeSource::Own, &metrics).unwrap();
        let server = deployment.topology.view().borrow().servers[0].clone();
        let batcher = Batcher::start(server, Arc::clone(&deployment), WorkerId(0), &Arc::default());
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!((Arc::strong_count(&batcher), metrics.health().servers().len()), (2, 1));
        batcher.close();
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!((Arc::strong_count(&batcher), metrics.health().servers().len()), (1, 0));
    }
}
