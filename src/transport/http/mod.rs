//! The HTTP side door: `Pages::router` is the whole of it on a page.

mod json;
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
    grpc::{Limits, ResponseSettings},
    http_server::HttpServer,
};
use crate::{
    engine::overrides::Target,
    rules::Measure,
    service::{Check, OverrideSync, ResourceReports, reload::Reloader},
    store::AnyStore,
    telemetry::{Exposition, MetricsPage},
};

/// How HTTP is served.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Where to listen.
    pub addr: SocketAddr,
    /// Connections at most; when all are taken, the one that was answered least lately gives way to the next.
    pub max_connections: usize,
    /// Where `/rlconfig` and `/stats` are as well, for whoever looks for them on a port of their own.
    pub debug_addr: Option<SocketAddr>,
    /// Where the metrics are as well.
    pub metrics_addr: Option<SocketAddr>,
    /// And under which path there.
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

/// The listeners, each with its pages.
pub struct Server(Vec<(HttpServer, Pages)>);

/// What a listener shows.
enum Pages {
    All,
    Debug,
    Metrics(String),
}

/// An address that cannot be listened on.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {addr} for HTTP")]
pub struct ListenError {
    addr: SocketAddr,
    source: io::Error,
}

impl Server {
    /// Listens; connections wait until it runs.
    pub async fn bind(settings: &Settings) -> Result<Self, ListenError> {
        let metrics = Pages::Metrics(settings.metrics_path.clone());
        let mut all = Vec::new();
        for (addr, pages, name) in [
            (Some(settings.addr), Pages::All, "http"),
            (settings.debug_addr, Pages::Debug, "debug"),
            (settings.metrics_addr, metrics, "metrics"),
        ] {
            if let Some(addr) = addr {
                let server = HttpServer::bind(addr, None, settings.max_connections, name).await;
                all.push((server.map_err(|source| ListenError { addr, source })?, pages));
            }
        }
        Ok(Self(all))
    }

    /// Where they listen, the ports settled: all pages, debugging, metrics.
    pub fn local_addrs(&self) -> io::Result<Vec<SocketAddr>> {
        self.0.iter().map(|(server, _)| server.local_addr()).collect()
    }

    /// Serves until it is told to stop, and then what is under way.
    pub async fn run(self, handlers: Handlers, stopping: watch::Receiver<bool>) {
        let handlers = Arc::new(handlers);
        let mut running = JoinSet::new();
        for (server, pages) in self.0 {
            let router = pages.router(&handlers);
            running.spawn(server.run(move |_| router.clone(), stopping.clone()));
        }
        while running.join_next().await.is_some() {}
    }
}

/// What the handlers use.
pub struct Handlers {
    /// Decides what comes as JSON.
    pub check: Check,
    /// The same limits as for gRPC.
    pub limits: Limits,
    /// What answers carry.
    pub response: ResponseSettings,
    /// What resources say of themselves.
    pub reports: ResourceReports,
    /// The rules in force.
    pub reloader: Arc<Reloader>,
    /// What operators say over them.
    pub overrides: Arc<OverrideSync>,
    /// For `/metrics` and `/stats`.
    pub page: Arc<MetricsPage>,
    /// The service is going: it answers, but wants no new callers.
    pub leaving: Arc<AtomicBool>,
    /// Without any rules it wants none either.
    pub needs_rules: bool,
}

impl Pages {
    /// Every route there is.
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
                .route("/", get(|| async { "/rlconfig: the rules in force\n/stats: what is counted\n" }))
                .route("/rlconfig", get(rules))
                .route("/stats", get(stats)),
            Self::Metrics(path) => Router::new().route(path, get(metrics)),
        };
        router.layer(DefaultBodyLimit::max(handlers.limits.max_message_bytes)).with_state(Arc::clone(handlers))
    }
}

/// All numbers, a line each, in the order of their names.
async fn stats(State(handlers): State<Arc<Handlers>>) -> Response {
    let gathered = tokio::task::spawn_blocking(move || handlers.page.write(Exposition::Text)).await;
    let Some(text) = gathered.ok().and_then(|page| String::from_utf8(page).ok()) else {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    };
    let line = |line: &str| line.rsplit_once(' ').map(|(name, value)| format!("{name}: {value}\n"));
    let lines = text.lines().filter(|line| !line.starts_with('#')).filter_map(line);
    lines.collect::<String>().into_response()
}

async fn metrics(State(handlers): State<Arc<Handlers>>, headers: HeaderMap) -> Response {
    let accept = headers.get(ACCEPT).and_then(|accept| accept.to_str().ok());
    let exposition = Exposition::accepted(accept.unwrap_or_default());
    // With many rules this is work for a while; the control runtime has others waiting.
    match tokio::task::spawn_blocking(move || handlers.page.write(exposition)).await {
        Ok(page) => ([(CONTENT_TYPE, exposition.media_type())], page).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// When the rules were loaded and what is wrong with newer ones, in comments; then the peer's line for each rule.
async fn rules(State(handlers): State<Arc<Handlers>>) -> String {
    let status = handlers.reloader.status();
    let mut text = match status.loaded_at.map(|at| UNIX_EPOCH + Duration::from_secs(at.floor_secs())) {
        Some(loaded) => format!("# loaded {}\n", humantime::format_rfc3339_seconds(loaded)),
        None => "# not loaded yet\n".to_owned(),
    };
    for line in status.last_error.iter().flat_map(|error| error.lines()) {
        text += &format!("# last error: {line}\n");
    }
    let snapshot = handlers.reloader.rules().load_full();
    for (scope, mode, origin) in snapshot.modes().in_force() {
        let scope = Target::Switch(scope.clone()).to_string();
        text += &format!("# {scope} {}, by the {}\n", mode.name(), origin.name());
    }
    for rule in snapshot.rules().rules() {
        let requests = rule.limit.as_ref().map_or(0, |limit| limit.requests());
        let (unit, multiplier) = match rule.limit.as_ref().map(|limit| limit.measure()) {
            Some(Measure::Rate { unit, multiplier }) => (unit.name().to_uppercase(), multiplier),
            Some(Measure::InFlight { .. }) => ("IN_FLIGHT".into(), 1),
            None => ("UNKNOWN".into(), 1),
        };
        let multiplier = if multiplier == 1 { String::new() } else { format!(" unit_multiplier={multiplier}") };
        // The peer has no such word; a line about fixed windows is as there.
        let algorithm = rule.limit.as_ref().filter(|limit| !limit.is_default()).map(|limit| limit.algorithm().name());
        let algorithm = algorithm.map_or_else(String::new, |name| format!(" algorithm={name}"));
        let mode = snapshot.modes().of(&rule.labels[0], Some(rule));
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

/// Is the process alive and willing? As the peer's.
async fn health(State(handlers): State<Arc<Handlers>>) -> Response {
    if handlers.leaving.load(Relaxed) {
        return (StatusCode::INTERNAL_SERVER_ERROR, "leaving\n").into_response();
    }
    if handlers.needs_rules && !handlers.reloader.has_domains() {
        return (StatusCode::INTERNAL_SERVER_ERROR, "there are no rules\n").into_response();
    }
    "OK".into_response()
}

/// Should callers be sent here? A store out of reach is told, but no reason to say no: all instances share it, and
/// what happens to callers then is the rules' `on_error`.
async fn readiness(State(handlers): State<Arc<Handlers>>) -> Response {
    let store = match &handlers.check.engine.store {
        AnyStore::Memory(_) => "memory".to_owned(),
        AnyStore::Redis(redis) => {
            let servers = redis.store().servers();
            let down = servers.iter().filter(|(_, up)| !up).count();
            let mut text = match (servers.len(), down) {
                (0, _) => "redis, nobody has said yet where".to_owned(),
                (_, 0) => "redis, up".to_owned(),
                (all, down) if all == down => "redis, out of reach".to_owned(),
                (all, down) => format!("redis, {down} of {all} servers out of reach"),
            };
            for (name, up) in servers {
                text += &format!("\n  {name}: {}", if up { "up" } else { "out of reach" });
            }
            text
        }
    };
    let (code, word) = match handlers.leaving.load(Relaxed) {
        true => (StatusCode::SERVICE_UNAVAILABLE, "leaving"),
        false => (StatusCode::OK, "ready"),
    };
    let known = handlers.overrides.status();
    let overrides = match known.error {
        None if known.version == 0 => String::new(),
        None => format!("overrides: version {}\n", known.version),
        Some(error) => format!("overrides: version {}, not heard of now: {error}\n", known.version),
    };
    (code, format!("{word}\nstore: {store}\n{overrides}")).into_response()
}
