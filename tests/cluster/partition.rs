//! Members in network namespaces, whose connections are cut.

use std::{
    net::{Ipv4Addr, SocketAddr},
    process::Command,
    sync::atomic::{AtomicU32, Ordering::Relaxed},
};

use crate::cluster::members::{Group, Members};

const RULES: &str = "
domain: d
descriptors:
- key: window
  rate_limit: {unit: year, requests_per_unit: 200}
- key: log
  rate_limit: {unit: year, requests_per_unit: 200, algorithm: sliding_log}
- key: bucket
  rate_limit: {unit: year, requests_per_unit: 200, algorithm: token_bucket}
- key: small
  rate_limit: {unit: year, requests_per_unit: 50, count_denied: false}
";
const KEYS: [&str; 3] = ["window", "log", "bucket"];
/// Port of every member, each at its own address.
const PORT: u16 = 8_083;

/// A bridge with one network namespace per member; removed when dropped.
struct Network {
    name: String,
    addresses: Vec<Ipv4Addr>,
}

impl Network {
    fn new(members: usize) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let (process, number) = (std::process::id(), COUNT.fetch_add(1, Relaxed));
        // 100.64.0.0/10 contains 16,384 networks of this size.
        let network = Ipv4Addr::from((100 << 24) | (64 << 16) | (((process % 1_024) * 16 + number % 16) << 8));
        let address = |host: u32| Ipv4Addr::from(u32::from(network) + host);
        let name = format!("sg{process}{}", char::from(b'a' + (number % 16) as u8));
        let addresses: Vec<_> = (1..=members as u32).map(address).collect();
        let this = Self { name, addresses };
        let bridge = &this.name;
        ip(&format!("link add {bridge} type bridge"));
        ip(&format!("addr add {}/24 dev {bridge}", address(254)));
        ip(&format!("link set {bridge} up"));
        for (member, address) in this.addresses.iter().enumerate() {
            let namespace = this.namespace(member);
            ip(&format!("netns add {namespace}"));
            ip(&format!("link add {namespace} type veth peer name eth0 netns {namespace}"));
            ip(&format!("link set {namespace} master {bridge} up"));
            ip(&format!("-n {namespace} addr add {address}/24 dev eth0"));
            ip(&format!("-n {namespace} link set eth0 up"));
            ip(&format!("-n {namespace} link set lo up"));
        }
        this
    }

    /// Returns the name of a namespace and of its link: at most 15 bytes.
    fn namespace(&self, member: usize) -> String {
        format!("{}{member}", self.name)
    }

    /// Discards everything that a member sends to another one. Requests in both directions fail.
    fn cut(&self, from: usize, to: usize) {
        ip(&format!("-n {} route add blackhole {}/32", self.namespace(from), self.addresses[to]));
    }

    fn heal(&self, from: usize, to: usize) {
        ip(&format!("-n {} route del blackhole {}/32", self.namespace(from), self.addresses[to]));
    }

    async fn start_members(&self) -> Members {
        let addresses = self.addresses.iter().map(|address| SocketAddr::from((*address, PORT))).collect();
        Members::of(Group::at(addresses, RULES), |member, builder| builder.in_namespace(&self.namespace(member))).await
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for member in 0..self.addresses.len() {
            // A link outlives its namespace for as long as the system keeps connections in it.
            let _ = Command::new("ip").args(["link", "del", &self.namespace(member)]).output();
            let _ = Command::new("ip").args(["netns", "del", &self.namespace(member)]).output();
        }
        let _ = Command::new("ip").args(["link", "del", &self.name]).output();
    }
}

fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split(' ')).output().expect("ip is missing: run tests/setup.sh");
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

#[tokio::test]
async fn both_sides_of_a_partition_enforce_limits_and_agree_afterwards() {
    let network = Network::new(3);
    let members = network.start_members().await;
    let [one, other, apart] = &members.all[..] else { unreachable!() };
    for key in KEYS {
        one.take(key, 20).await;
        members.wait_for_remaining(key, 180).await;
    }
    one.take("small", 10).await;
    members.wait_for_remaining("small", 40).await;
    for member in 0..2 {
        network.cut(member, 2);
        network.cut(2, member);
    }
    one.wait_for_peers(1);
    other.wait_for_peers(1);
    apart.wait_for_peers(0);
    for key in KEYS {
        for _ in 0..15 {
            one.take(key, 2).await;
            apart.take(key, 4).await;
        }
        other.wait_for_remaining(key, 150).await;
        assert_eq!(apart.remaining(key).await, 120, "{key}");
    }
    assert_eq!(apart.exhaust("small").await, 40);
    assert_eq!(one.exhaust("small").await, 40);
    other.wait_for_remaining("small", 0).await;
    assert!(!other.is_allowed("small", 1).await);
    for member in 0..2 {
        network.heal(member, 2);
        network.heal(2, member);
    }
    for key in KEYS {
        members.wait_for_remaining(key, 90).await;
    }
    members.wait_until_connected();
    for member in &members.all {
        assert!(!member.is_allowed("small", 1).await);
    }
    // Connected members exchange further hits once.
    apart.take("log", 10).await;
    one.take("log", 5).await;
    members.wait_for_remaining("log", 75).await;
}

/// What one member sends to another one is lost, so neither receives the other's hits.
#[tokio::test]
async fn members_agree_after_a_partition_in_one_direction() {
    let network = Network::new(3);
    let members = network.start_members().await;
    let [one, other, third] = &members.all[..] else { unreachable!() };
    network.cut(0, 1);
    one.wait_for_peers(1);
    other.wait_for_peers(1);
    third.wait_for_peers(2);
    for key in KEYS {
        for _ in 0..10 {
            one.take(key, 2).await;
            other.take(key, 3).await;
        }
        third.wait_for_remaining(key, 150).await;
        assert_eq!((one.remaining(key).await, other.remaining(key).await), (180, 170), "{key}");
    }
    network.heal(0, 1);
    for key in KEYS {
        members.wait_for_remaining(key, 150).await;
    }
    members.wait_until_connected();
}
