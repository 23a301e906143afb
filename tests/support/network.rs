//! [`Network`]: network namespaces with connections that a test can cut.

use std::{
    net::Ipv4Addr,
    process::Command,
    sync::atomic::{AtomicU32, Ordering::Relaxed},
};

/// A bridge with one network namespace per member; removed when dropped.
pub(crate) struct Network {
    name: String,
    pub(crate) addresses: Vec<Ipv4Addr>,
    /// Address of servers in the namespace of the test, from which members can be cut while the test still reaches them.
    pub(crate) servers: Ipv4Addr,
}

impl Network {
    pub(crate) fn new(members: usize) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let (process, number) = (std::process::id(), COUNT.fetch_add(1, Relaxed));
        // 100.64.0.0/10 contains 16,384 networks of this size.
        let network = Ipv4Addr::from((100 << 24) | (64 << 16) | (((process % 1_024) * 16 + number % 16) << 8));
        let address = |host: u32| Ipv4Addr::from(u32::from(network) + host);
        let name = format!("sg{process}{}", char::from(b'a' + (number % 16) as u8));
        let addresses: Vec<_> = (1..=members as u32).map(address).collect();
        let this = Self { name, addresses, servers: address(253) };
        let bridge = &this.name;
        ip(&format!("link add {bridge} type bridge"));
        ip(&format!("addr add {}/24 dev {bridge}", address(254)));
        ip(&format!("addr add {}/24 dev {bridge}", this.servers));
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
    pub(crate) fn namespace(&self, member: usize) -> String {
        format!("{}{member}", self.name)
    }

    /// Discards everything that a member sends to another one. Requests in both directions fail.
    pub(crate) fn cut(&self, from: usize, to: usize) {
        self.cut_address(from, self.addresses[to]);
    }

    pub(crate) fn heal(&self, from: usize, to: usize) {
        self.heal_address(from, self.addresses[to]);
    }

    /// Discards everything that a member sends to this address.
    pub(crate) fn cut_address(&self, from: usize, to: Ipv4Addr) {
        ip(&format!("-n {} route add blackhole {to}/32", self.namespace(from)));
    }

    pub(crate) fn heal_address(&self, from: usize, to: Ipv4Addr) {
        ip(&format!("-n {} route del blackhole {to}/32", self.namespace(from)));
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
