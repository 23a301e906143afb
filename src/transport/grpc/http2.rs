//! [`Http2`]: the calls of one HTTP/2 connection, on the crate `h2`.
//!
//! A call that can be decided when it arrives, as nearly all calls can with the memory store, needs neither a task nor an
//! allocation of its own. All other calls wait in one set. The responses to all calls that arrived together are sent
//! after the last of them was decided, so that they leave in one write.

use std::{
    pin::Pin,
    sync::Arc,
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
    time::Instant,
};

use super::{
    Handler,
    caller_errors::CallerErrors,
    request_body::RequestBody,
    response::{Response, ResponseSender, Sent},
    service::{Decided, ResponseFuture},
};

/// Maximum number of calls that are accepted before their responses are sent and other connections have their turn.
const MAX_BATCH: usize = 32;

/// The calls of a batch that are answered, with the streams for their responses.
type ReadyCalls = SmallVec<[(SendResponse<Bytes>, Response); MAX_BATCH]>;

/// A connection and its calls.
pub(super) struct Http2<S> {
    connection: Connection<S, Bytes>,
    handler: Arc<Handler>,
    errors: Arc<CallerErrors>,
    send_timeout: Duration,
    /// Becomes true when the connection is to be closed. Streams, which would keep it open, then end.
    leaving: watch::Sender<bool>,
    /// The calls that cannot be answered yet.
    waiting: FuturesUnordered<WaitingCall>,
    last_call: Instant,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Http2<S> {
    pub(super) fn new(
        connection: Connection<S, Bytes>,
        handler: Arc<Handler>,
        errors: Arc<CallerErrors>,
        send_timeout: Duration,
    ) -> Self {
        let (leaving, _) = watch::channel(false);
        let (waiting, last_call) = (FuturesUnordered::new(), Instant::now());
        Self { connection, handler, errors, send_timeout, leaving, waiting, last_call }
    }

    /// Returns the time at which the last call arrived.
    pub(super) const fn last_call(&self) -> Instant {
        self.last_call
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

    /// Closes the connection at once.
    pub(super) fn abort(&mut self, context: &mut Context<'_>) {
        self.connection.abrupt_shutdown(h2::Reason::NO_ERROR);
        // Sends what the socket accepts.
        let _ = self.connection.poll_closed(context);
    }

    /// Reads, decides and answers calls. Completes when the connection is closed.
    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), h2::Error>> {
        // Accepting calls also sends the responses that are queued by now.
        self.poll_waiting(context);
        let waiting = self.waiting.len();
        let mut ready = SmallVec::new();
        let accepted = self.accept(&mut ready, context);
        if !ready.is_empty() || self.waiting.len() > waiting {
            self.last_call = Instant::now();
        }
        for (mut respond, response) in ready {
            if let Some(sender) = response.send(&mut respond) {
                self.waiting.push(WaitingCall { state: CallState::Sending(sender), send_timeout: self.send_timeout });
            }
        }
        if self.waiting.len() > waiting {
            self.poll_waiting(context);
        }
        // The connection wakes this task when a response is queued.
        accepted
    }

    /// Accepts the calls that have arrived, and decides those that need not wait. Sends what is queued.
    fn accept(&mut self, ready: &mut ReadyCalls, context: &mut Context<'_>) -> Poll<Result<(), h2::Error>> {
        for _ in 0..MAX_BATCH {
            let Some(accepted) = ready!(self.connection.poll_accept(context)) else {
                return Poll::Ready(Ok(()));
            };
            let (request, respond) = accepted?;
            match self.handler.call(request.map(RequestBody::new), context, &self.leaving) {
                Decided::Now(response) => ready.push((respond, response)),
                Decided::Later(future) => {
                    let state = CallState::Deciding { respond, future };
                    self.waiting.push(WaitingCall { state, send_timeout: self.send_timeout });
                }
            }
        }
        context.waker().wake_by_ref();
        Poll::Pending
    }

    /// Polls the calls that wait, and removes those that have ended.
    fn poll_waiting(&mut self, context: &mut Context<'_>) {
        while let Poll::Ready(Some(sent)) = self.waiting.poll_next_unpin(context) {
            if sent == Sent::TimedOut {
                self.errors.record_unread();
            }
        }
    }
}

/// A call that waits: for the rest of its request, for its decision, or for the caller to read its response.
struct WaitingCall {
    state: CallState,
    send_timeout: Duration,
}

enum CallState {
    Deciding { respond: SendResponse<Bytes>, future: ResponseFuture },
    Sending(ResponseSender),
}

impl Future for WaitingCall {
    type Output = Sent;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Sent> {
        let timeout = self.send_timeout;
        loop {
            match &mut self.state {
                CallState::Deciding { respond, future } => {
                    let Poll::Ready(response) = future.as_mut().poll(context) else {
                        // A call that the caller cancels is not decided, if it is not too late.
                        return respond.poll_reset(context).map(|_| Sent::Done);
                    };
                    let Some(sender) = response.send(respond) else {
                        return Poll::Ready(Sent::Done);
                    };
                    self.state = CallState::Sending(sender);
                }
                CallState::Sending(sender) => return sender.poll(context, timeout),
            }
        }
    }
}
