//! [`HttpServer`]: HTTP/1 and HTTP/2 for pages, metrics and the admin API, which have few callers.
//!
//! The head of a request, the response and an idle connection have timeouts. If the maximum number of connections is
//! open, or the process has no free file descriptors, [`Connections`] selects one that makes room for a new one.
//! Callers that hold idle connections therefore cannot lock others out.

mod idle_timeout;
mod output;
mod rejections;
mod request_body;
mod response_body;
mod shared_page;
#[cfg(test)]
mod testing;

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{Request, State},
    http::StatusCode,
    middleware::{Next, from_fn, from_fn_with_state},
    response::Response,
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
    sync::{Semaphore, watch},
    time::{sleep, timeout},
};

pub(super) use self::request_body::is_grpc;
use self::{idle_timeout::IdleTimeout, output::Output, response_body::reserve};
pub(super) use self::{
    rejections::{Rejection, Rejections},
    shared_page::SharedPage,
};
use super::{
    browser_security::secure,
    connections::{Connections, OpenConnection},
    shutdown::wait_for_shutdown,
    tls::Tls,
};
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

/// Maximum size of the head of a request, in bytes. HTTP/1 reads and writes parts of bodies in pieces of this size.
const MAX_HEAD_BYTES: u32 = 16 * 1024;
/// Flow-control window of an HTTP/2 connection and of each of its requests, in bytes: the smallest one of the protocol.
const WINDOW_BYTES: u32 = 65_535;
/// Maximum number of bytes of each response that wait in an HTTP/2 connection.
const MAX_SEND_BYTES: usize = 64 * 1024;
/// Maximum number of large heads and of responses of a listener that wait for memory.
const MAX_WAITING: usize = 64;
/// Maximum number of requests in progress on an HTTP/2 connection.
const MAX_CONCURRENT_REQUESTS: u32 = 32;

/// The peer of a connection.
pub(crate) struct Connection<'a> {
    /// Address of the peer.
    pub(crate) peer: SocketAddr,
    /// Certificate that the peer presented.
    pub(crate) certificate: Option<&'a CertificateDer<'a>>,
}

/// The connection of a request, in the extensions of the request.
#[derive(Clone)]
pub(super) struct Authenticated(Arc<OpenConnection>);

impl Authenticated {
    /// Records that the request has a caller with a token or a certificate.
    pub(super) fn record(request: &Request) {
        if let Some(Self(open_connection)) = request.extensions().get() {
            open_connection.set_authenticated();
        }
    }
}

/// An HTTP listener with a maximum number of connections.
pub(crate) struct HttpServer {
    listener: std::net::TcpListener,
    tls: Option<Arc<Tls>>,
    connections: Arc<Connections>,
    /// The name of the listener in log messages.
    name: &'static str,
    /// The memory for bodies and responses of this listener.
    budget: Budget,
    rejections: Arc<Rejections>,
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
        // It may run on another runtime.
        let listener = TcpListener::bind(addr).await?.into_std()?;
        let budget = input.share(name, input.max_bytes() / 2);
        let connections = Connections::new(max_connections, name);
        Ok(Self { listener, tls, connections, name, budget, rejections: Arc::new(Rejections::new(name)) })
    }

    /// Returns the address with the actual port.
    pub(crate) fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Returns the open connections.
    pub(super) fn connections(&self) -> Arc<Connections> {
        Arc::clone(&self.connections)
    }

    /// Returns the numbers of rejected requests.
    pub(super) fn rejections(&self) -> Arc<Rejections> {
        Arc::clone(&self.rejections)
    }

    /// Serves connections until `stopping` is true, and then finishes the calls in progress.
    ///
    /// `router` returns the routes for a connection.
    pub(crate) async fn run(
        self,
        router: impl Fn(&Connection<'_>) -> Router + Clone + Send + 'static,
        mut stopping: watch::Receiver<bool>,
    ) {
        let listener = match TcpListener::from_std(self.listener) {
            Ok(listener) => listener,
            Err(error) => return tracing::error!(listener = self.name, %error, "cannot accept connections"),
        };
        if let Some(tls) = &self.tls {
            tokio::spawn(Arc::clone(tls).follow());
        }
        let connections = self.connections;
        let graceful = GracefulShutdown::new();
        let waiting = Arc::new(Semaphore::new(MAX_WAITING));
        let log_accept_error = LogThrottle::default();
        loop {
            let (stream, peer) = tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        if log_accept_error.should_log() {
                            tracing::warn!(listener = self.name, %error, "cannot accept connections; trying again");
                        }
                        // The most likely reason is that no file descriptors are free.
                        connections.evict_one();
                        sleep(ACCEPT_PAUSE).await;
                        continue;
                    }
                },
                () = wait_for_shutdown(&mut stopping) => break,
            };
            // Responses are small, and must not wait for Nagle's algorithm.
            let _ = stream.set_nodelay(true);
            connections.advance();
            let open_connection = Arc::new(connections.open(Some(peer)));
            let output = Output {
                budget: self.budget.clone(),
                rejections: Arc::clone(&self.rejections),
                open_connection: Arc::clone(&open_connection),
                requests: Arc::default(),
                waiting: Arc::clone(&waiting),
            };
            let serving = serve(stream, peer, self.tls.clone(), router.clone(), Arc::new(output), graceful.watcher());
            let task = tokio::spawn(serving);
            open_connection.set_task(task.abort_handle());
        }
        drop(listener);
        graceful.shutdown().await;
    }
}

async fn serve(
    stream: TcpStream,
    peer: SocketAddr,
    tls: Option<Arc<Tls>>,
    router: impl Fn(&Connection<'_>) -> Router,
    output: Arc<Output>,
    watcher: Watcher,
) {
    let Some(tls) = tls else {
        return serve_http(stream, router(&Connection { peer, certificate: None }), output, watcher).await;
    };
    match timeout(HEAD_TIMEOUT, tls.accept(stream)).await {
        Ok(Ok(stream)) => {
            let certificates = stream.get_ref().1.peer_certificates();
            let router = router(&Connection { peer, certificate: certificates.and_then(<[_]>::first) });
            serve_http(stream, router, output, watcher).await;
        }
        Ok(Err(error)) => tracing::debug!(%error, "TLS handshake failed"),
        Err(_) => tracing::debug!("TLS handshake timed out"),
    }
}

async fn serve_http<S: AsyncRead + AsyncWrite + Send + 'static>(
    stream: S,
    router: Router,
    output: Arc<Output>,
    watcher: Watcher,
) {
    let stream = IdleTimeout::new(stream, IDLE_TIMEOUT, HEAD_TIMEOUT, Arc::clone(&output.requests));
    let router = router.layer(from_fn_with_state(output, handle)).layer(from_fn(secure));
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(None::<Duration>)
        .max_buf_size(MAX_HEAD_BYTES as usize);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_CONCURRENT_REQUESTS)
        .max_header_list_size(MAX_HEAD_BYTES)
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .max_send_buf_size(MAX_SEND_BYTES)
        .keep_alive_interval(Some(PING_INTERVAL));
    let connection = builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    if let Err(error) = watcher.watch(connection).await {
        tracing::debug!(error, "connection failed");
    }
}

/// Handles a request within the bounds of memory and time.
async fn handle(State(output): State<Arc<Output>>, mut request: Request, next: Next) -> Response {
    let call = output.open_connection.begin_call();
    let _request = output.requests.begin();
    let is_grpc = is_grpc(&request);
    request.extensions_mut().insert(Authenticated(Arc::clone(&output.open_connection)));
    let (request, input) = match request_body::reserve(request, &output.budget, &output.waiting).await {
        Ok(reserved) => reserved,
        Err(rejection) => return reject(&output, rejection, is_grpc),
    };
    let Ok(response) = timeout(REQUEST_TIMEOUT, next.run(request)).await else {
        return reject(&output, Rejection::TooSlow, is_grpc);
    };
    if let Some(rejection) = input.as_ref().and_then(request_body::Input::rejection) {
        return reject(&output, rejection, is_grpc);
    }
    if response.status() == StatusCode::PAYLOAD_TOO_LARGE {
        output.rejections.record(Rejection::TooLarge);
    }
    reserve(&output, response, call).await
}

fn reject(output: &Output, rejection: Rejection, is_grpc: bool) -> Response {
    output.rejections.record(rejection);
    if is_grpc { rejection.status().into_http() } else { rejection.response() }
}

#[cfg(test)]
mod tests {
    use axum::{
        body::Bytes,
        routing::{get, post},
    };
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex},
        task::JoinHandle,
        time::Instant,
    };

    use super::{testing::output, *};

    /// Returns the context of the responses of a connection.
    /// A connection in virtual time.
    struct Caller {
        stream: DuplexStream,
        serving: JoinHandle<()>,
        output: Arc<Output>,
        started: Instant,
    }

    impl Caller {
        fn connect() -> Self {
            let output = output();
            let router = Router::new()
                .route("/", get(|| async { "page" }))
                .route("/body", post(|body: Bytes| async move { body.len().to_string() }));
            let (stream, served) = duplex(64 * 1024);
            let graceful = GracefulShutdown::new();
            let watcher = graceful.watcher();
            let serving = tokio::spawn({
                let output = Arc::clone(&output);
                async move {
                    serve_http(served, router, output, watcher).await;
                    drop(graceful);
                }
            });
            Self { stream, serving, output, started: Instant::now() }
        }

        async fn send(&mut self, text: &str) {
            self.stream.write_all(text.as_bytes()).await.unwrap();
        }

        /// Waits until the service has closed the connection. Returns the received text, and the time in seconds.
        async fn end(mut self) -> (String, u64) {
            let mut text = String::new();
            self.stream.read_to_string(&mut text).await.unwrap();
            self.serving.await.unwrap();
            (text, self.started.elapsed().as_secs())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_connection_is_closed_soon_and_an_idle_one_late() {
        assert_eq!(Caller::connect().end().await, (String::new(), 10));
        let mut unfinished = Caller::connect();
        unfinished.send("GET / HT").await;
        assert_eq!(unfinished.end().await.1, 10);
        let mut idle = Caller::connect();
        idle.send("GET / HTTP/1.1\r\nhost: x\r\n\r\n").await;
        let (text, seconds) = idle.end().await;
        assert!(text.starts_with("HTTP/1.1 200") && text.ends_with("page"), "{text}");
        assert_eq!(seconds, 90);
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_without_progress_is_rejected_and_counted() {
        let mut caller = Caller::connect();
        caller.send("POST /body HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\na").await;
        let output = Arc::clone(&caller.output);
        let (text, seconds) = caller.end().await;
        assert!(text.starts_with("HTTP/1.1 408") && text.contains("x-content-type-options: nosniff"), "{text}");
        assert_eq!((seconds, output.rejections.count(Rejection::TooSlow)), (10, 1));
        assert_eq!(output.budget.used_bytes(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_may_take_half_a_minute() {
        let mut caller = Caller::connect();
        caller.send("POST /body HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 4\r\n\r\n").await;
        for _ in 0..4 {
            sleep(Duration::from_secs(7)).await;
            caller.send("a").await;
        }
        let (text, _) = caller.end().await;
        assert!(text.starts_with("HTTP/1.1 200") && text.ends_with("\r\n\r\n4"), "{text}");
        let mut slow = Caller::connect();
        slow.send("POST /body HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n").await;
        for _ in 0..4 {
            sleep(Duration::from_secs(7)).await;
            slow.send("a").await;
        }
        let (text, seconds) = slow.end().await;
        assert!(text.starts_with("HTTP/1.1 408"), "{text}");
        assert_eq!(seconds, 30);
    }
}
