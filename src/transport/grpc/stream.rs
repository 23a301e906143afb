//! `sluicegate.v1`: many checks in a frame, and many frames in a stream.
//!
//! A frame is taken apart no further than to its checks; each is then decoded, limited and decided as a call of its own
//! would be, and an error of one is its own. Of a frame that cannot be taken apart nothing runs. All that a frame has is
//! begun before the first of them waits, so that a store with shared calls gets them together. Answers leave as soon as
//! there are any: those that are ready at the same moment in one frame, or in several when they are many.

use std::{
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    vec,
};

use bytes::{Bytes, BytesMut};
use futures_util::{Stream, future::poll_fn, stream::FuturesUnordered};
use http::{HeaderMap, HeaderValue, Response};
use http_body::{Body, Frame};
use hyper::body::Incoming;
use sluicegate_common::wire::{Fields, Malformed};
use tokio::sync::watch;
use tokio_util::sync::ReusableBoxFuture;
use tonic::{Code, Status};

use super::{
    RequestError, exact, feedback,
    service::Handler,
    unary::{self, PREFIX, ResponseBody},
};
use crate::engine::{Feedback, Verdict};

/// Checks of one stream or batch that are under way at the same time: no more are begun meanwhile.
const IN_FLIGHT: usize = 4096;
/// A frame of answers that is so large leaves, though there may be more: the caller can begin to read it.
const FULL: usize = 4 * 1024;
/// Room for so many bytes of answers, to begin with.
const ROOM: usize = 1024;

/// A check, its request not yet read: what is wrong with that is an answer.
#[derive(Default)]
struct Check {
    id: u64,
    request: Bytes,
    traceparent: String,
    holds: Vec<Feedback>,
}

impl Check {
    /// The `checks` of a `CheckFrame`.
    fn read_all(frame: &Bytes) -> Result<Vec<Self>, Malformed> {
        let mut checks = Vec::new();
        for field in Fields::of(frame) {
            if let (1, value) = field? {
                checks.push(Self::read(frame, value.message()?)?);
            }
        }
        Ok(checks)
    }

    /// `id`, `request`, `traceparent`, `holds`.
    fn read(frame: &Bytes, fields: Fields<'_>) -> Result<Self, Malformed> {
        let mut check = Self::default();
        for field in fields {
            match field? {
                (1, value) => check.id = value.number()?,
                (2, value) => check.request = frame.slice_ref(value.bytes()?),
                (3, value) => check.traceparent = value.text()?.to_owned(),
                (4, value) if check.holds.len() < feedback::MOST => {
                    check.holds.push(feedback::of_message(value.message()?)?)
                }
                _ => {}
            }
        }
        Ok(check)
    }
}

type Done = (u64, Result<Verdict, RequestError>);

/// A check under way.
type Deciding = ReusableBoxFuture<'static, Done>;

/// Checks under way, and the answers to those that are done.
struct CheckQueue {
    handler: Arc<Handler>,
    /// Of the frame that came last, those that have not been begun.
    checks: vec::IntoIter<Check>,
    pending: FuturesUnordered<Deciding>,
    /// Room for the next check: of one that was done at once.
    spare: Option<Deciding>,
    /// With room for the prefix, when there are any.
    answers: Vec<u8>,
}

impl CheckQueue {
    fn new(handler: Arc<Handler>) -> Self {
        let (checks, pending) = (Vec::new().into_iter(), FuturesUnordered::new());
        Self { handler, checks, pending, spare: None, answers: Vec::new() }
    }

    fn take(&mut self, frame: &Bytes) -> Result<(), RequestError> {
        let checks = Check::read_all(frame);
        let checks = checks.map_err(|error| RequestError::invalid(format!("this is not a CheckFrame: {error}")))?;
        self.checks = checks.into_iter();
        Ok(())
    }

    /// Begins what may begin, and gathers what is done.
    fn advance(&mut self, context: &mut Context<'_>, at_most: usize) {
        while self.pending.len() < IN_FLIGHT && self.answers.len() < at_most {
            let Some(Check { id, request, traceparent, holds }) = self.checks.next() else {
                break;
            };
            let span = self.handler.span(&traceparent);
            let handler = Arc::clone(&self.handler);
            let deciding = async move { (id, handler.decide(request, holds, span).await) };
            let mut deciding = match self.spare.take() {
                Some(mut spare) => {
                    spare.set(deciding);
                    spare
                }
                None => ReusableBoxFuture::new(deciding),
            };
            // In memory it is done at once.
            match deciding.poll(context) {
                Poll::Ready(done) => {
                    self.add(&done);
                    self.spare = Some(deciding);
                }
                Poll::Pending => self.pending.push(deciding),
            }
        }
        while self.answers.len() < at_most {
            match Pin::new(&mut self.pending).poll_next(context) {
                Poll::Ready(Some(done)) => self.add(&done),
                Poll::Ready(None) | Poll::Pending => break,
            }
        }
    }

    fn is_done(&self) -> bool {
        self.pending.is_empty() && self.checks.as_slice().is_empty()
    }

    fn add(&mut self, (id, outcome): &Done) {
        self.begin();
        exact::encode(*id, outcome, self.handler.response(), &mut self.answers);
    }

    /// Makes room for the prefix.
    fn begin(&mut self) {
        if self.answers.is_empty() {
            self.answers.reserve(ROOM);
            self.answers.resize(PREFIX, 0);
        }
    }

    /// What there is, as a message with its prefix.
    fn message(&mut self) -> Bytes {
        let mut message = mem::take(&mut self.answers);
        let size = message.len().saturating_sub(PREFIX);
        message[1..PREFIX].copy_from_slice(&u32::try_from(size).unwrap_or(u32::MAX).to_be_bytes());
        message.into()
    }
}

/// One frame, and all its answers.
pub(super) async fn batch(handler: Arc<Handler>, body: Incoming) -> Result<Response<ResponseBody>, RequestError> {
    let frame = unary::receive(body, handler.limits().max_frame_bytes).await?;
    let mut run = CheckQueue::new(handler);
    run.take(&frame)?;
    run.begin();
    poll_fn(|context| {
        loop {
            let begun = run.checks.as_slice().len();
            run.advance(context, usize::MAX);
            if run.is_done() {
                return Poll::Ready(());
            }
            // What is done has made room for more.
            if run.checks.as_slice().len() == begun {
                return Poll::Pending;
            }
        }
    })
    .await;
    Ok(unary::respond(run.message()))
}

/// The answers of a stream, for as long as it lives.
pub(super) fn stream(
    handler: Arc<Handler>,
    body: Incoming,
    mut leaving: watch::Receiver<bool>,
) -> Response<ResponseBody> {
    let leaving = Box::pin(async move {
        let _ = leaving.wait_for(|leaving| *leaving).await;
    });
    let answers = ResponseStream {
        run: CheckQueue::new(handler),
        input: Some(body),
        received: BytesMut::new(),
        was_full: false,
        leaving,
        end: Ok(()),
    };
    unary::response(ResponseBody::Stream(Some(Box::new(answers))))
}

/// The body of a stream's response: reading it makes it go on.
pub(super) struct ResponseStream {
    run: CheckQueue,
    /// Until it ends, or nothing more is to be read.
    input: Option<Incoming>,
    /// The beginning of a frame.
    received: BytesMut,
    /// The last frame left because it was full.
    was_full: bool,
    /// The connection is to end.
    leaving: Pin<Box<dyn Future<Output = ()> + Send>>,
    /// How the stream ends.
    end: Result<(), RequestError>,
}

impl ResponseStream {
    /// `None` inside: this was the last.
    pub(super) fn poll_frame(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if self.input.is_some() && self.leaving.as_mut().poll(context).is_ready() {
            // What has not begun has not run, as the protocol says.
            self.stop(Ok(()));
        }
        if mem::take(&mut self.was_full) {
            // The connection sends it now, before there are more.
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        loop {
            self.run.advance(context, FULL);
            if !self.run.answers.is_empty() {
                self.was_full = self.run.answers.len() >= FULL;
                return Poll::Ready(Some(Ok(Frame::data(self.run.message()))));
            }
            if !self.run.checks.as_slice().is_empty() {
                // As many as may be are under way.
                return Poll::Pending;
            }
            if self.input.is_none() {
                return match self.run.is_done() {
                    true => Poll::Ready(Some(Ok(Frame::trailers(self.trailers())))),
                    false => Poll::Pending,
                };
            }
            match self.poll_input(context) {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(refusal)) => self.stop(Err(refusal)),
                Poll::Pending => return Poll::Pending,
            }
        }
    }

    /// Takes no more checks; those under way are answered.
    fn stop(&mut self, end: Result<(), RequestError>) {
        self.end = end;
        self.input = None;
        self.run.checks = Vec::new().into_iter();
    }

    /// The next frame, or a part of it, or the end.
    fn poll_input(&mut self, context: &mut Context<'_>) -> Poll<Result<(), RequestError>> {
        let max = self.run.handler.limits().max_frame_bytes;
        if let Some(frame) = unary::split_message(&mut self.received, max)? {
            return Poll::Ready(self.run.take(&frame));
        }
        let Some(input) = &mut self.input else {
            return Poll::Ready(Ok(()));
        };
        match Pin::new(input).poll_frame(context) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(Some(Ok(frame))) => {
                if let Some(data) = frame.data_ref() {
                    self.received.extend_from_slice(data);
                }
            }
            Poll::Ready(Some(Err(error))) => {
                let message = format!("the stream broke off: {error}");
                return Poll::Ready(Err(RequestError { code: Code::Cancelled, message }));
            }
            Poll::Ready(None) => {
                let rest = self.received.len();
                self.stop(Ok(()));
                if rest > 0 {
                    return Poll::Ready(Err(RequestError::invalid(format!(
                        "the stream ended {rest} bytes into a frame"
                    ))));
                }
            }
        }
        Poll::Ready(Ok(()))
    }

    fn trailers(&self) -> HeaderMap {
        let mut trailers = HeaderMap::with_capacity(2);
        match &self.end {
            Ok(()) => {
                trailers.insert(unary::GRPC_STATUS, HeaderValue::from_static("0"));
            }
            Err(refusal) => unary::write_status(&mut trailers, refusal),
        }
        trailers
    }
}
