//! HTTP: `/json`, metrics, health, the console and the other pages. `Pages::router` lists all routes.

mod json;
mod json_text;
mod page;
mod resources;
mod rules;

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
};

use axum::{
    Router,
    extract::{DefaultBodyLimit, Request, State},
    http::{HeaderMap, StatusCode, header::ACCEPT},
    middleware::{Next, from_fn_with_state},
    response::{IntoResponse, Response},
    routing::{any, get, post},
};
use serde::{Deserialize, Serialize};
use tokio::{
    runtime::{self, Handle},
    sync::{oneshot, watch},
    task::JoinSet,
};

use self::page::Page;
use super::{
    CallerErrors, ResponseSettings,
    console::Console,
    grpc::Limits,
    http_server::{Connection, HttpServer, SharedPage},
};
use crate::{
    budget::Budget,
    service::{Decisions, OverrideSync, ResourceReports, reload::RulesInForce},
    store::Servers,
    telemetry::{Exposition, MetricsPage},
};

/// Media type of pages of text.
const TEXT: &str = "text/plain; charset=utf-8";
/// Maximum size of a report of a resource, in bytes.
const MAX_REPORT_BYTES: usize = 64 * 1024;
/// Maximum number of threads that build pages. A page is built once for all callers that wait for it.
const MAX_PAGE_THREADS: usize = 2;

/// Settings for HTTP.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Settings {
    /// Address to listen on.
    pub addr: SocketAddr,
    /// Maximum number of connections. Above it, a new connection replaces another one.
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

impl Settings {
    /// Returns a problem of the settings, or `None` if they are valid.
    #[must_use]
    pub fn problem(&self) -> Option<&'static str> {
        if !self.metrics_path.starts_with('/') || self.metrics_path.contains(['{', '}', '*', ':']) {
            return Some("http.metrics_path must be a path such as /metrics");
        }
        if self.max_connections == 0 {
            return Some("http.max_connections must be greater than 0");
        }
        None
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

    /// Returns the listeners.
    pub(super) fn listeners(&self) -> impl Iterator<Item = &HttpServer> {
        self.0.iter().map(|(server, _)| server)
    }

    /// Serves requests until `stopping` is true, and then finishes the requests in progress.
    ///
    /// A thread of its own accepts the connections, reads the heads, and answers health checks. It hands all other
    /// requests to the runtime of the caller, or to threads that build pages.
    pub async fn run(
        self,
        handlers: Handlers,
        console: Console,
        stopping: watch::Receiver<bool>,
        watchdog: impl Future<Output = ()> + Send + 'static,
    ) {
        let control = Handle::current();
        let (finished, finish) = oneshot::channel::<()>();
        let spawned = thread::Builder::new().name("http".into()).spawn(move || {
            let mut runtime = runtime::Builder::new_current_thread();
            let runtime = runtime.enable_all().max_blocking_threads(MAX_PAGE_THREADS).build();
            match runtime {
                Ok(runtime) => {
                    runtime.block_on(self.serve(handlers, console, stopping, watchdog, control));
                    runtime.shutdown_background();
                }
                Err(error) => tracing::error!(%error, "cannot serve HTTP"),
            }
            drop(finished);
        });
        match spawned {
            Ok(_) => drop(finish.await),
            Err(error) => tracing::error!(%error, "cannot serve HTTP"),
        }
    }

    async fn serve(
        self,
        handlers: Handlers,
        console: Console,
        stopping: watch::Receiver<bool>,
        watchdog: impl Future<Output = ()> + Send + 'static,
        control: Handle,
    ) {
        let watching = tokio::spawn(watchdog);
        let handlers = Arc::new(handlers);
        let console = Arc::new(console);
        let mut running = JoinSet::new();
        for (server, pages) in self.0 {
            let router = pages.router(&handlers, &control);
            let console = Arc::clone(&console);
            let control = control.clone();
            let serving = server.run(
                move |connection: &Connection<'_>| match pages {
                    Pages::All => router.clone().merge(on_runtime(&control, console.routes(connection))),
                    Pages::Debug | Pages::Metrics(_) => router.clone(),
                },
                stopping.clone(),
            );
            running.spawn(serving);
        }
        while running.join_next().await.is_some() {}
        watching.abort();
    }
}

/// Returns routes with requests that are handled by tasks of another runtime.
fn on_runtime(runtime: &Handle, routes: Router) -> Router {
    routes.layer(from_fn_with_state(runtime.clone(), hand_over))
}

/// Handles a request on another runtime. If the caller leaves, the handling ends, too.
async fn hand_over(State(runtime): State<Handle>, request: Request, next: Next) -> Response {
    let mut handling = JoinSet::new();
    handling.spawn_on(next.run(request), &runtime);
    match handling.join_next().await {
        Some(Ok(response)) => response,
        Some(Err(_)) | None => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// Everything that the request handlers use.
pub struct Handlers {
    /// Decides requests to `/json`.
    pub decisions: Decisions,
    /// Counts the errors of callers of `/json`.
    pub errors: Arc<CallerErrors>,
    /// Limits on a request, the same as for gRPC.
    pub limits: Limits,
    /// Settings for responses.
    pub response: ResponseSettings,
    /// Utilization of resources.
    pub reports: ResourceReports,
    /// The rules in force.
    pub in_force: Arc<RulesInForce>,
    /// The overrides.
    pub overrides: Arc<OverrideSync>,
    /// Content of `/metrics` and `/stats`.
    pub page: Arc<MetricsPage>,
    /// The pages that are being sent.
    pub pages: LargePages,
    /// Whether the service is shutting down: it still decides requests, but reports itself as not ready.
    pub shutting_down: Arc<AtomicBool>,
    /// Whether the service is unhealthy without rules.
    pub needs_rules: bool,
}

/// The pages with a size that follows from the number of rules and metrics.
#[derive(Default)]
pub struct LargePages {
    text: Page,
    open_metrics: Page,
    protobuf: Page,
    stats: Page,
    rules: Page,
}

impl Pages {
    /// Returns the routes of these pages.
    fn router(&self, handlers: &Arc<Handlers>, control: &Handle) -> Router {
        match self {
            Self::All => {
                let report = post(resources::report).put(resources::report);
                let report = report.layer(DefaultBodyLimit::max(MAX_REPORT_BYTES));
                let decisions = Router::new()
                    .route("/json", any(json::check))
                    .layer(DefaultBodyLimit::max(handlers.limits.max_message_bytes))
                    .route("/resources/{name}", report.get(resources::get))
                    .with_state(Arc::clone(handlers));
                Router::new()
                    .route("/metrics", get(metrics))
                    .route("/rlconfig", get(rule_list))
                    .route("/stats", get(stats))
                    .route("/healthcheck", get(health))
                    .route("/readyz", get(readiness))
                    .with_state(Arc::clone(handlers))
                    .merge(on_runtime(control, decisions))
            }
            Self::Debug => Router::new()
                .route("/", get(|| async { "/rlconfig: the rules in force\n/stats: all metrics\n" }))
                .route("/rlconfig", get(rule_list))
                .route("/stats", get(stats))
                .with_state(Arc::clone(handlers)),
            Self::Metrics(path) => Router::new().route(path, get(metrics)).with_state(Arc::clone(handlers)),
        }
    }
}

/// Handles `/stats`: one metric per line, ordered by name.
async fn stats(State(handlers): State<Arc<Handlers>>) -> Response {
    let metrics = Arc::clone(&handlers.page);
    respond(handlers.pages.stats.get(move || write_stats(&metrics)).await, TEXT)
}

fn write_stats(metrics: &MetricsPage) -> Vec<u8> {
    let text = String::from_utf8(metrics.write(Exposition::Text)).unwrap_or_default();
    let mut lines = String::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        if let Some((name, value)) = line.rsplit_once(' ') {
            lines.push_str(name);
            lines.push_str(": ");
            lines.push_str(value);
            lines.push('\n');
        }
    }
    lines.into_bytes()
}

/// Handles `/metrics`, in the format that the caller accepts.
async fn metrics(State(handlers): State<Arc<Handlers>>, headers: HeaderMap) -> Response {
    let accept = headers.get(ACCEPT).and_then(|accept| accept.to_str().ok());
    let exposition = Exposition::accepted(accept.unwrap_or_default());
    let page = match exposition {
        Exposition::Text => &handlers.pages.text,
        Exposition::OpenMetrics => &handlers.pages.open_metrics,
        Exposition::Protobuf => &handlers.pages.protobuf,
    };
    let metrics = Arc::clone(&handlers.page);
    respond(page.get(move || metrics.write(exposition)).await, exposition.media_type())
}

/// Handles `/rlconfig`: one line per rule, as in envoyproxy/ratelimit.
async fn rule_list(State(handlers): State<Arc<Handlers>>) -> Response {
    let in_force = Arc::clone(&handlers.in_force);
    respond(handlers.pages.rules.get(move || rules::write(&in_force).into_bytes()).await, TEXT)
}

fn respond(page: Option<Arc<SharedPage>>, media_type: &'static str) -> Response {
    match page {
        Some(page) => page.response(media_type),
        None => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// Handles `/healthcheck`, as in envoyproxy/ratelimit: status 500 during a shutdown, or without rules if
/// `rules.required_for_health` is set.
async fn health(State(handlers): State<Arc<Handlers>>) -> Response {
    if handlers.shutting_down.load(Relaxed) {
        return (StatusCode::INTERNAL_SERVER_ERROR, "shutting down\n").into_response();
    }
    if handlers.needs_rules && !handlers.in_force.has_domains() {
        return (StatusCode::INTERNAL_SERVER_ERROR, "no rules loaded\n").into_response();
    }
    "OK".into_response()
}

/// Returns the state of the servers as text.
fn describe(remote: &dyn Servers) -> String {
    let software = remote.software();
    let servers = remote.servers();
    let down = servers.iter().filter(|(_, up)| !up).count();
    let mut text = match (servers.len(), down) {
        (0, _) => format!("{software}, topology unknown"),
        (_, 0) => format!("{software}, up"),
        (all, down) if all == down => format!("{software}, unavailable"),
        (all, down) => format!("{software}, {down} of {all} servers unavailable"),
    };
    for (name, up) in servers {
        text += &format!("\n  {name}: {}", if up { "up" } else { "unavailable" });
    }
    text
}

/// Handles `/readyz`: whether callers should use this instance, and the state of the store.
///
/// An unavailable store does not make the instance unready: all instances share the store, and the rules' `on_error`
/// decides what happens to callers.
async fn readiness(State(handlers): State<Arc<Handlers>>) -> Response {
    let store = match handlers.decisions.engine.store.remote() {
        None => "memory".to_owned(),
        Some(remote) => describe(remote),
    };
    let (code, readiness) = if handlers.shutting_down.load(Relaxed) {
        (StatusCode::SERVICE_UNAVAILABLE, "shutting down")
    } else {
        (StatusCode::OK, "ready")
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

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use axum::body::Body;
    use tower_service::Service;

    use super::*;

    /// Requests that another runtime handles wait for it, and all others do not.
    #[tokio::test]
    async fn health_is_answered_while_the_control_runtime_is_blocked() {
        let control = runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
        let (unblock, blocked) = mpsc::channel::<()>();
        control.spawn(async move { blocked.recv() });
        let call = get(|| async { thread::current().name().map(str::to_owned).unwrap_or_default() });
        let mut routes = Router::new()
            .route("/healthcheck", get(|| async { "OK" }))
            .merge(on_runtime(control.handle(), Router::new().route("/json", call)));
        let mut send = |path: &str| routes.call(Request::get(path).body(Body::empty()).unwrap());
        let call = tokio::spawn(send("/json"));
        assert_eq!(send("/healthcheck").await.unwrap().status(), StatusCode::OK);
        assert!(!call.is_finished());
        unblock.send(()).unwrap();
        let body = axum::body::to_bytes(call.await.unwrap().unwrap().into_body(), 1_000).await.unwrap();
        assert!(body.starts_with(b"tokio-r"), "{body:?}");
        control.shutdown_background();
    }
}
