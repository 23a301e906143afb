//! Limits from traffic: what entities ask at their busiest, and what a limit there would have refused.

use std::{collections::HashMap, hash::BuildHasher};

use foldhash::fast::FixedState;

use crate::{
    rules::{Entry, Unit},
    traffic::RecordedRequest,
};

/// The windows that are looked at.
const UNITS: [Unit; 3] = [Unit::Second, Unit::Minute, Unit::Hour];
/// Above the busiest of all but one in a hundred there is room for so much more.
const ROOM: f64 = 1.2;

/// What one entity did in windows of one unit.
#[derive(Clone, Copy, Default)]
struct Window {
    number: u64,
    count: u64,
    peak: u64,
}

/// All descriptors of a domain with the same keys.
#[derive(Default)]
struct Shape {
    hits: u64,
    entities: HashMap<u64, [Window; UNITS.len()], FixedState>,
    /// By unit: how many windows had so many hits.
    counts: [HashMap<u64, u64, FixedState>; UNITS.len()],
}

/// A domain, and keys.
type ShapeName = (Box<str>, Vec<Box<str>>);

/// What traffic says of limits.
#[derive(Default)]
pub struct Suggestions {
    shapes: HashMap<ShapeName, Shape, FixedState>,
}

/// A limit, and what it would have done.
#[derive(Clone, Debug, PartialEq)]
pub struct Suggestion {
    /// The domain.
    pub domain: Box<str>,
    /// The keys of the descriptors.
    pub keys: Vec<Box<str>>,
    /// In a window of this.
    pub unit: Unit,
    /// The busiest window of the entity in the middle, of all but one in ten, in a hundred, in a thousand, and of all.
    pub peaks: [u64; 5],
    /// How many entities there are.
    pub entities: usize,
    /// The limit.
    pub limit: u32,
    /// Of all hits, the share that it would have refused.
    pub refused: f64,
    /// And of how many entities something.
    pub touched: usize,
}

impl Suggestions {
    /// A request was asked. They come in the order of time, about.
    pub fn add(&mut self, recorded: &RecordedRequest<'_>) {
        for descriptor in &recorded.request.descriptors {
            if descriptor.refund || descriptor.hits == 0 || descriptor.entries.is_empty() {
                continue;
            }
            let keys = descriptor.entries.iter().map(|entry| entry.key.into()).collect();
            let shape = self.shapes.entry((recorded.request.domain.into(), keys)).or_default();
            shape.add(&descriptor.entries, descriptor.hits, recorded.at.floor_secs());
        }
    }

    /// A limit for each unit of each list of keys.
    #[must_use]
    pub fn suggest(mut self) -> Vec<Suggestion> {
        let mut all = Vec::new();
        for ((domain, keys), shape) in &mut self.shapes {
            shape.end();
            for (place, unit) in UNITS.into_iter().enumerate() {
                all.push(shape.suggest(domain, keys, place, unit));
            }
        }
        all.sort_by(|one, other| {
            let order = |it: &Suggestion| (it.domain.clone(), it.keys.clone(), it.unit.seconds());
            order(one).cmp(&order(other))
        });
        all
    }
}

impl Shape {
    fn add(&mut self, entries: &[Entry<'_>], hits: u64, second: u64) {
        let mut hasher = FixedState::default().build_hasher();
        entries.iter().for_each(|entry| std::hash::Hash::hash(entry.value, &mut hasher));
        let windows = self.entities.entry(std::hash::Hasher::finish(&hasher)).or_default();
        self.hits += hits;
        for ((window, counts), unit) in windows.iter_mut().zip(&mut self.counts).zip(UNITS) {
            let number = second / unit.seconds();
            if number != window.number {
                window.end(counts);
                window.number = number;
            }
            window.count += hits;
        }
    }

    fn end(&mut self) {
        for windows in self.entities.values_mut() {
            windows.iter_mut().zip(&mut self.counts).for_each(|(window, counts)| window.end(counts));
        }
    }

    fn suggest(&self, domain: &str, keys: &[Box<str>], place: usize, unit: Unit) -> Suggestion {
        let mut peaks: Vec<u64> = self.entities.values().map(|windows| windows[place].peak).collect();
        peaks.sort_unstable();
        let at = |share: f64| peaks.get(((peaks.len() - 1) as f64 * share).round() as usize).copied().unwrap_or(0);
        let limit = rounded(at(0.99) as f64 * ROOM);
        let over = self.counts[place].iter().filter(|(count, _)| **count > u64::from(limit));
        let refused: u64 = over.map(|(count, windows)| (count - u64::from(limit)) * windows).sum();
        Suggestion {
            domain: domain.into(),
            keys: keys.to_vec(),
            unit,
            peaks: [at(0.5), at(0.9), at(0.99), at(0.999), at(1.0)],
            entities: peaks.len(),
            limit,
            refused: refused as f64 / self.hits.max(1) as f64,
            touched: peaks.iter().filter(|peak| **peak > u64::from(limit)).count(),
        }
    }
}

impl Window {
    fn end(&mut self, counts: &mut HashMap<u64, u64, FixedState>) {
        if self.count > 0 {
            *counts.entry(self.count).or_default() += 1;
            self.peak = self.peak.max(self.count);
            self.count = 0;
        }
    }
}

/// Up to a number that people would write: two digits and zeros.
fn rounded(limit: f64) -> u32 {
    let mut unit = 1.0;
    while limit / unit > 100.0 {
        unit *= 10.0;
    }
    ((limit / unit).ceil() * unit).clamp(1.0, f64::from(u32::MAX)) as u32
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;
    use crate::engine::{Descriptor, Micros, Request};

    #[test]
    fn a_limit_is_above_what_nearly_everybody_does() {
        let mut suggestions = Suggestions::default();
        let mut add = |user: &str, hits: u64, second: u64| {
            let entries = smallvec![Entry { key: "user", value: user }];
            let descriptor = Descriptor { entries, hits, refund: false, requested_limit: None };
            let request = Request { domain: "api", descriptors: smallvec![descriptor], feedback: Vec::new() };
            let at = Micros::from_secs(second);
            suggestions.add(&RecordedRequest { at, request, allowed: None, over: smallvec![] });
        };
        // A thousand ask 1 to 10 hits in each of two minutes, and one 500 in one second.
        for user in 0..1_000 {
            for minute in [60, 120] {
                add(&user.to_string(), user % 10 + 1, minute + user % 60);
            }
        }
        add("wild", 500, 130);
        let all = suggestions.suggest();
        let [second, minute, hour] = all.as_slice() else { panic!("{all:?}") };
        assert_eq!((minute.unit, minute.entities, minute.peaks), (Unit::Minute, 1_001, [6, 10, 10, 10, 500]));
        assert_eq!((minute.limit, minute.touched), (12, 1));
        assert!((minute.refused - 488.0 / 11_500.0).abs() < 1e-9, "{minute:?}");
        assert_eq!((second.limit, hour.peaks[4], hour.limit), (12, 500, 24));
    }

    #[test]
    fn a_limit_is_a_round_number() {
        for (limit, expected) in [(0.0, 1), (0.3, 1), (12.0, 12), (99.1, 100), (101.0, 110), (12_345.0, 13_000)] {
            assert_eq!(rounded(limit), expected);
        }
    }
}
