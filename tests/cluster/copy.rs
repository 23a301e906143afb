//! Copies of counters that a member needs later than at its start.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use sluicegate::service::Clock;
use sluicegate_proto::sluicegate::cluster::v1::{
    ActivityRequest, ActivityResponse, CopyPage, CopyRequest, CounterCopy, OverridesPage, OverridesRequest, Position,
    PullRequest, PullResponse, cluster_service_client::ClusterServiceClient, cluster_service_server::ClusterService,
};
use tonic::{Request, Response, Status};

use crate::{
    cluster::{
        foreign_member::{Pages, pages, serve},
        members::{Group, Member, Members},
    },
    support::wait_for,
};

const RULES: &str = "
domain: d
descriptors:
- key: window
  rate_limit: {unit: year, requests_per_unit: 1000}
";
const HOUR: u64 = 3_600_000_000;
const EPOCH: u64 = 0xc0b1;
/// Position of the origin. Increments before it are missing.
const SEQUENCE: u64 = 10;

/// A member whose first increments are missing. It has not joined, so nobody copies its counters at the start.
#[derive(Clone)]
struct Origin {
    counters: Arc<Vec<CounterCopy>>,
    /// Microseconds by which its clock is ahead.
    clock_ahead: u64,
    copies_needed: Arc<AtomicUsize>,
    copies: Arc<AtomicUsize>,
    /// Position of the last pull.
    pulled_after: Arc<AtomicU64>,
}

impl Origin {
    fn start(counters: Vec<CounterCopy>, clock_ahead: u64) -> (Self, SocketAddr) {
        let counters = Arc::new(counters);
        let (copies_needed, copies, pulled_after) = Default::default();
        let this = Self { counters, clock_ahead, copies_needed, copies, pulled_after };
        let address = serve(this.clone());
        (this, address)
    }

    /// Waits until a member has copied the counters and continues from the position of the copy.
    fn wait_until_copied(&self) {
        wait_for("a pull after the copy", || (self.pulled_after.load(Relaxed) == SEQUENCE).then_some(()));
        assert_eq!(self.copies.load(Relaxed), 1);
    }
}

#[tonic::async_trait]
impl ClusterService for Origin {
    async fn pull(&self, request: Request<PullRequest>) -> Result<Response<PullResponse>, Status> {
        let PullRequest { origin, after, .. } = request.into_inner();
        self.pulled_after.store(after, Relaxed);
        let copy_needed = origin == EPOCH && after < SEQUENCE;
        self.copies_needed.fetch_add(copy_needed.into(), Relaxed);
        if origin == EPOCH && !copy_needed {
            // The long poll of a member without new increments.
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(Response::new(PullResponse { origin: EPOCH, copy_needed, ..PullResponse::default() }))
    }

    type CopyStream = Pages<CopyPage>;

    async fn copy(&self, _: Request<CopyRequest>) -> Result<Response<Self::CopyStream>, Status> {
        if self.copies_needed.load(Relaxed) == 0 {
            return Err(Status::failed_precondition("an instance that has not joined has no counters to copy"));
        }
        self.copies.fetch_add(1, Relaxed);
        let positions = vec![Position { origin: EPOCH, sequence: SEQUENCE }];
        let now_us = Clock::System.now().get() + self.clock_ahead;
        let first = CopyPage { origin: EPOCH, now_us, positions, counters: Vec::new() };
        let second = CopyPage { counters: self.counters.to_vec(), ..CopyPage::default() };
        Ok(pages(vec![first, second]))
    }

    type OverridesStream = Pages<OverridesPage>;

    async fn overrides(&self, _: Request<OverridesRequest>) -> Result<Response<Self::OverridesStream>, Status> {
        Ok(pages(vec![OverridesPage::default()]))
    }

    async fn activity(&self, _: Request<ActivityRequest>) -> Result<Response<ActivityResponse>, Status> {
        Err(Status::unimplemented("members of earlier versions have no activity"))
    }
}

/// Returns the counters of a member that has taken three hits.
async fn counters() -> Vec<CounterCopy> {
    let source = Members::start(1, RULES).await;
    source.all[0].take("window", 3).await;
    let endpoint = format!("http://{}", source.group.addresses[0]);
    let mut client = ClusterServiceClient::connect(endpoint).await.unwrap();
    let mut pages = client.copy(CopyRequest { protocol: 1 }).await.unwrap().into_inner();
    let mut counters = Vec::new();
    while let Some(page) = pages.message().await.unwrap() {
        counters.extend(page.counters);
    }
    assert_eq!(counters.len(), 1);
    counters
}

/// Starts a member that follows only the origin.
async fn follow(origin: SocketAddr) -> Member {
    let group = Group::new(1, RULES);
    Member::start(group.builder(0).set("cluster.peers", &origin.to_string())).await
}

#[tokio::test]
async fn a_member_that_misses_increments_copies_the_counters_once() {
    let (origin, address) = Origin::start(counters().await, 0);
    let member = follow(address).await;
    origin.wait_until_copied();
    member.wait_for_remaining("window", 997).await;
    wait_for("the number of copied counters in the log", || {
        let log = member.server.log();
        let line = log.lines().find(|line| line.contains("counters copied from a peer"))?;
        (line.contains("counters=1") || line.contains("\"counters\":1")).then_some(())
    });
}

/// States contain times, which another clock would take for the past or the future.
#[tokio::test]
async fn counters_of_another_clock_are_not_copied() {
    let (origin, address) = Origin::start(counters().await, HOUR);
    let member = follow(address).await;
    origin.wait_until_copied();
    assert_eq!(member.remaining("window").await, 1_000);
}
