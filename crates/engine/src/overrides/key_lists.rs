//! [`KeyLists`]: the lists of keys that the targets of overrides have, for the lookups of a decision.

use std::{cmp::Reverse, collections::HashMap};

use foldhash::fast::RandomState;
use sluicegate_rules::Entry;

/// Maximum number of lists of keys per domain. Each may cost every request of the domain a lookup.
pub(super) const MAX_KEY_LISTS: usize = 32;

/// The lists of keys of the overrides of each domain.
#[derive(Clone, Default)]
pub(super) struct KeyLists(HashMap<Box<str>, Vec<KeyList>, RandomState>);

/// The keys of a target in their order, and the number of overrides whose targets have these keys.
#[derive(Clone)]
pub(super) struct KeyList {
    pub(super) keys: Box<[Box<str>]>,
    overrides: u32,
}

impl KeyList {
    fn has_keys(&self, keys: &[&str]) -> bool {
        self.keys.iter().map(|key| &**key).eq(keys.iter().copied())
    }

    /// Returns whether a descriptor begins with entries that have these keys.
    pub(super) fn is_prefix_of(&self, entries: &[Entry<'_>]) -> bool {
        self.keys.len() <= entries.len() && self.keys.iter().zip(entries).all(|(key, entry)| **key == *entry.key)
    }
}

impl KeyLists {
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the lists of a domain, longest first.
    pub(super) fn of(&self, domain: &str) -> &[KeyList] {
        match self.0.get(domain) {
            Some(lists) => lists,
            None => &[],
        }
    }

    /// Returns the number of overrides whose targets have these keys.
    pub(super) fn count(&self, domain: &str, keys: &[&str]) -> u32 {
        match self.of(domain).iter().find(|list| list.has_keys(keys)) {
            Some(list) => list.overrides,
            None => 0,
        }
    }

    /// Returns whether the domain has this list of keys already, or fewer lists than the maximum.
    pub(super) fn can_add(&self, domain: &str, keys: &[&str]) -> bool {
        let lists = self.of(domain);
        lists.len() < MAX_KEY_LISTS || lists.iter().any(|list| list.has_keys(keys))
    }

    /// Counts an override whose target has these keys.
    pub(super) fn add(&mut self, domain: &str, keys: &[&str]) {
        let lists = self.0.entry(domain.into()).or_default();
        match lists.iter_mut().find(|list| list.has_keys(keys)) {
            Some(list) => list.overrides += 1,
            None => {
                lists.push(KeyList { keys: keys.iter().map(|key| (*key).into()).collect(), overrides: 1 });
                lists.sort_by_key(|list| Reverse(list.keys.len()));
            }
        }
    }

    /// Removes an override whose target has these keys.
    pub(super) fn remove(&mut self, domain: &str, keys: &[&str]) {
        let Some(lists) = self.0.get_mut(domain) else {
            return;
        };
        lists.retain_mut(|list| {
            list.overrides -= u32::from(list.has_keys(keys));
            list.overrides > 0
        });
        if lists.is_empty() {
            self.0.remove(domain);
        }
    }
}
