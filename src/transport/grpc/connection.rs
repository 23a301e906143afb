//! One connection, from its handshake to its end.

use std::{io, pin::pin, sync::Arc, time::Duration};

use hyper::{server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, AsyncWrite},
    net::TcpStream,
    sync::watch,
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_rustls::server::TlsStream;

use super::{Handler, Settings, listener::Stream};
use crate::transport::tls::Tls;

/// A connection that has not begun by then, with TLS or with the preface of HTTP/2, is given up.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// RFC 9113, 3.4.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Between two looks whether it has all come: it nearly always comes at once.
const PREFACE_LOOK: Duration = Duration::from_millis(10);

/// Serves the connection until it ends, grows old, or the server shuts down.
pub(super) async fn serve(
    stream: Stream,
    handler: Arc<Handler>,
    settings: &Settings,
    tls: Option<Arc<Tls>>,
    shutdown: watch::Receiver<bool>,
) {
    let stream = match stream {
        Stream::Tcp(stream) => stream,
        // Whoever may open the socket may keep it open.
        Stream::Unix(stream) => return serve_http2(stream, handler, settings, shutdown).await,
    };
    let begun = async {
        match tls {
            Some(tls) => {
                let mut stream = tls.accept(stream).await?;
                stream.fill_buf().await?;
                Ok(Begun::Tls(Box::new(stream)))
            }
            None => preface(&stream).await.map(|()| Begun::Plain(stream)),
        }
    };
    match timeout(HANDSHAKE, begun).await {
        Ok(Ok(Begun::Plain(stream))) => serve_http2(stream, handler, settings, shutdown).await,
        Ok(Ok(Begun::Tls(stream))) => serve_http2(stream, handler, settings, shutdown).await,
        Ok(Err(error)) => tracing::debug!(%error, "a connection did not begin"),
        Err(_) => tracing::debug!("a connection took too long to begin"),
    }
}

enum Begun {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// Waits until the preface is there, and leaves it there. Nothing else would ever end a connection that is silent.
async fn preface(stream: &TcpStream) -> io::Result<()> {
    let mut bytes = [0; PREFACE.len()];
    loop {
        let bytes = match stream.peek(&mut bytes).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => &bytes[..read],
        };
        // What is something else will be told so.
        if bytes.len() == PREFACE.len() || !PREFACE.starts_with(bytes) {
            return Ok(());
        }
        sleep(PREFACE_LOOK).await;
    }
}

async fn serve_http2<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    handler: Arc<Handler>,
    settings: &Settings,
    mut shutdown: watch::Receiver<bool>,
) {
    let (leaving, told) = watch::channel(false);
    let service = service_fn(move |request| Arc::clone(&handler).call(request, &told));
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        // gRPC servers send none, and no client of theirs reads it.
        .auto_date_header(false)
        .max_concurrent_streams(settings.max_concurrent_streams)
        .max_header_list_size(16 * 1024)
        .keep_alive_interval(Some(settings.keepalive_interval))
        .keep_alive_timeout(settings.keepalive_timeout);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));

    // ± 10%, so that connections that came together don't all go together.
    let age = settings.max_connection_age.mul_f64(rand::random_range(0.9..1.1));
    let mut end = pin!(sleep_until(Instant::now() + age));
    loop {
        tokio::select! {
            biased;
            result = connection.as_mut() => {
                if let Err(error) = result {
                    tracing::debug!(%error, "a connection broke");
                }
                return;
            }
            () = end.as_mut() => {
                if *leaving.borrow() {
                    return;
                }
            }
            () = told_to_stop(&mut shutdown), if !*leaving.borrow() => {}
        }
        tracing::debug!("a connection is asked to go");
        leaving.send_replace(true);
        connection.as_mut().graceful_shutdown();
        end.as_mut().reset(Instant::now() + settings.max_connection_age_grace);
    }
}

/// Waits until the server shuts down.
pub(in crate::transport) async fn told_to_stop(shutdown: &mut watch::Receiver<bool>) {
    // An error: nobody is left who could tell, and that is the end as well.
    let _ = shutdown.wait_for(|down| *down).await;
}
