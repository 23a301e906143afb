//! A decision of the [`Engine`] has three steps. [`Engine::prepare`] finds the limits of a request and prepares the
//! hits on their counters. Then the hits are applied to a store, immediately in memory ([`PreparedRequest::apply_in`])
//! or over the network ([`Store::apply`]). [`Engine::finish`] counts the statistics, lets failure policies decide where
//! the store has not answered, and builds the verdict.

use std::{ptr, sync::Arc};

use futures_util::future::join_all;
use sluicegate_algorithm::{Action, Algorithm, Decision, LimitSpec, MAX_NUMBER, Micros, Operation, Program, State};
use sluicegate_rules::{FailurePolicy, Limit, Metadata, Rule};
use sluicegate_store::{Blocks, Charge, Counter, Decider, Hit, HitDecision, Memory, Store, StoreError};
use smallvec::SmallVec;

use super::{
    DecideError, Descriptor, Engine, Feedback, OverrideKind, Request, Snapshot, key,
    matching::{AppliedLimit, Match, MatchOf},
    overrides::Mode,
    penalty::PenaltyOfLimit,
    prepared::{ChargedLimit, Prepared, PreparedLimit, PreparedRequest},
    statistics::{CountContext, Outcome},
    verdict::{Code, CurrentLimit, Status, Verdict},
};

impl<S: Store> Engine<S> {
    /// Decides one request by a snapshot of the rules, and waits for the store. All descriptors are decided, even if
    /// the first one is denied.
    ///
    /// # Errors
    ///
    /// Returns an error if no rules are loaded, or if the store fails and an applicable failure policy is `error`.
    pub async fn decide(
        &self,
        snapshot: &Snapshot,
        request: &Request<'_>,
        now: Micros,
    ) -> Result<Verdict, DecideError> {
        snapshot.require_rules()?;
        let mut prepared = PreparedRequest::new(request, now);
        self.prepare(snapshot, &mut prepared);
        self.finish_grants(&prepared);
        if !prepared.needs_no_store() {
            let hits = prepared.hits();
            let answers = match prepared.parts().as_slice() {
                [part] => self.store.apply(&hits, part.charge, now).await,
                parts => {
                    let calls = parts.iter().map(|part| self.store.apply(&hits[part.hits.clone()], part.charge, now));
                    join_all(calls).await.into_iter().flatten().collect()
                }
            };
            drop(hits);
            prepared.set_answers(answers);
            if prepared.has_groups {
                self.begin_penalties(&mut prepared).await;
            }
        }
        self.finish(snapshot, &mut prepared)
    }

    /// Begins the penalties of the limits that have denied the request.
    async fn begin_penalties(&self, prepared: &mut PreparedRequest<'_, '_>) {
        let hits = prepared.penalty_hits();
        if hits.is_empty() {
            return;
        }
        // It is rare, so its state should not be part of every decision's.
        let answers = Box::pin(self.store.apply(&hits, Charge::Each, prepared.now)).await;
        drop(hits);
        prepared.set_penalty_answers(answers);
    }

    /// Finishes the grants that the caller has used up, and counts their hits.
    fn finish_grants(&self, prepared: &PreparedRequest<'_, '_>) {
        for limit in prepared.charged() {
            let Some((id, admitted)) = limit.finished_grant else {
                continue;
            };
            let admitted = self.store.report(&limit.hit.counter, id, admitted, prepared.now);
            let (quota, _) = limit.applied.limit.policy();
            let allowed = Decision { allowed: true, ..Decision::default() };
            let context = CountContext {
                limit: quota,
                // The caller does not report how many requests the hits belong to.
                requests: admitted,
                near: self.statistics.near_threshold(quota),
                splits_denied: false,
                shadow: false,
                from_deny_cache: false,
            };
            limit.applied.series.count_requested(self.worker, admitted, admitted);
            limit.applied.series.count_decision(self.worker, admitted, &allowed, context);
        }
    }
}

impl<S> Engine<S> {
    /// Decides one request by a snapshot of the rules, with counters in memory.
    pub(super) fn decide_by(
        &self,
        snapshot: &Snapshot,
        memory: &Memory,
        request: &Request<'_>,
        now: Micros,
    ) -> Result<Verdict, DecideError> {
        snapshot.require_rules()?;
        let mut prepared = PreparedRequest::new(request, now);
        self.prepare(snapshot, &mut prepared);
        prepared.apply_in(memory);
        self.finish(snapshot, &mut prepared)
    }

    /// Finds the limits of a request, prepares the hits on their counters, and counts them as requested or refunded. The
    /// snapshot must have [rules](Snapshot::require_rules).
    pub fn prepare<'s, 'd>(&self, snapshot: &'s Snapshot, prepared: &mut PreparedRequest<'s, 'd>) {
        debug_assert!(!snapshot.awaits_rules(), "without rules nothing can be decided");
        let domain = prepared.request.domain;
        if snapshot.rule_set().settings_of(domain).is_some_and(|settings| settings.charge_all) {
            prepared.charge = Charge::All;
        }
        let PreparedRequest { request, now, .. } = *prepared;
        let shard_by = key::shard_by(snapshot.rule_set(), request.domain);
        let mut is_denied = false;
        let mut denied_of_several = SmallVec::<[usize; 1]>::new();
        for MatchOf { descriptor: index, matched } in self.matches(snapshot, request, now) {
            let descriptor = &request.descriptors[index];
            debug_assert!(descriptor.hits <= MAX_NUMBER, "decoders must bound the number of hits");
            let outcome = match matched {
                Match::None | Match::NoDomain | Match::NoRule => Prepared::NoLimit(None),
                Match::Off => Prepared::NoLimit(Some(OverrideKind::Switch(Mode::Off))),
                Match::Unlimited(_, override_kind) => Prepared::Unlimited(override_kind),
                Match::Denied(applied) => {
                    is_denied |= self.denies_requests(snapshot, &applied);
                    if applied.is_grouped && self.denies_requests(snapshot, &applied) {
                        denied_of_several.push(index);
                    }
                    self.count_denied_by_switch(request.domain, descriptor, &applied, now);
                    Prepared::Denied(applied)
                }
                Match::Limited(applied) => {
                    prepared.has_groups |= applied.is_grouped;
                    let mut feedback = request.feedback.get(index).copied().unwrap_or_default();
                    if applied.is_grouped || applied.rule.is_some_and(|rule| rule.cost_per_hit.is_some()) {
                        // A grant would be of one limit only, or of hits without their cost.
                        feedback = Feedback { sample: feedback.sample, ..Feedback::default() };
                    }
                    let blocks = self.blocks(snapshot, descriptor, &applied);
                    self.charge(prepared, index, applied, feedback, blocks, shard_by);
                    continue;
                }
            };
            prepared.limits.push(PreparedLimit { descriptor: index, outcome });
        }
        for descriptor in denied_of_several {
            prepared.peek_only_of(descriptor);
        }
        if prepared.charge == Charge::All {
            if is_denied {
                prepared.peek_only();
            } else {
                prepared.join_hits_of_same_counters();
            }
        }
    }

    /// Counts the decisions, decides by the failure policies where the store has not answered, and builds the verdict.
    ///
    /// # Errors
    ///
    /// Returns an error if the store has failed and an applicable failure policy is `error`.
    pub fn finish(&self, snapshot: &Snapshot, prepared: &mut PreparedRequest<'_, '_>) -> Result<Verdict, DecideError> {
        let domain = prepared.request.domain;
        let now = prepared.now;
        let is_charged_together = prepared.charge == Charge::All && prepared.charged().count() > 1;
        let is_nothing_taken =
            prepared.is_denied_by_switch || is_charged_together && prepared.charged().any(ChargedLimit::denies_all);
        let mut ranked = None;
        for limit in prepared.charged() {
            let ChargedLimit { descriptor, applied, answer, is_grouped, .. } = limit;
            let Ok(answer) = answer else {
                continue;
            };
            let is_allowed = answer.decision.allowed;
            // The hits of a descriptor are ranked once, also if several limits apply.
            if !ranked.is_some_and(|ranked| ptr::addr_eq(ranked, *descriptor)) {
                let is_allowed = is_allowed && !prepared.is_denied_together(limit);
                self.record_top(domain, descriptor, applied, is_allowed, now);
                ranked = Some(*descriptor);
            }
            if is_allowed && (is_nothing_taken || prepared.is_denied_together(limit)) {
                continue;
            }
            let is_charged_alone = !is_charged_together && !is_grouped;
            self.count(descriptor, applied, applied.base_limit(), answer, is_charged_alone, now);
        }
        for limit in prepared.charged_mut() {
            if let Err(error) = limit.answer {
                let decision = self.apply_failure_policy(limit, error, now).ok_or(DecideError::Store(error))?;
                limit.answer = Ok(HitDecision { decision, decider: Decider::Fallback, grant: None });
            }
        }
        Ok(self.verdict(snapshot, prepared))
    }

    /// Adds a limit with the hit on its counter, and counts the hits as requested or refunded.
    fn charge<'s>(
        &self,
        prepared: &mut PreparedRequest<'s, '_>,
        index: usize,
        applied: AppliedLimit<'s>,
        feedback: Feedback,
        blocks: Blocks,
        shard_by: &[Box<str>],
    ) {
        let domain = prepared.request.domain;
        let descriptor = &prepared.request.descriptors[index];
        let entries = &descriptor.entries[..descriptor.entries.len() - Rule::modifier_count(&applied.path)];
        let hash = self.settings.value_hash.as_ref();
        let algorithm = applied.limit.algorithm();
        let mut name = key::name(self.scope, domain, shard_by, entries, &applied.path, algorithm.into(), hash);
        applied.append_limit_name(&mut name);
        let cost = applied.cost(descriptor);
        if descriptor.refund {
            applied.series.count_refunded(self.worker, cost);
        } else {
            applied.series.count_requested(self.worker, cost, 1);
        }
        let for_caller = applied.for_caller(algorithm, descriptor, feedback.sample, &name);
        let mut penalty = None;
        if let Some(program) = applied.limit.penalty()
            && !descriptor.refund
        {
            let program = Program::from(program);
            let mut name = key::name(self.scope, domain, shard_by, entries, &applied.path, (&program).into(), hash);
            applied.append_limit_name(&mut name);
            let counter = Counter { per_second: applied.limit.is_per_second(), ..Counter::new(name, program) };
            penalty = Some(Box::new(PenaltyOfLimit::new(Hit { blocks, ..Hit::take(counter, cost).peek() })));
        }
        // It has 630 bytes, and is written once.
        prepared.limits.push(PreparedLimit {
            descriptor: index,
            outcome: Prepared::Charged(ChargedLimit {
                descriptor,
                is_grouped: applied.is_grouped,
                hit: Hit {
                    counter: Counter {
                        name,
                        program: Program::Limit(*algorithm),
                        per_second: applied.limit.is_per_second(),
                        consistency: applied.consistency(),
                    },
                    action: action(descriptor),
                    cost,
                    blocks,
                    demand: feedback.demand,
                    is_ahead: false,
                },
                applied,
                included_in: None,
                penalty,
                finished_grant: feedback.reports,
                answer: Err(StoreError::Missing),
            }),
        });
        if let Some(algorithm) = for_caller
            && let Some(PreparedLimit { outcome: Prepared::Charged(limit), .. }) = prepared.limits.last_mut()
        {
            limit.hit.counter.program = Program::Limit(algorithm);
        }
    }

    /// Returns when the hit of a limit denies the whole request.
    fn blocks(&self, snapshot: &Snapshot, descriptor: &Descriptor<'_>, applied: &AppliedLimit<'_>) -> Blocks {
        if descriptor.refund || !self.denies_requests(snapshot, applied) {
            return Blocks::Never;
        }
        if self.on_error(applied).denies() { Blocks::OnDenialOrError } else { Blocks::OnDenial }
    }

    /// Counts the hits of a descriptor that an override denies.
    fn count_denied_by_switch(
        &self,
        domain: &str,
        descriptor: &Descriptor<'_>,
        applied: &AppliedLimit<'_>,
        now: Micros,
    ) {
        self.record_top(domain, descriptor, applied, false, now);
        let hits = descriptor.hits;
        let context = CountContext {
            limit: 0,
            requests: hits.min(1),
            near: 0,
            splits_denied: false,
            shadow: applied.is_shadow(),
            from_deny_cache: false,
        };
        applied.series.count_requested(self.worker, hits, 1);
        applied.series.count_decision(self.worker, hits, &Decision::default(), context);
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

    pub(super) fn on_error(&self, applied: &AppliedLimit<'_>) -> FailurePolicy {
        let policy = applied.custom_limit.and_then(|custom_limit| custom_limit.on_error);
        policy.or(applied.rule.and_then(|rule| rule.on_error)).unwrap_or(self.settings.on_error)
    }

    /// Returns whether the settings say that nothing is denied, and no switch enforces everything.
    fn is_global_shadow(&self, snapshot: &Snapshot) -> bool {
        self.settings.shadow_mode && !snapshot.modes.enforces_all()
    }

    /// Returns whether the limit is in shadow mode, in which it counts but never denies: because of its rule, a switch,
    /// or the settings.
    pub(super) fn is_shadow(&self, snapshot: &Snapshot, applied: &AppliedLimit<'_>) -> bool {
        applied.is_shadow() || self.is_global_shadow(snapshot)
    }

    /// Returns whether a denial by this limit alone denies the request: the limit is neither in shadow mode nor in
    /// quota mode.
    fn denies_requests(&self, snapshot: &Snapshot, applied: &AppliedLimit<'_>) -> bool {
        let is_quota = self.settings.quota_mode || applied.rule.is_some_and(|rule| rule.quota_mode);
        !is_quota && !self.is_shadow(snapshot, applied)
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
            let class = applied.class(descriptor).into();
            let outcome = if answer.decision.allowed {
                Outcome::Allowed
            } else if applied.sheds(&answer.decision) {
                Outcome::Shed
            } else {
                Outcome::Denied
            };
            shedding.record(self.worker, class, outcome, applied.cost(descriptor), now);
        }
        let (quota, _) = limit.policy();
        let from_deny_cache = answer.decider == Decider::DenyCache;
        let context = CountContext {
            limit: quota,
            requests: descriptor.hits.min(1),
            near: self.statistics.near_threshold(quota),
            splits_denied: charged_alone && !from_deny_cache && limit.splits_denied(),
            shadow: applied.is_shadow(),
            from_deny_cache,
        };
        applied.series.count_decision(self.worker, applied.cost(descriptor), &answer.decision, context);
    }

    /// Decides a hit by its failure policy after the store failed.
    ///
    /// Returns `None` if the policy is `error`. Under `allow` and `deny` nothing is counted, and the decision has the
    /// numbers of an unused counter.
    fn apply_failure_policy(&self, limit: &ChargedLimit<'_, '_>, error: StoreError, now: Micros) -> Option<Decision> {
        let ChargedLimit { descriptor, applied, hit, .. } = limit;
        if error == StoreError::Missing {
            self.statistics.missing_answers.add(self.worker, 1);
        }
        let policy = self.on_error(applied);
        self.statistics.on_error[policy as usize].add(self.worker, 1);
        let allowed = match policy {
            FailurePolicy::Error => return None,
            FailurePolicy::Allow => true,
            FailurePolicy::Deny => false,
            FailurePolicy::Local => {
                let instance_limit = self.instance_limit(applied);
                let algorithm = instance_limit.algorithm();
                let for_caller = applied.for_caller(algorithm, descriptor, None, &hit.counter.name);
                let program = Program::Limit(for_caller.unwrap_or(*algorithm));
                let counter = Counter { program, ..hit.counter.clone() };
                let local_hit = Hit { action: hit.action, ..counter.take(applied.cost(descriptor)) };
                let answer = self.local.decide(&local_hit, now);
                self.count(descriptor, applied, &instance_limit, &answer, true, now);
                return Some(answer.decision);
            }
        };
        let operation = Operation { action: action(descriptor), cost: applied.cost(descriptor), now };
        let decision = applied.limit.algorithm().apply(&mut State::default(), operation);
        let remaining = if allowed { decision.remaining } else { 0 };
        Some(Decision { allowed, remaining, ..decision })
    }

    /// Returns this instance's share of a limit, for decisions without the store.
    fn instance_limit(&self, applied: &AppliedLimit<'_>) -> Limit {
        let limit = applied.limit;
        match (applied.custom_limit, applied.rule) {
            (Some(custom_limit), _) => custom_limit.divided_limit.as_deref().copied().unwrap_or(*limit),
            (None, Some(rule)) => rule.divided_limit.as_deref().copied().unwrap_or(*limit),
            (None, None) => {
                let instances = self.settings.instances.get();
                let spec = LimitSpec::default();
                Limit::divided(limit.requests(), limit.measure(), Algorithm::DEFAULT, spec, instances).unwrap_or(*limit)
            }
        }
    }

    /// Builds the verdict of a request whose limits all have an answer.
    fn verdict(&self, snapshot: &Snapshot, prepared: &PreparedRequest<'_, '_>) -> Verdict {
        let mut statuses = SmallVec::<[Status; 1]>::new();
        for limit in &prepared.limits {
            let status = self.status_of(&limit.outcome);
            if limit.descriptor < statuses.len()
                && let Some(status_before) = statuses.last_mut()
            {
                status_before.join(status);
            } else {
                statuses.push(status);
            }
        }
        let overall = match Verdict::overall(&statuses) {
            Code::OverLimit if self.is_global_shadow(snapshot) => {
                self.statistics.global_shadow.add(self.worker, 1);
                Code::Ok
            }
            code => code,
        };
        let metadata = if self.settings.metadata { metadata(&prepared.limits, &statuses) } else { None };
        Verdict { overall, statuses, metadata }
    }

    /// Returns the status of a descriptor by one limit.
    fn status_of(&self, outcome: &Prepared<'_, '_>) -> Status {
        match outcome {
            Prepared::NoLimit(override_kind) => {
                Status { quota: self.settings.quota_mode, override_kind: *override_kind, ..Status::NO_LIMIT }
            }
            Prepared::Unlimited(override_kind) => Status { override_kind: *override_kind, ..Status::UNLIMITED },
            Prepared::Denied(applied) => self.denial(applied),
            Prepared::Charged(limit) => {
                debug_assert!(limit.answer.is_ok(), "failure policies decide before the verdict");
                let status = self.status(&limit.applied, limit.answer.unwrap_or_default());
                if status.is_over() { status.with_cost(limit.applied.cost(limit.descriptor)) } else { status }
            }
        }
    }

    /// Returns the status of a descriptor that an override denies. Its reset time is unknown.
    fn denial(&self, applied: &AppliedLimit<'_>) -> Status {
        let status = self.status(applied, HitDecision::default());
        Status { reset: None, denial_counts: true, ..status }
    }

    fn status(&self, applied: &AppliedLimit<'_>, HitDecision { decision, decider, grant }: HitDecision) -> Status {
        let shadow = applied.is_shadow();
        let name = applied.rule.and_then(|rule| rule.name.as_ref());
        let policy = match applied.rule {
            Some(rule) if self.settings.policies => Some(Arc::clone(rule.policy())),
            _ => None,
        };
        let mut limit = CurrentLimit::new(applied.base_limit(), name, policy);
        // Elastic capacity above the limit may disappear at any time, so callers must not rely on it.
        let (elastic_quota, _) = applied.limit.policy();
        let extra = elastic_quota.saturating_sub(limit.quota);
        if let Some(requests) = decision.limit {
            limit.requests = requests.into();
            limit.quota = requests.into();
        }
        let mut status = Status {
            code: if decision.allowed || shadow { Code::Ok } else { Code::OverLimit },
            shed: applied.sheds(&decision),
            elastic: extra > 0 && decision.allowed && decision.used > limit.quota,
            remaining: decision.remaining.saturating_sub(extra),
            limit: Some(limit),
            reset: Some(decision.reset),
            next: decision.next,
            retry_after: decision.retry_after,
            retry_jitter: match applied.rule {
                Some(rule) => rule.retry_jitter,
                None => Micros::ZERO,
            },
            never_fits: false,
            delay: decision.delay,
            soft: decision.soft,
            decider,
            override_kind: applied.override_kind(),
            grant,
            denial_counts: applied.limit.denial_counts() || applied.rule.is_some_and(|rule| rule.elastic.is_some()),
            quota: self.settings.quota_mode || applied.rule.is_some_and(|rule| rule.quota_mode),
            unlimited: false,
            others: Vec::new(),
            denial: None,
        };
        if status.is_over()
            && let Some(rule) = applied.rule
        {
            status.denial.clone_from(&rule.denial);
        }
        if applied.rule.is_some_and(|rule| rule.is_hidden) {
            status.hide();
        }
        status
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
fn metadata(limits: &[PreparedLimit<'_, '_>], statuses: &[Status]) -> Option<Metadata> {
    let mut merged: Option<Metadata> = None;
    let mut next = 0;
    for limit in limits {
        // The limits of a rule share its metadata.
        if limit.descriptor < next {
            continue;
        }
        next = limit.descriptor + 1;
        if statuses[limit.descriptor].code != Code::Ok {
            continue;
        }
        let rule = limit.outcome.applied().and_then(|applied| applied.rule);
        let Some(metadata) = rule.and_then(|rule| rule.metadata.as_ref()) else {
            continue;
        };
        match &mut merged {
            Some(merged) => merged.merge(metadata),
            None => merged = Some(metadata.clone()),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use sluicegate_metrics::Totals;
    use sluicegate_rules::Options;
    use sluicegate_store::Grant;

    use super::*;
    use crate::{
        Override, Overrides, Settings,
        overrides::Target,
        testing::{NOW, descriptor, engine_with, refund},
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
            let mut prepared = PreparedRequest::new(&request, NOW);
            engine.prepare(&snapshot, &mut prepared);
            let limit = prepared.charged().next().unwrap();
            let decision = engine.apply_failure_policy(limit, StoreError::Missing, NOW);
            decision.map(|decision| (decision.allowed, decision.remaining))
        };
        assert_eq!(["default", "open", "closed"].map(decide), [None, Some((true, 3)), Some((false, 0))]);
        assert_eq!(decide("open"), Some((true, 3)), "nothing is counted");
        // Each of two instances has half of the limit.
        assert_eq!([(); 3].map(|()| decide("alone")), [Some((true, 1)), Some((true, 0)), Some((false, 0))]);
        let counts = FailurePolicy::ALL.map(|policy| engine.statistics.on_error[policy as usize].get());
        assert_eq!(counts, [1, 2, 1, 3]);
        assert_eq!(engine.statistics.missing_answers.get(), 7);
        let mut totals = Totals::new();
        engine.statistics.add_totals(&mut totals);
        let counted = ["within_limit", "over_limit"]
            .map(|name| totals[&format!("ratelimit.service.rate_limit.api.alone.{name}")]);
        assert_eq!(counted, [2, 1], "a local decision is counted");
    }

    #[test]
    fn a_local_decision_is_by_the_override_and_the_holder() {
        let text = "domain: api\ndescriptors:\n- {key: user, rate_limit: {unit: year, requests_per_unit: 9, on_error: local}}\n\
                    - {key: slots, rate_limit: {algorithm: concurrency, limit: 2, hold: 1h, holder: id, on_error: local}}\n";
        let instances = NonZeroU32::new(2).unwrap();
        let options = Options { instances, ..Options::default() };
        let engine = engine_with(text, options, Settings { instances, ..Settings::default() });
        let mut overrides = Overrides::default();
        let target = Target::parse("limit|api|user=x").unwrap();
        let value = "2/year".into();
        let [author, reason] = ["alice", "test"].map(Into::into);
        overrides.put(Override { target, value, until: None, author, reason, at: NOW, version: 1 }, options).unwrap();
        let snapshot = engine.rules.load().with(overrides, None, NOW);
        let allowed = |entries: &[(&'static str, &'static str)]| {
            let descriptors = SmallVec::from_elem(descriptor(entries, 1), 1);
            let request = Request { domain: "api", descriptors, feedback: Vec::new() };
            let mut prepared = PreparedRequest::new(&request, NOW);
            engine.prepare(&snapshot, &mut prepared);
            let limit = prepared.charged().next().unwrap();
            engine.apply_failure_policy(limit, StoreError::Timeout, NOW).unwrap().allowed
        };
        assert_eq!([allowed(&[("user", "x")]), allowed(&[("user", "x")])], [true, false], "half of the override");
        let slot = |holder| allowed(&[("slots", "x"), ("id", holder)]);
        assert_eq!([slot("a"), slot("b"), slot("a")], [true, false, true], "half of the slots");
    }

    /// Prepares a request, and returns what `check` returns for it before a store has answered.
    fn prepared<T>(text: &str, descriptors: &[Descriptor<'_>], check: impl Fn(&PreparedRequest<'_, '_>) -> T) -> T {
        let engine = engine_with(text, Options::default(), Settings::default());
        let snapshot = engine.rules.load_full();
        let feedback = vec![Feedback { demand: 7, ..Feedback::default() }; descriptors.len()];
        let request = Request { domain: "api", descriptors: descriptors.into(), feedback };
        let mut prepared = PreparedRequest::new(&request, NOW);
        engine.prepare(&snapshot, &mut prepared);
        check(&prepared)
    }

    #[test]
    fn what_prevents_the_takes_of_a_request_follows_from_the_failure_policy() {
        let text = "domain: api\ndescriptors:\n- {key: default, rate_limit: {unit: year, requests_per_unit: 4}}\n\
                    - {key: open, rate_limit: {unit: year, requests_per_unit: 4, on_error: allow}}\n\
                    - {key: closed, rate_limit: {unit: year, requests_per_unit: 4, on_error: deny, penalty: 1m}}\n";
        let limit = |descriptor: Descriptor<'_>| {
            prepared(text, &[descriptor], |prepared| {
                let limit = prepared.charged().next().unwrap();
                (limit.hit.blocks, limit.penalty.is_some())
            })
        };
        let one = |key| descriptor(&[(key, "x")], 1);
        assert_eq!(limit(one("default")), (Blocks::OnDenialOrError, false));
        assert_eq!(limit(one("open")), (Blocks::OnDenial, false));
        assert_eq!(limit(one("closed")), (Blocks::OnDenialOrError, true));
        assert_eq!(limit(refund(one("closed"))), (Blocks::Never, false));
    }

    #[test]
    fn hits_with_a_cost_and_those_of_several_limits_are_not_granted_to_callers() {
        let text = "domain: api\ndescriptors:\n- {key: plain, rate_limit: {unit: year, requests_per_unit: 4}}\n\
                    - {key: cost, rate_limit: {unit: year, requests_per_unit: 4, cost_per_hit: 2}}\n\
                    - {key: two, rate_limits: [{unit: year, requests_per_unit: 4}, {unit: day, requests_per_unit: 4, name: d}]}\n";
        let demand = |key| {
            let demands =
                |prepared: &PreparedRequest<'_, '_>| prepared.charged().map(|limit| limit.hit.demand).collect();
            prepared::<Vec<u64>>(text, &[descriptor(&[(key, "x")], 1)], demands)
        };
        assert_eq!(["plain", "cost", "two"].map(demand), [vec![7], vec![0], vec![0, 0]]);
    }

    #[test]
    fn the_limits_of_a_descriptor_are_applied_in_one_call() {
        let text = "domain: api\ndescriptors:\n- {key: one, rate_limit: {unit: year, requests_per_unit: 4}}\n\
                    - {key: two, rate_limits: [{unit: year, requests_per_unit: 4}, {unit: day, requests_per_unit: 4, name: d}]}\n";
        let parts = |keys: &[&'static str]| {
            let descriptors: Vec<_> = keys.iter().map(|key| descriptor(&[(*key, "x")], 1)).collect();
            prepared(text, &descriptors, |prepared| {
                prepared.parts().into_iter().map(|part| (part.hits, part.charge)).collect::<Vec<_>>()
            })
        };
        assert_eq!(parts(&["one", "one"]), [(0..2, Charge::Each)]);
        assert_eq!(parts(&["two", "two"]), [(0..2, Charge::All), (2..4, Charge::All)]);
        let mixed = [(0..1, Charge::Each), (1..3, Charge::All), (3..4, Charge::Each), (4..5, Charge::Each)];
        assert_eq!(parts(&["one", "two", "one", "one"]), mixed);
    }

    #[test]
    fn only_one_of_several_hits_on_a_counter_receives_its_grant() {
        let text =
            "domain: api\ncharge: all\ndescriptors: [{key: user, rate_limit: {unit: year, requests_per_unit: 9}}]";
        let engine = engine_with(text, Options::default(), Settings::default());
        let snapshot = engine.rules.load_full();
        let descriptors = SmallVec::from_elem(descriptor(&[("user", "x")], 1), 2);
        let request = Request { domain: "api", descriptors, feedback: Vec::new() };
        let mut prepared = PreparedRequest::new(&request, NOW);
        engine.prepare(&snapshot, &mut prepared);
        let grant = Some(Grant { hits: NonZeroU32::MIN, ttl: Micros::from_secs(1), id: 1 });
        let decision = Decision { allowed: true, ..Decision::default() };
        prepared.set_answers(SmallVec::from_elem(Ok(HitDecision { decision, decider: Decider::Lease, grant }), 1));
        let verdict = engine.finish(&snapshot, &mut prepared).unwrap();
        assert_eq!([verdict.statuses[0].grant, verdict.statuses[1].grant], [grant, None]);
    }

    /// The hits below the limit that a cached denial does not take are over the limit, too.
    #[test]
    fn a_denial_from_the_cache_is_counted_as_a_whole() {
        let text = "domain: api\ndescriptors: [{key: user, rate_limit: {unit: year, requests_per_unit: 4}}]";
        for (decider, within, over) in [(Decider::Store, 3, 2), (Decider::DenyCache, 0, 5)] {
            let engine = engine_with(text, Options::default(), Settings::default());
            let snapshot = engine.rules.load_full();
            let descriptors = SmallVec::from_elem(descriptor(&[("user", "x")], 5), 1);
            let request = Request { domain: "api", descriptors, feedback: Vec::new() };
            let mut prepared = PreparedRequest::new(&request, NOW);
            engine.prepare(&snapshot, &mut prepared);
            let decision = Decision { used: 6, ..Decision::default() };
            prepared.set_answers(SmallVec::from_elem(Ok(HitDecision { decision, decider, grant: None }), 1));
            engine.finish(&snapshot, &mut prepared).unwrap();
            let mut totals = Totals::new();
            engine.statistics.add_totals(&mut totals);
            let counted = ["within_limit", "over_limit"]
                .map(|name| totals[&format!("ratelimit.service.rate_limit.api.user.{name}")]);
            assert_eq!(counted, [within, over], "{decider:?}");
        }
    }
}
