//! [`Adaptive`]: a concurrency limit on requests in flight that follows their latency, shared by all instances.
//!
//! The slots are those of [`Concurrency`] and are held and released in the same way. A release contains the latency of
//! the request. The state contains the slots, and after them the learned limit, the baseline latency, and the
//! samples since the last update (see [`sluicegate_overload::adaptive`] for the formulas). The learned state is kept
//! for one hour after the last request.

use sluicegate_overload::adaptive::{self, Bounds, Estimate, Method, Window};

use super::{
    Action, Algorithm, Arguments, CounterPart, CounterProgram, Decision, InvalidLimit, LimitSpec, Limiter, MaxHits,
    Micros, Operation, RequestContext, Sample, State, concurrency::Concurrency,
};

/// A concurrency limiter with a limit that follows latency.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adaptive {
    slots: Concurrency,
    method: Method,
    bounds: Bounds,
    sample: Option<Sample>,
}

/// The bounds contain only integers, so each limiter is equal to itself.
impl Eq for Adaptive {}

/// Lifetime of the learned state after the last request.
const LEARNED_TTL: Micros = Micros::from_secs(3_600);
/// Length of the learned state in bytes: limit, baseline, measured (doubles), count (4), probing (1); the end of the
/// window (7), sum (a double), count, in flight and dropped (4 each).
const LEARNED_BYTES: usize = 56;
/// Maximum latency in microseconds: one hour.
const MAX_LATENCY: u64 = 3_600_000_000;

/// The state that is learned from samples: the estimated limit, and the samples since its last update.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Learned {
    estimate: Estimate,
    window: Window,
}

impl Learned {
    fn new(method: Method, bounds: &Bounds) -> Self {
        Self { estimate: Estimate::new(method, bounds), window: Window::default() }
    }

    /// Reads the learned state from its bytes; `None` if it is invalid.
    fn read(bytes: &[u8; LEARNED_BYTES], bounds: &Bounds) -> Option<Self> {
        let estimate = Estimate {
            // The bounds may have changed since the state was written.
            limit: double(bytes, 0)?.max(bounds.floor.into()).min(bounds.ceiling.into()),
            baseline: double(bytes, 8)?,
            count: number(bytes, 24, 4) as u32,
            probing_steps: bytes[28],
            measured: double(bytes, 16)?,
        };
        let window = Window {
            end: number(bytes, 29, 7),
            sum: double(bytes, 36)?,
            count: number(bytes, 44, 4) as u32,
            in_flight: number(bytes, 48, 4) as u32,
            dropped: number(bytes, 52, 4) as u32,
        };
        Some(Self { estimate, window })
    }

    /// Appends the learned state to the slots.
    fn write(&self, state: &mut State) {
        let Self { estimate, window } = self;
        let mut bytes = [0; LEARNED_BYTES];
        bytes[0..8].copy_from_slice(&estimate.limit.to_bits().to_le_bytes());
        bytes[8..16].copy_from_slice(&estimate.baseline.to_bits().to_le_bytes());
        bytes[16..24].copy_from_slice(&estimate.measured.to_bits().to_le_bytes());
        bytes[24..28].copy_from_slice(&estimate.count.to_le_bytes());
        bytes[28] = estimate.probing_steps;
        bytes[29..36].copy_from_slice(&window.end.to_le_bytes()[..7]);
        bytes[36..44].copy_from_slice(&window.sum.to_bits().to_le_bytes());
        bytes[44..48].copy_from_slice(&window.count.to_le_bytes());
        bytes[48..52].copy_from_slice(&window.in_flight.to_le_bytes());
        bytes[52..56].copy_from_slice(&window.dropped.to_le_bytes());
        state.append(&bytes);
    }
}

/// Returns the number in `size` bytes of a learned state at `at`.
fn number(bytes: &[u8; LEARNED_BYTES], at: usize, size: usize) -> u64 {
    let mut wide = [0; 8];
    wide[..size].copy_from_slice(&bytes[at..at + size]);
    u64::from_le_bytes(wide)
}

/// Returns the double in a learned state at `at`; `None` if it is negative, not a number, or 10¹⁵ or more.
fn double(bytes: &[u8; LEARNED_BYTES], at: usize) -> Option<f64> {
    let number = f64::from_bits(number(bytes, at, 8));
    if (0.0..1e15).contains(&number) { Some(number) } else { None }
}

/// The parts of a counter's state.
struct SplitState {
    learned: Learned,
    /// Length of the slots, which precede the learned state.
    slot_bytes: usize,
}

impl Adaptive {
    /// Creates a limiter.
    ///
    /// Returns `None` if 1 ≤ floor ≤ initial ≤ ceiling does not hold, if the timeout is 0 or more than one hour, or if
    /// [`Concurrency`] does not support the ceiling or the hold.
    #[must_use]
    pub fn new(method: Method, bounds: Bounds, hold: Micros) -> Option<Self> {
        let Bounds { floor, ceiling, initial, timeout } = bounds;
        let fits = floor >= 1 && floor <= initial && initial <= ceiling && timeout > 0 && timeout <= MAX_LATENCY;
        let slots = Concurrency::new(MaxHits::hard(ceiling.into()), hold)?;
        fits.then_some(Self { slots, method, bounds, sample: None })
    }

    /// Splits a state into the slots and the learned state. A learned state that is invalid is reset.
    fn split(&self, state: &State) -> SplitState {
        let Some((slots, learned)) = state.as_bytes().split_last_chunk::<LEARNED_BYTES>() else {
            return SplitState { learned: Learned::new(self.method, &self.bounds), slot_bytes: 0 };
        };
        let learned = Learned::read(learned, &self.bounds).unwrap_or_else(|| Learned::new(self.method, &self.bounds));
        SplitState { learned, slot_bytes: slots.len() }
    }

    /// Returns the concurrency limiter with the learned limit.
    fn slots(&self, learned: &Learned) -> Concurrency {
        self.slots.with_limit(learned.estimate.limit(&self.bounds).into())
    }

    fn learn(&self, learned: &mut Learned, sample: Sample, in_flight: u64, now: Micros) {
        let latency = sample.latency.get().clamp(1, MAX_LATENCY) as f64;
        let sample = adaptive::Sample { latency, in_flight: in_flight as u32, dropped: sample.dropped };
        if let Some(all) = learned.window.add(sample, now.get()) {
            learned.estimate.update(self.method, &self.bounds, all, now.get());
        }
    }
}

impl CounterProgram for Adaptive {
    const TAG: &'static str = "ad";
    /// The script of [`Concurrency`], which both algorithms share.
    const SCRIPT: &'static str = Concurrency::SCRIPT;
    const ARGUMENTS: &'static [&'static str] = Concurrency::ARGUMENTS;

    fn arguments(&self, operation: Operation) -> Arguments {
        let mut arguments = self.slots.arguments(operation);
        if let Some(method) = arguments.last_mut() {
            *method = 1 + self.method as u64;
        }
        let Bounds { floor, ceiling, initial, timeout } = self.bounds;
        arguments.extend([floor, ceiling, initial].map(u64::from));
        let latency = match self.sample {
            Some(sample) => sample.latency.get().clamp(1, MAX_LATENCY),
            None => 0,
        };
        let dropped = self.sample.is_some_and(|sample| sample.dropped);
        arguments.extend([timeout, latency, dropped.into()]);
        arguments
    }

    fn step(&self, state: &mut State, operation: Operation) -> bool {
        let SplitState { mut learned, slot_bytes } = self.split(state);
        state.cut_back(state.as_bytes().len() - slot_bytes);
        let before = Concurrency::in_flight(state, operation.now);
        let allowed = self.slots(&learned).step(state, operation);
        // Only the release of a held slot counts as a sample, not a repeated release.
        if operation.action == Action::Refund
            && let Some(sample) = self.sample
            && Concurrency::in_flight(state, operation.now) < before
        {
            self.learn(&mut learned, sample, before, operation.now);
        }
        if !state.is_empty() || learned != Learned::new(self.method, &self.bounds) {
            learned.write(state);
        }
        allowed
    }

    fn explain(&self, state: &State, operation: Operation, allowed: bool) -> Decision {
        let SplitState { learned, slot_bytes } = self.split(state);
        let limit = learned.estimate.limit(&self.bounds);
        let decision = self.slots(&learned).explain_slots(&state.as_bytes()[..slot_bytes], operation, allowed);
        Decision { limit: Some(limit), shed: !allowed, ..decision }
    }

    /// Returns `true`, because a slot may be released at any moment.
    fn denial_counts(&self, _state: &State, _now: Micros) -> bool {
        true
    }

    fn expires(&self, state: &State, now: Micros) -> Micros {
        let slots = &state.as_bytes()[..self.split(state).slot_bytes];
        self.slots.expires_at(slots, now).max(now + LEARNED_TTL)
    }
}

impl Limiter for Adaptive {
    const NAME: &'static str = "adaptive";
    const KEYWORDS: &'static [&'static str] = &["hold", "holder", "method", "floor", "ceiling", "initial", "timeout"];

    /// Builds a limiter. `spec.requests` is the ceiling, and `spec.window` the hold.
    fn build(spec: &LimitSpec) -> Result<Algorithm, InvalidLimit> {
        let defaults = Bounds::default();
        let ceiling = u32::try_from(spec.requests).unwrap_or(u32::MAX);
        let floor = spec.floor.unwrap_or(defaults.floor);
        let initial = spec.initial.unwrap_or(defaults.initial.clamp(floor.min(ceiling), ceiling));
        let timeout = match spec.timeout {
            Some(timeout) => timeout.get(),
            None => defaults.timeout,
        };
        if spec.soft.is_some() || spec.counts_denied() {
            let keyword = if spec.soft.is_some() { "soft" } else { "count_denied" };
            return Err(InvalidLimit { keyword, reason: "adaptive supports neither soft nor count_denied" });
        }
        if u64::from(ceiling) > Concurrency::MAX_SLOTS {
            return Err(InvalidLimit {
                keyword: "ceiling",
                reason: "adaptive stores every slot: ceiling must be at most 1000",
            });
        }
        if timeout == 0 || timeout > MAX_LATENCY {
            return Err(InvalidLimit {
                keyword: "timeout",
                reason: "timeout must be greater than 0 and at most 1 hour",
            });
        }
        let bounds = Bounds { floor, ceiling, initial, timeout };
        if floor == 0 || floor > initial || initial > ceiling {
            return Err(InvalidLimit {
                keyword: "floor",
                reason: "floor must be at least 1, initial at least floor, and ceiling at least initial",
            });
        }
        let reason = "hold must be greater than 0 and at most 1 day";
        let method = spec.method.unwrap_or_default();
        Ok(Self::new(method, bounds, spec.window).ok_or(InvalidLimit { keyword: "hold", reason })?.into())
    }

    fn with_context(self, context: RequestContext) -> Self {
        Self { slots: self.slots.with_context(context), sample: context.sample, ..self }
    }

    fn parts(&self, state: &State, now: Micros) -> Vec<CounterPart> {
        let slots = &state.as_bytes()[..self.split(state).slot_bytes];
        self.slots.held_slots(slots, now)
    }
}

#[cfg(test)]
mod tests;
