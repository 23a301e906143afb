//! Serves one connection, from the handshake to its end. `docs/guides/operations.md` (connections and open files) has
//! everything that ends a connection.

use std::{
    future::poll_fn,
    io,
    pin::pin,
    sync::{Arc, atomic::AtomicUsize},
    task::{Poll, ready},
    time::Duration,
};

use h2::{Reason, server::Builder};
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, copy, sink},
    net::TcpStream,
    sync::watch,
    time::{Instant, sleep_until, timeout},
};
use tokio_rustls::server::TlsStream;

use super::{
    Methods, Settings,
    any_authority::AnyAuthority,
    backpressure::Backpressure,
    http2::{ConnectionScope, Http2},
    input::{Budgets, Input},
    keep_alive::KeepAlive,
    listener::Stream,
};
use crate::transport::{connections::OpenConnection, errors::CallerErrors, shutdown::wait_for_shutdown, tls::Tls};

/// Timeout each for the TLS handshake with the first bytes of a connection, and for the HTTP/2 handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Beginnings of requests of HTTP/1.
const HTTP1_METHODS: [&[u8]; 7] = [b"GET ", b"POST ", b"HEAD ", b"PUT ", b"DELETE ", b"OPTIONS ", b"PATCH "];
/// Response to callers that use HTTP/1.
const HTTP1_RESPONSE: &[u8] = b"HTTP/1.1 505 HTTP Version Not Supported\r\n\
    content-type: text/plain\r\ncontent-length: 77\r\nconnection: close\r\n\r\n\
    this port serves gRPC over HTTP/2; HTTP/1 and JSON are served on `http.addr`\n";
/// Maximum number of bytes that are read from a caller that uses HTTP/1.
const MAX_HTTP1_BYTES: u64 = 64 * 1024;
/// Size of the flow-control windows of a connection and of each of its calls, in bytes. A connection stores up to
/// this number of bytes, and no budget counts them.
const WINDOW_BYTES: u32 = 64 * 1024;
/// Budget for small DATA frames that wait to be read on a connection, in bytes: each uses what it lacks of 256 bytes.
/// The default of h2 is half of the window, which closes connections of callers that send messages in small pieces.
const SMALL_FRAMES_BUDGET: usize = 512 * 1024;
/// Maximum size of the headers of a call, in bytes. Envoy forwards `tracestate` and other headers of its caller, which can
/// have 60 KiB.
const MAX_HEADER_BYTES: u32 = 80 * 1024;
/// Maximum number of calls of a connection that were reset before they were accepted (CVE-2023-44487).
const MAX_PENDING_RESETS: usize = 20;

/// Context of a connection, besides its stream and its methods.
pub(in crate::transport) struct ConnectionContext {
    pub(in crate::transport) errors: Arc<CallerErrors>,
    pub(in crate::transport) budgets: Budgets,
    /// The entry of the connection among those of the listener.
    pub(in crate::transport) open_connection: Arc<OpenConnection>,
    pub(in crate::transport) shutdown: watch::Receiver<bool>,
}

/// Serves a connection until it ends, reaches its maximum age, or the server shuts down.
pub(super) async fn serve<M: Methods>(
    stream: Stream,
    methods: Arc<M>,
    settings: &Settings,
    tls: Option<Arc<Tls>>,
    context: ConnectionContext,
) {
    let stream = match stream {
        Stream::Tcp(stream) => stream,
        Stream::Unix(stream) => return serve_http2(AnyAuthority::new(stream), methods, settings, context).await,
    };
    match timeout(HANDSHAKE_TIMEOUT, accept_tls(stream, tls)).await {
        Ok(Ok(Some(Accepted::Plain(stream)))) => serve_http2(stream, methods, settings, context).await,
        Ok(Ok(Some(Accepted::Tls(stream)))) => serve_http2(stream, methods, settings, context).await,
        Ok(Ok(None)) => tracing::debug!("rejected a connection that uses HTTP/1"),
        Ok(Err(error)) => tracing::debug!(%error, "connection handshake failed"),
        Err(_) => tracing::debug!("connection handshake timed out"),
    }
}

/// A TCP connection after its TLS handshake, if it has one.
enum Accepted {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// Performs the TLS handshake, and waits for the first bytes. Answers callers that use HTTP/1, and returns `None`.
async fn accept_tls(mut stream: TcpStream, tls: Option<Arc<Tls>>) -> io::Result<Option<Accepted>> {
    let Some(tls) = tls else {
        // As long as the longest method.
        let mut first = [0; 8];
        let read = stream.peek(&mut first).await?;
        if is_http1(&first[..read]) {
            return reject_http1(&mut stream).await.map(|()| None);
        }
        return Ok(Some(Accepted::Plain(stream)));
    };
    let mut stream = Box::new(tls.accept(stream).await?);
    if is_http1(stream.fill_buf().await?) {
        return reject_http1(&mut stream).await.map(|()| None);
    }
    Ok(Some(Accepted::Tls(stream)))
}

/// Returns whether a connection begins like a request of HTTP/1. H2 rejects all other connections without HTTP/2.
fn is_http1(first: &[u8]) -> bool {
    HTTP1_METHODS.iter().any(|method| first.starts_with(method))
}

/// Sends an error that a caller with HTTP/1 understands.
async fn reject_http1(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> io::Result<()> {
    stream.write_all(HTTP1_RESPONSE).await?;
    stream.shutdown().await?;
    // If unread data is left, the operating system may discard the response.
    copy(&mut stream.take(MAX_HTTP1_BYTES), &mut sink()).await.map(drop)
}

/// Serves an HTTP/2 connection until it is closed.
pub(in crate::transport) async fn serve_http2<S: AsyncRead + AsyncWrite + Unpin, M: Methods>(
    stream: S,
    methods: Arc<M>,
    settings: &Settings,
    context: ConnectionContext,
) {
    let ConnectionContext { errors, budgets, open_connection, mut shutdown } = context;
    let (mut connection, mut keep_alive) = match handshake(stream, methods, settings, &errors, budgets).await {
        Ok(connected) => connected,
        Err(error) => {
            errors.record_protocol(&error);
            return tracing::debug!(%error, "HTTP/2 handshake failed");
        }
    };
    // ± 10%, so that connections that were opened together do not all close together.
    let age = settings.max_connection_age.mul_f64(rand::random_range(0.9..1.1));
    let mut end = pin!(sleep_until(Instant::now() + age));
    let mut usage = Usage { open_connection, last_call: connection.last_call(), has_calls: false };
    loop {
        let is_leaving = connection.is_leaving();
        let serving = poll_fn(|context| {
            if let Poll::Ready(result) = connection.poll(context) {
                return Poll::Ready(result);
            }
            usage.record(connection.last_call(), connection.has_calls());
            ready!(keep_alive.poll(context, connection.last_call()));
            tracing::debug!("a ping was not answered in time; closing connection");
            connection.abort(context);
            Poll::Ready(Ok(()))
        });
        tokio::select! {
            biased;
            result = serving => {
                if let Err(error) = result {
                    errors.record_protocol(&error);
                    tracing::debug!(%error, "connection failed");
                }
                return;
            }
            () = end.as_mut() => {
                if is_leaving {
                    return;
                }
            }
            () = wait_for_shutdown(&mut shutdown), if !is_leaving => {}
        }
        tracing::debug!("closing connection gracefully");
        connection.leave();
        end.as_mut().reset(Instant::now() + settings.max_connection_age_grace);
    }
}

/// The usage of a connection that its entry contains, so that only changes are recorded.
struct Usage {
    open_connection: Arc<OpenConnection>,
    last_call: Instant,
    has_calls: bool,
}

impl Usage {
    /// Records the time of the last call, and whether calls are in progress.
    fn record(&mut self, last_call: Instant, has_calls: bool) {
        if self.last_call != last_call {
            self.last_call = last_call;
            self.open_connection.record_use();
        }
        if self.has_calls != has_calls {
            self.has_calls = has_calls;
            self.open_connection.set_has_calls(has_calls);
        }
    }
}

/// Performs the HTTP/2 handshake.
async fn handshake<S: AsyncRead + AsyncWrite + Unpin, M: Methods>(
    stream: S,
    methods: Arc<M>,
    settings: &Settings,
    errors: &Arc<CallerErrors>,
    budgets: Budgets,
) -> Result<(Http2<Backpressure<S>, M>, KeepAlive), h2::Error> {
    let (stream, state) = Backpressure::new(stream);
    let mut builder = Builder::new();
    builder
        .initial_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .data_frame_budget(SMALL_FRAMES_BUDGET)
        .max_concurrent_streams(settings.max_concurrent_streams)
        .max_pending_accept_reset_streams(MAX_PENDING_RESETS)
        .max_header_list_size(MAX_HEADER_BYTES);
    // A timeout is reported like one of the settings, the nearest error of HTTP/2.
    let handshake = timeout(HANDSHAKE_TIMEOUT, builder.handshake(stream)).await;
    let mut connection = handshake.unwrap_or_else(|_| Err(Reason::SETTINGS_TIMEOUT.into()))?;
    // The first call always returns the handle.
    let pings = connection.ping_pong().ok_or(Reason::INTERNAL_ERROR)?;
    let keep_alive = KeepAlive::new(pings, settings.keepalive_interval, settings.keepalive_timeout);
    let scope = ConnectionScope {
        errors: Arc::clone(errors),
        input: Arc::new(Input::new(budgets)),
        send_timeout: settings.send_timeout,
        not_begun: AtomicUsize::new(0),
    };
    Ok((Http2::new(connection, methods, scope, state), keep_alive))
}
