//! Where a counter stands, and why: what operators ask of one descriptor.

use smallvec::smallvec;

use super::{
    DecideError, Descriptor, Engine, Override, OverrideKind, Request,
    applied_limit::{AppliedLimit, Match},
    key,
    overrides::Origin,
};
use crate::{
    algorithm::{Decision, Micros},
    rules::{Entry, Limit, Rule},
    store::{Charge, Hit, Store, StoreError},
};

/// What a descriptor meets.
#[derive(Clone, Debug)]
pub struct Inspection {
    /// How the rules were walked, a line for each step.
    pub match_steps: Vec<String>,
    /// The id of the rule that it ends on.
    pub rule: Option<usize>,
    /// What operators have said over it, and where; the first decides.
    pub overrides: Vec<(Origin, Override)>,
    /// What of that is in force.
    pub override_kind: Option<OverrideKind>,
    /// Where its counter stands; `None` where nothing is counted.
    pub counter: Option<CounterState>,
    /// Whether one hit would pass.
    pub allowed: bool,
}

/// Where a counter stands.
#[derive(Clone, Debug)]
pub struct CounterState {
    /// The limit that it is held against.
    pub limit: Limit,
    /// Its name.
    pub counter: CounterLocation,
    /// What it would say to one hit.
    pub decision: Decision,
}

/// A counter's name.
#[derive(Clone, Debug)]
pub struct CounterLocation {
    /// As the store has it.
    pub key: String,
    /// Whether it is one of a limit of unit second.
    pub per_second: bool,
}

impl Engine {
    /// Says what a descriptor meets, and takes nothing.
    pub async fn inspect(&self, domain: &str, entries: &[Entry<'_>], now: Micros) -> Result<Inspection, StoreError> {
        let snapshot = self.rules.load_full();
        let request = look(domain, entries);
        let descriptor = &request.descriptors[0];
        let found = self.find(&snapshot, domain, descriptor, &snapshot.overrides.prepare_lookup(domain, entries), now);
        let rule = found.rule().or_else(|| snapshot.rules().rule_for(domain, entries));
        let inspection = Inspection {
            match_steps: snapshot.rules().explain(domain, entries),
            rule: rule.map(|rule| rule.id),
            overrides: snapshot.overrides.over_rule((domain, entries), rule, now),
            override_kind: match &found {
                Match::None => None,
                Match::Off => Some(OverrideKind::Switch(super::overrides::Mode::Off)),
                Match::Unlimited(_, directed) => *directed,
                Match::Limited(applied) | Match::Denied(applied) => applied.override_kind(),
            },
            counter: None,
            allowed: !matches!(&found, Match::Denied(denied) if !denied.is_shadow()),
        };
        let Match::Limited(applied) = &found else {
            return Ok(inspection);
        };
        let counter = self.counter_of(&request, applied, &snapshot);
        let asker = applied.context(descriptor, None);
        let algorithm = *applied.limit.algorithm();
        let algorithm = asker.map_or(algorithm, |asker| algorithm.with_context(asker));
        // The counter itself is asked, and not what this instance has of it.
        let hit = Hit { per_second: counter.per_second, ..Hit::take(counter.key.as_bytes(), &algorithm, 1).peek() };
        let answer = self.store.apply(&[hit], Charge::Each, now).await.pop().unwrap_or(Err(StoreError::Rejected))?;
        let allowed = answer.decision.allowed || applied.is_shadow();
        let standing = CounterState { limit: *applied.limit, counter, decision: answer.decision };
        Ok(Inspection { counter: Some(standing), allowed, ..inspection })
    }

    /// Forgets the counter of a descriptor: its name, and whether there was one. `None` where nothing is counted.
    pub async fn forget(
        &self,
        domain: &str,
        entries: &[Entry<'_>],
        now: Micros,
    ) -> Result<Option<(CounterLocation, bool)>, StoreError> {
        let snapshot = self.rules.load_full();
        let request = look(domain, entries);
        let sought = snapshot.overrides.prepare_lookup(domain, entries);
        let Match::Limited(applied) = self.find(&snapshot, domain, &request.descriptors[0], &sought, now) else {
            return Ok(None);
        };
        let counter = self.counter_of(&request, &applied, &snapshot);
        let existed = self.store.forget(counter.key.as_bytes(), counter.per_second).await?;
        Ok(Some((counter, existed)))
    }

    /// Gives hits back to the counter of a descriptor, never above full.
    pub async fn refund(&self, domain: &str, entries: &[Entry<'_>], hits: u64, now: Micros) -> Result<(), DecideError> {
        let mut request = look(domain, entries);
        (request.descriptors[0].hits, request.descriptors[0].refund) = (hits, true);
        Box::pin(self.decide(&request, now)).await.map(drop)
    }

    fn counter_of(
        &self,
        request: &Request<'_>,
        applied: &AppliedLimit<'_>,
        snapshot: &super::Snapshot,
    ) -> CounterLocation {
        let shard_by = snapshot.rules().settings_of(request.domain).map_or([].as_slice(), |domain| &domain.shard_by);
        let entries = &request.descriptors[0].entries;
        let entries = &entries[..entries.len() - Rule::modifier_count(&applied.path)];
        let mut name = Vec::new();
        key::write(&mut name, self.scope, request.domain, shard_by, entries, &applied.path, applied.limit.algorithm());
        CounterLocation { key: String::from_utf8_lossy(&name).into_owned(), per_second: applied.limit.is_per_second() }
    }
}

/// A request that asks for nothing.
fn look<'a>(domain: &'a str, entries: &[Entry<'a>]) -> Request<'a> {
    let descriptor = Descriptor { entries: entries.into(), hits: 0, refund: false, requested_limit: None };
    Request { domain, descriptors: smallvec![descriptor], feedback: Vec::new() }
}
