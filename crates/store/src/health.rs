//! [`Health`]: the state of the servers of a store over all workers, for `/readyz`, metrics and the log. It is updated only
//! when a connection changes or a call fails; a successful call does not access it.

use std::{
    collections::BTreeMap,
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::{Mutex, MutexGuard};
use sluicegate_metrics::{Counter, Instrument, Label, LogThrottle, Meter, Registrar, WorkerId};

/// Minimum time between two log messages about outages of one server.
const MIN_LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Returns a random time from 0.5 to 1.5 times `pause`, so that instances that lose the same server do not call it in step.
#[must_use]
pub fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + rand::random::<f64>())
}

/// Returns the random time before the next attempt to connect. It grows with the number of failures, up to 300 ms.
#[must_use]
pub fn reconnect_pause(failures: u32) -> Duration {
    jittered(Duration::from_millis(25) * 2_u32.saturating_pow(failures.min(3)))
}

/// A kind of failure of a server.
pub trait FailureKind: Copy + PartialEq + Send + Sync + 'static {
    /// All kinds.
    const ALL: &'static [Self];
    /// Name of the servers' software, for the log.
    const SOFTWARE: &'static str;
    /// Metric with the number of failures by kind.
    const FAILURES: MetricText;
    /// Metric with the state of each server.
    const UP: MetricText;
    /// Metric with the number of takes that could not be rolled back.
    const ROLLBACK_FAILURES: MetricText;

    /// Returns the name of the kind in metrics and logs.
    fn kind(self) -> &'static str;

    /// Returns whether the failure lasts until an operator changes a setting.
    fn needs_operator(self) -> bool;
}

/// Name and description of a metric.
#[derive(Clone, Copy, Debug)]
pub struct MetricText {
    /// Name of the metric.
    pub name: &'static str,
    /// Description of the metric.
    pub description: &'static str,
}

/// The availability of each server, and the numbers of failures by kind.
pub struct Health<F> {
    servers: Mutex<BTreeMap<Arc<str>, Server<F>>>,
    failures: Vec<KindOfFailure<F>>,
    /// Number of takes of denied requests that could not be rolled back.
    failed_rollbacks: Counter,
    rollback_log: LogThrottle,
}

/// A kind of failure and the number of such failures.
struct KindOfFailure<F> {
    failure: F,
    count: Counter,
}

/// One server, with a connection for each worker.
struct Server<F> {
    /// Number of workers that use the server.
    workers: usize,
    /// Number of connected workers.
    connected: usize,
    /// The failure of the current outage that was logged, until the recovery is logged.
    logged_failure: Option<F>,
    /// Time at which an outage was last logged.
    last_logged: Option<Instant>,
    rejections: Vec<Rejections<F>>,
}

/// The log of calls that a server has rejected with one kind of failure.
struct Rejections<F> {
    failure: F,
    log: LogThrottle,
}

impl<F: FailureKind> Server<F> {
    fn new() -> Self {
        let rejections = F::ALL.iter().map(|failure| Rejections { failure: *failure, log: LogThrottle::default() });
        Self { workers: 0, connected: 0, logged_failure: None, last_logged: None, rejections: rejections.collect() }
    }

    /// Returns whether a rejected call must be logged.
    fn should_log(&self, failure: F) -> bool {
        self.rejections.iter().any(|rejections| rejections.failure == failure && rejections.log.should_log())
    }
}

impl<F: FailureKind> Health<F> {
    /// Creates a health without servers, for `workers` workers.
    #[must_use]
    pub fn new(workers: usize) -> Arc<Self> {
        let failures = F::ALL.iter().map(|failure| KindOfFailure { failure: *failure, count: Counter::new(workers) });
        Arc::new(Self {
            servers: Mutex::default(),
            failures: failures.collect(),
            failed_rollbacks: Counter::new(workers),
            rollback_log: LogThrottle::default(),
        })
    }

    /// Returns the name of each server and whether every worker is connected to it.
    #[must_use]
    pub fn servers(&self) -> Vec<(Arc<str>, bool)> {
        self.lock().iter().map(|(name, server)| (Arc::clone(name), server.connected == server.workers)).collect()
    }

    /// Adds a worker that uses the server and is not connected.
    pub fn add_worker(&self, name: &Arc<str>) {
        self.lock().entry(Arc::clone(name)).or_insert_with(Server::new).workers += 1;
    }

    /// Removes a worker, which may have been connected.
    pub fn remove_worker(&self, name: &str, connected: bool) {
        let mut servers = self.lock();
        let Some(server) = servers.get_mut(name) else {
            return;
        };
        server.workers -= 1;
        server.connected -= usize::from(connected);
        if server.workers == 0 {
            servers.remove(name);
        }
    }

    /// Records that a worker is connected.
    pub fn mark_up(&self, name: &str) {
        let mut servers = self.lock();
        let Some(server) = servers.get_mut(name) else {
            return;
        };
        server.connected += 1;
        if server.connected == server.workers && server.logged_failure.take().is_some() {
            tracing::info!(server = name, "{} server is available again", F::SOFTWARE);
        }
    }

    /// Records that the connection of a worker has failed. `error` is the description of the failure.
    pub fn mark_down(&self, name: &str, failure: F, error: &str) {
        self.log_change(name, true, failure, error);
    }

    /// Logs that an attempt to connect has failed. `error` is the description of the failure.
    pub fn log_connect_failure(&self, name: &str, failure: F, error: &str) {
        self.log_change(name, false, failure, error);
    }

    fn log_change(&self, name: &str, was_connected: bool, failure: F, error: &str) {
        let mut servers = self.lock();
        let Some(server) = servers.get_mut(name) else {
            return;
        };
        server.connected -= usize::from(was_connected);
        // A long outage is logged once, and again when an operator must end it. Repeated outages are
        // logged at intervals.
        let should_log = match server.logged_failure {
            Some(logged) => failure.needs_operator() && failure != logged,
            None => server.last_logged.is_none_or(|last| last.elapsed() >= MIN_LOG_INTERVAL),
        };
        if should_log {
            server.logged_failure = Some(failure);
            server.last_logged = Some(Instant::now());
            tracing::warn!(
                server = name,
                kind = failure.kind(),
                error,
                "{} server is unavailable; on_error applies to its counters until it answers",
                F::SOFTWARE
            );
        }
    }

    /// Counts a failure.
    pub fn count_failure(&self, worker: WorkerId, failure: F) {
        for kind in &self.failures {
            if kind.failure == failure {
                kind.count.add(worker, 1);
            }
        }
    }

    /// Logs that a server answered a call with an error, once per series of such errors.
    pub fn log_rejection(&self, name: &str, failure: F, error: &dyn fmt::Display) {
        if self.should_log_rejection(name, failure) {
            tracing::warn!(
                server = name,
                kind = failure.kind(),
                %error,
                "{} server rejects calls; on_error applies to them",
                F::SOFTWARE
            );
        }
    }

    /// Returns whether a rejected call must be logged, because it is the first one in a series of such errors.
    pub fn should_log_rejection(&self, name: &str, failure: F) -> bool {
        self.lock().get(name).is_some_and(|server| server.should_log(failure))
    }

    /// Records that hits of a request that another server denied could not be rolled back.
    pub fn rollback_failed(&self, worker: WorkerId) {
        self.failed_rollbacks.add(worker, 1);
        if self.rollback_log.should_log() {
            tracing::warn!("hits of a denied request could not be rolled back; they count until their counter expires");
        }
    }

    /// Registers the metrics of the servers.
    pub fn observe(self: &Arc<Self>, meter: &dyn Meter) {
        let this = Arc::clone(self);
        meter.register(Instrument::counter(F::FAILURES.name, F::FAILURES.description, move |observer| {
            for kind in &this.failures {
                observer.observe(kind.count.get(), [Label::new("kind", kind.failure.kind())]);
            }
        }));
        let this = Arc::clone(self);
        meter.register(Instrument::gauge(F::UP.name, F::UP.description, move |observer| {
            for (name, up) in this.servers() {
                observer.observe(up.into(), [Label::new("server", name)]);
            }
        }));
        let rollbacks = F::ROLLBACK_FAILURES;
        Registrar { meter, source: self }
            .counter(rollbacks.name, rollbacks.description, |this| this.failed_rollbacks.get());
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Arc<str>, Server<F>>> {
        self.servers.lock()
    }
}

#[cfg(test)]
mod tests {
    use sluicegate_testing::test_log::TestLog;

    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Failure {
        Io,
        Timeout,
        NoAuth,
    }

    impl FailureKind for Failure {
        const ALL: &'static [Self] = &[Self::Io, Self::Timeout, Self::NoAuth];
        const SOFTWARE: &'static str = "Redis";
        const FAILURES: MetricText = MetricText { name: "failures", description: "Failures" };
        const UP: MetricText = MetricText { name: "up", description: "Up" };
        const ROLLBACK_FAILURES: MetricText = MetricText { name: "rollbacks", description: "Rollbacks" };

        fn kind(self) -> &'static str {
            match self {
                Self::Io => "io",
                Self::Timeout => "timeout",
                Self::NoAuth => "noauth",
            }
        }

        fn needs_operator(self) -> bool {
            self == Self::NoAuth
        }
    }

    /// A server that is down is retried soon, but not continuously.
    #[test]
    fn pauses_between_attempts_grow_with_failures() {
        for (failures, min, max) in [(0, 12, 38), (1, 25, 75), (2, 50, 150), (3, 100, 300), (9, 100, 300)] {
            let millis = reconnect_pause(failures).as_millis();
            assert!((min..=max).contains(&millis), "{failures} failures: {millis} ms");
        }
    }

    #[test]
    fn a_server_is_up_when_every_worker_that_uses_it_is_connected() {
        let (health, name) = (Health::<Failure>::new(2), Arc::<str>::from("a"));
        let up = || health.servers().into_iter().map(|(_, up)| up).collect::<Vec<_>>();
        health.add_worker(&name);
        health.add_worker(&name);
        assert_eq!(up(), [false]);
        health.mark_up(&name);
        assert_eq!(up(), [false], "one worker of two is connected");
        health.mark_up(&name);
        assert_eq!(up(), [true]);
        health.mark_down(&name, Failure::Io, "broken");
        assert_eq!(up(), [false]);
        health.log_connect_failure(&name, Failure::Io, "refused");
        health.mark_up(&name);
        assert_eq!(up(), [true]);
        health.remove_worker(&name, true);
        assert_eq!(up(), [true], "the other worker is still connected");
        health.remove_worker(&name, true);
        assert!(up().is_empty());
        // Late reports about a server that no worker uses any more are ignored.
        health.mark_up(&name);
        health.remove_worker(&name, true);
        assert!(up().is_empty());
    }

    #[test]
    fn an_outage_is_logged_again_when_it_needs_an_operator() {
        let log = TestLog::start();
        let (health, name) = (Health::<Failure>::new(1), Arc::<str>::from("a"));
        health.add_worker(&name);
        for (failure, error, lines) in [
            (Failure::Io, "refused", 1),
            (Failure::Timeout, "no answer", 1),
            (Failure::NoAuth, "Redis requires a password", 2),
            (Failure::NoAuth, "Redis requires a password", 2),
            (Failure::Io, "refused", 2),
        ] {
            health.log_connect_failure(&name, failure, error);
            assert_eq!(log.text().matches("is unavailable").count(), lines, "{error}");
        }
        assert!(
            log.text().contains("\"noauth\"") && log.text().contains("Redis requires a password"),
            "{}",
            log.text()
        );
        health.mark_up(&name);
        assert_eq!(log.text().matches("available again").count(), 1);
    }

    #[test]
    fn a_recovery_is_logged_when_all_workers_are_connected_again() {
        let log = TestLog::start();
        let recoveries = || log.text().matches("available again").count();
        let (health, name) = (Health::<Failure>::new(2), Arc::<str>::from("a"));
        for _ in 0..2 {
            health.add_worker(&name);
            health.mark_up(&name);
        }
        assert_eq!(recoveries(), 0, "there was no outage");
        for _ in 0..2 {
            health.mark_down(&name, Failure::Io, "broken");
        }
        health.mark_up(&name);
        assert_eq!(recoveries(), 0, "one worker of two is connected");
        health.mark_up(&name);
        assert_eq!(recoveries(), 1);
    }
}
