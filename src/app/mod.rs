//! Builds the service from its settings, runs it, and shuts it down: the only place that wires components together.
//!
//! `serve` lists the phases. A phase is a function of a module of this folder, and depends only on the phases before it:
//!
//! | phase | module | provides |
//! | --- | --- | --- |
//! | settings | `open_files` | connection limits that fit the limit of open files |
//! | telemetry | `telemetry` | logs, metrics, traces, statsd |
//! | rules | `rules` | the rules in force, from files or a control plane |
//! | store | `store` | the counters: memory, Redis or memcached |
//! | engine | `engine` | one engine for each worker and one for the control runtime |
//! | servers | `servers` | bound sockets, worker threads, gRPC, HTTP and the admin API |
//! | overrides | `operators` | the changes of operators, candidate rules, activity |
//! | cluster | `cluster` | the exchange of hits with other instances, if there are `cluster.peers` |
//! | background tasks | `tasks` | one list: name, interval, owner |
//! | shutdown | `shutdown` | the same phases in reverse order |
//!
//! docs/design/architecture.md lists the threads and their work ("Threads"), and answers the questions of newcomers
//! ("Questions").

mod cluster;
mod core_dumps;
mod engine;
mod error;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod open_files;
mod operators;
mod rules;
mod servers;
mod shutdown;
mod signals;
mod store;
mod tasks;
mod telemetry;

pub use error::AppError;
pub(crate) use rules::source;

use std::sync::Arc;

use tokio::runtime;

use self::{
    engine::EngineFactory,
    operators::OperatorServices,
    rules::Rules,
    servers::{RunningServers, Servers},
    signals::Signals,
    store::StoreSetup,
    tasks::Tasks,
    telemetry::{StatsdExport, Telemetry},
};
use crate::{
    metrics::{Instrument, Meter},
    service::Recorder,
    settings::Settings,
    transport::cluster::Cluster,
};

/// Runs the service until it receives SIGTERM or SIGINT.
///
/// # Errors
/// Returns an error if a component cannot be started, for example because an address is in use, or because a file or
/// the rules are invalid.
pub fn run(settings: Settings) -> Result<(), AppError> {
    if !settings.core_dumps {
        core_dumps::forbid().map_err(AppError::Process)?;
    }
    settings.telemetry.log.start()?;
    for warning in &settings.warnings {
        tracing::warn!("{warning}");
    }
    if let Err(error) = sluicegate_calendar::Zone::check_folder() {
        tracing::warn!(error, "cannot read the time zones in the folder of TZDIR; using those in the program");
    }
    // A second call in the same process fails because the provider is already installed, which is fine.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let control = runtime::Builder::new_current_thread().enable_all().build().map_err(AppError::Process)?;
    let result = control.block_on(serve(settings));
    // A thread that is still compiling rules must not delay the exit.
    control.shutdown_background();
    result
}

/// Starts the phases in order, serves until a signal arrives, and stops the phases in reverse order.
async fn serve(mut settings: Settings) -> Result<(), AppError> {
    let mut signals = Signals::new().map_err(AppError::Process)?;
    open_files::divide(&mut settings);
    let mut tasks = Tasks::default();
    let telemetry = Telemetry::start(&settings)?;
    let rules = Rules::start(&settings, &telemetry, &mut tasks)?;
    if !rules.wait_until_loaded(&settings, &mut signals).await {
        return Ok(());
    }
    let service = Service::start(&settings, telemetry, &rules, &mut tasks).await?;
    let Service { servers, cluster, statsd, recorder, telemetry } = service;
    shutdown::stop_servers(servers, cluster.as_deref(), signals, &settings.shutdown, &telemetry.clock).await;
    tasks.stop().await;
    shutdown::stop_exporters(statsd, recorder, telemetry).await;
    Ok(())
}

/// The running components, in the order in which they are stopped.
struct Service {
    servers: RunningServers,
    cluster: Option<Arc<Cluster>>,
    statsd: Option<StatsdExport>,
    recorder: Option<Arc<Recorder>>,
    telemetry: Telemetry,
}

impl Service {
    /// Starts the phases after the rules.
    async fn start(
        settings: &Settings,
        mut telemetry: Telemetry,
        rules: &Rules,
        tasks: &mut Tasks,
    ) -> Result<Self, AppError> {
        let store = StoreSetup::new(settings, &telemetry.store_metrics)?;
        let engines = EngineFactory::new(settings, &telemetry, rules, store)?;
        let servers = Servers::bind(settings, &telemetry, rules, &engines).await?;
        engines.store.start_tasks(&engines.local, &telemetry.clock, tasks);
        engine::wait_until_up(servers.store()).await;
        let store = servers.store();
        let grpc_port = servers.grpc_port();
        let operators = OperatorServices::start(settings, &telemetry, rules, store, grpc_port, &engines).await?;

        observe(&telemetry, rules, &engines, &servers, &operators);
        start_periodic(tasks, rules, &servers, &operators);
        let statsd = telemetry.start_statsd(&rules.in_force);
        let cluster = cluster::start(settings, &engines, &telemetry, &operators, tasks).await?;
        if cluster.is_some() {
            // Rules that were promoted on another instance apply from the first decision on.
            operators.candidates.poll(false).await;
        }
        let servers = servers.serve(settings, rules, operators, tasks)?;
        Ok(Self { servers, cluster, statsd, recorder: engines.recorder, telemetry })
    }
}

/// Registers the metrics of all phases.
fn observe(
    telemetry: &Telemetry,
    rules: &Rules,
    engines: &EngineFactory,
    servers: &Servers,
    operators: &OperatorServices,
) {
    let meter = &telemetry.meters;
    let workers = telemetry.workers as u64;
    meter.register(Instrument::gauge("sluicegate_workers", "Number of worker threads", move |observer| {
        observer.observe(workers, []);
    }));
    let clock = telemetry.clock.clone();
    telemetry.statistics.observe(meter, move || clock.now());
    telemetry.decision_metrics.observe(meter);
    rules.observe(meter);
    engines.store.observe(&telemetry.store_metrics, meter);
    if let Some(recorder) = &engines.recorder {
        recorder.observe(meter);
    }
    servers.observe(meter);
    operators.observe(meter);
}

/// Starts the tasks that keep rules, overrides, candidate rules, resources, leases and activity up to date.
fn start_periodic(tasks: &mut Tasks, rules: &Rules, servers: &Servers, operators: &OperatorServices) {
    tasks.spawn(&tasks::RELOAD, Arc::clone(&rules.in_force).follow());
    tasks.spawn(&tasks::RESOURCES, servers.reports().clone().follow());
    tasks.spawn(&tasks::UPKEEP, tasks::keep_up(servers.store().clone(), servers.clock().clone()));
    tasks.spawn(&tasks::OVERRIDES, Arc::clone(&operators.overrides).follow());
    tasks.spawn(&tasks::OVERRIDE_NAMES, Arc::clone(&operators.overrides).follow_names());
    tasks.spawn(&tasks::CANDIDATES, Arc::clone(&operators.candidates).follow());
    tasks.spawn(&tasks::ACTIVITY, Arc::clone(&operators.activity).follow());
    tasks.spawn(&tasks::INSTANCES, Arc::clone(&operators.activity).follow_instances());
}
