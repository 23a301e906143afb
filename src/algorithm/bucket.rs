//! The arithmetic of token bucket, leaky bucket and GCRA, which are one: a bucket drains at the limit's pace, every
//! hit pours a drop in, and what would overflow is refused. What is remembered is when the bucket will have drained
//! (GCRA's theoretical arrival time), so nothing has to run while nobody asks.
//!
//! The instant is exact: whole microseconds and a fraction in parts of the limit's own ([`Pace`]). The time that a
//! full bucket takes to drain stands beside it, so that a changed limit is noticed and the level scaled: a bucket
//! that was half full is half full. Behind it stands what is out on lease, if anything ([`super::escrow`]).

use smallvec::smallvec;

use super::{
    Action, Arguments, Ask, CLOCK_SLACK, Decision, LONGEST, MAX, Micros, Quota, State,
    drain::{self, Drain, Stored},
    escrow::{Entries, LONGEST_LIFE},
    pace::{Pace, Span},
    tempo::Tempo,
};

/// A bucket with its pace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bucket {
    pace: Pace,
    quota: Quota,
    /// Hits that need not wait.
    at_once: u64,
    count_denied: bool,
    /// What is refused counts above the brim, too: hits that have passed elsewhere.
    in_debt: bool,
    /// Until a full bucket has drained.
    full: Span,
    /// The same as it stands in the state.
    tempo: Tempo,
    /// For those who take in advance: the grid of time on which leases end.
    grid: Option<Micros>,
}

/// What a bucket holds.
struct Level {
    /// When it will have drained: not before now.
    at: Span,
    escrow: Entries,
    /// All that is in escrow.
    out: Span,
    changed: bool,
}

/// A lease ends after two steps of the grid at most: a second, or a quarter of the time that a full bucket takes to
/// drain. What is out does not drain, so a lease that lived as long as that could take all of a burst from others.
const STEPS_OF_FULL: u64 = 8;
/// A lease that ends sooner is over before its answer has come.
const SHORTEST_STEP: Micros = Micros::new(1_000);

impl Bucket {
    pub(super) const ARGUMENTS: &'static [&'static str] =
        &["charge", "charge_part", "full", "full_part", "parts", "slack", "mantissa", "exponent", "count_denied"];
    pub(super) const SCRIPT: &'static str =
        concat!("local grid, room, room_part = 0, full, full_part\n", include_str!("bucket.lua"));

    /// The same for those who take in advance.
    pub(super) const LEASE_ARGUMENTS: &'static [&'static str] = &[
        "charge",
        "charge_part",
        "full",
        "full_part",
        "parts",
        "slack",
        "mantissa",
        "exponent",
        "count_denied",
        "grid",
        "room",
        "room_part",
    ];
    pub(super) const LEASE_SCRIPT: &'static str = include_str!("bucket.lua");

    /// `requests` hits per window drain, `quota` hits fit in, and those above `at_once` are told to wait. `None` for no
    /// requests, no room, or a bucket that takes longer than [`LONGEST`] to drain.
    pub(super) fn new(requests: u32, window: Micros, quota: Quota, at_once: u64, count_denied: bool) -> Option<Self> {
        let pace = Pace::new(requests, window)?;
        let full = pace.span(quota.ceiling());
        let fits = quota.limit() > 0 && full.ceil() <= LONGEST && window <= LONGEST;
        fits.then(|| Self {
            pace,
            quota,
            at_once,
            count_denied,
            in_debt: false,
            full,
            tempo: Tempo::new(full.ceil()),
            grid: None,
        })
    }

    /// The same bucket for those who take in advance: up to the limit, and not above where it is soft. `None` where hits
    /// are told to wait, as nobody knows how long when they are spent later, and where it drains too soon.
    pub(super) fn leasing(&self) -> Option<Self> {
        let grid = Micros::new((self.full.micros / STEPS_OF_FULL).min(LONGEST_LIFE.get() / 2));
        let fits = self.at_once == self.quota.ceiling() && grid >= SHORTEST_STEP;
        fits.then_some(Self { count_denied: false, grid: Some(grid), ..*self })
    }

    /// The same bucket for hits that have passed elsewhere.
    pub(super) fn counting(&self) -> Self {
        Self { count_denied: true, in_debt: true, ..*self }
    }

    /// When a lease ends that was taken at this instant.
    pub(super) fn lease_ends(&self, taken: Micros) -> Micros {
        self.grid.map_or(taken, |grid| taken - taken % grid + grid + grid)
    }

    pub(super) fn lease_life(&self) -> Micros {
        self.grid.unwrap_or_default()
    }

    /// What has to hold all that is taken.
    fn room(&self) -> Span {
        if self.grid.is_some() { self.pace.span(self.quota.limit()) } else { self.full }
    }

    /// More than fits in is refused whatever it is, so it need not be known exactly.
    fn charge(&self, cost: u64) -> Span {
        self.pace.span(cost.min(self.quota.ceiling() + 1))
    }

    pub(super) fn arguments(&self, ask: Ask) -> Arguments {
        let (charge, full, parts) = (self.charge(ask.cost), self.full, self.pace.parts());
        let Tempo { mantissa, exponent } = self.tempo;
        let (slack, denied) = (CLOCK_SLACK.get(), u64::from(self.count_denied) + u64::from(self.in_debt));
        let mut arguments: Arguments = smallvec![
            charge.micros,
            charge.part,
            full.micros,
            full.part,
            parts,
            slack,
            mantissa.into(),
            exponent.into(),
            denied
        ];
        if let Some(grid) = self.grid {
            let room = self.room();
            arguments.extend([grid.get(), room.micros, room.part]);
        }
        arguments
    }

    fn level(&self, state: &State, now: Micros) -> Level {
        let empty = Span { micros: now.get(), part: 0 };
        let (mut level, stored) = (
            Level { at: empty, escrow: Entries::default(), out: Span::default(), changed: false },
            Stored::read(state),
        );
        let Some(mut stored) = stored else {
            return level;
        };
        if state.as_bytes().len() > drain::BYTES {
            let is_same = stored.tempo == self.tempo;
            level.escrow = Entries::read(state, self.pace, is_same);
            let at = self.pace.stored(stored.micros, stored.part, is_same);
            // How full one could be before the limit was changed is not known, and does not matter.
            let full = if is_same { self.full } else { Span { micros: MAX, part: 0 } };
            let at = level.escrow.pour_ended(at, now, self.pace, full);
            (stored.micros, stored.part) = (at.micros, at.part);
            if !is_same {
                level.escrow.scale(stored.tempo, self.tempo, self.full);
                level.changed = true;
            }
            level.out = level.escrow.sum(self.pace);
        }
        let drain = Drain::of(stored, now, self.pace, self.full, self.tempo);
        Level { at: drain.at, changed: level.changed || drain.changed, ..level }
    }

    pub(super) fn step(&self, state: &mut State, ask: Ask) -> bool {
        let now = Span { micros: ask.now.get(), part: 0 };
        let Level { mut at, mut escrow, out, mut changed } = self.level(state, ask.now);
        let charge = self.charge(ask.cost);
        let mut allowed = true;
        if ask.action.gives() {
            changed |= at > now || !escrow.is_empty();
            at = self.pace.subtract(at, self.comes_back(charge, ask, &mut escrow)).max(now);
        } else {
            let held = self.pace.add(now, self.room());
            let mut after = self.pace.add(at, charge);
            allowed = self.pace.add(after, out) <= held;
            if !allowed {
                let brim = self.pace.add(now, self.full);
                // More debt than that would look like a clock that was wrong.
                let deepest = Span { micros: brim.micros + CLOCK_SLACK.get(), part: 0 };
                after = if self.in_debt { after.min(deepest) } else { self.pace.subtract(brim, out) }.max(at);
            }
            if ask.action == Action::Take && (allowed || self.count_denied) {
                match self.grid {
                    Some(_) => allowed = escrow.add(self.lease_ends(ask.now).get(), charge, self.pace),
                    None => at = after,
                }
                changed = true;
            }
        }
        if changed && (at > now || !escrow.is_empty()) {
            Drain::write(at, self.tempo, state);
            escrow.write(state);
        } else if changed {
            state.clear();
        }
        allowed
    }

    /// What goes out of the bucket for a cost that is given back. What is still in escrow goes out of that.
    fn comes_back(&self, charge: Span, ask: Ask, escrow: &mut Entries) -> Span {
        let Action::Undo(taken) = ask.action else {
            return charge;
        };
        let ends = if self.grid.is_some() { self.lease_ends(taken) } else { taken };
        if self.grid.is_some() && ends > ask.now {
            escrow.take(ends.get(), charge, self.pace);
            return Span::default();
        }
        // The bucket has it since then.
        self.pace.not_drained(charge, Ask { action: Action::Undo(ends), ..ask })
    }

    /// How long until what is in the bucket and in escrow together has come down to this, if nobody else asks.
    fn until(&self, level: &Level, now: Micros, room: Span) -> Micros {
        let mut bucket = self.pace.subtract(level.at, Span { micros: now.get(), part: 0 });
        let (mut out, mut passed) = (level.out, 0);
        for entry in level.escrow.by_end() {
            let rest = Span { micros: entry.ends - now.get() - passed, part: 0 };
            let excess = self.pace.subtract(self.pace.add(bucket, out), room);
            if excess <= bucket.min(rest) {
                return Micros::new(passed) + excess.ceil();
            }
            bucket = self.pace.add(self.pace.subtract(bucket, rest), entry.span);
            out = self.pace.subtract(out, entry.span);
            passed += rest.micros;
        }
        Micros::new(passed) + self.pace.subtract(bucket, room).ceil()
    }

    pub(super) fn explain(&self, state: &State, ask: Ask, allowed: bool) -> Decision {
        let now = Span { micros: ask.now.get(), part: 0 };
        let level = self.level(state, ask.now);
        let used = self.pace.add(self.pace.subtract(level.at, now), level.out);
        let charge = self.charge(ask.cost);
        // What a look asks about is not poured in.
        let after = if ask.action == Action::Peek { self.pace.add(used, charge) } else { used };
        let limit = self.pace.span(self.quota.limit());
        let remaining = self.pace.hits(self.pace.subtract(limit, used));
        let until = |room: Span| self.until(&level, ask.now, room);
        let more = self.pace.subtract(limit, self.pace.span(remaining + 1));
        let possible = ask.cost <= if self.grid.is_some() { self.quota.limit() } else { self.quota.ceiling() };
        Decision {
            allowed,
            soft: allowed && !ask.action.gives() && after > limit,
            remaining,
            used: self.pace.hits_begun(used),
            reset: until(Span::default()),
            next: if remaining < self.quota.limit() { until(more) } else { Micros::ZERO },
            retry_after: (!allowed && possible).then(|| until(self.pace.subtract(self.room(), charge))),
            delay: if allowed && !ask.action.gives() {
                self.pace.subtract(after, self.pace.span(self.at_once)).ceil()
            } else {
                Micros::ZERO
            },
            ..Decision::default()
        }
    }

    pub(super) const fn counts_denied(&self) -> bool {
        self.count_denied
    }

    pub(super) fn expires(&self, state: &State, now: Micros) -> Micros {
        now + self.until(&self.level(state, now), now, Span::default())
    }
}
