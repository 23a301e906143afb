//! [`Penalty`]: a time in which every hit is denied, because the entity has exceeded its limit.
//!
//! A take begins a penalty if none is in force, and changes nothing otherwise. A peek is allowed unless one is in force. The
//! first penalty has the shortest length. The next one is twice as long as the last one, up to the longest length, if
//! the time between the two is less than the length of the last one. Otherwise it has the shortest length as well.
//!
//! The state is the end of the last penalty (7 bytes, microseconds since the Unix epoch) and its length (7 bytes).

use smallvec::smallvec;

use super::{Action, Arguments, CLOCK_SLACK, CounterProgram, Decision, MAX_PERIOD, Micros, Operation, State};

/// A program that denies all hits for a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Penalty {
    shortest: Micros,
    longest: Micros,
}

/// The last penalty of an entity.
#[derive(Clone, Copy)]
struct Last {
    end: Micros,
    length: Micros,
}

impl Last {
    fn read(state: &State) -> Option<Self> {
        let end = Micros::new(state.number::<7>(0)?);
        let length = Micros::new(state.number::<7>(7)?);
        Some(Self { end, length })
    }

    fn write(self, state: &mut State) {
        state.clear();
        state.push::<7>(self.end.get());
        state.push::<7>(self.length.get());
    }

    /// Returns whether a penalty that begins now is twice as long as this one, up to the longest length.
    fn is_recent(self, now: Micros) -> bool {
        now < self.end + self.length
    }
}

impl Penalty {
    /// Creates penalties of these lengths; `None` if one is zero or longer than [`MAX_PERIOD`], or if `longest` is less than
    /// `shortest`.
    #[must_use]
    pub fn new(shortest: Micros, longest: Micros) -> Option<Self> {
        if shortest == Micros::ZERO || longest < shortest || longest > MAX_PERIOD {
            return None;
        }
        Some(Self { shortest, longest })
    }

    /// Returns the length of a first penalty.
    #[must_use]
    pub const fn shortest(&self) -> Micros {
        self.shortest
    }

    /// Returns the length up to which penalties are doubled.
    #[must_use]
    pub const fn longest(&self) -> Micros {
        self.longest
    }

    /// Returns the last penalty, unless it begins so much later than now that a wrong clock has written it.
    fn last(state: &State, now: Micros) -> Option<Last> {
        Last::read(state).filter(|last| last.end <= now + CLOCK_SLACK + last.length)
    }

    /// Returns the time until the penalty in force ends, zero if there is none.
    #[must_use]
    pub fn time_left(state: &State, now: Micros) -> Micros {
        match Self::last(state, now) {
            Some(last) => last.end - now,
            None => Micros::ZERO,
        }
    }

    /// Returns the length of a penalty that begins now.
    fn next_length(self, state: &State, now: Micros) -> Micros {
        match Self::last(state, now) {
            Some(last) if last.is_recent(now) => (last.length + last.length).min(self.longest).max(self.shortest),
            _ => self.shortest,
        }
    }

    /// Restores the state before the last penalty, as far as it is known, if this penalty began at `taken`.
    fn undo(self, state: &mut State, taken: Micros) {
        let Some(last) = Last::read(state) else {
            return;
        };
        if last.end != taken + last.length {
            return;
        }
        if last.length <= self.shortest {
            state.clear();
            return;
        }
        let length = Micros::new(last.length.get() / 2).max(self.shortest);
        Last { end: taken, length }.write(state);
    }
}

impl CounterProgram for Penalty {
    const TAG: &'static str = "pen";
    const SCRIPT: &'static str = include_str!("script.lua");
    const ARGUMENTS: &'static [&'static str] = &["shortest", "longest", "slack"];

    fn arguments(&self, _operation: Operation) -> Arguments {
        smallvec![self.shortest.get(), self.longest.get(), CLOCK_SLACK.get()]
    }

    fn step(&self, state: &mut State, operation: Operation) -> bool {
        let now = operation.now;
        match operation.action {
            Action::Peek => Self::time_left(state, now) == Micros::ZERO,
            Action::Take => {
                if Self::time_left(state, now) > Micros::ZERO {
                    return false;
                }
                let length = self.next_length(state, now);
                Last { end: now + length, length }.write(state);
                true
            }
            Action::RollBack(taken) => {
                self.undo(state, taken);
                true
            }
            Action::Refund => true,
        }
    }

    fn explain(&self, state: &State, operation: Operation, allowed: bool) -> Decision {
        let time_left = Self::time_left(state, operation.now);
        Decision {
            allowed,
            used: u64::from(time_left > Micros::ZERO),
            reset: time_left,
            next: time_left,
            retry_after: if allowed { None } else { Some(time_left) },
            ..Decision::default()
        }
    }

    fn expires(&self, state: &State, now: Micros) -> Micros {
        match Self::last(state, now) {
            // Its length determines that of the next one.
            Some(last) if self.longest > self.shortest => last.end + last.length,
            Some(last) => last.end,
            None => now,
        }
    }
}

#[cfg(test)]
mod tests;
