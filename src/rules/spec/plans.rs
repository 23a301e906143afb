//! `plans`: limits that are not the same for everybody, as one table.

use std::collections::{BTreeMap, HashMap};

use super::{RateLimit, Reader, keywords::PLANS};
use crate::rules::{
    diagnostic::Location,
    yaml::{Kind, Yaml},
};

/// The entry that names a request's plan, if the file does not say.
const KEY: &str = "plan";

/// The table.
#[derive(Default)]
pub(in crate::rules) struct Plans {
    /// The key of the entry that names a request's plan.
    pub(in crate::rules) key: String,
    /// The plan of those that name none, or one that is not there.
    pub(in crate::rules) default: String,
    /// By plan, and then by the limit's name.
    pub(in crate::rules) plans: BTreeMap<String, Plan>,
    /// By an entry's key and value: the plan of those that name none.
    pub(in crate::rules) entities: HashMap<(Box<str>, Box<str>), String>,
}

/// One plan.
#[derive(Default)]
pub(in crate::rules) struct Plan {
    pub(in crate::rules) place: Location,
    pub(in crate::rules) limits: HashMap<String, RateLimit>,
}

impl Plans {
    pub(super) fn limits(&self) -> impl Iterator<Item = &RateLimit> {
        self.plans.values().flat_map(|plan| plan.limits.values())
    }
}

impl Reader<'_, '_> {
    pub(super) fn plans(&mut self, node: &Yaml) -> Plans {
        let mut it = Plans { key: KEY.to_owned(), ..Plans::default() };
        let mut default = node.place;
        let mut entities = Vec::new();
        for (key, _, value) in self.map(node, &PLANS).unwrap_or_default() {
            match key {
                "key" => it.key = self.text(key, value).filter(|key| !key.is_empty()).unwrap_or(it.key),
                "default" => (it.default, default) = (self.text(key, value).unwrap_or_default(), value.place),
                "limits" => {
                    for (name, place, limits) in self.named("limits", value) {
                        let limits = self.named(&name, limits).into_iter();
                        let limits = limits.filter_map(|(name, _, limit)| Some((name, self.plan_limit(limit)?)));
                        it.plans.insert(name, Plan { place, limits: limits.collect() });
                    }
                }
                "entities" => {
                    for (key, _, value) in self.named("entities", value) {
                        for (entity, _, plan) in self.named(&key, value) {
                            let name = self.text("the plan of an entity", plan).unwrap_or_default();
                            entities.push(((key.as_str().into(), entity.into()), name, plan.place));
                        }
                    }
                }
                _ => {}
            }
        }
        if it.plans.is_empty() {
            self.problems.error(node.place, "plans needs limits: those of each plan by their names");
        } else if !it.plans.contains_key(&it.default) {
            let message = format!("the default plan {:?} is not one of {}", it.default, it.names());
            self.problems.error(default, message);
        }
        for (entity, plan, place) in entities {
            if !it.plans.contains_key(&plan) {
                self.problems.error(place, format!("the plan {plan:?} is not one of {}", it.names()));
            }
            it.entities.insert(entity, plan);
        }
        it
    }

    fn plan_limit(&mut self, node: &Yaml) -> Option<RateLimit> {
        let limit = self.rate_limit(node)?;
        if let Some((_, place)) = &limit.by_plan {
            self.problems.error(*place, "a plan's limit cannot be another plan's");
        }
        Some(limit)
    }

    /// A map whose keys are names that the writer chose.
    pub(super) fn named<'y>(&mut self, what: &str, node: &'y Yaml) -> Vec<(String, Location, &'y Yaml)> {
        let Kind::Map(pairs) = &node.kind else {
            self.problems.error(node.place, format!("{what} must be a map, not {}", node.describe()));
            return Vec::new();
        };
        let mut named: Vec<(String, Location, &Yaml)> = Vec::new();
        for (key, value) in self.merged(pairs) {
            match key.scalar() {
                Some((name, _)) if named.iter().any(|(known, ..)| known == name) => {
                    self.problems.error(key.place, format!("{name} is given twice"));
                }
                Some((name, _)) if !name.is_empty() => named.push((name.to_owned(), key.place, value)),
                Some(_) | None => {
                    self.problems.error(key.place, format!("{what} has names, not {}", key.describe()));
                }
            }
        }
        named
    }
}

impl Plans {
    fn names(&self) -> String {
        self.plans.keys().map(String::as_str).collect::<Vec<_>>().join(", ")
    }
}
