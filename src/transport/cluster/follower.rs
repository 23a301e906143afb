//! [`Follower`]: pulls the increments of the instance at one address and applies them.

use std::{io, net::SocketAddr, path::Path, sync::Arc, time::Duration};

use sluicegate_deadline::within;
use sluicegate_files as files;
use sluicegate_proto::sluicegate::cluster::v1 as proto;
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

use super::{
    PROTOCOL, Phase, TlsSettings, activity,
    calls::Calls,
    context::Context,
    error::FollowError,
    members::MemberState,
    message,
    overrides::{OverridesFollower, OverridesPosition},
    pace::{Allowance, Pace},
    violation::Violation,
};
use crate::transport::shutdown::wait_for_shutdown;

/// Timeout of a connection attempt.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Timeout of the last call before the end of the process.
const LEAVE_TIMEOUT: Duration = Duration::from_millis(300);
/// First and maximum pause before a new attempt.
const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// Pause before an address is called again if its instance is also at another one.
const DUPLICATE_PAUSE: Duration = Duration::from_secs(5);
/// Pause before the own address is called again. Another instance may have it then.
const OWN_PAUSE: Duration = Duration::from_secs(30);
/// Maximum time for which the exchange of hits waits until the overrides of a new instance are merged.
const FIRST_OVERRIDES_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time for which a connection to a second address of an instance waits until the overrides are merged.
const DUPLICATE_OVERRIDES_TIMEOUT: Duration = Duration::from_secs(60);
/// Number of epochs that an address can have in a burst, and later in each second. A process needs time to start.
const EPOCHS: (f64, f64) = (20.0, 0.2);
/// Size in bytes above which a response is handled on another thread.
const LONG_RESPONSE_BYTES: usize = 64 << 10;
/// Maximum number of bytes that a connection has received before they are read.
const WINDOW_BYTES: u32 = 1 << 20;

/// The exchange with the instance at one address, over one connection at a time.
pub(super) struct Follower {
    pub(super) context: Arc<Context>,
    pub(super) address: SocketAddr,
    /// Number of copies of the counters that were not complete.
    pub(super) incomplete_copies: u32,
    /// The last epoch of the instance.
    last_epoch: u64,
    /// The allowance for further epochs.
    epochs: Allowance,
    /// Whether the episode of failures is logged.
    is_logged: bool,
    /// Pause before the next attempt.
    pause: Duration,
}

/// Channels between the exchange of hits and that of overrides with one instance.
struct OverridesLink {
    positions: watch::Sender<OverridesPosition>,
    /// Epoch of the instance after its overrides have been merged for the first time.
    merged: watch::Receiver<u64>,
}

impl OverridesLink {
    fn set_position(&self, position: OverridesPosition) {
        self.positions.send_if_modified(|latest| std::mem::replace(latest, position) != position);
    }

    /// Waits until the overrides of an instance are merged for the first time, for at most `max`.
    async fn wait_until_merged(&mut self, epoch: u64, max: Duration) {
        // If it takes longer, the exchange of hits does not wait for it.
        let _ = timeout(max, self.merged.wait_for(|merged| *merged == epoch)).await;
    }
}

/// Reason for which the calls to an address have ended.
enum Ended {
    /// The address is this instance's own.
    Own,
    /// Another address of the same instance is used.
    Duplicate,
    /// This instance stops.
    Leaving,
}

impl Follower {
    pub(super) fn new(context: Arc<Context>, address: SocketAddr) -> Self {
        Self {
            context,
            address,
            incomplete_copies: 0,
            last_epoch: 0,
            epochs: Allowance::new(EPOCHS.0, EPOCHS.1),
            is_logged: false,
            pause: RETRY.0,
        }
    }

    /// Follows the instance, and connects again after failures. Ends at shutdown.
    pub(super) async fn run(mut self) {
        let mut leaving = self.context.leaving.subscribe();
        let mut overrides = OverridesFollower::new(Arc::clone(&self.context), self.address);
        loop {
            let excluded_until = self.context.members.excluded_until(self.address);
            let wait = match excluded_until {
                Some(until) => {
                    self.set_state(MemberState::Unavailable);
                    until - Instant::now()
                }
                None => match self.follow(&mut overrides).await {
                    Ok(Ended::Leaving) => return,
                    Ok(Ended::Own) => {
                        self.set_state(MemberState::Own);
                        OWN_PAUSE
                    }
                    Ok(Ended::Duplicate) => {
                        self.set_state(MemberState::Duplicate);
                        DUPLICATE_PAUSE
                    }
                    Err(error) => self.pause_after(&error).mul_f64(rand::random_range(0.5..=1.0)),
                },
            };
            tokio::select! {
                () = sleep(wait) => {}
                () = wait_for_shutdown(&mut leaving) => return,
            }
        }
    }

    /// Records and logs a failure, and returns the pause before the next attempt.
    fn pause_after(&mut self, error: &FollowError) -> Duration {
        let members = &self.context.members;
        let reason = crate::metrics::chain(error);
        if let Some(violation) = error.violation() {
            self.context.violations.add(violation);
            let excluded_for = members.exclude(self.address);
            self.set_state(MemberState::Unavailable);
            self.is_logged = true;
            tracing::warn!(
                peer = %self.address,
                reason,
                ?excluded_for,
                "peer breaks the protocol: it is left alone for a while, and its hits are not counted here"
            );
            return excluded_for;
        }
        if members.state(self.address) == MemberState::Left {
            return self.next_pause();
        }
        self.set_state(MemberState::Unavailable);
        if !std::mem::replace(&mut self.is_logged, true) {
            tracing::warn!(
                peer = %self.address,
                reason,
                "peer unavailable: its hits are not counted here until it responds"
            );
        }
        self.next_pause()
    }

    fn next_pause(&mut self) -> Duration {
        let next = self.pause.saturating_mul(2).min(RETRY.1);
        std::mem::replace(&mut self.pause, next)
    }

    fn set_state(&self, state: MemberState) {
        self.context.members.set_state(self.address, state);
    }

    /// Connects, and exchanges hits and overrides until an error or one of the reasons in [`Ended`].
    async fn follow(&mut self, overrides: &mut OverridesFollower) -> Result<Ended, FollowError> {
        let channel = self.connect().await?;
        let budget = Arc::clone(&self.context.read_budget);
        let mut calls = Calls::new(channel.clone(), &budget);
        let mut overrides_calls = Calls::new(channel.clone(), &budget);
        let mut activity_calls = Calls::new(channel, &budget);
        let activity = Arc::clone(&self.context.activity);
        let address = self.address;
        let (positions, mut position_changes) = watch::channel(OverridesPosition::default());
        let (merged_sender, merged) = watch::channel(0);
        let mut link = OverridesLink { positions, merged };
        tokio::select! {
            ended = self.exchange_hits(&mut calls, &mut link) => ended,
            ended = overrides.run(&mut overrides_calls, &mut position_changes, &merged_sender) => {
                ended.map(|()| Ended::Leaving)
            }
            () = activity::follow(&activity, &mut activity_calls, address) => Ok(Ended::Leaving),
        }
    }

    /// Pulls and applies increments until an error or one of the reasons in [`Ended`].
    async fn exchange_hits(&mut self, calls: &mut Calls, link: &mut OverridesLink) -> Result<Ended, FollowError> {
        let context = Arc::clone(&self.context);
        let mut leaving = context.leaving.subscribe();
        let mut origin = 0;
        let mut overrides_position = 0;
        loop {
            let mut pace = Pace::start();
            let response = tokio::select! {
                response = self.pull(calls, origin, overrides_position, false) => response?,
                () = wait_for_shutdown(&mut leaving) => {
                    let _ = timeout(LEAVE_TIMEOUT, self.pull(calls, origin, 0, true)).await;
                    return Ok(Ended::Leaving);
                }
            };
            pace.answered();
            if response.origin == context.peers.epoch() {
                return Ok(Ended::Own);
            }
            let is_claimed = context.members.claim(self.address, response.origin);
            let is_new = response.origin != origin;
            let has_news = is_new || response.copy_needed || response.until > response.after;
            let has_overrides = response.overrides_position != overrides_position;
            overrides_position = response.overrides_position;
            link.set_position(OverridesPosition { epoch: response.origin, changes: overrides_position });
            let is_restarted = std::mem::replace(&mut self.last_epoch, response.origin) != response.origin;
            if is_restarted && self.epochs.take(1.0) > Duration::ZERO {
                return Err(Violation::Epoch.into());
            }
            if !is_claimed {
                // Its overrides are merged nevertheless: it may own the epoch that the used instance only claims.
                link.wait_until_merged(response.origin, DUPLICATE_OVERRIDES_TIMEOUT).await;
                return Ok(Ended::Duplicate);
            }
            if is_new {
                link.wait_until_merged(response.origin, FIRST_OVERRIDES_TIMEOUT).await;
                // The first response contains no increments.
                origin = response.origin;
                self.wait_until_joined(calls, &response).await?;
                continue;
            }
            if response.copy_needed {
                self.copy(calls, origin).await?;
            } else if response.until > response.after {
                self.apply(response).await?;
            }
            self.set_state(MemberState::Connected);
            self.pause = RETRY.0;
            if std::mem::take(&mut self.is_logged) {
                tracing::info!(peer = %self.address, "peer responds again");
            }
            let pause = pace.pause(has_news || has_overrides);
            if !pause.is_zero() {
                tokio::select! {
                    () = sleep(pause) => {}
                    () = wait_for_shutdown(&mut leaving) => {}
                }
            }
        }
    }

    /// Applies the increments of a response.
    async fn apply(&self, response: proto::PullResponse) -> Result<(), FollowError> {
        let context = &self.context;
        let bytes: usize = response.increments.iter().map(bytes::Bytes::len).sum();
        if bytes <= LONG_RESPONSE_BYTES {
            context.peers.apply(&message::decode(&response)?, context.clock.now());
            return Ok(());
        }
        let _decoding = context.decoding.lock().await;
        let peers = Arc::clone(&context.peers);
        let clock = context.clock.clone();
        let applying = tokio::task::spawn_blocking(move || {
            let batch = message::decode(&response)?;
            peers.apply(&batch, clock.now());
            Ok(())
        });
        applying.await.unwrap_or(Ok(()))
    }

    /// Copies the counters of the instance if this one has none yet, and waits until all instances have responded.
    ///
    /// No increment is applied before: the copy contains increments of every instance. Addresses that only calls have
    /// named are not copied from, because a copy delays the start.
    async fn wait_until_joined(&mut self, calls: &mut Calls, hello: &proto::PullResponse) -> Result<(), FollowError> {
        let context = Arc::clone(&self.context);
        let mut phase = context.phase.clone();
        if *phase.borrow() == Phase::Joining {
            let mut has_copied = context.has_copied.lock().await;
            if hello.joined && !*has_copied && context.members.host(self.address).is_some() {
                *has_copied = self.copy_counters(calls, hello.origin).await?;
            }
            drop(has_copied);
            self.set_state(MemberState::Contacted);
            let _ = phase.wait_for(|phase| *phase == Phase::Following).await;
        }
        Ok(())
    }

    async fn pull(
        &self,
        calls: &mut Calls,
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
        calls.pull(request).await
    }

    /// Connects to the address. Reads the certificates for each connection, so that changed files take effect.
    async fn connect(&self) -> Result<Channel, FollowError> {
        let scheme = if self.context.tls.is_some() { "https" } else { "http" };
        let mut endpoint = Endpoint::from_shared(format!("{scheme}://{}", self.address))?
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES)
            .tcp_nodelay(true);
        if let Some(settings) = &self.context.tls {
            let certificates = read_file(files::read_certificates, settings.cert_file.as_deref())?;
            let key = read_file(files::read_key, settings.key_file.as_deref())?;
            let authorities = read_file(files::read_authorities, settings.ca_file.as_deref())?;
            let tls = ClientTlsConfig::new()
                .ca_certificate(Certificate::from_pem(authorities))
                .identity(Identity::from_pem(certificates, key))
                .domain_name(self.server_name(settings));
            endpoint = endpoint.tls_config(tls)?;
        }
        let channel = within(CONNECT_TIMEOUT, endpoint.connect()).await;
        Ok(channel.map_err(|_| FollowError::Timeout(CONNECT_TIMEOUT))??)
    }

    /// Returns the name that the certificate of the instance must have.
    fn server_name(&self, settings: &TlsSettings) -> String {
        if let Some(name) = &settings.server_name {
            return name.clone();
        }
        if let Some(host) = self.context.members.host(self.address) {
            return host;
        }
        // An instance that DNS does not contain yet is expected to have the name of the others.
        if let Some(host) = &self.context.default_host {
            return host.clone();
        }
        self.address.ip().to_string()
    }
}

/// Reads a file of the TLS settings.
fn read_file(read: fn(&Path) -> io::Result<Vec<u8>>, path: Option<&Path>) -> Result<Vec<u8>, FollowError> {
    let path = path.unwrap_or(Path::new(""));
    read(path).map_err(|source| FollowError::File { path: path.to_owned(), source })
}
