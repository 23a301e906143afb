//! [`Changes`]: the hits that a shard has counted since its changes were last taken, for the peers of this instance.

use sluicegate_algorithm::{Algorithm, Micros, Operation};

use super::hash::Hash;
use crate::{identity::CounterDigest, pending::PendingHits};

/// Number of the latest limits of a list that are searched before a limit is added. A limit can be listed twice.
const COMPARED_LIMITS: usize = 8;

/// Hits of one counter and limit that an instance has counted in an interval.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// Digest of the counter's name.
    pub counter: CounterDigest,
    /// Index of the limit in the list of limits that accompanies the changes.
    pub limit: u32,
    /// Number of hits; negative if more hits were refunded than taken.
    pub hits: i64,
    /// Time of the last hit by the origin's clock.
    pub counted_at: Micros,
}

impl Change {
    /// Returns the hits, counted at this time.
    #[must_use]
    pub fn pending_at(&self, counted_at: Micros) -> PendingHits {
        PendingHits { hits: self.hits, counted_at }
    }
}

/// A counter with pending hits.
#[derive(Clone, Copy)]
pub(super) struct ChangedCounter {
    pub(super) hash: Hash,
    /// Index of the limit in [`Changes::limits`].
    pub(super) limit: u32,
    pub(super) pending: PendingHits,
}

/// The changed counters of one shard, and their limits.
#[derive(Default)]
pub(super) struct Changes {
    pub(super) counters: Vec<ChangedCounter>,
    pub(super) limits: Vec<Algorithm>,
    /// Counters that an operator has reset. Their entries in `counters` contain only later hits.
    pub(super) resets: Vec<Hash>,
}

/// Log of the changes of one shard, which costs four bytes per slot of the shard in addition to the changes.
#[derive(Default)]
pub(super) struct ChangeLog {
    changes: Changes,
    /// For each slot, the index of its last entry in `changes.counters`, plus one. [`u32::MAX`] if peers have sent the
    /// counter and it has no entry; 0 if the slot is free, or peers do not have its counter.
    ///
    /// [`take`](Self::take) leaves the indexes. An entry therefore belongs to the slot only if it has the hash of the
    /// slot's counter.
    entries: Vec<u32>,
}

impl ChangeLog {
    /// Adds the hits of an operation if the algorithm counted them and its counters are exchanged.
    pub(super) fn count(&mut self, slot: u32, hash: Hash, algorithm: &Algorithm, operation: Operation, allowed: bool) {
        let Changes { counters, limits, .. } = &mut self.changes;
        let entry = self.entries.get(slot as usize).copied().unwrap_or_default() as usize;
        let known = entry.checked_sub(1).and_then(|index| counters.get_mut(index));
        if let Some(counter) = known
            && counter.hash == hash
            && limits[counter.limit as usize] == *algorithm
        {
            counter.pending.count(algorithm, operation, allowed);
            return;
        }
        let mut pending = PendingHits::default();
        if !pending.count(algorithm, operation, allowed) {
            return;
        }
        let recent = limits.len().saturating_sub(COMPARED_LIMITS);
        let limit = match limits[recent..].iter().position(|limit| limit == algorithm) {
            Some(index) => recent + index,
            None if algorithm.spec().is_none() => return,
            None => {
                limits.push(*algorithm);
                limits.len() - 1
            }
        };
        counters.push(ChangedCounter { hash, limit: limit as u32, pending });
        let entry = counters.len() as u32;
        self.set_entry(slot, entry);
    }

    /// Marks the counter of a slot as exchanged with peers.
    pub(super) fn mark_exchanged(&mut self, slot: u32) {
        if !self.is_exchanged(slot) {
            // Beyond any index.
            self.set_entry(slot, u32::MAX);
        }
    }

    /// Records that an operator has reset a counter.
    pub(super) fn reset(&mut self, hash: Hash) {
        self.drop_pending(hash);
        self.changes.resets.push(hash);
    }

    /// Drops the pending hits of a counter.
    pub(super) fn drop_pending(&mut self, hash: Hash) {
        for counter in self.changes.counters.iter_mut().filter(|counter| counter.hash == hash) {
            counter.pending = PendingHits::default();
        }
    }

    /// Marks a slot as free.
    pub(super) fn forget(&mut self, slot: u32) {
        if let Some(entry) = self.entries.get_mut(slot as usize) {
            *entry = 0;
        }
    }

    /// Returns whether the counter of a slot is exchanged with peers.
    pub(super) fn is_exchanged(&self, slot: u32) -> bool {
        self.entries.get(slot as usize).is_some_and(|entry| *entry > 0)
    }

    /// Takes the changes since the last call.
    pub(super) fn take(&mut self) -> Changes {
        let counters = Vec::with_capacity(self.changes.counters.len());
        std::mem::replace(&mut self.changes, Changes { counters, ..Changes::default() })
    }

    fn set_entry(&mut self, slot: u32, entry: u32) {
        let slot = slot as usize;
        if slot >= self.entries.len() {
            self.entries.resize(slot + 1, 0);
        }
        self.entries[slot] = entry;
    }
}
