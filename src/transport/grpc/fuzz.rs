//! Fuzz targets: requests, frames of checks, and the bytes of an HTTP/2 connection.
#![allow(clippy::missing_panics_doc, reason = "every target panics if a promise is broken")]

use std::{
    cell::RefCell,
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use bytes::Bytes;
use prost::Message;
use sluicegate_proto::{envoy::service::ratelimit::v3::RateLimitResponse, sluicegate::v1};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, duplex},
    runtime::{self, Runtime},
    sync::watch,
    time::timeout,
};

use super::{
    Handler, Limits, QuotaService, ResourceService, ResponseSettings, Settings, build_tonic_services,
    caller_errors::CallerErrors,
    checker::Checker,
    connection::{ConnectionContext, serve_http2},
    decode::{decode, decode_by_hand, decode_with_prost},
    input::Budgets,
    message::PREFIX,
    quotas,
    response::Response,
    stream,
    texts::readable,
};
use crate::{
    engine::{Engine, Quota, Statistics, StatisticsSettings, TopEntities},
    metrics::WorkerId,
    rules::{Options, SourceFile},
    service::{
        Check, Clock, Quotas, ResourceReports, check,
        quotas::{BucketAction, Settings as QuotaSettings},
        reload::Reloader,
        source::Source,
    },
    store::{AnyStore, Memory, memory},
    telemetry::Traces,
    transport::{connections::Connections, input::Settings as InputSettings},
};

/// Rules with each kind of limit.
const RULES: &str = include_str!("../../../fuzz/rules.yaml");
/// The preface of a client, which every connection begins with.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Time after which a connection counts as hung.
const TIMEOUT: Duration = Duration::from_secs(20);

thread_local! {
    static SERVICE: RefCell<Option<Service>> = const { RefCell::new(None) };
}

/// The service of one thread, with counters in memory.
struct Service {
    runtime: Runtime,
    checker: Arc<Checker>,
    handler: Arc<Handler>,
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
        let statistics = Statistics::new(1, StatisticsSettings { max_dynamic_series: 100, near_limit_ratio: 0.8 });
        let source = Source::BuiltIn(vec![SourceFile { name: "rules.yaml".into(), text: RULES.into() }]);
        let reloader =
            Reloader::start(source, Options::default(), clock.clone(), Arc::clone(&statistics), Arc::default())
                .unwrap_or_else(|error| panic!("fuzz/rules.yaml: {error}"));
        let memory = Arc::new(Memory::new(&memory::Settings { max_counters: 10_000 }));
        let engine = Engine {
            worker: WorkerId(0),
            scope: "",
            store: AnyStore::Memory(Arc::clone(&memory)),
            local: memory,
            rules: Arc::clone(reloader.rules()),
            statistics,
            top: Some(TopEntities::new(1)),
            settings: Arc::default(),
        };
        let reports = ResourceReports { engine: engine.clone(), clock: clock.clone(), resources: Arc::default() };
        let check = Check { engine, clock, metrics: check::Metrics::new(1), recorder: None };
        let response = ResponseSettings { headers: true, dynamic_metadata: true, ..ResponseSettings::default() };
        let runtime = runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.unwrap_or_else(|error| panic!("{error}"));
        let (stop, stopping) = watch::channel(false);
        let quotas = Quotas::new(check.engine.clone(), check.clock.clone(), QuotaSettings::default());
        let services = async {
            let (_, tonic_services) = build_tonic_services(ResourceService::new(reports)).await;
            (QuotaService::new(quotas.clone(), Limits::default(), Arc::default(), stopping), tonic_services)
        };
        let (quota_service, tonic_services) = runtime.block_on(services);
        let checker = Arc::new(Checker::new(
            check.clone(),
            Limits::default(),
            response.clone(),
            Traces::default(),
            Arc::default(),
        ));
        let handler = Handler::new(
            check,
            Limits::default(),
            response,
            Traces::default(),
            quota_service,
            tonic_services,
            Arc::default(),
        );
        Self { runtime, checker, handler, quotas, _stop: stop }
    }
}

/// Decodes and decides a `RateLimitRequest`. It must be decoded as prost does, and the response must have a status for
/// each descriptor.
pub fn check_request(input: &[u8]) {
    assert_eq!(decode_by_hand(input), decode_with_prost(input));
    let message = readable(input).unwrap_or_default();
    let valid = decode(&message, &Limits::default()).ok();
    let valid = valid.filter(|request| !request.domain.is_empty() && !request.descriptors.is_empty());
    let response = Service::with(|service| Checker::finish(service.checker.respond(input, Vec::new(), None)));
    let statuses = match response {
        Ok(Response::Message { data, .. }) => RateLimitResponse::decode(&data[PREFIX..]).ok(),
        Ok(_) | Err(_) => None,
    };
    assert_eq!(statuses.map(|response| response.statuses.len()), valid.map(|request| request.descriptors.len()));
}

/// Decides a frame of checks. Each check that prost reads must have one response with its id.
pub fn check_frame(input: &[u8]) {
    Service::with(|service| {
        let responses = stream::decide_frame(&service.checker, &Bytes::copy_from_slice(input));
        let Ok(frame) = v1::CheckFrame::decode(input) else {
            return;
        };
        let responses = responses.ok().and_then(|bytes| v1::ResponseFrame::decode(bytes).ok()).unwrap_or_default();
        let mut expected: Vec<u64> = frame.checks.iter().map(|check| check.id).collect();
        let mut answered: Vec<u64> = responses.responses.iter().map(|response| response.id).collect();
        expected.sort_unstable();
        answered.sort_unstable();
        assert_eq!(answered, expected);
    });
}

/// Reports the usage of buckets on a new stream. The reports must be read as prost does. Each has at most one answer, and
/// the token buckets in the answers are valid for Envoy.
pub fn quota_reports(input: &[u8]) {
    let Ok((domain, usages)) = quotas::read(input, Limits::default()) else {
        return;
    };
    if let Some(expected) = quotas::read_with_prost(input) {
        assert_eq!((domain.clone().into_owned(), usages.clone()), expected);
    }
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

/// Sends bytes to a connection, after the preface. The first byte selects whether the others are sent as they are, or as
/// frames: each with one byte for its length, its type, its flags and its stream. The connection must end.
pub fn http2(input: &[u8]) {
    let Some((&raw, input)) = input.split_first() else {
        return;
    };
    let mut bytes = PREFACE.to_vec();
    if raw & 1 == 1 {
        bytes.extend_from_slice(input);
    } else {
        write_frames(input, &mut bytes);
    }
    Service::with(|service| {
        service.runtime.block_on(async {
            let (mut client, server) = duplex(1 << 20);
            let (_stop, stopping) = watch::channel(false);
            let (settings, errors) = (Settings::default(), Arc::<CallerErrors>::default());
            let input = InputSettings::default();
            let budgets = Budgets::new(input.budget(), input.streams(), &settings.limits);
            let slot = Arc::new(Connections::new(1, "fuzz").open(None));
            let context = ConnectionContext { errors, budgets, slot, shutdown: stopping };
            let serving = serve_http2(server, Arc::clone(&service.handler), &settings, context);
            let calling = async {
                // The connection may be closed before everything is sent.
                let _ = client.write_all(&bytes).await;
                let _ = client.shutdown().await;
                let mut received = Vec::new();
                let _ = client.read_to_end(&mut received).await;
            };
            let ended = timeout(TIMEOUT, async { tokio::join!(serving, calling) }).await;
            assert!(ended.is_ok(), "the connection did not end");
        });
    });
}

/// Converts compact frames into those of HTTP/2 (RFC 9113, section 4.1), beginning with empty SETTINGS.
fn write_frames(mut input: &[u8], bytes: &mut Vec<u8>) {
    bytes.extend_from_slice(&[0, 0, 0, 4, 0, 0, 0, 0, 0]);
    while let [length, kind, flags, stream, payload @ ..] = input {
        let (payload, rest) = payload.split_at(payload.len().min(usize::from(*length)));
        bytes.extend_from_slice(&[0, 0, payload.len() as u8, kind % 10, *flags, 0, 0, 0, *stream]);
        bytes.extend_from_slice(payload);
        input = rest;
    }
}
