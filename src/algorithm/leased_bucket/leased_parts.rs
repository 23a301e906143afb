//! What of a bucket is in escrow, behind the bytes of the bucket itself: entries of eighteen bytes, each with the instant
//! at which it ends (seven bytes) and what it holds (seven bytes, and four of the fraction).

use smallvec::SmallVec;

use super::{
    super::{CLOCK_SLACK, Micros, State, drain_state, drain_time::DrainTime, rate::ExactDuration, rate::Rate},
    MAX_LEASE_LIFETIME,
};

/// Bytes of an entry.
const BYTES: usize = 18;
/// A bucket has no more than these. Leases of one limit need two, and those of a limit before it two more.
const MOST: usize = 4;

/// What somebody may spend until an instant, and what that is worth.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct LeasedPart {
    pub(in super::super) ends: u64,
    pub(in super::super) span: ExactDuration,
}

/// All of a bucket.
#[derive(Clone, Debug, Default)]
pub(in super::super) struct LeasedParts(SmallVec<[LeasedPart; MOST]>);

impl LeasedParts {
    /// What a state has, as it was written at that tempo.
    pub(in super::super) fn read(state: &State, pace: Rate, is_same_tempo: bool) -> Self {
        let read = |place: usize| {
            let at = drain_state::BYTES + BYTES * place;
            let (ends, micros, part) =
                (state.number::<7>(at)?, state.number::<7>(at + 7)?, state.number::<4>(at + 14)?);
            Some(LeasedPart { ends, span: pace.stored_duration(micros, part, is_same_tempo) })
        };
        Self((0..MOST).map_while(read).collect())
    }

    /// Pours what has ended into a bucket that will have drained at this instant, each when it ended, and until the bucket
    /// is full. What claims to end much later is of a clock that was wrong.
    pub(in super::super) fn pour_ended(
        &mut self,
        mut at: ExactDuration,
        now: Micros,
        pace: Rate,
        full: ExactDuration,
    ) -> ExactDuration {
        self.0.retain(|entry| {
            let latest = now + CLOCK_SLACK + MAX_LEASE_LIFETIME;
            let over = entry.ends <= now.get() || entry.ends > latest.get();
            if over {
                let since = ExactDuration { micros: entry.ends.min(now.get()), fraction: 0 };
                at = pace.add(at.max(since), entry.span).min(at.max(pace.add(since, full)));
            }
            !over
        });
        at
    }

    /// The limit was changed: what is held of the old one is as large a part of the new one.
    pub(in super::super) fn scale(&mut self, from: DrainTime, to: DrainTime, full: ExactDuration) {
        for entry in &mut self.0 {
            let micros = from.scale(Micros::new(entry.span.micros), to).get();
            entry.span = ExactDuration { micros: micros.min(full.micros), fraction: 0 };
        }
    }

    /// Puts something in. There is no room for it when there are too many instants already.
    pub(in super::super) fn add(&mut self, ends: u64, span: ExactDuration, pace: Rate) -> bool {
        if let Some(entry) = self.0.iter_mut().find(|entry| entry.ends == ends) {
            entry.span = pace.add(entry.span, span);
        } else if self.0.len() < MOST {
            self.0.push(LeasedPart { ends, span });
        } else {
            return false;
        }
        true
    }

    /// Takes out what was put in until that instant, if it is there.
    pub(in super::super) fn take(&mut self, ends: u64, span: ExactDuration, pace: Rate) {
        if let Some(entry) = self.0.iter_mut().find(|entry| entry.ends == ends) {
            entry.span = pace.subtract(entry.span, span);
        }
    }

    pub(in super::super) fn is_empty(&self) -> bool {
        self.0.iter().all(|entry| entry.span == ExactDuration::default())
    }

    /// The first to end first.
    pub(in super::super) fn by_end(&self) -> SmallVec<[LeasedPart; MOST]> {
        let mut entries = self.0.clone();
        entries.sort_unstable_by_key(|entry| entry.ends);
        entries
    }

    /// All of it.
    pub(in super::super) fn sum(&self, pace: Rate) -> ExactDuration {
        self.0.iter().fold(ExactDuration::default(), |sum, entry| pace.add(sum, entry.span))
    }

    /// Behind the bucket.
    pub(in super::super) fn write(&self, state: &mut State) {
        for LeasedPart { ends, span } in self.0.iter().filter(|entry| entry.span != ExactDuration::default()) {
            state.push::<7>(*ends);
            state.push::<7>(span.micros);
            state.push::<4>(span.fraction);
        }
    }
}
