//! [`Resource`]: a resource that elastic limits depend on, with the utilization that this instance read last.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use parking_lot::Mutex;

/// A resource that elastic limits depend on, with its last known utilization.
pub struct Resource {
    /// The bits of an `f64` from 0 to 1.
    utilization: AtomicU64,
}

impl Resource {
    /// Returns the utilization from 0 to 1; 1 if there is no report.
    #[must_use]
    pub fn utilization(&self) -> f64 {
        f64::from_bits(self.utilization.load(Relaxed))
    }

    /// Sets the utilization; `None` if there is no report any more.
    pub fn set(&self, utilization: Option<f64>) {
        self.utilization.store(utilization.unwrap_or(1.0).to_bits(), Relaxed);
    }
}

/// The resources that rules name.
#[derive(Default)]
pub struct Resources(Mutex<HashMap<Box<str>, Arc<Resource>>>);

impl Resources {
    /// Returns the resource with this name. Its utilization is polled from then on.
    #[must_use]
    pub fn named(&self, name: &str) -> Arc<Resource> {
        let mut resources = self.0.lock();
        let resource = resources.entry(name.into());
        Arc::clone(resource.or_insert_with(|| Arc::new(Resource { utilization: 1_f64.to_bits().into() })))
    }

    /// Returns all resources that are still in use by rules, and drops the others.
    #[must_use]
    pub fn in_force(&self) -> Vec<(Box<str>, Arc<Resource>)> {
        let mut resources = self.0.lock();
        resources.retain(|_, resource| Arc::strong_count(resource) > 1);
        resources.iter().map(|(name, resource)| (name.clone(), Arc::clone(resource))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resource_that_no_rule_names_any_more_is_dropped() {
        let resources = Resources::default();
        let (kept, gone) = (resources.named("kept"), resources.named("gone"));
        assert_eq!(resources.in_force().len(), 2);
        drop(gone);
        let names: Vec<_> = resources.in_force().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, [Box::from("kept")]);
        assert!(Arc::ptr_eq(&kept, &resources.named("kept")));
    }

    #[test]
    fn a_resource_without_reports_counts_as_busy() {
        let resource = Resources::default().named("db");
        assert_eq!(resource.utilization(), 1.0);
        resource.set(Some(0.25));
        assert_eq!(resource.utilization(), 0.25);
        resource.set(None);
        assert_eq!(resource.utilization(), 1.0);
    }
}
