//! [`Process`]: starts servers as child processes and measures their CPU time and memory.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::PathBuf,
    process::{Child, Command, Stdio},
};

/// A child process, killed on drop.
pub(crate) struct Process {
    child: Child,
    pub(crate) address: SocketAddr,
    http: Option<SocketAddr>,
    _folder: Option<tempfile::TempDir>,
    _candidate: Option<tempfile::TempDir>,
}

/// A limit that is never reached.
const UNREACHED_LIMIT: &str = "unit: day, requests_per_unit: 4000000000";

/// Address of a process that does not listen.
const NO_ADDRESS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

impl Process {
    /// Starts this program with arguments.
    pub(crate) fn bench(arguments: &[&str]) -> Self {
        let program = std::env::current_exe().unwrap();
        let child = Command::new(program).args(arguments).stdout(Stdio::piped()).spawn().unwrap();
        Self { child, address: NO_ADDRESS, http: None, _folder: None, _candidate: None }
    }

    /// Waits until the process prints its address.
    pub(crate) fn listening(mut self) -> Self {
        self.address = self.line().parse().unwrap();
        self
    }

    /// Returns the next line that the process prints.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        BufReader::new(self.child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    /// Starts the service with one limit that is never reached.
    pub(crate) fn service(store: &str) -> Self {
        Self::service_with(store, UNREACHED_LIMIT)
    }

    /// Starts the service with this limit and without deny cache, so that it calls the store for every decision.
    pub(crate) fn service_with(store: &str, limit: &str) -> Self {
        // All processes share two cores, so calls can take longer than in production. A timeout would not be a
        // decision.
        let settings = [("REDIS__TIMEOUT", "1s"), ("MEMCACHED__TIMEOUT", "1s"), ("DENY_CACHE__MAX_ENTRIES", "0")];
        Self::start_service(store, limit, &settings)
    }

    /// Starts the service as [`Self::service_with`], with a rule of several limits.
    pub(crate) fn service_with_limits(store: &str, limits: &[String]) -> Self {
        let rule = format!("rate_limits: [{}]", limits.join(", "));
        Self::start_service_with_rule(store, &rule, &[("REDIS__TIMEOUT", "1s"), ("DENY_CACHE__MAX_ENTRIES", "0")])
    }

    /// Starts the service with the memory store and the overrides in this file.
    pub(crate) fn service_with_overrides(overrides: &str) -> Self {
        Self::start_service("memory", UNREACHED_LIMIT, &[("OVERRIDES__FILE", overrides)])
    }

    /// Starts the service with candidate rules that are evaluated on a share of the counters.
    pub(crate) fn service_with_candidate(store: &str, share: &str) -> Self {
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
        let process = Self::start_service(store, UNREACHED_LIMIT, &settings);
        // The service polls the directory four times a second.
        std::thread::sleep(std::time::Duration::from_secs(2));
        process.with_candidate(folder)
    }

    /// Starts the service with this limit and the deny cache.
    pub(crate) fn service_with_deny_cache(store: &str, limit: &str) -> Self {
        Self::start_service(store, limit, &[("REDIS__TIMEOUT", "1s")])
    }

    /// Starts the service with its default settings.
    pub(crate) fn service_with_defaults(store: &str) -> Self {
        Self::start_service(store, UNREACHED_LIMIT, &[])
    }

    /// Starts a member of a cluster with the memory store.
    pub(crate) fn member(address: &str, peers: &str) -> Self {
        let settings = [("CLUSTER__ADDR", address), ("CLUSTER__PEERS", peers), ("CLUSTER__ALLOW_PLAINTEXT", "true")];
        Self::start_service("memory", UNREACHED_LIMIT, &settings)
    }

    fn with_candidate(mut self, folder: tempfile::TempDir) -> Self {
        self._candidate = Some(folder);
        self
    }

    fn start_service(store: &str, limit: &str, settings: &[(&str, &str)]) -> Self {
        Self::start_service_with_rule(store, &format!("rate_limit: {{{limit}}}"), settings)
    }

    fn start_service_with_rule(store: &str, rule: &str, settings: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let rules = format!("domain: bench\ndescriptors: [{{key: user, {rule}}}]");
        fs::File::create(folder.path().join("bench.yaml")).unwrap().write_all(rules.as_bytes()).unwrap();
        let mut child = Command::new(binary())
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
        let (address, folder) = (free_address(), tempfile::tempdir().unwrap());
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

    /// Starts memcached with enough memory for the counters of all benchmarks.
    pub(crate) fn memcached() -> Self {
        let (address, folder) = (free_address(), tempfile::tempdir().unwrap());
        let port = address.port().to_string();
        let options = ["-l", "127.0.0.1", "-p", &port, "-m", "256", "-u", "nobody"];
        let child = Command::new("memcached").args(options).spawn().unwrap();
        Self::when_listening(child, address, folder)
    }

    /// Starts limitador-server with one limit that is never reached.
    pub(crate) fn limitador(program: &str, redis: &Self) -> Self {
        let (address, http, folder) = (free_address(), free_address(), tempfile::tempdir().unwrap());
        let limits = folder.path().join("limits.yaml");
        let limit = "- {namespace: bench, max_value: 4000000000, seconds: 86400, conditions: [], \
                     variables: ['descriptors[0].user']}";
        fs::write(&limits, limit).unwrap();
        let child = Command::new(program)
            .args(["--rls-ip", "127.0.0.1", "--rls-port", &address.port().to_string()])
            .args(["--http-ip", "127.0.0.1", "--http-port", &http.port().to_string()])
            .arg(limits)
            .args(["redis", &redis.url()])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Self::when_listening(child, address, folder)
    }

    /// Starts envoyproxy/ratelimit with one limit that is never reached.
    pub(crate) fn envoyproxy_ratelimit(program: &str, redis: &Self) -> Self {
        let (address, http, debug) = (free_address(), free_address(), free_address());
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("ratelimit/config");
        fs::create_dir_all(&config).unwrap();
        let rules = "domain: bench\ndescriptors: [{key: user, rate_limit: {unit: day, requests_per_unit: 4000000000}}]";
        fs::write(config.join("bench.yaml"), rules).unwrap();
        let ports = [("GRPC_PORT", address), ("PORT", http), ("DEBUG_PORT", debug)];
        let child = Command::new(program)
            .envs(ports.map(|(name, address)| (name, address.port().to_string())))
            .envs([("GRPC_HOST", "127.0.0.1"), ("HOST", "127.0.0.1"), ("DEBUG_HOST", "127.0.0.1")])
            .envs([("USE_STATSD", "false"), ("LOG_LEVEL", "warn"), ("REDIS_SOCKET_TYPE", "tcp")])
            .env("REDIS_URL", redis.address.to_string())
            .env("RUNTIME_ROOT", folder.path())
            .envs([("RUNTIME_SUBDIRECTORY", "ratelimit"), ("RUNTIME_WATCH_ROOT", "false")])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Self::when_listening(child, address, folder)
    }

    /// Waits until a process accepts connections at `address`.
    fn when_listening(mut child: Child, address: SocketAddr, folder: tempfile::TempDir) -> Self {
        while TcpStream::connect(address).is_err() {
            assert!(child.try_wait().unwrap().is_none(), "the server at {address} has exited");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        Self { child, address, http: None, _folder: Some(folder), _candidate: None }
    }

    /// Starts three independent Redis servers.
    pub(crate) fn redis_ring() -> Vec<Self> {
        (0..3).map(|_| Self::redis()).collect()
    }

    /// Starts a cluster of three masters, followed by one replica of each if `replicas` is set.
    pub(crate) fn redis_cluster(replicas: bool) -> Vec<Self> {
        let node = |_| {
            let bus = free_address().port().to_string();
            let cluster = ["--cluster-enabled", "yes", "--cluster-port", &bus, "--cluster-node-timeout", "1000"];
            let availability = ["--cluster-require-full-coverage", "no", "--repl-diskless-sync-delay", "0"];
            Self::redis_with(&[&cluster[..], &availability].concat())
        };
        let nodes: Vec<_> = (0..if replicas { 6 } else { 3 }).map(node).collect();
        let mut create = Command::new("redis-cli");
        create.args(["--cluster", "create"]).args(nodes.iter().map(|node| node.address.to_string()));
        create.args(["--cluster-yes", "--cluster-replicas", if replicas { "1" } else { "0" }]);
        assert!(create.stdout(Stdio::null()).status().unwrap().success());
        let is_ready = |node: &Self| {
            let replication = node.cli(&["info", "replication"]);
            node.cli(&["cluster", "info"]).contains("cluster_state:ok") && !replication.contains("link_status:down")
        };
        while !nodes.iter().all(is_ready) {
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        nodes
    }

    /// Restarts a Redis server that has exited, without data.
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

    /// Sends one command to a Redis server with `redis-cli`.
    pub(crate) fn cli(&self, args: &[&str]) -> String {
        let output = Command::new("redis-cli").args(["-p", &self.port()]).args(args).output().unwrap();
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    /// Returns the sum of all series of the service's metrics that begin with `series`.
    pub(crate) fn metric(&self, series: &str) -> f64 {
        let page = ureq::get(format!("http://{}/metrics", self.http.unwrap())).call().unwrap();
        let page = page.into_body().read_to_string().unwrap();
        let value = |line: &str| line.strip_prefix(series)?.split_whitespace().last()?.parse::<f64>().ok();
        page.lines().filter_map(value).sum()
    }

    /// Returns the resident memory of the process in bytes.
    pub(crate) fn resident(&self) -> f64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<f64>().unwrap() * 1024.0
    }

    /// Returns the user and system CPU time of the process.
    pub(crate) fn cpu_micros(&self) -> f64 {
        cpu_micros(self.child.id())
    }
}

/// Returns the path of the service: the release build, or the file in `SLUICEGATE_BINARY`.
pub(crate) fn binary() -> PathBuf {
    std::env::var_os("SLUICEGATE_BINARY").unwrap_or_else(|| env!("CARGO_BIN_EXE_sluicegate").into()).into()
}

/// Returns the user and system CPU time of a process.
pub(crate) fn cpu_micros(pid: u32) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    let ticks: f64 = fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap();
    // Linux counts 100 ticks per second on all supported platforms.
    ticks * 10_000.0
}

/// Returns an unused address.
pub(crate) fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// Sends the signal with this name to a process.
pub(crate) fn signal(process: &Process, name: &str) {
    assert!(
        Command::new("kill").args([&format!("-{name}"), &process.child.id().to_string()]).status().unwrap().success()
    );
}

/// Returns the store URL of several Redis servers.
pub(crate) fn multi_host_url(topology: &str, nodes: &[Process]) -> String {
    let hosts: Vec<_> = nodes.iter().map(|node| node.address.to_string()).collect();
    format!("redis+{topology}://{}", hosts.join(","))
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
