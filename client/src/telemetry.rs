//! What happens, for those who run the gateway. Without the features nothing of it is there.

/// Metrics of the OpenTelemetry API.
#[derive(Default)]
pub(crate) struct Telemetry {
    #[cfg(feature = "opentelemetry")]
    instruments: Option<metrics::Instruments>,
}

#[cfg(feature = "opentelemetry")]
mod metrics {
    use std::time::Duration;

    use opentelemetry::{
        KeyValue,
        metrics::{Counter, Histogram, Meter},
    };

    use super::Telemetry;
    use crate::{DecidedBy, Verdict};

    pub(super) struct Instruments {
        checks: Counter<u64>,
        duration: Histogram<f64>,
    }

    impl Telemetry {
        pub(crate) fn new(meter: Option<&Meter>) -> Self {
            let instruments = |meter: &Meter| Instruments {
                checks: meter
                    .u64_counter("sluicegate.client.checks")
                    .with_description("Checks by who answered them, and whether the request may pass")
                    .build(),
                duration: meter
                    .f64_histogram("sluicegate.client.duration")
                    .with_unit("s")
                    .with_description("Time of checks that were not answered from a cache")
                    .build(),
            };
            Self { instruments: meter.map(instruments) }
        }

        pub(crate) fn answered(&self, verdict: &Verdict, took: impl FnOnce() -> Duration) {
            let Some(Instruments { checks, duration }) = &self.instruments else {
                return;
            };
            let by = match verdict.decided_by() {
                DecidedBy::Server => "server",
                DecidedBy::DenyCache => "deny_cache",
                DecidedBy::Grant => "grant",
                DecidedBy::Fallback => "fallback",
            };
            checks.add(1, &[KeyValue::new("by", by), KeyValue::new("allowed", verdict.allowed())]);
            if matches!(verdict.decided_by(), DecidedBy::Server | DecidedBy::Fallback) {
                duration.record(took().as_secs_f64(), &[KeyValue::new("by", by)]);
            }
        }
    }
}

#[cfg(not(feature = "opentelemetry"))]
impl Telemetry {
    pub(crate) fn answered(&self, _: &crate::Verdict, _: impl FnOnce() -> std::time::Duration) {}
}

/// An endpoint is not asked any more, or again.
pub(crate) fn breaker(endpoint: &str, open: bool) {
    #[cfg(feature = "tracing")]
    match open {
        true => tracing::warn!(endpoint, "this rate limit service fails; it is not asked for a while"),
        false => tracing::info!(endpoint, "this rate limit service answers again"),
    }
    #[cfg(not(feature = "tracing"))]
    let _ = (endpoint, open);
}
