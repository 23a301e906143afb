//! [`Table`]: a hash table from entities to their overrides whose clones share all unchanged parts.
//!
//! A decision reads a table that never changes, because it belongs to the snapshot. A change clones the table, which
//! copies 192 pointers and the one part that is changed. Entities are identified by 71 bits of a keyed hash, so a
//! lookup compares no text. With a million overrides, each takes 141 bytes: some 40 in the part's table, and the others
//! for its [`Metadata`], which decisions do not read.
//!
//! A million overrides make a decision 1.12 times as expensive. A table of our own, with prefetched buckets of one
//! cache line, would take 85 bytes per override and make it 1.03 to 1.06 times as expensive, but need 300 more lines
//! and unsafe code: `docs/design/decisions/0023-overrides-in-the-snapshot.md`.

use std::sync::Arc;

use hashbrown::HashTable;
use sluicegate_algorithm::Micros;

/// Number of parts. A change copies one of them.
///
/// The tables of `hashbrown` have a power of two of slots and are filled to between 44% and 88%. With 192 parts a
/// million overrides fill them to 64%, with 256 parts only to 48%.
const PARTS: usize = 192;

/// The data of an override that decisions read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Entity {
    /// Number of the override's value in its interner.
    pub(super) value: u32,
    /// The time of expiry in seconds since the Unix epoch; 0 if the override does not expire.
    pub(super) until: u32,
}

/// The data of an override that only operators read.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Metadata {
    /// The text of the target.
    pub(super) target: Box<str>,
    pub(super) version: u64,
    /// Time of the change, in seconds since the Unix epoch, which take less memory.
    pub(super) at_seconds: u32,
    /// Numbers of the author and the reason in the interner of texts.
    pub(super) author: u32,
    pub(super) reason: u32,
}

impl Metadata {
    pub(super) fn at(&self) -> Micros {
        Micros::from_secs(self.at_seconds.into())
    }
}

/// The hash that identifies an entity.
#[derive(Clone, Copy, Debug)]
pub(super) struct EntityHash {
    tag: u64,
    part: u8,
}

impl From<u128> for EntityHash {
    fn from(hash: u128) -> Self {
        let part = ((hash >> 112) as usize * PARTS) >> 16;
        Self { tag: hash as u64, part: part as u8 }
    }
}

#[derive(Clone)]
struct Slot {
    tag: u64,
    entity: Entity,
    metadata: Arc<Metadata>,
}

type Part = HashTable<Slot>;

/// Hash table of overrides. Cheap to clone.
#[derive(Clone)]
pub(super) struct Table {
    parts: Arc<[Arc<Part>; PARTS]>,
    len: usize,
}

impl Default for Table {
    fn default() -> Self {
        let empty = Arc::new(Part::new());
        Self { parts: Arc::new(std::array::from_fn(|_| Arc::clone(&empty))), len: 0 }
    }
}

impl Table {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Returns the override of an entity.
    pub(super) fn get(&self, hash: EntityHash) -> Option<Entity> {
        self.slot(hash).map(|slot| slot.entity)
    }

    /// Returns the override of an entity with its metadata.
    pub(super) fn entry(&self, hash: EntityHash) -> Option<(Entity, &Metadata)> {
        self.slot(hash).map(|slot| (slot.entity, &*slot.metadata))
    }

    /// Adds or replaces an override, and returns the replaced one.
    pub(super) fn insert(
        &mut self,
        hash: EntityHash,
        entity: Entity,
        metadata: Metadata,
    ) -> Option<(Entity, Arc<Metadata>)> {
        let before = self.remove(hash);
        let slot = Slot { tag: hash.tag, entity, metadata: Arc::new(metadata) };
        self.part_mut(hash).insert_unique(hash.tag, slot, |slot| slot.tag);
        self.len += 1;
        before
    }

    /// Removes an override, and returns it.
    pub(super) fn remove(&mut self, hash: EntityHash) -> Option<(Entity, Arc<Metadata>)> {
        self.slot(hash)?;
        let part = self.part_mut(hash);
        let slot = part.find_entry(hash.tag, |slot| slot.tag == hash.tag).ok()?.remove().0;
        if part.len() < part.capacity() / 4 {
            part.shrink_to_fit(|slot| slot.tag);
        }
        self.len -= 1;
        Some((slot.entity, slot.metadata))
    }

    /// Returns all overrides, in arbitrary order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Entity, &Metadata)> {
        self.parts.iter().flat_map(|part| part.iter()).map(|slot| (slot.entity, &*slot.metadata))
    }

    fn slot(&self, hash: EntityHash) -> Option<&Slot> {
        self.parts[usize::from(hash.part)].find(hash.tag, |slot| slot.tag == hash.tag)
    }

    fn part_mut(&mut self, hash: EntityHash) -> &mut Part {
        Arc::make_mut(&mut Arc::make_mut(&mut self.parts)[usize::from(hash.part)])
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn hash(number: u8) -> EntityHash {
        // Few parts and few tags, so that overrides share parts.
        EntityHash::from(u128::from(number % 3) << 125 | u128::from(number))
    }

    fn metadata(number: u8) -> Metadata {
        Metadata { target: number.to_string().into(), version: number.into(), at_seconds: 0, author: 0, reason: 0 }
    }

    #[test]
    fn removed_overrides_take_no_memory() {
        let mut table = Table::default();
        let hashes: Vec<EntityHash> =
            (1..=1_000_u64).map(|number| u128::from(number * (u64::MAX / 1_000)).into()).collect();
        let insert = |table: &mut Table, hash| drop(table.insert(hash, Entity::default(), metadata(1)));
        hashes.iter().for_each(|hash| insert(&mut table, *hash));
        let capacity = |table: &Table| table.parts[0].capacity();
        assert!((1_000..4_000).contains(&capacity(&table)));
        (0..10_000).for_each(|_| insert(&mut table, hashes[0]));
        assert!(capacity(&table) < 4_000, "a replaced override takes no memory");
        hashes[20..].iter().for_each(|hash| drop(table.remove(*hash)));
        assert!(capacity(&table) < 100, "{}", capacity(&table));
        hashes[..20].iter().for_each(|hash| drop(table.remove(*hash)));
        assert_eq!((capacity(&table), table.len()), (0, 0));
    }

    #[test]
    fn a_change_copies_only_its_part() {
        let mut table = Table::default();
        (0..=u8::MAX).for_each(|number| drop(table.insert(hash(number), Entity::default(), metadata(number))));
        let clone = table.clone();
        drop(table.remove(hash(4)));
        let shared = (0..PARTS).filter(|part| Arc::ptr_eq(&table.parts[*part], &clone.parts[*part])).count();
        assert_eq!((shared, clone.len(), table.len()), (PARTS - 1, 256, 255));
        assert!(clone.get(hash(4)).is_some() && table.get(hash(4)).is_none());
    }

    proptest! {
        #[test]
        fn it_behaves_like_a_map_and_clones_do_not_change(
            steps in prop::collection::vec((any::<u8>(), prop::option::of(any::<u32>())), 0..200),
        ) {
            let (mut table, mut model) = (Table::default(), HashMap::new());
            let (mut clone, mut model_of_clone) = (table.clone(), model.clone());
            for (number, value) in steps {
                let before = match value {
                    Some(value) => {
                        let entity = Entity { value, until: 0 };
                        let before = table.insert(hash(number), entity, metadata(number));
                        prop_assert_eq!(before.map(|(entity, _)| entity.value), model.insert(number, value));
                        continue;
                    }
                    None => table.remove(hash(number)),
                };
                prop_assert_eq!(before.map(|(entity, _)| entity.value), model.remove(&number));
                let entries: HashMap<_, _> =
                    clone.iter().map(|(entity, metadata)| (metadata.version as u8, entity.value)).collect();
                prop_assert_eq!(&entries, &model_of_clone);
                (clone, model_of_clone) = (table.clone(), model.clone());
            }
            prop_assert_eq!(table.len(), model.len());
            for number in 0..=u8::MAX {
                let entry = table.entry(hash(number));
                prop_assert_eq!(entry.map(|(entity, _)| entity.value), model.get(&number).copied());
                prop_assert!(entry.is_none_or(|(_, found)| *found == metadata(number)));
            }
        }
    }

    #[test]
    fn hashes_are_spread_evenly_over_all_parts() {
        for (hash, part) in [(0, 0), (1 << 120, 0), (1 << 126, 48), (1 << 127, 96), (u128::MAX, 191)] {
            assert_eq!(EntityHash::from(hash).part, part, "{hash:x}");
        }
    }
}
