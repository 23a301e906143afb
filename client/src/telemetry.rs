//! [`Telemetry`]: metrics and log events of the client. Without the features `opentelemetry` and `tracing` it does
//! nothing.

use crate::{check_request::CheckRequest, verdict::Verdict};

/// Metrics recorded with the OpenTelemetry API, and events that are logged once per client.
#[derive(Default)]
pub(crate) struct Telemetry {
    #[cfg(feature = "opentelemetry")]
    instruments: Option<metrics::Instruments>,
    /// Whether a check without a rule has been logged.
    #[cfg(feature = "tracing")]
    unmatched_logged: std::sync::atomic::AtomicBool,
}

#[cfg(feature = "opentelemetry")]
mod metrics {
    use std::time::{Duration, Instant};

    use opentelemetry::{
        KeyValue,
        metrics::{Counter, Histogram, Meter, UpDownCounter},
    };

    use super::Telemetry;
    use crate::{DecidedBy, Verdict};

    pub(super) struct Instruments {
        checks: Counter<u64>,
        duration: Histogram<f64>,
        waiters: UpDownCounter<i64>,
        wait: Histogram<f64>,
    }

    impl Instruments {
        fn new(meter: &Meter) -> Self {
            Self {
                checks: meter
                    .u64_counter("sluicegate.client.checks")
                    .with_description("Number of checks by decider and decision")
                    .build(),
                duration: meter
                    .f64_histogram("sluicegate.client.duration")
                    .with_unit("s")
                    .with_description("Duration of checks that were not answered from the deny cache or a grant")
                    .build(),
                waiters: meter
                    .i64_up_down_counter("sluicegate.client.waiters")
                    .with_description("Number of callers that wait until their request is allowed")
                    .build(),
                wait: meter
                    .f64_histogram("sluicegate.client.wait")
                    .with_unit("s")
                    .with_description("Time from the call of a waiter to its verdict")
                    .build(),
            }
        }
    }

    impl Telemetry {
        pub(crate) fn new(meter: Option<&Meter>) -> Self {
            Self { instruments: meter.map(Instruments::new), ..Self::default() }
        }

        /// Records the verdict of a check. `took` returns its duration.
        pub(crate) fn record_check(&self, verdict: &Verdict, took: impl FnOnce() -> Duration) {
            let Some(Instruments { checks, duration, .. }) = &self.instruments else {
                return;
            };
            let decided_by = match verdict.decided_by() {
                DecidedBy::Server => "server",
                DecidedBy::DenyCache => "deny_cache",
                DecidedBy::Grant => "grant",
                DecidedBy::Fallback => "fallback",
            };
            checks.add(1, &[KeyValue::new("decided_by", decided_by), KeyValue::new("allowed", verdict.allowed())]);
            if matches!(verdict.decided_by(), DecidedBy::Server | DecidedBy::Fallback) {
                duration.record(took().as_secs_f64(), &[KeyValue::new("decided_by", decided_by)]);
            }
        }

        /// Counts a waiter in the metrics until the returned guard is dropped.
        pub(crate) fn waiter(&self) -> CountedWaiter<'_> {
            if let Some(instruments) = &self.instruments {
                instruments.waiters.add(1, &[]);
            }
            CountedWaiter { telemetry: self, joined: Instant::now() }
        }
    }

    /// Guard of a waiter, which is counted in the metrics until the guard is dropped.
    pub(crate) struct CountedWaiter<'t> {
        telemetry: &'t Telemetry,
        joined: Instant,
    }

    impl CountedWaiter<'_> {
        /// Records the time from the call of the waiter to its verdict. A waiter that is cancelled records no time.
        pub(crate) fn finish(self, allowed: bool) {
            if let Some(instruments) = &self.telemetry.instruments {
                instruments.wait.record(self.joined.elapsed().as_secs_f64(), &[KeyValue::new("allowed", allowed)]);
            }
        }
    }

    impl Drop for CountedWaiter<'_> {
        fn drop(&mut self) {
            if let Some(instruments) = &self.telemetry.instruments {
                instruments.waiters.add(-1, &[]);
            }
        }
    }
}

#[cfg(not(feature = "opentelemetry"))]
impl Telemetry {
    pub(crate) fn record_check(&self, _: &Verdict, _: impl FnOnce() -> std::time::Duration) {}

    pub(crate) fn waiter(&self) -> CountedWaiter {
        let _ = self;
        CountedWaiter
    }
}

/// Guard of a waiter, which is not counted without the feature `opentelemetry`.
#[cfg(not(feature = "opentelemetry"))]
pub(crate) struct CountedWaiter;

#[cfg(not(feature = "opentelemetry"))]
impl CountedWaiter {
    pub(crate) fn finish(self, _: bool) {}
}

impl Telemetry {
    /// Logs the first check of the client that no rule matches: usually its domain or a key is misspelt.
    ///
    /// Values are not logged, because they identify users.
    pub(crate) fn log_unmatched(&self, request: &CheckRequest<'_>, verdict: &Verdict) {
        // Without statuses, it is unknown whether a rule matches.
        #[cfg(feature = "tracing")]
        if !verdict.statuses().is_empty()
            && !verdict.matched()
            && !self.unmatched_logged.swap(true, std::sync::atomic::Ordering::Relaxed)
        {
            let descriptors: Vec<_> = request.descriptors.iter().map(crate::Descriptor::keys).collect();
            tracing::warn!(
                domain = %request.domain,
                keys = descriptors.join(", "),
                "no rate limit rule matches a check, so nothing limits it; further such checks are not logged"
            );
        }
        #[cfg(not(feature = "tracing"))]
        let _ = (self, request, verdict);
    }
}

/// Logs that the circuit breaker of an endpoint has opened or closed.
pub(crate) fn log_breaker_change(endpoint: &str, open: bool) {
    #[cfg(feature = "tracing")]
    if open {
        tracing::warn!(endpoint, "rate limit service endpoint failed repeatedly, circuit breaker opened");
    } else {
        tracing::info!(endpoint, "rate limit service endpoint recovered, circuit breaker closed");
    }
    #[cfg(not(feature = "tracing"))]
    let _ = (endpoint, open);
}
