//! A map from descriptors to small numbers that is read without a lock while it changes: a change copies the part that it
//! touches, and a reader has the map as it was when it began.
//!
//! A decision finds what it reads in a hash table whose buckets are lines of the processor's cache. With a million
//! descriptors it waits for one line of memory, seldom two, and what it reads on the way there is in a cache already.
//! The buckets of many parts lie side by side in large pages, but for those that changed lately. Records are elsewhere: nobody
//! reads them to decide.
//!
//! Descriptors are known by 72 bits of a keyed hash. Of a million in the map a stranger meets one with a probability of
//! 2 · 10⁻¹⁶, and nobody who does not know the key can look for it.

use std::{ops::Deref, sync::Arc};

use branches::prefetch_read_data;

use crate::allocator;

/// A change copies one of so many parts.
const PARTS: usize = 256;
/// Entries that a line of the processor's cache has room for.
const WIDTH: usize = 4;

/// What a decision reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Entity {
    /// 0: nobody's.
    tag: u64,
    /// What the descriptor has.
    pub(super) value: u32,
    /// Seconds since the epoch; 0: for ever.
    pub(super) until: u32,
}

/// What need not be known to decide.
pub(super) type Record = Box<[u8]>;

/// The map. A clone is a moment's view of it, and costs a reference.
#[derive(Clone)]
pub(super) struct Table {
    parts: Arc<[Part; PARTS]>,
    len: usize,
}

impl Default for Table {
    fn default() -> Self {
        let empty = Part::default();
        Self { parts: Arc::new(std::array::from_fn(|_| empty.clone())), len: 0 }
    }
}

/// What is known of a descriptor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EntityHash {
    tag: u64,
    part: u8,
}

impl From<u128> for EntityHash {
    fn from(hash: u128) -> Self {
        Self { tag: (hash as u64).max(1), part: (hash >> 120) as u8 }
    }
}

impl Table {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn get(&self, of: EntityHash) -> Option<Entity> {
        let part = self.part(of);
        Some(part.entity(part.find(of.tag)?))
    }

    /// The processor begins to fetch what [`Table::get`] reads.
    pub(super) fn prefetch(&self, of: EntityHash) {
        let part = self.part(of);
        if let Some(bucket) = part.buckets.get(part.home(of.tag)) {
            prefetch(bucket);
        }
    }

    /// What is there, with its record.
    pub(super) fn entry(&self, of: EntityHash) -> Option<(Entity, &[u8])> {
        let part = self.part(of);
        part.entry(part.find(of.tag)?)
    }

    /// The one that was there before, if there was.
    pub(super) fn insert(&mut self, of: EntityHash, value: u32, until: u32, record: &[u8]) -> Option<(Entity, Record)> {
        let before = self.remove(of);
        self.part_mut(of).add(Entity { tag: of.tag, value, until }, record);
        self.len += 1;
        before
    }

    pub(super) fn remove(&mut self, of: EntityHash) -> Option<(Entity, Record)> {
        let at = self.part(of).find(of.tag)?;
        self.len -= 1;
        self.part_mut(of).remove(at)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Entity, &[u8])> {
        self.parts.iter().flat_map(|part| part.all().filter_map(|at| part.entry(at)))
    }

    /// Puts the buckets of all parts side by side, in large pages, if many have been copied since; whether they have been. In
    /// small pages a look-up waits for the page's place before it waits for the bucket.
    pub(super) fn gather(&mut self) -> bool {
        let (mut all, mut apart) = (0, 0);
        for Part { buckets, .. } in self.parts.iter() {
            all += buckets.len();
            apart += if buckets.are_gathered() { 0 } else { buckets.len() };
        }
        if size_of::<Bucket>() * all < allocator::LARGE_PAGE || 4 * apart < all {
            return false;
        }
        let mut memory = Vec::with_capacity(all);
        allocator::use_large_pages(memory.spare_capacity_mut());
        self.parts.iter().for_each(|part| memory.extend_from_slice(&part.buckets));
        let (memory, mut start) = (Arc::new(memory), 0);
        for part in Arc::make_mut(&mut self.parts) {
            let len = part.buckets.len;
            part.buckets = Buckets { memory: Arc::clone(&memory), start, len };
            start += len;
        }
        true
    }

    fn part(&self, of: EntityHash) -> &Part {
        &self.parts[usize::from(of.part)]
    }

    fn part_mut(&mut self, of: EntityHash) -> &mut Part {
        &mut Arc::make_mut(&mut self.parts)[usize::from(of.part)]
    }
}

/// A line of the processor's cache.
const LINE: usize = 64;

/// The processor begins to fetch all of it.
pub(super) fn prefetch<T>(value: &T) {
    let start = std::ptr::from_ref(value).cast::<u8>();
    (0..size_of::<T>()).step_by(LINE).for_each(|line| prefetch_read_data::<_, 0>(start.wrapping_add(line)));
}

/// As large as a line.
#[derive(Clone, Copy, Default)]
#[repr(align(64))]
struct Bucket([Entity; WIDTH]);

impl Bucket {
    /// The first place that has this tag. All are compared, without a branch for each: which place it is cannot be foretold,
    /// and a processor that guessed wrong would have waited for the memory in vain.
    fn place_of(&self, tag: u64) -> Option<usize> {
        let first = (0..WIDTH).rev().fold(WIDTH, |first, place| if self.0[place].tag == tag { place } else { first });
        (first < WIDTH).then_some(first)
    }

    fn is_full(&self) -> bool {
        self.place_of(0).is_none()
    }
}

/// Those of one part, in memory of its own or beside those of others.
#[derive(Clone, Default)]
struct Buckets {
    memory: Arc<Vec<Bucket>>,
    start: u32,
    len: u32,
}

impl Buckets {
    fn new(memory: Vec<Bucket>) -> Self {
        let len = memory.len() as u32;
        Self { memory: Arc::new(memory), start: 0, len }
    }

    fn are_gathered(&self) -> bool {
        self.len() < self.memory.len()
    }

    /// Copied, unless nobody else has this memory.
    fn make_mut(&mut self) -> &mut [Bucket] {
        if self.are_gathered() {
            *self = Self::new(self.to_vec());
        }
        Arc::make_mut(&mut self.memory).as_mut_slice()
    }
}

impl Deref for Buckets {
    type Target = [Bucket];

    fn deref(&self) -> &[Bucket] {
        &self.memory[self.start as usize..][..self.len as usize]
    }
}

/// A hash table with linear probing: an entry whose bucket is full is in the next that is not. The map holds it itself: a
/// reference to it would be one more line to wait for.
#[derive(Clone, Default)]
struct Part {
    buckets: Buckets,
    rest: Arc<Rest>,
}

/// What decisions do not read of a part.
#[derive(Clone, Default)]
struct Rest {
    used: usize,
    /// Where the record of each entry is.
    record_places: Box<[[u32; WIDTH]]>,
    records: Records,
}

/// A bucket, and a place in it.
type At = (usize, usize);

impl Part {
    fn entity(&self, (bucket, place): At) -> Entity {
        self.buckets[bucket].0[place]
    }

    fn entry(&self, at: At) -> Option<(Entity, &[u8])> {
        Some((self.entity(at), self.rest.records.get(self.rest.record_places[at.0][at.1])?))
    }

    /// Where all are that are used.
    fn all(&self) -> impl Iterator<Item = At> {
        let all = (0..self.buckets.len()).flat_map(|bucket| (0..WIDTH).map(move |place| (bucket, place)));
        all.filter(|at| self.entity(*at).tag != 0)
    }

    fn find(&self, tag: u64) -> Option<At> {
        self.search(tag).filter(|at| self.entity(*at).tag == tag)
    }

    /// Where it is, or would be.
    fn search(&self, tag: u64) -> Option<At> {
        let first = self.home(tag);
        let buckets = &*self.buckets;
        (first..buckets.len()).chain(0..first).find_map(|bucket| {
            let place = buckets[bucket].place_of(tag).or_else(|| buckets[bucket].place_of(0))?;
            Some((bucket, place))
        })
    }

    /// The bucket that it is looked for in first.
    fn home(&self, tag: u64) -> usize {
        ((u128::from(tag) * self.buckets.len() as u128) >> 64) as usize
    }

    /// One that is not there.
    fn add(&mut self, entity: Entity, record: &[u8]) {
        // A fifth stays free: so nearly all are where they are looked for first.
        if 5 * (self.rest.used + 1) > 4 * WIDTH * self.buckets.len() {
            self.rebuild(self.buckets.len() * 9 / 8 + 1);
        }
        let place = Arc::make_mut(&mut self.rest).records.add(record);
        self.put(entity, place);
    }

    fn put(&mut self, entity: Entity, place: u32) {
        if let Some(at) = self.search(entity.tag) {
            self.buckets.make_mut()[at.0].0[at.1] = entity;
            let rest = Arc::make_mut(&mut self.rest);
            rest.record_places[at.0][at.1] = place;
            rest.used += 1;
        }
    }

    /// One that is there. When nobody has most of the records any more, the rest and the buckets are packed anew.
    fn remove(&mut self, at: At) -> Option<(Entity, Record)> {
        let (entity, record) = self.entry(at)?;
        let record = Record::from(record);
        self.free(at);
        let rest = Arc::make_mut(&mut self.rest);
        rest.records.forget(&record);
        rest.used -= 1;
        let used = rest.used;
        if rest.records.are_mostly_forgotten() {
            self.rebuild(used / 3 + usize::from(used > 0));
        }
        Some((entity, record))
    }

    /// Empties a place. If the bucket was full, an entry that is further on for that reason moves up, and so does one that is
    /// further on for the place that this one leaves.
    fn free(&mut self, mut free: At) {
        let all = self.buckets.len();
        let (mut bucket, mut was_full) = (free.0, self.buckets[free.0].is_full());
        while was_full {
            bucket = (bucket + 1) % all;
            was_full = self.buckets[bucket].is_full();
            let passed = |entity: &Entity| {
                let way = |from: usize| (bucket + all - from) % all;
                entity.tag != 0 && way(self.home(entity.tag)) >= way(free.0)
            };
            if let Some(place) = self.buckets[bucket].0.iter().position(passed) {
                self.copy((bucket, place), free);
                free = (bucket, place);
            }
        }
        self.buckets.make_mut()[free.0].0[free.1] = Entity::default();
    }

    fn copy(&mut self, from: At, to: At) {
        let (buckets, places) = (self.buckets.make_mut(), &mut Arc::make_mut(&mut self.rest).record_places);
        buckets[to.0].0[to.1] = buckets[from.0].0[from.1];
        places[to.0][to.1] = places[from.0][from.1];
    }

    /// Into so many buckets, without the records that are forgotten.
    fn rebuild(&mut self, buckets: usize) {
        let rest = Rest { record_places: vec![[0; WIDTH]; buckets].into(), ..Rest::default() };
        let mut new = Self { buckets: Buckets::new(vec![Bucket::default(); buckets]), rest: rest.into() };
        for (entity, record) in self.all().filter_map(|at| self.entry(at)) {
            let place = Arc::make_mut(&mut new.rest).records.add(record);
            new.put(entity, place);
        }
        *self = new;
    }
}

/// Records, each behind its length, in pieces: a change copies the last.
#[derive(Clone, Default)]
struct Records {
    pieces: Vec<Arc<Vec<u8>>>,
    /// All bytes, and those of records that nobody has any more.
    bytes: usize,
    forgotten: usize,
}

impl Records {
    /// A record begins in the first so many bytes of a piece. A power of two.
    const PIECE: usize = 4096;
    const LENGTH: usize = size_of::<u32>();

    fn get(&self, place: u32) -> Option<&[u8]> {
        let (piece, start) = (place as usize / Self::PIECE, place as usize % Self::PIECE);
        let (length, rest) = self.pieces.get(piece)?.get(start..)?.split_first_chunk()?;
        rest.get(..u32::from_le_bytes(*length) as usize)
    }

    fn add(&mut self, record: &[u8]) -> u32 {
        let length = Self::LENGTH + record.len();
        if self.pieces.last().is_none_or(|piece| piece.len() + length > Self::PIECE) {
            self.pieces.push(Arc::default());
        }
        let number = self.pieces.len() - 1;
        let piece = Arc::make_mut(&mut self.pieces[number]);
        if piece.capacity() < piece.len() + length {
            // Twice as much, and no more than a piece.
            piece.reserve_exact(piece.len().min(Self::PIECE - piece.len()).max(length));
        }
        let place = number * Self::PIECE + piece.len();
        piece.extend_from_slice(&(record.len() as u32).to_le_bytes());
        piece.extend_from_slice(record);
        self.bytes += length;
        place as u32
    }

    fn forget(&mut self, record: &[u8]) {
        self.forgotten += Self::LENGTH + record.len();
    }

    fn are_mostly_forgotten(&self) -> bool {
        2 * self.forgotten > self.bytes
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    /// Few parts, so that they are shared.
    fn fingerprint(number: u8) -> EntityHash {
        // Half of the tags lie close together, and half as a hash would have them.
        let tag = u128::from(number) << (number % 2 * 56);
        (u128::from(number % 5) << 120 | tag).into()
    }

    /// Some fill a piece, and some are more than one.
    fn record(number: u8) -> Vec<u8> {
        vec![number; 1 + 20 * usize::from(number)]
    }

    #[test]
    fn what_is_replaced_or_gone_takes_no_room() {
        let mut table = Table::default();
        let many = (1..=1_000_u64).map(|number| u128::from(number * (u64::MAX / 1_000)).into());
        let many: Vec<EntityHash> = many.collect();
        many.iter().for_each(|it| drop(table.insert(*it, 0, 0, &record(1))));
        let room = |table: &Table| (table.parts[0].buckets.len(), table.parts[0].rest.records.pieces.len());
        let (buckets, pieces) = room(&table);
        assert!((313..=400).contains(&buckets) && pieces == 7, "{buckets} {pieces}");
        (0..1_000).for_each(|_| drop(table.insert(many[0], 0, 0, &record(100))));
        let (_, pieces) = room(&table);
        assert!(pieces <= 30, "{pieces}");
        many[20..40].iter().for_each(|it| drop(table.remove(*it)));
        assert!(table.parts[0].rest.records.forgotten > 0, "the few that are gone are no reason to pack the rest anew");
        many[40..].iter().for_each(|it| drop(table.remove(*it)));
        let (buckets, pieces) = room(&table);
        assert!(buckets <= 20 && pieces == 1, "{buckets} {pieces}");
        many[..20].iter().for_each(|it| drop(table.remove(*it)));
        assert_eq!((room(&table), table.len()), ((0, 0), 0));
    }

    /// What is read is in one piece again when much of it is not any more.
    #[test]
    fn parts_that_changed_come_together_again() {
        let fingerprint = |number: u64| {
            EntityHash::from(u128::from(number) << 120 | u128::from(number.wrapping_mul(0x9E37_79B9_7F4A_7C15)))
        };
        let mut table = Table::default();
        let put = |table: &mut Table, numbers: std::ops::Range<u64>| {
            numbers.for_each(|number| drop(table.insert(fingerprint(number), number as u32, 0, &[])));
        };
        put(&mut table, 1..1_000);
        assert!(!table.gather(), "less than a page is where it is");
        put(&mut table, 1_000..200_000);
        assert!(table.gather() && !table.gather());
        let memory = Arc::clone(&table.parts[0].buckets.memory);
        let gathered =
            |table: &Table| table.parts.iter().filter(|part| Arc::ptr_eq(&part.buckets.memory, &memory)).count();
        assert_eq!(gathered(&table), PARTS);
        let view = table.clone();
        put(&mut table, 60..120);
        assert_eq!((gathered(&view), gathered(&table)), (PARTS, PARTS - 60));
        assert!(!table.gather(), "most are still together");
        put(&mut table, 120..130);
        assert!(table.gather());
        assert_eq!((gathered(&view), gathered(&table)), (PARTS, 0));
        let values = |table: &Table| {
            (1..200_000).all(|number| table.get(fingerprint(number)).is_some_and(|it| it.value == number as u32))
        };
        assert!(values(&view) && values(&table));
    }

    proptest! {
        #[test]
        fn it_is_a_map_and_a_view_of_it_does_not_change(
            steps in prop::collection::vec((any::<u8>(), prop::option::of(any::<u32>())), 0..200),
        ) {
            let (mut table, mut model) = (Table::default(), HashMap::new());
            let (mut view, mut model_then) = (table.clone(), model.clone());
            for (number, value) in steps {
                let before = match value {
                    Some(value) => {
                        let before = table.insert(fingerprint(number), value, 0, &record(number));
                        prop_assert_eq!(before.map(|(entity, _)| entity.value), model.insert(number, value));
                        continue;
                    }
                    None => table.remove(fingerprint(number)),
                };
                prop_assert_eq!(before.map(|(entity, _)| entity.value), model.remove(&number));
                let seen: HashMap<_, _> = view.iter().map(|(entity, record)| (record[0], entity.value)).collect();
                prop_assert_eq!(&seen, &model_then);
                (view, model_then) = (table.clone(), model.clone());
            }
            prop_assert_eq!(table.len(), model.len());
            for number in 0..=u8::MAX {
                let entry = table.entry(fingerprint(number));
                prop_assert_eq!(entry.map(|(entity, _)| entity.value), model.get(&number).copied());
                prop_assert!(entry.is_none_or(|(_, bytes)| bytes == record(number)));
            }
        }
    }
}
