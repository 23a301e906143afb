//! Shares of a rate: classes of which each has a rate that is always there for it and a ceiling, and borrows what the
//! others leave. A hierarchical token bucket.
//!
//! A class has a bucket of its own, which fills at its minimum; what no minimum claims fills a bucket for all, and so does
//! what runs over where a class does not use its own. A hit is paid from the class' own bucket first and from the one for
//! all then, and a third bucket, which fills at the class' maximum, keeps it below that. All buckets together hold what
//! passes in a window, and all that flows in is the capacity: so the sum keeps to a token bucket of the capacity, and whoever
//! stays within its minimum never meets anybody.
//!
//! The state is what is used, so that nothing is a new counter: the instant as of which (7 bytes), of which capacity (7), of
//! the bucket for all (7), and for each class of its own, of what it borrowed, and below its maximum (7 each). It is counted in hits ×
//! microseconds of the window: a rate of so many hits a window is so many units a microsecond, without fractions.

use smallvec::smallvec;

use super::{
    Action, Algorithm, Arguments, CLOCK_SLACK, Classes, Decision, InvalidLimit, LimitSpec, Limiter, Micros, Operation,
    RequestContext, State,
};

/// A capacity per window, and who has what of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shares {
    capacity: u64,
    window: u64,
    classes: Classes,
    /// The class that asks.
    class: usize,
}

/// Bytes of a number.
const NUMBER: usize = 7;

/// What is used, in hits × microseconds of the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Usage {
    /// As of when.
    at: u64,
    /// Of the bucket for all.
    common: u64,
    each: [ClassUsage; Classes::MAX_CLASSES],
}

/// What a class uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ClassUsage {
    /// Of what is always there for it.
    own: u64,
    /// Of the bucket for all, at most.
    borrowed: u64,
    /// Of its maximum.
    all: u64,
}

impl Shares {
    /// `None` for a capacity that cannot be counted in units: hits × microseconds of the window stay below 2⁵².
    #[must_use]
    pub fn new(capacity: u32, window: Micros, classes: Classes) -> Option<Self> {
        let this = Self { capacity: capacity.into(), window: window.get(), classes, class: 0 };
        let fits = (this.capacity + 1).checked_mul(this.window).is_some_and(|units| units <= super::MAX / 2);
        (fits && this.window > 0 && classes.guaranteed() <= this.capacity).then_some(this)
    }

    /// What the bucket for all holds.
    fn common(&self) -> u64 {
        (self.capacity - self.classes.guaranteed()) * self.window
    }

    /// What the class' own bucket holds, and what its ceiling does.
    fn holds(&self, class: usize) -> (u64, u64) {
        (self.classes.min(class) * self.window, self.classes.max(class) * self.window)
    }

    /// What is used at an instant, if nobody asks until then.
    fn used(&self, state: &State, now: Micros) -> Usage {
        let len = self.classes.count();
        let mut used = Usage { at: now.get(), common: 0, each: [ClassUsage::default(); Classes::MAX_CLASSES] };
        // With classes added or taken away it is another counter.
        if state.as_bytes().len() != NUMBER * (3 + 3 * len) {
            return used;
        }
        let number = |place: usize| state.number::<NUMBER>(NUMBER * place).unwrap_or_default();
        let (at, capacity) = (number(0), number(1));
        used.common = number(2).min(self.common());
        for (class, it) in used.each.iter_mut().enumerate().take(len) {
            let (own, all) = self.holds(class);
            let place = 3 + 3 * class;
            *it = ClassUsage {
                own: number(place).min(own),
                borrowed: number(place + 1),
                all: number(place + 2).min(all),
            };
        }
        // A clock that stepped back brings nothing; one that was wrong is not believed.
        let (past, ahead) = (now.get().saturating_sub(at), at.saturating_sub(now.get()));
        let past = past.min(self.window);
        // Of a capacity that was raised meanwhile no more has come back than the one before had.
        let past = if capacity < self.capacity { past * capacity / self.capacity } else { past };
        used.at = if ahead > CLOCK_SLACK.get() { now.get() } else { at.max(now.get()) };
        self.drain(&mut used, past);
        used
    }

    /// So much later.
    fn drain(&self, used: &mut Usage, past: u64) {
        let mut inflow = self.capacity * past;
        let each = &mut used.each[..self.classes.count()];
        for (class, it) in each.iter_mut().enumerate() {
            let refilled = it.own.min(self.classes.min(class) * past);
            it.own -= refilled;
            inflow -= refilled;
            it.all = it.all.saturating_sub(self.classes.max(class) * past);
        }
        used.common = used.common.saturating_sub(inflow);
        each.iter_mut().for_each(|it| it.borrowed = it.borrowed.min(used.common));
    }

    fn write(&self, used: &Usage, state: &mut State) {
        state.clear();
        let classes = &used.each[..self.classes.count()];
        if used.common == 0 && classes.iter().all(|it| *it == ClassUsage::default()) {
            return;
        }
        for number in [used.at, self.capacity, used.common] {
            state.push::<NUMBER>(number);
        }
        for number in classes.iter().flat_map(|it| [it.own, it.borrowed, it.all]) {
            state.push::<NUMBER>(number);
        }
    }

    /// What the class may take of its own, of the bucket for all, and below its ceiling.
    fn left(&self, used: &Usage) -> (u64, u64, u64) {
        let ((own, all), it) = (self.holds(self.class), &used.each[self.class]);
        (own - it.own, self.common() - used.common, all - it.all)
    }

    /// What the class may take.
    fn available(&self, used: &Usage) -> u64 {
        let (own, common, ceiling) = self.left(used);
        (own + common).min(ceiling)
    }

    /// What it may take of counters never used.
    fn full(&self) -> u64 {
        let (own, all) = self.holds(self.class);
        (own + self.common()).min(all)
    }

    /// The units of a cost: one that is more than the capacity is more than it can hold.
    fn units(&self, cost: u64) -> u64 {
        cost.min(self.capacity + 1) * self.window
    }

    /// What the class may take so much later, if nobody asks until then.
    fn available_after(&self, used: &Usage, past: u64) -> u64 {
        let refills = |(class, it): (usize, &ClassUsage)| it.own.min(self.classes.min(class) * past);
        let refilled: u64 = used.each[..self.classes.count()].iter().enumerate().map(refills).sum();
        let it = &used.each[self.class];
        let (own, all) = self.holds(self.class);
        let own = own - it.own + refills((self.class, it));
        let common = self.common() - used.common.saturating_sub(self.capacity * past - refilled);
        (own + common).min(all - it.all.saturating_sub(self.classes.max(self.class) * past))
    }

    /// Until so much is available, if nobody else asks; it has to be there some time.
    fn until(&self, used: &Usage, now: Micros, units: u64) -> Micros {
        let missing = units.saturating_sub(self.available(used));
        if missing == 0 {
            return Micros::ZERO;
        }
        // Nothing comes in faster than the capacity; mostly it does not take much longer.
        let mut low = missing.div_ceil(self.capacity.max(1));
        let mut high = low;
        while high < self.window && self.available_after(used, high) < units {
            (low, high) = (high + 1, (2 * high).min(self.window));
        }
        while low < high {
            let middle = u64::midpoint(low, high);
            if self.available_after(used, middle) >= units { high = middle } else { low = middle + 1 }
        }
        Micros::new(used.at.saturating_sub(now.get()) + low)
    }
}

impl Limiter for Shares {
    const NAME: &'static str = "shares";
    const KEYWORDS: &'static [&'static str] = &["capacity", "class", "shares", "reserve"];
    const TAG: &'static str = "sh";
    const SCRIPT: &'static str = include_str!("script.lua");
    const ARGUMENTS: &'static [&'static str] = &["cost", "capacity", "window", "slack", "class", "count"];

    fn build(shape: &LimitSpec) -> Result<Algorithm, InvalidLimit> {
        let Some(classes) = shape.classes else {
            return Err(InvalidLimit { keyword: "capacity", reason: "a capacity per time needs shares, or a reserve" });
        };
        if shape.counts_denied() {
            return Err(InvalidLimit {
                keyword: "count_denied",
                reason: "what a class was refused takes nothing of the capacity",
            });
        }
        if shape.soft.is_some() {
            return Err(InvalidLimit { keyword: "soft", reason: "a shared capacity has ceilings, and is not soft" });
        }
        let why =
            "capacity times the microseconds of its time must stay below 2^52: 1.2 million an hour, 52 thousand a day";
        Ok(Self::new(shape.requests, shape.window, classes)
            .ok_or(InvalidLimit { keyword: "capacity", reason: why })?
            .into())
    }

    fn arguments(&self, ask: Operation) -> Arguments {
        let cost = ask.cost.min(self.capacity + 1);
        let (class, count) = (self.class as u64, self.classes.count() as u64);
        let mut arguments: Arguments = smallvec![cost, self.capacity, self.window, CLOCK_SLACK.get(), class, count];
        arguments.extend(self.classes.numbers());
        arguments
    }

    /// The units depend on it.
    fn scope(&self) -> Option<u64> {
        Some(self.window / 1_000_000)
    }

    fn with_context(self, asker: RequestContext) -> Self {
        Self { class: usize::from(asker.class).min(self.classes.count() - 1), ..self }
    }

    fn step(&self, state: &mut State, ask: Operation) -> bool {
        let mut used = self.used(state, ask.now);
        let units = self.units(ask.cost);
        let allowed = ask.action.releases() || units <= self.available(&used);
        let (own_left, ..) = self.left(&used);
        let it = &mut used.each[self.class];
        match ask.action {
            Action::Take if allowed => {
                let own = units.min(own_left);
                it.own += own;
                it.borrowed += units - own;
                it.all += units;
                used.common += units - own;
            }
            Action::Refund | Action::RollBack(_) => {
                // Of what was taken then, some has come back by itself.
                let past = match ask.action {
                    Action::RollBack(taken) => (ask.now - taken).get().min(self.window),
                    Action::Refund | Action::Take | Action::Peek => 0,
                };
                let back = units.saturating_sub(self.capacity * past);
                let borrowed = back.min(it.borrowed);
                it.borrowed -= borrowed;
                it.own = it.own.saturating_sub(back - borrowed);
                it.all = it.all.saturating_sub(units.saturating_sub(self.classes.max(self.class) * past));
                used.common -= borrowed;
            }
            Action::Take | Action::Peek => return allowed,
        }
        self.write(&used, state);
        allowed
    }

    fn explain(&self, state: &State, ask: Operation, allowed: bool) -> Decision {
        let used = self.used(state, ask.now);
        let (units, full) = (self.units(ask.cost), self.full());
        let (_, _, ceiling) = self.left(&used);
        let available = self.available(&used);
        let remaining = available / self.window;
        let next = (remaining + 1) * self.window;
        let until = |units: u64| if units > full { None } else { Some(self.until(&used, ask.now, units)) };
        Decision {
            allowed,
            shed: !allowed && units <= ceiling,
            limit: Some(self.classes.max(self.class) as u32),
            remaining,
            used: (full - available).div_ceil(self.window),
            reset: until(full).unwrap_or_default(),
            next: if available < full { until(next.min(full)).unwrap_or_default() } else { Micros::ZERO },
            retry_after: if allowed { None } else { until(units) },
            ..Decision::default()
        }
    }

    /// Another class may leave something at any moment.
    fn denial_counts(&self, _state: &State, _now: Micros) -> bool {
        true
    }

    fn expires(&self, state: &State, now: Micros) -> Micros {
        state
            .number::<NUMBER>(0)
            .map_or(now, |at| Micros::new(at.min((now + CLOCK_SLACK).get()).max(now.get()) + self.window))
    }
}

#[cfg(test)]
mod tests;
