//! Adaptive concurrency: how many at once follows what latency says, shared by all who ask.
//!
//! The slots are [`Concurrency`]'s, held and given back in the same way. Who gives one back says how long it took; what is
//! learned from that stands behind the slots: the limit, what it is held against, and the samples since the last step
//! ([`sluicegate_common::adaptive`] has the formulas). A limit that nobody uses keeps for an hour what it has learned.

use sluicegate_common::adaptive::{self, Bounds, Estimate, Method, Window};

use super::{
    Action, Algorithm, Arguments, Decision, InvalidLimit, LimitSpec, Limiter, MaxHits, Micros, Operation,
    RequestContext, Sample, State, concurrency::Concurrency,
};

/// A limit that learns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adaptive {
    slots: Concurrency,
    method: Method,
    bounds: Bounds,
    sample: Option<Sample>,
}

/// The bounds are whole numbers.
impl Eq for Adaptive {}

/// What has been learned is kept for so long after the last request.
const KEPT: Micros = Micros::from_secs(3_600);
/// Bytes behind the slots: limit, baseline, measured (doubles), count (4), probing (1); the window's end (7), sum (a double),
/// count, in flight and dropped (4 each).
const TAIL: usize = 56;
/// No latency is longer, in microseconds: an hour.
const LONGEST: u64 = 3_600_000_000;

/// What has been learned.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Learned {
    estimate: Estimate,
    window: Window,
}

impl Learned {
    fn new(method: Method, bounds: &Bounds) -> Self {
        Self { estimate: Estimate::new(method, bounds), window: Window::default() }
    }

    /// What stands behind the slots, and where they end. What makes no sense begins anew.
    fn read(bytes: &[u8], method: Method, bounds: &Bounds) -> (Self, usize) {
        let fresh = Self::new(method, bounds);
        let Some((slots, tail)) = bytes.split_last_chunk::<TAIL>() else {
            return (fresh, 0);
        };
        let number = |at: usize, size: usize| {
            let mut wide = [0; 8];
            wide[..size].copy_from_slice(&tail[at..at + size]);
            u64::from_le_bytes(wide)
        };
        let double = |at| Some(f64::from_bits(number(at, 8))).filter(|it| (0.0..1e15).contains(it));
        let (Some(limit), Some(baseline), Some(measured), Some(sum)) = (double(0), double(8), double(16), double(36))
        else {
            return (fresh, slots.len());
        };
        // The bounds may have changed.
        let limit = limit.max(bounds.floor.into()).min(bounds.ceiling.into());
        let estimate = Estimate { limit, baseline, count: number(24, 4) as u32, probing: tail[28], measured };
        let [count, in_flight, dropped] = [44, 48, 52].map(|at| number(at, 4) as u32);
        (Self { estimate, window: Window { end: number(29, 7), sum, count, in_flight, dropped } }, slots.len())
    }

    fn write(&self, state: &mut State) {
        let Self { estimate, window } = self;
        let mut tail = [0; TAIL];
        let mut write = |at: usize, bytes: &[u8]| tail[at..at + bytes.len()].copy_from_slice(bytes);
        write(0, &estimate.limit.to_bits().to_le_bytes());
        write(8, &estimate.baseline.to_bits().to_le_bytes());
        write(16, &estimate.measured.to_bits().to_le_bytes());
        write(24, &estimate.count.to_le_bytes());
        write(28, &[estimate.probing]);
        write(29, &window.end.to_le_bytes()[..7]);
        write(36, &window.sum.to_bits().to_le_bytes());
        write(44, &window.count.to_le_bytes());
        write(48, &window.in_flight.to_le_bytes());
        write(52, &window.dropped.to_le_bytes());
        state.append(&tail);
    }
}

impl Adaptive {
    /// `None` for bounds that are not in order, or a ceiling or a hold that slots cannot have.
    #[must_use]
    pub fn new(method: Method, bounds: Bounds, hold: Micros) -> Option<Self> {
        let Bounds { floor, ceiling, initial, timeout } = bounds;
        let fits = floor >= 1 && floor <= initial && initial <= ceiling && timeout > 0 && timeout <= LONGEST;
        let slots = Concurrency::new(MaxHits::hard(ceiling.into()), hold)?;
        fits.then_some(Self { slots, method, bounds, sample: None })
    }

    fn learned(&self, state: &State) -> (Learned, usize) {
        Learned::read(state.as_bytes(), self.method, &self.bounds)
    }

    /// The slots, of which so many may be in flight now.
    fn slots(&self, learned: &Learned) -> Concurrency {
        self.slots.limited(learned.estimate.limit(&self.bounds).into())
    }

    fn learn(&self, learned: &mut Learned, sample: Sample, in_flight: u64, now: Micros) {
        let latency = sample.latency.get().clamp(1, LONGEST) as f64;
        let sample = adaptive::Sample { latency, in_flight: in_flight as u32, dropped: sample.dropped };
        if let Some(all) = learned.window.add(sample, now.get()) {
            learned.estimate.update(self.method, &self.bounds, all, now.get());
        }
    }
}

impl Limiter for Adaptive {
    const NAME: &'static str = "adaptive";
    const KEYWORDS: &'static [&'static str] = &["hold", "holder", "method", "floor", "ceiling", "initial", "timeout"];
    const TAG: &'static str = "ad";
    /// One script for all slots.
    const SCRIPT: &'static str = Concurrency::SCRIPT;
    const ARGUMENTS: &'static [&'static str] = Concurrency::ARGUMENTS;

    /// The limit is the ceiling, the window the hold.
    fn build(shape: &LimitSpec) -> Result<Algorithm, InvalidLimit> {
        let defaults = Bounds::default();
        let ceiling = shape.requests;
        let floor = shape.floor.unwrap_or(defaults.floor);
        let initial = shape.initial.unwrap_or(defaults.initial.clamp(floor.min(ceiling), ceiling));
        let timeout = shape.timeout.map_or(defaults.timeout, Micros::get);
        if shape.soft.is_some() || shape.counts_denied() {
            let word = if shape.soft.is_some() { "soft" } else { "count_denied" };
            return Err(InvalidLimit {
                keyword: word,
                reason: "a limit that follows latency is neither soft, nor counts what it refuses",
            });
        }
        if u64::from(ceiling) > Concurrency::MAX_SLOTS {
            return Err(InvalidLimit {
                keyword: "ceiling",
                reason: "adaptive keeps every slot and takes 1000 at most",
            });
        }
        if timeout == 0 || timeout > LONGEST {
            return Err(InvalidLimit {
                keyword: "timeout",
                reason: "timeout must be longer than nothing, and an hour at most",
            });
        }
        let bounds = Bounds { floor, ceiling, initial, timeout };
        if floor == 0 || floor > initial || initial > ceiling {
            return Err(InvalidLimit {
                keyword: "floor",
                reason: "floor, initial and ceiling must be in this order, and 1 at least",
            });
        }
        let why = "hold must be longer than nothing, and a day at most";
        let method = shape.method.unwrap_or_default();
        Ok(Self::new(method, bounds, shape.window).ok_or(InvalidLimit { keyword: "hold", reason: why })?.into())
    }

    fn arguments(&self, ask: Operation) -> Arguments {
        let mut arguments = self.slots.arguments(ask);
        if let Some(method) = arguments.last_mut() {
            *method = 1 + self.method as u64;
        }
        let Bounds { floor, ceiling, initial, timeout } = self.bounds;
        arguments.extend([floor, ceiling, initial].map(u64::from));
        let latency = self.sample.map_or(0, |sample| sample.latency.get().clamp(1, LONGEST));
        let dropped = self.sample.is_some_and(|sample| sample.dropped);
        arguments.extend([timeout, latency, dropped.into()]);
        arguments
    }

    fn with_context(self, asker: RequestContext) -> Self {
        Self { slots: self.slots.with_context(asker), sample: asker.sample, ..self }
    }

    fn step(&self, state: &mut State, ask: Operation) -> bool {
        let (mut learned, slots) = self.learned(state);
        let tail = state.as_bytes().len() - slots;
        state.cut_back(tail);
        let before = Concurrency::in_flight(state, ask.now);
        let allowed = self.slots(&learned).step(state, ask);
        // Only of what was held: who gives back twice teaches nothing.
        if let Some(sample) = self.sample.filter(|_| ask.action == Action::Refund)
            && Concurrency::in_flight(state, ask.now) < before
        {
            self.learn(&mut learned, sample, before, ask.now);
        }
        if !state.is_empty() || learned != Learned::new(self.method, &self.bounds) {
            learned.write(state);
        }
        allowed
    }

    fn explain(&self, state: &State, ask: Operation, allowed: bool) -> Decision {
        let (learned, slots) = self.learned(state);
        let limit = learned.estimate.limit(&self.bounds);
        let decision = self.slots(&learned).explain_slots(&state.as_bytes()[..slots], ask, allowed);
        Decision { limit: Some(limit), shed: !allowed, ..decision }
    }

    /// A slot may come back at any moment.
    fn denial_counts(&self, _state: &State, _now: Micros) -> bool {
        true
    }

    fn expires(&self, state: &State, now: Micros) -> Micros {
        let (_, slots) = self.learned(state);
        Concurrency::expire(&state.as_bytes()[..slots], now).max(now + KEPT)
    }
}

#[cfg(test)]
mod tests;
