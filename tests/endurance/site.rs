//! [`Site`]: a Redis Cluster with three instances of the service, and two instances that exchange hits as peers.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::Command,
    thread::sleep,
    time::{Duration, Instant},
};

use tonic::transport::{Certificate, ClientTlsConfig, Endpoint};

use crate::{
    features::{rule_file, rule_resource},
    support::{
        RedisCluster, Server,
        certificates::{Authority, Files},
        control_plane::ControlPlane,
        fake_clock,
        network::Network,
        operator::{OPERATE, READ},
        server::{Builder, command},
    },
};

/// Names of the instances. `redis-1` and `peer-1` are never restarted, so their memory is comparable over the whole run.
pub(crate) const INSTANCES: [&str; 5] = ["redis-1", "redis-2", "redis-3", "peer-1", "peer-2"];
/// Instances with counters in Redis.
pub(crate) const ON_REDIS: [usize; 3] = [0, 1, 2];
pub(crate) const PEERS: [usize; 2] = [3, 4];
/// The instance with TLS and with a recording.
pub(crate) const WITH_TLS: usize = 0;
/// The instance with a wall clock that is stepped.
pub(crate) const WITH_FAKE_CLOCK: usize = 1;
/// The instance with rules from the control plane.
pub(crate) const WITH_XDS: usize = 2;

const GRPC: u16 = 8_081;
const HTTP: u16 = 8_080;
const ADMIN: u16 = 8_082;
const CLUSTER: u16 = 8_083;

/// Maximum time until a cluster is healthy after a fault of one of its nodes.
const MAX_REPAIR: Duration = Duration::from_secs(120);

/// All processes, their files and their network.
pub(crate) struct Site {
    instances: Vec<Option<Server>>,
    pub(crate) plane: Option<ControlPlane>,
    plane_address: String,
    pub(crate) cluster: RedisCluster,
    pub(crate) network: Network,
    pub(crate) authority: Authority,
    pub(crate) files: Files,
    pub(crate) disk: Disk,
}

/// How the load reaches an instance.
#[derive(Clone)]
pub(crate) struct Target {
    pub(crate) index: usize,
    pub(crate) endpoint: Endpoint,
    pub(crate) grpc: SocketAddr,
    pub(crate) http: SocketAddr,
    pub(crate) admin: SocketAddr,
}

impl Site {
    pub(crate) fn start() -> Self {
        let network = Network::new(INSTANCES.len());
        let (authority, files) = (Authority::new("soak"), Files::new());
        let (certificate, key) = authority.sign();
        files.write("cert.pem", &certificate);
        files.write("key.pem", &key);
        files.write("ca.pem", &authority.pem);
        files.write("tokens", &format!("operate {OPERATE} operator\nread {READ} reader\n"));
        files.write("clock", "+0");
        fs::create_dir(files.path("rules")).unwrap();
        files.write("rules/soak.yaml", &rule_file());
        let cluster = RedisCluster::at(network.servers);
        let mut site = Self {
            instances: Vec::new(),
            plane: None,
            plane_address: format!("{}:0", network.servers),
            cluster,
            network,
            authority,
            files,
            disk: Disk::mount(),
        };
        site.start_plane();
        site.instances = (0..INSTANCES.len()).map(|index| Some(site.builder(index).start())).collect();
        site
    }

    /// Starts the control plane, at its previous address if it had one.
    pub(crate) fn start_plane(&mut self) {
        let mut plane = ControlPlane::start_at(&self.plane_address, "default", None);
        plane.set("one", &[rule_resource()]);
        self.plane_address = plane.address().to_owned();
        self.plane = Some(plane);
    }

    pub(crate) fn server(&self, index: usize) -> &Server {
        self.instances[index].as_ref().unwrap()
    }

    pub(crate) fn kill(&mut self, index: usize) {
        self.instances[index] = None;
    }

    /// Starts a killed instance at its previous addresses.
    pub(crate) fn restart(&mut self, index: usize) {
        self.instances[index] = Some(self.builder(index).start());
    }

    pub(crate) fn pids(&self) -> Vec<Option<u32>> {
        self.instances.iter().map(|server| server.as_ref().map(Server::pid)).collect()
    }

    pub(crate) fn target(&self, index: usize) -> Target {
        let at = |port| SocketAddr::from((self.network.addresses[index], port));
        let scheme = if index == WITH_TLS { "https" } else { "http" };
        let mut endpoint = Endpoint::from_shared(format!("{scheme}://{}", at(GRPC))).unwrap();
        if index == WITH_TLS {
            let authority = Certificate::from_pem(&self.authority.pem);
            let tls = ClientTlsConfig::new().ca_certificate(authority).domain_name("localhost");
            endpoint = endpoint.tls_config(tls).unwrap();
        }
        Target { index, endpoint, grpc: at(GRPC), http: at(HTTP), admin: at(ADMIN) }
    }

    /// Returns the addresses of the Redis nodes.
    pub(crate) fn redis_nodes(&self) -> Vec<SocketAddr> {
        self.cluster.nodes.iter().map(|node| SocketAddr::from((self.network.servers, node.port))).collect()
    }

    fn builder(&self, index: usize) -> Builder {
        let path = |name: &str| self.files.path(name).display().to_string();
        let at = |port| SocketAddr::from((self.network.addresses[index], port)).to_string();
        let mut command = command();
        command.args(["serve", "--grpc-addr", &at(GRPC), "--http-addr", &at(HTTP)]);
        let mut builder =
            Server::from_command(command).set("admin.addr", &at(ADMIN)).set("admin.token_file", &path("tokens"));
        if index == WITH_XDS {
            builder = builder
                .set("rules.xds.server", &format!("http://{}", self.plane_address))
                .set("rules.xds.retry_max", "1s");
        } else {
            builder = builder.rules(&self.files.path("rules"));
        }
        if index == WITH_TLS {
            builder = builder
                .set("grpc.tls.cert_file", &path("cert.pem"))
                .set("grpc.tls.key_file", &path("key.pem"))
                .set("record.dir", &self.disk.path("record"))
                .set("record.share", "1")
                .set("record.max_file_bytes", "262144")
                .set("record.max_total_bytes", "1048576");
        }
        if index == WITH_FAKE_CLOCK {
            builder = builder
                .env("LD_PRELOAD", &fake_clock())
                .env("FAKETIME_TIMESTAMP_FILE", &path("clock"))
                .env("FAKETIME_CACHE_DURATION", "1")
                .env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
        }
        if PEERS.contains(&index) {
            let peers: Vec<_> =
                PEERS.iter().map(|peer| format!("{}:{CLUSTER}", self.network.addresses[*peer])).collect();
            builder = builder
                .set("cluster.addr", &at(CLUSTER))
                .set("cluster.peers", &peers.join(","))
                .set("cluster.tls.cert_file", &path("cert.pem"))
                .set("cluster.tls.key_file", &path("key.pem"))
                .set("cluster.tls.ca_file", &path("ca.pem"))
                .set("cluster.tls.server_name", "localhost")
                .set("overrides.file", &self.disk.path(&format!("journal-{index}")));
        } else {
            // All processes share the machine, so a call takes longer than in production.
            builder = builder.store(&self.cluster.url()).set("redis.timeout", "250ms");
        }
        builder.in_namespace(&self.network.namespace(index))
    }

    /// Returns the address of the Redis servers.
    pub(crate) fn redis_address(&self) -> Ipv4Addr {
        self.network.servers
    }

    /// Waits until all Redis nodes are connected again. A busy machine needs longer than the usual deadline.
    pub(crate) fn wait_for_cluster(&self) {
        let begin = Instant::now();
        while !self.cluster.is_healthy() {
            assert!(begin.elapsed() < MAX_REPAIR, "the cluster is not healthy after {MAX_REPAIR:?}");
            sleep(Duration::from_millis(100));
        }
    }
}

/// A file system of a few megabytes; removed when dropped.
pub(crate) struct Disk(tempfile::TempDir);

impl Disk {
    fn mount() -> Self {
        let folder = tempfile::tempdir().unwrap();
        // Two journals, with 2,000 lines of 3.5 kB each before they are rewritten, leave room for the recording.
        mount(&["-t", "tmpfs", "-o", "size=32m", "none"], folder.path());
        fs::create_dir(folder.path().join("record")).unwrap();
        Self(folder)
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    /// Path of the file that fills the disk.
    pub(crate) fn filler(&self) -> PathBuf {
        self.0.path().join("filler")
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Instances that are still being killed may have files open, so the file system is detached.
        let _ = Command::new("umount").arg("--lazy").arg(self.0.path()).status();
    }
}

fn mount(options: &[&str], folder: &Path) {
    let status = Command::new("mount").args(options).arg(folder).status().unwrap();
    assert!(status.success(), "mount {options:?}");
}
