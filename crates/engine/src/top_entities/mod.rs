//! [`TopEntities`]: the entities with the most denied requests and with the most hits, in memory of fixed size.
//!
//! Each worker has a sketch of its own per minute (module [`sketch`]) and never waits to update it: a request is not
//! counted while the sketch is being read. A worker with many requests samples them. Up to [`sketch::MAX_SAMPLES`] per
//! second it counts every request; beyond that it counts one in two, four, …, at random, with that weight. A count `c`
//! sampled at one in `k` has a standard error of √(c k).

mod sketch;

#[cfg(any(test, feature = "fuzz"))]
pub(super) use sketch::MAX_ENTRIES;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::Duration,
};

use parking_lot::Mutex;
use sluicegate_algorithm::Micros;
use sluicegate_metrics::{Striped, WorkerId};

use self::sketch::{Counts, Sketches, Sum};
use super::{Descriptor, overrides::Target};

/// The number by which entities are ranked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RankBy {
    /// Denied requests.
    #[default]
    Denied,
    /// Requested hits, whether they were allowed or not.
    Requested,
}

/// Sketches of the most frequent entities, per worker.
pub struct TopEntities {
    denied: Striped<Stripe>,
    requested: Striped<Stripe>,
}

/// The sketches of one worker.
#[derive(Default)]
struct Stripe {
    /// Number of requests to skip before the next one is counted.
    skips: AtomicU32,
    sketches: Mutex<Sketches>,
}

/// An estimate of a number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Estimate {
    /// Upper bound of the number.
    pub count: u64,
    /// Maximum by which `count` is too high.
    pub max_error: u64,
}

impl Estimate {
    /// Adds an estimate of another part of the same number.
    pub fn add(&mut self, other: Self) {
        self.count = self.count.saturating_add(other.count);
        self.max_error = self.max_error.saturating_add(other.max_error);
    }
}

/// An entity in a [`Ranking`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopEntity {
    /// The entity.
    pub target: Target,
    /// Name of the rule that counted the entity: the name of its limit, or the labels of its levels.
    pub rule: Arc<str>,
    /// Number of requests.
    pub requests: Estimate,
    /// Number of hits of the requests.
    pub hits: Estimate,
    /// Time since which the entity has been counted.
    pub since: Micros,
}

impl TopEntity {
    /// Returns the count by which the entity is ranked.
    fn ranked(&self, by: RankBy) -> u64 {
        match by {
            RankBy::Denied => self.requests.count,
            RankBy::Requested => self.hits.count,
        }
    }
}

/// The entities with the most denied requests, or with the most hits.
#[derive(Clone, Debug, Default)]
pub struct Ranking {
    /// The entities in descending order.
    pub top: Vec<TopEntity>,
    /// Time that the counts cover.
    pub period: Micros,
    /// Total number of hits, including those of entities that are not listed.
    pub hits: u64,
    /// Total number of requests, including those of entities that are not listed.
    pub requests: u64,
}

impl TopEntities {
    /// Longest time that a ranking can cover.
    pub const MAX_PERIOD: Duration = Duration::from_secs(3_600);
    /// Time that a ranking covers unless another is asked for.
    pub const DEFAULT_PERIOD: Duration = Duration::from_secs(300);

    /// Creates empty sketches for `workers` workers.
    #[must_use]
    pub fn new(workers: usize) -> Arc<Self> {
        Arc::new(Self { denied: Striped::new(workers), requested: Striped::new(workers) })
    }

    /// Records a decision about a descriptor.
    pub(super) fn record(
        &self,
        worker: WorkerId,
        domain: &str,
        descriptor: &Descriptor<'_>,
        rule: Option<&Arc<str>>,
        allowed: bool,
        now: Micros,
    ) {
        if descriptor.refund || descriptor.hits == 0 {
            return;
        }
        self.requested.of(worker).record(RankBy::Requested, domain, descriptor, rule, now);
        if !allowed {
            self.denied.of(worker).record(RankBy::Denied, domain, descriptor, rule, now);
        }
    }

    /// Returns up to `max_entities` entities that `filter` accepts, ranked by their requests or hits in the last
    /// `period`.
    ///
    /// Counts are stored per minute for the last five minutes, and per five minutes before that. Only those that begin
    /// in `period` are included.
    #[must_use]
    pub fn ranking(
        &self,
        by: RankBy,
        max_entities: usize,
        period: Duration,
        now: Micros,
        filter: impl Fn(&Target, &str) -> bool,
    ) -> Ranking {
        let stripes = if by == RankBy::Denied { &self.denied } else { &self.requested };
        let mut sum = Sum::default();
        let mut start = now;
        for stripe in stripes.iter() {
            let sketches = stripe.sketches.lock();
            for sketch in sketches.since(period, now) {
                start = start.min(sketch.start);
                sum.add(sketch);
            }
        }
        let total = sum.total;
        let mut top = Vec::new();
        for entry in sum.into_entries() {
            let Ok(target) = Target::parse(&entry.key) else {
                continue;
            };
            if filter(&target, &entry.rule) {
                let Counts { requests, hits } = entry.counts;
                top.push(TopEntity { target, rule: entry.rule, requests, hits, since: entry.since });
            }
        }
        sort(&mut top, by);
        top.truncate(max_entities);
        Ranking { top, period: now - start, hits: total.hits, requests: total.requests }
    }
}

/// Sorts entities in the order of a ranking.
pub fn sort(entities: &mut [TopEntity], by: RankBy) {
    entities.sort_by(|one, other| other.ranked(by).cmp(&one.ranked(by)).then_with(|| one.target.cmp(&other.target)));
}

impl Stripe {
    fn record(&self, by: RankBy, domain: &str, descriptor: &Descriptor<'_>, rule: Option<&Arc<str>>, now: Micros) {
        // Only this worker writes `skips`, so a load and a store are enough.
        let skips = self.skips.load(Relaxed);
        if skips > 0 {
            self.skips.store(skips - 1, Relaxed);
            return;
        }
        let Some(mut sketches) = self.sketches.try_lock() else {
            return;
        };
        let sketch = sketches.current(by, now);
        let weight = sketch.next_weight(now);
        let target = Target::of_descriptor(domain, &descriptor.entries);
        // Operators could not set an override for a target that is too long, so it is skipped.
        if target.check().is_err() {
            return;
        }
        let hits = descriptor.hits.saturating_mul(weight.into());
        sketch.add(by, target.to_string(), rule, weight.into(), hits, now);
        self.skips.store(if weight > 1 { rand::random_range(0..2 * weight - 1) } else { 0 }, Relaxed);
    }
}

#[cfg(test)]
mod tests;
