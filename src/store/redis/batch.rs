//! Requests of one worker that are ready at the same moment go to a server as one call.
//!
//! Nothing waits for company: the task that sends runs after every other task that is ready now, and takes what they
//! left. A call has a fixed price (a command to write and to parse, a script to enter, a reply, a timer), and under load
//! several requests share it: with a call for each, `make bench` showed 1.58 × the no-op server for many users, and
//! 1.32 × with shared ones.
//!
//! Before a call is sent, and before its answer is handed on, the runtime looks once whether anything else has arrived: more
//! requests for this call, or the answers of other servers, so that what is ready for one caller's connection leaves in
//! one piece. Answers of calls that left together are handed on together ([`Gather`]).

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use smallvec::SmallVec;
use tokio::{
    sync::{Notify, oneshot},
    task::yield_now,
};

use super::{
    Shared,
    node::{CallError, Node, Redirect},
    program::{self, Call, Keys, Outcome, Step},
    response_batching::{CallGroups, ResponseBatching},
    topology::Server,
};
use crate::{
    algorithm::Micros,
    metrics::WorkerId,
    store::{Charge, Hit, StoreError},
};

/// A call that has so many hits takes no further request: Redis does nothing else while it runs.
const FULL: usize = 64;

/// The steps of the hits of one request, and the time they were made at.
pub(super) type Steps = (Micros, SmallVec<[Step; 1]>);

/// One worker's calls to one server.
pub(super) struct Batcher {
    node: Arc<Node>,
    gather: ResponseBatching,
    shared: Arc<Shared>,
    next: Mutex<Next>,
    ready: Notify,
    /// The server refused a call with keys of several slots.
    by_slot: AtomicBool,
}

#[derive(Default)]
struct Next {
    batches: Vec<Batch>,
    closed: bool,
}

/// A call, and who waits for which part of its answer.
#[derive(Default)]
struct Batch {
    call: Call,
    /// All keys are of this slot.
    slot: Option<u16>,
    waiting: Vec<Waiting>,
}

struct Waiting {
    hits: usize,
    answer: oneshot::Sender<Result<Steps, CallError>>,
}

impl Batcher {
    /// Sends until it is closed, or the current runtime ends.
    pub(super) fn start(server: Server, shared: Arc<Shared>, worker: WorkerId, groups: &Arc<CallGroups>) -> Arc<Self> {
        let node = Node::start(server, Arc::clone(&shared), worker);
        let gather = ResponseBatching::new(groups);
        let (next, ready, by_slot) = (Mutex::default(), Notify::new(), AtomicBool::new(false));
        let batcher = Arc::new(Self { node, gather, shared, next, ready, by_slot });
        tokio::spawn(Arc::clone(&batcher).send());
        batcher
    }

    pub(super) fn node(&self) -> &Node {
        &self.node
    }

    /// Takes no more; what is under way is still answered.
    pub(super) fn close(&self) {
        self.next().closed = true;
        self.ready.notify_one();
        self.node.close();
    }

    /// Whether a call has to keep to one slot.
    pub(super) fn keeps_to_slots(&self) -> bool {
        self.by_slot.load(Relaxed)
    }

    /// The steps of these hits, in their order, in a call that others may share. `slot`: all keys are of this one.
    pub(super) async fn steps(
        &self,
        hits: &[Hit<'_>],
        charge: Charge,
        now: Micros,
        slot: Option<u16>,
    ) -> Result<Steps, CallError> {
        if !self.node.is_up() {
            return Err(StoreError::Unavailable.into());
        }
        let (answer, steps) = oneshot::channel();
        self.enqueue(hits, charge, now, slot, answer);
        // The sender is only dropped unused when nobody sends any more.
        let steps = steps.await.unwrap_or(Err(StoreError::Unavailable.into()));
        let refused_together = match &steps {
            Ok((_, steps)) => {
                self.note_spoiled(steps);
                steps.iter().any(|step| step.outcome == Outcome::Undeclared)
            }
            Err(error) => slot.is_none() && *error == CallError::Elsewhere(Redirect::Apart),
        };
        if refused_together && !self.by_slot.swap(true, Relaxed) {
            tracing::info!(server = %self.node.name(), "this server takes no keys of several slots in one call; calls keep to one");
        }
        steps
    }

    /// The same in a call of their own, with declared keys, which a cluster redirects.
    pub(super) async fn alone(
        &self,
        hits: &[Hit<'_>],
        charge: Charge,
        now: Micros,
        asking: bool,
    ) -> Result<Steps, CallError> {
        let mut call = Call::default();
        self.shared.program.add(&mut call, hits, charge, now);
        let command = self.shared.program.command(&call, Keys::Declared);
        let reply = self.node.call(&command, asking).await?;
        let (now, mut steps) = program::read(&reply).ok_or_else(|| self.node.mark_suspect())?;
        let own = steps.take(hits.len()).filter(|_| steps.is_empty()).ok_or_else(|| self.node.mark_suspect())?;
        self.note_spoiled(&own);
        Ok((now, own))
    }

    fn note_spoiled(&self, steps: &[Step]) {
        if steps.iter().any(|step| step.outcome == Outcome::Spoiled) {
            self.node.spoiled();
        }
    }

    fn enqueue(
        &self,
        hits: &[Hit<'_>],
        charge: Charge,
        now: Micros,
        slot: Option<u16>,
        answer: oneshot::Sender<Result<Steps, CallError>>,
    ) {
        let joins = self.shared.program.joins_requests();
        let mut next = self.next();
        if next.closed {
            return;
        }
        let has_room = |batch: &Batch| joins && batch.slot == slot && batch.call.hits() + hits.len() <= FULL;
        let place = next.batches.iter().rposition(has_room).unwrap_or_else(|| {
            next.batches.push(Batch { slot, ..Batch::default() });
            next.batches.len() - 1
        });
        let batch = &mut next.batches[place];
        self.shared.program.add(&mut batch.call, hits, charge, now);
        batch.waiting.push(Waiting { hits: hits.len(), answer });
        drop(next);
        self.ready.notify_one();
    }

    async fn send(self: Arc<Self>) {
        loop {
            self.ready.notified().await;
            yield_now().await;
            let (batches, closed) = {
                let mut next = self.next();
                (std::mem::take(&mut next.batches), next.closed)
            };
            for batch in batches {
                // Elsewhere than in a cluster keys have no slots.
                let keys = match batch.slot {
                    None if self.shared.topology.is_cluster() => Keys::AsArguments,
                    _ => Keys::Declared,
                };
                let (this, command) = (Arc::clone(&self), self.shared.program.command(&batch.call, keys));
                let call = self.gather.sent();
                tokio::spawn(async move {
                    let reply = this.node.call(&command, false).await;
                    this.gather.answered(call).await;
                    yield_now().await;
                    batch.answer(reply, &this.node);
                });
            }
            if closed {
                return;
            }
        }
    }

    fn next(&self) -> MutexGuard<'_, Next> {
        self.next.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Batch {
    fn answer(self, reply: Result<redis::Value, CallError>, node: &Node) {
        let reply = match reply {
            Ok(reply) => reply,
            Err(error) => return self.fail(&error),
        };
        let Some((now, mut steps)) = program::read(&reply) else {
            return self.fail(&node.mark_suspect());
        };
        for waiting in self.waiting {
            let own = steps.take(waiting.hits).ok_or(StoreError::Rejected.into());
            // Who does not wait any more has gone away; its hits are counted.
            let _ = waiting.answer.send(own.map(|own| (now, own)));
        }
    }

    fn fail(self, error: &CallError) {
        for waiting in self.waiting {
            let _ = waiting.answer.send(Err(error.clone()));
        }
    }
}
