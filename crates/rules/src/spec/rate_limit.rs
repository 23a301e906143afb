//! [`RateLimit`]: the content of `rate_limit` in a rule file.

use sluicegate_algorithm::{Consistency, Micros};

use super::{
    Reader, algorithm, elastic, hints,
    keywords::{RATE_LIMIT, REPLACES},
    penalty::{self, PenaltyKeywords},
};
use crate::{
    cost_per_hit::CostPerHit,
    currency::Currency,
    denial::Denial,
    diagnostic::Location,
    limit::{FailurePolicy, Limit, Measure, Unit},
    matcher::{Elastic, ModifierEntry},
    yaml::{Kind, Yaml},
};

/// A limit and the settings that depend on its rule.
#[derive(Default)]
pub(crate) struct RateLimit {
    /// The limit; `None` if unlimited.
    pub(crate) limit: Option<Limit>,
    /// One instance's share of the limit.
    pub(crate) divided_limit: Option<Limit>,
    pub(crate) name: String,
    pub(crate) replaces: Vec<ReplacedLimit>,
    pub(crate) on_error: Option<FailurePolicy>,
    pub(crate) consistency: Consistency,
    /// Modifier entries and their keys, in the order in which they come after the entries that select the counter.
    pub(crate) modifiers: Vec<(ModifierEntry, String)>,
    /// Names of the classes that share the limit, in the order of its class table.
    pub(crate) classes: Vec<Box<str>>,
    pub(crate) sheds: bool,
    pub(crate) is_hidden: bool,
    /// Maximum time that is added to `Retry-After`.
    pub(crate) retry_jitter: Micros,
    pub(crate) elastic: Option<Elastic>,
    /// Factor by which hits count.
    pub(crate) cost_per_hit: Option<CostPerHit>,
    /// Unit in which hits are displayed.
    pub(crate) currency: Option<Currency>,
    /// Message, headers and status of denials.
    pub(crate) denial: Option<Denial>,
    /// Further limits of the same rule.
    pub(crate) further: Vec<RateLimit>,
    /// Name of the limit in the request's plan that applies in place of this one.
    pub(crate) by_plan: Option<(String, Location)>,
    /// Location of `count_denied: true`, if it is present.
    pub(super) count_denied: Option<Location>,
}

impl RateLimit {
    /// Returns the key of the entry that selects the cost of a hit.
    pub(crate) fn cost_key(&self) -> Option<&str> {
        self.cost_per_hit.as_ref()?.key.as_deref()
    }

    /// Returns all limits of the rule.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Self> {
        std::iter::once(self).chain(&self.further)
    }
}

/// Maximum number of limits of one rule.
const MAX_LIMITS: usize = 8;

/// The name of a limit that another one replaces.
#[derive(Clone)]
pub(crate) struct ReplacedLimit {
    pub(crate) name: String,
    pub(crate) location: Location,
}

/// The keywords from which the limit is built.
#[derive(Default)]
struct Keywords {
    rate: RateKeywords,
    algorithm: algorithm::AlgorithmKeywords,
    penalty: PenaltyKeywords,
    unlimited: bool,
    consistency: Option<(Consistency, Location)>,
    elastic: Option<(elastic::ElasticKeywords, Location)>,
}

/// The value of a keyword and its location.
#[derive(Clone, Copy)]
struct Field<T> {
    /// The value; `None` if it is invalid.
    value: Option<T>,
    location: Location,
}

/// The keywords of a limit per unit.
#[derive(Default)]
struct RateKeywords {
    unit: Option<Field<Unit>>,
    requests: Option<Field<u64>>,
    multiplier: Option<Field<u32>>,
    /// Whether an error about an unknown key has already suggested `unit`.
    is_unit_reported: bool,
    /// Whether an error about an unknown key has already suggested `requests_per_unit`.
    is_number_reported: bool,
}

impl RateKeywords {
    fn locations(&self) -> impl Iterator<Item = Location> {
        let unit = self.unit.map(|unit| unit.location);
        let requests = self.requests.map(|requests| requests.location);
        let multiplier = self.multiplier.map(|multiplier| multiplier.location);
        [unit, requests, multiplier].into_iter().flatten()
    }

    /// Returns the number of requests and their unit, and reports missing keywords.
    fn measure(&self, reader: &mut Reader<'_, '_>, location: Location) -> Option<(u64, Measure)> {
        let Some(unit) = self.unit else {
            if self.is_unit_reported {
                return None;
            }
            let message = format!("rate_limit requires a unit ({}) or unlimited: true", Unit::names());
            reader.diagnostics.error(location, message);
            return None;
        };
        if self.requests.is_none() && !self.is_number_reported {
            let message = "rate_limit has no requests_per_unit; the default of 0 denies every request";
            reader.diagnostics.warning(location, message);
        }
        let requests = match self.requests {
            Some(requests) => requests.value?,
            None => 0,
        };
        let multiplier = match self.multiplier {
            Some(multiplier) => multiplier.value?,
            None => 1,
        };
        Some((requests, Measure::Rate { unit: unit.value?, multiplier }))
    }
}

impl Reader<'_, '_> {
    /// Reads a limit. `name` is its name in diagnostics.
    pub(super) fn rate_limit(&mut self, name: &str, node: &Yaml) -> Option<RateLimit> {
        if matches!(node.kind, Kind::Null) {
            return None;
        }
        let fields = self.read_map(name, node, &RATE_LIMIT)?;
        let suggested = std::mem::take(&mut self.suggested);
        let (mut rate_limit, mut keywords) = self.keywords(&fields);
        keywords.rate.is_unit_reported = suggested.contains(&"unit");
        keywords.rate.is_number_reported = suggested.contains(&"requests_per_unit");
        if rate_limit.by_plan.is_some() {
            for (key, location, _) in fields.iter().filter(|(key, ..)| *key != "by_plan") {
                self.diagnostics.error(
                    *location,
                    format!("{key} cannot be combined with by_plan, which refers to a limit of a plan"),
                );
            }
            return Some(rate_limit);
        }
        if keywords.unlimited {
            let rate = keywords.rate;
            let unit = rate.unit.map(|unit| unit.location);
            let multiplier = rate.multiplier.map(|multiplier| multiplier.location);
            for location in [unit, multiplier].into_iter().flatten() {
                self.diagnostics.error(location, "unlimited: true cannot be combined with unit or unit_multiplier");
            }
            // A custom limit with a warning is rejected.
            if name == "rate_limit"
                && let Some(requests) = rate.requests
            {
                self.diagnostics.warning(requests.location, "requests_per_unit has no effect with unlimited: true");
            }
            keywords.algorithm.reject_all(self);
            keywords.penalty.reject_all(self);
            return Some(rate_limit);
        }
        self.build_limit(keywords, node.location, &mut rate_limit)?;
        Some(rate_limit)
    }

    /// Reads the limits of one rule. Returns the first one, with the others in its field `further`.
    pub(super) fn rate_limits(&mut self, name: &str, node: &Yaml) -> Option<RateLimit> {
        let items = self.list(name, node);
        if items.is_empty() && !matches!(node.kind, Kind::Map(_) | Kind::Scalar { .. }) {
            self.diagnostics.error(node.location, format!("{name} requires at least one limit"));
            return None;
        }
        if items.len() > MAX_LIMITS {
            self.diagnostics.error(node.location, format!("{name} may contain at most {MAX_LIMITS} limits"));
            return None;
        }
        let mut limits: Vec<RateLimit> = Vec::new();
        for item in items {
            let limit = self.rate_limit("a limit of rate_limits", item)?;
            if items.len() > 1 {
                self.check_one_of_several(&limit, &limits, item.location);
            }
            limits.push(limit);
        }
        let mut keys = limits.iter().filter_map(RateLimit::cost_key);
        if let Some(first) = keys.next()
            && keys.any(|key| key != first)
        {
            self.diagnostics.error(node.location, "cost_per_hit must have the same key in all limits of a rule");
        }
        let mut limits = limits.into_iter();
        let first = limits.next()?;
        Some(RateLimit { further: limits.collect(), ..first })
    }

    /// Checks a limit that is charged together with others of its rule.
    fn check_one_of_several(&mut self, limit: &RateLimit, earlier: &[RateLimit], location: Location) {
        let in_flight = limit.limit.is_some_and(|limit| matches!(limit.measure(), Measure::InFlight { .. }));
        let reason = if limit.by_plan.is_some() {
            "by_plan cannot be one of several limits; the limit of a plan can itself be a list"
        } else if limit.limit.is_none() {
            "unlimited: true cannot be one of several limits"
        } else if in_flight {
            "a limit of requests in flight cannot be one of several limits, because to release a slot would return hits to \
             all of them; it needs a descriptor of its own"
        } else if !limit.modifiers.is_empty() {
            "a limit with classes cannot be one of several limits; it needs a descriptor of its own"
        } else if limit.count_denied.is_some() {
            "count_denied cannot be true for one of several limits: a request that one of them denies takes hits from none"
        } else if limit.name.is_empty() && !earlier.is_empty() {
            "each limit of rate_limits after the first requires a name, which is part of its counter and its statistics"
        } else if earlier.iter().any(|earlier| earlier.name == limit.name) {
            "the limits of rate_limits must have different names"
        } else {
            return;
        };
        self.diagnostics.error(location, reason);
    }

    /// Reads the keywords. Those that need no others are already in the first result.
    fn keywords(&mut self, fields: &[(&str, Location, &Yaml)]) -> (RateLimit, Keywords) {
        let mut rate_limit = RateLimit::default();
        let mut keywords = Keywords::default();
        let mut replaces = Vec::new();
        for (key, location, value) in fields {
            match *key {
                "unit" => {
                    keywords.rate.unit = Some(Field { value: self.unit(value), location: value.location });
                }
                "requests_per_unit" => {
                    keywords.rate.requests = Some(Field { value: self.large_number(key, value), location: *location });
                }
                "unit_multiplier" => {
                    keywords.rate.multiplier = Some(Field { value: self.number(key, value), location: *location });
                }
                "unlimited" => keywords.unlimited = self.boolean(key, value),
                "name" => rate_limit.name = self.text(key, value).unwrap_or_default(),
                "replaces" => replaces = self.replaces(value),
                "consistency" => {
                    let choices = Consistency::ALL.map(|consistency| (consistency.name(), consistency));
                    keywords.consistency = self.choice(key, value, &choices).map(|choice| (choice, value.location));
                }
                "on_error" => {
                    let choices = FailurePolicy::ALL.map(|policy| (policy.name(), policy));
                    rate_limit.on_error = self.choice(key, value, &choices);
                }
                "shed" => rate_limit.sheds = self.boolean(key, value),
                "visible" => rate_limit.is_hidden = !self.boolean(key, value),
                "cost_per_hit" => rate_limit.cost_per_hit = self.cost_per_hit(value),
                "currency" => rate_limit.currency = self.currency(value),
                "denial" => rate_limit.denial = self.denial(value),
                "retry_jitter" => {
                    rate_limit.retry_jitter = algorithm::duration(self, key, value).unwrap_or_default();
                }
                "penalty" | "penalty_max" => keywords.penalty.read(self, key, *location, value),
                "elastic" => keywords.elastic = self.elastic(value).map(|elastic| (elastic, *location)),
                "by_plan" => rate_limit.by_plan = self.text(key, value).map(|name| (name, *location)),
                keyword => keywords.algorithm.read(self, keyword, *location, value),
            }
        }
        if let Some(denial) = &mut rate_limit.denial {
            denial.currency = rate_limit.currency.clone();
        }
        for ReplacedLimit { name, location } in replaces {
            if name.is_empty() {
                self.diagnostics.error(location, "replaces requires the name of another limit, not an empty one");
            } else if name == rate_limit.name {
                self.diagnostics.error(location, format!("the limit {name:?} cannot replace itself"));
            } else {
                rate_limit.replaces.push(ReplacedLimit { name, location });
            }
        }
        (rate_limit, keywords)
    }

    /// Builds the limit and adds it to `rate_limit`. Returns `None` if a keyword is invalid.
    fn build_limit(&mut self, keywords: Keywords, node: Location, rate_limit: &mut RateLimit) -> Option<()> {
        let Keywords { rate, algorithm: keywords, consistency, elastic, penalty, .. } = keywords;
        rate_limit.count_denied = keywords.explicit_count_denied();
        let spec = keywords.limit_spec(self);
        let (requests, measure) = match keywords.quantity(self, node) {
            algorithm::Quantity::PerUnit => rate.measure(self, node)?,
            algorithm::Quantity::Explicit(quantity) => {
                for location in rate.locations() {
                    let reason = "cannot be combined with unit, unit_multiplier or requests_per_unit";
                    self.diagnostics.error(location, format!("{} {reason}", keywords.quantity_keyword()));
                }
                quantity?
            }
        };
        rate_limit.modifiers = keywords.modifiers();
        if rate_limit.cost_key().is_some() && !rate_limit.modifiers.is_empty() {
            let message = "cost_per_hit by the value of an entry cannot be combined with class or holder";
            self.diagnostics.error(node, message);
        }
        if rate_limit.currency.is_some() && matches!(measure, Measure::InFlight { .. }) {
            self.diagnostics.error(node, "currency cannot be combined with a limit of requests in flight");
        }
        rate_limit.classes = keywords.class_names();
        rate_limit.sheds |= keywords.sheds();
        let spec = spec?;
        let mut limit = match Limit::from_spec(requests, measure, keywords.kind(), spec) {
            Ok(limit) => limit,
            Err(error) => {
                let location = match error.keyword() {
                    "unit_multiplier" => rate.multiplier.map(|multiplier| multiplier.location),
                    keyword => keywords.location(keyword),
                };
                self.diagnostics.error(location.unwrap_or(node), error.to_string());
                return None;
            }
        };
        if self.notes
            && limit.is_default()
            && let Some(Field { value: Some(unit @ (Unit::Month | Unit::Year)), location }) = rate.unit
        {
            // Once in a file.
            self.notes = false;
            let days = unit.seconds() / 86_400;
            let name = unit.name();
            let message = format!(
                "a window of the unit {name} has {days} days and begins at a multiple of {days} days since 1970, as in \
                 envoyproxy/ratelimit; window: calendar begins it with the {name} of the calendar"
            );
            self.diagnostics.note(location, message);
        }
        if self.peers && limit.algorithm().spec().is_none() {
            let message = format!(
                "{} is enforced by each instance alone, because its counters are not exchanged with peers",
                limit.algorithm().name()
            );
            self.diagnostics.warning(node, message);
        }
        if let Some((consistency, location)) = consistency {
            rate_limit.consistency = consistency;
            self.check_consistency(consistency, &limit, elastic.is_some(), location);
        }
        let context = penalty::Context {
            limit: &limit,
            consistency: rate_limit.consistency,
            has_modifiers: !rate_limit.modifiers.is_empty(),
            is_elastic: elastic.is_some(),
            count_denied: rate_limit.count_denied.is_some(),
        };
        limit.penalty = penalty.build(self, &context);
        if self.peers && limit.penalty.is_some() {
            let message =
                "a penalty is in force only on the instance that began it, because it is not exchanged with peers";
            self.diagnostics.warning(node, message);
        }
        rate_limit.limit = Some(limit);
        // The division cannot fail, because smaller numbers are valid as well.
        rate_limit.divided_limit = Limit::divided(requests, measure, keywords.kind(), spec, self.instances).ok();
        if let Some((elastic, location)) = elastic {
            match elastic::build_elastic(elastic, requests, measure, keywords.kind(), spec) {
                Ok(elastic) => rate_limit.elastic = Some(elastic),
                Err(error) => self.diagnostics.error(location, format!("at the highest elastic limit, {error}")),
            }
        }
        Some(())
    }

    /// Rejects a consistency that the algorithm or the rule does not support.
    fn check_consistency(&mut self, consistency: Consistency, limit: &Limit, elastic: bool, location: Location) {
        let algorithm = limit.algorithm();
        let reason = match consistency {
            Consistency::Exact => return,
            _ if elastic => "cannot be combined with elastic, because local decisions do not depend on the resource",
            Consistency::Leased if algorithm.leasing().is_none() => &*format!(
                "is not supported by {} with these keywords, because the limit could be exceeded",
                algorithm.name()
            ),
            Consistency::Eventual if matches!(limit.measure(), Measure::InFlight { .. }) => {
                "cannot be combined with concurrency: a request that is denied elsewhere holds no slot here"
            }
            Consistency::Eventual if algorithm.name() == "shares" => {
                "cannot be combined with shares: capacity that one class borrows is missing for another"
            }
            Consistency::Leased | Consistency::Eventual => return,
        };
        self.diagnostics.error(location, format!("consistency: {} {reason}", consistency.name()));
    }

    pub(super) fn unit(&mut self, node: &Yaml) -> Option<Unit> {
        let text = self.text("unit", node)?;
        let unit = Unit::from_name(&text);
        if unit.is_none() {
            let hint = hints::unit_hint(&text).map(|hint| format!("; {hint}")).unwrap_or_default();
            self.diagnostics.error(node.location, format!("unit {text:?} is not one of {}{hint}", Unit::names()));
        }
        unit
    }

    fn replaces(&mut self, node: &Yaml) -> Vec<ReplacedLimit> {
        let mut names = Vec::new();
        for item in self.list("replaces", node) {
            let Some(fields) = self.read_map("an entry of replaces", item, &REPLACES) else { continue };
            let name = fields.first().and_then(|(key, _, value)| self.text(key, value));
            names.push(ReplacedLimit { name: name.unwrap_or_default(), location: item.location });
        }
        names
    }
}
