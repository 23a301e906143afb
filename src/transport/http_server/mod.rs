//! [`HttpServer`]: HTTP/1 and HTTP/2 for pages, metrics and the admin API, which have few callers.
//!
//! The head of a request, the response and an idle connection have timeouts. If the maximum number of connections is
//! open, or the process has no free file descriptors, a new connection replaces the one whose last response is the
//! oldest. Callers that hold idle connections therefore cannot lock others out.

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use axum::{
    Router,
    extract::{Request, State},
    http::StatusCode,
    middleware::{Next, from_fn_with_state},
    response::{IntoResponse, Response},
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::{
        conn::auto,
        graceful::{GracefulShutdown, Watcher},
    },
    service::TowerToHyperService,
};
use rustls::pki_types::CertificateDer;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::AbortHandle,
    time::{sleep, timeout},
};

use super::{grpc::wait_for_shutdown, idle_timeout::IdleTimeout, tls::Tls};
use crate::{budget::Budget, metrics::LogThrottle};

/// Timeout for a TLS handshake, and for the head of a request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for the body and the handling of a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Time without received or sent bytes after which a connection is closed. Longer than Prometheus' scrape interval.
const IDLE_TIMEOUT: Duration = Duration::from_secs(90);
/// Interval of HTTP/2 pings on an idle connection.
const PING_INTERVAL: Duration = Duration::from_secs(60);
/// Pause after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The peer of a connection.
pub(crate) struct Connection<'a> {
    /// Address of the peer.
    pub(crate) peer: SocketAddr,
    /// Certificate that the peer presented.
    pub(crate) certificate: Option<&'a CertificateDer<'a>>,
}

/// An HTTP listener with a maximum number of connections.
pub(crate) struct HttpServer {
    listener: TcpListener,
    tls: Option<Arc<Tls>>,
    max_connections: usize,
    /// The name of the listener in log messages.
    name: &'static str,
    /// The memory for bodies and responses of this listener.
    budget: Budget,
}

impl HttpServer {
    /// Opens the listener. Connections wait until [`run`](Self::run) is called.
    pub(crate) async fn bind(
        addr: SocketAddr,
        tls: Option<Arc<Tls>>,
        max_connections: usize,
        name: &'static str,
        input: &Budget,
    ) -> io::Result<Self> {
        let budget = input.share(name, input.max_bytes() / 4);
        Ok(Self { listener: TcpListener::bind(addr).await?, tls, max_connections, name, budget })
    }

    /// Returns the address with the actual port.
    pub(crate) fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves connections until `stopping` is true, and then finishes the calls in progress.
    ///
    /// `router` returns the routes for a connection.
    pub(crate) async fn run(
        self,
        router: impl Fn(&Connection<'_>) -> Router + Clone + Send + 'static,
        mut stopping: watch::Receiver<bool>,
    ) {
        if let Some(tls) = &self.tls {
            tokio::spawn(Arc::clone(tls).follow());
        }
        let (queue, graceful) = (Arc::new(Mutex::new(ConnectionQueue::default())), GracefulShutdown::new());
        let (log_full, log_accept_error) = (LogThrottle::default(), LogThrottle::default());
        loop {
            let (stream, peer) = tokio::select! {
                accepted = self.listener.accept() => match accepted {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        if log_accept_error.should_log() {
                            tracing::warn!(listener = self.name, %error, "cannot accept connections; trying again");
                        }
                        // The most likely reason is that no file descriptors are free.
                        lock(&queue).evict_oldest();
                        sleep(ACCEPT_PAUSE).await;
                        continue;
                    }
                },
                () = wait_for_shutdown(&mut stopping) => break,
            };
            // Responses are small, and must not wait for Nagle's algorithm.
            let _ = stream.set_nodelay(true);
            let mut locked = lock(&queue);
            if locked.open.len() >= self.max_connections {
                locked.evict_oldest();
                if log_full.should_log() {
                    tracing::warn!(
                        listener = self.name,
                        max = self.max_connections,
                        "maximum number of connections reached; closing the connection with the oldest last response"
                    );
                }
            }
            locked.last += 1;
            let slot = Arc::new(ConnectionSlot { queue: Arc::clone(&queue), position: AtomicU64::new(locked.last) });
            let (tls, router, watcher) = (self.tls.clone(), router.clone(), graceful.watcher());
            let handle = tokio::spawn(serve((stream, peer), tls, router, slot, watcher)).abort_handle();
            let last = locked.last;
            locked.open.insert(last, handle);
        }
        drop(self.listener);
        graceful.shutdown().await;
    }
}

/// The open connections, ordered by the time of their last response.
#[derive(Default)]
struct ConnectionQueue {
    /// The highest position.
    last: u64,
    /// The task of each connection, by position.
    open: BTreeMap<u64, AbortHandle>,
}

impl ConnectionQueue {
    fn evict_oldest(&mut self) {
        if let Some((_, first)) = self.open.pop_first() {
            first.abort();
        }
    }
}

/// A connection's entry in the queue, removed when the slot is dropped.
struct ConnectionSlot {
    queue: Arc<Mutex<ConnectionQueue>>,
    position: AtomicU64,
}

impl ConnectionSlot {
    /// Moves the connection to the end of the queue, after a response.
    fn move_to_end(&self) {
        let mut queue = lock(&self.queue);
        if let Some(handle) = queue.open.remove(&self.position.load(Relaxed)) {
            queue.last += 1;
            let last = queue.last;
            queue.open.insert(last, handle);
            self.position.store(last, Relaxed);
        }
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        lock(&self.queue).open.remove(&self.position.load(Relaxed));
    }
}

fn lock(queue: &Mutex<ConnectionQueue>) -> MutexGuard<'_, ConnectionQueue> {
    queue.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn serve(
    (stream, peer): (TcpStream, SocketAddr),
    tls: Option<Arc<Tls>>,
    router: impl Fn(&Connection<'_>) -> Router,
    slot: Arc<ConnectionSlot>,
    watcher: Watcher,
) {
    let Some(tls) = tls else {
        return serve_http(stream, router(&Connection { peer, certificate: None }), slot, watcher).await;
    };
    match timeout(HEAD_TIMEOUT, tls.accept(stream)).await {
        Ok(Ok(stream)) => {
            let certificates = stream.get_ref().1.peer_certificates();
            let router = router(&Connection { peer, certificate: certificates.and_then(<[_]>::first) });
            serve_http(stream, router, slot, watcher).await;
        }
        Ok(Err(error)) => tracing::debug!(%error, "TLS handshake failed"),
        Err(_) => tracing::debug!("TLS handshake timed out"),
    }
}

async fn serve_http<S: AsyncRead + AsyncWrite + Send + 'static>(
    stream: S,
    router: Router,
    slot: Arc<ConnectionSlot>,
    watcher: Watcher,
) {
    let stream = Box::pin(IdleTimeout::new(stream, IDLE_TIMEOUT));
    let router = router.layer(from_fn_with_state(slot, with_timeout));
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
    builder.http2().timer(TokioTimer::new()).max_concurrent_streams(32).keep_alive_interval(Some(PING_INTERVAL));
    let connection = builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    if let Err(error) = watcher.watch(connection).await {
        tracing::debug!(error, "connection failed");
    }
}

async fn with_timeout(State(slot): State<Arc<ConnectionSlot>>, request: Request, next: Next) -> Response {
    let response = timeout(REQUEST_TIMEOUT, next.run(request)).await;
    slot.move_to_end();
    response.unwrap_or_else(|_| (StatusCode::REQUEST_TIMEOUT, "request timed out\n").into_response())
}
