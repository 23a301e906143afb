//! [`Subscriber`]: the state of another instance that pulls the increments of this one.

use std::{collections::VecDeque, sync::Arc};

use sluicegate_algorithm::Micros;

use super::{backlog::Backlog, increment::Increment};

/// The position of another instance, the batch that it has not confirmed, and older increments that it needs.
pub(super) struct Subscriber {
    /// The last confirmed position.
    position: u64,
    /// The batch after `position` that was sent. It is resent unchanged until it is confirmed.
    sent: Option<SentBatch>,
    /// Increments after `sent` that are no longer kept for all.
    backlog: Backlog,
    pub(super) pulled_at: Micros,
}

/// Increments after the confirmed position that were sent together.
#[derive(Clone)]
pub(super) struct SentBatch {
    /// Position after the last increment.
    pub(super) until: u64,
    /// The increments, the oldest first.
    pub(super) increments: Vec<Arc<Increment>>,
}

impl Subscriber {
    pub(super) fn new(position: u64) -> Self {
        Self { position, sent: None, backlog: Backlog::default(), pulled_at: Micros::ZERO }
    }

    pub(super) const fn position(&self) -> u64 {
        self.position
    }

    /// Returns the position at the end of the batch that has not been confirmed.
    #[cfg(test)]
    pub(super) fn sent_until(&self) -> Option<u64> {
        self.sent.as_ref().map(|sent| sent.until)
    }

    pub(super) fn backlog_changes(&self) -> usize {
        self.backlog.changes()
    }

    /// Returns whether a position is the last confirmed one or the end of the batch that was sent. In the second case,
    /// the batch is confirmed.
    pub(super) fn confirm(&mut self, position: u64) -> bool {
        if self.sent.as_ref().is_some_and(|sent| sent.until == position) {
            self.position = position;
            self.sent = None;
        }
        self.position == position
    }

    /// Keeps an increment that is about to be removed from the recent ones, if the subscriber has not received it.
    pub(super) fn keep(&mut self, increment: &Increment, now: Micros) {
        let received = match &self.sent {
            Some(sent) => sent.until,
            None => self.position,
        };
        if increment.sequence > received {
            self.backlog.add(increment, now);
        }
    }

    /// Drops the oldest part of the backlog and returns its number of changes. The subscriber never receives them.
    pub(super) fn drop_oldest(&mut self) -> u64 {
        self.backlog.drop_oldest()
    }

    /// Returns the next batch after the position, or `None` if there are no increments.
    ///
    /// The batch has at least one increment. More are added until it has `max_changes` changes.
    pub(super) fn next_batch(
        &mut self,
        recent: &VecDeque<Arc<Increment>>,
        max_changes: usize,
        now: Micros,
    ) -> Option<SentBatch> {
        if self.sent.is_none() {
            self.sent = self.collect_batch(recent, max_changes, now);
        }
        self.sent.clone()
    }

    /// Collects increments after the position: those of the backlog, which it removes, then the recent ones.
    fn collect_batch(
        &mut self,
        recent: &VecDeque<Arc<Increment>>,
        max_changes: usize,
        now: Micros,
    ) -> Option<SentBatch> {
        let mut increments = Vec::new();
        let mut changes = 0;
        let mut is_full = false;
        while !is_full && let Some(merged) = self.backlog.pop(now) {
            changes += merged.changes.len();
            is_full = changes >= max_changes;
            increments.push(Arc::new(merged));
        }
        let start = recent.partition_point(|increment| increment.sequence <= self.position);
        for increment in recent.range(start..) {
            if is_full {
                break;
            }
            changes += increment.changes.len();
            is_full = changes >= max_changes;
            increments.push(Arc::clone(increment));
        }
        let until = increments.last()?.sequence;
        Some(SentBatch { until, increments })
    }
}
