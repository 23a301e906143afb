//! [`OverridesFollower`]: fetches the overrides of another instance and merges them, page by page.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use prost::Message as _;
use sluicegate_proto::sluicegate::cluster::v1 as proto;
use tokio::{
    runtime::Handle,
    sync::{Mutex, watch},
    time::{Instant, sleep, sleep_until},
};

use super::{
    PROTOCOL,
    calls::Calls,
    context::Context,
    error::FollowError,
    message,
    pace::{Allowance, Pace},
    violation::Violation,
};
use crate::{
    metrics::LogThrottle,
    service::overrides::{MemberExchange, Merged, PeerOverrides, PeerRuleSets},
    store::{StoreError, overrides::OverrideStoreError},
};

/// First and maximum pause before overrides that could not be merged are fetched again.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// Maximum pause after overrides that were merged.
const MAX_REST: Duration = Duration::from_secs(1);
/// Maximum number of pages of overrides, of up to 100 overrides each.
const MAX_PAGES: usize = 50_000;
/// Maximum total number of bytes of the pages.
const MAX_BYTES: usize = 512 << 20;
/// Number of changes that a member can send in a burst, which is the number that its journal keeps, and later in each
/// second.
const CHANGES: (f64, f64) = (1_000.0, 50.0);
/// Number of bytes that a member can send in a burst, and later in each second.
const BYTES: (f64, f64) = (33_554_432.0, 4_194_304.0);

/// The position of an instance in its overrides: its epoch, and the number of changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct OverridesPosition {
    pub(super) epoch: u64,
    pub(super) changes: u64,
}

/// The exchange of overrides with the instance at one address.
pub(super) struct OverridesFollower {
    context: Arc<Context>,
    address: SocketAddr,
    /// Position of the last overrides that were fetched.
    fetched: OverridesPosition,
    /// Position of the last overrides that were merged, or `None` if there are none.
    merged: Option<u64>,
    /// Time at which overrides that could not be merged are fetched again.
    retry_at: Option<Instant>,
    retry_pause: Duration,
    changes: Allowance,
    bytes: Allowance,
    /// Locked by the task that merges a page.
    rule_sets: Arc<Mutex<PeerRuleSets>>,
    /// Whether merged values are not in force yet.
    is_merging: bool,
    log_ignored: LogThrottle,
    log_unstored: LogThrottle,
}

/// Outcome of one exchange.
struct Exchanged {
    position: u64,
    merged: Merged,
    /// The error of the journal, after which nothing else was merged.
    error: Option<OverrideStoreError>,
}

impl OverridesFollower {
    pub(super) fn new(context: Arc<Context>, address: SocketAddr) -> Self {
        Self {
            context,
            address,
            fetched: OverridesPosition::default(),
            merged: None,
            retry_at: None,
            retry_pause: RETRY.0,
            changes: Allowance::new(CHANGES.0, CHANGES.1),
            bytes: Allowance::new(BYTES.0, BYTES.1),
            rule_sets: Arc::default(),
            is_merging: false,
            log_ignored: LogThrottle::default(),
            log_unstored: LogThrottle::default(),
        }
    }

    /// Merges the overrides whenever the position of the instance changes. Ends with an error only.
    ///
    /// `merged` receives the epoch of the instance after its overrides have been merged for the first time.
    pub(super) async fn run(
        &mut self,
        calls: &mut Calls,
        positions: &mut watch::Receiver<OverridesPosition>,
        merged: &watch::Sender<u64>,
    ) -> Result<(), FollowError> {
        if self.is_merging
            && let Some(exchange) = self.context.overrides.clone()
        {
            // The connection ended during an exchange.
            let _ = self.end_merge(exchange).await;
        }
        loop {
            let position = *positions.borrow_and_update();
            if position.epoch != 0 && self.is_due(position) {
                let pace = Pace::start();
                self.exchange(calls, position).await?;
                merged.send_replace(position.epoch);
                sleep(pace.pause(true).min(MAX_REST)).await;
            }
            merged.send_replace(position.epoch);
            let retry_at = self.retry_at;
            tokio::select! {
                changed = positions.changed() => if changed.is_err() { return Ok(()) },
                () = sleep_until(retry_at.unwrap_or_else(Instant::now)), if retry_at.is_some() => {}
            }
        }
    }

    /// Returns whether overrides are to be fetched from an instance with this position.
    fn is_due(&self, position: OverridesPosition) -> bool {
        self.fetched != position || self.retry_at.is_some_and(|at| at <= Instant::now())
    }

    /// Fetches and merges the overrides after the last position.
    ///
    /// If they cannot be stored, for example because the disk is full, the next attempt is made after a pause.
    async fn exchange(&mut self, calls: &mut Calls, position: OverridesPosition) -> Result<(), FollowError> {
        let Some(exchange) = self.context.overrides.clone() else {
            self.fetched = position;
            return Ok(());
        };
        if self.fetched.epoch != position.epoch {
            self.merged = None;
        }
        let Exchanged { position: until, merged, error } = self.merge_pages(calls, exchange).await?;
        self.fetched = OverridesPosition { epoch: position.epoch, changes: until };
        if error.is_none() && !merged.is_deferred {
            self.merged = Some(until);
            self.retry_at = None;
            self.retry_pause = RETRY.0;
            return Ok(());
        }
        self.retry_at = Some(Instant::now() + self.retry_pause);
        if let Some(error) = error {
            // The disk may have room again at any time.
            self.retry_pause = RETRY.0;
            if self.log_unstored.should_log() {
                let reason = crate::metrics::chain(&error);
                tracing::warn!(
                    peer = %self.address,
                    reason,
                    "cannot store the overrides of a peer; trying again, and its hits are counted meanwhile"
                );
            }
        } else {
            self.retry_pause = self.retry_pause.saturating_mul(2).min(RETRY.1);
        }
        Ok(())
    }

    async fn merge_pages(&mut self, calls: &mut Calls, exchange: MemberExchange) -> Result<Exchanged, FollowError> {
        let request = proto::OverridesRequest { protocol: PROTOCOL, after: self.merged };
        let mut pages = calls.overrides(request).await?;
        let mut exchanged = Exchanged { position: 0, merged: Merged::default(), error: None };
        let mut count = 0;
        let mut bytes = 0;
        let outcome = loop {
            let page = match pages.next().await {
                Ok(Some(page)) => page,
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            };
            let length = page.encoded_len();
            count += 1;
            bytes += length;
            let is_empty = page.changes.is_empty() && page.overrides.is_empty() && page.rule_sets.is_empty();
            if count > MAX_PAGES || bytes > MAX_BYTES || is_empty && count > 1 {
                break Err(Violation::Overrides.into());
            }
            let wait = self.changes.take(page.changes.len() as f64).max(self.bytes.take(length as f64));
            // A sleep of 0 takes a millisecond.
            if !wait.is_zero() {
                sleep(wait).await;
            }
            exchanged.position = page.position;
            match self.merge_page(exchange.clone(), message::decode_overrides(page)).await {
                Ok(merged) => {
                    // The last page may never come.
                    self.report(&merged);
                    exchanged.merged.add(merged);
                }
                Err(error) => {
                    exchanged.error = Some(error);
                    break Ok(());
                }
            }
        };
        match self.end_merge(exchange).await {
            Ok(merged) => exchanged.merged.add(merged),
            Err(error) => exchanged.error = exchanged.error.or(Some(error)),
        }
        outcome.map(|()| exchanged)
    }

    /// Merges one page. The merge goes on if this follower is dropped: a change in the journal must come into force.
    async fn merge_page(
        &mut self,
        exchange: MemberExchange,
        page: PeerOverrides,
    ) -> Result<Merged, OverrideStoreError> {
        self.is_merging = true;
        let rule_sets = Arc::clone(&self.rule_sets);
        let merging = tokio::spawn(async move { exchange.merge_page(page, &mut *rule_sets.lock().await).await });
        merging.await.map_err(|_| StoreError::Missing)?
    }

    async fn end_merge(&mut self, exchange: MemberExchange) -> Result<Merged, OverrideStoreError> {
        let rule_sets = Arc::clone(&self.rule_sets);
        let ending = tokio::spawn(async move { exchange.end_merge(&mut *rule_sets.lock().await).await });
        let merged = ending.await.map_err(|_| StoreError::Missing)?;
        self.is_merging = false;
        merged
    }

    fn report(&self, merged: &Merged) {
        let ignored = merged.ignored;
        self.context.violations.add_ignored(&ignored);
        if ignored != Default::default() && self.log_ignored.should_log() {
            tracing::warn!(
                peer = %self.address,
                invalid_versions = ignored.versions,
                invalid_overrides = ignored.overrides,
                wrong_rule_sets = ignored.rule_sets,
                over_budget = ignored.over_budget,
                "ignored overrides of a peer that no operator could have set"
            );
        }
    }
}

impl Drop for OverridesFollower {
    /// Puts the merged values in force if the address is no longer followed.
    fn drop(&mut self) {
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        if self.is_merging
            && let Some(exchange) = self.context.overrides.clone()
        {
            let rule_sets = Arc::clone(&self.rule_sets);
            runtime.spawn(async move { drop(exchange.end_merge(&mut *rule_sets.lock().await).await) });
        }
    }
}
