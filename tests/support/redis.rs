//! [`RedisServer`]: a real `redis-server` process for one test.

use std::{
    net::TcpListener,
    process::{Child, Command, Stdio},
};

use super::{server::signal, wait_for};

/// A running Redis; killed when dropped.
pub(crate) struct RedisServer {
    child: Child,
    pub(crate) port: u16,
    folder: tempfile::TempDir,
    args: Vec<String>,
}

impl RedisServer {
    pub(crate) fn start() -> Self {
        Self::with(&[])
    }

    /// Starts a server with additional options.
    pub(crate) fn with(args: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
        // Another process may take the free port before Redis binds it: then try another port.
        for _ in 0..5 {
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            if let Some(child) = spawn(port, &folder, &args) {
                return Self { child, port, folder, args };
            }
        }
        panic!("redis-server exits immediately with the options {args:?}");
    }

    /// Starts a server that accepts only TLS on its port and requires a client certificate.
    pub(crate) fn tls(certificate: &str, key: &str, ca: &str) -> Self {
        let files = ["--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", ca];
        Self::with(&[&files[..], &["--tls"]].concat())
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub(crate) fn socket(&self) -> String {
        self.folder.path().join("redis.sock").display().to_string()
    }

    /// Runs one command with `redis-cli` and returns its output.
    pub(crate) fn cli(&self, args: &[&str]) -> String {
        let output = Command::new("redis-cli").args(["-s", &self.socket()]).args(args).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
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

    /// Ends the server and starts an empty one on the same port with other options.
    pub(crate) fn restart_with(&mut self, args: &[&str]) {
        self.kill();
        self.args = args.iter().map(|arg| (*arg).to_owned()).collect();
        self.restart();
    }

    /// Starts an empty server on the same port.
    pub(crate) fn restart(&mut self) {
        self.child = wait_for("Redis to start on its old port", || spawn(self.port, &self.folder, &self.args));
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts the process and waits until it answers. Returns `None` if it exited immediately, as it does if its port is
/// taken.
fn spawn(port: u16, folder: &tempfile::TempDir, args: &[String]) -> Option<Child> {
    let socket = folder.path().join("redis.sock");
    let _ = std::fs::remove_file(&socket);
    let port = port.to_string();
    let (tls, args): (Vec<_>, Vec<_>) = args.iter().partition(|arg| *arg == "--tls");
    let ports =
        if tls.is_empty() { ["--port", &port, "--tls-port", "0"] } else { ["--port", "0", "--tls-port", &port] };
    let mut child = Command::new("redis-server")
        .args(ports)
        .args(["--bind", "127.0.0.1", "--save", "", "--unixsocket"])
        .arg(&socket)
        .arg("--dir")
        .arg(folder.path())
        .args(args)
        .stdout(Stdio::null())
        .spawn()
        .expect("redis-server is missing: run tests/setup.sh (make test does)");
    wait_for("Redis to answer", || {
        if child.try_wait().unwrap().is_some() {
            return Some(None);
        }
        let ping = Command::new("redis-cli").arg("-s").arg(&socket).arg("ping").output().ok()?;
        let answer = String::from_utf8_lossy(&ping.stdout).into_owned();
        (answer.contains("PONG") || answer.contains("NOAUTH")).then_some(Some(()))
    })
    .map(|()| child)
}
