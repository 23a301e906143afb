//! [`Checker`]: decodes and decides requests, and records the traces of their decisions.

use std::{borrow::Cow, sync::Arc};

use bytes::Bytes;
use futures_util::FutureExt;
use http::{HeaderMap, HeaderName, HeaderValue};

use super::{
    CallerErrors, Limits, RequestError, ResponseSettings, decode, encode, feedback,
    message::{PREFIX, check_size, with_prefix},
    response::Response,
    texts::readable,
};
use crate::{
    engine::{self, Code, Feedback, MAX_PLAIN_BYTES, Verdict},
    service::Check,
    telemetry::{Span, Traces},
};

/// Metadata of a response to a shed request. Envoy's protocol has no field for this.
const SHED_HEADER: HeaderName = HeaderName::from_static("sluicegate-shed");

/// Initial capacity for a response in bytes. A status without a name has some 20.
const INITIAL_CAPACITY: usize = 64;

/// Decides the requests of one worker, for unary calls and for streams.
pub(super) struct Checker {
    check: Check,
    limits: Limits,
    response: ResponseSettings,
    traces: Traces,
    errors: Arc<CallerErrors>,
}

impl Checker {
    pub(super) const fn new(
        check: Check,
        limits: Limits,
        response: ResponseSettings,
        traces: Traces,
        errors: Arc<CallerErrors>,
    ) -> Self {
        Self { check, limits, response, traces, errors }
    }

    /// Returns whether decisions never wait.
    pub(super) const fn never_waits(&self) -> bool {
        self.check.engine.store.never_waits()
    }

    /// Returns the outcome of a decision that never waits.
    ///
    /// Its future stays on the stack: to move it into a box costs a twentieth of a check on a stream.
    pub(super) fn finish<T>(decision: impl Future<Output = Result<T, RequestError>>) -> Result<T, RequestError> {
        let outcome = decision.now_or_never();
        outcome.unwrap_or_else(|| Err(RequestError::unavailable("the memory store did not answer at once")))
    }

    /// Decides one check of a frame.
    pub(super) async fn decide(
        &self,
        request: Bytes,
        feedback: Vec<Feedback>,
        span: Option<Span>,
    ) -> Result<Verdict, RequestError> {
        check_size(request.len(), self.limits.max_message_bytes)?;
        let message = self.readable(&request)?;
        self.check(&message, feedback, span).await
    }

    /// Decides one request, and encodes the response of Envoy's protocol.
    pub(super) async fn respond(
        &self,
        message: &[u8],
        feedback: Vec<Feedback>,
        span: Option<Span>,
    ) -> Result<Response, RequestError> {
        let message = &*self.readable(message)?;
        let verdict = self.check(message, feedback, span).await?;
        let mut metadata = HeaderMap::new();
        feedback::write_ttls(&verdict, &mut metadata);
        if verdict.is_shed() {
            metadata.insert(SHED_HEADER, HeaderValue::from_static("true"));
        }
        let metadata = (!metadata.is_empty()).then(|| Box::new(metadata));
        let mut data = Vec::with_capacity(INITIAL_CAPACITY);
        data.resize(PREFIX, 0);
        encode(&verdict, message, &self.response, &mut data);
        Ok(Response::Message { data: with_prefix(data), metadata })
    }

    /// Returns a message with texts that can be decoded.
    fn readable<'m>(&self, message: &'m [u8]) -> Result<Cow<'m, [u8]>, RequestError> {
        let readable = readable(message).map_err(|error| RequestError::from(error).with_domain_of(message))?;
        if matches!(readable, Cow::Owned(_)) {
            self.errors.record_escaped(message);
        }
        Ok(readable)
    }

    /// Decides one request. Its texts must be readable.
    async fn check(
        &self,
        message: &[u8],
        feedback: Vec<Feedback>,
        mut span: Option<Span>,
    ) -> Result<Verdict, RequestError> {
        let request = decode(message, &self.limits).map_err(|error| error.with_domain_of(message))?;
        if message.len() > MAX_PLAIN_BYTES {
            self.errors.record_long_values(&request);
        }
        let request = engine::Request { feedback, ..request };
        if let Some(span) = &mut span {
            span.start_timing();
        }
        let verdict = self.check.check(&request).await;
        if let Some(span) = span {
            // Invalid requests have no timing.
            if verdict.is_ok() {
                let (took, trace) = span.timing();
                self.check.record_exemplar(took, trace);
            }
            let outcome = match &verdict {
                Ok(Verdict { overall: Code::Ok, .. }) => "ok",
                Ok(Verdict { overall: Code::OverLimit, .. }) => "over_limit",
                Err(_) => "error",
            };
            span.end(request.domain, outcome);
        }
        Ok(verdict?)
    }

    /// Starts a span for one check of a frame, if it is traced.
    pub(super) fn span(&self, traceparent: &str) -> Option<Span> {
        self.traces.start_from(traceparent)
    }

    /// Starts a span for a unary call, if it is traced.
    pub(super) fn span_of(&self, headers: &HeaderMap) -> Option<Span> {
        self.traces.start(headers)
    }

    pub(super) fn errors(&self) -> &CallerErrors {
        &self.errors
    }

    pub(super) fn limits(&self) -> &Limits {
        &self.limits
    }

    pub(super) fn response(&self) -> &ResponseSettings {
        &self.response
    }
}
