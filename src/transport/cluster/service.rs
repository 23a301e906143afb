//! [`Service`]: answers the calls of other instances.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use futures_util::stream;
use prost::Message;
use sluicegate_proto::sluicegate::cluster::v1::{self as proto, cluster_service_server::ClusterService};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};
use tonic::{Request, Response, Status};

use super::{
    PROTOCOL, Phase,
    answers::{Answers, PageStream, Part},
    callers::Callers,
    members::Members,
    message,
    violation::Violations,
};
use crate::{
    metrics::LogThrottle,
    service::{
        Activity, Clock,
        overrides::{MemberExchange, PeerOverrides},
    },
    store::peers::{CounterCopy, Peers, Pull},
};

/// Maximum time for which a pull waits for the next increment.
pub(super) const PULL_WAIT: Duration = Duration::from_secs(1);
/// Number of counters in one page of a copy.
const COPIES_PER_PAGE: usize = 10_000;

/// Address of the calling instance, without its listening port.
#[derive(Clone, Copy)]
pub(super) struct CallerAddress(pub(super) SocketAddr);

/// The gRPC service that other instances call.
pub(super) struct Service {
    pub(super) peers: Arc<Peers>,
    pub(super) members: Arc<Members>,
    pub(super) clock: Clock,
    pub(super) phase: watch::Receiver<Phase>,
    /// The exchange of overrides; `None` if they are in Redis.
    pub(super) overrides: Option<MemberExchange>,
    pub(super) activity: Arc<Activity>,
    pub(super) callers: Callers,
    pub(super) answers: Answers,
    pub(super) violations: Arc<Violations>,
    pub(super) log_ignored_address: LogThrottle,
}

impl Service {
    /// Returns a response without increments.
    fn hello(&self, joined: bool) -> proto::PullResponse {
        proto::PullResponse {
            origin: self.peers.epoch(),
            joined,
            overrides_position: self.overrides.as_ref().map(MemberExchange::position).unwrap_or_default(),
            ..proto::PullResponse::default()
        }
    }
    /// Adds the address of a calling instance to the table.
    fn discover(&self, caller: IpAddr, port: u16) {
        let address = SocketAddr::new(caller, port);
        if self.members.discover(address) {
            return;
        }
        self.violations.add_address();
        if self.log_ignored_address.should_log() {
            tracing::warn!(peer = %address, "ignored the address of a peer: calls have named too many addresses");
        }
    }
}

#[tonic::async_trait]
impl ClusterService for Service {
    async fn pull(&self, request: Request<proto::PullRequest>) -> Result<Response<proto::PullResponse>, Status> {
        let caller = caller_of(&request);
        let request = request.into_inner();
        check_protocol(request.protocol)?;
        let joined = *self.phase.borrow() == Phase::Following;
        let mut override_positions = match &self.overrides {
            Some(overrides) => overrides.positions(),
            // Never changes.
            None => watch::channel(0).1,
        };
        if request.leaving {
            if caller.is_some_and(|caller| self.members.set_left(request.subscriber, caller)) {
                self.peers.forget(request.subscriber);
            }
            return Ok(Response::new(self.hello(joined)));
        }
        let port = u16::try_from(request.port).unwrap_or_default();
        if let Some(caller) = caller
            && port > 0
            && request.subscriber != self.peers.epoch()
        {
            self.discover(caller, port);
        }
        if request.origin != self.peers.epoch() || request.subscriber == self.peers.epoch() {
            // The caller learns the epoch, and pulls again with its position in it.
            return Ok(Response::new(self.hello(joined)));
        }
        if let Some(caller) = caller {
            for forgotten in self.callers.record(caller, request.subscriber) {
                self.peers.forget(forgotten);
            }
        }
        let mut published = self.peers.published();
        let deadline = Instant::now() + PULL_WAIT;
        loop {
            published.mark_unchanged();
            override_positions.mark_unchanged();
            let response = match self.peers.pull(request.subscriber, request.after, self.clock.now()) {
                Pull::Batch(batch) => {
                    let increments: Vec<_> =
                        batch.increments.iter().map(|next| next.encoded(message::encode)).collect();
                    self.peers.metrics().add_sent_bytes(increments.iter().map(|bytes| bytes.len() as u64).sum());
                    proto::PullResponse {
                        after: batch.after,
                        until: batch.until,
                        now_us: batch.now.get(),
                        increments,
                        ..self.hello(joined)
                    }
                }
                Pull::Copy => proto::PullResponse { copy_needed: true, ..self.hello(joined) },
                Pull::Nothing if self.hello(joined).overrides_position != request.overrides_position => {
                    self.hello(joined)
                }
                Pull::Nothing => tokio::select! {
                    Ok(()) = published.changed() => continue,
                    Ok(()) = override_positions.changed() => continue,
                    () = sleep_until(deadline) => self.hello(joined),
                },
            };
            return Ok(Response::new(response));
        }
    }

    type CopyStream = PageStream<proto::CopyPage>;

    async fn copy(&self, request: Request<proto::CopyRequest>) -> Result<Response<Self::CopyStream>, Status> {
        let caller = caller_of(&request);
        check_protocol(request.into_inner().protocol)?;
        let positions = self.peers.copy_positions(self.clock.now()).into_iter();
        let first = proto::CopyPage {
            origin: self.peers.epoch(),
            now_us: self.clock.now().get(),
            positions: positions.map(|(origin, sequence)| proto::Position { origin, sequence }).collect(),
            counters: Vec::new(),
        };
        let bytes = first.encoded_len();
        let first = Part { bytes, pages: Box::new(std::iter::once(first)) };
        let peers = Arc::clone(&self.peers);
        let counters = (0..).map_while(move |part| peers.copy_part(part)).filter(|copies| !copies.is_empty());
        Ok(Response::new(self.answers.send(caller, stream::iter(std::iter::once(first).chain(counters.map(part_of))))))
    }

    type OverridesStream = PageStream<proto::OverridesPage>;

    async fn overrides(
        &self,
        request: Request<proto::OverridesRequest>,
    ) -> Result<Response<Self::OverridesStream>, Status> {
        let caller = caller_of(&request);
        let request = request.into_inner();
        check_protocol(request.protocol)?;
        let exchange = self.overrides.clone();
        let parts = stream::once(async move {
            let overrides = match exchange {
                Some(exchange) => exchange.changes_for_peer(request.after).await,
                None => PeerOverrides::default(),
            };
            let pages = message::encode_overrides(overrides);
            let bytes = pages.iter().map(Message::encoded_len).sum();
            Part { bytes, pages: Box::new(pages.into_iter()) as Box<_> }
        });
        Ok(Response::new(self.answers.send(caller, parts)))
    }

    async fn activity(
        &self,
        request: Request<proto::ActivityRequest>,
    ) -> Result<Response<proto::ActivityResponse>, Status> {
        check_protocol(request.into_inner().protocol)?;
        Ok(Response::new(proto::ActivityResponse { report: self.activity.recent_report() }))
    }
}

fn caller_of<T>(request: &Request<T>) -> Option<IpAddr> {
    request.extensions().get::<CallerAddress>().map(|caller| caller.0.ip().to_canonical())
}

/// Returns the pages of copied counters. Each is encoded when the previous one has been sent.
fn part_of(copies: Vec<CounterCopy>) -> Part<proto::CopyPage> {
    let heap_bytes: usize = copies.iter().map(|copy| copy.state.as_bytes().len()).sum();
    let bytes = copies.len() * size_of::<CounterCopy>() + heap_bytes;
    let pages = (0..copies.len()).step_by(COPIES_PER_PAGE).map(move |start| {
        let end = copies.len().min(start + COPIES_PER_PAGE);
        proto::CopyPage { counters: message::encode_copies(&copies[start..end]), ..proto::CopyPage::default() }
    });
    Part { bytes, pages: Box::new(pages) }
}

fn check_protocol(protocol: u32) -> Result<(), Status> {
    if protocol == PROTOCOL {
        return Ok(());
    }
    Err(Status::failed_precondition(format!(
        "this instance has version {PROTOCOL} of the exchange between instances, and the caller has version {protocol}"
    )))
}
