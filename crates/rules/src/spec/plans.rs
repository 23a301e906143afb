//! [`Plans`]: the content of `plans` in a rule file.

use std::collections::{BTreeMap, HashMap};

use super::{RateLimit, Reader, keywords::PLANS};
use crate::{
    diagnostic::Location,
    plan_assignment::PlanAssignment,
    yaml::{Kind, Yaml},
};

/// Default key of the entry that contains a request's plan.
const DEFAULT_KEY: &str = "plan";

/// The plans of a file, with their limits and the entities that are assigned to them.
#[derive(Default)]
pub(crate) struct Plans {
    /// Key of the entry that contains a request's plan.
    pub(crate) key: String,
    /// Plan of requests without a plan or with an unknown one.
    pub(crate) default: String,
    /// Plans by name.
    pub(crate) plans: BTreeMap<String, Plan>,
    /// Plans of entities without a plan entry, by the key and the value of an entry.
    pub(crate) entities: HashMap<(Box<str>, Box<str>), PlanAssignment>,
}

/// The limits of one plan, by name.
#[derive(Default)]
pub(crate) struct Plan {
    pub(crate) location: Location,
    pub(crate) limits: HashMap<String, RateLimit>,
}

impl Plans {
    pub(super) fn limits(&self) -> impl Iterator<Item = &RateLimit> {
        self.plans.values().flat_map(|plan| plan.limits.values()).flat_map(RateLimit::all)
    }
}

impl Reader<'_, '_> {
    pub(super) fn plans(&mut self, node: &Yaml) -> Plans {
        let mut plans = Plans { key: DEFAULT_KEY.to_owned(), ..Plans::default() };
        let mut default_location = node.location;
        let mut entities = Vec::new();
        for (key, _, value) in self.read_map("plans", node, &PLANS).unwrap_or_default() {
            match key {
                "key" => plans.key = self.text(key, value).filter(|key| !key.is_empty()).unwrap_or(plans.key),
                "default" => {
                    plans.default = self.text(key, value).unwrap_or_default();
                    default_location = value.location;
                }
                "limits" => {
                    for (name, location, limits) in self.named_entries("limits", value) {
                        let mut plan = Plan { location, limits: HashMap::new() };
                        for (limit_name, _, limit) in self.named_entries(&name, limits) {
                            if let Some(limit) = self.plan_limit(&limit_name, limit) {
                                plan.limits.insert(limit_name, limit);
                            }
                        }
                        plans.plans.insert(name, plan);
                    }
                }
                "entities" => {
                    for (key, _, value) in self.named_entries("entities", value) {
                        for (entity, _, plan) in self.named_entries(&key, value) {
                            let assignment = self.assignment(plan).unwrap_or_default();
                            entities.push(((key.as_str().into(), entity.into()), assignment, plan.location));
                        }
                    }
                }
                _ => {}
            }
        }
        if plans.plans.is_empty() {
            self.diagnostics.error(node.location, "plans requires limits for at least one plan");
        } else if plans.default.is_empty() {
            let message = format!("plans requires default, the plan of requests without one: {}", plans.names());
            self.diagnostics.error(default_location, message);
        } else if !plans.plans.contains_key(&plans.default) {
            let message = format!("the default plan {:?} is not one of {}", plans.default, plans.names());
            self.diagnostics.error(default_location, message);
        }
        for (entity, assignment, location) in entities {
            let plan = &*assignment.plan;
            if !plans.plans.contains_key(plan) {
                self.diagnostics.error(location, format!("the plan {plan:?} is not one of {}", plans.names()));
            }
            plans.entities.insert(entity, assignment);
        }
        plans
    }

    fn plan_limit(&mut self, name: &str, node: &Yaml) -> Option<RateLimit> {
        let name = format!("the limit {name:?}");
        let limit = match &node.kind {
            Kind::List(_) => self.rate_limits(&name, node)?,
            _ => self.rate_limit(&name, node)?,
        };
        if let Some((_, location)) = &limit.by_plan {
            self.diagnostics.error(*location, "by_plan is not allowed in the limit of a plan");
        }
        Some(limit)
    }

    /// Reads a map with names as keys, chosen by the author of the file. `map` is its name in diagnostics.
    pub(super) fn named_entries<'y>(&mut self, map: &str, node: &'y Yaml) -> Vec<(String, Location, &'y Yaml)> {
        let Kind::Map(pairs) = &node.kind else {
            self.diagnostics.error(node.location, format!("{map} must be a map, not {}", node.describe()));
            return Vec::new();
        };
        let mut entries: Vec<(String, Location, &Yaml)> = Vec::new();
        for (key, value) in self.merge_keys(pairs) {
            match key.scalar() {
                Some((name, _)) if entries.iter().any(|(known, ..)| known == name) => {
                    self.diagnostics.error(key.location, format!("duplicate key {name:?}"));
                }
                Some((name, _)) if !name.is_empty() => entries.push((name.to_owned(), key.location, value)),
                Some(_) | None => {
                    self.diagnostics.error(
                        key.location,
                        format!("the keys of {map} must be non-empty names, not {}", key.describe()),
                    );
                }
            }
        }
        entries
    }
}

impl Plans {
    fn names(&self) -> String {
        self.plans.keys().map(String::as_str).collect::<Vec<_>>().join(", ")
    }
}
