//! A map from descriptors to small numbers that is read without a lock while it changes: a change copies the few kilobytes
//! that it touches, and a reader has the map as it was when it began.
//!
//! Two levels of 256 branches and small leaves, found by 80 bits of a keyed hash of the descriptor: of a million
//! descriptors in the map a stranger meets one with a probability of 10⁻¹⁸, and nobody who does not know the key can
//! look for it. What a decision reads of a leaf lies together, some 250 bytes of a million's 16 MB, and it begins to look
//! where the tag most likely is; the names are elsewhere.

use std::sync::Arc;

/// What a decision reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Given {
    tag: u64,
    /// What the descriptor has.
    pub(super) value: u32,
    /// Seconds since the epoch; 0: for ever.
    pub(super) until: u32,
}

/// What need not be known to decide.
pub(super) type Record = Box<[u8]>;

#[derive(Clone)]
struct Leaf {
    /// By their tags.
    given: Arc<[Given]>,
    /// In the same order.
    records: Arc<Vec<Record>>,
}

type Branch = [Option<Leaf>; 256];

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

/// Where a tag is, or would be. They are evenly spread, as a hash is: it is seldom more than two places from where it
/// would be if they were so exactly.
fn find(given: &[Given], tag: u64) -> Result<usize, usize> {
    let guess = ((u128::from(tag) * given.len() as u128) >> 64) as usize;
    let behind = given[guess..].iter().take_while(|it| it.tag < tag).count();
    let before = given[..guess].iter().rev().take_while(|it| it.tag >= tag).count();
    let at = guess + behind - before;
    if given.get(at).is_some_and(|it| it.tag == tag) { Ok(at) } else { Err(at) }
}

impl Table {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn get(&self, identity: u128) -> Option<Given> {
        let (branch, leaf, tag) = place(identity);
        let given = &self.branches[branch][leaf].as_ref()?.given;
        find(given, tag).ok().map(|at| given[at])
    }

    /// The same with its record.
    pub(super) fn entry(&self, identity: u128) -> Option<(Given, &Record)> {
        let (branch, leaf, tag) = place(identity);
        let leaf = self.branches[branch][leaf].as_ref()?;
        let at = find(&leaf.given, tag).ok()?;
        Some((leaf.given[at], leaf.records.get(at)?))
    }

    /// The one that was there before, if there was.
    pub(super) fn insert(&mut self, identity: u128, value: u32, until: u32, record: Record) -> Option<(Given, Record)> {
        let (_, _, tag) = place(identity);
        let given = Given { tag, value, until };
        let leaf = self.leaf_mut(identity);
        let Some(leaf) = leaf else {
            *leaf = Some(Leaf { given: Arc::new([given]), records: Arc::new(vec![record]) });
            self.len += 1;
            return None;
        };
        let records = Arc::make_mut(&mut leaf.records);
        match find(&leaf.given, tag) {
            Ok(at) => {
                let before = std::mem::replace(&mut Arc::make_mut(&mut leaf.given)[at], given);
                Some((before, std::mem::replace(&mut records[at], record)))
            }
            Err(at) => {
                let (before, behind) = leaf.given.split_at(at);
                leaf.given = before.iter().copied().chain([given]).chain(behind.iter().copied()).collect();
                // A little at a time: there are many leaves.
                records.reserve_exact(1);
                records.insert(at, record);
                self.len += 1;
                None
            }
        }
    }

    pub(super) fn remove(&mut self, identity: u128) -> Option<(Given, Record)> {
        self.get(identity)?;
        let (_, _, tag) = place(identity);
        let place = self.leaf_mut(identity);
        let leaf = place.as_mut()?;
        let at = find(&leaf.given, tag).ok()?;
        let given = leaf.given[at];
        leaf.given = leaf.given.iter().enumerate().filter(|(place, _)| *place != at).map(|(_, given)| *given).collect();
        let record = Arc::make_mut(&mut leaf.records).remove(at);
        if leaf.given.is_empty() {
            *place = None;
        }
        self.len -= 1;
        Some((given, record))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Given, &Record)> {
        let leaves = self.branches.iter().flat_map(|branch| branch.iter()).flatten();
        leaves.flat_map(|leaf| leaf.given.iter().copied().zip(leaf.records.iter()))
    }

    fn leaf_mut(&mut self, identity: u128) -> &mut Option<Leaf> {
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
        // Half of the tags lie close together, and half as a hash would have them.
        let tag = u128::from(number) << (number % 2 * 56);
        u128::from(number % 5) << 120 | u128::from(number % 3) << 112 | tag
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
                        prop_assert_eq!(before.map(|(given, _)| given.value), model.insert(number, value));
                        continue;
                    }
                    None => table.remove(identity(number)),
                };
                prop_assert_eq!(before.map(|(given, _)| given.value), model.remove(&number));
                let seen: HashMap<_, _> = view.iter().map(|(given, record)| (record[0], given.value)).collect();
                prop_assert_eq!(&seen, &model_then);
                (view, model_then) = (table.clone(), model.clone());
            }
            prop_assert_eq!(table.len(), model.len());
            for number in 0..=u8::MAX {
                prop_assert_eq!(table.entry(identity(number)).map(|(given, _)| given.value), model.get(&number).copied());
            }
        }
    }
}
