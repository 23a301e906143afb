//! [`HotCounters`]: an approximate request rate per counter, used to decide which counters are worth leasing.
//!
//! A counter that is used once must cost almost nothing, so there is no entry per counter: its hash selects one of
//! 16,384 words. Counters that share a word are counted together, so a cold counter can be mistaken for a hot one. `leases`
//! has the rate from which a counter is hot.

use std::{
    sync::atomic::{AtomicU32, Ordering::Relaxed},
    time::Duration,
};

const WORDS: usize = 16_384;
/// Mask for the lower half of each word, its hits. The upper half is the number of the interval, modulo 65,536.
const HITS: u32 = 0xFFFF;

/// A fixed-size table of hits per interval, shared by all workers without locks.
pub(super) struct HotCounters {
    words: Box<[AtomicU32]>,
    interval: Duration,
}

impl HotCounters {
    /// Creates a table that counts hits per `interval`.
    pub(super) fn new(interval: Duration) -> Self {
        Self { words: (0..WORDS).map(|_| AtomicU32::new(0)).collect(), interval }
    }

    /// Records hits and returns the number recorded in the current interval, at most 65,535.
    ///
    /// Concurrent calls can drop hits, which is harmless: the result only decides whether a counter is leased.
    pub(super) fn record(&self, identity: u128, hits: u64, now: Duration) -> u64 {
        let number = (now.as_micros() / self.interval.as_micros().max(1)) as u32 & HITS;
        let word = &self.words[(identity >> 32) as usize % WORDS];
        let before = word.load(Relaxed);
        let counted = if before >> 16 == number { before & HITS } else { 0 };
        let total = u64::from(counted).saturating_add(hits).min(HITS.into());
        word.store(number << 16 | total as u32, Relaxed);
        total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hits_add_up_within_an_interval() {
        let counters = HotCounters::new(Duration::from_millis(100));
        let at = Duration::from_millis;
        assert_eq!((counters.record(1 << 32, 3, at(0)), counters.record(1 << 32, 4, at(99))), (3, 7));
        assert_eq!((counters.record(2 << 32, 1, at(99)), counters.record(1 << 32, 1, at(100))), (1, 1));
        assert_eq!(
            (counters.record(1 << 32, u64::MAX, at(100)), counters.record(1 << 32, 1, at(100))),
            (65_535, 65_535)
        );
        let days_later = at(1_000_000_000);
        assert_eq!((counters.record(1 << 32, 2, days_later), counters.record(1 << 32, 1, days_later)), (2, 3));
    }
}
