//! The only wiring: settings become a store, an engine, a service and its transports, and later an orderly end.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use tokio::{
    runtime,
    signal::unix::{Signal, SignalKind, signal},
    sync::watch,
    time::{interval, sleep, timeout},
};
use tonic_health::{ServingStatus, server::HealthReporter};

use crate::{
    engine::{Engine, Resources, Statistics, StatisticsSettings, TopEntities},
    metrics::{Totals, WorkerId, observe_counter, observe_gauge},
    rules::{Options, SourceFile},
    service::{
        Admin, Candidates, Check, Clock, OverrideSync, Recorder, ResourceReports, check,
        reload::{FileFilter, LoadError, Reloader, Source},
    },
    settings::Settings,
    store::{
        self, AnyStore, Local, Memory, local,
        overrides::{Journal, JournalError, OverrideStore},
        redis::{SetupError, Time},
    },
    telemetry::{Meters, Statsd, TelemetryError, Traces},
    transport::{
        admin::{self, AdminServerError},
        grpc::{self, HEALTH_NAMES, Handler, ResourceService, Server, ServerError},
        http,
        xds::{self, XdsError},
    },
};

/// Between two looks for quota that was taken in advance and nobody asks for any more.
const SWEEP: Duration = Duration::from_millis(25);
/// Between two small steps of taking expired counters' places back.
const RECLAIM: Duration = Duration::from_millis(100);
/// Between two looks whether there are rules.
const RULES: Duration = Duration::from_millis(250);
/// How long the first calls wait for Redis before the port opens. It opens in any case.
const FIRST_CONNECTION: Duration = Duration::from_secs(1);

/// Why the service does not run.
#[derive(Debug, thiserror::Error)]
pub enum AppError {
    /// Logs, metrics or traces.
    #[error(transparent)]
    Telemetry(#[from] TelemetryError),
    /// The first set of rules.
    #[error("the rules cannot be used")]
    Rules(#[source] LoadError),
    /// Where the control plane is.
    #[error(transparent)]
    Xds(#[from] XdsError),
    /// The store's address.
    #[error(transparent)]
    Store(#[from] SetupError),
    /// The gRPC server.
    #[error(transparent)]
    Grpc(#[from] ServerError),
    /// The operators' listener.
    #[error(transparent)]
    Admin(#[from] AdminServerError),
    /// The HTTP server.
    #[error(transparent)]
    Http(#[from] http::ListenError),
    /// The file that keeps what operators say.
    #[error(transparent)]
    Directives(#[from] JournalError),
    /// Where requests are to be recorded.
    #[error("requests cannot be recorded in record.dir, or with record.hash_key_file")]
    Record(#[source] io::Error),
    /// The process itself.
    #[error("the process cannot be set up")]
    Process(#[source] io::Error),
}

/// The rules that `sluicegate` serves when it is given none.
fn examples() -> Vec<SourceFile> {
    let text = include_str!("../deploy/examples/quickstart.yaml").to_owned();
    vec![SourceFile { name: "deploy/examples/quickstart.yaml".into(), text }]
}

/// Where the rules come from.
pub(crate) fn source(settings: &Settings) -> Source {
    if settings.rules.xds.server.is_some() {
        return Source::Pushed;
    }
    let which = if settings.rules.all_files { FileFilter::All } else { FileFilter::Yaml };
    let directory = |directory| Source::Directory(directory, which);
    settings.rules.dir.clone().map_or_else(|| Source::BuiltIn(examples()), directory)
}

/// Runs the service until it is told to stop.
pub fn run(settings: Settings) -> Result<(), AppError> {
    settings.telemetry.log.start()?;
    for remark in &settings.warnings {
        tracing::warn!("{remark}");
    }
    // The second of two calls in one process loses, and that is as well.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let control = runtime::Builder::new_current_thread().enable_all().build().map_err(AppError::Process)?;
    let result = control.block_on(serve(settings));
    // A thread that compiles rules must not hold the exit up.
    control.shutdown_background();
    result
}

async fn serve(mut settings: Settings) -> Result<(), AppError> {
    divide_open_files(&mut settings);
    let workers = match settings.workers {
        0 => thread::available_parallelism().map_or(1, usize::from),
        workers => workers,
    };
    // The control runtime decides, too: what comes as JSON.
    let control = WorkerId(workers);
    let clock = Clock::System;
    let mut signals = Signals::new().map_err(AppError::Process)?;
    let store_metrics = store::Metrics::new(workers + 1);
    let check_metrics = check::Metrics::new(workers + 1);
    let histograms = vec![Arc::clone(check_metrics.latency()), Arc::clone(store_metrics.latency())];
    let meters = Meters::start(&settings.telemetry.otlp, histograms)?;
    let meter = meters.meter();
    let traces = Traces::start_exporting(&settings.telemetry.otlp)?;
    let statsd = Statsd::new(&settings.telemetry.statsd)?;

    let statistics = Statistics::new(
        workers + 1,
        StatisticsSettings {
            max_dynamic_series: settings.telemetry.max_dynamic_series,
            near_limit_ratio: settings.decisions.near_limit_ratio,
        },
    );
    let source = source(&settings);
    let instances = settings.cluster.instances;
    let options =
        Options { merge_domains: settings.rules.merge_domains, charge_all: settings.rules.charge_all, instances };
    let resources = Arc::new(Resources::default());
    let reloader = Reloader::start(source, options, clock.clone(), Arc::clone(&statistics), Arc::clone(&resources));
    let reloader = reloader.map_err(AppError::Rules)?;
    if let Some(client) = xds::Client::new(&settings.rules.xds, &reloader)? {
        client.observe(&meter);
        tokio::spawn(client.run());
        if !settings.rules.xds.start_without_rules {
            tokio::select! {
                () = reloader.loaded() => {}
                () = signals.next() => return Ok(()),
            }
        }
    }

    let store = Arc::new(StoreSetup::new(&settings, &store_metrics)?);
    let mut decisions = settings.decisions.clone();
    decisions.instances = instances;
    decisions.metadata = settings.response.dynamic_metadata;
    decisions.policies = settings.response.headers && settings.response.header_style != grpc::HeaderStyle::Separate;
    let recorder = Recorder::start(&settings.record, workers + 1, clock.now()).map_err(AppError::Record)?;
    let parts = Parts {
        recorder: recorder.clone(),
        store,
        local: Arc::new(Memory::new(&settings.memory)),
        statistics,
        top: TopEntities::new(workers + 1),
        reloader: Arc::clone(&reloader),
        decisions: Arc::new(decisions),
        metrics: Arc::clone(&check_metrics),
        clock: clock.clone(),
    };

    let http = http::Server::bind(&settings.http).await?;
    let (told, telling) = watch::channel(false);
    let totals = {
        let (statistics, reloader) = (Arc::clone(&parts.statistics), Arc::clone(&reloader));
        let metrics = Arc::clone(&check_metrics);
        move || {
            let mut totals = Totals::new();
            statistics.total(&mut totals);
            metrics.total(&mut totals);
            reloader.total(&mut totals);
            totals
        }
    };
    let page = Arc::new(meters.page(&settings.telemetry.prometheus, totals.clone())?);
    let latency = Arc::clone(check_metrics.latency());
    let statsd = statsd.map(|statsd| tokio::spawn(statsd.run(totals, latency, telling)));
    let mut server = Server::bind(settings.grpc.clone()).await?;
    let operators = admin::Server::bind(&settings.admin).await?;
    let check = parts.check(control);
    let reports = ResourceReports { engine: check.engine.clone(), clock: clock.clone(), resources };
    let (health, others) = grpc::build_tonic_services(ResourceService::new(reports.clone())).await;
    let (stop, stopping) = watch::channel(false);
    for worker in 0..workers {
        let (parts, traces, others) = (parts.clone(), traces.clone(), others.clone());
        let (limits, response) = (settings.grpc.limits, settings.response.clone());
        server.start_worker(&format!("worker-{worker}"), stopping.clone(), move || async move {
            let check = parts.check(WorkerId(worker));
            wait_until_up(&check.engine.store).await;
            Handler::new(check, limits, response, traces, others)
        })?;
    }

    observe_gauge(&meter, "sluicegate_workers", "Threads that decide", move || workers as u64);
    let now = clock.clone();
    parts.statistics.observe(&meter, move || now.now());
    reloader.observe(&meter);
    check_metrics.observe(&meter);
    if let Some(recorder) = &recorder {
        recorder.observe(&meter);
    }
    server.observe(&meter);
    parts.store.observe(&store_metrics, &meter);
    tokio::spawn(Arc::clone(&reloader).follow());
    parts.maintain();
    let store = check.engine.store.clone();
    wait_until_up(&store).await;
    reports.observe(&meter);
    tokio::spawn(reports.clone().follow());
    tokio::spawn(sweep(store.clone(), clock.clone()));

    let overrides = OverrideStore::beside(&store, Journal::new(settings.overrides.file.clone()));
    let overrides =
        OverrideSync::new(overrides, settings.overrides.clone(), options, clock.clone(), Arc::clone(&reloader));
    overrides.start().await.map_err(AppError::Directives)?;
    overrides.observe(&meter);
    tokio::spawn(Arc::clone(&overrides).follow());
    let directory = (settings.rules.candidate_dir.clone(), settings.rules.candidate_share);
    let (own_keeper, own_reloader, own_clock) = (Arc::clone(&overrides), Arc::clone(&reloader), clock.clone());
    let resources = Arc::clone(&reports.resources);
    let candidates = Candidates::new(own_keeper, own_reloader, resources, own_clock, workers + 1, directory);
    // What was promoted is in force before the first decision.
    candidates.poll(false).await;
    candidates.observe(&meter);
    tokio::spawn(Arc::clone(&candidates).follow());

    if let Some(operators) = operators {
        let addr = operators.local_addr().map_err(AppError::Process)?;
        tracing::info!(admin = %addr, "serving operators");
        let (engine, clock) = (check.engine.clone(), clock.clone());
        let (overrides, reloader) = (Arc::clone(&overrides), Arc::clone(&reloader));
        let admin = Admin { engine, overrides: overrides, reloader, candidates, clock };
        tokio::spawn(operators.run(admin, stopping.clone()));
    }

    let leaving = Arc::new(AtomicBool::new(false));
    if settings.rules.required_for_health {
        tokio::spawn(require_rules(health.clone(), Arc::clone(&reloader), Arc::clone(&leaving)));
    }
    let handlers = http::Handlers {
        check,
        reports,
        limits: settings.grpc.limits,
        response: settings.response.clone(),
        reloader,
        overrides,
        page,
        leaving: Arc::clone(&leaving),
        needs_rules: settings.rules.required_for_health,
    };
    let address = store::redact(&settings.store);
    let grpc_addr = server.address().map_err(AppError::Process)?;
    let http_addrs = http.local_addrs().map_err(AppError::Process)?;
    let (http_addr, others) = (http_addrs[0], &http_addrs[1..]);
    let others = (!others.is_empty()).then(|| tracing::field::debug(others));
    tracing::info!(grpc = %grpc_addr, http = %http_addr, others, store = address, workers, "serving");
    let http = tokio::spawn(http.run(handlers, stopping.clone()));
    let grpc = tokio::spawn(server.run(stopping));

    leave(signals, &settings, health, &leaving, &stop, async {
        let _ = tokio::join!(grpc, http);
        store.return_all(clock.now()).await;
    })
    .await;
    told.send_replace(true);
    if let Some(statsd) = statsd {
        let _ = statsd.await;
    }
    let _ = tokio::task::spawn_blocking(move || {
        if let Some(recorder) = recorder {
            recorder.finish();
        }
        meters.stop();
        traces.stop();
    })
    .await;
    Ok(())
}

/// Health over gRPC says no while there is no domain, until the service leaves.
async fn require_rules(health: HealthReporter, reloader: Arc<Reloader>, leaving: Arc<AtomicBool>) {
    let mut tick = interval(RULES);
    let mut told = true;
    loop {
        tick.tick().await;
        if leaving.load(Relaxed) {
            return;
        }
        let has_domains = reloader.has_domains();
        if has_domains != told {
            let status = if has_domains { ServingStatus::Serving } else { ServingStatus::NotServing };
            for name in HEALTH_NAMES {
                health.set_service_status(name, status).await;
            }
            told = has_domains;
        }
    }
}

/// As many as the system allows, and of these so many for each listener that there are some for Redis and for files in
/// any case.
fn divide_open_files(settings: &mut Settings) {
    let limit = rlimit::increase_nofile_limit(u64::MAX).ok().and_then(|limit| usize::try_from(limit).ok());
    let limit = limit.unwrap_or(1_024);
    let (http, admin) = (limit / 16, limit / 16);
    settings.http.max_connections = settings.http.max_connections.min(http);
    settings.admin.max_connections = settings.admin.max_connections.min(admin);
    let listeners =
        1 + usize::from(settings.http.debug_addr.is_some()) + usize::from(settings.http.metrics_addr.is_some());
    let others = listeners * settings.http.max_connections + settings.admin.max_connections;
    let grpc = limit - limit / 4 - others;
    if settings.grpc.max_connections > grpc {
        let wanted = std::mem::replace(&mut settings.grpc.max_connections, grpc);
        tracing::warn!(
            limit,
            wanted,
            max = grpc,
            "the limit of open files has no room for grpc.max_connections; fewer are taken"
        );
    }
}

/// ## Serving ⟶ Leaving ⟶ Draining ⟶ Gone
/// Told to stop, health says NOT_SERVING, and calls are still answered. After the delay connections are asked to go
/// and no new ones are taken. Calls under way have the grace to finish. A second signal ends it at once.
async fn leave(
    mut signals: Signals,
    settings: &Settings,
    mut health: HealthReporter,
    leaving: &AtomicBool,
    stop: &watch::Sender<bool>,
    drained: impl Future<Output = ()>,
) {
    signals.next().await;
    tracing::info!(delay = ?settings.shutdown.delay, grace = ?settings.shutdown.grace, "leaving");
    leaving.store(true, Relaxed);
    for name in HEALTH_NAMES {
        health.set_service_status(name, ServingStatus::NotServing).await;
    }
    let drain = async {
        sleep(settings.shutdown.delay).await;
        stop.send_replace(true);
        // Whoever watches the health would hold a connection for ever.
        for name in HEALTH_NAMES {
            health.clear_service_status(name).await;
        }
        if timeout(settings.shutdown.grace, drained).await.is_err() {
            tracing::warn!("some calls did not finish within the grace");
        }
    };
    tokio::select! {
        () = drain => tracing::info!("gone"),
        () = signals.next() => tracing::warn!("told twice to stop: gone at once"),
    }
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// What every worker's service is made of.
#[derive(Clone)]
struct Parts {
    recorder: Option<Arc<Recorder>>,
    store: Arc<StoreSetup>,
    /// Where this instance counts by itself when the store cannot decide.
    local: Arc<Memory>,
    statistics: Arc<Statistics>,
    top: Arc<TopEntities>,
    reloader: Arc<Reloader>,
    decisions: Arc<crate::engine::Settings>,
    metrics: Arc<check::Metrics>,
    clock: Clock,
}

impl Parts {
    fn check(&self, worker: WorkerId) -> Check {
        let engine = Engine {
            worker,
            scope: "",
            store: self.store.connect(worker),
            local: Arc::clone(&self.local),
            rules: Arc::clone(self.reloader.rules()),
            statistics: Arc::clone(&self.statistics),
            top: Some(Arc::clone(&self.top)),
            settings: Arc::clone(&self.decisions),
        };
        let (clock, metrics, recorder) = (self.clock.clone(), Arc::clone(&self.metrics), self.recorder.clone());
        Check { engine, clock, metrics, recorder }
    }

    /// What has to be done now and then, whether anybody asks or not.
    fn maintain(&self) {
        let memory = match &*self.store {
            StoreSetup::Memory(memory) => Arc::clone(memory),
            StoreSetup::Redis(setup, _) => {
                setup.follow();
                Arc::clone(&self.local)
            }
        };
        let clock = self.clock.clone();
        tokio::spawn(async move {
            let mut tick = interval(RECLAIM);
            loop {
                tick.tick().await;
                memory.reclaim(clock.now());
            }
        });
    }
}

/// Gives back what was taken in advance and nobody asks for any more, for ever.
async fn sweep(store: AnyStore, clock: Clock) {
    let mut tick = interval(SWEEP);
    loop {
        tick.tick().await;
        store.sweep(clock.now()).await;
    }
}

/// For a while: it may never be.
async fn wait_until_up(store: &AnyStore) {
    if let AnyStore::Redis(redis) = store {
        redis.store().wait_until_up(FIRST_CONNECTION).await;
    }
}

/// The chosen store: shared by all workers, or with a connection for each.
enum StoreSetup {
    Memory(Arc<Memory>),
    Redis(Box<store::redis::Setup>, Arc<local::Shared>),
}

impl StoreSetup {
    fn new(settings: &Settings, metrics: &Arc<store::Metrics>) -> Result<Self, SetupError> {
        if settings.store == "memory" {
            return Ok(Self::Memory(Arc::new(Memory::new(&settings.memory))));
        }
        let setup = store::redis::Setup::new(&settings.store, &settings.redis, Time::Server, Arc::clone(metrics))?;
        let setup = match &settings.per_second.store {
            Some(store) => setup.with_per_second(store, &settings.per_second.redis, Time::Server)?,
            None => setup,
        };
        let (clock, metrics) = (local::Clock::start(), Arc::clone(metrics.local()));
        let shared = local::Shared::new(&settings.deny_cache, &settings.lease, &settings.eventual, clock, metrics);
        Ok(Self::Redis(Box::new(setup), shared))
    }

    fn connect(&self, worker: WorkerId) -> AnyStore {
        match self {
            Self::Memory(memory) => AnyStore::Memory(Arc::clone(memory)),
            Self::Redis(setup, shared) => {
                AnyStore::Redis(Local::new(setup.connect(worker), Arc::clone(shared), worker))
            }
        }
    }

    fn observe(&self, metrics: &Arc<store::Metrics>, meter: &opentelemetry::metrics::Meter) {
        let Self::Memory(memory) = self else {
            return metrics.observe(meter);
        };
        let this = Arc::clone(memory);
        observe_gauge(meter, "sluicegate_memory_counters", "Counters in memory", move || this.usage().counters);
        let this = Arc::clone(memory);
        observe_counter(
            meter,
            "sluicegate_memory_evictions_total",
            "Live counters forgotten because memory.max_counters was reached",
            move || this.usage().evicted,
        );
        let this = Arc::clone(memory);
        observe_counter(
            meter,
            "sluicegate_memory_expirations_total",
            "Expired counters whose place was taken back",
            move || this.usage().expired,
        );
    }
}
