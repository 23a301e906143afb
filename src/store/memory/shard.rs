//! One shard: a table of 4-byte references into chunks of 36-byte counters.
//!
//! A hash table of whole counters would double at every growth and be half empty afterwards: 69 MB for a million.
//! References are small enough to be half empty, and chunks are added one by one: 45 MB.
//!
//! A counter holds a state of up to 20 bytes. Longer ones (logs, windows of many counters) lie beside it, and count
//! against the shard's maximum by their size.

use hashbrown::HashTable;

use super::Usage;
use crate::algorithm::{Action, Algorithm, CLOCK_SLACK, Decision, Micros, Operation, State};

/// Counters in a chunk: as many as fit into 8 KiB, which allocators hand out without waste.
const CHUNK: usize = 8192 / size_of::<Slot>();
/// Places that the hand looks at for each new counter. More than one, or it would never gain on the insertions.
const STEPS: usize = 4;
/// Live counters that compete for being forgotten when the shard is full.
const CANDIDATES: usize = 16;
/// The length of a state that lies beside its counter, which then holds where.
const LONG: u8 = u8::MAX;

/// A counter, in bytes and words of 4: 8-byte fields would cost 4 bytes of padding each.
#[derive(Clone, Copy, Default)]
struct Slot {
    /// 88 bits. Of ten million names two have the same with a probability of 10⁻¹³.
    hash: [u8; 11],
    /// Bytes of the state.
    len: u8,
    state: [u8; State::INLINE],
    /// Seconds since the epoch, rounded up; 0 is a free place.
    expires: u32,
}

impl Slot {
    fn is_free(&self) -> bool {
        self.expires == 0
    }

    /// A clock that steps back must find its counters again.
    fn is_expired(&self, now: Micros) -> bool {
        u64::from(self.expires) + CLOCK_SLACK.floor_secs() <= now.floor_secs()
    }

    /// Where the long state is, if it is one.
    fn beside(&self) -> Option<usize> {
        let [a, b, c, d, ..] = self.state;
        (self.len == LONG).then(|| u32::from_le_bytes([a, b, c, d]) as usize)
    }

    fn expire_at(&mut self, expires: Micros) {
        self.expires = u32::try_from(expires.ceil_secs()).unwrap_or(u32::MAX).max(1);
    }
}

/// What a counter is found by.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Hash([u8; 11]);

impl Hash {
    pub(super) fn new(hash: u128) -> Self {
        let mut bytes = [0; 11];
        bytes.copy_from_slice(&hash.to_le_bytes()[..11]);
        Self(bytes)
    }

    /// What the table of references sorts by.
    fn low(bytes: [u8; 11]) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = bytes;
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }
}

pub(super) struct Shard {
    /// Where the counters are, by the low bits of their hash.
    index: HashTable<u32>,
    chunks: Vec<Box<[Slot; CHUNK]>>,
    /// Places used at least once.
    used: usize,
    free: Vec<u32>,
    hand: usize,
    /// Long states, and the places among them that are free.
    long: Vec<Vec<u8>>,
    free_long: Vec<u32>,
    /// Bytes that each of them takes, also while it is out, and all of them.
    long_sizes: Vec<u32>,
    long_bytes: usize,
    max: usize,
    evicted: u64,
    expired: u64,
}

impl Shard {
    pub(super) fn new(max: usize) -> Self {
        let max = max.min(u32::MAX as usize);
        Self {
            index: HashTable::new(),
            chunks: Vec::new(),
            used: 0,
            free: Vec::new(),
            hand: 0,
            long: Vec::new(),
            free_long: Vec::new(),
            long_sizes: Vec::new(),
            long_bytes: 0,
            max,
            evicted: 0,
            expired: 0,
        }
    }

    /// One question of the algorithm; a state that says nothing is not kept.
    pub(super) fn apply(&mut self, hash: Hash, algorithm: &Algorithm, ask: Operation) -> Decision {
        let Some(place) = self.find(hash) else {
            let mut state = State::default();
            let allowed = algorithm.step(&mut state, ask);
            let decision = algorithm.explain(&state, ask, allowed);
            if !state.is_empty() && ask.action == Action::Take {
                let expires = algorithm.expires(&state, ask.now);
                self.insert(hash, state, expires, ask.now);
            }
            return decision;
        };
        let slot = self.slot(place);
        let beside = slot.beside();
        // A long state is taken out and put back: it is never copied.
        let (mut state, before) = match beside {
            Some(beside) => (State::from_long(std::mem::take(&mut self.long[beside])), None),
            None => (State::from_short(slot.state, slot.len), Some((slot.state, slot.len))),
        };
        let allowed = algorithm.step(&mut state, ask);
        let decision = algorithm.explain(&state, ask, allowed);
        if before.is_none() || state.as_short() != before {
            let expires = algorithm.expires(&state, ask.now);
            self.write(place, state, expires);
        }
        decision
    }

    /// Whether there was something to forget.
    pub(super) fn forget(&mut self, hash: Hash) -> bool {
        let place = self.find(hash);
        place.into_iter().for_each(|place| self.remove(place));
        place.is_some()
    }

    /// Looks at the next few places and frees those that expired.
    pub(super) fn reclaim(&mut self, places: usize, now: Micros) {
        for _ in 0..places.min(self.used) {
            let place = self.advance();
            let slot = self.slot(place);
            if !slot.is_free() && slot.is_expired(now) {
                self.remove(place);
                self.expired += 1;
            }
        }
    }

    pub(super) fn usage(&self) -> Usage {
        Usage { counters: self.index.len() as u64, evicted: self.evicted, expired: self.expired }
    }

    fn find(&self, hash: Hash) -> Option<u32> {
        self.index.find(Hash::low(hash.0), |place| self.slot(*place).hash == hash.0).copied()
    }

    fn insert(&mut self, hash: Hash, state: State, expires: Micros, now: Micros) {
        self.reclaim(STEPS, now);
        if self.free.is_empty() && self.used >= self.max {
            self.evict();
        }
        let place = self.free.pop().unwrap_or_else(|| self.grow());
        self.slot_mut(place).hash = hash.0;
        let chunks = &self.chunks;
        self.index.insert_unique(Hash::low(hash.0), place, |place| Hash::low(slot(chunks, *place).hash));
        self.write(place, state, expires);
    }

    /// Keeps the state, in the slot or beside it; the bytes beside are what a maximum of short ones may take.
    fn write(&mut self, place: u32, state: State, expires: Micros) {
        let beside = self.slot(place).beside();
        let slot = self.slot_mut(place);
        slot.expire_at(expires);
        if let Some((short, len)) = state.as_short() {
            (slot.state, slot.len) = (short, len);
            if let Some(beside) = beside {
                self.free_long(beside);
            }
            return;
        }
        let beside = beside.unwrap_or_else(|| self.free_long.pop().map_or_else(|| self.grow_long(), |at| at as usize));
        let mut long = state.into_long();
        if long.capacity() > 2 * long.len() {
            long.shrink_to_fit();
        }
        self.long_bytes += long.capacity();
        self.long_bytes -= self.long_sizes[beside] as usize;
        self.long_sizes[beside] = long.capacity() as u32;
        self.long[beside] = long;
        let slot = self.slot_mut(place);
        slot.len = LONG;
        slot.state[..4].copy_from_slice(&(beside as u32).to_le_bytes());
        while self.long_bytes / size_of::<Slot>() + self.index.len() > self.max && self.index.len() > 1 {
            self.evict();
        }
    }

    fn free_long(&mut self, beside: usize) {
        self.long[beside] = Vec::new();
        self.long_bytes -= std::mem::take(&mut self.long_sizes[beside]) as usize;
        self.free_long.push(beside as u32);
    }

    fn grow(&mut self) -> u32 {
        if self.used == self.chunks.len() * CHUNK {
            self.chunks.push(Box::new([Slot::default(); CHUNK]));
        }
        self.used += 1;
        (self.used - 1) as u32
    }

    fn grow_long(&mut self) -> usize {
        self.long.push(Vec::new());
        self.long_sizes.push(0);
        self.long.len() - 1
    }

    /// Forgets the counter among the next few that would expire first.
    fn evict(&mut self) {
        let places = (0..CANDIDATES.min(self.used)).map(|_| self.advance()).collect::<Vec<_>>();
        let first = places.into_iter().filter(|place| !self.slot(*place).is_free());
        if let Some(place) = first.min_by_key(|place| self.slot(*place).expires) {
            self.remove(place);
            self.evicted += 1;
        }
    }

    fn remove(&mut self, place: u32) {
        let slot = *self.slot(place);
        if let Ok(entry) = self.index.find_entry(Hash::low(slot.hash), |at| *at == place) {
            entry.remove();
        }
        if let Some(beside) = slot.beside() {
            self.free_long(beside);
        }
        *self.slot_mut(place) = Slot::default();
        self.free.push(place);
    }

    fn advance(&mut self) -> u32 {
        self.hand = if self.hand + 1 >= self.used { 0 } else { self.hand + 1 };
        self.hand as u32
    }

    fn slot(&self, place: u32) -> &Slot {
        slot(&self.chunks, place)
    }

    fn slot_mut(&mut self, place: u32) -> &mut Slot {
        &mut self.chunks[place as usize / CHUNK][place as usize % CHUNK]
    }
}

fn slot(chunks: &[Box<[Slot; CHUNK]>], place: u32) -> &Slot {
    &chunks[place as usize / CHUNK][place as usize % CHUNK]
}
