//! Who is refused most, and who asks most: a few hundred descriptors with their counts, however many there are.
//!
//! Space-Saving (Metwally, Agrawal, El Abbadi: *Efficient computation of frequent and top-k elements in data streams*, 2005):
//! a newcomer takes the place of whoever has the least, and its count with it, which may be so much too high. Of `n` hits
//! a descriptor with more than `n / 500` is always among the [`PLACES`], and no count is further off than that.
//!
//! Each worker has its own for each minute, and adds to it without waiting for anybody: while somebody reads it, a hit is
//! left out. A worker with many hits counts some for all: up to [`MOST_SAMPLES`] a second it counts every one, beyond
//! that one in two, four, …, at random, with that weight. A count `c` of one in `k` has a standard error of √(c k).

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
};

use super::{Descriptor, overrides::Target};
use crate::{
    algorithm::{MAX, Micros},
    metrics::{Striped, WorkerId},
};

/// Descriptors that one worker counts in one minute.
const PLACES: usize = 500;
/// What is counted together.
const WINDOW: Micros = Micros::from_secs(60);
/// So many of these are kept.
const WINDOWS: usize = 5;
/// Hits that a worker counts in a second before it leaves some out.
const MOST_SAMPLES: u32 = 2_000;

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankBy {
    /// Hits that were refused.
    Denied,
    /// Hits that were asked.
    Requested,
}

/// The counts of all workers.
pub struct TopEntities {
    refused: Striped<Stripe>,
    asked: Striped<Stripe>,
}

/// One worker's.
#[derive(Default)]
struct Stripe {
    /// Hits to leave out before the next is counted.
    skips: AtomicU32,
    sketches: Mutex<Sketches>,
}

/// What one descriptor had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopEntity {
    /// Which.
    pub target: Target,
    /// The policy of its rule.
    pub rule: Arc<str>,
    /// At most so many hits.
    pub hits: u64,
    /// At least so many less.
    pub max_error: u64,
    /// When it was first among those that are counted.
    pub since: Micros,
}

/// The first of all that are counted.
#[derive(Clone, Debug, Default)]
pub struct Ranking {
    /// The one with the most first.
    pub top: Vec<TopEntity>,
    /// For so long it was counted.
    pub period: Micros,
    /// All hits.
    pub total: u64,
}

impl TopEntities {
    /// Nothing counted yet.
    #[must_use]
    pub fn new(workers: usize) -> Arc<Self> {
        Arc::new(Self { refused: Striped::new(workers), asked: Striped::new(workers) })
    }

    /// Hits of a descriptor were decided.
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
        self.asked.of(worker).record(domain, descriptor, rule, now);
        if !allowed {
            self.refused.of(worker).record(domain, descriptor, rule, now);
        }
    }

    /// The first so many that fit.
    #[must_use]
    pub fn ranking(&self, by: RankBy, most: usize, now: Micros, fits: impl Fn(&Target, &str) -> bool) -> Ranking {
        let stripes = if by == RankBy::Denied { &self.refused } else { &self.asked };
        let (mut all, mut sums, mut first) = (0_u64, HashMap::<Arc<str>, Place>::new(), now);
        for stripe in stripes.iter() {
            let sketches = stripe.sketches.lock().unwrap_or_else(PoisonError::into_inner);
            for sketch in sketches.0.iter().filter(|sketch| sketch.is_recent(now)) {
                all = all.saturating_add(sketch.all);
                first = first.min(sketch.start);
                for place in &sketch.places {
                    let sum = sums.entry(Arc::clone(&place.key)).or_insert_with(|| Place {
                        hits: 0,
                        over: 0,
                        ..place.clone()
                    });
                    sum.hits = sum.hits.saturating_add(place.hits);
                    sum.over = sum.over.saturating_add(place.over);
                    sum.since = sum.since.min(place.since);
                }
            }
        }
        let mut top: Vec<TopEntity> = sums
            .into_iter()
            .filter_map(|(key, Place { rule, hits, over, since, .. })| {
                let target = Target::parse(&key).ok().filter(|target| fits(target, &rule))?;
                Some(TopEntity { target, rule, hits, max_error: over, since })
            })
            .collect();
        top.sort_by(|one, other| other.hits.cmp(&one.hits).then_with(|| one.target.cmp(&other.target)));
        top.truncate(most);
        Ranking { top, period: now - first, total: all }
    }
}

impl Stripe {
    fn record(&self, domain: &str, descriptor: &Descriptor<'_>, rule: Option<&Arc<str>>, now: Micros) {
        // Only the worker itself writes it.
        let skips = self.skips.load(Relaxed);
        if skips > 0 {
            self.skips.store(skips - 1, Relaxed);
            return;
        }
        let Ok(mut sketches) = self.sketches.try_lock() else {
            return;
        };
        let sketch = sketches.at(now);
        let every = sketch.sampled(now);
        let target = Target::of_descriptor(domain, &descriptor.entries);
        // Nor could an operator say anything of one that is longer.
        if target.check().is_err() {
            return;
        }
        let key = target.to_string();
        sketch.add(key, rule, descriptor.hits.min(MAX).saturating_mul(every.into()), now);
        self.skips.store(if every > 1 { rand::random_range(0..2 * every - 1) } else { 0 }, Relaxed);
    }
}

/// A minute each, the latest last.
#[derive(Default)]
struct Sketches(VecDeque<Sketch>);

impl Sketches {
    fn at(&mut self, now: Micros) -> &mut Sketch {
        let start = Micros::new(now.get() / WINDOW.get() * WINDOW.get());
        // A clock that steps back goes on with the latest.
        let stands = self.0.back().is_some_and(|sketch| sketch.start >= start);
        if !stands {
            let every = self.0.back().map_or(1, |sketch| sketch.every);
            if self.0.len() >= WINDOWS {
                self.0.pop_front();
            }
            self.0.push_back(Sketch { start, every, ..Sketch::default() });
        }
        let last = self.0.len() - 1;
        &mut self.0[last]
    }
}

/// Space-Saving over one minute.
#[derive(Default)]
struct Sketch {
    start: Micros,
    all: u64,
    places: Vec<Place>,
    /// Where each key is among them.
    index: HashMap<Arc<str>, usize>,
    /// Nobody has less, and who has the least is looked for from here on.
    least: (u64, usize),
    /// One of so many hits is counted, and so many were in this second.
    every: u32,
    second: u64,
    samples: u32,
}

#[derive(Clone)]
struct Place {
    key: Arc<str>,
    rule: Arc<str>,
    hits: u64,
    over: u64,
    since: Micros,
}

impl Sketch {
    fn is_recent(&self, now: Micros) -> bool {
        now.get().saturating_sub(self.start.get()) < WINDOW.get() * WINDOWS as u64
    }

    /// For how many hits this one stands.
    fn sampled(&mut self, now: Micros) -> u32 {
        let every = self.every.max(1);
        let second = now.floor_secs();
        if second != self.second {
            let few = self.samples < MOST_SAMPLES / 4;
            self.every = if few { (every / 2).max(1) } else { every };
            (self.second, self.samples) = (second, 0);
        }
        self.samples += 1;
        if self.samples.is_multiple_of(MOST_SAMPLES) {
            self.every = every.saturating_mul(2).min(1 << 20);
        }
        every
    }

    fn add(&mut self, key: String, rule: Option<&Arc<str>>, hits: u64, now: Micros) {
        self.all = self.all.saturating_add(hits);
        if let Some(at) = self.index.get(&*key) {
            let place = &mut self.places[*at];
            place.hits = place.hits.saturating_add(hits);
            return;
        }
        let (key, rule) = (Arc::<str>::from(key), rule.map_or_else(|| "".into(), Arc::clone));
        let newcomer =
            |over: u64| Place { key: Arc::clone(&key), rule, hits: over.saturating_add(hits), over, since: now };
        let at = if self.places.len() < PLACES {
            self.places.push(newcomer(0));
            self.places.len() - 1
        } else {
            let at = self.least();
            self.index.remove(&self.places[at].key);
            self.places[at] = newcomer(self.places[at].hits);
            at
        };
        self.index.insert(key, at);
    }

    /// Who has the least. Counts only grow: whoever still has what was the least has it now, and among a crowd the next
    /// one does.
    fn least(&mut self) -> usize {
        let (least, hand) = self.least;
        let (before, behind) = self.places.split_at(hand);
        let still = |place: &Place| place.hits <= least;
        let found = behind.iter().position(still).map(|at| hand + at).or_else(|| before.iter().position(still));
        let at = found.unwrap_or_else(|| {
            let hits = self.places.iter().enumerate().min_by_key(|(_, place)| place.hits);
            hits.map_or(0, |(at, _)| at)
        });
        self.least = (self.places[at].hits, at);
        at
    }
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;
    use crate::rules::Entry;

    /// A busy minute is followed by one that begins with as few samples.
    #[test]
    fn a_minute_goes_on_with_the_share_of_the_one_before() {
        let mut sketches = Sketches::default();
        sketches.at(Micros::ZERO).every = 8;
        assert_eq!(sketches.at(WINDOW).every, 8);
    }

    fn record(top: &TopEntities, worker: usize, user: &str, hits: u64, allowed: bool, now: u64) {
        let entries = smallvec![Entry { key: "user", value: user }];
        let descriptor = Descriptor { entries, hits, refund: false, requested_limit: None };
        top.record(WorkerId(worker), "api", &descriptor, Some(&"user".into()), allowed, Micros::from_secs(now));
    }

    fn ranking(top: &TopEntities, by: RankBy, now: u64) -> Vec<(String, u64, u64, u64)> {
        let ranking = top.ranking(by, 3, Micros::from_secs(now), |_, _| true);
        let line = |it: TopEntity| (it.target.to_string(), it.hits, it.max_error, it.since.floor_secs());
        ranking.top.into_iter().map(line).collect()
    }

    #[test]
    fn those_with_the_most_come_first_over_all_workers_and_minutes() {
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
        // What was in the first minute is forgotten after five.
        assert_eq!(ranking(&top, RankBy::Requested, 300), [named("b", 9, 80), named("a", 5, 70), named("c", 1, 100)]);
        let filtered = top.ranking(RankBy::Requested, 9, Micros::from_secs(300), |_, rule| rule == "other");
        assert_eq!((filtered.top.len(), filtered.total, filtered.period.floor_secs()), (0, 15, 240));
    }

    /// Of many a second some are taken for all, and of few each is.
    #[test]
    fn how_many_are_looked_at_follows_how_many_there_are() {
        let mut sketch = Sketch::default();
        let mut stands_for = |second, samples: u32| -> Vec<u32> {
            let mut all: Vec<u32> = (0..samples).map(|_| sketch.sampled(Micros::from_secs(second))).collect();
            all.dedup();
            all
        };
        assert_eq!(stands_for(1, 3 * MOST_SAMPLES), [1, 2, 4]);
        // As many as before, and then fewer by and by.
        assert_eq!(stands_for(2, MOST_SAMPLES / 4), [8]);
        assert_eq!(stands_for(3, MOST_SAMPLES / 4 - 1), [8]);
        // The first of a second was chosen in the one before.
        assert_eq!([4, 5, 6, 7, 8].map(|second| stands_for(second, 1)), [[8], [4], [2], [1], [1]]);
    }

    /// A newcomer takes the place of the least, and may have had what that had.
    #[test]
    fn no_count_is_too_low() {
        let top = TopEntities::new(1);
        for number in 0..PLACES {
            record(&top, 0, &format!("crowd-{number}"), if number == 7 { 3 } else { 5 }, true, 60);
        }
        record(&top, 0, "newcomer", 4, true, 60);
        let first = ranking(&top, RankBy::Requested, 60).remove(0);
        assert_eq!(first, ("limit|api|user=newcomer".to_owned(), 7, 3, 60));
        let all = top.ranking(RankBy::Requested, PLACES, Micros::from_secs(60), |_, _| true);
        assert_eq!((all.top.len(), all.total), (PLACES, 5 * PLACES as u64 - 2 + 4));
    }

    /// Whoever has more than its share of the places is among them, however many others there are, and its count is off by no
    /// more than that share.
    #[test]
    fn a_crowd_hides_nobody() {
        let top = TopEntities::new(1);
        let (mut all, mut heavy) = (0_u64, 0);
        for number in 0..20_000_u64 {
            // Few enough in a second that each is counted.
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
        assert!(first.max_error <= all / PLACES as u64, "{first:?} of {all}");
        let stripe = top.asked.of(WorkerId(0)).sketches.lock().unwrap();
        assert!(stripe.0.iter().all(|sketch| sketch.places.len() <= PLACES));
    }

    #[test]
    fn of_many_hits_some_are_counted_for_all() {
        let top = TopEntities::new(1);
        for number in 0..400_000_u64 {
            let user = if number % 4 == 0 { "a" } else { "b" };
            record(&top, 0, user, 1, true, 60 + number / 100_000);
        }
        let ranking = top.ranking(RankBy::Requested, 2, Micros::from_secs(100), |_, _| true);
        let off = |hits: u64, expected: f64| (hits as f64 / expected - 1.0).abs();
        assert!(off(ranking.total, 400_000.0) < 0.1, "{ranking:?}");
        assert!(off(ranking.top[0].hits, 300_000.0) < 0.1 && off(ranking.top[1].hits, 100_000.0) < 0.15, "{ranking:?}");
        let stripe = top.asked.of(WorkerId(0)).sketches.lock().unwrap();
        assert!(stripe.0.iter().all(|sketch| sketch.samples < 2 * MOST_SAMPLES && sketch.every > 1));
    }
}
