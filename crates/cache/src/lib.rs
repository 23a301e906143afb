//! [`SetAssociativeCache`]: a concurrent cache of fixed size for values that expire.
//!
//! A value is stored under its identity, a hash of 128 bits, which selects a set of entries, as in a processor's cache.
//! If the set is full, the value that expires first is evicted. Most lookups find nothing. Such a lookup reads one
//! 64-bit word of tags and no set, because the sets are large and would displace other data from the processor's
//! caches.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use parking_lot::{Mutex, MutexGuard};

/// Number of entries of a set. They share a lock.
const WAYS: usize = 8;
/// Maximum number of heap bytes of the values of a set, unless there is only one value.
const MAX_SET_BYTES: usize = 1_024;

/// A value that expires.
pub trait Expiring {
    /// Returns when the value expires, on the clock of the cache's owner.
    fn expires_at(&self) -> Duration;

    /// Returns the number of bytes that the value has allocated on the heap.
    fn heap_bytes(&self) -> usize {
        0
    }
}

/// Cache of fixed size for values that expire.
pub struct SetAssociativeCache<V> {
    sets: Box<[Mutex<Set<V>>]>,
    /// For each set, one byte of the identity per entry; 0 for empty entries.
    tags: Box<[AtomicU64]>,
}

/// The entries of the values with identities that select this set.
struct Set<V>([Option<Box<Entry<V>>>; WAYS]);

struct Entry<V> {
    identity: u128,
    value: V,
}

impl<V: Expiring> Set<V> {
    /// Returns the index of the entry with this identity.
    fn way_of(&self, identity: u128) -> Option<usize> {
        self.0.iter().position(|entry| entry.as_ref().is_some_and(|entry| entry.identity == identity))
    }

    /// Returns when an entry expires; zero for an empty one.
    fn expires_at(&self, way: usize) -> Duration {
        match &self.0[way] {
            Some(entry) => entry.value.expires_at(),
            None => Duration::ZERO,
        }
    }

    fn heap_bytes(&self) -> usize {
        self.0.iter().flatten().map(|entry| entry.value.heap_bytes()).sum()
    }
}

impl<V: Expiring> SetAssociativeCache<V> {
    /// Creates a cache for about `capacity` values.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        let sets = capacity.div_ceil(WAYS).max(1).next_power_of_two();
        Self {
            sets: (0..sets).map(|_| Mutex::new(Set([const { None }; WAYS]))).collect(),
            tags: (0..sets).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Passes the value with this identity to `read` and returns the result, or `None` if there is no such value.
    pub fn lookup<R>(&self, identity: u128, read: impl FnOnce(&mut V) -> Option<R>) -> Option<R> {
        let index = self.set_index(identity);
        if !self.may_contain(index, identity) {
            return None;
        }
        let mut set = self.set(index);
        let way = set.way_of(identity)?;
        let entry = set.0[way].as_mut()?;
        read(&mut entry.value)
    }

    /// Inserts a value, and replaces an existing one with the same identity.
    pub fn put(&self, identity: u128, value: V) {
        let index = self.set_index(identity);
        let mut set = self.set(index);
        let way = match set.way_of(identity) {
            Some(way) => way,
            None => (0..WAYS).min_by_key(|way| set.expires_at(*way)).unwrap_or_default(),
        };
        set.0[way] = Some(Box::new(Entry { identity, value }));
        while set.heap_bytes() > MAX_SET_BYTES {
            let others = (0..WAYS).filter(|other| *other != way && set.0[*other].is_some());
            let Some(first) = others.min_by_key(|other| set.expires_at(*other)) else {
                break;
            };
            set.0[first] = None;
        }
        self.write_tags(index, &set);
    }

    /// Removes the value with this identity.
    pub fn remove(&self, identity: u128) {
        let index = self.set_index(identity);
        if !self.may_contain(index, identity) {
            return;
        }
        let mut set = self.set(index);
        if let Some(way) = set.way_of(identity) {
            set.0[way] = None;
            self.write_tags(index, &set);
        }
    }

    /// Returns `true` if the tags of the set contain that of `identity`.
    fn may_contain(&self, index: usize, identity: u128) -> bool {
        self.tags[index].load(Relaxed).to_le_bytes().contains(&tag(identity))
    }

    /// Writes the tags of a set: one byte of each identity, which lookups read without the lock. The caller holds the lock.
    fn write_tags(&self, index: usize, set: &Set<V>) {
        let tags = set.0.each_ref().map(|entry| match entry {
            Some(entry) => tag(entry.identity),
            None => 0,
        });
        self.tags[index].store(u64::from_le_bytes(tags), Relaxed);
    }

    fn set_index(&self, identity: u128) -> usize {
        (identity >> 64) as usize & (self.sets.len() - 1)
    }

    fn set(&self, index: usize) -> MutexGuard<'_, Set<V>> {
        self.sets[index].lock()
    }
}

/// Returns the tag of an identity, from bits that do not select the set. Never 0.
const fn tag(identity: u128) -> u8 {
    identity as u8 | 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Debug, PartialEq)]
    struct Value(u64, usize);

    impl Expiring for Value {
        fn expires_at(&self) -> Duration {
            Duration::from_secs(self.0)
        }

        fn heap_bytes(&self) -> usize {
            self.1
        }
    }

    fn identity(number: u128) -> u128 {
        number.wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835)
    }

    fn get(cache: &SetAssociativeCache<Value>, number: u128) -> Option<u64> {
        cache.lookup(identity(number), |value| Some(value.0))
    }

    #[test]
    fn the_cache_is_bounded_and_evicts_the_value_that_expires_first() {
        let cache = SetAssociativeCache::new(8);
        for number in 0..9 {
            cache.put(identity(number), Value(100 - number as u64, 0));
        }
        let all: Vec<_> = (0..9).map(|number| get(&cache, number)).collect();
        assert_eq!(all.iter().flatten().count(), 8);
        assert_eq!((all[7], all[8]), (None, Some(92)));
        cache.put(identity(3), Value(1, 0));
        assert_eq!(
            (get(&cache, 3), get(&cache, 4)),
            (Some(1), Some(96)),
            "a value replaces the one with the same identity"
        );
        cache.remove(identity(4));
        cache.put(identity(9), Value(50, 0));
        assert_eq!((get(&cache, 4), get(&cache, 9), get(&cache, 3)), (None, Some(50), Some(1)));
        assert_eq!(cache.lookup(identity(3), |_| None::<()>), None);
    }

    #[test]
    fn the_heap_bytes_of_a_set_are_bounded_except_for_a_single_value() {
        let cache = SetAssociativeCache::new(1);
        for number in 0..4 {
            cache.put(identity(number), Value(10 + number as u64, 256));
        }
        assert!((0..4).all(|number| get(&cache, number).is_some()));
        cache.put(identity(4), Value(5, 257));
        let all: Vec<_> = (0..5).map(|number| get(&cache, number).is_some()).collect();
        assert_eq!(all, [false, false, true, true, true], "values that expire first are evicted, but not the newest");
        cache.put(identity(5), Value(1, 7_000));
        let all: Vec<_> = (0..6).map(|number| get(&cache, number).is_some()).collect();
        assert_eq!(all, [false, false, false, false, false, true]);
    }

    #[test]
    fn values_are_spread_over_all_sets() {
        let cache = SetAssociativeCache::new(1_024);
        (0..512).for_each(|number| cache.put(identity(number), Value(1, 0)));
        let found = (0..512).filter(|number| get(&cache, *number).is_some()).count();
        assert!(found > 480, "{found} of 512");
    }
}
