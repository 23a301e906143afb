//! The [`Engine`] of a worker, which decides requests by the rules in force.

use std::sync::Arc;

use arc_swap::ArcSwap;
use smallvec::SmallVec;

use super::{
    DecideError, Descriptor, OverrideKind, Request, Settings, Snapshot,
    applied_limit::{AppliedLimit, Match},
    key,
    overrides::Mode,
    statistics::{Outcome, Statistics, Threshold},
    top_entities::TopEntities,
    verdict::{Code, CurrentLimit, Status, Verdict},
};
use crate::{
    algorithm::{Action, Algorithm, Decision, LimitSpec, MAX_NUMBER, Micros, Operation, State},
    metrics::WorkerId,
    rules::{FailurePolicy, Limit, Metadata, Rule},
    store::{AnyStore, Charge, Decider, Hit, HitDecision, HitDecisions, Memory, Store, StoreError},
};

/// The counter of one limited descriptor, which its hit borrows.
struct Counter {
    name: Vec<u8>,
    /// The algorithm with the request's context, for the few limits that depend on the caller.
    contextual_algorithm: Option<Box<Algorithm>>,
}

/// Iterates over the descriptors that have a limit, with their limits.
fn limited_descriptors<'r, 'd, 'm, 's>(
    request: &'r Request<'d>,
    matches: &'m [Match<'s>],
) -> impl Iterator<Item = (&'r Descriptor<'d>, &'m AppliedLimit<'s>)> {
    let all = request.descriptors.iter().zip(matches);
    all.filter_map(|(descriptor, matched)| Some((descriptor, matched.limited()?)))
}

/// Decides requests on behalf of one worker.
#[derive(Clone)]
pub struct Engine {
    /// The worker that uses this engine.
    pub worker: WorkerId,
    /// Prefix of the counters' names; empty except for candidate rules.
    pub scope: &'static str,
    /// The store that has the counters.
    pub store: AnyStore,
    /// Local counters for the failure policy `local`.
    pub local: Arc<Memory>,
    /// The rules in force and the overrides.
    pub rules: Arc<ArcSwap<Snapshot>>,
    /// Statistics per rule.
    pub statistics: Arc<Statistics>,
    /// The entities with the most hits and the most denied hits; `None` for candidate rules and in a replay.
    pub top: Option<Arc<TopEntities>>,
    /// Settings that apply to all rules.
    pub settings: Arc<Settings>,
}

impl Engine {
    /// Decides one request. All descriptors are counted, even if the first one is denied.
    ///
    /// # Errors
    ///
    /// Returns an error if no rules are loaded, or if the store fails and an applicable failure policy is `error`.
    pub async fn decide(&self, request: &Request<'_>, now: Micros) -> Result<Verdict, DecideError> {
        let snapshot = &*self.rules.load();
        if snapshot.compiled.awaiting_rules {
            return Err(DecideError::NoRules);
        }
        let domain = snapshot.rules().settings_of(request.domain);
        let mut charge = if domain.is_some_and(|domain| domain.charge_all) { Charge::All } else { Charge::Each };
        let matches = self.matches(snapshot, request, now);
        let counters = self.counters(request, &matches, domain.map_or(&[], |domain| &domain.shard_by));
        let mut hits = self.hits(request, &matches, &counters);
        if !request.feedback.is_empty() {
            self.apply_feedback(request, &matches, &mut hits, now);
        }
        let denied_by_switch = self.count_denied_by_switch(request, &matches, now) && charge == Charge::All;
        if denied_by_switch {
            // The request is denied already, so its other limits must not be charged.
            hits.iter_mut().for_each(|hit| *hit = hit.peek());
            charge = Charge::Each;
        }
        // Variables that end with this block take no space in the future across the next await.
        let verdict = {
            let answers = match charge {
                _ if hits.is_empty() => HitDecisions::new(),
                Charge::Each => self.store.apply(&hits, charge, now).await,
                // Boxed, as it is rare and a decision that waits for Redis should be small.
                Charge::All => Box::pin(self.apply_together(&hits, now)).await,
            };
            let is_denied = |(hit, answer): (&Hit<'_>, &Result<HitDecision, StoreError>)| hit.is_denied_by(answer);
            let charged_together = charge == Charge::All && hits.len() > 1;
            let nothing_taken = denied_by_switch || charged_together && hits.iter().zip(&answers).any(is_denied);
            for ((descriptor, applied), answer) in limited_descriptors(request, &matches).zip(&answers) {
                let Ok(answer) = answer else {
                    continue;
                };
                let allowed = answer.decision.allowed;
                self.record_top(request.domain, descriptor, applied, allowed, now);
                if !(nothing_taken && allowed) {
                    self.count(descriptor, applied, applied.base_limit(), answer, !charged_together, now);
                }
            }
            let mut decisions = SmallVec::<[HitDecision; 1]>::new();
            for (((descriptor, applied), hit), answer) in limited_descriptors(request, &matches).zip(&hits).zip(answers)
            {
                decisions.push(match answer {
                    Ok(answer) => answer,
                    Err(error) => {
                        let decision = self
                            .apply_failure_policy(descriptor, applied, hit, now)
                            .ok_or(DecideError::Store(error))?;
                        HitDecision { decision, decider: Decider::Fallback, grant: None }
                    }
                });
            }
            self.verdict(snapshot, request, &matches, &decisions)
        };
        if let Some(evaluation) =
            snapshot.candidate.as_ref().and_then(|candidate| candidate.evaluate(self, request, &verdict, now))
        {
            evaluation.await;
        }
        Ok(verdict)
    }

    /// Returns the counters of the limited descriptors, and counts the hits as requested or refunded.
    fn counters(&self, request: &Request<'_>, matches: &[Match<'_>], shard_by: &[Box<str>]) -> SmallVec<[Counter; 1]> {
        let feedback = request.feedback.iter().zip(matches);
        let mut samples = feedback.filter_map(|(feedback, matched)| matched.limited().map(|_| feedback.sample));
        let hash = self.settings.value_hash.as_ref();
        let counter = |(descriptor, applied): (&Descriptor<'_>, &AppliedLimit<'_>)| {
            let algorithm = applied.limit.algorithm();
            let context = applied.context(descriptor, samples.next().flatten());
            let entries = &descriptor.entries[..descriptor.entries.len() - Rule::modifier_count(&applied.path)];
            let hits = descriptor.hits.min(MAX_NUMBER);
            if descriptor.refund {
                applied.series.count_refunded(self.worker, hits);
            } else {
                applied.series.count_requested(self.worker, hits, 1);
            }
            Counter {
                name: key::name(self.scope, request.domain, shard_by, entries, &applied.path, algorithm, hash),
                contextual_algorithm: context.map(|context| Box::new(algorithm.with_context(context))),
            }
        };
        limited_descriptors(request, matches).map(counter).collect()
    }

    /// Builds the hits for the store.
    fn hits<'h>(
        &self,
        request: &Request<'_>,
        matches: &'h [Match<'_>],
        counters: &'h [Counter],
    ) -> SmallVec<[Hit<'h>; 1]> {
        limited_descriptors(request, matches)
            .zip(counters)
            .map(|((descriptor, applied), counter)| {
                let binding = !descriptor.refund && self.is_binding(applied);
                Hit {
                    key: &counter.name,
                    algorithm: counter.contextual_algorithm.as_deref().unwrap_or_else(|| applied.limit.algorithm()),
                    action: action(descriptor),
                    cost: descriptor.hits.min(MAX_NUMBER),
                    blocks_on_denial: binding,
                    blocks_on_error: binding && self.on_error(applied).denies(),
                    per_second: applied.limit.is_per_second(),
                    consistency: applied.consistency(),
                    demand: 0,
                    is_ahead: false,
                }
            })
            .collect()
    }

    /// Counts the descriptors that an override denies. Returns whether they deny the whole request.
    fn count_denied_by_switch(&self, request: &Request<'_>, matches: &[Match<'_>], now: Micros) -> bool {
        let mut denies = false;
        for (descriptor, matched) in request.descriptors.iter().zip(matches) {
            let Some(applied) = matched.denied() else {
                continue;
            };
            denies |= self.is_binding(applied);
            self.record_top(request.domain, descriptor, applied, false, now);
            let hits = descriptor.hits.min(MAX_NUMBER);
            let threshold = Threshold {
                limit: 0,
                requests: hits.min(1),
                near: 0,
                splits_denied: false,
                shadow: applied.is_shadow(),
                from_deny_cache: false,
            };
            applied.series.count_requested(self.worker, hits, 1);
            applied.series.count_decision(self.worker, hits, &Decision::default(), threshold);
        }
        denies
    }

    pub(super) fn record_top(
        &self,
        domain: &str,
        descriptor: &Descriptor<'_>,
        applied: &AppliedLimit<'_>,
        allowed: bool,
        now: Micros,
    ) {
        if let Some(top) = &self.top {
            // Hits that are allowed because of shadow mode are not denied.
            let allowed = allowed || applied.is_shadow();
            top.record(self.worker, domain, descriptor, applied.rule.map(Rule::policy), allowed, now);
        }
    }

    /// Applies hits under [`Charge::All`]. Hits on the same counter are merged into one with the sum of their costs.
    async fn apply_together(&self, hits: &[Hit<'_>], now: Micros) -> HitDecisions {
        let mut merged = SmallVec::<[Hit<'_>; 4]>::new();
        let mut indices = SmallVec::<[usize; 4]>::new();
        for hit in hits {
            let same_counter = |other: &Hit<'_>| other.key == hit.key && other.action == hit.action;
            let index = merged.iter().position(same_counter).unwrap_or(merged.len());
            match merged.get_mut(index) {
                Some(first) => first.cost = first.cost.saturating_add(hit.cost),
                None => merged.push(*hit),
            }
            indices.push(index);
        }
        // A single hit does not depend on the outcome of others.
        let charge = if merged.len() == 1 { Charge::Each } else { Charge::All };
        let answers = self.store.apply(&merged, charge, now).await;
        let mut granted = SmallVec::<[usize; 4]>::new();
        let answer = |index: usize| {
            let answer = answers.get(index).copied().unwrap_or(Err(StoreError::Rejected))?;
            // Only the first descriptor of a merged hit receives its grant.
            let first = !granted.contains(&index);
            granted.push(index);
            Ok(HitDecision { grant: answer.grant.filter(|_| first), ..answer })
        };
        indices.into_iter().map(answer).collect()
    }

    pub(super) fn on_error(&self, applied: &AppliedLimit<'_>) -> FailurePolicy {
        let policy = applied.custom_limit.and_then(|custom_limit| custom_limit.on_error);
        policy.or(applied.rule.and_then(|rule| rule.on_error)).unwrap_or(self.settings.on_error)
    }

    /// Returns whether a denial by this limit denies the request.
    fn is_binding(&self, applied: &AppliedLimit<'_>) -> bool {
        let lenient = applied.is_shadow() || applied.rule.is_some_and(|rule| rule.quota_mode);
        !(lenient || self.settings.shadow_mode || self.settings.quota_mode)
    }

    /// Counts a decision in the statistics.
    ///
    /// `limit` is the limit that decided. A denied hit that was charged alone may have been counted; one that was
    /// charged together with others was not.
    fn count(
        &self,
        descriptor: &Descriptor<'_>,
        applied: &AppliedLimit<'_>,
        limit: &Limit,
        answer: &HitDecision,
        charged_alone: bool,
        now: Micros,
    ) {
        if descriptor.refund {
            return;
        }
        if let Some(shedding) = applied.shedding {
            let class = applied.context(descriptor, None).map_or(0, |context| context.class.into());
            let outcome = match answer.decision.allowed {
                true => Outcome::Allowed,
                false if applied.sheds(&answer.decision) => Outcome::Shed,
                false => Outcome::Denied,
            };
            shedding.record(self.worker, class, outcome, descriptor.hits.min(MAX_NUMBER), now);
        }
        let splits_denied = charged_alone && answer.decider != Decider::DenyCache && limit.splits_denied();
        let (limit, _) = limit.policy();
        let shadow = applied.is_shadow();
        let (hits, near) = (descriptor.hits.min(MAX_NUMBER), self.statistics.near_threshold(limit));
        let from_deny_cache = answer.decider == Decider::DenyCache;
        applied.series.count_decision(
            self.worker,
            hits,
            &answer.decision,
            Threshold { limit, requests: hits.min(1), near, splits_denied, shadow, from_deny_cache },
        );
    }

    /// Adds the caller's demand to the hits, and counts the hits that it has admitted under finished grants.
    fn apply_feedback(&self, request: &Request<'_>, matches: &[Match<'_>], hits: &mut [Hit<'_>], now: Micros) {
        let feedback = request.feedback.iter().zip(matches);
        let feedback = feedback.filter_map(|(feedback, matched)| Some((feedback, matched.limited()?)));
        for (hit, (feedback, applied)) in hits.iter_mut().zip(feedback) {
            hit.demand = feedback.demand;
            let Some((id, admitted)) = feedback.reports else {
                continue;
            };
            let admitted = self.store.report(hit, id, admitted, now);
            let (limit, _) = applied.limit.policy();
            let allowed = Decision { allowed: true, ..Decision::default() };
            let near = self.statistics.near_threshold(limit);
            // The caller does not report how many requests the hits belong to.
            let requests = admitted;
            let threshold =
                Threshold { limit, requests, near, splits_denied: false, shadow: false, from_deny_cache: false };
            applied.series.count_requested(self.worker, admitted, requests);
            applied.series.count_decision(self.worker, admitted, &allowed, threshold);
        }
    }

    /// Decides a hit by its failure policy after the store failed.
    ///
    /// Returns `None` if the policy is `error`. Under `allow` and `deny` nothing is counted, and the decision has the
    /// numbers of an unused counter.
    fn apply_failure_policy(
        &self,
        descriptor: &Descriptor<'_>,
        applied: &AppliedLimit<'_>,
        hit: &Hit<'_>,
        now: Micros,
    ) -> Option<Decision> {
        let policy = self.on_error(applied);
        self.statistics.on_error[policy as usize].add(self.worker, 1);
        let allowed = match policy {
            FailurePolicy::Error => return None,
            FailurePolicy::Allow => true,
            FailurePolicy::Deny => false,
            FailurePolicy::Local => {
                let instance_limit = self.instance_limit(applied);
                let algorithm = applied
                    .context(descriptor, None)
                    .map_or(*instance_limit.algorithm(), |context| instance_limit.algorithm().with_context(context));
                let hit = Hit { algorithm: &algorithm, ..*hit };
                let answer = self.local.apply(&[hit], Charge::Each, now).pop()?.ok()?;
                self.count(descriptor, applied, &instance_limit, &answer, true, now);
                return Some(answer.decision);
            }
        };
        let operation = Operation { action: action(descriptor), cost: descriptor.hits, now };
        let decision = applied.limit.algorithm().apply(&mut State::default(), operation);
        let remaining = if allowed { decision.remaining } else { 0 };
        Some(Decision { allowed, remaining, ..decision })
    }

    /// Returns this instance's share of a limit, for decisions without the store.
    fn instance_limit(&self, applied: &AppliedLimit<'_>) -> Limit {
        let (limit, instances) = (applied.limit, self.settings.instances.get());
        match (applied.custom_limit, applied.rule) {
            (Some(custom_limit), _) => custom_limit.divided_limit.as_deref().copied().unwrap_or(*limit),
            (None, Some(rule)) => rule.divided_limit.as_deref().copied().unwrap_or(*limit),
            (None, None) => {
                let algorithm = Algorithm::DEFAULT;
                Limit::divided(limit.requests(), limit.measure(), algorithm, LimitSpec::default(), instances)
                    .unwrap_or(*limit)
            }
        }
    }

    /// Builds the verdict. `decisions` has one element per limited descriptor, in their order.
    fn verdict(
        &self,
        snapshot: &Snapshot,
        request: &Request<'_>,
        matches: &[Match<'_>],
        decisions: &[HitDecision],
    ) -> Verdict {
        let mut decisions = decisions.iter();
        let no_limit = |override_kind| Status { quota: self.settings.quota_mode, override_kind, ..Status::NO_LIMIT };
        let statuses: SmallVec<[Status; 1]> = matches
            .iter()
            .zip(&request.descriptors)
            .map(|(matched, descriptor)| match matched {
                Match::None | Match::NoDomain | Match::NoRule => no_limit(None),
                Match::Off => no_limit(Some(OverrideKind::Switch(Mode::Off))),
                Match::Unlimited(_, override_kind) => Status { override_kind: *override_kind, ..Status::UNLIMITED },
                Match::Denied(applied) => self.denial(applied),
                Match::Limited(applied) => {
                    let status = self.status(applied, decisions.next().copied().unwrap_or_default());
                    if status.is_over() { status.with_cost(descriptor.hits) } else { status }
                }
            })
            .collect();
        let overall = match Verdict::overall(&statuses) {
            Code::OverLimit if self.settings.shadow_mode && !snapshot.modes.enforces_all() => {
                self.statistics.global_shadow.add(self.worker, 1);
                Code::Ok
            }
            code => code,
        };
        let metadata = self.settings.metadata.then(|| metadata(matches, &statuses)).flatten();
        Verdict { overall, statuses, metadata }
    }

    /// Returns the status of a descriptor that an override denies. Its reset time is unknown.
    fn denial(&self, applied: &AppliedLimit<'_>) -> Status {
        let status = self.status(applied, HitDecision::default());
        Status { reset: None, denial_counts: true, ..status }
    }

    fn status(&self, applied: &AppliedLimit<'_>, HitDecision { decision, decider, grant }: HitDecision) -> Status {
        let shadow = applied.is_shadow();
        let name = applied.rule.and_then(|rule| rule.name.as_ref());
        let policy = applied.rule.filter(|_| self.settings.policies).map(|rule| Arc::clone(rule.policy()));
        let limit = CurrentLimit::new(applied.base_limit(), name, policy);
        // Elastic capacity above the limit may disappear at any time, so callers must not rely on it.
        let (elastic_quota, _) = applied.limit.policy();
        let extra = elastic_quota.saturating_sub(limit.quota);
        Status {
            code: if decision.allowed || shadow { Code::Ok } else { Code::OverLimit },
            shed: applied.sheds(&decision),
            elastic: extra > 0 && decision.allowed && decision.used > limit.quota,
            remaining: u32::try_from(decision.remaining.saturating_sub(extra)).unwrap_or(u32::MAX),
            limit: Some(match decision.limit {
                Some(requests) => CurrentLimit { requests, quota: requests.into(), ..limit },
                None => limit,
            }),
            reset: Some(decision.reset),
            next: decision.next,
            retry_after: decision.retry_after,
            never_fits: false,
            delay: decision.delay,
            soft: decision.soft,
            decider,
            override_kind: applied.override_kind(),
            grant,
            denial_counts: applied.limit.denial_counts() || applied.rule.is_some_and(|rule| rule.elastic.is_some()),
            quota: self.settings.quota_mode || applied.rule.is_some_and(|rule| rule.quota_mode),
            unlimited: false,
        }
    }
}

fn action(descriptor: &Descriptor<'_>) -> Action {
    match descriptor {
        Descriptor { hits: 0, .. } => Action::Peek,
        Descriptor { refund: true, .. } => Action::Refund,
        Descriptor { .. } => Action::Take,
    }
}

/// Merges the metadata of the rules that allowed their descriptors. The first rule that sets a key wins.
fn metadata(matches: &[Match<'_>], statuses: &[Status]) -> Option<Metadata> {
    let allowed = matches.iter().zip(statuses).filter(|(_, status)| status.code == Code::Ok && !status.unlimited);
    let mut all = allowed.filter_map(|(matched, _)| matched.rule()?.metadata.as_ref());
    let mut merged = all.next()?.clone();
    all.for_each(|other| merged.merge(other));
    Some(merged)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;
    use crate::{
        engine::tests::{NOW, descriptor, engine_with},
        rules::Options,
    };

    #[test]
    fn the_failure_policy_decides_after_the_store_failed() {
        let text = "domain: api\ndescriptors:\n- {key: default, rate_limit: {unit: year, requests_per_unit: 4}}\n\
                    - {key: open, rate_limit: {unit: year, requests_per_unit: 4, on_error: allow}}\n\
                    - {key: closed, rate_limit: {unit: year, requests_per_unit: 4, on_error: deny}}\n\
                    - {key: alone, rate_limit: {unit: year, requests_per_unit: 4, on_error: local}}\n";
        let instances = NonZeroU32::new(2).unwrap();
        let settings = Settings { instances, ..Settings::default() };
        let engine = engine_with(text, Options { instances, ..Options::default() }, settings);
        let snapshot = engine.rules.load_full();
        let decide = |key| {
            let descriptors = SmallVec::from_elem(descriptor(&[(key, "x")], 1), 1);
            let request = Request { domain: "api", descriptors, feedback: Vec::new() };
            let matches = engine.matches(&snapshot, &request, NOW);
            let counters = engine.counters(&request, &matches, &[]);
            let hits = engine.hits(&request, &matches, &counters);
            let applied = matches[0].limited().unwrap();
            let decision = engine.apply_failure_policy(&request.descriptors[0], applied, &hits[0], NOW);
            decision.map(|decision| (decision.allowed, decision.remaining))
        };
        assert_eq!(["default", "open", "closed"].map(decide), [None, Some((true, 3)), Some((false, 0))]);
        assert_eq!(decide("open"), Some((true, 3)), "nothing is counted");
        // Each of two instances has half of the limit.
        assert_eq!([(); 3].map(|()| decide("alone")), [Some((true, 1)), Some((true, 0)), Some((false, 0))]);
        let counts = FailurePolicy::ALL.map(|policy| engine.statistics.on_error[policy as usize].get());
        assert_eq!(counts, [1, 2, 1, 3]);
    }
}
