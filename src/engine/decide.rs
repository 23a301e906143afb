//! The way of one decision through rules and store.

use std::{num::NonZeroU32, sync::Arc};

use arc_swap::{ArcSwap, Guard};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use super::{
    DecideError, Descriptor, OverrideKind, Request, Snapshot,
    applied_limit::{AppliedLimit, Match},
    key,
    overrides::{Mode, OverrideLookup},
    statistics::{Outcome, Statistics, Threshold},
    top_entities::TopEntities,
    verdict::{Code, CurrentLimit, Status, Verdict},
};
use crate::{
    algorithm::{Action, Algorithm, Decision, LimitSpec, MAX, Micros, Operation, State},
    metrics::WorkerId,
    rules::{FailurePolicy, Limit, Metadata, Rule},
    store::{AnyStore, Charge, Decider, Hit, HitDecision, HitDecisions, Memory, Store, StoreError},
};

/// What holds for all rules.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// What becomes of a request whose counters cannot be asked, unless the rule says otherwise.
    pub on_error: FailurePolicy,
    /// Nothing is ever refused; what would have been is counted.
    pub shadow_mode: bool,
    /// Every rule is a quota rule.
    pub quota_mode: bool,
    /// From this share of a limit on, hits are counted as near it.
    pub near_limit_ratio: f32,
    /// Among so many instances a limit is divided when each has to decide by itself.
    #[serde(skip, default = "one")]
    pub instances: NonZeroU32,
    /// Verdicts carry the rules' metadata.
    #[serde(skip)]
    pub metadata: bool,
    /// Verdicts carry the names of the rules' policies.
    #[serde(skip)]
    pub policies: bool,
}

const fn one() -> NonZeroU32 {
    NonZeroU32::MIN
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            instances: one(),
            on_error: FailurePolicy::Error,
            shadow_mode: false,
            quota_mode: false,
            near_limit_ratio: 0.8,
            metadata: false,
            policies: false,
        }
    }
}

/// What the hits of a request refer to.
struct CounterNames {
    /// The counters' names, one after the other.
    text: Vec<u8>,
    ends: SmallVec<[usize; 4]>,
    /// The algorithms of limits to which it matters who asks: few are such.
    askers: Vec<Algorithm>,
}

/// Descriptors and their limits, without those that have none.
fn limited<'r, 'd, 'm, 's>(
    request: &'r Request<'d>,
    matches: &'m [Match<'s>],
) -> impl Iterator<Item = (&'r Descriptor<'d>, &'m AppliedLimit<'s>)> {
    let all = request.descriptors.iter().zip(matches);
    all.filter_map(|(descriptor, found)| Some((descriptor, found.limited()?)))
}

/// One worker's engine.
#[derive(Clone)]
pub struct Engine {
    /// The worker it decides for.
    pub worker: WorkerId,
    /// Stands before the names of its counters; nothing, unless its rules are only tried out.
    pub scope: &'static str,
    /// Where the counters are.
    pub store: AnyStore,
    /// Where this instance counts by itself while the store cannot decide.
    pub local: Arc<Memory>,
    /// The rules in force.
    pub rules: Arc<ArcSwap<Snapshot>>,
    /// What is counted of them.
    pub statistics: Arc<Statistics>,
    /// Who is refused most, and asks most; `None` where nobody asks for it: of rules on trial, in a replay.
    pub top: Option<Arc<TopEntities>>,
    /// What holds for all of them.
    pub settings: Arc<Settings>,
}

/// A decision that has begun.
pub struct PreparedDecision<'r, 'm> {
    request: &'r Request<'m>,
    /// The rules that were in force then.
    snapshot: Guard<Arc<Snapshot>>,
    /// By descriptor.
    sought: SmallVec<[OverrideLookup; 1]>,
}

impl Engine {
    /// Decides one request. All its descriptors are counted, also when the first is refused already.
    pub async fn decide(&self, request: &Request<'_>, now: Micros) -> Result<Verdict, DecideError> {
        self.decide_prepared(&self.prepare(request), now).await
    }

    /// Begins a decision. What operators have said of the descriptors is on its way to the processor from here on: whoever has
    /// something else to do, such as to look what time it is, does it meanwhile.
    #[must_use]
    pub fn prepare<'r, 'm>(&self, request: &'r Request<'m>) -> PreparedDecision<'r, 'm> {
        let snapshot = self.rules.load();
        let seek = |descriptor: &Descriptor<'_>| snapshot.overrides.prepare_lookup(request.domain, &descriptor.entries);
        let sought = request.descriptors.iter().map(seek).collect();
        PreparedDecision { request, snapshot, sought }
    }

    /// Decides a request as [`Engine::decide`] does, whose decision has begun.
    pub async fn decide_prepared(&self, begun: &PreparedDecision<'_, '_>, now: Micros) -> Result<Verdict, DecideError> {
        let PreparedDecision { request, snapshot, sought } = begun;
        if snapshot.compiled.awaiting_rules {
            return Err(DecideError::NoRules);
        }
        let domain = snapshot.rules().settings_of(request.domain);
        let mut charge = if domain.is_some_and(|domain| domain.charge_all) { Charge::All } else { Charge::Each };
        let matches = self.matches(snapshot, request, sought, now);
        let names = self.names(request, &matches, domain.map_or(&[], |domain| &domain.shard_by));
        let mut hits = self.hits(request, &matches, &names);
        if !request.feedback.is_empty() {
            self.apply_feedback(request, &matches, &mut hits, now);
        }
        let denied_together = self.count_denied_by_switch(request, &matches, now) && charge == Charge::All;
        if denied_together {
            // Nothing is taken, whatever the others would say.
            hits.iter_mut().for_each(|hit| *hit = hit.peek());
            charge = Charge::Each;
        }
        // A block: what is not needed any more when the next wait begins takes no room in either.
        let verdict = {
            let answers = match charge {
                _ if hits.is_empty() => HitDecisions::new(),
                Charge::Each => self.store.apply(&hits, charge, now).await,
                // Boxed, as all that is rare: a decision that waits for Redis is to be small.
                Charge::All => Box::pin(self.apply_together(&hits, now)).await,
            };
            let refused = |(hit, answer): (&Hit<'_>, &Result<HitDecision, StoreError>)| hit.is_denied_by(answer);
            let together = charge == Charge::All && hits.len() > 1;
            let nothing_taken = denied_together || together && hits.iter().zip(&answers).any(refused);
            for ((descriptor, applied), answer) in limited(request, &matches).zip(&answers) {
                let Ok(answer) = answer else {
                    continue;
                };
                let allowed = answer.decision.allowed;
                self.record_top(request.domain, descriptor, applied, allowed, now);
                if !(nothing_taken && allowed) {
                    self.count(descriptor, applied, applied.base(), answer, !together, now);
                }
            }
            let mut decided = SmallVec::<[HitDecision; 1]>::new();
            for (((descriptor, applied), hit), answer) in limited(request, &matches).zip(&hits).zip(answers) {
                decided.push(match answer {
                    Ok(answer) => answer,
                    Err(error) => {
                        let decision = self.fallback(descriptor, applied, hit, now).ok_or(DecideError::Store(error))?;
                        HitDecision { decision, decider: Decider::Fallback, grant: None }
                    }
                });
            }
            self.verdict(snapshot, &matches, &decided)
        };
        if let Some(tried) = snapshot.trial.as_ref().and_then(|trial| trial.observe(self, request, &verdict, now)) {
            tried.await;
        }
        Ok(verdict)
    }

    /// The names of the counters; the hits are counted as asked for.
    fn names(&self, request: &Request<'_>, matches: &[Match<'_>], shard_by: &[Box<str>]) -> CounterNames {
        let holds = request.feedback.iter().zip(matches);
        let mut samples = holds.filter_map(|(hold, found)| found.limited().map(|_| hold.sample));
        let mut names = CounterNames { text: Vec::with_capacity(128), ends: SmallVec::new(), askers: Vec::new() };
        for (descriptor, applied) in limited(request, matches) {
            let algorithm = applied.limit.algorithm();
            let asker = applied.context(descriptor, samples.next().flatten());
            names.askers.extend(asker.map(|asker| algorithm.with_context(asker)));
            let entries = &descriptor.entries[..descriptor.entries.len() - Rule::modifier_count(&applied.path)];
            key::write(&mut names.text, self.scope, request.domain, shard_by, entries, &applied.path, algorithm);
            names.ends.push(names.text.len());
            if !descriptor.refund {
                applied.series.count_requested(self.worker, descriptor.hits.min(MAX));
            }
        }
        names
    }

    /// What is asked of the store.
    fn hits<'h>(
        &self,
        request: &Request<'_>,
        matches: &'h [Match<'_>],
        names: &'h CounterNames,
    ) -> SmallVec<[Hit<'h>; 1]> {
        let mut start = 0;
        let mut askers = names.askers.iter();
        limited(request, matches)
            .zip(&names.ends)
            .map(|((descriptor, applied), &end)| {
                let key = &names.text[start..end];
                start = end;
                let (action, cost) = (action(descriptor), descriptor.hits.min(MAX));
                let binding = !descriptor.refund && self.is_binding(applied);
                let algorithm = applied.limit.algorithm();
                let algorithm = if applied.needs_context() { askers.next().unwrap_or(algorithm) } else { algorithm };
                Hit {
                    key,
                    algorithm,
                    action,
                    cost,
                    binding,
                    needed: binding && self.on_error(applied).denies(),
                    per_second: applied.limit.is_per_second(),
                    consistency: applied.consistency(),
                    demand: 0,
                }
            })
            .collect()
    }

    /// Counts what an operator lets nothing pass of; whether that refuses the request.
    fn count_denied_by_switch(&self, request: &Request<'_>, matches: &[Match<'_>], now: Micros) -> bool {
        let mut refuses = false;
        for (descriptor, found) in request.descriptors.iter().zip(matches) {
            let Some(applied) = found.denied() else {
                continue;
            };
            refuses |= self.is_binding(applied);
            self.record_top(request.domain, descriptor, applied, false, now);
            let hits = descriptor.hits.min(MAX);
            let (limit, known) = (0, false);
            let threshold = Threshold { limit, near: limit, splits: false, shadow: applied.is_shadow(), known };
            applied.series.count_requested(self.worker, hits);
            applied.series.count_decision(self.worker, hits, &Decision::default(), threshold);
        }
        refuses
    }

    fn record_top(
        &self,
        domain: &str,
        descriptor: &Descriptor<'_>,
        applied: &AppliedLimit<'_>,
        allowed: bool,
        now: Micros,
    ) {
        if let Some(top) = &self.top {
            top.record(self.worker, domain, descriptor, applied.rule.map(Rule::policy), allowed, now);
        }
    }

    /// The store's decisions under [`Charge::All`]: a counter that several descriptors name is asked once for the sum.
    async fn apply_together(&self, hits: &[Hit<'_>], now: Micros) -> HitDecisions {
        let mut merged = SmallVec::<[Hit<'_>; 4]>::new();
        let mut places = SmallVec::<[usize; 4]>::new();
        for hit in hits {
            let same = |known: &Hit<'_>| known.key == hit.key && known.action == hit.action;
            let place = merged.iter().position(same).unwrap_or(merged.len());
            match merged.get_mut(place) {
                Some(known) => known.cost = known.cost.saturating_add(hit.cost),
                None => merged.push(*hit),
            }
            places.push(place);
        }
        // One alone has nobody to wait for.
        let charge = if merged.len() == 1 { Charge::Each } else { Charge::All };
        let answers = self.store.apply(&merged, charge, now).await;
        let mut granted = SmallVec::<[usize; 4]>::new();
        let answer = |place: usize| {
            let answer = answers.get(place).copied().unwrap_or(Err(StoreError::Rejected))?;
            // What is granted is granted once.
            let first = !granted.contains(&place);
            granted.push(place);
            Ok(HitDecision { grant: answer.grant.filter(|_| first), ..answer })
        };
        places.into_iter().map(answer).collect()
    }

    fn on_error(&self, applied: &AppliedLimit<'_>) -> FailurePolicy {
        let terms = applied.custom_limit.and_then(|terms| terms.on_error);
        terms.or(applied.rule.and_then(|rule| rule.on_error)).unwrap_or(self.settings.on_error)
    }

    /// Whether a refusal of this limit refuses the request.
    fn is_binding(&self, applied: &AppliedLimit<'_>) -> bool {
        let lenient = applied.is_shadow() || applied.rule.is_some_and(|rule| rule.quota_mode);
        !(lenient || self.settings.shadow_mode || self.settings.quota_mode)
    }

    /// `limit`: what it was held against. `alone`: a refused hit may have been counted all the same. Charged with others
    /// it was not.
    fn count(
        &self,
        descriptor: &Descriptor<'_>,
        applied: &AppliedLimit<'_>,
        limit: &Limit,
        answer: &HitDecision,
        alone: bool,
        now: Micros,
    ) {
        if descriptor.refund {
            return;
        }
        if let Some(shedding) = applied.shedding {
            let class = applied.context(descriptor, None).map_or(0, |asker| asker.class.into());
            let outcome = match answer.decision.allowed {
                true => Outcome::Allowed,
                false if applied.sheds(&answer.decision) => Outcome::Shed,
                false => Outcome::Denied,
            };
            shedding.decided(self.worker, class, outcome, descriptor.hits.min(MAX), now);
        }
        let splits = alone && answer.decider != Decider::DenyCache && limit.splits_denied();
        let (limit, _) = limit.policy();
        let shadow = applied.is_shadow();
        let (hits, near) = (descriptor.hits.min(MAX), self.statistics.near(limit));
        let known = answer.decider == Decider::DenyCache;
        applied.series.count_decision(
            self.worker,
            hits,
            &answer.decision,
            Threshold { limit, near, splits, shadow, known },
        );
    }

    /// Adds to the hits what their caller could admit by himself; what he has admitted so far counts from now on.
    fn apply_feedback(&self, request: &Request<'_>, matches: &[Match<'_>], hits: &mut [Hit<'_>], now: Micros) {
        let holds = request.feedback.iter().zip(matches);
        let holds = holds.filter_map(|(hold, found)| Some((hold, found.limited()?)));
        for (hit, (hold, applied)) in hits.iter_mut().zip(holds) {
            hit.demand = hold.demand;
            let Some((id, spent)) = hold.reports else {
                continue;
            };
            let spent = self.store.report(hit, id, spent, now);
            let (limit, _) = applied.limit.policy();
            let passed = Decision { allowed: true, ..Decision::default() };
            let near = self.statistics.near(limit);
            let threshold = Threshold { limit, near, splits: false, shadow: false, known: false };
            applied.series.count_requested(self.worker, spent);
            applied.series.count_decision(self.worker, spent, &passed, threshold);
        }
    }

    /// What is decided when the store cannot; `None` when the rule wants the caller to have the error. What is let
    /// through or refused without being counted has the numbers of a counter never used.
    fn fallback(
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
                let part = self.part(applied);
                let algorithm =
                    applied.context(descriptor, None).map_or(*part.algorithm(), |it| part.algorithm().with_context(it));
                let hit = Hit { algorithm: &algorithm, ..*hit };
                let answer = self.local.apply(&[hit], Charge::Each, now).pop()?.ok()?;
                self.count(descriptor, applied, &part, &answer, true, now);
                return Some(answer.decision);
            }
        };
        let ask = Operation { action: action(descriptor), cost: descriptor.hits, now };
        let decision = applied.limit.algorithm().apply(&mut State::default(), ask);
        let remaining = if allowed { decision.remaining } else { 0 };
        Some(Decision { allowed, remaining, ..decision })
    }

    /// What of a limit is this instance's, when each has to decide by itself.
    fn part(&self, applied: &AppliedLimit<'_>) -> Limit {
        let (limit, instances) = (applied.limit, self.settings.instances.get());
        match (applied.custom_limit, applied.rule) {
            (Some(terms), _) => terms.part.as_deref().copied().unwrap_or(*limit),
            (None, Some(rule)) => rule.divided_limit.as_deref().copied().unwrap_or(*limit),
            (None, None) => {
                let kind = Algorithm::DEFAULT;
                Limit::divided(limit.requests(), limit.measure(), kind, LimitSpec::default(), instances)
                    .unwrap_or(*limit)
            }
        }
    }

    /// `decided`: what was decided of each limit, in their order.
    fn verdict(&self, snapshot: &Snapshot, matches: &[Match<'_>], decided: &[HitDecision]) -> Verdict {
        let mut decided = decided.iter();
        let no_limit =
            |directed| Status { quota: self.settings.quota_mode, override_kind: directed, ..Status::NO_LIMIT };
        let statuses: SmallVec<[Status; 1]> = matches
            .iter()
            .map(|found| match found {
                Match::None => no_limit(None),
                Match::Off => no_limit(Some(OverrideKind::Switch(Mode::Off))),
                Match::Unlimited(_, directed) => Status { override_kind: *directed, ..Status::UNLIMITED },
                Match::Denied(applied) => self.denial(applied),
                Match::Limited(applied) => self.status(applied, decided.next().copied().unwrap_or_default()),
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

    /// Nobody knows for how long.
    fn denial(&self, applied: &AppliedLimit<'_>) -> Status {
        let status = self.status(applied, HitDecision::default());
        Status { reset: None, denial_counts: true, ..status }
    }

    fn status(&self, applied: &AppliedLimit<'_>, HitDecision { decision, decider, grant }: HitDecision) -> Status {
        let shadow = applied.is_shadow();
        let name = applied.rule.and_then(|rule| rule.name.as_ref());
        let policy = applied.rule.filter(|_| self.settings.policies).map(|rule| Arc::clone(rule.policy()));
        let limit = CurrentLimit::new(applied.base(), name, policy);
        // Whatever there is above may be gone in a moment: nobody is told to count on it.
        let (stretched, _) = applied.limit.policy();
        let extra = stretched.saturating_sub(limit.quota);
        Status {
            code: if decision.allowed || shadow { Code::Ok } else { Code::OverLimit },
            shed: applied.sheds(&decision),
            elastic: extra > 0 && decision.allowed && decision.used > limit.quota,
            remaining: u32::try_from(decision.remaining.saturating_sub(extra)).unwrap_or(u32::MAX),
            limit: Some(match decision.limit {
                Some(now) => CurrentLimit { requests: now, quota: now.into(), ..limit },
                None => limit,
            }),
            reset: Some(decision.reset),
            next: decision.next,
            retry_after: decision.retry_after,
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

/// The metadata of every rule that let its descriptor pass; the first to name a key has the say.
fn metadata(matches: &[Match<'_>], statuses: &[Status]) -> Option<Metadata> {
    let passed = matches.iter().zip(statuses).filter(|(_, status)| status.code == Code::Ok && !status.unlimited);
    let mut all = passed.filter_map(|(found, _)| found.rule()?.metadata.as_ref());
    let mut merged = all.next()?.clone();
    all.for_each(|other| merged.merge(other));
    Some(merged)
}
