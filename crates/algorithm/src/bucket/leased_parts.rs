//! [`LeasedParts`]: the leased parts of a bucket, stored after its other bytes. Each part has eighteen bytes: the
//! instant at which it ends (seven bytes) and its size (seven bytes, and four of the fraction).

use smallvec::SmallVec;

use super::{
    super::{
        CLOCK_SLACK, Micros, State, drain_state::Precision, drain_time::DrainTime, rate::ExactDuration, rate::Rate,
    },
    MAX_LEASE_LIFETIME,
};

/// Length of one part in bytes.
const PART_BYTES: usize = 18;
/// Maximum number of parts. Leases of one limit need two, and leases of the limit before a change two more.
const MAX_PARTS: usize = 4;

/// Leased hits that may be spent until the instant `ends`, in microseconds. `span` is the time in which they drain.
#[derive(Clone, Copy, Debug)]
pub(super) struct LeasedPart {
    pub(super) ends: u64,
    pub(super) span: ExactDuration,
}

impl LeasedPart {
    /// Reads the part with this index; `None` beyond the end of the state.
    fn read(state: &State, index: usize, rate: Rate, is_same_drain_time: bool) -> Option<Self> {
        let offset = Precision::Short.state_bytes() + PART_BYTES * index;
        let ends = state.number::<7>(offset)?;
        let micros = state.number::<7>(offset + 7)?;
        let fraction = state.number::<4>(offset + 14)?;
        Some(Self { ends, span: rate.stored_duration(micros, fraction, is_same_drain_time) })
    }
}

/// All leased parts of a bucket.
#[derive(Clone, Debug, Default)]
pub(super) struct LeasedParts(SmallVec<[LeasedPart; MAX_PARTS]>);

impl LeasedParts {
    /// Reads the parts of a state. If it was written with another drain time, fractions are rounded up.
    pub(super) fn read(state: &State, rate: Rate, is_same_drain_time: bool) -> Self {
        let mut parts = Self::default();
        for index in 0..MAX_PARTS {
            let Some(part) = LeasedPart::read(state, index, rate, is_same_drain_time) else {
                break;
            };
            parts.0.push(part);
        }
        parts
    }

    /// Removes the parts that have ended and adds them to a bucket that will have drained at `at`, up to `full`. Each
    /// is added as of the instant at which it ended. Returns the instant at which the bucket will then have drained.
    ///
    /// A part with an implausibly late end was written by a wrong clock and is treated as ended.
    pub(super) fn pour_ended(
        &mut self,
        mut at: ExactDuration,
        now: Micros,
        rate: Rate,
        full: ExactDuration,
    ) -> ExactDuration {
        self.0.retain(|entry| {
            let max_end = now + CLOCK_SLACK + MAX_LEASE_LIFETIME;
            let has_ended = entry.ends <= now.get() || entry.ends > max_end.get();
            if has_ended {
                let ended = ExactDuration { micros: entry.ends.min(now.get()), fraction: 0 };
                at = rate.add(at.max(ended), entry.span).min(at.max(rate.add(ended, full)));
            }
            !has_ended
        });
        at
    }

    /// Scales the parts in proportion to a change of the limit.
    pub(super) fn scale(&mut self, from: DrainTime, to: DrainTime) {
        for entry in &mut self.0 {
            let micros = from.scale(Micros::new(entry.span.micros), to).get();
            entry.span = ExactDuration { micros, fraction: 0 };
        }
    }

    /// Reduces the last parts until the sum of all is at most `full`, and returns the sum. Only broken states and, by
    /// rounding, scaled ones contain more.
    pub(super) fn limit_sum(&mut self, full: ExactDuration, rate: Rate) -> ExactDuration {
        let mut sum = ExactDuration::default();
        for entry in &mut self.0 {
            entry.span = entry.span.min(rate.subtract(full, sum));
            sum = rate.add(sum, entry.span);
        }
        sum
    }

    /// Adds a lease. Returns `false` if there are already [`MAX_PARTS`] parts with other ends.
    pub(super) fn add(&mut self, ends: u64, span: ExactDuration, rate: Rate) -> bool {
        if let Some(entry) = self.0.iter_mut().find(|entry| entry.ends == ends) {
            entry.span = rate.add(entry.span, span);
        } else if self.0.len() < MAX_PARTS {
            self.0.push(LeasedPart { ends, span });
        } else {
            return false;
        }
        true
    }

    /// Subtracts returned hits from the part that ends at `ends`, if it exists.
    pub(super) fn take(&mut self, ends: u64, span: ExactDuration, rate: Rate) {
        if let Some(entry) = self.0.iter_mut().find(|entry| entry.ends == ends) {
            entry.span = rate.subtract(entry.span, span);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.iter().all(|entry| entry.span == ExactDuration::default())
    }

    /// Returns the parts in the order in which they end.
    pub(super) fn by_end(&self) -> SmallVec<[LeasedPart; MAX_PARTS]> {
        let mut entries = self.0.clone();
        entries.sort_unstable_by_key(|entry| entry.ends);
        entries
    }

    /// Appends the parts to the state of the bucket.
    pub(super) fn write(&self, state: &mut State) {
        for LeasedPart { ends, span } in self.0.iter().filter(|entry| entry.span != ExactDuration::default()) {
            state.push::<7>(*ends);
            state.push::<7>(span.micros);
            state.push::<4>(span.fraction);
        }
    }
}
