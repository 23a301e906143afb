//! How the servers are, over all workers: for `/readyz`, metrics and the log. Written when something changes or fails;
//! a call that succeeds does not touch it.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use opentelemetry::{KeyValue, metrics::Meter};
use redis::RedisError;

use super::failure::Failure;
use crate::metrics::{Counter, LogThrottle, WorkerId};

/// Outages of one server are told of no more often than this.
const BETWEEN: Duration = Duration::from_secs(10);

/// The servers that anybody is connected to, or wants to be.
pub struct Health {
    servers: Mutex<BTreeMap<Arc<str>, Server>>,
    failures: [Counter; Failure::ALL.len()],
    /// Takes of refused requests that could not be undone.
    lost: Counter,
    losses: LogThrottle,
}

/// One server, with a connection for each worker.
#[derive(Default)]
struct Server {
    wanted: usize,
    up: usize,
    /// It was told that it is out of reach, and not yet that it is back.
    told: bool,
    /// When that was told last.
    last_told: Option<Instant>,
    refusals: [LogThrottle; Failure::ALL.len()],
}

impl Health {
    pub(crate) fn new(workers: usize) -> Arc<Self> {
        Arc::new(Self {
            servers: Mutex::default(),
            failures: std::array::from_fn(|_| Counter::new(workers)),
            lost: Counter::new(workers),
            losses: LogThrottle::default(),
        })
    }

    /// The servers by name, and whether every worker can ask them.
    #[must_use]
    pub fn servers(&self) -> Vec<(Arc<str>, bool)> {
        self.lock().iter().map(|(name, server)| (Arc::clone(name), server.up == server.wanted)).collect()
    }

    /// A worker wants to be connected.
    pub(super) fn add_worker(&self, name: &Arc<str>) {
        self.lock().entry(Arc::clone(name)).or_default().wanted += 1;
    }

    /// It does not any more.
    pub(super) fn remove_worker(&self, name: &str, up: bool) {
        let mut servers = self.lock();
        let Some(server) = servers.get_mut(name) else {
            return;
        };
        server.wanted -= 1;
        server.up -= usize::from(up);
        if server.wanted == 0 {
            servers.remove(name);
        }
    }

    pub(super) fn came_up(&self, name: &str) {
        let mut servers = self.lock();
        let Some(server) = servers.get_mut(name) else {
            return;
        };
        server.up += 1;
        if server.up == server.wanted && std::mem::take(&mut server.told) {
            tracing::info!(server = name, "this Redis server can be asked again");
        }
    }

    pub(super) fn went_down(&self, name: &str, error: &RedisError) {
        self.log_change(name, true, error);
    }

    /// An attempt to connect did not succeed.
    pub(super) fn stays_down(&self, name: &str, error: &RedisError) {
        self.log_change(name, false, error);
    }

    fn log_change(&self, name: &str, was_up: bool, error: &RedisError) {
        let mut servers = self.lock();
        let Some(server) = servers.get_mut(name) else {
            return;
        };
        server.up -= usize::from(was_up);
        // A server that comes and goes is told of now and then; one that stays away, once.
        if !server.told && server.last_told.is_none_or(|last| last.elapsed() >= BETWEEN) {
            (server.told, server.last_told) = (true, Some(Instant::now()));
            let kind = Failure::of(error).kind();
            tracing::warn!(server = name, kind, %error, "this Redis server is out of reach; on_error decides for it until it answers");
        }
    }

    /// A call failed, for this reason.
    pub(super) fn failed(&self, worker: WorkerId, failure: Failure) {
        self.failures[failure as usize].add(worker, 1);
    }

    /// The server answered, but not with decisions.
    pub(super) fn refused(&self, name: &str, failure: Failure, error: &RedisError) {
        if let Some(server) = self.lock().get(name)
            && server.refusals[failure as usize].should_log()
        {
            tracing::warn!(server = name, kind = failure.kind(), %error, "this Redis server refuses calls; on_error decides for them");
        }
    }

    /// What was taken for a request that was refused elsewhere could not be given back.
    pub(super) fn rollback_failed(&self, worker: WorkerId) {
        self.lost.add(worker, 1);
        if self.losses.should_log() {
            tracing::warn!(
                "hits that were taken for a refused request could not be given back; they count until their counter ends"
            );
        }
    }

    /// Shows everything to the meter.
    pub fn observe(self: &Arc<Self>, meter: &Meter) {
        let this = Arc::clone(self);
        let failures = meter.u64_observable_counter("sluicegate_redis_failures_total");
        failures
            .with_description("Calls to Redis servers that failed or were redirected, by kind")
            .with_callback(move |observer| {
                for failure in Failure::ALL {
                    observer.observe(this.failures[failure as usize].get(), &[KeyValue::new("kind", failure.kind())]);
                }
            })
            .build();
        let this = Arc::clone(self);
        let up = meter.u64_observable_gauge("sluicegate_redis_up");
        up.with_description("Whether every worker can ask the server: 1 or 0")
            .with_callback(move |observer| {
                for (name, up) in this.servers() {
                    observer.observe(up.into(), &[KeyValue::new("server", name.to_string())]);
                }
            })
            .build();
        let this = Arc::clone(self);
        let lost = meter.u64_observable_counter("sluicegate_redis_rollback_failures_total");
        lost.with_description("Takes of refused requests that could not be given back")
            .with_callback(move |observer| observer.observe(this.lost.get(), &[]))
            .build();
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Arc<str>, Server>> {
        self.servers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_up_when_every_worker_that_wants_it_can_ask_it() {
        let (health, name) = (Health::new(2), Arc::<str>::from("a"));
        let up = || health.servers().into_iter().map(|(_, up)| up).collect::<Vec<_>>();
        health.add_worker(&name);
        health.add_worker(&name);
        assert_eq!(up(), [false]);
        health.came_up(&name);
        assert_eq!(up(), [false], "one of two");
        health.came_up(&name);
        assert_eq!(up(), [true]);
        health.went_down(&name, &RedisError::from((redis::ErrorKind::Io, "broken")));
        assert_eq!(up(), [false]);
        health.stays_down(&name, &RedisError::from((redis::ErrorKind::Io, "refused")));
        health.came_up(&name);
        assert_eq!(up(), [true]);
        health.remove_worker(&name, true);
        assert_eq!(up(), [true], "the other worker's");
        health.remove_worker(&name, true);
        assert!(up().is_empty());
        // Late news of a server that nobody wants any more.
        health.came_up(&name);
        health.remove_worker(&name, true);
        assert!(up().is_empty());
    }
}
