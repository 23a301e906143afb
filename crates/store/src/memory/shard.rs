//! [`Shard`]: one shard of the store, a table of 4-byte slot numbers and chunks of 36-byte slots.
//!
//! A hash table of whole counters would double at every growth and be half empty afterwards: 69 MB for a million
//! counters. A half-empty table of slot numbers is small, and chunks are added one by one: 45 MB for a million.
//!
//! A slot holds a state of up to 20 bytes. Longer states (logs, windows of many counters) are stored separately, and
//! their size counts towards the maximum of the shard.

use hashbrown::HashTable;
use sluicegate_algorithm::{Action, Algorithm, CLOCK_SLACK, Decision, Micros, Operation, Program, State};

use super::{
    Usage,
    changes::{ChangeLog, Changes},
    hash::Hash,
};
use crate::pending::{PendingHits, add_hits};

/// Number of slots in a chunk. A chunk fits into 8 KiB, which allocators provide without waste.
const SLOTS_PER_CHUNK: usize = 8192 / size_of::<Slot>();
/// Number of slots that the cursor checks per new counter. With only one, it could never get ahead of the insertions.
const SLOTS_PER_INSERTION: usize = 4;
/// Number of slots from which the evicted counter is chosen when the shard is full.
const EVICTION_CANDIDATES: usize = 16;
/// Value of [`Slot::len`] for a long state. The slot's state bytes then contain the index of the long state.
const LONG_STATE: u8 = u8::MAX;

/// A slot for one counter. Its fields have an alignment of at most 4, because 8-byte fields would add 4 bytes of
/// padding.
#[derive(Clone, Copy, Default)]
struct Slot {
    /// 88 bits: the probability that two of ten million names share a hash is 10⁻¹³.
    hash: [u8; 11],
    /// Length of the state in bytes, or [`LONG_STATE`].
    len: u8,
    state: [u8; State::INLINE],
    /// Expiry in seconds since the Unix epoch, rounded up; 0 for a free slot.
    expires: u32,
}

impl Slot {
    fn is_free(&self) -> bool {
        self.expires == 0
    }

    /// Returns `true` if the counter expired more than [`CLOCK_SLACK`] ago, so that it survives a clock that steps
    /// back.
    fn is_expired(&self, now: Micros) -> bool {
        u64::from(self.expires) + CLOCK_SLACK.floor_secs() <= now.floor_secs()
    }

    /// Returns the state if it is in the slot.
    fn short_state(&self) -> &[u8] {
        self.state.get(..usize::from(self.len)).unwrap_or_default()
    }

    /// Returns the index of the long state, or `None` if the slot contains the state.
    fn long_index(&self) -> Option<usize> {
        if self.len != LONG_STATE {
            return None;
        }
        let [a, b, c, d, ..] = self.state;
        Some(u32::from_le_bytes([a, b, c, d]) as usize)
    }

    fn expire_at(&mut self, expires: Micros) {
        self.expires = u32::try_from(expires.ceil_secs()).unwrap_or(u32::MAX).max(1);
    }
}

/// A copy of a counter that is exchanged with peers.
pub(super) struct ExchangedCounter {
    pub(super) hash: Hash,
    pub(super) state: State,
    /// Expiry in seconds since the Unix epoch.
    pub(super) expires: u32,
}

/// A bounded set of counters under one lock.
pub(super) struct Shard {
    /// Slot numbers by the low bits of the counters' hashes.
    index: HashTable<u32>,
    chunks: Vec<Box<[Slot; SLOTS_PER_CHUNK]>>,
    /// Number of slots that have been used at least once.
    allocated: usize,
    free_slots: Vec<u32>,
    cursor: usize,
    /// Long states, and the free indexes among them.
    long_states: Vec<Vec<u8>>,
    free_long_states: Vec<u32>,
    /// Bytes of each long state, which stay counted while the state is moved out, and their total.
    long_sizes: Vec<u32>,
    total_long_bytes: usize,
    max_counters: usize,
    evicted: u64,
    expired: u64,
    /// Changes for the peers of this instance, if it has any.
    log: Option<Box<ChangeLog>>,
}

impl Shard {
    /// Creates an empty shard. `logs_changes` is whether its changes are taken and passed to peers.
    pub(super) fn new(max_counters: usize, logs_changes: bool) -> Self {
        let max_counters = max_counters.min(u32::MAX as usize);
        Self {
            index: HashTable::new(),
            chunks: Vec::new(),
            allocated: 0,
            free_slots: Vec::new(),
            cursor: 0,
            long_states: Vec::new(),
            free_long_states: Vec::new(),
            long_sizes: Vec::new(),
            total_long_bytes: 0,
            max_counters,
            evicted: 0,
            expired: 0,
            log: logs_changes.then(Box::default),
        }
    }

    /// Applies an operation to a counter. A new counter is stored only if a take has changed its state.
    pub(super) fn apply(&mut self, hash: Hash, program: &Program, operation: Operation) -> Decision {
        let Some(index) = self.find(hash) else {
            let mut state = State::default();
            let allowed = program.step(&mut state, operation);
            let decision = program.explain(&state, operation, allowed);
            if !state.is_empty() && operation.action == Action::Take {
                let expires = program.expires(&state, operation.now);
                let index = self.insert(hash, state, expires, operation.now);
                self.log_change(index, hash, program, operation, allowed);
            }
            return decision;
        };
        let mut state = self.take_state(index);
        let allowed = program.step(&mut state, operation);
        let decision = program.explain(&state, operation, allowed);
        self.log_change(index, hash, program, operation, allowed);
        self.put_state(index, state, program, operation.now);
        decision
    }

    fn log_change(&mut self, index: u32, hash: Hash, program: &Program, operation: Operation, allowed: bool) {
        let (Some(log), Some(algorithm)) = (&mut self.log, program.algorithm()) else {
            return;
        };
        log.count(index, hash, algorithm, operation, allowed);
    }

    /// Loads the memory of a counter into the processor's cache.
    pub(super) fn prefetch(&self, hash: Hash) {
        std::hint::black_box(self.find(hash));
    }

    /// Adds hits that a peer has counted. Returns whether they still count.
    pub(super) fn add_hits(&mut self, hash: Hash, algorithm: &Algorithm, pending: PendingHits, now: Micros) -> bool {
        let known = self.find(hash);
        let mut state = match known {
            Some(index) => self.take_state(index),
            None => State::default(),
        };
        let counts = add_hits(algorithm, &mut state, pending, now);
        match known {
            Some(index) => {
                self.mark_exchanged(index);
                self.put_state(index, state, &Program::Limit(*algorithm), now);
            }
            None if state.is_empty() => {}
            None => {
                let expires = algorithm.expires(&state, now);
                let index = self.insert(hash, state, expires, now);
                self.mark_exchanged(index);
            }
        }
        counts
    }

    /// Returns the maximum number of counters.
    pub(super) const fn max_counters(&self) -> usize {
        self.max_counters
    }

    /// Takes the changes since the last call.
    pub(super) fn take_changes(&mut self) -> Changes {
        self.log.as_mut().map(|log| log.take()).unwrap_or_default()
    }

    /// Returns a copy of all counters that are exchanged with peers.
    pub(super) fn exchanged_counters(&self) -> Vec<ExchangedCounter> {
        let Some(log) = &self.log else {
            return Vec::new();
        };
        let mut counters = Vec::new();
        for index in 0..self.allocated as u32 {
            let slot = self.slot(index);
            if !slot.is_free() && log.is_exchanged(index) {
                let state = self.copy_state(index);
                counters.push(ExchangedCounter { hash: Hash(slot.hash), state, expires: slot.expires });
            }
        }
        counters
    }

    /// Inserts a peer's copy of a counter, unless the counter exists. Returns whether it was inserted.
    pub(super) fn insert_copy(&mut self, hash: Hash, state: State, expires: u32, now: Micros) -> bool {
        if self.find(hash).is_some() || state.is_empty() {
            return false;
        }
        let index = self.insert(hash, state, Micros::from_secs(expires.into()), now);
        self.mark_exchanged(index);
        true
    }

    fn mark_exchanged(&mut self, index: u32) {
        if let Some(log) = &mut self.log {
            log.mark_exchanged(index);
        }
    }

    /// Returns the state of a slot. A long state is moved out instead of being copied, until [`Self::put_state`].
    fn take_state(&mut self, index: u32) -> State {
        let slot = self.slot(index);
        match slot.long_index() {
            Some(long_index) => State::from_long(std::mem::take(&mut self.long_states[long_index])),
            None => State::from_bytes(slot.short_state()),
        }
    }

    /// Writes the state of a slot if it has changed.
    fn put_state(&mut self, index: u32, state: State, program: &Program, now: Micros) {
        let slot = self.slot(index);
        if slot.long_index().is_some() || state.as_bytes() != slot.short_state() {
            let expires = program.expires(&state, now);
            self.write(index, state, expires);
        }
    }

    /// Returns a copy of a counter's state; empty if there is none.
    pub(super) fn state(&self, hash: Hash) -> State {
        match self.find(hash) {
            Some(index) => self.copy_state(index),
            None => State::default(),
        }
    }

    fn copy_state(&self, index: u32) -> State {
        let slot = self.slot(index);
        match slot.long_index() {
            Some(long_index) => State::from_long(self.long_states[long_index].clone()),
            None => State::from_bytes(slot.short_state()),
        }
    }

    /// Deletes a counter and returns whether it existed. Peers delete it, too.
    pub(super) fn reset(&mut self, hash: Hash) -> bool {
        if let Some(log) = &mut self.log {
            log.reset(hash);
        }
        self.forget(hash)
    }

    /// Deletes a counter that a peer has reset, and the hits that were not published.
    pub(super) fn apply_reset(&mut self, hash: Hash) {
        if let Some(log) = &mut self.log {
            log.drop_pending(hash);
        }
        self.forget(hash);
    }

    fn forget(&mut self, hash: Hash) -> bool {
        let Some(index) = self.find(hash) else {
            return false;
        };
        self.remove(index);
        true
    }

    /// Advances the cursor by `count` slots and removes their expired counters.
    pub(super) fn reclaim(&mut self, count: usize, now: Micros) {
        for _ in 0..count.min(self.allocated) {
            let index = self.advance();
            let slot = self.slot(index);
            if !slot.is_free() && slot.is_expired(now) {
                self.remove(index);
                self.expired += 1;
            }
        }
    }

    pub(super) fn usage(&self) -> Usage {
        Usage { counters: self.index.len() as u64, evicted: self.evicted, expired: self.expired }
    }

    fn find(&self, hash: Hash) -> Option<u32> {
        self.index.find(Hash::low(hash.0), |index| self.slot(*index).hash == hash.0).copied()
    }

    fn insert(&mut self, hash: Hash, state: State, expires: Micros, now: Micros) -> u32 {
        self.reclaim(SLOTS_PER_INSERTION, now);
        if self.free_slots.is_empty() && self.allocated >= self.max_counters {
            self.evict();
        }
        let index = self.free_slots.pop().unwrap_or_else(|| self.allocate());
        self.slot_mut(index).hash = hash.0;
        let chunks = &self.chunks;
        self.index.insert_unique(Hash::low(hash.0), index, |index| Hash::low(slot(chunks, *index).hash));
        self.write(index, state, expires);
        index
    }

    /// Stores the state in the slot or as a long state.
    ///
    /// If slots and long states together exceed the memory of `max_counters` slots, counters are evicted.
    fn write(&mut self, index: u32, state: State, expires: Micros) {
        let long_index = self.slot(index).long_index();
        let slot = self.slot_mut(index);
        slot.expire_at(expires);
        let bytes = state.as_bytes();
        if let Some(short) = slot.state.get_mut(..bytes.len()) {
            short.copy_from_slice(bytes);
            slot.len = bytes.len() as u8;
            if let Some(long_index) = long_index {
                self.free_long_state(long_index);
            }
            return;
        }
        let long_index = match long_index {
            Some(long_index) => long_index,
            None => self.allocate_long(),
        };
        let mut long = state.into_long();
        if long.capacity() > 2 * long.len() {
            long.shrink_to_fit();
        }
        self.total_long_bytes += long.capacity();
        self.total_long_bytes -= self.long_sizes[long_index] as usize;
        self.long_sizes[long_index] = long.capacity() as u32;
        self.long_states[long_index] = long;
        let slot = self.slot_mut(index);
        slot.len = LONG_STATE;
        slot.state[..4].copy_from_slice(&(long_index as u32).to_le_bytes());
        while self.total_long_bytes / size_of::<Slot>() + self.index.len() > self.max_counters && self.index.len() > 1 {
            self.evict();
        }
    }

    fn free_long_state(&mut self, long_index: usize) {
        self.long_states[long_index] = Vec::new();
        self.total_long_bytes -= std::mem::take(&mut self.long_sizes[long_index]) as usize;
        self.free_long_states.push(long_index as u32);
    }

    fn allocate(&mut self) -> u32 {
        if self.allocated == self.chunks.len() * SLOTS_PER_CHUNK {
            self.chunks.push(Box::new([Slot::default(); SLOTS_PER_CHUNK]));
        }
        self.allocated += 1;
        (self.allocated - 1) as u32
    }

    /// Returns the index of an empty long state.
    fn allocate_long(&mut self) -> usize {
        if let Some(index) = self.free_long_states.pop() {
            return index as usize;
        }
        self.long_states.push(Vec::new());
        self.long_sizes.push(0);
        self.long_states.len() - 1
    }

    /// Evicts the counter with the earliest expiry among the next slots.
    fn evict(&mut self) {
        let mut earliest: Option<u32> = None;
        for _ in 0..EVICTION_CANDIDATES.min(self.allocated) {
            let index = self.advance();
            let slot = self.slot(index);
            if !slot.is_free() && earliest.is_none_or(|earliest| slot.expires < self.slot(earliest).expires) {
                earliest = Some(index);
            }
        }
        if let Some(index) = earliest {
            self.remove(index);
            self.evicted += 1;
        }
    }

    fn remove(&mut self, index: u32) {
        let slot = *self.slot(index);
        if let Ok(entry) = self.index.find_entry(Hash::low(slot.hash), |entry| *entry == index) {
            entry.remove();
        }
        if let Some(long_index) = slot.long_index() {
            self.free_long_state(long_index);
        }
        *self.slot_mut(index) = Slot::default();
        if let Some(log) = &mut self.log {
            log.forget(index);
        }
        self.free_slots.push(index);
    }

    fn advance(&mut self) -> u32 {
        self.cursor = if self.cursor + 1 >= self.allocated { 0 } else { self.cursor + 1 };
        self.cursor as u32
    }

    fn slot(&self, index: u32) -> &Slot {
        slot(&self.chunks, index)
    }

    fn slot_mut(&mut self, index: u32) -> &mut Slot {
        &mut self.chunks[index as usize / SLOTS_PER_CHUNK][index as usize % SLOTS_PER_CHUNK]
    }
}

fn slot(chunks: &[Box<[Slot; SLOTS_PER_CHUNK]>], index: u32) -> &Slot {
    &chunks[index as usize / SLOTS_PER_CHUNK][index as usize % SLOTS_PER_CHUNK]
}
