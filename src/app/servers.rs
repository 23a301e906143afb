//! The servers phase: bound sockets, worker threads, and the HTTP, gRPC and admin servers.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use tokio::{sync::watch, task::JoinHandle, time::interval};
use tonic_health::{ServingStatus, server::HealthReporter};

use super::{
    AppError,
    engine::{EngineFactory, wait_until_up},
    operators::OperatorServices,
    rules::Rules,
    tasks::{self, Tasks},
    telemetry::Telemetry,
};
use crate::{
    metrics::{Meter, WorkerId},
    process::{Pauses, Stalls},
    service::{Admin, Clock, Decisions, Quotas, ResourceReports, reload::RulesInForce},
    settings::Settings,
    store::{self, AnyStore},
    telemetry::MetricsPage,
    transport::{
        self, CallerErrors, HEALTH_NAMES, QuotaService, ResourceService, Services, admin, build_tonic_services,
        console::Console, grpc, http,
    },
};

/// Servers with bound sockets. They accept no connections yet.
pub(super) struct Servers {
    grpc: grpc::Server,
    http: http::Server,
    admin: Option<admin::Server>,
    errors: Arc<CallerErrors>,
    /// The decisions of the control runtime's requests: those that arrive as JSON, and calls of the admin API.
    decisions: Decisions,
    workers: usize,
    reports: ResourceReports,
    quotas: Quotas,
    page: Arc<MetricsPage>,
    health: HealthReporter,
    stop: watch::Sender<bool>,
    stalls: Stalls,
    pauses: Pauses,
}

impl Servers {
    /// Binds all sockets, and starts the worker threads, which begin to connect to the store.
    pub(super) async fn bind(
        settings: &Settings,
        telemetry: &Telemetry,
        rules: &Rules,
        engines: &EngineFactory,
    ) -> Result<Self, AppError> {
        let input = settings.input.budget();
        let http = http::Server::bind(&settings.http, &input).await?;
        let page = telemetry.meters.page(&settings.telemetry.prometheus, telemetry.totals(&rules.in_force))?;
        let errors = Arc::<CallerErrors>::default();
        let streams = settings.input.streams();
        let mut grpc = grpc::Server::bind(settings.grpc.clone(), &input, &streams, Arc::clone(&errors)).await?;
        let admin = admin::Server::bind(&settings.admin, &input).await?;
        let decisions = engines.decisions(telemetry.control());
        let reports = ResourceReports {
            engine: decisions.engine.clone(),
            clock: telemetry.clock.clone(),
            resources: rules.resources(),
        };
        let (stop, stopping) = watch::channel(false);
        let stalls = Stalls::default();
        tokio::spawn(stalls.add("control").run());
        let quotas = Quotas::new(decisions.engine.clone(), telemetry.clock.clone(), settings.quotas.clone());
        let (health, tonic_services) = build_tonic_services(ResourceService::new(reports.clone())).await;
        let quota_service =
            QuotaService::new(quotas.clone(), settings.grpc.limits, Arc::clone(&errors), stopping.clone());
        for worker in 0..telemetry.workers {
            let engines = engines.clone();
            let traces = telemetry.traces.clone();
            let tonic_services = tonic_services.clone();
            let limits = settings.grpc.limits;
            let response = settings.response.clone();
            let quota_service = quota_service.clone();
            let errors = Arc::clone(&errors);
            let name = format!("worker-{worker}");
            let watchdog = stalls.add(&name);
            grpc.start_worker(&name, stopping.clone(), move || async move {
                tokio::spawn(watchdog.run());
                let decisions = engines.decisions(WorkerId(worker));
                wait_until_up(&decisions.engine.store).await;
                Services::new(decisions, limits, response, traces, quota_service, tonic_services, errors)
            })?;
        }
        Ok(Self {
            grpc,
            http,
            admin,
            errors,
            decisions,
            workers: telemetry.workers,
            reports,
            quotas,
            page: Arc::new(page),
            health,
            stop,
            stalls,
            pauses: Pauses::default(),
        })
    }

    /// Returns the control runtime's access to the store.
    pub(super) fn store(&self) -> &AnyStore {
        &self.decisions.engine.store
    }

    /// Returns the port of the gRPC server, if it listens on one.
    pub(super) fn grpc_port(&self) -> Option<u16> {
        self.grpc.address().ok()?.rsplit_once(':')?.1.parse().ok()
    }

    /// Returns the clock that decisions use.
    pub(super) fn clock(&self) -> &Clock {
        &self.decisions.clock
    }

    /// Returns the component that collects the utilization of resources.
    pub(super) fn reports(&self) -> &ResourceReports {
        &self.reports
    }

    /// Registers the metrics of connections, stalls, pauses, resources and quotas.
    pub(super) fn observe(&self, meter: &dyn Meter) {
        self.grpc.observe(meter);
        self.stalls.observe(meter);
        self.pauses.observe(meter);
        transport::observe_listeners(meter, &self.grpc, &self.http, self.admin.as_ref());
        self.reports.observe(meter);
        self.quotas.observe(meter);
    }

    /// Starts to accept connections on all sockets.
    pub(super) fn serve(
        self,
        settings: &Settings,
        rules: &Rules,
        operators: OperatorServices,
        tasks: &mut Tasks,
    ) -> Result<RunningServers, AppError> {
        self.log_addresses(settings).map_err(AppError::Process)?;
        let Self { grpc, http, admin, errors, decisions, reports, page, health, stop, stalls, pauses, .. } = self;
        let stopping = stop.subscribe();
        let store = decisions.engine.store.clone();
        let clock = decisions.clock.clone();
        let OperatorServices { overrides, candidates, activity, simulator } = operators;
        let in_force = Arc::clone(&rules.in_force);
        let actions = Admin {
            engine: decisions.engine.clone(),
            overrides: Arc::clone(&overrides),
            in_force: Arc::clone(&in_force),
            candidates,
            activity,
            simulator,
            clock,
        };
        let api = admin::Api::new(actions, admin.as_ref(), settings.console.grafana_url.clone(), stopping.clone());
        let console = Console::new(settings.console.clone(), api.clone());
        if let Some(server) = admin {
            tokio::spawn(server.run(api, console.pages(), stopping.clone()));
        }
        let leaving = Arc::new(AtomicBool::new(false));
        let needs_rules = settings.rules.required_for_health;
        if needs_rules {
            tasks.spawn(&tasks::HEALTH, follow_rules(health.clone(), Arc::clone(&in_force), Arc::clone(&leaving)));
        }
        let handlers = http::Handlers {
            decisions,
            errors,
            reports,
            limits: settings.grpc.limits,
            response: settings.response.clone(),
            in_force,
            overrides,
            page,
            pages: http::LargePages::default(),
            shutting_down: Arc::clone(&leaving),
            needs_rules,
        };
        let watchdog = stalls.add("http");
        let watch = async move {
            tokio::join!(watchdog.run(), pauses.run());
        };
        let http = tokio::spawn(http.run(handlers, console, stopping.clone(), watch));
        let grpc = tokio::spawn(grpc.run(stopping));
        Ok(RunningServers { http, grpc, store, health, leaving, stop })
    }

    fn log_addresses(&self, settings: &Settings) -> std::io::Result<()> {
        if let Some(admin) = &self.admin {
            tracing::info!(target: "sluicegate::app", admin = %admin.local_addr()?, "serving the admin API");
        }
        let grpc = self.grpc.address()?;
        let http_addrs = self.http.local_addrs()?;
        let http = http_addrs[0];
        let others = &http_addrs[1..];
        let others = if others.is_empty() { None } else { Some(tracing::field::debug(others)) };
        let store = store::redact(&settings.store);
        let workers = self.workers;
        tracing::info!(target: "sluicegate::app", %grpc, %http, others, store, workers, "serving");
        Ok(())
    }
}

/// Servers that accept connections, and the handles that stop them.
pub(super) struct RunningServers {
    pub(super) http: JoinHandle<()>,
    pub(super) grpc: JoinHandle<()>,
    pub(super) store: AnyStore,
    pub(super) health: HealthReporter,
    /// Set when the service is about to stop: `/readyz` and `/healthcheck` fail, and requests are still decided.
    pub(super) leaving: Arc<AtomicBool>,
    /// Set when connections are to be closed.
    pub(super) stop: watch::Sender<bool>,
}

/// Reports `NOT_SERVING` by gRPC for as long as no domain has rules, until the service stops. Runs only if
/// `rules.required_for_health` is set.
async fn follow_rules(health: HealthReporter, in_force: Arc<RulesInForce>, leaving: Arc<AtomicBool>) {
    let mut tick = interval(tasks::HEALTH_INTERVAL);
    let mut reported = true;
    loop {
        tick.tick().await;
        if leaving.load(Relaxed) {
            return;
        }
        let has_domains = in_force.has_domains();
        if has_domains != reported {
            let status = if has_domains { ServingStatus::Serving } else { ServingStatus::NotServing };
            set_health(&health, status).await;
            reported = has_domains;
        }
    }
}

/// Sets the health status of every name in [`HEALTH_NAMES`] for gRPC.
pub(super) async fn set_health(health: &HealthReporter, status: ServingStatus) {
    for name in HEALTH_NAMES {
        health.set_service_status(name, status).await;
    }
}
