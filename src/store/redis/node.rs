//! One worker's way to one Redis server: a connection that is kept alive, a deadline for each call, and a breaker.
//!
//! ## Up ⟶ Down
//! The connection breaks, or so many calls in a row time out: it is dropped, and calls fail at once from then on. Nobody
//! else's calls are touched: every server has a node of its own.
//!
//! ## Down ⟶ Up
//! A background task connects anew, some twenty times a second, and each time a whole conversation must succeed: the
//! greeting, loading the script, and, within the deadline of a call, a write that changes nothing. A server that is
//! frozen accepts connections but does not converse, one that became a replica converses but does not write, and one
//! that takes 200 ms for an answer is of no use.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::Duration,
};

use arc_swap::ArcSwapOption;
use redis::{AsyncConnectionConfig, Cmd, ErrorKind, RedisError, RedisResult, Value, aio::MultiplexedConnection};
use tokio::{
    sync::{Notify, watch},
    time::timeout,
};

use super::{
    Shared,
    failure::{Failure, HealthEffect},
    topology::{Server, back_off},
};
use crate::{metrics::WorkerId, store::StoreError};

/// Between two questions whether the connection lives.
const PING: Duration = Duration::from_millis(250);
/// Calls that may wait to be written to the connection.
const QUEUE: usize = 8_192;

pub(super) struct Node {
    server: Server,
    shared: Arc<Shared>,
    worker: WorkerId,
    link: ArcSwapOption<ServerConnection>,
    broken: Notify,
    state: watch::Sender<State>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Down,
    Up,
    /// Nobody wants it any more.
    Closed,
}

/// A connection that answered once, and how many calls in a row it has not answered since.
struct ServerConnection {
    connection: MultiplexedConnection,
    timeouts: AtomicU32,
}

/// A call without an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum CallError {
    Failed(StoreError),
    /// The keys are elsewhere. Nothing was done.
    Elsewhere(Redirect),
}

/// Where to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Redirect {
    /// To this server, from now on.
    Moved(String, u16),
    /// To this server, for this once.
    Ask(String, u16),
    /// Here perhaps, perhaps not: this one cannot say without keys that are declared.
    Declared,
    /// To several: the keys cannot be decided in one call, now or ever.
    Apart,
}

impl From<StoreError> for CallError {
    fn from(error: StoreError) -> Self {
        Self::Failed(error)
    }
}

impl Node {
    /// Begins to connect, and goes on until it is closed or the current runtime ends.
    pub(super) fn start(server: Server, shared: Arc<Shared>, worker: WorkerId) -> Arc<Self> {
        shared.health.add_worker(&server.name);
        let (link, state) = (ArcSwapOption::empty(), watch::Sender::new(State::Down));
        let node = Arc::new(Self { server, shared, worker, link, broken: Notify::new(), state });
        tokio::spawn(Arc::clone(&node).keep_connected());
        node
    }

    pub(super) fn name(&self) -> &Arc<str> {
        &self.server.name
    }

    /// Calls under way are still answered.
    pub(super) fn close(&self) {
        let was = self.state.send_replace(State::Closed);
        if was != State::Closed {
            self.shared.health.remove_worker(&self.server.name, was == State::Up);
        }
        self.link.store(None);
        self.broken.notify_one();
    }

    pub(super) fn is_up(&self) -> bool {
        self.link.load().is_some()
    }

    /// Waits until it can be asked; for ever, if it is closed.
    pub(super) async fn up(&self) {
        let _ = self.state.subscribe().wait_for(|state| *state == State::Up).await;
    }

    /// One call. `asking`: the server is to answer for a slot that is on its way to it.
    pub(super) async fn call(&self, cmd: &Cmd, asking: bool) -> Result<Value, CallError> {
        let Some(link) = self.link.load_full() else {
            return Err(StoreError::Unavailable.into());
        };
        let mut connection = link.connection.clone();
        let mut result = send(&mut connection, cmd, asking).await;
        if matches!(&result, Err(error) if Failure::of(error) == Failure::NoScript) {
            // Someone flushed the scripts: bring ours back and ask again.
            self.shared.health.failed(self.worker, Failure::NoScript);
            let again = async {
                self.load_script(&mut connection).await?;
                send(&mut connection, cmd, asking).await
            };
            result = Box::pin(again).await;
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

    /// The server's answer was not one of the program: nothing else that it says is to be trusted.
    pub(super) fn mark_suspect(&self) -> CallError {
        let error = RedisError::from((ErrorKind::Parse, "this is no answer of the program"));
        match self.link.load_full() {
            Some(link) => self.failed(&link, &error),
            None => StoreError::Unavailable.into(),
        }
    }

    /// Something else than a counter is stored under a counter's key.
    pub(super) fn spoiled(&self) {
        let error = RedisError::from((ErrorKind::UnexpectedReturnType, "a counter's key holds something else"));
        self.shared.health.failed(self.worker, Failure::WrongType);
        self.shared.health.refused(&self.server.name, Failure::WrongType, &error);
    }

    /// What an error means for this call, and for those to come.
    fn failed(&self, link: &Arc<ServerConnection>, error: &RedisError) -> CallError {
        let failure = Failure::of(error);
        self.shared.health.failed(self.worker, failure);
        if failure.suggests_topology_change() {
            self.shared.topology.request_refresh();
        }
        let redirect = match failure {
            // One server of a cluster was given as if it were alone.
            Failure::Moved | Failure::Ask if !self.shared.topology.is_cluster() => None,
            Failure::Moved => self.target(error).map(|(host, port)| Redirect::Moved(host, port)),
            Failure::Ask => self.target(error).map(|(host, port)| Redirect::Ask(host, port)),
            Failure::TryAgain | Failure::CrossSlot => Some(Redirect::Apart),
            // A node of a cluster that became a replica redirects whoever says by which keys.
            Failure::ReadOnly if self.shared.topology.is_cluster() => Some(Redirect::Declared),
            _ => None,
        };
        if let Some(redirect) = redirect {
            return CallError::Elsewhere(redirect);
        }
        match failure.health_effect() {
            HealthEffect::Down => self.take_down(link, error),
            HealthEffect::DownIfRepeated => {
                let most = self.shared.settings.timeouts_until_down.max(1);
                if link.timeouts.fetch_add(1, Relaxed) + 1 >= most {
                    self.take_down(link, error);
                }
            }
            HealthEffect::None => self.shared.health.refused(&self.server.name, failure, error),
        }
        failure.error().into()
    }

    /// Where a redirect points. Without a host it means another port of this one.
    fn target(&self, error: &RedisError) -> Option<(String, u16)> {
        let (address, _) = error.redirect_node()?;
        let (host, port) = address.rsplit_once(':')?;
        let own = self.server.name.rsplit_once(':').map_or("", |(host, _)| host);
        let host = if matches!(host, "" | "?") { own } else { host };
        Some((host.trim_matches(['[', ']']).to_owned(), port.parse().ok()?))
    }

    /// Only the link that failed: a late error of an old one says nothing about its successor.
    fn take_down(&self, link: &Arc<ServerConnection>, error: &RedisError) {
        let current = self.link.compare_and_swap(link, None);
        if current.as_ref().is_some_and(|current| Arc::ptr_eq(current, link)) {
            self.set(State::Down);
            self.shared.health.went_down(&self.server.name, error);
            self.broken.notify_one();
        }
    }

    /// Unless it was closed meanwhile.
    fn set(&self, state: State) -> bool {
        self.state.send_if_modified(|current| {
            let changes = *current != State::Closed;
            if changes {
                *current = state;
            }
            changes
        })
    }

    fn is_closed(&self) -> bool {
        *self.state.borrow() == State::Closed
    }

    async fn keep_connected(self: Arc<Self>) {
        let mut failures = 0;
        while !self.is_closed() {
            let attempt = timeout(self.shared.settings.connect_timeout, self.connect()).await;
            match attempt.unwrap_or_else(|_| Err(late())) {
                Ok(connection) => {
                    if !self.set(State::Up) {
                        return;
                    }
                    self.link.store(Some(Arc::new(ServerConnection { connection, timeouts: AtomicU32::new(0) })));
                    self.shared.health.came_up(&self.server.name);
                    failures = 0;
                    self.until_broken().await;
                }
                Err(error) => {
                    self.shared.health.stays_down(&self.server.name, &error);
                    self.shared.topology.request_refresh();
                    failures += 1;
                    back_off(failures).await;
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
            let _ = self.call(&ping, false).await;
        }
    }

    async fn connect(&self) -> RedisResult<MultiplexedConnection> {
        let settings = &self.shared.settings;
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(settings.connect_timeout))
            .set_response_timeout(Some(settings.timeout))
            .set_pipeline_buffer_size(QUEUE);
        let mut connection = self.server.client.get_multiplexed_async_connection_with_config(&config).await?;
        self.load_script(&mut connection).await?;
        let probe = self.shared.program.write_probe();
        match timeout(settings.timeout, send(&mut connection, &probe, false)).await.unwrap_or_else(|_| Err(late())) {
            // In a cluster the probe's key may well be another server's.
            Err(error) if !matches!(Failure::of(&error), Failure::Moved | Failure::Ask) => Err(error),
            _ => Ok(connection),
        }
    }

    async fn load_script(&self, connection: &mut MultiplexedConnection) -> RedisResult<()> {
        send(connection, &self.shared.program.load(), false).await.map(drop)
    }
}

fn late() -> RedisError {
    std::io::Error::from(std::io::ErrorKind::TimedOut).into()
}

/// An error that Redis answers is an error.
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
    use crate::store::{
        Metrics,
        redis::{Settings, Time},
    };

    /// Nobody goes on knocking at a server that has left the topology, whether it was ever there or not.
    #[tokio::test(start_paused = true)]
    async fn a_node_that_is_closed_ends() {
        let metrics = Metrics::new(1);
        let shared = Shared::new("redis://127.0.0.1:1", &Settings::default(), Time::Server, &metrics).unwrap();
        let server = shared.topology.view().borrow().servers[0].clone();
        let node = Node::start(server, Arc::clone(&shared), WorkerId(0));
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!((Arc::strong_count(&node), metrics.redis().servers().len()), (2, 1));
        node.close();
        node.close();
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!((Arc::strong_count(&node), metrics.redis().servers().len()), (1, 0));
    }
}
