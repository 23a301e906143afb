//! What is kept for each of many counters, by what they are found by: bounded, and for all workers.

use std::{
    ops::Range,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use hashbrown::{HashTable, hash_table::Entry};

/// So many that two workers rarely want the same lock.
pub(super) const SHARDS: usize = 64;

type Shard<E> = HashTable<(u128, E)>;

pub(super) struct Entities<E> {
    shards: Box<[Mutex<Shard<E>>]>,
    count: AtomicUsize,
    most: usize,
}

impl<E> Entities<E> {
    /// Of about so many at most.
    pub(super) fn new(most: usize) -> Self {
        Self { shards: (0..SHARDS).map(|_| Mutex::default()).collect(), count: AtomicUsize::new(0), most }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count.load(Relaxed) == 0
    }

    /// Does something to the entity, if it is there.
    pub(super) fn find<R>(&self, identity: u128, act: impl FnOnce(&mut E) -> R) -> Option<R> {
        let mut shard = self.shard(identity);
        shard.find_mut(low(identity), |entity| entity.0 == identity).map(|entity| act(&mut entity.1))
    }

    /// The same, and makes it if it is not there yet: unless there is no room for more.
    pub(super) fn with<R>(
        &self,
        identity: u128,
        new: impl FnOnce() -> Option<E>,
        act: impl FnOnce(&mut E) -> R,
    ) -> Option<R> {
        let mut shard = self.shard(identity);
        match shard.entry(low(identity), |entity| entity.0 == identity, |entity| low(entity.0)) {
            Entry::Occupied(mut entity) => Some(act(&mut entity.get_mut().1)),
            Entry::Vacant(place) => {
                if self.count.load(Relaxed) >= self.most {
                    return None;
                }
                let entity = new()?;
                self.count.fetch_add(1, Relaxed);
                Some(act(&mut place.insert((identity, entity)).get_mut().1))
            }
        }
    }

    /// Looks at all, and keeps those of which that is true.
    pub(super) fn retain(&self, keeps: impl FnMut(&mut E) -> bool) {
        self.retain_of(0..SHARDS, keeps);
    }

    /// The same of some of all [`SHARDS`].
    pub(super) fn retain_of(&self, shards: Range<usize>, mut keeps: impl FnMut(&mut E) -> bool) {
        if self.is_empty() {
            return;
        }
        for shard in shards {
            let shard = &self.shards[shard % SHARDS];
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            let before = shard.len();
            shard.retain(|entity| keeps(&mut entity.1));
            self.count.fetch_sub(before - shard.len(), Relaxed);
        }
    }

    fn shard(&self, identity: u128) -> MutexGuard<'_, Shard<E>> {
        self.shards[(identity >> 112) as usize % SHARDS].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn low(identity: u128) -> u64 {
    identity as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entities_are_found_by_all_of_their_identity_and_bounded() {
        let entities = Entities::new(2);
        assert!(entities.is_empty() && entities.find(1, |_: &mut u32| ()).is_none());
        let add = |identity: u128| {
            entities.with(
                identity,
                || Some(0),
                |entity| {
                    *entity += 1;
                    *entity
                },
            )
        };
        let (one, other) = (7, 7 | 1 << 64);
        assert_eq!((add(one), add(one), add(other), add(8)), (Some(1), Some(2), Some(1), None));
        assert!(!entities.is_empty());
        assert_eq!((entities.find(one, |it| *it), entities.find(other, |it| *it)), (Some(2), Some(1)));
        assert_eq!(entities.with(9, || None, |entity| *entity), None);
        entities.retain_of(1..SHARDS, |_| false);
        assert_eq!(entities.find(one, |it| *it), Some(2), "its shard is the first");
        entities.retain(|entity| *entity == 2);
        assert_eq!((entities.find(other, |it| *it), add(8), add(9)), (None, Some(1), None));
        entities.retain_of(SHARDS..SHARDS + 1, |_| false);
        assert!(entities.is_empty());
    }
}
