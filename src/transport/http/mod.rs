//! HTTP: `/json`, metrics, health, the console and the other pages. `Pages::router` lists all routes.

mod json;
mod json_text;
mod resources;

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, UNIX_EPOCH},
};

use axum::{
    Router,
    extract::{DefaultBodyLimit, State},
    http::{
        HeaderMap, StatusCode,
        header::{ACCEPT, CONTENT_TYPE},
    },
    response::{IntoResponse, Response},
    routing::{any, get},
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::{sync::watch, task::JoinSet};

use super::{
    console::Console,
    grpc::{CallerErrors, Limits, ResponseSettings},
    http_server::{Connection, HttpServer},
};
use crate::{
    budget::Budget,
    engine::overrides::Target,
    rules::Measure,
    service::{Check, OverrideSync, ResourceReports, reload::Reloader},
    store::AnyStore,
    telemetry::{Exposition, MetricsPage},
};

/// Settings for HTTP.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Address to listen on.
    pub addr: SocketAddr,
    /// Maximum number of connections. Above it, a new connection replaces the one with the oldest last response.
    pub max_connections: usize,
    /// Additional address for `/rlconfig` and `/stats`, as the debug port of envoyproxy/ratelimit.
    pub debug_addr: Option<SocketAddr>,
    /// Additional address for the metrics.
    pub metrics_addr: Option<SocketAddr>,
    /// Path of the metrics on `metrics_addr`.
    pub metrics_path: String,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            addr: SocketAddr::from(([0, 0, 0, 0], 8080)),
            max_connections: 256,
            debug_addr: None,
            metrics_addr: None,
            metrics_path: "/metrics".into(),
        }
    }
}

/// The HTTP listeners, each with its pages.
pub struct Server(Vec<(HttpServer, Pages)>);

/// The set of pages that a listener serves.
#[derive(Clone)]
enum Pages {
    All,
    Debug,
    Metrics(String),
}

/// Error returned when an address cannot be bound.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {addr} for HTTP")]
pub struct ListenError {
    addr: SocketAddr,
    source: io::Error,
}

impl Server {
    /// Opens the listeners. Connections wait until [`run`](Self::run) is called.
    ///
    /// # Errors
    ///
    /// Returns an error if an address cannot be bound.
    pub(crate) async fn bind(settings: &Settings, input: &Budget) -> Result<Self, ListenError> {
        let metrics = Pages::Metrics(settings.metrics_path.clone());
        let mut servers = Vec::new();
        for (addr, pages, name) in [
            (Some(settings.addr), Pages::All, "http"),
            (settings.debug_addr, Pages::Debug, "debug"),
            (settings.metrics_addr, metrics, "metrics"),
        ] {
            if let Some(addr) = addr {
                let server = HttpServer::bind(addr, None, settings.max_connections, name, input).await;
                servers.push((server.map_err(|source| ListenError { addr, source })?, pages));
            }
        }
        Ok(Self(servers))
    }

    /// Returns the addresses with the actual ports: of all pages, and of the debug pages and the metrics if configured.
    ///
    /// # Errors
    ///
    /// Returns an error if the operating system does not return an address.
    pub fn local_addrs(&self) -> io::Result<Vec<SocketAddr>> {
        self.0.iter().map(|(server, _)| server.local_addr()).collect()
    }

    /// Serves requests until `stopping` is true, and then finishes the requests in progress.
    pub async fn run(self, handlers: Handlers, console: Console, stopping: watch::Receiver<bool>) {
        let (handlers, console) = (Arc::new(handlers), Arc::new(console));
        let mut running = JoinSet::new();
        for (server, pages) in self.0 {
            let (router, console) = (pages.router(&handlers), Arc::clone(&console));
            let router_of = move |connection: &Connection<'_>| match pages {
                Pages::All => router.clone().merge(console.routes(connection)),
                Pages::Debug | Pages::Metrics(_) => router.clone(),
            };
            running.spawn(server.run(router_of, stopping.clone()));
        }
        while running.join_next().await.is_some() {}
    }
}

/// Everything that the request handlers use.
pub struct Handlers {
    /// Decides requests to `/json`.
    pub check: Check,
    /// Counts the errors of callers of `/json`.
    pub errors: Arc<CallerErrors>,
    /// Limits on a request, the same as for gRPC.
    pub limits: Limits,
    /// Settings for responses.
    pub response: ResponseSettings,
    /// Utilization of resources.
    pub reports: ResourceReports,
    /// The rules in force.
    pub reloader: Arc<Reloader>,
    /// The overrides.
    pub overrides: Arc<OverrideSync>,
    /// Content of `/metrics` and `/stats`.
    pub page: Arc<MetricsPage>,
    /// Whether the service is shutting down: it still decides requests, but reports itself as not ready.
    pub shutting_down: Arc<AtomicBool>,
    /// Whether the service is unhealthy without rules.
    pub needs_rules: bool,
}

impl Pages {
    /// Returns the routes of these pages.
    fn router(&self, handlers: &Arc<Handlers>) -> Router {
        let router = match self {
            Self::All => Router::new()
                .route("/json", any(json::check))
                .route("/metrics", get(metrics))
                .route("/rlconfig", get(rules))
                .route("/stats", get(stats))
                .route("/healthcheck", get(health))
                .route("/readyz", get(readiness))
                .route("/resources/{name}", get(resources::get).post(resources::report).put(resources::report)),
            Self::Debug => Router::new()
                .route("/", get(|| async { "/rlconfig: the rules in force\n/stats: all metrics\n" }))
                .route("/rlconfig", get(rules))
                .route("/stats", get(stats)),
            Self::Metrics(path) => Router::new().route(path, get(metrics)),
        };
        router.layer(DefaultBodyLimit::max(handlers.limits.max_message_bytes)).with_state(Arc::clone(handlers))
    }
}

/// Handles `/stats`: one metric per line, ordered by name.
async fn stats(State(handlers): State<Arc<Handlers>>) -> Response {
    let gathered = tokio::task::spawn_blocking(move || handlers.page.write(Exposition::Text)).await;
    let Some(text) = gathered.ok().and_then(|page| String::from_utf8(page).ok()) else {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    };
    let line = |line: &str| line.rsplit_once(' ').map(|(name, value)| format!("{name}: {value}\n"));
    let lines = text.lines().filter(|line| !line.starts_with('#')).filter_map(line);
    lines.collect::<String>().into_response()
}

/// Handles `/metrics`, in the format that the caller accepts.
async fn metrics(State(handlers): State<Arc<Handlers>>, headers: HeaderMap) -> Response {
    let accept = headers.get(ACCEPT).and_then(|accept| accept.to_str().ok());
    let exposition = Exposition::accepted(accept.unwrap_or_default());
    // With many rules this takes long, and must not block the other tasks of the control runtime.
    match tokio::task::spawn_blocking(move || handlers.page.write(exposition)).await {
        Ok(page) => ([(CONTENT_TYPE, exposition.media_type())], page).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// Handles `/rlconfig`: one line per rule, as in envoyproxy/ratelimit.
///
/// Comments above the rules contain the time at which they were loaded, the error of newer rules, and the switches.
async fn rules(State(handlers): State<Arc<Handlers>>) -> String {
    let status = handlers.reloader.status();
    let mut text = match status.loaded_at.map(|at| UNIX_EPOCH + Duration::from_secs(at.floor_secs())) {
        Some(loaded) => format!("# loaded {}\n", humantime::format_rfc3339_seconds(loaded)),
        None => "# no rules loaded yet\n".to_owned(),
    };
    for line in status.last_error.iter().flat_map(|error| error.lines()) {
        text += &format!("# last error: {line}\n");
    }
    let snapshot = handlers.reloader.rules().load_full();
    for (scope, mode, origin) in snapshot.modes().in_force() {
        let scope = Target::Switch(scope.clone()).to_string();
        text += &format!("# {scope} {}, origin: {}\n", mode.name(), origin.name());
    }
    for rule in snapshot.rules().rules() {
        let requests = rule.limit.as_ref().map_or(0, |limit| limit.requests());
        let (unit, multiplier) = match rule.limit.as_ref().map(|limit| limit.measure()) {
            Some(Measure::Rate { unit, multiplier }) => (unit.name().to_uppercase(), multiplier),
            Some(Measure::InFlight { .. }) => ("IN_FLIGHT".into(), 1),
            None => ("UNKNOWN".into(), 1),
        };
        let multiplier = if multiplier == 1 { String::new() } else { format!(" unit_multiplier={multiplier}") };
        // envoyproxy/ratelimit does not print the algorithm, so lines about fixed windows do not contain it either.
        let algorithm = rule.limit.as_ref().filter(|limit| !limit.is_default()).map(|limit| limit.algorithm().name());
        let algorithm = algorithm.map_or_else(String::new, |name| format!(" algorithm={name}"));
        let mode = snapshot.modes().mode_of(&rule.labels[0], Some(rule));
        let mode = mode.map_or_else(String::new, |mode| format!(", switched: {}", mode.name()));
        text += &format!(
            "{}: unit={unit}{multiplier}{algorithm} requests_per_unit={requests}, shadow_mode: {}, quota_mode: {}{mode}\n",
            rule.labels.join("."),
            rule.shadow_mode,
            rule.quota_mode,
        );
    }
    text
}

/// Handles `/healthcheck`: whether the process is alive and accepts callers, as in envoyproxy/ratelimit.
async fn health(State(handlers): State<Arc<Handlers>>) -> Response {
    if handlers.shutting_down.load(Relaxed) {
        return (StatusCode::INTERNAL_SERVER_ERROR, "shutting down\n").into_response();
    }
    if handlers.needs_rules && !handlers.reloader.has_domains() {
        return (StatusCode::INTERNAL_SERVER_ERROR, "no rules loaded\n").into_response();
    }
    "OK".into_response()
}

/// Handles `/readyz`: whether callers should use this instance, and the state of the store.
///
/// An unavailable store does not make the instance unready: all instances share the store, and the rules' `on_error`
/// decides what happens to callers.
async fn readiness(State(handlers): State<Arc<Handlers>>) -> Response {
    let store = match &handlers.check.engine.store {
        AnyStore::Memory(_) => "memory".to_owned(),
        AnyStore::Redis(redis) => {
            let servers = redis.store().servers();
            let down = servers.iter().filter(|(_, up)| !up).count();
            let mut text = match (servers.len(), down) {
                (0, _) => "redis, topology unknown".to_owned(),
                (_, 0) => "redis, up".to_owned(),
                (all, down) if all == down => "redis, unavailable".to_owned(),
                (all, down) => format!("redis, {down} of {all} servers unavailable"),
            };
            for (name, up) in servers {
                text += &format!("\n  {name}: {}", if up { "up" } else { "unavailable" });
            }
            text
        }
    };
    let (code, readiness) = match handlers.shutting_down.load(Relaxed) {
        true => (StatusCode::SERVICE_UNAVAILABLE, "shutting down"),
        false => (StatusCode::OK, "ready"),
    };
    let status = handlers.overrides.status();
    let overrides = match status.error {
        None if status.is_read_only => {
            format!("overrides: version {}, read-only: another process holds the journal\n", status.version)
        }
        None if status.version == 0 => String::new(),
        None => format!("overrides: version {}\n", status.version),
        Some(error) => format!("overrides: version {}, sync failed: {error}\n", status.version),
    };
    (code, format!("{readiness}\nstore: {store}\n{overrides}")).into_response()
}
