//! What is worth remembering for a while, of callers without number: a map of fixed size, for many threads.
//!
//! The identity chooses a set of places, as in a processor's cache; of a full set the value that ends first is
//! forgotten. Looking in vain, as most do, reads one word and nothing else: the sets are large, and would push all
//! else out of the processor's caches.

use std::{
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

/// Places of a set, which share a lock.
const WAYS: usize = 8;
/// What the values of a set may have beside them, when there are several.
const SET_BYTES: usize = 1_024;

/// A value that ends.
pub trait Expiring {
    /// When, by the clock of whoever keeps it.
    fn ends(&self) -> Duration;

    /// How many bytes it has beside itself.
    fn bytes(&self) -> usize {
        0
    }
}

/// A map of fixed size.
pub struct SetAssociativeCache<V> {
    sets: Box<[Mutex<Set<V>>]>,
    /// Of each set, a byte of the identity in each place, and 0 in those that are free.
    tags: Box<[AtomicU64]>,
}

struct Set<V>([Option<Box<(u128, V)>>; WAYS]);

impl<V> Set<V> {
    fn way_of(&self, identity: u128) -> Option<usize> {
        self.0.iter().position(|kept| kept.as_ref().is_some_and(|kept| kept.0 == identity))
    }
}

impl<V: Expiring> SetAssociativeCache<V> {
    /// Of about so many values.
    #[must_use]
    pub fn new(values: usize) -> Self {
        let sets = values.div_ceil(WAYS).max(1).next_power_of_two();
        Self {
            sets: (0..sets).map(|_| Mutex::new(Set([const { None }; WAYS]))).collect(),
            tags: (0..sets).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// What is to be said of the value, if there is one.
    pub fn look<R>(&self, identity: u128, say: impl FnOnce(&mut V) -> Option<R>) -> Option<R> {
        let place = self.place(identity);
        if !self.may_have(place, identity) {
            return None;
        }
        let mut set = self.set(place);
        let way = set.way_of(identity)?;
        set.0[way].as_mut().and_then(|kept| say(&mut kept.1))
    }

    /// Keeps the value, instead of one that was there.
    pub fn put(&self, identity: u128, value: V) {
        let place = self.place(identity);
        let mut set = self.set(place);
        let ends = |way: &usize| set.0[*way].as_ref().map_or(Duration::ZERO, |kept| kept.1.ends());
        let way = set.way_of(identity).or_else(|| (0..WAYS).min_by_key(ends)).unwrap_or_default();
        set.0[way] = Some(Box::new((identity, value)));
        while set.0.iter().flatten().map(|kept| kept.1.bytes()).sum::<usize>() > SET_BYTES {
            let others = (0..WAYS).filter(|other| *other != way && set.0[*other].is_some());
            let Some(first) = others.min_by_key(|other| set.0[*other].as_ref().map(|kept| kept.1.ends())) else {
                break;
            };
            set.0[first] = None;
        }
        self.write_tags(place, &set);
    }

    /// Forgets the value.
    pub fn remove(&self, identity: u128) {
        let place = self.place(identity);
        if !self.may_have(place, identity) {
            return;
        }
        let mut set = self.set(place);
        if let Some(way) = set.way_of(identity) {
            set.0[way] = None;
            self.write_tags(place, &set);
        }
    }

    fn may_have(&self, place: usize, identity: u128) -> bool {
        self.tags[place].load(Relaxed).to_le_bytes().contains(&tag(identity))
    }

    /// Nobody else writes them: the set is locked.
    fn write_tags(&self, place: usize, set: &Set<V>) {
        let tags = set.0.each_ref().map(|kept| kept.as_ref().map_or(0, |kept| tag(kept.0)));
        self.tags[place].store(u64::from_le_bytes(tags), Relaxed);
    }

    fn place(&self, identity: u128) -> usize {
        (identity >> 64) as usize & (self.sets.len() - 1)
    }

    fn set(&self, place: usize) -> MutexGuard<'_, Set<V>> {
        self.sets[place].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Of bits that do not choose the set; never 0.
const fn tag(identity: u128) -> u8 {
    identity as u8 | 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Debug, PartialEq)]
    struct Until(u64, usize);

    impl Expiring for Until {
        fn ends(&self) -> Duration {
            Duration::from_secs(self.0)
        }

        fn bytes(&self) -> usize {
            self.1
        }
    }

    fn identity(number: u128) -> u128 {
        number.wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835)
    }

    fn known(ways: &SetAssociativeCache<Until>, number: u128) -> Option<u64> {
        ways.look(identity(number), |value| Some(value.0))
    }

    #[test]
    fn it_is_bounded_and_forgets_what_ends_first() {
        let ways = SetAssociativeCache::new(8);
        for number in 0..9 {
            ways.put(identity(number), Until(100 - number as u64, 0));
        }
        let all: Vec<_> = (0..9).map(|number| known(&ways, number)).collect();
        assert_eq!(all.iter().flatten().count(), 8);
        assert_eq!((all[7], all[8]), (None, Some(92)));
        ways.put(identity(3), Until(1, 0));
        assert_eq!((known(&ways, 3), known(&ways, 4)), (Some(1), Some(96)), "the same again takes its own place");
        ways.remove(identity(4));
        ways.put(identity(9), Until(50, 0));
        assert_eq!((known(&ways, 4), known(&ways, 9), known(&ways, 3)), (None, Some(50), Some(1)));
        assert_eq!(ways.look(identity(3), |_| None::<()>), None);
    }

    #[test]
    fn a_set_has_so_many_bytes_or_one_value() {
        let ways = SetAssociativeCache::new(1);
        for number in 0..4 {
            ways.put(identity(number), Until(10 + number as u64, 256));
        }
        assert!((0..4).all(|number| known(&ways, number).is_some()));
        ways.put(identity(4), Until(5, 257));
        let all: Vec<_> = (0..5).map(|number| known(&ways, number).is_some()).collect();
        assert_eq!(all, [false, false, true, true, true], "what ends first goes, but what came last stays");
        ways.put(identity(5), Until(1, 7_000));
        let all: Vec<_> = (0..6).map(|number| known(&ways, number).is_some()).collect();
        assert_eq!(all, [false, false, false, false, false, true]);
    }

    #[test]
    fn values_are_spread_over_all_of_it() {
        let ways = SetAssociativeCache::new(1_024);
        (0..512).for_each(|number| ways.put(identity(number), Until(1, 0)));
        let found = (0..512).filter(|number| known(&ways, *number).is_some()).count();
        assert!(found > 480, "{found} of 512");
    }
}
