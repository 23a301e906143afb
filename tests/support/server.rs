//! [`Server`]: the service as a separate process on free ports.

use std::{
    ffi::OsStr,
    io::{BufRead, BufReader},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex},
};

use super::raw_client::Client;
use tonic::transport::Endpoint;

use super::{DEADLINE, wait_for, wait_for_async};

/// A running service; killed when dropped.
pub(crate) struct Server {
    child: Child,
    pub(crate) grpc: SocketAddr,
    pub(crate) http: SocketAddr,
    log: Arc<Mutex<Vec<String>>>,
}

/// Builder for a [`Server`].
pub(crate) struct Builder {
    command: Command,
}

impl Server {
    pub(crate) fn builder() -> Builder {
        Self::builder_at(SocketAddr::from(([127, 0, 0, 1], 0)))
    }

    /// Returns a builder for a service with this gRPC address. Its HTTP address has the same IP address and a free port.
    pub(crate) fn builder_at(grpc: SocketAddr) -> Builder {
        let mut command = command();
        let http = SocketAddr::new(grpc.ip(), 0);
        command.args(["serve", "--grpc-addr", &grpc.to_string(), "--http-addr", &http.to_string()]);
        command.env("SLUICEGATE__TELEMETRY__LOG__FORMAT", "json").env("SLUICEGATE__SHUTDOWN__DELAY", "0s");
        // A busy machine can need longer than the default of 20 ms for a call.
        command.env("SLUICEGATE__REDIS__TIMEOUT", "60s");
        Builder { command }
    }

    /// Returns a builder for a service that is started by this command.
    pub(crate) fn from_command(mut command: Command) -> Builder {
        command.env("SLUICEGATE__TELEMETRY__LOG__FORMAT", "json").env("SLUICEGATE__TELEMETRY__LOG__LEVEL", "info");
        Builder { command }
    }

    /// Starts the service with the rules in this folder and counters in this store.
    pub(crate) fn start(rules: &Path, store: &str) -> Self {
        Self::builder().rules(rules).store(store).start()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Connects to the service. The deadline of a call is too long to be exceeded by chance.
    pub(crate) async fn client(&self) -> Client {
        let endpoint = Endpoint::from_shared(format!("http://{}", self.grpc)).unwrap();
        Client::connect(endpoint.timeout(DEADLINE)).await.unwrap()
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.http)
    }

    /// Returns the body of a page without checking the status code.
    pub(crate) fn get(&self, path: &str) -> String {
        get(&self.url(path)).1
    }

    /// Returns the value of a series in `/metrics`, or 0 if the series does not exist.
    pub(crate) fn metric(&self, series: &str) -> f64 {
        let metrics = self.get("/metrics");
        let line = metrics.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        line.map_or(0.0, |value| value.parse().unwrap())
    }

    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().join("\n")
    }

    /// Returns the resident memory in bytes.
    pub(crate) fn resident_memory(&self) -> u64 {
        self.memory("VmRSS:")
    }

    /// Returns the largest resident memory since the start in bytes.
    pub(crate) fn peak_memory(&self) -> u64 {
        self.memory("VmHWM:")
    }

    fn memory(&self, name: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
    }

    /// Returns the number of open file descriptors.
    pub(crate) fn open_file_descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap().count()
    }

    pub(crate) fn signal(&self, name: &str) {
        signal(self.pid(), name);
    }

    /// Waits until the process exits. The thread is not blocked, because the caller's own connections take part in an
    /// orderly shutdown.
    pub(crate) async fn wait(mut self) -> ExitStatus {
        wait_for_async("the service to exit", async || self.child.try_wait().unwrap()).await
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

    /// Sets a setting by its dotted name.
    pub(crate) fn set(mut self, key: &str, value: &str) -> Self {
        self.command.env(env_name(key), value);
        self
    }

    /// Sets an environment variable that is not a setting.
    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self
    }

    /// Replaces `/etc/hosts` with this file, for this process alone.
    pub(crate) fn hosts(self, file: &Path) -> Self {
        let script = format!("mount --bind '{}' /etc/hosts", file.display());
        self.wrapped_by(Command::new("unshare").arg("--mount"), &script)
    }

    /// Makes a file a mount of its own, for this process alone, as `docker -v file:file` does. Its folder is read-only if
    /// `is_folder_read_only` is set.
    pub(crate) fn mounted_file(self, file: &Path, is_folder_read_only: bool) -> Self {
        let (folder, file) = (file.parent().unwrap().display(), file.display());
        let mut script = format!("mount --bind '{folder}' '{folder}' && mount --bind '{file}' '{file}'");
        if is_folder_read_only {
            script += &format!(" && mount -o remount,bind,ro '{folder}'");
        }
        self.wrapped_by(Command::new("unshare").arg("--mount"), &script)
    }

    /// Starts the service in this network namespace.
    pub(crate) fn in_namespace(self, name: &str) -> Self {
        self.wrapped_by(Command::new("ip").args(["netns", "exec", name]), "true")
    }

    /// Limits each file of this process to this number of blocks of 512 bytes. As on a full disk, data beyond the limit
    /// is not written.
    pub(crate) fn max_file_blocks(self, blocks: u32) -> Self {
        self.wrapped_by(&mut Command::new("env"), &format!("trap '' XFSZ && ulimit -S -f {blocks}"))
    }

    /// Sets the permissions that files of this process do not get.
    pub(crate) fn umask(self, mask: &str) -> Self {
        self.wrapped_by(&mut Command::new("env"), &format!("umask {mask}"))
    }

    /// Limits the number of open file descriptors.
    pub(crate) fn max_open_files(self, number: u32) -> Self {
        self.wrapped_by(&mut Command::new("env"), &format!("ulimit -n {number}"))
    }

    /// Starts the service through another command that runs a script first.
    fn wrapped_by(mut self, command: &mut Command, script: &str) -> Self {
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

    pub(crate) fn start(self) -> Server {
        self.start_by(|command| command.spawn().unwrap())
    }

    /// Starts the service with a function that spawns its process.
    pub(crate) fn start_by(mut self, spawn: impl FnOnce(&mut Command) -> Child) -> Server {
        let mut child = spawn(self.command.stderr(Stdio::piped()));
        let log = Arc::new(Mutex::new(Vec::new()));
        let (lines, stderr) = (Arc::clone(&log), child.stderr.take().unwrap());
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                lines.lock().unwrap().push(line);
            }
        });
        let addresses = wait_for("the service to start serving", || {
            assert!(child.try_wait().unwrap().is_none(), "the service has exited: {:?}", log.lock().unwrap());
            log.lock().unwrap().iter().find_map(|line| addresses(line))
        });
        Server { child, grpc: addresses.0, http: addresses.1, log }
    }
}

/// Returns the path of the service: the build of the tests' profile, or the file in `SLUICEGATE_BINARY`.
pub(crate) fn binary() -> PathBuf {
    std::env::var_os("SLUICEGATE_BINARY").unwrap_or_else(|| env!("CARGO_BIN_EXE_sluicegate").into()).into()
}

/// Returns a command that runs the service without the settings in this process's environment.
pub(crate) fn command() -> Command {
    let mut command = Command::new(binary());
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("SLUICEGATE__")) {
        command.env_remove(name);
    }
    command
}

/// Returns the environment variable of a setting.
pub(crate) fn env_name(key: &str) -> String {
    format!("SLUICEGATE__{}", key.to_uppercase().replace('.', "__"))
}

fn addresses(line: &str) -> Option<(SocketAddr, SocketAddr)> {
    if let Some((_, fields)) = line.split_once(": serving grpc=") {
        let (grpc, fields) = fields.split_once(" http=")?;
        return Some((grpc.parse().ok()?, fields.split(' ').next()?.parse().ok()?));
    }
    let line: serde_json::Value = serde_json::from_str(line).ok()?;
    let address = |name: &str| line.get(name)?.as_str()?.parse().ok();
    // A service on a Unix socket has no gRPC address.
    let none = SocketAddr::from(([0; 4], 0));
    let message = line.get("message").or_else(|| line.get("@message"))?;
    (message == "serving").then(|| Some((address("grpc").unwrap_or(none), address("http")?)))?
}

pub(crate) fn signal(pid: u32, name: &str) {
    let sent = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status().unwrap();
    assert!(sent.success());
    if name == "STOP" {
        // The process may still run for a moment after the signal was sent.
        wait_for("the process to stop", || {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
            status.contains("State:\tT").then_some(())
        });
    }
}

/// Returns the status code and the body of a page.
pub(crate) fn get(url: &str) -> (u16, String) {
    let mut response = agent().get(url).call().unwrap();
    (response.status().as_u16(), response.body_mut().read_to_string().unwrap())
}

/// Sends a POST request and returns the status code and the body of the response.
pub(crate) fn post(url: &str, body: &[u8]) -> (u16, String) {
    let mut response = agent().post(url).send(body).unwrap();
    (response.status().as_u16(), response.body_mut().read_to_string().unwrap())
}

pub(crate) fn agent() -> ureq::Agent {
    ureq::Agent::config_builder().http_status_as_error(false).timeout_global(Some(DEADLINE)).build().into()
}

/// Returns the path of the library that changes the wall clock of a process.
pub(crate) fn fake_clock() -> String {
    let folders = std::fs::read_dir("/usr/lib").unwrap().flatten();
    let library = folders.map(|folder| folder.path().join("faketime/libfaketimeMT.so.1")).find(|path| path.exists());
    library.expect("libfaketime is missing: run tests/setup.sh (make test does)").display().to_string()
}
