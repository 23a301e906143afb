//! One shard: a table of 4-byte references into chunks of 36-byte counters.
//!
//! A hash table of whole counters would double at every growth and be half empty afterwards: 69 MB for a million.
//! References are small enough to be half empty, and chunks are added one by one: 45 MB.

use hashbrown::HashTable;

use super::Usage;
use crate::algorithm::{Algorithm, Ask, Micros, State};

/// Counters in a chunk: as many as fit into 8 KiB, which allocators hand out without waste.
const CHUNK: usize = 8192 / size_of::<Slot>();
/// Places that the hand looks at for each new counter. More than one, or it would never gain on the insertions.
const STEPS: usize = 4;
/// Live counters that compete for being forgotten when the shard is full.
const CANDIDATES: usize = 16;

/// A counter, in words of 4 bytes: 8-byte fields would cost 4 bytes of padding each.
#[derive(Clone, Copy, Default)]
struct Slot {
    hash: [u32; 4],
    state: [u32; 4],
    /// Seconds since the epoch, rounded up; 0 is a free place.
    expires: u32,
}

impl Slot {
    fn hash(&self) -> u128 {
        let [a, b, c, d] = self.hash.map(u128::from);
        a | b << 32 | c << 64 | d << 96
    }

    fn state(&self) -> State {
        let [a, b, c, d] = self.state.map(u64::from);
        State([a | b << 32, c | d << 32])
    }

    fn write(&mut self, hash: u128, state: State, expires: Micros) {
        let State([first, second]) = state;
        self.hash = [hash as u32, (hash >> 32) as u32, (hash >> 64) as u32, (hash >> 96) as u32];
        self.state = [first as u32, (first >> 32) as u32, second as u32, (second >> 32) as u32];
        self.expires = u32::try_from(expires.ceil_secs()).unwrap_or(u32::MAX).max(1);
    }

    fn is_free(&self) -> bool {
        self.expires == 0
    }

    fn is_expired(&self, now: Micros) -> bool {
        u64::from(self.expires) <= now.floor_secs()
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
            max,
            evicted: 0,
            expired: 0,
        }
    }

    /// One step of the algorithm; a state that says nothing is not kept.
    pub(super) fn apply(&mut self, hash: u128, algorithm: &Algorithm, ask: Ask) -> (State, bool) {
        if let Some(place) = self.find(hash) {
            let slot = self.slot_mut(place);
            let before = slot.state();
            let mut state = before;
            let allowed = algorithm.step(&mut state, ask);
            if state != before {
                slot.write(hash, state, algorithm.expires(state));
            }
            return (state, allowed);
        }
        let mut state = State::default();
        let allowed = algorithm.step(&mut state, ask);
        let new = state != State::default() && ask.action == crate::algorithm::Action::Take;
        if new {
            self.insert(hash, state, algorithm.expires(state), ask.now);
        }
        (state, allowed)
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
        Usage { entities: self.index.len() as u64, evicted: self.evicted, expired: self.expired }
    }

    fn find(&self, hash: u128) -> Option<u32> {
        self.index.find(hash as u64, |place| self.slot(*place).hash() == hash).copied()
    }

    fn insert(&mut self, hash: u128, state: State, expires: Micros, now: Micros) {
        self.reclaim(STEPS, now);
        if self.free.is_empty() && self.used >= self.max {
            self.evict();
        }
        let place = self.free.pop().unwrap_or_else(|| self.grow());
        self.slot_mut(place).write(hash, state, expires);
        let chunks = &self.chunks;
        self.index.insert_unique(hash as u64, place, |place| slot(chunks, *place).hash() as u64);
    }

    fn grow(&mut self) -> u32 {
        if self.used == self.chunks.len() * CHUNK {
            self.chunks.push(Box::new([Slot::default(); CHUNK]));
        }
        self.used += 1;
        (self.used - 1) as u32
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
        let hash = self.slot(place).hash();
        if let Ok(entry) = self.index.find_entry(hash as u64, |at| *at == place) {
            entry.remove();
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
