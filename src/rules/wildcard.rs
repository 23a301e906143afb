//! Values with `*`: the first pattern in file order that matches, without trying them all.
//!
//! A pattern is looked up by what stands before its first `*` and after its last. Patterns of a level rarely have more
//! than a handful of different lengths there, so a lookup is a handful of hash probes however many patterns there are.
//! Only patterns with the same two ends (`*a*`, `*b*`) are tried one after the other.

use std::hash::BuildHasher;

use foldhash::fast::RandomState;
use hashbrown::HashTable;

/// Patterns of one level and key, in file order.
#[derive(Default)]
pub(super) struct Wildcards {
    patterns: Vec<Pattern>,
    /// The distinct lengths of (prefix, suffix), in bytes.
    shapes: Vec<(usize, usize)>,
    /// Patterns with the same ends, as their places in `patterns`, ascending.
    buckets: HashTable<Vec<usize>>,
    hasher: RandomState,
}

struct Pattern {
    /// What stands between the stars; at least two, empty ones included.
    parts: Vec<Box<str>>,
    node: u32,
}

impl Pattern {
    fn prefix(&self) -> &str {
        self.parts.first().map_or("", |part| part)
    }

    fn suffix(&self) -> &str {
        self.parts.last().map_or("", |part| part)
    }

    /// Whether the parts in the middle are found in order, given that both ends fit.
    fn middle_matches(&self, mut rest: &str) -> bool {
        let middle = self.parts.get(1..self.parts.len() - 1).unwrap_or_default();
        middle.iter().all(|part| match rest.split_once(&**part) {
            Some((_, after)) => {
                rest = after;
                true
            }
            None => false,
        })
    }
}

impl Wildcards {
    pub(super) fn insert(&mut self, pattern: &str, node: u32) {
        let pattern = Pattern { parts: pattern.split('*').map(Into::into).collect(), node };
        let (prefix, suffix) = (pattern.prefix(), pattern.suffix());
        let shape = (prefix.len(), suffix.len());
        if !self.shapes.contains(&shape) {
            self.shapes.push(shape);
        }
        let Self { patterns, buckets, hasher, .. } = self;
        let place = patterns.len();
        let hash = |place: &usize| {
            let pattern = patterns.get(*place).unwrap_or(&pattern);
            hasher.hash_one((pattern.prefix(), pattern.suffix()))
        };
        let same = |bucket: &Vec<usize>| {
            let first = bucket.first().and_then(|first| patterns.get(*first));
            first.is_some_and(|first| first.prefix() == prefix && first.suffix() == suffix)
        };
        let rehash = |bucket: &Vec<usize>| bucket.first().map_or(0, hash);
        buckets.entry(hash(&place), same, rehash).or_insert_with(Vec::new).get_mut().push(place);
        patterns.push(pattern);
    }

    /// The node of the first pattern that matches.
    pub(super) fn find(&self, value: &str) -> Option<u32> {
        let mut first: Option<usize> = None;
        for &(before, after) in &self.shapes {
            let Some(middle_end) = value.len().checked_sub(after).filter(|end| *end >= before) else { continue };
            let ends = (value.get(..before), value.get(before..middle_end), value.get(middle_end..));
            let (Some(prefix), Some(middle), Some(suffix)) = ends else { continue };
            let same = |bucket: &Vec<usize>| {
                let pattern = bucket.first().and_then(|place| self.patterns.get(*place));
                pattern.is_some_and(|pattern| pattern.prefix() == prefix && pattern.suffix() == suffix)
            };
            let Some(bucket) = self.buckets.find(self.hasher.hash_one((prefix, suffix)), same) else { continue };
            let earlier = bucket.iter().take_while(|place| first.is_none_or(|first| **place < first));
            let hit = earlier.copied().find(|place| self.patterns[*place].middle_matches(middle));
            first = hit.or(first);
        }
        first.map(|place| self.patterns[place].node)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The definition, tried on every pattern in turn.
    fn matches(pattern: &str, value: &str) -> bool {
        match pattern.split_once('*') {
            None => pattern == value,
            Some((start, rest)) => value
                .strip_prefix(start)
                .is_some_and(|left| (0..=left.len()).any(|at| left.get(at..).is_some_and(|left| matches(rest, left)))),
        }
    }

    proptest! {
        #[test]
        fn finds_the_first_pattern_in_file_order(
            patterns in prop::collection::vec("[ab本]{0,2}\\*[ab*]{0,3}", 1..8),
            value in "[ab本]{0,5}",
        ) {
            let mut wildcards = Wildcards::default();
            for (node, pattern) in (0..).zip(&patterns) {
                wildcards.insert(pattern, node);
            }
            let expected = (0..).zip(&patterns).find(|(_, pattern)| matches(pattern, &value)).map(|(node, _)| node);
            prop_assert_eq!(wildcards.find(&value), expected);
        }
    }
}
