//! [`Outcomes`]: numbers of hits by the decisions of two sets of rules.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Hits by the decisions of evaluated rules, such as candidate rules, and of a baseline, such as the rules in force.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcomes {
    /// All evaluated hits.
    pub requested: u64,
    /// Hits that the evaluated rules deny.
    pub denied: u64,
    /// Hits that the evaluated rules deny and the baseline allowed.
    pub newly_denied: u64,
    /// Hits that the evaluated rules allow and the baseline denied.
    pub newly_allowed: u64,
}

impl Outcomes {
    /// Returns the outcome of hits that the evaluated rules deny or allow, and that the baseline denied or allowed.
    #[must_use]
    pub fn new(hits: u64, would_deny: bool, is_denied: bool) -> Self {
        Self {
            requested: hits,
            denied: if would_deny { hits } else { 0 },
            newly_denied: if would_deny && !is_denied { hits } else { 0 },
            newly_allowed: if !would_deny && is_denied { hits } else { 0 },
        }
    }

    /// Adds other outcomes.
    pub fn add(&mut self, other: Self) {
        self.requested += other.requested;
        self.denied += other.denied;
        self.newly_denied += other.newly_denied;
        self.newly_allowed += other.newly_allowed;
    }
}

/// The [`Outcomes`] of one rule as atomic counters.
#[derive(Default)]
pub(super) struct Tally {
    requested: AtomicU64,
    denied: AtomicU64,
    newly_denied: AtomicU64,
    newly_allowed: AtomicU64,
}

impl Tally {
    pub(super) fn add(&self, outcomes: Outcomes) {
        add_unless_zero(&self.requested, outcomes.requested);
        add_unless_zero(&self.denied, outcomes.denied);
        add_unless_zero(&self.newly_denied, outcomes.newly_denied);
        add_unless_zero(&self.newly_allowed, outcomes.newly_allowed);
    }

    pub(super) fn get(&self) -> Outcomes {
        Outcomes {
            requested: self.requested.load(Relaxed),
            denied: self.denied.load(Relaxed),
            newly_denied: self.newly_denied.load(Relaxed),
            newly_allowed: self.newly_allowed.load(Relaxed),
        }
    }
}

/// Adds hits to a sum, without a write for 0.
fn add_unless_zero(sum: &AtomicU64, hits: u64) {
    if hits > 0 {
        sum.fetch_add(hits, Relaxed);
    }
}
