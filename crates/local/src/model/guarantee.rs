//! What callers may be allowed at most.

use std::collections::BTreeMap;

use sluicegate_algorithm::Micros;

/// Length of the windows.
pub(super) const WINDOW: Micros = Micros::from_secs(1);
/// The beginning of a window, at which the model begins.
pub(super) const BEGIN: Micros = Micros::from_secs(1_763_672_400);

/// The guarantee of a limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Guarantee {
    /// At most the limit in each window since the epoch.
    Windows,
    /// At most the limit in any time as long as a window.
    AnyWindow,
    /// At most the limit, and as much again in the time of a window.
    Envelope,
}

impl Guarantee {
    /// Returns the number of hits to compare with the limit, from the time and number of allowed hits.
    pub(super) fn max(self, passed: &[(u64, u64)], limit: u64) -> u64 {
        let window = WINDOW.get();
        match self {
            Self::Windows => {
                let mut windows = BTreeMap::<u64, u64>::new();
                passed.iter().for_each(|(at, hits)| *windows.entry(at / window).or_default() += hits);
                windows.into_values().max().unwrap_or_default()
            }
            Self::AnyWindow => {
                let sum_until = |until: u64| {
                    passed.iter().filter(|(at, _)| *at <= until && at + window > until).map(|(_, hits)| hits).sum()
                };
                passed.iter().map(|(at, _)| sum_until(*at)).max().unwrap_or_default()
            }
            Self::Envelope => {
                let (mut level, mut previous, mut max) = (0_u64, BEGIN.get(), 0);
                for (at, hits) in passed {
                    level = level.saturating_sub((at - previous) * limit / window) + hits;
                    (previous, max) = (*at, max.max(level));
                }
                max
            }
        }
    }
}
