//! [`Bucket`]: the common arithmetic of token bucket, leaky bucket and GCRA. A bucket drains at the limit's rate, every
//! hit adds to it, and hits that would make it overflow are denied. The state is the instant at which the bucket will
//! have drained (GCRA's theoretical arrival time), so nothing has to run between requests.
//!
//! The instant is exact: whole microseconds and a fraction in parts of the limit's [`Rate`]. The state
//! also contains the drain time of a full bucket. If it differs from that of the limit, the limit was changed, and the
//! level is scaled: a bucket that was half full stays half full. The last bytes of the state are hits that leases have
//! taken ([`leased_parts`]).

mod leased_parts;

use smallvec::smallvec;

use self::leased_parts::LeasedParts;
use super::{
    Action, Arguments, CLOCK_SLACK, Decision, LimitSpec, MAX_NUMBER, MAX_PERIOD, MaxHits, Micros, Operation, State,
    drain_state::{DrainState, Precision, StoredDrain},
    drain_time::DrainTime,
    rate::{ExactDuration, Rate},
};

/// Maximum lifetime of a lease of a bucket or a sliding log.
pub(super) const MAX_LEASE_LIFETIME: Micros = Micros::from_secs(1);

/// A bucket with its rate and its capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bucket {
    rate: Rate,
    precision: Precision,
    max_hits: MaxHits,
    /// Number of hits that are allowed without a delay.
    immediate: u64,
    count_denied: bool,
    /// Whether denied hits fill the bucket beyond its capacity, because they were allowed elsewhere.
    in_debt: bool,
    /// Number of used hits above which hits are owed and nothing is allowed, for buckets that may go into debt.
    free: Option<u64>,
    /// Drain time of a full bucket.
    full_drain: ExactDuration,
    /// Drain time of a full bucket, as the state contains it.
    drain_time: DrainTime,
    /// Step of the time grid on which leases end, for buckets that take leases.
    lease_grid: Option<Micros>,
}

/// The level of a bucket at an instant.
#[derive(Default)]
struct BucketState {
    /// Instant at which the bucket will have drained; not before now.
    drained_at: ExactDuration,
    leased: LeasedParts,
    /// Sum of the leased parts.
    leased_total: ExactDuration,
    changed: bool,
}

/// Number of steps of the lease grid per drain time of a full bucket.
///
/// A lease ends after at most two steps: 1 s, or a quarter of the drain time. Leased parts do not drain, so leases with
/// a lifetime of the whole drain time could take an entire burst from others.
const GRID_STEPS_PER_DRAIN: u64 = 8;
/// Minimum step of the lease grid: a shorter lease would have ended before the reply of the store arrives.
const MIN_GRID_STEP: Micros = Micros::new(1_000);

impl Bucket {
    /// Names of the arguments of [`Self::SCRIPT`] and [`Self::LONG_SCRIPT`].
    pub(super) const ARGUMENTS: &'static [&'static str] =
        &["charge", "charge_part", "full", "full_part", "parts", "slack", "mantissa", "exponent", "count_denied"];
    pub(super) const SCRIPT: &'static str = concat!(
        "local format, state_bytes = '<I7I4I4B', 16\n",
        "local grid, max_fill, max_fill_part, free, free_part = 0, full, full_part\n",
        include_str!("script.lua")
    );
    /// Script of buckets with long fractions ([`Precision::Long`]).
    pub(super) const LONG_SCRIPT: &'static str = concat!(
        "local format, state_bytes = '<I7I7I4B', 19\n",
        "local grid, max_fill, max_fill_part, free, free_part = 0, full, full_part\n",
        include_str!("script.lua")
    );

    /// Names of the arguments of [`Self::DEBT_SCRIPT`].
    pub(super) const DEBT_ARGUMENTS: &'static [&'static str] = &[
        "charge",
        "charge_part",
        "full",
        "full_part",
        "parts",
        "slack",
        "mantissa",
        "exponent",
        "count_denied",
        "free",
        "free_part",
    ];
    /// Script of buckets that may go into debt, which always have long fractions ([`Precision::Long`]).
    pub(super) const DEBT_SCRIPT: &'static str = concat!(
        "local format, state_bytes = '<I7I7I4B', 19\n",
        "local grid, max_fill, max_fill_part = 0, full, full_part\n",
        include_str!("script.lua")
    );

    /// Arguments of buckets that take leases.
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
        "max_fill",
        "max_fill_part",
    ];
    pub(super) const LEASE_SCRIPT: &'static str =
        concat!("local format, state_bytes = '<I7I4I4B', 16\n", "local free, free_part\n", include_str!("script.lua"));

    /// Creates a bucket that drains `requests` hits per window and holds `max_hits`. Hits above `immediate` are
    /// delayed.
    ///
    /// Returns `None` if `requests` or the limit is 0, or if the window or the drain time exceeds [`MAX_PERIOD`].
    pub(super) fn new(
        requests: u32,
        window: Micros,
        max_hits: MaxHits,
        immediate: u64,
        count_denied: bool,
    ) -> Option<Self> {
        Self::with_precision(Precision::Short, requests.into(), window, max_hits.short(), immediate, count_denied)
    }

    /// Creates a bucket with long fractions ([`Precision::Long`]) that delays no hits.
    ///
    /// Returns `None` where [`Self::new`] does, and for more requests than [`MAX_NUMBER`]: sums of fractions are exact below.
    pub(super) fn large(requests: u64, window: Micros, max_hits: MaxHits, count_denied: bool) -> Option<Self> {
        Self::with_precision(Precision::Long, requests, window, max_hits, max_hits.ceiling(), count_denied)
    }

    fn with_precision(
        precision: Precision,
        requests: u64,
        window: Micros,
        max_hits: MaxHits,
        immediate: u64,
        count_denied: bool,
    ) -> Option<Self> {
        if requests > MAX_NUMBER {
            return None;
        }
        let rate = Rate::new(requests, window)?;
        let full = rate.duration_of(max_hits.ceiling());
        let fits = max_hits.limit() > 0 && full.ceil() <= MAX_PERIOD && window <= MAX_PERIOD;
        if !fits {
            return None;
        }
        Some(Self {
            rate,
            precision,
            max_hits,
            immediate,
            count_denied,
            in_debt: false,
            free: None,
            full_drain: full,
            drain_time: DrainTime::new(full.ceil()),
            lease_grid: None,
        })
    }

    /// Returns the same bucket with a debt: it allows nothing while more than `free` hits are used.
    pub(super) fn with_debt(self, free: u64) -> Self {
        Self { free: Some(free), ..self }
    }

    /// Returns the number of used hits above which hits are owed, if the bucket may go into debt.
    pub(super) fn free_hits(&self) -> Option<u64> {
        self.free
    }

    /// Returns whether hits are owed at this level.
    fn owes(&self, used: ExactDuration) -> bool {
        self.free.is_some_and(|free| used > self.rate.duration_of(free))
    }

    /// Returns the same bucket for taking leases, up to the limit without its soft part.
    ///
    /// Returns `None` if hits are delayed, because the delay of hits that are spent later is unknown, if the bucket
    /// drains too fast for a lease, or if its fractions are long, because those of leased parts are short.
    pub(super) fn leasing(&self) -> Option<Self> {
        let grid = Micros::new((self.full_drain.micros / GRID_STEPS_PER_DRAIN).min(MAX_LEASE_LIFETIME.get() / 2));
        let fits = self.immediate == self.max_hits.ceiling() && grid >= MIN_GRID_STEP;
        let fits = fits && self.precision == Precision::Short;
        fits.then_some(Self { count_denied: false, lease_grid: Some(grid), ..*self })
    }

    /// Returns the same bucket for hits that were allowed elsewhere.
    pub(super) fn recording(&self) -> Self {
        Self { count_denied: true, in_debt: true, ..*self }
    }

    /// Returns the end of a lease that was taken at `taken`.
    pub(super) fn lease_ends(&self, taken: Micros) -> Micros {
        match self.lease_grid {
            Some(grid) => taken - taken % grid + grid + grid,
            None => taken,
        }
    }

    pub(super) fn lease_lifetime(&self) -> Micros {
        self.lease_grid.unwrap_or_default()
    }

    /// Returns the level up to which hits are allowed, as a drain time.
    fn max_fill(&self) -> ExactDuration {
        if self.lease_grid.is_some() { self.fill_of(self.max_hits.limit()) } else { self.full_drain }
    }

    /// Returns the level of a bucket with this many hits, as a drain time.
    fn fill_of(&self, hits: u64) -> ExactDuration {
        // Most often all hits of a bucket.
        if hits == self.max_hits.ceiling() { self.full_drain } else { self.rate.duration_of(hits) }
    }

    /// Returns the drain time of a cost. A cost above the capacity is always denied, so it is capped.
    ///
    /// Hits that were allowed elsewhere are the sum of an interval, in which more than the capacity can drain. They are
    /// capped by the maximum debt.
    fn charge(&self, cost: u64) -> ExactDuration {
        if self.in_debt {
            return self.rate.duration_of(cost).min(self.max_debt());
        }
        self.rate.duration_of(cost.min(self.max_hits.ceiling() + 1))
    }

    /// Returns the maximum level, as a drain time, of a bucket for hits that were allowed elsewhere. A higher level
    /// would look as if a clock had been wrong.
    fn max_debt(&self) -> ExactDuration {
        ExactDuration { micros: self.full_drain.micros + CLOCK_SLACK.get(), fraction: 0 }
    }

    /// Returns the parameters from which the bucket is built; `None` if its queue has more than 32 bits. The bucket
    /// must not be one that takes leases.
    pub(super) fn spec(&self) -> Option<LimitSpec> {
        let (requests, window) = self.rate.hits_per_interval();
        let limit = self.max_hits.limit();
        let burst = self.immediate.min(limit);
        let queue = if burst < limit { Some(u32::try_from(limit - burst).ok()?) } else { None };
        Some(LimitSpec {
            requests,
            window,
            burst: Some(burst),
            queue,
            soft: self.max_hits.percent(),
            count_denied: Some(self.count_denied),
            ..LimitSpec::default()
        })
    }

    pub(super) fn arguments(&self, operation: Operation) -> Arguments {
        let charge = self.charge(operation.cost);
        let DrainTime { mantissa, exponent } = self.drain_time;
        let mut arguments: Arguments = smallvec![
            charge.micros,
            charge.fraction,
            self.full_drain.micros,
            self.full_drain.fraction,
            self.rate.parts(),
            CLOCK_SLACK.get(),
            mantissa.into(),
            exponent.into(),
            u64::from(self.count_denied) + u64::from(self.in_debt)
        ];
        if let Some(free) = self.free {
            let free = self.rate.duration_of(free);
            arguments.extend([free.micros, free.fraction]);
        }
        if let Some(grid) = self.lease_grid {
            let max_fill = self.max_fill();
            arguments.extend([grid.get(), max_fill.micros, max_fill.fraction]);
        }
        arguments
    }

    fn level(&self, state: &State, now: Micros) -> BucketState {
        let Some(stored) = StoredDrain::read(state, self.precision) else {
            let drained_at = ExactDuration { micros: now.get(), fraction: 0 };
            return BucketState { drained_at, ..BucketState::default() };
        };
        if self.precision == Precision::Short && state.as_bytes().len() > self.precision.state_bytes() {
            return self.level_with_leases(state, stored, now);
        }
        let drain = DrainState::of(stored, now, self.rate, self.full_drain, self.drain_time);
        BucketState { drained_at: drain.drained_at, changed: drain.changed, ..BucketState::default() }
    }

    /// Returns the level of a bucket with leased parts.
    #[cold]
    fn level_with_leases(&self, state: &State, mut stored: StoredDrain, now: Micros) -> BucketState {
        let is_same = stored.drain_time == self.drain_time;
        let mut leased = LeasedParts::read(state, self.rate, is_same);
        let at = self.rate.stored_duration(stored.micros, stored.fraction, is_same);
        // The capacity before the change of the limit is unknown and not needed.
        let full = if is_same { self.full_drain } else { ExactDuration { micros: MAX_NUMBER, fraction: 0 } };
        let at = leased.pour_ended(at, now, self.rate, full);
        stored.micros = at.micros;
        stored.fraction = at.fraction;
        if !is_same {
            leased.scale(stored.drain_time, self.drain_time);
        }
        let leased_total = leased.limit_sum(self.full_drain, self.rate);
        let drain = DrainState::of(stored, now, self.rate, self.full_drain, self.drain_time);
        BucketState { drained_at: drain.drained_at, leased, leased_total, changed: !is_same || drain.changed }
    }

    pub(super) fn step(&self, state: &mut State, operation: Operation) -> bool {
        let now = ExactDuration { micros: operation.now.get(), fraction: 0 };
        let BucketState { drained_at: mut at, mut leased, leased_total, mut changed } =
            self.level(state, operation.now);
        let charge = self.charge(operation.cost);
        let mut allowed = true;
        if operation.action.releases() {
            changed |= at > now || !leased.is_empty();
            at = self.rate.subtract(at, self.refund_duration(charge, operation, &mut leased)).max(now);
        } else {
            let max_at = self.rate.add(now, self.max_fill());
            let mut after = self.rate.add(at, charge);
            allowed = self.rate.add(after, leased_total) <= max_at && !self.owes(self.rate.subtract(at, now));
            if !allowed {
                let full = self.rate.add(now, self.full_drain);
                let max_debt = self.rate.add(now, self.max_debt());
                after = if self.in_debt { after.min(max_debt) } else { self.rate.subtract(full, leased_total) }.max(at);
            }
            if operation.action == Action::Take && (allowed || self.count_denied) {
                match self.lease_grid {
                    Some(_) => allowed = leased.add(self.lease_ends(operation.now).get(), charge, self.rate),
                    None => at = after,
                }
                changed = true;
            }
        }
        if changed && (at > now || !leased.is_empty()) {
            DrainState::write(at, self.drain_time, self.precision, state);
            leased.write(state);
        } else if changed {
            state.clear();
        }
        allowed
    }

    /// Returns how much of the level a refund or rollback removes. A part that is still leased is removed from the
    /// lease instead.
    fn refund_duration(&self, charge: ExactDuration, operation: Operation, leased: &mut LeasedParts) -> ExactDuration {
        let Action::RollBack(taken) = operation.action else {
            return charge;
        };
        let ends = if self.lease_grid.is_some() { self.lease_ends(taken) } else { taken };
        if self.lease_grid.is_some() && ends > operation.now {
            leased.take(ends.get(), charge, self.rate);
            return ExactDuration::default();
        }
        // The lease has ended, and the bucket has been draining this part since.
        self.rate.refundable(charge, Operation { action: Action::RollBack(ends), ..operation })
    }

    /// Returns the time until the level, including the leased parts, has drained to `target`, if no other requests
    /// arrive.
    fn time_until(&self, level: &BucketState, now: Micros, target: ExactDuration) -> Micros {
        let mut bucket = self.rate.subtract(level.drained_at, ExactDuration { micros: now.get(), fraction: 0 });
        if level.leased.is_empty() {
            return self.rate.subtract(bucket, target).ceil();
        }
        let mut leased = level.leased_total;
        let mut elapsed = 0;
        for entry in level.leased.by_end() {
            let remaining = ExactDuration { micros: entry.ends - now.get() - elapsed, fraction: 0 };
            let excess = self.rate.subtract(self.rate.add(bucket, leased), target);
            if excess <= bucket.min(remaining) {
                return Micros::new(elapsed) + excess.ceil();
            }
            bucket = self.rate.add(self.rate.subtract(bucket, remaining), entry.span);
            leased = self.rate.subtract(leased, entry.span);
            elapsed += remaining.micros;
        }
        Micros::new(elapsed) + self.rate.subtract(bucket, target).ceil()
    }

    pub(super) fn explain(&self, state: &State, operation: Operation, allowed: bool) -> Decision {
        let now = ExactDuration { micros: operation.now.get(), fraction: 0 };
        let level = self.level(state, operation.now);
        let used = self.rate.add(self.rate.subtract(level.drained_at, now), level.leased_total);
        let charge = self.charge(operation.cost);
        // A peek does not fill the bucket.
        let after = if operation.action == Action::Peek { self.rate.add(used, charge) } else { used };
        let limit = self.fill_of(self.max_hits.limit());
        let owes = self.owes(used);
        let remaining = if owes { 0 } else { self.rate.hits(self.rate.subtract(limit, used)) };
        let next = if owes {
            self.time_until(&level, operation.now, self.rate.duration_of(self.free.unwrap_or_default()))
        } else if remaining < self.max_hits.limit() {
            let one_more = self.rate.subtract(limit, self.rate.duration_of(remaining + 1));
            self.time_until(&level, operation.now, one_more)
        } else {
            Micros::ZERO
        };
        let max_cost = if self.lease_grid.is_some() { self.max_hits.limit() } else { self.max_hits.ceiling() };
        let retry_after = if !allowed && operation.cost <= max_cost {
            let mut target = self.rate.subtract(self.max_fill(), charge);
            if let Some(free) = self.free {
                target = target.min(self.rate.duration_of(free));
            }
            Some(self.time_until(&level, operation.now, target))
        } else {
            None
        };
        let delay = if allowed && !operation.action.releases() {
            self.rate.subtract(after, self.fill_of(self.immediate)).ceil()
        } else {
            Micros::ZERO
        };
        Decision {
            allowed,
            soft: allowed && !operation.action.releases() && after > limit,
            remaining,
            used: self.rate.hits_started(used),
            reset: self.time_until(&level, operation.now, ExactDuration::default()),
            next,
            retry_after,
            delay,
            ..Decision::default()
        }
    }

    pub(super) const fn counts_denied(&self) -> bool {
        self.count_denied
    }

    pub(super) fn expires(&self, state: &State, now: Micros) -> Micros {
        now + self.time_until(&self.level(state, now), now, ExactDuration::default())
    }
}
