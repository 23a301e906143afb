//! The acceptor and its workers.
//!
//! A worker is a thread with a runtime of its own. SO_REUSEPORT would spread a handful of long-lived HTTP/2
//! connections badly; so there is one acceptor, and it hands each connection to the worker that has the fewest.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use opentelemetry::{KeyValue, metrics::Meter};
use tokio::{
    runtime,
    sync::{mpsc, watch},
};

use super::{
    Handler, Settings, connection,
    listener::{Listener, PassedStream, Stream},
};
use crate::{
    metrics::{LogThrottle, observe_gauge},
    transport::{TlsError, tls::Tls},
};

/// Connections on their way to a worker.
const HAND_OVER: usize = 1_024;
/// After an accept that failed: most likely there are no file descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Why gRPC is not served.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The address cannot be listened on.
    #[error("cannot listen on {at} for gRPC")]
    Listen {
        /// The address, or the socket's path.
        at: String,
        /// What went wrong.
        source: io::Error,
    },
    /// The certificates.
    #[error("TLS cannot be served")]
    Tls(#[from] TlsError),
    /// A thread.
    #[error("cannot start a worker")]
    Worker(#[source] io::Error),
}

/// One worker, seen by the acceptor.
struct Worker {
    connections: Arc<AtomicUsize>,
    sender: mpsc::Sender<PassedStream>,
    thread: thread::JoinHandle<()>,
}

/// A listening server.
pub struct Server {
    listener: Listener,
    settings: Arc<Settings>,
    tls: Option<Arc<Tls>>,
    workers: Vec<Worker>,
}

impl Server {
    /// Listens; connections wait until [`Server::run`].
    pub async fn bind(settings: Settings) -> Result<Self, ServerError> {
        let tls = Tls::new(&settings.tls, &[b"h2"])?;
        let (listener, at) = match settings.uds.clone() {
            Some(path) => (Listener::unix(path.clone()), path.display().to_string()),
            None => (Listener::tcp(settings.addr).await, settings.addr.to_string()),
        };
        let listener = listener.map_err(|source| ServerError::Listen { at, source })?;
        Ok(Self { listener, settings: Arc::new(settings), tls, workers: Vec::new() })
    }

    /// Where it listens, the port settled.
    pub fn address(&self) -> io::Result<String> {
        self.listener.address()
    }

    /// Starts a worker. `build` makes its handler, on the worker's own thread and runtime.
    pub fn start_worker<F, B>(
        &mut self,
        name: &str,
        shutdown: watch::Receiver<bool>,
        build: B,
    ) -> Result<(), ServerError>
    where
        B: FnOnce() -> F + Send + 'static,
        F: Future<Output = Arc<Handler>>,
    {
        let runtime = runtime::Builder::new_current_thread().enable_all().build().map_err(ServerError::Worker)?;
        let (sender, receiver) = mpsc::channel(HAND_OVER);
        let connections = Arc::new(AtomicUsize::new(0));
        let (settings, tls, count) = (Arc::clone(&self.settings), self.tls.clone(), Arc::clone(&connections));
        let thread = thread::Builder::new().name(name.to_owned()).spawn(move || {
            runtime.block_on(async {
                let handler = build().await;
                work(receiver, &handler, &settings, tls.as_ref(), &shutdown, &count).await;
            });
            // A name that is looked up for a new connection to Redis must not hold the end up.
            runtime.shutdown_background();
        });
        let thread = thread.map_err(ServerError::Worker)?;
        self.workers.push(Worker { connections, sender, thread });
        Ok(())
    }

    /// Shows the number of connections to the meter, all together and by worker.
    pub fn observe(&self, meter: &Meter) {
        let counts: Vec<_> = self.workers.iter().map(|worker| Arc::clone(&worker.connections)).collect();
        let all = counts.clone();
        observe_gauge(meter, "sluicegate_grpc_connections", "gRPC connections that are open", move || {
            all.iter().map(|count| count.load(Relaxed) as u64).sum()
        });
        let gauge = meter.u64_observable_gauge("sluicegate_grpc_worker_connections");
        let gauge = gauge.with_description("gRPC connections that are open, by worker");
        gauge
            .with_callback(move |observer| {
                for (worker, count) in counts.iter().enumerate() {
                    observer.observe(count.load(Relaxed) as u64, &[KeyValue::new("worker", worker.to_string())]);
                }
            })
            .build();
    }

    /// Accepts connections until the server shuts down, and waits for the workers to finish their calls.
    pub async fn run(self, mut shutdown: watch::Receiver<bool>) {
        let Self { listener, settings, tls, workers } = self;
        if let Some(tls) = tls {
            tokio::spawn(tls.follow());
        }
        let (refused, full) = (LogThrottle::default(), LogThrottle::default());
        loop {
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok(stream) => hand_over(stream, &workers, settings.max_connections, &full),
                    Err(error) => {
                        if refused.should_log() {
                            tracing::warn!(%error, "connections cannot be accepted; trying on");
                        }
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                },
                () = connection::told_to_stop(&mut shutdown) => break,
            }
        }
        drop(listener);
        let threads: Vec<_> = workers.into_iter().map(|worker| worker.thread).collect();
        let joined = tokio::task::spawn_blocking(|| threads.into_iter().for_each(|thread| drop(thread.join())));
        let _ = joined.await;
    }
}

fn hand_over(stream: Stream, workers: &[Worker], max: usize, full: &LogThrottle) {
    let open: usize = workers.iter().map(|worker| worker.connections.load(Relaxed)).sum();
    if open >= max {
        if full.should_log() {
            tracing::warn!(max, "grpc.max_connections are open; more are closed at once");
        }
        return;
    }
    let Some(worker) = workers.iter().min_by_key(|worker| worker.connections.load(Relaxed)) else {
        return;
    };
    // The worker's runtime has a reactor of its own: the stream changes over.
    match stream.pass() {
        Ok(stream) => {
            worker.connections.fetch_add(1, Relaxed);
            if worker.sender.try_send(stream).is_err() {
                worker.connections.fetch_sub(1, Relaxed);
                tracing::warn!("a worker takes no more connections; one is closed");
            }
        }
        Err(error) => tracing::debug!(%error, "a connection was gone before it was served"),
    }
}

/// Counts a connection down when it ends, however it ends.
struct Open(Arc<AtomicUsize>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

async fn work(
    mut receiver: mpsc::Receiver<PassedStream>,
    handler: &Arc<Handler>,
    settings: &Arc<Settings>,
    tls: Option<&Arc<Tls>>,
    shutdown: &watch::Receiver<bool>,
    count: &Arc<AtomicUsize>,
) {
    let mut connections = tokio::task::JoinSet::new();
    let mut down = shutdown.clone();
    loop {
        let stream = tokio::select! {
            stream = receiver.recv() => stream,
            Some(_) = connections.join_next() => continue,
            () = connection::told_to_stop(&mut down) => None,
        };
        let Some(stream) = stream else {
            break;
        };
        let open = Open(Arc::clone(count));
        let Ok(stream) = stream.take() else {
            continue;
        };
        let (handler, settings) = (Arc::clone(handler), Arc::clone(settings));
        let (tls, shutdown) = (tls.cloned(), shutdown.clone());
        connections.spawn(async move {
            connection::serve(stream, handler, &settings, tls, shutdown).await;
            drop(open);
        });
    }
    while connections.join_next().await.is_some() {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_worker_that_takes_no_connection_has_none() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, receiver) = mpsc::channel(1);
        let connections = Arc::new(AtomicUsize::new(0));
        let worker = Worker { connections: Arc::clone(&connections), sender, thread: thread::spawn(|| ()) };
        let workers = [worker];
        let connect = async || Stream::Tcp(tokio::net::TcpStream::connect(address).await.unwrap());
        hand_over(connect().await, &workers, 2, &LogThrottle::default());
        assert_eq!(connections.load(Relaxed), 1);
        // There is room for one.
        hand_over(connect().await, &workers, 2, &LogThrottle::default());
        assert_eq!((connections.load(Relaxed), receiver.len()), (1, 1));
    }
}
