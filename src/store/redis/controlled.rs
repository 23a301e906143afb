//! [`ControlledRedis`]: a real Redis server whose override calls wait until a model lets them happen.
//!
//! Each client connects to a proxy on a Unix socket. The proxy passes on everything that belongs to the connection, and
//! stops at calls with the keys of overrides: the model executes, answers or loses each of them.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a failed assumption must fail the test")]

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

use tempfile::TempDir;
use tokio::{runtime::Runtime, sync::Notify, task::JoinHandle, time::timeout};

use super::{Metrics, Redis, Settings, Setup, Time};
use crate::metrics::WorkerId;

/// Time after which the server or a client counts as hung.
const DEADLINE: Duration = Duration::from_secs(20);
/// Number of words before the arguments of a script: `EVAL`, the script, the number of keys, and four keys.
const KEYS_END: usize = 7;
/// The reply of a call that is lost.
const LOST: &[u8] = b"-ERR lost\r\n";

/// A Redis server that executes override calls on command.
pub(crate) struct ControlledRedis {
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
pub(crate) struct WaitingCall {
    /// Number of the client.
    pub(crate) client: usize,
    command: Vec<u8>,
    answer: Sender<Vec<u8>>,
}

impl WaitingCall {
    /// Returns the command with other words at a position, counted after the script and the keys.
    pub(crate) fn with_words(&self, position: usize, new: Vec<Vec<u8>>) -> Vec<u8> {
        let mut words = leaves(&self.command);
        words.splice(KEYS_END + position..KEYS_END + position + new.len(), new);
        encode(&words.iter().map(Vec::as_slice).collect::<Vec<_>>())
    }

    /// Returns the command as it is sent.
    pub(crate) fn command(&self) -> &[u8] {
        &self.command
    }

    /// Sends an answer to the client.
    pub(crate) fn answer(self, reply: Vec<u8>) {
        // The connection may have ended.
        let _ = self.answer.send(reply);
    }

    /// Lets the call of the client fail.
    pub(crate) fn lose(self) {
        self.answer(LOST.to_vec());
    }
}

/// Returns the words of a command, of a script those after its keys.
pub(crate) fn words(command: &[u8]) -> Vec<Vec<u8>> {
    let words = leaves(command);
    if words[0] == b"EVAL" { words[KEYS_END..].to_vec() } else { words }
}

impl ControlledRedis {
    /// Starts the server.
    pub(crate) fn start() -> Self {
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

    /// Connects a client, whose tasks run in the runtime.
    pub(crate) fn client(&self, client: usize, runtime: &Runtime) -> Redis {
        let socket = self.folder.path().join(client.to_string());
        let listener = UnixListener::bind(&socket).unwrap();
        let (queue, server) = (Arc::clone(&self.queue), self.folder.path().join("redis"));
        spawn(move || {
            for stream in listener.incoming() {
                let (stream, queue, server) = (stream.unwrap(), Arc::clone(&queue), Connection::open(&server));
                spawn(move || pass_on(client, stream, server, &queue));
            }
        });
        // The model decides how long calls take.
        let never = Duration::from_secs(86_400);
        let settings = Settings { timeout: never, connect_timeout: DEADLINE, ..Settings::default() };
        let url = format!("redis+unix://{}", socket.display());
        let _in_runtime = runtime.enter();
        let redis = Setup::new(&url, &settings, Time::Server, Metrics::new(1)).unwrap().connect(WorkerId(0));
        assert!(runtime.block_on(redis.wait_until_up(DEADLINE)), "cannot connect to {url}");
        redis
    }

    /// Returns the calls that wait.
    pub(crate) fn calls(&self) -> MutexGuard<'_, Vec<WaitingCall>> {
        self.queue.calls.lock().unwrap()
    }

    /// Starts a task in the runtime. Its end wakes [`wait_until`](Self::wait_until).
    pub(crate) fn spawn<T: Send + 'static>(
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
    pub(crate) fn wait_until(&self, runtime: &Runtime, mut condition: impl FnMut() -> bool) {
        let wait = async {
            while !condition() {
                self.queue.changed.notified().await;
            }
        };
        runtime.block_on(async { timeout(DEADLINE, wait).await.expect("a client neither calls nor ends") });
    }

    /// Executes a command, and returns its reply.
    pub(crate) fn execute(&self, command: &[u8]) -> Vec<u8> {
        self.direct.lock().unwrap().call(command).unwrap()
    }

    /// Executes a command of words, and returns the leaves of its reply.
    pub(crate) fn run(&self, words: &[&[u8]]) -> Vec<Vec<u8>> {
        leaves(&self.execute(&encode(words)))
    }

    /// Returns the contents of the keys of overrides: texts, log and head. A key that does not exist is empty.
    pub(crate) fn contents(&self) -> Vec<Vec<u8>> {
        KEYS.map(|key| self.run(&[b"DUMP", key]).pop().unwrap_or_default()).to_vec()
    }

    /// Replaces the contents.
    pub(crate) fn set_contents(&self, contents: &[Vec<u8>]) {
        self.run(&[b"FLUSHALL"]);
        for (key, dump) in KEYS.iter().zip(contents).filter(|(_, dump)| !dump.is_empty()) {
            assert_eq!(self.run(&[b"RESTORE", key, b"0", dump]), [b"OK"]);
        }
    }

    /// Returns epoch, version and id of the last change. They are left out if there is none.
    pub(crate) fn last_change(&self) -> Vec<Vec<u8>> {
        self.run(&[b"HMGET", KEYS[2], b"epoch", b"version", b"id"])
    }

    /// Returns the overrides: each target and its version and text.
    pub(crate) fn texts(&self) -> Vec<(String, String)> {
        let texts = self.run(&[b"HGETALL", KEYS[0]]);
        let text = |bytes: &Vec<u8>| String::from_utf8_lossy(bytes).into_owned();
        let mut texts: Vec<_> = texts.chunks(2).map(|pair| (text(&pair[0]), text(&pair[1]))).collect();
        texts.sort();
        texts
    }
}

impl Drop for ControlledRedis {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

const KEYS: [&[u8]; 3] =
    [b"sluicegate:{directives}texts", b"sluicegate:{directives}log", b"sluicegate:{directives}head"];

/// Passes the calls of a client on to the server. Calls with keys of overrides wait for the model.
fn pass_on(client: usize, stream: UnixStream, mut server: Connection, queue: &Queue) {
    let (mut reader, mut writer) = (BufReader::new(stream.try_clone().unwrap()), stream);
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
        if writer.write_all(&reply).is_err() {
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

/// Reads one value of the Redis protocol, without decoding it.
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

/// Returns the strings and numbers in a value of the Redis protocol. A missing value is left out.
fn leaves(mut value: &[u8]) -> Vec<Vec<u8>> {
    let mut leaves = Vec::new();
    while let Some(end) = value.iter().position(|byte| *byte == b'\n') {
        let (kind, line) = (value[0], &value[1..end - 1]);
        value = &value[end + 1..];
        match kind {
            b'$' | b'=' if line != b"-1" => {
                let length: usize = String::from_utf8_lossy(line).parse().unwrap();
                leaves.push(value[..length].to_vec());
                value = &value[length + 2..];
            }
            b'+' | b':' | b'-' => leaves.push(line.to_vec()),
            _ => {}
        }
    }
    leaves
}

fn encode(words: &[&[u8]]) -> Vec<u8> {
    let mut command = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        command.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        command.extend_from_slice(word);
        command.extend_from_slice(b"\r\n");
    }
    command
}
