//! [`Decisions`]: validates a request, decides it at the current time, and measures how long the decision took.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{Clock, Recorder};
use crate::{
    engine::{Candidate, DecideError, Engine, Micros, Request, Verdict},
    metrics::{Counter, Histogram, Instrument, Label, Meter, Registrar, Totals, TraceId},
    store::{AnyStore, Memory},
};

/// Error returned when a request has no verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecisionError {
    /// The domain is empty.
    #[error("rate limit domain must not be empty")]
    NoDomain,
    /// The request has no descriptors.
    #[error("rate limit descriptor list must not be empty")]
    NoDescriptors,
    /// The engine could not decide.
    #[error("request cannot be decided")]
    Undecided(#[source] DecideError),
}

/// The label for the method `ShouldRateLimit` in the metrics of envoyproxy/ratelimit.
const METHOD: [(&str, &str); 1] = [("grpc_method", "ShouldRateLimit")];

/// Metrics of the decisions.
pub struct Metrics {
    latency: Arc<Histogram>,
    denied: Counter,
    invalid: Counter,
    undecided: Counter,
}

impl Metrics {
    /// Creates the metrics with a stripe per worker.
    #[must_use]
    pub fn new(workers: usize) -> Arc<Self> {
        let latency = Histogram::new("ratelimit_service_response_time_seconds", "Time to decide a request", workers);
        Arc::new(Self {
            latency: Arc::new(latency.with_labels(&METHOD).with_seconds_name("sluicegate_decision_seconds")),
            denied: Counter::new(workers),
            invalid: Counter::new(workers),
            undecided: Counter::new(workers),
        })
    }

    /// Adds the counts to `totals`, under the statsd names of envoyproxy/ratelimit.
    pub fn add_totals(&self, totals: &mut Totals) {
        for (name, value) in [
            ("ratelimit.service.call.should_rate_limit.service_error", self.invalid.get()),
            ("ratelimit.service.call.should_rate_limit.redis_error", self.undecided.get()),
            ("ratelimit_server.ShouldRateLimit.total_requests", self.latency.count()),
        ] {
            totals.insert(name.to_owned(), value);
        }
    }

    /// Returns the histogram of the times to decide a request.
    #[must_use]
    pub const fn latency(&self) -> &Arc<Histogram> {
        &self.latency
    }

    /// Returns the number of denied requests.
    #[must_use]
    pub fn denied(&self) -> u64 {
        self.denied.get()
    }

    /// Returns the number of requests without a decision.
    #[must_use]
    pub fn errors(&self) -> u64 {
        self.invalid.get() + self.undecided.get()
    }

    /// Registers all metrics except the histogram with `meter`, under the names of envoyproxy/ratelimit.
    pub fn observe(self: &Arc<Self>, meter: &dyn Meter) {
        let this = Arc::clone(self);
        meter.register(Instrument::counter(
            "ratelimit_service_total_requests",
            "Number of requests for which a decision was made or attempted",
            move |observer| {
                let labels = METHOD.map(|(name, value)| Label::new(name, value));
                observer.observe(this.latency.count(), labels);
            },
        ));
        Registrar { meter, source: self }.counter(
            "sluicegate_denied_requests_total",
            "Requests that were denied as a whole",
            Self::denied,
        );
        let this = Arc::clone(self);
        meter.register(Instrument::counter(
            "ratelimit_service_should_rate_limit_error",
            "Number of requests without a decision, by type of error",
            move |observer| {
                observer.observe(this.invalid.get(), [Label::new("err_type", "service_error")]);
                observer.observe(this.undecided.get(), [Label::new("err_type", "redis_error")]);
            },
        ));
    }
}

/// Decides the requests of one worker.
#[derive(Clone)]
pub struct Decisions {
    /// The engine that decides.
    pub engine: Engine<AnyStore>,
    /// The clock.
    pub clock: Clock,
    /// The metrics, shared by all workers.
    pub metrics: Arc<Metrics>,
    /// The recorder, if a sample of the requests is recorded.
    pub recorder: Option<Arc<Recorder>>,
}

impl Decisions {
    /// Records the trace of a decided request as an exemplar of the histogram.
    pub fn record_exemplar(&self, took: Duration, trace: TraceId) {
        self.metrics.latency.record_exemplar(took, trace, Duration::from_micros(self.clock.now().get()));
    }

    /// Decides one request, and waits for the store.
    ///
    /// # Errors
    ///
    /// Returns an error if the request has no domain or no descriptors, or if the engine cannot decide.
    pub async fn decide(&self, request: &Request<'_>) -> Result<Verdict, DecisionError> {
        if let Some(memory) = self.engine.store.memory() {
            return self.decide_in(memory, request);
        }
        self.validate(request)?;
        let started = Instant::now();
        let now = self.clock.now();
        let snapshot = &*self.engine.rules.load();
        let verdict = self.engine.decide(snapshot, request, now).await;
        if let (Some(candidate), Ok(verdict)) = (snapshot.candidate(), &verdict) {
            evaluate_later(&self.engine, candidate, request, verdict, now);
        }
        self.finish(request, verdict, started, now)
    }

    /// Decides one request with counters in memory, without waiting.
    ///
    /// # Errors
    ///
    /// Returns an error if the request has no domain or no descriptors, or if the engine cannot decide.
    pub fn decide_in(&self, memory: &Memory, request: &Request<'_>) -> Result<Verdict, DecisionError> {
        self.validate(request)?;
        let started = Instant::now();
        let now = self.clock.now();
        let verdict = self.engine.decide_in(memory, request, now);
        self.finish(request, verdict, started, now)
    }

    fn validate(&self, request: &Request<'_>) -> Result<(), DecisionError> {
        let error = if request.domain.is_empty() {
            DecisionError::NoDomain
        } else if request.descriptors.is_empty() {
            DecisionError::NoDescriptors
        } else {
            return Ok(());
        };
        self.metrics.invalid.add(self.engine.worker, 1);
        Err(error)
    }

    /// Measures and records a decision.
    fn finish(
        &self,
        request: &Request<'_>,
        verdict: Result<Verdict, DecideError>,
        started: Instant,
        now: Micros,
    ) -> Result<Verdict, DecisionError> {
        self.metrics.latency.record(self.engine.worker, started.elapsed());
        if let Some(recorder) = &self.recorder {
            recorder.record(self.engine.worker, request, verdict.as_ref().ok(), now);
        }
        if verdict.as_ref().is_ok_and(Verdict::is_denied) {
            self.metrics.denied.add(self.engine.worker, 1);
        }
        verdict.map_err(|error| {
            self.metrics.undecided.add(self.engine.worker, 1);
            DecisionError::Undecided(error)
        })
    }
}

/// Evaluates the candidate rules for a request that the rules in force have decided, in a task of its own.
fn evaluate_later(
    engine: &Engine<AnyStore>,
    candidate: &Arc<Candidate>,
    request: &Request<'_>,
    verdict: &Verdict,
    now: Micros,
) {
    let Some(delay) = candidate.queue(engine.worker, request, verdict, now) else {
        return;
    };
    let engine = engine.clone();
    let candidate = Arc::clone(candidate);
    tokio::spawn(async move {
        tokio::time::sleep(delay).await;
        engine.evaluate_queued(&candidate).await;
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::WorkerId;

    #[test]
    fn invalid_and_undecided_requests_are_errors() {
        let metrics = Metrics::new(1);
        assert_eq!(metrics.errors(), 0);
        metrics.invalid.add(WorkerId(0), 2);
        metrics.undecided.add(WorkerId(0), 3);
        assert_eq!(metrics.errors(), 5);
    }
}
