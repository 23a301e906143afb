//! [`Health`]: the state of the Redis servers over all workers, for `/readyz`, metrics and the log. It is updated only
//! when a connection changes or a call fails; a successful call does not access it.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::{Mutex, MutexGuard};
use redis::RedisError;
use sluicegate_metrics::{Counter, Instrument, Label, LogThrottle, Meter, Registrar, WorkerId};

use super::failure::Failure;

/// Minimum time between two log messages about outages of one server.
const MIN_LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Which servers are available, and the failures that were counted and logged.
pub struct Health {
    servers: Mutex<BTreeMap<Arc<str>, Server>>,
    failures: [Counter; Failure::ALL.len()],
    /// Number of takes of denied requests that could not be rolled back.
    failed_rollbacks: Counter,
    rollback_log: LogThrottle,
}

/// One server, with a connection for each worker.
#[derive(Default)]
struct Server {
    /// Number of workers that use the server.
    workers: usize,
    /// Number of connected workers.
    connected: usize,
    /// The failure of the current outage that was logged, until the recovery is logged.
    logged_failure: Option<Failure>,
    /// Time at which an outage was last logged.
    last_logged: Option<Instant>,
    rejection_logs: [LogThrottle; Failure::ALL.len()],
}

impl Health {
    pub(crate) fn new(workers: usize) -> Arc<Self> {
        Arc::new(Self {
            servers: Mutex::default(),
            failures: std::array::from_fn(|_| Counter::new(workers)),
            failed_rollbacks: Counter::new(workers),
            rollback_log: LogThrottle::default(),
        })
    }

    /// Returns the name of each server and whether every worker is connected to it.
    #[must_use]
    pub fn servers(&self) -> Vec<(Arc<str>, bool)> {
        self.lock().iter().map(|(name, server)| (Arc::clone(name), server.connected == server.workers)).collect()
    }

    pub(super) fn add_worker(&self, name: &Arc<str>) {
        self.lock().entry(Arc::clone(name)).or_default().workers += 1;
    }

    /// Removes a worker, which may have been connected.
    pub(super) fn remove_worker(&self, name: &str, connected: bool) {
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

    pub(super) fn mark_up(&self, name: &str) {
        let mut servers = self.lock();
        let Some(server) = servers.get_mut(name) else {
            return;
        };
        server.connected += 1;
        if server.connected == server.workers && server.logged_failure.take().is_some() {
            tracing::info!(server = name, "Redis server is available again");
        }
    }

    pub(super) fn mark_down(&self, name: &str, error: &RedisError) {
        let failure = Failure::of(error);
        self.log_change(name, true, failure, &failure.describe(error));
    }

    /// Logs that an attempt to connect has failed. `error` is its description.
    pub(super) fn log_connect_failure(&self, name: &str, failure: Failure, error: &str) {
        self.log_change(name, false, failure, error);
    }

    fn log_change(&self, name: &str, was_connected: bool, failure: Failure, error: &str) {
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
                "Redis server is unavailable; on_error applies to its counters until it answers"
            );
        }
    }

    pub(super) fn count_failure(&self, worker: WorkerId, failure: Failure) {
        self.failures[failure as usize].add(worker, 1);
    }

    /// Logs that a server answered a call with an error, once per series of such errors.
    pub(super) fn log_rejection(&self, name: &str, failure: Failure, error: &RedisError) {
        if let Some(server) = self.lock().get(name)
            && server.rejection_logs[failure as usize].should_log()
        {
            tracing::warn!(
                server = name, kind = failure.kind(), %error,
                "Redis server rejects calls; on_error applies to them"
            );
        }
    }

    /// Logs that a server rejected changed credentials on an open connection, once per series of such errors.
    pub(super) fn log_rejected_login(&self, name: &str, error: &RedisError) {
        if let Some(server) = self.lock().get(name)
            && server.rejection_logs[Failure::NoAuth as usize].should_log()
        {
            tracing::warn!(
                server = name, %error,
                "Redis server rejects the changed password; open connections keep the previous one"
            );
        }
    }

    /// Records that hits of a request that another server denied could not be rolled back.
    pub(super) fn rollback_failed(&self, worker: WorkerId) {
        self.failed_rollbacks.add(worker, 1);
        if self.rollback_log.should_log() {
            tracing::warn!("hits of a denied request could not be rolled back; they count until their counter expires");
        }
    }

    /// Registers the metrics of the Redis servers.
    pub fn observe(self: &Arc<Self>, meter: &dyn Meter) {
        let this = Arc::clone(self);
        meter.register(Instrument::counter(
            "sluicegate_redis_failures_total",
            "Number of failed or redirected calls and failed attempts to connect to Redis, by kind",
            move |observer| {
                for failure in Failure::ALL {
                    observer.observe(this.failures[failure as usize].get(), [Label::new("kind", failure.kind())]);
                }
            },
        ));
        let this = Arc::clone(self);
        meter.register(Instrument::gauge(
            "sluicegate_redis_up",
            "Whether every worker is connected to the Redis server (1) or not (0)",
            move |observer| {
                for (name, up) in this.servers() {
                    observer.observe(up.into(), [Label::new("server", name)]);
                }
            },
        ));
        Registrar { meter, source: self }.counter(
            "sluicegate_redis_rollback_failures_total",
            "Number of takes of denied requests that could not be rolled back",
            |this| this.failed_rollbacks.get(),
        );
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Arc<str>, Server>> {
        self.servers.lock()
    }
}

#[cfg(test)]
mod tests {
    use sluicegate_testing::test_log::TestLog;

    use super::*;

    #[test]
    fn a_server_is_up_when_every_worker_that_uses_it_is_connected() {
        let (health, name) = (Health::new(2), Arc::<str>::from("a"));
        let up = || health.servers().into_iter().map(|(_, up)| up).collect::<Vec<_>>();
        health.add_worker(&name);
        health.add_worker(&name);
        assert_eq!(up(), [false]);
        health.mark_up(&name);
        assert_eq!(up(), [false], "one worker of two is connected");
        health.mark_up(&name);
        assert_eq!(up(), [true]);
        health.mark_down(&name, &RedisError::from((redis::ErrorKind::Io, "broken")));
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
        let (health, name) = (Health::new(1), Arc::<str>::from("a"));
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
        let (health, name) = (Health::new(2), Arc::<str>::from("a"));
        for _ in 0..2 {
            health.add_worker(&name);
            health.mark_up(&name);
        }
        assert_eq!(recoveries(), 0, "there was no outage");
        for _ in 0..2 {
            health.mark_down(&name, &RedisError::from((redis::ErrorKind::Io, "broken")));
        }
        health.mark_up(&name);
        assert_eq!(recoveries(), 0, "one worker of two is connected");
        health.mark_up(&name);
        assert_eq!(recoveries(), 1);
    }
}
