//! A member that lies: it has everything that a member needs, and sends what no member sends.

use std::{
    net::SocketAddr,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use prost::Message as _;
use sha2::{Digest as _, Sha256};
use sluicegate_proto::sluicegate::cluster::v1::{
    ActivityRequest, ActivityResponse, CopyPage, CopyRequest, CounterCopy, Increment, OverrideChange, OverridesChange,
    OverridesPage, OverridesRequest, Position, PullRequest, PullResponse, RuleSet, StoredOverride,
    cluster_service_client::ClusterServiceClient, cluster_service_server::ClusterService,
};
use tokio_stream::StreamExt as _;
use tonic::{Request, Response, Status, transport::Channel};

use crate::{
    cluster::{
        foreign_member::{Pages, serve},
        members::{Group, Member, Members, hits_of},
    },
    support::{
        DEADLINE, Operator, descriptor,
        http2_frames::{ACK, DATA, END_HEADERS, END_STREAM, Frames, HEADERS, PING, SETTINGS, call_headers, frame},
        operator::OPERATE,
        raw_client, raw_grpc, request_for,
        server::Builder,
        wait_for, wait_for_async,
    },
};

const RULES: &str = "
domain: d
descriptors:
- key: window
  rate_limit: {unit: year, requests_per_unit: 1000}
- key: user
  rate_limit: {unit: year, requests_per_unit: 2000}
";
const EPOCH: u64 = 0x1a1;
/// Growth of the memory of a process that no lie may exceed. Most of the lies of one test have more bytes.
const MAX_GROWTH: u64 = 256 << 20;

/// Returns an endless or finite sequence of pages.
type MakePages<T> = Arc<dyn Fn() -> Pages<T> + Send + Sync>;

/// A lying member.
#[derive(Clone)]
struct Liar {
    /// Epoch that the member claims.
    epoch: Arc<AtomicU64>,
    /// Whether each answer has another epoch.
    changes_epoch: bool,
    /// Whether each answer requests a copy of the counters.
    needs_copy: bool,
    /// Whether an answer without increments takes half a second.
    waits: bool,
    position: u64,
    /// Encoded increments of each answer to a pull.
    increments: Vec<Bytes>,
    copy: MakePages<CopyPage>,
    overrides: MakePages<OverridesPage>,
    pulls: Arc<AtomicUsize>,
    exchanges: Arc<AtomicUsize>,
}

impl Liar {
    /// A member without hits and overrides.
    fn new() -> Self {
        Self {
            epoch: Arc::new(AtomicU64::new(EPOCH)),
            changes_epoch: false,
            needs_copy: false,
            waits: true,
            position: 1,
            increments: Vec::new(),
            copy: Arc::new(|| all(vec![CopyPage { origin: EPOCH, now_us: now(), ..CopyPage::default() }])),
            overrides: Arc::new(|| all(vec![OverridesPage { position: 1, ..OverridesPage::default() }])),
            pulls: Arc::default(),
            exchanges: Arc::default(),
        }
    }

    /// A member with these overrides.
    fn with_overrides(page: OverridesPage) -> Self {
        let overrides: MakePages<OverridesPage> = Arc::new(move || all(vec![page.clone()]));
        Self { overrides, ..Self::new() }
    }
}

#[tonic::async_trait]
impl ClusterService for Liar {
    async fn pull(&self, request: Request<PullRequest>) -> Result<Response<PullResponse>, Status> {
        let request = request.into_inner();
        self.pulls.fetch_add(1, Relaxed);
        let origin = if self.changes_epoch { self.epoch.fetch_add(1, Relaxed) } else { self.epoch.load(Relaxed) };
        let hello = PullResponse { origin, joined: true, overrides_position: self.position, ..PullResponse::default() };
        if request.origin != origin {
            return Ok(Response::new(hello));
        }
        if self.needs_copy {
            return Ok(Response::new(PullResponse { copy_needed: true, ..hello }));
        }
        if self.increments.is_empty() {
            if self.waits {
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
            return Ok(Response::new(hello));
        }
        let (after, increments) = (request.after, self.increments.clone());
        Ok(Response::new(PullResponse { after, until: after + 1, now_us: now(), increments, ..hello }))
    }

    type CopyStream = Pages<CopyPage>;

    async fn copy(&self, _: Request<CopyRequest>) -> Result<Response<Self::CopyStream>, Status> {
        Ok(Response::new((self.copy)()))
    }

    type OverridesStream = Pages<OverridesPage>;

    async fn overrides(&self, _: Request<OverridesRequest>) -> Result<Response<Self::OverridesStream>, Status> {
        self.exchanges.fetch_add(1, Relaxed);
        Ok(Response::new((self.overrides)()))
    }

    async fn activity(&self, _: Request<ActivityRequest>) -> Result<Response<ActivityResponse>, Status> {
        Err(Status::unimplemented("members of earlier versions have no activity"))
    }
}

fn now() -> u64 {
    sluicegate::service::Clock::System.now().get()
}

fn all<T: Send + 'static>(pages: Vec<T>) -> Pages<T> {
    Box::pin(tokio_stream::iter(pages.into_iter().map(Ok)))
}

/// Returns pages without an end.
fn endless<T: Send + 'static>(mut next: impl FnMut(u64) -> T + Send + 'static) -> Pages<T> {
    let mut number = 0;
    Box::pin(tokio_stream::iter(std::iter::from_fn(move || {
        number += 1;
        Some(Ok(next(number)))
    })))
}

/// Returns a builder for a member with these peers besides itself.
fn member_with(group: &Group, member: usize, peers: &[SocketAddr]) -> Builder {
    let own = group.addresses[member];
    let peers: Vec<_> = peers.iter().chain([&own]).map(ToString::to_string).collect();
    group.builder(member).set("cluster.peers", &peers.join(","))
}

fn violations(member: &crate::support::Server, kind: &str) -> f64 {
    member.metric(&format!(r#"sluicegate_cluster_violations_total{{kind="{kind}"}}"#))
}

fn wait_for_violation(member: &crate::support::Server, kind: &str) {
    wait_for(&format!("a violation of the kind {kind}"), || (violations(member, kind) > 0.0).then_some(()));
}

/// Waits for a violation that excludes the member. It is logged after it was counted.
fn wait_for_exclusion(member: &crate::support::Server, kind: &str) {
    wait_for_violation(member, kind);
    wait_for("the violation to be logged", || member.log().contains("peer breaks the protocol").then_some(()));
}

/// Waits until a member has this limit for a user.
async fn wait_for_limit(member: &Operator, user: &str, expected: u32) {
    wait_for_async(&format!("the limit {expected} of {user}"), async || {
        let answer = member.server.client().await.check(request_for("d", &[("user", user)])).await.unwrap();
        let limit = answer.0.statuses[0].current_limit.as_ref()?.requests_per_unit;
        (limit == expected).then_some(())
    })
    .await;
}

async fn remaining(member: &Operator, key: &str) -> u32 {
    member.server.client().await.check(hits_of(key, 0)).await.unwrap().remaining().unwrap()
}

/// Asserts that the memory of a process has not grown by more than [`MAX_GROWTH`] at any time until the condition holds.
fn watch_memory(member: &crate::support::Server, what: &str, mut condition: impl FnMut() -> bool) {
    let before = member.resident_memory();
    wait_for(what, || {
        let grown = member.resident_memory().saturating_sub(before);
        assert!(grown < MAX_GROWTH, "{what}: {grown} bytes");
        condition().then_some(())
    });
}

fn text(value: &str) -> String {
    format!(r#"{{"w":"{value}","a":"eve","t":1}}"#)
}

fn change_to(version: u64, target: &str, value: &str) -> OverridesChange {
    let after = Some(text(value));
    let changes = vec![OverrideChange { target: target.to_owned(), before: None, after }];
    OverridesChange { version, id: format!("{target} {version}"), info: "{}".to_owned(), changes }
}

/// A newcomer asks liars for a copy of their counters, which has no end, and an honest member.
#[tokio::test]
async fn endless_copies_do_not_keep_a_newcomer_from_the_hits_of_others() {
    let counters = |number: u64| {
        let copy = |index: u64| CounterCopy {
            counter: [&number.to_be_bytes()[..], &index.to_be_bytes()[5..]].concat().into(),
            state: vec![1; 8].into(),
            expires_s: u32::MAX,
        };
        let positions = if number == 1 { vec![Position { origin: EPOCH, sequence: 1 }] } else { Vec::new() };
        let now_us = if number == 1 { now() } else { 0 };
        CopyPage { origin: EPOCH, positions, now_us, counters: (0..10_000).map(copy).collect() }
    };
    let empty = |_| CopyPage { now_us: now(), ..CopyPage::default() };
    let slow = move || -> Pages<CopyPage> { Box::pin(endless(counters).throttle(Duration::from_secs(2))) };
    let copies: [MakePages<CopyPage>; 3] =
        [Arc::new(move || endless(counters)), Arc::new(move || endless(empty)), Arc::new(slow)];
    for copy in copies {
        let group = Group::new(2, RULES);
        let honest = Member::start(member_with(&group, 0, &[])).await;
        honest.take("window", 135).await;
        let liar = serve(Liar { copy, needs_copy: true, ..Liar::new() });
        let builder = member_with(&group, 1, &[liar, group.addresses[0]]).set("memory.max_counters", "200000");
        let newcomer = Member::start(builder).await;
        newcomer.wait_for_remaining("window", 865).await;
        honest.take("window", 1).await;
        newcomer.wait_for_remaining("window", 864).await;
        wait_for_exclusion(&newcomer.server, "copy");
        assert!(newcomer.server.resident_memory() < MAX_GROWTH);
        let log = newcomer.server.log();
        assert!(!log.contains("panicked"), "{log}");
    }
}

/// Starts two honest members and a liar in their settings. The third honest member does not know the liar.
struct Attacked {
    /// The first two follow the liar, the third one only the first two.
    all: Vec<Operator>,
}

impl Attacked {
    async fn start(liar: SocketAddr, configure: impl Fn(usize, Builder) -> Builder) -> Self {
        let group = Group::new(3, RULES);
        let addresses = &group.addresses;
        let peers = [
            vec![liar, addresses[1], addresses[2]],
            vec![liar, addresses[0], addresses[2]],
            vec![addresses[0], addresses[1]],
        ];
        let start = |member: usize| Operator::with(configure(member, member_with(&group, member, &peers[member])));
        let all = (0..3).map(start).collect();
        Self { all }
    }

    /// Asserts that each member counts the hits of all, and gets the changes that operators make at each.
    async fn assert_exchange(&self) {
        for (number, member) in self.all.iter().enumerate() {
            let before = remaining(member, "window").await;
            let answer = member.server.client().await.check(hits_of("window", 2)).await.unwrap();
            assert!(answer.allowed());
            let limit = 10 + number as u32;
            member.ctl(&["limit", "set", "d", "user=bob", &format!("{limit}/year")]);
            for other in &self.all {
                wait_for_limit(other, "bob", limit).await;
                wait_for_async("the hits of all members", async || {
                    (remaining(other, "window").await <= before - 2).then_some(())
                })
                .await;
            }
        }
        for member in &self.all {
            let log = member.server.log();
            assert!(!log.contains("panicked"), "{log}");
        }
    }
}

#[tokio::test]
async fn a_change_of_an_operator_reaches_all_members_after_the_highest_version() {
    for version in [(1 << 53) - 1, 1 << 53, u64::MAX, (1 << 40) + now() / 1_000, (1 << 52) - 1] {
        let page = OverridesPage {
            position: 9,
            changes: vec![change_to(version, "limit|d|user=bob", "6/year")],
            overrides: vec![StoredOverride { target: "limit|d|user=eve".into(), version, text: text("6/year") }],
            rule_sets: Vec::new(),
        };
        let liar = Liar::with_overrides(page);
        let exchanges = Arc::clone(&liar.exchanges);
        let attacked = Attacked::start(serve(liar), |_, builder| builder).await;
        wait_for("the lies to be sent to both members", || (exchanges.load(Relaxed) >= 2).then_some(()));
        attacked.assert_exchange().await;
        if version > 1 << 50 {
            let log = attacked.all[0].server.log();
            assert!(log.contains("ignored overrides of a peer"), "{version}: {log}");
            assert!(violations(&attacked.all[0].server, "version") >= 2.0);
        }
    }
}

#[tokio::test]
async fn pages_of_overrides_without_an_end_are_bounded() {
    let sent = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&sent);
    let many = move || -> Pages<OverridesPage> {
        let sent = Arc::clone(&count);
        let pages = endless(move |page| {
            sent.fetch_add(1, Relaxed);
            let one = |index: u64| StoredOverride {
                target: format!("limit|d|user={page}-{index}-{}", "x".repeat(500)),
                version: 1,
                text: text("5/year").replace("eve", &format!("eve{page}-{index}")),
            };
            OverridesPage { position: 9, overrides: (0..100).map(one).collect(), ..OverridesPage::default() }
        });
        // Honest members send all these overrides to each other, at 4 MB/s. With more of them, a change would need longer
        // than a test waits.
        let mut number = 0;
        Box::pin(pages.then(move |page| {
            number += 1;
            let pause = if number > 650 { Duration::from_millis(200) } else { Duration::ZERO };
            async move {
                tokio::time::sleep(pause).await;
                page
            }
        }))
    };
    let liar = Liar { overrides: Arc::new(many), ..Liar::new() };
    let attacked = Attacked::start(serve(liar), |_, builder| builder).await;
    // One page has 60 kB, and a member sends at most 32 MB at once.
    watch_memory(&attacked.all[0].server, "many pages", || sent.load(Relaxed) > 1_200);
    attacked.assert_exchange().await;
    watch_memory(&attacked.all[0].server, "more pages", || sent.load(Relaxed) > 1_400);
}

/// A member sends the pages that it has, no empty one after them, and not millions of small ones.
#[tokio::test]
async fn empty_pages_and_too_many_pages_of_overrides_are_violations() {
    let empty = || -> Pages<OverridesPage> {
        let pages = all(vec![OverridesPage { position: 9, ..OverridesPage::default() }; 2]);
        Box::pin(pages.chain(tokio_stream::pending()))
    };
    let small = || {
        endless(|_| OverridesPage {
            position: 9,
            overrides: vec![StoredOverride::default()],
            ..OverridesPage::default()
        })
    };
    let all: [MakePages<OverridesPage>; 2] = [Arc::new(empty), Arc::new(small)];
    for overrides in all {
        let liar = Liar { overrides, ..Liar::new() };
        let attacked = Attacked::start(serve(liar), |_, builder| builder).await;
        wait_for_violation(&attacked.all[0].server, "overrides");
        attacked.assert_exchange().await;
    }
}

/// Of a member, 1,000 changes are merged immediately, and 50 in each further second.
#[tokio::test]
async fn many_changes_of_a_member_are_merged_slowly() {
    let invalid = OverridesChange { version: u64::MAX, ..OverridesChange::default() };
    let page = OverridesPage { position: 9, changes: vec![invalid; 750], ..OverridesPage::default() };
    let valid = StoredOverride { target: "limit|d|user=eve".into(), version: 1, text: text("6/year") };
    let last = OverridesPage { overrides: vec![valid], ..page.clone() };
    let overrides: MakePages<OverridesPage> = Arc::new(move || all(vec![page.clone(), last.clone()]));
    let start = Instant::now();
    let attacked = Attacked::start(serve(Liar { overrides, ..Liar::new() }), |_, builder| builder).await;
    wait_for_limit(&attacked.all[0], "eve", 6).await;
    let seconds = start.elapsed().as_secs();
    assert!(seconds >= 10, "{seconds} s");
    attacked.assert_exchange().await;
}

/// A member answers each pull immediately, without hits.
#[tokio::test]
async fn a_member_without_news_is_not_called_all_the_time() {
    let liar = Liar { waits: false, ..Liar::new() };
    let pulls = Arc::clone(&liar.pulls);
    let attacked = Attacked::start(serve(liar), |_, builder| builder).await;
    let called = |count: usize| wait_for("the liar to be called", || (pulls.load(Relaxed) >= count).then_some(()));
    called(10);
    let start = Instant::now();
    let before = pulls.load(Relaxed);
    called(before + 100);
    let seconds = start.elapsed().as_secs_f64();
    // Two members, each at most ten times a second.
    assert!(seconds > 3.0, "100 calls in {seconds} s");
    attacked.assert_exchange().await;
}

#[tokio::test]
async fn overrides_that_no_operator_could_set_take_no_memory() {
    let long = text(&"x".repeat(490_000));
    let page = move |number: u64| {
        let one = |index: u64| StoredOverride {
            target: format!("limit|d|user={number}-{index}"),
            version: 1,
            text: long.clone(),
        };
        OverridesPage { position: 9, overrides: (0..30).map(one).collect(), ..OverridesPage::default() }
    };
    let sent = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&sent);
    let pages = move || {
        let (page, sent) = (page.clone(), Arc::clone(&count));
        endless(move |number| {
            sent.fetch_add(1, Relaxed);
            page(number)
        })
    };
    let liar = Liar { overrides: Arc::new(pages), ..Liar::new() };
    let folder = tempfile::tempdir().unwrap();
    let file = |member: usize| folder.path().join(member.to_string()).display().to_string();
    let attacked = Attacked::start(serve(liar), |member, builder| builder.set("overrides.file", &file(member))).await;
    watch_memory(&attacked.all[0].server, "many pages", || violations(&attacked.all[0].server, "override") > 100.0);
    attacked.assert_exchange().await;
    let journal = std::fs::metadata(file(0)).unwrap().len();
    assert!(journal < 100_000, "{journal} bytes for {} pages", sent.load(Relaxed));
}

#[tokio::test]
async fn a_member_that_sends_malformed_increments_is_left_alone() {
    let valid = Increment { counters: vec![7; 11].into(), hits: vec![1], age_us: vec![0], ..Increment::default() };
    let malformed = [
        Increment { hits: vec![1, 2], ..valid.clone() }.encode_to_vec(),
        Increment { age_us: Vec::new(), ..valid.clone() }.encode_to_vec(),
        Increment { limit: vec![0, 0], ..valid.clone() }.encode_to_vec(),
        Increment { counters: vec![7; 5].into(), ..valid }.encode_to_vec(),
        vec![0xff; 100],
    ];
    let liars = malformed.map(|increment| serve(Liar { increments: vec![increment.into()], ..Liar::new() }));
    let group = Group::new(2, RULES);
    let honest = Member::start(member_with(&group, 0, &[])).await;
    let victim = Member::start(member_with(&group, 1, &[&liars[..], &group.addresses[..1]].concat())).await;
    wait_for("all violations", || (violations(&victim.server, "message") == 5.0).then_some(()));
    let log = victim.server.log();
    for liar in liars {
        let named = |line: &&str| line.contains("peer breaks the protocol") && line.contains(&liar.to_string());
        assert_eq!(log.lines().filter(named).count(), 1, "{log}");
    }
    honest.take("window", 1).await;
    victim.wait_for_remaining("window", 999).await;
}

/// Items without contents have two bytes on the wire, and a hundred times as many in memory.
#[tokio::test]
async fn messages_with_millions_of_empty_items_are_rejected() {
    let limits = Bytes::from([0x1a, 0].repeat(4 << 20));
    let group = Group::new(2, RULES);
    let honest = Member::start(member_with(&group, 0, &[])).await;
    for liar in [
        Liar { increments: vec![limits], ..Liar::new() },
        Liar { increments: vec![Bytes::new(); 4 << 20], ..Liar::new() },
        Liar::with_overrides(OverridesPage {
            overrides: vec![StoredOverride::default(); 4 << 20],
            ..Default::default()
        }),
        Liar::with_overrides(OverridesPage {
            changes: vec![OverridesChange {
                changes: vec![OverrideChange::default(); 4 << 20],
                ..OverridesChange::default()
            }],
            ..OverridesPage::default()
        }),
    ] {
        let address = serve(liar);
        let victim = Member::start(member_with(&group, 1, &[address, group.addresses[0]])).await;
        watch_memory(&victim.server, "the violation", || violations(&victim.server, "message") > 0.0);
        let log = victim.server.log();
        let named = |line: &&str| line.contains("peer breaks the protocol") && line.contains(&address.to_string());
        assert_eq!(log.lines().filter(named).count(), 1, "{log}");
        // The honest member is followed.
        let before = honest.remaining("window").await;
        honest.take("window", 1).await;
        victim.wait_for_remaining("window", before - 1).await;
        assert_eq!(violations(&victim.server, "message"), 1.0, "the liar is left alone");
    }
}

/// Answers to pulls with an increment that only has an unknown field. The maximum is 16 MiB.
#[tokio::test]
async fn answers_have_a_maximum_size() {
    let group = Group::new(1, RULES);
    for (bytes, is_accepted) in [(15 << 20, true), (17 << 20, false)] {
        let liar = Liar { increments: vec![raw_grpc::field(15, &vec![0; bytes]).into()], ..Liar::new() };
        let pulls = Arc::clone(&liar.pulls);
        let victim = Member::start(member_with(&group, 0, &[serve(liar)])).await;
        if is_accepted {
            // The first answer has no increments.
            wait_for("two answers to be accepted", || (pulls.load(Relaxed) > 3).then_some(()));
            assert_eq!(violations(&victim.server, "message"), 0.0);
        } else {
            wait_for_exclusion(&victim.server, "message");
        }
    }
}

fn rule_set(rules: &str) -> RuleSet {
    let text = serde_json::to_string(&[("d.yaml", rules)]).unwrap();
    let digest = Sha256::digest(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
    RuleSet { digest, text }
}

fn file_count(folder: &Path) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

/// A rule set under the digest of another one, and thousands that no override names.
#[tokio::test]
async fn rule_sets_are_in_force_only_under_their_digests() {
    let open = rule_set("domain: d\ndescriptors: [{key: window, rate_limit: {unlimited: true}}]\n");
    let strict = rule_set("domain: d\ndescriptors: [{key: window, rate_limit: {unit: year, requests_per_unit: 7}}]\n");
    let lie = RuleSet { digest: strict.digest.clone(), text: open.text };
    let mut rule_sets = vec![lie];
    for number in 0..999 {
        rule_sets.push(rule_set(&format!("# {number}\n")));
    }
    for name in ["new", "../../x", ""] {
        rule_sets.push(RuleSet { digest: name.to_owned(), text: strict.text.clone() });
    }
    rule_sets.truncate(1_000);
    let pages = move || {
        let named = OverridesPage {
            position: 9,
            changes: vec![change_to(1, "rules|in_force", &strict.digest)],
            ..OverridesPage::default()
        };
        let sets = OverridesPage { position: 9, rule_sets: rule_sets.clone(), ..OverridesPage::default() };
        all(vec![sets.clone(), sets.clone(), sets, named])
    };
    let liar = Liar { overrides: Arc::new(pages), ..Liar::new() };
    let folders = [0; 3].map(|_| tempfile::tempdir().unwrap());
    let attacked = Attacked::start(serve(liar), |member, builder| {
        builder.set("overrides.file", &folders[member].path().join("overrides").display().to_string())
    })
    .await;
    wait_for_violation(&attacked.all[0].server, "rule_set");
    attacked.assert_exchange().await;
    for (member, folder) in attacked.all.iter().zip(&folders) {
        assert!(file_count(folder.path()) <= 2, "{:?}", std::fs::read_dir(folder.path()).unwrap().collect::<Vec<_>>());
        let client = member.server.client().await;
        let answer = client.check(hits_of("window", 0)).await.unwrap();
        assert_eq!(answer.0.statuses[0].current_limit.as_ref().unwrap().requests_per_unit, 1_000);
    }
}

async fn raw_client(address: SocketAddr) -> ClusterServiceClient<Channel> {
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{address}")).unwrap().timeout(DEADLINE);
    ClusterServiceClient::new(endpoint.connect().await.unwrap())
}

#[tokio::test]
async fn a_caller_cannot_fill_the_table_of_members() {
    let members = Members::start(2, RULES).await;
    let mut client = raw_client(members.group.addresses[0]).await;
    for port in 1..=3_000 {
        let request = PullRequest { protocol: 1, subscriber: 7 + u64::from(port), port, ..PullRequest::default() };
        client.pull(request).await.unwrap();
    }
    let server = &members.all[0].server;
    assert!(violations(server, "address") > 2_900.0);
    let peers = server.get("/metrics").matches("sluicegate_cluster_peer_lag_seconds{").count();
    assert!(peers <= 10, "{peers} peers");
    let log = server.log();
    assert_eq!(log.matches("ignored the address of a peer").count(), 1, "{log}");
    for member in &members.all {
        let before = member.remaining("window").await;
        member.take("window", 2).await;
        members.wait_for_remaining("window", before - 2).await;
    }
}

/// A liar answers with the epoch of an honest member, which then seems to be at two addresses.
#[tokio::test]
async fn a_stolen_epoch_does_not_stop_the_changes_of_its_owner() {
    let group = Group::new(2, RULES);
    let honest = Operator::with(member_with(&group, 0, &[]));
    let hello = raw_client(group.addresses[0]).await.pull(PullRequest { protocol: 1, ..PullRequest::default() }).await;
    let liar = Liar { epoch: Arc::new(AtomicU64::new(hello.unwrap().into_inner().origin)), ..Liar::new() };
    let pulls = Arc::clone(&liar.pulls);
    let victim = Operator::with(member_with(&group, 1, &[serve(liar)]));
    wait_for("the liar to be followed", || (pulls.load(Relaxed) >= 3).then_some(()));
    // The honest member becomes known by its calls.
    let caller =
        PullRequest { protocol: 1, subscriber: 99, port: group.addresses[0].port().into(), ..PullRequest::default() };
    raw_client(group.addresses[1]).await.pull(caller).await.unwrap();
    honest.ctl(&["limit", "set", "d", "user=bob", "12/year"]);
    wait_for_limit(&victim, "bob", 12).await;
}

#[tokio::test]
async fn a_member_whose_epoch_changes_all_the_time_is_left_alone() {
    let liar = Liar { changes_epoch: true, ..Liar::new() };
    let pulls = Arc::clone(&liar.pulls);
    let attacked = Attacked::start(serve(liar), |_, builder| builder).await;
    wait_for_violation(&attacked.all[0].server, "epoch");
    wait_for_violation(&attacked.all[1].server, "epoch");
    let before = pulls.load(Relaxed);
    attacked.assert_exchange().await;
    assert!(pulls.load(Relaxed) < before + 5, "{} pulls", pulls.load(Relaxed) - before);
}

/// Pulls of 16 MiB that are never finished.
#[tokio::test]
async fn unfinished_requests_take_no_memory() {
    let members = Members::start(2, RULES).await;
    let server = &members.all[0].server;
    let before = server.resident_memory();
    let mut open = Vec::new();
    for _ in 0..128 {
        let stream = tokio::net::TcpStream::connect(members.group.addresses[0]).await.unwrap();
        let (mut client, connection) = h2::client::handshake(stream).await.unwrap();
        let connection = tokio::spawn(async move { drop(connection.await) });
        let request = http::Request::post("http://member/sluicegate.cluster.v1.ClusterService/Pull")
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(())
            .unwrap();
        let (response, mut body) = client.send_request(request, false).unwrap();
        // A message of 16 MiB, of which one byte is missing.
        let sending = async move {
            let mut bytes = vec![0; 5 + (16 << 20) - 1];
            bytes[1..5].copy_from_slice(&(16_u32 << 20).to_be_bytes());
            let mut rest = Bytes::from(bytes);
            while !rest.is_empty() {
                body.reserve_capacity(rest.len().min(1 << 20));
                let Some(Ok(capacity)) = std::future::poll_fn(|context| body.poll_capacity(context)).await else {
                    break;
                };
                if capacity > 0 && body.send_data(rest.split_to(capacity.min(rest.len())), false).is_err() {
                    break;
                }
            }
            body
        };
        // The request is rejected, or its bytes are not accepted.
        let sent = tokio::time::timeout(Duration::from_millis(200), sending).await;
        open.push((client, connection, response, sent));
    }
    let grown = server.resident_memory().saturating_sub(before);
    assert!(grown < 100 << 20, "{grown} bytes for {} requests", open.len());
    for member in &members.all {
        let before = member.remaining("window").await;
        member.take("window", 2).await;
        members.wait_for_remaining("window", before - 2).await;
    }
    members.assert_no_panic();
}

/// Sets the limits of 500 descriptors with targets of 4,000 bytes.
fn set_long_overrides(member: &Operator) {
    for call in 0..5 {
        let change = |number: u32| {
            let value = |key: &str| format!("{call}-{number}-{key}{}", "x".repeat(980));
            let entry = |key: &str| serde_json::json!({ "key": key, "value": value(key) });
            let entries = ["user", "a", "b", "c"].map(entry);
            let target = serde_json::json!({ "limit": { "domain": "d", "entries": entries } });
            serde_json::json!({ "target": target, "value": "5/year" })
        };
        let body = serde_json::json!({ "changes": (0..100).map(change).collect::<Vec<_>>() });
        let (code, answer) = member.call(OPERATE, "PutOverrides", &body.to_string());
        assert_eq!(code, 200, "{answer}");
    }
}

/// Calls a method 30 times on one connection, without a window for the answers. Returns when the member has received
/// the calls, or has closed the connection.
async fn call_without_window(address: SocketAddr, method: &str) -> Frames {
    let path = format!("/sluicegate.cluster.v1.ClusterService/{method}");
    // Both methods have the version of the exchange as their first field.
    let message = raw_grpc::frame(&CopyRequest { protocol: 1 }.encode_to_vec());
    let mut frames = Frames::connect_to(address).await;
    // SETTINGS_INITIAL_WINDOW_SIZE is 0.
    let mut bytes = frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 0]);
    for call in 0..30 {
        bytes.extend(frame(HEADERS, END_HEADERS, 2 * call + 1, &call_headers(&path)));
        bytes.extend(frame(DATA, END_STREAM, 2 * call + 1, &message));
    }
    bytes.extend(frame(PING, 0, 0, &[0; 8]));
    frames.send(&bytes).await;
    while frames.next().await.is_some_and(|frame| frame.kind != PING || frame.flags & ACK == 0) {}
    frames
}

/// Answers of four megabytes that are requested 600 times and never read, and 600 copies. A newcomer still gets its
/// own answers.
#[tokio::test]
async fn answers_that_are_not_read_have_a_maximum_and_keep_nobody_out() {
    let group = Group::new(2, RULES);
    let member = Operator::with(member_with(&group, 0, &[]));
    set_long_overrides(&member);
    member.ctl(&["limit", "set", "d", "user=bob", "77/year"]);
    let client = member.server.client().await;
    assert!(client.check(hits_of("window", 135)).await.unwrap().allowed());
    for call in 0..30 {
        let user = |number: u32| descriptor(&[("user", &*format!("{call}-{number}"))]);
        let users = (0..100).map(user);
        client.check(users.fold(raw_client::Request::new("d"), raw_client::Request::descriptor)).await.unwrap();
    }
    let before = member.server.resident_memory();
    let mut unread = Vec::new();
    for method in ["Overrides", "Copy"] {
        for _ in 0..20 {
            unread.push(call_without_window(group.addresses[0], method).await);
        }
    }
    let grown = || member.server.resident_memory().saturating_sub(before);
    wait_for("the answers to take memory", || (grown() > 32 << 20).then_some(()));
    let newcomer = Operator::with(member_with(&group, 1, &group.addresses[..1]));
    wait_for_limit(&newcomer, "bob", 77).await;
    wait_for_async("the hits", async || (remaining(&newcomer, "window").await == 865).then_some(())).await;
    let grown = member.server.peak_memory().saturating_sub(before);
    assert!(grown < MAX_GROWTH, "{grown} bytes");
    let log = member.server.log();
    assert!(!log.contains("panicked"), "{log}");
    drop(unread);
}
