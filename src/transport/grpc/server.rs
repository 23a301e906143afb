//! [`Server`]: the acceptor and its workers.
//!
//! A worker is a thread with its own runtime. `SO_REUSEPORT` would distribute a small number of long-lived HTTP/2
//! connections unevenly. One acceptor therefore passes each connection to the worker with the fewest connections.

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use tokio::{
    runtime,
    sync::{mpsc, watch},
};

use super::{
    Methods, Settings,
    connection::{self, ConnectionContext},
    input::Budgets,
    listener::{Listener, PassedStream, Stream},
};
use crate::{
    budget::Budget,
    metrics::{Instrument, Label, LogThrottle, Meter, Registrar},
    transport::{
        TlsError,
        connections::{Connections, OpenConnection},
        errors::CallerErrors,
        shutdown::wait_for_shutdown,
        tls::Tls,
    },
};

/// Capacity of the queue of connections that are passed to a worker.
const HAND_OVER_CAPACITY: usize = 1_024;
/// Unit of the time at which a connection was last used.
const TICK: Duration = Duration::from_secs(1);
/// Pause after a failed accept. The most likely reason is that no file descriptors are free.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Error returned when gRPC cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The address cannot be bound.
    #[error("cannot listen on {at} for gRPC")]
    Listen {
        /// The address, or the socket's path.
        at: String,
        /// The error of the operating system.
        source: io::Error,
    },
    /// TLS cannot be configured.
    #[error("cannot configure TLS for gRPC")]
    Tls(#[from] TlsError),
    /// A worker thread or its runtime cannot be started.
    #[error("cannot start a worker")]
    Worker(#[source] io::Error),
}

/// The acceptor's view of a worker.
struct Worker {
    connections: Arc<AtomicUsize>,
    sender: mpsc::Sender<NewConnection>,
    thread: thread::JoinHandle<()>,
}

/// A connection that is passed to a worker.
struct NewConnection {
    stream: PassedStream,
    open_connection: OpenConnection,
}

/// A gRPC server with an open listener.
pub struct Server {
    listener: Listener,
    settings: Arc<Settings>,
    tls: Option<Arc<Tls>>,
    budgets: Budgets,
    errors: Arc<CallerErrors>,
    connections: Arc<Connections>,
    workers: Vec<Worker>,
}

impl Server {
    /// Opens the listener. Connections wait until [`Server::run`] is called.
    ///
    /// # Errors
    ///
    /// Returns an error if the TLS settings are invalid or the address cannot be bound.
    pub(crate) async fn bind(
        settings: Settings,
        messages: &Budget,
        streams: &Budget,
        errors: Arc<CallerErrors>,
    ) -> Result<Self, ServerError> {
        let tls = Tls::new(&settings.tls, &[b"h2"])?;
        let (listener, at) = match settings.uds.clone() {
            Some(path) => (Listener::unix(path.clone()), path.display().to_string()),
            None => (Listener::tcp(settings.addr).await, settings.addr.to_string()),
        };
        let listener = listener.map_err(|source| ServerError::Listen { at, source })?;
        let budgets = Budgets::new(messages.clone(), streams.clone(), &settings.limits);
        let connections = Connections::new(settings.max_connections, "grpc");
        let settings = Arc::new(settings);
        Ok(Self { listener, settings, tls, budgets, errors, connections, workers: Vec::new() })
    }

    /// Returns the address with the actual port, or the path of the socket.
    ///
    /// # Errors
    ///
    /// Returns an error if the operating system does not return the address.
    pub fn address(&self) -> io::Result<String> {
        self.listener.address()
    }

    /// Starts a worker. `build` creates its methods on the worker's own thread and runtime.
    ///
    /// # Errors
    ///
    /// Returns an error if the thread or its runtime cannot be started.
    pub(crate) fn start_worker<F, B, M>(
        &mut self,
        name: &str,
        shutdown: watch::Receiver<bool>,
        build: B,
    ) -> Result<(), ServerError>
    where
        B: FnOnce() -> F + Send + 'static,
        F: Future<Output = Arc<M>>,
        M: Methods,
    {
        let runtime = runtime::Builder::new_current_thread().enable_all().build().map_err(ServerError::Worker)?;
        let (sender, receiver) = mpsc::channel(HAND_OVER_CAPACITY);
        let connections = Arc::new(AtomicUsize::new(0));
        let context = WorkerContext {
            settings: Arc::clone(&self.settings),
            tls: self.tls.clone(),
            budgets: self.budgets.clone(),
            errors: Arc::clone(&self.errors),
            shutdown,
            connections: Arc::clone(&connections),
        };
        let thread = thread::Builder::new().name(name.to_owned()).spawn(move || {
            runtime.block_on(async {
                let methods = build().await;
                work(receiver, &methods, &context).await;
            });
            // A pending DNS lookup for a new connection to Redis must not delay the shutdown.
            runtime.shutdown_background();
        });
        let thread = thread.map_err(ServerError::Worker)?;
        self.workers.push(Worker { connections, sender, thread });
        Ok(())
    }

    /// Returns the open connections.
    pub(in crate::transport) fn connections(&self) -> Arc<Connections> {
        Arc::clone(&self.connections)
    }

    /// Registers the metrics of connections, of errors of callers, and of the memory that callers hold with `meter`.
    pub fn observe(&self, meter: &dyn Meter) {
        let counts: Vec<_> = self.workers.iter().map(|worker| Arc::clone(&worker.connections)).collect();
        let counts = Arc::new(counts);
        Registrar { meter, source: &counts }.gauge(
            "sluicegate_grpc_connections",
            "Number of open gRPC connections",
            |counts| counts.iter().map(|count| count.load(Relaxed) as u64).sum(),
        );
        self.errors.observe(meter);
        let budgets = Arc::new(self.budgets.clone());
        let registrar = Registrar { meter, source: &budgets };
        let description = "Memory that callers hold by unfinished messages and bodies, and by unread responses";
        registrar.gauge("sluicegate_input_bytes", description, |budgets| budgets.messages.used_bytes() as u64);
        let description =
            "Messages, bodies, responses and streams that were dropped because input.max_bytes was reached";
        registrar.counter("sluicegate_input_evictions_total", description, |budgets| {
            budgets.messages.evictions() + budgets.streams.evictions()
        });
        meter.register(Instrument::gauge(
            "sluicegate_grpc_worker_connections",
            "Number of open gRPC connections, by worker",
            move |observer| {
                for (worker, count) in counts.iter().enumerate() {
                    observer.observe(count.load(Relaxed) as u64, [Label::new("worker", worker.to_string())]);
                }
            },
        ));
    }

    /// Accepts connections until `shutdown` is true, and then waits until the workers have finished their calls.
    pub async fn run(self, mut shutdown: watch::Receiver<bool>) {
        let Self { listener, tls, connections, workers, .. } = self;
        if let Some(tls) = tls {
            tokio::spawn(tls.follow());
        }
        let log_accept_error = LogThrottle::default();
        let mut tick = tokio::time::interval(TICK);
        loop {
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((stream, peer)) => hand_over(stream, peer, &workers, &connections),
                    Err(error) => {
                        if log_accept_error.should_log() {
                            tracing::warn!(%error, "cannot accept connections; trying again");
                        }
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                },
                _ = tick.tick() => connections.advance(),
                () = wait_for_shutdown(&mut shutdown) => break,
            }
        }
        drop(listener);
        let threads: Vec<_> = workers.into_iter().map(|worker| worker.thread).collect();
        let joining = tokio::task::spawn_blocking(|| {
            for thread in threads {
                let _ = thread.join();
            }
        });
        let _ = joining.await;
    }
}

/// Passes a connection to the worker with the fewest connections. At the maximum, it replaces another one.
fn hand_over(stream: Stream, peer: Option<SocketAddr>, workers: &[Worker], connections: &Arc<Connections>) {
    let Some(worker) = workers.iter().min_by_key(|worker| worker.connections.load(Relaxed)) else {
        return;
    };
    // The worker's runtime has its own reactor, so the stream is removed from this one.
    match stream.pass() {
        Ok(stream) => {
            worker.connections.fetch_add(1, Relaxed);
            let open_connection = connections.open(peer);
            if worker.sender.try_send(NewConnection { stream, open_connection }).is_err() {
                worker.connections.fetch_sub(1, Relaxed);
                tracing::warn!("a worker's queue of new connections is full; closing a new connection");
            }
        }
        Err(error) => tracing::debug!(%error, "cannot pass a connection to a worker"),
    }
}

/// Guard that decrements a number of connections when it is dropped.
struct ConnectionGuard(Arc<AtomicUsize>);

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// State that the connections of a worker share.
struct WorkerContext {
    settings: Arc<Settings>,
    tls: Option<Arc<Tls>>,
    budgets: Budgets,
    errors: Arc<CallerErrors>,
    shutdown: watch::Receiver<bool>,
    /// Number of connections of the worker.
    connections: Arc<AtomicUsize>,
}

/// Serves the connections that a worker receives. When `shutdown` is true, waits until all have ended.
async fn work<M: Methods>(mut receiver: mpsc::Receiver<NewConnection>, methods: &Arc<M>, worker: &WorkerContext) {
    let mut connections = tokio::task::JoinSet::new();
    let mut stopping = worker.shutdown.clone();
    loop {
        let new = tokio::select! {
            new = receiver.recv() => new,
            Some(_) = connections.join_next() => continue,
            () = wait_for_shutdown(&mut stopping) => None,
        };
        let Some(NewConnection { stream, open_connection }) = new else {
            break;
        };
        let guard = ConnectionGuard(Arc::clone(&worker.connections));
        let Ok(stream) = stream.take() else {
            continue;
        };
        let methods = Arc::clone(methods);
        let settings = Arc::clone(&worker.settings);
        let tls = worker.tls.clone();
        let open_connection = Arc::new(open_connection);
        let context = ConnectionContext {
            errors: Arc::clone(&worker.errors),
            budgets: worker.budgets.clone(),
            open_connection: Arc::clone(&open_connection),
            shutdown: worker.shutdown.clone(),
        };
        let task = connections.spawn(async move {
            connection::serve(stream, methods, &settings, tls, context).await;
            drop(guard);
        });
        open_connection.set_task(task);
    }
    while connections.join_next().await.is_some() {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_connection_that_a_full_worker_rejects_is_not_counted() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, receiver) = mpsc::channel(1);
        let connections = Arc::new(AtomicUsize::new(0));
        let worker = Worker { connections: Arc::clone(&connections), sender, thread: thread::spawn(|| ()) };
        let workers = [worker];
        let connect = async || Stream::Tcp(tokio::net::TcpStream::connect(address).await.unwrap());
        let all = Connections::new(2, "grpc");
        hand_over(connect().await, None, &workers, &all);
        assert_eq!(connections.load(Relaxed), 1);
        // The queue has a capacity of one connection.
        hand_over(connect().await, None, &workers, &all);
        assert_eq!((connections.load(Relaxed), receiver.len()), (1, 1));
    }
}
