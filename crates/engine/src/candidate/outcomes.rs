//! [`Outcomes`]: numbers of hits by the decisions of two sets of rules.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Hits by the decisions of the candidate rules and of the rules in force.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcomes {
    /// All evaluated hits.
    pub requested: u64,
    /// Hits that the candidate rules would deny.
    pub denied: u64,
    /// Hits that the candidate rules would deny and that were allowed.
    pub newly_denied: u64,
    /// Hits that the candidate rules would allow and that were denied.
    pub newly_allowed: u64,
}

impl Outcomes {
    pub(super) fn new(hits: u64, would_deny: bool, is_denied: bool) -> Self {
        let hits_if = |is: bool| if is { hits } else { 0 };
        Self {
            requested: hits,
            denied: hits_if(would_deny),
            newly_denied: hits_if(would_deny && !is_denied),
            newly_allowed: hits_if(!would_deny && is_denied),
        }
    }

    pub(super) fn add(&mut self, other: Self) {
        self.requested += other.requested;
        self.denied += other.denied;
        self.newly_denied += other.newly_denied;
        self.newly_allowed += other.newly_allowed;
    }
}

/// The [`Outcomes`] of one rule as atomic counters.
#[derive(Default)]
pub(super) struct Tally([AtomicU64; 4]);

impl Tally {
    pub(super) fn add(&self, outcomes: Outcomes) {
        let Outcomes { requested, denied, newly_denied, newly_allowed } = outcomes;
        for (sum, number) in self.0.iter().zip([requested, denied, newly_denied, newly_allowed]) {
            if number > 0 {
                sum.fetch_add(number, Relaxed);
            }
        }
    }

    pub(super) fn get(&self) -> Outcomes {
        let [requested, denied, newly_denied, newly_allowed] = self.0.each_ref().map(|sum| sum.load(Relaxed));
        Outcomes { requested, denied, newly_denied, newly_allowed }
    }
}
