//! [`Suggestions`]: limits derived from the peak usage of entities in recorded traffic, with their effect on it.

use std::{
    collections::HashMap,
    hash::{BuildHasher, Hash, Hasher},
};

use foldhash::fast::RandomState;
use sluicegate_rules::{Entry, Unit};

use super::HASHES;
use crate::traffic::RecordedRequest;

/// The units for which limits are suggested.
const UNITS: [Unit; 3] = [Unit::Second, Unit::Minute, Unit::Hour];
/// Ratio of the suggested limit to the 99th percentile of the entities' peaks.
const HEADROOM: f64 = 1.2;

/// Hits of one entity in windows of one unit: the current window, and the peak so far.
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
    entities: HashMap<u64, [Window; UNITS.len()], RandomState>,
    /// For each unit, the number of windows by their number of hits.
    counts: [HashMap<u64, u64, RandomState>; UNITS.len()],
}

/// The domain and the keys of a shape.
type ShapeKey = (Box<str>, Vec<Box<str>>);

/// Hits of all entities in recorded requests, from which limits are suggested.
#[derive(Default)]
pub struct Suggestions {
    shapes: HashMap<ShapeKey, Shape, RandomState>,
}

/// A suggested limit, and the effect that it would have had.
#[derive(Clone, Debug, PartialEq)]
pub struct Suggestion {
    /// The domain.
    pub domain: Box<str>,
    /// The keys of the descriptors.
    pub keys: Vec<Box<str>>,
    /// The unit of the limit.
    pub unit: Unit,
    /// The 50th, 90th, 99th, 99.9th and 100th percentile of the entities' peaks, in hits per window.
    pub peaks: [u64; 5],
    /// Number of entities.
    pub entities: usize,
    /// The suggested limit, in hits per window.
    pub limit: u32,
    /// Share of the hits that the limit would have denied.
    pub denied_share: f64,
    /// Number of entities with hits that the limit would have denied.
    pub entities_denied: usize,
}

impl Suggestions {
    /// Adds a request. The order must be approximately chronological.
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

    /// Suggests a limit for each unit and each list of keys.
    #[must_use]
    pub fn suggest(mut self) -> Vec<Suggestion> {
        let mut all = Vec::new();
        for ((domain, keys), shape) in &mut self.shapes {
            shape.finish();
            for (unit_index, unit) in UNITS.into_iter().enumerate() {
                all.push(shape.suggest(domain, keys, unit_index, unit));
            }
        }
        all.sort_by(|one, other| {
            let by_shape = (&one.domain, &one.keys).cmp(&(&other.domain, &other.keys));
            by_shape.then_with(|| one.unit.seconds().cmp(&other.unit.seconds()))
        });
        all
    }
}

impl Shape {
    fn add(&mut self, entries: &[Entry<'_>], hits: u64, second: u64) {
        let mut hasher = HASHES.build_hasher();
        for entry in entries {
            entry.value.hash(&mut hasher);
        }
        let windows = self.entities.entry(hasher.finish()).or_default();
        self.hits += hits;
        for (unit_index, unit) in UNITS.into_iter().enumerate() {
            let window = &mut windows[unit_index];
            let number = second / unit.seconds();
            if number != window.number {
                window.finish(&mut self.counts[unit_index]);
                window.number = number;
            }
            window.count += hits;
        }
    }

    fn finish(&mut self) {
        for windows in self.entities.values_mut() {
            for (unit_index, window) in windows.iter_mut().enumerate() {
                window.finish(&mut self.counts[unit_index]);
            }
        }
    }

    fn suggest(&self, domain: &str, keys: &[Box<str>], unit_index: usize, unit: Unit) -> Suggestion {
        let mut peaks: Vec<u64> = self.entities.values().map(|windows| windows[unit_index].peak).collect();
        peaks.sort_unstable();
        let limit = rounded(quantile(&peaks, 0.99) as f64 * HEADROOM);
        let mut denied = 0;
        for (count, windows) in &self.counts[unit_index] {
            denied += count.saturating_sub(limit.into()) * windows;
        }
        Suggestion {
            domain: domain.into(),
            keys: keys.to_vec(),
            unit,
            peaks: [0.5, 0.9, 0.99, 0.999, 1.0].map(|share| quantile(&peaks, share)),
            entities: peaks.len(),
            limit,
            denied_share: denied as f64 / self.hits.max(1) as f64,
            entities_denied: peaks.iter().filter(|peak| **peak > u64::from(limit)).count(),
        }
    }
}

impl Window {
    fn finish(&mut self, counts: &mut HashMap<u64, u64, RandomState>) {
        if self.count > 0 {
            *counts.entry(self.count).or_default() += 1;
            self.peak = self.peak.max(self.count);
            self.count = 0;
        }
    }
}

/// Returns a quantile of a sorted list, which must not be empty. `share` is 0.5 for the median.
fn quantile(sorted: &[u64], share: f64) -> u64 {
    let index = ((sorted.len() - 1) as f64 * share).round() as usize;
    sorted.get(index).copied().unwrap_or(0)
}

/// Rounds up to a number with two significant digits.
fn rounded(limit: f64) -> u32 {
    let mut unit = 1.0;
    while limit / unit > 100.0 {
        unit *= 10.0;
    }
    ((limit / unit).ceil() * unit).clamp(1.0, f64::from(u32::MAX)) as u32
}

#[cfg(test)]
mod tests {
    use sluicegate_engine::{Descriptor, Micros, Request};
    use smallvec::smallvec;

    use super::*;

    #[test]
    fn a_limit_is_above_the_peaks_of_nearly_all_entities() {
        let mut suggestions = Suggestions::default();
        let mut add = |user: &str, hits: u64, second: u64| {
            let entries = smallvec![Entry { key: "user", value: user }];
            let descriptor = Descriptor { entries, hits, refund: false, requested_limit: None };
            let request = Request { domain: "api", descriptors: smallvec![descriptor], feedback: Vec::new() };
            let at = Micros::from_secs(second);
            suggestions.add(&RecordedRequest { at, request, allowed: None, over: smallvec![] });
        };
        // A thousand entities use 1 to 10 hits in each of two minutes, and one uses 500 in one second.
        for user in 0..1_000 {
            for minute in [60, 120] {
                add(&user.to_string(), user % 10 + 1, minute + user % 60);
            }
        }
        add("wild", 500, 130);
        let all = suggestions.suggest();
        let [second, minute, hour] = all.as_slice() else { panic!("{all:?}") };
        assert_eq!((minute.unit, minute.entities, minute.peaks), (Unit::Minute, 1_001, [6, 10, 10, 10, 500]));
        assert_eq!((minute.limit, minute.entities_denied), (12, 1));
        assert!((minute.denied_share - 488.0 / 11_500.0).abs() < 1e-9, "{minute:?}");
        assert_eq!((second.limit, hour.peaks[4], hour.limit), (12, 500, 24));
    }

    #[test]
    fn a_limit_is_a_round_number() {
        for (limit, expected) in [(0.0, 1), (0.3, 1), (12.0, 12), (99.1, 100), (101.0, 110), (12_345.0, 13_000)] {
            assert_eq!(rounded(limit), expected);
        }
    }

    fn recorded<'a>(entries: &[(&'a str, &'a str)], hits: u64, refund: bool, second: u64) -> RecordedRequest<'a> {
        let entries = entries.iter().map(|&(key, value)| Entry { key, value }).collect();
        let descriptor = Descriptor { entries, hits, refund, requested_limit: None };
        let request = Request { domain: "api", descriptors: smallvec![descriptor], feedback: Vec::new() };
        RecordedRequest { at: Micros::from_secs(second), request, allowed: None, over: smallvec![] }
    }

    #[test]
    fn only_hits_above_the_limit_count_as_denied_in_each_window() {
        let mut suggestions = Suggestions::default();
        let mut add = |user: &str, hits, second| suggestions.add(&recorded(&[("user", user)], hits, false, second));
        for user in 0..200 {
            add(&user.to_string(), 10, 60);
        }
        for (user, hits, second) in [("at the limit", 12, 60), ("above", 20, 60), ("above", 20, 120)] {
            add(user, hits, second);
        }
        let all = suggestions.suggest();
        let minute = all.iter().find(|suggestion| suggestion.unit == Unit::Minute).unwrap();
        assert_eq!((minute.limit, minute.entities, minute.entities_denied), (12, 202, 1));
        assert!((minute.denied_share - 16.0 / 2_052.0).abs() < 1e-9, "{minute:?}");
    }

    #[test]
    fn refunds_and_descriptors_without_hits_or_entries_are_ignored() {
        let bob = [("user", "bob")];
        for (entries, hits, refund) in [(&bob[..], 5, true), (&bob, 0, false), (&[], 5, false)] {
            let mut suggestions = Suggestions::default();
            suggestions.add(&recorded(entries, hits, refund, 60));
            let all = suggestions.suggest();
            assert!(all.is_empty(), "{all:?}");
        }
    }
}
