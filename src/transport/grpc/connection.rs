//! Serves one connection, from the handshake to its end.

use std::{
    error::Error,
    io,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use hyper::{server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, AsyncWrite},
    net::TcpStream,
    sync::watch,
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_rustls::server::TlsStream;

use super::{Handler, Settings, listener::Stream, send_timeout::CallExecutor};
use crate::{metrics::LogThrottle, transport::tls::Tls};

/// Timeout for the TLS handshake and the HTTP/2 preface.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Connection preface of HTTP/2 (RFC 9113, section 3.4).
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Interval between two checks for the complete preface, which nearly always arrives in one piece.
const PREFACE_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Counts the errors of callers.
#[derive(Default)]
pub(super) struct CallerErrors {
    protocol: AtomicU64,
    log_protocol: LogThrottle,
    unread: AtomicU64,
    log_unread: LogThrottle,
}

impl CallerErrors {
    /// Returns the number of connections that were closed because the caller violated HTTP/2 or exceeded its limits.
    pub(super) fn protocol(&self) -> u64 {
        self.protocol.load(Relaxed)
    }

    /// Returns the number of responses that were dropped because the caller did not read them.
    pub(super) fn unread(&self) -> u64 {
        self.unread.load(Relaxed)
    }

    /// Counts a response that was dropped because the caller did not read it.
    pub(super) fn record_unread(&self) {
        self.unread.fetch_add(1, Relaxed);
        if self.log_unread.should_log() {
            tracing::warn!(
                "a caller does not read responses; each is dropped after grpc.send_timeout, and counted by \
                 sluicegate_grpc_unread_responses_total"
            );
        }
    }

    /// Counts the error of a connection if it made this side close the connection.
    fn record_protocol(&self, error: &hyper::Error) {
        let cause = error.source().and_then(|cause| cause.downcast_ref::<h2::Error>());
        let Some(cause) = cause.filter(|cause| cause.is_go_away() && cause.is_library()) else {
            return;
        };
        self.protocol.fetch_add(1, Relaxed);
        if self.log_protocol.should_log() {
            tracing::warn!(
                reason = %cause,
                "closing connections that violate HTTP/2 or exceed its limits; \
                 sluicegate_grpc_protocol_errors_total counts them"
            );
        }
    }
}

/// Serves a connection until it ends, reaches its maximum age, or the server shuts down.
pub(super) async fn serve(
    stream: Stream,
    handler: Arc<Handler>,
    settings: &Settings,
    tls: Option<Arc<Tls>>,
    errors: &CallerErrors,
    shutdown: watch::Receiver<bool>,
) {
    let stream = match stream {
        Stream::Tcp(stream) => stream,
        // The file permissions of the socket control access, so idle callers need no handshake timeout.
        Stream::Unix(stream) => return serve_http2(stream, handler, settings, errors, shutdown).await,
    };
    let handshake = async {
        match tls {
            Some(tls) => {
                let mut stream = tls.accept(stream).await?;
                stream.fill_buf().await?;
                Ok(ReadyStream::Tls(Box::new(stream)))
            }
            None => wait_for_preface(&stream).await.map(|()| ReadyStream::Plain(stream)),
        }
    };
    match timeout(HANDSHAKE_TIMEOUT, handshake).await {
        Ok(Ok(ReadyStream::Plain(stream))) => serve_http2(stream, handler, settings, errors, shutdown).await,
        Ok(Ok(ReadyStream::Tls(stream))) => serve_http2(stream, handler, settings, errors, shutdown).await,
        Ok(Err(error)) => tracing::debug!(%error, "connection handshake failed"),
        Err(_) => tracing::debug!("connection handshake timed out"),
    }
}

/// A TCP connection after its handshake.
enum ReadyStream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// Waits until the preface has arrived, without consuming it. Without this, no timeout would apply to a connection that
/// sends nothing.
async fn wait_for_preface(stream: &TcpStream) -> io::Result<()> {
    let mut bytes = [0; PREFACE.len()];
    loop {
        let bytes = match stream.peek(&mut bytes).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => &bytes[..read],
        };
        // If the bytes are something else, hyper replies with an error.
        if bytes.len() == PREFACE.len() || !PREFACE.starts_with(bytes) {
            return Ok(());
        }
        sleep(PREFACE_POLL_INTERVAL).await;
    }
}

async fn serve_http2<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    handler: Arc<Handler>,
    settings: &Settings,
    errors: &CallerErrors,
    mut shutdown: watch::Receiver<bool>,
) {
    let (leaving, leaving_receiver) = watch::channel(false);
    let service = service_fn(move |request| handler.call(request, &leaving_receiver));
    let mut builder = http2::Builder::new(CallExecutor);
    builder
        .timer(TokioTimer::new())
        // gRPC servers send no `date` header, and gRPC clients do not read it.
        .auto_date_header(false)
        .max_concurrent_streams(settings.max_concurrent_streams)
        .max_header_list_size(16 * 1024)
        .keep_alive_interval(Some(settings.keepalive_interval))
        .keep_alive_timeout(settings.keepalive_timeout);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));

    // ± 10%, so that connections that were opened together do not all close together.
    let age = settings.max_connection_age.mul_f64(rand::random_range(0.9..1.1));
    let mut end = pin!(sleep_until(Instant::now() + age));
    loop {
        tokio::select! {
            biased;
            result = connection.as_mut() => {
                if let Err(error) = result {
                    errors.record_protocol(&error);
                    tracing::debug!(%error, "connection failed");
                }
                return;
            }
            () = end.as_mut() => {
                if *leaving.borrow() {
                    return;
                }
            }
            () = wait_for_shutdown(&mut shutdown), if !*leaving.borrow() => {}
        }
        tracing::debug!("closing connection gracefully");
        leaving.send_replace(true);
        connection.as_mut().graceful_shutdown();
        end.as_mut().reset(Instant::now() + settings.max_connection_age_grace);
    }
}

/// Waits until the server shuts down.
pub(in crate::transport) async fn wait_for_shutdown(shutdown: &mut watch::Receiver<bool>) {
    // An error means that the sender is dropped, which also ends the server.
    let _ = shutdown.wait_for(|down| *down).await;
}
