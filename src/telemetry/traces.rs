//! OTLP traces, off by default: one span per sampled decision, a child of the caller's.

use std::time::{Duration, Instant};

use http::HeaderMap;
use opentelemetry::{
    Context, KeyValue,
    propagation::{Extractor, TextMapPropagator},
    trace::{Span as _, SpanKind, Tracer, TracerProvider},
};
use opentelemetry_otlp::{SpanExporter, WithExportConfig};
use opentelemetry_sdk::{
    propagation::TraceContextPropagator,
    trace::{Sampler, SdkTracer, SdkTracerProvider},
};

use super::{OtlpProtocol, OtlpSettings, TelemetryError};
use crate::metrics::TraceId;

/// Where spans go; nowhere by default, at the cost of one comparison per decision.
#[derive(Clone, Default)]
pub struct Traces(Option<(SdkTracerProvider, SdkTracer)>);

impl Traces {
    /// Sets the provider up. Inside a tokio runtime, for the collector's connection.
    pub fn start_exporting(settings: &OtlpSettings) -> Result<Self, TelemetryError> {
        if !settings.traces {
            return Ok(Self::default());
        }
        let builder = SpanExporter::builder();
        let exporter = match settings.protocol {
            OtlpProtocol::Grpc => builder.with_tonic().with_endpoint(&settings.endpoint).build(),
            OtlpProtocol::Http => builder.with_http().with_endpoint(settings.url("/v1/traces")).build(),
        };
        let exporter = exporter.map_err(|error| TelemetryError(error.to_string()))?;
        let ratio = Sampler::TraceIdRatioBased(settings.sample_ratio);
        let provider = SdkTracerProvider::builder()
            .with_resource(settings.resource())
            .with_sampler(Sampler::ParentBased(Box::new(ratio)))
            .with_batch_exporter(exporter)
            .build();
        let tracer = provider.tracer("sluicegate");
        Ok(Self(Some((provider, tracer))))
    }

    /// A span for one decision, if traces are on and this one is sampled.
    #[must_use]
    pub fn start(&self, headers: &HeaderMap) -> Option<Span> {
        self.start_in(&Headers(headers))
    }

    /// The same for one of many in a frame, by its W3C `traceparent`.
    #[must_use]
    pub fn start_from(&self, traceparent: &str) -> Option<Span> {
        self.start_in(&Traceparent(traceparent))
    }

    fn start_in(&self, carrier: &dyn Extractor) -> Option<Span> {
        let (_, tracer) = self.0.as_ref()?;
        let parent = TraceContextPropagator::new().extract_with_context(&Context::new(), carrier);
        let span = tracer.span_builder("ShouldRateLimit").with_kind(SpanKind::Server);
        let span = span.start_with_context(tracer, &parent);
        span.is_recording().then(|| Span(Box::new((span, Instant::now()))))
    }

    /// Sends what was not sent yet.
    pub fn stop(&self) {
        let Some((provider, _)) = &self.0 else {
            return;
        };
        if let Err(error) = provider.shutdown() {
            tracing::debug!(%error, "the last traces were not sent");
        }
    }
}

/// A decision under way.
pub struct Span(Box<(opentelemetry_sdk::trace::Span, Instant)>);

impl Span {
    /// What is timed begins.
    pub fn ask(&mut self) {
        self.0.1 = Instant::now();
    }

    /// How long it took so far, and whose it is.
    #[must_use]
    pub fn asked(&self) -> (Duration, TraceId) {
        let (span, asked) = &*self.0;
        (asked.elapsed(), TraceId(u128::from_be_bytes(span.span_context().trace_id().to_bytes())))
    }

    /// Ends it, with what it was about.
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
