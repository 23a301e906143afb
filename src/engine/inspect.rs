//! Where a counter stands, and why: what operators ask of one descriptor.

use smallvec::smallvec;

use super::{
    DecideError, Descriptor, Directed, Directive, Engine, Request,
    directives::Origin,
    key,
    matched::{Applied, Match},
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
    pub walk: Vec<String>,
    /// The id of the rule that it ends on.
    pub rule: Option<usize>,
    /// What operators have said over it, and where; the first decides.
    pub directives: Vec<(Origin, Directive)>,
    /// What of that is in force.
    pub directed: Option<Directed>,
    /// Where its counter stands; `None` where nothing is counted.
    pub standing: Option<Standing>,
    /// Whether one hit would pass.
    pub allowed: bool,
}

/// Where a counter stands.
#[derive(Clone, Debug)]
pub struct Standing {
    /// The limit that it is held against.
    pub limit: Limit,
    /// Its name.
    pub counter: Counter,
    /// What it would say to one hit.
    pub decision: Decision,
}

/// A counter's name.
#[derive(Clone, Debug)]
pub struct Counter {
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
        let found = self.find(&snapshot, domain, descriptor, &snapshot.directives.seek(domain, entries), now);
        let rule = found.rule().or_else(|| snapshot.rules().rule_for(domain, entries));
        let inspection = Inspection {
            walk: snapshot.rules().explain(domain, entries),
            rule: rule.map(|rule| rule.id),
            directives: snapshot.directives.over_rule((domain, entries), rule, now),
            directed: match &found {
                Match::None => None,
                Match::Off => Some(Directed::Switch(super::directives::Mode::Off)),
                Match::Unlimited(_, directed) => *directed,
                Match::Limited(applied) | Match::Denied(applied) => applied.directed(),
            },
            standing: None,
            allowed: !matches!(&found, Match::Denied(denied) if !denied.is_shadow()),
        };
        let Match::Limited(applied) = &found else {
            return Ok(inspection);
        };
        let counter = self.counter_of(&request, applied, &snapshot);
        let asker = applied.asker(descriptor, None);
        let algorithm = *applied.limit.algorithm();
        let algorithm = asker.map_or(algorithm, |asker| algorithm.asked_by(asker));
        // The counter itself is asked, and not what this instance has of it.
        let hit = Hit { per_second: counter.per_second, ..Hit::take(counter.key.as_bytes(), &algorithm, 1).look() };
        let answer = self.store.apply(&[hit], Charge::Each, now).await.pop().unwrap_or(Err(StoreError::Refused))?;
        let allowed = answer.decision.allowed || applied.is_shadow();
        let standing = Standing { limit: *applied.limit, counter, decision: answer.decision };
        Ok(Inspection { standing: Some(standing), allowed, ..inspection })
    }

    /// Forgets the counter of a descriptor: its name, and whether there was one. `None` where nothing is counted.
    pub async fn forget(
        &self,
        domain: &str,
        entries: &[Entry<'_>],
        now: Micros,
    ) -> Result<Option<(Counter, bool)>, StoreError> {
        let snapshot = self.rules.load_full();
        let request = look(domain, entries);
        let sought = snapshot.directives.seek(domain, entries);
        let Match::Limited(applied) = self.find(&snapshot, domain, &request.descriptors[0], &sought, now) else {
            return Ok(None);
        };
        let counter = self.counter_of(&request, &applied, &snapshot);
        let existed = self.store.forget(counter.key.as_bytes(), counter.per_second).await?;
        Ok(Some((counter, existed)))
    }

    /// Gives hits back to the counter of a descriptor, never above full.
    pub async fn give_back(
        &self,
        domain: &str,
        entries: &[Entry<'_>],
        hits: u64,
        now: Micros,
    ) -> Result<(), DecideError> {
        let mut request = look(domain, entries);
        (request.descriptors[0].hits, request.descriptors[0].give_back) = (hits, true);
        Box::pin(self.decide(&request, now)).await.map(drop)
    }

    fn counter_of(&self, request: &Request<'_>, applied: &Applied<'_>, snapshot: &super::Snapshot) -> Counter {
        let shard_by = snapshot.rules().settings_of(request.domain).map_or([].as_slice(), |domain| &domain.shard_by);
        let entries = &request.descriptors[0].entries;
        let entries = &entries[..entries.len() - Rule::asides(&applied.path)];
        let mut name = Vec::new();
        key::write(&mut name, self.scope, request.domain, shard_by, entries, &applied.path, applied.limit.algorithm());
        Counter { key: String::from_utf8_lossy(&name).into_owned(), per_second: applied.limit.is_per_second() }
    }
}

/// A request that asks for nothing.
fn look<'a>(domain: &'a str, entries: &[Entry<'a>]) -> Request<'a> {
    let descriptor = Descriptor { entries: entries.into(), hits: 0, give_back: false, limit: None };
    Request { domain, descriptors: smallvec![descriptor], holds: Vec::new() }
}
