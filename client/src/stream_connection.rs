//! [`StreamConnection`]: sends checks that are ready at the same time in one frame of a long-lived stream.
//!
//! No check is delayed to fill a frame: the sending task yields once, so that all tasks that are ready run before it,
//! and then sends the checks they queued. The first attempt to open a stream shows whether the service supports
//! streams. If it does not, the queued checks and all later ones are sent as unary calls.
//!
//! ## Idle ⟶ Open ⟶ Idle
//! The first check opens the stream. If the service ends the stream in order, checks without a response were not
//! executed and are sent on the next stream. If the stream breaks, checks that were sent may have been executed, so
//! they fail; checks that were not sent go into the next stream.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard, Weak,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use bytes::Bytes;
use sluicegate_wire::{Fields, Malformed, Writer};
use tokio::{
    sync::{Notify, mpsc, oneshot},
    task::yield_now,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming, client::Grpc, codegen::http::uri::PathAndQuery, transport::Channel};

use crate::{
    check_request::CheckRequest,
    lock::lock,
    raw::Raw,
    verdict::{Failure, Verdict, full_message},
};

const STREAM: &str = "/sluicegate.v1.DecisionService/Stream";
/// Maximum number of checks waiting to be sent. With more, responses would arrive too late to be useful.
const MAX_QUEUED: usize = 16_384;
/// Size in bytes at which a frame is complete. The service accepts frames up to 4 MiB by default.
const FRAME_BYTES: usize = 64 * 1024;
/// Number of frames buffered for the connection.
const MAX_BUFFERED_FRAMES: usize = 4;

/// Reason why a check has no verdict, and whether it may have been executed.
#[derive(Clone, Debug)]
pub(crate) enum StreamError {
    /// The check was not sent, so it can be sent again.
    NotExecuted(Failure),
    /// The service ended the stream in order and did not execute the check. This is no failure of the service.
    StreamEnded,
    /// The service does not support streams. The check was not sent.
    Unsupported,
    /// The check was sent and may have been executed.
    MaybeExecuted(Failure),
    /// The service answered with an error.
    Rejected(Failure),
}

/// Result of a check. The verdict is boxed, because it is large and the result passes through many futures.
pub(crate) type CheckResult = Result<Box<Verdict>, StreamError>;

/// Queue of checks and the task that sends them on a stream.
pub(crate) struct StreamConnection {
    shared: Arc<Shared>,
}

struct Shared {
    queue: Mutex<Queue>,
    ready: Notify,
    /// Whether the service is known not to support streams.
    unsupported: AtomicBool,
    headers: tonic::metadata::MetadataMap,
}

#[derive(Default)]
struct Queue {
    frames: VecDeque<Outgoing>,
    waiting: usize,
    next_id: u64,
    closed: bool,
}

/// Frame under construction, and the checks in it that wait for a response.
#[derive(Default)]
struct Outgoing {
    bytes: Vec<u8>,
    first_id: u64,
    waiting: Vec<oneshot::Sender<CheckResult>>,
}

impl StreamConnection {
    /// Spawns the sending task on the current runtime. The task ends when the connection is dropped.
    pub(crate) fn start(channel: Channel, headers: tonic::metadata::MetadataMap) -> Self {
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            ready: Notify::new(),
            unsupported: AtomicBool::new(false),
            headers,
        });
        tokio::spawn(run(Arc::downgrade(&shared), channel));
        Self { shared }
    }

    /// Returns `true` if the service is known not to support streams.
    pub(crate) fn is_unsupported(&self) -> bool {
        self.shared.unsupported.load(Relaxed)
    }

    /// Queues a check and waits for its response.
    pub(crate) async fn check(&self, request: &CheckRequest<'_>) -> CheckResult {
        let (sender, response) = oneshot::channel();
        {
            let mut queue = self.shared.queue();
            if queue.closed || queue.waiting >= MAX_QUEUED {
                return Err(StreamError::NotExecuted(Failure::Overloaded));
            }
            let id = queue.next_id;
            queue.next_id += 1;
            queue.waiting += 1;
            if queue.frames.back().is_none_or(|frame| frame.bytes.len() >= FRAME_BYTES) {
                queue.frames.push_back(Outgoing { first_id: id, ..Outgoing::default() });
            }
            if let Some(frame) = queue.frames.back_mut() {
                request.write_check(id, &mut Writer(&mut frame.bytes));
                frame.waiting.push(sender);
            }
        }
        self.shared.ready.notify_one();
        // The sender is dropped only if the sending task ended with its runtime. The check may have been sent by then.
        let runtime_ended =
            |_| Err(StreamError::MaybeExecuted(Failure::Connection("the client's runtime was shut down".into())));
        response.await.unwrap_or_else(runtime_ended)
    }
}

impl Drop for StreamConnection {
    fn drop(&mut self) {
        self.shared.queue().closed = true;
        self.shared.ready.notify_one();
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }

    /// Removes and returns the next frame. Frames in which all checks have been cancelled are skipped.
    fn take(&self) -> Option<Outgoing> {
        let mut queue = self.queue();
        loop {
            let frame = queue.frames.pop_front()?;
            queue.waiting -= frame.waiting.len();
            if !frame.waiting.iter().all(oneshot::Sender::is_closed) {
                return Some(frame);
            }
        }
    }

    fn is_empty(&self) -> bool {
        self.queue().frames.is_empty()
    }

    fn is_closed(&self) -> bool {
        self.queue().closed
    }

    /// Completes all queued checks with `error`.
    fn fail_queued(&self, error: &StreamError) {
        while let Some(frame) = self.take() {
            frame.waiting.into_iter().for_each(|waiting| drop(waiting.send(Err(error.clone()))));
        }
    }
}

/// Opens a stream whenever checks are queued, until the [`StreamConnection`] is dropped.
async fn run(shared: Weak<Shared>, channel: Channel) {
    while let Some(shared) = shared.upgrade() {
        if shared.is_empty() {
            if shared.is_closed() {
                return;
            }
            shared.ready.notified().await;
            continue;
        }
        match open_stream(&shared, channel.clone()).await {
            Ok((frames, responses)) => run_stream(shared, frames, responses).await,
            Err(status) if status.code() == Code::Unimplemented => {
                shared.unsupported.store(true, Relaxed);
                shared.fail_queued(&StreamError::Unsupported);
            }
            Err(status) => shared.fail_queued(&StreamError::NotExecuted(Failure::Connection(full_message(&status)))),
        }
    }
}

type OpenStream = (mpsc::Sender<Vec<u8>>, Streaming<Bytes>);

/// Opens a stream. Checks are sent only after the service has accepted the stream, so none are lost if it does not.
async fn open_stream(shared: &Shared, channel: Channel) -> Result<OpenStream, Status> {
    let (frames, receiver) = mpsc::channel(MAX_BUFFERED_FRAMES);
    let mut grpc = Grpc::new(channel);
    grpc.ready().await.map_err(|error| Status::from_error(error.into()))?;
    let mut request = tonic::Request::new(ReceiverStream::new(receiver));
    *request.metadata_mut() = shared.headers.clone();
    let path = PathAndQuery::from_static(STREAM);
    let response = grpc.streaming(request, path, Raw).await?;
    Ok((frames, response.into_inner()))
}

/// Sends queued checks and delivers responses until the stream ends.
async fn run_stream(shared: Arc<Shared>, frames: mpsc::Sender<Vec<u8>>, mut responses: Streaming<Bytes>) {
    let mut pending = Pending::default();
    let error = loop {
        let empty = shared.is_empty();
        if empty && shared.is_closed() {
            return;
        }
        tokio::select! {
            biased;
            response = responses.message() => match response {
                Ok(Some(frame)) => {
                    if let Err(error) = pending.deliver(&frame) {
                        let failure = Failure::Connection(format!("invalid ResponseFrame: {error}"));
                        break StreamError::MaybeExecuted(failure);
                    }
                }
                Ok(None) => break StreamError::StreamEnded,
                Err(status) => break StreamError::MaybeExecuted(Failure::Connection(full_message(&status))),
            },
            permit = frames.reserve(), if !empty => {
                let Ok(permit) = permit else {
                    break StreamError::MaybeExecuted(Failure::Connection("the stream was closed".into()));
                };
                // Tasks that are ready now queue their checks before the frame is taken.
                yield_now().await;
                if let Some(Outgoing { bytes, first_id, waiting }) = shared.take() {
                    pending.add(first_id, waiting);
                    permit.send(bytes);
                }
            }
            () = shared.ready.notified(), if empty => {}
        }
    };
    pending.fail(&error);
}

/// Checks that wait for a response, indexed by consecutive ids starting at `first_id`.
#[derive(Default)]
struct Pending {
    first_id: u64,
    waiting: VecDeque<Option<oneshot::Sender<CheckResult>>>,
}

impl Pending {
    /// Adds the checks of a frame. Frames are sent in the order of their ids, and a new stream continues the ids of the
    /// last.
    fn add(&mut self, first_id: u64, waiting: Vec<oneshot::Sender<CheckResult>>) {
        self.drop_completed();
        if self.waiting.is_empty() {
            self.first_id = first_id;
        }
        // The ids in between belong to checks that failed before they were sent.
        while self.first_id + (self.waiting.len() as u64) < first_id {
            self.waiting.push_back(None);
        }
        self.waiting.extend(waiting.into_iter().map(Some));
    }

    fn take(&mut self, id: u64) -> Option<oneshot::Sender<CheckResult>> {
        let index = usize::try_from(id.checked_sub(self.first_id)?).ok()?;
        self.waiting.get_mut(index)?.take()
    }

    /// Removes answered and cancelled checks from the front.
    fn drop_completed(&mut self) {
        while self.waiting.front().is_some_and(|waiting| waiting.as_ref().is_none_or(oneshot::Sender::is_closed)) {
            self.waiting.pop_front();
            self.first_id += 1;
        }
    }

    /// Delivers the `responses` of a `ResponseFrame`.
    fn deliver(&mut self, frame: &[u8]) -> Result<(), Malformed> {
        for field in Fields::new(frame) {
            let (1, response) = field? else {
                continue;
            };
            let CheckResponse { id, result } = read_response(response.message()?)?;
            // A check may have been cancelled, and an id may be unknown.
            if let Some(waiting) = self.take(id) {
                let _ = waiting.send(result);
            }
        }
        Ok(())
    }

    fn fail(self, error: &StreamError) {
        for waiting in self.waiting.into_iter().flatten() {
            let _ = waiting.send(Err(error.clone()));
        }
    }
}

/// Message for a response with neither a verdict nor an error.
const NO_VERDICT: &str = "response without a verdict";

/// The response to the check with this id.
struct CheckResponse {
    id: u64,
    result: CheckResult,
}

/// Decodes a `CheckResponse`: `id`, and `verdict` or `error`.
fn read_response(fields: Fields<'_>) -> Result<CheckResponse, Malformed> {
    let mut id = 0;
    let mut verdict = None;
    let mut code = Code::Unknown;
    let mut message = NO_VERDICT;
    for field in fields {
        match field? {
            (1, value) => id = value.number()?,
            (2, value) => verdict = Some(Verdict::read(value.message()?)?),
            (3, value) => {
                code = Code::Ok;
                message = "";
                for field in value.message()? {
                    match field? {
                        (1, value) => code = Code::from(value.number()? as i32),
                        (2, value) => message = value.text()?,
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    let result = match verdict {
        Some(verdict) => Ok(verdict),
        None => Err(StreamError::Rejected(Failure::Service { code, message: message.to_owned() })),
    };
    Ok(CheckResponse { id, result })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use prost::Message;
    use sluicegate_proto::sluicegate::v1::{self, check_response::Outcome};

    use super::*;
    use crate::verdict::GrantOffer;

    fn waiting() -> (oneshot::Sender<CheckResult>, oneshot::Receiver<CheckResult>) {
        oneshot::channel()
    }

    #[test]
    fn a_response_is_delivered_to_the_check_with_its_id() {
        let mut pending = Pending::default();
        let ((first, mut one), (second, mut other)) = (waiting(), waiting());
        pending.add(7, vec![first]);
        // Checks 8 to 10 were never sent.
        pending.add(11, vec![second]);
        assert!([0, 6, 8, 10, 12, u64::MAX].into_iter().all(|id| pending.take(id).is_none()));
        let waiting = pending.take(11).expect("the second");
        assert!(waiting.send(Err(StreamError::StreamEnded)).is_ok());
        assert!(matches!(other.try_recv(), Ok(Err(StreamError::StreamEnded))));
        assert!(pending.take(11).is_none(), "each check gets one response");
        pending.fail(&StreamError::Unsupported);
        assert!(matches!(one.try_recv(), Ok(Err(StreamError::Unsupported))));
    }

    /// Decodes a frame that prost encoded, with every field set.
    #[test]
    fn responses_contain_all_fields() {
        let limit = v1::Limit { requests_per_unit: 5, unit: 7, unit_multiplier: 3, name: "few".into(), requests: 0 };
        let full = v1::Status {
            allowed: true,
            limit: Some(limit),
            remaining: 1 << 40,
            reset_us: Some(0),
            retry_after_us: Some(2),
            delay_us: 3,
            soft: true,
            decider: v1::Decider::Fallback.into(),
            override_kind: v1::OverrideKind::Deny.into(),
            denial_counts: true,
            grant: Some(v1::Grant { hits: 4, ttl_us: 5, id: "it".into() }),
            shed: true,
            elastic: true,
            others: vec![v1::Status { remaining: 9, others: vec![v1::Status::default()], ..v1::Status::default() }],
        };
        let verdict = v1::Verdict {
            allowed: true,
            denial: Some(v1::Denial { status: 402, message: "pay".into() }),
            statuses: vec![full, v1::Status { remaining: 6, ..v1::Status::default() }],
            response_headers_to_add: vec![v1::Header { name: "a".into(), value: "b".into() }],
        };
        let outcomes = [
            Some(Outcome::Verdict(verdict)),
            Some(Outcome::Error(v1::Error { code: 8, message: "too many".into() })),
            Some(Outcome::Error(v1::Error::default())),
            None,
        ];
        let (waiting, results): (Vec<_>, Vec<_>) = outcomes.iter().map(|_| waiting()).unzip();
        let mut pending = Pending::default();
        pending.add(0, waiting);
        let response = |(id, outcome)| v1::CheckResponse { id, outcome };
        let frame = v1::ResponseFrame { responses: (0..).zip(outcomes).map(response).collect() };
        // Unknown fields are appended.
        let frame = [frame.encode_to_vec(), vec![0x15, 1, 2, 3, 4, 0x78, 1]].concat();
        assert_eq!(pending.deliver(&frame), Ok(()));
        let mut results = results.into_iter().map(|mut result| result.try_recv().unwrap());
        let verdict = results.next().unwrap().unwrap();
        let micros = Duration::from_micros;
        let window = Duration::from_secs(3 * 7 * 86_400);
        let full = crate::Status {
            allowed: true,
            limit: Some(crate::Limit { requests_per_unit: 5, window, name: Some("few".into()) }),
            remaining: 1 << 40,
            reset: Some(Duration::ZERO),
            retry_after: Some(micros(2)),
            delay: micros(3),
            soft: true,
            elastic: true,
            shed: true,
            fallback: true,
            denial_counts: true,
            overridden: true,
            whole_seconds: false,
            grant: Some(GrantOffer { hits: 4, ttl: micros(5), id: "it".into() }),
            others: vec![crate::Status { remaining: 9, ..crate::Status::default() }],
        };
        let denial = crate::Denial { status: Some(402), message: "pay".into() };
        assert_eq!(verdict.denial(), Some(&denial));
        assert_eq!(verdict.statuses(), [full, crate::Status { remaining: 6, ..crate::Status::default() }]);
        assert_eq!((verdict.allowed(), verdict.decided_by()), (true, crate::DecidedBy::Server));
        assert_eq!(verdict.headers(), [("a".to_owned(), "b".to_owned())]);
        let errors = [(Code::ResourceExhausted, "too many"), (Code::Ok, ""), (Code::Unknown, NO_VERDICT)];
        for ((code, message), result) in errors.into_iter().zip(results) {
            let expected = Failure::Service { code, message: message.into() };
            assert!(matches!(&result, Err(StreamError::Rejected(failure)) if *failure == expected), "{result:?}");
        }
        assert_eq!(Pending::default().deliver(&frame[..frame.len() - 1]), Err(Malformed::Truncated));
    }

    /// The frame is complete, and only the verdict in it is not.
    #[test]
    fn a_malformed_status_or_header_is_an_error() {
        let malformed_status = [0x0A, 6, 0x12, 4, 0x12, 2, 0x18, 0x80];
        let status_of_wrong_type = [0x0A, 4, 0x12, 2, 0x10, 1];
        let malformed_header = [0x0A, 5, 0x12, 3, 0x1A, 1, 0x0A];
        for (frame, error) in [
            (&malformed_status[..], Malformed::Truncated),
            (&status_of_wrong_type[..], Malformed::Type),
            (&malformed_header[..], Malformed::Truncated),
        ] {
            let (sender, mut result) = waiting();
            let mut pending = Pending::default();
            pending.add(0, vec![sender]);
            assert_eq!(pending.deliver(frame), Err(error), "{frame:x?}");
            assert!(result.try_recv().is_err(), "no verdict");
        }
    }

    #[test]
    fn answered_and_cancelled_checks_are_removed() {
        let mut pending = Pending::default();
        for id in 0..1_000 {
            let (sender, receiver) = waiting();
            pending.add(id, vec![sender]);
            drop(receiver);
        }
        assert_eq!((pending.waiting.len(), pending.first_id), (1, 999));
    }

    fn connection() -> StreamConnection {
        let channel = Channel::from_static("http://127.0.0.1:1").connect_lazy();
        StreamConnection::start(channel, tonic::metadata::MetadataMap::new())
    }

    fn request() -> CheckRequest<'static> {
        let descriptors = std::iter::once(crate::descriptor! { "user" => "alice" }).collect();
        CheckRequest { domain: "d".into(), descriptors, hits: 1, traceparent: None, feedback: Vec::new() }
    }

    #[tokio::test]
    async fn checks_share_a_frame_until_it_is_full() {
        let (connection, request) = (connection(), request());
        let queue_check = || {
            let mut check = Box::pin(connection.check(&request));
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            assert!(check.as_mut().poll(&mut context).is_pending());
            connection.shared.queue().frames.iter().map(|frame| frame.waiting.len()).collect::<Vec<_>>()
        };
        assert_eq!(queue_check(), [1]);
        connection.shared.queue().frames[0].bytes.resize(FRAME_BYTES - 1, 0);
        assert_eq!(queue_check(), [2]);
        assert_eq!(queue_check(), [2, 1]);
        assert!(connection.shared.take().is_none(), "all checks have been cancelled");
        assert_eq!(connection.shared.queue().waiting, 0);
    }

    #[tokio::test]
    async fn a_check_that_exceeds_the_queue_is_not_sent() {
        let connection = connection();
        connection.shared.queue().waiting = MAX_QUEUED;
        let result = connection.check(&request()).await;
        assert!(matches!(result, Err(StreamError::NotExecuted(Failure::Overloaded))), "{result:?}");
    }

    #[tokio::test]
    async fn a_failure_to_connect_does_not_show_that_streams_are_unsupported() {
        let connection = connection();
        let result = connection.check(&request()).await;
        assert!(matches!(result, Err(StreamError::NotExecuted(Failure::Connection(_)))), "{result:?}");
        assert!(!connection.is_unsupported());
    }
}
