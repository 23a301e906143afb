//! [`Subscriber`]: the state of another instance that pulls the increments of this one.

use std::{collections::VecDeque, sync::Arc};

use sluicegate_algorithm::Micros;

use super::{backlog::Backlog, increment::Increment};

/// The position of another instance, the batch that it has not confirmed, and older increments that it needs.
pub(super) struct Subscriber {
    /// The last confirmed position.
    position: u64,
    /// The batch after it that was sent, with the position at its end. It is resent unchanged until it is confirmed.
    sent: Option<(u64, Vec<Arc<Increment>>)>,
    /// Increments after `sent` that are no longer kept for all.
    backlog: Backlog,
    pub(super) pulled_at: Micros,
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
        self.sent.as_ref().map(|(until, _)| *until)
    }

    pub(super) fn backlog_changes(&self) -> usize {
        self.backlog.changes()
    }

    /// Accepts a position if it is the last confirmed one or the end of the batch that was sent.
    pub(super) fn confirm(&mut self, position: u64) -> bool {
        if self.sent.as_ref().is_some_and(|(until, _)| *until == position) {
            self.position = position;
            self.sent = None;
        }
        self.position == position
    }

    /// Keeps an increment that is about to be removed from the recent ones, if the subscriber has not received it.
    pub(super) fn keep(&mut self, increment: &Increment, now: Micros) {
        let received = self.sent.as_ref().map_or(self.position, |(until, _)| *until);
        if increment.sequence > received {
            self.backlog.add(increment, now);
        }
    }

    /// Drops the oldest part of the backlog and returns its number of changes. The subscriber never receives them.
    pub(super) fn drop_oldest(&mut self) -> u64 {
        self.backlog.drop_oldest()
    }

    /// Returns the position before and after the next batch, and its increments; `None` if there are no increments.
    ///
    /// The batch has at most `max_changes` changes, or one increment.
    pub(super) fn next_batch(
        &mut self,
        recent: &VecDeque<Arc<Increment>>,
        max_changes: usize,
        now: Micros,
    ) -> Option<(u64, u64, Vec<Arc<Increment>>)> {
        if self.sent.is_none() {
            let mut increments = Vec::new();
            let mut changes = 0;
            let mut add = |increment: Arc<Increment>| {
                changes += increment.changes.len();
                increments.push(increment);
                changes < max_changes
            };
            let mut has_room = true;
            while has_room && let Some(merged) = self.backlog.pop(now) {
                has_room = add(Arc::new(merged));
            }
            if has_room {
                let start = recent.partition_point(|increment| increment.sequence <= self.position);
                let _ = recent.iter().skip(start).cloned().all(add);
            }
            self.sent = increments.last().map(|last| last.sequence).map(|until| (until, increments));
        }
        self.sent.as_ref().map(|(until, increments)| (self.position, *until, increments.clone()))
    }
}
