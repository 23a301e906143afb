//! [`ControlledRedis`]: a real Redis server that executes calls about overrides only when a model decides so.
//!
//! Each client connects to a proxy on a Unix socket. The proxy forwards all other calls, such as those that check the
//! connection.
#![allow(clippy::expect_used, clippy::missing_panics_doc, clippy::unwrap_used, reason = "only tests use this module")]

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex, MutexGuard,
        mpsc::{Sender, channel},
    },
    thread::{sleep, spawn},
    time::{Duration, Instant},
};

use redis::{Cmd, FromRedisValue, cmd, from_redis_value, parse_redis_value};
use sluicegate_metrics::WorkerId;
use tempfile::TempDir;
use tokio::{runtime::Runtime, sync::Notify, task::JoinHandle, time::timeout};

use super::{Metrics, Redis, Settings, Setup, TimeSource};

/// Time after which the server or a client counts as hung.
const DEADLINE: Duration = Duration::from_secs(20);
/// Index behind the keys in the words of a call: `EVAL`, the script, the number of keys, and four keys.
const KEYS_END: usize = 7;
/// The reply to a call that fails.
const FAILURE: &[u8] = b"-ERR dropped\r\n";
/// The keys of overrides: texts, log and head.
const KEYS: [&str; 3] = ["sluicegate:{directives}texts", "sluicegate:{directives}log", "sluicegate:{directives}head"];

/// A Redis server and its proxies.
pub struct ControlledRedis {
    server: Child,
    folder: TempDir,
    direct: Mutex<Connection>,
    queue: Arc<Queue>,
}

/// The calls that wait for the model.
#[derive(Default)]
struct Queue {
    calls: Mutex<Vec<WaitingCall>>,
    changed: Notify,
}

/// A call of a client that waits for its answer.
pub struct WaitingCall {
    /// Number of the client.
    pub client: usize,
    command: Vec<u8>,
    answer: Sender<Vec<u8>>,
}

impl WaitingCall {
    /// Returns the command as it is sent.
    pub fn command(&self) -> &[u8] {
        &self.command
    }

    /// Sends an answer to the client.
    pub fn answer(self, reply: Vec<u8>) {
        // The connection may have ended.
        let _ = self.answer.send(reply);
    }

    /// Lets the call of the client fail.
    pub fn fail(self) {
        self.answer(FAILURE.to_vec());
    }
}

/// Returns the arguments of a command: of a script only those after its keys.
pub fn arguments(command: &[u8]) -> Vec<Vec<u8>> {
    let mut arguments: Vec<Vec<u8>> = decode(command);
    if arguments[0] == b"EVAL" {
        arguments.drain(..KEYS_END);
    }
    arguments
}

/// Returns the call of a script with other arguments at a position, which is counted after the keys.
pub fn with_arguments(command: &[u8], position: usize, new: Vec<Vec<u8>>) -> Vec<u8> {
    let mut arguments: Vec<Vec<u8>> = decode(command);
    arguments.splice(KEYS_END + position..KEYS_END + position + new.len(), new);
    Cmd::new().arg(arguments).get_packed_command()
}

impl ControlledRedis {
    /// Starts the server.
    pub fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("redis");
        let server = Command::new("redis-server")
            .args(["--port", "0", "--save", "", "--rdbcompression", "no", "--unixsocket"])
            .arg(&socket)
            .stdout(Stdio::null())
            .spawn()
            .expect("redis-server is installed");
        let direct = Mutex::new(Connection::open(&socket));
        Self { server, folder, direct, queue: Arc::default() }
    }

    /// Connects a client. Its tasks run in the runtime.
    pub fn client(&self, client: usize, runtime: &Runtime) -> Redis {
        let socket = self.folder.path().join(client.to_string());
        let listener = UnixListener::bind(&socket).unwrap();
        let queue = Arc::clone(&self.queue);
        let server = self.folder.path().join("redis");
        spawn(move || {
            for stream in listener.incoming() {
                let stream = stream.unwrap();
                let queue = Arc::clone(&queue);
                let server = Connection::open(&server);
                spawn(move || forward(client, stream, server, &queue));
            }
        });
        // The model decides how long calls take.
        let never = Duration::from_secs(86_400);
        let settings = Settings { timeout: never, connect_timeout: DEADLINE, ..Settings::default() };
        let url = format!("redis+unix://{}", socket.display());
        let _in_runtime = runtime.enter();
        let redis = Setup::new(&url, &settings, TimeSource::Own, Metrics::new(1)).unwrap().connect(WorkerId(0));
        assert!(runtime.block_on(redis.wait_until_up(DEADLINE)), "cannot connect to {url}");
        redis
    }

    /// Returns the calls that wait.
    pub fn calls(&self) -> MutexGuard<'_, Vec<WaitingCall>> {
        self.queue.calls.lock().unwrap()
    }

    /// Starts a task in the runtime. Its end wakes [`wait_until`](Self::wait_until).
    pub fn spawn<T: Send + 'static>(
        &self,
        runtime: &Runtime,
        task: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<T> {
        let queue = Arc::clone(&self.queue);
        runtime.spawn(async move {
            let output = task.await;
            queue.changed.notify_one();
            output
        })
    }

    /// Waits until the condition holds. It is checked when a call arrives or a task ends.
    pub fn wait_until(&self, runtime: &Runtime, mut condition: impl FnMut() -> bool) {
        let wait = async {
            while !condition() {
                self.queue.changed.notified().await;
            }
        };
        runtime.block_on(async { timeout(DEADLINE, wait).await.expect("a client neither calls nor ends") });
    }

    /// Executes a command, and returns its reply.
    pub fn execute(&self, command: &[u8]) -> Vec<u8> {
        self.direct.lock().unwrap().call(command).unwrap()
    }

    fn run<T: FromRedisValue>(&self, command: &Cmd) -> T {
        decode(&self.execute(&command.get_packed_command()))
    }

    /// Returns the contents of the keys of overrides. A key that does not exist is empty.
    pub fn contents(&self) -> [Vec<u8>; 3] {
        KEYS.map(|key| self.run::<Option<Vec<u8>>>(cmd("DUMP").arg(key)).unwrap_or_default())
    }

    /// Deletes all keys, and restores those of overrides from what [`contents`](Self::contents) returned.
    pub fn set_contents(&self, contents: &[Vec<u8>; 3]) {
        self.run::<()>(&cmd("FLUSHALL"));
        for (key, dump) in KEYS.iter().zip(contents) {
            if !dump.is_empty() {
                self.run::<()>(cmd("RESTORE").arg(key).arg(0).arg(dump));
            }
        }
    }

    /// Returns epoch, version and id of the last change, or nothing if there is none.
    pub fn last_change(&self) -> Vec<Vec<u8>> {
        let fields: Vec<Option<Vec<u8>>> = self.run(cmd("HMGET").arg(KEYS[2]).arg(&["epoch", "version", "id"]));
        fields.into_iter().flatten().collect()
    }

    /// Returns the version and the text of an override, or `None` if there is none.
    pub fn text(&self, target: &str) -> Option<String> {
        self.run(cmd("HGET").arg(KEYS[0]).arg(target))
    }
}

impl Drop for ControlledRedis {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// Forwards the calls of a client to the server. Calls with keys of overrides wait for the model.
fn forward(client: usize, mut stream: UnixStream, mut server: Connection, queue: &Queue) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    while let Ok(command) = read_value(&mut reader) {
        let reply = if command.windows(12).any(|part| part == b"{directives}") {
            let (answer, answered) = channel();
            queue.calls.lock().unwrap().push(WaitingCall { client, command, answer });
            queue.changed.notify_one();
            // The model has ended without an answer.
            let Ok(reply) = answered.recv() else { return };
            reply
        } else {
            let Ok(reply) = server.call(&command) else { return };
            reply
        };
        if stream.write_all(&reply).is_err() {
            return;
        }
    }
}

/// A connection to the server that sends one call at a time.
struct Connection {
    reader: BufReader<UnixStream>,
}

impl Connection {
    /// Connects as soon as the server has started.
    fn open(socket: &Path) -> Self {
        let started = Instant::now();
        loop {
            match UnixStream::connect(socket) {
                Ok(stream) => return Self { reader: BufReader::new(stream) },
                Err(error) => assert!(started.elapsed() < DEADLINE, "redis-server does not start: {error}"),
            }
            sleep(Duration::from_millis(5));
        }
    }

    fn call(&mut self, command: &[u8]) -> io::Result<Vec<u8>> {
        self.reader.get_mut().write_all(command)?;
        read_value(&mut self.reader)
    }
}

/// Reads the bytes of one value of the Redis protocol.
fn read_value(reader: &mut BufReader<UnixStream>) -> io::Result<Vec<u8>> {
    let mut value = Vec::new();
    let mut missing = 1;
    while missing > 0 {
        let start = value.len();
        if reader.read_until(b'\n', &mut value)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let line = String::from_utf8_lossy(&value[start + 1..]).trim().parse().unwrap_or(0);
        missing -= 1;
        match value[start] {
            b'$' | b'=' if line >= 0 => {
                let start = value.len();
                value.resize(start + usize::try_from(line).unwrap() + 2, 0);
                reader.read_exact(&mut value[start..])?;
            }
            b'*' | b'~' | b'>' if line > 0 => missing += line,
            b'%' if line > 0 => missing += 2 * line,
            _ => {}
        }
    }
    Ok(value)
}

/// Decodes a value of the Redis protocol.
fn decode<T: FromRedisValue>(value: &[u8]) -> T {
    from_redis_value(parse_redis_value(value).unwrap()).unwrap()
}
