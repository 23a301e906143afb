//! [`Members`]: several running instances that exchange the hits they count.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    sync::atomic::{AtomicU16, Ordering::Relaxed},
};

use tokio::runtime::Handle;

use crate::support::{
    Server, descriptor,
    raw_client::{Answer, Client, Request},
    rules,
    server::Builder,
    wait_for, wait_for_async,
};

/// The addresses of members that call each other, and their rules.
pub(super) struct Group {
    pub(super) addresses: Vec<SocketAddr>,
    rules: tempfile::TempDir,
    store: String,
}

/// A running member with a connection to it; killed when dropped.
pub(super) struct Member {
    pub(super) server: Server,
    pub(super) client: Client,
}

/// A group of running members.
pub(super) struct Members {
    pub(super) group: Group,
    pub(super) all: Vec<Member>,
}

impl Group {
    /// Chooses addresses with free ports for `count` members.
    pub(super) fn new(count: usize, rules: &str) -> Self {
        Self::at((0..count).map(|_| free_address()).collect(), rules)
    }

    pub(super) fn at(addresses: Vec<SocketAddr>, text: &str) -> Self {
        Self { addresses, rules: rules(&[("d.yaml", text)]), store: "memory".to_owned() }
    }

    /// Uses another store than the members' memory.
    pub(super) fn with_store(self, store: &str) -> Self {
        Self { store: store.to_owned(), ..self }
    }

    /// Returns a builder for a member, with all addresses as its peers, its own among them.
    pub(super) fn builder(&self, member: usize) -> Builder {
        let peers: Vec<_> = self.addresses.iter().map(ToString::to_string).collect();
        let address = self.addresses[member];
        Server::builder_at(SocketAddr::new(address.ip(), 0))
            .rules(self.rules.path())
            .store(&self.store)
            .set("cluster.addr", &address.to_string())
            .set("cluster.peers", &peers.join(","))
            .set("cluster.allow_plaintext", "true")
    }
}

impl Member {
    pub(super) async fn start(builder: Builder) -> Self {
        let server = builder.start();
        let client = server.client().await;
        Self { server, client }
    }

    pub(super) async fn check(&self, request: Request) -> Answer {
        self.client.check(request).await.unwrap()
    }

    /// Takes hits of a counter and returns whether they are allowed.
    pub(super) async fn is_allowed(&self, key: &str, hits: u64) -> bool {
        self.check(hits_of(key, hits)).await.allowed()
    }

    /// Takes hits of a counter. Panics if they are denied.
    pub(super) async fn take(&self, key: &str, hits: u64) {
        assert!(self.is_allowed(key, hits).await, "{key}: {hits} hits are denied");
    }

    /// Takes single hits of a counter until one is denied. Returns the number of those that were allowed.
    pub(super) async fn exhaust(&self, key: &str) -> u32 {
        let mut allowed = 0;
        while self.is_allowed(key, 1).await {
            allowed += 1;
        }
        allowed
    }

    /// Returns the remaining hits of a counter.
    pub(super) async fn remaining(&self, key: &str) -> u32 {
        self.check(hits_of(key, 0)).await.remaining().unwrap()
    }

    /// Waits until this number of hits of a counter remains.
    pub(super) async fn wait_for_remaining(&self, key: &str, expected: u32) {
        let mut last = 0;
        let what = format!("{expected} remaining hits of {key}");
        wait_for_async(&what, async || {
            let remaining = self.remaining(key).await;
            if remaining != last {
                println!("{what}: {remaining}");
                last = remaining;
            }
            (remaining == expected).then_some(())
        })
        .await;
    }

    /// Waits until this number of peers is connected.
    pub(super) fn wait_for_peers(&self, count: usize) {
        wait_for(&format!("{count} connected peers"), || {
            (self.server.metric("sluicegate_cluster_peers") == count as f64).then_some(())
        });
    }

    /// Stops the member in an orderly way, as a rolling update does.
    pub(super) async fn stop(self) {
        self.server.signal("TERM");
        assert!(self.server.wait().await.success());
    }
}

impl Members {
    /// Starts `count` members with these rules and waits until all are connected.
    pub(super) async fn start(count: usize, rules: &str) -> Self {
        let group = Group::new(count, rules);
        Self::of(group, |_, builder| builder).await
    }

    /// Starts all members of a group, each with further settings, and waits until all are connected.
    pub(super) async fn of(group: Group, configure: impl Fn(usize, Builder) -> Builder) -> Self {
        let mut all = Vec::new();
        for member in 0..group.addresses.len() {
            all.push(Member::start(configure(member, group.builder(member))).await);
        }
        let members = Self { group, all };
        members.wait_until_connected();
        members
    }

    pub(super) fn wait_until_connected(&self) {
        self.all.iter().for_each(|member| member.wait_for_peers(self.all.len() - 1));
    }

    /// Waits until this number of hits of a counter remains at every member.
    pub(super) async fn wait_for_remaining(&self, key: &str, expected: u32) {
        for member in &self.all {
            member.wait_for_remaining(key, expected).await;
        }
    }

    /// Kills a member and starts it again at the same address.
    pub(super) async fn kill_and_restart(&mut self, member: usize) {
        drop(self.all.remove(member));
        self.all.insert(member, Member::start(self.group.builder(member)).await);
    }

    /// Asserts that no member has panicked.
    pub(super) fn assert_no_panic(&self) {
        for member in &self.all {
            let log = member.server.log();
            assert!(!log.contains("panicked"), "{log}");
        }
    }
}

/// Builds a request for hits of one counter; 0 to peek.
pub(super) fn hits_of(key: &str, hits: u64) -> Request {
    Request::new("d").descriptor(descriptor(&[(key, "x")]).hits(hits))
}

/// Returns an address of this machine with a free port. The system assigns higher ports only, so the port stays free
/// until the member binds it.
pub(super) fn free_address() -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), free_port())
}

/// Returns a port that is free at all addresses of this machine.
pub(super) fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = std::process::id() as u16;
    loop {
        let port = 10_000 + first.wrapping_mul(31).wrapping_add(NEXT.fetch_add(1, Relaxed)) % 20_000;
        if TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok() {
            return port;
        }
    }
}

/// Starts a runtime on its own thread, because tests block theirs while they wait.
pub(super) fn background_runtime() -> Handle {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let handle = runtime.handle().clone();
    std::thread::spawn(move || runtime.block_on(std::future::pending::<()>()));
    handle
}
