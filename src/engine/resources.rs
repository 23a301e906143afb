//! What resources say of themselves: kept in the store as counters are, and here as this instance last heard it.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use sluicegate_common::{ESCAPED, escape};

use super::{Engine, applied_limit::holder};
use crate::{
    algorithm::{
        Algorithm, Micros, RequestContext,
        reports::{Utilization, UtilizationReports},
    },
    store::{Charge, Hit, Store, StoreError},
};

/// One resource.
pub struct Resource {
    /// The bits of a share of 1.
    utilization: AtomicU64,
}

impl Resource {
    /// How much of it is in use, from 0 to 1; 1 while nobody says.
    #[must_use]
    pub fn utilization(&self) -> f64 {
        f64::from_bits(self.utilization.load(Relaxed))
    }

    /// It has been heard of; `None`: nobody says anything of it any more.
    pub fn set(&self, utilization: Option<f64>) {
        self.utilization.store(utilization.unwrap_or(1.0).to_bits(), Relaxed);
    }
}

/// Those that rules name.
#[derive(Default)]
pub struct Resources(Mutex<HashMap<Box<str>, Arc<Resource>>>);

impl Resources {
    /// The resource of this name, which is asked for from now on.
    #[must_use]
    pub fn named(&self, name: &str) -> Arc<Resource> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let resource = known.entry(name.into());
        Arc::clone(resource.or_insert_with(|| Arc::new(Resource { utilization: 1_f64.to_bits().into() })))
    }

    /// All that rules in force name; others are forgotten.
    #[must_use]
    pub fn in_force(&self) -> Vec<(Box<str>, Arc<Resource>)> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|_, resource| Arc::strong_count(resource) > 1);
        known.iter().map(|(name, resource)| (name.clone(), Arc::clone(resource))).collect()
    }
}

/// What somebody says of a resource.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Report<'a> {
    /// Of which.
    pub resource: &'a str,
    /// Who: a later report of his replaces this one.
    pub reporter: &'a str,
    /// How much of it is in use; from 1 on, all.
    pub utilization: f64,
    /// For how long he says so.
    pub ttl: Micros,
}

/// Nobody says anything more of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReportError {
    /// The store cannot be asked.
    #[error("the report cannot be kept")]
    Store(#[from] StoreError),
    /// Too many say something of it.
    #[error("{} others report on this resource already", UtilizationReports::MAX_REPORTERS)]
    Full,
}

/// The name under which the store keeps what is said. No domain is empty, so no counter has such a name.
fn key(resource: &str) -> Vec<u8> {
    let mut name = b"{|".to_vec();
    escape(&mut name, resource, ESCAPED);
    name.extend_from_slice(b"}rp");
    name
}

impl Engine {
    /// Keeps a report, and says what all say.
    pub async fn report(&self, report: &Report<'_>, now: Micros) -> Result<Option<Utilization>, ReportError> {
        let asker = RequestContext { holder: holder(report.reporter), ..RequestContext::default() };
        let algorithm = Algorithm::from(UtilizationReports::new(report.ttl)).with_context(asker);
        let part = (report.utilization.clamp(0.0, 1.0) * UtilizationReports::WHOLE as f64).round() as u64;
        let key = key(report.resource);
        let answer = self.store.apply(&[Hit::take(&key, &algorithm, part)], Charge::Each, now).await.pop();
        let decision = answer.unwrap_or(Err(StoreError::Rejected))?.decision;
        if !decision.allowed {
            return Err(ReportError::Full);
        }
        Ok(UtilizationReports::read(&decision))
    }

    /// What all say of these resources.
    pub async fn utilization(&self, resources: &[&str], now: Micros) -> Vec<Result<Option<Utilization>, StoreError>> {
        let algorithm = Algorithm::from(UtilizationReports::new(Micros::ZERO));
        let keys: Vec<_> = resources.iter().map(|resource| key(resource)).collect();
        let hits: Vec<_> = keys.iter().map(|key| Hit::take(key, &algorithm, 0).peek()).collect();
        let answers = self.store.apply(&hits, Charge::Each, now).await;
        answers.into_iter().map(|answer| Ok(UtilizationReports::read(&answer?.decision))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resource_that_no_rule_names_any_more_is_forgotten() {
        let resources = Resources::default();
        let (kept, gone) = (resources.named("kept"), resources.named("gone"));
        assert_eq!(resources.in_force().len(), 2);
        drop(gone);
        let names: Vec<_> = resources.in_force().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, [Box::from("kept")]);
        assert!(Arc::ptr_eq(&kept, &resources.named("kept")));
    }
}
