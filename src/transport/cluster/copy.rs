//! Copies of the counters of another instance.

use std::time::Duration;

use sluicegate_proto::sluicegate::cluster::v1 as proto;
use tokio::time::{Instant, timeout_at};

use super::{PROTOCOL, calls::Calls, error::FollowError, follower::Follower, message, violation::Violation};
use crate::algorithm::Micros;

/// Maximum time of a copy. Other copies, and the join of this instance, wait for it.
const COPY_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum difference of two clocks at which counters are copied, because their states contain times.
const MAX_CLOCK_DIFFERENCE: Micros = Micros::from_secs(30);

/// The result of a copy.
#[derive(Default)]
struct Copied {
    /// The positions that the copy contains: the epoch of each instance, and the number of its last increment.
    positions: Vec<(u64, u64)>,
    counters: usize,
    /// Whether the clock of the instance differs by at most [`MAX_CLOCK_DIFFERENCE`]; `None` before the first page.
    is_same_clock: Option<bool>,
    /// Whether all pages were received.
    is_complete: bool,
}

impl Follower {
    /// Copies the counters of the instance with the epoch `origin`, unless a copy from another instance has set a
    /// position for this epoch in the meantime.
    pub(super) async fn copy(&mut self, calls: &mut Calls, origin: u64) -> Result<(), FollowError> {
        let position = self.context.peers.position(origin);
        let context = std::sync::Arc::clone(&self.context);
        let mut has_copied = context.has_copied.lock().await;
        if context.peers.position(origin) == position {
            *has_copied |= self.copy_counters(calls, origin).await?;
        }
        Ok(())
    }

    /// Copies the counters of the instance. Returns whether the copy is complete.
    pub(super) async fn copy_counters(&mut self, calls: &mut Calls, origin: u64) -> Result<bool, FollowError> {
        let mut copied = Copied::default();
        let receiving = self.receive_copy(calls, &mut copied);
        if let Ok(received) = timeout_at(Instant::now() + COPY_TIMEOUT, receiving).await {
            received?;
        }
        let now = self.context.clock.now();
        let Copied { mut positions, counters, is_same_clock, is_complete } = copied;
        if !is_complete {
            self.incomplete_copies += 1;
            if self.incomplete_copies > 1 {
                return Err(Violation::Copy.into());
            }
            // The hits of other instances may be missing in it: they are copied from another one.
            positions.retain(|(epoch, _)| *epoch == origin);
        }
        self.context.peers.continue_from(origin, &positions, now);
        match is_same_clock {
            Some(false) => tracing::warn!(
                peer = %self.address,
                "the clock of a peer differs by more than 30 s: its counters were not copied, only new hits are received"
            ),
            Some(true) if is_complete => tracing::info!(peer = %self.address, counters, "counters copied from a peer"),
            Some(true) | None => tracing::warn!(
                peer = %self.address,
                counters,
                "received only a part of a peer's counters; copying from another peer"
            ),
        }
        Ok(is_complete)
    }

    async fn receive_copy(&self, calls: &mut Calls, copied: &mut Copied) -> Result<(), FollowError> {
        let peers = &self.context.peers;
        let clock = &self.context.clock;
        let mut pages = calls.copy(proto::CopyRequest { protocol: PROTOCOL }).await?;
        let mut pages_received = 0;
        while let Some(page) = pages.next().await? {
            pages_received += 1;
            if page.now_us > 0 {
                copied.positions = page.positions.iter().map(|one| (one.origin, one.sequence)).collect();
                copied.is_same_clock = Some(clock.now().get().abs_diff(page.now_us) <= MAX_CLOCK_DIFFERENCE.get());
            }
            if page.counters.is_empty() && pages_received > 1 {
                return Err(Violation::Copy.into());
            }
            copied.counters += page.counters.len();
            if copied.counters > peers.max_counters() {
                // An instance has at most this number, unless it lies.
                return Ok(());
            }
            if copied.is_same_clock == Some(true) {
                peers.insert_copies(message::decode_copies(&page.counters), clock.now());
            }
            tokio::task::yield_now().await;
        }
        copied.is_complete = true;
        Ok(())
    }
}
