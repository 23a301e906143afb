//! [`Traces`]: OTLP traces, off by default: one span per sampled decision, as a child of the caller's span.

use std::time::{Duration, Instant};

use http::HeaderMap;
use opentelemetry::{
    KeyValue,
    propagation::Extractor,
    trace::{Span as _, SpanKind, Tracer, TracerProvider},
};
use opentelemetry_sdk::trace::{Sampler, SdkTracer, SdkTracerProvider};

use super::{OtlpSettings, TelemetryError, caller_span::CallerSpan, otlp::SpanExporter};
use crate::metrics::TraceId;

/// An exporter of spans. By default it exports nothing, at the cost of one comparison per decision.
#[derive(Clone, Default)]
pub struct Traces(Option<(SdkTracerProvider, SdkTracer)>);

impl Traces {
    /// Creates the exporter, which exports nothing if the settings turn traces off. Must be called inside a tokio
    /// runtime, for the connection to the collector.
    ///
    /// # Errors
    ///
    /// Returns an error if the exporter cannot be created.
    pub fn start_exporting(settings: &OtlpSettings) -> Result<Self, TelemetryError> {
        if !settings.exports_traces() {
            return Ok(Self::default());
        }
        let exporter = SpanExporter::new(settings)?;
        let ratio = Sampler::TraceIdRatioBased(settings.sample_ratio);
        let provider = SdkTracerProvider::builder()
            .with_resource(settings.resource())
            .with_sampler(Sampler::ParentBased(Box::new(ratio)))
            .with_batch_exporter(exporter)
            .build();
        let tracer = provider.tracer("sluicegate");
        Ok(Self(Some((provider, tracer))))
    }

    /// Starts the span of a decision, as a child of the span in headers of W3C or B3; `None` if traces are off or this
    /// one is not sampled.
    #[must_use]
    pub fn start(&self, headers: &HeaderMap) -> Option<Span> {
        self.start_with(&Headers(headers))
    }

    /// Starts the span of the decision about one check of a [`CheckFrame`](sluicegate_proto::sluicegate::v1::CheckFrame),
    /// as a child of the span in the W3C `traceparent` of the check.
    #[must_use]
    pub fn start_from(&self, traceparent: &str) -> Option<Span> {
        self.start_with(&Traceparent(traceparent))
    }

    fn start_with(&self, carrier: &dyn Extractor) -> Option<Span> {
        let (_, tracer) = self.0.as_ref()?;
        let parent = CallerSpan::read(carrier).context()?;
        let span = tracer.span_builder("ShouldRateLimit").with_kind(SpanKind::Server);
        let span = span.start_with_context(tracer, &parent);
        if span.is_recording() { Some(Span(Box::new((span, Instant::now())))) } else { None }
    }

    /// Sends the spans that were not sent yet.
    pub fn stop(&self) {
        let Some((provider, _)) = &self.0 else {
            return;
        };
        if let Err(error) = provider.shutdown() {
            tracing::debug!(%error, "cannot send the last traces to the OpenTelemetry collector");
        }
    }
}

/// The span of a decision in progress.
pub struct Span(Box<(opentelemetry_sdk::trace::Span, Instant)>);

impl Span {
    /// Sets the start of the time that [`Self::timing`] returns to now. The exported span begins when it was created.
    pub fn start_timing(&mut self) {
        self.0.1 = Instant::now();
    }

    /// Returns the time since the start of the measurement, and the trace ID.
    #[must_use]
    pub fn timing(&self) -> (Duration, TraceId) {
        let (span, started) = &*self.0;
        (started.elapsed(), TraceId(u128::from_be_bytes(span.span_context().trace_id().to_bytes())))
    }

    /// Ends the span with its domain and outcome.
    pub fn end(mut self, domain: &str, outcome: &'static str) {
        let (span, _) = &mut *self.0;
        span.set_attribute(KeyValue::new("domain", domain.to_owned()));
        span.set_attribute(KeyValue::new("outcome", outcome));
        span.end();
    }
}

struct Headers<'h>(&'h HeaderMap);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(http::HeaderName::as_str).collect()
    }
}

struct Traceparent<'t>(&'t str);

impl Extractor for Traceparent<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        (key == "traceparent").then_some(self.0)
    }

    fn keys(&self) -> Vec<&str> {
        vec!["traceparent"]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_measurement_of_a_span_can_be_restarted() {
        let provider = SdkTracerProvider::builder().build();
        let tracer = provider.tracer("x");
        let traces = Traces(Some((provider, tracer)));
        let mut span = traces.start_from("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01").unwrap();
        let hour = Duration::from_secs(3_600);
        span.0.1 = span.0.1.checked_sub(hour).unwrap();
        assert!(span.timing().0 >= hour);
        span.start_timing();
        assert!(span.timing().0 < hour);
    }

    #[test]
    fn the_span_of_a_decision_is_a_child_of_the_span_in_headers_of_b3() {
        let provider = SdkTracerProvider::builder().with_sampler(Sampler::ParentBased(Box::new(Sampler::AlwaysOn)));
        let provider = provider.build();
        let tracer = provider.tracer("x");
        let traces = Traces(Some((provider, tracer)));
        let start = |name: &'static str, value: &'static str| {
            let headers = HeaderMap::from_iter([(http::HeaderName::from_static(name), value.parse().unwrap())]);
            traces.start(&headers).map(|span| span.timing().1.0)
        };
        assert_eq!(start("b3", "8448eb211c80319c-b7ad6b7169203331-1"), Some(0x8448_eb21_1c80_319c));
        assert_eq!(start("b3", "8448eb211c80319c-b7ad6b7169203331-0"), None);
        assert_eq!(start("b3", "0"), None);
        assert_eq!(start("x-b3-sampled", "0"), None);
        assert!(start("b3", "not-valid").is_some_and(|trace| trace != 0));
    }

    #[test]
    fn no_span_starts_after_the_export_was_stopped() {
        let provider = SdkTracerProvider::builder().build();
        let tracer = provider.tracer("x");
        let traces = Traces(Some((provider, tracer)));
        traces.stop();
        assert!(traces.start_from("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01").is_none());
    }
}
