//! [`ResourceReports`]: receives reports about the utilization of resources, returns it, and keeps the values current
//! that elastic limits depend on.

use std::{sync::Arc, time::Duration};

use tokio::time::interval;

use super::Clock;
use crate::{
    engine::{Engine, Micros, Report, ReportError, Resources, StoreError, Utilization},
    metrics::{Instrument, Label, Meter},
    store::{AnyStore, next_answer},
};

/// Interval between two polls of the store. All instances receive a report within a second.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Maximum length of the name of a resource or a reporter.
const MAX_NAME_BYTES: usize = 256;
/// Maximum time that a report is valid.
const MAX_TTL: Micros = Micros::from_secs(3_600);

/// Error returned when a report is not accepted or the utilization is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResourceError {
    /// A name is empty or too long.
    #[error("the names of the resource and the reporter must have 1 to {MAX_NAME_BYTES} bytes")]
    Name,
    /// The utilization is not a number in the valid range.
    #[error("utilization must be a number of at least 0; numbers above 1 count as 1")]
    Utilization,
    /// The TTL is zero or too long.
    #[error("the TTL of a report must be above 0 and at most 1 hour")]
    Ttl,
    /// The report cannot be stored.
    #[error(transparent)]
    Report(#[from] ReportError),
    /// The store cannot return the utilization.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Access to the reported utilization of resources.
#[derive(Clone)]
pub struct ResourceReports {
    /// The engine, which calls the store.
    pub engine: Engine<AnyStore>,
    /// The clock.
    pub clock: Clock,
    /// The resources that rules name.
    pub resources: Arc<Resources>,
}

impl ResourceReports {
    /// Stores a report and returns the utilization according to all current reports. A value above 1 is stored as 1.
    ///
    /// # Errors
    ///
    /// Returns an error if the report is invalid or cannot be stored.
    pub async fn report(&self, report: &Report<'_>) -> Result<Option<Utilization>, ResourceError> {
        check(report.resource)?;
        check(report.reporter)?;
        if !(0.0..=f64::MAX).contains(&report.utilization) {
            return Err(ResourceError::Utilization);
        }
        if report.ttl == Micros::ZERO || report.ttl > MAX_TTL {
            return Err(ResourceError::Ttl);
        }
        Ok(self.engine.report(report, self.clock.now()).await?)
    }

    /// Returns the utilization according to all current reports, or `None` if there are none.
    ///
    /// # Errors
    ///
    /// Returns an error if the name is invalid or the store cannot be reached.
    pub async fn get(&self, resource: &str) -> Result<Option<Utilization>, ResourceError> {
        check(resource)?;
        let utilization = self.engine.utilization(&[resource], self.clock.now()).await;
        Ok(next_answer(&mut utilization.into_iter())?)
    }

    /// Polls the utilization of the resources that rules name. Never returns.
    ///
    /// A resource whose utilization cannot be read counts as fully utilized.
    pub async fn follow(self) {
        let mut tick = interval(POLL_INTERVAL);
        loop {
            tick.tick().await;
            let named = self.resources.in_force();
            if named.is_empty() {
                continue;
            }
            let names: Vec<_> = named.iter().map(|(name, _)| &**name).collect();
            let utilizations = self.engine.utilization(&names, self.clock.now()).await;
            for ((_, resource), utilization) in named.iter().zip(utilizations) {
                resource.set(utilization.ok().flatten().map(|utilization| utilization.max));
            }
        }
    }

    /// Registers the metric of the last polled utilizations with `meter`.
    pub fn observe(&self, meter: &dyn Meter) {
        let resources = Arc::clone(&self.resources);
        meter.register(Instrument::f64_gauge(
            "sluicegate_resource_utilization",
            "Last polled utilization of each resource that limits depend on; 1 if there are no reports",
            move |observer| {
                for (name, resource) in resources.in_force() {
                    observer.observe(resource.utilization(), [Label::new("resource", name.into_string())]);
                }
            },
        ));
    }
}

fn check(name: &str) -> Result<(), ResourceError> {
    if (1..=MAX_NAME_BYTES).contains(&name.len()) { Ok(()) } else { Err(ResourceError::Name) }
}
