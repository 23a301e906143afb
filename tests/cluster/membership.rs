//! Members that start, stop, fail, hang, and change their addresses.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use sluicegate_proto::sluicegate::cluster::v1::{PullRequest, cluster_service_client::ClusterServiceClient};
use tokio::{runtime::Handle, sync::RwLock};
use tonic::transport::Endpoint;

use crate::{
    cluster::members::{Group, Member, Members, background_runtime, free_address, free_port, hits_of},
    support::{DEADLINE, raw_client::Client, wait_for, wait_for_async},
};

const RULES: &str = "
domain: d
descriptors:
- key: window
  rate_limit: {unit: year, requests_per_unit: 1000000}
- key: log
  rate_limit: {unit: year, requests_per_unit: 100, algorithm: sliding_log}
- key: small
  rate_limit: {unit: year, requests_per_unit: 5}
";
const LIMIT: u32 = 1_000_000;

/// Continuous hits at all members that take part, as by a load balancer.
struct Load {
    /// The members that receive hits. A caller holds a read lock during its call.
    clients: Arc<RwLock<Vec<Option<Client>>>>,
    admitted: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    callers: tokio::task::JoinSet<()>,
    runtime: Handle,
}

impl Load {
    async fn start(members: &Members, key: &'static str) -> Self {
        let mut load = Self {
            clients: Arc::new(RwLock::new(vec![None; members.all.len()])),
            admitted: Arc::default(),
            stop: Arc::default(),
            callers: tokio::task::JoinSet::new(),
            runtime: background_runtime(),
        };
        for (index, member) in members.all.iter().enumerate() {
            load.add(index, member).await;
        }
        let next = Arc::new(AtomicUsize::new(0));
        for _ in 0..4 {
            let (clients, admitted, stop, next) =
                (Arc::clone(&load.clients), Arc::clone(&load.admitted), Arc::clone(&load.stop), Arc::clone(&next));
            let calls = async move {
                while !stop.load(Relaxed) {
                    let clients = clients.read().await;
                    if let Some(client) = &clients[next.fetch_add(1, Relaxed) % clients.len()] {
                        assert!(client.check(hits_of(key, 1)).await.unwrap().allowed());
                        admitted.fetch_add(1, Relaxed);
                    }
                    drop(clients);
                    tokio::task::yield_now().await;
                }
            };
            load.callers.spawn_on(calls, &load.runtime);
        }
        load
    }

    async fn add(&self, index: usize, member: &Member) {
        let endpoint = Endpoint::from_shared(format!("http://{}", member.server.grpc)).unwrap().timeout(DEADLINE);
        // The connection belongs to the runtime that opens it.
        let client = self.runtime.spawn(Client::connect(endpoint)).await.unwrap().unwrap();
        self.clients.write().await[index] = Some(client);
    }

    /// Removes a member. Waits until no call is in progress.
    async fn remove(&self, index: usize) {
        self.clients.write().await[index] = None;
    }

    /// Waits for further hits.
    fn wait_for_hits(&self, count: u64) {
        let before = self.admitted.load(Relaxed);
        wait_for("further hits", || (self.admitted.load(Relaxed) >= before + count).then_some(()));
    }

    /// Ends the load and returns the number of hits. Panics if a call has failed.
    async fn finish(self) -> u32 {
        self.stop.store(true, Relaxed);
        self.callers.join_all().await;
        self.admitted.load(Relaxed) as u32
    }
}

/// A hit may count twice if a new member has received it with a copy of the counters, and again from its origin. It is
/// never lost.
#[tokio::test]
async fn a_rolling_restart_neither_fails_a_request_nor_forgets_a_hit() {
    let mut members = Members::start(5, RULES).await;
    let load = Load::start(&members, "window").await;
    for member in 0..5 {
        load.wait_for_hits(300);
        load.remove(member).await;
        let builder = members.group.builder(member);
        let stopped = members.all.remove(member);
        let log = || stopped.server.log();
        stopped.server.signal("TERM");
        wait_for_async("the last hits to be delivered", async || log().contains("shutdown complete").then_some(()))
            .await;
        assert!(!log().contains("did not receive the last hits"), "{}", log());
        assert!(stopped.server.wait().await.success());
        load.wait_for_hits(300);
        let restarted = Member::start(builder).await;
        let used = LIMIT - restarted.remaining("window").await;
        assert!(used >= 300, "the counters are copied before the first request is answered: {used} hits");
        load.add(member, &restarted).await;
        members.all.insert(member, restarted);
        members.wait_until_connected();
    }
    load.wait_for_hits(300);
    let admitted = load.finish().await;
    for member in &members.all {
        let mut used = 0;
        let what = format!("a member to count all {admitted} hits");
        wait_for_async(&what, async || {
            used = LIMIT - member.remaining("window").await;
            println!("{what}: {used}");
            (used >= admitted).then_some(())
        })
        .await;
        assert!(used <= admitted + admitted / 10 + 20, "{used} hits are counted instead of {admitted}");
    }
    members.assert_no_panic();
}

#[tokio::test]
async fn a_killed_member_loses_only_what_it_had_not_published() {
    let mut members = Members::start(3, RULES).await;
    for key in ["window", "log"] {
        let full = members.all[0].remaining(key).await;
        members.all[0].take(key, 10).await;
        members.wait_for_remaining(key, full - 10).await;
    }
    members.kill_and_restart(0).await;
    for member in &members.all {
        assert_eq!(member.remaining("window").await, LIMIT - 10);
        assert_eq!(member.remaining("log").await, 90);
    }
    members.wait_until_connected();
    members.all[0].take("log", 7).await;
    members.all[2].take("log", 5).await;
    members.wait_for_remaining("log", 78).await;
}

/// The last hits of a member that stops are delivered, even if its interval is long.
#[tokio::test]
async fn the_last_hits_are_delivered_at_shutdown() {
    let group = Group::new(3, RULES);
    let mut members =
        Members::of(group, |_, builder| builder.set("cluster.sync", "10s").set("shutdown.grace", "500ms")).await;
    let unavailable = |member: &Member| member.server.log().matches("peer unavailable").count();
    let at_start = unavailable(&members.all[0]);
    members.all[2].take("log", 9).await;
    members.all.remove(2).stop().await;
    members.wait_for_remaining("log", 91).await;
    // A client does not close its connection within the grace: its runtime is blocked.
    members.all[1].take("log", 6).await;
    let stopped = members.all.remove(1);
    stopped.server.signal("TERM");
    wait_for("the member to stop", || stopped.server.log().contains("shutdown complete").then_some(()));
    let log = stopped.server.log();
    assert!(log.contains("some calls did not finish within shutdown.grace"), "{log}");
    members.wait_for_remaining("log", 85).await;
    // Both have announced that they stop.
    assert_eq!(unavailable(&members.all[0]), at_start, "{}", members.all[0].server.log());
}

#[tokio::test]
async fn a_member_that_stops_waits_for_a_peer_that_pulls_late() {
    let group = Group::new(1, RULES);
    let members = Members::of(group, |_, builder| builder.set("cluster.sync", "10s")).await;
    let endpoint = format!("http://{}", members.group.addresses[0]);
    let mut late = ClusterServiceClient::connect(endpoint).await.unwrap();
    let request = PullRequest { protocol: 1, subscriber: 7, ..PullRequest::default() };
    let origin = late.pull(request).await.unwrap().into_inner().origin;
    let request = PullRequest { origin, ..request };
    assert_eq!(late.pull(request).await.unwrap().into_inner().until, 0);
    members.all[0].take("log", 9).await;
    let server = &members.all[0].server;
    server.signal("TERM");
    wait_for("the shutdown", || server.log().contains("shutting down").then_some(()));
    let last = late.pull(request).await.unwrap().into_inner();
    assert_eq!((last.until, last.increments.len()), (1, 1));
    assert!(last.now_us > 0, "the ages of hits are relative to the clock of the member");
    // The confirmation has no answer if the member stops at once.
    let _ = late.pull(PullRequest { after: 1, ..request }).await;
    wait_for("the member to stop", || server.log().contains("shutdown complete").then_some(()));
    assert!(!server.log().contains("did not receive the last hits"), "{}", server.log());
}

#[tokio::test]
async fn members_go_on_while_another_one_hangs() {
    let members = Members::start(3, RULES).await;
    let [one, other, hung] = &members.all[..] else { unreachable!() };
    one.take("log", 10).await;
    members.wait_for_remaining("log", 90).await;
    hung.server.signal("STOP");
    let lag = format!("sluicegate_cluster_peer_lag_seconds{{peer=\"{}\"}}", members.group.addresses[2]);
    wait_for("the member to be missed", || (one.server.metric(&lag) > 2.0).then_some(()));
    for _ in 0..5 {
        one.take("log", 2).await;
        other.take("log", 1).await;
    }
    one.wait_for_remaining("log", 75).await;
    other.wait_for_remaining("log", 75).await;
    one.wait_for_peers(1);
    assert!(one.server.log().contains("peer unavailable"), "{}", one.server.log());
    // A new member joins although one of its peers hangs.
    let addresses = [&members.group.addresses[..], &[free_address()]].concat();
    let group = Group::at(addresses, RULES);
    let joined = Member::start(group.builder(3)).await;
    assert_eq!(joined.remaining("log").await, 75);
    joined.take("log", 5).await;
    one.wait_for_remaining("log", 70).await;
    hung.server.signal("CONT");
    hung.wait_for_remaining("log", 70).await;
    hung.take("log", 1).await;
    for member in [one, other, hung, &joined] {
        member.wait_for_remaining("log", 69).await;
        member.wait_for_peers(3);
    }
}

/// Every address reaches a member, and two of them reach the same one.
#[tokio::test]
async fn hits_of_a_member_with_two_addresses_count_once() {
    let ports = [free_port(), free_port()];
    let peers: Vec<_> =
        ports.iter().flat_map(|port| [format!("127.0.0.1:{port}"), format!("127.0.0.2:{port}")]).collect();
    let any = |port: &u16| SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), *port);
    let group = Group::at(ports.iter().map(any).collect(), RULES);
    let members = Members::of(group, |_, builder| builder.set("cluster.peers", &peers.join(", "))).await;
    for round in 1..=10 {
        members.all[0].take("log", 1).await;
        members.all[1].take("log", 2).await;
        members.wait_for_remaining("log", 100 - 3 * round).await;
    }
    members.wait_until_connected();
}

/// Members share a port number, and a name has the addresses of all of them.
#[tokio::test]
async fn an_address_that_a_name_gets_or_loses_is_found_or_left() {
    let (port, folder) = (free_port(), tempfile::tempdir().unwrap());
    let hosts = folder.path().join("hosts");
    let write = |last: u8| {
        let lines: String = (2..=last).map(|number| format!("127.0.0.{number} members\n")).collect();
        fs::write(&hosts, lines).unwrap();
    };
    let addresses = (2..=4).map(|number| SocketAddr::from(([127, 0, 0, number], port))).collect();
    let group = Group::at(addresses, RULES);
    // Without a port, that of the own address is used.
    let start = async |member| Member::start(group.builder(member).set("cluster.peers", "members").hosts(&hosts)).await;
    write(3);
    let [one, other] = [start(0).await, start(1).await];
    one.wait_for_peers(1);
    other.wait_for_peers(1);
    // Calls on this machine come from 127.0.0.1, where no member listens: it is found by the name alone.
    let late = start(2).await;
    late.wait_for_peers(2);
    late.take("log", 10).await;
    write(4);
    for member in [&one, &other] {
        member.wait_for_peers(2);
        member.wait_for_remaining("log", 90).await;
    }
    // A name that cannot be resolved keeps its addresses.
    write(1);
    wait_for("the failed resolution", || one.server.log().contains("cannot resolve a peer").then_some(()));
    late.take("log", 10).await;
    one.wait_for_remaining("log", 80).await;
    one.wait_for_peers(2);
    write(3);
    one.wait_for_peers(1);
    late.take("log", 10).await;
    for round in 1..=5 {
        other.take("log", 1).await;
        one.wait_for_remaining("log", 80 - round).await;
    }
}

#[tokio::test]
async fn a_member_serves_if_its_peers_do_not_answer() {
    // The system accepts connections, and nothing answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let group = Group::new(1, RULES);
    let builder = group.builder(0).set("cluster.peers", &silent.local_addr().unwrap().to_string());
    let member = Member::start(builder.set("cluster.join_timeout", "500ms")).await;
    let log = member.server.log();
    assert!(log.contains("the join did not end within cluster.join_timeout"), "{log}");
    assert_eq!(member.exhaust("small").await, 5);
    wait_for("the peer to be reported", || member.server.log().contains("peer unavailable").then_some(()));
    drop(member);
    // Nothing listens at the address, and another cannot be resolved.
    let builder = group.builder(0).set("cluster.peers", &format!("{},unknown.invalid:1", free_address()));
    let member = Member::start(builder).await;
    assert_eq!(member.exhaust("small").await, 5);
}

#[tokio::test]
async fn an_unavailable_peer_is_logged_once() {
    let closing = TcpListener::bind("127.0.0.1:0").unwrap();
    let group = Group::new(1, RULES);
    let builder = group.builder(0).set("cluster.peers", &closing.local_addr().unwrap().to_string());
    // An attempt needs one or two connections, and begins after the failure of the previous one was logged.
    let attempts = thread::spawn(move || closing.incoming().take(8).for_each(drop));
    let member = Member::start(builder).await;
    attempts.join().unwrap();
    let log = member.server.log();
    assert_eq!(log.matches("peer unavailable").count(), 1, "{log}");
}

/// A member that was stopped has the answers of the others in its sockets.
#[tokio::test]
async fn a_member_that_was_paused_does_not_blame_the_others() {
    let members = Members::start(3, RULES).await;
    members.all[1].take("window", 5).await;
    let paused = &members.all[0];
    paused.wait_for_remaining("window", LIMIT - 5).await;
    // At its start, the others did not run yet.
    let failures = || paused.server.log().matches("peer unavailable").count();
    let before = failures();
    paused.server.signal("STOP");
    // Longer than a call may take.
    thread::sleep(Duration::from_secs(6));
    paused.server.signal("CONT");
    members.all[1].take("window", 5).await;
    paused.wait_for_remaining("window", LIMIT - 10).await;
    assert_eq!(failures(), before, "{}", paused.server.log());
    assert!(paused.server.metric("sluicegate_process_paused_seconds_total") > 5.0);
}
