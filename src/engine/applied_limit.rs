//! What there is for a descriptor: its rule's limit, another in its place, or an operator's word.

use std::{ops::Deref, sync::Arc};

use smallvec::SmallVec;

use super::{
    Descriptor, Engine, OverrideKind, Request, Snapshot,
    overrides::{EntityLimit, Mode, OverrideLookup},
    statistics::{self, Series, Shedding},
};
use crate::{
    algorithm::{Consistency, Decision, Micros, RequestContext, Sample, concurrency::Concurrency},
    rules::{Allowance, CustomLimit, Limit, Lookup, ModifierEntry, Path, Rule},
};

/// A limit that applies to a descriptor.
pub(super) struct AppliedLimit<'s> {
    /// As it stands now: more than the rule's, where that is elastic and its resource has capacity to spare.
    pub(super) limit: &'s Limit,
    /// `None` for an override, and for what only an operator limits.
    pub(super) rule: Option<&'s Rule>,
    /// What an operator has given the descriptor in place of the rule's limit.
    pub(super) custom_limit: Option<&'s CustomLimit>,
    /// What an operator has made of the rule.
    pub(super) mode: Option<Mode>,
    pub(super) path: Path<'s>,
    pub(super) series: SeriesRef<'s>,
    pub(super) shedding: Option<&'s Shedding>,
}

impl<'s> AppliedLimit<'s> {
    pub(super) fn needs_context(&self) -> bool {
        self.rule.is_some_and(|rule| rule.needs_context)
    }

    /// Who asks, where that matters: the entries at the end say it.
    pub(super) fn context(&self, descriptor: &Descriptor<'_>, sample: Option<Sample>) -> Option<RequestContext> {
        let rule = self.rule.filter(|rule| rule.needs_context)?;
        let mut asker = RequestContext { sample, ..RequestContext::default() };
        for (entry, node) in descriptor.entries.iter().zip(&self.path) {
            match node.modifier {
                Some(ModifierEntry::Class) => asker.class = rule.class(entry.value) as u8,
                Some(ModifierEntry::Holder) => asker.holder = holder(entry.value),
                Some(ModifierEntry::Plan) | None => {}
            }
        }
        Some(asker)
    }

    /// The rule's own limit, or the one in its place.
    pub(super) fn base(&self) -> &'s Limit {
        self.rule.filter(|_| self.custom_limit.is_none()).and_then(|rule| rule.limit.as_deref()).unwrap_or(self.limit)
    }

    /// Whether it is counted and never enforced.
    pub(super) fn is_shadow(&self) -> bool {
        match self.mode {
            Some(Mode::Shadow) => true,
            Some(Mode::Enforce | Mode::Deny) => false,
            Some(Mode::Off) | None => self.rule.is_some_and(|rule| rule.shadow_mode),
        }
    }

    pub(super) fn consistency(&self) -> Consistency {
        match self.custom_limit {
            Some(terms) => terms.consistency,
            None => self.rule.map_or(Consistency::Exact, |rule| rule.consistency),
        }
    }

    pub(super) fn override_kind(&self) -> Option<OverrideKind> {
        self.mode.map(OverrideKind::Switch).or(self.custom_limit.map(|_| OverrideKind::Limit))
    }

    /// Whether what is refused is shed: for what others do, or to keep a resource alive.
    pub(super) fn sheds(&self, decision: &Decision) -> bool {
        !decision.allowed && (decision.shed || self.rule.is_some_and(|rule| rule.sheds))
    }
}

/// A rule's own series is borrowed: counting a reference up would make all workers write to one cache line.
pub(super) enum SeriesRef<'s> {
    Rule(&'s Series),
    Dynamic(Arc<Series>),
}

impl Deref for SeriesRef<'_> {
    type Target = Series;

    fn deref(&self) -> &Series {
        match self {
            Self::Rule(series) => series,
            Self::Dynamic(series) => series,
        }
    }
}

/// What the rules have for one descriptor.
pub(super) enum Match<'s> {
    None,
    /// An operator has switched off what there is.
    Off,
    /// By its rule, or by an operator's word.
    Unlimited(Option<&'s Rule>, Option<OverrideKind>),
    Limited(AppliedLimit<'s>),
    /// An operator lets nothing pass. The store has no say.
    Denied(AppliedLimit<'s>),
}

impl<'s> Match<'s> {
    pub(super) fn limited(&self) -> Option<&AppliedLimit<'s>> {
        if let Self::Limited(applied) = self { Some(applied) } else { None }
    }

    pub(super) fn denied(&self) -> Option<&AppliedLimit<'s>> {
        if let Self::Denied(applied) = self { Some(applied) } else { None }
    }

    pub(super) fn rule(&self) -> Option<&'s Rule> {
        match self {
            Self::None | Self::Off => None,
            Self::Unlimited(rule, _) => *rule,
            Self::Limited(applied) | Self::Denied(applied) => applied.rule,
        }
    }
}

impl Engine {
    /// What the rules have for each descriptor, less what is replaced.
    pub(super) fn matches<'s>(
        &self,
        snapshot: &'s Snapshot,
        request: &'s Request<'_>,
        sought: &[OverrideLookup],
        now: Micros,
    ) -> SmallVec<[Match<'s>; 1]> {
        let find = |(descriptor, sought)| self.find(snapshot, request.domain, descriptor, sought, now);
        let mut matches: SmallVec<[Match<'s>; 1]> = request.descriptors.iter().zip(sought).map(find).collect();
        // One pass: a limit that is replaced has replaced others all the same, as the peer has it.
        let replaced: SmallVec<[&str; 2]> =
            matches.iter().filter_map(Match::rule).flat_map(|rule| rule.replaces.iter().map(String::as_str)).collect();
        if !replaced.is_empty() {
            for found in &mut matches {
                let name = found.rule().and_then(|rule| rule.name.as_deref());
                if name.is_some_and(|name| replaced.contains(&name)) {
                    *found = Match::None;
                }
            }
        }
        matches
    }

    pub(super) fn find<'s>(
        &self,
        snapshot: &'s Snapshot,
        domain: &str,
        descriptor: &'s Descriptor<'_>,
        sought: &OverrideLookup,
        now: Micros,
    ) -> Match<'s> {
        let found = match snapshot.rules().find(domain, descriptor.entries.iter().copied()) {
            Lookup::UnknownDomain => {
                self.statistics.unknown_domain.add(self.worker, 1);
                return Match::None;
            }
            Lookup::NoLimit => None,
            Lookup::Rule(rule, path) => Some((rule, path)),
        };
        let terms = snapshot.overrides.entity_limit(sought, now);
        match (terms, found) {
            // Below what an operator named there would be a counter for each descriptor, which nobody asked for.
            (Some(given), None) if given.entries == descriptor.entries.len() => {
                self.by_custom_limit(snapshot, domain, descriptor, None, given)
            }
            (Some(given), Some(found)) => self.by_custom_limit(snapshot, domain, descriptor, Some(found), given),
            (_, found) => match descriptor.requested_limit.as_deref() {
                Some(limit) => {
                    let series = self.override_series(domain, descriptor);
                    let (rule, terms, path) = (None, None, Path::new());
                    self.switched(
                        snapshot,
                        domain,
                        descriptor,
                        AppliedLimit { limit, rule, custom_limit: terms, mode: None, path, series, shedding: None },
                    )
                }
                None => found
                    .map_or(Match::None, |(rule, path)| self.by_rule(snapshot, domain, descriptor, rule, path, now)),
            },
        }
    }

    /// As the rule says, or that of the plan that an operator has assigned.
    fn by_rule<'s>(
        &self,
        snapshot: &'s Snapshot,
        domain: &str,
        descriptor: &'s Descriptor<'_>,
        rule: &'s Rule,
        path: Path<'s>,
        now: Micros,
    ) -> Match<'s> {
        let assigned = rule.plan.as_ref().and_then(|_| snapshot.overrides.plan(domain, &descriptor.entries, now));
        let rule = match assigned.and_then(|plan| snapshot.rules().of_named_plan(rule, &plan)) {
            Some(assigned) => assigned,
            None => {
                if rule.plan.as_ref().is_some_and(|plan| plan.is_assigned_only(&descriptor.entries, &path)) {
                    self.statistics.unknown_plan.add(self.worker, 1);
                }
                rule
            }
        };
        let Some(limit) = &rule.limit else {
            return match snapshot.modes.of(domain, Some(rule)) {
                Some(Mode::Deny) => self.switched(
                    snapshot,
                    domain,
                    descriptor,
                    self.applied(snapshot, domain, descriptor, rule, path, &Limit::NOTHING),
                ),
                _ => Match::Unlimited(Some(rule), None),
            };
        };
        let in_force = &snapshot.compiled.rules_in_force[rule.id];
        let stretched = match (&rule.elastic, &in_force.resource) {
            (Some(elastic), Some(resource)) => elastic.at(resource.utilization()),
            _ => None,
        };
        let applied = self.applied(snapshot, domain, descriptor, rule, path, stretched.unwrap_or(limit));
        self.switched(snapshot, domain, descriptor, applied)
    }

    fn applied<'s>(
        &self,
        snapshot: &'s Snapshot,
        domain: &str,
        descriptor: &'s Descriptor<'_>,
        rule: &'s Rule,
        path: Path<'s>,
        limit: &'s Limit,
    ) -> AppliedLimit<'s> {
        let in_force = &snapshot.compiled.rules_in_force[rule.id];
        let series = if rule.dynamic_labels {
            let labels = statistics::labels(domain, &descriptor.entries, rule, &path);
            SeriesRef::Dynamic(self.statistics.dynamic(self.worker, &labels, descriptor.hits))
        } else {
            SeriesRef::Rule(&in_force.series)
        };
        let shedding = in_force.shedding.as_deref();
        AppliedLimit { limit, rule: Some(rule), custom_limit: None, mode: None, path, series, shedding }
    }

    /// As an operator says.
    fn by_custom_limit<'s>(
        &self,
        snapshot: &'s Snapshot,
        domain: &str,
        descriptor: &'s Descriptor<'_>,
        found: Option<(&'s Rule, Path<'s>)>,
        EntityLimit { allowance, limit: terms, .. }: EntityLimit<'s>,
    ) -> Match<'s> {
        let limit = &terms.limit;
        let applied = match found {
            Some((rule, path)) => self.applied(snapshot, domain, descriptor, rule, path, limit),
            None => {
                let series = self.override_series(domain, descriptor);
                let (rule, path) = (None, Path::new());
                AppliedLimit { limit, rule, custom_limit: None, mode: None, path, series, shedding: None }
            }
        };
        match (
            self.switched(snapshot, domain, descriptor, AppliedLimit { custom_limit: Some(terms), ..applied }),
            allowance,
        ) {
            (Match::Limited(applied), Allowance::Unlimited) => Match::Unlimited(applied.rule, applied.override_kind()),
            (Match::Limited(applied), Allowance::Blocked) if !descriptor.refund => Match::Denied(applied),
            (found, _) => found,
        }
    }

    fn override_series<'s>(&self, domain: &str, descriptor: &Descriptor<'_>) -> SeriesRef<'s> {
        let labels = statistics::override_labels(domain, &descriptor.entries);
        SeriesRef::Dynamic(self.statistics.dynamic(self.worker, &labels, descriptor.hits))
    }

    /// What the switches make of it.
    fn switched<'s>(
        &self,
        snapshot: &Snapshot,
        domain: &str,
        descriptor: &Descriptor<'_>,
        applied: AppliedLimit<'s>,
    ) -> Match<'s> {
        let mode = snapshot.modes.of(domain, applied.rule);
        let applied = AppliedLimit { mode, ..applied };
        match mode {
            Some(Mode::Off) => Match::Off,
            Some(Mode::Deny) if !descriptor.refund => Match::Denied(applied),
            _ => Match::Limited(applied),
        }
    }
}

/// A holder's number, the same in all instances: 48 bits of the name's digest, and never 0.
pub(super) fn holder(name: &str) -> u64 {
    let mut identity = sluicegate_common::Identity::new(name);
    1 + identity.finish() as u64 % Concurrency::LAST_HOLDER
}
