//! [`Snapshot`]: the immutable state that a decision reads. A reload or an override replaces it as a whole.

use std::sync::Arc;

use sluicegate_algorithm::Micros;
use sluicegate_rules::RuleSet;

use super::{
    Candidate, DecideError, Resource, Resources,
    overrides::{Modes, Overrides},
    statistics::{RuleStatistics, RuleTotals, Statistics},
};

/// The rules in force with their statistics, the overrides, and the candidate rules.
pub struct Snapshot {
    pub(super) compiled: Arc<Compiled>,
    pub(super) overrides: Overrides,
    pub(super) modes: Modes,
    /// Candidate rules that are evaluated in addition.
    pub(super) candidate: Option<Arc<Candidate>>,
}

/// The part of a snapshot that only a reload changes.
pub(super) struct Compiled {
    pub(super) rules: RuleSet,
    /// The state of each rule, by the rule's id.
    pub(super) rule_states: Vec<RuleState>,
    /// Whether no rules have been loaded yet. Until then nothing can be decided.
    awaiting_rules: bool,
}

/// State of the service that belongs to a rule.
pub(super) struct RuleState {
    pub(super) statistics: RuleStatistics,
    /// The resource with the spare capacity that raises the limit, for elastic rules.
    pub(super) resource: Option<Arc<Resource>>,
}

impl Snapshot {
    /// Creates a snapshot. Rules that were in the previous set keep their statistics.
    #[must_use]
    pub fn new(mut rules: RuleSet, statistics: &Statistics, resources: &Resources) -> Self {
        let statistics = statistics.register_rules(rules.rules_mut());
        let mut rule_states = Vec::with_capacity(statistics.len());
        for (rule, statistics) in rules.rules().iter().zip(statistics) {
            let resource = rule.elastic.as_ref().map(|elastic| resources.named(&elastic.resource));
            rule_states.push(RuleState { statistics, resource });
        }
        Self::from_compiled(Compiled { rules, rule_states, awaiting_rules: false })
    }

    /// Creates a snapshot for the time before rules have been loaded, with which no request can be decided.
    #[must_use]
    pub fn awaiting() -> Self {
        Self::from_compiled(Compiled { rule_states: Vec::new(), rules: RuleSet::default(), awaiting_rules: true })
    }

    fn from_compiled(compiled: Compiled) -> Self {
        Self { compiled: Arc::new(compiled), overrides: Overrides::default(), modes: Modes::default(), candidate: None }
    }

    /// Returns a snapshot of the same rules with other overrides and other candidate rules.
    #[must_use]
    pub fn with(&self, overrides: Overrides, candidate: Option<Arc<Candidate>>, now: Micros) -> Self {
        let modes = overrides.modes(&self.compiled.rules, now);
        Self { compiled: Arc::clone(&self.compiled), overrides, modes, candidate }
    }

    /// Returns a snapshot of the same rules with the overrides, except switches.
    pub(super) fn with_limits(&self, overrides: Overrides) -> Self {
        Self { compiled: Arc::clone(&self.compiled), overrides, modes: Modes::default(), candidate: None }
    }

    /// Returns whether another snapshot shares these rules.
    #[must_use]
    pub fn shares_rules(&self) -> bool {
        Arc::strong_count(&self.compiled) > 1
    }

    /// Returns the candidate rules.
    #[must_use]
    pub fn candidate(&self) -> Option<&Arc<Candidate>> {
        self.candidate.as_ref()
    }

    /// Returns the rules in force.
    #[must_use]
    pub fn rule_set(&self) -> &RuleSet {
        &self.compiled.rules
    }

    /// Returns whether no rules have been loaded yet.
    #[must_use]
    pub fn awaits_rules(&self) -> bool {
        self.compiled.awaiting_rules
    }

    /// Checks that rules have been loaded, so that requests can be decided.
    ///
    /// # Errors
    ///
    /// Returns an error if no rules have been loaded yet.
    pub fn require_rules(&self) -> Result<(), DecideError> {
        if self.awaits_rules() { Err(DecideError::NoRules) } else { Ok(()) }
    }

    /// Returns the hits of each rule, by its id.
    pub fn rule_totals(&self) -> impl Iterator<Item = RuleTotals> {
        self.compiled.rule_states.iter().map(|state| RuleTotals(Arc::clone(&state.statistics.series)))
    }

    /// Returns whether both snapshots have the same set of rules.
    #[must_use]
    pub fn has_same_rules(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.compiled, &other.compiled)
    }

    /// Returns the overrides.
    #[must_use]
    pub fn overrides(&self) -> &Overrides {
        &self.overrides
    }

    /// Returns the modes that the switches set for the rules.
    #[must_use]
    pub fn modes(&self) -> &Modes {
        &self.modes
    }
}
