//! The background tasks of the control runtime: one list of constants, which the phases spawn.
//!
//! Servers, workers and connections are not in the list, because they end by themselves when the service shuts down.

use std::{sync::Arc, time::Duration};

use futures_util::FutureExt;
use tokio::{task::JoinSet, time::interval};

use crate::{
    service::{Clock, activity, candidates, overrides, reload, resources},
    store::{AnyStore, Memory, redis::topology},
};

/// A background task.
#[derive(Debug)]
pub(super) struct Task {
    name: &'static str,
    /// Time between two runs; `None` if the task waits for events, or takes its interval from the settings.
    interval: Option<Duration>,
    /// The module that the task belongs to.
    owner: &'static str,
}

impl Task {
    const fn new(name: &'static str, interval: Option<Duration>, owner: &'static str) -> Self {
        Self { name, interval, owner }
    }
}

/// Time between two steps in which the memory of expired counters is reclaimed.
const RECLAIM_INTERVAL: Duration = Duration::from_millis(100);
/// Time between two checks for leases to return and for hits of eventual counters to report.
const UPKEEP_INTERVAL: Duration = Duration::from_millis(25);
/// Time between two checks whether there are any rules.
pub(super) const HEALTH_INTERVAL: Duration = Duration::from_millis(250);

pub(super) const CONTROL_PLANE: Task = Task::new("rules from the control plane", None, "transport::xds");
pub(super) const TOPOLOGY: Task =
    Task::new("Redis topology", Some(topology::REFRESH_INTERVAL), "store::redis::topology");
pub(super) const RECLAIM: Task = Task::new("memory of expired counters", Some(RECLAIM_INTERVAL), "store::memory");
pub(super) const UPKEEP: Task = Task::new("leases and eventual counters", Some(UPKEEP_INTERVAL), "store::local");
pub(super) const RELOAD: Task = Task::new("rule reload", Some(reload::POLL_INTERVAL), "service::reload");
pub(super) const RESOURCES: Task =
    Task::new("resource utilization", Some(resources::POLL_INTERVAL), "service::resources");
pub(super) const OVERRIDES: Task = Task::new("override sync", Some(overrides::POLL_INTERVAL), "service::overrides");
pub(super) const OVERRIDE_NAMES: Task =
    Task::new("overrides without effect", Some(overrides::COUNT_INTERVAL), "service::overrides");
pub(super) const CANDIDATES: Task =
    Task::new("candidate rules", Some(candidates::POLL_INTERVAL), "service::candidates");
pub(super) const ACTIVITY: Task = Task::new("activity", Some(activity::POLL_INTERVAL), "service::activity");
pub(super) const INSTANCES: Task = Task::new("activity of all instances", None, "service::activity");
pub(super) const PUBLISH: Task = Task::new("hits for other instances", None, "store::peers");
pub(super) const PEERS: Task = Task::new("hits of other instances", None, "transport::cluster");
pub(super) const HEALTH: Task = Task::new("health without rules", Some(HEALTH_INTERVAL), "app::servers");

/// The tasks that are running.
#[derive(Default)]
pub(super) struct Tasks(JoinSet<()>);

impl Tasks {
    /// Starts a task on the current runtime.
    pub(super) fn spawn(&mut self, task: &Task, future: impl Future<Output = ()> + Send + 'static) {
        let Task { name, interval, owner } = task;
        tracing::debug!(name, ?interval, owner, "background task started");
        // One type for all tasks: tokio's code is compiled once for them.
        self.0.spawn(future.boxed());
    }

    /// Stops all tasks at their next wait.
    pub(super) async fn stop(mut self) {
        self.0.shutdown().await;
    }
}

/// Reclaims the memory of expired counters in small steps.
pub(super) async fn reclaim(memory: Arc<Memory>, clock: Clock) {
    let mut tick = interval(RECLAIM_INTERVAL);
    loop {
        tick.tick().await;
        memory.reclaim(clock.now());
    }
}

/// Returns idle leases and reports the hits of eventual counters.
pub(super) async fn keep_up(store: AnyStore, clock: Clock) {
    let mut tick = interval(UPKEEP_INTERVAL);
    loop {
        tick.tick().await;
        store.sweep(clock.now()).await;
    }
}
