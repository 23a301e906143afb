//! [`RequestBody`]: a body with bytes that are reserved in the budget of the listener while it is received and handled.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{Error, body::Body, extract::Request};
use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use parking_lot::{Mutex, MutexGuard};
use tokio::{
    sync::Semaphore,
    time::{Instant, Sleep, sleep, timeout},
};

use super::rejections::Rejection;
use crate::budget::{Budget, Reservation};

/// Time without new bytes of a body after which it is rejected.
pub(super) const PROGRESS_TIMEOUT: Duration = Duration::from_secs(10);
/// Size of a head up to which a request without a body needs no reservation, in bytes.
const SMALL_HEAD_BYTES: usize = 2_048;
/// Overhead of a header in addition to its name and its value, in bytes, as HTTP/2 counts it.
const HEADER_BYTES: usize = 32;

/// The memory of one request, which its body and its handler share.
#[derive(Clone)]
pub(super) struct Input(Arc<Mutex<InputState>>);

struct InputState {
    reservation: Reservation,
    rejection: Option<Rejection>,
}

impl Input {
    fn new(budget: &Budget) -> Self {
        let reservation = budget.reservation();
        Self(Arc::new(Mutex::new(InputState { reservation, rejection: None })))
    }

    /// Returns the reason for which the body was rejected.
    pub(super) fn rejection(&self) -> Option<Rejection> {
        self.state().rejection
    }

    fn state(&self) -> MutexGuard<'_, InputState> {
        self.0.lock()
    }
}

/// Makes the body of a request, and a large head, count against the budget. Returns `None` with a request that needs no
/// reservation.
///
/// # Errors
///
/// Returns an error if no memory for the head is available in time, or if too many others wait for it.
pub(super) async fn reserve(
    request: Request,
    budget: &Budget,
    waiting: &Semaphore,
) -> Result<(Request, Option<Input>), Rejection> {
    let head_bytes = head_bytes(&request);
    let is_empty = request.body().is_end_stream();
    let is_small = head_bytes <= SMALL_HEAD_BYTES;
    if is_empty && is_small {
        return Ok((request, None));
    }
    let input = Input::new(budget);
    if !is_small {
        let _waiting = waiting.try_acquire().map_err(|_| Rejection::NoMemory)?;
        let grow = std::future::poll_fn(|context| input.state().reservation.poll_grow(head_bytes, context));
        if !matches!(timeout(PROGRESS_TIMEOUT, grow).await, Ok(Ok(()))) {
            return Err(Rejection::NoMemory);
        }
    }
    if is_empty {
        input.state().reservation.keep();
        return Ok((request, Some(input)));
    }
    let is_grpc = is_grpc(&request);
    // The decoded form of a body needs as much memory again. Bodies of gRPC are decoded while they arrive.
    let copies = if is_grpc { 1 } else { 2 };
    let received = if is_small { Received::Head(head_bytes) } else { Received::Nothing };
    let request = request
        .map(|inner| Body::new(RequestBody { inner, input: input.clone(), timer: None, received, copies, is_grpc }));
    Ok((request, Some(input)))
}

/// Returns whether a request is a gRPC call.
pub(in crate::transport) fn is_grpc(request: &Request) -> bool {
    let kind = request.headers().get(http::header::CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"))
}

fn head_bytes(request: &Request) -> usize {
    let mut bytes = 0;
    for (name, value) in request.headers() {
        bytes += name.as_str().len() + value.len() + HEADER_BYTES;
    }
    if let Some(target) = request.uri().path_and_query() {
        bytes += target.as_str().len();
    }
    bytes
}

/// The body of a request. It fails if it makes no progress, or if its reservation is evicted.
struct RequestBody {
    inner: Body,
    input: Input,
    /// The time without progress. A timer belongs to the runtime that polls the body, so the first wait creates it.
    timer: Option<Pin<Box<Sleep>>>,
    received: Received,
    copies: usize,
    is_grpc: bool,
}

/// The part of a request that has been received and not been reserved.
enum Received {
    Nothing,
    /// The head, with its size in bytes.
    Head(usize),
    Frame(Frame<Bytes>),
    /// Everything has been received, or the body was rejected.
    End,
}

impl RequestBody {
    fn reject(&mut self, rejection: Rejection) -> Error {
        self.received = Received::End;
        self.inner = Body::empty();
        let mut state = self.input.state();
        state.reservation.clear();
        state.rejection = Some(rejection);
        // Tonic returns the status that it finds in an error.
        if self.is_grpc { Error::new(rejection.status()) } else { Error::new(rejection) }
    }

    /// Reserves the bytes of the received part, and returns its frame.
    fn poll_reserve(&mut self, context: &Context<'_>) -> Poll<Result<Option<Frame<Bytes>>, Rejection>> {
        let bytes = match &self.received {
            Received::Nothing | Received::End => 0,
            Received::Head(bytes) => *bytes,
            Received::Frame(frame) => frame.data_ref().map(Bytes::len).unwrap_or_default() * self.copies,
        };
        if bytes > 0 && ready!(self.input.state().reservation.poll_grow(bytes, context)).is_err() {
            return Poll::Ready(Err(Rejection::NoMemory));
        }
        match std::mem::replace(&mut self.received, Received::Nothing) {
            Received::Frame(frame) => Poll::Ready(Ok(Some(frame))),
            Received::Nothing | Received::Head(_) | Received::End => Poll::Ready(Ok(None)),
        }
    }

    fn poll_progress(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Frame<Bytes>>, Error>> {
        loop {
            if let Some(frame) = match ready!(self.poll_reserve(context)) {
                Ok(frame) => frame,
                Err(rejection) => return Poll::Ready(Err(self.reject(rejection))),
            } {
                return Poll::Ready(Ok(Some(frame)));
            }
            let Poll::Ready(next) = Pin::new(&mut self.inner).poll_frame(context) else {
                if self.input.state().reservation.poll_evicted(context).is_ready() {
                    return Poll::Ready(Err(self.reject(Rejection::NoMemory)));
                }
                return Poll::Pending;
            };
            match next.transpose()? {
                Some(frame) => {
                    if let Some(timer) = &mut self.timer {
                        timer.as_mut().reset(Instant::now() + PROGRESS_TIMEOUT);
                    }
                    self.received = Received::Frame(frame);
                }
                None => {
                    self.received = Received::End;
                    self.input.state().reservation.keep();
                    return Poll::Ready(Ok(None));
                }
            }
        }
    }
}

impl HttpBody for RequestBody {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let body = self.get_mut();
        if matches!(body.received, Received::End) {
            return Poll::Ready(None);
        }
        if let Poll::Ready(progress) = body.poll_progress(context) {
            return Poll::Ready(progress.transpose());
        }
        let timer = body.timer.get_or_insert_with(|| Box::pin(sleep(PROGRESS_TIMEOUT)));
        ready!(timer.as_mut().poll(context));
        let waits_for_memory = !matches!(body.received, Received::Nothing);
        let rejection = if waits_for_memory { Rejection::NoMemory } else { Rejection::TooSlow };
        Poll::Ready(Some(Err(body.reject(rejection))))
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.received, Received::End)
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use axum::body::to_bytes;
    use tokio::sync::mpsc;

    use super::*;
    use crate::budget::Victim;

    /// A body of the frames that are sent to it.
    struct Frames(mpsc::UnboundedReceiver<Bytes>);

    impl HttpBody for Frames {
        type Data = Bytes;
        type Error = Error;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
            self.0.poll_recv(context).map(|frame| frame.map(|bytes| Ok(Frame::data(bytes))))
        }
    }

    struct Caller {
        frames: Option<mpsc::UnboundedSender<Bytes>>,
        input: Input,
        receiving: tokio::task::JoinHandle<Result<Bytes, Error>>,
    }

    impl Caller {
        async fn start(budget: &Budget) -> Self {
            let (frames, receiver) = mpsc::unbounded_channel();
            let request = Request::post("/json").body(Body::new(Frames(receiver))).unwrap();
            let (request, input) = reserve(request, budget, &Semaphore::new(1)).await.unwrap();
            let receiving = tokio::spawn(to_bytes(request.into_body(), usize::MAX));
            Self { frames: Some(frames), input: input.unwrap(), receiving }
        }

        async fn send(&self, bytes: usize) {
            self.frames.as_ref().unwrap().send(Bytes::from(vec![b'x'; bytes])).unwrap();
            tokio::task::yield_now().await;
        }

        async fn finish(mut self) -> (Option<Rejection>, Result<usize, Error>) {
            self.frames = None;
            let received = self.receiving.await.unwrap();
            (self.input.rejection(), received.map(|bytes| bytes.len()))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_are_reserved_until_the_request_has_been_handled() {
        let budget = Budget::new("test", 1_000, Victim::Oldest);
        let caller = Caller::start(&budget).await;
        caller.send(100).await;
        caller.send(50).await;
        let head = "/json".len();
        assert_eq!(budget.used_bytes(), 300 + head);
        let input = caller.input.clone();
        assert_eq!(caller.finish().await.1.unwrap(), 150);
        assert_eq!(budget.used_bytes(), 300 + head, "the handler has not finished");
        drop(input);
        assert_eq!(budget.used_bytes(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn the_oldest_unfinished_body_makes_room_and_a_complete_one_stays() {
        let budget = Budget::new("test", 1_000, Victim::Oldest);
        let complete = Caller::start(&budget).await;
        complete.send(100).await;
        let input = complete.input.clone();
        complete.finish().await.1.unwrap();
        let unfinished = Caller::start(&budget).await;
        unfinished.send(300).await;
        let newer = Caller::start(&budget).await;
        newer.send(200).await;
        let (rejection, received) = newer.finish().await;
        assert_eq!((rejection, received.unwrap()), (None, 200));
        assert_eq!(input.rejection(), None);
        let (rejection, received) = unfinished.finish().await;
        assert_eq!(rejection, Some(Rejection::NoMemory));
        assert!(received.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_larger_than_the_budget_is_rejected_without_evictions() {
        let budget = Budget::new("test", 1_000, Victim::Oldest);
        let caller = Caller::start(&budget).await;
        caller.send(300).await;
        caller.send(300).await;
        assert_eq!(caller.finish().await.0, Some(Rejection::NoMemory));
        assert_eq!((budget.used_bytes(), budget.evictions()), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn only_new_bytes_extend_the_time_for_a_body() {
        let budget = Budget::new("test", 1_000, Victim::Oldest);
        let caller = Caller::start(&budget).await;
        let started = Instant::now();
        for _ in 0..3 {
            sleep(PROGRESS_TIMEOUT - Duration::from_secs(1)).await;
            caller.send(1).await;
        }
        let frames = caller.frames;
        assert!(caller.receiving.await.unwrap().is_err());
        assert_eq!(caller.input.rejection(), Some(Rejection::TooSlow));
        assert_eq!(started.elapsed().as_secs(), 3 * 9 + 10);
        assert_eq!(budget.used_bytes(), 0);
        drop(frames);
    }

    #[tokio::test(start_paused = true)]
    async fn large_heads_are_reserved_and_small_ones_need_no_memory() {
        let (budget, waiting) = (Budget::new("test", 4_000, Victim::Oldest), Semaphore::new(1));
        let request = |bytes: usize| Request::get("/").header("a", "x".repeat(bytes)).body(Body::empty()).unwrap();
        let (_, small) = reserve(request(1_900), &budget, &waiting).await.unwrap();
        assert!(small.is_none());
        let (_, large) = reserve(request(2_500), &budget, &waiting).await.unwrap();
        assert_eq!(budget.used_bytes(), 2_500 + 1 + HEADER_BYTES + 1);
        assert_eq!(reserve(request(2_500), &budget, &waiting).await.err(), Some(Rejection::NoMemory));
        assert!(reserve(request(1_900), &budget, &waiting).await.is_ok());
        let permit = waiting.try_acquire().unwrap();
        assert_eq!(reserve(request(2_500), &budget, &waiting).await.err(), Some(Rejection::NoMemory));
        drop((large, permit));
        assert!(reserve(request(2_500), &budget, &waiting).await.is_ok());
    }
}
