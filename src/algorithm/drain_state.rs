//! What drains at a limit's pace, as buckets and the warm-up keep it: in sixteen bytes, when it will have drained (seven
//! bytes, and four of the fraction) and the tempo of what it was held against (five).

use super::{
    CLOCK_SLACK, Micros, State,
    drain_time::DrainTime,
    rate::{ExactDuration, Rate},
};

/// Bytes of a state that belong to it.
pub(super) const BYTES: usize = 16;

/// When it will have drained: not before now.
#[derive(Clone, Copy, Debug)]
pub(super) struct DrainState {
    pub(super) at: ExactDuration,
    /// How long it has been empty.
    pub(super) idle: Micros,
    /// It differs from what is stored.
    pub(super) changed: bool,
}

/// What the bytes say.
#[derive(Clone, Copy, Debug)]
pub(super) struct StoredDrain {
    pub(super) micros: u64,
    pub(super) part: u64,
    pub(super) drain_time: DrainTime,
}

impl StoredDrain {
    pub(super) fn read(state: &State) -> Option<Self> {
        let (micros, part) = (state.number::<7>(0)?, state.number::<4>(7)?);
        let tempo = DrainTime { mantissa: state.number::<4>(11)? as u32, exponent: state.number::<1>(15)? as u8 };
        Some(Self { micros, part, drain_time: tempo })
    }
}

impl DrainState {
    /// As of now, at a pace at which it takes `full` to drain from the most that it may hold; `None` for one never used.
    pub(super) fn read(state: &State, now: Micros, pace: Rate, full: ExactDuration, tempo: DrainTime) -> Option<Self> {
        Some(Self::of(StoredDrain::read(state)?, now, pace, full, tempo))
    }

    /// The same of what was stored.
    pub(super) fn of(stored: StoredDrain, now: Micros, pace: Rate, full: ExactDuration, tempo: DrainTime) -> Self {
        let StoredDrain { micros, part, drain_time: before } = stored;
        let empty = ExactDuration { micros: now.get(), fraction: 0 };
        if micros < now.get() {
            return Self { at: empty, idle: now - Micros::new(micros), changed: false };
        }
        let mut at = pace.duration(micros, part);
        let mut changed = before != tempo;
        if changed {
            // The limit was changed: what was used of the old one is as large a part of the new one.
            let used = before.scale(Micros::new(micros - now.get() + part.min(1)), tempo);
            at = ExactDuration { micros: now.get() + used.get().min(full.micros), fraction: 0 };
        }
        if at.micros - now.get() > full.micros + CLOCK_SLACK.get() {
            // The clock was wrong when this was written.
            (at, changed) = (pace.add(empty, full), true);
        }
        Self { at, idle: Micros::ZERO, changed }
    }

    /// The sixteen bytes.
    pub(super) fn write(at: ExactDuration, tempo: DrainTime, state: &mut State) {
        state.clear();
        state.push::<7>(at.micros);
        state.push::<4>(at.fraction);
        state.push::<4>(tempo.mantissa.into());
        state.push::<1>(tempo.exponent.into());
    }
}
