//! [`Tables`]: the lists that an instance reports to the others with its counts: its top entities, its most denied rules,
//! its latest events, and the descriptors that no rule matches. Each list has a maximum.

use std::{collections::HashMap, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};

use super::{
    events::{Event, EventKind},
    minutes::{MAX_MINUTES, Minute},
    tree::Hits,
    unmatched::Unmatched,
};
use crate::{
    algorithm::Micros,
    engine::{Estimate, RankBy, Ranking, TopEntities, TopEntity, overrides::Target, sort_ranking},
};

/// Maximum number of entities in one list.
const MAX_ENTITIES: usize = 100;
/// Maximum size of the names in one list of entities, in bytes.
const MAX_NAME_BYTES: usize = 50_000;
/// Maximum number of rules.
pub(super) const MAX_RULES: usize = 200;
/// Maximum number of events.
const MAX_EVENTS: usize = 50;
/// Maximum number of groups of descriptors that no rule matches.
pub(super) const MAX_UNMATCHED: usize = 50;

/// The tables of one instance.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Tables {
    /// The entities of the last five minutes.
    recent: Entities,
    /// The entities of the last hour.
    hour: Entities,
    pub(super) rules: Vec<RuleActivity>,
    events: Vec<SharedEvent>,
    pub(super) unmatched: Vec<Unmatched>,
}

/// The rankings of one period.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct Entities {
    denied: EntityList,
    requested: EntityList,
}

/// A ranking.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct EntityList {
    hits: u64,
    requests: u64,
    /// Microseconds that the counts cover.
    period: u64,
    top: Vec<RankedEntity>,
}

/// An entity of a ranking.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct RankedEntity {
    /// The target of the entity's limit, as text.
    target: String,
    rule: String,
    /// Upper bound and maximum error of the number of requests.
    requests: [u64; 2],
    /// Upper bound and maximum error of the number of hits.
    hits: [u64; 2],
    /// Time since which the entity has been counted, in microseconds since the Unix epoch.
    since: u64,
}

/// The activity of one rule.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct RuleActivity {
    pub(super) path: String,
    pub(super) hits: Hits,
    pub(super) minutes: Vec<Minute>,
}

impl Tables {
    /// Collects the tables of this instance.
    pub(super) fn new(
        top: &TopEntities,
        rules: Vec<RuleActivity>,
        events: impl Iterator<Item = Event>,
        unmatched: Vec<Unmatched>,
        now: Micros,
    ) -> Self {
        let mut tables = Self {
            recent: Entities::new(top, TopEntities::DEFAULT_PERIOD, now),
            hour: Entities::new(top, TopEntities::MAX_PERIOD, now),
            rules,
            events: events.map(SharedEvent::new).collect(),
            unmatched,
        };
        tables.truncate();
        tables
    }

    /// Removes the entries above the maximum of each list. Of events, the latest ones stay.
    pub(super) fn truncate(&mut self) {
        for entities in [&mut self.recent, &mut self.hour] {
            entities.denied.truncate();
            entities.requested.truncate();
        }
        self.rules.truncate(MAX_RULES);
        for rule in &mut self.rules {
            rule.minutes.truncate(MAX_MINUTES);
        }
        let old_events = self.events.len().saturating_sub(MAX_EVENTS);
        self.events.drain(..old_events);
        self.unmatched.truncate(MAX_UNMATCHED);
    }

    /// Returns the events after the one with this id. `instance` is the name of the instance that reports them.
    pub(super) fn events_after(&self, id: u64, instance: &str) -> impl Iterator<Item = Event> {
        self.events.iter().filter(move |event| event.id > id).map(move |event| event.read(instance))
    }

    /// Returns the ranking of a period: of the last five minutes, or of an hour if the period is longer.
    fn entities(&self, by: RankBy, period: Duration) -> &EntityList {
        let entities = if period > TopEntities::DEFAULT_PERIOD { &self.hour } else { &self.recent };
        match by {
            RankBy::Denied => &entities.denied,
            RankBy::Requested => &entities.requested,
        }
    }
}

/// An event of an instance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct SharedEvent {
    id: u64,
    /// Microseconds since the Unix epoch.
    at: u64,
    kind: EventKind,
    text: String,
    public_text: String,
    author: String,
    reason: String,
}

impl SharedEvent {
    fn new(event: Event) -> Self {
        let Event { id, at, kind, text, public_text, author, reason, .. } = event;
        Self { id, at: at.get(), kind, text, public_text, author, reason }
    }

    fn read(&self, instance: &str) -> Event {
        Event {
            id: self.id,
            at: Micros::new(self.at),
            kind: self.kind,
            text: self.text.clone(),
            public_text: self.public_text.clone(),
            author: self.author.clone(),
            reason: self.reason.clone(),
            instance: instance.to_owned(),
        }
    }
}

impl Entities {
    fn new(top: &TopEntities, period: Duration, now: Micros) -> Self {
        Self {
            denied: EntityList::new(&top.ranking(RankBy::Denied, MAX_ENTITIES, period, now, |_, _| true)),
            requested: EntityList::new(&top.ranking(RankBy::Requested, MAX_ENTITIES, period, now, |_, _| true)),
        }
    }
}

impl RankedEntity {
    fn new(entity: &TopEntity) -> Self {
        Self {
            target: entity.target.to_string(),
            rule: entity.rule.to_string(),
            requests: [entity.requests.count, entity.requests.max_error],
            hits: [entity.hits.count, entity.hits.max_error],
            since: entity.since.get(),
        }
    }
}

impl EntityList {
    fn new(ranking: &Ranking) -> Self {
        Self {
            hits: ranking.hits,
            requests: ranking.requests,
            period: ranking.period.get(),
            top: ranking.top.iter().map(RankedEntity::new).collect(),
        }
    }

    fn truncate(&mut self) {
        self.top.truncate(MAX_ENTITIES);
        let mut bytes = 0;
        self.top.retain(|entity| {
            bytes += entity.target.len() + entity.rule.len();
            bytes <= MAX_NAME_BYTES
        });
    }
}

/// Adds the rankings of other instances to the one of this instance.
pub(super) fn add_rankings<'t>(
    ranking: Ranking,
    others: impl Iterator<Item = &'t Tables>,
    by: RankBy,
    period: Duration,
    max_entities: usize,
    filter: impl Fn(&Target, &str) -> bool,
) -> Ranking {
    let mut sum = Ranking { top: Vec::new(), ..ranking };
    let mut entities: HashMap<Target, TopEntity> = HashMap::new();
    for entity in ranking.top {
        entities.insert(entity.target.clone(), entity);
    }
    for tables in others {
        let list = tables.entities(by, period);
        sum.hits = sum.hits.saturating_add(list.hits);
        sum.requests = sum.requests.saturating_add(list.requests);
        sum.period = sum.period.max(Micros::new(list.period));
        for report in &list.top {
            let Ok(target) = Target::parse(&report.target) else {
                continue;
            };
            if !filter(&target, &report.rule) {
                continue;
            }
            let requests = estimate(report.requests);
            let hits = estimate(report.hits);
            let since = Micros::new(report.since);
            match entities.get_mut(&target) {
                Some(entity) => {
                    entity.requests.add(requests);
                    entity.hits.add(hits);
                    entity.since = entity.since.min(since);
                }
                None => {
                    let rule: Arc<str> = report.rule.as_str().into();
                    entities.insert(target.clone(), TopEntity { target, rule, requests, hits, since });
                }
            }
        }
    }
    sum.top = entities.into_values().collect();
    sort_ranking(&mut sum.top, by);
    sum.top.truncate(max_entities);
    sum
}

fn estimate([count, max_error]: [u64; 2]) -> Estimate {
    Estimate { count, max_error: max_error.min(count) }
}
