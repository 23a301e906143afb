//! The arithmetic of token bucket, leaky bucket and GCRA, which are one: a bucket drains at the limit's pace, every
//! hit pours a drop in, and what would overflow is refused. What is remembered is when the bucket will have drained
//! (GCRA's theoretical arrival time), so nothing has to run while nobody asks.
//!
//! The instant is exact: whole microseconds and a fraction in parts of the limit's own ([`Pace`]). The time that a
//! full bucket takes to drain stands beside it, so that a changed limit is noticed and the level scaled: a bucket
//! that was half full is half full. Behind it stands what is out on lease, if anything ([`super::escrow`]).

use smallvec::smallvec;

use super::{
    Action, Arguments, CLOCK_SLACK, Decision, MAX, MAX_PERIOD, MaxHits, Micros, Operation, State,
    drain_state::{self, DrainState, StoredDrain},
    drain_time::DrainTime,
    leased_bucket::{LeasedParts, MAX_LEASE_LIFETIME},
    rate::{ExactDuration, Rate},
};

/// A bucket with its pace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bucket {
    rate: Rate,
    max_hits: MaxHits,
    /// Hits that need not wait.
    immediate: u64,
    count_denied: bool,
    /// What is refused counts above the brim, too: hits that have passed elsewhere.
    in_debt: bool,
    /// Until a full bucket has drained.
    full_drain: ExactDuration,
    /// The same as it stands in the state.
    drain_time: DrainTime,
    /// For those who take in advance: the grid of time on which leases end.
    lease_grid: Option<Micros>,
}

/// What a bucket holds.
struct BucketState {
    /// When it will have drained: not before now.
    at: ExactDuration,
    leased: LeasedParts,
    /// All that is in escrow.
    leased_total: ExactDuration,
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
    pub(super) fn new(requests: u32, window: Micros, quota: MaxHits, at_once: u64, count_denied: bool) -> Option<Self> {
        let pace = Rate::new(requests, window)?;
        let full = pace.duration_of(quota.ceiling());
        let fits = quota.limit() > 0 && full.ceil() <= MAX_PERIOD && window <= MAX_PERIOD;
        fits.then(|| Self {
            rate: pace,
            max_hits: quota,
            immediate: at_once,
            count_denied,
            in_debt: false,
            full_drain: full,
            drain_time: DrainTime::new(full.ceil()),
            lease_grid: None,
        })
    }

    /// The same bucket for those who take in advance: up to the limit, and not above where it is soft. `None` where hits
    /// are told to wait, as nobody knows how long when they are spent later, and where it drains too soon.
    pub(super) fn leasing(&self) -> Option<Self> {
        let grid = Micros::new((self.full_drain.micros / STEPS_OF_FULL).min(MAX_LEASE_LIFETIME.get() / 2));
        let fits = self.immediate == self.max_hits.ceiling() && grid >= SHORTEST_STEP;
        fits.then_some(Self { count_denied: false, lease_grid: Some(grid), ..*self })
    }

    /// The same bucket for hits that have passed elsewhere.
    pub(super) fn counting(&self) -> Self {
        Self { count_denied: true, in_debt: true, ..*self }
    }

    /// When a lease ends that was taken at this instant.
    pub(super) fn lease_ends(&self, taken: Micros) -> Micros {
        self.lease_grid.map_or(taken, |grid| taken - taken % grid + grid + grid)
    }

    pub(super) fn lease_lifetime(&self) -> Micros {
        self.lease_grid.unwrap_or_default()
    }

    /// What has to hold all that is taken.
    fn room(&self) -> ExactDuration {
        if self.lease_grid.is_some() { self.rate.duration_of(self.max_hits.limit()) } else { self.full_drain }
    }

    /// More than fits in is refused whatever it is, so it need not be known exactly.
    fn charge(&self, cost: u64) -> ExactDuration {
        self.rate.duration_of(cost.min(self.max_hits.ceiling() + 1))
    }

    pub(super) fn arguments(&self, ask: Operation) -> Arguments {
        let (charge, full, parts) = (self.charge(ask.cost), self.full_drain, self.rate.parts());
        let DrainTime { mantissa, exponent } = self.drain_time;
        let (slack, denied) = (CLOCK_SLACK.get(), u64::from(self.count_denied) + u64::from(self.in_debt));
        let mut arguments: Arguments = smallvec![
            charge.micros,
            charge.fraction,
            full.micros,
            full.fraction,
            parts,
            slack,
            mantissa.into(),
            exponent.into(),
            denied
        ];
        if let Some(grid) = self.lease_grid {
            let room = self.room();
            arguments.extend([grid.get(), room.micros, room.fraction]);
        }
        arguments
    }

    fn level(&self, state: &State, now: Micros) -> BucketState {
        let empty = ExactDuration { micros: now.get(), fraction: 0 };
        let (mut level, stored) = (
            BucketState {
                at: empty,
                leased: LeasedParts::default(),
                leased_total: ExactDuration::default(),
                changed: false,
            },
            StoredDrain::read(state),
        );
        let Some(mut stored) = stored else {
            return level;
        };
        if state.as_bytes().len() > drain_state::BYTES {
            let is_same = stored.drain_time == self.drain_time;
            level.leased = LeasedParts::read(state, self.rate, is_same);
            let at = self.rate.stored_duration(stored.micros, stored.part, is_same);
            // How full one could be before the limit was changed is not known, and does not matter.
            let full = if is_same { self.full_drain } else { ExactDuration { micros: MAX, fraction: 0 } };
            let at = level.leased.pour_ended(at, now, self.rate, full);
            (stored.micros, stored.part) = (at.micros, at.fraction);
            if !is_same {
                level.leased.scale(stored.drain_time, self.drain_time, self.full_drain);
                level.changed = true;
            }
            level.leased_total = level.leased.sum(self.rate);
        }
        let drain = DrainState::of(stored, now, self.rate, self.full_drain, self.drain_time);
        BucketState { at: drain.at, changed: level.changed || drain.changed, ..level }
    }

    pub(super) fn step(&self, state: &mut State, ask: Operation) -> bool {
        let now = ExactDuration { micros: ask.now.get(), fraction: 0 };
        let BucketState { mut at, leased: mut escrow, leased_total: out, mut changed } = self.level(state, ask.now);
        let charge = self.charge(ask.cost);
        let mut allowed = true;
        if ask.action.releases() {
            changed |= at > now || !escrow.is_empty();
            at = self.rate.subtract(at, self.free_after(charge, ask, &mut escrow)).max(now);
        } else {
            let held = self.rate.add(now, self.room());
            let mut after = self.rate.add(at, charge);
            allowed = self.rate.add(after, out) <= held;
            if !allowed {
                let brim = self.rate.add(now, self.full_drain);
                // More debt than that would look like a clock that was wrong.
                let deepest = ExactDuration { micros: brim.micros + CLOCK_SLACK.get(), fraction: 0 };
                after = if self.in_debt { after.min(deepest) } else { self.rate.subtract(brim, out) }.max(at);
            }
            if ask.action == Action::Take && (allowed || self.count_denied) {
                match self.lease_grid {
                    Some(_) => allowed = escrow.add(self.lease_ends(ask.now).get(), charge, self.rate),
                    None => at = after,
                }
                changed = true;
            }
        }
        if changed && (at > now || !escrow.is_empty()) {
            DrainState::write(at, self.drain_time, state);
            escrow.write(state);
        } else if changed {
            state.clear();
        }
        allowed
    }

    /// What goes out of the bucket for a cost that is given back. What is still in escrow goes out of that.
    fn free_after(&self, charge: ExactDuration, ask: Operation, escrow: &mut LeasedParts) -> ExactDuration {
        let Action::RollBack(taken) = ask.action else {
            return charge;
        };
        let ends = if self.lease_grid.is_some() { self.lease_ends(taken) } else { taken };
        if self.lease_grid.is_some() && ends > ask.now {
            escrow.take(ends.get(), charge, self.rate);
            return ExactDuration::default();
        }
        // The bucket has it since then.
        self.rate.not_drained(charge, Operation { action: Action::RollBack(ends), ..ask })
    }

    /// How long until what is in the bucket and in escrow together has come down to this, if nobody else asks.
    fn until(&self, level: &BucketState, now: Micros, room: ExactDuration) -> Micros {
        let mut bucket = self.rate.subtract(level.at, ExactDuration { micros: now.get(), fraction: 0 });
        let (mut out, mut passed) = (level.leased_total, 0);
        for entry in level.leased.by_end() {
            let rest = ExactDuration { micros: entry.ends - now.get() - passed, fraction: 0 };
            let excess = self.rate.subtract(self.rate.add(bucket, out), room);
            if excess <= bucket.min(rest) {
                return Micros::new(passed) + excess.ceil();
            }
            bucket = self.rate.add(self.rate.subtract(bucket, rest), entry.span);
            out = self.rate.subtract(out, entry.span);
            passed += rest.micros;
        }
        Micros::new(passed) + self.rate.subtract(bucket, room).ceil()
    }

    pub(super) fn explain(&self, state: &State, ask: Operation, allowed: bool) -> Decision {
        let now = ExactDuration { micros: ask.now.get(), fraction: 0 };
        let level = self.level(state, ask.now);
        let used = self.rate.add(self.rate.subtract(level.at, now), level.leased_total);
        let charge = self.charge(ask.cost);
        // What a look asks about is not poured in.
        let after = if ask.action == Action::Peek { self.rate.add(used, charge) } else { used };
        let limit = self.rate.duration_of(self.max_hits.limit());
        let remaining = self.rate.hits(self.rate.subtract(limit, used));
        let until = |room: ExactDuration| self.until(&level, ask.now, room);
        let more = self.rate.subtract(limit, self.rate.duration_of(remaining + 1));
        let possible =
            ask.cost <= if self.lease_grid.is_some() { self.max_hits.limit() } else { self.max_hits.ceiling() };
        Decision {
            allowed,
            soft: allowed && !ask.action.releases() && after > limit,
            remaining,
            used: self.rate.hits_started(used),
            reset: until(ExactDuration::default()),
            next: if remaining < self.max_hits.limit() { until(more) } else { Micros::ZERO },
            retry_after: (!allowed && possible).then(|| until(self.rate.subtract(self.room(), charge))),
            delay: if allowed && !ask.action.releases() {
                self.rate.subtract(after, self.rate.duration_of(self.immediate)).ceil()
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
        now + self.until(&self.level(state, now), now, ExactDuration::default())
    }
}
