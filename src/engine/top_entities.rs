//! [`TopEntities`]: the entities with the most hits and the most denied hits, in memory of fixed size.
//!
//! The algorithm is Space-Saving (Metwally, Agrawal, El Abbadi: *Efficient computation of frequent and top-k elements
//! in data streams*, 2005). A new descriptor replaces the entry with the fewest hits and inherits its count, which is
//! then the maximum error of the new entry. Of `n` hits, a descriptor with more than `n / 500` always has one of the
//! [`MAX_ENTRIES`] entries, and no count has a larger error than `n / 500`. Sums over several sketches keep this promise,
//! as in Agarwal et al.: *Mergeable summaries*, 2012: an entity without an entry in a full sketch may have as many hits
//! there as the entry with the fewest.
//!
//! Each worker has a sketch of its own per minute and never waits to update it: a hit is not counted while the sketch
//! is being read. A worker with many hits samples them. Up to [`MAX_SAMPLES`] per second it counts every hit; beyond
//! that it counts one in two, four, …, at random, with that weight. A count `c` sampled at one in `k` has a standard
//! error of √(c k).

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
};

use super::{Descriptor, overrides::Target};
use crate::{
    algorithm::{MAX_NUMBER, Micros},
    metrics::{Striped, WorkerId},
};

/// Maximum number of descriptors that one worker counts in one minute. Fuzzing reaches a small maximum sooner.
pub(super) const MAX_ENTRIES: usize = if cfg!(fuzzing) { 10 } else { 500 };
/// Length of the window that one sketch covers.
const WINDOW: Micros = Micros::from_secs(60);
/// Number of windows that are stored.
const MAX_WINDOWS: usize = 5;
/// Number of hits that a worker counts in a second before it doubles the sampling interval.
const MAX_SAMPLES: u32 = 2_000;

/// The number by which entities are ranked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankBy {
    /// Denied hits.
    Denied,
    /// All requested hits.
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
    /// Number of hits to skip before the next one is counted.
    skips: AtomicU32,
    sketches: Mutex<Sketches>,
}

/// An entity in a [`Ranking`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopEntity {
    /// The entity.
    pub target: Target,
    /// Name of the rule that counted the entity: the name of its limit, or the labels of its levels.
    pub rule: Arc<str>,
    /// Upper bound of the number of hits.
    pub hits: u64,
    /// Maximum by which `hits` is too high.
    pub max_error: u64,
    /// Time since which the entity has been counted.
    pub since: Micros,
}

/// The entities with the most hits.
#[derive(Clone, Debug, Default)]
pub struct Ranking {
    /// The entities in descending order of hits.
    pub top: Vec<TopEntity>,
    /// Time that the counts cover.
    pub period: Micros,
    /// Total number of hits, including those of entities that are not listed.
    pub total: u64,
}

impl TopEntities {
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
        self.requested.of(worker).record(domain, descriptor, rule, now);
        if !allowed {
            self.denied.of(worker).record(domain, descriptor, rule, now);
        }
    }

    /// Returns up to `max_entities` entities with the most hits that `filter` accepts.
    #[must_use]
    pub fn ranking(
        &self,
        by: RankBy,
        max_entities: usize,
        now: Micros,
        filter: impl Fn(&Target, &str) -> bool,
    ) -> Ranking {
        let stripes = if by == RankBy::Denied { &self.denied } else { &self.requested };
        let (mut total, mut sums, mut start) = (0_u64, HashMap::<Arc<str>, (SketchEntry, u64)>::new(), now);
        let mut all_max_missed = 0_u64;
        for stripe in stripes.iter() {
            let sketches = stripe.sketches.lock().unwrap_or_else(PoisonError::into_inner);
            for sketch in sketches.0.iter().filter(|sketch| sketch.is_recent(now)) {
                total = total.saturating_add(sketch.total);
                start = start.min(sketch.start);
                let max_missed = sketch.max_missed();
                all_max_missed = all_max_missed.saturating_add(max_missed);
                for entry in &sketch.entries {
                    let (sum, listed) = sums
                        .entry(Arc::clone(&entry.key))
                        .or_insert_with(|| (SketchEntry { hits: 0, max_error: 0, ..entry.clone() }, 0));
                    sum.hits = sum.hits.saturating_add(entry.hits);
                    sum.max_error = sum.max_error.saturating_add(entry.max_error);
                    sum.since = sum.since.min(entry.since);
                    *listed = listed.saturating_add(max_missed);
                }
            }
        }
        let mut top: Vec<TopEntity> = sums
            .into_iter()
            .filter_map(|(key, (SketchEntry { rule, hits, max_error, since, .. }, listed))| {
                let target = Target::parse(&key).ok().filter(|target| filter(target, &rule))?;
                // The sketches that do not list the entity may have missed as many of its hits.
                let missed = all_max_missed.saturating_sub(listed);
                let (hits, max_error) = (hits.saturating_add(missed), max_error.saturating_add(missed));
                Some(TopEntity { target, rule, hits, max_error, since })
            })
            .collect();
        top.sort_by(|one, other| other.hits.cmp(&one.hits).then_with(|| one.target.cmp(&other.target)));
        top.truncate(max_entities);
        Ranking { top, period: now - start, total }
    }
}

impl Stripe {
    fn record(&self, domain: &str, descriptor: &Descriptor<'_>, rule: Option<&Arc<str>>, now: Micros) {
        // Only this worker writes `skips`, so a load and a store are enough.
        let skips = self.skips.load(Relaxed);
        if skips > 0 {
            self.skips.store(skips - 1, Relaxed);
            return;
        }
        let Ok(mut sketches) = self.sketches.try_lock() else {
            return;
        };
        let sketch = sketches.current(now);
        let weight = sketch.next_weight(now);
        let target = Target::of_descriptor(domain, &descriptor.entries);
        // Operators could not set an override for a target that is too long, so it is skipped.
        if target.check().is_err() {
            return;
        }
        let key = target.to_string();
        sketch.add(key, rule, descriptor.hits.min(MAX_NUMBER).saturating_mul(weight.into()), now);
        self.skips.store(if weight > 1 { rand::random_range(0..2 * weight - 1) } else { 0 }, Relaxed);
    }
}

/// The sketches of the last minutes, the latest last.
#[derive(Default)]
struct Sketches(VecDeque<Sketch>);

impl Sketches {
    fn current(&mut self, now: Micros) -> &mut Sketch {
        let start = Micros::new(now.get() / WINDOW.get() * WINDOW.get());
        // If the clock steps back, the latest sketch stays current.
        let is_current = self.0.back().is_some_and(|sketch| sketch.start >= start);
        if !is_current {
            let sampling_interval = self.0.back().map_or(1, |sketch| sketch.sampling_interval);
            // Names are stored for five minutes, or until the next request.
            while self.0.len() >= MAX_WINDOWS || self.0.front().is_some_and(|oldest| !oldest.is_recent(now)) {
                self.0.pop_front();
            }
            self.0.push_back(Sketch { start, sampling_interval, ..Sketch::default() });
        }
        let last = self.0.len() - 1;
        &mut self.0[last]
    }
}

/// A Space-Saving sketch of one minute.
#[derive(Default)]
struct Sketch {
    start: Micros,
    total: u64,
    entries: Vec<SketchEntry>,
    /// The position of each key in `entries`.
    positions: HashMap<Arc<str>, usize>,
    /// One in this many hits is counted.
    sampling_interval: u32,
    /// The current second, and the number of hits counted in it.
    second: u64,
    samples: u32,
}

#[derive(Clone)]
struct SketchEntry {
    key: Arc<str>,
    rule: Arc<str>,
    hits: u64,
    max_error: u64,
    since: Micros,
}

impl Sketch {
    fn is_recent(&self, now: Micros) -> bool {
        now.get().saturating_sub(self.start.get()) < WINDOW.get() * MAX_WINDOWS as u64
    }

    /// Returns the number of hits that the current sample represents, and adapts the sampling interval.
    fn next_weight(&mut self, now: Micros) -> u32 {
        let sampling_interval = self.sampling_interval.max(1);
        let second = now.floor_secs();
        if second != self.second {
            let few = self.samples < MAX_SAMPLES / 4;
            self.sampling_interval = if few { (sampling_interval / 2).max(1) } else { sampling_interval };
            (self.second, self.samples) = (second, 0);
        }
        self.samples += 1;
        if self.samples.is_multiple_of(MAX_SAMPLES) {
            self.sampling_interval = sampling_interval.saturating_mul(2).min(1 << 20);
        }
        sampling_interval
    }

    /// Returns the maximum number of hits of an entity that has no entry.
    fn max_missed(&self) -> u64 {
        let fewest = self.entries.iter().map(|entry| entry.hits).min().unwrap_or_default();
        if self.entries.len() < MAX_ENTRIES { 0 } else { fewest }
    }

    fn add(&mut self, key: String, rule: Option<&Arc<str>>, hits: u64, now: Micros) {
        self.total = self.total.saturating_add(hits);
        if let Some(position) = self.positions.get(&*key) {
            let entry = &mut self.entries[*position];
            entry.hits = entry.hits.saturating_add(hits);
            return;
        }
        let (key, rule) = (Arc::<str>::from(key), rule.map_or_else(|| "".into(), Arc::clone));
        let new_entry = |max_error: u64| SketchEntry {
            key: Arc::clone(&key),
            rule,
            hits: max_error.saturating_add(hits),
            max_error,
            since: now,
        };
        let position = if self.entries.len() < MAX_ENTRIES {
            self.entries.push(new_entry(0));
            self.entries.len() - 1
        } else {
            let fewest = self.entries.iter().enumerate().min_by_key(|(_, entry)| entry.hits);
            let position = fewest.map_or(0, |(position, _)| position);
            self.positions.remove(&self.entries[position].key);
            self.entries[position] = new_entry(self.entries[position].hits);
            position
        };
        self.positions.insert(key, position);
    }
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;
    use crate::rules::Entry;

    #[test]
    fn a_minute_starts_with_the_sampling_interval_of_the_previous_one() {
        let mut sketches = Sketches::default();
        sketches.current(Micros::ZERO).sampling_interval = 8;
        assert_eq!(sketches.current(WINDOW).sampling_interval, 8);
    }

    #[test]
    fn only_the_last_five_minutes_are_kept() {
        let mut sketches = Sketches::default();
        let mut starts_at = |minute: u64| {
            sketches.current(Micros::new(minute * WINDOW.get()));
            sketches.0.iter().map(|sketch| sketch.start.get() / WINDOW.get()).collect::<Vec<_>>()
        };
        for minute in 0..5 {
            starts_at(minute);
        }
        assert_eq!(starts_at(5), [1, 2, 3, 4, 5]);
        assert_eq!(starts_at(8), [4, 5, 8]);
        assert_eq!(starts_at(60), [60]);
    }

    fn record(top: &TopEntities, worker: usize, user: &str, hits: u64, allowed: bool, now: u64) {
        let entries = smallvec![Entry { key: "user", value: user }];
        let descriptor = Descriptor { entries, hits, refund: false, requested_limit: None };
        top.record(WorkerId(worker), "api", &descriptor, Some(&"user".into()), allowed, Micros::from_secs(now));
    }

    fn ranking(top: &TopEntities, by: RankBy, now: u64) -> Vec<(String, u64, u64, u64)> {
        let ranking = top.ranking(by, 3, Micros::from_secs(now), |_, _| true);
        let line =
            |entity: TopEntity| (entity.target.to_string(), entity.hits, entity.max_error, entity.since.floor_secs());
        ranking.top.into_iter().map(line).collect()
    }

    #[test]
    fn entities_are_ranked_by_hits_over_all_workers_and_minutes() {
        let top = TopEntities::new(2);
        for (worker, user, hits, allowed, now) in [
            (0, "a", 5, true, 10),
            (1, "a", 5, false, 70),
            (0, "b", 7, false, 80),
            (0, "b", 2, false, 90),
            (1, "c", 1, true, 100),
            (1, "c", 0, false, 100),
        ] {
            record(&top, worker, user, hits, allowed, now);
        }
        let named = |user: &str, hits, since| (format!("limit|api|user={user}"), hits, 0, since);
        assert_eq!(ranking(&top, RankBy::Requested, 100), [named("a", 10, 10), named("b", 9, 80), named("c", 1, 100)]);
        assert_eq!(ranking(&top, RankBy::Denied, 100), [named("b", 9, 80), named("a", 5, 70)]);
        // The first minute is no longer counted after five minutes.
        assert_eq!(ranking(&top, RankBy::Requested, 300), [named("b", 9, 80), named("a", 5, 70), named("c", 1, 100)]);
        let filtered = top.ranking(RankBy::Requested, 9, Micros::from_secs(300), |_, rule| rule == "other");
        assert_eq!((filtered.top.len(), filtered.total, filtered.period.floor_secs()), (0, 15, 240));
    }

    #[test]
    fn the_sampling_interval_follows_the_request_rate() {
        let mut sketch = Sketch::default();
        let mut weights_in = |second, samples: u32| -> Vec<u32> {
            let mut all: Vec<u32> = (0..samples).map(|_| sketch.next_weight(Micros::from_secs(second))).collect();
            all.dedup();
            all
        };
        assert_eq!(weights_in(1, 3 * MAX_SAMPLES), [1, 2, 4]);
        // The interval stays at 8 until a second has few samples, and then halves every second.
        assert_eq!(weights_in(2, MAX_SAMPLES / 4), [8]);
        assert_eq!(weights_in(3, MAX_SAMPLES / 4 - 1), [8]);
        // The weight of the first hit in a second is the interval of the previous second.
        assert_eq!([4, 5, 6, 7, 8].map(|second| weights_in(second, 1)), [[8], [4], [2], [1], [1]]);
    }

    #[test]
    fn no_count_is_below_the_true_count() {
        let top = TopEntities::new(1);
        for number in 0..MAX_ENTRIES {
            record(&top, 0, &format!("crowd-{number}"), if number == 7 { 3 } else { 5 }, true, 60);
        }
        record(&top, 0, "newcomer", 4, true, 60);
        let first = ranking(&top, RankBy::Requested, 60).remove(0);
        assert_eq!(first, ("limit|api|user=newcomer".to_owned(), 7, 3, 60));
        let all = top.ranking(RankBy::Requested, MAX_ENTRIES, Micros::from_secs(60), |_, _| true);
        assert_eq!((all.top.len(), all.total), (MAX_ENTRIES, 5 * MAX_ENTRIES as u64 - 2 + 4));
    }

    #[test]
    fn an_entity_that_one_minute_does_not_list_may_have_hits_in_it() {
        let top = TopEntities::new(2);
        record(&top, 0, "a", 3, true, 60);
        record(&top, 0, "a", 1, true, 120);
        // These replace the entry of the second minute. The other worker lists few entities, so it has missed none.
        (0..MAX_ENTRIES).for_each(|number| record(&top, 0, &format!("crowd-{number}"), 2, true, 121));
        record(&top, 1, "b", 1, true, 122);
        let all = top.ranking(RankBy::Requested, usize::MAX, Micros::from_secs(122), |_, _| true);
        let counts = |user: &str| {
            let is_user = |entity: &&TopEntity| entity.target.to_string().ends_with(&format!("={user}"));
            all.top.iter().find(is_user).map(|entity| (entity.hits, entity.max_error))
        };
        assert_eq!(["a", "b", "crowd-0"].map(counts), [Some((5, 2)), Some((3, 2)), Some((2, 0))]);
    }

    #[test]
    fn a_frequent_entity_is_found_among_many_rare_ones() {
        let top = TopEntities::new(1);
        let (mut all, mut heavy) = (0_u64, 0);
        for number in 0..20_000_u64 {
            // 1,000 hits per second are few enough that each one is counted.
            let now = 60 + number / 1_000;
            record(&top, 0, &format!("crowd-{number}"), 1, true, now);
            all += 1;
            if number % 100 == 0 {
                record(&top, 0, "heavy", 1, true, now);
                (all, heavy) = (all + 1, heavy + 1);
            }
        }
        let ranking = top.ranking(RankBy::Requested, 1, Micros::from_secs(100), |_, _| true);
        let first = &ranking.top[0];
        assert_eq!((first.target.to_string().as_str(), ranking.total), ("limit|api|user=heavy", all));
        assert!(first.hits >= heavy && first.hits - first.max_error <= heavy, "{first:?} of {heavy}");
        assert!(first.max_error <= all / MAX_ENTRIES as u64, "{first:?} of {all}");
        let stripe = top.requested.of(WorkerId(0)).sketches.lock().unwrap();
        assert!(stripe.0.iter().all(|sketch| sketch.entries.len() <= MAX_ENTRIES));
    }

    #[test]
    fn sampled_counts_estimate_all_hits() {
        let top = TopEntities::new(1);
        for number in 0..400_000_u64 {
            let user = if number % 4 == 0 { "a" } else { "b" };
            record(&top, 0, user, 1, true, 60 + number / 100_000);
        }
        let ranking = top.ranking(RankBy::Requested, 2, Micros::from_secs(100), |_, _| true);
        let off = |hits: u64, expected: f64| (hits as f64 / expected - 1.0).abs();
        assert!(off(ranking.total, 400_000.0) < 0.1, "{ranking:?}");
        assert!(off(ranking.top[0].hits, 300_000.0) < 0.1 && off(ranking.top[1].hits, 100_000.0) < 0.15, "{ranking:?}");
        let stripe = top.requested.of(WorkerId(0)).sketches.lock().unwrap();
        assert!(stripe.0.iter().all(|sketch| sketch.samples < 2 * MAX_SAMPLES && sketch.sampling_interval > 1));
    }

    /// With an interval of 2, 0 to 2 hits are skipped, so that one in two hits is counted on average.
    #[test]
    fn less_than_twice_the_sampling_interval_is_skipped() {
        let top = TopEntities::new(1);
        let stripe = top.requested.of(WorkerId(0));
        stripe.sketches.lock().unwrap().current(Micros::ZERO).sampling_interval = 2;
        for _ in 0..MAX_SAMPLES - 1 {
            stripe.skips.store(0, Relaxed);
            record(&top, 0, "a", 1, true, 0);
            assert!(stripe.skips.load(Relaxed) <= 2);
        }
    }
}
