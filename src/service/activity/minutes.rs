//! [`Minute`]: the hits of a rule in one minute, and sums of minutes.

use std::collections::{HashMap, VecDeque};

use serde::{Deserialize, Serialize};

use crate::engine::RuleHits;

/// Number of minutes that are stored.
pub(super) const MAX_MINUTES: usize = 60;

/// The requests and hits of a rule in one minute, or of several rules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Minute {
    /// Denied requests.
    pub denied_requests: u32,
    /// Requests.
    pub requests: u32,
    /// Denied hits.
    pub denied: u32,
    /// Requested hits.
    pub requested: u32,
}

impl Minute {
    pub(super) fn new(hits: &RuleHits) -> Self {
        Self {
            denied_requests: saturated(hits.denied_requests),
            requests: saturated(hits.requests),
            denied: saturated(hits.denied),
            requested: saturated(hits.requested),
        }
    }

    pub(super) fn add(&mut self, other: &Self) {
        self.denied_requests = self.denied_requests.saturating_add(other.denied_requests);
        self.requests = self.requests.saturating_add(other.requests);
        self.denied = self.denied.saturating_add(other.denied);
        self.requested = self.requested.saturating_add(other.requested);
    }
}

/// Returns a number as `u32`, or the maximum if it is too large.
fn saturated(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// The minutes of other instances, by the id of the rule.
pub(super) type AddedMinutes = HashMap<usize, Vec<Minute>>;

/// Adds finished minutes. The last one is the latest.
pub(super) fn add_minutes<'m>(sums: &mut Vec<Minute>, minutes: impl ExactSizeIterator<Item = &'m Minute>) {
    sums.resize(MAX_MINUTES, Minute::default());
    let first = MAX_MINUTES.saturating_sub(minutes.len());
    for (sum, minute) in sums[first..].iter_mut().zip(minutes) {
        sum.add(minute);
    }
}

/// Sums minutes of a rule.
pub(super) fn sum(minutes: &VecDeque<Minute>) -> RuleHits {
    let mut sum = RuleHits::default();
    for minute in minutes {
        sum.denied_requests += u64::from(minute.denied_requests);
        sum.requests += u64::from(minute.requests);
        sum.denied += u64::from(minute.denied);
        sum.requested += u64::from(minute.requested);
    }
    sum
}

/// Returns the rank of a rule: its denied requests, then its requests.
pub(super) fn rank(minutes: &VecDeque<Minute>) -> (u64, u64) {
    let sum = sum(minutes);
    (sum.denied_requests, sum.requests)
}
