//! [`Exporter`]: sends spans to an OpenTelemetry collector.

use std::time::Duration;

use opentelemetry_proto::{
    tonic::collector::trace::v1::ExportTraceServiceRequest,
    transform::{common::tonic::ResourceAttributesWithSchema, trace::tonic::group_spans_by_resource_and_scope},
};
use opentelemetry_sdk::{
    Resource,
    error::{OTelSdkError, OTelSdkResult},
    trace::{SpanData, SpanExporter},
};

use super::{
    OtlpSettings,
    collector::{Batch, Collector},
    settings::Signal,
};
use crate::{metrics::LogThrottle, telemetry::TelemetryError};

/// Upper bounds of the pauses before further attempts. Spans wait in a bounded queue meanwhile.
const PAUSES: [Duration; 3] = [Duration::from_millis(100), Duration::from_millis(200), Duration::from_millis(400)];

/// An exporter of spans.
#[derive(Debug)]
pub(in crate::telemetry) struct Exporter {
    collector: Collector,
    resource: ResourceAttributesWithSchema,
    log_throttle: LogThrottle,
}

impl Exporter {
    /// Creates an exporter, which connects when it first sends. Must be called inside a tokio runtime.
    pub(in crate::telemetry) fn new(settings: &OtlpSettings) -> Result<Self, TelemetryError> {
        Ok(Self {
            collector: Collector::new(settings, Signal::Traces)?,
            resource: ResourceAttributesWithSchema::default(),
            log_throttle: LogThrottle::default(),
        })
    }
}

impl SpanExporter for Exporter {
    async fn export(&self, spans: Vec<SpanData>) -> OTelSdkResult {
        let resource_spans = group_spans_by_resource_and_scope(spans, &self.resource);
        let batch = Batch::Traces(ExportTraceServiceRequest { resource_spans });
        let mut pauses = PAUSES.iter();
        let error = loop {
            let Err(error) = self.collector.send(batch.clone()).await else {
                return Ok(());
            };
            let pause = if error.is_transient { pauses.next() } else { None };
            let Some(pause) = pause else {
                break error.to_string();
            };
            self.collector.pause(pause.mul_f64(rand::random_range(0.5..=1.0))).await;
        };
        // OpenTelemetry does not log the failure.
        if self.log_throttle.should_log() {
            tracing::warn!(error, "cannot send traces to the OpenTelemetry collector; their spans are lost");
        }
        Err(OTelSdkError::InternalFailure(error))
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.resource = resource.into();
    }
}
