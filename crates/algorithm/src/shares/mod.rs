//! [`Shares`] of a rate: each class has a guaranteed minimum rate and a maximum, and borrows the unused part of the
//! others. This is a hierarchical token bucket.
//!
//! Each class has its own bucket, which fills at its minimum. A common bucket fills with the rate that no minimum
//! guarantees, and with the overflow of classes that do not use their own bucket. A hit is paid first from the bucket
//! of its class and then from the common bucket. A third bucket, which fills at the maximum of the class, limits the
//! sum. All buckets together hold the hits of one window, and their total inflow is the capacity. So the sum of
//! all hits conforms to a token bucket of the capacity, and a class within its minimum is independent of the others.
//!
//! The state contains the used parts, so that a new counter needs no bytes. All numbers have 7 bytes:
//!
//! - the instant, the capacity at that instant, and the use of the common bucket
//! - for each class the use of its own bucket, the borrowed part of the common bucket, and the use of its maximum
//!
//! The unit is hits × microseconds of the window: a rate of n hits per window is n units per microsecond, without
//! fractions.

use smallvec::smallvec;

use super::{
    Action, Algorithm, Arguments, CLOCK_SLACK, Classes, CounterProgram, Decision, InvalidLimit, LimitSpec, Limiter,
    Micros, Operation, RequestContext, State,
};

/// A capacity per window, and the classes that share it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shares {
    capacity: u64,
    window: u64,
    classes: Classes,
    /// Index of the caller's class.
    class: usize,
}

/// Length of a number in bytes.
const NUMBER_BYTES: usize = 7;

/// The used parts of the buckets, in hits × microseconds of the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Usage {
    /// Instant for which the numbers are valid.
    at: u64,
    /// Used part of the common bucket.
    common: u64,
    each: [ClassUsage; Classes::MAX_CLASSES],
}

/// The used part of the buckets of one class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ClassUsage {
    /// Used part of its guaranteed minimum.
    own: u64,
    /// Upper bound of its use of the common bucket.
    borrowed: u64,
    /// Used part of its maximum.
    all: u64,
}

/// The sizes of the buckets of one class, or their free parts, in hits × microseconds of the window.
#[derive(Clone, Copy)]
struct ClassBuckets {
    /// The bucket that fills at the guaranteed minimum.
    own: u64,
    /// The bucket that fills at the maximum.
    all: u64,
}

impl Shares {
    /// Creates a limiter; `None` if the capacity cannot be counted in units: hits × microseconds of the window must be
    /// below 2⁵².
    #[must_use]
    pub fn new(capacity: u32, window: Micros, classes: Classes) -> Option<Self> {
        let this = Self { capacity: capacity.into(), window: window.get(), classes, class: 0 };
        let fits = (this.capacity + 1).checked_mul(this.window).is_some_and(|units| units <= super::MAX_NUMBER / 2);
        (fits && this.window > 0 && classes.guaranteed() <= this.capacity).then_some(this)
    }

    /// Returns the size of the common bucket.
    fn common_capacity(&self) -> u64 {
        (self.capacity - self.classes.guaranteed()) * self.window
    }

    /// Returns the sizes of the buckets of a class.
    fn sizes_of(&self, class: usize) -> ClassBuckets {
        ClassBuckets { own: self.classes.min(class) * self.window, all: self.classes.max(class) * self.window }
    }

    /// Returns a number of a state, or 0 beyond its end.
    fn number(state: &State, index: usize) -> u64 {
        state.number::<NUMBER_BYTES>(NUMBER_BYTES * index).unwrap_or_default()
    }

    /// Returns whether [`Self::usage`] replaces the instant of a wrong clock or the former capacity.
    fn is_corrected(&self, state: &State, now: Micros) -> bool {
        if state.as_bytes().len() != self.state_bytes() {
            return false;
        }
        let at = Self::number(state, 0);
        let capacity = Self::number(state, 1);
        at > (now + CLOCK_SLACK).get() || capacity != self.capacity
    }

    fn state_bytes(&self) -> usize {
        NUMBER_BYTES * (3 + 3 * self.classes.count())
    }

    /// Returns the usage at an instant, if no other requests arrive until then.
    fn usage(&self, state: &State, now: Micros) -> Usage {
        let len = self.classes.count();
        let mut usage = Usage { at: now.get(), common: 0, each: [ClassUsage::default(); Classes::MAX_CLASSES] };
        // With other classes the state is treated as new.
        if state.as_bytes().len() != self.state_bytes() {
            return usage;
        }
        let at = Self::number(state, 0);
        let capacity = Self::number(state, 1);
        usage.common = Self::number(state, 2).min(self.common_capacity());
        for (class, class_usage) in usage.each.iter_mut().enumerate().take(len) {
            let size = self.sizes_of(class);
            let index = 3 + 3 * class;
            class_usage.own = Self::number(state, index).min(size.own);
            class_usage.borrowed = Self::number(state, index + 1);
            class_usage.all = Self::number(state, index + 2).min(size.all);
        }
        // A clock that stepped back refills nothing; an instant that is too far ahead was written by a wrong clock.
        let elapsed = now.get().saturating_sub(at).min(self.window);
        let ahead = at.saturating_sub(now.get());
        // If the capacity was raised, the elapsed time refilled at the former capacity.
        let elapsed = if capacity < self.capacity { elapsed * capacity / self.capacity } else { elapsed };
        usage.at = if ahead > CLOCK_SLACK.get() { now.get() } else { at.max(now.get()) };
        self.drain(&mut usage, elapsed);
        usage
    }

    /// Returns how much of a class's own bucket refills in the elapsed time.
    fn own_refill(&self, class: usize, class_usage: &ClassUsage, elapsed: u64) -> u64 {
        class_usage.own.min(self.classes.min(class) * elapsed)
    }

    /// Refills all buckets for the elapsed time.
    fn drain(&self, usage: &mut Usage, elapsed: u64) {
        let mut inflow = self.capacity * elapsed;
        let each = &mut usage.each[..self.classes.count()];
        for (class, class_usage) in each.iter_mut().enumerate() {
            let refilled = self.own_refill(class, class_usage, elapsed);
            class_usage.own -= refilled;
            inflow -= refilled;
            class_usage.all = class_usage.all.saturating_sub(self.classes.max(class) * elapsed);
        }
        usage.common = usage.common.saturating_sub(inflow);
        for class_usage in each {
            class_usage.borrowed = class_usage.borrowed.min(usage.common);
        }
    }

    fn write(&self, usage: &Usage, state: &mut State) {
        state.clear();
        let classes = &usage.each[..self.classes.count()];
        if usage.common == 0 && classes.iter().all(|class_usage| *class_usage == ClassUsage::default()) {
            return;
        }
        for number in [usage.at, self.capacity, usage.common] {
            state.push::<NUMBER_BYTES>(number);
        }
        for class_usage in classes {
            state.push::<NUMBER_BYTES>(class_usage.own);
            state.push::<NUMBER_BYTES>(class_usage.borrowed);
            state.push::<NUMBER_BYTES>(class_usage.all);
        }
    }

    /// Returns the units that remain in the buckets of the caller's class.
    fn remaining(&self, usage: &Usage) -> ClassBuckets {
        let size = self.sizes_of(self.class);
        let class_usage = &usage.each[self.class];
        ClassBuckets { own: size.own - class_usage.own, all: size.all - class_usage.all }
    }

    /// Returns the units available to the caller's class.
    fn available(&self, usage: &Usage) -> u64 {
        let remaining = self.remaining(usage);
        let common = self.common_capacity() - usage.common;
        (remaining.own + common).min(remaining.all)
    }

    /// Returns the units available to the caller's class in a new counter.
    fn full(&self) -> u64 {
        let size = self.sizes_of(self.class);
        (size.own + self.common_capacity()).min(size.all)
    }

    /// Returns the units of a cost. A cost above the capacity is always denied, so it is capped.
    fn units(&self, cost: u64) -> u64 {
        cost.min(self.capacity + 1) * self.window
    }

    /// Returns the units available to the caller's class after `elapsed` microseconds, if no other requests arrive.
    fn available_after(&self, usage: &Usage, elapsed: u64) -> u64 {
        let mut refilled = 0;
        for (class, class_usage) in usage.each[..self.classes.count()].iter().enumerate() {
            refilled += self.own_refill(class, class_usage, elapsed);
        }
        let size = self.sizes_of(self.class);
        let class_usage = &usage.each[self.class];
        let own = size.own - class_usage.own + self.own_refill(self.class, class_usage, elapsed);
        let common = self.common_capacity() - usage.common.saturating_sub(self.capacity * elapsed - refilled);
        let all = size.all - class_usage.all.saturating_sub(self.classes.max(self.class) * elapsed);
        (own + common).min(all)
    }

    /// Returns the time until `units` are available, if no other requests arrive. They must not exceed [`Self::full`].
    fn wait(&self, usage: &Usage, now: Micros, units: u64) -> Micros {
        let missing = units.saturating_sub(self.available(usage));
        if missing == 0 {
            return Micros::ZERO;
        }
        // The inflow is at most the capacity, and usually close to it.
        let mut low = missing.div_ceil(self.capacity.max(1));
        let mut high = low;
        while high < self.window && self.available_after(usage, high) < units {
            low = high + 1;
            high = (2 * high).min(self.window);
        }
        while low < high {
            let middle = u64::midpoint(low, high);
            if self.available_after(usage, middle) >= units { high = middle } else { low = middle + 1 }
        }
        Micros::new(usage.at.saturating_sub(now.get()) + low)
    }
}

impl CounterProgram for Shares {
    const TAG: &'static str = "sh";
    const SCRIPT: &'static str = include_str!("script.lua");
    const ARGUMENTS: &'static [&'static str] = &["cost", "capacity", "window", "slack", "class", "count"];

    fn arguments(&self, operation: Operation) -> Arguments {
        let mut arguments: Arguments = smallvec![
            operation.cost.min(self.capacity + 1),
            self.capacity,
            self.window,
            CLOCK_SLACK.get(),
            self.class as u64,
            self.classes.count() as u64
        ];
        arguments.extend(self.classes.numbers());
        arguments
    }

    fn step(&self, state: &mut State, operation: Operation) -> bool {
        let mut usage = self.usage(state, operation.now);
        let units = self.units(operation.cost);
        let allowed = operation.action.releases() || units <= self.available(&usage);
        let own_remaining = self.remaining(&usage).own;
        let class_usage = &mut usage.each[self.class];
        match operation.action {
            Action::Take if allowed => {
                let own = units.min(own_remaining);
                class_usage.own += own;
                class_usage.borrowed += units - own;
                class_usage.all += units;
                usage.common += units - own;
            }
            Action::Refund | Action::RollBack(_) => {
                // A part of the rolled back take has been refilled since.
                let elapsed = match operation.action {
                    Action::RollBack(taken) => (operation.now - taken).get().min(self.window),
                    Action::Refund | Action::Take | Action::Peek => 0,
                };
                let refunded = units.saturating_sub(self.capacity * elapsed);
                let borrowed = refunded.min(class_usage.borrowed);
                class_usage.borrowed -= borrowed;
                class_usage.own = class_usage.own.saturating_sub(refunded - borrowed);
                class_usage.all =
                    class_usage.all.saturating_sub(units.saturating_sub(self.classes.max(self.class) * elapsed));
                usage.common -= borrowed;
            }
            // Otherwise a counter that is used up would stay so until the wrong clock's instant.
            Action::Take if self.is_corrected(state, operation.now) => {}
            Action::Take | Action::Peek => return allowed,
        }
        self.write(&usage, state);
        allowed
    }

    fn explain(&self, state: &State, operation: Operation, allowed: bool) -> Decision {
        let usage = self.usage(state, operation.now);
        let units = self.units(operation.cost);
        let full = self.full();
        let available = self.available(&usage);
        let remaining = available / self.window;
        let next = if available < full {
            let one_more = (remaining + 1) * self.window;
            self.wait(&usage, operation.now, one_more.min(full))
        } else {
            Micros::ZERO
        };
        let retry_after = if allowed || units > full { None } else { Some(self.wait(&usage, operation.now, units)) };
        Decision {
            allowed,
            shed: !allowed && units <= self.remaining(&usage).all,
            limit: Some(self.classes.max(self.class) as u32),
            remaining,
            used: (full - available).div_ceil(self.window),
            reset: self.wait(&usage, operation.now, full),
            next,
            retry_after,
            ..Decision::default()
        }
    }

    /// Returns `true`, because another class may leave capacity unused at any moment.
    fn denial_counts(&self, _state: &State, _now: Micros) -> bool {
        true
    }

    fn expires(&self, state: &State, now: Micros) -> Micros {
        let Some(at) = state.number::<NUMBER_BYTES>(0) else {
            return now;
        };
        let at = at.min((now + CLOCK_SLACK).get()).max(now.get());
        Micros::new(at + self.window)
    }
}

impl Limiter for Shares {
    const NAME: &'static str = "shares";
    const KEYWORDS: &'static [&'static str] = &["capacity", "class", "shares", "reserve"];

    fn build(spec: &LimitSpec) -> Result<Algorithm, InvalidLimit> {
        let Some(classes) = spec.classes else {
            return Err(InvalidLimit {
                keyword: "capacity",
                reason: "capacity per unit of time requires shares or reserve",
            });
        };
        if spec.counts_denied() {
            return Err(InvalidLimit {
                keyword: "count_denied",
                reason: "count_denied is not supported with shared capacities: denied hits take no capacity",
            });
        }
        if spec.soft.is_some() {
            return Err(InvalidLimit { keyword: "soft", reason: "soft is not supported with shared capacities" });
        }
        let reason = "capacity times its unit in microseconds must be below 2^52: at most 1.2 million per hour, 52 thousand per day";
        let error = InvalidLimit { keyword: "capacity", reason };
        let capacity = u32::try_from(spec.requests).map_err(|_| error)?;
        Ok(Self::new(capacity, spec.window, classes).ok_or(error)?.into())
    }

    /// Returns the length of the window in seconds, because the unit of the numbers in the state depends on it.
    fn scope(&self) -> Option<u64> {
        Some(self.window / 1_000_000)
    }

    fn with_context(self, context: RequestContext) -> Self {
        Self { class: usize::from(context.class).min(self.classes.count() - 1), ..self }
    }
}

#[cfg(test)]
mod tests;
