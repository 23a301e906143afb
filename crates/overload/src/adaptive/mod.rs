//! Adaptive concurrency limits: [`Estimate`] adapts the number of requests in flight to the measured latency.
//!
//! The three algorithms are those of Netflix's concurrency-limits, with its formulas and defaults; `vegas` documents
//! where it differs. They run once for each [`Window`] of samples, like its `WindowedLimit`. They do no I/O and read no
//! clock. They use only operations on doubles whose results IEEE 754 defines exactly, so that a Lua script computes the
//! same numbers.

mod aimd;
mod gradient2;
mod vegas;
mod window;

pub use window::Window;

/// Algorithm of an adaptive limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Method {
    /// Additive increase, multiplicative decrease: the limit rises by one with each [`Window`] of successful requests
    /// that used at least half of it, and falls by a tenth with each window in which too many requests were dropped or
    /// the mean latency exceeded the timeout. Latency below the timeout has no effect.
    Aimd,
    /// Ratio of the current latency to the average of about five minutes. It adapts to slow changes of the upstream,
    /// but after a while it accepts a permanent overload as normal.
    Gradient2,
    /// Queue length, estimated from the ratio of the current latency to the latency without load.
    #[default]
    Vegas,
}

impl Method {
    /// All methods.
    pub const ALL: [Self; 3] = [Self::Aimd, Self::Gradient2, Self::Vegas];

    /// Returns the name of the algorithm in the literature, as in rule files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Aimd => "aimd",
            Self::Gradient2 => "gradient2",
            Self::Vegas => "vegas",
        }
    }
}

/// Bounds of an adaptive limit, and the timeout of requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    /// Minimum limit, at least 1.
    pub floor: u32,
    /// Maximum limit.
    pub ceiling: u32,
    /// Initial limit.
    pub initial: u32,
    /// Timeout in microseconds. A request that takes longer counts as dropped.
    pub timeout: u64,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { floor: 1, ceiling: 1_000, initial: 20, timeout: 5_000_000 }
    }
}

/// Latency and outcome of a request, or of the combined requests of a window.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Latency, in microseconds; the mean of a window.
    pub latency: f64,
    /// Number of requests in flight; the maximum of a window.
    pub in_flight: u32,
    /// Whether requests timed out or were rejected because of overload.
    pub dropped: bool,
}

/// Current limit, and the measurements from which it is computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// Maximum number of requests in flight, with the fraction that the next step continues from.
    pub limit: f64,
    /// Reference latency in microseconds: the latency without load, or the long-term average. 0 if not yet known.
    pub baseline: f64,
    /// For Gradient2, the number of samples in the baseline, up to 10. For Vegas, the number of the 40-second period in
    /// which the baseline was last measured.
    pub count: u32,
    /// Number of remaining steps of a measurement of the baseline; 0 if none is in progress.
    pub probing_steps: u8,
    /// Mean latency in the current measurement of the baseline, in microseconds.
    pub measured: f64,
}

/// Factor applied to the limit while the baseline is measured, so that an existing queue drains and no new one builds
/// up.
const PROBE_FACTOR: f64 = 0.5;

impl Estimate {
    /// Creates an estimate at the initial limit, without measurements.
    #[must_use]
    pub fn new(method: Method, bounds: &Bounds) -> Self {
        let probing = if method == Method::Vegas { vegas::PROBING } else { 0 };
        Self { limit: bounds.initial.into(), baseline: 0.0, count: 0, probing_steps: probing, measured: 0.0 }
    }

    /// Returns the number of requests that may be in flight now.
    #[must_use]
    pub fn limit(&self, bounds: &Bounds) -> u32 {
        let limit = if self.probing_steps > 0 && self.baseline > 0.0 { self.limit * PROBE_FACTOR } else { self.limit };
        (limit as u32).clamp(bounds.floor.max(1), bounds.ceiling.max(1))
    }

    /// Updates the limit with the sample of a window. `now` is the wall-clock time in microseconds, which determines
    /// when Vegas measures its baseline.
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
