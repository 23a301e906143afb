//! May this request pass? Validation, the clock, the engine, and how long it took.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use opentelemetry::{KeyValue, metrics::Meter};

use super::{Clock, Recorder};
use crate::{
    engine::{DecideError, Engine, Request, Verdict},
    metrics::{Counter, Histogram, Totals, TraceId},
};

/// Why a request has no verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CheckError {
    /// There is nothing to match against.
    #[error("rate limit domain must not be empty")]
    NoDomain,
    /// There is nothing to match.
    #[error("rate limit descriptor list must not be empty")]
    NoDescriptors,
    /// The engine could not decide.
    #[error("no decision")]
    Undecided(#[source] DecideError),
}

/// As the peer names what is asked.
const METHOD: [(&str, &str); 1] = [("grpc_method", "ShouldRateLimit")];

/// What the service counts of its calls.
pub struct Metrics {
    latency: Arc<Histogram>,
    invalid: Counter,
    undecided: Counter,
}

impl Metrics {
    /// Nothing counted yet.
    #[must_use]
    pub fn new(workers: usize) -> Arc<Self> {
        let latency = Histogram::new("ratelimit_service_response_time_seconds", "Time to decide a request", workers);
        Arc::new(Self {
            latency: Arc::new(latency.with_labels(&METHOD)),
            invalid: Counter::new(workers),
            undecided: Counter::new(workers),
        })
    }

    /// Adds it up under the peer's names in statsd.
    pub fn total(&self, totals: &mut Totals) {
        for (name, value) in [
            ("ratelimit.service.call.should_rate_limit.service_error", self.invalid.get()),
            ("ratelimit.service.call.should_rate_limit.redis_error", self.undecided.get()),
            ("ratelimit_server.ShouldRateLimit.total_requests", self.latency.count()),
        ] {
            totals.insert(name.to_owned(), value);
        }
    }

    /// How long requests took to decide.
    #[must_use]
    pub const fn latency(&self) -> &Arc<Histogram> {
        &self.latency
    }

    /// Shows everything but the latency to the meter, under the peer's names.
    pub fn observe(self: &Arc<Self>, meter: &Meter) {
        let this = Arc::clone(self);
        let requests =
            meter.u64_observable_counter("ratelimit_service_total_requests").with_description("Requests decided");
        let labels = METHOD.map(|(name, value)| KeyValue::new(name, value));
        requests.with_callback(move |observer| observer.observe(this.latency.count(), &labels)).build();
        let this = Arc::clone(self);
        let errors = meter
            .u64_observable_counter("ratelimit_service_should_rate_limit_error")
            .with_description("Requests without a decision");
        errors
            .with_callback(move |observer| {
                observer.observe(this.invalid.get(), &[KeyValue::new("err_type", "service_error")]);
                observer.observe(this.undecided.get(), &[KeyValue::new("err_type", "redis_error")]);
            })
            .build();
    }
}

/// One worker's service.
#[derive(Clone)]
pub struct Check {
    /// What decides.
    pub engine: Engine,
    /// What time it is.
    pub clock: Clock,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// Who keeps a sample of the requests.
    pub recorder: Option<Arc<Recorder>>,
}

impl Check {
    /// Shows the trace of a request that was decided.
    pub fn exemplify(&self, took: Duration, trace: TraceId) {
        self.metrics.latency.exemplify(took, trace, Duration::from_micros(self.clock.now().get()));
    }

    /// Decides one request.
    pub async fn check(&self, request: &Request<'_>) -> Result<Verdict, CheckError> {
        let invalid = match request {
            Request { domain: "", .. } => Some(CheckError::NoDomain),
            Request { descriptors, .. } if descriptors.is_empty() => Some(CheckError::NoDescriptors),
            Request { .. } => None,
        };
        if let Some(error) = invalid {
            self.metrics.invalid.add(self.engine.worker, 1);
            return Err(error);
        }
        // First: the clock is read while what it looks for is fetched.
        let begun = self.engine.prepare(request);
        let (asked, now) = (Instant::now(), self.clock.now());
        let verdict = self.engine.decide_prepared(&begun, now).await;
        self.metrics.latency.record(self.engine.worker, asked.elapsed());
        if let Some(recorder) = &self.recorder {
            recorder.record(self.engine.worker, request, verdict.as_ref().ok(), now);
        }
        verdict.map_err(|error| {
            self.metrics.undecided.add(self.engine.worker, 1);
            CheckError::Undecided(error)
        })
    }
}
