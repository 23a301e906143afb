//! [`KnownNames`]: checks whether the rules in force have the names in an override. An override with other names has no
//! effect, and is almost always a mistake.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use sluicegate_rules::{Entry, PlanAssignment, RuleSet};

use super::{Scope, Target};

/// Maximum length of a name that is compared with others, in bytes. The time of a comparison is quadratic.
const MAX_COMPARED_BYTES: usize = 64;
/// Maximum number of names that an unknown name is compared with.
const MAX_COMPARED_NAMES: usize = 10_000;
/// Maximum number of unknown names for which the nearest name is searched.
const MAX_SEARCHES: usize = 3;

/// A name in an override that the rules do not have, or a value that looks like a wildcard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownName {
    problem: String,
    nearest: Option<Nearest>,
}

/// The existing name that is most similar to an unknown one.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Nearest {
    name: String,
    is_similar: bool,
}

impl UnknownName {
    /// Creates the error `problem` about `name`, with the nearest of the known names.
    #[must_use]
    pub fn new<'n>(problem: String, name: &str, known: impl Iterator<Item = &'n str>) -> Self {
        Self { problem, nearest: nearest(name, known) }
    }
}

impl fmt::Display for UnknownName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.problem)?;
        match &self.nearest {
            Some(Nearest { name, is_similar: true }) => write!(f, "; did you mean {name:?}?"),
            Some(Nearest { name, is_similar: false }) => write!(f, "; the nearest is {name:?}"),
            None => Ok(()),
        }
    }
}

/// The names of a set of rules.
pub struct KnownNames<'r> {
    rules: &'r RuleSet,
    /// The names in each domain that was looked up so far.
    domains: BTreeMap<String, DomainNames>,
    searches: usize,
}

/// The names of one domain.
#[derive(Default)]
struct DomainNames {
    /// Names and paths of the rules.
    rules: BTreeSet<String>,
    plans: BTreeSet<String>,
    /// The keys of each rule's levels.
    levels: BTreeSet<Vec<Arc<str>>>,
    /// The keys of the levels of rules with plans.
    plan_keys: BTreeSet<Arc<str>>,
}

impl<'r> KnownNames<'r> {
    /// Creates the names of a set of rules.
    #[must_use]
    pub fn new(rules: &'r RuleSet) -> Self {
        Self { rules, domains: BTreeMap::new(), searches: 0 }
    }

    /// Returns the first name in an override that the rules do not have, or else a value that looks like a wildcard.
    pub fn unknown_name(&mut self, target: &Target, value: &str) -> Option<UnknownName> {
        match target.begun() {
            Target::Limit { domain, entries } => self.unknown_key(domain, entries).or_else(|| wildcard_in(entries)),
            Target::Plan { domain, key, value: entity } => {
                let entry = [(key.clone(), entity.clone())];
                self.unknown_plan(domain, key, value).or_else(|| wildcard_in(&entry))
            }
            Target::Switch(Scope::Rule { domain, rule }) => self.unknown_rule(domain, rule),
            Target::Switch(Scope::Domain(domain)) => self.unknown_domain(domain),
            Target::Switch(Scope::Algorithm(name)) => self.unknown_algorithm(name),
            Target::Switch(Scope::Everything) | Target::Rules(_) | Target::Planned { .. } => None,
        }
    }

    /// Returns the first name that the rules do not have and without which the override has no effect. Returns `None`
    /// if the override has an effect.
    ///
    /// A limit of a known domain limits requests with exactly its entries, even if no rule has their keys.
    pub fn name_without_effect(&mut self, target: &Target, value: &str) -> Option<UnknownName> {
        match target.begun() {
            Target::Limit { domain, .. } => self.unknown_domain(domain),
            Target::Plan { domain, key, .. } => self.unknown_plan(domain, key, value),
            Target::Switch(_) | Target::Rules(_) | Target::Planned { .. } => self.unknown_name(target, value),
        }
    }

    fn unknown_domain(&mut self, domain: &str) -> Option<UnknownName> {
        if self.rules.has_domain(domain) {
            return None;
        }
        let rules = self.rules;
        Some(self.unknown(format!("the rules have no domain {domain:?}"), domain, rules.domain_names()))
    }

    fn unknown_algorithm(&mut self, name: &str) -> Option<UnknownName> {
        if Scope::algorithms().any(|known| known == name) {
            return None;
        }
        Some(self.unknown(format!("there is no algorithm {name:?}"), name, Scope::algorithms()))
    }

    fn unknown_rule(&mut self, domain: &str, rule: &str) -> Option<UnknownName> {
        if let Some(unknown) = self.unknown_domain(domain) {
            return Some(unknown);
        }
        if self.names_of(domain).rules.contains(rule) {
            return None;
        }
        let problem = format!("domain {domain:?} has no rule {rule:?}");
        if self.searches >= MAX_SEARCHES {
            return Some(UnknownName { problem, nearest: None });
        }
        let names = self.names_of(domain).rules.clone();
        Some(self.unknown(problem, rule, names.iter().map(String::as_str)))
    }

    fn unknown_plan(&mut self, domain: &str, key: &str, plan: &str) -> Option<UnknownName> {
        if let Some(unknown) = self.unknown_domain(domain) {
            return Some(unknown);
        }
        let plan = match PlanAssignment::read(plan) {
            Ok(assignment) => assignment.plan,
            Err(_) => plan.into(),
        };
        let names = self.names_of(domain);
        if !names.plan_keys.contains(key) {
            let keys = names.plan_keys.clone();
            let problem = format!("domain {domain:?} has no rule with plans and the key {key:?}");
            return Some(self.unknown(problem, key, keys.iter().map(|key| &**key)));
        }
        if names.plans.contains(&*plan) {
            return None;
        }
        let plans = names.plans.clone();
        let problem = format!("domain {domain:?} has no plan {plan:?}");
        Some(self.unknown(problem, &plan, plans.iter().map(String::as_str)))
    }

    /// Checks the keys of a descriptor. Its values can be any: a limit also applies to values without a rule.
    fn unknown_key(&mut self, domain: &str, entries: &[(String, String)]) -> Option<UnknownName> {
        if let Some(unknown) = self.unknown_domain(domain) {
            return Some(unknown);
        }
        let matched = entries.iter().map(|(key, value)| Entry { key, value });
        if self.rules.has_level(domain, matched) {
            return None;
        }
        if self.searches >= MAX_SEARCHES {
            let keys: Vec<&str> = entries.iter().map(|(key, _)| key.as_str()).collect();
            let problem = format!("domain {domain:?} has no rule with the keys {:?}", keys.join(", "));
            return Some(UnknownName { problem, nearest: None });
        }
        let mut lists: Vec<Vec<Arc<str>>> = self.names_of(domain).levels.iter().cloned().collect();
        for (level, (key, _)) in entries.iter().enumerate() {
            let known: BTreeSet<Arc<str>> = lists.iter().filter_map(|keys| keys.get(level)).cloned().collect();
            lists.retain(|keys| keys.get(level).is_some_and(|known| **known == **key));
            if lists.is_empty() {
                let keys: Vec<&str> = entries[..=level].iter().map(|(key, _)| key.as_str()).collect();
                let problem = format!("domain {domain:?} has no rule that begins with {:?}", keys.join(", "));
                return Some(self.unknown(problem, key, known.iter().map(|key| &**key)));
            }
        }
        None
    }

    fn names_of(&mut self, domain: &str) -> &DomainNames {
        let rules = self.rules;
        self.domains.entry(domain.to_owned()).or_insert_with(|| DomainNames::new(rules, domain))
    }

    fn unknown<'n>(&mut self, problem: String, name: &str, known: impl Iterator<Item = &'n str>) -> UnknownName {
        self.searches += 1;
        let nearest = if self.searches <= MAX_SEARCHES { nearest(name, known) } else { None };
        UnknownName { problem, nearest }
    }
}

impl DomainNames {
    fn new(rules: &RuleSet, domain: &str) -> Self {
        let mut names = Self::default();
        for (rule, entries) in rules.rules().iter().zip(rules.entries_of_rules()) {
            if *rule.labels[0] != *domain {
                continue;
            }
            names.rules.insert(rule.labels[1..].join("."));
            names.rules.extend(rule.labels_without_plan().map(|labels| labels[1..].join(".")));
            names.rules.extend(rule.name.as_deref().map(str::to_owned));
            let keys: Vec<Arc<str>> = entries.into_iter().map(|(key, _)| key).collect();
            if let Some(plan) = &rule.plan {
                names.plans.insert(plan.name.to_string());
                // The last level is the entry that names the plan.
                names.plan_keys.extend(keys.iter().rev().skip(1).cloned());
            }
            names.levels.insert(keys);
        }
        names
    }
}

/// Returns the first entry whose value ends with a star, which looks like a wildcard but is compared as text.
fn wildcard_in(entries: &[(String, String)]) -> Option<UnknownName> {
    let (key, value) = entries.iter().find(|(_, value)| value.ends_with('*'))?;
    let entry = format!("{key}={value}");
    let problem = format!("{entry:?} is one entity, because a star is no wildcard in an override");
    Some(UnknownName { problem, nearest: None })
}

/// Returns the known name that is most similar to an unknown one, or `None` if none is similar.
#[must_use]
pub fn similar_name<'n>(name: &str, known: impl Iterator<Item = &'n str>) -> Option<String> {
    nearest(name, known).filter(|nearest| nearest.is_similar).map(|nearest| nearest.name)
}

fn nearest<'n>(name: &str, known: impl Iterator<Item = &'n str>) -> Option<Nearest> {
    if name.len() > MAX_COMPARED_BYTES {
        return None;
    }
    let comparable = known.filter(|known| known.len() <= MAX_COMPARED_BYTES).take(MAX_COMPARED_NAMES);
    let (distance, known) = comparable.map(|known| (strsim::damerau_levenshtein(name, known), known)).min()?;
    let is_similar = distance <= 3 && distance < name.chars().count();
    Some(Nearest { name: known.to_owned(), is_similar })
}

#[cfg(test)]
mod tests {
    use sluicegate_rules::{Options, SourceFile, compile};

    use super::*;

    const RULES: &str = "\
domain: shop
plans:
  default: free
  limits:
    free: { calls: { unit: day, requests_per_unit: 3 } }
    pro: { calls: { unit: day, requests_per_unit: 9 } }
descriptors:
- key: tenant
  rate_limit: { by_plan: calls }
- key: user
  rate_limit: { name: per_user, unit: day, requests_per_unit: 3 }
  descriptors:
  - { key: path, value: /a, rate_limit: { unit: day, requests_per_unit: 1 } }
";

    fn problem(target: &str, value: &str) -> Option<String> {
        let file = SourceFile { name: "a.yaml".into(), text: RULES.into() };
        let (rules, _) = compile(&[file], Options::default()).unwrap();
        let unknown = KnownNames::new(&rules).unknown_name(&Target::parse(target).unwrap(), value);
        unknown.map(|unknown| unknown.to_string())
    }

    #[test]
    fn names_of_the_rules_are_known() {
        for (target, value) in [
            ("limit|shop|user=bob", "5/day"),
            ("limit|shop|user=bob|path=/a", "5/day"),
            ("limit|shop|user=bob|path=/b", "5/day"),
            ("limit|shop|tenant=acme", "5/day"),
            ("plan|shop|tenant=acme", "pro"),
            ("switch|rule|shop|per_user", "off"),
            ("switch|rule|shop|user", "off"),
            ("switch|rule|shop|user.path_/a", "off"),
            ("switch|rule|shop|tenant", "off"),
            ("switch|rule|shop|tenant.plan_pro", "off"),
            ("switch|domain|shop", "off"),
            ("switch|kind|gcra", "off"),
            ("switch|kind|shedding", "off"),
            ("switch|everything", "off"),
        ] {
            assert_eq!(problem(target, value), None, "{target}");
        }
    }

    #[test]
    fn an_unknown_name_is_reported_with_the_nearest_one() {
        for (target, value, expected) in [
            ("limit|shopp|user=bob", "5/day", "the rules have no domain \"shopp\"; did you mean \"shop\"?"),
            ("switch|domain|elsewhere", "off", "the rules have no domain \"elsewhere\"; the nearest is \"shop\""),
            ("plan|shopp|tenant=acme", "pro", "the rules have no domain \"shopp\"; did you mean \"shop\"?"),
            ("switch|rule|shopp|user", "off", "the rules have no domain \"shopp\"; did you mean \"shop\"?"),
            (
                "limit|shop|usr=bob",
                "5/day",
                "domain \"shop\" has no rule that begins with \"usr\"; did you mean \"user\"?",
            ),
            (
                "limit|shop|user=bob|pth=/a",
                "5/day",
                "domain \"shop\" has no rule that begins with \"user, pth\"; did you mean \"path\"?",
            ),
            (
                "limit|shop|tenant=a|path=/a",
                "5/day",
                "domain \"shop\" has no rule that begins with \"tenant, path\"; did you mean \"plan\"?",
            ),
            ("plan|shop|tenant=acme", "prro", "domain \"shop\" has no plan \"prro\"; did you mean \"pro\"?"),
            (
                "plan|shop|tenant=acme",
                "enterprise",
                "domain \"shop\" has no plan \"enterprise\"; the nearest is \"free\"",
            ),
            (
                "plan|shop|user=bob",
                "pro",
                "domain \"shop\" has no rule with plans and the key \"user\"; the nearest is \"tenant\"",
            ),
            ("switch|rule|shop|peruser", "off", "domain \"shop\" has no rule \"peruser\"; did you mean \"per_user\"?"),
            ("limit|shop|user=a*", "5/day", "\"user=a*\" is one entity, because a star is no wildcard in an override"),
            ("plan|shop|tenant=*", "pro", "\"tenant=*\" is one entity, because a star is no wildcard in an override"),
            ("switch|kind|gcrs", "off", "there is no algorithm \"gcrs\"; did you mean \"gcra\"?"),
        ] {
            assert_eq!(problem(target, value).as_deref(), Some(expected), "{target}");
        }
    }

    #[test]
    fn a_limit_has_an_effect_without_a_rule_but_not_without_its_domain() {
        let file = SourceFile { name: "a.yaml".into(), text: RULES.into() };
        let (rules, _) = compile(&[file], Options::default()).unwrap();
        let mut names = KnownNames::new(&rules);
        let mut has_effect =
            |target: &str, value| names.name_without_effect(&Target::parse(target).unwrap(), value).is_none();
        assert!(has_effect("limit|shop|usr=bob", "5/day"));
        assert!(has_effect("limit|shop|user=a*", "5/day") && has_effect("plan|shop|tenant=*", "pro"));
        assert!(!has_effect("limit|shopp|user=bob", "5/day"));
        assert!(!has_effect("plan|shop|tenant=acme", "prro"));
        assert!(!has_effect("switch|rule|shop|peruser", "off"));
    }

    #[test]
    fn the_search_for_the_nearest_name_is_bounded() {
        assert_eq!(nearest(&"x".repeat(MAX_COMPARED_BYTES + 1), ["x"].into_iter()), None);
        let file = SourceFile { name: "a.yaml".into(), text: RULES.into() };
        let (rules, _) = compile(&[file], Options::default()).unwrap();
        let mut names = KnownNames::new(&rules);
        let target = Target::Switch(Scope::Domain("shopp".to_owned()));
        for search in 1..=MAX_SEARCHES + 1 {
            let unknown = names.unknown_name(&target, "off").unwrap();
            assert_eq!(unknown.nearest.is_some(), search <= MAX_SEARCHES, "{search}");
        }
    }
}
