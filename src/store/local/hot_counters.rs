//! Who is asked for often, at a word for each of many: whoever is asked for once costs no more than that.
//!
//! Counters that meet in a word are taken for one, so some that are not asked for often are watched as well.

use std::{
    sync::atomic::{AtomicU32, Ordering::Relaxed},
    time::Duration,
};

const WORDS: usize = 16_384;
/// Hits in a word: the lower half. The upper half tells the slice of time.
const HITS: u32 = 0xFFFF;

pub(super) struct HotCounters {
    words: Box<[AtomicU32]>,
    interval: Duration,
}

impl HotCounters {
    /// Hits are counted in slices of this length.
    pub(super) fn new(slice: Duration) -> Self {
        Self { words: (0..WORDS).map(|_| AtomicU32::new(0)).collect(), interval: slice }
    }

    /// Adds hits, and says how many there are in this slice. Two who add at once may lose a hit.
    pub(super) fn record(&self, identity: u128, hits: u64, now: Duration) -> u64 {
        let slice = (now.as_micros() / self.interval.as_micros().max(1)) as u32 & HITS;
        let word = &self.words[(identity >> 32) as usize % WORDS];
        let before = word.load(Relaxed);
        let counted = if before >> 16 == slice { before & HITS } else { 0 };
        let hits = u64::from(counted).saturating_add(hits).min(HITS.into());
        word.store(slice << 16 | hits as u32, Relaxed);
        hits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hits_add_up_within_a_slice() {
        let heat = HotCounters::new(Duration::from_millis(100));
        let at = Duration::from_millis;
        assert_eq!((heat.record(1 << 32, 3, at(0)), heat.record(1 << 32, 4, at(99))), (3, 7));
        assert_eq!((heat.record(2 << 32, 1, at(99)), heat.record(1 << 32, 1, at(100))), (1, 1));
        assert_eq!((heat.record(1 << 32, u64::MAX, at(100)), heat.record(1 << 32, 1, at(100))), (65_535, 65_535));
        let days_later = at(1_000_000_000);
        assert_eq!((heat.record(1 << 32, 2, days_later), heat.record(1 << 32, 1, days_later)), (2, 3));
    }
}
