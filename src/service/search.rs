//! [`Admin::find_entities`]: the entities of one customer, over all domains.
//!
//! Counters cannot be listed: in Redis they are keys among millions, and a hash of values may hide their names. So entities
//! are found where their names are known: by the rules with one level, by the overrides, and by the ranked entities.

use std::collections::BTreeSet;

use super::{Admin, activity::TopQuery, admin::pairs};
use crate::{
    engine::{Inspection, RankBy, Snapshot, TopEntities, bounded, overrides::Target},
    rules::Entry,
};

/// Maximum number of entities that are inspected.
const MAX_INSPECTED: usize = 300;
/// Maximum number of entities that are returned.
const MAX_FOUND: usize = 100;
/// Maximum number of first keys of rules that are tried as descriptors with one entry.
const MAX_KEYS: usize = 300;
/// Maximum number of ranked entities that are searched.
const MAX_RANKED: usize = 10_000;

/// The value that entities are searched by.
pub struct SearchedValue {
    value: String,
    is_prefix: bool,
}

/// Entities that may exist.
#[derive(Default)]
pub struct Candidates {
    /// Entities of overrides and rankings, which exist.
    known: BTreeSet<Target>,
    /// Entities that rules with one level match. They exist if their counter has hits, or if an override applies.
    possible: BTreeSet<Target>,
    is_incomplete: bool,
}

/// An entity that was found.
pub struct FoundEntity {
    /// The domain.
    pub domain: String,
    /// Keys and values.
    pub entries: Vec<(String, String)>,
    /// The rule and the overrides that apply, and the state of the counter; `None` if the store did not answer.
    pub inspection: Option<Inspection>,
}

/// The entities that were found.
pub struct FoundEntities {
    /// The entities, in the order of their descriptors.
    pub entities: Vec<FoundEntity>,
    /// Whether there may be more entities.
    pub is_incomplete: bool,
}

impl SearchedValue {
    /// Returns a search for a value, or for all values that begin with a text.
    #[must_use]
    pub fn new(value: &str, is_prefix: bool) -> Self {
        // Values of overrides and rankings have their bounded form.
        let value = if is_prefix { value.to_owned() } else { bounded(value).into_owned() };
        Self { value, is_prefix }
    }

    fn matches(&self, value: &str) -> bool {
        if self.is_prefix { value.starts_with(&self.value) } else { value == self.value }
    }

    fn matches_entity(&self, target: &Target) -> bool {
        match target {
            Target::Limit { entries, .. } => entries.iter().any(|(_, value)| self.matches(value)),
            Target::Plan { .. } | Target::Switch(_) | Target::Rules(_) | Target::Planned { .. } => false,
        }
    }
}

impl Candidates {
    fn add_known(&mut self, target: Target) {
        if self.known.len() < MAX_INSPECTED {
            self.known.insert(target);
        } else {
            self.is_incomplete = true;
        }
    }

    fn add_overrides(&mut self, snapshot: &Snapshot, searched: &SearchedValue) {
        for text in snapshot.overrides().targets() {
            match Target::parse(text) {
                Ok(Target::Limit { domain, entries }) => {
                    if entries.iter().any(|(_, value)| searched.matches(value)) {
                        self.add_known(Target::Limit { domain, entries });
                    }
                }
                Ok(Target::Plan { domain, key, value }) => {
                    if searched.matches(&value) {
                        self.add_known(Target::Limit { domain, entries: vec![(key, value)] });
                    }
                }
                Ok(Target::Switch(_) | Target::Rules(_) | Target::Planned { .. }) | Err(_) => {}
            }
        }
    }

    /// Adds the descriptors with one entry that a rule matches.
    fn add_rules(&mut self, snapshot: &Snapshot, searched: &SearchedValue) {
        let rules = snapshot.rule_set();
        let mut keys = BTreeSet::new();
        for (rule, entries) in rules.rules().iter().zip(rules.entries_of_rules()) {
            if let Some((key, _)) = entries.first() {
                keys.insert((rule.labels[0].to_string(), key.to_string()));
            }
        }
        self.is_incomplete |= keys.len() > MAX_KEYS;
        for (domain, key) in keys.into_iter().take(MAX_KEYS) {
            let entry = Entry { key: &key, value: &searched.value };
            if rules.rule_for(&domain, &[entry]).is_some() {
                let entries = vec![(key, searched.value.clone())];
                self.possible.insert(Target::Limit { domain, entries });
            }
        }
    }
}

impl Admin {
    /// Returns the entities that may have the searched value. With a million overrides this takes long.
    #[must_use]
    pub fn candidates_for(&self, searched: &SearchedValue) -> Candidates {
        let snapshot = self.in_force.snapshot().load_full();
        let mut candidates = Candidates::default();
        candidates.add_overrides(&snapshot, searched);
        for rank_by in [RankBy::Denied, RankBy::Requested] {
            let query =
                TopQuery { rank_by, max_entities: MAX_RANKED, period: TopEntities::MAX_PERIOD, all_instances: true };
            let (ranking, _) = self.activity.top(&query, |target, _| searched.matches_entity(target));
            for entity in ranking.top {
                candidates.add_known(entity.target);
            }
        }
        if !searched.is_prefix {
            candidates.add_rules(&snapshot, searched);
        }
        candidates
    }

    /// Reads the counters of entities that may exist, and returns the entities that exist.
    pub async fn find_entities(&self, candidates: Candidates) -> FoundEntities {
        let Candidates { known, possible, mut is_incomplete } = candidates;
        let mut entities = Vec::new();
        for target in known.union(&possible) {
            let Target::Limit { domain, entries } = target else {
                continue;
            };
            if entities.len() == MAX_FOUND {
                is_incomplete = true;
                break;
            }
            let inspection = self.inspect(domain, &pairs(entries), 1).await.ok();
            let is_used = inspection.as_ref().is_some_and(|found| {
                found.counter.as_ref().is_some_and(|counter| counter.decision.used > 0) || !found.overrides.is_empty()
            });
            if is_used || known.contains(target) {
                entities.push(FoundEntity { domain: domain.clone(), entries: entries.clone(), inspection });
            }
        }
        FoundEntities { entities, is_incomplete }
    }
}
