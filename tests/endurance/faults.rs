//! Injects a fault, waits, and removes it.

use std::{
    fs::{self, File},
    io::{Read as _, Write as _},
    net::{Ipv4Addr, TcpStream},
    process::{Command, Stdio},
    thread::sleep,
    time::{Duration, Instant, UNIX_EPOCH},
};

use crate::{
    features::rule_file,
    law::{Apart, Loss},
    observer::{Observer, Via, wall_clock},
    schedule::{Fault, Kind},
    site::{INSTANCES, ON_REDIS, PEERS, Site, WITH_FAKE_CLOCK, WITH_TLS, WITH_XDS},
    support::{DEADLINE, Server, wait_for},
};

/// Instances that may be restarted.
const RESTARTED: [usize; 3] = [1, 2, 4];
/// A script is killed only when Redis has found it to be slow (`busy-reply-threshold`), after five seconds.
const MIN_BUSY: Duration = Duration::from_secs(6);

impl Kind {
    /// Returns the effect on the laws while the fault lasts.
    fn effect(self, instance: usize) -> (Loss, Apart) {
        let apart = if PEERS.contains(&instance) { Apart::Peers } else { Apart::RedisInstances };
        match self {
            Self::InstanceKilled | Self::InstanceFrozen => (Loss::None, apart),
            Self::RedisKilled | Self::RedisFrozen | Self::RedisBusy => (Loss::RecentHits, Apart::RedisInstances),
            Self::RedisRestartsEmpty => (Loss::Counters, Apart::RedisInstances),
            Self::RedisUnreachable | Self::RedisAnswersLost => (Loss::None, Apart::RedisInstances),
            Self::PeersApart | Self::PeersApartInOneDirection => (Loss::None, Apart::Peers),
            // Redis' clock counts, but an eventual counter is decided by the clock of its instance.
            Self::ClockStep => (Loss::None, Apart::RedisInstances),
            Self::ScriptsFlushed
            | Self::DiskFull
            | Self::NoDescriptors
            | Self::CertificatesBroken
            | Self::RulesBroken
            | Self::ControlPlaneGone => (Loss::None, Apart::Nobody),
        }
    }

    /// Returns whether calls fail while the fault lasts. The other faults have [`evidence`].
    pub(crate) fn fails_calls(self) -> bool {
        let is_of_redis = self.effect(0).1 == Apart::RedisInstances && self != Self::ClockStep;
        is_of_redis || self == Self::DiskFull
    }

    /// Returns whether the evidence of the fault is a number that only grows.
    fn has_lasting_evidence(self) -> bool {
        matches!(self, Self::ScriptsFlushed | Self::NoDescriptors | Self::CertificatesBroken | Self::RulesBroken)
    }
}

impl Fault {
    /// Injects the fault and removes it after its duration. Returns the name of the affected process.
    pub(crate) fn run(&self, site: &mut Site, observer: &Observer) -> String {
        let instance = self.instance();
        let (loss, apart) = self.kind.effect(instance);
        let disturbance = observer.disturb(loss, apart);
        let before = evidence(self.kind, site, instance);
        let affected = match self.kind {
            Kind::InstanceKilled | Kind::InstanceFrozen | Kind::NoDescriptors => {
                self.disable(site, observer, instance);
                None
            }
            Kind::RedisKilled | Kind::RedisFrozen | Kind::RedisRestartsEmpty | Kind::RedisBusy => {
                Some(self.stop_redis(site))
            }
            Kind::ScriptsFlushed => {
                site.cluster.nodes.iter().for_each(|node| drop(node.cli(&["script", "flush"])));
                sleep(Duration::from_secs(1));
                Some("all Redis nodes".to_owned())
            }
            Kind::RedisUnreachable | Kind::RedisAnswersLost | Kind::PeersApart | Kind::PeersApartInOneDirection => {
                self.cut_network(site, observer, instance, before);
                None
            }
            Kind::DiskFull => {
                let mut file = File::create(site.disk.filler()).unwrap();
                let begin = Instant::now();
                while begin.elapsed() < self.lasts {
                    fill(&mut file);
                    sleep(Duration::from_millis(50));
                }
                fs::remove_file(site.disk.filler()).unwrap();
                Some("redis-1 and both peers".to_owned())
            }
            Kind::ClockStep => {
                let step = if self.choice.is_multiple_of(2) { "+" } else { "-" };
                site.files.write("clock", &format!("{step}{}", 5 + self.choice % 60));
                self.hold(site, observer, instance, before);
                site.files.write("clock", "+0");
                None
            }
            Kind::CertificatesBroken => {
                self.break_certificates(site);
                None
            }
            Kind::RulesBroken => {
                let rules = rule_file();
                site.files.write("rules/soak.yaml", &rules[..rules.len() / 2]);
                sleep(self.lasts);
                site.files.write("rules/soak.yaml", &rules);
                Some("redis-1, redis-2 and both peers".to_owned())
            }
            Kind::ControlPlaneGone => {
                site.plane = None;
                self.hold(site, observer, instance, before);
                site.start_plane();
                None
            }
        };
        if self.kind.has_lasting_evidence() {
            self.require_effect(site, observer, instance, before);
        }
        observer.settle(disturbance);
        affected.unwrap_or_else(|| INSTANCES[instance].to_owned())
    }

    /// Waits while the fault lasts, and reports a fault without an effect.
    fn hold(&self, site: &Site, observer: &Observer, instance: usize, before: f64) {
        sleep(self.lasts);
        self.require_effect(site, observer, instance, before);
    }

    fn require_effect(&self, site: &Site, observer: &Observer, instance: usize, before: f64) {
        if evidence(self.kind, site, instance) == before {
            observer.report(&format!("{}: no effect", self.kind.name()));
        }
    }

    /// Kills or freezes an instance, or takes its file descriptors.
    fn disable(&self, site: &mut Site, observer: &Observer, instance: usize) {
        match self.kind {
            Kind::InstanceKilled => {
                observer.silence(Via::Connection(instance));
                site.kill(instance);
                sleep(self.lasts / 2);
                site.restart(instance);
            }
            Kind::InstanceFrozen => {
                observer.silence(Via::Connection(instance));
                site.server(instance).signal("STOP");
                sleep(self.lasts);
                site.server(instance).signal("CONT");
            }
            _ => {
                let server = site.server(instance);
                observer.silence(Via::NewConnection(instance));
                let before = max_descriptors(server.pid());
                // Connections that are about to be closed leave no room for others.
                let number = server.open_file_descriptors().saturating_sub(8);
                set_max_descriptors(server.pid(), &number.to_string());
                sleep(self.lasts);
                set_max_descriptors(server.pid(), &before);
            }
        }
        observer.answers_again(instance);
    }

    /// Cuts an instance from Redis or from its peer.
    fn cut_network(&self, site: &Site, observer: &Observer, instance: usize, before: f64) {
        let (network, redis) = (&site.network, site.redis_address());
        let hold = || self.hold(site, observer, instance, before);
        let other = PEERS[0] + PEERS[1] - instance.max(PEERS[0]);
        match self.kind {
            Kind::RedisUnreachable => {
                network.cut_address(instance, redis);
                sleep(self.lasts);
                network.heal_address(instance, redis);
            }
            Kind::RedisAnswersLost => {
                lose_answers("add", redis, network.addresses[instance]);
                sleep(self.lasts);
                lose_answers("del", redis, network.addresses[instance]);
            }
            Kind::PeersApart => {
                network.cut(instance, other);
                network.cut(other, instance);
                hold();
                network.heal(instance, other);
                network.heal(other, instance);
            }
            _ => {
                network.cut(instance, other);
                hold();
                network.heal(instance, other);
            }
        }
    }

    /// Returns the instance that the fault affects, if it affects one.
    fn instance(&self) -> usize {
        let choose = |all: &[usize]| all[self.choice % all.len()];
        match self.kind {
            Kind::InstanceKilled => choose(&RESTARTED),
            Kind::InstanceFrozen | Kind::NoDescriptors => choose(&[0, 1, 2, 3, 4]),
            Kind::PeersApart | Kind::PeersApartInOneDirection => choose(&PEERS),
            Kind::ClockStep => WITH_FAKE_CLOCK,
            Kind::CertificatesBroken => WITH_TLS,
            Kind::ControlPlaneGone => WITH_XDS,
            Kind::RulesBroken => WITH_TLS,
            _ => choose(&ON_REDIS),
        }
    }

    /// Stops a master in one of several ways, and waits until the cluster is complete again.
    fn stop_redis(&self, site: &mut Site) -> String {
        let nodes = &mut site.cluster.nodes;
        let masters: Vec<_> =
            (0..nodes.len()).filter(|node| nodes[*node].cli(&["role"]).starts_with("master")).collect();
        let index = masters[self.choice % masters.len()];
        let node = &mut nodes[index];
        match self.kind {
            Kind::RedisKilled => {
                node.kill();
                sleep(self.lasts);
                node.restart();
            }
            Kind::RedisRestartsEmpty => {
                node.kill();
                node.restart();
            }
            Kind::RedisFrozen => {
                node.freeze();
                sleep(self.lasts);
                node.thaw();
            }
            _ => {
                let mut script = Command::new("redis-cli")
                    .args(["-s", &node.socket(), "eval", "while true do end", "0"])
                    .stdout(Stdio::null())
                    .spawn()
                    .unwrap();
                sleep(self.lasts.max(MIN_BUSY));
                wait_for("the script to be killed", || (node.cli(&["script", "kill"]) == "OK").then_some(()));
                script.wait().unwrap();
            }
        }
        site.wait_for_cluster();
        format!("node {}", index + 1)
    }

    /// Writes half a certificate, then a key that does not match, then a new certificate with its key.
    fn break_certificates(&self, site: &Site) {
        let (certificate, key) = site.authority.sign();
        let (_, other_key) = site.authority.sign();
        site.files.write("cert.pem", &certificate[..certificate.len() / 2]);
        sleep(self.lasts / 2);
        site.files.write("cert.pem", &certificate);
        site.files.write("key.pem", &other_key);
        sleep(self.lasts / 2);
        site.files.write("key.pem", &key);
    }
}

/// Returns a number that the fault changes: of a metric, of lines in a log, or of the seconds between two clocks. A fault
/// that fails calls needs none.
fn evidence(kind: Kind, site: &Site, instance: usize) -> f64 {
    let server = site.server(instance);
    let lines = |text: &str| server.log().matches(text).count() as f64;
    match kind {
        // The first instance that needs a script loads it for all.
        Kind::ScriptsFlushed => {
            let failures =
                |instance| site.server(instance).metric("sluicegate_redis_failures_total{kind=\"noscript\"}");
            ON_REDIS.into_iter().map(failures).sum()
        }
        Kind::PeersApart | Kind::PeersApartInOneDirection => server.metric("sluicegate_cluster_peers"),
        Kind::NoDescriptors => lines("cannot accept connections"),
        Kind::ClockStep => clock_difference(server),
        Kind::CertificatesBroken => lines("cannot use the changed certificates"),
        Kind::RulesBroken => server.metric("ratelimit_service_config_load_error"),
        Kind::ControlPlaneGone => server.metric("sluicegate_xds_connected"),
        _ => 0.0,
    }
}

/// Returns the seconds by which the wall clock of the service differs from this one, in steps of four.
fn clock_difference(server: &Server) -> f64 {
    let mut stream = TcpStream::connect(server.http).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream.write_all(b"POST /v1/WatchActivity HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}").unwrap();
    let mut text = String::new();
    while !text.contains("data: {\"at\":\"") || text.len() < 1_000 {
        let mut buffer = [0; 4_096];
        let read = stream.read(&mut buffer).unwrap();
        text += &String::from_utf8_lossy(&buffer[..read]);
    }
    let (_, tail) = text.split_once("\"at\":\"").unwrap();
    let time = humantime::parse_rfc3339(tail.split('"').next().unwrap()).unwrap();
    let seconds = time.duration_since(UNIX_EPOCH).unwrap().as_secs_f64() - wall_clock() as f64 / 1e3;
    (seconds / 4.0).round() * 4.0
}

/// Adds or deletes a rule that discards all packets from the Redis servers to an instance.
fn lose_answers(action: &str, from: Ipv4Addr, to: Ipv4Addr) {
    let rule = format!("rule {action} from {from} to {to} blackhole");
    assert!(Command::new("ip").args(rule.split(' ')).status().unwrap().success(), "ip {rule}");
}

/// Writes until the disk is full.
fn fill(file: &mut File) {
    while file.write_all(&[0; 4_096]).is_ok() {}
    while file.write_all(&[0]).is_ok() {}
}

/// Returns the soft limit of open files of a process.
fn max_descriptors(pid: u32) -> String {
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    line.split_whitespace().next().unwrap().to_owned()
}

fn set_max_descriptors(pid: u32, number: &str) {
    let status = Command::new("prlimit").args([&format!("--pid={pid}"), &format!("--nofile={number}:")]).status();
    assert!(status.unwrap().success(), "prlimit {number}");
}
