//! [`Memory`]: a store with its counters in this process. It is the embedded default. Without peers, its counters are empty
//! after a restart.
//!
//! It decides by `now`, an argument of each call: the wall clock, which the service reads once for each request.
//!
//! Counter names are not stored. A counter is identified by 88 bits of a hash of its name: `SipHash` with a secret that
//! is generated when the process starts, or SHA-256 if peers exchange the counters. Callers therefore cannot find a
//! name that shares the counter of a given name. The probability that two of ten million names share one by chance is
//! 10⁻¹³.
//!
//! The store holds at most `max_counters` counters. A new counter reuses the slot of an expired one if possible: a
//! cursor (the clock hand of cache replacement) advances by a few slots per insertion and frees the expired ones, so
//! the store never sweeps all counters at once. If the store is full of live counters, it evicts one of the next few at
//! the cursor, namely the one that would expire first. An evicted counter starts again as a new one. Rejecting new
//! counters was not an option, because a caller that fills the store could then lock out all others.

mod changes;
mod hash;
mod shard;

use std::borrow::Borrow;

use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

pub use self::changes::Change;
use sluicegate_algorithm::{Action, Algorithm, Decision, Micros, Operation, Program, State};
use sluicegate_metrics::CacheLine;

use self::{
    hash::Hash,
    shard::{ExchangedCounter, Shard},
};
use super::{
    Charge, Counter, Hit, HitDecision, HitDecisions, Store, StoreError,
    identity::{CounterDigest, Digests, Secret},
    pending::PendingHits,
};

/// Number of shards. It is high enough that two workers rarely want the same lock. With 40 shards, a million counters
/// fill the shards' tables to three quarters; with 64, the tables would have just doubled and be almost half empty.
const SHARDS: usize = 40;
/// Number of slots that one call of [`Memory::reclaim`] checks in each shard, under the shard's lock.
const RECLAIM_BATCH: usize = 256;
/// Number of the latest limits of a list that are searched before a limit is added. A limit can be listed twice.
const COMPARED_LIMITS: usize = 64;

/// Settings of the memory store.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
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

impl Settings {
    /// Returns a problem of the settings, or `None` if they are valid.
    #[must_use]
    pub fn problem(&self) -> Option<&'static str> {
        if self.max_counters == 0 {
            return Some("memory.max_counters must be greater than 0");
        }
        None
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
    shards: Vec<CacheLine<Mutex<Shard>>>,
    names: Names,
}

/// The hash that computes a counter's identity from its name.
enum Names {
    /// A hash with a secret of this process.
    Secret(Secret),
    /// A digest that is the same for all peers.
    Digests(Digests),
}

/// A copy of a counter, for an instance that joins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CounterCopy {
    /// Digest of the counter's name.
    pub counter: CounterDigest,
    /// The state.
    pub state: State,
    /// Expiry in seconds since the Unix epoch.
    pub expires: u32,
}

impl Memory {
    /// Creates an empty store with a new secret.
    #[must_use]
    pub fn new(settings: &Settings) -> Self {
        Self::with_names(settings, Names::Secret(Secret::random()))
    }

    /// Creates an empty store whose counters are exchanged with peers. [`take_changes`](Self::take_changes) must be
    /// called regularly, because the changes stay in memory until then.
    #[must_use]
    pub fn exchanged(settings: &Settings) -> Self {
        Self::with_names(settings, Names::Digests(Digests::random()))
    }

    fn with_names(settings: &Settings, names: Names) -> Self {
        let max_per_shard = settings.max_counters.div_ceil(SHARDS).max(1);
        let logs_changes = matches!(names, Names::Digests(_));
        let shards = (0..SHARDS).map(|_| CacheLine(Mutex::new(Shard::new(max_per_shard, logs_changes)))).collect();
        Self { shards, names }
    }

    fn identity(&self, key: &[u8]) -> u128 {
        match &self.names {
            Names::Secret(secret) => secret.identity(key),
            Names::Digests(digests) => digests.identity(Digests::digest(key)),
        }
    }

    /// Decides one hit. The call blocks only for the lock of its shard.
    pub fn decide<C: Borrow<Counter>>(&self, hit: &Hit<C>, now: Micros) -> HitDecision {
        let counter = hit.counter.borrow();
        let hash = self.identity(&counter.name);
        self.lock(shard_of(hash)).apply(Hash::new(hash), &counter.program, hit.operation(now)).into()
    }

    /// Decides all hits. The call blocks only for the locks of their shards.
    pub fn decide_all(&self, hits: &[Hit<&Counter>], charge: Charge, now: Micros) -> HitDecisions {
        if charge == Charge::All {
            return self.decide_together(hits, now);
        }
        hits.iter().map(|hit| Ok(self.decide(hit, now))).collect()
    }

    /// Decides all hits under [`Charge::All`], while all of their shards are locked.
    fn decide_together(&self, hits: &[Hit<&Counter>], now: Micros) -> HitDecisions {
        let hashes: SmallVec<[u128; 4]> = hits.iter().map(|hit| self.identity(&hit.counter.name)).collect();
        let mut locked = LockedShards::lock(self, &hashes);
        let mut is_denied = false;
        for (hit, hash) in hits.iter().zip(&hashes) {
            if hit.blocks.on_denial() {
                let peek = Operation { action: Action::Peek, ..hit.operation(now) };
                if !locked.apply(*hash, &hit.counter.program, peek).allowed {
                    is_denied = true;
                    break;
                }
            }
        }
        let mut decisions = HitDecisions::with_capacity(hits.len());
        for (hit, hash) in hits.iter().zip(&hashes) {
            let mut operation = hit.operation(now);
            if is_denied && operation.action == Action::Take {
                operation.action = Action::Peek;
            }
            decisions.push(Ok(locked.apply(*hash, &hit.counter.program, operation).into()));
        }
        decisions
    }

    /// Returns a copy of a counter's state; empty if there is none.
    #[must_use]
    pub fn state(&self, key: &[u8]) -> State {
        let hash = self.identity(key);
        self.lock(shard_of(hash)).state(Hash::new(hash))
    }

    /// Deletes a counter and returns whether it existed.
    pub fn delete(&self, key: &[u8]) -> bool {
        let hash = self.identity(key);
        self.lock(shard_of(hash)).reset(Hash::new(hash))
    }

    /// Removes some of the expired counters of every shard. Must be called periodically while there is no traffic.
    pub fn reclaim(&self, now: Micros) {
        for shard in 0..SHARDS {
            self.lock(shard).reclaim(RECLAIM_BATCH, now);
        }
    }

    /// Returns the usage statistics.
    #[must_use]
    pub fn usage(&self) -> Usage {
        let mut sum = Usage::default();
        for shard in 0..SHARDS {
            let usage = self.lock(shard).usage();
            sum.counters += usage.counters;
            sum.evicted += usage.evicted;
            sum.expired += usage.expired;
        }
        sum
    }

    /// Takes the hits counted since the last call, and adds their limits and the counters that were reset to the lists.
    pub fn take_changes(&self, limits: &mut Vec<Algorithm>, resets: &mut Vec<CounterDigest>) -> Vec<Change> {
        let Names::Digests(digests) = &self.names else {
            return Vec::new();
        };
        let mut changes = Vec::new();
        for shard in 0..SHARDS {
            let taken = self.lock(shard).take_changes();
            resets.extend(taken.resets.iter().map(|hash| digests.digest_of(hash.0)));
            let indexes: SmallVec<[u32; 8]> = taken.limits.iter().map(|limit| index_of(limits, limit)).collect();
            for changed in &taken.counters {
                if changed.pending.hits != 0 {
                    changes.push(Change {
                        counter: digests.digest_of(changed.hash.0),
                        limit: indexes[changed.limit as usize],
                        hits: changed.pending.hits,
                        counted_at: changed.pending.counted_at,
                    });
                }
            }
        }
        changes
    }

    /// Adds hits that a peer has counted. Returns the number of changes whose hits still count.
    ///
    /// Each shard is locked once, and finds its counters before it changes them: the processor then waits for the
    /// memory of several counters at the same time.
    pub fn add_hits<'a>(
        &self,
        changes: impl Iterator<Item = (CounterDigest, &'a Algorithm, PendingHits)>,
        now: Micros,
    ) -> u64 {
        let Names::Digests(digests) = &self.names else {
            return 0;
        };
        let mut by_shard: [Vec<(Hash, &Algorithm, PendingHits)>; SHARDS] = std::array::from_fn(|_| Vec::new());
        for (counter, algorithm, pending) in changes {
            let identity = digests.identity(counter);
            by_shard[shard_of(identity)].push((Hash::new(identity), algorithm, pending));
        }
        let mut counting = 0;
        for (shard, changes) in by_shard.iter().enumerate() {
            if changes.is_empty() {
                continue;
            }
            let mut shard = self.lock(shard);
            for (hash, ..) in changes {
                shard.prefetch(*hash);
            }
            for (hash, algorithm, pending) in changes {
                counting += u64::from(shard.add_hits(*hash, algorithm, *pending, now));
            }
        }
        counting
    }

    /// Deletes counters that a peer has reset.
    pub fn apply_resets(&self, counters: &[CounterDigest]) {
        if let Names::Digests(digests) = &self.names {
            for counter in counters {
                let identity = digests.identity(*counter);
                self.lock(shard_of(identity)).apply_reset(Hash::new(identity));
            }
        }
    }

    /// Returns a copy of the counters of one part of the store. Returns `None` if there is no such part.
    pub fn copy_part(&self, part: usize) -> Option<Vec<CounterCopy>> {
        let Names::Digests(digests) = &self.names else {
            return None;
        };
        if part >= SHARDS {
            return None;
        }
        // The shard is locked only for the copy, not while the digests are computed.
        let counters = self.lock(part).exchanged_counters();
        let mut copies = Vec::with_capacity(counters.len());
        for ExchangedCounter { hash, state, expires } in counters {
            copies.push(CounterCopy { counter: digests.digest_of(hash.0), state, expires });
        }
        Some(copies)
    }

    /// Returns the maximum number of counters.
    pub fn max_counters(&self) -> usize {
        (0..SHARDS).map(|shard| self.lock(shard).max_counters()).sum()
    }

    /// Inserts a peer's copy of a counter, unless the counter exists. Returns whether it was inserted.
    pub fn insert_copy(&self, copy: CounterCopy, now: Micros) -> bool {
        let Names::Digests(digests) = &self.names else {
            return false;
        };
        let identity = digests.identity(copy.counter);
        self.lock(shard_of(identity)).insert_copy(Hash::new(identity), copy.state, copy.expires, now)
    }

    fn lock(&self, shard: usize) -> MutexGuard<'_, Shard> {
        // A panic under the lock leaves the shard consistent, because the state is written last.
        self.shards[shard].0.lock()
    }
}

/// The shards of several counters, which stay locked together.
struct LockedShards<'m> {
    /// Shard numbers in ascending order, without duplicates.
    numbers: SmallVec<[usize; 4]>,
    /// The locked shard of each number.
    shards: SmallVec<[MutexGuard<'m, Shard>; 4]>,
}

impl<'m> LockedShards<'m> {
    /// Locks the shards of the counters in ascending order, which prevents deadlocks.
    fn lock(store: &'m Memory, hashes: &[u128]) -> Self {
        let mut numbers: SmallVec<[usize; 4]> = hashes.iter().map(|hash| shard_of(*hash)).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let shards = numbers.iter().map(|number| store.lock(*number)).collect();
        Self { numbers, shards }
    }

    /// Applies an operation to one of the counters. Its shard must be locked.
    fn apply(&mut self, hash: u128, program: &Program, operation: Operation) -> Decision {
        let index = self.numbers.binary_search(&shard_of(hash)).unwrap_or_default();
        self.shards[index].apply(Hash::new(hash), program, operation)
    }
}

impl Store for Memory {
    async fn apply(&self, hits: &[Hit<&Counter>], charge: Charge, now: Micros) -> HitDecisions {
        self.decide_all(hits, charge, now)
    }

    async fn read(&self, counter: &Counter, now: Micros) -> Result<(State, Micros), StoreError> {
        Ok((self.state(&counter.name), now))
    }

    async fn delete(&self, name: &[u8], _: bool) -> Result<bool, StoreError> {
        Ok(self.delete(name))
    }

    /// Returns 0. There are no grants, because a decision in memory costs less than the report about a grant.
    fn report(&self, _: &Counter, _: u64, _: u64, _: Micros) -> u64 {
        0
    }
}

/// Returns the index of a limit in the list, which is extended if necessary.
fn index_of(limits: &mut Vec<Algorithm>, limit: &Algorithm) -> u32 {
    // A list that grows long has few duplicates, and searching it would take long.
    let recent = limits.len().saturating_sub(COMPARED_LIMITS);
    if let Some(index) = limits[recent..].iter().position(|known| known == limit) {
        return (recent + index) as u32;
    }
    limits.push(*limit);
    (limits.len() - 1) as u32
}

/// Returns the shard of a hash, from its highest 16 bits. The tables of a shard use the lowest bits.
fn shard_of(hash: u128) -> usize {
    (hash >> 112) as usize % SHARDS
}

#[cfg(test)]
mod tests;
