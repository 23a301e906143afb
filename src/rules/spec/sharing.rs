//! `capacity` and who shares it: `shares`, or `reserve` for short.

use super::{Reader, keywords::SHARE, rate_limit::units};
use crate::{
    algorithm::{Classes, InvalidClasses},
    rules::{diagnostic::Location, limit::Unit, yaml::Yaml},
};

/// The class of all that is not listed.
const OTHERS: &str = "other";

/// `100` at once, or `1000/s`.
#[derive(Clone, Copy)]
pub(super) struct Capacity {
    pub(super) hits: u32,
    pub(super) per: Option<Unit>,
}

/// A number, or a percentage of the capacity.
#[derive(Clone, Copy)]
enum Amount {
    Hits(u32),
    Percent(u32),
}

impl Amount {
    fn of(self, capacity: u32) -> u32 {
        match self {
            Self::Hits(hits) => hits,
            Self::Percent(percent) => (u64::from(capacity) * u64::from(percent) / 100) as u32,
        }
    }
}

/// Of each class what is always there for it, and the most it may have.
pub(super) struct Sharing {
    place: Location,
    classes: Vec<(String, Amount, Option<Amount>)>,
    /// The others may have all that is free, and not only what is promised to nobody.
    pub(super) reserve: bool,
}

impl Sharing {
    /// The classes' names in the order of the table, and the table, whose last class is the others.
    pub(super) fn table(&self, capacity: u32) -> (Vec<Box<str>>, Result<Classes, InvalidClasses>) {
        let mut listed: Vec<_> = self.classes.iter().collect();
        listed.sort_by(|one, other| one.0.cmp(&other.0));
        let numbers = |(_, min, max): &(String, Amount, Option<Amount>)| {
            (min.of(capacity), max.map_or(capacity, |max| max.of(capacity)))
        };
        let (others, named): (Vec<_>, Vec<_>) = listed.into_iter().partition(|(name, ..)| name == OTHERS);
        let mut shares: Vec<_> = named.iter().map(|class| numbers(class)).collect();
        let promised = shares.iter().fold(0_u32, |sum, (min, _)| sum.saturating_add(*min));
        let rest = if self.reserve { capacity } else { capacity.saturating_sub(promised).max(1) };
        shares.push(others.first().map_or((0, rest), |class| numbers(class)));
        (named.iter().map(|(name, ..)| name.as_str().into()).collect(), Classes::new(&shares, capacity))
    }

    pub(super) fn place(&self) -> Location {
        self.place
    }
}

impl Reader<'_, '_> {
    pub(super) fn capacity(&mut self, node: &Yaml) -> Option<Capacity> {
        let text = self.text("capacity", node)?;
        let (hits, per) = text.split_once('/').map_or((text.as_str(), None), |(hits, per)| (hits, Some(per)));
        let hits = hits.trim().replace('_', "").parse().ok();
        let unit = per.map(|per| match per.trim() {
            "s" => Some(Unit::Second),
            "m" => Some(Unit::Minute),
            "h" => Some(Unit::Hour),
            "d" => Some(Unit::Day),
            name => Unit::from_name(name),
        });
        match (hits, unit) {
            (Some(hits), None) => Some(Capacity { hits, per: None }),
            (Some(hits), Some(Some(unit))) => Some(Capacity { hits, per: Some(unit) }),
            (None, _) | (_, Some(None)) => {
                let message = format!(
                    "capacity is a number at once (100), or per s, m, h, d or {} (1000/s), not {text:?}",
                    units()
                );
                self.problems.error(node.place, message);
                None
            }
        }
    }

    /// `gold: { min: 400, max: 1000 }`.
    pub(super) fn shares(&mut self, node: &Yaml) -> Option<Sharing> {
        let mut classes = Vec::new();
        for (class, _, value) in self.named("shares", node) {
            let (mut min, mut max) = (Some(Amount::Hits(0)), Some(None));
            for (key, _, value) in self.map(value, &SHARE)? {
                match key {
                    "min" => min = self.amount(key, value),
                    _ => max = self.amount(key, value).map(Some),
                }
            }
            classes.push((class, min?, max?));
        }
        Some(Sharing { place: node.place, classes, reserve: false })
    }

    /// `critical: 20%`.
    pub(super) fn reserve(&mut self, node: &Yaml) -> Option<Sharing> {
        let mut classes = Vec::new();
        for (class, _, value) in self.named("reserve", node) {
            classes.push((class, self.amount("what is reserved", value)?, None));
        }
        Some(Sharing { place: node.place, classes, reserve: true })
    }

    fn amount(&mut self, name: &str, node: &Yaml) -> Option<Amount> {
        match node.scalar() {
            Some((text, _)) if text.ends_with('%') => self.percent(name, node, 0, 100).map(Amount::Percent),
            _ => self.number(name, node).map(Amount::Hits),
        }
    }

    /// A whole percentage.
    pub(super) fn percent(&mut self, name: &str, node: &Yaml, least: u32, most: u32) -> Option<u32> {
        let text = self.text(name, node)?;
        let number = text.strip_suffix('%').and_then(|digits| digits.trim_end().parse().ok());
        let percent = number.filter(|percent| (least..=most).contains(percent));
        if percent.is_none() {
            let message = format!("{name} must be a whole percentage from {least}% to {most}%, not {text:?}");
            self.problems.error(node.place, message);
        }
        percent
    }
}
