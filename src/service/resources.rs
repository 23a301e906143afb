//! What resources say of themselves: reported, asked, and followed for the limits that depend on it.

use std::{sync::Arc, time::Duration};

use opentelemetry::{KeyValue, metrics::Meter};
use tokio::time::interval;

use super::Clock;
use crate::engine::{Engine, Micros, Report, ReportError, Resources, StoreError, Utilization};

/// Between two looks at what is said: all instances know within a second.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// The longest name of a resource or a reporter.
const MAX_NAME_BYTES: usize = 256;
/// The longest life of a report.
const MAX_TTL: Micros = Micros::from_secs(3_600);

/// Why a report has not been kept, or nothing can be said.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResourceError {
    /// It has no name, or too long a one.
    #[error("a resource and a reporter have names of 1 to {MAX_NAME_BYTES} bytes")]
    Name,
    /// No share of anything.
    #[error("a utilization is a number from 0 to 1")]
    Utilization,
    /// It holds for no time, or for too long.
    #[error("a report holds for more than nothing, and an hour at most")]
    Life,
    /// Nobody can keep it.
    #[error(transparent)]
    Report(#[from] ReportError),
    /// Nobody can say.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The way to what resources say.
#[derive(Clone)]
pub struct ResourceReports {
    /// Which asks the store.
    pub engine: Engine,
    /// What time it is.
    pub clock: Clock,
    /// Those that rules name.
    pub resources: Arc<Resources>,
}

impl ResourceReports {
    /// Keeps a report, and says what all say.
    pub async fn report(&self, report: &Report<'_>) -> Result<Option<Utilization>, ResourceError> {
        check(report.resource)?;
        check(report.reporter)?;
        if !(0.0..=f64::MAX).contains(&report.utilization) {
            return Err(ResourceError::Utilization);
        }
        if report.ttl == Micros::ZERO || report.ttl > MAX_TTL {
            return Err(ResourceError::Life);
        }
        Ok(self.engine.report(report, self.clock.now()).await?)
    }

    /// What all say; `None` when nobody does.
    pub async fn get(&self, resource: &str) -> Result<Option<Utilization>, ResourceError> {
        check(resource)?;
        let said = self.engine.utilization(&[resource], self.clock.now()).await.pop();
        Ok(said.unwrap_or(Err(StoreError::Rejected))?)
    }

    /// Looks at what is said of the resources that rules name, for ever. Whatever cannot be asked has nothing to spare.
    pub async fn follow(self) {
        let mut tick = interval(POLL_INTERVAL);
        loop {
            tick.tick().await;
            let named = self.resources.in_force();
            if named.is_empty() {
                continue;
            }
            let names: Vec<_> = named.iter().map(|(name, _)| &**name).collect();
            let said = self.engine.utilization(&names, self.clock.now()).await;
            for ((_, resource), said) in named.iter().zip(said) {
                resource.set(said.ok().flatten().map(|said| said.worst));
            }
        }
    }

    /// Shows what this instance last heard to the meter.
    pub fn observe(&self, meter: &Meter) {
        let resources = Arc::clone(&self.resources);
        let gauge = meter.f64_observable_gauge("sluicegate_resource_utilization");
        gauge
            .with_description("Utilization of resources that limits depend on, as last heard; 1 when nobody says")
            .with_callback(move |observer| {
                for (name, resource) in resources.in_force() {
                    observer.observe(resource.utilization(), &[KeyValue::new("resource", name.to_string())]);
                }
            })
            .build();
    }
}

fn check(name: &str) -> Result<(), ResourceError> {
    if (1..=MAX_NAME_BYTES).contains(&name.len()) { Ok(()) } else { Err(ResourceError::Name) }
}
