//! Servers as processes of their own, and what they use.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    process::{Child, Command, Stdio},
};

/// A running process; killed when dropped.
pub(crate) struct Process {
    child: Child,
    pub(crate) address: SocketAddr,
    http: Option<SocketAddr>,
    _folder: Option<tempfile::TempDir>,
    _candidate: Option<tempfile::TempDir>,
}

/// One that is never reached.
const LIMIT: &str = "unit: day, requests_per_unit: 4000000000";

const NOWHERE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

impl Process {
    /// This program with some words.
    pub(crate) fn bench(words: &[&str]) -> Self {
        let program = std::env::current_exe().unwrap();
        let child = Command::new(program).args(words).stdout(Stdio::piped()).spawn().unwrap();
        Self { child, address: NOWHERE, http: None, _folder: None, _candidate: None }
    }

    /// Waits for the address that it prints.
    pub(crate) fn listening(mut self) -> Self {
        self.address = self.line().parse().unwrap();
        self
    }

    /// The next line that it prints.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        BufReader::new(self.child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    /// The service with one limit that is never reached.
    pub(crate) fn service(store: &str) -> Self {
        Self::service_with(store, LIMIT)
    }

    /// The service with this limit, which asks the store every time.
    pub(crate) fn service_with(store: &str, limit: &str) -> Self {
        // With everything on two cores a call may wait for longer than in production; a time-out is no decision.
        Self::start_service(store, limit, &[("REDIS__TIMEOUT", "1s"), ("DENY_CACHE__MAX_ENTRIES", "0")])
    }

    /// The service in memory, with what this file says of entities.
    pub(crate) fn service_told(overrides: &str) -> Self {
        Self::start_service("memory", LIMIT, &[("OVERRIDES__FILE", overrides)])
    }

    /// The same, and other rules tried out beside it on a share of the counters.
    pub(crate) fn service_trying(store: &str, share: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let rules = "domain: bench\ndescriptors: [{key: user, rate_limit: {unit: minute, requests_per_unit: 5}}]";
        fs::write(folder.path().join("bench.yaml"), rules).unwrap();
        let candidate = folder.path().to_str().unwrap();
        let settings = [
            ("REDIS__TIMEOUT", "1s"),
            ("DENY_CACHE__MAX_ENTRIES", "0"),
            ("RULES__CANDIDATE_DIR", candidate),
            ("RULES__CANDIDATE_SHARE", share),
        ];
        let process = Self::start_service(store, LIMIT, &settings);
        // It is looked at four times a second.
        std::thread::sleep(std::time::Duration::from_secs(2));
        process.keeping(folder)
    }

    /// The same, remembering refusals.
    pub(crate) fn service_remembering(store: &str, limit: &str) -> Self {
        Self::start_service(store, limit, &[("REDIS__TIMEOUT", "1s")])
    }

    /// The service with the deadline that it has by default.
    pub(crate) fn service_as_set(store: &str) -> Self {
        Self::start_service(store, LIMIT, &[])
    }

    fn keeping(mut self, folder: tempfile::TempDir) -> Self {
        self._candidate = Some(folder);
        self
    }

    fn start_service(store: &str, limit: &str, settings: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let rules = format!("domain: bench\ndescriptors: [{{key: user, rate_limit: {{{limit}}}}}]");
        fs::File::create(folder.path().join("bench.yaml")).unwrap().write_all(rules.as_bytes()).unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_sluicegate"))
            .args(["--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0", "--store", store, "--rules"])
            .arg(folder.path())
            .env("SLUICEGATE__TELEMETRY__LOG__FORMAT", "json")
            .envs(settings.iter().map(|(name, value)| (format!("SLUICEGATE__{name}"), value)))
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let addresses = |line: String| {
            let line: serde_json::Value = serde_json::from_str(&line).ok()?;
            let address = |name: &str| line.get(name)?.as_str()?.parse().ok();
            Some((address("grpc")?, address("http")?))
        };
        let (address, http) = lines.into_iter().find_map(addresses).unwrap();
        Self { child, address, http: Some(http), _folder: Some(folder), _candidate: None }
    }

    pub(crate) fn redis() -> Self {
        Self::redis_with(&[])
    }

    fn redis_with(args: &[&str]) -> Self {
        let (address, folder) = (free(), tempfile::tempdir().unwrap());
        let child = Command::new("redis-server")
            .args(["--port", &address.port().to_string(), "--bind", "127.0.0.1", "--save", "", "--dir"])
            .arg(folder.path())
            .args(args)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        while TcpStream::connect(address).is_err() {
            std::thread::yield_now();
        }
        Self { child, address, http: None, _folder: Some(folder), _candidate: None }
    }

    /// Three independent servers.
    pub(crate) fn redis_ring() -> Vec<Self> {
        (0..3).map(|_| Self::redis()).collect()
    }

    /// Three masters of a cluster, and then a replica for each, if there are to be any.
    pub(crate) fn redis_cluster(replicas: bool) -> Vec<Self> {
        let node = |_| {
            let bus = free().port().to_string();
            let own = ["--cluster-enabled", "yes", "--cluster-port", &bus, "--cluster-node-timeout", "1000"];
            let lenient = ["--cluster-require-full-coverage", "no", "--repl-diskless-sync-delay", "0"];
            Self::redis_with(&[&own[..], &lenient].concat())
        };
        let nodes: Vec<_> = (0..if replicas { 6 } else { 3 }).map(node).collect();
        let mut create = Command::new("redis-cli");
        create.args(["--cluster", "create"]).args(nodes.iter().map(|node| node.address.to_string()));
        create.args(["--cluster-yes", "--cluster-replicas", if replicas { "1" } else { "0" }]);
        assert!(create.stdout(Stdio::null()).status().unwrap().success());
        let settled = |node: &Self| {
            let replication = node.cli(&["info", "replication"]);
            node.cli(&["cluster", "info"]).contains("cluster_state:ok") && !replication.contains("link_status:down")
        };
        while !nodes.iter().all(settled) {
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        nodes
    }

    /// The same server again, empty.
    pub(crate) fn restart_redis(&mut self) {
        let _ = self.child.wait();
        let port = self.port();
        let mut command = Command::new("redis-server");
        command.args(["--port", &port, "--bind", "127.0.0.1", "--save", ""]).stdout(Stdio::null());
        self.child = command.spawn().unwrap();
        while TcpStream::connect(self.address).is_err() {
            std::thread::yield_now();
        }
    }

    pub(crate) fn port(&self) -> String {
        self.address.port().to_string()
    }

    /// One command to a Redis server.
    pub(crate) fn cli(&self, args: &[&str]) -> String {
        let output = Command::new("redis-cli").args(["-p", &self.port()]).args(args).output().unwrap();
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    /// The sum of a series of the service's metrics.
    pub(crate) fn metric(&self, series: &str) -> f64 {
        let page = ureq::get(format!("http://{}/metrics", self.http.unwrap())).call().unwrap();
        let page = page.into_body().read_to_string().unwrap();
        let value = |line: &str| line.strip_prefix(series)?.split_whitespace().last()?.parse::<f64>().ok();
        page.lines().filter_map(value).sum()
    }

    /// Bytes of memory in use.
    pub(crate) fn resident(&self) -> f64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<f64>().unwrap() * 1024.0
    }

    /// CPU time of the process until now, user and system.
    pub(crate) fn cpu_micros(&self) -> f64 {
        cpu_micros(self.child.id())
    }
}

/// The same of any process.
pub(crate) fn cpu_micros(pid: u32) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    let ticks: f64 = fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap();
    // Linux counts a hundred ticks a second, everywhere that this runs.
    ticks * 10_000.0
}

/// An address that nobody listens on.
fn free() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// Sends a signal by its name.
pub(crate) fn signal(process: &Process, name: &str) {
    assert!(
        Command::new("kill").args([&format!("-{name}"), &process.child.id().to_string()]).status().unwrap().success()
    );
}

/// The URL of several servers.
pub(crate) fn many(topology: &str, nodes: &[Process]) -> String {
    let hosts: Vec<_> = nodes.iter().map(|node| node.address.to_string()).collect();
    format!("redis+{topology}://{}", hosts.join(","))
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
