//! `rate_limit`: which limit, what becomes of it in special cases, and who it tells apart.

use super::{
    Reader, algorithm, elastic,
    keywords::{RATE_LIMIT, REPLACES},
};
use crate::{
    algorithm::Consistency,
    rules::{
        diagnostic::Location,
        limit::{FailurePolicy, Limit, LimitError, Measure, Unit},
        matcher::{Elastic, ModifierEntry},
        yaml::{Kind, Yaml},
    },
};

#[derive(Default)]
pub(in crate::rules) struct RateLimit {
    /// `None`: unlimited.
    pub(in crate::rules) limit: Option<Limit>,
    /// One instance's part of it.
    pub(in crate::rules) part: Option<Limit>,
    pub(in crate::rules) name: String,
    pub(in crate::rules) replaces: Vec<String>,
    pub(in crate::rules) on_error: Option<FailurePolicy>,
    pub(in crate::rules) consistency: Consistency,
    /// The keys of the entries that stand behind those that choose the counter, and what they say.
    pub(in crate::rules) asides: Vec<(ModifierEntry, String)>,
    /// Those that share the limit, in the order in which it has them.
    pub(in crate::rules) classes: Vec<Box<str>>,
    pub(in crate::rules) sheds: bool,
    pub(in crate::rules) elastic: Option<Elastic>,
    /// The limit is that of the request's plan which has this name.
    pub(in crate::rules) by_plan: Option<(String, Location)>,
    /// Where `count_denied: true` stands, if it does.
    pub(super) count_denied: Option<Location>,
}

/// The words of a rate, and where they stand.
#[derive(Default)]
struct Rate {
    unit: Option<(Option<Unit>, Location)>,
    requests: Option<(Option<u32>, Location)>,
    multiplier: Option<(Option<u32>, Location)>,
}

impl Rate {
    fn places(&self) -> impl Iterator<Item = Location> {
        [self.unit.map(|it| it.1), self.requests.map(|it| it.1), self.multiplier.map(|it| it.1)].into_iter().flatten()
    }

    fn measure(&self, reader: &mut Reader<'_, '_>, place: Location) -> Option<(u32, Measure)> {
        let Some((unit, _)) = self.unit else {
            let message = format!("rate_limit needs a unit ({}) or unlimited: true", units());
            reader.problems.error(place, message);
            return None;
        };
        if self.requests.is_none() {
            let message = "rate_limit has no requests_per_unit: that is 0, and refuses every request";
            reader.problems.warning(place, message);
        }
        let requests = self.requests.map_or(Some(0), |it| it.0);
        let multiplier = self.multiplier.map_or(Some(1), |it| it.0);
        Some((requests?, Measure::Rate { unit: unit?, multiplier: multiplier? }))
    }
}

impl Reader<'_, '_> {
    pub(super) fn rate_limit(&mut self, node: &Yaml) -> Option<RateLimit> {
        if matches!(node.kind, Kind::Null) {
            return None;
        }
        let mut it = RateLimit::default();
        let (mut rate, mut unlimited) = (Rate::default(), false);
        let (mut replaces, mut consistency, mut elastic) = (Vec::new(), None, None);
        let mut words = algorithm::AlgorithmKeywords::default();
        let fields = self.map(node, &RATE_LIMIT)?;
        for (key, place, value) in &fields {
            match *key {
                "unit" => rate.unit = Some((self.unit(value), value.place)),
                "requests_per_unit" => rate.requests = Some((self.number(key, value), *place)),
                "unit_multiplier" => rate.multiplier = Some((self.number(key, value), *place)),
                "unlimited" => unlimited = self.boolean(key, value),
                "name" => it.name = self.text(key, value).unwrap_or_default(),
                "replaces" => replaces = self.replaces(value),
                "consistency" => {
                    let words = Consistency::ALL.map(|it| (it.name(), it));
                    consistency = self.word(key, value, &words).map(|it| (it, value.place));
                }
                "on_error" => it.on_error = self.word(key, value, &FailurePolicy::ALL.map(|it| (it.name(), it))),
                "shed" => it.sheds = self.boolean(key, value),
                "elastic" => elastic = self.elastic(value).map(|it| (it, *place)),
                "by_plan" => it.by_plan = self.text(key, value).map(|name| (name, *place)),
                word => words.read(self, word, *place, value),
            }
        }
        for (name, place) in replaces {
            if name.is_empty() {
                self.problems.error(place, "replaces needs the name of another limit, not an empty one");
            } else if name == it.name {
                self.problems.error(place, format!("the limit {name:?} cannot replace itself"));
            } else {
                it.replaces.push(name);
            }
        }
        if it.by_plan.is_some() {
            for (key, place, _) in fields.iter().filter(|(key, ..)| *key != "by_plan") {
                self.problems
                    .error(*place, format!("{key} has no meaning beside by_plan: the plans say how it is counted"));
            }
            return Some(it);
        }
        if unlimited {
            for place in [rate.unit.map(|it| it.1), rate.multiplier.map(|it| it.1)].into_iter().flatten() {
                self.problems.error(place, "a limit is either unlimited or has a unit, not both");
            }
            words.refuse_all(self);
            return Some(it);
        }
        it.count_denied = words.explicit_count_denied();
        let shape = words.shape(self);
        let counted = words.counted(self, node.place);
        let (requests, measure) = match counted {
            algorithm::Counted::ByUnit => rate.measure(self, node.place)?,
            algorithm::Counted::Otherwise(counted) => {
                for place in rate.places() {
                    let why = "says how many by itself, and goes with no unit and no requests_per_unit";
                    self.problems.error(place, format!("{} {why}", words.counted_by()));
                }
                counted?
            }
        };
        let place_of = |error: LimitError| match error.keyword() {
            "unit_multiplier" => rate.multiplier.map_or(node.place, |it| it.1),
            word => words.place(word).unwrap_or(node.place),
        };
        (it.asides, it.classes) = words.askers();
        it.sheds |= words.sheds();
        let shape = shape?;
        match Limit::shaped(requests, measure, words.kind(), shape) {
            Ok(limit) => {
                if let Some((consistency, place)) = consistency {
                    it.consistency = consistency;
                    self.check_consistency(consistency, &limit, elastic.is_some(), place);
                }
                it.limit = Some(limit);
                // Fewer of anything fit as well.
                it.part = Limit::divided(requests, measure, words.kind(), shape, self.instances).ok();
            }
            Err(error) => {
                self.problems.error(place_of(error), error.to_string());
                return None;
            }
        }
        if let Some((elastic, place)) = elastic {
            match elastic::stretch(elastic, requests, measure, words.kind(), shape) {
                Ok(elastic) => it.elastic = Some(elastic),
                Err(error) => self.problems.error(place, format!("with all of its extra, {error}")),
            }
        }
        Some(it)
    }

    /// Refuses what could not be promised.
    fn check_consistency(&mut self, consistency: Consistency, limit: &Limit, elastic: bool, place: Location) {
        let algorithm = limit.algorithm();
        let why = match consistency {
            Consistency::Exact => return,
            _ if elastic => "does not go with elastic: what is decided elsewhere knows nothing of the resource",
            Consistency::Leased if algorithm.leasing().is_none() => &*format!(
                "cannot promise that no more than the limit passes with {} as it is written here",
                algorithm.name()
            ),
            Consistency::Eventual if matches!(limit.measure(), Measure::InFlight { .. }) => {
                "does not go with concurrency: whoever is refused elsewhere holds nothing here"
            }
            Consistency::Eventual if algorithm.name() == "shares" => {
                "does not go with shares: what one class borrows, another has not"
            }
            Consistency::Leased | Consistency::Eventual => return,
        };
        self.problems.error(place, format!("consistency: {} {why}", consistency.name()));
    }

    pub(super) fn unit(&mut self, node: &Yaml) -> Option<Unit> {
        let text = self.text("unit", node)?;
        let unit = Unit::from_name(&text);
        if unit.is_none() {
            self.problems.error(node.place, format!("unit {text:?} is not one of {}", units()));
        }
        unit
    }

    fn replaces(&mut self, node: &Yaml) -> Vec<(String, Location)> {
        let mut names = Vec::new();
        for item in self.list("replaces", node) {
            let Some(fields) = self.map(item, &REPLACES) else { continue };
            let name = fields.first().and_then(|(key, _, value)| self.text(key, value));
            names.push((name.unwrap_or_default(), item.place));
        }
        names
    }
}

pub(super) fn units() -> String {
    Unit::ALL.map(Unit::name).join(", ")
}
