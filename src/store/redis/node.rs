//! One Redis server: a connection that is kept alive, a deadline for each call, and a breaker.
//!
//! ## Up ⟶ Down
//! The connection breaks, or so many calls in a row time out: it is dropped, and calls fail at once from then on.
//!
//! ## Down ⟶ Up
//! A background task connects anew, twenty times a second, and each time a whole conversation must succeed: the
//! greeting, loading the script, and a write that changes nothing. A server that is frozen accepts connections but does
//! not converse, and one that became a replica converses but does not write.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::Duration,
};

use arc_swap::ArcSwapOption;
use redis::{
    AsyncConnectionConfig, Client, Cmd, ErrorKind, IntoConnectionInfo, RedisError, RedisResult, ServerErrorKind,
    TlsCertificates, Value, aio::MultiplexedConnection,
};
use tokio::sync::{Notify, watch};

use super::{Settings, SetupError, program::Program};
use crate::store::StoreError;

/// Between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(50);
/// Between two questions whether the connection lives.
const PING: Duration = Duration::from_millis(250);
/// Calls that may wait to be written to the connection.
const QUEUE: usize = 8_192;

pub(super) struct Node {
    client: Client,
    program: Arc<Program>,
    connect_timeout: Duration,
    config: AsyncConnectionConfig,
    link: ArcSwapOption<Link>,
    timeouts_until_down: u32,
    broken: Notify,
    state: watch::Sender<bool>,
}

/// A connection that answered once, and how many calls in a row it has not answered since.
struct Link {
    connection: MultiplexedConnection,
    timeouts: AtomicU32,
}

impl Node {
    pub(super) fn start(client: Client, settings: &Settings, program: Arc<Program>) -> Arc<Self> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(settings.connect_timeout))
            .set_response_timeout(Some(settings.timeout))
            .set_pipeline_buffer_size(QUEUE);
        let node = Arc::new(Self {
            client,
            program,
            connect_timeout: settings.connect_timeout,
            config,
            link: ArcSwapOption::empty(),
            timeouts_until_down: settings.timeouts_until_down.max(1),
            broken: Notify::new(),
            state: watch::Sender::new(false),
        });
        tokio::spawn(Arc::clone(&node).keep_connected());
        node
    }

    pub(super) async fn call(&self, cmd: &Cmd) -> Result<Value, StoreError> {
        let Some(link) = self.link.load_full() else {
            return Err(StoreError::Unavailable);
        };
        let mut connection = link.connection.clone();
        let mut result = send(&mut connection, cmd).await;
        if matches!(&result, Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)) {
            // Someone flushed the scripts: bring ours back and ask again.
            result = match self.load_script(&mut connection).await {
                Ok(()) => send(&mut connection, cmd).await,
                Err(error) => Err(error),
            };
        }
        match result {
            Ok(reply) => {
                if link.timeouts.load(Relaxed) > 0 {
                    link.timeouts.store(0, Relaxed);
                }
                Ok(reply)
            }
            Err(error) => Err(self.failed(&link, &error)),
        }
    }

    /// What an error means for this call, and for those to come.
    fn failed(&self, link: &Arc<Link>, error: &RedisError) -> StoreError {
        use ServerErrorKind::{BusyLoading, MasterDown, ReadOnly};
        if error.is_timeout() {
            if link.timeouts.fetch_add(1, Relaxed) + 1 >= self.timeouts_until_down {
                self.take_down(link, error);
            }
            return StoreError::Timeout;
        }
        let elsewhere = matches!(error.kind(), ErrorKind::Server(BusyLoading | MasterDown | ReadOnly));
        if elsewhere || error.is_io_error() || error.is_unrecoverable_error() {
            self.take_down(link, error);
            return StoreError::Unavailable;
        }
        tracing::debug!(%error, "Redis refused a call");
        StoreError::Refused
    }

    /// Only the link that failed: a late error of an old one says nothing about its successor.
    fn take_down(&self, link: &Arc<Link>, error: &RedisError) {
        let current = self.link.compare_and_swap(link, None);
        if current.as_ref().is_some_and(|current| Arc::ptr_eq(current, link)) {
            self.state.send_replace(false);
            self.broken.notify_one();
            tracing::warn!(%error, "Redis is out of reach; it is not asked until a new connection answers");
        }
    }

    pub(super) fn is_up(&self) -> bool {
        self.link.load().is_some()
    }

    pub(super) async fn up(&self) {
        let _ = self.state.subscribe().wait_for(|up| *up).await;
    }

    async fn keep_connected(self: Arc<Self>) {
        let mut reported = false;
        loop {
            let attempt = tokio::time::timeout(self.connect_timeout, self.connect()).await;
            match attempt.unwrap_or_else(|_| Err((ErrorKind::Io, "no answer in time").into())) {
                Ok(connection) => {
                    self.link.store(Some(Arc::new(Link { connection, timeouts: AtomicU32::new(0) })));
                    self.state.send_replace(true);
                    tracing::info!(server = %self.client.get_connection_info().addr(), "connected to Redis");
                    reported = false;
                    self.until_broken().await;
                }
                Err(error) => {
                    if !reported {
                        let server = self.client.get_connection_info().addr();
                        tracing::warn!(%server, %error, "cannot connect to Redis; trying on");
                    }
                    reported = true;
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }

    /// Asks an idle connection whether it lives, so that no caller has to find out.
    async fn until_broken(&self) {
        let ping = redis::cmd("PING");
        loop {
            tokio::select! {
                () = self.broken.notified() => return,
                () = tokio::time::sleep(PING) => {}
            }
            // What an answer or a failure means is the same as for a decision.
            let _ = self.call(&ping).await;
        }
    }

    async fn connect(&self) -> RedisResult<MultiplexedConnection> {
        let mut connection = self.client.get_multiplexed_async_connection_with_config(&self.config).await?;
        self.load_script(&mut connection).await?;
        send(&mut connection, &self.program.write_probe()).await?;
        Ok(connection)
    }

    async fn load_script(&self, connection: &mut MultiplexedConnection) -> RedisResult<()> {
        self.program.script().prepare_invoke().load_async(connection).await.map(|_: String| ())
    }
}

/// An error that Redis answers is an error.
async fn send(connection: &mut MultiplexedConnection, cmd: &Cmd) -> RedisResult<Value> {
    match connection.send_packed_command(cmd).await? {
        error @ Value::ServerError(_) => error.extract_error(),
        value => Ok(value),
    }
}

pub(super) fn client(url: &str, settings: &Settings) -> Result<Client, SetupError> {
    let address = |source| SetupError::Address { url: crate::store::redact(url), source };
    let info = url.into_connection_info().map_err(address)?;
    let tls = &settings.tls;
    if tls.ca_file.is_none() && tls.cert_file.is_none() {
        return Client::open(info).map_err(address);
    }
    let read = |path: &std::path::PathBuf| {
        std::fs::read(path).map_err(|source| SetupError::Certificate { path: path.display().to_string(), source })
    };
    let client_tls = match (&tls.cert_file, &tls.key_file) {
        (Some(cert), Some(key)) => Some(redis::ClientTlsConfig { client_cert: read(cert)?, client_key: read(key)? }),
        _ => None,
    };
    let root_cert = tls.ca_file.as_ref().map(read).transpose()?;
    Client::build_with_tls(info, TlsCertificates { client_tls, root_cert }).map_err(address)
}
