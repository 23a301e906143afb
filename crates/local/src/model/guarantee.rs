//! The maximum that callers may be allowed.

use std::collections::BTreeMap;

use sluicegate_algorithm::Micros;

/// Length of the windows.
pub(super) const WINDOW: Micros = Micros::from_secs(1);
/// The beginning of a window, at which the model begins.
pub(super) const BEGIN: Micros = Micros::from_secs(1_763_672_400);

/// Time by which windows begin earlier than those since the epoch, if they have a phase.
pub(super) const PHASE: Micros = Micros::new(WINDOW.get() / 2);

/// The number of hits that callers may be allowed at most, which depends on the algorithm of the limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Guarantee {
    /// At most the limit in each window since the epoch.
    Windows,
    /// At most the limit in each window that begins [`PHASE`] earlier than those since the epoch.
    WindowsWithPhase,
    /// At most the limit in any time as long as a window.
    AnyWindow,
    /// At most twice the limit in any time as long as a window, because a window begins with its first hit.
    TwiceInAnyWindow,
    /// At most the limit, and as much again in the time of a window.
    Envelope,
}

impl Guarantee {
    /// Returns the number of hits to compare with the limit, from the time and number of allowed hits.
    pub(super) fn max(self, passed: &[(u64, u64)], limit: u64) -> u64 {
        let window = WINDOW.get();
        match self {
            Self::Windows => max_in_windows(passed, 0),
            Self::WindowsWithPhase => max_in_windows(passed, PHASE.get()),
            Self::AnyWindow => max_in_any_window(passed),
            Self::TwiceInAnyWindow => max_in_any_window(passed).div_ceil(2),
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

/// Returns the maximum of hits in a window, where windows begin `phase` earlier than those since the epoch.
fn max_in_windows(passed: &[(u64, u64)], phase: u64) -> u64 {
    let mut windows = BTreeMap::<u64, u64>::new();
    for (at, hits) in passed {
        *windows.entry((at + phase) / WINDOW.get()).or_default() += hits;
    }
    windows.into_values().max().unwrap_or_default()
}

/// Returns the maximum of hits in a time as long as a window.
fn max_in_any_window(passed: &[(u64, u64)]) -> u64 {
    let mut max = 0;
    for (until, _) in passed {
        let in_window = passed.iter().filter(|(at, _)| at <= until && at + WINDOW.get() > *until);
        max = max.max(in_window.map(|(_, hits)| hits).sum());
    }
    max
}
