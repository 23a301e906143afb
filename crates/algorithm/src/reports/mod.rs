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
    /// Mean of the reported utilizations, from 0 to 1.
    pub mean: f64,
    /// Number of reporters.
    pub reporters: u32,
}

const END_BYTES: usize = 7;
const REPORTER_BYTES: usize = 6;
const UTILIZATION_BYTES: usize = 2;
const REPORT_BYTES: usize = END_BYTES + REPORTER_BYTES + UTILIZATION_BYTES;

/// The report of one reporter.
#[derive(Clone, Copy, Debug)]
struct Report {
    /// When the report expires, in microseconds.
    end: u64,
    reporter: u64,
    /// Utilization in ten thousandths.
    utilization: u64,
}

impl Report {
    fn read(state: &State, index: usize) -> Option<Self> {
        let offset = REPORT_BYTES * index;
        Some(Self {
            end: state.number::<END_BYTES>(offset)?,
            reporter: state.number::<REPORTER_BYTES>(offset + END_BYTES)?,
            utilization: state.number::<UTILIZATION_BYTES>(offset + END_BYTES + REPORTER_BYTES)?,
        })
    }

    fn write(&self, state: &mut State) {
        state.push::<END_BYTES>(self.end);
        state.push::<REPORTER_BYTES>(self.reporter);
        state.push::<UTILIZATION_BYTES>(self.utilization);
    }
}

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
        let reporters = decision.limit?;
        if reporters == 0 {
            return None;
        }
        Some(Utilization {
            max: decision.used as f64 / Self::FULL_UTILIZATION as f64,
            mean: decision.remaining as f64 / Self::FULL_UTILIZATION as f64,
            reporters,
        })
    }

    /// Returns the reports that have not expired.
    fn valid_reports(state: &State, now: Micros) -> impl Iterator<Item = Report> {
        let max_end = (now + Self::MAX_TTL + CLOCK_SLACK).get();
        let reports = (0..state.as_bytes().len() / REPORT_BYTES).filter_map(|index| Report::read(state, index));
        reports.filter(move |report| report.end > now.get() && report.end <= max_end)
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
        reports.retain(|report| report.reporter != self.reporter);
        let allowed = operation.action.releases() || reports.len() < Self::MAX_REPORTERS;
        if allowed && !operation.action.releases() {
            reports.push(Report {
                end: (operation.now + self.ttl).get(),
                reporter: self.reporter,
                utilization: operation.cost.min(Self::FULL_UTILIZATION),
            });
        }
        state.clear();
        for report in reports {
            report.write(state);
        }
        allowed
    }

    /// Encodes the summary in a decision, for [`UtilizationReports::read`]: `used` is the highest report, `remaining`
    /// the mean, and `limit` the number of reporters.
    fn explain(&self, state: &State, operation: Operation, allowed: bool) -> Decision {
        let mut max = 0;
        let mut sum = 0;
        let mut reporters = 0;
        let mut last_end = 0;
        for report in Self::valid_reports(state, operation.now) {
            max = report.utilization.max(max);
            sum += report.utilization;
            reporters += 1;
            last_end = report.end.max(last_end);
        }
        Decision {
            allowed,
            used: max,
            remaining: sum / u64::from(reporters.max(1)),
            limit: Some(reporters),
            reset: Micros::new(last_end) - operation.now,
            ..Decision::default()
        }
    }

    /// Returns `true`, because other reports may expire at any moment.
    fn denial_counts(&self, _state: &State, _now: Micros) -> bool {
        true
    }

    fn expires(&self, state: &State, now: Micros) -> Micros {
        Micros::new(Self::valid_reports(state, now).map(|report| report.end).max().unwrap_or(now.get()))
    }
}

#[cfg(test)]
mod tests;
