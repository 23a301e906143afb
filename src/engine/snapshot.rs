//! The rules in force together with what is known of each: immutable, swapped as one by a reload.

use std::sync::Arc;

use super::{
    Candidate, Resource, Resources,
    overrides::{Modes, Overrides},
    statistics::{Series, Shedding, Statistics},
};
use crate::{
    algorithm::Micros,
    rules::{Rule, RuleSet},
};

/// A set of rules in force, and what operators have said over it.
pub struct Snapshot {
    pub(super) compiled: Arc<Compiled>,
    pub(super) overrides: Overrides,
    pub(super) modes: Modes,
    /// Rules that are tried out beside these.
    pub(super) trial: Option<Arc<Candidate>>,
}

/// What only a reload changes.
pub(super) struct Compiled {
    pub(super) rules: RuleSet,
    /// By the rule's id.
    pub(super) rules_in_force: Vec<RuleState>,
    /// No rules have come yet: nothing can be decided.
    pub(super) awaiting_rules: bool,
}

/// What belongs to a rule and is not its own.
pub(super) struct RuleState {
    pub(super) series: Arc<Series>,
    /// Of rules that refuse for overload.
    pub(super) shedding: Option<Arc<Shedding>>,
    /// Of rules that give more while this has capacity to spare.
    pub(super) resource: Option<Arc<Resource>>,
}

impl Snapshot {
    /// Joins a set with its statistics; those of rules that were there before go on.
    #[must_use]
    pub fn new(mut rules: RuleSet, statistics: &Statistics, resources: &Resources) -> Self {
        let series = statistics.enter(rules.rules_mut());
        let resource = |rule: &Rule| rule.elastic.as_ref().map(|elastic| resources.named(&elastic.resource));
        let joined = rules.rules().iter().zip(series);
        let joined = joined.map(|(rule, (series, shedding))| RuleState { series, shedding, resource: resource(rule) });
        Self::of(Compiled { rules_in_force: joined.collect(), rules, awaiting_rules: false })
    }

    /// Before any rules have come: no request can be decided.
    #[must_use]
    pub fn awaiting() -> Self {
        Self::of(Compiled { rules_in_force: Vec::new(), rules: RuleSet::default(), awaiting_rules: true })
    }

    fn of(compiled: Compiled) -> Self {
        let (overrides, modes) = (Overrides::default(), Modes::default());
        Self { compiled: Arc::new(compiled), overrides, modes, trial: None }
    }

    /// The same rules with what operators say now, and with rules beside them that are tried out.
    #[must_use]
    pub fn with(&self, overrides: Overrides, trial: Option<Arc<Candidate>>, now: Micros) -> Self {
        let modes = overrides.modes(&self.compiled.rules, now);
        Self { compiled: Arc::clone(&self.compiled), overrides, modes, trial }
    }

    /// The same rules with limits and plans of entities, and nothing switched.
    pub(super) fn with_limits(&self, overrides: Overrides) -> Self {
        Self { compiled: Arc::clone(&self.compiled), overrides, modes: Modes::default(), trial: None }
    }

    /// Whether another snapshot has the same rules.
    #[must_use]
    pub fn shares_rules(&self) -> bool {
        Arc::strong_count(&self.compiled) > 1
    }

    /// The rules that are tried out beside these.
    #[must_use]
    pub fn candidate(&self) -> Option<&Arc<Candidate>> {
        self.trial.as_ref()
    }

    /// The rules.
    #[must_use]
    pub fn rules(&self) -> &RuleSet {
        &self.compiled.rules
    }

    /// What operators have said.
    #[must_use]
    pub fn overrides(&self) -> &Overrides {
        &self.overrides
    }

    /// What their switches make of the rules.
    #[must_use]
    pub fn modes(&self) -> &Modes {
        &self.modes
    }
}
