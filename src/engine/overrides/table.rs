//! [`Table`]: a hash table from descriptors to small numbers, in buckets of one cache line, split into 256 parts with
//! copy-on-write per part.
//!
//! The table is read without locks while it changes. A clone shares all parts, and a change copies the part that it
//! modifies, so a reader sees the table as it was when it was cloned.
//!
//! With a million descriptors, a lookup waits for one cache line from memory, rarely for two. All other data that it
//! reads is already in a cache. The buckets of most parts are adjacent in large pages; only parts that changed recently
//! have memory of their own. Records are stored separately, because decisions do not read them.
//!
//! A descriptor is identified by 72 bits of a keyed hash. With a million descriptors in the table, another descriptor
//! collides with one of them with a probability of 2 · 10⁻¹⁶. Without the key, collisions cannot be searched for.

use std::{ops::Deref, sync::Arc};

use branches::prefetch_read_data;

use crate::allocator;

/// Number of parts. A change copies one part.
const PARTS: usize = 256;
/// Number of entries in a bucket, which fill one cache line.
const BUCKET_ENTRIES: usize = 4;

/// An entry of the table, as decisions read it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Entity {
    /// The lower 64 bits of the descriptor's hash; 0 for an unused entry.
    tag: u64,
    /// The value of the descriptor.
    pub(super) value: u32,
    /// Time of expiry in seconds since the epoch; 0 if the entry does not expire.
    pub(super) until: u32,
}

/// Data of an entry that decisions do not need.
pub(super) type Record = Box<[u8]>;

/// A hash table with copy-on-write per part. A clone is an immutable view and costs one reference count.
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

/// The hash of a descriptor, which selects its part and identifies it there.
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

    pub(super) fn get(&self, hash: EntityHash) -> Option<Entity> {
        let part = self.part(hash);
        Some(part.entity(part.find(hash.tag)?))
    }

    /// Starts to fetch the bucket that [`Table::get`] reads into the processor's cache.
    pub(super) fn prefetch(&self, hash: EntityHash) {
        let part = self.part(hash);
        if let Some(bucket) = part.buckets.get(part.home_bucket(hash.tag)) {
            prefetch(bucket);
        }
    }

    /// Returns an entry with its record.
    pub(super) fn entry(&self, hash: EntityHash) -> Option<(Entity, &[u8])> {
        let part = self.part(hash);
        part.entry(part.find(hash.tag)?)
    }

    /// Inserts an entry, and returns the entry that it replaces.
    pub(super) fn insert(
        &mut self,
        hash: EntityHash,
        value: u32,
        until: u32,
        record: &[u8],
    ) -> Option<(Entity, Record)> {
        let before = self.remove(hash);
        self.part_mut(hash).insert(Entity { tag: hash.tag, value, until }, record);
        self.len += 1;
        before
    }

    pub(super) fn remove(&mut self, hash: EntityHash) -> Option<(Entity, Record)> {
        let position = self.part(hash).find(hash.tag)?;
        self.len -= 1;
        self.part_mut(hash).remove(position)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Entity, &[u8])> {
        self.parts.iter().flat_map(|part| part.positions().filter_map(|position| part.entry(position)))
    }

    /// Copies the buckets into adjacent memory in large pages, if many parts have memory of their own. Returns whether
    /// they were copied.
    ///
    /// With small pages, a lookup waits for the page's address translation before it waits for the bucket.
    pub(super) fn gather(&mut self) -> bool {
        let (mut all, mut separate) = (0, 0);
        for Part { buckets, .. } in self.parts.iter() {
            all += buckets.len();
            separate += if buckets.are_gathered() { 0 } else { buckets.len() };
        }
        if size_of::<Bucket>() * all < allocator::LARGE_PAGE || 4 * separate < all {
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

    fn part(&self, hash: EntityHash) -> &Part {
        &self.parts[usize::from(hash.part)]
    }

    fn part_mut(&mut self, hash: EntityHash) -> &mut Part {
        &mut Arc::make_mut(&mut self.parts)[usize::from(hash.part)]
    }
}

/// Size of a cache line in bytes.
const CACHE_LINE: usize = 64;

/// Starts to fetch all cache lines of a value into the processor's cache.
pub(super) fn prefetch<T>(value: &T) {
    let start = std::ptr::from_ref(value).cast::<u8>();
    (0..size_of::<T>()).step_by(CACHE_LINE).for_each(|line| prefetch_read_data::<_, 0>(start.wrapping_add(line)));
}

/// A bucket: entries that fill one cache line.
#[derive(Clone, Copy, Default)]
#[repr(align(64))]
struct Bucket([Entity; BUCKET_ENTRIES]);

impl Bucket {
    /// Returns the index of the first entry with this tag.
    ///
    /// All entries are compared without branches: the index is unpredictable, and a mispredicted branch would waste the
    /// time spent waiting for memory.
    fn index_of(&self, tag: u64) -> Option<usize> {
        let first = (0..BUCKET_ENTRIES)
            .rev()
            .fold(BUCKET_ENTRIES, |first, index| if self.0[index].tag == tag { index } else { first });
        (first < BUCKET_ENTRIES).then_some(first)
    }

    fn is_full(&self) -> bool {
        self.index_of(0).is_none()
    }
}

/// The buckets of one part, in memory of their own or in memory shared with other parts.
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

    /// Returns the buckets for modification, and copies them first if their memory is shared.
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

/// One part: a hash table with linear probing, where an entry of a full bucket is in the next bucket that is not full.
///
/// The table contains its parts inline, as a reference to a part would be one more cache line to wait for.
#[derive(Clone, Default)]
struct Part {
    buckets: Buckets,
    cold: Arc<ColdData>,
}

/// The data of a part that decisions do not read.
#[derive(Clone, Default)]
struct ColdData {
    used: usize,
    /// The location of each entry's record in `records`.
    record_locations: Box<[[u32; BUCKET_ENTRIES]]>,
    records: Records,
}

/// The index of a bucket, and the index of an entry in the bucket.
type Position = (usize, usize);

impl Part {
    fn entity(&self, (bucket, index): Position) -> Entity {
        self.buckets[bucket].0[index]
    }

    fn entry(&self, position: Position) -> Option<(Entity, &[u8])> {
        Some((self.entity(position), self.cold.records.get(self.cold.record_locations[position.0][position.1])?))
    }

    /// Returns the positions of the used entries.
    fn positions(&self) -> impl Iterator<Item = Position> {
        let positions =
            (0..self.buckets.len()).flat_map(|bucket| (0..BUCKET_ENTRIES).map(move |index| (bucket, index)));
        positions.filter(|position| self.entity(*position).tag != 0)
    }

    fn find(&self, tag: u64) -> Option<Position> {
        self.search(tag).filter(|position| self.entity(*position).tag == tag)
    }

    /// Returns the position of the entry with this tag, or the position to insert it.
    fn search(&self, tag: u64) -> Option<Position> {
        let first = self.home_bucket(tag);
        let buckets = &*self.buckets;
        (first..buckets.len()).chain(0..first).find_map(|bucket| {
            let index = buckets[bucket].index_of(tag).or_else(|| buckets[bucket].index_of(0))?;
            Some((bucket, index))
        })
    }

    /// Returns the bucket at which the search for a tag starts.
    fn home_bucket(&self, tag: u64) -> usize {
        ((u128::from(tag) * self.buckets.len() as u128) >> 64) as usize
    }

    /// Inserts an entry that is not in the table.
    fn insert(&mut self, entity: Entity, record: &[u8]) {
        // A fifth of the table stays free, so that nearly all entries are in their home buckets.
        if 5 * (self.cold.used + 1) > 4 * BUCKET_ENTRIES * self.buckets.len() {
            self.rebuild(self.buckets.len() * 9 / 8 + 1);
        }
        let location = Arc::make_mut(&mut self.cold).records.add(record);
        self.insert_entity(entity, location);
    }

    fn insert_entity(&mut self, entity: Entity, location: u32) {
        if let Some(position) = self.search(entity.tag) {
            self.buckets.make_mut()[position.0].0[position.1] = entity;
            let cold = Arc::make_mut(&mut self.cold);
            cold.record_locations[position.0][position.1] = location;
            cold.used += 1;
        }
    }

    /// Removes an entry that is in the table. Rebuilds the part if more than half of the record bytes are unused.
    fn remove(&mut self, position: Position) -> Option<(Entity, Record)> {
        let (entity, record) = self.entry(position)?;
        let record = Record::from(record);
        self.clear(position);
        let cold = Arc::make_mut(&mut self.cold);
        cold.records.release(&record);
        cold.used -= 1;
        let used = cold.used;
        if cold.records.is_mostly_released() {
            self.rebuild(used / 3 + usize::from(used > 0));
        }
        Some((entity, record))
    }

    /// Clears a position. If its bucket was full, an entry from a later bucket that probed past it moves to the
    /// position. The same happens at the position that the moved entry leaves.
    fn clear(&mut self, mut hole: Position) {
        let count = self.buckets.len();
        let (mut bucket, mut was_full) = (hole.0, self.buckets[hole.0].is_full());
        while was_full {
            bucket = (bucket + 1) % count;
            was_full = self.buckets[bucket].is_full();
            let can_move = |entity: &Entity| {
                let distance = |from: usize| (bucket + count - from) % count;
                entity.tag != 0 && distance(self.home_bucket(entity.tag)) >= distance(hole.0)
            };
            if let Some(index) = self.buckets[bucket].0.iter().position(can_move) {
                self.copy((bucket, index), hole);
                hole = (bucket, index);
            }
        }
        self.buckets.make_mut()[hole.0].0[hole.1] = Entity::default();
    }

    fn copy(&mut self, from: Position, to: Position) {
        let (buckets, locations) = (self.buckets.make_mut(), &mut Arc::make_mut(&mut self.cold).record_locations);
        buckets[to.0].0[to.1] = buckets[from.0].0[from.1];
        locations[to.0][to.1] = locations[from.0][from.1];
    }

    /// Rebuilds the part with this number of buckets, without the unused records.
    fn rebuild(&mut self, buckets: usize) {
        let cold = ColdData { record_locations: vec![[0; BUCKET_ENTRIES]; buckets].into(), ..ColdData::default() };
        let mut new = Self { buckets: Buckets::new(vec![Bucket::default(); buckets]), cold: cold.into() };
        for (entity, record) in self.positions().filter_map(|position| self.entry(position)) {
            let location = Arc::make_mut(&mut new.cold).records.add(record);
            new.insert_entity(entity, location);
        }
        *self = new;
    }
}

/// Records in chunks, each with its length as a prefix. An insertion copies only the last chunk.
#[derive(Clone, Default)]
struct Records {
    chunks: Vec<Arc<Vec<u8>>>,
    /// Total bytes of the records.
    bytes: usize,
    /// Bytes of records that are not in use any more.
    released_bytes: usize,
}

impl Records {
    /// Every record starts within this many bytes of a chunk; a longer record extends beyond. A power of two.
    const CHUNK_BYTES: usize = 4096;
    const LENGTH_BYTES: usize = size_of::<u32>();

    fn get(&self, location: u32) -> Option<&[u8]> {
        let (chunk, start) = (location as usize / Self::CHUNK_BYTES, location as usize % Self::CHUNK_BYTES);
        let (length, remaining) = self.chunks.get(chunk)?.get(start..)?.split_first_chunk()?;
        remaining.get(..u32::from_le_bytes(*length) as usize)
    }

    fn add(&mut self, record: &[u8]) -> u32 {
        let length = Self::LENGTH_BYTES + record.len();
        if self.chunks.last().is_none_or(|chunk| chunk.len() + length > Self::CHUNK_BYTES) {
            self.chunks.push(Arc::default());
        }
        let index = self.chunks.len() - 1;
        let chunk = Arc::make_mut(&mut self.chunks[index]);
        if chunk.capacity() < chunk.len() + length {
            // The capacity doubles, up to the size of a chunk.
            chunk.reserve_exact(chunk.len().min(Self::CHUNK_BYTES - chunk.len()).max(length));
        }
        let location = index * Self::CHUNK_BYTES + chunk.len();
        chunk.extend_from_slice(&(record.len() as u32).to_le_bytes());
        chunk.extend_from_slice(record);
        self.bytes += length;
        location as u32
    }

    fn release(&mut self, record: &[u8]) {
        self.released_bytes += Self::LENGTH_BYTES + record.len();
    }

    fn is_mostly_released(&self) -> bool {
        2 * self.released_bytes > self.bytes
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    /// Returns a hash in one of 5 parts, so that entries share parts.
    fn hash(number: u8) -> EntityHash {
        // Half of the tags are close together, and half are distributed like hashes.
        let tag = u128::from(number) << (number % 2 * 56);
        (u128::from(number % 5) << 120 | tag).into()
    }

    /// Returns a record of `number`. Some are shorter than a chunk and some are longer.
    fn record(number: u8) -> Vec<u8> {
        vec![number; 1 + 20 * usize::from(number)]
    }

    #[test]
    fn replaced_and_removed_entries_free_their_memory() {
        let mut table = Table::default();
        let hashes = (1..=1_000_u64).map(|number| u128::from(number * (u64::MAX / 1_000)).into());
        let hashes: Vec<EntityHash> = hashes.collect();
        hashes.iter().for_each(|hash| drop(table.insert(*hash, 0, 0, &record(1))));
        let memory = |table: &Table| (table.parts[0].buckets.len(), table.parts[0].cold.records.chunks.len());
        let (buckets, chunks) = memory(&table);
        assert!((313..=400).contains(&buckets) && chunks == 7, "{buckets} {chunks}");
        (0..1_000).for_each(|_| drop(table.insert(hashes[0], 0, 0, &record(100))));
        let (_, chunks) = memory(&table);
        assert!(chunks <= 30, "{chunks}");
        hashes[20..40].iter().for_each(|hash| drop(table.remove(*hash)));
        assert!(table.parts[0].cold.records.released_bytes > 0, "removing few entries must not rebuild the part");
        hashes[40..].iter().for_each(|hash| drop(table.remove(*hash)));
        let (buckets, chunks) = memory(&table);
        assert!(buckets <= 20 && chunks == 1, "{buckets} {chunks}");
        hashes[..20].iter().for_each(|hash| drop(table.remove(*hash)));
        assert_eq!((memory(&table), table.len()), ((0, 0), 0));
    }

    #[test]
    fn changed_parts_are_gathered_again() {
        let hash = |number: u64| {
            EntityHash::from(u128::from(number) << 120 | u128::from(number.wrapping_mul(0x9E37_79B9_7F4A_7C15)))
        };
        let mut table = Table::default();
        let put = |table: &mut Table, numbers: std::ops::Range<u64>| {
            numbers.for_each(|number| drop(table.insert(hash(number), number as u32, 0, &[])));
        };
        put(&mut table, 1..1_000);
        assert!(!table.gather(), "less than one large page must not be gathered");
        put(&mut table, 1_000..200_000);
        assert!(table.gather() && !table.gather());
        let memory = Arc::clone(&table.parts[0].buckets.memory);
        let gathered =
            |table: &Table| table.parts.iter().filter(|part| Arc::ptr_eq(&part.buckets.memory, &memory)).count();
        assert_eq!(gathered(&table), PARTS);
        let view = table.clone();
        put(&mut table, 60..120);
        assert_eq!((gathered(&view), gathered(&table)), (PARTS, PARTS - 60));
        assert!(!table.gather(), "most parts are still gathered");
        put(&mut table, 120..130);
        assert!(table.gather());
        assert_eq!((gathered(&view), gathered(&table)), (PARTS, 0));
        let values = |table: &Table| {
            (1..200_000).all(|number| table.get(hash(number)).is_some_and(|entity| entity.value == number as u32))
        };
        assert!(values(&view) && values(&table));
    }

    proptest! {
        #[test]
        fn the_table_is_a_map_and_a_clone_does_not_change(
            steps in prop::collection::vec((any::<u8>(), prop::option::of(any::<u32>())), 0..200),
        ) {
            let (mut table, mut model) = (Table::default(), HashMap::new());
            let (mut view, mut model_then) = (table.clone(), model.clone());
            for (number, value) in steps {
                let before = match value {
                    Some(value) => {
                        let before = table.insert(hash(number), value, 0, &record(number));
                        prop_assert_eq!(before.map(|(entity, _)| entity.value), model.insert(number, value));
                        continue;
                    }
                    None => table.remove(hash(number)),
                };
                prop_assert_eq!(before.map(|(entity, _)| entity.value), model.remove(&number));
                let seen: HashMap<_, _> = view.iter().map(|(entity, record)| (record[0], entity.value)).collect();
                prop_assert_eq!(&seen, &model_then);
                (view, model_then) = (table.clone(), model.clone());
            }
            prop_assert_eq!(table.len(), model.len());
            for number in 0..=u8::MAX {
                let entry = table.entry(hash(number));
                prop_assert_eq!(entry.map(|(entity, _)| entity.value), model.get(&number).copied());
                prop_assert!(entry.is_none_or(|(_, bytes)| bytes == record(number)));
            }
        }
    }
}
