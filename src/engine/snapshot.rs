//! The rules in force together with their statistics: immutable, swapped as one by a reload.

use std::sync::Arc;

use super::statistics::{Series, Statistics};
use crate::rules::RuleSet;

/// A set of rules in force.
pub struct Snapshot {
    pub(super) rules: RuleSet,
    /// By the rule's id.
    pub(super) series: Vec<Arc<Series>>,
}

impl Snapshot {
    /// Joins a set with its statistics; those of rules that were there before go on.
    #[must_use]
    pub fn new(rules: RuleSet, statistics: &Statistics) -> Self {
        let series = statistics.enter(rules.rules());
        Self { rules, series }
    }

    /// The rules.
    #[must_use]
    pub fn rules(&self) -> &RuleSet {
        &self.rules
    }
}
