//! How much is decided without asking.

use std::sync::Arc;

use opentelemetry::metrics::Meter;

use super::store_call::StoreCall;
use crate::{
    metrics::{Counter, WorkerId, observe_counter},
    store::StepOutcome,
};

/// Counts of what this instance knows.
pub struct Metrics {
    refused: Counter,
    decided_by_lease: Counter,
    /// Hits that were taken in advance, and those that went back.
    leased: Counter,
    given_back: Counter,
    /// Hits that callers hold or held: all, those that they admitted, those that came back, and all others.
    granted: Counter,
    reported: Counter,
    ungranted: Counter,
    unreported: Counter,
    decided_by_replica: Counter,
    /// Hits that the store was told of later, and those of which nobody knows whether it was.
    told: Counter,
    lost: Counter,
}

impl Metrics {
    /// Nothing counted yet.
    #[must_use]
    pub fn new(workers: usize) -> Arc<Self> {
        let counter = || Counter::new(workers);
        Arc::new(Self {
            refused: counter(),
            decided_by_lease: counter(),
            leased: counter(),
            given_back: counter(),
            granted: counter(),
            reported: counter(),
            ungranted: counter(),
            unreported: counter(),
            decided_by_replica: counter(),
            told: counter(),
            lost: counter(),
        })
    }

    pub(super) fn refused(&self, worker: WorkerId, hits: u64) {
        self.refused.add(worker, hits);
    }

    pub(super) fn decided_by_lease(&self, worker: WorkerId, hits: u64) {
        self.decided_by_lease.add(worker, hits);
    }

    pub(super) fn granted(&self, worker: WorkerId, hits: u64) {
        self.granted.add(worker, hits);
    }

    pub(super) fn reported(&self, worker: WorkerId, spent: u64, back: u64) {
        self.reported.add(worker, spent);
        self.ungranted.add(worker, back);
    }

    pub(super) fn unreported(&self, worker: WorkerId, hits: u64) {
        self.unreported.add(worker, hits);
    }

    pub(super) fn decided_by_replica(&self, worker: WorkerId, hits: u64) {
        self.decided_by_replica.add(worker, hits);
    }

    pub(super) fn reported_eventually(&self, worker: WorkerId, hits: u64, arrived: bool) {
        self.told.add(worker, if arrived { hits } else { 0 });
    }

    pub(super) fn lost(&self, worker: WorkerId, hits: u64) {
        self.lost.add(worker, hits);
    }

    pub(super) fn ran(&self, worker: WorkerId, errand: &StoreCall, counted: Option<&StepOutcome>) {
        let counter = if errand.action.releases() { &self.given_back } else { &self.leased };
        if counted.is_some_and(|counted| counted.allowed) {
            counter.add(worker, errand.hits);
        }
    }

    /// Shows everything to the meter.
    pub fn observe(self: &Arc<Self>, meter: &Meter) {
        let show = |name, description, counter: fn(&Self) -> &Counter| {
            let this = Arc::clone(self);
            observe_counter(meter, name, description, move || counter(&this).get());
        };
        let refused = "Questions to counters that were refused without asking the store";
        show("sluicegate_deny_cache_denials_total", refused, |it| &it.refused);
        let decided = "Questions to counters that were answered from a lease";
        show("sluicegate_lease_decisions_total", decided, |it| &it.decided_by_lease);
        show("sluicegate_lease_hits_total", "Hits that were taken in advance", |it| &it.leased);
        show("sluicegate_grant_hits_total", "Hits of leases that callers were given to admit by themselves", |it| {
            &it.granted
        });
        show("sluicegate_grant_reported_hits_total", "Of these, hits that callers said they admitted", |it| {
            &it.reported
        });
        show("sluicegate_grant_returned_hits_total", "Of these, hits that came back unused", |it| &it.ungranted);
        let unreported = "Of these, hits of which no caller said in time what became of them";
        show("sluicegate_grant_unreported_hits_total", unreported, |it| &it.unreported);
        let decided = "Questions to counters that were answered from what this instance knew of them";
        show("sluicegate_eventual_decisions_total", decided, |it| &it.decided_by_replica);
        show(
            "sluicegate_eventual_reported_hits_total",
            "Hits that were counted here and told to the store later",
            |it| &it.told,
        );
        let lost = "Hits that were counted here and of which nobody knows whether the store counted them";
        show("sluicegate_eventual_lost_hits_total", lost, |it| &it.lost);
        show("sluicegate_lease_returned_hits_total", "Hits that were taken in advance and given back", |it| {
            &it.given_back
        });
    }
}
