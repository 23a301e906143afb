//! Groups of Redis servers: a cluster, a master with replicas and sentinels, a ring.

use std::{
    net::{Ipv4Addr, TcpListener},
    process::{Child, Command, Stdio},
};

use super::{RedisServer, repository, wait_for};

/// A Redis Cluster. `nodes` contains the masters first, then their replicas, if there are any.
pub(crate) struct RedisCluster {
    pub(crate) nodes: Vec<RedisServer>,
    host: Ipv4Addr,
    replicas: usize,
}

impl RedisCluster {
    /// Starts a cluster of three masters.
    pub(crate) fn start() -> Self {
        Self::with(3, 0, &[])
    }

    /// Starts a cluster with `replicas` replicas for each master and with additional options for each server.
    pub(crate) fn with(masters: usize, replicas: usize, args: &[&str]) -> Self {
        Self::create(Ipv4Addr::LOCALHOST, masters, replicas, args, &[])
    }

    /// Starts a cluster of three masters with a replica each at this address of the machine.
    #[allow(dead_code, reason = "only tests/endurance uses it")]
    pub(crate) fn at(host: Ipv4Addr) -> Self {
        let address = host.to_string();
        let args = ["--bind", &address, "--cluster-announce-ip", &address, "--protected-mode", "no"];
        Self::create(host, 3, 1, &args, &[])
    }

    /// Starts masters with the user of docs/guides/redis.md, and returns the URL with the name and password of the user.
    pub(crate) fn with_documented_user(masters: usize) -> (Self, String) {
        let docs = std::fs::read_to_string(repository("docs/guides/redis.md")).unwrap();
        let line = docs.lines().find_map(|line| line.strip_prefix("ACL SETUSER sluicegate on >SECRET ")).unwrap();
        let user: Vec<_> = ["--user", "sluicegate", "on", ">secret"].into_iter().chain(line.split(' ')).collect();
        let cluster = Self::with(masters, 0, &user);
        let url = cluster.url().replace("://", "://sluicegate:secret@");
        (cluster, url)
    }

    /// Starts a cluster of three masters that accept only TLS.
    pub(crate) fn tls(certificate: &str, key: &str, ca: &str) -> Self {
        let files = ["--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", ca];
        let args = [&files[..], &["--tls", "--tls-cluster", "yes"]].concat();
        Self::create(Ipv4Addr::LOCALHOST, 3, 0, &args, &["--tls", "--cert", certificate, "--key", key, "--cacert", ca])
    }

    fn create(host: Ipv4Addr, masters: usize, replicas: usize, args: &[&str], cli: &[&str]) -> Self {
        let nodes: Vec<_> = (0..masters * (1 + replicas)).map(|_| Self::start_node(args)).collect();
        let addresses = nodes.iter().map(|node| format!("{host}:{}", node.port));
        let mut create = Command::new("redis-cli");
        create.args(["--cluster", "create"]).args(addresses);
        create.args(["--cluster-replicas", &replicas.to_string(), "--cluster-yes"]).args(cli);
        let output = create.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        let cluster = Self { nodes, host, replicas: masters * replicas };
        wait_for("all nodes to agree on the cluster", || cluster.is_healthy().then_some(()));
        cluster
    }

    /// Returns whether all nodes know all slots and all replicas, and every replica is connected to its master.
    pub(crate) fn is_healthy(&self) -> bool {
        self.nodes.iter().all(|node| {
            let known = node.cli(&["cluster", "nodes"]);
            let all_replicas_follow = known.lines().filter(|line| line.contains("slave")).count() == self.replicas;
            // A replica that has never been connected to its master is not a candidate in elections.
            let linked = !node.cli(&["info", "replication"]).contains("master_link_status:down");
            node.cli(&["cluster", "info"]).contains("cluster_state:ok") && all_replicas_follow && linked
        })
    }

    /// Starts a server in cluster mode that belongs to no cluster yet.
    pub(crate) fn start_node(args: &[&str]) -> RedisServer {
        let bus = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
        let cluster_args = ["--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--cluster-port", &bus];
        RedisServer::with(
            &[&cluster_args[..], &["--cluster-require-full-coverage", "no", "--repl-diskless-sync-delay", "0"], args]
                .concat(),
        )
    }

    pub(crate) fn url(&self) -> String {
        let hosts: Vec<_> = self.nodes.iter().take(2).map(|node| format!("{}:{}", self.host, node.port)).collect();
        format!("redis+cluster://{}", hosts.join(","))
    }

    /// Returns the node's id in the cluster.
    pub(crate) fn id(&self, node: usize) -> String {
        self.nodes[node].cli(&["cluster", "myid"])
    }

    /// Returns the index of the node that owns the key's slot.
    pub(crate) fn owner(&self, key: &str) -> usize {
        let slot: u16 = self.nodes[0].cli(&["cluster", "keyslot", key]).parse().unwrap();
        let is_owner = |node: &RedisServer| {
            let nodes = node.cli(&["cluster", "nodes"]);
            let own_line = nodes.lines().find(|line| line.contains("myself") && line.contains("master"));
            own_line.is_some_and(|line| line.split(' ').skip(8).any(|range| range_contains(range, slot)))
        };
        wait_for("a node to own the slot", || self.nodes.iter().position(is_owner))
    }

    /// Returns the index of the replica that follows this master.
    pub(crate) fn replica_of(&self, master: usize) -> usize {
        let id = self.id(master);
        let follows = |node: &RedisServer| {
            let nodes = node.cli(&["cluster", "nodes"]);
            nodes.lines().any(|line| line.contains("myself,slave") && line.contains(&id))
        };
        wait_for("a replica to follow", || self.nodes.iter().position(follows))
    }

    /// Begins to migrate a slot: from now on, new keys of the slot belong to the node `to`.
    pub(crate) fn begin_slot_migration(&self, slot: u16, from: usize, to: usize) {
        let slot = slot.to_string();
        assert_eq!(self.nodes[to].cli(&["cluster", "setslot", &slot, "importing", &self.id(from)]), "OK");
        assert_eq!(self.nodes[from].cli(&["cluster", "setslot", &slot, "migrating", &self.id(to)]), "OK");
    }

    /// Moves one key of a migrating slot.
    pub(crate) fn move_key(&self, key: &str, from: usize, to: usize) {
        let port = self.nodes[to].port.to_string();
        let answer = self.nodes[from].cli(&["migrate", "127.0.0.1", &port, key, "0", "5000"]);
        assert!(matches!(answer.as_str(), "OK" | "NOKEY"), "{answer}");
    }

    /// Moves the remaining keys of a slot and announces its new owner.
    pub(crate) fn finish_slot_migration(&self, slot: u16, from: usize, to: usize) {
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

/// Returns whether a range such as `5461-10922` or `7` contains the slot.
fn range_contains(range: &str, slot: u16) -> bool {
    let (first, last) = range.split_once('-').unwrap_or((range, range));
    let bounds = (first.parse::<u16>(), last.parse::<u16>());
    matches!(bounds, (Ok(first), Ok(last)) if (first..=last).contains(&slot))
}

/// A master, two replicas, and three sentinels that watch them under the name `main`.
pub(crate) struct Sentinels {
    pub(crate) servers: Vec<RedisServer>,
    sentinels: Vec<Sentinel>,
}

/// One sentinel process.
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
    /// Starts all processes with a password for the servers and one for the sentinels.
    pub(crate) fn start(password: Option<&str>, sentinel_password: Option<&str>) -> Self {
        let auth_args: Vec<&str> =
            password.iter().flat_map(|password| ["--requirepass", password, "--masterauth", password]).collect();
        let master = RedisServer::with(&auth_args);
        let port = master.port.to_string();
        let replicaof = ["--replicaof", "127.0.0.1", &port, "--repl-diskless-sync-delay", "0"];
        let replica = || RedisServer::with(&[&auth_args[..], &replicaof].concat());
        let servers = vec![replica(), replica()];
        let servers: Vec<_> = std::iter::once(master).chain(servers).collect();
        let sentinels = (0..3).map(|_| Sentinel::start(servers[0].port, password, sentinel_password)).collect();
        let group = Self { servers, sentinels };
        wait_for("the sentinels to know all replicas and sentinels", || {
            let knows_all = |sentinel: &Sentinel| {
                let master = sentinel.cli(sentinel_password, &["sentinel", "master", "main"]);
                let fields: Vec<_> = master.lines().collect();
                let value = |name| fields.iter().position(|field| *field == name).map(|index| fields[index + 1]);
                value("num-slaves") == Some("2") && value("num-other-sentinels") == Some("2")
            };
            group.sentinels.iter().all(knows_all).then_some(())
        });
        group
    }

    pub(crate) fn hosts(&self) -> String {
        let hosts: Vec<_> = self.sentinels.iter().map(|sentinel| format!("127.0.0.1:{}", sentinel.port)).collect();
        hosts.join(",")
    }

    pub(crate) fn url(&self) -> String {
        format!("redis+sentinel://{}/main", self.hosts())
    }

    /// Returns the master's port according to one of the sentinels.
    pub(crate) fn master(&self) -> u16 {
        let answer = self.sentinels[1].cli(None, &["sentinel", "get-master-addr-by-name", "main"]);
        answer.lines().nth(1).unwrap().parse().unwrap()
    }

    pub(crate) fn fail_over(&self) {
        let failover = || self.sentinels[0].cli(None, &["sentinel", "failover", "main"]);
        wait_for("the sentinel to accept the failover", || (failover() == "OK").then_some(()));
    }
}

impl Sentinel {
    fn start(master: u16, password: Option<&str>, sentinel_password: Option<&str>) -> Self {
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
        if let Some(sentinel_password) = sentinel_password {
            config += &format!("requirepass {sentinel_password}\nsentinel sentinel-pass {sentinel_password}\n");
        }
        let path = folder.path().join("sentinel.conf");
        std::fs::write(&path, config).unwrap();
        let child = Command::new("redis-server").arg(&path).arg("--sentinel").stdout(Stdio::null()).spawn().unwrap();
        let sentinel = Self { child, port, _folder: folder };
        wait_for("the sentinel to answer", || (sentinel.cli(sentinel_password, &["ping"]) == "PONG").then_some(()));
        sentinel
    }

    fn cli(&self, password: Option<&str>, args: &[&str]) -> String {
        let auth_args: Vec<&str> = password.iter().flat_map(|password| ["--no-auth-warning", "-a", password]).collect();
        let output =
            Command::new("redis-cli").args(["-p", &self.port.to_string()]).args(auth_args).args(args).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }
}

/// Starts independent servers and returns them with the URL of their ring.
pub(crate) fn ring(nodes: usize) -> (Vec<RedisServer>, String) {
    let servers: Vec<_> = (0..nodes).map(|_| RedisServer::start()).collect();
    let hosts: Vec<_> = servers.iter().map(|server| format!("127.0.0.1:{}", server.port)).collect();
    let url = format!("redis+ring://{}", hosts.join(","));
    (servers, url)
}
