//! Fuzz targets: requests, frames of checks, and the bytes of an HTTP/2 connection.
#![allow(clippy::missing_panics_doc, reason = "every target panics if a promise is broken")]

use std::{
    cell::RefCell,
    io,
    sync::{Arc, atomic::AtomicU64},
    task::{Context, Poll, Waker},
    time::Duration,
};

use allocation_counter::opt_out;
use bytes::Bytes;
use prost::Message;
use sluicegate_proto::{envoy::service::ratelimit::v3::RateLimitResponse, sluicegate::v1};
use sluicegate_wire::Writer;
use tokio::{
    io::{AsyncWrite, AsyncWriteExt, DuplexStream, WriteHalf, copy, duplex, sink, split},
    runtime::{self, Runtime},
    sync::watch,
    task::yield_now,
    time::timeout,
};

use super::{
    QuotaService, ResourceService, ResponseSettings, Services, build_tonic_services,
    connections::Connections,
    decisions::{MAX_CHECKS, MessageDecider, decide_frame, decode, decode_by_hand, decode_with_prost},
    errors::RequestError,
    grpc::{
        AnyAuthority, Budgets, ConnectionContext, Limits, Response, Settings,
        message::{PREFIX, unframe},
        serve_http2,
    },
    input::Settings as InputSettings,
    quotas,
    texts::readable,
};
use crate::{
    engine::{Engine, Quota, Statistics, StatisticsSettings, TopEntities},
    metrics::WorkerId,
    rules::{Options, SourceFile, source::Source},
    service::{
        Clock, Decisions, Quotas, ResourceReports, decisions,
        quotas::{BucketAction, Settings as QuotaSettings},
        reload::RulesInForce,
    },
    store::{AnyStore, Memory, memory},
    telemetry::Traces,
};

/// Rules with each kind of limit.
const RULES: &str = include_str!("../../fuzz/rules.yaml");
/// The preface of a client, which every connection begins with.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// The overall code of a request that is denied.
const OVER_LIMIT: i32 = 2;
/// Number of bytes that a connection buffers in each direction. The service reads each part before the next one is sent, so
/// that it can return the flow-control windows, for which the sender does not wait.
const BUFFER_BYTES: usize = 16 << 10;
/// Maximum memory of unfinished input. Much less than the default, so that short inputs exceed it.
const INPUT_BYTES: usize = 2 << 20;
/// Memory that other callers do not hold: enough for a small call, but not for a large frame.
const FREE_BYTES: usize = 8 << 10;
/// Limits of connections, with smaller messages than the default ones.
const LIMITS: Limits = Limits {
    max_message_bytes: 256 << 10,
    max_frame_bytes: 256 << 10,
    max_descriptors: 128,
    max_entries: 32,
    max_text_bytes: 1024,
};
/// Time after which a connection counts as hung.
const TIMEOUT: Duration = Duration::from_secs(20);

thread_local! {
    static SERVICE: RefCell<Option<Service>> = const { RefCell::new(None) };
}

/// The service of one thread, with counters in memory.
struct Service {
    runtime: Runtime,
    decider: Arc<MessageDecider>,
    handler: Arc<Services>,
    quotas: Quotas,
    /// Dropped with the service, so that streams do not end before.
    _stop: watch::Sender<bool>,
}

impl Service {
    /// Calls `run` with the service of this thread.
    fn with<T>(run: impl FnOnce(&Self) -> T) -> T {
        SERVICE.with_borrow_mut(|service| run(service.get_or_insert_with(Self::start)))
    }

    fn start() -> Self {
        let clock = Clock::Manual(Arc::new(AtomicU64::new(1_763_672_400_000_000)));
        let statistics = Statistics::new(1, StatisticsSettings { max_dynamic_series: 700, near_limit_ratio: 0.8 });
        let source = Source::BuiltIn(vec![SourceFile { name: "rules.yaml".into(), text: RULES.into() }]);
        let in_force =
            RulesInForce::start(source, Options::default(), clock.clone(), Arc::clone(&statistics), Arc::default())
                .unwrap_or_else(|error| panic!("fuzz/rules.yaml: {error}"));
        let memory = Arc::new(Memory::new(&memory::Settings { max_counters: 10_000 }));
        let engine = Engine {
            worker: WorkerId(0),
            scope: "",
            store: AnyStore::Memory(Arc::clone(&memory)),
            local: memory,
            rules: Arc::clone(in_force.snapshot()),
            statistics,
            top: Some(TopEntities::new(1)),
            settings: Arc::default(),
        };
        let reports = ResourceReports { engine: engine.clone(), clock: clock.clone(), resources: Arc::default() };
        let decisions = Decisions { engine, clock, metrics: decisions::Metrics::new(1), recorder: None };
        let response = ResponseSettings { headers: true, dynamic_metadata: true, ..ResponseSettings::default() };
        let runtime = runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.unwrap_or_else(|error| panic!("{error}"));
        let (stop, stopping) = watch::channel(false);
        let quotas = Quotas::new(decisions.engine.clone(), decisions.clock.clone(), QuotaSettings::default());
        let services = async {
            let (_, tonic_services) = build_tonic_services(ResourceService::new(reports)).await;
            (QuotaService::new(quotas.clone(), Limits::default(), Arc::default(), stopping), tonic_services)
        };
        let (quota_service, tonic_services) = runtime.block_on(services);
        let decider = Arc::new(MessageDecider::new(
            decisions.clone(),
            Limits::default(),
            response.clone(),
            Traces::default(),
            Arc::default(),
        ));
        let handler = Services::new(
            decisions,
            LIMITS,
            response,
            Traces::default(),
            quota_service,
            tonic_services,
            Arc::default(),
        );
        Self { runtime, decider, handler, quotas, _stop: stop }
    }

    fn respond(&self, message: &[u8]) -> Result<Response, RequestError> {
        let memory =
            self.decider.memory().ok_or_else(|| RequestError::unavailable("the counters are not in memory"))?;
        self.decider.respond_in(memory, message, Vec::new(), None)
    }

    /// Serves a connection until its caller ends it, as on a Unix socket or on TCP. Other callers hold all memory for
    /// unfinished input but `free_bytes`.
    async fn serve(
        &self,
        is_unix: bool,
        free_bytes: usize,
        calling: impl AsyncFnOnce(&mut WriteHalf<DuplexStream>),
        received: &mut (impl AsyncWrite + Unpin),
    ) {
        let (client, server) = duplex(BUFFER_BYTES);
        let (_stop, stopping) = watch::channel(false);
        let settings = Settings { limits: LIMITS, ..Settings::default() };
        let memory = InputSettings { max_bytes: INPUT_BYTES };
        let messages = memory.budget();
        let mut others = messages.reservation();
        let held_bytes = messages.max_bytes().saturating_sub(free_bytes);
        let taken = others.poll_grow(held_bytes, &Context::from_waker(Waker::noop()));
        assert!(matches!(taken, Poll::Ready(Ok(()))));
        others.keep();
        let budgets = Budgets::new(messages, memory.streams(), &settings.limits);
        let open_connection = Arc::new(Connections::new(1, "fuzz").open(None));
        let context = ConnectionContext { errors: Arc::default(), budgets, open_connection, shutdown: stopping };
        let handler = Arc::clone(&self.handler);
        let serving = async {
            if is_unix {
                serve_http2(AnyAuthority::new(server), handler, &settings, context).await;
            } else {
                serve_http2(server, handler, &settings, context).await;
            }
        };
        let (mut responses, mut requests) = split(client);
        let calling = async {
            calling(&mut requests).await;
            let _ = requests.shutdown().await;
        };
        let receiving = copy(&mut responses, received);
        let ended = timeout(TIMEOUT, async { tokio::join!(serving, calling, receiving) }).await;
        assert!(ended.is_ok(), "the connection did not end");
        // The tasks of its streams end, too, so that the next run does not free their memory.
        for _ in 0..100 {
            yield_now().await;
        }
    }
}

/// Decodes and decides a `RateLimitRequest`. It must be decoded as prost does, and the response must have a status for
/// each descriptor.
///
/// Also decides requests with the input as a key and as a value, which must be denied because of their other descriptor.
pub fn check_request(input: &[u8]) {
    // The memory of the comparison is not that of the service.
    opt_out(|| assert_eq!(decode_by_hand(input), decode_with_prost(input)));
    let message = readable(input).unwrap_or_default();
    let valid = decode(&message, &Limits::default()).ok();
    let valid = valid.filter(|request| !request.domain.is_empty() && !request.descriptors.is_empty());
    let response = Service::with(|service| service.respond(input));
    let statuses = match response {
        Ok(Response::Message { data, .. }) => RateLimitResponse::decode(&data[PREFIX..]).ok(),
        Ok(_) | Err(_) => None,
    };
    assert_eq!(statuses.map(|response| response.statuses.len()), valid.map(|request| request.descriptors.len()));
    for (key, value) in entries_of(input) {
        let mut message = Vec::new();
        let mut request = Writer(&mut message);
        request.text(1, "api");
        request.message(2, |descriptor| write_entry(descriptor, key, value));
        request.message(2, |descriptor| write_entry(descriptor, b"blocked", value));
        let response = Service::with(|service| service.respond(&message));
        let Ok(Response::Message { data, .. }) = response else {
            panic!("there is no decision: {:?}", response.err());
        };
        let response = RateLimitResponse::decode(&data[PREFIX..]).unwrap_or_else(|error| panic!("{error}"));
        let codes: Vec<i32> = response.statuses.iter().map(|status| status.code).collect();
        assert_eq!((response.overall_code, codes.len(), codes.last()), (OVER_LIMIT, 2, Some(&OVER_LIMIT)));
    }
}

/// Returns entries with bytes as their key and as their value.
fn entries_of(bytes: &[u8]) -> [(&[u8], &[u8]); 2] {
    [(b"fixed", bytes), (bytes, b"x")]
}

/// Writes an entry into a descriptor or the name of a bucket.
fn write_entry(entries: &mut Writer<'_>, key: &[u8], value: &[u8]) {
    entries.message(1, |entry| {
        entry.message(1, |text| text.0.extend_from_slice(key));
        entry.message(2, |text| text.0.extend_from_slice(value));
    });
}

/// Decides a frame of checks. Each check that prost reads must have one response with its id, unless there are too many.
pub fn check_frame(input: &[u8]) {
    Service::with(|service| {
        let responses = decide_frame(&service.decider, &Bytes::copy_from_slice(input));
        opt_out(|| compare_ids(input, &responses));
    });
}

/// Compares the ids of the checks that prost reads with those of the responses.
fn compare_ids(frame: &[u8], responses: &Result<Bytes, RequestError>) {
    let Ok(frame) = v1::CheckFrame::decode(frame) else {
        return;
    };
    let bytes = match responses {
        Ok(bytes) => bytes.clone(),
        Err(_) if frame.checks.len() > MAX_CHECKS => return,
        Err(_) => Bytes::new(),
    };
    let responses = v1::ResponseFrame::decode(bytes).unwrap_or_default();
    let mut expected: Vec<u64> = frame.checks.iter().map(|check| check.id).collect();
    let mut answered: Vec<u64> = responses.responses.iter().map(|response| response.id).collect();
    expected.sort_unstable();
    answered.sort_unstable();
    assert_eq!(answered, expected);
}

/// Removes the prefix and the compression of a message. Its result must not be larger than the maximum.
pub fn framed_message(input: &[u8]) {
    if let Ok(message) = unframe(&Bytes::copy_from_slice(input), LIMITS.max_message_bytes) {
        assert!(message.len() <= LIMITS.max_message_bytes);
    }
}

/// Reports the usage of buckets on a new stream. The reports must be read as prost does. Each has at most one answer, and
/// the token buckets in the answers are valid for Envoy.
///
/// Also reports buckets with the input as a key and as a value. They must not prevent the quota of another bucket.
pub fn quota_reports(input: &[u8]) {
    let mut message = Vec::new();
    let mut reports = Writer(&mut message);
    reports.text(1, "api");
    for (key, value) in entries_of(input).into_iter().chain([(&b"blocked"[..], &b"x"[..])]) {
        reports.message(2, |usage| usage.message(1, |name| write_entry(name, key, value)));
    }
    let (domain, usages) = quotas::read(&message, Limits::default()).unwrap_or_else(|error| panic!("{error:?}"));
    let actions = Service::with(|service| {
        let mut session = service.quotas.session(None);
        let actions = service.runtime.block_on(session.report(&domain, usages));
        actions.unwrap_or_else(|error| panic!("{error}"))
    });
    let is_denied = actions.iter().any(|action| matches!(action, BucketAction::Assign(_, Quota::DenyAll, _)));
    assert!(is_denied, "{actions:?}");
    let Ok((domain, usages)) = quotas::read(input, Limits::default()) else {
        return;
    };
    opt_out(|| {
        if let Some(expected) = quotas::read_with_prost(input) {
            assert_eq!((domain.clone().into_owned(), usages.clone()), expected);
        }
    });
    let reports = usages.len();
    Service::with(|service| {
        let mut session = service.quotas.session(None);
        let actions = service.runtime.block_on(session.report(&domain, usages)).unwrap_or_default();
        assert!(actions.len() <= reports);
        for action in actions {
            if let BucketAction::Assign(_, Quota::TokenBucket(bucket), ttl) = action {
                assert!(bucket.max_tokens > 0 && bucket.tokens > 0 && bucket.interval_secs > 0, "{bucket:?}");
                assert!(ttl.as_secs() > 0);
            }
        }
    });
}

/// Sends bytes to a connection, after the preface. The connection must end.
///
/// The lowest bit of the first byte selects whether the others are sent as they are, or as frames: each with one byte for
/// its length, its type, its flags and its stream. With the next bit, other callers hold nearly all memory for unfinished
/// input. With the third one, the connection is one of a Unix socket.
pub fn http2(input: &[u8]) {
    let Some((&selector, input)) = input.split_first() else {
        return;
    };
    let free_bytes = if selector & 2 == 2 { FREE_BYTES } else { INPUT_BYTES };
    let calling = async |requests: &mut WriteHalf<DuplexStream>| {
        // The connection may be closed before everything is sent.
        let _ = match selector & 1 {
            0 => send_frames(requests, input).await,
            _ => send(requests, input).await,
        };
    };
    Service::with(|service| {
        service.runtime.block_on(service.serve(selector & 4 == 4, free_bytes, calling, &mut sink()));
    });
}

/// Sends the preface and bytes.
async fn send(connection: &mut WriteHalf<DuplexStream>, bytes: &[u8]) -> io::Result<()> {
    connection.write_all(PREFACE).await?;
    connection.write_all(bytes).await
}

/// Sends the preface, empty SETTINGS, and compact frames as those of HTTP/2 (RFC 9113, section 4.1).
async fn send_frames(connection: &mut WriteHalf<DuplexStream>, mut input: &[u8]) -> io::Result<()> {
    send(connection, &[0, 0, 0, 4, 0, 0, 0, 0, 0]).await?;
    while let [length, kind, flags, stream, payload @ ..] = input {
        let (payload, rest) = payload.split_at(payload.len().min(usize::from(*length)));
        connection.write_all(&[0, 0, payload.len() as u8, kind % 10, *flags, 0, 0, 0, *stream]).await?;
        connection.write_all(payload).await?;
        input = rest;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    const HEADERS: u8 = 1;

    /// Returns the frame with the headers of a gRPC call.
    fn headers(path: &str, stream: u8) -> Vec<u8> {
        let kind = b"application/grpc";
        // POST, http, and the path and the content type as literals (RFC 7541, appendix A).
        let block =
            [&[0x83, 0x86, 0x44, path.len() as u8], path.as_bytes(), &[0x5f, kind.len() as u8], &kind[..]].concat();
        [&[0, 0, block.len() as u8, HEADERS, 4, 0, 0, 0, stream], &block[..]].concat()
    }

    /// Lets the service read the bytes that were sent.
    async fn yield_for_service() {
        for _ in 0..100 {
            yield_now().await;
        }
    }

    /// A call is decided when its message has arrived, although other callers hold all memory.
    #[test]
    fn a_small_message_that_arrives_after_its_headers_needs_no_memory() {
        let headers = headers("/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit", 1);
        // The domain "api" and one descriptor without entries.
        let message = [0, 0, 0, 0, 7, 0x0a, 3, b'a', b'p', b'i', 0x12, 0];
        let calling = async |requests: &mut WriteHalf<DuplexStream>| {
            send(requests, &[&SETTINGS[..], &headers].concat()).await.unwrap();
            for part in message.chunks(6) {
                // The call waits for the next part.
                yield_for_service().await;
                let end = if part[0] == 0 { 0 } else { 1 };
                requests.write_all(&[0, 0, 6, 0, end, 0, 0, 0, 1]).await.unwrap();
                requests.write_all(part).await.unwrap();
            }
            yield_for_service().await;
        };
        let mut received = Vec::new();
        Service::with(|service| service.runtime.block_on(service.serve(false, 0, calling, &mut received)));
        // The metadata of the response has the decision of each descriptor.
        let decision = b"allowed";
        assert!(received.windows(decision.len()).any(|bytes| bytes == decision), "{received:?}");
    }

    /// Of the calls to tonic's services, 64 wait while other callers hold all memory. Cancelled ones make room for others.
    #[test]
    fn few_calls_to_tonic_wait_for_memory() {
        let call = |number: u8| headers("/grpc.health.v1.Health/Watch", 2 * number + 1);
        let cancel = |number: u8| [0, 0, 4, 3, 0, 0, 0, 0, 2 * number + 1, 0, 0, 0, 8];
        let calling = async |requests: &mut WriteHalf<DuplexStream>| {
            send(requests, &SETTINGS).await.unwrap();
            for number in 0..70 {
                requests.write_all(&call(number)).await.unwrap();
            }
            yield_for_service().await;
            for number in 0..10 {
                requests.write_all(&cancel(number)).await.unwrap();
            }
            yield_for_service().await;
            for number in 70..83 {
                requests.write_all(&call(number)).await.unwrap();
            }
            yield_for_service().await;
        };
        let mut received = Vec::new();
        Service::with(|service| service.runtime.block_on(service.serve(false, 0, calling, &mut received)));
        let mut answered = Vec::new();
        let mut frames = &received[..];
        while let [a, b, c, kind, _, _, _, _, stream, rest @ ..] = frames {
            if *kind == HEADERS {
                answered.push(*stream / 2);
            }
            frames = &rest[u32::from_be_bytes([0, *a, *b, *c]) as usize..];
        }
        // The first 64 wait, then the 10 that take the places of the cancelled ones.
        assert_eq!(answered, [64, 65, 66, 67, 68, 69, 80, 81, 82]);
    }
}
