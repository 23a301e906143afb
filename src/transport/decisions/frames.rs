//! `Stream` and `Batch` of `sluicegate.v1`: frames with many checks.
//!
//! A frame is split into its checks. Each check is then decoded, limited and decided like a separate call, and an error
//! concerns only that check. A frame that cannot be split is rejected as a whole. All checks of a frame are started
//! before the first one waits, so a store that batches calls receives them together. Responses are sent as soon as they
//! are ready. Those that are ready at the same time share a frame, up to [`FLUSH_BYTES`].

use std::{
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    vec,
};

use bytes::Bytes;
use futures_util::{Stream, future::poll_fn, stream::FuturesUnordered};
use http_body::Frame;
use sluicegate_wire::{Fields, Malformed};
use tokio::sync::watch;
use tokio_util::sync::ReusableBoxFuture;

use super::{exact, feedback, message_decider::MessageDecider};
use crate::{
    budget::Exhausted,
    engine::{Feedback, Verdict},
    transport::{
        errors::RequestError,
        grpc::{
            Frames, Input, RequestBody,
            message::{self, Messages, PREFIX},
        },
    },
};

/// Maximum number of checks of one stream or batch that are decided at the same time.
const MAX_IN_FLIGHT: usize = 4096;
/// Size in bytes of the requests that are decided at the same time above which no further one is started.
const MAX_IN_FLIGHT_BYTES: usize = 1 << 20;
/// Maximum number of checks in a frame. A frame of 4 MiB could have two million empty ones.
pub(in crate::transport) const MAX_CHECKS: usize = 65_536;
/// Size in bytes above which a frame is not retained for the few requests in it that wait for the store.
const LARGE_FRAME_BYTES: usize = 64 * 1024;
/// Size at which a frame of responses is sent even if more responses are ready, so that the caller can begin to read.
const FLUSH_BYTES: usize = 4 * 1024;
/// Initial capacity for responses in bytes.
const INITIAL_CAPACITY: usize = 1024;

/// A check of a frame. Its request is not decoded yet, because an error in the request concerns only this check.
#[derive(Default)]
struct Check {
    id: u64,
    request: Bytes,
    traceparent: String,
    feedback: Vec<Feedback>,
}

impl Check {
    /// Reads the `checks` of a `CheckFrame`.
    fn read_all(frame: &Bytes) -> Result<Vec<Self>, RequestError> {
        let mut checks = Vec::new();
        for field in Fields::new(frame) {
            let (1, value) = field.map_err(malformed)? else {
                continue;
            };
            if checks.len() == MAX_CHECKS {
                return Err(RequestError::invalid(format!("a CheckFrame has more than {MAX_CHECKS} checks")));
            }
            let check = value.message().and_then(|fields| Self::read(frame, fields));
            checks.push(check.map_err(malformed)?);
        }
        Ok(checks)
    }

    /// Reads a check: `id`, `request`, `traceparent`, `feedback`.
    fn read(frame: &Bytes, fields: Fields<'_>) -> Result<Self, Malformed> {
        let mut check = Self::default();
        for field in fields {
            match field? {
                (1, value) => check.id = value.number()?,
                (2, value) => check.request = frame.slice_ref(value.bytes()?),
                // The caller forwards it for its own clients, so it can contain any bytes.
                (3, value) => check.traceparent = value.text().unwrap_or_default().to_owned(),
                (4, value) if check.feedback.len() < feedback::MAX_FEEDBACK => {
                    check.feedback.push(feedback::read_message(value.message()?)?);
                }
                _ => {}
            }
        }
        Ok(check)
    }
}

fn malformed(error: Malformed) -> RequestError {
    RequestError::malformed(format!("invalid CheckFrame: {error}"))
}

/// A check that was decided.
struct Decided {
    id: u64,
    /// Size of the request.
    request_bytes: usize,
    outcome: Result<Verdict, RequestError>,
}

/// A check that is being decided.
type Deciding = ReusableBoxFuture<'static, Decided>;

/// The checks that are being decided, and the responses to those that are done.
struct CheckQueue {
    decider: Arc<MessageDecider>,
    /// The checks of the last frame that have not been started.
    checks: vec::IntoIter<Check>,
    pending: FuturesUnordered<Deciding>,
    /// Size of the requests of the checks that are being decided.
    pending_bytes: usize,
    /// Whether the last frame is too large to be retained.
    is_large: bool,
    /// The allocation of a finished check, reused for the next one.
    spare: Option<Deciding>,
    /// Encoded responses after space for the prefix of a gRPC message, or empty.
    responses: Vec<u8>,
}

impl CheckQueue {
    fn new(decider: Arc<MessageDecider>) -> Self {
        Self {
            decider,
            checks: Vec::new().into_iter(),
            pending: FuturesUnordered::new(),
            pending_bytes: 0,
            is_large: false,
            spare: None,
            responses: Vec::new(),
        }
    }

    fn add_frame(&mut self, frame: &Bytes) -> Result<(), RequestError> {
        self.checks = Check::read_all(frame)?.into_iter();
        self.is_large = frame.len() > LARGE_FRAME_BYTES;
        Ok(())
    }

    /// Starts waiting checks and collects finished ones, until the responses have `max_bytes`.
    fn advance(&mut self, context: &mut Context<'_>, max_bytes: usize) {
        while self.has_room() && self.responses.len() < max_bytes {
            let Some(Check { id, request, traceparent, feedback }) = self.checks.next() else {
                break;
            };
            let request_bytes = request.len();
            let span = self.decider.span(&traceparent);
            if let Some(memory) = self.decider.memory() {
                let outcome = self.decider.decide_in(memory, &request, feedback, span);
                self.add(&Decided { id, request_bytes, outcome });
                continue;
            }
            let request = if self.is_large { Bytes::copy_from_slice(&request) } else { request };
            let decider = Arc::clone(&self.decider);
            let deciding =
                async move { Decided { id, request_bytes, outcome: decider.decide(request, feedback, span).await } };
            let mut deciding = match self.spare.take() {
                Some(mut spare) => {
                    spare.set(deciding);
                    spare
                }
                None => ReusableBoxFuture::new(deciding),
            };
            // A check that a lease or the deny cache decides is done after the first poll.
            match deciding.poll(context) {
                Poll::Ready(decided) => {
                    self.add(&decided);
                    self.spare = Some(deciding);
                }
                Poll::Pending => {
                    self.pending_bytes += request_bytes;
                    self.pending.push(deciding);
                }
            }
        }
        while self.responses.len() < max_bytes {
            match Pin::new(&mut self.pending).poll_next(context) {
                Poll::Ready(Some(decided)) => {
                    self.pending_bytes -= decided.request_bytes;
                    self.add(&decided);
                }
                Poll::Ready(None) | Poll::Pending => break,
            }
        }
    }

    /// Returns whether a further check may be started.
    fn has_room(&self) -> bool {
        self.pending.len() < MAX_IN_FLIGHT && self.pending_bytes < MAX_IN_FLIGHT_BYTES
    }

    fn is_done(&self) -> bool {
        self.pending.is_empty() && self.checks.as_slice().is_empty()
    }

    /// Adds the response to a check.
    fn add(&mut self, decided: &Decided) {
        if let Err(error) = &decided.outcome {
            self.decider.errors().record(error);
        }
        self.reserve_prefix();
        exact::encode(decided.id, &decided.outcome, self.decider.response(), &mut self.responses);
    }

    /// Adds space for the prefix if there are no responses yet.
    fn reserve_prefix(&mut self) {
        if self.responses.is_empty() {
            self.responses.reserve(INITIAL_CAPACITY);
            self.responses.resize(PREFIX, 0);
        }
    }

    /// Returns the collected responses as a message with its prefix.
    fn message(&mut self) -> Bytes {
        message::with_prefix(mem::take(&mut self.responses))
    }
}

/// Decides one frame of checks, and returns all responses in one frame with its prefix.
pub(in crate::transport) async fn batch(
    decider: Arc<MessageDecider>,
    mut body: RequestBody,
    input: Arc<Input>,
) -> Result<Bytes, RequestError> {
    let received = message::receive(Bytes::new(), &mut body, decider.limits().max_frame_bytes, &input).await?;
    let mut queue = CheckQueue::new(decider);
    queue.add_frame(&received.message)?;
    queue.reserve_prefix();
    poll_fn(|context| {
        loop {
            let waiting = queue.checks.as_slice().len();
            queue.advance(context, usize::MAX);
            if queue.is_done() {
                return Poll::Ready(());
            }
            // Finished checks may have made room for waiting ones. If none was started, only a wakeup can help.
            if queue.checks.as_slice().len() == waiting {
                return Poll::Pending;
            }
        }
    })
    .await;
    Ok(queue.message())
}

/// The body of a stream's response. Polling the body drives the checks.
pub(in crate::transport) struct ResponseStream {
    queue: CheckQueue,
    /// The frames of the request. `None` after their end, or if no more are to be read.
    frames: Option<Messages>,
    /// Whether the last frame was sent because it was full.
    was_full: bool,
    /// Completes when the connection is to be closed.
    leaving: Pin<Box<dyn Future<Output = ()> + Send>>,
    /// The status of the stream.
    end: Result<(), RequestError>,
}

impl ResponseStream {
    /// Creates the response to a stream of frames. When `leaving` is true, no further frames are read.
    pub(in crate::transport) fn new(
        decider: Arc<MessageDecider>,
        frames: Messages,
        mut leaving: watch::Receiver<bool>,
    ) -> Self {
        let leaving = Box::pin(async move {
            let _ = leaving.wait_for(|leaving| *leaving).await;
        });
        Self { queue: CheckQueue::new(decider), frames: Some(frames), was_full: false, leaving, end: Ok(()) }
    }

    /// Reads no more checks. Started checks are still decided and answered.
    fn stop(&mut self, end: Result<(), RequestError>) {
        if let Err(error) = &end {
            self.queue.decider.errors().record(error);
        }
        self.end = end;
        self.frames = None;
        self.queue.checks = Vec::new().into_iter();
    }
}

impl Frames for ResponseStream {
    fn poll_frame(&mut self, context: &mut Context<'_>) -> Poll<Frame<Bytes>> {
        if self.frames.is_some() && self.leaving.as_mut().poll(context).is_ready() {
            // As the protocol specifies, checks that have not been started are not decided.
            self.stop(Ok(()));
        }
        if let Poll::Ready(error) = self.poll_evicted(context) {
            self.stop(Err(RequestError::from(error)));
        }
        if mem::take(&mut self.was_full) {
            // The connection sends the full frame before the next one is built.
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        loop {
            self.queue.advance(context, FLUSH_BYTES);
            if !self.queue.responses.is_empty() {
                self.was_full = self.queue.responses.len() >= FLUSH_BYTES;
                return Poll::Ready(Frame::data(self.queue.message()));
            }
            if !self.queue.checks.as_slice().is_empty() {
                // The maximum number of checks is being decided.
                return Poll::Pending;
            }
            let Some(frames) = &mut self.frames else {
                if self.queue.is_done() {
                    return Poll::Ready(Frame::trailers(message::trailers(&self.end)));
                }
                return Poll::Pending;
            };
            match ready!(frames.poll_next(context, self.queue.decider.limits().max_frame_bytes)) {
                Ok(Some(frame)) => {
                    if let Err(error) = self.queue.add_frame(&frame) {
                        self.stop(Err(error));
                    }
                }
                Ok(None) => self.stop(Ok(())),
                Err(error) => self.stop(Err(error)),
            }
        }
    }

    fn poll_evicted(&self, context: &Context<'_>) -> Poll<Exhausted> {
        match &self.frames {
            Some(frames) => frames.poll_evicted(context),
            None => Poll::Pending,
        }
    }
}

/// Decides a frame with a store that never waits, and returns the frame of responses, for a fuzz target.
#[cfg(any(test, fuzzing))]
pub(in crate::transport) fn decide_frame(decider: &Arc<MessageDecider>, frame: &Bytes) -> Result<Bytes, RequestError> {
    let mut queue = CheckQueue::new(Arc::clone(decider));
    queue.add_frame(frame)?;
    queue.reserve_prefix();
    queue.advance(&mut Context::from_waker(std::task::Waker::noop()), usize::MAX);
    assert!(queue.is_done());
    Ok(queue.message().slice(PREFIX..))
}
