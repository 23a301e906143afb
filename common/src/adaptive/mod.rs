//! Adaptive concurrency: how many may be in flight follows what latency says.
//!
//! The three algorithms are those of Netflix' concurrency-limits, with its formulas and defaults; where `vegas` differs, it says
//! why. They are asked once for each [`Window`] of samples, as its `WindowedLimit` does it. No I/O, no clock; doubles, and operations that any IEEE 754
//! machine does alike, so that a script can be their twin.

mod aimd;
mod gradient2;
mod vegas;
mod window;

pub use window::Window;

/// What the limit follows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Method {
    /// Additive increase, multiplicative decrease: up by one while all goes well, down by a tenth when requests time out or
    /// are dropped. Latency alone says nothing to it.
    Aimd,
    /// The latency of now beside that of a minute or so. It follows an upstream that drifts, and takes an overload that
    /// stays for the new normal after a while.
    Gradient2,
    /// The queue that latency says there is: the latency of now beside the one without load.
    #[default]
    Vegas,
}

impl Method {
    /// Every method.
    pub const ALL: [Self; 3] = [Self::Aimd, Self::Gradient2, Self::Vegas];

    /// Its name in the literature.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Aimd => "aimd",
            Self::Gradient2 => "gradient2",
            Self::Vegas => "vegas",
        }
    }
}

/// Within which bounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    /// Never fewer: at least 1.
    pub floor: u32,
    /// Never more.
    pub ceiling: u32,
    /// Where it starts.
    pub initial: u32,
    /// A request that takes longer counts as dropped, in microseconds.
    pub timeout: u64,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { floor: 1, ceiling: 1_000, initial: 20, timeout: 5_000_000 }
    }
}

/// What came of requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// How long they took, in microseconds.
    pub latency: f64,
    /// How many were in flight at most.
    pub in_flight: u32,
    /// Some of them timed out, or were refused for overload.
    pub dropped: bool,
}

/// A limit and what it was found by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// How many may be in flight; a fraction counts for the next step.
    pub limit: f64,
    /// The latency that it is held against, in microseconds: without load, or in the long run. 0 is not known yet.
    pub baseline: f64,
    /// Of how many samples the baseline is made, or when it was measured.
    pub count: u32,
    /// The baseline is being measured: steps that are left.
    pub probing: u8,
    /// The mean of what has been measured so far.
    pub measured: f64,
}

/// While the baseline is measured anew the limit is this part of itself: a queue that is there drains, and none builds up.
const PROBE: f64 = 0.5;

impl Estimate {
    /// Nothing known yet.
    #[must_use]
    pub fn new(method: Method, bounds: &Bounds) -> Self {
        let probing = if method == Method::Vegas { vegas::PROBING } else { 0 };
        Self { limit: bounds.initial.into(), baseline: 0.0, count: 0, probing, measured: 0.0 }
    }

    /// How many may be in flight now.
    #[must_use]
    pub fn limit(&self, bounds: &Bounds) -> u32 {
        let limit = if self.probing > 0 && self.baseline > 0.0 { self.limit * PROBE } else { self.limit };
        (limit as u32).clamp(bounds.floor.max(1), bounds.ceiling.max(1))
    }

    /// One step. `now`, in microseconds of the wall's clock, says when Vegas measures anew.
    pub fn update(&mut self, method: Method, bounds: &Bounds, sample: Sample, now: u64) {
        let sample = Sample { dropped: sample.dropped || sample.latency > bounds.timeout as f64, ..sample };
        match method {
            Method::Aimd => aimd::update(self, sample),
            Method::Gradient2 => gradient2::update(self, sample),
            Method::Vegas => vegas::update(self, sample, now),
        }
        self.limit = self.limit.max(bounds.floor.max(1).into()).min(bounds.ceiling.max(1).into());
    }
}
