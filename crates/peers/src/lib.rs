//! [`Peers`]: exchange of counted hits between instances without a shared store. The module does no I/O.
//!
//! Every instance decides from its own copies of the counters. At an interval it *publishes* the hits that it has
//! counted since as an [`Increment`] with the next sequence number. Every other instance *pulls* the increments after
//! the last one that it has applied, and adds their hits to its own copies.
//!
//! ```text
//! instance A                                       instance B
//! Memory ──changes──▶ publish ──▶ Increments ◀──pull(after)── position of A
//!                                      └────────── Batch ──▶ apply ──hits──▶ Memory
//! ```
//!
//! - **Exactly once**: a [`Batch`] names the position before and after it, and [`Peers::apply`] ignores a batch that
//!   does not begin at the position. The origin keeps a batch until the next pull confirms it. Lost, late, duplicate
//!   and reordered messages therefore change nothing.
//! - **Restarts**: an instance has a random epoch per start, and positions belong to an epoch.
//! - **Slow and absent peers**: increments are available for a minute ([`RECENT_TIME`]). Older ones that a subscriber
//!   has not pulled are merged for it (`backlog`), one number per counter and limit in ten seconds.
//! - **Joining**: a new instance copies the counters of one peer with its positions, and continues from there.
//!
//! An alternative was to send the cumulative hits of each counter: a receiver applies the difference to the last
//! number. It needs no positions, but a number for every counter and origin (24 to 32 bytes; here there are none). And
//! one number does not contain the times of its hits: after a partition, they would all count as of now.

mod backlog;
mod increment;
mod metrics;
mod subscriber;

pub use increment::{Batch, Increment};
pub use metrics::Metrics;

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use parking_lot::Mutex;
use sluicegate_metrics::WorkerId;
use sluicegate_store::Memory;
use tokio::sync::watch;

use self::subscriber::{SentBatch, Subscriber};
use sluicegate_algorithm::Micros;
pub use sluicegate_store::{
    identity::CounterDigest,
    memory::{Change, CounterCopy},
};

/// Time for which increments are available to all subscribers.
pub const RECENT_TIME: Micros = Micros::from_secs(60);
/// Divisor of the following maxima, so that tests reach them quickly.
const SCALE: usize = if cfg!(test) { 100 } else { 1 };
/// Maximum number of changes, of 32 bytes each, in the increments that are available to all subscribers.
const MAX_RECENT_CHANGES: usize = 500_000 / SCALE;
/// Maximum number of changes in one increment.
const MAX_INCREMENT_CHANGES: usize = 50_000 / SCALE;
/// Maximum number of changes in the backlogs of all subscribers, of about 60 bytes each.
const MAX_BACKLOG_CHANGES: usize = 1_000_000 / SCALE;
/// Number of changes at which a batch is full. The last increment of a batch can exceed it.
const MAX_BATCH_CHANGES: usize = 100_000 / SCALE;
/// Time after which a subscriber that does not pull is forgotten. The position of an instance that this one pulls from
/// is never forgotten by time: an increment would be applied again if the clock jumped.
pub const FORGET_AFTER: Micros = Micros::from_secs(600);
/// Maximum difference between the time of a batch and the present with which two clocks count as equal.
pub const CLOCK_AGREEMENT: Micros = Micros::new(50_000);
/// Maximum number of subscribers, and of other instances whose position is stored. The one that was silent for the
/// longest time is forgotten first.
const MAX_INSTANCES: usize = 1_000 / SCALE;

/// The exchange of one instance with its peers.
pub struct Peers {
    memory: Arc<Memory>,
    /// Identifies this start of this instance; never 0.
    epoch: u64,
    outgoing: Mutex<Outgoing>,
    /// Positions of other instances, by their epochs.
    origins: Mutex<HashMap<u64, Origin>>,
    /// The latest sequence number.
    published: watch::Sender<u64>,
    metrics: Arc<Metrics>,
}

/// The published increments, and the subscribers that pull them.
#[derive(Default)]
struct Outgoing {
    /// Sequence number of the latest increment.
    sequence: u64,
    recent: VecDeque<Arc<Increment>>,
    recent_changes: usize,
    subscribers: HashMap<u64, Subscriber>,
}

/// The position of another instance.
#[derive(Clone, Copy)]
struct Origin {
    position: u64,
    heard_at: Micros,
}

/// Answer to a pull.
#[derive(Clone, Debug)]
pub enum Pull {
    /// Increments after the subscriber's position.
    Batch(Batch),
    /// The subscriber has applied everything.
    Nothing,
    /// Increments after the position are missing. The subscriber must copy the counters, and continue from the position
    /// of the copy.
    Copy,
}

impl Peers {
    /// Creates the exchange of a store that was created by [`Memory::exchanged`].
    #[must_use]
    pub fn new(memory: Arc<Memory>, metrics: Arc<Metrics>) -> Arc<Self> {
        Self::with_epoch(memory, metrics, rand::random::<u64>().max(1))
    }

    /// Creates the exchange with a given epoch, for tests.
    #[must_use]
    pub fn with_epoch(memory: Arc<Memory>, metrics: Arc<Metrics>, epoch: u64) -> Arc<Self> {
        Arc::new(Self {
            memory,
            epoch,
            outgoing: Mutex::default(),
            origins: Mutex::default(),
            published: watch::channel(0).0,
            metrics,
        })
    }

    /// Returns the epoch of this instance.
    #[must_use]
    pub const fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns a receiver of the latest sequence number.
    #[must_use]
    pub fn published(&self) -> watch::Receiver<u64> {
        self.published.subscribe()
    }

    /// Returns the metrics.
    #[must_use]
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// Publishes the hits that were counted since the last call. Must be called at an interval.
    pub fn publish(&self, now: Micros) {
        // The lock keeps the changes of two calls in order.
        let mut outgoing = self.outgoing.lock();
        let mut limits = Vec::new();
        let mut resets = Vec::new();
        let changes = self.memory.take_changes(&mut limits, &mut resets);
        self.metrics.published.add(WorkerId(0), changes.len() as u64);
        if !resets.is_empty() {
            let sequence = outgoing.sequence + 1;
            outgoing.push(Increment::new(sequence, now, Vec::new(), Vec::new()).with_resets(resets));
        }
        for changes in changes.chunks(MAX_INCREMENT_CHANGES) {
            let sequence = outgoing.sequence + 1;
            outgoing.push(Increment::new(sequence, now, limits.clone(), changes.to_vec()));
        }
        self.metrics.dropped.add(WorkerId(0), outgoing.trim(now));
        outgoing.subscribers.retain(|_, subscriber| now - subscriber.pulled_at < FORGET_AFTER);
        let sequence = outgoing.sequence;
        self.published.send_if_modified(|latest| std::mem::replace(latest, sequence) != sequence);
    }

    /// Answers the pull of another instance. `after` is its position, or 0 if it has none: it then begins with the first
    /// increment of all.
    #[must_use]
    pub fn pull(&self, subscriber: u64, after: u64, now: Micros) -> Pull {
        let mut outgoing = self.outgoing.lock();
        let Outgoing { sequence, recent, subscribers, .. } = &mut *outgoing;
        let first = match recent.front() {
            Some(increment) => increment.sequence,
            None => *sequence + 1,
        };
        if !subscribers.get_mut(&subscriber).is_some_and(|subscriber| subscriber.confirm(after)) {
            // The pull can be a late one, so the subscriber keeps its backlog.
            if after.saturating_add(1) < first || after > *sequence {
                return Pull::Copy;
            }
            subscribers.remove(&subscriber);
            forget_oldest(subscribers, |subscriber| subscriber.pulled_at);
        }
        let subscriber = subscribers.entry(subscriber).or_insert_with(|| Subscriber::new(after));
        subscriber.pulled_at = now;
        match subscriber.next_batch(recent, MAX_BATCH_CHANGES, now) {
            Some(SentBatch { until, increments }) => {
                Pull::Batch(Batch { origin: self.epoch, after: subscriber.position(), until, now, increments })
            }
            None => Pull::Nothing,
        }
    }

    /// Forgets an instance that leaves, and will not pull again.
    pub fn forget(&self, subscriber: u64) {
        self.outgoing.lock().subscribers.remove(&subscriber);
    }

    /// Returns whether all instances that have pulled since `since` have applied everything.
    #[must_use]
    pub fn is_delivered(&self, since: Micros) -> bool {
        let outgoing = self.outgoing.lock();
        outgoing
            .subscribers
            .values()
            .all(|subscriber| subscriber.pulled_at < since || subscriber.position() == outgoing.sequence)
    }

    /// Returns the number of instances that pull, and the number of changes that are merged for absent ones.
    #[must_use]
    pub fn subscribers(&self) -> (usize, usize) {
        let outgoing = self.outgoing.lock();
        (outgoing.subscribers.len(), outgoing.backlog_changes())
    }

    /// Returns the position of another instance: the last increment that was applied here, or 0 if there is none.
    #[must_use]
    pub fn position(&self, origin: u64) -> u64 {
        match self.origins.lock().get(&origin) {
            Some(origin) => origin.position,
            None => 0,
        }
    }

    /// Applies a batch of another instance if it begins at the position of that instance. Returns whether it was
    /// applied.
    pub fn apply(&self, batch: &Batch, now: Micros) -> bool {
        if batch.origin == self.epoch {
            return false;
        }
        let mut origins = self.origins.lock();
        let position = match origins.get_mut(&batch.origin) {
            Some(origin) => {
                origin.heard_at = now;
                origin.position
            }
            None => 0,
        };
        if position != batch.after || batch.until <= batch.after {
            return false;
        }
        let clocks_agree = now.get().abs_diff(batch.now.get()) <= CLOCK_AGREEMENT.get();
        for increment in &batch.increments {
            self.memory.apply_resets(&increment.resets);
            let hits = increment.changes.iter().filter_map(|change| {
                let limit = increment.limits.get(change.limit as usize)?;
                // Ages are independent of the difference of the clocks, but do not contain the time of the trip: by
                // their age, hits of the end of a window could belong to the next one.
                if clocks_agree && limit.has_expired(change.counted_at, now) {
                    return None;
                }
                let age = batch.now - change.counted_at;
                Some((change.counter, limit, change.pending_at(now - age)))
            });
            let counting = self.memory.add_hits(hits, now);
            let changes = increment.changes.len() as u64;
            self.metrics.applied.add(WorkerId(0), changes);
            self.metrics.expired.add(WorkerId(0), changes - counting);
        }
        set_position(&mut origins, batch.origin, Origin { position: batch.until, heard_at: now });
        true
    }

    /// Returns the positions that a copy of the counters contains: those of other instances and of this one.
    ///
    /// Must be called before the counters are copied. Hits that are counted during the copy are then counted twice by
    /// its receiver instead of being forgotten.
    #[must_use]
    pub fn copy_positions(&self, now: Micros) -> Vec<(u64, u64)> {
        self.publish(now);
        let own = (self.epoch, self.outgoing.lock().sequence);
        let origins = self.origins.lock();
        let mut positions: Vec<_> = origins.iter().map(|(epoch, origin)| (*epoch, origin.position)).collect();
        positions.push(own);
        positions
    }

    /// Returns a copy of one part of the counters, or `None` if `part` is past the last part.
    #[must_use]
    pub fn copy_part(&self, part: usize) -> Option<Vec<CounterCopy>> {
        self.memory.copy_part(part)
    }

    /// Returns the maximum number of counters of this instance.
    #[must_use]
    pub fn max_counters(&self) -> usize {
        self.memory.max_counters()
    }

    /// Inserts the counters of a copy that do not exist here.
    pub fn insert_copies(&self, copies: Vec<CounterCopy>, now: Micros) {
        let mut inserted = 0;
        for copy in copies {
            inserted += u64::from(self.memory.insert_copy(copy, now));
        }
        self.metrics.copied.add(WorkerId(0), inserted);
    }

    /// Continues from the positions of a copy. `source` is the instance that was copied.
    ///
    /// The position of the source is replaced. Those of other origins are used only if they have none.
    pub fn continue_from(&self, source: u64, positions: &[(u64, u64)], now: Micros) {
        let mut origins = self.origins.lock();
        for &(epoch, position) in positions {
            if epoch == self.epoch || position == 0 {
                continue;
            }
            let origin = Origin { position, heard_at: now };
            if epoch == source {
                set_position(&mut origins, epoch, origin);
            } else if origins.len() < MAX_INSTANCES {
                origins.entry(epoch).or_insert(origin);
            }
        }
    }
}

impl Outgoing {
    fn push(&mut self, increment: Increment) {
        self.sequence = increment.sequence;
        self.recent_changes += increment.changes.len();
        self.recent.push_back(Arc::new(increment));
    }

    fn backlog_changes(&self) -> usize {
        self.subscribers.values().map(Subscriber::backlog_changes).sum()
    }

    /// Removes old increments, which are merged for the subscribers that have not pulled them.
    ///
    /// Returns the number of changes that were dropped because a backlog was full.
    fn trim(&mut self, now: Micros) -> u64 {
        let mut dropped = 0;
        while let Some(oldest) = self.recent.front()
            && (self.recent_changes > MAX_RECENT_CHANGES || now - oldest.published_at > RECENT_TIME)
        {
            for subscriber in self.subscribers.values_mut() {
                subscriber.keep(oldest, now);
            }
            self.recent_changes -= oldest.changes.len();
            self.recent.pop_front();
        }
        while self.backlog_changes() > MAX_BACKLOG_CHANGES
            && let Some(largest) = self.subscribers.values_mut().max_by_key(|subscriber| subscriber.backlog_changes())
        {
            dropped += largest.drop_oldest();
        }
        dropped
    }
}

fn set_position(origins: &mut HashMap<u64, Origin>, epoch: u64, origin: Origin) {
    if !origins.contains_key(&epoch) {
        forget_oldest(origins, |origin| origin.heard_at);
    }
    origins.insert(epoch, origin);
}

/// Removes the instance that was silent for the longest time if there are too many.
fn forget_oldest<T>(instances: &mut HashMap<u64, T>, heard_at: impl Fn(&T) -> Micros) {
    if instances.len() >= MAX_INSTANCES {
        let oldest = instances.iter().min_by_key(|(_, instance)| heard_at(instance)).map(|(epoch, _)| *epoch);
        if let Some(epoch) = oldest {
            instances.remove(&epoch);
        }
    }
}

#[cfg(test)]
mod tests;
