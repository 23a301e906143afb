//! Redis servers that belong together: a cluster, a master with its sentinels, a ring.

use std::{
    net::TcpListener,
    process::{Child, Command, Stdio},
};

use super::{RedisServer, until};

/// A Redis Cluster: masters first, then a replica for each, if there are any.
pub(crate) struct RedisCluster {
    pub(crate) nodes: Vec<RedisServer>,
}

impl RedisCluster {
    /// Three masters.
    pub(crate) fn start() -> Self {
        Self::with(3, 0, &[])
    }

    /// With so many replicas for each master and more options for each server.
    pub(crate) fn with(masters: usize, replicas: usize, args: &[&str]) -> Self {
        Self::create(masters, replicas, args, &[])
    }

    /// Three masters that speak nothing but TLS.
    pub(crate) fn tls(certificate: &str, key: &str, ca: &str) -> Self {
        let files = ["--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", ca];
        let own = [&files[..], &["--tls", "--tls-cluster", "yes"]].concat();
        Self::create(3, 0, &own, &["--tls", "--cert", certificate, "--key", key, "--cacert", ca])
    }

    fn create(masters: usize, replicas: usize, args: &[&str], cli: &[&str]) -> Self {
        let nodes: Vec<_> = (0..masters * (1 + replicas)).map(|_| Self::node(args)).collect();
        let addresses = nodes.iter().map(|node| format!("127.0.0.1:{}", node.port));
        let mut create = Command::new("redis-cli");
        create.args(["--cluster", "create"]).args(addresses);
        create.args(["--cluster-replicas", &replicas.to_string(), "--cluster-yes"]).args(cli);
        let output = create.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        let cluster = Self { nodes };
        until("the cluster to agree", || {
            let all = |node: &RedisServer| {
                let known = node.cli(&["cluster", "nodes"]);
                let all_follow = known.lines().filter(|line| line.contains("slave")).count() == masters * replicas;
                // A replica that has never heard from its master does not stand for election.
                let linked = !node.cli(&["info", "replication"]).contains("master_link_status:down");
                node.cli(&["cluster", "info"]).contains("cluster_state:ok") && all_follow && linked
            };
            cluster.nodes.iter().all(all).then_some(())
        });
        cluster
    }

    /// A server that belongs to no cluster yet.
    pub(crate) fn node(args: &[&str]) -> RedisServer {
        let bus = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
        let own = ["--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--cluster-port", &bus];
        RedisServer::with(
            &[&own[..], &["--cluster-require-full-coverage", "no", "--repl-diskless-sync-delay", "0"], args].concat(),
        )
    }

    pub(crate) fn url(&self) -> String {
        let hosts: Vec<_> = self.nodes.iter().take(2).map(|node| format!("127.0.0.1:{}", node.port)).collect();
        format!("redis+cluster://{}", hosts.join(","))
    }

    /// The node's id, and what else it says of itself and the others.
    pub(crate) fn id(&self, node: usize) -> String {
        self.nodes[node].cli(&["cluster", "myid"])
    }

    /// The place of the node that has the key.
    pub(crate) fn owner(&self, key: &str) -> usize {
        let slot: u16 = self.nodes[0].cli(&["cluster", "keyslot", key]).parse().unwrap();
        let is_owner = |node: &RedisServer| {
            let nodes = node.cli(&["cluster", "nodes"]);
            let own = nodes.lines().find(|line| line.contains("myself") && line.contains("master"));
            own.is_some_and(|line| line.split(' ').skip(8).any(|range| within(range, slot)))
        };
        until("a node to have the slot", || self.nodes.iter().position(is_owner))
    }

    /// The replica that follows this master.
    pub(crate) fn replica_of(&self, master: usize) -> usize {
        let id = self.id(master);
        let follows = |node: &RedisServer| {
            let nodes = node.cli(&["cluster", "nodes"]);
            nodes.lines().any(|line| line.contains("myself,slave") && line.contains(&id))
        };
        until("a replica to follow", || self.nodes.iter().position(follows))
    }

    /// Begins to move a slot: from here on new keys are the other's.
    pub(crate) fn begin_to_move(&self, slot: u16, from: usize, to: usize) {
        let slot = slot.to_string();
        assert_eq!(self.nodes[to].cli(&["cluster", "setslot", &slot, "importing", &self.id(from)]), "OK");
        assert_eq!(self.nodes[from].cli(&["cluster", "setslot", &slot, "migrating", &self.id(to)]), "OK");
    }

    /// Moves one key of it.
    pub(crate) fn move_key(&self, key: &str, from: usize, to: usize) {
        let port = self.nodes[to].port.to_string();
        let answer = self.nodes[from].cli(&["migrate", "127.0.0.1", &port, key, "0", "5000"]);
        assert!(matches!(answer.as_str(), "OK" | "NOKEY"), "{answer}");
    }

    /// Moves what is left of it, and tells everybody.
    pub(crate) fn end_move(&self, slot: u16, from: usize, to: usize) {
        let number = slot.to_string();
        loop {
            let keys = self.nodes[from].cli(&["cluster", "getkeysinslot", &number, "100"]);
            if keys.is_empty() {
                break;
            }
            keys.lines().for_each(|key| self.move_key(key, from, to));
        }
        let id = self.id(to);
        for node in [to, from] {
            self.nodes[node].cli(&["cluster", "setslot", &number, "node", &id]);
        }
    }
}

/// Whether `5461-10922` or `7` has the slot.
fn within(range: &str, slot: u16) -> bool {
    let (first, last) = range.split_once('-').unwrap_or((range, range));
    let bounds = (first.parse::<u16>(), last.parse::<u16>());
    matches!(bounds, (Ok(first), Ok(last)) if (first..=last).contains(&slot))
}

/// A master, two replicas, and three sentinels that watch them under the name `main`.
pub(crate) struct Sentinels {
    pub(crate) servers: Vec<RedisServer>,
    sentinels: Vec<Sentinel>,
}

struct Sentinel {
    child: Child,
    port: u16,
    _folder: tempfile::TempDir,
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Sentinels {
    /// `password`: of the servers; `own`: of the sentinels.
    pub(crate) fn start(password: Option<&str>, own: Option<&str>) -> Self {
        let secret: Vec<&str> = password.iter().flat_map(|it| ["--requirepass", it, "--masterauth", it]).collect();
        let master = RedisServer::with(&secret);
        let port = master.port.to_string();
        let replicaof = ["--replicaof", "127.0.0.1", &port, "--repl-diskless-sync-delay", "0"];
        let replica = || RedisServer::with(&[&secret[..], &replicaof].concat());
        let servers = vec![replica(), replica()];
        let servers: Vec<_> = std::iter::once(master).chain(servers).collect();
        let sentinels = (0..3).map(|_| Sentinel::start(servers[0].port, password, own)).collect();
        let all = Self { servers, sentinels };
        until("the sentinels to know all", || {
            let knows = |sentinel: &Sentinel| {
                let master = sentinel.cli(own, &["sentinel", "master", "main"]);
                let fields: Vec<_> = master.lines().collect();
                let value = |name| fields.iter().position(|it| *it == name).map(|place| fields[place + 1]);
                value("num-slaves") == Some("2") && value("num-other-sentinels") == Some("2")
            };
            all.sentinels.iter().all(knows).then_some(())
        });
        all
    }

    pub(crate) fn hosts(&self) -> String {
        let hosts: Vec<_> = self.sentinels.iter().map(|sentinel| format!("127.0.0.1:{}", sentinel.port)).collect();
        hosts.join(",")
    }

    pub(crate) fn url(&self) -> String {
        format!("redis+sentinel://{}/main", self.hosts())
    }

    /// The port of the master, as a sentinel has it.
    pub(crate) fn master(&self) -> u16 {
        let answer = self.sentinels[1].cli(None, &["sentinel", "get-master-addr-by-name", "main"]);
        answer.lines().nth(1).unwrap().parse().unwrap()
    }

    pub(crate) fn fail_over(&self) {
        let asked = || self.sentinels[0].cli(None, &["sentinel", "failover", "main"]);
        until("the sentinel to agree", || (asked() == "OK").then_some(()));
    }
}

impl Sentinel {
    fn start(master: u16, password: Option<&str>, own: Option<&str>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut config = format!(
            "port {port}\nbind 127.0.0.1\ndir {}\nsentinel monitor main 127.0.0.1 {master} 2\n\
             sentinel down-after-milliseconds main 1000\nsentinel failover-timeout main 5000\n",
            folder.path().display()
        );
        if let Some(password) = password {
            config += &format!("sentinel auth-pass main {password}\n");
        }
        if let Some(own) = own {
            config += &format!("requirepass {own}\nsentinel sentinel-pass {own}\n");
        }
        let path = folder.path().join("sentinel.conf");
        std::fs::write(&path, config).unwrap();
        let child = Command::new("redis-server").arg(&path).arg("--sentinel").stdout(Stdio::null()).spawn().unwrap();
        let sentinel = Self { child, port, _folder: folder };
        until("the sentinel to answer", || (sentinel.cli(own, &["ping"]) == "PONG").then_some(()));
        sentinel
    }

    fn cli(&self, password: Option<&str>, args: &[&str]) -> String {
        let secret: Vec<&str> = password.iter().flat_map(|it| ["--no-auth-warning", "-a", it]).collect();
        let output =
            Command::new("redis-cli").args(["-p", &self.port.to_string()]).args(secret).args(args).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }
}

/// Independent servers, and the address of the ring that they are.
pub(crate) fn ring(nodes: usize) -> (Vec<RedisServer>, String) {
    let servers: Vec<_> = (0..nodes).map(|_| RedisServer::start()).collect();
    let hosts: Vec<_> = servers.iter().map(|server| format!("127.0.0.1:{}", server.port)).collect();
    let url = format!("redis+ring://{}", hosts.join(","));
    (servers, url)
}
