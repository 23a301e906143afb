//! [`RuleSet`]: the compiled rules, immutable and searched without locks and without allocation.
//!
//! Each level of a lookup takes one or two hash probes, so the cost of a lookup does not depend on the number of rules.

mod build;

use std::{
    collections::HashMap,
    hash::BuildHasher,
    sync::{Arc, OnceLock},
};

use foldhash::fast::RandomState;
use hashbrown::HashTable;
use sluicegate_algorithm::{Consistency, Micros};
use sluicegate_calendar::Anchor;
use smallvec::SmallVec;

use super::{
    cost_per_hit::CostPerHit,
    currency::Currency,
    denial::Denial,
    diagnostic::Location,
    ip_prefix::IpPrefix,
    limit::{FailurePolicy, Limit},
    metadata::Metadata,
    plan_assignment::PlanAssignment,
    wildcard::Wildcards,
};

/// One key and its value in a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// The key.
    pub key: &'a str,
    /// The value, which may be empty.
    pub value: &'a str,
}

/// Labels of a rule in statistics: the domain, then `key` or `key_value` for each level.
///
/// The text of each label is shared between rules.
pub type Labels = Arc<[Arc<str>]>;

/// A rule: the limit, if any, of the descriptors whose last entry matches its level.
#[derive(Clone, Debug)]
pub struct Rule {
    /// Index in [`RuleSet::rules`].
    pub id: usize,
    /// The limit, shared between rules with equal limits; `None` if unlimited.
    pub limit: Option<Arc<Limit>>,
    /// Ids of the further limits of the rule, which are charged together with this one. Each is a rule of its own here.
    pub further: Box<[u32]>,
    /// Whether the rule is a further limit of another one, so that its name is part of the names of its counters.
    pub is_further: bool,
    /// Name of the limit, if it has one.
    pub name: Option<Arc<str>>,
    pub(crate) policy: OnceLock<Arc<str>>,
    /// Names of the limits of a request that do not apply if this limit does.
    pub replaces: Vec<String>,
    /// Whether the limit is counted and measured, but never enforced.
    pub shadow_mode: bool,
    /// Whether the rule denies a request only if every quota rule of the request is over its limit.
    pub quota_mode: bool,
    /// Whether there are statistics for each combination of values.
    pub detailed_metric: bool,
    /// Failure policy; `None` if the setting `decisions.on_error` applies.
    pub on_error: Option<FailurePolicy>,
    /// How exactly the counter is shared between instances.
    pub consistency: Consistency,
    /// Whether the limit has holders or classes, so that decisions depend on the request's context.
    pub needs_context: bool,
    /// Classes that share the limit, in the order of its class table, without the last one for all other requests.
    pub classes: Box<[Box<str>]>,
    /// Whether denials are reported as overload that the caller did not cause.
    pub sheds: bool,
    /// Whether responses do not mention the limit (`visible: false`).
    pub is_hidden: bool,
    /// Maximum of the random time that is added to `Retry-After`.
    pub retry_jitter: Micros,
    /// Factor by which the hits of a request count; `None` for 1.
    pub cost_per_hit: Option<Arc<CostPerHit>>,
    /// Unit in which hits are displayed.
    pub currency: Option<Box<Currency>>,
    /// Message, headers and status of denials.
    pub denial: Option<Arc<Denial>>,
    /// Higher limits that apply while a resource has spare capacity.
    pub elastic: Option<Box<Elastic>>,
    /// Plan that the limit belongs to, and the rules of the other plans.
    pub plan: Option<Box<Plan>>,
    /// One instance's share of the limit; `None` if that is the whole limit.
    pub divided_limit: Option<Arc<Limit>>,
    /// Free-form data for the response.
    pub metadata: Option<Metadata>,
    /// The domain and the levels as labels of statistics.
    pub labels: Labels,
    /// Whether any level puts the request's value into the statistics.
    pub dynamic_labels: bool,
    /// File that defines the rule.
    pub file: Arc<str>,
    /// Position of the rule in the file.
    pub location: Location,
}

/// A node of the tree of rules: one level of a descriptor.
#[derive(Clone, Debug)]
pub struct Node {
    /// Key of the entry, shared between levels with equal keys.
    pub key: Arc<str>,
    /// Values that the level matches.
    pub segment: Segment,
    /// Whether the request's value is put into the statistics.
    pub value_to_metric: bool,
    /// Prefix lengths, if the value is an address that is counted by its network prefix.
    pub ip_prefix: Option<IpPrefix>,
    /// Kind of modifier entry; `None` if the entry is part of the counter's name.
    pub modifier: Option<ModifierEntry>,
    pub(crate) rule: Option<u32>,
    pub(crate) has_children: bool,
    /// Position of the level in its file.
    pub location: Location,
}

/// A limit that is higher while a resource has spare capacity.
#[derive(Clone, Debug)]
pub struct Elastic {
    /// Name of the resource.
    pub resource: Box<str>,
    /// Utilization up to which the highest limit applies, from 0 to 1.
    pub idle: f64,
    /// Utilization from which only the rule's own limit applies, from 0 to 1.
    pub busy: f64,
    /// Limits above the rule's own, in ascending steps of 1/[`Self::STEPS`] of the extra capacity.
    pub steps: Box<[Limit]>,
}

impl Elastic {
    /// Number of steps between the rule's own limit and the highest one.
    pub const STEPS: usize = 50;

    /// Returns the limit at this utilization of the resource, from 0 to 1. A higher utilization results in a lower
    /// limit.
    ///
    /// Returns `None` if the resource has no spare capacity, so that the rule's own limit applies.
    #[must_use]
    pub fn at(&self, utilization: f64) -> Option<&Limit> {
        let spare = (self.busy - utilization) / (self.busy - self.idle);
        let parts = (spare.clamp(0.0, 1.0) * Self::STEPS as f64) as usize;
        self.steps.get(parts.checked_sub(1)?)
    }
}

/// The plan that a rule belongs to.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Name of the plan.
    pub name: Box<str>,
    /// Rules of all plans for the same descriptor.
    plans: Arc<Plans>,
}

/// Rules of one descriptor by plan name, from which the request's plan selects one, and the plans of entities.
#[derive(Debug, Default)]
pub(crate) struct Plans {
    pub(crate) rules: HashMap<Box<str>, u32>,
    pub(crate) entities: Arc<PlanAssignments>,
}

/// Plans of entities, by the key and the value of an entry.
pub(crate) type PlanAssignments = HashMap<Box<str>, HashMap<Box<str>, PlanAssignment>>;

/// Kind of a modifier entry. Modifier entries are not part of the counter's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModifierEntry {
    /// The plan of the request.
    Plan,
    /// The class of the request.
    Class,
    /// The holder of the slots that the request takes.
    Holder,
    /// The value that selects the cost of a hit.
    Cost,
}

/// The values that a level matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Segment {
    /// Exactly this value.
    Value(Box<str>),
    /// Values that match the pattern, with a counter for each value.
    Pattern(Box<str>),
    /// Values that match the pattern, with one counter for all of them.
    Shared(Box<str>),
    /// Any value.
    Any,
}

/// The nodes that a descriptor matched, one for each of its entries.
pub type Path<'r> = SmallVec<[&'r Node; 6]>;

/// Result of looking up a descriptor.
#[derive(Debug)]
pub enum Lookup<'r> {
    /// No rule file defines the domain.
    UnknownDomain,
    /// No rule matches, or the matching level has no `rate_limit`.
    NoLimit,
    /// The rule that applies, and the nodes that the descriptor matched.
    Rule(&'r Rule, Path<'r>),
}

/// The nodes with the same parent and key.
#[derive(Clone)]
pub(crate) struct Group {
    parent: u32,
    key: Arc<str>,
    any: Option<u32>,
    has_values: bool,
    /// Boxed because few groups have patterns.
    wildcards: Option<Box<Wildcards>>,
}

/// Settings of a domain, which apply to all of its rules.
#[derive(Clone, Debug, Default)]
pub struct DomainSettings {
    /// Whether a request takes hits from all of its limits or from none.
    pub charge_all: bool,
    /// Keys of the entries that select a counter's shard; if empty, the whole descriptor selects it.
    pub shard_by: Vec<Box<str>>,
}

/// Keys and values of the levels of a rule.
pub type RuleEntries = Box<[(Arc<str>, Box<str>)]>;

/// A compiled set of rules.
#[derive(Clone, Default)]
pub struct RuleSet {
    nodes: Vec<Node>,
    groups: Vec<Group>,
    rules: Vec<Rule>,
    /// Settings of the domains that have any; most have none.
    domains: HashMap<Box<str>, DomainSettings, RandomState>,
    /// Groups by (parent node, key). A domain is the key of a group without a parent.
    by_key: HashTable<u32>,
    /// (group, node) by (group, exact value).
    by_value: HashTable<(u32, u32)>,
    hasher: RandomState,
}

/// Parent of the groups that represent domains.
const NO_PARENT: u32 = u32::MAX;

impl RuleSet {
    /// Returns all rules in the order of files and lines.
    #[must_use]
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// Returns all rules for changes that do not affect their meaning.
    pub fn rules_mut(&mut self) -> &mut [Rule] {
        &mut self.rules
    }

    /// Returns the keys and values of the levels of each rule, by the rule's id. Empty for further limits, and for the
    /// rules of plans other than the default plan.
    ///
    /// The value of a level that matches any value is empty, and that of a pattern is its text.
    #[must_use]
    pub fn entries_of_rules(&self) -> Vec<RuleEntries> {
        let mut parents = vec![NO_PARENT; self.nodes.len()];
        for (group, node) in &self.by_value {
            parents[*node as usize] = self.groups[*group as usize].parent;
        }
        for group in &self.groups {
            if let Some(node) = group.any {
                parents[node as usize] = group.parent;
            }
        }
        let mut entries = vec![Box::default(); self.rules.len()];
        for (id, node) in self.nodes.iter().enumerate() {
            let Some(rule) = node.rule else { continue };
            let mut levels = Vec::new();
            let mut at = id;
            // The node without a parent is the domain.
            while parents[at] != NO_PARENT {
                let node = &self.nodes[at];
                levels.push((Arc::clone(&node.key), node.exact_value().unwrap_or_default().into()));
                at = parents[at] as usize;
            }
            levels.reverse();
            entries[rule as usize] = levels.into();
        }
        entries
    }

    /// Returns the settings of the domain, or `None` if it has only default settings.
    #[must_use]
    pub fn settings_of(&self, domain: &str) -> Option<&DomainSettings> {
        if self.domains.is_empty() { None } else { self.domains.get(domain) }
    }

    /// Returns whether at least one domain is defined.
    #[must_use]
    pub fn has_domains(&self) -> bool {
        !self.groups.is_empty()
    }

    /// Returns the number of domains.
    #[must_use]
    pub fn domains(&self) -> usize {
        self.domain_names().count()
    }

    /// Returns the names of the domains.
    pub fn domain_names(&self) -> impl Iterator<Item = &str> {
        self.groups.iter().filter(|group| group.parent == NO_PARENT).map(|group| &*group.key)
    }

    /// Returns whether the domain is defined.
    #[must_use]
    pub fn has_domain(&self, domain: &str) -> bool {
        self.domain_root(domain).is_some()
    }

    /// Returns whether the domain has a level that matches these entries, with or without a rule.
    #[must_use]
    pub fn has_level<'e>(&self, domain: &str, entries: impl Iterator<Item = Entry<'e>>) -> bool {
        let Some(mut node) = self.domain_root(domain) else {
            return false;
        };
        for entry in entries {
            let Some(child) = self.child_of(node, entry) else {
                return false;
            };
            node = child;
        }
        true
    }

    /// Looks up the rule of a descriptor, level by level.
    ///
    /// At each level, the exact value takes precedence over the first matching pattern, and a pattern over the key
    /// without a value. The lookup never returns to another branch. A rule applies only if the last entry matches its
    /// level.
    #[must_use]
    pub fn find<'e>(&self, domain: &str, entries: impl Iterator<Item = Entry<'e>> + Clone) -> Lookup<'_> {
        let Some(mut node_id) = self.domain_root(domain) else {
            return Lookup::UnknownDomain;
        };
        let mut path = Path::new();
        for entry in entries.clone() {
            let Some(child) = self.child_of(node_id, entry) else {
                return Lookup::NoLimit;
            };
            path.push(self.node(child));
            node_id = child;
        }
        match self.rule_of(self.node(node_id)) {
            Some(rule @ Rule { plan: None, .. }) => Lookup::Rule(rule, path),
            Some(rule) => Lookup::Rule(self.select_plan_rule(rule, entries, &path), path),
            None => Lookup::NoLimit,
        }
    }

    /// Returns the rule of the request's plan, which is the plan in its plan entry or the plan of one of its entities.
    ///
    /// Returns `default`, the rule of the default plan, if the request has no plan or an unknown one.
    pub(crate) fn select_plan_rule<'r, 'e>(
        &'r self,
        default: &'r Rule,
        entries: impl Iterator<Item = Entry<'e>>,
        path: &Path<'_>,
    ) -> &'r Rule {
        let Some(Plan { plans, .. }) = default.plan.as_deref() else {
            return default;
        };
        let mut named = None;
        let mut assigned = None;
        for (entry, node) in entries.zip(path) {
            if node.modifier == Some(ModifierEntry::Plan) {
                named = Some(entry.value);
            } else if let Some(assignment) = plans.assignment(entry) {
                assigned = Some(&*assignment.plan);
            }
        }
        let Some(name) = named.or(assigned) else {
            return default;
        };
        match plans.rules.get(name) {
            Some(rule) => &self.rules[*rule as usize],
            None => default,
        }
    }

    /// Returns when the calendar windows of the request's entity begin, where its plan assignment says so.
    #[must_use]
    pub fn assigned_anchor(&self, rule: &Rule, entries: &[Entry<'_>]) -> Option<&Anchor> {
        let plan = self.rules[rule.id].plan.as_ref()?;
        for entry in entries.iter().rev() {
            if let Some(assignment) = plan.plans.assignment(*entry) {
                return Some(&assignment.anchor);
            }
        }
        None
    }

    /// Returns the further limits of a rule.
    pub fn further_limits(&self, rule: &Rule) -> impl Iterator<Item = &Rule> {
        rule.further.iter().filter_map(|id| self.rules.get(*id as usize))
    }

    /// Returns the rule that applies to a descriptor.
    #[must_use]
    pub fn rule_for(&self, domain: &str, entries: &[Entry<'_>]) -> Option<&Rule> {
        if let Lookup::Rule(rule, _) = self.find(domain, entries.iter().copied()) { Some(rule) } else { None }
    }

    /// Returns the rule of the plan `name` for the descriptor of `rule`, if the plan exists.
    #[must_use]
    pub fn rule_for_plan(&self, rule: &Rule, name: &str) -> Option<&Rule> {
        let id = rule.plan.as_ref()?.plans.rules.get(name)?;
        self.rules.get(*id as usize)
    }

    /// Returns the orders of the entries in which a rule applies to them, at most two: the first ones by the order of
    /// `entries`. Empty if no rule applies in any order.
    ///
    /// Only orders that follow the tree of rules are tried, so the effort is bounded by the number of rules.
    #[must_use]
    pub fn orders<'e>(&self, domain: &str, entries: &[Entry<'e>]) -> SmallVec<[SmallVec<[Entry<'e>; 3]>; 2]> {
        let mut orders = SmallVec::new();
        if let Some(root) = self.domain_root(domain) {
            self.collect_orders(root, &mut entries.into(), 0, &mut orders);
        }
        orders
    }

    /// Continues the order that begins with the first `depth` entries.
    fn collect_orders<'e>(
        &self,
        node: u32,
        entries: &mut SmallVec<[Entry<'e>; 3]>,
        depth: usize,
        orders: &mut SmallVec<[SmallVec<[Entry<'e>; 3]>; 2]>,
    ) {
        if depth == entries.len() && self.rule_of(self.node(node)).is_some() {
            orders.push(entries.clone());
        }
        for next in depth..entries.len() {
            if orders.len() == 2 {
                return;
            }
            if let Some(child) = self.child_of(node, entries[next]) {
                // The entries after the next one keep their order.
                entries[depth..=next].rotate_right(1);
                self.collect_orders(child, entries, depth + 1, orders);
                entries[depth..=next].rotate_left(1);
            }
        }
    }

    pub(crate) fn domain_root(&self, domain: &str) -> Option<u32> {
        self.group(NO_PARENT, domain)?.1.any
    }

    /// Returns the child node that matches the entry.
    pub(crate) fn child_of(&self, parent: u32, entry: Entry<'_>) -> Option<u32> {
        if !self.node(parent).has_children {
            return None;
        }
        let (id, group) = self.group(parent, entry.key)?;
        if group.has_values
            && let Some(child) = self.exact_child(id, entry.value)
        {
            return Some(child);
        }
        if let Some(wildcards) = &group.wildcards
            && let Some(child) = wildcards.find(entry.value)
        {
            return Some(child);
        }
        group.any
    }

    pub(crate) fn group(&self, parent: u32, key: &str) -> Option<(u32, &Group)> {
        let hash = self.hasher.hash_one((parent, key));
        let id = *self.by_key.find(hash, |id| {
            let group = &self.groups[*id as usize];
            group.parent == parent && *group.key == *key
        })?;
        Some((id, &self.groups[id as usize]))
    }

    /// Returns the keys of the children of a node.
    pub(crate) fn keys_of_level(&self, parent: u32) -> impl Iterator<Item = &str> {
        self.groups.iter().filter(move |group| group.parent == parent).map(|group| &*group.key)
    }

    fn exact_child(&self, group: u32, value: &str) -> Option<u32> {
        let hash = self.hasher.hash_one((group, value));
        let (_, node) = self
            .by_value
            .find(hash, |(other_group, node)| *other_group == group && self.node(*node).exact_value() == Some(value))?;
        Some(*node)
    }

    pub(crate) fn rule_of(&self, node: &Node) -> Option<&Rule> {
        node.rule.map(|rule| &self.rules[rule as usize])
    }

    pub(crate) fn node(&self, id: u32) -> &Node {
        &self.nodes[id as usize]
    }
}

impl Plans {
    /// Returns the assignment of the entity with this entry.
    fn assignment(&self, entry: Entry<'_>) -> Option<&PlanAssignment> {
        self.entities.get(entry.key)?.get(entry.value)
    }
}

impl Plan {
    pub(crate) fn new(name: &str, plans: &Arc<Plans>) -> Self {
        Self { name: name.into(), plans: Arc::clone(plans) }
    }

    /// Returns whether the plan entry of the request contains a plan other than this one.
    #[must_use]
    pub fn is_other_plan_requested(&self, entries: &[Entry<'_>], path: &[&Node]) -> bool {
        for (entry, node) in entries.iter().zip(path) {
            if node.modifier == Some(ModifierEntry::Plan) {
                return *entry.value != *self.name;
            }
        }
        false
    }
}

impl Rule {
    /// Returns the name of the rule's policy in headers: the name of the limit, or the labels of the levels without the
    /// plan.
    ///
    /// The name is built at the first call, because most of a hundred thousand rules never match a request.
    #[must_use]
    pub fn policy(&self) -> &Arc<str> {
        self.policy.get_or_init(|| match &self.name {
            Some(name) => Arc::clone(name),
            None => self.labels_without_plan().unwrap_or(&self.labels)[1..].join(".").into(),
        })
    }

    /// Returns the labels without that of the plan, or `None` for a rule without plans.
    #[must_use]
    pub fn labels_without_plan(&self) -> Option<&[Arc<str>]> {
        self.plan.as_ref()?;
        self.labels.split_last().map(|(_, labels)| labels)
    }

    /// Returns the domain and the labels of the levels, separated by dots, as `/rlconfig` prints them.
    #[must_use]
    pub fn path(&self) -> String {
        self.labels.join(".")
    }

    /// Returns the number of modifier entries at the end of the path.
    #[must_use]
    pub fn modifier_count(path: &[&Node]) -> usize {
        path.iter().rev().take_while(|node| node.modifier.is_some()).count()
    }

    /// Returns the index of a class in the limit's class table. Classes that are not listed have the last index.
    #[must_use]
    pub fn class(&self, name: &str) -> usize {
        self.classes.iter().position(|class| **class == *name).unwrap_or(self.classes.len())
    }
}

impl Node {
    /// Returns the value that matches this node before any pattern is tested. The text of a pattern matches itself.
    fn exact_value(&self) -> Option<&str> {
        match &self.segment {
            Segment::Value(text) | Segment::Pattern(text) | Segment::Shared(text) => Some(text),
            Segment::Any => None,
        }
    }

    /// Returns the level's label in statistics: `key` or `key_value`, as in the file.
    #[must_use]
    pub fn label(&self) -> String {
        match self.exact_value() {
            Some(value) => format!("{}_{value}", self.key),
            None => self.key.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Options, SourceFile, compile};

    fn rules(text: String) -> RuleSet {
        compile(&[SourceFile { name: "d.yaml".into(), text }], Options::default()).unwrap().0
    }

    #[test]
    fn an_elastic_limit_decreases_from_its_maximum_to_the_own_limit_between_idle_and_busy() {
        let limit = "unit: day, requests_per_unit: 100, algorithm: token_bucket, burst: 10";
        let elastic = "{resource: db, up_to: 300%, idle: 25%, busy: 75%}";
        let set = rules(format!("domain: d\ndescriptors: [{{key: k, rate_limit: {{{limit}, elastic: {elastic}}}}}]"));
        let elastic = set.rules()[0].elastic.as_deref().unwrap();
        for (utilization, expected) in [
            (0.0, Some((300, 30))),
            (0.25, Some((300, 30))),
            (0.5, Some((200, 20))),
            (0.6875, Some((124, 12))),
            (0.75, None),
            (1.0, None),
        ] {
            let requests_and_burst = elastic.at(utilization).map(|limit| (limit.requests(), limit.policy().0));
            assert_eq!(requests_and_burst, expected, "{utilization}");
        }
    }

    #[test]
    fn entries_without_an_order_are_ordered_like_the_rules() {
        let limit = "rate_limit: {unit: day, requests_per_unit: 1}";
        let set = rules(format!(
            "domain: d\ndescriptors:\n- {{key: b, descriptors: [{{key: a, {limit}}}, {{key: c, descriptors: [{{key: a, {limit}}}]}}]}}\n\
             - {{key: c, value: x, descriptors: [{{key: b, descriptors: [{{key: a, {limit}}}]}}]}}\n"
        ));
        let orders = |text: &str| {
            let entries: Vec<_> = text.split(' ').map(|entry| entry.split_once('=').unwrap()).collect();
            let entries: Vec<_> = entries.iter().map(|(key, value)| Entry { key, value }).collect();
            let keys = |order: &SmallVec<[Entry<'_>; 3]>| order.iter().map(|entry| entry.key).collect::<String>();
            set.orders("d", &entries).iter().map(keys).collect::<Vec<_>>()
        };
        assert_eq!(orders("a=1 b=2"), ["ba"]);
        assert_eq!(orders("a=1 b=2 c=3"), ["bca"]);
        assert_eq!(orders("a=1 b=2 c=x"), ["bca", "cba"], "both orders have a rule");
        assert_eq!(orders("b=2"), [""; 0], "the level has no limit");
        assert_eq!(orders("a=1 d=2"), [""; 0]);
        assert_eq!(set.orders("other", &[Entry { key: "a", value: "1" }]).len(), 0);
    }

    #[test]
    fn a_value_never_matches_the_rule_of_another_value() {
        let rule = |number: u32| {
            format!("- {{key: k, value: v{number}, rate_limit: {{unit: day, requests_per_unit: {number}}}}}\n")
        };
        let set = rules(format!("domain: d\ndescriptors:\n{}", (1..=500).map(rule).collect::<String>()));
        for number in 1..=1_000 {
            let value = format!("v{number}");
            let rule = set.rule_for("d", &[Entry { key: "k", value: &value }]);
            let requests = rule.and_then(|rule| rule.limit.as_ref()).map(|limit| limit.requests());
            assert_eq!(requests, (number <= 500).then_some(number), "{value}");
        }
    }
}
