//! [`Follower`]: pulls the increments of the instance at one address and applies them.

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use sluicegate_proto::sluicegate::cluster::v1::{self as proto, cluster_service_client::ClusterServiceClient};
use tokio::{
    sync::{Mutex, watch},
    time::{Instant, sleep, timeout},
};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

use super::{
    MAX_MESSAGE_BYTES, PROTOCOL, Phase,
    members::{MemberState, Members},
    message::{self, MessageError},
    service::PULL_WAIT,
    settings::TlsSettings,
};
use crate::{
    algorithm::Micros,
    files,
    service::{Clock, OverrideSync, overrides::PeerOverrides},
    store::peers::Peers,
    transport::grpc::wait_for_shutdown,
};

/// Timeout of a connection attempt.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Timeout of a pull, and of the next page of a copy.
const CALL_TIMEOUT: Duration = Duration::from_secs(2).saturating_add(PULL_WAIT);
/// Timeout of the last call before the end of the process.
const LEAVE_TIMEOUT: Duration = Duration::from_millis(300);
/// First and maximum pause before a new attempt.
const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// Maximum difference of two clocks with which a copied state has its meaning. States contain times.
const MAX_CLOCK_DIFFERENCE: Micros = Micros::from_secs(30);
/// Maximum number of pages of overrides, of up to 100 overrides each.
const MAX_OVERRIDES_PAGES: usize = 50_000;
/// Pause before overrides that could not be stored are fetched again.
const OVERRIDES_RETRY: Duration = Duration::from_secs(1);
/// Pause before an address is called again if its instance is also at another one.
const DUPLICATE_PAUSE: Duration = Duration::from_secs(5);

/// State that all followers share.
pub(super) struct Context {
    pub(super) peers: Arc<Peers>,
    pub(super) members: Arc<Members>,
    pub(super) clock: Clock,
    pub(super) overrides: Arc<OverrideSync>,
    pub(super) tls: Option<TlsSettings>,
    /// First host in the settings.
    pub(super) default_host: Option<String>,
    /// Port of the own listener.
    pub(super) port: u16,
    /// Whether the counters of an instance have been copied; locked during a copy. One copy is enough for all origins
    /// that the copied instance follows.
    pub(super) has_copied: Mutex<bool>,
    pub(super) phase: watch::Receiver<Phase>,
    /// Stops the followers.
    pub(super) leaving: watch::Sender<bool>,
}

/// A connection to one address.
pub(super) struct Follower {
    context: Arc<Context>,
    address: SocketAddr,
}

/// How far the overrides of the instance are merged.
#[derive(Default)]
struct MergedOverrides {
    /// Position of the last overrides that were fetched.
    fetched: u64,
    /// Position of the last overrides that were stored, or `None` if there are none.
    stored: Option<u64>,
    /// Time at which overrides that could not be stored are fetched again.
    retry_at: Option<Instant>,
}

impl MergedOverrides {
    /// Returns whether overrides are to be fetched from an instance with this position.
    fn is_due(&self, position: u64) -> bool {
        self.fetched != position || self.retry_at.is_some_and(|at| at <= Instant::now())
    }
}

/// End of the calls to an address.
enum Ended {
    /// The address is this instance's own.
    Own,
    /// Another address of the same instance is used.
    Duplicate,
    /// This instance stops.
    Leaving,
}

/// Error returned when an instance cannot be followed.
#[derive(Debug, thiserror::Error)]
enum FollowError {
    #[error("cannot connect")]
    Connect(#[from] tonic::transport::Error),
    #[error("call failed: {}", .0.message())]
    Call(#[from] tonic::Status),
    #[error("no response within {0:?}")]
    Timeout(Duration),
    #[error("cannot read {}", .path.display())]
    File { path: PathBuf, source: std::io::Error },
    #[error("invalid message")]
    Message(#[from] MessageError),
}

type Client = ClusterServiceClient<Channel>;

impl Follower {
    pub(super) const fn new(context: Arc<Context>, address: SocketAddr) -> Self {
        Self { context, address }
    }

    /// Follows the instance, and connects again after failures. Ends if the address is the own one, or at shutdown.
    pub(super) async fn run(self) {
        let (mut pause, mut leaving) = (RETRY.0, self.context.leaving.subscribe());
        // An episode of failures is logged once.
        let mut is_logged = false;
        loop {
            let wait = match self.follow(&mut is_logged, &mut pause).await {
                Ok(Ended::Own) => return self.set_state(MemberState::Own),
                Ok(Ended::Leaving) => return,
                Ok(Ended::Duplicate) => {
                    self.set_state(MemberState::Duplicate);
                    DUPLICATE_PAUSE
                }
                Err(error) => {
                    if self.context.members.state(self.address) != MemberState::Left {
                        self.set_state(MemberState::Unavailable);
                        if !std::mem::replace(&mut is_logged, true) {
                            let reason = crate::errors::chain(&error);
                            tracing::warn!(
                                peer = %self.address,
                                reason,
                                "peer unavailable: its hits are not counted here until it responds"
                            );
                        }
                    }
                    let next = pause.saturating_mul(2).min(RETRY.1);
                    std::mem::replace(&mut pause, next)
                }
            };
            tokio::select! {
                () = sleep(wait.mul_f64(rand::random_range(0.5..=1.0))) => {}
                () = wait_for_shutdown(&mut leaving) => return,
            }
        }
    }

    fn set_state(&self, state: MemberState) {
        self.context.members.set_state(self.address, state);
    }

    /// Connects and pulls until an error.
    async fn follow(&self, is_logged: &mut bool, pause: &mut Duration) -> Result<Ended, FollowError> {
        let Context { peers, members, clock, .. } = &*self.context;
        let mut client = self.connect().await?;
        let mut leaving = self.context.leaving.subscribe();
        let (mut origin, mut merged) = (0, MergedOverrides::default());
        loop {
            let response = tokio::select! {
                response = self.pull(&mut client, origin, merged.fetched, false) => response?,
                () = wait_for_shutdown(&mut leaving) => {
                    let _ = timeout(LEAVE_TIMEOUT, self.pull(&mut client, origin, 0, true)).await;
                    return Ok(Ended::Leaving);
                }
            };
            if response.origin == peers.epoch() {
                return Ok(Ended::Own);
            }
            if !members.claim(self.address, response.origin) {
                return Ok(Ended::Duplicate);
            }
            if response.origin != origin {
                // The first response contains no increments.
                origin = response.origin;
                merged = MergedOverrides::default();
                self.merge_overrides(&mut client, &mut merged).await?;
                self.wait_until_joined(&mut client, &response).await?;
                continue;
            }
            if response.copy_needed {
                self.copy(&mut client, origin).await?;
            } else if response.until > response.after {
                peers.apply(&message::decode(&response)?, clock.now());
            }
            if merged.is_due(response.overrides_position) {
                self.merge_overrides(&mut client, &mut merged).await?;
            }
            self.set_state(MemberState::Connected);
            *pause = RETRY.0;
            if std::mem::take(is_logged) {
                tracing::info!(peer = %self.address, "peer responds again");
            }
        }
    }

    /// Copies the counters of the instance if this one has none yet, and waits until all instances have responded.
    ///
    /// No increment is applied before: the copy contains increments of all instances.
    async fn wait_until_joined(&self, client: &mut Client, hello: &proto::PullResponse) -> Result<(), FollowError> {
        let mut phase = self.context.phase.clone();
        if *phase.borrow() == Phase::Joining {
            let mut has_copied = self.context.has_copied.lock().await;
            if hello.joined && !*has_copied {
                self.copy_counters(client, hello.origin).await?;
                *has_copied = true;
            }
            drop(has_copied);
            self.set_state(MemberState::Contacted);
            let _ = phase.wait_for(|phase| *phase == Phase::Following).await;
        }
        Ok(())
    }

    async fn pull(
        &self,
        client: &mut Client,
        origin: u64,
        overrides_position: u64,
        leaving: bool,
    ) -> Result<proto::PullResponse, FollowError> {
        let peers = &self.context.peers;
        let request = proto::PullRequest {
            protocol: PROTOCOL,
            subscriber: peers.epoch(),
            origin,
            after: peers.position(origin),
            port: self.context.port.into(),
            leaving,
            overrides_position,
        };
        let response = timeout(CALL_TIMEOUT, client.pull(request)).await;
        Ok(response.map_err(|_| FollowError::Timeout(CALL_TIMEOUT))??.into_inner())
    }

    /// Merges the overrides of the instance that are not stored yet.
    ///
    /// If they cannot be stored, for example because the disk is full, hits are still exchanged, and the next attempt is
    /// made after a pause.
    async fn merge_overrides(&self, client: &mut Client, merged: &mut MergedOverrides) -> Result<(), FollowError> {
        let overrides = &self.context.overrides;
        if overrides.position().is_none() {
            // They are in Redis.
            return Ok(());
        }
        let request = proto::OverridesRequest { protocol: PROTOCOL, after: merged.stored };
        let pages = timeout(CALL_TIMEOUT, client.overrides(request)).await;
        let mut pages = pages.map_err(|_| FollowError::Timeout(CALL_TIMEOUT))??.into_inner();
        let (mut received, mut pages_received) = (PeerOverrides::default(), 0);
        while let Some(page) =
            timeout(CALL_TIMEOUT, pages.message()).await.map_err(|_| FollowError::Timeout(CALL_TIMEOUT))??
        {
            pages_received += 1;
            if pages_received > MAX_OVERRIDES_PAGES {
                return Err(MessageError::TooManyOverrides.into());
            }
            message::decode_overrides(&mut received, page);
        }
        merged.fetched = received.position;
        match overrides.merge(received).await {
            Ok(()) => (merged.stored, merged.retry_at) = (Some(merged.fetched), None),
            Err(error) => {
                // An episode of failures is logged once.
                if merged.retry_at.replace(Instant::now() + OVERRIDES_RETRY).is_none() {
                    let reason = crate::errors::chain(&error);
                    tracing::warn!(
                        peer = %self.address,
                        reason,
                        "cannot store the overrides of a peer, and tries it again; its hits are counted"
                    );
                }
            }
        }
        Ok(())
    }

    /// Copies the counters of the instance, unless a copy of another one has brought a position in the meantime.
    async fn copy(&self, client: &mut Client, origin: u64) -> Result<(), FollowError> {
        let peers = &self.context.peers;
        let position = peers.position(origin);
        let mut has_copied = self.context.has_copied.lock().await;
        if peers.position(origin) == position {
            self.copy_counters(client, origin).await?;
            *has_copied = true;
        }
        Ok(())
    }

    async fn copy_counters(&self, client: &mut Client, origin: u64) -> Result<(), FollowError> {
        let Context { peers, clock, .. } = &*self.context;
        let request = proto::CopyRequest { protocol: PROTOCOL };
        let pages = timeout(CALL_TIMEOUT, client.copy(request)).await;
        let mut pages = pages.map_err(|_| FollowError::Timeout(CALL_TIMEOUT))??.into_inner();
        let (mut positions, mut counters, mut same_clock) = (Vec::new(), 0, false);
        loop {
            let page =
                timeout(CALL_TIMEOUT, pages.message()).await.map_err(|_| FollowError::Timeout(CALL_TIMEOUT))??;
            let Some(page) = page else {
                break;
            };
            if page.now_us > 0 {
                positions = page.positions.iter().map(|position| (position.origin, position.sequence)).collect();
                same_clock = clock.now().get().abs_diff(page.now_us) <= MAX_CLOCK_DIFFERENCE.get();
            }
            if same_clock {
                counters += page.counters.len();
                peers.insert_copies(message::decode_copies(&page.counters), clock.now());
            }
        }
        peers.continue_from(origin, &positions, clock.now());
        if same_clock {
            tracing::info!(peer = %self.address, counters, "counters copied from a peer");
        } else {
            tracing::warn!(
                peer = %self.address,
                "the clock of a peer differs by more than 30 s: its counters were not copied, only new hits are received"
            );
        }
        Ok(())
    }

    /// Connects to the address. Reads the certificates, which is therefore done for each connection.
    async fn connect(&self) -> Result<Client, FollowError> {
        let scheme = if self.context.tls.is_some() { "https" } else { "http" };
        let mut endpoint = Endpoint::from_shared(format!("{scheme}://{}", self.address))?
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_nodelay(true);
        if let Some(files) = &self.context.tls {
            let read = |path: &Option<PathBuf>| {
                let path = path.clone().unwrap_or_default();
                files::read(&path, files::MAX_BYTES).map_err(|source| FollowError::File { path, source })
            };
            let identity = Identity::from_pem(read(&files.cert_file)?, read(&files.key_file)?);
            // An instance that DNS does not contain yet is expected to have the name of the others.
            let host = || self.context.members.host(self.address).or_else(|| self.context.default_host.clone());
            let name = files.server_name.clone().or_else(host);
            let tls = ClientTlsConfig::new()
                .ca_certificate(Certificate::from_pem(read(&files.ca_file)?))
                .identity(identity)
                .domain_name(name.unwrap_or_else(|| self.address.ip().to_string()));
            endpoint = endpoint.tls_config(tls)?;
        }
        let channel = timeout(CONNECT_TIMEOUT, endpoint.connect()).await;
        let channel = channel.map_err(|_| FollowError::Timeout(CONNECT_TIMEOUT))??;
        Ok(Client::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn overrides_are_fetched_at_a_new_position_or_after_the_pause() {
        let mut merged = MergedOverrides { fetched: 7, ..MergedOverrides::default() };
        assert!(merged.is_due(8) && !merged.is_due(7));
        merged.retry_at = Some(Instant::now() + OVERRIDES_RETRY);
        assert!(merged.is_due(8) && !merged.is_due(7));
        tokio::time::advance(OVERRIDES_RETRY).await;
        assert!(merged.is_due(7));
    }
}
