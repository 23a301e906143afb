//! Counters in this process: the embedded default.
//!
//! Keys are not kept. A counter is found by 88 bits of the SipHash of its name under a secret drawn when the process
//! starts, so nobody can make two names share a counter on purpose, and by chance two of ten million do with a probability of 10⁻¹³.
//!
//! The memory is bounded: at most `max_counters` counters. Each new one first takes the place of an expired one, which
//! a hand that moves on a few places per insertion finds; so nothing is ever swept as a whole. When all are
//! alive and the set maximum is reached, the counter among a handful under the hand that would expire first is
//! forgotten, and counted as evicted: its caller starts afresh. To refuse newcomers instead would let whoever fills
//! the store lock everybody else out.

mod shard;

use std::sync::{Mutex, MutexGuard, PoisonError};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use self::shard::{Hash, Shard};
use super::{Charge, Hit, HitDecisions, identity::Secret};
use crate::algorithm::{Action, Micros, Operation};

/// So many that two workers rarely want the same lock; and with this number a million counters fill their shards'
/// tables to three quarters, where 64 would have them just doubled and almost half empty.
const SHARDS: usize = 40;
/// Places that one call of [`Memory::reclaim`] looks at in each shard while it holds its lock.
const RECLAIM: usize = 256;

/// How much the store may hold.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Counters at most; about 45 bytes each. A log or a window of many counters counts by its size.
    pub max_counters: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { max_counters: 10_000_000 }
    }
}

/// What the store can say of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Counters held now, some perhaps expired.
    pub counters: u64,
    /// Counters forgotten because the store was full of live ones.
    pub evicted: u64,
    /// Expired counters whose place was taken back.
    pub expired: u64,
}

/// Counters in this process.
pub struct Memory {
    shards: Vec<Mutex<Shard>>,
    secret: Secret,
}

impl Memory {
    /// An empty store with a fresh secret.
    #[must_use]
    pub fn new(settings: &Settings) -> Self {
        let each = settings.max_counters.div_ceil(SHARDS).max(1);
        let shards = (0..SHARDS).map(|_| Mutex::new(Shard::new(each))).collect();
        Self { shards, secret: Secret::new() }
    }

    /// Decides every hit; nothing waits but for a shard's lock.
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

    /// All of the shards are locked, in their order, so that nobody waits in a circle.
    fn apply_all(&self, hits: &[Hit<'_>], now: Micros) -> HitDecisions {
        let hashes: SmallVec<[u128; 4]> = hits.iter().map(|hit| self.secret.identity(hit.key)).collect();
        let mut numbers: SmallVec<[usize; 4]> = hashes.iter().map(|hash| shard_of(*hash)).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let mut locked: SmallVec<[MutexGuard<'_, Shard>; 4]> =
            numbers.iter().map(|number| self.lock(*number)).collect();
        let mut decide = |hit: &Hit<'_>, hash: u128, ask: Operation| {
            let place = numbers.binary_search(&shard_of(hash)).unwrap_or_default();
            locked[place].apply(Hash::new(hash), hit.algorithm, ask)
        };
        let refused = hits.iter().zip(&hashes).filter(|(hit, _)| hit.binding).any(|(hit, hash)| {
            let peek = Operation { action: Action::Peek, ..hit.operation(now) };
            !decide(hit, *hash, peek).allowed
        });
        let ask = |hit: &Hit<'_>| match hit.operation(now) {
            ask @ Operation { action: Action::Take, .. } if refused => Operation { action: Action::Peek, ..ask },
            ask => ask,
        };
        hits.iter().zip(&hashes).map(|(hit, hash)| Ok(decide(hit, *hash, ask(hit)).into())).collect()
    }

    /// Forgets a counter; whether there was one.
    pub fn forget(&self, key: &[u8]) -> bool {
        let hash = self.secret.identity(key);
        self.lock(shard_of(hash)).forget(Hash::new(hash))
    }

    /// Takes some expired counters' places back: a little of every shard, to be called now and then when no traffic does it.
    pub fn reclaim(&self, now: Micros) {
        for shard in &self.shards {
            shard.lock().unwrap_or_else(PoisonError::into_inner).reclaim(RECLAIM, now);
        }
    }

    /// What the store holds.
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
        // A panic under the lock leaves a shard that is whole: the state is written last.
        self.shards[shard].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The top bits choose the shard; the shard's own table uses the low ones.
fn shard_of(hash: u128) -> usize {
    (hash >> 112) as usize % SHARDS
}

#[cfg(test)]
mod tests;
