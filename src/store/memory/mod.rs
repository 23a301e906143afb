//! [`Memory`]: a store with its counters in this process. It is the embedded default.
//!
//! Counter names are not stored. A counter is identified by 88 bits of its name's `SipHash`, with a secret that is
//! generated when the process starts. Callers therefore cannot choose two names that share a counter. The probability
//! that two of ten million names share one by chance is 10⁻¹³.
//!
//! The store holds at most `max_counters` counters. A new counter reuses the slot of an expired one if possible: a
//! cursor (the clock hand of cache replacement) advances by a few slots per insertion and frees the expired ones, so
//! the store never sweeps all counters at once. If the store is full of live counters, it evicts one of the next few at
//! the cursor, namely the one that would expire first. An evicted counter starts again as a new one. Rejecting new
//! counters was not an option, because a caller that fills the store could then lock out all others.

mod shard;

use std::sync::{Mutex, MutexGuard, PoisonError};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use self::shard::{Hash, Shard};
use super::{Charge, Hit, HitDecisions, identity::Secret};
use crate::algorithm::{Action, Micros, Operation, State};

/// Number of shards. It is high enough that two workers rarely want the same lock. With 40 shards, a million counters
/// fill the shards' tables to three quarters; with 64, the tables would have just doubled and be almost half empty.
const SHARDS: usize = 40;
/// Number of slots that one call of [`Memory::reclaim`] checks in each shard, under the shard's lock.
const RECLAIM_BATCH: usize = 256;

/// Settings of the memory store.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Maximum number of counters, of about 45 bytes each. A counter with a long state, such as a log, counts by its
    /// size.
    pub max_counters: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { max_counters: 10_000_000 }
    }
}

/// Usage statistics of the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Number of counters in the store, including expired ones that have not been removed yet.
    pub counters: u64,
    /// Number of counters evicted because the store was full of live ones.
    pub evicted: u64,
    /// Number of expired counters that were removed.
    pub expired: u64,
}

/// A store with its counters in this process.
pub struct Memory {
    shards: Vec<Mutex<Shard>>,
    secret: Secret,
}

impl Memory {
    /// Creates an empty store with a new secret.
    #[must_use]
    pub fn new(settings: &Settings) -> Self {
        let max_per_shard = settings.max_counters.div_ceil(SHARDS).max(1);
        let shards = (0..SHARDS).map(|_| Mutex::new(Shard::new(max_per_shard))).collect();
        Self { shards, secret: Secret::new() }
    }

    /// Decides all hits. The call blocks only for the locks of their shards.
    pub fn apply(&self, hits: &[Hit<'_>], charge: Charge, now: Micros) -> HitDecisions {
        if charge == Charge::All {
            return self.apply_all(hits, now);
        }
        hits.iter()
            .map(|hit| {
                let hash = self.secret.identity(hit.key);
                Ok(self.lock(shard_of(hash)).apply(Hash::new(hash), hit.algorithm, hit.operation(now)).into())
            })
            .collect()
    }

    /// Decides all hits under [`Charge::All`]. The shards are locked in ascending order, which prevents deadlocks.
    fn apply_all(&self, hits: &[Hit<'_>], now: Micros) -> HitDecisions {
        let hashes: SmallVec<[u128; 4]> = hits.iter().map(|hit| self.secret.identity(hit.key)).collect();
        let mut shards: SmallVec<[usize; 4]> = hashes.iter().map(|hash| shard_of(*hash)).collect();
        shards.sort_unstable();
        shards.dedup();
        let mut locked: SmallVec<[MutexGuard<'_, Shard>; 4]> = shards.iter().map(|shard| self.lock(*shard)).collect();
        let mut decide = |hit: &Hit<'_>, hash: u128, operation: Operation| {
            let index = shards.binary_search(&shard_of(hash)).unwrap_or_default();
            locked[index].apply(Hash::new(hash), hit.algorithm, operation)
        };
        let is_denied = hits.iter().zip(&hashes).filter(|(hit, _)| hit.blocks_on_denial).any(|(hit, hash)| {
            let peek = Operation { action: Action::Peek, ..hit.operation(now) };
            !decide(hit, *hash, peek).allowed
        });
        let final_operation = |hit: &Hit<'_>| match hit.operation(now) {
            operation @ Operation { action: Action::Take, .. } if is_denied => {
                Operation { action: Action::Peek, ..operation }
            }
            operation => operation,
        };
        hits.iter().zip(&hashes).map(|(hit, hash)| Ok(decide(hit, *hash, final_operation(hit)).into())).collect()
    }

    /// Returns a copy of a counter's state; empty if there is none.
    #[must_use]
    pub fn state(&self, key: &[u8]) -> State {
        let hash = self.secret.identity(key);
        self.lock(shard_of(hash)).state(Hash::new(hash))
    }

    /// Deletes a counter and returns whether it existed.
    pub fn delete(&self, key: &[u8]) -> bool {
        let hash = self.secret.identity(key);
        self.lock(shard_of(hash)).forget(Hash::new(hash))
    }

    /// Removes some of the expired counters of every shard. Must be called periodically while there is no traffic.
    pub fn reclaim(&self, now: Micros) {
        for shard in &self.shards {
            shard.lock().unwrap_or_else(PoisonError::into_inner).reclaim(RECLAIM_BATCH, now);
        }
    }

    /// Returns the usage statistics.
    #[must_use]
    pub fn usage(&self) -> Usage {
        self.shards.iter().fold(Usage::default(), |sum, shard| {
            let usage = shard.lock().unwrap_or_else(PoisonError::into_inner).usage();
            Usage {
                counters: sum.counters + usage.counters,
                evicted: sum.evicted + usage.evicted,
                expired: sum.expired + usage.expired,
            }
        })
    }

    fn lock(&self, shard: usize) -> MutexGuard<'_, Shard> {
        // A panic under the lock leaves the shard consistent, because the state is written last.
        self.shards[shard].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the shard of a hash, from its highest 16 bits. The tables of a shard use the lowest bits.
fn shard_of(hash: u128) -> usize {
    (hash >> 112) as usize % SHARDS
}

#[cfg(test)]
mod tests;
