//! One connection, from its handshake to its end.

use std::{pin::pin, sync::Arc, time::Duration};

use hyper::{server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    sync::watch,
    time::{Instant, sleep_until, timeout},
};

use super::{Handler, Settings};
use crate::transport::tls::Tls;

/// A TLS handshake that takes longer is given up.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// Serves the connection until it ends, grows old, or the server shuts down.
pub(super) async fn serve(
    stream: TcpStream,
    handler: Arc<Handler>,
    settings: &Settings,
    tls: Option<Arc<Tls>>,
    shutdown: watch::Receiver<bool>,
) {
    let Some(tls) = tls else {
        return serve_http2(stream, handler, settings, shutdown).await;
    };
    match timeout(HANDSHAKE, tls.acceptor().accept(stream)).await {
        Ok(Ok(stream)) => serve_http2(stream, handler, settings, shutdown).await,
        Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
        Err(_) => tracing::debug!("a TLS handshake took too long"),
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
