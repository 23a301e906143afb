//! A compiled set of rules: immutable, walked without locks and without allocation.
//!
//! One level of the walk is one or two hash probes, so its cost does not depend on how many rules there are.

use std::{
    collections::HashMap,
    hash::BuildHasher,
    sync::{Arc, OnceLock},
};

use foldhash::fast::RandomState;
use hashbrown::HashTable;
use smallvec::SmallVec;

use super::{
    diagnostic::Location,
    ip_prefix::IpPrefix,
    limit::{FailurePolicy, Limit},
    metadata::Metadata,
    wildcard::Wildcards,
};
use crate::algorithm::Consistency;

/// One key and value of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// The key.
    pub key: &'a str,
    /// The value; may be empty.
    pub value: &'a str,
}

/// A domain and levels, as statistics call them: `domain`, then `key` or `key_value` for each. What stands above a rule is shared
/// with those beside it.
pub type Labels = Arc<[Arc<str>]>;

/// A rule that a descriptor can end on: a limit, or the word that there is none.
#[derive(Debug)]
pub struct Rule {
    /// Its place among the set's rules.
    pub id: usize,
    /// `None`: unlimited. Rules that say the same share it.
    pub limit: Option<Arc<Limit>>,
    /// The limit's name, if it has one.
    pub name: Option<Arc<str>>,
    pub(super) policy: OnceLock<Arc<str>>,
    /// Names of the limits that this one takes out of a request.
    pub replaces: Vec<String>,
    /// Counted and measured, never enforced.
    pub shadow_mode: bool,
    /// Refuses only together with every other quota rule of the request.
    pub quota_mode: bool,
    /// Its statistics are kept per value of every level.
    pub detailed_metric: bool,
    /// What happens when the store cannot answer; `None`: as the settings say.
    pub on_error: Option<FailurePolicy>,
    /// What its answers may owe to what the shared counter has not been asked.
    pub consistency: Consistency,
    /// The limit as it stands depends on who asks: it has holders, or classes.
    pub needs_context: bool,
    /// The classes that share the limit, in the order in which it has them; the others are one more.
    pub classes: Box<[Box<str>]>,
    /// A refusal is overload, whoever caused it.
    pub sheds: bool,
    /// The limit with more and more above it, for while a resource has capacity to spare.
    pub elastic: Option<Box<Elastic>>,
    /// Whose plan the limit belongs to, and the rules of the other plans.
    pub plan: Option<Box<Plan>>,
    /// One instance's part of the limit, where that is less.
    pub divided_limit: Option<Arc<Limit>>,
    /// Free-form data for the response.
    pub metadata: Option<Metadata>,
    /// Its domain and levels.
    pub labels: Labels,
    /// Whether any level puts the caller's value into the statistics.
    pub dynamic_labels: bool,
    /// The file it stands in.
    pub file: Arc<str>,
    /// Where in the file.
    pub place: Location,
}

/// One level of a descriptor in the rules.
#[derive(Debug)]
pub struct Node {
    /// The key; levels that say the same share it.
    pub key: Arc<str>,
    /// What the level matches.
    pub segment: Segment,
    /// The caller's value goes into the statistics.
    pub value_to_metric: bool,
    /// The value is an address, and counted by its prefix.
    pub ip_prefix: Option<IpPrefix>,
    /// The value says something of the request, and is no part of the counter's name.
    pub modifier: Option<ModifierEntry>,
    pub(super) rule: Option<u32>,
    pub(super) has_children: bool,
    /// Where it was written.
    pub place: Location,
}

/// A limit that is higher while a resource has capacity to spare.
#[derive(Clone, Debug)]
pub struct Elastic {
    /// The resource's name.
    pub resource: Box<str>,
    /// Up to this utilization all of the extra is there.
    pub idle: f64,
    /// From this utilization on nothing is.
    pub busy: f64,
    /// The limit with a part of the extra, two parts, … up to all of it.
    pub steps: Box<[Limit]>,
}

impl Elastic {
    /// Into so many parts the extra is divided.
    pub const STEPS: usize = 50;

    /// The limit at this utilization of the resource: the lower, the more it is used, and `None` where nothing is to spare.
    #[must_use]
    pub fn at(&self, utilization: f64) -> Option<&Limit> {
        let spare = (self.busy - utilization) / (self.busy - self.idle);
        let parts = (spare.clamp(0.0, 1.0) * Self::STEPS as f64) as usize;
        self.steps.get(parts.checked_sub(1)?)
    }
}

/// A limit of one plan.
#[derive(Debug)]
pub struct Plan {
    /// The plan's name.
    pub name: Box<str>,
    /// The rules of all plans, by their names.
    all: Arc<Plans>,
}

/// The rules of a descriptor, of which a request's plan chooses one.
#[derive(Debug, Default)]
pub(super) struct Plans {
    pub(super) rules: HashMap<Box<str>, u32>,
    pub(super) entities: Arc<Entities>,
}

/// By an entry's key and value: its plan.
pub(super) type Entities = HashMap<Box<str>, HashMap<Box<str>, Box<str>>>;

/// What the value of a level says of a request, where it does not choose the counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModifierEntry {
    /// The plan that it belongs to.
    Plan,
    /// The class that it belongs to.
    Class,
    /// Who holds what it takes.
    Holder,
}

/// What a level matches.
#[derive(Debug, PartialEq, Eq)]
pub enum Segment {
    /// This value.
    Value(Box<str>),
    /// Values that fit the pattern, each counted by itself.
    Pattern(Box<str>),
    /// Values that fit the pattern, all on one counter.
    Shared(Box<str>),
    /// Any value.
    Any,
}

/// The levels that a descriptor went through, one for each of its entries.
pub type Path<'r> = SmallVec<[&'r Node; 6]>;

/// What the rules say of a descriptor.
#[derive(Debug)]
pub enum Lookup<'r> {
    /// No file names the domain.
    UnknownDomain,
    /// No rule matches, or the one that does has no limit.
    NoLimit,
    /// This rule applies.
    Rule(&'r Rule, Path<'r>),
}

/// All levels with one parent and one key.
pub(super) struct Group {
    parent: u32,
    key: Arc<str>,
    any: Option<u32>,
    has_values: bool,
    /// Boxed: few have any.
    wildcards: Option<Box<Wildcards>>,
}

/// What holds for all rules of a domain.
#[derive(Debug, Default)]
pub struct DomainSettings {
    /// Its requests are charged for all their limits or for none.
    pub charge_all: bool,
    /// Keys of the entries that choose a counter's shard; empty: all of the descriptor does.
    pub shard_by: Vec<Box<str>>,
}

/// A compiled set of rules.
#[derive(Default)]
pub struct RuleSet {
    nodes: Vec<Node>,
    groups: Vec<Group>,
    rules: Vec<Rule>,
    /// What domains say of themselves; most say nothing.
    domains: HashMap<Box<str>, DomainSettings, RandomState>,
    /// (parent node, key) → group. A domain is the key of a group without a parent.
    by_key: HashTable<u32>,
    /// (group, exact value) → (group, node).
    by_value: HashTable<(u32, u32)>,
    hasher: RandomState,
}

/// The parent of domains.
const NO_PARENT: u32 = u32::MAX;

impl RuleSet {
    /// Every rule, in the order of files and lines.
    #[must_use]
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// The same, to be changed where that makes no difference to what they mean.
    pub(crate) fn rules_mut(&mut self) -> &mut [Rule] {
        &mut self.rules
    }

    /// What holds for all rules of the domain; `None` for one that says nothing of itself.
    #[must_use]
    pub fn settings_of(&self, domain: &str) -> Option<&DomainSettings> {
        if self.domains.is_empty() { None } else { self.domains.get(domain) }
    }

    /// Whether there is any domain.
    #[must_use]
    pub fn has_domains(&self) -> bool {
        !self.groups.is_empty()
    }

    /// How many domains there are.
    #[must_use]
    pub fn domains(&self) -> usize {
        self.groups.iter().filter(|group| group.parent == NO_PARENT).count()
    }

    /// Walks the entries: at each level the exact value, else the first pattern that fits, else the bare key; never
    /// back to try another branch. A rule applies only where the last entry ends on it.
    #[must_use]
    pub fn find<'e>(&self, domain: &str, entries: impl Iterator<Item = Entry<'e>> + Clone) -> Lookup<'_> {
        let Some(mut at) = self.domain(domain) else {
            return Lookup::UnknownDomain;
        };
        let mut path = Path::new();
        for entry in entries.clone() {
            let Some(next) = self.child(at, entry) else {
                return Lookup::NoLimit;
            };
            path.push(self.node(next));
            at = next;
        }
        match self.rule_of(self.node(at)) {
            Some(rule @ Rule { plan: None, .. }) => Lookup::Rule(rule, path),
            Some(rule) => Lookup::Rule(self.of_plan(rule, entries, &path), path),
            None => Lookup::NoLimit,
        }
    }

    /// The rule of the request's plan: the one it names, or that of one of its entries. `default`: the rule of the default plan.
    pub(super) fn of_plan<'r, 'e>(
        &'r self,
        default: &'r Rule,
        entries: impl Iterator<Item = Entry<'e>>,
        path: &Path<'_>,
    ) -> &'r Rule {
        let Some(Plan { all, .. }) = default.plan.as_deref() else {
            return default;
        };
        let (mut named, mut mapped) = (None, None);
        for (entry, node) in entries.zip(path) {
            if node.modifier == Some(ModifierEntry::Plan) {
                named = Some(entry.value);
            } else if let Some(entities) = all.entities.get(entry.key) {
                mapped = entities.get(entry.value).map(|plan| &**plan).or(mapped);
            }
        }
        let rule = named.or(mapped).and_then(|name| all.rules.get(name));
        rule.map_or(default, |rule| &self.rules[*rule as usize])
    }

    /// The rule that a descriptor ends on.
    #[must_use]
    pub fn rule_for(&self, domain: &str, entries: &[Entry<'_>]) -> Option<&Rule> {
        if let Lookup::Rule(rule, _) = self.find(domain, entries.iter().copied()) { Some(rule) } else { None }
    }

    /// The rule of the plan of this name, where there is one for the same descriptor.
    #[must_use]
    pub fn of_named_plan(&self, rule: &Rule, name: &str) -> Option<&Rule> {
        let id = rule.plan.as_ref()?.all.rules.get(name)?;
        self.rules.get(*id as usize)
    }

    pub(super) fn domain(&self, domain: &str) -> Option<u32> {
        self.group(NO_PARENT, domain)?.1.any
    }

    /// The level that the entry leads to.
    pub(super) fn child(&self, parent: u32, entry: Entry<'_>) -> Option<u32> {
        if !self.node(parent).has_children {
            return None;
        }
        let (id, group) = self.group(parent, entry.key)?;
        let exact = || group.has_values.then(|| self.value(id, entry.value)).flatten();
        exact().or_else(|| group.wildcards.as_ref()?.find(entry.value)).or(group.any)
    }

    pub(super) fn group(&self, parent: u32, key: &str) -> Option<(u32, &Group)> {
        let same = |id: &u32| {
            let group = &self.groups[*id as usize];
            group.parent == parent && *group.key == *key
        };
        let id = *self.by_key.find(self.hasher.hash_one((parent, key)), same)?;
        Some((id, &self.groups[id as usize]))
    }

    fn value(&self, group: u32, value: &str) -> Option<u32> {
        let same = |(of, node): &(u32, u32)| *of == group && self.node(*node).exact_value() == Some(value);
        let (_, node) = self.by_value.find(self.hasher.hash_one((group, value)), same)?;
        Some(*node)
    }

    pub(super) fn rule_of(&self, node: &Node) -> Option<&Rule> {
        node.rule.map(|rule| &self.rules[rule as usize])
    }

    pub(super) fn node(&self, id: u32) -> &Node {
        &self.nodes[id as usize]
    }
}

impl Plan {
    pub(super) fn new(name: &str, all: &Arc<Plans>) -> Self {
        Self { name: name.into(), all: Arc::clone(all) }
    }

    /// Whether the request names another.
    #[must_use]
    pub fn is_assigned_only(&self, entries: &[Entry<'_>], path: &[&Node]) -> bool {
        let mut named = entries.iter().zip(path).filter(|(_, node)| node.modifier == Some(ModifierEntry::Plan));
        named.next().is_some_and(|(entry, _)| *entry.value != *self.name)
    }
}

impl Rule {
    /// The name of its policy in headers: the limit's, or its levels', without the plan. Made when it is first asked for: of a
    /// hundred thousand rules most are never met.
    #[must_use]
    pub fn policy(&self) -> &Arc<str> {
        self.policy.get_or_init(|| match &self.name {
            Some(name) => Arc::clone(name),
            None => self.labels[1..self.labels.len() - usize::from(self.plan.is_some())].join(".").into(),
        })
    }

    /// How many entries at the end say who asks, and do not choose the counter.
    #[must_use]
    pub fn modifier_count(path: &[&Node]) -> usize {
        path.iter().rev().take_while(|node| node.modifier.is_some()).count()
    }

    /// The place of a class among those that share the limit: of those that are not listed, the last.
    #[must_use]
    pub fn class(&self, name: &str) -> usize {
        self.classes.iter().position(|class| **class == *name).unwrap_or(self.classes.len())
    }
}

impl Node {
    /// What a value must equal to be taken here before any pattern is tried; a pattern matches itself, too.
    fn exact_value(&self) -> Option<&str> {
        match &self.segment {
            Segment::Value(text) | Segment::Pattern(text) | Segment::Shared(text) => Some(text),
            Segment::Any => None,
        }
    }

    /// The statistics' word for the level: `key` or `key_value`, as in the file.
    #[must_use]
    pub fn label(&self) -> String {
        match self.exact_value() {
            Some(value) => format!("{}_{value}", self.key),
            None => self.key.to_string(),
        }
    }
}

/// How a set is put together; `compile` is the only caller.
impl RuleSet {
    /// The domain's root, made if need be.
    pub(super) fn add_domain(&mut self, domain: &str) -> u32 {
        if let Some(root) = self.domain(domain) {
            return root;
        }
        let domain = Arc::from(domain);
        let root = self.add_node(&domain, Segment::Any, Location::default());
        let group = self.add_group(NO_PARENT, &domain);
        self.groups[group as usize].any = Some(root);
        root
    }

    /// Adds to what holds for the domain; an error with the `shard_by` that another file gave it, if that differs.
    pub(super) fn set_domain(&mut self, domain: &str, charge_all: bool, shard_by: &[String]) -> Result<(), String> {
        if !charge_all && shard_by.is_empty() {
            return Ok(());
        }
        let settings = self.domains.entry(domain.into()).or_default();
        settings.charge_all |= charge_all;
        let same = settings.shard_by.iter().map(|key| &**key).eq(shard_by.iter().map(String::as_str));
        if shard_by.is_empty() || same {
            return Ok(());
        }
        if !settings.shard_by.is_empty() {
            return Err(settings.shard_by.join(", "));
        }
        settings.shard_by = shard_by.iter().map(|key| key.as_str().into()).collect();
        Ok(())
    }

    /// A level below `parent`; an error with the one that is there when it is taken.
    pub(super) fn add_child(
        &mut self,
        parent: u32,
        key: &Arc<str>,
        segment: Segment,
        place: Location,
    ) -> Result<u32, Location> {
        let group = self.group(parent, key).map(|(id, _)| id);
        let group = group.unwrap_or_else(|| self.add_group(parent, key));
        let taken = match &segment {
            Segment::Any => self.groups[group as usize].any,
            Segment::Value(value) | Segment::Pattern(value) | Segment::Shared(value) => self.value(group, value),
        };
        if let Some(taken) = taken {
            return Err(self.node(taken).place);
        }
        let id = self.add_node(key, segment, place);
        self.nodes[parent as usize].has_children = true;
        let entry = &mut self.groups[group as usize];
        let value = match &self.nodes[id as usize].segment {
            Segment::Any => {
                entry.any = Some(id);
                return Ok(id);
            }
            Segment::Value(value) => value,
            Segment::Pattern(pattern) | Segment::Shared(pattern) => {
                entry.wildcards.get_or_insert_default().insert(pattern, id);
                pattern
            }
        };
        entry.has_values = true;
        let (nodes, hasher) = (&self.nodes, &self.hasher);
        let rehash = |(group, node): &(u32, u32)| {
            hasher.hash_one((*group, nodes[*node as usize].exact_value().unwrap_or_default()))
        };
        self.by_value.insert_unique(hasher.hash_one((group, &**value)), (group, id), rehash);
        Ok(id)
    }

    /// Puts a rule on levels.
    pub(super) fn add_rule(&mut self, nodes: &[u32], rule: Rule) {
        let id = u32::try_from(self.rules.len()).ok();
        nodes.iter().for_each(|node| self.nodes[*node as usize].rule = id);
        self.rules.push(rule);
    }

    /// Gives back what was set aside for more.
    pub(super) fn shrink(&mut self) {
        self.nodes.shrink_to_fit();
        self.groups.shrink_to_fit();
        self.rules.shrink_to_fit();
    }

    pub(super) fn node_mut(&mut self, id: u32) -> &mut Node {
        &mut self.nodes[id as usize]
    }

    fn add_node(&mut self, key: &Arc<str>, segment: Segment, place: Location) -> u32 {
        let node = Node {
            key: Arc::clone(key),
            segment,
            value_to_metric: false,
            ip_prefix: None,
            modifier: None,
            rule: None,
            has_children: false,
            place,
        };
        self.nodes.push(node);
        (self.nodes.len() - 1) as u32
    }

    fn add_group(&mut self, parent: u32, key: &Arc<str>) -> u32 {
        let id = self.groups.len() as u32;
        self.groups.push(Group { parent, key: Arc::clone(key), any: None, has_values: false, wildcards: None });
        let (groups, hasher) = (&self.groups, &self.hasher);
        let hash = |id: &u32| hasher.hash_one((groups[*id as usize].parent, &*groups[*id as usize].key));
        self.by_key.insert_unique(hash(&id), id, hash);
        id
    }
}
