//! [`Assignments`]: the share of a limit that each caller of Envoy's quota protocol may use, until a stated time.
//!
//! This is not a limit. Assignments are stored like counters, so that every store keeps them and all instances divide the
//! same limit. Shares and demands are millionths of the limit, so a change of the limit changes no state.
//!
//! Shares are max-min fair: a caller gets its demand, or as much as every other caller with an unmet demand (Bertsekas and
//! Gallager: *Data Networks*, section 6.5.2). As a rule, a share is reduced only in the last seconds of its assignment
//! ([`Assignments::REDUCTION_TIME`]), and until then the assignment is not extended. The caller may not have received
//! the smaller share, so it may use the former share until the former assignment ends, and the difference is not
//! assigned to others before. So at no time do all callers together have more than the limit.
//!
//! The state has an entry of 20 bytes for each caller: the end of its assignment (5, in hundredths of a second), the caller
//! (5), its demand (2, in units of 16 millionths), its share (3), its former share if that is larger (3), and how much
//! earlier than the assignment the former one ends (2, in hundredths of a second).

use smallvec::{SmallVec, smallvec};

use super::{Action, Arguments, CLOCK_SLACK, CounterProgram, Decision, Micros, Operation, State};

/// A program that assigns a share of a limit to one caller. A take replaces the caller's former assignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Assignments {
    ttl: Micros,
    caller: u64,
    held: u64,
}

/// The share of one caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Millionths of the limit.
    pub millionths: u64,
    /// Time until the assignment ends.
    pub lifetime: Micros,
    /// Time until another caller's assignment or former share ends, so that a part of it may be free, unless the
    /// assignment is extended before. `None` if the caller has its whole demand, or if there are no other callers.
    pub more_in: Option<Micros>,
}

const END_BYTES: usize = 5;
const CALLER_BYTES: usize = 5;
const DEMAND_BYTES: usize = 2;
const SHARE_BYTES: usize = 3;
const DIFFERENCE_BYTES: usize = 2;
const ENTRY_BYTES: usize = END_BYTES + CALLER_BYTES + DEMAND_BYTES + 2 * SHARE_BYTES + DIFFERENCE_BYTES;
/// Unit of the times in an entry, in microseconds.
const TIME_UNIT: u64 = 10_000;
/// Unit of the demand in an entry, in millionths of the limit.
const DEMAND_UNIT: u64 = 16;

/// The assignment of one caller. Times are in microseconds.
#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    end: u64,
    caller: u64,
    demand: u64,
    share: u64,
    /// The largest share of the former assignments if it is larger than `share`, otherwise 0.
    former_share: u64,
    /// When the former assignments end, not after `end`.
    former_end: u64,
}

impl Entry {
    fn read(bytes: &[u8; ENTRY_BYTES]) -> Self {
        let mut rest = bytes.as_slice();
        let end = take::<END_BYTES>(&mut rest) * TIME_UNIT;
        Self {
            end,
            caller: take::<CALLER_BYTES>(&mut rest),
            demand: take::<DEMAND_BYTES>(&mut rest) * DEMAND_UNIT,
            share: take::<SHARE_BYTES>(&mut rest),
            former_share: take::<SHARE_BYTES>(&mut rest),
            former_end: end.saturating_sub(take::<DIFFERENCE_BYTES>(&mut rest) * TIME_UNIT),
        }
    }

    fn write(&self, state: &mut State) {
        state.push::<END_BYTES>(self.end / TIME_UNIT);
        state.push::<CALLER_BYTES>(self.caller);
        state.push::<DEMAND_BYTES>(self.demand / DEMAND_UNIT);
        state.push::<SHARE_BYTES>(self.share);
        state.push::<SHARE_BYTES>(self.former_share);
        state.push::<DIFFERENCE_BYTES>((self.end - self.former_end) / TIME_UNIT);
    }

    /// Returns the largest share that the caller may use.
    fn usable(&self, now: Micros) -> u64 {
        if self.former_end > now.get() { self.share.max(self.former_share) } else { self.share }
    }
}

/// Removes the first `N` bytes, and returns them as a number.
fn take<const N: usize>(bytes: &mut &[u8]) -> u64 {
    let mut wide = [0; 8];
    if let Some((number, rest)) = bytes.split_first_chunk::<N>() {
        wide[..N].copy_from_slice(number);
        *bytes = rest;
    }
    u64::from_le_bytes(wide)
}

impl Assignments {
    /// The whole limit in millionths.
    pub const WHOLE: u64 = 1_000_000;
    /// Maximum lifetime of an assignment: five minutes.
    pub const MAX_TTL: Micros = Micros::from_secs(300);
    /// Maximum number of callers of one limit; further callers are denied.
    pub const MAX_CALLERS: usize = 1_000;
    /// Time before the end of an assignment in which its share can be reduced.
    pub const REDUCTION_TIME: Micros = Micros::from_secs(5);

    /// Divisor for the headroom: a share exceeds its caller's demand by at most a quarter, if no caller demands it.
    const HEADROOM_DIVISOR: u64 = 4;
    /// Divisor for the minimum demand: the minimum demands of all callers add up to the 64th part of the limit.
    const IDLE_DIVISOR: u64 = 64;

    /// Creates an assignment without a caller. A lifetime above [`Self::MAX_TTL`] is shortened.
    #[must_use]
    pub fn new(ttl: Micros) -> Self {
        Self { ttl: ttl.min(Self::MAX_TTL), caller: 0, held: 0 }
    }

    /// Sets the caller, of which the lowest 40 bits are used.
    #[must_use]
    pub fn with_caller(self, caller: u64) -> Self {
        Self { caller: caller & ((1 << (8 * CALLER_BYTES)) - 1), ..self }
    }

    /// Sets the share that the caller has by its last assignment, in millionths; 0 without one. If the state does not
    /// contain that assignment, because the store was emptied, the caller gets at most this share: others may not have
    /// renewed theirs.
    #[must_use]
    pub fn with_held(self, share: u64) -> Self {
        Self { held: share.min(Self::WHOLE), ..self }
    }

    /// Returns the caller's share from a decision of this program.
    #[must_use]
    pub fn read(decision: &Decision) -> Share {
        Share { millionths: decision.used, lifetime: decision.next, more_in: decision.retry_after }
    }

    /// Returns the number of callers in a state, and the millionths of the limit that they can use. Returns `None` if there
    /// are none.
    #[must_use]
    pub fn assigned(state: &State, now: Micros) -> Option<(u32, u64)> {
        let mut callers = 0;
        let mut assigned = 0;
        for entry in Self::valid(state, now) {
            callers += 1;
            assigned += entry.usable(now);
        }
        if callers > 0 { Some((callers, assigned)) } else { None }
    }

    /// Returns the entries that have not ended.
    fn valid(state: &State, now: Micros) -> impl Iterator<Item = Entry> {
        Self::valid_bytes(state, now).map(|(entry, _)| entry)
    }

    /// Returns the entries that have not ended, with their bytes.
    fn valid_bytes(state: &State, now: Micros) -> impl Iterator<Item = (Entry, &[u8; ENTRY_BYTES])> {
        let max_end = (now + Self::MAX_TTL + CLOCK_SLACK).get();
        let (entries, _) = state.as_bytes().as_chunks();
        let entries = entries.iter().map(|bytes| (Entry::read(bytes), bytes));
        entries.filter(move |(entry, _)| entry.end > now.get() && entry.end <= max_end)
    }

    /// Returns the share in millionths of each caller with an unmet demand; [`Self::WHOLE`] if all demands are met.
    fn fair_share(demands: &mut [u64]) -> u64 {
        demands.sort_unstable();
        let mut rest = Self::WHOLE;
        for (index, demand) in demands.iter().enumerate() {
            let level = rest / (demands.len() - index) as u64;
            if *demand > level {
                return level;
            }
            rest -= demand;
        }
        Self::WHOLE
    }

    /// Returns the next share of a caller, in millionths of the limit. `fair` is the share of a caller with an unmet
    /// demand, `spare` each caller's part of the share that no caller demands, `current` the caller's share until now, and
    /// `free` the share that is not assigned to others.
    ///
    /// A share close to its target is not changed, because other callers can use a reduced share only later.
    fn share(demand: u64, fair: u64, spare: u64, current: u64, free: u64) -> u64 {
        let met = demand.min(fair);
        let target = met + spare.min(met / Self::HEADROOM_DIVISOR);
        let tolerance = if demand > fair || target > current { target / 128 } else { target / 8 };
        if current <= free && target.abs_diff(current) <= tolerance { current } else { target.min(free) }
    }
}

impl CounterProgram for Assignments {
    const TAG: &'static str = "as";
    const SCRIPT: &'static str = include_str!("script.lua");
    const ARGUMENTS: &'static [&'static str] = &[
        "demand",
        "ttl",
        "reduction_time",
        "max_end_ahead",
        "max_callers",
        "caller",
        "held",
        "whole",
        "headroom_divisor",
        "idle_divisor",
        "time_unit",
        "demand_unit",
    ];

    fn arguments(&self, operation: Operation) -> Arguments {
        let max_end_ahead = (Self::MAX_TTL + CLOCK_SLACK).get();
        smallvec![
            operation.cost.min(Self::WHOLE),
            self.ttl.get(),
            Self::REDUCTION_TIME.get(),
            max_end_ahead,
            Self::MAX_CALLERS as u64,
            self.caller,
            self.held,
            Self::WHOLE,
            Self::HEADROOM_DIVISOR,
            Self::IDLE_DIVISOR,
            TIME_UNIT,
            DEMAND_UNIT
        ]
    }

    fn step(&self, state: &mut State, operation: Operation) -> bool {
        if operation.action == Action::Peek {
            return true;
        }
        let now = operation.now;
        let mut others = SmallVec::<[u8; ENTRY_BYTES]>::with_capacity(state.as_bytes().len());
        let mut own = None;
        let mut demands = SmallVec::<[u64; 4]>::new();
        let mut assigned = 0;
        for (entry, bytes) in Self::valid_bytes(state, now) {
            if entry.caller == self.caller {
                own.get_or_insert(entry);
            } else {
                others.extend_from_slice(bytes);
                demands.push(entry.demand);
                assigned += entry.usable(now);
            }
        }
        let callers = demands.len() as u64 + 1;
        let takes = operation.action == Action::Take;
        if own.is_none() && (!takes || callers > Self::MAX_CALLERS as u64) {
            return !takes;
        }
        let end = (now + self.ttl).get().next_multiple_of(TIME_UNIT);
        let current = own.unwrap_or(Entry { end, share: self.held, former_end: end, ..Entry::default() });
        let idle = Self::WHOLE / (Self::IDLE_DIVISOR * callers);
        let demand = if takes { operation.cost.clamp(idle, Self::WHOLE).next_multiple_of(DEMAND_UNIT) } else { 0 };
        demands.push(demand);
        let fair = Self::fair_share(&mut demands);
        let met: u64 = demands.iter().map(|demand| fair.min(*demand)).sum();
        let spare = Self::WHOLE.saturating_sub(met) / callers;
        let free = Self::WHOLE.saturating_sub(assigned);
        let share = Self::share(demand, fair, spare, current.share, free);
        let share = if own.is_none() && self.held > 0 { share.min(self.held) } else { share };
        let lasts = own.is_some() && takes && current.end >= (now + Self::REDUCTION_TIME).get();
        let next = if share < current.share && current.share <= free && lasts {
            Entry { demand, ..current }
        } else {
            let usable = current.usable(now);
            let mut former_share = 0;
            let mut former_end = end;
            if usable > share {
                former_share = usable;
                former_end = if share < current.share { current.end } else { current.former_end };
            }
            // The former assignment ends later if the clocks of instances differ.
            let end = end.max(former_end);
            Entry { end, caller: self.caller, demand, share, former_share, former_end }
        };
        state.clear();
        state.append(&others);
        next.write(state);
        true
    }

    /// Encodes the caller's share in a decision, for [`Assignments::read`]. `limit` is the number of callers.
    fn explain(&self, state: &State, operation: Operation, allowed: bool) -> Decision {
        let now = operation.now;
        let mut callers = 0;
        let mut last_end = 0;
        let mut own = Entry::default();
        let mut more_at = u64::MAX;
        for entry in Self::valid(state, now) {
            callers += 1;
            last_end = entry.end.max(last_end);
            if entry.caller == self.caller {
                own = entry;
            } else {
                more_at = more_at.min(if entry.usable(now) > entry.share { entry.former_end } else { entry.end });
            }
        }
        let wants_more = own.share < own.demand && more_at < u64::MAX;
        Decision {
            allowed,
            used: own.share,
            limit: Some(callers),
            next: Micros::new(own.end) - now,
            reset: Micros::new(last_end) - now,
            retry_after: if wants_more { Some(Micros::new(more_at) - now) } else { None },
            ..Decision::default()
        }
    }

    /// Returns `true`, because other assignments may end at any moment.
    fn denial_counts(&self, _state: &State, _now: Micros) -> bool {
        true
    }

    fn expires(&self, state: &State, now: Micros) -> Micros {
        Micros::new(Self::valid(state, now).map(|entry| entry.end).max().unwrap_or(now.get()))
    }
}

#[cfg(test)]
mod tests;
