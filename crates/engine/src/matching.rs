//! [`Match`]: the limit that applies to a descriptor. It comes from a rule, from the request itself or from an
//! override.

use std::sync::Arc;

use sluicegate_algorithm::{
    Algorithm, Consistency, Decision, Micros, RequestContext, Sample, bound_hits, concurrency::Concurrency,
};
use sluicegate_calendar::Anchor;
use sluicegate_metrics::WorkerId;
use sluicegate_placement::{ESCAPED, escape};
use sluicegate_rules::{Allowance, CustomLimit, Limit, Lookup, ModifierEntry, Path, PlanAssignment, Rule};
use smallvec::SmallVec;

use super::{
    Descriptor, Engine, OverrideKind, Request, Snapshot,
    overrides::Mode,
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
    /// Whether the limit is charged in a group, all or none: with the other limits of its rule, or with its penalty.
    pub(super) is_grouped: bool,
    /// The mode that a switch has set for the rule.
    pub(super) mode: Option<Mode>,
    pub(super) path: Path<'s>,
    pub(super) series: SeriesRef<'s>,
    pub(super) shedding: Option<&'s Shedding>,
}

impl<'s> AppliedLimit<'s> {
    /// Returns the match of a descriptor with this limit, by the mode that a switch has set.
    fn matched(self, descriptor: &Descriptor<'_>) -> Match<'s> {
        match self.mode {
            Some(Mode::Off) => Match::Off,
            Some(Mode::Deny) if !descriptor.refund => Match::Denied(self),
            _ => Match::Limited(self),
        }
    }

    /// Returns an algorithm of the limit with what it needs to know about the caller: the class and the holder in the
    /// modifier entries, the sample, the anchor and the entity. `counter` is the name of the counter. Returns `None` if
    /// the algorithm does not depend on the caller.
    #[inline]
    pub(super) fn for_caller(
        &self,
        algorithm: &Algorithm,
        descriptor: &Descriptor<'_>,
        sample: Option<Sample>,
        counter: &[u8],
    ) -> Option<Algorithm> {
        let depends_on_caller =
            self.rule.is_some_and(|rule| rule.needs_context) || self.anchor.is_some() || algorithm.depends_on_entity();
        if depends_on_caller { Some(self.with_caller(algorithm, descriptor, sample, counter)) } else { None }
    }

    fn with_caller(
        &self,
        algorithm: &Algorithm,
        descriptor: &Descriptor<'_>,
        sample: Option<Sample>,
        counter: &[u8],
    ) -> Algorithm {
        let anchor = self.anchor.copied().unwrap_or_default();
        let mut context = RequestContext { sample, anchor, ..RequestContext::default() };
        if self.rule.is_some_and(|rule| rule.needs_context) {
            context.class = self.class(descriptor);
            context.holder = self.holder(descriptor);
        }
        if algorithm.depends_on_entity() {
            context.entity = entity_number(counter);
        }
        algorithm.with_context(context)
    }

    /// Returns the cost of the descriptor's hits.
    #[inline]
    pub(super) fn cost(&self, descriptor: &Descriptor<'_>) -> u64 {
        self.cost_of(descriptor, descriptor.hits)
    }

    /// Returns the cost of a number of hits.
    #[inline]
    pub(super) fn cost_of(&self, descriptor: &Descriptor<'_>, hits: u64) -> u64 {
        match self.rule.and_then(|rule| rule.cost_per_hit.as_ref()) {
            Some(cost) => {
                let factor = cost.of(self.modifier(descriptor, ModifierEntry::Cost));
                bound_hits(hits.saturating_mul(factor))
            }
            None => hits,
        }
    }

    /// Returns the index of the request's class, 0 if there are no classes.
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

    /// Appends the name of a further limit of a rule to the name of its counter.
    pub(super) fn append_limit_name(&self, counter: &mut Vec<u8>) {
        if let Some(rule) = self.rule
            && rule.is_further
            && let Some(name) = &rule.name
        {
            counter.push(b'#');
            escape(counter, name, ESCAPED);
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

/// A match of a descriptor. A rule with several limits has a match for each.
pub(super) struct MatchOf<'s> {
    /// Index of the descriptor in its request.
    pub(super) descriptor: usize,
    pub(super) matched: Match<'s>,
}

/// The rule and the override that apply to one descriptor, before each limit of the rule gets a match of its own.
struct Found<'s> {
    /// The rule and the nodes that the descriptor matched. If the rule has plans, it is the rule of the entity's plan.
    rule: Option<(&'s Rule, Path<'s>)>,
    /// The limits of an override.
    custom_limit: Option<&'s CustomLimit>,
    /// When the calendar windows of the entity begin, where its plan assignment says so.
    anchor: Option<&'s Anchor>,
    /// Whether the rule has several limits, and no single limit replaces them.
    is_one_of_several: bool,
}

impl<'s> Found<'s> {
    /// Returns the name of the rule's limit.
    fn limit_name(&self) -> Option<&'s str> {
        let (rule, _) = self.rule.as_ref()?;
        rule.name.as_deref()
    }

    /// Returns the further limits of the rule.
    fn further_limits(&self, snapshot: &'s Snapshot) -> Vec<Self> {
        let Some((rule, path)) = &self.rule else {
            return Vec::new();
        };
        let mut further = Vec::new();
        for rule in snapshot.rule_set().further_limits(rule) {
            further.push(Self { rule: Some((rule, path.clone())), ..*self });
        }
        further
    }
}

/// Returns whether one limit of an override, or of the request, replaces all limits of the rule.
fn is_replaced(custom_limit: Option<&CustomLimit>, descriptor: &Descriptor<'_>) -> bool {
    match custom_limit {
        Some(custom_limit) => custom_limit.by_name.is_empty(),
        None => descriptor.requested_limit.is_some(),
    }
}

/// The result of matching one descriptor with the rules and overrides.
pub(super) enum Match<'s> {
    /// Another matched rule replaces the limit.
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
    ) -> SmallVec<[MatchOf<'s>; 1]> {
        let mut matches = SmallVec::<[MatchOf<'s>; 1]>::new();
        for (index, descriptor) in request.descriptors.iter().enumerate() {
            let first = matches.len();
            self.add_matches(snapshot, request.domain, descriptor, now, index, &mut matches);
            self.count_unmatched(request.domain, descriptor, &matches[first].matched, now);
        }
        // A replaced limit still replaces others, as in envoyproxy/ratelimit, so one pass is enough.
        let mut replaced = SmallVec::<[&str; 2]>::new();
        for rule in matches.iter().filter_map(|found| found.matched.rule()) {
            replaced.extend(rule.replaces.iter().map(String::as_str));
        }
        if !replaced.is_empty() {
            for MatchOf { matched, .. } in &mut matches {
                let name = matched.rule().and_then(|rule| rule.name.as_deref());
                if name.is_some_and(|name| replaced.contains(&name)) {
                    *matched = Match::None;
                }
            }
        }
        matches
    }

    /// Adds the match of each limit that applies to a descriptor; there is at least one match.
    pub(super) fn add_matches<'s>(
        &self,
        snapshot: &'s Snapshot,
        domain: &str,
        descriptor: &'s Descriptor<'_>,
        now: Micros,
        index: usize,
        matches: &mut SmallVec<[MatchOf<'s>; 1]>,
    ) {
        let Some(found) = self.find(snapshot, domain, descriptor, now) else {
            return matches.push(MatchOf { descriptor: index, matched: Match::NoDomain });
        };
        let mut further = Vec::new();
        if found.is_one_of_several {
            further = found.further_limits(snapshot);
        }
        matches.push(MatchOf { descriptor: index, matched: self.match_found(snapshot, domain, descriptor, found) });
        for found in further {
            matches.push(MatchOf { descriptor: index, matched: self.match_found(snapshot, domain, descriptor, found) });
        }
    }

    /// Counts a descriptor that has no limit because the rules do not have its domain or keys.
    pub(super) fn count_unmatched(&self, domain: &str, descriptor: &Descriptor<'_>, matched: &Match<'_>, now: Micros) {
        match matched {
            Match::NoDomain => self.statistics.unmatched.count_domain(self.worker, domain, now),
            Match::NoRule => self.statistics.unmatched.count(self.worker, domain, descriptor, now),
            _ => {}
        }
    }

    /// Matches a descriptor with the rules and overrides. Returns the match of the first limit if the rule has several.
    pub(super) fn find_match<'s>(
        &self,
        snapshot: &'s Snapshot,
        domain: &str,
        descriptor: &'s Descriptor<'_>,
        now: Micros,
    ) -> Match<'s> {
        match self.find(snapshot, domain, descriptor, now) {
            Some(found) => self.match_found(snapshot, domain, descriptor, found),
            None => Match::NoDomain,
        }
    }

    /// Finds the rule and the override of a descriptor. Returns `None` if the rules do not have its domain.
    fn find<'s>(
        &self,
        snapshot: &'s Snapshot,
        domain: &str,
        descriptor: &Descriptor<'_>,
        now: Micros,
    ) -> Option<Found<'s>> {
        // The override is looked up first, so that the processor searches the rules while it waits for the override's
        // memory.
        let entity_limit = snapshot.overrides.entity_limit(domain, &descriptor.entries, now);
        let mut found = Found { rule: None, custom_limit: None, anchor: None, is_one_of_several: false };
        match snapshot.rule_set().find(domain, descriptor.entries.iter().copied()) {
            Lookup::UnknownDomain => return None,
            Lookup::NoLimit => {}
            Lookup::Rule(rule, path) => found.rule = Some((rule, path)),
        }
        // An override without a rule applies only to its exact descriptor: longer descriptors would otherwise each get
        // a counter.
        if let Some(entity_limit) = entity_limit
            && (found.rule.is_some() || entity_limit.entries == descriptor.entries.len())
        {
            found.custom_limit = Some(entity_limit.limit);
        }
        if let Some((rule, path)) = &mut found.rule
            && rule.plan.is_some()
        {
            let assigned = snapshot.overrides.plan(domain, &descriptor.entries, now);
            if !is_replaced(found.custom_limit, descriptor) {
                *rule = self.rule_of_plan(snapshot, descriptor, rule, path, assigned);
            }
            found.anchor = match assigned {
                Some(assigned) => Some(&assigned.anchor),
                None => snapshot.rule_set().assigned_anchor(rule, &descriptor.entries),
            };
        }
        if let Some((rule, _)) = &found.rule {
            found.is_one_of_several = !rule.further.is_empty() && !is_replaced(found.custom_limit, descriptor);
        }
        Some(found)
    }

    /// Returns the rule of the plan that an override assigns to the entity, or else `rule`.
    fn rule_of_plan<'s>(
        &self,
        snapshot: &'s Snapshot,
        descriptor: &Descriptor<'_>,
        rule: &'s Rule,
        path: &Path<'_>,
        assigned: Option<&PlanAssignment>,
    ) -> &'s Rule {
        if let Some(assigned) = assigned
            && let Some(rule) = snapshot.rule_set().rule_for_plan(rule, &assigned.plan)
        {
            return rule;
        }
        let is_unknown = assigned.is_some()
            || rule.plan.as_ref().is_some_and(|plan| plan.is_other_plan_requested(&descriptor.entries, path));
        if is_unknown {
            self.statistics.unknown_plan.add(self.worker, 1);
        }
        rule
    }

    /// Returns the match with the limit of the override, else of the request, else of the rule, or the match of a
    /// descriptor without a rule or a limit.
    fn match_found<'s>(
        &self,
        snapshot: &'s Snapshot,
        domain: &str,
        descriptor: &'s Descriptor<'_>,
        found: Found<'s>,
    ) -> Match<'s> {
        if let Some(custom_limit) = found.custom_limit
            && let Some(custom_limit) = custom_limit.for_limit(found.limit_name())
        {
            return self.match_custom_limit(snapshot, domain, descriptor, found, custom_limit);
        }
        if let Some(limit) = descriptor.requested_limit.as_deref() {
            let applied = self.limit_without_rule(snapshot, domain, descriptor, limit);
            return applied.matched(descriptor);
        }
        self.match_rule(snapshot, domain, descriptor, found)
    }

    /// Applies the limit of a rule.
    fn match_rule<'s>(
        &self,
        snapshot: &'s Snapshot,
        domain: &str,
        descriptor: &'s Descriptor<'_>,
        found: Found<'s>,
    ) -> Match<'s> {
        let Some((rule, path)) = found.rule else {
            return Match::NoRule;
        };
        let Some(limit) = &rule.limit else {
            if snapshot.modes.mode_of(domain, Some(rule)) != Some(Mode::Deny) {
                return Match::Unlimited(Some(rule), None);
            }
            return self.applied_limit(snapshot, domain, descriptor, rule, path, &Limit::DENY_ALL).matched(descriptor);
        };
        let rule_state = &snapshot.compiled.rule_states[rule.id];
        let elastic_limit = match (&rule.elastic, &rule_state.resource) {
            (Some(elastic), Some(resource)) => elastic.at(resource.utilization()),
            _ => None,
        };
        let limit = elastic_limit.unwrap_or(limit);
        let mut applied = self.applied_limit(snapshot, domain, descriptor, rule, path, limit);
        applied.anchor = found.anchor;
        applied.is_grouped = found.is_one_of_several || limit.penalty().is_some();
        applied.matched(descriptor)
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
        AppliedLimit {
            limit,
            rule: Some(rule),
            custom_limit: None,
            anchor: None,
            is_grouped: false,
            mode: snapshot.modes.mode_of(domain, Some(rule)),
            path,
            series,
            shedding: rule_state.statistics.shedding.as_deref(),
        }
    }

    /// Applies an entity's limit from an override, in place of the limit of the matching rule.
    fn match_custom_limit<'s>(
        &self,
        snapshot: &'s Snapshot,
        domain: &str,
        descriptor: &'s Descriptor<'_>,
        found: Found<'s>,
        custom_limit: &'s CustomLimit,
    ) -> Match<'s> {
        let limit = &custom_limit.limit;
        let mut applied = match found.rule {
            Some((rule, path)) => self.applied_limit(snapshot, domain, descriptor, rule, path, limit),
            None => self.limit_without_rule(snapshot, domain, descriptor, limit),
        };
        applied.custom_limit = Some(custom_limit);
        applied.is_grouped = found.is_one_of_several || limit.penalty().is_some();
        match (applied.matched(descriptor), custom_limit.allowance) {
            (Match::Limited(applied), Allowance::Unlimited) => Match::Unlimited(applied.rule, applied.override_kind()),
            (Match::Limited(applied), Allowance::Blocked) if !descriptor.refund => Match::Denied(applied),
            (matched, _) => matched,
        }
    }

    /// Returns a limit of the request or of an override, for a descriptor without a rule.
    fn limit_without_rule<'s>(
        &self,
        snapshot: &Snapshot,
        domain: &str,
        descriptor: &Descriptor<'_>,
        limit: &'s Limit,
    ) -> AppliedLimit<'s> {
        let labels = statistics::override_labels(domain, &descriptor.entries);
        let series = self.statistics.dynamic_series(self.worker, &labels, descriptor.hits);
        AppliedLimit {
            limit,
            rule: None,
            custom_limit: None,
            anchor: None,
            is_grouped: false,
            mode: snapshot.modes.mode_of(domain, None),
            path: Path::new(),
            series: SeriesRef::Dynamic(series, None),
            shedding: None,
        }
    }
}

/// Returns a holder's number, which is the same on all instances: a hash of the name with 48 bits, and never 0.
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
