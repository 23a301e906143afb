//! Reports on the utilization of resources, which are stored like counters.

use sluicegate_algorithm::{
    Micros,
    reports::{Utilization, UtilizationReports},
};
use sluicegate_placement::{ESCAPED, escape};
use sluicegate_store::{Charge, Counter, Store, StoreError, only_answer};

use super::{Engine, matching::holder_id};

/// A report on the utilization of a resource.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Report<'a> {
    /// Name of the resource.
    pub resource: &'a str,
    /// Name of the reporter. Its later reports replace this one.
    pub reporter: &'a str,
    /// The utilization, from 0 to 1. Higher values count as 1.
    pub utilization: f64,
    /// Time after which the report expires.
    pub ttl: Micros,
}

/// Error returned when a report is not stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReportError {
    /// The store failed.
    #[error("cannot store the utilization report")]
    Store(#[from] StoreError),
    /// The resource has the maximum number of reporters.
    #[error("the resource already has {} reporters, which is the maximum", UtilizationReports::MAX_REPORTERS)]
    Full,
}

/// Returns the key of a resource's reports in the store. No domain is empty, so no counter has such a name.
fn key(resource: &str) -> Vec<u8> {
    let mut name = b"{|".to_vec();
    escape(&mut name, resource, ESCAPED);
    name.extend_from_slice(b"}rp");
    name
}

impl<S: Store> Engine<S> {
    /// Stores a report, and returns the utilization by all reports.
    ///
    /// # Errors
    ///
    /// Returns an error if the store fails, or if the resource already has the maximum number of other reporters.
    pub async fn report(&self, report: &Report<'_>, now: Micros) -> Result<Option<Utilization>, ReportError> {
        let reports = UtilizationReports::new(report.ttl).with_reporter(holder_id(report.reporter));
        let share = (report.utilization.clamp(0.0, 1.0) * UtilizationReports::FULL_UTILIZATION as f64).round() as u64;
        let counter = Counter::new(key(report.resource), reports);
        let decision = only_answer(self.store.apply(&[counter.take(share)], Charge::Each, now).await)?.decision;
        if !decision.allowed {
            return Err(ReportError::Full);
        }
        Ok(UtilizationReports::read(&decision))
    }

    /// Returns the utilization of each resource by all its reports; `None` if it has none.
    pub async fn utilization(&self, resources: &[&str], now: Micros) -> Vec<Result<Option<Utilization>, StoreError>> {
        let reports = UtilizationReports::new(Micros::ZERO);
        let counters: Vec<_> = resources.iter().map(|resource| Counter::new(key(resource), reports)).collect();
        let hits: Vec<_> = counters.iter().map(|counter| counter.take(0).peek()).collect();
        let answers = self.store.apply(&hits, Charge::Each, now).await;
        answers.into_iter().map(|answer| Ok(UtilizationReports::read(&answer?.decision))).collect()
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;
    use crate::testing::{NOW, engine};

    #[test]
    fn reports_are_summarised_by_resource() {
        let engine = engine("domain: api\ndescriptors: [{key: user}]\n");
        let report = |resource, reporter, utilization| {
            let report = Report { resource, reporter, utilization, ttl: Micros::from_secs(60) };
            engine.report(&report, NOW).now_or_never().unwrap()
        };
        let summary = |max, mean, reporters| Some(Utilization { max, mean, reporters });
        assert_eq!(report("db", "a", 0.25), Ok(summary(0.25, 0.25, 1)));
        assert_eq!(report("db", "b", 0.75), Ok(summary(0.75, 0.5, 2)));
        assert_eq!(report("cache", "a", 1.5), Ok(summary(1.0, 1.0, 1)));
        assert_eq!(report("db", "b", 0.5), Ok(summary(0.5, 0.375, 2)), "a report replaces that of the same reporter");
        let all = engine.utilization(&["db", "cache", "idle"], NOW).now_or_never().unwrap();
        assert_eq!(all, [Ok(summary(0.5, 0.375, 2)), Ok(summary(1.0, 1.0, 1)), Ok(None)]);
    }
}
