//! HTTP/1 and HTTP/2 for the few who are not decisions: pages, metrics, operators.
//!
//! A connection has a time to say what it wants, a request a time to be answered, and silence an end. When all
//! connections are taken, or no descriptors are left, the one that was answered least lately gives way to the
//! newcomer: whoever holds connections and says nothing shuts nobody out.

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    pin::pin,
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
    server::conn::auto,
    service::TowerToHyperService,
};
use rustls::pki_types::CertificateDer;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::{AbortHandle, JoinSet},
    time::{sleep, timeout},
};
use tokio_io_timeout::TimeoutStream;

use super::{grpc::told_to_stop, tls::Tls};
use crate::metrics::LogThrottle;

/// For a TLS handshake, and for the head of a request.
const HEAD: Duration = Duration::from_secs(10);
/// For a request's body, and what is done with it.
const REQUEST: Duration = Duration::from_secs(30);
/// Nothing comes and nothing can be sent for so long: that is the end. Longer than Prometheus waits between two scrapes.
const SILENCE: Duration = Duration::from_secs(90);
/// HTTP/2 asks after so much silence whether anybody is there.
const PING: Duration = Duration::from_secs(60);
/// After an accept that failed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A listener, and how many it serves at once.
pub(crate) struct HttpServer {
    listener: TcpListener,
    tls: Option<Arc<Tls>>,
    most: usize,
    /// For the log.
    name: &'static str,
}

impl HttpServer {
    /// Listens; connections wait until it runs.
    pub(crate) async fn bind(
        addr: SocketAddr,
        tls: Option<Arc<Tls>>,
        most: usize,
        name: &'static str,
    ) -> io::Result<Self> {
        Ok(Self { listener: TcpListener::bind(addr).await?, tls, most, name })
    }

    /// Where it listens, the port settled.
    pub(crate) fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until it is told to stop, and then what is under way. `router`: for a connection, by the certificate that it
    /// showed.
    pub(crate) async fn run(
        self,
        router: impl Fn(Option<&CertificateDer<'_>>) -> Router + Clone + Send + 'static,
        mut stopping: watch::Receiver<bool>,
    ) {
        if let Some(tls) = &self.tls {
            tokio::spawn(Arc::clone(tls).follow());
        }
        let (line, mut connections) = (Arc::new(Mutex::new(ConnectionQueue::default())), JoinSet::new());
        let (full, refused) = (LogThrottle::default(), LogThrottle::default());
        loop {
            let stream = tokio::select! {
                accepted = self.listener.accept() => match accepted {
                    Ok((stream, _)) => stream,
                    Err(error) => {
                        if refused.should_log() {
                            tracing::warn!(listener = self.name, %error, "connections cannot be accepted; trying on");
                        }
                        // Most likely there are no descriptors left.
                        lock(&line).evict_oldest();
                        sleep(ACCEPT_PAUSE).await;
                        continue;
                    }
                },
                Some(_) = connections.join_next() => continue,
                () = told_to_stop(&mut stopping) => break,
            };
            // Answers are small and wanted at once.
            let _ = stream.set_nodelay(true);
            let mut queue = lock(&line);
            if queue.open.len() >= self.most {
                queue.evict_oldest();
                if full.should_log() {
                    tracing::warn!(
                        listener = self.name,
                        most = self.most,
                        "all connections are taken; the one answered least lately gives way"
                    );
                }
            }
            queue.last += 1;
            let place = Arc::new(ConnectionSlot { line: Arc::clone(&line), at: AtomicU64::new(queue.last) });
            let (tls, router, stopping) = (self.tls.clone(), router.clone(), stopping.clone());
            let handle = connections.spawn(serve(stream, tls, router, place, stopping));
            let last = queue.last;
            queue.open.insert(last, handle);
        }
        drop(self.listener);
        while connections.join_next().await.is_some() {}
    }
}

/// Connections that are open, the one that was answered least lately first.
#[derive(Default)]
struct ConnectionQueue {
    last: u64,
    open: BTreeMap<u64, AbortHandle>,
}

impl ConnectionQueue {
    fn evict_oldest(&mut self) {
        if let Some((_, first)) = self.open.pop_first() {
            first.abort();
        }
    }
}

/// A connection's place in the line. Gone with it.
struct ConnectionSlot {
    line: Arc<Mutex<ConnectionQueue>>,
    at: AtomicU64,
}

impl ConnectionSlot {
    /// It has an answer, and goes to the end.
    fn answered(&self) {
        let mut line = lock(&self.line);
        if let Some(handle) = line.open.remove(&self.at.load(Relaxed)) {
            line.last += 1;
            let last = line.last;
            line.open.insert(last, handle);
            self.at.store(last, Relaxed);
        }
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        lock(&self.line).open.remove(&self.at.load(Relaxed));
    }
}

fn lock(line: &Mutex<ConnectionQueue>) -> MutexGuard<'_, ConnectionQueue> {
    line.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn serve(
    stream: TcpStream,
    tls: Option<Arc<Tls>>,
    router: impl Fn(Option<&CertificateDer<'_>>) -> Router,
    place: Arc<ConnectionSlot>,
    stopping: watch::Receiver<bool>,
) {
    let Some(tls) = tls else {
        return serve_http(stream, router(None), place, stopping).await;
    };
    match timeout(HEAD, tls.accept(stream)).await {
        Ok(Ok(stream)) => {
            let certificates = stream.get_ref().1.peer_certificates();
            let router = router(certificates.and_then(<[_]>::first));
            serve_http(stream, router, place, stopping).await;
        }
        Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
        Err(_) => tracing::debug!("a TLS handshake took too long"),
    }
}

async fn serve_http<S: AsyncRead + AsyncWrite + Send + 'static>(
    stream: S,
    router: Router,
    place: Arc<ConnectionSlot>,
    mut stopping: watch::Receiver<bool>,
) {
    let mut stream = Box::pin(TimeoutStream::new(stream));
    stream.as_mut().set_read_timeout_pinned(Some(SILENCE));
    stream.as_mut().set_write_timeout_pinned(Some(SILENCE));
    let router = router.layer(from_fn_with_state(place, in_time));
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD);
    builder.http2().timer(TokioTimer::new()).max_concurrent_streams(32).keep_alive_interval(Some(PING));
    let connection = builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    let mut connection = pin!(connection);
    let mut told = false;
    loop {
        tokio::select! {
            result = connection.as_mut() => {
                if let Err(error) = result {
                    tracing::debug!(error, "a connection broke");
                }
                return;
            }
            () = told_to_stop(&mut stopping), if !told => {
                told = true;
                connection.as_mut().graceful_shutdown();
            }
        }
    }
}

async fn in_time(State(place): State<Arc<ConnectionSlot>>, request: Request, next: Next) -> Response {
    let answer = timeout(REQUEST, next.run(request)).await;
    place.answered();
    answer.unwrap_or_else(|_| (StatusCode::REQUEST_TIMEOUT, "the request took too long\n").into_response())
}
