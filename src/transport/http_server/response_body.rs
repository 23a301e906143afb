//! [`ResponseBody`]: a body with bytes that are reserved in the budget of the listener until they are sent.
//!
//! The bytes own their reservation. It therefore counts them wherever they wait: in the body, or in the buffers of
//! HTTP/1 and HTTP/2. If the reservation is evicted, the connection is closed.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{Error, body::Body, response::Response};
use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use tokio::time::timeout;

use super::{output::Output, rejections::Rejection, shared_page::Sent};
use crate::{budget::Reservation, transport::connections::CallGuard};

/// Size up to which a part of a response needs no reservation, in bytes, so that health checks need no memory.
const SMALL_BYTES: usize = 1_024;
/// Maximum time for which a response waits for memory, which is free when others have been sent.
const MEMORY_TIMEOUT: Duration = Duration::from_secs(10);

/// Reserves the memory of a response that is complete, or of its first part. `call` ends with the response.
pub(super) async fn reserve(output: &Arc<Output>, response: Response, call: CallGuard) -> Response {
    if let Some(sent) = response.extensions().get::<Sent>() {
        sent.record(output);
        return response;
    }
    let (head, inner) = response.into_parts();
    let mut body = ResponseBody { inner, output: Arc::clone(output), call: Some(call), next: Next::Nothing };
    if !wait_for_first(output, &mut body).await {
        output.rejections.record(Rejection::NoMemory);
        return Rejection::NoMemory.response();
    }
    if body.is_complete() {
        body.call = None;
    }
    Response::from_parts(head, Body::new(body))
}

/// Reserves memory for the part of a body that is available now. Returns `false` after [`MEMORY_TIMEOUT`], if too many
/// responses already wait, or if the body fails.
async fn wait_for_first(output: &Output, body: &mut ResponseBody) -> bool {
    let at_once = std::future::poll_fn(|context| Poll::Ready(body.poll_first(context))).await;
    if let Poll::Ready(result) = at_once {
        return result.is_ok();
    }
    let Ok(_waiting) = output.waiting.try_acquire() else {
        return false;
    };
    let first = timeout(MEMORY_TIMEOUT, std::future::poll_fn(|context| body.poll_first(context))).await;
    matches!(first, Ok(Ok(())))
}

/// The body of a response.
struct ResponseBody {
    inner: Body,
    output: Arc<Output>,
    /// The call, while its response can have more parts.
    call: Option<CallGuard>,
    next: Next,
}

/// The part that is sent next.
enum Next {
    Nothing,
    /// A part that waits for memory.
    Waiting(Bytes, Reservation),
    Reserved(Frame<Bytes>),
}

impl ResponseBody {
    /// Waits until the part that is available by now is reserved.
    fn poll_first(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Error>> {
        if matches!(self.next, Next::Nothing) {
            match Pin::new(&mut self.inner).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => self.receive(frame),
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Err(error)),
                Poll::Ready(None) | Poll::Pending => return Poll::Ready(Ok(())),
            }
        }
        self.poll_reserve(context).map_err(Error::new)
    }

    fn receive(&mut self, frame: Frame<Bytes>) {
        self.next = match frame.into_data() {
            Ok(bytes) if bytes.len() > SMALL_BYTES => Next::Waiting(bytes, self.output.budget.reservation()),
            Ok(bytes) => Next::Reserved(Frame::data(bytes)),
            Err(frame) => Next::Reserved(frame),
        };
    }

    fn poll_reserve(&mut self, context: &Context<'_>) -> Poll<Result<(), Rejection>> {
        if let Next::Waiting(bytes, reservation) = &mut self.next {
            ready!(self.output.poll_grow(reservation, bytes.len(), context))?;
        }
        self.next = match std::mem::replace(&mut self.next, Next::Nothing) {
            Next::Waiting(bytes, reservation) => {
                Next::Reserved(Frame::data(Bytes::from_owner(ReservedBytes { bytes, reservation })))
            }
            other => other,
        };
        Poll::Ready(Ok(()))
    }

    fn is_complete(&self) -> bool {
        self.inner.is_end_stream()
    }
}

impl HttpBody for ResponseBody {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let body = self.get_mut();
        if matches!(body.next, Next::Nothing) {
            match ready!(Pin::new(&mut body.inner).poll_frame(context)) {
                Some(Ok(frame)) => body.receive(frame),
                end => return Poll::Ready(end),
            }
        }
        if let Err(rejection) = ready!(body.poll_reserve(context)) {
            body.output.rejections.record(rejection);
            return Poll::Ready(Some(Err(Error::new(rejection))));
        }
        match std::mem::replace(&mut body.next, Next::Nothing) {
            Next::Reserved(frame) => Poll::Ready(Some(Ok(frame))),
            Next::Nothing | Next::Waiting(..) => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.next, Next::Nothing) && self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let waiting = match &self.next {
            Next::Nothing => 0,
            Next::Waiting(bytes, _) => bytes.len(),
            Next::Reserved(frame) => frame.data_ref().map(Bytes::len).unwrap_or_default(),
        };
        let waiting = waiting as u64;
        let rest = self.inner.size_hint();
        let mut hint = SizeHint::new();
        hint.set_lower(rest.lower() + waiting);
        if let Some(upper) = rest.upper() {
            hint.set_upper(upper + waiting);
        }
        hint
    }
}

/// Bytes of a response, and their part of the memory for responses, which is free again when they are dropped.
struct ReservedBytes {
    bytes: Bytes,
    reservation: Reservation,
}

impl AsRef<[u8]> for ReservedBytes {
    fn as_ref(&self) -> &[u8] {
        debug_assert!(self.reservation.bytes() > 0, "the bytes are not reserved");
        &self.bytes
    }
}
