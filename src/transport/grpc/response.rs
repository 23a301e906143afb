//! [`Response`]: the response to a call. [`ResponseSender`] sends the parts that have to wait.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use h2::{Reason, SendStream, server::SendResponse};
use http::{HeaderMap, HeaderName, HeaderValue, header::CONTENT_TYPE};
use http_body::{Body, Frame};
use tokio::{
    sync::mpsc,
    time::{Sleep, sleep},
};

use super::{
    input::{CALL_BYTES, Hold, Input, TONIC_CALL_BYTES},
    message::{trailers, write_status},
};
use crate::{
    budget::Exhausted,
    transport::errors::{CallerErrors, RequestError},
};

const GRPC_ACCEPT_ENCODING: HeaderName = HeaderName::from_static("grpc-accept-encoding");
const GRPC_CONTENT_TYPE: HeaderValue = HeaderValue::from_static("application/grpc");

/// Frames of a response that are produced while they are sent.
pub(crate) trait Frames: Send {
    /// Returns the next frame. The last one contains the trailers.
    fn poll_frame(&mut self, context: &mut Context<'_>) -> Poll<Frame<Bytes>>;

    /// Completes if memory of the call is needed for others.
    fn poll_evicted(&self, context: &Context<'_>) -> Poll<Exhausted>;
}

/// The response to a call.
pub(crate) enum Response {
    /// A message with its prefix. The call was successful.
    Message {
        data: Bytes,
        /// Additional headers, which nearly no response has.
        metadata: Option<Box<HeaderMap>>,
    },
    /// The status of a failed call. It is sent in the headers.
    Error(RequestError),
    /// Frames that depend on those of the request.
    Frames(Box<dyn Frames>),
    /// Messages with their prefixes that another task sends, or the status that ends the stream.
    Messages(mpsc::Receiver<Result<Bytes, RequestError>>),
    /// The response of a service that uses tonic.
    Tonic(Box<http::Response<tonic::body::Body>>),
}

impl Response {
    /// Returns the memory of a response that may last as long as the caller likes, in bytes.
    pub(in crate::transport) const fn stream_bytes(&self) -> Option<usize> {
        match self {
            Self::Frames(_) | Self::Messages(_) => Some(CALL_BYTES),
            Self::Tonic(_) => Some(TONIC_CALL_BYTES),
            Self::Message { .. } | Self::Error(_) => None,
        }
    }

    /// Counts the response if it is an error of its caller.
    pub(in crate::transport) fn record(&self, errors: &CallerErrors) {
        if let Self::Error(error) = self {
            errors.record(error);
        }
    }

    /// Sends the response. Returns the sender of the rest if a part has to wait.
    pub(in crate::transport) fn send(self, respond: &mut SendResponse<Bytes>) -> Option<ResponseSender> {
        match self.try_send(respond) {
            Ok(sender) => sender,
            Err(error) => {
                // The caller has reset the stream, or the connection is closed.
                tracing::debug!(%error, "cannot send a response");
                None
            }
        }
    }

    fn try_send(self, respond: &mut SendResponse<Bytes>) -> Result<Option<ResponseSender>, h2::Error> {
        let (mut head, body) = match self {
            Self::Message { data, metadata } => {
                let head = match metadata {
                    Some(metadata) => *metadata,
                    None => HeaderMap::new(),
                };
                (head, UnsentBody::Message(data))
            }
            Self::Frames(frames) => (HeaderMap::with_capacity(1), UnsentBody::Frames(frames)),
            Self::Messages(messages) => (HeaderMap::with_capacity(1), UnsentBody::Messages(messages)),
            Self::Error(error) => {
                let mut head = HeaderMap::with_capacity(4);
                head.insert(CONTENT_TYPE, GRPC_CONTENT_TYPE);
                write_status(&mut head, &error);
                head.insert(GRPC_ACCEPT_ENCODING, HeaderValue::from_static("identity,gzip"));
                respond.send_response(with_headers(head), true)?;
                return Ok(None);
            }
            Self::Tonic(response) => {
                let (head, body) = response.into_parts();
                let is_empty = body.is_end_stream();
                let stream = respond.send_response(http::Response::from_parts(head, ()), is_empty)?;
                if is_empty {
                    return Ok(None);
                }
                return Ok(Some(ResponseSender::new(stream, UnsentBody::Tonic(body))));
            }
        };
        head.insert(CONTENT_TYPE, GRPC_CONTENT_TYPE);
        let mut stream = respond.send_response(with_headers(head), false)?;
        match body {
            UnsentBody::Message(data) if reserve(&mut stream, data.len()) => {
                stream.send_data(data, false)?;
                stream.send_trailers(trailers(&Ok(())))?;
                Ok(None)
            }
            body => Ok(Some(ResponseSender::new(stream, body))),
        }
    }
}

fn with_headers(headers: HeaderMap) -> http::Response<()> {
    let mut response = http::Response::new(());
    *response.headers_mut() = headers;
    response
}

/// Reserves `size` bytes of the flow-control windows. Returns whether they are available now.
fn reserve(stream: &mut SendStream<Bytes>, size: usize) -> bool {
    stream.reserve_capacity(size);
    stream.capacity() >= size
}

/// The part of a response after its headers.
enum UnsentBody {
    /// The data of a message. Trailers follow.
    Message(Bytes),
    Frames(Box<dyn Frames>),
    Messages(mpsc::Receiver<Result<Bytes, RequestError>>),
    Tonic(tonic::body::Body),
}

impl UnsentBody {
    /// Completes if memory of the call is needed for others.
    fn poll_evicted(&self, context: &Context<'_>) -> Poll<Exhausted> {
        match self {
            Self::Frames(frames) => frames.poll_evicted(context),
            Self::Message(_) | Self::Messages(_) | Self::Tonic(_) => Poll::Pending,
        }
    }

    fn poll_frame(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, tonic::Status>>> {
        match self {
            Self::Message(data) if data.is_empty() => Poll::Ready(Some(Ok(Frame::trailers(trailers(&Ok(())))))),
            Self::Message(data) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(data))))),
            Self::Frames(frames) => frames.poll_frame(context).map(|frame| Some(Ok(frame))),
            Self::Messages(messages) => messages.poll_recv(context).map(|message| {
                let frame = match message {
                    Some(Ok(data)) => Frame::data(data),
                    Some(Err(error)) => Frame::trailers(trailers(&Err(error))),
                    None => Frame::trailers(trailers(&Ok(()))),
                };
                Some(Ok(frame))
            }),
            Self::Tonic(body) => Pin::new(body).poll_frame(context),
        }
    }
}

/// Sender of the body of a response, at the pace at which the caller opens the flow-control windows.
///
/// A caller need not open a window, and HTTP/2 has no timeout for this. Data that has waited for a window for too long
/// is dropped with its call.
pub(in crate::transport) struct ResponseSender {
    stream: SendStream<Bytes>,
    body: UnsentBody,
    /// Data of the body that waits for a window.
    data: Bytes,
    /// How long the data waits, and its memory.
    wait: Option<Box<Wait>>,
}

/// The state of data that waits for a window.
struct Wait {
    /// Completes when the data has waited for too long.
    end: Pin<Box<Sleep>>,
    memory: Hold,
}

/// How sending a response has ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::transport) enum Sent {
    /// The response was sent, or its call was cancelled.
    Done,
    /// The caller did not read the response in time, or others needed the memory of the call.
    Dropped,
}

impl ResponseSender {
    const fn new(stream: SendStream<Bytes>, body: UnsentBody) -> Self {
        Self { stream, body, data: Bytes::new(), wait: None }
    }

    /// Ends the call without the rest of its response.
    pub(in crate::transport) fn drop_call(&mut self) -> Sent {
        self.stream.send_reset(Reason::ENHANCE_YOUR_CALM);
        Sent::Dropped
    }

    /// Sends the available data. Data waits for at most `timeout` for a window, and only while there is memory for it.
    pub(in crate::transport) fn poll(
        &mut self,
        context: &mut Context<'_>,
        timeout: Duration,
        input: &Input,
    ) -> Poll<Sent> {
        match self.poll_send(context) {
            Poll::Ready(Ok(())) => Poll::Ready(Sent::Done),
            Poll::Ready(Err(error)) => {
                tracing::debug!(%error, "cannot send a response");
                Poll::Ready(Sent::Done)
            }
            // Also registers for the reset, so that a call ends even if its body and its caller are idle.
            Poll::Pending if self.stream.poll_reset(context).is_ready() => Poll::Ready(Sent::Done),
            Poll::Pending if self.data.is_empty() => Poll::Pending,
            Poll::Pending => {
                let wait = self.wait.get_or_insert_with(|| {
                    let memory = input.call(CALL_BYTES + self.data.len());
                    Box::new(Wait { end: Box::pin(sleep(timeout)), memory })
                });
                // The body, which is not polled now, can hold a part of a message.
                let is_evicted = wait.memory.poll_end(context).is_ready() || self.body.poll_evicted(context).is_ready();
                if is_evicted {
                    return Poll::Ready(self.drop_call());
                }
                ready!(wait.end.as_mut().poll(context));
                self.stream.send_reset(Reason::CANCEL);
                Poll::Ready(Sent::Dropped)
            }
        }
    }

    fn poll_send(&mut self, context: &mut Context<'_>) -> Poll<Result<(), h2::Error>> {
        loop {
            if !self.data.is_empty() {
                ready!(self.poll_send_data(context))?;
                continue;
            }
            match ready!(self.body.poll_frame(context)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.data = data,
                    Err(frame) => {
                        let trailers = frame.into_trailers().unwrap_or_default();
                        return Poll::Ready(self.stream.send_trailers(trailers));
                    }
                },
                None => return Poll::Ready(self.stream.send_data(Bytes::new(), true)),
                Some(Err(status)) => {
                    tracing::debug!(%status, "the body of a response failed");
                    self.stream.send_reset(Reason::INTERNAL_ERROR);
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }

    /// Sends as much of the data as the windows allow.
    fn poll_send_data(&mut self, context: &mut Context<'_>) -> Poll<Result<(), h2::Error>> {
        self.stream.reserve_capacity(self.data.len());
        while self.stream.capacity() == 0 {
            if ready!(self.stream.poll_capacity(context)).transpose()?.is_none() {
                return Poll::Ready(Err(Reason::CANCEL.into()));
            }
        }
        let size = self.stream.capacity().min(self.data.len());
        self.wait = None;
        Poll::Ready(self.stream.send_data(self.data.split_to(size), false))
    }
}
