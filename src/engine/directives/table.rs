//! A map from descriptors to small numbers that is read without a lock while it changes: a change copies the few hundred
//! bytes that it touches, and a reader has the map as it was when it began.
//!
//! Two levels of 256 branches and small leaves, found by 80 bits of a keyed hash of the descriptor: of a million
//! descriptors in the map a stranger meets one with a probability of 10⁻¹⁸, and nobody who does not know the key can
//! look for it. A million take about 85 bytes each with names of 30 bytes.

use std::sync::Arc;

/// One descriptor's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Given {
    tag: u64,
    /// What it has.
    pub(super) value: u32,
    /// Seconds since the epoch; 0: for ever.
    pub(super) until: u32,
    /// What need not be known to decide.
    pub(super) record: Box<[u8]>,
}

type Leaf = Vec<Given>;
type Branch = [Option<Arc<Leaf>>; 256];

/// The map. A clone is a moment's view of it, and costs a reference.
#[derive(Clone)]
pub(super) struct Table {
    branches: Arc<[Arc<Branch>; 256]>,
    len: usize,
}

impl Default for Table {
    fn default() -> Self {
        let empty: Arc<Branch> = Arc::new([const { None }; 256]);
        Self { branches: Arc::new(std::array::from_fn(|_| Arc::clone(&empty))), len: 0 }
    }
}

/// Where an identity is: its branch, its leaf, its tag.
fn place(identity: u128) -> (usize, usize, u64) {
    ((identity >> 120) as usize, (identity >> 112) as usize & 0xFF, identity as u64)
}

impl Table {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn get(&self, identity: u128) -> Option<&Given> {
        let (branch, leaf, tag) = place(identity);
        self.branches[branch][leaf].as_ref()?.iter().find(|slot| slot.tag == tag)
    }

    /// The one that was there before, if there was.
    pub(super) fn insert(&mut self, identity: u128, value: u32, until: u32, record: Box<[u8]>) -> Option<Given> {
        let (_, _, tag) = place(identity);
        let leaf = Arc::make_mut(self.leaf_mut(identity).get_or_insert_default());
        let slot = Given { tag, value, until, record };
        match leaf.iter_mut().find(|slot| slot.tag == tag) {
            Some(there) => Some(std::mem::replace(there, slot)),
            None => {
                // A little at a time: there are many leaves.
                leaf.reserve_exact(1);
                leaf.push(slot);
                self.len += 1;
                None
            }
        }
    }

    pub(super) fn remove(&mut self, identity: u128) -> Option<Given> {
        self.get(identity)?;
        let (_, _, tag) = place(identity);
        let place = self.leaf_mut(identity);
        let leaf = Arc::make_mut(place.as_mut()?);
        let at = leaf.iter().position(|slot| slot.tag == tag)?;
        let slot = leaf.swap_remove(at);
        if leaf.is_empty() {
            *place = None;
        }
        self.len -= 1;
        Some(slot)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Given> {
        self.branches.iter().flat_map(|branch| branch.iter()).flatten().flat_map(|leaf| leaf.iter())
    }

    fn leaf_mut(&mut self, identity: u128) -> &mut Option<Arc<Leaf>> {
        let (branch, leaf, _) = place(identity);
        &mut Arc::make_mut(&mut Arc::make_mut(&mut self.branches)[branch])[leaf]
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    /// Few branches and leaves, so that they are shared.
    fn identity(number: u8) -> u128 {
        u128::from(number % 5) << 120 | u128::from(number % 3) << 112 | u128::from(number)
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
                        let before = table.insert(identity(number), value, 0, Box::new([number]));
                        prop_assert_eq!(before.map(|slot| slot.value), model.insert(number, value));
                        continue;
                    }
                    None => table.remove(identity(number)),
                };
                prop_assert_eq!(before.map(|slot| slot.value), model.remove(&number));
                let seen: HashMap<_, _> = view.iter().map(|slot: &Given| (slot.record[0], slot.value)).collect();
                prop_assert_eq!(&seen, &model_then);
                (view, model_then) = (table.clone(), model.clone());
            }
            prop_assert_eq!(table.len(), model.len());
            for number in 0..=u8::MAX {
                prop_assert_eq!(table.get(identity(number)).map(|slot| slot.value), model.get(&number).copied());
            }
        }
    }
}
