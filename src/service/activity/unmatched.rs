//! [`UnmatchedTable`]: the descriptors that no rule matches, with the most similar rule or domain; they are logged when
//! they begin.

use std::{
    cmp::Reverse,
    collections::{HashMap, hash_map::Entry},
    sync::{Arc, Weak},
};

use serde::{Deserialize, Serialize};

use crate::{
    algorithm::Micros,
    engine::{Snapshot, UnmatchedDescriptors, UnmatchedGroup, overrides::similar_name},
    rules::{RuleEntries, RuleSet},
};

/// Time without descriptors of a group after which the group is logged again.
const QUIET_PERIOD: Micros = Micros::from_secs(600);
/// Maximum number of groups that one poll logs.
const MAX_MESSAGES: usize = 10;
/// Maximum number of rules whose keys are compared.
const MAX_COMPARED_RULES: usize = 2_000;
/// Maximum edit distance of two similar first keys, in letters.
const MAX_DISTANCE: usize = 2;

/// Descriptors without a rule that have the same domain and the same keys, or the same unknown domain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unmatched {
    /// The domain; `other` for descriptors that are counted together, because there are too many groups.
    pub domain: String,
    /// The keys in their order; empty for an unknown domain.
    pub keys: Vec<String>,
    /// Whether the rules did not have the domain.
    pub is_unknown_domain: bool,
    /// Number of descriptors in the last five minutes.
    pub recent: u64,
    /// Number of descriptors since the start of the process.
    pub total: u64,
    /// Time of the first descriptor, in microseconds since the Unix epoch.
    pub first: u64,
    /// Time of the latest descriptor, in microseconds since the Unix epoch.
    pub latest: u64,
    /// Path of the rule with the most similar keys, or the domain that is most similar to an unknown one; empty if there
    /// is none.
    pub nearest: String,
}

/// Adds up the groups of this instance and of others. Returns the sums in descending order of `recent`.
pub(super) fn add<'u>(own: &'u [Unmatched], others: impl Iterator<Item = &'u Unmatched>) -> Vec<Unmatched> {
    let mut sums: HashMap<(String, Vec<String>, bool), Unmatched> = HashMap::new();
    for group in own.iter().chain(others) {
        let name = (group.domain.clone(), group.keys.clone(), group.is_unknown_domain);
        match sums.get_mut(&name) {
            Some(sum) => {
                sum.recent = sum.recent.saturating_add(group.recent);
                sum.total = sum.total.saturating_add(group.total);
                sum.first = sum.first.min(group.first);
                sum.latest = sum.latest.max(group.latest);
            }
            None => drop(sums.insert(name, group.clone())),
        }
    }
    let mut list: Vec<Unmatched> = sums.into_values().collect();
    list.sort_by_cached_key(|group| (Reverse((group.recent, group.total)), group.domain.clone(), group.keys.clone()));
    list
}

/// The domain and the keys of descriptors, and whether the domain is unknown.
type Name = (Arc<str>, Arc<[String]>, bool);

/// The descriptors without a rule of this instance.
#[derive(Default)]
pub(super) struct UnmatchedTable {
    /// When each group was seen last.
    seen: HashMap<Name, Micros>,
    /// The path of the most similar rule, or the most similar domain, for each group.
    nearest: HashMap<Name, Option<String>>,
    /// The rules that were compared. Weak, because the table must not delay the release of replaced rules.
    compared: Weak<Snapshot>,
}

impl UnmatchedTable {
    /// Logs the groups that have begun, and finds the most similar rule or domain of each new group.
    pub(super) fn update(&mut self, descriptors: &UnmatchedDescriptors, snapshot: &Arc<Snapshot>) {
        let groups = descriptors.groups();
        if groups.is_empty() {
            return;
        }
        if !self.compared.upgrade().is_some_and(|compared| compared.has_same_rules(snapshot)) {
            self.nearest.clear();
        }
        self.compared = Arc::downgrade(snapshot);
        let mut search = None;
        for group in &groups {
            if let Entry::Vacant(vacant) = self.nearest.entry(name(group)) {
                let search = search.get_or_insert_with(|| Search::new(snapshot.rule_set()));
                vacant.insert(search.nearest(group));
            }
        }
        for group in self.begun(groups).iter().take(MAX_MESSAGES) {
            let nearest = self.nearest.get(&name(group)).cloned().flatten();
            if group.is_unknown_domain {
                tracing::info!(
                    domain = &*group.domain,
                    nearest_domain = nearest,
                    "the rules do not have this domain, so its requests have no limit"
                );
                continue;
            }
            tracing::info!(
                domain = &*group.domain,
                keys = group.keys.join(","),
                nearest_rule = nearest,
                "no rule matches these descriptors, so they have no limit"
            );
        }
    }

    /// Returns the groups that have descriptors for the first time, or after more than [`QUIET_PERIOD`] without any.
    fn begun(&mut self, groups: Vec<UnmatchedGroup>) -> Vec<UnmatchedGroup> {
        let mut begun = Vec::new();
        for group in groups {
            let before = self.seen.insert(name(&group), group.latest);
            if before.is_none_or(|before| group.latest - before > QUIET_PERIOD) {
                begun.push(group);
            }
        }
        begun
    }

    /// Returns up to `max` groups, the most frequent ones of the last minutes first.
    pub(super) fn list(&self, descriptors: &UnmatchedDescriptors, max: usize, now: Micros) -> Vec<Unmatched> {
        let mut groups = descriptors.groups();
        groups.sort_by_cached_key(|group| Reverse((group.recent(now), group.total)));
        let mut list = Vec::new();
        for group in groups.into_iter().take(max) {
            list.push(Unmatched {
                domain: group.domain.to_string(),
                keys: group.keys.to_vec(),
                is_unknown_domain: group.is_unknown_domain,
                recent: group.recent(now),
                total: group.total,
                first: group.first.get(),
                latest: group.latest.get(),
                nearest: self.nearest.get(&name(&group)).cloned().flatten().unwrap_or_default(),
            });
        }
        list
    }
}

fn name(group: &UnmatchedGroup) -> Name {
    (Arc::clone(&group.domain), Arc::clone(&group.keys), group.is_unknown_domain)
}

/// A search for the rule with the most similar keys, or the most similar domain.
struct Search<'r> {
    rules: &'r RuleSet,
    /// The keys and values of each rule, by its id.
    entries: Vec<RuleEntries>,
}

impl<'r> Search<'r> {
    fn new(rules: &'r RuleSet) -> Self {
        Self { rules, entries: rules.entries_of_rules() }
    }

    /// Returns the path of the most similar rule; for an unknown domain, the most similar domain.
    fn nearest(&self, group: &UnmatchedGroup) -> Option<String> {
        if group.is_unknown_domain {
            return similar_name(&group.domain, self.rules.domain_names());
        }
        self.nearest_rule(&group.domain, &group.keys)
    }

    /// Returns the path of the rule of a domain that shares the most keys with a descriptor, or else of the one with
    /// a first key that differs by one or two letters.
    fn nearest_rule(&self, domain: &str, keys: &[String]) -> Option<String> {
        let first = keys.first()?;
        let mut nearest: Option<Distance> = None;
        let of_domain = self.rules.rules().iter().enumerate().filter(|(_, rule)| *rule.labels[0] == *domain);
        for (id, _) in of_domain.take(MAX_COMPARED_RULES) {
            let entries = &self.entries[id];
            let Some((known_first, _)) = entries.first() else {
                continue;
            };
            let shared = keys.iter().filter(|key| entries.iter().any(|(known, _)| **known == ***key)).count();
            let letters = if shared == 0 { strsim::damerau_levenshtein(known_first, first) } else { 0 };
            if letters > MAX_DISTANCE {
                continue;
            }
            let distance = Distance {
                shared: Reverse(shared),
                has_other_first_key: **known_first != **first,
                letters,
                levels: entries.len().abs_diff(keys.len()),
                id,
            };
            if nearest.as_ref().is_none_or(|nearest| distance < *nearest) {
                nearest = Some(distance);
            }
        }
        Some(self.rules.rules()[nearest?.id].path())
    }
}

/// The difference between the keys of a rule and those of a descriptor. Two distances are compared by their first
/// field that differs.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Distance {
    /// Number of keys that both have.
    shared: Reverse<usize>,
    has_other_first_key: bool,
    /// Distance of the first keys, if no key is shared.
    letters: usize,
    /// Difference of the numbers of keys.
    levels: usize,
    id: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        engine::{Resources, Statistics, StatisticsSettings},
        rules::{Options, SourceFile, compile},
    };

    const RULES: &str = "domain: api
descriptors:
- { key: user, rate_limit: { unit: day, requests_per_unit: 3 } }
- key: path
  descriptors:
  - { key: user, rate_limit: { unit: day, requests_per_unit: 3 } }
";

    fn snapshot() -> Arc<Snapshot> {
        let file = SourceFile { name: "a.yaml".into(), text: RULES.into() };
        let (rules, _) = compile(&[file], Options::default()).unwrap();
        let statistics = Statistics::new(1, StatisticsSettings { max_dynamic_series: 70, near_limit_ratio: 0.8 });
        Arc::new(Snapshot::new(rules, &statistics, &Resources::default()))
    }

    #[test]
    fn the_nearest_rule_shares_keys_or_begins_with_a_similar_one() {
        let snapshot = snapshot();
        let search = Search::new(snapshot.rule_set());
        let nearest = |domain: &str, keys: &[&str]| {
            let keys: Vec<String> = keys.iter().map(|key| (*key).to_owned()).collect();
            search.nearest_rule(domain, &keys)
        };
        assert_eq!(nearest("api", &["user", "path"]).as_deref(), Some("api.path.user"));
        assert_eq!(nearest("api", &["user", "method"]).as_deref(), Some("api.user"));
        assert_eq!(nearest("api", &["usr"]).as_deref(), Some("api.user"));
        assert_eq!(nearest("api", &["pth", "x"]).as_deref(), Some("api.path.user"));
        assert_eq!(nearest("api", &["remote_address"]), None);
        assert_eq!(nearest("api", &[]), None);
        assert_eq!(nearest("shop", &["user"]), None);
    }

    #[test]
    fn groups_of_instances_are_summed_and_sorted() {
        let group = |key: &str, recent, total, first, latest| Unmatched {
            domain: "api".into(),
            keys: vec![key.into()],
            recent,
            total,
            first,
            latest,
            nearest: "api.user".into(),
            ..Unmatched::default()
        };
        let own = vec![group("usr", 1, 5, 10, 20), group("x", 4, 4, 1, 2)];
        let others = [group("usr", 6, 7, 5, 15), group("y", 4, 9, 1, 2)];
        let sum = add(&own, others.iter());
        let expected = [group("usr", 7, 12, 5, 20), group("y", 4, 9, 1, 2), group("x", 4, 4, 1, 2)];
        assert_eq!(sum, expected);
    }
}
