//! The laws: how much may be admitted in a window, given the faults that affected it, and the admissions counted so far.

use std::collections::BTreeMap;

use crate::features::{FEATURES, Feature, Sharing, WINDOW};

/// Instances that share the counters in Redis, and peers.
pub(crate) const REDIS_INSTANCES: u64 = 3;
pub(crate) const PEERS: u64 = 2;
/// A master that was replaced forgets hits of at most this time in milliseconds: it answers for
/// `cluster-node-timeout` (one second) after it was cut off, and a lease was taken up to a second before it is spent.
const FORGOTTEN: u64 = 2_000;
/// Time in milliseconds after a fault until all instances know each other's hits again.
const SETTLING: u64 = 3_000;

/// Counters that a fault removes from Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loss {
    None,
    /// Hits that a replaced master had not replicated.
    RecentHits,
    /// All counters of a master.
    Counters,
}

/// Instances that may not know each other's hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Apart {
    Nobody,
    RedisInstances,
    Peers,
}

/// The effect of one fault on the laws, in milliseconds since 1970.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Disturbance {
    pub(crate) from: u64,
    /// `None` while the fault lasts.
    pub(crate) until: Option<u64>,
    pub(crate) loss: Loss,
    pub(crate) apart: Apart,
}

impl Disturbance {
    fn overlaps(&self, from: u64, until: u64) -> bool {
        self.from < until && self.until.is_none_or(|end| end + SETTLING > from)
    }
}

/// Returns how many hits of an entity may be admitted from `from` for one [`WINDOW`].
pub(crate) fn bound(feature: &Feature, from: u64, disturbances: &[Disturbance]) -> u64 {
    let relevant = || disturbances.iter().filter(|disturbance| disturbance.overlaps(from, from + WINDOW));
    let lost: u64 = relevant()
        .map(|disturbance| match disturbance.loss {
            Loss::None => 0,
            Loss::RecentHits => feature.offered(FORGOTTEN).min(feature.bound),
            Loss::Counters => feature.bound,
        })
        .sum();
    let delayed = |apart: Apart, instances: u64, staleness: u64, lost: u64| {
        let is_apart = relevant().any(|disturbance| disturbance.apart == apart);
        if is_apart { instances * (feature.bound + lost) } else { feature.bound + feature.offered(staleness) + lost }
    };
    match feature.sharing {
        Sharing::Exact => feature.bound + lost,
        Sharing::Eventual { staleness } => delayed(Apart::RedisInstances, REDIS_INSTANCES, staleness, lost),
        Sharing::Peers { staleness } => delayed(Apart::Peers, PEERS, staleness, 0),
    }
}

/// Returns how many slots may be in use, given the disturbances in the last `hold` milliseconds.
pub(crate) fn slots_bound(bound: u64, now: u64, hold: u64, disturbances: &[Disturbance]) -> u64 {
    let losses = disturbances.iter().filter(|it| it.loss != Loss::None && it.overlaps(now.saturating_sub(hold), now));
    bound * (1 + losses.count() as u64)
}

/// Admissions of one entity in one window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) feature: usize,
    pub(crate) entity: u64,
    /// Begin in milliseconds since 1970.
    pub(crate) from: u64,
    pub(crate) admitted: u64,
}

/// Counts admissions by window.
#[derive(Default)]
pub(crate) struct Ledger {
    open: BTreeMap<(u64, usize, u64), u64>,
}

impl Ledger {
    /// Counts a hit that was admitted between these times. A hit that may belong to either of two windows counts in
    /// none of them, so a count is never too high.
    pub(crate) fn admit(&mut self, feature: usize, entity: u64, sent: u64, received: u64) {
        if sent / WINDOW == received / WINDOW {
            *self.open.entry((sent / WINDOW, feature, entity)).or_default() += 1;
        }
    }

    /// Removes and returns the windows that ended before this time.
    pub(crate) fn close(&mut self, before: u64) -> Vec<Window> {
        let later = self.open.split_off(&(before / WINDOW, 0, 0));
        let closed = std::mem::replace(&mut self.open, later);
        let window = |((index, feature, entity), admitted)| Window { feature, entity, from: index * WINDOW, admitted };
        closed.into_iter().map(window).collect()
    }
}

impl Window {
    pub(crate) fn bound(&self, disturbances: &[Disturbance]) -> u64 {
        bound(&FEATURES[self.feature], self.from, disturbances)
    }
}
