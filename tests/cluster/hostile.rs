//! Callers and members that send garbage, nonsense, or the wrong certificate; and invalid settings.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    path::Path,
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use prost::Message;
use sluicegate_proto::sluicegate::cluster::v1::{
    ActivityRequest, ActivityResponse, CopyPage, CopyRequest, CounterCopy, Increment, LargeNumbers, Limit,
    OverrideChange, OverridesChange, OverridesPage, OverridesRequest, Position, PullRequest, PullResponse, RuleSet,
    StoredOverride, cluster_service_client::ClusterServiceClient, cluster_service_server::ClusterService,
};
use tonic::{
    Code, Request, Response, Status,
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity},
};

use crate::{
    cluster::{
        foreign_member::{Pages, pages, serve},
        members::{Group, Member, Members, free_address, free_port, hits_of},
    },
    support::{
        DEADLINE,
        certificates::{Authority, Files},
        raw_grpc::{self, Raw},
        server::{Builder, command},
        wait_for,
    },
};

const RULES: &str = "
domain: d
descriptors:
- key: window
  rate_limit: {unit: year, requests_per_unit: 1000}
- key: bucket
  rate_limit: {unit: year, requests_per_unit: 1000, algorithm: token_bucket}
- key: log
  rate_limit: {unit: year, requests_per_unit: 100, algorithm: sliding_log}
";
/// The beginning of an HTTP/2 connection, with empty settings.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream
}

/// Takes hits at each member in turn and waits until all members have counted them.
async fn assert_exchange(members: &Members, key: &str) {
    for member in &members.all {
        let remaining = member.remaining(key).await;
        member.take(key, 2).await;
        members.wait_for_remaining(key, remaining - 2).await;
    }
}

#[tokio::test]
async fn garbage_and_floods_do_not_disturb_the_exchange() {
    let members = Members::start(2, RULES).await;
    let address = members.group.addresses[0];
    assert_exchange(&members, "window").await;
    let memory = members.all[0].server.resident_memory();
    // An HTTP/1 request has an answer or none, and the connection is closed.
    let mut request = connect(address);
    request.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    let _ = request.read_to_end(&mut Vec::new());
    let mut open = Vec::new();
    for number in 0..300_u32 {
        let mut stream = connect(address);
        match number % 4 {
            // Nothing is sent.
            0 => {}
            // Part of a preface.
            1 => stream.write_all(&PREFACE[..7]).unwrap(),
            // Bytes that are no HTTP.
            2 => {
                let garbage: Vec<u8> =
                    (0..4_096_u32).map(|byte| (byte.wrapping_mul(2_654_435_761) >> (number % 24)) as u8).collect();
                // The member may close the connection at once.
                let _ = stream.write_all(&garbage);
            }
            // An HTTP/2 connection with frames: PING, SETTINGS, and DATA of streams that do not exist.
            _ => {
                let mut bytes = PREFACE.to_vec();
                for _ in 0..200 {
                    bytes.extend(b"\0\0\x08\x06\0\0\0\0\0garbage!");
                    bytes.extend(b"\0\0\0\x04\0\0\0\0\0");
                    bytes.extend(b"\0\0\x04\0\0\0\0\0\x07data");
                }
                let _ = stream.write_all(&bytes);
            }
        }
        open.push(stream);
    }
    assert_exchange(&members, "bucket").await;
    let grown = members.all[0].server.resident_memory().saturating_sub(memory);
    assert!(grown < 100 << 20, "{grown} bytes for {} connections", open.len());
    drop(open);
    assert_exchange(&members, "log").await;
    members.wait_until_connected();
    members.assert_no_panic();
}

fn endpoint(address: SocketAddr, scheme: &str) -> Endpoint {
    Endpoint::from_shared(format!("{scheme}://{address}")).unwrap().timeout(DEADLINE)
}

async fn raw_client(address: SocketAddr) -> ClusterServiceClient<Channel> {
    ClusterServiceClient::new(endpoint(address, "http").connect().await.unwrap())
}

fn pull(origin: u64, after: u64) -> PullRequest {
    PullRequest { protocol: 1, subscriber: 7, origin, after, ..PullRequest::default() }
}

#[tokio::test]
async fn another_version_of_the_exchange_is_rejected() {
    let members = Members::start(1, RULES).await;
    let mut client = raw_client(members.group.addresses[0]).await;
    for protocol in [0, 2, u32::MAX] {
        let rejected = [
            client.pull(PullRequest { protocol, ..PullRequest::default() }).await.unwrap_err(),
            client.copy(CopyRequest { protocol }).await.unwrap_err(),
            client.overrides(OverridesRequest { protocol, after: None }).await.unwrap_err(),
        ];
        for status in rejected {
            assert_eq!(status.code(), Code::FailedPrecondition);
            let expected =
                format!("has version 1 of the exchange between instances, and the caller has version {protocol}");
            assert!(status.message().contains(&expected), "{status}");
        }
    }
}

/// The maximum is 4 KiB.
#[tokio::test]
async fn requests_have_a_maximum_size() {
    const OUT_OF_RANGE: &str = "11";
    let members = Members::start(1, RULES).await;
    let mut raw = Raw::connect_to(members.group.addresses[0], 65_535).await;
    for (bytes, status) in [(3 << 10, "0"), (5 << 10, OUT_OF_RANGE), (3 << 10, "0")] {
        let unknown = raw_grpc::field(15, &vec![0; bytes]);
        let message = [pull(0, 0).encode_to_vec(), unknown].concat();
        let answer = raw.send("/sluicegate.cluster.v1.ClusterService/Pull", raw_grpc::frame(&message)).await;
        assert_eq!(answer.0, status, "{bytes} bytes: {}", answer.1);
    }
    members.assert_no_panic();
}

#[tokio::test]
async fn absurd_requests_do_no_harm() {
    let members = Members::start(2, RULES).await;
    members.all[0].take("window", 3).await;
    members.wait_for_remaining("window", 997).await;
    let mut client = raw_client(members.group.addresses[0]).await;
    let hello = client.pull(pull(0, 0)).await.unwrap().into_inner();
    assert!(hello.origin != 0 && hello.joined && !hello.copy_needed && hello.increments.is_empty(), "{hello:?}");
    let first = client.pull(pull(hello.origin, 0)).await.unwrap().into_inner();
    assert!(first.after == 0 && first.until > 0 && !first.increments.is_empty(), "{first:?}");
    for after in [first.until + 1, first.until + 1_000_000, u64::MAX - 1, u64::MAX] {
        for subscriber in [7, 0, u64::MAX] {
            let request = PullRequest { subscriber, ..pull(hello.origin, after) };
            let answer = client.pull(request).await.unwrap().into_inner();
            assert!(answer.copy_needed && answer.increments.is_empty(), "{subscriber} {after}: {answer:?}");
        }
    }
    let absurd = [
        PullRequest { port: u32::MAX, ..pull(u64::MAX, u64::MAX) },
        PullRequest { port: 65_536, ..pull(hello.origin, 0) },
        PullRequest { port: 1, ..pull(hello.origin, 0) },
        // The port of the member's own listener.
        PullRequest { port: members.group.addresses[0].port().into(), ..pull(hello.origin, 0) },
        PullRequest { overrides_position: u64::MAX, ..pull(hello.origin, first.until) },
        PullRequest { leaving: true, subscriber: u64::MAX, ..pull(u64::MAX, 0) },
        // The member's own epoch.
        PullRequest { subscriber: hello.origin, ..pull(hello.origin, u64::MAX) },
        PullRequest { leaving: true, subscriber: hello.origin, ..pull(hello.origin, 0) },
    ];
    for request in absurd {
        let answer = client.pull(request).await.unwrap().into_inner();
        assert_eq!(answer.origin, hello.origin);
    }
    let own = PullRequest { subscriber: hello.origin, ..pull(hello.origin, 0) };
    assert_eq!(client.pull(own).await.unwrap().into_inner().until, 0, "an instance sends itself nothing");
    for after in [Some(u64::MAX), Some(1 << 40), Some(0), None] {
        let pages = client.overrides(OverridesRequest { protocol: 1, after }).await.unwrap();
        assert!(pages.into_inner().message().await.unwrap().is_some());
    }
    assert_exchange(&members, "bucket").await;
    members.wait_until_connected();
    let log = members.all[0].server.log();
    assert!(!log.contains("127.0.0.1:0\""), "a caller without a listener is not called back: {log}");
    members.assert_no_panic();
}

/// A member that answers nonsense.
#[derive(Clone)]
struct Nonsense {
    increments: Arc<Vec<Vec<u8>>>,
    /// Digests of real counters.
    counters: Arc<Vec<Vec<u8>>>,
    pulls: Arc<AtomicUsize>,
    copies: Arc<AtomicUsize>,
}

const NONSENSE_EPOCH: u64 = 0xbad;

fn limit(algorithm: &str) -> Limit {
    Limit { algorithm: algorithm.to_owned(), requests: 1_000, window_us: 31_536_000_000_000, ..Limit::default() }
}

/// Returns increments for a counter, each absurd in another way. A member that sends malformed ones is not called.
fn nonsense_for(counter: &[u8]) -> Vec<Vec<u8>> {
    let valid = Increment {
        sequence: 1,
        published_at_us: 1_800_000_000_000_000,
        limits: vec![limit("fixed_window")],
        counters: counter.to_vec().into(),
        limit: Vec::new(),
        hits: vec![1],
        age_us: vec![1_000],
        resets: vec![7; 5].into(),
    };
    let twice: Vec<u8> = [counter, counter].concat();
    let mut all = vec![
        Increment { limit: vec![u32::MAX], ..valid.clone() },
        Increment { limits: Vec::new(), ..valid.clone() },
        Increment { counters: twice.into(), hits: vec![i64::MAX; 2], age_us: vec![0, u64::MAX], ..valid.clone() },
        Increment { sequence: u64::MAX, published_at_us: 0, ..valid.clone() },
        Increment { published_at_us: u64::MAX, age_us: vec![u64::MAX], ..valid.clone() },
        Increment { published_at_us: u64::MAX, age_us: vec![0], ..valid.clone() },
    ];
    for (requests, window_us) in [(0, 0), (u32::MAX, 1), (1, u64::MAX), (u32::MAX, u64::MAX), (1_000, 1)] {
        for kind in ["fixed_window", "sliding_window", "sliding_log", "token_bucket", "leaky_bucket", "gcra"] {
            let absurd = Limit {
                requests,
                window_us,
                buckets: (kind == "sliding_window").then_some(u32::MAX),
                burst: matches!(kind, "token_bucket" | "gcra").then_some(u32::MAX),
                queue: (kind == "leaky_bucket").then_some(u32::MAX),
                large: Some(Box::new(LargeNumbers {
                    requests: u64::MAX - u64::from(requests),
                    burst: matches!(kind, "token_bucket" | "gcra").then_some(u64::MAX),
                })),
                ..limit(kind)
            };
            let plain = Limit { requests, window_us, ..limit(kind) };
            for limits in [vec![absurd], vec![plain]] {
                all.push(Increment { limits, ..valid.clone() });
            }
        }
    }
    for kind in ["", "magic", "concurrency", "adaptive", "shares", "deny_all"] {
        all.push(Increment { limits: vec![limit(kind)], ..valid.clone() });
    }
    // Limits of other algorithms than that of the counter, with amounts that cannot be added.
    for kind in ["sliding_window", "sliding_log", "token_bucket", "leaky_bucket", "gcra", "fixed_window"] {
        for hits in [i64::MAX, i64::MIN, -1, 0] {
            for age in [0, 1_000, u64::MAX] {
                all.push(Increment { limits: vec![limit(kind)], hits: vec![hits], age_us: vec![age], ..valid.clone() });
            }
        }
    }
    all.push(Increment::default());
    all.iter().map(Message::encode_to_vec).collect()
}

impl Nonsense {
    /// Starts the member with nonsense about counters with these digests.
    fn start(counters: Vec<Vec<u8>>) -> (Self, SocketAddr) {
        let increments = counters.iter().flat_map(|counter| nonsense_for(counter)).collect();
        let (increments, counters) = (Arc::new(increments), Arc::new(counters));
        let this = Self { increments, counters, pulls: Arc::default(), copies: Arc::default() };
        let address = serve(this.clone());
        (this, address)
    }
}

#[tonic::async_trait]
impl ClusterService for Nonsense {
    async fn pull(&self, request: Request<PullRequest>) -> Result<Response<PullResponse>, Status> {
        let request = request.into_inner();
        let hello = PullResponse { origin: NONSENSE_EPOCH, joined: true, ..PullResponse::default() };
        if request.origin != NONSENSE_EPOCH || request.leaving {
            return Ok(Response::new(hello));
        }
        let number = self.pulls.fetch_add(1, Relaxed);
        if number % 47 == 46 {
            return Ok(Response::new(PullResponse { copy_needed: true, ..hello }));
        }
        // The position changes with each answer, so the member goes on even if it rejects an increment.
        let increment = self.increments[number % self.increments.len()].clone().into();
        let now_us = [1_800_000_000_000_000, 0, u64::MAX][number / self.increments.len() % 3];
        let until = request.after.saturating_add(1);
        Ok(Response::new(PullResponse { after: request.after, until, now_us, increments: vec![increment], ..hello }))
    }

    type CopyStream = Pages<CopyPage>;

    async fn copy(&self, _: Request<CopyRequest>) -> Result<Response<Self::CopyStream>, Status> {
        self.copies.fetch_add(1, Relaxed);
        let copy = |counter: &Vec<u8>, state: &[u8], expires_s| CounterCopy {
            counter: counter.clone().into(),
            state: state.to_vec().into(),
            expires_s,
        };
        let unknown = vec![1; 11];
        let mut counters = vec![
            copy(&Vec::new(), b"", 0),
            copy(&vec![2; 300], b"x", u32::MAX),
            copy(&unknown, &[0xff; 8], u32::MAX),
            copy(&vec![3; 11], &[0xff; 100_000], u32::MAX),
            copy(&vec![4; 11], b"", u32::MAX),
            copy(&vec![5; 11], &[0xff; 16], 0),
        ];
        for counter in self.counters.iter() {
            counters.extend([0_usize, 1, 7, 8, 9, 16, 31].map(|length| copy(counter, &vec![0xff; length], u32::MAX)));
        }
        let positions = [0, 1, NONSENSE_EPOCH, u64::MAX];
        let positions = positions.map(|origin| Position { origin, sequence: u64::MAX / 2 }).to_vec();
        // With the time of another clock, the counters would be ignored.
        let now_us = sluicegate::service::Clock::System.now().get();
        let page = CopyPage { origin: u64::MAX, positions, counters, now_us };
        Ok(pages(vec![CopyPage::default(), page.clone(), page]))
    }

    type OverridesStream = Pages<OverridesPage>;

    async fn overrides(&self, _: Request<OverridesRequest>) -> Result<Response<Self::OverridesStream>, Status> {
        let change = |target: &str, after: Option<&str>| OverridesChange {
            version: 1,
            id: target.to_owned(),
            info: "{".to_owned(),
            changes: vec![OverrideChange {
                target: target.to_owned(),
                before: Some("?".to_owned()),
                after: after.map(str::to_owned),
            }],
        };
        let changes = vec![change("", None), change("limit|", Some("{}")), change("rules|candidate", Some("1|{}"))];
        let target = "switch|nothing".to_owned();
        let overrides = vec![StoredOverride { target, version: u64::MAX / 2, text: "\0".to_owned() }];
        let rule_sets = vec![RuleSet { digest: "../../x".to_owned(), text: "%".to_owned() }];
        Ok(pages(vec![OverridesPage { position: u64::MAX, changes, overrides, rule_sets }]))
    }

    async fn activity(&self, _: Request<ActivityRequest>) -> Result<Response<ActivityResponse>, Status> {
        Ok(Response::new(ActivityResponse { report: vec![0x1f; 1 << 20].into() }))
    }
}

/// Returns the digests of all counters of a member.
async fn digests(address: SocketAddr) -> Vec<Vec<u8>> {
    let mut pages = raw_client(address).await.copy(CopyRequest { protocol: 1 }).await.unwrap().into_inner();
    let mut digests = Vec::new();
    while let Some(page) = pages.message().await.unwrap() {
        digests.extend(page.counters.iter().map(|copy| copy.counter.to_vec()));
    }
    digests
}

/// The counters that are named in nonsense have any values. All others are exact, and the service goes on.
#[tokio::test]
async fn a_member_that_answers_nonsense_does_no_harm_to_others() {
    let victims = Members::start(1, RULES).await;
    victims.all[0].take("window", 1).await;
    victims.all[0].take("log", 1).await;
    // The digest of a counter is the same at every member.
    let counters = digests(victims.group.addresses[0]).await;
    assert_eq!(counters.len(), 2);
    drop(victims);
    let (nonsense, address) = Nonsense::start(counters);
    let group = Group::new(2, RULES);
    let peers: Vec<_> = [&group.addresses[..], &[address]].concat().iter().map(ToString::to_string).collect();
    let configure = |_, builder: Builder| builder.set("cluster.peers", &peers.join(","));
    let mut all = Vec::new();
    for member in 0..2 {
        all.push(Member::start(configure(member, group.builder(member))).await);
    }
    let members = Members { group, all };
    assert_exchange(&members, "bucket").await;
    // In each round with another clock.
    let round = nonsense.increments.len();
    let pulls = || nonsense.pulls.load(Relaxed);
    for rounds in 1..=3 {
        wait_for("all nonsense to be sent", || (pulls() > rounds * round).then_some(()));
        assert_exchange(&members, "bucket").await;
        for key in ["window", "log"] {
            let answer = members.all[0].check(hits_of(key, 1)).await;
            assert_eq!(answer.0.statuses.len(), 1, "{key}");
        }
    }
    assert!(nonsense.copies.load(Relaxed) > 0);
    members.assert_no_panic();
}

/// Writes a certificate of an authority for these names and returns the settings of a member that uses it.
fn with_certificate(builder: Builder, files: &Files, authority: &Authority, trusted: &str, names: &[&str]) -> Builder {
    let (certificate, key) = authority.sign_for(names);
    let prefix = files.path("").read_dir().unwrap().count();
    builder
        .set("cluster.allow_plaintext", "false")
        .set("cluster.tls.cert_file", &files.write(&format!("{prefix}.cert.pem"), &certificate))
        .set("cluster.tls.key_file", &files.write(&format!("{prefix}.key.pem"), &key))
        .set("cluster.tls.ca_file", &files.write("ca.pem", trusted))
}

/// Pulls with a certificate, or without one.
async fn call(address: SocketAddr, trusted: &Authority, identity: Option<(String, String)>) -> Result<u64, String> {
    let mut tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&trusted.pem)).domain_name("peers.test");
    if let Some((certificate, key)) = identity {
        tls = tls.identity(Identity::from_pem(certificate, key));
    }
    let channel = endpoint(address, "https").tls_config(tls).unwrap().connect().await;
    let mut client = ClusterServiceClient::new(channel.map_err(|error| error.to_string())?);
    let request = PullRequest { leaving: true, ..pull(0, 0) };
    client.pull(request).await.map(|answer| answer.into_inner().origin).map_err(|status| status.to_string())
}

#[tokio::test]
async fn members_need_a_certificate_of_their_authority() {
    let (authority, foreign) = (Authority::new("members"), Authority::new("strangers"));
    let files = Files::new();
    let names = ["127.0.0.1", "peers.test"];
    let members = Members::of(Group::new(2, RULES), |_, builder| {
        with_certificate(builder, &files, &authority, &authority.pem, &names)
    })
    .await;
    assert_exchange(&members, "window").await;
    let address = members.group.addresses[0];
    assert!(call(address, &authority, Some(authority.sign_for(&["any.test"]))).await.is_ok());
    assert!(call(address, &authority, None).await.is_err());
    assert!(call(address, &authority, Some(foreign.sign_for(&names))).await.is_err());
    let plain = ClusterServiceClient::connect(endpoint(address, "http")).await;
    if let Ok(mut client) = plain {
        assert!(client.pull(pull(0, 0)).await.is_err(), "plain text is rejected");
    }
    // A member with a foreign certificate is not followed, and does not receive hits.
    let stranger_address = free_address();
    let group = Group::at([&members.group.addresses[..], &[stranger_address]].concat(), RULES);
    let strangers = Files::new();
    let trusts_all = [&authority.pem[..], &foreign.pem].concat();
    let stranger = Member::start(with_certificate(group.builder(2), &strangers, &foreign, &trusts_all, &names)).await;
    assert_eq!(stranger.remaining("window").await, 1_000);
    let aware = Member::start(
        with_certificate(group.builder(0), &files, &authority, &authority.pem, &names)
            .set("cluster.addr", &free_address().to_string()),
    )
    .await;
    stranger.take("window", 100).await;
    assert_exchange(&members, "window").await;
    aware.wait_for_remaining("window", members.all[0].remaining("window").await).await;
    let log = aware.server.log();
    let line = log.lines().find(|line| line.contains("peer unavailable")).unwrap_or_else(|| panic!("{log}"));
    assert!(line.contains(&stranger_address.to_string()), "{line}");
    assert_eq!(members.all[0].remaining("window").await, 1_000 - 8);
    assert_eq!(stranger.remaining("window").await, 900);
}

#[tokio::test]
async fn certificates_of_members_need_the_server_name() {
    let authority = Authority::new("members");
    let files = Files::new();
    // The certificates do not contain the addresses.
    let configure = |_, builder| {
        with_certificate(builder, &files, &authority, &authority.pem, &["peers.test"])
            .set("cluster.tls.server_name", "peers.test")
    };
    let members = Members::of(Group::new(2, RULES), configure).await;
    assert_exchange(&members, "window").await;
    let address = members.group.addresses[1];
    assert!(call(address, &authority, Some(authority.sign_for(&["peers.test"]))).await.is_ok());
    assert!(call(address, &authority, Some(authority.sign_for(&["other.test"]))).await.is_err());
    assert_exchange(&members, "window").await;
}

/// A member is known from its own calls before its name is resolved, and its certificate contains only the name.
#[tokio::test]
async fn a_member_that_calls_is_verified_with_the_configured_name() {
    let (authority, files, port) = (Authority::new("members"), Files::new(), free_port());
    let [first, second] = [2, 1].map(|last| SocketAddr::from(([127, 0, 0, last], port)));
    let group = Group::at(vec![first, second], RULES);
    let (one_name, both_names) = ("127.0.0.2 members.test\n", "127.0.0.2 members.test\n127.0.0.1 members.test\n");
    let (seen_by_first, seen_by_second) = (files.write("first", one_name), files.write("second", both_names));
    let start = async |member, hosts: &str| {
        let builder = with_certificate(group.builder(member), &files, &authority, &authority.pem, &["members.test"]);
        Member::start(builder.set("cluster.peers", "members.test").hosts(Path::new(hosts))).await
    };
    let one = start(0, &seen_by_first).await;
    // Calls on this machine come from 127.0.0.1, so the first member calls the second one back.
    let other = start(1, &seen_by_second).await;
    other.wait_for_peers(1);
    one.wait_for_peers(1);
    other.take("window", 10).await;
    one.wait_for_remaining("window", 990).await;
    files.write("first", both_names);
    other.take("window", 10).await;
    one.wait_for_remaining("window", 980).await;
    assert!(!one.server.log().contains("peer unavailable"), "{}", one.server.log());
}

/// Listeners and new connections use the new certificates.
#[tokio::test]
async fn certificates_of_members_are_reloaded() {
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let files = Files::new();
    let group = Group::new(2, RULES);
    let write = |authority: &Authority| {
        let (certificate, key) = authority.sign();
        files.write("cert.pem", &certificate);
        files.write("key.pem", &key);
        files.write("ca.pem", &authority.pem);
    };
    let configure = |_: usize, builder: Builder| {
        let file = |name: &str| files.path(name).display().to_string();
        builder
            .set("cluster.allow_plaintext", "false")
            .set("cluster.tls.cert_file", &file("cert.pem"))
            .set("cluster.tls.key_file", &file("key.pem"))
            .set("cluster.tls.ca_file", &file("ca.pem"))
    };
    write(&old);
    let mut members = Members::of(group, configure).await;
    assert_exchange(&members, "window").await;
    write(&new);
    wait_for("the certificates to be reloaded", || {
        members.all.iter().all(|member| member.server.log().contains("certificates reloaded")).then_some(())
    });
    let builder = configure(1, members.group.builder(1));
    members.all.remove(1).stop().await;
    members.all.push(Member::start(builder).await);
    members.wait_until_connected();
    assert_eq!(members.all[1].remaining("window").await, members.all[0].remaining("window").await);
    assert_exchange(&members, "window").await;
}

/// Returns the error output of a service that does not start with these settings.
fn startup_error(settings: &[(&str, &str)]) -> String {
    let mut command = command();
    command.args(["serve", "--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0"]).stderr(Stdio::piped());
    for (name, value) in settings {
        command.env(format!("SLUICEGATE__CLUSTER__{name}"), value);
    }
    let mut child = command.spawn().unwrap();
    let status = wait_for("the service to exit", || child.try_wait().unwrap());
    let mut error = String::new();
    child.stderr.unwrap().read_to_string(&mut error).unwrap();
    assert!(!status.success(), "{error}");
    error
}

#[test]
fn invalid_settings_are_rejected() {
    let address = free_address().to_string();
    let peers = ("PEERS", "127.0.0.1:1");
    let plaintext = ("ALLOW_PLAINTEXT", "true");
    let files = "cluster.peers needs cluster.tls.cert_file, cluster.tls.key_file and cluster.tls.ca_file";
    for settings in [
        &[peers][..],
        &[peers, ("TLS__CERT_FILE", "x"), plaintext],
        &[peers, ("TLS__CERT_FILE", "x"), ("TLS__KEY_FILE", "x")],
        &[peers, ("TLS__SERVER_NAME", "x"), plaintext],
    ] {
        let error = startup_error(settings);
        assert!(error.contains(files), "{settings:?}: {error}");
    }
    for sync in ["0s", "1ms", "1h"] {
        let error = startup_error(&[peers, plaintext, ("SYNC", sync)]);
        assert!(error.contains("cluster.sync must be between 10ms and 10s"), "{sync}: {error}");
    }
    let missing = [
        peers,
        ("ADDR", address.as_str()),
        ("TLS__CERT_FILE", "/missing.pem"),
        ("TLS__KEY_FILE", "/m"),
        ("TLS__CA_FILE", "/m"),
    ];
    let error = startup_error(&missing);
    assert!(error.contains("cannot configure TLS for other instances") && error.contains("/missing.pem"), "{error}");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let used = listener.local_addr().unwrap().to_string();
    let error = startup_error(&[peers, plaintext, ("ADDR", used.as_str())]);
    assert!(error.contains("cannot listen on"), "{error}");
}
