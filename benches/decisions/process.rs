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
    _folder: Option<tempfile::TempDir>,
}

const NOWHERE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

impl Process {
    /// This program with some words.
    pub(crate) fn bench(words: &[&str]) -> Self {
        let program = std::env::current_exe().unwrap();
        let child = Command::new(program).args(words).stdout(Stdio::piped()).spawn().unwrap();
        Self { child, address: NOWHERE, _folder: None }
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
        Self::service_with(store, "unit: day, requests_per_unit: 4000000000")
    }

    /// The service with this limit.
    pub(crate) fn service_with(store: &str, limit: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let rules = format!("domain: bench\ndescriptors: [{{key: user, rate_limit: {{{limit}}}}}]");
        fs::File::create(folder.path().join("bench.yaml")).unwrap().write_all(rules.as_bytes()).unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_sluicegate"))
            .args(["--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0", "--store", store, "--rules"])
            .arg(folder.path())
            .env("SLUICEGATE__TELEMETRY__LOG__FORMAT", "json")
            // With everything on two cores a call may wait for longer than in production; a time-out is no decision.
            .env("SLUICEGATE__REDIS__TIMEOUT", "1s")
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let address = |line: String| {
            let line: serde_json::Value = serde_json::from_str(&line).ok()?;
            line.get("grpc")?.as_str()?.parse().ok()
        };
        let address = lines.into_iter().find_map(address).unwrap();
        Self { child, address, _folder: Some(folder) }
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
        Self { child, address, _folder: Some(folder) }
    }

    /// Three independent servers.
    pub(crate) fn redis_ring() -> Vec<Self> {
        (0..3).map(|_| Self::redis()).collect()
    }

    /// Three masters of a cluster.
    pub(crate) fn redis_cluster() -> Vec<Self> {
        let node = |_| {
            let bus = free().port().to_string();
            Self::redis_with(&["--cluster-enabled", "yes", "--cluster-port", &bus])
        };
        let nodes: Vec<_> = (0..3).map(node).collect();
        let mut create = Command::new("redis-cli");
        create.args(["--cluster", "create"]).args(nodes.iter().map(|node| node.address.to_string()));
        let created = create.arg("--cluster-yes").stdout(Stdio::null()).status().unwrap();
        assert!(created.success());
        nodes
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    /// CPU time of the process until now, user and system.
    pub(crate) fn cpu_micros(&self) -> f64 {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
        let ticks: f64 = fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap();
        // Linux counts a hundred ticks a second, everywhere that this runs.
        ticks * 10_000.0
    }
}

/// An address that nobody listens on.
fn free() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
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
