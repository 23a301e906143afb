//! [`CounterMap`]: a bounded map with one entry per counter, shared by all workers.

use std::{
    ops::Range,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

use hashbrown::{HashTable, hash_table::Entry};
use parking_lot::{Mutex, MutexGuard};

/// Number of shards, high enough that two workers rarely want the same lock.
pub(super) const SHARDS: usize = 64;

type Shard<E> = HashTable<(u128, E)>;

/// A sharded map from the keyed hash of a counter's name to an entry `E`.
pub(super) struct CounterMap<E> {
    shards: Box<[Mutex<Shard<E>>]>,
    count: AtomicUsize,
    max_entries: usize,
}

impl<E> CounterMap<E> {
    /// Creates a map of at most `max_entries` entries. Concurrent insertions can exceed the limit slightly.
    pub(super) fn new(max_entries: usize) -> Self {
        Self { shards: (0..SHARDS).map(|_| Mutex::default()).collect(), count: AtomicUsize::new(0), max_entries }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count.load(Relaxed) == 0
    }

    /// Applies `act` to the entry. Returns `None` if there is no such entry.
    pub(super) fn find<R>(&self, identity: u128, act: impl FnOnce(&mut E) -> R) -> Option<R> {
        let mut shard = self.shard(identity);
        shard.find_mut(table_hash(identity), |counter| counter.0 == identity).map(|counter| act(&mut counter.1))
    }

    /// Applies `act` to the entry, which is created by `new` if it does not exist.
    ///
    /// Returns `None` if the entry does not exist and either the map is full or `new` returns `None`.
    pub(super) fn with_or_insert<R>(
        &self,
        identity: u128,
        new: impl FnOnce() -> Option<E>,
        act: impl FnOnce(&mut E) -> R,
    ) -> Option<R> {
        let mut shard = self.shard(identity);
        match shard.entry(table_hash(identity), |counter| counter.0 == identity, |counter| table_hash(counter.0)) {
            Entry::Occupied(mut counter) => Some(act(&mut counter.get_mut().1)),
            Entry::Vacant(vacant) => {
                if self.count.load(Relaxed) >= self.max_entries {
                    return None;
                }
                let counter = new()?;
                self.count.fetch_add(1, Relaxed);
                Some(act(&mut vacant.insert((identity, counter)).get_mut().1))
            }
        }
    }

    /// Removes all entries for which `keep` returns `false`.
    pub(super) fn retain(&self, keep: impl FnMut(&mut E) -> bool) {
        self.retain_in_shards(0..SHARDS, keep);
    }

    /// Removes all entries for which `keep` returns `false` in a range of shards, whose numbers wrap at [`SHARDS`].
    pub(super) fn retain_in_shards(&self, shards: Range<usize>, mut keep: impl FnMut(&mut E) -> bool) {
        if self.is_empty() {
            return;
        }
        for shard in shards {
            let shard = &self.shards[shard % SHARDS];
            let mut shard = shard.lock();
            let before = shard.len();
            shard.retain(|counter| keep(&mut counter.1));
            self.count.fetch_sub(before - shard.len(), Relaxed);
        }
    }

    fn shard(&self, identity: u128) -> MutexGuard<'_, Shard<E>> {
        self.shards[(identity >> 112) as usize % SHARDS].lock()
    }
}

/// Returns the low bits, because the highest bits select the shard.
fn table_hash(identity: u128) -> u64 {
    identity as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_a_counter_by_its_whole_identity_and_is_bounded() {
        let counters = CounterMap::new(2);
        assert!(counters.is_empty() && counters.find(1, |_: &mut u32| ()).is_none());
        let add = |identity: u128| {
            counters.with_or_insert(
                identity,
                || Some(0),
                |counter| {
                    *counter += 1;
                    *counter
                },
            )
        };
        let (one, other) = (7, 7 | 1 << 64);
        assert_eq!((add(one), add(one), add(other), add(8)), (Some(1), Some(2), Some(1), None));
        assert!(!counters.is_empty());
        assert_eq!((counters.find(one, |value| *value), counters.find(other, |value| *value)), (Some(2), Some(1)));
        assert_eq!(counters.with_or_insert(9, || None, |counter| *counter), None);
        counters.retain_in_shards(1..SHARDS, |_| false);
        assert_eq!(counters.find(one, |value| *value), Some(2), "it is in the first shard");
        counters.retain(|counter| *counter == 2);
        assert_eq!((counters.find(other, |value| *value), add(8), add(9)), (None, Some(1), None));
        counters.retain_in_shards(SHARDS..SHARDS + 1, |_| false);
        assert!(counters.is_empty());
    }
}
