//! [`MessageDecider`]: decodes and decides requests, and records the traces of their decisions.

use std::{borrow::Cow, sync::Arc};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};

use super::{ResponseSettings, decode, encode, feedback};
use crate::{
    engine::{self, Code, Feedback, MAX_PLAIN_BYTES, Verdict},
    service::{DecisionError, Decisions},
    store::Memory,
    telemetry::{Span, Traces},
    transport::{
        CallerErrors,
        errors::RequestError,
        grpc::{
            Limits, Response,
            message::{PREFIX, check_size, with_prefix},
        },
        texts::readable,
    },
};

/// Metadata of a response to a shed request. Envoy's protocol has no field for this.
const SHED_HEADER: HeaderName = HeaderName::from_static("sluicegate-shed");

/// Initial capacity for a response in bytes. A status without a name has some 20.
const INITIAL_CAPACITY: usize = 64;

/// The decoding, decisions and traces of the requests of one worker, for unary calls and for streams.
pub(in crate::transport) struct MessageDecider {
    decisions: Decisions,
    limits: Limits,
    response: ResponseSettings,
    traces: Traces,
    errors: Arc<CallerErrors>,
}

impl MessageDecider {
    pub(in crate::transport) const fn new(
        decisions: Decisions,
        limits: Limits,
        response: ResponseSettings,
        traces: Traces,
        errors: Arc<CallerErrors>,
    ) -> Self {
        Self { decisions, limits, response, traces, errors }
    }

    /// Returns the store if its counters are in memory, so that decisions need not wait.
    pub(in crate::transport) fn memory(&self) -> Option<&Memory> {
        self.decisions.engine.store.memory()
    }

    /// Decides one check of a frame, and waits for the store.
    pub(in crate::transport) async fn decide(
        &self,
        request: Bytes,
        feedback: Vec<Feedback>,
        span: Option<Span>,
    ) -> Result<Verdict, RequestError> {
        check_size(request.len(), self.limits.max_message_bytes)?;
        let message = self.readable(&request)?;
        self.decide_readable(&message, feedback, span).await
    }

    /// Decides one check of a frame with counters in memory.
    pub(in crate::transport) fn decide_in(
        &self,
        memory: &Memory,
        request: &Bytes,
        feedback: Vec<Feedback>,
        span: Option<Span>,
    ) -> Result<Verdict, RequestError> {
        check_size(request.len(), self.limits.max_message_bytes)?;
        let message = self.readable(request)?;
        self.decide_readable_in(memory, &message, feedback, span)
    }

    /// Decides one request, waits for the store, and encodes the response of Envoy's protocol.
    pub(in crate::transport) async fn respond(
        &self,
        message: &[u8],
        feedback: Vec<Feedback>,
        span: Option<Span>,
    ) -> Result<Response, RequestError> {
        let message = &*self.readable(message)?;
        let verdict = self.decide_readable(message, feedback, span).await?;
        Ok(self.encode(message, &verdict))
    }

    /// Decides one request with counters in memory, and encodes the response of Envoy's protocol.
    pub(in crate::transport) fn respond_in(
        &self,
        memory: &Memory,
        message: &[u8],
        feedback: Vec<Feedback>,
        span: Option<Span>,
    ) -> Result<Response, RequestError> {
        let message = &*self.readable(message)?;
        let verdict = self.decide_readable_in(memory, message, feedback, span)?;
        Ok(self.encode(message, &verdict))
    }

    fn encode(&self, message: &[u8], verdict: &Verdict) -> Response {
        let mut metadata = HeaderMap::new();
        feedback::write_ttls(verdict, &mut metadata);
        if verdict.is_shed() {
            metadata.insert(SHED_HEADER, HeaderValue::from_static("true"));
        }
        let metadata = if metadata.is_empty() { None } else { Some(Box::new(metadata)) };
        let mut data = Vec::with_capacity(INITIAL_CAPACITY);
        data.resize(PREFIX, 0);
        encode(verdict, message, &self.response, &mut data);
        Response::Message { data: with_prefix(data), metadata }
    }

    /// Returns the message with texts in UTF-8: others are escaped, and counted.
    fn readable<'m>(&self, message: &'m [u8]) -> Result<Cow<'m, [u8]>, RequestError> {
        let readable = readable(message).map_err(|error| RequestError::from(error).with_domain_of(message))?;
        if matches!(readable, Cow::Owned(_)) {
            self.errors.record_escaped(message);
        }
        Ok(readable)
    }

    /// Decides one request, and waits for the store. The texts of `message` must be those of [`Self::readable`].
    async fn decide_readable(
        &self,
        message: &[u8],
        feedback: Vec<Feedback>,
        mut span: Option<Span>,
    ) -> Result<Verdict, RequestError> {
        let request = self.decode(message, feedback, &mut span)?;
        let verdict = self.decisions.decide(&request).await;
        if let Some(span) = span {
            self.end_span(span, request.domain, &verdict);
        }
        Ok(verdict?)
    }

    /// Decides one request with counters in memory. The texts of `message` must be those of [`Self::readable`].
    fn decide_readable_in(
        &self,
        memory: &Memory,
        message: &[u8],
        feedback: Vec<Feedback>,
        mut span: Option<Span>,
    ) -> Result<Verdict, RequestError> {
        let request = self.decode(message, feedback, &mut span)?;
        let verdict = self.decisions.decide_in(memory, &request);
        if let Some(span) = span {
            self.end_span(span, request.domain, &verdict);
        }
        Ok(verdict?)
    }

    /// Decodes a request, and starts the timing of its span.
    fn decode<'m>(
        &self,
        message: &'m [u8],
        feedback: Vec<Feedback>,
        span: &mut Option<Span>,
    ) -> Result<engine::Request<'m>, RequestError> {
        let request = decode(message, &self.limits).map_err(|error| error.with_domain_of(message))?;
        if message.len() > MAX_PLAIN_BYTES {
            self.errors.record_long_values(&request);
        }
        if let Some(span) = span {
            span.start_timing();
        }
        Ok(engine::Request { feedback, ..request })
    }

    fn end_span(&self, span: Span, domain: &str, verdict: &Result<Verdict, DecisionError>) {
        // Invalid requests have no timing.
        if verdict.is_ok() {
            let (took, trace) = span.timing();
            self.decisions.record_exemplar(took, trace);
        }
        let outcome = match verdict {
            Ok(Verdict { overall: Code::Ok, .. }) => "ok",
            Ok(Verdict { overall: Code::OverLimit, .. }) => "over_limit",
            Err(_) => "error",
        };
        span.end(domain, outcome);
    }

    /// Starts a span for one check of a frame, if it is traced.
    pub(in crate::transport) fn span(&self, traceparent: &str) -> Option<Span> {
        self.traces.start_from(traceparent)
    }

    /// Starts a span for a unary call, if it is traced.
    pub(in crate::transport) fn span_of(&self, headers: &HeaderMap) -> Option<Span> {
        self.traces.start(headers)
    }

    pub(in crate::transport) fn errors(&self) -> &CallerErrors {
        &self.errors
    }

    pub(in crate::transport) fn limits(&self) -> &Limits {
        &self.limits
    }

    pub(in crate::transport) fn response(&self) -> &ResponseSettings {
        &self.response
    }
}
