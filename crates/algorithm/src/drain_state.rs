//! [`DrainState`]: the level of a bucket or the debt of a warm-up, stored as the instant at which it will have drained
//! (seven bytes, and those of the fraction) and the drain time of the fullest level (five).

use super::{
    CLOCK_SLACK, Micros, State,
    drain_time::DrainTime,
    rate::{ExactDuration, Rate},
};

/// The number of bytes in which the fraction of a microsecond is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Precision {
    /// Four, for rates that divide a microsecond into at most 2³² parts.
    Short,
    /// Seven, for all rates.
    Long,
}

impl Precision {
    /// Returns the length of the stored form in bytes.
    pub(super) const fn state_bytes(self) -> usize {
        match self {
            Self::Short => 16,
            Self::Long => 19,
        }
    }
}

/// The level of a bucket or the debt of a warm-up, in the form of the instant at which it will have drained.
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
    pub(super) fn read(state: &State, precision: Precision) -> Option<Self> {
        match precision {
            Precision::Short => Self::read_short(state),
            Precision::Long => Self::read_long(state),
        }
    }

    fn read_short(state: &State) -> Option<Self> {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, exponent] = *state.as_bytes().first_chunk()?;
        Some(Self {
            micros: u64::from_le_bytes([a, b, c, d, e, f, g, 0]),
            fraction: u32::from_le_bytes([h, i, j, k]).into(),
            drain_time: DrainTime { mantissa: u32::from_le_bytes([l, m, n, o]), exponent },
        })
    }

    fn read_long(state: &State) -> Option<Self> {
        let exponent = *state.as_bytes().get(18)?;
        let mantissa = state.number::<4>(14)? as u32;
        Some(Self {
            micros: state.number::<7>(0)?,
            fraction: state.number::<7>(7)?,
            drain_time: DrainTime { mantissa, exponent },
        })
    }
}

/// Returns whether the level has not drained at `now`.
pub(super) fn is_ahead(state: &State, now: Micros) -> bool {
    state.number::<7>(0).is_some_and(|drained_at| drained_at >= now.get())
}

impl DrainState {
    /// Reads the level with a short fraction at `now`, where `full` is the time in which the fullest level drains; `None` for a
    /// new counter.
    pub(super) fn read(
        state: &State,
        now: Micros,
        rate: Rate,
        full: ExactDuration,
        drain_time: DrainTime,
    ) -> Option<Self> {
        Some(Self::of(StoredDrain::read(state, Precision::Short)?, now, rate, full, drain_time))
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
            at = rate.add(empty, full);
            changed = true;
        }
        Self { drained_at: at, idle: Micros::ZERO, changed }
    }

    /// Writes a level that will have drained at `at`, in its stored form, to `state`.
    pub(super) fn write(at: ExactDuration, drain_time: DrainTime, precision: Precision, state: &mut State) {
        if precision == Precision::Long {
            state.clear();
            state.push::<7>(at.micros);
            state.push::<7>(at.fraction);
            state.push::<4>(drain_time.mantissa.into());
            state.push::<1>(drain_time.exponent.into());
            return;
        }
        let mut bytes = [0; Precision::Short.state_bytes()];
        bytes[..8].copy_from_slice(&at.micros.to_le_bytes());
        bytes[7..11].copy_from_slice(&at.fraction.to_le_bytes()[..4]);
        bytes[11..15].copy_from_slice(&drain_time.mantissa.to_le_bytes());
        bytes[15] = drain_time.exponent;
        state.replace(&bytes);
    }
}
