//! [`MemcachedServer`]: a real `memcached` process for one test.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    process::{Child, Command, Stdio},
    time::Duration,
};

use super::{
    server::{fake_clock, signal},
    wait_for,
};

/// A running memcached; killed when dropped.
pub(crate) struct MemcachedServer {
    child: Child,
    pub(crate) port: u16,
    args: Vec<String>,
    /// Time of the server's clock at its start, in seconds since the Unix epoch; `None` for the present.
    clock: Option<u64>,
}

impl MemcachedServer {
    pub(crate) fn start() -> Self {
        Self::with(&[], None)
    }

    /// Starts a server whose clock begins at this time, in microseconds since the Unix epoch.
    pub(crate) fn at(time: u64) -> Self {
        Self::with(&[], Some(time / 1_000_000))
    }

    /// Starts a server with additional options.
    pub(crate) fn with(args: &[&str], clock: Option<u64>) -> Self {
        let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
        // Another process may take the free port before memcached binds it: then try another port.
        for _ in 0..5 {
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            if let Some(child) = spawn(port, &args, clock) {
                return Self { child, port, args, clock };
            }
        }
        panic!("memcached exits immediately with the options {args:?}");
    }

    pub(crate) fn url(&self) -> String {
        format!("memcached://127.0.0.1:{}", self.port)
    }

    /// Sends one command and returns the reply as text, without its end.
    pub(crate) fn command(&self, command: &str) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(super::DEADLINE)).unwrap();
        // After the command that does nothing, the reply is complete.
        stream.write_all(format!("{command}\r\nmn\r\n").as_bytes()).unwrap();
        let mut reply = Vec::new();
        let mut buffer = [0; 4_096];
        while !reply.ends_with(b"MN\r\n") {
            let length = stream.read(&mut buffer).unwrap();
            assert!(length > 0, "memcached closes the connection");
            reply.extend_from_slice(&buffer[..length]);
        }
        String::from_utf8_lossy(&reply[..reply.len() - 4]).trim_end().to_owned()
    }

    /// Returns a number of the server's statistics.
    pub(crate) fn statistic(&self, name: &str) -> u64 {
        let statistics = self.command("stats");
        let line = statistics.lines().find_map(|line| line.strip_prefix(&format!("STAT {name} ")));
        line.unwrap_or_else(|| panic!("no {name} in {statistics}")).trim().parse().unwrap()
    }

    pub(crate) fn freeze(&self) {
        signal(self.child.id(), "STOP");
    }

    pub(crate) fn thaw(&self) {
        signal(self.child.id(), "CONT");
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Starts an empty server on the same port.
    pub(crate) fn restart(&mut self) {
        self.child = wait_for("memcached to start on its old port", || spawn(self.port, &self.args, self.clock));
    }
}

impl Drop for MemcachedServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts the process and waits until it answers. Returns `None` if it exited immediately, as it does if its port is
/// taken.
fn spawn(port: u16, args: &[String], clock: Option<u64>) -> Option<Child> {
    let mut command = Command::new("memcached");
    command.args(["-l", "127.0.0.1", "-U", "0", "-u", "root", "-p", &port.to_string()]).args(args);
    if let Some(seconds) = clock {
        command.env("LD_PRELOAD", fake_clock()).env("FAKETIME", format!("@{}", utc(seconds))).env("TZ", "UTC");
        command.env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
    }
    let mut child = command
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("memcached is missing: run tests/setup.sh (make test does)");
    wait_for("memcached to answer", || {
        if child.try_wait().unwrap().is_some() {
            return Some(None);
        }
        let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
        if args.iter().any(|arg| arg == "-Z") {
            return Some(Some(())); // with TLS
        }
        stream.set_read_timeout(Some(Duration::from_secs(1))).ok()?;
        stream.write_all(b"mn\r\n").ok()?;
        let mut reply = [0; 4];
        stream.read_exact(&mut reply).ok()?;
        (reply == *b"MN\r\n").then_some(Some(()))
    })
    .map(|()| child)
}

/// Returns the time as `2026-11-29 12:00:00`.
fn utc(seconds: u64) -> String {
    let time = std::time::UNIX_EPOCH + Duration::from_secs(seconds);
    humantime::format_rfc3339_seconds(time).to_string().replace(['T', 'Z'], " ").trim_end().to_owned()
}
