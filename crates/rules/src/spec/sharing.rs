//! [`Capacity`] and [`Sharing`]: the keywords `capacity`, `shares` and `reserve`.

use sluicegate_algorithm::{Classes, InvalidClasses};

use super::{Reader, keywords::SHARE, rate_limit::units};
use crate::{diagnostic::Location, limit::Unit, yaml::Yaml};

/// Name of the class for requests with a class that is not listed.
const OTHER_CLASS: &str = "other";

/// A number of requests in flight (`100`) or a rate (`1000/s`).
#[derive(Clone, Copy)]
pub(super) struct Capacity {
    pub(super) hits: u32,
    pub(super) unit: Option<Unit>,
}

/// A number of hits or a percentage of the capacity.
#[derive(Clone, Copy)]
enum Amount {
    Hits(u32),
    Percent(u32),
}

impl Amount {
    fn resolve(self, capacity: u32) -> u32 {
        match self {
            Self::Hits(hits) => hits,
            Self::Percent(percent) => (u64::from(capacity) * u64::from(percent) / 100) as u32,
        }
    }
}

/// The guaranteed share and the maximum share of each class.
pub(super) struct Sharing {
    location: Location,
    classes: Vec<(String, Amount, Option<Amount>)>,
    /// Whether the keyword is `reserve`. Other classes may then take all capacity that is free; with `shares`, they may
    /// only take capacity that is not guaranteed to a class.
    pub(super) reserve: bool,
}

impl Sharing {
    /// Returns the names of the listed classes and the class table. Its last class is for all other requests.
    pub(super) fn class_table(&self, capacity: u32) -> (Vec<Box<str>>, Result<Classes, InvalidClasses>) {
        let mut listed: Vec<_> = self.classes.iter().collect();
        listed.sort_by(|one, other| one.0.cmp(&other.0));
        let numbers = |(_, min, max): &(String, Amount, Option<Amount>)| {
            (min.resolve(capacity), max.map_or(capacity, |max| max.resolve(capacity)))
        };
        let (others, named): (Vec<_>, Vec<_>) = listed.into_iter().partition(|(name, ..)| name == OTHER_CLASS);
        let mut shares: Vec<_> = named.iter().map(|class| numbers(class)).collect();
        let guaranteed = shares.iter().fold(0_u32, |sum, (min, _)| sum.saturating_add(*min));
        let remaining = if self.reserve { capacity } else { capacity.saturating_sub(guaranteed).max(1) };
        shares.push(others.first().map_or((0, remaining), |class| numbers(class)));
        (named.iter().map(|(name, ..)| name.as_str().into()).collect(), Classes::new(&shares, capacity))
    }

    pub(super) fn location(&self) -> Location {
        self.location
    }
}

impl Reader<'_, '_> {
    pub(super) fn capacity(&mut self, node: &Yaml) -> Option<Capacity> {
        let text = self.text("capacity", node)?;
        let (hits, unit) = text.split_once('/').map_or((text.as_str(), None), |(hits, unit)| (hits, Some(unit)));
        let hits = hits.trim().replace('_', "").parse().ok();
        let parsed_unit = unit.map(|unit| match unit.trim() {
            "s" => Some(Unit::Second),
            "m" => Some(Unit::Minute),
            "h" => Some(Unit::Hour),
            "d" => Some(Unit::Day),
            name => Unit::from_name(name),
        });
        match (hits, parsed_unit) {
            (Some(hits), None) => Some(Capacity { hits, unit: None }),
            (Some(hits), Some(Some(unit))) => Some(Capacity { hits, unit: Some(unit) }),
            (None, _) | (_, Some(None)) => {
                let message = format!(
                    "capacity must be a number of requests in flight (100), or of hits per s, m, h, d, {} (1000/s), \
                     not {text:?}",
                    units()
                );
                self.diagnostics.error(node.location, message);
                None
            }
        }
    }

    /// Reads shares such as `gold: { min: 400, max: 1000 }`.
    pub(super) fn shares(&mut self, node: &Yaml) -> Option<Sharing> {
        let mut classes = Vec::new();
        for (class, _, value) in self.named_entries("shares", node) {
            let (mut min, mut max) = (Some(Amount::Hits(0)), Some(None));
            let name = format!("the class {class:?} of shares");
            for (key, _, value) in self.read_map(&name, value, &SHARE)? {
                match key {
                    "min" => min = self.amount(key, value),
                    _ => max = self.amount(key, value).map(Some),
                }
            }
            classes.push((class, min?, max?));
        }
        Some(Sharing { location: node.location, classes, reserve: false })
    }

    /// Reads reserves such as `critical: 20%`.
    pub(super) fn reserve(&mut self, node: &Yaml) -> Option<Sharing> {
        let mut classes = Vec::new();
        for (class, _, value) in self.named_entries("reserve", node) {
            classes.push((class, self.amount("a reserve", value)?, None));
        }
        Some(Sharing { location: node.location, classes, reserve: true })
    }

    fn amount(&mut self, name: &str, node: &Yaml) -> Option<Amount> {
        match node.scalar() {
            Some((text, _)) if text.ends_with('%') => self.percent(name, node, 0, 100).map(Amount::Percent),
            _ => self.number(name, node).map(Amount::Hits),
        }
    }

    /// Reads a whole percentage from `min` to `max`.
    pub(super) fn percent(&mut self, name: &str, node: &Yaml, min: u32, max: u32) -> Option<u32> {
        let text = self.text(name, node)?;
        let number = text.strip_suffix('%').and_then(|digits| digits.trim_end().parse().ok());
        let percent = number.filter(|percent| (min..=max).contains(percent));
        if percent.is_none() {
            let message = format!("{name} must be a whole percentage from {min}% to {max}%, not {text:?}");
            self.diagnostics.error(node.location, message);
        }
        percent
    }
}
