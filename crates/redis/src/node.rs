//! [`Node`]: one worker's connection to one Redis server, with health checks, a deadline for each call, and a breaker.
//!
//! ## Up ⟶ Down (the breaker opens)
//! If the connection breaks, or `timeouts_until_down` consecutive calls time out, the node drops the connection and
//! fails all calls immediately. Calls to other servers are not affected, because every server has its own node.
//!
//! ## Down ⟶ Up
//! A background task reconnects immediately, then after 50 ms, and later every 200 ms on average. Calls that find a
//! broken connection wait for the first attempt, at most for the deadline of a call, so that a server or a network that
//! closes connections does not fail decisions. Each attempt must connect, load the script, and execute a write that
//! changes nothing. It has `redis.connect_timeout` in total, and the deadline of a call (`redis.timeout`) for each
//! command. This excludes frozen servers, which only accept connections; replicas, which do not write; and servers that
//! take longer than `redis.timeout` to answer.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::Duration,
};

use arc_swap::ArcSwapOption;
use redis::{Cmd, ErrorKind, RedisError, RedisResult, Value, aio::MultiplexedConnection};
use sluicegate_deadline::within;
use sluicegate_metrics::WorkerId;
use sluicegate_store::{
    StoreError,
    health::{FailureKind, reconnect_pause},
};
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};

use super::{
    Deployment,
    failure::{Failure, HealthEffect},
    login::Secret,
    tls_mismatch::TlsMismatch,
    topology::{Connected, Server},
};

/// Interval between checks of an idle connection.
const PING_INTERVAL: Duration = Duration::from_millis(250);
/// Interval between attempts to log in again on an open connection.
const LOGIN_INTERVAL: Duration = Duration::from_secs(1);

/// One worker's connection to one server.
pub(super) struct Node {
    server: Server,
    deployment: Arc<Deployment>,
    worker: WorkerId,
    /// The connection, or `None` while the node is down.
    link: ArcSwapOption<ServerConnection>,
    broken: Notify,
    state: watch::Sender<State>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Down,
    /// The connection broke, and the first attempt to connect again has not ended.
    Reconnecting,
    Up,
    /// The node was closed and does not reconnect.
    Closed,
}

/// A connection that has passed its checks, and the number of consecutive timeouts since its last answer.
struct ServerConnection {
    connection: MultiplexedConnection,
    timeouts: AtomicU32,
}

/// Error returned by a call that was not executed or not answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum CallError {
    Failed(StoreError),
    /// The call must be sent elsewhere or in another form. The server did nothing.
    Redirected(Redirect),
}

/// The way to resend a call that was not executed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Redirect {
    /// Resend to this host and port, as all later calls for the slot.
    Moved(String, u16),
    /// Resend to this host and port, for this call only and with `ASKING`.
    Ask(String, u16),
    /// Resend to the same server with declared keys, which it needs to answer or redirect the call.
    DeclareKeys,
    /// Resend as several calls: the server cannot decide these keys in one.
    Split,
}

impl From<StoreError> for CallError {
    fn from(error: StoreError) -> Self {
        Self::Failed(error)
    }
}

impl Node {
    /// Starts a task that connects and reconnects until the node is closed or the current runtime ends.
    pub(super) fn start(server: Server, deployment: Arc<Deployment>, worker: WorkerId) -> Arc<Self> {
        deployment.health.add_worker(&server.name);
        let node = Arc::new(Self {
            server,
            deployment,
            worker,
            link: ArcSwapOption::empty(),
            broken: Notify::new(),
            state: watch::Sender::new(State::Down),
        });
        tokio::spawn(Arc::clone(&node).keep_connected());
        node
    }

    pub(super) fn name(&self) -> &Arc<str> {
        &self.server.name
    }

    /// Closes the node. Calls in flight are still answered.
    pub(super) fn close(&self) {
        let previous = self.state.send_replace(State::Closed);
        if previous != State::Closed {
            self.deployment.health.remove_worker(&self.server.name, previous == State::Up);
        }
        self.link.store(None);
        self.broken.notify_one();
    }

    pub(super) fn is_up(&self) -> bool {
        self.link.load().is_some()
    }

    /// Waits for the first attempt to reconnect after the connection broke, at most for the deadline of a call. Returns
    /// whether the node is up.
    pub(super) async fn wait_for_reconnection(&self) -> bool {
        let mut states = self.state.subscribe();
        let attempt = states.wait_for(|state| *state != State::Reconnecting);
        let _ = within(self.deployment.settings.timeout, attempt).await;
        self.is_up()
    }

    /// Waits until the node is up. Never returns if the node is closed.
    pub(super) async fn wait_until_up(&self) {
        let _ = self.state.subscribe().wait_for(|state| *state == State::Up).await;
    }

    /// Sends one call. `asking` sends it with `ASKING`, for a slot that is migrating to this server.
    pub(super) async fn call(&self, cmd: &Cmd, asking: bool) -> Result<Value, CallError> {
        let Some(link) = self.link.load_full() else {
            return Err(StoreError::Unavailable.into());
        };
        let mut connection = link.connection.clone();
        let mut result = self.send(&mut connection, cmd, asking).await;
        if matches!(&result, Err(error) if Failure::of(error) == Failure::NoScript) {
            // The scripts of the server were flushed: load the script and resend the call.
            self.deployment.health.count_failure(self.worker, Failure::NoScript);
            let retry = async {
                self.load_script(&mut connection).await?;
                self.send(&mut connection, cmd, asking).await
            };
            result = Box::pin(retry).await;
        }
        match result {
            Ok(reply) => {
                if link.timeouts.load(Relaxed) > 0 {
                    link.timeouts.store(0, Relaxed);
                }
                Ok(reply)
            }
            Err(error) => Err(self.handle_error(&link, &error)),
        }
    }

    /// Takes the node down after a reply that is not in the script's format, because other replies cannot be trusted
    /// either. Returns the error for the call.
    pub(super) fn mark_suspect(&self) -> CallError {
        let error = RedisError::from((ErrorKind::Parse, "reply is not in the format of the script"));
        match self.link.load_full() {
            Some(link) => self.handle_error(&link, &error),
            None => StoreError::Unavailable.into(),
        }
    }

    /// Counts and logs that the key of a counter contained other data than the counter's state. The script replaces it.
    pub(super) fn report_invalid_state(&self) {
        self.deployment.health.count_failure(self.worker, Failure::WrongType);
        if self.deployment.health.should_log_rejection(&self.server.name, Failure::WrongType) {
            tracing::warn!(
                server = %self.server.name,
                kind = Failure::WrongType.kind(),
                "the key of a counter contained other data, so the counter begins at zero"
            );
        }
    }

    /// Updates the node's health after an error, and returns the error for the call.
    fn handle_error(&self, link: &Arc<ServerConnection>, error: &RedisError) -> CallError {
        let failure = Failure::of(error);
        self.deployment.health.count_failure(self.worker, failure);
        if failure.suggests_topology_change() {
            self.deployment.topology.request_refresh();
        }
        let redirect = match failure {
            // The address names one node of a cluster as if it were a single server.
            Failure::Moved | Failure::Ask if !self.deployment.topology.is_cluster() => None,
            Failure::Moved => self.redirect_address(error).map(|(host, port)| Redirect::Moved(host, port)),
            Failure::Ask => self.redirect_address(error).map(|(host, port)| Redirect::Ask(host, port)),
            Failure::TryAgain | Failure::CrossSlot => Some(Redirect::Split),
            // A cluster node that became a replica sends redirects only for declared keys.
            Failure::ReadOnly if self.deployment.topology.is_cluster() => Some(Redirect::DeclareKeys),
            _ => None,
        };
        if let Some(redirect) = redirect {
            return CallError::Redirected(redirect);
        }
        match failure.health_effect() {
            HealthEffect::Down => self.take_down(link, error),
            HealthEffect::DownIfRepeated => {
                let max_timeouts = self.deployment.settings.timeouts_until_down.max(1);
                if link.timeouts.fetch_add(1, Relaxed) + 1 >= max_timeouts {
                    self.take_down(link, error);
                }
            }
            HealthEffect::None => self.deployment.health.log_rejection(&self.server.name, failure, error),
        }
        failure.error().into()
    }

    /// Returns the host and port of a redirect. A redirect without a host means another port of the same host.
    fn redirect_address(&self, error: &RedisError) -> Option<(String, u16)> {
        let (address, _) = error.redirect_node()?;
        let (host, port) = address.rsplit_once(':')?;
        let (own_host, _) = self.server.name.rsplit_once(':').unwrap_or_default();
        let host = if matches!(host, "" | "?") { own_host } else { host };
        Some((host.trim_matches(['[', ']']).to_owned(), port.parse().ok()?))
    }

    /// Takes the node down if `link` is the current connection, and not a previous one that fails late.
    fn take_down(&self, link: &Arc<ServerConnection>, error: &RedisError) {
        let current = self.link.compare_and_swap(link, None);
        if current.as_ref().is_some_and(|current| Arc::ptr_eq(current, link)) {
            let failure = Failure::of(error);
            self.set_state(if failure == Failure::Io { State::Reconnecting } else { State::Down });
            self.deployment.health.mark_down(&self.server.name, failure, &failure.describe(error));
            self.broken.notify_one();
        }
    }

    /// Sets the state unless the node is closed, and returns whether it did.
    fn set_state(&self, state: State) -> bool {
        self.state.send_if_modified(|current| {
            let is_open = *current != State::Closed;
            if is_open {
                *current = state;
            }
            is_open
        })
    }

    fn is_closed(&self) -> bool {
        *self.state.borrow() == State::Closed
    }

    async fn keep_connected(self: Arc<Self>) {
        let mut failures = 0_u32;
        let mut mismatch = None;
        while !self.is_closed() {
            let attempt = within(self.deployment.settings.connect_timeout, self.connect()).await;
            match attempt.unwrap_or_else(|_| Err(timeout_error())) {
                Ok(Connected { connection, secret }) => {
                    self.link.store(Some(Arc::new(ServerConnection { connection, timeouts: AtomicU32::new(0) })));
                    if !self.set_state(State::Up) {
                        self.link.store(None);
                        return;
                    }
                    self.deployment.health.mark_up(&self.server.name);
                    failures = 0;
                    mismatch = None;
                    self.ping_until_broken(secret).await;
                }
                Err(error) => {
                    self.set_state(State::Down);
                    let failure = Failure::of(&error);
                    if failure == Failure::NoAuth {
                        self.server.report_rejected_login();
                    }
                    // Later attempts are examined less often, because the search can take as long as an attempt.
                    if mismatch.is_none()
                        && failure.can_be_tls_mismatch()
                        && (failures == 0 || failures.is_power_of_two())
                    {
                        mismatch =
                            TlsMismatch::find(self.server.addr(), self.deployment.settings.connect_timeout).await;
                    }
                    self.report_connect_failure(failure, mismatch, &error);
                    self.deployment.topology.request_refresh();
                    failures += 1;
                    tokio::time::sleep(reconnect_pause(failures)).await;
                }
            }
        }
    }

    /// Counts and logs a failed attempt to connect.
    fn report_connect_failure(&self, failure: Failure, mismatch: Option<TlsMismatch>, error: &RedisError) {
        let (failure, description) = match mismatch {
            Some(mismatch) if failure.can_be_tls_mismatch() => {
                (Failure::Tls, format!("{}: {error}", mismatch.description()))
            }
            _ => (failure, failure.describe(error)),
        };
        self.deployment.health.count_failure(self.worker, failure);
        self.deployment.health.log_connect_failure(&self.server.name, failure, &description);
    }

    /// Pings the server, so that a broken connection is detected before a caller uses it, and logs in again when the
    /// credentials change. `secret` contains those of the connection, if they can change.
    async fn ping_until_broken(&self, mut secret: Option<Secret>) {
        let ping = redis::cmd("PING");
        let mut last_login = Instant::now();
        loop {
            tokio::select! {
                () = self.broken.notified() => return,
                () = tokio::time::sleep(PING_INTERVAL) => {}
            }
            // `call` handles errors as it does for a decision.
            let _ = self.call(&ping, false).await;
            if let Some(current) = &mut secret
                && last_login.elapsed() >= LOGIN_INTERVAL
            {
                last_login = Instant::now();
                self.update_login(current).await;
            }
        }
    }

    /// Logs that the server rejected changed credentials on an open connection, once per series of such errors.
    fn log_rejected_login(&self, error: &RedisError) {
        if self.deployment.health.should_log_rejection(&self.server.name, Failure::NoAuth) {
            tracing::warn!(
                server = %self.server.name, %error,
                "Redis server rejects the changed password; open connections keep the previous one"
            );
        }
    }

    /// Logs in again on the open connection if the credentials have changed since `secret`. If Redis rejects the new
    /// ones, the connection keeps the previous ones.
    async fn update_login(&self, secret: &mut Secret) {
        let Some((command, new)) = self.server.login_command(secret) else {
            return;
        };
        let Some(link) = self.link.load_full() else {
            return;
        };
        match self.send(&mut link.connection.clone(), &command, false).await {
            Ok(_) => *secret = new,
            // The password may not have been changed at the server yet.
            Err(error) if Failure::of(&error) == Failure::NoAuth => {
                self.deployment.health.count_failure(self.worker, Failure::NoAuth);
                self.log_rejected_login(&error);
                self.server.report_rejected_login();
            }
            Err(error) => {
                self.handle_error(&link, &error);
            }
        }
    }

    async fn connect(&self) -> RedisResult<Connected> {
        let mut connected = self.server.connect().await?;
        let connection = &mut connected.connection;
        // Without a password, Redis rejects the script as too long and closes the connection, which hides the reason.
        if let Err(error) = self.send(connection, &redis::cmd("PING"), false).await
            && Failure::of(&error) == Failure::NoAuth
        {
            return Err(error);
        }
        self.load_script(connection).await?;
        let probe = self.deployment.script.write_probe();
        match self.send(connection, &probe, false).await {
            // In a cluster the key of the probe can belong to another server.
            Err(error) if !matches!(Failure::of(&error), Failure::Moved | Failure::Ask) => Err(error),
            _ => Ok(connected),
        }
    }

    async fn load_script(&self, connection: &mut MultiplexedConnection) -> RedisResult<()> {
        self.send(connection, &self.deployment.script.load_command(), false).await.map(drop)
    }

    /// Sends a command and waits for its reply, at most for the deadline of a call.
    async fn send(&self, connection: &mut MultiplexedConnection, cmd: &Cmd, asking: bool) -> RedisResult<Value> {
        within(self.deployment.settings.timeout, send(connection, cmd, asking))
            .await
            .unwrap_or_else(|_| Err(timeout_error()))
    }
}

fn timeout_error() -> RedisError {
    std::io::Error::from(std::io::ErrorKind::TimedOut).into()
}

/// Sends a command. Converts an error reply into an error.
async fn send(connection: &mut MultiplexedConnection, cmd: &Cmd, asking: bool) -> RedisResult<Value> {
    let reply = if asking {
        let mut pipe = redis::pipe();
        pipe.cmd("ASKING").add_command(cmd.clone());
        Box::pin(connection.send_packed_commands(&pipe, 0, 2)).await?.pop().unwrap_or(Value::Nil)
    } else {
        connection.send_packed_command(cmd).await?
    };
    match reply {
        error @ Value::ServerError(_) => error.extract_error(),
        value => Ok(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Metrics, Settings, TimeSource};

    /// The first attempt to connect again ends the waiting also if it fails: the deadline of a call is a day here.
    #[tokio::test]
    async fn calls_wait_only_for_the_first_attempt_to_connect_again() {
        let metrics = Metrics::new(1);
        let settings = Settings { timeout: Duration::from_secs(86_400), ..Settings::default() };
        let deployment = Deployment::new("redis://127.0.0.1:1", &settings, TimeSource::Own, &metrics).unwrap();
        let server = deployment.topology.view().borrow().servers[0].clone();
        let node = Node::start(server, deployment, WorkerId(0));
        node.set_state(State::Reconnecting);
        let is_up = tokio::time::timeout(Duration::from_secs(60), node.wait_for_reconnection()).await;
        assert_eq!(is_up, Ok(false));
    }

    /// A node does not reconnect to a server that has left the topology, even if it has never reached it.
    #[tokio::test(start_paused = true)]
    async fn a_closed_node_stops_connecting() {
        let metrics = Metrics::new(1);
        let deployment =
            Deployment::new("redis://127.0.0.1:1", &Settings::default(), TimeSource::Own, &metrics).unwrap();
        let server = deployment.topology.view().borrow().servers[0].clone();
        let node = Node::start(server, Arc::clone(&deployment), WorkerId(0));
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!((Arc::strong_count(&node), metrics.health().servers().len()), (2, 1));
        node.close();
        node.close();
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!((Arc::strong_count(&node), metrics.health().servers().len()), (1, 0));
    }
}
