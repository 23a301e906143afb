//! [`Metrics`] of the exchange with peers.

use std::sync::Arc;

use sluicegate_metrics::{Counter, Meter, WorkerId, observe_counter};

/// Counters of changes: hits of one counter and limit in one increment.
pub struct Metrics {
    pub(super) published: Counter,
    pub(super) applied: Counter,
    pub(super) expired: Counter,
    pub(super) dropped: Counter,
    pub(super) copied: Counter,
    sent_bytes: Counter,
}

impl Metrics {
    /// Creates metrics at zero.
    #[must_use]
    pub fn new() -> Arc<Self> {
        let counter = || Counter::new(1);
        Arc::new(Self {
            published: counter(),
            applied: counter(),
            expired: counter(),
            dropped: counter(),
            copied: counter(),
            sent_bytes: counter(),
        })
    }

    pub(super) fn add_published(&self, changes: u64) {
        self.published.add(WorkerId(0), changes);
    }

    pub(super) fn add_applied(&self, changes: u64) {
        self.applied.add(WorkerId(0), changes);
    }

    pub(super) fn add_expired(&self, changes: u64) {
        self.expired.add(WorkerId(0), changes);
    }

    pub(super) fn add_dropped(&self, changes: u64) {
        self.dropped.add(WorkerId(0), changes);
    }

    pub(super) fn add_copied(&self, counters: u64) {
        self.copied.add(WorkerId(0), counters);
    }

    /// Adds the size of increments that were sent to a peer.
    pub fn add_sent_bytes(&self, bytes: u64) {
        self.sent_bytes.add(WorkerId(0), bytes);
    }

    /// Registers all metrics with the meter.
    pub fn observe(self: &Arc<Self>, meter: &dyn Meter) {
        let register = |name, description, counter: fn(&Self) -> &Counter| {
            let this = Arc::clone(self);
            observe_counter(meter, name, description, move || counter(&this).get());
        };
        let published = "Changes of counters that this instance published for its peers";
        register("sluicegate_cluster_changes_published_total", published, |metrics| &metrics.published);
        let applied = "Changes of counters by peers that this instance received";
        register("sluicegate_cluster_changes_applied_total", applied, |metrics| &metrics.applied);
        let expired = "Received changes that no longer counted on arrival";
        register("sluicegate_cluster_changes_expired_total", expired, |metrics| &metrics.expired);
        let dropped = "Changes that an absent peer will never receive because too many were waiting for it";
        register("sluicegate_cluster_changes_dropped_total", dropped, |metrics| &metrics.dropped);
        let sent = "Bytes of changes that this instance sent to its peers";
        register("sluicegate_cluster_sent_bytes_total", sent, |metrics| &metrics.sent_bytes);
        let copied = "Counters copied from a peer";
        register("sluicegate_cluster_counters_copied_total", copied, |metrics| &metrics.copied);
    }
}
