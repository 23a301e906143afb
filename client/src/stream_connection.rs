//! Checks that are ready at the same moment travel together, in one frame of one long-lived stream.
//!
//! Nothing waits for company: the task that sends runs after every other task that is ready now, and takes what they
//! left. Whether the service has streams is found out by the first frame; if it has not, what that frame held is asked again
//! by calls of its own, and so is all that follows.
//!
//! ## Idle ⟶ Open ⟶ Idle
//! The first check opens the stream. When the service ends it in order, what has no answer did not run, and goes into the
//! next one. When it breaks, what was sent may have run: it fails; what was not sent goes into the next one.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use bytes::Bytes;
use sluicegate_common::wire::{Fields, Malformed, Writer};
use tokio::{
    sync::{Notify, mpsc, oneshot},
    task::yield_now,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming, client::Grpc, codegen::http::uri::PathAndQuery, transport::Channel};

use crate::{
    check_request::CheckRequest,
    raw::Raw,
    verdict::{Failure, Verdict, text},
};

const STREAM: &str = "/sluicegate.v1.DecisionService/Stream";
/// Checks that wait to be sent, at most: more would be answered too late to be of use.
const QUEUE: usize = 16_384;
/// A frame is sent when it has so many bytes; the service takes 256 KiB by default.
const FRAME: usize = 64 * 1024;
/// Frames that the connection has not taken yet.
const FRAMES: usize = 4;

/// What becomes of a check on its way.
#[derive(Clone, Debug)]
pub(crate) enum StreamError {
    /// It was not sent, and may be asked in another way.
    NotRun(Failure),
    /// Nor was this, and nobody is to blame: the stream ended in order.
    Ended,
    /// The service has no streams: it is to be asked by a call of its own.
    NoStream,
    /// It was sent: perhaps it ran.
    Perhaps(Failure),
    /// The service has answered, with an error.
    Refused(Failure),
}

type Answer = Result<Verdict, StreamError>;

pub(crate) struct StreamConnection {
    shared: Arc<Shared>,
}

struct Shared {
    queue: Mutex<Queue>,
    ready: Notify,
    /// The service has no streams.
    without: AtomicBool,
    headers: tonic::metadata::MetadataMap,
}

#[derive(Default)]
struct Queue {
    frames: VecDeque<Outgoing>,
    waiting: usize,
    next_id: u64,
    closed: bool,
}

/// A frame in the making, and who waits for its answers.
#[derive(Default)]
struct Outgoing {
    bytes: Vec<u8>,
    first_id: u64,
    waiting: Vec<oneshot::Sender<Answer>>,
}

impl StreamConnection {
    /// Its task lives as long as the lane, on the current runtime.
    pub(crate) fn start(channel: Channel, headers: tonic::metadata::MetadataMap) -> Self {
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            ready: Notify::new(),
            without: AtomicBool::new(false),
            headers,
        });
        tokio::spawn(run(Arc::downgrade(&shared), channel));
        Self { shared }
    }

    /// Whether the service is known to have no streams.
    pub(crate) fn is_without(&self) -> bool {
        self.shared.without.load(Relaxed)
    }

    pub(crate) async fn ask(&self, ask: &CheckRequest<'_>) -> Answer {
        let (sender, answer) = oneshot::channel();
        {
            let mut queue = self.shared.queue();
            if queue.closed || queue.waiting >= QUEUE {
                return Err(StreamError::NotRun(Failure::Overloaded));
            }
            let id = queue.next_id;
            queue.next_id += 1;
            queue.waiting += 1;
            if queue.frames.back().is_none_or(|frame| frame.bytes.len() >= FRAME) {
                queue.frames.push_back(Outgoing { first_id: id, ..Outgoing::default() });
            }
            if let Some(frame) = queue.frames.back_mut() {
                ask.write_check(id, &mut Writer(&mut frame.bytes));
                frame.waiting.push(sender);
            }
        }
        self.shared.ready.notify_one();
        // Only if the stream's task ended with its runtime; how far it had come nobody knows.
        answer
            .await
            .unwrap_or_else(|_| Err(StreamError::Perhaps(Failure::Connection("the client's runtime has ended".into()))))
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
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next frame that somebody still waits for.
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

    /// Everybody who waits to be sent is told why it is in vain.
    fn turn_away(&self, lost: &StreamError) {
        while let Some(frame) = self.take() {
            frame.waiting.into_iter().for_each(|waiting| drop(waiting.send(Err(lost.clone()))));
        }
    }
}

async fn run(lane: Weak<Shared>, channel: Channel) {
    while let Some(shared) = lane.upgrade() {
        if shared.is_empty() {
            if shared.is_closed() {
                return;
            }
            shared.ready.notified().await;
            continue;
        }
        match open(&shared, channel.clone()).await {
            Ok((frames, answers)) => converse(shared, frames, answers).await,
            Err(status) if status.code() == Code::Unimplemented => {
                shared.without.store(true, Relaxed);
                shared.turn_away(&StreamError::NoStream);
            }
            Err(status) => shared.turn_away(&StreamError::NotRun(Failure::Connection(text(&status)))),
        }
    }
}

type Open = (mpsc::Sender<Vec<u8>>, Streaming<Bytes>);

/// Nothing is sent before the service has answered that it takes a stream: nothing is lost if it does not.
async fn open(shared: &Shared, channel: Channel) -> Result<Open, Status> {
    let (frames, receiver) = mpsc::channel(FRAMES);
    let mut grpc = Grpc::new(channel);
    grpc.ready().await.map_err(|error| Status::from_error(error.into()))?;
    let mut request = tonic::Request::new(ReceiverStream::new(receiver));
    *request.metadata_mut() = shared.headers.clone();
    let path = PathAndQuery::from_static(STREAM);
    let response = grpc.streaming(request, path, Raw).await?;
    Ok((frames, response.into_inner()))
}

/// Sends and delivers until the stream ends.
async fn converse(shared: Arc<Shared>, frames: mpsc::Sender<Vec<u8>>, mut answers: Streaming<Bytes>) {
    let mut pending = Pending::default();
    let lost = loop {
        let empty = shared.is_empty();
        if empty && shared.is_closed() {
            return;
        }
        tokio::select! {
            biased;
            answer = answers.message() => match answer {
                Ok(Some(frame)) => {
                    if let Err(error) = pending.deliver(&frame) {
                        break StreamError::Perhaps(Failure::Connection(format!("this is no ResponseFrame: {error}")));
                    }
                }
                Ok(None) => break StreamError::Ended,
                Err(status) => break StreamError::Perhaps(Failure::Connection(text(&status))),
            },
            permit = frames.reserve(), if !empty => {
                let Ok(permit) = permit else {
                    break StreamError::Perhaps(Failure::Connection("the stream was closed".into()));
                };
                // Whoever is ready now comes along.
                yield_now().await;
                if let Some(Outgoing { bytes, first_id, waiting }) = shared.take() {
                    pending.add(first_id, waiting);
                    permit.send(bytes);
                }
            }
            () = shared.ready.notified(), if empty => {}
        }
    };
    pending.fail(&lost);
}

/// Who waits for an answer, by numbers that follow each other.
#[derive(Default)]
struct Pending {
    first: u64,
    waiting: VecDeque<Option<oneshot::Sender<Answer>>>,
}

impl Pending {
    /// Frames are sent in the order of their numbers, and a new stream begins where the old one ended.
    fn add(&mut self, first_id: u64, waiting: Vec<oneshot::Sender<Answer>>) {
        self.forget_those_who_left();
        if self.waiting.is_empty() {
            self.first = first_id;
        }
        // Numbers between were turned away unsent.
        while self.first + (self.waiting.len() as u64) < first_id {
            self.waiting.push_back(None);
        }
        self.waiting.extend(waiting.into_iter().map(Some));
    }

    fn take(&mut self, id: u64) -> Option<oneshot::Sender<Answer>> {
        let place = usize::try_from(id.checked_sub(self.first)?).ok()?;
        self.waiting.get_mut(place)?.take()
    }

    /// From the front: what is answered, and what nobody waits for any more.
    fn forget_those_who_left(&mut self) {
        while self.waiting.front().is_some_and(|waiting| waiting.as_ref().is_none_or(oneshot::Sender::is_closed)) {
            self.waiting.pop_front();
            self.first += 1;
        }
    }

    /// The `answers` of an `ResponseFrame`.
    fn deliver(&mut self, frame: &[u8]) -> Result<(), Malformed> {
        for field in Fields::of(frame) {
            let (1, answer) = field? else {
                continue;
            };
            let (id, answer) = read_answer(answer.message()?)?;
            // Nobody, if it was given up, or is an answer to nobody's question.
            if let Some(waiting) = self.take(id) {
                let _ = waiting.send(answer);
            }
        }
        Ok(())
    }

    fn fail(self, lost: &StreamError) {
        self.waiting.into_iter().flatten().for_each(|waiting| drop(waiting.send(Err(lost.clone()))));
    }
}

/// Of an answer that has neither.
const WITHOUT: &str = "an answer without a verdict";

/// `id`, and `verdict` or `error`.
fn read_answer(fields: Fields<'_>) -> Result<(u64, Answer), Malformed> {
    let (mut id, mut code, mut message) = (0, Code::Unknown, WITHOUT);
    let mut verdict = None;
    for field in fields {
        match field? {
            (1, value) => id = value.number()?,
            (2, value) => verdict = Some(Verdict::read(value.message()?)?),
            (3, value) => {
                (code, message) = (Code::Ok, "");
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
    let refused = || StreamError::Refused(Failure::Service { code, message: message.to_owned() });
    Ok((id, verdict.ok_or_else(refused)))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use prost::Message;
    use sluicegate_proto::sluicegate::v1::{self, check_response::Outcome};

    use super::*;
    use crate::grants::GrantOffer;

    fn waiting() -> (oneshot::Sender<Answer>, oneshot::Receiver<Answer>) {
        oneshot::channel()
    }

    #[test]
    fn everybody_has_the_answer_of_their_number() {
        let mut pending = Pending::default();
        let ((first, mut one), (second, mut other)) = (waiting(), waiting());
        pending.add(7, vec![first]);
        // 8 to 10 were never sent.
        pending.add(11, vec![second]);
        assert!([0, 6, 8, 10, 12, u64::MAX].into_iter().all(|id| pending.take(id).is_none()));
        let waiting = pending.take(11).expect("the second");
        assert!(waiting.send(Err(StreamError::Ended)).is_ok());
        assert!(matches!(other.try_recv(), Ok(Err(StreamError::Ended))));
        assert!(pending.take(11).is_none(), "one answer for each");
        pending.fail(&StreamError::NoStream);
        assert!(matches!(one.try_recv(), Ok(Err(StreamError::NoStream))));
    }

    /// What prost wrote is read, whatever is in it.
    #[test]
    fn answers_say_all_that_there_is() {
        let limit = v1::Limit { requests_per_unit: 5, unit: 7, unit_multiplier: 3, name: "few".into() };
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
        };
        let verdict = v1::Verdict {
            allowed: true,
            statuses: vec![full, v1::Status::default()],
            response_headers_to_add: vec![v1::Header { name: "a".into(), value: "b".into() }],
        };
        let outcomes = [
            Some(Outcome::Verdict(verdict)),
            Some(Outcome::Error(v1::Error { code: 8, message: "too many".into() })),
            Some(Outcome::Error(v1::Error::default())),
            None,
        ];
        let (waiting, answers): (Vec<_>, Vec<_>) = outcomes.iter().map(|_| waiting()).unzip();
        let mut pending = Pending::default();
        pending.add(0, waiting);
        let answer = |(id, outcome)| v1::CheckResponse { id, outcome };
        let frame = v1::ResponseFrame { responses: (0..).zip(outcomes).map(answer).collect() };
        // And fields that are not known here.
        let frame = [frame.encode_to_vec(), vec![0x15, 1, 2, 3, 4, 0x78, 1]].concat();
        assert_eq!(pending.deliver(&frame), Ok(()));
        let mut answers = answers.into_iter().map(|mut answer| answer.try_recv().unwrap());
        let verdict = answers.next().unwrap().unwrap();
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
            refusal_counts: true,
            coarse: false,
            grant: Some(GrantOffer { hits: 4, ttl: micros(5), id: "it".into() }),
        };
        assert_eq!(verdict.statuses(), [full, crate::Status::default()]);
        assert_eq!((verdict.allowed(), verdict.decided_by()), (true, crate::DecidedBy::Server));
        assert_eq!(verdict.headers(), [("a".to_owned(), "b".to_owned())]);
        let errors = [(Code::ResourceExhausted, "too many"), (Code::Ok, ""), (Code::Unknown, WITHOUT)];
        for ((code, message), answer) in errors.into_iter().zip(answers) {
            let failure = Failure::Service { code, message: message.into() };
            assert!(matches!(&answer, Err(StreamError::Refused(said)) if *said == failure), "{answer:?}");
        }
        assert_eq!(Pending::default().deliver(&frame[..frame.len() - 1]), Err(Malformed::Truncated));
    }

    #[test]
    fn what_is_answered_or_given_up_is_forgotten() {
        let mut pending = Pending::default();
        for id in 0..1_000 {
            let (sender, receiver) = waiting();
            pending.add(id, vec![sender]);
            drop(receiver);
        }
        assert_eq!((pending.waiting.len(), pending.first), (1, 999));
    }
}
