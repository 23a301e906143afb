//! [`Metrics`] of the exchange with peers.

use std::sync::Arc;

use sluicegate_metrics::{Counter, Meter, Registrar, WorkerId};

/// Metrics of the exchange. A change is the hits of one counter and limit in one increment.
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
        Arc::new(Self {
            published: Counter::new(1),
            applied: Counter::new(1),
            expired: Counter::new(1),
            dropped: Counter::new(1),
            copied: Counter::new(1),
            sent_bytes: Counter::new(1),
        })
    }

    /// Adds the size of increments that were sent to a peer.
    pub fn add_sent_bytes(&self, bytes: u64) {
        self.sent_bytes.add(WorkerId(0), bytes);
    }

    /// Registers all metrics with the meter.
    pub fn observe(self: &Arc<Self>, meter: &dyn Meter) {
        let registrar = Registrar { meter, source: self };
        registrar.counter(
            "sluicegate_cluster_changes_published_total",
            "Changes of counters that this instance published for its peers",
            |metrics| metrics.published.get(),
        );
        registrar.counter(
            "sluicegate_cluster_changes_applied_total",
            "Changes of counters by peers that this instance received",
            |metrics| metrics.applied.get(),
        );
        registrar.counter(
            "sluicegate_cluster_changes_expired_total",
            "Received changes that no longer counted on arrival",
            |metrics| metrics.expired.get(),
        );
        registrar.counter(
            "sluicegate_cluster_changes_dropped_total",
            "Changes that an absent peer will never receive because too many were waiting for it",
            |metrics| metrics.dropped.get(),
        );
        registrar.counter(
            "sluicegate_cluster_sent_bytes_total",
            "Bytes of changes that this instance sent to its peers",
            |metrics| metrics.sent_bytes.get(),
        );
        registrar.counter("sluicegate_cluster_counters_copied_total", "Counters copied from a peer", |metrics| {
            metrics.copied.get()
        });
    }
}
