//! [`Http2`]: the calls of one HTTP/2 connection, on the crate `h2`.
//!
//! A call that can be decided when it arrives, as nearly all calls can with the memory store, needs neither a task nor an
//! allocation of its own. All other calls wait in one set. The responses to all calls that arrived together are sent
//! after the last of them was decided, so that they leave in one write.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use futures_util::{StreamExt, stream::FuturesUnordered};
use h2::server::{Connection, SendResponse};
use smallvec::SmallVec;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::watch,
    time::{Instant, Sleep, sleep},
};

use super::{
    Answer, Methods, backpressure,
    input::{CALL_BYTES, Hold, Input, STALL_TIMEOUT, TONIC_CALL_BYTES},
    methods::ResponseFuture,
    request_body::RequestBody,
    response::{Response, ResponseSender, Sent},
};
use crate::{
    budget::Exhausted,
    transport::errors::{CallerErrors, RequestError},
};

/// Maximum number of calls that are accepted before their responses are sent and other connections have their turn.
const MAX_BATCH: usize = 32;

/// Maximum number of calls to tonic of a connection that wait for memory. Further ones are rejected.
const MAX_NOT_BEGUN: usize = 2 * MAX_BATCH;
/// Memory for each compressed byte of headers, in bytes: a byte can stand for a header.
const HEAD_BYTES_PER_BYTE: usize = 170;
/// Memory of the largest headers of a call, in bytes: those with the shortest names and values.
const MAX_HEAD_BYTES: usize = 400 * 1024;

/// The calls of a batch that are answered, with the streams for their responses.
type ReadyCalls = SmallVec<[(SendResponse<Bytes>, Response); MAX_BATCH]>;

/// State that is shared by the calls of a connection.
pub(super) struct ConnectionScope {
    pub(super) errors: Arc<CallerErrors>,
    pub(super) input: Arc<Input>,
    pub(super) send_timeout: Duration,
    /// Number of calls to tonic that wait for memory.
    pub(super) not_begun: AtomicUsize,
}

/// A connection and its calls.
pub(super) struct Http2<S, M> {
    connection: Connection<S, Bytes>,
    methods: Arc<M>,
    scope: Arc<ConnectionScope>,
    stream: Arc<backpressure::State>,
    /// The reservation for responses to calls that were answered since the caller stopped reading; `None` while it reads.
    unsent: Option<Box<Hold>>,
    /// The headers that are not complete.
    unfinished_head: Option<Box<UnfinishedHead>>,
    /// Becomes true when the connection is to be closed. Streams, which would keep it open, then end.
    leaving: watch::Sender<bool>,
    /// The calls that cannot be answered yet.
    waiting: FuturesUnordered<WaitingCall>,
    last_call: Instant,
}

impl<S: AsyncRead + AsyncWrite + Unpin, M: Methods> Http2<S, M> {
    pub(super) fn new(
        connection: Connection<S, Bytes>,
        methods: Arc<M>,
        scope: ConnectionScope,
        stream: Arc<backpressure::State>,
    ) -> Self {
        let (leaving, _) = watch::channel(false);
        Self {
            connection,
            methods,
            scope: Arc::new(scope),
            stream,
            unsent: None,
            unfinished_head: None,
            leaving,
            waiting: FuturesUnordered::new(),
            last_call: Instant::now(),
        }
    }

    /// Returns the time at which the last call arrived.
    pub(super) const fn last_call(&self) -> Instant {
        self.last_call
    }

    /// Returns whether calls are in progress.
    pub(super) fn has_calls(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Returns whether the connection is to be closed.
    pub(super) fn is_leaving(&self) -> bool {
        *self.leaving.borrow()
    }

    /// Accepts no more calls, and closes the connection after those that were accepted.
    pub(super) fn leave(&mut self) {
        self.leaving.send_replace(true);
        self.connection.graceful_shutdown();
    }

    /// Closes the connection immediately.
    pub(super) fn abort(&mut self, context: &mut Context<'_>) {
        self.connection.abrupt_shutdown(h2::Reason::NO_ERROR);
        // Sends bytes while the socket accepts them.
        let _ = self.connection.poll_closed(context);
    }

    /// Reads, decides and answers calls. Completes when the connection is closed.
    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), h2::Error>> {
        // Accepting calls also sends the responses that are queued by now.
        let mut answered = self.poll_waiting(context);
        let waiting = self.waiting.len();
        let mut ready = SmallVec::new();
        let accepted = self.accept(&mut ready, context);
        if !ready.is_empty() || self.waiting.len() > waiting {
            self.last_call = Instant::now();
        }
        answered += ready.len();
        for (mut respond, response) in ready {
            response.record(&self.scope.errors);
            let memory = response.stream_bytes().map(|bytes| Box::new(self.scope.input.stream(bytes)));
            if let Some(sender) = response.send(&mut respond) {
                let state = CallState::Sending(sender);
                let scope = Arc::clone(&self.scope);
                self.waiting.push(WaitingCall { state, scope, memory, not_begun: None });
            }
        }
        if self.waiting.len() > waiting {
            answered += self.poll_waiting(context);
        }
        if self.poll_unsent(answered, context).is_ready() {
            tracing::debug!("a caller does not read, and others need the memory of its responses; closing connection");
            self.scope.errors.record_unread();
            self.abort(context);
            return Poll::Ready(Ok(()));
        }
        if let Poll::Ready(error) = self.poll_unfinished_head(context) {
            self.scope.errors.record(&error);
            self.abort(context);
            return Poll::Ready(Ok(()));
        }
        // The connection wakes this task when a response is queued.
        accepted
    }

    /// Reserves the memory of responses that the caller does not read. Completes if others need it.
    fn poll_unsent(&mut self, answered: usize, context: &Context<'_>) -> Poll<()> {
        if !self.stream.is_blocked() {
            self.unsent = None;
            return Poll::Pending;
        }
        let unsent = self.unsent.get_or_insert_with(|| Box::new(self.scope.input.call(CALL_BYTES)));
        unsent.add(answered * CALL_BYTES);
        unsent.poll_end(context).map(drop)
    }

    /// Reserves the memory of headers that are not complete. Completes if others need it, or if the rest does not arrive.
    fn poll_unfinished_head(&mut self, context: &mut Context<'_>) -> Poll<RequestError> {
        let compressed = self.stream.unfinished_head_bytes();
        if compressed == 0 {
            self.unfinished_head = None;
            return Poll::Pending;
        }
        let input = &self.scope.input;
        let head = self.unfinished_head.get_or_insert_with(|| Box::new(UnfinishedHead::new(input)));
        head.memory.set(MAX_HEAD_BYTES.min(compressed * HEAD_BYTES_PER_BYTE));
        if let Poll::Ready(error) = head.memory.poll_end(context) {
            return Poll::Ready(RequestError::from(error));
        }
        ready!(head.end.as_mut().poll(context));
        let seconds = STALL_TIMEOUT.as_secs();
        Poll::Ready(RequestError::stalled(format!("the headers of a call were not complete after {seconds} s")))
    }

    /// Accepts the calls that have arrived, and decides those that need not wait. Sends queued responses.
    fn accept(&mut self, ready: &mut ReadyCalls, context: &mut Context<'_>) -> Poll<Result<(), h2::Error>> {
        for _ in 0..MAX_BATCH {
            let Poll::Ready(accepted) = self.connection.poll_accept(context) else {
                self.stream.read_on(context);
                return Poll::Pending;
            };
            let Some(accepted) = accepted else {
                return Poll::Ready(Ok(()));
            };
            let (request, respond) = accepted?;
            match self.methods.call(request.map(RequestBody::new), context, &self.leaving, &self.scope.input) {
                Answer::Now(response) => ready.push((respond, response)),
                Answer::Later(future) => {
                    let state = CallState::Deciding { respond, future };
                    let scope = Arc::clone(&self.scope);
                    self.waiting.push(WaitingCall { state, scope, memory: None, not_begun: None });
                }
                Answer::ByTonic(_) if self.scope.not_begun.load(Relaxed) >= MAX_NOT_BEGUN => {
                    ready.push((respond, Response::Error(RequestError::from(Exhausted))));
                }
                Answer::ByTonic(future) => {
                    let state = CallState::Deciding { respond, future };
                    let memory = Some(Box::new(self.scope.input.call(TONIC_CALL_BYTES)));
                    let scope = Arc::clone(&self.scope);
                    let not_begun = Some(NotBegun::new(&self.scope));
                    self.waiting.push(WaitingCall { state, scope, memory, not_begun });
                }
            }
        }
        context.waker().wake_by_ref();
        Poll::Pending
    }

    /// Polls the calls that wait, and removes those that have ended. Returns their number.
    fn poll_waiting(&mut self, context: &mut Context<'_>) -> usize {
        let mut ended = 0;
        while let Poll::Ready(Some(sent)) = self.waiting.poll_next_unpin(context) {
            ended += 1;
            if sent == Sent::Dropped {
                self.scope.errors.record_unread();
            }
        }
        ended
    }
}

/// Headers of a request that have arrived only in part: their memory, and the time until which the rest must arrive.
struct UnfinishedHead {
    memory: Hold,
    end: Pin<Box<Sleep>>,
}

impl UnfinishedHead {
    fn new(input: &Input) -> Self {
        Self { memory: input.call(0), end: Box::pin(sleep(STALL_TIMEOUT)) }
    }
}

/// A call that waits: for the rest of its request, for its decision, or for the caller to read its response.
struct WaitingCall {
    state: CallState,
    scope: Arc<ConnectionScope>,
    /// The memory of a call to tonic, or of a stream.
    memory: Option<Box<Hold>>,
    /// Present while a call to tonic waits for memory.
    not_begun: Option<NotBegun>,
}

/// Guard that counts a call to tonic among those that wait for memory, until the guard is dropped.
struct NotBegun(Arc<ConnectionScope>);

impl NotBegun {
    fn new(scope: &Arc<ConnectionScope>) -> Self {
        scope.not_begun.fetch_add(1, Relaxed);
        Self(Arc::clone(scope))
    }
}

impl Drop for NotBegun {
    fn drop(&mut self) {
        self.0.not_begun.fetch_sub(1, Relaxed);
    }
}

enum CallState {
    Deciding { respond: SendResponse<Bytes>, future: ResponseFuture },
    Sending(ResponseSender),
}

impl Future for WaitingCall {
    type Output = Sent;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Sent> {
        let call = self.get_mut();
        loop {
            match &mut call.state {
                CallState::Deciding { respond, future } => {
                    if call.not_begun.is_some() {
                        if !has_begun(&mut call.memory, context) {
                            return respond.poll_reset(context).map(|_| Sent::Done);
                        }
                        call.not_begun = None;
                    }
                    let Poll::Ready(response) = future.as_mut().poll(context) else {
                        if is_evicted(&mut call.memory, context) {
                            respond.send_reset(h2::Reason::ENHANCE_YOUR_CALM);
                            return Poll::Ready(Sent::Dropped);
                        }
                        // A call that the caller cancels is not decided, if it is not too late.
                        return respond.poll_reset(context).map(|_| Sent::Done);
                    };
                    response.record(&call.scope.errors);
                    call.memory = response.stream_bytes().map(|bytes| Box::new(call.scope.input.stream(bytes)));
                    let Some(sender) = response.send(respond) else {
                        return Poll::Ready(Sent::Done);
                    };
                    call.state = CallState::Sending(sender);
                }
                CallState::Sending(sender) => {
                    if let Poll::Ready(sent) = sender.poll(context, call.scope.send_timeout, &call.scope.input) {
                        return Poll::Ready(sent);
                    }
                    if is_evicted(&mut call.memory, context) {
                        return Poll::Ready(sender.drop_call());
                    }
                    return Poll::Pending;
                }
            }
        }
    }
}

/// Returns whether the memory of a call, if it needs any, is reserved. Also true if the call is to be dropped.
fn has_begun(memory: &mut Option<Box<Hold>>, context: &Context<'_>) -> bool {
    memory.as_mut().is_none_or(|memory| memory.poll_begin(context).is_ready())
}

/// Reserves the memory of a call that waits, if it has any. Returns whether others need it.
fn is_evicted(memory: &mut Option<Box<Hold>>, context: &Context<'_>) -> bool {
    memory.as_mut().is_some_and(|memory| memory.poll_end(context).is_ready())
}
