//! Sums over all rules and the hits of single rules, for the activity of the last hour.

use std::sync::Arc;

use sluicegate_algorithm::Micros;

use super::{Outcome, Series, Statistics, exported, series::Count};

/// Hits of all rules since the start of the process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HitTotals {
    /// Requested hits.
    pub requested: u64,
    /// Denied hits.
    pub denied: u64,
    /// Hits within a limit, but near it.
    pub near: u64,
    /// Hits over a limit that were allowed because of shadow mode.
    pub shadow: u64,
}

impl HitTotals {
    fn add(&mut self, series: &Series) {
        let over = series.sum(Count::Over).unwrap_or_default();
        let shadow = series.sum(Count::Shadow).unwrap_or_default();
        self.requested += series.sum(Count::Total).unwrap_or_default();
        self.denied += over.saturating_sub(shadow);
        self.near += series.sum(Count::Near).unwrap_or_default();
        self.shadow += shadow;
    }
}

/// Hits of one class since the start of the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClassTotals {
    /// Labels of the rule: the domain and its levels.
    pub rule: Vec<String>,
    /// Name of the class.
    pub class: String,
    /// Allowed hits.
    pub allowed: u64,
    /// Hits denied because the caller exceeded its limit.
    pub denied: u64,
    /// Hits denied because of overload.
    pub shed: u64,
    /// Time since which the class has been shed; `None` if it is not shed now.
    pub shed_since: Option<Micros>,
}

/// Hits and requests of one rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RuleHits {
    /// Requests that the limit decided.
    pub requests: u64,
    /// Requests that the limit denied.
    pub denied_requests: u64,
    /// Requested hits.
    pub requested: u64,
    /// Denied hits.
    pub denied: u64,
    /// Hits over the limit that were allowed because of shadow mode.
    pub shadow: u64,
}

impl RuleHits {
    /// Returns the hits that were counted after `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            requests: self.requests.saturating_sub(earlier.requests),
            denied_requests: self.denied_requests.saturating_sub(earlier.denied_requests),
            requested: self.requested.saturating_sub(earlier.requested),
            denied: self.denied.saturating_sub(earlier.denied),
            shadow: self.shadow.saturating_sub(earlier.shadow),
        }
    }
}

/// The counters of one rule. Rules that survive a reload keep them.
#[derive(Clone)]
pub struct RuleTotals(pub(crate) Arc<Series>);

impl RuleTotals {
    /// Returns the hits since the start of the process, or `None` if the rule was never used.
    #[must_use]
    pub fn get(&self) -> Option<RuleHits> {
        let requested = self.0.sum(Count::Total)?;
        let over = self.0.sum(Count::Over)?;
        let shadow = self.0.sum(Count::Shadow)?;
        Some(RuleHits {
            requests: self.0.requests()?,
            denied_requests: self.0.sum(Count::DeniedRequests)?,
            requested,
            denied: over.saturating_sub(shadow),
            shadow,
        })
    }

    /// Returns a number that identifies the rule for as long as this value exists.
    #[must_use]
    pub fn id(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }
}

impl Statistics {
    /// Returns the hits of all rules.
    #[must_use]
    pub fn hit_totals(&self) -> HitTotals {
        let mut totals = HitTotals::default();
        for series in exported(&self.rules.lock()) {
            totals.add(series);
        }
        // Workers wait for this lock, so it is held only while references are copied.
        let dynamic: Vec<_> = self.dynamic.lock().values().cloned().collect();
        for series in &dynamic {
            totals.add(series);
        }
        totals.add(&self.other);
        totals
    }

    /// Returns the hits of each class of each rule with classes or that sheds.
    #[must_use]
    pub fn class_totals(&self, now: Micros) -> Vec<ClassTotals> {
        let with_classes: Vec<_> = self.rules.lock().values().filter_map(|rule| rule.shedding.clone()).collect();
        let mut totals = Vec::new();
        for shedding in with_classes {
            totals.extend(shedding.classes.iter().map(|class| ClassTotals {
                rule: shedding.labels.iter().map(ToString::to_string).collect(),
                class: class.name.clone(),
                allowed: class.hits(Outcome::Allowed),
                denied: class.hits(Outcome::Denied),
                shed: class.hits(Outcome::Shed),
                shed_since: class.since(now),
            }));
        }
        totals
    }
}
