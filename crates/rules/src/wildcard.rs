//! [`Wildcards`]: finds the first pattern in file order that matches a value, without testing all patterns.
//!
//! A pattern is indexed by its prefix, which is the text before its first `*`, and its suffix, which is the text after
//! its last. The patterns of a level rarely have more than a handful of different pairs of prefix and suffix lengths.
//! A lookup therefore needs a handful of hash probes, independently of the number of patterns. Only patterns with the
//! same prefix and suffix (`*a*`, `*b*`) are tested one after the other.

use std::collections::HashMap;

use foldhash::fast::RandomState;

type TextMap<V> = HashMap<Box<str>, V, RandomState>;

/// Index of the patterns of one level and key, in file order.
#[derive(Clone, Default)]
pub(super) struct Wildcards {
    patterns: Vec<Pattern>,
    /// Distinct pairs of prefix and suffix length, in bytes.
    end_lengths: Vec<(usize, usize)>,
    /// Ascending indices in `patterns` of the patterns with the same prefix and suffix, by prefix and by suffix.
    by_ends: TextMap<TextMap<Vec<usize>>>,
}

#[derive(Clone)]
struct Pattern {
    /// Texts between the `*`, including empty ones; at least two.
    parts: Vec<Box<str>>,
    node: u32,
}

impl Pattern {
    fn prefix(&self) -> &str {
        match self.parts.first() {
            Some(prefix) => prefix,
            None => "",
        }
    }

    fn suffix(&self) -> &str {
        match self.parts.last() {
            Some(suffix) => suffix,
            None => "",
        }
    }

    /// Returns whether `remaining`, the value without prefix and suffix, contains the middle parts in order.
    fn middle_matches(&self, mut remaining: &str) -> bool {
        let middle = self.parts.get(1..self.parts.len() - 1).unwrap_or_default();
        for part in middle {
            let Some((_, after)) = remaining.split_once(&**part) else {
                return false;
            };
            remaining = after;
        }
        true
    }
}

impl Wildcards {
    pub(super) fn insert(&mut self, pattern: &str, node: u32) {
        let pattern = Pattern { parts: pattern.split('*').map(Into::into).collect(), node };
        let prefix = pattern.prefix();
        let suffix = pattern.suffix();
        let lengths = (prefix.len(), suffix.len());
        if !self.end_lengths.contains(&lengths) {
            self.end_lengths.push(lengths);
        }
        let by_suffix = self.by_ends.entry(prefix.into()).or_default();
        by_suffix.entry(suffix.into()).or_default().push(self.patterns.len());
        self.patterns.push(pattern);
    }

    /// Returns the number of patterns.
    pub(super) fn len(&self) -> usize {
        self.patterns.len()
    }

    /// Returns the node of the first pattern in file order that matches `value`.
    pub(super) fn find(&self, value: &str) -> Option<u32> {
        let mut first: Option<usize> = None;
        for &(prefix_len, suffix_len) in &self.end_lengths {
            let Some(middle_end) = value.len().checked_sub(suffix_len).filter(|end| *end >= prefix_len) else {
                continue;
            };
            let Some(prefix) = value.get(..prefix_len) else { continue };
            let Some(middle) = value.get(prefix_len..middle_end) else { continue };
            let Some(suffix) = value.get(middle_end..) else { continue };
            let Some(by_suffix) = self.by_ends.get(prefix) else { continue };
            let Some(same_ends) = by_suffix.get(suffix) else { continue };
            for index in same_ends {
                // The indices are ascending, so no further one precedes the known match.
                if first.is_some_and(|first| *index >= first) {
                    break;
                }
                if self.patterns[*index].middle_matches(middle) {
                    first = Some(*index);
                    break;
                }
            }
        }
        first.map(|index| self.patterns[index].node)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{super::fuzz::matches, *};

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

    #[test]
    fn a_pattern_with_other_ends_takes_precedence_if_it_comes_first() {
        let mut wildcards = Wildcards::default();
        for (node, pattern) in (0..).zip(["b*", "*c", "a*"]) {
            wildcards.insert(pattern, node);
        }
        assert_eq!(wildcards.find("ac"), Some(1));
        assert_eq!(wildcards.find("ab"), Some(2));
        assert_eq!(wildcards.find("bc"), Some(0));
    }
}
