//! [`UtilizationReports`]: how much of a resource is in use according to each reporter, for a limited time.
//!
//! This is not a limit. Reports are stored like counters, so that every store keeps them and all instances see the same
//! reports. The state has 15 bytes for each reporter: the end of the report (7), the reporter (6), and the utilization
//! in ten thousandths (2).

use smallvec::smallvec;

use super::{Action, Arguments, CLOCK_SLACK, CounterProgram, Decision, Micros, Operation, State};

/// A report with its lifetime; it replaces the previous report of the same reporter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UtilizationReports {
    ttl: Micros,
    reporter: u64,
}

/// A summary of the reports of a resource.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Utilization {
    /// Highest reported utilization, from 0 to 1.
    pub max: f64,
    /// Mean of the reports.
    pub mean: f64,
    /// Number of reporters.
    pub reporters: u32,
}

const END_BYTES: usize = 7;
const REPORTER_BYTES: usize = 6;
const UTILIZATION_BYTES: usize = 2;
const REPORT_BYTES: usize = END_BYTES + REPORTER_BYTES + UTILIZATION_BYTES;

impl UtilizationReports {
    /// Cost that represents a utilization of 1.
    pub const FULL_UTILIZATION: u64 = 10_000;
    /// Maximum lifetime of a report: one hour.
    pub const MAX_TTL: Micros = Micros::from_secs(3_600);
    /// Maximum number of reporters; further reporters are denied.
    pub const MAX_REPORTERS: usize = 1_000;

    /// Creates a report without a reporter. A lifetime above [`Self::MAX_TTL`] is shortened.
    #[must_use]
    pub fn new(ttl: Micros) -> Self {
        Self { ttl: ttl.min(Self::MAX_TTL), reporter: 0 }
    }

    /// Sets the reporter, of whom the lowest 48 bits count.
    #[must_use]
    pub fn with_reporter(self, reporter: u64) -> Self {
        Self { reporter: reporter & ((1 << (8 * REPORTER_BYTES)) - 1), ..self }
    }

    /// Returns the summary from a decision of this program; `None` if there are no reports.
    #[must_use]
    pub fn read(decision: &Decision) -> Option<Utilization> {
        let fraction = |number: u64| number as f64 / Self::FULL_UTILIZATION as f64;
        let reporters = decision.limit.filter(|reporters| *reporters > 0)?;
        Some(Utilization { max: fraction(decision.used), mean: fraction(decision.remaining), reporters })
    }

    /// Returns the reports that have not expired: end, reporter and utilization.
    fn valid_reports(state: &State, now: Micros) -> impl Iterator<Item = (u64, u64, u64)> {
        let report = move |index: usize| {
            let offset = REPORT_BYTES * index;
            Some((
                state.number::<END_BYTES>(offset)?,
                state.number::<REPORTER_BYTES>(offset + END_BYTES)?,
                state.number::<UTILIZATION_BYTES>(offset + END_BYTES + REPORTER_BYTES)?,
            ))
        };
        let max_end = (now + Self::MAX_TTL + CLOCK_SLACK).get();
        let reports = (0..state.as_bytes().len() / REPORT_BYTES).filter_map(report);
        reports.filter(move |(end, ..)| *end > now.get() && *end <= max_end)
    }
}

impl CounterProgram for UtilizationReports {
    const TAG: &'static str = "rp";
    const SCRIPT: &'static str = include_str!("script.lua");
    const ARGUMENTS: &'static [&'static str] = &["utilization", "ttl", "max_end_ahead", "max_reporters", "reporter"];

    fn arguments(&self, operation: Operation) -> Arguments {
        let max_end_ahead = (Self::MAX_TTL + CLOCK_SLACK).get();
        smallvec![
            operation.cost.min(Self::FULL_UTILIZATION),
            self.ttl.get(),
            max_end_ahead,
            Self::MAX_REPORTERS as u64,
            self.reporter
        ]
    }

    fn step(&self, state: &mut State, operation: Operation) -> bool {
        if operation.action == Action::Peek {
            return true;
        }
        let mut reports: Vec<_> = Self::valid_reports(state, operation.now).collect();
        reports.retain(|(_, reporter, _)| *reporter != self.reporter);
        let allowed = operation.action.releases() || reports.len() < Self::MAX_REPORTERS;
        if allowed && !operation.action.releases() {
            reports.push(((operation.now + self.ttl).get(), self.reporter, operation.cost.min(Self::FULL_UTILIZATION)));
        }
        state.clear();
        for (end, reporter, utilization) in reports {
            state.push::<END_BYTES>(end);
            state.push::<REPORTER_BYTES>(reporter);
            state.push::<UTILIZATION_BYTES>(utilization);
        }
        allowed
    }

    /// Encodes the summary in a decision, for [`UtilizationReports::read`]: `used` is the highest report, `remaining`
    /// the mean, and `limit` the number of reporters.
    fn explain(&self, state: &State, operation: Operation, allowed: bool) -> Decision {
        let (mut max, mut sum, mut reporters, mut last) = (0, 0, 0, 0);
        for (end, _, utilization) in Self::valid_reports(state, operation.now) {
            (max, sum, reporters, last) = (utilization.max(max), sum + utilization, reporters + 1, end.max(last));
        }
        Decision {
            allowed,
            used: max,
            remaining: sum / u64::from(reporters.max(1)),
            limit: Some(reporters),
            reset: Micros::new(last) - operation.now,
            ..Decision::default()
        }
    }

    /// Returns `true`, because other reports may expire at any moment.
    fn denial_counts(&self, _state: &State, _now: Micros) -> bool {
        true
    }

    fn expires(&self, state: &State, now: Micros) -> Micros {
        Micros::new(Self::valid_reports(state, now).map(|(end, ..)| end).max().unwrap_or(now.get()))
    }
}

#[cfg(test)]
mod tests;
