//! [`CallerErrors`]: errors and unusual input of callers, each kind counted and logged once per episode.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::request_error::{ErrorKind, RequestError};
use crate::{
    engine::{MAX_PLAIN_BYTES, Request},
    metrics::{Instrument, Label, LogThrottle, Meter, Registrar},
    transport::texts::domain_of,
};

/// A number of events. The first one of each episode is logged.
#[derive(Default)]
struct Events {
    count: AtomicU64,
    log: LogThrottle,
}

impl Events {
    /// Counts events, and returns whether to log them.
    fn record(&self, count: u64) -> bool {
        self.count.fetch_add(count, Relaxed);
        self.log.should_log()
    }

    fn get(&self) -> u64 {
        self.count.load(Relaxed)
    }
}

/// Counters of the errors and of the unusual input of callers.
#[derive(Default)]
pub struct CallerErrors {
    by_kind: [Events; ErrorKind::ALL.len()],
    protocol: Events,
    unread: Events,
    long_values: Events,
    escaped_texts: Events,
}

impl CallerErrors {
    /// Registers the metrics with `meter`.
    pub fn observe(self: &std::sync::Arc<Self>, meter: &dyn Meter) {
        let registrar = Registrar { meter, source: self };
        let description = "gRPC connections that were closed because the caller violated HTTP/2 or exceeded its limits";
        registrar.counter("sluicegate_grpc_protocol_errors_total", description, |this| this.protocol.get());
        let description = "gRPC responses that were dropped because the caller did not read them";
        registrar.counter("sluicegate_grpc_unread_responses_total", description, |this| this.unread.get());
        let this = std::sync::Arc::clone(self);
        let description = "Values of more than 1,024 bytes in decided requests, and requests with texts that are not \
                           UTF-8 or look as if they were escaped";
        meter.register(Instrument::counter("sluicegate_unusual_values_total", description, move |observer| {
            observer.observe(this.long_values.get(), [Label::new("kind", "long")]);
            observer.observe(this.escaped_texts.get(), [Label::new("kind", "escaped")]);
        }));
        let this = std::sync::Arc::clone(self);
        let description = "Calls and checks without a decision because of an error of the caller, by kind of error";
        meter.register(Instrument::counter("sluicegate_caller_errors_total", description, move |observer| {
            for kind in ErrorKind::ALL {
                observer.observe(this.by_kind[kind as usize].get(), [Label::new("kind", kind.name())]);
            }
        }));
    }

    /// Counts the error of a call or of one check. Errors of the store are counted elsewhere.
    pub(crate) fn record(&self, error: &RequestError) {
        let Some(kind) = error.kind else {
            return;
        };
        if self.by_kind[kind as usize].record(1) {
            tracing::warn!(
                kind = kind.name(),
                domain = error.domain.as_deref().unwrap_or_default(),
                reason = error.message,
                "a call has no decision because of an error of its caller; sluicegate_caller_errors_total counts them"
            );
        }
    }

    /// Counts the long values of a request.
    pub(in crate::transport) fn record_long_values(&self, request: &Request<'_>) {
        let entries = request.descriptors.iter().flat_map(|descriptor| &descriptor.entries);
        let mut long = entries.filter(|entry| entry.value.len() > MAX_PLAIN_BYTES);
        let Some(first) = long.next() else {
            return;
        };
        if self.long_values.record(1 + long.count() as u64) {
            tracing::warn!(
                domain = request.domain,
                key = first.key,
                bytes = first.value.len(),
                "a request has a value of more than 1,024 bytes; it is decided, and shown with a digest in place of the \
                 rest; sluicegate_unusual_values_total counts such values"
            );
        }
    }

    /// Counts a request with texts that had to be escaped.
    pub(in crate::transport) fn record_escaped(&self, message: &[u8]) {
        if self.escaped_texts.record(1) {
            tracing::warn!(
                domain = domain_of(message),
                "a request has a text that is not UTF-8, or that looks like an escaped one; it is decided, and shown with \
                 backslashes; sluicegate_unusual_values_total counts such requests"
            );
        }
    }

    /// Counts a response that was dropped because the caller did not read it.
    pub(in crate::transport) fn record_unread(&self) {
        if self.unread.record(1) {
            tracing::warn!(
                "a caller does not read responses; each is dropped after grpc.send_timeout, and counted by \
                 sluicegate_grpc_unread_responses_total"
            );
        }
    }

    /// Counts the error of a connection if it made this side close the connection.
    pub(in crate::transport) fn record_protocol(&self, error: &h2::Error) {
        if !(error.is_go_away() && error.is_library()) {
            return;
        }
        if self.protocol.record(1) {
            tracing::warn!(
                reason = %error,
                "closing connections that violate HTTP/2 or exceed its limits; \
                 sluicegate_grpc_protocol_errors_total counts them"
            );
        }
    }
}
