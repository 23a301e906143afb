//! [`Match`]: the limit that applies to a descriptor. It comes from a rule, from the request itself or from an
//! override.

use std::sync::Arc;

use sluicegate_algorithm::{
    Algorithm, Consistency, Decision, Micros, RequestContext, Sample, concurrency::Concurrency,
};
use sluicegate_calendar::Anchor;
use sluicegate_metrics::WorkerId;
use sluicegate_rules::{Allowance, CustomLimit, Limit, Lookup, ModifierEntry, Path, Rule};
use smallvec::SmallVec;

use super::{
    Descriptor, Engine, OverrideKind, Request, Snapshot,
    overrides::{EntityLimit, Mode},
    statistics::{self, CountContext, Series, Shedding},
};

/// A limit that applies to a descriptor, with its rule and its statistics.
pub(super) struct AppliedLimit<'s> {
    /// The current limit. If the rule is elastic and its resource has spare capacity, it is above the rule's limit.
    pub(super) limit: &'s Limit,
    /// The rule; `None` for a requested limit, and for a descriptor that only an override limits.
    pub(super) rule: Option<&'s Rule>,
    /// The custom limit from an override, which replaces the rule's limit.
    pub(super) custom_limit: Option<&'s CustomLimit>,
    /// When the calendar windows of the entity begin, where its plan assignment says so.
    pub(super) anchor: Option<&'s Anchor>,
    /// The mode that a switch has set for the rule.
    pub(super) mode: Option<Mode>,
    pub(super) path: Path<'s>,
    pub(super) series: SeriesRef<'s>,
    pub(super) shedding: Option<&'s Shedding>,
}

impl<'s> AppliedLimit<'s> {
    /// Returns an algorithm of the limit with what it needs to know about the caller: the class and the holder in the
    /// modifier entries, and the entity. `counter` is the name of the counter.
    pub(super) fn for_caller(
        &self,
        algorithm: Algorithm,
        descriptor: &Descriptor<'_>,
        sample: Option<Sample>,
        counter: &[u8],
    ) -> Algorithm {
        let by_rule = self.rule.is_some_and(|rule| rule.needs_context);
        if !by_rule && self.anchor.is_none() && !algorithm.depends_on_entity() {
            return algorithm;
        }
        let anchor = self.anchor.copied().unwrap_or_default();
        let mut context = RequestContext { sample, anchor, ..RequestContext::default() };
        if by_rule {
            context.class = self.class(descriptor);
            context.holder = self.holder(descriptor);
        }
        if algorithm.depends_on_entity() {
            context.entity = entity_number(counter);
        }
        algorithm.with_context(context)
    }

    /// Returns the class of the request, 0 if there are no classes.
    pub(super) fn class(&self, descriptor: &Descriptor<'_>) -> u8 {
        match (self.rule, self.modifier(descriptor, ModifierEntry::Class)) {
            (Some(rule), Some(class)) => rule.class(class) as u8,
            _ => 0,
        }
    }

    /// Returns the number of the holder, 0 if slots have no holders.
    fn holder(&self, descriptor: &Descriptor<'_>) -> u64 {
        match self.modifier(descriptor, ModifierEntry::Holder) {
            Some(holder) => holder_id(holder),
            None => 0,
        }
    }

    /// Returns the value of a modifier entry.
    fn modifier<'d>(&self, descriptor: &Descriptor<'d>, kind: ModifierEntry) -> Option<&'d str> {
        for (entry, node) in descriptor.entries.iter().zip(&self.path) {
            if node.modifier == Some(kind) {
                return Some(entry.value);
            }
        }
        None
    }

    /// Returns the rule's limit or the limit that replaces it, without elastic capacity.
    pub(super) fn base_limit(&self) -> &'s Limit {
        if self.custom_limit.is_none()
            && let Some(rule) = self.rule
            && let Some(limit) = rule.limit.as_deref()
        {
            return limit;
        }
        self.limit
    }

    /// Returns whether the limit counts but never denies.
    pub(super) fn is_shadow(&self) -> bool {
        match self.mode {
            Some(Mode::Shadow) => true,
            Some(Mode::Enforce | Mode::Deny) => false,
            Some(Mode::Off) | None => self.rule.is_some_and(|rule| rule.shadow_mode),
        }
    }

    pub(super) fn consistency(&self) -> Consistency {
        match (self.custom_limit, self.rule) {
            (Some(custom_limit), _) => custom_limit.consistency,
            (None, Some(rule)) => rule.consistency,
            (None, None) => Consistency::Exact,
        }
    }

    pub(super) fn override_kind(&self) -> Option<OverrideKind> {
        match (self.mode, self.custom_limit) {
            (Some(mode), _) => Some(OverrideKind::Switch(mode)),
            (None, Some(_)) => Some(OverrideKind::Limit),
            (None, None) => None,
        }
    }

    /// Returns whether a denial is shedding: it is caused by the load of other callers, or it protects a resource.
    pub(super) fn sheds(&self, decision: &Decision) -> bool {
        !decision.allowed && (decision.shed || self.rule.is_some_and(|rule| rule.sheds))
    }
}

/// A reference to a statistics series.
///
/// A rule's own series is borrowed, because incrementing a reference count would make all workers write to one cache
/// line.
pub(super) enum SeriesRef<'s> {
    Rule(&'s Series),
    /// A series with callers' values, and the total of the rule if there is one.
    Dynamic(Arc<Series>, Option<&'s Series>),
}

impl SeriesRef<'_> {
    /// Calls a function with each series in which hits are counted.
    pub(super) fn each(&self, count: impl Fn(&Series)) {
        match self {
            Self::Rule(series) => count(series),
            Self::Dynamic(series, total) => {
                count(series);
                if let Some(total) = total {
                    count(total);
                }
            }
        }
    }

    /// Counts the requested hits of some requests, whether they are allowed or not.
    pub(super) fn count_requested(&self, worker: WorkerId, hits: u64, requests: u64) {
        self.each(|series| series.count_requested(worker, hits, requests));
    }

    /// Counts hits that a caller refunds.
    pub(super) fn count_refunded(&self, worker: WorkerId, hits: u64) {
        self.each(|series| series.count_refunded(worker, hits));
    }

    /// Counts decided hits.
    pub(super) fn count_decision(&self, worker: WorkerId, hits: u64, decision: &Decision, context: CountContext) {
        self.each(|series| series.count_decision(worker, hits, decision, context));
    }
}

/// The result of matching one descriptor with the rules and overrides.
pub(super) enum Match<'s> {
    /// No limit applies.
    None,
    /// The rules do not have the domain.
    NoDomain,
    /// The domain has no rule for the descriptor.
    NoRule,
    /// A switch has turned the limit off.
    Off,
    /// The rule or an override makes the descriptor unlimited.
    Unlimited(Option<&'s Rule>, Option<OverrideKind>),
    /// A limit that the store decides.
    Limited(AppliedLimit<'s>),
    /// An override denies every hit, and the store is not called.
    Denied(AppliedLimit<'s>),
}

impl<'s> Match<'s> {
    pub(super) fn rule(&self) -> Option<&'s Rule> {
        match self {
            Self::None | Self::NoDomain | Self::NoRule | Self::Off => None,
            Self::Unlimited(rule, _) => *rule,
            Self::Limited(applied) | Self::Denied(applied) => applied.rule,
        }
    }
}

impl<S> Engine<S> {
    /// Matches each descriptor with the rules and overrides, and drops the limits that another matched rule replaces.
    pub(super) fn matches<'s>(
        &self,
        snapshot: &'s Snapshot,
        request: &'s Request<'_>,
        now: Micros,
    ) -> SmallVec<[Match<'s>; 1]> {
        let mut matches = SmallVec::<[Match<'s>; 1]>::new();
        for descriptor in &request.descriptors {
            let matched = self.find_match(snapshot, request.domain, descriptor, now);
            self.count_unmatched(request.domain, descriptor, &matched, now);
            matches.push(matched);
        }
        // A replaced limit still replaces others, as in envoyproxy/ratelimit, so one pass is enough.
        let mut replaced = SmallVec::<[&str; 2]>::new();
        for rule in matches.iter().filter_map(Match::rule) {
            replaced.extend(rule.replaces.iter().map(String::as_str));
        }
        if !replaced.is_empty() {
            for matched in &mut matches {
                let name = matched.rule().and_then(|rule| rule.name.as_deref());
                if name.is_some_and(|name| replaced.contains(&name)) {
                    *matched = Match::None;
                }
            }
        }
        matches
    }

    /// Counts a descriptor that has no limit because the rules do not have its domain or keys.
    pub(super) fn count_unmatched(&self, domain: &str, descriptor: &Descriptor<'_>, matched: &Match<'_>, now: Micros) {
        match matched {
            Match::NoDomain => self.statistics.unmatched.count_domain(self.worker, domain, now),
            Match::NoRule => self.statistics.unmatched.count(self.worker, domain, descriptor, now),
            _ => {}
        }
    }

    pub(super) fn find_match<'s>(
        &self,
        snapshot: &'s Snapshot,
        domain: &str,
        descriptor: &'s Descriptor<'_>,
        now: Micros,
    ) -> Match<'s> {
        // The override is looked up first, so that the processor searches the rules while it waits for the override's
        // memory.
        let entity_limit = snapshot.overrides.entity_limit(domain, &descriptor.entries, now);
        let rule_match = match snapshot.rule_set().find(domain, descriptor.entries.iter().copied()) {
            Lookup::UnknownDomain => return Match::NoDomain,
            Lookup::NoLimit => None,
            Lookup::Rule(rule, path) => Some((rule, path)),
        };
        // An override without a rule applies only to its exact descriptor: longer descriptors would otherwise each get
        // a counter.
        if let Some(entity_limit) = entity_limit
            && (rule_match.is_some() || entity_limit.entries == descriptor.entries.len())
        {
            return self.match_custom_limit(snapshot, domain, descriptor, rule_match, entity_limit);
        }
        if let Some(limit) = descriptor.requested_limit.as_deref() {
            let applied = self.limit_without_rule(domain, descriptor, limit);
            return self.apply_switches(snapshot, domain, descriptor, applied);
        }
        match rule_match {
            Some((rule, path)) => self.match_rule(snapshot, domain, descriptor, rule, path, now),
            None => Match::NoRule,
        }
    }

    /// Applies the rule, or the rule of the plan that an override assigns to the entity.
    fn match_rule<'s>(
        &self,
        snapshot: &'s Snapshot,
        domain: &str,
        descriptor: &'s Descriptor<'_>,
        rule: &'s Rule,
        path: Path<'s>,
        now: Micros,
    ) -> Match<'s> {
        let assigned_plan =
            if rule.plan.is_some() { snapshot.overrides.plan(domain, &descriptor.entries, now) } else { None };
        let rule_of_plan = assigned_plan.and_then(|assigned| snapshot.rule_set().rule_for_plan(rule, &assigned.plan));
        let rule = match rule_of_plan {
            Some(rule) => rule,
            None => {
                let is_unknown = assigned_plan.is_some()
                    || rule.plan.as_ref().is_some_and(|plan| plan.is_other_plan_requested(&descriptor.entries, &path));
                if is_unknown {
                    self.statistics.unknown_plan.add(self.worker, 1);
                }
                rule
            }
        };
        let Some(limit) = &rule.limit else {
            if snapshot.modes.mode_of(domain, Some(rule)) != Some(Mode::Deny) {
                return Match::Unlimited(Some(rule), None);
            }
            let applied = self.applied_limit(snapshot, domain, descriptor, rule, path, &Limit::DENY_ALL);
            return self.apply_switches(snapshot, domain, descriptor, applied);
        };
        let rule_state = &snapshot.compiled.rule_states[rule.id];
        let elastic_limit = match (&rule.elastic, &rule_state.resource) {
            (Some(elastic), Some(resource)) => elastic.at(resource.utilization()),
            _ => None,
        };
        let mut applied = self.applied_limit(snapshot, domain, descriptor, rule, path, elastic_limit.unwrap_or(limit));
        if rule.plan.is_some() {
            applied.anchor = match assigned_plan {
                Some(assigned) => Some(&assigned.anchor),
                None => snapshot.rule_set().assigned_anchor(rule, &descriptor.entries),
            };
        }
        self.apply_switches(snapshot, domain, descriptor, applied)
    }

    /// Returns a limit of a rule, with the series in which the descriptor's hits are counted.
    fn applied_limit<'s>(
        &self,
        snapshot: &'s Snapshot,
        domain: &str,
        descriptor: &'s Descriptor<'_>,
        rule: &'s Rule,
        path: Path<'s>,
        limit: &'s Limit,
    ) -> AppliedLimit<'s> {
        let rule_state = &snapshot.compiled.rule_states[rule.id];
        let series = if rule.dynamic_labels {
            let labels = statistics::labels(domain, &descriptor.entries, rule, &path);
            let series = self.statistics.dynamic_series(self.worker, &labels, descriptor.hits);
            SeriesRef::Dynamic(series, Some(&rule_state.statistics.series))
        } else {
            SeriesRef::Rule(&rule_state.statistics.series)
        };
        let shedding = rule_state.statistics.shedding.as_deref();
        AppliedLimit { limit, rule: Some(rule), custom_limit: None, anchor: None, mode: None, path, series, shedding }
    }

    /// Applies an entity's limit from an override, in place of the limit of the matching rule.
    fn match_custom_limit<'s>(
        &self,
        snapshot: &'s Snapshot,
        domain: &str,
        descriptor: &'s Descriptor<'_>,
        rule_match: Option<(&'s Rule, Path<'s>)>,
        EntityLimit { limit: custom_limit, .. }: EntityLimit<'s>,
    ) -> Match<'s> {
        let limit = &custom_limit.limit;
        let applied = match rule_match {
            Some((rule, path)) => self.applied_limit(snapshot, domain, descriptor, rule, path, limit),
            None => self.limit_without_rule(domain, descriptor, limit),
        };
        let applied = AppliedLimit { custom_limit: Some(custom_limit), ..applied };
        let matched = self.apply_switches(snapshot, domain, descriptor, applied);
        match (matched, custom_limit.allowance) {
            (Match::Limited(applied), Allowance::Unlimited) => Match::Unlimited(applied.rule, applied.override_kind()),
            (Match::Limited(applied), Allowance::Blocked) if !descriptor.refund => Match::Denied(applied),
            (matched, _) => matched,
        }
    }

    /// Returns a limit of the request or of an override, for a descriptor without a rule.
    fn limit_without_rule<'s>(&self, domain: &str, descriptor: &Descriptor<'_>, limit: &'s Limit) -> AppliedLimit<'s> {
        let labels = statistics::override_labels(domain, &descriptor.entries);
        let series = self.statistics.dynamic_series(self.worker, &labels, descriptor.hits);
        AppliedLimit {
            limit,
            rule: None,
            custom_limit: None,
            anchor: None,
            mode: None,
            path: Path::new(),
            series: SeriesRef::Dynamic(series, None),
            shedding: None,
        }
    }

    /// Applies the switches to a limit.
    fn apply_switches<'s>(
        &self,
        snapshot: &Snapshot,
        domain: &str,
        descriptor: &Descriptor<'_>,
        applied: AppliedLimit<'s>,
    ) -> Match<'s> {
        let mode = snapshot.modes.mode_of(domain, applied.rule);
        let applied = AppliedLimit { mode, ..applied };
        match mode {
            Some(Mode::Off) => Match::Off,
            Some(Mode::Deny) if !descriptor.refund => Match::Denied(applied),
            _ => Match::Limited(applied),
        }
    }
}

/// Returns a holder's number, which is the same on all instances: 48 bits of the name's digest, and never 0.
pub(super) fn holder_id(name: &str) -> u64 {
    let mut identity = sluicegate_placement::Identity::new(name);
    1 + identity.finish() as u64 % Concurrency::MAX_HOLDER
}

/// Returns the number of the entity with this counter, which is the same on all instances.
fn entity_number(counter: &[u8]) -> u64 {
    let name = String::from_utf8_lossy(counter);
    sluicegate_placement::Identity::new(&name).finish() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers are in the states of counters, which instances of several releases share.
    #[test]
    fn the_number_of_a_holder_never_changes() {
        assert_eq!(["job-1", "job-2"].map(holder_id), [0xC28E_0A0C_7D81, 0xEE5E_2336_3205]);
    }
}
