//! [`Backlog`]: increments that an absent subscriber has not pulled, merged to one number per counter and limit in each
//! period.
//!
//! Periods keep apart hits that were counted at different times: a window counts them at their time, and those that no
//! longer count are never sent. Periods of [`PERIOD`] are merged further when there are more than [`MAX_PERIODS`].

use std::collections::{HashMap, HashSet, VecDeque};

use sluicegate_algorithm::{Action, Algorithm, MAX_NUMBER, Micros, Operation, State};
use sluicegate_store::pending::PendingHits;

use super::{Change, CounterDigest, increment::Increment};

/// Minimum length of a period.
const PERIOD: Micros = Micros::from_secs(10);
/// Maximum number of periods.
const MAX_PERIODS: usize = 32;

/// Merged increments, the oldest first.
#[derive(Default)]
pub(super) struct Backlog {
    periods: VecDeque<Period>,
    changes: usize,
}

/// The merged increments of one period.
struct Period {
    started_at: Micros,
    /// Sequence number of the last increment.
    until: u64,
    limits: Vec<Algorithm>,
    /// Counters that were reset in the period. `hits` contains only later hits of them.
    resets: HashSet<CounterDigest>,
    hits: MergedHits,
}

/// Hits of each counter and limit.
type MergedHits = HashMap<(CounterDigest, u32), PendingHits>;

impl Backlog {
    pub(super) const fn changes(&self) -> usize {
        self.changes
    }

    /// Adds the next increment.
    pub(super) fn add(&mut self, increment: &Increment, now: Micros) {
        let is_new = self.periods.back().is_none_or(|last| increment.published_at - last.started_at >= PERIOD);
        if is_new {
            if self.periods.len() >= MAX_PERIODS {
                self.merge_oldest(now);
            }
            self.periods.push_back(Period::new(increment.published_at));
        }
        if let Some(last) = self.periods.back_mut() {
            let before = last.hits.len();
            last.reset(increment.resets.iter().copied());
            last.merge(increment.sequence, &increment.limits, increment.changes.iter().copied());
            self.changes = self.changes + last.hits.len() - before;
        }
    }

    /// Drops the oldest period and returns its number of changes. The next batch moves the position past them.
    pub(super) fn drop_oldest(&mut self) -> u64 {
        let Some(period) = self.periods.pop_front() else {
            return 0;
        };
        let lost = period.hits.len();
        self.changes -= lost;
        lost as u64
    }

    /// Removes the oldest period and returns its hits that still count, as an increment.
    pub(super) fn pop(&mut self, now: Micros) -> Option<Increment> {
        let mut period = self.periods.pop_front()?;
        self.changes -= period.hits.len();
        period.drop_expired(now);
        let changes = changes(period.hits).collect();
        let resets = period.resets.into_iter().collect();
        Some(Increment::new(period.until, period.started_at, period.limits, changes).with_resets(resets))
    }

    /// Merges the two oldest periods.
    fn merge_oldest(&mut self, now: Micros) {
        let (Some(mut first), Some(second)) = (self.periods.pop_front(), self.periods.pop_front()) else {
            return;
        };
        self.changes -= first.hits.len() + second.hits.len();
        first.drop_expired(now);
        let Period { until, limits, hits, resets, .. } = second;
        first.reset(resets.into_iter());
        first.merge(until, &limits, changes(hits));
        self.changes += first.hits.len();
        self.periods.push_front(first);
    }
}

impl Period {
    fn new(started_at: Micros) -> Self {
        Self { started_at, until: 0, limits: Vec::new(), resets: HashSet::new(), hits: HashMap::new() }
    }

    fn reset(&mut self, counters: impl Iterator<Item = CounterDigest>) {
        for counter in counters {
            self.hits.retain(|(known, _), _| *known != counter);
            self.resets.insert(counter);
        }
    }

    fn merge(&mut self, until: u64, limits: &[Algorithm], changes: impl Iterator<Item = Change>) {
        self.until = until;
        let indexes: Vec<u32> = limits.iter().map(|limit| self.index_of(limit)).collect();
        for change in changes {
            let limit = indexes[change.limit as usize];
            let pending = self.hits.entry((change.counter, limit)).or_default();
            pending.add(&self.limits[limit as usize], change.pending_at(change.counted_at));
        }
    }

    /// Returns the index of a limit in `limits`, to which it is added if it is new.
    fn index_of(&mut self, limit: &Algorithm) -> u32 {
        if let Some(index) = self.limits.iter().position(|known| known == limit) {
            return index as u32;
        }
        self.limits.push(*limit);
        (self.limits.len() - 1) as u32
    }

    /// Drops hits that no longer count, even if they were added to a full counter.
    fn drop_expired(&mut self, now: Micros) {
        let limits = &self.limits;
        self.hits.retain(|(_, limit), pending| {
            let limit = &limits[*limit as usize];
            let mut full = State::default();
            let many = Operation { action: Action::Take, cost: MAX_NUMBER, now: pending.counted_at };
            limit.recording().step(&mut full, many);
            pending.hits != 0 && limit.expires(&full, pending.counted_at) > now
        });
    }
}

fn changes(hits: MergedHits) -> impl Iterator<Item = Change> {
    hits.into_iter().map(|((counter, limit), PendingHits { hits, counted_at })| Change {
        counter,
        limit,
        hits,
        counted_at,
    })
}
