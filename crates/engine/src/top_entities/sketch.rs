//! [`Sketches`]: the most frequent entities of one worker in the last hour.
//!
//! The algorithm is Space-Saving (Metwally, Agrawal, El Abbadi: *Efficient computation of frequent and top-k elements
//! in data streams*, 2005). A new descriptor replaces the entry with the smallest count and inherits the largest count of
//! the entries that were replaced so far, which is then the maximum error of the new entry. Of `n` ranked requests or hits
//! in a minute, a descriptor with more than `n / 500` always has one of the [`MAX_ENTRIES`] entries, and no count has a
//! larger error than `n / 500`. Sums over several sketches keep this promise, as in Agarwal et al.: *Mergeable
//! summaries*, 2012: an entity without an entry in a sketch may have as much there as any entry that was replaced.
//!
//! Entities are ranked by one of two counts, and the promise does not hold for the other one. Nor does it hold for a
//! sketch with very long names, which has fewer entries.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use sluicegate_algorithm::Micros;

use super::{Estimate, RankBy};

/// Maximum number of descriptors that one worker counts in one minute. Fuzzing reaches a small maximum sooner.
pub(crate) const MAX_ENTRIES: usize = if cfg!(fuzzing) { 10 } else { 500 };
/// Maximum number of descriptors of five minutes that are older than [`MAX_MINUTES`].
const MAX_OLD_ENTRIES: usize = MAX_ENTRIES / 5;
/// Maximum size of all names of a minute, in bytes.
const MAX_NAME_BYTES: usize = 256_000;
/// Maximum size of all names of five older minutes, in bytes.
const MAX_OLD_NAME_BYTES: usize = 50_000;
/// Length of the window that one sketch covers.
pub(super) const MINUTE: Micros = Micros::from_secs(60);
/// Number of minutes that have sketches of their own, with the current one.
const MAX_MINUTES: usize = 5;
/// Length of the window that an older sketch covers.
const OLD_WINDOW: Micros = Micros::from_secs(300);
/// Number of older sketches.
const MAX_OLD: usize = 12;
/// Number of requests that a worker counts in a second before it doubles the sampling interval.
pub(super) const MAX_SAMPLES: u32 = 2_000;

/// The requests of an entity, and their hits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) requests: Estimate,
    pub(super) hits: Estimate,
}

impl Counts {
    fn add(&mut self, other: Self) {
        self.requests.add(other.requests);
        self.hits.add(other.hits);
    }

    fn ranked(&self, by: RankBy) -> u64 {
        match by {
            RankBy::Denied => self.requests.count,
            RankBy::Requested => self.hits.count,
        }
    }
}

/// Numbers of requests and of their hits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Numbers {
    pub(super) requests: u64,
    pub(super) hits: u64,
}

impl Numbers {
    fn add(&mut self, other: Self) {
        self.requests = self.requests.saturating_add(other.requests);
        self.hits = self.hits.saturating_add(other.hits);
    }

    fn max(self, other: Self) -> Self {
        Self { requests: self.requests.max(other.requests), hits: self.hits.max(other.hits) }
    }

    fn saturating_sub(self, other: Self) -> Self {
        Self { requests: self.requests.saturating_sub(other.requests), hits: self.hits.saturating_sub(other.hits) }
    }

    /// Returns estimates of counts that are at most these numbers, and may be 0.
    fn as_errors(self) -> Counts {
        Counts {
            requests: Estimate { count: self.requests, max_error: self.requests },
            hits: Estimate { count: self.hits, max_error: self.hits },
        }
    }
}

/// An entity with its counts.
#[derive(Clone)]
pub(super) struct Entry {
    pub(super) key: Arc<str>,
    pub(super) rule: Arc<str>,
    pub(super) counts: Counts,
    pub(super) since: Micros,
}

impl Entry {
    fn upper_bounds(&self) -> Numbers {
        Numbers { requests: self.counts.requests.count, hits: self.counts.hits.count }
    }
}

/// The sketches of the last hour.
#[derive(Default)]
pub(super) struct Sketches {
    /// The sketches of the last minutes, the latest last.
    pub(super) minutes: VecDeque<Sketch>,
    /// The sketches before the last minutes, of five minutes each, the latest last.
    pub(super) old: VecDeque<Sketch>,
}

impl Sketches {
    pub(super) fn current(&mut self, by: RankBy, now: Micros) -> &mut Sketch {
        let start = Micros::new(now.get() / MINUTE.get() * MINUTE.get());
        // If the clock steps back, the latest sketch stays current.
        let is_current = self.minutes.back().is_some_and(|sketch| sketch.start >= start);
        if !is_current {
            let sampling_interval = match self.minutes.back() {
                Some(sketch) => sketch.sampling_interval,
                None => 1,
            };
            while self.minutes.len() >= MAX_MINUTES
                || self.minutes.front().is_some_and(|oldest| oldest.age(now) >= OLD_WINDOW)
            {
                if let Some(minute) = self.minutes.pop_front() {
                    self.archive(&minute, by);
                }
            }
            // Names are stored for an hour, or until the next request.
            while self.old.front().is_some_and(|oldest| oldest.age(now) >= Micros::from_secs(3_600)) {
                self.old.pop_front();
            }
            self.minutes.push_back(Sketch { start, sampling_interval, ..Sketch::default() });
        }
        let last = self.minutes.len() - 1;
        &mut self.minutes[last]
    }

    /// Adds a minute to its window of five minutes.
    fn archive(&mut self, minute: &Sketch, by: RankBy) {
        let start = Micros::new(minute.start.get() / OLD_WINDOW.get() * OLD_WINDOW.get());
        let mut sum = Sum::default();
        if self.old.back().is_some_and(|window| window.start == start)
            && let Some(window) = self.old.pop_back()
        {
            sum.add(&window);
        }
        sum.add(minute);
        if self.old.len() == MAX_OLD {
            self.old.pop_front();
        }
        self.old.push_back(sum.into_sketch(start, by));
    }

    /// Returns the sketches that began in the last `period`, up to those of the last hour.
    pub(super) fn since(&self, period: Duration, now: Micros) -> impl Iterator<Item = &Sketch> {
        let period = Micros::from_secs(period.as_secs());
        self.old.iter().chain(&self.minutes).filter(move |sketch| sketch.age(now) < period)
    }
}

/// A Space-Saving sketch of one minute, or the sum of several.
#[derive(Default)]
pub(super) struct Sketch {
    pub(super) start: Micros,
    total: Numbers,
    pub(super) entries: Vec<Entry>,
    /// The position of each key in `entries`; empty for a sum.
    positions: HashMap<Arc<str>, usize>,
    /// Maximum counts of an entity without an entry.
    missed: Numbers,
    /// Total length of the entities' names, in bytes.
    name_bytes: usize,
    /// One in this many requests is counted.
    pub(super) sampling_interval: u32,
    /// The current second, and the number of requests counted in it.
    second: u64,
    pub(super) samples: u32,
}

impl Sketch {
    fn age(&self, now: Micros) -> Micros {
        now - self.start
    }

    /// Returns the number of requests that the current sample represents, and adapts the sampling interval.
    pub(super) fn next_weight(&mut self, now: Micros) -> u32 {
        let sampling_interval = self.sampling_interval.max(1);
        let second = now.floor_secs();
        if second != self.second {
            let few = self.samples < MAX_SAMPLES / 4;
            self.sampling_interval = if few { (sampling_interval / 2).max(1) } else { sampling_interval };
            self.second = second;
            self.samples = 0;
        }
        self.samples += 1;
        if self.samples.is_multiple_of(MAX_SAMPLES) {
            self.sampling_interval = sampling_interval.saturating_mul(2).min(1 << 20);
        }
        sampling_interval
    }

    /// Counts requests of an entity.
    pub(super) fn add(
        &mut self,
        by: RankBy,
        key: String,
        rule: Option<&Arc<str>>,
        requests: u64,
        hits: u64,
        now: Micros,
    ) {
        self.total.add(Numbers { requests, hits });
        let added = Counts {
            requests: Estimate { count: requests, max_error: 0 },
            hits: Estimate { count: hits, max_error: 0 },
        };
        if let Some(position) = self.positions.get(&*key) {
            self.entries[*position].counts.add(added);
            return;
        }
        while self.entries.len() >= MAX_ENTRIES || self.name_bytes + key.len() > MAX_NAME_BYTES {
            self.evict(by);
        }
        let key = Arc::<str>::from(key);
        let rule = match rule {
            Some(rule) => Arc::clone(rule),
            None => "".into(),
        };
        let mut counts = self.missed.as_errors();
        counts.add(added);
        self.name_bytes += key.len();
        self.positions.insert(Arc::clone(&key), self.entries.len());
        self.entries.push(Entry { key, rule, counts, since: now });
    }

    /// Removes the entry with the smallest count.
    fn evict(&mut self, by: RankBy) {
        let smallest = self.entries.iter().enumerate().min_by_key(|(_, entry)| entry.counts.ranked(by));
        let Some((position, _)) = smallest else {
            return;
        };
        let removed = self.entries.swap_remove(position);
        self.missed = self.missed.max(removed.upper_bounds());
        self.name_bytes -= removed.key.len();
        self.positions.remove(&removed.key);
        if let Some(moved) = self.entries.get(position) {
            self.positions.insert(Arc::clone(&moved.key), position);
        }
    }
}

/// The sum of sketches.
#[derive(Default)]
pub(super) struct Sum {
    pub(super) total: Numbers,
    entries: HashMap<Arc<str>, SummedEntry>,
    /// Maximum counts of an entity without an entry in any sketch.
    missed: Numbers,
}

/// An entry of a sum, with the part of [`Sum::missed`] that comes from sketches which have the entry.
struct SummedEntry {
    entry: Entry,
    listed: Numbers,
}

impl Sum {
    /// Adds a sketch.
    pub(super) fn add(&mut self, sketch: &Sketch) {
        self.total.add(sketch.total);
        let missed = sketch.missed;
        self.missed.add(missed);
        for entry in &sketch.entries {
            match self.entries.get_mut(&entry.key) {
                Some(sum) => {
                    sum.entry.counts.add(entry.counts);
                    sum.entry.since = sum.entry.since.min(entry.since);
                    sum.listed.add(missed);
                }
                None => {
                    let sum = SummedEntry { entry: entry.clone(), listed: missed };
                    self.entries.insert(Arc::clone(&entry.key), sum);
                }
            }
        }
    }

    /// Returns the entries in any order.
    pub(super) fn into_entries(self) -> impl Iterator<Item = Entry> {
        let all_missed = self.missed;
        self.entries.into_values().map(move |SummedEntry { mut entry, listed }| {
            // The sketches that do not list the entity may have missed as many of its requests.
            entry.counts.add(all_missed.saturating_sub(listed).as_errors());
            entry
        })
    }

    /// Returns a sketch of the entries with the largest counts.
    fn into_sketch(self, start: Micros, by: RankBy) -> Sketch {
        let mut missed = self.missed;
        let total = self.total;
        let mut entries: Vec<Entry> = self.into_entries().collect();
        entries.sort_by_key(|entry| std::cmp::Reverse(entry.counts.ranked(by)));
        let mut name_bytes = 0;
        let mut kept = Vec::new();
        for entry in entries {
            if kept.len() < MAX_OLD_ENTRIES && name_bytes + entry.key.len() <= MAX_OLD_NAME_BYTES {
                name_bytes += entry.key.len();
                kept.push(entry);
            } else {
                missed = missed.max(entry.upper_bounds());
            }
        }
        Sketch { start, total, entries: kept, missed, name_bytes, ..Sketch::default() }
    }
}
