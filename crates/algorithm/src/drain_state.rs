//! [`DrainState`]: the level of a bucket or the debt of a warm-up, stored in sixteen bytes: the instant at which it
//! will have drained (seven bytes, and four of the fraction) and the drain time when it was full (five).

use super::{
    CLOCK_SLACK, Micros, State,
    drain_time::DrainTime,
    rate::{ExactDuration, Rate},
};

/// Length of the stored form in bytes.
pub(super) const BYTES: usize = 16;

/// The level at an instant, in the form of the instant at which it will have drained.
#[derive(Clone, Copy, Debug)]
pub(super) struct DrainState {
    pub(super) drained_at: ExactDuration,
    /// Time for which the bucket has been empty.
    pub(super) idle: Micros,
    /// Whether the level differs from the stored form.
    pub(super) changed: bool,
}

/// A [`DrainState`] in the form that a counter's state contains.
#[derive(Clone, Copy, Debug)]
pub(super) struct StoredDrain {
    pub(super) micros: u64,
    pub(super) fraction: u64,
    pub(super) drain_time: DrainTime,
}

impl StoredDrain {
    pub(super) fn read(state: &State) -> Option<Self> {
        let (micros, fraction) = (state.number::<7>(0)?, state.number::<4>(7)?);
        let drain_time = DrainTime { mantissa: state.number::<4>(11)? as u32, exponent: state.number::<1>(15)? as u8 };
        Some(Self { micros, fraction, drain_time })
    }
}

/// Returns whether the level has not drained at `now`.
pub(super) fn is_ahead(state: &State, now: Micros) -> bool {
    StoredDrain::read(state).is_some_and(|stored| stored.micros >= now.get())
}

impl DrainState {
    /// Reads the level at `now`, where `full` is the time in which the fullest level drains; `None` for a new counter.
    pub(super) fn read(
        state: &State,
        now: Micros,
        rate: Rate,
        full: ExactDuration,
        drain_time: DrainTime,
    ) -> Option<Self> {
        Some(Self::of(StoredDrain::read(state)?, now, rate, full, drain_time))
    }

    /// Computes the level at `now` from the stored form.
    pub(super) fn of(stored: StoredDrain, now: Micros, rate: Rate, full: ExactDuration, drain_time: DrainTime) -> Self {
        let StoredDrain { micros, fraction, drain_time: stored_drain_time } = stored;
        let empty = ExactDuration { micros: now.get(), fraction: 0 };
        if micros < now.get() {
            return Self { drained_at: empty, idle: now - Micros::new(micros), changed: false };
        }
        let mut at = rate.duration(micros, fraction);
        let mut changed = stored_drain_time != drain_time;
        if changed {
            // The limit was changed: the level stays the same proportion of a full bucket.
            let used = stored_drain_time.scale(Micros::new(micros - now.get() + fraction.min(1)), drain_time);
            at = ExactDuration { micros: now.get() + used.get().min(full.micros), fraction: 0 };
        }
        if at.micros - now.get() > full.micros + CLOCK_SLACK.get() {
            // A clock was wrong when this was written.
            (at, changed) = (rate.add(empty, full), true);
        }
        Self { drained_at: at, idle: Micros::ZERO, changed }
    }

    /// Writes a level that will have drained at `at`, in its stored form, to `state`.
    pub(super) fn write(at: ExactDuration, drain_time: DrainTime, state: &mut State) {
        state.clear();
        state.push::<7>(at.micros);
        state.push::<4>(at.fraction);
        state.push::<4>(drain_time.mantissa.into());
        state.push::<1>(drain_time.exponent.into());
    }
}
