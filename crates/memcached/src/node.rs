//! [`Node`]: one worker's connection to one server, which decides all waiting requests in rounds.
//!
//! ## Up ⟶ Down
//! If the connection breaks, or a round does not end within the deadline of a call, the node drops the connection and
//! fails all calls immediately. Calls to other servers are not affected, because every server has its own node.
//!
//! ## Down ⟶ Up
//! A background task reconnects immediately and then at intervals of up to 300 ms. Calls that find a broken connection
//! wait for the first attempt, at most for the deadline of a call. Each attempt must answer a command within that
//! deadline, which excludes frozen servers and servers without the meta protocol.

use std::{io, mem, sync::Arc, time::Duration};

use parking_lot::Mutex;
use sluicegate_algorithm::Micros;
use sluicegate_deadline::within;
use sluicegate_metrics::WorkerId;
use sluicegate_store::{
    Charge, Hit, StepOutcomes, StoreError,
    health::{Health, reconnect_pause},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufReader, ReadHalf, WriteHalf, split},
    net::TcpStream,
    sync::{Notify, oneshot, watch},
    task::yield_now,
    time::sleep,
};

use super::{
    Settings,
    address::host_of,
    failure::Failure,
    key::key_of,
    protocol::{Commands, Reply},
    round::{Request, Round},
    tls::Tls,
};

/// Number of hits up to which a round accepts new requests, so that it ends within the deadline of a call.
const MAX_NEW_HITS: usize = 1_024;
/// Interval between checks of an idle connection.
const PING_INTERVAL: Duration = Duration::from_millis(250);

/// A server, and the settings of the connections to it.
pub(crate) struct Server {
    /// Host and port.
    pub(crate) name: Arc<str>,
    pub(crate) tls: Option<Tls>,
    pub(crate) settings: Settings,
    pub(crate) health: Arc<Health<Failure>>,
}

/// One worker's connection to one server.
pub(crate) struct Node {
    server: Arc<Server>,
    worker: WorkerId,
    queue: Mutex<Queue>,
    ready: Notify,
    state: watch::Sender<State>,
}

/// Calls that wait for the next round.
#[derive(Default)]
struct Queue {
    requests: Vec<Request>,
    deletions: Vec<Deletion>,
}

/// A counter to delete, and the receiver of whether it existed.
struct Deletion {
    key: String,
    answer: oneshot::Sender<Result<bool, StoreError>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Down,
    /// The connection broke, and the first attempt to connect again has not ended.
    Reconnecting,
    Up,
}

/// A connection with or without TLS.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// A connection that has no unread replies.
struct Connection {
    reader: BufReader<ReadHalf<Box<dyn Stream>>>,
    writer: WriteHalf<Box<dyn Stream>>,
}

impl Node {
    /// Starts a task that keeps the node connected and decides requests until the current runtime ends.
    pub(crate) fn start(server: Arc<Server>, worker: WorkerId) -> Arc<Self> {
        server.health.add_worker(&server.name);
        let node = Arc::new(Self {
            server,
            worker,
            queue: Mutex::default(),
            ready: Notify::new(),
            state: watch::Sender::new(State::Down),
        });
        tokio::spawn(Arc::clone(&node).run());
        node
    }

    pub(crate) fn name(&self) -> &Arc<str> {
        &self.server.name
    }

    pub(crate) fn key_prefix(&self) -> &str {
        &self.server.settings.key_prefix
    }

    /// Waits until the node is connected.
    pub(crate) async fn wait_until_up(&self) {
        let _ = self.state.subscribe().wait_for(|state| *state == State::Up).await;
    }

    /// Runs the steps of `hits`, in their order, in a round that other requests may share.
    pub(crate) async fn steps(&self, hits: Vec<Hit>, charge: Charge, now: Micros) -> StepOutcomes {
        let count = hits.len();
        let (sender, answer) = oneshot::channel();
        let result = self.call(answer, |queue| queue.requests.push(Request::new(hits, charge, now, sender))).await;
        result.unwrap_or_else(|error| (0..count).map(|_| Err(error)).collect())
    }

    /// Deletes a counter and returns whether it existed.
    pub(crate) async fn delete(&self, name: &[u8]) -> Result<bool, StoreError> {
        let key = key_of(&self.server.settings.key_prefix, name);
        let (sender, answer) = oneshot::channel();
        self.call(answer, |queue| queue.deletions.push(Deletion { key, answer: sender })).await?
    }

    /// Adds a call to the queue and waits for its answer, at most for the deadline of a call.
    async fn call<T>(&self, answer: oneshot::Receiver<T>, add: impl FnOnce(&mut Queue)) -> Result<T, StoreError> {
        let result = within(self.server.settings.timeout, async {
            // The first attempt to reconnect fails within the deadline as well.
            let _ = self.state.subscribe().wait_for(|state| *state != State::Reconnecting).await;
            {
                let mut queue = self.queue.lock();
                if *self.state.borrow() != State::Up {
                    return Err(StoreError::Unavailable);
                }
                add(&mut queue);
            }
            self.ready.notify_one();
            answer.await.map_err(|_| StoreError::Unavailable)
        })
        .await;
        result.unwrap_or(Err(StoreError::Timeout))
    }

    async fn run(self: Arc<Self>) {
        let mut failures = 0_u32;
        loop {
            let attempt = within(self.server.settings.connect_timeout, self.connect()).await;
            match attempt.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
                Ok(mut connection) => {
                    failures = 0;
                    self.state.send_replace(State::Up);
                    self.server.health.mark_up(&self.server.name);
                    let error = self.serve(&mut connection).await;
                    self.take_down(&error);
                }
                Err(error) => {
                    self.state.send_replace(State::Down);
                    let failure = Failure::of(&error);
                    self.server.health.count_failure(self.worker, failure);
                    self.server.health.log_connect_failure(&self.server.name, failure, &error.to_string());
                    failures += 1;
                    sleep(reconnect_pause(failures)).await;
                }
            }
        }
    }

    async fn connect(&self) -> io::Result<Connection> {
        let stream = TcpStream::connect(&*self.server.name).await?;
        stream.set_nodelay(true)?;
        let stream: Box<dyn Stream> = match &self.server.tls {
            Some(tls) => Box::new(tls.connect(stream, host_of(&self.server.name)).await?),
            None => Box::new(stream),
        };
        let (reader, writer) = split(stream);
        let mut connection = Connection { reader: BufReader::new(reader), writer };
        self.ping(&mut connection).await?;
        Ok(connection)
    }

    /// Decides requests until the connection fails, and returns the error.
    async fn serve(&self, connection: &mut Connection) -> io::Error {
        let mut unfinished = Vec::new();
        loop {
            if unfinished.is_empty() && self.queue.lock().is_empty() {
                tokio::select! {
                    () = self.ready.notified() => {}
                    () = sleep(PING_INTERVAL) => match self.ping(connection).await {
                        Ok(()) => continue,
                        Err(error) => return error,
                    },
                }
            }
            // All tasks that are ready now add their requests to this round.
            yield_now().await;
            let queue = self.queue.lock().take();
            if let Err(error) = self.delete_all(connection, queue.deletions).await {
                let failure = Failure::of(&error).error();
                unfinished.into_iter().chain(queue.requests).for_each(|request: Request| request.fail(failure));
                return error;
            }
            unfinished.extend(queue.requests);
            match self.decide_all(connection, unfinished).await {
                Ok(requests) => unfinished = requests,
                Err(error) => return error,
            }
        }
    }

    /// Decides requests in one round, and returns those that need another one.
    async fn decide_all(&self, connection: &mut Connection, requests: Vec<Request>) -> io::Result<Vec<Request>> {
        if requests.is_empty() {
            return Ok(requests);
        }
        let mut round = Round::new(requests, &self.server.settings.key_prefix);
        let result = match self.exchange(connection, &round.reads()).await {
            Ok(replies) => {
                self.report_rejections(&replies);
                let writes = round.decide(replies);
                if round.has_invalid_item() {
                    self.report_rejection("the item of a counter contains other data");
                }
                self.exchange(connection, &writes).await
            }
            Err(error) => Err(error),
        };
        match result {
            Ok(replies) => {
                self.report_rejections(&replies);
                let mut failed_rollbacks = 0;
                let unfinished = round.finish(replies, &mut failed_rollbacks);
                for _ in 0..failed_rollbacks {
                    self.server.health.rollback_failed(self.worker);
                }
                Ok(unfinished)
            }
            Err(error) => {
                round.fail(Failure::of(&error).error());
                Err(error)
            }
        }
    }

    async fn delete_all(&self, connection: &mut Connection, deletions: Vec<Deletion>) -> io::Result<()> {
        let mut commands = Commands::default();
        for deletion in &deletions {
            commands.add_delete(&deletion.key);
        }
        let replies = self.exchange(connection, &commands).await?;
        self.report_rejections(&replies);
        for (deletion, reply) in deletions.into_iter().zip(replies) {
            let answer = match reply {
                Reply::Done => Ok(true),
                Reply::Missing => Ok(false),
                Reply::Value { .. } | Reply::Conflict | Reply::Rejected(_) => Err(StoreError::Rejected),
            };
            // The caller may be gone.
            let _ = deletion.answer.send(answer);
        }
        Ok(())
    }

    async fn ping(&self, connection: &mut Connection) -> io::Result<()> {
        let mut commands = Commands::default();
        commands.add_ping();
        self.exchange(connection, &commands).await?;
        Ok(())
    }

    /// Sends commands and returns their replies, within the deadline of a call.
    async fn exchange(&self, connection: &mut Connection, commands: &Commands) -> io::Result<Vec<Reply>> {
        let mut replies = Vec::with_capacity(commands.count());
        if commands.count() == 0 {
            return Ok(replies);
        }
        let Connection { reader, writer } = connection;
        let write = async {
            writer.write_all(commands.bytes()).await?;
            writer.flush().await
        };
        let read = async {
            for _ in 0..commands.count() {
                replies.push(Reply::read(reader).await?);
            }
            if !reader.buffer().is_empty() {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "the server has sent more replies than commands",
                ));
            }
            Ok(())
        };
        // Both at the same time: a server reads no further commands until its replies are read.
        let exchange = async { tokio::try_join!(write, read) };
        match within(self.server.settings.timeout, exchange).await {
            Ok(Ok(_)) => Ok(replies),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    fn report_rejections(&self, replies: &[Reply]) {
        for reply in replies {
            if let Reply::Rejected(error) = reply {
                self.report_rejection(error);
            }
        }
    }

    fn report_rejection(&self, error: &str) {
        self.server.health.count_failure(self.worker, Failure::Rejected);
        self.server.health.log_rejection(&self.server.name, Failure::Rejected, &error);
    }

    /// Fails all waiting calls after the connection has failed.
    fn take_down(&self, error: &io::Error) {
        let failure = Failure::of(error);
        self.server.health.count_failure(self.worker, failure);
        self.server.health.mark_down(&self.server.name, failure, &error.to_string());
        let queue = {
            let mut queue = self.queue.lock();
            let is_broken = failure == Failure::Io;
            self.state.send_replace(if is_broken { State::Reconnecting } else { State::Down });
            mem::take(&mut *queue)
        };
        for request in queue.requests {
            request.fail(StoreError::Unavailable);
        }
        // The callers of the deletions get an error when these are dropped.
    }
}

impl Queue {
    /// Removes the calls of the next round.
    fn take(&mut self) -> Self {
        let mut hits = 0;
        let mut count = 0;
        for request in &self.requests {
            if hits >= MAX_NEW_HITS {
                break;
            }
            hits += request.hits();
            count += 1;
        }
        let later = self.requests.split_off(count);
        let requests = mem::replace(&mut self.requests, later);
        Self { requests, deletions: mem::take(&mut self.deletions) }
    }

    fn is_empty(&self) -> bool {
        self.requests.is_empty() && self.deletions.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use sluicegate_algorithm::fixed_window::FixedWindow;
    use sluicegate_store::Counter;

    use super::*;

    /// A caller that sends many descriptors does not make one round last longer.
    #[test]
    fn a_round_has_a_bounded_number_of_hits() {
        let hits = vec![Hit::take(Counter::new(b"k", FixedWindow::DENY_ALL), 1); 100];
        let mut queue = Queue::default();
        for _ in 0..25 {
            queue.requests.push(Request::new(hits.clone(), Charge::Each, Micros::ZERO, oneshot::channel().0));
        }
        for expected in [11, 11, 3] {
            assert!(!queue.is_empty());
            assert_eq!(queue.take().requests.len(), expected);
        }
        assert!(queue.is_empty());
        queue.deletions.push(Deletion { key: "k".into(), answer: oneshot::channel().0 });
        assert!(!queue.is_empty());
    }
}
