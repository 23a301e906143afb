//! [`Metrics`]: decisions that this instance makes without a store call, and the calls that make them possible.

use std::sync::Arc;

use sluicegate_metrics::{Counter, Meter, Registrar, WorkerId};
use sluicegate_store::StepOutcome;

use super::store_call::StoreCall;

/// Metrics of the deny cache, leases, grants and eventual counters.
pub struct Metrics {
    pub(super) deny_cache_denials: Counter,
    pub(super) lease_decisions: Counter,
    /// Hits taken for leases, and hits returned from leases to the store.
    leased_hits: Counter,
    returned_hits: Counter,
    /// Hits granted to callers: all of them, those reported as used, those returned unused, and those never reported.
    pub(super) granted_hits: Counter,
    grant_used_hits: Counter,
    grant_returned_hits: Counter,
    pub(super) grant_unreported_hits: Counter,
    pub(super) eventual_decisions: Counter,
    /// Hits that eventual counters reported to the store, and hits whose report may not have been counted.
    pub(super) eventual_reported_hits: Counter,
    pub(super) eventual_lost_hits: Counter,
}

impl Metrics {
    /// Creates metrics at zero for `workers` workers.
    #[must_use]
    pub fn new(workers: usize) -> Arc<Self> {
        Arc::new(Self {
            deny_cache_denials: Counter::new(workers),
            lease_decisions: Counter::new(workers),
            leased_hits: Counter::new(workers),
            returned_hits: Counter::new(workers),
            granted_hits: Counter::new(workers),
            grant_used_hits: Counter::new(workers),
            grant_returned_hits: Counter::new(workers),
            grant_unreported_hits: Counter::new(workers),
            eventual_decisions: Counter::new(workers),
            eventual_reported_hits: Counter::new(workers),
            eventual_lost_hits: Counter::new(workers),
        })
    }

    pub(super) fn add_grant_report(&self, worker: WorkerId, used: u64, returned: u64) {
        self.grant_used_hits.add(worker, used);
        self.grant_returned_hits.add(worker, returned);
    }

    /// Counts the hits of a completed lease call, if the store accepted the call.
    pub(super) fn add_store_call(&self, worker: WorkerId, call: &StoreCall, outcome: Option<&StepOutcome>) {
        let counter = if call.hit.action.releases() { &self.returned_hits } else { &self.leased_hits };
        if outcome.is_some_and(|outcome| outcome.allowed) {
            counter.add(worker, call.hit.cost);
        }
    }

    /// Returns the numbers of counter operations decided from a lease, from an eventual counter and from the deny cache.
    #[must_use]
    pub fn decisions(&self) -> [u64; 3] {
        [&self.lease_decisions, &self.eventual_decisions, &self.deny_cache_denials].map(Counter::get)
    }

    /// Registers all metrics with the meter.
    pub fn observe(self: &Arc<Self>, meter: &dyn Meter) {
        let registrar = Registrar { meter, source: self };
        registrar.counter(
            "sluicegate_deny_cache_denials_total",
            "Number of counter operations denied from the deny cache",
            |metrics| metrics.deny_cache_denials.get(),
        );
        registrar.counter(
            "sluicegate_lease_decisions_total",
            "Number of counter operations decided from a lease",
            |metrics| metrics.lease_decisions.get(),
        );
        registrar.counter("sluicegate_lease_hits_total", "Number of hits taken from the store for leases", |metrics| {
            metrics.leased_hits.get()
        });
        registrar.counter("sluicegate_grant_hits_total", "Number of leased hits granted to callers", |metrics| {
            metrics.granted_hits.get()
        });
        registrar.counter(
            "sluicegate_grant_reported_hits_total",
            "Number of granted hits that callers reported as used",
            |metrics| metrics.grant_used_hits.get(),
        );
        registrar.counter(
            "sluicegate_grant_returned_hits_total",
            "Number of granted hits that callers returned unused",
            |metrics| metrics.grant_returned_hits.get(),
        );
        registrar.counter(
            "sluicegate_grant_unreported_hits_total",
            "Number of granted hits that no caller reported in time",
            |metrics| metrics.grant_unreported_hits.get(),
        );
        registrar.counter(
            "sluicegate_eventual_decisions_total",
            "Number of counter operations decided from an eventual counter",
            |metrics| metrics.eventual_decisions.get(),
        );
        registrar.counter(
            "sluicegate_eventual_reported_hits_total",
            "Number of hits that eventual counters reported to the store",
            |metrics| metrics.eventual_reported_hits.get(),
        );
        registrar.counter(
            "sluicegate_eventual_lost_hits_total",
            "Number of hits of eventual counters that the store may not have counted",
            |metrics| metrics.eventual_lost_hits.get(),
        );
        registrar.counter(
            "sluicegate_lease_returned_hits_total",
            "Number of leased hits returned to the store",
            |metrics| metrics.returned_hits.get(),
        );
    }
}
