//! The service itself, as a process of its own on free ports.

use std::{
    ffi::OsStr,
    io::{BufRead, BufReader},
    net::SocketAddr,
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex},
};

use super::plain::Client;
use tonic::transport::Endpoint;

use super::{DEADLINE, until, until_async};

/// A running service; killed when dropped.
pub(crate) struct Server {
    child: Child,
    pub(crate) grpc: SocketAddr,
    pub(crate) http: SocketAddr,
    log: Arc<Mutex<Vec<String>>>,
}

/// How to start one.
pub(crate) struct Builder {
    command: Command,
}

impl Server {
    pub(crate) fn builder() -> Builder {
        Self::builder_at(SocketAddr::from(([127, 0, 0, 1], 0)))
    }

    /// On this address.
    pub(crate) fn builder_at(grpc: SocketAddr) -> Builder {
        let mut command = command();
        command.args(["serve", "--grpc-addr", &grpc.to_string(), "--http-addr", "127.0.0.1:0"]);
        command.env("SLUICEGATE__TELEMETRY__LOG__FORMAT", "json").env("SLUICEGATE__SHUTDOWN__DELAY", "0s");
        Builder { command }
    }

    /// As this command starts it.
    pub(crate) fn of(mut command: Command) -> Builder {
        command.env("SLUICEGATE__TELEMETRY__LOG__FORMAT", "json").env("SLUICEGATE__TELEMETRY__LOG__LEVEL", "info");
        Builder { command }
    }

    /// With rules of this folder and counters in this store.
    pub(crate) fn start(rules: &Path, store: &str) -> Self {
        Self::builder().rules(rules).store(store).start()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// With a deadline so long that no test meets it by chance.
    pub(crate) async fn client(&self) -> Client {
        let endpoint = Endpoint::from_shared(format!("http://{}", self.grpc)).unwrap();
        Client::with(endpoint.timeout(DEADLINE)).await.unwrap()
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.http)
    }

    /// The body of a page; the code is not looked at.
    pub(crate) fn get(&self, path: &str) -> String {
        get(&self.url(path)).1
    }

    /// One number of `/metrics`; 0 while it is not there.
    pub(crate) fn metric(&self, series: &str) -> f64 {
        let metrics = self.get("/metrics");
        let line = metrics.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        line.map_or(0.0, |value| value.parse().unwrap())
    }

    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().join("\n")
    }

    /// Memory in use, in bytes.
    pub(crate) fn resident(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
    }

    /// Open file descriptors.
    pub(crate) fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap().count()
    }

    pub(crate) fn signal(&self, name: &str) {
        signal(self.pid(), name);
    }

    /// Without holding up the thread: the caller's own connections have a part in an orderly end.
    pub(crate) async fn wait(mut self) -> ExitStatus {
        until_async("the service to end", async || self.child.try_wait().unwrap()).await
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Builder {
    pub(crate) fn rules(self, folder: &Path) -> Self {
        self.args(["--rules".as_ref(), folder.as_os_str()])
    }

    pub(crate) fn store(self, store: &str) -> Self {
        self.args(["--store", store])
    }

    pub(crate) fn args<S: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.command.args(args);
        self
    }

    /// A setting by its dotted name.
    pub(crate) fn set(mut self, key: &str, value: &str) -> Self {
        self.command.env(variable(key), value);
        self
    }

    /// A variable of the environment that is no setting.
    pub(crate) fn variable(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self
    }

    /// With this file in the place of `/etc/hosts`, for this process alone.
    pub(crate) fn hosts(self, file: &Path) -> Self {
        let script = format!("mount --bind '{}' /etc/hosts", file.display());
        self.through(Command::new("unshare").arg("--mount"), &script)
    }

    /// No file of this process grows beyond so many blocks of 512 bytes: as on a full disk, what is too much is not
    /// written.
    pub(crate) fn largest_file(self, blocks: u32) -> Self {
        self.through(&mut Command::new("env"), &format!("trap '' XFSZ && ulimit -f {blocks}"))
    }

    /// With so few file descriptors.
    pub(crate) fn open_files(self, number: u32) -> Self {
        self.through(&mut Command::new("env"), &format!("ulimit -n {number}"))
    }

    /// Started by another command, after a script.
    fn through(mut self, command: &mut Command, script: &str) -> Self {
        let service = self.command;
        self.command = Command::new(command.get_program());
        self.command.args(command.get_args()).args(["sh", "-c", &format!(r#"{script} && exec "$0" "$@""#)]);
        self.command.arg(service.get_program()).args(service.get_args());
        for (name, value) in service.get_envs() {
            match value {
                Some(value) => self.command.env(name, value),
                None => self.command.env_remove(name),
            };
        }
        self
    }

    pub(crate) fn start(mut self) -> Server {
        let mut child = self.command.stderr(Stdio::piped()).spawn().unwrap();
        let log = Arc::new(Mutex::new(Vec::new()));
        let (lines, stderr) = (Arc::clone(&log), child.stderr.take().unwrap());
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                lines.lock().unwrap().push(line);
            }
        });
        let addresses = until("the service to serve", || {
            assert!(child.try_wait().unwrap().is_none(), "it ended: {:?}", log.lock().unwrap());
            log.lock().unwrap().iter().find_map(|line| addresses(line))
        });
        Server { child, grpc: addresses.0, http: addresses.1, log }
    }
}

/// The program, with nothing of this process' environment that is meant for it.
pub(crate) fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sluicegate"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("SLUICEGATE__")) {
        command.env_remove(name);
    }
    command
}

fn variable(key: &str) -> String {
    format!("SLUICEGATE__{}", key.to_uppercase().replace('.', "__"))
}

fn addresses(line: &str) -> Option<(SocketAddr, SocketAddr)> {
    let line: serde_json::Value = serde_json::from_str(line).ok()?;
    let address = |name: &str| line.get(name)?.as_str()?.parse().ok();
    // On a Unix socket it has none.
    let none = SocketAddr::from(([0; 4], 0));
    let message = line.get("message").or_else(|| line.get("@message"))?;
    (message == "serving").then(|| Some((address("grpc").unwrap_or(none), address("http")?)))?
}

pub(crate) fn signal(pid: u32, name: &str) {
    let sent = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status().unwrap();
    assert!(sent.success());
}

/// Code and body of a page.
pub(crate) fn get(url: &str) -> (u16, String) {
    let mut response = agent().get(url).call().unwrap();
    (response.status().as_u16(), response.body_mut().read_to_string().unwrap())
}

/// Code and body of what comes for a post.
pub(crate) fn post(url: &str, body: &[u8]) -> (u16, String) {
    let mut response = agent().post(url).send(body).unwrap();
    (response.status().as_u16(), response.body_mut().read_to_string().unwrap())
}

pub(crate) fn agent() -> ureq::Agent {
    ureq::Agent::config_builder().http_status_as_error(false).timeout_global(Some(DEADLINE)).build().into()
}
