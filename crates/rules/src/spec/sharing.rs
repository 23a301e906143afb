//! [`Capacity`] and [`Sharing`]: the keywords `capacity`, `shares` and `reserve`.

use sluicegate_algorithm::{Classes, InvalidClasses};

use super::{Reader, keywords::SHARE};
use crate::{diagnostic::Location, limit::Unit, yaml::Yaml};

/// Name of the class for requests with a class that is not listed.
const OTHER_CLASS: &str = "other";

/// A number of requests in flight (`100`) or a rate (`1000/s`).
#[derive(Clone, Copy)]
pub(super) struct Capacity {
    pub(super) hits: u32,
    pub(super) unit: Option<Unit>,
}

impl Capacity {
    /// Parses a capacity; `None` if the number or the unit is invalid.
    fn parse(text: &str) -> Option<Self> {
        let Some((hits, unit)) = text.split_once('/') else {
            return Some(Self { hits: parse_hits(text)?, unit: None });
        };
        let unit = match unit.trim() {
            "s" => Unit::Second,
            "m" => Unit::Minute,
            "h" => Unit::Hour,
            "d" => Unit::Day,
            name => Unit::from_name(name)?,
        };
        Some(Self { hits: parse_hits(hits)?, unit: Some(unit) })
    }
}

fn parse_hits(text: &str) -> Option<u32> {
    text.trim().replace('_', "").parse().ok()
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

/// The guaranteed share and the maximum share of one class.
struct ClassShare {
    name: String,
    min: Amount,
    /// The maximum; `None` if it is the whole capacity.
    max: Option<Amount>,
}

impl ClassShare {
    /// Returns the minimum and the maximum in hits.
    fn resolve(&self, capacity: u32) -> (u32, u32) {
        let max = match self.max {
            Some(max) => max.resolve(capacity),
            None => capacity,
        };
        (self.min.resolve(capacity), max)
    }
}

/// The classes that share a capacity, from `shares` or `reserve`.
pub(super) struct Sharing {
    location: Location,
    classes: Vec<ClassShare>,
    /// Whether the keyword is `reserve`. If the class `other` is not listed, its maximum is then the whole capacity;
    /// with `shares`, it is the capacity that is not guaranteed to a listed class.
    pub(super) reserve: bool,
}

impl Sharing {
    /// Returns the names of the listed classes, in the order of the class table.
    pub(super) fn class_names(&self) -> Vec<Box<str>> {
        self.named_classes().iter().map(|class| class.name.as_str().into()).collect()
    }

    /// Returns the class table. Its last class is for all other requests.
    pub(super) fn class_table(&self, capacity: u32) -> Result<Classes, InvalidClasses> {
        let mut shares = Vec::new();
        let mut guaranteed = 0_u32;
        for class in self.named_classes() {
            let (min, max) = class.resolve(capacity);
            guaranteed = guaranteed.saturating_add(min);
            shares.push((min, max));
        }
        let other = self.classes.iter().find(|class| class.name == OTHER_CLASS);
        shares.push(match other {
            Some(other) => other.resolve(capacity),
            None if self.reserve => (0, capacity),
            None => (0, capacity.saturating_sub(guaranteed).max(1)),
        });
        Classes::new(&shares, capacity)
    }

    /// Returns the listed classes in the order of their names, without the one for all other requests.
    fn named_classes(&self) -> Vec<&ClassShare> {
        let mut named: Vec<_> = self.classes.iter().filter(|class| class.name != OTHER_CLASS).collect();
        named.sort_by(|one, other| one.name.cmp(&other.name));
        named
    }

    pub(super) fn location(&self) -> Location {
        self.location
    }
}

impl Reader<'_, '_> {
    pub(super) fn capacity(&mut self, node: &Yaml) -> Option<Capacity> {
        let text = self.text("capacity", node)?;
        let capacity = Capacity::parse(&text);
        if capacity.is_none() {
            let message = format!(
                "capacity must be a number of requests in flight (100), or of hits per s, m, h, d, {} (1000/s), \
                 not {text:?}",
                Unit::names()
            );
            self.diagnostics.error(node.location, message);
        }
        capacity
    }

    /// Reads shares such as `gold: { min: 400, max: 1000 }`.
    pub(super) fn shares(&mut self, node: &Yaml) -> Option<Sharing> {
        let mut classes = Vec::new();
        for (class, _, value) in self.named_entries("shares", node) {
            let mut min = Some(Amount::Hits(0));
            let mut max = Some(None);
            let name = format!("the class {class:?} of shares");
            for (key, _, value) in self.read_map(&name, value, &SHARE)? {
                match key {
                    "min" => min = self.amount(key, value),
                    _ => max = self.amount(key, value).map(Some),
                }
            }
            classes.push(ClassShare { name: class, min: min?, max: max? });
        }
        Some(Sharing { location: node.location, classes, reserve: false })
    }

    /// Reads reserves such as `critical: 20%`.
    pub(super) fn reserve(&mut self, node: &Yaml) -> Option<Sharing> {
        let mut classes = Vec::new();
        for (class, _, value) in self.named_entries("reserve", node) {
            classes.push(ClassShare { name: class, min: self.amount("a reserve", value)?, max: None });
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
